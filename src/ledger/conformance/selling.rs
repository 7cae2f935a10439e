//! The tests of the [contract of payment channels](crate::ledger::channels#contract).

use std::collections::BTreeSet;

use super::{
    channels::{begin, charge, config, get, id, observation, open, refund, sell, voucher},
    *,
};
use crate::{
    ledger::channels::{ChannelLedgerError, ChannelRecord, ChannelStep, ExecutedRefund, LastRefund, RequestName},
    vouchers::{ChannelId, ChannelObservation},
};

async fn observe(ledger: &dyn ChannelLedger, salt: u8, observation: ChannelObservation) -> ChannelRecord {
    ledger.advance(&id(salt), &ChannelStep::Observe { observation, now: START }).await.unwrap()
}

pub async fn a_channel_is_opened_as_the_chain_has_it(ledger: Arc<dyn ChannelLedger>, _: Arc<ManualClock>) {
    assert_eq!(ledger.channel(&id(1)).await.unwrap(), None);
    let unknown = ledger.advance(&id(1), &begin(1, hash(1), 10, 10)).await;
    assert!(matches!(unknown, Err(ChannelLedgerError::NotFound)), "{unknown:?}");
    let step = ChannelStep::Open {
        network: Network::BASE,
        config: config(1),
        observation: observation(1, 100, 40, 7),
        now: START,
    };
    let wrong = ledger.advance(&id(2), &step).await;
    assert!(matches!(wrong, Err(ChannelLedgerError::OtherChannel)), "{wrong:?}");
    assert_eq!((ledger.channel(&id(1)).await.unwrap(), ledger.channel(&id(2)).await.unwrap()), (None, None));
    let opened = ledger.advance(&id(1), &step).await.unwrap();
    assert_eq!((opened.id, opened.charged(), opened.unclaimed()), (id(1), 40, 0), "what was claimed was charged");
    // A channel that is known keeps what was charged.
    sell(&*ledger, 1, hash(1), 10).await;
    let again = ledger.advance(&id(1), &step).await.unwrap();
    assert_eq!((again.charged(), again.unclaimed()), (50, 10));
}

pub async fn a_channel_is_read_as_it_was_written(ledger: Arc<dyn ChannelLedger>, _: Arc<ManualClock>) {
    let opened = open(&*ledger, 1, 1_000).await;
    assert_eq!(get(&*ledger, 1).await, opened);
    let mut step = begin(1, hash(1), 30, 30);
    for next in [charge(1, 20), begin(1, hash(2), 50, 30)] {
        let after = ledger.advance(&id(1), &step).await.unwrap();
        assert_eq!(get(&*ledger, 1).await, after);
        step = next;
    }
    for step in [
        step,
        ChannelStep::Observe { observation: observation(1, 1_000, 5, 2), now: START + 1 },
        ChannelStep::Publish { max: 25 },
        ChannelStep::BeginClaim { now: START, until: START + 10 },
        refund(hash(9), 50),
    ] {
        let after = ledger.advance(&id(1), &step).await.unwrap();
        assert_eq!(get(&*ledger, 1).await, after, "after {step:?}");
    }
    let record = get(&*ledger, 1).await;
    assert_eq!((record.charged(), record.unclaimed(), record.epoch), (20, 15, 2));
    assert_eq!(record.pending.map(|pending| pending.request), Some(hash(2)));
    assert_eq!((record.voucher, record.published), (Some(voucher(1, 30)), 30));
    assert_eq!(record.claiming_until, Some(START + 10));
    assert_eq!(record.refund.map(|refund| refund.amount), Some(50));
}

