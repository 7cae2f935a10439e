//! Paid requests over loopback: client and server share this machine.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use axum::{Router, routing::post};
use bytes::Bytes;
use http::{HeaderMap, HeaderValue, StatusCode};
use http_body_util::BodyExt as _;
use tokio::sync::Semaphore;
use tower_x402::{SystemClock, ledger::SqliteLedger};

use crate::{
    Result,
    at_once::Checks,
    hot_path,
    listening::{Listening, request},
    own::processor_time,
    payments::{Mint, Signed, keys},
    sellers,
};

const CONNECTIONS: usize = 256;
const PAYMENTS: usize = 6_000;
const TURNS: usize = 3;
/// Requests a second at which it is watched how long they take, beside half of what goes.
const PACED: f64 = 2_000.0;
/// For so long, since a database tidies up now and then.
const PACED_SECONDS: f64 = 10.0;
/// Of express, which takes its time.
const FEW: usize = 1_000;

pub fn run() -> Result {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?.block_on(all())
}

async fn all() -> Result {
    let handler = post(async |_: Bytes| hot_path::WORK);
    let directory = tempfile::tempdir()?;
    let mut rates: [Vec<f64>; 4] = Default::default();
    let mut fsyncs = 0.0;
    for turn in 0..TURNS {
        let path = directory.path().join(format!("{turn}.sqlite"));
        let ledger = Arc::new(SqliteLedger::open(&path).await?);
        let durable = sellers::ours_with(&handler, hot_path::AtOnce::over(ledger.clone()))?;
        let [in_memory, r402, x402_axum] = sellers::all(&handler, Checks::Signature)?;
        for (rates, app) in rates.iter_mut().zip([durable, in_memory, r402, x402_axum]) {
            rates.push(throughput(&Listening::here(app).await?, PAYMENTS).await?);
        }
        fsyncs = ledger.commits() as f64 / PAYMENTS as f64;
    }
    let mut rates = rates.map(median).to_vec();
    let better = rates[2].max(rates[3]);
    let mut names = vec!["tower-x402, SQLite", "tower-x402, in memory", sellers::NAMES[1], sellers::NAMES[2]];
    match Listening::express().await? {
        Some(express) => {
            let mut runs = Vec::new();
            for _ in 0..=TURNS {
                runs.push(throughput(&express, FEW).await?);
            }
            // The first warms up.
            rates.push(median(runs.split_off(1)));
            names.push("@x402/express 2.27.0");
        }
        None => println!("without @x402/express: `npm install` in tests/peers installs it"),
    }
    println!("paid requests a second, {CONNECTIONS} connections, median of {TURNS} runs of {PAYMENTS}");
    println!("| | a second | to the better peer |\n|---|---|---|");
    for (name, rate) in names.iter().zip(&rates) {
        println!("| {name} | {rate:.0} | {:.2} × |", rate / better);
    }
    println!("\ncommits of SQLite, an fsync each: {fsyncs:.3} per payment");
    paced(&[PACED, rates[0] / 2.0]).await
}

/// Only how long they take at an even rate, a few times, and how long it takes with less: without a disk, and without payments.
pub fn run_paced() -> Result {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    runtime.block_on(async {
        paced(&[PACED; 5]).await?;
        let handler = post(async |_: Bytes| hot_path::WORK);
        let in_memory = sellers::ours_with(&handler, hot_path::AtOnce::in_memory(Arc::new(SystemClock)))?;
        let in_memory = Listening::here(in_memory).await?;
        let demand = in_memory.demand().await?;
        let unpaid = Listening::here(Router::new().route("/evaluate", handler)).await?;
        for (name, server) in [("tower-x402, in memory", in_memory), ("the handler alone", unpaid)] {
            at_rate(&server, &demand, PACED).await?;
            for _ in 0..2 {
                at_rate(&server, &demand, PACED).await?.print(name);
            }
        }
        Ok(())
    })
}

async fn paced(rates: &[f64]) -> Result {
    let handler = post(async |_: Bytes| hot_path::WORK);
    let directory = tempfile::tempdir()?;
    let ledger = Arc::new(SqliteLedger::open(directory.path().join("paced.sqlite")).await?);
    let app = sellers::ours_with(&handler, hot_path::AtOnce::over(ledger))?;
    let server = Listening::here(app).await?;
    let demand = server.demand().await?;
    // What is still to be written of something else, the build of this program perhaps, would be in the way of every commit.
    rustix::fs::sync();
    // The first run only warms up.
    at_rate(&server, &demand, PACED).await?;
    for aim in rates {
        at_rate(&server, &demand, *aim).await?.print("tower-x402, SQLite");
    }
    Ok(())
}

