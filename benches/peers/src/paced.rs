//! How late the slowest are at an even rate: in turns with what there is when payments are taken away, and with handlers that take as
//! much of the processors as a payment, one of which has a kilobyte on disk before it answers. What they cannot do is the machine's, on
//! which nobody but us need be at work.

use std::{sync::Arc, time::Instant};

use alloy_primitives::{B256, keccak256};
use axum::{Router, routing::post};
use bytes::Bytes;
use http::HeaderMap;
use tempfile::TempDir;
use tower_x402::{SystemClock, ledger::SqliteLedger};

use crate::{
    Result, hot_path,
    listening::Listening,
    load::{CONNECTIONS, Driven, drive, median},
    plain_file::PlainFile,
    sellers,
};

/// Requests a second.
const RATE: f64 = 2_000.0;
/// How long a turn is: a ledger's file tidies up several times meanwhile.
const SECONDS: f64 = 5.0;
const TURNS: usize = 12;
/// What the slowest hundredth may take, in milliseconds.
const AIM: f64 = 5.0;

pub fn run() -> Result {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?.block_on(all())
}

/// At half of what goes, once.
pub async fn half(rate: f64) -> Result {
    let (_directory, durable) = durable().await?;
    let demand = durable.demand().await?;
    settle_down();
    turn(&durable, &demand, rate).await?;
    let half = turn(&durable, &demand, rate).await?;
    println!("\nSQLite, at {rate:.0} a second, half of that: p50 {:.2} ms, p99 {:.2} ms", half.p50, half.p99);
    Ok(())
}

async fn all() -> Result {
    let handler = post(async |_: Bytes| hot_path::WORK);
    let (_directory, durable) = durable().await?;
    let in_memory = sellers::ours_with(&handler, hot_path::AtOnce::in_memory(Arc::new(SystemClock)))?;
    let in_memory = Listening::here(in_memory).await?;
    let alone = Listening::here(Router::new().route("/evaluate", handler)).await?;
    let demand = durable.demand().await?;
    settle_down();
    // The first turn of each only warms up, and says how much the handlers have to do.
    let on_disk = tempfile::tempdir()?;
    let file = Arc::new(PlainFile::create(&on_disk.path().join("plain"))?);
    let kept = Listening::here(keeping(file.clone(), 0)).await?;
    let paid = turn(&durable, &demand, RATE).await?.cpu;
    let as_much = |unpaid: Turn| ((paid - unpaid.cpu).max(0.0) / hash_time()) as usize;
    let of_kept = as_much(turn(&kept, &demand, RATE).await?);
    let of_alone = as_much(turn(&alone, &demand, RATE).await?);
    let busy = Router::new().route("/evaluate", post(async move |_: Bytes| work(of_alone)));
    let servers = [
        ("tower-x402, SQLite", durable),
        ("as much, and a kilobyte in a plain file, no payments", Listening::here(keeping(file, of_kept)).await?),
        ("as much, no payments", Listening::here(busy).await?),
        ("tower-x402, in memory", in_memory),
        ("the handler alone, no payments", alone),
    ];
    let mut turns: [Vec<Turn>; 5] = Default::default();
    for _ in 0..TURNS {
        for ((_, server), turns) in servers.iter().zip(&mut turns) {
            turns.push(turn(server, &demand, RATE).await?);
        }
    }
    println!("{RATE:.0} requests a second, {TURNS} turns of {SECONDS} s; ms from when one was due to its answer");
    println!(
        "| | p50 | p99: least | median | most | below {AIM} | µs of the processors |\n|---|---|---|---|---|---|---|"
    );
    for ((name, _), turns) in servers.iter().zip(&turns) {
        let of = |value: fn(&Turn) -> f64| median(turns.iter().map(value).collect());
        let least = turns.iter().map(|turn| turn.p99).fold(f64::INFINITY, f64::min);
        let most = turns.iter().map(|turn| turn.p99).fold(0.0, f64::max);
        let below = turns.iter().filter(|turn| turn.p99 < AIM).count();
        println!(
            "| {name} | {:.2} | {least:.2} | {:.2} | {most:.2} | {below} of {TURNS} | {:.0} |",
            of(|turn| turn.p50),
            of(|turn| turn.p99),
            of(|turn| turn.cpu)
        );
    }
    Ok(())
}

async fn durable() -> Result<(TempDir, Listening)> {
    let handler = post(async |_: Bytes| hot_path::WORK);
    let directory = tempfile::tempdir()?;
    let ledger = Arc::new(SqliteLedger::open(directory.path().join("paced.sqlite")).await?);
    let app = sellers::ours_with(&handler, hot_path::AtOnce::over(ledger))?;
    Ok((directory, Listening::here(app).await?))
}

/// What is still to be written of something else, the build of this program perhaps, would be in the way of every commit.
fn settle_down() {
    rustix::fs::sync();
}

/// Sells nothing, and answers when that is on disk.
fn keeping(file: Arc<PlainFile>, hashes: usize) -> Router {
    let answer = async move |_: Bytes| {
        let answer = work(hashes);
        file.keep().await;
        answer
    };
    Router::new().route("/evaluate", post(answer))
}

struct Turn {
    /// In milliseconds.
    p50: f64,
    p99: f64,
    /// Microseconds of the processors a request, the client's included.
    cpu: f64,
}

async fn turn(server: &Listening, demand: &HeaderMap, rate: f64) -> Result<Turn> {
    let Driven { cpu, mut times, refused, .. } =
        drive(server, demand, CONNECTIONS, (rate * SECONDS) as usize, Some(rate)).await?;
    assert_eq!(refused, 0, "each payment buys an answer");
    times.sort();
    let percentile = |percent: usize| times[(times.len() - 1) * percent / 100].as_secs_f64() * 1_000.0;
    Ok(Turn { p50: percentile(50), p99: percentile(99), cpu: cpu.as_secs_f64() * 1e6 / times.len() as f64 })
}

/// So much, whatever the clock says meanwhile.
fn work(hashes: usize) -> &'static str {
    let hash = (0..hashes).fold(B256::ZERO, |hash, _| keccak256(hash));
    std::hint::black_box(hash);
    hot_path::WORK
}

/// Microseconds: the least of several, since that is what a hash takes when nobody interferes.
fn hash_time() -> f64 {
    const HASHES: usize = 1_000;
    let times = (0..50).map(|_| {
        let start = Instant::now();
        work(HASHES);
        start.elapsed().as_secs_f64() * 1e6 / HASHES as f64
    });
    times.fold(f64::INFINITY, f64::min)
}
