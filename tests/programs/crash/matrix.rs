//! All points of all flows on all ledgers. Runs without a kill find the points; then the process is killed at each of them.

use std::{
    collections::{BTreeMap, BTreeSet},
    future::Future,
    sync::Arc,
    time::Duration,
};

use tokio::{runtime::Handle, sync::Semaphore, task::JoinSet};

use super::{
    case::{self, PAYMENTS, Report, Wrong},
    facilitator_server::Cut,
    points::Point,
    process::Next,
    scene::{Ended, Scene},
    server::{Flow, Via},
    store::Store,
};

/// The number of cases that run at a time; a case mostly waits for blocks.
const AT_A_TIME: usize = 16;

/// The ledgers that a process may use.
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

    /// Creates a new store; `None` for a file in the scene's own directory.
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

/// The life of the process that is killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum When {
    /// The one to which the payments are first presented.
    First,
    /// The one after a kill with a recorded settlement that was not sent: a journaled transaction, or a payment that was being delegated.
    Unsent,
    /// The one after a kill with a settlement that the ledger does not have: in a block, or in the facilitator's answer.
    Unseen,
    /// None: the connection to the facilitator is cut.
    Never,
    /// The one to which the payments are first presented. Another process takes over.
    TakenOver,
}

/// The number of further tries at a place that was not reached.
pub(crate) const AGAIN: u32 = 8;

impl When {
    pub(crate) const KILLS: [Self; 3] = [Self::First, Self::Unsent, Self::Unseen];

    /// The points at which the lives before it end.
    fn stops(self, via: Via) -> Vec<Point> {
        let name = match (self, via) {
            (Self::First | Self::Never | Self::TakenOver, _) => return Vec::new(),
            (Self::Unsent, Via::Chain) => "ledger submit: after",
            (Self::Unseen, Via::Chain) => "node eth_sendRawTransactionSync: after",
            (Self::Unsent, Via::Remote | Via::Confirmed) => "ledger settle Delegate: after",
            (Self::Unseen, Via::Remote | Via::Confirmed) => "facilitator settle: after",
        };
        vec![Point { name: name.into(), occurrence: 1 }]
    }

    /// The number of kills or cuts of a case.
    fn kills(self, via: Via) -> usize {
        self.stops(via).len() + 1
    }

    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::First => "first life",
            Self::Unsent => "second life, settlement not sent",
            Self::Unseen => "second life, settlement not seen",
            Self::Never => "no kill",
            Self::TakenOver => "first life, another process takes over",
        }
    }

    fn next(self) -> Next {
        match self {
            Self::TakenOver => Next::Another,
            _ => Next::Restarted,
        }
    }
}

/// The set-up of a case, and the life that is ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Course {
    pub(crate) via: Via,
    pub(crate) backend: Backend,
    pub(crate) flow: Flow,
    pub(crate) when: When,
}

/// One row of the matrix.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Place {
    pub(crate) course: Course,
    /// Places in the order they were first passed.
    pub(crate) order: usize,
    pub(crate) name: String,
    /// `true` if a run that looked for places did not pass it, or if passing it depends on timing. No kill can be required there.
    pub(crate) by_chance: bool,
}

/// The results of the kills at one place.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    /// Kills at this place, without those that led there.
    pub(crate) kills: usize,
    pub(crate) wrong: Wrong,
    pub(crate) told: usize,
    pub(crate) dead: usize,
    pub(crate) in_vain: usize,
    /// The longest time from a kill until all buyers were answered.
    pub(crate) waited: Duration,
    /// Processes that finished without passing there again.
    pub(crate) missed: usize,
    /// What went wrong, in words, so that a test that fails says it.
    pub(crate) details: Vec<String>,
}

pub(crate) type Matrix = BTreeMap<Place, Tally>;

/// Returns the longest time from a kill until all buyers were answered, for each row of the published table.
pub(crate) fn longest_waits(matrix: &Matrix) -> BTreeMap<(Via, Flow, Backend), Duration> {
    let mut longest = BTreeMap::<_, Duration>::new();
    for (Place { course: Course { via, flow, backend, .. }, .. }, tally) in matrix {
        let waited = longest.entry((*via, *flow, *backend)).or_default();
        *waited = (*waited).max(tally.waited);
    }
    longest
}

/// Returns all courses of these flows on these ledgers with these facilitators.
pub(crate) fn courses(vias: &[Via], backends: &[Backend], flows: &[Flow], times: &[When]) -> Vec<Course> {
    let mut courses = Vec::new();
    for &via in vias {
        for &backend in backends {
            for &flow in flows {
                // In that flow the payers spend their balance after the first kill.
                let times = times.iter().filter(|when| flow != Flow::Spent || **when == When::First);
                courses.extend(times.map(|&when| Course { via, backend, flow, when }));
            }
        }
    }
    courses
}

