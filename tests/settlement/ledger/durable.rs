//! The ledger in a file survives its process: what is on disk, and when.

use std::{path::Path, process::Command, sync::Arc, time::Duration};

use alloy_primitives::{Address, U256};
use bytes::Bytes;
use futures_util::{FutureExt as _, future::join_all};
use rusqlite::Connection;
use tower_x402::{
    ManualClock, Network,
    ledger::{
        BodyDigest, Counts, Fingerprint, Fulfilment, FulfilmentStep, JournaledTransaction, Lease, Ledger, LedgerError,
        Listing, PaymentStep, Record, ResponseLedger, ResponseLimits, Sender, Settlement, SettlementStep, Settling,
        SqliteLedger, StoredResponse, TransactionLedger,
        conformance::{response, take_over},
    },
    payment::PaymentKey,
    protocol::Reason,
};

use super::{CLOCK_START, admit, hash, produce, record, reserve, with_id};
use support::sqlite_file;

async fn open(path: &Path) -> SqliteLedger {
    let clock = Arc::new(ManualClock::at(CLOCK_START));
    SqliteLedger::open_with(path, ResponseLimits::default(), 10_000, clock).await.unwrap()
}

#[tokio::test]
async fn records_responses_and_transactions_survive_a_restart() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("ledger.sqlite");
    let ledger = open(&path).await;
    let settled = reserve(&ledger, record(1, 1)).await;
    produce(&ledger, &settled).await;
    ledger.advance(&settled.key, &SettlementStep::Submit { transaction: hash(1) }.into()).await.unwrap();
    ledger
        .advance(&settled.key, &SettlementStep::Settle { transaction: hash(1), block: Some(7), fee: None }.into())
        .await
        .unwrap();
    let (head, body) = (Bytes::from_static(b"\xff\0\n"), Bytes::from_static(b"\0answer"));
    let response = StoredResponse { head, body, stored_at: CLOCK_START };
    ledger.store_response(&settled.key, response.clone()).await.unwrap();
    ledger.advance(&settled.key, &PaymentStep::Replay).await.unwrap();
    let working = reserve(&ledger, record(2, 1)).await;
    admit(&ledger, &working, 10, 1).await.unwrap();
    ledger.advance(&working.key, &working.step(FulfilmentStep::Start { until: 0 })).await.unwrap();
    let gone = reserve(&ledger, record(3, 1)).await;
    ledger.discard(&gone).await.unwrap();
    let due = reserve(&ledger, record(4, 1)).await;
    produce(&ledger, &due).await;
    let sender = Sender { network: Network::BASE, address: Address::repeat_byte(0x5e) };
    let submission = |nonce, n: u8, payments| JournaledTransaction {
        sender,
        nonce,
        hash: hash(n),
        raw: vec![n; 3].into(),
        payments,
        by: 1,
        at: CLOCK_START,
        until: CLOCK_START + 30,
        known_failures: Default::default(),
    };
    for (nonce, n, payments) in [(2, 1, vec![]), (3, 2, vec![due.key]), (3, 3, vec![due.key]), (4, 4, vec![])] {
        ledger.submit(submission(nonce, n, payments)).await.unwrap();
    }
    ledger.free_nonce(&sender, 4, 1).await.unwrap();
    ledger.forget_nonces(&sender, 3).await.unwrap();
    ledger.close().await;

    let ledger = open(&path).await;
    let record_of_settled = ledger.get(&settled.key).await.unwrap().expect("kept");
    assert_eq!(record_of_settled.settlement, Settlement::Settled { transaction: hash(1), block: Some(7) });
    assert_eq!(record_of_settled.fulfilment, Fulfilment::Produced);
    assert_eq!((record_of_settled.transactions, record_of_settled.replays), (vec![hash(1)], 1));
    let before = record(1, 1);
    assert_eq!(record_of_settled.authorization, before.authorization, "the same payment");
    assert_eq!(record_of_settled.terms.text(), before.terms.text(), "under the same terms");
    assert_eq!(record_of_settled.signature, before.signature);
    assert_eq!(ledger.response(&settled.key).await.unwrap(), Some(response));
    assert!(ledger.get(&gone.key).await.unwrap().is_none());
    assert_eq!(ledger.counts().await.unwrap(), Counts { settled: 1, pending: 2, ..Counts::default() });
    let submissions = ledger.submissions(&sender, 0).await.unwrap();
    let shown: Vec<_> = submissions.iter().map(|found| (found.nonce, found.hash, found.payments.clone())).collect();
    assert_eq!(shown, [(3, hash(3), vec![due.key])], "what may have to be sent again");
    assert_eq!(submissions[0].raw.to_vec(), [3; 3]);
    ledger
        .submit(JournaledTransaction { by: 2, ..submission(3, 5, vec![]) })
        .await
        .expect("the process that had it is gone");

    let due = ledger.get(&due.key).await.unwrap().expect("kept");
    assert_eq!((due.settlement, due.settling), (Settlement::Submitted, None), "nobody looks after it any more");
    let taken = take_over(&ledger, &working.key, 0, CLOCK_START, CLOCK_START + 90).await;
    assert!(taken.is_some(), "the owner died with its process");
    let next = reserve(&ledger, record(2, 2)).await;
    assert!(matches!(admit(&ledger, &next, 10, 1).await, Err(LedgerError::InsufficientFunds)), "still in flight");
}

