//! The ledger: the record of every payment, and who may work on it.
//!
//! A payment is identified by network, asset, payer and nonce ([`PaymentKey`]). Its [`Record`] has two independent states:
//!
//! | axis | states |
//! |---|---|
//! | [`Fulfilment`], the work | `Reserved → Working → Produced → Delivered`, or `Released` after a failed attempt |
//! | [`Settlement`], the money | `None → Due → Submitted → Settled → Final`, or `Dead`; `Unknown` while the outcome of a submission is unknown |
//!
//! [`MemoryLedger`] keeps records in memory, [`SqliteLedger`] in a file, [`PostgresLedger`] in a database that several processes share.
//!
//! # Contract
//!
//! A backend implements [`Ledger`], which has three roles: the records of payments, their responses ([`ResponseLedger`]), and the
//! transactions that settle them ([`TransactionLedger`]). Whatever the number of callers, processes and crashes, it promises:
//!
//! 1. **Reservation.** [`reserve`](Ledger::reserve) creates a record once per key. One of any number of concurrent callers gets
//!    [`Reservation::New`]; the others get the record.
//! 2. **Leases.** Only the holder of the current [`Lease`] can take a step of fulfilment. With a lease that was taken over, the step
//!    fails with [`LedgerError::LeaseLost`] and changes nothing. A record that was ever taken over is never discarded, so a later
//!    reservation cannot reuse its lease. Steps of settlement report facts about the chain and need no lease.
//! 3. **Durability.** A step is durable before the call returns. In particular, [`submit`](TransactionLedger::submit) makes a transaction, its
//!    nonce and the payments in it durable, all or nothing, before the transaction leaves the process. The following steps may become
//!    durable later ([`Record::may_lose`]), but before any later step and before [`get`](Ledger::get) shows them, because a crash loses
//!    nothing by them:
//!    - a new reservation, `Admit` of a payment that is not due, and the first `Start` of an unpaid one: no result was shown yet;
//!    - `Settle` and `Finalize`: the chain can be asked again;
//!    - `Deliver`: a produced response is replayed like a delivered one.
//! 4. **Transitions.** [`advance`](Ledger::advance) returns the record as it is after the step. A step that the tables of
//!    [`Record::apply`], [`Record::fulfil`] and [`Record::settle`] do not allow fails and changes nothing. `Settled` changes only to `Final`, or back to `Due` after a
//!    reorganization. `Unknown` is never treated as failed.
//! 5. **Balances.** [`FulfilmentStep::Admit`] checks, atomically with the step, that the payer's payments in flight stay within the
//!    balance that the caller read. The step fails with [`LedgerError::Stale`] if transfers since that block decide, and with
//!    [`LedgerError::BalancePending`] if payments that are being settled decide.
//! 6. **Account nonces.** A nonce of a [`Sender`] belongs to the process that submitted with it, until that process frees it or has
//!    not used it for [`NONCE_HELD_SECONDS`]. One of any number of processes that share a key gets it. A payment that one process
//!    settles is not submitted by another before [`Settling::until`].
//! 7. **Payment ids.** No two records of one payer on one network and token have the same [`id`](Record::id).
//!    [`reserve`](Ledger::reserve) reports a taken id atomically with the reservation.
//! 8. **Retention.** A record is kept until its authorization can no longer be executed and its outcome is known; a permit whose outcome
//!    nobody can find out, for a week. Nothing grows without bound: responses are limited by count, bytes and age, and only the newest transaction of a nonce is kept.
//! 9. **Credit.** [`FulfilmentStep::Defer`] checks atomically with the step, whoever else defers at that moment:
//!    - the sum of the payer's unpaid deferred payments on this network and in this token, this one included, is at most `limit`;
//!    - that sum is at most what the payer has settled there to the same payee within the last ten minutes, in payments that are `Settled`
//!      or `Final`;
//!    - none of its unpaid deferred payments there is `Dead` or has a [`last_failure`](Record::last_failure), and this one can still be
//!      settled.
//!
//!    Otherwise the step fails with [`LedgerError::NoCredit`] and changes nothing. A deferred payment that is never settled counts until
//!    its record is removed, a quarter of an hour after `validBefore` at the earliest, and so for longer than any payment that was settled before it: whatever a payer
//!    does, it has paid as much as it owes in the end. A reorganization can raise what is owed above what was settled; nothing more of the
//!    payer's is deferred until it is below again.
//! 10. **Failures.** A payment whose failure is on record is settled only if the payer presents it again. [`submit`](TransactionLedger::submit)
//!     and [`SettlementStep::Delegate`] name the number of [failures](Record::failures) that were known when settlement was requested,
//!     and are refused if more are on record. So a payment queued in one process is not settled after another process has recorded
//!     a failure. [`SettlementStep::Fail`] is refused for a payment that another process has submitted, delegated or claimed last, and if
//!     it does not know the payment's newest transaction: a process that was held up does not know what became of a later attempt.
//!
//! Services that share a payee (`payTo`) must share its ledger. Otherwise one transfer could be credited twice.
//!
//! # A backend of your own
//!
//! The state machines and the rules about money are here, and storage knows nothing of them. A backend finds a record, has the rules change
//! it, and stores it if it has not changed in between:
//!
//! | what | is decided by |
//! |---|---|
//! | a step of a payment, and its lease | [`Record::apply`], [`Record::check_discard`], [`Record::submit`] |
//! | balance and credit: whether the payer's other payments permit the step | [`PayerSums`], by [`PayerKey`] |
//! | who may use an account nonce | [`Nonce::is_open_to`], or [`Nonces`], which keeps them in memory |
//! | which responses are kept | [`ResponseLimits::admit`], or [`Responses`], which keeps them in memory |
//! | what a listing selects and counts | [`Listing::holds`], [`Counts::add`] |
//! | when a record goes, and what is counted of it | [`Record::forget_at`], [`Record::may_be_forgotten`], [`Counts::add_removed`] |
//! | what may be written later | [`Record::may_lose`] |
//! | payment channels | [`ChannelRecord::apply`](channels::ChannelRecord::apply), [`ChannelRecord::forget_at`](channels::ChannelRecord::forget_at) |
//!
//! A database that several processes share needs three more things:
//!
//! - **A turn for each payer.** `Admit` with funds and `Defer` depend on the payer's other payments, all other steps on one record. So these two
//!   are written only if no other step of the same [`PayerKey`] was, since the sums were read: with a row or a version for each payer that
//!   both write. The sums can be the database's ([`PayerSums::in_flight`], [`PayerSums::credit`]), so that nobody loads the payer's records.
//! - **A number for each process.** A lease, a claim to settle and a nonce are held by a process, and count only while it is alive by the
//!   database's clock (invariant I18): processes write that they are, and one that was called dead gets a new number when it comes back.
//! - **Room for a batch.** [`submit`](TransactionLedger::submit) writes a transaction, its nonce and all of its payments, all or nothing: as many as
//!   share a transaction.
//!
//! [`PostgresLedger`] does it so. Vouchers need a [`ChannelLedger`](channels::ChannelLedger) beside it, which has its own conformance tests.
//!
//! Records are stored as text ([`Record::to_json`], [`Record::from_json`]), keys as bytes that are in the order of keys
//! ([`PaymentKey::to_bytes`]), and responses as the bytes that they are.
//!
//! The heart of a backend is `advance`. This one keeps records as text in a map, and a lock in place of a transaction:
//!
//! ```
//! use std::collections::BTreeMap;
//!
//! use tower_x402::{
//!     ledger::{LedgerError, PayerKey, PayerSums, PaymentStep, Record},
//!     payment::PaymentKey,
//! };
//!
//! /// The caller holds the lock.
//! fn advance(
//!     rows: &mut BTreeMap<PaymentKey, String>,
//!     key: &PaymentKey,
//!     step: &PaymentStep,
//!     now: u64,
//! ) -> Result<Record, LedgerError> {
//!     let read = |text: &String| Record::from_json(text).map_err(|error| LedgerError::Backend(error.into()));
//!     let before = read(rows.get(key).ok_or(LedgerError::NotFound)?)?;
//!     let mut record = before.clone();
//!     record.apply(step, now)?;
//!     // A database looks for the payer's payments by an index.
//!     let all = rows.values().map(read).collect::<Result<Vec<Record>, _>>()?;
//!     let others = all.iter().filter(|other| other.key != *key && PayerKey::of(other) == PayerKey::of(&before));
//!     PayerSums::of(others, now).allow(&before, step)?;
//!     let text = record.to_json().map_err(|error| LedgerError::Backend(error.into()))?;
//!     rows.insert(*key, text);
//!     Ok(record)
//! }
//! ```
//!
//! `tests/settlement/ledger/map.rs` in the repository is such a ledger, whole. It and the backends of this crate pass the tests of the
//! contract, which the feature `conformance` brings: `tower_x402::ledger_conformance!(open)` makes a test of each, on your ledger. What
//! happens at a crash, and between processes, needs tests of its own.
//!
//! A ledger can also wrap another one. This one logs the payments whose outcome is unknown:
//!
//! ```
//! use std::sync::Arc;
//!
//! use async_trait::async_trait;
//! use tower_x402::{ledger::*, payment::PaymentKey};
//!
//! struct LoggingLedger(Arc<dyn Ledger>);
//!
//! #[async_trait]
//! impl Ledger for LoggingLedger {
//!     async fn advance(&self, key: &PaymentKey, step: &PaymentStep) -> Result<Record, LedgerError> {
//!         if matches!(step, PaymentStep::Settle(SettlementStep::MarkUnknown)) {
//!             eprintln!("the outcome of payment {} is unknown", key.nonce);
//!         }
//!         self.0.advance(key, step).await
//!     }
//!
//!     async fn reserve(&self, record: &Record) -> Result<Reservation, LedgerError> {
//!         self.0.reserve(record).await
//!     }
//!     // The other methods, and those of the other two roles, forward in the same way.
//! #   async fn get(&self, key: &PaymentKey) -> Result<Option<Record>, LedgerError> { self.0.get(key).await }
//! #   async fn discard(&self, lease: &Lease) -> Result<(), LedgerError> { self.0.discard(lease).await }
//! #   async fn list(&self, listing: &Listing) -> Result<Vec<Record>, LedgerError> { self.0.list(listing).await }
//! #   async fn counts(&self) -> Result<Counts, LedgerError> { self.0.counts().await }
//! }
//! # #[async_trait]
//! # impl ResponseLedger for LoggingLedger {
//! #   async fn store_response(&self, key: &PaymentKey, response: StoredResponse) -> Result<(), LedgerError> {
//! #       self.0.store_response(key, response).await
//! #   }
//! #   async fn response(&self, key: &PaymentKey) -> Result<Option<StoredResponse>, LedgerError> { self.0.response(key).await }
//! #   fn response_limit(&self) -> usize { self.0.response_limit() }
//! # }
//! # #[async_trait]
//! # impl TransactionLedger for LoggingLedger {
//! #   async fn submit(&self, transaction: JournaledTransaction) -> Result<(), LedgerError> { self.0.submit(transaction).await }
//! #   async fn free_nonce(&self, sender: &Sender, nonce: u64, by: u64) -> Result<(), LedgerError> {
//! #       self.0.free_nonce(sender, nonce, by).await
//! #   }
//! #   async fn forget_nonces(&self, sender: &Sender, below: u64) -> Result<(), LedgerError> {
//! #       self.0.forget_nonces(sender, below).await
//! #   }
//! #   async fn submissions(&self, sender: &Sender, from: u64) -> Result<Vec<JournaledTransaction>, LedgerError> {
//! #       self.0.submissions(sender, from).await
//! #   }
//! # }
//!
//! let ledger = LoggingLedger(Arc::new(MemoryLedger::new()));
//! ```

