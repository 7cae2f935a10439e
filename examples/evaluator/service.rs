//! The HTTP service: one paid endpoint and one free one.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use axum::{
    Json, Router,
    body::Bytes,
    extract::{DefaultBodyLimit, State, rejection::BytesRejection},
    http::StatusCode,
    response::{IntoResponse, Response},
    routing::{get, post},
};
use serde::Serialize;
use serde_json::json;
use tower_x402::{
    facilitator::{Facilitator, OnchainFacilitator},
    ledger::LedgerError,
    server::{PaymentStatus, RequirePaymentLayer},
};

use crate::arithmetic::{self, Refusal};

/// Where payers that got no answer ask what became of their payments.
pub(crate) const STATUS_PATH: &str = "/payments/status";
/// The largest request body.
const MAX_BODY: usize = 64 * 1024;

/// What the handlers share.
#[derive(Clone)]
pub(crate) struct Evaluator {
    handled: Arc<AtomicU64>,
    facilitator: Arc<dyn Facilitator>,
    /// The same, if it settles in this process.
    own: Option<OnchainFacilitator>,
    delay: Duration,
}

/// What `GET /stats` tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Stats {
    /// How often the judge was asked.
    pub(crate) handled: u64,
    pub(crate) settled: u64,
    pub(crate) pending: u64,
    pub(crate) unknown: u64,
    pub(crate) failed: u64,
    pub(crate) gas_used: u64,
}

impl Evaluator {
    /// An evaluator that waits for `delay` before each evaluation.
    pub(crate) fn new(facilitator: Arc<dyn Facilitator>, own: Option<OnchainFacilitator>, delay: Duration) -> Self {
        Self { handled: Arc::default(), facilitator, own, delay }
    }

    /// The service, charging with `paywall`.
    pub(crate) fn router(&self, paywall: RequirePaymentLayer) -> Router {
        Router::new()
            .route("/evaluate", post(evaluate).route_layer(paywall))
            .route("/stats", get(stats))
            .route("/healthz", get(async || "ok"))
            .route("/readyz", get(ready))
            .route_service(STATUS_PATH, PaymentStatus::new(self.facilitator.ledger().clone()))
            .fallback(async || refuse(StatusCode::NOT_FOUND, "POST /evaluate, GET /stats or GET /payments/status"))
            .layer(DefaultBodyLimit::max(MAX_BODY))
            .with_state(self.clone())
    }

    pub(crate) async fn stats(&self) -> Result<Stats, LedgerError> {
        let payments = self.facilitator.ledger().counts().await?;
        Ok(Stats {
            handled: self.handled.load(Ordering::Relaxed),
            settled: payments.settled,
            pending: payments.pending,
            unknown: payments.unknown,
            failed: payments.failed,
            gas_used: self.own.as_ref().map_or(0, |own| own.stats().gas_used),
        })
    }
}

async fn evaluate(State(evaluator): State<Evaluator>, body: Result<Bytes, BytesRejection>) -> Response {
    evaluator.handled.fetch_add(1, Ordering::Relaxed);
    tokio::time::sleep(evaluator.delay).await;
    let submission = match body {
        Ok(body) => body,
        Err(error) => {
            return refuse(error.status(), &format!("{}; send at most {MAX_BODY} bytes", error.body_text()));
        }
    };
    match arithmetic::evaluate(&submission) {
        Ok(evaluation) => Json(evaluation).into_response(),
        Err(Refusal::Malformed(message)) => refuse(StatusCode::BAD_REQUEST, &message),
        Err(Refusal::NotTaken(message)) => refuse(StatusCode::UNPROCESSABLE_ENTITY, &message),
    }
}

/// For a load balancer: an evaluator that could not be paid now should not be asked to work.
async fn ready(State(evaluator): State<Evaluator>) -> Response {
    let readiness = evaluator.facilitator.readiness().await;
    let reasons = readiness.reasons.iter();
    let reasons: Vec<_> =
        reasons.map(|reason| json!({ "code": reason.code(), "detail": reason.to_string() })).collect();
    let status = if readiness.is_ready() { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    (status, Json(json!({ "ready": readiness.is_ready(), "reasons": reasons }))).into_response()
}

async fn stats(State(evaluator): State<Evaluator>) -> Response {
    match evaluator.stats().await {
        Ok(stats) => Json(stats).into_response(),
        Err(error) => refuse(StatusCode::INTERNAL_SERVER_ERROR, &error.to_string()),
    }
}

/// Anything but a success is not charged.
fn refuse(status: StatusCode, message: &str) -> Response {
    (status, Json(json!({ "error": message }))).into_response()
}
