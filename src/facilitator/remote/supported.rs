//! The answer of a facilitator's `/supported`, cached.

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use alloy_primitives::Address;
use tokio::time::Instant;

use super::{
    api::{Answer, Api},
    message::read_object,
};
use crate::{
    facilitator::FacilitatorError,
    network::Network,
    protocol::{SupportedResponse, TransferMethod},
};

/// How long an answer is used.
const FRESH: Duration = Duration::from_secs(300);
/// How long to wait before a facilitator that does not answer is asked again.
const RETRY: Duration = Duration::from_secs(5);

/// How many networks have metrics of their own.
const MAX_NETWORKS: usize = 16;
/// How many of a facilitator's accounts are looked at.
const MAX_SETTLERS: usize = 16;

/// Returns what an answer to `/supported` says, if it is one of a facilitator.
pub(super) fn read(answer: &Answer) -> Option<SupportedResponse> {
    read_object(&answer.body).filter(|_| answer.status.is_success())
}

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
        let said = api.get("supported").await.ok().and_then(|answer| self.learn(&answer));
        let stale = || self.lock().as_ref().map(|(_, stale)| stale.clone());
        let unreachable = FacilitatorError::Unreachable { what: "the facilitator", retry_after: RETRY };
        said.or_else(stale).ok_or(unreachable)
    }

    /// Keeps an answer, if it is one of a facilitator.
    pub(super) fn learn(&self, answer: &Answer) -> Option<Arc<SupportedResponse>> {
        let said = Arc::new(read(answer)?);
        *self.lock() = Some((Instant::now(), said.clone()));
        Some(said)
    }

    fn lock(&self) -> MutexGuard<'_, Option<(Instant, Arc<SupportedResponse>)>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns `true` if its last answer includes `exact` payments of v2 on this network. Does not ask.
    pub(super) fn serves(&self, network: Network) -> bool {
        let known = self.lock();
        let named = network.to_string();
        known.as_ref().is_some_and(|(_, said)| {
            said.kinds.iter().any(|kind| {
                kind.x402_version == 2
                    && kind.scheme == "exact"
                    && (kind.network == named || kind.network == "eip155:*")
            })
        })
    }

    /// Returns the methods by permit that it may settle on this network, each with the account that its last answer names for it. What else it
    /// lists may settle other schemes only.
    pub(super) fn permit_methods(&self, network: Network) -> Vec<TransferMethod> {
        let known = self.lock();
        let named = network.to_string();
        let kinds = known.iter().flat_map(|(_, said)| &said.kinds);
        let here = kinds.filter(|kind| kind.x402_version == 2 && (kind.network == named || kind.network == "eip155:*"));
        here.filter_map(TransferMethod::of_kind).collect()
    }

    /// Returns the accounts that its last answer names as those that settle on this network, or some of them.
    pub(super) fn settlers(&self, network: Network) -> Vec<Address> {
        let (known, named) = (self.lock(), network.to_string());
        let signers = known.iter().flat_map(|(_, said)| &said.signers);
        let here = signers.filter(|(pattern, _)| **pattern == named || *pattern == "eip155:*");
        here.flat_map(|(_, accounts)| accounts).filter_map(|account| account.parse().ok()).take(MAX_SETTLERS).collect()
    }

    /// Returns the networks that its last answer names for `exact` payments of v2.
    pub(super) fn networks(&self) -> Vec<Network> {
        let known = self.lock();
        let kinds = known.iter().flat_map(|(_, said)| &said.kinds);
        let exact = kinds.filter(|kind| kind.x402_version == 2 && kind.scheme == "exact");
        exact.filter_map(|kind| kind.network.parse().ok()).take(MAX_NETWORKS).collect()
    }

    fn fresh(&self) -> Option<Arc<SupportedResponse>> {
        let known = self.lock();
        known.as_ref().filter(|(at, _)| at.elapsed() < FRESH).map(|(_, said)| said.clone())
    }
}
