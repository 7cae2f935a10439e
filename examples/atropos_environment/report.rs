//! Progress, summary and plots.

use std::{
    io::{IsTerminal as _, Write as _, stderr},
    path::Path,
};

use alloy_primitives::Address;
use anyhow::Context as _;
use plotters::{coord::Shift, prelude::*};
use serde::{Deserialize, Serialize};
use tower_x402::Usdc;
use x402_market::EvaluatorAccount;

use crate::{
    canvas::{COLORS, FONT, Picture, both},
    chain::OnChain,
    policy::{ACTIONS, Policy},
    scoring::Scored,
};

/// How many groups a curve averages.
const WINDOW: usize = 10;

/// The counts of a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Tally {
    pub(crate) rolled_out: u64,
    pub(crate) pushed: u64,
    /// Not pushed: all answers got the same score.
    pub(crate) equal_scores: u64,
    /// Not pushed: no evaluator judged which answers are right.
    pub(crate) unjudged: u64,
    /// Not pushed: an answer was too long.
    pub(crate) too_long: u64,
    /// Sent, but not known to have arrived.
    pub(crate) unsure: u64,
    pub(crate) start: Skill,
    pub(crate) points: Vec<Point>,
}

/// The quality of the policy, by the truth.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Skill {
    /// The probability that an answer is right.
    pub(crate) right: f64,
    /// The probability that an answer is clear.
    pub(crate) clear: f64,
    /// The policy's entropy, in nats.
    pub(crate) entropy: f64,
}

/// A group, as a point of the curves.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Point {
    /// The mean score, if it was judged.
    pub(crate) score: Option<f64>,
    /// The share of right answers; of programs, of those that passed by the verdicts.
    pub(crate) right: f64,
    /// The policy after this group.
    pub(crate) policy: Skill,
    /// The amount spent by then.
    pub(crate) spent: Usdc,
}

impl Skill {
    pub(crate) fn of(policy: &Policy) -> Self {
        Self { right: policy.rightness(), clear: policy.clarity(), entropy: policy.entropy() }
    }
}

impl Tally {
    pub(crate) fn new(policy: &Policy) -> Self {
        Self {
            rolled_out: 0,
            pushed: 0,
            equal_scores: 0,
            unjudged: 0,
            too_long: 0,
            unsure: 0,
            start: Skill::of(policy),
            points: Vec::new(),
        }
    }

    /// Records a group that was judged and learned from.
    pub(crate) fn enter(&mut self, scored: &Scored, policy: &Policy, spent: Usdc) {
        let mean = |scores: &Vec<f64>| scores.iter().sum::<f64>() / scores.len().max(1) as f64;
        let score = scored.scores.as_ref().map(mean);
        self.rolled_out += 1;
        self.points.push(Point { score, right: scored.right(), policy: Skill::of(policy), spent });
    }

    /// Prints a line of progress: overwritten on a terminal, otherwise from time to time.
    pub(crate) fn progress(&self, groups: u64, budget: Usdc) {
        let Some(last) = self.points.last() else { return };
        let recent = &self.points[self.points.len().saturating_sub(WINDOW)..];
        let right = recent.iter().map(|point| point.right).sum::<f64>() / recent.len() as f64;
        let Self { rolled_out, pushed, .. } = self;
        let line = format!(
            "{rolled_out} of {groups} groups, {pushed} pushed, {} of {budget} spent, {:.0} % of the answers right",
            last.spent,
            right * 100.0
        );
        if stderr().is_terminal() {
            let end = if *rolled_out == groups { "\n" } else { "" };
            eprint!("\r\x1b[K{line}{end}");
            let _ = stderr().flush();
        } else if *rolled_out == groups || rolled_out.is_multiple_of(groups.div_ceil(10)) {
            eprintln!("{line}");
        }
    }
}

