//! The posterior of the accuracy of each evaluator in each skill.

use alloy_primitives::Address;
use rand::Rng;
use rand_distr::{Distribution, Gamma};

use super::{
    CallOutcome, Candidate, Skill, SkillSet, ThompsonConfig,
    index::{EvaluatorIndex, grow},
    reports::{Counts, Reports, ReportsConfig},
};

/// How many reports, weighted by trust, may fade the evidence for each audit of the student's own. So no number of reports, from however
/// many payers, makes it forget more than that of what it has seen itself.
const FADES_PER_AUDIT: f32 = 32.0;

/// Posteriors by evaluator and skill. An evaluator in a skill is called a cell.
///
/// Each posterior is a beta distribution. Its prior counts as `skill_prior` verdicts. The prior's mean is what cells of its kind (claimed on
/// the card or not) have proved worth, moved by the evaluator's results in other skills. There are two posteriors for each cell: from own
/// audits alone, and including reports. The expected accuracy lies between their means, as far as the reports are trusted.
///
/// Tables are arrays by skill, then by the evaluator's number.
#[derive(Clone, Debug)]
pub(super) struct Posteriors {
    config: ThompsonConfig,
    index: EvaluatorIndex,
    claims: Vec<SkillSet>,
    call_stats: Vec<CallStats>,
    /// How many verdicts of each evaluator the student has audited itself. They do not fade.
    audits: Vec<u16>,
    skills: Vec<SkillTable>,
    /// Without and with reports.
    views: [View; 2],
    reports: Reports,
    /// The trust in the most trusted payer.
    highest_trust: f32,
    /// How many reports may fade the evidence before the next own audit.
    fades_left: f32,
    /// Counts are stored in units that grow with time, so that fading does not touch them: this times a stored count is verdicts.
    scale: f32,
}

/// The cells of one skill.
#[derive(Clone, Debug, Default)]
struct SkillTable {
    own: Vec<Counts>,
    reported: Vec<Reported>,
    /// By view and kind: the sum of the cells' accuracies, weighted by how much is known of each, and the sum of the weights.
    kind_sums: [[(f32, f32); 2]; 2],
}

/// What reports say about a cell, and the trust in the most trusted payer among them.
#[derive(Clone, Copy, Debug, Default)]
struct Reported {
    counts: Counts,
    trust: f32,
}

/// Evidence over all skills.
#[derive(Clone, Debug, Default)]
struct View {
    /// By evaluator and kind: right and wrong verdicts, in stored units.
    totals: Vec<[Counts; 2]>,
    /// The expected accuracy of unclaimed and of claimed cells.
    kind_means: [f32; 2],
}

impl Posteriors {
    pub(super) fn new(config: ThompsonConfig) -> Self {
        let view = View { kind_means: [config.unclaimed_accuracy, config.claimed_accuracy], ..View::default() };
        let reports = ReportsConfig {
            max_entries: config.max_reports,
            max_payers: config.max_payers,
            initial_trust: config.initial_trust,
            max_verdicts: config.verdicts_per_payer,
        };
        Self {
            index: EvaluatorIndex::new(config.max_evaluators),
            claims: Vec::new(),
            call_stats: Vec::new(),
            audits: Vec::new(),
            skills: Vec::new(),
            views: [view.clone(), view],
            reports: Reports::new(reports),
            highest_trust: 0.0,
            fades_left: 4.0 * FADES_PER_AUDIT,
            scale: 1.0,
            config,
        }
    }

    /// Writes the number of each candidate to `numbers`, and takes note of their claims.
    pub(super) fn number_market(&mut self, market: &[Candidate], numbers: &mut Vec<u32>) {
        self.index.start_round(market);
        numbers.clear();
        let mut kinds_changed = false;
        for (position, candidate) in market.iter().enumerate() {
            let (number, is_new) = self.index.at(position, candidate);
            if is_new {
                self.reset(number);
            }
            if self.claims[number] != candidate.claims {
                self.claims[number] = candidate.claims;
                kinds_changed |= self.views[1].totals[number] != <[Counts; 2]>::default();
                self.sum_up(number);
            }
            numbers.push(number as u32);
        }
        // Evidence from before the card was seen, or before it changed, counted for the other kind.
        if kinds_changed {
            (0..self.skills.len()).filter_map(Skill::new).for_each(|skill| self.update_kinds(skill));
        }
    }

