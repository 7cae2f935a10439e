//! What other payers report about evaluators, and how far they are trusted.

use std::collections::HashMap;

use alloy_primitives::Address;

use super::index::grow;

/// Counts of right and wrong verdicts, faded.
pub(super) type Counts = [f32; 2];

/// One payer's reports on one cell.
#[derive(Clone, Copy, Debug)]
struct Entry {
    cell: u32,
    payer: u16,
    counts: Counts,
    /// How much it adds to the log-odds that the payer is honest.
    term: f32,
}

#[derive(Clone, Copy, Debug)]
struct Payer {
    address: Address,
    log_odds: f32,
}

/// The reports of other payers, by cell: an evaluator in a skill.
///
/// A payer is trusted with the probability that it is honest: that its verdicts and the student's own were drawn with the same accuracies,
/// against the alternative that they are unrelated. Each cell on which both have evidence contributes the Bayes factor of the two
/// beta-binomial models. So only own audits give trust, and one that contradicts five hundred praises takes it away.
///
/// Counts are in stored units; times `scale` they are verdicts.
#[derive(Clone, Debug)]
pub(super) struct Reports {
    config: ReportsConfig,
    /// Sorted by cell, then payer.
    entries: Vec<Entry>,
    payers: Vec<Payer>,
    numbers: HashMap<Address, u16>,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct ReportsConfig {
    pub(super) max_entries: usize,
    pub(super) max_payers: usize,
    /// The trust in a payer of which nothing is known.
    pub(super) initial_trust: f32,
    /// How many verdicts the reports of one payer on one cell count as at most.
    pub(super) max_verdicts: f32,
}

impl Reports {
    pub(super) fn new(config: ReportsConfig) -> Self {
        Self { config, entries: Vec::new(), payers: Vec::new(), numbers: HashMap::new() }
    }

    /// Returns the number of a payer. A new payer may replace the least trusted one.
    pub(super) fn payer(&mut self, address: Address) -> u16 {
        if let Some(payer) = self.numbers.get(&address) {
            return *payer;
        }
        let new = Payer { address, log_odds: self.prior() };
        let payer = if self.payers.len() < self.config.max_payers {
            grow(&mut self.payers, self.config.max_payers);
            self.payers.push(new);
            self.payers.len() - 1
        } else {
            let odds = |payer: &usize| self.payers[*payer].log_odds;
            let least = (0..self.payers.len()).min_by(|a, b| odds(a).total_cmp(&odds(b))).unwrap_or_default();
            self.entries.retain(|entry| usize::from(entry.payer) != least);
            self.numbers.remove(&self.payers[least].address);
            self.payers[least] = new;
            least
        };
        self.numbers.insert(address, payer as u16);
        payer as u16
    }

    /// Returns the probability that this payer is honest.
    pub(super) fn trust(&self, payer: u16) -> f32 {
        probability(self.log_odds(payer))
    }

    /// Returns how far a payer may make the student forget, from 0 to 1: as far as it is trusted, once agreement with own audits has earned
    /// that. Otherwise many new payers, each trusted a little, would erase what the student has seen itself.
    pub(super) fn earned_trust(&self, payer: u16) -> f32 {
        let odds = self.log_odds(payer);
        probability(odds) * (odds - self.prior()).clamp(0.0, 1.0)
    }

    pub(super) fn trust_in(&self, address: &Address) -> f32 {
        self.numbers.get(address).map_or(self.config.initial_trust, |payer| self.trust(*payer))
    }

    /// Returns the trust in the most trusted payer.
    pub(super) fn highest_trust(&self) -> f32 {
        self.payers.iter().map(|payer| probability(payer.log_odds)).fold(0.0, f32::max)
    }

    fn log_odds(&self, payer: u16) -> f32 {
        self.payers.get(usize::from(payer)).map_or_else(|| self.prior(), |payer| payer.log_odds)
    }

    fn prior(&self) -> f32 {
        (self.config.initial_trust / (1.0 - self.config.initial_trust)).ln()
    }

    fn range(&self, cell: u32) -> std::ops::Range<usize> {
        let start = self.entries.partition_point(|entry| entry.cell < cell);
        let length = self.entries[start..].partition_point(|entry| entry.cell == cell);
        start..start + length
    }

    /// Fades the reports on one cell.
    pub(super) fn fade(&mut self, cell: u32, keep: f32) {
        let range = self.range(cell);
        for entry in &mut self.entries[range] {
            entry.counts = entry.counts.map(|count| count * keep);
        }
    }

    /// Multiplies all counts.
    pub(super) fn fade_all(&mut self, keep: f32) {
        for entry in &mut self.entries {
            entry.counts = entry.counts.map(|count| count * keep);
        }
    }

