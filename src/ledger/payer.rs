//! The sums of one payer: what it has in flight against its balance, and what it owes against its credit limit.
//!
//! The ledger in memory keeps the sums; the one in PostgreSQL has the database compute them. All ledgers decide with the code here.

use std::collections::{BTreeMap, VecDeque};

use alloy_primitives::{Address, U256};

use super::{
    LedgerError, Record,
    record::{RETENTION, Settlement},
    step::{FulfilmentStep, PaymentStep},
};
use crate::{network::Network, payment::Funds};

/// How long a settled amount is remembered for balances that were read before it moved, in seconds.
pub(super) const RECENT: u64 = 120;

/// How long a settled payment lets its payer owe as much, in seconds.
///
/// A payment that is never settled counts as owed for longer than that after it was deferred. Otherwise the same settled payment would let
/// its payer owe once more what it has not paid (invariant I20).
pub(super) const COUNTED: u64 = 600;
// Processes whose clocks differ by less than the rest agree on it.
const _: () = assert!(COUNTED < RETENTION);

/// A payer on one network in one token: whatever it signs, it pays from that balance.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PayerKey {
    /// The chain.
    pub network: Network,
    /// The token.
    pub token: Address,
    /// The payer.
    pub payer: Address,
}

impl PayerKey {
    /// Returns who pays this payment.
    pub fn of(record: &Record) -> Self {
        Self { network: record.key.network, token: record.terms.offer().asset.address, payer: record.key.payer }
    }

    /// Returns the key as bytes, for a database's column.
    pub fn to_bytes(&self) -> [u8; 48] {
        let mut bytes = [0; 48];
        bytes[..8].copy_from_slice(&self.network.chain_id().to_be_bytes());
        bytes[8..28].copy_from_slice(self.token.as_slice());
        bytes[28..].copy_from_slice(self.payer.as_slice());
        bytes
    }
}

/// What one payer has in flight, has paid and owes, on one network in one token: the rules of points 5 and 9 of the contract.
///
/// A ledger sums up the payer's other payments, takes the step on a copy of the record ([`Record::apply`]), and asks here whether it may
/// keep that. Nothing of the payer's may change in between.
#[derive(Debug, Default)]
pub struct PayerSums {
    /// In flight and not submitted: every balance still includes it.
    held: U256,
    /// In flight and submitted, with an unknown outcome: a balance may include it or not.
    submitted: U256,
    /// Settled recently, by block.
    moved: VecDeque<Moved>,
    /// Settled in the last [`COUNTED`] seconds, by the second in which that was first known, and by payee.
    settled: BTreeMap<(u64, Address), U256>,
    /// The sum of the unpaid deferred payments.
    owed: U256,
    /// The number of deferred payments that failed to settle.
    overdue: u32,
}

/// An amount that left the balance in a block. A balance read before that block still includes it.
#[derive(Debug)]
struct Moved {
    at: u64,
    block: u64,
    amount: U256,
}

/// The part of one payment in its payer's sums. A step that changes nothing in it needs nothing of them.
#[derive(Debug, PartialEq)]
pub(super) struct Share {
    in_flight: U256,
    is_resolved: bool,
    settled: Option<((u64, Address), U256)>,
    owed: U256,
    is_overdue: bool,
}

impl Share {
    pub(super) fn of(record: &Record) -> Self {
        Self {
            in_flight: record.in_flight(),
            is_resolved: record.is_resolved(),
            settled: settled(record),
            owed: record.owed(),
            is_overdue: record.is_overdue(),
        }
    }
}

/// Returns what was settled, when and to whom. That time stays if a reorganization undoes it and it is settled again.
fn settled(record: &Record) -> Option<((u64, Address), U256)> {
    let at = record.settled_at.filter(|_| record.transaction().is_some())?;
    Some(((at, record.terms.offer().pay_to), record.amount()))
}

