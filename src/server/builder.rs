//! Describes what a layer sells.

use std::{fmt, future::Future, sync::Arc, time::Duration};

use alloy_primitives::{Address, U256};
use bytes::Bytes;
use http::{HeaderMap, HeaderName, StatusCode, Uri, request, response};
use serde_json::{Map, Value};
use tokio::sync::Semaphore;

use super::{
    claim::{PAYMENT_SIGNATURE, X_PAYMENT},
    config::{Classifier, Config, Limits, UNPROVEN, UNPROVEN_PATIENCE},
    deferred::DeferredPolicy,
    fingerprint::HEADERS,
    layer::RequirePaymentLayer,
    line::WaitingLine,
    offer::{Catalogue, Location, Way},
    page::BrowserPage,
    price::{Price, PriceError, Pricing, Quote},
    wait::InProgress,
};
use crate::{
    clock::{Clock, SystemClock},
    facilitator::Facilitator,
    network::{Asset, Network},
    payment::Terms,
    protocol::{
        PaymentFlow, PaymentId, ResourceInfo, Verbatim,
        bazaar::{Discovery, DiscoveryError},
        payment_status,
    },
    usdc::{ParseUsdcError, Usdc},
};

/// Describes a [`RequirePaymentLayer`]. A price, a payee and a facilitator are needed; everything else has a default.
pub struct RequirePaymentLayerBuilder {
    price: Option<Result<Price, ParseUsdcError>>,
    priced_by: Vec<HeaderName>,
    payees: Vec<(Result<Asset, Network>, Address)>,
    flows: Vec<PaymentFlow>,
    facilitators: Vec<Arc<dyn Facilitator>>,
    resource: ResourceInfo,
    /// `None` if it is the request that says where the resource is.
    location: Option<Location>,
    trusts_proxy: bool,
    status_url: Option<String>,
    discovery: Option<Discovery>,
    limits: Limits,
    deferred: Option<DeferredPolicy>,
    is_success: Option<Classifier>,
    allow_upgrades: bool,
    answer_preflights: bool,
    speaks_v1: bool,
    asks_for_ids: bool,
    page: Option<BrowserPage>,
    clock: Arc<dyn Clock>,
}

impl Default for RequirePaymentLayerBuilder {
    fn default() -> Self {
        Self {
            price: None,
            priced_by: Vec::new(),
            payees: Vec::new(),
            flows: Vec::new(),
            facilitators: Vec::new(),
            resource: ResourceInfo::default(),
            location: None,
            trusts_proxy: false,
            status_url: None,
            discovery: None,
            limits: Limits::default(),
            deferred: None,
            is_success: None,
            allow_upgrades: false,
            answer_preflights: false,
            speaks_v1: true,
            asks_for_ids: false,
            page: Some(BrowserPage::new()),
            clock: Arc::new(SystemClock),
        }
    }
}

/// What is sold, and for how much.
impl RequirePaymentLayerBuilder {
    /// The price of every request: dollars as text (`"$0.001"`) or [`Usdc`].
    pub fn price(mut self, price: impl TryInto<Usdc, Error: Into<ParseUsdcError>>) -> Self {
        self.price = Some(price.try_into().map(Price::Fixed).map_err(Into::into));
        self
    }

    /// A price that depends on the request's head. Called for unpaid and paid requests alike, so keep it quick.
    ///
    /// It sees what a payment is bound to: method, path, query, `Authorization`, `Cookie`, the payment itself, and the headers that
    /// [`priced_by`](Self::priced_by) names. Other headers, and a host in the URI, are kept from it: what is paid for and still owed may
    /// be asked for again with any of those, and is worked on at the price it was paid at, whatever it costs now. What layers above
    /// put into the request's extensions is all there; go by it only where it follows from what a payment is bound to.
    ///
    /// ```
    /// # use tower_x402::{Usdc, server::{Quote, RequirePaymentLayer}};
    /// let builder = RequirePaymentLayer::builder().price_with(|request| {
    ///     let is_preview = request.uri.query() == Some("preview");
    ///     async move { Ok(if is_preview { Quote::Free } else { Usdc::from_atomic(1_000).into() }) }
    /// });
    /// ```
    pub fn price_with<P, F>(mut self, price: P) -> Self
    where
        P: Fn(&request::Parts) -> F + Send + Sync + 'static,
        F: Future<Output = Result<Quote, PriceError>> + Send + 'static,
    {
        self.price = Some(Ok(Price::Of(Arc::new(move |request| Box::pin(price(request))))));
        self
    }

