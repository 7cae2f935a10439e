//! The answers that the layer writes itself: the 402, problems, receipts and CORS headers.

use std::sync::Arc;

use alloy_primitives::B256;
use bytes::Bytes;
use http::{
    HeaderMap, HeaderName, HeaderValue, Response, StatusCode,
    header::{
        ACCESS_CONTROL_ALLOW_HEADERS, ACCESS_CONTROL_ALLOW_METHODS, ACCESS_CONTROL_ALLOW_ORIGIN,
        ACCESS_CONTROL_EXPOSE_HEADERS, ACCESS_CONTROL_REQUEST_HEADERS, ACCESS_CONTROL_REQUEST_METHOD, CACHE_CONTROL,
        CONTENT_LENGTH, CONTENT_TYPE, RETRY_AFTER, TRANSFER_ENCODING, VARY,
    },
    request,
    response::Parts,
};
use serde::Serialize;
use serde_json::{Map, Value, json};

use super::{
    config::Config,
    header_names::{PAYMENT_REQUIRED, PAYMENT_RESPONSE, PAYMENT_SIGNATURE, X_PAYMENT, X_PAYMENT_RESPONSE},
    kept_response::KeptResponse,
    offer::{PriceError, RenderedOffers},
    resource_url::Target,
    response::ResponseBody,
};
use crate::{
    charge::{Echoed, Offer, Refusal, RefusalKind, Unfinished, Unread, Why},
    ledger::channels::ChannelRecord,
    permit2::ALLOWANCE_REQUIRED,
    protocol::{SettlementResponse, encode_header},
    telemetry::RequestOutcome,
    vouchers::{ChannelId, VoucherState},
};

const EXPOSED: HeaderValue =
    HeaderValue::from_static("PAYMENT-REQUIRED, PAYMENT-RESPONSE, X-PAYMENT-RESPONSE, Retry-After");
const JSON: HeaderValue = HeaderValue::from_static("application/json");
const ANY: HeaderValue = HeaderValue::from_static("*");
const NO_STORE: HeaderValue = HeaderValue::from_static("no-store");

/// An answer that is being written. Boxed, because it is large and rarely made.
#[derive(Debug)]
pub(super) struct Answer(Box<Content>);

#[derive(Debug)]
struct Content {
    status: StatusCode,
    headers: HeaderMap,
    body: Bytes,
    ended: RequestOutcome,
}

#[derive(Serialize)]
struct Problem<'a> {
    error: &'a str,
    detail: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    transaction: Option<B256>,
}

impl Answer {
    /// Returns an answer with a status, a code and a sentence.
    pub(super) fn problem(status: StatusCode, error: &str, detail: &str, transaction: Option<B256>) -> Self {
        let body = serde_json::to_vec(&Problem { error, detail, transaction }).unwrap_or_default();
        let ended = match status {
            StatusCode::CONFLICT => RequestOutcome::Conflict,
            StatusCode::SERVICE_UNAVAILABLE => RequestOutcome::Unavailable,
            status if status.is_client_error() => RequestOutcome::Malformed,
            _ => RequestOutcome::Failed,
        };
        Self(Box::new(Content { status, headers: HeaderMap::new(), body: body.into(), ended }))
    }

    /// Returns the answer to a request that has no price.
    pub(super) fn not_priced(error: &PriceError) -> Self {
        Self::problem(error.status(), "not_priced", error.message(), None)
    }

    /// Returns the offer, with 402 or, for a payment that cannot be read, 400.
    pub(super) fn payment_required(status: StatusCode, offers: Option<RenderedOffers>) -> Self {
        // Only a price or a description that does not fit in a header leaves nothing to say.
        let Some(RenderedOffers { header, body }) = offers else {
            return Self::problem(
                StatusCode::INTERNAL_SERVER_ERROR,
                "internal_error",
                "the offer cannot be written",
                None,
            );
        };
        let headers = HeaderMap::from_iter([(PAYMENT_REQUIRED, header)]);
        Self(Box::new(Content { status, headers, body, ended: RequestOutcome::Unpaid }))
    }

    /// Replaces the body by a page for a person, and adds the headers that go with it.
    pub(super) fn shown_as(mut self, headers: HeaderMap, html: String) -> Self {
        self.0.headers.extend(headers);
        self.0.body = html.into();
        self
    }

    /// Returns the answer to a request for a refund that was made.
    pub(super) fn refunded(channel: ChannelId) -> Self {
        let body = json!({ "message": "Refund acknowledged", "channelId": channel }).to_string().into();
        Self(Box::new(Content { status: StatusCode::OK, headers: HeaderMap::new(), body, ended: RequestOutcome::Paid }))
    }

