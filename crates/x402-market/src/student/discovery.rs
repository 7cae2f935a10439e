//! Where evaluators are found, and how their cards are checked.

use std::{
    collections::{HashMap, HashSet, hash_map},
    error::Error,
    sync::Arc,
    time::Duration,
};

use alloy_primitives::Address;
use async_trait::async_trait;
use auto_impl::auto_impl;
use futures_util::{
    future::join_all,
    stream::{self, StreamExt as _},
};
use tokio::time::timeout;
use url::Url;
use x402_bazaar::{DiscoveryClient, DiscoveryFilter};

use super::{
    Inner,
    known::{MAX_MISSES, Place, RefusedReason},
    state::State,
};
use crate::{CardError, card::Fetched};

/// How many cards are fetched at once.
const MAX_CONCURRENT_FETCHES: usize = 16;
/// How long a source may take to answer.
const SOURCE_TIMEOUT: Duration = Duration::from_secs(60);

/// A source of URLs of evaluators: a URL, a list of URLs, a facilitator's list of resources, a directory.
///
/// Sources are hints. Each evaluator must show a signed card before it is hired.
///
/// ```
/// use url::Url;
/// use x402_market::{CardSource, SourceError};
///
/// /// Evaluators named in an environment variable, separated by commas.
/// struct FromEnvironment;
///
/// #[async_trait::async_trait]
/// impl CardSource for FromEnvironment {
///     async fn evaluators(&self) -> Result<Vec<Url>, SourceError> {
///         let urls = std::env::var("EVALUATORS").map_err(SourceError::new)?;
///         urls.split(',').map(|url| url.parse().map_err(SourceError::new)).collect()
///     }
///
///     fn is_untrusted(&self) -> bool {
///         false
///     }
/// }
/// ```
#[async_trait]
#[auto_impl(Arc)]
pub trait CardSource: Send + Sync + 'static {
    /// Returns base URLs of evaluators, or URLs of their cards (`….json`), the most promising first.
    ///
    /// # Errors
    /// [`SourceError`] if the source cannot be read.
    async fn evaluators(&self) -> Result<Vec<Url>, SourceError>;

    /// Returns `true` if anybody can add URLs to the source. Evaluators from such sources are refused on this machine and in private
    /// networks, unless [`private_hosts`](super::StudentBuilder::private_hosts) is set. Default: `true`.
    fn is_untrusted(&self) -> bool {
        true
    }
}

/// The reason why a source returned no URLs.
#[derive(Debug, thiserror::Error)]
#[error("could not read a source of evaluators")]
pub struct SourceError(#[source] Box<dyn Error + Send + Sync>);

impl SourceError {
    /// Wraps the error of a source.
    pub fn new(source: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self(source.into())
    }
}

#[async_trait]
impl CardSource for Url {
    async fn evaluators(&self) -> Result<Vec<Url>, SourceError> {
        Ok(vec![self.clone()])
    }

    fn is_untrusted(&self) -> bool {
        false
    }
}

#[async_trait]
impl CardSource for Vec<Url> {
    async fn evaluators(&self) -> Result<Vec<Url>, SourceError> {
        Ok(self.clone())
    }

    fn is_untrusted(&self) -> bool {
        false
    }
}

/// All resources that are paid for over HTTP. The card is looked for beside the resource, where
/// [`EvaluatorService`](crate::EvaluatorService) serves it.
#[async_trait]
impl CardSource for DiscoveryClient {
    async fn evaluators(&self) -> Result<Vec<Url>, SourceError> {
        let filter = DiscoveryFilter::default().kind("http");
        let found = self.list(&filter).await.map_err(SourceError::new)?;
        let mut seen = HashSet::new();
        let http = found.resources.into_iter().filter(|resource| resource.kind == "http");
        let bases = http.filter_map(|resource| resource.url.join(".").ok());
        Ok(bases.filter(|base| seen.insert(base.clone())).collect())
    }
}

/// The result of [`Student::discover`](super::Student::discover).
#[derive(Debug, Default)]
#[non_exhaustive]
pub struct DiscoveryReport {
    /// Evaluators that can be hired, including those known before.
    pub found: Vec<FoundEvaluator>,
    /// Evaluators that were named and cannot be hired.
    pub refused: Vec<RefusedEvaluator>,
    /// The errors of sources that could not be read.
    pub failed: Vec<SourceError>,
    /// The number of URLs that were not looked at because there were too many.
    pub left_out: usize,
}

/// An evaluator that can be hired.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct FoundEvaluator {
    /// The URL that named it.
    pub url: Url,
    /// The address that is paid.
    pub evaluator: Address,
    /// The name on its card.
    pub name: String,
    /// `true` if it was not known before.
    pub is_new: bool,
}

