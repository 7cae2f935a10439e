//! The selector to use: Thompson sampling with a price of money.

use std::collections::VecDeque;

use alloy_primitives::Address;
use rand::{RngExt, SeedableRng, rngs::Xoshiro256PlusPlus};
use tower_x402::Usdc;

use super::{
    CallOutcome, Candidate, Choice, Job, Observation, Panel, Selector, Skill, Skills,
    pacing::{BudgetShare, Pacer},
    posterior::Posteriors,
};
use crate::evidence::{Evidence, EvidenceLog};

/// How many choices without a recorded cost are remembered. Older ones count as paid.
const MAX_OPEN_CHOICES: usize = 1_024;

/// Thompson sampling with a price of money. The [module](self::super) describes how it chooses.
pub struct Thompson {
    config: ThompsonConfig,
    posteriors: Posteriors,
    pacer: Pacer,
    rng: Xoshiro256PlusPlus,
    /// When it began. Evaluators first seen later are newcomers.
    began: Option<u64>,
    /// Atomic units spent, including promised ones.
    spent: u64,
    newcomers: BudgetShare,
    explorations: BudgetShare,
    /// Choices whose cost is not recorded yet, each with whether it is a newcomer.
    open: VecDeque<(Choice, bool)>,
    /// The number of each candidate; kept for its memory.
    numbers: Vec<u32>,
}

/// The settings of a [`Thompson`] selector: its prior trust, how fast it forgets, and how much it may spend on learning.
///
/// ```
/// use x402_market::selection::{Thompson, ThompsonConfig};
///
/// let mut config = ThompsonConfig::default();
/// config.newcomer_share = 0.02;
/// let selector = Thompson::new(config, 1);
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ThompsonConfig {
    /// The trust in a payer of which nothing is known, from 0.05 to 0.95. Default: 0.4.
    pub initial_trust: f32,
    /// The number of verdicts per evaluator and skill that are remembered; older ones fade. At least 2. Default: 40.
    pub memory: f32,
    /// The speed at which the price of money moves, from 0 to 1. Default: 0.03.
    pub pace: f64,
    /// The number of evaluators explored in an audit at most. Default: 3.
    pub explored_per_audit: usize,
    /// The share of the budget that exploration may cost, from 0 to 1. Half of it may be used up in the beginning. Default: 0.05.
    pub exploration_share: f64,
    /// The share of tasks without an audit in which evaluators are drawn as in an audit, from 0 to 1. Default: 0.02.
    pub decoy_rate: f64,
    /// The share of the budget that newcomers may cost, from 0 to 1. Default: 0.1.
    pub newcomer_share: f64,
    /// The number of own audits after which an evaluator is no newcomer any more. Reports, which can be bought, do not count. Default: 5.
    pub newcomer_audits: f32,
    /// The number of evaluators that are remembered, from 1 to 65,535: those offered or hired last. Candidates beyond that number are ignored, so it
    /// should exceed the number offered at once. Default: 1,024.
    pub max_evaluators: usize,
    /// The number of other payers that are remembered, from 1 to 65,535: the most trusted ones. Default: 1,024.
    pub max_payers: usize,
    /// The number of their reports that are remembered, counting one for each payer, evaluator and skill. At least 1. Default: 8,192.
    pub max_reports: usize,
    // What follows is the model. Nobody needs to set it; unit tests do.
    /// The accuracy expected where a card claims the skill.
    pub(super) claimed_accuracy: f32,
    /// The accuracy expected where it does not.
    pub(super) unclaimed_accuracy: f32,
    /// How many well-known evaluators these two expectations count as.
    pub(super) kind_prior: f32,
    /// How many verdicts in other skills say as much about an evaluator as its kind (claimed or not).
    pub(super) evaluator_prior: f32,
    /// How many verdicts in a skill say as much about an evaluator as all of the above.
    pub(super) skill_prior: f32,
    /// After how many verdicts on any evaluator one that is not renewed has faded to 37 %.
    pub(super) memory_overall: f32,
    /// How much overconfidence, by the Brier score, lowers the value.
    pub(super) overconfidence_penalty: f32,
    /// How many verdicts the reports of one payer on an evaluator and skill count as at most.
    pub(super) verdicts_per_payer: f32,
}

