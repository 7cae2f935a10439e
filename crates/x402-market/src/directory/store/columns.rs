//! What rows hold, and how it is read.

use alloy_primitives::Address;
use rusqlite::{
    Connection, Params, Row,
    types::{FromSql, FromSqlError, FromSqlResult, ValueRef},
};
use serde::de::DeserializeOwned;

/// JSON in a column.
pub(super) struct Json<T>(pub(super) T);

impl<T: DeserializeOwned> FromSql for Json<T> {
    fn column_result(value: ValueRef<'_>) -> FromSqlResult<Self> {
        serde_json::from_str(value.as_str()?).map(Self).map_err(FromSqlError::other)
    }
}

/// SQLite's integers are signed.
pub(super) fn signed(number: u64) -> i64 {
    number.try_into().unwrap_or(i64::MAX)
}

pub(super) fn number(row: &Row<'_>, column: &str) -> Result<u64, rusqlite::Error> {
    Ok(row.get::<_, i64>(column)?.try_into().unwrap_or_default())
}

pub(super) fn address(row: &Row<'_>, column: &str) -> Result<Address, rusqlite::Error> {
    row.get::<_, [u8; 20]>(column).map(Address::new)
}

/// The answer to a query of one number, which there always is.
pub(super) fn ask(connection: &Connection, query: &str, parameters: impl Params) -> Result<i64, rusqlite::Error> {
    connection.prepare_cached(query)?.query_row(parameters, |row| row.get(0))
}

#[cfg(test)]
mod tests {
    use super::*;

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
