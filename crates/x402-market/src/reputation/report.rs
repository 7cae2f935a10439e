//! What is to be thought of evaluators, and why, for people and programs.

use std::{
    collections::{BTreeMap, HashMap},
    fmt,
};

use alloy_primitives::Address;
use serde::Serialize;

use super::tell;
use crate::{
    evidence::{CallOutcome, Evidence, EvidenceLog},
    selection::{Observation, Selector as _, Skills, Thompson, ThompsonConfig},
};

/// How many payers are named of an evaluator in a skill.
const MAX_OPINIONS: usize = 10;

/// Every evaluator in every skill of which something is known, by evaluator and skill. `Display` makes a table of it.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Report {
    /// One line each.
    pub standings: Vec<Standing>,
}

/// What is to be thought of an evaluator in a skill.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
#[non_exhaustive]
pub struct Standing {
    /// Who.
    pub evaluator: Address,
    /// In what.
    pub skill: String,
    /// The expected probability that a verdict is right.
    pub accuracy: f64,
    /// Between what bounds it is with 90 %.
    pub interval: [f64; 2],
    /// What one's own audits showed.
    pub audits: Tally,
    /// What others say, without any weight.
    pub said: Tally,
    /// How many others say it. Nobody's word about itself is in here.
    pub payers: usize,
    /// The probability that what they say is genuine: that of the most trusted of them. The expected accuracy is this much the one
    /// that goes by what they say, and for the rest that of one's own audits.
    pub trusted: f64,
    /// The loudest of them, at most ten.
    pub opinions: Vec<Opinion>,
}

/// How many verdicts were right and wrong.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Tally {
    /// Right verdicts.
    pub right: u32,
    /// Wrong verdicts.
    pub wrong: u32,
}

/// What one payer says of an evaluator in a skill.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
#[non_exhaustive]
pub struct Opinion {
    /// Who says it.
    pub payer: Address,
    /// What.
    #[serde(flatten)]
    pub says: Tally,
    /// The probability that what this payer says, here and elsewhere, is genuine.
    pub trust: f64,
    /// Why it is that high.
    pub why: Why,
}

/// Why a payer is trusted as far as it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "kind", rename_all = "camelCase")]
#[non_exhaustive]
pub enum Why {
    /// It speaks of nobody in whom one has audits of one's own.
    Unknown,
    /// What it says agrees with so many audits of one's own.
    Agrees {
        /// How many.
        audits: u32,
    },
    /// What it says disagrees with so many audits of one's own.
    Disagrees {
        /// How many.
        audits: u32,
    },
}

type Cells = BTreeMap<(Address, String), Cell>;

#[derive(Default)]
struct Cell {
    audits: Tally,
    said: HashMap<Address, Tally>,
}

impl Report {
    pub(super) fn of(own: &EvidenceLog, others: &EvidenceLog, me: &[Address], skills: &Skills) -> Self {
        let config = ThompsonConfig::default();
        let stranger = f64::from(config.trust);
        let mut selector = Thompson::new(config, 0);
        let mut cells = Cells::new();
        // Everything in the order in which it happened, as a selector would have come to know it.
        let mut all: Vec<(bool, Evidence)> = Vec::new();
        own.for_each(|evidence| {
            let is_mine = evidence.payment.is_none_or(|payment| me.contains(&payment.payer));
            all.push((is_mine, evidence.clone()));
        });
        others.for_each(|evidence| all.push((false, evidence.clone())));
        all.sort_by_key(|(_, evidence)| evidence.at);
        for (is_mine, evidence) in all {
            let Some(skill) = skills.get(&evidence.skill) else { continue };
            let Evidence { evaluator, paid, at, outcome, .. } = evidence;
            if is_mine {
                selector.learn(&Observation { evaluator, skill, paid, at, outcome });
            } else {
                tell(&mut selector, skills, &evidence);
            }
            let CallOutcome::Answered { right: Some(right), .. } = outcome else { continue };
            let speaker = evidence.payment.map(|voice| voice.payer);
            if !is_mine && speaker.is_none_or(|payer| payer == evaluator) {
                continue;
            }
            let cell = cells.entry((evaluator, evidence.skill)).or_default();
            match speaker {
                Some(payer) if !is_mine => cell.said.entry(payer).or_default().count(right),
                _ => cell.audits.count(right),
            }
        }
        let compared = compared(&cells);
        let standings = cells.into_iter().filter_map(|((evaluator, skill), cell)| {
            let number = skills.get(&skill)?;
            let (posteriors, trusted) = selector.posteriors(evaluator, number)?;
            let mut opinions: Vec<Opinion> = cell
                .said
                .iter()
                .map(|(payer, says)| {
                    let trust = selector.trust(*payer);
                    let why = match compared.get(payer) {
                        None => Why::Unknown,
                        Some(audits) if trust >= stranger => Why::Agrees { audits: *audits },
                        Some(audits) => Why::Disagrees { audits: *audits },
                    };
                    Opinion { payer: *payer, says: *says, trust, why }
                })
                .collect();
            let mut said = Tally::default();
            for opinion in &opinions {
                said.right += opinion.says.right;
                said.wrong += opinion.says.wrong;
            }
            opinions.sort_by_key(|opinion| (std::cmp::Reverse(opinion.says.total()), opinion.payer));
            opinions.truncate(MAX_OPINIONS);
            Some(Standing {
                evaluator,
                accuracy: selector.estimate(evaluator, number)?.accuracy,
                interval: ninety_percent(posteriors, trusted),
                audits: cell.audits,
                said,
                payers: cell.said.len(),
                trusted: if cell.said.is_empty() { 0.0 } else { trusted },
                opinions,
                skill,
            })
        });
        Self { standings: standings.collect() }
    }

