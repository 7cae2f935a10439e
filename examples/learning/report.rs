//! Means over seeds with their intervals, as tables in Markdown.

use std::fmt::Write as _;

use super::{course::Outcome, rng::Rng};

/// How many samples a bootstrap takes.
const SAMPLES: usize = 2_000;

/// A mean over seeds, and its 95 % interval by bootstrap.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Estimate {
    pub(crate) mean: f64,
    pub(crate) low: f64,
    pub(crate) high: f64,
}

impl Estimate {
    pub(crate) fn of(values: &[f64]) -> Self {
        let count = values.len();
        if count == 0 {
            return Self { mean: f64::NAN, low: f64::NAN, high: f64::NAN };
        }
        let mut rng = Rng::seeded(7);
        let sample = |_| (0..count).map(|_| values[rng.below(count)]).sum::<f64>() / count as f64;
        let mut means: Vec<f64> = (0..SAMPLES).map(sample).collect();
        means.sort_by(f64::total_cmp);
        let at = |share: f64| means[(share * (SAMPLES - 1) as f64).round() as usize];
        Self { mean: values.iter().sum::<f64>() / count as f64, low: at(0.025), high: at(0.975) }
    }

    /// Returns the number with its interval.
    pub(crate) fn show(&self, digits: usize) -> String {
        if self.mean.is_nan() {
            return "–".to_owned();
        }
        format!("{:.digits$} ({:.digits$} to {:.digits$})", self.mean, self.low, self.high)
    }
}

/// The outcomes of an arm in a setting, by seed.
pub(crate) struct Row {
    pub(crate) setting: String,
    pub(crate) arm: String,
    pub(crate) outcomes: Vec<Outcome>,
}

impl Row {
    fn estimate(&self, of: impl Fn(&Outcome) -> f64) -> Estimate {
        Estimate::of(&self.outcomes.iter().map(of).collect::<Vec<_>>())
    }

    /// Returns what was spent, on average of those that reached the goal, until they did, if a truth costs so many dollars.
    fn dollars_until(&self, truth: f64) -> Estimate {
        let reached = self.outcomes.iter().filter(|outcome| outcome.reached > 0.0);
        Estimate::of(&reached.map(|outcome| outcome.until[0] + truth * outcome.until[1]).collect::<Vec<_>>())
    }
}

/// All rows of an experiment.
pub(crate) struct Sheet(pub(crate) Vec<Row>);

impl Sheet {
    /// Returns the values of an arm by seed; none if it was not run.
    pub(crate) fn values(&self, setting: &str, arm: &str, of: impl Fn(&Outcome) -> f64) -> Vec<f64> {
        let row = self.0.iter().find(|row| row.setting == setting && row.arm == arm);
        row.map(|row| row.outcomes.iter().map(of).collect()).unwrap_or_default()
    }

    pub(crate) fn settings(&self) -> Vec<&str> {
        distinct(self.0.iter().map(|row| &*row.setting))
    }

    pub(crate) fn arms(&self) -> Vec<&str> {
        distinct(self.0.iter().map(|row| &*row.arm))
    }

    /// Returns the final quality of all arms in all settings.
    pub(crate) fn qualities(&self) -> String {
        let (settings, mut text) = (self.settings(), String::new());
        let _ = writeln!(text, "| final quality | {} |\n|---|{}", settings.join(" | "), "---|".repeat(settings.len()));
        for arm in self.arms() {
            let cell = |setting: &&str| Estimate::of(&self.values(setting, arm, Outcome::quality)).show(2);
            let _ = writeln!(text, "| {arm} | {} |", settings.iter().map(cell).collect::<Vec<_>>().join(" | "));
        }
        text
    }

