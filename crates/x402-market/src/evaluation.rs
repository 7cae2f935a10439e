//! What an evaluator answers: a verdict and a critique for each output.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::{
    bounded::{LengthError, List, Text},
    measure::{Confidence, Reward, Score},
    message::{self, MessageError, Unknown, Version},
    submission::TaskId,
    submission::{MAX_OUTPUTS, Submission},
};

/// The largest evaluation as JSON, in bytes: 1 MiB. Evaluators sell no larger ones, and students read no larger ones.
pub const MAX_EVALUATION: usize = 1 << 20;

/// The verdicts on a submission, in the order of its outputs.
///
/// [`EVALUATION_SCHEMA`](super::schema::EVALUATION_SCHEMA) describes its JSON.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Evaluation {
    #[serde(default)]
    version: Version,
    /// The evaluator that judged.
    pub evaluator: EvaluatorId,
    /// The id of the submitted task.
    #[serde(default)]
    pub task: TaskId,
    /// The verdicts, one for each output.
    pub verdicts: List<Verdict, 1, MAX_OUTPUTS>,
    #[serde(flatten)]
    rest: Unknown,
}

/// The name of an evaluator and the version of its judgement. Another version may judge differently.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct EvaluatorId {
    /// The evaluator's name.
    pub id: Text<1, 256>,
    /// The version of its judgement.
    pub version: Text<1, 64>,
    #[serde(flatten)]
    rest: Unknown,
}

/// An evaluator's verdict on one output.
///
/// ```
/// use x402_market::Verdict;
///
/// let verdict = Verdict::new(0.75, 0.9, "Right, but hard to follow.");
/// assert_eq!(verdict.reward.get(), 0.5, "from -1 to 1 unless set otherwise");
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Verdict {
    /// The quality of the output.
    pub score: Score,
    /// The reward for a learner. From -1 to 1, unless the evaluator uses another scale.
    pub reward: Reward,
    /// The probability that this verdict is right.
    pub confidence: Confidence,
    /// The reasons.
    pub critique: Critique,
    #[serde(flatten)]
    rest: Unknown,
}

impl Evaluation {
    /// Creates the evaluation of a submission.
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
        let evaluation = Self { version: Version, evaluator, task, verdicts, rest: Unknown {} };
        evaluation.check(submission)?;
        Ok(evaluation)
    }

    /// Reads an evaluation from JSON.
    ///
    /// # Errors
    /// [`MessageError`] says what is wrong, and where.
    pub fn from_json(json: &[u8]) -> Result<Self, MessageError> {
        message::read(json)
    }

    /// Checks that the evaluation fits this submission: it has the task's id, a verdict for each output, and only issues about places that
    /// the outputs have.
    ///
    /// # Errors
    /// [`MessageError::Invalid`] names the part that does not fit.
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
}

impl EvaluatorId {
    /// Creates an id. The name has 1 to 256 code points, the version 1 to 64.
    ///
    /// # Errors
    /// [`LengthError`] if one of them is empty or too long.
    pub fn new(id: impl Into<String>, version: impl Into<String>) -> Result<Self, LengthError> {
        Ok(Self { id: Text::new(id)?, version: Text::new(version)?, rest: Unknown {} })
    }
}

impl Verdict {
    /// Creates a verdict. Its reward is the score, mapped from [0, 1] to [-1, 1]. Numbers can be given as `f64`, too: out of range they become
    /// the nearest in range.
    pub fn new(score: impl Into<Score>, confidence: impl Into<Confidence>, critique: impl Into<Critique>) -> Self {
        let score = score.into();
        Self { score, reward: score.into(), confidence: confidence.into(), critique: critique.into(), rest: Unknown {} }
    }
}

/// The reasons for a verdict. Texts that are too long are cut and surplus items are left out, so creating one cannot fail.
///
/// ```
/// use x402_market::{Critique, Issue, Place, Severity};
///
/// let output = "17 * 23 = 381. Answer: 381";
/// let issue = Issue::new(Severity::Critical, "17 * 23 is 391").at(Place::quoting(output, "17 * 23 = 381"));
/// let critique = Critique::new("Wrong.").strength("The work is shown.").issue(issue.suggest("Write 391."));
/// assert_eq!(critique.issues.len(), 1);
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[must_use]
pub struct Critique {
    /// The verdict in one or two sentences.
    pub summary: Text<0, 4_096>,
    /// The strengths of the output.
    #[serde(default)]
    pub strengths: List<Text<0, 1_024>, 0, 64>,
    /// The issues of the output.
    #[serde(default)]
    pub issues: List<Issue, 0, 64>,
    #[serde(flatten)]
    rest: Unknown,
}

