//! A specialist that needs no model: exact arithmetic and unit checking of a worked answer.
//!
//! It evaluates what the prompt asks for, checks every equality that the answer states on the way, and compares the final answer,
//! its unit included. Where it cannot read the prompt it says so, with a low confidence, instead of guessing.

mod clause;
mod expression;
mod judge;
mod lexer;
mod number;
mod question;
mod statements;
mod units;

use serde::{Deserialize, Serialize};

/// The skill that this specialist has.
pub(crate) const SKILL: &str = "arithmetic";
/// The longest prompt, in bytes.
const MAX_PROMPT: usize = 4 * 1024;
/// The longest answer, in bytes.
const MAX_OUTPUT: usize = 16 * 1024;

/// What is to be judged.
#[derive(Debug, Deserialize)]
pub(crate) struct Submission {
    task: Task,
    output: String,
}

#[derive(Debug, Deserialize)]
struct Task {
    #[serde(default)]
    id: String,
    skill: String,
    prompt: String,
}

/// The verdict.
#[derive(Debug, Serialize)]
pub(crate) struct Evaluation {
    /// From 0 to 1.
    pub(crate) score: f64,
    /// From -1 to 1.
    pub(crate) reward: f64,
    /// The probability that the verdict is right.
    pub(crate) confidence: f64,
    pub(crate) critique: Critique,
}

#[derive(Debug, Default, Serialize)]
pub(crate) struct Critique {
    pub(crate) summary: String,
    pub(crate) strengths: Vec<String>,
    pub(crate) issues: Vec<String>,
}

/// Why a submission is not judged, and so not charged.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// Not a submission.
    Malformed(String),
    /// A submission that this specialist does not take.
    NotTaken(String),
}

/// Judges a submission in JSON.
pub(crate) fn evaluate(submission: &[u8]) -> Result<Evaluation, Refusal> {
    let submission: Submission = serde_json::from_slice(submission).map_err(|error| {
        let shape =
            r#"{"task": {"id": "t1", "skill": "arithmetic", "prompt": "What is 2 + 2?"}, "output": "Answer: 4"}"#;
        Refusal::Malformed(format!("{error}; send {shape}"))
    })?;
    let Submission { task, output } = submission;
    if task.skill != SKILL {
        let message = format!("this evaluator's skill is {SKILL:?}: set task.skill to that, or ask another evaluator");
        return Err(Refusal::NotTaken(message));
    }
    for (name, length, limit) in [
        ("task.id", task.id.len(), 256),
        ("task.prompt", task.prompt.len(), MAX_PROMPT),
        ("output", output.len(), MAX_OUTPUT),
    ] {
        if length > limit {
            return Err(Refusal::NotTaken(format!("{name} has {length} bytes: shorten it to {limit}")));
        }
    }
    Ok(judge::judge(&task.prompt, &output))
}

#[cfg(test)]
mod tests {
    use super::{Refusal, evaluate};

    #[test]
    fn other_skills_and_other_shapes_are_refused() {
        let poem = br#"{"task": {"id": "t1", "skill": "poetry", "prompt": "Rhyme"}, "output": "time"}"#;
        assert!(matches!(evaluate(poem), Err(Refusal::NotTaken(message)) if message.contains("task.skill")));
        for text in ["", "[]", "{}", r#"{"task": {}, "output": 3}"#] {
            assert!(matches!(evaluate(text.as_bytes()), Err(Refusal::Malformed(_))), "{text}");
        }
    }

    #[test]
    fn what_is_too_long_is_refused() {
        let long = "1+".repeat(5_000);
        let task = serde_json::json!({ "id": "t1", "skill": "arithmetic", "prompt": long });
        let submission = serde_json::json!({ "task": task, "output": "" }).to_string();
        assert!(matches!(evaluate(submission.as_bytes()), Err(Refusal::NotTaken(_))));
    }
}