pub mod channels;
#[cfg(feature = "conformance")]
pub mod conformance;
#[cfg(all(feature = "metrics", any(feature = "onchain", feature = "remote")))]
mod measured;
mod memory;
mod payer;
#[cfg(feature = "postgres")]
mod postgres;
mod record;
mod responses;
#[cfg(any(feature = "onchain", feature = "remote", feature = "server", feature = "postgres"))]
mod retry;
#[cfg(feature = "sqlite")]
mod sqlite;
mod step;
mod stored;
mod transactions;

#[cfg(any(feature = "onchain", feature = "remote"))]
use std::sync::Arc;

use async_trait::async_trait;

use crate::{network::Network, payment::PaymentKey};

pub use memory::MemoryLedger;
pub use payer::{PayerKey, PayerSums};
#[cfg(feature = "postgres")]
pub use postgres::{PostgresLedger, PostgresLedgerBuilder};
pub use record::{Fingerprint, Fulfilment, InvalidTransition, Lease, Record, Settlement, SettlementState};
pub use responses::{ResponseLimits, Responses, StoredResponse};
#[cfg(any(feature = "remote", feature = "server", feature = "postgres"))]
pub(crate) use retry::Pauses;
#[cfg(any(feature = "onchain", feature = "remote", feature = "server"))]
pub(crate) use retry::settle_with_retries;
#[cfg(feature = "sqlite")]
pub use sqlite::SqliteLedger;
#[cfg(feature = "sqlite")]
#[doc(hidden)]
pub use sqlite::schema as sqlite_file;
pub use step::{BodyDigest, FulfilmentStep, PaymentStep, SettlementStep, Settling};
pub use stored::InvalidRecord;
pub use transactions::{JournaledTransaction, NONCE_HELD_SECONDS, Nonce, Nonces, Sender};

