//! All points of all flows on all ledgers: found by runs that stop nowhere, then killed at, one by one.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use tokio::{runtime::Handle, sync::Semaphore, task::JoinSet};

use super::{
    case::{self, PAYMENTS, Report, Wrong},
    points::Point,
    scene::{Ended, Life, Scene},
    server::Flow,
    store::Store,
};

/// How many cases run at a time; most of a case is waiting for blocks.
const AT_A_TIME: usize = 12;

/// What a process may keep its books in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Backend {
    Sqlite,
    #[cfg(feature = "test-postgres")]
    Postgres,
}

impl Backend {
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Sqlite => "SQLite",
            #[cfg(feature = "test-postgres")]
            Self::Postgres => "PostgreSQL",
        }
    }

    /// A new one; `None` for a file in the scene's own directory.
    pub(crate) fn store(self) -> Option<Store> {
        match self {
            Self::Sqlite => None,
            #[cfg(feature = "test-postgres")]
            Self::Postgres => {
                let server = support::postgres::Server::shared();
                Some(Store::Postgres { url: server.url().to_owned(), schema: server.new_schema() })
            }
        }
    }
}

/// Which life of the process is to be ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum When {
    /// The one that the payments are first presented to.
    First,
    /// The one after a kill with a transaction in the journal that no node has.
    Unsent,
    /// The one after a kill with a transaction in a block that the ledger does not know of.
    Unseen,
}

/// How often a place is tried once more that was not passed even once.
const AGAIN: u32 = 3;

impl When {
    pub(crate) const ALL: [Self; 3] = [Self::First, Self::Unsent, Self::Unseen];

    /// Where the lives before it end.
    fn stops(self) -> Vec<Point> {
        let name = match self {
            Self::First => return Vec::new(),
            Self::Unsent => "ledger submit: after",
            Self::Unseen => "node eth_sendRawTransactionSync: after",
        };
        vec![Point { name: name.into(), occurrence: 1 }]
    }

    pub(crate) const fn title(self) -> &'static str {
        match self {
            Self::First => "first life",
            Self::Unsent => "second life, after a kill with a journalled transaction that was not sent",
            Self::Unseen => "second life, after a kill with a transaction in a block that the ledger does not know of",
        }
    }
}

/// One row of the matrix, as far as one ledger goes.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Place {
    pub(crate) backend: Backend,
    pub(crate) flow: Flow,
    pub(crate) when: When,
    /// Places in the order they were first passed.
    pub(crate) order: usize,
    pub(crate) name: String,
}

/// What came of a place.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    /// Kills at this place, without those that led there.
    pub(crate) kills: usize,
    pub(crate) wrong: Wrong,
    pub(crate) told: usize,
    pub(crate) dead: usize,
    /// The process came to its end without passing there again.
    pub(crate) missed: usize,
}

pub(crate) type Matrix = BTreeMap<Place, Tally>;

/// All places, and how often each was passed.
pub(crate) async fn explore(backends: &[Backend], flows: &[Flow], times: &[When]) -> BTreeMap<Place, u32> {
    let mut places = BTreeMap::new();
    for &backend in backends {
        for &flow in flows {
            // There, the first kill is what gives payers their chance.
            for &when in times.iter().filter(|when| flow != Flow::Spent || **when == When::First) {
                let passed = course(backend, flow, when).await;
                let mut order: Vec<&String> = Vec::new();
                let mut counts: BTreeMap<&String, u32> = BTreeMap::new();
                for name in &passed {
                    *counts.entry(name).or_default() += 1;
                    if counts[name] == 1 {
                        order.push(name);
                    }
                }
                places.extend(
                    order.iter().enumerate().map(|(order, name)| {
                        (Place { backend, flow, when, order, name: (*name).clone() }, counts[name])
                    }),
                );
            }
        }
    }
    places
}

