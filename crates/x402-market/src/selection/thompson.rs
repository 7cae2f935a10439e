//! The selector to use: Thompson sampling with a price of money.

use std::collections::HashMap;

use alloy_primitives::Address;
use rand::{RngExt, SeedableRng, rngs::Xoshiro256PlusPlus};
use tower_x402::Usdc;

use super::{
    CallOutcome, Candidate, Job, Observation, Pairs, Selector, Skill, SkillSet, ThompsonConfig,
    beliefs::{Belief, Beliefs},
};

/// How many evaluators' claims and failures are remembered. Beyond that, all are forgotten.
const MAX_EVALUATORS: usize = 1 << 14;
/// The prior of reliability: this many valid answers, and one failure.
const PRIOR_ANSWERS: f32 = 19.0;
/// How many failures a mismatch with the card counts as, since it is no accident.
const MISMATCH_FAILURES: f32 = 5.0;
/// The worth that a task's allowance must buy at first.
const INITIAL_WORTH: f64 = 0.5;

/// Thompson sampling with a price of money. The [module](self::super) describes how it chooses.
pub struct Thompson {
    config: ThompsonConfig,
    beliefs: Beliefs,
    evaluators: HashMap<Address, Known>,
    /// The price of money λ, in worth per atomic unit.
    lambda: Option<f64>,
    rng: Xoshiro256PlusPlus,
    /// What was paid in all, and what was promised for exploration, in atomic units.
    spent: u64,
    explored: u64,
}

/// The estimate of an evaluator in a skill.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct Estimate {
    /// The expected worth D, from -1 to 1.
    pub worth: f64,
    /// The probability of a valid answer.
    pub reliability: f64,
}

/// What an evaluator claims, and how it answers the student.
#[derive(Clone, Copy, Debug, Default)]
struct Known {
    claims: SkillSet,
    answered: f32,
    failed: f32,
}

impl Known {
    /// Returns the probability of a valid answer.
    fn reliability(&self) -> f32 {
        (PRIOR_ANSWERS + self.answered) / (PRIOR_ANSWERS + 1.0 + self.answered + self.failed)
    }

    fn learn(&mut self, outcome: &CallOutcome, memory: f32) {
        let keep = 1.0 - 1.0 / memory.max(1.0);
        let (answered, failed) = match outcome {
            CallOutcome::Answered { .. } => (1.0, 0.0),
            CallOutcome::InvalidAnswer | CallOutcome::Timeout => (0.0, 1.0),
            _ => (0.0, MISMATCH_FAILURES),
        };
        (self.answered, self.failed) = (self.answered * keep + answered, self.failed * keep + failed);
    }
}

impl Thompson {
    /// Creates a selector that knows nothing yet. Its choices depend only on `seed` and on what it learns.
    pub fn new(config: ThompsonConfig, seed: u64) -> Self {
        Self {
            beliefs: Beliefs::new(config.clone()),
            evaluators: HashMap::new(),
            lambda: None,
            rng: Xoshiro256PlusPlus::seed_from_u64(seed),
            spent: 0,
            explored: 0,
            config,
        }
    }

    /// Creates a selector with the default configuration.
    pub fn seeded(seed: u64) -> Self {
        Self::new(ThompsonConfig::default(), seed)
    }

    /// Returns what is known of an evaluator in a skill, if anything is.
    pub fn estimate(&self, evaluator: Address, skill: Skill) -> Option<Estimate> {
        let known = self.evaluators.get(&evaluator);
        let is_known = known.is_some() || self.beliefs.knows(evaluator, skill);
        let known = known.copied().unwrap_or_default();
        let belief = is_known.then(|| self.beliefs.belief(evaluator, skill, known.claims.contains(skill)))?;
        Some(Estimate { worth: f64::from(belief.mean()), reliability: f64::from(known.reliability()) })
    }

    /// Returns the probability that the reports of this payer are genuine.
    pub fn trust(&self, payer: Address) -> f64 {
        f64::from(self.beliefs.trust(payer))
    }

    /// Notes what the evaluators of a market claim.
    fn meet(&mut self, market: &[Candidate]) {
        if self.evaluators.len() + market.len() > MAX_EVALUATORS {
            self.evaluators.clear();
        }
        for candidate in market {
            self.evaluators.entry(candidate.evaluator).or_default().claims = candidate.claims;
        }
    }

