//! Who is known, by number.

use std::collections::HashMap;

use alloy_primitives::Address;

use super::Candidate;

/// Gives every evaluator a small number, and when there are too many forgets who was neither offered nor seen at work for the longest
/// time.
#[derive(Clone, Debug)]
pub(super) struct Book {
    limit: usize,
    numbers: HashMap<Address, u32>,
    names: Vec<Address>,
    /// When each was offered or seen at work last; 0 for those one only hears of.
    offered: Vec<u64>,
    /// The number of the candidate at each position of the market that was seen last: it rarely changes.
    positions: Vec<u32>,
    turn: u64,
}

impl Book {
    pub(super) fn new(limit: usize) -> Self {
        Self {
            limit: limit.max(1),
            numbers: HashMap::new(),
            names: Vec::new(),
            offered: Vec::new(),
            positions: Vec::new(),
            turn: 1,
        }
    }

    pub(super) const fn len(&self) -> usize {
        self.names.len()
    }

    pub(super) fn find(&self, evaluator: Address) -> Option<usize> {
        self.numbers.get(&evaluator).map(|number| *number as usize)
    }

    /// Its number, which is the first to be taken away as long as it is not kept, and whether the number belonged to someone else until
    /// now or is new.
    pub(super) fn enter(&mut self, evaluator: Address) -> (usize, bool) {
        if let Some(number) = self.find(evaluator) {
            return (number, false);
        }
        let number = if self.names.len() < self.limit {
            grow(&mut self.names, self.limit);
            grow(&mut self.offered, self.limit);
            self.names.push(evaluator);
            self.offered.push(0);
            self.names.len() - 1
        } else {
            let number = (0..self.offered.len()).min_by_key(|number| self.offered[*number]).unwrap_or_default();
            self.numbers.remove(&self.names[number]);
            self.names[number] = evaluator;
            self.offered[number] = 0;
            number
        };
        self.numbers.insert(evaluator, number as u32);
        (number, true)
    }

    /// Keeps a number as if it had been offered just now.
    pub(super) fn keep(&mut self, number: usize) {
        self.offered[number] = self.turn;
    }

    /// Starts a look at the market. Whoever is known and still there is kept before anybody new is entered, who could take its number
    /// otherwise.
    pub(super) fn turn(&mut self, market: &[Candidate]) {
        self.turn += 1;
        self.positions.truncate(market.len());
        for (position, candidate) in market.iter().enumerate() {
            if let Some(number) = self.seen_at(position, candidate).or_else(|| self.find(candidate.evaluator)) {
                self.keep(number);
            }
        }
    }

    /// The number of the candidate at this position, if it was there the last time.
    fn seen_at(&self, position: usize, candidate: &Candidate) -> Option<usize> {
        let number = *self.positions.get(position)? as usize;
        (self.names.get(number) == Some(&candidate.evaluator)).then_some(number)
    }

    /// The number of the candidate at this position; like [`Book::enter`], without a search where nothing changed.
    pub(super) fn at(&mut self, position: usize, candidate: &Candidate) -> (usize, bool) {
        if let Some(number) = self.seen_at(position, candidate) {
            return (number, false);
        }
        let (number, new) = self.enter(candidate.evaluator);
        self.keep(number);
        if position < self.positions.len() {
            self.positions[position] = number as u32;
        } else if position == self.positions.len() {
            self.positions.push(number as u32);
        }
        (number, new)
    }

    /// Bytes of memory, by capacity.
    pub(super) fn bytes(&self) -> usize {
        table_bytes::<(Address, u32)>(self.numbers.capacity())
            + self.names.capacity() * size_of::<Address>()
            + self.offered.capacity() * size_of::<u64>()
            + self.positions.capacity() * size_of::<u32>()
    }
}

/// Makes room for one more, with little to spare: doubling would leave half of a full table empty.
pub(super) fn grow<T>(items: &mut Vec<T>, limit: usize) {
    if items.len() == items.capacity() {
        let more = (items.len() / 8).max(64).min(limit.saturating_sub(items.len()).max(1));
        items.reserve_exact(more);
    }
}

/// Bytes of a hash table of this capacity: of eight slots seven may be used, and each has a byte of control.
pub(super) const fn table_bytes<T>(capacity: usize) -> usize {
    (capacity * 8).div_ceil(7) * (size_of::<T>() + 1)
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

    fn look(book: &mut Book, market: &[u8]) -> Vec<usize> {
        let market: Vec<_> = market.iter().map(|number| candidate(*number)).collect();
        book.turn(&market);
        market.iter().enumerate().map(|(position, candidate)| book.at(position, candidate).0).collect()
    }

    #[test]
    fn numbers_stay_when_the_market_changes_its_order() {
        let mut book = Book::new(10);
        assert_eq!(look(&mut book, &[5, 6, 7]), [0, 1, 2]);
        assert_eq!(look(&mut book, &[7, 5]), [2, 0]);
        assert_eq!(look(&mut book, &[8, 7, 6, 5]), [3, 2, 1, 0]);
    }

    #[test]
    fn the_one_that_was_not_offered_for_longest_is_forgotten_first() {
        let mut book = Book::new(3);
        look(&mut book, &[1, 2, 3]);
        look(&mut book, &[1, 3]);
        look(&mut book, &[1, 4]);
        assert_eq!(book.find(Address::repeat_byte(2)), None);
        assert!(book.find(Address::repeat_byte(3)).is_some() && book.len() == 3);
        // Those one only hears of displace each other, and nobody who is offered.
        look(&mut book, &[1, 3]);
        for number in 5..9 {
            book.enter(Address::repeat_byte(number));
        }
        assert!(book.find(Address::repeat_byte(1)).is_some() && book.find(Address::repeat_byte(3)).is_some());
    }

    #[test]
    fn nobody_who_is_offered_makes_room_for_somebody_else_who_is() {
        let mut book = Book::new(3);
        assert_eq!(look(&mut book, &[1, 2, 3]), [0, 1, 2]);
        look(&mut book, &[3]);
        // The new one comes first, and does not take the number of the one after it.
        assert_eq!(look(&mut book, &[4, 1, 3]), [1, 0, 2]);
    }
}
