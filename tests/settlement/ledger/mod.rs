//! The ledger's contract, run against every backend. A new backend is one line in `on_every_ledger!`.

mod backends;
mod credit;
mod durable;
mod failures;
#[cfg(feature = "test-postgres")]
mod replicas;
mod settling;

use std::{path::Path, sync::Arc};

use alloy_primitives::{Address, B256, U256};
use backends::{CLOCK_START, TestLedger, on_every_ledger};
use bytes::Bytes;
use futures_util::future::join_all;
use http::{HeaderMap, StatusCode};
use proptest::{prelude::*, sample::select};
use tower_x402::{
    ManualClock, Network,
    eip3009::{Authorization, PaymentSignature},
    ledger::{
        BodyDigest, Counts, CreditLimit, Fingerprint, Fulfilment, FulfilmentStep, Lease, Ledger, LedgerError,
        MemoryLedger, Record, Reservation, ResponseLimits, Settlement, SettlementStep, Settling, SqliteLedger,
        StoredResponse,
    },
    payment::{Funds, PaymentKey, Terms, Window, precheck},
    protocol::{ExactOffer, ExactPayload, PaymentFlow, Reason},
};

on_every_ledger! {
    of_many_who_reserve_one_wins,
    a_payment_that_goes_well_takes_every_step,
    what_was_paid_is_never_unpaid,
    an_unknown_outcome_is_not_a_failed_one,
    who_lost_the_lease_changes_nothing,
    work_that_begins_late_has_a_whole_lease,
    what_was_released_and_leased_anew_is_its_owners,
    who_had_it_before_has_nothing_of_a_later_reservation,
    of_many_who_take_over_one_wins,
    who_decided_on_an_older_record_takes_nothing_over,
    what_is_in_flight_stays_within_the_balance,
    a_due_payment_that_is_released_stays_in_flight,
    the_digest_that_covers_most_of_the_body_is_kept,
    what_was_noted_first_stays,
    what_may_have_been_sent_is_not_discarded,
    a_dead_payment_is_out_of_flight,
    what_is_worked_on_is_not_forgotten,
    the_block_at_which_a_payment_was_unused_is_kept,
    a_balance_read_before_a_transfer_still_counts_it,
    a_balance_read_after_a_transfer_does_not_count_it_again,
    a_balance_read_between_two_transfers_counts_the_later_one,
    what_was_worked_on_is_not_discarded,
    a_discarded_reservation_may_be_made_again,
    responses_are_kept_and_replays_counted,
    records_are_kept_while_they_matter_and_no_longer,
    of_many_payments_with_one_id_one_wins,
    an_id_is_free_again_when_its_record_is_gone,
}

const VALID_BEFORE: u64 = CLOCK_START + 60;

fn record(payer: u8, nonce: u64) -> Record {
    let offer = ExactOffer {
        asset: Network::BASE.usdc().unwrap(),
        amount: U256::from(10),
        pay_to: Address::repeat_byte(0xee),
        max_timeout_seconds: 60,
        flow: PaymentFlow::Authorization,
    };
    let authorization = Authorization {
        from: Address::repeat_byte(payer),
        to: offer.pay_to,
        value: offer.amount,
        valid_after: U256::ZERO,
        valid_before: U256::from(VALID_BEFORE),
        nonce: B256::from(U256::from(nonce)),
    };
    let payload = ExactPayload { signature: PaymentSignature::from(vec![1; 65]), authorization };
    let window = Window { remaining: 0, skew: 0 };
    let payment = precheck(Arc::new(Terms::new(offer)), payload, window, CLOCK_START).unwrap();
    let request = Fingerprint { digest: B256::ZERO, names_caller: false };
    Record::new(&payment, request, CLOCK_START, CLOCK_START + 30)
}

fn with_id(id: u8, record: Record) -> Record {
    Record { id: Some(B256::repeat_byte(id)), ..record }
}

async fn reserve(ledger: &dyn Ledger, record: Record) -> Lease {
    match ledger.reserve(&record).await.unwrap() {
        Reservation::New(lease) => lease,
        Reservation::Known(record) => panic!("known already: {record:?}"),
    }
}

async fn admit(ledger: &dyn Ledger, lease: &Lease, balance: u64, block: u64) -> Result<(), LedgerError> {
    let funds = Some(Funds { balance: U256::from(balance), block });
    ledger.fulfil(lease, &FulfilmentStep::Admit { funds, due: false }).await
}

async fn produce(ledger: &dyn Ledger, lease: &Lease) {
    admit(ledger, lease, 1_000, 1).await.unwrap();
    ledger.fulfil(lease, &FulfilmentStep::Start { until: 0 }).await.unwrap();
    ledger.fulfil(lease, &FulfilmentStep::Produce { body: None, at: CLOCK_START, response: None }).await.unwrap();
}

