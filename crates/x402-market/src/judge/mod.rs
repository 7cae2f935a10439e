//! Who gives the verdicts.
//!
//! A [`Judge`] is one async method. [`judge_fn`] makes one of a function of a submission, [`output_judge`] of a function of a task
//! and one output. Shipped are judges for [arithmetic](ArithmeticJudge), [prose](ProseJudge), [any specialty that a language
//! model has](LlmJudge), and [comparing two outputs](PairwiseJudge) with any of them.

mod arithmetic;
mod function;
mod llm;
mod pairwise;
mod prose;

use std::{error::Error, sync::Arc, time::Duration};

use async_trait::async_trait;

pub use arithmetic::ArithmeticJudge;
pub use function::{FunctionJudge, OutputJudge, judge_fn, output_judge};
pub use llm::{LlmJudge, LlmJudgeBuilder, LlmJudgeError};
pub use pairwise::{MAX_COMPARED, PairwiseJudge};
pub use prose::ProseJudge;

use super::{LengthError, OutOfRange, Submission, Verdict};

/// Judges submissions.
#[async_trait]
pub trait Judge: Send + Sync + 'static {
    /// Whether a submission is one that this judge takes; asked before it is paid for, so it must be quick. All are, unless this is
    /// overridden.
    ///
    /// # Errors
    /// [`JudgeError::NotTaken`] says what the student should change.
    fn takes(&self, submission: &Submission) -> Result<(), JudgeError> {
        let _ = submission;
        Ok(())
    }

    /// One verdict per output, in order.
    ///
    /// # Errors
    /// [`JudgeError`]; the student is not charged then.
    async fn judge(&self, submission: &Submission) -> Result<Vec<Verdict>, JudgeError>;
}

#[async_trait]
impl<J: Judge + ?Sized> Judge for Arc<J> {
    fn takes(&self, submission: &Submission) -> Result<(), JudgeError> {
        self.as_ref().takes(submission)
    }

    async fn judge(&self, submission: &Submission) -> Result<Vec<Verdict>, JudgeError> {
        self.as_ref().judge(submission).await
    }
}

#[async_trait]
impl<J: Judge + ?Sized> Judge for Box<J> {
    fn takes(&self, submission: &Submission) -> Result<(), JudgeError> {
        self.as_ref().takes(submission)
    }

    async fn judge(&self, submission: &Submission) -> Result<Vec<Verdict>, JudgeError> {
        self.as_ref().judge(submission).await
    }
}

/// Why there is no verdict. Nothing is charged for it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum JudgeError {
    /// The submission is not one that this judge takes, for a reason that the student is told; answered 422.
    #[error("{0}")]
    NotTaken(String),
    /// Too much to do; answered 503.
    #[error("the judge is busy; try again in {retry_after:?}")]
    Busy {
        /// When to come back.
        retry_after: Duration,
    },
    /// The judge failed, for a reason that only its operator is told; answered 500.
    #[error("the judge failed")]
    Failed(#[source] Box<dyn Error + Send + Sync>),
}

impl JudgeError {
    /// The judge failed.
    pub fn failed(source: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self::Failed(source.into())
    }
}

impl From<OutOfRange> for JudgeError {
    fn from(error: OutOfRange) -> Self {
        Self::failed(error)
    }
}

impl From<LengthError> for JudgeError {
    fn from(error: LengthError) -> Self {
        Self::failed(error)
    }
}