#[tokio::test]
async fn a_nonce_keeps_its_newest_transaction() {
    const NONCES: [u64; 2] = [4, 5];
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("ledger.sqlite");
    let ledger = open(&path).await;
    let sender = Sender { network: Network::BASE, address: Address::repeat_byte(0x5e) };
    for n in 0..100 {
        for nonce in NONCES {
            let (raw, payments, at) = (vec![n; 3].into(), Vec::new(), CLOCK_START);
            let known_failures = Default::default();
            let submission = JournaledTransaction {
                sender,
                nonce,
                hash: hash(n),
                raw,
                payments,
                by: 1,
                at,
                until: at,
                known_failures,
            };
            ledger.submit(submission).await.unwrap();
        }
        // No node took the one; the other is offered for more each time.
        ledger.free_nonce(&sender, NONCES[0], 1).await.unwrap();
    }
    ledger.close().await;
    let file = Connection::open(&path).unwrap();
    let rows = NONCES.map(|nonce| -> i64 {
        file.query_row("SELECT count(*) FROM nonces WHERE nonce = ?", [nonce.cast_signed()], |row| row.get(0)).unwrap()
    });
    assert_eq!(rows, [1, 1], "the newest of each");
    drop(file);
    let ledger = open(&path).await;
    let [left] = &ledger.submissions(&sender, 0).await.unwrap()[..] else { panic!("the other is free") };
    assert_eq!((left.nonce, left.hash), (NONCES[1], hash(99)));
}

#[tokio::test]
async fn payment_ids_survive_a_restart() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("ledger.sqlite");
    let ledger = open(&path).await;
    let taken = reserve(&ledger, with_id(7, record(1, 1))).await;
    let gone = reserve(&ledger, with_id(8, record(1, 2))).await;
    ledger.discard(&gone).await.unwrap();
    ledger.close().await;

    let ledger = open(&path).await;
    let known = ledger.get(&taken.key).await.unwrap().expect("kept");
    assert_eq!(known.id, with_id(7, record(1, 1)).id);
    let other = ledger.reserve(&with_id(7, record(1, 3))).await;
    assert!(matches!(other, Err(LedgerError::IdTaken { key }) if key == taken.key), "{other:?}");
    reserve(&ledger, with_id(8, record(1, 3))).await;
}

fn answer() -> StoredResponse {
    response(b"answer")
}

#[tokio::test]
async fn removed_records_and_responses_leave_the_file() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("ledger.sqlite");
    let limited = async |count| {
        let limits = ResponseLimits::default().count(count);
        SqliteLedger::open_with(&path, limits, 10_000, Arc::new(ManualClock::at(CLOCK_START))).await.unwrap()
    };
    let kept = || {
        let file = Connection::open(&path).unwrap();
        let count = |table: &str| -> i64 {
            file.query_row(&format!("SELECT count(*) FROM {table}"), [], |row| row.get(0)).unwrap()
        };
        (count("payments"), count("responses"))
    };
    let ledger = limited(10).await;
    // More at a time than is sent together, and then one by one.
    let leases = join_all((0..700).map(|n| reserve(&ledger, record(1, n)))).await;
    join_all(leases.iter().map(|lease| ledger.store_response(&lease.key, answer()))).await;
    for lease in &leases[..20] {
        ledger.store_response(&lease.key, answer()).await.unwrap();
    }
    for lease in &leases[100..150] {
        ledger.discard(lease).await.unwrap();
    }
    ledger.close().await;
    assert_eq!(kept(), (650, 10));
    let ledger = limited(4).await;
    reserve(&ledger, record(9, 9)).await;
    ledger.close().await;
    assert_eq!(kept(), (651, 4));
}

