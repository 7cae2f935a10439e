//! Runs every flow with every fault, and prints the results.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    fmt::Write as _,
    sync::Mutex,
    thread,
    time::{Duration, Instant},
};

use super::{
    flows::{FACILITATOR_FLOWS, FLOWS, Flow, LATE_FLOWS, NODE_FLOWS, PLAIN_FLOWS, REMOTE_FLOWS},
    scene::{Client, Scene, Wrongs},
};
use support::{
    around_ledger::{OPERATIONS, operation_of},
    faulty_ledger::{Fault, How},
};

/// Methods that no flow of a payment calls.
const NOT_CALLED: [&str; 1] = ["counts"];

const OUTAGE: Duration = Duration::from_secs(20);

/// The result of one run of a flow.
struct Gone {
    calls: Vec<&'static str>,
    has_failed: bool,
    wrongs: Wrongs,
}

/// One point: a flow, and the fault in it.
#[derive(Clone, Copy)]
struct Point<'a> {
    flow: &'a Flow,
    fault: Fault,
    client: Client,
}

#[derive(Default)]
struct Row {
    points: usize,
    lost: usize,
    doubled: usize,
    untrue: usize,
    missed: usize,
}

#[test]
fn failed_ledger_call_harms_no_payment() {
    check(PLAIN_FLOWS, false);
}

#[test]
fn failed_ledger_call_harms_no_deferred_or_streamed_payment() {
    check(LATE_FLOWS, false);
}

#[test]
fn failed_ledger_call_harms_no_payment_with_a_failing_node() {
    check(NODE_FLOWS, false);
}

#[test]
fn failed_ledger_call_harms_no_payment_through_a_facilitator() {
    check(REMOTE_FLOWS, false);
}

#[test]
fn failed_ledger_call_at_the_facilitator_harms_no_payment() {
    check(FACILITATOR_FLOWS, false);
}

#[test]
#[ignore = "takes minutes: includes faults that are equivalent to those above"]
fn failed_ledger_call_of_every_kind_harms_no_payment() {
    check(&FLOWS.concat(), true);
}

/// A method that no flow calls is not tested above. A new method belongs into a flow, or into `NOT_CALLED`.
#[test]
fn flows_call_every_method_that_a_payment_depends_on() {
    let gone = on_all_cores(FLOWS.concat(), |flow| go(&flow, None, Client::Insists));
    let called: BTreeSet<_> = gone.iter().flat_map(|gone| &gone.calls).map(|call| operation_of(call)).collect();
    let not_called: Vec<_> = OPERATIONS.into_iter().filter(|method| !called.contains(method)).collect();
    assert_eq!(not_called, NOT_CALLED);
}

fn check(flows: &[Flow], all: bool) {
    let started = Instant::now();
    let chosen = |name| std::env::var(name).ok();
    let (chosen_flow, chosen_call) = (chosen("LEDGER_FAULTS_FLOW"), chosen("LEDGER_FAULTS_CALL"));
    let is_chosen = |chosen: &Option<String>, name: &str| chosen.as_ref().is_none_or(|chosen| chosen == name);
    let chosen_flows = flows.iter().filter(|flow| is_chosen(&chosen_flow, flow.name)).collect();
    let without_faults = on_all_cores(chosen_flows, |flow: &Flow| (flow, go(flow, None, Client::Insists)));
    let mut points = Vec::new();
    for (flow, gone) in &without_faults {
        assert!(gone.wrongs.is_empty(), "{} without faults: {:?}", flow.name, gone.wrongs);
        let mut counts = BTreeMap::<&'static str, usize>::new();
        for call in gone.calls.iter().filter(|call| is_chosen(&chosen_call, call)) {
            *counts.entry(call).or_default() += 1;
        }
        for (call, count) in counts {
            for (nth, how, client) in ways(call, count, all) {
                points.push(Point { flow, fault: Fault { call, nth, how }, client });
            }
        }
    }
    let gone = on_all_cores(points, |point| (point, go_until_it_fails(point)));
    let (mut rows, mut wrongs) = (BTreeMap::<(usize, &str), Row>::new(), String::new());
    for (Point { flow, fault, client }, gone) in &gone {
        let place = flows.iter().position(|known| known.name == flow.name).unwrap();
        let row = rows.entry((place, fault.call)).or_default();
        row.points += 1;
        row.missed += usize::from(!gone.has_failed);
        row.lost += usize::from(!gone.wrongs.lost.is_empty());
        row.doubled += usize::from(!gone.wrongs.doubled.is_empty());
        row.untrue += usize::from(!gone.wrongs.untrue.is_empty());
        if !gone.wrongs.is_empty() || !gone.has_failed {
            let Fault { call, nth, how } = fault;
            let Wrongs { lost, doubled, untrue } = &gone.wrongs;
            let missed = if gone.has_failed { "" } else { "missed " };
            writeln!(
                wrongs,
                "{missed}{}: {call} #{nth} {how:?} {client:?}: {lost:?} {doubled:?} {untrue:?}",
                flow.name
            )
            .unwrap();
        }
    }
    println!("{}\n{wrongs}", print(flows, &rows));
    println!("{} points in {:.1?}", gone.len(), started.elapsed());
    assert!(wrongs.is_empty(), "{wrongs}");
}

