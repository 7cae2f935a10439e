//! The cards of a directory, and the skills and prices that evaluators have offered on them.

use std::time::Duration;

use alloy_primitives::Address;
use rusqlite::{Connection, OptionalExtension as _, Row, TransactionBehavior, params_from_iter};
use url::Url;

use super::{Conditions, DirectoryStore, Filter, Json, Limits, StoreError, address, ask, number, signed};
use crate::report::CardEntry;
use x402_market::{CARD_PATH, shared::below};

/// What an evaluator has offered, on any of its cards.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Offered {
    /// The skill. This was its lowest price per output, in atomic units.
    For(u64),
    OtherSkills,
    Nothing,
}

impl DirectoryStore {
    /// Returns when a listed card was last fetched, in seconds since the Unix epoch.
    pub(crate) async fn checked_at(&self, url: &str) -> Result<Option<u64>, StoreError> {
        let url = url.to_owned();
        self.run(move |connection| {
            let select = "SELECT checked_at FROM cards WHERE url = ? AND listed = 1";
            connection.prepare_cached(select)?.query_row([url], |row| number(row, "checked_at")).optional()
        })
        .await
    }

    /// Returns a page of listed cards by number, and whether there are more. After the first card, a page holds at most `bytes` bytes.
    pub(crate) async fn cards(&self, filter: &Filter, bytes: usize) -> Result<(Vec<CardEntry>, bool), StoreError> {
        let (query, limit) = (page(filter), filter.limit);
        self.run(move |connection| {
            let mut select = connection.prepare_cached(&query.sql)?;
            let mut rows = select.query(params_from_iter(query.values))?;
            let (mut entries, mut size) = (Vec::new(), 0);
            while let Some(row) = rows.next()? {
                let entry = entry(row)?;
                size += entry.card.get().len();
                if entries.len() as u64 >= limit || (size > bytes && !entries.is_empty()) {
                    return Ok((entries, true));
                }
                entries.push(entry);
            }
            Ok((entries, false))
        })
        .await
    }

    /// Stores a card that was just fetched. If there are too many, it replaces an unlisted one, or the one unseen for longest whose
    /// evaluator has no report.
    pub(crate) async fn put_card(&self, card: &Card, now: u64, limits: &Limits) -> Result<Listed, StoreError> {
        let (card, now, limits) = (card.clone(), signed(now), *limits);
        self.run(move |connection| put_card(connection, &card, now, &limits)).await
    }

    /// Returns what this payee has offered for a skill.
    pub(crate) async fn offered(&self, evaluator: Address, skill: &str) -> Result<Offered, StoreError> {
        let skill = skill.to_owned();
        self.run(move |connection| {
            let price = "SELECT price FROM offered WHERE evaluator = ? AND skill = ?";
            let mut price = connection.prepare_cached(price)?;
            let price = price.query_row((evaluator.as_slice(), skill), |row| number(row, "price")).optional()?;
            if let Some(price) = price {
                return Ok(Offered::For(price));
            }
            let is_known = "SELECT EXISTS (SELECT 1 FROM offered WHERE evaluator = ?)";
            let is_known = ask(connection, is_known, [evaluator.as_slice()])? != 0;
            Ok(if is_known { Offered::OtherSkills } else { Offered::Nothing })
        })
        .await
    }

    /// Returns the URLs of cards that were last fetched at `until` or before, oldest first.
    pub(crate) async fn due(&self, until: u64, limit: u64) -> Result<Vec<String>, StoreError> {
        self.run(move |connection| {
            let select = "SELECT url FROM cards WHERE checked_at <= ? ORDER BY checked_at LIMIT ?";
            let mut select = connection.prepare_cached(select)?;
            let urls = select.query_map([signed(until), signed(limit)], |row| row.get::<_, String>("url"))?;
            urls.collect()
        })
        .await
    }

    /// Records that a card could not be fetched. It is unlisted if it has not been seen for `patience`.
    pub(crate) async fn missed(&self, url: &str, now: u64, patience: Duration) -> Result<(), StoreError> {
        let (url, seen) = (url.to_owned(), now.saturating_sub(patience.as_secs()));
        self.run(move |connection| {
            let update = "UPDATE cards SET checked_at = ?2, listed = listed AND last_seen > ?3 WHERE url = ?1";
            connection.prepare_cached(update)?.execute((url, signed(now), signed(seen))).map(drop)
        })
        .await
    }

    /// Deletes cards that were last seen before `before`, and the offers of evaluators without a card.
    pub(crate) async fn delete_cards(&self, before: u64) -> Result<(), StoreError> {
        self.run(move |connection| {
            let work = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
            work.prepare_cached("DELETE FROM cards WHERE last_seen < ?")?.execute([signed(before)])?;
            delete_offers(&work)?;
            work.commit()
        })
        .await
    }
}

