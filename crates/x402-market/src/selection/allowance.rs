//! A purpose that may take a share of the budget and no more.

/// Spending on one purpose.
#[derive(Clone, Copy, Debug)]
pub(super) struct Allowance {
    share: f64,
    /// The part of the money not spent yet that the share is granted of in advance, between 0 and 1.
    front: f64,
    /// Atomic units, promised ones included.
    taken: u64,
}

impl Allowance {
    pub(super) const fn new(share: f64, front: f64) -> Self {
        Self { share, front, taken: 0 }
    }

    /// Whether `cost` may be taken, when `spent` was spent on everything and `left` is left.
    ///
    /// What is granted never exceeds the share of `spent` + `left`, which is the budget.
    pub(super) fn grants(&self, cost: u64, spent: u64, left: u64) -> bool {
        let limit = (self.share * (spent as f64 + self.front * left as f64)).floor();
        self.taken.saturating_add(cost) as f64 <= limit
    }

    pub(super) const fn take(&mut self, cost: u64) {
        self.taken = self.taken.saturating_add(cost);
    }

    /// Gives back what was not spent after all.
    pub(super) const fn give_back(&mut self, amount: u64) {
        self.taken = self.taken.saturating_sub(amount);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_more_than_the_share_of_the_budget_is_ever_granted() {
        for front in [0.0, 0.05, 0.5, 1.0] {
            let mut allowance = Allowance::new(0.1, front);
            let (mut spent, mut left, mut taken) = (0, 1_000_000_u64, 0);
            while left >= 777 {
                if allowance.grants(777, spent, left) {
                    allowance.take(777);
                    taken += 777;
                }
                (spent, left) = (spent + 777, left - 777);
            }
            assert!((90_000..=100_000).contains(&taken), "{taken}");
        }
    }

    #[test]
    fn what_comes_back_may_be_taken_again() {
        let mut allowance = Allowance::new(0.5, 1.0);
        allowance.take(50);
        assert!(!allowance.grants(1, 0, 100));
        allowance.give_back(1);
        assert!(allowance.grants(1, 0, 100) && !allowance.grants(2, 0, 100));
    }
}
