//! Group commit: what changed in memory, written in one transaction by one task.

use std::{
    collections::HashSet,
    fmt,
    path::Path,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use sqlx::{
    ConnectOptions as _, Connection, Row as _, SqliteConnection,
    sqlite::{SqliteConnectOptions, SqliteJournalMode, SqliteLockingMode, SqliteSynchronous},
};
use tokio::sync::{Notify, watch};

use super::super::{
    LedgerError, MemoryLedger, PaymentKey, Record, Sender, StoredResponse,
    row::{Head, Row},
};
use super::{
    nonces,
    rows::{self, PaymentRow, ResponseRow, bind},
};

/// What SQLite may keep of the file in memory, in its own notation: 16 MiB. The index alone of 100,000 payments is 10 MiB, and every
/// new payment belongs anywhere in it.
const CACHE: &str = "-16384";

/// How many prepared statements are kept: one for each number of rows, with what is sent with them, and the few others.
const STATEMENTS: usize = 6 * rows::MOST;

/// Which records and responses are newer in memory than on disk, and how far the disk has come.
pub(super) struct Journal {
    shared: Arc<Shared>,
    durable: watch::Receiver<Durable>,
}

struct Shared {
    dirty: Mutex<Dirty>,
    wake: Notify,
    commits: AtomicU64,
}

/// What one call changed.
#[derive(Default)]
pub(super) struct Changes {
    pub(super) payments: Vec<PaymentKey>,
    pub(super) responses: Vec<PaymentKey>,
    pub(super) nonces: Vec<(Sender, u64)>,
}

/// Keys only: what is written is what memory holds when it is written, so that no order of changes can be confused.
#[derive(Default)]
struct Dirty {
    payments: HashSet<PaymentKey>,
    responses: HashSet<PaymentKey>,
    nonces: HashSet<(Sender, u64)>,
    /// Grows with every change.
    version: u64,
    closed: bool,
}

/// Everything up to this version is on disk; `None` once writing has failed.
type Durable = Option<u64>;

impl Journal {
    /// Opens the file, brings what it holds into memory, and starts to write.
    pub(super) async fn open(path: &Path, memory: Arc<MemoryLedger>) -> Result<Self, LedgerError> {
        create_private(path).map_err(|error| LedgerError::Backend(Box::new(error)))?;
        let options = SqliteConnectOptions::new()
            .filename(path)
            .journal_mode(SqliteJournalMode::Wal)
            .locking_mode(SqliteLockingMode::Exclusive)
            .synchronous(SqliteSynchronous::Full)
            .pragma("cache_size", CACHE)
            .statement_cache_capacity(STATEMENTS)
            .disable_statement_logging()
            .busy_timeout(std::time::Duration::ZERO);
        let mut connection = SqliteConnection::connect_with(&options).await.map_err(backend)?;
        sqlx::migrate!("src/ledger/sqlite/migrations")
            .run(&mut connection)
            .await
            .map_err(|error| LedgerError::Backend(Box::new(error)))?;
        load(&mut connection, &memory).await?;
        let shared = Arc::new(Shared { dirty: Mutex::default(), wake: Notify::new(), commits: AtomicU64::new(0) });
        let (progress, durable) = watch::channel(Some(0));
        tokio::spawn(write(connection, memory, shared.clone(), progress));
        Ok(Self { shared, durable })
    }

    pub(super) fn commits(&self) -> u64 {
        self.shared.commits.load(Ordering::Relaxed)
    }

    /// Writes what is left and lets go of the file.
    pub(super) async fn close(&self) {
        self.shared.close();
        let mut durable = self.durable.clone();
        while durable.changed().await.is_ok() {}
    }

    /// Refuses to go on once the disk has fallen behind for good, or the file was let go of.
    pub(super) fn check(&self) -> Result<(), LedgerError> {
        let is_open = self.durable.has_changed().is_ok();
        match *self.durable.borrow() {
            Some(_) if is_open => Ok(()),
            _ => Err(failed()),
        }
    }

    /// Returns when these changes are durable. They will be even if the caller stops waiting.
    pub(super) async fn payments_changed(&self, keys: impl IntoIterator<Item = PaymentKey>) -> Result<(), LedgerError> {
        self.changed(Changes { payments: keys.into_iter().collect(), ..Changes::default() }).await
    }

    /// The same for responses.
    pub(super) async fn responses_changed(
        &self,
        keys: impl IntoIterator<Item = PaymentKey>,
    ) -> Result<(), LedgerError> {
        self.changed(Changes { responses: keys.into_iter().collect(), ..Changes::default() }).await
    }

    /// Returns when everything that can be seen in memory now is durable.
    pub(super) async fn settled_down(&self) -> Result<(), LedgerError> {
        self.check()?;
        let version = self.shared.dirty().version;
        self.until(version).await
    }

    /// The same for changes of all kinds, which share one transaction: on disk are all of them or none.
    pub(super) async fn changed(&self, changes: Changes) -> Result<(), LedgerError> {
        let version = self.note(changes);
        self.until(version).await
    }

    /// Has these changes written soon, and does not wait. The version is theirs.
    pub(super) fn note(&self, changes: Changes) -> u64 {
        let mut dirty = self.shared.dirty();
        if !(changes.payments.is_empty() && changes.responses.is_empty() && changes.nonces.is_empty()) {
            dirty.payments.extend(changes.payments);
            dirty.responses.extend(changes.responses);
            dirty.nonces.extend(changes.nonces);
            dirty.version += 1;
            self.shared.wake.notify_one();
        }
        dirty.version
    }

    async fn until(&self, version: u64) -> Result<(), LedgerError> {
        let mut durable = self.durable.clone();
        let reached = durable.wait_for(|durable| durable.is_none_or(|durable| durable >= version)).await;
        match reached.as_deref() {
            Ok(Some(_)) => Ok(()),
            Ok(None) | Err(_) => Err(failed()),
        }
    }
}

impl Drop for Journal {
    fn drop(&mut self) {
        self.shared.close();
    }
}

impl fmt::Debug for Journal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Journal").field("commits", &self.commits()).finish_non_exhaustive()
    }
}

