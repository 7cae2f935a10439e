//! The payments that this process is working on, so that copies of them wait instead of asking the ledger.

use std::{
    collections::{HashMap, hash_map::Entry},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
};

use tokio::sync::Notify;

use crate::payment::PaymentKey;

/// The payments that this process is working on.
#[derive(Clone, Debug, Default)]
pub(crate) struct PaymentsInProgress(Arc<Mutex<Payments>>);

/// By payment, what copies of it wait for; made when the first copy comes, and most payments have none.
type Payments = HashMap<PaymentKey, Option<Arc<Work>>>;

#[derive(Debug, Default)]
struct Work {
    ended: Notify,
    copies: AtomicUsize,
}

/// More copies of one payment than may wait.
#[derive(Debug)]
pub(crate) struct TooManyCopies;

impl PaymentsInProgress {
    /// Marks a payment as being worked on until the guard is dropped. Returns `None` if it is already.
    pub(crate) fn enter(&self, key: PaymentKey) -> Option<InProgress> {
        match self.lock().entry(key) {
            Entry::Occupied(_) => None,
            Entry::Vacant(entry) => {
                entry.insert(None);
                Some(InProgress { key, payments: self.clone() })
            }
        }
    }

    /// Joins the copies that wait for a payment, of which there are at most `most`. Returns `None` if nobody works on it any more.
    pub(crate) fn join(&self, key: &PaymentKey, most: usize) -> Result<Option<WaitingCopy>, TooManyCopies> {
        let Some(work) = self.lock().get_mut(key).map(|work| work.get_or_insert_default().clone()) else {
            return Ok(None);
        };
        let waiting = WaitingCopy { key: *key, work, payments: self.clone() };
        if waiting.work.copies.fetch_add(1, Ordering::Relaxed) < most { Ok(Some(waiting)) } else { Err(TooManyCopies) }
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

impl Drop for InProgress {
    fn drop(&mut self) {
        let work = self.payments.lock().remove(&self.key);
        // Not under the lock: what is woken may run at once.
        if let Some(Some(work)) = work {
            work.ended.notify_waiters();
        }
    }
}

/// A copy of a payment that waits for the first one, for as long as this lives.
#[derive(Debug)]
pub(crate) struct WaitingCopy {
    key: PaymentKey,
    work: Arc<Work>,
    payments: PaymentsInProgress,
}

impl WaitingCopy {
    /// Waits until the work on the payment has ended.
    pub(crate) async fn ended(&self) {
        let mut ended = std::pin::pin!(self.work.ended.notified());
        ended.as_mut().enable();
        // A worker that finished before this copy was listening will not wake it.
        let now = self.payments.lock().get(&self.key).cloned().flatten();
        if now.is_some_and(|now| Arc::ptr_eq(&now, &self.work)) {
            ended.await;
        }
    }
}

impl Drop for WaitingCopy {
    fn drop(&mut self) {
        self.work.copies.fetch_sub(1, Ordering::Relaxed);
    }
}
