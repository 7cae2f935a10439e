//! Payments as rows.

use alloy_primitives::{Address, B256};
use sqlx::{Row as _, postgres::PgRow};

use super::{
    super::{Fulfilment, LedgerError, Record, credit::is_overdue, row, shard::expiry},
    connections::{Connections, DatabaseError, Statement},
    responses::KeptResponse,
};
use crate::{network::Network, payment::PaymentKey};

/// A record and the stamp it had.
#[derive(Clone, Debug)]
pub(super) struct Stamped {
    pub(super) record: Record,
    pub(super) stamp: i64,
}

/// What an attempt to reserve finds.
pub(super) enum Found {
    New,
    Known(Box<Stamped>),
    /// Another payment has the id.
    IdTaken(PaymentKey),
    /// Whoever was faster has just discarded it, or is not visible yet: look again.
    Nothing,
}

/// Nobody must have taken a turn since this stamp was read.
pub(super) struct Turn {
    pub(super) of: TurnOf,
    pub(super) seen: Option<i64>,
    pub(super) now: u64,
}

/// Whose steps come one after the other.
#[derive(Clone, Copy)]
pub(super) enum TurnOf {
    /// Those of one payer on one network, in one token.
    Payer(PaymentKey),
    Everybody,
}

impl TurnOf {
    /// Fills the next three places.
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
         is_overdue = $17, record = $18 \
         WHERE chain_id = $1 AND asset = $2 AND payer = $3 AND nonce = $4 AND stamp = $5"
    };
}

const RESERVE: &str = "WITH made AS (\
       INSERT INTO payments (chain_id, asset, payer, nonce, stamp, fulfilment, settlement, has_failed, in_flight, \
         is_resolved, block, settled_at, lease_until, settling_until, is_owed, is_overdue, record, id, amount, forget_at) \
       VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18, $19::numeric, $20) \
       ON CONFLICT DO NOTHING RETURNING nonce) \
     SELECT true AS is_new, nonce, 0::bigint AS stamp, 0::bigint AS lease_until, 0::bigint AS replays, '' AS record FROM made \
     UNION ALL SELECT false, nonce, stamp, lease_until, replays, record FROM payments \
       WHERE chain_id = $1 AND asset = $2 AND payer = $3 AND nonce = $4 \
     UNION ALL SELECT false, nonce, stamp, lease_until, replays, record FROM payments \
       WHERE chain_id = $1 AND asset = $2 AND payer = $3 AND id = $18 AND nonce <> $4";
const READ: &str = "SELECT stamp, lease_until, replays, record FROM payments \
     WHERE chain_id = $1 AND asset = $2 AND payer = $3 AND nonce = $4";
const STEP: &str = concat!(step!(), " RETURNING 1");
const STEP_WITH_RESPONSE: &str = concat!(
    "WITH step AS (",
    step!(),
    " RETURNING 1), kept AS (\
       INSERT INTO responses (chain_id, asset, payer, nonce, stored_at, weight, head, body) \
       SELECT $1, $2, $3, $4, $19, $20, $21, $22 FROM step ON CONFLICT DO NOTHING) \
     SELECT 1 FROM step"
);
/// The payment's row is locked first, so that a turn is not used up by a step that is not taken.
const STEP_IN_TURN: &str = concat!(
    "WITH mine AS (\
       SELECT 1 FROM payments WHERE chain_id = $1 AND asset = $2 AND payer = $3 AND nonce = $4 AND stamp = $5 FOR UPDATE), \
     turn AS (\
       INSERT INTO turns (chain_id, asset, payer, stamp, touched_at) SELECT $21, $22, $23, $6, $19 FROM mine \
       ON CONFLICT (chain_id, asset, payer) DO UPDATE SET stamp = excluded.stamp, touched_at = excluded.touched_at \
       WHERE turns.stamp = $20 RETURNING 1) ",
    step!(),
    " AND EXISTS (SELECT 1 FROM turn) RETURNING 1"
);
const DISCARD: &str = "DELETE FROM payments \
     WHERE chain_id = $1 AND asset = $2 AND payer = $3 AND nonce = $4 AND stamp = $5 RETURNING 1";
const COUNT_REPLAY: &str = "UPDATE payments SET replays = LEAST(replays + 1, 4294967295) \
     WHERE chain_id = $1 AND asset = $2 AND payer = $3 AND nonce = $4 RETURNING replays";

/// How often `touched_at` changes, in seconds: an index on it need not be written for every payment.
const TOUCHED_EVERY: u64 = 1024;

