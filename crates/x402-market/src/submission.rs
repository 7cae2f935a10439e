//! What a student sends to be judged: a task, and one or more outputs that were made for it.

use serde::{Deserialize, Serialize};

use super::{
    bounded::{LengthError, List, Text},
    message::{self, MessageError, Unknown, Version},
};

/// The number of outputs that a submission may hold.
pub const MAX_OUTPUTS: usize = 64;

/// A text of up to 65,536 code points, for prompts, outputs and other long texts.
pub type LongText = Text<0, 65_536>;
/// The name of a skill, such as `arithmetic`: 1 to 64 code points.
pub type SkillId = Text<1, 64>;
/// The student's name for a task: up to 256 code points, or empty.
pub type TaskId = Text<0, 256>;

/// A task, and the outputs to be judged by it.
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
#[serde(try_from = "SubmissionJson")]
#[non_exhaustive]
pub struct Submission {
    version: Version,
    /// The task that the outputs were made for.
    pub task: Task,
    /// The outputs to be judged.
    #[serde(flatten)]
    pub outputs: Outputs,
    /// Outputs of known quality, and whether each is good. They are no part of the JSON.
    #[serde(skip)]
    pub(super) anchors: Vec<(LongText, bool)>,
}

/// The outputs to be judged. Each costs the evaluator's price.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub enum Outputs {
    /// One output.
    #[serde(rename = "output")]
    Single(LongText),
    /// Two outputs, to be compared with each other.
    #[serde(rename = "pair")]
    Pair([LongText; 2]),
    /// Any number of outputs. The evaluator judges them one by one or compares them.
    #[serde(rename = "outputs")]
    Group(List<LongText, 1, MAX_OUTPUTS>),
}

impl Submission {
    /// Creates a submission of these outputs.
    pub const fn new(task: Task, outputs: Outputs) -> Self {
        Self { version: Version, task, outputs, anchors: Vec::new() }
    }

    /// Creates a submission of one output.
    ///
    /// # Errors
    /// [`LengthError`] if it is too long.
    pub fn single(task: Task, output: impl Into<String>) -> Result<Self, LengthError> {
        Ok(Self::new(task, Outputs::Single(LongText::new(output)?)))
    }

    /// Creates a submission of two outputs to be compared.
    ///
    /// # Errors
    /// [`LengthError`] if one is too long.
    pub fn pair(task: Task, first: impl Into<String>, second: impl Into<String>) -> Result<Self, LengthError> {
        Ok(Self::new(task, Outputs::Pair([LongText::new(first)?, LongText::new(second)?])))
    }

    /// Creates a submission of a group of outputs.
    ///
    /// # Errors
    /// [`LengthError`] if one is too long, or there are none or more than [`MAX_OUTPUTS`].
    pub fn group(task: Task, outputs: impl IntoIterator<Item = impl Into<String>>) -> Result<Self, LengthError> {
        let outputs = outputs.into_iter().map(LongText::new).collect::<Result<Vec<_>, _>>()?;
        Ok(Self::new(task, Outputs::Group(List::new(outputs)?)))
    }

    /// Adds an anchor: an output of the same task whose quality is known.
    ///
    /// A [`Student`](super::Student) mixes anchors in with the outputs, pays for them, and leaves them out of the feedback. In an
    /// [audit](super::Student::audit) they are compared with the outputs. So they show what evaluators are worth even if all outputs are
    /// equally good or bad, or the same. Anchors that look unlike the outputs can be recognized. They are no part of the JSON of a submission.
    ///
    /// # Errors
    /// [`LengthError`] if the output is too long, or there are more than [`MAX_OUTPUTS`] outputs and anchors.
    pub fn with_anchor(mut self, output: impl Into<String>, is_good: bool) -> Result<Self, LengthError> {
        let length = self.outputs().len() + self.anchors.len() + 1;
        if length > MAX_OUTPUTS {
            return Err(LengthError { length, least: 1, most: MAX_OUTPUTS });
        }
        self.anchors.push((LongText::new(output)?, is_good));
        Ok(self)
    }

    /// Reads a submission from JSON.
    ///
    /// # Errors
    /// [`MessageError`] says what is wrong, and where.
    pub fn from_json(json: &[u8]) -> Result<Self, MessageError> {
        message::read(json)
    }

    /// Returns the outputs in order.
    pub fn outputs(&self) -> &[LongText] {
        match &self.outputs {
            Outputs::Single(output) => std::slice::from_ref(output),
            Outputs::Pair(pair) => pair,
            Outputs::Group(group) => group,
        }
    }
}

/// The task that outputs are judged by.
///
/// ```
/// use x402_market::Task;
///
/// let task = Task::new("arithmetic", "What is 17 * 23?")?.with_id("t1")?.with_reference("391")?;
/// assert_eq!(task.question(), "What is 17 * 23?");
/// # Ok::<(), x402_market::LengthError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "TaskJson")]
#[non_exhaustive]
pub struct Task {
    /// The student's name for the task.
    pub id: TaskId,
    /// The skill that judging it takes.
    pub skill: SkillId,
    /// The question or conversation.
    #[serde(flatten)]
    pub input: Input,
    /// Background that a judge should know.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub context: Option<LongText>,
    /// The criteria to judge by.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rubric: Option<LongText>,
    /// A good answer. Whoever is judged must not see it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reference: Option<LongText>,
}

