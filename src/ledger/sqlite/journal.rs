//! Group commit: what changed in memory, written in one transaction by one task.

use std::{
    collections::HashSet,
    fmt,
    hash::{BuildHasher as _, RandomState},
    path::Path,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use sqlx::{
    ConnectOptions as _, Connection, Row as _, SqliteConnection,
    sqlite::{SqliteConnectOptions, SqliteJournalMode, SqliteLockingMode, SqliteSynchronous},
};
use tokio::{
    sync::{Notify, watch},
    time::timeout,
};

use super::super::{
    LedgerError, MemoryLedger, PaymentKey, Record, Sender, StoredResponse,
    row::{self, Head},
};
use super::{
    nonces,
    numbers::Numbers,
    rows::{BOUGHT, PROGRESS, Records, ResponseRow, Script},
};

/// What SQLite may keep of the file in memory, in its own notation: 16 MiB. What is worked on at one time lies together and is far less.
const CACHE: &str = "-16384";

/// How long what nobody waits for may wait for something that somebody does wait for, to be written with it.
const LINGER: Duration = Duration::from_millis(5);

/// So many responses are taken out of the file at a time. They lie together, at the other end of what is being written.
const DROPPED_TOGETHER: usize = 128;

/// How many texts are kept prepared: those for the usual numbers of rows, and the few others.
const STATEMENTS: usize = 128;

/// Which records and responses are newer in memory than on disk, and how far the disk has come.
pub(super) struct Journal {
    shared: Arc<Shared>,
    /// Closed when nothing is written any more.
    writing: watch::Receiver<()>,
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

/// What the next transaction writes. Keys only: what is written is what memory holds when it is written, so that no order of
/// changes can be confused.
#[derive(Default)]
struct Dirty {
    payments: HashSet<PaymentKey>,
    responses: HashSet<PaymentKey>,
    nonces: HashSet<(Sender, u64)>,
    /// Tells those who wait for it, and only those, that it is on disk; closed if that will never be.
    done: watch::Sender<bool>,
    /// The same of the transaction that is being written.
    current: Option<Durable>,
    closed: bool,
    /// Nothing is written any more.
    ended: bool,
}

type Durable = watch::Receiver<bool>;

/// What the writer does next.
enum Next {
    Write(Dirty),
    /// Nobody waits for what there is to write.
    Linger,
    Sleep,
    End,
}

/// Where everything is in the file.
#[derive(Default)]
struct Places {
    payments: Numbers,
    responses: Numbers,
    /// Numbers of responses that are not kept any more, and still in the file.
    dropped: Vec<i64>,
    hasher: RandomState,
}

impl Places {
    /// Tells what is known of a payment from the start from that of another reservation under the same key.
    fn identity(&self, record: &Record) -> u64 {
        let Record { terms, authorization, signature, request, id, reserved_at, .. } = record;
        let signed = (authorization.to, authorization.value, authorization.valid_after, authorization.valid_before);
        self.hasher.hash_one((terms.text().text(), signed, signature.as_bytes(), request, id, reserved_at))
    }
}

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
            // What SQLite notes to undo one statement of many rows is of no use once it has ended, and would be a file.
            .pragma("temp_store", "MEMORY")
            .statement_cache_capacity(STATEMENTS)
            .disable_statement_logging()
            .busy_timeout(Duration::ZERO);
        let mut connection = SqliteConnection::connect_with(&options).await.map_err(backend)?;
        sqlx::migrate!("src/ledger/sqlite/migrations")
            .run(&mut connection)
            .await
            .map_err(|error| LedgerError::Backend(Box::new(error)))?;
        let (places, dirty) = load(&mut connection, &memory).await?;
        let shared = Arc::new(Shared { dirty: Mutex::new(dirty), wake: Notify::new(), commits: AtomicU64::new(0) });
        let (alive, writing) = watch::channel(());
        let writer = shared.clone();
        tokio::spawn(async move {
            let _alive = alive;
            write(connection, memory, places, &writer).await;
            writer.end();
        });
        Ok(Self { shared, writing })
    }

    pub(super) fn commits(&self) -> u64 {
        self.shared.commits.load(Ordering::Relaxed)
    }

    /// Writes what is left and lets go of the file.
    pub(super) async fn close(&self) {
        self.shared.close();
        let mut writing = self.writing.clone();
        while writing.changed().await.is_ok() {}
    }

    /// Refuses to go on once the disk has fallen behind for good, or the file was let go of.
    pub(super) fn check(&self) -> Result<(), LedgerError> {
        self.writing.has_changed().map(drop).map_err(|_| failed())
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
        self.changed(Changes::default()).await
    }

    /// The same for changes of all kinds, which share one transaction: on disk are all of them or none.
    pub(super) async fn changed(&self, changes: Changes) -> Result<(), LedgerError> {
        let durable = {
            let mut dirty = self.shared.dirty();
            dirty.add(changes);
            dirty.durable()?
        };
        let Some(mut durable) = durable else { return Ok(()) };
        // Also if it was only noted before: somebody waits for it now.
        self.shared.wake.notify_one();
        durable.wait_for(|durable| *durable).await.map(drop).map_err(|_| failed())
    }

    /// Has these changes written soon, and does not wait.
    pub(super) fn note(&self, changes: Changes) {
        if changes.is_empty() {
            return;
        }
        let mut dirty = self.shared.dirty();
        let is_first = dirty.is_empty();
        dirty.add(changes);
        if is_first {
            self.shared.wake.notify_one();
        }
    }
}

