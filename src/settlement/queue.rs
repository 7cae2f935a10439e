//! Payments that wait for a transaction: how many may wait, which share a transaction, and when it is begun.
//!
//! A single payment is sent immediately. While a transaction is on its way to a block, payments gather for up to half a block and share
//! the next transaction: a burst takes few transactions, and each payment is hardly later than it would have been alone.

use std::{
    collections::{BTreeMap, HashSet, VecDeque},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use alloy_primitives::B256;
use tokio::{
    sync::{Notify, oneshot},
    time::{Instant, timeout_at},
};

use super::journal::Journal;
use crate::{
    chain::{
        batch::{self, GasLimit},
        receipt_check::ExpectedTransfer,
    },
    ledger::SettlementStep,
    payment::{PaymentKey, Prechecked, SettlementOutcome, Verified},
    protocol::Reason,
    settlement::FacilitatorError,
    telemetry,
};

/// How long a payment waits for its transaction to begin.
pub(super) const QUEUE_TIMEOUT: Duration = Duration::from_secs(60);
/// How long the first payment of a burst waits for the others.
const BURST: Duration = Duration::from_millis(4);
/// The longest that payments gather while a transaction is on its way.
const LONGEST_GATHERING: Duration = Duration::from_millis(500);

/// Where the outcome of a payment is awaited.
pub(super) type OutcomeSender = oneshot::Sender<Result<SettlementOutcome, FacilitatorError>>;

/// A payment with all that settling it needs, and how far its settlement came.
pub(super) struct QueuedPayment {
    pub(super) payment: Prechecked,
    /// When it was verified last, and how much gas its transfer used then.
    pub(super) verified: Verified,
    /// The block in which this call first saw the authorization unused.
    pub(super) seen_unused: Option<u64>,
    /// The batch that was included and did not pay it. It is verified again and gets a transaction of its own.
    pub(super) left_out_of: Option<B256>,
    /// No gas key pays for a batch.
    pub(super) is_alone: bool,
    /// How often a transaction was signed for it.
    pub(super) attempts: usize,
    /// Until when it waits for a transaction.
    pub(super) deadline: Instant,
    /// All its transactions in the journal.
    pub(super) journalled: Vec<B256>,
    /// Those that cannot pay it any more: no node took them, or they are in a block and did not pay.
    pub(super) ineffective: Vec<B256>,
    /// Without it, or when nobody waits any more, the outcome is recorded in the ledger.
    outcome: Option<OutcomeSender>,
    pub(super) span: tracing::Span,
    begun: Instant,
    guard: InProgressGuard,
}

impl QueuedPayment {
    fn new(payment: Prechecked, verified: Verified, outcome: Option<OutcomeSender>, guard: InProgressGuard) -> Self {
        let key = payment.key();
        Self {
            seen_unused: verified.funds.map(|funds| funds.block),
            span: tracing::info_span!(
                "settle", network = %key.network, payer = %key.payer, nonce = %key.nonce, transaction = tracing::field::Empty
            ),
            begun: Instant::now(),
            deadline: Instant::now() + QUEUE_TIMEOUT,
            payment,
            verified,
            left_out_of: None,
            is_alone: false,
            attempts: 0,
            journalled: Vec::new(),
            ineffective: Vec::new(),
            outcome,
            guard,
        }
    }

    pub(super) fn key(&self) -> &PaymentKey {
        &self.guard.key
    }

    /// Returns the transfer that its transaction must make.
    pub(super) fn expected(&self) -> ExpectedTransfer {
        ExpectedTransfer::of_payment(&self.payment)
    }

    /// Returns its entry in a batch whose payments may use `gas_cap` each, or `None` if it cannot share a transaction.
    pub(super) fn batch_entry(&self, gas_cap: u32) -> Option<batch::Entry> {
        let needs_more = self.verified.gas.is_some_and(|gas| batch::needed(gas) > u64::from(gas_cap));
        if self.is_alone || self.left_out_of.is_some() || self.verified.contract_wallet || needs_more {
            return None;
        }
        batch::Entry::of(&self.payment).ok()
    }

    /// Notes that another transaction took the nonce of its own, which cannot pay it any more. It is verified again before another one
    /// is signed: the other transaction may have paid it.
    pub(super) fn lost_nonce(&mut self) {
        self.ineffective.clone_from(&self.journalled);
        self.verified.gas = None;
    }

    /// Sends the outcome to whoever waits. Returns it if nobody does.
    pub(super) fn answer(
        &mut self,
        outcome: Result<SettlementOutcome, FacilitatorError>,
    ) -> Option<Result<SettlementOutcome, FacilitatorError>> {
        self.report(&outcome);
        match self.outcome.take() {
            Some(sender) => sender.send(outcome).err(),
            None => Some(outcome),
        }
    }

    fn report(&self, outcome: &Result<SettlementOutcome, FacilitatorError>) {
        let (result, transaction) = match outcome {
            Ok(SettlementOutcome::Settled { fee: Some(_), transaction, .. }) => ("settled", Some(*transaction)),
            Ok(SettlementOutcome::Settled { transaction, .. }) => ("credited", Some(*transaction)),
            Ok(SettlementOutcome::Failed { transaction, .. }) => ("failed", *transaction),
            Ok(SettlementOutcome::Unknown { transaction }) => ("unknown", *transaction),
            Err(_) => ("unavailable", None),
        };
        if let Some(transaction) = transaction {
            self.span.record("transaction", tracing::field::display(transaction));
        }
        telemetry::settled(self.key().network, result, self.begun.elapsed());
    }

    /// Returns `true` if somebody waits for the outcome.
    pub(super) fn is_awaited(&self) -> bool {
        self.outcome.as_ref().is_some_and(|outcome| !outcome.is_closed())
    }

    /// Returns `true` if none of its transactions can pay it any more.
    pub(super) fn has_no_live_transaction(&self) -> bool {
        self.journalled.iter().all(|transaction| self.ineffective.contains(transaction))
    }

    /// Returns the outcome of a payment of which nothing more can be said now.
    pub(super) fn unknown(&self) -> SettlementOutcome {
        SettlementOutcome::Unknown { transaction: self.journalled.last().copied() }
    }

    /// Ends the settlement: sends the outcome to whoever waits, or else records it in the ledger.
    pub(super) async fn finish(mut self, journal: &Journal, mut outcome: Result<SettlementOutcome, FacilitatorError>) {
        if let Ok(SettlementOutcome::Failed { transaction, .. }) = &mut outcome {
            // The ledger refuses a failure that does not know of the newest transaction.
            *transaction = self.journalled.last().copied().or(*transaction);
        }
        match self.answer(outcome) {
            None => {}
            Some(Ok(outcome)) => {
                let known_transactions = match outcome {
                    // Until this returns, nobody else submits the payment.
                    SettlementOutcome::Failed { dead: false, .. } => journal.get(self.key()).await.ok().flatten(),
                    _ => None,
                }
                .map_or_else(Vec::new, |record| record.transactions);
                journal.record_outcome(self.key(), &outcome, &known_transactions).await;
            }
            Some(Err(error)) => tracing::warn!(parent: &self.span, %error, "not settled; it will be tried again"),
        }
    }

    /// Ends the settlement with the outcome on record: another process was faster, is at it, or has recorded a failure since this
    /// settlement was asked for.
    pub(super) async fn finish_as_recorded(mut self, journal: &Journal) {
        let outcome = match journal.get(self.key()).await {
            Ok(Some(record)) => Ok(record.outcome(&self.payment)),
            Ok(None) => Ok(self.unknown()),
            Err(error) => Err(error.into()),
        };
        drop(self.answer(outcome));
    }

    /// Ends the settlement because nothing more can be done now. The payment is due again if no node took any of its transactions;
    /// otherwise its outcome is unknown.
    pub(super) async fn give_up(self, journal: &Journal, error: FacilitatorError) {
        if self.journalled.is_empty() {
            return self.finish(journal, Err(error)).await;
        }
        let unknown = Ok(self.unknown());
        if !self.has_no_live_transaction() {
            return self.finish(journal, unknown).await;
        }
        let is_ineffective = |transaction: &B256| self.ineffective.contains(transaction);
        let record = journal.get(self.key()).await.ok().flatten();
        let is_due = match record.filter(|record| record.transactions.iter().all(is_ineffective)) {
            Some(record) => {
                let (reason, by) = (Reason::UnexpectedSettleError, journal.process_id());
                let step = SettlementStep::Fail { reason, by, known_transactions: record.transactions };
                journal.ledger().advance(self.key(), &step.into()).await.is_ok()
            }
            None => false,
        };
        self.finish(journal, if is_due { Err(error) } else { unknown }).await;
    }
}

/// Returns how many failures of each payment its caller knew of when it asked for settlement.
pub(super) fn known_failures(payments: &[QueuedPayment]) -> BTreeMap<PaymentKey, u32> {
    let have_failed = payments.iter().filter(|queued| queued.payment.known_failures() > 0);
    have_failed.map(|queued| (*queued.key(), queued.payment.known_failures())).collect()
}

/// The payments that this process settles: those that wait, and those whose transaction is on its way.
pub(crate) struct Queue {
    waiting: Mutex<Waiting>,
    in_progress: InProgress,
    /// Notified when a payment is added, and when a transaction has ended.
    changed: Notify,
    /// How many payments may be in progress.
    backlog: usize,
    is_closed: AtomicBool,
    /// The transactions of payments that are on their way.
    in_flight: AtomicUsize,
}

#[derive(Default)]
struct Waiting {
    /// Boxed, so that the spare capacity takes little memory.
    payments: VecDeque<Box<QueuedPayment>>,
    /// A task takes payments from the queue.
    is_served: bool,
}

/// What became of a payment that was to be added.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Added {
    /// It waits, and a task serves the queue.
    Queued,
    /// It waits, and the caller has to start a task that serves the queue.
    MustServe,
    /// It is in progress already.
    InProgress,
}

