//! Payment channels on a chain, over JSON-RPC.

mod builder;
mod checks;
mod claim;
mod deposit;
mod refund;
mod sender;

use std::{mem, sync::Arc, time::Duration};

use alloy_primitives::{Address, B256, Bytes, keccak256};
use alloy_sol_types::SolCall;
use async_trait::async_trait;
use tokio::time::{Instant, sleep};

pub use self::builder::OnchainChannelsBuilder;
use self::checks::{Checks, Promises, Reverts};
pub(in crate::facilitator) use self::sender::{Sender, Turn};
use super::{ChannelError, ChannelFacilitator, Claimed, Executed, Settled, SignedRefund, gas};
use crate::{
    chain::{
        escrow,
        node::Node,
        rpc::{Receipt, RpcFailure},
    },
    clock::Clock,
    facilitator::{FacilitatorError, NotReady, Readiness, single_flight::SingleFlight},
    network::{Asset, Network},
    settlement::{confirmation::Depths, costs::PayerBackoff, line::Urgency, load::Call},
    telemetry,
    vouchers::{
        AuthorizerKey, ChannelConfig, ChannelId, ChannelObservation, ChannelPayload, Claim, Deposit, Escrow, Voucher,
        abi::BatchSettlement, reason,
    },
};

/// Gas that a transaction may use beyond its simulation, since the chain has moved on meanwhile. Unused gas is not paid for.
const GAS_MARGIN: u64 = 60_000;
/// How old the newest block of a node may be, unless set.
const MAX_BLOCK_AGE: Duration = Duration::from_secs(120);
/// How long to wait for the result of a facilitator, at least.
#[cfg(feature = "remote")]
const REMOTE_TIMEOUT: Duration = Duration::from_secs(15);
/// How often an action is simulated and sent anew because its transaction reverted.
const ATTEMPTS: usize = 2;
/// How often a node is asked for the state after a block that it just showed. Behind one address there may be several nodes.
const READS_AFTER: usize = 8;

/// Reads and moves the money of payment channels on one chain, with one or more keys that pay for gas.
///
/// `RemoteFacilitator::channels` (feature `remote`) makes one without keys: somebody else's facilitator
/// sends its transactions.
///
/// The keys hold no customer's money. They are those of an [`OnchainFacilitator`](crate::facilitator::OnchainFacilitator), which journals what
/// is sent ([`facilitator`](OnchainChannelsBuilder::facilitator)), or keys that nobody else may use
/// ([`signer`](OnchainChannelsBuilder::signer)): what they send is journalled in memory, and transactions of a process that crashed are not
/// followed further. What was done is found on the chain.
///
/// - **Reading** takes one `eth_call` for 400 channels, through [Multicall3]. The chain's opcode `NUMBER` must return its own block number,
///   which it does not on Arbitrum.
/// - **Acting** takes a read, a simulation (`eth_estimateGas`), the transaction, and a read of the channel after it. A transaction that hangs
///   is replaced at a higher fee.
/// - **Gas** is bounded, whatever code payers and authorizers have: 400,000 for a deposit, 150,000 and 60,000 for each of its rows for a claim,
///   300,000 for a refund, 200,000 for a transfer to the receiver. What is simulated with more is refused.
/// - **Results** come from the contract's events. Repeated actions are found on the chain.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> anyhow::Result<()> {
/// use tower_x402::{
///     Network,
///     facilitator::channels::{ChannelFacilitator, OnchainChannels},
///     primitives::{Address, B256, U256},
///     signers::PrivateKeySigner,
///     vouchers::{ChannelConfig, Escrow},
/// };
/// use x402_devnet::Devnet;
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
    rules: BlockRules,
    sender: Arc<dyn Sender>,
    /// The deposits that are checked.
    checks: Checks,
    /// What payers have promised by deposits that are under way.
    promises: Arc<Promises>,
    /// The payers whose deposits reverted.
    deposit_backoff: PayerBackoff,
    /// The deposits of all payers that reverted.
    reverts: Reverts,
    /// The payers whose refunds reverted.
    refund_backoff: PayerBackoff,
    /// One run per deposit, so that copies of it share a transaction.
    deposits: Arc<SingleFlight<B256, Result<Executed, ChannelError>>>,
}

/// When a block is relied on.
#[derive(Debug)]
pub(in crate::facilitator) struct BlockRules {
    /// How old the newest block may be, in seconds.
    max_age: u64,
    /// The blocks that must be on top of a deposit's, by its amount.
    depths: Depths,
    /// How long to wait for a receipt, and then for those blocks.
    timeout: Duration,
}