/// A store of payments: their records. The [module](self) states the contract that every implementation keeps.
#[async_trait]
pub trait Ledger: ResponseLedger + TransactionLedger {
    /// Creates the record of a payment that is seen for the first time, leased to the caller until [`Record::lease_until`].
    ///
    /// # Errors
    /// - [`LedgerError::IdTaken`] if another payment of the payer has the same [`id`](Record::id).
    /// - [`LedgerError::Full`] if the backend's bound on records is reached.
    /// - [`LedgerError::Backend`] if the store failed.
    async fn reserve(&self, record: &Record) -> Result<Reservation, LedgerError>;

    /// Returns the record of a payment, or `None` if it is not in the ledger.
    ///
    /// # Errors
    /// [`LedgerError::Backend`] if the store failed.
    async fn get(&self, key: &PaymentKey) -> Result<Option<Record>, LedgerError>;

    /// Takes a step of a payment, and returns the record as it is after it.
    ///
    /// # Errors
    /// - [`LedgerError::NotFound`] if the payment is not in the ledger.
    /// - Those of [`Record::apply`] and [`PayerSums::allow`].
    /// - [`LedgerError::Backend`] if the store failed.
    async fn advance(&self, key: &PaymentKey, step: &PaymentStep) -> Result<Record, LedgerError>;

