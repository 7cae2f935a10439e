//! What a directory answers, as JSON.

use alloy_primitives::Address;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use super::SignedEvidence;

/// A voice that a directory admitted, with where it found the payment. Whoever reads it can check both: the signature in `said`, and
/// the transaction that `said` names.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Admitted {
    /// Its number in the directory; later ones are larger.
    pub id: u64,
    /// What was said, with the transaction that proves the payment.
    #[serde(flatten)]
    pub said: SignedEvidence,
    /// The block of the payment.
    pub block: u64,
    /// When that was, in seconds since the Unix epoch.
    pub block_time: u64,
}

/// Some of the voices.
#[derive(Serialize, Deserialize)]
pub(super) struct VoicePage {
    pub(super) voices: Vec<Admitted>,
    /// What to ask for next; the last voice's number, or what was asked for.
    pub(super) after: u64,
    /// Whether there are further ones now.
    pub(super) more: bool,
}

/// An evaluator's card.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct CardEntry {
    pub(super) id: u64,
    /// Where it was fetched.
    pub(super) url: String,
    pub(super) pay_to: Address,
    /// Seconds since the Unix epoch.
    pub(super) first_seen: u64,
    pub(super) last_seen: u64,
    /// As the evaluator signed it.
    pub(super) card: Box<RawValue>,
}

/// Some of the cards.
#[derive(Serialize, Deserialize)]
pub(super) struct CardPage {
    pub(super) cards: Vec<CardEntry>,
    pub(super) after: u64,
    pub(super) more: bool,
}

/// A request to list an evaluator.
#[derive(Serialize, Deserialize)]
pub(super) struct ListMe {
    pub(super) url: String,
}

/// Why something was not done.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Problem {
    pub(super) error: String,
    #[serde(default)]
    pub(super) detail: String,
}
