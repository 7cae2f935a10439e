//! What market and payment add to an evaluation, by flow.
//!
//! ```text
//! cargo bench -p tower-x402-tests --bench evaluation
//! ```
//!
//! The same judge gives the same verdict on the same answer: called as a function; over HTTP for nothing; and as an evaluator
//! that is paid $0.001. The student holds the evaluator to its signed card, pays and checks what it gets. Once with the chain at
//! hand and a block at once, which shows the work; then with 50 ms to the node and a block every 200 ms, like on Base. The
//! chain is the embedded one, in the same process. In the end student, evaluator and chain agree on what it cost.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use alloy_primitives::U256;
use alloy_provider::Provider as _;
use alloy_signer_local::PrivateKeySigner;
use axum::{Json, Router, routing::post};
use support::{chain::Chain, devnet::DevnetChain, rpc_proxy::RpcProxy};
use tokio::net::TcpListener;
use tower_x402::{
    Network, Usdc,
    client::{Budget, Payer},
    facilitator::OnchainFacilitator,
    protocol::PaymentFlow,
    server::DeferredPolicy,
};
use url::Url;
use x402_judges::ArithmeticJudge;
use x402_market::{
    AgentCard, CardFetcher, Evaluation, EvaluationClient, EvaluatorId, EvaluatorService, Score, Submission, Task,
    VerifiedCard, judge::Judge as _,
};

const RTT: Duration = Duration::from_millis(50);
const BLOCK: Duration = Duration::from_millis(200);
/// Units that an evaluation costs.
const PRICE: u64 = 1_000;
/// Evaluations in a row, with the chain at hand, and far away.
const COUNTS: [u64; 2] = [500, 60];

#[derive(Clone, Copy, Debug, PartialEq)]
enum Flow {
    Authorization,
    Upfront,
    Deferred,
}

#[tokio::main]
async fn main() {
    let submission = submission();
    let direct = direct(&submission).await;
    println!("| evaluation | chain | median | 95th percentile | over the judge | it cost the student |");
    println!("|---|---|---|---|---|---|");
    print("the judge, called", "", &direct, direct[direct.len() / 2], "");
    let base = direct[direct.len() / 2];
    print("over HTTP, for nothing", "", &for_nothing(&submission).await, base, "");
    for (far, count) in [false, true].into_iter().zip(COUNTS) {
        for flow in [Flow::Deferred, Flow::Authorization, Flow::Upfront] {
            let (times, each) = paid(&submission, flow, far, count).await;
            let chain = if far { "50 ms away, a block each 200 ms" } else { "at hand, a block at once" };
            print(&format!("paid, `{flow:?}`").to_lowercase(), chain, &times, base, &each.to_string());
        }
    }
}

fn submission() -> Submission {
    let prompt = "A train covers 180 km in 2.5 hours. What is its average speed in km/h?";
    let task = Task::new("arithmetic", prompt).unwrap().with_reference("72 km/h").unwrap();
    Submission::single(task, "180 / 2.5 = 72. Answer: 72 km/h").unwrap()
}

fn print(what: &str, chain: &str, times: &[Duration], base: Duration, cost: &str) {
    let micros = |percent: usize| times[(times.len() - 1) * percent / 100].as_secs_f64() * 1e6;
    let over = micros(50) - base.as_secs_f64() * 1e6;
    println!("| {what} | {chain} | {:.0} µs | {:.0} µs | {over:.0} µs | {cost} |", micros(50), micros(95));
}

async fn direct(submission: &Submission) -> Vec<Duration> {
    let mut times = Vec::new();
    for _ in 0..2_000 {
        let started = Instant::now();
        let verdicts = ArithmeticJudge.judge(submission).await.unwrap();
        times.push(started.elapsed());
        assert_eq!(verdicts[0].score, Score::MAX);
    }
    times.sort();
    times
}

/// The same JSON to the same judge and back, without 402, card or payment.
async fn for_nothing(submission: &Submission) -> Vec<Duration> {
    let judge = async |Json(submission): Json<Submission>| {
        let verdicts = ArithmeticJudge.judge(&submission).await.unwrap();
        let evaluator = EvaluatorId::new("The judge", "1").unwrap();
        Json(Evaluation::new(evaluator, &submission, verdicts).unwrap())
    };
    let (url, listener) = listen().await;
    tokio::spawn(async move { axum::serve(listener, Router::new().route("/", post(judge))).await });
    let (client, mut times) = (reqwest::Client::new(), Vec::new());
    for _ in 0..COUNTS[0] {
        let started = Instant::now();
        let response = client.post(url.clone()).json(submission).send().await.unwrap();
        let evaluation = Evaluation::from_json(&response.bytes().await.unwrap()).unwrap();
        evaluation.check(submission).unwrap();
        times.push(started.elapsed());
    }
    times.sort();
    times
}

