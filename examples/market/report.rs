//! Summarizes all runs of a policy.

use serde::Serialize;

use super::{
    oracle,
    run::{Outcomes, Policy},
    world::World,
};

/// A mean over seeds, with its 95 % confidence interval.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Estimate {
    pub(crate) mean: f64,
    pub(crate) low: f64,
    pub(crate) high: f64,
}

impl Estimate {
    /// Estimates by the normal distribution, for twenty values or more. The interval of a single value is that value.
    fn of(values: &[f64]) -> Self {
        let count = values.len() as f64;
        let mean = values.iter().sum::<f64>() / count;
        let variance = values.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / (count - 1.0).max(1.0);
        let half = 1.96 * (variance / count).sqrt();
        Self { mean, low: mean - half, high: mean + half }
    }
}

#[derive(Clone, Debug, Serialize)]
pub(crate) struct Report {
    pub(crate) policy: String,
    /// The value in percent of the oracle's.
    pub(crate) value_percent_of_oracle: Estimate,
    /// The value per task: 2·accuracy − 1 of the evaluator hired, or 0.
    pub(crate) value_per_task: Estimate,
    pub(crate) spend_per_task_microusdc: Estimate,
    /// The regret against the oracle per student, in perfectly judged tasks.
    pub(crate) regret_per_student: Estimate,
    /// Shares of the evaluations bought in the last fifth of the tasks, including those for audits.
    pub(crate) late_share_of_best: Estimate,
    pub late_share_below_60_percent: Estimate,
    /// The share of the last fifth of the tasks for which nobody was hired.
    pub(crate) late_share_unserved: Estimate,
    /// The students' final trust in each other, and in the colluders' payers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) trust_in_students: Option<Estimate>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) trust_in_shams: Option<Estimate>,
    /// The mean regret per student after each task.
    #[serde(skip)]
    pub(crate) regret: Vec<f64>,
    /// The mean spending per student, by task and evaluator.
    #[serde(skip)]
    pub(crate) paid: Vec<Vec<f64>>,
}

impl Report {
    pub(crate) fn new(world: &World, policy: Policy, runs: &[Outcomes]) -> Self {
        let best = oracle::by_task(world);
        let (students, tasks) = (world.students as f64, world.tasks_per_student as f64);
        let of = |value: &dyn Fn(&Outcomes) -> f64| Estimate::of(&runs.iter().map(value).collect::<Vec<_>>());
        let known = |value: &dyn Fn(&Outcomes) -> Option<f64>| {
            let values: Vec<_> = runs.iter().filter_map(value).collect();
            (!values.is_empty()).then(|| Estimate::of(&values))
        };
        let mean = |value: &dyn Fn(&Outcomes) -> f64| runs.iter().map(value).sum::<f64>() / runs.len() as f64;
        let total = |run: &Outcomes| run.value.iter().sum::<f64>() / students;
        let share = |part: usize, of: usize| part as f64 / of.max(1) as f64;
        let lost = |(task, best): (usize, &f64)| best - mean(&|run| run.value[task]) / students;
        let regret = best.iter().enumerate().scan(0.0, |sum, step| {
            *sum += lost(step);
            Some(*sum)
        });
        let paid = |task: usize| {
            (0..world.evaluators.len()).map(|number| mean(&|run| run.paid[task][number]) / students).collect()
        };
        Self {
            policy: policy.name(),
            value_percent_of_oracle: of(&|run| 100.0 * run.share(world)),
            value_per_task: of(&|run| total(run) / tasks),
            spend_per_task_microusdc: of(&|run| run.spent() / students / tasks),
            regret_per_student: of(&|run| best.iter().sum::<f64>() - total(run)),
            late_share_of_best: of(&|run| share(run.late.best, run.late.bought)),
            late_share_below_60_percent: of(&|run| share(run.late.poor, run.late.bought)),
            late_share_unserved: of(&|run| share(run.late.unserved, run.late.tasks)),
            trust_in_students: known(&|run| run.trust),
            trust_in_shams: known(&|run| run.trust_in_shams),
            regret: regret.collect(),
            paid: (0..world.tasks_per_student).map(paid).collect(),
        }
    }
}