    pub(super) fn number(&self, evaluator: Address) -> Option<usize> {
        self.index.find(evaluator)
    }

    /// Returns the posterior of an evaluator's accuracy in a skill, with reports or without.
    pub(super) fn posterior(&self, number: usize, skill: Skill, with_reports: bool) -> Beta {
        let view = &self.views[usize::from(with_reports)];
        let kind_mean = view.kind_means[usize::from(self.claims[number].contains(skill))];
        let (own, reported) = self.cell(number, skill);
        let part = if with_reports { reported.trust } else { 0.0 };
        let [right, wrong] = [own[0] + part * reported.counts[0], own[1] + part * reported.counts[1]];
        // Verdicts in its other skills, and how many more of them were right than expected of their kinds.
        let (mut elsewhere, mut beyond) = (-right - wrong, (right + wrong) * kind_mean - right);
        for ([right, wrong], kind_mean) in view.totals[number].iter().zip(view.kind_means) {
            elsewhere += (right + wrong) * self.scale;
            beyond += (right - (right + wrong) * kind_mean) * self.scale;
        }
        let elsewhere = elsewhere.max(0.0);
        let mean = (kind_mean + beyond / (self.config.evaluator_prior + elsewhere)).clamp(0.1, 0.9);
        let whole = if with_reports { 1.0 } else { 0.0 };
        Beta {
            alpha: self.config.skill_prior * mean + own[0] + whole * reported.counts[0],
            beta: self.config.skill_prior * (1.0 - mean) + own[1] + whole * reported.counts[1],
        }
    }

    /// Returns the expected accuracy.
    pub(super) fn mean(&self, number: usize, skill: Skill) -> f32 {
        let own = self.posterior(number, skill, false).mean();
        let trust = self.trust_in_reports(number, skill);
        if trust == 0.0 { own } else { own + trust * (self.posterior(number, skill, true).mean() - own) }
    }

    /// Returns the probability that the reports about a cell are genuine.
    pub(super) fn trust_in_reports(&self, number: usize, skill: Skill) -> f32 {
        let (_, reported) = self.cell(number, skill);
        if reported.counts == [0.0; 2] { self.highest_trust } else { reported.trust }
    }

    /// Returns how many verdicts of this evaluator are known in all skills, faded and weighted by trust.
    pub(super) fn verdicts(&self, number: usize) -> f32 {
        self.views[1].totals[number].as_flattened().iter().sum::<f32>() * self.scale
    }

    /// Returns how many verdicts of this evaluator the student has audited itself, in all skills. Reports, which can be bought, do not
    /// change it.
    pub(super) fn audits(&self, number: usize) -> f32 {
        f32::from(self.audits[number])
    }

    pub(super) fn call_stats(&self, number: usize) -> &CallStats {
        &self.call_stats[number]
    }

    pub(super) fn trust_in(&self, payer: &Address) -> f32 {
        self.reports.trust_in(payer)
    }

    /// Learns what an evaluator did for the student.
    pub(super) fn learn(&mut self, evaluator: Address, skill: Skill, outcome: &CallOutcome) {
        let number = self.insert(evaluator);
        self.index.keep(number);
        self.call_stats[number].learn(outcome, self.config.memory);
        let CallOutcome::Answered { right: Some(right), .. } = *outcome else { return };
        self.audits[number] = self.audits[number].saturating_add(1);
        self.scale *= 1.0 - 1.0 / self.config.memory_overall;
        self.fades_left = (self.fades_left + FADES_PER_AUDIT).min(4.0 * FADES_PER_AUDIT);
        let keep = 1.0 - 1.0 / self.config.memory;
        let amount = 1.0 / self.scale;
        let own = &mut self.skill_table(skill).own[number];
        *own = own.map(|count| count * keep);
        own[usize::from(!right)] += amount;
        let own = *own;
        // Payers that reported this cell were right or wrong about it, which changes what all their reports are worth.
        self.reports.compare(cell(skill.number(), number), own, self.scale);
        let skills = &mut self.skills;
        // Reports about some cells may have been dropped to make room for others.
        skills.iter_mut().for_each(|table| table.reported.fill(Reported::default()));
        self.reports.sums(self.scale, |cell, (counts, trust)| {
            skills[cell as usize >> 16].reported[cell as usize & 0xFFFF] = Reported { counts, trust };
        });
        self.highest_trust = self.reports.highest_trust();
        (0..self.index.len()).for_each(|number| self.sum_up(number));
        self.update_kinds(skill);
        self.rescale();
    }

