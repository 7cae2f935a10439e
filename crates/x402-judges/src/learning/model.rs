//! Logistic regression, trained by one lesson at a time.

use std::collections::HashMap;

use alloy_primitives::Address;
use serde::{Deserialize, Serialize};
use x402_market::evidence::Pairs;

use super::{LearningStats, features::Features};

/// How far a step goes (AdaGrad), and the sum of squared gradients that every weight begins with.
const RATE: f32 = 0.5;
const FIRST_SQUARE: f32 = 0.1;
/// The step of the calibration.
const CALIBRATION: f32 = 0.02;
/// The log-odds that a payer nobody knows tells the truth, the limits, and by how much one lesson may move them. Trust is lost faster than
/// won.
const STRANGER: f32 = -0.4;
const LIMITS: [f32; 2] = [-6.0, 3.0];
const MOVES: [f32; 2] = [-1.5, 0.5];
/// How much the latest lesson counts in the share of comparisons in which payers agree.
const RECENT: f32 = 0.3;
/// How many payers are remembered.
const MAX_PAYERS: usize = 4_096;
/// The excess of loss that counts as drift, and what of each lesson's excess is ignored (Page and Hinkley's test).
const DRIFT: f32 = 2.0;
const TOLERANCE: f32 = 0.05;
/// How much faster it learns after a drift, and how much of that is left after each further lesson.
const FASTER: f32 = 4.0;
const SLOWING: f32 = 0.95;
/// After how many lessons, at least, what it judges by is renewed; and up to which speed a quarter of all lessons is waited for.
const LESSONS_PER_VERSION: u64 = 8;
const CALM: f32 = 1.5;

/// An output of which the truth is told.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Example {
    pub(super) x: Features,
    pub(super) good: bool,
}

/// What was learned.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Model {
    pub(super) stats: LearningStats,
    /// A weight and the sum of its squared gradients, by feature.
    weights: HashMap<u32, [f32; 2]>,
    calibration: [f32; 2],
    /// What it judges by: weights and calibration as they were when the version began.
    published: HashMap<u32, f32>,
    published_calibration: [f32; 2],
    /// How many lessons the version is behind.
    behind: u64,
    payers: HashMap<Address, Payer>,
    /// The share of comparisons in which payers that are believed agree with what it had learned before.
    agreement: f32,
    watch: Watch,
    /// How much faster than usual it learns.
    speed: f32,
}

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct Payer {
    log_odds: f32,
    /// Its last lesson.
    last: u64,
}

/// Watches whether the loss rises.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
struct Watch {
    lessons: f32,
    mean: f32,
    excess: f32,
    least: f32,
}

impl Default for Model {
    fn default() -> Self {
        Self {
            stats: LearningStats::default(),
            weights: HashMap::new(),
            calibration: [1.0, 0.0],
            published: HashMap::new(),
            published_calibration: [1.0, 0.0],
            behind: 0,
            payers: HashMap::new(),
            agreement: 0.5,
            watch: Watch::default(),
            speed: 1.0,
        }
    }
}

impl Model {
    /// Returns the probability that an output is good, by the current version.
    pub(super) fn probability(&self, x: &Features) -> f64 {
        let sum = x.offset + x.values.iter().map(|(at, x)| self.published.get(at).unwrap_or(&0.0) * x).sum::<f32>();
        let [scale, shift] = self.published_calibration;
        f64::from(logistic(scale * sum + shift))
    }

    /// Returns how far the lessons of a payer are believed.
    pub(super) fn trust(&self, payer: Address) -> f32 {
        logistic(self.payers.get(&payer).map_or(STRANGER, |payer| payer.log_odds))
    }

