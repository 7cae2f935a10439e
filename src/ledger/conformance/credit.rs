//! What payers owe for responses that were released before they settled (point 9 of the contract).

use super::*;

/// The amount of one payment.
const AMOUNT: u64 = 10;

fn limit(units: u64) -> U256 {
    U256::from(units)
}

/// A limit that no test reaches.
const PLENTY: U256 = U256::MAX;

async fn produced(ledger: &dyn Ledger, payer: u8, nonce: u64) -> Lease {
    let lease = reserve(ledger, record(payer, nonce)).await;
    produce(ledger, &lease).await;
    lease
}

/// Makes a settled payment.
async fn paid(ledger: &dyn Ledger, payer: u8, nonce: u64) -> PaymentKey {
    let lease = produced(ledger, payer, nonce).await;
    settle(ledger, &lease.key, 1, None).await;
    lease.key
}

/// Makes a payment whose work is done, and that is signed now.
async fn produced_at(ledger: &dyn Ledger, payer: u8, nonce: u64, now: u64) -> Lease {
    let offer = offer_of(usdc(), TransferMethod::Authorization);
    let lease = reserve(ledger, record_for(offer, payer, nonce, now)).await;
    produce(ledger, &lease).await;
    lease
}

async fn defer(ledger: &dyn Ledger, lease: &Lease, limit: U256) -> bool {
    match ledger.advance(&lease.key, &lease.step(FulfilmentStep::Defer { limit })).await {
        Ok(_) => true,
        Err(LedgerError::NoCredit) => {
            assert!(!ledger.get(&lease.key).await.unwrap().unwrap().deferred, "refused, and deferred");
            false
        }
        Err(error) => panic!("{error}"),
    }
}

/// Returns the sum that the records say is owed.
async fn owed(ledger: &dyn Ledger) -> U256 {
    ledger.list(&Listing::default()).await.unwrap().iter().map(Record::owed).sum()
}

pub async fn a_payer_owes_no_more_than_it_has_settled(ledger: Arc<dyn Ledger>, _: Arc<ManualClock>) {
    for nonce in 1..=3 {
        paid(&*ledger, 9, nonce).await;
    }
    let first = produced(&*ledger, 1, 1).await;
    assert!(!defer(&*ledger, &first, PLENTY).await, "the payments of another payer do not count");
    let released = reserve(&*ledger, record(1, 2)).await;
    ledger.advance(&released.key, &released.step(FulfilmentStep::Release { body: None })).await.unwrap();
    for (nonce, charged) in [(3, 0), (4, 4), (5, 5)] {
        let small = charge(&*ledger, 1, nonce, charged).await;
        if charged > 0 {
            settle(&*ledger, &small.key, 1, Some(1)).await;
        }
        assert!(!defer(&*ledger, &first, PLENTY).await, "three payments, and too little money");
    }
    let last = charge(&*ledger, 1, 6, 1).await;
    settle(&*ledger, &last.key, 1, None).await;
    ledger.advance(&last.key, &SettlementStep::Finalize.into()).await.unwrap();
    assert!(defer(&*ledger, &first, PLENTY).await, "ten for ten");
    let record = ledger.get(&first.key).await.unwrap().unwrap();
    assert!(record.deferred && record.settlement == Settlement::Due && record.owed() == U256::from(AMOUNT));
    let (second, third) = (produced(&*ledger, 1, 7).await, produced(&*ledger, 1, 8).await);
    assert!(!defer(&*ledger, &second, PLENTY).await, "it owes as much as it has settled");
    settle(&*ledger, &first.key, 1, None).await;
    assert!(defer(&*ledger, &second, PLENTY).await && defer(&*ledger, &third, PLENTY).await, "it has settled twenty");
}

