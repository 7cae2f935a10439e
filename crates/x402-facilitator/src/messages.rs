//! The messages of the service, in v2 and v1: reads requests and writes answers.

use std::{sync::Arc, time::Duration};

use alloy_primitives::U256;
use bytes::Bytes;
use http::{
    HeaderValue, Response, StatusCode,
    header::{ALLOW, CACHE_CONTROL, CONTENT_TYPE, RETRY_AFTER, WWW_AUTHENTICATE},
};
use http_body_util::Full;
use serde::{Deserialize, Serialize};
use serde_json::{json, value::RawValue};
use tower_x402::{
    Network,
    charge::SettleAnswer,
    payment::{EchoedMetadata, Terms},
    protocol::{
        ExactOffer, ExactPayload, OfferError, PaymentPayload, PaymentRequirements, Reason, SettlementResponse,
        Verbatim, VerifyResponse, Version, v1,
    },
};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Operation {
    Verify,
    Settle,
}

/// The request body of `/verify` and `/settle`.
pub(crate) struct ParsedRequest {
    pub(crate) version: Version,
    pub(crate) terms: Arc<Terms>,
    pub(crate) payload: ExactPayload,
    /// The payer accepted exactly these terms.
    pub(crate) is_accepted: bool,
    /// What is to be charged, where that may be less than what the payer signed for.
    pub(crate) charged: Option<U256>,
    /// The other parts of the 402 that the payer returned.
    pub(crate) echo: Option<Arc<EchoedMetadata>>,
}

/// The reason why a request body cannot be read.
#[derive(Debug)]
pub(crate) struct InvalidRequest {
    pub(crate) reason: Reason,
    pub(crate) detail: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Envelope<'a> {
    #[serde(default)]
    x402_version: Option<u64>,
    #[serde(borrow)]
    payment_payload: &'a RawValue,
    #[serde(borrow)]
    payment_requirements: &'a RawValue,
}

#[derive(Deserialize)]
struct Versioned {
    #[serde(rename = "x402Version")]
    x402_version: u64,
}

impl ParsedRequest {
    pub(crate) fn read(body: &[u8], operation: Operation) -> Result<Self, InvalidRequest> {
        let invalid = |reason| move |error: serde_json::Error| InvalidRequest { reason, detail: error.to_string() };
        let envelope: Envelope<'_> = serde_json::from_slice(body).map_err(invalid(Reason::InvalidPayload))?;
        let payment = envelope.payment_payload.get();
        let Versioned { x402_version } = serde_json::from_str(payment).map_err(invalid(Reason::InvalidX402Version))?;
        if envelope.x402_version.is_some_and(|version| version != x402_version) {
            return Err(InvalidRequest {
                reason: Reason::InvalidX402Version,
                detail: "the request and its payment are of different versions".to_owned(),
            });
        }
        let requirements = envelope.payment_requirements.get();
        match x402_version {
            2 => {
                let payment: PaymentPayload = serde_json::from_str(payment).map_err(invalid(Reason::InvalidPayload))?;
                let mut offer: PaymentRequirements =
                    serde_json::from_str(requirements).map_err(invalid(Reason::InvalidPaymentRequirements))?;
                let mut exact = ExactOffer::try_from(&offer)?;
                let payload = read_payload(&payment.payload)?;
                // A maximum is settled for what is charged, and was accepted for what was signed for.
                let is_charge = operation == Operation::Settle && exact.is_maximum();
                let charged = is_charge.then_some(exact.amount);
                if is_charge {
                    exact.amount = payload.authorization.value;
                    offer.amount = exact.amount.to_string();
                }
                let terms = Terms::new(exact);
                // Others may leave out what is always in our offers.
                let is_accepted = match terms.permit() {
                    None => terms.is_accepted_by(&payment.accepted),
                    Some(_) => payment.accepted.read().is_ok_and(|accepted| offer.is_accepted_as(&accepted)),
                };
                Ok(Self {
                    version: Version::V2,
                    is_accepted,
                    charged,
                    payload,
                    terms: Arc::new(terms),
                    echo: EchoedMetadata::new(payment.resource, payment.extensions).map(Arc::new),
                })
            }
            1 => {
                let payment: v1::PaymentPayloadV1 =
                    serde_json::from_str(payment).map_err(invalid(Reason::InvalidPayload))?;
                let offer: v1::PaymentRequirementsV1 =
                    serde_json::from_str(requirements).map_err(invalid(Reason::InvalidPaymentRequirements))?;
                let terms = Terms::new(ExactOffer::try_from(&offer)?);
                let network = Network::from_v1_name(&payment.network);
                // No offer of v1 is to be paid by permit.
                let is_offered = payment.scheme == "exact" && terms.permit().is_none();
                Ok(Self {
                    version: Version::V1,
                    is_accepted: is_offered && network == Some(terms.offer().network()),
                    charged: None,
                    payload: read_payload(&payment.payload)?,
                    terms: Arc::new(terms),
                    echo: None,
                })
            }
            other => Err(InvalidRequest {
                reason: Reason::InvalidX402Version,
                detail: format!("x402Version {other} is not supported, only 1 and 2"),
            }),
        }
    }

    pub(crate) fn valid(&self) -> Answer {
        Answer::json(StatusCode::OK, &VerifyResponse::valid(self.payload.authorization.from.to_string()))
    }

    pub(crate) fn invalid(&self, reason: Reason, detail: &str) -> Answer {
        let reason = self.terms.reason(reason);
        let mut response = VerifyResponse::invalid(reason, detail);
        response.payer = Some(self.payload.authorization.from.to_string());
        Answer::json(StatusCode::OK, &response)
    }
}

