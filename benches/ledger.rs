//! How fast payments are accepted durably, and what they leave in memory.
//!
//! ```text
//! cargo bench -p tower-x402-tests --bench ledger                     all of it
//! cargo bench -p tower-x402-tests --bench ledger -- postgres         with PostgreSQL, whose programs must be installed
//! ```
//!
//! Accepting is what the layer asks of the ledger before it hands over an answer: reserve, admit, start, produce. Each is
//! durable before the next, but for reservation and admission on SQLite, which are so with the start. What is signed plays no part here.

use std::{
    alloc::System,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Instant,
};

use alloy_primitives::{Address, B256, U256};
use alloy_signer::SignerSync as _;
use alloy_signer_local::PrivateKeySigner;
use stats_alloc::{INSTRUMENTED_SYSTEM, StatsAlloc};
use tower_x402::{
    Clock as _, ManualClock, Network,
    eip3009::{Authorization, PaymentSignature},
    ledger::{
        Fingerprint, FulfilmentStep, Ledger, MemoryLedger, PostgresLedger, Record, Reservation, ResponseLimits,
        SettlementStep, SqliteLedger,
    },
    payment::{Funds, PaymentKey, Terms, Window, precheck},
    protocol::{ExactOffer, ExactPayload},
};

#[global_allocator]
static HEAP: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

const AT_ONCE: u64 = 256;
const NOW: u64 = 1_800_000_000;
/// How long payments are valid, in seconds.
const VALID: u64 = 120;
const PRICE: u64 = 1_000;

/// One genuine payment, of which all others are copies with another payer and nonce.
fn model() -> Record {
    let asset = Network::BASE_SEPOLIA.usdc().unwrap();
    let pay_to = Address::repeat_byte(7);
    let terms = Arc::new(Terms::new(ExactOffer::new(asset, U256::from(PRICE), pay_to, VALID)));
    let key = PrivateKeySigner::from_bytes(&B256::repeat_byte(1)).unwrap();
    let authorization = Authorization {
        from: key.address(),
        to: pay_to,
        value: U256::from(PRICE),
        valid_after: U256::ZERO,
        valid_before: U256::from(NOW + VALID),
        nonce: B256::ZERO,
    };
    let signature = key.sign_hash_sync(&authorization.signing_hash(terms.domain())).unwrap();
    let payload = ExactPayload::new(PaymentSignature::from(signature.as_bytes().to_vec()), authorization);
    let payment = precheck(terms, payload, Window::default().skew(5), NOW).unwrap();
    let request = Fingerprint { digest: B256::ZERO, names_caller: false };
    Record::new(&payment, request, NOW, NOW + VALID)
}

fn payment(model: &Record, n: u64, payers: u64, now: u64) -> Record {
    let mut record = model.clone();
    let payer = Address::left_padding_from(&(1 + n % payers).to_be_bytes());
    (record.authorization.from, record.authorization.nonce) = (payer, B256::from(U256::from(n)));
    record.authorization.valid_before = U256::from(now + VALID);
    record.key = PaymentKey { payer, nonce: record.authorization.nonce, ..record.key };
    (record.reserved_at, record.lease_until) = (now, now + VALID);
    record
}

async fn accept(ledger: &dyn Ledger, record: Record) {
    let at = record.reserved_at;
    let Reservation::New(lease) = ledger.reserve(&record).await.unwrap() else { panic!("known") };
    let funds = Some(Funds { balance: U256::MAX, block: 1 });
    for step in [
        FulfilmentStep::Admit { funds, due: false },
        FulfilmentStep::Start { until: at + VALID },
        FulfilmentStep::Produce { charged: None, body: None, at, response: None },
    ] {
        ledger.advance(&lease.key, &lease.step(step.clone())).await.unwrap();
    }
}

/// What is measured: how many are under way at a time, of how many payers, and whether all are copies of one payment.
struct Load {
    name: &'static str,
    at_once: u64,
    payers: u64,
    copies: bool,
}

const LOADS: [Load; 5] = [
    Load { name: "one at a time", at_once: 1, payers: 1_000, copies: false },
    Load { name: "1 payer", at_once: AT_ONCE, payers: 1, copies: false },
    Load { name: "10 payers", at_once: AT_ONCE, payers: 10, copies: false },
    Load { name: "1,000 payers", at_once: AT_ONCE, payers: 1_000, copies: false },
    Load { name: "copies of one", at_once: AT_ONCE, payers: 1, copies: true },
];

