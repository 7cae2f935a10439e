//! Payment channels on four processes with one database, in the same weather. One process is killed in the middle and started again.
//!
//! ```text
//! replica.rs   a selling process
//! buyers.rs    buyers with journals, that retry, send copies, lose answers, fill channels again and ask for refunds
//! books.rs     what chain, seller's books, buyers' journals and handled work must agree on in the end
//! ```

mod books;
mod buyers;
mod replica;

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use alloy_primitives::U256;
use alloy_signer_local::PrivateKeySigner;
use tower_x402::ledger::PostgresLedger;

use self::{
    buyers::Buyers,
    replica::{REPLICAS, Setup},
};
use super::{FINALITY_DEPTH, dice::Dice, plan::Plan, process::Replica, weather};
use support::{
    authorization::{random_address, random_nonce},
    chain::Chain,
    devnet::DevnetChain,
    postgres::Server,
    rpc_proxy::{Fate, RpcProxy},
};

/// The schema of the replicas' tables.
const SCHEMA: &str = "channels";
/// How far the replicas' books are ahead in the end, in seconds: leases of claims have ended, and every channel is looked at again.
const LATER: u64 = 200;
/// The channels of a payer.
const LANES: usize = 4;

/// A reorganization comes every ten blocks on average.
const BLOCK_TIME: Duration = Duration::from_millis(200);

/// Returns the price that is offered for the n-th order, in atomic units.
fn price(n: u64) -> u64 {
    1_000 + n % 977
}

/// Returns what the n-th order costs in the end: the price, less, or nothing.
fn cost(n: u64) -> u64 {
    match n / 3 % 8 {
        0 => 0,
        1..=3 => price(n) * (n % 89) / 100,
        _ => price(n),
    }
}

/// `deposit` is the size of a deposit, in atomic units.
async fn storm(plan: Plan, deposit: u64) {
    let server = Server::start();
    let chain = DevnetChain::start_with(Some(BLOCK_TIME), FINALITY_DEPTH).await;
    let (devnet, proxy) = (chain.devnet.clone(), RpcProxy::start(chain.rpc_url()).await);
    let directory = tempfile::tempdir().unwrap();
    let mut setups = Vec::new();
    let (payee, authorizer) = (random_address(), random_nonce());
    for index in 0..REPLICAS {
        // Account nonces are counted in each process, so that each needs a key of its own.
        let gas = PrivateKeySigner::random();
        chain.fund(gas.address(), U256::from(10).pow(U256::from(20))).await;
        let (database, node) = (server.url().to_owned(), proxy.url().to_owned());
        let work = directory.path().join(format!("work-{index}"));
        // Short, so that outcomes are often unknown at first.
        let confirm_timeout = 16 * BLOCK_TIME;
        setups.push(Setup { database, node, work, gas_key: gas.to_bytes(), authorizer, payee, confirm_timeout });
    }
    let ledger = PostgresLedger::builder(server.url()).schema(SCHEMA).connect().await.unwrap();
    let mut replicas: Vec<Replica> = setups.iter().map(Setup::start).collect();
    let urls = replicas.iter().map(|replica| replica.url.clone()).collect();
    let buyers = Arc::new(Buyers::new(&chain, plan, deposit, urls, directory.path()).await);
    // A reorganization must not remove the payers' balances.
    (0..=weather::DEEPEST).for_each(|_| devnet.mine());
    proxy.reset();
    weather::on_the_way(&proxy, &plan);
    let faults = [
        tokio::spawn(weather::on_devnet(devnet.clone(), plan.seed)),
        tokio::spawn(claim_now_and_then(buyers.clone(), plan.seed)),
    ];
    let started = Instant::now();
    let buying = tokio::spawn(Buyers::buy_all(buyers.clone()));
    while buyers.begun() < plan.payments / 3 && !buying.is_finished() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let mut dead = replicas.remove(0);
    dead.kill();
    tokio::time::sleep(Duration::from_secs(2)).await;
    let again = Setup { work: directory.path().join("work-again"), ..setups[0].clone() };
    let again = tokio::task::spawn_blocking(move || again.start()).await.unwrap();
    buyers.replaced(0, again.url.clone());
    replicas.push(again);
    buying.await.unwrap();
    let storm = started.elapsed();
    faults.iter().for_each(tokio::task::JoinHandle::abort);
    weather::clear(&devnet);
    proxy.judge(|_| Fate::Pass);

    let calm = Instant::now();
    buyers.tell_all("later").await;
    books::until_all_is_claimed(&chain, &buyers, &ledger, payee).await;
    let refunded = buyers.refund_half().await;
    buyers.tell_all("later").await;
    let records = books::until_all_is_claimed(&chain, &buyers, &ledger, payee).await;
    let calm = calm.elapsed();
    let sums = books::balance(&chain, &records, payee).await;
    books::worked(&dead, &replicas, &buyers);
    let bought = books::bought(&chain, &records, buyers).await;
    println!(
        "{} payments of {} payers over {} channels on {REPLICAS} replicas, one killed: storm {storm:.1?} ({:.0} payments/s), calm after \
         {calm:.1?}; {sums}; {bought}; {refunded} channels refunded in the end; {} RPC calls ({:.2} a payment)",
        plan.payments,
        plan.payers,
        records.len(),
        plan.payments as f64 / storm.as_secs_f64(),
        proxy.counts().calls,
        proxy.counts().calls as f64 / plan.payments as f64,
    );
}

/// An operator who claims all, on any replica, whatever the policy says.
async fn claim_now_and_then(buyers: Arc<Buyers>, seed: u64) {
    let mut dice = Dice::new(seed, u64::MAX - 1);
    loop {
        tokio::time::sleep(dice.millis(2_000..6_000)).await;
        buyers.tell(dice.of(0..REPLICAS as u64) as usize, "claim").await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn channels_balance_on_four_processes_after_a_storm() {
    // For some fifteen orders.
    storm(Plan::of(600, 6), 15_000).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "takes many minutes; see the head of ../mod.rs"]
async fn channels_balance_on_four_processes_after_a_storm_of_full_size() {
    storm(Plan::of(50_000, 125), 30_000).await;
}