    /// A price that depends on the request's body, which is read whole first, up to
    /// [`max_request_body`](Self::max_request_body), within 30 s, and as many at once as
    /// [`max_concurrent`](Self::max_concurrent) says. Called for unpaid and paid requests alike, so keep it quick. What cannot be
    /// priced, such as a body that nobody could work on, is refused before anything is paid. Of the request's head it sees as much as
    /// [`price_with`](Self::price_with).
    ///
    /// ```
    /// # use tower_x402::{Usdc, server::{Quote, RequirePaymentLayer}};
    /// let builder = RequirePaymentLayer::builder().max_request_body(64 * 1024).price_with_body(|_request, body| {
    ///     let lines = body.split(|&byte| byte == b'\n').count() as u64;
    ///     async move { Ok(Usdc::from_atomic(10 * lines).into()) }
    /// });
    /// ```
    pub fn price_with_body<P, F>(mut self, price: P) -> Self
    where
        P: Fn(&request::Parts, &Bytes) -> F + Send + Sync + 'static,
        F: Future<Output = Result<Quote, PriceError>> + Send + 'static,
    {
        self.price = Some(Ok(Price::OfBody(Arc::new(move |request, body| Box::pin(price(request, body))))));
        self
    }

    /// The headers that a computed price depends on: the price sees them, and a payment is bound to their values like to the path. With
    /// `Host` the price sees the host in the URI too, which is where HTTP/2 has it. A payment that is presented again with another
    /// value is refused with 409. Call it again to name more.
    ///
    /// ```
    /// # use http::HeaderName;
    /// # use tower_x402::{Usdc, server::RequirePaymentLayer};
    /// let tier = HeaderName::from_static("x-tier");
    /// let builder = RequirePaymentLayer::builder().priced_by([tier.clone()]).price_with(move |request| {
    ///     let is_dear = request.headers.get(&tier).is_some_and(|tier| tier == "dear");
    ///     async move { Ok(Usdc::from_atomic(if is_dear { 1_000_000 } else { 1_000 }).into()) }
    /// });
    /// ```
    pub fn priced_by(mut self, headers: impl IntoIterator<Item = HeaderName>) -> Self {
        let is_seen = |name: &HeaderName| HEADERS.contains(name) || [&PAYMENT_SIGNATURE, &X_PAYMENT].contains(&name);
        self.priced_by.extend(headers.into_iter().filter(|name| !is_seen(name)));
        // In whichever order they are named, fingerprints are the same.
        self.priced_by.sort_by(|one, other| one.as_str().cmp(other.as_str()));
        self.priced_by.dedup();
        self
    }

    /// Accepts USDC on `network`, paid to `payee`. Call it again to offer several networks.
    pub fn pay_to(mut self, network: Network, payee: Address) -> Self {
        self.payees.push((network.usdc().ok_or(network), payee));
        self
    }

    /// Accepts another EIP-3009 token with six decimals, paid to `payee`.
    pub fn pay_to_in(mut self, asset: Asset, payee: Address) -> Self {
        self.payees.push((Ok(asset), payee));
        self
    }

    /// Offers a flow; call it again to offer several, the first being the preferred one. Default: `authorization`.
    pub fn flow(mut self, flow: PaymentFlow) -> Self {
        if !self.flows.contains(&flow) {
            self.flows.push(flow);
        }
        self
    }

    /// Settles payments after the response was released, in batches, where the policy trusts the payer that far; any other
    /// payment is treated as without this. Payers are offered `authorization` as before: theirs is not to choose. Where it
    /// happens, `PAYMENT-RESPONSE` says success without a transaction, and names the payment in the extension
    /// [`payment-status`](crate::protocol::payment_status). Responses that stream, and payments in `upfront` or in x402 v1, are not deferred.
    ///
    /// ```
    /// # use tower_x402::server::{DeferredPolicy, RequirePaymentLayer};
    /// let builder = RequirePaymentLayer::builder().price("$0.001").deferred(DeferredPolicy::default());
    /// ```
    pub fn deferred(mut self, policy: DeferredPolicy) -> Self {
        self.deferred = Some(policy);
        self
    }

    /// Who verifies and settles. Call it again for other networks; each offer goes to the first that serves it.
    pub fn facilitator(mut self, facilitator: impl Facilitator) -> Self {
        self.facilitators.push(Arc::new(facilitator));
        self
    }

