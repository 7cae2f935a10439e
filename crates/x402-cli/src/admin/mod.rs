//! Answers the operator's questions to a running seller or facilitator: a page for people, JSON and metrics for programs.
//!
//! | file | what it has |
//! |---|---|
//! | `guard.rs` | who may ask |
//! | `summary.rs`, `income.rs` | what the page shows, and where that comes from |
//! | `page.html`, `page.css`, `page.js` | the page, which draws what `/summary` says |

mod guard;
mod income;
mod summary;

use std::{fmt, net::SocketAddr, str::FromStr, sync::Arc, time::Duration};

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
use tokio::{net::TcpListener, sync::watch};
use tower_x402::{
    ledger::LedgerError,
    ops::{ChannelExport, Export, ExportFormat, Operator, describe_metrics},
};

use self::{
    guard::{Admitted, Guard, TOKEN_VARIABLE},
    summary::Summary,
};
use crate::{
    chain::Settlement,
    error::Error,
    problem::{self, Problem},
    serve,
    token::Token,
    values::socket,
};

/// The interval at which the metrics exporter drains its histograms.
const UPKEEP: Duration = Duration::from_secs(5);
/// The most lines of an answer, in bytes. The command `x402 books` lists everything.
const MOST: usize = 4 << 20;
/// The buckets of histograms of seconds. Unlike quantiles, they can be summed over processes.
const SECONDS: [f64; 12] = [0.001, 0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 15.0, 60.0];
/// The buckets of payments in a transaction. A batch has at most 330.
const PAYMENTS: [f64; 8] = [1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 330.0];

/// The flag of the operator's listener.
#[derive(Clone, Copy, Debug, clap::Args)]
pub(crate) struct AdminFlags {
    /// Serve the operator's page on this address, and for programs /healthz, /readyz, /metrics, /summary, /payments, /channels and
    /// /report. An address that other machines reach needs X402_ADMIN_TOKEN
    #[arg(long, value_name = "ADDR", value_parser = socket)]
    pub(crate) admin: Option<SocketAddr>,
}

/// What the page says of the process that it is about.
pub(crate) struct About {
    /// Facts that do not change. They hold no secrets.
    pub(crate) facts: Value,
    /// Returns the label and the price of each route, in order. Whoever settles for others has none.
    pub(crate) prices: Box<dyn Fn() -> Vec<(String, String)> + Send + Sync>,
}

/// The operator's listener, and the recorder of what it shows.
pub(crate) struct Admin {
    listener: TcpListener,
    guard: Guard,
    metrics: PrometheusHandle,
    pub(crate) address: SocketAddr,
}

impl Admin {
    /// Opens the port, and installs the recorder of metrics: so call it before anything is built that reports to it. An address that other
    /// machines reach needs a token.
    pub(crate) async fn open(address: SocketAddr) -> Result<Self, Error> {
        let guard = Guard::new(address, Token::find(TOKEN_VARIABLE)?)?;
        let (listener, address) = serve::listen("--admin", &address.to_string()).await?;
        Ok(Self { listener, guard, metrics: metrics()?, address })
    }

    /// Answers until `stopped` is true.
    pub(crate) fn serve(self, settlement: &Settlement, about: About, stopped: watch::Receiver<bool>) {
        let router = router(settlement, self.metrics, about, self.guard);
        tokio::spawn(serve::serve(self.listener, router, stopped, Duration::ZERO, false));
    }
}

