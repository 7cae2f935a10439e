//! A set in order that puts off ordering.

use std::collections::BTreeSet;

/// How many wait to be put in order at most: more would keep others waiting for a millisecond when it is done.
const MOST: usize = 2_048;
/// Among so many it is faster to look for one than to put them in order.
const FEW: usize = 32;

/// A set whose order is rarely asked for. What comes is put at the end of a list; put in order many at a time, it touches each part
/// of a large tree once, and what leaves again soon does not touch the tree at all. Nothing may be inserted that is in it.
#[derive(Debug)]
pub(super) struct LazySet<T> {
    sorted: BTreeSet<T>,
    fresh: Vec<T>,
}

impl<T: Copy + Ord> LazySet<T> {
    pub(super) fn insert(&mut self, item: T) {
        if self.fresh.len() == MOST {
            self.sort();
        }
        self.fresh.push(item);
    }

    pub(super) fn remove(&mut self, item: &T) {
        if self.fresh.len() > FEW {
            self.sort();
        }
        match self.fresh.iter().rposition(|fresh| fresh == item) {
            Some(place) => drop(self.fresh.swap_remove(place)),
            None => drop(self.sorted.remove(item)),
        }
    }

    /// All, in order.
    pub(super) fn sorted(&mut self) -> &BTreeSet<T> {
        self.sort();
        &self.sorted
    }

    fn sort(&mut self) {
        self.fresh.sort_unstable();
        self.sorted.extend(self.fresh.drain(..));
    }
}

impl<T> Default for LazySet<T> {
    fn default() -> Self {
        Self { sorted: BTreeSet::new(), fresh: Vec::new() }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[derive(Clone, Debug)]
    enum Step {
        Toggle(u16),
        Look,
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let step = prop_oneof![
            600 => (0..9_000_u16).prop_map(Step::Toggle),
            1 => Just(Step::Look),
        ];
        proptest::collection::vec(step, 0..12_000)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn it_is_a_set_in_order(steps in steps()) {
            let (mut set, mut model) = (LazySet::default(), BTreeSet::new());
            for step in steps {
                match step {
                    Step::Toggle(item) if model.remove(&item) => set.remove(&item),
                    Step::Toggle(item) => {
                        model.insert(item);
                        set.insert(item);
                    }
                    Step::Look => prop_assert_eq!(set.sorted(), &model),
                }
                prop_assert!(set.fresh.len() <= MOST);
            }
            prop_assert_eq!(set.sorted(), &model);
        }
    }
}
