//! One payment, from the wish to settle it to an outcome.

use std::{
    collections::HashSet,
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError, atomic::AtomicBool},
    time::Duration,
};

use alloy_consensus::TxEip1559;
use alloy_network::TxSigner;
use alloy_primitives::{B256, Bytes, Signature, U256};
use tokio::{
    sync::oneshot,
    time::{Instant, timeout_at},
};
use tracing::Instrument;

use super::{
    broadcast::{Broadcaster, Sent},
    confirm::{Flight, Seen},
    fees::{FeeCache, Fees},
    judge::Expected,
    lane::{Lane, Place, Slot},
    pace::Pace,
    probe::Probe,
    reverts::Reverts,
    rpc::{Receipt, Rpc},
    transaction::Signed,
    transfer,
};
use crate::{
    clock::Clock,
    facilitator::{FacilitatorError, Outcome, Prechecked, Rejection, Verified},
    ledger::{Ledger, PaymentKey, SettlementStep},
    network::Network,
    protocol::Reason,
};

/// What was verified longer ago than this many seconds is looked at again before it is signed for.
const FRESH: u64 = 5;
/// How often a payment is signed for anew after its nonce went to somebody else or its offer was too low.
const ATTEMPTS: usize = 4;
/// How long a settlement waits for a place in the lane.
pub(super) const QUEUE_PATIENCE: Duration = Duration::from_secs(60);
/// A node that holds a broadcast until inclusion lets go after 6 s on Base; this is how long we hold on.
const SYNC_LIMIT: Duration = Duration::from_secs(8);
/// How long a transaction out of sight keeps its nonce.
pub(super) const WATCH_LIMIT: Duration = Duration::from_secs(1_800);
/// How long the last look before a deadline may take.
const GRACE: Duration = Duration::from_millis(500);
/// How often the price of one nonce is raised.
const MAX_RAISES: usize = 3;

/// Any signer of transactions.
pub(crate) type SharedSigner = Arc<dyn TxSigner<Signature> + Send + Sync>;

/// Totals since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SettlementStats {
    /// Payments settled by transactions of this process.
    pub settled: u64,
    /// Payments that somebody else's transaction settled.
    pub credited: u64,
    /// Transactions included that did not pay.
    pub reverted: u64,
    /// Gas used by transactions of this process.
    pub gas_used: u64,
    /// What they cost, in wei, data availability included.
    pub spent: U256,
    /// Transactions in flight now.
    pub in_flight: u64,
}

/// Everything that settling on one chain with one key takes.
pub(crate) struct Engine {
    pub(crate) network: Network,
    pub(crate) rpc: Rpc,
    pub(crate) probe: Probe,
    pub(crate) pace: Pace,
    pub(crate) fees: FeeCache,
    pub(crate) lane: Lane,
    pub(crate) node: Broadcaster,
    pub(crate) signer: SharedSigner,
    pub(crate) ledger: Arc<dyn Ledger>,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) gas_cap: u64,
    pub(crate) confirm_timeout: Duration,
    pub(crate) totals: Mutex<SettlementStats>,
    /// Transactions that a task of this process looks after.
    pub(crate) watched: Mutex<HashSet<B256>>,
    pub(crate) filling: AtomicBool,
    pub(crate) reverts: Reverts,
}

/// A payment with what settling it needs.
pub(super) struct Job {
    pub(super) payment: Prechecked,
    pub(super) key: PaymentKey,
    pub(super) calldata: Bytes,
    pub(super) expected: Expected,
}

impl Job {
    pub(super) fn new(payment: Prechecked) -> Self {
        let token = payment.terms().offer().asset.address;
        Self {
            key: payment.key(),
            calldata: transfer::calldata(payment.authorization(), payment.signature()),
            expected: Expected::of(token, payment.authorization()),
            payment,
        }
    }
}

/// How far one settlement came.
struct Progress {
    /// Where the outcome goes, at most once; the task goes on when nobody waits any more.
    answer: Option<oneshot::Sender<Result<Outcome, FacilitatorError>>>,
    /// Every transaction in the journal.
    journalled: Vec<B256>,
    /// Those that no node took.
    refused: Vec<B256>,
}

