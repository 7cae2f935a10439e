//! A shop's process is killed at every point of a payment's life, and started again on what it left.
// The whole matrix is made on both ledgers only.
#![cfg_attr(not(feature = "test-postgres"), allow(dead_code))]

mod case;
mod cost;
mod ledger;
mod matrix;
mod node;
mod points;
mod process;
mod report;
mod scene;
mod server;
mod shoppers;
mod store;

use case::Wrong;
use matrix::{Backend, Matrix, When};
use points::Point;
use server::Flow;
use store::Store;

const FLOWS: [Flow; 5] = [Flow::Authorization, Flow::Upfront, Flow::Deferred, Flow::Spent, Flow::Streamed];

#[test]
#[ignore = "the process that is killed; the other tests start it"]
fn server_process() {
    if let Ok(setup) = std::env::var(server::SETUP) {
        // What it has to say is on the standard error, if RUST_LOG asks for it.
        let filter = tracing_subscriber::EnvFilter::from_default_env();
        tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).init();
        server::run(serde_json::from_str(&setup).unwrap());
    }
}

/// Every place once, in one flow or another.
async fn small_matrix(backend: Backend) {
    let places = matrix::explore(&[backend], &FLOWS, &When::ALL).await;
    let outcome = matrix::run(matrix::some(&places)).await;
    is_flawless(&outcome);
}

fn is_flawless(matrix: &Matrix) {
    let wrong: Vec<_> = matrix.iter().filter(|(_, tally)| tally.wrong != Wrong::default()).collect();
    assert!(wrong.is_empty(), "{wrong:#?}");
    let missed: Vec<_> = matrix.iter().filter(|(_, tally)| tally.kills == 0).map(|(place, _)| place).collect();
    assert!(missed.len() * 20 < matrix.len(), "not reached again: {missed:#?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_payment_survives_every_kill_on_sqlite() {
    small_matrix(Backend::Sqlite).await;
}

#[cfg(feature = "test-postgres")]
#[tokio::test(flavor = "multi_thread")]
async fn a_payment_survives_every_kill_on_postgres() {
    small_matrix(Backend::Postgres).await;
}

/// A matrix that cannot find anything shows nothing.
#[tokio::test(flavor = "multi_thread")]
async fn a_ledger_that_forgets_is_found_out() {
    let stop = Point { name: "response: ready".into(), occurrence: 1 };
    let found = case::run(Flow::Authorization, Some(Store::Nowhere), &[stop]).await;
    let wrong = found.wrong;
    assert_eq!((found.kills, wrong.lost > 0, wrong.unanswered > 0), (1, true, true), "{found:?}");
    // Where work comes first, it is done again.
    let stop = Point { name: "node eth_sendRawTransactionSync: before".into(), occurrence: 1 };
    let found = case::run(Flow::Deferred, Some(Store::Nowhere), &[stop]).await;
    assert_eq!((found.kills, found.wrong.reworked > 0), (1, true), "{found:?}");
}

/// Every point, in every flow, on every ledger; writes down what came of it.
#[cfg(feature = "test-postgres")]
#[tokio::test(flavor = "multi_thread")]
#[ignore = "takes minutes; CI kills at every point of a first life once"]
async fn full_matrix() {
    let backends = [Backend::Sqlite, Backend::Postgres];
    let mut costs = std::collections::BTreeMap::new();
    for flow in FLOWS {
        for backend in backends {
            costs.insert((flow, backend), cost::cost(backend, flow).await);
        }
    }
    let places = matrix::explore(&backends, &FLOWS, &When::ALL).await;
    let outcome = matrix::run(matrix::all(&places)).await;
    let document = report::document(&outcome, &costs);
    std::fs::write(report::PATH, &document).unwrap();
    eprintln!("{document}");
    is_flawless(&outcome);
    assert!(outcome.values().map(|tally| tally.kills).sum::<usize>() >= 300);
}

/// A tool: whoever asks for a case sees what comes of it.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs CRASH_FLOW and CRASH_POINTS"]
async fn one_case() {
    let (Ok(flow), Ok(points)) = (std::env::var("CRASH_FLOW"), std::env::var("CRASH_POINTS")) else { return };
    let flow: Flow = serde_json::from_value(flow.into()).unwrap();
    let stops: Vec<_> = points
        .split(',')
        .map(|point| {
            let (name, occurrence) = point.trim().rsplit_once('#').unwrap();
            Point { name: name.to_owned(), occurrence: occurrence.parse().unwrap() }
        })
        .collect();
    #[cfg(feature = "test-postgres")]
    let backend = if std::env::var_os("CRASH_LEDGER").is_some() { Backend::Postgres } else { Backend::Sqlite };
    #[cfg(not(feature = "test-postgres"))]
    let backend = Backend::Sqlite;
    let report = case::run(flow, backend.store(), &stops).await;
    assert_eq!((report.kills, report.wrong), (stops.len(), Wrong::default()), "{report:#?}");
}