    /// Returns the candidates that are worth more than their price, the best first, if their worth is what `worth` says.
    fn ranked(
        &mut self,
        job: &Job,
        market: &[Candidate],
        worth: impl Fn(Belief, &mut Xoshiro256PlusPlus) -> f32,
    ) -> Vec<usize> {
        self.meet(market);
        let lambda = self.lambda(job);
        let mut ranked = Vec::new();
        for (position, candidate) in market.iter().enumerate() {
            let reliability = self.evaluators.get(&candidate.evaluator).copied().unwrap_or_default().reliability();
            // Worth is per output, and so is the price.
            let price = (lambda * candidate.price.atomic() as f64) as f32;
            let belief = self.beliefs.belief(candidate.evaluator, job.skill, candidate.claims.contains(job.skill));
            let gain = reliability * worth(belief, &mut self.rng) - price;
            ranked.extend((gain > 0.0).then_some((position, gain)));
        }
        ranked.sort_by(|(_, a), (_, b)| b.total_cmp(a));
        ranked.into_iter().map(|(position, _)| position).collect()
    }

    fn lambda(&mut self, job: &Job) -> f64 {
        *self.lambda.get_or_insert(INITIAL_WORTH / job.allowance())
    }

    /// Moves the price of money after a task.
    ///
    /// This is online mirror descent on the dual of "most worth within the budget": λ rises while more is spent than the allowance of a task,
    /// and falls while less is. It needs no scale for worth or prices, and follows a budget or a number of tasks that changes. Where a
    /// mixture of an expensive and a cheap evaluator is best, λ settles where both gain alike.
    fn pace(&mut self, job: &Job, cost: u64) {
        let allowance = job.allowance();
        let step = (self.config.pace * (cost as f64 / allowance - 1.0)).clamp(-0.5, 0.5);
        // Beyond these bounds no or every evaluator is hired, and λ would take long to come back.
        self.lambda = Some((self.lambda(job) * step.exp()).clamp(1e-3 / allowance, 1e2 / allowance));
    }
}

/// Returns what candidates cost together, in atomic units.
fn cost(job: &Job, market: &[Candidate], chosen: &[usize]) -> u64 {
    chosen.iter().filter_map(|position| job.cost(&market[*position])).map(Usdc::atomic).sum()
}

impl Selector for Thompson {
    fn select(&mut self, job: &Job, market: &[Candidate]) -> Vec<usize> {
        let ranked = self.ranked(job, market, |belief, _| belief.mean());
        let hired = job.hire(market, ranked);
        self.pace(job, cost(job, market, &hired));
        hired
    }

    fn explore(&mut self, job: &Job, market: &[Candidate]) -> Vec<usize> {
        // One draw for all candidates: it decides which reports are genuine.
        let doubt: f32 = self.rng.random();
        let ranked = self.ranked(job, market, |belief, rng| belief.draw(doubt, rng));
        // This never exceeds the share of what was spent and remains, which is the budget.
        let limit = self.config.exploration_share * (self.spent as f64 + 0.5 * job.remaining.atomic() as f64);
        let left = Usdc::from_atomic((limit as u64).saturating_sub(self.explored)).min(job.remaining);
        let within = Job { remaining: left, seats: self.config.explored_per_audit, ..*job };
        let explored = within.hire(market, ranked);
        self.explored += cost(job, market, &explored);
        explored
    }

    fn learn(&mut self, observation: &Observation) {
        let Observation { evaluator, skill, paid, outcome } = *observation;
        self.spent = self.spent.saturating_add(paid.atomic());
        if self.evaluators.len() < MAX_EVALUATORS || self.evaluators.contains_key(&evaluator) {
            self.evaluators.entry(evaluator).or_default().learn(&outcome, self.config.memory);
        }
        if let Some(pairs) = outcome.pairs() {
            self.learn_audit(evaluator, skill, pairs);
        }
    }

    fn learn_audit(&mut self, evaluator: Address, skill: Skill, pairs: Pairs) {
        self.beliefs.learn(evaluator, skill, pairs.comparisons());
    }

    fn learn_new_version(&mut self, evaluator: Address) {
        self.beliefs.halve(evaluator);
    }

    /// Learns a report, if it is of an audit. It counts as far as the payer agrees with the student's own audits.
    fn learn_report(&mut self, payer: Address, observation: &Observation) {
        if let Some(pairs) = observation.outcome.pairs() {
            self.beliefs.learn_report(observation.evaluator, observation.skill, pairs.comparisons(), payer);
        }
    }

