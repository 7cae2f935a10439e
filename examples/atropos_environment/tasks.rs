//! The tasks: word problems, or programs in levels that open as the policy learns.

use std::collections::BTreeMap;

use anyhow::Context as _;
use serde::{Deserialize, Serialize};
use x402_market::{LengthError, Submission, Task};

use crate::{
    policy::{Problem, Rng},
    rollout::Rollout,
};

/// The parts of programs, which ../policy_lm reads, too.
const PARTS: &str = include_str!("../policy_lm/tasks.json");
/// How many groups of the highest open level decide whether the next one opens.
const GROUPS: usize = 8;
/// The mean share of programs that must pass in these groups.
const ENOUGH: f64 = 0.6;
/// The score from which a program passes.
const PASSES: f64 = 0.99;

/// The skills that a task takes, with their weights. Without verdicts in the first there is no score.
pub(crate) type Skills = &'static [(&'static str, f64)];

const WORDS: Skills = &[("arithmetic", 0.7), ("prose", 0.3)];
const TESTS: Skills = &[("code", 1.0)];
const GROWTH: Skills = &[("code", 0.7), ("growth", 0.3)];
const SAFETY: Skills = &[("code", 0.7), ("safety", 0.3)];

/// A task of the policy.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum Question {
    Words(Problem),
    Program(Program),
}

/// A program to write: a filter, a map and a fold.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Program {
    pub(crate) level: usize,
    prompt: String,
    /// A right program.
    good: String,
    /// One that is wrong.
    wrong: String,
    /// One that is right, and slow or unsafe, at the levels at which that matters.
    bad: Option<String>,
}

impl Question {
    pub(crate) fn prompt(&self) -> &str {
        match self {
            Self::Words(problem) => &problem.prompt,
            Self::Program(program) => &program.prompt,
        }
    }

    pub(crate) fn kind(&self) -> String {
        match self {
            Self::Words(problem) => format!("{:?}", problem.kind).to_lowercase(),
            Self::Program(program) => format!("level {}", program.level),
        }
    }

    pub(crate) const fn skills(&self) -> Skills {
        match self {
            Self::Words(_) => WORDS,
            Self::Program(Program { level: 3, .. }) => GROWTH,
            Self::Program(Program { level: 4, .. }) => SAFETY,
            Self::Program(_) => TESTS,
        }
    }

    /// Returns the submission for a skill. Judges of words get the formula, which says what is asked, and not the result. Judges of
    /// programs get a right program, from which they make their hidden tests.
    pub(crate) fn submission(&self, skill: &str, answers: &[Rollout]) -> Result<Submission, LengthError> {
        let task = Task::new(skill, self.prompt())?;
        let task = match self {
            Self::Words(problem) => task.with_context(&problem.formula)?,
            Self::Program(program) => task.with_reference(program.reference())?,
        };
        Submission::group(task, answers.iter().map(|answer| &*answer.text))
    }

    /// Returns the share of right answers to a word problem, or of programs that passed by the verdicts. The trainer is not told.
    pub(crate) fn right(&self, answers: &[Rollout], scores: Option<&[f64]>) -> f64 {
        let right = match self {
            Self::Words(problem) => {
                let ending = format!("Answer: {}", problem.truth());
                answers.iter().filter(|answer| answer.text.trim_end().ends_with(&ending)).count()
            }
            Self::Program(_) => scores.unwrap_or_default().iter().filter(|score| **score >= PASSES).count(),
        };
        right as f64 / answers.len().max(1) as f64
    }
}

impl Program {
    /// Returns a program that is good in this skill, or one that is bad in it.
    pub(crate) fn anchor(&self, skill: &str, wanted: bool) -> String {
        let bad = self.bad.as_ref().filter(|_| skill != "code").unwrap_or(&self.wrong);
        if wanted { self.good.clone() } else { bad.clone() }
    }

    fn reference(&self) -> String {
        let inputs = match self.level {
            4 => {
                "def inputs(size, random):\n    guess = [number % 20 for number in random[:size]]\n    secret = [right(x) for x in \
                 guess]\n    if size > 0 and random[-1] % 2:\n        secret[random[-2] % size] += 1\n    return [secret, guess]"
            }
            _ => "def inputs(size, random):\n    return [[number % 20 for number in random[:size]]]",
        };
        match self.level {
            4 => format!("{}\n\ndef right(x):\n    return {}\n\n{inputs}\n", self.good, self.map()),
            _ => format!("{}\n\n{inputs}\n", self.good),
        }
    }

