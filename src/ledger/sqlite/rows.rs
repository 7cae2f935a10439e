//! Payments and responses on their way into the file: many rows in one statement, and all statements of a transaction sent together.
//! Each time something is sent is a trip to another thread and back, which on a busy machine takes longer than writing does.

use std::{fmt::Write as _, sync::Arc};

use sqlx::{Arguments as _, AssertSqlSafe, SqliteConnection, error::BoxDynError, sqlite::SqliteArguments};

use super::super::{PaymentKey, StoredResponse, row::Head};

/// Puts what is known of payments from the start into its table; the values are [`Records`].
pub(super) const BOUGHT: &str = "INSERT INTO payments (id, record) \
    SELECT CAST(key AS INTEGER), value FROM json_each(?) WHERE true ON CONFLICT (id) DO UPDATE SET record = excluded.record";
/// The same for what has become of them.
pub(super) const PROGRESS: &str = "INSERT INTO progress (id, record) \
    SELECT CAST(key AS INTEGER), value FROM json_each(?) WHERE true ON CONFLICT (id) DO UPDATE SET record = excluded.record";

const INSERT_RESPONSES: &str =
    "INSERT INTO responses (id, chain_id, asset, payer, nonce, stored_at, head, body) VALUES";
const UPDATE_RESPONSES: &str =
    "ON CONFLICT (id) DO UPDATE SET stored_at = excluded.stored_at, head = excluded.head, body = excluded.body";

/// The most records of one statement.
const MOST_RECORDS: usize = 128;
/// The most other rows of one statement.
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

/// What is written of payments: a table of records, JSON objects, by number.
#[derive(Default)]
pub(super) struct Records {
    /// Each row's number and its record, as members of one object per statement. However many there are, the statement's text is
    /// the same, so that it is prepared once, and a row has no values of its own to be bound.
    objects: Vec<String>,
    rows: usize,
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

    /// Adds records, new ones and those that are known, of the table that `statement` names.
    pub(super) async fn upsert_records(
        &mut self,
        connection: &mut SqliteConnection,
        statement: &str,
        records: Records,
    ) -> Result<(), sqlx::Error> {
        for mut object in records.objects {
            self.make_room(connection, 1).await?;
            self.push(statement);
            object.push('}');
            self.values.add(object).map_err(sqlx::Error::Encode)?;
        }
        Ok(())
    }

    /// Adds responses, new ones and those that are known.
    pub(super) async fn upsert_responses(
        &mut self,
        connection: &mut SqliteConnection,
        mut rows: Vec<ResponseRow>,
    ) -> Result<(), sqlx::Error> {
        while !rows.is_empty() {
            let rest = rows.split_off(rows.len().min(MOST));
            fill_up(&mut rows);
            self.make_room(connection, rows.len()).await?;
            let marks = ["(?,?,?,?,?,?,?,?)"].repeat(rows.len()).join(",");
            self.push(&format!("{INSERT_RESPONSES} {marks} {UPDATE_RESPONSES}"));
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

impl Records {
    /// Adds a row.
    pub(super) fn push(&mut self, number: i64, record: &str) {
        if self.rows.is_multiple_of(MOST_RECORDS) {
            self.objects.push(String::new());
        }
        self.rows += 1;
        if let Some(object) = self.objects.last_mut() {
            object.push(if object.is_empty() { '{' } else { ',' });
            // Cannot fail: a text takes any text.
            let _ = write!(object, "\"{number}\":{record}");
        }
    }
}

impl ResponseRow {
    pub(super) fn of(number: i64, key: PaymentKey, response: Arc<StoredResponse>) -> Result<Self, sqlx::Error> {
        let head = serde_json::to_string(&Head::of(&response)).map_err(|error| sqlx::Error::Encode(error.into()))?;
        Ok(Self { number, key, head, response })
    }

    fn bind(self, values: &mut SqliteArguments) -> Result<(), BoxDynError> {
        values.add(self.number)?;
        values.add(self.key.network.chain_id().cast_signed())?;
        values.add(self.key.asset.to_vec())?;
        values.add(self.key.payer.to_vec())?;
        values.add(self.key.nonce.to_vec())?;
        values.add(self.response.stored_at.cast_signed())?;
        values.add(self.head)?;
        values.add(self.response.body.to_vec())
    }
}