    /// Learns a verdict that another payer reports as right or wrong.
    pub(super) fn learn_report(&mut self, evaluator: Address, skill: Skill, right: bool, payer: Address) {
        let number = self.insert(evaluator);
        let payer = self.reports.payer(payer);
        let at = cell(skill.number(), number);
        // A report fades other evidence only as far as its payer is trusted, and all reports together only within their limit.
        let fades = self.reports.trust(payer).min(self.fades_left);
        self.fades_left -= fades;
        self.scale *= 1.0 - fades / self.config.memory_overall;
        self.reports.fade(at, 1.0 - self.reports.earned_trust(payer) / self.config.memory);
        self.reports.add(at, payer, right, 1.0 / self.scale);
        let scale = self.scale;
        let own = self.skill_table(skill).own[number];
        self.reports.compare(at, own, scale);
        let (counts, trust) = self.reports.sum(at, scale);
        self.skill_table(skill).reported[number] = Reported { counts, trust };
        self.highest_trust = self.reports.highest_trust();
        self.sum_up(number);
        self.update_kinds(skill);
        self.rescale();
    }

    fn insert(&mut self, evaluator: Address) -> usize {
        let (number, is_new) = self.index.insert(evaluator);
        if is_new {
            self.reset(number);
        }
        number
    }

    /// Makes room for an evaluator, and forgets the one that had its number before.
    fn reset(&mut self, number: usize) {
        let (count, limit) = (self.index.len(), self.config.max_evaluators);
        extend(&mut self.claims, count, limit);
        extend(&mut self.call_stats, count, limit);
        extend(&mut self.audits, count, limit);
        (self.claims[number], self.call_stats[number], self.audits[number]) = Default::default();
        for view in &mut self.views {
            extend(&mut view.totals, count, limit);
            view.totals[number] = Default::default();
        }
        for (skill, table) in self.skills.iter_mut().enumerate() {
            extend(&mut table.own, count, limit);
            extend(&mut table.reported, count, limit);
            (table.own[number], table.reported[number]) = Default::default();
            self.reports.clear(cell(skill, number));
        }
    }

    /// Returns the table of a skill, which may be new.
    fn skill_table(&mut self, skill: Skill) -> &mut SkillTable {
        let (count, limit) = (self.index.len(), self.config.max_evaluators);
        while self.skills.len() <= skill.number() {
            let mut table = SkillTable::default();
            extend(&mut table.own, count, limit);
            extend(&mut table.reported, count, limit);
            self.skills.push(table);
        }
        &mut self.skills[skill.number()]
    }

    /// Returns own and reported evidence on a cell, in verdicts.
    fn cell(&self, number: usize, skill: Skill) -> (Counts, Reported) {
        let Some(table) = self.skills.get(skill.number()) else { return Default::default() };
        let reported = table.reported[number];
        let verdicts = |counts: Counts| counts.map(|count| count * self.scale);
        (verdicts(table.own[number]), Reported { counts: verdicts(reported.counts), ..reported })
    }

    /// Returns the evidence on a cell in a view, in verdicts.
    fn counts(&self, number: usize, skill: Skill, with_reports: bool) -> Counts {
        let (own, reported) = self.cell(number, skill);
        let part = if with_reports { reported.trust } else { 0.0 };
        [own[0] + part * reported.counts[0], own[1] + part * reported.counts[1]]
    }

    /// Sums up the evidence on an evaluator over all skills.
    fn sum_up(&mut self, number: usize) {
        for with_reports in [false, true] {
            let mut totals = [[0.0; 2]; 2];
            for skill in (0..self.skills.len()).filter_map(Skill::new) {
                let counts = self.counts(number, skill, with_reports);
                let total = &mut totals[usize::from(self.claims[number].contains(skill))];
                *total = [total[0] + counts[0] / self.scale, total[1] + counts[1] / self.scale];
            }
            self.views[usize::from(with_reports)].totals[number] = totals;
        }
    }