    /// Returns the answer to a payment that was refused, without an offer.
    pub(super) fn of(mut refusal: Refusal) -> Self {
        let status = status_of(&refusal);
        let mut answer = Self::problem(status, refusal.code(), &refusal.detail(), refusal.transaction());
        answer.0.ended = refusal.ended();
        answer.finish(&mut refusal)
    }

    /// Adds what a refusal says besides its code.
    fn finish(mut self, refusal: &mut Refusal) -> Self {
        if let Some(delay) = refusal.retry_after() {
            self.0.headers.insert(RETRY_AFTER, delay.as_secs().max(1).into());
        }
        if let Why::OtherHeaders(names) = refusal.why()
            && let Ok(names) = names.try_into()
        {
            self.0.headers.insert(VARY, names);
        }
        let receipt = refusal.take_receipt();
        self.with_receipt(receipt.and_then(|receipt| Receipt::of(&receipt)))
    }

    /// Adds a receipt, if there is one.
    pub(super) fn with_receipt(mut self, receipt: Option<Receipt>) -> Self {
        if let Some(receipt) = receipt {
            receipt.attach(&mut self.0.headers);
        }
        self
    }

    /// Returns the response, after `count` was told how the request ended.
    pub(super) fn into_response<B>(self, count: fn(RequestOutcome)) -> Response<ResponseBody<B>> {
        let Content { status, headers, body, ended } = *self.0;
        count(ended);
        let mut response = Response::new(ResponseBody::own(body));
        *response.status_mut() = status;
        *response.headers_mut() = headers;
        response.headers_mut().entry(CONTENT_TYPE).or_insert(JSON);
        response.headers_mut().insert(CACHE_CONTROL, NO_STORE);
        response
    }
}

/// One request: the offers made to it, and all that its answers are written from.
#[derive(Clone)]
pub(super) struct RequestContext {
    pub(super) config: Arc<Config>,
    pub(super) offers: Arc<[Offer]>,
    /// Why there are none: the request has no price now, and only what is on record is gone on with.
    pub(super) unpriced: Option<PriceError>,
    /// Where the request was sent.
    pub(super) target: Target<'static>,
    /// What the payer returned of the seller's extensions.
    pub(super) echoed: Echoed,
    /// The request's headers, which its response may depend on.
    pub(super) asked: HeaderMap,
}

impl RequestContext {
    pub(super) fn new(config: Arc<Config>, offers: Arc<[Offer]>, parts: &request::Parts) -> Self {
        let target = config.catalogue.target(&parts.uri, &parts.headers).into_owned();
        let asked = parts.headers.clone();
        Self { config, offers, unpriced: None, target, echoed: Echoed::default(), asked }
    }

    /// The 402 without an error.
    pub(super) fn payment_required(&self) -> Answer {
        Answer::payment_required(
            StatusCode::PAYMENT_REQUIRED,
            self.config.catalogue.render(&self.target, &self.offers, None),
        )
    }

    /// Returns the answer to a payment that was refused. Where another one may be made, it has the offer again, with what is wrong; a voucher
    /// for another amount than it must be is told how its channel stands, so that its payer can sign another one.
    pub(super) fn refuse(&self, mut refusal: Refusal) -> Answer {
        if let Some(error) = &self.unpriced {
            let is_new = refusal.receipt().is_none()
                && matches!(refusal.why(), Why::Malformed(_) | Why::Rejected(_) | Why::Misstated(..));
            return if is_new { Answer::not_priced(error) } else { Answer::of(refusal) };
        }
        let (catalogue, error) = (&self.config.catalogue, (refusal.code(), &*refusal.detail()));
        let offers = match refusal.why() {
            Why::Malformed(_) | Why::Rejected(_) => catalogue.render(&self.target, &self.offers, Some(error)),
            Why::Misstated(_, offer, record) => {
                let more = corrective_fields(record);
                catalogue.render_corrective(&self.target, &self.offers, error, (*offer, more))
            }
            _ => return Answer::of(refusal),
        };
        let mut answer = Answer::payment_required(status_of(&refusal), offers);
        answer.0.ended = refusal.ended();
        answer.finish(&mut refusal)
    }
}