/// How often it is done in a second.
async fn rate(ledger: Arc<dyn Ledger>, payments: u64, load: &Load) -> f64 {
    let Load { payers, copies, .. } = *load;
    let (model, next) = (model(), Arc::new(AtomicU64::new(0)));
    if copies {
        accept(ledger.as_ref(), payment(&model, 0, payers, NOW)).await;
    }
    let started = Instant::now();
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..load.at_once {
        let (ledger, model, next) = (ledger.clone(), model.clone(), next.clone());
        tasks.spawn(async move {
            loop {
                let n = next.fetch_add(1, Ordering::Relaxed);
                if n >= payments {
                    return;
                }
                match copies {
                    true => {
                        let known = ledger.reserve(&payment(&model, 0, payers, NOW)).await.unwrap();
                        assert!(matches!(known, Reservation::Known(_)));
                    }
                    false => accept(ledger.as_ref(), payment(&model, n, payers, NOW)).await,
                }
            }
        });
    }
    while let Some(done) = tasks.join_next().await {
        done.unwrap();
    }
    payments as f64 / started.elapsed().as_secs_f64()
}

async fn accepted_durably(with_postgres: bool) {
    println!(
        "payments accepted in a second, {AT_ONCE} at a time but for the first; the last: copies told that they are known"
    );
    println!("| ledger | {} |", LOADS.each_ref().map(|load| load.name).join(" | "));
    println!("|---|---|---|---|---|---|");
    let limits = ResponseLimits::default;
    let clock = || Arc::new(ManualClock::at(NOW));
    let mut rates = Vec::new();
    for load in &LOADS {
        rates.push(rate(Arc::new(MemoryLedger::with(limits(), 1_000_000, clock())), 100_000, load).await);
    }
    report("memory", &rates, 0);
    rates.clear();
    let mut per_fsync = Vec::new();
    for load in &LOADS {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("ledger.sqlite");
        let ledger = Arc::new(SqliteLedger::open_with(path, limits(), 1_000_000, clock()).await.unwrap());
        let payments = if load.at_once == 1 { 1_000 } else { 20_000 };
        rates.push(rate(ledger.clone(), payments, load).await);
        per_fsync.push(payments as f64 / ledger.commits() as f64);
    }
    report("SQLite", &rates, 0);
    report("SQLite, payments for one fsync", &per_fsync[..LOADS.len() - 1], 1);
    if with_postgres {
        rates.clear();
        let server = support::postgres::Server::start();
        for load in &LOADS {
            let builder = PostgresLedger::builder(server.url()).schema(&server.new_schema()).clock(clock());
            let payments = if load.at_once == 1 { 500 } else { 5_000 };
            rates.push(rate(Arc::new(builder.connect().await.unwrap()), payments, load).await);
        }
        report("PostgreSQL", &rates, 0);
    }
}

fn report(name: &str, figures: &[f64], digits: usize) {
    let cells: Vec<String> = figures.iter().map(|figure| format!("{figure:.digits$}")).collect();
    println!("| {name} | {} |", cells.join(" | "));
}

/// The bytes allocated and not freed.
fn heap() -> i64 {
    let stats = HEAP.stats();
    stats.bytes_allocated as i64 - stats.bytes_deallocated as i64
}

/// A million payments go through a ledger, fifty in every second, and age out. What it holds is what can still be presented.
async fn a_million_payments() {
    let clock = Arc::new(ManualClock::at(NOW));
    let ledger = MemoryLedger::with(ResponseLimits::default(), 1_000_000, clock.clone());
    let model = model();
    let mut seen = Vec::new();
    println!("\na million payments of 1,000 payers, one after the other, 50 in a second");
    for n in 0..1_000_000_u64 {
        let now = clock.now();
        let record = payment(&model, n, 1_000, now);
        let key = record.key;
        accept(&ledger, record).await;
        let transaction = B256::from(U256::from(n));
        let settle = SettlementStep::Settle { transaction, block: Some(n / 50), fee: None };
        for step in [settle, SettlementStep::Finalize] {
            ledger.advance(&key, &step.clone().into()).await.unwrap();
        }
        if n % 50 == 49 {
            clock.advance(1);
        }
        if (n + 1) % 100_000 == 0 {
            seen.push(heap());
            println!("{:>10} payments{:>8} MiB", n + 1, heap() >> 20);
        }
    }
    let (early, late) = (seen[1], seen[9]);
    println!("in the end {:.2} times what it was after 200,000", late as f64 / early as f64);
    assert!(late < early + early / 10, "memory grows with the payments that passed: {early}, then {late} bytes");
}

#[tokio::main(flavor = "multi_thread", worker_threads = 4)]
async fn main() {
    let with_postgres = std::env::args().any(|argument| argument == "postgres");
    accepted_durably(with_postgres).await;
    a_million_payments().await;
}
