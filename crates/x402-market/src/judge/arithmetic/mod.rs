//! A specialist that needs no model: exact arithmetic and unit checking of a worked answer.

mod clause;
mod expression;
mod judge;
mod lexer;
mod number;
mod question;
mod statements;
mod units;

use async_trait::async_trait;

use self::judge::Given;
use super::{Judge, JudgeError};
use crate::{Submission, Verdict};

/// The longest prompt, in bytes.
const MAX_PROMPT: usize = 4 * 1024;
/// The longest answer, in bytes.
const MAX_OUTPUT: usize = 16 * 1024;

/// Judges worked arithmetic, with units, exactly.
///
/// It evaluates what the prompt asks for (or takes the reference answer, if there is one; a word problem's formula may be in the
/// context), checks every equality that the output
/// states on the way, and compares the final answer, its unit included. Where it cannot read the prompt it says so, with a low
/// confidence, instead of guessing. Prompts of up to 4 KiB and outputs of up to 16 KiB are taken.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use x402_market::{Submission, Task, judge::{ArithmeticJudge, Judge}};
///
/// let task = Task::new("arithmetic", "What is 17 * 23 + 4?")?;
/// let verdicts = ArithmeticJudge.judge(&Submission::single(task, "17 * 23 = 381. Answer: 385")?).await?;
/// assert_eq!(verdicts[0].score.get(), 0.0);
/// assert_eq!(&*verdicts[0].critique.issues[0].description, "17 * 23 = 381 does not hold: 17 * 23 is 391");
/// # Ok(()) }
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct ArithmeticJudge;

#[async_trait]
impl Judge for ArithmeticJudge {
    fn takes(&self, submission: &Submission) -> Result<(), JudgeError> {
        let prompt = ("task.prompt", submission.task.question().len(), MAX_PROMPT);
        let reference = submission.task.reference.as_ref().map(|text| ("task.reference", text.len(), MAX_PROMPT));
        let outputs = submission.outputs().iter().map(|output| ("output", output.len(), MAX_OUTPUT));
        let context = submission.task.context.as_ref().map(|text| ("task.context", text.len(), MAX_PROMPT));
        for (name, length, limit) in outputs.chain([prompt]).chain(reference).chain(context) {
            if length > limit {
                return Err(JudgeError::NotTaken(format!("{name} has {length} bytes: shorten it to {limit}")));
            }
        }
        Ok(())
    }

    async fn judge(&self, submission: &Submission) -> Result<Vec<Verdict>, JudgeError> {
        self.takes(submission)?;
        let task = &submission.task;
        let (reference, context) = (task.reference.as_deref(), task.context.as_deref());
        let judge = |output: &_| judge::judge(Given { prompt: task.question(), context, reference }, output);
        Ok(submission.outputs().iter().map(|output| judge(output)).collect())
    }
}
