//! Transactions, account nonces, and the process that settles a payment (point 6 of the contract).

use alloy_primitives::Bytes as RawTransaction;

use super::*;

fn submission(by: u64, nonce: u64, transaction: u8, payments: &[PaymentKey]) -> JournaledTransaction {
    JournaledTransaction {
        sender: SENDER,
        nonce,
        hash: hash(transaction),
        raw: RawTransaction::from(vec![transaction; 3]),
        payments: payments.to_vec(),
        by,
        at: START,
        until: START + 30,
        known_failures: Default::default(),
    }
}

pub async fn one_of_many_processes_gets_a_nonce(ledger: Arc<dyn Ledger>, _: Arc<ManualClock>) {
    let mut tasks = Vec::new();
    for by in 1..=20 {
        let key = due(&*ledger, by, 1).await;
        let ledger = ledger.clone();
        let submission = submission(by.into(), 7, by, &[key]);
        tasks.push(tokio::spawn(async move { (key, ledger.submit(submission).await) }));
    }
    let mut won = 0;
    for task in tasks {
        match task.await.unwrap() {
            (_, Ok(())) => won += 1,
            (key, Err(LedgerError::NonceTaken { next })) => {
                assert_eq!(next, 8);
                assert_eq!(state(&*ledger, &key).await.1, Settlement::Due, "unchanged");
            }
            (_, Err(error)) => panic!("{error}"),
        }
    }
    assert_eq!(won, 1);
    assert_eq!(ledger.submissions(&SENDER, 0).await.unwrap().len(), 1);
}

pub async fn a_submission_is_atomic(ledger: Arc<dyn Ledger>, _: Arc<ManualClock>) {
    let (first, second, paid) = (due(&*ledger, 1, 1).await, due(&*ledger, 2, 1).await, due(&*ledger, 3, 1).await);
    settle(&*ledger, &paid, 9, None).await;
    let refused = ledger.submit(submission(1, 0, 1, &[first, paid, second])).await;
    assert!(matches!(&refused, Err(LedgerError::NotDue(keys)) if *keys == [paid]), "{refused:?}");
    assert_eq!(state(&*ledger, &first).await.1, Settlement::Due);
    assert!(ledger.submissions(&SENDER, 0).await.unwrap().is_empty());

    let unknown = record(9, 9).key;
    let refused = ledger.submit(submission(1, 0, 1, &[first, unknown])).await;
    assert!(matches!(refused, Err(LedgerError::NotFound)), "{refused:?}");
    assert_eq!(state(&*ledger, &first).await.1, Settlement::Due);

    ledger.submit(submission(1, 0, 1, &[first, second])).await.unwrap();
    for key in [first, second] {
        let record = ledger.get(&key).await.unwrap().unwrap();
        assert_eq!((record.settlement, record.transactions), (Settlement::Submitted, vec![hash(1)]));
    }
}

pub async fn a_freed_nonce_is_open_to_all(ledger: Arc<dyn Ledger>, _: Arc<ManualClock>) {
    ledger.submit(submission(1, 4, 1, &[])).await.unwrap();
    ledger.free_nonce(&SENDER, 4, 2).await.unwrap();
    assert!(matches!(ledger.submit(submission(2, 4, 2, &[])).await, Err(LedgerError::NonceTaken { next: 5 })));
    ledger.free_nonce(&SENDER, 4, 1).await.unwrap();
    assert!(ledger.submissions(&SENDER, 0).await.unwrap().is_empty(), "no node accepted it");
    ledger.submit(submission(2, 4, 2, &[])).await.unwrap();
    assert!(matches!(ledger.submit(submission(1, 4, 3, &[])).await, Err(LedgerError::NonceTaken { .. })));
}

