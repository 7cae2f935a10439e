//! The gas of an account: what its balance has to pay for, and whether it pays for one transaction more.
//!
//! A balance pays for the transactions in flight, of this process and of others that share the key. Where claims are sent, it also has to pay
//! for a claim of what withdrawals could take: anything less urgent is sent only if the balance pays for all of that beside it.

use std::{collections::BTreeMap, time::Duration};

use alloy_consensus::{Transaction as _, TxEnvelope};
use alloy_eips::Decodable2718 as _;
use alloy_primitives::U256;
use tokio::time::Instant;

use super::line::Lane;
use crate::ledger::JournaledTransaction;

/// The gas of one payment or deposit, rounded up.
pub(super) const TYPICAL_GAS: u64 = 215_000;
/// The gas that payments, deposits and refunds leave to an account: a claim of a hundred channels, the most that are claimed together.
pub(super) const KEPT_GAS: u64 = 3_000_000;
/// How long an account that could not pay is used only if there is no other.
const REST: Duration = Duration::from_secs(30);

/// What the balance of an account has to pay for, and what is known of the balance.
#[derive(Debug, Default)]
pub(super) struct Gas {
    /// The transactions in flight, by nonce.
    in_flight: BTreeMap<u64, InFlight>,
    /// The gas of transactions that were announced and have no nonce yet.
    announced: u64,
    /// The gas of journalled transactions that are not of this process.
    others: u64,
    /// What the node told last, less what was spent since, in wei.
    balance: Option<U256>,
    rest: Option<Rest>,
}

/// A transaction in flight.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct InFlight {
    /// The most gas that it may use.
    pub(super) gas: u64,
    /// What may be spent above the ceiling, in wei, on it and on those that it waits for.
    pub(super) worth: u128,
    /// What was spent of that on those that it waited for.
    spent: u128,
}

/// An account that could not pay for calls of this lane. It is used for them, and for less urgent ones, only if there is no other.
#[derive(Clone, Copy, Debug)]
struct Rest {
    until: Instant,
    lane: Lane,
    /// Its balance, in wei.
    balance: U256,
}

/// Whether a balance pays for a transaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Affords {
    Yes,
    /// It may when those in flight are in blocks, since they take less than they might. Also if the balance is not known.
    Later,
    /// It would for one payment.
    Less,
    No,
}

impl Gas {
    /// Returns whether the balance pays for so much `gas` at this price, beside what was in flight `before` and what is `kept`.
    pub(super) fn affords(&self, gas: u64, before: u64, kept: u64, max_fee: u128) -> Affords {
        let Some(balance) = self.balance else { return Affords::Later };
        let pays_for = |gas: u64| balance >= U256::from(max_fee).saturating_mul(U256::from(gas.saturating_add(kept)));
        match pays_for(gas) {
            true if pays_for(gas.saturating_add(before)) => Affords::Yes,
            true => Affords::Later,
            false if pays_for(TYPICAL_GAS) => Affords::Less,
            false => Affords::No,
        }
    }

    /// Notes the balance that the node told, in wei. A rest ends if it is higher now.
    pub(super) fn note_balance(&mut self, balance: U256) {
        self.balance = Some(balance);
        self.rest = self.rest.filter(|rest| balance <= rest.balance);
    }

    /// Returns what is known of the balance, in wei.
    pub(super) fn balance(&self) -> U256 {
        self.balance.unwrap_or_default()
    }

    /// Notes that a transaction took so much of the balance, in wei.
    pub(super) fn spend(&mut self, cost: U256) {
        self.balance = self.balance.map(|balance| balance.saturating_sub(cost));
    }

    /// Prefers other accounts for half a minute for calls of this lane and less urgent ones, since this one cannot pay for them.
    pub(super) fn rest(&mut self, lane: Lane) {
        let (now, balance) = (Instant::now(), self.balance());
        if self.rest.is_none_or(|rest| rest.lane <= lane || rest.until <= now) {
            self.rest = Some(Rest { until: now + REST, lane, balance });
        }
    }

    /// Returns the balance, in wei, with which the account could not pay for calls of this lane a moment ago, if that happened.
    pub(super) fn resting(&self, lane: Lane) -> Option<U256> {
        self.rest.filter(|rest| lane <= rest.lane && rest.until > Instant::now()).map(|rest| rest.balance)
    }

    /// Returns how much gas the transactions in flight may use.
    pub(super) fn in_flight(&self) -> u64 {
        let known = self.announced.saturating_add(self.others);
        self.in_flight.values().fold(known, |sum, other| sum.saturating_add(other.gas))
    }

    /// Counts so much gas as in flight, and returns how much was before.
    pub(super) fn announce(&mut self, gas: u64) -> u64 {
        let before = self.in_flight();
        self.announced = self.announced.saturating_add(gas);
        before
    }

    /// Ends what [`announce`](Self::announce) began.
    pub(super) fn has_been_announced(&mut self, gas: u64) {
        self.announced = self.announced.saturating_sub(gas);
    }

    /// Notes the journalled transactions, one for each nonce. Those that are not of this process count as in flight, too.
    pub(super) fn note_journalled(&mut self, journalled: &[JournaledTransaction]) {
        let others = journalled.iter().filter(|other| !self.in_flight.contains_key(&other.nonce));
        let gas = others.filter_map(|other| TxEnvelope::decode_2718(&mut other.raw.as_ref()).ok());
        self.others = gas.map(|other| other.gas_limit()).fold(0, u64::saturating_add);
    }

    /// Enters a transaction that may use so much gas.
    pub(super) fn enter(&mut self, nonce: u64, gas: u64) {
        self.in_flight.insert(nonce, InFlight { gas, ..InFlight::default() });
    }

