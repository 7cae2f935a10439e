//! A node, with what is remembered about its chain: the pace of blocks, what gas costs, and what the node can do.
//!
//! Settlement and the confirmation of remote settlements talk to a chain through this type only.

use std::{
    sync::{Mutex, PoisonError},
    time::Duration,
};

use alloy_primitives::{Address, B256, Bytes};
use tokio::time::{Instant, sleep};

use super::{
    authorization_use::{self, AuthorizationUse},
    block_search::{PRECISION, around},
    block_time::BlockTime,
    broadcast::{Broadcaster, SendResult},
    confirm::{Inclusion, PendingTransaction},
    fees::{FeeError, FeeOracle, Fees},
    permit::{self, PermitProbe},
    probe::{Probe, ProbeResult},
    receipt_check::ExpectedTransfer,
    rpc::{Block, Receipt, Rpc, RpcFailure},
    rpc_batcher::RpcBatcher,
    transfer,
};
use crate::{
    network::Network,
    payment::{Prechecked, Rejection},
    permit2::Permit,
    protocol::Reason,
};

/// How many blocks pass between two checks of a transaction that is in no block.
const CHECK_BLOCKS: u32 = 3;

/// How often a node is asked again whose newest block is older than one that was seen.
const LAGGING_RETRIES: u32 = 8;
/// How often a payment is looked at again that fails because it was used, while it is unused.
const CONTRADICTIONS: u32 = 2;

/// What the newest block shows of an authorization.
pub(crate) enum AuthorizationState {
    /// It is used or cancelled.
    Used(ProbeResult),
    /// It is unused in a final block after `validBefore`, so it can never be executed (invariant I3).
    Expired,
    /// It is unused; with the reason why it would fail now, if it would.
    Unused(ProbeResult, Option<Rejection>),
    /// The node is behind a block that was seen, so that what it shows may be out of date.
    Behind,
}

/// A node of one chain.
pub(crate) struct Node {
    network: Network,
    rpc: Rpc,
    /// Simulations that are asked for at about the same time share a request.
    batcher: RpcBatcher,
    probe: Probe,
    permit_probe: PermitProbe,
    /// The spenders of permits that the chain has, each with the Permit2 that it uses.
    proxies: Mutex<Vec<Address>>,
    block_time: BlockTime,
    /// The newest block that was seen. Behind one address there may be several nodes, and some may be behind the others.
    newest_block: Mutex<NewestBlock>,
    fees: FeeOracle,
    broadcaster: Broadcaster,
}

/// The newest block that was seen, and when it was seen last.
#[derive(Debug, Default)]
struct NewestBlock(Option<(u64, Instant)>);

impl NewestBlock {
    /// How many blocks of a chain may come in a second, and beside these at once, as after a pause. A number that is higher is another chain's.
    const FASTEST: u64 = 20;
    const AT_ONCE: u64 = 10_000;
    /// For how long a block is believed to be there that is not seen again.
    const TRUST: Duration = Duration::from_secs(120);

    /// Notes a number that a node told. Returns `false` if time does not allow it.
    fn observe(&mut self, number: u64) -> bool {
        let now = Instant::now();
        if let Some((newest, seen)) = self.0 {
            let elapsed = now.duration_since(seen);
            let most =
                newest.saturating_add(Self::AT_ONCE).saturating_add(Self::FASTEST.saturating_mul(elapsed.as_secs()));
            if number > most {
                return false;
            }
            if number < newest && elapsed < Self::TRUST {
                return true;
            }
        }
        self.0 = Some((number, now));
        true
    }
}

impl Node {
    /// Creates a node whose simulated transfers may use `max_transfer_gas`. `max_gas_price` is in wei per gas. Returns `None` if the
    /// build lacks the probe's code.
    pub(crate) fn new(
        network: Network,
        rpc: Rpc,
        max_transfer_gas: u64,
        max_gas_price: Option<u128>,
        block_time: Option<Duration>,
    ) -> Option<Self> {
        Some(Self {
            network,
            batcher: RpcBatcher::new(rpc.clone()),
            rpc,
            probe: Probe::new(max_transfer_gas)?,
            permit_probe: PermitProbe::new(max_transfer_gas)?,
            proxies: Mutex::default(),
            block_time: BlockTime::new(block_time),
            newest_block: Mutex::default(),
            fees: FeeOracle::new(max_gas_price),
            broadcaster: Broadcaster::new(),
        })
    }

    pub(crate) const fn network(&self) -> Network {
        self.network
    }

    pub(crate) const fn rpc(&self) -> &Rpc {
        &self.rpc
    }

    /// Simulates the payment in the newest block. Returns what the chain shows, and why the payment would fail, if it would. A payment fails
    /// only by a block that is as new as any that was seen.
    pub(crate) async fn verify(&self, payment: &Prechecked) -> Result<(ProbeResult, Option<Rejection>), RpcFailure> {
        self.look(payment, false).await?.ok_or(RpcFailure::Silent)
    }

