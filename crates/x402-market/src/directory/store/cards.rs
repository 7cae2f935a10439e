//! Cards, and what evaluators offer or offered.

use std::time::Duration;

use alloy_primitives::Address;
use rusqlite::{Connection, OptionalExtension as _, Row, TransactionBehavior, params_from_iter};
use tower_x402::Network;

use super::{
    DirectoryStore, StoreError,
    columns::{Json, address, ask, number, signed},
    conditions::Conditions,
    listing::forget_offers,
};
use crate::directory::wire::CardEntry;

/// Which cards to list.
#[derive(Clone, Debug, Default)]
pub(in crate::directory) struct CardFilter {
    pub(in crate::directory) skill: Option<String>,
    pub(in crate::directory) network: Option<Network>,
    pub(in crate::directory) max_price: Option<u64>,
    pub(in crate::directory) after: u64,
    pub(in crate::directory) limit: u64,
}

/// What is known of an evaluator and a skill.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::directory) enum Offered {
    /// The skill, and this was the lowest price per output, in atomic units.
    For(u64),
    OtherSkills,
    Nothing,
}

impl DirectoryStore {
    /// When a card was last asked for, if it is known and listed.
    pub(in crate::directory) async fn checked_at(&self, url: &str) -> Result<Option<u64>, StoreError> {
        let url = url.to_owned();
        self.run(move |connection| {
            let select = "SELECT checked_at FROM cards WHERE url = ? AND listed = 1";
            connection.prepare_cached(select)?.query_row([url], |row| number(row, "checked_at")).optional()
        })
        .await
    }

    /// Listed cards, by number; at most so many, and of so many bytes after the first. Also whether there are more.
    pub(in crate::directory) async fn cards(
        &self,
        filter: &CardFilter,
        bytes: usize,
    ) -> Result<(Vec<CardEntry>, bool), StoreError> {
        let filter = filter.clone();
        self.run(move |connection| cards(connection, &filter, bytes)).await
    }

    /// Whether this address was ever the payee of a card here, and whether of one with this skill.
    pub(in crate::directory) async fn offered(&self, evaluator: Address, skill: &str) -> Result<Offered, StoreError> {
        let skill = skill.to_owned();
        self.run(move |connection| offered(connection, evaluator, &skill)).await
    }

    /// Cards that were last asked for at `until` or before, the longest ago first.
    pub(in crate::directory) async fn due(&self, until: u64, limit: u64) -> Result<Vec<String>, StoreError> {
        self.run(move |connection| {
            let select = "SELECT url FROM cards WHERE checked_at <= ? ORDER BY checked_at LIMIT ?";
            let mut select = connection.prepare_cached(select)?;
            let urls = select.query_map([signed(until), signed(limit)], |row| row.get::<_, String>("url"))?;
            urls.collect()
        })
        .await
    }

    /// A card could not be had just now. It is no longer listed if it has not been seen for `patience`.
    pub(in crate::directory) async fn missed(&self, url: &str, now: u64, patience: Duration) -> Result<(), StoreError> {
        let (url, seen) = (url.to_owned(), now.saturating_sub(patience.as_secs()));
        self.run(move |connection| {
            let update = "UPDATE cards SET checked_at = ?2, listed = listed AND last_seen > ?3 WHERE url = ?1";
            connection.prepare_cached(update)?.execute((url, signed(now), signed(seen))).map(drop)
        })
        .await
    }

    /// Removes cards that were not seen since, and what their evaluators offered if no other card is left.
    pub(in crate::directory) async fn forget_cards(&self, before: u64) -> Result<(), StoreError> {
        self.run(move |connection| {
            let work = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
            work.prepare_cached("DELETE FROM cards WHERE last_seen < ?")?.execute([signed(before)])?;
            forget_offers(&work)?;
            work.commit()
        })
        .await
    }
}

fn cards(
    connection: &Connection,
    filter: &CardFilter,
    bytes: usize,
) -> Result<(Vec<CardEntry>, bool), rusqlite::Error> {
    let query = page(filter);
    let mut select = connection.prepare_cached(&query.sql)?;
    let mut rows = select.query(params_from_iter(query.values))?;
    let (mut entries, mut size) = (Vec::new(), 0);
    while let Some(row) = rows.next()? {
        let entry = entry(row)?;
        size += entry.card.get().len();
        if entries.len() as u64 >= filter.limit || (size > bytes && !entries.is_empty()) {
            return Ok((entries, true));
        }
        entries.push(entry);
    }
    Ok((entries, false))
}

/// The query for a page, and for one card more.
fn page(filter: &CardFilter) -> Conditions {
    let mut query = Conditions::new("SELECT id, url, pay_to, first_seen, last_seen, card FROM cards WHERE listed = 1");
    query.push(" AND id > ?", signed(filter.after));
    if let Some(skill) = &filter.skill {
        query.push(" AND id IN (SELECT card FROM card_skills WHERE skill = ?)", skill.clone());
    }
    if let Some(network) = filter.network {
        let chain_id = network.chain_id().cast_signed();
        query.push(" AND id IN (SELECT card FROM card_networks WHERE chain_id = ?)", chain_id);
    }
    if let Some(price) = filter.max_price {
        query.push(" AND price <= ?", signed(price));
    }
    query.push(" ORDER BY id LIMIT ?", signed(filter.limit.saturating_add(1)));
    query
}

fn entry(row: &Row<'_>) -> Result<CardEntry, rusqlite::Error> {
    Ok(CardEntry {
        id: number(row, "id")?,
        url: row.get("url")?,
        pay_to: address(row, "pay_to")?,
        first_seen: number(row, "first_seen")?,
        last_seen: number(row, "last_seen")?,
        card: row.get::<_, Json<_>>("card")?.0,
    })
}

fn offered(connection: &Connection, evaluator: Address, skill: &str) -> Result<Offered, rusqlite::Error> {
    let price = connection
        .prepare_cached("SELECT price FROM offered WHERE evaluator = ? AND skill = ?")?
        .query_row((evaluator.as_slice(), skill), |row| number(row, "price"))
        .optional()?;
    if let Some(price) = price {
        return Ok(Offered::For(price));
    }
    let is_known = "SELECT EXISTS (SELECT 1 FROM offered WHERE evaluator = ?)";
    let is_known = ask(connection, is_known, [evaluator.as_slice()])? != 0;
    Ok(if is_known { Offered::OtherSkills } else { Offered::Nothing })
}