    /// Updates what claims have proved worth in all skills, after the evidence in one has changed.
    fn update_kinds(&mut self, changed: Skill) {
        for with_reports in [false, true] {
            let mut sums = [(0.0, 0.0); 2];
            for number in 0..self.index.len() {
                let [right, wrong] = self.counts(number, changed, with_reports);
                let seen = right + wrong;
                if seen > 0.0 {
                    let sum = &mut sums[usize::from(self.claims[number].contains(changed))];
                    let weight = seen / (seen + self.config.skill_prior);
                    *sum = (sum.0 + weight * right / seen, sum.1 + weight);
                }
            }
            self.skills[changed.number()].kind_sums[usize::from(with_reports)] = sums;
            let prior = self.config.kind_prior;
            let expected = [self.config.unclaimed_accuracy, self.config.claimed_accuracy];
            for (kind, expected) in expected.into_iter().enumerate() {
                let (mut sum, mut weight) = (expected * prior, prior);
                for table in &self.skills {
                    let of_skill = table.kind_sums[usize::from(with_reports)][kind];
                    (sum, weight) = (sum + of_skill.0, weight + of_skill.1);
                }
                self.views[usize::from(with_reports)].kind_means[kind] = (sum / weight).clamp(0.35, 0.85);
            }
        }
    }

    /// Converts stored units back to verdicts before they grow too large.
    fn rescale(&mut self) {
        if self.scale > 1e-3 {
            return;
        }
        let scale = std::mem::replace(&mut self.scale, 1.0);
        for table in &mut self.skills {
            let reported = table.reported.iter_mut().map(|reported| &mut reported.counts);
            for counts in table.own.iter_mut().chain(reported) {
                *counts = counts.map(|count| count * scale);
            }
        }
        self.reports.fade_all(scale);
        (0..self.index.len()).for_each(|number| self.sum_up(number));
    }
}

const fn cell(skill: usize, number: usize) -> u32 {
    (skill << 16 | number) as u32
}

fn extend<T: Clone + Default>(items: &mut Vec<T>, count: usize, limit: usize) {
    while items.len() < count {
        grow(items, limit);
        items.push(T::default());
    }
}

/// The posterior of a probability: a beta distribution.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Beta {
    pub(super) alpha: f32,
    pub(super) beta: f32,
}

impl Beta {
    pub(super) fn mean(self) -> f32 {
        self.alpha / (self.alpha + self.beta)
    }

    /// Draws from the distribution, as the ratio of two gamma draws: `rand_distr::Beta` draws otherwise, and the figures in docs/market.md
    /// and docs/learning.md would change.
    pub(super) fn draw(self, rng: &mut impl Rng) -> f32 {
        let mut gamma = |shape| Gamma::new(shape, 1.0).map_or(0.0, |gamma| gamma.sample(rng));
        let (right, wrong) = (gamma(self.alpha), gamma(self.beta));
        right / (right + wrong)
    }
}

/// How an evaluator answers, apart from how often it is right. Of all skills, and as the student has seen itself.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct CallStats {
    /// Valid answers, and failures.
    answered: f32,
    failed: f32,
    /// Of audited answers that stated a confidence: how many, how many were right, and the sum of (confidence − right)².
    stated: f32,
    right: f32,
    brier: f32,
}

/// The prior of reliability: this many valid answers, and one failure.
const PRIOR_ANSWERS: f32 = 19.0;
/// How many failures a mismatch with the card counts as, since it is no accident.
const MISMATCH_FAILURES: f32 = 5.0;
/// How many stated confidences are needed before half of what they show counts.
const PRIOR_CONFIDENCES: f32 = 10.0;

impl CallStats {
    fn learn(&mut self, outcome: &CallOutcome, memory: f32) {
        let keep = 1.0 - 1.0 / memory;
        (self.answered, self.failed) = (self.answered * keep, self.failed * keep);
        match *outcome {
            CallOutcome::Answered { confidence, right, .. } => {
                self.answered += 1.0;
                if let (Some(confidence), Some(right)) = (confidence, right) {
                    let truth = f32::from(right);
                    let miss = (confidence as f32).clamp(0.0, 1.0) - truth;
                    self.stated = self.stated * keep + 1.0;
                    self.right = self.right * keep + truth;
                    self.brier = self.brier * keep + miss * miss;
                }
            }
            CallOutcome::PriceMismatch | CallOutcome::PayeeMismatch | CallOutcome::TokenMismatch => {
                self.failed += MISMATCH_FAILURES;
            }
            _ => self.failed += 1.0,
        }
    }

