//! A random generator whose state can be saved.

use serde::{Deserialize, Serialize};

/// SplitMix64: good enough for sampling, not for secrets. Its state is one number.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Rng(u64);

impl Rng {
    pub(crate) const fn seeded(seed: u64) -> Self {
        Self(seed)
    }

    /// Creates a generator that depends on all of these numbers.
    pub(crate) fn of(numbers: &[u64]) -> Self {
        let mix = |before: Self, number: &u64| Self(Self(before.0 ^ number.wrapping_mul(0xd6e8_feb8_6659_fd93)).next());
        numbers.iter().fold(Self(0), mix)
    }

    pub(crate) const fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Returns a number in [0, 1).
    pub(crate) fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// Returns one of `least`, `least + step`, … up to `most`.
    pub(crate) fn among(&mut self, least: i64, most: i64, step: i64) -> i64 {
        let count = ((most - least) / step + 1).max(1) as u64;
        least + step * (self.next() % count) as i64
    }

    /// Returns one of the items.
    pub(crate) fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[(self.next() % from.len() as u64) as usize]
    }

    /// Returns a number below `limit`, which is above zero.
    pub(crate) fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit as u64) as usize
    }

    /// Returns a number with mean 0 and standard deviation 1 (Box and Muller).
    pub(crate) fn normal(&mut self) -> f64 {
        let (radius, angle) = (1.0 - self.unit(), self.unit());
        (-2.0 * radius.ln()).sqrt() * (std::f64::consts::TAU * angle).cos()
    }

    /// Returns the numbers below `count` in any order.
    pub(crate) fn shuffled(&mut self, count: usize) -> Vec<usize> {
        let mut order: Vec<_> = (0..count).collect();
        for last in (1..count).rev() {
            order.swap(last, self.below(last + 1));
        }
        order
    }
}
