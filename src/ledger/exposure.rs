//! What a payer has in flight, against what it was seen to own.

use std::collections::VecDeque;

use alloy_primitives::U256;

use super::{
    LedgerError, Record,
    credit::{CreditBook, CreditShare},
};
use crate::payment::Funds;

/// How long a settled amount is remembered for balances that were read before it moved, in seconds.
pub(super) const RECENT: u64 = 120;

/// What one payer has in flight, and how it pays.
#[derive(Debug, Default)]
pub(super) struct PayerBook {
    pub(super) credit: CreditBook,
    /// Not submitted: every balance still shows it.
    held: U256,
    /// Submitted, and not known to be settled: a balance may show it or not.
    submitted: U256,
    /// By block.
    moved: VecDeque<Moved>,
}

/// What one payment counts for in its payer's book.
#[derive(Debug, PartialEq)]
pub(super) struct Share {
    in_flight: U256,
    is_resolved: bool,
    credit: CreditShare,
}

impl Share {
    pub(super) fn of(record: &Record) -> Self {
        Self { in_flight: record.in_flight(), is_resolved: record.is_resolved(), credit: CreditShare::of(record) }
    }
}

/// An amount that left the balance in a block; a balance read before that block still shows it.
#[derive(Debug)]
struct Moved {
    at: u64,
    block: u64,
    amount: U256,
}

impl PayerBook {
    /// A book whose sums a database has made; `moved` is what left the balance since the block it was read at.
    #[cfg(feature = "postgres")]
    pub(super) fn of_sums(held: U256, submitted: U256, moved: U256, now: u64) -> Self {
        let moved = VecDeque::from([Moved { at: now, block: u64::MAX, amount: moved }]);
        Self { credit: CreditBook::default(), held, submitted, moved }
    }

    /// Whether the balance covers `amount` and all that is in flight.
    pub(super) fn covers(&self, amount: U256, funds: &Funds) -> Result<(), LedgerError> {
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

    /// Notes that a payment was settled in a block, at `now`.
    pub(super) fn moved(&mut self, amount: U256, block: u64, now: u64) {
        let place = self.moved.partition_point(|moved| moved.block <= block);
        self.moved.insert(place, Moved { at: now, block, amount });
    }

    pub(super) fn add(&mut self, share: &Share) {
        let part = self.part_of(share);
        *part = part.saturating_add(share.in_flight);
        self.credit.add(&share.credit);
    }

    pub(super) fn subtract(&mut self, share: &Share) {
        let part = self.part_of(share);
        *part = part.saturating_sub(share.in_flight);
        self.credit.subtract(&share.credit);
    }

    fn part_of(&mut self, share: &Share) -> &mut U256 {
        if share.is_resolved { &mut self.held } else { &mut self.submitted }
    }

    pub(super) fn age(&mut self, now: u64) {
        while self.moved.front().is_some_and(|moved| moved.at.saturating_add(RECENT) < now) {
            self.moved.pop_front();
        }
    }

    pub(super) fn is_idle(&self) -> bool {
        self.held.is_zero() && self.submitted.is_zero() && self.moved.is_empty() && self.credit.is_empty()
    }
}
