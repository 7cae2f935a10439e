//! What payers owe for work that was handed over before it was paid for, against what they may owe.

use std::sync::{Mutex, PoisonError};

use alloy_primitives::U256;

use super::{LedgerError, Record, Settlement};

/// How much may be owed; [`FulfilmentStep::Defer`](super::FulfilmentStep::Defer).
///
/// Owed is the sum of the payments that were deferred and are not paid: those proven never to be paid count until their
/// records age out, so that what is lost takes from the same bound.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CreditLimit {
    /// Atomic units that all payers together may owe in this ledger, on all networks and in all tokens.
    pub total: U256,
    /// Atomic units that one payer may owe on one network in one token.
    pub per_payer: U256,
    /// How many payments of the payer, on that network and in that token, must be on record as paid.
    pub history: u32,
}

/// The sum of what is owed, for all shards of a ledger. Locked after the shards.
#[derive(Debug, Default)]
pub(super) struct Owed(Mutex<U256>);

impl Owed {
    /// The sum that a database has made.
    #[cfg(feature = "postgres")]
    pub(super) const fn of_sum(sum: U256) -> Self {
        Self(Mutex::new(sum))
    }

    /// Does `defer` if that keeps the sum within `limit`.
    pub(super) fn lend(
        &self,
        amount: U256,
        limit: U256,
        defer: impl FnOnce() -> Result<(), LedgerError>,
    ) -> Result<(), LedgerError> {
        let mut sum = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let with = sum.checked_add(amount).filter(|with| *with <= limit).ok_or(LedgerError::NoCredit)?;
        defer()?;
        *sum = with;
        Ok(())
    }

    /// Follows what became of a payment that was deferred before.
    pub(super) fn moved(&self, before: U256, after: U256) {
        if before != after {
            let mut sum = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            *sum = sum.saturating_sub(before).saturating_add(after);
        }
    }
}

/// How one payer pays.
#[derive(Debug, Default)]
pub(super) struct CreditBook {
    /// Records that are paid.
    paid: u32,
    /// The sum of the deferred ones that are not.
    owed: U256,
    /// How many of those could not be settled when that was tried.
    failed: u32,
}

impl CreditBook {
    /// A book whose sums a database has made.
    #[cfg(feature = "postgres")]
    pub(super) const fn of_sums(paid: u32, owed: U256, failed: u32) -> Self {
        Self { paid, owed, failed }
    }

    /// Whether the payer is trusted with `amount`.
    pub(super) fn trusts(&self, amount: U256, limit: &CreditLimit) -> Result<(), LedgerError> {
        let fits = self.owed.checked_add(amount).is_some_and(|owed| owed <= limit.per_payer);
        if self.paid >= limit.history && self.failed == 0 && fits { Ok(()) } else { Err(LedgerError::NoCredit) }
    }

    pub(super) fn add(&mut self, share: &CreditShare) {
        self.paid = self.paid.saturating_add(share.is_paid.into());
        self.owed = self.owed.saturating_add(share.owed);
        self.failed = self.failed.saturating_add(share.has_failed.into());
    }

    pub(super) fn subtract(&mut self, share: &CreditShare) {
        self.paid = self.paid.saturating_sub(share.is_paid.into());
        self.owed = self.owed.saturating_sub(share.owed);
        self.failed = self.failed.saturating_sub(share.has_failed.into());
    }

    pub(super) fn is_empty(&self) -> bool {
        self.paid == 0 && self.owed.is_zero() && self.failed == 0
    }
}

/// What one payment says of that.
#[derive(Debug, PartialEq)]
pub(super) struct CreditShare {
    is_paid: bool,
    owed: U256,
    has_failed: bool,
}

impl CreditShare {
    pub(super) fn of(record: &Record) -> Self {
        Self { is_paid: record.settlement.paid_by().is_some(), owed: record.owed(), has_failed: is_overdue(record) }
    }
}

/// Whether it was deferred, and could not be settled when that was tried.
pub(super) fn is_overdue(record: &Record) -> bool {
    record.deferred
        && record.settlement.paid_by().is_none()
        && (record.settlement == Settlement::Dead || record.last_failure.is_some())
}
