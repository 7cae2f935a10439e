//! A log-linear policy, trained with REINFORCE.

use serde::{Deserialize, Serialize};

use super::{KINDS, Kind, Rng, STRATEGIES, STYLES, Strategy, Style, actions};

/// The number of actions.
pub(crate) const ACTIONS: usize = STRATEGIES.len() * STYLES.len();
/// The number of weights: for each strategy, style and pair of them, for all kinds; and for each strategy and style of each kind.
const WEIGHTS: usize = STRATEGIES.len() + STYLES.len() + ACTIONS + KINDS.len() * (STRATEGIES.len() + STYLES.len());

/// An action: a strategy and a style.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Action {
    pub(crate) strategy: Strategy,
    pub(crate) style: Style,
}

/// A policy in which an action's probability is the softmax of the sum of its features' weights.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Policy {
    weights: Vec<f64>,
    /// The learning rate.
    pub(crate) learning_rate: f64,
    /// The entropy bonus, which keeps the policy from settling too early.
    pub(crate) entropy_bonus: f64,
}

impl Policy {
    /// Creates a uniform policy.
    pub(crate) fn new() -> Self {
        Self { weights: vec![0.0; WEIGHTS], learning_rate: 0.15, entropy_bonus: 0.005 }
    }

    /// Returns `true` if a policy that was read from a file has the expected form.
    pub(crate) fn is_sound(&self) -> bool {
        let numbers = self.weights.iter().chain([&self.learning_rate, &self.entropy_bonus]);
        self.weights.len() == WEIGHTS && numbers.into_iter().all(|number| number.is_finite())
    }

    /// Returns the probability of each action, in the order of [`actions`].
    pub(crate) fn probabilities(&self, kind: Kind) -> [f64; ACTIONS] {
        let mut values = [0.0; ACTIONS];
        for (value, action) in values.iter_mut().zip(actions()) {
            *value = features(kind, action).iter().map(|feature| self.weights[*feature]).sum();
        }
        let most = values.iter().copied().fold(f64::MIN, f64::max);
        values.iter_mut().for_each(|value| *value = (*value - most).exp());
        let sum: f64 = values.iter().sum();
        values.map(|value| value / sum)
    }

    /// Draws an action.
    pub(crate) fn sample(&self, kind: Kind, rng: &mut Rng) -> Action {
        let mut rest = rng.unit();
        let mut last = Action { strategy: STRATEGIES[0], style: STYLES[0] };
        for (action, probability) in actions().zip(self.probabilities(kind)) {
            last = action;
            rest -= probability;
            if rest < 0.0 {
                break;
            }
        }
        last
    }

    /// Returns the logarithm of an action's probability.
    pub(crate) fn log_probability(&self, kind: Kind, action: Action) -> f64 {
        let found = actions().zip(self.probabilities(kind)).find(|(other, _)| *other == action);
        found.map_or(f64::NEG_INFINITY, |(_, probability)| probability.ln())
    }

    /// Returns the gradient of [`log_probability`](Self::log_probability).
    fn gradient(&self, kind: Kind, action: Action) -> Vec<f64> {
        let mut slope = vec![0.0; WEIGHTS];
        for feature in features(kind, action) {
            slope[feature] += 1.0;
        }
        for (other, probability) in actions().zip(self.probabilities(kind)) {
            for feature in features(kind, other) {
                slope[feature] -= probability;
            }
        }
        slope
    }

    /// Returns the gradient of [`entropy_of`](Self::entropy_of).
    fn entropy_gradient(&self, kind: Kind) -> Vec<f64> {
        let probabilities = self.probabilities(kind);
        let entropy = entropy(&probabilities);
        let mut slope = vec![0.0; WEIGHTS];
        for (action, probability) in actions().zip(probabilities) {
            for feature in features(kind, action) {
                slope[feature] -= probability * (probability.max(f64::MIN_POSITIVE).ln() + entropy);
            }
        }
        slope
    }

