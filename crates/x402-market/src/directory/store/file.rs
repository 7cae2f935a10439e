//! Opens the file of a directory, and brings the tables of earlier versions up to date.

use std::{path::Path, time::Duration};

use rusqlite::{Connection, OpenFlags};
use rusqlite_migration::{M, Migrations};

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

/// The migrations, run once each, in this order. A released migration must not change.
const STEPS: &[M<'static>] = &[
    M::up(include_str!("migrations/0001_directory.sql")),
    M::up(include_str!("migrations/0002_prices.sql")),
    M::up(include_str!("migrations/0003_endpoints.sql")),
    M::up(include_str!("migrations/0004_charges.sql")),
    M::up(include_str!("migrations/0005_payers.sql")),
];
const MIGRATIONS: Migrations<'static> = Migrations::from_slice(STEPS);

/// A table that every version has.
const TABLE: &str = "cards";

/// Migrates the tables to the latest version, completely or not at all.
pub(super) fn bring_up_to_date(connection: &mut Connection) -> Result<(), Error> {
    let version = version(connection)?;
    let is_ours = if version == 0 { is_empty(connection)? } else { has_table(connection, TABLE)? };
    if !is_ours {
        return Err("the file holds something else; open it as what it is".into());
    }
    if !(0..=STEPS.len() as i64).contains(&version) {
        return Err("the file is of a later version of x402-market; use that one".into());
    }
    if has_table(connection, SQLX)? {
        let work = connection.transaction()?;
        work.execute_batch(&format!("DROP TABLE {SQLX}"))?;
        work.pragma_update(None, "user_version", version)?;
        work.commit()?;
    }
    Ok(MIGRATIONS.to_latest(connection)?)
}

/// The table in which the first versions recorded the migrations that were run.
const SQLX: &str = "_sqlx_migrations";

/// Returns how many migrations were run on this file.
fn version(connection: &Connection) -> Result<i64, rusqlite::Error> {
    if has_table(connection, SQLX)? {
        return connection.query_row(&format!("SELECT count(*) FROM {SQLX}"), [], |row| row.get(0));
    }
    connection.pragma_query_value(None, "user_version", |row| row.get(0))
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
    use crate::pricing::EXTENSION_URI;

    /// A file of the version without prices.
    #[test]
    fn migration_takes_prices_from_the_cards() {
        let mut connection = Connection::open_in_memory().unwrap();
        MIGRATIONS.to_version(&mut connection, 1).unwrap();
        connection
            .execute_batch(
                "INSERT INTO cards VALUES (1, 'a', 'a', x'01', 1000, '{}', 0, 0, 0, 1), (2, 'b', 'b', x'01', 10, '{}', 0, 0, 0, 1);
                 INSERT INTO card_skills VALUES ('prose', 1), ('poetry', 2);
                 INSERT INTO offered VALUES (x'01', 'prose', 0), (x'01', 'poetry', 0), (x'01', 'old', 0), (x'02', 'lost', 0);",
            )
            .unwrap();
        bring_up_to_date(&mut connection).unwrap();
        let mut select = connection.prepare("SELECT skill, price FROM offered ORDER BY skill").unwrap();
        let prices = select.query_map([], |row| Ok((row.get(0)?, row.get(1)?))).unwrap();
        let prices: Vec<(String, i64)> = prices.map(Result::unwrap).collect();
        let expected = [("lost", 0), ("old", 10), ("poetry", 10), ("prose", 1_000)];
        assert_eq!(prices, expected.map(|(skill, price)| (skill.to_owned(), price)));
    }

    /// A file of the version without endpoints.
    #[test]
    fn migration_takes_endpoints_from_the_cards() {
        let mut connection = Connection::open_in_memory().unwrap();
        MIGRATIONS.to_version(&mut connection, 2).unwrap();
        let (ours, endpoint) = (EXTENSION_URI, "http://a.example/evaluate");
        let card = format!(
            r#"{{"capabilities": {{"extensions": [{{"uri": "other", "params": {{"endpoint": "elsewhere"}}}}, {{"uri": "{ours}",
            "params": {{"endpoint": "{endpoint}"}}}}]}}}}"#
        );
        let insert = "INSERT INTO cards VALUES (?1, ?1, 'a', x'01', 1000, ?2, 0, 0, 0, 1)";
        for (id, card) in [(1, &*card), (2, "{}")] {
            connection.execute(insert, (id, card)).unwrap();
        }
        bring_up_to_date(&mut connection).unwrap();
        let mut select = connection.prepare("SELECT endpoint FROM cards ORDER BY id").unwrap();
        let endpoints = select.query_map([], |row| row.get::<_, String>(0)).unwrap();
        assert_eq!(endpoints.map(Result::unwrap).collect::<Vec<_>>(), [endpoint, ""]);
    }

    #[test]
    fn migrations_are_valid() {
        MIGRATIONS.validate().unwrap();
    }

    /// Including files whose version is recorded as the first versions did.
    #[test]
    fn files_of_another_kind_or_a_later_version_are_not_changed() {
        let noted = |versions: &str| {
            format!("CREATE TABLE {SQLX} (version BIGINT PRIMARY KEY); INSERT INTO {SQLX} VALUES {versions};")
        };
        let other = |noted: &str| format!("CREATE TABLE payments (record TEXT); {noted}");
        let cards = |noted: &str| format!("CREATE TABLE cards (id INTEGER); {noted}");
        for (file, why) in [
            (other(""), "something else"),
            (other("PRAGMA user_version = 2"), "something else"),
            (other(&noted("(1), (2)")), "something else"),
            (cards("PRAGMA user_version = 6"), "later version"),
            (cards("PRAGMA user_version = -1"), "later version"),
            (cards(&noted("(1), (2), (3), (4), (5), (6)")), "later version"),
        ] {
            let mut connection = Connection::open_in_memory().unwrap();
            connection.execute_batch(&file).unwrap();
            let state = |connection: &Connection| {
                let mut select = connection.prepare("SELECT name FROM sqlite_schema ORDER BY name").unwrap();
                let tables = select.query_map([], |row| row.get::<_, String>(0)).unwrap();
                let tables: Vec<_> = tables.map(Result::unwrap).collect();
                (tables, connection.pragma_query_value(None, "user_version", |row| row.get::<_, i64>(0)).unwrap())
            };
            let before = state(&connection);
            let error = bring_up_to_date(&mut connection).expect_err("it is not ours to change");
            assert!(error.to_string().contains(why), "{file}: {error}");
            assert_eq!(state(&connection), before, "{file}");
        }
    }

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
