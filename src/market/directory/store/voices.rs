//! Voices, one per payment.

use alloy_primitives::Address;
use sqlx::{Connection as _, Row as _, SqliteConnection, sqlite::SqliteRow};

use super::{Conditions, DirectoryStore, Limits, StoreError, number, signed};
use crate::market::directory::{PaymentOf, SignedEvidence, wire::Admitted, witness::Payment};

/// Which voices to list.
#[derive(Clone, Debug, Default)]
pub(in crate::market::directory) struct VoiceFilter {
    pub(in crate::market::directory) evaluator: Option<Address>,
    pub(in crate::market::directory) skill: Option<String>,
    pub(in crate::market::directory) payer: Option<Address>,
    pub(in crate::market::directory) after: u64,
    pub(in crate::market::directory) limit: u64,
}

/// What became of a voice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::market::directory) enum Said {
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
pub(in crate::market::directory) struct Open {
    pub(in crate::market::directory) id: u64,
    pub(in crate::market::directory) block: u64,
    pub(in crate::market::directory) said: SignedEvidence,
}

impl DirectoryStore {
    /// What was said about this payment before, if anything was.
    pub(in crate::market::directory) async fn heard(
        &self,
        of: &PaymentOf,
        said: &SignedEvidence,
    ) -> Result<Option<Said>, StoreError> {
        let mut connection = self.connection.lock().await;
        Ok(heard(&mut connection, of, said).await?)
    }

    /// Keeps a voice whose payment was found.
    pub(in crate::market::directory) async fn put_voice(
        &self,
        payment: &Payment,
        said: &SignedEvidence,
        limits: &Limits,
    ) -> Result<Said, StoreError> {
        let mut connection = self.connection.lock().await;
        let mut work = connection.begin_with("BEGIN IMMEDIATE").await?;
        if let Some(before) = heard(&mut work, &payment.of, said).await? {
            return Ok(before);
        }
        let until: i64 = sqlx::query_scalar("SELECT until FROM forgotten").fetch_one(&mut *work).await?;
        if signed(payment.block_time) <= until {
            return Ok(Said::TooOld);
        }
        let of_payer: i64 = sqlx::query_scalar("SELECT count(*) FROM voices WHERE payer = ?1")
            .bind(payment.of.voice.payer.to_vec())
            .fetch_one(&mut *work)
            .await?;
        if of_payer >= signed(limits.voices_per_payer) {
            return Ok(Said::TooMany);
        }
        let json = serde_json::to_string(said).map_err(|error| sqlx::Error::Encode(error.into()))?;
        let id = sqlx::query(
            "INSERT INTO voices (chain_id, asset, payer, nonce, evaluator, skill, said, block, block_time, final) \
             VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, 0)",
        )
        .bind(payment.of.network.chain_id().cast_signed())
        .bind(payment.of.asset.to_vec())
        .bind(payment.of.voice.payer.to_vec())
        .bind(payment.of.voice.nonce.to_vec())
        .bind(said.evidence.evaluator.to_vec())
        .bind(&said.evidence.skill)
        .bind(json)
        .bind(signed(payment.block))
        .bind(signed(payment.block_time))
        .execute(&mut *work)
        .await?
        .last_insert_rowid();
        let count: i64 =
            sqlx::query_scalar("SELECT rows FROM sizes WHERE name = 'voices'").fetch_one(&mut *work).await?;
        if count > signed(limits.voices) {
            let oldest: i64 = sqlx::query_scalar("SELECT min(block_time) FROM voices").fetch_one(&mut *work).await?;
            forget(&mut work, oldest).await?;
            if signed(payment.block_time) <= oldest {
                work.commit().await?;
                return Ok(Said::TooOld);
            }
        }
        work.commit().await?;
        Ok(Said::New(id.cast_unsigned()))
    }

    /// Voices by number, and whether there are more.
    pub(in crate::market::directory) async fn voices(
        &self,
        filter: &VoiceFilter,
    ) -> Result<(Vec<Admitted>, bool), StoreError> {
        let mut query = select("", filter);
        let mut connection = self.connection.lock().await;
        let mut rows = query.build().fetch_all(&mut *connection).await?;
        drop(connection);
        let more = rows.len() as u64 > filter.limit;
        rows.truncate(usize::try_from(filter.limit).unwrap_or(usize::MAX));
        let voices = rows.iter().map(|row| {
            Ok(Admitted {
                id: number(row, "id")?,
                said: said_in(row)?,
                block: number(row, "block")?,
                block_time: number(row, "block_time")?,
            })
        });
        Ok((voices.collect::<Result<_, sqlx::Error>>()?, more))
    }

