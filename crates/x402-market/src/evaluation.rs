//! What an evaluator answers.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::{
    bounded::{LengthError, List, Text},
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

/// A critique in parts. What is too long is cut, and what is too much left out, so that writing one cannot fail.
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
pub struct Critique {
    /// The verdict in a sentence or two.
    pub summary: Text<0, 4_096>,
    /// What is good.
    #[serde(default)]
    pub strengths: List<Text<0, 1_024>, 0, 64>,
    /// What is not.
    #[serde(default)]
    pub issues: List<Issue, 0, 64>,
    #[serde(flatten)]
    rest: Unknown,
}

/// Something that is not good.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Issue {
    /// How much it matters.
    pub severity: Severity,
    /// What it is.
    pub description: Text<0, 2_048>,
    /// Where it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub place: Option<Place>,
    /// What would be better.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub suggestion: Option<Text<0, 2_048>>,
    #[serde(flatten)]
    rest: Unknown,
}

/// How much an issue matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// The output is hardly worse for it.
    Minor,
    /// The output is clearly worse for it.
    Major,
    /// The output is no good because of it.
    Critical,
}

/// A place in an output: where it is, what it says, or both.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "WirePlace", into = "WirePlace")]
pub struct Place {
    span: Option<Span>,
    quote: Option<Text<0, 1_024>>,
}

/// A part of an output, counted in Unicode code points.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// How many come before.
    pub start: u32,
    /// How many there are.
    pub length: u32,
}

impl Critique {
    /// A critique of one sentence or two.
    pub fn new(summary: impl Into<String>) -> Self {
        Self { summary: Text::cut(summary), ..Self::default() }
    }

    /// Adds something good.
    pub fn strength(mut self, strength: impl Into<String>) -> Self {
        self.strengths.push(Text::cut(strength));
        self
    }

    /// Adds something that is not.
    pub fn issue(mut self, issue: Issue) -> Self {
        self.issues.push(issue);
        self
    }
}

impl From<&str> for Critique {
    fn from(summary: &str) -> Self {
        Self::new(summary)
    }
}

impl From<String> for Critique {
    fn from(summary: String) -> Self {
        Self::new(summary)
    }
}

impl Issue {
    /// An issue somewhere in the output, or everywhere.
    pub fn new(severity: Severity, description: impl Into<String>) -> Self {
        Self { severity, description: Text::cut(description), place: None, suggestion: None, rest: Unknown }
    }

    /// Says where it is, if that is known.
    pub fn at(self, place: impl Into<Option<Place>>) -> Self {
        Self { place: place.into(), ..self }
    }

    /// Says what would be better.
    pub fn suggest(self, suggestion: impl Into<String>) -> Self {
        Self { suggestion: Some(Text::cut(suggestion)), ..self }
    }
}

impl Place {
    /// The place of a range of bytes, with what it says unless that is long; `None` if the range is not one of `output`.
    pub fn of(output: &str, bytes: Range<usize>) -> Option<Self> {
        let quote = output.get(bytes.clone())?;
        let start = output.get(..bytes.start)?.chars().count().try_into().ok()?;
        let length = quote.chars().count().try_into().ok()?;
        Some(Self { span: Some(Span { start, length }), quote: Text::new(quote).ok() })
    }

    /// The first place that says `quote`; `None` if none does.
    pub fn quoting(output: &str, quote: &str) -> Option<Self> {
        let start = output.find(quote)?;
        Self::of(output, start..start + quote.len())
    }

    /// Where it is.
    pub const fn span(&self) -> Option<Span> {
        self.span
    }

    /// What it says.
    pub fn quote(&self) -> Option<&str> {
        self.quote.as_deref()
    }

    /// Whether the output has such a place.
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

/// A place in JSON.
#[derive(Serialize, Deserialize)]
struct WirePlace {
    #[serde(skip_serializing_if = "Option::is_none")]
    start: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    length: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    quote: Option<Text<0, 1_024>>,
    #[serde(flatten)]
    rest: Unknown,
}

impl TryFrom<WirePlace> for Place {
    type Error = &'static str;

    fn try_from(wire: WirePlace) -> Result<Self, Self::Error> {
        let WirePlace { start, length, quote, rest: Unknown } = wire;
        match (start, length) {
            (Some(start), Some(length)) => Ok(Self { span: Some(Span { start, length }), quote }),
            (None, None) if quote.is_some() => Ok(Self { span: None, quote }),
            (None, None) => Err("a place has start and length, or quote, or all of them"),
            _ => Err("start and length go together"),
        }
    }
}

impl From<Place> for WirePlace {
    fn from(Place { span, quote }: Place) -> Self {
        let (start, length) = span.map(|span| (span.start, span.length)).unzip();
        Self { start, length, quote, rest: Unknown }
    }
}
