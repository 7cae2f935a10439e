//! The settings of the remote facilitator.

use std::{sync::Arc, time::Duration};

use ::reqwest::ClientBuilder;
use http::{HeaderMap, HeaderValue, header::AUTHORIZATION};
use url::Url;

use super::{
    Remote, RemoteBuildError, RemoteFacilitator,
    api::{Api, Authenticate, Moved, shown},
    echo_cache::EchoCache,
    observer::ChainObserver,
    supported::Supported,
};
use crate::{
    clock::{Clock, SystemClock},
    facilitator::{FacilitatorError, single_flight::SingleFlight},
    ledger::Ledger,
    network::Network,
    settlement::{journal::Journal, readiness::ReadinessCache, reconciler},
};

/// How long readiness is cached.
const READINESS_TTL: Duration = Duration::from_secs(2);
/// Longer durations are cut to this one.
const LONGEST: Duration = Duration::from_secs(3_600);

/// A builder of a [`RemoteFacilitator`]. All settings but the URL have defaults.
#[must_use]
pub struct RemoteFacilitatorBuilder {
    url: String,
    client: Option<ClientBuilder>,
    authenticate: Option<Arc<dyn Authenticate>>,
    unusable_token: bool,
    ledger: Option<Arc<dyn Ledger>>,
    clock: Arc<dyn Clock>,
    networks: Vec<Network>,
    #[cfg(feature = "onchain")]
    nodes: Vec<(Network, String)>,
    request_timeout: Duration,
    settle_timeout: Duration,
    reconcile_interval: Duration,
}

impl RemoteFacilitatorBuilder {
    pub(super) fn new(url: &str) -> Self {
        Self {
            url: url.to_owned(),
            client: None,
            authenticate: None,
            unusable_token: false,
            ledger: None,
            clock: Arc::new(SystemClock),
            networks: Vec::new(),
            #[cfg(feature = "onchain")]
            nodes: Vec::new(),
            request_timeout: Duration::from_secs(10),
            settle_timeout: Duration::from_secs(25),
            reconcile_interval: Duration::from_secs(5),
        }
    }

    /// Sends `Authorization: Bearer <token>` with every request.
    pub fn bearer_token(mut self, token: impl AsRef<str>) -> Self {
        match HeaderValue::try_from(format!("Bearer {}", token.as_ref())) {
            Ok(value) => self.authenticate(move |_| {
                let headers = HeaderMap::from_iter([(AUTHORIZATION, value.clone())]);
                async move { Ok(headers) }
            }),
            Err(_) => {
                self.unusable_token = true;
                self
            }
        }
    }

    /// Adds headers to every request that authenticate it, such as a token signed for its method and path.
    pub fn authenticate(mut self, authenticate: impl Authenticate) -> Self {
        self.authenticate = Some(Arc::new(authenticate));
        self
    }

    /// Sets the HTTP client to build on, for proxies and root certificates. Its redirects, retries, timeouts and idle connections are overridden.
    ///
    /// Its default headers, which may be an API key, are sent to the facilitator's host and port alone: a redirect to another is an error
    /// ([`RemoteBuildError::Moved`]) if a client is set.
    pub fn client(mut self, client: ClientBuilder) -> Self {
        self.client = Some(client);
        self
    }

    /// Sets the ledger in which payments are recorded. Default: a [`MemoryLedger`](crate::ledger::MemoryLedger).
    pub fn ledger(mut self, ledger: Arc<dyn Ledger>) -> Self {
        self.ledger = Some(ledger);
        self
    }

    /// Sets the clock. Default: the machine's.
    pub fn clock(mut self, clock: Arc<dyn Clock>) -> Self {
        self.clock = clock;
        self
    }

    /// Adds a network on which the facilitator settles `exact` payments. Then [`build`](Self::build) succeeds although the facilitator
    /// does not answer or does not say which networks it supports. Default: all that it supports.
    pub fn network(mut self, network: Network) -> Self {
        self.networks.push(network);
        self
    }

    /// Adds a node of this network that confirms the facilitator's answers. The URL may hold a key: it appears in no error, span or `Debug`
    /// output. The chain must be one that an [`OnchainFacilitator`](crate::facilitator::OnchainFacilitator) can serve.
    #[cfg(feature = "onchain")]
    pub fn confirm(mut self, network: Network, rpc_url: impl AsRef<str>) -> Self {
        self.nodes.push((network, rpc_url.as_ref().to_owned()));
        self
    }

    /// Sets how long one request may take, body included, at most an hour. Default: 10 seconds. A facilitator answers `/settle` when the
    /// transaction is in a block.
    pub fn request_timeout(mut self, timeout: Duration) -> Self {
        self.request_timeout = timeout.min(LONGEST);
        self
    }