impl BlockRules {
    /// The default rules, for a facilitator that may take so long.
    #[cfg(feature = "remote")]
    pub(in crate::facilitator) fn within(timeout: Duration) -> Self {
        Self { max_age: MAX_BLOCK_AGE.as_secs(), depths: Depths::default(), timeout: timeout.max(REMOTE_TIMEOUT) }
    }
}

impl OnchainChannels {
    /// Returns a builder with the default settings.
    pub fn builder() -> OnchainChannelsBuilder {
        OnchainChannelsBuilder::default()
    }

    /// Has this sender make what this node shows.
    pub(in crate::facilitator) fn new(
        node: Arc<Node>,
        assets: Vec<Asset>,
        clock: Arc<dyn Clock>,
        sender: Arc<dyn Sender>,
        rules: BlockRules,
    ) -> Self {
        let escrow = Escrow::on(node.network());
        let (checks, promises, deposit_backoff, reverts) = Default::default();
        let (refund_backoff, deposits) = Default::default();
        Self(Arc::new(Inner {
            node,
            escrow,
            assets,
            clock,
            rules,
            sender,
            checks,
            promises,
            deposit_backoff,
            reverts,
            refund_backoff,
            deposits,
        }))
    }
}

/// The attempts at one action. Before and after each the chain is read: somebody else may have made it, or a transaction of which nothing
/// was heard any more.
#[derive(Default)]
struct Attempts {
    made: usize,
    /// Gas of transactions that reverted.
    wasted: u64,
    /// Whether the last transaction reverted.
    has_reverted: bool,
    failure: Option<ChannelError>,
}

impl Attempts {
    /// Returns what was read before the next attempt. If it could not be, the last attempt's failure says more.
    fn read<T>(&mut self, read: Result<T, ChannelError>) -> Result<T, ChannelError> {
        read.map_err(|error| self.failure.take().unwrap_or(error))
    }

    /// Fails if there is no next attempt.
    fn next(&mut self) -> Result<(), ChannelError> {
        self.made += 1;
        self.failure.take().map_or(Ok(()), Err)
    }

    /// The same for an action that reverts at the cost of the sender's gas, and not at the payer's: a payer for whom it did so again and
    /// again has to wait. To be called when the chain shows that the action is not made: had another process made it first, the revert
    /// would not count.
    fn next_for(&mut self, payer: Address, backoff: &PayerBackoff, what: &'static str) -> Result<(), ChannelError> {
        if mem::take(&mut self.has_reverted) {
            backoff.note_revert(payer);
        }
        if self.made == 0 && backoff.rejection(payer).is_some() {
            return Err(FacilitatorError::Busy { what, retry_after: Duration::from_secs(30) }.into());
        }
        self.next()
    }

    /// Returns how much of the `most` gas that the action may cost is left for its next transaction.
    fn gas_left(&self, most: u64) -> u64 {
        most.saturating_sub(self.wasted)
    }

    /// Returns the receipt if the transaction succeeded. `reverted` is the code if it reverted for the last time, which it also did if there
    /// may not be `most` gas left for another one.
    fn succeeded(&mut self, sent: Result<Receipt, ChannelError>, reverted: &'static str, most: u64) -> Option<Receipt> {
        self.has_reverted = sent.as_ref().is_ok_and(|receipt| !receipt.succeeded());
        match sent {
            Ok(receipt) if receipt.succeeded() => return Some(receipt),
            Ok(receipt) if self.made < ATTEMPTS && self.count_wasted(&receipt) <= most / 2 => {}
            Ok(_) => self.failure = Some(ChannelError::rejected(reverted, "the transaction reverted")),
            Err(error) => self.failure = Some(error),
        }
        None
    }

    fn count_wasted(&mut self, reverted: &Receipt) -> u64 {
        self.wasted = self.wasted.saturating_add(reverted.gas_used.saturating_to());
        self.wasted
    }
}

impl Inner {
    /// Fails if the token is not served.
    fn asset(&self, token: Address) -> Result<&Asset, ChannelError> {
        self.assets.iter().find(|asset| asset.address == token).ok_or_else(|| {
            ChannelError::rejected(reason::TOKEN_MISMATCH, format!("the token {token} is not served here"))
        })
    }

