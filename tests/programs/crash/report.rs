//! The matrix as a document, and place by place.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
};

use super::{
    case::Wrong,
    cost::Cost,
    matrix::{Backend, Course, Matrix, Place, Tally, When},
    server::{Flow, Via},
};

/// Where it is published.
pub(crate) const PATH: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/crash-matrix.md");
pub(crate) const PLACES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/crash-matrix.csv");

const HEAD: &str = "# Crash matrix

A shop's process is killed (SIGKILL) at every named point of a payment's life and started again on what it left. The table says how
often, and what went wrong; [crash-matrix.csv](crash-matrix.csv) says it of each place. Both files are written by

    cargo test -p tower-x402-tests --features test-postgres --test programs -- --ignored --nocapture crash::full_matrix

which needs PostgreSQL's programs and takes half an hour on two cores. It fails if any number from *missed* to *untrue* is not 0.

| facilitator | flow | ledger | places | kills | cuts | by chance | missed | lost | paid twice | worked twice | unanswered | open | untrue | told | dead | commits alone | of 8 |
|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|
";

const TAIL: &str = "
## Columns

- *places*: named points, in each life that is ended. *kills*: processes killed there. *cuts*: connections to the facilitator cut.
- *by chance*, *missed*: processes that came to their end without passing their point again. It is *by chance* if only one of two
  runs that listed the points had passed it: such a point depends on timing, and not reaching it is no failure.
- *lost*: a payment is not on record; or is on record as paid, and not on the chain; or the sum of the ledger's payments is not
  what the payee has; or the facilitator was asked to settle it, and the dead process left it as due.
- *paid twice*: there are more transfers to the payee than paid payments.
- *worked twice*: two different answers were given to one payment (each run of the handler gives another one), or the handler ran
  again although a response was on record when the process was dead.
- *unanswered*: a customer came back and got no answer in a minute.
- *open*: in the end a payment is neither final nor proven dead, or the last process did not come to its end in a minute. Where a
  facilitator is believed, the payment is to be settled in the shop's ledger and final in the facilitator's.
- *untrue*: a `PAYMENT-RESPONSE` names a transaction that did not pay, or says that a payment failed which its transaction paid.
- *told*: a response that does not say its length (*streamed*) cannot be kept before it is paid for. If the process dies while it
  streams, its payer is told so with a 409 that names the transaction, or is not charged.
- *dead*: half of the payers spend their *balance elsewhere* while the process is dead. Those that were not answered before are
  refused; what they were answered on credit is on record as owed, and dead when its authorization has expired.
- *commits*: for each payment until it is final, alone and as one of 8 at a time: commits of SQLite's journal, each of which is one
  `fsync`, or PostgreSQL's syncs of its log (`synchronous_commit=on`, `fsync=on`).

## Method

The process is the real thing: `RequirePaymentLayer`, the facilitator and the ledger, served by axum; the code has no hooks. The chain
lives in the parent process, on a port, and makes a block every 100 ms. So does the facilitator of a shop that has none of its own:
`FacilitatorService` with its own ledger. Named points lie around every call of the ledger, every request to the node and to the
facilitator, the handler, and the response's way to the client.

- *before*, *after*: before the call was made; when its result was there and nobody had seen it.
- *begun*: in the middle. SQLite's thread or the database server is given the write and goes on with it while the process dies; the
  node or the facilitator has the request, and goes on with it.

Two runs that stop nowhere list the points, so that a call that is added to the code is a point by itself. Then a process is started
for each: eight payments of four payers are presented at once, the process comes to the point, its only thread stops there, and it is
killed. In a *second life*, a process that was killed while it settled for half of the customers has been started again on what it left, and
is killed again when all of them have come. The settlement was on record and *not sent*, or done and its result *not seen*.

Then the next process is started, on another port, and every customer presents the same payment with the same request until there is
an answer, and once more after that. Leases and holds of the dead process end by the clock, which is put ahead; a ledger in SQLite
belongs to one process, whose leases end with it. A *cut* kills nobody: one connection to `/settle` ends before the facilitator has the
request, while it works, before it answers, or within its answer.

`.ci/run` kills at every point of the first life once on each ledger, in one flow or another, and at some of the second ones. One case
is repeated by

    CRASH_VIA=Confirmed CRASH_FLOW=Upfront CRASH_POINTS='facilitator settle: after#1, node eth_call: before#2' CRASH_LEDGER=postgres \\
        cargo test -p tower-x402-tests --features test-postgres --test programs -- --ignored --nocapture crash::one_case

where the second life is ended at the second point, and so on.
";

/// Writes down what came of each flow on each ledger.
pub(crate) fn document(matrix: &Matrix, costs: &BTreeMap<(Via, Flow, Backend), Cost>) -> String {
    let mut text = HEAD.to_owned();
    let rows: BTreeSet<_> =
        matrix.keys().map(|Place { course, .. }| (course.via, course.flow, course.backend)).collect();
    for row in rows {
        let (via, flow, backend) = row;
        let of_row = |place: &Place| (place.course.via, place.course.flow, place.course.backend) == row;
        let cost =
            costs.get(&row).map_or(" | ".to_owned(), |cost| format!("{:.1} | {:.1}", cost.alone, cost.in_company));
        let sums = sums(matrix, of_row);
        let _ = writeln!(text, "| {} | {} | {} | {sums} | {cost} |", via.name(), flow.name(), backend.name());
    }
    let _ = writeln!(text, "| all | | | {} | | |", sums(matrix, |_| true));
    text.push_str(TAIL);
    text
}

/// Places, kills, cuts, and what came of them.
fn sums(matrix: &Matrix, is_counted: impl Fn(&Place) -> bool) -> String {
    let (mut sum, mut places, mut kills, mut cuts, mut by_chance) = (Tally::default(), 0, 0, 0, 0);
    for (place, tally) in matrix.iter().filter(|(place, _)| is_counted(place)) {
        places += 1;
        *(if place.course.when == When::Never { &mut cuts } else { &mut kills }) += tally.kills;
        sum.told += tally.told;
        sum.dead += tally.dead;
        *(if place.by_chance { &mut by_chance } else { &mut sum.missed }) += tally.missed;
        sum.wrong.add(tally.wrong);
    }
    let wrong = wrong(&sum.wrong).join(" | ");
    format!("{places} | {kills} | {cuts} | {by_chance} | {} | {wrong} | {} | {}", sum.missed, sum.told, sum.dead)
}

/// A line for each place.
pub(crate) fn places(matrix: &Matrix) -> String {
    let mut text =
        "facilitator,flow,ledger,life,point,seen,kills,missed,lost,paid twice,worked twice,unanswered,open,untrue\n"
            .to_owned();
    for (Place { course, name, by_chance, .. }, tally) in matrix {
        let Course { via, backend, flow, when } = course;
        let seen = if *by_chance { "by chance" } else { "always" };
        let named =
            [via.name(), flow.name(), backend.name(), when.name(), name, seen].map(|field| format!("{field:?}"));
        let numbers = [tally.kills, tally.missed].map(|number| number.to_string());
        let _ = writeln!(text, "{},{},{}", named.join(","), numbers.join(","), wrong(&tally.wrong).join(","));
    }
    text
}

fn wrong(wrong: &Wrong) -> [String; 6] {
    let Wrong { lost, doubled, reworked, unanswered, open, untrue } = wrong;
    [lost, doubled, reworked, unanswered, open, untrue].map(ToString::to_string)
}
