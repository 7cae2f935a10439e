//! The policy as a language model over bytes.

use super::{Policy, Problem, actions, answer};

/// Returns the log-probability of every byte of `text`, and of its end, given the bytes before it; `None` if the policy cannot give this
/// answer. With every byte, fewer answers remain possible.
pub(crate) fn log_probabilities(policy: &Policy, problem: &Problem, text: &str) -> Option<Vec<f64>> {
    let answers = actions().zip(policy.probabilities(problem.kind)).map(|(action, p)| (answer(problem, action), p));
    let mut possible: Vec<(String, f64)> = answers.collect();
    let end = text.len();
    let mut logprobs = Vec::with_capacity(end + 1);
    let mut before: f64 = possible.iter().map(|(_, p)| p).sum();
    for at in 0..=end {
        let next = text.as_bytes().get(at);
        possible.retain(|(answer, _)| answer.as_bytes().get(at) == next);
        let after: f64 = possible.iter().map(|(_, p)| p).sum();
        if possible.is_empty() {
            return None;
        }
        logprobs.push(if after < before { (after / before).ln() } else { 0.0 });
        before = after;
    }
    Some(logprobs)
}

#[cfg(test)]
mod tests {
    use super::{
        super::{KINDS, Rng},
        *,
    };

    #[test]
    fn the_bytes_of_an_answer_are_together_as_likely_as_the_answer() {
        let mut rng = Rng::seeded(11);
        let policy = Policy::new();
        for kind in KINDS {
            let problem = Problem::of(kind, &mut rng);
            let mut sum = 0.0;
            for action in actions() {
                let text = answer(&problem, action);
                let logprobs = log_probabilities(&policy, &problem, &text).unwrap();
                assert_eq!(logprobs.len(), text.len() + 1);
                assert!(logprobs.iter().all(|logprob| *logprob <= 0.0));
                let all: f64 = logprobs.iter().sum();
                assert!((all - policy.log_probability(kind, action)).abs() < 1e-9);
                sum += all.exp();
            }
            assert!((sum - 1.0).abs() < 1e-9);
        }
        let problem = Problem::any(&mut rng);
        assert_eq!(log_probabilities(&policy, &problem, "something else"), None);
        assert_eq!(log_probabilities(&policy, &problem, ""), None);
    }
}