fn hash(n: u8) -> B256 {
    B256::repeat_byte(n)
}

async fn state(ledger: &dyn Ledger, key: &PaymentKey) -> (Fulfilment, Settlement) {
    let record = ledger.get(key).await.unwrap().expect("a record");
    (record.fulfilment, record.settlement)
}

async fn of_many_who_reserve_one_wins(TestLedger { ledger, directory: _directory, .. }: TestLedger) {
    let tasks = (0..100).map(|_| {
        let ledger = ledger.clone();
        tokio::spawn(async move { matches!(ledger.reserve(&record(1, 1)).await.unwrap(), Reservation::New(_)) })
    });
    let won = join_all(tasks).await.into_iter().filter(|won| *won.as_ref().unwrap()).count();
    assert_eq!(won, 1);
    assert_eq!(ledger.counts().await.unwrap(), Counts { pending: 1, ..Counts::default() });
}

async fn a_payment_that_goes_well_takes_every_step(TestLedger { ledger, directory: _directory, .. }: TestLedger) {
    let lease = reserve(&*ledger, record(1, 1)).await;
    let key = lease.key;
    produce(&*ledger, &lease).await;
    assert_eq!(state(&*ledger, &key).await, (Fulfilment::Produced, Settlement::Due));
    ledger.settle(&key, &SettlementStep::Submit { transaction: hash(1) }).await.unwrap();
    ledger.settle(&key, &SettlementStep::Submit { transaction: hash(2) }).await.unwrap();
    ledger.settle(&key, &SettlementStep::Settle { transaction: hash(1), block: Some(9), fee: None }).await.unwrap();
    ledger.fulfil(&lease, &FulfilmentStep::Deliver).await.unwrap();
    ledger.settle(&key, &SettlementStep::Finalize).await.unwrap();
    let record = ledger.get(&key).await.unwrap().unwrap();
    assert_eq!(record.fulfilment, Fulfilment::Delivered);
    assert_eq!(record.settlement, Settlement::Final { transaction: hash(1), block: Some(9) });
    assert_eq!(record.transactions, [hash(1), hash(2)], "every submission stays on record");
    assert_eq!((record.attempts, record.block_seen), (1, Some(1)));
    assert_eq!(ledger.counts().await.unwrap(), Counts { settled: 1, ..Counts::default() });
}

async fn what_was_paid_is_never_unpaid(TestLedger { ledger, directory: _directory, .. }: TestLedger) {
    let lease = reserve(&*ledger, record(1, 1)).await;
    produce(&*ledger, &lease).await;
    ledger.settle(&lease.key, &SettlementStep::Settle { transaction: hash(1), block: None, fee: None }).await.unwrap();
    for step in [
        SettlementStep::Fail { reason: Reason::InsufficientFunds, by: 0 },
        SettlementStep::Invalidate { reason: Reason::ValidBefore },
        SettlementStep::MarkUnknown,
        SettlementStep::Submit { transaction: hash(2) },
    ] {
        let error = ledger.settle(&lease.key, &step.clone()).await.unwrap_err();
        assert!(matches!(error, LedgerError::InvalidTransition(_)), "{step:?}: {error}");
    }
    ledger.settle(&lease.key, &SettlementStep::Finalize).await.unwrap();
    let again =
        ledger.settle(&lease.key, &SettlementStep::Settle { transaction: hash(3), block: None, fee: None }).await;
    assert!(matches!(again, Err(LedgerError::InvalidTransition(_))), "final is final");
    assert_eq!(state(&*ledger, &lease.key).await.1.paid_by(), Some(hash(1)));
}

async fn an_unknown_outcome_is_not_a_failed_one(TestLedger { ledger, directory: _directory, .. }: TestLedger) {
    let lease = reserve(&*ledger, record(1, 1)).await;
    produce(&*ledger, &lease).await;
    ledger.settle(&lease.key, &SettlementStep::Submit { transaction: hash(1) }).await.unwrap();
    ledger.settle(&lease.key, &SettlementStep::MarkUnknown).await.unwrap();
    assert_eq!(ledger.counts().await.unwrap(), Counts { unknown: 1, ..Counts::default() });
    let other = reserve(&*ledger, record(1, 2)).await;
    let error = admit(&*ledger, &other, 19, 2).await.unwrap_err();
    assert!(matches!(error, LedgerError::BalancePending), "what is unknown may be in flight: {error}");
    ledger
        .settle(&lease.key, &SettlementStep::Settle { transaction: hash(1), block: Some(2), fee: None })
        .await
        .unwrap();
    assert_eq!(ledger.counts().await.unwrap(), Counts { settled: 1, pending: 1, ..Counts::default() });
}

