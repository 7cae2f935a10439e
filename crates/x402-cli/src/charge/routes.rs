//! The routes with their prices, and the layer that charges for each.

use std::{
    convert::Infallible,
    fmt,
    future::Future,
    pin::Pin,
    sync::{Arc, PoisonError, RwLock},
    task::{Context, Poll},
    time::Duration,
};

use alloy_primitives::Address;
use axum::body::Body;
use http::{
    Method, Request, Response, StatusCode,
    header::{ACCESS_CONTROL_REQUEST_METHOD, CONTENT_LENGTH, ORIGIN},
};
use tower::{Layer as _, ServiceExt as _};
use tower_service::Service;
use tower_x402::{
    Usdc,
    protocol::PaymentFlow,
    server::{BuildError, PriceError, RequirePayment, RequirePaymentLayer, RequirePaymentLayerBuilder, drain},
};

use super::{
    bounded::Bounded,
    forward::{Forwarder, NO_ROUTE, no_route},
};
use crate::{chain::Settlement, error::Error, headers, paths, problem::Problem, values::HttpUrl};

/// The time for a settlement, which an authorization must be valid for besides the work.
const TIME_TO_SETTLE: Duration = Duration::from_secs(60);
/// The shortest time that an authorization is asked to be valid for.
const SHORTEST_VALIDITY: Duration = Duration::from_secs(120);
/// The size that bodies are priced by, in bytes.
const KILOBYTE: u64 = 1_000;
/// The label by which income from routes that are gone is counted.
const REMOVED: &str = "(removed routes)";
const AWAITED: &str = "this is paid by permit, and the facilitator has not said yet that it settles permits; nothing was charged, ask again later";

/// Some requests, and what they cost.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Route {
    pub(crate) path: Pattern,
    /// Empty for all methods. HEAD is for what GET is for: many services do the same work for both.
    pub(crate) methods: Vec<Method>,
    pub(crate) price: Price,
    pub(crate) description: Option<String>,
    /// The line of the file, or the flag, that it comes from.
    pub(crate) place: String,
}

/// The paths of a route.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Pattern {
    /// This path, with a slash at its end or without.
    Exact(String),
    /// All paths that begin with this one, which ends with a slash.
    Below(String),
}

/// The price of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Price {
    Free,
    Fixed(Usdc),
    /// For the request, and for each started kilobyte of its body.
    BySize {
        base: Usdc,
        per_kilobyte: Usdc,
    },
    /// The price that the upstream gives, up to this.
    UpTo(Usdc),
}

impl Route {
    /// Returns `true` if every request that the other one is for is one for this.
    pub(crate) fn covers(&self, other: &Self) -> bool {
        let has_all = |methods: &[Method]| !methods.is_empty() && methods.iter().all(|method| self.is_for(method));
        self.path.covers(&other.path) && (self.methods.is_empty() || has_all(&other.methods))
    }

    fn is_for(&self, method: &Method) -> bool {
        self.methods.is_empty()
            || self.methods.contains(method)
            || method == Method::HEAD && self.methods.contains(&Method::GET)
    }

    /// Returns the path and the flags with which `x402 pay` pays for it, if it costs something. `budget` is what it pays without a flag.
    pub(crate) fn to_pay(&self, budget: Usdc) -> Option<String> {
        let flags = match &self.price {
            Price::Free => return None,
            Price::Fixed(price) | Price::UpTo(price) if *price > budget => format!(" --budget '{price}'"),
            _ => String::new(),
        };
        let method = self.methods.first().filter(|method| **method != Method::GET);
        let method = method.map(|method| format!(" -X {method}")).unwrap_or_default();
        Some(format!("{}{method}{flags}", self.path.to_string().trim_end_matches('*')))
    }

    /// Returns the methods and the path, by which income is counted.
    fn label(&self) -> String {
        let methods: Vec<_> = self.methods.iter().map(Method::as_str).collect();
        match methods.is_empty() {
            true => self.path.to_string(),
            false => format!("{} {}", methods.join(","), self.path),
        }
    }
}

