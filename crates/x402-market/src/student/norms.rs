//! How judges usually judge.

use std::collections::HashMap;

use alloy_primitives::Address;

use super::aggregate::{self, Habit};
use crate::selection::Skill;

/// How many scores of a judge count; older ones fade.
const MEMORY: f64 = 200.0;
/// How many pairs of evaluator and skill are remembered: the first ones.
const LIMIT: usize = 1 << 14;

/// The habits of judges, by evaluator and skill.
#[derive(Debug, Default)]
pub(super) struct Norms(HashMap<(Address, Skill), Running>);

/// Mean and variance, fading.
#[derive(Clone, Copy, Debug, Default)]
struct Running {
    count: f64,
    mean: f64,
    variance: f64,
    confidence: f64,
}

impl Norms {
    /// Takes in what a judge said.
    pub(super) fn learn(&mut self, evaluator: Address, skill: Skill, score: f64, confidence: f64) {
        let key = (evaluator, skill);
        if self.0.len() < LIMIT || self.0.contains_key(&key) {
            self.0.entry(key).or_default().learn(score, confidence);
        }
    }

    /// The habits of one judge.
    pub(super) fn of(&self, evaluator: Address, skill: Skill) -> Habit {
        self.0.get(&(evaluator, skill)).map(Running::habit).unwrap_or_default()
    }

    /// The habits of the judges of a skill on average, each counting as far as it was heard and is believed; its count says how much
    /// that is in all. As outputs become better all judges' means rise, and so does this one: only what tells judges apart is taken
    /// out of their scores. Who is not believed has no say in what is usual, or strangers could move what others say.
    pub(super) fn common(&self, skill: Skill, believed: impl Fn(Address) -> Option<f64>) -> Habit {
        let mut common = Habit::default();
        for ((judge, _), running) in self.0.iter().filter(|((_, of), _)| *of == skill) {
            let habit = running.habit();
            let heard = habit.count * aggregate::weight(believed(*judge).unwrap_or(aggregate::UNKNOWN));
            common.count += heard;
            common.mean += heard * habit.mean;
            common.spread += heard * habit.spread;
        }
        if common.count > 0.0 {
            common.mean /= common.count;
            common.spread /= common.count;
        }
        common
    }
}

impl Running {
    fn learn(&mut self, score: f64, confidence: f64) {
        self.count = self.count * (1.0 - 1.0 / MEMORY) + 1.0;
        let step = 1.0 / self.count;
        let away = score - self.mean;
        self.mean += step * away;
        self.variance = (1.0 - step) * (self.variance + step * away * away);
        self.confidence += step * (confidence - self.confidence);
    }

    fn habit(&self) -> Habit {
        let Self { count, mean, variance, confidence } = *self;
        Habit { count, mean, spread: variance.max(0.0).sqrt(), confidence }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::student::aggregate::calibrate;

    fn skill() -> Skill {
        Skill::new(0).unwrap()
    }

    #[test]
    fn a_harsh_and_a_lenient_judge_come_to_mean_the_same() {
        let (harsh, lenient) = (Address::repeat_byte(1), Address::repeat_byte(2));
        let mut norms = Norms::default();
        let apart = |norms: &Norms, quality: f64| {
            let common = norms.common(skill(), |_| None);
            let of = |judge, score: f64| calibrate(score, &norms.of(judge, skill()), &common);
            (of(harsh, quality * 0.5) - of(lenient, 0.4 + quality * 0.5)).abs()
        };
        assert!((apart(&norms, 0.5) - 0.4).abs() < 1e-9);
        for turn in 0..400 {
            let quality = f64::from(turn * 37 % 100) / 99.0;
            norms.learn(harsh, skill(), quality * 0.5, 0.9);
            norms.learn(lenient, skill(), 0.4 + quality * 0.5, 0.9);
        }
        for quality in [0.0, 0.3, 0.7, 1.0] {
            assert!(apart(&norms, quality) < 0.05, "{}", apart(&norms, quality));
        }
    }

    #[test]
    fn what_all_judges_have_in_common_is_not_taken_out() {
        let mut norms = Norms::default();
        for turn in 0..400 {
            for judge in 1..4 {
                norms.learn(Address::repeat_byte(judge), skill(), f64::from(turn) / 400.0, 0.9);
            }
        }
        let common = norms.common(skill(), |_| None);
        let score = calibrate(0.95, &norms.of(Address::repeat_byte(1), skill()), &common);
        assert!((score - 0.95).abs() < 1e-9, "outputs that become better keep their better scores: {score}");
    }

    #[test]
    fn strangers_do_not_say_what_is_usual() {
        let honest = Address::repeat_byte(1);
        let mut norms = Norms::default();
        for turn in 0..400 {
            norms.learn(honest, skill(), f64::from(turn * 37 % 100) / 99.0, 0.9);
        }
        // Each of them is hired once, for a whole group, and praises all of it.
        for stranger in 2..42 {
            (0..64).for_each(|_| norms.learn(Address::repeat_byte(stranger), skill(), 1.0, 0.9));
        }
        let score = |of_strangers| {
            let common = norms.common(skill(), |judge| if judge == honest { Some(0.85) } else { of_strangers });
            calibrate(0.1, &norms.of(honest, skill()), &common)
        };
        assert!((score(Some(0.5)) - 0.1).abs() < 1e-9, "a coin has no say in it: {}", score(Some(0.5)));
        assert!(score(Some(0.55)) < 0.2, "and who is hardly believed has little: {}", score(Some(0.55)));
    }

    #[test]
    fn who_is_hired_once_says_little_of_what_is_usual_though_nobody_is_audited() {
        let honest = Address::repeat_byte(1);
        let mut norms = Norms::default();
        for turn in 0..400 {
            norms.learn(honest, skill(), f64::from(turn * 37 % 100) / 99.0, 0.9);
        }
        (2..42).for_each(|stranger| norms.learn(Address::repeat_byte(stranger), skill(), 1.0, 0.9));
        let score = calibrate(0.1, &norms.of(honest, skill()), &norms.common(skill(), |_| None));
        assert!(score < 0.3, "{score}");
    }

    #[test]
    fn where_nobody_is_believed_everyone_is_taken_at_its_word() {
        let judge = Address::repeat_byte(1);
        let mut norms = Norms::default();
        (0..400).for_each(|turn| norms.learn(judge, skill(), 0.5 + f64::from(turn % 10) / 20.0, 0.9));
        let common = norms.common(skill(), |_| Some(0.5));
        assert!((calibrate(0.9, &norms.of(judge, skill()), &common) - 0.9).abs() < 1e-9);
    }

    #[test]
    fn strangers_do_not_fill_the_memory() {
        let mut norms = Norms::default();
        for number in 0..LIMIT as u64 + 10 {
            norms.learn(Address::left_padding_from(&number.to_be_bytes()), skill(), 0.5, 0.5);
        }
        assert_eq!(norms.0.len(), LIMIT);
    }
}
