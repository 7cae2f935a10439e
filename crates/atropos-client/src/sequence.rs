//! Scored sequences of tokens, and a tokenizer for tests.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::GroupError;

/// The mask of a token that is not trained on.
const MASKED: i64 = -100;
/// The log-probability of a masked token, which is not a valid one.
const MASKED_LOGPROB: f64 = 1.0;

/// A prompt and a completion in tokens, with a score. The trainer learns the tokens that are not masked.
#[derive(Clone, Debug, PartialEq)]
pub struct Sequence {
    pub(super) tokens: Vec<u32>,
    pub(super) masks: Vec<i64>,
    pub(super) score: f64,
    pub(super) advantages: Option<Vec<f64>>,
    pub(super) inference_logprobs: Option<Vec<f64>>,
    pub(super) messages: Option<Vec<SequenceMessage>>,
    pub(super) overrides: Option<Map<String, Value>>,
}

/// A message of a chat.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct SequenceMessage {
    /// The role of its author: `system`, `user`, `assistant`, …
    pub role: String,
    /// The text.
    pub content: String,
}

impl SequenceMessage {
    /// Creates a message.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        Self { role: role.into(), content: content.into() }
    }
}

impl Sequence {
    /// Creates a sequence of a prompt, which is masked, and a completion.
    ///
    /// # Errors
    /// [`GroupError::NothingToLearn`] if the completion is empty, [`GroupError::NotFinite`] if the score is not finite.
    pub fn new(prompt: &[u32], completion: &[u32], score: f64) -> Result<Self, GroupError> {
        let tokens: Vec<u32> = prompt.iter().chain(completion).copied().collect();
        let masks = vec![MASKED; prompt.len()].into_iter().chain(completion.iter().map(|token| i64::from(*token)));
        let masks = masks.collect();
        Self::with_masks(tokens, masks, score)
    }

    /// Creates a sequence with any tokens masked, as in a chat of several turns. A mask is -100, or the id of the token if it is to be
    /// learned.
    ///
    /// # Errors
    /// [`GroupError::Masks`] for other masks, [`GroupError::NothingToLearn`] if all are -100, and [`GroupError::NotFinite`] if the score
    /// is not finite.
    pub fn with_masks(tokens: Vec<u32>, masks: Vec<i64>, score: f64) -> Result<Self, GroupError> {
        let fits = |(token, mask): (&u32, &i64)| *mask == MASKED || *mask == i64::from(*token);
        if tokens.len() != masks.len() || !tokens.iter().zip(&masks).all(fits) {
            return Err(GroupError::Masks);
        }
        if masks.iter().all(|mask| *mask == MASKED) {
            return Err(GroupError::NothingToLearn);
        }
        if !score.is_finite() {
            return Err(GroupError::NotFinite("score"));
        }
        let (advantages, inference_logprobs, messages, overrides) = (None, None, None, None);
        Ok(Self { tokens, masks, score, advantages, inference_logprobs, messages, overrides })
    }

    /// Sets one advantage for all tokens to be learned. Masked tokens get zero.
    ///
    /// # Errors
    /// [`GroupError::NotFinite`] if the advantage is not finite.
    pub fn with_advantage(mut self, advantage: f64) -> Result<Self, GroupError> {
        if !advantage.is_finite() {
            return Err(GroupError::NotFinite("advantage"));
        }
        let of = |mask: &i64| if *mask == MASKED { 0.0 } else { advantage };
        self.advantages = Some(self.masks.iter().map(of).collect());
        Ok(self)
    }

    /// Sets the log-probabilities with which the tokens to be learned were sampled, in order.
    ///
    /// # Errors
    /// [`GroupError::Length`] for another number of them, [`GroupError::NotFinite`] if one is not finite.
    pub fn with_inference_logprobs(mut self, logprobs: &[f64]) -> Result<Self, GroupError> {
        if logprobs.len() != self.learned() {
            return Err(GroupError::Length("inference_logprobs"));
        }
        if !logprobs.iter().all(|logprob| logprob.is_finite()) {
            return Err(GroupError::NotFinite("log-probability"));
        }
        let mut logprobs = logprobs.iter().copied();
        let of = |mask: &i64| if *mask == MASKED { MASKED_LOGPROB } else { logprobs.next().unwrap_or(MASKED_LOGPROB) };
        self.inference_logprobs = Some(self.masks.iter().map(of).collect());
        Ok(self)
    }

    /// Sets the chat that the sequence is made of, with the answer.
    #[must_use]
    pub fn with_messages(mut self, messages: impl IntoIterator<Item = SequenceMessage>) -> Self {
        self.messages = Some(messages.into_iter().collect());
        self
    }

    /// Sets further fields, which trainers write to their logs.
    #[must_use]
    pub fn with_overrides(mut self, overrides: Map<String, Value>) -> Self {
        self.overrides = Some(overrides);
        self
    }

    /// Returns the number of tokens.
    pub fn tokens(&self) -> usize {
        self.tokens.len()
    }

    /// Returns the number of tokens to be learned.
    pub fn learned(&self) -> usize {
        self.masks.iter().filter(|mask| **mask != MASKED).count()
    }

    /// Returns the score.
    pub const fn score(&self) -> f64 {
        self.score
    }
}

/// A tokenizer for programs without one: a token per byte (0 to 255), and three that mark the start of the prompt, the start of the
/// completion, and its end.
///
/// ```
/// use atropos_client::ByteTokenizer;
///
/// let mut sequence = ByteTokenizer::prompt("1 + 1?");
/// sequence.extend(ByteTokenizer::completion("2"));
/// assert_eq!(sequence, [256, 49, 32, 43, 32, 49, 63, 257, 50, 258]);
/// assert_eq!(ByteTokenizer::text(&sequence), "1 + 1?2");
/// ```
#[derive(Clone, Copy, Debug)]
pub struct ByteTokenizer;

impl ByteTokenizer {
    /// The token before a prompt.
    pub const BEGIN: u32 = 256;
    /// The token between prompt and completion.
    pub const ANSWER: u32 = 257;
    /// The token after a completion.
    pub const END: u32 = 258;
    /// The number of different tokens.
    pub const VOCABULARY: u32 = 259;

    /// Encodes a prompt, up to and including [`ANSWER`](Self::ANSWER).
    pub fn prompt(text: &str) -> Vec<u32> {
        let bytes = text.bytes().map(u32::from);
        std::iter::once(Self::BEGIN).chain(bytes).chain([Self::ANSWER]).collect()
    }

    /// Encodes a completion, up to and including [`END`](Self::END).
    pub fn completion(text: &str) -> Vec<u32> {
        text.bytes().map(u32::from).chain([Self::END]).collect()
    }

    /// Decodes tokens. Leaves out marks and unknown tokens, and replaces invalid UTF-8.
    pub fn text(tokens: &[u32]) -> String {
        let bytes: Vec<u8> = tokens.iter().filter_map(|token| u8::try_from(*token).ok()).collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }
}