/// Returns all places of these courses, and how often each was passed at least. Each course runs twice, because no two runs are the
/// same.
pub(crate) async fn explore(courses: Vec<Course>) -> BTreeMap<Place, u32> {
    let twice = courses.iter().chain(&courses).copied().collect();
    let mut runs: BTreeMap<Course, Vec<Vec<String>>> = BTreeMap::new();
    for (course, passed) in each(twice, |course| async move { (course, passed(course).await) }).await {
        runs.entry(course).or_default().push(passed);
    }
    runs.iter().flat_map(|(course, runs)| places(*course, runs)).collect()
}

/// Returns the places that these runs of a course passed. The number is that of the run that passed the place least often, but once.
pub(crate) fn places(course: Course, runs: &[Vec<String>]) -> Vec<(Place, u32)> {
    let mut names: Vec<&String> = Vec::new();
    for name in runs.iter().flatten() {
        if !names.contains(&name) {
            names.push(name);
        }
    }
    let place = |(order, name): (usize, &String)| {
        let counts = runs.iter().map(|run| run.iter().map(|passed| u32::from(passed == name)).sum::<u32>());
        let by_chance = counts.clone().any(|count| count == 0) || depends_on_timing(course, name);
        let least = counts.filter(|count| *count > 0).min().unwrap_or_default();
        (Place { course, order, name: name.clone(), by_chance }, least)
    };
    names.into_iter().enumerate().map(place).collect()
}

/// Returns `true` for steps that a later life takes only by chance. Two runs that both passed them show nothing about a third.
///
/// - `MarkUnknown`: its background pass asks the node after a transaction was sent again and before it is in a block.
/// - `Claim`: its background pass finds the open payment before the client presents it again and has it settled.
/// - `eth_getTransactionByHash`: its background pass finds that the transaction has no receipt before it is in a block.
fn depends_on_timing(course: Course, name: &str) -> bool {
    let is_later = !matches!(course.when, When::First | When::Never | When::TakenOver);
    is_later
        && ["ledger settle MarkUnknown", "ledger settle Claim", "node eth_getTransactionByHash"]
            .iter()
            .any(|step| name.starts_with(step))
}

/// Returns the points that a process passes in this life if it is not killed.
async fn passed(course: Course) -> Vec<String> {
    let Course { via, backend, flow, when } = course;
    if when == When::Never {
        return Cut::ALL.iter().flat_map(|cut| vec![cut.name().to_owned(); PAYMENTS]).collect();
    }
    let mut scene = Scene::new(via, flow, backend.store()).await;
    let stops = when.stops(via);
    let mut process = scene.open(PAYMENTS, stops.first().cloned()).await;
    // The last stop belongs to the life under test.
    let kills = stops.len() + 1;
    for number in 0..stops.len() {
        let ended = scene.live(&mut process, case::life(number, kills)).await;
        assert_eq!(ended, Ended::Stopped, "{course:?}");
        scene.kill(process).await;
        process = scene.reopen(stops.get(number + 1).cloned()).await;
    }
    let ended = scene.live(&mut process, case::life(stops.len(), kills)).await;
    assert_eq!(ended, Ended::Quiet, "{course:?}");
    let passed = process.passed();
    scene.kill(process).await;
    assert!(!passed.is_empty());
    passed
}

/// Every place at the middle one of the times it is passed, and those of a first life in the flows proper at the first one too.
/// Where a facilitator settles, the second lives are ended at the places of settling only: the others are passed with and
/// without it.
pub(crate) fn all(places: &BTreeMap<Place, u32>) -> Vec<(Place, u32)> {
    let times = |place: &Place, count: &u32| {
        let Course { via, flow, when, .. } = place.course;
        let (is_first, settles) = (matches!(when, When::First | When::Never), is_of_settling(&place.name));
        if via != Via::Chain && !is_first && !settles {
            return BTreeSet::new();
        }
        let is_proper = matches!(flow, Flow::Authorization | Flow::Upfront | Flow::Deferred);
        let first = (is_proper && is_first && (via == Via::Chain || settles)).then_some(1);
        BTreeSet::from_iter(first.into_iter().chain([count.div_ceil(2)]))
    };
    let each = places.iter().map(|(place, count)| times(place, count).into_iter().map(|time| (place.clone(), time)));
    each.flatten().collect()
}

/// Returns `true` for the steps of settling: those of the ledger, and every request to the facilitator or the node.
fn is_of_settling(name: &str) -> bool {
    ["ledger settle", "facilitator ", "node "].iter().any(|part| name.starts_with(part))
}

