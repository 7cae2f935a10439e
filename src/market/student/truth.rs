//! What the student knows of its outputs, and whether a verdict agrees.

use rand::RngExt;
use serde::{Deserialize, Serialize};

use crate::market::{Evaluation, Outputs, Preference, Submission, Verdict, evidence::Outcome};

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
pub(super) fn note(verdicts: &[Verdict], truth: Option<&Truth>, rng: &mut impl rand::Rng) -> Outcome {
    if verdicts.is_empty() {
        return Outcome::Garbage;
    }
    let at = rng.random_range(0..verdicts.len());
    let verdict = &verdicts[at];
    let right = truth.map(|truth| truth.agrees(verdicts, at));
    Outcome::answered(verdict.score.get(), Some(verdict.confidence.get()), right)
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
