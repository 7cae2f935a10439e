//! Bounds: responses kept for replays, and the removal of old rows. The processes share the work; each does a little now and then.

use std::sync::{
    Arc,
    atomic::{AtomicU64, AtomicUsize, Ordering},
};

use bytes::Bytes;
use tokio::sync::Mutex;

use super::{
    super::{LedgerError, ResponseLimits, StoredResponse, memory::RETENTION, stored::ResponseHead},
    PostgresLedger,
    connections::{Connections, Statement},
    payments::{Stamped, capped, column, holding, keyed, seen, stamped, unreadable},
    processes::{self, is_alive},
    transactions::of_keys,
};
use crate::payment::PaymentKey;

const EXPIRED: &str = concat!("SELECT ", seen!(), " FROM payments WHERE forget_at < $1 ORDER BY forget_at LIMIT $2");
// Rows that other processes have locked are left for another time.
const FORGET: &str = "WITH locked AS (\
       SELECT chain_id, asset, payer, nonce FROM payments JOIN unnest($1::bigint[], $2::bytea[], $3::bytea[], $4::bytea[], \
         $5::bigint[]) AS asked (chain_id, asset, payer, nonce, stamp) USING (chain_id, asset, payer, nonce, stamp) \
       ORDER BY chain_id, asset, payer, nonce FOR UPDATE OF payments SKIP LOCKED), \
     gone AS (\
       DELETE FROM payments USING locked WHERE payments.chain_id = locked.chain_id AND payments.asset = locked.asset \
         AND payments.payer = locked.payer AND payments.nonce = locked.nonce RETURNING settlement), \
     paid AS (SELECT count(*) AS number FROM gone WHERE settlement IN ('settled', 'final')), \
     counted AS (UPDATE totals SET settled = settled + paid.number FROM paid WHERE paid.number > 0) \
     SELECT count(*) AS number FROM gone";
const POSTPONE: &str = "WITH locked AS (\
       SELECT chain_id, asset, payer, nonce FROM payments JOIN unnest($1::bigint[], $2::bytea[], $3::bytea[], $4::bytea[]) \
         AS asked (chain_id, asset, payer, nonce) USING (chain_id, asset, payer, nonce) \
       ORDER BY chain_id, asset, payer, nonce FOR UPDATE OF payments SKIP LOCKED) \
     UPDATE payments SET forget_at = $5 FROM locked WHERE payments.chain_id = locked.chain_id \
       AND payments.asset = locked.asset AND payments.payer = locked.payer AND payments.nonce = locked.nonce";
const FORGET_TURNS: &str = "DELETE FROM turns WHERE (chain_id, asset, payer) IN (\
       SELECT chain_id, asset, payer FROM turns WHERE touched_at < $1 LIMIT $2 FOR UPDATE SKIP LOCKED)";
const COUNT: &str = "SELECT count(*) AS number FROM (SELECT FROM payments LIMIT $1) AS records";

const STORE_RESPONSE: &str = "INSERT INTO responses (chain_id, asset, payer, nonce, stored_at, weight, head, body) \
     VALUES ($1, $2, $3, $4, $5, $6, $7, $8) ON CONFLICT DO NOTHING";
const LOAD_RESPONSE: &str = "SELECT stored_at, head, body FROM responses \
     WHERE chain_id = $1 AND asset = $2 AND payer = $3 AND nonce = $4 AND stored_at >= $5";
// The oldest are removed first. Processes that do this at the same time do not wait for each other.
const TRIM_RESPONSES: &str = "DELETE FROM responses WHERE place IN (\
       SELECT place FROM responses WHERE stored_at < $1 OR place <= (\
         SELECT max(place) FROM (\
           SELECT place, sum(weight) OVER newest AS bytes, row_number() OVER newest AS rank FROM responses \
           WINDOW newest AS (ORDER BY place DESC)) AS ranked \
         WHERE bytes > $2 OR rank > $3) \
       ORDER BY place FOR UPDATE SKIP LOCKED)";

/// The number of records that are looked at at once.
const BATCH: usize = 64;
/// The number of reservations, or of seconds, after which records are looked at.
const OFTEN: (usize, u64) = (32, 10);
/// The number of seconds between rounds of everything else.
const SELDOM: u64 = 60;
/// How long the last turn is kept, in seconds: longer than any step takes.
const TURN_KEPT: u64 = 7200;

/// A process enforces a limit after it has stored this part of it (one n-th), because counting costs more than storing.
const PART: usize = 32;

/// When each kind of upkeep is due.
#[derive(Debug)]
pub(super) struct Upkeep {
    max_records: usize,
    /// Held during upkeep.
    running: Mutex<()>,
    often_at: AtomicU64,
    seldom_at: AtomicU64,
    counted_at: AtomicU64,
    reserved: AtomicUsize,
    /// As last counted, plus the changes of this process since.
    records: AtomicUsize,
}

impl Upkeep {
    pub(super) fn new(max_records: usize) -> Self {
        Self {
            max_records,
            running: Mutex::default(),
            often_at: AtomicU64::new(0),
            seldom_at: AtomicU64::new(0),
            counted_at: AtomicU64::new(0),
            reserved: AtomicUsize::new(0),
            records: AtomicUsize::new(0),
        }
    }

    pub(super) fn one_more(&self) {
        self.reserved.fetch_add(1, Ordering::Relaxed);
        self.records.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn fewer(&self, by: usize) {
        let _ =
            self.records.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |records| Some(records.saturating_sub(by)));
    }

    fn is_full(&self) -> bool {
        self.records.load(Ordering::Relaxed) >= self.max_records
    }
}

