//! Voices, one per payment.

use alloy_primitives::Address;
use rusqlite::{Connection, OptionalExtension as _, Row, TransactionBehavior, params_from_iter};

use super::{Conditions, DirectoryStore, Json, Limits, StoreError, ask, number, signed};
use crate::directory::{Admitted, PaymentOf, SignedEvidence, witness::Payment};

/// Which voices to list.
#[derive(Clone, Debug, Default)]
pub(in crate::directory) struct VoiceFilter {
    pub(in crate::directory) evaluator: Option<Address>,
    pub(in crate::directory) skill: Option<String>,
    pub(in crate::directory) payer: Option<Address>,
    pub(in crate::directory) after: u64,
    pub(in crate::directory) limit: u64,
}

/// What became of a voice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::directory) enum Said {
    New(u64),
    /// It said the very same before.
    Again(u64),
    /// It said something else before.
    Otherwise,
    /// It may have spoken before, and was forgotten.
    TooOld,
    /// As much as may be is kept of this payer.
    TooMany,
}

/// A voice whose payment may yet be undone.
pub(in crate::directory) struct Open {
    pub(in crate::directory) id: u64,
    pub(in crate::directory) block: u64,
    pub(in crate::directory) said: SignedEvidence,
}

impl DirectoryStore {
    /// What was said about this payment before, if anything was.
    pub(in crate::directory) async fn heard(
        &self,
        of: &PaymentOf,
        said: &SignedEvidence,
    ) -> Result<Option<Said>, StoreError> {
        let (of, said) = (*of, said.clone());
        self.run(move |connection| heard(connection, &of, &said)).await
    }

    /// Keeps a voice whose payment was found.
    pub(in crate::directory) async fn put_voice(
        &self,
        payment: &Payment,
        said: &SignedEvidence,
        limits: &Limits,
    ) -> Result<Said, StoreError> {
        let (payment, said, limits) = (*payment, said.clone(), *limits);
        self.run(move |connection| put_voice(connection, &payment, &said, &limits)).await
    }

    /// Voices by number, and whether there are more.
    pub(in crate::directory) async fn voices(&self, filter: &VoiceFilter) -> Result<(Vec<Admitted>, bool), StoreError> {
        let filter = filter.clone();
        self.run(move |connection| voices(connection, &filter)).await
    }

    /// Voices whose payments were not final when they were last looked at, the longest here first.
    pub(in crate::directory) async fn not_final(&self, after: u64, limit: u64) -> Result<Vec<Open>, StoreError> {
        self.run(move |connection| {
            let select = "SELECT id, said, block FROM voices WHERE final = 0 AND id > ? ORDER BY id LIMIT ?";
            let mut select = connection.prepare_cached(select)?;
            let voices = select.query_map([signed(after), signed(limit)], open)?;
            voices.collect()
        })
        .await
    }

    /// The payment of a voice cannot be undone any more, or was undone: then it is as if it had never spoken.
    pub(in crate::directory) async fn close_voice(&self, id: u64, stands: bool) -> Result<(), StoreError> {
        let change = match stands {
            true => "UPDATE voices SET final = 1 WHERE id = ?",
            false => "DELETE FROM voices WHERE id = ?",
        };
        self.run(move |connection| connection.prepare_cached(change)?.execute([signed(id)]).map(drop)).await
    }

    /// Removes what was said about payments up to this time; such payments have no voice any more.
    pub(in crate::directory) async fn forget_voices(&self, until: u64) -> Result<(), StoreError> {
        self.run(move |connection| {
            let work = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
            forget(&work, signed(until))?;
            work.commit()
        })
        .await
    }
}

fn heard(connection: &Connection, of: &PaymentOf, said: &SignedEvidence) -> Result<Option<Said>, rusqlite::Error> {
    let PaymentOf { network, asset, voice } = of;
    let payment = (network.chain_id().cast_signed(), asset.as_slice(), voice.payer.as_slice(), voice.nonce.as_slice());
    connection
        .prepare_cached("SELECT id, said FROM voices WHERE chain_id = ? AND asset = ? AND payer = ? AND nonce = ?")?
        .query_row(payment, |row| match said_in(row)?.says_the_same(said) {
            true => Ok(Said::Again(number(row, "id")?)),
            false => Ok(Said::Otherwise),
        })
        .optional()
}