/// Returns the query for a page and one card more.
fn page(filter: &Filter) -> Conditions {
    let mut query = Conditions::new("SELECT id, url, pay_to, first_seen, last_seen, card FROM cards WHERE listed = 1");
    query.push(" AND id > ?", signed(filter.after));
    if let Some(skill) = &filter.skill {
        query.push(" AND id IN (SELECT card FROM card_skills WHERE skill = ?)", skill.clone());
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

/// How many skills an evaluator may have offered. None is deleted to make room: then it could choose which reports are accepted.
const MAX_OFFERED: i64 = 256;

/// A card to store.
#[derive(Clone)]
pub(crate) struct Card {
    pub(crate) url: String,
    pub(crate) host: String,
    /// The evaluator's endpoint, as it was signed.
    pub(crate) endpoint: String,
    pub(crate) pay_to: Address,
    pub(crate) price: u64,
    pub(crate) json: String,
    pub(crate) skills: Vec<String>,
}

/// What became of a card.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Listed {
    New,
    Renewed,
    /// Its evaluator is listed under this URL.
    At(String),
    /// The URL is pinned to another payee.
    PayeeChanged(Address),
    TooManyOfHost,
    TooManyOfPayee,
    TooManySkills,
    /// There is no room, and every card's evaluator has reports.
    Full,
}

/// Deletes the offers of evaluators without a card.
fn delete_offers(work: &Connection) -> Result<(), rusqlite::Error> {
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
    let Alternatives { better, is_unlisted, worse } = alternatives(&work, card)?;
    if let Some(better) = better {
        // One evaluator takes one place: the better URL keeps it.
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
            // A report protects all cards of its payee: without a limit one payee could fill the directory for good.
            let of_payee = ask(&work, "SELECT count(*) FROM cards WHERE pay_to = ?", [card.pay_to.as_slice()])?;
            if of_payee >= signed(limits.cards_per_payee) {
                return Ok(Listed::TooManyOfPayee);
            }
            if !make_room(&work, limits.cards)? {
                return Ok(Listed::Full);
            }
            (insert(&work, card, now)?, if is_unlisted { Listed::Renewed } else { Listed::New })
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
    work.commit()?;
    Ok(listed)
}

/// Other URLs under which the same evaluator is stored.
#[derive(Default)]
struct Alternatives {
    /// A listed URL that is closer to where the card belongs.
    better: Option<String>,
    /// Whether such a URL is stored but unlisted. It is fetched again, and then takes the place back.
    is_unlisted: bool,
    /// Cards that are replaced.
    worse: Vec<i64>,
}

/// Finds the same evaluator under other URLs: servers show one card at many, and anybody may list any of them.
fn alternatives(work: &Connection, card: &Card) -> Result<Alternatives, rusqlite::Error> {
    let select = "SELECT id, url, listed FROM cards WHERE pay_to = ? AND endpoint = ? AND url != ?";
    let mut select = work.prepare_cached(select)?;
    let mut rows = select.query((card.pay_to.as_slice(), &card.endpoint, &card.url))?;
    let mut found = Alternatives::default();
    while let Some(row) = rows.next()? {
        let (id, url, is_listed): (i64, String, bool) = (row.get(0)?, row.get(1)?, row.get(2)?);
        let is_better = rank(&url, &card.endpoint) < rank(&card.url, &card.endpoint);
        match (is_better, is_listed) {
            (true, true) => found.better = Some(url),
            (true, false) => found.is_unlisted = true,
            (false, _) => found.worse.push(id),
        }
    }
    Ok(found)
}

/// Ranks a card's URL: best is the one directly beside its endpoint, then the shortest.
fn rank<'a>(url: &'a str, endpoint: &str) -> (bool, usize, &'a str) {
    let base = endpoint.parse::<Url>().ok().and_then(|endpoint| endpoint.join(".").ok());
    let beside = base.and_then(|base| below(&base, CARD_PATH));
    (beside.is_none_or(|beside| beside.as_str() != url), url.len(), url)
}

fn insert(work: &Connection, card: &Card, now: i64) -> Result<i64, rusqlite::Error> {
    let insert = "INSERT INTO cards (url, host, endpoint, pay_to, card, first_seen, last_seen, checked_at, listed) \
        VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?6, ?6, 1)";
    let values = (&card.url, &card.host, &card.endpoint, card.pay_to.as_slice(), &card.json, now);
    work.prepare_cached(insert)?.insert(values)
}

/// Updates a stored card, its URL included, and clears its skills.
fn renew(work: &Connection, id: i64, card: &Card, now: i64) -> Result<(), rusqlite::Error> {
    let update = "UPDATE cards SET url = ?2, host = ?3, endpoint = ?4, card = ?5, last_seen = ?6, checked_at = ?6, listed = 1 \
        WHERE id = ?1";
    work.prepare_cached(update)?.execute((id, &card.url, &card.host, &card.endpoint, &card.json, now))?;
    work.prepare_cached("DELETE FROM card_skills WHERE card = ?")?.execute([id]).map(drop)
}

/// Records that the card has this skill and that its evaluator has offered it.
fn offer(work: &Connection, id: i64, card: &Card, skill: &str, now: i64) -> Result<(), rusqlite::Error> {
    work.prepare_cached("INSERT OR IGNORE INTO card_skills (skill, card) VALUES (?, ?)")?.execute((skill, id))?;
    let offered = "INSERT INTO offered (evaluator, skill, seen, price) VALUES (?1, ?2, ?3, ?4) \
        ON CONFLICT DO UPDATE SET seen = ?3, price = min(price, ?4)";
    let values = (card.pay_to.as_slice(), skill, now, signed(card.price));
    work.prepare_cached(offered)?.execute(values).map(drop)
}

/// Makes room for one more card. Returns `false` if no card may be deleted.
fn make_room(work: &Connection, limit: u64) -> Result<bool, rusqlite::Error> {
    if ask(work, "SELECT count(*) FROM cards", [])? < signed(limit) {
        return Ok(true);
    }
    let delete = "DELETE FROM cards WHERE id = (SELECT id FROM cards AS card \
        WHERE listed = 0 OR NOT EXISTS (SELECT 1 FROM reports WHERE evaluator = card.pay_to) \
        ORDER BY listed, last_seen, id LIMIT 1)";
    let deleted = work.prepare_cached(delete)?.execute([])?;
    delete_offers(work)?;
    Ok(deleted > 0)
}
