//! Places for work that not everybody may do at once, and a line for those who come when all are taken.

use std::time::Duration;

use tokio::{
    sync::{Semaphore, SemaphorePermit},
    time::timeout,
};

/// How many wait for each place. A line grows with what it leads to, or the last in it could not get there in time.
const WAITING: usize = 16;

/// A number of places with a line before them. Places go to those who wait in the order in which they came.
#[derive(Debug)]
pub(crate) struct Line {
    places: Semaphore,
    waiting: Semaphore,
    patience: Duration,
}

impl Line {
    /// Makes `places`, for each of which at most sixteen callers wait, for `patience` at most.
    pub(crate) fn new(places: usize, patience: Duration) -> Self {
        let semaphore = |permits: usize| Semaphore::new(permits.min(Semaphore::MAX_PERMITS));
        Self { places: semaphore(places), waiting: semaphore(places.saturating_mul(WAITING)), patience }
    }

    /// Takes a place until it is dropped, waiting for one if all are taken. Returns `None` if the line is full or the wait too long.
    /// Whoever stops waiting leaves the line.
    pub(crate) async fn enter(&self) -> Option<SemaphorePermit<'_>> {
        // Nobody overtakes those who wait: a place that is given back is theirs before anybody can find it free.
        if let Ok(place) = self.places.try_acquire() {
            return Some(place);
        }
        let _waiting = self.waiting.try_acquire().ok()?;
        timeout(self.patience, self.places.acquire()).await.ok()?.ok()
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;

    use futures_util::poll;
    use tokio::time::Instant;

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(4);

    #[tokio::test(start_paused = true)]
    async fn places_are_given_in_the_order_of_the_line() {
        let line = Line::new(1, PATIENCE);
        let place = line.enter().await.unwrap();
        let (mut first, mut second) = (pin!(line.enter()), pin!(line.enter()));
        assert!(poll!(first.as_mut()).is_pending() && poll!(second.as_mut()).is_pending());
        drop(place);
        assert!(poll!(second.as_mut()).is_pending(), "nobody overtakes");
        let place = first.await.unwrap();
        assert!(poll!(second.as_mut()).is_pending());
        drop(place);
        assert!(second.await.is_some());
        assert!(line.enter().await.is_some(), "and then it is empty");
    }

    #[tokio::test(start_paused = true)]
    async fn a_full_line_refuses_at_once() {
        let line = Line::new(2, PATIENCE);
        let _places = (line.enter().await.unwrap(), line.enter().await.unwrap());
        let mut waiting = Vec::new();
        for _ in 0..2 * WAITING {
            let mut next = Box::pin(line.enter());
            assert!(poll!(next.as_mut()).is_pending());
            waiting.push(next);
        }
        let before = Instant::now();
        assert!(line.enter().await.is_none());
        assert_eq!(before.elapsed(), Duration::ZERO);
    }

    #[tokio::test(start_paused = true)]
    async fn nobody_waits_longer_than_the_patience_and_its_place_in_line_is_free_again() {
        let line = Line::new(1, PATIENCE);
        let place = line.enter().await.unwrap();
        for _ in 0..2 * WAITING {
            let before = Instant::now();
            assert!(line.enter().await.is_none());
            assert_eq!(before.elapsed(), PATIENCE);
        }
        drop(place);
        assert!(line.enter().await.is_some());
    }

    #[tokio::test(start_paused = true)]
    async fn a_waiter_that_goes_away_frees_its_place_in_line() {
        let line = Line::new(1, PATIENCE);
        let place = line.enter().await.unwrap();
        for _ in 0..2 * WAITING {
            let mut gone = Box::pin(line.enter());
            assert!(poll!(gone.as_mut()).is_pending());
        }
        let mut waiting = pin!(line.enter());
        assert!(poll!(waiting.as_mut()).is_pending(), "there is room in line");
        drop(place);
        assert!(waiting.await.is_some(), "and the place is not for those who left");
    }
}