    /// Removes a reservation that was never worked on, submitted or taken over ([`Record::is_discardable`]).
    ///
    /// # Errors
    /// [`LedgerError::NotFound`], [`LedgerError::LeaseLost`], [`LedgerError::InvalidTransition`] or [`LedgerError::Backend`].
    async fn discard(&self, lease: &Lease) -> Result<(), LedgerError>;

    /// Lists payments by state, in the order of [`PaymentKey`].
    ///
    /// # Errors
    /// [`LedgerError::Backend`] if the store failed.
    async fn list(&self, listing: &Listing) -> Result<Vec<Record>, LedgerError>;

    /// Counts payments by state of settlement.
    ///
    /// # Errors
    /// [`LedgerError::Backend`] if the store failed.
    async fn counts(&self) -> Result<Counts, LedgerError>;
}

/// A store of responses for replays. Their bytes are the transport's.
#[async_trait]
pub trait ResponseLedger: Send + Sync + 'static {
    /// Keeps a response for replays. A response that exceeds the limits, or comes after another one, is dropped without an error.
    ///
    /// # Errors
    /// [`LedgerError::Backend`] if the store failed.
    async fn store_response(&self, key: &PaymentKey, response: StoredResponse) -> Result<(), LedgerError>;

    /// Returns the response kept for a payment, if it is still there.
    ///
    /// # Errors
    /// [`LedgerError::Backend`] if the store failed.
    async fn response(&self, key: &PaymentKey) -> Result<Option<StoredResponse>, LedgerError>;

    /// Returns the size of the largest response body that this ledger keeps, in bytes. A larger one need not be copied for it.
    fn response_limit(&self) -> usize;
}

