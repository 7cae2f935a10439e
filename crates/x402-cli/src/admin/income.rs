//! What was charged by route and hour since this process started, read from the metrics that it reports anyway.

use std::collections::{BTreeMap, VecDeque};

/// The number of hours that are kept, the current one included.
pub(super) const HOURS: usize = 24;
const HOUR: u64 = 3_600;

/// Sums by route, for each hour in which something was charged. Bounded by hours and routes.
#[derive(Debug, Default)]
pub(super) struct Income {
    /// What the metrics said last.
    totals: BTreeMap<String, u64>,
    /// When an hour began, in Unix seconds, and what was charged in it.
    hours: VecDeque<(u64, BTreeMap<String, u64>)>,
}

impl Income {
    /// Adds what was charged since the last time to the hour of `now`. `totals` are the sums since the process started, by route.
    pub(super) fn update(&mut self, now: u64, totals: BTreeMap<String, u64>) {
        let began = now - now % HOUR;
        for (route, total) in &totals {
            let more = total.saturating_sub(self.totals.get(route).copied().unwrap_or_default());
            if more == 0 {
                continue;
            }
            if self.hours.back().is_none_or(|(hour, _)| *hour < began) {
                self.hours.push_back((began, BTreeMap::new()));
            }
            if let Some((_, sums)) = self.hours.back_mut() {
                *sums.entry(route.clone()).or_default() += more;
            }
        }
        while self.hours.front().is_some_and(|(hour, _)| *hour <= began.saturating_sub(HOURS as u64 * HOUR)) {
            self.hours.pop_front();
        }
        self.totals = totals;
    }

    /// Returns the routes that something was charged for, ever.
    pub(super) fn routes(&self) -> impl Iterator<Item = &str> {
        self.totals.keys().map(String::as_str)
    }

    /// Returns the sums of a route in each of the last hours, the oldest first, in atomic units.
    pub(super) fn by_hour(&self, now: u64, route: &str) -> Vec<u64> {
        let newest = now - now % HOUR;
        let sum = |began: u64| {
            let sums = self.hours.iter().find(|(hour, _)| *hour == began);
            sums.and_then(|(_, sums)| sums.get(route)).copied().unwrap_or_default()
        };
        (0..HOURS as u64).rev().map(|back| sum(newest.saturating_sub(back * HOUR))).collect()
    }
}

/// The labels and the value of a sample.
pub(super) type Sample = (BTreeMap<String, String>, f64);

/// Returns the samples of a counter or gauge in a text that Prometheus reads.
pub(super) fn samples<'a>(text: &'a str, name: &'a str) -> impl Iterator<Item = Sample> + 'a {
    text.lines().filter_map(move |line| {
        let rest = line.strip_prefix(name)?;
        let (labels, value) = match rest.strip_prefix('{') {
            Some(rest) => labels(rest)?,
            None => (BTreeMap::new(), rest),
        };
        Some((labels, value.strip_prefix(' ')?.parse().ok()?))
    })
}

/// Reads labels up to the brace that ends them, and returns the rest of the line.
fn labels(mut rest: &str) -> Option<(BTreeMap<String, String>, &str)> {
    let mut labels = BTreeMap::new();
    while let Some((name, after)) = rest.split_once("=\"") {
        let (mut value, mut characters) = (String::new(), after.char_indices());
        let end = loop {
            match characters.next()? {
                (end, '"') => break end,
                (_, '\\') => value.push(match characters.next()?.1 {
                    'n' => '\n',
                    other => other,
                }),
                (_, other) => value.push(other),
            }
        };
        labels.insert(name.trim_start_matches(',').to_owned(), value);
        rest = &after[end + 1..];
        if let Some(rest) = rest.strip_prefix('}') {
            return Some((labels, rest));
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "# HELP x402_charged_units_total what was charged\n\
        x402_charged_units_total{network=\"eip155:1\",route=\"/a\"} 7000\n\
        x402_charged_units_total{network=\"eip155:1\",route=\"/\\\"},\\\\ x\"} 1\n\
        x402_charged_units_totals 9\n\
        x402_settlement_backlog 3\n";

    fn totals(pairs: &[(&str, u64)]) -> BTreeMap<String, u64> {
        pairs.iter().map(|(route, units)| ((*route).to_owned(), *units)).collect()
    }

    #[test]
    fn samples_are_read_whatever_is_in_a_label() {
        let read: Vec<_> = samples(TEXT, "x402_charged_units_total").collect();
        let routes: Vec<_> = read.iter().map(|(labels, units)| (labels["route"].as_str(), *units)).collect();
        assert_eq!(routes, [("/a", 7_000.0), ("/\"},\\ x", 1.0)]);
        assert_eq!(samples(TEXT, "x402_settlement_backlog").collect::<Vec<_>>(), [(BTreeMap::new(), 3.0)]);
        for broken in ["n{a=\"1\" 2", "n{a=\"1", "n{} 1", "n{a=\"1\"} x", "n{a=\"1\"}1"] {
            assert_eq!(samples(broken, "n").count(), 0, "{broken}");
        }
    }

    #[test]
    fn income_is_in_the_hour_in_which_it_came() {
        let (mut income, noon) = (Income::default(), 1_800_000_000 / HOUR * HOUR);
        income.update(noon, totals(&[("/a", 5)]));
        income.update(noon + 10, totals(&[("/a", 5), ("/b", 1)]));
        income.update(noon + HOUR, totals(&[("/a", 12), ("/b", 1)]));
        let last_two = |now, route| income.by_hour(now, route)[HOURS - 2..].to_vec();
        assert_eq!(last_two(noon + HOUR + 1, "/a"), [5, 7]);
        assert_eq!(last_two(noon + HOUR + 1, "/b"), [1, 0]);
        assert_eq!(last_two(noon + 2 * HOUR, "/a"), [7, 0]);
        assert_eq!(income.by_hour(noon, "/none"), vec![0; HOURS]);
    }

    #[test]
    fn no_more_than_a_day_is_kept() {
        let mut income = Income::default();
        for hour in 0..100 {
            income.update(1_800_000_000 + hour * HOUR, totals(&[("/a", hour + 1)]));
        }
        assert_eq!(income.hours.len(), HOURS);
        assert_eq!(income.by_hour(1_800_000_000 + 99 * HOUR, "/a"), vec![1; HOURS]);
    }
}
