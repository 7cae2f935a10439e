//! Simple selectors, as baselines to compare with.

use std::collections::HashMap;

use alloy_primitives::Address;
use rand::{SeedableRng, rngs::Xoshiro256PlusPlus, seq::SliceRandom};

use super::{CallOutcome, Candidate, Job, Observation, Panel, Selector, Skill};

/// The number of pairs of evaluator and skill that [`Greedy`] remembers: the first ones it sees.
const GREEDY_LIMIT: usize = 1 << 16;

/// Hires evaluators at random.
#[derive(Debug)]
pub struct Random(Xoshiro256PlusPlus);

/// Hires the cheapest evaluators.
#[derive(Debug, Default)]
pub struct Cheapest;

/// Hires evaluators whose cards claim the skill, at random.
#[derive(Debug)]
pub struct CardClaims(Xoshiro256PlusPlus);

/// Hires the evaluators that were right most often so far, at any price.
#[derive(Debug, Default)]
pub struct Greedy(HashMap<(Address, Skill), [f32; 2]>);

impl Random {
    /// Creates a selector whose choices depend on `seed` alone.
    pub fn seeded(seed: u64) -> Self {
        Self(Xoshiro256PlusPlus::seed_from_u64(seed))
    }
}

impl CardClaims {
    /// Creates a selector whose choices depend on `seed` alone.
    pub fn seeded(seed: u64) -> Self {
        Self(Xoshiro256PlusPlus::seed_from_u64(seed))
    }
}

/// Hires as many of these candidates, in order, as there are seats and money for.
fn hire(job: &Job, market: &[Candidate], mut hired: Vec<usize>) -> Panel {
    let (mut left, mut seats) = (job.remaining.atomic(), job.seats);
    hired.retain(|position| {
        let rest = job.cost(&market[*position]).filter(|_| seats > 0).and_then(|cost| left.checked_sub(cost));
        if let Some(rest) = rest {
            (left, seats) = (rest, seats - 1);
        }
        rest.is_some()
    });
    Panel { hired, explored: Vec::new() }
}

impl Selector for Random {
    fn select(&mut self, job: &Job, market: &[Candidate]) -> Panel {
        let mut order: Vec<_> = (0..market.len()).collect();
        order.shuffle(&mut self.0);
        hire(job, market, order)
    }

    fn learn(&mut self, _: &Observation) {}
}

impl Selector for Cheapest {
    fn select(&mut self, job: &Job, market: &[Candidate]) -> Panel {
        let mut order: Vec<_> = (0..market.len()).collect();
        order.sort_unstable_by_key(|position| (market[*position].price, *position));
        hire(job, market, order)
    }

    fn learn(&mut self, _: &Observation) {}
}

impl Selector for CardClaims {
    fn select(&mut self, job: &Job, market: &[Candidate]) -> Panel {
        let mut order: Vec<_> =
            (0..market.len()).filter(|position| market[*position].claims.contains(job.skill)).collect();
        order.shuffle(&mut self.0);
        hire(job, market, order)
    }

    fn learn(&mut self, _: &Observation) {}
}

impl Selector for Greedy {
    fn select(&mut self, job: &Job, market: &[Candidate]) -> Panel {
        let mean = |position: &usize| {
            let candidate = &market[*position];
            let expected = if candidate.claims.contains(job.skill) { 0.65 } else { 0.55 };
            let [right, wrong] = self.0.get(&(candidate.evaluator, job.skill)).copied().unwrap_or_default();
            (2.0 * expected + right) / (2.0 + right + wrong)
        };
        let mut order: Vec<_> = (0..market.len()).collect();
        order.sort_by(|a, b| mean(b).total_cmp(&mean(a)));
        hire(job, market, order)
    }

    fn learn(&mut self, observation: &Observation) {
        let CallOutcome::Answered { right: Some(right), .. } = observation.outcome else { return };
        let key = (observation.evaluator, observation.skill);
        if self.0.len() < GREEDY_LIMIT || self.0.contains_key(&key) {
            self.0.entry(key).or_default()[usize::from(!right)] += 1.0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::selection::SkillSet;
    use tower_x402::Usdc;

    fn market(prices: &[u64]) -> Vec<Candidate> {
        let skill = Skill::new(0).unwrap();
        let candidate = |(number, price): (usize, &u64)| Candidate {
            evaluator: Address::repeat_byte(number as u8),
            claims: if number % 2 == 0 { SkillSet::from_iter([skill]) } else { SkillSet::default() },
            price: Usdc::from_atomic(*price),
            first_seen: 0,
        };
        prices.iter().enumerate().map(candidate).collect()
    }

    fn job(remaining: u64, seats: usize) -> Job {
        Job { seats, ..Job::new(Skill::new(0).unwrap(), Usdc::from_atomic(remaining), 1) }
    }

    #[test]
    fn baselines_hire_by_their_rule_within_the_budget() {
        let market = market(&[500, 100, 300, 200]);
        let panel = Cheapest.select(&job(350, 3), &market);
        assert_eq!(panel.hired, [1, 3]);
        let mut panel = CardClaims::seeded(1).select(&job(1_000, 4), &market);
        panel.hired.sort_unstable();
        assert_eq!(panel.hired, [0, 2]);
        let panel = Random::seeded(1).select(&job(99, 4), &market);
        assert!(panel.hired.is_empty());

        let mut greedy = Greedy::default();
        for right in [true, true, true] {
            let outcome = CallOutcome::answered(1.0, None, Some(right));
            let skill = Skill::new(0).unwrap();
            greedy.learn(&Observation { evaluator: market[3].evaluator, skill, paid: Usdc::ZERO, at: 0, outcome });
        }
        let panel = greedy.select(&job(1_000, 1), &market);
        assert_eq!(panel.hired, [3]);
    }
}