    /// Simulates the payment in a block as new as any that was seen. An older one will do to show that the authorization is used and, unless
    /// `must_be_new`, that the payment would be executed. Returns `None` if the node stays behind.
    async fn look(
        &self,
        payment: &Prechecked,
        must_be_new: bool,
    ) -> Result<Option<(ProbeResult, Option<Rejection>)>, RpcFailure> {
        let mut has_asked = false;
        let mut contradictions = 0;
        for _ in 0..LAGGING_RETRIES {
            let mut newest = self.newest_block();
            let (result, mut rejection) = match payment.terms().permit() {
                None => {
                    let calldata = transfer::calldata(payment.authorization(), payment.signature());
                    let result = self.probe.run(&self.batcher, payment, &calldata).await?;
                    let rejection = self.probe.diagnose(&result, payment);
                    (result, rejection)
                }
                // Boxed, since few are.
                Some(permit) => Box::pin(self.look_at_permit(payment, &permit)).await?,
            };
            self.observe_block(result.block);
            if !result.used && rejection.as_ref().is_some_and(|why| why.reason == Reason::NonceAlreadyUsed) {
                // One request shows the nonce unused, and a later one a settlement that fails because it is used: a block came in between. Or
                // the payer is a contract that says so, and will say so for ever.
                if contradictions < CONTRADICTIONS || !result.payer_has_code() {
                    contradictions += 1;
                    sleep(self.poll_interval()).await;
                    continue;
                }
                let detail = "the payer's contract reverts as if the permit was used";
                rejection = Some(Rejection::new(Reason::SimulationFailed, detail));
            }
            if result.used || (rejection.is_none() && !must_be_new) {
                return Ok(Some((result, rejection)));
            }
            let is_short = rejection.as_ref().is_some_and(|why| why.reason == Reason::InsufficientFunds);
            if is_short && !std::mem::replace(&mut has_asked, true) {
                // A payer that was funded a moment ago is the one whom an old block wrongs.
                self.ask_newest_block().await;
                newest = self.ask_newest_block().await;
            }
            if result.block >= newest {
                return Ok(Some((result, rejection)));
            }
            sleep(self.poll_interval()).await;
        }
        tracing::debug!(network = %self.network, "the node is behind a block that was seen");
        Ok(None)
    }

    async fn look_at_permit(
        &self,
        payment: &Prechecked,
        permit: &Permit,
    ) -> Result<(ProbeResult, Option<Rejection>), RpcFailure> {
        let has_contracts = self.takes_permit(permit).await?;
        self.permit_probe.run((&self.rpc, &self.batcher), payment, permit, has_contracts).await
    }

    /// Returns the number of the newest block that was seen.
    fn newest_block(&self) -> u64 {
        self.newest_block.lock().unwrap_or_else(PoisonError::into_inner).0.map_or(0, |(number, _)| number)
    }

    /// Asks for the newest block, and returns the newest that was seen.
    pub(crate) async fn ask_newest_block(&self) -> u64 {
        if let Ok(number) = self.rpc.block_number().await {
            self.observe_block(number);
        }
        self.newest_block()
    }

    /// Fails if the node refused the last receipts that it was asked for: no payment could be confirmed. Does not ask the node.
    pub(crate) fn check_known_receipts(&self) -> Result<(), RpcFailure> {
        if self.rpc.refuses_receipts() { Err(RpcFailure::Silent) } else { Ok(()) }
    }

    /// Returns the state of a payment's authorization.
    pub(crate) async fn authorization_state(&self, payment: &Prechecked) -> Result<AuthorizationState, RpcFailure> {
        // The final block comes before the newest: an authorization that is unused in the newest was unused in the final one.
        let finalized = self.rpc.finalized().await?;
        let Some((result, rejection)) = self.look(payment, true).await? else { return Ok(AuthorizationState::Behind) };
        let is_after_expiry = finalized.is_some_and(|block| {
            payment.terms().is_over(payment.authorization(), block.timestamp.saturating_to())
                && result.block >= block.number.saturating_to::<u64>()
        });
        Ok(match (result.used, finalized.filter(|_| is_after_expiry)) {
            (true, _) => AuthorizationState::Used(result),
            // A node of another chain shows no use either.
            (false, Some(finalized)) => match self.is_proven_unused(payment, &finalized).await? {
                true => AuthorizationState::Expired,
                false => AuthorizationState::Behind,
            },
            (false, None) => AuthorizationState::Unused(result, rejection),
        })
    }

