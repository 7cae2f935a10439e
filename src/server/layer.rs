//! The tower layer, the service that charges, and its future.

use std::{
    fmt,
    future::Future,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use http::{
    HeaderMap, HeaderName, Method, Request, Response, StatusCode,
    header::{ACCESS_CONTROL_REQUEST_METHOD, Entry, ORIGIN, UPGRADE},
    request,
};
use http_body::Body;
use pin_project_lite::pin_project;
use tower::{ServiceExt as _, util::Oneshot};
use tower_layer::Layer;
use tower_service::Service;

use super::{
    answer::{Answer, Cors, RequestContext, head_only},
    config::Config,
    header_names::{PAYMENT_SIGNATURE, X_PAYMENT},
    page, paid_request,
    payment_header::RawHeader,
    request_body::{LazyBody, RequestBody, read_whole},
    response::ResponseBody,
    v1,
    work::{Content, Handler},
};
use crate::{
    channels::Channels,
    charge::{Refusal, Why, batch},
    telemetry::{self, RequestOutcome},
    upload::{Upload, permits_for},
};

const HTTP2_SETTINGS: HeaderName = HeaderName::from_static("http2-settings");

/// Makes a service charge for every request; see the [module](super) for an example.
///
/// Cheap to clone. Services made by one layer share its limits and know of each other's payments.
#[derive(Clone, Debug)]
pub struct RequirePaymentLayer {
    config: Arc<Config>,
}

impl RequirePaymentLayer {
    pub(super) fn new(config: Config) -> Self {
        Self { config: Arc::new(config) }
    }

    /// Returns the channels whose vouchers the layer takes, if it takes any.
    pub fn channels(&self) -> Option<&Channels> {
        self.config.settings.channels.as_ref()
    }
}

impl<S> Layer<S> for RequirePaymentLayer {
    type Service = RequirePayment<S>;

    fn layer(&self, inner: S) -> Self::Service {
        RequirePayment::new(inner, self.config.clone())
    }
}

/// Charges for every request to the service it wraps. Made by [`RequirePaymentLayer`](super::RequirePaymentLayer).
///
/// It is always ready: it checks the payment before it takes any of the wrapped service's capacity, so that unpaid and bad requests
/// cannot exhaust a `ConcurrencyLimit` below. The wrapped service is cloned for each paid request and made ready then.
#[derive(Clone, Debug)]
pub struct RequirePayment<S> {
    inner: S,
    config: Arc<Config>,
}

impl<S> RequirePayment<S> {
    pub(super) fn new(inner: S, config: Arc<Config>) -> Self {
        Self { inner, config }
    }

    /// Returns a reference to the wrapped service.
    pub const fn get_ref(&self) -> &S {
        &self.inner
    }
}

impl<S, B, R> Service<Request<B>> for RequirePayment<S>
where
    S: Service<Request<RequestBody<B>>, Response = Response<R>> + Clone + Send + 'static,
    S::Future: Send + 'static,
    S::Error: Send + 'static,
    B: Body<Data = Bytes> + Send + 'static,
    R: Body<Data = Bytes> + Send + 'static,
{
    type Response = Response<ResponseBody<R>>;
    type Error = S::Error;
    type Future = ResponseFuture<S, B, R>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let (mut parts, body) = request.into_parts();
        let body = Upload::new(&parts.headers, body);
        hide_payments(&mut parts.headers);
        decline_http2(&mut parts.headers);
        let request = Request::from_parts(parts, body);
        let headers = request.headers();
        let is_preflight = request.method() == Method::OPTIONS
            && headers.contains_key(ORIGIN)
            && headers.contains_key(ACCESS_CONTROL_REQUEST_METHOD);
        if is_preflight {
            if self.config.settings.answer_preflights {
                return ResponseFuture::ready(Cors::preflight(headers), None);
            }
            return ResponseFuture::preflight(self.inner.clone().oneshot(request.map(RequestBody::untouched)));
        }
        let cors = headers.contains_key(ORIGIN).then_some(Cors { any_origin: self.config.settings.answer_preflights });
        // A connection cannot be kept, nor given again to a payer that lost it.
        if headers.contains_key(UPGRADE) || request.method() == Method::CONNECT {
            let detail = "a connection upgrade cannot be paid for: one payment is for one answer";
            let answer = Answer::problem(StatusCode::BAD_REQUEST, "upgrade_not_payable", detail, None);
            return ResponseFuture::ready(answer.into_response(telemetry::request), cors);
        }
        let raw = RawHeader::of(headers, self.config.catalogue.in_v1().is_some());
        let is_paid = !matches!(raw, Ok(None));
        let is_v1 = raw.is_ok_and(|raw| raw.is_some_and(|raw| raw.is_v1()));
        if is_paid && request.method() == Method::HEAD {
            let detail = "a HEAD request has no response to pay for; nothing was charged";
            let answer = Answer::problem(StatusCode::BAD_REQUEST, "head_not_payable", detail, None);
            return ResponseFuture::ready(answer.into_response(telemetry::request), cors);
        }
        let config = &self.config;
        match config.catalogue.fixed() {
            Some(offers) if !is_paid => {
                let answer = page::payment_required(config, request.method(), request.uri(), headers, offers);
                ResponseFuture::ready(answer.into_response(telemetry::request), cors)
            }
            Some(offers) => {
                let (parts, body) = request.into_parts();
                let context = RequestContext::new(config.clone(), offers.clone(), &parts);
                let served = paid_request::serve(context, self.inner.clone(), parts, LazyBody::Untouched(body));
                ResponseFuture::paid(Box::pin(served), cors, is_v1)
            }
            None => ResponseFuture::paid(
                Box::pin(price_and_serve(config.clone(), self.inner.clone(), request, is_paid)),
                cors,
                is_v1,
            ),
        }
    }
}

