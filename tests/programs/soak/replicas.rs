//! Several processes on one database, with two settlement keys between them. One is killed in the middle.

use std::{
    collections::HashMap,
    env,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use alloy_primitives::{Address, B256, U256};
use alloy_provider::Provider as _;
use alloy_signer_local::PrivateKeySigner;
use axum::body::Body;
use bytes::Bytes;
use futures_util::future::join_all;
use http::{Request, Response};
use tower::BoxError;
use tower_x402::{
    Network, Usdc,
    facilitator::OnchainFacilitator,
    ledger::{Counts, Ledger, PostgresLedger, Sender, TransactionLedger},
};

use super::{
    FINALITY_DEPTH, buyer,
    dice::Dice,
    market::price,
    plan::Plan,
    process::{self, Replica, Work},
};
use support::{
    authorization::random_address,
    chain::Chain,
    devnet::DevnetChain,
    postgres::Server,
    shop::{Answer, Customer, Shop, demand},
};

const REPLICAS: usize = 4;
/// Longer than the leases and claims of a killed replica last.
const PATIENCE: Duration = Duration::from_secs(80);

fn key(index: u8) -> PrivateKeySigner {
    PrivateKeySigner::from_bytes(&B256::repeat_byte(0xa0 + index)).unwrap()
}

/// No test by itself: a replica, which serves until it is killed or its parent ends.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "started by the test of replicas"]
async fn a_replica() {
    let Ok(database) = env::var("SOAK_REPLICA_DATABASE") else { return };
    let var = |name: &str| env::var(name).unwrap();
    process::log();
    let ledger = PostgresLedger::builder(&database).schema("soak").max_connections(12).connect().await.unwrap();
    let facilitator = OnchainFacilitator::builder()
        .network(Network::BASE_SEPOLIA)
        .rpc_url(var("SOAK_REPLICA_NODE"))
        .signer(key(0))
        .signer(key(1))
        .ledger(Arc::new(ledger))
        .confirm_timeout(Duration::from_secs(4))
        .reconcile_interval(Duration::from_millis(500))
        .build()
        .await
        .unwrap();
    let shop = Shop {
        facilitator: Arc::new(facilitator),
        pay_to: var("SOAK_REPLICA_PAYEE").parse().unwrap(),
        asset: Network::BASE_SEPOLIA.usdc().unwrap(),
        handled: Arc::default(),
    };
    let work = Work::open(var("SOAK_REPLICA_WORK"));
    let layer = shop
        .layer()
        .price_with(|request| {
            let n = request.uri.query().and_then(|query| query.strip_prefix("n=")?.parse().ok());
            async move { Ok(Usdc::from_atomic(price(n.unwrap_or(0))).into()) }
        })
        // Other replicas continue the killed one's payments only after its claims have ended.
        .handler_deadline(Duration::from_secs(2))
        .settlement_margin(Duration::from_secs(2))
        .max_timeout(Duration::from_secs(3_600));
    let app = shop.app_with(layer, move |_, body: Bytes| {
        let n: u64 = std::str::from_utf8(&body).unwrap().parse().unwrap();
        work.note(n);
        async move { Ok::<_, BoxError>(Response::new(Body::from(buyer::answer_to(n)))) }
    });
    let service = tower::ServiceExt::map_err(app, |error: BoxError| panic!("{error}"));
    process::serve(|listener| axum::serve(listener, tower::make::Shared::new(service))).await;
}

fn start(index: usize, database: &str, node: &str, payee: Address, directory: &Path) -> Replica {
    let work = directory.join(format!("work-{index}"));
    let variables = [
        ("SOAK_REPLICA_DATABASE", database.to_owned()),
        ("SOAK_REPLICA_NODE", node.to_owned()),
        ("SOAK_REPLICA_PAYEE", payee.to_string()),
        ("SOAK_REPLICA_WORK", work.to_str().unwrap().to_owned()),
    ];
    Replica::start("soak::replicas::a_replica", variables, &work)
}

async fn post(client: &reqwest::Client, url: &str, n: u64, payment: Option<http::HeaderValue>) -> Option<Answer> {
    let mut request = client.post(format!("{url}/work?n={n}")).body(n.to_string());
    if let Some(payment) = payment {
        request = request.header("payment-signature", payment);
    }
    let response = request.send().await.ok()?;
    let (status, headers) = (response.status(), response.headers().clone());
    Some(Answer { status, headers, body: response.bytes().await.ok()? })
}

/// Signs once, and presents the payment to one replica after the other, sometimes to several at once. Returns the number of
/// presentations.
async fn buy(client: &reqwest::Client, urls: &[String], customer: &Customer, n: u64, seed: u64) -> u64 {
    let (mut dice, deadline, mut presented) = (Dice::new(seed, n), Instant::now() + PATIENCE, 0);
    let several = n.is_multiple_of(10);
    let offer = loop {
        if let Some(answer) = post(client, &urls[dice.of(0..REPLICAS as u64) as usize], n, None).await {
            break demand(&answer);
        }
    };
    let paid = customer.sign(&offer, 0).on(Request::new(Body::empty()));
    let payment = paid.headers()["payment-signature"].clone();
    let mut said = None;
    while Instant::now() < deadline {
        let first = dice.of(0..REPLICAS as u64) as usize;
        let at = (0..if several { REPLICAS - 1 } else { 1 }).map(|k| &urls[(first + k) % REPLICAS]);
        let sent = at.map(|url| post(client, url, n, Some(payment.clone())));
        let answers: Vec<_> = join_all(sent).await;
        presented += answers.len() as u64;
        let mut is_answered = false;
        for answer in answers.into_iter().flatten() {
            if answer.status == 200 {
                assert_eq!(answer.text(), buyer::answer_to(n));
                is_answered = true;
            } else {
                said = Some(answer);
            }
        }
        if is_answered {
            return presented;
        }
        tokio::time::sleep(dice.millis(50..800)).await;
    }
    panic!("order {n} was never answered: {said:?}");
}

async fn replicas(plan: Plan) {
    let server = Server::start();
    let chain = DevnetChain::start_with(Some(Duration::from_millis(200)), FINALITY_DEPTH).await;
    for index in 0..3 {
        chain.fund(key(index).address(), U256::from(10).pow(U256::from(20))).await;
    }
    let deployer = OnchainFacilitator::builder().network(Network::BASE_SEPOLIA).rpc_url(chain.rpc_url()).signer(key(2));
    deployer.build().await.unwrap().deploy_batch_settler().await.unwrap();
    let payee = random_address();
    let directory = tempfile::tempdir().unwrap();
    let ledger = PostgresLedger::builder(server.url()).schema("soak").connect().await.unwrap();
    let mut replicas: Vec<Replica> =
        (0..REPLICAS).map(|index| start(index, server.url(), &chain.rpc_url(), payee, directory.path())).collect();
    let urls: Arc<Vec<String>> = Arc::new(replicas.iter().map(|replica| replica.url.clone()).collect());
    let mut customers = Vec::new();
    for index in 0..plan.payers {
        let owed = (0..plan.payments).filter(|n| (*n as usize) % plan.payers == index).map(price).sum();
        customers.push(Customer::with_funds(&chain, owed).await);
    }
    let (customers, next, started) = (Arc::new(customers), Arc::new(AtomicU64::new(0)), Instant::now());
    let client = reqwest::Client::builder().no_proxy().build().unwrap();
    let mut buyers = tokio::task::JoinSet::new();
    for _ in 0..plan.at_once {
        let (client, urls, customers, next) = (client.clone(), urls.clone(), customers.clone(), next.clone());
        buyers.spawn(async move {
            let mut presented = 0;
            loop {
                let n = next.fetch_add(1, Ordering::Relaxed);
                if n >= plan.payments {
                    return presented;
                }
                presented += buy(&client, &urls, &customers[n as usize % plan.payers], n, plan.seed).await;
            }
        });
    }
    while next.load(Ordering::Relaxed) < plan.payments / 2 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    replicas[0].kill();
    let mut presented = 0;
    while let Some(bought) = buyers.join_next().await {
        presented += bought.unwrap();
    }
    let time = started.elapsed();

    let deadline = Instant::now() + PATIENCE;
    let settled = Counts { settled: plan.payments, ..Counts::default() };
    while ledger.counts().await.unwrap() != settled && Instant::now() < deadline {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert_eq!(ledger.counts().await.unwrap(), settled, "nothing is unknown, open or failed");
    let transfers = chain.token_transfers(payee).await;
    assert_eq!(transfers.len() as u64, plan.payments, "each was settled once");
    assert_eq!(
        transfers.iter().map(|transfer| transfer.units).sum::<u64>(),
        (0..plan.payments).map(price).sum::<u64>()
    );
    for customer in customers.iter() {
        assert_eq!(chain.balance(customer.from).await, 0);
    }
    let (dead, alive) = replicas.split_first().unwrap();
    let (by_the_dead, mut by_others) = (dead.worked(), HashMap::<u64, u32>::new());
    for (n, runs) in alive.iter().flat_map(Replica::worked) {
        *by_others.entry(n).or_default() += runs;
    }
    for n in 0..plan.payments {
        let (dead, others) = (by_the_dead.get(&n).copied().unwrap_or(0), by_others.get(&n).copied().unwrap_or(0));
        assert!(dead <= 1 && others <= 1 && dead + others >= 1, "order {n} was worked for {dead} and {others} times");
    }
    let mut used = Vec::new();
    for index in 0..2 {
        let address = key(index).address();
        let latest = chain.provider().get_transaction_count(address).await.unwrap();
        let pending = chain.provider().get_transaction_count(address).pending().await.unwrap();
        assert_eq!(latest, pending, "nothing waits");
        let left = ledger.submissions(&Sender { network: Network::BASE_SEPOLIA, address }, latest).await.unwrap();
        assert!(left.is_empty(), "the journal knows of no transaction that is in no block: {left:?}");
        used.push(latest);
    }
    assert!(used.iter().all(|used| *used > 0), "both keys were used: {used:?}");
    println!(
        "{} payments of {} payers on {REPLICAS} replicas, one killed: {time:.1?} ({:.0} payments/s), presented {presented} times, nonces used {used:?}",
        plan.payments,
        plan.payers,
        plan.payments as f64 / time.as_secs_f64(),
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn four_processes_and_one_of_them_killed_settle_everything_once() {
    replicas(Plan::of(600, 40)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "takes minutes; see the head of mod.rs"]
async fn four_processes_of_full_size() {
    replicas(Plan::of(10_000, 200)).await;
}
