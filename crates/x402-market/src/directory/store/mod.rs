//! What a directory keeps, in one SQLite file.

mod cards;
mod file;
mod voices;

use std::{fmt, path::Path, sync::Arc, time::Duration};

use alloy_primitives::Address;
pub(super) use cards::{Card, CardFilter, Listed, Offered};
use rusqlite::{
    Connection, Params, Row,
    types::{FromSql, FromSqlError, FromSqlResult, Value, ValueRef},
};
use serde::de::DeserializeOwned;
use tokio::{runtime::Handle, sync::Mutex};
pub(super) use voices::{Said, VoiceFilter};

/// How many statements are kept prepared: there is room for all there are.
const STATEMENTS: usize = 64;

/// How much is kept.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    pub(super) cards: u64,
    pub(super) cards_per_host: u64,
    pub(super) cards_per_payee: u64,
    pub(super) voices: u64,
    pub(super) voices_per_payer: u64,
    pub(super) voices_for: Duration,
}

/// The cards and voices of a directory.
///
/// The file has mode 0600 (on Unix), is locked while it is open, and is written in WAL mode with `synchronous=FULL`: what was answered to
/// whoever spoke is on disk.
///
/// It is used within a runtime of tokio's, and waits for the disk on those of its threads that are for waiting.
pub struct DirectoryStore {
    /// None once it is closed.
    connection: Arc<Mutex<Option<Connection>>>,
}

/// The file of a directory could not be opened, read or written.
#[derive(Debug, thiserror::Error)]
#[error("the directory's file cannot be used")]
pub struct StoreError(#[source] file::Error);

impl DirectoryStore {
    /// Opens the file at `path`, or makes it.
    ///
    /// # Errors
    /// If it cannot be opened, belongs to another process, or is no directory.
    pub async fn open(path: impl AsRef<Path>) -> Result<Self, StoreError> {
        let path = path.as_ref().to_owned();
        Self::keep_in(move || file::open(&path)).await
    }

    /// A store that ends with the process.
    ///
    /// # Errors
    /// If there is no memory for it.
    pub async fn in_memory() -> Result<Self, StoreError> {
        Self::keep_in(|| Ok(Connection::open_in_memory()?)).await
    }

    async fn keep_in(
        open: impl FnOnce() -> Result<Connection, file::Error> + Send + 'static,
    ) -> Result<Self, StoreError> {
        let connection = aside(move || {
            let mut connection = open()?;
            connection.set_prepared_statement_cache_capacity(STATEMENTS);
            // The skills and networks of a card go with it.
            connection.pragma_update(None, "foreign_keys", "ON")?;
            file::bring_up_to_date(&mut connection)?;
            Ok(connection)
        })
        .await?;
        Ok(Self { connection: Arc::new(Mutex::new(Some(connection))) })
    }

    /// Lets go of the file; what was answered is in it whether this is called or not.
    pub async fn close(self) {
        let mut held = self.connection.lock_owned().await;
        let _ = aside(move || {
            let _ = held.take().map(Connection::close);
            Ok(())
        })
        .await;
    }

    /// Works with what is kept, when nobody else does. Once begun it is done to the end, whoever stops waiting.
    async fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce(&mut Connection) -> Result<T, rusqlite::Error> + Send + 'static,
    ) -> Result<T, StoreError> {
        let mut held = self.connection.clone().lock_owned().await;
        aside(move || {
            let connection = held.as_mut().ok_or("it is closed")?;
            Ok(work(connection)?)
        })
        .await
    }
}

impl fmt::Debug for DirectoryStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DirectoryStore").finish_non_exhaustive()
    }
}

impl StoreError {
    fn of(error: impl std::error::Error + Send + Sync + 'static) -> Self {
        Self(Box::new(error))
    }
}

/// Does what may wait for the disk where no task is kept waiting by it.
async fn aside<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, file::Error> + Send + 'static,
) -> Result<T, StoreError> {
    let runtime = Handle::try_current().map_err(StoreError::of)?;
    runtime.spawn_blocking(work).await.map_err(StoreError::of)?.map_err(StoreError)
}

/// JSON in a column.
struct Json<T>(T);

impl<T: DeserializeOwned> FromSql for Json<T> {
    fn column_result(value: ValueRef<'_>) -> FromSqlResult<Self> {
        serde_json::from_str(value.as_str()?).map(Self).map_err(FromSqlError::other)
    }
}

/// SQLite's integers are signed.
fn signed(number: u64) -> i64 {
    number.try_into().unwrap_or(i64::MAX)
}

fn number(row: &Row<'_>, column: &str) -> Result<u64, rusqlite::Error> {
    Ok(row.get::<_, i64>(column)?.try_into().unwrap_or_default())
}

fn address(row: &Row<'_>, column: &str) -> Result<Address, rusqlite::Error> {
    row.get::<_, [u8; 20]>(column).map(Address::new)
}

/// The answer to a query of one number, which there always is.
fn ask(connection: &Connection, query: &str, parameters: impl Params) -> Result<i64, rusqlite::Error> {
    connection.prepare_cached(query)?.query_row(parameters, |row| row.get(0))
}

/// A query, and what each `?` in it stands for. Whatever a stranger wrote is among the values.
struct Conditions {
    sql: String,
    values: Vec<Value>,
}

impl Conditions {
    /// A query as far as it has no `?`.
    fn new(sql: impl Into<String>) -> Self {
        Self { sql: sql.into(), values: Vec::new() }
    }

    /// Adds something with one `?` in it.
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

    /// A number that work of tests changes.
    async fn until(store: &DirectoryStore) -> i64 {
        store.run(|connection| ask(connection, "SELECT until FROM forgotten", [])).await.unwrap()
    }

    #[tokio::test]
    async fn what_was_begun_is_done_though_nobody_waits_and_before_the_file_is_let_go_of() {
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
        let store = DirectoryStore::open(&path).await.expect("nobody has it any more");
        assert_eq!(until(&store).await, 7);
    }

    #[tokio::test]
    async fn a_panic_is_an_error_and_what_it_left_half_done_undone() {
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
    fn without_a_runtime_there_is_an_error() {
        let opened = DirectoryStore::in_memory().now_or_never().expect("nothing is waited for");
        opened.expect_err("there is no thread to wait on");
    }

    #[test]
    fn what_is_not_what_it_should_be_is_not_read() {
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
