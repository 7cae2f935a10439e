//! Summarizes all runs of an arm.

use std::collections::BTreeMap;

use serde::Serialize;

use super::{
    arms::Arm,
    conduct::Outcome,
    run::{Settings, mean},
    world::{ASPECTS, Seller, sellers},
};

/// A mean over seeds, with its 95 % confidence interval.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct Estimate {
    pub(crate) mean: f64,
    pub(crate) low: f64,
    pub(crate) high: f64,
}

impl Estimate {
    /// Estimates by Student's t distribution; the interval of a single value is that value.
    pub(crate) fn of(values: &[f64]) -> Self {
        let mean = mean(values.iter().copied());
        let freedom = values.len().saturating_sub(1);
        let variance = values.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / freedom.max(1) as f64;
        let half = quantile(freedom) * (variance / values.len().max(1) as f64).sqrt();
        Self { mean, low: mean - half, high: mean + half }
    }
}

/// Returns the 97.5 % quantile of Student's t distribution.
fn quantile(freedom: usize) -> f64 {
    const FIRST: [f64; 30] = [
        12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
        2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
    ];
    match freedom {
        0 => 0.0,
        1..=30 => FIRST[freedom - 1],
        _ => 1.96 + 2.4 / freedom as f64,
    }
}

/// The results of one arm.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Report {
    pub(crate) arm: String,
    pub(crate) about: String,
    /// The final expected quality of an output, from 0 to 1: the share of aspects that it is good at.
    pub(crate) quality: Estimate,
    /// The mean quality over the training.
    pub(crate) quality_on_the_way: Estimate,
    /// After how many groups a quality of nine tenths of the maximum is reached, by seed; `None` if never.
    pub(crate) groups_to_nine_tenths: Vec<Option<usize>>,
    /// How much better `market` ends, seed by seed; `None` for `market` itself.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) market_is_better_by: Option<Estimate>,
    /// How often an output is good at the end, by aspect and in all aspects.
    pub(crate) good_at: BTreeMap<&'static str, Estimate>,
    pub(crate) flawless: Estimate,
    /// The final entropy in nats, and the share of different outputs in a group over the last fifth.
    pub(crate) entropy: Estimate,
    pub(crate) distinct: Estimate,
    /// The mean score of a group minus its share of good outputs, over the last fifth.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) believed_above_truth: Option<Estimate>,
    /// Outputs judged for a student: fewer than all if money or trusted evaluators were missing.
    pub(crate) labels: Estimate,
    /// Outputs whose truth a student got in audits.
    pub(crate) audited: Estimate,
    pub(crate) spent_microusdc: Estimate,
    /// Totals over all seeds.
    pub(crate) spent_by_books_microusdc: u64,
    pub(crate) spent_on_chain_microusdc: u64,
    /// The evaluators hired in the last fifth, as shares of the aspect's groups.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub(crate) late_hires: BTreeMap<&'static str, BTreeMap<&'static str, f64>>,
    pub(crate) curve: Curve,
    /// The quality by seed.
    pub(crate) by_seed: Vec<f64>,
}

/// A point of the curves.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Curve {
    /// The number of groups so far.
    pub(crate) groups: Vec<usize>,
    pub(crate) quality: Vec<Estimate>,
    pub(crate) entropy: Vec<Estimate>,
    /// The mean since the previous point, over the seeds that have it.
    pub(crate) distinct: Vec<Estimate>,
    pub(crate) believed_above_truth: Vec<Option<Estimate>>,
}

/// The number of points of a curve.
const POINTS: usize = 60;

impl Report {
    /// Summarizes outcomes; `market` holds the final qualities of the arm `market`.
    pub(crate) fn new(
        arm: Arm,
        settings: &Settings,
        runs: &[Outcome],
        aspects: &[Vec<usize>],
        market: Option<&[f64]>,
    ) -> Self {
        let of = |value: &dyn Fn(&Outcome) -> f64| Estimate::of(&runs.iter().map(value).collect::<Vec<_>>());
        let end = |run: &Outcome| run.course.quality.last().copied().unwrap_or_default();
        let late = settings.groups - settings.groups.div_ceil(5);
        let by_seed: Vec<_> = runs.iter().map(end).collect();
        let better = market.filter(|_| arm != Arm::Market).map(|market| {
            Estimate::of(&market.iter().zip(&by_seed).map(|(market, own)| market - own).collect::<Vec<_>>())
        });
        let aspect = |number: usize| (ASPECTS[number].skill(), of(&|run| run.course.aspects[number]));
        let sum = |of: fn(&Outcome) -> u64| runs.iter().map(of).sum();
        Self {
            arm: arm.name(),
            about: arm.about(),
            quality: of(&end),
            quality_on_the_way: of(&|run| mean(run.course.quality.iter().copied())),
            groups_to_nine_tenths: runs.iter().map(reached).collect(),
            market_is_better_by: better,
            good_at: (0..ASPECTS.len()).map(aspect).collect(),
            flawless: of(&|run| run.course.flawless),
            entropy: of(&|run| run.course.entropy.last().copied().unwrap_or_default()),
            distinct: of(&|run| mean(run.course.distinct[late..].iter().copied())),
            believed_above_truth: believed(arm, runs, late..settings.groups),
            labels: of(&|run| run.labels as f64),
            audited: of(&|run| run.audited as f64),
            spent_microusdc: of(&|run| run.spent.chain as f64),
            spent_by_books_microusdc: sum(|run| run.spent.books),
            spent_on_chain_microusdc: sum(|run| run.spent.chain),
            late_hires: late_hires(runs, aspects, late, &sellers(settings.errors, 0)),
            curve: Curve::new(arm, settings.groups, runs),
            by_seed,
        }
    }
}