    /// Voices whose payments were not final when they were last looked at, the longest here first.
    pub(in crate::market::directory) async fn not_final(
        &self,
        after: u64,
        limit: u64,
    ) -> Result<Vec<Open>, StoreError> {
        let mut connection = self.connection.lock().await;
        let rows = sqlx::query("SELECT id, said, block FROM voices WHERE final = 0 AND id > ?1 ORDER BY id LIMIT ?2")
            .bind(signed(after))
            .bind(signed(limit))
            .fetch_all(&mut *connection)
            .await?;
        let open = rows
            .iter()
            .map(|row| Ok(Open { id: number(row, "id")?, block: number(row, "block")?, said: said_in(row)? }));
        Ok(open.collect::<Result<_, sqlx::Error>>()?)
    }

    /// The payment of a voice cannot be undone any more, or was undone: then it is as if it had never spoken.
    pub(in crate::market::directory) async fn close_voice(&self, id: u64, stands: bool) -> Result<(), StoreError> {
        let mut connection = self.connection.lock().await;
        let change = match stands {
            true => "UPDATE voices SET final = 1 WHERE id = ?1",
            false => "DELETE FROM voices WHERE id = ?1",
        };
        sqlx::query(change).bind(signed(id)).execute(&mut *connection).await?;
        Ok(())
    }

    /// Removes what was said about payments up to this time; such payments have no voice any more.
    pub(in crate::market::directory) async fn forget_voices(&self, until: u64) -> Result<(), StoreError> {
        let mut connection = self.connection.lock().await;
        let mut work = connection.begin_with("BEGIN IMMEDIATE").await?;
        forget(&mut work, signed(until)).await?;
        work.commit().await?;
        Ok(())
    }
}

/// The query for a page; `before` is put before it.
fn select(before: &'static str, filter: &VoiceFilter) -> Conditions {
    let mut query = Conditions::new(before);
    query.push("SELECT id, said, block, block_time FROM voices ");
    // Of one evaluator there may be very many, of one payer not.
    if filter.payer.is_some() {
        query.push("INDEXED BY voices_by_payer ");
    }
    query.push("WHERE id > ").push_bind(signed(filter.after));
    if let Some(evaluator) = filter.evaluator {
        query.push(" AND evaluator = ").push_bind(evaluator.to_vec());
    }
    if let Some(skill) = &filter.skill {
        query.push(" AND skill = ").push_bind(skill.clone());
    }
    if let Some(payer) = filter.payer {
        query.push(" AND payer = ").push_bind(payer.to_vec());
    }
    query.push(" ORDER BY id LIMIT ").push_bind(signed(filter.limit.saturating_add(1)));
    query
}

async fn heard(
    connection: &mut SqliteConnection,
    of: &PaymentOf,
    said: &SignedEvidence,
) -> Result<Option<Said>, sqlx::Error> {
    let before =
        sqlx::query("SELECT id, said FROM voices WHERE chain_id = ?1 AND asset = ?2 AND payer = ?3 AND nonce = ?4")
            .bind(of.network.chain_id().cast_signed())
            .bind(of.asset.to_vec())
            .bind(of.voice.payer.to_vec())
            .bind(of.voice.nonce.to_vec())
            .fetch_optional(connection)
            .await?;
    let Some(row) = before else { return Ok(None) };
    Ok(Some(if said_in(&row)?.says_the_same(said) { Said::Again(number(&row, "id")?) } else { Said::Otherwise }))
}

async fn forget(work: &mut SqliteConnection, until: i64) -> Result<(), sqlx::Error> {
    sqlx::query("DELETE FROM voices WHERE block_time <= ?1").bind(until).execute(&mut *work).await?;
    sqlx::query("UPDATE forgotten SET until = max(until, ?1)").bind(until).execute(&mut *work).await?;
    Ok(())
}

fn said_in(row: &SqliteRow) -> Result<SignedEvidence, sqlx::Error> {
    serde_json::from_str(row.try_get("said")?).map_err(|error| sqlx::Error::Decode(error.into()))
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
            let filter = VoiceFilter { evaluator, skill, payer, after: 5, limit: 10 };
            let mut query = select("EXPLAIN QUERY PLAN ", &filter);
            let rows = query.build().fetch_all(&mut *store.connection.lock().await).await.unwrap();
            let plan: Vec<String> = rows.iter().map(|row| row.get("detail")).collect();
            assert!(plan.len() == 1 && plan[0].starts_with("SEARCH") && plan[0].contains(index), "{plan:?}");
        }
    }
}