/// Installs the recorder of metrics.
fn metrics() -> Result<PrometheusHandle, Error> {
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
struct Process {
    summary: Arc<Summary>,
    operator: Operator,
}

/// Returns the routes for the operator.
fn router(settlement: &Settlement, metrics: PrometheusHandle, about: About, guard: Guard) -> Router {
    let operator = Operator::new(settlement.books.payments.clone()).channel_ledger(settlement.books.channels.clone());
    let summary = Summary::gather(settlement, &operator, metrics, about);
    let shown = |media_type, content: &'static str| get(async move || typed(media_type, content));
    Router::new()
        .route("/", shown("text/html; charset=utf-8", include_str!("page.html")))
        .route("/page.css", shown("text/css; charset=utf-8", include_str!("page.css")))
        .route("/page.js", shown("text/javascript; charset=utf-8", include_str!("page.js")))
        .route("/summary", get(summarize))
        .route("/healthz", get(async || "ok"))
        .route("/readyz", get(ready))
        .route("/metrics", get(async |State(process): State<Process>| process.summary.metrics.render()))
        .route("/payments", get(payments))
        .route("/channels", get(channels))
        .route("/report", get(report))
        .layer(middleware::from_fn_with_state(guard, guard::admit))
        .with_state(Process { summary, operator })
}

async fn summarize(State(process): State<Process>) -> Response<Body> {
    problem::json(StatusCode::OK, &process.summary.facts().await)
}

/// Answers a load balancer: 503 while payments could not be settled, or channels not filled and claimed from. The reasons are for the
/// operator only.
async fn ready(State(process): State<Process>, admitted: Option<Extension<Admitted>>) -> Response<Body> {
    let reasons = process.summary.not_ready().await;
    let status = if reasons.is_empty() { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    let mut facts = json!({ "ready": reasons.is_empty() });
    if admitted.is_some() {
        facts["reasons"] = reasons.into();
    }
    problem::json(status, &facts)
}

async fn payments(State(process): State<Process>, request: Request) -> Result<Response<Body>, Problem> {
    in_lines(process.operator.export(state_of(&request)?, ExportFormat::JsonLines)).await
}

async fn channels(State(process): State<Process>, request: Request) -> Result<Response<Body>, Problem> {
    in_lines(process.operator.export_channels(state_of(&request)?, ExportFormat::JsonLines)).await
}

async fn report(State(process): State<Process>) -> Result<Response<Body>, Problem> {
    let payments = process.operator.report().await.map_err(failed)?;
    let channels = process.operator.channel_report().await.map_err(failed)?;
    Ok(problem::json(StatusCode::OK, &json!({ "payments": payments.assets, "channels": channels })))
}

/// Reads the filter after `state=`.
fn state_of<F: FromStr<Err: fmt::Display>>(request: &Request) -> Result<F, Problem> {
    let query = request.uri().query().unwrap_or_default();
    let state = query.split('&').find_map(|pair| pair.strip_prefix("state=")).unwrap_or("all");
    state.parse().map_err(|error: F::Err| Problem::new(StatusCode::BAD_REQUEST, "state", error.to_string()))
}

/// An export, of payments or of channels.
trait Lines {
    fn more(&mut self) -> impl Future<Output = Result<Option<String>, LedgerError>> + Send;
}

impl Lines for Export {
    fn more(&mut self) -> impl Future<Output = Result<Option<String>, LedgerError>> + Send {
        self.next()
    }
}

impl Lines for ChannelExport {
    fn more(&mut self) -> impl Future<Output = Result<Option<String>, LedgerError>> + Send {
        self.next()
    }
}

/// Answers with the lines of an export, unless they are too many.
async fn in_lines(mut export: impl Lines) -> Result<Response<Body>, Problem> {
    let mut lines = String::new();
    while let Some(more) = export.more().await.map_err(failed)? {
        if lines.len() + more.len() > MOST {
            let detail = "there are too many to answer at once: ask for one state, or see x402 books export";
            return Err(Problem::new(StatusCode::INSUFFICIENT_STORAGE, "too_many", detail));
        }
        lines.push_str(&more);
    }
    Ok(typed(ExportFormat::JsonLines.media_type(), lines))
}

fn typed(media_type: &'static str, content: impl Into<Body>) -> Response<Body> {
    let mut response = Response::new(content.into());
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(media_type));
    response
}

fn failed(error: LedgerError) -> Problem {
    Problem::new(StatusCode::SERVICE_UNAVAILABLE, "ledger", error.to_string())
}
