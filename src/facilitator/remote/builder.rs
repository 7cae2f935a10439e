//! Describes a facilitator elsewhere.

use std::{fmt, sync::Arc, time::Duration};

use ::reqwest::{Client, ClientBuilder};
use http::{HeaderMap, HeaderValue, header::AUTHORIZATION};
use url::Url;

use super::{
    Remote, RemoteFacilitator,
    api::{Api, Authenticate},
    echoes::Echoes,
    readiness::LastLook,
    supported::Supported,
};
use crate::{
    clock::{Clock, SystemClock},
    facilitator::single_flight::SingleFlight,
    ledger::{Ledger, MemoryLedger, measured},
    network::Network,
};

/// Longer times than this are mistakes.
const LONGEST: Duration = Duration::from_secs(3_600);

/// Settings of a [`RemoteFacilitator`]; all but its address have defaults.
#[must_use]
pub struct RemoteFacilitatorBuilder {
    url: String,
    client: ClientBuilder,
    authenticate: Option<Arc<dyn Authenticate>>,
    unusable_token: bool,
    ledger: Option<Arc<dyn Ledger>>,
    clock: Arc<dyn Clock>,
    networks: Vec<Network>,
    #[cfg(feature = "onchain")]
    nodes: Vec<(Network, String)>,
    request_timeout: Duration,
    settle_timeout: Duration,
    supported_ttl: Duration,
    upkeep_interval: Duration,
}