    /// Returns the probability of a valid answer.
    pub(super) fn reliability(&self) -> f32 {
        (PRIOR_ANSWERS + self.answered) / (PRIOR_ANSWERS + 1.0 + self.answered + self.failed)
    }

    /// Returns by how much the mean Brier score is worse than that of an evaluator that always states how often it is right: positive for
    /// evaluators that are surer than right, negative for those that know when they are wrong. Few data count less.
    pub(super) fn overconfidence(&self) -> f32 {
        if self.stated == 0.0 {
            return 0.0;
        }
        let accuracy = (self.right + 1.0) / (self.stated + 2.0);
        (self.brier / self.stated - accuracy * (1.0 - accuracy)) * self.stated / (self.stated + PRIOR_CONFIDENCES)
    }
}

#[cfg(test)]
mod tests {
    use rand::{SeedableRng, rngs::Xoshiro256PlusPlus};
    use tower_x402::Usdc;

    use super::*;

    const A: Address = Address::repeat_byte(1);
    const B: Address = Address::repeat_byte(2);

    /// Forgets nothing, and does not generalize from one cell to another.
    fn plain() -> ThompsonConfig {
        ThompsonConfig {
            memory: 1e6,
            memory_overall: 1e6,
            kind_prior: 1e6,
            evaluator_prior: 1e6,
            ..ThompsonConfig::default()
        }
    }

    /// Two evaluators, of which the first claims skill 0.
    fn posteriors(config: ThompsonConfig) -> Posteriors {
        let mut posteriors = Posteriors::new(config.clamped());
        let candidate = |evaluator, claims| Candidate { evaluator, claims, price: Usdc::ZERO, first_seen: 0 };
        let market = [candidate(A, SkillSet::from_iter([skill(0)])), candidate(B, SkillSet::default())];
        posteriors.number_market(&market, &mut Vec::new());
        posteriors
    }

    fn skill(number: usize) -> Skill {
        Skill::new(number).unwrap()
    }

    fn audit(right: bool) -> CallOutcome {
        CallOutcome::answered(1.0, None, Some(right))
    }

    fn near(a: f32, b: f32) {
        assert!((a - b).abs() < 2e-3 * b.abs().max(1.0), "{a} is not {b}");
    }

    #[test]
    fn verdicts_are_added_to_the_prior() {
        let mut posteriors = posteriors(plain());
        near(posteriors.mean(0, skill(0)), 0.65);
        near(posteriors.mean(0, skill(1)), 0.55);
        for right in [true, true, false, true, true] {
            posteriors.learn(A, skill(0), &audit(right));
        }
        let Beta { alpha, beta } = posteriors.posterior(0, skill(0), false);
        near(alpha, 3.0 * 0.65 + 4.0);
        near(beta, 3.0 * 0.35 + 1.0);
        near(posteriors.mean(0, skill(0)), (3.0 * 0.65 + 4.0) / 8.0);
    }

    #[test]
    fn other_skills_move_the_prior() {
        let mut posteriors = posteriors(ThompsonConfig { evaluator_prior: 4.0, ..plain() });
        for _ in 0..4 {
            posteriors.learn(A, skill(1), &audit(true));
        }
        // Four of four, where 0.55 was expected: 1.8 beyond, against a weight of 4.
        near(posteriors.mean(0, skill(0)), 0.65 + 4.0 * 0.45 / (4.0 + 4.0));
        near(posteriors.mean(1, skill(0)), 0.55);
        near(posteriors.mean(0, skill(1)), (3.0 * 0.55 + 4.0) / 7.0);
    }

    #[test]
    fn prior_of_claims_follows_the_results_of_claims() {
        let mut posteriors = posteriors(ThompsonConfig { kind_prior: 4.0, ..plain() });
        for _ in 0..3 {
            posteriors.learn(A, skill(0), &audit(false));
        }
        // One voice of 3 / (3 + 3) for zero, against four for 0.65.
        near(posteriors.views[0].kind_means[1], 4.0 * 0.65 / 4.5);
        near(posteriors.views[0].kind_means[0], 0.55);
    }