pub async fn what_was_settled_to_another_payee_does_not_count(ledger: Arc<dyn Ledger>, _: Arc<ManualClock>) {
    // Whoever has a facilitator settle for it can pay itself.
    let offer = offer_of(usdc(), TransferMethod::Authorization);
    let to_itself = ExactOffer { pay_to: Address::repeat_byte(1), ..offer };
    let lease = reserve(&*ledger, record_for(to_itself, 1, 1, START)).await;
    produce(&*ledger, &lease).await;
    settle(&*ledger, &lease.key, 1, Some(1)).await;
    let next = produced(&*ledger, 1, 2).await;
    assert!(!defer(&*ledger, &next, PLENTY).await);
    paid(&*ledger, 1, 3).await;
    assert!(defer(&*ledger, &next, PLENTY).await);
}

pub async fn what_was_settled_counts_for_ten_minutes(ledger: Arc<dyn Ledger>, clock: Arc<ManualClock>) {
    for nonce in 1..=2 {
        paid(&*ledger, 1, nonce).await;
    }
    clock.advance(600);
    let first = produced_at(&*ledger, 1, 3, START + 600).await;
    assert!(defer(&*ledger, &first, PLENTY).await);
    clock.advance(1);
    let second = produced_at(&*ledger, 1, 4, START + 601).await;
    assert!(!defer(&*ledger, &second, PLENTY).await, "its record may be there yet");
}

pub async fn what_a_payer_owes_stays_within_its_limit(ledger: Arc<dyn Ledger>, _: Arc<ManualClock>) {
    let two = limit(2 * AMOUNT + 9);
    let mut leases = Vec::new();
    for payer in 1..=2 {
        for nonce in 10..=13 {
            paid(&*ledger, payer, nonce).await;
        }
        for nonce in 1..=3 {
            leases.push(produced(&*ledger, payer, nonce).await);
        }
    }
    assert!(defer(&*ledger, &leases[0], two).await && defer(&*ledger, &leases[1], two).await);
    assert!(!defer(&*ledger, &leases[2], two).await);
    assert!(defer(&*ledger, &leases[3], two).await, "another payer has its own limit");
    settle(&*ledger, &leases[0].key, 1, None).await;
    assert!(defer(&*ledger, &leases[2], two).await, "a settled payment is not owed");
}

pub async fn concurrent_deferrals_stay_within_the_limit(ledger: Arc<dyn Ledger>, _: Arc<ManualClock>) {
    // One of the payers has settled no more than that, and the other one plenty.
    let cap = limit(6 * AMOUNT + 3);
    let mut leases = Vec::new();
    for payer in 1..=2 {
        for nonce in 100..=105 + 10 * u64::from(payer - 1) {
            paid(&*ledger, payer, nonce).await;
        }
        for nonce in 1..=25 {
            leases.push(produced(&*ledger, payer, nonce).await);
        }
    }
    let tasks = leases.into_iter().map(|lease| {
        let ledger = ledger.clone();
        tokio::spawn(async move { (lease.key, defer(&*ledger, &lease, cap).await) })
    });
    let deferred: Vec<_> = join_all(tasks).await.into_iter().map(Result::unwrap).collect();
    for payer in 1..=2 {
        let of_payer = |key: &PaymentKey| key.payer == Address::repeat_byte(payer);
        let deferred = deferred.iter().filter(|(key, deferred)| *deferred && of_payer(key));
        assert_eq!(deferred.count(), 6, "exactly as many as fit");
    }
    assert_eq!(owed(&*ledger).await, U256::from(12 * AMOUNT));
    // Concurrent settlements keep the sum exact, too.
    let tasks = deferred.into_iter().map(|(key, _)| {
        let ledger = ledger.clone();
        tokio::spawn(async move { settle(&*ledger, &key, 1, None).await })
    });
    join_all(tasks).await.into_iter().for_each(|settled| settled.unwrap());
    assert_eq!(owed(&*ledger).await, U256::ZERO);
    let next = produced(&*ledger, 1, 200).await;
    assert!(!defer(&*ledger, &next, limit(AMOUNT - 1)).await);
    assert!(defer(&*ledger, &next, limit(AMOUNT)).await, "nothing is owed any more");
}

