//! The table of account nonces, with the newest transaction of each.

use std::collections::{BTreeMap, HashMap};

use alloy_primitives::B256;
use sqlx::postgres::PgRow;

use super::{
    super::{
        JournaledTransaction, LedgerError, Record, Sender,
        transactions::{MAX_LISTED, MAX_NONCES, is_held},
    },
    PostgresLedger,
    connections::{Connections, Statement},
    payments::{Stamped, json, seen, stamped},
    processes::is_alive,
    rows::{capped, column, count, key_columns, unreadable},
    steps::Progress,
};
use crate::payment::PaymentKey;

const NONCE: &str = concat!(
    "SELECT stamp, owner, used_at, is_free, ",
    is_alive!("process"),
    " AS holds, (SELECT max(nonce) FROM nonces WHERE sender = $1) AS last \
     FROM (SELECT) AS one LEFT JOIN nonces ON sender = $1 AND nonce = $2"
);
const READ: &str = concat!("SELECT ", seen!(), " FROM payments WHERE key = ANY ($1::bytea[])");
// All or nothing in one statement: each part happens only if the one before it did. Payments are locked in the order of their keys, so
// that concurrent submissions do not deadlock.
const SUBMIT: &str = "WITH \
     asked AS (SELECT * FROM unnest($1::bytea[], $2::bigint[], $3::text[]) AS asked (key, stamp, record)), \
     locked AS (\
       SELECT asked.* FROM asked JOIN payments USING (key, stamp) ORDER BY key FOR UPDATE OF payments), \
     complete AS (SELECT 1 WHERE (SELECT count(*) FROM locked) = cardinality($1::bytea[])), \
     claimed AS (\
       INSERT INTO nonces (sender, nonce, stamp, owner, used_at, until, is_free, process, hash, raw, payments) \
       SELECT $5, $6, $4, $7, $8, $9, false, $10, $11, $12, $1 FROM complete \
       ON CONFLICT (sender, nonce) DO UPDATE SET stamp = excluded.stamp, owner = excluded.owner, \
         used_at = excluded.used_at, until = excluded.until, is_free = false, process = excluded.process, \
         hash = excluded.hash, raw = excluded.raw, payments = excluded.payments \
       WHERE nonces.stamp = $13 RETURNING hash), \
     stepped AS (\
       UPDATE payments SET stamp = $4, settlement = 'submitted', is_resolved = false, settling_until = $9, \
         settling_process = $10, record = locked.record \
       FROM locked WHERE payments.key = locked.key AND EXISTS (SELECT 1 FROM claimed)) \
     SELECT hash FROM claimed";
const FORGET_OLDEST: &str = "DELETE FROM nonces WHERE sender = $1 AND nonce <= \
     (SELECT nonce FROM nonces WHERE sender = $1 ORDER BY nonce DESC OFFSET $2 LIMIT 1)";
const FREE: &str = "UPDATE nonces SET is_free = true WHERE sender = $1 AND nonce = $2 AND owner = $3";
const FORGET: &str = "DELETE FROM nonces WHERE sender = $1 AND nonce < $2";
const LIST: &str = "SELECT nonce, hash, raw, payments, owner, used_at, until FROM nonces \
     WHERE sender = $1 AND nonce >= $2 AND NOT is_free ORDER BY nonce LIMIT $3";

/// The number of a sender's nonces after which its oldest are removed.
const COUNT_EVERY: u64 = 256;

/// The nonce before the transaction.
struct Before {
    stamp: Option<i64>,
    is_open: bool,
    /// The sender's highest nonce.
    last: Option<u64>,
}

impl PostgresLedger {
    pub(super) async fn submit_transaction(&self, transaction: &JournaledTransaction) -> Result<(), LedgerError> {
        let keys = &transaction.payments;
        let mut progress = Progress::new();
        let mut known: HashMap<PaymentKey, Stamped> =
            keys.iter().filter_map(|key| Some((*key, self.known.take(key)?))).collect();
        loop {
            let now = self.clock.now();
            // Remembered records may be outdated, and are no reason to refuse anything.
            let is_guess = !keys.is_empty() && keys.iter().all(|key| known.contains_key(key));
            let seen = if is_guess { std::mem::take(&mut known) } else { self.read_all(keys).await? };
            let stepped = match step_all(&seen, transaction, now) {
                Err(_) if is_guess => continue,
                stepped => stepped?,
            };
            let before = self.nonce_before(transaction).await?;
            if !before.is_open {
                return Err(LedgerError::NonceTaken { next: before.last.map_or(0, |last| last.saturating_add(1)) });
            }
            let stamp = progress.next_stamp()?;
            let statement = submit(transaction, &seen, &stepped, stamp, self.process.id())?.bind(before.stamp);
            let result = self.connections.once(&statement).await;
            // A try whose answer was lost may be repeated: it is the same transaction of the same process.
            if progress.is_taken(result.map(|rows| !rows.is_empty()), 0).await? {
                for record in stepped {
                    let Some(seen) = seen.get(&record.key) else { continue };
                    let holders = seen.holders.submitted_by(self.process.id());
                    self.known.put(record.key, Stamped { record, stamp, holders });
                }
                break;
            }
        }
        if transaction.nonce.is_multiple_of(COUNT_EVERY) {
            self.connections.repeat(of_sender(FORGET_OLDEST, &transaction.sender).bind(count(MAX_NONCES))).await?;
        }
        Ok(())
    }