impl Shared {
    fn dirty(&self) -> MutexGuard<'_, Dirty> {
        self.dirty.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn close(&self) {
        self.dirty().closed = true;
        self.wake.notify_one();
    }
}

async fn write(
    mut connection: SqliteConnection,
    memory: Arc<MemoryLedger>,
    shared: Arc<Shared>,
    progress: watch::Sender<Durable>,
) {
    loop {
        let (taken, version, closed) = {
            let mut dirty = shared.dirty();
            let (version, closed) = (dirty.version, dirty.closed);
            (std::mem::replace(&mut *dirty, Dirty { version, closed, ..Dirty::default() }), version, closed)
        };
        if taken.payments.is_empty() && taken.responses.is_empty() && taken.nonces.is_empty() {
            if closed {
                // Closing checkpoints the WAL and gives the lock back.
                let _ = connection.close().await;
                return;
            }
            shared.wake.notified().await;
            continue;
        }
        let started = std::time::Instant::now();
        if let Err(error) = commit(&mut connection, &memory, taken).await {
            tracing::error!(
                error = &error as &dyn std::error::Error,
                "the ledger's file cannot be written; it refuses everything"
            );
            progress.send_replace(None);
            return;
        }
        crate::metrics::committed(started.elapsed());
        shared.commits.fetch_add(1, Ordering::Relaxed);
        progress.send_replace(Some(version));
    }
}

/// Puts it all on disk, or nothing of it: after an error the connection is given up with what it has begun.
async fn commit(connection: &mut SqliteConnection, memory: &MemoryLedger, dirty: Dirty) -> Result<(), sqlx::Error> {
    let (mut payments, mut forgotten) = (Vec::new(), Vec::new());
    for key in dirty.payments {
        match memory.snapshot(&key) {
            Some(record) => payments.push(PaymentRow::of(&record)?),
            None => forgotten.push(key),
        }
    }
    let (mut responses, mut dropped) = (Vec::new(), Vec::new());
    for key in dirty.responses {
        match memory.kept_response(&key) {
            Some(response) => responses.push(ResponseRow::of(key, response)?),
            None => dropped.push(key),
        }
    }
    if dirty.nonces.is_empty() && forgotten.is_empty() && dropped.is_empty() {
        if responses.is_empty() && payments.len() <= rows::MOST {
            // One statement is a transaction of its own.
            return rows::write(connection, "", &payments, "").await;
        }
        rows::write(connection, BEGIN, &payments, "").await?;
        return rows::write(connection, "", &responses, COMMIT).await;
    }
    sqlx::query(BEGIN).execute(&mut *connection).await?;
    for (sender, number) in dirty.nonces {
        nonces::write(connection, memory, sender, number).await?;
    }
    for key in forgotten {
        bind(sqlx::query(COUNT_FORGOTTEN), &key).execute(&mut *connection).await?;
        bind(sqlx::query(DELETE_PAYMENT), &key).execute(&mut *connection).await?;
    }
    for key in dropped {
        bind(sqlx::query(DELETE_RESPONSE), &key).execute(&mut *connection).await?;
    }
    rows::write(connection, "", &payments, "").await?;
    rows::write(connection, "", &responses, COMMIT).await
}