/// Returns the status of a refusal: that of its kind, but for these.
fn status_of(refusal: &Refusal) -> StatusCode {
    match refusal.why() {
        Why::Rejected(rejection) if rejection.reason.as_str() == ALLOWANCE_REQUIRED => StatusCode::PRECONDITION_FAILED,
        Why::Unread(Unread::TooLarge) => StatusCode::PAYLOAD_TOO_LARGE,
        Why::Unread(Unread::TooSlow) => StatusCode::REQUEST_TIMEOUT,
        Why::Unfinished(Unfinished::TooSlow) => StatusCode::GATEWAY_TIMEOUT,
        _ => match refusal.kind() {
            RefusalKind::Malformed => StatusCode::BAD_REQUEST,
            RefusalKind::Rejected => StatusCode::PAYMENT_REQUIRED,
            RefusalKind::Conflict => StatusCode::CONFLICT,
            RefusalKind::Pending | RefusalKind::Unavailable => StatusCode::SERVICE_UNAVAILABLE,
            RefusalKind::Failed => StatusCode::INTERNAL_SERVER_ERROR,
        },
    }
}

/// `PAYMENT-RESPONSE`.
#[derive(Debug)]
pub(super) struct Receipt(HeaderValue);

impl Receipt {
    /// Returns `None` only for what cannot be written in a header.
    pub(super) fn of(settlement: &SettlementResponse) -> Option<Self> {
        encode_header(settlement).ok()?.try_into().ok().map(Self)
    }

    fn attach(self, headers: &mut HeaderMap) {
        headers.insert(PAYMENT_RESPONSE, self.0);
    }
}

/// Returns what a corrective 402 says of a channel.
fn corrective_fields(record: &ChannelRecord) -> Map<String, Value> {
    let voucher = record.voucher.as_ref().map(|voucher| VoucherState {
        signed_max_claimable: voucher.max_claimable_amount,
        signature: voucher.signature,
    });
    let mut fields = Map::new();
    let mut add = |name: &str, value: Result<Value, serde_json::Error>| {
        if let Ok(value) = value {
            fields.insert(name.to_owned(), value);
        }
    };
    add("channelState", serde_json::to_value(record.state()));
    if let Some(voucher) = voucher {
        add("voucherState", serde_json::to_value(voucher));
    }
    fields
}

/// Makes a response of one that was kept, with the receipt of its payment.
pub(super) fn replayed<R>(kept: KeptResponse, receipt: Receipt) -> Response<ResponseBody<R>> {
    let body = ResponseBody::whole(kept.body, kept.trailers.map(Box::new));
    let (mut parts, body) = Response::new(body).into_parts();
    parts.status = kept.status;
    parts.headers = kept.headers;
    mark_paid(&mut parts, receipt);
    Response::from_parts(parts, body)
}

/// Adds the receipt to a response that was paid for, and keeps it out of shared caches.
pub(super) fn mark_paid(parts: &mut Parts, receipt: Receipt) {
    receipt.attach(&mut parts.headers);
    keep_private(&mut parts.headers);
}

/// Keeps a paid response out of shared caches.
fn keep_private(headers: &mut HeaderMap) {
    // Most handlers say nothing of caches.
    if !headers.keys().any(speaks_to_caches) {
        headers.insert(CACHE_CONTROL, HeaderValue::from_static("private"));
        return;
    }
    let kept: Vec<String> = headers
        .get_all(CACHE_CONTROL)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .map(str::trim)
        .filter(|directive| {
            let name = directive.split('=').next().unwrap_or_default().trim();
            !["", "public", "private", "s-maxage"].iter().any(|removed| name.eq_ignore_ascii_case(removed))
        })
        .map(str::to_owned)
        .collect();
    let targeted: Vec<HeaderName> =
        headers.keys().filter(|name| **name != CACHE_CONTROL && speaks_to_caches(name)).cloned().collect();
    for name in targeted {
        headers.remove(name);
    }
    let value = std::iter::once("private".to_owned()).chain(kept).collect::<Vec<_>>().join(", ");
    headers.insert(CACHE_CONTROL, HeaderValue::try_from(value).unwrap_or(NO_STORE));
}

/// `Cache-Control`, and what speaks to caches that then do not look at it (RFC 9213, and what came before it).
fn speaks_to_caches(name: &HeaderName) -> bool {
    let text = name.as_str();
    *name == CACHE_CONTROL
        || text.ends_with("cdn-cache-control")
        || ["surrogate-control", "edge-control", "x-accel-expires"].contains(&text)
}

