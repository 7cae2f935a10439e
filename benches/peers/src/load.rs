//! Paid requests over loopback: client and server share this machine.

use std::{sync::Arc, time::Duration};

use axum::routing::post;
use bytes::Bytes;
use http::HeaderMap;
use tower_x402::ledger::SqliteLedger;

use crate::{
    Result,
    at_once::Checks,
    awake::Awake,
    generator::{self, Answers},
    hot_path,
    listening::Listening,
    own::{processor_time, stolen_time},
    paced,
    payments::{Mint, Signed, keys},
    sellers,
};

pub const CONNECTIONS: usize = 256;
const PAYMENTS: usize = 6_000;
const TURNS: usize = 3;
/// Of express, which takes its time.
const FEW: usize = 1_000;

pub fn run() -> Result {
    let _awake = Awake::keep_if_possible();
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
    paced::half(rates[0] / 2.0).await
}

pub fn median(mut rates: Vec<f64>) -> f64 {
    rates.sort_by(f64::total_cmp);
    rates[rates.len() / 2]
}

/// As many a second as go, from all connections.
async fn throughput(server: &Listening, payments: usize) -> Result<f64> {
    Ok(drive(server, &server.demand().await?, CONNECTIONS, payments, None).await?.rate())
}

/// How it went.
pub struct Driven {
    /// What the process had of the processors meanwhile.
    pub cpu: Duration,
    /// What the seller had of them, without the client that shares its process.
    pub seller: Duration,
    /// What the machine's host withheld from all of them meanwhile.
    pub stolen: Duration,
    /// From the first request to the last answer.
    pub took: Duration,
    /// How long each was answered after it was due.
    pub times: Vec<Duration>,
    /// How many got no 200.
    pub refused: usize,
}

impl Driven {
    /// Answers a second; all must have got one.
    pub fn rate(&self) -> f64 {
        assert_eq!(self.refused, 0, "each payment buys an answer");
        self.times.len() as f64 / self.took.as_secs_f64()
    }

    /// What the seller had of the processors for each request, in microseconds.
    pub fn seller_each(&self) -> f64 {
        self.seller.as_secs_f64() * 1e6 / self.times.len() as f64
    }
}

/// Sends so many payments for what is demanded over so many connections, as fast as they are answered or so many a second, at even
/// distances.
pub async fn drive(
    server: &Listening,
    demand: &HeaderMap,
    connections: usize,
    count: usize,
    rate: Option<f64>,
) -> Result<Driven> {
    let mut mint = Mint::asked(demand, keys(200));
    let requests: Vec<_> = (0..count).map(|_| generator::request(&mint.header(Signed::ByKey))).collect();
    send(server, connections, requests, rate).await
}

/// Sends these requests over so many connections, as fast as they are answered or so many a second, at even distances.
pub async fn send(server: &Listening, connections: usize, requests: Vec<Vec<u8>>, rate: Option<f64>) -> Result<Driven> {
    let (address, every) = (server.address, rate.map(|rate| Duration::from_secs_f64(1.0 / rate)));
    let before = (processor_time("self"), server.elsewhere(), stolen_time());
    let send = move || generator::send(address, connections, &requests, every);
    let Answers { times, refused, took, cpu: client } = tokio::task::spawn_blocking(send).await??;
    let cpu = processor_time("self").saturating_sub(before.0);
    let seller = match (before.1, server.elsewhere()) {
        (Some(before), Some(after)) => after.saturating_sub(before),
        _ => cpu.saturating_sub(client),
    };
    Ok(Driven { cpu, seller, stolen: stolen_time().saturating_sub(before.2), took, times, refused })
}
