//! The selector to use.

use std::{collections::VecDeque, fmt};

use alloy_primitives::Address;
use rand::{RngExt, SeedableRng, rngs::Xoshiro256PlusPlus};
use tower_x402::Usdc;

use super::{
    CallOutcome, Candidate, Choice, Job, Observation, Panel, Selector, Skill, Skills, ThompsonConfig,
    allowance::Allowance, beliefs::Beliefs, pacing::Pacer,
};
use crate::evidence::{Evidence, EvidenceLog};

/// How many choices that are not settled are kept in mind; the oldest beyond that are taken as paid.
const OPEN: usize = 1_024;

/// Thompson sampling with a price of money; how it thinks is told [here](self::super).
pub struct Thompson {
    config: ThompsonConfig,
    beliefs: Beliefs,
    pacer: Pacer,
    rng: Xoshiro256PlusPlus,
    /// When it began; who came later is a newcomer.
    began: Option<u64>,
    /// Atomic units since it was made, those promised included.
    spent: u64,
    newcomers: Allowance,
    examinations: Allowance,
    /// Chosen and not settled yet.
    open: VecDeque<Promise>,
    /// Kept between choices for their memory.
    numbers: Vec<u32>,
    worthwhile: Vec<Offer>,
}

/// Someone who is worth the price, by expectation or by the draw.
#[derive(Clone, Copy, Debug)]
struct Offer {
    position: u32,
    cost: u64,
    newcomer: bool,
    expected: f32,
    drawn: f32,
}

/// What a choice may cost, and whose money it is.
#[derive(Clone, Copy, Debug)]
struct Promise {
    choice: Choice,
    newcomer: bool,
}

/// What is believed of an evaluator in a skill.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct Estimate {
    /// The expected probability that a verdict is right.
    pub accuracy: f64,
    /// The probability of an answer that is one.
    pub reliability: f64,
    /// By how much its stated confidence is worse, in mean Brier score, than knowing how often it is right; negative if better.
    pub overconfidence: f64,
    /// How many verdicts of it were seen in all skills: faded, those of others weighted by trust.
    pub verdicts: f64,
}

impl Thompson {
    /// A selector that knows nothing yet. Its choices depend on `seed` and on what it is told alone.
    pub fn new(config: ThompsonConfig, seed: u64) -> Self {
        let config = config.sound();
        Self {
            beliefs: Beliefs::new(config.clone()),
            pacer: Pacer::new(config.pace),
            rng: Xoshiro256PlusPlus::seed_from_u64(seed),
            began: None,
            spent: 0,
            newcomers: Allowance::new(config.newcomers, 0.05),
            examinations: Allowance::new(config.examinations, 0.5),
            open: VecDeque::new(),
            numbers: Vec::new(),
            worthwhile: Vec::new(),
            config,
        }
    }

    /// The same with the usual configuration.
    pub fn seeded(seed: u64) -> Self {
        Self::new(ThompsonConfig::default(), seed)
    }

    /// Takes in what another payer says it observed. Only verdicts whose truth it claims to know count, and only as far as it
    /// agrees with one's own.
    ///
    /// That it paid for them must have been checked before.
    pub fn learn_report(&mut self, payer: Address, observation: &Observation) {
        if let CallOutcome::Answered { right: Some(right), .. } = observation.outcome {
            self.beliefs.hear(observation.evaluator, observation.skill, right, payer);
        }
    }

