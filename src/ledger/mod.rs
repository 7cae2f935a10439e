//! The ledger: what is known of every payment, and who may act on it.
//!
//! A payment is identified by network, asset, payer and nonce ([`PaymentKey`]). Its [`Record`] moves along two axes:
//!
//! | axis | states |
//! |---|---|
//! | [`Fulfilment`] | `Reserved → Working → Produced → Delivered`, or `Released` after a failed attempt |
//! | [`Settlement`] | `None → Due → Submitted → Settled → Final`, or `Dead`; `Unknown` when sight was lost of a submission |
//!
//! # Contract
//!
//! Every backend promises, whatever the number of callers, processes and crashes:
//!
//! 1. [`reserve`](Ledger::reserve) creates a record exactly once per key. Of any number of concurrent callers one gets
//!    [`Reservation::New`], the others see the record.
//! 2. Steps of fulfilment belong to the holder of the [`Lease`]; with a lease that has been taken over they fail with
//!    [`LedgerError::LeaseLost`] and change nothing; what was taken over is never discarded, so that no later reservation has
//!    that lease again. Steps of settlement are facts about the chain; they need no lease.
//! 3. A step is durable before the call returns. Some may be so a moment later, but not later than the steps after them, and before
//!    anybody is shown them by [`get`](Ledger::get): those with which a crash loses nothing, because nothing was done that must not
//!    be done again (a new reservation, `Admit` of a payment that is not due, the first `Start` of one that nobody has paid), or
//!    because the chain can be asked again (`Settle`, `Finalize`), or because it makes no difference (`Deliver`). In particular
//!    [`submit`](Ledger::submit) makes a transaction, its nonce and the payments in it durable, all or nothing, before the
//!    transaction leaves the process.
//! 4. Steps that the tables in [`Record::fulfil`] and [`Record::settle`] do not allow fail with [`LedgerError::InvalidTransition`]
//!    and change nothing. `Settled` is never left except to `Final`, or back to `Due` when a reorganization undid it;
//!    `Unknown` is never treated as failed.
//! 5. [`FulfilmentStep::Admit`] checks, atomically with the step, that the sum of what the payer has in flight stays
//!    within the balance the caller observed. Where that depends on transfers since that block, the step fails with
//!    [`LedgerError::Stale`]; where it depends on what is being settled just now, with [`LedgerError::BalancePending`].
//! 6. A nonce of a sender belongs to the process that submitted with it, until that process gives it back or has not used it
//!    for [`NONCE_HELD_SECONDS`]: of any number of processes that share a key, one gets it. A payment that one process
//!    settles is not submitted by another before [`Settling::until`].
//! 7. Of the records of one payer on one network and token, no two have the same [`id`](Record::id):
//!    [`reserve`](Ledger::reserve) tells, atomically with the reservation, that another payment has it.
//! 8. A record is kept until its authorization can no longer be executed and its fate is settled. Nothing grows
//!    without bound: responses age out by count, bytes and time, and of the transactions of one nonce the newest are kept.
//! 9. [`FulfilmentStep::Defer`] checks its [`CreditLimit`] atomically with the step, whoever else defers at the same time:
//!    - the sum of all deferred payments that are not paid, this one included, is at most `total`;
//!    - the same sum of this payer, on this network and in this token, is at most `per_payer`;
//!    - the payer has, there, at least `history` payments that are `Settled` or `Final`;
//!    - none of its deferred payments there that are not paid is `Dead` or has a [`last_failure`](Record::last_failure).
//!
//!    Otherwise the step fails with [`LedgerError::NoCredit`] and changes nothing. Records that were forgotten count for
//!    nothing. A reorganization may bring the sums above the limit; then nothing more is deferred until they are below it.
//! 10. A payment that was recorded as failed is settled only if the payer asks again. [`submit`](Ledger::submit) and
//!     [`SettlementStep::Delegate`] name the [failures](Record::failures) that were known when the settlement was asked for, and are
//!     refused if there are others on record: so what waits in the queue of one process is not settled after another process has
//!     recorded a failure. [`SettlementStep::Fail`] is refused for a payment that another process has submitted or entrusted, before
//!     [`Settling::until`].
//!
//! One payee has one ledger: two services that share `payTo` share the ledger, or a transfer could be credited twice.

mod credit;
mod exposure;
mod lazy_set;
mod listing;
#[cfg(all(feature = "metrics", any(feature = "onchain", feature = "remote")))]
mod measured;
mod memory;
#[cfg(feature = "postgres")]
mod postgres;
mod record;
mod records;
mod responses;
#[cfg(any(feature = "onchain", feature = "remote", feature = "server"))]
mod retry;
#[cfg(any(feature = "sqlite", feature = "postgres"))]
mod row;
mod shard;
#[cfg(feature = "sqlite")]
mod sqlite;
mod step;
mod submission;

use std::sync::Arc;

use async_trait::async_trait;

