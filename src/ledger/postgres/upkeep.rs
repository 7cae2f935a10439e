//! The removal of old rows. The processes share the work; each does a little now and then.

use std::{
    collections::HashSet,
    sync::atomic::{AtomicU64, AtomicUsize, Ordering},
};

use tokio::sync::Mutex;

use super::{
    super::{Counts, LedgerError},
    PostgresLedger,
    connections::Statement,
    payments::{Stamped, seen, stamped},
    processes::{self, is_alive},
    rows::{capped, column, count, key, key_columns},
};

const EXPIRED: &str = concat!("SELECT ", seen!(), " FROM payments WHERE forget_at < $1 ORDER BY forget_at LIMIT $2");
// Rows that other processes have locked are left for another time.
const FORGET: &str = "WITH locked AS (\
       SELECT key FROM payments JOIN unnest($1::bytea[], $2::bigint[]) AS asked (key, stamp) USING (key, stamp) \
       ORDER BY key FOR UPDATE OF payments SKIP LOCKED), \
     gone AS (DELETE FROM payments USING locked WHERE payments.key = locked.key RETURNING payments.key, settlement), \
     sums AS (SELECT count(*) FILTER (WHERE settlement IN ('settled', 'final')) AS paid, \
       count(*) FILTER (WHERE settlement IN ('submitted', 'unknown')) AS unclear FROM gone), \
     counted AS (UPDATE totals SET settled = settled + sums.paid, unresolved = unresolved + sums.unclear \
       FROM sums WHERE sums.paid + sums.unclear > 0) \
     SELECT key FROM gone";
const POSTPONE: &str = "WITH locked AS (\
       SELECT key FROM payments WHERE key = ANY ($1::bytea[]) ORDER BY key FOR UPDATE SKIP LOCKED) \
     UPDATE payments SET forget_at = $2 FROM locked WHERE payments.key = locked.key";
const FORGET_TURNS: &str = "DELETE FROM turns WHERE payer IN (\
       SELECT payer FROM turns WHERE touched_at < $1 LIMIT $2 FOR UPDATE SKIP LOCKED)";
const COUNT: &str = "SELECT count(*) AS number FROM (SELECT FROM payments LIMIT $1) AS records";

/// The number of records that are looked at at once.
const BATCH: usize = 64;
/// The number of reservations, or of seconds, after which records are looked at.
const OFTEN: (usize, u64) = (32, 10);
/// After how long a record is looked at again that could not be removed, in seconds.
const LOOKED_AT_AGAIN: u64 = 900;
/// The number of seconds between rounds of everything else.
const SELDOM: u64 = 60;
/// How long the last turn is kept, in seconds: longer than any step takes.
const TURN_KEPT: u64 = 7200;

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
        let rows = self.connections.repeat(Statement::new(EXPIRED).bind(capped(now)).bind(count(BATCH))).await?;
        let expired = rows.iter().map(stamped).collect::<Result<Vec<Stamped>, _>>()?;
        let (gone, kept): (Vec<_>, Vec<_>) = expired.into_iter().partition(|seen| seen.record.may_be_forgotten(now));
        let keys = |records: &[Stamped]| key_columns(records.iter().map(|seen| &seen.record.key));
        if !gone.is_empty() {
            let stamps: Vec<i64> = gone.iter().map(|seen| seen.stamp).collect();
            let removed = self.connections.repeat(Statement::new(FORGET).bind(keys(&gone)).bind(stamps)).await?;
            self.upkeep.fewer(removed.len());
            let removed = removed.iter().map(key).collect::<Result<HashSet<_>, _>>()?;
            // For the log; the sums are in the database.
            let mut counts = Counts::default();
            gone.iter()
                .filter(|seen| removed.contains(&seen.record.key))
                .for_each(|seen| counts.add_removed(&seen.record));
        }
        if !kept.is_empty() {
            let later = capped(now.saturating_add(LOOKED_AT_AGAIN));
            self.connections.repeat(Statement::new(POSTPONE).bind(keys(&kept)).bind(later)).await?;
        }
        Ok(rows.len())
    }

    async fn count(&self) -> Result<(), LedgerError> {
        let rows = self.connections.repeat(Statement::new(COUNT).bind(count(self.upkeep.max_records))).await?;
        let number = rows.first().map_or(Ok(0), |row| column::<i64>(row, "number"))?;
        self.upkeep.records.store(usize::try_from(number).unwrap_or(usize::MAX), Ordering::Relaxed);
        Ok(())
    }
}
