//! Payment channels on a chain, over JSON-RPC.

mod builder;
mod claim;
mod deposit;
mod refund;

use std::{sync::Arc, time::Duration};

use alloy_primitives::{Address, B256, Bytes};
use alloy_sol_types::SolCall;
use async_trait::async_trait;
use tokio::time::sleep;

pub use self::builder::OnchainChannelsBuilder;
use super::{ChannelError, ChannelFacilitator, Claimed, Executed, Settled, SignedRefund};
use crate::{
    chain::{
        batch::MAX_TRANSACTION_GAS,
        escrow,
        node::Node,
        rpc::{Receipt, RpcFailure},
    },
    clock::Clock,
    facilitator::{FacilitatorError, single_flight::SingleFlight},
    network::{Asset, Network},
    settlement::{
        caller::{CallOutcome, Caller},
        confirmation::Depths,
        submitter::Call,
    },
    vouchers::{
        AuthorizerKey, ChannelConfig, ChannelId, ChannelObservation, Claim, Deposit, Escrow, abi::BatchSettlement,
        reason,
    },
};

/// Gas that a transaction may use beyond its simulation, since the chain has moved on meanwhile. Unused gas is not paid for.
const GAS_MARGIN: u64 = 60_000;
/// How often an action is simulated and sent anew because its transaction reverted.
const ATTEMPTS: usize = 2;
/// How often a node is asked for the state after a block that it just showed. Behind one address there may be several nodes.
const READS_AFTER: usize = 8;

/// Reads and moves the money of payment channels on one chain, with one or more keys that pay for gas.
///
/// The keys hold no customer's money, and must not be used by anybody else, an
/// [`OnchainFacilitator`](crate::facilitator::OnchainFacilitator) included: account nonces are counted in this process. Transactions of a
/// process that crashed are not followed further; what they did is found on the chain.
///
/// - **Reading** takes one `eth_call` for 400 channels, through [Multicall3]. The chain's opcode `NUMBER` must return its own block number,
///   which it does not on Arbitrum.
/// - **Acting** takes a read, a simulation (`eth_estimateGas`), the transaction, and a read of the channel after it. A transaction that hangs
///   is replaced at a higher fee.
/// - **Results** come from the contract's events. Repeated actions are found on the chain.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> anyhow::Result<()> {
/// use tower_x402::{
///     Network,
///     devnet::Devnet,
///     facilitator::channels::{ChannelFacilitator, OnchainChannels},
///     primitives::{Address, B256, U256},
///     signers::PrivateKeySigner,
///     vouchers::{ChannelConfig, Escrow},
/// };
///
/// let devnet = Devnet::start().await?;
/// let gas_key = PrivateKeySigner::random();
/// devnet.fund(gas_key.address(), U256::from(10).pow(U256::from(18)));
/// let channels = OnchainChannels::builder()
///     .network(Network::BASE_SEPOLIA)
///     .client(devnet.rpc_client())
///     .signer(gas_key)
///     .build()
///     .await?;
///
/// let config = ChannelConfig {
///     payer: Address::repeat_byte(1),
///     payer_authorizer: Address::repeat_byte(2),
///     receiver: Address::repeat_byte(3),
///     receiver_authorizer: Address::repeat_byte(4),
///     token: Network::BASE_SEPOLIA.usdc().expect("known").address,
///     withdraw_delay: 900,
///     salt: B256::ZERO,
/// };
/// let id = Escrow::on(Network::BASE_SEPOLIA).channel_id(&config);
/// let observed = channels.observe(&[id]).await?;
/// assert_eq!(observed[0].state.balance, 0, "nothing was deposited yet");
/// // Nothing was claimed for this receiver, so nothing is transferred.
/// assert_eq!(channels.settle(config.receiver, config.token).await?, None);
/// # Ok(())
/// # }
/// ```
///
/// [Multicall3]: https://github.com/mds1/multicall3
#[derive(Clone, Debug)]
pub struct OnchainChannels(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    node: Arc<Node>,
    escrow: Escrow,
    assets: Vec<Asset>,
    clock: Arc<dyn Clock>,
    /// In seconds.
    max_block_age: u64,
    /// The blocks that must be on top of a deposit's, by its amount.
    depths: Depths,
    confirm_timeout: Duration,
    caller: Arc<Caller>,
    /// One run per deposit, so that copies of it share a transaction.
    deposits: Arc<SingleFlight<B256, Result<Executed, ChannelError>>>,
}

impl OnchainChannels {
    /// Returns a builder with the default settings.
    pub fn builder() -> OnchainChannelsBuilder {
        OnchainChannelsBuilder::default()
    }
}

impl Inner {
    /// Fails if the token is not served.
    fn asset(&self, token: Address) -> Result<&Asset, ChannelError> {
        self.assets.iter().find(|asset| asset.address == token).ok_or_else(|| {
            ChannelError::rejected(reason::TOKEN_MISMATCH, format!("the token {token} is not served here"))
        })
    }

    /// The first sender, as which calls are simulated.
    fn sender(&self) -> Address {
        self.caller.addresses().next().unwrap_or_default()
    }

    /// Simulates a call of the contract. Returns the gas limit for it, or why it reverts.
    async fn simulate(&self, from: Address, input: &Bytes) -> Result<Result<u64, String>, ChannelError> {
        let estimate = self.node.rpc().estimate_gas(from, Escrow::ADDRESS, input).await.map_err(unavailable)?;
        Ok(estimate
            .map(|gas| gas.saturating_add(gas / 8).saturating_add(GAS_MARGIN).min(MAX_TRANSACTION_GAS))
            .map_err(|revert| escrow::describe(&revert)))
    }

