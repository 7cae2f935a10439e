//! The contract's third part: what is owed for responses that were released before they were paid for.

use tower_x402::ledger::{CreditLimit, Listing, MemoryLedger, SettlementState};

use super::*;

on_every_ledger! {
    credit_is_for_payers_with_a_history,
    what_one_payer_owes_stays_within_its_limit,
    of_many_who_defer_at_once_what_is_owed_stays_within_the_total,
    who_did_not_pay_gets_no_credit_until_it_has,
    what_is_lost_takes_from_the_total_until_it_is_forgotten,
    what_was_undone_is_owed_again,
    what_was_undone_speaks_for_nobody,
    only_what_is_produced_and_due_is_deferred_and_once,
    a_deferred_payment_is_found_by_who_settles,
}

/// What one payment of these tests moves.
const AMOUNT: u64 = 10;

fn limit(total: u64, per_payer: u64, history: u32) -> CreditLimit {
    CreditLimit { total: U256::from(total), per_payer: U256::from(per_payer), history }
}

/// A limit that leaves nothing to wish for.
fn plenty() -> CreditLimit {
    limit(1_000_000, 1_000_000, 1)
}

async fn produced(ledger: &dyn Ledger, payer: u8, nonce: u64) -> Lease {
    let lease = reserve(ledger, record(payer, nonce)).await;
    produce(ledger, &lease).await;
    lease
}

async fn settle(ledger: &dyn Ledger, key: &PaymentKey) {
    ledger.settle(key, &SettlementStep::Settle { transaction: hash(1), block: None, fee: None }).await.unwrap();
}

/// A payment of the payer that is paid.
async fn paid(ledger: &dyn Ledger, payer: u8, nonce: u64) -> PaymentKey {
    let lease = produced(ledger, payer, nonce).await;
    settle(ledger, &lease.key).await;
    lease.key
}

async fn defer(ledger: &dyn Ledger, lease: &Lease, limit: CreditLimit) -> bool {
    match ledger.fulfil(lease, &FulfilmentStep::Defer { limit }).await {
        Ok(()) => true,
        Err(LedgerError::NoCredit) => {
            assert!(!ledger.get(&lease.key).await.unwrap().unwrap().deferred, "refused, and deferred");
            false
        }
        Err(error) => panic!("{error}"),
    }
}

/// The sum of what is owed, by the records.
async fn owed(ledger: &dyn Ledger) -> U256 {
    ledger.list(&Listing::default()).await.unwrap().iter().map(Record::owed).sum()
}

async fn credit_is_for_payers_with_a_history(TestLedger { ledger, directory: _directory, .. }: TestLedger) {
    let two = limit(1_000, 1_000, 2);
    for nonce in 1..=3 {
        paid(&*ledger, 9, nonce).await;
    }
    let first = produced(&*ledger, 1, 1).await;
    assert!(!defer(&*ledger, &first, two).await, "what another payer paid says nothing");
    paid(&*ledger, 1, 2).await;
    let released = reserve(&*ledger, record(1, 3)).await;
    ledger.fulfil(&released, &FulfilmentStep::Release { body: None }).await.unwrap();
    assert!(!defer(&*ledger, &first, two).await, "one is not two");
    let second = paid(&*ledger, 1, 4).await;
    ledger.settle(&second, &SettlementStep::Finalize).await.unwrap();
    assert!(defer(&*ledger, &first, two).await);
    let record = ledger.get(&first.key).await.unwrap().unwrap();
    assert!(record.deferred && record.settlement == Settlement::Due && record.owed() == U256::from(AMOUNT));
}