impl InvalidRequest {
    pub(crate) fn into_answer(self, operation: Operation) -> Answer {
        match operation {
            Operation::Verify => Answer::invalid_verification(self.reason, &self.detail),
            Operation::Settle => Answer::invalid_settlement(self.reason, &self.detail),
        }
    }
}

impl From<OfferError> for InvalidRequest {
    fn from(error: OfferError) -> Self {
        let reason = match error {
            OfferError::Scheme(_) => Reason::UnsupportedScheme,
            OfferError::Network(_) => Reason::InvalidNetwork,
            OfferError::MissingDomain => Reason::MissingEip712Domain,
            _ => Reason::InvalidPaymentRequirements,
        };
        Self { reason, detail: error.to_string() }
    }
}

fn read_payload(payload: &Verbatim<ExactPayload>) -> Result<ExactPayload, InvalidRequest> {
    payload.read().map_err(|error| InvalidRequest { reason: Reason::InvalidPayload, detail: error.to_string() })
}

/// An HTTP answer. Boxed, because it is the error of some functions.
#[derive(Debug)]
pub(crate) struct Answer(Box<Response<Full<Bytes>>>);

impl Answer {
    pub(crate) fn json(status: StatusCode, body: &impl Serialize) -> Self {
        let body = serde_json::to_vec(body).unwrap_or_default();
        let mut response = Response::new(Full::from(body));
        *response.status_mut() = status;
        response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        response.headers_mut().insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
        Self(Box::new(response))
    }

    pub(crate) fn problem(status: StatusCode, error: &str, detail: &str) -> Self {
        Self::json(status, &json!({ "error": error, "detail": detail }))
    }

    pub(crate) fn healthy() -> Self {
        Self::json(StatusCode::OK, &json!({ "status": "ok" }))
    }

    pub(crate) fn wrong_method() -> Self {
        let mut answer = Self::problem(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", "use another method");
        answer.0.headers_mut().insert(ALLOW, HeaderValue::from_static("GET, HEAD, POST"));
        answer
    }

    pub(crate) fn unauthorized() -> Self {
        let detail = "send a key of this facilitator as Authorization: Bearer …";
        let mut answer = Self::problem(StatusCode::UNAUTHORIZED, "unauthorized", detail);
        answer.0.headers_mut().insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        answer
    }

    pub(crate) fn too_many(retry_after: Duration) -> Self {
        Self::problem(StatusCode::TOO_MANY_REQUESTS, "too_many_requests", "send fewer requests")
            .retry_after(retry_after)
    }

    /// The service is busy with others.
    pub(crate) fn too_many_requests() -> Self {
        Self::unavailable("too many requests are being processed", Duration::from_secs(1))
    }

    pub(crate) fn unavailable(detail: &str, retry_after: Duration) -> Self {
        Self::problem(StatusCode::SERVICE_UNAVAILABLE, "unavailable", detail).retry_after(retry_after)
    }

    pub(crate) fn invalid_verification(reason: Reason, detail: &str) -> Self {
        Self::json(StatusCode::BAD_REQUEST, &VerifyResponse::invalid(reason, detail))
    }

    pub(crate) fn invalid_settlement(reason: Reason, detail: &str) -> Self {
        let body = json!({
            "success": false, "errorReason": reason, "errorMessage": detail, "transaction": "", "network": "",
        });
        Self::json(StatusCode::BAD_REQUEST, &body)
    }

    pub(crate) fn settlement(request: &ParsedRequest, answer: &SettleAnswer) -> Self {
        #[derive(Serialize)]
        #[serde(rename_all = "camelCase")]
        struct WithMessage<T> {
            #[serde(flatten)]
            response: T,
            #[serde(skip_serializing_if = "Option::is_none")]
            error_message: Option<String>,
        }
        let (error_reason, error_message, transaction) = match answer {
            // There is no transaction for a charge of nothing.
            SettleAnswer::Settled(transaction) => {
                (None, None, Some(*transaction).filter(|transaction| !transaction.is_zero()))
            }
            SettleAnswer::Pending(transaction) => {
                let message = "the outcome is not known yet: send the same request again";
                (Some(Reason::SettlementPending), Some(message.to_owned()), *transaction)
            }
            SettleAnswer::Failed { reason, detail, transaction } => {
                (Some(request.terms.reason(reason.clone())), Some(detail.clone()), *transaction)
            }
            SettleAnswer::Unavailable(retry_after) => {
                return Self::unavailable("the payment cannot be settled now; nothing was sent", *retry_after);
            }
        };
        let offer = request.terms.offer();
        let hash = transaction.map_or(String::new(), |hash| hash.to_string());
        let mut response = SettlementResponse::settled(hash, offer.network().to_string());
        response.payer = Some(request.payload.authorization.from.to_string());
        response.success = error_reason.is_none();
        response.amount = response.success.then(|| request.charged.unwrap_or(offer.amount).to_string());
        response.error_reason = error_reason;
        let told = match request.version {
            Version::V1 => Self::json(
                StatusCode::OK,
                &WithMessage { response: v1::SettlementResponseV1::from(&response), error_message },
            ),
            _ => Self::json(StatusCode::OK, &WithMessage { response, error_message }),
        };
        if let SettleAnswer::Pending(_) = answer { told.retry_after(Duration::from_secs(1)) } else { told }
    }

    pub(crate) fn into_response(self) -> Response<Full<Bytes>> {
        *self.0
    }

    fn retry_after(mut self, delay: Duration) -> Self {
        self.0.headers_mut().insert(RETRY_AFTER, delay.as_secs().max(1).into());
        self
    }
}