/// An issue of an output.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[must_use]
pub struct Issue {
    /// The severity.
    pub severity: Severity,
    /// A description of the issue.
    pub description: Text<0, 2_048>,
    /// The place in the output, if the issue has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub place: Option<Place>,
    /// A suggestion for improvement.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub suggestion: Option<Text<0, 2_048>>,
    #[serde(flatten)]
    rest: Unknown,
}

/// The severity of an issue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Severity {
    /// The output is hardly worse for it.
    Minor,
    /// The output is clearly worse for it.
    Major,
    /// The output is useless because of it.
    Critical,
}

/// A place in an output: its position, its text, or both.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "WirePlace")]
pub struct Place {
    #[serde(flatten)]
    span: Option<Span>,
    #[serde(skip_serializing_if = "Option::is_none")]
    quote: Option<Text<0, 1_024>>,
}

/// A range of an output, in Unicode code points.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Span {
    /// The number of code points before the range.
    pub start: u32,
    /// The number of code points in the range.
    pub length: u32,
}

impl Critique {
    /// Creates a critique with this summary.
    pub fn new(summary: impl Into<String>) -> Self {
        Self { summary: Text::cut(summary), ..Self::default() }
    }

    /// Adds a strength.
    pub fn strength(mut self, strength: impl Into<String>) -> Self {
        self.strengths.push(Text::cut(strength));
        self
    }

    /// Adds an issue.
    pub fn issue(mut self, issue: Issue) -> Self {
        self.issues.push(issue);
        self
    }
}

impl<T: Into<String>> From<T> for Critique {
    fn from(summary: T) -> Self {
        Self::new(summary)
    }
}

impl Issue {
    /// Creates an issue without a place.
    pub fn new(severity: Severity, description: impl Into<String>) -> Self {
        Self { severity, description: Text::cut(description), place: None, suggestion: None, rest: Unknown {} }
    }

    /// Sets the place, if it is known.
    pub fn at(self, place: impl Into<Option<Place>>) -> Self {
        Self { place: place.into(), ..self }
    }

    /// Sets the suggestion.
    pub fn suggest(self, suggestion: impl Into<String>) -> Self {
        Self { suggestion: Some(Text::cut(suggestion)), ..self }
    }
}

impl Place {
    /// Returns the place of a range of bytes, with its text unless that is too long. `None` if `output` has no such range.
    pub fn of(output: &str, bytes: Range<usize>) -> Option<Self> {
        let quote = output.get(bytes.clone())?;
        let start = output.get(..bytes.start)?.chars().count().try_into().ok()?;
        let length = quote.chars().count().try_into().ok()?;
        Some(Self { span: Some(Span { start, length }), quote: Text::new(quote).ok() })
    }

    /// Returns the first place with the text `quote`. `None` if there is none.
    pub fn quoting(output: &str, quote: &str) -> Option<Self> {
        let start = output.find(quote)?;
        Self::of(output, start..start + quote.len())
    }

    /// Returns the position.
    pub const fn span(&self) -> Option<Span> {
        self.span
    }

    /// Returns the text.
    pub fn quote(&self) -> Option<&str> {
        self.quote.as_deref()
    }

    /// Returns `true` if `output` has this place.
    pub fn is_in(&self, output: &str) -> bool {
        let Some(Span { start, length }) = self.span else {
            return self.quote.as_ref().is_none_or(|quote| output.contains(&**quote));
        };
        let mut characters = output.chars().skip(start as usize);
        match &self.quote {
            Some(quote) => characters.take(length as usize).eq(quote.chars()),
            None => match (length as usize).checked_sub(1) {
                Some(before_last) => characters.nth(before_last).is_some(),
                None => output.chars().count() >= start as usize,
            },
        }
    }
}

/// A place in JSON, as it is read.
#[derive(Deserialize)]
struct WirePlace {
    start: Option<u32>,
    length: Option<u32>,
    quote: Option<Text<0, 1_024>>,
    #[serde(flatten)]
    rest: Unknown,
}

impl TryFrom<WirePlace> for Place {
    type Error = &'static str;

    fn try_from(wire: WirePlace) -> Result<Self, Self::Error> {
        let WirePlace { start, length, quote, rest: Unknown {} } = wire;
        match (start, length) {
            (Some(start), Some(length)) => Ok(Self { span: Some(Span { start, length }), quote }),
            (None, None) if quote.is_some() => Ok(Self { span: None, quote }),
            (None, None) => Err("a place needs start and length, or quote, or all of them"),
            _ => Err("start and length go together"),
        }
    }
}
