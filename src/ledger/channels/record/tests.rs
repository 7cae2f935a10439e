use alloy_primitives::Address;
use proptest::prelude::*;

use super::*;
use crate::vouchers::VoucherSignature;

const NOW: u64 = 1_800_000_000;

/// As it is stored.
const WRITTEN_BEFORE: &str = r#"{
    "id":"0x36a748d7e1f8e00ffe0a64835a2bc944d5def48b30d1caa5d27c98855e3ca531","network":"eip155:8453",
    "config":{"payer":"0x3C44CdDdB6a900fa2b585dd299e03d12FA4293BC","payerAuthorizer":"0x90F79bf6EB2c4f870365E785982E1f101E93b906",
        "receiver":"0x9965507D1a55bcC2695C58ba16FB37d819B0A4dc","receiverAuthorizer":"0x70997970C51812dc3A010C7d01b50e0d17dc79C8",
        "token":"0x036CbD53842c5426634e7929541eC2318f3dCF7e","withdrawDelay":900,
        "salt":"0x0000000000000000000000000000000000000000000000000000000000000000"},
    "charged":"2300",
    "voucher":{"channelId":"0x36a748d7e1f8e00ffe0a64835a2bc944d5def48b30d1caa5d27c98855e3ca531","maxClaimableAmount":"3000",
        "signature":"0x0d51a896f37baae7437042bbaa35a576204cb457e2ceae611bd8aed3e598950775d93570c879adb5dd1605a2aeb1420c4dfb83cf184c7b64a4a329d32f7b32c91c"},
    "published":"1500","observed":{"state":{"channelId":"0x36a748d7e1f8e00ffe0a64835a2bc944d5def48b30d1caa5d27c98855e3ca531","balance":"10000",
        "totalClaimed":"1000","withdrawRequestedAt":1800000007,"refundNonce":"1"},"withdrawal":"4000","block":17,"time":1800000009},
    "observedAt":1800000010,
    "pending":{"request":"0x1111111111111111111111111111111111111111111111111111111111111111",
        "voucher":{"channelId":"0x36a748d7e1f8e00ffe0a64835a2bc944d5def48b30d1caa5d27c98855e3ca531","maxClaimableAmount":"3300",
            "signature":"0x0d51a896f37baae7437042bbaa35a576204cb457e2ceae611bd8aed3e598950775d93570c879adb5dd1605a2aeb1420c4dfb83cf184c7b64a4a329d32f7b32c91c"},
        "price":"1000","until":1800000040,"name":null},
    "epoch":4,
    "answers":[{"request":"0x2222222222222222222222222222222222222222222222222222222222222222","epoch":3,"charged":"300",
        "total":"2300","at":1800000005,"name":null,"replays":0}],"attempts":null,
    "usedAt":1800000012,"unclaimedSince":1800000003,"claimedSince":null,
    "refund":{"request":"0x3333333333333333333333333333333333333333333333333333333333333333","nonce":"0","amount":"700",
        "isAll":false,"charged":"2300","askedAt":1800000006,"until":0,
        "executed":{"transaction":"0x4444444444444444444444444444444444444444444444444444444444444444","amount":"700"}},
    "claimingUntil":1800000100
}"#;

fn config() -> ChannelConfig {
    ChannelConfig {
        payer: Address::repeat_byte(1),
        payer_authorizer: Address::repeat_byte(2),
        receiver: Address::repeat_byte(3),
        receiver_authorizer: Address::repeat_byte(4),
        token: Address::repeat_byte(5),
        withdraw_delay: 900,
        salt: B256::ZERO,
    }
}

fn observation(balance: u128, total_claimed: u128, block: u64) -> ChannelObservation {
    let channel_id = Escrow::on(Network::BASE).channel_id(&config());
    let state = ChannelState {
        channel_id,
        balance,
        total_claimed,
        withdraw_requested_at: 0,
        refund_nonce: 0,
        charged_cumulative_amount: None,
    };
    ChannelObservation { state, withdrawal: 0, block, time: NOW + block }
}

fn channel(balance: u128) -> ChannelRecord {
    ChannelRecord::open(Network::BASE, config(), observation(balance, 0, 1), NOW).unwrap()
}

fn voucher(channel: &ChannelRecord, max: u128) -> Voucher {
    let mut signature = [1; 65];
    signature[64] = 27;
    let signature = VoucherSignature::try_from(signature).unwrap();
    Voucher { channel_id: channel.id, max_claimable_amount: max, signature }
}

