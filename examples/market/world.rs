//! A world: evaluators with accuracies and prices, and how they change.

use std::path::Path;

use anyhow::{Context, ensure};
use serde::Deserialize;

/// A world, as in its file.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct World {
    /// A description.
    #[serde(default)]
    pub(crate) about: String,
    pub(crate) students: usize,
    pub(crate) tasks_per_student: usize,
    pub(crate) skills: usize,
    pub(crate) budget_per_task_microusdc: u64,
    /// The share of tasks whose truth the student knows.
    pub(crate) audit_rate: f64,
    /// How many outputs an audited group has, half of them good. Zero: an audit is of one comparison.
    #[serde(default)]
    pub(crate) audited_outputs: u32,
    /// Whether students share their audits.
    pub(crate) pooled: bool,
    pub(crate) evaluators: Vec<Evaluator>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Evaluator {
    pub(crate) name: String,
    /// The probability that a verdict is right, by skill.
    pub(crate) accuracy: Vec<f64>,
    pub(crate) price_microusdc: u64,
    /// The accuracies that its card claims.
    pub(crate) claims: Vec<usize>,
    #[serde(default)]
    pub(crate) changes: Vec<Change>,
    /// Runs a payer that praises this evaluator and its friend, with as many audits as twenty students have at 5 %.
    pub(crate) colludes_with: Option<String>,
    /// That payer reports the truth about everyone else, instead of false errors.
    #[serde(default)]
    pub(crate) subtle: bool,
    /// The tasks at which it takes another name.
    #[serde(default)]
    pub(crate) reenters_at: Vec<usize>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Change {
    pub(crate) at_task: usize,
    pub(crate) accuracy: Option<Vec<f64>>,
    pub(crate) price_microusdc: Option<u64>,
}

impl World {
    pub(crate) fn read(path: &Path) -> anyhow::Result<Self> {
        let text = std::fs::read_to_string(path).with_context(|| format!("{} cannot be read", path.display()))?;
        let world: Self = serde_json::from_str(&text).with_context(|| format!("{} is not a world", path.display()))?;
        world.check().with_context(|| format!("{} makes no sense", path.display()))?;
        Ok(world)
    }

    fn check(&self) -> anyhow::Result<()> {
        ensure!(self.students > 0 && self.tasks_per_student > 0, "there is nothing to do");
        ensure!((1..=64).contains(&self.skills), "between 1 and 64 skills");
        ensure!((0.0..=1.0).contains(&self.audit_rate), "audit_rate is a share");
        ensure!(!self.evaluators.is_empty(), "the world has no evaluators");
        for evaluator in &self.evaluators {
            let name = &evaluator.name;
            for accuracy in
                evaluator.changes.iter().filter_map(|change| change.accuracy.as_ref()).chain([&evaluator.accuracy])
            {
                ensure!(accuracy.len() == self.skills, "{name}: one accuracy per skill");
                ensure!(
                    accuracy.iter().all(|accuracy| (0.0..=1.0).contains(accuracy)),
                    "{name}: accuracies are probabilities"
                );
            }
            ensure!(evaluator.claims.iter().all(|skill| *skill < self.skills), "{name}: claims an unknown skill");
            if let Some(friend) = &evaluator.colludes_with {
                ensure!(self.evaluators.iter().any(|other| other.name == *friend), "{name}: {friend} does not exist");
            }
        }
        Ok(())
    }

    /// Returns the tasks at which accuracies or prices change, including the first.
    pub(crate) fn changes(&self) -> Vec<usize> {
        let mut at: Vec<_> =
            self.evaluators.iter().flat_map(|evaluator| &evaluator.changes).map(|change| change.at_task).collect();
        at.push(0);
        at.retain(|at| *at < self.tasks_per_student);
        at.sort_unstable();
        at.dedup();
        at
    }
}

impl Evaluator {
    /// Returns accuracies and price at a task.
    pub(crate) fn at(&self, task: usize) -> (&[f64], u64) {
        let mut now = (self.accuracy.as_slice(), self.price_microusdc);
        for change in self.changes.iter().filter(|change| change.at_task <= task) {
            now = (change.accuracy.as_deref().unwrap_or(now.0), change.price_microusdc.unwrap_or(now.1));
        }
        now
    }

    /// Returns the number of its name at a task, counted from zero.
    pub(crate) fn life(&self, task: usize) -> usize {
        self.reenters_at.iter().filter(|at| **at <= task).count()
    }
}
