//! What a reader can expect of evaluators, and why, for people and programs.

use std::{
    collections::{BTreeMap, HashMap},
    fmt,
};

use alloy_primitives::Address;
use serde::Serialize;

use super::apply_report;
use crate::interval::ninety_percent;
use x402_market::{
    evidence::{Evidence, EvidenceLog, Pairs},
    selection::{Selector as _, Skills, Thompson, ThompsonConfig},
};

/// How many payers a standing lists.
const MAX_REPORTERS: usize = 10;

/// A table of all evaluators and skills of which a reader knows something. `Display` writes it for people.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct ReputationReport {
    /// The standings, ordered by evaluator and skill.
    pub standings: Vec<Standing>,
}

/// The standing of an evaluator in a skill, as a reader sees it.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
#[non_exhaustive]
pub struct Standing {
    /// The evaluator.
    pub evaluator: Address,
    /// The skill.
    pub skill: String,
    /// The expected [worth](x402_market::evidence::Pairs::worth), from -1 to 1.
    pub worth: f64,
    /// The interval that contains the worth with 90 %.
    pub interval: [f64; 2],
    /// The results of the reader's own audits.
    pub audits: Tally,
    /// The results that others report, unweighted. What an evaluator reports about itself is left out.
    #[serde(rename = "said")]
    pub reported: Tally,
    /// The number of payers that report.
    pub payers: usize,
    /// The probability that the reports are genuine: that of the most trusted payer. The worth mixes the estimate with the reports and the one
    /// without them, with this weight.
    pub trusted: f64,
    /// The payers with the most reports, at most ten.
    #[serde(rename = "opinions")]
    pub reporters: Vec<ReportedStats>,
}

/// Counts of audited evaluations, and of the pairs in them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Tally {
    /// Audited evaluations.
    pub evaluations: u32,
    /// Pairs of a good and a bad output.
    pub pairs: u32,
    /// Pairs in which the good output has the higher score.
    pub right: u32,
    /// Pairs in which the bad output has the higher score.
    pub wrong: u32,
}

/// The reports of one payer about an evaluator in a skill, and the trust in that payer.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
#[non_exhaustive]
pub struct ReportedStats {
    /// The payer.
    pub payer: Address,
    /// The reported results.
    #[serde(flatten)]
    pub reported: Tally,
    /// The probability that this payer's reports, here and elsewhere, are genuine.
    pub trust: f64,
    /// The reason for this trust.
    #[serde(rename = "why")]
    pub reason: TrustReason,
}

/// The reason why a payer is trusted or not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "kind", rename_all = "camelCase")]
#[non_exhaustive]
pub enum TrustReason {
    /// The payer reports about no evaluator that the reader has audited.
    Unknown,
    /// The payer's reports agree with this many of the reader's audits.
    Agrees {
        /// How many.
        audits: u32,
    },
    /// The payer's reports disagree with this many of the reader's audits.
    Disagrees {
        /// How many.
        audits: u32,
    },
}

type Cells = BTreeMap<(Address, String), Cell>;

#[derive(Default)]
struct Cell {
    audits: Tally,
    reported: HashMap<Address, Tally>,
}

