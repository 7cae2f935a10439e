//! The books of channels under every sequence of answers that a seller can give, honest or not.

use std::{path::PathBuf, sync::Arc};

use alloy_primitives::{Address, B256};
use alloy_signer_local::PrivateKeySigner;
use http::{HeaderMap, HeaderName, Method, StatusCode};
use proptest::prelude::*;
use serde_json::json;

use super::{
    ChannelFinding, ChannelPolicy,
    books::{Books, Choice, Terms, Wanted},
    entry::{Change, ChannelEntry, Correction, Means, PendingDeposit},
};
use crate::{
    client::{Budget, Journal, NextStep, Payer, PaymentError, Refusal},
    clock::Clock,
    eip3009::{AuthorizationSigner as _, PaymentSignature},
    network::Network,
    protocol::encode_header,
    usdc::Usdc,
    vouchers::{
        ChannelConfig, ChannelState, Deposit, DepositAuthorization, Escrow, Voucher, VoucherSignature, VoucherState,
    },
};

#[cfg(feature = "onchain")]
mod honest_seller;

const NOW: u64 = 1_000_000;
const PRICE: u64 = 1_000;

fn usdc(units: u64) -> Usdc {
    Usdc::from_atomic(units)
}

fn key() -> PrivateKeySigner {
    PrivateKeySigner::from_bytes(&B256::repeat_byte(7)).unwrap()
}

fn config() -> ChannelConfig {
    ChannelConfig {
        payer: key().address(),
        payer_authorizer: key().address(),
        receiver: Address::repeat_byte(2),
        receiver_authorizer: Address::repeat_byte(3),
        token: Address::repeat_byte(4),
        withdraw_delay: 900,
        salt: B256::ZERO,
    }
}

fn entry() -> ChannelEntry {
    ChannelEntry::new(Network::BASE, config())
}

fn signed_by(key: &PrivateKeySigner, entry: &ChannelEntry, max: u64) -> VoucherState {
    let digest = Escrow::on(entry.network).voucher_digest(entry.id(), max.into());
    let signature = futures_util::FutureExt::now_or_never(key.sign_digest(digest)).unwrap().unwrap();
    let signature = VoucherSignature::try_from(<[u8; 65]>::try_from(signature.as_bytes()).unwrap()).unwrap();
    VoucherState { signed_max_claimable: max.into(), signature }
}

fn voucher(entry: &ChannelEntry, price: u64) -> Voucher {
    let max = entry.ceiling(usdc(price)).atomic();
    let VoucherState { signature, .. } = signed_by(&key(), entry, max);
    Voucher { channel_id: entry.id(), max_claimable_amount: max.into(), signature }
}

fn deposit(units: u64) -> PendingDeposit {
    let authorization = DepositAuthorization::Erc3009 {
        valid_after: Default::default(),
        valid_before: Default::default(),
        salt: B256::repeat_byte(9),
        signature: PaymentSignature::from(vec![1; 65]),
    };
    let deposit = Deposit { amount: units.into(), authorization };
    PendingDeposit::new(deposit, usdc(units), NOW + 300)
}

/// A channel with this much in escrow, of which this much was charged.
fn funded(escrow: u64, charged: u64) -> ChannelEntry {
    let mut entry = entry();
    entry.add_deposit(deposit(escrow), NOW);
    let first = voucher(&entry, charged);
    entry.sign(usdc(charged), &first, true);
    entry.deposit_arrived();
    entry.charge(usdc(charged), usdc(charged));
    entry
}

fn state(entry: &ChannelEntry, charged: Option<u64>, claimed: u64) -> ChannelState {
    ChannelState {
        channel_id: entry.id(),
        balance: u128::MAX,
        total_claimed: claimed.into(),
        withdraw_requested_at: 0,
        refund_nonce: 0,
        charged_cumulative_amount: charged.map(Into::into),
    }
}

#[test]
fn first_request_needs_a_deposit_and_the_next_do_not() {
    let mut entry = entry();
    assert_eq!(entry.means(usdc(PRICE), NOW), Means::NewDeposit { needed: usdc(PRICE) });
    entry.add_deposit(deposit(2_500), NOW);
    for price in [PRICE, 2_500] {
        assert_eq!(entry.means(usdc(price), NOW), Means::PendingDeposit);
    }
    assert_eq!(entry.means(usdc(2_501), NOW), Means::Nothing, "one deposit at a time");
    assert_eq!(entry.means(usdc(PRICE), NOW + 290), Means::Nothing, "too late to get into a block");
    entry.deposit_arrived();
    entry.charge(usdc(PRICE), usdc(PRICE));
    assert_eq!(entry.means(usdc(1_500), NOW), Means::Voucher);
    assert_eq!(entry.means(usdc(1_501), NOW), Means::NewDeposit { needed: usdc(1) });
    assert_eq!((entry.spent(), entry.reserved()), (usdc(1_000), usdc(1_500)));
}

#[test]
fn lost_answer_is_learned_from_the_correction_and_charged_once() {
    let mut entry = funded(10_000, 1_000);
    let lost = voucher(&entry, PRICE);
    entry.sign(usdc(PRICE), &lost, false);
    let theirs = state(&entry, Some(2_000), 0);
    let proof = signed_by(&key(), &entry, 2_000);
    assert_eq!(entry.correct(Some(&theirs), Some(&proof)), Correction::Adopted);
    assert_eq!((entry.charged, entry.doubt, entry.spent()), (usdc(2_000), Usdc::ZERO, usdc(2_000)));
    // The same once more is a lie: no request is in doubt any more.
    let theirs = state(&entry, Some(3_000), 0);
    let proof = signed_by(&key(), &entry, 3_000);
    assert!(matches!(entry.correct(Some(&theirs), Some(&proof)), Correction::Disputed(_)));
}