pub async fn a_refused_step_changes_nothing(ledger: Arc<dyn ChannelLedger>, _: Arc<ManualClock>) {
    open(&*ledger, 1, 100).await;
    let sold = sell(&*ledger, 1, hash(1), 10).await;
    let id = id(1);
    let refused = |step| {
        let ledger = ledger.clone();
        async move { ledger.advance(&id, &step).await.expect_err("it is refused") }
    };
    let error = refused(begin(1, hash(1), 10, 10)).await;
    assert!(matches!(&error, ChannelLedgerError::Answered(shown) if **shown == sold), "{error:?}");
    for max in [10, 19, 21] {
        let error = refused(begin(1, hash(2), max, 10)).await;
        assert!(matches!(&error, ChannelLedgerError::Mismatch(shown) if **shown == sold), "{error:?}");
    }
    let error = refused(begin(1, hash(2), 101, 91)).await;
    assert!(matches!(&error, ChannelLedgerError::ExceedsBalance(shown) if **shown == sold), "{error:?}");
    let error = refused(begin(2, hash(2), 20, 10)).await;
    assert!(matches!(error, ChannelLedgerError::OtherChannel), "{error:?}");
    let error = refused(charge(2, 10)).await;
    assert!(matches!(error, ChannelLedgerError::LeaseLost), "{error:?}");
    let error = refused(refund(hash(9), 91)).await;
    assert!(matches!(error, ChannelLedgerError::ExceedsBalance(_)), "{error:?}");
    assert_eq!(get(&*ledger, 1).await, sold);
    let held = ledger.advance(&id, &begin(1, hash(2), 20, 10)).await.unwrap();
    let error = refused(begin(1, hash(3), 20, 10)).await;
    assert!(matches!(error, ChannelLedgerError::Busy { until } if until == START + 30), "{error:?}");
    let error = refused(charge(held.epoch, 11)).await;
    assert!(matches!(error, ChannelLedgerError::ExceedsVoucher), "{error:?}");
    assert_eq!(get(&*ledger, 1).await, held);
}

pub async fn one_of_many_concurrent_requests_holds_a_channel(ledger: Arc<dyn ChannelLedger>, _: Arc<ManualClock>) {
    open(&*ledger, 1, 100).await;
    let tasks = (0..40).map(|request| {
        let ledger = ledger.clone();
        tokio::spawn(async move { ledger.advance(&id(1), &begin(1, hash(request), 10, 10)).await })
    });
    let mut holders = Vec::new();
    for begun in join_all(tasks).await {
        match begun.unwrap() {
            Ok(record) => holders.push(record),
            Err(ChannelLedgerError::Busy { .. }) => {}
            Err(error) => panic!("{error:?}"),
        }
    }
    let [holder] = &holders[..] else { panic!("{} hold the channel", holders.len()) };
    assert_eq!(&get(&*ledger, 1).await, holder);
}

pub async fn copies_of_a_request_are_charged_once(ledger: Arc<dyn ChannelLedger>, _: Arc<ManualClock>) {
    open(&*ledger, 1, 100).await;
    let copy = |ledger: Arc<dyn ChannelLedger>| async move {
        loop {
            match ledger.advance(&id(1), &begin(1, hash(1), 10, 10)).await {
                Ok(held) => {
                    // Free of charge, so that the same voucher fits again.
                    ledger.advance(&id(1), &charge(held.epoch, 0)).await.unwrap();
                    return true;
                }
                Err(ChannelLedgerError::Answered(_)) => return false,
                Err(ChannelLedgerError::Busy { .. }) => tokio::task::yield_now().await,
                Err(error) => panic!("{error:?}"),
            }
        }
    };
    let worked = join_all((0..20).map(|_| tokio::spawn(copy(ledger.clone())))).await;
    assert_eq!(worked.into_iter().filter(|worked| *worked.as_ref().unwrap()).count(), 1);
    let record = get(&*ledger, 1).await;
    assert_eq!((record.epoch, record.answers.len()), (1, 1));
}

pub async fn concurrent_charges_and_observations_lose_none(ledger: Arc<dyn ChannelLedger>, _: Arc<ManualClock>) {
    const TASKS: u8 = 4;
    const EACH: u8 = 10;
    open(&*ledger, 1, 10_000).await;
    let sell = |task: u8, ledger: Arc<dyn ChannelLedger>| async move {
        for n in 0..EACH {
            let (request, price) = (hash(1 + task * EACH + n), u128::from(n) + 1);
            let mut charged = get(&*ledger, 1).await.charged();
            let epoch = loop {
                match ledger.advance(&id(1), &begin(1, request, charged + price, price)).await {
                    Ok(held) => break held.epoch,
                    Err(ChannelLedgerError::Mismatch(shown)) => charged = shown.charged(),
                    Err(ChannelLedgerError::Busy { .. }) => tokio::task::yield_now().await,
                    Err(error) => panic!("{error:?}"),
                }
            };
            ledger.advance(&id(1), &charge(epoch, price)).await.unwrap();
        }
    };
    let watch = |ledger: Arc<dyn ChannelLedger>| async move {
        let mut seen = 0;
        for block in 2..30 {
            let shown = observe(&*ledger, 1, observation(1, 10_000, 0, block)).await;
            assert!(shown.charged() >= seen, "the watermark fell");
            seen = shown.charged();
        }
    };
    let sellers: Vec<_> = (0..TASKS).map(|task| tokio::spawn(sell(task, ledger.clone()))).collect();
    tokio::spawn(watch(ledger.clone())).await.unwrap();
    for seller in sellers {
        seller.await.unwrap();
    }
    let record = get(&*ledger, 1).await;
    let sum = u128::from(TASKS) * (1..=u128::from(EACH)).sum::<u128>();
    assert_eq!((record.charged(), record.unclaimed()), (sum, sum));
    assert_eq!((record.epoch, record.observed.block), (u64::from(TASKS * EACH), 29));
}

