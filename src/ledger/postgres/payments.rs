//! The table of payments: reading, writing and listing its rows.
//!
//! A row has the record as JSON, and beside it the columns by which the database selects and sums. Every write gives it a random stamp, and
//! replaces only a row that has the stamp that was read.

use sqlx::postgres::PgRow;

use super::{
    super::{Counts, LedgerError, Listing, PayerKey, Record, SettlementState, StoredResponse},
    connections::{Connections, Statement},
    processes::is_alive,
    responses,
    rows::{capped, column, count, key, key_column, keyed, unreadable},
};
use crate::payment::PaymentKey;

/// A record with the stamp of its row.
#[derive(Clone, Debug)]
pub(super) struct Stamped {
    /// With the lease and the claim of a process that died ended.
    pub(super) record: Record,
    pub(super) stamp: i64,
    pub(super) holders: Holders,
}

/// The processes that hold a payment; 0 is none.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Holders {
    lease: i64,
    settling: i64,
}

impl Holders {
    /// Returns the holders of a payment that this process reserves.
    pub(super) const fn of_new(process: i64) -> Self {
        Self { lease: process, settling: 0 }
    }

    /// Returns the holders after a step of this process: what changed is its own.
    pub(super) fn after(seen: &Stamped, record: &Record, process: i64) -> Self {
        let Self { lease, settling } = seen.holders;
        Self {
            lease: if record.epoch == seen.record.epoch { lease } else { process },
            settling: if record.settling == seen.record.settling { settling } else { process },
        }
    }

    pub(super) const fn submitted_by(self, process: i64) -> Self {
        Self { settling: process, ..self }
    }
}

/// The result of an attempt to reserve.
pub(super) enum Found {
    New,
    Known(Box<Stamped>),
    /// Another payment has the payment id.
    IdTaken(PaymentKey),
    /// A concurrent reservation was discarded, or is not visible yet. Try again.
    Nothing,
}

/// A step that is refused if another step that depends on the same sums was taken after the stamp was read.
pub(super) struct Turn {
    pub(super) payer: PayerKey,
    pub(super) seen: Option<i64>,
    pub(super) now: u64,
}

macro_rules! step {
    () => {
        "UPDATE payments SET stamp = $3, fulfilment = $4, settlement = $5, has_failed = $6, in_flight = $7, \
         is_resolved = $8, block = $9, settled_at = $10, lease_until = $11, settling_until = $12, is_owed = $13, \
         is_overdue = $14, record = $15, amount = $16::numeric, lease_process = $17, settling_process = $18 \
         WHERE key = $1 AND stamp = $2"
    };
}

/// All that [`stamped`] reads.
macro_rules! seen {
    () => {
        concat!(
            "stamp, replays, record, lease_process, settling_process, ",
            is_alive!("lease_process"),
            " AS lease_holds, ",
            is_alive!("settling_process"),
            " AS claim_holds"
        )
    };
}
pub(super) use seen;

const RESERVE: &str = concat!(
    "WITH made AS (\
       INSERT INTO payments (key, stamp, fulfilment, settlement, has_failed, in_flight, is_resolved, block, settled_at, \
         lease_until, settling_until, is_owed, is_overdue, record, amount, lease_process, settling_process, id, forget_at, payer, payee) \
       VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15::numeric, $16, $17, $18, $19, $20, $21) \
       ON CONFLICT DO NOTHING RETURNING key) \
     SELECT true AS is_new, key, 0::bigint AS stamp, 0::bigint AS replays, '' AS record, 0::bigint AS lease_process, \
       0::bigint AS settling_process, false AS lease_holds, false AS claim_holds FROM made \
     UNION ALL SELECT false, key, ",
    seen!(),
    " FROM payments WHERE key = $1 \
     UNION ALL SELECT false, key, ",
    seen!(),
    " FROM payments WHERE payer = $20 AND payments.id = $18 AND key <> $1"
);
const READ: &str = concat!("SELECT ", seen!(), " FROM payments WHERE key = $1");
const STEP: &str = concat!(step!(), " RETURNING 1");
const STEP_WITH_RESPONSE: &str = concat!(
    "WITH step AS (",
    step!(),
    " RETURNING 1), kept AS (\
       INSERT INTO responses (key, stored_at, weight, head, body) SELECT $1, $19, $20, $21, $22 FROM step \
       ON CONFLICT DO NOTHING) \
     SELECT 1 FROM step"
);
// The payment's row is locked first, so that a step that is not taken does not use up the turn.
const STEP_IN_TURN: &str = concat!(
    "WITH mine AS (SELECT 1 FROM payments WHERE key = $1 AND stamp = $2 FOR UPDATE), \
     turn AS (\
       INSERT INTO turns (payer, stamp, touched_at) SELECT $19, $3, $20 FROM mine \
       ON CONFLICT (payer) DO UPDATE SET stamp = excluded.stamp, touched_at = excluded.touched_at \
       WHERE turns.stamp = $21 RETURNING 1) ",
    step!(),
    " AND EXISTS (SELECT 1 FROM turn) RETURNING 1"
);
const DISCARD: &str = "DELETE FROM payments WHERE key = $1 AND stamp = $2 RETURNING 1";
// The number of replays is beside the record, so that replays of one response need not wait for each other, nor for steps.
const COUNT_REPLAY: &str =
    concat!("UPDATE payments SET replays = LEAST(replays + 1, 4294967295) WHERE key = $1 RETURNING ", seen!());