/// Returns the faults for the `count` calls of this name: every kind for each if `all`. Otherwise equivalent ones are left out: a call
/// that changes nothing has no "after", and an outage begins with the first call of each name.
fn ways(call: &str, count: usize, all: bool) -> Vec<(usize, How, Client)> {
    let changes_nothing = ["get", "response", "submissions", "list", "counts"].contains(&call);
    let outages = [How::GoneBefore(OUTAGE), How::GoneAfter(OUTAGE)];
    let mut ways = Vec::new();
    for nth in 0..count {
        for how in [How::Before, How::After, outages[0], outages[1]] {
            let is_outage = outages.contains(&how);
            let is_same = changes_nothing && matches!(how, How::After | How::GoneAfter(_));
            for client in [Client::Insists, Client::Leaves] {
                let is_new = match is_outage {
                    true => nth == 0 && client == Client::Leaves,
                    // Calls that change nothing alternate between the two clients.
                    false => !changes_nothing || (nth % 2 == 0) == (client == Client::Leaves),
                };
                if all || (is_new && !is_same) {
                    ways.push((nth, how, client));
                }
            }
        }
    }
    ways
}

/// Runs a point until its fault occurs, at most four times: with concurrent requests the order of calls varies.
fn go_until_it_fails(point: Point<'_>) -> Gone {
    let mut gone = go(point.flow, Some(point.fault), point.client);
    for _ in 0..3 {
        if gone.has_failed || !gone.wrongs.is_empty() {
            break;
        }
        gone = go(point.flow, Some(point.fault), point.client);
    }
    gone
}

/// Runs a flow in virtual time.
fn go(flow: &Flow, fault: Option<Fault>, client: Client) -> Gone {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap();
    runtime.block_on(async {
        let mut scene = Scene::open(flow.setting, client).await;
        (flow.prepare)(&mut scene).await;
        scene.arm(fault);
        (flow.play)(&mut scene).await;
        let (faulty, calls) = (scene.faulty.clone(), scene.faulty.around.made());
        let wrongs = scene.end().await;
        Gone { calls, has_failed: faulty.around.has_failed(), wrongs }
    })
}

/// Applies `work` to all items on all cores, and returns the results in order.
fn on_all_cores<T: Send, R: Send>(items: Vec<T>, work: impl Fn(T) -> R + Sync) -> Vec<R> {
    let queue = Mutex::new(items.into_iter().enumerate().collect::<VecDeque<_>>());
    let done = Mutex::new(Vec::new());
    thread::scope(|scope| {
        for _ in 0..thread::available_parallelism().map_or(2, usize::from) {
            scope.spawn(|| {
                loop {
                    let next = queue.lock().unwrap().pop_front();
                    let Some((index, item)) = next else { return };
                    let result = work(item);
                    done.lock().unwrap().push((index, result));
                }
            });
        }
    });
    let mut done = done.into_inner().unwrap();
    done.sort_by_key(|(index, _)| *index);
    done.into_iter().map(|(_, result)| result).collect()
}

fn print(flows: &[Flow], rows: &BTreeMap<(usize, &str), Row>) -> String {
    let mut table = format!(
        "{:<38} {:<16} {:>7} {:>5} {:>8} {:>7} {:>7}\n",
        "flow", "call", "points", "lost", "doubled", "untrue", "missed"
    );
    let mut sum = Row::default();
    for ((flow, call), row) in rows {
        let Row { points, lost, doubled, untrue, missed } = row;
        let name = flows[*flow].name;
        writeln!(table, "{name:<38} {call:<16} {points:>7} {lost:>5} {doubled:>8} {untrue:>7} {missed:>7}").unwrap();
        sum.points += points;
        sum.lost += lost;
        sum.doubled += doubled;
        sum.untrue += untrue;
        sum.missed += missed;
    }
    let Row { points, lost, doubled, untrue, missed } = sum;
    write!(table, "{:<38} {:<16} {points:>7} {lost:>5} {doubled:>8} {untrue:>7} {missed:>7}", "all", "").unwrap();
    table
}