/// Marks payments as sensitive. One that is not taken is still money until it expires: a handler that logs its headers must not log it. It
/// stays where the request goes on, since it may be for a layer below.
fn hide_payments(headers: &mut HeaderMap) {
    for name in [&PAYMENT_SIGNATURE, &X_PAYMENT] {
        if let Entry::Occupied(mut payments) = headers.entry(name) {
            payments.iter_mut().for_each(|payment| payment.set_sensitive(true));
        }
    }
}

/// Removes an offer to go on in HTTP/2. Clients make it with any request, and expect an answer in HTTP/1.1 where it is not taken up
/// (RFC 9110, section 7.8). Other protocols are asked for by clients that need them.
fn decline_http2(headers: &mut HeaderMap) {
    let is_http2 = |name: &[u8]| name.trim_ascii().eq_ignore_ascii_case(b"h2c");
    let mut offered = headers.get_all(UPGRADE).iter().flat_map(|names| names.as_bytes().split(|byte| *byte == b','));
    if headers.contains_key(UPGRADE) && offered.all(is_http2) {
        headers.remove(UPGRADE);
        headers.remove(HTTP2_SETTINGS);
    }
}

/// Finds the price of the request, and serves it if it is free or paid.
async fn price_and_serve<S: Handler<B, R>, B: Content, R: Content>(
    config: Arc<Config>,
    inner: S,
    request: Request<Upload<B>>,
    is_paid: bool,
) -> Result<Response<ResponseBody<R>>, S::Error> {
    let (mut parts, body) = request.into_parts();
    let body = match read_to_price(&config, body).await {
        Ok(body) => body,
        Err(refusal) => return Ok(Answer::of(refusal).into_response(telemetry::request)),
    };
    let offers = match config.catalogue.offers(&mut parts, body.bytes()).await {
        // A refund needs no price, and is from a channel of the layer's own, whoever is paid for the request.
        offers if is_paid && config.settings.channels.is_some() && is_refund(&parts) => {
            Some(config.catalogue.own_offers(offers.ok().flatten()))
        }
        Ok(offers) => offers,
        // What was paid for before is answered all the same.
        Err(error) if is_paid => {
            let context = RequestContext::new(config, Arc::default(), &parts);
            return paid_request::serve(RequestContext { unpriced: Some(error), ..context }, inner, parts, body).await;
        }
        Err(error) => return Ok(Answer::not_priced(&error).into_response(telemetry::request)),
    };
    let Some(offers) = offers else {
        telemetry::request(RequestOutcome::Free);
        let request = Request::from_parts(parts, body.into_unhashed());
        return Ok(inner.oneshot(request).await?.map(ResponseBody::inner));
    };
    if !is_paid {
        let answer = page::payment_required(&config, &parts.method, &parts.uri, &parts.headers, &offers);
        return Ok(answer.into_response(telemetry::request));
    }
    let context = RequestContext::new(config, offers, &parts);
    paid_request::serve(context, inner, parts, body).await
}