    /// Returns `true` if a block of this chain, and none before `finalized`, shows an authorization unused whose time is over.
    async fn is_proven_unused(&self, payment: &Prechecked, finalized: &Block) -> Result<bool, RpcFailure> {
        let expected = ExpectedTransfer::of_payment(payment);
        let state = authorization_use::proven_state(&self.rpc, self.network, &expected).await?;
        let is_over = payment.terms().is_over(payment.authorization(), state.timestamp);
        Ok(!state.is_used && is_over && state.block >= finalized.number.saturating_to::<u64>())
    }

    /// Finds the transaction that used a payment's authorization, in the blocks after `seen_unused` up to `latest`. That a permit's use was
    /// not found is complete only if the blocks before, which may have been replaced, do not have it either.
    pub(crate) async fn find_use(
        &self,
        payment: &Prechecked,
        seen_unused: u64,
        latest: u64,
    ) -> Result<AuthorizationUse, RpcFailure> {
        let expected = ExpectedTransfer::of_payment(payment);
        let newest = latest;
        let latest = match expected.is_by_permit() && latest.saturating_sub(seen_unused) > PRECISION {
            true => self.last_usable(payment).await?.map_or(latest, |last| last.min(latest)),
            false => latest,
        };
        let found = authorization_use::find_after_replaceable(&self.rpc, &expected, seen_unused, latest).await?;
        if found == (AuthorizationUse::NotFound { is_complete: true })
            && !self.numbers_like(seen_unused, newest).await?
        {
            return Ok(AuthorizationUse::NotFound { is_complete: false });
        }
        Ok(found)
    }

    /// Returns `true` if a block as new as `seen` is final, and numbered like `newest`. On a chain whose opcode `NUMBER` is another chain's,
    /// the logs between these two are not those of the time between.
    async fn numbers_like(&self, seen: u64, newest: u64) -> Result<bool, RpcFailure> {
        let Some(finalized) = self.rpc.finalized().await? else { return Ok(false) };
        Ok((seen..=newest.saturating_add(PRECISION)).contains(&finalized.number.saturating_to()))
    }

    /// Returns a block that is final and past the time of a permit, if there is one yet. No later one has to be searched, so that a search takes
    /// no longer the later it is repeated.
    async fn last_usable(&self, payment: &Prechecked) -> Result<Option<u64>, RpcFailure> {
        let Some(finalized) = self.rpc.finalized().await? else { return Ok(None) };
        let authorization = payment.authorization();
        if !payment.terms().is_over(authorization, finalized.timestamp.saturating_to()) {
            return Ok(None);
        }
        let deadline: u64 = authorization.valid_before.saturating_to();
        let (_, past) = around(&self.rpc, deadline.saturating_add(1), finalized).await?;
        Ok(Some(past))
    }

    /// Returns `true` if the chain has the contracts that permits like this are settled through. Asks until it has them.
    pub(crate) async fn takes_permit(&self, permit: &Permit) -> Result<bool, RpcFailure> {
        if !self.is_known_to_take(permit) && permit::is_deployed(&self.rpc, permit).await? {
            self.proxies.lock().unwrap_or_else(PoisonError::into_inner).push(permit.spender);
        }
        Ok(self.is_known_to_take(permit))
    }

    /// Returns `true` if the chain was seen to have these contracts. Does not ask.
    pub(crate) fn is_known_to_take(&self, permit: &Permit) -> bool {
        self.proxies.lock().unwrap_or_else(PoisonError::into_inner).contains(&permit.spender)
    }

    /// Returns `true` if this transaction, which need not be one of ours, made the payment.
    pub(crate) async fn is_paid_by(&self, expected: &ExpectedTransfer, receipt: &Receipt) -> Result<bool, RpcFailure> {
        match expected.is_by_permit() {
            true => permit::is_paid_by(&self.rpc, expected, receipt).await,
            false => Ok(expected.is_paid_by(receipt)),
        }
    }

    /// Returns `true` if it is final that the authorization, which is used in the newest block, is used, or will not be executed any more: a
    /// final block shows it used, or is past its time. Nodes that keep few states do not show the former.
    pub(crate) async fn is_use_final(&self, payment: &Prechecked) -> Result<bool, RpcFailure> {
        let Some(block) = self.rpc.finalized().await? else { return Ok(false) };
        if payment.terms().is_over(payment.authorization(), block.timestamp.saturating_to()) {
            return Ok(true);
        }
        let expected = ExpectedTransfer::of_payment(payment);
        match authorization_use::is_used(&self.rpc, &expected, block.number.saturating_to()).await {
            Err(RpcFailure::Refused { .. }) => Ok(false),
            used => Ok(used? == Some(true)),
        }
    }

    /// Returns `true` if the node says that this block is final.
    pub(crate) async fn is_final(&self, block: u64) -> bool {
        let finalized = self.rpc.finalized().await.ok().flatten();
        finalized.is_some_and(|finalized| finalized.number.saturating_to::<u64>() >= block)
    }

