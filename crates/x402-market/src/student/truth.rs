//! The truth about outputs, and what it shows about those who judged them.

use std::ops::Range;

use alloy_primitives::Address;
use serde::{Deserialize, Serialize};

use crate::{Score, evidence::Pairs};

/// The truth about the outputs of a submission.
///
/// ```
/// use x402_market::Truth;
///
/// let group = Truth::good([true, false, true]);              // of three outputs, the second is bad
/// let partly = Truth::known([Some(true), None, Some(false)]); // of the second, nothing is known
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
#[must_use]
pub struct Truth {
    /// For each output, in order, whether it is good, as far as that is known.
    pub good: Vec<Option<bool>>,
}

impl Truth {
    /// Says of each output, in order, whether it is good.
    pub fn good(outputs: impl IntoIterator<Item = bool>) -> Self {
        Self::known(outputs.into_iter().map(Some))
    }

    /// Says of each output, in order, whether it is good, as far as that is known. Of outputs of which nothing is known, only anchors are
    /// compared.
    pub fn known(outputs: impl IntoIterator<Item = Option<bool>>) -> Self {
        Self { good: outputs.into_iter().collect() }
    }
}

/// The result of an [audit](super::Student::audit).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct AuditReport {
    /// The evaluations that the truth could be compared with. Empty if the truth says that all outputs are equally good and there were no
    /// anchors, if nobody judged them, or if they were audited before.
    pub evaluations: Vec<AuditedEvaluation>,
    /// The number of [lessons](super::StudentBuilder::teach) that evaluators took.
    pub lessons: usize,
}

/// An evaluation, compared with the truth.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct AuditedEvaluation {
    /// The address that is paid.
    pub evaluator: Address,
    /// How it ordered the outputs.
    pub pairs: Pairs,
    /// `true` if it was asked in this audit only to learn about it.
    pub is_exploration: bool,
}

/// Compares scores with what is known of these outputs.
pub(super) fn compare(scores: &[Score], good: &[Option<bool>], range: &Range<usize>) -> Option<Pairs> {
    let good = good.get(range.clone()).unwrap_or_default();
    let known = scores.iter().zip(good).filter_map(|(score, good)| Some((score.get(), (*good)?)));
    let (scores, good): (Vec<_>, Vec<_>) = known.unzip();
    Pairs::of(&scores, &good)
}
