//! Answers the operator's questions to a running seller: a page for people, JSON and metrics for programs.
//!
//! | file | what it has |
//! |---|---|
//! | `guard.rs` | who may ask |
//! | `summary.rs`, `income.rs` | what the page shows, and where that comes from |
//! | `page.html`, `page.css`, `page.js` | the page, which draws what `/summary` says |

mod guard;
mod income;
mod summary;

use std::{sync::Arc, time::Duration};

use axum::{
    Extension, Router,
    body::Body,
    extract::{Request, State},
    http::{HeaderValue, Response, StatusCode, header::CONTENT_TYPE},
    middleware,
    routing::get,
};
use metrics_exporter_prometheus::{BuildError, Matcher, PrometheusBuilder, PrometheusHandle};
use serde_json::{Value, json};
use tower_x402::{
    ledger::LedgerError,
    ops::{ChannelFilter, ExportFormat, Operator, PaymentFilter, describe_metrics},
};

pub(super) use self::guard::{Guard, TOKEN_VARIABLE};
use self::{guard::Admitted, summary::Summary};
use super::routes::Routes;
use crate::{
    chain::Settlement,
    error::Error,
    problem::{self, Problem},
};

/// The interval at which the metrics exporter drains its histograms.
const UPKEEP: Duration = Duration::from_secs(5);
/// The most lines of an answer, in bytes. The command `x402 books` lists everything.
const MOST: usize = 4 << 20;
/// The buckets of histograms of seconds. Unlike quantiles, they can be summed over processes.
const SECONDS: [f64; 12] = [0.001, 0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 15.0, 60.0];
/// The buckets of payments in a transaction. A batch has at most 330.
const PAYMENTS: [f64; 8] = [1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 330.0];

/// Installs the recorder of metrics.
pub(super) fn metrics() -> Result<PrometheusHandle, Error> {
    let install = || -> Result<PrometheusHandle, BuildError> {
        PrometheusBuilder::new()
            .set_buckets_for_metric(Matcher::Suffix("_seconds".to_owned()), &SECONDS)?
            .set_buckets_for_metric(Matcher::Full("x402_payments_per_transaction".to_owned()), &PAYMENTS)?
            .install_recorder()
    };
    let handle = install().map_err(|error| Error::Metrics(Box::new(error)))?;
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
    summary: Arc<Summary>,
    operator: Operator,
}

/// Returns the routes for the operator. `about` is what the page says of the seller; it holds no secrets.
pub(super) fn router(
    settlement: &Settlement,
    metrics: PrometheusHandle,
    routes: Routes,
    about: Value,
    guard: Guard,
) -> Router {
    let operator = Operator::new(settlement.books.payments.clone()).channel_ledger(settlement.books.channels.clone());
    let summary = Summary::gather(settlement, &operator, metrics, routes, about);
    let shown = |media_type, content: &'static str| get(async move || typed(media_type, content));
    Router::new()
        .route("/", shown("text/html; charset=utf-8", include_str!("page.html")))
        .route("/page.css", shown("text/css; charset=utf-8", include_str!("page.css")))
        .route("/page.js", shown("text/javascript; charset=utf-8", include_str!("page.js")))
        .route("/summary", get(summarize))
        .route("/healthz", get(async || "ok"))
        .route("/readyz", get(ready))
        .route("/metrics", get(async |State(shop): State<Shop>| shop.summary.metrics.render()))
        .route("/payments", get(payments))
        .route("/channels", get(channels))
        .route("/report", get(report))
        .layer(middleware::from_fn_with_state(guard, guard::admit))
        .with_state(Shop { summary, operator })
}

async fn summarize(State(shop): State<Shop>) -> Response<Body> {
    problem::json(StatusCode::OK, &shop.summary.facts().await)
}

/// Answers a load balancer: 503 while payments could not be settled, or channels not filled and claimed from. The reasons are for the
/// operator only.
async fn ready(State(shop): State<Shop>, admitted: Option<Extension<Admitted>>) -> Response<Body> {
    let reasons = shop.summary.not_ready().await;
    let status = if reasons.is_empty() { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    let mut facts = json!({ "ready": reasons.is_empty() });
    if admitted.is_some() {
        facts["reasons"] = reasons.into();
    }
    problem::json(status, &facts)
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

fn typed(media_type: &'static str, content: impl Into<Body>) -> Response<Body> {
    let mut response = Response::new(content.into());
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(media_type));
    response
}

fn in_lines(lines: String) -> Response<Body> {
    typed(ExportFormat::JsonLines.media_type(), lines)
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
