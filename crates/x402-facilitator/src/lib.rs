//! A facilitator as an HTTP service: it verifies and settles [x402](https://www.x402.org) payments for sellers that have no node of their
//! own, at `POST /verify`, `POST /settle`, `GET /supported`, `GET /discovery/resources` and `GET /healthz`.
//!
//! [`FacilitatorService`] is a tower service over any `Facilitator` of [tower-x402](https://docs.rs/tower-x402). The caller states what is
//! to be paid and is trusted with it. Everything else is checked.
//!
//! ```no_run
//! # #[tokio::main]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use std::time::Duration;
//!
//! use axum::Router;
//! use tower_x402::{Network, client::key, facilitator::OnchainFacilitator};
//! use x402_facilitator::FacilitatorService;
//!
//! let facilitator = OnchainFacilitator::builder()
//!     .rpc_url("https://your-node.example")
//!     .network(Network::BASE_SEPOLIA)
//!     .signer(key::from_env("SETTLEMENT_PRIVATE_KEY")?)
//!     .build()
//!     .await?;
//! let service = FacilitatorService::builder(facilitator)
//!     .bearer_key(std::env::var("FACILITATOR_KEY")?)
//!     .rate(60, Duration::from_secs(60))
//!     .build();
//! let listener = tokio::net::TcpListener::bind("127.0.0.1:4022").await?;
//! axum::serve(listener, Router::new().fallback_service(service)).await?;
//! # Ok(())
//! # }
//! ```
//!
//! # Features
//!
//! | feature | adds |
//! |---|---|
//! | `bazaar` | a catalogue of paid resources at `GET /discovery/resources` |
//! | `metrics` | the metric `x402_facilitator_requests_total`, for any recorder of the facade `metrics` |
//!
//! # How it is made
//!
//! Whether and how a payment is settled is decided by [`charge::Settler`](tower_x402::charge::Settler), on the facilitator's ledger. This
//! crate reads requests and writes answers (`messages`), says who may ask and how often (`access`, `arrivals`), and what that may cost
//! (`gas`). `channels` serves payment channels, `catalogue` lists what was paid for.

// docs.rs shows the feature that each item needs.
#![cfg_attr(docsrs, feature(doc_cfg))]

mod access;
mod arrivals;
#[cfg(feature = "bazaar")]
mod catalogue;
mod channels;
mod gas;
mod messages;

