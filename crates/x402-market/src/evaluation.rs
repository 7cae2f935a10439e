//! What an evaluator answers.

use serde::{Deserialize, Serialize};

use super::{
    bounded::{LengthError, List, Text},
    critique::Critique,
    measure::{Confidence, Reward, Score},
    message::{self, MessageError, Unknown, Version},
    submission::{MAX_OUTPUTS, Submission},
    task::TaskId,
};

/// How long an evaluation in JSON may be, in bytes: evaluators sell no longer ones, and students read no longer ones.
pub const MAX_EVALUATION: usize = 1 << 20;

/// The verdicts on a submission, in the order of its outputs.
///
/// See [`EVALUATION_SCHEMA`](super::schema::EVALUATION_SCHEMA) for its form in JSON.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Evaluation {
    #[serde(default)]
    version: Version,
    /// Who judged.
    pub evaluator: EvaluatorId,
    /// The id of the task, as it was submitted.
    #[serde(default)]
    pub task: TaskId,
    /// One for each output.
    pub verdicts: List<Verdict, 1, MAX_OUTPUTS>,
    #[serde(flatten)]
    rest: Unknown,
}

/// An evaluator, and which one of its versions: another version may judge otherwise.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct EvaluatorId {
    /// Its name.
    pub id: Text<1, 256>,
    /// The version of its judgement.
    pub version: Text<1, 64>,
    #[serde(flatten)]
    rest: Unknown,
}

/// What an evaluator thinks of one output.
///
/// ```
/// use x402_market::{Confidence, Critique, Score, Verdict};
///
/// let verdict = Verdict::new(Score::new(0.75)?, Confidence::new(0.9)?, Critique::new("Right, but hard to follow."));
/// assert_eq!(verdict.reward.get(), 0.5, "from -1 to 1 unless set otherwise");
/// # Ok::<(), x402_market::OutOfRange>(())
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Verdict {
    /// How good it is.
    pub score: Score,
    /// What a learner should be given for it.
    pub reward: Reward,
    /// How likely this verdict is right.
    pub confidence: Confidence,
    /// Why.
    pub critique: Critique,
    #[serde(flatten)]
    rest: Unknown,
}

/// Which of two outputs is better.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Preference {
    /// The first.
    First,
    /// The second.
    Second,
    /// Neither.
    Neither,
}

impl Evaluation {
    /// What `evaluator` thinks of a submission.
    ///
    /// # Errors
    /// [`MessageError`] if the verdicts do not [fit](Self::check) the submission.
    pub fn new(
        evaluator: EvaluatorId,
        submission: &Submission,
        verdicts: impl IntoIterator<Item = Verdict>,
    ) -> Result<Self, MessageError> {
        let verdicts = List::new(verdicts).map_err(|error| MessageError::invalid("verdicts", error))?;
        let task = submission.task.id.clone();
        let evaluation = Self { version: Version, evaluator, task, verdicts, rest: Unknown };
        evaluation.check(submission)?;
        Ok(evaluation)
    }

    /// Reads an evaluation.
    ///
    /// # Errors
    /// [`MessageError`] says what is wrong, and where.
    pub fn from_json(json: &[u8]) -> Result<Self, MessageError> {
        message::read(json)
    }

    /// Whether it is one of this submission: the same task, a verdict per output, and no issue about a place that is not there.
    ///
    /// # Errors
    /// [`MessageError::Invalid`] names what does not fit.
    pub fn check(&self, submission: &Submission) -> Result<(), MessageError> {
        if self.task != submission.task.id {
            return Err(MessageError::invalid("task", "it is not the id of the task that was submitted"));
        }
        let outputs = submission.outputs();
        if self.verdicts.len() != outputs.len() {
            let problem = format!("{} for {} outputs", self.verdicts.len(), outputs.len());
            return Err(MessageError::invalid("verdicts", problem));
        }
        for (at, (verdict, output)) in self.verdicts.iter().zip(outputs).enumerate() {
            for (number, issue) in verdict.critique.issues.iter().enumerate() {
                if issue.place.as_ref().is_some_and(|place| !place.is_in(output)) {
                    let at = format!("verdicts[{at}].critique.issues[{number}].place");
                    return Err(MessageError::invalid(at, "the output has no such place"));
                }
            }
        }
        Ok(())
    }

    /// Which of two outputs has the higher score; `None` unless there are two.
    pub fn preference(&self) -> Option<Preference> {
        Self::preferred(&self.verdicts)
    }

    pub(super) fn preferred(verdicts: &[Verdict]) -> Option<Preference> {
        let [first, second] = verdicts else { return None };
        Some(match first.score.partial_cmp(&second.score) {
            Some(std::cmp::Ordering::Greater) => Preference::First,
            Some(std::cmp::Ordering::Less) => Preference::Second,
            _ => Preference::Neither,
        })
    }
}

impl EvaluatorId {
    /// A name and a version.
    ///
    /// # Errors
    /// [`LengthError`] if one is empty or too long.
    pub fn new(id: impl Into<String>, version: impl Into<String>) -> Result<Self, LengthError> {
        Ok(Self { id: Text::new(id)?, version: Text::new(version)?, rest: Unknown })
    }
}

impl Verdict {
    /// A verdict whose reward is the score, stretched to -1 to 1.
    pub fn new(score: Score, confidence: Confidence, critique: impl Into<Critique>) -> Self {
        Self { score, reward: score.into(), confidence, critique: critique.into(), rest: Unknown }
    }

    /// With a reward on another scale.
    pub fn with_reward(self, reward: Reward) -> Self {
        Self { reward, ..self }
    }
}