impl Pattern {
    /// Reads a path, or a path that ends with `/*`.
    pub(crate) fn parse(text: &str) -> Result<Self, &'static str> {
        let (path, is_prefix) = text.strip_suffix('*').map_or((text, false), |path| (path, true));
        match paths::plain(path) {
            Some(plain) if plain != path => Err("write the path without percent-encoding"),
            None => Err("expected a path such as /evaluate, or /api/* for all below it"),
            Some(plain) if plain.contains('*') || is_prefix && !plain.ends_with('/') => {
                Err("* may only stand at the end, after a slash")
            }
            Some(plain) if is_prefix => Ok(Self::Below(plain)),
            Some(plain) => Ok(Self::Exact(without_slash(&plain).to_owned())),
        }
    }

    fn covers(&self, other: &Self) -> bool {
        match (self, other) {
            (_, Self::Exact(path)) => self.matches(path),
            (Self::Below(_), Self::Below(prefix)) => self.matches(prefix),
            (Self::Exact(_), Self::Below(_)) => false,
        }
    }

    fn matches(&self, path: &str) -> bool {
        match self {
            Self::Exact(exact) => exact == without_slash(path),
            Self::Below(prefix) => path.starts_with(prefix.as_str()) || without_slash(prefix) == path,
        }
    }
}

impl fmt::Display for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exact(path) if path.is_empty() => f.write_str("/"),
            Self::Exact(path) => f.write_str(path),
            Self::Below(path) => write!(f, "{path}*"),
        }
    }
}

fn without_slash(path: &str) -> &str {
    path.strip_suffix('/').unwrap_or(path)
}

impl Price {
    fn size_of(base: Usdc, per_kilobyte: Usdc, bytes: usize) -> Usdc {
        let kilobytes = (bytes as u64).div_ceil(KILOBYTE).max(1);
        per_kilobyte.checked_mul(kilobytes).and_then(|sum| sum.checked_add(base)).unwrap_or(Usdc::MAX)
    }
}

impl fmt::Display for Price {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Free => f.write_str("free"),
            Self::Fixed(price) => price.fmt(f),
            Self::BySize { base: Usdc::ZERO, per_kilobyte } => write!(f, "{per_kilobyte} per kilobyte"),
            Self::BySize { base, per_kilobyte } => write!(f, "{base} and {per_kilobyte} per kilobyte"),
            Self::UpTo(most) => write!(f, "up to {most}"),
        }
    }
}

/// The settings of all routes.
#[derive(Clone, Debug)]
pub(crate) struct Common {
    pub(crate) pay_to: Address,
    pub(crate) public_url: Option<HttpUrl>,
    pub(crate) behind_proxy: bool,
    pub(crate) timeout: Duration,
    pub(crate) flow: PaymentFlow,
    pub(crate) permits: Permits,
    pub(crate) max_body: usize,
}

/// Whether permits (scheme `upto`) are taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Permits {
    Unwanted,
    Taken,
    /// They are wanted, and the facilitator has not said yet that it settles them.
    Awaited,
}

/// All routes. Clones are the same routes, also after they were [replaced](Self::replace).
#[derive(Clone, Debug)]
pub(crate) struct Routes {
    table: Arc<RwLock<Arc<[Entry]>>>,
    /// For payments whose route is gone: what they bought is still theirs.
    removed: Gate,
    max_body: usize,
}

#[derive(Debug)]
struct Entry {
    route: Route,
    gate: Gate,
}

#[derive(Clone, Debug)]
enum Gate {
    Free(Forwarder),
    Paid(Box<RequirePayment<Forwarder>>),
}

impl Routes {
    pub(crate) fn new(
        routes: &[Route],
        common: &Common,
        settlement: &Settlement,
        to: &Forwarder,
    ) -> Result<Self, Error> {
        let table = Arc::new(RwLock::new(entries(routes, common, settlement, to)?));
        let gone = PriceError::new(StatusCode::NOT_FOUND, NO_ROUTE);
        let removed = closed(gone, REMOVED.to_owned(), common, settlement, to)?;
        Ok(Self { table, removed, max_body: common.max_body })
    }

    /// Returns the label and the price of each route, in order.
    pub(crate) fn prices(&self) -> Vec<(String, String)> {
        let table = self.table.read().unwrap_or_else(PoisonError::into_inner).clone();
        table.iter().map(|entry| (entry.route.label(), entry.route.price.to_string())).collect()
    }