/// An evaluator that cannot be hired.
#[derive(Debug)]
#[non_exhaustive]
pub struct RefusedEvaluator {
    /// The URL that named it.
    pub url: Url,
    /// Why it cannot be hired.
    pub reason: RefusedReason,
}

/// Asks all sources, and fetches the cards that they name.
pub(super) async fn discover(inner: &Arc<Inner>) -> DiscoveryReport {
    let mut report = DiscoveryReport::default();
    let named = read_sources(inner, &mut report).await;
    let mut round = Round { inner, fetched: HashSet::new() };
    let mut waiting = Vec::new();
    fetch_cards(inner, named, |place, fetched| match round.note(&place, fetched) {
        // Whether another evaluator has left its place is known only when all cards were fetched.
        Ok(card) => match insert(inner, &place, &card) {
            Err(RefusedReason::SamePayee(_) | RefusedReason::Full(_)) => waiting.push((place, card)),
            inserted => report.add(place, inserted),
        },
        Err(error) => report.refused.push(RefusedEvaluator { url: place.0, reason: error.into() }),
    })
    .await;
    let previous = waiting.iter().filter_map(|((url, _), card)| round.previous_place(url, card));
    let previous: HashMap<Url, bool> = previous.collect();
    fetch_cards(inner, previous, |place, fetched| {
        if let Ok(card) = round.note(&place, fetched) {
            // No source named it, so it is not in the report.
            let _ = insert(inner, &place, &card);
        }
    })
    .await;
    for (place, card) in waiting {
        round.relocate(&place, &card);
        let inserted = insert(inner, &place, &card);
        report.add(place, inserted);
    }
    report
}

impl DiscoveryReport {
    fn add(&mut self, (url, _): Place, inserted: Result<FoundEvaluator, RefusedReason>) {
        match inserted {
            Ok(found) => self.found.push(found),
            Err(reason) => self.refused.push(RefusedEvaluator { url, reason }),
        }
    }
}

/// Asks all sources for URLs. A URL that several sources name appears once, and is untrusted if all of them are.
async fn read_sources(inner: &Arc<Inner>, report: &mut DiscoveryReport) -> Vec<Place> {
    let asked = inner.sources.iter().cloned().map(|(source, is_untrusted)| async move {
        let urls = timeout(SOURCE_TIMEOUT, source.evaluators()).await;
        (is_untrusted, urls.unwrap_or_else(|elapsed| Err(SourceError::new(elapsed))))
    });
    let (mut places, mut positions): (Vec<Place>, HashMap<Url, usize>) = (Vec::new(), HashMap::new());
    for (is_untrusted, urls) in join_all(asked).await {
        let urls = urls.unwrap_or_else(|error| {
            report.failed.push(error);
            Vec::new()
        });
        for url in urls {
            match positions.entry(url) {
                hash_map::Entry::Vacant(new) => {
                    places.push((new.key().clone(), is_untrusted));
                    new.insert(places.len() - 1);
                }
                hash_map::Entry::Occupied(before) => places[*before.get()].1 &= is_untrusted,
            }
        }
    }
    report.left_out = places.len().saturating_sub(inner.max_named);
    places.truncate(inner.max_named);
    places
}

