//! More concurrent submissions than an evaluator judges at once: they wait in a bounded queue for a bounded time.

use std::{sync::Arc, time::Duration};

use alloy_primitives::U256;
use alloy_signer_local::PrivateKeySigner;
use async_trait::async_trait;
use axum::body::Body;
use futures_util::future::join_all;
use http::{Request, StatusCode};
use serde_json::json;
use support::{
    eventually::eventually,
    scripted::{Scripted, customer},
    shop::{self, Answer, App, Customer, PRICE, Purchase, send},
};
use tokio::{
    sync::watch,
    task::JoinHandle,
    time::{Instant, timeout},
};
use tower_x402::{
    Network, Usdc,
    facilitator::{Facilitator, OnchainFacilitator},
    ledger::{Listing, SettlementState},
    protocol::PaymentFlow,
    server::{DeferredPolicy, RequirePaymentLayerBuilder},
};
use x402_devnet::Devnet;
use x402_market::{
    AgentCard, Confidence, EvaluatorBuilder, EvaluatorService, Score, Submission, Verdict,
    judge::{Judge, JudgeError},
};

/// How long a submission waits for its turn.
const PATIENCE: Duration = Duration::from_secs(4);
/// How many may wait for each place.
const WAITING: usize = 16;
const BURST: usize = 100;

/// A judge that judges when it is told to. It says how often it was asked whether it takes a submission: for each, when its price is
/// wanted and when it is its turn.
struct Held {
    taken: watch::Sender<usize>,
    judging: watch::Sender<usize>,
    open: watch::Receiver<bool>,
}

#[async_trait]
impl Judge for Held {
    fn accepts(&self, _: &Submission) -> Result<(), JudgeError> {
        self.taken.send_modify(|taken| *taken += 1);
        Ok(())
    }

    async fn judge(&self, submission: &Submission) -> Result<Vec<Verdict>, JudgeError> {
        self.judging.send_modify(|judging| *judging += 1);
        self.open.clone().wait_for(|open| *open).await.map_err(JudgeError::failed)?;
        let verdict = || Verdict::new(Score::MAX, Confidence::MAX, "right");
        Ok(submission.outputs().iter().map(|_| verdict()).collect())
    }
}

/// An evaluator, called without a network, and the gate before its judge.
struct Booth {
    app: App,
    taken: watch::Receiver<usize>,
    judging: watch::Receiver<usize>,
    open: watch::Sender<bool>,
    payee: PrivateKeySigner,
}

async fn open(
    facilitator: impl Facilitator,
    limit: impl FnOnce(EvaluatorBuilder) -> EvaluatorBuilder,
    paywall: impl FnOnce(RequirePaymentLayerBuilder) -> RequirePaymentLayerBuilder,
) -> Booth {
    let payee = PrivateKeySigner::random();
    let card = AgentCard::builder("The judge", "https://judge.example")
        .skill("arithmetic", "Marks sums", Score::MAX)
        .price("$0.001")
        .pay_to(Network::BASE_SEPOLIA, payee.address());
    let (gate, is_open) = watch::channel(false);
    let (taking, taken) = watch::channel(0);
    let (begun, judging) = watch::channel(0);
    let judge = Held { taken: taking, judging: begun, open: is_open };
    let evaluator = EvaluatorService::builder(card.build().unwrap(), judge).facilitator(facilitator).paywall(paywall);
    Booth { app: shop::app(limit(evaluator).build().unwrap()), taken, judging, open: gate, payee }
}

fn submission() -> Request<Body> {
    let text = json!({ "task": { "skill": "arithmetic", "prompt": "2 + 2" }, "output": "4" }).to_string();
    Request::post("/evaluate").body(Body::from(text)).unwrap()
}

/// Presents each of these payments with a submission.
fn present(app: &App, purchases: &[Purchase]) -> Vec<JoinHandle<Answer>> {
    let present = |purchase: &Purchase| {
        let (app, request) = (app.clone(), purchase.on(submission()));
        tokio::spawn(async move { send(&app, request).await })
    };
    purchases.iter().map(present).collect()
}

async fn signed(app: &App, customer: &Customer, count: usize) -> Vec<Purchase> {
    let mut purchases = Vec::new();
    for _ in 0..count {
        purchases.push(customer.pay(app, submission()).await);
    }
    purchases
}

impl Booth {
    /// Waits until it was asked so often; those it was asked about have a place then, or wait for one.
    async fn taken(&mut self, count: usize) {
        let taken = timeout(Duration::from_secs(600), self.taken.wait_for(|taken| *taken >= count)).await;
        taken.expect("all get there").unwrap();
    }
}

