//! What the student knows of its outputs, and whether a verdict agrees.

use rand::RngExt;
use serde::{Deserialize, Serialize};

use crate::{Evaluation, Outputs, Preference, Submission, Verdict, evidence::CallOutcome};

/// The truth about the outputs of a submission.
///
/// A verdict on one output is *right* if its score is on the right side of one half: above for a good output, below for a bad one; a
/// score of exactly one half says nothing and is not right. A comparison is right if it prefers the better output.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Truth {
    /// Of each output, in order, whether it is good.
    Good(Vec<bool>),
    /// Of a pair, which is better.
    Better(Preference),
}

impl Truth {
    /// Of each output, in order, whether it is good.
    pub fn good(outputs: impl IntoIterator<Item = bool>) -> Self {
        Self::Good(outputs.into_iter().collect())
    }

    /// Whether it is about such a submission.
    pub(super) fn fits(&self, submission: &Submission) -> bool {
        match self {
            Self::Good(good) => good.len() == submission.outputs().len(),
            Self::Better(_) => matches!(submission.outputs, Outputs::Pair(_)),
        }
    }

    /// Whether a verdict on the output at this position is right.
    fn agrees(&self, verdicts: &[Verdict], at: usize) -> bool {
        match self {
            Self::Good(good) => {
                let score = verdicts[at].score.get();
                good.get(at).is_some_and(|good| if *good { score > 0.5 } else { score < 0.5 })
            }
            Self::Better(better) => Evaluation::preferred(verdicts) == Some(*better),
        }
    }
}

/// What is noted of an evaluation of one or more outputs.
///
/// One payment is one voice, so of a group one verdict is noted, drawn at random: its score, its confidence, and whether it is right.
/// How often what is noted is right is then how often verdicts are.
pub(super) fn note(verdicts: &[Verdict], truth: Option<&Truth>, rng: &mut impl rand::Rng) -> CallOutcome {
    if verdicts.is_empty() {
        return CallOutcome::InvalidAnswer;
    }
    let at = rng.random_range(0..verdicts.len());
    let verdict = &verdicts[at];
    let right = truth.map(|truth| truth.agrees(verdicts, at));
    CallOutcome::answered(verdict.score.get(), Some(verdict.confidence.get()), right)
}

impl Truth {
    /// The part of it that is about some of the outputs.
    pub(super) fn part(&self, range: &std::ops::Range<usize>) -> Self {
        match self {
            Self::Good(good) => Self::Good(good.get(range.clone()).unwrap_or_default().to_vec()),
            Self::Better(better) => Self::Better(*better),
        }
    }
}

#[cfg(test)]
mod tests {
    use rand::{SeedableRng, rngs::Xoshiro256PlusPlus};

    use super::*;
    use crate::{Confidence, Score};

    fn verdicts(scores: &[f64]) -> Vec<Verdict> {
        let confidence = Confidence::new(0.8).unwrap();
        scores.iter().map(|score| Verdict::new(Score::new(*score).unwrap(), confidence, "")).collect()
    }

    fn right(scores: &[f64], truth: &Truth, seed: u64) -> Option<bool> {
        let mut rng = Xoshiro256PlusPlus::seed_from_u64(seed);
        match note(&verdicts(scores), Some(truth), &mut rng) {
            CallOutcome::Answered { right, .. } => right,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_score_is_right_on_the_right_side_of_one_half_and_on_none_it_is_not() {
        for (score, good, expected) in
            [(0.51, true, true), (0.5, true, false), (0.49, true, false), (0.49, false, true), (0.5, false, false)]
        {
            assert_eq!(right(&[score], &Truth::good([good]), 1), Some(expected), "{score} {good}");
        }
        let better = Truth::Better(Preference::First);
        assert_eq!(right(&[0.4, 0.3], &better, 1), Some(true));
        assert_eq!(right(&[0.3, 0.4], &better, 1), Some(false));
        assert_eq!(right(&[0.4, 0.4], &better, 1), Some(false));
    }

    #[test]
    fn of_a_group_any_verdict_may_be_noted_and_as_often_a_right_one_as_they_are_right() {
        let truth = Truth::good([true, true, true, false]);
        let scores = [0.9, 0.9, 0.1, 0.1];
        let rights = (0..1_000).filter(|seed| right(&scores, &truth, *seed) == Some(true)).count();
        assert!((700..800).contains(&rights), "three of four: {rights}");
    }
}
