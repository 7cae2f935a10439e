//! The matrix as a document and as a CSV file.

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

/// The published files.
pub(crate) const PATH: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/crash-matrix.md");
pub(crate) const PLACES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/crash-matrix.csv");

const HEAD: &str = "# Crash matrix

A seller's process is killed (SIGKILL) at every named point of a payment's life and started again. The column *violations* counts what
was lost, done twice, left open or misreported by that. [crash-matrix.csv](crash-matrix.csv) has a line for each point. Both files are
written by

    cargo test -p tower-x402-tests --features test-postgres --test programs -- --ignored --nocapture crash::full_matrix

which needs PostgreSQL's programs, takes 20 to 30 minutes on two cores, and fails unless *violations* is 0 everywhere.

| facilitator | flow | ledger | points | kills | cuts | by chance | violations | told | dead | longest wait | commits alone | of 8 |
|---|---|---|---|---|---|---|---|---|---|---|---|---|
";

const TAIL: &str = "
## Columns

| column | meaning |
|---|---|
| points, kills | named points, and processes killed there |
| cuts | connections to the facilitator that were cut instead, without killing anybody |
| by chance | processes that did not reach their point again, where only one of two listing runs had reached it: such a point depends on timing |
| violations | the sum of the columns *missed* to *untrue* of the CSV, below |
| told | streamed responses that the crash interrupted; their payer is answered 409 with the transaction that paid, or is not charged |
| dead | payments whose payer spent its balance elsewhere while the process was down; answers given on credit are recorded as owed |
| longest wait | seconds from a kill until the last of the eight buyers was answered: the next process starts, and takes over what the dead one held |
| commits alone, of 8 | commits of SQLite (each an `fsync`) or syncs of PostgreSQL's log per payment until it is final: alone, and as one of 8 at a time |

What counts as a violation:

| column of the CSV | meaning |
|---|---|
| missed | a process ended without reaching its point again |
| lost | a payment is not on record; or recorded as paid and not on the chain; or the ledger's sum differs from what the payee has; or the facilitator was asked to settle it and the ledger says that it is due |
| paid twice | more transfers to the payee than paid payments |
| worked twice | two different answers to one payment, or a handler run although a response was on record |
| unanswered | a buyer came back and got no answer within a minute |
| open | a payment is in the end neither final nor proven dead, or the last process did not end within a minute |
| untrue | a `PAYMENT-RESPONSE` names a transaction that did not pay, or reports a payment as failed that was paid |

## Method

The process is a real seller: `RequirePaymentLayer`, facilitator and ledger, served by axum. The production code has no hooks. The
chain lives in the parent process and makes a block every 100 ms; so does the remote facilitator (`FacilitatorService` with its own ledger).

1. Two runs list the named points: before, in the middle of and after every call to the ledger, request to the node or
   facilitator, handler run, and step of the response. A call that is added to the code becomes a point by itself.
2. For each point a process is started and gets eight payments of four payers at once. It stops at the point and is killed. A
   write or request that had begun may complete while the process dies.
3. The next process is started on another port. Every buyer presents the same payment with the same request until there is an
   answer, and once more after that. The clock is put ahead only after everybody was answered.
4. Ledger, chain and answers are compared.

In a *second life* the restarted process is killed, too: the settlement was on record and *not sent*, or done and its result *not seen*.
Where a facilitator is believed without a node, a payment must end as settled in the seller's ledger and as final in the facilitator's.

`.ci/run` kills once at every point of the first life on each ledger, in one flow or another, and at some points of the second. This
repeats one case (the second life ends at the second point, and so on):

    CRASH_VIA=Confirmed CRASH_FLOW=Upfront CRASH_POINTS='facilitator settle: after#1, node eth_call: before#2' CRASH_LEDGER=postgres \\
        cargo test -p tower-x402-tests --features test-postgres --test programs -- --ignored --nocapture crash::one_case

## Power cuts