#[tokio::test]
async fn removed_settled_payments_stay_counted_after_a_restart() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("ledger.sqlite");
    let clock = Arc::new(ManualClock::at(CLOCK_START));
    let ledger = SqliteLedger::open_with(&path, ResponseLimits::default(), 10_000, clock.clone()).await.unwrap();
    let [settled, last, unpaid] = [1, 2, 3].map(|nonce| record(1, nonce));
    for payment in [&settled, &last] {
        let lease = reserve(&ledger, payment.clone()).await;
        produce(&ledger, &lease).await;
        let settle = SettlementStep::Settle { transaction: hash(1), block: Some(1), fee: None };
        ledger.advance(&lease.key, &settle.into()).await.unwrap();
    }
    ledger.advance(&last.key, &SettlementStep::Finalize.into()).await.unwrap();
    reserve(&ledger, unpaid.clone()).await;
    ledger.get(&unpaid.key).await.unwrap();
    clock.advance(10_000);
    for nonce in 10..60 {
        let _ = ledger.reserve(&record(1, nonce)).await.unwrap();
    }
    for gone in [&settled, &last, &unpaid] {
        assert!(ledger.get(&gone.key).await.unwrap().is_none());
    }
    ledger.close().await;
    assert_eq!(open(&path).await.counts().await.unwrap().settled, 2);
}

/// The fields that never change are written once per reservation.
#[tokio::test]
async fn the_last_of_two_reservations_of_one_key_is_read() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("ledger.sqlite");
    let ledger = open(&path).await;
    let first = with_id(7, record(1, 1));
    let lease = reserve(&ledger, first.clone()).await;
    admit(&ledger, &lease, 10, 1).await.unwrap();
    ledger.advance(&lease.key, &lease.step(FulfilmentStep::Start { until: 0 })).await.unwrap();
    // Discarded and reserved again before anything is written.
    let between = reserve(&ledger, record(1, 2)).await;
    ledger.discard(&between).await.unwrap();
    let mut second = with_id(8, record(1, 2));
    second.reserved_at = CLOCK_START - 1;
    reserve(&ledger, second.clone()).await;
    // Discarded and reserved again after the first reservation was written.
    let written = reserve(&ledger, record(1, 3)).await;
    ledger.get(&written.key).await.unwrap();
    let third = with_id(9, record(1, 3));
    let (discarded, _) = tokio::join!(ledger.discard(&written), reserve(&ledger, third.clone()));
    discarded.unwrap();
    ledger.close().await;

    let ledger = open(&path).await;
    for expected in [first, second, third] {
        let read = ledger.get(&expected.key).await.unwrap().expect("read");
        assert_eq!((read.id, read.reserved_at), (expected.id, expected.reserved_at));
    }
}

#[tokio::test]
async fn a_file_of_another_version_is_left_alone() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("ledger.sqlite");
    open(&path).await.close().await;
    for version in [-1, 0, 8, 10] {
        let before = sqlite_file::set_version(&path, version);
        let opened = SqliteLedger::open(&path).await;
        assert!(matches!(opened, Err(LedgerError::OtherVersion)), "{opened:?}");
        assert_eq!(std::fs::read(&path).unwrap(), before);
    }
}

#[tokio::test]
async fn a_file_that_is_no_database_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("ledger.sqlite");
    std::fs::write(&path, "a list of payments, kept by hand").unwrap();
    let opened = SqliteLedger::open(&path).await;
    assert!(matches!(opened, Err(LedgerError::Backend(_))), "{opened:?}");
    assert_eq!(std::fs::read(&path).unwrap(), b"a list of payments, kept by hand");
    assert!(SqliteLedger::open(directory.path().join("nowhere/ledger.sqlite")).await.is_err());
}

/// A thread writes the file, independent of the runtime.
#[test]
fn a_ledger_outlives_the_runtime_it_was_opened_in() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("ledger.sqlite");
    let runtime = || tokio::runtime::Builder::new_current_thread().build().unwrap();
    let ledger = runtime().block_on(open(&path));
    runtime().block_on(async {
        produce(&ledger, &reserve(&ledger, record(1, 1)).await).await;
        ledger.close().await;
        assert!(open(&path).await.get(&record(1, 1).key).await.unwrap().is_some());
    });
}