pub async fn an_overdue_payment_ends_credit_until_it_settles(ledger: Arc<dyn Ledger>, _: Arc<ManualClock>) {
    for nonce in 10..=13 {
        paid(&*ledger, 1, nonce).await;
    }
    paid(&*ledger, 2, 0).await;
    let failed = produced(&*ledger, 1, 1).await;
    let queued = produced(&*ledger, 1, 2).await;
    ledger.advance(&queued.key, &fail(0, &[]).into()).await.unwrap();
    assert!(defer(&*ledger, &failed, PLENTY).await, "a failed payment that was not deferred is not overdue");
    ledger.advance(&failed.key, &fail(0, &[]).into()).await.unwrap();
    let next = produced(&*ledger, 1, 3).await;
    assert!(!defer(&*ledger, &next, PLENTY).await);
    ledger.advance(&failed.key, &SettlementStep::Submit { transaction: hash(1) }.into()).await.unwrap();
    assert!(!defer(&*ledger, &next, PLENTY).await, "submitted again is not settled");
    let stranger = produced(&*ledger, 2, 1).await;
    assert!(defer(&*ledger, &stranger, PLENTY).await, "other payers are not affected");
    settle(&*ledger, &failed.key, 1, None).await;
    assert!(defer(&*ledger, &next, PLENTY).await, "it has settled");
    ledger.advance(&next.key, &SettlementStep::Invalidate { reason: Reason::ValidBefore }.into()).await.unwrap();
    let last = produced(&*ledger, 1, 4).await;
    assert!(!defer(&*ledger, &last, PLENTY).await, "the payment is dead");
}

pub async fn what_is_lost_is_owed_for_longer_than_what_was_settled_before_counts(
    ledger: Arc<dyn Ledger>,
    clock: Arc<ManualClock>,
) {
    // Not final, so that its record stays for longer than that of the payment that is lost.
    let known = paid(&*ledger, 1, 0).await;
    let lost = produced(&*ledger, 1, 1).await;
    assert!(defer(&*ledger, &lost, PLENTY).await);
    ledger.advance(&lost.key, &SettlementStep::Invalidate { reason: Reason::ValidBefore }.into()).await.unwrap();
    let next = produced(&*ledger, 1, 2).await;
    assert!(!defer(&*ledger, &next, PLENTY).await);
    assert_eq!(owed(&*ledger).await, U256::from(AMOUNT), "a dead payment is owed");
    clock.advance(VALID_BEFORE - START + 1_800);
    // Other payers' reservations remove it: its own payer may never return.
    for nonce in 10..80 {
        reserve(&*ledger, record(3, nonce)).await;
    }
    assert!(ledger.get(&lost.key).await.unwrap().is_none(), "removed");
    assert!(ledger.get(&known).await.unwrap().is_some(), "and the other one is there");
    let later = produced_at(&*ledger, 1, 3, VALID_BEFORE + 1_800).await;
    assert!(!defer(&*ledger, &later, PLENTY).await, "it has been lent for what it had settled");
    let again = produced_at(&*ledger, 1, 4, VALID_BEFORE + 1_800).await;
    settle(&*ledger, &again.key, 1, None).await;
    assert!(defer(&*ledger, &later, limit(AMOUNT)).await, "nothing is owed any more");
}

pub async fn a_reorged_payment_is_owed_again(ledger: Arc<dyn Ledger>, _: Arc<ManualClock>) {
    let one = limit(AMOUNT);
    paid(&*ledger, 1, 0).await;
    let (first, second) = (produced(&*ledger, 1, 1).await, produced(&*ledger, 1, 2).await);
    assert!(defer(&*ledger, &first, one).await);
    settle(&*ledger, &first.key, 1, None).await;
    ledger.advance(&first.key, &SettlementStep::Reorg.into()).await.unwrap();
    assert_eq!(owed(&*ledger).await, U256::from(AMOUNT));
    assert!(!defer(&*ledger, &second, one).await);
    settle(&*ledger, &first.key, 1, None).await;
    assert!(defer(&*ledger, &second, one).await);
}