fn put_voice(
    connection: &mut Connection,
    payment: &Payment,
    said: &SignedEvidence,
    limits: &Limits,
) -> Result<Said, rusqlite::Error> {
    let work = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    if let Some(before) = heard(&work, &payment.of, said)? {
        return Ok(before);
    }
    let (payer, time) = (payment.of.voice.payer, signed(payment.block_time));
    if time <= ask(&work, "SELECT until FROM forgotten", [])? {
        return Ok(Said::TooOld);
    }
    let of_payer = ask(&work, "SELECT count(*) FROM voices WHERE payer = ?", [payer.as_slice()])?;
    if of_payer >= signed(limits.voices_per_payer) {
        return Ok(Said::TooMany);
    }
    let id = insert(&work, payment, said)?;
    if ask(&work, "SELECT rows FROM sizes WHERE name = 'voices'", [])? > signed(limits.voices) {
        let oldest = ask(&work, "SELECT min(block_time) FROM voices", [])?;
        forget(&work, oldest)?;
        if time <= oldest {
            work.commit()?;
            return Ok(Said::TooOld);
        }
    }
    work.commit()?;
    Ok(Said::New(id.cast_unsigned()))
}

fn insert(work: &Connection, payment: &Payment, said: &SignedEvidence) -> Result<i64, rusqlite::Error> {
    let json = serde_json::to_string(said).map_err(|error| rusqlite::Error::ToSqlConversionFailure(error.into()))?;
    let insert = "INSERT INTO voices (chain_id, asset, payer, nonce, evaluator, skill, said, block, block_time, final) \
        VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, 0)";
    let PaymentOf { network, asset, voice } = &payment.of;
    let values = (
        network.chain_id().cast_signed(),
        asset.as_slice(),
        voice.payer.as_slice(),
        voice.nonce.as_slice(),
        said.evidence.evaluator.as_slice(),
        &said.evidence.skill,
        json,
        signed(payment.block),
        signed(payment.block_time),
    );
    work.prepare_cached(insert)?.insert(values)
}

fn forget(work: &Connection, until: i64) -> Result<(), rusqlite::Error> {
    work.prepare_cached("DELETE FROM voices WHERE block_time <= ?")?.execute([until])?;
    work.prepare_cached("UPDATE forgotten SET until = max(until, ?)")?.execute([until]).map(drop)
}

fn voices(connection: &Connection, filter: &VoiceFilter) -> Result<(Vec<Admitted>, bool), rusqlite::Error> {
    let query = page(filter);
    let mut select = connection.prepare_cached(&query.sql)?;
    let mut rows = select.query(params_from_iter(query.values))?;
    let mut voices = Vec::new();
    while let Some(row) = rows.next()? {
        if voices.len() as u64 >= filter.limit {
            return Ok((voices, true));
        }
        voices.push(admitted(row)?);
    }
    Ok((voices, false))
}

/// The query for a page, and for one voice more.
fn page(filter: &VoiceFilter) -> Conditions {
    // Of one evaluator there may be very many, of one payer not.
    let index = if filter.payer.is_some() { " INDEXED BY voices_by_payer" } else { "" };
    let mut query = Conditions::new(format!("SELECT id, said, block, block_time FROM voices{index}"));
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

fn admitted(row: &Row<'_>) -> Result<Admitted, rusqlite::Error> {
    Ok(Admitted {
        id: number(row, "id")?,
        said: said_in(row)?,
        block: number(row, "block")?,
        block_time: number(row, "block_time")?,
    })
}

fn open(row: &Row<'_>) -> Result<Open, rusqlite::Error> {
    Ok(Open { id: number(row, "id")?, block: number(row, "block")?, said: said_in(row)? })
}

fn said_in(row: &Row<'_>) -> Result<SignedEvidence, rusqlite::Error> {
    Ok(row.get::<_, Json<_>>("said")?.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All reads share one connection: none may walk along everything that is kept.
    #[tokio::test]
    async fn every_page_is_read_along_an_index() {
        let store = DirectoryStore::in_memory().await.unwrap();
        let (one, other, skill) =
            (Some(Address::repeat_byte(1)), Some(Address::repeat_byte(2)), Some("prose".to_owned()));
        for (evaluator, skill, payer, index) in [
            (None, None, one, "voices_by_payer"),
            (other, None, one, "voices_by_payer"),
            (None, skill.clone(), one, "voices_by_payer"),
            (other, skill.clone(), one, "voices_by_payer"),
            (other, skill.clone(), None, "voices_by_cell"),
            (other, None, None, "voices_by_evaluator"),
            (None, skill, None, "voices_by_skill"),
            (None, None, None, "PRIMARY KEY"),
        ] {
            let query = page(&VoiceFilter { evaluator, skill, payer, after: 5, limit: 10 });
            let explain = store.run(move |connection| {
                let mut explain = connection.prepare(&format!("EXPLAIN QUERY PLAN {}", query.sql))?;
                let steps = explain.query_map(params_from_iter(query.values), |row| row.get::<_, String>("detail"))?;
                steps.collect()
            });
            let plan: Vec<String> = explain.await.unwrap();
            assert!(plan.len() == 1 && plan[0].starts_with("SEARCH") && plan[0].contains(index), "{plan:?}");
        }
    }
}
