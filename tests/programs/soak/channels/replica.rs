//! A process that sells on payment channels.

use std::{
    env,
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
    Router,
    body::{Body, Bytes},
    http::{Response, StatusCode},
    routing::post,
};
use serde::{Deserialize, Serialize};
use tower_x402::{
    Clock, Network, SystemClock, Usdc,
    channels::{Channels, ClaimPolicy},
    facilitator::{OnchainFacilitator, channels::OnchainChannels},
    ledger::PostgresLedger,
    server::{ActualPrice, RequirePaymentLayer},
    vouchers::AuthorizerKey,
};

use super::{
    super::{
        buyer::answer_to,
        process::{self, Replica, Work},
        weather::DEEPEST,
    },
    LATER, SCHEMA, cost, price,
};

pub(super) const REPLICAS: usize = 4;
const SETUP: &str = "SOAK_CHANNELS";
/// How long an authorization of a deposit is valid, in seconds.
pub(super) const VALID: u64 = 3_600;

#[derive(Clone, Serialize, Deserialize)]
pub(super) struct Setup {
    pub(super) database: String,
    pub(super) node: String,
    /// The file with a line for each order that was worked for.
    pub(super) work: PathBuf,
    pub(super) gas_key: B256,
    pub(super) authorizer: B256,
    pub(super) payee: Address,
    pub(super) confirm_timeout: Duration,
}

impl Setup {
    pub(super) fn start(&self) -> Replica {
        let setup = (SETUP, serde_json::to_string(self).unwrap());
        Replica::start("soak::channels::replica::a_replica", [setup], &self.work)
    }
}

/// The machine's clock, and how far this one is ahead of it, in seconds.
#[derive(Debug, Default)]
struct Ahead(AtomicU64);

impl Clock for Ahead {
    fn now(&self) -> u64 {
        SystemClock.now() + self.0.load(Ordering::SeqCst)
    }
}

/// No test by itself: a replica, which serves until it is killed or its parent ends.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "started by the test of channels"]
async fn a_replica() {
    let Ok(setup) = env::var(SETUP) else { return };
    process::log();
    let setup: Setup = serde_json::from_str(&setup).unwrap();
    let app = app(&setup).await;
    process::serve(|listener| axum::serve(listener, app)).await;
}

async fn app(setup: &Setup) -> Router {
    let ledger = PostgresLedger::builder(&setup.database).schema(SCHEMA).max_connections(12).connect().await.unwrap();
    let ledger = Arc::new(ledger);
    let contract = || {
        OnchainChannels::builder()
            .network(Network::BASE_SEPOLIA)
            .rpc_url(&setup.node)
            .signer(key(setup.gas_key))
            // A deposit that a reorganization removes would be the seller's loss.
            .confirmations(0, DEEPEST)
            .confirm_timeout(setup.confirm_timeout)
            .rpc_timeout(Duration::from_secs(2))
            .build()
    };
    let exact = || {
        let builder = OnchainFacilitator::builder().network(Network::BASE_SEPOLIA).rpc_url(&setup.node);
        builder.signer(PrivateKeySigner::random()).ledger(ledger.clone()).build()
    };
    let clock = Arc::new(Ahead::default());
    let channels = Channels::builder(until_built(contract).await, AuthorizerKey::new(key(setup.authorizer)))
        .ledger(ledger.clone())
        .claims(ClaimPolicy::default().amount(Usdc::from_atomic(10_000)))
        .clock(clock.clone())
        .build()
        .unwrap();
    let layer = RequirePaymentLayer::builder()
        .price_with(|request| {
            let n = request.uri.query().and_then(|query| query.strip_prefix("n=")?.parse().ok());
            async move { Ok(Usdc::from_atomic(price(n.unwrap_or(0))).into()) }
        })
        .pay_to(Network::BASE_SEPOLIA, setup.payee)
        .facilitator(until_built(exact).await)
        .vouchers_only(channels.clone())
        // Other replicas take the killed one's channels over only after its leases have ended.
        .handler_deadline(Duration::from_secs(2))
        .settlement_margin(Duration::from_secs(1))
        .max_wait(Duration::from_secs(5))
        .max_timeout(Duration::from_secs(VALID))
        .build()
        .unwrap();
    let journal = Work::open(&setup.work);
    let work = async move |body: Bytes| {
        let n: u64 = std::str::from_utf8(&body).unwrap().parse().unwrap();
        journal.note(n);
        // So that a kill meets work.
        tokio::time::sleep(Duration::from_millis(n % 20)).await;
        let mut response = Response::new(Body::from(answer_to(n)));
        response.extensions_mut().insert(ActualPrice(Usdc::from_atomic(cost(n))));
        response
    };
    let claim = async move || match channels.claim_all().await {
        Ok(report) => (StatusCode::OK, format!("{report:?}")),
        Err(error) => (StatusCode::SERVICE_UNAVAILABLE, error.to_string()),
    };
    let later = async move || clock.0.fetch_add(LATER, Ordering::SeqCst).to_string();
    Router::new().route("/work", post(work)).layer(layer).route("/claim", post(claim)).route("/later", post(later))
}

/// Builds what a node answers questions for, although calls of it fail.
async fn until_built<T, E: std::fmt::Display, F: Future<Output = Result<T, E>>>(build: impl Fn() -> F) -> T {
    for _ in 0..100 {
        match build().await {
            Ok(built) => return built,
            Err(error) => tracing::info!(%error, "built again"),
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    panic!("the node never answered");
}

fn key(bytes: B256) -> PrivateKeySigner {
    PrivateKeySigner::from_bytes(&bytes).unwrap()
}