const BEGIN: &str = "BEGIN IMMEDIATE;";
const COMMIT: &str = "COMMIT";
const DELETE_PAYMENT: &str = "DELETE FROM payments WHERE chain_id = ?1 AND asset = ?2 AND payer = ?3 AND nonce = ?4";
const COUNT_FORGOTTEN: &str = "UPDATE totals SET settled = settled + (SELECT count(*) FROM payments \
     WHERE chain_id = ?1 AND asset = ?2 AND payer = ?3 AND nonce = ?4 AND settlement IN ('settled', 'final'))";
const DELETE_RESPONSE: &str = "DELETE FROM responses WHERE chain_id = ?1 AND asset = ?2 AND payer = ?3 AND nonce = ?4";

async fn load(connection: &mut SqliteConnection, memory: &MemoryLedger) -> Result<(), LedgerError> {
    for row in sqlx::query("SELECT record FROM payments").fetch_all(&mut *connection).await.map_err(backend)? {
        let json: String = row.try_get(0).map_err(backend)?;
        let record = serde_json::from_str::<Row>(&json).ok().and_then(Row::into_record).ok_or_else(unreadable)?;
        // Whoever looked after its settlement was the process that is gone.
        memory.restore(Record { settling: None, ..record });
    }
    let responses = "SELECT chain_id, asset, payer, nonce, stored_at, head, body FROM responses ORDER BY stored_at";
    for row in sqlx::query(responses).fetch_all(&mut *connection).await.map_err(backend)? {
        let (key, response) = read_response(&row).map_err(backend)?.ok_or_else(unreadable)?;
        memory.keep_response(&key, Arc::new(response));
    }
    nonces::load(connection, memory).await?;
    let settled: i64 = sqlx::query_scalar("SELECT settled FROM totals").fetch_one(connection).await.map_err(backend)?;
    memory.restore_total(settled.cast_unsigned());
    Ok(())
}

fn read_response(row: &sqlx::sqlite::SqliteRow) -> Result<Option<(PaymentKey, StoredResponse)>, sqlx::Error> {
    use alloy_primitives::{Address, B256};
    let bytes = |index: usize| row.try_get::<Vec<u8>, _>(index);
    let (Ok(asset), Ok(payer), Ok(nonce)) =
        (Address::try_from(&bytes(1)?[..]), Address::try_from(&bytes(2)?[..]), B256::try_from(&bytes(3)?[..]))
    else {
        return Ok(None);
    };
    let network = crate::network::Network::eip155(row.try_get::<i64, _>(0)?.cast_unsigned());
    let stored_at = row.try_get::<i64, _>(4)?.cast_unsigned();
    let head = serde_json::from_str::<Head>(&row.try_get::<String, _>(5)?).ok();
    let response = head.and_then(|head| head.into_response(bytes(6).ok()?, stored_at));
    Ok(response.map(|response| (PaymentKey { network, asset, payer, nonce }, response)))
}

/// SQLite gives the files beside the database the database's own mode.
fn create_private(path: &Path) -> std::io::Result<()> {
    let mut options = std::fs::OpenOptions::new();
    options.write(true).create(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    options.open(path).map(drop)
}

pub(super) fn backend(error: sqlx::Error) -> LedgerError {
    LedgerError::Backend(Box::new(error))
}

pub(super) fn unreadable() -> LedgerError {
    LedgerError::Backend("the file holds a row that is not a payment of ours; restore it from a backup".into())
}

fn failed() -> LedgerError {
    LedgerError::Backend("the file could not be written; restart the process when it can be".into())
}
