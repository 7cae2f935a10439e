//! What may still be promised.

use tower_x402::{Usdc, client::Budget};

/// The budget's remainder without what is promised to calls that have not signed yet.
///
/// A call's money is promised when it is hired, reserved by the budget when it signs, and settled here when it ends. Between the last two it
/// would count twice, so the remainder is reckoned from a time at which nothing was under way.
#[derive(Debug)]
pub(super) struct Purse {
    budget: Budget,
    /// What remained when nothing was under way.
    anchor: Usdc,
    /// What calls since then have signed.
    signed: Usdc,
    promised: Usdc,
}

impl Purse {
    pub(super) fn new(budget: Budget) -> Self {
        Self { anchor: budget.remaining(), budget, signed: Usdc::ZERO, promised: Usdc::ZERO }
    }

    pub(super) const fn budget(&self) -> &Budget {
        &self.budget
    }

    pub(super) const fn promised(&self) -> Usdc {
        self.promised
    }

    pub(super) fn remaining(&mut self) -> Usdc {
        let actual = self.budget.remaining();
        if self.promised == Usdc::ZERO {
            (self.anchor, self.signed) = (actual, Usdc::ZERO);
        }
        let less = |sum: Usdc, part| sum.checked_sub(part).unwrap_or(Usdc::ZERO);
        less(less(self.anchor, self.signed), self.promised).min(actual)
    }

    pub(super) fn promise(&mut self, amount: Usdc) {
        self.promised = self.promised.checked_add(amount).unwrap_or(Usdc::MAX);
    }

    /// A call to which `promised` was promised has ended, with payments of `signed`.
    pub(super) fn settle(&mut self, promised: Usdc, signed: Usdc) {
        self.promised = self.promised.checked_sub(promised).unwrap_or(Usdc::ZERO);
        self.signed = self.signed.checked_add(signed).unwrap_or(Usdc::MAX);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_signed_counts_once_whatever_the_budget_knows_of_it_already() {
        let usdc = Usdc::from_atomic;
        let mut purse = Purse::new(Budget::builder().total(usdc(100)).build());
        purse.promise(usdc(30));
        purse.promise(usdc(20));
        assert_eq!(purse.remaining(), usdc(50));
        // One has signed all it was promised, the other has yet to.
        purse.settle(usdc(30), usdc(30));
        assert_eq!((purse.remaining(), purse.promised()), (usdc(50), usdc(20)));
        // It signed nothing; and from then on the budget alone knows.
        purse.settle(usdc(20), Usdc::ZERO);
        assert_eq!(purse.remaining(), usdc(100));
    }
}
