//! Which row of a table holds what.

use std::collections::HashMap;

use super::super::PaymentKey;

/// The numbers of a table's rows by what they hold. No number is used twice.
#[derive(Debug)]
pub(super) struct Numbers {
    of: HashMap<PaymentKey, i64>,
    next: i64,
}

impl Default for Numbers {
    fn default() -> Self {
        Self { of: HashMap::new(), next: 1 }
    }
}

impl Numbers {
    /// What the file holds already.
    pub(super) fn restore(&mut self, key: PaymentKey, number: i64) {
        self.of.insert(key, number);
        self.next = self.next.max(number.saturating_add(1));
    }

    /// The row of `key`, a new one if it has none.
    pub(super) fn get(&mut self, key: PaymentKey) -> i64 {
        *self.of.entry(key).or_insert_with(|| {
            let number = self.next;
            self.next = number.saturating_add(1);
            number
        })
    }

    /// The row that `key` had, which is to be deleted.
    pub(super) fn remove(&mut self, key: &PaymentKey) -> Option<i64> {
        self.of.remove(key)
    }
}