#[test]
fn charge_of_a_refused_request_is_a_finding_as_far_as_no_unanswered_one_explains_it() {
    for (unanswered, refused, finding) in [(0, 1_000, Some(1_000)), (1_000, 1_000, None), (300, 1_000, Some(700))] {
        let mut entry = funded(10_000, 1_000);
        if unanswered > 0 {
            let lost = voucher(&entry, unanswered);
            entry.sign(usdc(unanswered), &lost, false);
        }
        let left = voucher(&entry, refused);
        let before = entry.sign(usdc(refused), &left, false);
        entry.refused(before);
        entry.leave(usdc(refused));
        let proof = signed_by(&key(), &entry, 2_000);
        let expected = match finding {
            Some(units) => Correction::Charged(ChannelFinding::ChargedRefused { charged: usdc(units) }),
            None => Correction::Adopted,
        };
        let mut more = entry.clone();
        assert_eq!(entry.correct(Some(&state(&entry, Some(2_000), 0)), Some(&proof)), expected);
        assert_eq!((entry.charged, entry.spent(), entry.left), (usdc(2_000), usdc(2_000), Usdc::ZERO));
        let proof = signed_by(&key(), &more, 2_001);
        let asserted = more.correct(Some(&state(&more, Some(2_001), 0)), Some(&proof));
        assert!(matches!(asserted, Correction::Disputed(_)), "{asserted:?}");
    }
}

/// The seller shows the first voucher that these books signed, and says that it was charged before.
#[test]
fn voucher_of_these_books_shows_no_charge_from_before_them() {
    let mut entry = entry();
    entry.add_deposit(deposit(10_000), NOW);
    let first = voucher(&entry, PRICE);
    let before = entry.sign(usdc(PRICE), &first, true);
    entry.refused(before);
    let (theirs, proof) = (state(&entry, Some(400), 0), signed_by(&key(), &entry, PRICE));
    let finding = ChannelFinding::ChargedRefused { charged: usdc(400) };
    assert_eq!(entry.correct(Some(&theirs), Some(&proof)), Correction::Charged(finding));
    assert_eq!((entry.opening, entry.charged, entry.spent()), (Usdc::ZERO, usdc(400), usdc(400)));
    assert_eq!((entry.escrow, entry.reserved(), entry.is_known()), (usdc(10_000), usdc(9_600), true));
}

#[test]
fn presumed_deposit_is_kept_until_a_charge_proves_it() {
    let mut entry = entry();
    entry.add_deposit(deposit(5_000), NOW);
    let first = voucher(&entry, PRICE);
    entry.sign(usdc(PRICE), &first, true);
    entry.presume_deposit(true);
    assert_eq!(entry.means(usdc(PRICE), NOW), Means::Voucher);
    assert!(entry.ceiling(usdc(PRICE)) > entry.escrow, "it counts on the deposit");
    assert_eq!(entry.means(usdc(5_001), NOW), Means::Nothing, "it is not enough");
    assert_eq!(entry.available(), Usdc::ZERO, "nothing proves it");
    entry.presume_deposit(false);
    assert_eq!(entry.means(usdc(PRICE), NOW), Means::PendingDeposit, "the same deposit");
    assert_eq!((entry.may_be_deposited(NOW + 359), entry.may_be_deposited(NOW + 360)), (true, false));
    entry.presume_deposit(true);
    entry.expire(NOW + 360, false);
    assert_eq!((entry.pending.is_none(), entry.available()), (true, usdc(5_000)), "the next voucher tells");
}

#[test]
fn seller_is_not_believed_what_the_books_exclude() {
    let mut entry = funded(10_000, 1_000);
    let lost = voucher(&entry, PRICE);
    entry.sign(usdc(PRICE), &lost, false);
    let before = entry.clone();
    let theirs = state(&entry, Some(2_001), 0);
    let proof = signed_by(&key(), &entry, 5_000);
    let expected = ChannelFinding::ChargeNotInBooks { asserted: 2_001, limit: usdc(2_000) };
    assert_eq!(entry.correct(Some(&theirs), Some(&proof)), Correction::Disputed(expected.clone()));
    assert_eq!((entry.charged, entry.doubt), (before.charged, before.doubt));
    assert_eq!(entry.dispute(), Some(&expected));
}

#[test]
fn correction_without_the_payers_signature_proves_nothing() {
    for known in [true, false] {
        let mut entry = if known { funded(10_000, 1_000) } else { entry() };
        let lost = voucher(&entry, PRICE);
        entry.sign(usdc(PRICE), &lost, false);
        let asserted = entry.charged.atomic() + PRICE + 1;
        let theirs = state(&entry, Some(asserted), 0);
        let stranger = PrivateKeySigner::from_bytes(&B256::repeat_byte(8)).unwrap();
        let (forged, too_low) = (signed_by(&stranger, &entry, 9_000), signed_by(&key(), &entry, asserted - 1));
        let before = entry.charged;
        for proof in [None, Some(&forged), Some(&too_low)] {
            assert_eq!(entry.correct(Some(&theirs), proof), Correction::Unproven);
        }
        assert_eq!(entry.correct(None, None), Correction::Unproven);
        assert_eq!(entry.charged, before);
    }
}

#[test]
fn seller_that_lost_its_books_is_paid_from_where_it_starts() {
    for charged in [Some(400), None] {
        let mut entry = funded(10_000, 1_000);
        let theirs = state(&entry, charged, 400);
        assert_eq!(entry.correct(Some(&theirs), None), Correction::Adopted);
        assert_eq!(entry.charged, usdc(400));
        assert_eq!(entry.spent(), usdc(1_000), "it still has the vouchers");
        entry.charge(usdc(PRICE), entry.ceiling(usdc(PRICE)));
        assert_eq!((entry.charged, entry.spent()), (usdc(1_400), usdc(1_400)));
    }
}