    /// The public URL of the one resource that this layer charges for.
    pub fn resource_url(mut self, url: impl Into<String>) -> Self {
        self.location = Some(Location::Url(url.into()));
        self
    }

    /// The public origin, such as `https://api.example`, to which the request's path is added in the URL that the 402 names.
    ///
    /// Without it, or with an empty one, the 402 names the host that the request names itself: its `Host` header, or the host in its
    /// URI, where HTTP/2 has it. The scheme is the URI's if it has one, `http` for loopback hosts and `https` for others; see
    /// [`trust_forwarded_proto`](Self::trust_forwarded_proto). A request that names no host, several, or something else gets the path
    /// alone, which clients of v1 refuse. A client can choose its `Host`, so nothing else depends on it: neither the price nor what a
    /// payment is bound to, unless [`priced_by`](Self::priced_by) names it.
    pub fn public_origin(mut self, origin: impl Into<String>) -> Self {
        let origin = origin.into();
        let origin = origin.trim_end_matches('/');
        self.location = (!origin.is_empty()).then(|| Location::Origin(origin.to_owned()));
        self
    }

    /// Takes the scheme of a request's URL from `X-Forwarded-Proto`, or from the last element of `Forwarded`. Default: off.
    ///
    /// Turn it on behind a proxy that ends TLS and sets or removes both headers itself. It has no effect with a
    /// [`public_origin`](Self::public_origin) or a [`resource_url`](Self::resource_url). The host is that of the `Host` header, which the
    /// proxy has to pass on.
    pub fn trust_forwarded_proto(mut self, trust: bool) -> Self {
        self.trusts_proxy = trust;
        self
    }

    /// Where a [`PaymentStatus`](super::PaymentStatus) answers what became of a payment: an absolute URL, or a path (`/payments/status`)
    /// on the origin of what is sold. It is declared among the `extensions` of the 402
    /// ([`payment_status`](crate::protocol::payment_status)); clients of this crate ask only on the origin that they paid.
    pub fn status_url(mut self, url: impl Into<String>) -> Self {
        self.status_url = Some(url.into());
        self
    }

    /// Declares in the extension [`bazaar`](crate::protocol::bazaar) what the route takes and gives. A facilitator that catalogues
    /// what it settles shows it to those who look for such a service. It describes one route: give others layers of their own. Needs
    /// [`public_origin`](Self::public_origin) or [`resource_url`](Self::resource_url), or nobody could find it.
    ///
    /// ```
    /// # use serde_json::json;
    /// # use tower_x402::{protocol::bazaar::{BodyType, Discovery}, server::RequirePaymentLayer};
    /// let builder = RequirePaymentLayer::builder()
    ///     .public_origin("https://api.example")
    ///     .description("Evaluates arithmetic")
    ///     .discovery(Discovery::post(BodyType::Json).body(json!({ "output": "2 + 2 = 4" })).output(json!({ "score": 1.0 })));
    /// ```
    pub fn discovery(mut self, discovery: Discovery) -> Self {
        self.discovery = Some(discovery);
        self
    }

    /// What is sold, for people and agents.
    pub fn description(mut self, description: impl Into<String>) -> Self {
        self.resource.description = Some(description.into());
        self
    }

    /// The media type of a paid response.
    pub fn mime_type(mut self, mime_type: impl Into<String>) -> Self {
        self.resource.mime_type = Some(mime_type.into());
        self
    }

    /// The name of the service.
    pub fn service_name(mut self, name: impl Into<String>) -> Self {
        self.resource.service_name = Some(name.into());
        self
    }

    /// At most five labels.
    pub fn tags(mut self, tags: impl IntoIterator<Item = impl Into<String>>) -> Self {
        self.resource.tags = tags.into_iter().map(Into::into).collect();
        self
    }
}

/// How requests are treated.
impl RequirePaymentLayerBuilder {
    /// Which responses are charged for in the `authorization` flow. Default: status 2xx, and 101 where
    /// [upgrades](Self::allow_upgrades) are allowed. A gRPC service would also look at `grpc-status`.
    pub fn success(mut self, is_success: impl Fn(&response::Parts) -> bool + Send + Sync + 'static) -> Self {
        self.is_success = Some(Arc::new(is_success));
        self
    }

    /// Lets requests for a protocol upgrade be paid for; they are refused otherwise, but for those that could do without: an offer to go on
    /// in HTTP/2 (`h2c`) is taken off and the request answered as it is.
    pub fn allow_upgrades(mut self, allow: bool) -> Self {
        self.allow_upgrades = allow;
        self
    }

