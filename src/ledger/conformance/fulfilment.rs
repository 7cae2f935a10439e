//! Reservations, leases, the work, balances and what is kept (points 1 to 5, 7 and 8 of the contract).

use super::*;

pub async fn one_of_many_concurrent_reservations_wins(ledger: Arc<dyn Ledger>, _: Arc<ManualClock>) {
    let tasks = (0..100).map(|_| {
        let ledger = ledger.clone();
        tokio::spawn(async move { matches!(ledger.reserve(&record(1, 1)).await.unwrap(), Reservation::New(_)) })
    });
    let won = join_all(tasks).await.into_iter().filter(|won| *won.as_ref().unwrap()).count();
    assert_eq!(won, 1);
    assert_eq!(ledger.counts().await.unwrap(), Counts { pending: 1, ..Counts::default() });
}

pub async fn a_payment_takes_every_step(ledger: Arc<dyn Ledger>, _: Arc<ManualClock>) {
    let lease = reserve(&*ledger, record(1, 1)).await;
    let key = lease.key;
    produce(&*ledger, &lease).await;
    assert_eq!(state(&*ledger, &key).await, (Fulfilment::Produced, Settlement::Due));
    ledger.advance(&key, &SettlementStep::Submit { transaction: hash(1) }.into()).await.unwrap();
    ledger.advance(&key, &SettlementStep::Submit { transaction: hash(2) }.into()).await.unwrap();
    settle(&*ledger, &key, 1, Some(9)).await;
    ledger.advance(&lease.key, &lease.step(FulfilmentStep::Deliver)).await.unwrap();
    ledger.advance(&key, &SettlementStep::Finalize.into()).await.unwrap();
    let record = ledger.get(&key).await.unwrap().unwrap();
    assert_eq!(record.fulfilment, Fulfilment::Delivered);
    assert_eq!(record.settlement, Settlement::Final { transaction: hash(1), block: Some(9) });
    assert_eq!(record.transactions, [hash(1), hash(2)], "every transaction stays on record");
    assert_eq!((record.attempts, record.block_seen), (1, Some(1)));
    assert_eq!(ledger.counts().await.unwrap(), Counts { settled: 1, ..Counts::default() });
}

pub async fn a_settled_payment_never_fails(ledger: Arc<dyn Ledger>, _: Arc<ManualClock>) {
    let lease = reserve(&*ledger, record(1, 1)).await;
    produce(&*ledger, &lease).await;
    settle(&*ledger, &lease.key, 1, None).await;
    for step in [
        fail(0, &[]),
        SettlementStep::Invalidate { reason: Reason::ValidBefore },
        SettlementStep::MarkUnknown,
        SettlementStep::Submit { transaction: hash(2) },
    ] {
        let error = ledger.advance(&lease.key, &step.clone().into()).await.unwrap_err();
        assert!(matches!(error, LedgerError::InvalidTransition(_)), "{step:?}: {error}");
    }
    ledger.advance(&lease.key, &SettlementStep::Finalize.into()).await.unwrap();
    let again = ledger
        .advance(&lease.key, &SettlementStep::Settle { transaction: hash(3), block: None, fee: None }.into())
        .await;
    assert!(matches!(again, Err(LedgerError::InvalidTransition(_))), "final is final");
    assert_eq!(state(&*ledger, &lease.key).await.1.paid_by(), Some(hash(1)));
}

pub async fn an_unknown_outcome_stays_in_flight(ledger: Arc<dyn Ledger>, _: Arc<ManualClock>) {
    let lease = reserve(&*ledger, record(1, 1)).await;
    produce(&*ledger, &lease).await;
    ledger.advance(&lease.key, &SettlementStep::Submit { transaction: hash(1) }.into()).await.unwrap();
    ledger.advance(&lease.key, &SettlementStep::MarkUnknown.into()).await.unwrap();
    assert_eq!(ledger.counts().await.unwrap(), Counts { unknown: 1, ..Counts::default() });
    let other = reserve(&*ledger, record(1, 2)).await;
    let error = admit(&*ledger, &other, 19, 2).await.unwrap_err();
    assert!(matches!(error, LedgerError::BalancePending), "it may be in flight: {error}");
    settle(&*ledger, &lease.key, 1, Some(2)).await;
    assert_eq!(ledger.counts().await.unwrap(), Counts { settled: 1, pending: 1, ..Counts::default() });
}

