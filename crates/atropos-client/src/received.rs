//! Groups as the server hands them out: anybody may have pushed them.

use serde::Deserialize;
use serde_json::{Map, Value};

/// A group that some environment pushed. The server checks little of it: that its fields have these types.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct ReceivedGroup {
    /// Token ids by sequence, prompt and completion.
    pub tokens: Vec<Vec<i64>>,
    /// The same, with -100 in place of what is not to be learned.
    pub masks: Vec<Vec<i64>>,
    /// A score by sequence.
    pub scores: Vec<f64>,
    /// Advantages by sequence and token.
    pub advantages: Option<Vec<Vec<f64>>>,
    /// Log-probabilities by sequence and token under the policy that made them; 1 where masked.
    pub inference_logprobs: Option<Vec<Vec<f64>>>,
    /// The conversation by sequence.
    pub messages: Option<Vec<Vec<Map<String, Value>>>>,
    /// How the answers were made.
    pub generation_params: Option<Map<String, Value>>,
    /// Whatever there is to say about each sequence.
    pub overrides: Option<Vec<Map<String, Value>>>,
    /// Whatever there is to say about the group.
    pub group_overrides: Option<Map<String, Value>>,
    /// Who pushed it.
    pub env_id: Option<u64>,
}

impl ReceivedGroup {
    /// How many sequences it has.
    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Whether it has none.
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    /// What its environment [called](super::ScoredGroup::id) it, if it is one of this crate's.
    pub fn id(&self) -> Option<&str> {
        self.group_overrides.as_ref()?.get(super::group::ID)?.as_str()
    }
}
