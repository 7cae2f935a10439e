//! What this process saw last, to be tried first.

use std::{
    collections::HashMap,
    hash::Hash,
    sync::{Mutex, MutexGuard, PoisonError},
};

/// How many values a generation holds.
const GENERATION: usize = 2048;

/// A bounded store: two generations, of which the older goes at once.
#[derive(Debug)]
pub(super) struct Known<K, V>(Mutex<Generations<K, V>>);

#[derive(Debug)]
struct Generations<K, V> {
    young: HashMap<K, V>,
    old: HashMap<K, V>,
}

impl<K: Eq + Hash, V> Known<K, V> {
    pub(super) fn new() -> Self {
        Self(Mutex::new(Generations { young: HashMap::new(), old: HashMap::new() }))
    }

    /// Takes a value out.
    pub(super) fn take(&self, key: &K) -> Option<V> {
        let mut generations = self.lock();
        let (young, old) = (generations.young.remove(key), generations.old.remove(key));
        young.or(old)
    }

    pub(super) fn put(&self, key: K, value: V) {
        let mut generations = self.lock();
        if generations.young.len() >= GENERATION {
            generations.old = std::mem::take(&mut generations.young);
        }
        generations.young.insert(key, value);
    }

    fn lock(&self) -> MutexGuard<'_, Generations<K, V>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_more_than_two_generations_are_kept_and_the_newest_value_counts() {
        let known = Known::new();
        known.put(0, 1);
        for key in 1..3 * GENERATION {
            known.put(key, 0);
        }
        assert_eq!(known.take(&0), None, "the oldest is gone");
        let generations = known.lock();
        assert!(generations.young.len() + generations.old.len() <= 2 * GENERATION);
        drop(generations);
        known.put(5 * GENERATION / 2, 7);
        assert_eq!(known.take(&(5 * GENERATION / 2)), Some(7));
        assert_eq!(known.take(&(5 * GENERATION / 2)), None, "taken is taken");
    }
}
