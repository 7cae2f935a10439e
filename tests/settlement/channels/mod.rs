//! Payment channels on the chain through `OnchainChannels`: what it reads, sends, refuses and finds again.

mod actions;
mod faults;
mod gas;
mod line;
mod one_key;
mod passes;
mod pauses;
mod refusals;
pub(crate) mod service;
mod starvation;

use alloy_primitives::U256;
use alloy_signer_local::PrivateKeySigner;
use support::chain::Chain;
use tower_x402::{
    Network,
    facilitator::channels::{ChannelError, OnchainChannels, OnchainChannelsBuilder, RefundOrder},
    vouchers::{AuthorizerKey, Claim},
};

use support::escrow::{Channel, install};

/// What pays for gas in these tests.
async fn gas_key(chain: &dyn Chain) -> PrivateKeySigner {
    let key = PrivateKeySigner::random();
    chain.fund(key.address(), U256::from(10).pow(U256::from(20))).await;
    key
}

fn builder(chain: &dyn Chain) -> OnchainChannelsBuilder {
    OnchainChannels::builder().network(Network::BASE_SEPOLIA).rpc_url(chain.rpc_url())
}

async fn channels(chain: &dyn Chain) -> OnchainChannels {
    install(chain).await;
    builder(chain).signer(gas_key(chain).await).build().await.expect("the chain has the contracts")
}

fn authorizer(channel: &Channel) -> AuthorizerKey {
    AuthorizerKey::new(channel.authorizer.clone())
}

fn order(channel: &Channel, amount: u128, nonce: u128, claim: Option<Claim>) -> RefundOrder {
    RefundOrder { config: channel.config, voucher: channel.voucher(1), amount, nonce, claim }
}

/// The code of a refusal.
#[track_caller]
fn reason<T: std::fmt::Debug>(result: Result<T, ChannelError>) -> &'static str {
    match result {
        Err(ChannelError::Rejected { reason, .. }) => reason,
        other => panic!("not refused: {other:?}"),
    }
}
