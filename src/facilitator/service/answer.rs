//! The answers of the service.

use std::time::Duration;

use alloy_primitives::{Address, B256};
use bytes::Bytes;
use http::{
    HeaderValue, Response, StatusCode,
    header::{ALLOW, CACHE_CONTROL, CONTENT_TYPE, RETRY_AFTER, WWW_AUTHENTICATE},
};
use http_body_util::Full;
use serde::Serialize;
use serde_json::json;

use super::read::Asked;
use crate::protocol::{Reason, SettlementResponse, VerifyResponse, Version, v1};

/// An answer in the making. Boxed, because it is the error of functions here.
#[derive(Debug)]
pub(super) struct Answer(Box<Response<Full<Bytes>>>);

/// What is said of a settlement.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Said {
    Paid(B256),
    /// Not known yet.
    Pending(Option<B256>),
    Failed {
        reason: Reason,
        detail: String,
        transaction: Option<B256>,
    },
    /// Nothing was sent.
    Unavailable(Duration),
}

impl Answer {
    pub(super) fn json(status: StatusCode, body: &impl Serialize) -> Self {
        let body = serde_json::to_vec(body).unwrap_or_default();
        let mut response = Response::new(Full::from(body));
        *response.status_mut() = status;
        response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        response.headers_mut().insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
        Self(Box::new(response))
    }

    pub(super) fn problem(status: StatusCode, error: &str, detail: &str) -> Self {
        Self::json(status, &json!({ "error": error, "detail": detail }))
    }

    pub(super) fn healthy() -> Self {
        Self::json(StatusCode::OK, &json!({ "status": "ok" }))
    }

    pub(super) fn wrong_method() -> Self {
        let mut answer = Self::problem(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", "another method");
        answer.0.headers_mut().insert(ALLOW, HeaderValue::from_static("GET, HEAD, POST"));
        answer
    }

    pub(super) fn unauthorized() -> Self {
        let detail = "send a key of this facilitator as Authorization: Bearer …";
        let mut answer = Self::problem(StatusCode::UNAUTHORIZED, "unauthorized", detail);
        answer.0.headers_mut().insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        answer
    }

    pub(super) fn too_many(retry_after: Duration) -> Self {
        Self::problem(StatusCode::TOO_MANY_REQUESTS, "too_many_requests", "ask less often").later(retry_after)
    }

    pub(super) fn unavailable(detail: &str, retry_after: Duration) -> Self {
        Self::problem(StatusCode::SERVICE_UNAVAILABLE, "unavailable", detail).later(retry_after)
    }

    pub(super) fn verdict(refusal: Option<(Reason, &str)>, payer: Option<Address>) -> Self {
        Self::json(StatusCode::OK, &verdict(refusal, payer))
    }

    pub(super) fn unreadable_verification(reason: Reason, detail: &str) -> Self {
        Self::json(StatusCode::BAD_REQUEST, &verdict(Some((reason, detail)), None))
    }

    pub(super) fn unreadable_settlement(reason: Reason, detail: &str) -> Self {
        let body = json!({
            "success": false, "errorReason": reason, "errorMessage": detail, "transaction": "", "network": "",
        });
        Self::json(StatusCode::BAD_REQUEST, &body)
    }

    pub(super) fn settlement(asked: &Asked, said: &Said) -> Self {
        #[derive(Serialize)]
        #[serde(rename_all = "camelCase")]
        struct Told<T> {
            #[serde(flatten)]
            response: T,
            #[serde(skip_serializing_if = "Option::is_none")]
            error_message: Option<String>,
        }
        let (error_reason, error_message, transaction) = match said {
            Said::Paid(transaction) => (None, None, Some(*transaction)),
            Said::Pending(transaction) => {
                let message = "not known yet: ask again with the same body";
                (Some(Reason::SettlementPending), Some(message.to_owned()), *transaction)
            }
            Said::Failed { reason, detail, transaction } => (Some(reason.clone()), Some(detail.clone()), *transaction),
            Said::Unavailable(retry_after) => {
                return Self::unavailable("the payment cannot be settled now; nothing was sent", *retry_after);
            }
        };
        let offer = asked.terms.offer();
        let response = SettlementResponse {
            success: error_reason.is_none(),
            amount: error_reason.is_none().then(|| offer.amount.to_string()),
            error_reason,
            payer: Some(asked.payload.authorization.from.to_string()),
            transaction: transaction.map_or(String::new(), |hash| hash.to_string()),
            network: offer.network().to_string(),
            extensions: None,
        };
        let answer = match asked.version {
            Version::V2 => Self::json(StatusCode::OK, &Told { response, error_message }),
            Version::V1 => {
                Self::json(StatusCode::OK, &Told { response: v1::SettlementResponse::from(&response), error_message })
            }
        };
        if let Said::Pending(_) = said { answer.later(Duration::from_secs(1)) } else { answer }
    }

    pub(super) fn into_response(self) -> Response<Full<Bytes>> {
        *self.0
    }

    fn later(mut self, delay: Duration) -> Self {
        self.0.headers_mut().insert(RETRY_AFTER, delay.as_secs().max(1).into());
        self
    }
}

fn verdict(refusal: Option<(Reason, &str)>, payer: Option<Address>) -> VerifyResponse {
    VerifyResponse {
        is_valid: refusal.is_none(),
        invalid_message: refusal.as_ref().map(|(_, detail)| (*detail).to_owned()),
        invalid_reason: refusal.map(|(reason, _)| reason),
        payer: payer.map(|payer| payer.to_string()),
    }
}