pub async fn a_nonce_held_too_long_may_be_replaced(ledger: Arc<dyn Ledger>, _: Arc<ManualClock>) {
    let key = due(&*ledger, 1, 1).await;
    ledger.submit(submission(1, 4, 1, &[key])).await.unwrap();
    let at = START + NONCE_HELD_SECONDS;
    let replacing = |at| JournaledTransaction { at, ..submission(2, 4, 2, &[]) };
    assert!(matches!(ledger.submit(replacing(at)).await, Err(LedgerError::NonceTaken { .. })));
    ledger.submit(replacing(at + 1)).await.unwrap();
    let record = ledger.get(&key).await.unwrap().unwrap();
    assert_eq!(record.settlement, Settlement::Submitted, "its transaction may still be included");
}

pub async fn the_newest_transaction_of_a_nonce_is_listed(ledger: Arc<dyn Ledger>, _: Arc<ManualClock>) {
    let key = due(&*ledger, 1, 1).await;
    for transaction in [1, 2] {
        ledger.submit(submission(1, 4, transaction, &[key])).await.unwrap();
    }
    ledger.submit(submission(1, 5, 3, &[])).await.unwrap();
    let listed = ledger.submissions(&SENDER, 4).await.unwrap();
    let shown: Vec<_> = listed.iter().map(|found| (found.nonce, found.hash, found.raw.to_vec())).collect();
    assert_eq!(shown, [(4, hash(2), vec![2; 3]), (5, hash(3), vec![3; 3])]);
    assert_eq!(listed[0].payments, [key]);
    assert_eq!(ledger.get(&key).await.unwrap().unwrap().transactions, [hash(1), hash(2)], "both may be included");
}

pub async fn nonces_in_final_blocks_are_removed(ledger: Arc<dyn Ledger>, _: Arc<ManualClock>) {
    for nonce in 0..10 {
        ledger.submit(submission(1, nonce, 1, &[])).await.unwrap();
    }
    ledger.forget_nonces(&SENDER, 8).await.unwrap();
    let left: Vec<u64> = ledger.submissions(&SENDER, 0).await.unwrap().iter().map(|found| found.nonce).collect();
    assert_eq!(left, [8, 9]);
    let elsewhere = Sender { address: Address::ZERO, ..SENDER };
    assert!(ledger.submissions(&elsewhere, 0).await.unwrap().is_empty());
}

pub async fn a_payment_is_settled_by_one_process_at_a_time(ledger: Arc<dyn Ledger>, clock: Arc<ManualClock>) {
    let key = due(&*ledger, 1, 1).await;
    let claim = |by| SettlementStep::Claim(Settling { by, until: START + 30 });
    ledger.advance(&key, &claim(1).into()).await.unwrap();
    ledger.advance(&key, &claim(1).into()).await.expect("the same process may renew its claim");
    assert!(matches!(ledger.advance(&key, &claim(2).into()).await, Err(LedgerError::InvalidTransition(_))));
    let refused = ledger.submit(submission(2, 0, 1, &[key])).await;
    assert!(matches!(&refused, Err(LedgerError::NotDue(keys)) if *keys == [key]), "{refused:?}");
    ledger.submit(submission(1, 0, 1, &[key])).await.unwrap();
    clock.advance(31);
    ledger
        .advance(&key, &SettlementStep::Claim(Settling { by: 2, until: START + 60 }).into())
        .await
        .expect("the claim has ended");
    let later = JournaledTransaction { at: START + 31, ..submission(2, 1, 2, &[key]) };
    ledger.submit(later).await.unwrap();
}

