//! Steps: decided in this process by the state machine that all ledgers share, and written only if the record has not changed since.

use std::{
    collections::HashMap,
    hash::Hash,
    sync::{Mutex, PoisonError},
};

use alloy_primitives::{Address, U256};
use sqlx::postgres::PgRow;

use super::{
    super::{
        FulfilmentStep, Lease, LedgerError, PayerKey, PayerSums, PaymentStep, Record, Reservation, StoredResponse,
        payer::{COUNTED, RECENT},
    },
    PostgresLedger,
    connections::{Failure, Statement, Tries},
    payments::{self, Found, Holders, Stamped, Turn},
    rows::{capped, column, unreadable},
};
use crate::payment::PaymentKey;

/// The number of times that another step may come first before this one fails.
const MAX_LOST: u32 = 100;
/// The number of records that a process remembers.
const MAX_KNOWN: usize = 4096;

// The sums of a payer in flight, the amount that moved after the block, and the stamp of its last turn, at one moment.
const IN_FLIGHT: &str = "SELECT COALESCE(flying.held, 0)::text AS held, COALESCE(flying.submitted, 0)::text AS submitted, \
       COALESCE(moved.amount, 0)::text AS moved, (SELECT stamp FROM turns WHERE payer = $1) AS stamp \
     FROM (SELECT sum(amount) FILTER (WHERE is_resolved) AS held, sum(amount) FILTER (WHERE NOT is_resolved) AS submitted \
         FROM payments WHERE payer = $1 AND in_flight) AS flying, \
       (SELECT sum(amount) AS amount FROM payments WHERE payer = $1 AND settled_at >= $2 AND block > $3) AS moved";

// What this payer owes and has settled to this payee, and the stamp of its last turn, at one moment. The newest payments are enough: to count
// fewer lends less.
const CREDIT: &str = "SELECT COALESCE(owed.amount, 0)::text AS owed, owed.overdue, \
       (SELECT COALESCE(sum(amount), 0)::text FROM (\
         SELECT amount FROM payments WHERE payer = $1 AND payee = $2 AND settled_at >= $3 ORDER BY settled_at DESC LIMIT 1024) \
         AS newest) AS settled, \
       (SELECT stamp FROM turns WHERE payer = $1) AS stamp \
     FROM (SELECT sum(amount) AS amount, count(*) FILTER (WHERE is_overdue) AS overdue \
       FROM payments WHERE payer = $1 AND is_owed) AS owed";

/// The tries of one step so far.
pub(super) struct Progress {
    tries: Tries,
    /// The stamp of each try. A row with one of them has taken the step.
    stamps: Vec<i64>,
    /// The stamp of the row before a try whose answer was lost.
    uncertain: Option<i64>,
    lost: u32,
}

impl PostgresLedger {
    /// Takes a step, and keeps this response with it. The step is decided again until the record that it was decided on is the one that it
    /// replaces.
    pub(super) async fn change(
        &self,
        key: &PaymentKey,
        step: &PaymentStep,
        response: Option<&StoredResponse>,
    ) -> Result<Record, LedgerError> {
        let mut progress = Progress::new();
        let mut known = self.known.take(key);
        loop {
            let is_guess = known.is_some();
            let seen = match known.take() {
                Some(seen) => seen,
                None => payments::read(&self.connections, key).await?.ok_or(LedgerError::NotFound)?,
            };
            if progress.is_done(seen.stamp)? {
                self.known.put(*key, seen.clone());
                return Ok(seen.record);
            }
            let stamp = progress.next_stamp()?;
            match self.prepare(step, response, &seen, stamp).await {
                // A remembered record may be outdated, and is no reason to refuse the step.
                Err(_) if is_guess => {}
                Err(error) => {
                    self.known.put(*key, seen);
                    return Err(error);
                }
                Ok((stepped, statement)) => {
                    let result = self.connections.once(&statement).await;
                    if progress.is_taken(result.map(|rows| !rows.is_empty()), seen.stamp).await? {
                        let record = stepped.record.clone();
                        self.known.put(*key, stepped);
                        return Ok(record);
                    }
                }
            }
        }
    }