pub async fn requests_on_different_channels_do_not_wait_for_each_other(
    ledger: Arc<dyn ChannelLedger>,
    _: Arc<ManualClock>,
) {
    for salt in 1..=20 {
        open(&*ledger, salt, 100).await;
        ledger.advance(&id(salt), &begin(salt, hash(1), 10, 10)).await.expect("the others hold their own");
    }
    for salt in 1..=20 {
        ledger.advance(&id(salt), &charge(1, u128::from(salt) / 2)).await.unwrap();
        assert_eq!(get(&*ledger, salt).await.charged(), u128::from(salt) / 2);
    }
}

pub async fn a_request_that_lost_the_channel_charges_nothing(ledger: Arc<dyn ChannelLedger>, _: Arc<ManualClock>) {
    open(&*ledger, 1, 100).await;
    let first = ledger.advance(&id(1), &begin(1, hash(1), 10, 10)).await.unwrap();
    let take = |now| {
        let (request, voucher) = (hash(2), voucher(1, 10));
        ChannelStep::Begin { request, name: None, voucher, price: 10, now, until: now + 30 }
    };
    let early = ledger.advance(&id(1), &take(START + 29)).await;
    assert!(matches!(early, Err(ChannelLedgerError::Busy { .. })), "{early:?}");
    let second = ledger.advance(&id(1), &take(START + 30)).await.unwrap();
    assert!(second.epoch > first.epoch);
    let late = ledger.advance(&id(1), &charge(first.epoch, 10)).await;
    assert!(matches!(late, Err(ChannelLedgerError::LeaseLost)), "{late:?}");
    ledger.advance(&id(1), &ChannelStep::Release { epoch: first.epoch }).await.expect("it does nothing");
    assert_eq!(get(&*ledger, 1).await, second);
    ledger.advance(&id(1), &charge(second.epoch, 10)).await.unwrap();
    ledger.advance(&id(1), &charge(second.epoch, 10)).await.expect("a repetition does nothing");
    assert_eq!(get(&*ledger, 1).await.charged(), 10);
}

pub async fn a_released_channel_is_free_and_uncharged(ledger: Arc<dyn ChannelLedger>, _: Arc<ManualClock>) {
    open(&*ledger, 1, 100).await;
    let held = ledger.advance(&id(1), &begin(1, hash(1), 10, 10)).await.unwrap();
    ledger.advance(&id(1), &ChannelStep::Release { epoch: held.epoch }).await.unwrap();
    let again = ledger.advance(&id(1), &begin(1, hash(1), 10, 10)).await.expect("the same voucher is presented again");
    assert_eq!((again.charged(), again.voucher), (0, None), "a voucher that nothing was charged by proves nothing");
}