impl Progress {
    fn answer(&mut self, outcome: Result<Outcome, FacilitatorError>) {
        if let Some(sender) = self.answer.take() {
            // An error here means that the caller is gone.
            let _ = sender.send(outcome);
        }
    }

    /// Whether no node took anything.
    fn is_clean(&self) -> bool {
        self.journalled.iter().all(|transaction| self.refused.contains(transaction))
    }

    fn unknown(&self) -> Outcome {
        Outcome::Unknown { transaction: self.journalled.last().copied() }
    }
}

/// What came of one transaction.
enum Attempt {
    /// It is in a block.
    Included(Receipt),
    /// Its nonce went to another transaction, or its offer was too low.
    Again,
    /// Nobody waits for it any more.
    Abandoned,
}

impl Engine {
    /// Settles a payment in a task of its own, which ends neither with the caller nor before the nonce is resolved.
    pub(crate) async fn settle(
        self: &Arc<Self>,
        payment: Prechecked,
        verified: Verified,
    ) -> Result<Outcome, FacilitatorError> {
        let (sender, outcome) = oneshot::channel();
        let job = Job::new(payment);
        let span =
            tracing::info_span!("settle", network = %self.network, payer = %job.key.payer, nonce = %job.key.nonce);
        let engine = self.clone();
        let task = async move {
            let mut progress = Progress { answer: Some(sender), journalled: Vec::new(), refused: Vec::new() };
            let outcome = match engine.drive(&job, verified, &mut progress).await {
                Err(error) => engine.give_up(&job, &progress, error).await,
                outcome => outcome,
            };
            progress.answer(outcome);
        };
        tokio::spawn(task.instrument(span));
        // The task answers unless the runtime shuts down; then nobody can tell how far it came.
        outcome.await.unwrap_or(Ok(Outcome::Unknown { transaction: None }))
    }

    async fn drive(
        self: &Arc<Self>,
        job: &Job,
        verified: Verified,
        progress: &mut Progress,
    ) -> Result<Outcome, FacilitatorError> {
        let seen_unused = verified.funds.map(|funds| funds.block);
        let Verified { mut gas, mut at, .. } = verified;
        for _ in 0..ATTEMPTS {
            let place = self.lane.enter(QUEUE_PATIENCE).await?;
            let barred = self.reverts.bars(job.key.payer);
            if barred.is_some() || gas.is_none() || self.clock.now().saturating_sub(at) > FRESH {
                at = self.clock.now();
                let (facts, rejection) = self.verify(&job.payment).await?;
                if facts.used {
                    return self.look_for_use(job, seen_unused, &facts, None).await;
                }
                match rejection.or(barred) {
                    // What an earlier attempt sent may still be executed.
                    Some(_) if !progress.is_clean() => return Ok(progress.unknown()),
                    Some(Rejection { reason, detail }) => {
                        return Ok(Outcome::Failed { reason, detail, transaction: None, dead: false });
                    }
                    None => gas = Some(facts.gas),
                }
            }
            match self.attempt(job, place, self.gas_limit(&job.calldata, gas), progress).await? {
                Attempt::Included(receipt) => return self.conclude(job, seen_unused, &receipt).await,
                Attempt::Abandoned => return Ok(progress.unknown()),
                Attempt::Again => {}
            }
        }
        Err(FacilitatorError::Busy { what: "the settlement key or its fees", retry_after: Duration::from_secs(2) })
    }