pub async fn a_claim_holds_to_the_last_second(ledger: Arc<dyn Ledger>, clock: Arc<ManualClock>) {
    let keys = [due(&*ledger, 1, 1).await, due(&*ledger, 2, 1).await];
    let settling = |by, until| Settling { by, until };
    ledger.advance(&keys[0], &SettlementStep::Claim(settling(1, START + 30)).into()).await.unwrap();
    ledger.submit(submission(1, 0, 1, &[keys[1]])).await.unwrap();
    let by_another = settling(2, START + 90);
    clock.advance(30);
    for key in keys {
        for step in
            [SettlementStep::Claim(by_another), SettlementStep::Delegate { settling: by_another, known_failures: 0 }]
        {
            let refused = ledger.advance(&key, &step.clone().into()).await;
            assert!(matches!(refused, Err(LedgerError::InvalidTransition(_))), "{step:?}: {refused:?}");
        }
        let refused = ledger.submit(submission(2, 1, 2, &[key])).await;
        assert!(matches!(refused, Err(LedgerError::NotDue(_))), "{refused:?}");
        let taken = ledger.advance(&key, &SettlementStep::Claim(settling(1, START + 30)).into()).await;
        taken.expect("the same process may renew its claim");
    }
    clock.advance(1);
    ledger.advance(&keys[0], &SettlementStep::Claim(by_another).into()).await.expect("the claim has ended");
    ledger.submit(submission(2, 1, 2, &[keys[1]])).await.expect("the claim has ended");
}

pub async fn a_delegated_payment_is_unknown_until_it_is_reported(ledger: Arc<dyn Ledger>, clock: Arc<ManualClock>) {
    let key = due(&*ledger, 1, 1).await;
    let delegate = |by, until| SettlementStep::Delegate { settling: Settling { by, until }, known_failures: 0 };
    ledger.advance(&key, &delegate(1, START + 30).into()).await.unwrap();
    assert_eq!(state(&*ledger, &key).await.1, Settlement::Unknown, "also if this process ends now");
    assert!(matches!(
        ledger.advance(&key, &delegate(2, START + 30).into()).await,
        Err(LedgerError::InvalidTransition(_))
    ));
    clock.advance(31);
    ledger.advance(&key, &delegate(2, START + 60).into()).await.expect("the first claim has ended");

    let fresh = reserve(&*ledger, record(2, 1)).await.key;
    let refused = ledger.advance(&fresh, &delegate(1, START + 60).into()).await;
    assert!(matches!(refused, Err(LedgerError::InvalidTransition(_))), "not due: {refused:?}");
}

pub async fn a_reorged_payment_is_due_and_in_flight(ledger: Arc<dyn Ledger>, _: Arc<ManualClock>) {
    let key = due(&*ledger, 1, 1).await;
    let settle = SettlementStep::Settle { transaction: hash(1), block: Some(9), fee: Some(U256::from(5)) };
    ledger.advance(&key, &settle.clone().into()).await.unwrap();
    let record = ledger.get(&key).await.unwrap().unwrap();
    assert_eq!((record.fee, record.settled_at), (Some(U256::from(5)), Some(START)));
    ledger.advance(&key, &SettlementStep::Reorg.into()).await.unwrap();
    let record = ledger.get(&key).await.unwrap().unwrap();
    assert_eq!((record.settlement, record.admitted, record.fee), (Settlement::Due, true, None));
    assert_eq!(record.fulfilment, Fulfilment::Produced, "the response was produced");
    let other = reserve(&*ledger, super::record(1, 2)).await;
    assert!(matches!(admit(&*ledger, &other, 19, 10).await, Err(LedgerError::InsufficientFunds)), "both are in flight");
    ledger.advance(&key, &settle.into()).await.unwrap();
    ledger.advance(&key, &SettlementStep::Finalize.into()).await.unwrap();
    assert!(
        matches!(ledger.advance(&key, &SettlementStep::Reorg.into()).await, Err(LedgerError::InvalidTransition(_))),
        "final is final"
    );
}

pub async fn a_reorged_payment_is_idle_unless_it_is_worked_on(ledger: Arc<dyn Ledger>, _: Arc<ManualClock>) {
    let produced = due(&*ledger, 1, 1).await;
    let upfront = reserve(&*ledger, record(2, 1)).await;
    for key in [produced, upfront.key] {
        settle(&*ledger, &key, 1, Some(9)).await;
    }
    ledger.advance(&upfront.key, &upfront.step(FulfilmentStep::Start { until: 0 })).await.unwrap();
    for key in [produced, upfront.key] {
        ledger.advance(&key, &SettlementStep::Reorg.into()).await.unwrap();
    }
    let idle = Listing { idle_at: Some(START), ..Listing::of([SettlementState::Due]) };
    let found: Vec<_> = ledger.list(&idle).await.unwrap().iter().map(|record| record.key).collect();
    assert_eq!(found, [produced], "the lease of the other one runs");
}

