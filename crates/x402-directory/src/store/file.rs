//! Opens the file of a directory, and creates its tables.

use std::{path::Path, time::Duration};

use rusqlite::{Connection, OpenFlags};

/// The reason why a file cannot be used.
pub(super) type Error = Box<dyn std::error::Error + Send + Sync>;

/// Opens the file for this process only, or creates it. A commit is on disk.
///
/// The ledger of tower-x402 opens its file in the same way. That code is private there, so it is repeated here.
pub(super) fn open(path: &Path) -> Result<Connection, Error> {
    create_private(path)?;
    // The store uses the connection from one thread at a time.
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let connection = Connection::open_with_flags(path, flags)?;
    connection.busy_timeout(Duration::ZERO)?;
    // Before the journal mode, so that the index of the write-ahead log is in memory and not in a file.
    connection.pragma_update(None, "locking_mode", "EXCLUSIVE")?;
    connection.pragma_update(None, "journal_mode", "WAL")?;
    connection.pragma_update(None, "synchronous", "FULL")?;
    Ok(connection)
}

/// Creates the file with mode 0600, if there is none. SQLite gives the same mode to the files beside it.
///
/// An existing file is not opened here: if this process already has it open, closing this descriptor would release its lock (POSIX,
/// `fcntl`).
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

/// The version of the tables, which the file has as its `user_version`.
const VERSION: i64 = 1;

/// Creates the tables in an empty file, all or nothing. A later version of the tables has to migrate files of this one.
pub(super) fn prepare(connection: &mut Connection) -> Result<(), Error> {
    let work = connection.transaction()?;
    let version: i64 = work.pragma_query_value(None, "user_version", |row| row.get(0))?;
    if version == 0 && is_empty(&work)? {
        work.execute_batch(include_str!("schema.sql"))?;
        work.pragma_update(None, "user_version", VERSION)?;
        return Ok(work.commit()?);
    }
    match has_table(&work, "cards")? {
        true if version == VERSION => Ok(()),
        true => {
            Err("the file has the tables of another version of x402-market; start with a new file, or use that version"
                .into())
        }
        false => Err("the file holds something else; open it as what it is".into()),
    }
}

fn has_table(connection: &Connection, name: &str) -> Result<bool, rusqlite::Error> {
    let query = "SELECT EXISTS (SELECT 1 FROM sqlite_schema WHERE type = 'table' AND name = ?)";
    connection.query_row(query, [name], |row| row.get(0))
}

fn is_empty(connection: &Connection) -> Result<bool, rusqlite::Error> {
    connection.query_row("SELECT NOT EXISTS (SELECT 1 FROM sqlite_schema)", [], |row| row.get(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Killing the process would not show a weaker setting: only a power failure would.
    #[test]
    fn commit_is_on_disk_and_the_file_is_locked_and_private() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("some.sqlite");
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
}