impl Changes {
    fn is_empty(&self) -> bool {
        self.payments.is_empty() && self.responses.is_empty() && self.nonces.is_empty()
    }
}

impl Dirty {
    fn is_empty(&self) -> bool {
        self.payments.is_empty() && self.responses.is_empty() && self.nonces.is_empty()
    }

    fn add(&mut self, changes: Changes) {
        self.payments.extend(changes.payments);
        self.responses.extend(changes.responses);
        self.nonces.extend(changes.nonces);
    }

    /// What tells that everything is on disk that has been added until now; `None` if it is.
    fn durable(&self) -> Result<Option<Durable>, LedgerError> {
        match self.is_empty() {
            _ if self.ended => Err(failed()),
            true => Ok(self.current.clone()),
            false => Ok(Some(self.done.subscribe())),
        }
    }

    /// What there is to do.
    fn next(&mut self) -> Next {
        self.current = None;
        match (self.is_empty(), self.closed) {
            (true, true) => Next::End,
            (true, false) => Next::Sleep,
            (false, false) if self.done.receiver_count() == 0 => Next::Linger,
            (false, _) => Next::Write(self.take()),
        }
    }

    /// What is to be written now; others gather meanwhile.
    fn take(&mut self) -> Self {
        let rest = Self { current: Some(self.done.subscribe()), closed: self.closed, ..Self::default() };
        std::mem::replace(self, rest)
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

    /// Whoever waits now, or will, waits for nothing.
    fn end(&self) {
        *self.dirty() = Dirty { ended: true, closed: true, ..Dirty::default() };
    }
}

async fn write(mut connection: SqliteConnection, memory: Arc<MemoryLedger>, mut places: Places, shared: &Shared) {
    loop {
        let next = shared.dirty().next();
        let taken = match next {
            Next::Write(taken) => taken,
            Next::Linger if timeout(LINGER, shared.wake.notified()).await.is_ok() => continue,
            Next::Linger => shared.dirty().take(),
            Next::Sleep => {
                shared.wake.notified().await;
                continue;
            }
            // The last of those that wait to be taken out.
            Next::End if !places.dropped.is_empty() => Dirty { closed: true, ..Dirty::default() },
            Next::End => {
                // Closing checkpoints the WAL and gives the lock back.
                let _ = connection.close().await;
                return;
            }
        };
        let started = std::time::Instant::now();
        let done = taken.done.clone();
        if let Err(error) = commit(&mut connection, &memory, &mut places, taken).await {
            tracing::error!(
                error = &error as &dyn std::error::Error,
                "the ledger's file cannot be written; it refuses everything"
            );
            return;
        }
        crate::metrics::committed(started.elapsed());
        shared.commits.fetch_add(1, Ordering::Relaxed);
        done.send_replace(true);
    }
}

/// Puts it all on disk, or nothing of it: after an error the connection is given up with what it has begun.
async fn commit(
    connection: &mut SqliteConnection,
    memory: &MemoryLedger,
    places: &mut Places,
    dirty: Dirty,
) -> Result<(), sqlx::Error> {
    let mut script = Script::default();
    script.push("BEGIN IMMEDIATE");
    for (sender, number) in dirty.nonces {
        nonces::write(&mut script, connection, memory, sender, number).await?;
    }
    let (mut bought, mut progress, mut forgotten) = (Records::default(), Records::default(), Vec::new());
    for key in dirty.payments {
        let Some(record) = memory.snapshot(&key) else {
            forgotten.extend(places.payments.remove(&key));
            continue;
        };
        // Known from the start, but for a key that was let go of and reserved again.
        let identity = places.identity(&record);
        let (number, is_new) = places.payments.get_to_hold(key, identity);
        if is_new {
            bought.push(number, &row::bought(&record).map_err(unwritable)?);
        }
        progress.push(number, &row::progress(&record).map_err(unwritable)?);
    }
    let mut responses = Vec::with_capacity(dirty.responses.len());
    for key in dirty.responses {
        match memory.kept_response(&key) {
            Some(response) => responses.push(ResponseRow::of(places.responses.get(key), key, response)?),
            None => places.dropped.extend(places.responses.remove(&key)),
        }
    }
    script.upsert_records(connection, BOUGHT, bought).await?;
    script.upsert_records(connection, PROGRESS, progress).await?;
    script.upsert_responses(connection, responses).await?;
    script.push_for(connection, COUNT_FORGOTTEN, forgotten.clone()).await?;
    script.push_for(connection, ("DELETE FROM payments WHERE id IN ", ""), forgotten.clone()).await?;
    script.push_for(connection, ("DELETE FROM progress WHERE id IN ", ""), forgotten).await?;
    if dirty.closed || places.dropped.len() >= DROPPED_TOGETHER {
        let dropped = std::mem::take(&mut places.dropped);
        script.push_for(connection, ("DELETE FROM responses WHERE id IN ", ""), dropped).await?;
    }
    script.push("COMMIT");
    script.run(connection).await
}

const COUNT_FORGOTTEN: (&str, &str) = (
    "UPDATE totals SET settled = settled + (SELECT count(*) FROM progress WHERE id IN ",
    " AND (json_type(record, '$.settlement.settled') IS NOT NULL OR json_type(record, '$.settlement.final') IS NOT NULL))",
);

/// Brings the file into memory. What memory has no room for is to be deleted.
async fn load(connection: &mut SqliteConnection, memory: &MemoryLedger) -> Result<(Places, Dirty), LedgerError> {
    let (mut places, mut dirty) = (Places::default(), Dirty::default());
    // Both or neither are written. One without the other is a row that was changed by somebody else.
    let payments =
        "SELECT id, bought.record, progress.record FROM payments AS bought LEFT JOIN progress USING (id) ORDER BY id";
    for row in sqlx::query(payments).fetch_all(&mut *connection).await.map_err(backend)? {
        let (bought, progress): (String, Option<String>) =
            (row.try_get(1).map_err(backend)?, row.try_get(2).map_err(backend)?);
        let record = progress.and_then(|progress| row::read(&bought, &progress)).ok_or_else(unreadable)?;
        places.payments.restore(record.key, row.try_get(0).map_err(backend)?);
        // Whoever looked after its settlement was the process that is gone.
        memory.restore(Record { settling: None, ..record });
    }
    let responses = "SELECT chain_id, asset, payer, nonce, stored_at, head, body, id FROM responses ORDER BY stored_at";
    for row in sqlx::query(responses).fetch_all(&mut *connection).await.map_err(backend)? {
        let (key, response) = read_response(&row).map_err(backend)?.ok_or_else(unreadable)?;
        places.responses.restore(key, row.try_get(7).map_err(backend)?);
        dirty.responses.extend(memory.keep_response(&key, Arc::new(response)));
    }
    nonces::load(connection, memory).await?;
    let settled: i64 = sqlx::query_scalar("SELECT settled FROM totals").fetch_one(connection).await.map_err(backend)?;
    memory.restore_total(settled.cast_unsigned());
    Ok((places, dirty))
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

fn unwritable(error: serde_json::Error) -> sqlx::Error {
    sqlx::Error::Encode(error.into())
}

fn failed() -> LedgerError {
    LedgerError::Backend("the file could not be written; restart the process when it can be".into())
}