    async fn read_all(&self, keys: &[PaymentKey]) -> Result<HashMap<PaymentKey, Stamped>, LedgerError> {
        if keys.is_empty() {
            return Ok(HashMap::new());
        }
        let rows = self.connections.repeat(Statement::new(READ).bind(key_columns(keys))).await?;
        let seen = rows.iter().map(stamped);
        seen.map(|seen| seen.map(|seen| (seen.record.key, seen))).collect()
    }

    async fn nonce_before(&self, transaction: &JournaledTransaction) -> Result<Before, LedgerError> {
        let statement = of_sender(NONCE, &transaction.sender).bind(capped(transaction.nonce));
        let rows = self.connections.repeat(statement).await?;
        let row = rows.first().ok_or_else(unreadable)?;
        let stamp: Option<i64> = column(row, "stamp")?;
        let is_open = match stamp {
            None => true,
            Some(_) => {
                let number = |name| column::<i64>(row, name).map(i64::cast_unsigned);
                column(row, "is_free")?
                    || !column::<bool>(row, "holds")?
                    || !is_held(number("owner")?, number("used_at")?, transaction.by, transaction.at)
            }
        };
        Ok(Before { stamp, is_open, last: column::<Option<i64>>(row, "last")?.map(i64::cast_unsigned) })
    }
}

pub(super) async fn free_nonce(
    connections: &Connections,
    sender: &Sender,
    nonce: u64,
    by: u64,
) -> Result<(), LedgerError> {
    connections.repeat(of_sender(FREE, sender).bind(capped(nonce)).bind(by.cast_signed())).await.map(drop)
}

pub(super) async fn forget_nonces(connections: &Connections, sender: &Sender, below: u64) -> Result<(), LedgerError> {
    connections.repeat(of_sender(FORGET, sender).bind(capped(below))).await.map(drop)
}

pub(super) async fn list(
    connections: &Connections,
    sender: &Sender,
    from: u64,
) -> Result<Vec<JournaledTransaction>, LedgerError> {
    let rows = connections.repeat(of_sender(LIST, sender).bind(capped(from)).bind(count(MAX_LISTED))).await?;
    rows.iter().map(|row| read(sender, row)).collect()
}

/// Returns the records after the step, in the order of the payments.
fn step_all(
    seen: &HashMap<PaymentKey, Stamped>,
    transaction: &JournaledTransaction,
    now: u64,
) -> Result<Vec<Record>, LedgerError> {
    let mut records = Vec::with_capacity(transaction.payments.len());
    for key in &transaction.payments {
        records.push(seen.get(key).ok_or(LedgerError::NotFound)?.record.clone());
    }
    let not_due = |record: &&Record| !record.may_be_submitted(transaction, now);
    let not_due: Vec<PaymentKey> = records.iter().filter(not_due).map(|record| record.key).collect();
    if !not_due.is_empty() {
        return Err(LedgerError::NotDue(not_due));
    }
    for record in &mut records {
        record.submit(transaction, now)?;
    }
    Ok(records)
}

/// Returns the statement, without its last argument: the stamp of the nonce before it.
fn submit(
    transaction: &JournaledTransaction,
    seen: &HashMap<PaymentKey, Stamped>,
    stepped: &[Record],
    stamp: i64,
    process: i64,
) -> Result<Statement, LedgerError> {
    let stamps: Vec<i64> = stepped.iter().filter_map(|record| seen.get(&record.key)).map(|seen| seen.stamp).collect();
    let records = stepped.iter().map(json).collect::<Result<Vec<String>, _>>()?;
    Ok(Statement::new(SUBMIT)
        .bind(key_columns(&transaction.payments))
        .bind(stamps)
        .bind(records)
        .bind(stamp)
        .bind(transaction.sender.to_bytes().to_vec())
        .bind(capped(transaction.nonce))
        .bind(transaction.by.cast_signed())
        .bind(capped(transaction.at))
        .bind(capped(transaction.until))
        .bind(process)
        .bind(transaction.hash.to_vec())
        .bind(&transaction.raw[..]))
}

fn read(sender: &Sender, row: &PgRow) -> Result<JournaledTransaction, LedgerError> {
    let number = |name| column::<i64>(row, name).map(i64::cast_unsigned);
    let payments = column::<Vec<Vec<u8>>>(row, "payments")?;
    let payments = payments.iter().map(|key| PaymentKey::from_bytes(key).ok_or_else(unreadable));
    Ok(JournaledTransaction {
        sender: *sender,
        nonce: number("nonce")?,
        hash: B256::try_from(column::<&[u8]>(row, "hash")?).map_err(|_| unreadable())?,
        raw: column::<Vec<u8>>(row, "raw")?.into(),
        payments: payments.collect::<Result<_, _>>()?,
        by: number("owner")?,
        at: number("used_at")?,
        until: number("until")?,
        known_failures: BTreeMap::new(),
    })
}

/// Returns a statement whose first argument is the sender.
fn of_sender(sql: &'static str, sender: &Sender) -> Statement {
    Statement::new(sql).bind(sender.to_bytes().to_vec())
}
