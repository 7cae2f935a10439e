//! Cards, and what evaluators offer or offered.

use std::time::Duration;

use alloy_primitives::Address;
use serde_json::value::RawValue;
use sqlx::{Connection as _, Row as _, SqliteConnection, sqlite::SqliteRow};

use super::{Conditions, DirectoryStore, Limits, StoreError, address, number, signed};
use crate::{market::directory::wire::CardEntry, network::Network};

/// How many skills an evaluator may have offered; none is forgotten to make room, or it could choose what is said of it.
const MAX_OFFERED: i64 = 256;

/// A card to be kept.
pub(in crate::market::directory) struct Card {
    pub(in crate::market::directory) url: String,
    pub(in crate::market::directory) host: String,
    pub(in crate::market::directory) pay_to: Address,
    pub(in crate::market::directory) price: u64,
    pub(in crate::market::directory) json: String,
    pub(in crate::market::directory) skills: Vec<String>,
    pub(in crate::market::directory) networks: Vec<Network>,
}

/// Which cards to list.
#[derive(Clone, Debug, Default)]
pub(in crate::market::directory) struct CardFilter {
    pub(in crate::market::directory) skill: Option<String>,
    pub(in crate::market::directory) network: Option<Network>,
    pub(in crate::market::directory) max_price: Option<u64>,
    pub(in crate::market::directory) after: u64,
    pub(in crate::market::directory) limit: u64,
}

/// What became of a card.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::market::directory) enum Listed {
    New,
    Renewed,
    /// The URL is known by another payee.
    PayeeChanged(Address),
    /// There are as many of this host as may be.
    TooManyOfHost,
    /// Its evaluator has offered as many skills as may be.
    TooManySkills,
    /// There are as many as may be, and all of them have been paid.
    Full,
}

/// What is known of an evaluator and a skill.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::market::directory) enum Offered {
    /// The skill, and this was the lowest price per output, in atomic units.
    For(u64),
    OtherSkills,
    Nothing,
}

impl DirectoryStore {
    /// Keeps a card that was just seen. If there are too many, one makes room: an unlisted one, or the oldest nobody has spoken of.
    pub(in crate::market::directory) async fn put_card(
        &self,
        card: &Card,
        now: u64,
        limits: &Limits,
    ) -> Result<Listed, StoreError> {
        let mut connection = self.connection.lock().await;
        let mut work = connection.begin_with("BEGIN IMMEDIATE").await?;
        let known = sqlx::query("SELECT id, pay_to FROM cards WHERE url = ?1")
            .bind(&card.url)
            .fetch_optional(&mut *work)
            .await?;
        let (id, listed) = match known {
            Some(row) => {
                let payee = address(&row, "pay_to")?;
                if payee != card.pay_to {
                    return Ok(Listed::PayeeChanged(payee));
                }
                let id: i64 = row.try_get("id")?;
                sqlx::query(
                    "UPDATE cards SET host = ?5, price = ?2, card = ?3, last_seen = ?4, checked_at = ?4, listed = 1 \
                     WHERE id = ?1",
                )
                .bind(id)
                .bind(signed(card.price))
                .bind(&card.json)
                .bind(signed(now))
                .bind(&card.host)
                .execute(&mut *work)
                .await?;
                for old in ["DELETE FROM card_skills WHERE card = ?1", "DELETE FROM card_networks WHERE card = ?1"] {
                    sqlx::query(old).bind(id).execute(&mut *work).await?;
                }
                (id, Listed::Renewed)
            }
            None => {
                let of_host: i64 = sqlx::query_scalar("SELECT count(*) FROM cards WHERE host = ?1")
                    .bind(&card.host)
                    .fetch_one(&mut *work)
                    .await?;
                if of_host >= signed(limits.cards_per_host) {
                    return Ok(Listed::TooManyOfHost);
                }
                if !make_room(&mut work, limits.cards).await? {
                    return Ok(Listed::Full);
                }
                let id = sqlx::query(
                    "INSERT INTO cards (url, host, pay_to, price, card, first_seen, last_seen, checked_at, listed) \
                     VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?6, ?6, 1)",
                )
                .bind(&card.url)
                .bind(&card.host)
                .bind(card.pay_to.to_vec())
                .bind(signed(card.price))
                .bind(&card.json)
                .bind(signed(now))
                .execute(&mut *work)
                .await?
                .last_insert_rowid();
                (id, Listed::New)
            }
        };
        for skill in &card.skills {
            sqlx::query("INSERT OR IGNORE INTO card_skills (skill, card) VALUES (?1, ?2)")
                .bind(skill)
                .bind(id)
                .execute(&mut *work)
                .await?;
            sqlx::query(
                "INSERT INTO offered (evaluator, skill, seen, price) VALUES (?1, ?2, ?3, ?4) \
                 ON CONFLICT DO UPDATE SET seen = ?3, price = min(price, ?4)",
            )
            .bind(card.pay_to.to_vec())
            .bind(skill)
            .bind(signed(now))
            .bind(signed(card.price))
            .execute(&mut *work)
            .await?;
        }
        let offered: i64 = sqlx::query_scalar("SELECT count(*) FROM offered WHERE evaluator = ?1")
            .bind(card.pay_to.to_vec())
            .fetch_one(&mut *work)
            .await?;
        if offered > MAX_OFFERED {
            work.rollback().await?;
            return Ok(Listed::TooManySkills);
        }
        for network in &card.networks {
            sqlx::query("INSERT OR IGNORE INTO card_networks (chain_id, card) VALUES (?1, ?2)")
                .bind(network.chain_id().cast_signed())
                .bind(id)
                .execute(&mut *work)
                .await?;
        }
        work.commit().await?;
        Ok(listed)
    }

