//! How spending is paced: the price of money, and the shares of the budget that exploration and newcomers may take.

/// The price of money λ, in value per atomic unit.
///
/// Online mirror descent on the dual of "most value within the budget": after every task λ is multiplied by
/// exp(pace · (spent / allowance − 1)). It rises while more is spent than the allowance per task, and falls while less is. It needs no
/// scale for values or prices, and follows a budget or a number of tasks that changes. Where a mixture of an expensive and a cheap
/// evaluator is best, λ settles where both score alike.
#[derive(Clone, Debug)]
pub(super) struct Pacer {
    pace: f64,
    lambda: Option<f64>,
}

/// The value that a task's allowance must buy at first.
const INITIAL_VALUE: f64 = 0.5;

impl Pacer {
    pub(super) const fn new(pace: f64) -> Self {
        Self { pace, lambda: None }
    }

    /// Returns λ for a task with this allowance: what remains divided by the tasks left, in atomic units.
    pub(super) fn lambda(&mut self, allowance: f64) -> f64 {
        *self.lambda.get_or_insert(INITIAL_VALUE / allowance.max(1e-6))
    }

    /// Records what a task costs.
    pub(super) fn spent(&mut self, cost: u64, allowance: f64) {
        let allowance = allowance.max(1e-6);
        let step = (self.pace * (cost as f64 / allowance - 1.0)).clamp(-0.5, 0.5);
        // Beyond these bounds no or every evaluator is hired, and λ would take long to come back.
        self.lambda = Some((self.lambda(allowance) * step.exp()).clamp(1e-3 / allowance, 1e2 / allowance));
    }
}

/// A purpose that may take a share of the budget.
#[derive(Clone, Copy, Debug)]
pub(super) struct BudgetShare {
    share: f64,
    /// The part of the money not spent yet of which the share is granted in advance, from 0 to 1.
    in_advance: f64,
    /// Atomic units, including promised ones.
    taken: u64,
}

impl BudgetShare {
    pub(super) const fn new(share: f64, in_advance: f64) -> Self {
        Self { share, in_advance, taken: 0 }
    }

    /// Returns `true` if `cost` may be taken when `spent` was spent on everything and `left` is left.
    ///
    /// What is granted never exceeds the share of `spent + left`, which is the budget.
    pub(super) fn grants(&self, cost: u64, spent: u64, left: u64) -> bool {
        let limit = (self.share * (spent as f64 + self.in_advance * left as f64)).floor();
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

    /// An expensive evaluator worth 0.84 for 1,000 and a cheap one worth 0.4 for 400, with 900 to spend a task.
    #[test]
    fn lambda_settles_where_the_linear_program_mixes() {
        let (mut pacer, mut left, mut value) = (Pacer::new(0.03), 900_000_u64, 0.0);
        for task in 0..1_000 {
            let allowance = left as f64 / (1_000 - task) as f64;
            let lambda = pacer.lambda(allowance);
            let (worth, cost) = [(0.84, 1_000_u64), (0.4, 400), (0.0, 0)]
                .into_iter()
                .filter(|(_, cost)| *cost <= left)
                .max_by(|a, b| (a.0 - lambda * a.1 as f64).total_cmp(&(b.0 - lambda * b.1 as f64)))
                .unwrap();
            pacer.spent(cost, allowance);
            (left, value) = (left - cost, value + worth);
        }
        let optimum = 1_000.0 * (5.0 / 6.0 * 0.84 + 1.0 / 6.0 * 0.4);
        assert!(value > 0.99 * optimum && value <= optimum + 1e-6, "{value} of {optimum}");
        assert!(left < 9_000, "{left} is left");
        let lambda = pacer.lambda(900.0);
        assert!((lambda / (0.44 / 600.0) - 1.0).abs() < 0.2, "{lambda}");
    }

    #[test]
    fn lambda_stays_finite_without_budget_or_spending() {
        let mut pacer = Pacer::new(1.0);
        for _ in 0..1_000 {
            pacer.spent(0, 0.0);
            pacer.spent(u64::MAX, 0.0);
            assert!(pacer.lambda(0.0).is_finite() && pacer.lambda(0.0) > 0.0);
        }
    }

    #[test]
    fn grants_never_exceed_the_share() {
        for in_advance in [0.0, 0.05, 0.5, 1.0] {
            let mut share = BudgetShare::new(0.1, in_advance);
            let (mut spent, mut left, mut taken) = (0, 1_000_000_u64, 0);
            while left >= 777 {
                if share.grants(777, spent, left) {
                    share.take(777);
                    taken += 777;
                }
                (spent, left) = (spent + 777, left - 777);
            }
            assert!((90_000..=100_000).contains(&taken), "{taken}");
        }
    }

    #[test]
    fn returned_amount_can_be_taken_again() {
        let mut share = BudgetShare::new(0.5, 1.0);
        share.take(50);
        assert!(!share.grants(1, 0, 100));
        share.give_back(1);
        assert!(share.grants(1, 0, 100) && !share.grants(2, 0, 100));
    }
}
