//! A set in order that puts off ordering.

use std::collections::BTreeSet;

/// How many wait to be put in order at most: more would keep others waiting for too long when it is done.
const MOST: usize = 256;
/// Among so many it is faster to look for one than to put them in order.
const FEW: usize = 32;

/// A set whose order is rarely asked for. What comes is put at the end of a list; put in order many at a time, it touches each part
/// of a large tree once, and what leaves again soon does not touch the tree at all. Nothing may be inserted that is in it.
#[derive(Debug)]
pub(super) struct LazySet<T> {
    sorted: BTreeSet<T>,
    fresh: Vec<T>,
    /// No more than the least of what is fresh.
    bound: Option<T>,
}

impl<T: Copy + Ord> LazySet<T> {
    pub(super) fn insert(&mut self, item: T) {
        if self.fresh.len() == MOST {
            self.sort();
        }
        self.bound = Some(self.bound.map_or(item, |bound| bound.min(item)));
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

    /// Whether the first may be one of those that are first in order; if not, it is none of them.
    pub(super) fn may_begin_with(&self, is_first: impl Fn(&T) -> bool) -> bool {
        self.bound.iter().chain(self.sorted.first()).any(is_first)
    }

    fn sort(&mut self) {
        self.fresh.sort_unstable();
        self.sorted.extend(self.fresh.drain(..));
        self.bound = None;
    }
}

impl<T> Default for LazySet<T> {
    fn default() -> Self {
        Self { sorted: BTreeSet::new(), fresh: Vec::new(), bound: None }
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
        Below(u16),
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let step = prop_oneof![
            20 => (0..3_000_u16).prop_map(Step::Toggle),
            1 => Just(Step::Look),
            1 => (0..3_000_u16).prop_map(Step::Below),
        ];
        proptest::collection::vec(step, 0..4_000)
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
                    Step::Below(limit) => {
                        let is_below = model.first().is_some_and(|least| *least < limit);
                        prop_assert!(set.may_begin_with(|least| *least < limit) || !is_below);
                        set.sorted();
                        prop_assert_eq!(set.may_begin_with(|least| *least < limit), is_below);
                    }
                }
                prop_assert!(set.fresh.len() <= MOST);
            }
            prop_assert_eq!(set.sorted(), &model);
        }
    }
}