// The index has the rows of each state in the order of the keys.
const LIST: &str = concat!(
    "SELECT found.* FROM unnest($1::text[]) AS state CROSS JOIN LATERAL (\
       SELECT key, ",
    seen!(),
    " FROM payments WHERE settlement = state AND key > $2 \
         AND ($3::bytea IS NULL OR substring(key FROM 1 FOR 8) = $3) \
         AND (cardinality($4::text[]) = 0 OR fulfilment = ANY ($4)) \
         AND ($5::bigint IS NULL OR ((settling_until < $5) IS NOT FALSE OR NOT ",
    is_alive!("settling_process"),
    ") AND (lease_until < $5 OR settled_at IS NOT NULL OR NOT ",
    is_alive!("lease_process"),
    ")) \
         AND ($6::bigint IS NULL OR block <= $6) \
       ORDER BY key LIMIT $7) AS found \
     ORDER BY key LIMIT $7"
);
const COUNTS: &str = "SELECT settlement, fulfilment = 'released' AS is_released, has_failed, count(*) AS number \
       FROM payments GROUP BY 1, 2, 3 \
     UNION ALL SELECT 'settled', false, false, settled FROM totals \
     UNION ALL SELECT 'unresolved', false, false, unresolved FROM totals";

/// The number of rows that are listed at once.
const PAGE: usize = 512;
/// The precision of `touched_at`, in seconds, so that its index is not written for every payment.
const TOUCHED_EVERY: u64 = 1024;

pub(super) fn reserve(record: &Record, stamp: i64, holders: Holders) -> Result<Statement, LedgerError> {
    Ok(values(keyed(RESERVE, &record.key).bind(stamp), record, holders)?
        .bind(record.id.map(|id| id.to_vec()))
        .bind(capped(record.forget_at()))
        .bind(PayerKey::of(record).to_bytes().to_vec())
        .bind(record.terms.offer().pay_to.to_vec()))
}

pub(super) fn found(reserved: &PaymentKey, rows: &[PgRow]) -> Result<Found, LedgerError> {
    let mut holder = None;
    for row in rows {
        if column(row, "is_new")? {
            return Ok(Found::New);
        }
        let found = key(row)?;
        if found == *reserved {
            return Ok(Found::Known(Box::new(stamped(row)?)));
        }
        holder = Some(found);
    }
    Ok(holder.map_or(Found::Nothing, Found::IdTaken))
}

pub(super) async fn read(connections: &Connections, key: &PaymentKey) -> Result<Option<Stamped>, LedgerError> {
    let rows = connections.repeat(keyed(READ, key)).await?;
    rows.first().map(stamped).transpose()
}

/// Returns the statement that replaces the row with stamp `from` by this one, and stores a response. It returns one row if it did.
pub(super) fn step(to: &Stamped, from: i64, response: Option<&StoredResponse>) -> Result<Statement, LedgerError> {
    match response {
        Some(response) => Ok(responses::bind(replacing(STEP_WITH_RESPONSE, to, from)?, response)),
        None => replacing(STEP, to, from),
    }
}

/// As [`step`], unless the turn was taken meanwhile.
pub(super) fn step_in_turn(to: &Stamped, from: i64, turn: &Turn) -> Result<Statement, LedgerError> {
    Ok(replacing(STEP_IN_TURN, to, from)?
        .bind(turn.payer.to_bytes().to_vec())
        .bind(capped(turn.now - turn.now % TOUCHED_EVERY))
        .bind(turn.seen))
}

pub(super) fn discard(key: &PaymentKey, from: i64) -> Statement {
    keyed(DISCARD, key).bind(from)
}

