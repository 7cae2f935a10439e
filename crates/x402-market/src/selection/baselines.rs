//! Simple ways, to compare with.

use std::collections::HashMap;

use alloy_primitives::Address;
use rand::{SeedableRng, rngs::Xoshiro256PlusPlus, seq::SliceRandom};

use super::{CallOutcome, Candidate, Job, Observation, Panel, Selector, Skill};

/// How many pairs of evaluator and skill [`Greedy`] remembers: the first ones it sees.
const GREEDY_LIMIT: usize = 1 << 16;

/// Anyone who can be paid.
#[derive(Debug)]
pub struct Random(Xoshiro256PlusPlus);

/// Whoever asks for the least.
#[derive(Debug, Default)]
pub struct Cheapest;

/// Anyone whose card claims the skill.
#[derive(Debug)]
pub struct CardClaims(Xoshiro256PlusPlus);

/// Whoever was right most often so far, whatever it costs.
#[derive(Debug, Default)]
pub struct Greedy(HashMap<(Address, Skill), [f32; 2]>);

impl Random {
    /// Choices depend on `seed` alone.
    pub fn seeded(seed: u64) -> Self {
        Self(Xoshiro256PlusPlus::seed_from_u64(seed))
    }
}

impl CardClaims {
    /// Choices depend on `seed` alone.
    pub fn seeded(seed: u64) -> Self {
        Self(Xoshiro256PlusPlus::seed_from_u64(seed))
    }
}

/// Keeps as many of those hired, in order, as there are seats and money for.
fn seat(job: &Job, market: &[Candidate], panel: &mut Panel) {
    let (mut left, mut seats) = (job.remaining.atomic(), job.seats);
    panel.hired.retain(|position| {
        let rest = job.cost(&market[*position]).filter(|_| seats > 0).and_then(|cost| left.checked_sub(cost));
        if let Some(rest) = rest {
            (left, seats) = (rest, seats - 1);
        }
        rest.is_some()
    });
}

impl Selector for Random {
    fn select(&mut self, job: &Job, market: &[Candidate], panel: &mut Panel) {
        panel.clear();
        panel.hired.extend(0..market.len());
        panel.hired.shuffle(&mut self.0);
        seat(job, market, panel);
    }

    fn learn(&mut self, _: &Observation) {}
}

impl Selector for Cheapest {
    fn select(&mut self, job: &Job, market: &[Candidate], panel: &mut Panel) {
        panel.clear();
        panel.hired.extend(0..market.len());
        panel.hired.sort_unstable_by_key(|position| (market[*position].price, *position));
        seat(job, market, panel);
    }

    fn learn(&mut self, _: &Observation) {}
}

impl Selector for CardClaims {
    fn select(&mut self, job: &Job, market: &[Candidate], panel: &mut Panel) {
        panel.clear();
        panel.hired.extend((0..market.len()).filter(|position| market[*position].claims.contains(job.skill)));
        panel.hired.shuffle(&mut self.0);
        seat(job, market, panel);
    }

    fn learn(&mut self, _: &Observation) {}
}

impl Selector for Greedy {
    fn select(&mut self, job: &Job, market: &[Candidate], panel: &mut Panel) {
        let mean = |position: &usize| {
            let candidate = &market[*position];
            let expected = if candidate.claims.contains(job.skill) { 0.65 } else { 0.55 };
            let [right, wrong] = self.0.get(&(candidate.evaluator, job.skill)).copied().unwrap_or_default();
            (2.0 * expected + right) / (2.0 + right + wrong)
        };
        panel.clear();
        panel.hired.extend(0..market.len());
        panel.hired.sort_by(|a, b| mean(b).total_cmp(&mean(a)));
        seat(job, market, panel);
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
    fn each_hires_whom_its_name_says_and_never_for_more_than_there_is() {
        let market = market(&[500, 100, 300, 200]);
        let mut panel = Panel::default();
        Cheapest.select(&job(350, 3), &market, &mut panel);
        assert_eq!(panel.hired, [1, 3]);
        CardClaims::seeded(1).select(&job(1_000, 4), &market, &mut panel);
        panel.hired.sort_unstable();
        assert_eq!(panel.hired, [0, 2]);
        Random::seeded(1).select(&job(99, 4), &market, &mut panel);
        assert!(panel.hired.is_empty());

        let mut greedy = Greedy::default();
        for right in [true, true, true] {
            let outcome = CallOutcome::answered(1.0, None, Some(right));
            let skill = Skill::new(0).unwrap();
            greedy.learn(&Observation { evaluator: market[3].evaluator, skill, paid: Usdc::ZERO, at: 0, outcome });
        }
        greedy.select(&job(1_000, 1), &market, &mut panel);
        assert_eq!(panel.hired, [3]);
    }
}