async fn who_lost_the_lease_changes_nothing(TestLedger { ledger, directory: _directory, .. }: TestLedger) {
    let old = reserve(&*ledger, record(1, 1)).await;
    admit(&*ledger, &old, 1_000, 1).await.unwrap();
    ledger.fulfil(&old, &FulfilmentStep::Start { until: 0 }).await.unwrap();
    assert_eq!(ledger.take_over(&old.key, 0, CLOCK_START, CLOCK_START + 90).await.unwrap(), None, "it still runs");
    let new = ledger.take_over(&old.key, 0, CLOCK_START + 31, CLOCK_START + 90).await.unwrap().expect("it ran out");
    for step in [
        FulfilmentStep::Release { body: None },
        FulfilmentStep::Produce { body: None, at: CLOCK_START, response: None },
        FulfilmentStep::Start { until: 0 },
        FulfilmentStep::Deliver,
    ] {
        assert!(matches!(ledger.fulfil(&old, &step).await, Err(LedgerError::LeaseLost)));
    }
    assert!(matches!(ledger.discard(&old).await, Err(LedgerError::LeaseLost)));
    assert_eq!(state(&*ledger, &old.key).await.0, Fulfilment::Working);
    ledger.fulfil(&new, &FulfilmentStep::Start { until: 0 }).await.unwrap();
    assert_eq!(ledger.get(&old.key).await.unwrap().unwrap().attempts, 2, "the dead owner's attempt counts");
}

async fn work_that_begins_late_has_a_whole_lease(TestLedger { ledger, directory: _directory, .. }: TestLedger) {
    let lease = reserve(&*ledger, record(1, 1)).await;
    admit(&*ledger, &lease, 1_000, 1).await.unwrap();
    let until = CLOCK_START + 300;
    ledger.fulfil(&lease, &FulfilmentStep::Start { until }).await.unwrap();
    assert_eq!(ledger.take_over(&lease.key, 0, until, until + 90).await.unwrap(), None, "it still runs");
}

async fn what_was_released_and_leased_anew_is_its_owners(TestLedger { ledger, directory: _directory, .. }: TestLedger) {
    let first = reserve(&*ledger, record(1, 1)).await;
    admit(&*ledger, &first, 1_000, 1).await.unwrap();
    ledger.fulfil(&first, &FulfilmentStep::Start { until: 0 }).await.unwrap();
    ledger.fulfil(&first, &FulfilmentStep::Release { body: None }).await.unwrap();
    let (now, until) = (CLOCK_START, CLOCK_START + 90);
    let second = ledger.take_over(&first.key, 0, now, until).await.unwrap().expect("released");
    assert_eq!(ledger.take_over(&first.key, 1, now, until).await.unwrap(), None, "the second owner's lease runs");
    assert!(matches!(ledger.discard(&second).await, Err(LedgerError::InvalidTransition(_))), "its attempt counts");
    ledger.fulfil(&second, &FulfilmentStep::Release { body: None }).await.unwrap();
    assert!(ledger.take_over(&first.key, 1, now, until).await.unwrap().is_some(), "given back");
}

async fn who_had_it_before_has_nothing_of_a_later_reservation(
    TestLedger { ledger, directory: _directory, .. }: TestLedger,
) {
    let first = reserve(&*ledger, record(1, 1)).await;
    let late = CLOCK_START + 31;
    let second = ledger.take_over(&first.key, 0, late, late + 30).await.unwrap().expect("it ran out");
    // Forgotten, it could be reserved with the lease that the first owner believes to have.
    assert!(matches!(ledger.discard(&second).await, Err(LedgerError::InvalidTransition(_))));
    ledger.fulfil(&second, &FulfilmentStep::Release { body: None }).await.unwrap();
    let third = ledger.take_over(&first.key, 1, late, late + 30).await.unwrap().expect("released");
    admit(&*ledger, &third, 1_000, 1).await.unwrap();
    for step in [FulfilmentStep::Start { until: 0 }, FulfilmentStep::Release { body: None }] {
        assert!(matches!(ledger.fulfil(&first, &step).await, Err(LedgerError::LeaseLost)));
    }
    ledger.fulfil(&third, &FulfilmentStep::Start { until: 0 }).await.unwrap();
}

