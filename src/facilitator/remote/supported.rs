//! The answer of a facilitator's `/supported`, cached.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use tokio::time::Instant;

use super::{api::Api, message::read_object};
use crate::{facilitator::FacilitatorError, network::Network, protocol::SupportedResponse};

/// How long an answer is used.
const FRESH: Duration = Duration::from_secs(300);
/// How long to wait before a facilitator that does not answer is asked again.
const RETRY: Duration = Duration::from_secs(5);

/// How many networks have metrics of their own.
const MAX_NETWORKS: usize = 16;

#[derive(Debug, Default)]
pub(super) struct Supported {
    known: Mutex<Option<(Instant, Arc<SupportedResponse>)>>,
    /// Held while the facilitator is asked: concurrent callers wait for the same answer.
    asking: tokio::sync::Mutex<()>,
}

impl Supported {
    /// Returns the cached answer, or else asks. If the facilitator does not answer, returns its last answer.
    pub(super) async fn get(&self, api: &Api) -> Result<Arc<SupportedResponse>, FacilitatorError> {
        if let Some(fresh) = self.fresh() {
            return Ok(fresh);
        }
        let _asking = self.asking.lock().await;
        if let Some(fresh) = self.fresh() {
            return Ok(fresh);
        }
        let answer = api.get("supported").await.ok().filter(|answer| answer.status.is_success());
        let said = answer.and_then(|answer| read_object::<SupportedResponse>(&answer.body));
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        match (said, known.as_ref()) {
            (Some(said), _) => {
                let said = Arc::new(said);
                *known = Some((Instant::now(), said.clone()));
                Ok(said)
            }
            (None, Some((_, stale))) => Ok(stale.clone()),
            (None, None) => Err(FacilitatorError::Unreachable { what: "the facilitator", retry_after: RETRY }),
        }
    }

    /// Returns `true` if its last answer includes `exact` payments of v2 on this network. Does not ask.
    pub(super) fn serves(&self, network: Network) -> bool {
        let known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let named = network.to_string();
        known.as_ref().is_some_and(|(_, said)| {
            said.kinds.iter().any(|kind| {
                kind.x402_version == 2
                    && kind.scheme == "exact"
                    && (kind.network == named || kind.network == "eip155:*")
            })
        })
    }

    /// Returns the networks that its last answer names for `exact` payments of v2.
    pub(super) fn networks(&self) -> Vec<Network> {
        let known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let kinds = known.iter().flat_map(|(_, said)| &said.kinds);
        let exact = kinds.filter(|kind| kind.x402_version == 2 && kind.scheme == "exact");
        exact.filter_map(|kind| kind.network.parse().ok()).take(MAX_NETWORKS).collect()
    }

    fn fresh(&self) -> Option<Arc<SupportedResponse>> {
        let known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        known.as_ref().filter(|(at, _)| at.elapsed() < FRESH).map(|(_, said)| said.clone())
    }
}
