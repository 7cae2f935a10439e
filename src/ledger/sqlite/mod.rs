//! The ledger in one SQLite file.

mod batch;
mod file;
mod journal;
mod migrations;
mod nonces;
mod numbers;
mod responses;

use std::{path::Path, sync::Arc};

use async_trait::async_trait;

use self::journal::{Changes, Journal};
use super::{
    Counts, FulfilmentStep, Lease, Ledger, LedgerError, Listing, MemoryLedger, Record, Reservation, ResponseLimits,
    Sender, SettlementStep, StoredResponse, Submission,
};
use crate::{
    clock::{Clock, SystemClock},
    payment::PaymentKey,
};

/// A durable ledger for one process, in one file.
///
/// Records are worked on in memory, by the same code as [`MemoryLedger`], and every change is in the file before the call that
/// made it returns: in WAL mode with `synchronous=FULL`. Changes that happen at the same time share one transaction and so
/// one `fsync`. Nobody is shown what is not durable yet.
///
/// Some steps are in the file a moment after the call returns, for a crash in between loses nothing by them: a new reservation,
/// [`Admit`](FulfilmentStep::Admit) of a payment that is not due yet and the first [`Start`](FulfilmentStep::Start) of one that
/// nobody has paid, since no response is shown to anybody and nothing is settled before [`Produce`](FulfilmentStep::Produce) is in
/// the file, and what the process did not live to produce is begun again in any case;
/// [`Deliver`](FulfilmentStep::Deliver), since a response that was produced is replayed like one that was delivered;
/// [`Settle`](SettlementStep::Settle) and [`Finalize`](SettlementStep::Finalize), since the chain is asked again about what was
/// submitted and is not known to be settled. They share the next transaction that somebody waits for, or have one of their own
/// after 5 ms. So a payment waits for the disk once: between the work and what is made of it.
///
/// The file is locked while it is open, has mode 0600, and holds bearer data (signatures, responses) until records age out.
/// If it cannot be written, the ledger refuses everything until the process is restarted: memory and disk would part.
///
/// The bundled SQLite calls `fsync`, which on ext4 writes the file system's journal with every commit. Build with
/// `LIBSQLITE3_FLAGS="-DHAVE_FDATASYNC=1"` in the environment, or in `[env]` of `.cargo/config.toml`, and it calls `fdatasync`:
/// as durable, with fewer slow commits (`BENCHMARKS.md`, "Over loopback").
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use tower_x402::ledger::{Ledger, SqliteLedger};
///
/// # let directory = tempfile::tempdir()?;
/// let ledger = SqliteLedger::open(directory.path().join("ledger.sqlite")).await?;
/// assert_eq!(ledger.counts().await?.settled, 0);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct SqliteLedger {
    memory: Arc<MemoryLedger>,
    journal: Journal,
}

impl SqliteLedger {
    /// Opens a ledger, or makes one. It writes in a thread of its own, which ends once it is closed or dropped.
    ///
    /// # Errors
    /// [`LedgerError::Backend`] if the file cannot be opened, belongs to another process, or is not a ledger.
    pub async fn open(path: impl AsRef<Path>) -> Result<Self, LedgerError> {
        Self::open_with(path, ResponseLimits::default(), 1_000_000, Arc::new(SystemClock)).await
    }

    /// Opens a ledger with bounds and a clock of the caller's.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub async fn open_with(
        path: impl AsRef<Path>,
        responses: ResponseLimits,
        max_records: usize,
        clock: Arc<dyn Clock>,
    ) -> Result<Self, LedgerError> {
        let memory = Arc::new(MemoryLedger::with(responses, max_records, clock));
        let journal = Journal::open(path.as_ref(), memory.clone()).await?;
        Ok(Self { memory, journal })
    }

    /// Writes what is left and lets go of the file. Every later call fails.
    pub async fn close(&self) {
        self.journal.close().await;
    }

    /// How many transactions have been committed since it was opened; each cost one `fsync`.
    pub fn commits(&self) -> u64 {
        self.journal.commits()
    }
}

#[async_trait]
impl Ledger for SqliteLedger {
    async fn reserve(&self, record: &Record) -> Result<Reservation, LedgerError> {
        let change = self.journal.begin()?;
        let (reservation, forgotten) = self.memory.reserve_and_age(record);
        let is_new = matches!(reservation, Ok(Reservation::New(_)));
        let payments = forgotten.into_iter().chain(is_new.then_some(record.key)).collect();
        change.note(Changes { payments, ..Changes::default() });
        if !is_new {
            // What the caller is shown must be there tomorrow.
            self.journal.settled_down().await?;
        }
        reservation
    }

    async fn get(&self, key: &PaymentKey) -> Result<Option<Record>, LedgerError> {
        let record = self.memory.get(key).await?;
        self.journal.settled_down().await?;
        Ok(record)
    }