/// The question or conversation of a task.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Input {
    /// One question (`prompt`).
    Prompt(LongText),
    /// A conversation (`messages`), of which the output is the next message.
    Messages(List<Message, 1, 256>),
}

/// A message of a conversation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Message {
    /// The speaker: `system`, `user`, `assistant`, `tool`, …
    pub role: Text<1, 64>,
    /// The text.
    pub content: LongText,
    #[serde(flatten)]
    rest: Unknown,
}

impl Task {
    /// Creates a task with one question.
    ///
    /// # Errors
    /// [`LengthError`] if a text is too long, or the skill is empty.
    pub fn new(skill: impl Into<String>, prompt: impl Into<String>) -> Result<Self, LengthError> {
        Ok(Self::with_input(Text::new(skill)?, Input::Prompt(Text::new(prompt)?)))
    }

    /// Creates a task that is a conversation.
    ///
    /// # Errors
    /// [`LengthError`] if there are no messages or more than 256, or the skill is empty or too long.
    pub fn chat(skill: impl Into<String>, messages: impl IntoIterator<Item = Message>) -> Result<Self, LengthError> {
        Ok(Self::with_input(Text::new(skill)?, Input::Messages(List::new(messages)?)))
    }

    fn with_input(skill: SkillId, input: Input) -> Self {
        Self { id: TaskId::default(), skill, input, context: None, rubric: None, reference: None }
    }

    /// Sets the student's name for the task. Default: empty.
    ///
    /// # Errors
    /// [`LengthError`] if it is too long.
    pub fn with_id(self, id: impl Into<String>) -> Result<Self, LengthError> {
        Ok(Self { id: Text::new(id)?, ..self })
    }

    /// Adds background that a judge should know.
    ///
    /// # Errors
    /// [`LengthError`] if it is too long.
    pub fn with_context(self, context: impl Into<String>) -> Result<Self, LengthError> {
        Ok(Self { context: Some(Text::new(context)?), ..self })
    }

    /// Adds criteria to judge by.
    ///
    /// # Errors
    /// [`LengthError`] if they are too long.
    pub fn with_rubric(self, rubric: impl Into<String>) -> Result<Self, LengthError> {
        Ok(Self { rubric: Some(Text::new(rubric)?), ..self })
    }

    /// Adds a good answer.
    ///
    /// # Errors
    /// [`LengthError`] if it is too long.
    pub fn with_reference(self, reference: impl Into<String>) -> Result<Self, LengthError> {
        Ok(Self { reference: Some(Text::new(reference)?), ..self })
    }

    /// Returns the prompt, or the last message of the conversation.
    pub fn question(&self) -> &str {
        match &self.input {
            Input::Prompt(prompt) => prompt,
            Input::Messages(messages) => messages.last().map_or("", |message| &message.content),
        }
    }
}

impl Message {
    /// Creates a message.
    ///
    /// # Errors
    /// [`LengthError`] if the role is empty, or a text is too long.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Result<Self, LengthError> {
        Ok(Self { role: Text::new(role)?, content: Text::new(content)?, rest: Unknown {} })
    }
}

/// A submission in JSON, as it is read.
#[derive(Deserialize)]
struct SubmissionJson {
    #[serde(default)]
    version: Version,
    task: Task,
    output: Option<LongText>,
    pair: Option<List<LongText, 2, 2>>,
    outputs: Option<List<LongText, 1, MAX_OUTPUTS>>,
    #[serde(flatten)]
    rest: Unknown,
}

impl TryFrom<SubmissionJson> for Submission {
    type Error = &'static str;

    fn try_from(json: SubmissionJson) -> Result<Self, Self::Error> {
        let SubmissionJson { version: Version, task, output, pair, outputs, rest: Unknown {} } = json;
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
        Ok(Self::new(task, outputs))
    }
}

/// A task in JSON, as it is read.
#[derive(Deserialize)]
struct TaskJson {
    #[serde(default)]
    id: TaskId,
    skill: SkillId,
    prompt: Option<LongText>,
    messages: Option<List<Message, 1, 256>>,
    context: Option<LongText>,
    rubric: Option<LongText>,
    reference: Option<LongText>,
    #[serde(flatten)]
    rest: Unknown,
}

impl TryFrom<TaskJson> for Task {
    type Error = &'static str;

    fn try_from(json: TaskJson) -> Result<Self, Self::Error> {
        let TaskJson { id, skill, prompt, messages, context, rubric, reference, rest: Unknown {} } = json;
        let input = match (prompt, messages) {
            (Some(prompt), None) => Input::Prompt(prompt),
            (None, Some(messages)) => Input::Messages(messages),
            (None, None) => return Err("prompt or messages is missing"),
            (Some(_), Some(_)) => return Err("prompt and messages exclude each other"),
        };
        Ok(Self { id, skill, input, context, rubric, reference })
    }
}