    /// Learns a lesson.
    pub(super) fn learn(&mut self, payer: Address, examples: &[Example]) {
        self.stats.lessons += 1;
        self.behind += 1;
        let sums: Vec<f32> = examples.iter().map(|example| self.sum(&example.x)).collect();
        let trust = self.believe(payer, &sums, examples);
        let [scale, shift] = self.calibration;
        let predicted: Vec<f32> = sums.iter().map(|sum| logistic(scale * sum + shift)).collect();
        // What nobody believes shows no drift.
        if trust > 0.3 && self.watch.rises(&predicted, examples) {
            self.stats.drifts += 1;
            self.speed = FASTER;
            self.weights.values_mut().for_each(|[_, square]| *square = FIRST_SQUARE + (*square - FIRST_SQUARE) / 8.0);
        }
        for ((example, sum), predicted) in examples.iter().zip(&sums).zip(predicted) {
            self.step(example, trust);
            let error = trust * (predicted - f32::from(u8::from(example.good)));
            self.calibration[0] = (self.calibration[0] - CALIBRATION * error * sum).clamp(0.1, 4.0);
            self.calibration[1] = (self.calibration[1] - CALIBRATION * error).clamp(-3.0, 3.0);
        }
        self.speed = 1.0 + (self.speed - 1.0) * SLOWING;
        let quarter = if self.speed < CALM { self.stats.lessons / 4 } else { 0 };
        if self.behind >= quarter.max(LESSONS_PER_VERSION) {
            self.publish();
        }
    }

    /// Moves the trust in a payer by how well its truths order what was learned before, compared with those of other payers. Returns it.
    fn believe(&mut self, payer: Address, sums: &[f32], examples: &[Example]) -> f32 {
        let (scores, good): (Vec<f64>, Vec<bool>) =
            sums.iter().zip(examples).map(|(sum, example)| (f64::from(*sum), example.good)).unzip();
        if self.payers.len() >= MAX_PAYERS && !self.payers.contains_key(&payer) {
            let oldest = self.payers.iter().min_by_key(|(_, known)| known.last).map(|(payer, _)| *payer);
            oldest.map(|oldest| self.payers.remove(&oldest));
        }
        let known = self.payers.entry(payer).or_insert(Payer { log_odds: STRANGER, last: 0 });
        known.last = self.stats.lessons;
        if let Some([right, wrong]) = Pairs::of(&scores, &good).map(Pairs::comparisons) {
            let before = logistic(known.log_odds);
            // Against a payer that says anything, which agrees in half of them.
            let likely = self.agreement.clamp(0.5, 0.95);
            let moved = right * (2.0 * likely).ln() + wrong * (2.0 - 2.0 * likely).ln();
            known.log_odds = (known.log_odds + moved.clamp(MOVES[0], MOVES[1])).clamp(LIMITS[0], LIMITS[1]);
            self.agreement += RECENT * before * (right / (right + wrong) - self.agreement);
        }
        logistic(known.log_odds)
    }

    fn sum(&self, x: &Features) -> f32 {
        x.offset
            + x.values.iter().map(|(at, x)| self.weights.get(at).map_or(0.0, |[weight, _]| weight * x)).sum::<f32>()
    }

    fn step(&mut self, example: &Example, trust: f32) {
        let error = trust * (logistic(self.sum(&example.x)) - f32::from(u8::from(example.good)));
        for (at, x) in &example.x.values {
            let [weight, square] = self.weights.entry(*at).or_insert([0.0, FIRST_SQUARE]);
            let gradient = error * x;
            *square += gradient * gradient;
            *weight -= self.speed * RATE * gradient / square.sqrt();
        }
    }

    fn publish(&mut self) {
        self.published = self.weights.iter().map(|(at, [weight, _])| (*at, *weight)).collect();
        self.published_calibration = self.calibration;
        self.stats.version += 1;
        self.behind = 0;
    }
}

impl Watch {
    /// Notes the loss of a lesson. Returns `true` if losses have risen for good; then it begins anew.
    fn rises(&mut self, predicted: &[f32], examples: &[Example]) -> bool {
        let loss = |(predicted, example): (&f32, &Example)| {
            let right = if example.good { *predicted } else { 1.0 - predicted };
            -right.max(0.05).ln()
        };
        let loss = predicted.iter().zip(examples).map(loss).sum::<f32>() / examples.len().max(1) as f32;
        self.lessons += 1.0;
        self.mean += (loss - self.mean) / self.lessons;
        self.excess += loss - self.mean - TOLERANCE;
        self.least = self.least.min(self.excess);
        let rises = self.excess - self.least > DRIFT;
        if rises {
            *self = Self::default();
        }
        rises
    }
}

fn logistic(log_odds: f32) -> f32 {
    1.0 / (1.0 + (-log_odds).exp())
}