    /// Takes in a whole log, where `own` are the addresses one pays from. What newcomers and examinations have cost before counts
    /// towards what they may cost, as far as it is in the log.
    pub fn restore(&mut self, log: &EvidenceLog, own: &[Address], skills: &Skills) {
        let is_own = |evidence: &Evidence| evidence.payment.is_none_or(|payment| own.contains(&payment.payer));
        let mut began: Option<u64> = None;
        log.for_each(|evidence| {
            if is_own(evidence) && skills.get(&evidence.skill).is_some() {
                began = Some(began.map_or(evidence.at, |began| began.min(evidence.at)));
            }
        });
        self.began = [self.began, began].into_iter().flatten().min();
        let (sightings, began) = (log.first_seen_times(), self.began);
        log.for_each(|evidence| {
            let Some(skill) = skills.get(&evidence.skill) else { return };
            let observation = evidence.observation(skill);
            match &evidence.payment {
                Some(payment) if !is_own(evidence) => self.learn_report(payment.payer, &observation),
                _ => {
                    let first_seen = sightings.get(&evidence.evaluator).copied();
                    let known =
                        self.beliefs.number(evidence.evaluator).map_or(0.0, |number| self.beliefs.audited(number));
                    if first_seen > began && known < self.config.acquaintance {
                        self.newcomers.take(evidence.paid.atomic());
                    }
                    self.spent = self.spent.saturating_add(evidence.paid.atomic());
                    self.beliefs.learn(observation.evaluator, skill, &observation.outcome);
                }
            }
        });
        self.examinations.take(log.exploration_cost().atomic());
    }

    /// What is believed of an evaluator, if anything was heard or seen of it.
    pub fn estimate(&self, evaluator: Address, skill: Skill) -> Option<Estimate> {
        let number = self.beliefs.number(evaluator)?;
        let conduct = self.beliefs.conduct(number);
        Some(Estimate {
            accuracy: f64::from(self.beliefs.mean(number, skill)),
            reliability: f64::from(conduct.reliability()),
            overconfidence: f64::from(conduct.overconfidence()),
            verdicts: f64::from(self.beliefs.seen(number)),
        })
    }

    /// The parameters of the two posteriors of an accuracy, without and with what others say, and the probability that the second
    /// is the one to go by.
    pub(crate) fn posteriors(&self, evaluator: Address, skill: Skill) -> Option<([[f64; 2]; 2], f64)> {
        let number = self.beliefs.number(evaluator)?;
        let of = |pooled| {
            let beta = self.beliefs.posterior(number, skill, pooled);
            [f64::from(beta.alpha), f64::from(beta.beta)]
        };
        Some(([of(false), of(true)], f64::from(self.beliefs.trusted(number, skill))))
    }

    /// The probability that what this payer says is genuine.
    pub fn trust(&self, payer: Address) -> f64 {
        f64::from(self.beliefs.trust_in(&payer))
    }

    /// Bytes of memory it holds, by the capacity of all its parts.
    pub fn state_bytes(&self) -> usize {
        size_of::<Self>() - size_of::<Beliefs>()
            + self.beliefs.bytes()
            + self.numbers.capacity() * size_of::<u32>()
            + self.worthwhile.capacity() * size_of::<Offer>()
            + self.open.capacity() * size_of::<Promise>()
    }

    /// Lists those who are worth their price, by expectation or by the draw.
    fn weigh(&mut self, job: &Job, market: &[Candidate], lambda: f64) {
        let began = *self.began.get_or_insert(job.now);
        let decoy = !job.audit && self.rng.random_bool(self.config.decoys);
        // One doubt for all: in this world, who is trusted less than that is not heard.
        let doubt: f32 = self.rng.random();
        self.worthwhile.clear();
        for ((position, candidate), number) in market.iter().enumerate().zip(&self.numbers) {
            let number = *number as usize;
            let Some(cost) = job.cost(candidate) else { continue };
            let conduct = self.beliefs.conduct(number);
            let (reliability, penalty) = (conduct.reliability(), self.config.calibration * conduct.overconfidence());
            // Values are per output, and so is the price.
            let price = (lambda * candidate.price.atomic() as f64) as f32 + penalty;
            let score = |accuracy: f32| reliability * (2.0 * accuracy - 1.0) - price;
            // Not even perfection would be worth it.
            if score(1.0) <= 0.0 {
                continue;
            }
            let drawn = if job.audit || decoy {
                let pooled = doubt < self.beliefs.trusted(number, job.skill);
                score(self.beliefs.posterior(number, job.skill, pooled).draw(&mut self.rng))
            } else {
                0.0
            };
            let expected = if decoy { drawn } else { score(self.beliefs.mean(number, job.skill)) };
            if expected > 0.0 || drawn > 0.0 {
                let newcomer = candidate.first_seen > began && self.beliefs.audited(number) < self.config.acquaintance;
                self.worthwhile.push(Offer { position: position as u32, cost, newcomer, expected, drawn });
            }
        }
    }