use std::{
    convert::Infallible,
    fmt,
    future::Future,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use alloy_primitives::Address;
use bytes::Bytes;
use http::{Method, Request, Response, StatusCode, request::Parts};
use http_body::Body;
use http_body_util::Full;
use tokio::{sync::Semaphore, time::Instant};
use tower_service::Service;
use tower_x402::{
    Asset, Clock, Network, SystemClock,
    charge::{Refusal, SettleAnswer, Settler, Sponsor},
    facilitator::{Facilitator, FacilitatorError, VerifyError, channels::gas as channel_gas},
    payment::{Prechecked, Rejection, Verified, Window, precheck},
    protocol::{Reason, SupportedKind, SupportedResponse},
    server::RateLimit,
    upto::{self, AMOUNT_ABOVE_MAXIMUM, FACILITATOR_MISMATCH},
};

use access::{Access, AccessDenied, Caller};
use arrivals::{Arrivals, NoBody};
use gas::GasBudget;
use messages::{Answer, Operation, ParsedRequest};

/// The largest request body, in bytes.
const MAX_BODY: usize = 64 * 1024;
/// A batch of so many claims may be larger than that.
const MANY_CLAIMS: usize = 50;

/// Verifies and settles payments for others over HTTP, as the x402 specification defines `/verify`, `/settle` and `/supported`, in v2
/// and v1.
///
/// - **`/verify` has no effect**: it records nothing and sends nothing.
/// - **`/settle` is idempotent.** The facilitator's ledger has one record per payment. The same settlement requested again, by
///   anybody and at any time, sends no second transaction and gets the same answer. While the outcome is not known, the answer is
///   `settlement_pending` with the transaction's hash: send the same request again.
/// - **A failed settlement is retried only if it is requested again.**
/// - **Whoever asks first says what a permit for a maximum is charged** (scheme `upto`). A buyer has all that it takes to ask, for one unit: where permits are
///   settled, give keys to sellers ([`bearer_key`](FacilitatorServiceBuilder::bearer_key)), and let nobody in without one; or settle none
///   ([`permits`](FacilitatorServiceBuilder::permits)).
/// - **Payment channels** (scheme `batch-settlement`) are served if the builder's `channels` is set. What was done
///   before is found on the chain.
/// - **A catalogue** (`catalogue`, feature `bazaar`), if enabled, lists paid resources that declare the extension `bazaar` at
///   `GET /discovery/resources`.
/// - **Everything is bounded**: gas per request ([`max_gas`](FacilitatorServiceBuilder::max_gas)) and in an hour
///   ([`gas_per_hour`](FacilitatorServiceBuilder::gas_per_hour)), bodies (64 KiB, or 256 KiB for claims of many rows) and how many of them are
///   arriving, requests per caller ([`rate`](FacilitatorServiceBuilder::rate)), concurrent requests, tokens and payees. A caller without a key whose
///   settlements revert has to wait after ten, a minute for each further one. Bearer keys are compared in constant time. A caller is a key, or the address in the
///   request's [`PeerAddress`](tower_x402::server::PeerAddress) extension; all others share one allowance.
///
/// | status | when |
/// |---|---|
/// | 200 | the request was processed; `isValid: false` and `success: false` are such answers |
/// | 400 | the request body or query cannot be read |
/// | 401 | the bearer key is missing or unknown |
/// | 404, 405 | there is no such path, or not with this method |
/// | 408, 413 | the body arrived too slowly, or is too large |
/// | 429 | the caller exceeded its rate, or too many of its settlements reverted |
/// | 503 | the payment could not be checked now, or too much gas was used in the last hour; nothing was sent |
///
/// ```
/// # fn example(facilitator: tower_x402::facilitator::OnchainFacilitator) -> axum::Router {
/// use axum::Router;
/// use x402_facilitator::FacilitatorService;
///
/// Router::new().fallback_service(FacilitatorService::builder(facilitator).build())
/// # }
/// ```
#[derive(Clone)]
pub struct FacilitatorService {
    shared: Arc<Shared>,
}

struct Shared {
    facilitators: Vec<Arc<dyn Facilitator>>,
    access: Access,
    clock: Arc<dyn Clock>,
    window: Window,
    /// Tokens that are served. Empty for USDC on every network.
    assets: Vec<(Network, Address)>,
    /// Payees that are served. Empty for all.
    payees: Vec<Address>,
    settles_permits: bool,
    settler: Settler,
    arrivals: Arrivals,
    slots: Arc<Semaphore>,
    gas: GasBudget,
    #[cfg(feature = "bazaar")]
    catalogue: Option<catalogue::Catalogue>,
    channels: channels::Channels,
}

impl FacilitatorService {
    /// Returns a builder with the facilitator that verifies and settles.
    pub fn builder(facilitator: impl Facilitator) -> FacilitatorServiceBuilder {
        FacilitatorServiceBuilder {
            facilitators: vec![Arc::new(facilitator)],
            keys: Vec::new(),
            rate: None,
            assets: Vec::new(),
            payees: Vec::new(),
            settles_permits: true,
            clock: Arc::new(SystemClock),
            window: Window::default().remaining(6).skew(30),
            max_concurrent: 1_024,
            max_gas: None,
            gas_per_hour: None,
            #[cfg(feature = "bazaar")]
            catalogue: catalogue::Limits::default(),
            channels: channels::Channels::default(),
        }
    }
}

impl fmt::Debug for FacilitatorService {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FacilitatorService").field("facilitators", &self.shared.facilitators).finish_non_exhaustive()
    }
}