    /// When a card was last asked for, if it is known and listed.
    pub(in crate::market::directory) async fn checked_at(&self, url: &str) -> Result<Option<u64>, StoreError> {
        let mut connection = self.connection.lock().await;
        let found = sqlx::query("SELECT checked_at FROM cards WHERE url = ?1 AND listed = 1")
            .bind(url)
            .fetch_optional(&mut *connection)
            .await?;
        Ok(found.map(|row| number(&row, "checked_at")).transpose()?)
    }

    /// Listed cards, by number; at most so many, and of so many bytes after the first. Also whether there are more.
    pub(in crate::market::directory) async fn cards(
        &self,
        filter: &CardFilter,
        bytes: usize,
    ) -> Result<(Vec<CardEntry>, bool), StoreError> {
        let mut query =
            Conditions::new("SELECT id, url, pay_to, first_seen, last_seen, card FROM cards WHERE listed = 1");
        query.push(" AND id > ").push_bind(signed(filter.after));
        if let Some(skill) = &filter.skill {
            query.push(" AND id IN (SELECT card FROM card_skills WHERE skill = ").push_bind(skill.clone()).push(")");
        }
        if let Some(network) = filter.network {
            let chain_id = network.chain_id().cast_signed();
            query.push(" AND id IN (SELECT card FROM card_networks WHERE chain_id = ").push_bind(chain_id).push(")");
        }
        if let Some(price) = filter.max_price {
            query.push(" AND price <= ").push_bind(signed(price));
        }
        query.push(" ORDER BY id LIMIT ").push_bind(signed(filter.limit.saturating_add(1)));
        let mut connection = self.connection.lock().await;
        let rows = query.build().fetch_all(&mut *connection).await?;
        drop(connection);
        let (mut entries, mut size) = (Vec::new(), 0);
        let mut more = false;
        for row in &rows {
            let entry = entry(row)?;
            size += entry.card.get().len();
            if entries.len() as u64 >= filter.limit || (size > bytes && !entries.is_empty()) {
                more = true;
                break;
            }
            entries.push(entry);
        }
        Ok((entries, more))
    }

    /// Whether this address was ever the payee of a card here, and whether of one with this skill.
    pub(in crate::market::directory) async fn offered(
        &self,
        evaluator: Address,
        skill: &str,
    ) -> Result<Offered, StoreError> {
        let mut connection = self.connection.lock().await;
        let price: Option<i64> = sqlx::query_scalar("SELECT price FROM offered WHERE evaluator = ?1 AND skill = ?2")
            .bind(evaluator.to_vec())
            .bind(skill)
            .fetch_optional(&mut *connection)
            .await?;
        if let Some(price) = price {
            return Ok(Offered::For(price.try_into().unwrap_or_default()));
        }
        let is_known: bool = sqlx::query_scalar("SELECT EXISTS (SELECT 1 FROM offered WHERE evaluator = ?1)")
            .bind(evaluator.to_vec())
            .fetch_one(&mut *connection)
            .await?;
        Ok(if is_known { Offered::OtherSkills } else { Offered::Nothing })
    }