    #[test]
    fn reports_count_as_far_as_their_payer_is_trusted() {
        let mut posteriors = posteriors(ThompsonConfig { initial_trust: 0.4, ..plain() });
        for _ in 0..4 {
            posteriors.learn_report(A, skill(0), true, B);
        }
        let (own, reported) = (0.65, (3.0 * 0.65 + 4.0) / 7.0);
        near(posteriors.mean(0, skill(0)), own + 0.4 * (reported - own));
        near(posteriors.trust_in(&B), 0.4);
        posteriors.learn(A, skill(0), &audit(true));
        // One right against four right: B(6, 1) / (B(2, 1) · B(5, 1)) = 10/6.
        near(posteriors.trust_in(&B), 1.0 / (1.0 + 0.6 / 0.4 * 0.6));
        posteriors.learn(A, skill(0), &audit(false));
        posteriors.learn(A, skill(0), &audit(false));
        assert!(posteriors.trust_in(&B) < 0.4);
    }

    #[test]
    fn dropped_reports_do_not_count() {
        let mut posteriors = posteriors(ThompsonConfig { max_reports: 2, ..plain() });
        for _ in 0..4 {
            posteriors.learn_report(A, skill(0), true, Address::repeat_byte(7));
        }
        assert!(posteriors.mean(0, skill(0)) > 0.7);
        // Others have more to say about somebody else, and there is room for two.
        for payer in [8, 9] {
            (0..10).for_each(|_| posteriors.learn_report(B, skill(1), true, Address::repeat_byte(payer)));
        }
        posteriors.learn(B, skill(2), &audit(true));
        near(posteriors.mean(0, skill(0)), 0.65);
    }

    #[test]
    fn evidence_on_a_cell_is_bounded_by_the_memory() {
        let config = ThompsonConfig { memory: 20.0, ..plain() };
        let mut posteriors = posteriors(config);
        for _ in 0..500 {
            posteriors.learn(A, skill(0), &audit(true));
        }
        let Beta { alpha, beta } = posteriors.posterior(0, skill(0), false);
        near(alpha + beta, 3.0 + 20.0);
        // A change is seen after as many verdicts as are remembered.
        for _ in 0..20 {
            posteriors.learn(A, skill(0), &audit(false));
        }
        assert!(posteriors.mean(0, skill(0)) < 0.45);
    }

    #[test]
    fn unseen_evaluators_fade_as_others_are_audited() {
        let config = ThompsonConfig { memory_overall: 50.0, ..plain() };
        let mut posteriors = posteriors(config);
        for _ in 0..10 {
            posteriors.learn(A, skill(0), &audit(false));
        }
        let before = posteriors.mean(0, skill(0));
        for _ in 0..1_000 {
            posteriors.learn(B, skill(1), &audit(true));
        }
        assert!(before < 0.25);
        near(posteriors.mean(0, skill(0)), 0.65);
        assert!(posteriors.verdicts(0) < 0.01 && posteriors.verdicts(1) < 51.0 && posteriors.scale > 1e-4);
        assert_eq!((posteriors.audits(0), posteriors.audits(1)), (10.0, 1_000.0), "audits do not fade");
    }

    #[test]
    fn reported_evaluators_do_not_displace_audited_ones() {
        let [c, d, e] = [3, 4, 5].map(Address::repeat_byte);
        let mut posteriors = Posteriors::new(ThompsonConfig { max_evaluators: 3, ..plain() }.clamped());
        posteriors.learn(A, skill(0), &audit(false));
        posteriors.learn(B, skill(0), &audit(false));
        [c, d].into_iter().for_each(|stranger| posteriors.learn_report(stranger, skill(0), true, e));
        let stranger =
            |evaluator| Candidate { evaluator, claims: SkillSet::default(), price: Usdc::ZERO, first_seen: 0 };
        posteriors.number_market(&[e, A, B].map(stranger), &mut Vec::new());
        let audited = |evaluator| posteriors.number(evaluator).map(|number| posteriors.audits(number));
        assert_eq!([A, B, c, d, e].map(audited), [Some(1.0), Some(1.0), None, None, Some(0.0)]);
    }

