//! A facilitator as an HTTP service: `POST /verify`, `POST /settle`, `GET /supported`, `GET /discovery/resources`, `GET /healthz`.
//!
//! [`FacilitatorService`] is a tower service over any request body; it serves those who charge and have no chain of their own.
//! What is to be paid is stated by the caller, who is trusted with it; everything else is checked.

mod access;
mod answer;
mod builder;
mod catalogue;
mod public_url;
mod rate;
mod read;
mod settle;

use std::{
    convert::Infallible,
    fmt,
    future::Future,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use alloy_primitives::{Address, B256};
use bytes::Bytes;
use http::{Method, Request, Response, StatusCode, request::Parts};
use http_body::Body;
use http_body_util::{BodyExt as _, Full, Limited};
use tokio::sync::Semaphore;
use tower_service::Service;

pub use access::PeerAddress;
pub use builder::FacilitatorServiceBuilder;
pub use rate::{RateLimit, TooManyRequests};

use access::Access;
use answer::{Answer, Said};
use catalogue::{Catalogue, Query};
use read::{Asked, Purpose};

use super::{Facilitator, FacilitatorError, VerifyError, single_flight::SingleFlight};
use crate::{
    clock::Clock,
    network::Network,
    payment::{PaymentKey, Prechecked, Window, precheck},
    protocol::{Reason, SupportedKind, SupportedResponse, bazaar},
    telemetry,
};

/// The largest request body.
const MAX_BODY: usize = 64 * 1024;
/// How long a request body may take to arrive.
const BODY_DEADLINE: Duration = Duration::from_secs(10);

/// Verifies and settles payments for others over HTTP, as `/verify`, `/settle` and `/supported` of the x402 specification, in v2
/// and in v1.
///
/// - **`/verify` commits nothing**: nothing is recorded, nothing is sent.
/// - **`/settle` is idempotent.** A payment has one record in the facilitator's ledger: the same settlement asked for again, at the
///   same time or later, by whomever, makes no second transaction and gets the same answer. While it is not known it is
///   `settlement_pending`, with the transaction's hash: ask again with the same body.
/// - **A settlement that failed is not executed behind the caller's back**: only if it is asked for again.
/// - **[A catalogue](FacilitatorServiceBuilder::catalogue)**, if it is turned on: what was paid for here and declares the extension
///   [`bazaar`] is listed at `GET /discovery/resources`.
/// - **Bounds**: bodies of 64 KiB, requests per caller ([`rate`](FacilitatorServiceBuilder::rate)), bearer keys compared in constant
///   time, tokens and payees allowed. A caller is a key, or an address where the server in front puts a
///   [`PeerAddress`] into the request's extensions; all others share one allowance.
///
/// | status | when |
/// |---|---|
/// | 200 | an answer, `isValid: false` and `success: false` included |
/// | 400 | the request or its query cannot be read |
/// | 401 | no bearer key, or an unknown one |
/// | 404, 405 | not one of these |
/// | 408, 413 | the body came too slowly, or is too large |
/// | 429 | more requests than allowed |
/// | 503 | nobody could tell now; nothing was sent |
///
/// ```
/// # #[cfg(feature = "onchain")]
/// # fn example(facilitator: tower_x402::facilitator::OnchainFacilitator) -> axum::Router {
/// use axum::Router;
/// use tower_x402::facilitator::service::FacilitatorService;
///
/// Router::new().fallback_service(FacilitatorService::builder(facilitator).build())
/// # }
/// ```
#[derive(Clone)]
pub struct FacilitatorService {
    shared: Arc<Shared>,
}

/// What all handles share.
struct Shared {
    facilitators: Vec<Arc<dyn Facilitator>>,
    access: Access,
    clock: Arc<dyn Clock>,
    window: Window,
    /// Tokens that are served; empty for every network's USDC.
    assets: Vec<(Network, Address)>,
    /// Payees that are served; empty for all.
    payees: Vec<Address>,
    /// Settlements under way, each by all that was signed: one nonce may be in several payments, of which one can be paid.
    flights: Arc<SingleFlight<B256, Said>>,
    /// Requests being worked on.
    places: Semaphore,
    settle_patience: Duration,
    /// What was sold, if it is to be listed.
    catalogue: Option<Catalogue>,
}

impl FacilitatorService {
    /// Settings to start from, with the facilitator that does the work.
    pub fn builder(facilitator: impl Facilitator) -> FacilitatorServiceBuilder {
        FacilitatorServiceBuilder::new(Arc::new(facilitator))
    }
}

impl fmt::Debug for FacilitatorService {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FacilitatorService").field("facilitators", &self.shared.facilitators).finish_non_exhaustive()
    }
}