pub async fn a_lost_lease_changes_nothing(ledger: Arc<dyn Ledger>, _: Arc<ManualClock>) {
    let old = reserve(&*ledger, record(1, 1)).await;
    admit(&*ledger, &old, 1_000, 1).await.unwrap();
    ledger.advance(&old.key, &old.step(FulfilmentStep::Start { until: 0 })).await.unwrap();
    assert_eq!(take_over(&*ledger, &old.key, 0, START, START + 90).await, None, "it still runs");
    let new = take_over(&*ledger, &old.key, 0, START + 31, START + 90).await.expect("it ran out");
    for step in [
        FulfilmentStep::Release { body: None },
        FulfilmentStep::Produce { charged: None, body: None, at: START, response: None },
        FulfilmentStep::Start { until: 0 },
        FulfilmentStep::Deliver,
    ] {
        assert!(matches!(ledger.advance(&old.key, &old.step(step.clone())).await, Err(LedgerError::LeaseLost)));
    }
    assert!(matches!(ledger.discard(&old).await, Err(LedgerError::LeaseLost)));
    assert_eq!(state(&*ledger, &old.key).await.0, Fulfilment::Working);
    ledger.advance(&new.key, &new.step(FulfilmentStep::Start { until: 0 })).await.unwrap();
    assert_eq!(ledger.get(&old.key).await.unwrap().unwrap().attempts, 2, "the earlier owner's attempt counts");
}

pub async fn start_extends_the_lease(ledger: Arc<dyn Ledger>, _: Arc<ManualClock>) {
    let lease = reserve(&*ledger, record(1, 1)).await;
    admit(&*ledger, &lease, 1_000, 1).await.unwrap();
    let until = START + 300;
    ledger.advance(&lease.key, &lease.step(FulfilmentStep::Start { until })).await.unwrap();
    assert_eq!(take_over(&*ledger, &lease.key, 0, until, until + 90).await, None, "it still runs");
}

pub async fn a_released_payment_that_is_leased_anew_has_one_owner(ledger: Arc<dyn Ledger>, _: Arc<ManualClock>) {
    let first = reserve(&*ledger, record(1, 1)).await;
    admit(&*ledger, &first, 1_000, 1).await.unwrap();
    ledger.advance(&first.key, &first.step(FulfilmentStep::Start { until: 0 })).await.unwrap();
    ledger.advance(&first.key, &first.step(FulfilmentStep::Release { body: None })).await.unwrap();
    let (now, until) = (START, START + 90);
    let second = take_over(&*ledger, &first.key, 0, now, until).await.expect("released");
    assert_eq!(take_over(&*ledger, &first.key, 1, now, until).await, None, "the second owner's lease runs");
    assert!(matches!(ledger.discard(&second).await, Err(LedgerError::InvalidTransition(_))), "its attempt counts");
    ledger.advance(&second.key, &second.step(FulfilmentStep::Release { body: None })).await.unwrap();
    assert!(take_over(&*ledger, &first.key, 1, now, until).await.is_some(), "given back");
}

pub async fn an_earlier_lease_is_void_after_later_ones(ledger: Arc<dyn Ledger>, _: Arc<ManualClock>) {
    let first = reserve(&*ledger, record(1, 1)).await;
    let late = START + 31;
    let second = take_over(&*ledger, &first.key, 0, late, late + 30).await.expect("it ran out");
    // After a discard it could be reserved with the lease that the first owner holds.
    assert!(matches!(ledger.discard(&second).await, Err(LedgerError::InvalidTransition(_))));
    ledger.advance(&second.key, &second.step(FulfilmentStep::Release { body: None })).await.unwrap();
    let third = take_over(&*ledger, &first.key, 1, late, late + 30).await.expect("released");
    admit(&*ledger, &third, 1_000, 1).await.unwrap();
    for step in [FulfilmentStep::Start { until: 0 }, FulfilmentStep::Release { body: None }] {
        assert!(matches!(ledger.advance(&first.key, &first.step(step.clone())).await, Err(LedgerError::LeaseLost)));
    }
    ledger.advance(&third.key, &third.step(FulfilmentStep::Start { until: 0 })).await.unwrap();
}