async fn listen() -> (Url, TcpListener) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    (format!("http://{}", listener.local_addr().unwrap()).parse().unwrap(), listener)
}

/// How long paid evaluations took, and what each cost the student, fees and all.
async fn paid(submission: &Submission, flow: Flow, far: bool, count: u64) -> (Vec<Duration>, Usdc) {
    let chain = DevnetChain::start(far.then_some(BLOCK)).await;
    let proxy = RpcProxy::start(chain.rpc_url()).await;
    let url = if far { proxy.url().to_owned() } else { chain.rpc_url() };
    let (card, payee) = open(&chain, &url, flow).await;
    let key = PrivateKeySigner::random();
    let student = key.address();
    chain.mint(student, 10 * count * PRICE).await;
    let budget = Budget::builder().per_payment("$0.001".parse().unwrap()).total("$10".parse().unwrap()).build();
    let payer = Payer::builder(key).asset(chain.asset());
    let client = EvaluationClient::new(payer.budget(budget).build()).unwrap();
    // A stranger has no credit, and connections are made once.
    for _ in 0..3 {
        client.evaluate(&card, submission).await.unwrap();
    }
    paid_out(&chain, payee, 3).await;
    proxy.set_latency(if far { RTT } else { Duration::ZERO });
    let before = chain.balance(student).await;
    let mut times = Vec::new();
    for turn in 0..count {
        // Nowhere in particular within a block.
        tokio::time::sleep(if far { BLOCK.mul_f64((turn as f64 * 0.618).fract()) } else { Duration::ZERO }).await;
        let started = Instant::now();
        let bought = client.evaluate(&card, submission).await.unwrap();
        times.push(started.elapsed());
        assert_eq!(bought.evaluation.verdicts[0].score, Score::MAX);
    }
    paid_out(&chain, payee, 3 + count).await;
    let cost = before - chain.balance(student).await;
    assert_eq!(cost, count * PRICE, "an evaluation costs its price and nothing else");
    assert!(chain.provider().get_balance(student).await.unwrap().is_zero(), "the student never needed ether");
    times.sort();
    (times, Usdc::from_atomic(cost / count))
}

/// An evaluator on a port, by its verified card, and whom it has paid.
async fn open(chain: &DevnetChain, rpc_url: &str, flow: Flow) -> (Arc<VerifiedCard>, alloy_primitives::Address) {
    let settler = PrivateKeySigner::random();
    chain.fund(settler.address(), U256::from(10).pow(U256::from(18))).await;
    let facilitator = OnchainFacilitator::builder().rpc_url(rpc_url).network(Network::BASE_SEPOLIA);
    let facilitator = facilitator.signer(settler).build().await.unwrap();
    facilitator.deploy_batch_settler().await.unwrap();
    let (url, listener) = listen().await;
    let payee = PrivateKeySigner::random();
    let card = AgentCard::builder("The judge", url.clone()).skill("arithmetic", "Marks sums", Score::MAX);
    let card = card.price("$0.001").pay_to(Network::BASE_SEPOLIA, payee.address()).build().unwrap();
    let card = card.sign(&payee).await.unwrap();
    let credit = DeferredPolicy::default().per_payer(Usdc::from_atomic(PRICE * 1_000));
    let evaluator =
        EvaluatorService::builder(card, ArithmeticJudge).facilitator(facilitator).paywall(|paywall| match flow {
            Flow::Authorization => paywall.flow(PaymentFlow::Authorization),
            Flow::Upfront => paywall.flow(PaymentFlow::Upfront),
            Flow::Deferred => paywall.flow(PaymentFlow::Authorization).deferred(credit),
        });
    let service = evaluator.build().unwrap();
    tokio::spawn(async { axum::serve(listener, Router::new().fallback_service(service)).await });
    (CardFetcher::new().unwrap().fetch(&url).await.unwrap(), payee.address())
}

/// Until so many payments have arrived.
async fn paid_out(chain: &DevnetChain, payee: alloy_primitives::Address, count: u64) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while chain.balance(payee).await < count * PRICE {
        assert!(Instant::now() < deadline, "{} of {count} units are paid", chain.balance(payee).await);
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}