/// A request that is paid with a voucher for `max`, and holds the channel for 30 seconds.
fn begin(channel: &ChannelRecord, request: u8, max: u128, price: u128, now: u64) -> ChannelStep {
    let request = B256::repeat_byte(request);
    ChannelStep::Begin { request, name: None, voucher: voucher(channel, max), price, now, until: now + 30 }
}

fn charge(epoch: u64, amount: u128) -> ChannelStep {
    ChannelStep::Charge { epoch, amount, response: None, now: NOW }
}

/// Works for a request of this price and charges this amount.
fn sell(channel: &mut ChannelRecord, request: u8, price: u128, amount: u128) {
    let begin = begin(channel, request, channel.charged() + price, price, NOW);
    channel.apply(&begin).unwrap();
    channel.apply(&charge(channel.epoch, amount)).unwrap();
}

fn refund(amount: u128, now: u64) -> ChannelStep {
    ChannelStep::Refund { request: B256::repeat_byte(7), amount, now, until: now + 180 }
}

fn observe(channel: &mut ChannelRecord, observation: ChannelObservation, now: u64) {
    channel.apply(&ChannelStep::Observe { observation, now }).unwrap();
}

#[test]
fn a_channel_is_read_and_written_as_the_same() {
    let before: ChannelRecord = serde_json::from_str(WRITTEN_BEFORE).unwrap();
    assert_eq!((before.charged(), before.unclaimed(), before.at_risk(), before.covered()), (2_300, 1_300, 0, 6_000));
    assert_eq!(before.answer_to(B256::repeat_byte(0x22)).map(|answer| answer.charged), Some(300));
    let written = serde_json::to_value(&before).unwrap().to_string().to_ascii_lowercase();
    let expected: serde_json::Value = serde_json::from_str(WRITTEN_BEFORE).unwrap();
    assert_eq!(written, expected.to_string().to_ascii_lowercase(), "no field is lost, renamed or new");
}

#[test]
fn a_charge_below_the_price_makes_the_next_voucher_smaller() {
    let mut channel = channel(100);
    sell(&mut channel, 1, 10, 3);
    assert_eq!((channel.charged(), channel.unclaimed()), (3, 3));
    let outdated = begin(&channel, 2, 20, 10, NOW);
    assert!(matches!(channel.apply(&outdated), Err(ChannelLedgerError::Mismatch(now)) if now.charged() == 3));
    sell(&mut channel, 2, 10, 10);
    let claim = channel.claim().unwrap();
    assert_eq!((claim.voucher.max_claimable_amount, claim.total_claimed), (13, 13));
}

#[test]
fn a_request_is_charged_once_even_if_it_cost_nothing() {
    let mut channel = channel(100);
    let first = begin(&channel, 1, 10, 10, NOW);
    channel.apply(&first).unwrap();
    channel.apply(&charge(1, 0)).unwrap();
    let charged = channel.clone();
    assert!(matches!(channel.apply(&first), Err(ChannelLedgerError::Answered(_))), "the voucher would fit again");
    channel.apply(&charge(1, 10)).expect("the caller did not learn that it was charged");
    assert_eq!(channel, charged);
    sell(&mut channel, 2, 10, 10);
    channel.apply(&charge(1, 10)).expect("also when others followed");
    assert_eq!(channel.charged(), 10);
}

#[test]
fn a_request_that_lost_the_channel_charges_nothing() {
    let mut channel = channel(100);
    let first = begin(&channel, 1, 10, 10, NOW);
    channel.apply(&first).unwrap();
    let second = |now| begin(&channel, 2, 10, 10, now);
    let (early, late) = (second(NOW + 29), second(NOW + 30));
    assert!(matches!(channel.apply(&early), Err(ChannelLedgerError::Busy { until }) if until == NOW + 30));
    channel.apply(&late).unwrap();
    assert!(matches!(channel.apply(&charge(1, 10)), Err(ChannelLedgerError::LeaseLost)));
    channel.apply(&ChannelStep::Release { epoch: 1 }).unwrap();
    assert!(channel.pending.is_some(), "it is another request's by now");
    channel.apply(&charge(2, 10)).unwrap();
    assert_eq!(channel.charged(), 10);
}

#[test]
fn a_request_whose_time_is_over_still_charges_if_no_other_took_the_channel() {
    let mut channel = channel(100);
    let first = begin(&channel, 1, 10, 10, NOW);
    channel.apply(&first).unwrap();
    let late = ChannelStep::Charge { epoch: 1, amount: 10, response: None, now: NOW + 1_000 };
    channel.apply(&late).unwrap();
    assert_eq!(channel.charged(), 10);
}

