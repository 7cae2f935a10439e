//! One verdict of several.
//!
//! The score of each judge is put on a common scale, by how the judge has scored before, and weighed by how likely its verdict is right.

use std::collections::HashMap;

use alloy_primitives::Address;

use super::{AggregateVerdict, OutputFeedback, PanelVerdict};
use crate::{Confidence, EvaluatorId, Score, Verdict, selection::Skill};

/// The accuracy assumed of a judge if the selector expects none. Any value above one half would do: all weigh the same then.
const DEFAULT_ACCURACY: f64 = 0.65;
/// How many scores must be known of a judge before half of its statistics count.
const PRIOR_SCORES: f64 = 20.0;
/// The least standard deviation of scores that is told from none.
const MIN_SPREAD: f64 = 0.05;
/// The highest probability of being right that is believed.
const MAX_PROBABILITY: f64 = 0.99;
/// How many scores of a judge count; older ones fade.
const MEMORY: f64 = 200.0;
/// How many pairs of judge and skill are remembered: the first ones.
const MAX_JUDGES: usize = 1 << 14;

/// Aggregates the verdicts of a panel on one output.
pub(super) fn aggregate(verdicts: Vec<(MemberScore, Address, EvaluatorId, Verdict)>) -> OutputFeedback {
    let scores: Vec<_> = verdicts.iter().map(|(score, ..)| *score).collect();
    let total: f64 = scores.iter().map(|score| weight(score.probability)).sum();
    let member =
        |(score, evaluator, evaluator_id, verdict): (MemberScore, Address, EvaluatorId, Verdict)| PanelVerdict {
            evaluator,
            evaluator_id,
            weight: if total > 0.0 { weight(score.probability) / total } else { 0.0 },
            calibrated: Score::clamped(score.score),
            verdict,
        };
    let mut members: Vec<_> = verdicts.into_iter().map(member).collect();
    members.sort_by(|a, b| b.weight.total_cmp(&a.weight));
    OutputFeedback { verdict: combine(&scores), members }
}

/// The calibrated score of one panel member on one output.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct MemberScore {
    /// On the common scale, from 0 to 1.
    score: f64,
    /// The probability that the verdict is right.
    probability: f64,
}

impl MemberScore {
    /// Calibrates a verdict of a judge with these statistics and this expected accuracy.
    pub(super) fn new(verdict: &Verdict, accuracy: Option<f64>, judge: &ScoreStats, common: &ScoreStats) -> Self {
        Self {
            score: calibrate(verdict.score.get(), judge, common),
            probability: probability_right(accuracy, verdict.confidence.get(), judge),
        }
    }
}

/// Returns the score that a judge of common habits would have given: as many standard deviations from the common mean as `score` is from
/// the judge's own. The less is known of the judge, the closer the result stays to `score`.
fn calibrate(score: f64, judge: &ScoreStats, common: &ScoreStats) -> f64 {
    if common.count <= 0.0 {
        return score.clamp(0.0, 1.0);
    }
    let stretch = (common.spread.max(MIN_SPREAD) / judge.spread.max(MIN_SPREAD)).clamp(0.5, 2.0);
    let moved = (score - judge.mean).mul_add(stretch, common.mean);
    (score + judge.known() * (moved - score)).clamp(0.0, 1.0)
}

/// Returns the probability that a verdict is right: the judge's accuracy, moved by how its stated confidence differs from its usual one.
/// For an accuracy of one half it is one half, whatever the judge states.
fn probability_right(accuracy: Option<f64>, confidence: f64, judge: &ScoreStats) -> f64 {
    let accuracy = accuracy.unwrap_or(DEFAULT_ACCURACY);
    let surer = (judge.known() * (confidence - judge.confidence)).clamp(-0.5, 0.5);
    let edge = (2.0 * accuracy - 1.0).clamp(0.0, 1.0) * (1.0 + surer);
    (0.5 + edge / 2.0).min(MAX_PROBABILITY)
}

/// Returns how much a verdict weighs that is right with this probability: its precision, zero for a coin toss.
fn weight(probability: f64) -> f64 {
    let edge = (2.0 * probability.min(MAX_PROBABILITY) - 1.0).max(0.0);
    edge * edge / (1.0 - edge * edge)
}

