//! The student's policy: a softmax over a table of weights, trained with REINFORCE.

use super::rng::Rng;

const ENTROPY_BONUS: f64 = 0.005;

/// A log-linear policy.
#[derive(Clone, Debug)]
pub(crate) struct Table {
    /// By context and action.
    own: Vec<Vec<f64>>,
    /// By action, if contexts have weights in common.
    shared: Option<Vec<f64>>,
    rate: f64,
}

impl Table {
    /// Creates a uniform policy.
    pub(crate) fn new(contexts: usize, actions: usize, is_shared: bool, rate: f64) -> Self {
        Self { own: vec![vec![0.0; actions]; contexts], shared: is_shared.then(|| vec![0.0; actions]), rate }
    }

    /// Returns the probability of each action.
    pub(crate) fn probabilities(&self, context: usize) -> Vec<f64> {
        let common = |action| self.shared.as_ref().map_or(0.0, |weights| weights[action]);
        let logits: Vec<f64> = self.own[context].iter().enumerate().map(|(at, own)| own + common(at)).collect();
        let most = logits.iter().copied().fold(f64::MIN, f64::max);
        let odds: Vec<f64> = logits.iter().map(|logit| (logit - most).exp()).collect();
        let sum: f64 = odds.iter().sum();
        odds.iter().map(|odds| odds / sum).collect()
    }

    /// Draws actions.
    pub(crate) fn sample(&self, context: usize, count: usize, rng: &mut Rng) -> Vec<usize> {
        let probabilities = self.probabilities(context);
        let draw = |_| {
            let mut rest = rng.unit();
            let is_drawn = |probability: &f64| {
                rest -= probability;
                rest < 0.0
            };
            probabilities.iter().position(is_drawn).unwrap_or(probabilities.len() - 1)
        };
        (0..count).map(draw).collect()
    }

    /// Takes a step: actions with a better reward than the group's mean become more likely.
    pub(crate) fn learn(&mut self, context: usize, group: &[usize], rewards: &[f64]) {
        let probabilities = self.probabilities(context);
        let entropy = -probabilities.iter().map(|p| p * p.max(f64::MIN_POSITIVE).ln()).sum::<f64>();
        let bonus = |p: f64| -ENTROPY_BONUS * p * (p.max(f64::MIN_POSITIVE).ln() + entropy);
        // Advantages add up to zero, so the part of the gradient that all actions share does, too.
        let mut step: Vec<f64> = probabilities.into_iter().map(bonus).collect();
        for (action, advantage) in group.iter().zip(standardized(rewards)) {
            step[*action] += advantage / group.len() as f64;
        }
        for weights in [Some(&mut self.own[context]), self.shared.as_mut()].into_iter().flatten() {
            weights.iter_mut().zip(&step).for_each(|(weight, step)| *weight += self.rate * step);
        }
    }
}

/// Returns by how many standard deviations each value is above the mean; zeros if all are equal.
pub(crate) fn standardized(values: &[f64]) -> Vec<f64> {
    let count = values.len().max(1) as f64;
    let mean = values.iter().sum::<f64>() / count;
    let deviation = (values.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / count).sqrt();
    values.iter().map(|value| if deviation < 1e-9 { 0.0 } else { (value - mean) / deviation }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rewarded_action_becomes_likely_where_it_was_rewarded_and_elsewhere_if_weights_are_shared() {
        let learnt = |is_shared| {
            let (mut table, mut rng) = (Table::new(2, 6, is_shared, 0.2), Rng::seeded(1));
            for _ in 0..150 {
                let group = table.sample(0, 8, &mut rng);
                let rewards: Vec<_> = group.iter().map(|action| f64::from(u8::from(*action == 3))).collect();
                table.learn(0, &group, &rewards);
            }
            [0, 1].map(|context| table.probabilities(context)[3])
        };
        let (alone, shared) = (learnt(false), learnt(true));
        assert!(alone[0] > 0.8 && (alone[1] - 1.0 / 6.0).abs() < 1e-12, "{alone:?}");
        assert!(shared[0] > alone[0] && shared[1] > 0.7, "{shared:?}");
    }

    #[test]
    fn equal_rewards_teach_nothing() {
        let mut table = Table::new(1, 4, true, 0.2);
        table.learn(0, &[0, 0, 1, 2], &[0.7; 4]);
        assert!(table.probabilities(0).iter().all(|probability| (probability - 0.25).abs() < 1e-12));
    }
}
