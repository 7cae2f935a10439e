//! The cards and reports of a directory, in one SQLite file.

mod cards;
mod reports;

use std::{path::Path, sync::Arc, time::Duration};

use alloy_primitives::Address;
pub(super) use cards::{Card, Listed, Offered};
pub(super) use reports::{Seen, Stored};
use rusqlite::{
    Connection, Params, Row,
    types::{FromSql, FromSqlError, FromSqlResult, Value, ValueRef},
};
use serde::de::DeserializeOwned;
use tokio::{runtime::Handle, sync::Mutex};
use tower_x402::ledger::sqlite_file::{self, Error, Tables};

/// The version of the tables.
const VERSION: i64 = 1;
/// How many prepared statements are cached: more than there are.
const STATEMENTS: usize = 64;

/// How much is stored.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    pub(super) cards: u64,
    pub(super) cards_per_host: u64,
    pub(super) cards_per_payee: u64,
    pub(super) reports: u64,
    pub(super) reports_per_payer: u64,
    /// How long a report is stored after its payment.
    pub(super) report_retention: Duration,
}

/// Which cards or reports to list. Cards are chosen by skill only.
#[derive(Clone, Debug, Default)]
pub(super) struct Filter {
    pub(super) evaluator: Option<Address>,
    pub(super) skill: Option<String>,
    pub(super) payer: Option<Address>,
    pub(super) after: u64,
    pub(super) limit: u64,
}

/// The storage of a directory: its cards and reports.
///
/// The file has mode 0600 (on Unix) and is locked while it is open. It is written in WAL mode with `synchronous=FULL`: a report that was
/// acknowledged is on disk.
///
/// Use it within a Tokio runtime. It waits for the disk on the runtime's blocking threads.
pub struct DirectoryStore {
    /// `None` once the store is closed.
    connection: Arc<Mutex<Option<Connection>>>,
}

/// The directory's file could not be opened, read or written.
#[derive(Debug, thiserror::Error)]
#[error("the directory's file cannot be used")]
pub struct StoreError(#[source] Error);

impl DirectoryStore {
    /// Opens the file at `path`, or creates it.
    ///
    /// # Errors
    /// [`StoreError`] if the file cannot be opened, is used by another process, is not a directory's, or has the tables of another version of
    /// this crate.
    pub async fn open(path: impl AsRef<Path>) -> Result<Self, StoreError> {
        let path = path.as_ref().to_owned();
        Self::with_connection(move || sqlite_file::open(&path)).await
    }

    /// Creates a store in memory, for tests. Its contents are lost when the process ends.
    ///
    /// # Errors
    /// [`StoreError`] if SQLite cannot allocate it.
    pub async fn in_memory() -> Result<Self, StoreError> {
        Self::with_connection(|| Ok(Connection::open_in_memory()?)).await
    }

    async fn with_connection(
        open: impl FnOnce() -> Result<Connection, Error> + Send + 'static,
    ) -> Result<Self, StoreError> {
        let connection = blocking(move || {
            let mut connection = open()?;
            connection.set_prepared_statement_cache_capacity(STATEMENTS);
            // A card's skills and networks are deleted with it.
            connection.pragma_update(None, "foreign_keys", "ON")?;
            match sqlite_file::create_tables(&mut connection, (VERSION, include_str!("schema.sql"), "cards"))? {
                Tables::Ready => Ok(connection),
                Tables::OtherVersion => {
                    Err("the file has the tables of another version of x402-directory: start with a new file, or use that version".into())
                }
                Tables::Foreign => Err("the file holds something else; open it as what it is".into()),
            }
        })
        .await?;
        Ok(Self { connection: Arc::new(Mutex::new(Some(connection))) })
    }

    /// Closes the file. Everything that was acknowledged is on disk, whether this is called or not.
    pub async fn close(self) {
        let mut held = self.connection.lock_owned().await;
        let _ = blocking(move || {
            let _ = held.take().map(Connection::close);
            Ok(())
        })
        .await;
    }

    /// Runs `work` with exclusive use of the connection. Once started it runs to its end, even if the caller stops waiting.
    async fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce(&mut Connection) -> Result<T, rusqlite::Error> + Send + 'static,
    ) -> Result<T, StoreError> {
        let mut held = self.connection.clone().lock_owned().await;
        blocking(move || {
            let connection = held.as_mut().ok_or("the store is closed")?;
            Ok(work(connection)?)
        })
        .await
    }
}

tower_x402::debug_fields!(DirectoryStore {});