impl<B> Service<Request<B>> for FacilitatorService
where
    B: Body<Data = Bytes> + Send + 'static,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    type Response = Response<Full<Bytes>>;
    type Error = Infallible;
    type Future = FacilitatorFuture;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<B>) -> FacilitatorFuture {
        let shared = self.shared.clone();
        let endpoint = endpoint(request.uri().path());
        FacilitatorFuture(Box::pin(async move {
            let response = shared.answer(request).await.into_response();
            telemetry::served(endpoint, response.status().as_u16());
            response
        }))
    }
}

/// What is counted under one name; whatever else is asked for is `other`.
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

/// The answer of a [`FacilitatorService`].
pub struct FacilitatorFuture(Pin<Box<dyn Future<Output = Response<Full<Bytes>>> + Send>>);

impl Future for FacilitatorFuture {
    type Output = Result<Response<Full<Bytes>>, Infallible>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.0.as_mut().poll(cx).map(Ok)
    }
}

impl fmt::Debug for FacilitatorFuture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FacilitatorFuture").finish_non_exhaustive()
    }
}

impl Shared {
    async fn answer<B>(self: &Arc<Self>, request: Request<B>) -> Answer
    where
        B: Body<Data = Bytes> + Send,
        B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        let (parts, body) = request.into_parts();
        let purpose = match (parts.uri.path(), &parts.method) {
            ("/healthz", &Method::GET | &Method::HEAD) => return Answer::healthy(),
            ("/supported", &Method::GET | &Method::HEAD) => None,
            ("/discovery/resources", &Method::GET | &Method::HEAD) if self.catalogue.is_some() => None,
            ("/verify", &Method::POST) => Some(Purpose::Verify),
            ("/settle", &Method::POST) => Some(Purpose::Settle),
            ("/healthz" | "/supported" | "/verify" | "/settle", _) => return Answer::wrong_method(),
            _ => {
                return Answer::problem(
                    StatusCode::NOT_FOUND,
                    "not_found",
                    "POST /verify, POST /settle, GET /supported",
                );
            }
        };
        if let Err(refusal) = self.let_in(&parts, purpose.is_some()) {
            return refusal;
        }
        let Some(purpose) = purpose else {
            return match &self.catalogue {
                Some(catalogue) if parts.uri.path() != "/supported" => self.discover(catalogue, &parts),
                _ => self.supported().await,
            };
        };
        let Ok(_place) = self.places.try_acquire() else {
            return Answer::unavailable("too many requests are being worked on", Duration::from_secs(1));
        };
        let body = match tokio::time::timeout(BODY_DEADLINE, Limited::new(body, MAX_BODY).collect()).await {
            Ok(Ok(body)) => body.to_bytes(),
            Ok(Err(error)) if error.is::<http_body_util::LengthLimitError>() => {
                return Answer::problem(StatusCode::PAYLOAD_TOO_LARGE, "body_too_large", "64 KiB are read");
            }
            Ok(Err(_)) => return Answer::problem(StatusCode::BAD_REQUEST, "body_broken", "the body broke off"),
            Err(_) => return Answer::problem(StatusCode::REQUEST_TIMEOUT, "body_too_slow", "the body took too long"),
        };
        let asked = match Asked::read(&body) {
            Ok(asked) => asked,
            Err(unreadable) => return unreadable.into_answer(purpose),
        };
        match purpose {
            Purpose::Verify => self.verify(&asked).await,
            Purpose::Settle => self.settle(&asked).await,
        }
    }

    fn let_in(&self, parts: &Parts, needs_key: bool) -> Result<(), Answer> {
        match self.access.admit(&parts.headers, &parts.extensions, needs_key) {
            Ok(()) => Ok(()),
            Err(access::Refusal::Unknown) => Err(Answer::unauthorized()),
            Err(access::Refusal::TooMany(retry_after)) => Err(Answer::too_many(retry_after)),
        }
    }

    fn discover(&self, catalogue: &Catalogue, parts: &Parts) -> Answer {
        match Query::read(parts.uri.query().unwrap_or_default()) {
            Some(query) => Answer::json(StatusCode::OK, &catalogue.list(&query, self.clock.now())),
            None => Answer::problem(StatusCode::BAD_REQUEST, "invalid_query", "limit and offset are numbers"),
        }
    }

    async fn supported(&self) -> Answer {
        let mut all = SupportedResponse::default();
        if self.catalogue.is_some() {
            all.extensions.push(bazaar::NAME.to_owned());
        }
        for facilitator in &self.facilitators {
            let Ok(said) = facilitator.supported().await else {
                return Answer::unavailable("what is supported cannot be told now", Duration::from_secs(5));
            };
            for kind in said.kinds {
                let in_v1 = kind.network.parse().ok().and_then(Network::v1_name);
                if let Some(name) = in_v1.filter(|_| kind.x402_version == 2) {
                    all.kinds.push(SupportedKind { x402_version: 1, network: name.to_owned(), ..kind.clone() });
                }
                all.kinds.push(kind);
            }
            for (pattern, mut addresses) in said.signers {
                let known = all.signers.entry(pattern).or_default();
                addresses.retain(|address| !known.contains(address));
                known.extend(addresses);
            }
        }
        Answer::json(StatusCode::OK, &all)
    }

    async fn verify(&self, asked: &Asked) -> Answer {
        let (facilitator, payment) = match self.check(asked) {
            Ok(checked) => checked,
            Err(rejection) => return asked.invalid(rejection.reason, &rejection.detail),
        };
        match facilitator.verify(&payment).await {
            Ok(_) => asked.valid(),
            Err(VerifyError::Invalid(rejection)) => asked.invalid(rejection.reason, &rejection.detail),
            Err(VerifyError::Unavailable(error)) => {
                tracing::warn!(%error, "a payment cannot be verified now");
                Answer::unavailable("the payment cannot be verified now", error.retry_after())
            }
        }
    }

    /// What can be told without asking anybody, and who settles it.
    fn check(&self, asked: &Asked) -> Result<(Arc<dyn Facilitator>, Prechecked), super::Rejection> {
        let reject = |reason, detail: &str| Err(super::Rejection::new(reason, detail));
        let offer = asked.terms.offer();
        if !asked.is_accepted {
            return reject(Reason::InvalidPaymentRequirements, "the payment accepted other requirements than these");
        }
        let Some(facilitator) = self.facilitators.iter().find(|facilitator| facilitator.serves(&asked.terms)) else {
            return reject(Reason::InvalidNetwork, "this network is not served here");
        };
        let is_usdc = || offer.network().usdc().is_some_and(|usdc| usdc.address == offer.asset.address);
        let is_allowed = match self.assets.as_slice() {
            [] => is_usdc(),
            assets => assets.contains(&(offer.network(), offer.asset.address)),
        };
        if !is_allowed {
            return reject(Reason::InvalidPaymentRequirements, "this asset is not served here");
        }
        if !self.payees.is_empty() && !self.payees.contains(&offer.pay_to) {
            return reject(Reason::InvalidPaymentRequirements, "this payee is not served here");
        }
        let payment = precheck(asked.terms.clone(), asked.payload.clone(), self.window, self.clock.now())?;
        Ok((facilitator.clone(), payment.with_echo(asked.echo.clone())))
    }

    /// The record of a payment, where it is known: its window may have passed since.
    async fn known(&self, asked: &Asked) -> Result<Option<(Arc<dyn Facilitator>, Prechecked)>, FacilitatorError> {
        let key = PaymentKey::of(&asked.terms, &asked.payload.authorization);
        for facilitator in self.facilitators.iter().filter(|facilitator| facilitator.serves(&asked.terms)) {
            if let Some(record) = facilitator.ledger().get(&key).await?
                && record.authorization == asked.payload.authorization
                && record.signature == asked.payload.signature
                && record.terms.offer().pay_to == asked.terms.offer().pay_to
                && record.terms.offer().amount == asked.terms.offer().amount
            {
                return Ok(Some((facilitator.clone(), record.payment())));
            }
        }
        Ok(None)
    }
}
