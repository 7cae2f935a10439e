//! Which row of a table holds what.

use std::collections::HashMap;

use crate::payment::PaymentKey;

/// The numbers of a table's rows by what they hold. No number is used twice.
#[derive(Debug)]
pub(super) struct Numbers {
    of: HashMap<PaymentKey, Place>,
    next: i64,
}

#[derive(Debug)]
struct Place {
    number: i64,
    /// What tells what was written there last, if it was since the file was opened.
    holds: Option<u64>,
}

impl Default for Numbers {
    fn default() -> Self {
        Self { of: HashMap::new(), next: 1 }
    }
}

impl Numbers {
    /// What the file holds already.
    pub(super) fn restore(&mut self, key: PaymentKey, number: i64) {
        self.of.insert(key, Place { number, holds: None });
        self.next = self.next.max(number.saturating_add(1));
    }

    /// The row of `key`, a new one if it has none.
    pub(super) fn get(&mut self, key: PaymentKey) -> i64 {
        self.place(key).number
    }

    /// The same, and whether it must be written to hold what `holds` tells.
    pub(super) fn get_to_hold(&mut self, key: PaymentKey, holds: u64) -> (i64, bool) {
        let place = self.place(key);
        let before = place.holds.replace(holds);
        (place.number, before != Some(holds))
    }

    /// The row that `key` had, which is to be deleted.
    pub(super) fn remove(&mut self, key: &PaymentKey) -> Option<i64> {
        self.of.remove(key).map(|place| place.number)
    }

    fn place(&mut self, key: PaymentKey) -> &mut Place {
        self.of.entry(key).or_insert_with(|| {
            let number = self.next;
            self.next = number.saturating_add(1);
            Place { number, holds: None }
        })
    }
}