    /// Takes other routes from the next request on. Requests in progress end as they began.
    pub(crate) fn replace(
        &self,
        routes: &[Route],
        common: &Common,
        settlement: &Settlement,
        to: &Forwarder,
    ) -> Result<(), Error> {
        let entries = entries(routes, common, settlement, to)?;
        *self.table.write().unwrap_or_else(PoisonError::into_inner) = entries;
        Ok(())
    }

    /// Makes the same routes again, after the settings changed.
    pub(crate) fn renew(&self, common: &Common, settlement: &Settlement, to: &Forwarder) -> Result<(), Error> {
        let table = self.table.read().unwrap_or_else(PoisonError::into_inner).clone();
        let routes: Vec<_> = table.iter().map(|entry| entry.route.clone()).collect();
        self.replace(&routes, common, settlement, to)
    }

    async fn answer(self, request: Request<Body>) -> Result<Response<Body>, Problem> {
        let Some(path) = paths::plain(request.uri().path()) else {
            drain(request);
            let detail = "the path can be read in two ways; write it without dots, double slashes and encoded slashes";
            return Err(Problem::new(StatusCode::BAD_REQUEST, "ambiguous_path", detail));
        };
        // A service may take `post` for `POST`, which is another method (RFC 9110, section 9.1).
        if !request.method().as_str().bytes().all(|byte| byte.is_ascii_uppercase() || byte == b'-') {
            drain(request);
            let detail = "methods are written in capital letters";
            return Err(Problem::new(StatusCode::BAD_REQUEST, "unknown_method", detail));
        }
        let (gate, is_by_size) = {
            let table = self.table.read().unwrap_or_else(PoisonError::into_inner).clone();
            let at_path = || table.iter().filter(|entry| entry.route.path.matches(&path));
            let found = |method: &Method| at_path().find(|entry| entry.route.is_for(method));
            // A preflight is for the route of what it asks for: the layer answers it where that is paid for, else the service.
            let asked = preflighted(&request).and_then(|method| found(&method));
            let entry = asked.or_else(|| found(request.method()));
            let is_by_size = entry.is_some_and(|entry| matches!(entry.route.price, Price::BySize { .. }));
            (entry.map(|entry| entry.gate.clone()), is_by_size)
        };
        if is_by_size && headers::has_encoded_body(request.headers()) {
            drain(request);
            let detail = "the price is for the size of the body, which is not known of an encoded one; nothing was charged, send it without Content-Encoding";
            return Err(Problem::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "encoding_not_priced", detail));
        }
        let gate = gate.or_else(|| headers::has_payment(request.headers()).then(|| self.removed.clone()));
        let Some(gate) = gate else {
            drain(request);
            return Err(no_route());
        };
        if headers::wants_upgrade(&request) {
            drain(request);
            let detail = "WebSockets and other upgrades are not served here, since one payment is for one answer";
            return Err(Problem::new(StatusCode::BAD_REQUEST, "upgrade_not_payable", detail));
        }
        if length_of(&request).is_some_and(|length| length > self.max_body as u64) {
            drain(request);
            let detail = format!("the body is larger than {} bytes", self.max_body);
            return Err(Problem::new(StatusCode::PAYLOAD_TOO_LARGE, "body_too_large", detail));
        }
        let (parts, body) = request.into_parts();
        let body = Body::new(Bounded::new(&parts.headers, body, self.max_body));
        let request = Request::from_parts(parts, body);
        let Ok(response) = match gate {
            Gate::Free(upstream) => upstream.oneshot(request).await,
            Gate::Paid(paid) => paid.oneshot(request).await.map(|response| response.map(Body::new)),
        };
        Ok(response)
    }
}

impl Service<Request<Body>> for Routes {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let routes = self.clone();
        Box::pin(async move { Ok(routes.answer(request).await.unwrap_or_else(Problem::into_response)) })
    }
}