    fn learn_exploration_cost(&mut self, paid: Usdc) {
        self.explored = self.explored.saturating_add(paid.atomic());
    }

    fn expected_worth(&self, evaluator: Address, skill: Skill) -> Option<f64> {
        self.estimate(evaluator, skill).map(|estimate| estimate.worth)
    }
}

tower_x402::debug_fields!(Thompson { config, spent });

#[cfg(test)]
mod tests {
    use alloy_primitives::B256;
    use proptest::prelude::*;

    use super::*;
    use crate::{
        evidence::{Evidence, EvidenceLog, EvidencePayment},
        selection::Skills,
    };

    fn skill() -> Skill {
        Skill::new(0).unwrap()
    }

    fn candidate(number: u8, price: u64) -> Candidate {
        let claims = SkillSet::from_iter([skill()]);
        Candidate { evaluator: Address::repeat_byte(number), claims, price: Usdc::from_atomic(price) }
    }

    fn job(remaining: u64, tasks_left: u64) -> Job {
        Job::new(skill(), Usdc::from_atomic(remaining), tasks_left)
    }

    fn pairs(is_right: bool) -> Option<Pairs> {
        Pairs::new(is_right.into(), (!is_right).into(), 1)
    }

    fn seen(candidate: &Candidate, pairs: Option<Pairs>) -> Observation {
        Observation {
            evaluator: candidate.evaluator,
            skill: skill(),
            paid: candidate.price,
            outcome: CallOutcome::answered(pairs),
        }
    }

    fn near(a: f64, b: f64) {
        assert!((a - b).abs() < 2e-3, "{a} is not {b}");
    }

