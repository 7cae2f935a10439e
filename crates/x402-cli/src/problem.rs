//! Answers of our own: a status, a code for programs and a sentence for people.

use axum::{body::Body, response::IntoResponse};
use http::{
    HeaderValue, Response, StatusCode,
    header::{CACHE_CONTROL, CONTENT_TYPE},
};
use serde_json::json;

/// An answer that something is wrong.
#[derive(Debug)]
pub(crate) struct Problem {
    status: StatusCode,
    code: &'static str,
    detail: String,
}

impl Problem {
    pub(crate) fn new(status: StatusCode, code: &'static str, detail: impl Into<String>) -> Self {
        Self { status, code, detail: detail.into() }
    }

    pub(crate) fn into_response(self) -> Response<Body> {
        let Self { status, code, detail } = self;
        let mut response = json(status, &json!({ "error": code, "detail": detail }));
        response.headers_mut().insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
        response
    }
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response<Body> {
        self.into_response()
    }
}

/// Returns an answer with this JSON.
pub(crate) fn json(status: StatusCode, content: &serde_json::Value) -> Response<Body> {
    let mut response = Response::new(Body::from(content.to_string()));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}
