//! Groups of scored sequences: those to push, which are checked, and those that were received, which are not.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::{GroupError, Sequence, SequenceMessage};

/// The key of a group's id in `group_overrides`.
const ID: &str = "group_id";

/// The limits on a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct GroupLimits {
    /// The number of sequences.
    pub group_size: usize,
    /// Each sequence must have fewer tokens than this.
    pub max_token_len: u64,
}

impl GroupLimits {
    /// Creates the limits of groups of `group_size` sequences of less than `max_token_len` tokens.
    pub const fn new(group_size: usize, max_token_len: u64) -> Self {
        Self { group_size, max_token_len }
    }
}

/// Several answers to one prompt, with scores that are not all equal.
///
/// A trainer can learn from every group of this type.
///
/// ```
/// use atropos_client::{ByteTokenizer, GroupError, GroupLimits, ScoredGroup, Sequence};
///
/// let limits = GroupLimits::new(2, 64);
/// let answer = |text, score| Sequence::new(&ByteTokenizer::prompt("1 + 1?"), &ByteTokenizer::completion(text), score);
/// assert!(ScoredGroup::new([answer("2", 1.0)?, answer("3", 0.0)?], &limits).is_ok());
/// assert_eq!(ScoredGroup::new([answer("2", 1.0)?, answer("II", 1.0)?], &limits), Err(GroupError::EqualScores));
/// # Ok::<(), GroupError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ScoredGroup {
    tokens: Vec<Vec<u32>>,
    masks: Vec<Vec<i64>>,
    scores: Vec<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    advantages: Option<Vec<Vec<f64>>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    inference_logprobs: Option<Vec<Vec<f64>>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    messages: Option<Vec<Vec<SequenceMessage>>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    generation_params: Option<Map<String, Value>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    overrides: Option<Vec<Map<String, Value>>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    group_overrides: Option<Map<String, Value>>,
}

impl ScoredGroup {
    /// Creates a group within the limits.
    ///
    /// # Errors
    /// See [`GroupError`].
    pub fn new(sequences: impl IntoIterator<Item = Sequence>, limits: &GroupLimits) -> Result<Self, GroupError> {
        let mut sequences: Vec<Sequence> = sequences.into_iter().collect();
        check_limits(sequences.iter().map(Sequence::tokens), limits)?;
        let mut scores = sequences.iter().map(Sequence::score);
        let first = scores.next();
        if scores.all(|score| Some(score) == first) {
            return Err(GroupError::EqualScores);
        }
        Ok(Self {
            scores: sequences.iter().map(Sequence::score).collect(),
            advantages: column("advantages", &mut sequences, |sequence| sequence.advantages.take())?,
            inference_logprobs: column("inference_logprobs", &mut sequences, |sequence| {
                sequence.inference_logprobs.take()
            })?,
            messages: column("messages", &mut sequences, |sequence| sequence.messages.take())?,
            generation_params: None,
            overrides: column("overrides", &mut sequences, |sequence| sequence.overrides.take())?,
            group_overrides: None,
            masks: sequences.iter_mut().map(|sequence| std::mem::take(&mut sequence.masks)).collect(),
            tokens: sequences.into_iter().map(|sequence| sequence.tokens).collect(),
        })
    }

    /// Sets an id that no other group has. [`Environment::is_latest`](super::Environment::is_latest) finds the group by it after a push
    /// without an answer. It is sent as `group_id` in `group_overrides`.
    #[must_use]
    pub fn with_id(mut self, id: impl Into<String>) -> Self {
        self.group_overrides.get_or_insert_default().insert(ID.to_owned(), Value::String(id.into()));
        self
    }

    /// Adds further fields of the group, beside its id.
    #[must_use]
    pub fn with_overrides(mut self, overrides: Map<String, Value>) -> Self {
        self.group_overrides.get_or_insert_default().extend(overrides);
        self
    }

    /// Sets how the answers were generated: temperature, model and the like.
    #[must_use]
    pub fn with_generation_params(mut self, params: Map<String, Value>) -> Self {
        self.generation_params = Some(params);
        self
    }

    /// Returns the id, if it has one.
    pub fn id(&self) -> Option<&str> {
        self.group_overrides.as_ref()?.get(ID)?.as_str()
    }

    /// Returns the scores, in order.
    pub fn scores(&self) -> &[f64] {
        &self.scores
    }

    /// Checks the group against the limits of an environment.
    ///
    /// # Errors
    /// [`GroupError::Size`] or [`GroupError::TooLong`].
    pub fn check(&self, limits: &GroupLimits) -> Result<(), GroupError> {
        check_limits(self.tokens.iter().map(Vec::len), limits)
    }
}

fn check_limits(lengths: impl ExactSizeIterator<Item = usize>, limits: &GroupLimits) -> Result<(), GroupError> {
    if lengths.len() != limits.group_size {
        return Err(GroupError::Size { expected: limits.group_size, found: lengths.len() });
    }
    for (at, tokens) in lengths.enumerate() {
        if tokens as u64 >= limits.max_token_len {
            return Err(GroupError::TooLong { at, tokens, limit: limits.max_token_len });
        }
    }
    Ok(())
}

/// Takes a field out of all sequences, which must all have it or all be without.
fn column<T>(
    name: &'static str,
    sequences: &mut [Sequence],
    take: impl FnMut(&mut Sequence) -> Option<T>,
) -> Result<Option<Vec<T>>, GroupError> {
    let column: Vec<T> = sequences.iter_mut().filter_map(take).collect();
    match column.len() {
        0 => Ok(None),
        found if found == sequences.len() => Ok(Some(column)),
        _ => Err(GroupError::Incomplete(name)),
    }
}

/// A group that an environment pushed. The server checks only the types of its fields, so anything may be in them.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct ReceivedGroup {
    /// The token ids of each sequence, prompt and completion.
    pub tokens: Vec<Vec<i64>>,
    /// The token ids of each sequence, with -100 for those that are not to be learned.
    pub masks: Vec<Vec<i64>>,
    /// The score of each sequence.
    pub scores: Vec<f64>,
    /// The advantage of each token of each sequence.
    pub advantages: Option<Vec<Vec<f64>>>,
    /// The log-probability with which each token of each sequence was sampled; 1 if masked.
    pub inference_logprobs: Option<Vec<Vec<f64>>>,
    /// The chat of each sequence.
    pub messages: Option<Vec<Vec<Map<String, Value>>>>,
    /// How the answers were generated.
    pub generation_params: Option<Map<String, Value>>,
    /// Further fields of each sequence.
    pub overrides: Option<Vec<Map<String, Value>>>,
    /// Further fields of the group.
    pub group_overrides: Option<Map<String, Value>>,
    /// The id of the environment that pushed it.
    pub env_id: Option<u64>,
}

impl ReceivedGroup {
    /// Returns the number of sequences.
    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Returns `true` if it has no sequences.
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    /// Returns its [id](ScoredGroup::id), if it has one.
    pub fn id(&self) -> Option<&str> {
        self.group_overrides.as_ref()?.get(ID)?.as_str()
    }
}
