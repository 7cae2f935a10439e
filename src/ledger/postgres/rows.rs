//! Values of columns.

use sqlx::{Row as _, postgres::PgRow};

use super::{
    super::LedgerError,
    connections::{DatabaseError, Statement},
};
use crate::payment::PaymentKey;

/// Returns a statement whose first argument is the key.
pub(super) fn keyed(sql: &'static str, key: &PaymentKey) -> Statement {
    Statement::new(sql).bind(key_column(key))
}

/// Returns a key for its column.
pub(super) fn key_column(key: &PaymentKey) -> Vec<u8> {
    key.to_bytes().to_vec()
}

/// Returns keys for a column or an argument that has many.
pub(super) fn key_columns<'a>(keys: impl IntoIterator<Item = &'a PaymentKey>) -> Vec<Vec<u8>> {
    keys.into_iter().map(key_column).collect()
}

pub(super) fn column<'r, T: sqlx::Decode<'r, sqlx::Postgres> + sqlx::Type<sqlx::Postgres>>(
    row: &'r PgRow,
    name: &str,
) -> Result<T, LedgerError> {
    row.try_get(name).map_err(|error| DatabaseError::of(&error).into())
}

/// Reads a column of a key.
pub(super) fn key(row: &PgRow) -> Result<PaymentKey, LedgerError> {
    PaymentKey::from_bytes(column(row, "key")?).ok_or_else(unreadable)
}

/// Returns a time, block or nonce for its column. Order is kept; numbers of 2⁶³ and above do not occur.
pub(super) fn capped(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

/// Returns a size or a number of rows for a column or an argument.
pub(super) fn count(number: usize) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

pub(super) fn unreadable() -> LedgerError {
    LedgerError::Backend("the database holds a row that this ledger did not write; restore it from a backup".into())
}