impl Queue {
    pub(crate) fn new(backlog: usize) -> Self {
        let (waiting, in_progress, changed, is_closed, in_flight) = Default::default();
        Self { waiting, in_progress, changed, backlog, is_closed, in_flight }
    }

    /// Adds a payment, unless it is in progress already. Without `outcome`, the outcome is recorded in the ledger.
    pub(super) fn add(
        &self,
        payment: Prechecked,
        verified: Verified,
        outcome: Option<OutcomeSender>,
    ) -> Result<Added, FacilitatorError> {
        // This comes first: a payment in progress is not refused for any reason.
        let Some(guard) = self.in_progress.enter(payment.key()) else { return Ok(Added::InProgress) };
        // A payment that nobody awaits is owed already, and nobody else would settle it for a while.
        if outcome.is_some() {
            self.check_open()?;
        }
        if self.in_progress.count() > self.backlog {
            return Err(full());
        }
        let queued = Box::new(QueuedPayment::new(payment, verified, outcome, guard));
        Ok(self.insert(|waiting| waiting.push_back(queued)))
    }

    /// Returns payments that waited before to the head of the queue. Returns `true` if the caller has to start a task that serves it.
    pub(super) fn put_back(&self, payments: Vec<QueuedPayment>) -> bool {
        if payments.is_empty() {
            return false;
        }
        let added = self.insert(|waiting| {
            for queued in payments.into_iter().rev() {
                waiting.push_front(Box::new(queued));
            }
        });
        added == Added::MustServe
    }

