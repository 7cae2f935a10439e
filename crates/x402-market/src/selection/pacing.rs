//! What money is worth.

/// The price of money λ, in value per atomic unit.
///
/// Online mirror descent on the dual of "most value within the budget": after every task λ is multiplied by
/// exp(pace · (spent / allowance − 1)), so that it rises while more is spent than what is left allows per task, and falls while
/// less is. It needs no scale for values or prices and follows a budget or a horizon that changes. Where the best for the
/// money is a mixture of a dear and a cheap evaluator it settles where both score alike, and alternates.
#[derive(Clone, Debug)]
pub(super) struct Pacer {
    pace: f64,
    lambda: Option<f64>,
}

/// What a task's allowance must buy at first.
const FIRST: f64 = 0.5;

impl Pacer {
    pub(super) const fn new(pace: f64) -> Self {
        Self { pace, lambda: None }
    }

    /// λ for a task with this allowance: what is left, divided by the tasks left, in atomic units.
    pub(super) fn lambda(&mut self, allowance: f64) -> f64 {
        *self.lambda.get_or_insert(FIRST / allowance.max(1e-6))
    }

    /// Takes note of what a task costs.
    pub(super) fn spent(&mut self, cost: u64, allowance: f64) {
        let allowance = allowance.max(1e-6);
        let step = (self.pace * (cost as f64 / allowance - 1.0)).clamp(-0.5, 0.5);
        // Beyond these bounds nobody or everybody is hired, and the way back would be long.
        self.lambda = Some((self.lambda(allowance) * step.exp()).clamp(1e-3 / allowance, 1e2 / allowance));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A dear evaluator worth 0.84 for 1,000 and a cheap one worth 0.4 for 400, with 900 to spend a task.
    #[test]
    fn the_price_of_money_settles_where_the_linear_program_mixes() {
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
    fn nothing_left_and_nothing_spent_keep_it_finite() {
        let mut pacer = Pacer::new(1.0);
        for _ in 0..1_000 {
            pacer.spent(0, 0.0);
            pacer.spent(u64::MAX, 0.0);
            assert!(pacer.lambda(0.0).is_finite() && pacer.lambda(0.0) > 0.0);
        }
    }
}
