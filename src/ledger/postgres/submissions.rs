//! Transactions, and who uses which nonce.

use std::collections::{BTreeMap, HashMap};

use alloy_primitives::{Address, B256};
use serde::{Deserialize, Serialize};
use sqlx::postgres::PgRow;

use super::{
    super::{
        LedgerError, Record, Sender, Submission,
        submission::{MAX_LISTED, MAX_NONCES, MAX_VERSIONS, Nonce},
    },
    PostgresLedger,
    connections::Statement,
    payments::{self, Stamped, capped, chain, column, json, key, settling_until, stamped, unreadable},
    steps::Progress,
};
use crate::{network::Network, payment::PaymentKey};

const NONCE: &str = "SELECT owner, used_at, is_free, \
       (SELECT max(nonce) FROM nonces WHERE chain_id = $1 AND sender = $2) AS last \
     FROM (SELECT) AS one LEFT JOIN nonces ON chain_id = $1 AND sender = $2 AND nonce = $3";
const READ: &str = "SELECT payments.* FROM payments \
     JOIN unnest($1::bigint[], $2::bytea[], $3::bytea[], $4::bytea[]) AS asked (chain_id, asset, payer, nonce) \
       USING (chain_id, asset, payer, nonce)";
/// All or nothing in one statement: each part happens only if the one before it did. Payments are locked in the order of their
/// keys, so that two submissions that share some do not wait for each other in a circle. Of the nonce's earlier transactions the newest
/// stay, but for the last one if that is why the nonce is free.
const SUBMIT: &str = "WITH \
     asked AS (SELECT * FROM unnest($1::bigint[], $2::bytea[], $3::bytea[], $4::bytea[], $5::bigint[], $6::text[], \
         $7::boolean[], $8::bigint[], $9::text[]) \
       AS asked (chain_id, asset, payer, nonce, stamp, settlement, is_resolved, settling_until, record)), \
     locked AS (\
       SELECT asked.* FROM asked JOIN payments USING (chain_id, asset, payer, nonce, stamp) \
       ORDER BY chain_id, asset, payer, nonce FOR UPDATE OF payments), \
     complete AS (SELECT 1 WHERE (SELECT count(*) FROM locked) = cardinality($1::bigint[])), \
     claimed AS (\
       INSERT INTO nonces (chain_id, sender, nonce, owner, used_at, is_free) SELECT $11, $12, $13, $14, $15, false FROM complete \
       ON CONFLICT (chain_id, sender, nonce) \
       DO UPDATE SET owner = excluded.owner, used_at = excluded.used_at, is_free = false \
       WHERE nonces.owner = $16 AND nonces.used_at = $17 AND nonces.is_free = $18 RETURNING 1), \
     stepped AS (\
       UPDATE payments SET stamp = $10, settlement = locked.settlement, is_resolved = locked.is_resolved, \
         settling_until = locked.settling_until, record = locked.record \
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

/// A sender's nonces are counted after so many of them.
const COUNT_EVERY: u64 = 256;

/// Which payment a transaction settles.
#[derive(Serialize, Deserialize)]
struct Member(u64, Address, Address, B256);

/// The nonce before the submission.
struct Before {
    nonce: Option<Nonce>,
    /// The sender's highest.
    last: Option<u64>,
}

impl PostgresLedger {
    pub(super) async fn submit_all(&self, submission: &Submission) -> Result<(), LedgerError> {
        let mut keys = submission.payments.clone();
        keys.sort_unstable();
        keys.dedup();
        let mut progress = Progress::new();
        let mut known: HashMap<PaymentKey, Stamped> =
            keys.iter().filter_map(|key| Some((*key, self.known.take(key)?))).collect();
        loop {
            let now = self.clock.now();
            // Taken by heart, or read all together; what was remembered is no ground to refuse anything.
            let is_guess = !keys.is_empty() && known.len() == keys.len();
            let seen = if is_guess { std::mem::take(&mut known) } else { self.read_all(&keys).await? };
            let stepped = match step_all(&keys, &seen, submission, now) {
                Err(_) if is_guess => continue,
                stepped => stepped?,
            };
            let before = self.nonce_before(&submission.sender, submission.nonce).await?;
            if before.nonce.as_ref().is_some_and(|nonce| !nonce.is_open_to(submission.by, submission.at)) {
                return Err(LedgerError::NonceTaken { next: before.last.map_or(0, |last| last.saturating_add(1)) });
            }
            let stamp = progress.next_stamp()?;
            let statement = submit(submission, &keys, &seen, &stepped, stamp, before.nonce)?;
            let result = self.connections.once(&statement).await;
            // A submission whose answer was lost may be made again: it is the same transaction of the same process.
            if progress.is_taken(result.map(|rows| !rows.is_empty()), 0).await? {
                for record in stepped {
                    self.known.put(record.key, Stamped { record, stamp });
                }
                break;
            }
        }
        if submission.nonce.is_multiple_of(COUNT_EVERY) {
            let offset = i64::try_from(MAX_NONCES).unwrap_or(i64::MAX);
            self.connections.repeat(of_sender(FORGET_OLDEST, &submission.sender).bind(offset)).await?;
        }
        Ok(())
    }

