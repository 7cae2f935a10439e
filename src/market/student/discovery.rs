//! Finds out who can be hired.

use std::{
    collections::{HashMap, hash_map},
    sync::Arc,
    time::Duration,
};

use alloy_primitives::Address;
use tokio::{task::JoinSet, time::timeout};
use url::Url;

use super::{CardSource, Inner, SourceError, roster::NotEntered};
use crate::market::{CardError, VerifiedCard};

/// How many cards are fetched at once.
const AT_ONCE: usize = 16;
/// How long a source may think.
const PATIENCE: Duration = Duration::from_secs(60);

/// Who was found, who was not taken and why.
#[derive(Debug, Default)]
#[non_exhaustive]
pub struct DiscoveryReport {
    /// Evaluators that can be hired, those that were known before included.
    pub found: Vec<Found>,
    /// Who was named and is no evaluator to hire.
    pub refused: Vec<Refused>,
    /// Sources that named nobody, and why.
    pub failed: Vec<SourceError>,
    /// How many more were named than are looked at.
    pub left_out: usize,
}

/// An evaluator that can be hired.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Found {
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
pub struct Refused {
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
    /// Another evaluator has the same payee.
    #[error("its payee is that of {0}")]
    SamePayee(Url),
    /// No more evaluators are remembered.
    #[error("{0} evaluators are known; no more are remembered")]
    Full(usize),
}

/// Asks all sources, and whoever they name for its card.
pub(super) async fn discover(inner: &Arc<Inner>) -> DiscoveryReport {
    let mut report = DiscoveryReport::default();
    let mut urls = named(inner, &mut report).await.into_iter();
    let mut fetches = JoinSet::new();
    loop {
        while fetches.len() < AT_ONCE
            && let Some((url, is_strange)) = urls.next()
        {
            let inner = inner.clone();
            fetches.spawn(async move { (inner.card(&url, is_strange).await, url, is_strange) });
        }
        let Some(fetched) = fetches.join_next().await else { break };
        let Ok((card, url, is_strange)) = fetched else { continue };
        match enter(inner, &url, is_strange, card) {
            Ok(found) => report.found.push(found),
            Err(reason) => report.refused.push(Refused { url, reason }),
        }
    }
    report
}

/// Everyone who is named, once, and whether by strangers only.
async fn named(inner: &Arc<Inner>, report: &mut DiscoveryReport) -> Vec<(Url, bool)> {
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

fn enter(
    inner: &Inner,
    url: &Url,
    is_strange: bool,
    card: Result<Arc<VerifiedCard>, CardError>,
) -> Result<Found, RefusedReason> {
    let card = card.inspect_err(|error| {
        let may_pass = matches!(
            error,
            CardError::Unreachable(_) | CardError::Late | CardError::Status(500..=599) | CardError::NotPublic
        );
        if !may_pass && let Some(entry) = inner.desk().roster.at(url) {
            entry.banned = true;
        }
    })?;
    let accepts = &card.pricing().accepts;
    let is_ours = |token: &crate::market::AcceptedToken| {
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
    match desk.roster.enter((url.clone(), is_strange), card, &desk.skills, first_seen) {
        Ok(is_new) => Ok(Found { url: url.clone(), evaluator, name, is_new }),
        Err(NotEntered::Full(limit)) => Err(RefusedReason::Full(limit)),
        Err(NotEntered::SamePayee(other)) => Err(RefusedReason::SamePayee(other)),
    }
}