/// Returns `true` if another process can open the file. This program starts itself as that process.
fn opens_elsewhere(path: &Path) -> bool {
    let mut process = Command::new(std::env::current_exe().unwrap());
    process
        .args(["--exact", "ledger::durable::another_process", "--ignored"])
        .env(FILE, path)
        .env("RUST_BACKTRACE", "0");
    process.output().unwrap().status.success()
}

/// Names the file to [`another_process`].
const FILE: &str = "TOWER_X402_TEST_LEDGER";

#[tokio::test]
#[ignore = "is the other process of the test below"]
async fn another_process() {
    let path = std::env::var_os(FILE).expect("started by a test");
    SqliteLedger::open(path).await.expect("it is free").close().await;
}

#[tokio::test]
async fn one_process_holds_the_file() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("ledger.sqlite");
    let ledger = open(&path).await;
    reserve(&ledger, record(1, 1)).await;
    let second = SqliteLedger::open(&path).await;
    assert!(matches!(second, Err(LedgerError::Backend(_))), "{second:?}");
    // The failed attempt was of this process, and has not released its lock.
    assert!(!opens_elsewhere(&path));
    ledger.close().await;
    assert!(opens_elsewhere(&path));
    assert!(matches!(ledger.reserve(&record(1, 2)).await, Err(LedgerError::Backend(_))), "closed is closed");
    open(&path).await;
}

#[cfg(unix)]
#[tokio::test]
async fn the_files_are_private() {
    use std::os::unix::fs::PermissionsExt;
    let directory = tempfile::tempdir().unwrap();
    let ledger = open(&directory.path().join("ledger.sqlite")).await;
    reserve(&ledger, record(1, 1)).await;
    for file in std::fs::read_dir(directory.path()).unwrap() {
        let file = file.unwrap();
        let mode = file.metadata().unwrap().permissions().mode() & 0o777;
        assert_eq!(mode, 0o600, "{:?}", file.path());
    }
}

#[tokio::test]
async fn payments_at_the_same_time_share_a_commit() {
    let directory = tempfile::tempdir().unwrap();
    let ledger = Arc::new(open(&directory.path().join("ledger.sqlite")).await);
    let before = ledger.commits();
    let work = async |payer| produce(ledger.as_ref(), &reserve(ledger.as_ref(), record(payer, 1)).await).await;
    join_all((0..200).map(work)).await;
    let commits = ledger.commits() - before;
    // The number depends on the disk; some changes came during a commit.
    assert!((1..200).contains(&commits), "200 payments were worked for with {commits} commits");
    let before = ledger.commits();
    for payer in 0..20 {
        ledger.get(&record(payer, 1).key).await.unwrap();
    }
    assert_eq!(ledger.commits(), before, "reading writes nothing");
}

#[tokio::test]
async fn a_change_that_nobody_waits_for_shares_a_commit() {
    const PAYMENTS: u8 = 50;
    let directory = tempfile::tempdir().unwrap();
    let ledger = open(&directory.path().join("ledger.sqlite")).await;
    let before = ledger.commits();
    for payer in 0..PAYMENTS {
        let lease = reserve(&ledger, record(payer, 1)).await;
        tokio::task::yield_now().await;
        produce(&ledger, &lease).await;
        ledger.advance(&lease.key, &lease.step(FulfilmentStep::Deliver)).await.unwrap();
        tokio::task::yield_now().await;
        let settle = SettlementStep::Settle { transaction: hash(1), block: None, fee: None };
        ledger.advance(&lease.key, &settle.into()).await.unwrap();
        ledger.advance(&lease.key, &SettlementStep::Finalize.into()).await.unwrap();
    }
    let commits = ledger.commits() - before;
    // Each payment waits for one commit. A busy machine may make a few more.
    assert!((50..2 * 50).contains(&commits), "{PAYMENTS} payments, one after the other, took {commits} commits");
}

