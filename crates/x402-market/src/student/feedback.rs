//! The result of a submission: the verdicts of a panel, the evaluators it hired, and why some of them failed.

use std::{fmt, ops::Range};

use alloy_primitives::{Address, B256};
use serde::{Deserialize, Serialize};
use tower_x402::{
    Network, Usdc,
    client::{self, PaymentError, Receipt, Refusal},
};
use url::Url;

use super::{sent::Sent, spending::sum};
use crate::{
    Confidence, EvaluateError, EvaluatorId, Reward, Score, TaskId, Verdict,
    evidence::{CallOutcome, EvidencePayment},
};

/// The longest detail of a [`Failure`], in characters.
const MAX_DETAIL: usize = 200;

/// The verdicts of a panel on a submission, and what they cost.
///
/// Failing evaluators are no error: if none gave a verdict of any weight, [`verdict`](OutputFeedback::verdict) is `None` and `hires` say
/// why.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[non_exhaustive]
pub struct Feedback {
    /// The id of the student's task.
    pub task: TaskId,
    /// One for each output, in order.
    pub outputs: Vec<OutputFeedback>,
    /// The evaluators that were asked, in the order in which they were hired, replacements included. Empty if no evaluator was worth its
    /// price, or if all outputs are the same and there are no anchors.
    pub hires: Vec<Hire>,
    /// The number of evaluations in this skill that the student has audited before. Without audits, evaluators are chosen by their prices
    /// and claims, and by reports that the student cannot check.
    #[serde(default)]
    pub audits: u64,
    /// The amount paid, by the receipts of the evaluators.
    pub paid: Usdc,
    /// The sum of the signed payments whose outcome is unknown. It stays reserved in the budget.
    pub held: Usdc,
    /// What was sent; `None` if all outputs are the same.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) sent: Option<Sent>,
}

impl Feedback {
    /// Returns a reward for each output, in order. `None` if there is nothing to learn: an output has no verdict, or all have the same.
    ///
    /// Within a group, rewards are the members' scores, each standardized to mean 0 and standard deviation 1, and averaged by weight.
    pub fn rewards(&self) -> Option<Vec<f64>> {
        let rewards: Vec<_> =
            self.outputs.iter().map(|output| Some(output.verdict?.reward.get())).collect::<Option<_>>()?;
        let is_uniform = rewards.len() > 1 && rewards.iter().all(|reward| *reward == rewards[0]);
        (!is_uniform).then_some(rewards)
    }

    /// Returns how many outputs have a verdict.
    pub fn judged_outputs(&self) -> usize {
        self.outputs.iter().filter(|output| output.verdict.is_some()).count()
    }
}

/// The verdicts of a panel on one output.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[non_exhaustive]
pub struct OutputFeedback {
    /// The aggregate; `None` if no member answered that is expected to be worth more than a coin.
    #[serde(rename = "judged")]
    pub verdict: Option<AggregateVerdict>,
    /// The verdict of each member, the one with the greatest weight first.
    #[serde(rename = "opinions")]
    pub members: Vec<PanelVerdict>,
}

/// One verdict made of several.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[non_exhaustive]
pub struct AggregateVerdict {
    /// The weighted mean of the members' scores.
    pub score: Score,
    /// The weighted mean of the members' scores, each standardized within the group. For a single output, the score on a scale from -1 to 1.
    /// Rewards given by evaluators are on scales of their own, and stay in their verdicts.
    pub reward: Reward,
    /// The weighted mean of the confidences that members state.
    pub confidence: Confidence,
}

/// The verdict of one panel member on one output.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[non_exhaustive]
pub struct PanelVerdict {
    /// The address that is paid.
    pub evaluator: Address,
    /// The name that the evaluator gives itself.
    #[serde(rename = "by")]
    pub evaluator_id: EvaluatorId,
    /// Its share of the aggregate, from 0 to 1. The shares add up to 1, or to 0 if no verdict has any weight.
    pub weight: f64,
    /// The verdict as it was received.
    pub verdict: Verdict,
}

