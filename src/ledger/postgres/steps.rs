//! Steps: decided in this process by the shared state machine, written only if the record is still what was decided on.

use alloy_primitives::U256;

use super::{
    super::{
        CreditLimit, Lease, LedgerError, Record, Reservation,
        credit::{CreditBook, Owed},
        exposure::{PayerBook, RECENT},
    },
    PostgresLedger,
    connections::{Failure, Statement, Tries},
    payments::{self, Found, Stamped, Turn, TurnOf, capped, column},
    responses::KeptResponse,
};
use crate::payment::{Funds, PaymentKey};

/// How often somebody else may be faster until the ledger gives up.
const MAX_LOST: u32 = 100;

/// What a payer has in flight, and what moved since the block, with the stamp of its last admission: at one moment.
const BOOK: &str = "SELECT COALESCE(flying.held, 0)::text AS held, COALESCE(flying.submitted, 0)::text AS submitted, \
       COALESCE(moved.amount, 0)::text AS moved, \
       (SELECT stamp FROM turns WHERE chain_id = $1 AND asset = $2 AND payer = $3) AS stamp \
     FROM (SELECT sum(amount) FILTER (WHERE is_resolved) AS held, sum(amount) FILTER (WHERE NOT is_resolved) AS submitted \
         FROM payments WHERE chain_id = $1 AND asset = $2 AND payer = $3 AND in_flight) AS flying, \
       (SELECT sum(amount) AS amount FROM payments \
         WHERE chain_id = $1 AND asset = $2 AND payer = $3 AND settled_at >= $4 AND block > $5) AS moved";

/// What everybody owes, and what the payer owes and has paid, with the stamp of the last payment that was deferred.
const CREDIT: &str = "SELECT COALESCE(owed.total, 0)::text AS total, COALESCE(owed.own, 0)::text AS own, owed.overdue, \
       (SELECT count(*) FROM (SELECT FROM payments WHERE chain_id = $1 AND asset = $2 AND payer = $3 \
         AND settled_at IS NOT NULL LIMIT $4) AS history) AS paid, \
       (SELECT stamp FROM turns WHERE chain_id = $5 AND asset = $6 AND payer = $7) AS stamp \
     FROM (SELECT sum(amount) AS total, \
         sum(amount) FILTER (WHERE chain_id = $1 AND asset = $2 AND payer = $3) AS own, \
         count(*) FILTER (WHERE chain_id = $1 AND asset = $2 AND payer = $3 AND is_overdue) AS overdue \
       FROM payments WHERE is_owed) AS owed";

/// What must hold beyond the record itself, at the moment of the step.
#[derive(Clone, Copy)]
pub(super) enum Needs {
    Nothing,
    /// The payer was seen to own this, and it covers what is in flight.
    Funds(Funds),
    /// No more than this is owed.
    Credit(CreditLimit),
}

/// A change of one record.
pub(super) struct Change<'a> {
    pub(super) key: &'a PaymentKey,
    pub(super) needs: Needs,
    /// What the change brings.
    pub(super) response: Option<&'a KeptResponse>,
}

/// What happened to a step so far.
pub(super) struct Progress {
    tries: Tries,
    /// A stamp per try; a record that has one of them has taken the step.
    stamps: Vec<i64>,
    /// What the record was when a try was lost from sight.
    uncertain: Option<i64>,
    lost: u32,
}

impl PostgresLedger {
    /// Takes a step on a record: `decide` is called until what it was shown is what the step is written over.
    pub(super) async fn change(
        &self,
        change: Change<'_>,
        decide: impl Fn(&mut Record) -> Result<(), LedgerError> + Send + Sync,
    ) -> Result<Record, LedgerError> {
        let mut progress = Progress::new();
        let mut known = self.known.take(change.key);
        loop {
            let is_guess = known.is_some();
            let seen = match known.take() {
                Some(seen) => seen,
                None => payments::read(&self.connections, change.key).await?.ok_or(LedgerError::NotFound)?,
            };
            if progress.is_done(&seen)? {
                self.known.put(*change.key, seen.clone());
                return Ok(seen.record);
            }
            let stamp = progress.next_stamp()?;
            match self.prepare(&change, &seen, stamp, &decide).await {
                // What was remembered is no ground to refuse anything.
                Err(_) if is_guess => {}
                Err(error) => {
                    self.known.put(*change.key, seen);
                    return Err(error);
                }
                Ok((record, statement)) => {
                    let result = self.connections.once(&statement).await;
                    if progress.is_taken(result.map(|rows| !rows.is_empty()), seen.stamp).await? {
                        self.known.put(*change.key, Stamped { record: record.clone(), stamp });
                        return Ok(record);
                    }
                }
            }
        }
    }