impl ReputationReport {
    pub(super) fn of(own: &EvidenceLog, others: &EvidenceLog, me: &[Address], skills: &Skills) -> Self {
        let config = ThompsonConfig::default();
        let prior_trust = f64::from(config.initial_trust);
        let mut selector = Thompson::new(config, 0);
        let mut cells = Cells::new();
        // In the order of time, as a selector would have learned it.
        let mut all: Vec<(bool, Evidence)> = Vec::new();
        own.for_each(|evidence| {
            let is_mine = evidence.payment.is_none_or(|payment| me.contains(&payment.payer));
            all.push((is_mine, evidence.clone()));
        });
        others.for_each(|evidence| all.push((false, evidence.clone())));
        all.sort_by_key(|(_, evidence)| evidence.at);
        for (is_mine, evidence) in all {
            let Some(skill) = skills.get(&evidence.skill) else { continue };
            let evaluator = evidence.evaluator;
            if is_mine {
                selector.learn(&evidence.observation(skill));
            } else {
                apply_report(&mut selector, skills, &evidence);
            }
            let Some(pairs) = evidence.outcome.pairs() else { continue };
            let reporter = evidence.payment.map(|payment| payment.payer);
            if !is_mine && reporter.is_none_or(|payer| payer == evaluator) {
                continue;
            }
            let cell = cells.entry((evaluator, evidence.skill)).or_default();
            match reporter {
                Some(payer) if !is_mine => cell.reported.entry(payer).or_default().count(pairs),
                _ => cell.audits.count(pairs),
            }
        }
        let compared = compared(&cells);
        let standings = cells.into_iter().filter_map(|((evaluator, skill), cell)| {
            let number = skills.get(&skill)?;
            let belief = selector.belief(evaluator, number)?;
            let trusted = f64::from(belief.trust);
            let mut reporters: Vec<ReportedStats> = cell
                .reported
                .iter()
                .map(|(payer, reported)| {
                    let trust = selector.trust(*payer);
                    let reason = match compared.get(payer) {
                        None => TrustReason::Unknown,
                        Some(audits) if trust >= prior_trust => TrustReason::Agrees { audits: *audits },
                        Some(audits) => TrustReason::Disagrees { audits: *audits },
                    };
                    ReportedStats { payer: *payer, reported: *reported, trust, reason }
                })
                .collect();
            let mut reported = Tally::default();
            for reporter in &reporters {
                reported.add(reporter.reported);
            }
            reporters.sort_by_key(|reporter| (std::cmp::Reverse(reporter.reported.evaluations), reporter.payer));
            reporters.truncate(MAX_REPORTERS);
            Some(Standing {
                evaluator,
                worth: f64::from(belief.mean()),
                interval: ninety_percent([belief.own, belief.with_reports], trusted).map(|share| 2.0 * share - 1.0),
                audits: cell.audits,
                reported,
                payers: cell.reported.len(),
                trusted: if cell.reported.is_empty() { 0.0 } else { trusted },
                reporters,
                skill,
            })
        });
        Self { standings: standings.collect() }
    }

    /// Returns the standing of this evaluator in this skill, if anything is known of it.
    pub fn standing(&self, evaluator: Address, skill: &str) -> Option<&Standing> {
        self.standings.iter().find(|standing| standing.evaluator == evaluator && standing.skill == skill)
    }
}

/// Counts the reader's audits with which each payer's reports can be compared.
fn compared(cells: &Cells) -> HashMap<Address, u32> {
    let mut compared = HashMap::new();
    for cell in cells.values().filter(|cell| cell.audits.evaluations > 0) {
        for payer in cell.reported.keys() {
            *compared.entry(*payer).or_default() += cell.audits.evaluations;
        }
    }
    compared
}

impl Tally {
    const fn count(&mut self, pairs: Pairs) {
        let (pairs, right, wrong) = (pairs.all(), pairs.right(), pairs.wrong());
        self.add(Self { evaluations: 1, pairs, right, wrong });
    }

    const fn add(&mut self, other: Self) {
        self.evaluations = self.evaluations.saturating_add(other.evaluations);
        self.pairs = self.pairs.saturating_add(other.pairs);
        self.right = self.right.saturating_add(other.right);
        self.wrong = self.wrong.saturating_add(other.wrong);
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({} pairs: {} right, {} wrong)", self.evaluations, self.pairs, self.right, self.wrong)
    }
}

impl fmt::Display for TrustReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unknown => f.write_str("no audits to compare with"),
            Self::Agrees { audits } => write!(f, "agrees with {audits} audits"),
            Self::Disagrees { audits } => write!(f, "disagrees with {audits} audits"),
        }
    }
}

impl fmt::Display for ReputationReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for standing in &self.standings {
            let Standing { evaluator, skill, worth, interval: [low, high], audits, reported, payers, trusted, .. } =
                standing;
            writeln!(
                f,
                "{evaluator} {skill}: worth {worth:.2} ({low:.2} to {high:.2}), own audits {audits}, others {reported} by {payers}, trusted {:.0} %",
                100.0 * trusted,
            )?;
            for ReportedStats { payer, reported, trust, reason } in &standing.reporters {
                writeln!(f, "    {payer} reports {reported}, trusted {:.0} %: {reason}", 100.0 * trust)?;
            }
        }
        Ok(())
    }
}