pub async fn a_charge_stores_its_response(ledger: Arc<dyn ChannelLedger>, clock: Arc<ManualClock>) {
    let opened = open(&*ledger, 1, 100).await;
    let key = opened.response_key(hash(1));
    assert!(ledger.response(&key).await.unwrap().is_none());
    let held = ledger.advance(&id(1), &begin(1, hash(1), 10, 10)).await.unwrap();
    let charge = ChannelStep::Charge { epoch: held.epoch, amount: 7, response: Some(response(b"verdict")), now: START };
    let charged = ledger.advance(&id(1), &charge).await.unwrap();
    let answer = charged.answer_to(hash(1)).expect("it is remembered");
    assert_eq!((answer.charged, answer.total), (7, 7));
    let kept = ledger.response(&key).await.unwrap().expect("it is kept");
    assert_eq!(kept, response(b"verdict"));
    assert!(ledger.response(&opened.response_key(hash(2))).await.unwrap().is_none());
    let size = ledger.response_limit();
    let held = ledger.advance(&id(1), &begin(1, hash(2), 8, 1)).await.unwrap();
    let large = StoredResponse { body: vec![0; size + 1].into(), ..response(b"") };
    let charge = ChannelStep::Charge { epoch: held.epoch, amount: 1, response: Some(large), now: START };
    ledger.advance(&id(1), &charge).await.expect("a response above the limit is left out");
    assert!(ledger.response(&opened.response_key(hash(2))).await.unwrap().is_none());
    // One that streamed comes after its charge.
    let streamed = opened.response_key(hash(2));
    ledger.store_response(&streamed, response(b"streamed")).await.unwrap();
    let kept = ledger.response(&streamed).await.unwrap().expect("it is kept");
    assert_eq!(&kept.body[..], b"streamed");
    clock.advance(100_000);
    assert!(ledger.response(&key).await.unwrap().is_none(), "it is too old");
    assert_eq!(get(&*ledger, 1).await.charged(), 8);
}

/// Returns the step with which a request takes a channel that its payer names.
fn begin_named(request: B256, max: u128, name: RequestName) -> ChannelStep {
    let voucher = voucher(1, max);
    ChannelStep::Begin { request, name: Some(name), voucher, price: 10, now: START, until: START + 30 }
}

pub async fn a_payers_id_finds_its_answer(ledger: Arc<dyn ChannelLedger>, _: Arc<ManualClock>) {
    open(&*ledger, 1, 100).await;
    let name = RequestName { id: hash(7), request: hash(8) };
    let held = ledger.advance(&id(1), &begin_named(hash(1), 10, name)).await.unwrap();
    assert_eq!(get(&*ledger, 1).await.pending.and_then(|pending| pending.name), Some(name));
    ledger.advance(&id(1), &charge(held.epoch, 10)).await.unwrap();
    assert_eq!(get(&*ledger, 1).await.answer_named(hash(7)).map(|answer| answer.request), Some(hash(1)));
    // Another voucher, and even another request.
    for request in [hash(8), hash(9)] {
        let again = ledger.advance(&id(1), &begin_named(hash(2), 20, RequestName { request, ..name })).await;
        assert!(matches!(again, Err(ChannelLedgerError::Answered(_))), "{again:?}");
    }
    let other = RequestName { id: hash(6), ..name };
    ledger.advance(&id(1), &begin_named(hash(2), 20, other)).await.expect("another id");
}

pub async fn replays_and_attempts_are_counted(ledger: Arc<dyn ChannelLedger>, _: Arc<ManualClock>) {
    open(&*ledger, 1, 100).await;
    for attempt in 1..=3 {
        let held = ledger.advance(&id(1), &begin(1, hash(1), 10, 10)).await.unwrap();
        assert_eq!((held.attempts_of(hash(1)), held.attempts_of(hash(2))), (attempt, 0));
        ledger.advance(&id(1), &ChannelStep::Release { epoch: held.epoch }).await.unwrap();
    }
    assert_eq!(get(&*ledger, 1).await.attempts_of(hash(1)), 3);
    sell(&*ledger, 1, hash(2), 10).await;
    for replays in 1..=3 {
        let counted = ledger.advance(&id(1), &ChannelStep::Replay { request: hash(2) }).await.unwrap();
        assert_eq!(counted.answer_to(hash(2)).map(|answer| answer.replays), Some(replays));
    }
    ledger.advance(&id(1), &ChannelStep::Replay { request: hash(3) }).await.expect("it does nothing");
    assert_eq!(get(&*ledger, 1).await.answer_to(hash(2)).map(|answer| answer.replays), Some(3));
}

pub async fn an_observation_of_an_earlier_block_is_ignored(ledger: Arc<dyn ChannelLedger>, _: Arc<ManualClock>) {
    open(&*ledger, 1, 100).await;
    let newest = ChannelObservation { withdrawal: 30, ..observation(1, 200, 0, 5) };
    observe(&*ledger, 1, newest).await;
    let shown = observe(&*ledger, 1, observation(1, 900, 0, 4)).await;
    assert_eq!((shown.observed, get(&*ledger, 1).await.observed), (newest, newest));
    let same_block = observation(1, 200, 0, 5);
    assert_eq!(observe(&*ledger, 1, same_block).await.observed, same_block, "read again");
}

