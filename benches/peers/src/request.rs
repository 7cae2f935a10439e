//! What one request costs, on one thread.

use std::{hint::black_box, time::Duration};

use axum::{Router, body::Body, routing::post};
use bytes::Bytes;
use http::{HeaderValue, Request, StatusCode};
use tokio::runtime::Runtime;

use crate::{
    Result,
    at_once::Checks,
    hot_path::{self, VoucherMint},
    payments::{Mint, Signed},
    sellers,
    thread_time::ThreadTime,
};

const RUNS: usize = 300;
/// So few that they are in the processor's caches when they are worked on, as a request is that was just received.
const AT_A_TIME: usize = 100;
/// The first ones of a turn are not timed: the sellers take turns, and what was there before is in the caches.
const WARM_UP: usize = 20;

struct Line {
    app: Router,
    /// Makes the next request.
    next: Box<dyn FnMut() -> Request<Body>>,
    status: StatusCode,
    times: Vec<Duration>,
}

impl Line {
    fn run(&mut self, runtime: &Runtime) {
        let mut requests = (0..WARM_UP + AT_A_TIME).map(|_| (self.next)());
        let (first, then): (Vec<_>, Vec<_>) = (requests.by_ref().take(WARM_UP).collect(), requests.collect());
        let (mut app, status) = (self.app.clone(), self.status);
        // A task, as a server's connection is one: what the runtime itself waits for costs two system calls at every wait.
        let connection = runtime.spawn(async move {
            answer_all(&mut app, first, status).await;
            let started = ThreadTime::now();
            answer_all(&mut app, then, status).await;
            started.elapsed()
        });
        self.times.push(runtime.block_on(connection).expect("nobody panics") / AT_A_TIME as u32);
    }

    /// The least and the median, in microseconds.
    fn times(&mut self) -> [f64; 2] {
        self.times.sort();
        [0, self.times.len() / 2].map(|place| self.times[place].as_nanos() as f64 / 1_000.0)
    }
}

async fn answer_all(app: &mut Router, requests: Vec<Request<Body>>, status: StatusCode) {
    for request in requests {
        let response = hot_path::answer(app, request).await;
        assert_eq!(response.status(), status);
        black_box(response);
    }
}

pub fn run() -> Result {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let handler = post(async |_: Bytes| hot_path::WORK);
    let unpaid_line = |app, status| Line { app, next: Box::new(hot_path::unpaid), status, times: Vec::new() };
    let paid_line = |app, mut header: Box<dyn FnMut() -> HeaderValue>| {
        let next = Box::new(move || hot_path::paid(&header()));
        Line { app, next, status: StatusCode::OK, times: Vec::new() }
    };
    let mut rows: Vec<(&str, Vec<Line>)> = Vec::new();
    let unpaid = sellers::all(&handler, Checks::Nothing)?;
    rows.push(("bare handler", vec![unpaid_line(hot_path::bare(), StatusCode::OK)]));
    rows.push(("unpaid: 402", unpaid.map(|app| unpaid_line(app, StatusCode::PAYMENT_REQUIRED)).into()));
    for (name, checks, signed) in [
        ("paid, the facilitator answers at once, nobody looks at the signature", Checks::Nothing, Signed::ByWallet),
        ("the same, the signature checked once", Checks::Signature, Signed::ByKey),
    ] {
        let mut lines = Vec::new();
        for (index, mut app) in sellers::all(&handler, checks)?.into_iter().enumerate() {
            // The others look at nothing themselves; what they are sent may as well be signed.
            let signed = if index == 0 { signed } else { Signed::ByKey };
            let mut mint = runtime.block_on(Mint::of(&mut app, 50));
            lines.push(paid_line(app, Box::new(move || mint.header(signed))));
        }
        rows.push((name, lines));
    }
    // No other Rust server takes vouchers.
    let mut app = runtime.block_on(async { sellers::ours_by_voucher(&handler) })?;
    let mut mint = runtime.block_on(VoucherMint::of(&mut app));
    rows.push(("paid by voucher", vec![paid_line(app, Box::new(move || mint.header()))]));
    for _ in 0..RUNS {
        rows.iter_mut().flat_map(|(_, lines)| lines).for_each(|line| line.run(&runtime));
    }
    println!("| µs: least, median of {RUNS} | {} |\n|---|---|---|---|", sellers::NAMES.join(" | "));
    for (name, lines) in &mut rows {
        let times: Vec<[f64; 2]> = lines.iter_mut().map(Line::times).collect();
        let cell = |[least, median]: &[f64; 2]| format!("{least:.2}, {median:.2} ({:.1} ×)", least / times[0][0]);
        let cells: Vec<String> = times.iter().map(cell).collect();
        println!("| {name} | {} |", cells.join(" | "));
    }
    Ok(())
}