/// Returns the weighted mean of the scores; `None` if none weighs anything.
///
/// The confidence is the weighted mean probability that the members on its side are right and those on the other side wrong. It does not
/// exceed that of the surest member, because members that agree may collude.
fn combine(scores: &[MemberScore]) -> Option<AggregateVerdict> {
    let total: f64 = scores.iter().map(|member| weight(member.probability)).sum();
    if total <= 0.0 {
        return None;
    }
    let mean = |of: &dyn Fn(&MemberScore) -> f64| {
        scores.iter().map(|member| weight(member.probability) * of(member)).sum::<f64>() / total
    };
    let score = mean(&|member| member.score).clamp(0.0, 1.0);
    let agrees = |member: &MemberScore| (member.score > 0.5) == (score > 0.5);
    let confidence = mean(&|member| if agrees(member) { member.probability } else { 1.0 - member.probability });
    let score = Score::clamped(score);
    Some(AggregateVerdict { score, reward: score.into(), confidence: Confidence::clamped(confidence) })
}

/// How a judge has scored so far.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct ScoreStats {
    /// How many scores this is based on, faded.
    count: f64,
    mean: f64,
    /// The standard deviation.
    spread: f64,
    /// The mean of the stated confidence.
    confidence: f64,
}

impl ScoreStats {
    /// Returns how far the judge is known, from 0 to 1.
    fn known(&self) -> f64 {
        self.count / (self.count + PRIOR_SCORES)
    }
}

/// Statistics of the scores of judges, by judge and skill.
#[derive(Debug, Default)]
pub(super) struct ScoreHistory(HashMap<(Address, Skill), RunningStats>);

/// Mean and variance of scores, of which older ones fade.
#[derive(Clone, Copy, Debug, Default)]
struct RunningStats {
    count: f64,
    mean: f64,
    variance: f64,
    confidence: f64,
}

impl ScoreHistory {
    /// Adds a score of a judge.
    pub(super) fn learn(&mut self, judge: Address, skill: Skill, score: f64, confidence: f64) {
        let key = (judge, skill);
        if self.0.len() < MAX_JUDGES || self.0.contains_key(&key) {
            self.0.entry(key).or_default().learn(score, confidence);
        }
    }

    /// Returns the statistics of one judge.
    pub(super) fn of(&self, judge: Address, skill: Skill) -> ScoreStats {
        self.0.get(&(judge, skill)).map(RunningStats::stats).unwrap_or_default()
    }

    /// Returns the statistics of all judges of a skill on average, each weighted by how many scores are known and by its expected
    /// accuracy.
    ///
    /// As outputs improve, the means of all judges rise and so does this one: calibration removes only the differences between judges.
    /// Judges that are not expected to be accurate do not count, or newcomers could shift the scores of others.
    pub(super) fn common(&self, skill: Skill, accuracy: impl Fn(Address) -> Option<f64>) -> ScoreStats {
        let mut common = ScoreStats::default();
        for ((judge, _), running) in self.0.iter().filter(|((_, of), _)| *of == skill) {
            let stats = running.stats();
            let counted = stats.count * weight(accuracy(*judge).unwrap_or(DEFAULT_ACCURACY));
            common.count += counted;
            common.mean += counted * stats.mean;
            common.spread += counted * stats.spread;
        }
        if common.count > 0.0 {
            common.mean /= common.count;
            common.spread /= common.count;
        }
        common
    }
}

impl RunningStats {
    fn learn(&mut self, score: f64, confidence: f64) {
        self.count = self.count * (1.0 - 1.0 / MEMORY) + 1.0;
        let step = 1.0 / self.count;
        let away = score - self.mean;
        self.mean += step * away;
        self.variance = (1.0 - step) * (self.variance + step * away * away);
        self.confidence += step * (confidence - self.confidence);
    }