async fn of_many_who_take_over_one_wins(TestLedger { ledger, directory: _directory, .. }: TestLedger) {
    let lease = reserve(&*ledger, record(1, 1)).await;
    ledger.fulfil(&lease, &FulfilmentStep::Release { body: None }).await.unwrap();
    let tasks = (0..50).map(|_| {
        let ledger = ledger.clone();
        tokio::spawn(async move { ledger.take_over(&lease.key, 0, CLOCK_START, CLOCK_START + 90).await.unwrap() })
    });
    let won: Vec<Lease> = join_all(tasks).await.into_iter().filter_map(Result::unwrap).collect();
    assert_eq!(won, [Lease { key: lease.key, epoch: 1 }]);
}

async fn who_decided_on_an_older_record_takes_nothing_over(
    TestLedger { ledger, directory: _directory, .. }: TestLedger,
) {
    let first = reserve(&*ledger, record(1, 1)).await;
    ledger.fulfil(&first, &FulfilmentStep::Release { body: None }).await.unwrap();
    let (now, until) = (CLOCK_START, CLOCK_START + 90);
    let second = ledger.take_over(&first.key, 0, now, until).await.unwrap().expect("released");
    ledger.fulfil(&second, &FulfilmentStep::Release { body: None }).await.unwrap();
    for seen in [0, 2] {
        assert_eq!(ledger.take_over(&first.key, seen, now, until).await.unwrap(), None, "epoch {seen}");
    }
    assert!(ledger.take_over(&first.key, 1, now, until).await.unwrap().is_some());
}

async fn what_is_in_flight_stays_within_the_balance(TestLedger { ledger, directory: _directory, .. }: TestLedger) {
    let tasks = (0..50).map(|nonce| {
        let ledger = ledger.clone();
        tokio::spawn(async move {
            let lease = reserve(&*ledger, record(1, nonce)).await;
            admit(&*ledger, &lease, 100, 1).await.is_ok()
        })
    });
    let admitted: Vec<bool> = join_all(tasks).await.into_iter().map(Result::unwrap).collect();
    assert_eq!(admitted.iter().filter(|admitted| **admitted).count(), 10, "ten times ten");
    let stranger = reserve(&*ledger, record(2, 1)).await;
    admit(&*ledger, &stranger, 10, 1).await.expect("another payer has a balance of its own");

    let next = reserve(&*ledger, record(1, 100)).await;
    assert!(matches!(admit(&*ledger, &next, 100, 1).await, Err(LedgerError::InsufficientFunds)));
    let one = admitted.iter().position(|admitted| *admitted).unwrap() as u64;
    let released = Lease { key: record(1, one).key, epoch: 0 };
    ledger.fulfil(&released, &FulfilmentStep::Release { body: None }).await.unwrap();
    admit(&*ledger, &next, 100, 1).await.expect("a released attempt is out of flight");
}

/// Whoever pays first may be charged though the work that it paid for came to nothing.
async fn a_due_payment_that_is_released_stays_in_flight(TestLedger { ledger, directory: _directory, .. }: TestLedger) {
    let (upfront, later) = (reserve(&*ledger, record(1, 1)).await, reserve(&*ledger, record(1, 2)).await);
    let funds = Some(Funds { balance: U256::from(20), block: 1 });
    ledger.fulfil(&upfront, &FulfilmentStep::Admit { funds, due: true }).await.unwrap();
    admit(&*ledger, &later, 20, 1).await.unwrap();
    for lease in [&upfront, &later] {
        ledger.fulfil(lease, &FulfilmentStep::Release { body: None }).await.unwrap();
    }
    let released = async |lease: &Lease| ledger.get(&lease.key).await.unwrap().unwrap();
    assert!(released(&upfront).await.admitted, "it is due");
    assert!(!released(&later).await.admitted);
    let next = reserve(&*ledger, record(1, 3)).await;
    let refused = admit(&*ledger, &next, 19, 1).await;
    assert!(matches!(refused, Err(LedgerError::InsufficientFunds)), "{refused:?}");
    admit(&*ledger, &next, 20, 1).await.expect("only what is due is in flight");
}

/// An attempt that read little of the body must not open the payment to other bodies.
async fn the_digest_that_covers_most_of_the_body_is_kept(TestLedger { ledger, directory: _directory, .. }: TestLedger) {
    let digest = |length, complete| Some(BodyDigest { length, digest: hash(length as u8), complete });
    let (short, long, whole) = (digest(3, false), digest(10, false), digest(10, true));
    let lease = reserve(&*ledger, record(1, 1)).await;
    let body = async || ledger.get(&lease.key).await.unwrap().unwrap().body;
    admit(&*ledger, &lease, 10, 1).await.unwrap();
    for (read, kept) in [(long, long), (short, long), (None, long), (whole, whole), (long, whole)] {
        ledger.fulfil(&lease, &FulfilmentStep::Start { until: 0 }).await.unwrap();
        ledger.fulfil(&lease, &FulfilmentStep::Release { body: read }).await.unwrap();
        assert_eq!(body().await, kept, "after {read:?}");
        admit(&*ledger, &lease, 10, 1).await.unwrap();
    }
    ledger.fulfil(&lease, &FulfilmentStep::Start { until: 0 }).await.unwrap();
    ledger.fulfil(&lease, &FulfilmentStep::Produce { body: short, at: CLOCK_START, response: None }).await.unwrap();
    assert_eq!(body().await, whole);
}