    /// Notes that a block is the newest now.
    pub(crate) fn observe_block(&self, number: u64) {
        let is_possible = self.newest_block.lock().unwrap_or_else(PoisonError::into_inner).observe(number);
        if is_possible {
            self.block_time.observe(number);
        }
    }

    /// Returns how long a block takes.
    pub(crate) fn block_time(&self) -> Duration {
        self.block_time.block_time()
    }

    /// Returns how often to poll for a receipt.
    pub(crate) fn poll_interval(&self) -> Duration {
        self.block_time.poll_interval()
    }

    /// Returns the time between two checks of a transaction that is in no block.
    pub(crate) fn check_interval(&self) -> Duration {
        (CHECK_BLOCKS * self.block_time()).max(Duration::from_secs(2))
    }

    /// Returns the fees to offer now.
    pub(crate) async fn fees(&self) -> Result<Fees, FeeError> {
        self.fees.get(&self.rpc).await
    }

    /// Returns the fees to offer now for a transaction that may offer `most`, where that is more than `max_gas_price`.
    pub(crate) async fn fees_up_to(&self, most: u128) -> Result<Fees, FeeError> {
        self.fees.get_up_to(&self.rpc, most).await
    }

    /// Returns the fees to offer for a replacement of a transaction that offered `old` and may offer `most`.
    pub(crate) async fn raised_fees_up_to(&self, old: Fees, most: u128) -> Result<Fees, FeeError> {
        self.fees.raise_up_to(&self.rpc, old, most).await
    }

    /// Returns what a transaction cost above `max_gas_price`, in wei.
    pub(crate) fn above_ceiling(&self, receipt: &Receipt) -> u128 {
        let above = self.fees.above_ceiling(receipt.effective_gas_price.saturating_to());
        receipt.gas_used.saturating_to::<u128>().saturating_mul(above)
    }

    /// Returns what a unit of gas is likely to cost now, in wei.
    pub(crate) async fn gas_price(&self) -> Result<u128, FeeError> {
        self.fees.price(&self.rpc).await
    }

    /// Forgets the fees: they are looked up again when they are needed next.
    pub(crate) async fn forget_fees(&self) {
        self.fees.forget().await;
    }

    /// Offers the tips of the market from now on, since the node refused less.
    pub(crate) async fn require_market_tip(&self) {
        self.fees.require_market_tip().await;
    }

    /// Fails if gas is known to cost too much. Does not ask the node.
    pub(crate) fn check_known_fees(&self) -> Result<(), FeeError> {
        self.fees.check_known()
    }

    /// Sends a transaction, and waits up to `limit` for its receipt if the node can.
    pub(crate) async fn send(&self, raw: &Bytes, hash: B256, limit: Duration) -> SendResult {
        self.broadcaster.send(&self.rpc, raw, hash, limit).await
    }

    /// Sends a transaction without waiting for its receipt. Repeating it changes nothing.
    pub(crate) async fn resend(&self, raw: &Bytes) -> SendResult {
        self.broadcaster.resend(&self.rpc, raw).await
    }

    /// Begins to follow a transaction that was just sent; `certainly` if the node confirmed that it has it.
    pub(crate) fn pending(&self, raw: Bytes, hash: B256, certainly: bool) -> PendingTransaction {
        PendingTransaction::new(raw, hash, certainly, &self.block_time)
    }

    /// Polls for a receipt until `deadline`, and sends the transaction again now and then.
    pub(crate) async fn watch(&self, pending: &mut PendingTransaction, deadline: Instant) -> Inclusion {
        pending.watch(&self.rpc, &self.broadcaster, &self.block_time, deadline).await
    }
}

debug_fields!(Node { network });

#[cfg(test)]
mod tests {
    use super::*;

    /// An answer of another chain's node, first or later, is not what blocks are compared with for ever.
    #[tokio::test(start_paused = true)]
    async fn a_block_number_that_time_does_not_allow_is_not_believed() {
        let mut newest = NewestBlock::default();
        assert!(newest.observe(40_000_000));
        assert!(!newest.observe(300_000_000));
        tokio::time::advance(Duration::from_secs(10)).await;
        assert!(newest.observe(40_000_005) && newest.observe(40_000_002));
        assert_eq!(newest.0.map(|(number, _)| number), Some(40_000_005));
        let mut wrong = NewestBlock::default();
        assert!(wrong.observe(300_000_000) && wrong.observe(40_000_000));
        assert_eq!(wrong.0.map(|(number, _)| number), Some(300_000_000));
        tokio::time::advance(NewestBlock::TRUST).await;
        assert!(wrong.observe(40_000_060));
        assert_eq!(wrong.0.map(|(number, _)| number), Some(40_000_060));
    }
}
