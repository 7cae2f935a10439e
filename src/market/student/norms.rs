//! How judges usually judge.

use std::collections::HashMap;

use alloy_primitives::Address;

use super::aggregate::Habit;
use crate::market::selection::Skill;

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

    /// The habits of the judges of a skill on average, each counting as far as it is known. As outputs become better all judges' means
    /// rise, and so does this one: only what tells judges apart is taken out of their scores.
    pub(super) fn common(&self, skill: Skill) -> Habit {
        let mut common = Habit::default();
        for (_, running) in self.0.iter().filter(|((_, of), _)| *of == skill) {
            let habit = running.habit();
            let known = habit.known();
            common.count += known;
            common.mean += known * habit.mean;
            common.spread += known * habit.spread;
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