    /// Forgets nothing.
    fn plain() -> Thompson {
        Thompson::new(ThompsonConfig { memory: 1e9, ..ThompsonConfig::default() }, 1)
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
            let market: Vec<_> = prices.iter().zip(0..).map(|(price, n)| candidate(n, *price)).collect();
            let (mut selector, mut left, mut on_exploration) = (Thompson::seeded(seed), budget, 0);
            for task in 0..100_u64 {
                let job = Job { outputs, seats, ..job(left, 100 - task) };
                let hired = selector.select(&job, &market);
                prop_assert!(hired.len() <= seats);
                let mut pay = |chosen: &[usize]| {
                    let cost = cost(&job, &market, chosen);
                    prop_assert!(cost <= left);
                    left -= cost;
                    for position in chosen {
                        selector.learn(&Observation { paid: job.cost(&market[*position]).unwrap(), ..seen(&market[*position], None) });
                    }
                    Ok(cost)
                };
                pay(&hired)?;
                if task % 5 == 0 {
                    let job = Job { remaining: Usdc::from_atomic(left), ..job };
                    let explored = selector.explore(&job, &market);
                    let spent = cost(&job, &market, &explored);
                    prop_assert!(spent <= left);
                    left -= spent;
                    on_exploration += spent;
                    for position in explored {
                        selector.learn(&Observation { paid: job.cost(&market[position]).unwrap(), ..seen(&market[position], None) });
                    }
                }
            }
            prop_assert!(on_exploration <= budget / 20, "{} of {}", on_exploration, budget);
        }
    }

    #[test]
    fn evaluator_that_orders_rightly_is_hired_and_coins_are_not() {
        let market = [candidate(1, 1_000), candidate(2, 1_000), candidate(3, 500)];
        let (mut selector, mut hired) = (Thompson::seeded(3), [0; 3]);
        for task in 0..400_u64 {
            let job = job(1_000 * (400 - task), 400 - task);
            let mut asked = selector.select(&job, &market);
            if task >= 300 {
                asked.iter().for_each(|position| hired[*position] += 1);
            }
            let is_audit = task.is_multiple_of(4);
            if is_audit {
                asked.extend(selector.explore(&job, &market));
            }
            for position in asked {
                let is_right = [task % 36 != 0, task % 8 < 4, task % 8 < 4][position];
                selector.learn(&seen(&market[position], pairs(is_right).filter(|_| is_audit)));
            }
        }
        assert!(hired[0] > 90 && hired[1] + hired[2] < 5, "{hired:?}");
        let worth = |number: usize| selector.expected_worth(market[number].evaluator, skill()).unwrap();
        assert!(worth(0) > worth(1) + 0.3);
    }

    #[test]
    fn no_evaluator_is_hired_if_none_is_worth_its_price() {
        let market = [candidate(1, 1_000)];
        let mut selector = Thompson::seeded(3);
        assert_eq!(selector.select(&job(1_000_000, 100), &market), [0]);
        (0..20).for_each(|_| selector.learn(&seen(&market[0], pairs(false))));
        assert!(selector.select(&job(1_000_000, 100), &market).is_empty());
    }

    #[test]
    fn student_without_money_hires_again_soon_after_it_has_some() {
        let market = [candidate(1, 100)];
        let mut selector = Thompson::seeded(1);
        (0..3).for_each(|_| assert!(selector.select(&job(0, 10), &market).is_empty()));
        assert!(selector.lambda.unwrap().is_finite());
        assert!((0..300).any(|_| !selector.select(&job(1_000_000, 1_000), &market).is_empty()));
    }

    #[test]
    fn evaluator_that_always_says_the_same_is_worth_nothing() {
        let market = [candidate(1, 1_000)];
        let mut selector = plain();
        (0..200).for_each(|_| selector.learn(&seen(&market[0], Pairs::of(&[0.9; 4], &[true, true, true, false]))));
        assert!(selector.expected_worth(market[0].evaluator, skill()).unwrap().abs() < 0.02);
    }

    #[test]
    fn comparisons_are_added_to_the_prior_of_the_claim() {
        let mut selector = plain();
        let market = [candidate(1, 1), Candidate { claims: SkillSet::default(), ..candidate(2, 1) }];
        selector.select(&job(1_000, 10), &market);
        let worth = |selector: &Thompson, number: usize| selector.expected_worth(market[number].evaluator, skill());
        near(worth(&selector, 0).unwrap(), 0.3);
        near(worth(&selector, 1).unwrap(), 0.1);
        for is_right in [true, true, false, true, true] {
            selector.learn(&seen(&market[0], pairs(is_right)));
        }
        near(worth(&selector, 0).unwrap(), (3.0 * 0.3 + 3.0) / 8.0);
    }

    #[test]
    fn late_audit_counts_as_one_that_came_with_the_answer() {
        let market = [candidate(1, 100)];
        let (mut late, mut at_once) = (plain(), plain());
        late.learn(&seen(&market[0], None));
        late.learn_audit(market[0].evaluator, skill(), pairs(true).unwrap());
        at_once.learn(&seen(&market[0], pairs(true)));
        assert_eq!(late.estimate(market[0].evaluator, skill()), at_once.estimate(market[0].evaluator, skill()));
    }

    #[test]
    fn failures_lower_reliability_and_mismatches_most() {
        let mut selector = plain();
        let market = [candidate(1, 100), candidate(2, 100), candidate(3, 100)];
        for (candidate, outcome) in
            market.iter().zip([CallOutcome::answered(None), CallOutcome::Timeout, CallOutcome::PriceMismatch])
        {
            selector.learn(&Observation { outcome, ..seen(candidate, None) });
        }
        let reliability = market.map(|candidate| selector.estimate(candidate.evaluator, skill()).unwrap().reliability);
        near(reliability[0], 20.0 / 21.0);
        near(reliability[1], 19.0 / 21.0);
        near(reliability[2], 19.0 / 25.0);
        assert_eq!(selector.select(&job(10_000, 10), &market), [0]);
    }

    #[test]
    fn payer_that_contradicts_own_audits_is_not_believed() {
        let (good, bad) = (candidate(1, 100), candidate(2, 100));
        let [honest, liar] = [101, 102].map(Address::repeat_byte);
        let mut selector = plain();
        for _ in 0..8 {
            selector.learn(&seen(&good, pairs(true)));
            for (payer, is_right) in [(honest, true), (liar, false)] {
                selector.learn_report(payer, &seen(&good, pairs(is_right)));
                selector.learn_report(payer, &seen(&bad, pairs(!is_right)));
            }
        }
        assert!(selector.trust(honest) > 0.6 && selector.trust(liar) < 0.01, "{}", selector.trust(liar));
        near(selector.trust(Address::repeat_byte(103)), 0.4);
        assert!(selector.expected_worth(bad.evaluator, skill()).unwrap() < -0.2);
    }

    #[test]
    fn payers_gain_no_more_weight_than_their_trust_by_repetition_or_by_number() {
        let of = |payers: u8, times: usize| {
            let mut selector = plain();
            for payer in 0..payers {
                let praise = seen(&candidate(1, 100), pairs(true));
                (0..times).for_each(|_| selector.learn_report(Address::repeat_byte(100 + payer), &praise));
            }
            selector.expected_worth(candidate(1, 100).evaluator, skill()).unwrap()
        };
        // The prior is 0.1, and a stranger is trusted by 0.4.
        for (payers, times) in [(1, 10), (1, 5_000), (60, 10), (60, 500)] {
            let worth = of(payers, times);
            assert!(worth < 0.1 + 0.4 * 0.9 + 1e-3, "{payers} payers, {times} times: {worth}");
        }
    }

    #[test]
    fn strangers_reports_make_the_student_forget_nothing() {
        let market = [candidate(1, 100)];
        let mut selector = Thompson::seeded(1);
        (0..20).for_each(|_| selector.learn(&seen(&market[0], pairs(true))));
        let before = selector.estimate(market[0].evaluator, skill()).unwrap();
        for stranger in 0..50 {
            (0..50).for_each(|_| {
                selector.learn_report(Address::repeat_byte(100 + stranger), &seen(&candidate(2, 1), pairs(true)))
            });
        }
        assert_eq!(selector.estimate(market[0].evaluator, skill()), Some(before));
    }

    #[test]
    fn evidence_fades_as_other_evidence_comes_in() {
        let mut selector = Thompson::seeded(1);
        let (old, new) = (candidate(1, 100), candidate(2, 100));
        (0..20).for_each(|_| selector.learn(&seen(&old, pairs(true))));
        (0..250).for_each(|_| selector.learn(&seen(&new, pairs(true))));
        // What came first has faded by the rest of the twenty, too.
        let kept = (0..20).map(|later| (-f64::from(250 + later) / 250.0).exp()).sum::<f64>();
        near(selector.expected_worth(old.evaluator, skill()).unwrap(), (3.0 * 0.1 + kept) / (3.0 + kept));
    }

    #[test]
    fn new_version_is_trusted_half_as_much_and_sheds_no_bad_name() {
        let (good, bad, other) = (candidate(1, 100), candidate(2, 100), candidate(3, 100));
        let mut selector = plain();
        for _ in 0..20 {
            selector.learn(&seen(&good, pairs(true)));
            selector.learn(&seen(&bad, pairs(false)));
            selector.learn(&seen(&other, pairs(true)));
        }
        let worth = |selector: &Thompson, of: &Candidate| selector.expected_worth(of.evaluator, skill()).unwrap();
        let before = [&good, &bad, &other].map(|of| worth(&selector, of));
        near(before[0], (3.0 * 0.1 + 20.0) / 23.0);
        [&good, &bad].iter().for_each(|of| selector.learn_new_version(of.evaluator));
        near(worth(&selector, &good), (3.0 * 0.1 + 10.0) / 13.0);
        assert_eq!([worth(&selector, &bad), worth(&selector, &other)], before[1..]);
    }

    #[test]
    fn restored_selector_has_the_same_estimates_and_grants_no_second_share_to_exploration() {
        let (me, other) = (Address::repeat_byte(100), Address::repeat_byte(101));
        let skills: Skills = ["prose"].into_iter().collect();
        let log = EvidenceLog::in_memory(1_000);
        let mut told = Thompson::seeded(1);
        for turn in 0..60_u8 {
            let by = if turn.is_multiple_of(3) { other } else { me };
            let observation = seen(&candidate(turn % 4, 100), pairs(turn.is_multiple_of(5)));
            if by == me {
                told.learn(&observation)
            } else {
                told.learn_report(by, &observation)
            }
            let evidence = Evidence::new(observation.evaluator, "prose", observation.paid, 100, observation.outcome);
            let payment = EvidencePayment { payer: by, nonce: B256::repeat_byte(turn) };
            log.record(evidence.with_payment(payment), 100).unwrap();
        }
        log.record_exploration_cost(Usdc::from_atomic(300)).unwrap();
        let mut rebuilt = Thompson::seeded(1);
        rebuilt.restore(&log, &[me], &skills);
        for number in 0..4 {
            let estimate = rebuilt.estimate(Address::repeat_byte(number), skill());
            assert!(estimate.is_some() && estimate == told.estimate(Address::repeat_byte(number), skill()));
        }
        assert_eq!(rebuilt.trust(other), told.trust(other));
        assert_eq!((rebuilt.spent, rebuilt.explored), (4_000, 300));
    }
}