#[test]
fn a_charge_above_the_price_or_the_voucher_is_refused() {
    let mut channel = channel(100);
    let first = begin(&channel, 1, 10, 10, NOW);
    channel.apply(&first).unwrap();
    assert!(matches!(channel.apply(&charge(1, 11)), Err(ChannelLedgerError::ExceedsVoucher)));
    // Meanwhile the authorizer's key claimed more than this ledger charged.
    observe(&mut channel, observation(100, 5, 2), NOW);
    assert!(matches!(channel.apply(&charge(1, 6)), Err(ChannelLedgerError::ExceedsVoucher)));
    channel.apply(&charge(1, 5)).unwrap();
    assert_eq!(channel.charged(), 10);
}

#[test]
fn a_voucher_or_an_observation_of_another_channel_is_refused() {
    let mut channel = channel(100);
    let before = channel.clone();
    let other = ChannelId::from(B256::repeat_byte(9));
    let foreign = Voucher { channel_id: other, ..voucher(&channel, 10) };
    let request = B256::repeat_byte(1);
    let begin = ChannelStep::Begin { request, name: None, voucher: foreign, price: 10, now: NOW, until: NOW + 30 };
    let mut observation = observation(1_000, 0, 2);
    observation.state.channel_id = other;
    for step in [begin, ChannelStep::Observe { observation, now: NOW }] {
        assert!(matches!(channel.apply(&step), Err(ChannelLedgerError::OtherChannel)), "{step:?}");
    }
    assert_eq!(channel, before);
    let opened = ChannelRecord::open(Network::BASE, config(), observation, NOW);
    assert!(matches!(opened, Err(ChannelLedgerError::OtherChannel)));
    let elsewhere = ChannelRecord::open(Network::BASE_SEPOLIA, config(), before.observed, NOW);
    assert!(matches!(elsewhere, Err(ChannelLedgerError::OtherChannel)), "another chain, another channel");
}

#[test]
fn an_observation_of_an_earlier_block_is_ignored() {
    let mut channel = channel(100);
    let withdrawal = ChannelObservation { withdrawal: 100, ..observation(100, 0, 5) };
    observe(&mut channel, withdrawal, NOW);
    observe(&mut channel, observation(1_000, 0, 4), NOW + 60);
    assert_eq!((channel.observed, channel.observed_at), (withdrawal, NOW), "and is not fresher by it");
}

#[test]
fn an_announced_withdrawal_ends_credit_and_not_the_charge_of_a_request_in_progress() {
    let mut channel = channel(100);
    let first = begin(&channel, 1, 30, 30, NOW);
    channel.apply(&first).unwrap();
    observe(&mut channel, ChannelObservation { withdrawal: 80, ..observation(100, 0, 2) }, NOW);
    channel.apply(&charge(1, 30)).expect("the work is done");
    assert_eq!((channel.covered(), channel.unclaimed(), channel.at_risk()), (20, 30, 10));
    let next = begin(&channel, 2, 31, 1, NOW);
    assert!(matches!(channel.apply(&next), Err(ChannelLedgerError::ExceedsBalance(_))));
    // The withdrawal cannot take what was claimed before it ended.
    observe(&mut channel, ChannelObservation { withdrawal: 80, ..observation(100, 30, 3) }, NOW);
    assert_eq!((channel.covered(), channel.unclaimed(), channel.at_risk()), (30, 0, 0));
    let refund = begin(&channel, 3, 30, 0, NOW);
    channel.apply(&refund).expect("a refund takes nothing on credit");
}

#[test]
fn a_signed_refund_is_no_cover_until_the_chain_has_passed_its_nonce() {
    let mut channel = channel(100);
    sell(&mut channel, 1, 40, 40);
    let refund = |amount| refund(amount, NOW);
    assert!(matches!(channel.apply(&refund(61)), Err(ChannelLedgerError::ExceedsBalance(_))), "it was charged");
    channel.apply(&refund(60)).unwrap();
    channel.apply(&refund(10)).unwrap();
    let open = channel.open_refund().expect("it may be executed");
    assert_eq!((open.nonce, open.amount), (0, 60), "the larger one was signed as well");
    assert_eq!((channel.covered(), channel.at_risk(), channel.forget_at()), (40, 0, None));
    let next = begin(&channel, 2, 41, 1, NOW);
    assert!(matches!(channel.apply(&next), Err(ChannelLedgerError::ExceedsBalance(_))));
    let mut refunded = observation(60, 40, 2);
    refunded.state.refund_nonce = 1;
    observe(&mut channel, refunded, NOW);
    assert_eq!((channel.open_refund(), channel.covered()), (None, 60));
    // A reorganization takes the refund out of the chain. It can be executed again.
    observe(&mut channel, observation(100, 40, 3), NOW);
    assert_eq!(channel.covered(), 40);
}

