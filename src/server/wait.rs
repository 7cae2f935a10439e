//! Waiting for another copy of the same payment.

use std::{
    collections::hash_map::Entry,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
};

use ahash::AHashMap;
use tokio::sync::Notify;

use crate::payment::PaymentKey;

/// So many locks keep cores apart that work on different payments.
const SHARDS: usize = 32;

/// The payments that this process is working on.
#[derive(Clone, Debug, Default)]
pub(super) struct InProgress(Arc<[Mutex<Shard>; SHARDS]>);

/// What waits for a payment is made when the first copy comes; mostly none does.
type Shard = AHashMap<PaymentKey, Option<Arc<Work>>>;

#[derive(Debug, Default)]
struct Work {
    ended: Notify,
    copies: AtomicUsize,
}

/// More copies of one payment than may wait.
#[derive(Debug)]
pub(super) struct TooMany;

impl InProgress {
    /// Marks a payment as being worked on until the guard is dropped; `None` if it is already.
    pub(super) fn enter(&self, key: PaymentKey) -> Option<Busy> {
        match self.lock(&key).entry(key) {
            Entry::Occupied(_) => None,
            Entry::Vacant(entry) => {
                entry.insert(None);
                Some(Busy { key, in_progress: self.clone() })
            }
        }
    }

    /// Joins those who wait for a payment, of whom there are at most `most`; `None` if nobody works on it any more.
    pub(super) fn join(&self, key: &PaymentKey, most: usize) -> Result<Option<Waiting>, TooMany> {
        let Some(work) = self.lock(key).get_mut(key).map(|work| work.get_or_insert_default().clone()) else {
            return Ok(None);
        };
        let waiting = Waiting { key: *key, work, in_progress: self.clone() };
        if waiting.work.copies.fetch_add(1, Ordering::Relaxed) < most { Ok(Some(waiting)) } else { Err(TooMany) }
    }

    fn lock(&self, key: &PaymentKey) -> MutexGuard<'_, Shard> {
        // Nonces are random, unless their payer wants to wait for itself.
        let shard = usize::from(key.nonce[31]) % SHARDS;
        self.0[shard].lock().unwrap_or_else(PoisonError::into_inner)
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
        let work = self.in_progress.lock(&self.key).remove(&self.key);
        // Not under the lock: what is woken may run at once.
        if let Some(Some(work)) = work {
            work.ended.notify_waiters();
        }
    }
}

/// One copy that waits, for as long as it lives.
#[derive(Debug)]
pub(super) struct Waiting {
    key: PaymentKey,
    work: Arc<Work>,
    in_progress: InProgress,
}

impl Waiting {
    /// Until the work has ended.
    pub(super) async fn ended(&self) {
        let mut ended = std::pin::pin!(self.work.ended.notified());
        ended.as_mut().enable();
        // Whoever finished before this copy was listening will not wake it.
        let now = self.in_progress.lock(&self.key).get(&self.key).cloned().flatten();
        let goes_on = now.is_some_and(|now| Arc::ptr_eq(&now, &self.work));
        if goes_on {
            ended.await;
        }
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.work.copies.fetch_sub(1, Ordering::Relaxed);
    }
}