    /// Answers CORS preflights for any origin. Otherwise they are passed to the service unpaid, and answered with the head of
    /// its response only; a service that does costly work for any method should not see them.
    pub fn answer_preflights(mut self, answer: bool) -> Self {
        self.answer_preflights = answer;
        self
    }

    /// Whether clients of x402 v1 are served too; they are unless this is turned off. Then their `X-PAYMENT` header is
    /// ignored, and the body of the 402 is that of v2.
    pub fn v1(mut self, speak: bool) -> Self {
        self.speaks_v1 = speak;
        self
    }

    /// What a person sees whose browser opens what is sold: a page that explains the offer and pays it from a wallet. On
    /// unless `None` is given; programs are answered the same with and without it.
    pub fn browser_page(mut self, page: Option<BrowserPage>) -> Self {
        self.page = page;
        self
    }

    /// Whether the 402 offers the extension `payment-identifier`; it does not unless this is turned on. Payers may then name
    /// their payments; see [what an id does](super#payment-identifiers). Adds about 0.6 KB to the 402's header.
    pub fn payment_identifier(mut self, ask: bool) -> Self {
        self.asks_for_ids = ask;
        self
    }

    /// How long a payer's authorization may be valid; whole seconds, default 120 s.
    pub fn max_timeout(mut self, timeout: Duration) -> Self {
        self.limits.max_timeout = timeout;
        self
    }

    /// How long the handler may take; then the request is answered 504. Nothing is charged for it, or, in the flow
    /// `upfront`, nothing more if the same payment is presented again. Default 60 s, at most a day.
    pub fn handler_deadline(mut self, deadline: Duration) -> Self {
        self.limits.handler_deadline = deadline.min(LONGEST);
        self
    }

    /// How long before `validBefore` a settlement must begin. Default 15 s, at most a day.
    pub fn settlement_margin(mut self, margin: Duration) -> Self {
        self.limits.settlement_margin = margin.min(LONGEST);
        self
    }

    /// How far ahead a payer's clock may run. Default 30 s.
    pub fn clock_skew(mut self, skew: Duration) -> Self {
        self.limits.clock_skew = skew;
        self
    }

    /// The largest payment header, in bytes. Default 16 KiB.
    pub fn max_payment_header(mut self, bytes: usize) -> Self {
        self.limits.payment_header = bytes;
        self
    }

    /// The largest request body that is read whole, in bytes: in the `upfront` flow, where the work for a payment is begun again, and
    /// where the [price depends on it](Self::price_with_body). When a payment is presented again for its answer, a longer body is
    /// compared as it passes. Default 1 MiB.
    pub fn max_request_body(mut self, bytes: usize) -> Self {
        self.limits.request_body = bytes;
        self
    }

    /// How many payments may be worked on or waited for at once; further ones are answered 503. Default 4096. Copies of one
    /// payment take at most an eighth of these places; further ones are answered 409.
    pub fn max_concurrent(mut self, payments: usize) -> Self {
        self.limits.concurrent = payments;
        self
    }

    /// How long a copy of a payment waits for the first one's answer, before 409. Default 90 s, at most a day.
    pub fn max_wait(mut self, wait: Duration) -> Self {
        self.limits.wait = wait.min(LONGEST);
        self
    }

    /// How often the handler may be started for one payment. Default 3.
    pub fn max_attempts(mut self, attempts: u32) -> Self {
        self.limits.attempts = attempts;
        self
    }

    /// How often, and for how long, the response to a request that holds no secret (no body, no `Authorization`, no
    /// `Cookie`, no payment identifier) is replayed. Default 3 times within 60 s. Whoever asks again for what could not be settled
    /// at first, and is charged by that, gets the response in any case.
    pub fn anonymous_replays(mut self, times: u32, within: Duration) -> Self {
        self.limits.anonymous_replays = times;
        self.limits.anonymous_replay_age = within;
        self
    }

    /// The clock to judge windows of validity by.
    pub fn clock(mut self, clock: Arc<dyn Clock>) -> Self {
        self.clock = clock;
        self
    }
}

