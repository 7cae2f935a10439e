//! The process that is killed: an ordinary seller, with points in its ledger and in its connection to the node.

use std::{
    io::{BufRead as _, Write as _},
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use alloy_primitives::{Address, B256};
use alloy_signer_local::PrivateKeySigner;
use axum::{
    Extension, Router,
    body::{Body, BodyDataStream, Bytes},
    extract::Request,
    middleware::{Next, from_fn},
    response::Response,
    routing::post,
};
use futures_util::{StreamExt as _, stream};
use serde::{Deserialize, Serialize};
use support::around_ledger::AroundLedger;
use tokio::{net::TcpListener, task::yield_now};
use tower_x402::{
    Clock, Network, SystemClock, Usdc,
    facilitator::{Facilitator, OnchainFacilitator, RemoteFacilitator},
    ledger::Ledger,
    protocol::PaymentFlow,
    server::{ActualPrice, DeferredPolicy, PaymentStatus, RequirePaymentLayer, VerifiedPayment},
};

use super::{
    ledger, node,
    points::{Point, Points, say},
    relay,
    store::Store,
};

/// The environment variable with the [`Setup`] as JSON; set in the process that is killed only.
pub(crate) const SETUP: &str = "CRASH_SERVER";
/// The lines by which the process answers its parent.
pub(crate) const LISTENING: &str = "listening ";
pub(crate) const ARMED: &str = "armed";
pub(crate) const COMMITS: &str = "commits ";
/// The price of a request, in atomic units.
pub(crate) const PRICE: u64 = 1_000;
/// The interval of the facilitator's background passes.
pub(crate) const UPKEEP: Duration = Duration::from_millis(150);
/// The validity of an authorization, in seconds: longer than any jump of the clock.
pub(crate) const VALID: u64 = 3_600;

/// The flow, and the kind of response.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) enum Flow {
    Authorization,
    Upfront,
    Deferred,
    /// `deferred`, and while the process is dead some payers transfer their balances away.
    Spent,
    /// `authorization`, with a response of undeclared length, which is not stored before it is settled.
    Streamed,
    /// `authorization` by a permit for twice the price, of which the handler charges the price (scheme `upto`).
    UpTo,
}

impl Flow {
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Authorization => "authorization",
            Self::Upfront => "upfront",
            Self::Deferred => "deferred",
            Self::Spent => "deferred, balance spent elsewhere",
            Self::Streamed => "authorization, streamed",
            Self::UpTo => "authorization, at most a price",
        }
    }
}

/// The facilitator that the shop uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) enum Via {
    /// An on-chain facilitator in the process.
    Chain,
    /// A remote facilitator, without confirmation.
    Remote,
    /// A remote facilitator, with a node that confirms its answers.
    Confirmed,
}

impl Via {
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Chain => "on-chain",
            Self::Remote => "remote",
            Self::Confirmed => "remote, confirmed by a node",
        }
    }
}

/// The settings of the process.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Setup {
    pub(crate) via: Via,
    pub(crate) node: String,
    /// The URL of the remote facilitator, if there is one.
    pub(crate) facilitator_url: Option<String>,
    pub(crate) store: Store,
    pub(crate) flow: Flow,
    pub(crate) settlement_key: B256,
    pub(crate) pay_to: Address,
    /// A file that gets a line whenever the handler runs.
    pub(crate) runs: PathBuf,
    /// How far the clock is ahead, in seconds.
    pub(crate) ahead: u64,
    /// `true` if points are counted from the start.
    pub(crate) armed: bool,
    pub(crate) stop: Option<Point>,
}

/// The machine's clock, and how far this one is ahead of it.
#[derive(Debug, Default)]
pub(crate) struct Ahead(AtomicU64);

impl Ahead {
    pub(crate) const fn by(seconds: u64) -> Self {
        Self(AtomicU64::new(seconds))
    }

    pub(crate) fn set(&self, seconds: u64) {
        self.0.store(seconds, Ordering::SeqCst);
    }