/// A hundred payments at once of one payer, for work that has not begun for the last when it has for all others.
/// `known` are bought and paid for before.
async fn a_hundred_are_all_answered(
    flow: PaymentFlow,
    known: usize,
    paywall: impl FnOnce(RequirePaymentLayerBuilder) -> RequirePaymentLayerBuilder,
) -> (Vec<Answer>, u64) {
    let devnet = Devnet::builder().chain_id(Network::BASE_SEPOLIA.chain_id()).start().await.unwrap();
    let settler = PrivateKeySigner::random();
    devnet.fund(settler.address(), U256::from(10).pow(U256::from(18)));
    let facilitator = OnchainFacilitator::builder()
        .network(Network::BASE_SEPOLIA)
        .client(devnet.rpc_client())
        .signer(settler)
        .build()
        .await
        .unwrap();
    let mut booth = open(facilitator.clone(), |evaluator| evaluator, |layer| paywall(layer.flow(flow))).await;
    let customer = customer();
    devnet.mint(customer.from, Usdc::from_atomic(10 * BURST as u64 * PRICE)).unwrap();
    booth.open.send_replace(true);
    for purchase in signed(&booth.app, &customer, known).await {
        assert_eq!(send(&booth.app, purchase.on(submission())).await.status, StatusCode::OK);
    }
    let open = Listing::of([SettlementState::Due, SettlementState::Submitted, SettlementState::Unknown]);
    eventually("all are paid", async || facilitator.ledger().list(&open).await.unwrap().is_empty()).await;
    booth.open.send_replace(false);
    let purchases = signed(&booth.app, &customer, BURST).await;
    let before = *booth.taken.borrow();
    let answers = present(&booth.app, &purchases);
    // When its price was wanted, and when it was about to be judged.
    booth.taken(before + 2 * BURST).await;
    assert_eq!(*booth.judging.borrow(), known + 64, "so many at once");
    booth.open.send_replace(true);
    let answers: Vec<_> = join_all(answers).await.into_iter().map(Result::unwrap).collect();
    for answer in &answers {
        assert_eq!(answer.status, StatusCode::OK, "{flow}: {}", answer.text());
        assert_eq!(answer.settlement().unwrap()["success"], true, "{flow}");
    }
    assert!(facilitator.drain(Duration::from_secs(600)).await, "{flow}: what is owed is collected");
    let income = devnet.balance_of(booth.payee.address()).unwrap();
    assert_eq!(income, Usdc::from_atomic((known + BURST) as u64 * PRICE), "{flow}: each is charged once");
    let deferred = answers.iter().filter(|answer| answer.settlement().unwrap()["transaction"] == "").count();
    (answers, deferred as u64)
}

#[tokio::test(start_paused = true)]
async fn hundred_concurrent_submissions_are_judged_then_charged() {
    let (_, deferred) = a_hundred_are_all_answered(PaymentFlow::Authorization, 3, |layer| layer).await;
    assert_eq!(deferred, 0);
}

#[tokio::test(start_paused = true)]
async fn hundred_concurrent_submissions_are_charged_then_judged() {
    let (_, deferred) = a_hundred_are_all_answered(PaymentFlow::Upfront, 3, |layer| layer).await;
    assert_eq!(deferred, 0);
}

#[tokio::test(start_paused = true)]
async fn hundred_concurrent_submissions_are_judged_with_deferred_settlement() {
    let all = Usdc::from_atomic(2 * BURST as u64 * PRICE);
    let policy = DeferredPolicy::default().per_payer(all);
    let lend = |layer: RequirePaymentLayerBuilder| layer.deferred(policy);
    let (_, deferred) = a_hundred_are_all_answered(PaymentFlow::Authorization, BURST, lend).await;
    assert_eq!(deferred, BURST as u64);
}

#[tokio::test(start_paused = true)]
async fn full_queue_refuses_at_once_and_waiting_is_limited() {
    let facilitator = Arc::new(Scripted::new());
    let limit = |evaluator: EvaluatorBuilder| evaluator.max_judgements(2);
    let mut booth = open(facilitator.clone(), limit, |layer| layer).await;
    let customer = customer();
    let purchases = signed(&booth.app, &customer, 2 + 2 * WAITING + 1).await;
    let (last, rest) = purchases.split_last().unwrap();
    let (taken, before) = (*booth.taken.borrow(), Instant::now());
    let mut answers = present(&booth.app, rest);
    booth.taken(taken + 2 * rest.len()).await;
    let is_busy = |answer: &Answer| {
        assert_eq!(answer.status, StatusCode::SERVICE_UNAVAILABLE, "{answer:?}");
        assert_eq!((answer.reason().as_str(), &answer.headers["retry-after"]), ("busy", &"1".parse().unwrap()));
    };
    is_busy(&send(&booth.app, last.on(submission())).await);
    assert!(before.elapsed() < PATIENCE, "at once");

    for answer in answers.split_off(2) {
        is_busy(&answer.await.unwrap());
    }
    assert_eq!(before.elapsed().as_secs(), PATIENCE.as_secs(), "the others after a while");
    assert_eq!(*booth.judging.borrow(), 2);
    booth.open.send_replace(true);
    for answer in answers {
        assert_eq!(answer.await.unwrap().status, StatusCode::OK);
    }
    assert_eq!(facilitator.settlements(), 2, "who was refused was not charged");
    assert_eq!(send(&booth.app, last.on(submission())).await.status, StatusCode::OK, "come again later");
}
