//! The file of a directory, which one process has at a time.

use std::{path::Path, time::Duration};

use rusqlite::{Connection, OpenFlags};

/// Why a file cannot be used.
pub(super) type Error = Box<dyn std::error::Error + Send + Sync>;

/// Opens the file, or makes it, for nobody else than this process. A commit is on disk.
pub(super) fn open(path: &Path) -> Result<Connection, Error> {
    create_private(path)?;
    // One thread at a time uses it.
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let connection = Connection::open_with_flags(path, flags)?;
    connection.busy_timeout(Duration::ZERO)?;
    // First of all, so that what the log holds is indexed in memory and not in a file.
    connection.pragma_update(None, "locking_mode", "EXCLUSIVE")?;
    connection.pragma_update(None, "journal_mode", "WAL")?;
    connection.pragma_update(None, "synchronous", "FULL")?;
    Ok(connection)
}

/// SQLite gives the files beside the database the database's own mode.
///
/// A file that is there is not touched: this process may have it open, and would lose its lock with the first descriptor that is closed
/// (POSIX, `fcntl`), whoever opened that.
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

    /// A test that kills a process would not notice less.
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
