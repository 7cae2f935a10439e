//! The answers that the layer writes itself.

use std::time::Duration;

use alloy_primitives::B256;
use bytes::Bytes;
use http::{
    HeaderMap, HeaderName, HeaderValue, Response, StatusCode,
    header::{
        ACCESS_CONTROL_ALLOW_HEADERS, ACCESS_CONTROL_ALLOW_METHODS, ACCESS_CONTROL_ALLOW_ORIGIN,
        ACCESS_CONTROL_EXPOSE_HEADERS, ACCESS_CONTROL_REQUEST_HEADERS, ACCESS_CONTROL_REQUEST_METHOD, CACHE_CONTROL,
        CONTENT_LENGTH, CONTENT_TYPE, RETRY_AFTER, TRANSFER_ENCODING, VARY,
    },
    response::Parts,
};
use serde::Serialize;

use super::{offer::Demand, receipt::Receipt, response_body::ResponseBody};
use crate::{
    protocol::{SettlementResponse, Version, header_name},
    telemetry::{self, RequestOutcome},
};

const PAYMENT_REQUIRED: HeaderName = HeaderName::from_static(header_name::PAYMENT_REQUIRED);
const EXPOSED: HeaderValue = HeaderValue::from_static("PAYMENT-REQUIRED, PAYMENT-RESPONSE, X-PAYMENT-RESPONSE");
const JSON: HeaderValue = HeaderValue::from_static("application/json");
const ANY: HeaderValue = HeaderValue::from_static("*");
const NO_STORE: HeaderValue = HeaderValue::from_static("no-store");

/// An answer in the making. Boxed, because it is the error of most functions here and rarely made.
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
    /// A status with a code and a sentence.
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

    /// A demand for payment, with 402 or, for a payment that cannot be read, 400.
    pub(super) fn demand(status: StatusCode, demand: Option<Demand>) -> Self {
        // Only a price or a description that does not fit in a header leaves nothing to say.
        let Some(Demand { header, body }) = demand else {
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

    /// The same, said to a person: in another body, with the headers that go with it.
    pub(super) fn shown_as(mut self, headers: HeaderMap, html: String) -> Self {
        self.0.headers.extend(headers);
        self.0.body = html.into();
        self
    }

    /// How it is counted, where that does not follow from its status.
    pub(super) fn counted(mut self, ended: RequestOutcome) -> Self {
        self.0.ended = ended;
        self
    }

    /// Says how the payment was settled, or not.
    pub(super) fn with_settlement(self, settlement: &SettlementResponse, version: Version) -> Self {
        self.with_receipt(Receipt::of(settlement, version))
    }

    /// The same, where that is written already.
    pub(super) fn with_receipt(mut self, receipt: Option<Receipt>) -> Self {
        if let Some(receipt) = receipt {
            receipt.attach(&mut self.0.headers);
        }
        self
    }

    /// Its status.
    pub(super) fn status(&self) -> StatusCode {
        self.0.status
    }

    /// Says when to try again.
    pub(super) fn retry_after(mut self, delay: Duration) -> Self {
        self.0.headers.insert(RETRY_AFTER, delay.as_secs().max(1).into());
        self
    }

    pub(super) fn into_response<B>(self) -> Response<ResponseBody<B>> {
        let Content { status, headers, body, ended } = *self.0;
        telemetry::request(ended);
        let mut response = Response::new(ResponseBody::own(body));
        *response.status_mut() = status;
        *response.headers_mut() = headers;
        response.headers_mut().entry(CONTENT_TYPE).or_insert(JSON);
        response.headers_mut().insert(CACHE_CONTROL, NO_STORE);
        response
    }
}

/// Keeps a paid response out of shared caches.
pub(super) fn keep_private(headers: &mut HeaderMap) {
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

/// What a script on another origin needs.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cors {
    /// Whether every origin is welcome; otherwise that is left to a layer above.
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

/// A handler's response that was paid for.
pub(super) fn mark_paid(parts: &mut Parts, receipt: Receipt) {
    receipt.attach(&mut parts.headers);
    keep_private(&mut parts.headers);
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