    fn insert(&self, insert: impl FnOnce(&mut VecDeque<Box<QueuedPayment>>)) -> Added {
        let was_served = {
            let mut waiting = self.lock();
            insert(&mut waiting.payments);
            std::mem::replace(&mut waiting.is_served, true)
        };
        self.changed.notify_one();
        if was_served { Added::Queued } else { Added::MustServe }
    }

    /// Refuses new payments from now on.
    pub(super) fn close(&self) {
        self.is_closed.store(true, Ordering::Release);
    }

    pub(super) fn is_closed(&self) -> bool {
        self.is_closed.load(Ordering::Acquire)
    }

    /// Fails if the queue is closed.
    pub(super) fn check_open(&self) -> Result<(), FacilitatorError> {
        if self.is_closed() {
            return Err(FacilitatorError::Busy {
                what: "the settlement engine is shutting down",
                retry_after: Duration::from_secs(5),
            });
        }
        Ok(())
    }

    /// Fails if the queue is full.
    pub(super) fn check_room(&self) -> Result<(), FacilitatorError> {
        if self.in_progress.count() >= self.backlog { Err(full()) } else { Ok(()) }
    }

    /// Returns how many payments are in progress.
    pub(super) fn count(&self) -> usize {
        self.in_progress.count()
    }

    pub(super) fn is_in_progress(&self, key: &PaymentKey) -> bool {
        self.in_progress.contains(key)
    }

    /// Returns when no payment is in progress.
    pub(super) async fn drained(&self) {
        self.in_progress.none().await;
    }

    /// Notes that a transaction of payments begins.
    pub(super) fn transaction_begins(&self) {
        self.in_flight.fetch_add(1, Ordering::Relaxed);
    }