/// A store of the transactions that settle payments, and of the account nonces that they use (points 3, 6 and 10 of the contract).
#[async_trait]
pub trait TransactionLedger: Send + Sync + 'static {
    /// Records a transaction that is about to leave the process, and takes [`SettlementStep::Submit`] for every payment in it.
    /// Either all of it is durable when this returns, or nothing happened.
    ///
    /// # Errors
    /// - [`LedgerError::NotDue`] names the payments that are settled, that another process settles, or that failed after their
    ///   settlement was requested ([`JournaledTransaction::known_failures`]).
    /// - [`LedgerError::NonceTaken`] if another process uses the nonce.
    /// - [`LedgerError::NotFound`] or [`LedgerError::Backend`].
    async fn submit(&self, transaction: JournaledTransaction) -> Result<(), LedgerError>;

    /// Frees a nonce whose transaction no node accepted. Does nothing unless process `by` submitted with it last.
    ///
    /// # Errors
    /// [`LedgerError::Backend`] if the store failed.
    async fn free_nonce(&self, sender: &Sender, nonce: u64, by: u64) -> Result<(), LedgerError>;

    /// Removes the transactions of nonces below `below`, which are in final blocks.
    ///
    /// # Errors
    /// [`LedgerError::Backend`] if the store failed.
    async fn forget_nonces(&self, sender: &Sender, below: u64) -> Result<(), LedgerError>;

    /// Returns the newest transaction of every nonce in use, from `from` on and in the order of nonces; at most 256.
    ///
    /// # Errors
    /// [`LedgerError::Backend`] if the store failed.
    async fn submissions(&self, sender: &Sender, from: u64) -> Result<Vec<JournaledTransaction>, LedgerError>;
}

/// Times the calls of a ledger and counts its failures, if the feature `metrics` is on.
#[cfg(any(feature = "onchain", feature = "remote"))]
pub(crate) fn measured(ledger: Arc<dyn Ledger>) -> Arc<dyn Ledger> {
    #[cfg(feature = "metrics")]
    return Arc::new(measured::MeasuredLedger(ledger));
    #[cfg(not(feature = "metrics"))]
    ledger
}

/// The result of [`Ledger::reserve`].
#[derive(Clone, Debug)]
pub enum Reservation {
    /// The payment is new, and leased to the caller.
    New(Lease),
    /// The payment is in the ledger already.
    Known(Box<Record>),
}

/// The payments that [`Ledger::list`] returns, a page at a time.
///
/// ```
/// # async fn example(ledger: &dyn tower_x402::ledger::Ledger) -> Result<(), tower_x402::ledger::LedgerError> {
/// use tower_x402::ledger::{Listing, SettlementState};
///
/// let mut open = Listing::of([SettlementState::Due, SettlementState::Submitted, SettlementState::Unknown]);
/// loop {
///     let page = ledger.list(&open).await?;
///     let Some(last) = page.last() else { break };
///     open.after = Some(last.key);
///     for record in page {
///         println!("{} owes {}", record.key.payer, record.amount());
///     }
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Listing {
    /// The chain; `None` for all.
    pub network: Option<Network>,
    /// The states of settlement; empty for all.
    pub settlement: Vec<SettlementState>,
    /// The states of fulfilment; empty for all.
    pub fulfilment: Vec<Fulfilment>,
    /// Only payments that no process works on or settles at this time, in Unix seconds.
    pub idle_at: Option<u64>,
    /// Only payments that were settled in this block or an earlier one.
    pub up_to_block: Option<u64>,
    /// Only payments after this one in the order of [`PaymentKey`].
    pub after: Option<PaymentKey>,
    /// The largest number of payments. Default: 256.
    pub limit: usize,
}

impl Listing {
    /// Selects all payments in one of these states of settlement.
    pub fn of(settlement: impl IntoIterator<Item = SettlementState>) -> Self {
        Self { settlement: settlement.into_iter().collect(), ..Self::default() }
    }

    /// Returns `true` if the record is one to list, apart from [`after`](Self::after) and [`limit`](Self::limit).
    pub fn holds(&self, record: &Record) -> bool {
        let is_idle = |at| {
            !record.is_leased(at)
                && (record.settlement.paid_by().is_some() || record.lease_until < at)
                && record.settling.is_none_or(|settling| settling.until < at)
        };
        self.network.is_none_or(|network| record.key.network == network)
            && (self.settlement.is_empty() || self.settlement.contains(&record.settlement.state()))
            && (self.fulfilment.is_empty() || self.fulfilment.contains(&record.fulfilment))
            && self.idle_at.is_none_or(is_idle)
            && self.up_to_block.is_none_or(|up_to| record.settlement.block().is_some_and(|block| block <= up_to))
    }
}

