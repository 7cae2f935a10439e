//! The settings of the remote facilitator.

use std::{sync::Arc, time::Duration};

use ::reqwest::ClientBuilder;
use http::{HeaderMap, HeaderValue, header::AUTHORIZATION};
use url::Url;

use super::{
    Remote, RemoteFacilitator,
    api::{Api, Authenticate, Moved, shown},
    echo_cache::EchoCache,
    observer::ChainObserver,
    supported::Supported,
};
use crate::{
    clock::{Clock, SystemClock},
    facilitator::single_flight::SingleFlight,
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

    /// Sets the HTTP client to build on, for proxies and root certificates. Its redirects, timeouts and idle connections are overridden.
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
            Ok(()) => {}
        }
        for observer in &observers {
            observer.look_at(supported.permit_account(observer.network())).await;
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

fn hint(status: u16) -> &'static str {
    match status {
        401 | 403 => "check the credentials",
        404 | 405 | 501 => "check its URL, or set its network if it does not say what it supports",
        429 => "it wants fewer requests; try again later",
        500.. => "it is out of order; try again later, or set its network",
        _ => "check its URL",
    }
}

fn http_url(text: &str) -> Option<Url> {
    Url::parse(text).ok().filter(|url| matches!(url.scheme(), "http" | "https") && url.has_host())
}

debug_fields!(RemoteFacilitatorBuilder { networks });

/// Why a [`RemoteFacilitator`] was not built.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RemoteBuildError {
    /// A URL is invalid. It is not shown, since it may hold a key.
    #[error("{0} is not an http or https URL (not shown: it may hold a key)")]
    Url(&'static str),
    /// The bearer token cannot be a header.
    #[error("the bearer token has characters that a header cannot have")]
    Token,
    /// The machine's TLS configuration, or the HTTP client's settings, cannot be used.
    #[error("the machine's TLS configuration, or the HTTP client's settings, cannot be used")]
    Tls,
    /// The facilitator did not answer.
    #[error("the facilitator does not answer: check its URL, or set its network to build without it")]
    Unreachable,
    /// The facilitator redirects, and the redirect was not followed: it gives up TLS, is not a 307 or 308, leads to another host or
    /// port while credentials or a client are set, or to another redirect. Set the new address.
    #[error("the facilitator redirects to {to}: use that URL if you trust it")]
    Moved {
        /// The new address, without user information and query.
        to: String,
    },
    /// The facilitator answered the question what it supports with an error.
    #[error("the facilitator answers /supported with status {status}: {}", hint(*status))]
    Status {
        /// The HTTP status.
        status: u16,
    },
    /// The answer is none of a facilitator.
    #[error("the answer to /supported is none of a facilitator: check its URL")]
    NotAFacilitator,
    /// The node did not answer, or its answer cannot be used.
    #[error("the confirming node of {0} does not answer")]
    Node(Network),
    /// The node refuses receipts, without which no payment can be confirmed. Use another node.
    #[error("the confirming node of {0} refuses receipts of transactions (eth_getTransactionReceipt): use another one")]
    Receipts(Network),
    /// The node is on another chain.
    #[error("the confirming node is on {found}, not on {expected}")]
    WrongChain {
        /// The configured network.
        expected: Network,
        /// The node's network.
        found: Network,
    },
    /// No node confirms what the facilitator does to payment channels. Set one with [`RemoteFacilitatorBuilder::confirm`].
    #[cfg(feature = "onchain")]
    #[error("payment channels need a node of {0} that shows what is in them")]
    NoNode(Network),
    /// The chain lacks a contract that payment channels need.
    #[cfg(feature = "onchain")]
    #[error("{network} lacks {name} at {address}, which payment channels need")]
    NoContract {
        /// The contract.
        name: &'static str,
        /// Where it should be.
        address: alloy_primitives::Address,
        /// The chain.
        network: Network,
    },
    /// The facilitator does not serve payment channels of this network.
    #[cfg(feature = "onchain")]
    #[error("the facilitator does not serve payment channels on {0} (no batch-settlement in its /supported)")]
    NoChannels(Network),
    /// The operating system's source of randomness failed.
    #[error("the operating system's source of randomness failed")]
    Randomness,
    /// The crate was built from damaged sources.
    #[error("the probe's bytecode cannot be read: the crate's sources are damaged")]
    Probe,
}
