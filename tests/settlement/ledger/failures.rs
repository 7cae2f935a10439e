//! The contract's fourth part: a payment that was recorded as failed is settled only if the payer asks again, whatever waits in
//! the queues of other processes.

use alloy_primitives::Bytes;
use tower_x402::ledger::{Sender, Submission};

use super::*;

on_every_ledger! {
    a_payment_in_line_is_not_submitted_after_it_was_recorded_as_failed,
    a_payment_that_failed_is_submitted_for_whoever_asks_again,
    a_payment_that_failed_is_entrusted_only_to_whoever_knows_of_it,
    a_payment_that_another_process_submitted_is_not_recorded_as_failed,
    a_payment_that_another_process_entrusted_is_not_recorded_as_failed,
    of_a_failure_and_a_submission_at_once_the_ledger_takes_one,
}

const SENDER: Sender = Sender { network: Network::BASE, address: Address::repeat_byte(0x5e) };
/// Until when the process that submits keeps others away.
const UNTIL: u64 = CLOCK_START + 30;

/// A submission by a process that knows of so many failures of each of its payments.
fn submission(by: u64, nonce: u64, payments: &[PaymentKey], known_failures: u32) -> Submission {
    Submission {
        sender: SENDER,
        nonce,
        hash: B256::from(U256::from(1_000 * by + nonce)),
        raw: Bytes::from_static(b"signed"),
        payments: payments.to_vec(),
        by,
        at: CLOCK_START,
        until: UNTIL,
        known_failures: payments.iter().map(|key| (*key, known_failures)).collect(),
    }
}

fn fail(by: u64) -> SettlementStep {
    SettlementStep::Fail { reason: Reason::UnexpectedSettleError, by }
}

fn entrust(by: u64, until: u64, known_failures: u32) -> SettlementStep {
    SettlementStep::Delegate { settling: Settling { by, until }, known_failures }
}

/// A payment whose work is done.
async fn due(ledger: &dyn Ledger, payer: u8, nonce: u64) -> PaymentKey {
    let lease = reserve(ledger, record(payer, nonce)).await;
    produce(ledger, &lease).await;
    lease.key
}

async fn a_payment_in_line_is_not_submitted_after_it_was_recorded_as_failed(
    TestLedger { ledger, directory: _directory, .. }: TestLedger,
) {
    let (failed, other) = (due(&*ledger, 1, 1).await, due(&*ledger, 2, 1).await);
    let in_line = submission(1, 0, &[failed, other], 0);
    ledger.settle(&failed, &fail(2)).await.unwrap();
    let refused = ledger.submit(in_line.clone()).await;
    assert!(matches!(&refused, Err(LedgerError::NotDue(keys)) if *keys == [failed]), "{refused:?}");
    // A process that does not say what it knows knows of none.
    let refused = ledger.submit(Submission { known_failures: Default::default(), ..in_line }).await;
    assert!(matches!(&refused, Err(LedgerError::NotDue(keys)) if *keys == [failed]), "{refused:?}");
    assert!(ledger.submissions(&SENDER, 0).await.unwrap().is_empty());
    let record = ledger.get(&failed).await.unwrap().unwrap();
    assert_eq!((record.settlement, record.failures), (Settlement::Due, 1));
    assert_eq!(record.last_failure, Some(Reason::UnexpectedSettleError));
    assert!(record.transactions.is_empty());
    assert_eq!(state(&*ledger, &other).await.1, Settlement::Due);
    ledger.submit(submission(1, 0, &[other], 0)).await.expect("the rest is submitted without it");
}

async fn a_payment_that_failed_is_submitted_for_whoever_asks_again(
    TestLedger { ledger, directory: _directory, .. }: TestLedger,
) {
    let (again, fresh) = (due(&*ledger, 1, 1).await, due(&*ledger, 2, 1).await);
    for failures in 1..=2 {
        ledger.settle(&again, &fail(0)).await.unwrap();
        for outdated in 0..failures {
            let refused = ledger.submit(submission(1, 0, &[again], outdated)).await;
            assert!(matches!(refused, Err(LedgerError::NotDue(_))), "{outdated} of {failures}: {refused:?}");
        }
    }
    let mut both = submission(1, 0, &[again, fresh], 0);
    both.known_failures.insert(again, 2);
    ledger.submit(both).await.unwrap();
    for key in [again, fresh] {
        assert_eq!(state(&*ledger, &key).await.1, Settlement::Submitted);
    }
    let [listed] = &ledger.submissions(&SENDER, 0).await.unwrap()[..] else { panic!("there is one") };
    assert!(listed.known_failures.is_empty(), "not kept");
}