pub async fn one_of_many_concurrent_takeovers_wins(ledger: Arc<dyn Ledger>, _: Arc<ManualClock>) {
    let lease = reserve(&*ledger, record(1, 1)).await;
    ledger.advance(&lease.key, &lease.step(FulfilmentStep::Release { body: None })).await.unwrap();
    let tasks = (0..50).map(|_| {
        let ledger = ledger.clone();
        tokio::spawn(async move { take_over(&*ledger, &lease.key, 0, START, START + 90).await })
    });
    let won: Vec<Lease> = join_all(tasks).await.into_iter().filter_map(Result::unwrap).collect();
    assert_eq!(won, [Lease { key: lease.key, epoch: 1 }]);
}

pub async fn an_outdated_epoch_takes_nothing_over(ledger: Arc<dyn Ledger>, _: Arc<ManualClock>) {
    let first = reserve(&*ledger, record(1, 1)).await;
    ledger.advance(&first.key, &first.step(FulfilmentStep::Release { body: None })).await.unwrap();
    let (now, until) = (START, START + 90);
    let second = take_over(&*ledger, &first.key, 0, now, until).await.expect("released");
    ledger.advance(&second.key, &second.step(FulfilmentStep::Release { body: None })).await.unwrap();
    for seen in [0, 2] {
        assert_eq!(take_over(&*ledger, &first.key, seen, now, until).await, None, "epoch {seen}");
    }
    assert!(take_over(&*ledger, &first.key, 1, now, until).await.is_some());
}

pub async fn payments_in_flight_stay_within_the_balance(ledger: Arc<dyn Ledger>, _: Arc<ManualClock>) {
    let tasks = (0..50).map(|nonce| {
        let ledger = ledger.clone();
        tokio::spawn(async move {
            let lease = reserve(&*ledger, record(1, nonce)).await;
            admit(&*ledger, &lease, 100, 1).await.is_ok()
        })
    });
    let admitted: Vec<bool> = join_all(tasks).await.into_iter().map(Result::unwrap).collect();
    assert_eq!(admitted.iter().filter(|admitted| **admitted).count(), 10, "ten payments of ten units");
    let stranger = reserve(&*ledger, record(2, 1)).await;
    admit(&*ledger, &stranger, 10, 1).await.expect("another payer has its own balance");

    let next = reserve(&*ledger, record(1, 100)).await;
    assert!(matches!(admit(&*ledger, &next, 100, 1).await, Err(LedgerError::InsufficientFunds)));
    let one = admitted.iter().position(|admitted| *admitted).unwrap() as u64;
    let released = Lease { key: record(1, one).key, epoch: 0 };
    ledger.advance(&released.key, &released.step(FulfilmentStep::Release { body: None })).await.unwrap();
    admit(&*ledger, &next, 100, 1).await.expect("a released payment is not in flight");
}