pub async fn a_withdrawal_ends_credit_and_not_a_charge(ledger: Arc<dyn ChannelLedger>, _: Arc<ManualClock>) {
    open(&*ledger, 1, 100).await;
    let held = ledger.advance(&id(1), &begin(1, hash(1), 30, 30)).await.unwrap();
    observe(&*ledger, 1, ChannelObservation { withdrawal: 80, ..observation(1, 100, 0, 2) }).await;
    let charged = ledger.advance(&id(1), &charge(held.epoch, 30)).await.expect("the work is done");
    assert_eq!((charged.unclaimed(), charged.at_risk()), (30, 10));
    let next = ledger.advance(&id(1), &begin(1, hash(2), 31, 1)).await;
    assert!(matches!(next, Err(ChannelLedgerError::ExceedsBalance(_))), "{next:?}");
}

pub async fn a_signed_refund_covers_nothing(ledger: Arc<dyn ChannelLedger>, _: Arc<ManualClock>) {
    open(&*ledger, 1, 100).await;
    let refunding = ledger.advance(&id(1), &refund(hash(9), 95)).await.unwrap();
    assert_eq!(refunding.open_refund().map(|refund| (refund.nonce, refund.amount)), Some((0, 95)));
    let next = ledger.advance(&id(1), &begin(1, hash(1), 10, 10)).await;
    assert!(matches!(next, Err(ChannelLedgerError::ExceedsBalance(_))), "{next:?}");
    // It was executed, and the payer filled the channel again.
    let mut refunded = observation(1, 100, 0, 2);
    refunded.state.refund_nonce = 1;
    observe(&*ledger, 1, refunded).await;
    let held = ledger.advance(&id(1), &begin(1, hash(1), 10, 10)).await.unwrap();
    let refund = ledger.advance(&id(1), &refund(hash(8), 95)).await;
    assert!(matches!(refund, Err(ChannelLedgerError::ExceedsBalance(_))), "a request is being worked for: {refund:?}");
    ledger.advance(&id(1), &charge(held.epoch, 10)).await.unwrap();
}

/// The payer ends the withdrawal, and then executes the refund.
pub async fn a_withdrawal_and_a_refund_add_up(ledger: Arc<dyn ChannelLedger>, _: Arc<ManualClock>) {
    open(&*ledger, 1, 100).await;
    observe(&*ledger, 1, ChannelObservation { withdrawal: 30, ..observation(1, 100, 0, 2) }).await;
    let refunding = ledger.advance(&id(1), &refund(hash(9), 25)).await.unwrap();
    assert_eq!(refunding.covered(), 45, "100 - 30 - 25");
    let beyond = ledger.advance(&id(1), &begin(1, hash(1), 46, 46)).await;
    assert!(matches!(beyond, Err(ChannelLedgerError::ExceedsBalance(_))), "{beyond:?}");
    let held = ledger.advance(&id(1), &begin(1, hash(1), 45, 45)).await.unwrap();
    let larger = ledger.advance(&id(1), &refund(hash(9), 26)).await;
    assert!(matches!(larger, Err(ChannelLedgerError::ExceedsBalance(_))), "it is being worked for: {larger:?}");
    let charged = ledger.advance(&id(1), &charge(held.epoch, 45)).await.unwrap();
    assert_eq!((charged.unclaimed(), charged.at_risk()), (45, 0));
    // Neither is paid from what was claimed.
    let claimed = ChannelObservation { withdrawal: 30, ..observation(1, 100, 45, 3) };
    observe(&*ledger, 1, claimed).await;
    let larger = ledger.advance(&id(1), &refund(hash(9), 55)).await.unwrap();
    assert_eq!((larger.covered(), larger.at_risk()), (45, 0));
    let mut taken = observation(1, 45, 45, 4);
    taken.state.refund_nonce = 1;
    assert_eq!(observe(&*ledger, 1, taken).await.covered(), 45);
}

pub async fn a_claim_is_for_no_more_than_the_escrow_has(ledger: Arc<dyn ChannelLedger>, _: Arc<ManualClock>) {
    open(&*ledger, 1, 100).await;
    sell(&*ledger, 1, hash(1), 40).await;
    for (block, balance, claimed, claim, at_risk) in [
        (2, 39, 0, Some(39), 1),
        (3, 0, 0, None, 40),
        (4, 25, 25, None, 15),
        (5, 26, 25, Some(26), 14),
        (6, 90, 25, Some(40), 0),
    ] {
        let record = observe(&*ledger, 1, observation(1, balance, claimed, block)).await;
        assert_eq!(record.claim().map(|claim| claim.total_claimed), claim, "{balance} {claimed}");
        assert_eq!((record.unclaimed(), record.at_risk()), (40 - claimed, at_risk), "{balance} {claimed}");
    }
}