async fn a_payment_that_failed_is_entrusted_only_to_whoever_knows_of_it(
    TestLedger { ledger, directory: _directory, .. }: TestLedger,
) {
    let key = due(&*ledger, 1, 1).await;
    ledger.settle(&key, &fail(2)).await.unwrap();
    let refused = ledger.settle(&key, &entrust(1, UNTIL, 0)).await;
    assert!(matches!(refused, Err(LedgerError::InvalidTransition(_))), "{refused:?}");
    let record = ledger.get(&key).await.unwrap().unwrap();
    assert_eq!((record.settlement, record.settling), (Settlement::Due, None));
    ledger.settle(&key, &entrust(1, UNTIL, 1)).await.unwrap();
    assert_eq!(state(&*ledger, &key).await.1, Settlement::Unknown);
}

async fn a_payment_that_another_process_submitted_is_not_recorded_as_failed(
    TestLedger { ledger, clock, directory: _directory }: TestLedger,
) {
    let key = due(&*ledger, 1, 1).await;
    ledger.submit(submission(1, 0, &[key], 0)).await.unwrap();
    not_recorded_as_failed_by_others(&*ledger, &clock, &key, Settlement::Submitted).await;
}

async fn a_payment_that_another_process_entrusted_is_not_recorded_as_failed(
    TestLedger { ledger, clock, directory: _directory }: TestLedger,
) {
    let key = due(&*ledger, 1, 1).await;
    ledger.settle(&key, &entrust(1, UNTIL, 0)).await.unwrap();
    not_recorded_as_failed_by_others(&*ledger, &clock, &key, Settlement::Unknown).await;
}

/// Of a payment that process 1 has.
async fn not_recorded_as_failed_by_others(
    ledger: &dyn Ledger,
    clock: &ManualClock,
    key: &PaymentKey,
    settlement: Settlement,
) {
    let refused_to_others = async || {
        for by in [2, 0] {
            let refused = ledger.settle(key, &fail(by)).await;
            assert!(matches!(refused, Err(LedgerError::InvalidTransition(_))), "by {by}: {refused:?}");
        }
        let record = ledger.get(key).await.unwrap().unwrap();
        assert_eq!((record.settlement, record.failures, record.last_failure), (settlement, 0, None));
    };
    refused_to_others().await;
    ledger.settle(key, &SettlementStep::MarkUnknown).await.unwrap();
    let refused = ledger.settle(key, &fail(2)).await;
    assert!(matches!(refused, Err(LedgerError::InvalidTransition(_))), "out of sight: {refused:?}");
    clock.advance(UNTIL - CLOCK_START);
    let refused = ledger.settle(key, &fail(2)).await;
    assert!(matches!(refused, Err(LedgerError::InvalidTransition(_))), "in the last second: {refused:?}");
    ledger.settle(key, &fail(1)).await.expect("the process that has it knows");
    assert_eq!(state(ledger, key).await.1, Settlement::Due);
    ledger.submit(submission(1, 0, &[*key], 1)).await.unwrap();
    clock.advance(1);
    ledger.settle(key, &fail(2)).await.expect("its time ran out");
}

async fn of_a_failure_and_a_submission_at_once_the_ledger_takes_one(
    TestLedger { ledger, directory: _directory, .. }: TestLedger,
) {
    let keys = join_all((0..40).map(|n| due(&*ledger, n % 7 + 1, n.into()))).await;
    race_failures_with_submissions(&ledger, &ledger, &keys).await;
}

/// One process submits each of these payments while another one records that it failed.
pub(super) async fn race_failures_with_submissions(
    submitting: &Arc<dyn Ledger>,
    failing: &Arc<dyn Ledger>,
    keys: &[PaymentKey],
) {
    let tasks = keys.iter().zip(0..).map(|(key, nonce)| {
        let (submitting, failing, key) = (submitting.clone(), failing.clone(), *key);
        let submit = tokio::spawn(async move { submitting.submit(submission(1, nonce, &[key], 0)).await });
        let fail = tokio::spawn(async move { failing.settle(&key, &fail(2)).await });
        async move { (key, submit.await.unwrap(), fail.await.unwrap()) }
    });
    for (key, submitted, failed) in join_all(tasks).await {
        let record = submitting.get(&key).await.unwrap().unwrap();
        match (&submitted, &failed) {
            (Ok(()), Err(LedgerError::InvalidTransition(_))) => {
                assert_eq!((record.settlement, record.last_failure), (Settlement::Submitted, None));
            }
            (Err(LedgerError::NotDue(_)), Ok(())) => {
                assert_eq!((record.settlement, record.failures), (Settlement::Due, 1));
                assert!(record.transactions.is_empty());
            }
            both => panic!("{both:?}"),
        }
    }
}