A power cut loses what was written and not synced, and a kill does not. So a test keeps a copy of each of the ledger's files as of its last
sync, and opens a ledger on these copies. It does so whenever a handler starts and whenever a client has its answer. The seller is
`RequirePaymentLayer`, and takes vouchers and `exact`. On both ledgers:

- A voucher is on disk before the handler starts.
- A charge is on disk with its voucher and its response before the client has the answer.
- A payment by `exact` is on disk with its response before the client has the answer.

Two controls lose what they wrote: SQLite with `synchronous=OFF`, and PostgreSQL with `fsync=off`. Syncs of files per request that is paid by
voucher, alone and as one of 8 at a time on 8 channels:

| ledger | alone | of 8 |
|---|---|---|
| SQLite | 2.0 | 0.4–0.6 |
| PostgreSQL | 2.0 | 0.5 |

The test is `tests/settlement/ledger/power_cut.rs`, on Linux. It prints the figures:

    cargo test -p tower-x402-tests --features test-postgres --test settlement -- --nocapture ledger::power_cut
";

/// The head of the section on processes that take over.
pub(crate) const TAKEOVER: &str = "
## Another process takes over
";

const TAKEOVER_TEXT: &str = "
Two processes share a ledger on PostgreSQL, each with a settlement key of its own. One gets the eight payments and is killed at every named
point of its first life. Then the buyers present them to the other. The table is written by

    cargo test -p tower-x402-tests --features test-postgres --test programs -- --ignored --nocapture crash::full_takeover_matrix

| facilitator | flow | ledger | points | kills | cuts | by chance | violations | told | dead | longest wait |
|---|---|---|---|---|---|---|---|---|---|---|
";

/// Returns the section on processes that take over.
pub(crate) fn takeover(matrix: &Matrix) -> String {
    format!("{TAKEOVER}{TAKEOVER_TEXT}{}", rows(matrix, |_| String::new()))
}

/// The head of the section on payment channels, the last of the page.
pub(crate) const CHANNELS: &str = "
## Payment channels
";

const CHANNELS_TEXT: &str = "
The processes of a seller and of a buyer are killed at the named points of one channel's life: a deposit, vouchers, a price below the
offer, a top-up, claims, a refund, a withdrawal. The table is written by

    cargo test -p tower-x402-tests --features test-postgres --test programs -- --ignored --nocapture crash::channels::full_channel_matrix

The buyer goes on from its journal. After a *power cut* the journal has only what was synced before the last payment was sent. In the end
all that was charged is claimed, and compared to the atomic unit. A violation is one of these:

- what was charged is not the sum of the answers that reached the buyer, or not what was claimed;
- deposits are not the sum of claims, refunds, withdrawals and what is left, or a balance of payer or payee differs from them;
- the sum charged or claimed is lower after a kill than before;
- one voucher got two answers to one question, or a receipt is untrue;
- a paid request is refused with 402 although only the seller was killed;
- a transaction of the seller reverts, or makes a deposit or refund that another one made or is about to make;
- the buyer cannot go on paying, or its books differ from the chain.

Further columns and rows:

- *Node*: the state as of which the node estimates gas: that of the newest block, or after the transactions in its pool (*pending*).
- *Another process takes over*: it has a gas key of its own and the same ledger, and was there before. Otherwise the same one is started again.
- *Transaction in the pool*: the seller is killed when its node has a deposit, refund, claim or transfer of claims, and no block is made
  until 2 s, and in other runs 10 s, after the next process has started.
- *In vain*: transactions of the process that took over that reverted, since the dead one's was in the pool and this node does not show it.
- *Longest wait*: seconds from the kill of the seller until the buyer's step is done. The time without blocks is part of it.

This repeats one case. `CRASH_PENDING`, `CRASH_ANOTHER`, `CRASH_HOLD` (seconds), `CRASH_POWER_CUT` and `CRASH_LEDGER` may be left out:

    CRASH_SELLER='pool: deposit#1' CRASH_PENDING=1 CRASH_ANOTHER=1 CRASH_HOLD=10 CRASH_LEDGER=postgres \\
        cargo test -p tower-x402-tests --features test-postgres --test programs -- --ignored --nocapture crash::channels::one_channel_case

