//! Payments and responses on their way into the file, many in one statement: each statement is a trip to another thread.

use std::sync::Arc;

use sqlx::{Sqlite, SqliteConnection, query::Query, sqlite::SqliteArguments};

use super::super::{
    PaymentKey, Record, StoredResponse,
    row::{Head, Row},
};

type SqliteQuery<'q> = Query<'q, Sqlite, SqliteArguments>;

/// What is written in rows of seven columns.
pub(super) trait Upsert {
    /// Statements for so many rows at once; prepared once each, so there are few. The last is for one.
    const STATEMENTS: [(usize, &'static str); 3];

    /// Adds the values of one row.
    fn bind<'q>(&'q self, query: SqliteQuery<'q>) -> SqliteQuery<'q>;
}

/// One payment.
pub(super) struct PaymentRow {
    key: PaymentKey,
    fulfilment: &'static str,
    settlement: &'static str,
    record: String,
}

/// One response kept for replays.
pub(super) struct ResponseRow {
    key: PaymentKey,
    head: String,
    response: Arc<StoredResponse>,
}

/// Writes rows, new ones and those that are known.
pub(super) async fn write<U: Upsert>(connection: &mut SqliteConnection, rows: &[U]) -> Result<(), sqlx::Error> {
    let mut rest = rows;
    for (size, statement) in U::STATEMENTS {
        let chunks = rest.chunks_exact(size);
        rest = chunks.remainder();
        for rows in chunks {
            let query = rows.iter().fold(sqlx::query(statement), |query, row| row.bind(query));
            query.execute(&mut *connection).await?;
        }
    }
    Ok(())
}

/// Binds the four columns that identify a payment.
pub(super) fn bind<'q>(query: SqliteQuery<'q>, key: &PaymentKey) -> SqliteQuery<'q> {
    query
        .bind(key.network.chain_id().cast_signed())
        .bind(key.asset.to_vec())
        .bind(key.payer.to_vec())
        .bind(key.nonce.to_vec())
}

/// `insert`, so many rows, `update`.
macro_rules! statement {
    ($insert:literal, 1, $update:literal) => {
        concat!($insert, " (?,?,?,?,?,?,?) ", $update)
    };
    ($insert:literal, 8, $update:literal) => {
        concat!($insert, statement!(eight), $update)
    };
    ($insert:literal, 64, $update:literal) => {
        concat!(
            $insert,
            statement!(eight),
            ",",
            statement!(eight),
            ",",
            statement!(eight),
            ",",
            statement!(eight),
            ",",
            statement!(eight),
            ",",
            statement!(eight),
            ",",
            statement!(eight),
            ",",
            statement!(eight),
            $update
        )
    };
    (eight) => {
        " (?,?,?,?,?,?,?),(?,?,?,?,?,?,?),(?,?,?,?,?,?,?),(?,?,?,?,?,?,?),\
         (?,?,?,?,?,?,?),(?,?,?,?,?,?,?),(?,?,?,?,?,?,?),(?,?,?,?,?,?,?) "
    };
}

macro_rules! upsert {
    ($insert:literal, $update:literal) => {
        const STATEMENTS: [(usize, &'static str); 3] = [
            (64, statement!($insert, 64, $update)),
            (8, statement!($insert, 8, $update)),
            (1, statement!($insert, 1, $update)),
        ];
    };
}

impl PaymentRow {
    pub(super) fn of(record: &Record) -> Result<Self, sqlx::Error> {
        Ok(Self {
            key: record.key,
            fulfilment: fulfilment(record),
            settlement: record.settlement.state().as_str(),
            record: serde_json::to_string(&Row::of(record)).map_err(|error| sqlx::Error::Encode(error.into()))?,
        })
    }
}

impl Upsert for PaymentRow {
    upsert!(
        "INSERT INTO payments (chain_id, asset, payer, nonce, fulfilment, settlement, record) VALUES",
        "ON CONFLICT DO UPDATE SET fulfilment = excluded.fulfilment, settlement = excluded.settlement, \
         record = excluded.record"
    );

    fn bind<'q>(&'q self, query: SqliteQuery<'q>) -> SqliteQuery<'q> {
        bind(query, &self.key).bind(self.fulfilment).bind(self.settlement).bind(&*self.record)
    }
}

impl ResponseRow {
    pub(super) fn of(key: PaymentKey, response: Arc<StoredResponse>) -> Result<Self, sqlx::Error> {
        let head = serde_json::to_string(&Head::of(&response)).map_err(|error| sqlx::Error::Encode(error.into()))?;
        Ok(Self { key, head, response })
    }
}

impl Upsert for ResponseRow {
    upsert!(
        "INSERT INTO responses (chain_id, asset, payer, nonce, stored_at, head, body) VALUES",
        "ON CONFLICT DO UPDATE SET stored_at = excluded.stored_at, head = excluded.head, body = excluded.body"
    );

    fn bind<'q>(&'q self, query: SqliteQuery<'q>) -> SqliteQuery<'q> {
        let response = &self.response;
        bind(query, &self.key).bind(response.stored_at.cast_signed()).bind(&*self.head).bind(&response.body[..])
    }
}

fn fulfilment(record: &Record) -> &'static str {
    use super::super::Fulfilment::*;
    match record.fulfilment {
        Reserved => "reserved",
        Working => "working",
        Produced => "produced",
        Delivered => "delivered",
        Released => "released",
    }
}