    pub(crate) fn get(&self) -> u64 {
        self.0.load(Ordering::SeqCst)
    }
}

impl Clock for Ahead {
    fn now(&self) -> u64 {
        SystemClock.now() + self.get()
    }
}

/// Runs until it is killed or its parent ends.
pub(crate) fn run(setup: Setup) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(serve(setup));
}

async fn serve(setup: Setup) {
    let points = Arc::new(Points::new(setup.stop.clone(), setup.armed));
    let clock = Arc::new(Ahead::by(setup.ahead));
    let store = Arc::new(setup.store.open(clock.clone()).await);
    obey(points.clone(), clock.clone(), store.clone());
    let watched = AroundLedger::new(store.ledger.clone(), ledger::Watched(points.clone()));
    let facilitator = facilitator(&setup, watched, clock.clone(), points.clone()).await;
    let app = app(&setup, &facilitator, clock, points);
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    say(&format!("{LISTENING}{}", listener.local_addr().expect("it is bound")));
    axum::serve(listener, app).await.expect("it serves");
}

async fn facilitator(
    setup: &Setup,
    ledger: Arc<dyn Ledger>,
    clock: Arc<Ahead>,
    points: Arc<Points>,
) -> Arc<dyn Facilitator> {
    if setup.via == Via::Chain {
        let facilitator = OnchainFacilitator::builder()
            .network(Network::BASE_SEPOLIA)
            .client(node::client(&setup.node, points))
            .signer(PrivateKeySigner::from_bytes(&setup.settlement_key).expect("a key"))
            .ledger(ledger)
            .clock(clock)
            .confirm_timeout(Duration::from_secs(10))
            .reconcile_interval(UPKEEP);
        return Arc::new(facilitator.build().await.expect("the node answers"));
    }
    let url = setup.facilitator_url.as_deref().expect("a facilitator elsewhere");
    let facilitator = RemoteFacilitator::builder(relay::to_facilitator(url, points.clone()).await)
        .ledger(ledger)
        .clock(clock)
        .settle_timeout(Duration::from_secs(5))
        .reconcile_interval(UPKEEP);
    let facilitator = match setup.via {
        Via::Confirmed => facilitator.confirm(Network::BASE_SEPOLIA, relay::to_node(&setup.node, points).await),
        _ => facilitator,
    };
    Arc::new(facilitator.build().await.expect("the facilitator and the node answer"))
}

fn app(setup: &Setup, facilitator: &Arc<dyn Facilitator>, clock: Arc<Ahead>, points: Arc<Points>) -> Router {
    let layer = RequirePaymentLayer::builder()
        .price("$0.001")
        .pay_to(Network::BASE_SEPOLIA, setup.pay_to)
        .facilitator(facilitator.clone())
        .clock(clock)
        .max_timeout(Duration::from_secs(VALID))
        .handler_deadline(Duration::from_secs(10))
        .settlement_margin(Duration::from_secs(5))
        .max_wait(Duration::from_secs(2));
    let layer = match setup.flow {
        Flow::Authorization | Flow::Streamed => layer,
        Flow::UpTo => layer.price(Usdc::from_atomic(2 * PRICE)).upto(),
        Flow::Upfront => layer.flow(PaymentFlow::Upfront),
        Flow::Deferred | Flow::Spent => {
            let much = Usdc::from_atomic(1_000 * PRICE);
            layer.deferred(DeferredPolicy::default().per_payer(much))
        }
    };
    let handler = Arc::new(Handler {
        points: points.clone(),
        runs: setup.runs.clone(),
        streams: setup.flow == Flow::Streamed,
        ran: AtomicU64::new(0),
    });
    Router::new()
        .route(
            "/evaluate",
            post(move |Extension(payment): Extension<VerifiedPayment>, body: Bytes| handler.run(payment, body)),
        )
        .layer(layer.build().expect("a complete layer"))
        .layer(from_fn(move |request, next| deliver(points.clone(), request, next)))
        .route_service("/status", PaymentStatus::new(facilitator.ledger().clone()))
}