async fn what_one_payer_owes_stays_within_its_limit(TestLedger { ledger, directory: _directory, .. }: TestLedger) {
    let two = limit(1_000, 2 * AMOUNT + 9, 1);
    let mut leases = Vec::new();
    for payer in 1..=2 {
        paid(&*ledger, payer, 0).await;
        for nonce in 1..=3 {
            leases.push(produced(&*ledger, payer, nonce).await);
        }
    }
    assert!(defer(&*ledger, &leases[0], two).await && defer(&*ledger, &leases[1], two).await);
    assert!(!defer(&*ledger, &leases[2], two).await);
    assert!(defer(&*ledger, &leases[3], two).await, "another payer has a limit of its own");
    settle(&*ledger, &leases[0].key).await;
    assert!(defer(&*ledger, &leases[2], two).await, "what was paid is not owed");
}

async fn of_many_who_defer_at_once_what_is_owed_stays_within_the_total(
    TestLedger { ledger, directory: _directory, .. }: TestLedger,
) {
    let cap = limit(12 * AMOUNT + 3, 1_000, 1);
    let mut leases = Vec::new();
    for payer in 1..=10 {
        paid(&*ledger, payer, 0).await;
        for nonce in 1..=5 {
            leases.push(produced(&*ledger, payer, nonce).await);
        }
    }
    let tasks = leases.into_iter().map(|lease| {
        let ledger = ledger.clone();
        tokio::spawn(async move { (lease.key, defer(&*ledger, &lease, cap).await) })
    });
    let deferred: Vec<_> = join_all(tasks).await.into_iter().map(Result::unwrap).collect();
    assert_eq!(deferred.iter().filter(|(_, deferred)| *deferred).count(), 12, "neither more nor fewer than fit");
    assert_eq!(owed(&*ledger).await, U256::from(12 * AMOUNT));
    // Paid at once, too, from many sides.
    let tasks = deferred.into_iter().map(|(key, _)| {
        let ledger = ledger.clone();
        tokio::spawn(async move { settle(&*ledger, &key).await })
    });
    join_all(tasks).await.into_iter().for_each(|settled| settled.unwrap());
    assert_eq!(owed(&*ledger).await, U256::ZERO);
    let next = produced(&*ledger, 1, 100).await;
    assert!(!defer(&*ledger, &next, limit(AMOUNT - 1, 1_000, 1)).await);
    assert!(defer(&*ledger, &next, limit(AMOUNT, AMOUNT, 1)).await, "nothing is left over of what was owed");
}

async fn who_did_not_pay_gets_no_credit_until_it_has(TestLedger { ledger, directory: _directory, .. }: TestLedger) {
    paid(&*ledger, 1, 0).await;
    paid(&*ledger, 2, 0).await;
    let failed = produced(&*ledger, 1, 1).await;
    let in_line = produced(&*ledger, 1, 2).await;
    ledger.settle(&in_line.key, &SettlementStep::Fail { reason: Reason::InsufficientFunds, by: 0 }).await.unwrap();
    assert!(defer(&*ledger, &failed, plenty()).await, "what was not deferred is not owed");
    ledger.settle(&failed.key, &SettlementStep::Fail { reason: Reason::InsufficientFunds, by: 0 }).await.unwrap();
    let next = produced(&*ledger, 1, 3).await;
    assert!(!defer(&*ledger, &next, plenty()).await);
    ledger.settle(&failed.key, &SettlementStep::Submit { transaction: hash(1) }).await.unwrap();
    assert!(!defer(&*ledger, &next, plenty()).await, "tried again is not paid");
    let stranger = produced(&*ledger, 2, 1).await;
    assert!(defer(&*ledger, &stranger, plenty()).await, "others do not suffer for it");
    settle(&*ledger, &failed.key).await;
    assert!(defer(&*ledger, &next, plenty()).await, "it has paid");
    ledger.settle(&next.key, &SettlementStep::Invalidate { reason: Reason::ValidBefore }).await.unwrap();
    let last = produced(&*ledger, 1, 4).await;
    assert!(!defer(&*ledger, &last, plenty()).await, "it never will");
}

