//! Requests to a node and time: to verify, and from a request with its payment to the answer.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use alloy_primitives::{Address, U256, address};
use alloy_signer_local::PrivateKeySigner;
use axum::{Router, routing::post};
use bytes::Bytes;
use http::StatusCode;
use r402_facilitator::Facilitator as _;
use tower_x402::{
    SystemClock, Usdc,
    facilitator::{Facilitator as _, OnchainFacilitator},
    payment::{Window, precheck},
};
use x402_devnet::{BlockTime, Devnet};
use x402_types::facilitator::Facilitator as _;

use crate::{
    Result, hot_path, onchain,
    payments::{Mint, Signed},
    rpc_proxy::RpcProxy,
    sellers,
};

/// Contracts that Base has, and without which x402-rs does not start: the validator of ERC-6492, Permit2 and a proxy for it. No
/// payment by a key calls them.
pub const EXPECTED: [Address; 3] = [
    address!("dAcD51A54883eb67D95FAEb2BBfdC4a9a6BD2a3B"),
    address!("000000000022D473030F116dDEE9F6B43aC78BA3"),
    address!("402085c248EeA27D92E8b30b2C58ed07f9E20001"),
];
const RTT: Duration = Duration::from_millis(50);

pub fn run() -> Result {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?.block_on(all())
}

async fn all() -> Result {
    println!("50 ms to the node and back; medians. A request is one HTTP request, a round trip at least.");
    println!("| blocks of | seller | verify: requests, ms | paid request: requests, ms |\n|---|---|---|---|");
    for (block_time, count) in [(Duration::from_millis(200), 11), (Duration::from_secs(2), 7)] {
        for seller in 0..3 {
            one_by_one(seller, block_time, count).await?;
        }
    }
    batched().await
}

/// A chain of its own, a proxy that counts, and a payer with money.
struct Stage {
    devnet: Devnet,
    proxy: RpcProxy,
    payer: PrivateKeySigner,
    settler: PrivateKeySigner,
    _port: x402_devnet::DevnetPort,
}

impl Stage {
    async fn new(block_time: Duration) -> Result<Self> {
        let devnet = Devnet::builder().block_time(BlockTime::Every(block_time)).start().await?;
        for contract in EXPECTED {
            devnet.set_code(contract, alloy_primitives::bytes!("00"));
        }
        let port = devnet.serve("127.0.0.1:0").await?;
        let proxy = RpcProxy::start(port.url().to_string()).await;
        let (payer, settler) = (PrivateKeySigner::random(), PrivateKeySigner::random());
        devnet.mint(payer.address(), Usdc::from_atomic(1_000_000_000))?;
        devnet.fund(settler.address(), U256::from(10).pow(U256::from(18)));
        Ok(Self { devnet, proxy, payer, settler, _port: port })
    }
}

