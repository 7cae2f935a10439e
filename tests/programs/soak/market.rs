//! A seller with a durable ledger, and buyers with exactly the money for their orders.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use alloy_primitives::U256;
use alloy_signer_local::PrivateKeySigner;
use axum::body::Body;
use bytes::Bytes;
use http::{Response, StatusCode};
use tempfile::TempDir;
use tower::BoxError;
use tower_x402::{
    Network, SystemClock, Usdc,
    facilitator::{OnchainFacilitator, OnchainFacilitatorBuilder},
    ledger::{ResponseLimits, SqliteLedger},
    protocol::PaymentFlow,
    server::{DeferredPolicy, RequirePaymentLayerBuilder},
};

use super::{
    buyer::{self, Bought},
    dice::Dice,
    plan::Plan,
};
use support::{
    authorization::random_address,
    chain::Chain,
    shop::{App, Customer, Shop},
};

/// The orders, and how often each was worked on.
pub(crate) struct Market {
    pub(crate) shop: Shop,
    pub(crate) customers: Vec<Customer>,
    pub(crate) settler: alloy_primitives::Address,
    apps: [App; 3],
    runs: Runs,
    _directory: TempDir,
}

/// The number of times that the handler started and succeeded, for each order.
#[derive(Clone, Default)]
pub(crate) struct Runs(Arc<Mutex<HashMap<u64, (u32, u32)>>>);

/// Returns the price of the n-th order, in atomic units. Neighbouring orders have different prices.
pub(crate) fn price(n: u64) -> u64 {
    1_000 + n % 977
}

impl Market {
    pub(crate) async fn open(
        chain: &dyn Chain,
        plan: &Plan,
        node: impl FnOnce(OnchainFacilitatorBuilder) -> OnchainFacilitatorBuilder,
    ) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let responses = ResponseLimits::default().count(1_000_000);
        let path = directory.path().join("ledger.sqlite");
        let ledger = SqliteLedger::open_with(path, responses, 1_000_000, Arc::new(SystemClock)).await.unwrap();
        let key = PrivateKeySigner::random();
        let settler = key.address();
        chain.fund(settler, U256::from(10).pow(U256::from(20))).await;
        let builder = OnchainFacilitator::builder()
            .network(Network::BASE_SEPOLIA)
            .signer(key)
            .ledger(Arc::new(ledger))
            // Short, so that outcomes are often unknown at first.
            .confirm_timeout(Duration::from_secs(4))
            .rpc_timeout(Duration::from_secs(2))
            .reconcile_interval(Duration::from_millis(500));
        let facilitator = node(builder).build().await.unwrap();
        facilitator.deploy_batch_settler().await.unwrap();
        let shop = Shop {
            facilitator: Arc::new(facilitator),
            pay_to: random_address(),
            asset: chain.asset(),
            handled: Arc::default(),
        };
        let mut customers = Vec::new();
        for index in 0..plan.payers {
            let owed = (0..plan.payments).filter(|n| payer_of(*n, plan) == index).map(price).sum();
            customers.push(Customer::with_funds(chain, owed).await);
        }
        let runs = Runs::default();
        let credit = DeferredPolicy::default().per_payer(Usdc::from_atomic(20_000));
        let apps = [
            work(&shop, shop.layer(), &runs),
            work(&shop, shop.layer().flow(PaymentFlow::Upfront), &runs),
            work(&shop, shop.layer().deferred(credit), &runs),
        ];
        Self { shop, customers, settler, apps, runs, _directory: directory }
    }

    /// Places all planned orders.
    pub(crate) async fn serve(self: &Arc<Self>, plan: &Plan) -> Bought {
        let next = Arc::new(AtomicU64::new(0));
        let started = Instant::now();
        let plan = *plan;
        let mut buyers = tokio::task::JoinSet::new();
        for _ in 0..plan.at_once {
            let (market, next) = (self.clone(), next.clone());
            buyers.spawn(async move {
                let mut bought = Bought::default();
                loop {
                    let n = next.fetch_add(1, Ordering::Relaxed);
                    if n >= plan.payments {
                        return bought;
                    }
                    let customer = &market.customers[payer_of(n, &plan)];
                    let app = &market.apps[(n / 7 % 3) as usize];
                    buyer::buy(app, customer, n, &mut Dice::new(plan.seed, n), &mut bought).await;
                }
            });
        }
        let mut all = Bought::default();
        while let Some(bought) = buyers.join_next().await {
            all.add(bought.unwrap());
        }
        all.time = started.elapsed();
        all
    }

    /// Returns the orders whose work was done more than once, or never.
    pub(crate) fn wrongly_worked(&self, payments: u64) -> Vec<(u64, u32)> {
        let runs = self.runs.0.lock().unwrap();
        let done = |n: &u64| runs.get(n).map_or(0, |(_, done)| *done);
        (0..payments).map(|n| (n, done(&n))).filter(|(_, done)| *done != 1).collect()
    }
}

pub(crate) fn payer_of(n: u64, plan: &Plan) -> usize {
    (n % plan.payers as u64) as usize
}

/// Handles an order; some fail at the first attempt.
fn work(shop: &Shop, layer: RequirePaymentLayerBuilder, runs: &Runs) -> App {
    let runs = runs.clone();
    let layer = layer
        .price_with(|request| {
            let n = request.uri.query().and_then(|query| query.strip_prefix("n=")?.parse().ok());
            async move { Ok(Usdc::from_atomic(price(n.unwrap_or(0))).into()) }
        })
        // An hour is longer than any run.
        .max_timeout(Duration::from_secs(3_600))
        .max_concurrent(100_000);
    shop.app_with(layer, move |_, body: Bytes| {
        let n: u64 = std::str::from_utf8(&body).unwrap().parse().unwrap();
        let fails = {
            let mut runs = runs.0.lock().unwrap();
            let (started, done) = runs.entry(n).or_default();
            *started += 1;
            let fails = *started == 1 && n % 37 == 5;
            *done += u32::from(!fails);
            fails
        };
        async move {
            tokio::time::sleep(Duration::from_millis(n % 11)).await;
            let mut response = Response::new(Body::from(buyer::answer_to(n)));
            if fails {
                *response.status_mut() = StatusCode::INTERNAL_SERVER_ERROR;
            }
            Ok::<_, BoxError>(response)
        }
    })
}
