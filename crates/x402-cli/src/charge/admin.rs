//! Answers the operator's questions to a running seller, on this machine only.

use std::{sync::Arc, time::Duration};

use axum::{
    Router,
    body::Body,
    extract::{Request, State},
    http::{
        Response, StatusCode,
        header::{CONTENT_TYPE, HOST},
    },
    middleware::{self, Next},
    routing::get,
};
use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusHandle};
use serde_json::json;
use tower_x402::{
    channels::Channels,
    facilitator::{Facilitator, NotReady, Readiness},
    ledger::LedgerError,
    ops::{ChannelFilter, ExportFormat, Operator, PaymentFilter, describe_metrics},
};

use crate::{
    chain::Settlement,
    error::Error,
    problem::{self, Problem},
    serve::is_loopback,
};

/// The interval at which the metrics exporter drains its histograms.
const UPKEEP: Duration = Duration::from_secs(5);
/// The most lines of an answer, in bytes. The command `x402 books` lists everything.
const MOST: usize = 4 << 20;

/// Installs the recorder of metrics.
pub(super) fn metrics() -> Result<PrometheusHandle, Error> {
    let handle = PrometheusBuilder::new().install_recorder().map_err(|error| Error::Metrics(Box::new(error)))?;
    describe_metrics();
    let upkeep = handle.clone();
    tokio::spawn(async move {
        loop {
            tokio::time::sleep(UPKEEP).await;
            upkeep.run_upkeep();
        }
    });
    Ok(handle)
}

#[derive(Clone)]
struct Shop {
    facilitator: Arc<dyn Facilitator>,
    channels: Option<Channels>,
    operator: Operator,
    metrics: PrometheusHandle,
}

/// Returns the routes for the operator.
pub(super) fn router(settlement: &Settlement, metrics: PrometheusHandle) -> Router {
    let operator = Operator::new(settlement.books.payments.clone()).channel_ledger(settlement.books.channels.clone());
    let shop =
        Shop { facilitator: settlement.facilitator.clone(), channels: settlement.channels.clone(), operator, metrics };
    Router::new()
        .route("/healthz", get(async || "ok"))
        .route("/readyz", get(ready))
        .route("/metrics", get(async |State(shop): State<Shop>| shop.metrics.render()))
        .route("/payments", get(payments))
        .route("/channels", get(channels))
        .route("/report", get(report))
        .layer(middleware::from_fn(from_this_machine))
        .with_state(shop)
}

/// A page in a browser on this machine can have any name point here (DNS rebinding).
async fn from_this_machine(request: Request, next: Next) -> Response<Body> {
    match is_loopback(request.headers().get(HOST).map(http::HeaderValue::as_bytes).unwrap_or_default()) {
        true => next.run(request).await,
        false => {
            Problem::new(StatusCode::FORBIDDEN, "not_this_machine", "ask by 127.0.0.1 or localhost").into_response()
        }
    }
}

/// Answers a load balancer: 503 while payments could not be settled, or channels not filled and claimed from.
async fn ready(State(shop): State<Shop>) -> Response<Body> {
    let mut reasons = Vec::new();
    let mut add = |scheme: &str, readiness: Readiness| {
        let named =
            |reason: &NotReady| json!({ "scheme": scheme, "code": reason.code(), "detail": reason.to_string() });
        reasons.extend(readiness.reasons.iter().map(named));
    };
    add("exact", shop.facilitator.readiness().await);
    if let Some(channels) = &shop.channels {
        add("vouchers", channels.readiness().await);
    }
    let status = if reasons.is_empty() { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    problem::json(status, &json!({ "ready": reasons.is_empty(), "reasons": reasons }))
}

async fn payments(State(shop): State<Shop>, request: Request) -> Response<Body> {
    let which: PaymentFilter = match state_of(&request).parse() {
        Ok(which) => which,
        Err(error) => return unreadable(&error),
    };
    let mut export = shop.operator.export(which, ExportFormat::JsonLines);
    let mut lines = String::new();
    loop {
        match export.next().await {
            Ok(Some(more)) if lines.len() + more.len() <= MOST => lines.push_str(&more),
            Ok(None) => return in_lines(lines),
            Ok(Some(_)) => return too_many(),
            Err(error) => return failed(&error),
        }
    }
}

async fn channels(State(shop): State<Shop>, request: Request) -> Response<Body> {
    let which: ChannelFilter = match state_of(&request).parse() {
        Ok(which) => which,
        Err(error) => return unreadable(&error),
    };
    let mut export = shop.operator.export_channels(which, ExportFormat::JsonLines);
    let mut lines = String::new();
    loop {
        match export.next().await {
            Ok(Some(more)) if lines.len() + more.len() <= MOST => lines.push_str(&more),
            Ok(None) => return in_lines(lines),
            Ok(Some(_)) => return too_many(),
            Err(error) => return failed(&error),
        }
    }
}

async fn report(State(shop): State<Shop>) -> Response<Body> {
    let reports =
        async { Ok::<_, LedgerError>((shop.operator.report().await?, shop.operator.channel_report().await?)) };
    match reports.await {
        Ok((payments, channels)) => {
            problem::json(StatusCode::OK, &json!({ "payments": payments.assets, "channels": channels }))
        }
        Err(error) => failed(&error),
    }
}

/// Returns the filter after `state=`.
fn state_of(request: &Request) -> String {
    let query = request.uri().query().unwrap_or_default();
    let state = query.split('&').find_map(|pair| pair.strip_prefix("state="));
    state.unwrap_or("all").to_owned()
}

fn in_lines(lines: String) -> Response<Body> {
    let mut response = Response::new(Body::from(lines));
    let media_type = http::HeaderValue::from_static(ExportFormat::JsonLines.media_type());
    response.headers_mut().insert(CONTENT_TYPE, media_type);
    response
}

fn unreadable(error: &impl std::fmt::Display) -> Response<Body> {
    Problem::new(StatusCode::BAD_REQUEST, "state", error.to_string()).into_response()
}

fn too_many() -> Response<Body> {
    let detail = "there are too many to answer at once: ask for one state, or see x402 books export";
    Problem::new(StatusCode::INSUFFICIENT_STORAGE, "too_many", detail).into_response()
}

fn failed(error: &LedgerError) -> Response<Body> {
    Problem::new(StatusCode::SERVICE_UNAVAILABLE, "ledger", error.to_string()).into_response()
}