#[test]
fn correction_to_what_was_charged_clears_no_doubt() {
    let mut entry = funded(10_000, 1_000);
    let lost = voucher(&entry, PRICE);
    entry.sign(usdc(PRICE), &lost, false);
    let proof = signed_by(&key(), &entry, 2_000);
    let (charged, claimed) = (state(&entry, Some(1_000), 0), state(&entry, None, 1_000));
    for proof in [None, Some(&proof)] {
        assert_eq!(
            entry.clone().correct(Some(&claimed), proof),
            Correction::Unproven,
            "a claim is not all that was charged"
        );
        assert_eq!(entry.correct(Some(&charged), proof), Correction::Adopted);
        assert_eq!((entry.charged, entry.doubt), (usdc(1_000), usdc(PRICE)), "the lost request may be charged yet");
    }
}

#[test]
fn charge_above_what_is_in_escrow_shows_that_the_deposit_arrived() {
    for (charged, is_pending, escrow) in [(1_000, true, 1_000), (1_001, false, 6_000)] {
        let mut entry = funded(1_000, 500);
        entry.add_deposit(deposit(5_000), NOW);
        let lost = voucher(&entry, 600);
        entry.sign(usdc(600), &lost, true);
        let proof = signed_by(&key(), &entry, 1_100);
        let theirs = state(&entry, Some(charged), 0);
        assert_eq!(entry.correct(Some(&theirs), Some(&proof)), Correction::Adopted);
        assert_eq!((entry.pending.is_some(), entry.escrow), (is_pending, usdc(escrow)), "{charged}");
    }
}

#[test]
fn deposits_are_kept_apart_up_to_a_bound_and_released_oldest_first() {
    let mut entry = entry();
    for number in 1..=17 {
        entry.add_deposit(deposit(100), NOW + number);
        entry.deposit_arrived();
        assert_eq!(entry.deposits().len() as u64, number.min(16));
    }
    assert_eq!(entry.deposits()[..2], [(NOW + 2, usdc(200)), (NOW + 3, usdc(100))], "the oldest counts with the next");
    entry.refund_reported(usdc(250), true);
    let released = |signed_at, units| Change::Released { signed_at, amount: usdc(units) };
    assert_eq!(entry.take_changes(), [released(NOW + 2, 200), released(NOW + 3, 50)]);
    assert_eq!((entry.deposits()[0], entry.deposits().len()), ((NOW + 3, usdc(50)), 15));
}

#[test]
fn lost_journal_is_replaced_by_the_payers_own_signature() {
    let mut entry = entry();
    entry.add_deposit(deposit(10_000), NOW);
    let first = voucher(&entry, PRICE);
    entry.sign(usdc(PRICE), &first, true);
    let theirs = state(&entry, Some(4_300), 0);
    let proof = signed_by(&key(), &entry, 5_000);
    assert_eq!(entry.correct(Some(&theirs), Some(&proof)), Correction::Adopted);
    assert_eq!((entry.charged, entry.spent(), entry.reserved()), (usdc(4_300), Usdc::ZERO, usdc(10_000)));
    assert_eq!(entry.means(usdc(PRICE), NOW), Means::PendingDeposit);
    entry.deposit_arrived();
    entry.charge(usdc(PRICE), entry.ceiling(usdc(PRICE)));
    assert_eq!((entry.available(), entry.spent(), entry.reserved()), (usdc(9_000), usdc(1_000), usdc(9_000)));
}

#[test]
fn expired_deposit_stays_reserved_unless_refusals_are_believed() {
    for (is_unclear, believed, escrow, reserved) in
        [(true, false, 5_000, 5_000), (true, true, 5_000, 5_000), (false, false, 0, 5_000), (false, true, 0, 0)]
    {
        let mut entry = entry();
        entry.add_deposit(deposit(5_000), NOW);
        let first = voucher(&entry, PRICE);
        let before = entry.sign(usdc(PRICE), &first, true);
        if !is_unclear {
            entry.refused(before);
        }
        entry.expire(NOW + 359, believed);
        assert!(entry.pending.is_some(), "a clock may be behind");
        entry.expire(NOW + 360, believed);
        assert_eq!(entry.pending, None);
        assert_eq!((entry.escrow, entry.reserved()), (usdc(escrow), usdc(reserved)), "{is_unclear} {believed}");
    }
}

#[test]
#[cfg(feature = "onchain")]
fn chain_shows_what_was_claimed_and_what_is_left() {
    use super::entry::Seen;
    let seen =
        |balance, claimed, time| Seen { balance: usdc(balance), claimed: usdc(claimed), pending_used: None, time };

    let mut entry = funded(10_000, 3_000);
    assert_eq!(entry.observe(&seen(10_000, 3_000, NOW + 300)), Correction::Adopted);
    assert_eq!((entry.charged, entry.reserved()), (usdc(3_000), usdc(7_000)));
    let found = ChannelFinding::ClaimedTooMuch { claimed: usdc(3_001), charged: usdc(3_000) };
    assert_eq!(entry.clone().observe(&seen(10_000, 3_001, NOW + 300)), Correction::Disputed(found));

    // A final block from before the deposit's end proves nothing about it.
    assert_eq!(entry.observe(&seen(0, 0, NOW + 299)), Correction::Adopted);
    assert_eq!((entry.available(), entry.reserved()), (usdc(7_000), usdc(7_000)));
    entry.refund_reported(usdc(7_000), false);
    assert_eq!((entry.available(), entry.reserved()), (Usdc::ZERO, usdc(7_000)), "the seller's word proves nothing");
    assert_eq!(entry.observe(&seen(3_000, 3_000, NOW + 300)), Correction::Adopted);
    assert_eq!((entry.available(), entry.reserved(), entry.missing), (Usdc::ZERO, Usdc::ZERO, Usdc::ZERO));

    // A claim shows what became of a request without an answer only if it is of more than was charged before.
    let mut doubtful = funded(10_000, 1_000);
    let unanswered = voucher(&doubtful, PRICE);
    doubtful.sign(usdc(PRICE), &unanswered, false);
    for (claimed, doubt) in [(1_000, PRICE), (2_000, 0)] {
        assert_eq!(doubtful.observe(&seen(10_000, claimed, NOW)), Correction::Adopted);
        assert_eq!((doubtful.charged, doubtful.doubt), (usdc(claimed), usdc(doubt)));
    }

    let mut lost = self::entry();
    assert_eq!(lost.observe(&seen(0, 0, NOW)), Correction::Adopted);
    assert!(!lost.is_known(), "nothing is in it");
    assert_eq!(lost.observe(&seen(10_000, 4_000, NOW)), Correction::Adopted);
    assert_eq!((lost.charged, lost.available(), lost.reserved()), (usdc(4_000), usdc(6_000), usdc(6_000)));
}

