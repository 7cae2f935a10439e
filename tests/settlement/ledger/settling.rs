//! The contract's second half: transactions, nonces, and who looks after what.

use alloy_primitives::Bytes;
use tower_x402::ledger::{Listing, NONCE_HELD_SECONDS, Sender, SettlementState, Submission};

use super::*;

on_every_ledger! {
    of_many_processes_one_gets_a_nonce,
    a_submission_happens_wholly_or_not_at_all,
    a_nonce_given_back_is_for_anybody,
    a_nonce_that_nobody_uses_any_more_may_be_replaced,
    a_replacement_is_the_one_to_send_again,
    nonces_in_blocks_are_forgotten,
    a_payment_is_settled_by_one_process_at_a_time,
    other_processes_keep_away_to_the_last_second,
    what_is_entrusted_to_somebody_is_unknown_until_they_answer,
    an_undone_settlement_is_due_and_in_flight_again,
    an_undone_settlement_is_found_at_once_unless_it_is_worked_for,
    open_payments_are_listed_in_order_page_by_page,
    what_somebody_works_on_is_not_idle,
    a_whole_response_is_kept_with_the_step_that_produced_it,
}

const SENDER: Sender = Sender { network: Network::BASE, address: Address::repeat_byte(0x5e) };

fn submission(by: u64, nonce: u64, transaction: u8, payments: &[PaymentKey]) -> Submission {
    Submission {
        sender: SENDER,
        nonce,
        hash: hash(transaction),
        raw: Bytes::from(vec![transaction; 3]),
        payments: payments.to_vec(),
        by,
        at: CLOCK_START,
        until: CLOCK_START + 30,
        known_failures: Default::default(),
    }
}

/// A payment whose work is done.
async fn due(ledger: &dyn Ledger, payer: u8, nonce: u64) -> PaymentKey {
    let lease = reserve(ledger, record(payer, nonce)).await;
    produce(ledger, &lease).await;
    lease.key
}

async fn of_many_processes_one_gets_a_nonce(TestLedger { ledger, directory: _directory, .. }: TestLedger) {
    let mut tasks = Vec::new();
    for by in 0..20 {
        let key = due(&*ledger, by + 1, 1).await;
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
                assert_eq!(state(&*ledger, &key).await.1, Settlement::Due, "it did not take the step");
            }
            (_, Err(error)) => panic!("{error}"),
        }
    }
    assert_eq!(won, 1);
    assert_eq!(ledger.submissions(&SENDER, 0).await.unwrap().len(), 1);
}

