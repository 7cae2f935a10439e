//! The payments that this process is working on, so that copies of them wait instead of asking the ledger.

use std::{
    collections::{HashMap, VecDeque, hash_map::Entry},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use tokio::sync::Notify;

use crate::payment::PaymentKey;

/// How many streams are remembered that ended here.
const MAX_ENDED: usize = 1024;

/// The payments that this process is working on.
#[derive(Clone, Debug, Default)]
pub(crate) struct PaymentsInProgress(Arc<Mutex<Payments>>);

#[derive(Debug, Default)]
struct Payments {
    /// By payment, what copies of it wait for; made when the first copy comes, and most payments have none.
    works: HashMap<PaymentKey, Option<Arc<Notify>>>,
    /// Those whose responses streamed and have ended, the newest last.
    ended: VecDeque<PaymentKey>,
}

impl PaymentsInProgress {
    /// Marks a payment as being worked on until the guard is dropped. Returns `None` if it is already.
    pub(crate) fn enter(&self, key: PaymentKey) -> Option<InProgress> {
        match self.lock().works.entry(key) {
            Entry::Occupied(_) => None,
            Entry::Vacant(entry) => {
                entry.insert(None);
                Some(InProgress { key, payments: self.clone() })
            }
        }
    }

    /// Joins the copies that wait for a payment. Returns `None` if nobody works on it any more.
    pub(crate) fn join(&self, key: &PaymentKey) -> Option<WaitingCopy> {
        let work = self.lock().works.get_mut(key)?.get_or_insert_default().clone();
        Some(WaitingCopy { key: *key, work, payments: self.clone() })
    }

    /// Returns `true` if the response to this payment streamed in this process and ended, as far as that is remembered.
    pub(crate) fn has_ended(&self, key: &PaymentKey) -> bool {
        self.lock().ended.contains(key)
    }

    fn lock(&self) -> MutexGuard<'_, Payments> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Marks a payment as being worked on in this process. Dropping it wakes the copies that wait.
#[derive(Debug)]
pub(crate) struct InProgress {
    key: PaymentKey,
    payments: PaymentsInProgress,
}

impl InProgress {
    /// Notes that the response that streamed has ended: it is kept by now, or will never be.
    pub(crate) fn ended(self) {
        let mut payments = self.payments.lock();
        if payments.ended.len() >= MAX_ENDED {
            payments.ended.pop_front();
        }
        payments.ended.push_back(self.key);
    }
}

impl Drop for InProgress {
    fn drop(&mut self) {
        let work = self.payments.lock().works.remove(&self.key);
        // Not under the lock: what is woken may run at once.
        if let Some(Some(work)) = work {
            work.notify_waiters();
        }
    }
}

/// A copy of a payment that waits for the first one, for as long as this lives.
#[derive(Debug)]
pub(crate) struct WaitingCopy {
    key: PaymentKey,
    work: Arc<Notify>,
    payments: PaymentsInProgress,
}

impl WaitingCopy {
    /// Waits until the work on the payment has ended.
    pub(crate) async fn ended(&self) {
        let mut ended = std::pin::pin!(self.work.notified());
        ended.as_mut().enable();
        // A worker that finished before this copy was listening will not wake it.
        let now = self.payments.lock().works.get(&self.key).cloned().flatten();
        if now.is_some_and(|now| Arc::ptr_eq(&now, &self.work)) {
            ended.await;
        }
    }
}
