//! Payments and responses on their way into the file: many rows in one statement, and all statements of a transaction sent together.
//! Each time something is sent is a trip to another thread and back, which on a busy machine takes longer than writing does.

use std::sync::Arc;

use sqlx::{Arguments as _, AssertSqlSafe, SqliteConnection, error::BoxDynError, sqlite::SqliteArguments};

use super::super::{
    PaymentKey, Record, StoredResponse,
    row::{Head, Row},
};

/// The most rows of one statement.
const MOST: usize = 32;
/// Up to so many rows, each number of rows is a statement of its own; beyond, every fourth is.
const EXACT: usize = 8;
/// The most rows that are sent together.
const MOST_TOGETHER: usize = 512;

/// Statements that are sent together, with their values.
#[derive(Default)]
pub(super) struct Script {
    text: String,
    values: SqliteArguments,
    rows: usize,
    /// Whether the text hardly comes again, so that what is prepared for it need not be kept.
    is_rare: bool,
}

/// What is written in rows of eight columns, the first of which is their number.
pub(super) trait Upsert: Clone {
    /// What comes before the rows.
    const INSERT: &'static str;
    /// What comes after them.
    const UPDATE: &'static str;

    /// Adds the values of one row.
    fn bind(self, values: &mut SqliteArguments) -> Result<(), BoxDynError>;
}

/// One payment.
#[derive(Clone)]
pub(super) struct PaymentRow {
    number: i64,
    key: PaymentKey,
    fulfilment: &'static str,
    settlement: &'static str,
    record: String,
}

/// One response kept for replays.
#[derive(Clone)]
pub(super) struct ResponseRow {
    number: i64,
    key: PaymentKey,
    head: String,
    response: Arc<StoredResponse>,
}

impl Script {
    /// Adds a statement without values.
    pub(super) fn push(&mut self, statement: &str) {
        self.text.push_str(statement);
        self.text.push(';');
    }

    /// Adds a statement with values, in the order of its question marks.
    pub(super) async fn push_with(
        &mut self,
        connection: &mut SqliteConnection,
        statement: &str,
        bind: impl FnOnce(&mut SqliteArguments) -> Result<(), BoxDynError>,
    ) -> Result<(), sqlx::Error> {
        self.make_room(connection, 1).await?;
        self.push(statement);
        self.is_rare = true;
        bind(&mut self.values).map_err(sqlx::Error::Encode)
    }

    /// Adds rows, new ones and those that are known.
    pub(super) async fn upsert<U: Upsert>(
        &mut self,
        connection: &mut SqliteConnection,
        mut rows: Vec<U>,
    ) -> Result<(), sqlx::Error> {
        while !rows.is_empty() {
            let rest = rows.split_off(rows.len().min(MOST));
            fill_up(&mut rows);
            self.make_room(connection, rows.len()).await?;
            let marks = ["(?,?,?,?,?,?,?,?)"].repeat(rows.len()).join(",");
            self.push(&format!("{} {marks} {}", U::INSERT, U::UPDATE));
            for row in rows {
                row.bind(&mut self.values).map_err(sqlx::Error::Encode)?;
            }
            rows = rest;
        }
        Ok(())
    }

    /// Adds a statement between whose halves stand the numbers of rows.
    pub(super) async fn push_for(
        &mut self,
        connection: &mut SqliteConnection,
        (before, after): (&str, &str),
        mut numbers: Vec<i64>,
    ) -> Result<(), sqlx::Error> {
        while !numbers.is_empty() {
            let rest = numbers.split_off(numbers.len().min(MOST));
            fill_up(&mut numbers);
            self.make_room(connection, numbers.len()).await?;
            let marks = ["?"].repeat(numbers.len()).join(",");
            self.push(&format!("{before}({marks}){after}"));
            for number in numbers {
                self.values.add(number).map_err(sqlx::Error::Encode)?;
            }
            numbers = rest;
        }
        Ok(())
    }

    /// Sends what has been added.
    pub(super) async fn run(&mut self, connection: &mut SqliteConnection) -> Result<(), sqlx::Error> {
        let Self { text, values, is_rare, .. } = std::mem::take(self);
        if !text.is_empty() {
            sqlx::query_with(AssertSqlSafe(text), values).persistent(!is_rare).execute(connection).await?;
        }
        Ok(())
    }

    async fn make_room(&mut self, connection: &mut SqliteConnection, rows: usize) -> Result<(), sqlx::Error> {
        if self.rows + rows > MOST_TOGETHER {
            self.run(connection).await?;
        }
        self.rows += rows;
        Ok(())
    }
}

/// The last one again does no harm, and spares a text.
fn fill_up<T: Clone>(rows: &mut Vec<T>) {
    if let Some(last) = rows.last().filter(|_| rows.len() > EXACT).cloned() {
        rows.resize(rows.len().next_multiple_of(4), last);
    }
}

/// Binds the number of a row, and whose it is.
fn bind(values: &mut SqliteArguments, number: i64, key: &PaymentKey) -> Result<(), BoxDynError> {
    values.add(number)?;
    values.add(key.network.chain_id().cast_signed())?;
    values.add(key.asset.to_vec())?;
    values.add(key.payer.to_vec())?;
    values.add(key.nonce.to_vec())
}

impl PaymentRow {
    pub(super) fn of(number: i64, record: &Record) -> Result<Self, sqlx::Error> {
        Ok(Self {
            number,
            key: record.key,
            fulfilment: fulfilment(record),
            settlement: record.settlement.state().as_str(),
            record: serde_json::to_string(&Row::of(record)).map_err(|error| sqlx::Error::Encode(error.into()))?,
        })
    }
}

impl Upsert for PaymentRow {
    const INSERT: &'static str =
        "INSERT INTO payments (id, chain_id, asset, payer, nonce, fulfilment, settlement, record) VALUES";
    const UPDATE: &'static str = "ON CONFLICT (id) DO UPDATE SET fulfilment = excluded.fulfilment, \
        settlement = excluded.settlement, record = excluded.record";

    fn bind(self, values: &mut SqliteArguments) -> Result<(), BoxDynError> {
        bind(values, self.number, &self.key)?;
        values.add(self.fulfilment)?;
        values.add(self.settlement)?;
        values.add(self.record)
    }
}

impl ResponseRow {
    pub(super) fn of(number: i64, key: PaymentKey, response: Arc<StoredResponse>) -> Result<Self, sqlx::Error> {
        let head = serde_json::to_string(&Head::of(&response)).map_err(|error| sqlx::Error::Encode(error.into()))?;
        Ok(Self { number, key, head, response })
    }
}

impl Upsert for ResponseRow {
    const INSERT: &'static str =
        "INSERT INTO responses (id, chain_id, asset, payer, nonce, stored_at, head, body) VALUES";
    const UPDATE: &'static str =
        "ON CONFLICT (id) DO UPDATE SET stored_at = excluded.stored_at, head = excluded.head, body = excluded.body";

    fn bind(self, values: &mut SqliteArguments) -> Result<(), BoxDynError> {
        bind(values, self.number, &self.key)?;
        values.add(self.response.stored_at.cast_signed())?;
        values.add(self.head)?;
        values.add(self.response.body.to_vec())
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