    pub(super) async fn give_back(&self, sender: &Sender, nonce: u64, by: u64) -> Result<(), LedgerError> {
        let statement = of_sender(FREE, sender).bind(capped(nonce)).bind(by.cast_signed());
        self.connections.repeat(statement).await.map(drop)
    }

    pub(super) async fn forget_below(&self, sender: &Sender, below: u64) -> Result<(), LedgerError> {
        self.connections.repeat(of_sender(FORGET, sender).bind(capped(below))).await.map(drop)
    }

    pub(super) async fn list_from(&self, sender: &Sender, from: u64) -> Result<Vec<Submission>, LedgerError> {
        let limit = i64::try_from(MAX_LISTED).unwrap_or(i64::MAX);
        let rows = self.connections.repeat(of_sender(LIST, sender).bind(capped(from)).bind(limit)).await?;
        rows.iter().map(|row| read(sender, row)).collect()
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
        Ok(Before { nonce, last: last.map(i64::cast_unsigned) })
    }
}

/// The records after the submission, in the order of `keys`.
fn step_all(
    keys: &[PaymentKey],
    seen: &HashMap<PaymentKey, Stamped>,
    submission: &Submission,
    now: u64,
) -> Result<Vec<Record>, LedgerError> {
    let mut records = Vec::with_capacity(keys.len());
    for key in keys {
        records.push(seen.get(key).ok_or(LedgerError::NotFound)?.record.clone());
    }
    let not_due = |record: &&Record| !record.may_be_submitted(submission, now);
    let not_due: Vec<PaymentKey> = records.iter().filter(not_due).map(|record| record.key).collect();
    if !not_due.is_empty() {
        return Err(LedgerError::NotDue(not_due));
    }
    for record in &mut records {
        record.submit(submission, now)?;
    }
    Ok(records)
}

fn submit(
    submission: &Submission,
    keys: &[PaymentKey],
    seen: &HashMap<PaymentKey, Stamped>,
    stepped: &[Record],
    stamp: i64,
    before: Option<Nonce>,
) -> Result<Statement, LedgerError> {
    let members: Vec<Member> =
        submission.payments.iter().map(|key| Member(key.network.chain_id(), key.asset, key.payer, key.nonce)).collect();
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
        .bind(chain(submission.sender.network))
        .bind(submission.sender.address.to_vec())
        .bind(capped(submission.nonce))
        .bind(submission.by.cast_signed())
        .bind(capped(submission.at))
        .bind(before.as_ref().map(|nonce| nonce.by.cast_signed()))
        .bind(before.as_ref().map(|nonce| capped(nonce.at)))
        .bind(before.as_ref().map(|nonce| nonce.is_free))
        .bind(submission.hash.to_vec())
        .bind(&submission.raw[..])
        .bind(members)
        .bind(capped(submission.until))
        .bind(i64::try_from(MAX_VERSIONS - 1).unwrap_or(i64::MAX)))
}

fn read(sender: &Sender, row: &PgRow) -> Result<Submission, LedgerError> {
    let number = |name| column::<i64>(row, name).map(i64::cast_unsigned);
    let members: Vec<Member> = serde_json::from_str(column(row, "payments")?).map_err(|_| unreadable())?;
    Ok(Submission {
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

/// A statement whose first two places are the sender.
fn of_sender(sql: &'static str, sender: &Sender) -> Statement {
    Statement::new(sql).bind(chain(sender.network)).bind(sender.address.to_vec())
}

/// A statement whose first four places are many keys.
pub(super) fn of_keys(sql: &'static str, keys: &[PaymentKey]) -> Statement {
    let bytes =
        |part: fn(&PaymentKey) -> &[u8]| -> Vec<Vec<u8>> { keys.iter().map(|key| part(key).to_vec()).collect() };
    Statement::new(sql)
        .bind(keys.iter().map(|key| payments::chain(key.network)).collect::<Vec<i64>>())
        .bind(bytes(|key| key.asset.as_slice()))
        .bind(bytes(|key| key.payer.as_slice()))
        .bind(bytes(|key| key.nonce.as_slice()))
}