impl RequirePaymentLayerBuilder {
    /// Checks the description and makes the layer.
    ///
    /// # Errors
    /// [`BuildError`] says what is missing or does not fit together.
    pub fn build(self) -> Result<RequirePaymentLayer, BuildError> {
        let price = self.price.ok_or(BuildError::NoPrice)?.map_err(BuildError::Price)?;
        if matches!(price, Price::Fixed(Usdc::ZERO)) {
            return Err(BuildError::ZeroPrice);
        }
        check_limits(&self.limits)?;
        check_location(self.location.as_ref())?;
        check_status_url(self.status_url.as_deref())?;
        if self.resource.tags.len() > 5 {
            return Err(BuildError::TooManyTags(self.resource.tags.len()));
        }
        if self.payees.is_empty() {
            return Err(BuildError::NoPayee);
        }
        if self.facilitators.is_empty() {
            return Err(BuildError::NoFacilitator);
        }
        let flows = if self.flows.is_empty() { vec![PaymentFlow::Authorization] } else { self.flows };
        let timeout = self.limits.max_timeout.as_secs();
        let mut ways = Vec::new();
        for flow in flows {
            for (asset, pay_to) in &self.payees {
                let asset = asset.clone().map_err(BuildError::NoUsdc)?;
                if pay_to.is_zero() {
                    return Err(BuildError::ZeroPayee);
                }
                let mut way = Way { asset, pay_to: *pay_to, flow, facilitator: 0 };
                let sample = Terms::new(way.offer(U256::from(1), timeout));
                let facilitator = self.facilitators.iter().position(|facilitator| facilitator.serves(&sample));
                way.facilitator = facilitator.ok_or(BuildError::NotServed(way.asset.network))?;
                if self.deferred.is_some() && !self.facilitators[way.facilitator].settles_in_background() {
                    return Err(BuildError::NotDeferrable(way.asset.network));
                }
                ways.push(way);
            }
        }
        if self.discovery.is_some() && self.location.is_none() {
            return Err(BuildError::NoPublicUrl);
        }
        let extensions = declarations(self.asks_for_ids, self.status_url.as_deref(), self.discovery.as_ref())?;
        let pricing = Pricing { price, headers: self.priced_by.into() };
        let location = self.location.unwrap_or(Location::Request { trusts_proxy: self.trusts_proxy });
        let catalogue = Catalogue::new(pricing, ways, timeout, self.resource, location, extensions, self.speaks_v1);
        let (uri, headers) = (Uri::default(), HeaderMap::new());
        let longest = catalogue.demand(&catalogue.target(&uri, &headers), &catalogue.longest(), None);
        let size = longest.map_or(usize::MAX, |demand| demand.header.len());
        if size > MAX_DEMAND {
            return Err(BuildError::DemandTooLarge { size });
        }
        Ok(RequirePaymentLayer::new(Config {
            catalogue,
            facilitators: self.facilitators,
            permits: Arc::new(Semaphore::new(self.limits.concurrent.min(Semaphore::MAX_PERMITS))),
            unproven: WaitingLine::new(self.limits.concurrent.min(UNPROVEN), UNPROVEN_PATIENCE),
            unpriced: Semaphore::new(self.limits.concurrent.min(Semaphore::MAX_PERMITS)),
            limits: self.limits,
            credit: self.deferred.map(|policy| policy.limit()),
            status_url: self.status_url,
            is_success: self.is_success.unwrap_or_else(|| {
                let switching = self.allow_upgrades.then_some(StatusCode::SWITCHING_PROTOCOLS);
                Arc::new(move |response| response.status.is_success() || Some(response.status) == switching)
            }),
            allow_upgrades: self.allow_upgrades,
            answer_preflights: self.answer_preflights,
            asks_for_ids: self.asks_for_ids,
            page: self.page,
            clock: self.clock,
            in_progress: InProgress::default(),
        }))
    }
}

impl fmt::Debug for RequirePaymentLayerBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RequirePaymentLayerBuilder")
            .field("price", &self.price)
            .field("payees", &self.payees)
            .field("facilitators", &self.facilitators)
            .finish_non_exhaustive()
    }
}

/// Some clients stop reading headers near 8 KB in all.
const MAX_DEMAND: usize = 6 * 1024;
/// The longest that anything can be told to take; a clock's end is far beyond.
const LONGEST: Duration = Duration::from_secs(86_400);

fn check_limits(limits: &Limits) -> Result<(), BuildError> {
    let needed = limits.handler_deadline.saturating_add(limits.settlement_margin);
    // Offers are made in whole seconds.
    let max_timeout = Duration::from_secs(limits.max_timeout.as_secs());
    if max_timeout <= needed {
        return Err(BuildError::TimeoutTooShort { max_timeout, needed });
    }
    if limits.concurrent == 0 || limits.attempts == 0 {
        return Err(BuildError::ZeroLimit);
    }
    Ok(())
}