    /// What is to be thought of this evaluator in this skill, if anything is known of it.
    pub fn of_evaluator(&self, evaluator: Address, skill: &str) -> Option<&Standing> {
        self.standings.iter().find(|standing| standing.evaluator == evaluator && standing.skill == skill)
    }
}

/// With how many audits of one's own each payer's words can be compared.
fn compared(cells: &Cells) -> HashMap<Address, u32> {
    let mut compared = HashMap::new();
    for cell in cells.values().filter(|cell| cell.audits.total() > 0) {
        for payer in cell.said.keys() {
            *compared.entry(*payer).or_default() += cell.audits.total();
        }
    }
    compared
}

impl Tally {
    /// All verdicts.
    pub const fn total(self) -> u32 {
        self.right + self.wrong
    }

    const fn count(&mut self, right: bool) {
        let side = if right { &mut self.right } else { &mut self.wrong };
        *side = side.saturating_add(1);
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.right, self.total())
    }
}

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unknown => f.write_str("no audits to compare with"),
            Self::Agrees { audits } => write!(f, "agrees with {audits} audits"),
            Self::Disagrees { audits } => write!(f, "disagrees with {audits} audits"),
        }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for standing in &self.standings {
            let Standing { evaluator, skill, accuracy, interval: [low, high], audits, said, payers, trusted, .. } =
                standing;
            writeln!(
                f,
                "{evaluator} {skill}: right {:.0} % ({:.0} to {:.0}), own audits {audits}, others {said} by {payers}, believed {:.0} %",
                100.0 * accuracy,
                100.0 * low,
                100.0 * high,
                100.0 * trusted,
            )?;
            for Opinion { payer, says, trust, why } in &standing.opinions {
                writeln!(f, "    {payer} says {says}, trusted {:.0} %: {why}", 100.0 * trust)?;
            }
        }
        Ok(())
    }
}

/// How finely [0, 1] is cut.
const CELLS: usize = 2_000;

/// Between what bounds the probability lies with 90 %, where it follows the first distribution (parameters alpha and beta) or, with
/// probability `second`, the other.
fn ninety_percent(betas: [[f64; 2]; 2], second: f64) -> [f64; 2] {
    let [first, other] = betas.map(cells);
    let density = |cell: usize| (1.0 - second) * first[cell] + second * other[cell];
    let (mut sum, mut bounds) = (0.0, [None, None]);
    for cell in 0..CELLS {
        sum += density(cell);
        for (bound, at) in bounds.iter_mut().zip([0.05, 0.95]) {
            if bound.is_none() && sum >= at {
                *bound = Some(middle(cell));
            }
        }
    }
    [bounds[0].unwrap_or(0.0), bounds[1].unwrap_or(1.0)]
}

/// How much of a beta distribution is in each cell.
fn cells([alpha, beta]: [f64; 2]) -> Vec<f64> {
    let log = |cell| (alpha - 1.0) * middle(cell).ln() + (beta - 1.0) * (1.0 - middle(cell)).ln();
    let highest = (0..CELLS).map(log).fold(f64::NEG_INFINITY, f64::max);
    let mut cells: Vec<f64> = (0..CELLS).map(|cell| (log(cell) - highest).exp()).collect();
    let sum: f64 = cells.iter().sum();
    cells.iter_mut().for_each(|cell| *cell /= sum);
    cells
}

fn middle(cell: usize) -> f64 {
    (cell as f64 + 0.5) / CELLS as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn near([low, high]: [f64; 2], expected: [f64; 2]) -> bool {
        (low - expected[0]).abs() < 2e-3 && (high - expected[1]).abs() < 2e-3
    }

    /// Against the quantiles of scipy.stats.beta.
    #[test]
    fn the_interval_is_that_of_the_distribution() {
        assert!(near(ninety_percent([[1.0, 1.0]; 2], 0.3), [0.05, 0.95]));
        assert!(near(ninety_percent([[9.0, 3.0]; 2], 0.0), [0.5299, 0.9212]));
        let both = ninety_percent([[50.0, 50.0], [90.0, 10.0]], 0.5);
        assert!(both[0] < 0.47 && both[1] > 0.92, "{both:?}");
        assert_eq!(ninety_percent([[9.0, 3.0], [1.0, 9.0]], 0.0), ninety_percent([[9.0, 3.0]; 2], 0.0));
    }
}