    /// Adds a report. If there are too many, the entry with the fewest verdicts makes room: first one of a payer that has earned no trust and
    /// on a cell that was never audited. So new payers displace neither trusted payers nor the grounds on which others lost trust.
    pub(super) fn add(&mut self, cell: u32, payer: u16, right: bool, amount: f32) {
        let at = match self.entries.binary_search_by_key(&(cell, payer), |entry| (entry.cell, entry.payer)) {
            Ok(at) => at,
            Err(mut at) => {
                if self.entries.len() >= self.config.max_entries {
                    let prior = self.prior();
                    let rank = |at: &usize| {
                        let entry = &self.entries[*at];
                        let has_earned = self.payers[usize::from(entry.payer)].log_odds > prior;
                        (entry.term != 0.0 || has_earned, total(entry.counts))
                    };
                    let least = (0..self.entries.len()).min_by(|a, b| {
                        let ((a_counts, a), (b_counts, b)) = (rank(a), rank(b));
                        a_counts.cmp(&b_counts).then(a.total_cmp(&b))
                    });
                    let least = least.unwrap_or_default();
                    self.remove(least);
                    at -= usize::from(least < at);
                }
                grow(&mut self.entries, self.config.max_entries);
                self.entries.insert(at, Entry { cell, payer, counts: [0.0; 2], term: 0.0 });
                at
            }
        };
        self.entries[at].counts[usize::from(!right)] += amount;
    }

    fn remove(&mut self, at: usize) {
        let entry = self.entries.remove(at);
        self.payers[usize::from(entry.payer)].log_odds -= entry.term;
    }

    /// Forgets a cell, whose number is given to another one.
    pub(super) fn clear(&mut self, cell: u32) {
        for at in self.range(cell).rev() {
            self.remove(at);
        }
    }

    /// Updates the trust in all payers that reported a cell, by the student's own evidence on it.
    pub(super) fn compare(&mut self, cell: u32, own: Counts, scale: f32) {
        for at in self.range(cell) {
            let entry = self.entries[at];
            let term = agreement(own.map(|count| count * scale), entry.counts.map(|count| count * scale));
            self.payers[usize::from(entry.payer)].log_odds += term - entry.term;
            self.entries[at].term = term;
        }
    }

    /// Returns what is reported about a cell, in stored units, and the trust in the most trusted of its payers. The reports of the others
    /// count as much less as they are trusted less.
    pub(super) fn sum(&self, cell: u32, scale: f32) -> (Counts, f32) {
        self.consensus(&self.entries[self.range(cell)], scale)
    }

    /// Calls `with` for every cell with its [sum](Self::sum).
    pub(super) fn sums(&self, scale: f32, mut with: impl FnMut(u32, (Counts, f32))) {
        for cell in self.entries.chunk_by(|a, b| a.cell == b.cell) {
            with(cell[0].cell, self.consensus(cell, scale));
        }
    }

    fn consensus(&self, entries: &[Entry], scale: f32) -> (Counts, f32) {
        let (mut sum, mut most) = ([0.0; 2], 0.0_f32);
        for entry in entries {
            let reported = total(entry.counts) * scale;
            let trust = self.trust(entry.payer);
            let weight = trust * (self.config.max_verdicts / reported.max(f32::MIN_POSITIVE)).min(1.0);
            sum = [sum[0] + weight * entry.counts[0], sum[1] + weight * entry.counts[1]];
            most = most.max(trust);
        }
        (if most > 0.0 { sum.map(|count| count / most) } else { sum }, most)
    }
}

fn total(counts: Counts) -> f32 {
    counts[0] + counts[1]
}

fn probability(log_odds: f32) -> f32 {
    1.0 / (1.0 + (-log_odds).exp())
}

/// Returns the logarithm of the Bayes factor of "drawn with one accuracy" over "drawn with two", each with a uniform prior.
fn agreement(own: Counts, theirs: Counts) -> f32 {
    if total(own) == 0.0 || total(theirs) == 0.0 {
        return 0.0;
    }
    let ln = |right: f32, wrong: f32| ln_beta(1.0 + f64::from(right), 1.0 + f64::from(wrong));
    (ln(own[0] + theirs[0], own[1] + theirs[1]) - ln(own[0], own[1]) - ln(theirs[0], theirs[1])) as f32
}

/// Returns ln B(a, b).
fn ln_beta(a: f64, b: f64) -> f64 {
    libm::lgamma(a) + libm::lgamma(b) - libm::lgamma(a + b)
}

#[cfg(test)]
mod tests {
    use super::*;

    const CONFIG: ReportsConfig =
        ReportsConfig { max_entries: 100, max_payers: 10, initial_trust: 0.5, max_verdicts: 10.0 };

    fn payer(number: u8) -> Address {
        Address::repeat_byte(number)
    }