impl PostgresLedger {
    /// Does the upkeep that is due. A failure is logged and tried again later, because it is no reason to refuse a payment.
    pub(super) async fn keep_up(&self) {
        let now = self.clock.now();
        let is_due = self.upkeep.reserved.load(Ordering::Relaxed) >= OFTEN.0
            || self.upkeep.often_at.load(Ordering::Relaxed) <= now;
        if !is_due {
            return;
        }
        let Ok(_running) = self.upkeep.running.try_lock() else { return };
        self.upkeep.reserved.store(0, Ordering::Relaxed);
        self.upkeep.often_at.store(now.saturating_add(OFTEN.1), Ordering::Relaxed);
        if let Err(error) = self.do_what_is_due(now).await {
            tracing::warn!(error = &error as &dyn std::error::Error, "old records of the ledger cannot be removed");
        }
    }

    /// Returns `true` if the bound on records is reached.
    pub(super) async fn is_full(&self) -> Result<bool, LedgerError> {
        let now = self.clock.now();
        if self.upkeep.is_full() && self.upkeep.counted_at.swap(now, Ordering::Relaxed) < now {
            self.count().await?;
        }
        Ok(self.upkeep.is_full())
    }

    async fn do_what_is_due(&self, now: u64) -> Result<(), LedgerError> {
        if self.forget(now).await? == BATCH {
            self.upkeep.often_at.store(now, Ordering::Relaxed);
        }
        if self.upkeep.seldom_at.load(Ordering::Relaxed) <= now {
            self.upkeep.seldom_at.store(now.saturating_add(SELDOM), Ordering::Relaxed);
            self.responses.trim(&self.connections, now).await?;
            let statement = Statement::new(FORGET_TURNS).bind(capped(now.saturating_sub(TURN_KEPT))).bind(4096_i64);
            self.connections.repeat(statement).await?;
            processes::forget_silent(&self.connections).await?;
            self.count().await?;
        }
        Ok(())
    }

    /// Removes expired records. Returns how many were looked at.
    async fn forget(&self, now: u64) -> Result<usize, LedgerError> {
        let limit = i64::try_from(BATCH).unwrap_or(i64::MAX);
        let rows = self.connections.repeat(Statement::new(EXPIRED).bind(capped(now)).bind(limit)).await?;
        let expired = rows.iter().map(stamped).collect::<Result<Vec<Stamped>, _>>()?;
        let (gone, kept): (Vec<_>, Vec<_>) = expired.into_iter().partition(|seen| seen.record.may_be_forgotten(now));
        let keys = |records: &[Stamped]| records.iter().map(|seen| seen.record.key).collect::<Vec<PaymentKey>>();
        if !gone.is_empty() {
            let stamps: Vec<i64> = gone.iter().map(|seen| seen.stamp).collect();
            let rows = self.connections.repeat(of_keys(FORGET, &keys(&gone)).bind(stamps)).await?;
            let number = rows.first().map_or(Ok(0), |row| column::<i64>(row, "number"))?;
            self.upkeep.fewer(usize::try_from(number).unwrap_or(0));
        }
        if !kept.is_empty() {
            let later = capped(now.saturating_add(RETENTION));
            self.connections.repeat(of_keys(POSTPONE, &keys(&kept)).bind(later)).await?;
        }
        Ok(rows.len())
    }

    async fn count(&self) -> Result<(), LedgerError> {
        let bound = i64::try_from(self.upkeep.max_records).unwrap_or(i64::MAX);
        let rows = self.connections.repeat(Statement::new(COUNT).bind(bound)).await?;
        let number = rows.first().map_or(Ok(0), |row| column::<i64>(row, "number"))?;
        self.upkeep.records.store(usize::try_from(number).unwrap_or(usize::MAX), Ordering::Relaxed);
        Ok(())
    }
}

/// The limits, and what this process stored since it last enforced them.
#[derive(Debug)]
pub(super) struct Responses {
    pub(super) limits: ResponseLimits,
    bytes: AtomicUsize,
    count: AtomicUsize,
}

/// A response as a row of its table.
pub(super) struct ResponseRow {
    stored_at: u64,
    weight: usize,
    head: String,
    body: Bytes,
}

impl ResponseRow {
    /// Sets the next four arguments.
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

    /// Returns the row, if the response is within the limits by itself.
    pub(super) fn row(&self, response: &StoredResponse) -> Option<ResponseRow> {
        let weight = self.limits.admit(response)?;
        let head = serde_json::to_string(&ResponseHead::of(response)).ok()?;
        Some(ResponseRow { stored_at: response.stored_at, weight, head, body: response.body.clone() })
    }

    pub(super) async fn store(
        &self,
        connections: &Connections,
        key: &PaymentKey,
        response: &ResponseRow,
    ) -> Result<(), LedgerError> {
        connections.repeat(response.bind_to(keyed(STORE_RESPONSE, key))).await?;
        self.stored(connections, response).await;
        Ok(())
    }

    /// Counts a response that was stored, and enforces the limits if it is time.
    pub(super) async fn stored(&self, connections: &Connections, response: &ResponseRow) {
        let bytes = self.bytes.fetch_add(response.weight, Ordering::Relaxed).saturating_add(response.weight);
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
        let statement = Statement::new(TRIM_RESPONSES)
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
        let rows = connections.repeat(keyed(LOAD_RESPONSE, key).bind(oldest)).await?;
        let Some(row) = rows.first() else { return Ok(None) };
        let head: ResponseHead = serde_json::from_str(column(row, "head")?).map_err(|_| unreadable())?;
        let stored_at = column::<i64>(row, "stored_at")?.cast_unsigned();
        let response = head.into_response(column(row, "body")?, stored_at).ok_or_else(unreadable)?;
        Ok(Some(Arc::new(response)))
    }
}
