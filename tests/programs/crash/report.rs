//! The matrix as a document.

use std::{collections::BTreeMap, fmt::Write as _};

use super::{
    case::{PAYMENTS, Wrong},
    cost::Cost,
    matrix::{Backend, Matrix, Tally, When},
    server::Flow,
};

/// Where it is published.
pub(crate) const PATH: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/crash-matrix.md");

const HEAD: &str = "# Crash matrix

A shop's process is killed (SIGKILL) at every point of a payment's life and started again on what it left. This file is
written by

    cargo test -p tower-x402-tests --features test-postgres --test programs -- --ignored --nocapture crash::full_matrix

which needs PostgreSQL's programs, takes some minutes, and fails if any number under *lost* to *open* is not 0. `.ci/run` kills
at every point of the first life once on each ledger, in one flow or another, and at some of the second ones.

    CRASH_FLOW=Upfront CRASH_POINTS='ledger submit: after#1, node eth_call: before#2' CRASH_LEDGER=postgres \\
        cargo test -p tower-x402-tests --features test-postgres --test programs -- --ignored --nocapture crash::one_case

repeats one case: the second life is ended at the second point, and so on.

**How.** The process is the real thing: `RequirePaymentLayer`, `OnchainFacilitator` and the ledger, served by axum; the code has no
hooks. The chain lives in the parent process, on a port, and makes a block every 100 ms. Around every call of the ledger, every
request to the node, the handler and the response's way to the client there are named points. A run that stops nowhere lists them,
so that a call that is added to the code is a point by itself. Then a process is started for each: eight payments of four payers are
presented at once, the process comes to the point, its only thread stops there, and it is killed. In a *second life*, a process that
was killed while it settled has been started again on what it left, and is killed again.

- *before*, *after*: before the call was made; when its result was there and nobody had seen it.
- *begun*: in the middle. SQLite's thread or the database server is given the write and goes on with it while the process dies;
  the node has the request, and a transaction waits for its block.

Then the next process is started, on another port, and every customer presents the same payment with the same request until there is
an answer, and once more after that. On PostgreSQL the clocks are put ahead meanwhile, which ends the leases of the dead process;
SQLite's file belongs to one process, which need not wait.

**What must hold**, and is counted where it does not:

- *lost*: a payment is on record, and paid, but not on the chain; or is not on record; or the sum of the ledger's payments is not what
  the payee has.
- *paid twice*: there are more transfers to the payee than paid payments.
- *worked twice*: two different answers were given to one payment (each run of the handler gives another one), or the handler ran again
  although a response was on record when the process was dead.
- *unanswered*: a customer came back and got no answer in a minute.
- *open*: in the end a payment is neither paid and final nor proven dead: due, submitted, unknown.

A response that does not say its length (*streamed*) cannot be kept before it is paid for. If the process dies while it streams, it is
gone: its payer is told so with a 409 that names the transaction, or is not charged. Those are counted as *told*.
Where half of the payers spend their *balance elsewhere* while the process is dead, those that were not answered before are refused;
what they were answered on credit is on record as owed, and as *dead* when its authorization has expired.
";

/// Writes it all down.
pub(crate) fn document(matrix: &Matrix, costs: &BTreeMap<(Flow, Backend), Cost>) -> String {
    let mut text = HEAD.to_owned();
    let _ = writeln!(text, "\n## Summary\n");
    let _ = writeln!(
        text,
        "Commits are counted for each payment until it is final, alone and as one of {PAYMENTS} at a time: those of SQLite's \
         journal, each of which is one `fsync`, and PostgreSQL's syncs of its log (`synchronous_commit=on`, `fsync=on`).\n"
    );
    let _ = writeln!(
        text,
        "| flow | ledger | kills | lost | paid twice | worked twice | unanswered | open | told | dead | commits alone | of {PAYMENTS} |"
    );
    let _ = writeln!(text, "|---|---|---|---|---|---|---|---|---|---|---|---|");
    for ((flow, backend), cost) in costs {
        let sum = sum(matrix.iter().filter(|(place, _)| (place.flow, place.backend) == (*flow, *backend)));
        let (flow, backend, numbers) = (flow.name(), backend.name(), numbers(&sum));
        let _ = writeln!(
            text,
            "| {flow} | {backend} | {numbers} | {} | {} | {:.1} | {:.1} |",
            sum.told, sum.dead, cost.alone, cost.in_company
        );
    }
    let total = sum(matrix.iter());
    let _ = writeln!(text, "| all | | {} | {} | {} | | |", numbers(&total), total.told, total.dead);
    for flow in costs.keys().map(|(flow, _)| *flow).collect::<std::collections::BTreeSet<_>>() {
        for when in When::ALL {
            table(&mut text, matrix, flow, when);
        }
    }
    let missed: usize = matrix.values().map(|tally| tally.missed).sum();
    if missed > 0 {
        let _ = writeln!(
            text,
            "\n{missed} processes came to their end without passing their point again: no two runs are the same. They are not \
             counted as kills at it."
        );
    }
    text
}

fn table(text: &mut String, matrix: &Matrix, flow: Flow, when: When) {
    let places = matrix.iter().filter(|(place, _)| place.flow == flow && place.when == when);
    let mut rows: Vec<(&str, Vec<(Backend, &Tally)>)> = Vec::new();
    for (place, tally) in places {
        match rows.iter_mut().find(|(name, _)| *name == place.name) {
            Some((_, tallies)) => tallies.push((place.backend, tally)),
            None => rows.push((&place.name, vec![(place.backend, tally)])),
        }
    }
    if rows.is_empty() {
        return;
    }
    let _ = writeln!(text, "\n## {}, {}\n", flow.name(), when.title());
    let _ = writeln!(text, "| point | kills | lost | paid twice | worked twice | unanswered | open |");
    let _ = writeln!(text, "|---|---|---|---|---|---|---|");
    for (name, tallies) in rows {
        let mut wrong = Wrong::default();
        tallies.iter().for_each(|(_, tally)| wrong.add(tally.wrong));
        let kills: Vec<_> =
            tallies.iter().map(|(backend, tally)| format!("{} {}", backend.name(), tally.kills)).collect();
        let _ = writeln!(text, "| {name} | {} | {} |", kills.join(", "), columns(&wrong));
    }
}

fn sum<'a, K: 'a>(tallies: impl Iterator<Item = (K, &'a Tally)>) -> Tally {
    let mut sum = Tally::default();
    for (_, tally) in tallies {
        sum.kills += tally.kills;
        sum.told += tally.told;
        sum.dead += tally.dead;
        sum.missed += tally.missed;
        sum.wrong.add(tally.wrong);
    }
    sum
}

fn numbers(tally: &Tally) -> String {
    format!("{} | {}", tally.kills, columns(&tally.wrong))
}

fn columns(wrong: &Wrong) -> String {
    let Wrong { lost, doubled, reworked, unanswered, open } = wrong;
    format!("{lost} | {doubled} | {reworked} | {unanswered} | {open}")
}
