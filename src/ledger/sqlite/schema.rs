//! Opens the ledger's SQLite file for one process, and creates its tables.

use std::{path::Path, time::Duration};

use rusqlite::{Connection, OpenFlags, TransactionBehavior};

use crate::ledger::LedgerError;

/// Why a file cannot be used.
type Error = Box<dyn std::error::Error + Send + Sync>;

/// The version of the tables, which the file has as its `user_version`. Lower ones were never released.
const VERSION: i64 = 9;

/// Opens or creates the file for this process only. A commit is on disk when it returns.
pub(super) fn open(path: &Path) -> Result<Connection, Error> {
    create_private(path)?;
    // One thread at a time uses the connection.
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let connection = Connection::open_with_flags(path, flags)?;
    connection.busy_timeout(Duration::ZERO)?;
    // Before all other settings, so that the index of the write-ahead log is in memory and not in a file.
    connection.pragma_update(None, "locking_mode", "EXCLUSIVE")?;
    connection.pragma_update(None, "journal_mode", "WAL")?;
    connection.pragma_update(None, "synchronous", "FULL")?;
    Ok(connection)
}

/// Creates the tables in an empty file, all or nothing. A later version of the tables has to migrate files of this one.
pub(super) fn prepare(connection: &mut Connection) -> Result<(), LedgerError> {
    let work = connection.transaction_with_behavior(TransactionBehavior::Immediate).map_err(backend)?;
    let version: i64 = work.pragma_query_value(None, "user_version", |row| row.get(0)).map_err(backend)?;
    if version == 0 && is_empty(&work).map_err(backend)? {
        work.execute_batch(include_str!("schema.sql")).map_err(backend)?;
        work.pragma_update(None, "user_version", VERSION).map_err(backend)?;
        return work.commit().map_err(backend);
    }
    match has_table(&work, "payments").map_err(backend)? {
        true if version == VERSION => Ok(()),
        true => Err(LedgerError::OtherVersion),
        false => Err(LedgerError::Backend("the file is not a ledger".into())),
    }
}

pub(super) fn backend(error: impl std::error::Error + Send + Sync + 'static) -> LedgerError {
    LedgerError::Backend(Box::new(error))
}

fn has_table(connection: &Connection, name: &str) -> Result<bool, rusqlite::Error> {
    let query = "SELECT EXISTS (SELECT 1 FROM sqlite_schema WHERE type = 'table' AND name = ?)";
    connection.query_row(query, [name], |row| row.get(0))
}

fn is_empty(connection: &Connection) -> Result<bool, rusqlite::Error> {
    connection.query_row("SELECT NOT EXISTS (SELECT 1 FROM sqlite_schema)", [], |row| row.get(0))
}

/// Creates the file if it does not exist, for its owner only. SQLite gives its other files the same mode.
///
/// An existing file is not opened: closing any descriptor of a file releases all locks that the process has on it (POSIX, `fcntl`), and
/// this process may be using it.
fn create_private(path: &Path) -> std::io::Result<()> {
    let mut options = std::fs::OpenOptions::new();
    options.write(true).create_new(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    match options.open(path) {
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => Ok(()),
        created => created.map(drop),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A test that kills a process would not notice a commit that only the operating system has.
    #[test]
    fn commits_are_synced_and_the_file_is_locked() {
        let directory = tempfile::tempdir().unwrap();
        let connection = open(&directory.path().join("some.sqlite")).unwrap();
        let text = |name| connection.pragma_query_value(None, name, |row| row.get::<_, String>(0)).unwrap();
        let synchronous: i64 = connection.pragma_query_value(None, "synchronous", |row| row.get(0)).unwrap();
        assert_eq!((text("journal_mode"), text("locking_mode"), synchronous), ("wal".into(), "exclusive".into(), 2));
    }

    #[test]
    fn a_file_of_another_kind_is_left_alone() {
        for version in [0, VERSION] {
            let mut connection = Connection::open_in_memory().unwrap();
            let notes = format!("CREATE TABLE notes (text TEXT); PRAGMA user_version = {version}");
            connection.execute_batch(&notes).unwrap();
            let error = prepare(&mut connection).expect_err("it is not ours to change");
            let LedgerError::Backend(error) = error else { panic!("{error:?}") };
            assert_eq!(error.to_string(), "the file is not a ledger");
            assert!(!has_table(&connection, "payments").unwrap());
        }
    }
}
