//! The ways to be taught that are compared.

use alloy_primitives::Address;
use clap::ValueEnum;
use x402_market::selection::{Candidate, Job, Observation, Panel, Selector};

use super::world::MIXTURE;

/// Where the rewards come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub(crate) enum Arm {
    /// An evaluator hired in the market for each group, chosen by what it proved in this student's own audits
    Market,
    /// The same, with up to three evaluators for each group in place of one
    MarketPanel,
    /// As `market`, where other students were there before, whose audits are on record
    MarketPooled,
    /// As `market-panel`, where other students were there before
    MarketPooledPanel,
    /// The one evaluator, of those that the budget affords, with which students end best, chosen in hindsight
    FixedBest,
    /// Anyone
    Random,
    /// Anyone whose card claims the skill
    CardClaims,
    /// Always the same three, averaged
    Mixture,
    /// The student itself: how many of the group's outputs come to the same answer
    SelfJudge,
    /// A regression, trained once on what the market said of outputs of the untrained policy
    RewardModel,
    /// The same regression, trained on the truth about as many outputs
    RewardModelOnTruth,
    /// The truth, but only about the share of groups that is audited
    AuditsOnly,
    /// The truth about every output: what cannot be had
    Truth,
}

impl Arm {
    /// As on the command line.
    pub(crate) fn name(self) -> String {
        self.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
    }

    /// Whether it buys where it likes, by what it has learned from audits.
    pub(crate) const fn is_market(self) -> bool {
        matches!(self, Self::Market | Self::MarketPanel | Self::MarketPooled | Self::MarketPooledPanel)
    }

    /// How many evaluators are hired for a group at most.
    pub(crate) const fn seats(self) -> usize {
        match self {
            Self::MarketPanel | Self::MarketPooledPanel | Self::Mixture => MIXTURE.len(),
            _ => 1,
        }
    }

    /// Whether it needs the truth about audited groups.
    pub(crate) const fn audits(self) -> bool {
        self.is_market() || matches!(self, Self::RewardModel | Self::AuditsOnly)
    }

    /// What it is.
    pub(crate) fn about(self) -> String {
        let value = self.to_possible_value();
        value.and_then(|value| value.get_help().map(ToString::to_string)).unwrap_or_default()
    }
}

/// Hires the same ones, in this order, whatever they do.
pub(crate) struct Always(pub(crate) Vec<Address>);

impl Selector for Always {
    fn select(&mut self, job: &Job, market: &[Candidate], panel: &mut Panel) {
        panel.hired.clear();
        panel.examined.clear();
        let mut left = job.remaining;
        for wanted in &self.0 {
            let Some(position) = market.iter().position(|candidate| candidate.evaluator == *wanted) else { continue };
            let cost = market[position].price.checked_mul(u64::from(job.outputs));
            if let Some(rest) = cost.and_then(|cost| left.checked_sub(cost)).filter(|_| panel.hired.len() < job.seats) {
                left = rest;
                panel.hired.push(position);
            }
        }
    }

    fn learn(&mut self, _: &Observation) {}
}