/// The document on standard output.
#[derive(Debug, Serialize)]
pub(crate) struct Summary {
    pub(crate) groups: Groups,
    pub(crate) budget: Usdc,
    pub(crate) spent: Usdc,
    pub(crate) reserved: Usdc,
    /// What is left in payment channels.
    pub(crate) escrow: Usdc,
    pub(crate) on_chain: Option<OnChain>,
    /// The part of the evaluators' earnings whose purpose was not recorded before a process ended.
    pub(crate) elsewhere: Usdc,
    pub(crate) evaluators: Vec<Earner>,
    pub(crate) learning: Learning,
    pub(crate) atropos: Place,
    pub(crate) plots: Vec<String>,
}

#[derive(Debug, Serialize)]
pub(crate) struct Groups {
    rolled_out: u64,
    pushed: u64,
    equal_scores: u64,
    unjudged: u64,
    too_long: u64,
    unsure: u64,
}

impl From<&Tally> for Groups {
    fn from(tally: &Tally) -> Self {
        let Tally { rolled_out, pushed, equal_scores, unjudged, too_long, unsure, .. } = *tally;
        Self { rolled_out, pushed, equal_scores, unjudged, too_long, unsure }
    }
}

/// The environment's part in the trainer's run.
#[derive(Debug, Serialize)]
pub(crate) struct Place {
    pub(crate) environment: String,
    /// The trainer's step, by the server's count.
    pub(crate) step: Option<u64>,
    /// How many batches the trainer in this process took.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) batches: Option<u64>,
}

/// What an evaluator earned and did.
#[derive(Debug, Serialize)]
pub(crate) struct Earner {
    name: Option<String>,
    evaluator: Address,
    earned: Usdc,
    answered: u64,
    audited: u64,
    /// The pairs of answers in audits, and those ordered rightly.
    pairs: u64,
    right: u64,
    failed: u64,
    lies: u64,
}

impl Earner {
    pub(crate) const fn new(evaluator: Address, name: Option<String>, earned: Usdc) -> Self {
        Self { name, evaluator, earned, answered: 0, audited: 0, pairs: 0, right: 0, failed: 0, lies: 0 }
    }

    /// Adds the counts of one skill.
    pub(crate) fn enter(&mut self, account: &EvaluatorAccount) {
        self.answered += account.answered;
        self.audited += account.audited;
        self.pairs += account.pairs;
        self.right += account.right;
        self.failed += account.invalid + account.timeouts;
        self.lies += account.mismatches;
    }
}

#[derive(Debug, Serialize)]
pub(crate) struct Learning {
    start: Course,
    end: Course,
}

/// The policy at the start or the end of the run.
#[derive(Debug, Serialize)]
struct Course {
    /// The truth about the policy in this process.
    policy: Option<Skill>,
    /// The mean of some groups' scores.
    score: Option<f64>,
    /// The share of their answers that is right.
    right: Option<f64>,
}

impl Learning {
    /// Summarizes the first and the last groups.
    pub(crate) fn of(tally: &Tally, is_here: bool) -> Self {
        let points = &tally.points;
        let some = points.len().min(2 * WINDOW);
        let course = |points: &[Point], skill: Skill| Course {
            policy: is_here.then_some(skill),
            score: mean(points.iter().filter_map(|point| point.score)),
            right: mean(points.iter().map(|point| point.right)),
        };
        let end = points.last().map_or(tally.start, |point| point.policy);
        Self { start: course(&points[..some], tally.start), end: course(&points[points.len() - some..], end) }
    }
}

fn mean(numbers: impl Iterator<Item = f64>) -> Option<f64> {
    let (sum, count) = numbers.fold((0.0, 0_u32), |(sum, count), number| (sum + number, count + 1));
    (count > 0).then(|| sum / f64::from(count))
}

/// Draws learning and spending, and returns the paths of the plots.
pub(crate) fn draw(out: &Path, tally: &Tally, budget: Usdc, is_here: bool) -> anyhow::Result<Vec<String>> {
    std::fs::create_dir_all(out).with_context(|| format!("{} cannot be made", out.display()))?;
    both(out, "learning", &Curves { tally, budget, is_here })?;
    Ok(["svg", "png"].map(|format| out.join(format!("learning.{format}")).display().to_string()).into())
}

