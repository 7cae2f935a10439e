//! Payment channels: steps are decided in this process, and written only if the channel has not changed since.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use async_trait::async_trait;
use sqlx::postgres::PgRow;

use super::{
    PostgresLedger,
    connections::Statement,
    processes::is_alive,
    responses,
    rows::{capped, column, count, key_column, unreadable},
    steps::{Known, Progress},
};
use crate::{
    ledger::{
        LedgerError, StoredResponse,
        channels::{ChannelLedger, ChannelLedgerError, ChannelRecord, ChannelStep},
    },
    payment::PaymentKey,
    vouchers::ChannelId,
};

macro_rules! step {
    () => {
        "UPDATE channels SET stamp = $2, used_at = $3, forget_at = $4, record = $5, pending_process = $6, claiming_process = $7 \
         WHERE id = $1 AND stamp = $8 RETURNING 1"
    };
}

/// What [`seen`] reads.
macro_rules! seen {
    () => {
        concat!(
            "stamp, record, pending_process, claiming_process, ",
            is_alive!("pending_process"),
            " AS request_holds, ",
            is_alive!("claiming_process"),
            " AS claim_holds"
        )
    };
}

const READ: &str = concat!("SELECT ", seen!(), " FROM channels WHERE channels.id = $1");
const OPEN: &str = "INSERT INTO channels (id, stamp, used_at, forget_at, record, pending_process, claiming_process) \
     VALUES ($1, $2, $3, $4, $5, $6, $7) ON CONFLICT DO NOTHING RETURNING 1";
const STEP: &str = step!();
const STEP_WITH_RESPONSE: &str = concat!(
    "WITH step AS (",
    step!(),
    "), kept AS (\
       INSERT INTO responses (key, stored_at, weight, head, body) SELECT $9, $10, $11, $12, $13 FROM step \
       ON CONFLICT DO NOTHING) \
     SELECT 1 FROM step"
);
const LIST: &str = concat!("SELECT ", seen!(), " FROM channels WHERE channels.id > $1 ORDER BY channels.id LIMIT $2");
// Rows that other processes have locked are left for another time.
const FORGET: &str = "DELETE FROM channels WHERE id IN (\
       SELECT id FROM channels WHERE forget_at <= $1 ORDER BY used_at LIMIT $2 FOR UPDATE SKIP LOCKED)";
const COUNT: &str = "SELECT count(*) AS number FROM (SELECT FROM channels LIMIT $1) AS records";

/// The number of channels that are removed at once when there is no room.
const REMOVED_TOGETHER: i64 = 64;
/// The number of seconds after which channels are counted again.
const COUNTED_EVERY: u64 = 60;

/// A channel with the stamp of its row.
#[derive(Clone, Debug)]
pub(super) struct Seen {
    /// Without the request and the claim of a process that died.
    record: ChannelRecord,
    stamp: i64,
    holders: Holders,
}

/// The processes that hold a channel; 0 is none.
#[derive(Clone, Copy, Debug, Default)]
struct Holders {
    request: i64,
    claim: i64,
}

impl Holders {
    /// Returns the holders after a step of this process.
    fn after(self, step: &ChannelStep, process: i64) -> Self {
        match step {
            ChannelStep::Begin { .. } => Self { request: process, ..self },
            ChannelStep::BeginClaim { .. } => Self { claim: process, ..self },
            _ => self,
        }
    }
}

/// The channels that this process wrote or read last, and how many there are.
#[derive(Debug)]
pub(super) struct Channels {
    known: Known<ChannelId, Seen>,
    max: usize,
    /// As last counted, plus those that this process opened since.
    number: AtomicUsize,
    counted_at: AtomicU64,
}

impl Channels {
    pub(super) fn new(max: usize) -> Self {
        Self { known: Known::default(), max, number: AtomicUsize::new(0), counted_at: AtomicU64::new(0) }
    }
}

#[async_trait]
impl ChannelLedger for PostgresLedger {
    async fn channel(&self, id: &ChannelId) -> Result<Option<ChannelRecord>, LedgerError> {
        let Some(seen) = self.read_channel(id).await? else { return Ok(None) };
        self.channels.known.put(*id, seen.clone());
        Ok(Some(seen.record))
    }

    async fn advance(&self, id: &ChannelId, step: &ChannelStep) -> Result<ChannelRecord, ChannelLedgerError> {
        let mut progress = Progress::new();
        let mut known = self.channels.known.take(id);
        loop {
            let is_guess = known.is_some();
            let seen = match known.take() {
                Some(seen) => Some(seen),
                None => self.read_channel(id).await?,
            };
            let Some(seen) = seen else {
                if let Some(record) = self.open_channel(id, step, &mut progress).await? {
                    return Ok(record);
                }
                continue;
            };
            if is_done(&progress, &seen, step)? {
                self.channels.known.put(*id, seen.clone());
                return Ok(seen.record);
            }
            let mut record = seen.record.clone();
            match record.apply(step) {
                // A remembered channel may be outdated, and is no reason to refuse the step, or to leave it out.
                Err(_) if is_guess => continue,
                Ok(()) if is_guess && record == seen.record => continue,
                Ok(()) if record != seen.record => {}
                decided => {
                    self.channels.known.put(*id, seen);
                    return decided.map(|()| record);
                }
            }
            let stamp = progress.next_stamp()?;
            let next = Seen { holders: seen.holders.after(step, self.process.id()), record, stamp };
            let response =
                next.record.response_in(step).filter(|(_, response)| self.responses.limits().admit(response));
            let statement = statement(&next, seen.stamp, response)?;
            let result = self.connections.once(&statement).await;
            if progress.is_taken(result.map(|rows| !rows.is_empty()), seen.stamp).await? {
                let record = next.record.clone();
                self.channels.known.put(*id, next);
                if let Some((_, response)) = response {
                    self.responses.stored(&self.connections, response).await;
                }
                return Ok(record);
            }
        }
    }