    /// Sets for how long the request to settle may be repeated until the outcome is [`Unknown`](crate::payment::SettlementOutcome::Unknown), at most
    /// an hour. The last request is not included. Default: 25 seconds.
    pub fn settle_timeout(mut self, timeout: Duration) -> Self {
        self.settle_timeout = timeout.min(LONGEST);
        self
    }

    /// Sets how often open payments in the ledger are reconciled, from 10 ms to an hour. Default: 5 seconds.
    pub fn reconcile_interval(mut self, interval: Duration) -> Self {
        self.reconcile_interval = interval.clamp(Duration::from_millis(10), LONGEST);
        self
    }

    /// Asks the facilitator what it supports, checks the nodes, and builds the facilitator.
    ///
    /// One redirect (307 or 308) is followed: to `https` or without a change of scheme, and to another host or port only if neither
    /// credentials nor a client are set. Later requests go to the new address at once. Other redirects are errors that name it.
    ///
    /// # Errors
    /// [`RemoteBuildError`] names the setting to change.
    pub async fn build(self) -> Result<RemoteFacilitator, RemoteBuildError> {
        if self.unusable_token {
            return Err(RemoteBuildError::Token);
        }
        let base = http_url(&self.url).ok_or(RemoteBuildError::Url("the facilitator's URL"))?;
        let mut api =
            Api::new(self.client, base, self.authenticate, self.request_timeout).ok_or(RemoteBuildError::Tls)?;
        let journal = Journal::new(self.ledger, self.clock).ok_or(RemoteBuildError::Randomness)?;
        #[cfg_attr(not(feature = "onchain"), allow(unused_mut))]
        let mut observers: Vec<ChainObserver> = Vec::new();
        #[cfg(feature = "onchain")]
        for (network, url) in self.nodes {
            observers.push(ChainObserver::connect(network, &url, self.request_timeout, &journal).await?);
        }
        let supported = Supported::default();
        match ask(&mut api, &supported).await {
            Err(error) if self.networks.is_empty() || matches!(error, RemoteBuildError::Moved { .. }) => {
                return Err(error);
            }
            Err(error) => tracing::warn!(%error, "payments are taken as soon as the facilitator answers"),
            Ok(()) => {
                if let Err(error) = look_at_permits(&observers, &supported).await {
                    tracing::warn!(%error, "permits are offered as soon as it is known which can be confirmed");
                }
            }
        }
        let remote = Arc::new(Remote {
            api,
            journal,
            supported,
            networks: self.networks,
            observers,
            echoes: EchoCache::default(),
            readiness: ReadinessCache::new(READINESS_TTL),
            settling: Arc::new(SingleFlight::default()),
            settle_timeout: self.settle_timeout,
            wake: Arc::default(),
        });
        reconciler::spawn(&remote, self.reconcile_interval, remote.wake.clone());
        Ok(RemoteFacilitator { remote })
    }
}

/// Looks which of the permits that the facilitator settles each node can confirm, if it was not done before. Fails if a node does not answer.
pub(super) async fn look_at_permits(
    observers: &[ChainObserver],
    supported: &Supported,
) -> Result<(), FacilitatorError> {
    let mut looked = Ok(());
    for observer in observers {
        let network = observer.network();
        let found = observer.look_at(&supported.permit_methods(network), &supported.settlers(network)).await;
        looked = looked.and(found);
    }
    looked
}

/// Asks the facilitator what it supports, at the address that it has moved to if it has.
async fn ask(api: &mut Api, supported: &Supported) -> Result<(), RemoteBuildError> {
    const PATH: &str = "supported";
    let no_answer = |_| RemoteBuildError::Unreachable;
    let mut answer = api.get(PATH).await.map_err(no_answer)?;
    match api.moved(&answer, PATH) {
        Some(Moved::To(base)) => {
            api.move_to(base);
            tracing::info!(?api, "the facilitator redirects to this host");
            answer = api.get(PATH).await.map_err(no_answer)?;
            if let Some(Moved::To(again)) = api.moved(&answer, PATH) {
                return Err(RemoteBuildError::Moved { to: shown(&again) });
            }
        }
        Some(Moved::Elsewhere(_)) | None => {}
    }
    if let Some(Moved::Elsewhere(to)) = api.moved(&answer, PATH) {
        return Err(RemoteBuildError::Moved { to });
    }
    match supported.learn(&answer) {
        Some(_) => Ok(()),
        None if answer.status.is_success() => Err(RemoteBuildError::NotAFacilitator),
        None => Err(RemoteBuildError::Status { status: answer.status.as_u16() }),
    }
}

fn http_url(text: &str) -> Option<Url> {
    Url::parse(text).ok().filter(|url| matches!(url.scheme(), "http" | "https") && url.has_host())
}

debug_fields!(RemoteFacilitatorBuilder { networks });
