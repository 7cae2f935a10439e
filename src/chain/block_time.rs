//! How fast blocks come, learned from what passes by.

use std::{
    sync::{Mutex, PoisonError},
    time::Duration,
};

use tokio::time::Instant;

/// Nothing measured yet, nothing configured: what Base promises.
const ASSUMED: Duration = Duration::from_secs(2);
/// What takes longer is no pace, but a chain that stood still for a while.
const SLOWEST: Duration = Duration::from_secs(15);
/// Observations closer together than this say little.
const BASELINE: Duration = Duration::from_secs(2);

/// The pace of a chain.
#[derive(Debug)]
pub(crate) struct BlockTime {
    hint: Option<Duration>,
    measured: Mutex<Measured>,
}

#[derive(Debug, Default)]
struct Measured {
    since: Option<(u64, Instant)>,
    block_time: Option<Duration>,
}

impl BlockTime {
    pub(crate) fn new(hint: Option<Duration>) -> Self {
        Self { hint, measured: Mutex::default() }
    }

    /// Block `number` was the newest just now.
    pub(crate) fn observe(&self, number: u64) {
        let now = Instant::now();
        let mut measured = self.measured.lock().unwrap_or_else(PoisonError::into_inner);
        let Some((first, at)) = measured.since else {
            measured.since = Some((number, now));
            return;
        };
        let elapsed = now.duration_since(at);
        let blocks = number.saturating_sub(first);
        if elapsed >= BASELINE && blocks > 0 {
            measured.block_time = Some((elapsed / u32::try_from(blocks).unwrap_or(u32::MAX)).min(SLOWEST));
            // Start anew now and then, so that a change of pace is noticed.
            if elapsed > 30 * BASELINE {
                measured.since = Some((number, now));
            }
        }
    }

    /// How long a block takes.
    pub(crate) fn block_time(&self) -> Duration {
        let measured = self.measured.lock().unwrap_or_else(PoisonError::into_inner).block_time;
        self.hint.or(measured).unwrap_or(ASSUMED)
    }

    /// How often to look for a receipt.
    pub(crate) fn poll_interval(&self) -> Duration {
        (self.block_time() / 4).clamp(Duration::from_millis(50), Duration::from_millis(250))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn the_pace_is_measured_unless_it_is_given() {
        let pace = BlockTime::new(None);
        assert_eq!(pace.poll_interval(), Duration::from_millis(250));
        pace.observe(100);
        tokio::time::advance(Duration::from_secs(4)).await;
        pace.observe(120);
        assert_eq!(pace.block_time(), Duration::from_millis(200));
        assert_eq!(pace.poll_interval(), Duration::from_millis(50));
        assert_eq!(BlockTime::new(Some(Duration::from_secs(1))).poll_interval(), Duration::from_millis(250));
    }

    #[tokio::test(start_paused = true)]
    async fn a_chain_that_stood_still_is_not_a_slow_one() {
        let pace = BlockTime::new(None);
        pace.observe(100);
        tokio::time::advance(Duration::from_secs(3_600)).await;
        pace.observe(101);
        assert_eq!(pace.block_time(), SLOWEST);
        tokio::time::advance(Duration::from_secs(4)).await;
        pace.observe(103);
        assert_eq!(pace.block_time(), Duration::from_secs(2));
    }

    #[tokio::test(start_paused = true)]
    async fn blocks_that_are_seen_within_two_seconds_tell_no_pace_and_a_change_is_noticed_in_a_minute() {
        let pace = BlockTime::new(None);
        pace.observe(100);
        tokio::time::advance(BASELINE - Duration::from_millis(1)).await;
        pace.observe(200);
        assert_eq!(pace.block_time(), ASSUMED);
        tokio::time::advance(Duration::from_millis(1)).await;
        pace.observe(200);
        assert_eq!(pace.block_time(), Duration::from_millis(20));
        // From then on a block takes two seconds: by what came after the minute, however many were quick before it.
        tokio::time::advance(30 * BASELINE).await;
        pace.observe(230);
        tokio::time::advance(Duration::from_secs(20)).await;
        pace.observe(240);
        assert_eq!(pace.block_time(), Duration::from_secs(2));
    }
}