    /// Fails if the gas that is left is kept for claims.
    async fn check_spare_gas(&self) -> Result<(), ChannelError> {
        match self.sender.cannot_spare().await {
            Some(NotReady::InsufficientGas { balance }) => Err(FacilitatorError::InsufficientGas { balance }.into()),
            _ => Ok(()),
        }
    }

    /// The address as which calls are simulated.
    fn sender(&self) -> Address {
        self.sender.addresses().first().copied().unwrap_or_default()
    }

    /// Simulates a call of the contract. Returns the gas limit for it, or why it would not be executed: it reverts, or needs more gas than
    /// `most`. Accounts with code take part in most calls, and could have it use any amount.
    async fn simulate(&self, from: Address, input: &Bytes, most: u64) -> Result<Result<u64, String>, ChannelError> {
        let estimate = self.node.rpc().estimate_gas(from, Escrow::ADDRESS, input, None).await.map_err(unavailable)?;
        Ok(match estimate {
            Ok(gas) if gas > most => Err(format!("it needs {gas} gas, and may use {most}")),
            Ok(gas) => Ok(gas.saturating_add(gas / 8).saturating_add(GAS_MARGIN).min(most)),
            Err(revert) => Err(escrow::describe(&revert)),
        })
    }

    /// Waits for the turn of a call that was checked, unless it has one. Returns `false` if that took so long that it must be checked again.
    async fn enter(&self, turn: &mut Option<Turn>, urgency: Urgency) -> Result<bool, ChannelError> {
        if turn.is_some() {
            return Ok(true);
        }
        let asked = Instant::now();
        *turn = Some(self.sender.enter(urgency).await?);
        Ok(asked.elapsed() <= self.node.block_time())
    }

    /// Has a call of the contract sent that does `what`, and waits for its block. `payload` asks a facilitator for the same. `seen` is the
    /// block in which the action was seen not to be made: no transaction up to it can have made it, whatever a facilitator says.
    async fn send(
        &self,
        turn: &mut Option<Turn>,
        what: B256,
        (input, gas_limit): (Bytes, u64),
        payload: ChannelPayload,
        seen: u64,
    ) -> Result<Receipt, ChannelError> {
        let call = Call { to: Escrow::ADDRESS, input, gas_limit };
        let receipt = self.sender.send(turn.take().unwrap_or_default(), what, call, payload).await?;
        self.later_than(seen, receipt)
    }

    fn later_than(&self, seen: u64, receipt: Receipt) -> Result<Receipt, ChannelError> {
        match receipt.block() > seen {
            true => Ok(receipt),
            false => Err(ChannelError::Pending { transaction: Some(receipt.transaction_hash) }),
        }
    }

    /// Returns the time between a node's newest block and now, in seconds, if it is so long that the node must have fallen behind. A block
    /// of the future is no better: the clock was set back, and tells nothing of the age of blocks.
    fn too_old(&self, block_time: u64) -> Option<u64> {
        Some(self.clock.now().abs_diff(block_time)).filter(|age| *age > self.rules.max_age)
    }

    async fn readiness(&self) -> Readiness {
        let behind = match escrow::newest_time(self.node.rpc(), self.node.network()).await {
            Ok(time) => self.too_old(time).map(|age| NotReady::NodeBehind { age }),
            Err(_) => return NotReady::Node.into(),
        };
        behind.into_iter().chain(self.sender.cannot_send().await).collect()
    }

    /// Fails if a block is so old that the node, whose newest it is, must have fallen behind: it would hide withdrawals (invariant I11).
    fn check_age(&self, block_time: u64) -> Result<(), ChannelError> {
        let Some(age) = self.too_old(block_time) else { return Ok(()) };
        tracing::warn!(age, "the node's newest block is too far from this clock's time to rely on; see max_block_age");
        let what = "a node that has the newest blocks";
        Err(FacilitatorError::Unreachable { what, retry_after: Duration::from_secs(5) }.into())
    }