    fn stats(&self) -> ScoreStats {
        let Self { count, mean, variance, confidence } = *self;
        ScoreStats { count, mean, spread: variance.max(0.0).sqrt(), confidence }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn unit() -> impl Strategy<Value = f64> {
        0.0..=1.0
    }

    fn stats() -> impl Strategy<Value = ScoreStats> {
        (0.0..1e4, unit(), 0.0..0.5, unit()).prop_map(|(count, mean, spread, confidence)| ScoreStats {
            count,
            mean,
            spread,
            confidence,
        })
    }

    fn member() -> impl Strategy<Value = MemberScore> {
        (unit(), 0.5..=MAX_PROBABILITY).prop_map(|(score, probability)| MemberScore { score, probability })
    }

    proptest! {
        #[test]
        fn scores_and_weights_stay_within_range(
            score in unit(), judge in stats(), common in stats(), believed in prop::option::of(unit()), stated in unit(),
        ) {
            prop_assert!((0.0..=1.0).contains(&calibrate(score, &judge, &common)));
            let probability = probability_right(believed, stated, &judge);
            prop_assert!((0.5..=MAX_PROBABILITY).contains(&probability));
            prop_assert!(weight(probability).is_finite() && weight(probability) >= 0.0);
            prop_assert!(probability == 0.5 || weight(probability) > 0.0);
        }

        #[test]
        fn aggregate_stays_between_its_members(members in prop::collection::vec(member(), 1..6)) {
            let Some(judged) = combine(&members) else {
                prop_assert!(members.iter().all(|member| member.probability == 0.5));
                return Ok(());
            };
            let counted = || members.iter().filter(|member| member.probability > 0.5);
            let least = counted().map(|member| member.score).fold(1.0, f64::min);
            let most = counted().map(|member| member.score).fold(0.0, f64::max);
            // Scores are rounded to six places.
            prop_assert!((least - 1e-6..=most + 1e-6).contains(&judged.score.get()), "{least} {most} {judged:?}");
            let surest = counted().map(|member| member.probability).fold(0.0, f64::max);
            prop_assert!(judged.confidence.get() <= surest + 1e-6);
        }

        #[test]
        fn coin_toss_has_no_weight(
            members in prop::collection::vec(member(), 1..5), score in unit(), stated in unit(), judge in stats(), worse in 0.0..=0.5,
        ) {
            let coin = MemberScore { score, probability: probability_right(Some(worse), stated, &judge) };
            let with: Vec<_> = members.iter().copied().chain([coin]).collect();
            prop_assert_eq!(combine(&members), combine(&with));
            prop_assert_eq!(combine(&[coin]), None);
        }

        #[test]
        fn constant_offset_of_a_known_judge_is_removed(
            score in unit(), judge in stats(), common in stats(), offset in -0.5..=0.5,
        ) {
            let judge = ScoreStats { count: 1e9, ..judge };
            let shifted = ScoreStats { mean: judge.mean + offset, ..judge };
            let same = calibrate(score + offset, &shifted, &common);
            prop_assert!((same - calibrate(score, &judge, &common)).abs() < 1e-6);
        }

        #[test]
        fn unknown_judge_is_not_calibrated(score in unit(), judge in stats(), common in stats()) {
            let judge = ScoreStats { count: 0.0, ..judge };
            prop_assert!((calibrate(score, &judge, &common) - score).abs() < 1e-12);
        }

        #[test]
        fn calibration_keeps_the_order_of_outputs(a in unit(), b in unit(), judge in stats(), common in stats()) {
            let (low, high) = if a < b { (a, b) } else { (b, a) };
            prop_assert!(calibrate(low, &judge, &common) <= calibrate(high, &judge, &common) + 1e-12);
        }

        #[test]
        fn higher_accuracy_and_higher_confidence_weigh_more(
            believed in 0.5..0.9, more in 0.01..0.09, stated in unit(), judge in stats(),
        ) {
            let more = probability_right(Some(believed + more), stated, &judge);
            let less = probability_right(Some(believed), stated, &judge);
            prop_assert!(more > less || less == MAX_PROBABILITY);
            prop_assert!(weight(more) > weight(less) || less == MAX_PROBABILITY);
            let surer = probability_right(Some(believed), (stated + 0.1).min(1.0), &judge);
            prop_assert!(surer >= less);
            let counts = judge.known() > 0.1 && (stated - judge.confidence).abs() < 0.4 && stated < 0.9 && believed > 0.5;
            prop_assert!(surer > less || less == MAX_PROBABILITY || !counts);
        }
    }

    #[test]
    fn narrow_scores_of_a_judge_are_stretched() {
        let timid = ScoreStats { count: 1e9, mean: 0.6, spread: 0.1, confidence: 0.9 };
        let common = ScoreStats { count: 1e9, mean: 0.5, spread: 0.2, confidence: 0.9 };
        assert!((calibrate(0.7, &timid, &common) - 0.7).abs() < 1e-6);
        assert!((calibrate(0.5, &timid, &common) - 0.3).abs() < 1e-6);
    }

    fn skill() -> Skill {
        Skill::new(0).unwrap()
    }

    #[test]
    fn harsh_and_lenient_judges_are_calibrated_to_the_same_scores() {
        let (harsh, lenient) = (Address::repeat_byte(1), Address::repeat_byte(2));
        let mut history = ScoreHistory::default();
        let apart = |history: &ScoreHistory, quality: f64| {
            let common = history.common(skill(), |_| None);
            let of = |judge, score: f64| calibrate(score, &history.of(judge, skill()), &common);
            (of(harsh, quality * 0.5) - of(lenient, 0.4 + quality * 0.5)).abs()
        };
        assert!((apart(&history, 0.5) - 0.4).abs() < 1e-9);
        for turn in 0..400 {
            let quality = f64::from(turn * 37 % 100) / 99.0;
            history.learn(harsh, skill(), quality * 0.5, 0.9);
            history.learn(lenient, skill(), 0.4 + quality * 0.5, 0.9);
        }
        for quality in [0.0, 0.3, 0.7, 1.0] {
            assert!(apart(&history, quality) < 0.05, "{}", apart(&history, quality));
        }
    }

    #[test]
    fn common_shift_of_all_judges_is_kept() {
        let mut history = ScoreHistory::default();
        for turn in 0..400 {
            for judge in 1..4 {
                history.learn(Address::repeat_byte(judge), skill(), f64::from(turn) / 400.0, 0.9);
            }
        }
        let common = history.common(skill(), |_| None);
        let score = calibrate(0.95, &history.of(Address::repeat_byte(1), skill()), &common);
        assert!((score - 0.95).abs() < 1e-9, "outputs that become better keep their better scores: {score}");
    }

    #[test]
    fn judges_without_expected_accuracy_do_not_shift_the_common_mean() {
        let honest = Address::repeat_byte(1);
        let mut history = ScoreHistory::default();
        for turn in 0..400 {
            history.learn(honest, skill(), f64::from(turn * 37 % 100) / 99.0, 0.9);
        }
        // Each of them is hired once, for a whole group, and praises all of it.
        for stranger in 2..42 {
            (0..64).for_each(|_| history.learn(Address::repeat_byte(stranger), skill(), 1.0, 0.9));
        }
        let score = |of_strangers| {
            let common = history.common(skill(), |judge| if judge == honest { Some(0.85) } else { of_strangers });
            calibrate(0.1, &history.of(honest, skill()), &common)
        };
        assert!((score(Some(0.5)) - 0.1).abs() < 1e-9, "a coin toss does not count: {}", score(Some(0.5)));
        assert!(score(Some(0.55)) < 0.2, "and a judge barely better counts little: {}", score(Some(0.55)));
    }

    #[test]
    fn judges_hired_once_hardly_shift_the_common_mean() {
        let honest = Address::repeat_byte(1);
        let mut history = ScoreHistory::default();
        for turn in 0..400 {
            history.learn(honest, skill(), f64::from(turn * 37 % 100) / 99.0, 0.9);
        }
        (2..42).for_each(|stranger| history.learn(Address::repeat_byte(stranger), skill(), 1.0, 0.9));
        let score = calibrate(0.1, &history.of(honest, skill()), &history.common(skill(), |_| None));
        assert!(score < 0.3, "{score}");
    }

    #[test]
    fn without_any_accurate_judge_scores_are_not_calibrated() {
        let judge = Address::repeat_byte(1);
        let mut history = ScoreHistory::default();
        (0..400).for_each(|turn| history.learn(judge, skill(), 0.5 + f64::from(turn % 10) / 20.0, 0.9));
        let common = history.common(skill(), |_| Some(0.5));
        assert!((calibrate(0.9, &history.of(judge, skill()), &common) - 0.9).abs() < 1e-9);
    }

    #[test]
    fn score_history_is_bounded() {
        let mut history = ScoreHistory::default();
        for number in 0..MAX_JUDGES as u64 + 10 {
            history.learn(Address::left_padding_from(&number.to_be_bytes()), skill(), 0.5, 0.5);
        }
        assert_eq!(history.0.len(), MAX_JUDGES);
    }
}
