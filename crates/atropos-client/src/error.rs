//! What can go wrong between an environment or a trainer and the server.

use std::time::Duration;

use super::GroupError;

/// Why there is no answer, or none that helps.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AtroposError {
    /// The server's URL is not one of http or https.
    #[error("the Atropos server's URL is not an http or https URL")]
    Url,
    /// No HTTP client could be made.
    #[error("no HTTP client could be made")]
    Client(#[source] reqwest::Error),
    /// Nobody is there; nothing was sent. Start the server (`run-api`) or correct the URL, and try again.
    #[error("no Atropos server can be reached")]
    Unreachable(#[source] reqwest::Error),
    /// The server could not be asked what has to be known before, so that what was to be done was not sent. Try again.
    #[error("nothing was sent to the Atropos server, since it could not be asked something before")]
    NotSent(#[source] Box<AtroposError>),
    /// The request was sent, and no answer came: what it asks for may have happened or may yet happen. Do not send a group again
    /// for it; see [`Environment::is_latest`](super::Environment::is_latest).
    #[error("the Atropos server did not answer {call}; it may have done it all the same")]
    Unanswered {
        /// What was called.
        call: &'static str,
        /// Why.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The server refused the request and did nothing (status 4xx).
    #[error("the Atropos server refused {call} with status {status}: {detail}")]
    Refused {
        /// What was called.
        call: &'static str,
        /// The status; 422 if it did not like the body.
        status: u16,
        /// Where in the body, and why, as far as it says so.
        detail: String,
    },
    /// The server, or something before it, failed (status 5xx).
    #[error("the Atropos server failed on {call} with status {status}")]
    Failed {
        /// What was called.
        call: &'static str,
        /// The status.
        status: u16,
    },
    /// The answer is not one of an Atropos server: see whether the URL is its base.
    #[error("the answer to {call} is not one of an Atropos server: {problem}")]
    Answer {
        /// What was called.
        call: &'static str,
        /// What is wrong with it.
        problem: String,
    },
    /// The answer is longer than is read; raise [`AtroposClient::max_answer`](super::AtroposClient::max_answer).
    #[error("the answer to {call} has more than {limit} bytes")]
    TooLarge {
        /// What was called.
        call: &'static str,
        /// How many are read.
        limit: usize,
    },
    /// The request is longer than is sent; push fewer or smaller groups at once. Nothing was sent.
    #[error("{call} would take {bytes} bytes, more than the {limit} that are sent at once")]
    TooMuch {
        /// What would have been called.
        call: &'static str,
        /// How long it is.
        bytes: usize,
        /// How many are sent.
        limit: usize,
    },
    /// No trainer has registered with the server: register first, or start the trainer.
    #[error("no trainer has registered with the Atropos server")]
    NoTrainer,
    /// The trainer did not begin in time. Start it, or wait longer.
    #[error("the trainer has not pulled its first batch within {0:?}")]
    NotStarted(Duration),
    /// The trainer has not taken enough in time. The groups are in the server's queue; go on waiting, or stop.
    #[error("the trainer's queue has held {queued} groups or more for {waited:?}")]
    QueueFull {
        /// How many groups there were at last.
        queued: u64,
        /// How long was waited.
        waited: Duration,
    },
    /// A batch cannot be filled with groups of this size: use one that divides the trainer's batch size.
    #[error("groups of {group_size} cannot fill a batch of {batch_size}: use a size that divides it")]
    GroupSize {
        /// The environment's.
        group_size: usize,
        /// The trainer's.
        batch_size: u64,
    },
    /// The server does not know this environment any more, as after a restart: register it again.
    #[error("the Atropos server does not know this environment (any more); register it again")]
    UnknownEnvironment,
    /// The group is none that this environment may push.
    #[error(transparent)]
    Group(#[from] GroupError),
}

impl AtroposError {
    /// This is about a question that comes before the request itself.
    pub(super) fn before(self) -> Self {
        if self.is_unknown() { Self::NotSent(Box::new(self)) } else { self }
    }

    /// Whether nothing was sent, and may be tried again.
    pub const fn is_not_sent(&self) -> bool {
        matches!(self, Self::Unreachable(_) | Self::NotSent(_))
    }

    /// Whether what was asked for may have happened.
    pub fn is_unknown(&self) -> bool {
        matches!(self, Self::Unanswered { .. } | Self::Failed { .. } | Self::Answer { .. } | Self::TooLarge { .. })
    }
}