impl Default for ThompsonConfig {
    fn default() -> Self {
        Self {
            initial_trust: 0.4,
            memory: 40.0,
            pace: 0.03,
            explored_per_audit: 3,
            exploration_share: 0.05,
            decoy_rate: 0.02,
            newcomer_share: 0.1,
            newcomer_audits: 5.0,
            max_evaluators: 1_024,
            max_payers: 1_024,
            max_reports: 8_192,
            claimed_accuracy: 0.65,
            unclaimed_accuracy: 0.55,
            kind_prior: 4.0,
            evaluator_prior: 4.0,
            skill_prior: 3.0,
            memory_overall: 400.0,
            overconfidence_penalty: 0.25,
            verdicts_per_payer: 10.0,
        }
    }
}

impl ThompsonConfig {
    /// Returns the nearest configuration within the documented ranges.
    pub(super) fn clamped(mut self) -> Self {
        let share = |p: f64| if p.is_nan() { 0.0 } else { p.clamp(0.0, 1.0) };
        let at_least = |value: f32, least: f32| if value.is_nan() { least } else { value.clamp(least, 1e6) };
        self.initial_trust = if self.initial_trust.is_nan() { 0.5 } else { self.initial_trust.clamp(0.05, 0.95) };
        self.memory = at_least(self.memory, 2.0);
        self.pace = share(self.pace);
        self.exploration_share = share(self.exploration_share);
        self.decoy_rate = share(self.decoy_rate);
        self.newcomer_share = share(self.newcomer_share);
        self.newcomer_audits = at_least(self.newcomer_audits, 0.0);
        self.max_evaluators = self.max_evaluators.clamp(1, usize::from(u16::MAX));
        self.max_payers = self.max_payers.clamp(1, usize::from(u16::MAX));
        self.max_reports = self.max_reports.max(1);
        self
    }
}

/// The estimate of an evaluator in a skill.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct Estimate {
    /// The expected probability that a verdict is right.
    pub accuracy: f64,
    /// The probability of a valid answer.
    pub reliability: f64,
    /// The mean Brier score of its stated confidence, minus that of always stating how often it is right; negative if better.
    pub overconfidence: f64,
    /// The number of verdicts known in all skills, faded, with those in reports weighted by trust.
    pub verdicts: f64,
}

/// A candidate that is worth its price, by its expected or its drawn accuracy.
#[derive(Clone, Copy, Debug)]
struct Offer {
    position: usize,
    cost: u64,
    is_newcomer: bool,
    expected: f32,
    drawn: f32,
}

impl Thompson {
    /// Creates a selector that knows nothing yet. Its choices depend only on `seed` and on what it learns.
    pub fn new(config: ThompsonConfig, seed: u64) -> Self {
        let config = config.clamped();
        Self {
            posteriors: Posteriors::new(config.clone()),
            pacer: Pacer::new(config.pace),
            rng: Xoshiro256PlusPlus::seed_from_u64(seed),
            began: None,
            spent: 0,
            newcomers: BudgetShare::new(config.newcomer_share, 0.05),
            explorations: BudgetShare::new(config.exploration_share, 0.5),
            open: VecDeque::new(),
            numbers: Vec::new(),
            config,
        }
    }

    /// Creates a selector with the default configuration.
    pub fn seeded(seed: u64) -> Self {
        Self::new(ThompsonConfig::default(), seed)
    }

