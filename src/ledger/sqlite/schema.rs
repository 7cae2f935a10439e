//! Opens the ledger's SQLite file for one process, and migrates one of an earlier version.

use std::{path::Path, time::Duration};

use rusqlite::{Connection, OpenFlags, TransactionBehavior};

/// Why a file cannot be used.
type Error = Box<dyn std::error::Error + Send + Sync>;

/// The tables of a kind of file, and the migrations that make them.
pub(super) struct Schema {
    /// A table that exists since the first version.
    table: &'static str,
    /// Each runs once, in this order. A released one never changes.
    migrations: &'static [&'static str],
}

/// The tables of a ledger.
pub(super) const LEDGER: Schema = Schema {
    table: "payments",
    migrations: &[
        include_str!("migrations/0001_payments.sql"),
        include_str!("migrations/0002_transactions.sql"),
        include_str!("migrations/0003_in_order.sql"),
        include_str!("migrations/0004_numbered.sql"),
        include_str!("migrations/0005_progress.sql"),
        include_str!("migrations/0006_channels.sql"),
        include_str!("migrations/0007_progress_of_channels.sql"),
    ],
};

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

impl Schema {
    /// Runs the migrations that the file lacks, all or nothing.
    pub(super) fn migrate(&self, connection: &mut Connection) -> Result<(), Error> {
        let work = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
        let mut version = version(&work)?;
        let is_ours = if version == 0 { is_empty(&work)? } else { has_table(&work, self.table)? };
        if !is_ours {
            return Err("the file is not a ledger".into());
        }
        let Some(missing) = usize::try_from(version).ok().and_then(|version| self.migrations.get(version..)) else {
            return Err("the file is of a later version of tower-x402; use that one".into());
        };
        for migration in missing {
            work.execute_batch(migration)?;
            version += 1;
        }
        work.pragma_update(None, "user_version", version)?;
        work.commit()?;
        Ok(())
    }
}

/// Returns the number of migrations that were run on this file.
fn version(connection: &Connection) -> Result<i64, rusqlite::Error> {
    if !has_table(connection, "_sqlx_migrations")? {
        return connection.pragma_query_value(None, "user_version", |row| row.get(0));
    }
    // The first versions recorded it in this table.
    let version = connection.query_row("SELECT count(*) FROM _sqlx_migrations", [], |row| row.get(0))?;
    connection.execute_batch("DROP TABLE _sqlx_migrations")?;
    Ok(version)
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

    const NOTES: Schema = Schema {
        table: "notes",
        migrations: &[
            "CREATE TABLE notes (text TEXT NOT NULL)",
            "ALTER TABLE notes ADD COLUMN at INTEGER NOT NULL DEFAULT 7",
        ],
    };

    /// A database on which these statements were run, and no migration.
    fn file(done: &str) -> Connection {
        let connection = Connection::open_in_memory().unwrap();
        connection.execute_batch(done).unwrap();
        connection
    }

    /// The table in which `sqlx` records migrations.
    fn noted_by_sqlx(versions: &str) -> String {
        let table = "CREATE TABLE _sqlx_migrations (version BIGINT PRIMARY KEY)";
        format!("{table}; INSERT INTO _sqlx_migrations VALUES {versions};")
    }

    /// Returns the names of all tables, and the version.
    fn state(connection: &Connection) -> (Vec<String>, i64) {
        let mut select = connection.prepare("SELECT name FROM sqlite_schema ORDER BY name").unwrap();
        let tables = select.query_map([], |row| row.get::<_, String>(0)).unwrap().map(Result::unwrap).collect();
        (tables, connection.pragma_query_value(None, "user_version", |row| row.get(0)).unwrap())
    }

    fn assert_left_alone(done: &str, why: &str) {
        let mut connection = file(done);
        let before = state(&connection);
        let error = NOTES.migrate(&mut connection).expect_err("it is not ours to change");
        assert!(error.to_string().contains(why), "{error}");
        assert_eq!(state(&connection), before, "{done}");
    }

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
    fn a_file_of_an_earlier_version_is_migrated_once() {
        let first = format!("{}; INSERT INTO notes VALUES ('kept');", NOTES.migrations[0]);
        for noted in ["PRAGMA user_version = 1".to_owned(), noted_by_sqlx("(20)")] {
            let mut connection = file(&format!("{first} {noted}"));
            for _ in 0..2 {
                NOTES.migrate(&mut connection).unwrap();
                assert_eq!(state(&connection), (vec!["notes".to_owned()], 2), "{noted}");
            }
            let kept = "SELECT text || at FROM notes";
            let kept: String = connection.query_row(kept, [], |row| row.get(0)).unwrap();
            assert_eq!(kept, "kept7", "{noted}");
        }
    }

    #[test]
    fn a_file_of_a_later_version_is_left_alone() {
        for noted in ["PRAGMA user_version = 3", "PRAGMA user_version = -1", &noted_by_sqlx("(1), (2), (3)")] {
            assert_left_alone(&format!("{}; {noted}", NOTES.migrations[0]), "later version");
        }
    }

    #[test]
    fn a_file_of_another_kind_is_left_alone() {
        for noted in ["", "PRAGMA user_version = 2", &noted_by_sqlx("(1), (2)")] {
            assert_left_alone(&format!("CREATE TABLE payments (record TEXT); {noted}"), "not a ledger");
        }
    }

    #[test]
    fn a_failed_migration_changes_nothing() {
        let broken = Schema { migrations: &["CREATE TABLE notes (text TEXT)", "nonsense"], ..NOTES };
        let mut connection = file("");
        assert!(broken.migrate(&mut connection).is_err());
        assert_eq!(state(&connection), (vec![], 0));
    }
}
