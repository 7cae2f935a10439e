//! Why a submission is not judged, or a lesson not taken, as an answer.

use std::time::Duration;

use bytes::Bytes;
use http::{
    HeaderValue, Response, StatusCode,
    header::{ALLOW, RETRY_AFTER},
};
use http_body_util::Full;
use serde_json::json;

use crate::{judge::JudgeError, respond::json_response};

/// The reason why a submission is not judged, or a lesson not taken.
pub(super) struct Refusal {
    pub(super) status: StatusCode,
    code: &'static str,
    pub(super) detail: String,
    retry_after: Option<Duration>,
}

impl Refusal {
    pub(super) fn new(status: StatusCode, code: &'static str, detail: impl Into<String>) -> Self {
        Self { status, code, detail: detail.into(), retry_after: None }
    }

    pub(super) fn wrong_method() -> Self {
        Self::new(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", "POST")
    }

    pub(super) fn later(self, delay: Duration) -> Self {
        Self { retry_after: Some(delay), ..self }
    }

    pub(super) fn into_response(self) -> Response<Full<Bytes>> {
        let mut response = json_response(self.status, &json!({ "error": self.code, "detail": self.detail }));
        if let Some(delay) = self.retry_after {
            response.headers_mut().insert(RETRY_AFTER, delay.as_secs().max(1).into());
        }
        if self.status == StatusCode::METHOD_NOT_ALLOWED {
            response.headers_mut().insert(ALLOW, HeaderValue::from_static("POST"));
        }
        response
    }
}

pub(super) fn refusal(error: JudgeError) -> Refusal {
    match error {
        JudgeError::Rejected(detail) => Refusal::new(StatusCode::UNPROCESSABLE_ENTITY, "not_taken", detail),
        JudgeError::Busy { retry_after } => {
            let detail = "too much is being judged; nothing was charged";
            let refusal = Refusal::new(StatusCode::SERVICE_UNAVAILABLE, "busy", detail);
            refusal.later(retry_after)
        }
        JudgeError::Failed(error) => {
            tracing::warn!(error = &*error as &dyn std::error::Error, "the judge failed; nothing was charged");
            internal()
        }
    }
}

pub(super) fn internal() -> Refusal {
    Refusal::new(StatusCode::INTERNAL_SERVER_ERROR, "judge_failed", "the judge failed; nothing was charged")
}