async fn what_was_noted_first_stays(TestLedger { ledger, clock, directory: _directory }: TestLedger) {
    let lease = reserve(&*ledger, record(1, 1)).await;
    let key = lease.key;
    admit(&*ledger, &lease, 10, 1).await.unwrap();
    ledger.fulfil(&lease, &FulfilmentStep::Start { until: 0 }).await.unwrap();
    let early = ledger.fulfil(&lease, &FulfilmentStep::Deliver).await;
    assert!(matches!(early, Err(LedgerError::InvalidTransition(_))), "there is nothing to deliver: {early:?}");
    let produce = FulfilmentStep::Produce { body: None, at: CLOCK_START + 3, response: None };
    ledger.fulfil(&lease, &produce).await.unwrap();
    for _ in 0..2 {
        ledger.settle(&key, &SettlementStep::Submit { transaction: hash(1) }).await.unwrap();
    }
    let settle = |block, fee| SettlementStep::Settle { transaction: hash(1), block: Some(block), fee };
    ledger.settle(&key, &settle(7, Some(U256::from(5)))).await.unwrap();
    clock.advance(10);
    ledger.settle(&key, &settle(8, None)).await.unwrap();
    let record = ledger.get(&key).await.unwrap().unwrap();
    assert_eq!(record.settlement.block(), Some(8), "the block may be another one after a reorganization");
    assert_eq!((record.settled_at, record.fee), (Some(CLOCK_START), Some(U256::from(5))));
    assert_eq!((record.produced_at, record.transactions), (Some(CLOCK_START + 3), vec![hash(1)]));
}

/// What is paid after that block is credited (I8), also if a later attempt was admitted without a look at the chain.
async fn the_block_at_which_a_payment_was_unused_is_kept(TestLedger { ledger, directory: _directory, .. }: TestLedger) {
    let lease = reserve(&*ledger, record(1, 1)).await;
    let seen = async || ledger.get(&lease.key).await.unwrap().unwrap().block_seen;
    admit(&*ledger, &lease, 10, 5).await.unwrap();
    ledger.fulfil(&lease, &FulfilmentStep::Release { body: None }).await.unwrap();
    ledger.fulfil(&lease, &FulfilmentStep::Admit { funds: None, due: false }).await.unwrap();
    assert_eq!(seen().await, Some(5));
    admit(&*ledger, &lease, 10, 7).await.unwrap();
    assert_eq!(seen().await, Some(7));
}

async fn a_balance_read_before_a_transfer_still_counts_it(
    TestLedger { ledger, directory: _directory, .. }: TestLedger,
) {
    let paid = reserve(&*ledger, record(1, 1)).await;
    admit(&*ledger, &paid, 10, 5).await.unwrap();
    ledger.fulfil(&paid, &FulfilmentStep::Start { until: 0 }).await.unwrap();
    ledger.fulfil(&paid, &FulfilmentStep::Produce { body: None, at: CLOCK_START, response: None }).await.unwrap();
    ledger
        .settle(&paid.key, &SettlementStep::Settle { transaction: hash(1), block: Some(7), fee: None })
        .await
        .unwrap();
    let next = reserve(&*ledger, record(1, 2)).await;
    let stale = admit(&*ledger, &next, 10, 6).await;
    assert!(matches!(stale, Err(LedgerError::Stale)), "the balance of block 6 is spent in block 7");
    admit(&*ledger, &next, 10, 7).await.expect("the balance of block 7 is what is left");
}

async fn a_balance_read_between_two_transfers_counts_the_later_one(
    TestLedger { ledger, directory: _directory, .. }: TestLedger,
) {
    for (payer, blocks) in [(1, [7, 9]), (2, [9, 7])] {
        for (nonce, block) in (1..).zip(blocks) {
            let lease = reserve(&*ledger, record(payer, nonce)).await;
            produce(&*ledger, &lease).await;
            let settle = SettlementStep::Settle { transaction: hash(1), block: Some(block), fee: None };
            ledger.settle(&lease.key, &settle).await.unwrap();
        }
        let next = reserve(&*ledger, record(payer, 3)).await;
        assert!(matches!(admit(&*ledger, &next, 29, 6).await, Err(LedgerError::Stale)), "before both");
        assert!(matches!(admit(&*ledger, &next, 19, 8).await, Err(LedgerError::Stale)), "between the two");
        admit(&*ledger, &next, 20, 8).await.expect("one of them is seen");
    }
}

