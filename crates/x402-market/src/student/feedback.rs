//! What the student gets for its money.

use alloy_primitives::{Address, B256};
use serde::{Deserialize, Serialize};
use tower_x402::{
    Network, Usdc,
    client::{self, Receipt},
};
use url::Url;

use super::Failure;
use crate::{Confidence, EvaluatorId, Preference, Reward, Score, TaskId, Verdict};

/// What a panel said about a submission, and what it cost.
///
/// An episode never fails because evaluators do: where nobody gave a verdict that is worth anything, [`verdict`](OutputFeedback::verdict)
/// is `None`, and `hires` say why.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[non_exhaustive]
pub struct Feedback {
    /// The task's id, as the student calls it.
    pub task: TaskId,
    /// For each output, in order.
    pub outputs: Vec<OutputFeedback>,
    /// Everyone who was asked, in the order in which they were hired; replacements for those who failed are among them. Empty if
    /// keeping the money was worth more.
    pub hires: Vec<Hire>,
    /// What they were paid, as they say.
    pub paid: Usdc,
    /// What was signed besides, without a proof that it was paid or never will be: it stays reserved in the budget.
    pub held: Usdc,
}

/// What is thought of one output.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[non_exhaustive]
pub struct OutputFeedback {
    /// What the panel says as a whole; `None` if nobody answered whose word is worth more than a coin's.
    #[serde(rename = "judged")]
    pub verdict: Option<AggregateVerdict>,
    /// What each member says, whoever is believed most first.
    #[serde(rename = "opinions")]
    pub members: Vec<PanelVerdict>,
}

/// A verdict of several.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[non_exhaustive]
pub struct AggregateVerdict {
    /// How good the output is: the members' scores on a common scale, weighted by how much each is believed.
    pub score: Score,
    /// The score, stretched to -1 to 1. Rewards that evaluators give are on scales of their own, and stand with their verdicts.
    pub reward: Reward,
    /// How likely the score is on the right side of one half, by what is believed of the members, not by what they say of
    /// themselves alone.
    pub confidence: Confidence,
}

/// What one evaluator says about one output.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[non_exhaustive]
pub struct PanelVerdict {
    /// Who is paid for it.
    pub evaluator: Address,
    /// What it calls itself.
    #[serde(rename = "by")]
    pub evaluator_id: EvaluatorId,
    /// Its share of what the panel says: from 0 to 1, all together 1, unless nobody's word is worth anything.
    pub weight: f64,
    /// Its score on the common scale.
    pub calibrated: Score,
    /// What it says.
    pub verdict: Verdict,
}

/// An evaluator that was asked.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[non_exhaustive]
pub struct Hire {
    /// Who is paid.
    pub evaluator: Address,
    /// Its name, by its card.
    pub name: String,
    /// Where it is.
    pub url: Url,
    /// What was signed for it, one payment for each part of the submission. Of one that is late this is not known yet, and empty: it is in
    /// the [books](super::Student::spending) when it is known.
    pub payments: Vec<CallPayment>,
    /// Why some or all of its verdicts are missing; `None` if it did what it was hired for.
    pub failure: Option<Failure>,
}

/// What was signed, and what became of it. No secret is in it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[non_exhaustive]
pub struct CallPayment {
    /// How much.
    pub amount: Usdc,
    /// How it ended.
    pub outcome: client::PaymentOutcome,
    /// The transaction that the evaluator names.
    pub transaction: Option<B256>,
    /// The chain.
    pub network: Network,
    /// Who pays.
    pub payer: Address,
    /// The authorization's nonce; with payer, token and network it identifies the payment.
    pub nonce: B256,
}

impl Feedback {
    /// Of a pair, which one the panel prefers.
    pub fn preference(&self) -> Option<Preference> {
        let [OutputFeedback { verdict: Some(first), .. }, OutputFeedback { verdict: Some(second), .. }] =
            &*self.outputs
        else {
            return None;
        };
        Some(match first.score.partial_cmp(&second.score) {
            Some(std::cmp::Ordering::Greater) => Preference::First,
            Some(std::cmp::Ordering::Less) => Preference::Second,
            _ => Preference::Neither,
        })
    }

    /// How many outputs have a verdict that is worth something.
    pub fn judged_outputs(&self) -> usize {
        self.outputs.iter().filter(|output| output.verdict.is_some()).count()
    }
}

impl Hire {
    /// What was paid, and what was signed without proof.
    pub(super) fn sums(&self) -> (Usdc, Usdc) {
        let mut sums = (Usdc::ZERO, Usdc::ZERO);
        for payment in &self.payments {
            let sum = if payment.outcome.is_paid() { &mut sums.0 } else { &mut sums.1 };
            *sum = sum.checked_add(payment.amount).unwrap_or(Usdc::MAX);
        }
        sums
    }
}

impl From<&Receipt> for CallPayment {
    fn from(receipt: &Receipt) -> Self {
        let Receipt { outcome, transaction, network, amount, payer, nonce, .. } = *receipt;
        Self { amount, outcome, transaction, network, payer, nonce }
    }
}
