//! What one request costs, on one thread.

use std::{hint::black_box, time::Duration};

use axum::{Router, body::Body, routing::post};
use bytes::Bytes;
use http::{Request, StatusCode};
use tokio::runtime::Runtime;

use crate::{
    Result,
    at_once::Checks,
    hot_path,
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
    /// `None` for requests without a payment.
    mint: Option<(Mint, Signed)>,
    status: StatusCode,
    times: Vec<Duration>,
}

impl Line {
    fn run(&mut self, runtime: &Runtime) {
        let mut requests = (0..WARM_UP + AT_A_TIME).map(|_| match &mut self.mint {
            Some((mint, signed)) => hot_path::paid(&mint.header(*signed)),
            None => hot_path::unpaid(),
        });
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
    let line = |app, mint, status| Line { app, mint, status, times: Vec::new() };
    let mut rows: Vec<(&str, Vec<Line>)> = Vec::new();
    let unpaid = sellers::all(&handler, Checks::Nothing)?;
    rows.push(("bare handler", vec![line(hot_path::bare(), None, StatusCode::OK)]));
    rows.push(("unpaid: 402", unpaid.map(|app| line(app, None, StatusCode::PAYMENT_REQUIRED)).into()));
    for (name, checks, signed) in [
        ("paid, the facilitator answers at once, nobody looks at the signature", Checks::Nothing, Signed::ByWallet),
        ("the same, the signature checked once", Checks::Signature, Signed::ByKey),
    ] {
        let mut lines = Vec::new();
        for (index, mut app) in sellers::all(&handler, checks)?.into_iter().enumerate() {
            // The others look at nothing themselves; what they are sent may as well be signed.
            let signed = if index == 0 { signed } else { Signed::ByKey };
            let mint = runtime.block_on(Mint::of(&mut app, 50));
            lines.push(line(app, Some((mint, signed)), StatusCode::OK));
        }
        rows.push((name, lines));
    }
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
