//! Paying by permit (scheme `upto`): whether Permit2 may move so much of the payer's tokens.

#[cfg(feature = "onchain")]
use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use alloy_primitives::{Address, U256};
#[cfg(feature = "onchain")]
use alloy_rpc_client::RpcClient;

use crate::protocol::ExactOffer;
#[cfg(feature = "onchain")]
use crate::{
    chain::{permit, rpc::Rpc},
    network::Network,
};

/// How long a node is waited for.
#[cfg(feature = "onchain")]
const TIMEOUT: Duration = Duration::from_secs(10);

/// How a payer pays at most a price (scheme `upto`).
///
/// Permit2 moves the payer's tokens, as far as the payer has let it by the token's `approve(0x000000000022D473030F116dDEE9F6B43aC78BA3,
/// amount)`. Whoever gets a signature for Permit2 out of the payer can take what is approved, so approve no more than what it should spend
/// for a while.
///
/// With a [`node`](Self::node), the payer looks at what is approved, and does not sign where that is too little. Without one it signs, and
/// learns from the seller's answer (412).
///
/// ```
/// # #[cfg(feature = "local-signer")] {
/// use alloy_signer_local::PrivateKeySigner;
/// use tower_x402::client::{Payer, PermitPolicy};
///
/// let payer = Payer::builder(PrivateKeySigner::random()).upto(PermitPolicy::default()).build();
/// # }
/// ```
#[derive(Clone, Default)]
pub struct PermitPolicy {
    #[cfg(feature = "onchain")]
    nodes: Vec<(Network, Rpc)>,
    /// What was approved when it was looked at last, without what was signed for since.
    #[cfg(feature = "onchain")]
    approved: Arc<Mutex<HashMap<(Network, Address), U256>>>,
}

impl PermitPolicy {
    /// Looks at what is approved at this node of `network`, before a permit is signed there. It is asked once for as many permits as what is
    /// approved covers.
    #[cfg(feature = "onchain")]
    #[must_use]
    pub fn node(mut self, network: Network, client: RpcClient) -> Self {
        self.nodes.push((network, Rpc::new(client, TIMEOUT)));
        self
    }

    /// Returns what the payer has approved, if that is known to be less than an offer is for. It counts as used from now on, if it is not.
    #[cfg(feature = "onchain")]
    pub(super) async fn short_of(&self, payer: Address, offer: &ExactOffer) -> Option<U256> {
        let network = offer.network();
        let (_, rpc) = self.nodes.iter().find(|(of, _)| *of == network)?;
        let (token, needed) = (offer.asset.address, offer.amount);
        if self.take((network, token), needed) {
            return None;
        }
        let approved = permit::allowance(rpc, token, payer).await.inspect_err(|error| {
            tracing::warn!(?error, %network, "what is approved for Permit2 could not be looked at");
        });
        let approved = approved.ok()?;
        self.approved().insert((network, token), approved);
        if self.take((network, token), needed) { None } else { Some(approved) }
    }

    #[cfg(not(feature = "onchain"))]
    pub(super) async fn short_of(&self, _: Address, _: &ExactOffer) -> Option<U256> {
        None
    }

    /// Returns `true` if what is known to be approved covers this, and takes it off.
    #[cfg(feature = "onchain")]
    fn take(&self, token: (Network, Address), needed: U256) -> bool {
        let mut approved = self.approved();
        let Some(left) = approved.get_mut(&token).filter(|left| **left >= needed) else { return false };
        *left -= needed;
        true
    }

    #[cfg(feature = "onchain")]
    fn approved(&self) -> MutexGuard<'_, HashMap<(Network, Address), U256>> {
        self.approved.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

debug_fields!(PermitPolicy {});