/// Books that were opened anew, because an earlier journal was lost, learn from the chain what was claimed, and from the seller what was
/// charged since.
#[test]
#[cfg(feature = "onchain")]
fn charge_of_an_earlier_journal_may_be_claimed_later_than_the_chain_was_seen() {
    use super::entry::Seen;
    let seen = |claimed, time| Seen { balance: usdc(10_000), claimed: usdc(claimed), pending_used: None, time };
    let mut opened = entry();
    assert_eq!(opened.observe(&seen(3_000, NOW)), Correction::Adopted);
    let mut told = opened.clone();
    let proof = signed_by(&key(), &told, 5_000);
    assert_eq!(told.correct(Some(&state(&told, Some(4_300), 3_000)), Some(&proof)), Correction::Adopted);
    assert_eq!((told.charged, told.spent(), told.available()), (usdc(4_300), Usdc::ZERO, usdc(5_700)));
    assert_eq!(told.reserved(), usdc(5_700), "what was charged before is not of these books");
    told.charge(usdc(PRICE), usdc(5_300));
    for mut entry in [told, opened] {
        for claimed in [4_300, 5_300] {
            assert_eq!(entry.observe(&seen(claimed, NOW + 300)), Correction::Adopted, "{claimed}");
        }
        assert_eq!((entry.charged, entry.available(), entry.reserved()), (usdc(5_300), usdc(4_700), usdc(4_700)));
    }
}

/// A seller that refuses a voucher and claims by it has charged it, also in books that know of no charge yet.
#[test]
#[cfg(feature = "onchain")]
fn refused_voucher_that_is_claimed_is_spent() {
    use super::entry::Seen;
    let seen = |claimed| Seen { balance: usdc(10_000), claimed: usdc(claimed), pending_used: Some(true), time: NOW };
    let mut entry = entry();
    entry.add_deposit(deposit(10_000), NOW);
    for round in 1..=3 {
        let refused = voucher(&entry, PRICE);
        let before = entry.sign(usdc(PRICE), &refused, round == 1);
        let expected = match round {
            // Its answer was lost.
            3 => Correction::Adopted,
            _ => {
                entry.refused(before);
                Correction::Charged(ChannelFinding::ChargedRefused { charged: usdc(PRICE) })
            }
        };
        assert_eq!(entry.observe(&seen(round * PRICE)), expected, "{round}");
        assert_eq!((entry.spent(), entry.reserved()), (usdc(round * PRICE), usdc(10_000 - round * PRICE)), "{round}");
    }
}

/// Charges beyond what these books signed are by vouchers of an earlier journal, beside which theirs never fitted.
#[test]
#[cfg(feature = "onchain")]
fn books_that_open_have_no_doubt() {
    use super::entry::Seen;
    let mut opened = entry();
    let seen = Seen { balance: usdc(10_000), claimed: usdc(3_000), pending_used: None, time: NOW };
    opened.observe(&seen);
    let unanswered = voucher(&opened, PRICE);
    opened.sign(usdc(PRICE), &unanswered, false);
    let mut told = opened.clone();
    let proof = signed_by(&key(), &told, 5_000);
    assert_eq!(told.correct(Some(&state(&told, Some(4_300), 3_000)), Some(&proof)), Correction::Adopted);
    assert_eq!((told.opening, told.doubt, told.reserved()), (usdc(4_300), Usdc::ZERO, usdc(5_700)));
    let claimed = Seen { claimed: usdc(4_300), ..seen };
    assert_eq!(opened.observe(&claimed), Correction::Adopted);
    assert_eq!((opened.opening, opened.doubt, opened.spent()), (usdc(4_300), Usdc::ZERO, Usdc::ZERO));
    // More was deposited than the final block has.
    let mut behind = entry();
    behind.observe(&seen);
    let proof = signed_by(&key(), &behind, 12_500);
    assert_eq!(behind.correct(Some(&state(&behind, Some(12_000), 3_000)), Some(&proof)), Correction::Adopted);
    assert_eq!(behind.means(usdc(PRICE), NOW), Means::NewDeposit { needed: usdc(PRICE) });
}

/// The journal was lost after a purchase for less than its voucher. The claim publishes that voucher, and a stranger pays with the rest.
#[test]
fn rest_of_a_voucher_that_was_signed_again_is_no_dispute() {
    let mut entry = entry();
    entry.add_deposit(deposit(10_000), NOW);
    let again = voucher(&entry, PRICE);
    let before = entry.sign(usdc(PRICE), &again, true);
    entry.refused(before);
    let proof = signed_by(&key(), &entry, PRICE);
    let refused = ChannelFinding::ChargedRefused { charged: usdc(300) };
    assert_eq!(entry.correct(Some(&state(&entry, Some(300), 0)), Some(&proof)), Correction::Charged(refused));
    let rest = ChannelFinding::ChargedTheRest { charged: usdc(700) };
    assert_eq!(entry.correct(Some(&state(&entry, Some(PRICE), 300)), Some(&proof)), Correction::Charged(rest));
    assert_eq!((entry.charged, entry.dispute()), (usdc(PRICE), None));
}

