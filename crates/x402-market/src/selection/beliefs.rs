//! What is believed of evaluators: the posterior of each one's worth in each skill, from own audits and the reports of others.

use std::{cmp::Ordering, collections::HashMap};

use alloy_primitives::Address;
use rand::Rng;
use rand_distr::{Distribution, Gamma};

use super::{Skill, ThompsonConfig};

/// Comparisons for and against an evaluator, faded.
pub(super) type Counts = [f32; 2];

/// How many pairs of evaluator and skill are remembered. Those without own audits go first, then those unused for the longest time.
const MAX_CELLS: usize = 1 << 14;
/// How many payers' reports on one cell are remembered.
const MAX_REPORTS: usize = 64;
/// How many comparisons in reports may fade the evidence for each own comparison.
const FADES_PER_AUDIT: f64 = 32.0;

/// Evidence by evaluator and skill, which together are called a cell.
///
/// A payer is trusted with the probability that it is honest: that its audits and the student's own were drawn with the same worth, against
/// the alternative that they are unrelated. Each cell that both have audited contributes the Bayes factor of the two beta-binomial models.
/// So only own audits give trust, and a few that contradict five hundred praises take it away.
#[derive(Clone, Debug)]
pub(super) struct Beliefs {
    config: ThompsonConfig,
    cells: HashMap<(Address, Skill), Cell>,
    /// Those with reports.
    payers: HashMap<Address, Payer>,
    /// How many comparisons were learned. Evidence fades by it.
    clock: f64,
    /// By how much reports may move the clock before the next own audit.
    reports_left: f64,
    /// How many times a cell was looked for to be changed.
    turn: u64,
}

#[derive(Clone, Debug, Default)]
struct Cell {
    own: Counts,
    reports: Vec<Report>,
    /// The clock at which the counts were faded last.
    faded_at: f64,
    used: u64,
}

/// One payer's reports on a cell.
#[derive(Clone, Copy, Debug)]
struct Report {
    payer: Address,
    counts: Counts,
    /// How much it adds to the log-odds that the payer is honest.
    term: f32,
}

#[derive(Clone, Copy, Debug)]
struct Payer {
    log_odds: f32,
    reports: u32,
}

/// What is believed of one cell: (1 + D) / 2 follows the second beta distribution with probability `trust`, and else the first. Each is
/// given by its alpha and beta.
#[derive(Clone, Copy, Debug)]
pub(super) struct Belief {
    /// From the prior and own audits.
    own: [f32; 2],
    /// From the reports of others, too.
    with_reports: [f32; 2],
    /// The probability that the reports are genuine.
    trust: f32,
}

impl Belief {
    /// Returns the expected worth, from -1 to 1.
    pub(super) fn mean(&self) -> f32 {
        let [own, all] = [self.own, self.with_reports].map(|[alpha, beta]| (alpha - beta) / (alpha + beta));
        own + self.trust * (all - own)
    }

    /// Draws a worth. `doubt`, from 0 to 1, decides whether the reports are genuine.
    pub(super) fn draw(&self, doubt: f32, rng: &mut impl Rng) -> f32 {
        let [alpha, beta] = if doubt < self.trust { self.with_reports } else { self.own };
        let mut gamma = |shape| Gamma::new(shape, 1.0).map_or(0.0, |gamma| gamma.sample(rng));
        let (right, wrong): (f32, f32) = (gamma(alpha), gamma(beta));
        (right - wrong) / (right + wrong).max(f32::MIN_POSITIVE)
    }
}

impl Beliefs {
    pub(super) fn new(config: ThompsonConfig) -> Self {
        Self {
            config,
            cells: HashMap::new(),
            payers: HashMap::new(),
            clock: 0.0,
            reports_left: FADES_PER_AUDIT,
            turn: 0,
        }
    }