/// An evaluator that was asked.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[non_exhaustive]
pub struct Hire {
    /// The address that is paid.
    pub evaluator: Address,
    /// The name on its card.
    pub name: String,
    /// The URL that named it.
    pub url: Url,
    /// One payment for each part of the submission. Empty after a [timeout](Failure::Timeout): its payments appear in the
    /// [spending report](super::Student::spending) once the call has ended.
    pub payments: Vec<CallPayment>,
    /// Why some or all of its verdicts are missing.
    pub failure: Option<Failure>,
    /// What an audit needs, one for each part that was judged.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) judged: Vec<Judged>,
}

/// The scores of a part of what was sent, and the payment under which they are on record.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Judged {
    pub(super) range: Range<usize>,
    pub(super) scores: Vec<Score>,
    pub(super) payment: Option<EvidencePayment>,
    /// The id of the task on the wire.
    #[serde(default)]
    pub(super) alias: TaskId,
}

impl Hire {
    /// Returns the amount paid, and the sum of the payments whose outcome is unknown.
    pub(super) fn sums(&self) -> (Usdc, Usdc) {
        let of = |is_paid: bool| {
            let payments = self.payments.iter().filter(move |payment| payment.outcome.is_paid() == is_paid);
            sum(payments.map(|payment| payment.amount))
        };
        (of(true), of(false))
    }
}

/// A payment to an evaluator, and what became of it. It holds no secret.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[non_exhaustive]
pub struct CallPayment {
    /// The amount signed.
    pub amount: Usdc,
    /// The result of the payment.
    pub outcome: client::PaymentOutcome,
    /// The transaction named in the receipt.
    pub transaction: Option<B256>,
    /// The chain.
    pub network: Network,
    /// The address that pays.
    pub payer: Address,
    /// The nonce of the authorization, or the voucher's digest. Together with payer, token and chain it identifies the payment.
    pub nonce: B256,
}

impl From<&Receipt> for CallPayment {
    fn from(receipt: &Receipt) -> Self {
        let Receipt { outcome, transaction, network, amount, payer, nonce, .. } = *receipt;
        Self { amount, outcome, transaction, network, payer, nonce }
    }
}

/// The reason why an evaluator that was hired gave no verdict.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(tag = "kind", rename_all = "camelCase")]
#[non_exhaustive]
pub enum Failure {
    /// The evaluator did not answer before the deadline. A payment signed for it may still be executed.
    #[error("the evaluator did not answer in time")]
    #[serde(rename = "late")]
    Timeout,
    /// The evaluator could not be reached, broke off its answer, or failed.
    #[error("the evaluator could not be reached or did not finish its answer: {detail}")]
    Unreachable {
        /// The error.
        detail: String,
    },
    /// The evaluator's answer is no valid evaluation, it was paid and refused, or its 402 has no usable offer.
    #[error("the evaluator's answer is invalid: {detail}")]
    #[serde(rename = "garbage")]
    InvalidAnswer {
        /// The error.
        detail: String,
    },
    /// The evaluator demanded another price than on its card. Nothing was signed.
    #[error("the evaluator demands {demanded} atomic units, but its card says {expected}")]
    #[serde(rename = "priceLie")]
    PriceMismatch {
        /// The price by the card.
        #[serde(rename = "said")]
        expected: Usdc,
        /// The price in the 402, in atomic units.
        #[serde(rename = "asked")]
        demanded: String,
    },
    /// The evaluator demanded a payment to another address than on its card. Nothing was signed.
    #[error("the evaluator demands a payment to {demanded}, but its card says {expected}")]
    #[serde(rename = "payeeLie")]
    PayeeMismatch {
        /// The payee by the card.
        #[serde(rename = "said")]
        expected: Address,
        /// The payee in the 402.
        #[serde(rename = "asked")]
        demanded: Address,
    },
    /// The evaluator demanded a token that is not on its card. Nothing was signed.
    #[error("the evaluator demands {asset} on {network}, which is not on its card")]
    #[serde(rename = "tokenLie")]
    TokenMismatch {
        /// The chain in the 402.
        network: Network,
        /// The token in the 402.
        asset: Address,
    },
    /// The evaluator's terms changed after its card was read, and its new card says so. Nothing was signed; the selector does not count it
    /// as a failure.
    #[error("the evaluator's terms have changed since its card was read")]
    TermsChanged,
    /// The evaluator declined the submission. Nothing was signed; the selector counts it as a timeout.
    #[error("the evaluator declined with status {status}: {detail}")]
    Declined {
        /// The HTTP status.
        status: u16,
        /// The reason given.
        detail: String,
    },
    /// The evaluator says that the payment failed; the selector counts it as a timeout. If all evaluators say so, check the payer's
    /// balance.
    #[error("the evaluator says that the payment failed: {detail}")]
    PaymentFailed {
        /// The reason given.
        detail: String,
    },
    /// The payer did not pay: its budget, signer or journal refused. The selector does not count it as a failure of the evaluator.
    #[error("no payment was made: {detail}")]
    NotPaid {
        /// The reason.
        detail: String,
    },
}