/// Executes commands from its standard input, and ends when that is closed.
pub(crate) fn obey(points: Arc<Points>, clock: Arc<Ahead>, store: Arc<super::store::Open>) {
    std::thread::spawn(move || {
        for line in std::io::stdin().lock().lines() {
            let line = line.unwrap_or_default();
            match line.split_once(' ').unwrap_or((&line, "")) {
                ("arm", _) => {
                    points.arm();
                    say(ARMED);
                }
                ("ahead", seconds) => clock.set(seconds.parse().expect("seconds")),
                ("commits", _) => say(&format!("{COMMITS}{}", store.commits().unwrap_or_default())),
                other => panic!("{other:?} is not a command"),
            }
        }
        std::process::exit(1);
    });
}

/// The handler: each run gives another answer.
pub(crate) struct Handler {
    pub(crate) points: Arc<Points>,
    pub(crate) runs: PathBuf,
    pub(crate) streams: bool,
    pub(crate) ran: AtomicU64,
}

impl Handler {
    pub(crate) async fn run(self: Arc<Self>, payment: VerifiedPayment, body: Bytes) -> Response {
        self.points.pass("handler: before");
        let mut runs = std::fs::OpenOptions::new().append(true).create(true).open(&self.runs).expect("a file");
        writeln!(runs, "{}", payment.nonce).expect("a line");
        yield_now().await;
        self.points.pass("handler: during");
        yield_now().await;
        let (process, run) = (std::process::id(), self.ran.fetch_add(1, Ordering::SeqCst));
        let parts = [format!("{} ", payment.nonce), format!("{process}/{run} "), format!("{body:?}")];
        self.points.pass("handler: after");
        if self.streams {
            let points = self.points.clone();
            let parts = stream::iter(parts).then(move |part| {
                let points = points.clone();
                async move {
                    yield_now().await;
                    points.pass("handler: streaming");
                    Ok::<_, std::convert::Infallible>(Bytes::from(part))
                }
            });
            return Response::new(Body::from_stream(parts));
        }
        let mut response = Response::new(parts.concat().into());
        // All of the price, but where it is the most that may be charged.
        response.extensions_mut().insert(ActualPrice(Usdc::from_atomic(PRICE)));
        response
    }
}

/// Sends a paid response to the client with a point after the head, and in the middle of every piece of the body.
pub(crate) async fn deliver(points: Arc<Points>, request: Request, next: Next) -> Response {
    let pays = request.headers().contains_key("payment-signature");
    let response = next.run(request).await;
    if !pays || !response.status().is_success() {
        return response;
    }
    points.pass("response: ready");
    let (parts, body) = response.into_parts();
    let delivery = Delivery { points, body: body.into_data_stream(), rest: None, has_begun: false };
    Response::from_parts(parts, Body::from_stream(stream::unfold(delivery, Delivery::next)))
}

struct Delivery {
    points: Arc<Points>,
    body: BodyDataStream,
    rest: Option<Bytes>,
    has_begun: bool,
}

impl Delivery {
    async fn next(mut self) -> Option<(Result<Bytes, axum::Error>, Self)> {
        // The connection flushes whenever it would have to wait.
        yield_now().await;
        yield_now().await;
        if let Some(rest) = self.rest.take() {
            self.points.pass("response: half sent");
            return Some((Ok(rest), self));
        }
        if !std::mem::replace(&mut self.has_begun, true) {
            self.points.pass("response: head sent");
        }
        match self.body.next().await {
            Some(Ok(mut piece)) => {
                self.rest = Some(piece.split_off(piece.len() / 2));
                Some((Ok(piece), self))
            }
            Some(error) => Some((error, self)),
            None => {
                self.points.pass("response: sent");
                None
            }
        }
    }
}
