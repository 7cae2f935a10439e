//! The reports of a directory, one for each payment. Parts of a channel that paid do not overlap. The table is called `reports`, as in the first version.

use alloy_primitives::{Address, B256};
use rusqlite::{Connection, OptionalExtension as _, Row, TransactionBehavior, params_from_iter};
use tower_x402::payment::PaymentKey;

use super::{Conditions, DirectoryStore, Filter, Json, Limits, StoreError, address, ask, number, signed};
use x402_market::evidence::{CallOutcome, Pairs};

use crate::{AcceptedReport, ReportedPayment, SignedEvidence};

/// What became of a report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stored {
    New(u64),
    /// The same report is stored under this number.
    Duplicate(u64),
    /// The payment, or a part of it, has another report.
    Conflict,
    /// The payment is as old as reports that were deleted, so it may have had one.
    TooOld,
    /// The payer has as many reports as may be stored.
    TooMany,
}

/// What a page shows of a report.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Seen {
    pub(crate) payer: Address,
    /// The time of the payment's block.
    pub(crate) at: u64,
    pub(crate) pairs: Option<Pairs>,
    pub(crate) has_failed: bool,
}

impl DirectoryStore {
    /// Compares a report with the one that is stored for its payment, if there is one.
    pub(crate) async fn stored(&self, key: &PaymentKey, report: &SignedEvidence) -> Result<Option<Stored>, StoreError> {
        let (key, report) = (*key, report.clone());
        self.run(move |connection| stored(connection, &key, &report)).await
    }

    /// Stores a report whose payment was found.
    pub(crate) async fn put_report(
        &self,
        payment: &ReportedPayment,
        report: &SignedEvidence,
        limits: &Limits,
    ) -> Result<Stored, StoreError> {
        let (payment, report, limits) = (*payment, report.clone(), *limits);
        self.run(move |connection| put_report(connection, &payment, &report, &limits)).await
    }

    /// Returns a page of reports by number, and whether there are more.
    pub(crate) async fn reports(&self, filter: &Filter) -> Result<(Vec<AcceptedReport>, bool), StoreError> {
        let (query, limit) = (page(filter), filter.limit);
        self.run(move |connection| {
            let mut select = connection.prepare_cached(&query.sql)?;
            let reports = select.query_map(params_from_iter(query.values), accepted_report)?;
            let mut reports = reports.collect::<Result<Vec<_>, _>>()?;
            let more = reports.len() as u64 > limit;
            reports.truncate(limit as usize);
            Ok((reports, more))
        })
        .await
    }

    /// Returns the newest reports on each of these evaluators and skills, at most `limit` of each.
    pub(crate) async fn seen(&self, cells: Vec<(Address, String)>, limit: u64) -> Result<Vec<Vec<Seen>>, StoreError> {
        self.run(move |connection| {
            let mut select = connection.prepare_cached(NEWEST)?;
            let of = |(evaluator, skill): (Address, String)| {
                select.query_map((evaluator.as_slice(), skill, signed(limit)), seen)?.collect()
            };
            cells.into_iter().map(of).collect()
        })
        .await
    }

    /// Returns reports whose payments were not final when they were last checked, by number.
    pub(crate) async fn pending(&self, after: u64, limit: u64) -> Result<Vec<AcceptedReport>, StoreError> {
        self.run(move |connection| {
            let select =
                "SELECT id, report, block, block_time FROM reports WHERE final = 0 AND id > ? ORDER BY id LIMIT ?";
            let mut select = connection.prepare_cached(select)?;
            let reports = select.query_map([signed(after), signed(limit)], accepted_report)?;
            reports.collect()
        })
        .await
    }

    /// Marks a report's payment as final, or deletes the report because its payment was reorged. Then the payment can be reported
    /// again.
    pub(crate) async fn finish_report(&self, id: u64, exists: bool) -> Result<(), StoreError> {
        let change = match exists {
            true => "UPDATE reports SET final = 1 WHERE id = ?",
            false => "DELETE FROM reports WHERE id = ?",
        };
        self.run(move |connection| connection.prepare_cached(change)?.execute([signed(id)]).map(drop)).await
    }

