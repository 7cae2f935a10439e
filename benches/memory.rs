//! What payments on credit leave in memory: while they wait, and after they are paid.
//!
//! ```text
//! cargo bench -p tower-x402-tests --bench memory                   100,000 payments
//! MEMORY_PAYMENTS=1000000 cargo bench -p tower-x402-tests --bench memory
//! ```
//!
//! Everything a seller runs; the chain is another process. Counted are the bytes that the process has allocated and not freed. The
//! ledger is the one in SQLite, which keeps every payment that can still be presented in memory too; what that takes is measured
//! with another ledger, and told apart. Its clock runs fast, so that payments age out of it: there are about 20,000 in it.

use std::{
    alloc::System,
    io::{BufRead as _, BufReader, Write as _},
    process::{Child, Command, Stdio},
    sync::Arc,
    time::{Duration, Instant},
};

use alloy_primitives::{B256, U256, keccak256};
use alloy_signer_local::PrivateKeySigner;
use bytes::Bytes;
use http::StatusCode;
use stats_alloc::{INSTRUMENTED_SYSTEM, StatsAlloc};
use support::shop::{App, Customer, PRICE, Shop, demand, evaluate, send};
use tokio::{sync::Semaphore, task::JoinSet};
use tower_x402::{
    Clock as _, ManualClock, Network, Usdc,
    facilitator::{Facilitator as _, OnchainFacilitator},
    ledger::{
        Fulfilment, FulfilmentStep, Ledger as _, Listing, MemoryLedger, Record, Reservation, ResponseLimits,
        Settlement, SqliteLedger, StoredResponse,
    },
    payment::Funds,
    server::DeferredPolicy,
};
use x402_devnet::{BlockTime, Devnet, Fault};

#[global_allocator]
static HEAP: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

const NOW: u64 = 1_800_000_000;
const PAYERS: u64 = 100;
const AT_ONCE: usize = 64;
/// How many wait in the first part: before and after what is measured.
const WAITING: [u64; 2] = [2_000, 8_000];
/// How many are bought before the clocks move, and are paid then.
const UNPAID: u64 = 5_000;
/// Payments in a second of the ledger's time.
const PACE: u64 = 20;
/// The child's part on its command line.
const CHAIN: &str = "chain";

fn main() {
    let threads = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    threads.block_on(async {
        match std::env::args().nth(1).as_deref() {
            Some(CHAIN) => serve_a_chain().await,
            _ => measure().await,
        }
    });
}

/// The bytes allocated and not freed.
fn heap() -> i64 {
    let stats = HEAP.stats();
    stats.bytes_allocated as i64 - stats.bytes_deallocated as i64
}

fn key(n: u64) -> PrivateKeySigner {
    PrivateKeySigner::from_bytes(&keccak256(n.to_be_bytes())).unwrap()
}

fn settlement_key() -> PrivateKeySigner {
    PrivateKeySigner::from_bytes(&B256::repeat_byte(7)).unwrap()
}

/// The child: a chain on which everybody is rich, until the parent goes away. A number on its input moves its clock by so many
/// seconds, an empty line begins and ends a pause in which no transaction arrives.
async fn serve_a_chain() {
    let clock = Arc::new(ManualClock::at(NOW));
    let builder = Devnet::builder().clock(clock.clone()).finality_depth(5);
    let devnet = builder.block_time(BlockTime::Every(Duration::from_millis(200))).start().await.unwrap();
    devnet.fund(settlement_key().address(), U256::from(10).pow(U256::from(21)));
    for n in 0..PAYERS {
        devnet.mint(key(n).address(), Usdc::from_atomic(PRICE * 10_000_000)).unwrap();
    }
    let port = devnet.serve("127.0.0.1:0").await.unwrap();
    println!("{}", port.url());
    let mut paused = false;
    tokio::task::spawn_blocking(move || {
        for line in std::io::stdin().lines() {
            if let Ok(seconds) = line.unwrap().parse() {
                clock.advance(seconds);
                println!();
                continue;
            }
            paused = !paused;
            match paused {
                true => devnet.faults().set(|call| match call.method.starts_with("eth_send") {
                    true => Fault::DropBefore,
                    false => Fault::None,
                }),
                false => devnet.faults().clear(),
            }
            println!();
        }
    })
    .await
    .unwrap();
}

