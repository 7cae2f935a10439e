//! Where records are in memory, and when they go.

use std::collections::BTreeMap;

use ahash::RandomState;
use hashbrown::HashTable;

use super::Record;
use crate::payment::PaymentKey;

/// Records by key. The key is the record's own, so that a payment has one copy of it here, and of what a table must keep free
/// little is lost. Payers choose what is hashed; ahash is keyed at random.
#[derive(Debug, Default)]
pub(super) struct Records {
    table: HashTable<Hashed>,
    hasher: RandomState,
}

#[derive(Debug)]
struct Hashed {
    /// Kept, so that a table that grows need not look at the records.
    hash: u64,
    record: Box<Record>,
}

impl Records {
    pub(super) fn hash(&self, key: &PaymentKey) -> u64 {
        self.hasher.hash_one(key)
    }

    pub(super) fn get(&self, key: &PaymentKey) -> Option<&Record> {
        self.find(self.hash(key), |record| record.key == *key)
    }

    pub(super) fn get_mut(&mut self, key: &PaymentKey) -> Option<&mut Record> {
        let hash = self.hash(key);
        self.table.find_mut(hash, |hashed| hashed.record.key == *key).map(|hashed| &mut *hashed.record)
    }

    /// One of those with this hash.
    pub(super) fn find(&self, hash: u64, is_it: impl Fn(&Record) -> bool) -> Option<&Record> {
        let is_it = |hashed: &Hashed| hashed.hash == hash && is_it(&hashed.record);
        self.table.find(hash, is_it).map(|hashed| &*hashed.record)
    }

    /// Takes a record whose key is new here, and tells its hash.
    pub(super) fn insert(&mut self, record: Box<Record>) -> u64 {
        let hash = self.hash(&record.key);
        self.table.insert_unique(hash, Hashed { hash, record }, |hashed| hashed.hash);
        hash
    }

    pub(super) fn remove(&mut self, key: &PaymentKey) -> Option<Box<Record>> {
        let hash = self.hash(key);
        let found = self.table.find_entry(hash, |hashed| hashed.record.key == *key).ok()?;
        Some(found.remove().0.record)
    }

    pub(super) fn values(&self) -> impl Iterator<Item = &Record> {
        self.table.iter().map(|hashed| &*hashed.record)
    }
}

/// Which records to look at when, by their hashes.
#[derive(Debug, Default)]
pub(super) struct Expiry(BTreeMap<u64, Vec<u64>>);

impl Expiry {
    /// At `at`, in Unix seconds.
    pub(super) fn insert(&mut self, at: u64, hash: u64) {
        self.0.entry(at).or_default().push(hash);
    }

    pub(super) fn remove(&mut self, at: u64, hash: u64) {
        let Some(hashes) = self.0.get_mut(&at) else { return };
        // What goes early mostly came just now.
        if let Some(place) = hashes.iter().rposition(|other| *other == hash) {
            hashes.swap_remove(place);
        }
        if hashes.is_empty() {
            self.0.remove(&at);
        }
    }

    /// The next one whose time is before `now`, with its time.
    pub(super) fn pop_before(&mut self, now: u64) -> Option<(u64, u64)> {
        let mut first = self.0.first_entry().filter(|first| *first.key() < now)?;
        let at = *first.key();
        let hash = first.get_mut().pop()?;
        if first.get().is_empty() {
            first.remove();
        }
        Some((at, hash))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn what_is_put_in_comes_out_once_and_in_order(steps in proptest::collection::vec((0..40_u64, 0..6_u64), 1..400)) {
            let (mut expiry, mut model) = (Expiry::default(), Vec::new());
            for (at, hash) in steps {
                match model.iter().position(|known| *known == (at, hash)) {
                    Some(place) if hash % 2 == 0 => {
                        model.swap_remove(place);
                        expiry.remove(at, hash);
                    }
                    _ => {
                        model.push((at, hash));
                        expiry.insert(at, hash);
                    }
                }
                expiry.remove(at, 7);
            }
            let mut popped: Vec<_> = std::iter::from_fn(|| expiry.pop_before(20)).collect();
            prop_assert!(popped.is_sorted_by_key(|(at, _)| *at));
            popped.extend(std::iter::from_fn(|| expiry.pop_before(u64::MAX)));
            popped.sort_unstable();
            model.sort_unstable();
            prop_assert_eq!(popped, model);
            prop_assert!(expiry.0.is_empty());
        }
    }
}