pub async fn a_refund_that_was_not_sent_is_dropped(ledger: Arc<dyn ChannelLedger>, _: Arc<ManualClock>) {
    open(&*ledger, 1, 100).await;
    let drop_until = async |until| ledger.advance(&id(1), &ChannelStep::DropRefund { until }).await.unwrap();
    ledger.advance(&id(1), &refund(hash(9), 95)).await.unwrap();
    let kept = drop_until(START + 179).await;
    assert_eq!((kept.open_refund().map(|refund| refund.amount), kept.covered()), (Some(95), 5), "another one is meant");
    let dropped = drop_until(START + 180).await;
    assert_eq!((dropped.refund, dropped.covered()), (None, 100));
    assert_eq!(get(&*ledger, 1).await, dropped);
    // One that failed may have been seen. It is not dropped with a smaller one that follows.
    ledger.advance(&id(1), &refund(hash(9), 50)).await.unwrap();
    ledger.advance(&id(1), &ChannelStep::EndRefund { nonce: 0, executed: None }).await.unwrap();
    ledger.advance(&id(1), &refund(hash(8), 5)).await.unwrap();
    let kept = drop_until(START + 180).await;
    assert_eq!(kept.open_refund().map(|refund| (refund.amount, refund.until)), Some((50, 0)));
    assert_eq!(kept.covered(), 50);
}

/// A node said for once that more was claimed than ever was.
pub async fn a_wrong_observation_is_corrected_by_the_next(ledger: Arc<dyn ChannelLedger>, _: Arc<ManualClock>) {
    open(&*ledger, 1, 100).await;
    sell(&*ledger, 1, hash(1), 10).await;
    let wrong = observe(&*ledger, 1, observation(1, 100, 60, 2)).await;
    assert_eq!((wrong.charged(), wrong.unclaimed()), (60, 0));
    let too_much = ledger.advance(&id(1), &begin(1, hash(2), 20, 10)).await;
    assert!(matches!(too_much, Err(ChannelLedgerError::Mismatch(_))), "{too_much:?}");
    let right = observe(&*ledger, 1, observation(1, 100, 0, 3)).await;
    assert_eq!((right.charged(), right.unclaimed()), (10, 10));
    assert_eq!(get(&*ledger, 1).await, right);
    let sold = sell(&*ledger, 1, hash(2), 10).await;
    assert_eq!((sold.charged(), sold.claim().map(|claim| claim.total_claimed)), (20, Some(20)));
}

pub async fn one_refund_is_under_way_at_a_time_and_its_result_is_kept(
    ledger: Arc<dyn ChannelLedger>,
    _: Arc<ManualClock>,
) {
    open(&*ledger, 1, 100).await;
    let tasks = (1..=20).map(|request| {
        let ledger = ledger.clone();
        tokio::spawn(async move { ledger.advance(&id(1), &refund(hash(request), 10 + u128::from(request))).await })
    });
    let mut signed = Vec::new();
    for advanced in join_all(tasks).await {
        match advanced.unwrap() {
            Ok(record) => signed.extend(record.refund),
            Err(ChannelLedgerError::Busy { until }) => assert_eq!(until, START + 180),
            Err(error) => panic!("{error:?}"),
        }
    }
    let [first] = signed[..] else { panic!("{} are under way", signed.len()) };
    let again = ledger.advance(&id(1), &refund(first.request, 5)).await.expect("it is taken up again");
    assert_eq!(again.refund, Some(LastRefund { is_first: false, ..first }), "it is the one that was signed");
    // Nothing was sent, so that another one may follow. Whoever has both signatures can execute the larger one.
    let end = |nonce, executed| ChannelStep::EndRefund { nonce, executed };
    ledger.advance(&id(1), &end(0, None)).await.unwrap();
    let other = ledger.advance(&id(1), &refund(hash(99), 5)).await.unwrap().refund.unwrap();
    assert_eq!((other.request, other.nonce, other.amount), (hash(99), 0, first.amount));
    let executed = Some(ExecutedRefund { transaction: hash(7), amount: 9 });
    let ended = ledger.advance(&id(1), &end(1, executed)).await.unwrap();
    assert_eq!(ended.refund, Some(other), "another one was meant");
    for result in [executed, None] {
        let ended = ledger.advance(&id(1), &end(0, result)).await.unwrap();
        assert_eq!(ended.refund.map(|refund| (refund.executed, refund.until)), Some((executed, 0)));
        assert_eq!(get(&*ledger, 1).await, ended);
    }
}

