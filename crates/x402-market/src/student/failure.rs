//! What evaluators do wrong, and what it says about them.

use std::fmt;

use alloy_primitives::Address;
use serde::{Deserialize, Serialize};
use tower_x402::{
    Network, Usdc,
    client::{PaymentError, Refusal},
};

use crate::{EvaluateError, evidence::CallOutcome};

/// The longest detail that is kept, in characters.
const DETAIL: usize = 200;

/// Why an evaluator that was hired gave no verdict.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(tag = "kind", rename_all = "camelCase")]
#[non_exhaustive]
pub enum Failure {
    /// It did not answer before the deadline. What was signed for it may still be executed.
    #[error("it did not answer in time")]
    #[serde(rename = "late")]
    Timeout,
    /// It could not be reached, or broke off, or its server failed.
    #[error("it could not be reached, or broke off: {detail}")]
    Unreachable {
        /// What happened.
        detail: String,
    },
    /// It answered something that is no evaluation, or took money and refused, or its demand cannot be read or met.
    #[error("it answered no evaluation: {detail}")]
    #[serde(rename = "garbage")]
    InvalidAnswer {
        /// What is wrong with it.
        detail: String,
    },
    /// It demanded another price than its card says. Nothing was signed.
    #[error("it demands {asked} atomic units where its card says {said}")]
    #[serde(rename = "priceLie")]
    PriceMismatch {
        /// By the card.
        said: Usdc,
        /// By the 402, in atomic units.
        asked: String,
    },
    /// It wanted somebody else to be paid than its card says. Nothing was signed.
    #[error("it wants {asked} to be paid where its card says {said}")]
    #[serde(rename = "payeeLie")]
    PayeeMismatch {
        /// By the card.
        said: Address,
        /// By the 402.
        asked: Address,
    },
    /// It wanted to be paid in a token, or on a chain, that its card does not accept. Nothing was signed.
    #[error("it wants {asset} on {network}, which its card does not accept")]
    #[serde(rename = "tokenLie")]
    TokenMismatch {
        /// The chain, by the 402.
        network: Network,
        /// The token, by the 402.
        asset: Address,
    },
    /// Its terms are others than those of the card that was known, as its new card says truly. Nothing was signed, and nothing is held
    /// against it.
    #[error("its terms have changed since its card was read")]
    TermsChanged,
    /// It does not judge this, or not now. Nothing was signed; it counts as no answer.
    #[error("it declined with status {status}: {detail}")]
    Declined {
        /// The status.
        status: u16,
        /// Its words.
        detail: String,
    },
    /// It says that the payment failed; it counts as no answer. If all say so, look at the payer's balance.
    #[error("it says that the payment failed: {detail}")]
    PaymentFailed {
        /// Its reason.
        detail: String,
    },
    /// The payer did not pay: a limit of its budget, a signer or a journal that failed. Nothing is held against the evaluator.
    #[error("no payment was made: {detail}")]
    NotPaid {
        /// Why not.
        detail: String,
    },
}

impl Failure {
    pub(super) fn of(error: &EvaluateError) -> Self {
        let was_paid = error.receipt().is_some_and(|receipt| receipt.outcome.is_paid());
        match error {
            EvaluateError::NotOffered(what) => Self::NotPaid { detail: short(what) },
            EvaluateError::PriceMismatch { said, asked } => {
                Self::PriceMismatch { said: *said, asked: asked.to_string() }
            }
            EvaluateError::PayeeMismatch { said, asked } => Self::PayeeMismatch { said: *said, asked: *asked },
            EvaluateError::TokenMismatch { network, asset } => Self::TokenMismatch { network: *network, asset: *asset },
            EvaluateError::NoOffer => Self::InvalidAnswer { detail: short(error) },
            EvaluateError::Payment(PaymentError::Unanswered { .. }) => Self::Unreachable { detail: short(error) },
            EvaluateError::Payment(
                PaymentError::Unreadable(_)
                | PaymentError::Encode(_)
                | PaymentError::Refused(Refusal::NoPayableOffer { .. } | Refusal::Redirected { .. }),
            ) => Self::InvalidAnswer { detail: short(error) },
            EvaluateError::Payment(_) => Self::NotPaid { detail: short(error) },
            EvaluateError::NotPublic => Self::Unreachable { detail: short(error) },
            EvaluateError::Unreachable { source, .. } => Self::Unreachable { detail: short(source) },
            EvaluateError::Answered { status, detail, .. } => match status {
                400..=499 if error.receipt().is_none() => Self::Declined { status: *status, detail: short(detail) },
                400..=499 if !was_paid => {
                    let reason = error.receipt().and_then(|receipt| receipt.reason.as_deref());
                    Self::PaymentFailed { detail: short(reason.unwrap_or(detail)) }
                }
                500..=599 if !was_paid => Self::Unreachable { detail: short(error) },
                _ => Self::InvalidAnswer { detail: short(error) },
            },
            EvaluateError::InvalidEvaluation { .. } => Self::InvalidAnswer { detail: short(error) },
        }
    }

    /// What the selector is told; `None` if there is nothing to be told.
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

    /// Whether another card might explain it.
    pub(super) const fn may_be_the_cards(&self) -> bool {
        matches!(
            self,
            Self::PriceMismatch { .. }
                | Self::PayeeMismatch { .. }
                | Self::TokenMismatch { .. }
                | Self::Declined { status: 404 | 405 | 410 | 421, .. }
        )
    }
}

fn short(text: &(impl fmt::Display + ?Sized)) -> String {
    text.to_string().chars().take(DETAIL).collect()
}
