//! The answers of a directory.

use std::time::Duration;

use bytes::Bytes;
use http::{
    HeaderMap, HeaderValue, Response, StatusCode,
    header::{ALLOW, CACHE_CONTROL, CONTENT_TYPE, ETAG, IF_NONE_MATCH, RETRY_AFTER},
};
use http_body_util::Full;
use serde::Serialize;
use serde_json::json;
use sha2::{Digest as _, Sha256};

use super::{store::StoreError, wire::Problem};

/// An answer in the making. Boxed, because it is the error of functions here.
#[derive(Debug)]
pub(super) struct Answer(Box<Response<Full<Bytes>>>);

impl Answer {
    pub(super) fn bytes(status: StatusCode, kind: &'static str, body: impl Into<Bytes>) -> Self {
        let mut response = Response::new(Full::new(body.into()));
        *response.status_mut() = status;
        response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(kind));
        response.headers_mut().insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
        Self(Box::new(response))
    }

    pub(super) fn json(status: StatusCode, body: &impl Serialize) -> Self {
        Self::bytes(status, "application/json", serde_json::to_vec(body).unwrap_or_default())
    }

    /// What may be kept by those who read it, and asked for by its tag.
    pub(super) fn tagged(body: &impl Serialize, headers: &HeaderMap) -> Self {
        let body = serde_json::to_vec(body).unwrap_or_default();
        let tag = format!("\"{}\"", alloy_primitives::hex::encode(&Sha256::digest(&body)[..16]));
        let is_known = headers
            .get_all(IF_NONE_MATCH)
            .iter()
            .filter_map(|value| value.to_str().ok())
            .flat_map(|tags| tags.split(','))
            .any(|known| {
                matches!(known.trim().trim_start_matches("W/"), "*") || known.trim().trim_start_matches("W/") == tag
            });
        let mut answer = match is_known {
            true => Self(Box::new(Response::new(Full::default()))).with_status(StatusCode::NOT_MODIFIED),
            false => Self::bytes(StatusCode::OK, "application/json", body),
        };
        let headers = answer.0.headers_mut();
        headers.insert(CACHE_CONTROL, HeaderValue::from_static("public, max-age=60"));
        if let Ok(tag) = HeaderValue::try_from(tag) {
            headers.insert(ETAG, tag);
        }
        answer
    }

    pub(super) fn problem(status: StatusCode, error: &str, detail: impl ToString) -> Self {
        Self::json(status, &Problem { error: error.to_owned(), detail: detail.to_string() })
    }

    pub(super) fn healthy() -> Self {
        Self::json(StatusCode::OK, &json!({ "status": "ok" }))
    }

    pub(super) fn wrong_method(allowed: &'static str) -> Self {
        let mut answer = Self::problem(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", allowed);
        answer.0.headers_mut().insert(ALLOW, HeaderValue::from_static(allowed));
        answer
    }

    pub(super) fn too_many(retry_after: Duration) -> Self {
        Self::problem(StatusCode::TOO_MANY_REQUESTS, "too_many_requests", "ask less often").later(retry_after)
    }

    pub(super) fn unavailable(detail: impl ToString) -> Self {
        Self::problem(StatusCode::SERVICE_UNAVAILABLE, "unavailable", detail).later(Duration::from_secs(2))
    }

    /// Says when to come again.
    pub(super) fn later(mut self, delay: Duration) -> Self {
        self.0.headers_mut().insert(RETRY_AFTER, delay.as_secs().max(1).into());
        self
    }

    fn with_status(mut self, status: StatusCode) -> Self {
        *self.0.status_mut() = status;
        self
    }

    pub(super) fn into_response(self) -> Response<Full<Bytes>> {
        *self.0
    }
}

impl From<StoreError> for Answer {
    fn from(error: StoreError) -> Self {
        tracing::error!(error = &error as &dyn std::error::Error, "the directory's file cannot be used");
        Self::unavailable("the directory cannot read or write what it keeps")
    }
}