pub async fn payments_are_listed_in_order_by_page(ledger: Arc<dyn Ledger>, _: Arc<ManualClock>) {
    let mut expected = Vec::new();
    for n in 0..25 {
        let key = due(&*ledger, n % 5 + 1, n.into()).await;
        match n % 3 {
            0 => {
                let block = Some(u64::from(n));
                ledger
                    .advance(&key, &SettlementStep::Settle { transaction: hash(n), block, fee: None }.into())
                    .await
                    .unwrap();
            }
            1 => {
                ledger.advance(&key, &SettlementStep::Submit { transaction: hash(n) }.into()).await.unwrap();
                expected.push(key);
            }
            _ => expected.push(key),
        }
    }
    expected.sort();
    let mut listing = Listing { limit: 4, ..Listing::of([SettlementState::Due, SettlementState::Submitted]) };
    let mut found = Vec::new();
    loop {
        let page = ledger.list(&listing).await.unwrap();
        assert!(page.len() <= 4);
        let Some(last) = page.last() else { break };
        listing.after = Some(last.key);
        found.extend(page.iter().map(|record| record.key));
    }
    assert_eq!(found, expected);
    let early = Listing { up_to_block: Some(9), ..Listing::of([SettlementState::Settled]) };
    assert_eq!(ledger.list(&early).await.unwrap().len(), 4, "blocks 0, 3, 6 and 9");
    let elsewhere = Listing { network: Some(Network::BASE_SEPOLIA), ..Listing::default() };
    assert!(ledger.list(&elsewhere).await.unwrap().is_empty());
    let produced = Listing { fulfilment: vec![Fulfilment::Produced], ..Listing::default() };
    assert_eq!(ledger.list(&produced).await.unwrap().len(), 25);
}

pub async fn a_leased_or_claimed_payment_is_not_idle(ledger: Arc<dyn Ledger>, _: Arc<ManualClock>) {
    let leased = due(&*ledger, 1, 1).await;
    let submitted = due(&*ledger, 2, 1).await;
    ledger.submit(JournaledTransaction { until: START + 50, ..submission(1, 0, 1, &[submitted]) }).await.unwrap();
    let idle = async |at| {
        let listing = Listing {
            idle_at: Some(at),
            ..Listing::of([SettlementState::Due, SettlementState::Submitted, SettlementState::Unknown])
        };
        let found = ledger.list(&listing).await.unwrap();
        found.iter().map(|record| record.key).collect::<Vec<_>>()
    };
    assert_eq!(idle(START + 30).await, []);
    assert_eq!(idle(START + 31).await, [leased]);
    assert_eq!(idle(START + 51).await, [leased, submitted]);
}

pub async fn a_complete_response_is_stored_with_its_step(ledger: Arc<dyn Ledger>, _: Arc<ManualClock>) {
    let lease = reserve(&*ledger, record(1, 1)).await;
    admit(&*ledger, &lease, 1_000, 1).await.unwrap();
    let produce =
        || FulfilmentStep::Produce { charged: None, body: None, at: START, response: Some(response(b"answer")) };
    assert!(matches!(ledger.advance(&lease.key, &lease.step(produce())).await, Err(LedgerError::InvalidTransition(_))));
    assert!(ledger.response(&lease.key).await.unwrap().is_none(), "a refused step stores nothing");
    ledger.advance(&lease.key, &lease.step(FulfilmentStep::Start { until: 0 })).await.unwrap();
    ledger.advance(&lease.key, &lease.step(produce())).await.unwrap();
    assert_eq!(ledger.response(&lease.key).await.unwrap().unwrap().body, "answer");
}