    /// Returns what is known of an evaluator in a skill, if anything is.
    pub fn estimate(&self, evaluator: Address, skill: Skill) -> Option<Estimate> {
        let number = self.posteriors.number(evaluator)?;
        let call_stats = self.posteriors.call_stats(number);
        Some(Estimate {
            accuracy: f64::from(self.posteriors.mean(number, skill)),
            reliability: f64::from(call_stats.reliability()),
            overconfidence: f64::from(call_stats.overconfidence()),
            verdicts: f64::from(self.posteriors.verdicts(number)),
        })
    }

    /// Returns the parameters of the two posteriors of an accuracy, without and with reports, and the probability that the reports are
    /// genuine.
    pub(crate) fn posteriors(&self, evaluator: Address, skill: Skill) -> Option<([[f64; 2]; 2], f64)> {
        let number = self.posteriors.number(evaluator)?;
        let of = |with_reports| {
            let beta = self.posteriors.posterior(number, skill, with_reports);
            [f64::from(beta.alpha), f64::from(beta.beta)]
        };
        Some(([of(false), of(true)], f64::from(self.posteriors.trust_in_reports(number, skill))))
    }

    /// Returns the probability that the reports of this payer are genuine.
    pub fn trust(&self, payer: Address) -> f64 {
        f64::from(self.posteriors.trust_in(&payer))
    }

    /// Lists the candidates that are worth their price, by their expected or their drawn accuracy.
    fn offers(&mut self, job: &Job, market: &[Candidate], lambda: f64) -> Vec<Offer> {
        let began = *self.began.get_or_insert(job.now);
        let is_decoy = !job.audit && self.rng.random_bool(self.config.decoy_rate);
        // One draw for all candidates: it decides which reports are genuine.
        let doubt: f32 = self.rng.random();
        let mut offers = Vec::new();
        for ((position, candidate), number) in market.iter().enumerate().zip(&self.numbers) {
            let number = *number as usize;
            let Some(cost) = job.cost(candidate) else { continue };
            let call_stats = self.posteriors.call_stats(number);
            let reliability = call_stats.reliability();
            let penalty = self.config.overconfidence_penalty * call_stats.overconfidence();
            // Values are per output, and so is the price.
            let price = (lambda * candidate.price.atomic() as f64) as f32 + penalty;
            let score = |accuracy: f32| reliability * (2.0 * accuracy - 1.0) - price;
            // Not even a perfect evaluator would be worth it.
            if score(1.0) <= 0.0 {
                continue;
            }
            let drawn = if job.audit || is_decoy {
                let with_reports = doubt < self.posteriors.trust_in_reports(number, job.skill);
                score(self.posteriors.posterior(number, job.skill, with_reports).draw(&mut self.rng))
            } else {
                0.0
            };
            let expected = if is_decoy { drawn } else { score(self.posteriors.mean(number, job.skill)) };
            if expected > 0.0 || drawn > 0.0 {
                let is_new = candidate.first_seen > began;
                let is_newcomer = is_new && self.posteriors.audits(number) < self.config.newcomer_audits;
                offers.push(Offer { position, cost, is_newcomer, expected, drawn });
            }
        }
        offers
    }

    /// Takes the best offer for which there is money off the list, and returns its position in the market.
    fn take(
        &mut self,
        offers: &mut Vec<Offer>,
        market: &[Candidate],
        left: u64,
        is_exploration: bool,
    ) -> Option<usize> {
        let is_granted = |offer: &Offer| {
            offer.cost <= left
                && (!offer.is_newcomer || self.newcomers.grants(offer.cost, self.spent, left))
                && (!is_exploration || self.explorations.grants(offer.cost, self.spent, left))
        };
        let (mut best, mut most) = (None, 0.0);
        for (at, offer) in offers.iter().enumerate() {
            let score = if is_exploration { offer.drawn } else { offer.expected };
            if score > most && is_granted(offer) {
                (best, most) = (Some(at), score);
            }
        }
        let Offer { position, cost, is_newcomer, .. } = offers.swap_remove(best?);
        self.spent = self.spent.saturating_add(cost);
        if is_newcomer {
            self.newcomers.take(cost);
        }
        if is_exploration {
            self.explorations.take(cost);
        }
        if self.open.len() == MAX_OPEN_CHOICES {
            self.open.pop_front();
        }
        let (evaluator, promised) = (market[position].evaluator, Usdc::from_atomic(cost));
        self.open.push_back((Choice { evaluator, promised, is_exploration }, is_newcomer));
        Some(position)
    }
}

