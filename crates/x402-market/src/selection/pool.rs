//! What others saw, and how far they are believed.

use std::collections::HashMap;

use alloy_primitives::Address;

use super::{
    beta::ln_beta,
    book::{grow, table_bytes},
};

/// Counts of verdicts, faded.
pub(super) type Counts = [f32; 2];

/// One payer's evidence on one cell.
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

/// The evidence of other payers, cell by cell (a cell is an evaluator in a skill).
///
/// A payer is trusted with the probability that it is honest: that its verdicts and one's own were drawn with the same
/// accuracies, against the alternative that they have nothing to do with each other. Each cell on which both have
/// evidence contributes the Bayes factor of the two beta-binomial models. So one's own audits alone give trust; one that
/// contradicts five hundred praises takes it away.
///
/// Counts are in stored units; times `scale` they are verdicts.
#[derive(Clone, Debug)]
pub(super) struct Pool {
    config: PoolConfig,
    /// By cell, then payer.
    entries: Vec<Entry>,
    payers: Vec<Payer>,
    numbers: HashMap<Address, u16>,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct PoolConfig {
    /// How many entries and payers are kept.
    pub(super) entries: usize,
    pub(super) payers: usize,
    /// The trust in a payer of whom nothing is known.
    pub(super) trust: f32,
    /// The most that one payer's word counts on one cell, in verdicts.
    pub(super) voice: f32,
}

impl Pool {
    pub(super) fn new(config: PoolConfig) -> Self {
        Self { config, entries: Vec::new(), payers: Vec::new(), numbers: HashMap::new() }
    }