pub fn median(mut rates: Vec<f64>) -> f64 {
    rates.sort_by(f64::total_cmp);
    rates[rates.len() / 2]
}

/// As many a second as go, from all connections.
async fn throughput(server: &Listening, payments: usize) -> Result<f64> {
    Ok(drive(server, &server.demand().await?, CONNECTIONS, payments, None).await?.rate())
}

/// So many a second, at even distances; the time counts from when each was due.
async fn at_rate(server: &Listening, demand: &HeaderMap, rate: f64) -> Result<Driven> {
    let count = (rate * PACED_SECONDS) as usize;
    drive(server, demand, CONNECTIONS, count, Some(rate)).await
}

/// How it went.
pub struct Driven {
    /// What the process had of the processors meanwhile.
    pub cpu: Duration,
    /// From the first request to the last answer.
    pub took: Duration,
    /// How long each was answered after.
    pub times: Vec<Duration>,
    /// How many got no 200.
    pub refused: usize,
}

impl Driven {
    /// Answers a second; all must have got one.
    fn rate(&self) -> f64 {
        assert_eq!(self.refused, 0, "each payment buys an answer");
        self.times.len() as f64 / self.took.as_secs_f64()
    }

    fn print(mut self, name: &str) {
        self.times.sort();
        let percentile = |percent: usize| self.times[(self.times.len() - 1) * percent / 100].as_secs_f64() * 1_000.0;
        println!(
            "{name}, at {:.0} a second: p50 {:.2} ms, p95 {:.2} ms, p99 {:.2} ms, longest {:.2} ms; {:.0} µs of the processors each",
            self.rate(),
            percentile(50),
            percentile(95),
            percentile(99),
            percentile(100),
            self.cpu.as_secs_f64() * 1e6 / self.times.len() as f64
        );
    }
}

/// Sends so many payments for what is demanded over so many connections, as fast as they are answered or so many a second.
pub async fn drive(
    server: &Listening,
    demand: &HeaderMap,
    connections: usize,
    count: usize,
    rate: Option<f64>,
) -> Result<Driven> {
    let mut mint = Mint::asked(demand, keys(200));
    let payments: Arc<[HeaderValue]> = (0..count).map(|_| mint.header(Signed::ByKey)).collect();
    let mut senders = Vec::new();
    for _ in 0..connections {
        senders.push(server.connect().await?);
    }
    let (next, times) = (Arc::new(AtomicUsize::new(0)), Arc::new(Mutex::new(Vec::with_capacity(count))));
    let refused = Arc::new(AtomicUsize::new(0));
    let due = Arc::new(Semaphore::new(if rate.is_some() { 0 } else { count + connections }));
    let cpu = processor_time("self");
    let start = Instant::now();
    let when = move |n: usize| rate.map(|rate| start + Duration::from_secs_f64(n as f64 / rate));
    // By a thread's clock: the runtime's own timers are late by up to two milliseconds.
    let pace = due.clone();
    let pacer = std::thread::spawn(move || {
        for due in (0..count).map_while(&when) {
            std::thread::sleep(due.saturating_duration_since(Instant::now()));
            pace.add_permits(1);
        }
        // Nothing is left: each is told once.
        pace.add_permits(connections);
    });
    let mut tasks = tokio::task::JoinSet::new();
    for mut sender in senders {
        let (next, times, payments, refused) = (next.clone(), times.clone(), payments.clone(), refused.clone());
        let due = due.clone();
        tasks.spawn(async move {
            loop {
                due.acquire().await.expect("it stays open").forget();
                let n = next.fetch_add(1, Ordering::Relaxed);
                let Some(payment) = payments.get(n) else { return };
                let began = when(n).unwrap_or_else(Instant::now);
                let response = sender.send_request(request(hot_path::paid(payment))).await.expect("an answer");
                if response.status() != StatusCode::OK && refused.fetch_add(1, Ordering::Relaxed) == 0 {
                    eprintln!("{}: {:?}", response.status(), response.headers());
                }
                response.into_body().collect().await.expect("a body");
                times.lock().expect("nobody panics").push(began.elapsed());
            }
        });
    }
    while let Some(done) = tasks.join_next().await {
        done?;
    }
    let took = start.elapsed();
    pacer.join().expect("nobody panics");
    let cpu = processor_time("self").saturating_sub(cpu);
    let times = std::mem::take(&mut *times.lock().expect("nobody panics"));
    Ok(Driven { cpu, took, times, refused: refused.load(Ordering::Relaxed) })
}