    #[test]
    fn agreement_is_the_bayes_factor_of_two_beta_binomials() {
        // One right against one right: ∫θ² / (∫θ)² = (1/3) / (1/4).
        assert!((agreement([1.0, 0.0], [1.0, 0.0]) - (4.0_f32 / 3.0).ln()).abs() < 1e-6);
        // One right against one wrong: ∫θ(1−θ) / (∫θ)² = (1/6) / (1/4).
        assert!((agreement([1.0, 0.0], [0.0, 1.0]) - (2.0_f32 / 3.0).ln()).abs() < 1e-6);
        // One wrong against five hundred right: B(501, 2) / (B(1, 2) · B(501, 1)) = 2 / 502.
        assert!((agreement([0.0, 1.0], [500.0, 0.0]) - (2.0_f32 / 502.0).ln()).abs() < 1e-4);
        assert_eq!(agreement([0.0, 0.0], [500.0, 0.0]), 0.0);
    }

    #[test]
    fn one_own_audit_outweighs_any_number_of_praises() {
        let mut reports = Reports::new(CONFIG);
        for friend in 0..10 {
            let friend = reports.payer(payer(friend));
            (0..500).for_each(|_| reports.add(0, friend, true, 1.0));
        }
        reports.compare(0, [0.0, 1.0], 1.0);
        let (_, trust) = reports.sum(0, 1.0);
        assert!(trust < 0.01, "{trust}");
    }

    #[test]
    fn payers_that_agree_are_trusted_no_more_than_the_best_of_them() {
        let mut reports = Reports::new(CONFIG);
        let mut heard = Vec::new();
        for friend in 0..10 {
            let friend = reports.payer(payer(friend));
            reports.add(0, friend, true, 5.0);
            heard.push(reports.sum(0, 1.0));
        }
        assert!(heard.iter().all(|(_, trust)| *trust == 0.5));
        assert_eq!((heard[0].0, heard[9].0), ([5.0, 0.0], [50.0, 0.0]));
    }

    #[test]
    fn repeated_reports_of_one_payer_are_capped() {
        let mut reports = Reports::new(CONFIG);
        let friend = reports.payer(payer(1));
        reports.add(0, friend, true, 800.0);
        reports.add(0, friend, false, 200.0);
        let ([right, wrong], _) = reports.sum(0, 1.0);
        assert!((right - 8.0).abs() < 1e-3 && (wrong - 2.0).abs() < 1e-3, "{right} {wrong}");
    }

    #[test]
    fn new_payers_do_not_displace_trusted_ones() {
        let mut reports = Reports::new(CONFIG);
        let friend = reports.payer(payer(1));
        (0..10).for_each(|cell| reports.add(cell, friend, cell % 2 == 0, 2.0));
        (0..4).for_each(|cell| reports.compare(cell, [[0.0, 3.0], [3.0, 0.0]][usize::from(cell % 2 == 0)], 1.0));
        let (heard, trust) = (reports.sum(9, 1.0), reports.trust(friend));
        assert!(trust > 0.6, "{trust}");
        // Each says more about each cell than the friend did.
        for stranger in 2..10 {
            let stranger = reports.payer(payer(stranger));
            (20..60).for_each(|cell| reports.add(cell, stranger, true, 3.0));
        }
        assert_eq!(
            (reports.sum(9, 1.0), reports.trust(friend), reports.entries.len()),
            (heard, trust, CONFIG.max_entries)
        );
    }

    #[test]
    fn forgotten_evidence_restores_trust_and_tables_stay_bounded() {
        let mut reports = Reports::new(CONFIG);
        for number in 0..50 {
            let friend = reports.payer(payer(number));
            (0..20).for_each(|cell| reports.add(cell, friend, true, 1.0));
            reports.compare(3, [0.0, 2.0], 1.0);
        }
        assert!(reports.entries.len() <= CONFIG.max_entries && reports.payers.len() <= CONFIG.max_payers);
        assert!(reports.entries.is_sorted_by_key(|entry| (entry.cell, entry.payer)));
        let distrusted = reports.highest_trust();
        (0..20).for_each(|cell| reports.clear(cell));
        assert!(reports.entries.is_empty() && (reports.highest_trust() - 0.5).abs() < 1e-5 && distrusted <= 0.5);
    }

    #[test]
    fn ln_beta_matches_factorials() {
        let factorial = |n: u32| (1..=n).map(f64::from).product::<f64>();
        for (a, b) in [(1, 1), (2, 5), (7, 3), (20, 30), (1, 60)] {
            let exact = (factorial(a - 1) * factorial(b - 1) / factorial(a + b - 1)).ln();
            assert!((ln_beta(f64::from(a), f64::from(b)) - exact).abs() < 1e-9, "B({a}, {b})");
        }
        // B(1/2, 1/2) = π.
        assert!((ln_beta(0.5, 0.5) - std::f64::consts::PI.ln()).abs() < 1e-9);
    }
}