    /// The number of a payer, which may take the place of the one that is trusted least.
    pub(super) fn payer(&mut self, address: Address) -> u16 {
        if let Some(payer) = self.numbers.get(&address) {
            return *payer;
        }
        let new = Payer { address, log_odds: self.prior() };
        let payer = if self.payers.len() < self.config.payers {
            grow(&mut self.payers, self.config.payers);
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

    /// The probability that this payer's evidence is genuine.
    pub(super) fn trust(&self, payer: u16) -> f32 {
        probability(self.payers.get(usize::from(payer)).map_or_else(|| self.prior(), |payer| payer.log_odds))
    }

    /// How much a payer may make one forget, from 0 to 1: as it is trusted, once agreement with one's own audits has earned that. Else a
    /// crowd of strangers, each trusted a little, would wipe out what one has seen oneself.
    pub(super) fn earned(&self, payer: u16) -> f32 {
        let odds = self.payers.get(usize::from(payer)).map_or_else(|| self.prior(), |payer| payer.log_odds);
        probability(odds) * (odds - self.prior()).clamp(0.0, 1.0)
    }

    pub(super) fn trust_in(&self, address: &Address) -> f32 {
        self.numbers.get(address).map_or(self.config.trust, |payer| self.trust(*payer))
    }

    /// The trust in the most trusted of all.
    pub(super) fn most(&self) -> f32 {
        self.payers.iter().map(|payer| probability(payer.log_odds)).fold(0.0, f32::max)
    }

    fn prior(&self) -> f32 {
        (self.config.trust / (1.0 - self.config.trust)).ln()
    }

    fn range(&self, cell: u32) -> std::ops::Range<usize> {
        let start = self.entries.partition_point(|entry| entry.cell < cell);
        let length = self.entries[start..].partition_point(|entry| entry.cell == cell);
        start..start + length
    }

    /// Fades the evidence on one cell.
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

    /// Adds evidence; if there is too much, the least on record makes room: first of what nothing speaks for or against, so that a crowd
    /// of strangers displaces neither the voices that earned trust nor the grounds on which others lost it.
    pub(super) fn add(&mut self, cell: u32, payer: u16, right: bool, amount: f32) {
        let place = |entry: &Entry| (entry.cell, entry.payer);
        let at = match self.entries.binary_search_by_key(&(cell, payer), place) {
            Ok(at) => at,
            Err(mut at) => {
                if self.entries.len() >= self.config.entries {
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
                grow(&mut self.entries, self.config.entries);
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

    /// Compares a cell with one's own evidence on it; `scale` makes counts of what is stored.
    pub(super) fn weigh(&mut self, cell: u32, own: Counts, scale: f32) {
        for at in self.range(cell) {
            let entry = self.entries[at];
            let term = agreement(own.map(|count| count * scale), entry.counts.map(|count| count * scale));
            self.payers[usize::from(entry.payer)].log_odds += term - entry.term;
            self.entries[at].term = term;
        }
    }

    /// What is said about a cell, in stored units, with the trust in the most trusted of those who say it; the others count
    /// as much less as they are trusted less.
    pub(super) fn sum(&self, cell: u32, scale: f32) -> (Counts, f32) {
        self.consensus(&self.entries[self.range(cell)], scale)
    }

    /// Calls `with` for every cell with what all say about it.
    pub(super) fn sums(&self, scale: f32, mut with: impl FnMut(u32, (Counts, f32))) {
        for cell in self.entries.chunk_by(|a, b| a.cell == b.cell) {
            with(cell[0].cell, self.consensus(cell, scale));
        }
    }

    fn consensus(&self, entries: &[Entry], scale: f32) -> (Counts, f32) {
        let (mut sum, mut most) = ([0.0; 2], 0.0_f32);
        for entry in entries {
            let said = total(entry.counts) * scale;
            let trust = self.trust(entry.payer);
            let weight = trust * (self.config.voice / said.max(f32::MIN_POSITIVE)).min(1.0);
            sum = [sum[0] + weight * entry.counts[0], sum[1] + weight * entry.counts[1]];
            most = most.max(trust);
        }
        (if most > 0.0 { sum.map(|count| count / most) } else { sum }, most)
    }

    /// Bytes of memory, by capacity.
    pub(super) fn bytes(&self) -> usize {
        self.entries.capacity() * size_of::<Entry>()
            + self.payers.capacity() * size_of::<Payer>()
            + table_bytes::<(Address, u16)>(self.numbers.capacity())
    }
}

fn total(counts: Counts) -> f32 {
    counts[0] + counts[1]
}

fn probability(log_odds: f32) -> f32 {
    1.0 / (1.0 + (-log_odds).exp())
}

/// The logarithm of the Bayes factor of "drawn with one accuracy" over "drawn with two", both uniform beforehand.
fn agreement(own: Counts, theirs: Counts) -> f32 {
    if total(own) == 0.0 || total(theirs) == 0.0 {
        return 0.0;
    }
    let ln = |right: f32, wrong: f32| ln_beta(1.0 + f64::from(right), 1.0 + f64::from(wrong));
    (ln(own[0] + theirs[0], own[1] + theirs[1]) - ln(own[0], own[1]) - ln(theirs[0], theirs[1])) as f32
}

#[cfg(test)]
mod tests {
    use super::*;

    const CONFIG: PoolConfig = PoolConfig { entries: 100, payers: 10, trust: 0.5, voice: 10.0 };

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
    fn one_audit_of_ones_own_outweighs_any_number_of_praises() {
        let mut pool = Pool::new(CONFIG);
        for friend in 0..10 {
            let friend = pool.payer(payer(friend));
            (0..500).for_each(|_| pool.add(0, friend, true, 1.0));
        }
        pool.weigh(0, [0.0, 1.0], 1.0);
        let (_, trust) = pool.sum(0, 1.0);
        assert!(trust < 0.01, "{trust}");
    }

    #[test]
    fn a_choir_is_believed_no_more_than_its_best_member() {
        let mut pool = Pool::new(CONFIG);
        let mut heard = Vec::new();
        for friend in 0..10 {
            let friend = pool.payer(payer(friend));
            pool.add(0, friend, true, 5.0);
            heard.push(pool.sum(0, 1.0));
        }
        assert!(heard.iter().all(|(_, trust)| *trust == 0.5));
        assert_eq!((heard[0].0, heard[9].0), ([5.0, 0.0], [50.0, 0.0]));
    }

    #[test]
    fn one_payer_is_heard_no_louder_for_saying_it_again() {
        let mut pool = Pool::new(CONFIG);
        let friend = pool.payer(payer(1));
        pool.add(0, friend, true, 800.0);
        pool.add(0, friend, false, 200.0);
        let ([right, wrong], _) = pool.sum(0, 1.0);
        assert!((right - 8.0).abs() < 1e-3 && (wrong - 2.0).abs() < 1e-3, "{right} {wrong}");
    }

    #[test]
    fn a_crowd_of_strangers_displaces_no_voice_that_has_earned_trust() {
        let mut pool = Pool::new(CONFIG);
        let friend = pool.payer(payer(1));
        (0..10).for_each(|cell| pool.add(cell, friend, cell % 2 == 0, 2.0));
        (0..4).for_each(|cell| pool.weigh(cell, [[0.0, 3.0], [3.0, 0.0]][usize::from(cell % 2 == 0)], 1.0));
        let (heard, trust) = (pool.sum(9, 1.0), pool.trust(friend));
        assert!(trust > 0.6, "{trust}");
        // Each says more about each cell than the friend did.
        for stranger in 2..10 {
            let stranger = pool.payer(payer(stranger));
            (20..60).for_each(|cell| pool.add(cell, stranger, true, 3.0));
        }
        assert_eq!((pool.sum(9, 1.0), pool.trust(friend), pool.entries.len()), (heard, trust, CONFIG.entries));
    }

    #[test]
    fn trust_comes_back_when_evidence_is_forgotten_and_bounds_hold() {
        let mut pool = Pool::new(CONFIG);
        for number in 0..50 {
            let friend = pool.payer(payer(number));
            (0..20).for_each(|cell| pool.add(cell, friend, true, 1.0));
            pool.weigh(3, [0.0, 2.0], 1.0);
        }
        assert!(pool.entries.len() <= CONFIG.entries && pool.payers.len() <= CONFIG.payers);
        assert!(pool.entries.is_sorted_by_key(|entry| (entry.cell, entry.payer)));
        let distrusted = pool.most();
        (0..20).for_each(|cell| pool.clear(cell));
        assert!(pool.entries.is_empty() && (pool.most() - 0.5).abs() < 1e-5 && distrusted <= 0.5);
    }
}
