//! How fast payments are accepted durably, and what they leave in memory.
//!
//! ```text
//! cargo bench --bench ledger                     all of it
//! cargo bench --bench ledger -- postgres         with PostgreSQL, whose programs must be installed
//! ```
//!
//! Accepting is what the layer asks of the ledger before it hands over an answer: reserve, admit, start, produce. Every one of
//! them is durable before the next. The figures are for 256 payments under way at a time. What is signed plays no part here.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout, missing_docs)]

#[allow(dead_code, unreachable_pub)]
#[path = "../tests/support/postgres.rs"]
mod postgres;

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
    facilitator::{Terms, Window, precheck},
    ledger::{
        Fingerprint, FulfilmentStep, Funds, Ledger, MemoryLedger, PaymentKey, PostgresLedger, Record, Reservation,
        ResponseLimits, SettlementStep, SqliteLedger,
    },
    protocol::{ExactOffer, ExactPayload, PaymentFlow},
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
    let terms = Arc::new(Terms::new(ExactOffer {
        asset,
        amount: U256::from(PRICE),
        pay_to,
        max_timeout_seconds: VALID,
        flow: PaymentFlow::Authorization,
    }));
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
    let payload = ExactPayload { signature: PaymentSignature::from(signature.as_bytes().to_vec()), authorization };
    let payment = precheck(terms, payload, Window { remaining: 0, skew: 5 }, NOW).unwrap();
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
    let Reservation::New(lease) = ledger.reserve(record).await.unwrap() else { panic!("known") };
    let funds = Some(Funds { balance: U256::MAX, block: 1 });
    for step in [
        FulfilmentStep::Admit { funds, due: false },
        FulfilmentStep::Start { until: at + VALID },
        FulfilmentStep::Produce { body: None, at, response: None },
    ] {
        ledger.fulfil(&lease, step).await.unwrap();
    }
}

/// Payments accepted in a second.
async fn rate(ledger: Arc<dyn Ledger>, payments: u64, payers: u64) -> f64 {
    let (model, next, started) = (model(), Arc::new(AtomicU64::new(0)), Instant::now());
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..AT_ONCE {
        let (ledger, model, next) = (ledger.clone(), model.clone(), next.clone());
        tasks.spawn(async move {
            loop {
                let n = next.fetch_add(1, Ordering::Relaxed);
                if n >= payments {
                    return;
                }
                accept(ledger.as_ref(), payment(&model, n, payers, NOW)).await;
            }
        });
    }
    while let Some(done) = tasks.join_next().await {
        done.unwrap();
    }
    payments as f64 / started.elapsed().as_secs_f64()
}

async fn accepted_durably(with_postgres: bool) {
    println!("payments accepted in a second, {AT_ONCE} at a time");
    println!("{:<12}{:>14}{:>14}", "ledger", "10 payers", "1,000 payers");
    let limits = ResponseLimits::default;
    let clock = || Arc::new(ManualClock::at(NOW));
    let mut rates = Vec::new();
    for payers in [10, 1_000] {
        rates.push(rate(Arc::new(MemoryLedger::with(limits(), 1_000_000, clock())), 100_000, payers).await);
    }
    println!("{:<12}{:>14.0}{:>14.0}", "memory", rates[0], rates[1]);
    rates.clear();
    for payers in [10, 1_000] {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("ledger.sqlite");
        let ledger = Arc::new(SqliteLedger::open_with(path, limits(), 1_000_000, clock()).await.unwrap());
        rates.push(rate(ledger.clone(), 20_000, payers).await);
        rates.push(20_000.0 / ledger.commits() as f64);
    }
    let (payments, commits) = ([rates[0], rates[2]], [rates[1], rates[3]]);
    println!("{:<12}{:>14.0}{:>14.0}", "SQLite", payments[0], payments[1]);
    println!("{:<12}{:>14.1}{:>14.1}", "  per fsync", commits[0], commits[1]);
    if with_postgres {
        rates.clear();
        let server = postgres::Server::start();
        for payers in [10, 1_000] {
            let builder = PostgresLedger::builder(server.url()).schema(&server.new_schema()).clock(clock());
            rates.push(rate(Arc::new(builder.connect().await.unwrap()), 10_000, payers).await);
        }
        println!("{:<12}{:>14.0}{:>14.0}", "PostgreSQL", rates[0], rates[1]);
    }
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
            ledger.settle(&key, step).await.unwrap();
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
