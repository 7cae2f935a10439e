//! The service that charges.

use std::{
    sync::Arc,
    task::{Context, Poll},
};

use bytes::Bytes;
use http::{
    HeaderMap, HeaderName, Method, Request, Response, StatusCode,
    header::{ACCESS_CONTROL_REQUEST_METHOD, ORIGIN, UPGRADE},
};
use http_body::Body;
use tower::ServiceExt as _;
use tower_service::Service;

use super::{
    answer::{Answer, Cors},
    body::read_whole,
    claim::Header,
    config::Config,
    future::ResponseFuture,
    job::Work,
    page, purchase,
    request_body::RequestBody,
    response_body::ResponseBody,
    sale::{self, Sale},
};
use crate::{
    protocol::header_name,
    telemetry::{self, RequestOutcome},
};

const HTTP2_SETTINGS: HeaderName = HeaderName::from_static("http2-settings");

/// Charges for every request to the service it wraps. Made by [`RequirePaymentLayer`](super::RequirePaymentLayer).
///
/// It is always ready: whether a request is paid for is found out before the wrapped service's capacity is claimed, so
/// that unpaid and bad requests cannot exhaust a `ConcurrencyLimit` below. The wrapped service is cloned for each paid
/// request and made ready then.
#[derive(Clone, Debug)]
pub struct RequirePayment<S> {
    inner: S,
    config: Arc<Config>,
}

impl<S> RequirePayment<S> {
    pub(super) fn new(inner: S, config: Arc<Config>) -> Self {
        Self { inner, config }
    }

    /// The service below.
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

    fn call(&mut self, mut request: Request<B>) -> Self::Future {
        if !self.config.allow_upgrades {
            decline_http2(request.headers_mut());
        }
        let headers = request.headers();
        let is_preflight = request.method() == Method::OPTIONS
            && headers.contains_key(ORIGIN)
            && headers.contains_key(ACCESS_CONTROL_REQUEST_METHOD);
        if is_preflight {
            if self.config.answer_preflights {
                return ResponseFuture::ready(Cors::preflight(headers), None);
            }
            return ResponseFuture::preflight(self.inner.clone().oneshot(request.map(RequestBody::untouched)));
        }
        let cors = headers.contains_key(ORIGIN).then_some(Cors { any_origin: self.config.answer_preflights });
        if !self.config.allow_upgrades && (headers.contains_key(UPGRADE) || request.method() == Method::CONNECT) {
            let detail = "a connection upgrade cannot be paid for here";
            let answer = Answer::problem(StatusCode::BAD_REQUEST, "upgrade_not_payable", detail, None);
            return ResponseFuture::ready(answer.into_response(), cors);
        }
        let is_paid = !matches!(Header::of(headers, self.config.catalogue.speaks_v1()), Ok(None));
        if is_paid && request.method() == Method::HEAD {
            let detail = "a HEAD request has no response to pay for; nothing was charged";
            let answer = Answer::problem(StatusCode::BAD_REQUEST, "head_not_payable", detail, None);
            return ResponseFuture::ready(answer.into_response(), cors);
        }
        let config = &self.config;
        match config.catalogue.fixed() {
            Some(offers) if !is_paid => {
                let answer = page::demand(config, request.method(), request.uri(), headers, offers);
                ResponseFuture::ready(answer.into_response(), cors)
            }
            Some(offers) => {
                let (parts, body) = request.into_parts();
                let sale = Sale::new(config.clone(), offers.clone(), &parts);
                let served = purchase::serve(sale, self.inner.clone(), parts, Work::Streaming(body));
                ResponseFuture::paid(Box::pin(served), cors)
            }
            None => ResponseFuture::paid(Box::pin(charge(config.clone(), self.inner.clone(), request, is_paid)), cors),
        }
    }
}

/// Whoever can go on in HTTP/2 says so with any request, and expects to be answered in HTTP/1.1 where nobody takes that up (RFC 9110,
/// section 7.8). Other protocols are asked for by those who need them.
fn decline_http2(headers: &mut HeaderMap) {
    let is_http2 = |name: &[u8]| name.trim_ascii().eq_ignore_ascii_case(b"h2c");
    let mut offered = headers.get_all(UPGRADE).iter().flat_map(|names| names.as_bytes().split(|byte| *byte == b','));
    if headers.contains_key(UPGRADE) && offered.all(is_http2) {
        headers.remove(UPGRADE);
        headers.remove(HTTP2_SETTINGS);
    }
}

/// Finds the price of the request, and serves it if it is free or paid.
async fn charge<S, B, R>(
    config: Arc<Config>,
    inner: S,
    request: Request<B>,
    is_paid: bool,
) -> Result<Response<ResponseBody<R>>, S::Error>
where
    S: Service<Request<RequestBody<B>>, Response = Response<R>> + Send + 'static,
    S::Future: Send + 'static,
    S::Error: Send + 'static,
    B: Body<Data = Bytes> + Send + 'static,
    R: Body<Data = Bytes> + Send + 'static,
{
    let (mut parts, body) = request.into_parts();
    let work = match read_to_price(&config, body).await {
        Ok(work) => work,
        Err(answer) => return Ok(answer.into_response()),
    };
    let offers = match config.catalogue.offers(&mut parts, work.whole()).await {
        Ok(offers) => offers,
        Err(error) => return Ok(sale::unpriced(&error).into_response()),
    };
    let Some(offers) = offers else {
        telemetry::request(RequestOutcome::Free);
        // What is not taken is still money until it expires; a handler that logs its headers must not log it. It may be for somebody
        // below.
        for name in [header_name::PAYMENT_SIGNATURE, header_name::X_PAYMENT] {
            if let http::header::Entry::Occupied(mut payments) = parts.headers.entry(name) {
                payments.iter_mut().for_each(|payment| payment.set_sensitive(true));
            }
        }
        let request = Request::from_parts(parts, work.unhashed());
        return Ok(inner.oneshot(request).await?.map(ResponseBody::inner));
    };
    if !is_paid {
        return Ok(page::demand(&config, &parts.method, &parts.uri, &parts.headers, &offers).into_response());
    }
    let sale = Sale::new(config, offers, &parts);
    purchase::serve(sale, inner, parts, work).await
}

/// The request's body, read whole if its price depends on it.
async fn read_to_price<B: Body<Data = Bytes>>(config: &Config, body: B) -> Result<Work<B>, Answer> {
    if !config.catalogue.reads_body() {
        return Ok(Work::Streaming(body));
    }
    let _place = config.unpriced.try_acquire().map_err(|_| sale::overloaded())?;
    let bytes = read_whole(body, config.limits.request_body, config.limits.body_deadline).await;
    bytes.map(Work::Whole).map_err(|error| sale::unread(&error))
}
