//! The table of responses, and the limits on it.

use std::sync::atomic::{AtomicUsize, Ordering};

use super::{
    super::{LedgerError, ResponseLimits, StoredResponse},
    connections::{Connections, Statement},
    rows::{capped, column, count, keyed},
};
use crate::payment::PaymentKey;

const STORE: &str = "INSERT INTO responses (key, stored_at, weight, head, body) VALUES ($1, $2, $3, $4, $5) \
     ON CONFLICT DO NOTHING";
const LOAD: &str = "SELECT stored_at, head, body FROM responses WHERE key = $1 AND stored_at >= $2";
// The oldest are removed first. Processes that do this at the same time do not wait for each other.
const TRIM: &str = "DELETE FROM responses WHERE place IN (\
       SELECT place FROM responses WHERE stored_at < $1 OR place <= (\
         SELECT max(place) FROM (\
           SELECT place, sum(weight) OVER newest AS bytes, row_number() OVER newest AS rank FROM responses \
           WINDOW newest AS (ORDER BY place DESC)) AS ranked \
         WHERE bytes > $2 OR rank > $3) \
       ORDER BY place FOR UPDATE SKIP LOCKED)";

/// A process enforces a limit after it has stored this part of it (one n-th), because counting costs more than storing.
const PART: usize = 32;

/// The limits, and what this process stored since it last enforced them.
#[derive(Debug)]
pub(super) struct Responses {
    limits: ResponseLimits,
    bytes: AtomicUsize,
    count: AtomicUsize,
}

impl Responses {
    pub(super) fn new(limits: ResponseLimits) -> Self {
        Self { limits, bytes: AtomicUsize::new(0), count: AtomicUsize::new(0) }
    }

    pub(super) const fn limits(&self) -> &ResponseLimits {
        &self.limits
    }

    /// Stores a response, if it is within the limits by itself.
    pub(super) async fn store(
        &self,
        connections: &Connections,
        key: &PaymentKey,
        response: &StoredResponse,
    ) -> Result<(), LedgerError> {
        if self.limits.admit(response) {
            connections.repeat(bind(keyed(STORE, key), response)).await?;
            self.stored(connections, response).await;
        }
        Ok(())
    }

    /// Counts a response that was stored, and enforces the limits if it is time.
    pub(super) async fn stored(&self, connections: &Connections, response: &StoredResponse) {
        let weight = response.weight();
        let bytes = self.bytes.fetch_add(weight, Ordering::Relaxed).saturating_add(weight);
        let count = self.count.fetch_add(1, Ordering::Relaxed).saturating_add(1);
        if bytes > self.limits.total_bytes / PART || count > self.limits.count / PART {
            // The response is stored, and the limits are enforced a little later.
            if let Err(error) = self.trim(connections, response.stored_at).await {
                tracing::warn!(
                    error = &error as &dyn std::error::Error,
                    "old responses of the ledger cannot be removed"
                );
            }
        }
    }

    /// Enforces the limits.
    pub(super) async fn trim(&self, connections: &Connections, now: u64) -> Result<(), LedgerError> {
        self.bytes.store(0, Ordering::Relaxed);
        self.count.store(0, Ordering::Relaxed);
        let statement = Statement::new(TRIM)
            .bind(capped(now.saturating_sub(self.limits.age_seconds)))
            .bind(count(self.limits.total_bytes))
            .bind(count(self.limits.count));
        connections.repeat(statement).await.map(drop)
    }

    pub(super) async fn load(
        &self,
        connections: &Connections,
        key: &PaymentKey,
        now: u64,
    ) -> Result<Option<StoredResponse>, LedgerError> {
        let oldest = capped(now.saturating_sub(self.limits.age_seconds));
        let rows = connections.repeat(keyed(LOAD, key).bind(oldest)).await?;
        let Some(row) = rows.first() else { return Ok(None) };
        Ok(Some(StoredResponse {
            head: column::<Vec<u8>>(row, "head")?.into(),
            body: column::<Vec<u8>>(row, "body")?.into(),
            stored_at: column::<i64>(row, "stored_at")?.cast_unsigned(),
        }))
    }
}

/// Sets the next four arguments: the time, weight, head and body of a response.
pub(super) fn bind(statement: Statement, response: &StoredResponse) -> Statement {
    statement
        .bind(capped(response.stored_at))
        .bind(count(response.weight()))
        .bind(&response.head[..])
        .bind(&response.body[..])
}
