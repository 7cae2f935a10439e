//! Why an output was judged as it was.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::{
    bounded::{List, Text},
    message::Unknown,
};

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