    async fn prepare(
        &self,
        change: &Change<'_>,
        seen: &Stamped,
        stamp: i64,
        decide: &(impl Fn(&mut Record) -> Result<(), LedgerError> + Send + Sync),
    ) -> Result<(Record, Statement), LedgerError> {
        let mut record = seen.record.clone();
        decide(&mut record)?;
        let (now, amount) = (self.clock.now(), record.authorization.value);
        let statement = match (change.needs, change.response) {
            (Needs::Funds(funds), _) if !seen.record.admitted => {
                let (book, last) = self.book(change.key, funds.block, now).await?;
                book.covers(amount, &funds)?;
                let turn = Turn { of: TurnOf::Payer(*change.key), seen: last, now };
                payments::step_in_turn(&record, seen.stamp, stamp, &turn)
            }
            (Needs::Credit(limit), _) => {
                let (total, own, last) = self.credit(change.key, limit.history).await?;
                own.trusts(amount, &limit)?;
                total.lend(amount, limit.total, || Ok(()))?;
                payments::step_in_turn(&record, seen.stamp, stamp, &Turn { of: TurnOf::Everybody, seen: last, now })
            }
            (_, Some(response)) => payments::step_with_response(&record, seen.stamp, stamp, response),
            _ => payments::step(&record, seen.stamp, stamp),
        };
        Ok((record, statement?))
    }

    async fn book(&self, key: &PaymentKey, block: u64, now: u64) -> Result<(PayerBook, Option<i64>), LedgerError> {
        let statement = TurnOf::Payer(*key)
            .bind_to(Statement::new(BOOK))
            .bind(capped(now.saturating_sub(RECENT)))
            .bind(capped(block));
        let rows = self.connections.repeat(statement).await?;
        let row = rows.first().ok_or_else(payments::unreadable)?;
        // A sum beyond 256 bits is beyond every balance.
        let amount = |name| Ok::<U256, LedgerError>(column::<&str>(row, name)?.parse().unwrap_or(U256::MAX));
        Ok((PayerBook::of_sums(amount("held")?, amount("submitted")?, amount("moved")?, now), column(row, "stamp")?))
    }

    async fn credit(&self, key: &PaymentKey, history: u32) -> Result<(Owed, CreditBook, Option<i64>), LedgerError> {
        let statement = TurnOf::Payer(*key).bind_to(Statement::new(CREDIT)).bind(i64::from(history));
        let rows = self.connections.repeat(TurnOf::Everybody.bind_to(statement)).await?;
        let row = rows.first().ok_or_else(payments::unreadable)?;
        let amount = |name| Ok::<U256, LedgerError>(column::<&str>(row, name)?.parse().unwrap_or(U256::MAX));
        let count = |name| Ok::<u32, LedgerError>(u32::try_from(column::<i64>(row, name)?).unwrap_or(u32::MAX));
        let own = CreditBook::of_sums(count("paid")?, amount("own")?, count("overdue")?);
        Ok((Owed::of_sum(amount("total")?), own, column(row, "stamp")?))
    }

    /// Makes a record, or finds the one there is.
    pub(super) async fn insert(&self, record: &Record) -> Result<Reservation, LedgerError> {
        let mut progress = Progress::new();
        let lease = Lease { key: record.key, epoch: record.epoch };
        loop {
            let stamp = progress.next_stamp()?;
            let result = self.connections.once(&payments::reserve(record, stamp)?).await;
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
                    self.known.put(record.key, Stamped { record: record.clone(), stamp });
                    return Ok(Reservation::New(lease));
                }
                Found::Known(seen) if progress.stamps.contains(&seen.stamp) => return Ok(Reservation::New(lease)),
                Found::Known(seen) => return Ok(Reservation::Known(Box::new(seen.record))),
                Found::IdTaken(key) => return Err(LedgerError::IdTaken { key }),
                Found::Nothing => {
                    progress.is_taken(Ok(false), 0).await?;
                }
            }
        }
    }

    /// Forgets a record that `check` agrees to.
    pub(super) async fn remove(
        &self,
        key: &PaymentKey,
        check: impl Fn(&Record) -> Result<(), LedgerError> + Send + Sync,
    ) -> Result<(), LedgerError> {
        let mut progress = Progress::new();
        self.known.take(key);
        loop {
            let Some(seen) = payments::read(&self.connections, key).await? else {
                return if progress.uncertain.is_some() { Ok(()) } else { Err(LedgerError::NotFound) };
            };
            progress.is_done(&seen)?;
            check(&seen.record)?;
            let result = self.connections.once(&payments::discard(key, seen.stamp)).await;
            if progress.is_taken(result.map(|rows| !rows.is_empty()), seen.stamp).await? {
                return Ok(());
            }
        }
    }
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

    /// Whether the record shows that a try whose answer was lost has been taken.
    fn is_done(&self, seen: &Stamped) -> Result<bool, LedgerError> {
        match self.uncertain {
            _ if self.stamps.contains(&seen.stamp) => Ok(true),
            // It was taken, and others came after it; or it was not, and they came instead.
            Some(before) if before != seen.stamp => {
                Err(LedgerError::Backend("the connection broke, and what became of the step cannot be seen".into()))
            }
            _ => Ok(false),
        }
    }

    /// Whether a try was taken; if not, pauses where that makes sense, or gives up.
    pub(super) async fn is_taken(&mut self, result: Result<bool, Failure>, before: i64) -> Result<bool, LedgerError> {
        match result {
            Ok(true) => return Ok(true),
            Ok(false) => {
                self.lost += 1;
                if self.lost > MAX_LOST {
                    return Err(LedgerError::Backend("too many others work on the same payment or payer".into()));
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
