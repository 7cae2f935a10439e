//! Judges: the part of an evaluator that gives verdicts.
//!
//! A [`Judge`] has one async method. [`output_judge`] turns a function of a task and one output into a judge, [`judge_fn`] a function of a
//! whole submission. The package [`x402-judges`](https://docs.rs/x402-judges) has judges for arithmetic, algebra, programs, anything
//! that a language model can judge, and one that learns.

use std::{error::Error, future::Future, sync::Arc, time::Duration};

use async_trait::async_trait;
use auto_impl::auto_impl;

use super::{LengthError, Lesson, OutOfRange, Submission, Task, Verdict};

/// Judges submissions.
///
/// ```
/// use x402_market::{Confidence, Score, Submission, Verdict, judge::{Judge, JudgeError}};
///
/// struct CodeJudge;
///
/// #[async_trait::async_trait]
/// impl Judge for CodeJudge {
///     fn accepts(&self, submission: &Submission) -> Result<(), JudgeError> {
///         match submission.outputs().iter().all(|output| output.contains("fn ")) {
///             true => Ok(()),
///             false => Err(JudgeError::Rejected("output: send Rust code".to_owned())),
///         }
///     }
///
///     async fn judge(&self, submission: &Submission) -> Result<Vec<Verdict>, JudgeError> {
///         let score = |code: &str| if code.contains("unwrap") { Score::MIN } else { Score::MAX };
///         let verdict = |code: &str| Ok(Verdict::new(score(code), Confidence::new(0.6)?, "whether it can panic"));
///         submission.outputs().iter().map(|code| verdict(code)).collect()
///     }
/// }
/// ```
#[async_trait]
#[auto_impl(Arc, Box)]
pub trait Judge: Send + Sync + 'static {
    /// Checks whether this judge can judge a submission. It is called before payment, so it must be quick. Default: all are accepted.
    ///
    /// # Errors
    /// [`JudgeError::Rejected`] tells the student what to change.
    fn accepts(&self, submission: &Submission) -> Result<(), JudgeError> {
        let _ = submission;
        Ok(())
    }

    /// Returns a verdict for each output, in order.
    ///
    /// # Errors
    /// [`JudgeError`] if there is no verdict. Then the student is not charged.
    async fn judge(&self, submission: &Submission) -> Result<Vec<Verdict>, JudgeError>;

    /// Learns the truth about outputs that it judged. The lesson is by the payer that paid for the verdicts, and the only one about them.
    /// Other payers may contradict it, and it may be false. Default: lessons are refused.
    ///
    /// # Errors
    /// [`JudgeError`] if the lesson does not count. It can be repeated then.
    async fn learn(&self, lesson: &Lesson) -> Result<(), JudgeError> {
        let _ = lesson;
        Err(JudgeError::Rejected("this evaluator takes no lessons".to_owned()))
    }

    /// Returns the version of what it has learned, which evaluations name after that of the card, as in `1+7`. A student trusts a new version
    /// half as much, so it should change rarely. Together they have at most 64 characters. Default: none.
    fn version(&self) -> Option<String> {
        None
    }
}

/// A judge gave no verdict. The student is not charged.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum JudgeError {
    /// The judge cannot judge the submission. The student is told the reason; the answer is 422.
    #[error("{0}")]
    Rejected(String),
    /// The judge is busy. The answer is 503.
    #[error("the judge is busy; try again in {retry_after:?}")]
    Busy {
        /// When the student should try again.
        retry_after: Duration,
    },
    /// The judge failed. Only the log has the reason; the answer is 500.
    #[error("the judge failed")]
    Failed(#[source] Box<dyn Error + Send + Sync>),
}

impl JudgeError {
    /// Creates a [`JudgeError::Failed`].
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

/// Returns a judge that calls a function of the submission. The function returns a verdict for each output.
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
pub fn judge_fn<J, F>(judge: J) -> impl Judge
where
    J: Fn(Submission) -> F + Send + Sync + 'static,
    F: Future<Output = Result<Vec<Verdict>, JudgeError>> + Send + 'static,
{
    FunctionJudge(judge)
}

/// Returns a judge that calls a function of the task and one output. The outputs of a group are judged one after the other.
///
/// The function can be an async closure that captures nothing, or `move |task, output| { let state = state.clone(); async move { … } }`.
///
/// ```
/// use x402_market::{Confidence, Score, Verdict, judge::output_judge};
///
/// let gives_reasons = output_judge(async |_task, output| {
///     let score = if output.contains("because") { Score::MAX } else { Score::MIN };
///     Ok(Verdict::new(score, Confidence::new(0.7)?, "whether it gives reasons"))
/// });
/// ```
pub fn output_judge<J, F>(judge: J) -> impl Judge
where
    J: Fn(Arc<Task>, String) -> F + Send + Sync + 'static,
    F: Future<Output = Result<Verdict, JudgeError>> + Send + 'static,
{
    let judge = Arc::new(judge);
    judge_fn(move |submission: Submission| {
        let (judge, task) = (judge.clone(), Arc::new(submission.task.clone()));
        async move {
            let mut verdicts = Vec::with_capacity(submission.outputs().len());
            for output in submission.outputs() {
                verdicts.push(judge(task.clone(), output.to_string()).await?);
            }
            Ok(verdicts)
        }
    })
}

struct FunctionJudge<J>(J);

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