/// What a process passes in this life if nobody kills it.
async fn course(backend: Backend, flow: Flow, when: When) -> Vec<String> {
    let mut scene = Scene::new(flow, backend.store()).await;
    let stops = when.stops();
    let mut process = scene.open(PAYMENTS, stops.first().cloned()).await;
    for next in 1..=stops.len() {
        let life = Life { number: next as u64 - 1, is_last: false };
        assert_eq!(scene.live(&mut process, life).await, Ended::Stopped, "{flow:?} {when:?}");
        scene.kill(process).await;
        process = scene.reopen(stops.get(next).cloned()).await;
    }
    let life = Life { number: stops.len() as u64, is_last: true };
    assert_eq!(scene.live(&mut process, life).await, Ended::Quiet, "{backend:?} {flow:?} {when:?}");
    let passed = process.passed();
    scene.kill(process).await;
    assert!(!passed.is_empty());
    passed
}

/// Every place at the middle one of the times it is passed, and those of a first life in the flows proper at the first one too.
pub(crate) fn all(places: &BTreeMap<Place, u32>) -> Vec<(Place, u32)> {
    let times = |place: &Place, count: &u32| {
        let is_proper = matches!(place.flow, Flow::Authorization | Flow::Upfront | Flow::Deferred);
        let first = (is_proper && place.when == When::First).then_some(1);
        BTreeSet::from_iter(first.into_iter().chain([count.div_ceil(2)]))
    };
    let each = places.iter().map(|(place, count)| times(place, count).into_iter().map(|time| (place.clone(), time)));
    each.flatten().collect()
}

/// Every place of the first life once on every ledger, in one flow or another, and some of the second ones.
pub(crate) fn some(places: &BTreeMap<Place, u32>) -> Vec<(Place, u32)> {
    let mut by_name: BTreeMap<_, Vec<_>> = BTreeMap::new();
    for (place, count) in places {
        by_name.entry((place.backend, place.when, &place.name)).or_default().push((place, count));
    }
    let mut chosen = Vec::new();
    for (index, ((_, when, _), same)) in by_name.into_iter().enumerate() {
        if when == When::First || index.is_multiple_of(5) {
            let (place, count) = same[index % same.len()];
            chosen.push((place.clone(), count.div_ceil(2)));
        }
    }
    chosen
}

/// Kills at all of them, and judges what comes of it.
pub(crate) async fn run(kills: Vec<(Place, u32)>) -> Matrix {
    let places = Arc::new(Semaphore::new(AT_A_TIME));
    let (mut running, mut matrix, total) = (JoinSet::new(), Matrix::new(), kills.len());
    for (place, occurrence) in kills {
        let turn = places.clone().acquire_owned().await.expect("it is never closed");
        let runtime = Handle::current();
        running.spawn_blocking(move || {
            let _turn = turn;
            let report = runtime.block_on(kill(&place, occurrence));
            (place, occurrence, report)
        });
        while let Some(done) = running.try_join_next() {
            count(&mut matrix, done.expect("no case panics"), total);
        }
    }
    while let Some(done) = running.join_next().await {
        count(&mut matrix, done.expect("no case panics"), total);
    }
    matrix
}

async fn kill(place: &Place, occurrence: u32) -> Report {
    let before = place.when.stops();
    let (mut occurrence, mut again) = (occurrence, AGAIN);
    loop {
        let stop = Point { name: place.name.clone(), occurrence };
        let stops: Vec<_> = before.iter().cloned().chain([stop]).collect();
        let report = case::run(place.flow, place.backend.store(), &stops).await;
        let is_done = report.kills == stops.len() || report.wrong != Wrong::default();
        if is_done || (occurrence == 1 && again == 0) {
            return report;
        }
        // No two runs are the same: what happens when nothing else is to be done happens now more often, now less.
        match occurrence {
            1 => again -= 1,
            _ => occurrence /= 2,
        }
    }
}

fn count(matrix: &mut Matrix, (place, occurrence, report): (Place, u32, Report), total: usize) {
    let wanted = place.when.stops().len() + 1;
    let (backend, flow, when) = (place.backend.name(), place.flow.name(), place.when);
    for detail in &report.details {
        eprintln!("{backend}, {flow}, {when:?}, {} #{occurrence}: {detail}", place.name);
    }
    let tally = matrix.entry(place).or_default();
    tally.kills += usize::from(report.kills == wanted);
    tally.missed += usize::from(report.kills < wanted);
    tally.wrong.add(report.wrong);
    tally.told += report.told;
    tally.dead += report.dead;
    let done: usize = matrix.values().map(|tally| tally.kills + tally.missed).sum();
    if done.is_multiple_of(100) {
        eprintln!("{done} of {total} cases");
    }
}
