//! The tables, and how those of earlier versions become them.

use rusqlite::{Connection, TransactionBehavior};

use super::{super::LedgerError, file::backend};

/// Each is run once, in this order. None may change once it was released.
const MIGRATIONS: &[&str] = &[
    include_str!("migrations/0001_payments.sql"),
    include_str!("migrations/0002_transactions.sql"),
    include_str!("migrations/0003_in_order.sql"),
    include_str!("migrations/0004_numbered.sql"),
    include_str!("migrations/0005_progress.sql"),
];

/// Brings the tables up to date: all of it, or nothing.
pub(super) fn run(connection: &mut Connection) -> Result<(), LedgerError> {
    let work = connection.transaction_with_behavior(TransactionBehavior::Immediate).map_err(backend)?;
    let mut version = version(&work).map_err(backend)?;
    let Some(missing) = usize::try_from(version).ok().and_then(|version| MIGRATIONS.get(version..)) else {
        return Err(LedgerError::Backend("the file is of a later version of tower-x402; use that one".into()));
    };
    for migration in missing {
        work.execute_batch(migration).map_err(backend)?;
        version += 1;
    }
    work.pragma_update(None, "user_version", version).map_err(backend)?;
    work.commit().map_err(backend)
}

/// How many were run on this file.
fn version(connection: &Connection) -> Result<i64, rusqlite::Error> {
    let noted_otherwise = "SELECT EXISTS (SELECT 1 FROM sqlite_schema WHERE name = '_sqlx_migrations')";
    if !connection.query_row(noted_otherwise, [], |row| row.get(0))? {
        return connection.pragma_query_value(None, "user_version", |row| row.get(0));
    }
    // The first versions noted it in a table.
    let version = connection.query_row("SELECT count(*) FROM _sqlx_migrations", [], |row| row.get(0))?;
    connection.execute_batch("DROP TABLE _sqlx_migrations")?;
    Ok(version)
}
