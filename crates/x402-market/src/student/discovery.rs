//! Finds out who can be hired.

use std::{
    collections::{HashMap, HashSet, hash_map},
    sync::Arc,
    time::Duration,
};

use alloy_primitives::Address;
use tokio::{task::JoinSet, time::timeout};
use url::Url;

use super::{CardSource, Inner, SourceError, desk::Desk, roster::NotEntered};
use crate::{CardError, card::Fetched};

/// How many times in a row somebody's card must have been out of reach to be taken for gone.
const MISSES: u32 = 3;
/// How many cards are fetched at once.
const AT_ONCE: usize = 16;
/// How long a source may think.
const PATIENCE: Duration = Duration::from_secs(60);

/// Who was found, who was not taken and why.
#[derive(Debug, Default)]
#[non_exhaustive]
pub struct DiscoveryReport {
    /// Evaluators that can be hired, those that were known before included.
    pub found: Vec<FoundEvaluator>,
    /// Who was named and is no evaluator to hire.
    pub refused: Vec<RefusedEvaluator>,
    /// Sources that named nobody, and why.
    pub failed: Vec<SourceError>,
    /// How many more were named than are looked at.
    pub left_out: usize,
}

/// An evaluator that can be hired.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct FoundEvaluator {
    /// Where it is.
    pub url: Url,
    /// Who is paid.
    pub evaluator: Address,
    /// Its name, by its card.
    pub name: String,
    /// Whether it was not known before.
    pub is_new: bool,
}

/// Somebody who is not hired.
#[derive(Debug)]
#[non_exhaustive]
pub struct RefusedEvaluator {
    /// Where.
    pub url: Url,
    /// Why.
    pub reason: RefusedReason,
}

/// Why somebody cannot be hired.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RefusedReason {
    /// Its card could not be fetched, or is not to be believed.
    #[error(transparent)]
    Card(#[from] CardError),
    /// It takes no token that the payer pays with.
    #[error("it takes none of the tokens that the payer pays with")]
    Token,
    /// Its payee is known by another URL, where its card still is.
    #[error("its payee is that of {0}")]
    SamePayee(Url),
    /// No more evaluators are remembered, and the cards of all who are may be believed.
    #[error("{0} evaluators are known; no more are remembered")]
    Full(usize),
}

/// Where somebody was named, and whether by strangers only.
type Place = (Url, bool);

/// Asks all sources, and whoever they name for its card.
pub(super) async fn discover(inner: &Arc<Inner>) -> DiscoveryReport {
    let mut report = DiscoveryReport::default();
    let named = named(inner, &mut report).await;
    let mut round = Round::new(inner);
    let mut waiting = Vec::new();
    look(inner, named, |place, looked| match round.see(&place, looked) {
        // Whether somebody has left, or is gone for good, is known only when everybody was asked.
        Ok(card) => match enter(inner, &place, &card) {
            Err(RefusedReason::SamePayee(_) | RefusedReason::Full(_)) => waiting.push((place, card)),
            entered => report.note(place, entered),
        },
        Err(error) => report.refused.push(RefusedEvaluator { url: place.0, reason: error.into() }),
    })
    .await;
    let others: HashMap<Url, bool> = waiting.iter().filter_map(|((url, _), card)| round.unseen(url, card)).collect();
    look(inner, others, |place, looked| {
        if let Ok(card) = round.see(&place, looked) {
            // Nobody has named it, so there is nothing to report.
            let _ = enter(inner, &place, &card);
        }
    })
    .await;
    for (place, card) in waiting {
        round.make_way(&place, &card);
        let entered = enter(inner, &place, &card);
        report.note(place, entered);
    }
    report
}

impl DiscoveryReport {
    fn note(&mut self, (url, _): Place, entered: Result<FoundEvaluator, RefusedReason>) {
        match entered {
            Ok(found) => self.found.push(found),
            Err(reason) => self.refused.push(RefusedEvaluator { url, reason }),
        }
    }
}

/// What was seen while everybody was asked.
struct Round<'a> {
    inner: &'a Inner,
    /// Where a card was asked for.
    seen: HashSet<Url>,
}

impl<'a> Round<'a> {
    fn new(inner: &'a Inner) -> Self {
        Self { inner, seen: HashSet::new() }
    }

    /// Notes what is at a place. Who shows no card, or a wrong one, is not hired any more; who could not be asked just now, is.
    fn see(&mut self, (url, _): &Place, looked: Result<Fetched, CardError>) -> Result<Fetched, CardError> {
        self.seen.insert(url.clone());
        looked.inspect_err(|error| {
            let may_pass = matches!(
                error,
                CardError::Unreachable(_)
                    | CardError::Timeout
                    | CardError::Status(408 | 429 | 500..=599)
                    | CardError::NotPublic
            );
            if let Some(entry) = self.inner.desk().roster.at(url) {
                match may_pass {
                    true => entry.missed = entry.missed.saturating_add(1),
                    false => entry.banned = true,
                }
            }
        })
    }