impl RemoteFacilitatorBuilder {
    pub(super) fn new(url: &str) -> Self {
        Self {
            url: url.to_owned(),
            client: Client::builder(),
            authenticate: None,
            unusable_token: false,
            ledger: None,
            clock: Arc::new(SystemClock),
            networks: Vec::new(),
            #[cfg(feature = "onchain")]
            nodes: Vec::new(),
            request_timeout: Duration::from_secs(10),
            settle_timeout: Duration::from_secs(25),
            supported_ttl: Duration::from_secs(300),
            upkeep_interval: Duration::from_secs(5),
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

    /// Has the headers that prove who asks made for every request, such as a token signed for its method and path.
    pub fn authenticate(mut self, authenticate: impl Authenticate) -> Self {
        self.authenticate = Some(Arc::new(authenticate));
        self
    }

    /// The HTTP client to build on, for proxies and roots of trust. Redirects, timeouts and idle connections are set here.
    pub fn client(mut self, client: ClientBuilder) -> Self {
        self.client = client;
        self
    }

    /// The ledger in which payments are recorded; a [`MemoryLedger`] if not set.
    pub fn ledger(mut self, ledger: Arc<dyn Ledger>) -> Self {
        self.ledger = Some(ledger);
        self
    }

    /// Where the time comes from; the machine's clock if not set.
    pub fn clock(mut self, clock: Arc<dyn Clock>) -> Self {
        self.clock = clock;
        self
    }

    /// Takes it for granted that the facilitator settles `exact` payments on this network; further calls add further ones. Then
    /// [`build`](Self::build) does not ask the facilitator for what it supports.
    pub fn network(mut self, network: Network) -> Self {
        self.networks.push(network);
        self
    }

    /// A node of this network that is asked whether what the facilitator says is so; further calls add further networks. The URL may
    /// hold a key: it appears in no error, span or `Debug` output. The chain must be one that an
    /// [`OnchainFacilitator`](crate::facilitator::OnchainFacilitator) can serve.
    #[cfg(feature = "onchain")]
    pub fn confirm(mut self, network: Network, rpc_url: impl AsRef<str>) -> Self {
        self.nodes.push((network, rpc_url.as_ref().to_owned()));
        self
    }

    /// How long one request may take, body included; 10 seconds if not set. A facilitator answers `/settle` when the
    /// transaction is in a block.
    pub fn request_timeout(mut self, timeout: Duration) -> Self {
        self.request_timeout = timeout.min(LONGEST);
        self
    }

    /// For how long settling may repeat the request until the outcome is [`Unknown`](crate::payment::Outcome::Unknown), the
    /// last request not included; 25 seconds if not set.
    pub fn settle_timeout(mut self, timeout: Duration) -> Self {
        self.settle_timeout = timeout.min(LONGEST);
        self
    }

    /// For how long what the facilitator supports is remembered; 5 minutes if not set.
    pub fn supported_ttl(mut self, ttl: Duration) -> Self {
        self.supported_ttl = ttl;
        self
    }

    /// How often payments that nobody looks after are looked for in the ledger; 5 seconds if not set.
    pub fn upkeep_interval(mut self, interval: Duration) -> Self {
        self.upkeep_interval = interval.clamp(Duration::from_millis(10), LONGEST);
        self
    }

    /// Asks the facilitator what it supports, unless [networks](Self::network) are given, and the nodes for their chain, and builds the
    /// facilitator.
    ///
    /// # Errors
    /// [`RemoteBuildError`] says what to change.
    pub async fn build(self) -> Result<RemoteFacilitator, RemoteBuildError> {
        if self.unusable_token {
            return Err(RemoteBuildError::Token);
        }
        let base = http_url(&self.url).ok_or(RemoteBuildError::Url("the facilitator's URL"))?;
        let api = Api::new(self.client, base, self.authenticate, self.request_timeout).ok_or(RemoteBuildError::Tls)?;
        #[cfg(feature = "onchain")]
        let witnesses = witnesses(self.nodes, self.request_timeout).await?;
        #[cfg(not(feature = "onchain"))]
        let witnesses = Vec::new();
        let supported = Supported::new(self.supported_ttl);
        if self.networks.is_empty() {
            supported.get(&api).await.map_err(|_| RemoteBuildError::Unreachable)?;
        }
        let remote = Arc::new(Remote {
            api,
            ledger: measured(self.ledger.unwrap_or_else(|| Arc::new(MemoryLedger::new()))),
            clock: self.clock,
            supported,
            networks: self.networks,
            witnesses,
            echoes: Echoes::default(),
            last_look: LastLook::default(),
            flights: Arc::new(SingleFlight::default()),
            settle_timeout: self.settle_timeout,
            process: getrandom::u64().map_err(|_| RemoteBuildError::Randomness)?,
            hint: Arc::default(),
        });
        remote.keep_up(self.upkeep_interval);
        Ok(RemoteFacilitator { remote })
    }
}

#[cfg(feature = "onchain")]
async fn witnesses(
    nodes: Vec<(Network, String)>,
    timeout: Duration,
) -> Result<Vec<(Network, Box<dyn super::Witness>)>, RemoteBuildError> {
    use alloy_rpc_client::RpcClient;

    use super::witness::Node;
    use crate::chain::{endpoint::Endpoint, probe::Probe, rpc::Rpc, rpc_batcher::RpcBatcher};

    /// What a transfer may use in a simulation; as the on-chain facilitator has it.
    const GAS: u64 = 400_000;
    /// How long a transaction is waited for that the facilitator says is in a block.
    const PATIENCE: Duration = Duration::from_secs(5);

    let mut witnesses: Vec<(Network, Box<dyn super::Witness>)> = Vec::new();
    for (network, url) in nodes {
        let url = http_url(&url).ok_or(RemoteBuildError::Url("a node's URL"))?;
        let endpoint = Endpoint::new(url).ok_or(RemoteBuildError::Tls)?;
        let rpc = Rpc::new(RpcClient::new(endpoint, false), timeout.min(Duration::from_secs(5)));
        let found = rpc.chain_id().await.map_err(|_| RemoteBuildError::Node(network))?;
        if found != network.chain_id() {
            return Err(RemoteBuildError::WrongChain { expected: network, found: Network::eip155(found) });
        }
        let probe = Probe::new(GAS).ok_or(RemoteBuildError::Probe)?;
        witnesses
            .push((network, Box::new(Node { looks: RpcBatcher::new(rpc.clone()), rpc, probe, patience: PATIENCE })));
    }
    Ok(witnesses)
}

fn http_url(text: &str) -> Option<Url> {
    Url::parse(text).ok().filter(|url| matches!(url.scheme(), "http" | "https") && url.has_host())
}

impl fmt::Debug for RemoteFacilitatorBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RemoteFacilitatorBuilder").field("networks", &self.networks).finish_non_exhaustive()
    }
}

/// Why a [`RemoteFacilitator`] was not built.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RemoteBuildError {
    /// A URL cannot be read. It is not shown, since it may hold a key.
    #[error("{0} is not an http or https URL (not shown: it may hold a key)")]
    Url(&'static str),
    /// The bearer token cannot be a header.
    #[error("the bearer token has characters that a header cannot have")]
    Token,
    /// No TLS configuration could be made.
    #[error("the machine's TLS configuration, or the HTTP client's settings, cannot be used")]
    Tls,
    /// The facilitator did not say what it supports.
    #[error("the facilitator does not tell what it supports: check its URL and credentials, or name its network")]
    Unreachable,
    /// The node did not answer, or answered nonsense.
    #[error("the node of {0} that is to confirm does not answer")]
    Node(Network),
    /// The node is on another chain.
    #[error("the node that is to confirm is on {found}, not on {expected}")]
    WrongChain {
        /// What was configured.
        expected: Network,
        /// What the node says.
        found: Network,
    },
    /// The operating system has no randomness.
    #[error("the operating system's source of randomness failed")]
    Randomness,
    /// The crate was built from damaged sources.
    #[error("the probe's bytecode cannot be read: the crate's sources are damaged")]
    Probe,
}