/// A seller that shows a voucher which it refused has charged nothing for it.
#[test]
fn refused_voucher_that_is_shown_allows_no_charge() {
    let mut entry = funded(10_000, 1_000);
    let proof = signed_by(&key(), &entry, 2_000);
    for charged in [1_000, 2_000] {
        let refused = voucher(&entry, PRICE);
        let before = entry.sign(usdc(PRICE), &refused, false);
        entry.refused(before);
        let correction = entry.correct(Some(&state(&entry, Some(charged), 0)), Some(&proof));
        assert_eq!(matches!(correction, Correction::Disputed(_)), charged > 1_000, "{correction:?}");
    }
}

/// Books that were opened anew do not know what else is in the channel, from which the rest of an earlier voucher may be charged.
#[test]
#[cfg(feature = "onchain")]
fn rest_of_a_voucher_of_an_earlier_journal_is_looked_up_on_the_chain() {
    use super::entry::Seen;
    let mut entry = entry();
    entry.add_deposit(deposit(1_000), NOW);
    let first = voucher(&entry, PRICE);
    let before = entry.sign(usdc(PRICE), &first, true);
    entry.refused(before);
    let older = signed_by(&key(), &entry, 8_000);
    assert_eq!(entry.correct(Some(&state(&entry, Some(5_000), 5_000)), Some(&older)), Correction::Adopted);
    let second = voucher(&entry, PRICE);
    entry.sign(usdc(PRICE), &second, true);
    entry.deposit_arrived();
    entry.charge(usdc(PRICE), usdc(6_000));
    let theirs = state(&entry, Some(8_000), 5_000);
    assert_eq!(entry.correct(Some(&theirs), Some(&older)), Correction::Unproven);
    let seen = Seen { balance: usdc(11_000), claimed: usdc(5_000), pending_used: None, time: NOW + 300 };
    assert_eq!(entry.observe(&seen), Correction::Adopted);
    let correction = entry.correct(Some(&theirs), Some(&older));
    assert!(matches!(correction, Correction::Adopted | Correction::Charged(_)), "{correction:?}");
    assert_eq!((entry.charged, entry.dispute()), (usdc(8_000), None));
}

/// A refused voucher proves nothing, also beside a charge that a request without an answer explains.
#[test]
fn refused_voucher_that_is_shown_with_a_charge_allows_no_other() {
    let mut entry = funded(10_000, 1_000);
    let refused = voucher(&entry, 3_000);
    let before = entry.sign(usdc(3_000), &refused, false);
    entry.refused(before);
    let unanswered = voucher(&entry, PRICE);
    entry.sign(usdc(PRICE), &unanswered, false);
    let shown = signed_by(&key(), &entry, 4_000);
    assert_eq!(entry.correct(Some(&state(&entry, Some(2_000), 0)), Some(&shown)), Correction::Adopted);
    let next = entry.correct(Some(&state(&entry, Some(4_000), 0)), Some(&shown));
    assert!(matches!(next, Correction::Disputed(_)), "{next:?}");
}

/// A seller that lost its books may have a claim of before on its way.
#[test]
#[cfg(feature = "onchain")]
fn what_a_seller_has_forgotten_may_still_be_claimed() {
    use super::entry::Seen;
    let mut entry = funded(10_000, 1_000);
    let unanswered = voucher(&entry, PRICE);
    entry.sign(usdc(PRICE), &unanswered, false);
    assert_eq!(entry.correct(Some(&state(&entry, Some(0), 0)), None), Correction::Adopted);
    assert_eq!((entry.charged, entry.highest), (Usdc::ZERO, usdc(1_000)));
    let claimed = Seen { balance: usdc(10_000), claimed: usdc(2_000), pending_used: None, time: NOW };
    entry.observe(&claimed);
    assert_eq!((entry.charged, entry.dispute()), (usdc(2_000), None));
}

/// The rest of a voucher is charged from what is in the channel.
#[test]
fn what_was_refunded_pays_for_no_rest_of_a_voucher() {
    let mut entry = funded(10_000, 1_000);
    let first = voucher(&entry, PRICE);
    entry.sign(usdc(PRICE), &first, false);
    entry.charge(usdc(300), usdc(2_000));
    entry.refund_reported(usdc(8_700), true);
    let mut filled = entry.clone();
    let theirs = state(&entry, Some(2_000), 1_300);
    let proof = signed_by(&key(), &entry, 2_000);
    assert_eq!(entry.correct(Some(&theirs), Some(&proof)), Correction::Unproven);
    filled.add_deposit(deposit(10_000), NOW);
    filled.deposit_arrived();
    let rest = ChannelFinding::ChargedTheRest { charged: usdc(700) };
    assert_eq!(filled.correct(Some(&theirs), Some(&proof)), Correction::Charged(rest));
}

/// What was charged is within the doubt of these books, and the voucher is of an earlier journal.
#[test]
fn voucher_of_an_earlier_journal_explains_the_charge_before_a_doubt_does() {
    let mut entry = entry();
    entry.add_deposit(deposit(10_000), NOW);
    let unanswered = voucher(&entry, PRICE);
    entry.sign(usdc(PRICE), &unanswered, true);
    let proof = signed_by(&key(), &entry, 1_600);
    assert_eq!(entry.correct(Some(&state(&entry, Some(900), 0)), Some(&proof)), Correction::Adopted);
    assert_eq!((entry.opening, entry.spent(), entry.accepted), (usdc(900), Usdc::ZERO, usdc(1_600)));
}

