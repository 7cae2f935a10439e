//! Every backend against the contract (`ledger::conformance`), and what each promises beyond it.

mod backends;
mod channels;
mod credit;
mod durable;
#[cfg(target_os = "linux")]
mod power_cut;
#[cfg(feature = "test-postgres")]
mod replicas;

use std::{future::Future, path::Path, sync::Arc};

use alloy_primitives::{Address, U256};
use backends::on_every_ledger;
use proptest::{prelude::*, sample::select};
use support::around_ledger::{Around, AroundLedger, Call};
use tower_x402::{
    ManualClock, Network,
    ledger::{
        CreditLimit, Fulfilment, FulfilmentStep, Lease, Ledger, LedgerError, MemoryLedger, Record, Reservation,
        ResponseLimits, Settlement, SettlementStep, Settling, SqliteLedger, StoredResponse,
        conformance::{START as CLOCK_START, admit, hash, produce, record, reserve, run, with_id},
    },
    payment::{Funds, PaymentKey},
    protocol::Reason,
};

on_every_ledger! { tower_x402::ledger::conformance, ledger;
    one_of_many_concurrent_reservations_wins,
    a_payment_takes_every_step,
    a_settled_payment_never_fails,
    an_unknown_outcome_stays_in_flight,
    a_lost_lease_changes_nothing,
    start_extends_the_lease,
    a_released_payment_that_is_leased_anew_has_one_owner,
    an_earlier_lease_is_void_after_later_ones,
    one_of_many_concurrent_takeovers_wins,
    an_outdated_epoch_takes_nothing_over,
    payments_in_flight_stay_within_the_balance,
    a_due_payment_that_is_released_stays_in_flight,
    the_longest_body_digest_is_kept,
    what_is_charged_is_what_is_settled_and_nothing_is_final,
    only_what_is_charged_stays_in_flight,
    a_settlement_of_nothing_is_final_in_one_step,
    repeated_steps_keep_the_first_times,
    a_payment_that_may_have_been_sent_is_not_discarded,
    a_dead_payment_is_not_in_flight,
    a_leased_payment_is_not_removed,
    the_latest_block_seen_is_kept,
    a_balance_read_before_a_transfer_is_stale,
    a_transfer_is_not_counted_twice,
    a_balance_read_between_two_transfers_counts_the_later_one,
    a_payment_that_was_worked_on_is_not_discarded,
    a_discarded_payment_can_be_reserved_again,
    responses_are_kept_and_replays_counted,
    records_are_removed_when_their_outcome_is_known,
    one_of_many_payments_with_one_id_wins,
    an_id_is_free_when_its_record_is_removed,
    an_id_is_of_one_payment_whatever_was_signed_for_it,
    permits_are_in_flight_with_what_else_is_paid_in_their_token,
    one_of_many_processes_gets_a_nonce,
    a_submission_is_atomic,
    a_freed_nonce_is_open_to_all,
    a_nonce_held_too_long_may_be_replaced,
    the_newest_transaction_of_a_nonce_is_listed,
    nonces_in_final_blocks_are_removed,
    a_payment_is_settled_by_one_process_at_a_time,
    a_claim_holds_to_the_last_second,
    a_delegated_payment_is_unknown_until_it_is_reported,
    a_reorged_payment_is_due_and_in_flight,
    a_reorged_payment_is_idle_unless_it_is_worked_on,
    payments_are_listed_in_order_by_page,
    a_leased_or_claimed_payment_is_not_idle,
    a_complete_response_is_stored_with_its_step,
    a_queued_payment_that_failed_is_not_submitted,
    a_failed_payment_is_submitted_if_the_failure_is_known,
    a_failed_payment_is_delegated_only_if_the_failure_is_known,
    a_payment_submitted_by_another_process_does_not_fail,
    a_payment_delegated_by_another_process_does_not_fail,
    a_concurrent_failure_and_submission_exclude_each_other,
    a_failure_that_does_not_know_the_newest_transaction_is_refused,
    credit_needs_a_history,
    what_a_payer_owes_stays_within_its_limit,
    concurrent_deferrals_stay_within_the_total,
    an_overdue_payment_ends_credit_until_it_settles,
    a_dead_payment_is_owed_until_it_is_removed,
    a_reorged_payment_is_owed_again,
    a_reorged_payment_is_no_history,
    a_charge_of_nothing_is_no_history,
    only_what_is_charged_is_owed,
    only_produced_due_payments_are_deferred_and_once,
    a_deferred_payment_is_idle_at_once,
}