/// The chain, from the parent's side.
struct Chain {
    process: Child,
    output: BufReader<std::process::ChildStdout>,
    url: String,
}

impl Chain {
    fn start() -> Self {
        let mut process = Command::new(std::env::current_exe().unwrap())
            .arg(CHAIN)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut output = BufReader::new(process.stdout.take().unwrap());
        let mut url = String::new();
        output.read_line(&mut url).unwrap();
        Self { process, output, url: url.trim().to_owned() }
    }

    /// Does as the line says.
    fn tell(&mut self, line: &str) {
        writeln!(self.process.stdin.as_mut().unwrap(), "{line}").unwrap();
        self.output.read_line(&mut String::new()).unwrap();
    }
}

impl Drop for Chain {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

async fn measure() {
    let mut chain = Chain::start();
    let directory = tempfile::tempdir().unwrap();
    let clock = Arc::new(ManualClock::at(NOW));
    let path = directory.path().join("ledger.sqlite");
    let ledger = SqliteLedger::open_with(path, ResponseLimits::default(), 1_000_000, clock.clone()).await.unwrap();
    let facilitator = OnchainFacilitator::builder()
        .rpc_url(&chain.url)
        .network(Network::BASE_SEPOLIA)
        .signer(settlement_key())
        .ledger(Arc::new(ledger))
        .clock(clock.clone())
        .backlog(100_000)
        .build()
        .await
        .unwrap();
    facilitator.deploy_batch_settler().await.unwrap();
    let shop = Shop {
        facilitator: Arc::new(facilitator),
        pay_to: support::authorization::random_address(),
        asset: Network::BASE_SEPOLIA.usdc().unwrap(),
        handled: Arc::default(),
    };
    let credit = Usdc::from_atomic(1_000_000 * PRICE);
    let app = shop.app(shop.layer().clock(clock.clone()).deferred(DeferredPolicy::default().per_payer(credit)));
    let customers: Vec<_> = (0..PAYERS).map(key).map(|signer| Customer { from: signer.address(), signer }).collect();
    // Nobody owes more than it has paid.
    let mut bought = WAITING.iter().sum::<u64>();
    buy(&app, &clock, &customers, bought).await;
    until_paid(&shop, bought, 0).await;

    chain.tell("");
    buy(&app, &clock, &customers, WAITING[0]).await;
    let before = heap();
    buy(&app, &clock, &customers, WAITING[1]).await;
    let each = (heap() - before) as f64 / WAITING[1] as f64;
    bought += WAITING.iter().sum::<u64>();
    let waiting = open(&shop).await;
    assert_eq!(waiting.len() as u64, WAITING.iter().sum::<u64>());
    let in_ledger = ledgers_own(&shop, &waiting[WAITING[0] as usize..]).await;
    drop(waiting);
    println!("a payment that waits: {each:.0} bytes, of which the ledger keeps {in_ledger:.0}");
    chain.tell("");
    until_paid(&shop, bought, 0).await;

    let payments: u64 = std::env::var("MEMORY_PAYMENTS").map_or(100_000, |text| text.parse().unwrap());
    println!("\n| payments | heap, KiB | payments/s |");
    println!("|---|---|---|");
    let mut seen = Vec::new();
    for _ in 0..10 {
        let started = Instant::now();
        for _ in 0..(payments / 10).div_ceil(UNPAID) {
            buy(&app, &clock, &customers, (payments / 10).min(UNPAID)).await;
            bought += (payments / 10).min(UNPAID);
            until_paid(&shop, bought, 0).await;
            let passed = (payments / 10).min(UNPAID) / PACE;
            chain.tell(&passed.to_string());
            // A block of the new time: what is older is taken for a node that lags.
            tokio::time::sleep(Duration::from_millis(500)).await;
            clock.advance(passed);
        }
        until_paid(&shop, bought, 0).await;
        seen.push(heap());
        println!("| {bought} | {} | {:.0} |", heap() >> 10, payments as f64 / 10.0 / started.elapsed().as_secs_f64());
    }
    let (early, late) = (seen[4], seen[9]);
    println!("\nin the end {:.2} times what it was halfway", late as f64 / early as f64);
    assert!(each - in_ledger <= 1024.0, "a payment that waits takes {each} bytes, and its record {in_ledger}");
    assert!(late < early + early / 8, "memory grows with the payments that passed: {early}, then {late} bytes");
}

/// What is not paid.
async fn open(shop: &Shop) -> Vec<Record> {
    let (mut listing, mut records) = (Listing::default(), Vec::new());
    loop {
        let page = shop.facilitator.ledger().list(&listing).await.unwrap();
        let Some(last) = page.last() else { return records };
        listing.after = Some(last.key);
        records.extend(page.into_iter().filter(|record| record.settlement.paid_by().is_none()));
    }
}

/// What a ledger keeps in memory of each of these and of its response, in bytes.
async fn ledgers_own(shop: &Shop, records: &[Record]) -> f64 {
    let ledger = MemoryLedger::new();
    let before = heap();
    for record in records {
        let mut new = record.clone();
        (new.fulfilment, new.settlement, new.admitted) = (Fulfilment::Reserved, Settlement::None, false);
        let Reservation::New(lease) = ledger.reserve(&new).await.unwrap() else { panic!("known") };
        let (at, response) = (record.reserved_at, shop.facilitator.ledger().response(&record.key).await.unwrap());
        for step in [
            FulfilmentStep::Admit { funds: Some(Funds { balance: U256::MAX, block: 1 }), due: false },
            FulfilmentStep::Start { until: u64::MAX },
            FulfilmentStep::Produce { charged: None, body: None, at, response: response.as_ref().map(copy) },
        ] {
            ledger.advance(&lease.key, &lease.step(step.clone())).await.unwrap();
        }
    }
    (heap() - before) as f64 / records.len() as f64
}

/// A copy that shares nothing.
fn copy(response: &StoredResponse) -> StoredResponse {
    let (head, body) = (Bytes::copy_from_slice(&response.head), Bytes::copy_from_slice(&response.body));
    StoredResponse { head, body, ..*response }
}

/// Buys so many times, and gets every answer.
async fn buy(app: &App, clock: &ManualClock, customers: &[Customer], count: u64) {
    let ask = demand(&send(app, evaluate("a")).await);
    let places = Arc::new(Semaphore::new(AT_ONCE));
    let mut tasks = JoinSet::new();
    for (_, customer) in (0..count).zip(customers.iter().cycle()) {
        let place = places.clone().acquire_owned().await.unwrap();
        let (app, ask, customer, now) = (app.clone(), ask.clone(), customer.clone(), clock.now());
        tasks.spawn(async move {
            let _place = place;
            let mut purchase = customer.sign(&ask, 0);
            purchase.authorization.validAfter = U256::from(now - 60);
            purchase.authorization.validBefore =
                U256::from(now + purchase.offer["maxTimeoutSeconds"].as_u64().unwrap());
            purchase.resign();
            let answer = send(&app, purchase.on(evaluate("a"))).await;
            assert_eq!(answer.status, StatusCode::OK, "{answer:?}");
        });
        while let Some(done) = tasks.try_join_next() {
            done.unwrap();
        }
    }
    while let Some(done) = tasks.join_next().await {
        done.unwrap();
    }
}

/// Until all but so many are paid.
async fn until_paid(shop: &Shop, bought: u64, but: u64) {
    let deadline = Instant::now() + Duration::from_secs(120);
    while shop.counts().await.settled + but < bought {
        assert!(Instant::now() < deadline, "{:?} of {bought}", shop.counts().await);
        shop.facilitator.reconcile_now();
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}