fn reached(run: &Outcome) -> Option<usize> {
    run.course.quality.iter().position(|quality| *quality >= 0.9).map(|before| before + 1)
}

/// Returns how much scores exceed the truth. Self-judged scores are not on that scale.
fn believed(arm: Arm, runs: &[Outcome], groups: std::ops::Range<usize>) -> Option<Estimate> {
    let above = |run: &Outcome| {
        let known: Vec<_> =
            run.course.scored[groups.clone()].iter().flatten().map(|(scored, good)| scored - good).collect();
        (!known.is_empty()).then(|| mean(known.iter().copied()))
    };
    let values: Vec<_> = runs.iter().filter_map(above).collect();
    (!values.is_empty() && arm != Arm::SelfJudge).then(|| Estimate::of(&values))
}

fn late_hires(
    runs: &[Outcome],
    aspects: &[Vec<usize>],
    late: usize,
    sellers: &[Seller],
) -> BTreeMap<&'static str, BTreeMap<&'static str, f64>> {
    let mut shares = BTreeMap::new();
    for (number, aspect) in ASPECTS.iter().enumerate() {
        let (mut counts, mut groups) = (BTreeMap::new(), 0.0_f64);
        for (run, aspects) in runs.iter().zip(aspects) {
            for (hired, _) in run.course.hired.iter().zip(aspects).skip(late).filter(|(_, of)| **of == number) {
                groups += 1.0;
                hired.iter().for_each(|position| *counts.entry(sellers[*position].name).or_insert(0.0) += 1.0);
            }
        }
        if !counts.is_empty() {
            counts.values_mut().for_each(|count| *count /= groups);
            shares.insert(aspect.skill(), counts);
        }
    }
    shares
}

impl Curve {
    fn new(arm: Arm, groups: usize, runs: &[Outcome]) -> Self {
        let step = groups.div_ceil(POINTS).max(1);
        let ends: Vec<_> = (1..=groups).filter(|group| group % step == 0 || *group == groups).collect();
        let begins: Vec<_> = [0].into_iter().chain(ends.iter().copied()).collect();
        let at = |of: &dyn Fn(&Outcome, usize) -> f64| -> Vec<Estimate> {
            let point = |end: &usize| Estimate::of(&runs.iter().map(|run| of(run, *end)).collect::<Vec<_>>());
            ends.iter().map(point).collect()
        };
        let spans = || begins.iter().copied().zip(ends.iter().copied());
        let distinct = |(begin, end): (usize, usize)| {
            let of = |run: &Outcome| mean(run.course.distinct[begin..end].iter().copied());
            Estimate::of(&runs.iter().map(of).collect::<Vec<_>>())
        };
        Self {
            quality: at(&|run, end| run.course.quality[end - 1]),
            entropy: at(&|run, end| run.course.entropy[end - 1]),
            distinct: spans().map(distinct).collect(),
            believed_above_truth: spans().map(|(begin, end)| believed(arm, runs, begin..end)).collect(),
            groups: ends,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn intervals_are_those_of_students_distribution() {
        let estimate = Estimate::of(&[1.0, 2.0, 3.0, 4.0, 5.0]);
        // Standard error 0.7071, four degrees of freedom.
        assert!((estimate.mean - 3.0).abs() < 1e-12 && (estimate.high - 4.963).abs() < 1e-3, "{estimate:?}");
        assert_eq!(Estimate::of(&[2.0]), Estimate { mean: 2.0, low: 2.0, high: 2.0 });
        assert!(quantile(31) < quantile(30) && quantile(10_000) > 1.959);
    }
}