fn check_location(location: Option<&Location>) -> Result<(), BuildError> {
    match location {
        Some(Location::Origin(text) | Location::Url(text)) if !is_http_url(text) => Err(BuildError::Url(text.clone())),
        _ => Ok(()),
    }
}

/// What the 402 declares; `None` if nothing.
fn declarations(
    asks_for_ids: bool,
    status_url: Option<&str>,
    discovery: Option<&Discovery>,
) -> Result<Option<Verbatim<Map<String, Value>>>, BuildError> {
    let ids = asks_for_ids.then(PaymentId::declaration).unwrap_or_default();
    let status = status_url.map(payment_status::declaration).unwrap_or_default();
    let discovery = discovery.map(Discovery::extension).transpose().map_err(BuildError::Discovery)?.unwrap_or_default();
    let all: Map<_, _> = ids.into_iter().chain(status).chain(discovery).collect();
    Ok(Verbatim::of(&all).ok().filter(|_| !all.is_empty()))
}

/// A path that begins with two slashes names a host.
fn check_status_url(url: Option<&str>) -> Result<(), BuildError> {
    let is_path = |url: &str| url.starts_with('/') && !url.starts_with("//") && url.parse::<Uri>().is_ok();
    match url.filter(|url| !is_path(url) && !is_http_url(url)) {
        Some(url) => Err(BuildError::Url(url.to_owned())),
        None => Ok(()),
    }
}

fn is_http_url(text: &str) -> bool {
    let uri: Option<Uri> = text.parse().ok();
    uri.is_some_and(|uri| matches!(uri.scheme_str(), Some("http" | "https")) && uri.host().is_some())
}

/// What is wrong with the description of a layer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BuildError {
    /// No price.
    #[error("no price: call .price(\"$0.001\") or .price_with(…)")]
    NoPrice,
    /// The price cannot be read.
    #[error("the price cannot be read: {0}")]
    Price(#[source] ParseUsdcError),
    /// A price of nothing.
    #[error("the price is zero: leave the route without the layer, or use .price_with(…) and Quote::Free")]
    ZeroPrice,
    /// Nobody to pay.
    #[error("no payee: call .pay_to(Network::BASE, address)")]
    NoPayee,
    /// The zero address as payee.
    #[error("the payee is the zero address, where the money would be lost")]
    ZeroPayee,
    /// No USDC known on that network.
    #[error(
        "no USDC is known on {0}: call .pay_to_in(Asset {{ … }}, address) with the token's EIP-712 name and version"
    )]
    NoUsdc(Network),
    /// Nobody to settle.
    #[error("no facilitator: call .facilitator(…)")]
    NoFacilitator,
    /// Nobody to settle there.
    #[error("no facilitator serves {0}: add one with .facilitator(…)")]
    NotServed(Network),
    /// Nobody to settle later.
    #[error("the facilitator for {0} settles nothing by itself: leave .deferred(…) out, or use another one")]
    NotDeferrable(Network),
    /// The window leaves no time to work and settle.
    #[error(
        "max_timeout is {max_timeout:?}, but handler_deadline and settlement_margin need {needed:?}: raise the first or lower the others"
    )]
    TimeoutTooShort {
        /// What was set, without a fraction of a second.
        max_timeout: Duration,
        /// What must be exceeded.
        needed: Duration,
    },
    /// A limit of zero serves nobody.
    #[error("max_concurrent and max_attempts must be at least 1")]
    ZeroLimit,
    /// Not an absolute http or https URL.
    #[error("{0:?} is not an absolute http or https URL")]
    Url(String),
    /// Discovery information that no facilitator would take.
    #[error("what the route takes and gives cannot be declared: {0}")]
    Discovery(#[source] DiscoveryError),
    /// Discovery information for a route that nobody could find.
    #[error("discovery needs a public URL: call .public_origin(\"https://api.example\") or .resource_url(…)")]
    NoPublicUrl,
    /// More labels than the protocol allows.
    #[error("{0} tags: the protocol allows five")]
    TooManyTags(usize),
    /// The 402 would not fit in the headers that clients read.
    #[error(
        "the PAYMENT-REQUIRED header would have {size} bytes, more than clients read: shorten the description or offer less"
    )]
    DemandTooLarge {
        /// Its size in bytes.
        size: usize,
    },
}
