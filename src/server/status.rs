//! The service that tells payers what became of a payment.

use std::{
    convert::Infallible,
    future::Future,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use bytes::Bytes;
use http::{
    HeaderName, HeaderValue, Method, Request, Response, StatusCode,
    header::{ALLOW, CACHE_CONTROL, CONTENT_TYPE, RETRY_AFTER},
};
use http_body_util::Full;
use serde::Serialize;
use serde_json::json;
use tower_service::Service;

use crate::{
    ledger::{Fulfilment, Ledger, Record, Settlement},
    payment::PaymentKey,
    protocol::payment_status::{State, Status},
};

/// A service that answers what became of a payment, for payers that got no response and have no node to ask.
///
/// `GET …?network=eip155:84532&asset=0x…&payer=0x…&nonce=0x…` is answered with a [`Status`] as JSON. It tells only what
/// is public on the chain, now or later: never a signature, nor anything of the request or its response. Declare where it is served with
/// [`status_url`](super::RequirePaymentLayerBuilder::status_url); serve it where the payments are made, since clients go
/// to no other origin.
///
/// It knows payments of `exact`. A payer that pays by voucher presents its voucher again; how its channel stands is in every answer, and in
/// every 402 to a voucher for the wrong amount.
///
/// | status | when |
/// |---|---|
/// | 200 | the payment is known |
/// | 400 | a parameter is missing, given twice or not what it should be |
/// | 404 | the payment is not known, or not any more: records go when a payment can no longer be made |
/// | 405 | not a GET or HEAD |
/// | 503 | the ledger could not be asked |
///
/// ```
/// # #[cfg(feature = "onchain")]
/// # fn example(facilitator: tower_x402::facilitator::OnchainFacilitator) -> axum::Router {
/// use axum::Router;
/// use tower_x402::{facilitator::Facilitator, server::PaymentStatus};
///
/// Router::new().route_service("/payments/status", PaymentStatus::new(facilitator.ledger().clone()))
/// # }
/// ```
#[derive(Clone)]
pub struct PaymentStatus {
    ledger: Arc<dyn Ledger>,
}

impl PaymentStatus {
    /// Returns a service over a ledger: that of the facilitator which the layer uses.
    pub fn new(ledger: Arc<dyn Ledger>) -> Self {
        Self { ledger }
    }
}

/// The longest query, in bytes: the four parameters take about 220.
const MAX_QUERY: usize = 1024;

type Answer = Response<Full<Bytes>>;

impl<B> Service<Request<B>> for PaymentStatus {
    type Response = Answer;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Answer, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let asked = match *request.method() {
            Method::GET | Method::HEAD => key(request.uri().query().unwrap_or_default())
                .map_err(|detail| problem(StatusCode::BAD_REQUEST, "malformed", &detail)),
            _ => {
                let answer = problem(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", "only GET and HEAD");
                Err(with(answer, ALLOW, "GET, HEAD"))
            }
        };
        let ledger = self.ledger.clone();
        Box::pin(async move {
            Ok(match asked {
                Ok(key) => look_up(&*ledger, &key).await,
                Err(answer) => answer,
            })
        })
    }
}

debug_fields!(PaymentStatus {});

async fn look_up(ledger: &dyn Ledger, key: &PaymentKey) -> Answer {
    match ledger.get(key).await {
        Ok(Some(record)) => answer(StatusCode::OK, &status_of(&record)),
        Ok(None) => problem(StatusCode::NOT_FOUND, "unknown_payment", "no such payment is on record here"),
        Err(error) => {
            tracing::warn!(%error, "a payment could not be looked up");
            let answer = problem(StatusCode::SERVICE_UNAVAILABLE, "unavailable", "the ledger cannot be asked now");
            with(answer, RETRY_AFTER, "5")
        }
    }
}

fn status_of(record: &Record) -> Status {
    let submitted = record.transactions.last().copied();
    let (state, transaction, block) = match record.settlement {
        Settlement::None if record.fulfilment == Fulfilment::Released => (State::Failed, None, None),
        Settlement::Due if record.last_failure.is_some() => (State::Failed, submitted, None),
        Settlement::None | Settlement::Due => (State::Pending, None, None),
        Settlement::Submitted => (State::Submitted, submitted, None),
        Settlement::Unknown => (State::Unknown, submitted, None),
        Settlement::Settled { transaction, block } => (State::Settled, Some(transaction), block),
        Settlement::Final { block, .. } => (State::Final, record.transaction(), block),
        Settlement::Dead => (State::Dead, submitted, None),
    };
    Status { state, transaction, block }
}

/// Returns the payment that a query names. The error says what is wrong with the query.
fn key(query: &str) -> Result<PaymentKey, String> {
    if query.len() > MAX_QUERY {
        return Err(format!("the query has more than {MAX_QUERY} bytes"));
    }
    Ok(PaymentKey {
        network: parameter(query, "network")?,
        asset: parameter(query, "asset")?,
        payer: parameter(query, "payer")?,
        nonce: parameter(query, "nonce")?,
    })
}

fn parameter<T: std::str::FromStr>(query: &str, name: &str) -> Result<T, String> {
    let mut values = form_urlencoded::parse(query.as_bytes()).filter(|(key, _)| key == name).map(|(_, value)| value);
    let value = values.next().ok_or_else(|| format!("{name} is missing"))?;
    match values.next() {
        Some(_) => Err(format!("{name} is given more than once")),
        None => value.parse().map_err(|_| format!("{name} cannot be read")),
    }
}

fn problem(status: StatusCode, error: &str, detail: &str) -> Answer {
    answer(status, &json!({ "error": error, "detail": detail }))
}

fn answer(status: StatusCode, body: &impl Serialize) -> Answer {
    let body = serde_json::to_vec(body).unwrap_or_default();
    let mut answer = Response::new(Full::from(body));
    *answer.status_mut() = status;
    // Not true for long.
    with(with(answer, CACHE_CONTROL, "no-store"), CONTENT_TYPE, "application/json")
}

fn with(mut answer: Answer, name: HeaderName, value: &'static str) -> Answer {
    answer.headers_mut().insert(name, HeaderValue::from_static(value));
    answer
}
