//! Waiting for another copy of the same payment.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use tokio::sync::Notify;

use crate::ledger::PaymentKey;

/// The payments that this process is working on.
#[derive(Clone, Debug, Default)]
pub(super) struct InProgress(Arc<Mutex<HashMap<PaymentKey, Arc<Notify>>>>);

impl InProgress {
    /// Marks a payment as being worked on until the guard is dropped; `None` if it is already.
    pub(super) fn enter(&self, key: PaymentKey) -> Option<Busy> {
        match self.lock().entry(key) {
            std::collections::hash_map::Entry::Occupied(_) => None,
            std::collections::hash_map::Entry::Vacant(entry) => {
                entry.insert(Arc::default());
                Some(Busy { key, in_progress: self.clone() })
            }
        }
    }

    /// What to wait for, if the payment is being worked on.
    pub(super) fn watch(&self, key: &PaymentKey) -> Option<Arc<Notify>> {
        self.lock().get(key).cloned()
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<PaymentKey, Arc<Notify>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Says that a payment is being worked on; dropping it wakes those who wait.
#[derive(Debug)]
pub(super) struct Busy {
    key: PaymentKey,
    in_progress: InProgress,
}

impl Drop for Busy {
    fn drop(&mut self) {
        if let Some(waiting) = self.in_progress.lock().remove(&self.key) {
            waiting.notify_waiters();
        }
    }
}