    /// Returns what is believed of an evaluator whose card claims the skill, or does not.
    pub(super) fn belief(&self, evaluator: Address, skill: Skill, is_claimed: bool) -> Belief {
        let expected = if is_claimed { self.config.claimed_worth } else { self.config.unclaimed_worth };
        let prior = [1.0 + expected, 1.0 - expected].map(|part| part / 2.0 * self.config.prior);
        let Some(cell) = self.cells.get(&(evaluator, skill)) else {
            return Belief { own: prior, with_reports: prior, trust: 0.0 };
        };
        let keep = self.keep(cell);
        let (mut sum, mut most) = ([0.0; 2], 0.0_f32);
        for report in &cell.reports {
            let trust = self.trust(report.payer);
            sum = plus(sum, report.counts, keep * trust);
            most = most.max(trust);
        }
        let own = plus(prior, cell.own, keep);
        // As many as agree are trusted no more than the most trusted of them.
        let with_reports = if most > 0.0 { plus(own, sum, 1.0 / most) } else { own };
        Belief { own, with_reports, trust: most }
    }

    /// Returns `true` if there is evidence on this cell.
    pub(super) fn knows(&self, evaluator: Address, skill: Skill) -> bool {
        self.cells.contains_key(&(evaluator, skill))
    }

    /// Returns the probability that the reports of this payer are genuine.
    pub(super) fn trust(&self, payer: Address) -> f32 {
        let odds = self.payers.get(&payer).map_or_else(|| self.prior_odds(), |payer| payer.log_odds);
        1.0 / (1.0 + (-odds).exp())
    }

    /// Learns an own audit.
    pub(super) fn learn(&mut self, evaluator: Address, skill: Skill, counts: Counts) {
        self.clock += f64::from(total(counts));
        let more = FADES_PER_AUDIT * f64::from(total(counts));
        self.reports_left = (self.reports_left + more).min(4.0 * FADES_PER_AUDIT);
        let mut cell = self.take(evaluator, skill);
        cell.own = plus(cell.own, counts, 1.0);
        // Payers that reported this cell were right or wrong about it, which changes what all their reports are worth.
        self.put(evaluator, skill, cell);
    }

    /// Halves the evidence on an evaluator that has changed, where it is better than a claim. Otherwise it could shed a bad name by changing.
    pub(super) fn halve(&mut self, evaluator: Address) {
        let claimed = self.config.claimed_worth;
        let good = |[right, wrong]: Counts| right - wrong > claimed * (right + wrong);
        let half = |counts: &mut Counts| *counts = counts.map(|count| if good(*counts) { count / 2.0 } else { count });
        for (_, cell) in self.cells.iter_mut().filter(|((of, _), _)| *of == evaluator) {
            half(&mut cell.own);
            cell.reports.iter_mut().for_each(|report| half(&mut report.counts));
        }
    }

    /// Learns what a payer reports of an audit.
    pub(super) fn learn_report(&mut self, evaluator: Address, skill: Skill, counts: Counts, payer: Address) {
        // Reports make the student forget only as far as agreement with own audits has earned their payer trust, and all together only within
        // their limit. Otherwise many payers would erase what the student has seen itself.
        let earned = ((self.trust(payer) - self.config.initial_trust) / (1.0 - self.config.initial_trust)).max(0.0);
        let fades = f64::from(earned * total(counts)).min(self.reports_left);
        (self.clock, self.reports_left) = (self.clock + fades, self.reports_left - fades);
        let mut cell = self.take(evaluator, skill);
        match cell.reports.iter_mut().find(|report| report.payer == payer) {
            Some(report) => report.counts = plus(report.counts, counts, 1.0),
            None => self.insert(&mut cell, Report { payer, counts, term: 0.0 }),
        }
        self.put(evaluator, skill, cell);
    }

    /// Adds the report of a payer to a cell. In a full one it replaces the smallest of the least trusted payer, but never one on a cell with
    /// own audits: those are the grounds on which payers lost trust.
    fn insert(&mut self, cell: &mut Cell, report: Report) {
        if cell.reports.len() >= MAX_REPORTS {
            let rank = |at: &usize| (self.trust(cell.reports[*at].payer), total(cell.reports[*at].counts));
            let least = (0..MAX_REPORTS).min_by(|a, b| rank(a).partial_cmp(&rank(b)).unwrap_or(Ordering::Equal));
            let Some(least) = least.filter(|_| total(cell.own) == 0.0) else { return };
            let gone = cell.reports.swap_remove(least);
            self.forget(&gone);
        }
        let prior = self.prior_odds();
        self.payers.entry(report.payer).or_insert(Payer { log_odds: prior, reports: 0 }).reports += 1;
        cell.reports.push(report);
    }