#[tokio::test]
async fn a_change_that_nobody_waits_for_is_written_soon() {
    let directory = tempfile::tempdir().unwrap();
    let ledger = open(&directory.path().join("ledger.sqlite")).await;
    let before = ledger.commits();
    reserve(&ledger, record(1, 1)).await;
    let written = async {
        while ledger.commits() == before {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(30), written).await.expect("it is written though nobody asks");
}

/// A step that does not wait returns at once every time. One that waits may be faster than the test now and then.
#[tokio::test]
async fn only_steps_that_may_be_lost_do_not_wait_for_the_disk() {
    let directory = tempfile::tempdir().unwrap();
    let ledger = open(&directory.path().join("ledger.sqlite")).await;
    let start = FulfilmentStep::Start { until: 0 };
    let (mut again, mut upfront, mut shown) = (0, 0, 0);
    for payer in 0..20 {
        let (new, paid) = (reserve(&ledger, record(payer, 1)).await, reserve(&ledger, record(payer, 2)).await);
        admit(&ledger, &new, 10, 1).now_or_never().expect("nobody waits").unwrap();
        ledger.advance(&new.key, &new.step(start.clone())).now_or_never().expect("nobody waits").unwrap();
        ledger.advance(&new.key, &new.step(FulfilmentStep::Release { body: None })).await.unwrap();
        admit(&ledger, &new, 10, 1).await.unwrap();
        again += u32::from(ledger.advance(&new.key, &new.step(start.clone())).now_or_never().is_none());
        let settle = SettlementStep::Settle { transaction: hash(1), block: None, fee: None };
        ledger.advance(&paid.key, &settle.into()).await.unwrap();
        upfront += u32::from(ledger.advance(&paid.key, &paid.step(start.clone())).now_or_never().is_none());
        let produce = FulfilmentStep::Produce { charged: None, body: None, at: 0, response: None };
        shown += u32::from(ledger.advance(&new.key, &new.step(produce.clone())).now_or_never().is_none());
    }
    assert!(again > 0, "attempts are counted, once there was one");
    assert!(upfront > 0, "the money is there");
    assert!(shown > 0, "it will be shown");
}

#[tokio::test]
async fn a_failed_write_stops_the_ledger() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("ledger.sqlite");
    open(&path).await.close().await;
    let trigger = "CREATE TRIGGER full BEFORE INSERT ON payments WHEN NEW.record LIKE \
                   '%\"from\":\"0x0909090909090909090909090909090909090909\"%' BEGIN SELECT RAISE(FAIL, 'disk full'); END";
    sqlite_file::change(&path, trigger);

    let ledger = open(&path).await;
    let fine = reserve(&ledger, record(1, 1)).await;
    let lost = reserve(&ledger, record(9, 1)).await;
    // These steps do not wait for the disk; `Produce` does.
    let _ = admit(&ledger, &lost, 10, 1).await;
    let _ = ledger.advance(&lost.key, &lost.step(FulfilmentStep::Start { until: 0 })).await;
    let produced = ledger
        .advance(&lost.key, &lost.step(FulfilmentStep::Produce { charged: None, body: None, at: 0, response: None }))
        .await;
    assert!(matches!(produced, Err(LedgerError::Backend(_))), "{produced:?}");
    assert!(matches!(ledger.reserve(&record(1, 2)).await, Err(LedgerError::Backend(_))));
    assert!(matches!(admit(&ledger, &fine, 10, 1).await, Err(LedgerError::Backend(_))));
    assert!(
        matches!(ledger.get(&record(9, 1).key).await, Err(LedgerError::Backend(_))),
        "what is not durable is not shown"
    );
    drop(ledger);
}

/// A submission changes the nonce of its account and its payments. The write fails between the two.
#[tokio::test]
async fn failed_write_leaves_nothing_of_its_step_in_the_file() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("ledger.sqlite");
    let ledger = open(&path).await;
    let lease = reserve(&ledger, record(1, 1)).await;
    produce(&ledger, &lease).await;
    ledger.close().await;
    let trigger = "CREATE TRIGGER full BEFORE INSERT ON progress BEGIN SELECT RAISE(FAIL, 'disk full'); END";
    sqlite_file::change(&path, trigger);
    let ledger = open(&path).await;
    assert_failed(ledger.submit(submission(0, &[lease.key])).await);
    ledger.close().await;
    let file = Connection::open(&path).unwrap();
    let transactions: i64 = file.query_row("SELECT COUNT(*) FROM nonces", [], |row| row.get(0)).unwrap();
    assert_eq!(transactions, 0);
}

