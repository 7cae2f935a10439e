//! How late the slowest are at an even rate: in turns with what there is when payments are taken away, and with handlers that take as
//! much of the processors as a payment, one of which has a kilobyte on disk before it answers. What they cannot do is the machine's, on
//! which nobody but us need be at work.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use alloy_primitives::{B256, keccak256};
use axum::{Router, routing::post};
use bytes::Bytes;
use http::HeaderMap;
use tempfile::TempDir;
use tower_x402::{SystemClock, ledger::SqliteLedger};

use crate::{
    Result,
    awake::Awake,
    hot_path,
    listening::Listening,
    load::{CONNECTIONS, Driven, drive, median},
    plain_file::PlainFile,
    sellers,
};

/// Requests a second.
const RATE: f64 = 2_000.0;
/// How long a turn is: a ledger's file tidies up several times meanwhile.
const SECONDS: f64 = 5.0;
pub const TURNS: usize = 12;
/// What takes turns: the ledger on disk first.
const ROWS: usize = 5;
/// What the slowest hundredth may take, in milliseconds.
const AIM: f64 = 5.0;
/// In a turn of which its host kept no more than that, a hundredth of the processors' time, the machine was one of two processors.
const UNDISTURBED: Duration = Duration::from_millis(100);

/// In turns with all that it is compared with.
pub fn run(turns: usize) -> Result {
    take_turns(turns, ROWS)
}

/// The ledger on disk alone, for more of its turns in the same time.
pub fn run_sqlite(turns: usize) -> Result {
    take_turns(turns, 1)
}

fn take_turns(turns: usize, rows: usize) -> Result {
    let _awake = Awake::keep_if_possible();
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?.block_on(all(turns, rows))
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

async fn all(count: usize, rows: usize) -> Result {
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
    let mut turns: [Vec<Turn>; ROWS] = Default::default();
    for _ in 0..count {
        for ((name, server), turns) in servers.iter().zip(&mut turns).take(rows) {
            let turn = turn(server, &demand, RATE).await?;
            eprintln!("{name}: p99 {:.2} ms, {:?} stolen", turn.p99, turn.stolen);
            turns.push(turn);
        }
    }
    println!("{RATE:.0} requests a second, {count} turns of {SECONDS} s; ms from when one was due to its answer");
    println!(
        "| | p50 | p99: least | median | most | below {AIM} | undisturbed: median | below {AIM} | µs of the processors |"
    );
    println!("|---|---|---|---|---|---|---|---|---|");
    for ((name, _), turns) in servers.iter().zip(&turns).take(rows) {
        let of = |value: fn(&Turn) -> f64| median(turns.iter().map(value).collect());
        let least = turns.iter().map(|turn| turn.p99).fold(f64::INFINITY, f64::min);
        let most = turns.iter().map(|turn| turn.p99).fold(0.0, f64::max);
        let undisturbed: Vec<f64> =
            turns.iter().filter(|turn| turn.stolen <= UNDISTURBED).map(|turn| turn.p99).collect();
        println!(
            "| {name} | {:.2} | {least:.2} | {:.2} | {most:.2} | {} | {} | {} | {:.0} |",
            of(|turn| turn.p50),
            of(|turn| turn.p99),
            below(turns.iter().map(|turn| turn.p99)),
            if undisturbed.is_empty() { "–".into() } else { format!("{:.2}", median(undisturbed.clone())) },
            below(undisturbed.iter().copied()),
            of(|turn| turn.cpu)
        );
    }
    println!(
        "\nundisturbed: turns of which the machine's host kept no more than {UNDISTURBED:?} of the processors' time"
    );
    Ok(())
}

/// How many of them are.
fn below(times: impl ExactSizeIterator<Item = f64>) -> String {
    let of = times.len();
    format!("{} of {of}", times.filter(|time| *time < AIM).count())
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
    /// What the machine's host kept of the processors meanwhile.
    stolen: Duration,
}

async fn turn(server: &Listening, demand: &HeaderMap, rate: f64) -> Result<Turn> {
    let Driven { cpu, stolen, mut times, refused, .. } =
        drive(server, demand, CONNECTIONS, (rate * SECONDS) as usize, Some(rate)).await?;
    assert_eq!(refused, 0, "each payment buys an answer");
    times.sort();
    let [p50, p99] = [50, 99].map(|percent| percentile(&times, percent));
    Ok(Turn { p50, p99, cpu: cpu.as_secs_f64() * 1e6 / times.len() as f64, stolen })
}

/// Of sorted times, in milliseconds.
pub fn percentile(times: &[Duration], percent: usize) -> f64 {
    times[(times.len() - 1) * percent / 100].as_secs_f64() * 1_000.0
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