/// Returns the method of the request that a page asks for by this one (CORS).
fn preflighted(request: &Request<Body>) -> Option<Method> {
    let headers = request.headers();
    let asked = headers.get(ACCESS_CONTROL_REQUEST_METHOD)?.as_bytes();
    let is_preflight = request.method() == Method::OPTIONS && headers.contains_key(ORIGIN);
    Method::from_bytes(asked).ok().filter(|_| is_preflight)
}

fn length_of(request: &Request<Body>) -> Option<u64> {
    request.headers().get(CONTENT_LENGTH)?.to_str().ok()?.parse().ok()
}

fn entries(routes: &[Route], common: &Common, settlement: &Settlement, to: &Forwarder) -> Result<Arc<[Entry]>, Error> {
    let entry = |route: &Route| {
        let gate = match &route.price {
            Price::Free => Gate::Free(to.clone()),
            Price::UpTo(_) if common.permits == Permits::Awaited && settlement.channels.is_none() => {
                let silent = PriceError::new(StatusCode::SERVICE_UNAVAILABLE, AWAITED);
                closed(silent, route.label(), common, settlement, to)?
            }
            price => {
                // With --upto, every price is the most.
                let is_metered = matches!(price, Price::UpTo(_)) || common.permits != Permits::Unwanted;
                let to = if is_metered { to.metered() } else { to.clone() };
                Gate::Paid(Box::new(paywall(route, common, settlement)?.layer(to)))
            }
        };
        Ok(Entry { route: route.clone(), gate })
    };
    routes.iter().map(entry).collect()
}

/// Makes the gate that sells nothing, and says why. A payment on record, whatever its scheme, gets the answer or the work that it bought.
fn closed(
    why: PriceError,
    label: String,
    common: &Common,
    settlement: &Settlement,
    to: &Forwarder,
) -> Result<Gate, Error> {
    let builder = builder(common, settlement).facilitator(settlement.facilitator.clone()).route_label(label.as_str());
    let layer = builder.price_with(move |_| std::future::ready(Err(why.clone()))).build();
    let layer = layer.map_err(|source| Error::Paywall { route: label, source })?;
    Ok(Gate::Paid(Box::new(layer.layer(to.only_paid().metered()))))
}

/// Returns the settings that the layers of all routes share.
fn builder(common: &Common, settlement: &Settlement) -> RequirePaymentLayerBuilder {
    let mut builder = RequirePaymentLayer::builder()
        .pay_to_in(settlement.asset.clone(), common.pay_to)
        .flow(common.flow)
        .handler_deadline(common.timeout)
        .max_timeout(SHORTEST_VALIDITY.max(common.timeout + TIME_TO_SETTLE))
        .max_request_body(common.max_body)
        .trust_forwarded_proto(common.behind_proxy);
    if let Some(url) = &common.public_url {
        builder = builder.public_origin(url.as_str());
    }
    if let Some(channels) = &settlement.channels {
        builder = builder.vouchers(channels.clone());
    }
    builder
}

