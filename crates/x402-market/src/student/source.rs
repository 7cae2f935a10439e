//! Where evaluators are heard of.

use std::{collections::HashMap, error::Error, sync::Arc};

use alloy_primitives::Address;
use async_trait::async_trait;
use tower_x402::client::{DiscoveryClient, DiscoveryFilter};
use url::Url;

use crate::directory::{CardQuery, DirectoryClient};

/// Knows where evaluators are: a URL, a list of them, a facilitator's list of what can be paid for, a directory.
///
/// What it says is a hint and no more: whoever it names must show a signed card.
#[async_trait]
pub trait CardSource: Send + Sync + 'static {
    /// Base URLs of evaluators, or those of their cards (`….json`), the most promising first.
    ///
    /// # Errors
    /// [`SourceError`] if it has nothing to say.
    async fn evaluators(&self) -> Result<Vec<Url>, SourceError>;

    /// Whether it names whom strangers told it of. These are not to be on this machine or in a private network, unless the student
    /// is [told otherwise](super::StudentBuilder::private_hosts). It does, if it does not say that it does not.
    fn is_untrusted(&self) -> bool {
        true
    }
}

/// Why a source named nobody.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct SourceError(#[source] Box<dyn Error + Send + Sync>);

impl SourceError {
    /// It failed for this reason.
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

/// All that is spoken with over HTTP: the card is looked for beside each resource that can be paid for, as
/// [`EvaluatorService`](crate::EvaluatorService) has it.
#[async_trait]
impl CardSource for DiscoveryClient {
    async fn evaluators(&self) -> Result<Vec<Url>, SourceError> {
        let filter = DiscoveryFilter { kind: Some("http".to_owned()), ..DiscoveryFilter::default() };
        let found = self.list(&filter).await.map_err(SourceError::new)?;
        let mut urls: Vec<Url> = Vec::new();
        let mut seen = std::collections::HashSet::new();
        for resource in found.resources.into_iter().filter(|resource| resource.kind == "http") {
            if let Ok(base) = resource.url.join(".")
                && seen.insert(base.clone())
            {
                urls.push(base);
            }
        }
        Ok(urls)
    }
}

/// All whose cards the directory lists: each payee's first card, then each one's second, and so on. A student looks at a limited number,
/// and nobody takes more of that for listing more cards.
#[async_trait]
impl CardSource for DirectoryClient {
    async fn evaluators(&self) -> Result<Vec<Url>, SourceError> {
        let cards = self.cards(&CardQuery::default()).await.map_err(SourceError::new)?;
        let mut named: HashMap<Address, usize> = HashMap::new();
        let in_turn = cards.found.into_iter().map(|found| {
            let turn = named.entry(found.card.pay_to()).or_default();
            *turn += 1;
            (*turn, found.url)
        });
        let mut in_turn: Vec<(usize, Url)> = in_turn.collect();
        // Stable: within a turn the order stays the directory's.
        in_turn.sort_by_key(|(turn, _)| *turn);
        Ok(in_turn.into_iter().map(|(_, url)| url).collect())
    }
}

#[async_trait]
impl<S: CardSource + ?Sized> CardSource for Arc<S> {
    async fn evaluators(&self) -> Result<Vec<Url>, SourceError> {
        self.as_ref().evaluators().await
    }

    fn is_untrusted(&self) -> bool {
        self.as_ref().is_untrusted()
    }
}

#[async_trait]
impl<S: CardSource + ?Sized> CardSource for Box<S> {
    async fn evaluators(&self) -> Result<Vec<Url>, SourceError> {
        self.as_ref().evaluators().await
    }

    fn is_untrusted(&self) -> bool {
        self.as_ref().is_untrusted()
    }
}
