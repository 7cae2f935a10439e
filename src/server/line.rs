//! Places for work that not everybody may do at once, and a line for those who come when all are taken.

use std::time::Duration;

use tokio::{
    sync::{Semaphore, SemaphorePermit},
    time::timeout,
};

/// How many wait for each place. A line grows with what it leads to, or the last in it could not get there in time.
const WAITING: usize = 16;

/// A number of places for work, with a bounded line of callers that wait for one. Places are given in the order of arrival.
///
/// A semaphore alone lets any number of callers wait for any time. Here a caller is refused at once if the line is full, and
/// after a while if it is slow, so that it can be told to come again.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() {
/// use std::time::Duration;
/// use tower_x402::server::WaitingLine;
///
/// let line = WaitingLine::new(1, Duration::from_millis(10));
/// let place = line.enter().await.expect("nobody else works");
/// assert!(line.enter().await.is_none(), "the place was not free in time");
/// drop(place);
/// assert!(line.enter().await.is_some());
/// # }
/// ```
#[derive(Debug)]
pub struct WaitingLine {
    places: Semaphore,
    waiting: Semaphore,
    patience: Duration,
}

/// A place of a [`WaitingLine`], free again when this is dropped.
#[derive(Debug)]
#[must_use = "the place is free again when this is dropped"]
pub struct Place<'a>(#[expect(dead_code, reason = "only held")] SemaphorePermit<'a>);

impl WaitingLine {
    /// Makes `places`, for each of which at most sixteen callers wait, for `patience` at most.
    pub fn new(places: usize, patience: Duration) -> Self {
        let semaphore = |permits: usize| Semaphore::new(permits.min(Semaphore::MAX_PERMITS));
        Self { places: semaphore(places), waiting: semaphore(places.saturating_mul(WAITING)), patience }
    }

    /// Takes a place until it is dropped, waiting for one if all are taken. Returns `None` if the line is full or the wait too long.
    /// Whoever stops waiting leaves the line.
    pub async fn enter(&self) -> Option<Place<'_>> {
        // Nobody overtakes those who wait: a place that is given back is theirs before anybody can find it free.
        if let Ok(place) = self.places.try_acquire() {
            return Some(Place(place));
        }
        let _waiting = self.waiting.try_acquire().ok()?;
        timeout(self.patience, self.places.acquire()).await.ok()?.ok().map(Place)
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
        let line = WaitingLine::new(1, PATIENCE);
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
        let line = WaitingLine::new(2, PATIENCE);
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
        let line = WaitingLine::new(1, PATIENCE);
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
        let line = WaitingLine::new(1, PATIENCE);
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