    /// Returns what a comparison at level 4 expects for `x`.
    fn map(&self) -> &str {
        self.good.split_once("y ^ ").and_then(|(_, rest)| rest.lines().next()).unwrap_or("x")
    }
}

/// What a program is composed of.
#[derive(Deserialize)]
struct Parts {
    filters: BTreeMap<String, String>,
    maps: BTreeMap<String, String>,
    folds: Vec<Fold>,
}

#[derive(Deserialize)]
struct Fold {
    name: String,
    level: usize,
    good: String,
    bad: Option<String>,
}

/// Returns the programs that the policy is asked for. A fifth of the combinations is held out: it is never asked for.
fn programs() -> anyhow::Result<Vec<Program>> {
    let parts: Parts = serde_json::from_str(PARTS).context("tasks.json")?;
    let mut programs = Vec::new();
    for (f, (filter, condition)) in parts.filters.iter().enumerate() {
        for (m, (map, expression)) in parts.maps.iter().enumerate() {
            for (l, fold) in parts.folds.iter().enumerate() {
                if (f + m + l) % 5 == 0 {
                    continue;
                }
                let fill = |text: &str| text.replace("{filter}", condition).replace("{map}", expression);
                let good = fill(&fold.good);
                // Another map is wrong for nearly every input.
                let wrong = good.replace(expression, "x + 7");
                let bad = fold.bad.as_deref().map(fill);
                let prompt = format!("Write the function f: keep {filter}, then {map}, then {}.", fold.name);
                programs.push(Program { level: fold.level, prompt, good, wrong, bad });
            }
        }
    }
    Ok(programs)
}

/// The levels of the programs, and how the policy did at the highest open one.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Levels {
    pub(crate) open: usize,
    recent: Vec<f64>,
}

impl Levels {
    pub(crate) const fn new() -> Self {
        Self { open: 1, recent: Vec::new() }
    }

    /// Returns a program to write: every second one is of the highest open level.
    pub(crate) fn any(&self, rng: &mut Rng) -> anyhow::Result<Question> {
        let level = if rng.unit() < 0.5 { self.open } else { 1 + rng.below(self.open) };
        let mut programs = programs()?;
        programs.retain(|program| program.level == level);
        let at = rng.below(programs.len());
        Ok(Question::Program(programs.swap_remove(at)))
    }

    /// Records the share of programs that passed, and opens the next level if it is enough.
    pub(crate) fn enter(&mut self, level: usize, passed: f64) {
        if level != self.open || level == 4 {
            return;
        }
        self.recent.push(passed);
        if self.recent.len() > GROUPS {
            self.recent.remove(0);
        }
        if self.recent.len() == GROUPS && self.recent.iter().sum::<f64>() / GROUPS as f64 >= ENOUGH {
            *self = Self { open: level + 1, recent: Vec::new() };
            eprintln!("level {} is open", self.open);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn each_part_is_asked_for_and_some_combinations_never_are() {
        let programs = programs().unwrap();
        assert_eq!(programs.len(), 5 * 5 * 9 - 45);
        let words: BTreeSet<_> = programs.iter().flat_map(|program| program.prompt.split(' ')).collect();
        let parts: Parts = serde_json::from_str(PARTS).unwrap();
        for name in parts.filters.keys().chain(parts.maps.keys()) {
            assert!(words.contains(&*format!("{name},")), "{name}");
        }
        assert_eq!(programs.iter().map(|program| program.level).collect::<BTreeSet<_>>(), [1, 2, 3, 4].into());
        assert!(
            programs
                .iter()
                .all(|program| program.good != program.wrong && (program.level > 2) == program.bad.is_some())
        );
    }

    #[test]
    fn a_level_opens_when_enough_programs_of_the_one_below_pass() {
        let mut levels = Levels::new();
        for _ in 0..GROUPS {
            levels.enter(2, 1.0);
            levels.enter(1, 0.5);
        }
        assert_eq!(levels.open, 1);
        for _ in 0..GROUPS {
            levels.enter(1, 1.0);
        }
        assert_eq!(levels, Levels { open: 2, recent: Vec::new() }, "what is below no longer counts");
    }
}
