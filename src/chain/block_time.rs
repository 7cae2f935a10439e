//! How long a block takes, measured from the blocks that are seen.

use std::{
    sync::{Mutex, PoisonError},
    time::Duration,
};

use tokio::time::Instant;

/// The block time before anything was measured: that of Base.
const ASSUMED: Duration = Duration::from_secs(2);
/// The longest block time. If blocks take longer, the chain stood still for a while.
const SLOWEST: Duration = Duration::from_secs(15);
/// The shortest time between two observations that are compared.
const BASELINE: Duration = Duration::from_secs(2);

/// The block time of a chain.
#[derive(Debug)]
pub(crate) struct BlockTime {
    configured: Option<Duration>,
    measured: Mutex<Measured>,
}

#[derive(Debug, Default)]
struct Measured {
    since: Option<(u64, Instant)>,
    block_time: Option<Duration>,
}

impl BlockTime {
    pub(crate) fn new(configured: Option<Duration>) -> Self {
        Self { configured, measured: Mutex::default() }
    }

    /// Notes that a block is the newest now.
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
            // The measurement starts anew each minute, so that a change is noticed.
            if elapsed > 30 * BASELINE {
                measured.since = Some((number, now));
            }
        }
    }

    /// Returns how long a block takes.
    pub(crate) fn block_time(&self) -> Duration {
        let measured = self.measured.lock().unwrap_or_else(PoisonError::into_inner).block_time;
        self.configured.or(measured).unwrap_or(ASSUMED)
    }

    /// Returns how often to poll for a receipt.
    pub(crate) fn poll_interval(&self) -> Duration {
        (self.block_time() / 4).clamp(Duration::from_millis(50), Duration::from_millis(250))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn block_time_is_measured_unless_it_is_configured() {
        let chain = BlockTime::new(None);
        assert_eq!(chain.poll_interval(), Duration::from_millis(250));
        chain.observe(100);
        tokio::time::advance(Duration::from_secs(4)).await;
        chain.observe(120);
        assert_eq!(chain.block_time(), Duration::from_millis(200));
        assert_eq!(chain.poll_interval(), Duration::from_millis(50));
        assert_eq!(BlockTime::new(Some(Duration::from_secs(1))).poll_interval(), Duration::from_millis(250));
    }

    #[tokio::test(start_paused = true)]
    async fn chain_that_stood_still_does_not_count_as_slow() {
        let chain = BlockTime::new(None);
        chain.observe(100);
        tokio::time::advance(Duration::from_secs(3_600)).await;
        chain.observe(101);
        assert_eq!(chain.block_time(), SLOWEST);
        tokio::time::advance(Duration::from_secs(4)).await;
        chain.observe(103);
        assert_eq!(chain.block_time(), Duration::from_secs(2));
    }

    #[tokio::test(start_paused = true)]
    async fn change_of_block_time_is_noticed_within_a_minute() {
        let chain = BlockTime::new(None);
        chain.observe(100);
        tokio::time::advance(BASELINE - Duration::from_millis(1)).await;
        chain.observe(200);
        assert_eq!(chain.block_time(), ASSUMED);
        tokio::time::advance(Duration::from_millis(1)).await;
        chain.observe(200);
        assert_eq!(chain.block_time(), Duration::from_millis(20));
        // Only blocks after the minute count.
        tokio::time::advance(30 * BASELINE).await;
        chain.observe(230);
        tokio::time::advance(Duration::from_secs(20)).await;
        chain.observe(240);
        assert_eq!(chain.block_time(), Duration::from_secs(2));
    }
}
