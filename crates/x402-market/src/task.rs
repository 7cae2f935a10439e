//! What an output was made for.

use serde::{Deserialize, Serialize};

use super::{
    bounded::{LengthError, List, Text},
    message::Unknown,
};

/// Text of up to 65,536 code points: prompts, outputs and whatever else is to be read.
pub type LongText = Text<0, 65_536>;
/// The name of a skill, such as `arithmetic`: 1 to 64 code points.
pub type SkillId = Text<1, 64>;
/// A name for a task that the student chose: up to 256 code points, and it may be empty.
pub type TaskId = Text<0, 256>;

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
#[serde(try_from = "Wire", into = "Wire")]
pub struct Task {
    /// What the student calls it.
    pub id: TaskId,
    /// The skill that judging it takes.
    pub skill: SkillId,
    /// What was asked.
    pub input: Input,
    /// What a judge should know besides.
    pub context: Option<LongText>,
    /// What to judge by.
    pub rubric: Option<LongText>,
    /// A good answer. Not to be told to whoever is judged.
    pub reference: Option<LongText>,
}

/// What was asked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Input {
    /// One question (`prompt`).
    Prompt(LongText),
    /// A conversation (`messages`), of which the output is the next message.
    Messages(List<Message, 1, 256>),
}

/// A message of a conversation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Message {
    /// Who speaks: `system`, `user`, `assistant`, `tool`, …
    pub role: Text<1, 64>,
    /// What is said.
    pub content: LongText,
    #[serde(flatten)]
    rest: Unknown,
}

impl Task {
    /// A task with one question.
    ///
    /// # Errors
    /// [`LengthError`] if something is too long, or the skill empty.
    pub fn new(skill: impl Into<String>, prompt: impl Into<String>) -> Result<Self, LengthError> {
        Ok(Self::of(Text::new(skill)?, Input::Prompt(Text::new(prompt)?)))
    }

    /// A task that is a conversation.
    ///
    /// # Errors
    /// [`LengthError`] if there are no messages, more than 256, or something is too long.
    pub fn chat(skill: impl Into<String>, messages: impl IntoIterator<Item = Message>) -> Result<Self, LengthError> {
        Ok(Self::of(Text::new(skill)?, Input::Messages(List::new(messages)?)))
    }

    fn of(skill: SkillId, input: Input) -> Self {
        Self { id: TaskId::default(), skill, input, context: None, rubric: None, reference: None }
    }

    /// Names it.
    ///
    /// # Errors
    /// [`LengthError`].
    pub fn with_id(self, id: impl Into<String>) -> Result<Self, LengthError> {
        Ok(Self { id: Text::new(id)?, ..self })
    }

    /// Adds what a judge should know besides.
    ///
    /// # Errors
    /// [`LengthError`].
    pub fn with_context(self, context: impl Into<String>) -> Result<Self, LengthError> {
        Ok(Self { context: Some(Text::new(context)?), ..self })
    }

    /// Adds what to judge by.
    ///
    /// # Errors
    /// [`LengthError`].
    pub fn with_rubric(self, rubric: impl Into<String>) -> Result<Self, LengthError> {
        Ok(Self { rubric: Some(Text::new(rubric)?), ..self })
    }

    /// Adds a good answer.
    ///
    /// # Errors
    /// [`LengthError`].
    pub fn with_reference(self, reference: impl Into<String>) -> Result<Self, LengthError> {
        Ok(Self { reference: Some(Text::new(reference)?), ..self })
    }

    /// The prompt, or the last message of the conversation.
    pub fn question(&self) -> &str {
        match &self.input {
            Input::Prompt(prompt) => prompt,
            Input::Messages(messages) => messages.last().map_or("", |message| &message.content),
        }
    }
}

impl Message {
    /// What `role` said.
    ///
    /// # Errors
    /// [`LengthError`] if the role is empty or something is too long.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Result<Self, LengthError> {
        Ok(Self { role: Text::new(role)?, content: Text::new(content)?, rest: Unknown })
    }
}

/// A task in JSON.
#[derive(Serialize, Deserialize)]
struct Wire {
    #[serde(default)]
    id: TaskId,
    skill: SkillId,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt: Option<LongText>,
    #[serde(skip_serializing_if = "Option::is_none")]
    messages: Option<List<Message, 1, 256>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    context: Option<LongText>,
    #[serde(skip_serializing_if = "Option::is_none")]
    rubric: Option<LongText>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reference: Option<LongText>,
    #[serde(flatten)]
    rest: Unknown,
}

impl TryFrom<Wire> for Task {
    type Error = &'static str;

    fn try_from(wire: Wire) -> Result<Self, Self::Error> {
        let Wire { id, skill, prompt, messages, context, rubric, reference, rest: Unknown } = wire;
        let input = match (prompt, messages) {
            (Some(prompt), None) => Input::Prompt(prompt),
            (None, Some(messages)) => Input::Messages(messages),
            (None, None) => return Err("prompt or messages is missing"),
            (Some(_), Some(_)) => return Err("prompt and messages exclude each other"),
        };
        Ok(Self { id, skill, input, context, rubric, reference })
    }
}

impl From<Task> for Wire {
    fn from(task: Task) -> Self {
        let Task { id, skill, input, context, rubric, reference } = task;
        let (prompt, messages) = match input {
            Input::Prompt(prompt) => (Some(prompt), None),
            Input::Messages(messages) => (None, Some(messages)),
        };
        Self { id, skill, prompt, messages, context, rubric, reference, rest: Unknown }
    }
}