/// Makes the layer that charges for a route.
fn paywall(route: &Route, common: &Common, settlement: &Settlement) -> Result<RequirePaymentLayer, Error> {
    // Also where no transfers are taken: those that were made before are answered.
    let mut builder =
        builder(common, settlement).route_label(route.label()).facilitator(settlement.facilitator.clone());
    builder = builder.answer_preflights(true);
    if let Some(description) = &route.description {
        builder = builder.description(description.clone());
    }
    builder = match route.price {
        Price::Free | Price::Fixed(Usdc::ZERO) => builder,
        Price::Fixed(price) | Price::UpTo(price) => builder.price(price),
        Price::BySize { base, per_kilobyte } => builder.price_with_body(move |_, body| {
            let price = Price::size_of(base, per_kilobyte, body.len());
            async move { Ok(price.into()) }
        }),
    };
    // What a service says in the end is charged by voucher and by permit only: a transfer is signed for one amount.
    let is_metered = matches!(route.price, Price::UpTo(_));
    builder = match (is_metered, common.permits == Permits::Taken, &settlement.channels) {
        (true, false, Some(channels)) => builder.vouchers_only(channels.clone()),
        (true, false, None) => {
            let place = format!("{}, field max_price", route.place);
            let problem = "needs permits or vouchers: say upto = true (--upto), or set CHANNELS_PRIVATE_KEY and give --rpc-url, or give a fixed price";
            return Err(Error::Config { place, problem: problem.to_owned() });
        }
        (true, true, _) => builder.upto_only(),
        (false, true, _) => builder.upto(),
        (false, false, _) => builder,
    };
    builder.build().map_err(|source| match source {
        BuildError::NoPermits { network, .. } => Error::setting(
            "--upto",
            format!("nobody settles permits on {network}: x402 doctor --upto looks why; leave it out, or use another facilitator"),
        ),
        source => Error::Paywall { route: route.path.to_string(), source },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_route_is_for_its_path_however_it_ends() {
        let exact = Pattern::parse("/evaluate").unwrap();
        assert!(exact.matches("/evaluate") && exact.matches("/evaluate/"));
        assert!(!exact.matches("/evaluate/x") && !exact.matches("/evaluated"));
        let below = Pattern::parse("/api/*").unwrap();
        assert!(below.matches("/api/") && below.matches("/api/x") && below.matches("/api"));
        assert!(!below.matches("/apix"));
        assert!(Pattern::parse("/*").unwrap().matches("/"));
        assert!(Pattern::parse("/").unwrap().matches("/"));
        assert_eq!(["/", "/a", "/a/*"].map(|text| Pattern::parse(text).unwrap().to_string()), ["/", "/a", "/a/*"]);
    }

    #[test]
    fn a_route_that_no_request_reaches_is_known() {
        let route = |path: &str, methods: &[Method]| Route {
            path: Pattern::parse(path).unwrap(),
            methods: methods.to_vec(),
            price: Price::Free,
            description: None,
            place: String::new(),
        };
        let covers =
            |one: (&str, &[Method]), other: (&str, &[Method])| route(one.0, one.1).covers(&route(other.0, other.1));
        let (get, post, head) = ([Method::GET], [Method::POST], [Method::HEAD]);
        for (one, other) in [
            (("/a", &[][..]), ("/a/", &get[..])),
            (("/*", &[]), ("/", &[])),
            (("/a/*", &[]), ("/a/b/*", &[])),
            (("/a", &get), ("/a", &get)),
            (("/a", &get), ("/a", &head)),
        ] {
            assert!(covers(one, other), "{one:?} {other:?}");
        }
        for (one, other) in [
            (("/a", &get[..]), ("/a", &[][..])),
            (("/a", &get), ("/a", &post)),
            (("/a", &head), ("/a", &get)),
            (("/a/*", &[]), ("/ab", &[])),
            (("/a", &[]), ("/a/*", &[])),
            (("/a/b/*", &[]), ("/a/*", &[])),
        ] {
            assert!(!covers(one, other), "{one:?} {other:?}");
        }
    }

    #[test]
    fn a_pattern_that_nothing_matches_is_refused() {
        for text in ["", "evaluate", "/a*", "/a/*/b", "/a//b", "/%65", "*", "/a/../b"] {
            assert!(Pattern::parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn what_is_printed_to_pay_with_pays() {
        let to_pay = |path: &str, methods: &[Method], price| {
            let path = Pattern::parse(path).unwrap();
            let route = Route { path, methods: methods.to_vec(), price, description: None, place: String::new() };
            route.to_pay(Usdc::from_atomic(10_000)).unwrap_or_default()
        };
        let (cent, dollar) = (Usdc::from_atomic(10_000), Usdc::from_atomic(1_000_000));
        assert_eq!(to_pay("/*", &[], Price::Fixed(cent)), "/");
        assert_eq!(to_pay("/a", &[Method::POST], Price::UpTo(dollar)), "/a -X POST --budget '$1.00'");
        assert_eq!(to_pay("/a/*", &[Method::GET], Price::Fixed(dollar)), "/a/ --budget '$1.00'");
        assert_eq!(to_pay("/a", &[], Price::Free), "");
    }

    #[test]
    fn a_started_kilobyte_is_charged() {
        let price = |bytes| Price::size_of(Usdc::from_atomic(5), Usdc::from_atomic(10), bytes).atomic();
        assert_eq!([0, 1, 1_000, 1_001, 2_000].map(price), [15, 15, 15, 25, 25]);
    }
}
