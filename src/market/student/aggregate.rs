//! Makes one verdict of several.
//!
//! Every judge's score is put on a common scale first, and then weighed by how likely it is right. Nothing here has a memory: what
//! is known of the judges is given.

use super::feedback::Judged;
use crate::market::{Confidence, Score};

/// The accuracy of a judge of whom nobody has an opinion. Any value above one half would do: all weigh the same then.
pub(super) const UNKNOWN: f64 = 0.65;
/// How many scores must be known of a judge before half of its habits count.
const DOUBT: f64 = 20.0;
/// The least spread of scores that is told from none.
const LEAST_SPREAD: f64 = 0.05;
/// Nobody is believed more than that.
const SUREST: f64 = 0.99;

/// How a judge judges: mean and spread of what it said so far.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Habit {
    /// How many scores that is based on, faded.
    pub(super) count: f64,
    /// Their mean.
    pub(super) mean: f64,
    /// Their standard deviation.
    pub(super) spread: f64,
    /// The mean of the confidence it states.
    pub(super) confidence: f64,
}

impl Habit {
    /// How far it is known, from 0 to 1.
    pub(super) fn known(&self) -> f64 {
        self.count / (self.count + DOUBT)
    }
}

/// What a member of a panel says about one output.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Voice {
    /// On the common scale, from 0 to 1.
    pub(super) score: f64,
    /// The probability that it is right.
    pub(super) chance: f64,
}

/// A judge's score as a judge of common habits would have given it: as many spreads from the common mean as it is from
/// the judge's own. A judge of whom little is known is taken at its word.
pub(super) fn calibrate(score: f64, judge: &Habit, common: &Habit) -> f64 {
    let stretch = (common.spread.max(LEAST_SPREAD) / judge.spread.max(LEAST_SPREAD)).clamp(0.5, 2.0);
    let moved = (score - judge.mean).mul_add(stretch, common.mean);
    (score + judge.known() * (moved - score)).clamp(0.0, 1.0)
}

/// The probability that a verdict is right: what is believed of the judge, a little more where it is surer than it usually is, and
/// a little less where it is less sure. Of a coin it stays one half, whatever it says.
pub(super) fn chance(believed: Option<f64>, stated: f64, judge: &Habit) -> f64 {
    let believed = believed.unwrap_or(UNKNOWN);
    let surer = (judge.known() * (stated - judge.confidence)).clamp(-0.5, 0.5);
    let edge = (2.0 * believed - 1.0).clamp(0.0, 1.0) * (1.0 + surer);
    (0.5 + edge / 2.0).min(SUREST)
}

/// How much a verdict weighs that is right with this probability: its precision, with that of a coin as zero.
pub(super) fn weight(chance: f64) -> f64 {
    let edge = (2.0 * chance.min(SUREST) - 1.0).max(0.0);
    edge * edge / (1.0 - edge * edge)
}

/// What a panel says; `None` if nobody's word is worth anything.
///
/// The confidence is the mean probability of being right of those on its side and wrong of those on the other, weighted: no
/// more than that of the surest member, since judges that agree may be friends.
pub(super) fn combine(voices: &[Voice]) -> Option<Judged> {
    let total: f64 = voices.iter().map(|voice| weight(voice.chance)).sum();
    if total <= 0.0 {
        return None;
    }
    let mean =
        |of: &dyn Fn(&Voice) -> f64| voices.iter().map(|voice| weight(voice.chance) * of(voice)).sum::<f64>() / total;
    let score = mean(&|voice| voice.score).clamp(0.0, 1.0);
    let agrees = |voice: &Voice| (voice.score > 0.5) == (score > 0.5);
    let confidence = mean(&|voice| if agrees(voice) { voice.chance } else { 1.0 - voice.chance });
    let score = Score::clamped(score);
    Some(Judged { score, reward: score.into(), confidence: Confidence::clamped(confidence) })
}