#[tokio::test]
async fn what_is_owed_survives_a_restart() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("ledger.sqlite");
    let limit = U256::from(19);
    let ledger = open(&path).await;
    for nonce in [1, 4] {
        let paid = reserve(&ledger, record(1, nonce)).await;
        produce(&ledger, &paid).await;
        ledger
            .advance(&paid.key, &SettlementStep::Settle { transaction: hash(1), block: None, fee: None }.into())
            .await
            .unwrap();
    }
    let (first, second) = (reserve(&ledger, record(1, 2)).await, reserve(&ledger, record(1, 3)).await);
    produce(&ledger, &first).await;
    produce(&ledger, &second).await;
    ledger.advance(&first.key, &first.step(FulfilmentStep::Defer { limit })).await.unwrap();
    ledger.close().await;
    let ledger = open(&path).await;
    assert!(ledger.get(&first.key).await.unwrap().unwrap().deferred);
    let defer = async || ledger.advance(&second.key, &second.step(FulfilmentStep::Defer { limit })).await;
    assert!(matches!(defer().await, Err(LedgerError::NoCredit)), "what the earlier process deferred is owed");
    ledger
        .advance(&first.key, &SettlementStep::Settle { transaction: hash(2), block: None, fee: None }.into())
        .await
        .unwrap();
    defer().await.expect("what was settled is there, and nothing is owed");
}

#[tokio::test]
async fn restored_records_count_towards_the_bound() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("ledger.sqlite");
    let bounded = async || {
        let clock = Arc::new(ManualClock::at(CLOCK_START));
        SqliteLedger::open_with(&path, ResponseLimits::default(), 2, clock).await.unwrap()
    };
    let ledger = bounded().await;
    reserve(&ledger, record(1, 1)).await;
    reserve(&ledger, record(1, 2)).await;
    ledger.close().await;
    let refused = bounded().await.reserve(&record(1, 3)).await;
    assert!(matches!(refused, Err(LedgerError::Full)), "{refused:?}");
}

/// All fields, except those of the process that worked on the payment or settled it.
#[tokio::test]
async fn a_record_is_the_same_after_a_restart() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("ledger.sqlite");
    let mut everything = with_id(17, record(1, 1));
    everything.request = Fingerprint { digest: hash(1), names_caller: true };
    everything.written = Some(Fingerprint { digest: hash(18), names_caller: true });
    everything.body = Some(BodyDigest { length: 2, digest: hash(3), complete: true });
    everything.fulfilment = Fulfilment::Delivered;
    everything.settlement = Settlement::Unknown;
    everything.last_failure = Some(Reason::InsufficientFunds);
    everything.failures = 4;
    everything.attempts = 5;
    everything.replays = 6;
    everything.block_seen = Some(7);
    everything.transactions = vec![hash(8), hash(9)];
    everything.admitted = true;
    everything.deferred = true;
    everything.epoch = 10;
    everything.reserved_at = 11;
    everything.produced_at = Some(12);
    everything.settling = Some(Settling { by: 13, until: 14 });
    everything.settled_at = Some(15);
    everything.fee = Some(U256::from(16));
    let ledger = open(&path).await;
    ledger.reserve(&everything).await.unwrap();
    ledger.close().await;
    let read = open(&path).await.get(&everything.key).await.unwrap().expect("kept");
    assert_eq!(read.request, everything.request);
    let mut expected = everything;
    (expected.lease_until, expected.settling) = (0, None);
    assert_eq!(format!("{read:?}"), format!("{expected:?}"));
}

#[tokio::test]
async fn failure_counts_survive_a_restart() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("ledger.sqlite");
    let ledger = open(&path).await;
    let lease = reserve(&ledger, record(1, 1)).await;
    produce(&ledger, &lease).await;
    for _ in 0..2 {
        let fail = SettlementStep::Fail { reason: Reason::InsufficientFunds, by: 1, known_transactions: Vec::new() };
        ledger.advance(&lease.key, &fail.into()).await.unwrap();
    }
    ledger.close().await;

    let ledger = open(&path).await;
    assert_eq!(ledger.get(&lease.key).await.unwrap().unwrap().failures, 2);
    let known = |failures| JournaledTransaction {
        known_failures: [(lease.key, failures)].into(),
        ..submission(0, &[lease.key])
    };
    for outdated in [0, 1] {
        assert!(matches!(ledger.submit(known(outdated)).await, Err(LedgerError::NotDue(_))));
    }
    ledger.submit(known(2)).await.unwrap();
}