    /// Cards that were last asked for at `until` or before, the longest ago first.
    pub(in crate::market::directory) async fn due(&self, until: u64, limit: u64) -> Result<Vec<String>, StoreError> {
        let mut connection = self.connection.lock().await;
        let rows = sqlx::query("SELECT url FROM cards WHERE checked_at <= ?1 ORDER BY checked_at LIMIT ?2")
            .bind(signed(until))
            .bind(signed(limit))
            .fetch_all(&mut *connection)
            .await?;
        Ok(rows.iter().map(|row| row.try_get("url")).collect::<Result<_, _>>()?)
    }

    /// A card could not be had just now. It is no longer listed if it has not been seen for `patience`.
    pub(in crate::market::directory) async fn missed(
        &self,
        url: &str,
        now: u64,
        patience: Duration,
    ) -> Result<(), StoreError> {
        let mut connection = self.connection.lock().await;
        sqlx::query("UPDATE cards SET checked_at = ?2, listed = listed AND last_seen > ?3 WHERE url = ?1")
            .bind(url)
            .bind(signed(now))
            .bind(signed(now.saturating_sub(patience.as_secs())))
            .execute(&mut *connection)
            .await?;
        Ok(())
    }

    /// Removes cards that were not seen since, and what their evaluators offered if no other card is left.
    pub(in crate::market::directory) async fn forget_cards(&self, before: u64) -> Result<(), StoreError> {
        let mut connection = self.connection.lock().await;
        let mut work = connection.begin_with("BEGIN IMMEDIATE").await?;
        sqlx::query("DELETE FROM cards WHERE last_seen < ?1").bind(signed(before)).execute(&mut *work).await?;
        forget_offers(&mut work).await?;
        work.commit().await?;
        Ok(())
    }
}

async fn make_room(work: &mut SqliteConnection, limit: u64) -> Result<bool, sqlx::Error> {
    let count: i64 = sqlx::query_scalar("SELECT count(*) FROM cards").fetch_one(&mut *work).await?;
    if count < signed(limit) {
        return Ok(true);
    }
    let gone = sqlx::query(
        "DELETE FROM cards WHERE id = (SELECT id FROM cards AS card \
         WHERE listed = 0 OR NOT EXISTS (SELECT 1 FROM voices WHERE evaluator = card.pay_to) \
         ORDER BY listed, last_seen, id LIMIT 1)",
    )
    .execute(&mut *work)
    .await?;
    forget_offers(work).await?;
    Ok(gone.rows_affected() > 0)
}

async fn forget_offers(work: &mut SqliteConnection) -> Result<(), sqlx::Error> {
    sqlx::query("DELETE FROM offered WHERE evaluator NOT IN (SELECT pay_to FROM cards)").execute(work).await?;
    Ok(())
}

fn entry(row: &SqliteRow) -> Result<CardEntry, sqlx::Error> {
    Ok(CardEntry {
        id: number(row, "id")?,
        url: row.try_get("url")?,
        pay_to: address(row, "pay_to")?,
        first_seen: number(row, "first_seen")?,
        last_seen: number(row, "last_seen")?,
        card: RawValue::from_string(row.try_get("card")?).map_err(|error| sqlx::Error::Decode(error.into()))?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A file from before prices were kept, as it is opened now.
    #[tokio::test]
    async fn what_was_offered_before_prices_were_kept_costs_what_its_cards_say() {
        let mut connection = SqliteConnection::connect("sqlite::memory:").await.unwrap();
        sqlx::raw_sql(include_str!("migrations/0001_directory.sql")).execute(&mut connection).await.unwrap();
        sqlx::raw_sql(
            "INSERT INTO cards VALUES (1, 'a', 'a', x'01', 1000, '{}', 0, 0, 0, 1), (2, 'b', 'b', x'01', 10, '{}', 0, 0, 0, 1);
             INSERT INTO card_skills VALUES ('prose', 1), ('poetry', 2);
             INSERT INTO offered VALUES (x'01', 'prose', 0), (x'01', 'poetry', 0), (x'01', 'old', 0), (x'02', 'lost', 0);",
        )
        .execute(&mut connection)
        .await
        .unwrap();
        sqlx::raw_sql(include_str!("migrations/0002_prices.sql")).execute(&mut connection).await.unwrap();
        let rows =
            sqlx::query("SELECT skill, price FROM offered ORDER BY skill").fetch_all(&mut connection).await.unwrap();
        let prices: Vec<(String, i64)> = rows.iter().map(|row| (row.get("skill"), row.get("price"))).collect();
        let expected = [("lost", 0), ("old", 10), ("poetry", 10), ("prose", 1_000)];
        assert_eq!(prices, expected.map(|(skill, price)| (skill.to_owned(), price)));
    }
}
