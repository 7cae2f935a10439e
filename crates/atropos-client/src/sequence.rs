//! One answer, as a trainer wants it.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::GroupError;

/// What stands for a token that is not to be learned, in masks.
const MASKED: i64 = -100;
/// What stands for its log-probability: no probability at all.
const MASKED_LOGPROB: f64 = 1.0;

/// A prompt and a completion in tokens, with a score. What is to be learned are the tokens of the completion.
#[derive(Clone, Debug, PartialEq)]
pub struct Sequence {
    pub(super) tokens: Vec<u32>,
    pub(super) masks: Vec<i64>,
    pub(super) score: f64,
    pub(super) advantages: Option<Vec<f64>>,
    pub(super) inference_logprobs: Option<Vec<f64>>,
    pub(super) messages: Option<Vec<Message>>,
    pub(super) overrides: Option<Map<String, Value>>,
}

/// A message of a conversation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Message {
    /// Who speaks: `system`, `user`, `assistant`, …
    pub role: String,
    /// What is said.
    pub content: String,
}

impl Message {
    /// What `role` said.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        Self { role: role.into(), content: content.into() }
    }
}

impl Sequence {
    /// A completion of a prompt.
    ///
    /// # Errors
    /// [`GroupError::NothingToLearn`] if the completion is empty, [`GroupError::NotFinite`] if the score is no number.
    pub fn new(prompt: &[u32], completion: &[u32], score: f64) -> Result<Self, GroupError> {
        let tokens: Vec<u32> = prompt.iter().chain(completion).copied().collect();
        let masks = vec![MASKED; prompt.len()].into_iter().chain(completion.iter().map(|token| i64::from(*token)));
        let masks = masks.collect();
        Self::with_masks(tokens, masks, score)
    }

    /// Tokens of which some are to be learned, as in a conversation of several turns: the masks are the token's id there, and
    /// -100 everywhere else.
    ///
    /// # Errors
    /// [`GroupError::Masks`] if they are not, [`GroupError::NothingToLearn`] if they are -100 everywhere, and
    /// [`GroupError::NotFinite`] if the score is no number.
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

    /// With the same advantage for every token that is to be learned, and none for the others.
    ///
    /// # Errors
    /// [`GroupError::NotFinite`] if it is no number.
    pub fn with_advantage(mut self, advantage: f64) -> Result<Self, GroupError> {
        if !advantage.is_finite() {
            return Err(GroupError::NotFinite("advantage"));
        }
        let of = |mask: &i64| if *mask == MASKED { 0.0 } else { advantage };
        self.advantages = Some(self.masks.iter().map(of).collect());
        Ok(self)
    }

    /// With the log-probabilities that the tokens that are to be learned had when they were drawn, in order.
    ///
    /// # Errors
    /// [`GroupError::Length`] if there are more or fewer, [`GroupError::NotFinite`] if one is no number.
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

    /// With the conversation that it is, answer included.
    pub fn with_messages(mut self, messages: impl IntoIterator<Item = Message>) -> Self {
        self.messages = Some(messages.into_iter().collect());
        self
    }

    /// With whatever else there is to say about it, which trainers hand on to their logs.
    pub fn with_overrides(mut self, overrides: Map<String, Value>) -> Self {
        self.overrides = Some(overrides);
        self
    }

    /// How many tokens it has.
    pub fn tokens(&self) -> usize {
        self.tokens.len()
    }

    /// How many of them are to be learned.
    pub fn learned(&self) -> usize {
        self.masks.iter().filter(|mask| **mask != MASKED).count()
    }

    /// Its score.
    pub const fn score(&self) -> f64 {
        self.score
    }
}
