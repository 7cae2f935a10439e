//! Why a submission is not judged, or a lesson not taken, as an answer.

use http::StatusCode;

use crate::{judge::JudgeError, respond::Refusal};

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
