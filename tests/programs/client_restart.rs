//! A student that is killed, or whose disk is full, in the middle of its purchases. Its journal has every payment that servers could
//! collect, and its budget is not exceeded.

use std::{
    collections::BTreeSet,
    path::Path,
    process::Output,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use alloy_primitives::B256;
use serde_json::Value;
use support::programs::{directory, example};
use support::script::{Answer, Bank, KEY, Server, TempPath, decode, offer, required, required_402, settled};
use tokio::{
    process::Command,
    time::{sleep, timeout},
};
use tower_x402::{
    Usdc,
    client::{Budget, Journal},
};

/// The timeout of everything that a student does here.
const PATIENCE: Duration = Duration::from_secs(60);
const PRICE: u64 = 1_000;
/// The money for three hundred purchases, and a little more.
const BUDGET: &str = "$0.300999";
const BUDGET_UNITS: u64 = 300_999;

/// A server that settles each payment and answers at once, late, never, or by hanging up; always at once when `good`.
async fn slow_server(bank: &Bank, good: &Arc<AtomicBool>) -> Server {
    let (bank, good, required) = (bank.clone(), good.clone(), required(&[offer(PRICE)]));
    Server::start(move |seen| {
        let Some(payment) = &seen.payment else { return Answer::Response(required_402(&required)) };
        bank.settle(payment);
        let mood = if good.load(Ordering::SeqCst) { 0 } else { nonce(payment)[0] % 4 };
        match (mood, settled()(seen)) {
            (0, answer) => answer,
            (1, Answer::Response(response)) => Answer::Late(Duration::from_millis(60), response),
            (2, _) => Answer::Silence,
            _ => Answer::Cut,
        }
    })
    .await
}

fn nonce(payment: &str) -> B256 {
    decode(payment).payload.read().unwrap().authorization.nonce
}

fn student(server: &Server, journal: &Path, count: u32) -> Command {
    let mut command = example("student");
    arguments(&mut command, server, journal, count);
    command
}

fn arguments(command: &mut Command, server: &Server, journal: &Path, count: u32) {
    command.args(["--url", &server.url(), "--budget", BUDGET, "--concurrency", "4", "--timeout", "1"]);
    command.args(["--count", &count.to_string()]).arg("--journal").arg(journal);
    command.env("STUDENT_PRIVATE_KEY", KEY).env("NO_PROXY", "127.0.0.1");
}

/// Returns the budget as the next process reads it from the journal.
fn reopened(journal: &Path) -> Budget {
    let budget = Budget::builder().total(Usdc::from_atomic(BUDGET_UNITS));
    budget.journal(Journal::open(journal).unwrap()).build()
}

/// Checks that each payment at the server is paid or open in the journal, and that no other is paid there.
fn is_consistent(journal: &Path, bank: &Bank) -> Budget {
    let budget = reopened(journal);
    let open: BTreeSet<B256> = budget.journal().unresolved().iter().map(|entry| entry.nonce).collect();
    let closed = bank.nonces().difference(&open).count() as u64;
    assert_eq!(budget.spent().atomic(), closed * PRICE);
    assert_eq!(budget.reserved().atomic(), open.len() as u64 * PRICE);
    assert!(bank.taken() <= budget.spent().atomic() + budget.reserved().atomic());
    assert!(budget.spent().atomic() + budget.reserved().atomic() <= BUDGET_UNITS);
    budget
}

fn lines(output: &Output) -> Vec<Value> {
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let mut lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    lines.pop().unwrap_or_else(|| panic!("no summary; {}", String::from_utf8_lossy(&output.stderr)));
    lines
}

#[tokio::test]
async fn student_killed_repeatedly_never_exceeds_its_budget() {
    let (bank, good) = (Bank::default(), Arc::new(AtomicBool::new(false)));
    let server = slow_server(&bank, &good).await;
    let journal = TempPath::new("killed");
    for round in 0..10_u64 {
        let mut process = student(&server, &journal.0, 64).spawn().unwrap();
        // From before the first signature to the middle of many.
        let before = server.payments().len();
        let started = async {
            while server.payments().len() == before {
                sleep(Duration::from_millis(1)).await;
            }
        };
        timeout(Duration::from_secs(2), started).await.ok();
        sleep(Duration::from_millis(round * 3)).await;
        assert!(process.try_wait().unwrap().is_none(), "it is killed at work");
        process.kill().await.unwrap();
        is_consistent(&journal.0, &bank);
    }
    assert!(bank.taken() > 0);

    good.store(true, Ordering::SeqCst);
    let output = timeout(PATIENCE, student(&server, &journal.0, 310).output()).await.unwrap().unwrap();
    assert!(lines(&output).iter().any(|line| line["outcome"] == "refused"));
    let budget = is_consistent(&journal.0, &bank);
    assert_eq!(budget.remaining().atomic(), 999, "all but what no purchase fits in");
}

/// The disk is full after a few payments.
#[tokio::test]
#[cfg(unix)]
async fn payment_that_the_journal_cannot_store_is_not_sent() {
    let (bank, good) = (Bank::default(), Arc::new(AtomicBool::new(true)));
    let server = slow_server(&bank, &good).await;
    let journal = TempPath::new("full");
    let mut command = Command::new("sh");
    // Without the trap the signal SIGXFSZ would end the program.
    command.args(["-c", "trap '' XFSZ; ulimit -f 16; exec \"$0\" \"$@\""]).arg(directory().join("student"));
    command.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped()).kill_on_drop(true);
    arguments(&mut command, &server, &journal.0, 30);
    let output = timeout(PATIENCE, command.output()).await.unwrap().unwrap();
    assert_eq!(output.status.code(), Some(1));

    let lines = lines(&output);
    let (paid, refused): (Vec<_>, Vec<_>) = lines.iter().partition(|line| line["outcome"] == "settled");
    assert!(!paid.is_empty() && refused.len() > 10, "{} paid, {} refused", paid.len(), refused.len());
    for line in refused {
        assert_eq!(line["outcome"], "refused", "{line}");
        assert!(line["error"].as_str().unwrap().contains("journal"), "{line}");
    }
    assert_eq!(server.payments().len(), paid.len());
    let recorded = std::fs::read_to_string(&journal.0).unwrap();
    assert!(server.payments().iter().all(|payment| recorded.contains(payment.as_str())));
    // A payment whose outcome could not be written stays open.
    let budget = is_consistent(&journal.0, &bank);
    assert_eq!(bank.taken(), paid.len() as u64 * PRICE);
    assert!(budget.spent().atomic() + budget.reserved().atomic() >= bank.taken());
}