/// Runs work that may wait for the disk on a blocking thread.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, Error> + Send + 'static,
) -> Result<T, StoreError> {
    let runtime = Handle::try_current().map_err(|error| StoreError(error.into()))?;
    runtime.spawn_blocking(work).await.map_err(|error| StoreError(error.into()))?.map_err(StoreError)
}

/// A column that holds JSON.
struct Json<T>(T);

impl<T: DeserializeOwned> FromSql for Json<T> {
    fn column_result(value: ValueRef<'_>) -> FromSqlResult<Self> {
        serde_json::from_str(value.as_str()?).map(Self).map_err(FromSqlError::other)
    }
}

/// Converts to the signed integers of SQLite. Larger numbers become the largest.
fn signed(number: u64) -> i64 {
    number.try_into().unwrap_or(i64::MAX)
}

fn number(row: &Row<'_>, column: &str) -> Result<u64, rusqlite::Error> {
    Ok(row.get::<_, i64>(column)?.try_into().unwrap_or_default())
}

fn address(row: &Row<'_>, column: &str) -> Result<Address, rusqlite::Error> {
    row.get::<_, [u8; 20]>(column).map(Address::new)
}

/// Runs a query that returns exactly one number.
fn ask(connection: &Connection, query: &str, parameters: impl Params) -> Result<i64, rusqlite::Error> {
    connection.prepare_cached(query)?.query_row(parameters, |row| row.get(0))
}

/// A query that is put together, with the value of each `?`. Untrusted text goes into the values only.
struct Conditions {
    sql: String,
    values: Vec<Value>,
}

impl Conditions {
    /// Starts with the part of the query that has no `?`.
    fn new(sql: impl Into<String>) -> Self {
        Self { sql: sql.into(), values: Vec::new() }
    }

    /// Adds a part with one `?`.
    fn push(&mut self, sql: &str, value: impl Into<Value>) {
        self.sql.push_str(sql);
        self.values.push(value.into());
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use futures_util::FutureExt as _;
    use tokio::sync::oneshot;

    use super::*;

    /// Returns a number that the tests change.
    async fn until(store: &DirectoryStore) -> i64 {
        store.run(|connection| ask(connection, "SELECT until FROM forgotten", [])).await.unwrap()
    }

    #[tokio::test]
    async fn started_work_finishes_before_the_file_is_closed_even_if_nobody_waits() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("directory.sqlite");
        let store = DirectoryStore::open(&path).await.unwrap();
        let (begun, has_begun) = oneshot::channel();
        let (go_on, wait) = mpsc::channel();
        let work = store.run(move |connection| {
            let _ = begun.send(());
            wait.recv().unwrap();
            connection.execute("UPDATE forgotten SET until = 7", [])
        });
        tokio::select! {
            _ = work => panic!("it waits"),
            begun = has_begun => begun.unwrap(),
        }
        let closing = tokio::spawn(store.close());
        tokio::task::yield_now().await;
        assert!(!closing.is_finished(), "the work is under way");
        go_on.send(()).unwrap();
        closing.await.unwrap();
        let store = DirectoryStore::open(&path).await.expect("the file is closed");
        assert_eq!(until(&store).await, 7);
    }

    #[tokio::test]
    async fn panic_is_an_error_and_its_transaction_is_rolled_back() {
        let store = DirectoryStore::in_memory().await.unwrap();
        let failed = store.run(|connection| -> Result<(), _> {
            let work = connection.transaction()?;
            work.execute("UPDATE forgotten SET until = 7", [])?;
            panic!("on purpose");
        });
        failed.await.expect_err("it panicked");
        assert_eq!(until(&store).await, 0);
    }

    #[test]
    fn opening_without_a_runtime_fails() {
        let opened = DirectoryStore::in_memory().now_or_never().expect("nothing is waited for");
        opened.expect_err("there is no thread to wait on");
    }

    #[test]
    fn values_of_the_wrong_type_are_not_read() {
        let connection = Connection::open_in_memory().unwrap();
        let read = |value: &str| {
            let query = format!("SELECT {value} AS it");
            connection.query_row(&query, [], |row| {
                Ok((
                    number(row, "it").ok(),
                    address(row, "it").ok(),
                    row.get::<_, Json<bool>>("it").ok().map(|it| it.0),
                ))
            })
        };
        assert_eq!(read("7").unwrap(), (Some(7), None, None));
        assert_eq!(read("-7").unwrap(), (Some(0), None, None));
        assert_eq!(read("zeroblob(20)").unwrap(), (None, Some(Address::ZERO), None));
        assert_eq!(read("zeroblob(19)").unwrap(), (None, None, None));
        assert_eq!(read("'true'").unwrap(), (None, None, Some(true)));
        assert_eq!(read("'tru'").unwrap(), (None, None, None));
    }
}