/// The seller withholds the payer's newest voucher from whoever shows one that may be public.
#[test]
fn charge_that_these_books_explain_needs_no_proof() {
    let doubtful = || {
        let mut entry = funded(10_000, 1_000);
        let unanswered = voucher(&entry, PRICE);
        entry.sign(usdc(PRICE), &unanswered, false);
        entry
    };
    for charged in [1_000, 1_300, 2_000] {
        let mut entry = doubtful();
        assert_eq!(entry.correct(Some(&state(&entry, Some(charged), 0)), None), Correction::Adopted, "{charged}");
        assert_eq!((entry.charged, entry.spent()), (usdc(charged), usdc(charged)));
    }
    let mut entry = doubtful();
    assert_eq!(entry.correct(Some(&state(&entry, Some(2_001), 0)), None), Correction::Unproven);
    assert_eq!((entry.charged, entry.spent()), (usdc(1_000), usdc(1_000)));
}

#[test]
#[cfg(feature = "onchain")]
fn deposit_that_the_chain_shows_is_counted_once() {
    use super::entry::Seen;
    let seen =
        |balance, is_used| Seen { balance: usdc(balance), claimed: Usdc::ZERO, pending_used: Some(is_used), time: NOW };
    let mut entry = entry();
    entry.add_deposit(deposit(5_000), NOW);
    let first = voucher(&entry, PRICE);
    entry.sign(usdc(PRICE), &first, true);
    entry.observe(&seen(0, false));
    assert!(entry.pending.is_some(), "it can still be made");
    assert_eq!((entry.available(), entry.reserved(), entry.take_changes()), (Usdc::ZERO, usdc(5_000), vec![]));
    entry.observe(&seen(5_000, true));
    assert_eq!(entry.pending, None);
    assert_eq!((entry.available(), entry.reserved()), (usdc(5_000), usdc(5_000)));
}

#[test]
#[cfg(feature = "onchain")]
fn refund_that_was_reported_and_not_made_is_the_payers_to_spend_again() {
    use super::entry::Seen;
    let mut entry = funded(10_000, 3_000);
    entry.refund_reported(usdc(7_000), false);
    let seen = Seen { balance: usdc(10_000), claimed: usdc(3_000), pending_used: None, time: NOW + 300 };
    assert_eq!(entry.observe(&seen), Correction::Adopted);
    assert_eq!((entry.available(), entry.reserved(), entry.missing), (usdc(7_000), usdc(7_000), Usdc::ZERO));
}

/// The answer to the last request was lost before everything was refunded.
#[test]
#[cfg(feature = "onchain")]
fn nothing_stays_reserved_for_a_doubt_in_an_empty_channel() {
    use super::entry::Seen;
    let seen = |balance, time| Seen { balance: usdc(balance), claimed: usdc(3_000), pending_used: None, time };
    let mut entry = funded(10_000, 3_000);
    let unanswered = voucher(&entry, PRICE);
    entry.sign(usdc(PRICE), &unanswered, false);
    entry.refund_reported(usdc(7_000), true);
    assert_eq!(entry.reserved(), usdc(PRICE), "the seller may have charged it");
    assert_eq!(entry.observe(&seen(3_000, NOW + 300)), Correction::Adopted);
    assert_eq!((entry.available(), entry.reserved()), (Usdc::ZERO, Usdc::ZERO));
}

#[derive(Clone, Copy, Debug)]
enum Event {
    Pay { price: u64, deposit: u64, outcome: Outcome },
    Expire { believed: bool },
    Refund { amount: u64, believed: bool },
    Missing,
    Correct { charged: u64, signed: Option<u64> },
}

#[derive(Clone, Copy, Debug)]
enum Outcome {
    Charged(u64),
    Refused,
    Left,
    Lost,
}

fn events() -> impl Strategy<Value = Vec<Event>> {
    let charged = (0..3_000_u64).prop_map(Outcome::Charged);
    let outcome = prop_oneof![charged, Just(Outcome::Refused), Just(Outcome::Left), Just(Outcome::Lost)];
    let event = prop_oneof![
        6 => (1..3_000_u64, 0..9_000_u64, outcome)
            .prop_map(|(price, deposit, outcome)| Event::Pay { price, deposit, outcome }),
        1 => any::<bool>().prop_map(|believed| Event::Expire { believed }),
        1 => (1..9_000_u64, any::<bool>()).prop_map(|(amount, believed)| Event::Refund { amount, believed }),
        1 => Just(Event::Missing),
        2 => (0..30_000_u64, proptest::option::of(0..30_000_u64))
            .prop_map(|(charged, signed)| Event::Correct { charged, signed }),
    ];
    proptest::collection::vec(event, 1..40)
}

