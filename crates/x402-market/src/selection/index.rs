//! Small numbers for evaluators, so that what is known of them can be kept in arrays.

use std::collections::HashMap;

use alloy_primitives::Address;

use super::Candidate;

/// Numbers evaluators. When there are too many, it forgets the one that was neither offered nor hired for the longest time.
#[derive(Clone, Debug)]
pub(super) struct EvaluatorIndex {
    limit: usize,
    numbers: HashMap<Address, u32>,
    addresses: Vec<Address>,
    /// The round in which each was offered or hired last; 0 for those that are known from reports only.
    last_used: Vec<u64>,
    /// The number of the candidate at each position of the last market. It rarely changes, which saves most lookups.
    positions: Vec<u32>,
    round: u64,
}

impl EvaluatorIndex {
    pub(super) fn new(limit: usize) -> Self {
        Self {
            limit: limit.max(1),
            numbers: HashMap::new(),
            addresses: Vec::new(),
            last_used: Vec::new(),
            positions: Vec::new(),
            round: 1,
        }
    }

    pub(super) const fn len(&self) -> usize {
        self.addresses.len()
    }

    pub(super) fn find(&self, evaluator: Address) -> Option<usize> {
        self.numbers.get(&evaluator).map(|number| *number as usize)
    }

    /// Returns the number of an evaluator, and whether it is new or belonged to another one until now. Until it is
    /// [kept](Self::keep), a new number is the first to be given away.
    pub(super) fn insert(&mut self, evaluator: Address) -> (usize, bool) {
        if let Some(number) = self.find(evaluator) {
            return (number, false);
        }
        let number = if self.addresses.len() < self.limit {
            grow(&mut self.addresses, self.limit);
            grow(&mut self.last_used, self.limit);
            self.addresses.push(evaluator);
            self.last_used.push(0);
            self.addresses.len() - 1
        } else {
            let number = (0..self.last_used.len()).min_by_key(|number| self.last_used[*number]).unwrap_or_default();
            self.numbers.remove(&self.addresses[number]);
            self.addresses[number] = evaluator;
            self.last_used[number] = 0;
            number
        };
        self.numbers.insert(evaluator, number as u32);
        (number, true)
    }

    /// Marks a number as used in this round.
    pub(super) fn keep(&mut self, number: usize) {
        self.last_used[number] = self.round;
    }

    /// Starts a round. Candidates that are known are kept first, so that new ones do not take their numbers.
    pub(super) fn start_round(&mut self, market: &[Candidate]) {
        self.round += 1;
        self.positions.truncate(market.len());
        for (position, candidate) in market.iter().enumerate() {
            if let Some(number) = self.last_at(position, candidate).or_else(|| self.find(candidate.evaluator)) {
                self.keep(number);
            }
        }
    }

    /// Returns the number of the candidate at this position, as [`insert`](Self::insert) does, and keeps it.
    pub(super) fn at(&mut self, position: usize, candidate: &Candidate) -> (usize, bool) {
        if let Some(number) = self.last_at(position, candidate) {
            return (number, false);
        }
        let (number, is_new) = self.insert(candidate.evaluator);
        self.keep(number);
        if position < self.positions.len() {
            self.positions[position] = number as u32;
        } else if position == self.positions.len() {
            self.positions.push(number as u32);
        }
        (number, is_new)
    }

    /// Returns the number of the candidate at this position, if it was there in the last round.
    fn last_at(&self, position: usize, candidate: &Candidate) -> Option<usize> {
        let number = *self.positions.get(position)? as usize;
        (self.addresses.get(number) == Some(&candidate.evaluator)).then_some(number)
    }
}

/// Makes room for one more item in steps of an eighth: doubling would leave half of a full table empty.
pub(super) fn grow<T>(items: &mut Vec<T>, limit: usize) {
    if items.len() == items.capacity() {
        let more = (items.len() / 8).max(64).min(limit.saturating_sub(items.len()).max(1));
        items.reserve_exact(more);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::selection::SkillSet;
    use tower_x402::Usdc;

    fn candidate(number: u8) -> Candidate {
        let evaluator = Address::repeat_byte(number);
        Candidate { evaluator, claims: SkillSet::default(), price: Usdc::ZERO, first_seen: 0 }
    }

    fn look(index: &mut EvaluatorIndex, market: &[u8]) -> Vec<usize> {
        let market: Vec<_> = market.iter().map(|number| candidate(*number)).collect();
        index.start_round(&market);
        market.iter().enumerate().map(|(position, candidate)| index.at(position, candidate).0).collect()
    }

    #[test]
    fn numbers_stay_when_the_market_changes_its_order() {
        let mut index = EvaluatorIndex::new(10);
        assert_eq!(look(&mut index, &[5, 6, 7]), [0, 1, 2]);
        assert_eq!(look(&mut index, &[7, 5]), [2, 0]);
        assert_eq!(look(&mut index, &[8, 7, 6, 5]), [3, 2, 1, 0]);
    }

    #[test]
    fn least_recently_offered_is_forgotten_first() {
        let mut index = EvaluatorIndex::new(3);
        look(&mut index, &[1, 2, 3]);
        look(&mut index, &[1, 3]);
        look(&mut index, &[1, 4]);
        assert_eq!(index.find(Address::repeat_byte(2)), None);
        assert!(index.find(Address::repeat_byte(3)).is_some() && index.len() == 3);
        // Those known from reports only displace each other, and none that is offered.
        look(&mut index, &[1, 3]);
        for number in 5..9 {
            index.insert(Address::repeat_byte(number));
        }
        assert!(index.find(Address::repeat_byte(1)).is_some() && index.find(Address::repeat_byte(3)).is_some());
    }

    #[test]
    fn offered_evaluators_do_not_displace_each_other() {
        let mut index = EvaluatorIndex::new(3);
        assert_eq!(look(&mut index, &[1, 2, 3]), [0, 1, 2]);
        look(&mut index, &[3]);
        // The new one comes first, and does not take the number of the one after it.
        assert_eq!(look(&mut index, &[4, 1, 3]), [1, 0, 2]);
    }
}