    /// Takes the best of those listed for whom there is money, and removes it from the list.
    fn take(&mut self, market: &[Candidate], left: u64, examined: bool) -> Option<usize> {
        let granted = |offer: &Offer| {
            offer.cost <= left
                && (!offer.newcomer || self.newcomers.grants(offer.cost, self.spent, left))
                && (!examined || self.examinations.grants(offer.cost, self.spent, left))
        };
        let (mut best, mut most) = (None, 0.0);
        for (at, offer) in self.worthwhile.iter().enumerate() {
            let score = if examined { offer.drawn } else { offer.expected };
            if score > most && granted(offer) {
                (best, most) = (Some(at), score);
            }
        }
        let Offer { position, cost, newcomer, .. } = self.worthwhile.swap_remove(best?);
        let position = position as usize;
        let choice = Choice { evaluator: market[position].evaluator, promised: Usdc::from_atomic(cost), examined };
        self.promise(Promise { choice, newcomer });
        Some(position)
    }

    fn promise(&mut self, promise: Promise) {
        let cost = promise.choice.promised.atomic();
        self.spent = self.spent.saturating_add(cost);
        if promise.newcomer {
            self.newcomers.take(cost);
        }
        if promise.choice.examined {
            self.examinations.take(cost);
        }
        if self.open.len() == OPEN {
            self.open.pop_front();
        }
        self.open.push_back(promise);
    }
}

impl Selector for Thompson {
    fn select(&mut self, job: &Job, market: &[Candidate], panel: &mut Panel) {
        panel.clear();
        let market = &market[..market.len().min(self.config.evaluators)];
        let mut numbers = std::mem::take(&mut self.numbers);
        self.beliefs.look(market, &mut numbers);
        self.numbers = numbers;
        let allowance = job.allowance();
        let lambda = self.pacer.lambda(allowance);
        self.weigh(job, market, lambda);
        let before = self.spent;
        let left = |this: &Self| job.remaining.atomic() - (this.spent - before);
        while panel.hired.len() < job.seats
            && let Some(position) = self.take(market, left(self), false)
        {
            panel.hired.push(position);
        }
        // What is spent on learning is no reason to hire someone cheaper now: it has its own allowance.
        self.pacer.spent(self.spent - before, allowance);
        while job.audit
            && panel.examined.len() < self.config.examinees
            && let Some(position) = self.take(market, left(self), true)
        {
            panel.examined.push(position);
        }
    }

    fn learn(&mut self, observation: &Observation) {
        self.beliefs.learn(observation.evaluator, observation.skill, &observation.outcome);
    }

    /// Gives back what was promised and not paid.
    fn record_cost(&mut self, choice: &Choice, paid: Usdc) {
        let Some(at) = self.open.iter().position(|promise| promise.choice == *choice) else { return };
        let Some(promise) = self.open.remove(at) else { return };
        let unpaid = choice.promised.atomic().saturating_sub(paid.atomic());
        self.spent = self.spent.saturating_sub(unpaid);
        if promise.newcomer {
            self.newcomers.give_back(unpaid);
        }
        if choice.examined {
            self.examinations.give_back(unpaid);
        }
    }

    fn learn_report(&mut self, payer: Address, observation: &Observation) {
        Self::learn_report(self, payer, observation);
    }

    fn restore(&mut self, log: &EvidenceLog, own: &[Address], skills: &Skills) {
        Self::restore(self, log, own, skills);
    }

    fn expected_accuracy(&self, evaluator: Address, skill: Skill) -> Option<f64> {
        self.estimate(evaluator, skill).map(|estimate| estimate.accuracy)
    }
}

