//! Makes one verdict of several.
//!
//! Every judge's score is put on a common scale first, and then weighed by how likely it is right. Nothing here has a memory: what
//! is known of the judges is given.

use super::feedback::AggregateVerdict;
use crate::{Confidence, Score};

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
pub(super) struct MemberScore {
    /// On the common scale, from 0 to 1.
    pub(super) score: f64,
    /// The probability that it is right.
    pub(super) chance: f64,
}

/// A judge's score as a judge of common habits would have given it: as many spreads from the common mean as it is from
/// the judge's own. A judge of whom little is known is taken at its word, and so is every judge where nothing is known of what is
/// common.
pub(super) fn calibrate(score: f64, judge: &Habit, common: &Habit) -> f64 {
    if common.count <= 0.0 {
        return score.clamp(0.0, 1.0);
    }
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
pub(super) fn combine(voices: &[MemberScore]) -> Option<AggregateVerdict> {
    let total: f64 = voices.iter().map(|voice| weight(voice.chance)).sum();
    if total <= 0.0 {
        return None;
    }
    let mean = |of: &dyn Fn(&MemberScore) -> f64| {
        voices.iter().map(|voice| weight(voice.chance) * of(voice)).sum::<f64>() / total
    };
    let score = mean(&|voice| voice.score).clamp(0.0, 1.0);
    let agrees = |voice: &MemberScore| (voice.score > 0.5) == (score > 0.5);
    let confidence = mean(&|voice| if agrees(voice) { voice.chance } else { 1.0 - voice.chance });
    let score = Score::clamped(score);
    Some(AggregateVerdict { score, reward: score.into(), confidence: Confidence::clamped(confidence) })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn unit() -> impl Strategy<Value = f64> {
        0.0..=1.0
    }

    fn habit() -> impl Strategy<Value = Habit> {
        (0.0..1e4, unit(), 0.0..0.5, unit()).prop_map(|(count, mean, spread, confidence)| Habit {
            count,
            mean,
            spread,
            confidence,
        })
    }

    fn voice() -> impl Strategy<Value = MemberScore> {
        (unit(), 0.5..=SUREST).prop_map(|(score, chance)| MemberScore { score, chance })
    }

    proptest! {
        #[test]
        fn whatever_is_said_stays_within_range(
            score in unit(), judge in habit(), common in habit(), believed in prop::option::of(unit()), stated in unit(),
        ) {
            prop_assert!((0.0..=1.0).contains(&calibrate(score, &judge, &common)));
            let chance = chance(believed, stated, &judge);
            prop_assert!((0.5..=SUREST).contains(&chance));
            prop_assert!(weight(chance).is_finite() && weight(chance) >= 0.0);
            prop_assert!(chance == 0.5 || weight(chance) > 0.0);
        }

        #[test]
        fn a_panel_says_nothing_beyond_what_its_members_say(voices in prop::collection::vec(voice(), 1..6)) {
            let Some(judged) = combine(&voices) else {
                prop_assert!(voices.iter().all(|voice| voice.chance == 0.5));
                return Ok(());
            };
            let heard = || voices.iter().filter(|voice| voice.chance > 0.5);
            let least = heard().map(|voice| voice.score).fold(1.0, f64::min);
            let most = heard().map(|voice| voice.score).fold(0.0, f64::max);
            // Scores are rounded to six places.
            prop_assert!((least - 1e-6..=most + 1e-6).contains(&judged.score.get()), "{least} {most} {judged:?}");
            let surest = heard().map(|voice| voice.chance).fold(0.0, f64::max);
            prop_assert!(judged.confidence.get() <= surest + 1e-6);
        }

        #[test]
        fn the_word_of_a_coin_is_worth_nothing(
            voices in prop::collection::vec(voice(), 1..5), score in unit(), stated in unit(), judge in habit(), worse in 0.0..=0.5,
        ) {
            let coin = MemberScore { score, chance: chance(Some(worse), stated, &judge) };
            let with: Vec<_> = voices.iter().copied().chain([coin]).collect();
            prop_assert_eq!(combine(&voices), combine(&with));
            prop_assert_eq!(combine(&[coin]), None);
        }

        #[test]
        fn a_judge_that_always_adds_a_constant_changes_nothing_once_it_is_known(
            score in unit(), judge in habit(), common in habit(), offset in -0.5..=0.5,
        ) {
            let judge = Habit { count: 1e9, ..judge };
            let shifted = Habit { mean: judge.mean + offset, ..judge };
            let same = calibrate(score + offset, &shifted, &common);
            prop_assert!((same - calibrate(score, &judge, &common)).abs() < 1e-6);
        }

        #[test]
        fn a_judge_of_whom_nothing_is_known_is_taken_at_its_word(score in unit(), judge in habit(), common in habit()) {
            let judge = Habit { count: 0.0, ..judge };
            prop_assert!((calibrate(score, &judge, &common) - score).abs() < 1e-12);
        }

        #[test]
        fn calibration_never_turns_two_outputs_round(a in unit(), b in unit(), judge in habit(), common in habit()) {
            let (low, high) = if a < b { (a, b) } else { (b, a) };
            prop_assert!(calibrate(low, &judge, &common) <= calibrate(high, &judge, &common) + 1e-12);
        }

        #[test]
        fn who_is_believed_more_weighs_more_and_so_does_who_is_surer_than_usual(
            believed in 0.5..0.9, more in 0.01..0.09, stated in unit(), judge in habit(),
        ) {
            let (more, less) = (chance(Some(believed + more), stated, &judge), chance(Some(believed), stated, &judge));
            prop_assert!(more > less || less == SUREST);
            prop_assert!(weight(more) > weight(less) || less == SUREST);
            let surer = chance(Some(believed), (stated + 0.1).min(1.0), &judge);
            prop_assert!(surer >= less);
            let counts = judge.known() > 0.1 && (stated - judge.confidence).abs() < 0.4 && stated < 0.9 && believed > 0.5;
            prop_assert!(surer > less || less == SUREST || !counts);
        }
    }

    #[test]
    fn the_stretch_of_a_timid_judge_is_taken_out() {
        let timid = Habit { count: 1e9, mean: 0.6, spread: 0.1, confidence: 0.9 };
        let common = Habit { count: 1e9, mean: 0.5, spread: 0.2, confidence: 0.9 };
        assert!((calibrate(0.7, &timid, &common) - 0.7).abs() < 1e-6);
        assert!((calibrate(0.5, &timid, &common) - 0.3).abs() < 1e-6);
    }
}