    async fn prepare(
        &self,
        step: &PaymentStep,
        response: Option<&StoredResponse>,
        seen: &Stamped,
        stamp: i64,
    ) -> Result<(Stamped, Statement), LedgerError> {
        let (mut record, now) = (seen.record.clone(), self.clock.now());
        record.apply(step, now)?;
        let payer = PayerKey::of(&record);
        let stepped = Stamped { holders: Holders::after(seen, &record, self.process.id()), record, stamp };
        let sums = match step {
            PaymentStep::Fulfil { step: FulfilmentStep::Admit { funds: Some(funds), .. }, .. }
                if !seen.record.admitted =>
            {
                Some(self.in_flight(&payer, funds.block, now).await?)
            }
            PaymentStep::Fulfil { step: FulfilmentStep::Defer { .. }, .. } => {
                Some(self.credit(&payer, stepped.record.terms.offer().pay_to, now).await?)
            }
            _ => None,
        };
        let statement = match sums {
            Some((sums, last)) => {
                sums.allow(&seen.record, step)?;
                payments::step_in_turn(&stepped, seen.stamp, &Turn { payer, seen: last, now })
            }
            None => payments::step(&stepped, seen.stamp, response),
        };
        Ok((stepped, statement?))
    }

    async fn in_flight(&self, payer: &PayerKey, block: u64, now: u64) -> Result<(PayerSums, Option<i64>), LedgerError> {
        let statement = Statement::new(IN_FLIGHT)
            .bind(payer.to_bytes().to_vec())
            .bind(capped(now.saturating_sub(RECENT)))
            .bind(capped(block));
        let rows = self.connections.repeat(statement).await?;
        let row = rows.first().ok_or_else(unreadable)?;
        let sums = PayerSums::in_flight(amount(row, "held")?, amount(row, "submitted")?, amount(row, "moved")?, now);
        Ok((sums, column(row, "stamp")?))
    }

    async fn credit(
        &self,
        payer: &PayerKey,
        payee: Address,
        now: u64,
    ) -> Result<(PayerSums, Option<i64>), LedgerError> {
        let statement = Statement::new(CREDIT)
            .bind(payer.to_bytes().to_vec())
            .bind(payee.to_vec())
            .bind(capped(now.saturating_sub(COUNTED)));
        let rows = self.connections.repeat(statement).await?;
        let row = rows.first().ok_or_else(unreadable)?;
        let overdue = u32::try_from(column::<i64>(row, "overdue")?).unwrap_or(u32::MAX);
        let sums = PayerSums::credit(payee, amount(row, "settled")?, amount(row, "owed")?, overdue);
        Ok((sums, column(row, "stamp")?))
    }

    /// Inserts a record, or finds the existing one.
    pub(super) async fn insert(&self, record: &Record) -> Result<Reservation, LedgerError> {
        let mut progress = Progress::new();
        let holders = Holders::of_new(self.process.id());
        loop {
            let stamp = progress.next_stamp()?;
            let result = self.connections.once(&payments::reserve(record, stamp, holders)?).await;
            let result = result.map(|rows| payments::found(&record.key, &rows));
            let found = match result {
                Ok(found) => found?,
                Err(failure) => {
                    progress.is_taken(Err(failure), 0).await?;
                    continue;
                }
            };
            match found {
                Found::New => {
                    self.known.put(record.key, Stamped { record: record.clone(), stamp, holders });
                    return Ok(Reservation::New(record.lease()));
                }
                Found::Known(seen) if progress.stamps.contains(&seen.stamp) => {
                    return Ok(Reservation::New(record.lease()));
                }
                Found::Known(seen) => return Ok(Reservation::Known(Box::new(seen.record))),
                Found::IdTaken(key) => return Err(LedgerError::IdTaken { key }),
                Found::Nothing => {
                    progress.is_taken(Ok(false), 0).await?;
                }
            }
        }
    }

    /// Removes a record that the owner of this lease may discard.
    pub(super) async fn remove(&self, lease: &Lease) -> Result<(), LedgerError> {
        let (key, mut progress) = (&lease.key, Progress::new());
        self.known.take(key);
        loop {
            let Some(seen) = payments::read(&self.connections, key).await? else {
                return if progress.uncertain.is_some() { Ok(()) } else { Err(LedgerError::NotFound) };
            };
            progress.is_done(seen.stamp)?;
            seen.record.check_discard(lease)?;
            let result = self.connections.once(&payments::discard(key, seen.stamp)).await;
            if progress.is_taken(result.map(|rows| !rows.is_empty()), seen.stamp).await? {
                return Ok(());
            }
        }
    }
}

/// Reads a sum. One above 256 bits is above every balance.
fn amount(row: &PgRow, name: &str) -> Result<U256, LedgerError> {
    Ok(column::<&str>(row, name)?.parse().unwrap_or(U256::MAX))
}

