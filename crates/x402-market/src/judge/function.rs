//! Functions that judge.

use std::{fmt, future::Future, sync::Arc};

use async_trait::async_trait;

use super::{Judge, JudgeError};
use crate::{Submission, Task, Verdict};

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