    /// Has the next transaction begin, if payments gather for it.
    pub(super) fn transaction_ended(&self) {
        self.in_flight.fetch_sub(1, Ordering::Relaxed);
        self.changed.notify_one();
    }

    /// Removes the payments that have waited for too long.
    pub(super) fn take_expired(&self) -> Vec<QueuedPayment> {
        let mut waiting = self.lock();
        let now = Instant::now();
        let (expired, kept): (VecDeque<_>, VecDeque<_>) =
            std::mem::take(&mut waiting.payments).into_iter().partition(|queued| queued.deadline <= now);
        waiting.payments = kept;
        expired.into_iter().map(|queued| *queued).collect()
    }

    /// Returns `true` if no payment waits. The task that serves the queue has to end then.
    pub(super) fn is_served_out(&self) -> bool {
        let mut waiting = self.lock();
        waiting.is_served = !waiting.payments.is_empty();
        !waiting.is_served
    }

    /// Lets payments gather: until there are `most`, for at most half a block time or, if no transaction is on its way, 4 ms.
    /// Only transactions of payments count.
    pub(super) async fn gather(&self, most: usize, block_time: Duration) {
        let in_flight = || self.in_flight.load(Ordering::Relaxed);
        let (started, at_start) = (Instant::now(), in_flight());
        let until = match at_start {
            0 => started + BURST,
            _ => started + (block_time / 2).min(LONGEST_GATHERING),
        };
        loop {
            let changed = self.changed.notified();
            // When a transaction has ended, the next one need not wait.
            if self.lock().payments.len() >= most || (at_start > 0 && in_flight() < at_start) {
                return;
            }
            if timeout_at(until, changed).await.is_err() {
                return;
            }
        }
    }

    /// Takes the payments of the next transaction, in order: the first, and up to `most` that can share a transaction with it.
    pub(super) fn take(&self, most: usize, gas_cap: u32) -> Vec<QueuedPayment> {
        let mut waiting = self.lock();
        let Some(first) = waiting.payments.pop_front() else { return Vec::new() };
        if most <= 1 || first.batch_entry(gas_cap).is_none() {
            return vec![*first];
        }
        let token = first.key().asset;
        let mut gas = GasLimit::new(gas_cap);
        gas.admit(first.verified.gas);
        let mut taken = vec![*first];
        let mut kept = VecDeque::new();
        while taken.len() < most
            && let Some(queued) = waiting.payments.pop_front()
        {
            let fits =
                queued.key().asset == token && queued.batch_entry(gas_cap).is_some() && gas.admit(queued.verified.gas);
            if fits {
                taken.push(*queued);
            } else {
                kept.push_back(queued);
            }
        }
        kept.append(&mut waiting.payments);
        waiting.payments = kept;
        taken
    }

    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn full() -> FacilitatorError {
    FacilitatorError::Busy { what: "payments that wait for settlement", retry_after: Duration::from_secs(2) }
}

debug_fields!(Queue |this| { waiting: this.lock().payments.len() });

/// The keys of the payments that this process settles now.
#[derive(Clone, Debug, Default)]
struct InProgress(Arc<InProgressKeys>);

#[derive(Debug, Default)]
struct InProgressKeys {
    keys: Mutex<HashSet<PaymentKey>>,
    /// Notified when a payment is removed.
    fewer: Notify,
}

/// A payment in progress, until this is dropped.
struct InProgressGuard {
    all: InProgress,
    key: PaymentKey,
}

impl InProgress {
    /// Returns `None` if the payment is in progress already.
    fn enter(&self, key: PaymentKey) -> Option<InProgressGuard> {
        if !self.keys().insert(key) {
            return None;
        }
        telemetry::backlog(1);
        Some(InProgressGuard { all: self.clone(), key })
    }

    fn count(&self) -> usize {
        self.keys().len()
    }

    fn contains(&self, key: &PaymentKey) -> bool {
        self.keys().contains(key)
    }

    async fn none(&self) {
        loop {
            let fewer = self.0.fewer.notified();
            if self.count() == 0 {
                return;
            }
            fewer.await;
        }
    }

    fn keys(&self) -> MutexGuard<'_, HashSet<PaymentKey>> {
        self.0.keys.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for InProgressGuard {
    fn drop(&mut self) {
        self.all.keys().remove(&self.key);
        telemetry::backlog(-1);
        self.all.0.fewer.notify_waiters();
    }
}
