//! The tables of transactions and of the account nonces that they use.

use std::collections::{BTreeMap, HashMap};

use alloy_primitives::{Address, B256};
use serde::{Deserialize, Serialize};
use sqlx::postgres::PgRow;

use super::{
    super::{
        JournaledTransaction, LedgerError, Record, Sender,
        transactions::{MAX_LISTED, MAX_NONCES, MAX_VERSIONS, Nonce},
    },
    PostgresLedger,
    connections::{Connections, Statement},
    payments::{self, Stamped, capped, chain, column, holding, json, key, settling_until, stamped, unreadable},
    processes::is_alive,
    steps::Progress,
};
use crate::{network::Network, payment::PaymentKey};

const NONCE: &str = concat!(
    "SELECT owner, used_at, is_free, ",
    is_alive!("process"),
    " AS holds, \
       (SELECT max(nonce) FROM nonces WHERE chain_id = $1 AND sender = $2) AS last \
     FROM (SELECT) AS one LEFT JOIN nonces ON chain_id = $1 AND sender = $2 AND nonce = $3"
);
const READ: &str = concat!(
    "SELECT payments.*, ",
    holding!(),
    " FROM payments \
     JOIN unnest($1::bigint[], $2::bytea[], $3::bytea[], $4::bytea[]) AS asked (chain_id, asset, payer, nonce) \
       USING (chain_id, asset, payer, nonce)"
);
// All or nothing in one statement: each part happens only if the one before it did. Payments are locked in the order of their keys, so
// that concurrent submissions do not deadlock. The newest of the nonce's earlier transactions stay, except the last one of a free nonce,
// which no node accepted.
const SUBMIT: &str = "WITH \
     asked AS (SELECT * FROM unnest($1::bigint[], $2::bytea[], $3::bytea[], $4::bytea[], $5::bigint[], $6::text[], \
         $7::boolean[], $8::bigint[], $9::text[]) \
       AS asked (chain_id, asset, payer, nonce, stamp, settlement, is_resolved, settling_until, record)), \
     locked AS (\
       SELECT asked.* FROM asked JOIN payments USING (chain_id, asset, payer, nonce, stamp) \
       ORDER BY chain_id, asset, payer, nonce FOR UPDATE OF payments), \
     complete AS (SELECT 1 WHERE (SELECT count(*) FROM locked) = cardinality($1::bigint[])), \
     claimed AS (\
       INSERT INTO nonces (chain_id, sender, nonce, owner, used_at, is_free, process) \
       SELECT $11, $12, $13, $14, $15, false, $24 FROM complete \
       ON CONFLICT (chain_id, sender, nonce) \
       DO UPDATE SET owner = excluded.owner, used_at = excluded.used_at, is_free = false, process = excluded.process \
       WHERE nonces.owner = $16 AND nonces.used_at = $17 AND nonces.is_free = $18 RETURNING 1), \
     stepped AS (\
       UPDATE payments SET stamp = $10, settlement = locked.settlement, is_resolved = locked.is_resolved, \
         settling_until = locked.settling_until, settling_process = $24, record = locked.record \
       FROM locked WHERE payments.chain_id = locked.chain_id AND payments.asset = locked.asset \
         AND payments.payer = locked.payer AND payments.nonce = locked.nonce AND EXISTS (SELECT 1 FROM claimed)), \
     dropped AS (\
       DELETE FROM transactions USING claimed \
       WHERE chain_id = $11 AND sender = $12 AND nonce = $13 AND hash <> $19 AND (\
         place <= (SELECT place FROM transactions WHERE chain_id = $11 AND sender = $12 AND nonce = $13 AND hash <> $19 \
           ORDER BY place DESC OFFSET $23 LIMIT 1) \
         OR $18 AND place = (SELECT max(place) FROM transactions WHERE chain_id = $11 AND sender = $12 AND nonce = $13))) \
     INSERT INTO transactions (chain_id, sender, nonce, hash, raw, payments, owner, submitted_at, apart_until) \
       SELECT $11, $12, $13, $19, $20, $21, $14, $15, $22 FROM claimed \
       ON CONFLICT (chain_id, sender, nonce, hash) DO UPDATE SET place = excluded.place, raw = excluded.raw, \
         payments = excluded.payments, owner = excluded.owner, submitted_at = excluded.submitted_at, \
         apart_until = excluded.apart_until \
       RETURNING 1";
