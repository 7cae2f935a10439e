//! Simple selectors, to compare with.

use rand::{SeedableRng, rngs::Xoshiro256PlusPlus, seq::SliceRandom};
use x402_market::selection::{Candidate, Job, Observation, Selector};

/// Hires evaluators at random: any, or those whose cards claim the skill.
#[derive(Debug)]
pub(crate) struct Random {
    rng: Xoshiro256PlusPlus,
    only_claimed: bool,
}

impl Random {
    /// Creates a selector of any evaluators. Its choices depend on `seed` alone.
    pub(crate) fn any(seed: u64) -> Self {
        Self { rng: Xoshiro256PlusPlus::seed_from_u64(seed), only_claimed: false }
    }

    /// Creates a selector of evaluators whose cards claim the skill.
    pub(crate) fn claimed(seed: u64) -> Self {
        Self { only_claimed: true, ..Self::any(seed) }
    }
}

impl Selector for Random {
    fn select(&mut self, job: &Job, market: &[Candidate]) -> Vec<usize> {
        let is_wanted = |position: &usize| !self.only_claimed || market[*position].claims.contains(job.skill);
        let mut order: Vec<_> = (0..market.len()).filter(is_wanted).collect();
        order.shuffle(&mut self.rng);
        job.hire(market, order)
    }

    fn learn(&mut self, _: &Observation) {}
}
