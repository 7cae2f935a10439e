//! Bounds how many callers work at once and how many wait for that.

use std::{sync::Arc, time::Duration};

use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore, SemaphorePermit},
    time::timeout,
};

/// How many callers wait for each permit at most: the more permits, the sooner it is the last one's turn.
const WAITING: usize = 16;

/// A number of permits for work, with a bounded queue of callers that wait for one. Permits are given in the order of arrival.
///
/// A semaphore alone lets any number of callers wait for any time. Here a caller is refused at once if the queue is full, and
/// after `max_wait` otherwise, so that its client can be told to try again later.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() {
/// use std::time::Duration;
/// use tower_x402::server::AdmissionQueue;
///
/// let queue = AdmissionQueue::new(1, Duration::from_millis(10));
/// let permit = queue.enter().await.expect("a permit is free");
/// assert!(queue.enter().await.is_none(), "no permit was free in time");
/// drop(permit);
/// assert!(queue.enter().await.is_some());
/// # }
/// ```
#[derive(Debug)]
pub struct AdmissionQueue {
    permits: Arc<Semaphore>,
    waiting: Semaphore,
    max_wait: Duration,
}

/// A permit of an [`AdmissionQueue`], which is returned when this is dropped.
#[derive(Debug)]
#[must_use = "the permit is returned when this is dropped"]
pub struct QueuePermit<'a>(#[expect(dead_code, reason = "only held")] SemaphorePermit<'a>);

impl AdmissionQueue {
    /// Returns a queue with this many permits, for each of which at most sixteen callers wait, for `max_wait` at most.
    pub fn new(permits: usize, max_wait: Duration) -> Self {
        let semaphore = |count: usize| Semaphore::new(count.min(Semaphore::MAX_PERMITS));
        let waiting = semaphore(permits.saturating_mul(WAITING));
        Self { permits: Arc::new(semaphore(permits)), waiting, max_wait }
    }

    /// Takes a permit, waiting for one if all are taken. Returns `None` if the queue is full or the wait too long. A caller that drops
    /// the future leaves the queue.
    pub async fn enter(&self) -> Option<QueuePermit<'_>> {
        // Nobody overtakes a waiting caller: the semaphore gives it a returned permit before anybody can find it free.
        if let Ok(permit) = self.permits.try_acquire() {
            return Some(QueuePermit(permit));
        }
        let _waiting = self.waiting.try_acquire().ok()?;
        timeout(self.max_wait, self.permits.acquire()).await.ok()?.ok().map(QueuePermit)
    }

    /// Does the same for work that outlives the borrow.
    pub(crate) async fn enter_owned(&self) -> Option<OwnedSemaphorePermit> {
        if let Ok(permit) = self.permits.clone().try_acquire_owned() {
            return Some(permit);
        }
        let _waiting = self.waiting.try_acquire().ok()?;
        timeout(self.max_wait, self.permits.clone().acquire_owned()).await.ok()?.ok()
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;

    use futures_util::poll;
    use tokio::time::Instant;

    use super::*;

    const MAX_WAIT: Duration = Duration::from_secs(4);

    #[tokio::test(start_paused = true)]
    async fn permits_are_given_in_the_order_of_arrival() {
        let queue = AdmissionQueue::new(1, MAX_WAIT);
        let permit = queue.enter().await.unwrap();
        let (mut first, mut second) = (pin!(queue.enter()), pin!(queue.enter()));
        assert!(poll!(first.as_mut()).is_pending() && poll!(second.as_mut()).is_pending());
        drop(permit);
        assert!(poll!(second.as_mut()).is_pending(), "nobody overtakes");
        let permit = first.await.unwrap();
        assert!(poll!(second.as_mut()).is_pending());
        drop(permit);
        assert!(second.await.is_some());
        assert!(queue.enter().await.is_some(), "and then it is empty");
    }

    #[tokio::test(start_paused = true)]
    async fn full_queue_refuses_at_once() {
        let queue = AdmissionQueue::new(2, MAX_WAIT);
        let _permits = (queue.enter().await.unwrap(), queue.enter().await.unwrap());
        let mut waiting = Vec::new();
        for _ in 0..2 * WAITING {
            let mut next = Box::pin(queue.enter());
            assert!(poll!(next.as_mut()).is_pending());
            waiting.push(next);
        }
        let before = Instant::now();
        assert!(queue.enter().await.is_none());
        assert_eq!(before.elapsed(), Duration::ZERO);
    }

    #[tokio::test(start_paused = true)]
    async fn caller_that_waited_too_long_leaves_the_queue() {
        let queue = AdmissionQueue::new(1, MAX_WAIT);
        let permit = queue.enter().await.unwrap();
        for _ in 0..2 * WAITING {
            let before = Instant::now();
            assert!(queue.enter().await.is_none());
            assert_eq!(before.elapsed(), MAX_WAIT);
        }
        drop(permit);
        assert!(queue.enter().await.is_some());
    }

    #[tokio::test(start_paused = true)]
    async fn caller_that_goes_away_leaves_the_queue() {
        let queue = AdmissionQueue::new(1, MAX_WAIT);
        let permit = queue.enter().await.unwrap();
        for _ in 0..2 * WAITING {
            let mut gone = Box::pin(queue.enter());
            assert!(poll!(gone.as_mut()).is_pending());
        }
        let mut waiting = pin!(queue.enter());
        assert!(poll!(waiting.as_mut()).is_pending(), "there is room in the queue");
        drop(permit);
        assert!(waiting.await.is_some(), "the permit is not for those that left");
    }
}