/// Reads the request's body whole if its price depends on it.
async fn read_to_price<B: Content>(config: &Config, mut body: Upload<B>) -> Result<LazyBody<B>, Refusal> {
    if !config.catalogue.reads_body() {
        return Ok(LazyBody::Untouched(body));
    }
    let limits = &config.settings.rules.limits;
    let permit = config.unpriced.acquire(1, permits_for(limits.request_body as u64));
    let arrived = body.arrived();
    let read = permit.unless_evicted(Some(arrived), read_whole(body, limits.request_body, limits.body_deadline)).await;
    Ok(LazyBody::whole(read.ok_or(Why::Busy)??))
}

/// Returns `true` if the request asks for a refund, which has no price.
fn is_refund(parts: &request::Parts) -> bool {
    let Ok(Some(header)) = RawHeader::of(&parts.headers, false) else { return false };
    header.read().is_ok_and(|payment| batch::is_refund(&payment))
}

/// Reads what is left of a request's body in the background, and drops it.
///
/// Use it where a service answers without having read the body. A server that closes the connection while its client is still sending
/// makes that client lose the answer. [`RequirePayment`] does this itself, for what it refuses and for handlers that do not read their
/// bodies. At most 32 MiB of a body are read, for 30 seconds at most, and for all requests of the process at once as many as fit into 16 MiB
/// of buffers. A client that waits to be asked for its body (`Expect: 100-continue`) is not asked.
pub fn drain<B: Body<Data = Bytes> + Send + 'static>(request: Request<B>) {
    let (parts, body) = request.into_parts();
    drop(Upload::new(&parts.headers, body));
}

type Boxed<R, E> = Pin<Box<dyn Future<Output = Result<Response<ResponseBody<R>>, E>> + Send>>;

pin_project! {
    /// The response future of [`RequirePayment`].
    pub struct ResponseFuture<S, B, R>
    where
        S: Service<Request<RequestBody<B>>>,
    {
        #[pin]
        kind: Kind<S, B, R>,
        cors: Option<Cors>,
        // Whether the payment was turned into one of v2, and its receipt has to be turned back.
        is_v1: bool,
    }
}

pin_project! {
    #[project = KindProjection]
    enum Kind<S, B, R>
    where
        S: Service<Request<RequestBody<B>>>,
    {
        /// Answered by the layer at once.
        Ready { response: Option<Response<ResponseBody<R>>> },
        /// A preflight, passed on unpaid: its answer is its head.
        Passed { #[pin] response: Oneshot<S, Request<RequestBody<B>>> },
        /// Being paid for.
        Paid { response: Boxed<R, S::Error> },
    }
}

impl<S, B, R> ResponseFuture<S, B, R>
where
    S: Service<Request<RequestBody<B>>>,
{
    pub(super) fn ready(response: Response<ResponseBody<R>>, cors: Option<Cors>) -> Self {
        Self { kind: Kind::Ready { response: Some(response) }, cors, is_v1: false }
    }

    pub(super) fn preflight(response: Oneshot<S, Request<RequestBody<B>>>) -> Self {
        Self { kind: Kind::Passed { response }, cors: None, is_v1: false }
    }

    pub(super) fn paid(response: Boxed<R, S::Error>, cors: Option<Cors>, is_v1: bool) -> Self {
        Self { kind: Kind::Paid { response }, cors, is_v1 }
    }
}

impl<S, B, R> Future for ResponseFuture<S, B, R>
where
    S: Service<Request<RequestBody<B>>, Response = Response<R>>,
{
    type Output = Result<Response<ResponseBody<R>>, S::Error>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.project();
        let mut response = match this.kind.project() {
            KindProjection::Ready { response } => match response.take() {
                Some(response) => response,
                // Polled after it was ready; a future need not answer twice.
                None => return Poll::Pending,
            },
            KindProjection::Passed { response } => head_only(ready!(response.poll(cx))?),
            KindProjection::Paid { response } => ready!(response.as_mut().poll(cx))?,
        };
        if *this.is_v1 {
            v1::turn_back(response.headers_mut());
        }
        if let Some(cors) = this.cors {
            cors.apply(response.headers_mut());
        }
        Poll::Ready(Ok(response))
    }
}

impl<S, B, R> fmt::Debug for ResponseFuture<S, B, R>
where
    S: Service<Request<RequestBody<B>>>,
{
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ResponseFuture")
    }
}
