//! How long 64 requests at once take whose handler needs 200 ms: unpaid, and paid with vouchers from 64 channels.
//!
//! ```text
//! cargo bench -p tower-x402-tests --bench lanes
//! cargo bench -p tower-x402-tests --bench lanes -- official     the official client beside it (needs node, see CONTRIBUTING.md)
//! ```
//!
//! Over loopback, with the seller's books in SQLite and the buyer's journal in a file, and everything in one process. The two kinds take
//! turns. The official client has one channel to a seller, and the scheme lets one request use a channel at a time. Asked for more at once
//! than that it gets `channel_busy`, which it hands on, so it asks for one after the other here.

use std::{
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

use alloy_primitives::U256;
use alloy_signer_local::PrivateKeySigner;
use axum::{Router, routing::post};
use futures_util::future::join_all;
use support::{chain::Chain as _, devnet::DevnetChain, shop::Shop};
use tower_x402::{
    Network, Usdc,
    channels::Channels,
    client::{Budget, ChannelPolicy, Journal, Payer, PaymentMiddleware, PaymentOutcome, ReceiptExt as _},
    facilitator::channels::OnchainChannels,
    ledger::SqliteLedger,
    vouchers::AuthorizerKey,
};

const AT_ONCE: usize = 64;
const WORK: Duration = Duration::from_millis(200);
const ROUNDS: usize = 21;

#[tokio::main]
async fn main() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let chain = DevnetChain::start(None).await;
    let url = seller(&chain, directory.path()).await;
    let (free, paid) = (format!("{url}/free"), format!("{url}/paid"));

    let key = PrivateKeySigner::random();
    let money = Usdc::from_atomic(20_000_000);
    chain.mint(key.address(), money.atomic()).await;
    let journal = Journal::open(directory.path().join("journal")).expect("a new file");
    let budget = Budget::builder().total(money).journal(journal).build();
    let lanes = ChannelPolicy::new().lanes(AT_ONCE as u32).deposit("$0.1".parse().expect("an amount"));
    let payer = Payer::builder(key).budget(budget).vouchers(lanes.escrow_per_payee(money).escrow_total(money)).build();
    let unpaying = reqwest::Client::builder().no_proxy().build().expect("a client");
    let paying = PaymentMiddleware::new(payer.clone()).client(reqwest::Client::builder().no_proxy()).expect("a client");

    let all_free = async || {
        let started = Instant::now();
        let answers = join_all((0..AT_ONCE).map(|_| unpaying.post(&free).send())).await;
        assert!(answers.iter().all(|answer| answer.as_ref().is_ok_and(|answer| answer.status() == 200)));
        started.elapsed()
    };
    let all_paid = async || {
        let started = Instant::now();
        let answers = join_all((0..AT_ONCE).map(|_| paying.post(&paid).send())).await;
        let took = started.elapsed();
        for answer in answers {
            let answer = answer.expect("an answer");
            let receipt = answer.receipt().expect("a receipt");
            assert_eq!((answer.status().as_u16(), receipt.outcome), (200, PaymentOutcome::Accepted), "{receipt:?}");
            assert!(receipt.is_by_voucher());
        }
        took
    };
    all_free().await;
    let opening = all_paid().await;
    // A channel that is free again is used before another one is opened.
    let channels = || payer.budget().journal().channels().len();
    for _ in 0..10 {
        if channels() < AT_ONCE {
            all_paid().await;
        }
    }
    assert_eq!(channels(), AT_ONCE);
    let mut times = [Vec::new(), Vec::new()];
    for _ in 0..ROUNDS {
        times[0].push(all_free().await);
        times[1].push(all_paid().await);
    }
    println!("| {AT_ONCE} requests at once, {WORK:?} each | median | slowest |\n|---|---|---|");
    for (what, times) in ["unpaid", "paid, a channel each"].into_iter().zip(&mut times) {
        times.sort();
        println!("| {what} | {:.0?} | {:.0?} |", times[ROUNDS / 2], times[ROUNDS - 1]);
    }
    println!("| paid, and the channels are opened | {opening:.0?} | |");
    if std::env::args().any(|argument| argument == "official") {
        println!("| the official client, one after the other | {:.0?} | |", official(&chain, &paid).await);
    }
    let ratio = times[1][ROUNDS / 2].as_secs_f64() / times[0][ROUNDS / 2].as_secs_f64();
    println!("\npaid takes {ratio:.3} times as long as unpaid");
}

/// Serves `/free` and `/paid`, and returns the origin.
async fn seller(chain: &DevnetChain, directory: &Path) -> String {
    let key = PrivateKeySigner::random();
    chain.fund(key.address(), U256::from(10).pow(U256::from(19))).await;
    let contract = OnchainChannels::builder().network(Network::BASE_SEPOLIA).client(chain.devnet.rpc_client());
    let contract = contract.signer(key.clone()).build().await.expect("the contracts are on the devnet");
    let ledger = SqliteLedger::open(directory.join("ledger")).await.expect("a new file");
    let channels = Channels::builder(contract, AuthorizerKey::new(key)).ledger(Arc::new(ledger)).build();
    let shop = Shop::in_process(chain, |facilitator| facilitator).await;
    let paywall = shop.layer().vouchers(channels.expect("complete settings")).build().expect("a complete layer");
    let work = async || {
        tokio::time::sleep(WORK).await;
        "done"
    };
    let app = Router::new().route("/paid", post(work)).layer(paywall).route("/free", post(work));
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let url = format!("http://{}", listener.local_addr().expect("bound"));
    tokio::spawn(async move { axum::serve(listener, app).await });
    url
}

/// How long the official client takes for as many requests, without the one that opens its channel.
async fn official(chain: &DevnetChain, url: &str) -> Duration {
    let key = PrivateKeySigner::random();
    chain.mint(key.address(), 1_000_000).await;
    let program = tokio::process::Command::new("node")
        .args(["lanes.mjs", url, &AT_ONCE.to_string()])
        .current_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("peers"))
        .env("PRIVATE_KEY", key.to_bytes().to_string())
        .env("RPC_URL", chain.rpc_url())
        .output()
        .await
        .expect("node runs");
    assert!(program.status.success(), "{}", String::from_utf8_lossy(&program.stderr));
    let text = String::from_utf8_lossy(&program.stdout);
    Duration::from_millis(text.trim().parse().expect("milliseconds"))
}
