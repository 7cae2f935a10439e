//! The arms of the experiment: the ways to be taught.

use alloy_primitives::Address;
use clap::ValueEnum;
use x402_market::selection::{Candidate, Job, Observation, Selector};

use super::world::MIXTURE;

/// The source of the rewards.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub(crate) enum Arm {
    /// One evaluator for each group, hired on the market by this student's own audits
    Market,
    /// As `market`, with up to three evaluators for each group
    MarketPanel,
    /// As `market`, with the audits of earlier students
    MarketPooled,
    /// As `market-panel`, with the audits of earlier students
    MarketPooledPanel,
    /// Always the affordable evaluator with which students end best, known in hindsight
    FixedBest,
    /// Any evaluator, at random
    Random,
    /// Any evaluator whose card claims the skill
    CardClaims,
    /// Always the same three evaluators, averaged
    Mixture,
    /// The student itself: the share of the group that comes to the same answer
    SelfJudge,
    /// A regression, trained once on verdicts of the market about outputs of the untrained policy
    RewardModel,
    /// The same regression, trained on the truth about as many outputs
    RewardModelOnTruth,
    /// The truth about the audited groups only
    AuditsOnly,
    /// The truth about every output: the upper bound
    Truth,
}

impl Arm {
    /// Returns the name on the command line.
    pub(crate) fn name(self) -> String {
        self.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
    }

    /// Returns `true` if the arm hires by audits.
    pub(crate) const fn is_market(self) -> bool {
        matches!(self, Self::Market | Self::MarketPanel | Self::MarketPooled | Self::MarketPooledPanel)
    }

    /// Returns how many evaluators are hired for a group at most.
    pub(crate) const fn seats(self) -> usize {
        match self {
            Self::MarketPanel | Self::MarketPooledPanel | Self::Mixture => MIXTURE.len(),
            _ => 1,
        }
    }

    /// Returns `true` if the arm needs the truth about audited groups.
    pub(crate) const fn audits(self) -> bool {
        self.is_market() || matches!(self, Self::RewardModel | Self::AuditsOnly)
    }

    /// Returns a description.
    pub(crate) fn about(self) -> String {
        let value = self.to_possible_value();
        value.and_then(|value| value.get_help().map(ToString::to_string)).unwrap_or_default()
    }
}

/// A selector that always hires the same evaluators, in this order.
pub(crate) struct Always(pub(crate) Vec<Address>);

impl Selector for Always {
    fn select(&mut self, job: &Job, market: &[Candidate]) -> Vec<usize> {
        let position = |wanted: &Address| market.iter().position(|candidate| candidate.evaluator == *wanted);
        job.hire(market, self.0.iter().filter_map(position))
    }

    fn learn(&mut self, _: &Observation) {}
}