    async fn channels(&self, after: Option<ChannelId>, limit: usize) -> Result<Vec<ChannelRecord>, LedgerError> {
        let after = after.map_or_else(Vec::new, |id| id.digest().to_vec());
        let statement = Statement::new(LIST).bind(after).bind(count(limit));
        let rows = self.connections.repeat(statement).await?;
        rows.iter().map(|row| seen(row).map(|seen| seen.record)).collect()
    }
}

impl PostgresLedger {
    async fn read_channel(&self, id: &ChannelId) -> Result<Option<Seen>, LedgerError> {
        let rows = self.connections.repeat(Statement::new(READ).bind(id.digest().to_vec())).await?;
        rows.first().map(seen).transpose()
    }

    /// Inserts a channel. Returns `None` if another process was faster.
    async fn open_channel(
        &self,
        id: &ChannelId,
        step: &ChannelStep,
        progress: &mut Progress,
    ) -> Result<Option<ChannelRecord>, ChannelLedgerError> {
        let record = ChannelRecord::opened(id, step)?;
        if !self.has_room(record.used_at).await? {
            return Err(LedgerError::Full.into());
        }
        let opened = Seen { record, stamp: progress.next_stamp()?, holders: Holders::default() };
        let result = self.connections.once(&values(OPEN, &opened)?).await;
        if !progress.is_taken(result.map(|rows| !rows.is_empty()), 0).await? {
            return Ok(None);
        }
        self.channels.number.fetch_add(1, Ordering::Relaxed);
        self.channels.known.put(*id, opened.clone());
        Ok(Some(opened.record))
    }

    /// Returns `true` if another channel may be opened. Removes old ones if there is no room.
    async fn has_room(&self, now: u64) -> Result<bool, LedgerError> {
        let Channels { max, number, counted_at, .. } = &self.channels;
        let is_full = || number.load(Ordering::Relaxed) >= *max;
        let last = counted_at.load(Ordering::Relaxed);
        if last.saturating_add(COUNTED_EVERY) > now && (!is_full() || last == now) {
            return Ok(!is_full());
        }
        counted_at.store(now, Ordering::Relaxed);
        self.count_channels().await?;
        if is_full() {
            self.connections.repeat(Statement::new(FORGET).bind(capped(now)).bind(REMOVED_TOGETHER)).await?;
            self.count_channels().await?;
        }
        Ok(!is_full())
    }

    async fn count_channels(&self) -> Result<(), LedgerError> {
        let rows = self.connections.repeat(Statement::new(COUNT).bind(count(self.channels.max))).await?;
        let number = rows.first().map_or(Ok(0), |row| column::<i64>(row, "number"))?;
        self.channels.number.store(usize::try_from(number).unwrap_or(usize::MAX), Ordering::Relaxed);
        Ok(())
    }
}

/// Returns `true` if the row shows that a try whose answer was lost has been taken.
fn is_done(progress: &Progress, seen: &Seen, step: &ChannelStep) -> Result<bool, LedgerError> {
    // Taken twice, these do what they do once.
    let may_repeat = !matches!(step, ChannelStep::Begin { .. } | ChannelStep::BeginClaim { .. });
    match progress.is_done(seen.stamp) {
        Err(_) if may_repeat => Ok(false),
        done => done,
    }
}

/// Returns the statement that replaces the row with stamp `from` by this channel, and stores the response of a charge.
fn statement(to: &Seen, from: i64, response: Option<(PaymentKey, &StoredResponse)>) -> Result<Statement, LedgerError> {
    Ok(match response {
        Some((key, response)) => {
            responses::bind(values(STEP_WITH_RESPONSE, to)?.bind(from).bind(key_column(&key)), response)
        }
        None => values(STEP, to)?.bind(from),
    })
}

/// Returns a statement whose first seven arguments are the row.
fn values(sql: &'static str, row: &Seen) -> Result<Statement, LedgerError> {
    let Seen { record, stamp, holders } = row;
    let json = serde_json::to_string(record).map_err(|error| LedgerError::Backend(Box::new(error)))?;
    Ok(Statement::new(sql)
        .bind(record.id.digest().to_vec())
        .bind(*stamp)
        .bind(capped(record.used_at))
        .bind(record.forget_at().map(capped))
        .bind(json)
        .bind(holders.request)
        .bind(holders.claim))
}

fn seen(row: &PgRow) -> Result<Seen, LedgerError> {
    let mut record: ChannelRecord = serde_json::from_str(column(row, "record")?).map_err(|_| unreadable())?;
    if !column::<bool>(row, "request_holds")?
        && let Some(pending) = &mut record.pending
    {
        pending.until = 0;
    }
    if !column::<bool>(row, "claim_holds")? {
        record.claiming_until = None;
    }
    let holders = Holders { request: column(row, "pending_process")?, claim: column(row, "claiming_process")? };
    Ok(Seen { record, stamp: column(row, "stamp")?, holders })
}