impl Progress {
    pub(super) fn new() -> Self {
        Self { tries: Tries::new(), stamps: Vec::new(), uncertain: None, lost: 0 }
    }

    pub(super) fn next_stamp(&mut self) -> Result<i64, LedgerError> {
        let stamp = getrandom::u64().map_err(|_| LedgerError::Backend("there is no randomness".into()))?.cast_signed();
        self.stamps.push(stamp);
        Ok(stamp)
    }

    /// Returns `true` if the row's stamp shows that a try whose answer was lost has been taken.
    pub(super) fn is_done(&self, stamp: i64) -> Result<bool, LedgerError> {
        match self.uncertain {
            _ if self.stamps.contains(&stamp) => Ok(true),
            // Either the try was taken and other steps followed, or other steps were taken instead.
            Some(before) if before != stamp => {
                Err(LedgerError::Backend("the connection broke, and it is not known whether the step was taken".into()))
            }
            _ => Ok(false),
        }
    }

    /// Returns `true` if a try was taken. If not, pauses before the next one if needed, or gives up.
    pub(super) async fn is_taken(&mut self, result: Result<bool, Failure>, before: i64) -> Result<bool, LedgerError> {
        match result {
            Ok(true) => return Ok(true),
            Ok(false) => {
                self.lost += 1;
                if self.lost > MAX_LOST {
                    return Err(LedgerError::Backend(
                        "too many other steps on the same payment, payer or channel came first".into(),
                    ));
                }
            }
            Err(Failure::Refused(error)) => return Err(error.into()),
            Err(Failure::NotDone(error)) => self.tries.again_after(error).await?,
            Err(Failure::Perhaps(error)) => {
                self.uncertain.get_or_insert(before);
                self.tries.again_after(error).await?;
            }
        }
        Ok(false)
    }
}

/// The records or channels that this process wrote or read last, to be tried before the database is asked.
#[derive(Debug)]
pub(super) struct Known<K, R>(Mutex<HashMap<K, R>>);

impl<K, R> Default for Known<K, R> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<K: Eq + Hash, R> Known<K, R> {
    /// Takes a record out: it is outdated as soon as a step is taken.
    pub(super) fn take(&self, key: &K) -> Option<R> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).remove(key)
    }

    /// Remembers a record. When there are too many, all are forgotten, which costs each payment in progress one read.
    pub(super) fn put(&self, key: K, seen: R) {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if known.len() >= MAX_KNOWN {
            known.clear();
        }
        known.insert(key, seen);
    }
}

#[cfg(test)]
mod tests {
    use alloy_primitives::{Address, B256};

    use super::*;
    use crate::{
        eip3009::{Authorization, PaymentSignature},
        ledger::Fingerprint,
        network::Network,
        payment::{Terms, Window, precheck},
        protocol::{ExactOffer, ExactPayload, PaymentFlow},
    };

    fn seen(nonce: usize, stamp: i64) -> Stamped {
        let offer = ExactOffer {
            asset: Network::BASE.usdc().unwrap(),
            amount: U256::from(10),
            pay_to: Address::repeat_byte(2),
            max_timeout_seconds: 60,
            flow: PaymentFlow::Authorization,
            method: Default::default(),
        };
        let authorization = Authorization {
            from: Address::repeat_byte(1),
            to: offer.pay_to,
            value: offer.amount,
            valid_after: U256::ZERO,
            valid_before: U256::from(60),
            nonce: B256::from(U256::from(nonce)),
        };
        let payload = ExactPayload::new(PaymentSignature::from(Vec::from([1])), authorization);
        let payment = precheck(Terms::new(offer).into(), payload, Window::default(), 1).unwrap();
        let request = Fingerprint { digest: B256::ZERO, names_caller: false };
        Stamped { record: Record::new(&payment, request, 1, 2), stamp, holders: Holders::default() }
    }

    #[test]
    fn a_process_remembers_the_last_record_of_a_payment_and_a_bounded_number() {
        let known = Known::default();
        let put = |seen: Stamped| known.put(seen.record.key, seen);
        for nonce in 0..=MAX_KNOWN {
            put(seen(nonce, 1));
        }
        assert!(known.0.lock().unwrap().len() <= MAX_KNOWN);
        let last = seen(MAX_KNOWN, 2);
        put(last.clone());
        assert_eq!(known.take(&last.record.key).map(|seen| seen.stamp), Some(2));
        assert!(known.take(&last.record.key).is_none(), "taken out");
    }
}
