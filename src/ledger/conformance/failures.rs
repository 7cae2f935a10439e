//! A payment whose failure is on record settles only if it is presented again (point 10 of the contract).

use alloy_primitives::Bytes as RawTransaction;

use super::*;

/// Until when other processes leave a submitted payment alone.
const UNTIL: u64 = START + 30;

/// A transaction of a process that knows of this many failures of each payment.
fn submission(by: u64, nonce: u64, payments: &[PaymentKey], known_failures: u32) -> JournaledTransaction {
    JournaledTransaction {
        sender: SENDER,
        nonce,
        hash: B256::from(U256::from(1_000 * by + nonce)),
        raw: RawTransaction::from_static(b"signed"),
        payments: payments.to_vec(),
        by,
        at: START,
        until: UNTIL,
        known_failures: payments.iter().map(|key| (*key, known_failures)).collect(),
    }
}

fn delegate(by: u64, until: u64, known_failures: u32) -> SettlementStep {
    SettlementStep::Delegate { settling: Settling { by, until }, known_failures }
}

pub async fn a_queued_payment_that_failed_is_not_submitted(ledger: Arc<dyn Ledger>, _: Arc<ManualClock>) {
    let (failed, other) = (due(&*ledger, 1, 1).await, due(&*ledger, 2, 1).await);
    let queued = submission(1, 0, &[failed, other], 0);
    ledger.advance(&failed, &fail(2, &[]).into()).await.unwrap();
    let refused = ledger.submit(queued.clone()).await;
    assert!(matches!(&refused, Err(LedgerError::NotDue(keys)) if *keys == [failed]), "{refused:?}");
    // A transaction that names no failures knows of none.
    let refused = ledger.submit(JournaledTransaction { known_failures: Default::default(), ..queued }).await;
    assert!(matches!(&refused, Err(LedgerError::NotDue(keys)) if *keys == [failed]), "{refused:?}");
    assert!(ledger.submissions(&SENDER, 0).await.unwrap().is_empty());
    let record = ledger.get(&failed).await.unwrap().unwrap();
    assert_eq!((record.settlement, record.failures), (Settlement::Due, 1));
    assert_eq!(record.last_failure, Some(Reason::UnexpectedSettleError));
    assert!(record.transactions.is_empty());
    assert_eq!(state(&*ledger, &other).await.1, Settlement::Due);
    ledger.submit(submission(1, 0, &[other], 0)).await.expect("the others are submitted without it");
}