    /// Sends a call of the contract and waits for its block.
    async fn send(&self, input: Bytes, gas_limit: u64) -> Result<Receipt, ChannelError> {
        match self.caller.call(Call { to: Escrow::ADDRESS, input, gas_limit }).await? {
            CallOutcome::Included(receipt) => Ok(receipt),
            CallOutcome::Pending(transaction) => Err(ChannelError::Pending { transaction }),
        }
    }

    /// Fails if a block is so old that the node, whose newest it is, must have fallen behind.
    fn check_age(&self, block_time: u64) -> Result<(), ChannelError> {
        let age = self.clock.now().saturating_sub(block_time);
        if age <= self.max_block_age {
            return Ok(());
        }
        tracing::warn!(age, "the node's newest block is too old to rely on; see max_block_age");
        let what = "a node that has the newest blocks";
        Err(FacilitatorError::Unreachable { what, retry_after: Duration::from_secs(5) }.into())
    }

    async fn observe(&self, channels: &[ChannelId]) -> Result<Vec<ChannelObservation>, ChannelError> {
        let (observed, time) = escrow::observe_with_time(self.node.rpc(), channels, None).await.map_err(unavailable)?;
        time.map_or(Ok(()), |time| self.check_age(time))?;
        if let Some(first) = observed.first() {
            self.node.observe_block(first.block);
        }
        Ok(observed)
    }

    async fn observe_one(&self, channel: ChannelId) -> Result<ChannelObservation, ChannelError> {
        self.observe(&[channel]).await?.pop().ok_or_else(|| unavailable(RpcFailure::Silent))
    }

    /// Reads channels as of a block that is known to exist. Returns `None` if no node shows it in time.
    async fn observe_at(&self, channels: &[ChannelId], block: u64) -> Option<Vec<ChannelObservation>> {
        for _ in 0..READS_AFTER {
            match escrow::observe(self.node.rpc(), channels, Some(block)).await {
                Ok(observed) => return Some(observed),
                Err(_) => sleep(self.node.poll_interval()).await,
            }
        }
        None
    }

    async fn settle(&self, receiver: Address, token: Address) -> Result<Option<Settled>, ChannelError> {
        self.asset(token)?;
        let input = Bytes::from(BatchSettlement::settleCall { receiver, token }.abi_encode());
        for _ in 0..ATTEMPTS {
            if self.unsettled(receiver, token).await? == 0 {
                return Ok(None);
            }
            let simulated = self.simulate(self.sender(), &input).await?;
            let gas = simulated.map_err(|why| ChannelError::rejected(reason::SETTLE_SIMULATION_FAILED, why))?;
            let receipt = self.send(input.clone(), gas).await?;
            if !receipt.succeeded() {
                continue;
            }
            let moved = escrow::events::<BatchSettlement::Settled>(&receipt)
                .find(|event| event.receiver == receiver && event.token == token && event.amount > 0);
            return match moved {
                Some(event) => Ok(Some(Settled { transaction: receipt.transaction_hash, amount: event.amount })),
                // Somebody else's transaction came first.
                None if self.unsettled(receiver, token).await? == 0 => Ok(None),
                None => Err(ChannelError::Pending { transaction: Some(receipt.transaction_hash) }),
            };
        }
        Err(ChannelError::rejected(reason::SETTLE_TRANSACTION_FAILED, "the transaction reverted"))
    }

    async fn unsettled(&self, receiver: Address, token: Address) -> Result<u128, ChannelError> {
        escrow::unsettled(self.node.rpc(), receiver, token).await.map_err(unavailable)
    }
}

fn unavailable(failure: RpcFailure) -> ChannelError {
    FacilitatorError::from(failure).into()
}

#[async_trait]
impl ChannelFacilitator for OnchainChannels {
    fn network(&self) -> Network {
        self.0.escrow.network()
    }

    fn senders(&self) -> Vec<Address> {
        self.0.caller.addresses().collect()
    }

    async fn observe(&self, channels: &[ChannelId]) -> Result<Vec<ChannelObservation>, ChannelError> {
        self.0.observe(channels).await
    }

    async fn verify_deposit(
        &self,
        config: &ChannelConfig,
        deposit: &Deposit,
    ) -> Result<ChannelObservation, ChannelError> {
        self.0.verify_deposit(config, deposit).await
    }

    async fn deposit(&self, config: &ChannelConfig, deposit: &Deposit) -> Result<Executed, ChannelError> {
        deposit::execute(&self.0, config, deposit).await
    }

    async fn claim(&self, claims: &[Claim], authorizer: &AuthorizerKey) -> Result<Claimed, ChannelError> {
        self.0.claim(claims, authorizer).await
    }

    async fn claim_signed(&self, claims: &[Claim], signature: &Bytes) -> Result<Claimed, ChannelError> {
        self.0.claim_signed(claims, signature).await
    }

    async fn settle(&self, receiver: Address, token: Address) -> Result<Option<Settled>, ChannelError> {
        self.0.settle(receiver, token).await
    }

    async fn refund_signed(&self, refund: &SignedRefund) -> Result<Executed, ChannelError> {
        self.0.refund(refund).await
    }
}