    fn forget(&mut self, gone: &Report) {
        let Some(payer) = self.payers.get_mut(&gone.payer) else { return };
        payer.log_odds -= gone.term;
        payer.reports -= 1;
        if payer.reports == 0 {
            self.payers.remove(&gone.payer);
        }
    }

    /// Takes a cell out to be changed, with its counts faded.
    fn take(&mut self, evaluator: Address, skill: Skill) -> Cell {
        let mut cell = self.cells.remove(&(evaluator, skill)).unwrap_or_default();
        let keep = self.keep(&cell);
        cell.own = cell.own.map(|count| count * keep);
        cell.reports.iter_mut().for_each(|report| report.counts = report.counts.map(|count| count * keep));
        cell.faded_at = self.clock;
        self.turn += 1;
        cell.used = self.turn;
        if self.cells.len() >= MAX_CELLS {
            let oldest =
                self.cells.iter().min_by_key(|(_, cell)| (total(cell.own) > 0.0, cell.used)).map(|(key, _)| *key);
            let gone = oldest.and_then(|oldest| self.cells.remove(&oldest));
            gone.iter().flat_map(|cell| &cell.reports).for_each(|report| self.forget(report));
        }
        cell
    }

    /// Puts a cell back, and compares its reports with own audits again.
    fn put(&mut self, evaluator: Address, skill: Skill, mut cell: Cell) {
        for report in &mut cell.reports {
            let term = agreement(cell.own, report.counts);
            if let Some(payer) = self.payers.get_mut(&report.payer) {
                payer.log_odds += term - report.term;
            }
            report.term = term;
        }
        self.cells.insert((evaluator, skill), cell);
    }

    /// Returns how much of a cell's counts is left.
    fn keep(&self, cell: &Cell) -> f32 {
        (-(self.clock - cell.faded_at) / f64::from(self.config.memory)).exp() as f32
    }

    fn prior_odds(&self) -> f32 {
        (self.config.initial_trust / (1.0 - self.config.initial_trust)).ln()
    }
}

fn total(counts: Counts) -> f32 {
    counts[0] + counts[1]
}

fn plus(counts: Counts, more: Counts, weight: f32) -> Counts {
    [counts[0] + weight * more[0], counts[1] + weight * more[1]]
}

/// Returns the logarithm of the Bayes factor of "drawn with one probability" over "drawn with two", each with a uniform prior.
fn agreement(own: Counts, theirs: Counts) -> f32 {
    if total(own) == 0.0 || total(theirs) == 0.0 {
        return 0.0;
    }
    let ln = |[right, wrong]: Counts| ln_beta(1.0 + f64::from(right), 1.0 + f64::from(wrong));
    (ln(plus(own, theirs, 1.0)) - ln(own) - ln(theirs)) as f32
}

/// Returns ln B(a, b).
fn ln_beta(a: f64, b: f64) -> f64 {
    libm::lgamma(a) + libm::lgamma(b) - libm::lgamma(a + b)
}

#[cfg(test)]
mod tests {
    use rand::{SeedableRng, rngs::Xoshiro256PlusPlus};

    use super::*;

    fn skill() -> Skill {
        Skill::new(0).unwrap()
    }

    fn address(number: usize) -> Address {
        Address::left_padding_from(&number.to_be_bytes())
    }

    /// Forgets nothing.
    fn plain() -> Beliefs {
        Beliefs::new(ThompsonConfig { memory: 1e9, ..ThompsonConfig::default() })
    }

    fn near(a: f32, b: f32) {
        assert!((a - b).abs() < 1e-3, "{a} is not {b}");
    }

    #[test]
    fn draws_have_mean_and_variance_of_the_believed_distribution() {
        let belief = Belief { own: [9.0, 2.0], with_reports: [2.0, 9.0], trust: 0.5 };
        let mut rng = Xoshiro256PlusPlus::seed_from_u64(1);
        for (doubt, expected) in [(0.6, 7.0 / 11.0), (0.4, -7.0 / 11.0)] {
            let draws: Vec<_> = (0..40_000).map(|_| f64::from(belief.draw(doubt, &mut rng))).collect();
            let mean = draws.iter().sum::<f64>() / draws.len() as f64;
            let variance = draws.iter().map(|draw| (draw - mean).powi(2)).sum::<f64>() / draws.len() as f64;
            // Of a beta distribution, twice as wide.
            let exact = 4.0 * 9.0 * 2.0 / (11.0 * 11.0 * 12.0);
            assert!((mean - expected).abs() < 0.005, "{mean} is not {expected}");
            assert!((variance / exact - 1.0).abs() < 0.05, "{variance} is not {exact}");
        }
    }

