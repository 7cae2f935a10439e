//! Opens an SQLite file for one process, and creates its tables. The package `x402-directory` keeps its file in the same way.

use std::{path::Path, time::Duration};

use rusqlite::{Connection, OpenFlags, TransactionBehavior};

use crate::ledger::LedgerError;

/// Why a file cannot be used.
pub type Error = Box<dyn std::error::Error + Send + Sync>;

/// The version of the tables, which the file has as its `user_version`. Lower ones were never released.
const VERSION: i64 = 9;

/// Opens or creates the file for this process only. A commit is on disk when it returns.
///
/// # Errors
/// If it cannot be opened or created, or another process has it open.
pub fn open(path: &Path) -> Result<Connection, Error> {
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

/// The tables that a file has.
#[derive(Clone, Copy, Debug)]
pub enum Tables {
    /// Those of this version.
    Ready,
    /// Those of another version.
    OtherVersion,
    /// Others.
    Foreign,
}

/// Creates the tables in an empty file, all or nothing: `sql` makes those of this version, `table` among them. The file has the version as
/// its `user_version`. A later version has to migrate files of this one.
///
/// # Errors
/// If the file cannot be read or written.
pub fn create_tables(
    connection: &mut Connection,
    (version, sql, table): (i64, &str, &str),
) -> Result<Tables, rusqlite::Error> {
    let work = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    let found: i64 = work.pragma_query_value(None, "user_version", |row| row.get(0))?;
    if found == 0 && is_empty(&work)? {
        work.execute_batch(sql)?;
        work.pragma_update(None, "user_version", version)?;
        return work.commit().map(|()| Tables::Ready);
    }
    Ok(match has_table(&work, table)? {
        true if found == version => Tables::Ready,
        true => Tables::OtherVersion,
        false => Tables::Foreign,
    })
}

/// Creates the ledger's tables in an empty file.
pub(super) fn prepare(connection: &mut Connection) -> Result<(), LedgerError> {
    match create_tables(connection, (VERSION, include_str!("schema.sql"), "payments")).map_err(backend)? {
        Tables::Ready => Ok(()),
        Tables::OtherVersion => Err(LedgerError::OtherVersion),
        Tables::Foreign => Err(LedgerError::Backend("the file is not a ledger".into())),
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
        let path = directory.path().join("some.sqlite");
        let connection = open(&path).unwrap();
        let text = |name| connection.pragma_query_value(None, name, |row| row.get::<_, String>(0)).unwrap();
        let synchronous: i64 = connection.pragma_query_value(None, "synchronous", |row| row.get(0)).unwrap();
        assert_eq!((text("journal_mode"), text("locking_mode"), synchronous), ("wal".into(), "exclusive".into(), 2));
        #[cfg(unix)]
        {
            let mode = std::os::unix::fs::PermissionsExt::mode(&path.metadata().unwrap().permissions());
            assert_eq!(mode & 0o777, 0o600);
        }
    }

    #[test]
    fn tables_that_cannot_all_be_created_leave_the_file_empty() {
        let mut connection = Connection::open_in_memory().unwrap();
        create_tables(&mut connection, (1, "CREATE TABLE notes (text TEXT); nonsense", "notes")).unwrap_err();
        assert!(is_empty(&connection).unwrap());
        let again = create_tables(&mut connection, (1, "CREATE TABLE notes (text TEXT)", "notes")).unwrap();
        assert!(matches!(again, Tables::Ready), "{again:?}");
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