impl fmt::Debug for Thompson {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Thompson").field("config", &self.config).field("spent", &self.spent).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{evidence::PaymentId, selection::SkillSet};

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
        fn a_budget_is_never_overspent_by_one_unit(
            prices in prop::collection::vec(0_u64..5_000, 1..12),
            budget in 0_u64..200_000,
            outputs in 1_u32..4,
            seats in 0_usize..4,
            seed: u64,
        ) {
            let market: Vec<_> = prices.iter().zip(0..).map(|(price, n)| candidate(n, *price, 0)).collect();
            let (mut selector, mut panel, mut left) = (Thompson::seeded(seed), Panel::default(), budget);
            for task in 0..100_u64 {
                let job = Job { outputs, seats, audit: task % 5 == 0, ..job(left, 100 - task) };
                selector.select(&job, &market, &mut panel);
                prop_assert!(panel.hired.len() <= seats);
                prop_assert!(job.audit || panel.examined.is_empty());
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
    fn whoever_is_right_is_hired_and_a_coin_is_not() {
        let market = [candidate(1, 1_000, 0), candidate(2, 1_000, 0), candidate(3, 500, 0)];
        let (mut selector, mut panel, mut hired) = (Thompson::seeded(3), Panel::default(), [0; 3]);
        for task in 0..400_u64 {
            let job = Job { audit: task.is_multiple_of(4), ..job(1_000 * (400 - task), 400 - task) };
            selector.select(&job, &market, &mut panel);
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
    fn nobody_is_hired_if_none_is_worth_it() {
        let market = [candidate(1, 1_000, 0)];
        let (mut selector, mut panel) = (Thompson::seeded(3), Panel::default());
        selector.select(&job(1_000_000, 100), &market, &mut panel);
        assert_eq!(panel.hired, [0]);
        for _ in 0..20 {
            selector.learn(&report(&market[0], Some(false)));
        }
        selector.select(&job(1_000_000, 100), &market, &mut panel);
        assert!(panel.hired.is_empty());
    }

    #[test]
    fn newcomers_together_cost_at_most_their_share() {
        let budget = 100_000_u64;
        let (mut left, mut on_newcomers) = (budget, 0);
        let (mut selector, mut panel) = (Thompson::seeded(5), Panel::default());
        let dear = candidate(0, 100_000_000, 0);
        selector.select(&job(left, 500), &[dear], &mut panel);
        // Each takes another name as soon as it was hired, and would be a bargain.
        for task in 0..500_u64 {
            let name = (task % 250) as u8 + 1;
            let market = [dear, candidate(name, 100, 200 + task)];
            let job = Job { audit: task % 10 == 0, ..job(left, 500 - task) };
            selector.select(&job, &market, &mut panel);
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
    fn praise_that_can_be_bought_makes_nobody_an_acquaintance() {
        let budget = 100_000_u64;
        let (mut left, mut on_newcomer) = (budget, 0);
        let (mut selector, mut panel) = (Thompson::seeded(5), Panel::default());
        let market = [candidate(0, 100_000_000, 0), candidate(1, 100, 200)];
        selector.select(&job(left, 500), &market[..1], &mut panel);
        for sham in 0..20 {
            (0..10)
                .for_each(|_| selector.learn_report(Address::repeat_byte(100 + sham), &report(&market[1], Some(true))));
        }
        assert!(selector.estimate(market[1].evaluator, skill()).unwrap().verdicts > 5.0);
        for task in 0..500_u64 {
            selector.select(&job(left, 500 - task), &market, &mut panel);
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
    fn a_market_larger_than_the_memory_is_looked_at_in_part() {
        let config = ThompsonConfig { evaluators: 3, ..ThompsonConfig::default() };
        let (mut selector, mut panel) = (Thompson::new(config, 1), Panel::default());
        let market: Vec<_> = (1..9).map(|number| candidate(number, 100, 0)).collect();
        for _ in 0..20 {
            selector.select(&Job { seats: 8, ..job(1_000_000, 100) }, &market, &mut panel);
            assert!(panel.hired.iter().all(|position| *position < 3));
        }
        assert!(selector.estimate(market[0].evaluator, skill()).is_some());
        assert!(selector.estimate(market[7].evaluator, skill()).is_none());
    }

    #[test]
    fn what_was_promised_and_not_paid_is_given_back() {
        let mut selector = Thompson::seeded(1);
        let (market, mut panel) = ([candidate(1, 100, 0)], Panel::default());
        selector.select(&job(100_000, 100), &market, &mut panel);
        assert_eq!((panel.hired.len(), selector.spent), (1, 100));
        selector.learn(&Observation {
            paid: Usdc::ZERO,
            outcome: CallOutcome::PriceMismatch,
            ..report(&market[0], None)
        });
        let choice = Choice { evaluator: market[0].evaluator, promised: market[0].price, examined: false };
        selector.record_cost(&Choice { examined: true, ..choice }, Usdc::ZERO);
        assert_eq!(selector.spent, 100, "that one was not made");
        selector.record_cost(&choice, Usdc::ZERO);
        assert_eq!((selector.spent, selector.open.len()), (0, 0));
        assert!(selector.estimate(market[0].evaluator, skill()).unwrap().reliability < 0.8);
    }

    #[test]
    fn what_one_choice_has_not_cost_is_not_given_back_for_another() {
        let mut selector = Thompson::seeded(1);
        let dear = candidate(0, 100_000_000, 0);
        selector.select(&job(1_000_000, 100), &[dear], &mut Panel::default());
        let (market, mut panel) = ([candidate(1, 100, 200)], Panel::default());
        let jobs = [1, 9].map(|outputs| Job { outputs, ..job(1_000_000, 100) });
        let mut made = Vec::new();
        for job in &jobs {
            selector.select(job, &market, &mut panel);
            made.extend(panel.choices(job, &market));
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
    fn a_selector_rebuilt_from_the_log_believes_what_it_believed() {
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
                payment: Some(PaymentId { payer: by, nonce: alloy_primitives::B256::repeat_byte(turn) }),
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
    fn a_selector_rebuilt_from_the_log_does_not_grant_strangers_and_examinations_a_second_share() {
        let log = EvidenceLog::in_memory(1_000);
        let me = Address::repeat_byte(100);
        let (old, stranger) = (candidate(1, 100, 50), candidate(2, 100, 200));
        log.first_seen(old.evaluator, old.first_seen).unwrap();
        log.first_seen(stranger.evaluator, stranger.first_seen).unwrap();
        for (turn, of) in [old, old, stranger, old, stranger].into_iter().enumerate() {
            let nonce = alloy_primitives::B256::repeat_byte(turn as u8);
            let evidence = Evidence {
                payment: Some(PaymentId { payer: me, nonce }),
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
        assert!(!rebuilt.examinations.grants(1, 1_990, 10) && rebuilt.examinations.grants(1, 7_000, 0));
    }

    #[test]
    fn a_thousand_evaluators_in_twenty_skills_fit_into_a_mebibyte() {
        let evaluator = |number: u64| Address::left_padding_from(&number.to_be_bytes());
        let market: Vec<_> = (0..1_000).map(|n| Candidate { evaluator: evaluator(n), ..candidate(0, 1, 0) }).collect();
        let (mut selector, mut panel) = (Thompson::seeded(1), Panel::default());
        for turn in 0..9_000_u64 {
            let observation = Observation {
                evaluator: evaluator(turn / 20 % 100),
                skill: Skill::new(turn as usize % 20).unwrap(),
                ..report(&candidate(0, 1, 0), Some(true))
            };
            selector.learn_report(evaluator(10_000 + turn % 1_200), &observation);
        }
        for number in 0..20 {
            let observation = Observation { skill: Skill::new(number).unwrap(), ..report(&market[0], Some(true)) };
            selector.learn(&observation);
        }
        let full = Job { audit: true, seats: 5, ..job(1_000_000, 1_000) };
        (0..300).for_each(|_| selector.select(&full, &market, &mut panel));
        let bytes = selector.state_bytes();
        assert!((500_000..1 << 20).contains(&bytes), "{bytes}");
    }
}
