//! Who gives the verdicts.
//!
//! A [`Judge`] is one async method. [`judge_fn`] makes one of a function of a submission, [`output_judge`] of a function of a task
//! and one output. Shipped are judges for [arithmetic](ArithmeticJudge), [prose](ProseJudge), [any specialty that a language
//! model has](LlmJudge), and [comparing two outputs](PairwiseJudge) with any of them.

mod arithmetic;
mod llm;
mod pairwise;
mod prose;

use std::{error::Error, fmt, future::Future, sync::Arc, time::Duration};

use async_trait::async_trait;

pub use arithmetic::ArithmeticJudge;
pub use llm::{LlmJudge, LlmJudgeBuilder, LlmJudgeError};
pub use pairwise::{MAX_COMPARED, PairwiseJudge};
pub use prose::ProseJudge;

use super::{LengthError, OutOfRange, Submission, Task, Verdict};

/// Judges submissions.
#[async_trait]
pub trait Judge: Send + Sync + 'static {
    /// Whether a submission is one that this judge takes; asked before it is paid for, so it must be quick. All are, unless this is
    /// overridden.
    ///
    /// # Errors
    /// [`JudgeError::Rejected`] says what the student should change.
    fn accepts(&self, submission: &Submission) -> Result<(), JudgeError> {
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
    fn accepts(&self, submission: &Submission) -> Result<(), JudgeError> {
        self.as_ref().accepts(submission)
    }

    async fn judge(&self, submission: &Submission) -> Result<Vec<Verdict>, JudgeError> {
        self.as_ref().judge(submission).await
    }
}

#[async_trait]
impl<J: Judge + ?Sized> Judge for Box<J> {
    fn accepts(&self, submission: &Submission) -> Result<(), JudgeError> {
        self.as_ref().accepts(submission)
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
    Rejected(String),
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

/// Makes a judge of a function of a submission, which returns a verdict per output.
///
/// ```
/// use x402_market::{Confidence, Score, Submission, Verdict, judge::judge_fn};
///
/// let longest_is_best = judge_fn(async |submission: Submission| {
///     let longest = submission.outputs().iter().map(|output| output.len()).max().unwrap_or(0).max(1);
///     let verdict = |length: usize| {
///         Verdict::new(Score::clamped(length as f64 / longest as f64), Confidence::clamped(0.5), "by length")
///     };
///     Ok(submission.outputs().iter().map(|output| verdict(output.len())).collect())
/// });
/// ```
pub fn judge_fn<J, F>(judge: J) -> FunctionJudge<J>
where
    J: Fn(Submission) -> F + Send + Sync + 'static,
    F: Future<Output = Result<Vec<Verdict>, JudgeError>> + Send + 'static,
{
    FunctionJudge(judge)
}

/// Makes a judge of a function of a task and one output; outputs of a group are judged one after the other.
///
/// An async closure that captures nothing will do, as will `move |task, output| { let state = state.clone(); async move { … } }`.
///
/// ```
/// use x402_market::{Confidence, Score, Verdict, judge::output_judge};
///
/// let gives_reasons = output_judge(async |_task, output| {
///     let score = if output.contains("because") { Score::MAX } else { Score::MIN };
///     Ok(Verdict::new(score, Confidence::new(0.7)?, "whether it gives reasons"))
/// });
/// ```
pub fn output_judge<J, F>(judge: J) -> OutputJudge<J>
where
    J: Fn(Arc<Task>, String) -> F + Send + Sync + 'static,
    F: Future<Output = Result<Verdict, JudgeError>> + Send + 'static,
{
    OutputJudge(judge)
}

/// See [`judge_fn`].
#[derive(Clone, Copy)]
pub struct FunctionJudge<J>(J);

/// See [`output_judge`].
#[derive(Clone, Copy)]
pub struct OutputJudge<J>(J);

#[async_trait]
impl<J, F> Judge for FunctionJudge<J>
where
    J: Fn(Submission) -> F + Send + Sync + 'static,
    F: Future<Output = Result<Vec<Verdict>, JudgeError>> + Send + 'static,
{
    async fn judge(&self, submission: &Submission) -> Result<Vec<Verdict>, JudgeError> {
        (self.0)(submission.clone()).await
    }
}

#[async_trait]
impl<J, F> Judge for OutputJudge<J>
where
    J: Fn(Arc<Task>, String) -> F + Send + Sync + 'static,
    F: Future<Output = Result<Verdict, JudgeError>> + Send + 'static,
{
    async fn judge(&self, submission: &Submission) -> Result<Vec<Verdict>, JudgeError> {
        let task = Arc::new(submission.task.clone());
        let mut verdicts = Vec::with_capacity(submission.outputs().len());
        for output in submission.outputs() {
            verdicts.push((self.0)(task.clone(), output.to_string()).await?);
        }
        Ok(verdicts)
    }
}

impl<J> fmt::Debug for FunctionJudge<J> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("FunctionJudge")
    }
}

impl<J> fmt::Debug for OutputJudge<J> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("OutputJudge")
    }
}
