//! Cards, how they are listed, and what evaluators offer or offered.

use std::time::Duration;

use alloy_primitives::Address;
use rusqlite::{Connection, OptionalExtension as _, Row, TransactionBehavior, params_from_iter};
use tower_x402::Network;
use url::Url;

use super::{Conditions, DirectoryStore, Json, Limits, StoreError, address, ask, number, signed};
use crate::{card::CARD_PATH, directory::report::CardEntry, net::below};

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

    /// Keeps a card that was just seen. If there are too many, one makes room: an unlisted one, or the oldest nobody has spoken of.
    pub(in crate::directory) async fn put_card(
        &self,
        card: &Card,
        now: u64,
        limits: &Limits,
    ) -> Result<Listed, StoreError> {
        let (card, now, limits) = (card.clone(), signed(now), *limits);
        self.run(move |connection| put_card(connection, &card, now, &limits)).await
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

/// How many skills an evaluator may have offered; none is forgotten to make room, or it could choose what is said of it.
const MAX_OFFERED: i64 = 256;

/// A card to be kept.
#[derive(Clone)]
pub(in crate::directory) struct Card {
    pub(in crate::directory) url: String,
    pub(in crate::directory) host: String,
    /// Where the evaluator is asked, as it was signed.
    pub(in crate::directory) endpoint: String,
    pub(in crate::directory) pay_to: Address,
    pub(in crate::directory) price: u64,
    pub(in crate::directory) json: String,
    pub(in crate::directory) skills: Vec<String>,
    pub(in crate::directory) networks: Vec<Network>,
}

/// What became of a card.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::directory) enum Listed {
    New,
    Renewed,
    /// Its evaluator is listed by this URL.
    At(String),
    /// The URL is known by another payee.
    PayeeChanged(Address),
    /// There are as many of this host as may be.
    TooManyOfHost,
    /// There are as many of this payee as may be.
    TooManyOfPayee,
    /// Its evaluator has offered as many skills as may be.
    TooManySkills,
    /// There are as many as may be, and all of them have been paid.
    Full,
}

/// What an evaluator offered is forgotten with its last card.
fn forget_offers(work: &Connection) -> Result<(), rusqlite::Error> {
    let delete = "DELETE FROM offered WHERE evaluator NOT IN (SELECT pay_to FROM cards)";
    work.prepare_cached(delete)?.execute([]).map(drop)
}

fn put_card(connection: &mut Connection, card: &Card, now: i64, limits: &Limits) -> Result<Listed, rusqlite::Error> {
    let work = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    let known: Option<(i64, Address)> = work
        .prepare_cached("SELECT id, pay_to FROM cards WHERE url = ?")?
        .query_row([&card.url], |row| Ok((row.get("id")?, address(row, "pay_to")?)))
        .optional()?;
    if let Some((_, payee)) = known
        && payee != card.pay_to
    {
        return Ok(Listed::PayeeChanged(payee));
    }
    let Rivals { better, away, worse } = rivals(&work, card)?;
    if let Some(better) = better {
        // A card that is not looked at where it belongs takes no place.
        if let Some((id, _)) = known {
            work.prepare_cached("DELETE FROM cards WHERE id = ?")?.execute([id])?;
            work.commit()?;
        }
        return Ok(Listed::At(better));
    }
    let (id, listed) = match known.map(|(id, _)| id).or(worse.first().copied()) {
        Some(id) => {
            for other in worse.into_iter().filter(|other| *other != id) {
                work.prepare_cached("DELETE FROM cards WHERE id = ?")?.execute([other])?;
            }
            renew(&work, id, card, now)?;
            (id, Listed::Renewed)
        }
        None => {
            let of_host = ask(&work, "SELECT count(*) FROM cards WHERE host = ?", [&card.host])?;
            if of_host >= signed(limits.cards_per_host) {
                return Ok(Listed::TooManyOfHost);
            }
            // One payment spares all cards of its payee: without a limit one payee could fill the directory for good.
            let of_payee = ask(&work, "SELECT count(*) FROM cards WHERE pay_to = ?", [card.pay_to.as_slice()])?;
            if of_payee >= signed(limits.cards_per_payee) {
                return Ok(Listed::TooManyOfPayee);
            }
            if !make_room(&work, limits.cards)? {
                return Ok(Listed::Full);
            }
            (insert(&work, card, now)?, if away { Listed::Renewed } else { Listed::New })
        }
    };
    for skill in &card.skills {
        offer(&work, id, card, skill, now)?;
    }
    let offered = ask(&work, "SELECT count(*) FROM offered WHERE evaluator = ?", [card.pay_to.as_slice()])?;
    if offered > MAX_OFFERED {
        work.rollback()?;
        return Ok(Listed::TooManySkills);
    }
    for network in &card.networks {
        work.prepare_cached("INSERT OR IGNORE INTO card_networks (chain_id, card) VALUES (?, ?)")?
            .execute((network.chain_id().cast_signed(), id))?;
    }
    work.commit()?;
    Ok(listed)
}