/// Every place of the first life once on every ledger, in one flow or another, and some of the second ones. Where a facilitator
/// settles, the places are those of settling: the others are passed with and without it. A place that every run of some course
/// passed is taken from such a course.
pub(crate) fn some(places: &BTreeMap<Place, u32>) -> Vec<(Place, u32)> {
    let mut by_name: BTreeMap<_, Vec<_>> = BTreeMap::new();
    for (place, count) in places {
        let Course { via, backend, when, .. } = place.course;
        if via == Via::Chain || is_of_settling(&place.name) {
            by_name.entry((backend, when, &place.name)).or_default().push((place, count));
        }
    }
    let mut chosen = Vec::new();
    for (index, ((_, when, _), mut same)) in by_name.into_iter().enumerate() {
        if matches!(when, When::First | When::Never) || index.is_multiple_of(5) {
            if same.iter().any(|(place, _)| !place.by_chance) {
                same.retain(|(place, _)| !place.by_chance);
            }
            let (place, count) = same[index % same.len()];
            chosen.push((place.clone(), count.div_ceil(2)));
        }
    }
    chosen
}

/// Kills the process at all of these places, and checks the results.
pub(crate) async fn run(kills: Vec<(Place, u32)>) -> Matrix {
    let mut matrix = Matrix::new();
    let done = each(kills, |(place, occurrence)| async move {
        let report = kill(&place, occurrence).await;
        tell(&place, occurrence, &report);
        (place, report)
    });
    for done in done.await {
        count(&mut matrix, done);
    }
    matrix
}

/// Applies `work` to each item, several at a time.
pub(crate) async fn each<T, R, F>(all: Vec<T>, work: impl Fn(T) -> F + Copy + Send + 'static) -> Vec<R>
where
    T: Send + 'static,
    R: Send + 'static,
    F: Future<Output = R>,
{
    let (places, total) = (Arc::new(Semaphore::new(AT_A_TIME)), all.len());
    let (mut running, mut done) = (JoinSet::new(), Vec::new());
    for one in all {
        let turn = places.clone().acquire_owned().await.expect("it is never closed");
        let runtime = Handle::current();
        running.spawn_blocking(move || {
            let _turn = turn;
            runtime.block_on(work(one))
        });
        while let Some(one) = running.try_join_next() {
            done.push(one.expect("no case panics"));
            if done.len().is_multiple_of(100) {
                eprintln!("{} of {total}", done.len());
            }
        }
    }
    while let Some(one) = running.join_next().await {
        done.push(one.expect("no case panics"));
    }
    done
}

async fn kill(place: &Place, mut occurrence: u32) -> Report {
    let Course { via, backend, flow, when } = place.course;
    if let Some(cut) = Cut::ALL.into_iter().find(|cut| when == When::Never && cut.name() == place.name) {
        return case::run_cut(via, flow, backend.store(), cut, occurrence).await;
    }
    let (before, mut again) = (when.stops(via), AGAIN);
    loop {
        let stop = Point { name: place.name.clone(), occurrence };
        let stops: Vec<_> = before.iter().cloned().chain([stop]).collect();
        let report = case::run(via, flow, backend.store(), &stops, when.next()).await;
        let is_done = report.kills == stops.len() || report.wrong != Wrong::default();
        if is_done || (occurrence == 1 && again == 0) {
            return report;
        }
        // Runs differ: background passes happen a varying number of times.
        match occurrence {
            1 => again -= 1,
            _ => occurrence /= 2,
        }
    }
}

/// Prints at once a place that was not reached, and everything that went wrong there.
fn tell(place: &Place, occurrence: u32, report: &Report) {
    let Place { course: Course { via, backend, flow, when }, name, by_chance, .. } = place;
    let course = [via.name(), backend.name(), flow.name(), when.name()].join(", ");
    if report.kills < when.kills(*via) {
        let seen = if *by_chance { ", seen by chance" } else { "" };
        eprintln!("{course}, {name} #{occurrence}: not reached{seen}");
    }
    for detail in &report.details {
        eprintln!("{course}, {name} #{occurrence}: {detail}");
    }
}

fn count(matrix: &mut Matrix, (place, report): (Place, Report)) {
    let wanted = place.course.when.kills(place.course.via);
    let tally = matrix.entry(place).or_default();
    tally.kills += usize::from(report.kills == wanted);
    tally.missed += usize::from(report.kills < wanted);
    tally.wrong.add(report.wrong);
    tally.told += report.told;
    tally.dead += report.dead;
    tally.waited = tally.waited.max(report.waited);
    tally.details.extend(report.details);
}