impl Selector for Thompson {
    fn select(&mut self, job: &Job, market: &[Candidate]) -> Panel {
        let market = &market[..market.len().min(self.config.max_evaluators)];
        self.posteriors.number_market(market, &mut self.numbers);
        let allowance = job.allowance();
        let lambda = self.pacer.lambda(allowance);
        let mut offers = self.offers(job, market, lambda);
        let mut panel = Panel::default();
        let before = self.spent;
        let left = |this: &Self| job.remaining.atomic() - (this.spent - before);
        while panel.hired.len() < job.seats
            && let Some(position) = self.take(&mut offers, market, left(self), false)
        {
            panel.hired.push(position);
        }
        // Exploration has its own share of the budget, so its cost does not make hiring cheaper evaluators more attractive.
        self.pacer.spent(self.spent - before, allowance);
        while job.audit
            && panel.explored.len() < self.config.explored_per_audit
            && let Some(position) = self.take(&mut offers, market, left(self), true)
        {
            panel.explored.push(position);
        }
        panel
    }

    fn learn(&mut self, observation: &Observation) {
        self.posteriors.learn(observation.evaluator, observation.skill, &observation.outcome);
    }

    /// Gives back what was promised and not paid.
    fn record_cost(&mut self, choice: &Choice, paid: Usdc) {
        let Some(at) = self.open.iter().position(|(open, _)| open == choice) else { return };
        let Some((_, is_newcomer)) = self.open.remove(at) else { return };
        let unpaid = choice.promised.atomic().saturating_sub(paid.atomic());
        self.spent = self.spent.saturating_sub(unpaid);
        if is_newcomer {
            self.newcomers.give_back(unpaid);
        }
        if choice.is_exploration {
            self.explorations.give_back(unpaid);
        }
    }

    /// Learns a report, if its payer claims to know the truth. It counts as far as the payer agrees with the student's own audits.
    fn learn_report(&mut self, payer: Address, observation: &Observation) {
        if let CallOutcome::Answered { right: Some(right), .. } = observation.outcome {
            self.posteriors.learn_report(observation.evaluator, observation.skill, right, payer);
        }
    }

    /// Learns a log. What newcomers and explorations have cost by it counts towards their shares of the budget.
    fn restore(&mut self, log: &EvidenceLog, own: &[Address], skills: &Skills) {
        let is_own = |evidence: &Evidence| evidence.payment.is_none_or(|payment| own.contains(&payment.payer));
        let mut began: Option<u64> = None;
        log.for_each(|evidence| {
            if is_own(evidence) && skills.get(&evidence.skill).is_some() {
                began = Some(began.map_or(evidence.at, |began| began.min(evidence.at)));
            }
        });
        self.began = [self.began, began].into_iter().flatten().min();
        let (first_seen, began) = (log.first_seen_times(), self.began);
        log.for_each(|evidence| {
            let Some(skill) = skills.get(&evidence.skill) else { return };
            let observation = evidence.observation(skill);
            match &evidence.payment {
                Some(payment) if !is_own(evidence) => self.learn_report(payment.payer, &observation),
                _ => {
                    let number = self.posteriors.number(evidence.evaluator);
                    let audits = number.map_or(0.0, |number| self.posteriors.audits(number));
                    let is_new = first_seen.get(&evidence.evaluator).copied() > began;
                    if is_new && audits < self.config.newcomer_audits {
                        self.newcomers.take(evidence.paid.atomic());
                    }
                    self.spent = self.spent.saturating_add(evidence.paid.atomic());
                    self.learn(&observation);
                }
            }
        });
        self.explorations.take(log.exploration_cost().atomic());
    }