impl Failure {
    pub(super) fn of(error: &EvaluateError) -> Self {
        let was_paid = error.receipt().is_some_and(|receipt| receipt.outcome.is_paid());
        let detail = shorten(error);
        match error {
            EvaluateError::NotOffered(what) => Self::NotPaid { detail: shorten(what) },
            EvaluateError::PriceMismatch { expected, demanded } => {
                Self::PriceMismatch { expected: *expected, demanded: demanded.to_string() }
            }
            EvaluateError::PayeeMismatch { expected, demanded } => {
                Self::PayeeMismatch { expected: *expected, demanded: *demanded }
            }
            EvaluateError::TokenMismatch { network, asset } => Self::TokenMismatch { network: *network, asset: *asset },
            EvaluateError::NotPublic | EvaluateError::Payment(PaymentError::Unanswered { .. }) => {
                Self::Unreachable { detail }
            }
            EvaluateError::NoOffer
            | EvaluateError::InvalidEvaluation { .. }
            | EvaluateError::Payment(
                PaymentError::Unreadable(_)
                | PaymentError::Encode(_)
                | PaymentError::Refused(Refusal::NoPayableOffer { .. } | Refusal::Redirected { .. }),
            ) => Self::InvalidAnswer { detail },
            EvaluateError::Payment(_) => Self::NotPaid { detail },
            EvaluateError::Unreachable { source, .. } => Self::Unreachable { detail: shorten(source) },
            EvaluateError::Answered { status, detail: told, receipt } => match (status, receipt) {
                (400..=499, None) => Self::Declined { status: *status, detail: shorten(told) },
                (400..=499, Some(receipt)) if !was_paid => {
                    Self::PaymentFailed { detail: shorten(receipt.reason.as_deref().unwrap_or(told)) }
                }
                (500..=599, _) if !was_paid => Self::Unreachable { detail },
                _ => Self::InvalidAnswer { detail },
            },
        }
    }

    /// Returns the outcome to record; `None` if the evaluator is not to blame.
    pub(super) const fn outcome(&self) -> Option<CallOutcome> {
        match self {
            Self::Timeout | Self::Unreachable { .. } | Self::Declined { .. } | Self::PaymentFailed { .. } => {
                Some(CallOutcome::Timeout)
            }
            Self::InvalidAnswer { .. } => Some(CallOutcome::InvalidAnswer),
            Self::PriceMismatch { .. } => Some(CallOutcome::PriceMismatch),
            Self::PayeeMismatch { .. } => Some(CallOutcome::PayeeMismatch),
            Self::TokenMismatch { .. } => Some(CallOutcome::TokenMismatch),
            Self::TermsChanged | Self::NotPaid { .. } => None,
        }
    }

    /// Returns `true` if a newer card may explain the failure.
    pub(super) const fn may_be_outdated_card(&self) -> bool {
        matches!(
            self,
            Self::PriceMismatch { .. }
                | Self::PayeeMismatch { .. }
                | Self::TokenMismatch { .. }
                | Self::Declined { status: 404 | 405 | 410 | 421, .. }
        )
    }
}

fn shorten(text: &(impl fmt::Display + ?Sized)) -> String {
    text.to_string().chars().take(MAX_DETAIL).collect()
}