/// By vouchers that this ledger does not know, whatever it claims itself.
#[test]
fn vouchers_that_were_claimed_before_the_books_were_opened_stay_public() {
    let mut channel = ChannelRecord::open(Network::BASE, config(), observation(10_000, 300, 1), NOW).unwrap();
    sell(&mut channel, 1, 500, 50);
    channel.apply(&ChannelStep::BeginClaim { now: NOW, until: NOW + 10 }).unwrap();
    channel.apply(&ChannelStep::Observe { observation: observation(10_000, 350, 2), now: NOW }).unwrap();
    assert!(channel.may_be_public(10_000));
}

#[test]
fn a_channel_with_a_signed_refund_is_not_forgotten() {
    let mut channel = channel(100);
    sell(&mut channel, 1, 40, 40);
    observe(&mut channel, observation(100, 40, 2), NOW);
    assert_eq!(channel.forget_at(), Some(NOW + RETENTION), "all is claimed");
    channel.apply(&refund(60, NOW)).unwrap();
    assert_eq!(channel.forget_at(), None, "the refund would be cover again");
    let mut refunded = observation(40, 40, 3);
    refunded.state.refund_nonce = 1;
    observe(&mut channel, refunded, NOW);
    assert_eq!(channel.forget_at(), Some(NOW + RETENTION));
}

#[test]
fn a_lease_of_a_clock_that_ran_ahead_ends() {
    let mut channel = channel(100);
    let claim = |now: u64| ChannelStep::BeginClaim { now, until: now + 180 };
    channel.apply(&claim(NOW + 3_600)).unwrap();
    channel.apply(&claim(NOW)).expect("nothing is claimed for an hour");
    // The clocks of two processes may differ.
    channel.apply(&ChannelStep::EndClaim { until: NOW + 180 }).unwrap();
    channel.apply(&claim(NOW + 180)).unwrap();
    assert!(matches!(channel.apply(&claim(NOW)), Err(ChannelLedgerError::Busy { .. })));
}

#[test]
fn a_refund_leaves_what_a_request_in_progress_may_cost() {
    let mut channel = channel(100);
    let first = begin(&channel, 1, 30, 30, NOW);
    channel.apply(&first).unwrap();
    assert!(matches!(channel.apply(&refund(71, NOW)), Err(ChannelLedgerError::ExceedsBalance(_))));
    channel.apply(&refund(70, NOW)).unwrap();
    channel.apply(&refund(100, NOW + 30)).expect("its time is over");
    assert!(matches!(channel.apply(&charge(1, 30)), Err(ChannelLedgerError::LeaseLost)));
}

#[test]
fn a_reorged_claim_is_claimed_again() {
    let mut channel = channel(100);
    sell(&mut channel, 1, 10, 10);
    let row = channel.claim();
    observe(&mut channel, observation(100, 10, 2), NOW + 60);
    assert_eq!((channel.claim(), channel.unclaimed_since), (None, None));
    assert_eq!(channel.forget_at(), Some(NOW + 60 + RETENTION));
    observe(&mut channel, observation(100, 0, 3), NOW + 120);
    assert_eq!((channel.claim(), channel.unclaimed_since, channel.charged()), (row, Some(NOW + 120), 10));
    assert_eq!(channel.forget_at(), None);
}

#[test]
fn what_a_claim_left_counts_as_unclaimed_since_the_claim() {
    let mut channel = channel(100);
    sell(&mut channel, 1, 10, 10);
    sell(&mut channel, 2, 10, 10);
    // The claim was of the first charge.
    observe(&mut channel, observation(100, 10, 2), NOW + 60);
    assert_eq!((channel.unclaimed(), channel.unclaimed_since), (10, Some(NOW + 60)));
    observe(&mut channel, observation(100, 10, 3), NOW + 120);
    assert_eq!(channel.unclaimed_since, Some(NOW + 60), "a look at the channel puts off no claim");
}

