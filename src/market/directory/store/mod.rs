//! What a directory keeps, in one SQLite file.

mod cards;
mod voices;

use std::{fmt, path::Path, time::Duration};

use alloy_primitives::Address;
pub(super) use cards::{Card, CardFilter, Listed, Offered};
use sqlx::{
    Connection as _, Row as _, Sqlite, SqliteConnection,
    sqlite::{SqliteConnectOptions, SqliteJournalMode, SqliteLockingMode, SqliteRow, SqliteSynchronous},
};
use tokio::sync::Mutex;
pub(super) use voices::{Said, VoiceFilter};

/// How much is kept.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    pub(super) cards: u64,
    pub(super) cards_per_host: u64,
    pub(super) voices: u64,
    pub(super) voices_per_payer: u64,
    pub(super) voices_for: Duration,
}

/// The cards and voices of a directory.
///
/// The file has mode 0600 (on Unix), is locked while it is open, and is written in WAL mode with `synchronous=FULL`: what was answered to
/// whoever spoke is on disk.
pub struct DirectoryStore {
    connection: Mutex<SqliteConnection>,
}

/// The file of a directory could not be opened, read or written.
#[derive(Debug, thiserror::Error)]
#[error("the directory's file cannot be used")]
pub struct StoreError(#[source] Box<dyn std::error::Error + Send + Sync>);

impl DirectoryStore {
    /// Opens the file at `path`, or makes it.
    ///
    /// # Errors
    /// If it cannot be opened, belongs to another process, or is no directory.
    pub async fn open(path: impl AsRef<Path>) -> Result<Self, StoreError> {
        let path = path.as_ref();
        create_private(path).map_err(|error| StoreError(Box::new(error)))?;
        let options = SqliteConnectOptions::new()
            .filename(path)
            .journal_mode(SqliteJournalMode::Wal)
            .locking_mode(SqliteLockingMode::Exclusive)
            .synchronous(SqliteSynchronous::Full)
            .busy_timeout(Duration::ZERO);
        Self::connect(options).await
    }

    /// A store that ends with the process.
    ///
    /// # Errors
    /// If there is no memory for it.
    pub async fn in_memory() -> Result<Self, StoreError> {
        Self::connect(SqliteConnectOptions::new().in_memory(true)).await
    }

    async fn connect(options: SqliteConnectOptions) -> Result<Self, StoreError> {
        let mut connection = SqliteConnection::connect_with(&options).await?;
        let migrations = sqlx::migrate!("src/market/directory/store/migrations").run(&mut connection).await;
        migrations.map_err(|error| StoreError(Box::new(error)))?;
        Ok(Self { connection: Mutex::new(connection) })
    }

    /// Lets go of the file; what was answered is in it whether this is called or not.
    pub async fn close(self) {
        let _ = self.connection.into_inner().close().await;
    }
}

impl fmt::Debug for DirectoryStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DirectoryStore").finish_non_exhaustive()
    }
}

impl From<sqlx::Error> for StoreError {
    fn from(error: sqlx::Error) -> Self {
        Self(Box::new(error))
    }
}

/// SQLite's integers are signed.
fn signed(number: u64) -> i64 {
    number.try_into().unwrap_or(i64::MAX)
}

fn number(row: &SqliteRow, column: &str) -> Result<u64, sqlx::Error> {
    Ok(row.try_get::<i64, _>(column)?.try_into().unwrap_or_default())
}

fn address(row: &SqliteRow, column: &str) -> Result<Address, sqlx::Error> {
    Address::try_from(row.try_get::<&[u8], _>(column)?).map_err(|error| sqlx::Error::Decode(error.into()))
}

type Conditions = sqlx::QueryBuilder<Sqlite>;

/// SQLite gives the files beside the database the database's own mode.
fn create_private(path: &Path) -> std::io::Result<()> {
    let mut options = std::fs::OpenOptions::new();
    options.write(true).create(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    options.open(path).map(drop)
}