    /// One transaction: signed, journalled, sent, followed.
    async fn attempt(
        self: &Arc<Self>,
        job: &Job,
        place: Place,
        gas_limit: u64,
        progress: &mut Progress,
    ) -> Result<Attempt, FacilitatorError> {
        let fees = self.fees.get(&self.rpc).await?;
        let mut slot = self.lane.take(place).await?;
        let transaction = self.transaction(slot.nonce(), fees, gas_limit, job.expected.token, job.calldata.clone());
        let signed = match self.sign_and_journal(job, transaction.clone(), progress).await {
            Ok(signed) => signed,
            Err(error) => {
                self.give_back(slot);
                return Err(error);
            }
        };
        slot.sent();
        let started = Instant::now();
        let _watched = Watched::enter(self, signed.hash);
        tracing::debug!(transaction = %signed.hash, lane_nonce = slot.nonce(), gas_limit, "sending");
        let limit = SYNC_LIMIT.min(self.confirm_timeout);
        match self.node.send(&self.rpc, &signed.raw, signed.hash, limit).await {
            Sent::Included(receipt) => {
                self.account(&receipt, started);
                slot.consumed();
                Ok(Attempt::Included(receipt))
            }
            sent @ (Sent::Pooled | Sent::Perhaps) => {
                let certainly = matches!(sent, Sent::Pooled);
                let flight = Flight::new(signed.raw, signed.hash, certainly, &self.pace);
                self.follow(job, slot, flight, (transaction, fees), started, progress).await
            }
            sent @ (Sent::NonceUsed | Sent::NonceContested) => {
                // A retry below us may have sent it twice.
                if let Ok(Some(receipt)) = self.rpc.receipt(signed.hash).await {
                    self.account(&receipt, started);
                    slot.consumed();
                    return Ok(Attempt::Included(receipt));
                }
                tracing::warn!(lane_nonce = slot.nonce(), "another process uses the settlement key");
                progress.refused.push(signed.hash);
                match sent {
                    Sent::NonceUsed => slot.consumed_by_another(),
                    _ => slot.displaced(),
                }
                Ok(Attempt::Again)
            }
            refusal => {
                progress.refused.push(signed.hash);
                self.give_back(slot);
                self.refused(refusal).await?;
                Ok(Attempt::Again)
            }
        }
    }

    /// No node took the transaction. `Ok` if another one may fare better.
    pub(super) async fn refused(&self, refusal: Sent) -> Result<(), FacilitatorError> {
        match refusal {
            Sent::NoGas => {
                let account = self.signer.address();
                let balance = self.rpc.balance(account).await.unwrap_or_default();
                tracing::error!(%account, %balance, "the settlement key cannot pay for gas");
                Err(FacilitatorError::GasTank { balance })
            }
            Sent::PoolFull => {
                Err(FacilitatorError::Busy { what: "the node's transaction pool", retry_after: Duration::from_secs(2) })
            }
            Sent::Refused(words) => {
                tracing::error!(words, "the node refuses the transaction");
                Err(FacilitatorError::Misconfigured(format!("the node refuses the transaction: {words}")))
            }
            _ => {
                self.fees.forget().await;
                Ok(())
            }
        }
    }

    /// Nothing more can be done now. If no node took any transaction of the payment, it is due again; otherwise its fate is
    /// unknown.
    async fn give_up(
        &self,
        job: &Job,
        progress: &Progress,
        error: FacilitatorError,
    ) -> Result<Outcome, FacilitatorError> {
        if progress.journalled.is_empty() {
            return Err(error);
        }
        let was_refused = |transaction: &B256| progress.refused.contains(transaction);
        let record = self.ledger.get(&job.key).await.ok().flatten();
        if record.is_some_and(|record| record.transactions.iter().all(was_refused))
            && self
                .ledger
                .settle(&job.key, SettlementStep::Fail { reason: Reason::UnexpectedSettleError })
                .await
                .is_ok()
        {
            return Err(error);
        }
        Ok(progress.unknown())
    }