    async fn take_over(&self, key: &PaymentKey, seen: u64, now: u64, until: u64) -> Result<Option<Lease>, LedgerError> {
        let change = self.journal.begin()?;
        let lease = self.memory.take_over_now(key, seen, now, until);
        change.write(Changes::of_payments(lease.map(|lease| lease.key)))?.wait().await?;
        Ok(lease)
    }

    async fn fulfil(&self, lease: &Lease, step: &FulfilmentStep) -> Result<(), LedgerError> {
        let brings_response = matches!(step, FulfilmentStep::Produce { response: Some(_), .. });
        let change = self.journal.begin()?;
        let gone = self.memory.fulfil_and_keep(lease, step)?;
        let may_be_lost = match step {
            FulfilmentStep::Admit { due, .. } => !due,
            FulfilmentStep::Start { .. } => self.memory.is_new(&lease.key),
            step => matches!(step, FulfilmentStep::Deliver),
        };
        let responses = gone.into_iter().chain(brings_response.then_some(lease.key)).collect();
        let changes = Changes { responses, ..Changes::of_payments([lease.key]) };
        if may_be_lost {
            change.note(changes);
            return Ok(());
        }
        change.write(changes)?.wait().await
    }

    async fn settle(&self, key: &PaymentKey, step: &SettlementStep) -> Result<(), LedgerError> {
        let change = self.journal.begin()?;
        self.memory.settle_now(key, step)?;
        let changes = Changes::of_payments([*key]);
        // That it was paid can be asked of the chain again.
        if matches!(step, SettlementStep::Settle { .. } | SettlementStep::Finalize) {
            change.note(changes);
            return Ok(());
        }
        change.write(changes)?.wait().await
    }

    async fn discard(&self, lease: &Lease) -> Result<(), LedgerError> {
        let change = self.journal.begin()?;
        self.memory.discard_now(lease)?;
        change.write(Changes::of_payments([lease.key]))?.wait().await
    }

    async fn store_response(&self, key: &PaymentKey, response: StoredResponse) -> Result<(), LedgerError> {
        let change = self.journal.begin()?;
        let gone = self.memory.keep_response(key, Arc::new(response));
        let responses = gone.into_iter().chain([*key]).collect();
        change.write(Changes { responses, ..Changes::default() })?.wait().await
    }

    async fn response(&self, key: &PaymentKey) -> Result<Option<Arc<StoredResponse>>, LedgerError> {
        let response = self.memory.response(key).await?;
        self.journal.settled_down().await?;
        Ok(response)
    }

    async fn count_replay(&self, key: &PaymentKey) -> Result<u32, LedgerError> {
        let change = self.journal.begin()?;
        let count = self.memory.count_replay_now(key)?;
        change.write(Changes::of_payments([*key]))?.wait().await?;
        Ok(count)
    }

    async fn submit(&self, submission: Submission) -> Result<(), LedgerError> {
        let (sender, nonce, payments) = (submission.sender, submission.nonce, submission.payments.clone());
        let change = self.journal.begin()?;
        let forgotten = self.memory.submit_and_forget(submission)?;
        let nonces = forgotten.into_iter().chain([nonce]).map(|nonce| (sender, nonce)).collect();
        change.write(Changes { payments, nonces, ..Changes::default() })?.wait().await
    }

    async fn free_nonce(&self, sender: &Sender, nonce: u64, by: u64) -> Result<(), LedgerError> {
        let change = self.journal.begin()?;
        let changed = self.memory.free_nonce_now(sender, nonce, by).then_some((*sender, nonce));
        change.write(Changes { nonces: changed.into_iter().collect(), ..Changes::default() })?.wait().await
    }

    async fn forget_nonces(&self, sender: &Sender, below: u64) -> Result<(), LedgerError> {
        let change = self.journal.begin()?;
        let forgotten = self.memory.forget_nonces_now(sender, below);
        let nonces = forgotten.into_iter().map(|nonce| (*sender, nonce)).collect();
        change.write(Changes { nonces, ..Changes::default() })?.wait().await
    }

    async fn submissions(&self, sender: &Sender, from: u64) -> Result<Vec<Submission>, LedgerError> {
        let submissions = self.memory.submissions(sender, from).await?;
        self.journal.settled_down().await?;
        Ok(submissions)
    }

    async fn list(&self, listing: &Listing) -> Result<Vec<Record>, LedgerError> {
        let records = self.memory.list(listing).await?;
        self.journal.settled_down().await?;
        Ok(records)
    }

    async fn counts(&self) -> Result<Counts, LedgerError> {
        let counts = self.memory.counts().await?;
        self.journal.settled_down().await?;
        Ok(counts)
    }

    fn response_limit(&self) -> usize {
        self.memory.response_limit()
    }
}
