//! How soon and how fast payments are settled, through the layer, on a chain with Base's pace.
//!
//! ```text
//! (cd tests/peers && npm install)           anvil and Circle's contracts
//! cargo bench -p tower-x402-tests --bench settlement            all of it
//! cargo bench -p tower-x402-tests --bench settlement -- latency
//! cargo bench -p tower-x402-tests --bench settlement -- throughput
//! ```
//!
//! With `-- devnet` the embedded chain takes anvil's place; nothing has to be installed then.
//!
//! **latency**: a lone payment, from the request with its payment to the answer, with 50 ms between seller and node. The
//! physical limit is one round trip to verify, one to send, and the block that comes next: on average half a block.
//! **throughput**: payments settled per second, batched, by 1 to 8 keys and for few or many payers.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use alloy_primitives::U256;
use alloy_signer_local::PrivateKeySigner;
use http::StatusCode;
use support::{
    anvil::AnvilChain,
    authorization,
    chain::Chain,
    devnet::DevnetChain,
    rpc_proxy::RpcProxy,
    shop::{App, Customer, PRICE, Shop, demand, evaluate, send},
};
use tokio::sync::Semaphore;
use tower_x402::{Network, facilitator::OnchainFacilitator};

const RTT: Duration = Duration::from_millis(50);
const AT_ONCE: usize = 256;

#[tokio::main]
async fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).filter(|argument| argument != "--bench").collect();
    let has = |name: &str| arguments.iter().any(|argument| argument == name);
    let on_devnet = has("devnet");
    let all = !has("latency") && !has("throughput");
    if all || has("latency") {
        println!("| block time | payments | p50 | p95 | longest | limit, mean | p50 / limit |");
        println!("|---|---|---|---|---|---|---|");
        for (block_time, count) in [(Duration::from_millis(200), 60), (Duration::from_secs(2), 20)] {
            latency(&*chain(on_devnet, block_time).await, block_time, count).await;
        }
        println!();
    }
    if all || has("throughput") {
        println!("| keys | payers | payments | seconds | settled/s | transactions | gas each |");
        println!("|---|---|---|---|---|---|---|");
        let chain = chain(on_devnet, Duration::from_millis(200)).await;
        let mut customers = Vec::new();
        for _ in 0..1_000 {
            customers.push(Customer::with_funds(&*chain, 100_000 * PRICE).await);
        }
        for keys in [1, 2, 4, 8] {
            for payers in [10, 1_000] {
                throughput(&*chain, keys, &customers[..payers], 2_000).await;
            }
        }
    }
}

async fn chain(on_devnet: bool, block_time: Duration) -> Box<dyn Chain> {
    match on_devnet {
        true => Box::new(DevnetChain::start(Some(block_time)).await),
        false => Box::new(AnvilChain::start(Some(block_time)).await),
    }
}

async fn open(chain: &dyn Chain, rpc_url: &str, keys: usize) -> Shop {
    let mut builder = OnchainFacilitator::builder().rpc_url(rpc_url).network(Network::BASE_SEPOLIA);
    for _ in 0..keys {
        let key = PrivateKeySigner::random();
        chain.fund(key.address(), U256::from(10).pow(U256::from(18))).await;
        builder = builder.signer(key);
    }
    let facilitator = Arc::new(builder.build().await.expect("the facilitator reaches its chain"));
    facilitator.deploy_batch_settler().await.unwrap();
    Shop { facilitator, pay_to: authorization::random_address(), asset: chain.asset(), handled: Arc::default() }
}

/// Pays once; how long that took.
async fn buy(app: &App, customer: &Customer) -> Duration {
    let ask = demand(&send(app, evaluate("a")).await);
    let purchase = customer.sign(&ask, 0);
    let started = Instant::now();
    let answer = send(app, purchase.on(evaluate("a"))).await;
    assert_eq!(answer.status, StatusCode::OK, "{answer:?}");
    started.elapsed()
}

async fn latency(chain: &dyn Chain, block_time: Duration, count: u64) {
    let proxy = RpcProxy::start(chain.rpc_url()).await;
    let shop = open(chain, proxy.url(), 1).await;
    let app = shop.app(shop.layer());
    let customer = Customer::with_funds(chain, (count + 1) * PRICE).await;
    buy(&app, &customer).await;
    proxy.set_latency(RTT);
    let mut times = Vec::new();
    for turn in 0..count {
        // Nowhere in particular within a block.
        tokio::time::sleep(block_time.mul_f64((turn as f64 * 0.618).fract())).await;
        times.push(buy(&app, &customer).await);
    }
    times.sort();
    let percentile = |percent: usize| times[(times.len() - 1) * percent / 100];
    let limit = 2 * RTT + block_time / 2;
    println!(
        "| {} ms | {count} | {} ms | {} ms | {} ms | {} ms | {:.2} |",
        block_time.as_millis(),
        percentile(50).as_millis(),
        percentile(95).as_millis(),
        percentile(100).as_millis(),
        limit.as_millis(),
        percentile(50).as_secs_f64() / limit.as_secs_f64(),
    );
}

async fn throughput(chain: &dyn Chain, keys: usize, customers: &[Customer], payments: u64) {
    let shop = open(chain, &chain.rpc_url(), keys).await;
    let app = shop.app(shop.layer());
    let ask = demand(&send(&app, evaluate("a")).await);
    let before = shop.facilitator.stats();
    let places = Arc::new(Semaphore::new(AT_ONCE));
    let started = Instant::now();
    let mut tasks = tokio::task::JoinSet::new();
    for (_, customer) in (0..payments).zip(customers.iter().cycle()) {
        let (app, places, ask, customer) = (app.clone(), places.clone(), ask.clone(), customer.clone());
        tasks.spawn(async move {
            let _place = places.acquire_owned().await.unwrap();
            // Signed when it is its turn: it is not valid for long.
            let purchase = customer.sign(&ask, 0);
            let answer = send(&app, purchase.on(evaluate("a"))).await;
            assert_eq!(answer.status, StatusCode::OK, "{answer:?}");
        });
    }
    while let Some(bought) = tasks.join_next().await {
        bought.unwrap();
    }
    let elapsed = started.elapsed().as_secs_f64();
    assert_eq!(chain.balance(shop.pay_to).await, payments * PRICE);
    let after = shop.facilitator.stats();
    println!(
        "| {keys} | {} | {payments} | {elapsed:.1} | {:.0} | {} | {} |",
        customers.len(),
        payments as f64 / elapsed,
        after.transactions - before.transactions,
        (after.gas_used - before.gas_used) / payments,
    );
}
