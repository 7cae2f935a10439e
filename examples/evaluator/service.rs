//! The HTTP service: an `EvaluatorService`, with `/stats`, `/healthz` and `/readyz`.

use std::{sync::Arc, time::Duration};

use async_trait::async_trait;
use axum::{
    Json, Router,
    extract::State,
    http::StatusCode,
    response::{IntoResponse, Response},
    routing::get,
};
use serde::Serialize;
use serde_json::json;
use tower_x402::{
    channels::Channels,
    facilitator::{Facilitator, NotReady, OnchainFacilitator, Readiness},
    ledger::LedgerError,
    server::RequirePaymentLayerBuilder,
};
use x402_market::{
    AgentCard, EvaluatorError, EvaluatorService, Submission, Verdict,
    judge::{Judge, JudgeError},
};

/// The largest request body.
const MAX_BODY: usize = 64 * 1024;

/// The state of the handlers.
#[derive(Clone)]
pub(crate) struct Evaluator {
    service: EvaluatorService,
    facilitator: Arc<dyn Facilitator>,
    /// The facilitator, if it is in this process.
    own: Option<OnchainFacilitator>,
    channels: Option<Channels>,
}

/// The answer to `GET /stats`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Stats {
    /// How often the judge ran.
    pub(crate) handled: u64,
    pub(crate) settled: u64,
    pub(crate) pending: u64,
    pub(crate) unknown: u64,
    pub(crate) failed: u64,
    pub(crate) gas_used: u64,
    #[serde(flatten)]
    pub(crate) evaluator: x402_market::EvaluatorStats,
}

impl Evaluator {
    /// Creates an evaluator that waits for `delay` before each evaluation.
    pub(crate) fn open(
        card: AgentCard,
        judge: Box<dyn Judge>,
        delay: Duration,
        (facilitator, own): (Arc<dyn Facilitator>, Option<OnchainFacilitator>),
        listed: bool,
        paywall: impl FnOnce(RequirePaymentLayerBuilder) -> RequirePaymentLayerBuilder,
    ) -> Result<Self, EvaluatorError> {
        let evaluator =
            x402_market::EvaluatorService::builder(card, Delayed { judge, delay }).facilitator(facilitator.clone());
        let service = evaluator.max_body(MAX_BODY).listed(listed).paywall(paywall).build()?;
        Ok(Self { service, facilitator, own, channels: None })
    }

    /// Sets the channels whose vouchers the paywall takes. `/readyz` tells whether they are ready, too.
    pub(crate) fn channels(mut self, channels: Option<Channels>) -> Self {
        self.channels = channels;
        self
    }

    /// Returns the service.
    pub(crate) fn router(&self) -> Router {
        Router::new()
            .route("/stats", get(stats))
            .route("/healthz", get(async || "ok"))
            .route("/readyz", get(ready))
            .fallback_service(self.service.clone())
            .with_state(self.clone())
    }

    pub(crate) async fn stats(&self) -> Result<Stats, LedgerError> {
        let payments = self.facilitator.ledger().counts().await?;
        let evaluator = self.service.stats();
        Ok(Stats {
            handled: evaluator.asked,
            settled: payments.settled,
            pending: payments.pending,
            unknown: payments.unknown,
            failed: payments.failed,
            gas_used: self.own.as_ref().map_or(0, |own| own.stats().gas_used),
            evaluator,
        })
    }
}

/// A judge with a delay before each evaluation.
struct Delayed {
    judge: Box<dyn Judge>,
    delay: Duration,
}

#[async_trait]
impl Judge for Delayed {
    fn accepts(&self, submission: &Submission) -> Result<(), JudgeError> {
        self.judge.accepts(submission)
    }

    async fn judge(&self, submission: &Submission) -> Result<Vec<Verdict>, JudgeError> {
        tokio::time::sleep(self.delay).await;
        self.judge.judge(submission).await
    }
}

/// Answers a load balancer: 503 while payments could not be settled, or channels not filled and claimed from.
async fn ready(State(evaluator): State<Evaluator>) -> Response {
    let mut reasons = Vec::new();
    let mut add = |scheme: &str, readiness: Readiness| {
        let named =
            |reason: &NotReady| json!({ "scheme": scheme, "code": reason.code(), "detail": reason.to_string() });
        reasons.extend(readiness.reasons.iter().map(named));
    };
    add("exact", evaluator.facilitator.readiness().await);
    if let Some(channels) = &evaluator.channels {
        add("vouchers", channels.readiness().await);
    }
    let status = if reasons.is_empty() { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    (status, Json(json!({ "ready": reasons.is_empty(), "reasons": reasons }))).into_response()
}

async fn stats(State(evaluator): State<Evaluator>) -> Response {
    match evaluator.stats().await {
        Ok(stats) => Json(stats).into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, Json(json!({ "error": error.to_string() }))).into_response(),
    }
}