/// A payment in the flow `upfront` may be charged although the work fails.
pub async fn a_due_payment_that_is_released_stays_in_flight(ledger: Arc<dyn Ledger>, _: Arc<ManualClock>) {
    let (upfront, later) = (reserve(&*ledger, record(1, 1)).await, reserve(&*ledger, record(1, 2)).await);
    let funds = Some(Funds { balance: U256::from(20), block: 1 });
    ledger.advance(&upfront.key, &upfront.step(FulfilmentStep::Admit { funds, due: true })).await.unwrap();
    admit(&*ledger, &later, 20, 1).await.unwrap();
    for lease in [&upfront, &later] {
        ledger.advance(&lease.key, &lease.step(FulfilmentStep::Release { body: None })).await.unwrap();
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
pub async fn the_longest_body_digest_is_kept(ledger: Arc<dyn Ledger>, _: Arc<ManualClock>) {
    let digest = |length, complete| Some(BodyDigest { length, digest: hash(length as u8), complete });
    let (short, long, whole) = (digest(3, false), digest(10, false), digest(10, true));
    let lease = reserve(&*ledger, record(1, 1)).await;
    let body = async || ledger.get(&lease.key).await.unwrap().unwrap().body;
    admit(&*ledger, &lease, 10, 1).await.unwrap();
    for (read, kept) in [(long, long), (short, long), (None, long), (whole, whole), (long, whole)] {
        ledger.advance(&lease.key, &lease.step(FulfilmentStep::Start { until: 0 })).await.unwrap();
        ledger.advance(&lease.key, &lease.step(FulfilmentStep::Release { body: read })).await.unwrap();
        assert_eq!(body().await, kept, "after {read:?}");
        admit(&*ledger, &lease, 10, 1).await.unwrap();
    }
    ledger.advance(&lease.key, &lease.step(FulfilmentStep::Start { until: 0 })).await.unwrap();
    ledger
        .advance(
            &lease.key,
            &lease.step(FulfilmentStep::Produce { charged: None, body: short, at: START, response: None }),
        )
        .await
        .unwrap();
    assert_eq!(body().await, whole);
}

pub async fn what_is_charged_is_what_is_settled_and_nothing_is_final(ledger: Arc<dyn Ledger>, _: Arc<ManualClock>) {
    // The payer has money for one payment at a time.
    let produce = async |nonce, charged: u64| {
        let lease = reserve(&*ledger, record(1, nonce)).await;
        admit(&*ledger, &lease, 10, 1).await?;
        ledger.advance(&lease.key, &lease.step(FulfilmentStep::Start { until: 0 })).await?;
        let charged = Some(U256::from(charged));
        ledger
            .advance(
                &lease.key,
                &lease.step(FulfilmentStep::Produce { charged, body: None, at: START, response: None }),
            )
            .await?;
        Ok::<Record, LedgerError>(ledger.get(&lease.key).await?.unwrap())
    };
    let free = produce(1, 0).await.unwrap();
    assert!(matches!(free.settlement, Settlement::Final { .. }), "{free:?}");
    assert_eq!((free.amount(), free.transaction(), free.in_flight()), (U256::ZERO, None, U256::ZERO));
    let submitted = ledger.advance(&free.key, &SettlementStep::Submit { transaction: hash(1) }.into()).await;
    assert!(matches!(submitted, Err(LedgerError::InvalidTransition(_))), "it is used up: {submitted:?}");
    let charged = produce(2, 4).await.unwrap();
    assert_eq!((charged.settlement, charged.amount()), (Settlement::Due, U256::from(4)));
    assert_eq!((charged.authorization.value, charged.in_flight()), (U256::from(10), U256::from(4)));
}

pub async fn only_what_is_charged_stays_in_flight(ledger: Arc<dyn Ledger>, _: Arc<ManualClock>) {
    charge(&*ledger, 1, 1, 4).await;
    let next = reserve(&*ledger, record(1, 2)).await;
    assert!(matches!(admit(&*ledger, &next, 13, 1).await, Err(LedgerError::InsufficientFunds)));
    admit(&*ledger, &next, 14, 1).await.unwrap();
}

/// A facilitator's service is asked to charge nothing, and does no work.
pub async fn a_settlement_of_nothing_is_final_in_one_step(ledger: Arc<dyn Ledger>, _: Arc<ManualClock>) {
    let mut free = record(1, 1);
    free.charged = Some(U256::ZERO);
    let lease = reserve(&*ledger, free).await;
    let nothing = || SettlementStep::Settle { transaction: B256::ZERO, block: None, fee: None };
    ledger.advance(&lease.key, &nothing().into()).await.unwrap();
    let free = ledger.get(&lease.key).await.unwrap().unwrap();
    assert_eq!(free.settlement, Settlement::Final { transaction: B256::ZERO, block: None });
    assert_eq!((free.transaction(), free.settled_at), (None, Some(START)));
    for step in [nothing(), SettlementStep::Submit { transaction: hash(1) }] {
        let again = ledger.advance(&lease.key, &step.clone().into()).await;
        assert!(matches!(again, Err(LedgerError::InvalidTransition(_))), "{step:?}: {again:?}");
    }
}

pub async fn repeated_steps_keep_the_first_times(ledger: Arc<dyn Ledger>, clock: Arc<ManualClock>) {
    let lease = reserve(&*ledger, record(1, 1)).await;
    let key = lease.key;
    admit(&*ledger, &lease, 10, 1).await.unwrap();
    ledger.advance(&lease.key, &lease.step(FulfilmentStep::Start { until: 0 })).await.unwrap();
    let early = ledger.advance(&lease.key, &lease.step(FulfilmentStep::Deliver)).await;
    assert!(matches!(early, Err(LedgerError::InvalidTransition(_))), "nothing to deliver: {early:?}");
    let produce = FulfilmentStep::Produce { charged: None, body: None, at: START + 3, response: None };
    ledger.advance(&lease.key, &lease.step(produce.clone())).await.unwrap();
    for _ in 0..2 {
        ledger.advance(&key, &SettlementStep::Submit { transaction: hash(1) }.into()).await.unwrap();
    }
    let settle = |block, fee| SettlementStep::Settle { transaction: hash(1), block: Some(block), fee };
    ledger.advance(&key, &settle(7, Some(U256::from(5))).into()).await.unwrap();
    clock.advance(10);
    ledger.advance(&key, &settle(8, None).into()).await.unwrap();
    let record = ledger.get(&key).await.unwrap().unwrap();
    assert_eq!(record.settlement.block(), Some(8), "the block may be another one after a reorganization");
    assert_eq!((record.settled_at, record.fee), (Some(START), Some(U256::from(5))));
    assert_eq!((record.produced_at, record.transactions), (Some(START + 3), vec![hash(1)]));
}

/// A transfer after that block is credited to the payment (invariant I8), also if a later attempt was admitted without asking the chain.
pub async fn the_latest_block_seen_is_kept(ledger: Arc<dyn Ledger>, _: Arc<ManualClock>) {
    let lease = reserve(&*ledger, record(1, 1)).await;
    let seen = async || ledger.get(&lease.key).await.unwrap().unwrap().block_seen;
    admit(&*ledger, &lease, 10, 5).await.unwrap();
    ledger.advance(&lease.key, &lease.step(FulfilmentStep::Release { body: None })).await.unwrap();
    ledger.advance(&lease.key, &lease.step(FulfilmentStep::Admit { funds: None, due: false })).await.unwrap();
    assert_eq!(seen().await, Some(5));
    admit(&*ledger, &lease, 10, 7).await.unwrap();
    assert_eq!(seen().await, Some(7));
}

pub async fn a_balance_read_before_a_transfer_is_stale(ledger: Arc<dyn Ledger>, _: Arc<ManualClock>) {
    let paid = reserve(&*ledger, record(1, 1)).await;
    admit(&*ledger, &paid, 10, 5).await.unwrap();
    work(&*ledger, &paid).await;
    settle(&*ledger, &paid.key, 1, Some(7)).await;
    let next = reserve(&*ledger, record(1, 2)).await;
    let stale = admit(&*ledger, &next, 10, 6).await;
    assert!(matches!(stale, Err(LedgerError::Stale)), "the balance of block 6 moved in block 7");
    admit(&*ledger, &next, 10, 7).await.expect("the balance of block 7 includes the transfer");
}

pub async fn a_balance_read_between_two_transfers_counts_the_later_one(ledger: Arc<dyn Ledger>, _: Arc<ManualClock>) {
    for (payer, blocks) in [(1, [7, 9]), (2, [9, 7])] {
        for (nonce, block) in (1..).zip(blocks) {
            let lease = reserve(&*ledger, record(payer, nonce)).await;
            produce(&*ledger, &lease).await;
            settle(&*ledger, &lease.key, 1, Some(block)).await;
        }
        let next = reserve(&*ledger, record(payer, 3)).await;
        assert!(matches!(admit(&*ledger, &next, 29, 6).await, Err(LedgerError::Stale)), "before both");
        assert!(matches!(admit(&*ledger, &next, 19, 8).await, Err(LedgerError::Stale)), "between the two");
        admit(&*ledger, &next, 20, 8).await.expect("one of them is seen");
    }
}

/// Of 200 authorizations on a balance for 200, the last must not be refused because a balance that already excludes the others is reduced
/// by them again.
pub async fn a_transfer_is_not_counted_twice(ledger: Arc<dyn Ledger>, _: Arc<ManualClock>) {
    let paid = reserve(&*ledger, record(1, 1)).await;
    admit(&*ledger, &paid, 20, 5).await.unwrap();
    work(&*ledger, &paid).await;
    ledger.advance(&paid.key, &SettlementStep::Submit { transaction: hash(1) }.into()).await.unwrap();
    let next = reserve(&*ledger, record(1, 2)).await;
    let early = admit(&*ledger, &next, 10, 7).await;
    assert!(matches!(early, Err(LedgerError::BalancePending)), "included already, or not yet?");
    let too_little = reserve(&*ledger, record(1, 3)).await;
    assert!(
        matches!(admit(&*ledger, &too_little, 9, 7).await, Err(LedgerError::InsufficientFunds)),
        "whether the other one settles or not"
    );
    settle(&*ledger, &paid.key, 1, Some(7)).await;
    admit(&*ledger, &next, 10, 7).await.expect("block 7 shows what is left");
}

pub async fn a_payment_that_was_worked_on_is_not_discarded(ledger: Arc<dyn Ledger>, _: Arc<ManualClock>) {
    let lease = reserve(&*ledger, record(1, 1)).await;
    admit(&*ledger, &lease, 10, 1).await.unwrap();
    ledger.advance(&lease.key, &lease.step(FulfilmentStep::Start { until: 0 })).await.unwrap();
    assert!(matches!(ledger.discard(&lease).await, Err(LedgerError::InvalidTransition(_))));
    let upfront = reserve(&*ledger, record(2, 1)).await;
    ledger.advance(&upfront.key, &upfront.step(FulfilmentStep::Admit { funds: None, due: true })).await.unwrap();
    ledger.advance(&upfront.key, &SettlementStep::Submit { transaction: hash(1) }.into()).await.unwrap();
    assert!(matches!(ledger.discard(&upfront).await, Err(LedgerError::InvalidTransition(_))));
}

pub async fn a_payment_that_may_have_been_sent_is_not_discarded(ledger: Arc<dyn Ledger>, _: Arc<ManualClock>) {
    let leases = [1, 2, 3].map(async |payer| reserve(&*ledger, record(payer, 1)).await);
    let [entrusted, failed, released] = <[Lease; 3]>::try_from(join_all(leases).await).unwrap();
    for lease in [&entrusted, &failed] {
        ledger.advance(&lease.key, &lease.step(FulfilmentStep::Admit { funds: None, due: true })).await.unwrap();
    }
    let settling = Settling { by: 1, until: START + 30 };
    ledger.advance(&entrusted.key, &SettlementStep::Delegate { settling, known_failures: 0 }.into()).await.unwrap();
    ledger.advance(&failed.key, &SettlementStep::Submit { transaction: hash(1) }.into()).await.unwrap();
    ledger.advance(&failed.key, &fail(1, &[hash(1)]).into()).await.unwrap();
    ledger.advance(&released.key, &released.step(FulfilmentStep::Release { body: None })).await.unwrap();
    for lease in [entrusted, failed, released] {
        assert!(matches!(ledger.discard(&lease).await, Err(LedgerError::InvalidTransition(_))));
        assert!(ledger.get(&lease.key).await.unwrap().is_some());
    }
}

pub async fn a_dead_payment_is_not_in_flight(ledger: Arc<dyn Ledger>, _: Arc<ManualClock>) {
    let dead = reserve(&*ledger, record(1, 1)).await;
    produce(&*ledger, &dead).await;
    let next = reserve(&*ledger, record(1, 2)).await;
    assert!(matches!(admit(&*ledger, &next, 19, 1).await, Err(LedgerError::InsufficientFunds)));
    ledger.advance(&dead.key, &SettlementStep::Invalidate { reason: Reason::ValidBefore }.into()).await.unwrap();
    admit(&*ledger, &next, 10, 1).await.expect("it is never executed");
}

pub async fn a_leased_payment_is_not_removed(ledger: Arc<dyn Ledger>, clock: Arc<ManualClock>) {
    let lease = reserve(&*ledger, record(1, 1)).await;
    admit(&*ledger, &lease, 1_000, 1).await.unwrap();
    let until = VALID_BEFORE + 7_200;
    ledger.advance(&lease.key, &lease.step(FulfilmentStep::Start { until })).await.unwrap();
    let others_come = async |nonces: std::ops::Range<u64>| {
        for nonce in nonces {
            let _ = ledger.reserve(&record(1, nonce)).await.unwrap();
        }
    };
    clock.advance(VALID_BEFORE + 3_600 - START);
    others_come(10..30).await;
    assert!(ledger.get(&lease.key).await.unwrap().is_some(), "its lease runs");
    clock.advance(7_200);
    others_come(30..60).await;
    assert!(ledger.get(&lease.key).await.unwrap().is_none());
}

pub async fn a_discarded_payment_can_be_reserved_again(ledger: Arc<dyn Ledger>, _: Arc<ManualClock>) {
    let lease = reserve(&*ledger, record(1, 1)).await;
    admit(&*ledger, &lease, 10, 1).await.unwrap();
    ledger.discard(&lease).await.unwrap();
    assert!(ledger.get(&lease.key).await.unwrap().is_none());
    let again = reserve(&*ledger, record(1, 1)).await;
    admit(&*ledger, &again, 10, 1).await.expect("the first one is not in flight");
}

pub async fn responses_are_kept_and_replays_counted(ledger: Arc<dyn Ledger>, clock: Arc<ManualClock>) {
    let lease = reserve(&*ledger, record(1, 1)).await;
    let response = |size: usize| StoredResponse { body: vec![7; size].into(), ..super::response(b"") };
    ledger.store_response(&lease.key, response(ledger.response_limit() + 1)).await.unwrap();
    assert!(ledger.response(&lease.key).await.unwrap().is_none(), "over the limit");
    let largest = reserve(&*ledger, record(2, 1)).await;
    ledger.store_response(&largest.key, response(ledger.response_limit())).await.unwrap();
    assert!(ledger.response(&largest.key).await.unwrap().is_some(), "at the limit");
    ledger.store_response(&lease.key, response(3)).await.unwrap();
    ledger.store_response(&lease.key, response(4)).await.unwrap();
    let stored = ledger.response(&lease.key).await.unwrap().expect("kept");
    assert_eq!(stored, response(3), "the first");
    for count in 1..=3 {
        assert_eq!(ledger.advance(&lease.key, &PaymentStep::Replay).await.unwrap().replays, count);
    }
    clock.advance(3_600);
    assert!(ledger.response(&lease.key).await.unwrap().is_none(), "removed");
}

pub async fn records_are_removed_when_their_outcome_is_known(ledger: Arc<dyn Ledger>, clock: Arc<ManualClock>) {
    let settled = reserve(&*ledger, record(1, 1)).await;
    produce(&*ledger, &settled).await;
    settle(&*ledger, &settled.key, 1, Some(1)).await;
    let unknown = reserve(&*ledger, record(1, 2)).await;
    produce(&*ledger, &unknown).await;
    ledger.advance(&unknown.key, &SettlementStep::Submit { transaction: hash(2) }.into()).await.unwrap();
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
    assert!(ledger.get(&unknown.key).await.unwrap().is_some(), "its outcome is unknown");
    assert_eq!(ledger.counts().await.unwrap().settled, 1, "removed records stay counted");
}

pub async fn a_permit_of_unknown_outcome_is_given_up_after_a_week_and_stays_counted(
    ledger: Arc<dyn Ledger>,
    clock: Arc<ManualClock>,
) {
    let unclear = reserve(&*ledger, permit(usdc(), 1, 1)).await;
    produce(&*ledger, &unclear).await;
    let submitted = reserve(&*ledger, permit(usdc(), 1, 2)).await;
    produce(&*ledger, &submitted).await;
    let authorized = reserve(&*ledger, record(1, 3)).await;
    produce(&*ledger, &authorized).await;
    for lease in [&unclear, &submitted, &authorized] {
        ledger.advance(&lease.key, &SettlementStep::Submit { transaction: hash(2) }.into()).await.unwrap();
    }
    ledger.advance(&unclear.key, &SettlementStep::MarkUnknown.into()).await.unwrap();
    let others_come = async |nonces: std::ops::Range<u64>| {
        for nonce in nonces {
            let _ = ledger.reserve(&record(1, nonce)).await.unwrap();
        }
    };
    clock.advance(VALID_BEFORE - START + 7 * 86_400);
    others_come(100..180).await;
    for lease in [&unclear, &submitted] {
        assert!(ledger.get(&lease.key).await.unwrap().is_some(), "a node may have been away for days");
    }
    assert_eq!(ledger.counts().await.unwrap().unresolved, 0);
    clock.advance(1_000);
    others_come(200..280).await;
    for lease in [&unclear, &submitted] {
        assert!(ledger.get(&lease.key).await.unwrap().is_none());
    }
    assert!(
        ledger.get(&authorized.key).await.unwrap().is_some(),
        "the chain tells what became of it, whenever it is asked"
    );
    assert_eq!(ledger.counts().await.unwrap().unresolved, 2);
}

pub async fn one_of_many_payments_with_one_id_wins(ledger: Arc<dyn Ledger>, _: Arc<ManualClock>) {
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
            Err(LedgerError::IdTaken { key }) => assert_eq!(key, winner, "the error names the holder"),
            other => panic!("{other:?}"),
        }
        assert!(ledger.get(&key).await.unwrap().is_none(), "the losing reservation leaves nothing");
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

pub async fn an_id_is_free_when_its_record_is_removed(ledger: Arc<dyn Ledger>, clock: Arc<ManualClock>) {
    let discarded = reserve(&*ledger, with_id(1, record(1, 1))).await;
    ledger.discard(&discarded).await.unwrap();
    let released = reserve(&*ledger, with_id(1, record(1, 2))).await;
    ledger.advance(&released.key, &released.step(FulfilmentStep::Release { body: None })).await.unwrap();
    let other = ledger.reserve(&with_id(1, record(1, 3))).await;
    assert!(
        matches!(other, Err(LedgerError::IdTaken { key }) if key == released.key),
        "a released payment keeps its id"
    );
    clock.advance(7_200);
    reserve(&*ledger, with_id(1, record(1, 4))).await;
    assert!(ledger.get(&released.key).await.unwrap().is_none(), "removed");
}

/// A token that is not USDC.
fn other_token() -> Asset {
    Asset::new(Network::BASE, Address::repeat_byte(0xaa), "Other", "1")
}

pub async fn an_id_is_of_one_payment_whatever_was_signed_for_it(ledger: Arc<dyn Ledger>, _: Arc<ManualClock>) {
    let exact = reserve(&*ledger, with_id(1, record(1, 1))).await;
    // The nonce is the same, too, and is another one's: that of a permit.
    let taken = ledger.reserve(&with_id(1, permit(usdc(), 1, 1))).await;
    assert!(matches!(taken, Err(LedgerError::IdTaken { key }) if key == exact.key), "{taken:?}");
    let signed = reserve(&*ledger, with_id(2, permit(usdc(), 1, 1))).await;
    for another in [record(1, 2), permit(usdc(), 1, 2)] {
        let taken = ledger.reserve(&with_id(2, another)).await;
        assert!(matches!(taken, Err(LedgerError::IdTaken { key }) if key == signed.key), "{taken:?}");
    }
    // What is paid in another token has ids of its own.
    reserve(&*ledger, with_id(2, permit(other_token(), 1, 3))).await;
}

pub async fn permits_are_in_flight_with_what_else_is_paid_in_their_token(ledger: Arc<dyn Ledger>, _: Arc<ManualClock>) {
    let first = reserve(&*ledger, permit(usdc(), 1, 1)).await;
    admit(&*ledger, &first, 10, 1).await.unwrap();
    let exact = reserve(&*ledger, record(1, 1)).await;
    assert!(matches!(admit(&*ledger, &exact, 19, 1).await, Err(LedgerError::InsufficientFunds)));
    admit(&*ledger, &exact, 20, 1).await.unwrap();
    let other = reserve(&*ledger, permit(other_token(), 1, 2)).await;
    admit(&*ledger, &other, 10, 1).await.expect("another token has a balance of its own");
}
