//! One verdict of several: scores standardized within the group, and averaged by weight.

use super::{AggregateVerdict, OutputFeedback, PanelVerdict};
use crate::{Confidence, Reward, Score, Verdict};

/// Spreads of scores below this count as none.
const MIN_SPREAD: f64 = 1e-9;

/// The verdicts of one panel member, one for each output of the submission as far as there are any.
pub(super) struct Member {
    /// The expected worth; `None` if the selector has no estimate.
    pub(super) worth: Option<f64>,
    pub(super) verdicts: Vec<Option<PanelVerdict>>,
}

impl Member {
    /// Returns how much its verdicts weigh: the square of its expected worth, nothing if that is not above 0. Without estimates all members
    /// weigh the same.
    fn weight(&self) -> f64 {
        self.worth.map_or(1.0, |worth| worth.max(0.0).powi(2))
    }

    fn verdict(&self, output: usize) -> Option<&Verdict> {
        self.verdicts.get(output)?.as_ref().map(|member| &member.verdict)
    }

    /// Returns its scores, standardized within the group. A single output has the score, stretched to a range from -1 to 1.
    fn rewards(&self, outputs: usize) -> Vec<Option<f64>> {
        let scores: Vec<_> = (0..outputs).map(|output| Some(self.verdict(output)?.score.get())).collect();
        if outputs == 1 {
            return scores.into_iter().map(|score| Some(score? * 2.0 - 1.0)).collect();
        }
        let known: Vec<f64> = scores.iter().copied().flatten().collect();
        let mean = known.iter().sum::<f64>() / known.len().max(1) as f64;
        let variance = known.iter().map(|score| (score - mean).powi(2)).sum::<f64>() / known.len().max(1) as f64;
        let spread = variance.sqrt();
        let standardized = |score: f64| if spread < MIN_SPREAD { 0.0 } else { (score - mean) / spread };
        scores.into_iter().map(|score| score.map(standardized)).collect()
    }
}

/// Aggregates the verdicts of a panel.
pub(super) fn aggregate(outputs: usize, members: Vec<Member>) -> Vec<OutputFeedback> {
    let rewards: Vec<_> = members.iter().map(|member| member.rewards(outputs)).collect();
    let combine = |output: usize| {
        let judges = || {
            members.iter().zip(&rewards).filter_map(|(member, rewards)| {
                Some((member.weight(), member.verdict(output)?, (*rewards.get(output)?)?))
            })
        };
        let total: f64 = judges().map(|(weight, ..)| weight).sum();
        let mean = |of: &dyn Fn(&Verdict, f64) -> f64| {
            judges().map(|(weight, verdict, reward)| weight * of(verdict, reward)).sum::<f64>() / total
        };
        let verdict = (total > 0.0).then(|| AggregateVerdict {
            score: Score::clamped(mean(&|verdict, _| verdict.score.get())),
            reward: Reward::clamped(mean(&|_, reward| reward)),
            confidence: Confidence::clamped(mean(&|verdict, _| verdict.confidence.get())),
        });
        let share = |member: &Member| if total > 0.0 { member.weight() / total } else { 0.0 };
        let of =
            |member: &Member| Some(PanelVerdict { weight: share(member), ..member.verdicts.get(output)?.clone()? });
        let mut verdicts: Vec<_> = members.iter().filter_map(of).collect();
        verdicts.sort_by(|a, b| b.weight.total_cmp(&a.weight));
        OutputFeedback { verdict, members: verdicts }
    };
    (0..outputs).map(combine).collect()
}

#[cfg(test)]
mod tests {
    use alloy_primitives::Address;

    use super::*;
    use crate::EvaluatorId;

    fn member(worth: Option<f64>, scores: &[f64]) -> Member {
        let verdict = |score: &f64| PanelVerdict {
            evaluator: Address::ZERO,
            evaluator_id: EvaluatorId::new("judge", "1").unwrap(),
            weight: 0.0,
            verdict: Verdict::new(Score::new(*score).unwrap(), Confidence::new(0.9).unwrap(), ""),
        };
        let verdicts = scores.iter().map(|score| (!score.is_nan()).then(|| verdict(score))).collect();
        Member { worth, verdicts }
    }

    fn rewards(outputs: usize, members: Vec<Member>) -> Vec<Option<f64>> {
        aggregate(outputs, members).iter().map(|output| output.verdict.map(|verdict| verdict.reward.get())).collect()
    }

    fn near(found: &[Option<f64>], expected: &[f64]) {
        assert_eq!(found.len(), expected.len());
        for (found, expected) in found.iter().zip(expected) {
            assert!((found.unwrap() - expected).abs() < 1e-5, "{found:?} is not {expected}");
        }
    }

    #[test]
    fn harsh_and_lenient_judges_count_alike() {
        let harsh = || member(Some(0.5), &[0.1, 0.0, 0.1, 0.0]);
        let lenient = || member(Some(0.5), &[0.9, 0.9, 0.7, 0.7]);
        near(&rewards(4, vec![harsh()]), &[1.0, -1.0, 1.0, -1.0]);
        near(&rewards(4, vec![harsh(), lenient()]), &[1.0, 0.0, 0.0, -1.0]);
    }

    #[test]
    fn weight_is_the_square_of_worth_and_nothing_below_a_coin() {
        let [right, wrong] = [[0.9, 0.1], [0.1, 0.9]];
        near(&rewards(2, vec![member(Some(0.8), &right), member(Some(0.4), &wrong)]), &[0.6, -0.6]);
        near(&rewards(2, vec![member(Some(0.8), &right), member(Some(-0.9), &wrong)]), &[1.0, -1.0]);
        assert_eq!(rewards(2, vec![member(Some(0.0), &right)]), [None, None]);
        near(&rewards(2, vec![member(None, &right), member(None, &wrong)]), &[0.0, 0.0]);
        let output = &aggregate(2, vec![member(Some(0.4), &wrong), member(Some(0.8), &right)])[0];
        let weights: Vec<_> = output.members.iter().map(|member| member.weight).collect();
        assert!((weights[0] - 0.8).abs() < 1e-9 && (weights[1] - 0.2).abs() < 1e-9, "{weights:?}");
        assert!((output.verdict.unwrap().score.get() - 0.74).abs() < 1e-5);
    }

    #[test]
    fn missing_verdicts_and_equal_scores_add_nothing() {
        near(&rewards(3, vec![member(None, &[0.5, 0.5, 0.5])]), &[0.0; 3]);
        let found = rewards(3, vec![member(None, &[0.9, f64::NAN, 0.1])]);
        assert_eq!(found, [Some(1.0), None, Some(-1.0)]);
        near(&rewards(1, vec![member(None, &[0.9])]), &[0.8]);
    }
}