#[test]
fn a_request_that_cost_nothing_keeps_no_channel_from_being_forgotten() {
    let mut channel = channel(100);
    sell(&mut channel, 1, 10, 0);
    assert_eq!((channel.voucher.as_ref(), channel.unclaimed_since), (None, None));
    assert_eq!(channel.forget_at(), Some(NOW + RETENTION));
}

#[test]
fn a_voucher_may_be_for_all_that_is_in_the_channel_and_a_refund_for_what_is_no_longer_covered() {
    let mut channel = channel(100);
    sell(&mut channel, 1, 100, 40);
    observe(&mut channel, ChannelObservation { withdrawal: 100, ..observation(100, 0, 2) }, NOW);
    assert_eq!(channel.covered(), 0);
    let refund = begin(&channel, 2, 40, 0, NOW);
    channel.apply(&refund).expect("it takes nothing on credit");
}

#[test]
fn a_reorged_deposit_puts_what_was_charged_at_risk() {
    let mut channel = channel(100);
    sell(&mut channel, 1, 10, 10);
    observe(&mut channel, observation(0, 0, 2), NOW);
    assert_eq!((channel.charged(), channel.unclaimed(), channel.at_risk()), (10, 10, 10));
    let next = begin(&channel, 2, 11, 1, NOW);
    assert!(matches!(channel.apply(&next), Err(ChannelLedgerError::ExceedsBalance(_))));
}

#[test]
fn what_was_claimed_without_this_ledger_counts_as_charged() {
    let mut channel = channel(100);
    sell(&mut channel, 1, 10, 10);
    observe(&mut channel, observation(100, 50, 2), NOW);
    assert_eq!((channel.charged(), channel.unclaimed()), (50, 0));
    // An old voucher would be work for nothing.
    let old = begin(&channel, 2, 20, 10, NOW);
    assert!(matches!(channel.apply(&old), Err(ChannelLedgerError::Mismatch(_))));
    observe(&mut channel, observation(100, 0, 3), NOW);
    assert_eq!((channel.charged(), channel.unclaimed()), (10, 10), "the chain no longer says so");
    assert_eq!(channel.claim().unwrap().total_claimed, 10);
}

#[test]
fn one_process_claims_at_a_time() {
    let mut channel = channel(100);
    let claim = |now: u64| ChannelStep::BeginClaim { now, until: now + 10 };
    channel.apply(&claim(NOW)).unwrap();
    assert!(matches!(channel.apply(&claim(NOW + 9)), Err(ChannelLedgerError::Busy { .. })));
    channel.apply(&claim(NOW + 10)).unwrap();
    channel.apply(&ChannelStep::EndClaim { until: NOW + 10 }).unwrap();
    assert_eq!(channel.claiming_until, Some(NOW + 20), "the first one was too late");
    channel.apply(&ChannelStep::EndClaim { until: NOW + 20 }).unwrap();
    assert_eq!(channel.claiming_until, None);
}

#[test]
fn attempts_of_the_same_request_are_counted_until_it_is_charged() {
    let mut channel = channel(100);
    for attempt in 1..=3 {
        let again = begin(&channel, 1, 10, 10, NOW);
        channel.apply(&again).unwrap();
        assert_eq!(channel.attempts_of(B256::repeat_byte(1)), attempt);
        channel.apply(&ChannelStep::Release { epoch: channel.epoch }).unwrap();
    }
    let other = begin(&channel, 2, 10, 10, NOW);
    channel.apply(&other).unwrap();
    assert_eq!([1, 2].map(|request| channel.attempts_of(B256::repeat_byte(request))), [0, 1]);
}

#[test]
fn a_request_that_was_answered_under_its_name_is_not_begun_again() {
    let mut channel = channel(100);
    let named = |channel: &ChannelRecord, request: u8, id: u8| {
        let (request, name) = (B256::repeat_byte(request), RequestName { id: hash(id), request: hash(9) });
        let voucher = voucher(channel, channel.charged() + 10);
        ChannelStep::Begin { request, name: Some(name), voucher, price: 10, now: NOW, until: NOW + 30 }
    };
    let hash_of_two = named(&channel, 1, 2);
    channel.apply(&hash_of_two).unwrap();
    channel.apply(&charge(1, 10)).unwrap();
    let again = named(&channel, 3, 2);
    assert!(matches!(channel.apply(&again), Err(ChannelLedgerError::Answered(_))));
    let other = named(&channel, 3, 4);
    channel.apply(&other).expect("another id");
    for (id, replays) in [(2, 1), (2, 2)] {
        channel.apply(&ChannelStep::Replay { request: B256::repeat_byte(1) }).unwrap();
        assert_eq!(channel.answer_named(hash(id)).unwrap().replays, replays);
    }
}