impl PayerSums {
    /// Sums up payments of one payer at `now` (Unix seconds), without the one that a step is asked for.
    pub fn of<'a>(payments: impl IntoIterator<Item = &'a Record>, now: u64) -> Self {
        let mut sums = Self::default();
        for record in payments {
            sums.add(&Share::of(record));
            if let (
                Settlement::Settled { block: Some(block), .. } | Settlement::Final { block: Some(block), .. },
                Some(at),
            ) = (record.settlement, record.settled_at)
            {
                sums.moved(record.amount(), block, at);
            }
        }
        sums.moved.retain(|moved| moved.at.saturating_add(RECENT) >= now);
        sums.age(now);
        sums
    }

    /// Says whether the payer's balance and credit permit a step of a payment, which is not in these sums. `record` is the payment before
    /// it. Most steps need neither.
    ///
    /// # Errors
    /// - `Admit`: [`LedgerError::InsufficientFunds`], [`LedgerError::Stale`] or [`LedgerError::BalancePending`].
    /// - `Defer`: [`LedgerError::NoCredit`].
    pub fn allow(&self, record: &Record, step: &PaymentStep) -> Result<(), LedgerError> {
        match step {
            PaymentStep::Fulfil { step: FulfilmentStep::Admit { funds: Some(funds), .. }, .. } if !record.admitted => {
                self.covers(record.amount(), funds)
            }
            PaymentStep::Fulfil { step: FulfilmentStep::Defer { limit }, .. } => self.may_owe(record, *limit),
            _ => Ok(()),
        }
    }

    /// Returns sums in flight that a database computed, for [`FulfilmentStep::Admit`]: of the payer's other payments, what is
    /// admitted and not submitted (`held`), what is submitted and not settled (`submitted`), and what was settled after the block at which
    /// the balance was read (`moved`), in units of the token. `now` is in Unix seconds.
    pub fn in_flight(held: U256, submitted: U256, moved: U256, now: u64) -> Self {
        let moved = VecDeque::from([Moved { at: now, block: u64::MAX, amount: moved }]);
        Self { held, submitted, moved, ..Self::default() }
    }

    /// Returns sums of credit that a database computed, for [`FulfilmentStep::Defer`]: what the payer settled to `payee` in the last ten minutes
    /// (`settled`), what it owes for other deferred payments (`owed`), in units of the token, and how many of those are dead or failed
    /// (`overdue`).
    pub fn credit(payee: Address, settled: U256, owed: U256, overdue: u32) -> Self {
        Self { settled: BTreeMap::from([((u64::MAX, payee), settled)]), owed, overdue, ..Self::default() }
    }

    /// Checks that the balance covers `amount` and everything in flight.
    fn covers(&self, amount: U256, funds: &Funds) -> Result<(), LedgerError> {
        let held = self.held.saturating_add(amount);
        let unseen = self.moved.partition_point(|moved| moved.block <= funds.block);
        let with_moved = self.moved.range(unseen..).fold(held, |sum, moved| sum.saturating_add(moved.amount));
        if held > funds.balance {
            Err(LedgerError::InsufficientFunds)
        } else if with_moved > funds.balance {
            Err(LedgerError::Stale)
        } else if with_moved.saturating_add(self.submitted) > funds.balance {
            Err(LedgerError::BalancePending)
        } else {
            Ok(())
        }
    }

    /// Checks that the payer may owe this payment in addition: to nobody who was not paid as much before.
    fn may_owe(&self, record: &Record, limit: U256) -> Result<(), LedgerError> {
        let payee = record.terms.offer().pay_to;
        let to_payee = self.settled.iter().filter(|((_, paid), _)| *paid == payee);
        let settled = to_payee.fold(U256::ZERO, |sum, (_, amount)| sum.saturating_add(*amount));
        let fits = self.owed.checked_add(record.amount()).is_some_and(|owed| owed <= limit.min(settled));
        if fits && self.overdue == 0 { Ok(()) } else { Err(LedgerError::NoCredit) }
    }

    /// Notes at `now` that a payment was settled in a block.
    pub(super) fn moved(&mut self, amount: U256, block: u64, now: u64) {
        let place = self.moved.partition_point(|moved| moved.block <= block);
        self.moved.insert(place, Moved { at: now, block, amount });
    }

    pub(super) fn add(&mut self, share: &Share) {
        let sum = self.in_flight_sum(share);
        *sum = sum.saturating_add(share.in_flight);
        if let Some((when, amount)) = share.settled {
            let sum = self.settled.entry(when).or_default();
            *sum = sum.saturating_add(amount);
        }
        self.owed = self.owed.saturating_add(share.owed);
        self.overdue = self.overdue.saturating_add(share.is_overdue.into());
    }

    pub(super) fn subtract(&mut self, share: &Share) {
        let sum = self.in_flight_sum(share);
        *sum = sum.saturating_sub(share.in_flight);
        if let Some((when, amount)) = share.settled
            && let Some(sum) = self.settled.get_mut(&when)
        {
            *sum = sum.saturating_sub(amount);
            if sum.is_zero() {
                self.settled.remove(&when);
            }
        }
        self.owed = self.owed.saturating_sub(share.owed);
        self.overdue = self.overdue.saturating_sub(share.is_overdue.into());
    }

    fn in_flight_sum(&mut self, share: &Share) -> &mut U256 {
        if share.is_resolved { &mut self.held } else { &mut self.submitted }
    }

    /// Forgets amounts that moved so long ago that every balance shows it, and what was settled too long ago to be counted.
    pub(super) fn age(&mut self, now: u64) {
        while self.moved.front().is_some_and(|moved| moved.at.saturating_add(RECENT) < now) {
            self.moved.pop_front();
        }
        while let Some(oldest) =
            self.settled.first_entry().filter(|oldest| oldest.key().0.saturating_add(COUNTED) < now)
        {
            oldest.remove();
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.held.is_zero()
            && self.submitted.is_zero()
            && self.moved.is_empty()
            && self.settled.is_empty()
            && self.owed.is_zero()
            && self.overdue == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn amounts_that_moved_long_ago_are_forgotten() {
        let mut sums = PayerSums::default();
        sums.moved(U256::ONE, 1, 100);
        sums.age(100 + RECENT);
        assert!(!sums.is_empty());
        sums.age(100 + RECENT + 1);
        assert!(sums.is_empty());
    }
}