    /// Removes a transaction.
    pub(super) fn leave(&mut self, nonce: u64) -> InFlight {
        self.in_flight.remove(&nonce).unwrap_or_default()
    }

    /// Returns the nonces in flight, the lowest first.
    pub(super) fn nonces(&self) -> impl DoubleEndedIterator<Item = u64> + ExactSizeIterator {
        self.in_flight.keys().copied()
    }

    /// Lets the transaction with this nonce and those with lower ones, for which it waits, cost so much in wei above the ceiling.
    pub(super) fn hurry(&mut self, nonce: u64, worth: u128) {
        if let Some(hurried) = self.in_flight.get_mut(&nonce) {
            hurried.worth = worth;
        }
    }

    /// Notes that a transaction with this nonce cost so much in wei above the ceiling, which those above it may not spend again.
    pub(super) fn spend_above_ceiling(&mut self, nonce: u64, wei: u128) {
        for (_, waiting) in self.in_flight.range_mut(nonce..) {
            waiting.spent = waiting.spent.saturating_add(wei);
        }
    }

    /// Returns what may be offered for a unit of gas with this nonce, in wei, where that is more than the ceiling: what a transaction with this
    /// nonce or a higher one may spend, divided by its gas and by that of all that it waits for. `more` is the gas of transactions that are
    /// not counted yet.
    pub(super) fn most(&self, nonce: u64, more: u64) -> u128 {
        let (mut gas, mut most) = (self.others.saturating_add(more), 0);
        for (other, waiting) in &self.in_flight {
            gas = gas.saturating_add(waiting.gas);
            if *other >= nonce {
                most = most.max(waiting.worth.saturating_sub(waiting.spent) / u128::from(gas.max(1)));
            }
        }
        most
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with_balance(wei: u64) -> Gas {
        Gas { balance: Some(U256::from(wei)), ..Gas::default() }
    }

    #[test]
    fn a_balance_pays_for_what_is_in_flight_and_kept_before_it_pays_for_more() {
        let gas = with_balance(20_000_000);
        let asked = |own, before| gas.affords(own, before, KEPT_GAS, 5);
        assert_eq!([asked(600_000, 400_000), asked(1_000_000, 0)], [Affords::Yes; 2]);
        assert_eq!([asked(600_000, 400_001), asked(1_000_000, 1)], [Affords::Later; 2]);
        assert_eq!(asked(1_000_001, 0), Affords::Less, "one payment could be paid for");
        assert_eq!(gas.affords(100_000, 0, 3_900_001, 5), Affords::No);
        assert_eq!(Gas::default().affords(1, 0, 0, 1), Affords::Later, "it is not known");
    }

    #[test]
    fn what_was_spent_is_missing_until_the_balance_is_told_again() {
        let mut gas = with_balance(1_000_000);
        gas.spend(U256::from(300_000));
        assert_eq!([gas.affords(700_000, 0, 0, 1), gas.affords(700_001, 0, 0, 1)], [Affords::Yes, Affords::Less]);
        gas.note_balance(U256::from(900_000));
        assert_eq!(gas.affords(900_000, 0, 0, 1), Affords::Yes);
    }

    #[tokio::test(start_paused = true)]
    async fn an_account_rests_for_what_is_as_urgent_or_less_until_it_holds_more() {
        let mut gas = with_balance(7);
        let rests = |gas: &Gas| {
            [Lane::Deposit, Lane::Refund, Lane::Claim, Lane::AtRisk].map(|lane| gas.resting(lane).is_some())
        };
        gas.rest(Lane::Deposit);
        assert_eq!(rests(&gas), [true, false, false, false]);
        gas.rest(Lane::Claim);
        assert_eq!(rests(&gas), [true, true, true, false]);
        tokio::time::advance(REST / 2).await;
        gas.rest(Lane::Deposit);
        tokio::time::advance(REST / 2).await;
        assert_eq!(rests(&gas), [false; 4], "the longer rest was not prolonged by a shorter one");
        gas.rest(Lane::AtRisk);
        gas.note_balance(U256::from(7));
        assert_eq!(rests(&gas), [true; 4]);
        gas.note_balance(U256::from(8));
        assert_eq!(rests(&gas), [false; 4]);
    }

    /// A claim of 100 gas that is worth 1,000 wei, and what others have below it.
    #[test]
    fn all_that_a_claim_waits_for_shares_what_it_is_worth() {
        let mut gas = Gas::default();
        gas.enter(7, 300);
        gas.enter(8, 100);
        gas.hurry(8, 1_000);
        assert_eq!([7, 8, 9].map(|nonce| gas.most(nonce, 0)), [2, 2, 0], "the one below is counted");
        // The lower nonce was given back, and a large batch has it.
        gas.leave(7);
        gas.enter(7, 600);
        assert_eq!(gas.most(7, 0), 1);
        // It is taken and given back again and again.
        for _ in 0..15 {
            gas.leave(7);
            gas.enter(7, 600);
        }
        assert_eq!(gas.most(7, 0), 1);
        // It is in a block.
        gas.leave(7);
        assert_eq!(gas.most(8, 0), 10);
        gas.spend_above_ceiling(7, 400);
        assert_eq!(gas.most(8, 0), 6);
        // A dead process left others below.
        gas.others = 700;
        assert_eq!(gas.most(5, 0), 0);
    }

    #[test]
    fn a_nonce_that_a_claim_gave_back_hurries_nobody() {
        let mut gas = Gas::default();
        gas.enter(7, 100);
        gas.enter(8, 100);
        gas.hurry(8, 1_000);
        gas.leave(8);
        gas.enter(8, 100);
        assert_eq!(gas.most(7, 0), 0);
    }
}
