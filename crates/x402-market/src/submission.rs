//! What a student sends to be judged.

use serde::{Deserialize, Serialize};

use super::{
    bounded::{LengthError, List},
    message::{self, MessageError, Unknown, Version},
    task::{LongText, Task},
};

/// How many outputs one submission may hold.
pub const MAX_OUTPUTS: usize = 64;

/// A task and the outputs to be judged by it.
///
/// In JSON the outputs are one of `output` (one text), `pair` (two, to be compared) or `outputs` (a group of up to 64); see
/// [`SUBMISSION_SCHEMA`](super::schema::SUBMISSION_SCHEMA).
///
/// ```
/// use x402_market::{Submission, Task};
///
/// let task = Task::new("arithmetic", "What is 17 * 23?")?;
/// let group = Submission::group(task, ["Answer: 391", "Answer: 392"])?;
/// let json = serde_json::to_vec(&group)?;
/// assert_eq!(Submission::from_json(&json)?, group);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Wire", into = "Wire")]
pub struct Submission {
    /// What the outputs were made for.
    pub task: Task,
    /// What is to be judged.
    pub outputs: Outputs,
}

/// What is to be judged; each output costs the evaluator's price.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outputs {
    /// One.
    Single(LongText),
    /// Two, to be compared with each other.
    Pair([LongText; 2]),
    /// Any number, judged one by one or against each other, as the evaluator likes.
    Group(List<LongText, 1, MAX_OUTPUTS>),
}

impl Submission {
    /// Submits one output.
    ///
    /// # Errors
    /// [`LengthError`] if it is too long.
    pub fn single(task: Task, output: impl Into<String>) -> Result<Self, LengthError> {
        Ok(Self { task, outputs: Outputs::Single(LongText::new(output)?) })
    }

    /// Submits two outputs to be compared.
    ///
    /// # Errors
    /// [`LengthError`] if one is too long.
    pub fn pair(task: Task, first: impl Into<String>, second: impl Into<String>) -> Result<Self, LengthError> {
        Ok(Self { task, outputs: Outputs::Pair([LongText::new(first)?, LongText::new(second)?]) })
    }

    /// Submits a group.
    ///
    /// # Errors
    /// [`LengthError`] if one is too long, if there are none or more than [`MAX_OUTPUTS`].
    pub fn group(task: Task, outputs: impl IntoIterator<Item = impl Into<String>>) -> Result<Self, LengthError> {
        let outputs = outputs.into_iter().map(LongText::new).collect::<Result<Vec<_>, _>>()?;
        Ok(Self { task, outputs: Outputs::Group(List::new(outputs)?) })
    }

    /// Reads a submission.
    ///
    /// # Errors
    /// [`MessageError`] says what is wrong, and where.
    pub fn from_json(json: &[u8]) -> Result<Self, MessageError> {
        message::read(json)
    }

    /// The outputs in order.
    pub fn outputs(&self) -> &[LongText] {
        match &self.outputs {
            Outputs::Single(output) => std::slice::from_ref(output),
            Outputs::Pair(pair) => pair,
            Outputs::Group(group) => group,
        }
    }

    /// A submission of another output for the same task, as if it had been sent alone.
    pub fn with_only(&self, output: LongText) -> Self {
        Self { task: self.task.clone(), outputs: Outputs::Single(output) }
    }
}

/// A submission in JSON.
#[derive(Serialize, Deserialize)]
struct Wire {
    #[serde(default)]
    version: Version,
    task: Task,
    #[serde(skip_serializing_if = "Option::is_none")]
    output: Option<LongText>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pair: Option<List<LongText, 2, 2>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    outputs: Option<List<LongText, 1, MAX_OUTPUTS>>,
    #[serde(flatten)]
    rest: Unknown,
}

impl TryFrom<Wire> for Submission {
    type Error = &'static str;

    fn try_from(wire: Wire) -> Result<Self, Self::Error> {
        let Wire { version: Version, task, output, pair, outputs, rest: Unknown } = wire;
        let outputs = match (output, pair, outputs) {
            (Some(output), None, None) => Outputs::Single(output),
            (None, Some(pair), None) => {
                let pair = Vec::from(pair).try_into();
                Outputs::Pair(pair.map_err(|_: Vec<LongText>| "pair takes two outputs")?)
            }
            (None, None, Some(group)) => Outputs::Group(group),
            (None, None, None) => return Err("output, pair or outputs is missing"),
            _ => return Err("output, pair and outputs exclude each other"),
        };
        Ok(Self { task, outputs })
    }
}

impl From<Submission> for Wire {
    fn from(submission: Submission) -> Self {
        let Submission { task, outputs } = submission;
        let mut wire = Self { version: Version, task, output: None, pair: None, outputs: None, rest: Unknown };
        match outputs {
            Outputs::Single(output) => wire.output = Some(output),
            Outputs::Pair(pair) => wire.pair = List::new(pair).ok(),
            Outputs::Group(group) => wire.outputs = Some(group),
        }
        wire
    }
}