async fn what_is_lost_takes_from_the_total_until_it_is_forgotten(
    TestLedger { ledger, clock, directory: _directory }: TestLedger,
) {
    let one = limit(AMOUNT, AMOUNT, 1);
    paid(&*ledger, 1, 0).await;
    let lost = produced(&*ledger, 1, 1).await;
    assert!(defer(&*ledger, &lost, one).await);
    ledger.settle(&lost.key, &SettlementStep::Invalidate { reason: Reason::ValidBefore }).await.unwrap();
    paid(&*ledger, 2, 0).await;
    let next = produced(&*ledger, 2, 1).await;
    assert!(!defer(&*ledger, &next, one).await, "the loss counts");
    clock.advance(VALID_BEFORE - CLOCK_START + 1_800);
    // Whoever comes, since the one who owes may never come again.
    for nonce in 10..80 {
        reserve(&*ledger, record(3, nonce)).await;
    }
    assert!(ledger.get(&lost.key).await.unwrap().is_none(), "aged out");
    assert!(defer(&*ledger, &next, one).await);
}

async fn what_was_undone_is_owed_again(TestLedger { ledger, directory: _directory, .. }: TestLedger) {
    let one = limit(AMOUNT, 1_000, 1);
    paid(&*ledger, 1, 0).await;
    let (first, second) = (produced(&*ledger, 1, 1).await, produced(&*ledger, 1, 2).await);
    assert!(defer(&*ledger, &first, one).await);
    settle(&*ledger, &first.key).await;
    ledger.settle(&first.key, &SettlementStep::Reorg).await.unwrap();
    assert_eq!(owed(&*ledger).await, U256::from(AMOUNT));
    assert!(!defer(&*ledger, &second, one).await);
    settle(&*ledger, &first.key).await;
    assert!(defer(&*ledger, &second, one).await);
}

async fn what_was_undone_speaks_for_nobody(TestLedger { ledger, directory: _directory, .. }: TestLedger) {
    let known = paid(&*ledger, 1, 0).await;
    ledger.settle(&known, &SettlementStep::Reorg).await.unwrap();
    let next = produced(&*ledger, 1, 1).await;
    assert!(!defer(&*ledger, &next, limit(AMOUNT, 1_000, 1)).await);
    settle(&*ledger, &known).await;
    assert!(defer(&*ledger, &next, limit(AMOUNT, 1_000, 1)).await);
}

async fn only_what_is_produced_and_due_is_deferred_and_once(
    TestLedger { ledger, directory: _directory, .. }: TestLedger,
) {
    paid(&*ledger, 1, 0).await;
    let step = || FulfilmentStep::Defer { limit: plenty() };
    let refused = async |lease: &Lease, what: &str| {
        let error = ledger.fulfil(lease, &step()).await.unwrap_err();
        assert!(matches!(error, LedgerError::InvalidTransition(_)), "{what}: {error}");
    };
    let lease = reserve(&*ledger, record(1, 1)).await;
    refused(&lease, "reserved").await;
    admit(&*ledger, &lease, 1_000, 1).await.unwrap();
    ledger.fulfil(&lease, &FulfilmentStep::Start { until: 0 }).await.unwrap();
    refused(&lease, "working").await;
    ledger.fulfil(&lease, &FulfilmentStep::Produce { body: None, at: CLOCK_START, response: None }).await.unwrap();
    ledger.fulfil(&lease, &step()).await.unwrap();
    refused(&lease, "deferred").await;
    let settled = produced(&*ledger, 1, 2).await;
    settle(&*ledger, &settled.key).await;
    refused(&settled, "settled").await;
    let delivered = produced(&*ledger, 1, 3).await;
    ledger.fulfil(&delivered, &FulfilmentStep::Deliver).await.unwrap();
    refused(&delivered, "delivered").await;
    let other = Lease { epoch: 7, ..produced(&*ledger, 1, 4).await };
    assert!(matches!(ledger.fulfil(&other, &step()).await, Err(LedgerError::LeaseLost)));
    assert_eq!(owed(&*ledger).await, U256::from(AMOUNT), "one of them");
}