pub async fn what_a_reorganization_removed_was_not_settled(ledger: Arc<dyn Ledger>, _: Arc<ManualClock>) {
    let known = paid(&*ledger, 1, 0).await;
    ledger.advance(&known, &SettlementStep::Reorg.into()).await.unwrap();
    let next = produced(&*ledger, 1, 1).await;
    assert!(!defer(&*ledger, &next, PLENTY).await);
    settle(&*ledger, &known, 1, None).await;
    assert!(defer(&*ledger, &next, PLENTY).await);
}

pub async fn only_what_is_charged_is_owed(ledger: Arc<dyn Ledger>, _: Arc<ManualClock>) {
    for nonce in 10..=13 {
        paid(&*ledger, 1, nonce).await;
    }
    let small = charge(&*ledger, 1, 2, 4).await;
    assert!(defer(&*ledger, &small, PLENTY).await);
    let next = produced(&*ledger, 1, 3).await;
    assert!(!defer(&*ledger, &next, limit(AMOUNT + 3)).await);
    assert!(defer(&*ledger, &next, limit(AMOUNT + 4)).await);
}

pub async fn only_produced_due_payments_are_deferred_and_once(ledger: Arc<dyn Ledger>, _: Arc<ManualClock>) {
    paid(&*ledger, 1, 0).await;
    let step = || FulfilmentStep::Defer { limit: PLENTY };
    let refused = async |lease: &Lease, what: &str| {
        let error = ledger.advance(&lease.key, &lease.step(step())).await.unwrap_err();
        assert!(matches!(error, LedgerError::InvalidTransition(_)), "{what}: {error}");
    };
    let lease = reserve(&*ledger, record(1, 1)).await;
    refused(&lease, "reserved").await;
    admit(&*ledger, &lease, 1_000, 1).await.unwrap();
    ledger.advance(&lease.key, &lease.step(FulfilmentStep::Start { until: 0 })).await.unwrap();
    refused(&lease, "working").await;
    ledger
        .advance(
            &lease.key,
            &lease.step(FulfilmentStep::Produce { charged: None, body: None, at: START, response: None }),
        )
        .await
        .unwrap();
    ledger.advance(&lease.key, &lease.step(step())).await.unwrap();
    refused(&lease, "deferred").await;
    let settled = produced(&*ledger, 1, 2).await;
    settle(&*ledger, &settled.key, 1, None).await;
    refused(&settled, "settled").await;
    let delivered = produced(&*ledger, 1, 3).await;
    ledger.advance(&delivered.key, &delivered.step(FulfilmentStep::Deliver)).await.unwrap();
    refused(&delivered, "delivered").await;
    let other = Lease { epoch: 7, ..produced(&*ledger, 1, 4).await };
    assert!(matches!(ledger.advance(&other.key, &other.step(step())).await, Err(LedgerError::LeaseLost)));
    assert_eq!(owed(&*ledger).await, U256::from(AMOUNT), "one was deferred");
}

pub async fn what_can_not_be_settled_any_more_is_not_deferred(ledger: Arc<dyn Ledger>, clock: Arc<ManualClock>) {
    paid(&*ledger, 1, 0).await;
    let late = produced(&*ledger, 1, 1).await;
    clock.advance(VALID_BEFORE - START);
    assert!(!defer(&*ledger, &late, PLENTY).await, "it would not be owed for long enough");
}

pub async fn a_deferred_payment_is_idle_at_once(ledger: Arc<dyn Ledger>, _: Arc<ManualClock>) {
    paid(&*ledger, 1, 0).await;
    let (deferred, _leased) = (produced(&*ledger, 1, 1).await, produced(&*ledger, 1, 2).await);
    assert!(defer(&*ledger, &deferred, PLENTY).await);
    let idle = Listing { idle_at: Some(START), ..Listing::of([SettlementState::Due]) };
    let found: Vec<_> = ledger.list(&idle).await.unwrap().iter().map(|record| record.key).collect();
    assert_eq!(found, [deferred.key], "the lease of the other one runs");
    ledger.advance(&deferred.key, &deferred.step(FulfilmentStep::Deliver)).await.unwrap();
    assert!(ledger.get(&deferred.key).await.unwrap().unwrap().deferred);
}