    /// Returns everything else that was measured.
    pub(crate) fn details(&self) -> String {
        let mut text = "| setting | arm | mean over the course | reach 0.9 | $ until 0.9 (truth $0.02) | $0.20 | $2 | verdicts, $ | truths | outputs sent, of those made | value, % | right ways, when 0.8 / in the end |\n".to_owned();
        text.push_str("|---|---|---|---|---|---|---|---|---|---|---|---|\n");
        for row in &self.0 {
            let mean = |of: &dyn Fn(&Outcome) -> f64| row.estimate(of).mean;
            let until = |truth| match row.dollars_until(truth) {
                estimate if estimate.mean.is_nan() => "–".to_owned(),
                estimate => format!("{:.2}", estimate.mean),
            };
            let fair: Vec<f64> = row.outcomes.iter().filter_map(|outcome| outcome.ways_when_fair).collect();
            let ways = format!("{} / {:.2}", Estimate::of(&fair).show(2), mean(&|outcome| outcome.ways));
            let value = row.estimate(Outcome::value);
            let _ = writeln!(
                text,
                "| {} | {} | {} | {:.0} % | {} | {} | {} | {:.2} | {:.0} | {:.0} % | {} | {} |",
                row.setting,
                row.arm,
                row.estimate(Outcome::mean).show(2),
                100.0 * mean(&|outcome| outcome.reached),
                until(0.02),
                until(0.2),
                until(2.0),
                mean(&|outcome| outcome.verdicts),
                mean(&|outcome| outcome.truths),
                100.0 * mean(&|outcome| outcome.sent) / mean(&|outcome| outcome.made).max(1.0),
                if row.outcomes.iter().all(|outcome| outcome.ordered[1] == 0.0) {
                    "–".to_owned()
                } else {
                    Estimate { mean: 100.0 * value.mean, low: 100.0 * value.low, high: 100.0 * value.high }.show(0)
                },
                if mean(&|outcome| outcome.ways) > 1.001 { ways } else { "–".to_owned() },
            );
        }
        text
    }
}

fn distinct<'a>(all: impl Iterator<Item = &'a str>) -> Vec<&'a str> {
    let mut once = Vec::new();
    all.for_each(|one| {
        if !once.contains(&one) {
            once.push(one);
        }
    });
    once
}

/// What was predicted, and whether it is refuted.
pub(crate) struct Claim {
    what: String,
    estimate: Estimate,
    wanted: String,
    is_refuted: bool,
}

impl Claim {
    /// Returns `true` if there was something to compare.
    #[cfg(test)]
    pub(crate) fn is_known(&self) -> bool {
        self.estimate.mean.is_finite()
    }

    /// Claims that the mean difference of two arms, seed by seed, is at least so much.
    pub(crate) fn at_least(what: impl Into<String>, one: &[f64], other: &[f64], least: f64) -> Self {
        Self::of(what, &differences(one, other), least)
    }

    /// Claims that a mean is at least so much.
    pub(crate) fn of(what: impl Into<String>, values: &[f64], least: f64) -> Self {
        let estimate = Estimate::of(values);
        Self { what: what.into(), estimate, wanted: format!("≥ {least}"), is_refuted: estimate.mean < least }
    }

    /// Claims that one arm is ahead by more than the interval of the difference.
    pub(crate) fn above(what: impl Into<String>, one: &[f64], other: &[f64]) -> Self {
        let estimate = Estimate::of(&differences(one, other));
        Self { what: what.into(), estimate, wanted: "above its interval".to_owned(), is_refuted: estimate.low <= 0.0 }
    }

    /// Claims that one arm is not ahead by more than the interval of the difference.
    pub(crate) fn not_above(what: impl Into<String>, one: &[f64], other: &[f64]) -> Self {
        let estimate = Estimate::of(&differences(one, other));
        Self { what: what.into(), estimate, wanted: "not above".to_owned(), is_refuted: estimate.low > 0.0 }
    }
}

/// Returns the differences by seed.
fn differences(one: &[f64], other: &[f64]) -> Vec<f64> {
    one.iter().zip(other).map(|(one, other)| one - other).collect()
}

/// Returns the claims as a table.
pub(crate) fn show(claims: &[Claim]) -> String {
    let mut text = "| difference | found | wanted | |\n|---|---|---|---|\n".to_owned();
    for Claim { what, estimate, wanted, is_refuted } in claims {
        let _ = writeln!(
            text,
            "| {what} | {} | {wanted} | {} |",
            estimate.show(3),
            if *is_refuted { "**refuted**" } else { "holds" }
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interval_is_around_the_mean_and_that_of_one_value_is_the_value() {
        let values: Vec<f64> = (0..20).map(f64::from).collect();
        let estimate = Estimate::of(&values);
        assert_eq!(estimate.mean, 9.5);
        // The standard error is 1.29.
        assert!((6.5..7.6).contains(&estimate.low) && (11.4..12.5).contains(&estimate.high), "{estimate:?}");
        assert_eq!(Estimate::of(&[0.5]), Estimate { mean: 0.5, low: 0.5, high: 0.5 });
        assert_eq!(Estimate::of(&[]).show(2), "–");
    }

    #[test]
    fn a_claim_is_refuted_where_the_difference_is_too_small() {
        let claim = |least| Claim::at_least(String::new(), &[0.9, 1.0], &[0.5, 0.8], least).is_refuted;
        assert!(!claim(0.29) && claim(0.31));
        let above = |one: &[f64]| Claim::above(String::new(), one, &[0.5, 0.5]).is_refuted;
        assert!(!above(&[0.6, 0.7]) && above(&[0.6, 0.4]));
    }
}
