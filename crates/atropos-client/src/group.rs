//! Groups that a trainer can learn from.

use serde::Serialize;
use serde_json::{Map, Value};

use super::{Message, Sequence};

/// Under which key of `group_overrides` a group's id is.
pub(super) const ID: &str = "group_id";

/// What a group must keep to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupLimits {
    /// How many sequences it has.
    pub group_size: usize,
    /// Each has fewer tokens than this.
    pub max_token_len: u64,
}

/// Several answers to one prompt, with scores that differ.
///
/// ```
/// use atropos_client::{Bytes, GroupError, GroupLimits, ScoredGroup, Sequence};
///
/// let limits = GroupLimits { group_size: 2, max_token_len: 64 };
/// let answer = |text, score| Sequence::new(&Bytes::prompt("1 + 1?"), &Bytes::completion(text), score);
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
    messages: Option<Vec<Vec<Message>>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    generation_params: Option<Map<String, Value>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    overrides: Option<Vec<Map<String, Value>>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    group_overrides: Option<Map<String, Value>>,
}

/// Why a trainer could not learn from a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GroupError {
    /// The server keeps groups of another size back until they can be joined to one of the right size.
    #[error("a group of {found} sequences, where the environment has announced groups of {expected}")]
    Size {
        /// What the environment registered with.
        expected: usize,
        /// What there is.
        found: usize,
    },
    /// A sequence is too long: leave the group out, or shorten the answers.
    #[error("sequence {at} has {tokens} tokens; fewer than {limit} are taken")]
    TooLong {
        /// Which, from 0.
        at: usize,
        /// How many it has.
        tokens: usize,
        /// The limit.
        limit: u64,
    },
    /// All scores are the same, so that no answer is better than another: leave the group out.
    #[error("all scores are equal: there is nothing to learn from the group")]
    EqualScores,
    /// The masks are not those of the tokens.
    #[error("masks are the token's id where it is to be learned, and -100 elsewhere")]
    Masks,
    /// No token is to be learned.
    #[error("a sequence without a completion has nothing to learn")]
    NothingToLearn,
    /// Infinite, or not a number.
    #[error("a {0} is not a finite number")]
    NotFinite(&'static str),
    /// More or fewer than there are tokens to learn.
    #[error("{0} must be as many as tokens to learn")]
    Length(&'static str),
    /// Some sequences have it and others do not.
    #[error("{0} must be there for all sequences or for none")]
    Incomplete(&'static str),
}

impl ScoredGroup {
    /// Makes a group of the right size, of sequences that are short enough and whose scores are not all the same.
    ///
    /// # Errors
    /// [`GroupError`].
    pub fn new(sequences: impl IntoIterator<Item = Sequence>, limits: &GroupLimits) -> Result<Self, GroupError> {
        let sequences: Vec<Sequence> = sequences.into_iter().collect();
        check(&sequences, limits)?;
        let mut columns = Columns::default();
        let count = sequences.len();
        for sequence in sequences {
            columns.tokens.push(sequence.tokens);
            columns.masks.push(sequence.masks);
            columns.scores.push(sequence.score);
            columns.advantages.extend(sequence.advantages);
            columns.inference_logprobs.extend(sequence.inference_logprobs);
            columns.messages.extend(sequence.messages);
            columns.overrides.extend(sequence.overrides);
        }
        Ok(Self {
            tokens: columns.tokens,
            masks: columns.masks,
            scores: columns.scores,
            advantages: all_or_none("advantages", columns.advantages, count)?,
            inference_logprobs: all_or_none("inference_logprobs", columns.inference_logprobs, count)?,
            messages: all_or_none("messages", columns.messages, count)?,
            generation_params: None,
            overrides: all_or_none("overrides", columns.overrides, count)?,
            group_overrides: None,
        })
    }

    /// With a name of its own, by which it is recognized should the server not answer when it is pushed; any text that no
    /// other group has. It stands in `group_overrides` as `group_id`.
    pub fn with_id(mut self, id: impl Into<String>) -> Self {
        self.group_overrides.get_or_insert_default().insert(ID.to_owned(), Value::String(id.into()));
        self
    }

    /// With more to say about the group as a whole, beside its id.
    pub fn with_overrides(mut self, overrides: Map<String, Value>) -> Self {
        self.group_overrides.get_or_insert_default().extend(overrides);
        self
    }

    /// With how the answers were made: temperature, model and the like.
    pub fn with_generation_params(mut self, params: Map<String, Value>) -> Self {
        self.generation_params = Some(params);
        self
    }

    /// Its own name, if it was given one.
    pub fn id(&self) -> Option<&str> {
        self.group_overrides.as_ref()?.get(ID)?.as_str()
    }

    /// The scores, in order.
    pub fn scores(&self) -> &[f64] {
        &self.scores
    }

    /// Whether an environment with these limits may push it.
    ///
    /// # Errors
    /// [`GroupError::Size`] or [`GroupError::TooLong`].
    pub fn check(&self, limits: &GroupLimits) -> Result<(), GroupError> {
        fits(self.tokens.iter().map(Vec::len), limits)
    }
}

#[derive(Default)]
struct Columns {
    tokens: Vec<Vec<u32>>,
    masks: Vec<Vec<i64>>,
    scores: Vec<f64>,
    advantages: Vec<Vec<f64>>,
    inference_logprobs: Vec<Vec<f64>>,
    messages: Vec<Vec<Message>>,
    overrides: Vec<Map<String, Value>>,
}

fn check(sequences: &[Sequence], limits: &GroupLimits) -> Result<(), GroupError> {
    fits(sequences.iter().map(Sequence::tokens), limits)?;
    let mut scores = sequences.iter().map(Sequence::score);
    let first = scores.next();
    if scores.all(|score| Some(score) == first) {
        return Err(GroupError::EqualScores);
    }
    Ok(())
}

fn fits(lengths: impl ExactSizeIterator<Item = usize>, limits: &GroupLimits) -> Result<(), GroupError> {
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

fn all_or_none<T>(name: &'static str, column: Vec<T>, count: usize) -> Result<Option<Vec<T>>, GroupError> {
    match column.len() {
        0 => Ok(None),
        found if found == count => Ok(Some(column)),
        _ => Err(GroupError::Incomplete(name)),
    }
}