pub(super) async fn count_replay(connections: &Connections, key: &PaymentKey) -> Result<Record, LedgerError> {
    let rows = connections.repeat(keyed(COUNT_REPLAY, key)).await?;
    Ok(stamped(rows.first().ok_or(LedgerError::NotFound)?)?.record)
}

pub(super) async fn list(connections: &Connections, listing: &Listing) -> Result<Vec<Record>, LedgerError> {
    let mut after = listing.after;
    let mut found = Vec::new();
    loop {
        let page = PAGE.min(listing.limit - found.len());
        let rows = connections.repeat(page_of(listing, after, page)).await?;
        for row in &rows {
            let record = stamped(row)?.record;
            after = Some(record.key);
            // The query is a first selection by indexes; the definition is in one place.
            if listing.holds(&record) {
                found.push(record);
            }
        }
        if rows.len() < page || found.len() >= listing.limit {
            return Ok(found);
        }
    }
}

fn page_of(listing: &Listing, after: Option<PaymentKey>, page: usize) -> Statement {
    let states: Vec<&str> = SettlementState::ALL
        .iter()
        .filter(|state| listing.settlement.is_empty() || listing.settlement.contains(state))
        .map(|state| state.as_str())
        .collect();
    Statement::new(LIST)
        .bind(states)
        .bind(after.as_ref().map_or_else(Vec::new, key_column))
        .bind(listing.network.map(|network| network.chain_id().to_be_bytes().to_vec()))
        .bind(listing.fulfilment.iter().map(|state| state.as_str()).collect::<Vec<_>>())
        .bind(listing.idle_at.map(capped))
        .bind(listing.up_to_block.map(capped))
        .bind(count(page))
}

pub(super) async fn counts(connections: &Connections) -> Result<Counts, LedgerError> {
    let mut counts = Counts::default();
    for row in connections.repeat(Statement::new(COUNTS)).await? {
        let name: &str = column(&row, "settlement")?;
        if name == "unresolved" {
            counts.unresolved = column::<i64>(&row, "number")?.cast_unsigned();
            continue;
        }
        let state = SettlementState::ALL.into_iter().find(|state| state.as_str() == name).ok_or_else(unreadable)?;
        let counter = counts.counter(state, column(&row, "is_released")?, column(&row, "has_failed")?);
        if let Some(counter) = counter {
            *counter += column::<i64>(&row, "number")?.cast_unsigned();
        }
    }
    Ok(counts)
}

/// Returns a statement whose first eighteen arguments are the key, the stamp that is replaced, and the row.
fn replacing(sql: &'static str, to: &Stamped, from: i64) -> Result<Statement, LedgerError> {
    values(keyed(sql, &to.record.key).bind(from).bind(to.stamp), &to.record, to.holders)
}

/// Sets the next fifteen arguments.
fn values(statement: Statement, record: &Record, holders: Holders) -> Result<Statement, LedgerError> {
    Ok(statement
        .bind(record.fulfilment.as_str())
        .bind(record.settlement.state().as_str())
        .bind(record.last_failure.is_some())
        .bind(record.admitted)
        .bind(record.is_resolved())
        .bind(record.settlement.block().map(capped))
        // A payment that a reorganization removed, or that was charged nothing, counts neither as moved nor as settled.
        .bind(record.settled_at.filter(|_| record.transaction().is_some()).map(capped))
        .bind(capped(record.lease_until))
        .bind(record.settling.map(|settling| capped(settling.until)))
        .bind(!record.owed().is_zero())
        .bind(record.is_overdue())
        .bind(json(record)?)
        .bind(record.amount().to_string())
        .bind(holders.lease)
        .bind(holders.settling))
}

pub(super) fn json(record: &Record) -> Result<String, LedgerError> {
    record.to_json().map_err(|error| LedgerError::Backend(Box::new(error)))
}

/// Reads a row with the columns of [`seen`].
pub(super) fn stamped(row: &PgRow) -> Result<Stamped, LedgerError> {
    let mut record = Record::from_json(column(row, "record")?).map_err(|_| unreadable())?;
    record.replays = u32::try_from(column::<i64>(row, "replays")?).unwrap_or(u32::MAX);
    if !column::<bool>(row, "lease_holds")? {
        record.lease_until = 0;
    }
    if let Some(settling) = record.settling.as_mut().filter(|_| matches!(column(row, "claim_holds"), Ok(false))) {
        settling.until = 0;
    }
    let holders = Holders { lease: column(row, "lease_process")?, settling: column(row, "settling_process")? };
    Ok(Stamped { record, stamp: column(row, "stamp")?, holders })
}