    /// Takes one step of REINFORCE: actions that were better than expected become more likely.
    pub(crate) fn learn(&mut self, kind: Kind, group: &[(Action, f64)]) {
        if group.is_empty() {
            return;
        }
        let mut step: Vec<f64> =
            self.entropy_gradient(kind).into_iter().map(|slope| self.entropy_bonus * slope).collect();
        for (action, advantage) in group {
            for (step, slope) in step.iter_mut().zip(self.gradient(kind, *action)) {
                *step += advantage * slope / group.len() as f64;
            }
        }
        for (weight, step) in self.weights.iter_mut().zip(step) {
            *weight += self.learning_rate * step;
        }
    }

    /// Returns the entropy for problems of this kind, in nats: from 0 to the logarithm of the number of actions.
    pub(crate) fn entropy_of(&self, kind: Kind) -> f64 {
        entropy(&self.probabilities(kind))
    }

    /// Returns the mean entropy over all kinds.
    pub(crate) fn entropy(&self) -> f64 {
        KINDS.iter().map(|kind| self.entropy_of(*kind)).sum::<f64>() / KINDS.len() as f64
    }

    /// Returns the expectation of a property of its actions, over all kinds.
    pub(crate) fn expectation(&self, of: impl Fn(Action) -> f64) -> f64 {
        let expected = |kind: &Kind| {
            actions().zip(self.probabilities(*kind)).map(|(action, probability)| probability * of(action)).sum::<f64>()
        };
        KINDS.iter().map(expected).sum::<f64>() / KINDS.len() as f64
    }

    /// Returns the probability that an answer is right.
    pub(crate) fn rightness(&self) -> f64 {
        self.expectation(|action| f64::from(action.strategy == Strategy::Sound))
    }

    /// Returns the probability that an answer is easy to read.
    pub(crate) fn clarity(&self) -> f64 {
        self.expectation(|action| f64::from(action.style.is_plain()))
    }
}

/// Returns how much better than the group's mean each reward is, in standard deviations; zeros if all are equal.
pub(crate) fn advantages(rewards: &[f64]) -> Vec<f64> {
    let count = rewards.len().max(1) as f64;
    let mean = rewards.iter().sum::<f64>() / count;
    let deviation = (rewards.iter().map(|reward| (reward - mean).powi(2)).sum::<f64>() / count).sqrt();
    if deviation < 1e-9 {
        return vec![0.0; rewards.len()];
    }
    rewards.iter().map(|reward| (reward - mean) / deviation).collect()
}

fn entropy(probabilities: &[f64]) -> f64 {
    -probabilities.iter().map(|p| p * p.max(f64::MIN_POSITIVE).ln()).sum::<f64>()
}