/// Learning above, spending below.
struct Curves<'a> {
    tally: &'a Tally,
    budget: Usdc,
    is_here: bool,
}

impl Curves<'_> {
    /// Returns the upper curves.
    fn curves(&self) -> Vec<(&'static str, Vec<f64>)> {
        let points = &self.tally.points;
        let smooth = |of: fn(&Point) -> Option<f64>| {
            let around = |at: usize| &points[at.saturating_sub(WINDOW - 1)..=at];
            (0..points.len()).map(|at| mean(around(at).iter().filter_map(of)).unwrap_or(0.0)).collect()
        };
        let mut curves: Vec<(&str, Vec<f64>)> = vec![
            ("score (mean of 10 groups)", smooth(|point| point.score)),
            ("answers that are right (mean of 10)", smooth(|point| Some(point.right))),
        ];
        if self.is_here {
            let of = |of: fn(&Skill) -> f64| points.iter().map(|point| of(&point.policy)).collect();
            curves.push(("policy: likely right", of(|skill| skill.right)));
            curves.push(("policy: likely clear", of(|skill| skill.clear)));
            curves.push(("policy: entropy, of the most", of(|skill| skill.entropy / (ACTIONS as f64).ln())));
        }
        curves
    }
}

impl Picture for Curves<'_> {
    fn draw<B: DrawingBackend>(&self, area: &DrawingArea<B, Shift>) -> anyhow::Result<()>
    where
        B::ErrorType: 'static,
    {
        area.fill(&WHITE)?;
        let (upper, lower) = area.split_vertically(280);
        let groups = self.tally.points.len().max(2);
        let mut chart = ChartBuilder::on(&upper)
            .caption("Learning from verdicts that were paid for", (FONT, 18))
            .margin(10)
            .margin_right(230)
            .x_label_area_size(20)
            .y_label_area_size(56)
            .build_cartesian_2d(0..groups, 0.0..1.0)?;
        chart.configure_mesh().label_style((FONT, 13)).light_line_style(TRANSPARENT).draw()?;
        for (number, ((name, curve), color)) in self.curves().into_iter().zip(COLORS).enumerate() {
            chart.draw_series(LineSeries::new(curve.into_iter().enumerate(), color.stroke_width(2)))?;
            let at = (540, 50 + 20 * number as i32);
            upper.draw(&PathElement::new([(at.0 - 8, at.1 + 7), (at.0 + 4, at.1 + 7)], color.stroke_width(2)))?;
            upper.draw(&Text::new(name, (at.0 + 10, at.1), (FONT, 13)))?;
        }
        let dollars = |amount: Usdc| amount.atomic() as f64 / 1e6;
        let spent: Vec<f64> = self.tally.points.iter().map(|point| dollars(point.spent)).collect();
        let most = spent.last().copied().unwrap_or(0.0).max(1e-6) * 1.1;
        let mut chart = ChartBuilder::on(&lower)
            .margin(10)
            .margin_right(230)
            .x_label_area_size(36)
            .y_label_area_size(56)
            .build_cartesian_2d(0..groups, 0.0..most)?;
        chart
            .configure_mesh()
            .x_desc("group")
            .y_labels(5)
            .y_label_formatter(&|dollars| format!("${dollars:.3}"))
            .label_style((FONT, 13))
            .light_line_style(TRANSPARENT)
            .draw()?;
        chart.draw_series(LineSeries::new(spent.into_iter().enumerate(), COLORS[5].stroke_width(2)))?;
        let budget = format!("spent, of {}", self.budget);
        lower.draw(&PathElement::new([(532, 27), (544, 27)], COLORS[5].stroke_width(2)))?;
        lower.draw(&Text::new(budget, (550, 20), (FONT, 13)))?;
        area.present()?;
        Ok(())
    }
}