/// 200 authorizations on a balance for 200: the last one must not be refused because a balance that already shows what
/// the others paid is charged for them again.
async fn a_balance_read_after_a_transfer_does_not_count_it_again(
    TestLedger { ledger, directory: _directory, .. }: TestLedger,
) {
    let paid = reserve(&*ledger, record(1, 1)).await;
    admit(&*ledger, &paid, 20, 5).await.unwrap();
    ledger.fulfil(&paid, &FulfilmentStep::Start { until: 0 }).await.unwrap();
    ledger.fulfil(&paid, &FulfilmentStep::Produce { body: None, at: CLOCK_START, response: None }).await.unwrap();
    ledger.settle(&paid.key, &SettlementStep::Submit { transaction: hash(1) }).await.unwrap();
    let next = reserve(&*ledger, record(1, 2)).await;
    let early = admit(&*ledger, &next, 10, 7).await;
    assert!(matches!(early, Err(LedgerError::BalancePending)), "included already, or not yet?");
    let too_little = reserve(&*ledger, record(1, 3)).await;
    assert!(
        matches!(admit(&*ledger, &too_little, 9, 7).await, Err(LedgerError::InsufficientFunds)),
        "whatever becomes of the other"
    );
    ledger
        .settle(&paid.key, &SettlementStep::Settle { transaction: hash(1), block: Some(7), fee: None })
        .await
        .unwrap();
    admit(&*ledger, &next, 10, 7).await.expect("block 7 shows what is left");
}

async fn what_was_worked_on_is_not_discarded(TestLedger { ledger, directory: _directory, .. }: TestLedger) {
    let lease = reserve(&*ledger, record(1, 1)).await;
    admit(&*ledger, &lease, 10, 1).await.unwrap();
    ledger.fulfil(&lease, &FulfilmentStep::Start { until: 0 }).await.unwrap();
    assert!(matches!(ledger.discard(&lease).await, Err(LedgerError::InvalidTransition(_))));
    let upfront = reserve(&*ledger, record(2, 1)).await;
    ledger.fulfil(&upfront, &FulfilmentStep::Admit { funds: None, due: true }).await.unwrap();
    ledger.settle(&upfront.key, &SettlementStep::Submit { transaction: hash(1) }).await.unwrap();
    assert!(matches!(ledger.discard(&upfront).await, Err(LedgerError::InvalidTransition(_))));
}

async fn what_may_have_been_sent_is_not_discarded(TestLedger { ledger, directory: _directory, .. }: TestLedger) {
    let leases = [1, 2, 3].map(async |payer| reserve(&*ledger, record(payer, 1)).await);
    let [entrusted, failed, released] = <[Lease; 3]>::try_from(join_all(leases).await).unwrap();
    for lease in [&entrusted, &failed] {
        ledger.fulfil(lease, &FulfilmentStep::Admit { funds: None, due: true }).await.unwrap();
    }
    let settling = Settling { by: 1, until: CLOCK_START + 30 };
    ledger.settle(&entrusted.key, &SettlementStep::Delegate { settling, known_failures: 0 }).await.unwrap();
    ledger.settle(&failed.key, &SettlementStep::Submit { transaction: hash(1) }).await.unwrap();
    ledger.settle(&failed.key, &SettlementStep::Fail { reason: Reason::InsufficientFunds, by: 1 }).await.unwrap();
    ledger.fulfil(&released, &FulfilmentStep::Release { body: None }).await.unwrap();
    for lease in [entrusted, failed, released] {
        assert!(matches!(ledger.discard(&lease).await, Err(LedgerError::InvalidTransition(_))));
        assert!(ledger.get(&lease.key).await.unwrap().is_some());
    }
}

async fn a_dead_payment_is_out_of_flight(TestLedger { ledger, directory: _directory, .. }: TestLedger) {
    let dead = reserve(&*ledger, record(1, 1)).await;
    produce(&*ledger, &dead).await;
    let next = reserve(&*ledger, record(1, 2)).await;
    assert!(matches!(admit(&*ledger, &next, 19, 1).await, Err(LedgerError::InsufficientFunds)));
    ledger.settle(&dead.key, &SettlementStep::Invalidate { reason: Reason::ValidBefore }).await.unwrap();
    admit(&*ledger, &next, 10, 1).await.expect("it is never executed");
}