const FORGET_OLDEST: &str = "DELETE FROM nonces WHERE chain_id = $1 AND sender = $2 AND nonce <= \
     (SELECT nonce FROM nonces WHERE chain_id = $1 AND sender = $2 ORDER BY nonce DESC OFFSET $3 LIMIT 1)";
const FREE: &str = "UPDATE nonces SET is_free = true WHERE chain_id = $1 AND sender = $2 AND nonce = $3 AND owner = $4";
const FORGET: &str = "DELETE FROM nonces WHERE chain_id = $1 AND sender = $2 AND nonce < $3";
const LIST: &str = "SELECT nonces.nonce, newest.* FROM nonces CROSS JOIN LATERAL (\
       SELECT hash, raw, payments, transactions.owner, submitted_at, apart_until FROM transactions \
       WHERE transactions.chain_id = nonces.chain_id AND transactions.sender = nonces.sender \
         AND transactions.nonce = nonces.nonce ORDER BY place DESC LIMIT 1) AS newest \
     WHERE nonces.chain_id = $1 AND nonces.sender = $2 AND nonces.nonce >= $3 AND NOT nonces.is_free \
     ORDER BY nonces.nonce LIMIT $4";

/// The number of a sender's nonces after which its oldest are removed.
const COUNT_EVERY: u64 = 256;

/// A payment in a transaction.
#[derive(Serialize, Deserialize)]
struct Member(u64, Address, Address, B256);

/// The nonce before the transaction.
struct Before {
    nonce: Option<Nonce>,
    /// The process that used it is alive.
    holds: bool,
    /// The sender's highest nonce.
    last: Option<u64>,
}

impl PostgresLedger {
    pub(super) async fn submit_transaction(&self, transaction: &JournaledTransaction) -> Result<(), LedgerError> {
        let mut keys = transaction.payments.clone();
        keys.sort_unstable();
        keys.dedup();
        let mut progress = Progress::new();
        let mut known: HashMap<PaymentKey, Stamped> =
            keys.iter().filter_map(|key| Some((*key, self.known.take(key)?))).collect();
        loop {
            let now = self.clock.now();
            // Remembered records may be outdated, and are no reason to refuse anything.
            let is_guess = !keys.is_empty() && known.len() == keys.len();
            let seen = if is_guess { std::mem::take(&mut known) } else { self.read_all(&keys).await? };
            let stepped = match step_all(&keys, &seen, transaction, now) {
                Err(_) if is_guess => continue,
                stepped => stepped?,
            };
            let before = self.nonce_before(&transaction.sender, transaction.nonce).await?;
            let is_open = |nonce: &Nonce| !before.holds || nonce.is_open_to(transaction.by, transaction.at);
            if before.nonce.as_ref().is_some_and(|nonce| !is_open(nonce)) {
                return Err(LedgerError::NonceTaken { next: before.last.map_or(0, |last| last.saturating_add(1)) });
            }
            let stamp = progress.next_stamp()?;
            let statement = submit(transaction, &keys, &seen, &stepped, stamp, before.nonce)?.bind(self.process.id());
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
            let offset = i64::try_from(MAX_NONCES).unwrap_or(i64::MAX);
            self.connections.repeat(of_sender(FORGET_OLDEST, &transaction.sender).bind(offset)).await?;
        }
        Ok(())
    }

    async fn read_all(&self, keys: &[PaymentKey]) -> Result<HashMap<PaymentKey, Stamped>, LedgerError> {
        if keys.is_empty() {
            return Ok(HashMap::new());
        }
        let rows = self.connections.repeat(of_keys(READ, keys)).await?;
        rows.iter().map(|row| Ok((key(row)?, stamped(row)?))).collect()
    }

