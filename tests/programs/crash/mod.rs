//! A seller's process is killed at every point of a payment's life, and started again on its ledger: with an on-chain facilitator in
//! the process, and with a remote one. With payment channels (`channels`) the buyer's process is killed, too.
// The full matrix needs both ledgers.
#![cfg_attr(not(feature = "test-postgres"), allow(dead_code))]

mod buyers;
mod case;
mod channels;
mod cost;
mod facilitator_server;
mod ledger;
mod matrix;
mod node;
mod points;
mod process;
mod relay;
mod report;
mod scene;
mod server;
mod store;

use case::Wrong;
use matrix::{Backend, Course, Matrix, Place, Tally, When};
use points::Point;
use process::Next;
use server::{Flow, Via};
use store::Store;

const FLOWS: [Flow; 5] = [Flow::Authorization, Flow::Upfront, Flow::Deferred, Flow::Spent, Flow::Streamed];

#[test]
#[ignore = "the process that is killed; the other tests start it"]
fn server_process() {
    if let Ok(setup) = std::env::var(server::SETUP) {
        // Its log goes to the standard error, if RUST_LOG is set.
        let filter = tracing_subscriber::EnvFilter::from_default_env();
        tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).init();
        server::run(serde_json::from_str(&setup).unwrap());
    }
}

/// The flows that are run with a remote facilitator.
const REMOTE_FLOWS: [Flow; 3] = [Flow::Authorization, Flow::Upfront, Flow::Deferred];

/// The small matrix: kills at every place once, in one flow or another.
async fn small_matrix(courses: Vec<Course>) {
    let places = matrix::explore(courses).await;
    let outcome = matrix::run(matrix::some(&places)).await;
    for ((via, flow, backend), waited) in matrix::longest_waits(&outcome) {
        let row = [via.name(), flow.name(), backend.name()].join(", ");
        eprintln!("{row}: the longest wait for an answer after a kill was {:.1} s", waited.as_secs_f64());
    }
    is_flawless(&outcome);
}

/// The same with a remote facilitator.
async fn small_remote_matrix(backend: Backend) {
    let course = |via, flow, when| Course { via, backend, flow, when };
    small_matrix(vec![
        course(Via::Confirmed, Flow::Authorization, When::First),
        course(Via::Confirmed, Flow::Upfront, When::Unseen),
        course(Via::Remote, Flow::Upfront, When::First),
        course(Via::Remote, Flow::Authorization, When::Unsent),
        course(Via::Confirmed, Flow::Deferred, When::First),
        course(Via::Remote, Flow::Authorization, When::Never),
        course(Via::Confirmed, Flow::Upfront, When::Never),
    ])
    .await;
}