async fn one_by_one(seller: usize, block_time: Duration, count: usize) -> Result {
    let stage = Stage::new(block_time).await?;
    let handler = post(async |_: Bytes| hot_path::WORK);
    let (url, key) = (stage.proxy.url(), stage.settler.clone());
    let mut verify = (Vec::new(), Vec::new());
    let mut app = match seller {
        0 => {
            let facilitator = Arc::new(onchain::ours(url, key).await?);
            let mut app = sellers::ours_with(&handler, facilitator.clone())?;
            let mut mint = Mint::with(&mut app, vec![stage.payer.clone()]).await;
            warm(&mut app, &mut mint).await;
            stage.proxy.set_latency(RTT);
            for _ in 0..count {
                let window = Window::default().skew(30);
                let payload = mint.payload(Signed::ByKey);
                let now = tower_x402::Clock::now(&SystemClock);
                let payment = precheck(Arc::new(hot_path::terms()), payload, window, now)?;
                stage.proxy.reset();
                let started = Instant::now();
                facilitator.verify(&payment).await?;
                verify.0.push(stage.proxy.reset().requests);
                verify.1.push(started.elapsed());
            }
            app
        }
        1 => {
            let facilitator = Arc::new(onchain::r402(url, key)?);
            let mut app = sellers::r402(&handler, facilitator.clone())?;
            let mut mint = Mint::with(&mut app, vec![stage.payer.clone()]).await;
            warm(&mut app, &mut mint).await;
            stage.proxy.set_latency(RTT);
            for _ in 0..count {
                let request = serde_json::from_value(mint.request())?;
                stage.proxy.reset();
                let started = Instant::now();
                facilitator.verify(request).await?;
                verify.0.push(stage.proxy.reset().requests);
                verify.1.push(started.elapsed());
            }
            app
        }
        _ => {
            let facilitator = onchain::x402_rs(url, key).await?;
            let mut app = sellers::x402_axum(&handler, facilitator.clone());
            let mut mint = Mint::with(&mut app, vec![stage.payer.clone()]).await;
            warm(&mut app, &mut mint).await;
            stage.proxy.set_latency(RTT);
            for _ in 0..count {
                let request = serde_json::value::to_raw_value(&mint.request())?.into();
                stage.proxy.reset();
                let started = Instant::now();
                facilitator.verify(&request).await.map_err(|error| error.to_string())?;
                verify.0.push(stage.proxy.reset().requests);
                verify.1.push(started.elapsed());
            }
            app
        }
    };
    let mut mint = Mint::with(&mut app, vec![stage.payer.clone()]).await;
    let mut paid = (Vec::new(), Vec::new());
    for turn in 0..count {
        // Nowhere in particular within a block.
        tokio::time::sleep(block_time.mul_f64((turn as f64 * 0.618).fract())).await;
        let request = hot_path::paid(&mint.header(Signed::ByKey));
        stage.proxy.reset();
        let started = Instant::now();
        let response = hot_path::answer(&mut app, request).await;
        paid.1.push(started.elapsed());
        paid.0.push(stage.proxy.reset().requests);
        assert_eq!(response.status(), StatusCode::OK, "{:?}", response.headers());
    }
    println!(
        "| {} ms | {} | {}, {} | {}, {} |",
        block_time.as_millis(),
        sellers::NAMES[seller],
        median(verify.0),
        median(verify.1).as_millis(),
        median(paid.0),
        median(paid.1).as_millis(),
    );
    drop(stage.devnet);
    Ok(())
}

/// What is asked once is not counted.
async fn warm(app: &mut Router, mint: &mut Mint) {
    for _ in 0..2 {
        let response = hot_path::answer(app, hot_path::paid(&mint.header(Signed::ByKey))).await;
        assert_eq!(response.status(), StatusCode::OK, "{:?}", response.headers());
    }
}

fn median<T: Ord>(mut values: Vec<T>) -> T {
    values.sort();
    let middle = values.len() / 2;
    values.swap_remove(middle)
}

/// Ours: a hundred payments that become due at once.
async fn batched() -> Result {
    const PAYMENTS: usize = 400;
    let stage = Stage::new(Duration::from_secs(2)).await?;
    let facilitator: Arc<OnchainFacilitator> = Arc::new(onchain::ours(stage.proxy.url(), stage.settler.clone()).await?);
    facilitator.deploy_batch_settler().await?;
    let mut app = sellers::ours_with(&post(async |_: Bytes| hot_path::WORK), facilitator.clone())?;
    let mut mint = Mint::with(&mut app, vec![stage.payer.clone()]).await;
    warm(&mut app, &mut mint).await;
    stage.proxy.set_latency(RTT);
    let requests: Vec<_> = (0..PAYMENTS).map(|_| hot_path::paid(&mint.header(Signed::ByKey))).collect();
    let before = facilitator.stats();
    stage.proxy.reset();
    let mut tasks = tokio::task::JoinSet::new();
    for request in requests {
        let mut app = app.clone();
        tasks.spawn(async move { hot_path::answer(&mut app, request).await.status() });
    }
    let statuses = tasks.join_all().await;
    assert!(statuses.iter().all(|status| *status == StatusCode::OK), "{statuses:?}");
    let (counts, after) = (stage.proxy.reset(), facilitator.stats());
    // Only those that verify share requests.
    let others = counts.calls - counts.of("eth_call");
    let each = |requests: u64| requests as f64 / PAYMENTS as f64;
    println!(
        "\ntower-x402, {PAYMENTS} payments at once: {} transactions, {:.3} requests a payment to verify, {:.3} for all else: {:?}",
        after.transactions - before.transactions,
        each(counts.requests - others),
        each(others),
        counts.methods,
    );
    Ok(())
}
