//! The table of payments: reading, writing and listing its rows.
//!
//! A row has the record as JSON, and beside it the columns by which the database selects and sums. Every write gives it a random stamp, and
//! replaces only a row that has the stamp that was read.

use alloy_primitives::{Address, B256};
use sqlx::{Row as _, postgres::PgRow};

use super::{
    super::{Counts, LedgerError, Listing, Record, SettlementState, memory::expiry},
    connections::{Connections, DatabaseError, Statement},
    processes::is_alive,
    upkeep::ResponseRow,
};
use crate::{network::Network, payment::PaymentKey};

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

    fn bind_to(self, statement: Statement) -> Statement {
        statement.bind(self.lease).bind(self.settling)
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

/// A step that is refused if another step of this kind was taken after the stamp was read.
pub(super) struct Turn {
    pub(super) of: TurnOf,
    pub(super) seen: Option<i64>,
    pub(super) now: u64,
}

/// The steps that are taken one after the other: a row of the table of turns.
#[derive(Clone, Copy)]
pub(super) enum TurnOf {
    /// Admissions of one payer on one network in one token.
    Payer(PaymentKey),
    /// Deferrals of all payers.
    Everybody,
}

impl TurnOf {
    /// Sets the next three arguments.
    pub(super) fn bind_to(self, statement: Statement) -> Statement {
        match self {
            Self::Payer(key) => statement.bind(chain(key.network)).bind(key.asset.to_vec()).bind(key.payer.to_vec()),
            Self::Everybody => statement.bind(-1_i64).bind(Vec::<u8>::new()).bind(Vec::<u8>::new()),
        }
    }
}

macro_rules! step {
    () => {
        "UPDATE payments SET stamp = $6, fulfilment = $7, settlement = $8, has_failed = $9, in_flight = $10, \
         is_resolved = $11, block = $12, settled_at = $13, lease_until = $14, settling_until = $15, is_owed = $16, \
         is_overdue = $17, record = $18, amount = $19::numeric, lease_process = $20, settling_process = $21 \
         WHERE chain_id = $1 AND asset = $2 AND payer = $3 AND nonce = $4 AND stamp = $5"
    };
}

/// What [`stamped`] reads beside the columns of a row.
macro_rules! holding {
    () => {
        concat!(is_alive!("lease_process"), " AS lease_holds, ", is_alive!("settling_process"), " AS claim_holds")
    };
}
pub(super) use holding;

/// All that [`stamped`] reads.
macro_rules! seen {
    () => {
        concat!("stamp, lease_until, replays, record, lease_process, settling_process, ", holding!())
    };
}
pub(super) use seen;

const RESERVE: &str = concat!(
    "WITH made AS (\
       INSERT INTO payments (chain_id, asset, payer, nonce, stamp, fulfilment, settlement, has_failed, in_flight, \
         is_resolved, block, settled_at, lease_until, settling_until, is_owed, is_overdue, record, amount, lease_process, \
         settling_process, id, forget_at, token) \
       VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18::numeric, $19, $20, $21, $22, $23) \
       ON CONFLICT DO NOTHING RETURNING asset, nonce) \
     SELECT true AS is_new, asset, nonce, 0::bigint AS stamp, 0::bigint AS lease_until, 0::bigint AS replays, '' AS record, \
       0::bigint AS lease_process, 0::bigint AS settling_process, false AS lease_holds, false AS claim_holds FROM made \
     UNION ALL SELECT false, asset, nonce, ",
    seen!(),
    " FROM payments WHERE chain_id = $1 AND asset = $2 AND payer = $3 AND nonce = $4 \
     UNION ALL SELECT false, asset, nonce, ",
    seen!(),
    " FROM payments WHERE chain_id = $1 AND token = $23 AND payer = $3 AND id = $21 AND (asset, nonce) <> ($2, $4)"
);
const READ: &str =
    concat!("SELECT ", seen!(), " FROM payments WHERE chain_id = $1 AND asset = $2 AND payer = $3 AND nonce = $4");
const STEP: &str = concat!(step!(), " RETURNING 1");
const STEP_WITH_RESPONSE: &str = concat!(
    "WITH step AS (",
    step!(),
    " RETURNING 1), kept AS (\
       INSERT INTO responses (chain_id, asset, payer, nonce, stored_at, weight, head, body) \
       SELECT $1, $2, $3, $4, $22, $23, $24, $25 FROM step ON CONFLICT DO NOTHING) \
     SELECT 1 FROM step"
);
// The payment's row is locked first, so that a step that is not taken does not use up the turn.
const STEP_IN_TURN: &str = concat!(
    "WITH mine AS (\
       SELECT 1 FROM payments WHERE chain_id = $1 AND asset = $2 AND payer = $3 AND nonce = $4 AND stamp = $5 FOR UPDATE), \
     turn AS (\
       INSERT INTO turns (chain_id, asset, payer, stamp, touched_at) SELECT $24, $25, $26, $6, $22 FROM mine \
       ON CONFLICT (chain_id, asset, payer) DO UPDATE SET stamp = excluded.stamp, touched_at = excluded.touched_at \
       WHERE turns.stamp = $23 RETURNING 1) ",
    step!(),
    " AND EXISTS (SELECT 1 FROM turn) RETURNING 1"
);
const DISCARD: &str = "DELETE FROM payments \
     WHERE chain_id = $1 AND asset = $2 AND payer = $3 AND nonce = $4 AND stamp = $5 RETURNING 1";
const COUNT_REPLAY: &str = "UPDATE payments SET replays = LEAST(replays + 1, 4294967295) \
     WHERE chain_id = $1 AND asset = $2 AND payer = $3 AND nonce = $4 RETURNING replays";

// The index has the rows of each state in the order of the keys.
const LIST: &str = concat!(
    "SELECT found.* FROM unnest($1::text[]) AS state CROSS JOIN LATERAL (\
       SELECT payments.*, ",
    holding!(),
    " FROM payments WHERE settlement = state \
         AND (chain_id, asset, payer, nonce) > ($2, $3::bytea, $4::bytea, $5::bytea) \
         AND ($6::bigint IS NULL OR chain_id = $6) \
         AND (cardinality($7::text[]) = 0 OR fulfilment = ANY ($7)) \
         AND ($8::bigint IS NULL OR ((settling_until < $8) IS NOT FALSE OR NOT ",
    is_alive!("settling_process"),
    ") AND (lease_until < $8 OR settled_at IS NOT NULL OR NOT ",
    is_alive!("lease_process"),
    ")) \
         AND ($9::bigint IS NULL OR block <= $9) \
       ORDER BY chain_id, asset, payer, nonce LIMIT $10) AS found \
     ORDER BY chain_id, asset, payer, nonce LIMIT $10"
);
const COUNTS: &str = "SELECT settlement, fulfilment = 'released' AS is_released, has_failed, count(*) AS number \
       FROM payments GROUP BY 1, 2, 3 \
     UNION ALL SELECT 'settled', false, false, settled FROM totals";

/// The number of rows that are listed at once.
const PAGE: usize = 512;
/// The precision of `touched_at`, in seconds, so that its index is not written for every payment.
const TOUCHED_EVERY: u64 = 1024;

pub(super) fn reserve(record: &Record, stamp: i64, holders: Holders) -> Result<Statement, LedgerError> {
    Ok(values(keyed(RESERVE, &record.key).bind(stamp), record, holders)?
        .bind(record.id.map(|id| id.to_vec()))
        .bind(capped(expiry(record)))
        .bind(record.terms.offer().asset.address.to_vec()))
}

pub(super) fn found(key: &PaymentKey, rows: &[PgRow]) -> Result<Found, LedgerError> {
    let mut holder = None;
    for row in rows {
        if column(row, "is_new")? {
            return Ok(Found::New);
        }
        let asset = Address::try_from(column::<&[u8]>(row, "asset")?).map_err(|_| unreadable())?;
        let nonce = B256::try_from(column::<&[u8]>(row, "nonce")?).map_err(|_| unreadable())?;
        let found = PaymentKey { asset, nonce, ..*key };
        if found == *key {
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

/// Returns the statement that replaces the row with stamp `from` by this one. It returns one row if it did.
pub(super) fn step(to: &Stamped, from: i64) -> Result<Statement, LedgerError> {
    replacing(STEP, to, from)
}

/// As [`step`], and stores a response.
pub(super) fn step_with_response(to: &Stamped, from: i64, response: &ResponseRow) -> Result<Statement, LedgerError> {
    Ok(response.bind_to(replacing(STEP_WITH_RESPONSE, to, from)?))
}

/// As [`step`], unless the turn was taken meanwhile.
pub(super) fn step_in_turn(to: &Stamped, from: i64, turn: &Turn) -> Result<Statement, LedgerError> {
    let statement = replacing(STEP_IN_TURN, to, from)?;
    Ok(turn.of.bind_to(statement.bind(capped(turn.now - turn.now % TOUCHED_EVERY)).bind(turn.seen)))
}

pub(super) fn discard(key: &PaymentKey, from: i64) -> Statement {
    keyed(DISCARD, key).bind(from)
}

pub(super) async fn count_replay(connections: &Connections, key: &PaymentKey) -> Result<u32, LedgerError> {
    let rows = connections.repeat(keyed(COUNT_REPLAY, key)).await?;
    let replays: i64 = column(rows.first().ok_or(LedgerError::NotFound)?, "replays")?;
    Ok(u32::try_from(replays).unwrap_or(u32::MAX))
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
    let bytes = |part: Option<&[u8]>| part.unwrap_or_default().to_vec();
    Statement::new(LIST)
        .bind(states)
        .bind(after.map_or(i64::MIN, |key| chain(key.network)))
        .bind(bytes(after.as_ref().map(|key| key.asset.as_slice())))
        .bind(bytes(after.as_ref().map(|key| key.payer.as_slice())))
        .bind(bytes(after.as_ref().map(|key| key.nonce.as_slice())))
        .bind(listing.network.map(chain))
        .bind(listing.fulfilment.iter().map(|state| state.as_str()).collect::<Vec<_>>())
        .bind(listing.idle_at.map(capped))
        .bind(listing.up_to_block.map(capped))
        .bind(i64::try_from(page).unwrap_or(i64::MAX))
}

pub(super) async fn counts(connections: &Connections) -> Result<Counts, LedgerError> {
    let mut counts = Counts::default();
    for row in connections.repeat(Statement::new(COUNTS)).await? {
        let name: &str = column(&row, "settlement")?;
        let state = SettlementState::ALL.into_iter().find(|state| state.as_str() == name).ok_or_else(unreadable)?;
        let counter = counts.counter(state, column(&row, "is_released")?, column(&row, "has_failed")?);
        if let Some(counter) = counter {
            *counter += column::<i64>(&row, "number")?.cast_unsigned();
        }
    }
    Ok(counts)
}

/// Returns a statement whose first four arguments are the key.
pub(super) fn keyed(sql: &'static str, key: &PaymentKey) -> Statement {
    Statement::new(sql)
        .bind(chain(key.network))
        .bind(key.asset.to_vec())
        .bind(key.payer.to_vec())
        .bind(key.nonce.to_vec())
}

fn replacing(sql: &'static str, to: &Stamped, from: i64) -> Result<Statement, LedgerError> {
    values(keyed(sql, &to.record.key).bind(from).bind(to.stamp), &to.record, to.holders)
}

fn values(statement: Statement, record: &Record, holders: Holders) -> Result<Statement, LedgerError> {
    let statement = statement
        .bind(record.fulfilment.as_str())
        .bind(record.settlement.state().as_str())
        .bind(record.last_failure.is_some())
        .bind(record.admitted)
        .bind(record.is_resolved())
        .bind(record.settlement.block().map(capped))
        // A payment that a reorganization removed, or that was charged nothing, counts neither as moved nor as history.
        .bind(record.settled_at.filter(|_| record.transaction().is_some()).map(capped))
        .bind(capped(record.lease_until))
        .bind(settling_until(record))
        .bind(!record.owed().is_zero())
        .bind(record.is_overdue())
        .bind(json(record)?)
        .bind(record.amount().to_string());
    Ok(holders.bind_to(statement))
}

pub(super) fn settling_until(record: &Record) -> Option<i64> {
    record.settling.map(|settling| capped(settling.until))
}

pub(super) fn json(record: &Record) -> Result<String, LedgerError> {
    record.to_json().map_err(|error| LedgerError::Backend(Box::new(error)))
}

/// Reads a row with the columns of [`seen`].
pub(super) fn stamped(row: &PgRow) -> Result<Stamped, LedgerError> {
    let mut record = Record::from_json(column(row, "record")?).map_err(|_| unreadable())?;
    record.replays = u32::try_from(column::<i64>(row, "replays")?).unwrap_or(u32::MAX);
    if column(row, "lease_holds")? {
        record.lease_until = column::<i64>(row, "lease_until")?.cast_unsigned();
    }
    if let Some(settling) = record.settling.as_mut().filter(|_| matches!(column(row, "claim_holds"), Ok(false))) {
        settling.until = 0;
    }
    let holders = Holders { lease: column(row, "lease_process")?, settling: column(row, "settling_process")? };
    Ok(Stamped { record, stamp: column(row, "stamp")?, holders })
}

/// Reads the key of a row that has its columns.
pub(super) fn key(row: &PgRow) -> Result<PaymentKey, LedgerError> {
    let address = |name| Address::try_from(column::<&[u8]>(row, name)?).map_err(|_| unreadable());
    Ok(PaymentKey {
        network: Network::eip155(column::<i64>(row, "chain_id")?.cast_unsigned()),
        asset: address("asset")?,
        payer: address("payer")?,
        nonce: B256::try_from(column::<&[u8]>(row, "nonce")?).map_err(|_| unreadable())?,
    })
}

pub(super) fn column<'r, T: sqlx::Decode<'r, sqlx::Postgres> + sqlx::Type<sqlx::Postgres>>(
    row: &'r PgRow,
    name: &str,
) -> Result<T, LedgerError> {
    row.try_get(name).map_err(|error| DatabaseError::of(&error).into())
}

/// Returns a chain id for its column. EIP-2294 keeps it below 2⁶³.
pub(super) const fn chain(network: Network) -> i64 {
    network.chain_id().cast_signed()
}

/// Returns a time, block or nonce for its column. Order is kept; numbers of 2⁶³ and above do not occur.
pub(super) fn capped(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

pub(super) fn unreadable() -> LedgerError {
    LedgerError::Backend("the database holds a row that this ledger did not write; restore it from a backup".into())
}
