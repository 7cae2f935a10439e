//! Payments and responses on their way into the file, many in one statement, and statements sent together: each time something is sent
//! is a trip to another thread, which on a busy machine takes longer than writing does.

use std::sync::Arc;

use sqlx::{AssertSqlSafe, Sqlite, SqliteConnection, query::Query, sqlite::SqliteArguments};

use super::super::{
    PaymentKey, Record, StoredResponse,
    row::{Head, Row},
};

type SqliteQuery<'q> = Query<'q, Sqlite, SqliteArguments>;

/// The most rows of one statement. Each number of rows is a statement of its own, prepared once and kept.
pub(super) const MOST: usize = 32;

/// What is written in rows of seven columns.
pub(super) trait Upsert {
    /// What comes before the rows.
    const INSERT: &'static str;
    /// What comes after them.
    const UPDATE: &'static str;

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

/// Writes rows, new ones and those that are known, between two statements without values, which may be empty.
pub(super) async fn write<U: Upsert>(
    connection: &mut SqliteConnection,
    before: &str,
    rows: &[U],
    after: &str,
) -> Result<(), sqlx::Error> {
    if rows.is_empty() && (before, after) != ("", "") {
        sqlx::query(AssertSqlSafe(format!("{before}{after}"))).execute(&mut *connection).await?;
    }
    let chunks = rows.chunks(MOST).len();
    for (number, rows) in rows.chunks(MOST).enumerate() {
        let before = if number == 0 { before } else { "" };
        let after = if number + 1 == chunks { after } else { "" };
        let statement = AssertSqlSafe(statement::<U>(before, rows.len(), after));
        rows.iter().fold(sqlx::query(statement), |query, row| row.bind(query)).execute(&mut *connection).await?;
    }
    Ok(())
}

fn statement<U: Upsert>(before: &str, rows: usize, after: &str) -> String {
    let values = ["(?,?,?,?,?,?,?)"].repeat(rows).join(",");
    format!("{before}{} {values} {};{after}", U::INSERT, U::UPDATE)
}

/// Binds the four columns that identify a payment.
pub(super) fn bind<'q>(query: SqliteQuery<'q>, key: &PaymentKey) -> SqliteQuery<'q> {
    query
        .bind(key.network.chain_id().cast_signed())
        .bind(key.asset.to_vec())
        .bind(key.payer.to_vec())
        .bind(key.nonce.to_vec())
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
    const INSERT: &'static str =
        "INSERT INTO payments (chain_id, asset, payer, nonce, fulfilment, settlement, record) VALUES";
    const UPDATE: &'static str = "ON CONFLICT DO UPDATE SET fulfilment = excluded.fulfilment, \
        settlement = excluded.settlement, record = excluded.record";

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
    const INSERT: &'static str = "INSERT INTO responses (chain_id, asset, payer, nonce, stored_at, head, body) VALUES";
    const UPDATE: &'static str =
        "ON CONFLICT DO UPDATE SET stored_at = excluded.stored_at, head = excluded.head, body = excluded.body";

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