pub async fn a_failed_payment_is_submitted_if_the_failure_is_known(ledger: Arc<dyn Ledger>, _: Arc<ManualClock>) {
    let (again, fresh) = (due(&*ledger, 1, 1).await, due(&*ledger, 2, 1).await);
    for failures in 1..=2 {
        ledger.advance(&again, &fail(0, &[]).into()).await.unwrap();
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
    assert!(listed.known_failures.is_empty(), "not stored");
}

pub async fn a_failed_payment_is_delegated_only_if_the_failure_is_known(ledger: Arc<dyn Ledger>, _: Arc<ManualClock>) {
    let key = due(&*ledger, 1, 1).await;
    ledger.advance(&key, &fail(2, &[]).into()).await.unwrap();
    let refused = ledger.advance(&key, &delegate(1, UNTIL, 0).into()).await;
    assert!(matches!(refused, Err(LedgerError::InvalidTransition(_))), "{refused:?}");
    let record = ledger.get(&key).await.unwrap().unwrap();
    assert_eq!((record.settlement, record.settling), (Settlement::Due, None));
    ledger.advance(&key, &delegate(1, UNTIL, 1).into()).await.unwrap();
    assert_eq!(state(&*ledger, &key).await.1, Settlement::Unknown);
}

pub async fn a_payment_submitted_by_another_process_does_not_fail(ledger: Arc<dyn Ledger>, clock: Arc<ManualClock>) {
    let key = due(&*ledger, 1, 1).await;
    ledger.submit(submission(1, 0, &[key], 0)).await.unwrap();
    assert_others_cannot_fail(&*ledger, &clock, &key, Settlement::Submitted).await;
}

pub async fn a_payment_delegated_by_another_process_does_not_fail(ledger: Arc<dyn Ledger>, clock: Arc<ManualClock>) {
    let key = due(&*ledger, 1, 1).await;
    ledger.advance(&key, &delegate(1, UNTIL, 0).into()).await.unwrap();
    assert_others_cannot_fail(&*ledger, &clock, &key, Settlement::Unknown).await;
}

/// Checks this for a payment that process 1 settles.
async fn assert_others_cannot_fail(ledger: &dyn Ledger, clock: &ManualClock, key: &PaymentKey, settlement: Settlement) {
    let refused_to_others = async || {
        for by in [2, 0] {
            let refused = ledger.advance(key, &fail(by, &[]).into()).await;
            assert!(matches!(refused, Err(LedgerError::InvalidTransition(_))), "by {by}: {refused:?}");
        }
        let record = ledger.get(key).await.unwrap().unwrap();
        assert_eq!((record.settlement, record.failures, record.last_failure), (settlement, 0, None));
    };
    refused_to_others().await;
    ledger.advance(key, &SettlementStep::MarkUnknown.into()).await.unwrap();
    let refused = ledger.advance(key, &fail(2, &[]).into()).await;
    assert!(matches!(refused, Err(LedgerError::InvalidTransition(_))), "unknown: {refused:?}");
    clock.advance(UNTIL - START);
    let refused = ledger.advance(key, &fail(2, &[]).into()).await;
    assert!(matches!(refused, Err(LedgerError::InvalidTransition(_))), "in the last second: {refused:?}");
    let known = ledger.get(key).await.unwrap().unwrap().transactions;
    ledger.advance(key, &fail(1, &known).into()).await.expect("the process that settles it knows");
    assert_eq!(state(ledger, key).await.1, Settlement::Due);
    let again = submission(1, 0, &[*key], 1);
    ledger.submit(again.clone()).await.unwrap();
    clock.advance(1);
    let refused = ledger.advance(key, &fail(2, &[again.hash]).into()).await;
    assert!(
        matches!(refused, Err(LedgerError::InvalidTransition(_))),
        "it has not asked what became of it: {refused:?}"
    );
    let claim = SettlementStep::Claim(Settling { by: 2, until: UNTIL + 31 });
    ledger.advance(key, &claim.clone().into()).await.expect("the other's claim has ended");
    clock.advance(60);
    let refused = ledger.advance(key, &fail(1, &[again.hash]).into()).await;
    assert!(matches!(refused, Err(LedgerError::InvalidTransition(_))), "another has had it since: {refused:?}");
    ledger.advance(key, &fail(2, &[again.hash]).into()).await.expect("nobody has had it since");
}

/// Two tasks of one process: one finds that the payment was not executed, and the other submits it again before that is on record.
pub async fn a_failure_that_does_not_know_the_newest_transaction_is_refused(
    ledger: Arc<dyn Ledger>,
    _: Arc<ManualClock>,
) {
    let key = due(&*ledger, 1, 1).await;
    let (first, second) = (submission(1, 0, &[key], 0), submission(1, 1, &[key], 0));
    ledger.submit(first.clone()).await.unwrap();
    ledger.submit(second.clone()).await.unwrap();
    for known in [&[][..], &[first.hash]] {
        let refused = ledger.advance(&key, &fail(1, known).into()).await;
        assert!(matches!(refused, Err(LedgerError::InvalidTransition(_))), "{known:?}: {refused:?}");
        let record = ledger.get(&key).await.unwrap().unwrap();
        assert_eq!((record.settlement, record.failures, record.last_failure), (Settlement::Submitted, 0, None));
    }
    ledger.advance(&key, &fail(1, &[second.hash]).into()).await.expect("it knows the newest");
    let refused = ledger.advance(&key, &fail(1, &[first.hash]).into()).await;
    assert!(matches!(refused, Err(LedgerError::InvalidTransition(_))), "it is out of date: {refused:?}");
    assert_eq!(ledger.get(&key).await.unwrap().unwrap().failures, 1);
}

pub async fn a_concurrent_failure_and_submission_exclude_each_other(ledger: Arc<dyn Ledger>, _: Arc<ManualClock>) {
    let keys = join_all((0..40).map(|n| due(&*ledger, n % 7 + 1, n.into()))).await;
    race_failures_with_submissions(&ledger, &keys).await;
}

/// Submits each of these payments as one process while another records that it failed, and checks that one of the two happens.
async fn race_failures_with_submissions(ledger: &Arc<dyn Ledger>, keys: &[PaymentKey]) {
    let tasks = keys.iter().zip(0..).map(|(key, nonce)| {
        let (submitting, failing, key) = (ledger.clone(), ledger.clone(), *key);
        let submit = tokio::spawn(async move { submitting.submit(submission(1, nonce, &[key], 0)).await });
        let fail = tokio::spawn(async move { failing.advance(&key, &fail(2, &[]).into()).await });
        async move { (key, submit.await.unwrap(), fail.await.unwrap()) }
    });
    for (key, submitted, failed) in join_all(tasks).await {
        let record = ledger.get(&key).await.unwrap().unwrap();
        match (&submitted, &failed) {
            (Ok(()), Err(LedgerError::InvalidTransition(_))) => {
                assert_eq!((record.settlement, record.last_failure), (Settlement::Submitted, None));
            }
            (Err(LedgerError::NotDue(_)), Ok(_)) => {
                assert_eq!((record.settlement, record.failures), (Settlement::Due, 1));
                assert!(record.transactions.is_empty());
            }
            both => panic!("{both:?}"),
        }
    }
}