proptest! {
    /// Whatever happens, no voucher is above what is in escrow and on its way, a seller is never believed more than was signed, and the
    /// budget's sums fit.
    #[test]
    fn books_never_sign_more_than_they_hold(events in events()) {
        let (mut entry, mut deposited, mut now, mut signed) = (entry(), 0, NOW, 0);
        for event in events {
            match event {
                Event::Pay { price, deposit: size, outcome } => {
                    let means = entry.means(usdc(price), now);
                    if let Means::NewDeposit { needed } = means {
                        let mut pending = deposit(size.max(needed.atomic()));
                        pending.valid_before = now + 300;
                        deposited += pending.amount.atomic();
                        entry.add_deposit(pending, now);
                    }
                    if means == Means::Nothing {
                        continue;
                    }
                    let with_deposit = means != Means::Voucher;
                    let voucher = voucher(&entry, price);
                    let pending = entry.pending.as_ref().filter(|_| with_deposit).map_or(0, |it| it.amount.atomic());
                    prop_assert!(voucher.max_claimable_amount <= (entry.escrow.atomic() + pending).into());
                    signed = signed.max(voucher.max_claimable_amount);
                    let before = entry.sign(usdc(price), &voucher, with_deposit);
                    match outcome {
                        Outcome::Charged(amount) => {
                            if with_deposit {
                                entry.deposit_arrived();
                            }
                            entry.charge(usdc(amount.min(price)), entry.ceiling(usdc(price)));
                        }
                        Outcome::Refused => entry.refused(before),
                        Outcome::Left => {
                            entry.refused(before);
                            entry.leave(usdc(price));
                        }
                        Outcome::Lost => {}
                    }
                }
                Event::Expire { believed } => {
                    now += 360;
                    entry.expire(now, believed);
                }
                Event::Refund { amount, believed } => entry.refund_reported(usdc(amount), believed),
                Event::Missing => entry.escrow_is_missing(),
                // Books without a past believe the payer's signature, which this test makes for any sum.
                Event::Correct { .. } if !entry.is_known() => continue,
                Event::Correct { charged, signed: shown } => {
                    let unclear = entry.doubt.max(entry.left).atomic();
                    let limit = entry.highest.max(entry.accepted).max(usdc(entry.charged.atomic() + unclear));
                    let proof = shown.map(|max| signed_by(&key(), &entry, max));
                    let theirs = state(&entry, Some(charged), 0);
                    entry.correct(Some(&theirs), proof.as_ref());
                    prop_assert!(entry.charged <= limit);
                }
            }
            let released: u64 = deposited - entry.deposits().iter().map(|(_, amount)| amount.atomic()).sum::<u64>();
            prop_assert!(entry.spent().atomic() + entry.reserved().atomic() + released == deposited);
            prop_assert!(u128::from(entry.highest.max(entry.accepted).atomic()) <= signed);
            prop_assert!(entry.charged <= entry.escrow);
            let written = serde_json::to_string(&entry).unwrap();
            let mut read: ChannelEntry = serde_json::from_str(&written).unwrap();
            entry.take_changes();
            read.take_changes();
            prop_assert_eq!(&read, &entry);
        }
    }
}

fn terms() -> Terms {
    let config = ChannelConfig { salt: B256::ZERO, ..config() };
    Terms { network: Network::BASE, config, price: usdc(PRICE), target: usdc(10 * PRICE) }
}

fn choose(books: &mut Books, policy: &ChannelPolicy) -> Result<Option<(ChannelEntry, u64)>, Refusal> {
    match books.choose(policy, &terms(), Wanted::Best, (NOW, false))? {
        Choice::Lane(_, entry, deposit) => Ok(Some((*entry, deposit.atomic()))),
        Choice::Wait => Ok(None),
    }
}

#[test]
fn request_gets_a_lane_of_its_own_and_waits_only_when_all_are_in_use() {
    let (mut books, policy) = (Books::default(), ChannelPolicy::new().lanes(3));
    let mut lanes = Vec::new();
    for _ in 0..3 {
        let (entry, deposit) = choose(&mut books, &policy).unwrap().unwrap();
        assert_eq!(deposit, 10_000);
        lanes.push(entry);
    }
    let salts: Vec<_> = lanes.iter().map(|entry| entry.config.salt[31]).collect();
    assert_eq!(salts, [0, 1, 2]);
    assert!(choose(&mut books, &policy).unwrap().is_none());
    for (mut entry, escrow) in lanes.into_iter().zip([500, 2_000, 9_000]) {
        entry.add_deposit(deposit(escrow), NOW);
        entry.deposit_arrived();
        let id = entry.id();
        put(&mut books, entry);
        books.free(id);
    }
    // The first lane would need a deposit, the second does not.
    let chosen: Vec<_> = (0..2).map(|_| choose(&mut books, &policy).unwrap().unwrap()).collect();
    assert_eq!(
        chosen.iter().map(|(entry, deposit)| (entry.config.salt[31], *deposit)).collect::<Vec<_>>(),
        [(1, 0), (2, 0)]
    );
    let (first, deposit) = choose(&mut books, &policy).unwrap().unwrap();
    assert_eq!((first.config.salt[31], deposit), (0, 10_000));
}

fn put(books: &mut Books, entry: ChannelEntry) {
    books.put(entry.id(), entry);
}

#[test]
fn busy_lane_is_taken_only_if_there_is_no_other_one_until_a_while_has_passed() {
    let mut books = Books::default();
    let mut entry = funded(10_000, 1_000);
    entry.config = terms().config;
    let id = entry.id();
    put(&mut books, entry);
    books.set_busy(id, NOW);
    let chosen = |books: &mut Books, policy: &ChannelPolicy, now| {
        let Ok(Choice::Lane(id, ..)) = books.choose(policy, &terms(), Wanted::Best, (now, false)) else {
            panic!("no lane")
        };
        books.free(id);
        id
    };
    let two = ChannelPolicy::new().lanes(2);
    assert_ne!(chosen(&mut books, &two, NOW), id, "another one is opened");
    assert_eq!(chosen(&mut books, &ChannelPolicy::new().lanes(1), NOW), id);
    let tight = ChannelPolicy::new().lanes(2).escrow_total(usdc(9_000));
    assert_eq!(chosen(&mut books, &tight, NOW), id, "no other one may be opened");
    assert_eq!(chosen(&mut books, &two, NOW + 30), id);
}

#[test]
fn deposits_fit_into_the_limits_of_escrow_together() {
    let policy = ChannelPolicy::new().escrow_per_payee(usdc(15_000)).escrow_total(usdc(100_000));
    let mut books = Books::default();
    assert_eq!(choose(&mut books, &policy).unwrap().unwrap().1, 10_000);
    assert_eq!(choose(&mut books, &policy).unwrap().unwrap().1, 5_000, "what is left");
    assert!(choose(&mut books, &policy).unwrap().is_none(), "it waits for one of the two");
    let tight = ChannelPolicy::new().escrow_per_payee(usdc(999));
    assert!(matches!(choose(&mut Books::default(), &tight), Err(Refusal::AboveEscrowLimit { payee: Some(_), .. })));
    let tight = ChannelPolicy::new().escrow_total(usdc(999));
    assert!(matches!(choose(&mut Books::default(), &tight), Err(Refusal::AboveEscrowLimit { payee: None, .. })));
}