    /// Deletes the reports about payments up to this time. No report about such a payment is accepted any more.
    pub(crate) async fn delete_reports(&self, until: u64, limits: &Limits) -> Result<(), StoreError> {
        let limit = signed(limits.reports);
        self.run(move |connection| {
            let work = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
            work.prepare_cached("DELETE FROM reports WHERE block_time <= ?")?.execute([signed(until)])?;
            forget_until(&work, signed(until))?;
            forget_payers(&work, limit)?;
            work.commit()
        })
        .await
    }
}

fn stored(
    connection: &Connection,
    key: &PaymentKey,
    report: &SignedEvidence,
) -> Result<Option<Stored>, rusqlite::Error> {
    let PaymentKey { network, asset, payer, nonce } = key;
    let payment = (network.chain_id().cast_signed(), asset.as_slice(), payer.as_slice(), nonce.as_slice());
    let of_payment = connection
        .prepare_cached("SELECT id, report FROM reports WHERE chain_id = ? AND asset = ? AND payer = ? AND nonce = ?")?
        .query_row(payment, |row| match report_in(row)?.reports_the_same(report) {
            true => Ok(Stored::Duplicate(number(row, "id")?)),
            false => Ok(Stored::Conflict),
        })
        .optional()?;
    Ok(match (of_payment, Charged::of(report)) {
        (None, Some(charged)) if charged.overlaps(connection)? => Some(Stored::Conflict),
        _ => of_payment,
    })
}

/// The part of a channel that paid for the evaluation of a report.
#[derive(Clone, Copy, Debug)]
struct Charged {
    channel: B256,
    from: i64,
    to: i64,
}

/// Finds the first part that ends after a part begins. Stored parts do not overlap, so if that one begins behind, all others do.
const NEXT: &str = "SELECT charged_from FROM reports WHERE channel = ? AND charged_to > ? ORDER BY charged_to LIMIT 1";

impl Charged {
    fn of(report: &SignedEvidence) -> Option<Self> {
        let (charge, begin) = report.evidence.charged_part()?;
        let channel = charge.channel_id(report.network).digest();
        Some(Self { channel, from: signed(begin.atomic()), to: signed(charge.charged.atomic()) })
    }

    /// Returns `true` if a stored report is about a part of this part.
    fn overlaps(&self, connection: &Connection) -> Result<bool, rusqlite::Error> {
        let mut next = connection.prepare_cached(NEXT)?;
        let begins: Option<i64> = next.query_row((self.channel.as_slice(), self.from), |row| row.get(0)).optional()?;
        Ok(begins.is_some_and(|begins| begins < self.to))
    }
}

fn put_report(
    connection: &mut Connection,
    payment: &ReportedPayment,
    report: &SignedEvidence,
    limits: &Limits,
) -> Result<Stored, rusqlite::Error> {
    let work = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    if let Some(before) = stored(&work, &payment.key, report)? {
        return Ok(before);
    }
    let (payer, time) = (payment.key.payer, signed(payment.block_time));
    let of_payer = "SELECT reports, until FROM payers WHERE payer = ?";
    let of_payer = work.prepare_cached(of_payer)?.query_row([payer.as_slice()], |row| Ok((row.get(0)?, row.get(1)?)));
    let (of_payer, until): (i64, i64) = of_payer.optional()?.unwrap_or_default();
    if time <= until.max(ask(&work, "SELECT until FROM forgotten", [])?) {
        return Ok(Stored::TooOld);
    }
    if of_payer >= signed(limits.reports_per_payer) {
        return Ok(Stored::TooMany);
    }
    let id = insert(&work, payment, report)?;
    let mut is_kept = true;
    while ask(&work, "SELECT rows FROM sizes WHERE name = 'reports'", [])? > signed(limits.reports) {
        is_kept &= drop_one(&work)? != id;
    }
    work.commit()?;
    Ok(if is_kept { Stored::New(id.cast_unsigned()) } else { Stored::TooOld })
}

/// Finds the payer that has most reports. Of several, it is the one with the oldest.
const LARGEST: &str = "SELECT payer FROM payers ORDER BY reports DESC, oldest LIMIT 1";
/// Finds the oldest report of a payer.
const OLDEST: &str = "SELECT id, block_time FROM reports WHERE payer = ? ORDER BY block_time, id LIMIT 1";