/// Builder of a [`FacilitatorService`].
#[must_use]
pub struct FacilitatorServiceBuilder {
    facilitators: Vec<Arc<dyn Facilitator>>,
    keys: Vec<String>,
    rate: Option<RateLimit>,
    assets: Vec<Asset>,
    payees: Vec<Address>,
    settles_permits: bool,
    clock: Arc<dyn Clock>,
    window: Window,
    max_concurrent: usize,
    max_gas: Option<u64>,
    gas_per_hour: Option<u64>,
    #[cfg(feature = "bazaar")]
    catalogue: catalogue::Limits,
    channels: channels::Channels,
}

impl FacilitatorServiceBuilder {
    /// Adds a facilitator for another network.
    pub fn facilitator(mut self, facilitator: impl Facilitator) -> Self {
        self.facilitators.push(Arc::new(facilitator));
        self
    }

    /// Adds a key that callers of `/verify` and `/settle` send as `Authorization: Bearer <key>`. Only its digest is kept.
    /// Default: no key is needed.
    pub fn bearer_key(mut self, key: impl Into<String>) -> Self {
        self.keys.push(key.into());
        self
    }

    /// Limits each caller to `requests` per `period`, all of which may come at once. Default: no limit.
    pub fn rate(mut self, requests: u32, period: Duration) -> Self {
        let burst = f64::from(requests.max(1));
        self.rate = Some(RateLimit::new(burst / period.as_secs_f64().max(0.001), burst));
        self
    }

    /// Adds a token that is served. The first call replaces the default, USDC on every network where it is known.
    ///
    /// Calls to the token cost the settlement key's gas, so serve no contract that a caller can choose.
    pub fn asset(mut self, asset: Asset) -> Self {
        self.assets.push(asset);
        self
    }

    /// Adds a payee that is served. Default: all payees.
    pub fn payee(mut self, payee: Address) -> Self {
        self.payees.push(payee);
        self
    }

    /// Sets whether permits for a maximum (scheme `upto`) are settled, where a facilitator does. Turn it off for callers without keys: a buyer could have its
    /// own permit settled for less than its seller asks. Default: on.
    pub fn permits(mut self, settle: bool) -> Self {
        self.settles_permits = settle;
        self
    }

    /// Sets the clock. Default: [`SystemClock`].
    pub fn clock(mut self, clock: Arc<dyn Clock>) -> Self {
        self.clock = clock;
        self
    }

    /// Sets the window in which an authorization must be valid. Default: for 6 more seconds, with clocks up to 30 seconds apart.
    pub fn window(mut self, window: Window) -> Self {
        self.window = window;
        self
    }

    /// Sets how many requests are processed at once. More are answered 503. Default: 1,024.
    pub fn max_concurrent(mut self, requests: usize) -> Self {
        self.max_concurrent = requests;
        self
    }

    /// Builds the service.
    pub fn build(self) -> FacilitatorService {
        let are_callers_known = !self.keys.is_empty();
        FacilitatorService {
            shared: Arc::new(Shared {
                facilitators: self.facilitators,
                access: Access::new(&self.keys, self.rate),
                settler: Settler::new(self.clock.clone(), self.max_concurrent),
                clock: self.clock,
                window: self.window,
                assets: self.assets.into_iter().map(|asset| (asset.network, asset.address)).collect(),
                payees: self.payees,
                settles_permits: self.settles_permits,
                arrivals: Arrivals::default(),
                slots: Arc::new(Semaphore::new(self.max_concurrent.min(Semaphore::MAX_PERMITS))),
                gas: GasBudget::new(self.max_gas, self.gas_per_hour, are_callers_known),
                #[cfg(feature = "bazaar")]
                catalogue: catalogue::Catalogue::new(self.catalogue),
                channels: channels::Channels { are_callers_known, ..self.channels },
            }),
        }
    }
}

impl fmt::Debug for FacilitatorServiceBuilder {
    /// Shows how many keys there are, and none of them.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FacilitatorServiceBuilder").field("keys", &self.keys.len()).finish_non_exhaustive()
    }
}

impl<B> Service<Request<B>> for FacilitatorService
where
    B: Body<Data = Bytes> + Send + 'static,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    type Response = Response<Full<Bytes>>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let shared = self.shared.clone();
        let endpoint = endpoint(request.uri().path());
        Box::pin(async move {
            let response = shared.answer(request).await.into_response();
            count(endpoint, response.status().as_u16());
            Ok(response)
        })
    }
}