async fn a_submission_happens_wholly_or_not_at_all(TestLedger { ledger, directory: _directory, .. }: TestLedger) {
    let (first, second, paid) = (due(&*ledger, 1, 1).await, due(&*ledger, 2, 1).await, due(&*ledger, 3, 1).await);
    ledger.settle(&paid, &SettlementStep::Settle { transaction: hash(9), block: None, fee: None }).await.unwrap();
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

async fn a_nonce_given_back_is_for_anybody(TestLedger { ledger, directory: _directory, .. }: TestLedger) {
    ledger.submit(submission(1, 4, 1, &[])).await.unwrap();
    ledger.free_nonce(&SENDER, 4, 2).await.unwrap();
    assert!(matches!(ledger.submit(submission(2, 4, 2, &[])).await, Err(LedgerError::NonceTaken { next: 5 })));
    ledger.free_nonce(&SENDER, 4, 1).await.unwrap();
    assert!(ledger.submissions(&SENDER, 0).await.unwrap().is_empty(), "no node took it");
    ledger.submit(submission(2, 4, 2, &[])).await.unwrap();
    assert!(matches!(ledger.submit(submission(1, 4, 3, &[])).await, Err(LedgerError::NonceTaken { .. })));
}

async fn a_nonce_that_nobody_uses_any_more_may_be_replaced(
    TestLedger { ledger, directory: _directory, .. }: TestLedger,
) {
    let key = due(&*ledger, 1, 1).await;
    ledger.submit(submission(1, 4, 1, &[key])).await.unwrap();
    let at = CLOCK_START + NONCE_HELD_SECONDS;
    let replacing = |at| Submission { at, ..submission(2, 4, 2, &[]) };
    assert!(matches!(ledger.submit(replacing(at)).await, Err(LedgerError::NonceTaken { .. })));
    ledger.submit(replacing(at + 1)).await.unwrap();
    let record = ledger.get(&key).await.unwrap().unwrap();
    assert_eq!(record.settlement, Settlement::Submitted, "its transaction may still win");
}

async fn a_replacement_is_the_one_to_send_again(TestLedger { ledger, directory: _directory, .. }: TestLedger) {
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

async fn nonces_in_blocks_are_forgotten(TestLedger { ledger, directory: _directory, .. }: TestLedger) {
    for nonce in 0..10 {
        ledger.submit(submission(1, nonce, 1, &[])).await.unwrap();
    }
    ledger.forget_nonces(&SENDER, 8).await.unwrap();
    let left: Vec<u64> = ledger.submissions(&SENDER, 0).await.unwrap().iter().map(|found| found.nonce).collect();
    assert_eq!(left, [8, 9]);
    let elsewhere = Sender { address: Address::ZERO, ..SENDER };
    assert!(ledger.submissions(&elsewhere, 0).await.unwrap().is_empty());
}

async fn a_payment_is_settled_by_one_process_at_a_time(
    TestLedger { ledger, clock, directory: _directory }: TestLedger,
) {
    let key = due(&*ledger, 1, 1).await;
    let take = |by| SettlementStep::Claim(Settling { by, until: CLOCK_START + 30 });
    ledger.settle(&key, &take(1)).await.unwrap();
    ledger.settle(&key, &take(1)).await.expect("whoever has it may take it again");
    assert!(matches!(ledger.settle(&key, &take(2)).await, Err(LedgerError::InvalidTransition(_))));
    let refused = ledger.submit(submission(2, 0, 1, &[key])).await;
    assert!(matches!(&refused, Err(LedgerError::NotDue(keys)) if *keys == [key]), "{refused:?}");
    ledger.submit(submission(1, 0, 1, &[key])).await.unwrap();
    clock.advance(31);
    ledger.settle(&key, &SettlementStep::Claim(Settling { by: 2, until: CLOCK_START + 60 })).await.expect("it ran out");
    let later = Submission { at: CLOCK_START + 31, ..submission(2, 1, 2, &[key]) };
    ledger.submit(later).await.unwrap();
}

async fn other_processes_keep_away_to_the_last_second(TestLedger { ledger, clock, directory: _directory }: TestLedger) {
    let keys = [due(&*ledger, 1, 1).await, due(&*ledger, 2, 1).await];
    let settling = |by, until| Settling { by, until };
    ledger.settle(&keys[0], &SettlementStep::Claim(settling(1, CLOCK_START + 30))).await.unwrap();
    ledger.submit(submission(1, 0, 1, &[keys[1]])).await.unwrap();
    let by_another = settling(2, CLOCK_START + 90);
    clock.advance(30);
    for key in keys {
        for step in
            [SettlementStep::Claim(by_another), SettlementStep::Delegate { settling: by_another, known_failures: 0 }]
        {
            let refused = ledger.settle(&key, &step).await;
            assert!(matches!(refused, Err(LedgerError::InvalidTransition(_))), "{step:?}: {refused:?}");
        }
        let refused = ledger.submit(submission(2, 1, 2, &[key])).await;
        assert!(matches!(refused, Err(LedgerError::NotDue(_))), "{refused:?}");
        let taken = ledger.settle(&key, &SettlementStep::Claim(settling(1, CLOCK_START + 30))).await;
        taken.expect("whoever has it may go on");
    }
    clock.advance(1);
    ledger.settle(&keys[0], &SettlementStep::Claim(by_another)).await.expect("its time ran out");
    ledger.submit(submission(2, 1, 2, &[keys[1]])).await.expect("its time ran out");
}

async fn what_is_entrusted_to_somebody_is_unknown_until_they_answer(
    TestLedger { ledger, clock, directory: _directory }: TestLedger,
) {
    let key = due(&*ledger, 1, 1).await;
    let entrust = |by, until| SettlementStep::Delegate { settling: Settling { by, until }, known_failures: 0 };
    ledger.settle(&key, &entrust(1, CLOCK_START + 30)).await.unwrap();
    assert_eq!(state(&*ledger, &key).await.1, Settlement::Unknown, "also if this process dies now");
    assert!(matches!(ledger.settle(&key, &entrust(2, CLOCK_START + 30)).await, Err(LedgerError::InvalidTransition(_))));
    clock.advance(31);
    ledger.settle(&key, &entrust(2, CLOCK_START + 60)).await.expect("the first one's time ran out");

    let fresh = reserve(&*ledger, record(2, 1)).await.key;
    let refused = ledger.settle(&fresh, &entrust(1, CLOCK_START + 60)).await;
    assert!(matches!(refused, Err(LedgerError::InvalidTransition(_))), "not due: {refused:?}");
}

async fn an_undone_settlement_is_due_and_in_flight_again(TestLedger { ledger, directory: _directory, .. }: TestLedger) {
    let key = due(&*ledger, 1, 1).await;
    let settle = SettlementStep::Settle { transaction: hash(1), block: Some(9), fee: Some(U256::from(5)) };
    ledger.settle(&key, &settle.clone()).await.unwrap();
    let record = ledger.get(&key).await.unwrap().unwrap();
    assert_eq!((record.fee, record.settled_at), (Some(U256::from(5)), Some(CLOCK_START)));
    ledger.settle(&key, &SettlementStep::Reorg).await.unwrap();
    let record = ledger.get(&key).await.unwrap().unwrap();
    assert_eq!((record.settlement, record.admitted, record.fee), (Settlement::Due, true, None));
    assert_eq!(record.fulfilment, Fulfilment::Produced, "what was answered stays answered");
    let other = reserve(&*ledger, super::record(1, 2)).await;
    assert!(matches!(admit(&*ledger, &other, 19, 10).await, Err(LedgerError::InsufficientFunds)), "both are in flight");
    ledger.settle(&key, &settle).await.unwrap();
    ledger.settle(&key, &SettlementStep::Finalize).await.unwrap();
    assert!(
        matches!(ledger.settle(&key, &SettlementStep::Reorg).await, Err(LedgerError::InvalidTransition(_))),
        "final is final"
    );
}

async fn an_undone_settlement_is_found_at_once_unless_it_is_worked_for(
    TestLedger { ledger, directory: _directory, .. }: TestLedger,
) {
    let produced = due(&*ledger, 1, 1).await;
    let upfront = reserve(&*ledger, record(2, 1)).await;
    for key in [produced, upfront.key] {
        let settle = SettlementStep::Settle { transaction: hash(1), block: Some(9), fee: None };
        ledger.settle(&key, &settle).await.unwrap();
    }
    ledger.fulfil(&upfront, &FulfilmentStep::Start { until: 0 }).await.unwrap();
    for key in [produced, upfront.key] {
        ledger.settle(&key, &SettlementStep::Reorg).await.unwrap();
    }
    let idle = Listing { idle_at: Some(CLOCK_START), ..Listing::of([SettlementState::Due]) };
    let found: Vec<_> = ledger.list(&idle).await.unwrap().iter().map(|record| record.key).collect();
    assert_eq!(found, [produced], "whoever settled it is gone; the other's lease still runs");
}

async fn open_payments_are_listed_in_order_page_by_page(TestLedger { ledger, directory: _directory, .. }: TestLedger) {
    let mut expected = Vec::new();
    for n in 0..25 {
        let key = due(&*ledger, n % 5 + 1, n.into()).await;
        match n % 3 {
            0 => {
                let block = Some(u64::from(n));
                ledger.settle(&key, &SettlementStep::Settle { transaction: hash(n), block, fee: None }).await.unwrap();
            }
            1 => {
                ledger.settle(&key, &SettlementStep::Submit { transaction: hash(n) }).await.unwrap();
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

async fn what_somebody_works_on_is_not_idle(TestLedger { ledger, directory: _directory, .. }: TestLedger) {
    let leased = due(&*ledger, 1, 1).await;
    let submitted = due(&*ledger, 2, 1).await;
    ledger.submit(Submission { until: CLOCK_START + 50, ..submission(1, 0, 1, &[submitted]) }).await.unwrap();
    let idle = async |at| {
        let listing = Listing {
            idle_at: Some(at),
            ..Listing::of([SettlementState::Due, SettlementState::Submitted, SettlementState::Unknown])
        };
        let found = ledger.list(&listing).await.unwrap();
        found.iter().map(|record| record.key).collect::<Vec<_>>()
    };
    assert_eq!(idle(CLOCK_START + 30).await, []);
    assert_eq!(idle(CLOCK_START + 31).await, [leased]);
    assert_eq!(idle(CLOCK_START + 51).await, [leased, submitted]);
}

async fn a_whole_response_is_kept_with_the_step_that_produced_it(
    TestLedger { ledger, directory: _directory, .. }: TestLedger,
) {
    let lease = reserve(&*ledger, record(1, 1)).await;
    admit(&*ledger, &lease, 1_000, 1).await.unwrap();
    let produce = || {
        let response = StoredResponse {
            status: StatusCode::OK,
            headers: HeaderMap::new(),
            body: Bytes::from_static(b"answer").0,
            trailers: None,
            stored_at: CLOCK_START,
        };
        FulfilmentStep::Produce { body: None, at: CLOCK_START, response: Some(Arc::new(response)) }
    };
    assert!(matches!(ledger.fulfil(&lease, &produce()).await, Err(LedgerError::InvalidTransition(_))));
    assert!(ledger.response(&lease.key).await.unwrap().is_none(), "a step that was refused brings nothing");
    ledger.fulfil(&lease, &FulfilmentStep::Start { until: 0 }).await.unwrap();
    ledger.fulfil(&lease, &produce()).await.unwrap();
    assert_eq!(ledger.response(&lease.key).await.unwrap().unwrap().body, "answer");
}