";

/// Returns the section on payment channels.
pub(crate) fn channels(table: &str) -> String {
    format!("{CHANNELS}{CHANNELS_TEXT}{table}")
}

/// Returns the page: a row for each flow on each ledger.
pub(crate) fn document(matrix: &Matrix, costs: &BTreeMap<(Via, Flow, Backend), Cost>) -> String {
    let cost = |row: Option<(Via, Flow, Backend)>| match row.and_then(|row| costs.get(&row)) {
        Some(cost) => format!(" {:.1} | {:.1} |", cost.alone, cost.in_company),
        None => " | |".to_owned(),
    };
    format!("{HEAD}{}{TAIL}", rows(matrix, cost))
}

/// Returns a row for each flow on each ledger, and one for all of them. `more` has further columns, of all rows if it gets `None`.
fn rows(matrix: &Matrix, more: impl Fn(Option<(Via, Flow, Backend)>) -> String) -> String {
    let mut text = String::new();
    let rows: BTreeSet<_> =
        matrix.keys().map(|Place { course, .. }| (course.via, course.flow, course.backend)).collect();
    for row in rows {
        let (via, flow, backend) = row;
        let of_row = |place: &Place| (place.course.via, place.course.flow, place.course.backend) == row;
        let (names, sums) = ([via.name(), flow.name(), backend.name()].join(" | "), sums(matrix, of_row));
        let _ = writeln!(text, "| {names} | {sums} |{}", more(Some(row)));
    }
    let _ = writeln!(text, "| all | | | {} |{}", sums(matrix, |_| true), more(None));
    text
}

/// Returns the columns from points to the longest wait, added up over the places that count.
fn sums(matrix: &Matrix, is_counted: impl Fn(&Place) -> bool) -> String {
    let (mut sum, mut places, mut kills, mut cuts, mut by_chance) = (Tally::default(), 0, 0, 0, 0);
    for (place, tally) in matrix.iter().filter(|(place, _)| is_counted(place)) {
        places += 1;
        *(if place.course.when == When::Never { &mut cuts } else { &mut kills }) += tally.kills;
        sum.told += tally.told;
        sum.dead += tally.dead;
        sum.waited = sum.waited.max(tally.waited);
        *(if place.by_chance { &mut by_chance } else { &mut sum.missed }) += tally.missed;
        sum.wrong.add(tally.wrong);
    }
    let violations = sum.missed + sum.wrong.sum();
    let waited = sum.waited.as_secs_f64();
    format!("{places} | {kills} | {cuts} | {by_chance} | {violations} | {} | {} | {waited:.1}", sum.told, sum.dead)
}

/// Returns the CSV: a line for each place.
pub(crate) fn places(matrix: &Matrix) -> String {
    let mut text =
        "facilitator,flow,ledger,life,point,seen,longest wait,kills,missed,lost,paid twice,worked twice,unanswered,open,untrue\n"
            .to_owned();
    for (Place { course, name, by_chance, .. }, tally) in matrix {
        let Course { via, backend, flow, when } = course;
        let seen = if *by_chance { "by chance" } else { "always" };
        let named =
            [via.name(), flow.name(), backend.name(), when.name(), name, seen].map(|field| format!("{field:?}"));
        let waited = tally.waited.as_secs_f64();
        let numbers = [tally.kills, tally.missed].map(|number| number.to_string());
        let _ =
            writeln!(text, "{},{waited:.1},{},{}", named.join(","), numbers.join(","), wrong(&tally.wrong).join(","));
    }
    text
}

fn wrong(wrong: &Wrong) -> [String; 6] {
    let Wrong { lost, doubled, reworked, unanswered, open, untrue } = wrong;
    [lost, doubled, reworked, unanswered, open, untrue].map(ToString::to_string)
}