impl Default for Listing {
    fn default() -> Self {
        Self {
            network: None,
            settlement: Vec::new(),
            fulfilment: Vec::new(),
            idle_at: None,
            up_to_block: None,
            after: None,
            limit: 256,
        }
    }
}

/// Numbers of payments by state of settlement, over the life of the ledger.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Payments that are settled or final, including those whose records were removed.
    pub settled: u64,
    /// Payments that are reserved, being worked on, due or submitted.
    pub pending: u64,
    /// Payments that were submitted, with an unknown outcome.
    pub unknown: u64,
    /// Payments whose last attempt failed, or that are dead.
    pub failed: u64,
    /// Permits whose outcome nobody has found out, and whose records were removed: what they charged may have been paid or not.
    pub unresolved: u64,
}

impl Counts {
    /// Counts a payment.
    pub fn add(&mut self, record: &Record) {
        let (is_released, has_failed) = (record.fulfilment == Fulfilment::Released, record.last_failure.is_some());
        if let Some(counter) = self.counter(record.settlement.state(), is_released, has_failed) {
            *counter += 1;
        }
    }

    /// Counts a payment whose record is removed, as far as it stays counted.
    pub fn add_removed(&mut self, record: &Record) {
        match record.settlement {
            Settlement::Settled { .. } | Settlement::Final { .. } => self.settled += 1,
            Settlement::Submitted | Settlement::Unknown => {
                let PaymentKey { network, asset, payer, nonce } = record.key;
                let units = record.amount();
                tracing::warn!(%network, %asset, %payer, %nonce, %units, "the outcome of a permit was never found out");
                self.unresolved += 1;
            }
            Settlement::None | Settlement::Due | Settlement::Dead => {}
        }
    }

    /// Returns the counter for payments in this state. A released payment that was never due is in none.
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

/// An error of a [`Ledger`].
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LedgerError {
    /// Another caller works on the payment, or has taken it over. Stop working on it.
    #[error("the payment has been taken over by another worker")]
    LeaseLost,
    /// The payment is not in the ledger.
    #[error("the payment is not in the ledger")]
    NotFound,
    /// The record's state does not allow the step. Read the record again.
    #[error(transparent)]
    InvalidTransition(#[from] InvalidTransition),
    /// The payer's balance does not cover this payment and its other payments in flight.
    #[error("the payer's balance does not cover this payment and its others in flight")]
    InsufficientFunds,
    /// Payments of the payer were settled after its balance was read. Read it again and repeat the step.
    #[error("the payer's balance was read before others of its payments were settled")]
    Stale,
    /// The payer's balance cannot be determined until its submitted payments settle. Repeat the step then, with the same balance.
    #[error("the payer's balance cannot be determined until its submitted payments settle")]
    BalancePending,
    /// What the payer owes and has settled does not permit deferring the payment. Settle it now.
    #[error("this payment gets no credit")]
    NoCredit,
    /// These payments are settled, another process settles them, or they failed after their settlement was requested. Submit the
    /// transaction without them.
    #[error("{} of the payments are settled, being settled by another process, or have failed", .0.len())]
    NotDue(Vec<PaymentKey>),
    /// Another process uses the account nonce.
    #[error("another process uses the nonce; the next one free may be {next}")]
    NonceTaken {
        /// The lowest nonce above all that are in the ledger.
        next: u64,
    },
    /// Another payment of the payer has this payment id.
    #[error("another payment of the payer has the same payment id")]
    IdTaken {
        /// The payment that has it.
        key: PaymentKey,
    },
    /// The bound on records is reached. Try again later.
    #[error("the ledger is full")]
    Full,
    /// The tables are those of another version of this crate. Start with a new file or schema, or use the version that made it.
    #[error(
        "the ledger has the tables of another version of tower-x402: start with a new file or schema, or use that version"
    )]
    OtherVersion,
    /// The store failed. The step may be repeated.
    #[error("the ledger's store failed")]
    Backend(#[source] Box<dyn std::error::Error + Send + Sync>),
}