/// Returns the request headers that a CORS layer above a [`RequirePaymentLayer`](super::RequirePaymentLayer) must allow, so that scripts
/// on other origins can pay.
///
/// They are `PAYMENT-SIGNATURE`, `X-PAYMENT` and, since the official clients send it, `Access-Control-Expose-Headers`. Allow what your
/// handlers need beside them, such as `Content-Type` for JSON.
///
/// ```
/// use axum::http::{HeaderName, Method, header::CONTENT_TYPE};
/// use tower_http::cors::{Any, CorsLayer};
/// use tower_x402::server::{cors_allow_headers, cors_expose_headers};
///
/// let cors = CorsLayer::new()
///     .allow_origin(Any)
///     .allow_methods([Method::GET, Method::POST])
///     .allow_headers([cors_allow_headers(), vec![CONTENT_TYPE]].concat())
///     .expose_headers([cors_expose_headers(), vec![HeaderName::from_static("x-request-id")]].concat());
/// ```
pub fn cors_allow_headers() -> Vec<HeaderName> {
    vec![PAYMENT_SIGNATURE.clone(), X_PAYMENT.clone(), ACCESS_CONTROL_EXPOSE_HEADERS]
}

/// Returns the response headers that a CORS layer above a [`RequirePaymentLayer`](super::RequirePaymentLayer) must expose, so that scripts
/// on other origins can read offers, receipts and when to try again.
///
/// The layer exposes them itself, but a CORS layer that exposes any headers replaces what layers below it say. See
/// [`cors_allow_headers`] for an example.
pub fn cors_expose_headers() -> Vec<HeaderName> {
    vec![PAYMENT_REQUIRED, PAYMENT_RESPONSE, X_PAYMENT_RESPONSE, RETRY_AFTER]
}

/// The CORS headers that a script on another origin needs.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cors {
    /// Whether every origin is allowed; otherwise that is left to a layer above.
    pub(super) any_origin: bool,
}

impl Cors {
    /// Lets the script read the payment headers.
    pub(super) fn apply(self, headers: &mut HeaderMap) {
        headers.append(ACCESS_CONTROL_EXPOSE_HEADERS, EXPOSED);
        if self.any_origin {
            headers.insert(ACCESS_CONTROL_ALLOW_ORIGIN, ANY);
        }
    }

    /// Allows what a preflight asks for. Without credentials, this lets a script do no more than any program can.
    pub(super) fn preflight<B>(request: &HeaderMap) -> Response<ResponseBody<B>> {
        let mut response = Response::new(ResponseBody::own(Bytes::new()));
        *response.status_mut() = StatusCode::NO_CONTENT;
        let headers = response.headers_mut();
        headers.insert(ACCESS_CONTROL_ALLOW_ORIGIN, ANY);
        for (asked, allowed) in [
            (ACCESS_CONTROL_REQUEST_METHOD, ACCESS_CONTROL_ALLOW_METHODS),
            (ACCESS_CONTROL_REQUEST_HEADERS, ACCESS_CONTROL_ALLOW_HEADERS),
        ] {
            if let Some(asked) = request.get(asked) {
                headers.insert(allowed, asked.clone());
            }
        }
        headers.insert(VARY, HeaderValue::from_static("Access-Control-Request-Method, Access-Control-Request-Headers"));
        response
    }
}

/// The answer to a preflight that the service gave: the head is all that a browser reads of it, and a service that does not
/// look at the method would give away what it sells in the body.
pub(super) fn head_only<R, B>(response: Response<R>) -> Response<ResponseBody<B>> {
    let (mut parts, _) = response.into_parts();
    for name in [CONTENT_LENGTH, CONTENT_TYPE, TRANSFER_ENCODING] {
        parts.headers.remove(name);
    }
    Response::from_parts(parts, ResponseBody::own(Bytes::new()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_paid_response_is_private_whatever_the_handler_said() {
        for (said, kept) in [
            (&[][..], "private"),
            (&["public, max-age=60, s-maxage=600"], "private, max-age=60"),
            (&["no-store", "Public"], "private, no-store"),
            (&["S-MaxAge = 5,private"], "private"),
        ] {
            let mut headers = HeaderMap::new();
            for value in said {
                headers.append(CACHE_CONTROL, HeaderValue::from_static(value));
            }
            keep_private(&mut headers);
            assert_eq!(headers.get_all(CACHE_CONTROL).iter().collect::<Vec<_>>(), [kept]);
        }
    }

    #[test]
    fn no_cache_is_told_otherwise_in_a_header_of_its_own() {
        let mut headers = HeaderMap::new();
        for name in ["cdn-cache-control", "vercel-cdn-cache-control", "surrogate-control", "edge-control"] {
            headers.insert(name, HeaderValue::from_static("public, max-age=600"));
        }
        headers.insert("x-accel-expires", HeaderValue::from_static("600"));
        keep_private(&mut headers);
        assert_eq!(headers.keys().collect::<Vec<_>>(), [CACHE_CONTROL]);
    }
}