/// Counts an answer. [`METRICS`](tower_x402::ops::METRICS) describes the metric.
#[cfg_attr(not(feature = "metrics"), expect(unused_variables, reason = "nothing is counted then"))]
fn count(endpoint: &'static str, status: u16) {
    #[cfg(feature = "metrics")]
    metrics::counter!("x402_facilitator_requests_total", "endpoint" => endpoint, "status" => status.to_string())
        .increment(1);
}

/// Returns the name of an endpoint in metrics.
fn endpoint(path: &str) -> &'static str {
    match path {
        "/verify" => "verify",
        "/settle" => "settle",
        "/supported" => "supported",
        "/discovery/resources" => "discovery",
        "/healthz" => "healthz",
        _ => "other",
    }
}

impl Shared {
    async fn answer<B>(self: &Arc<Self>, request: Request<B>) -> Answer
    where
        B: Body<Data = Bytes> + Send,
        B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        let (parts, body) = request.into_parts();
        let operation = match (parts.uri.path(), &parts.method) {
            ("/healthz", &Method::GET | &Method::HEAD) => return Answer::healthy(),
            ("/supported", &Method::GET | &Method::HEAD) => None,
            #[cfg(feature = "bazaar")]
            ("/discovery/resources", &Method::GET | &Method::HEAD) if self.catalogue.is_some() => None,
            ("/verify", &Method::POST) => Some(Operation::Verify),
            ("/settle", &Method::POST) => Some(Operation::Settle),
            ("/healthz" | "/supported" | "/verify" | "/settle", _) => return Answer::wrong_method(),
            _ => {
                return Answer::problem(
                    StatusCode::NOT_FOUND,
                    "not_found",
                    "POST /verify, POST /settle, GET /supported",
                );
            }
        };
        let caller = match self.check_access(&parts, operation.is_some()) {
            Ok(caller) => caller,
            Err(denied) => return denied,
        };
        let Some(operation) = operation else {
            #[cfg(feature = "bazaar")]
            if let (Some(catalogue), "/discovery/resources") = (&self.catalogue, parts.uri.path()) {
                return catalogue.answer(parts.uri.query().unwrap_or_default(), self.clock.now());
            }
            return self.supported().await;
        };
        if let (Operation::Settle, Err(refused)) = (operation, self.gas.check_caller(caller)) {
            return Answer::too_many(refused.retry_after);
        }
        let limit = self.max_body();
        let body = match self.arrivals.read(body, limit).await {
            Ok(body) => body,
            Err(NoBody::TooLarge) => {
                let detail = format!("at most {} KiB are accepted", limit / 1024);
                return Answer::problem(StatusCode::PAYLOAD_TOO_LARGE, "body_too_large", &detail);
            }
            Err(NoBody::Broken) => {
                return Answer::problem(StatusCode::BAD_REQUEST, "body_broken", "the body is incomplete");
            }
            Err(NoBody::TooSlow) => {
                return Answer::problem(StatusCode::REQUEST_TIMEOUT, "body_too_slow", "the body took too long");
            }
            Err(NoBody::Crowded) => return Answer::too_many_requests(),
        };
        let Ok(slot) = self.slots.clone().try_acquire_owned() else { return Answer::too_many_requests() };
        if !self.channels.is_empty()
            && let Some(request) = channels::ChannelRequest::read(&body)
        {
            drop(body);
            let request = match request {
                Ok(request) => request,
                Err(invalid) => return invalid.into_answer(operation),
            };
            // Continues if the caller disconnects, and keeps its place until then.
            let shared = self.clone();
            let answering = tokio::spawn(async move {
                let answer = shared.answer_channels(operation, &request, caller).await;
                drop(slot);
                answer
            });
            let lost = |_| Answer::unavailable("the answer was lost", Duration::from_secs(1));
            return answering.await.unwrap_or_else(lost);
        }
        let request = match ParsedRequest::read(&body, operation) {
            Ok(request) => request,
            Err(invalid) => return invalid.into_answer(operation),
        };
        drop(body);
        match operation {
            Operation::Verify => self.verify(&request).await,
            Operation::Settle => self.settle(&request, caller).await,
        }
    }

    /// Returns the largest body that is accepted, in bytes.
    fn max_body(&self) -> usize {
        if self.channels.is_empty() || self.max_claims() < MANY_CLAIMS { MAX_BODY } else { channels::MAX_BODY }
    }

    /// Returns how many rows of a claim one request may ask for.
    fn max_claims(&self) -> usize {
        channel_gas::claims_within(self.gas.most())
    }

    /// Returns the gas that was used for all callers since the start.
    fn gas_used(&self) -> u64 {
        let transfers = self.facilitators.iter().map(|facilitator| facilitator.gas_used());
        transfers.chain(self.channels.gas_used()).fold(0, u64::saturating_add)
    }

    /// Returns `true` if the token is served.
    fn serves_token(&self, network: Network, token: Address) -> bool {
        match self.assets.as_slice() {
            [] => network.usdc().is_some_and(|usdc| usdc.address == token),
            assets => assets.contains(&(network, token)),
        }
    }

    fn check_access(&self, parts: &Parts, needs_key: bool) -> Result<Caller, Answer> {
        match self.access.admit(&parts.headers, &parts.extensions, needs_key) {
            Ok(caller) => Ok(caller),
            Err(AccessDenied::UnknownKey) => Err(Answer::unauthorized()),
            Err(AccessDenied::TooManyRequests(error)) => Err(Answer::too_many(error.retry_after)),
        }
    }

    async fn supported(&self) -> Answer {
        let mut all = SupportedResponse::default();
        #[cfg(feature = "bazaar")]
        if self.catalogue.is_some() {
            all.extensions.push(x402_bazaar::NAME.to_owned());
        }
        for facilitator in &self.facilitators {
            let Ok(supported) = facilitator.supported().await else {
                return Answer::unavailable("the facilitator is not reachable now", Duration::from_secs(5));
            };
            for kind in supported.kinds {
                if kind.scheme == upto::SCHEME && !self.settles_permits {
                    continue;
                }
                let in_v1 = kind.network.parse().ok().and_then(Network::v1_name);
                if let Some(name) = in_v1.filter(|_| kind.x402_version == 2 && kind.scheme == "exact") {
                    let mut kind_of_v1 = SupportedKind::new(1, kind.scheme.clone(), name);
                    kind_of_v1.extra.clone_from(&kind.extra);
                    all.kinds.push(kind_of_v1);
                }
                all.kinds.push(kind);
            }
            for (pattern, mut addresses) in supported.signers {
                let known = all.signers.entry(pattern).or_default();
                addresses.retain(|address| !known.contains(address));
                known.extend(addresses);
            }
        }
        self.channels.add_to(&mut all, self.max_claims());
        Answer::json(StatusCode::OK, &all)
    }

    async fn verify(&self, request: &ParsedRequest) -> Answer {
        let (facilitator, payment) = match self.precheck(request) {
            Ok(checked) => checked,
            Err(rejection) => return request.invalid(rejection.reason, &rejection.detail),
        };
        match facilitator.verify(&payment).await {
            Ok(verified) => match self.check_gas(&payment, &verified) {
                Ok(_) => request.valid(),
                Err(rejection) => request.invalid(rejection.reason, &rejection.detail),
            },
            Err(VerifyError::Invalid(rejection)) => request.invalid(rejection.reason, &rejection.detail),
            Err(error) => {
                tracing::warn!(%error, "a payment cannot be verified now");
                let retry_after = match &error {
                    VerifyError::Unavailable(error) => error.retry_after(),
                    _ => Duration::from_secs(1),
                };
                Answer::unavailable("the payment cannot be verified now", retry_after)
            }
        }
    }

    /// Returns the most gas that settling a payment may use. Fails if that is more than one request may cost.
    fn check_gas(&self, payment: &Prechecked, verified: &Verified) -> Result<u64, Rejection> {
        let most = self.gas.most();
        let gas = gas::of_transfer(payment, verified).unwrap_or(most);
        if gas <= most {
            return Ok(gas);
        }
        let detail = format!("settling it may use {gas} gas, and at most {most} is paid for here");
        Err(Rejection::new(Reason::SimulationFailed, detail))
    }

    /// Checks a payment without I/O, and returns the facilitator that settles it.
    fn precheck(&self, request: &ParsedRequest) -> Result<(Arc<dyn Facilitator>, Prechecked), Rejection> {
        let reject = |reason, detail: &str| Err(Rejection::new(reason, detail));
        let offer = request.terms.offer();
        if !request.is_accepted {
            return reject(Reason::InvalidPaymentRequirements, "the payment accepted other requirements than these");
        }
        if offer.is_maximum() && !self.settles_permits {
            return reject(Reason::UnsupportedScheme, "permits (upto) are not settled here");
        }
        let Some(facilitator) = self.facilitators.iter().find(|facilitator| facilitator.serves(&request.terms)) else {
            let (reason, detail) = match request.terms.permit() {
                None => (Reason::InvalidNetwork, "this network is not supported here"),
                Some(_) => (FACILITATOR_MISMATCH.into(), "the permit is for none of the accounts here"),
            };
            return reject(reason, detail);
        };
        if !self.serves_token(offer.network(), offer.asset.address) {
            return reject(Reason::InvalidPaymentRequirements, "this asset is not supported here");
        }
        if !self.payees.is_empty() && !self.payees.contains(&offer.pay_to) {
            return reject(Reason::InvalidPaymentRequirements, "this payee is not supported here");
        }
        let mut payment = precheck(request.terms.clone(), request.payload.clone(), self.window, self.clock.now())?;
        if let Some(amount) = request.charged {
            if amount > payment.amount() {
                return reject(AMOUNT_ABOVE_MAXIMUM.into(), "more is to be charged than the payer signed for");
            }
            payment = payment.charging(amount);
        }
        Ok((facilitator.clone(), payment.with_echoed(request.echo.clone())))
    }

    /// Answers `/settle` with the result of the settlement under way, or of a new one. It continues if the caller disconnects.
    async fn settle(self: &Arc<Self>, request: &ParsedRequest, caller: Caller) -> Answer {
        let (facilitator, payment) = match self.precheck(request) {
            Ok(checked) => checked,
            // Its window may have passed since it was settled.
            Err(rejection) => match self.find_recorded(request).await {
                Ok(Some(recorded)) => recorded,
                Ok(None) => {
                    let Rejection { reason, detail, .. } = rejection;
                    let failed = SettleAnswer::Failed { reason, detail, transaction: None };
                    return Answer::settlement(request, &failed);
                }
                Err(error) => {
                    tracing::warn!(%error, "a payment cannot be looked up now");
                    return Answer::settlement(request, &SettleAnswer::Unavailable(error.retry_after()));
                }
            },
        };
        let answer = self.settler.settle(self, &facilitator, &payment).await;
        if let SettleAnswer::Failed { transaction: Some(_), .. } = answer {
            self.gas.note_revert(caller);
        }
        Answer::settlement(request, &answer)
    }

    async fn find_recorded(
        &self,
        request: &ParsedRequest,
    ) -> Result<Option<(Arc<dyn Facilitator>, Prechecked)>, FacilitatorError> {
        Settler::find_recorded(&self.facilitators, &request.terms, &request.payload, request.charged).await
    }
}

impl Sponsor for Shared {
    fn grant(&self, payment: &Prechecked, verified: &Verified) -> Result<impl Send, Refusal> {
        let gas = self.check_gas(payment, verified)?;
        self.gas.reserve(gas, self.gas_used(), Instant::now()).map_err(Refusal::unavailable)
    }

    #[cfg(feature = "bazaar")]
    fn settled(&self, payment: &Prechecked) {
        if let Some(catalogue) = &self.catalogue {
            catalogue.record(payment, self.clock.now());
        }
    }
}
