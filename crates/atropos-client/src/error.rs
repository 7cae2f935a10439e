//! Errors of the client.

use std::time::Duration;

/// An error of an [`AtroposClient`](super::AtroposClient).
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AtroposError {
    /// The URL is not one of http or https.
    #[error("the Atropos server's URL is not an http or https URL")]
    Url,
    /// The HTTP client could not be built.
    #[error("the HTTP client could not be built")]
    Client(#[source] reqwest::Error),
    /// The server cannot be reached, and nothing was sent. Start it (`run-api`) or correct the URL, and try again.
    #[error("the Atropos server cannot be reached")]
    Unreachable(#[source] reqwest::Error),
    /// A check before the request failed, so the request was not sent. Try again.
    #[error("the request was not sent to the Atropos server, because a check before it failed")]
    NotSent(#[source] Box<AtroposError>),
    /// The request was sent, and no answer came. It may have taken effect, or may yet do so. Do not push a group again; see
    /// [`Environment::is_latest`](super::Environment::is_latest).
    #[error("the Atropos server did not answer {call}, which may have taken effect")]
    Unanswered {
        /// The endpoint.
        call: &'static str,
        /// The error of the HTTP client.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The server refused the request, which had no effect (status 4xx).
    #[error("the Atropos server refused {call} with status {status}: {detail}")]
    Refused {
        /// The endpoint.
        call: &'static str,
        /// The status, which is 422 for an invalid body.
        status: u16,
        /// The place in the body and the reason, if the server names them.
        detail: String,
    },
    /// The server or a proxy failed (status 5xx). The request may have taken effect.
    #[error("the Atropos server failed on {call} with status {status}")]
    Failed {
        /// The endpoint.
        call: &'static str,
        /// The status.
        status: u16,
    },
    /// The answer is not one of an Atropos server. Check that the URL is its base.
    #[error("the answer to {call} is not one of an Atropos server: {problem}")]
    Answer {
        /// The endpoint.
        call: &'static str,
        /// What is wrong with the answer.
        problem: String,
    },
    /// The answer is too large. Raise [`AtroposClient::max_answer`](super::AtroposClient::max_answer).
    #[error("the answer to {call} has more than {limit} bytes")]
    TooLarge {
        /// The endpoint.
        call: &'static str,
        /// The limit, in bytes.
        limit: usize,
    },
    /// The request is too large and was not sent. Push fewer or smaller groups at once.
    #[error("the request {call} has {bytes} bytes, more than the limit of {limit}")]
    TooMuch {
        /// The endpoint.
        call: &'static str,
        /// The size of the request body.
        bytes: usize,
        /// The limit, in bytes.
        limit: usize,
    },
    /// No trainer has registered with the server. Start the trainer.
    #[error("no trainer has registered with the Atropos server")]
    NoTrainer,
    /// The trainer did not start in time. Start it, or wait longer.
    #[error("the trainer has not pulled its first batch within {0:?}")]
    NotStarted(Duration),
    /// The trainer did not pull enough batches in time. The groups are in the queue: wait longer, or stop.
    #[error("the trainer's queue has held {queued} groups or more for {waited:?}")]
    QueueFull {
        /// The number of groups in the queue.
        queued: u64,
        /// How long this waited.
        waited: Duration,
    },
    /// Groups of this size cannot fill a batch. Use a size that divides the trainer's batch size.
    #[error("groups of {group_size} cannot fill a batch of {batch_size}: use a size that divides it")]
    GroupSize {
        /// The environment's group size.
        group_size: usize,
        /// The trainer's batch size.
        batch_size: u64,
    },
    /// The server does not have this environment, as after a restart. Register it again.
    #[error("the Atropos server does not have this environment; register it again")]
    UnknownEnvironment,
    /// The group is not within the limits of this environment.
    #[error(transparent)]
    Group(#[from] GroupError),
}

impl AtroposError {
    /// Marks an error of a check before the request itself.
    pub(super) fn before(self) -> Self {
        if self.is_unknown() { Self::NotSent(Box::new(self)) } else { self }
    }

    /// Returns `true` if the request was not sent and may be tried again.
    pub const fn is_not_sent(&self) -> bool {
        matches!(self, Self::Unreachable(_) | Self::NotSent(_))
    }

    /// Returns `true` if the request may have taken effect.
    pub fn is_unknown(&self) -> bool {
        matches!(self, Self::Unanswered { .. } | Self::Failed { .. } | Self::Answer { .. } | Self::TooLarge { .. })
    }
}

/// An error of a group or a sequence that a trainer could not learn from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GroupError {
    /// The group has another size than its environment registered. The server would keep it back.
    #[error("a group of {found} sequences, where the environment has announced groups of {expected}")]
    Size {
        /// The size that the environment registered.
        expected: usize,
        /// The size of the group.
        found: usize,
    },
    /// A sequence is too long. Leave the group out, or shorten the answers.
    #[error("sequence {at} has {tokens} tokens; fewer than {limit} are taken")]
    TooLong {
        /// The index of the sequence.
        at: usize,
        /// The number of its tokens.
        tokens: usize,
        /// The limit.
        limit: u64,
    },
    /// All scores are equal, so that nothing can be learned. Leave the group out.
    #[error("all scores are equal: there is nothing to learn from the group")]
    EqualScores,
    /// The masks do not match the tokens.
    #[error("masks are the token's id where it is to be learned, and -100 elsewhere")]
    Masks,
    /// Every token is masked.
    #[error("a sequence without a completion has nothing to learn")]
    NothingToLearn,
    /// A number is infinite or NaN.
    #[error("a {0} is not a finite number")]
    NotFinite(&'static str),
    /// There are more or fewer values than tokens to learn.
    #[error("{0} must be as many as tokens to learn")]
    Length(&'static str),
    /// Some sequences have this field and others do not.
    #[error("{0} must be there for all sequences or for none")]
    Incomplete(&'static str),
}