    #[test]
    fn one_own_audit_outweighs_five_hundred_praises_of_ten_payers() {
        let mut beliefs = plain();
        (0..10).for_each(|payer| beliefs.learn_report(address(1), skill(), [500.0, 0.0], address(100 + payer)));
        beliefs.learn(address(1), skill(), [0.0, 1.0]);
        for payer in 0..10 {
            assert!(beliefs.trust(address(100 + payer)) < 0.01, "{}", beliefs.trust(address(100 + payer)));
        }
    }

    #[test]
    fn strangers_replace_no_trusted_payer_and_no_report_on_an_audited_cell() {
        let (known, reported, trusted) = (address(1), address(2), address(100));
        let mut beliefs = plain();
        beliefs.learn(known, skill(), [20.0, 0.0]);
        beliefs.learn_report(known, skill(), [20.0, 0.0], trusted);
        assert!(beliefs.trust(trusted) > 0.5);
        // The trusted one has said least.
        beliefs.learn_report(reported, skill(), [0.5, 0.0], trusted);
        for stranger in 1..MAX_REPORTS {
            beliefs.learn_report(reported, skill(), [1.0, 0.0], address(100 + stranger));
        }
        let payers = |beliefs: &Beliefs| {
            let reports = &beliefs.cells[&(reported, skill())].reports;
            reports.iter().map(|report| report.payer).collect::<Vec<_>>()
        };
        let speak = |beliefs: &mut Beliefs, first: usize| {
            (first..first + 10).for_each(|payer| beliefs.learn_report(reported, skill(), [5.0, 0.0], address(payer)));
        };
        let before = payers(&beliefs);
        assert_eq!(before.len(), MAX_REPORTS);
        speak(&mut beliefs, 1_000);
        let replaced = payers(&beliefs);
        assert_eq!(replaced.len(), MAX_REPORTS);
        assert!(replaced.contains(&trusted));
        assert_eq!(replaced.iter().filter(|payer| !before.contains(payer)).count(), 10);

        beliefs.learn(reported, skill(), [1.0, 0.0]);
        speak(&mut beliefs, 2_000);
        assert_eq!(payers(&beliefs), replaced);
        assert_eq!(beliefs.payers.len(), MAX_REPORTS, "those whose reports are gone are forgotten");
    }

    #[test]
    fn cells_are_bounded_and_audited_ones_go_last() {
        const RIGHT: Counts = [1.0, 0.0];
        let (mut beliefs, payer) = (plain(), address(1 << 20));
        // Two audited cells with reports of one payer, which is trusted more for each.
        let trust = [0, 1].map(|number| {
            beliefs.learn(address(number), skill(), RIGHT);
            beliefs.learn_report(address(number), skill(), RIGHT, payer);
            beliefs.trust(payer)
        });
        // Of the others, each has a report of a payer of its own. Ten are too many.
        let others = 2..MAX_CELLS + 10;
        others.clone().for_each(|number| beliefs.learn_report(address(number), skill(), RIGHT, address(number)));
        let knows = |beliefs: &Beliefs, number: usize| beliefs.knows(address(number), skill());
        assert_eq!(beliefs.cells.len(), MAX_CELLS);
        assert!(knows(&beliefs, 0) && knows(&beliefs, 1) && !knows(&beliefs, 11) && knows(&beliefs, 12));
        assert_eq!(beliefs.payers.len(), MAX_CELLS - 2 + 1, "only payers with reports are kept");

        // When all are audited, the one unused for the longest time goes, and with it what its report added to the trust in its payer.
        others.skip(10).for_each(|number| beliefs.learn(address(number), skill(), RIGHT));
        near(beliefs.trust(payer), trust[1]);
        for (newcomer, expected) in [(0, trust[0]), (1, beliefs.config.initial_trust)] {
            beliefs.learn(address(MAX_CELLS * 2 + newcomer), skill(), RIGHT);
            assert!(!knows(&beliefs, newcomer));
            near(beliefs.trust(payer), expected);
        }
        assert_eq!((beliefs.cells.len(), beliefs.payers.contains_key(&payer)), (MAX_CELLS, false));
    }
}