/// When the payments of these tests expire, in Unix seconds.
const VALID_BEFORE: u64 = CLOCK_START + 60;

/// Forwards every call, as a ledger that logs or counts does.
struct Forwarding;

impl Around for Forwarding {
    async fn around<T: Send>(
        &self,
        _: Call<'_>,
        work: impl Future<Output = Result<T, LedgerError>> + Send,
    ) -> Result<T, LedgerError> {
        work.await
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_ledger_that_wraps_another_passes_the_tests_of_the_contract() {
    run(|clock| async move {
        let ledger = Arc::new(MemoryLedger::with(ResponseLimits::default(), 10_000, clock));
        let ledger: Arc<dyn Ledger> = Arc::new(AroundLedger { ledger, around: Forwarding });
        ledger
    })
    .await;
}

/// For the ledgers in memory and in a file, which remove records when others are reserved.
#[tokio::test]
async fn expired_records_make_room_in_a_full_ledger() {
    let clock = Arc::new(ManualClock::at(CLOCK_START));
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("ledger.sqlite");
    let memory = Arc::new(MemoryLedger::with(ResponseLimits::default(), 4, clock.clone()));
    let sqlite = SqliteLedger::open_with(&path, ResponseLimits::default(), 4, clock.clone()).await.unwrap();
    let ledgers: [Arc<dyn Ledger>; 2] = [memory, Arc::new(sqlite)];
    for ledger in &ledgers {
        for nonce in 0..4 {
            reserve(&**ledger, record(1, nonce)).await;
        }
        assert!(matches!(ledger.reserve(&record(2, 0)).await, Err(LedgerError::Full)));
    }
    for ledger in &ledgers {
        assert!(matches!(ledger.reserve(&record(2, 1)).await, Err(LedgerError::Full)));
        let Ok(Some(first)) = ledger.get(&record(1, 0).key).await else { panic!("kept") };
        ledger.discard(&first.lease()).await.unwrap();
        reserve(&**ledger, record(1, 0)).await;
        assert!(matches!(ledger.reserve(&record(2, 1)).await, Err(LedgerError::Full)), "one for one");
    }
    clock.advance(VALID_BEFORE - CLOCK_START + 7_200);
    for ledger in &ledgers {
        // The payer that filled the ledger never returns.
        reserve(&**ledger, record(2, 0)).await;
        assert!(ledger.get(&record(1, 0).key).await.unwrap().is_none());
    }
    drop(ledgers);
    let sqlite = reopened(&path, clock).await;
    assert_eq!(sqlite.counts().await.unwrap().pending, 1, "forgotten in the file, too");
}

/// For the ledger in memory: a database removes records from time to time.
#[tokio::test]
async fn records_are_removed_after_their_time_if_their_outcome_is_known() {
    let clock = Arc::new(ManualClock::at(CLOCK_START));
    let ledger = MemoryLedger::with(ResponseLimits::default(), 10_000, clock.clone());
    let [last, open] = [1, 2].map(async |nonce| {
        let lease = reserve(&ledger, record(1, nonce)).await;
        produce(&ledger, &lease).await;
        lease.key
    });
    let (last, open) = (last.await, open.await);
    let settle = SettlementStep::Settle { transaction: hash(1), block: Some(1), fee: None };
    let others_come = async |nonce| drop(ledger.reserve(&record(1, nonce)).await.unwrap());
    let is_known = async |key| ledger.get(&key).await.unwrap().is_some();
    ledger.settle(&last, &settle).await.unwrap();
    ledger.settle(&last, &SettlementStep::Finalize).await.unwrap();
    ledger.settle(&open, &SettlementStep::MarkUnknown).await.unwrap();
    clock.advance(VALID_BEFORE + 900 - CLOCK_START);
    others_come(10).await;
    assert!(is_known(last).await, "a late reorganization finds it");
    clock.advance(1);
    others_come(11).await;
    assert_eq!((is_known(last).await, is_known(open).await), (false, true));
    // A record that could not be removed is looked at again.
    ledger.settle(&open, &settle).await.unwrap();
    ledger.settle(&open, &SettlementStep::Finalize).await.unwrap();
    clock.advance(901);
    others_come(12).await;
    assert!(!is_known(open).await);
}

/// Opens the file once it is no longer in use.
async fn reopened(path: &Path, clock: Arc<ManualClock>) -> SqliteLedger {
    let mut ledger = None;
    support::eventually::eventually("whoever had the file lets go of it", async || {
        ledger = SqliteLedger::open_with(path, ResponseLimits::default(), 4, clock.clone()).await.ok();
        ledger.is_some()
    })
    .await;
    ledger.unwrap()
}

fn any_step() -> impl Strategy<Value = Result<FulfilmentStep, SettlementStep>> {
    let funds = Some(Funds { balance: U256::from(1_000), block: 1 });
    let reason = Reason::InsufficientFunds;
    select(vec![
        Ok(FulfilmentStep::Admit { funds, due: false }),
        Ok(FulfilmentStep::Admit { funds, due: true }),
        Ok(FulfilmentStep::Start { until: 0 }),
        Ok(FulfilmentStep::Release { body: None }),
        Ok(FulfilmentStep::Produce { charged: None, body: None, at: 1, response: None }),
        Ok(FulfilmentStep::Defer { limit: CreditLimit { total: U256::MAX, per_payer: U256::MAX, history: 0 } }),
        Ok(FulfilmentStep::Deliver),
        Err(SettlementStep::Submit { transaction: hash(1) }),
        Err(SettlementStep::Settle { transaction: hash(1), block: Some(1), fee: None }),
        Err(SettlementStep::Finalize),
        Err(SettlementStep::Fail { reason: reason.clone(), by: 0, known_transactions: vec![hash(1)] }),
        Err(SettlementStep::Invalidate { reason }),
        Err(SettlementStep::MarkUnknown),
        Err(SettlementStep::Reorg),
        Err(SettlementStep::Claim(Settling { by: 1, until: CLOCK_START + 9 })),
        Err(SettlementStep::Claim(Settling { by: 2, until: CLOCK_START + 9 })),
    ])
}

proptest! {
    #[test]
    fn no_order_of_steps_breaks_the_contract(steps in prop::collection::vec(any_step(), 0..40)) {
        let mut record = record(1, 1);
        for step in steps {
            let before = record.clone();
            let taken = match &step {
                Ok(step) => record.fulfil(step),
                Err(step) => record.settle(step, CLOCK_START),
            };
            let paid = |record: &Record| record.settlement.paid_by().is_some();
            let undone = matches!((&step, before.settlement), (Err(SettlementStep::Reorg), Settlement::Settled { .. }));
            prop_assert!(!paid(&before) || paid(&record) || undone, "paid, then unpaid by {:?}", step);
            prop_assert!(!undone || record.admitted, "undone, and not in flight");
            prop_assert!(before.settlement != Settlement::Dead || record.settlement == Settlement::Dead, "raised from the dead");
            let answered = |record: &Record| matches!(record.fulfilment, Fulfilment::Produced | Fulfilment::Delivered);
            prop_assert!(!answered(&before) || answered(&record), "answered, then not, by {:?}", step);
            prop_assert!(!answered(&before) || record.attempts == before.attempts, "worked on again by {:?}", step);
            prop_assert!(record.fulfilment != Fulfilment::Working || record.admitted || paid(&record)
                || matches!(record.settlement, Settlement::Dead), "works unadmitted after {:?}", step);
            prop_assert!(record.transactions.len() >= before.transactions.len(), "forgot a transaction");
            prop_assert!(!paid(&record) || !record.admitted, "paid and in flight");
            prop_assert!(!record.deferred || answered(&record), "deferred before there is an answer");
            prop_assert!(record.owed().is_zero() || !paid(&record), "paid and owed");
            if taken.is_err() {
                prop_assert_eq!(format!("{:?}", before), format!("{:?}", record), "refused, yet changed");
            }
        }
    }
}
