//! The ledger in one SQLite file, for one process.

mod channels;
mod file;
mod group_commit;
#[doc(hidden)]
pub mod schema;

use std::{path::Path, sync::Arc};

use async_trait::async_trait;

use self::group_commit::{Changes, GroupCommit};
use super::{
    Counts, JournaledTransaction, Lease, Ledger, LedgerError, Listing, MemoryLedger, PaymentStep, Record, Reservation,
    ResponseLedger, ResponseLimits, Sender, StoredResponse, TransactionLedger,
};
use crate::{
    clock::{Clock, SystemClock},
    payment::PaymentKey,
};

/// A durable ledger for one process, in one SQLite file.
///
/// Records are changed in memory, as in [`MemoryLedger`], and each change is on disk before the call that made it returns (WAL mode with
/// `synchronous=FULL`). Changes made at the same time share one transaction and one `fsync`: where four or more calls wait, the
/// transaction begins later by half the time that the last one took, at most 1 ms, for others to join. No call returns a state that is not
/// on disk.
///
/// The steps that the [contract](super#contract) exempts are written later: with the next transaction that somebody waits for, or after
/// 5 ms. So a payment waits for the disk once, between the work and its response.
///
/// The file is locked while it is open, has mode 0600, and holds bearer data (signatures, responses) until records are removed. If it
/// cannot be written, the ledger refuses all calls until the process is restarted, because memory and disk would differ.
///
/// The bundled SQLite calls `fsync`, which on ext4 writes the file system's journal with every commit. Build with
/// `LIBSQLITE3_FLAGS="-DHAVE_FDATASYNC=1"` in the environment, or in `[env]` of `.cargo/config.toml`, to have it call `fdatasync`: as
/// durable, with fewer slow commits (`BENCHMARKS.md`, "Over loopback").
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
    commits: GroupCommit,
}

impl SqliteLedger {
    /// Opens or creates a ledger for at most a million payments that can still be presented. Its writing thread ends when the ledger is
    /// closed or dropped.
    ///
    /// # Errors
    /// [`LedgerError::Backend`] if the file cannot be opened, is in use by another process, or is not a ledger;
    /// [`LedgerError::OtherVersion`] if another version of this crate made its tables.
    pub async fn open(path: impl AsRef<Path>) -> Result<Self, LedgerError> {
        Self::open_with(path, ResponseLimits::default(), 1_000_000, Arc::new(SystemClock)).await
    }

    /// Opens or creates a ledger with these limits and this clock.
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
        let commits = GroupCommit::open(path.as_ref(), memory.clone()).await?;
        Ok(Self { memory, commits })
    }

    /// Writes what is not on disk yet and closes the file. All later calls fail.
    pub async fn close(&self) {
        self.commits.close().await;
    }

    /// Returns the number of transactions committed since the file was opened. Each cost one `fsync`.
    pub fn commits(&self) -> u64 {
        self.commits.commits()
    }
}

#[async_trait]
impl Ledger for SqliteLedger {
    async fn reserve(&self, record: &Record) -> Result<Reservation, LedgerError> {
        let change = self.commits.begin()?;
        let (reservation, removed) = self.memory.reserve_and_age(record);
        let is_new = matches!(reservation, Ok(Reservation::New(_)));
        change.note(Changes { reserved: is_new.then_some(record.key), ..Changes::of_payments(removed) });
        if !is_new {
            // The caller is shown a record.
            self.commits.all_on_disk().await?;
        }
        reservation
    }

    async fn get(&self, key: &PaymentKey) -> Result<Option<Record>, LedgerError> {
        let record = self.memory.get(key).await?;
        self.commits.all_on_disk().await?;
        Ok(record)
    }

    async fn advance(&self, key: &PaymentKey, step: &PaymentStep) -> Result<Record, LedgerError> {
        let change = self.commits.begin()?;
        let (record, responses) = self.memory.advance_and_keep(key, step)?;
        let changes = Changes { responses, ..Changes::of_payments([*key]) };
        if record.may_lose(step) {
            change.note(changes);
        } else {
            change.write(changes)?.wait().await?;
        }
        Ok(record)
    }

    async fn discard(&self, lease: &Lease) -> Result<(), LedgerError> {
        let change = self.commits.begin()?;
        self.memory.discard_now(lease)?;
        change.write(Changes::of_payments([lease.key]))?.wait().await
    }

    async fn list(&self, listing: &Listing) -> Result<Vec<Record>, LedgerError> {
        let records = self.memory.list(listing).await?;
        self.commits.all_on_disk().await?;
        Ok(records)
    }

    async fn counts(&self) -> Result<Counts, LedgerError> {
        let counts = self.memory.counts().await?;
        self.commits.all_on_disk().await?;
        Ok(counts)
    }
}

#[async_trait]
impl ResponseLedger for SqliteLedger {
    async fn store_response(&self, key: &PaymentKey, response: StoredResponse) -> Result<(), LedgerError> {
        let change = self.commits.begin()?;
        let removed = self.memory.keep_response(key, response);
        let responses = removed.into_iter().chain([*key]).collect();
        change.write(Changes { responses, ..Changes::default() })?.wait().await
    }

    async fn response(&self, key: &PaymentKey) -> Result<Option<StoredResponse>, LedgerError> {
        let response = self.memory.response(key).await?;
        self.commits.all_on_disk().await?;
        Ok(response)
    }

    fn response_limit(&self) -> usize {
        self.memory.response_limit()
    }
}

#[async_trait]
impl TransactionLedger for SqliteLedger {
    async fn submit(&self, transaction: JournaledTransaction) -> Result<(), LedgerError> {
        let (sender, nonce, payments) = (transaction.sender, transaction.nonce, transaction.payments.clone());
        let change = self.commits.begin()?;
        let removed = self.memory.submit_and_forget(transaction)?;
        let nonces = removed.into_iter().chain([nonce]).map(|nonce| (sender, nonce)).collect();
        change.write(Changes { nonces, ..Changes::of_payments(payments) })?.wait().await
    }

    async fn free_nonce(&self, sender: &Sender, nonce: u64, by: u64) -> Result<(), LedgerError> {
        let change = self.commits.begin()?;
        let freed = self.memory.nonces().free(sender, nonce, by).then_some((*sender, nonce));
        change.write(Changes { nonces: freed.into_iter().collect(), ..Changes::default() })?.wait().await
    }

    async fn forget_nonces(&self, sender: &Sender, below: u64) -> Result<(), LedgerError> {
        let change = self.commits.begin()?;
        let removed = self.memory.nonces().forget(sender, below);
        let nonces = removed.into_iter().map(|nonce| (*sender, nonce)).collect();
        change.write(Changes { nonces, ..Changes::default() })?.wait().await
    }

    async fn submissions(&self, sender: &Sender, from: u64) -> Result<Vec<JournaledTransaction>, LedgerError> {
        let transactions = self.memory.submissions(sender, from).await?;
        self.commits.all_on_disk().await?;
        Ok(transactions)
    }
}