/// A transaction of process 1.
fn submission(nonce: u64, payments: &[PaymentKey]) -> JournaledTransaction {
    JournaledTransaction {
        sender: SENDER,
        nonce,
        hash: hash(1),
        raw: vec![1; 3].into(),
        payments: payments.to_vec(),
        by: 1,
        at: CLOCK_START,
        until: CLOCK_START + 30,
        known_failures: Default::default(),
    }
}

const SENDER: Sender = Sender { network: Network::BASE, address: Address::repeat_byte(0x5e) };

/// Makes all later writes to the file fail.
fn forbid_writing(path: &Path) {
    let mut sql = String::new();
    for table in ["payments", "progress", "nonces", "responses"] {
        for write in ["INSERT", "UPDATE", "DELETE"] {
            sql += &format!(
                "CREATE TRIGGER {write}_{table} BEFORE {write} ON {table} BEGIN SELECT RAISE(FAIL, 'disk full'); END;"
            );
        }
    }
    sqlite_file::change(path, &sql);
}

/// Makes a call on a full disk, for a payment that `prepare` has prepared, and returns its result.
async fn on_a_full_disk<T>(
    prepare: impl AsyncFn(&SqliteLedger, &Lease),
    call: impl AsyncFn(&SqliteLedger, &Lease) -> Result<T, LedgerError>,
) -> Result<T, LedgerError> {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("ledger.sqlite");
    let ledger = open(&path).await;
    let lease = reserve(&ledger, record(1, 1)).await;
    prepare(&ledger, &lease).await;
    ledger.close().await;
    forbid_writing(&path);
    let ledger = open(&path).await;
    let result = call(&ledger, &lease).await;
    // Wait for the writer to let go of the file before it is removed.
    ledger.close().await;
    result
}

#[track_caller]
fn assert_failed<T>(result: Result<T, LedgerError>) {
    match result {
        Err(LedgerError::Backend(_)) => {}
        Ok(_) => panic!("done, it says, and it is not on disk"),
        Err(error) => panic!("{error:?}"),
    }
}

async fn produced(ledger: &SqliteLedger, lease: &Lease) {
    produce(ledger, lease).await;
}

/// Whose payer has paid as much before.
async fn produced_on_credit(ledger: &SqliteLedger, lease: &Lease) {
    settled(ledger, &reserve(ledger, record(1, 2)).await).await;
    produce(ledger, lease).await;
}

async fn settled(ledger: &SqliteLedger, lease: &Lease) {
    produce(ledger, lease).await;
    let settle = SettlementStep::Settle { transaction: hash(1), block: Some(1), fee: None };
    ledger.advance(&lease.key, &settle.into()).await.unwrap();
}

async fn submitted(ledger: &SqliteLedger, lease: &Lease) {
    produce(ledger, lease).await;
    ledger.submit(submission(0, &[lease.key])).await.unwrap();
}

async fn working(ledger: &SqliteLedger, lease: &Lease) {
    admit(ledger, lease, 10, 1).await.unwrap();
    ledger.advance(&lease.key, &lease.step(FulfilmentStep::Start { until: 0 })).await.unwrap();
}

async fn reserved(_: &SqliteLedger, _: &Lease) {}

#[tokio::test]
async fn submit_waits_for_the_disk() {
    assert_failed(
        on_a_full_disk(produced, async |ledger, lease| ledger.submit(submission(0, &[lease.key])).await).await,
    );
    assert_failed(on_a_full_disk(reserved, async |ledger, _| ledger.submit(submission(0, &[])).await).await);
}

#[tokio::test]
async fn steps_of_settlement_wait_for_the_disk() {
    let settling = Settling { by: 1, until: CLOCK_START + 30 };
    let reason = Reason::InsufficientFunds;
    for step in [
        SettlementStep::Delegate { settling, known_failures: 0 },
        SettlementStep::Claim(settling),
        SettlementStep::Fail { reason: reason.clone(), by: 1, known_transactions: Vec::new() },
        SettlementStep::Invalidate { reason },
        SettlementStep::MarkUnknown,
        SettlementStep::Submit { transaction: hash(1) },
    ] {
        assert_failed(
            on_a_full_disk(produced, async |ledger, lease| ledger.advance(&lease.key, &step.clone().into()).await)
                .await,
        );
    }
    let undo = SettlementStep::Reorg;
    assert_failed(
        on_a_full_disk(settled, async |ledger, lease| ledger.advance(&lease.key, &undo.clone().into()).await).await,
    );
}