    async fn observe(&self, channels: &[ChannelId]) -> Result<Vec<ChannelObservation>, ChannelError> {
        let read = escrow::observe_with_time(self.node.rpc(), self.node.network(), channels, None).await;
        let (observed, time) = read.map_err(unavailable)?;
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
            match escrow::observe(self.node.rpc(), self.node.network(), channels, Some(block)).await {
                Ok(observed) => return Some(observed),
                Err(_) => sleep(self.node.poll_interval()).await,
            }
        }
        None
    }

    async fn settle(&self, receiver: Address, token: Address) -> Result<Option<Settled>, ChannelError> {
        self.asset(token)?;
        let input = Bytes::from(BatchSettlement::settleCall { receiver, token }.abi_encode());
        let (mut attempts, mut turn) = (Attempts::default(), None);
        loop {
            let (seen, unsettled) = attempts.read(self.unsettled(receiver, token).await)?;
            if unsettled == 0 {
                return Ok(None);
            }
            if turn.is_none() {
                attempts.next()?;
            }
            let simulated = self.simulate(self.sender(), &input, attempts.gas_left(gas::SETTLE)).await?;
            let limit = simulated.map_err(|why| ChannelError::rejected(reason::SETTLE_SIMULATION_FAILED, why))?;
            if !self.enter(&mut turn, Urgency::payment()).await? {
                continue;
            }
            let (what, payload) = (keccak256(&input), ChannelPayload::Settle { receiver, token });
            let sent = self.send(&mut turn, what, (input.clone(), limit), payload, seen).await;
            let reverted = reason::SETTLE_TRANSACTION_FAILED;
            let Some(receipt) = attempts.succeeded(sent, reverted, gas::SETTLE) else { continue };
            let moved = escrow::events::<BatchSettlement::Settled>(&receipt)
                .find(|event| event.receiver == receiver && event.token == token && event.amount > 0);
            return match moved {
                Some(event) => Ok(Some(Settled { transaction: receipt.transaction_hash, amount: event.amount })),
                // Somebody else's transaction came first.
                None if self.unsettled(receiver, token).await?.1 == 0 => Ok(None),
                None => Err(ChannelError::Pending { transaction: Some(receipt.transaction_hash) }),
            };
        }
    }

    async fn unsettled(&self, receiver: Address, token: Address) -> Result<(u64, u128), ChannelError> {
        let read = escrow::unsettled(self.node.rpc(), self.node.network(), receiver, token).await;
        read.map_err(unavailable)
    }
}

/// What is counted.
impl Inner {
    fn counted<T>(&self, action: &'static str, result: Result<T, ChannelError>) -> Result<T, ChannelError> {
        self.count(action, result.as_ref().map(|_| 1));
        result
    }

    fn counted_claim(&self, result: Result<Claimed, ChannelError>) -> Result<Claimed, ChannelError> {
        self.count("claim", result.as_ref().map(|claimed| claimed.transactions.len()));
        if let Ok(claimed) = &result {
            telemetry::claims(self.escrow.network(), claimed.observed.len(), claimed.refused.len());
        }
        result
    }

    fn count(&self, action: &'static str, result: Result<usize, &ChannelError>) {
        let (label, count) = match result {
            Ok(count) => ("executed", count),
            Err(ChannelError::Rejected { .. }) => ("rejected", 1),
            Err(ChannelError::Pending { .. }) => ("pending", 1),
            Err(ChannelError::Unavailable(_)) => ("unavailable", 1),
        };
        telemetry::channel_action(self.escrow.network(), action, label, count);
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
        self.0.sender.addresses()
    }

    fn gas_used(&self) -> u64 {
        self.0.sender.gas_used()
    }

    async fn readiness(&self) -> Readiness {
        self.0.readiness().await
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

    async fn deposit(
        &self,
        config: &ChannelConfig,
        voucher: &Voucher,
        deposit: &Deposit,
    ) -> Result<Executed, ChannelError> {
        self.0.counted("deposit", deposit::execute(&self.0, config, voucher, deposit).await)
    }

    async fn claim(&self, claims: &[Claim], authorizer: &AuthorizerKey) -> Result<Claimed, ChannelError> {
        self.0.counted_claim(self.0.claim(claims, authorizer).await)
    }

    async fn claim_signed(&self, claims: &[Claim], signature: &Bytes) -> Result<Claimed, ChannelError> {
        self.0.counted_claim(self.0.claim_signed(claims, signature).await)
    }

    async fn settle(&self, receiver: Address, token: Address) -> Result<Option<Settled>, ChannelError> {
        match self.0.settle(receiver, token).await {
            Ok(None) => Ok(None),
            settled => self.0.counted("settle", settled),
        }
    }

    async fn may_refund(&self) -> Result<(), ChannelError> {
        self.0.check_spare_gas().await
    }

    async fn refund_signed(&self, refund: &SignedRefund) -> Result<Executed, ChannelError> {
        self.0.counted("refund", self.0.refund(refund).await)
    }
}