async fn a_deferred_payment_is_found_by_who_settles(TestLedger { ledger, directory: _directory, .. }: TestLedger) {
    paid(&*ledger, 1, 0).await;
    let (deferred, in_line) = (produced(&*ledger, 1, 1).await, produced(&*ledger, 1, 2).await);
    assert!(defer(&*ledger, &deferred, plenty()).await);
    let idle = Listing { idle_at: Some(CLOCK_START), ..Listing::of([SettlementState::Due]) };
    let found: Vec<_> = ledger.list(&idle).await.unwrap().iter().map(|record| record.key).collect();
    assert_eq!(found, [deferred.key], "and not {}, whose lease runs", in_line.key.nonce);
    ledger.fulfil(&deferred, &FulfilmentStep::Deliver).await.unwrap();
    assert!(ledger.get(&deferred.key).await.unwrap().unwrap().deferred);
}

/// What one of the payments of a random history does next.
fn any_move() -> impl Strategy<Value = (u8, u64, Result<FulfilmentStep, SettlementStep>)> {
    let moves = prop_oneof![
        3 => Just(Ok(FulfilmentStep::Defer { limit: plenty() })),
        2 => Just(Err(SettlementStep::Settle { transaction: hash(1), block: Some(1), fee: None })),
        1 => Just(Err(SettlementStep::Submit { transaction: hash(1) })),
        1 => Just(Err(SettlementStep::MarkUnknown)),
        1 => Just(Err(SettlementStep::Finalize)),
        1 => Just(Err(SettlementStep::Fail { reason: Reason::InsufficientFunds, by: 0 })),
        1 => Just(Err(SettlementStep::Invalidate { reason: Reason::InsufficientFunds })),
        1 => Just(Err(SettlementStep::Reorg)),
    ];
    (1..=3_u8, 0..6_u64, moves)
}

proptest! {
    /// The sums that are kept are those of the records, whatever became of these.
    #[test]
    fn what_is_owed_is_counted_exactly(moves in prop::collection::vec(any_move(), 0..60)) {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async {
            let ledger = MemoryLedger::new();
            for payer in 1..=3 {
                for nonce in 0..6 {
                    produced(&ledger, payer, nonce).await;
                }
            }
            for (payer, nonce, step) in moves {
                let key = record(payer, nonce).key;
                // Not every step is possible.
                let _ = match step {
                    Ok(step) => ledger.fulfil(&Lease { key, epoch: 0 }, &step).await,
                    Err(step) => ledger.settle(&key, &step).await,
                };
            }
            let records = ledger.list(&Listing::default()).await.unwrap();
            let of = |payer: u8| records.iter().filter(move |record| record.key.payer == Address::repeat_byte(payer));
            let total = u64::try_from(records.iter().map(Record::owed).sum::<U256>()).unwrap();
            for payer in 1..=3 {
                let history = of(payer).filter(|record| record.settlement.paid_by().is_some()).count() as u32;
                let owed = u64::try_from(of(payer).map(Record::owed).sum::<U256>()).unwrap();
                let failed = of(payer).any(|record| !record.owed().is_zero()
                    && (record.last_failure.is_some() || record.settlement == Settlement::Dead));
                let next = produced(&ledger, payer, 100).await;
                let (all, own) = (total + AMOUNT, owed + AMOUNT);
                for too_little in [limit(all - 1, own, history), limit(all, own - 1, history), limit(all, own, history + 1)] {
                    assert!(!defer(&ledger, &next, too_little).await, "{too_little:?}");
                }
                assert_eq!(defer(&ledger, &next, limit(all, own, history)).await, !failed);
                ledger.settle(&next.key, &SettlementStep::Settle { transaction: hash(2), block: None, fee: None }).await.unwrap();
            }
        });
    }
}