async fn what_is_worked_on_is_not_forgotten(TestLedger { ledger, clock, directory: _directory }: TestLedger) {
    let lease = reserve(&*ledger, record(1, 1)).await;
    admit(&*ledger, &lease, 1_000, 1).await.unwrap();
    let until = VALID_BEFORE + 7_200;
    ledger.fulfil(&lease, &FulfilmentStep::Start { until }).await.unwrap();
    let others_come = async |nonces: std::ops::Range<u64>| {
        for nonce in nonces {
            let _ = ledger.reserve(&record(1, nonce)).await.unwrap();
        }
    };
    clock.advance(VALID_BEFORE + 3_600 - CLOCK_START);
    others_come(10..30).await;
    assert!(ledger.get(&lease.key).await.unwrap().is_some(), "its lease runs");
    clock.advance(7_200);
    others_come(30..60).await;
    assert!(ledger.get(&lease.key).await.unwrap().is_none());
}

async fn a_discarded_reservation_may_be_made_again(TestLedger { ledger, directory: _directory, .. }: TestLedger) {
    let lease = reserve(&*ledger, record(1, 1)).await;
    admit(&*ledger, &lease, 10, 1).await.unwrap();
    ledger.discard(&lease).await.unwrap();
    assert!(ledger.get(&lease.key).await.unwrap().is_none());
    let again = reserve(&*ledger, record(1, 1)).await;
    admit(&*ledger, &again, 10, 1).await.expect("nothing of the first one is in flight");
}

async fn responses_are_kept_and_replays_counted(TestLedger { ledger, clock, directory: _directory }: TestLedger) {
    let lease = reserve(&*ledger, record(1, 1)).await;
    let response = |size: usize| StoredResponse {
        status: StatusCode::CREATED,
        headers: HeaderMap::from_iter([("x-a".parse().unwrap(), "1".parse().unwrap())]),
        body: Bytes::from(vec![7; size]),
        trailers: Some(HeaderMap::new()),
        stored_at: CLOCK_START,
    };
    ledger.store_response(&lease.key, response(ledger.response_limit() + 1)).await.unwrap();
    assert!(ledger.response(&lease.key).await.unwrap().is_none(), "beyond the bound, dropped");
    let largest = reserve(&*ledger, record(2, 1)).await;
    ledger.store_response(&largest.key, response(ledger.response_limit())).await.unwrap();
    assert!(ledger.response(&largest.key).await.unwrap().is_some(), "at the bound, kept");
    ledger.store_response(&lease.key, response(3)).await.unwrap();
    ledger.store_response(&lease.key, response(4)).await.unwrap();
    let stored = ledger.response(&lease.key).await.unwrap().expect("kept");
    assert_eq!(
        (stored.status, stored.body.len(), &stored.headers["x-a"]),
        (StatusCode::CREATED, 3, &"1".parse::<http::HeaderValue>().unwrap())
    );
    assert!(stored.trailers.is_some());
    for count in 1..=3 {
        assert_eq!(ledger.count_replay(&lease.key).await.unwrap(), count);
    }
    clock.advance(3_600);
    assert!(ledger.response(&lease.key).await.unwrap().is_none(), "aged out");
}

async fn records_are_kept_while_they_matter_and_no_longer(
    TestLedger { ledger, clock, directory: _directory }: TestLedger,
) {
    let settled = reserve(&*ledger, record(1, 1)).await;
    produce(&*ledger, &settled).await;
    ledger
        .settle(&settled.key, &SettlementStep::Settle { transaction: hash(1), block: Some(1), fee: None })
        .await
        .unwrap();
    let unknown = reserve(&*ledger, record(1, 2)).await;
    produce(&*ledger, &unknown).await;
    ledger.settle(&unknown.key, &SettlementStep::Submit { transaction: hash(2) }).await.unwrap();
    clock.advance(60 + 300);
    for nonce in 10..30 {
        let _ = ledger.reserve(&record(1, nonce)).await.unwrap();
    }
    assert!(ledger.get(&settled.key).await.unwrap().is_some(), "a reorganization may still undo it");
    clock.advance(7_200);
    for nonce in 30..60 {
        let _ = ledger.reserve(&record(1, nonce)).await.unwrap();
    }
    assert!(ledger.get(&settled.key).await.unwrap().is_none());
    assert!(ledger.get(&unknown.key).await.unwrap().is_some(), "its fate is open");
    assert_eq!(ledger.counts().await.unwrap().settled, 1, "what was settled stays counted");
}

