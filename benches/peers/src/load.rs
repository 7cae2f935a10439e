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
use http::{HeaderValue, Request, StatusCode};
use http_body_util::{BodyExt as _, Full};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use tokio::net::{TcpListener, TcpStream};
use tower_x402::ledger::SqliteLedger;

use crate::{
    Result,
    at_once::Checks,
    hot_path,
    payments::{Mint, Signed},
    sellers,
};

const CONNECTIONS: usize = 256;
const PAYMENTS: usize = 6_000;
const TURNS: usize = 3;

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
            rates.push(throughput(app).await?.0);
        }
        fsyncs = ledger.commits() as f64 / PAYMENTS as f64;
    }
    let rates = rates.map(|mut rates| {
        rates.sort_by(f64::total_cmp);
        rates[rates.len() / 2]
    });
    let names = ["tower-x402, SQLite", "tower-x402, in memory", sellers::NAMES[1], sellers::NAMES[2]];
    println!("paid requests a second, {CONNECTIONS} connections, median of {TURNS} runs of {PAYMENTS}");
    println!("| | a second | to the better peer |\n|---|---|---|");
    let better = rates[2].max(rates[3]);
    for (name, rate) in names.iter().zip(rates) {
        println!("| {name} | {rate:.0} | {:.2} × |", rate / better);
    }
    println!("\ncommits of SQLite, an fsync each: {fsyncs:.3} per payment");
    let ledger = Arc::new(SqliteLedger::open(directory.path().join("paced.sqlite")).await?);
    let app = sellers::ours_with(&handler, hot_path::AtOnce::over(ledger))?;
    let (rate, mut times) = at_rate(app, rates[0] / 2.0).await?;
    times.sort();
    let percentile = |percent: usize| times[(times.len() - 1) * percent / 100].as_secs_f64() * 1_000.0;
    println!(
        "tower-x402, SQLite, at {rate:.0} a second: p50 {:.2} ms, p99 {:.2} ms, longest {:.2} ms",
        percentile(50),
        percentile(99),
        percentile(100)
    );
    Ok(())
}

/// As many as go, from all connections.
async fn throughput(app: Router) -> Result<(f64, Vec<Duration>)> {
    drive(app, CONNECTIONS, |_, _| None).await
}

/// So many a second, at even distances; the time counts from when each was due.
async fn at_rate(app: Router, rate: f64) -> Result<(f64, Vec<Duration>)> {
    drive(app, CONNECTIONS, move |start, n| Some(start + Duration::from_secs_f64(n as f64 / rate))).await
}

async fn drive(
    mut app: Router,
    connections: usize,
    due: impl Fn(Instant, usize) -> Option<Instant> + Copy + Send + Sync + 'static,
) -> Result<(f64, Vec<Duration>)> {
    let mut mint = Mint::of(&mut app, 200).await;
    let payments: Arc<[HeaderValue]> = (0..PAYMENTS).map(|_| mint.header(Signed::ByKey)).collect();
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?;
    let server = tokio::spawn(async move { axum::serve(listener, app).await });
    let mut senders = Vec::new();
    for _ in 0..connections {
        let stream = TcpStream::connect(address).await?;
        stream.set_nodelay(true)?;
        let (sender, connection) = http1::handshake::<_, Full<Bytes>>(TokioIo::new(stream)).await?;
        tokio::spawn(connection);
        senders.push(sender);
    }
    let (next, times) = (Arc::new(AtomicUsize::new(0)), Arc::new(Mutex::new(Vec::with_capacity(PAYMENTS))));
    let start = Instant::now();
    let mut tasks = tokio::task::JoinSet::new();
    for mut sender in senders {
        let (next, times, payments) = (next.clone(), times.clone(), payments.clone());
        tasks.spawn(async move {
            loop {
                let n = next.fetch_add(1, Ordering::Relaxed);
                let Some(payment) = payments.get(n) else { return };
                let began = match due(start, n) {
                    Some(due) => {
                        tokio::time::sleep_until(due.into()).await;
                        due
                    }
                    None => Instant::now(),
                };
                let (parts, _) = hot_path::paid(payment).into_parts();
                let mut request = Request::from_parts(parts, Full::from(hot_path::TASK));
                request.headers_mut().insert("host", HeaderValue::from_static("api.example"));
                let response = sender.send_request(request).await.expect("an answer");
                assert_eq!(response.status(), StatusCode::OK);
                response.into_body().collect().await.expect("a body");
                times.lock().expect("nobody panics").push(began.elapsed());
            }
        });
    }
    while let Some(done) = tasks.join_next().await {
        done?;
    }
    let rate = PAYMENTS as f64 / start.elapsed().as_secs_f64();
    server.abort();
    let times = std::mem::take(&mut *times.lock().expect("nobody panics"));
    Ok((rate, times))
}