/// Returns the indices of an action's weights.
fn features(kind: Kind, action: Action) -> [usize; 5] {
    let (kind, strategy, style) = (kind as usize, action.strategy as usize, action.style as usize);
    let styles = STRATEGIES.len();
    let pairs = styles + STYLES.len();
    let by_kind = pairs + ACTIONS + kind * (STRATEGIES.len() + STYLES.len());
    [
        strategy,
        styles + style,
        pairs + strategy * STYLES.len() + style,
        by_kind + strategy,
        by_kind + STRATEGIES.len() + style,
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn somewhere(rng: &mut Rng) -> Policy {
        let mut policy = Policy::new();
        policy.weights.iter_mut().for_each(|weight| *weight = rng.unit() * 2.0 - 1.0);
        policy
    }

    /// Returns the gradient of `of`, by finite differences.
    fn tried(policy: &Policy, of: impl Fn(&Policy) -> f64) -> Vec<f64> {
        const STEP: f64 = 1e-5;
        let slope = |weight: usize| {
            let moved = |by: f64| {
                let mut moved = policy.clone();
                moved.weights[weight] += by;
                of(&moved)
            };
            (moved(STEP) - moved(-STEP)) / (2.0 * STEP)
        };
        (0..WEIGHTS).map(slope).collect()
    }

    fn assert_close(one: &[f64], other: &[f64]) {
        assert_eq!(one.len(), other.len());
        for (at, (one, other)) in one.iter().zip(other).enumerate() {
            assert!((one - other).abs() < 1e-7, "{at}: {one} {other}");
        }
    }

    #[test]
    fn gradients_are_those_that_trying_finds() {
        let mut rng = Rng::seeded(5);
        for kind in KINDS {
            let policy = somewhere(&mut rng);
            let action = policy.sample(kind, &mut rng);
            let gradient = policy.gradient(kind, action);
            assert!(gradient.iter().any(|slope| slope.abs() > 0.1));
            assert_close(&gradient, &tried(&policy, |policy| policy.log_probability(kind, action)));
            assert_close(&policy.entropy_gradient(kind), &tried(&policy, |policy| policy.entropy_of(kind)));
        }
    }

    #[test]
    fn probabilities_are_some_and_samples_follow_them() {
        let mut rng = Rng::seeded(6);
        let policy = somewhere(&mut rng);
        let probabilities = policy.probabilities(Kind::Tank);
        assert!((probabilities.iter().sum::<f64>() - 1.0).abs() < 1e-12);
        let mut counts = [0.0; ACTIONS];
        for _ in 0..20_000 {
            let action = policy.sample(Kind::Tank, &mut rng);
            counts[actions().position(|other| other == action).unwrap()] += 1.0 / 20_000.0;
        }
        for (count, probability) in counts.iter().zip(probabilities) {
            assert!((count - probability).abs() < 0.02, "{count} {probability}");
        }
    }

    #[test]
    fn advantages_have_mean_zero_and_say_nothing_where_all_is_the_same() {
        let some = advantages(&[1.0, 0.0, 0.0, 0.0]);
        assert!(some.iter().sum::<f64>().abs() < 1e-12 && some[0] > 1.7);
        assert_eq!(advantages(&[0.3; 4]), [0.0; 4]);
        assert!(advantages(&[]).is_empty());
    }

    #[test]
    fn it_learns_what_is_rewarded_and_knows_less_doubt_then() {
        for seed in 0..5 {
            let (mut rng, mut policy) = (Rng::seeded(seed), Policy::new());
            let (right, undecided) = (policy.rightness(), policy.entropy());
            assert!((right - 1.0 / 6.0).abs() < 1e-12 && (undecided - (ACTIONS as f64).ln()).abs() < 1e-12);
            for _ in 0..400 {
                let kind = rng.pick(&KINDS);
                let group: Vec<_> = (0..8).map(|_| policy.sample(kind, &mut rng)).collect();
                let reward = |action: &Action| {
                    let (right, clear) = (action.strategy == Strategy::Sound, action.style.is_plain());
                    0.7 * f64::from(right) + 0.3 * f64::from(clear)
                };
                let rewards: Vec<f64> = group.iter().map(reward).collect();
                let group: Vec<_> = group.into_iter().zip(advantages(&rewards)).collect();
                policy.learn(kind, &group);
            }
            assert!(policy.rightness() > 0.9, "{seed}: {}", policy.rightness());
            assert!(policy.clarity() > 0.8, "{seed}: {}", policy.clarity());
            assert!(policy.entropy() < undecided / 2.0, "{seed}: {}", policy.entropy());
        }
    }

    #[test]
    fn rewards_that_are_all_the_same_teach_nothing() {
        let mut rng = Rng::seeded(9);
        let mut policy = somewhere(&mut rng);
        policy.entropy_bonus = 0.0;
        let before = policy.clone();
        let group: Vec<_> = (0..8).map(|_| policy.sample(Kind::Sale, &mut rng)).zip(advantages(&[0.5; 8])).collect();
        policy.learn(Kind::Sale, &group);
        policy.learn(Kind::Sale, &[]);
        assert_eq!(policy, before);
    }

    #[test]
    fn it_is_the_same_after_it_was_saved() {
        let policy = somewhere(&mut Rng::seeded(10));
        let json = serde_json::to_string(&policy).unwrap();
        let read: Policy = serde_json::from_str(&json).unwrap();
        assert!(read == policy && read.is_sound());
        assert!(!Policy { weights: vec![0.0; 3], ..policy }.is_sound());
    }
}