#[test]
fn deposit_may_use_all_the_room_and_takes_none_from_another_payee() {
    let policy = ChannelPolicy::new().escrow_per_payee(usdc(PRICE)).escrow_total(usdc(2 * PRICE));
    let mut books = Books::default();
    let mut other = terms();
    other.config.receiver = Address::repeat_byte(9);
    other.config.receiver_authorizer = Address::repeat_byte(10);
    for terms in [terms(), other] {
        let chosen = books.choose(&policy, &terms, Wanted::Best, (NOW, false)).unwrap();
        let Choice::Lane(id, mut entry, deposit) = chosen else { panic!("{chosen:?}") };
        assert_eq!(deposit, usdc(PRICE));
        // Both are leased when the second deposit is promised, and the first holds money when it is.
        entry.add_deposit(self::deposit(PRICE), NOW);
        books.put(id, *entry);
    }
}

#[test]
fn two_payees_are_promised_deposits_at_once() {
    let policy = ChannelPolicy::new().escrow_per_payee(usdc(15_000)).escrow_total(usdc(100_000));
    let mut books = Books::default();
    for payee in [2, 9] {
        let mut terms = terms();
        terms.config.receiver = Address::repeat_byte(payee);
        let chosen = books.choose(&policy, &terms, Wanted::Best, (NOW, false)).unwrap();
        assert!(matches!(chosen, Choice::Lane(_, _, deposit) if deposit == usdc(10_000)), "{chosen:?}");
    }
}

#[test]
fn other_terms_open_no_channel_while_the_first_holds_money() {
    let policy = ChannelPolicy::new();
    for change in [
        (|config: &mut ChannelConfig| config.receiver_authorizer = Address::repeat_byte(5)) as fn(&mut ChannelConfig),
        |config| config.withdraw_delay = 901,
    ] {
        let mut books = Books::default();
        put(&mut books, funded(10_000, 1_000));
        let mut changed = terms();
        change(&mut changed.config);
        let refused = books.choose(&policy, &changed, Wanted::Best, (NOW, false));
        assert!(matches!(refused, Err(Refusal::ChannelTermsChanged { .. })), "{refused:?}");
        put(&mut books, funded(10_000, 10_000));
        assert!(books.choose(&policy, &changed, Wanted::Best, (NOW, false)).is_ok(), "the first one is empty");
    }
}

#[test]
fn seller_in_dispute_gets_no_voucher_in_any_lane() {
    let (mut books, policy) = (Books::default(), ChannelPolicy::new());
    let mut entry = funded(10_000, 1_000);
    entry.disputed(ChannelFinding::Unproven);
    put(&mut books, entry);
    assert!(matches!(choose(&mut books, &policy), Err(Refusal::ChannelDisputed { .. })));
}

/// A clock that has the journal fail, as on a full disk, once a second channel is in it.
#[derive(Debug)]
struct FullDisk {
    journal: Journal,
    path: PathBuf,
}

impl Clock for FullDisk {
    fn now(&self) -> u64 {
        if self.journal.channels().len() == 2 {
            self.journal.refuse_writes(&self.path);
        }
        NOW
    }
}

/// A later process would find the purchase in the channel that was left, and pay for it there once more.
#[tokio::test]
async fn purchase_is_sent_from_no_other_channel_unless_its_leaving_the_busy_one_is_on_disk() {
    let path = std::env::temp_dir().join(format!("x402-leaving-{}", std::process::id()));
    let _ = std::fs::remove_file(&path);
    let journal = Journal::open(&path).unwrap();
    let clock = Arc::new(FullDisk { journal: journal.clone(), path: path.clone() });
    let budget = Budget::builder().journal(journal.clone()).build();
    let payer = Payer::builder(key()).budget(budget).vouchers(ChannelPolicy::new()).clock(clock).build();

    let header = |name: &'static str, value: &serde_json::Value| {
        HeaderMap::from_iter([(HeaderName::from_static(name), encode_header(value).unwrap().parse().unwrap())])
    };
    let required = |error: &str| {
        let asset = Network::BASE_SEPOLIA.usdc().unwrap().address;
        let offer = json!({
            "scheme": "batch-settlement", "network": "eip155:84532", "amount": "1000", "asset": asset,
            "payTo": Address::repeat_byte(7), "maxTimeoutSeconds": 300,
            "extra": { "name": "USDC", "version": "2", "receiverAuthorizer": Address::repeat_byte(8),
                "withdrawDelay": 900, "minDeposit": "5000" },
        });
        let resource = json!({ "url": "http://evaluator.example" });
        let required = json!({ "x402Version": 2, "error": error, "resource": resource, "accepts": [offer] });
        header("payment-required", &required)
    };
    let url = "http://evaluator.example/evaluate".parse().unwrap();
    let pay = async || payer.pay(&Method::POST, &url, &required("Payment required"), None).await.unwrap().unwrap();
    let mut first = pay().await;
    let charged = json!({ "success": true, "payer": payer.address(), "transaction": "", "network": "eip155:84532",
        "amount": "", "extra": { "chargedAmount": "1000" } });
    assert_eq!(first.answered(StatusCode::OK, &header("payment-response", &charged), None), NextStep::Conclude);
    first.conclude().await;
    let mut second = pay().await;
    let busy = required("invalid_batch_settlement_evm_channel_busy");
    assert_eq!(second.answered(StatusCode::PAYMENT_REQUIRED, &busy, None), NextStep::SignAgain);
    assert!(matches!(second.sign_again().await, Err(PaymentError::Journal(_))));
    assert_eq!(journal.channels().len(), 2, "it had signed for the other one");
    let _ = std::fs::remove_file(&path);
}