    /// Where else the payee of this card is known, if nobody has looked there yet.
    fn unseen(&self, url: &Url, card: &Fetched) -> Option<Place> {
        let desk = self.inner.desk();
        let other = desk.roster.elsewhere(card.card.pay_to(), url)?;
        (!self.seen.contains(&other.url)).then(|| (other.url.clone(), other.is_strange))
    }

    /// A payee whose card is not where it was is at this place now: only its own key signs that. As long as it is there, too, or was a
    /// moment ago, nobody who shows what it once signed can take it elsewhere.
    fn make_way(&self, place: &Place, card: &Fetched) {
        let mut desk = self.inner.desk();
        let payee = card.card.pay_to();
        let Some(other) = desk.roster.elsewhere(payee, &place.0) else { return };
        if other.banned || other.missed >= MISSES {
            let left = other.url.clone();
            desk.roster.relocate(payee, place.clone());
            leave(self.inner, &desk, &left, payee);
        }
    }
}

/// Looks what is at these places, a few at a time.
async fn look(
    inner: &Arc<Inner>,
    places: impl IntoIterator<Item = Place>,
    mut with: impl FnMut(Place, Result<Fetched, CardError>),
) {
    let mut places = places.into_iter();
    let mut fetches = JoinSet::new();
    loop {
        while fetches.len() < AT_ONCE
            && let Some((url, is_strange)) = places.next()
        {
            let inner = inner.clone();
            fetches.spawn(async move { (inner.cards.look(&url, is_strange).await, (url, is_strange)) });
        }
        match fetches.join_next().await {
            Some(Ok((looked, place))) => with(place, looked),
            Some(Err(_)) => {}
            None => return,
        }
    }
}

/// Everyone who is named, once, and whether by strangers only.
async fn named(inner: &Arc<Inner>, report: &mut DiscoveryReport) -> Vec<Place> {
    let mut asked = JoinSet::new();
    for (number, (source, is_strange)) in inner.sources.iter().cloned().enumerate() {
        asked.spawn(async move {
            let said = timeout(PATIENCE, source.evaluators()).await;
            (number, is_strange, said.unwrap_or_else(|late| Err(SourceError::new(late))))
        });
    }
    let mut said = asked.join_all().await;
    said.sort_by_key(|(number, ..)| *number);
    let (mut urls, mut seen) = (Vec::new(), HashMap::new());
    for (_, is_strange, said) in said {
        let said = said.unwrap_or_else(|error| {
            report.failed.push(error);
            Vec::new()
        });
        for url in said {
            match seen.entry(url) {
                hash_map::Entry::Vacant(new) => {
                    urls.push((new.key().clone(), is_strange));
                    new.insert(urls.len() - 1);
                }
                hash_map::Entry::Occupied(before) => urls[*before.get()].1 &= is_strange,
            }
        }
    }
    report.left_out = urls.len().saturating_sub(inner.max_named);
    urls.truncate(inner.max_named);
    urls
}

/// Enters whoever's card is at a place, if there is a place for it.
fn enter(inner: &Inner, place: &Place, fetched: &Fetched) -> Result<FoundEvaluator, RefusedReason> {
    let (url, card) = (&place.0, &fetched.card);
    let accepts = &card.pricing().accepts;
    let is_ours = |token: &crate::AcceptedToken| {
        inner.payer.assets().iter().any(|asset| asset.network == token.network && asset.address == token.asset)
    };
    if !accepts.iter().any(is_ours) {
        return Err(RefusedReason::Token);
    }
    let (evaluator, name) = (card.pay_to(), card.card().name.clone());
    let now = inner.clock.now();
    let first_seen = || {
        inner.evidence.first_seen(evaluator, now).unwrap_or_else(|error| {
            tracing::warn!(%error, "when an evaluator was first seen could not be recorded");
            now
        })
    };
    let mut desk = inner.desk();
    let desk = &mut *desk;
    if let Some(other) = desk.roster.elsewhere(evaluator, url) {
        return Err(RefusedReason::SamePayee(other.url.clone()));
    }
    if desk.roster.find(evaluator).is_none()
        && let Some(leaving) = desk.roster.next_place()?
    {
        leave(inner, desk, &leaving.url, leaving.card.pay_to());
    }
    // Only now: who is refused may have as many URLs as it likes.
    inner.cards.keep(fetched)?;
    let is_new = desk.roster.enter(place.clone(), card.clone(), &desk.skills, first_seen)?;
    Ok(FoundEvaluator { url: url.clone(), evaluator, name, is_new })
}

/// Forgets whom a place had paid that nobody is at any more, unless that was ever asked for a verdict.
fn leave(inner: &Inner, desk: &Desk, place: &Url, payee: Address) {
    if !desk.ledger.knows(payee) {
        inner.cards.forget(place);
    }
}

impl From<NotEntered> for RefusedReason {
    fn from(reason: NotEntered) -> Self {
        match reason {
            NotEntered::Full(limit) => Self::Full(limit),
            NotEntered::SamePayee(other) => Self::SamePayee(other),
        }
    }
}