/// The same evaluator by other URLs.
#[derive(Default)]
struct Rivals {
    /// One where its card belongs rather than where it was seen now.
    better: Option<String>,
    /// Whether there is one that is not listed at present. It is asked for again, and takes its place back.
    away: bool,
    /// Those that are not needed any more.
    worse: Vec<i64>,
}

/// Servers show one card at many URLs, and anybody may list any of them.
fn rivals(work: &Connection, card: &Card) -> Result<Rivals, rusqlite::Error> {
    let select = "SELECT id, url, listed FROM cards WHERE pay_to = ? AND endpoint = ? AND url != ?";
    let mut select = work.prepare_cached(select)?;
    let mut rows = select.query((card.pay_to.as_slice(), &card.endpoint, &card.url))?;
    let mut rivals = Rivals::default();
    while let Some(row) = rows.next()? {
        let (id, url, is_listed): (i64, String, bool) = (row.get(0)?, row.get(1)?, row.get(2)?);
        let is_better = rank(&url, &card.endpoint) < rank(&card.url, &card.endpoint);
        match (is_better, is_listed) {
            (true, true) => rivals.better = Some(url),
            (true, false) => rivals.away = true,
            (false, _) => rivals.worse.push(id),
        }
    }
    Ok(rivals)
}

/// How far a card is from where it belongs: directly beside its endpoint, or else at the shortest URL.
fn rank<'a>(url: &'a str, endpoint: &str) -> (bool, usize, &'a str) {
    let base = endpoint.parse::<Url>().ok().and_then(|endpoint| endpoint.join(".").ok());
    let beside = base.and_then(|base| below(&base, CARD_PATH));
    (beside.is_none_or(|beside| beside.as_str() != url), url.len(), url)
}

fn insert(work: &Connection, card: &Card, now: i64) -> Result<i64, rusqlite::Error> {
    let insert = "INSERT INTO cards (url, host, endpoint, pay_to, price, card, first_seen, last_seen, checked_at, listed) \
        VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?7, ?7, 1)";
    let values = (&card.url, &card.host, &card.endpoint, card.pay_to.as_slice(), signed(card.price), &card.json, now);
    work.prepare_cached(insert)?.insert(values)
}

/// Writes a known card as it is now, and where. What it has is written anew, too.
fn renew(work: &Connection, id: i64, card: &Card, now: i64) -> Result<(), rusqlite::Error> {
    let update = "UPDATE cards SET url = ?6, host = ?5, endpoint = ?7, price = ?2, card = ?3, last_seen = ?4, \
        checked_at = ?4, listed = 1 WHERE id = ?1";
    let values = (id, signed(card.price), &card.json, now, &card.host, &card.url, &card.endpoint);
    work.prepare_cached(update)?.execute(values)?;
    for old in ["DELETE FROM card_skills WHERE card = ?", "DELETE FROM card_networks WHERE card = ?"] {
        work.prepare_cached(old)?.execute([id])?;
    }
    Ok(())
}

/// The card has this skill, and its evaluator has offered it.
fn offer(work: &Connection, id: i64, card: &Card, skill: &str, now: i64) -> Result<(), rusqlite::Error> {
    work.prepare_cached("INSERT OR IGNORE INTO card_skills (skill, card) VALUES (?, ?)")?.execute((skill, id))?;
    let offered = "INSERT INTO offered (evaluator, skill, seen, price) VALUES (?1, ?2, ?3, ?4) \
        ON CONFLICT DO UPDATE SET seen = ?3, price = min(price, ?4)";
    let values = (card.pay_to.as_slice(), skill, now, signed(card.price));
    work.prepare_cached(offered)?.execute(values).map(drop)
}

/// Whether there is room for one more card. If there is none, one that may go makes it.
fn make_room(work: &Connection, limit: u64) -> Result<bool, rusqlite::Error> {
    if ask(work, "SELECT count(*) FROM cards", [])? < signed(limit) {
        return Ok(true);
    }
    let delete = "DELETE FROM cards WHERE id = (SELECT id FROM cards AS card \
        WHERE listed = 0 OR NOT EXISTS (SELECT 1 FROM voices WHERE evaluator = card.pay_to) \
        ORDER BY listed, last_seen, id LIMIT 1)";
    let gone = work.prepare_cached(delete)?.execute([])?;
    forget_offers(work)?;
    Ok(gone > 0)
}