/// Fetches the cards at these places, a few at a time.
async fn fetch_cards(
    inner: &Inner,
    places: impl IntoIterator<Item = Place>,
    mut with: impl FnMut(Place, Result<Fetched, CardError>),
) {
    let fetches = places.into_iter().map(|(url, is_untrusted)| async move {
        let fetched = inner.cards.look(&url, is_untrusted).await;
        ((url, is_untrusted), fetched)
    });
    let mut fetches = stream::iter(fetches).buffer_unordered(MAX_CONCURRENT_FETCHES);
    while let Some((place, fetched)) = fetches.next().await {
        with(place, fetched);
    }
}

/// The cards fetched in one call of [`discover`].
struct Round<'a> {
    inner: &'a Inner,
    fetched: HashSet<Url>,
}

impl Round<'_> {
    /// Notes what is at a place. An evaluator without a valid card is not hired any more; one that could not be reached stays.
    fn note(&mut self, (url, _): &Place, fetched: Result<Fetched, CardError>) -> Result<Fetched, CardError> {
        self.fetched.insert(url.clone());
        fetched.inspect_err(|error| {
            let is_temporary = matches!(
                error,
                CardError::Unreachable(_)
                    | CardError::Timeout
                    | CardError::Status(408 | 429 | 500..=599)
                    | CardError::NotPublic
            );
            if let Some(known) = self.inner.state().evaluators.at(url) {
                match is_temporary {
                    true => known.misses = known.misses.saturating_add(1),
                    false => known.is_banned = true,
                }
            }
        })
    }

    /// Returns where else the payee of this card is known, unless that place was fetched in this round.
    fn previous_place(&self, url: &Url, card: &Fetched) -> Option<Place> {
        let state = self.inner.state();
        let other = state.evaluators.elsewhere(card.card.pay_to(), url)?;
        (!self.fetched.contains(&other.url)).then(|| (other.url.clone(), other.is_untrusted))
    }

    /// Moves a payee whose card is no longer at its known place to this one.
    ///
    /// Only the payee's key can have signed the card, but an old card can be copied. So the payee is not moved while its card is still at
    /// the known place, or was there a moment ago.
    fn relocate(&self, place: &Place, card: &Fetched) {
        let mut state = self.inner.state();
        let payee = card.card.pay_to();
        let Some(other) = state.evaluators.elsewhere(payee, &place.0) else { return };
        if other.is_banned || other.misses >= MAX_MISSES {
            let left = other.url.clone();
            state.evaluators.relocate(payee, place.clone());
            forget_unless_hired(self.inner, &state, &left, payee);
        }
    }
}

/// Adds the evaluator whose card is at a place, if there is room for it.
fn insert(inner: &Inner, place: &Place, fetched: &Fetched) -> Result<FoundEvaluator, RefusedReason> {
    let (url, card) = (&place.0, &fetched.card);
    let accepts = &card.pricing().accepts;
    let is_ours = |token: &crate::AcceptedToken| {
        inner.payer.assets().iter().any(|asset| asset.network == token.network && asset.address == token.asset)
    };
    if !accepts.iter().any(is_ours) {
        return Err(RefusedReason::Token);
    }
    let (evaluator, name) = (card.pay_to(), card.card().name.clone());
    let mut state = inner.state();
    let state = &mut *state;
    if let Some(other) = state.evaluators.elsewhere(evaluator, url) {
        return Err(RefusedReason::SamePayee(other.url.clone()));
    }
    if state.evaluators.find(evaluator).is_none()
        && let Some(replaced) = state.evaluators.next_replaced()?
    {
        forget_unless_hired(inner, state, &replaced.url, replaced.card.pay_to());
    }
    // Not before: an evaluator that is refused may have any number of URLs.
    inner.cards.keep(fetched)?;
    let is_new = state.evaluators.insert(place, card.clone(), &state.skills)?;
    Ok(FoundEvaluator { url: url.clone(), evaluator, name, is_new })
}

/// Forgets the payee of a place that it has left, unless the evaluator was ever hired.
fn forget_unless_hired(inner: &Inner, state: &State, place: &Url, payee: Address) {
    if !state.spending.has(payee) {
        inner.cards.forget(place);
    }
}