    fn expected_accuracy(&self, evaluator: Address, skill: Skill) -> Option<f64> {
        self.estimate(evaluator, skill).map(|estimate| estimate.accuracy)
    }
}

debug_fields!(Thompson { config, spent });

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{evidence::EvidencePayment, selection::SkillSet};

    fn skill() -> Skill {
        Skill::new(0).unwrap()
    }

    fn candidate(number: u8, price: u64, first_seen: u64) -> Candidate {
        let claims = SkillSet::from_iter([skill()]);
        Candidate { evaluator: Address::repeat_byte(number), claims, price: Usdc::from_atomic(price), first_seen }
    }

    fn job(remaining: u64, tasks_left: u64) -> Job {
        Job { now: 100, ..Job::new(skill(), Usdc::from_atomic(remaining), tasks_left) }
    }

    fn report(candidate: &Candidate, right: Option<bool>) -> Observation {
        let outcome = CallOutcome::answered(1.0, None, right);
        Observation { evaluator: candidate.evaluator, skill: skill(), paid: candidate.price, at: 100, outcome }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn budget_is_never_overspent(
            prices in prop::collection::vec(0_u64..5_000, 1..12),
            budget in 0_u64..200_000,
            outputs in 1_u32..4,
            seats in 0_usize..4,
            seed: u64,
        ) {
            let market: Vec<_> = prices.iter().zip(0..).map(|(price, n)| candidate(n, *price, 0)).collect();
            let (mut selector, mut left) = (Thompson::seeded(seed), budget);
            for task in 0..100_u64 {
                let job = Job { outputs, seats, audit: task % 5 == 0, ..job(left, 100 - task) };
                let panel = selector.select(&job, &market);
                prop_assert!(panel.hired.len() <= seats);
                prop_assert!(job.audit || panel.explored.is_empty());
                let mut everyone: Vec<_> = panel.all().collect();
                for position in &everyone {
                    let cost = market[*position].price.atomic() * u64::from(outputs);
                    prop_assert!(cost <= left);
                    left -= cost;
                }
                everyone.sort_unstable();
                everyone.dedup();
                prop_assert_eq!(everyone.len(), panel.all().count(), "nobody is hired twice");
            }
        }
    }

    #[test]
    fn accurate_evaluator_is_hired_and_coin_tosses_are_not() {
        let market = [candidate(1, 1_000, 0), candidate(2, 1_000, 0), candidate(3, 500, 0)];
        let (mut selector, mut hired) = (Thompson::seeded(3), [0; 3]);
        for task in 0..400_u64 {
            let job = Job { audit: task.is_multiple_of(4), ..job(1_000 * (400 - task), 400 - task) };
            let panel = selector.select(&job, &market);
            for position in panel.all() {
                let right = [task % 36 != 0, task % 8 < 4, task % 8 < 4][position];
                selector.learn(&report(&market[position], job.audit.then_some(right)));
            }
            if task >= 300 {
                panel.hired.iter().for_each(|position| hired[*position] += 1);
            }
        }
        assert!(hired[0] > 90 && hired[1] + hired[2] < 5, "{hired:?}");
        let accuracy = |number: usize| selector.estimate(market[number].evaluator, skill()).unwrap().accuracy;
        assert!(accuracy(0) > accuracy(1) + 0.15);
    }

    #[test]
    fn no_evaluator_is_hired_if_none_is_worth_its_price() {
        let market = [candidate(1, 1_000, 0)];
        let mut selector = Thompson::seeded(3);
        let panel = selector.select(&job(1_000_000, 100), &market);
        assert_eq!(panel.hired, [0]);
        for _ in 0..20 {
            selector.learn(&report(&market[0], Some(false)));
        }
        let panel = selector.select(&job(1_000_000, 100), &market);
        assert!(panel.hired.is_empty());
    }

    #[test]
    fn newcomers_together_cost_at_most_their_share() {
        let budget = 100_000_u64;
        let (mut left, mut on_newcomers) = (budget, 0);
        let mut selector = Thompson::seeded(5);
        let dear = candidate(0, 100_000_000, 0);
        selector.select(&job(left, 500), &[dear]);
        // Each takes another name as soon as it was hired, and would be a bargain.
        for task in 0..500_u64 {
            let name = (task % 250) as u8 + 1;
            let market = [dear, candidate(name, 100, 200 + task)];
            let job = Job { audit: task % 10 == 0, ..job(left, 500 - task) };
            let panel = selector.select(&job, &market);
            for position in panel.all() {
                left -= market[position].price.atomic();
                on_newcomers += market[position].price.atomic();
                let outcome = CallOutcome::answered(1.0, None, None);
                selector.learn(&Observation { outcome, ..report(&market[position], None) });
            }
            assert!(on_newcomers <= budget / 10, "{on_newcomers}");
        }
        assert!(on_newcomers > 0);
    }

    #[test]
    fn reports_do_not_end_the_limit_on_newcomers() {
        let budget = 100_000_u64;
        let (mut left, mut on_newcomer) = (budget, 0);
        let mut selector = Thompson::seeded(5);
        let market = [candidate(0, 100_000_000, 0), candidate(1, 100, 200)];
        selector.select(&job(left, 500), &market[..1]);
        for sham in 0..20 {
            (0..10)
                .for_each(|_| selector.learn_report(Address::repeat_byte(100 + sham), &report(&market[1], Some(true))));
        }
        assert!(selector.estimate(market[1].evaluator, skill()).unwrap().verdicts > 5.0);
        for task in 0..500_u64 {
            let panel = selector.select(&job(left, 500 - task), &market);
            for position in panel.all() {
                left -= market[position].price.atomic();
                on_newcomer += market[position].price.atomic();
                selector.learn(&report(&market[position], None));
            }
            assert!(on_newcomer <= budget / 10, "{on_newcomer}");
        }
        assert!(on_newcomer > 0);
    }

    #[test]
    fn candidates_beyond_the_limit_are_ignored() {
        let config = ThompsonConfig { max_evaluators: 3, ..ThompsonConfig::default() };
        let mut selector = Thompson::new(config, 1);
        let market: Vec<_> = (1..9).map(|number| candidate(number, 100, 0)).collect();
        for _ in 0..20 {
            let panel = selector.select(&Job { seats: 8, ..job(1_000_000, 100) }, &market);
            assert!(panel.hired.iter().all(|position| *position < 3));
        }
        assert!(selector.estimate(market[0].evaluator, skill()).is_some());
        assert!(selector.estimate(market[7].evaluator, skill()).is_none());
    }

    #[test]
    fn unpaid_promises_are_given_back() {
        let mut selector = Thompson::seeded(1);
        let market = [candidate(1, 100, 0)];
        let panel = selector.select(&job(100_000, 100), &market);
        assert_eq!((panel.hired.len(), selector.spent), (1, 100));
        selector.learn(&Observation {
            paid: Usdc::ZERO,
            outcome: CallOutcome::PriceMismatch,
            ..report(&market[0], None)
        });
        let choice = Choice { evaluator: market[0].evaluator, promised: market[0].price, is_exploration: false };
        selector.record_cost(&Choice { is_exploration: true, ..choice }, Usdc::ZERO);
        assert_eq!(selector.spent, 100, "that one was not made");
        selector.record_cost(&choice, Usdc::ZERO);
        assert_eq!((selector.spent, selector.open.len()), (0, 0));
        assert!(selector.estimate(market[0].evaluator, skill()).unwrap().reliability < 0.8);
    }

    #[test]
    fn cost_of_one_choice_is_not_given_back_for_another() {
        let mut selector = Thompson::seeded(1);
        let dear = candidate(0, 100_000_000, 0);
        selector.select(&job(1_000_000, 100), &[dear]);
        let market = [candidate(1, 100, 200)];
        let jobs = [1, 9].map(|outputs| Job { outputs, ..job(1_000_000, 100) });
        let mut made = Vec::new();
        for job in &jobs {
            let panel = selector.select(job, &market);
            made.extend(panel.choices(job, &market).map(|(_, choice)| choice));
        }
        assert_eq!((made.len(), selector.spent), (2, 1_000));
        // The dearer one is answered, the other is not.
        selector.record_cost(&made[1], made[1].promised);
        selector.record_cost(&made[0], Usdc::ZERO);
        assert_eq!(selector.spent, 900);
        // A newcomer's share is a tenth: of 9,000 in all that is used up.
        assert!(!selector.newcomers.grants(1, selector.spent, 8_100));
    }

    #[test]
    fn restored_selector_has_the_same_estimates() {
        let (me, other) = (Address::repeat_byte(100), Address::repeat_byte(101));
        let skills: Skills = ["prose"].into_iter().collect();
        let log = EvidenceLog::in_memory(1_000);
        let mut told = Thompson::seeded(1);
        for turn in 0..60_u8 {
            let by = if turn.is_multiple_of(3) { other } else { me };
            let observation = report(&candidate(turn % 4, 100, 0), Some(turn.is_multiple_of(5)));
            if by == me {
                told.learn(&observation)
            } else {
                told.learn_report(by, &observation)
            }
            let evidence = Evidence {
                payment: Some(EvidencePayment { payer: by, nonce: alloy_primitives::B256::repeat_byte(turn) }),
                charge: None,
                evaluator: observation.evaluator,
                skill: "prose".into(),
                at: 100,
                paid: observation.paid,
                outcome: observation.outcome,
            };
            log.record(evidence, 100).unwrap();
        }
        let mut rebuilt = Thompson::seeded(1);
        rebuilt.restore(&log, &[me], &skills);
        for number in 0..4 {
            let estimate = rebuilt.estimate(Address::repeat_byte(number), skill());
            assert!(estimate.is_some() && estimate == told.estimate(Address::repeat_byte(number), skill()));
        }
        assert_eq!(rebuilt.trust(other), told.trust(other));
        assert_eq!(rebuilt.began, Some(100));
    }

    #[test]
    fn restored_selector_grants_no_second_share_to_newcomers_and_explorations() {
        let log = EvidenceLog::in_memory(1_000);
        let me = Address::repeat_byte(100);
        let (old, stranger) = (candidate(1, 100, 50), candidate(2, 100, 200));
        log.first_seen(old.evaluator, old.first_seen).unwrap();
        log.first_seen(stranger.evaluator, stranger.first_seen).unwrap();
        for (turn, of) in [old, old, stranger, old, stranger].into_iter().enumerate() {
            let nonce = alloy_primitives::B256::repeat_byte(turn as u8);
            let evidence = Evidence {
                payment: Some(EvidencePayment { payer: me, nonce }),
                charge: None,
                evaluator: of.evaluator,
                skill: "prose".into(),
                at: 100 + turn as u64,
                paid: Usdc::from_atomic(100),
                outcome: CallOutcome::answered(1.0, None, Some(true)),
            };
            log.record(evidence, 1_000).unwrap();
        }
        log.record_exploration_cost(Usdc::from_atomic(300)).unwrap();
        let mut rebuilt = Thompson::seeded(1);
        rebuilt.restore(&log, &[me], &["prose"].into_iter().collect());
        assert_eq!((rebuilt.began, rebuilt.spent), (Some(100), 500));
        // Of a budget of 2,000 in all, newcomers may have 200 and examinations 100.
        assert!(!rebuilt.newcomers.grants(1, 1_990, 10) && rebuilt.newcomers.grants(10, 2_100, 0));
        assert!(!rebuilt.explorations.grants(1, 1_990, 10) && rebuilt.explorations.grants(1, 7_000, 0));
    }
}