#[tokio::test]
async fn steps_of_fulfilment_wait_for_the_disk() {
    let start = FulfilmentStep::Start { until: 0 };
    let release = FulfilmentStep::Release { body: None };
    let produce = FulfilmentStep::Produce { charged: None, body: None, at: CLOCK_START, response: Some(answer()) };
    let due = FulfilmentStep::Admit { funds: None, due: true };
    let defer = FulfilmentStep::Defer { limit: U256::from(10) };
    assert_failed(
        on_a_full_disk(working, async |ledger, lease| ledger.advance(&lease.key, &lease.step(produce.clone())).await)
            .await,
    );
    assert_failed(
        on_a_full_disk(working, async |ledger, lease| ledger.advance(&lease.key, &lease.step(release.clone())).await)
            .await,
    );
    assert_failed(
        on_a_full_disk(working, async |ledger, lease| ledger.advance(&lease.key, &lease.step(start.clone())).await)
            .await,
    );
    assert_failed(
        on_a_full_disk(reserved, async |ledger, lease| ledger.advance(&lease.key, &lease.step(due.clone())).await)
            .await,
    );
    assert_failed(
        on_a_full_disk(produced_on_credit, async |ledger, lease| {
            ledger.advance(&lease.key, &lease.step(defer.clone())).await
        })
        .await,
    );
}

#[tokio::test]
async fn other_changes_wait_for_the_disk() {
    let take_over = async |ledger: &SqliteLedger, lease: &Lease| {
        let (now, until) = (CLOCK_START + 31, CLOCK_START + 90);
        ledger.advance(&lease.key, &PaymentStep::TakeOver { seen: 0, now, until }).await
    };
    assert_failed(on_a_full_disk(working, take_over).await);
    assert_failed(on_a_full_disk(reserved, async |ledger, lease| ledger.discard(lease).await).await);
    let store = async |ledger: &SqliteLedger, lease: &Lease| ledger.store_response(&lease.key, answer()).await;
    assert_failed(on_a_full_disk(produced, store).await);
    assert_failed(
        on_a_full_disk(produced, async |ledger, lease| ledger.advance(&lease.key, &PaymentStep::Replay).await).await,
    );
    let free = async |ledger: &SqliteLedger, _: &Lease| {
        // The process that had it before is gone: its number is 0 now.
        ledger.free_nonce(&SENDER, 0, 0).await
    };
    assert_failed(on_a_full_disk(submitted, free).await);
    assert_failed(on_a_full_disk(submitted, async |ledger, _| ledger.forget_nonces(&SENDER, 1).await).await);
}

#[tokio::test]
async fn reads_wait_for_the_disk() {
    /// Makes a change that nobody waits for.
    async fn noted(ledger: &SqliteLedger) -> Record {
        let other = record(2, 1);
        ledger.reserve(&other).await.unwrap();
        other
    }
    let get = async |ledger: &SqliteLedger, _: &Lease| ledger.get(&noted(ledger).await.key).await;
    assert_failed(on_a_full_disk(submitted, get).await);
    let reserve_again = async |ledger: &SqliteLedger, _: &Lease| ledger.reserve(&noted(ledger).await).await;
    assert_failed(on_a_full_disk(submitted, reserve_again).await);
    let response = async |ledger: &SqliteLedger, lease: &Lease| {
        noted(ledger).await;
        ledger.response(&lease.key).await
    };
    assert_failed(on_a_full_disk(submitted, response).await);
    let submissions = async |ledger: &SqliteLedger, _: &Lease| {
        noted(ledger).await;
        ledger.submissions(&SENDER, 0).await
    };
    assert_failed(on_a_full_disk(submitted, submissions).await);
    let list = async |ledger: &SqliteLedger, _: &Lease| {
        noted(ledger).await;
        ledger.list(&Listing::default()).await
    };
    assert_failed(on_a_full_disk(submitted, list).await);
    let counts = async |ledger: &SqliteLedger, _: &Lease| {
        noted(ledger).await;
        ledger.counts().await
    };
    assert_failed(on_a_full_disk(submitted, counts).await);
}