    /// Follows a transaction until its nonce is resolved. Who waits for the outcome is told `Unknown` in good time.
    async fn follow(
        self: &Arc<Self>,
        job: &Job,
        slot: Slot,
        mut flight: Flight,
        (mut transaction, mut fees): (TxEip1559, Fees),
        started: Instant,
        progress: &mut Progress,
    ) -> Result<Attempt, FacilitatorError> {
        let raise_after = (6 * self.pace.block_time()).max(Duration::from_secs(2));
        let answer_at = started + self.confirm_timeout;
        let mut raised = Vec::new();
        loop {
            let deadline = match progress.answer {
                Some(_) => answer_at.min(Instant::now() + raise_after),
                None => Instant::now() + 4 * raise_after,
            };
            // A last look that hangs must not keep the caller.
            let watch = timeout_at(deadline + GRACE, flight.watch(&self.rpc, &self.node, &self.pace, deadline));
            match watch.await.unwrap_or(Seen::NotYet) {
                Seen::Included(receipt) => {
                    self.account(&receipt, started);
                    slot.consumed();
                    return Ok(Attempt::Included(receipt));
                }
                Seen::Displaced => {
                    tracing::warn!(lane_nonce = slot.nonce(), "another transaction took the nonce");
                    slot.consumed_by_another();
                    // Whoever was told "unknown" asks again, and decides what happens next.
                    return Ok(if progress.answer.is_some() { Attempt::Again } else { Attempt::Abandoned });
                }
                Seen::NotYet => {}
            }
            if Instant::now() >= answer_at && progress.answer.is_some() {
                tracing::warn!(transaction = %flight.hash(), "not in a block in time; its fate is unknown");
                progress.answer(Ok(Outcome::Unknown { transaction: Some(flight.hash()) }));
            }
            if started.elapsed() >= WATCH_LIMIT {
                slot.displaced();
                return Ok(Attempt::Abandoned);
            }
            if raised.len() < MAX_RAISES
                && let Ok(Some(better)) = self.raise(job, &mut transaction, &mut fees, progress).await
            {
                raised.push(Watched::enter(self, better.hash));
                self.node.resend(&self.rpc, &better.raw).await;
                flight.replaced_by(better.raw, better.hash);
            }
        }
    }

    /// Signs the same call with the same nonce for a better price, if the price is what it waits for.
    async fn raise(
        &self,
        job: &Job,
        transaction: &mut TxEip1559,
        fees: &mut Fees,
        progress: &mut Progress,
    ) -> Result<Option<Signed>, FacilitatorError> {
        self.fees.forget().await;
        if self.fees.get(&self.rpc).await?.max_fee <= fees.max_fee.saturating_add(fees.max_fee / 10) {
            return Ok(None);
        }
        let raised = self.fees.raise(&self.rpc, *fees).await?;
        let (nonce, gas_limit) = (transaction.nonce, transaction.gas_limit);
        *transaction = self.transaction(nonce, raised, gas_limit, job.expected.token, job.calldata.clone());
        *fees = raised;
        let signed = self.sign_and_journal(job, transaction.clone(), progress).await?;
        tracing::info!(transaction = %signed.hash, lane_nonce = nonce, max_fee = raised.max_fee, "raising the price");
        Ok(Some(signed))
    }

    /// Makes a transaction's hash known to the journal before anybody else can know it.
    async fn sign_and_journal(
        &self,
        job: &Job,
        transaction: TxEip1559,
        progress: &mut Progress,
    ) -> Result<Signed, FacilitatorError> {
        let signed = self.sign(transaction).await?;
        self.ledger.settle(&job.key, SettlementStep::Submit { transaction: signed.hash }).await?;
        progress.journalled.push(signed.hash);
        Ok(signed)
    }

    pub(super) fn account(&self, receipt: &Receipt, started: Instant) {
        let gas = receipt.gas_used.saturating_to::<u64>();
        let block = receipt.block();
        self.pace.observe(block);
        tracing::info!(transaction = %receipt.transaction_hash, block, gas, latency = ?started.elapsed(), "included");
        let mut totals = self.totals();
        totals.gas_used = totals.gas_used.saturating_add(gas);
        totals.spent = totals.spent.saturating_add(receipt.cost());
    }

    pub(super) fn watches(&self, transaction: B256) -> bool {
        self.watched.lock().unwrap_or_else(PoisonError::into_inner).contains(&transaction)
    }

    pub(crate) fn totals(&self) -> MutexGuard<'_, SettlementStats> {
        self.totals.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Engine")
            .field("network", &self.network)
            .field("account", &self.signer.address())
            .field("lane", &self.lane)
            .finish_non_exhaustive()
    }
}

/// A transaction that a task looks after, for as long as it lives.
struct Watched {
    engine: Arc<Engine>,
    transaction: B256,
}

impl Watched {
    fn enter(engine: &Arc<Engine>, transaction: B256) -> Self {
        engine.watched.lock().unwrap_or_else(PoisonError::into_inner).insert(transaction);
        Self { engine: engine.clone(), transaction }
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        self.engine.watched.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.transaction);
    }
}