pub(super) fn reserve(record: &Record, stamp: i64) -> Result<Statement, LedgerError> {
    Ok(values(keyed(RESERVE, &record.key).bind(stamp), record)?
        .bind(record.id.map(|id| id.to_vec()))
        .bind(record.authorization.value.to_string())
        .bind(capped(expiry(record))))
}

pub(super) fn found(key: &PaymentKey, rows: &[PgRow]) -> Result<Found, LedgerError> {
    let mut holder = None;
    for row in rows {
        if column(row, "is_new")? {
            return Ok(Found::New);
        }
        let nonce = B256::try_from(&column::<Vec<u8>>(row, "nonce")?[..]).map_err(|_| unreadable())?;
        if nonce == key.nonce {
            return Ok(Found::Known(Box::new(stamped(row)?)));
        }
        holder = Some(PaymentKey { nonce, ..*key });
    }
    Ok(holder.map_or(Found::Nothing, Found::IdTaken))
}

pub(super) async fn read(connections: &Connections, key: &PaymentKey) -> Result<Option<Stamped>, LedgerError> {
    let rows = connections.repeat(keyed(READ, key)).await?;
    rows.first().map(stamped).transpose()
}

/// A step to this record from the one that had the stamp `from`; one row if it was taken.
pub(super) fn step(record: &Record, from: i64, to: i64) -> Result<Statement, LedgerError> {
    values(keyed(STEP, &record.key).bind(from).bind(to), record)
}

/// The same, with the response that the step brings.
pub(super) fn step_with_response(
    record: &Record,
    from: i64,
    to: i64,
    response: &KeptResponse,
) -> Result<Statement, LedgerError> {
    let statement = values(keyed(STEP_WITH_RESPONSE, &record.key).bind(from).bind(to), record)?;
    Ok(response.bind_to(statement))
}

/// The same, if nobody has taken the turn in between.
pub(super) fn step_in_turn(record: &Record, from: i64, to: i64, turn: &Turn) -> Result<Statement, LedgerError> {
    let statement = values(keyed(STEP_IN_TURN, &record.key).bind(from).bind(to), record)?;
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

/// A statement whose first four places are the key.
pub(super) fn keyed(sql: &'static str, key: &PaymentKey) -> Statement {
    Statement::new(sql)
        .bind(chain(key.network))
        .bind(key.asset.to_vec())
        .bind(key.payer.to_vec())
        .bind(key.nonce.to_vec())
}

fn values(statement: Statement, record: &Record) -> Result<Statement, LedgerError> {
    Ok(statement
        .bind(fulfilment(record.fulfilment))
        .bind(record.settlement.state().as_str())
        .bind(record.last_failure.is_some())
        .bind(record.admitted)
        .bind(record.is_resolved())
        .bind(record.settlement.block().map(capped))
        // What a reorganization undid is paid for by nobody, and speaks for nobody.
        .bind(record.settled_at.filter(|_| record.settlement.paid_by().is_some()).map(capped))
        .bind(capped(record.lease_until))
        .bind(settling_until(record))
        .bind(!record.owed().is_zero())
        .bind(is_overdue(record))
        .bind(json(record)?))
}

pub(super) fn settling_until(record: &Record) -> Option<i64> {
    record.settling.map(|settling| capped(settling.until))
}

pub(super) fn json(record: &Record) -> Result<String, LedgerError> {
    row::whole(record).map_err(|error| LedgerError::Backend(Box::new(error)))
}

/// The record of a row with the columns `stamp`, `lease_until`, `replays` and `record`.
pub(super) fn stamped(row: &PgRow) -> Result<Stamped, LedgerError> {
    let json: &str = column(row, "record")?;
    let mut record = row::read(json, json).ok_or_else(unreadable)?;
    // The processes that hold leases are alive.
    record.lease_until = column::<i64>(row, "lease_until")?.cast_unsigned();
    record.replays = u32::try_from(column::<i64>(row, "replays")?).unwrap_or(u32::MAX);
    Ok(Stamped { record, stamp: column(row, "stamp")? })
}

/// The key of a row with the columns of one.
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

pub(super) const fn fulfilment(state: Fulfilment) -> &'static str {
    match state {
        Fulfilment::Reserved => "reserved",
        Fulfilment::Working => "working",
        Fulfilment::Produced => "produced",
        Fulfilment::Delivered => "delivered",
        Fulfilment::Released => "released",
    }
}

/// EIP-2294 keeps chain ids within the numbers of the column.
pub(super) const fn chain(network: Network) -> i64 {
    network.chain_id().cast_signed()
}

/// Times, blocks and nonces in order; those beyond the column's numbers never come.
pub(super) fn capped(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

pub(super) fn unreadable() -> LedgerError {
    LedgerError::Backend("the database holds a row that is not a payment of ours; restore it from a backup".into())
}