fn hash(byte: u8) -> B256 {
    B256::repeat_byte(byte)
}

#[test]
fn answers_are_bounded() {
    let mut channel = channel(100);
    for request in 1..=10 {
        sell(&mut channel, request, 1, 1);
    }
    assert_eq!(channel.answers.len(), ANSWERS);
    assert!(channel.answer_to(B256::repeat_byte(10)).is_some_and(|answer| answer.total == 10));
}

fn step() -> impl Strategy<Value = (u8, u8, u128, u128, u64)> {
    (0..10_u8, any::<u8>(), 0..40_u128, 0..40_u128, 0..100_u64)
}

proptest! {
    /// Steps in any order, most of them as a server takes them and some out of place.
    #[test]
    fn no_order_of_steps_breaks_the_invariants(steps in proptest::collection::vec(step(), 1..80)) {
        let mut channel = channel(200);
        let (mut most_claimed, mut block, mut now) = (0, 1, NOW);
        let mut held: Option<u64> = None;
        for (kind, request, a, b, later) in steps {
            now += later % 20;
            let claimed = channel.observed.state.total_claimed;
            let step = match kind {
                0 | 1 => begin(&channel, request, channel.charged() + a, if b < 35 { a } else { b }, now),
                2 | 3 => charge(channel.epoch - u64::from(b > 35).min(channel.epoch), a),
                4 => ChannelStep::Release { epoch: channel.epoch - u64::from(b > 20).min(channel.epoch) },
                5 => {
                    block += 1;
                    // What a claim would have done by now, or more than was charged, or a reorganization.
                    let total = match b { 0..20 => channel.charged(), 20..36 => claimed, 36..38 => claimed + a, _ => claimed.saturating_sub(a) };
                    let observation = ChannelObservation { withdrawal: a, ..observation(200 + b, total, block - later % 3) };
                    ChannelStep::Observe { observation, now }
                }
                6 => refund(a * 4, now),
                7 => ChannelStep::Replay { request: B256::repeat_byte(request) },
                _ => ChannelStep::BeginClaim { now, until: now + 10 },
            };
            let before = channel.clone();
            let taken = channel.apply(&step);
            most_claimed = most_claimed.max(channel.observed.state.total_claimed);
            if taken.is_err() {
                prop_assert_eq!(&channel, &before, "a refused step changed something: {:?}", step);
            }
            prop_assert!(channel.charged >= before.charged, "the watermark fell");
            prop_assert!(channel.observed.state.total_claimed <= channel.charged());
            prop_assert!(!channel.observed.is_before(&before.observed));
            let max = channel.voucher.as_ref().map_or(0, |voucher| voucher.max_claimable_amount);
            prop_assert!(channel.charged() <= max.max(most_claimed), "more was charged than was signed");
            if let Some(claim) = channel.claim() {
                prop_assert!(claim.total_claimed <= claim.voucher.max_claimable_amount);
                prop_assert!(claim.total_claimed <= channel.observed.state.balance, "the contract would refuse it");
                prop_assert!(claim.total_claimed > channel.observed.state.total_claimed);
            }
            match &step {
                ChannelStep::Begin { price, voucher, .. } if taken.is_ok() => {
                    prop_assert!(before.pending.as_ref().is_none_or(|pending| pending.until <= now), "two hold it");
                    prop_assert!(*price == 0 || voucher.max_claimable_amount <= before.covered());
                    prop_assert!(held < Some(channel.epoch), "an epoch came twice");
                    held = Some(channel.epoch);
                }
                ChannelStep::Charge { epoch, amount, .. } if taken.is_ok() && channel != before => {
                    prop_assert_eq!(held, Some(*epoch));
                    prop_assert_eq!(channel.charged(), before.charged() + amount);
                    prop_assert!(*amount <= before.pending.as_ref().map_or(0, |pending| pending.price));
                }
                ChannelStep::Observe { .. } => prop_assert_eq!(&channel.pending, &before.pending),
                _ => {}
            }
            #[cfg(feature = "sqlite")]
            if step.is_progress() {
                let mut restored = before.clone();
                restored.set_progress(&channel.progress().unwrap()).unwrap();
                prop_assert_eq!(&restored, &channel, "the step changed something else: {:?}", step);
            }
            let text = serde_json::to_string(&channel).unwrap();
            prop_assert_eq!(&serde_json::from_str::<ChannelRecord>(&text).unwrap(), &channel);
        }
    }
}