use crate::payment::PaymentKey;

pub use credit::CreditLimit;
pub use listing::Listing;
pub use memory::MemoryLedger;
#[cfg(feature = "postgres")]
pub use postgres::{PostgresLedger, PostgresLedgerBuilder};
pub use record::{BodyDigest, Fingerprint, Fulfilment, Lease, Record, Settlement, SettlementState, Settling};
pub use responses::{ResponseLimits, StoredResponse};
#[cfg(any(feature = "onchain", feature = "remote", feature = "server"))]
pub(crate) use retry::settle_with_retries;
#[cfg(feature = "sqlite")]
pub use sqlite::SqliteLedger;
pub use step::{FulfilmentStep, InvalidTransition, SettlementStep};
pub use submission::{NONCE_HELD_SECONDS, Sender, Submission};

/// A store of payments; see the [module](self) for its contract.
#[async_trait]
pub trait Ledger: Send + Sync + 'static {
    /// Creates the record of a payment seen for the first time, leased to the caller until `lease_until` (Unix seconds).
    ///
    /// # Errors
    /// [`LedgerError::IdTaken`] if the payer gave its [`id`](Record::id) to another payment that is still on record;
    /// [`LedgerError::Full`] if the backend's bound is reached; [`LedgerError::Backend`] if it failed.
    async fn reserve(&self, record: &Record) -> Result<Reservation, LedgerError>;

    /// The record of a payment, if it is known.
    ///
    /// # Errors
    /// [`LedgerError::Backend`] if the backend failed.
    async fn get(&self, key: &PaymentKey) -> Result<Option<Record>, LedgerError>;

    /// Leases a known payment anew: `None` if another caller was faster, or the holder's lease still runs.
    ///
    /// `seen` is the epoch of the record the caller decided on; compare-and-set. The record changes as
    /// [`Record::lease_anew`] says.
    ///
    /// # Errors
    /// [`LedgerError::Backend`] if the backend failed.
    async fn take_over(&self, key: &PaymentKey, seen: u64, now: u64, until: u64) -> Result<Option<Lease>, LedgerError>;

    /// Takes a step along the axis of fulfilment.
    ///
    /// # Errors
    /// [`LedgerError::LeaseLost`], [`LedgerError::InvalidTransition`], [`LedgerError::InsufficientFunds`],
    /// [`LedgerError::Stale`], [`LedgerError::BalancePending`], [`LedgerError::NoCredit`] or [`LedgerError::Backend`].
    async fn fulfil(&self, lease: &Lease, step: &FulfilmentStep) -> Result<(), LedgerError>;

    /// Takes a step along the axis of settlement.
    ///
    /// # Errors
    /// [`LedgerError::NotFound`], [`LedgerError::InvalidTransition`] or [`LedgerError::Backend`].
    async fn settle(&self, key: &PaymentKey, step: &SettlementStep) -> Result<(), LedgerError>;

    /// Forgets a reservation for which no work was done and nothing was submitted, and which was never taken over
    /// ([`Record::is_discardable`]).
    ///
    /// # Errors
    /// [`LedgerError::LeaseLost`], [`LedgerError::InvalidTransition`] or [`LedgerError::Backend`].
    async fn discard(&self, lease: &Lease) -> Result<(), LedgerError>;

    /// Keeps a response for replays, if it is within the bounds; otherwise drops it silently.
    ///
    /// # Errors
    /// [`LedgerError::Backend`] if the backend failed.
    async fn store_response(&self, key: &PaymentKey, response: StoredResponse) -> Result<(), LedgerError>;

    /// The response kept for a payment, if it is still there.
    ///
    /// # Errors
    /// [`LedgerError::Backend`] if the backend failed.
    async fn response(&self, key: &PaymentKey) -> Result<Option<Arc<StoredResponse>>, LedgerError>;

    /// Counts one more replay of a payment's response and returns how many there have been, this one included.
    ///
    /// # Errors
    /// [`LedgerError::NotFound`] or [`LedgerError::Backend`].
    async fn count_replay(&self, key: &PaymentKey) -> Result<u32, LedgerError>;

    /// Records a transaction that is about to leave the process, and takes [`SettlementStep::Submit`] for every payment in it.
    /// All of that is durable before this returns, or none of it happens.
    ///
    /// # Errors
    /// [`LedgerError::NotDue`] names the payments that are settled already, looked after by another process, or recorded as failed
    /// after their settlement was asked for ([`Submission::known_failures`]);
    /// [`LedgerError::NonceTaken`] if another process uses the nonce; [`LedgerError::NotFound`] or [`LedgerError::Backend`].
    async fn submit(&self, submission: Submission) -> Result<(), LedgerError>;

    /// Gives a nonce back that no node took a transaction with; only the process `by` that submitted with it can.
    ///
    /// # Errors
    /// [`LedgerError::Backend`] if the backend failed.
    async fn free_nonce(&self, sender: &Sender, nonce: u64, by: u64) -> Result<(), LedgerError>;

    /// Forgets the transactions of nonces below `below`, which are in blocks that will not be undone.
    ///
    /// # Errors
    /// [`LedgerError::Backend`] if the backend failed.
    async fn forget_nonces(&self, sender: &Sender, below: u64) -> Result<(), LedgerError>;

    /// The newest transaction of every nonce in use from `from` on, by nonce; at most 256.
    ///
    /// # Errors
    /// [`LedgerError::Backend`] if the backend failed.
    async fn submissions(&self, sender: &Sender, from: u64) -> Result<Vec<Submission>, LedgerError>;

    /// Payments by their state, in the order of [`PaymentKey`].
    ///
    /// # Errors
    /// [`LedgerError::Backend`] if the backend failed.
    async fn list(&self, listing: &Listing) -> Result<Vec<Record>, LedgerError>;

    /// How many payments are in which state of settlement.
    ///
    /// # Errors
    /// [`LedgerError::Backend`] if the backend failed.
    async fn counts(&self) -> Result<Counts, LedgerError>;

    /// The largest response body this ledger keeps, in bytes; larger ones need not be copied for it.
    fn response_limit(&self) -> usize;
}

