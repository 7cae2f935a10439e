//! What keeps the database from growing without bound. The processes share the work: each does a little now and then.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use tokio::sync::Mutex;

use super::{
    super::{LedgerError, shard::RETENTION},
    PostgresLedger,
    connections::Statement,
    payments::{Stamped, capped, column, stamped},
    submissions::of_keys,
};
use crate::payment::PaymentKey;

const EXPIRED: &str = "SELECT stamp, lease_until, replays, record FROM payments WHERE forget_at < $1 \
     ORDER BY forget_at LIMIT $2";
/// Rows that others work on are left for another time: nobody waits for this.
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

/// How many records are looked at in one go.
const BATCH: usize = 64;
/// After how many reservations, or seconds, records are looked at.
const OFTEN: (usize, u64) = (32, 10);
/// After how many seconds everything else is seen to.
const SELDOM: u64 = 60;
/// How long the last turn is remembered, in seconds: longer than any step takes.
const TURN_KEPT: u64 = 7200;

/// When what is due.
#[derive(Debug)]
pub(super) struct Upkeep {
    max_records: usize,
    /// Held by whoever is at it.
    at_it: Mutex<()>,
    often_at: AtomicU64,
    seldom_at: AtomicU64,
    counted_at: AtomicU64,
    reserved: AtomicUsize,
    /// As last counted, and what this process has changed since.
    records: AtomicUsize,
}

impl Upkeep {
    pub(super) fn new(max_records: usize) -> Self {
        Self {
            max_records,
            at_it: Mutex::default(),
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
    /// Does what is due. What fails is logged and tried again: it is no reason to refuse a payment.
    pub(super) async fn keep_up(&self) {
        let now = self.clock.now();
        let is_due = self.upkeep.reserved.load(Ordering::Relaxed) >= OFTEN.0
            || self.upkeep.often_at.load(Ordering::Relaxed) <= now;
        if !is_due {
            return;
        }
        let Ok(_at_it) = self.upkeep.at_it.try_lock() else { return };
        self.upkeep.reserved.store(0, Ordering::Relaxed);
        self.upkeep.often_at.store(now.saturating_add(OFTEN.1), Ordering::Relaxed);
        if let Err(error) = self.do_what_is_due(now).await {
            tracing::warn!(error = &error as &dyn std::error::Error, "the ledger's old records are not cleared away");
        }
    }

    /// Whether the bound on records is reached.
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
            self.count().await?;
        }
        Ok(())
    }

    /// Forgets records that nobody needs; how many were looked at.
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
