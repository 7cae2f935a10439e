//! Queries that are put together.

use rusqlite::types::Value;

/// A query, and what each `?` in it stands for. Whatever a stranger wrote is among the values.
pub(super) struct Conditions {
    pub(super) sql: String,
    pub(super) values: Vec<Value>,
}

impl Conditions {
    /// A query as far as it has no `?`.
    pub(super) fn new(sql: impl Into<String>) -> Self {
        Self { sql: sql.into(), values: Vec::new() }
    }

    /// Adds something with one `?` in it.
    pub(super) fn push(&mut self, sql: &str, value: impl Into<Value>) {
        self.sql.push_str(sql);
        self.values.push(value.into());
    }
}