/// Times the calls of a ledger and counts its failures, if the feature `metrics` is on.
#[cfg(any(feature = "onchain", feature = "remote"))]
pub(crate) fn measured(ledger: Arc<dyn Ledger>) -> Arc<dyn Ledger> {
    #[cfg(feature = "metrics")]
    return measured::Measured::over(ledger);
    #[cfg(not(feature = "metrics"))]
    ledger
}

/// What [`Ledger::reserve`] found.
#[derive(Clone, Debug)]
pub enum Reservation {
    /// The payment is new, and the caller's to work on.
    New(Lease),
    /// The payment is known.
    Known(Box<Record>),
}

/// Payments by state of settlement, over the life of the ledger.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Paid.
    pub settled: u64,
    /// Reserved, being worked on, due or submitted.
    pub pending: u64,
    /// Submitted, and out of sight.
    pub unknown: u64,
    /// Not executed when last tried, or proven never to be.
    pub failed: u64,
}

impl Counts {
    /// Where a payment in this state is counted: with a failure on record or not, its last attempt released or not.
    fn counter(&mut self, state: SettlementState, is_released: bool, has_failed: bool) -> Option<&mut u64> {
        Some(match state {
            SettlementState::Settled | SettlementState::Final => &mut self.settled,
            SettlementState::Unknown => &mut self.unknown,
            SettlementState::Dead => &mut self.failed,
            SettlementState::Due if has_failed => &mut self.failed,
            SettlementState::None if is_released => return None,
            SettlementState::None | SettlementState::Due | SettlementState::Submitted => &mut self.pending,
        })
    }
}

/// Why the ledger did not do as asked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LedgerError {
    /// Another caller has taken the payment over; stop working on it.
    #[error("the payment has been taken over by another worker")]
    LeaseLost,
    /// The payment is not in the ledger.
    #[error("the payment is not in the ledger")]
    NotFound,
    /// The state machine does not allow the step; the caller's view is out of date.
    #[error(transparent)]
    InvalidTransition(#[from] InvalidTransition),
    /// The payer's balance does not cover what it has in flight.
    #[error("the payer's balance does not cover this payment and what else it has in flight")]
    InsufficientFunds,
    /// The payer has paid others since its balance was read; read it again and repeat the step.
    #[error("the payer has paid others since its balance was read")]
    Stale,
    /// Whether the payer's balance covers this payment is known once what it has submitted is settled; repeat the step
    /// then, with the same balance.
    #[error("whether the payer's balance covers this payment is known once its other payments are settled")]
    BalancePending,
    /// The payment is not deferred: its payer is not known well enough, has not paid what was deferred before, or too much is
    /// owed already. Settle it now.
    #[error("this payment gets no credit")]
    NoCredit,
    /// These payments cannot be submitted: they are settled already, another process looks after them, or they were recorded as
    /// failed after their settlement was asked for. Leave them out.
    #[error("{} of the payments are settled, looked after by another process, or have failed meanwhile", .0.len())]
    NotDue(Vec<PaymentKey>),
    /// Another process uses the nonce.
    #[error("another process uses the nonce; the next one free may be {next}")]
    NonceTaken {
        /// The lowest nonce above all that are known.
        next: u64,
    },
    /// The payer gave the payment's id to another payment.
    #[error("the payer gave the payment's id to another payment")]
    IdTaken {
        /// The payment that has it.
        key: PaymentKey,
    },
    /// The bound on records is reached; try again later.
    #[error("the ledger is full")]
    Full,
    /// The store behind the ledger failed; the step may be repeated.
    #[error("the ledger's store failed")]
    Backend(#[source] Box<dyn std::error::Error + Send + Sync>),
}
