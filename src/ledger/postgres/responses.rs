//! Responses kept for replays.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use bytes::Bytes;

use super::{
    super::{LedgerError, ResponseLimits, StoredResponse, responses::weight, row::Head},
    connections::{Connections, Statement},
    payments::{capped, column, keyed, unreadable},
};
use crate::payment::PaymentKey;

const STORE: &str = "INSERT INTO responses (chain_id, asset, payer, nonce, stored_at, weight, head, body) \
     VALUES ($1, $2, $3, $4, $5, $6, $7, $8) ON CONFLICT DO NOTHING";
const LOAD: &str = "SELECT stored_at, head, body FROM responses \
     WHERE chain_id = $1 AND asset = $2 AND payer = $3 AND nonce = $4 AND stored_at >= $5";
/// The oldest go first. Two processes may do this at the same time; neither waits for the other.
const TRIM: &str = "DELETE FROM responses WHERE place IN (\
       SELECT place FROM responses WHERE stored_at < $1 OR place <= (\
         SELECT max(place) FROM (\
           SELECT place, sum(weight) OVER newest AS bytes, row_number() OVER newest AS rank FROM responses \
           WINDOW newest AS (ORDER BY place DESC)) AS ranked \
         WHERE bytes > $2 OR rank > $3) \
       ORDER BY place FOR UPDATE SKIP LOCKED)";

/// After which part of a bound this process makes sure that it holds: counting costs more than storing.
const PART: usize = 32;

/// The bounds, and what was stored since they were last seen to.
#[derive(Debug)]
pub(super) struct Responses {
    pub(super) limits: ResponseLimits,
    bytes: AtomicUsize,
    count: AtomicUsize,
}

/// A response as a row.
pub(super) struct KeptResponse {
    stored_at: u64,
    weight: usize,
    head: String,
    body: Bytes,
}

impl KeptResponse {
    /// Fills the next four places.
    pub(super) fn bind_to(&self, statement: Statement) -> Statement {
        statement
            .bind(capped(self.stored_at))
            .bind(i64::try_from(self.weight).unwrap_or(i64::MAX))
            .bind(&self.head)
            .bind(&self.body[..])
    }
}

impl Responses {
    pub(super) fn new(limits: ResponseLimits) -> Self {
        Self { limits, bytes: AtomicUsize::new(0), count: AtomicUsize::new(0) }
    }

    /// The row, if the response is within the bounds by itself.
    pub(super) fn row(&self, response: &StoredResponse) -> Option<KeptResponse> {
        let weight = weight(response);
        if response.body.len() > self.limits.body_bytes || weight > self.limits.total_bytes {
            return None;
        }
        let head = serde_json::to_string(&Head::of(response)).ok()?;
        Some(KeptResponse { stored_at: response.stored_at, weight, head, body: response.body.clone() })
    }

    pub(super) async fn store(
        &self,
        connections: &Connections,
        key: &PaymentKey,
        response: &KeptResponse,
    ) -> Result<(), LedgerError> {
        connections.repeat(response.bind_to(keyed(STORE, key))).await?;
        self.stored(connections, response).await;
        Ok(())
    }

    /// To be called when a response has been stored.
    pub(super) async fn stored(&self, connections: &Connections, response: &KeptResponse) {
        let bytes = self.bytes.fetch_add(response.weight, Ordering::Relaxed).saturating_add(response.weight);
        let count = self.count.fetch_add(1, Ordering::Relaxed).saturating_add(1);
        if bytes > self.limits.total_bytes / PART || count > self.limits.count / PART {
            // The response is stored: a bound that is seen to a little later is no reason to say otherwise.
            if let Err(error) = self.trim(connections, response.stored_at).await {
                tracing::warn!(error = &error as &dyn std::error::Error, "old responses are not cleared away");
            }
        }
    }

    /// Makes the bounds hold.
    pub(super) async fn trim(&self, connections: &Connections, now: u64) -> Result<(), LedgerError> {
        self.bytes.store(0, Ordering::Relaxed);
        self.count.store(0, Ordering::Relaxed);
        let statement = Statement::new(TRIM)
            .bind(capped(now.saturating_sub(self.limits.age_seconds)))
            .bind(i64::try_from(self.limits.total_bytes).unwrap_or(i64::MAX))
            .bind(i64::try_from(self.limits.count).unwrap_or(i64::MAX));
        connections.repeat(statement).await.map(drop)
    }

    pub(super) async fn load(
        &self,
        connections: &Connections,
        key: &PaymentKey,
        now: u64,
    ) -> Result<Option<Arc<StoredResponse>>, LedgerError> {
        let oldest = capped(now.saturating_sub(self.limits.age_seconds));
        let rows = connections.repeat(keyed(LOAD, key).bind(oldest)).await?;
        let Some(row) = rows.first() else { return Ok(None) };
        let head: Head = serde_json::from_str(column(row, "head")?).map_err(|_| unreadable())?;
        let stored_at = column::<i64>(row, "stored_at")?.cast_unsigned();
        let response = head.into_response(column(row, "body")?, stored_at).ok_or_else(unreadable)?;
        Ok(Some(Arc::new(response)))
    }
}