pub async fn a_block_that_is_too_high_is_replaced_by_a_later_one(ledger: Arc<dyn ChannelLedger>, _: Arc<ManualClock>) {
    open(&*ledger, 1, 100).await;
    let high = ChannelObservation { block: 20_000_000, ..observation(1, 100, 0, 5) };
    observe(&*ledger, 1, high).await;
    let same_second = observation(1, 90, 0, 5);
    assert_eq!(observe(&*ledger, 1, same_second).await.observed, high);
    let later = observation(1, 90, 0, 6);
    assert_eq!(observe(&*ledger, 1, later).await.observed, later);
    // A timestamp of a time to come is not believed either.
    let ahead = ChannelObservation { time: START + 1_000, ..observation(1, 80, 0, 7) };
    observe(&*ledger, 1, ahead).await;
    let next = observation(1, 70, 0, 8);
    assert_eq!(observe(&*ledger, 1, next).await.observed, next);
    assert_eq!(get(&*ledger, 1).await.observed, next);
}

pub async fn a_reorged_claim_can_be_claimed_again(ledger: Arc<dyn ChannelLedger>, _: Arc<ManualClock>) {
    open(&*ledger, 1, 100).await;
    let row = sell(&*ledger, 1, hash(1), 10).await.claim().expect("it was charged");
    assert_eq!((row.total_claimed, row.voucher.max_claimable_amount), (10, 10));
    assert_eq!(observe(&*ledger, 1, observation(1, 100, 10, 2)).await.claim(), None);
    let reorged = observe(&*ledger, 1, observation(1, 100, 0, 3)).await;
    assert_eq!((reorged.claim(), reorged.charged()), (Some(row), 10));
    // More than this ledger charged, by another one with the same key.
    let beyond = observe(&*ledger, 1, observation(1, 100, 60, 4)).await;
    assert_eq!((beyond.charged(), beyond.unclaimed()), (60, 0));
}

pub async fn one_of_many_processes_claims(ledger: Arc<dyn ChannelLedger>, _: Arc<ManualClock>) {
    open(&*ledger, 1, 100).await;
    let claim = |now: u64| ChannelStep::BeginClaim { now, until: now + 10 };
    let tasks = (0..20).map(|_| {
        let ledger = ledger.clone();
        tokio::spawn(async move { ledger.advance(&id(1), &claim(START)).await.is_ok() })
    });
    let won = join_all(tasks).await.into_iter().filter(|won| *won.as_ref().unwrap()).count();
    assert_eq!(won, 1);
    ledger.advance(&id(1), &claim(START + 10)).await.expect("the first one is too late");
    ledger.advance(&id(1), &ChannelStep::EndClaim { until: START + 10 }).await.unwrap();
    assert_eq!(get(&*ledger, 1).await.claiming_until, Some(START + 20), "that is another process's");
    ledger.advance(&id(1), &ChannelStep::EndClaim { until: START + 20 }).await.unwrap();
    assert_eq!(get(&*ledger, 1).await.claiming_until, None);
}

pub async fn channels_are_listed_in_order_by_page(ledger: Arc<dyn ChannelLedger>, _: Arc<ManualClock>) {
    assert!(ledger.channels(None, 10).await.unwrap().is_empty());
    for salt in 1..=23 {
        open(&*ledger, salt, u128::from(salt)).await;
    }
    let (mut after, mut listed) = (None, Vec::new());
    loop {
        let page = ledger.channels(after, 5).await.unwrap();
        assert!(page.len() <= 5);
        let Some(last) = page.last() else { break };
        after = Some(last.id);
        listed.extend(page.into_iter().map(|record| record.id));
    }
    let all: BTreeSet<ChannelId> = (1..=23).map(id).collect();
    assert_eq!(listed, all.into_iter().collect::<Vec<_>>());
    assert!(ledger.channels(None, 0).await.unwrap().is_empty());
}