/// Deletes the oldest report of a payer that has most, so that nobody's payments, however many one claim holds, drop those of others.
/// Returns its number. No report of that payer about a payment of that time or before is accepted any more.
fn drop_one(work: &Connection) -> Result<i64, rusqlite::Error> {
    let payer: [u8; 20] = work.prepare_cached(LARGEST)?.query_row([], |row| row.get(0))?;
    let oldest = work.prepare_cached(OLDEST)?.query_row([payer], |row| Ok((row.get(0)?, row.get(1)?)));
    let (id, time): (i64, i64) = oldest?;
    work.prepare_cached("UPDATE payers SET until = max(until, ?2) WHERE payer = ?1")?.execute((payer, time))?;
    work.prepare_cached("DELETE FROM reports WHERE id = ?")?.execute([id])?;
    Ok(id)
}

fn insert(work: &Connection, payment: &ReportedPayment, report: &SignedEvidence) -> Result<i64, rusqlite::Error> {
    let json = serde_json::to_string(report).map_err(|error| rusqlite::Error::ToSqlConversionFailure(error.into()))?;
    let insert = "INSERT INTO reports (chain_id, asset, payer, nonce, evaluator, skill, report, block, block_time, final, \
        channel, charged_from, charged_to, pairs, pairs_right, pairs_wrong, failed) \
        VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, 0, ?, ?, ?, ?, ?, ?, ?)";
    let (charged, pairs) = (Charged::of(report), report.evidence.outcome.pairs());
    let PaymentKey { network, asset, payer, nonce } = &payment.key;
    let values = (
        network.chain_id().cast_signed(),
        asset.as_slice(),
        payer.as_slice(),
        nonce.as_slice(),
        report.evidence.evaluator.as_slice(),
        &report.evidence.skill,
        json,
        signed(payment.block),
        signed(payment.block_time),
        charged.map(|charged| charged.channel.0),
        charged.map(|charged| charged.from),
        charged.map(|charged| charged.to),
        pairs.map(Pairs::all),
        pairs.map(Pairs::right),
        pairs.map(Pairs::wrong),
        !matches!(report.evidence.outcome, CallOutcome::Answered { .. }),
    );
    work.prepare_cached(insert)?.insert(values)
}

/// Finds the newest reports on an evaluator and skill.
const NEWEST: &str = "SELECT payer, block_time, pairs, pairs_right, pairs_wrong, failed FROM reports \
    WHERE evaluator = ? AND skill = ? ORDER BY id DESC LIMIT ?";

fn seen(row: &Row<'_>) -> Result<Seen, rusqlite::Error> {
    let counts: (Option<u32>, Option<u32>, Option<u32>) =
        (row.get("pairs_right")?, row.get("pairs_wrong")?, row.get("pairs")?);
    let pairs = match counts {
        (Some(right), Some(wrong), Some(all)) => Pairs::new(right, wrong, all),
        _ => None,
    };
    Ok(Seen { payer: address(row, "payer")?, at: number(row, "block_time")?, pairs, has_failed: row.get("failed")? })
}

/// Accepts no more reports about payments up to this time, so that payers need not be remembered for them.
fn forget_until(work: &Connection, until: i64) -> Result<(), rusqlite::Error> {
    work.prepare_cached("UPDATE forgotten SET until = max(until, ?)")?.execute([until])?;
    let delete = "DELETE FROM payers WHERE reports = 0 AND until <= (SELECT until FROM forgotten)";
    work.prepare_cached(delete)?.execute([]).map(drop)
}

/// Remembers no more than `limit` payers whose reports were all dropped.
fn forget_payers(work: &Connection, limit: i64) -> Result<(), rusqlite::Error> {
    let without = ask(work, "SELECT count(*) FROM payers WHERE reports = 0", [])?;
    if without > limit {
        let first = "SELECT until FROM payers WHERE reports = 0 ORDER BY until LIMIT 1 OFFSET ?";
        forget_until(work, ask(work, first, [without - limit - 1])?)?;
    }
    Ok(())
}