async fn of_many_payments_with_one_id_one_wins(TestLedger { ledger, directory: _directory, .. }: TestLedger) {
    let tasks = (0..50).map(|nonce| {
        let ledger = ledger.clone();
        tokio::spawn(async move { (nonce, ledger.reserve(&with_id(7, record(1, nonce))).await) })
    });
    let results: Vec<_> = join_all(tasks).await.into_iter().map(Result::unwrap).collect();
    let won = |(_, result): &&(u64, Result<Reservation, LedgerError>)| matches!(result, Ok(Reservation::New(_)));
    let winners: Vec<u64> = results.iter().filter(won).map(|(nonce, _)| *nonce).collect();
    let &[winner] = &winners[..] else { panic!("{} won", winners.len()) };
    let winner = record(1, winner).key;
    for (nonce, result) in results {
        let key = record(1, nonce).key;
        if key == winner {
            continue;
        }
        match result {
            Err(LedgerError::IdTaken { key }) => assert_eq!(key, winner, "who has it is told"),
            other => panic!("{other:?}"),
        }
        assert!(ledger.get(&key).await.unwrap().is_none(), "nothing is left of who lost");
    }
    assert_eq!(ledger.counts().await.unwrap(), Counts { pending: 1, ..Counts::default() });
    let again =
        ledger.reserve(&with_id(7, record(1, u64::try_from(U256::from_be_bytes(winner.nonce.0)).unwrap()))).await;
    assert!(
        matches!(again, Ok(Reservation::Known(known)) if known.id == Some(B256::repeat_byte(7))),
        "its own payment"
    );

    reserve(&*ledger, with_id(8, record(1, 100))).await;
    reserve(&*ledger, with_id(7, record(2, 100))).await;
    for nonce in 101..103 {
        reserve(&*ledger, record(1, nonce)).await;
    }
}

async fn an_id_is_free_again_when_its_record_is_gone(TestLedger { ledger, clock, directory: _directory }: TestLedger) {
    let discarded = reserve(&*ledger, with_id(1, record(1, 1))).await;
    ledger.discard(&discarded).await.unwrap();
    let released = reserve(&*ledger, with_id(1, record(1, 2))).await;
    ledger.fulfil(&released, &FulfilmentStep::Release { body: None }).await.unwrap();
    let other = ledger.reserve(&with_id(1, record(1, 3))).await;
    assert!(matches!(other, Err(LedgerError::IdTaken { key }) if key == released.key), "released is not gone");
    clock.advance(7_200);
    reserve(&*ledger, with_id(1, record(1, 4))).await;
    assert!(ledger.get(&released.key).await.unwrap().is_none(), "aged out");
}

/// In memory and in a file: they forget when something comes.
#[tokio::test]
async fn what_has_expired_makes_room_for_whoever_comes() {
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
        // Who filled it never comes again.
        reserve(&**ledger, record(2, 0)).await;
        assert!(ledger.get(&record(1, 0).key).await.unwrap().is_none());
    }
    drop(ledgers);
    let sqlite = reopened(&path, clock).await;
    assert_eq!(sqlite.counts().await.unwrap().pending, 1, "forgotten in the file, too");
}

/// In memory: a database forgets from time to time.
#[tokio::test]
async fn records_go_when_their_time_is_over_and_their_fate_is_known() {
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
    // It was looked at in vain, and is looked at again.
    ledger.settle(&open, &settle).await.unwrap();
    ledger.settle(&open, &SettlementStep::Finalize).await.unwrap();
    clock.advance(901);
    others_come(12).await;
    assert!(!is_known(open).await);
}

/// Once whoever had it before has let go of it.
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
        Ok(FulfilmentStep::Produce { body: None, at: 1, response: None }),
        Ok(FulfilmentStep::Defer { limit: CreditLimit { total: U256::MAX, per_payer: U256::MAX, history: 0 } }),
        Ok(FulfilmentStep::Deliver),
        Err(SettlementStep::Submit { transaction: hash(1) }),
        Err(SettlementStep::Settle { transaction: hash(1), block: Some(1), fee: None }),
        Err(SettlementStep::Finalize),
        Err(SettlementStep::Fail { reason: reason.clone(), by: 0 }),
        Err(SettlementStep::Invalidate { reason }),
        Err(SettlementStep::MarkUnknown),
        Err(SettlementStep::Reorg),
        Err(SettlementStep::Claim(Settling { by: 1, until: CLOCK_START + 9 })),
        Err(SettlementStep::Claim(Settling { by: 2, until: CLOCK_START + 9 })),
    ])
}

proptest! {
    /// Whatever steps are tried in whatever order.
    #[test]
    fn no_order_of_steps_breaks_a_promise(steps in prop::collection::vec(any_step(), 0..40)) {
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