    #[test]
    fn order_of_cards_and_verdicts_does_not_matter() {
        let claimants: Vec<_> = (1..11)
            .map(|byte| Candidate {
                evaluator: Address::repeat_byte(byte),
                claims: SkillSet::from_iter([skill(0)]),
                price: Usdc::ZERO,
                first_seen: 0,
            })
            .collect();
        let config = ThompsonConfig { kind_prior: 4.0, ..plain() }.clamped();
        let [mut told, mut rebuilt] = [(); 2].map(|()| Posteriors::new(config.clone()));
        let learn = |posteriors: &mut Posteriors| {
            for claimant in &claimants {
                (0..40).for_each(|_| posteriors.learn(claimant.evaluator, skill(0), &audit(true)));
            }
        };
        told.number_market(&claimants, &mut Vec::new());
        learn(&mut told);
        learn(&mut rebuilt);
        rebuilt.number_market(&claimants, &mut Vec::new());
        for (told, rebuilt) in told.views.iter().zip(&rebuilt.views) {
            near(rebuilt.kind_means[0], told.kind_means[0]);
            near(rebuilt.kind_means[1], told.kind_means[1]);
        }
    }

    #[test]
    fn reused_number_starts_without_evidence() {
        let mut posteriors = posteriors(ThompsonConfig { max_evaluators: 2, ..plain() });
        posteriors.learn(A, skill(0), &audit(false));
        posteriors.learn_report(A, skill(1), false, B);
        let newcomers = [3, 4].map(|byte| Candidate {
            evaluator: Address::repeat_byte(byte),
            claims: SkillSet::from_iter([skill(0)]),
            price: Usdc::ZERO,
            first_seen: 0,
        });
        let mut numbers = Vec::new();
        posteriors.number_market(&newcomers, &mut numbers);
        assert_eq!(posteriors.number(A), None);
        for number in [0, 1] {
            near(posteriors.mean(number, skill(0)), 0.65);
            near(posteriors.mean(number, skill(1)), 0.55);
            assert_eq!((posteriors.verdicts(number), posteriors.audits(number)), (0.0, 0.0));
        }
    }

    fn call_stats(verdicts: &[(f64, bool)]) -> CallStats {
        let mut call_stats = CallStats::default();
        for (confidence, right) in verdicts {
            call_stats.learn(&CallOutcome::answered(1.0, Some(*confidence), Some(*right)), 1e6);
        }
        call_stats
    }

    #[test]
    fn stating_the_true_accuracy_has_the_least_overconfidence() {
        let of = |confidence: f64| {
            call_stats(&[(confidence, true), (confidence, true), (confidence, true), (confidence, false)].repeat(25))
        };
        let honest = of(0.75).overconfidence();
        assert!(honest.abs() < 0.01, "{honest}");
        for lie in [0.0, 0.5, 0.65, 0.85, 1.0] {
            assert!(of(lie).overconfidence() > honest, "{lie}");
        }
    }

    #[test]
    fn confidence_that_tells_right_from_wrong_is_rewarded() {
        let knows = call_stats(&[(0.9, true), (0.9, true), (0.9, true), (0.3, false)].repeat(25));
        assert!(knows.overconfidence() < -0.1);
    }

    #[test]
    fn failures_lower_reliability_and_mismatches_lower_it_most() {
        let after = |outcome: CallOutcome| {
            let mut call_stats = CallStats::default();
            call_stats.learn(&outcome, 40.0);
            call_stats.reliability()
        };
        let (answered, garbage) = (after(CallOutcome::answered(0.5, None, None)), after(CallOutcome::InvalidAnswer));
        assert!(
            answered > garbage && garbage == after(CallOutcome::Timeout) && garbage > after(CallOutcome::PriceMismatch)
        );
    }

    #[test]
    fn beta_draws_have_the_right_mean_and_variance() {
        let mut rng = Xoshiro256PlusPlus::seed_from_u64(1);
        for (alpha, beta) in [(1.0, 1.0), (0.6, 2.4), (9.0, 2.0), (40.0, 3.0)] {
            let posterior = Beta { alpha, beta };
            let draws: Vec<_> = (0..40_000).map(|_| f64::from(posterior.draw(&mut rng))).collect();
            let mean = draws.iter().sum::<f64>() / draws.len() as f64;
            let variance = draws.iter().map(|draw| (draw - mean).powi(2)).sum::<f64>() / draws.len() as f64;
            let (a, b) = (f64::from(alpha), f64::from(beta));
            assert!((mean - a / (a + b)).abs() < 0.005, "{mean}");
            let exact = a * b / ((a + b).powi(2) * (a + b + 1.0));
            assert!((variance / exact - 1.0).abs() < 0.05, "{variance} {exact}");
        }
    }
}