/// Returns the query for a page and one report more.
fn page(filter: &Filter) -> Conditions {
    // An evaluator can have very many reports; a payer's number is limited.
    let index = if filter.payer.is_some() { " INDEXED BY reports_by_payer" } else { "" };
    let mut query = Conditions::new(format!("SELECT id, report, block, block_time FROM reports{index}"));
    query.push(" WHERE id > ?", signed(filter.after));
    if let Some(evaluator) = filter.evaluator {
        query.push(" AND evaluator = ?", evaluator.to_vec());
    }
    if let Some(skill) = &filter.skill {
        query.push(" AND skill = ?", skill.clone());
    }
    if let Some(payer) = filter.payer {
        query.push(" AND payer = ?", payer.to_vec());
    }
    query.push(" ORDER BY id LIMIT ?", signed(filter.limit.saturating_add(1)));
    query
}

fn accepted_report(row: &Row<'_>) -> Result<AcceptedReport, rusqlite::Error> {
    Ok(AcceptedReport {
        id: number(row, "id")?,
        report: report_in(row)?,
        block: number(row, "block")?,
        block_time: number(row, "block_time")?,
    })
}

fn report_in(row: &Row<'_>) -> Result<SignedEvidence, rusqlite::Error> {
    Ok(row.get::<_, Json<_>>("report")?.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All reads share one connection, so none may scan the whole table.
    #[tokio::test]
    async fn every_page_is_read_along_an_index() {
        let store = DirectoryStore::in_memory().await.unwrap();
        let (one, other, skill) =
            (Some(Address::repeat_byte(1)), Some(Address::repeat_byte(2)), Some("prose".to_owned()));
        for (evaluator, skill, payer, index) in [
            (None, None, one, "reports_by_payer"),
            (other, None, one, "reports_by_payer"),
            (None, skill.clone(), one, "reports_by_payer"),
            (other, skill.clone(), one, "reports_by_payer"),
            (other, skill.clone(), None, "reports_by_cell"),
            (other, None, None, "reports_by_evaluator"),
            (None, skill, None, "reports_by_skill"),
            (None, None, None, "PRIMARY KEY"),
        ] {
            let query = page(&Filter { evaluator, skill, payer, after: 5, limit: 10 });
            let explain = store.run(move |connection| {
                let mut explain = connection.prepare(&format!("EXPLAIN QUERY PLAN {}", query.sql))?;
                let steps = explain.query_map(params_from_iter(query.values), |row| row.get::<_, String>("detail"))?;
                steps.collect()
            });
            let plan: Vec<String> = explain.await.unwrap();
            assert!(plan.len() == 1 && plan[0].starts_with("SEARCH") && plan[0].contains(index), "{plan:?}");
        }
        for (query, values, expected) in [
            (NEXT, 2, "reports_by_channel (channel=? AND charged_to>?)"),
            (LARGEST, 0, "SCAN payers USING COVERING INDEX payers_by_reports"),
            (NEWEST, 3, "reports_by_cell (evaluator=? AND skill=?)"),
            (OLDEST, 1, "reports_by_payer_and_time (payer=?)"),
        ] {
            let explain = store.run(move |connection| {
                let mut explain = connection.prepare(&format!("EXPLAIN QUERY PLAN {query}"))?;
                let values = params_from_iter(std::iter::repeat_n(5, values));
                let steps = explain.query_map(values, |row| row.get::<_, String>("detail"))?;
                steps.collect()
            });
            let plan: Vec<String> = explain.await.unwrap();
            assert!(plan.len() == 1 && plan[0].contains(expected), "{plan:?}");
        }
    }

    /// Each of these payers had one report, which was dropped.
    #[tokio::test]
    async fn payers_without_reports_are_remembered_up_to_a_bound_and_then_by_time() {
        let store = DirectoryStore::in_memory().await.unwrap();
        let insert = store.run(|connection| {
            for (payer, until) in [(1_u8, 10), (2, 30), (3, 20), (4, 40)] {
                let values = (Address::repeat_byte(payer).into_array(), until);
                connection.execute("INSERT INTO payers VALUES (?1, 0, 0, ?2)", values)?;
            }
            forget_payers(connection, 2)?;
            let mut left = connection.prepare("SELECT until FROM payers ORDER BY until")?;
            let left = left.query_map([], |row| row.get::<_, i64>(0))?.collect::<Result<Vec<_>, _>>()?;
            Ok((left, ask(connection, "SELECT until FROM forgotten", [])?))
        });
        assert_eq!(insert.await.unwrap(), (vec![30, 40], 20));
    }
}