    async fn nonce_before(&self, sender: &Sender, nonce: u64) -> Result<Before, LedgerError> {
        let rows = self.connections.repeat(of_sender(NONCE, sender).bind(capped(nonce))).await?;
        let row = rows.first().ok_or_else(unreadable)?;
        let last: Option<i64> = column(row, "last")?;
        let nonce = match column::<Option<i64>>(row, "owner")? {
            Some(owner) => Some(Nonce {
                by: owner.cast_unsigned(),
                at: column::<i64>(row, "used_at")?.cast_unsigned(),
                is_free: column(row, "is_free")?,
                transactions: Vec::new(),
            }),
            None => None,
        };
        Ok(Before { nonce, holds: column(row, "holds")?, last: last.map(i64::cast_unsigned) })
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
    let limit = i64::try_from(MAX_LISTED).unwrap_or(i64::MAX);
    let rows = connections.repeat(of_sender(LIST, sender).bind(capped(from)).bind(limit)).await?;
    rows.iter().map(|row| read(sender, row)).collect()
}

/// Returns the records after the step, in the order of `keys`.
fn step_all(
    keys: &[PaymentKey],
    seen: &HashMap<PaymentKey, Stamped>,
    transaction: &JournaledTransaction,
    now: u64,
) -> Result<Vec<Record>, LedgerError> {
    let mut records = Vec::with_capacity(keys.len());
    for key in keys {
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

fn submit(
    transaction: &JournaledTransaction,
    keys: &[PaymentKey],
    seen: &HashMap<PaymentKey, Stamped>,
    stepped: &[Record],
    stamp: i64,
    before: Option<Nonce>,
) -> Result<Statement, LedgerError> {
    let members: Vec<Member> = transaction
        .payments
        .iter()
        .map(|key| Member(key.network.chain_id(), key.asset, key.payer, key.nonce))
        .collect();
    let members = serde_json::to_string(&members).map_err(|error| LedgerError::Backend(Box::new(error)))?;
    let stamps: Vec<i64> = keys.iter().filter_map(|key| seen.get(key)).map(|seen| seen.stamp).collect();
    let settlements: Vec<&str> = stepped.iter().map(|record| record.settlement.state().as_str()).collect();
    let resolved: Vec<bool> = stepped.iter().map(Record::is_resolved).collect();
    let settling: Vec<Option<i64>> = stepped.iter().map(settling_until).collect();
    let records = stepped.iter().map(json).collect::<Result<Vec<String>, _>>()?;
    Ok(of_keys(SUBMIT, keys)
        .bind(stamps)
        .bind(settlements)
        .bind(resolved)
        .bind(settling)
        .bind(records)
        .bind(stamp)
        .bind(chain(transaction.sender.network))
        .bind(transaction.sender.address.to_vec())
        .bind(capped(transaction.nonce))
        .bind(transaction.by.cast_signed())
        .bind(capped(transaction.at))
        .bind(before.as_ref().map(|nonce| nonce.by.cast_signed()))
        .bind(before.as_ref().map(|nonce| capped(nonce.at)))
        .bind(before.as_ref().map(|nonce| nonce.is_free))
        .bind(transaction.hash.to_vec())
        .bind(&transaction.raw[..])
        .bind(members)
        .bind(capped(transaction.until))
        .bind(i64::try_from(MAX_VERSIONS - 1).unwrap_or(i64::MAX)))
}

fn read(sender: &Sender, row: &PgRow) -> Result<JournaledTransaction, LedgerError> {
    let number = |name| column::<i64>(row, name).map(i64::cast_unsigned);
    let members: Vec<Member> = serde_json::from_str(column(row, "payments")?).map_err(|_| unreadable())?;
    Ok(JournaledTransaction {
        sender: *sender,
        nonce: number("nonce")?,
        hash: B256::try_from(column::<&[u8]>(row, "hash")?).map_err(|_| unreadable())?,
        raw: column::<Vec<u8>>(row, "raw")?.into(),
        payments: members
            .into_iter()
            .map(|Member(chain, asset, payer, nonce)| PaymentKey {
                network: Network::eip155(chain),
                asset,
                payer,
                nonce,
            })
            .collect(),
        by: number("owner")?,
        at: number("submitted_at")?,
        until: number("apart_until")?,
        known_failures: BTreeMap::new(),
    })
}

/// Returns a statement whose first two arguments are the sender.
fn of_sender(sql: &'static str, sender: &Sender) -> Statement {
    Statement::new(sql).bind(chain(sender.network)).bind(sender.address.to_vec())
}

/// Returns a statement whose first four arguments are the columns of many keys.
pub(super) fn of_keys(sql: &'static str, keys: &[PaymentKey]) -> Statement {
    let bytes =
        |part: fn(&PaymentKey) -> &[u8]| -> Vec<Vec<u8>> { keys.iter().map(|key| part(key).to_vec()).collect() };
    Statement::new(sql)
        .bind(keys.iter().map(|key| payments::chain(key.network)).collect::<Vec<i64>>())
        .bind(bytes(|key| key.asset.as_slice()))
        .bind(bytes(|key| key.payer.as_slice()))
        .bind(bytes(|key| key.nonce.as_slice()))
}