/// Checks that nothing went wrong, and that the process was killed at every place as often as planned, except at places that are
/// reached by chance.
fn is_flawless(matrix: &Matrix) {
    let wrong: Vec<_> = matrix.iter().filter(|(_, tally)| tally.wrong != Wrong::default()).collect();
    assert!(wrong.is_empty(), "{wrong:#?}");
    let missed = matrix.iter().filter(|(place, tally)| tally.missed > 0 && !place.by_chance);
    let missed: Vec<_> = missed.map(|(place, _)| place).collect();
    assert!(missed.is_empty(), "not reached again: {missed:#?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_payment_survives_every_kill_on_sqlite() {
    small_matrix(matrix::courses(&[Via::Chain], &[Backend::Sqlite], &FLOWS, &When::KILLS)).await;
}

/// What is charged is decided in the step that ends the work, and settled once by whichever process comes next.
#[tokio::test(flavor = "multi_thread")]
async fn a_permit_survives_kills_around_its_charge_and_its_settlement() {
    for name in [
        "handler: during",
        "ledger fulfil Produce: before",
        "ledger fulfil Produce: after",
        "node eth_sendRawTransactionSync: before",
        "node eth_sendRawTransactionSync: after",
        "response: ready",
    ] {
        let stop = Point { name: name.into(), occurrence: 2 };
        let found = case::run(Via::Chain, Flow::UpTo, None, &[stop], Next::Restarted).await;
        assert_eq!((found.kills, found.wrong), (1, Wrong::default()), "{name}: {found:?}");
    }
}

#[cfg(feature = "test-postgres")]
#[tokio::test(flavor = "multi_thread")]
async fn a_payment_survives_every_kill_on_postgres() {
    small_matrix(matrix::courses(&[Via::Chain], &[Backend::Postgres], &FLOWS, &When::KILLS)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_payment_with_a_remote_facilitator_survives_every_kill_on_sqlite() {
    small_remote_matrix(Backend::Sqlite).await;
}

#[cfg(feature = "test-postgres")]
#[tokio::test(flavor = "multi_thread")]
async fn a_payment_with_a_remote_facilitator_survives_every_kill_on_postgres() {
    small_remote_matrix(Backend::Postgres).await;
}

/// A control: the matrix finds the losses of a ledger in memory.
#[tokio::test(flavor = "multi_thread")]
async fn matrix_detects_a_ledger_that_loses_its_records() {
    let stop = Point { name: "response: ready".into(), occurrence: 1 };
    let found = case::run(Via::Chain, Flow::Authorization, Some(Store::Nowhere), &[stop], Next::Restarted).await;
    let wrong = found.wrong;
    assert_eq!((found.kills, wrong.lost > 0, wrong.unanswered > 0), (1, true, true), "{found:?}");
    // In the flow `authorization` the work is done again.
    let stop = Point { name: "node eth_sendRawTransactionSync: before".into(), occurrence: 1 };
    let found = case::run(Via::Chain, Flow::Deferred, Some(Store::Nowhere), &[stop], Next::Restarted).await;
    assert_eq!((found.kills, found.wrong.reworked > 0), (1, true), "{found:?}");
    // The remote facilitator settled a payment that the ledger has lost.
    let stop = Point { name: "facilitator settle: begun".into(), occurrence: 1 };
    let found = case::run(Via::Remote, Flow::Authorization, Some(Store::Nowhere), &[stop], Next::Restarted).await;
    assert_eq!((found.kills, found.wrong.lost > 0), (1, true), "{found:?}");
}

const COURSE: Course =
    Course { via: Via::Chain, backend: Backend::Sqlite, flow: Flow::Authorization, when: When::First };

#[test]
fn place_that_one_of_two_runs_passed_counts_as_reached_by_chance() {
    let runs = [["a", "b", "a", "a"], ["a", "c", "c", "a"]].map(|run| run.map(str::to_owned).to_vec());
    let place = |order, name: &str, by_chance| Place { course: COURSE, order, name: name.into(), by_chance };
    let expected = [(place(0, "a", false), 2), (place(1, "b", true), 1), (place(2, "c", true), 2)];
    assert_eq!(matrix::places(COURSE, &runs), expected);
}

#[test]
fn small_matrix_prefers_courses_that_surely_reach_a_place() {
    let flows = [Flow::Authorization, Flow::Upfront, Flow::Deferred];
    for sure in flows {
        let place =
            |flow| Place { course: Course { flow, ..COURSE }, order: 0, name: "a".into(), by_chance: flow != sure };
        let chosen = matrix::some(&flows.map(|flow| (place(flow), 1)).into());
        assert_eq!(chosen, [(place(sure), 1)]);
    }
}

#[test]
#[should_panic(expected = "not reached again")]
fn place_that_was_missed_fails_the_matrix() {
    is_flawless(&one_row(false, Tally { kills: 99, missed: 1, ..Tally::default() }));
}

#[test]
fn place_reached_by_chance_may_be_missed() {
    let matrix = one_row(true, Tally { missed: 1, ..Tally::default() });
    is_flawless(&matrix);
    let row = |text: String, start: &str| text.lines().find(|line| line.starts_with(start)).unwrap().to_owned();
    assert!(row(report::document(&matrix, &Default::default()), "| all").contains("| 1 | 0 | 0 | 1 | 0 |"));
    assert!(row(report::places(&matrix), "\"on-chain").contains("by chance"));
}

#[test]
#[should_panic(expected = "open: 1")]
fn last_life_that_does_not_finish_fails_the_matrix() {
    is_flawless(&one_row(false, Tally { kills: 1, wrong: Wrong { open: 1, ..Wrong::default() }, ..Tally::default() }));
}

#[test]
#[should_panic(expected = "lost: 1")]
fn violation_at_a_place_reached_by_chance_fails_the_matrix() {
    is_flawless(&one_row(true, Tally { kills: 1, wrong: Wrong { lost: 1, ..Wrong::default() }, ..Tally::default() }));
}

fn one_row(by_chance: bool, tally: Tally) -> Matrix {
    Matrix::from([(Place { course: COURSE, order: 0, name: "ledger reserve: before".into(), by_chance }, tally)])
}

/// The full matrix: every point, in every flow, on every ledger. Writes the results to `docs/`.
#[cfg(feature = "test-postgres")]
#[tokio::test(flavor = "multi_thread")]
#[ignore = "takes 20 to 30 minutes; CI kills at every point of a first life once"]
async fn full_matrix() {
    let backends = [Backend::Sqlite, Backend::Postgres];
    let mut costs = std::collections::BTreeMap::new();
    for course in matrix::courses(&[Via::Chain], &backends, &FLOWS, &[When::First]) {
        let Course { via, backend, flow, .. } = course;
        costs.insert((via, flow, backend), cost::cost(via, backend, flow).await);
    }
    let mut courses = matrix::courses(&[Via::Chain], &backends, &FLOWS, &When::KILLS);
    let remote = [Via::Remote, Via::Confirmed];
    courses.extend(matrix::courses(&remote, &backends, &REMOTE_FLOWS, &When::KILLS));
    courses.extend(matrix::courses(&remote, &backends, &REMOTE_FLOWS, &[When::Never]));
    let places = matrix::explore(courses).await;
    let outcome = matrix::run(matrix::all(&places)).await;
    let document = report::document(&outcome, &costs);
    // The other sections are written by other tests.
    let page = std::fs::read_to_string(report::PATH).unwrap();
    let others = [report::TAKEOVER, report::CHANNELS].into_iter().filter_map(|head| page.find(head)).min();
    std::fs::write(report::PATH, format!("{document}{}", others.map_or("", |start| &page[start..]))).unwrap();
    std::fs::write(report::PLACES, report::places(&outcome)).unwrap();
    eprintln!("{document}");
    is_flawless(&outcome);
    let kills = |is_counted: fn(Via) -> bool| {
        let counted =
            outcome.iter().filter(|(place, _)| is_counted(place.course.via) && place.course.when != When::Never);
        counted.map(|(_, tally)| tally.kills).sum::<usize>()
    };
    assert!(kills(|via| via == Via::Chain) >= 300 && kills(|via| via != Via::Chain) >= 200);
}

/// The process is killed at every point of a first life, and another process with the same ledger takes over. Writes the results to `docs/`.
#[cfg(feature = "test-postgres")]
#[tokio::test(flavor = "multi_thread")]
#[ignore = "takes many minutes; of two processes with one ledger, CI kills one in other tests"]
async fn full_takeover_matrix() {
    let mut courses = matrix::courses(&[Via::Chain], &[Backend::Postgres], &FLOWS, &[When::TakenOver]);
    let remote = [Via::Remote, Via::Confirmed];
    courses.extend(matrix::courses(&remote, &[Backend::Postgres], &REMOTE_FLOWS, &[When::TakenOver]));
    let outcome = matrix::run(matrix::all(&matrix::explore(courses).await)).await;
    let section = report::takeover(&outcome);
    let page = std::fs::read_to_string(report::PATH).unwrap();
    let (before, after) = page.split_at(page.find(report::CHANNELS).unwrap_or(page.len()));
    let before = before.split(report::TAKEOVER).next().unwrap_or_default();
    std::fs::write(report::PATH, format!("{before}{section}{after}")).unwrap();
    eprintln!("{section}");
    is_flawless(&outcome);
}

/// A tool that runs one case and prints its result.
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
    let via = std::env::var("CRASH_VIA").map_or(Via::Chain, |via| serde_json::from_value(via.into()).unwrap());
    let report = case::run(via, flow, backend.store(), &stops, Next::Restarted).await;
    assert_eq!((report.kills, report.wrong), (stops.len(), Wrong::default()), "{report:#?}");
}
