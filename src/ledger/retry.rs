//! Pauses between tries, and steps of a ledger that may fail for a moment.

use std::time::Duration;

use tokio::time::{Instant, sleep};

#[cfg(any(feature = "onchain", feature = "remote", feature = "server"))]
use super::{Ledger, LedgerError, PaymentStep, Record};
#[cfg(any(feature = "onchain", feature = "remote", feature = "server"))]
use crate::payment::PaymentKey;

/// The pauses between tries, each twice as long as the one before.
#[derive(Debug)]
pub(crate) struct Pauses {
    next: Duration,
    longest: Duration,
    until: Instant,
}

impl Pauses {
    /// Makes pauses from `first` on, up to five seconds. No try begins later than `within` from now.
    pub(crate) fn new(first: Duration, within: Duration) -> Self {
        Self { next: first, longest: Duration::from_secs(5), until: Instant::now() + within }
    }

    /// Sets the longest pause.
    #[cfg(any(feature = "remote", feature = "postgres"))]
    pub(crate) const fn up_to(mut self, longest: Duration) -> Self {
        self.longest = longest;
        self
    }

    /// Returns the next pause.
    #[cfg(feature = "remote")]
    pub(crate) const fn next(&self) -> Duration {
        self.next
    }

    /// Waits before the next try. Returns `false`, at once, if there is to be none.
    pub(crate) async fn wait(&mut self) -> bool {
        self.wait_for(self.next).await
    }

    /// As [`wait`](Self::wait), but for this time, which somebody named.
    pub(crate) async fn wait_for(&mut self, pause: Duration) -> bool {
        self.next = (self.next * 2).min(self.longest);
        if Instant::now() + pause > self.until {
            return false;
        }
        sleep(pause).await;
        true
    }
}

/// Takes a step of settlement. If the backend fails, tries again, five times within two seconds: a fact about the chain stays true.
///
/// Returns the record after the step, or `None` if the record's state does not allow the step: somebody else knows as much or more.
///
/// # Errors
/// The ledger's last error, if the step was not taken. Reconciliation finds the same fact later.
#[cfg(any(feature = "onchain", feature = "remote", feature = "server"))]
pub(crate) async fn settle_with_retries(
    ledger: &dyn Ledger,
    key: &PaymentKey,
    step: &PaymentStep,
) -> Result<Option<Record>, LedgerError> {
    let mut pauses = Pauses::new(Duration::from_millis(100), Duration::from_secs(2));
    loop {
        let error = match ledger.advance(key, step).await {
            Ok(record) => return Ok(Some(record)),
            Err(LedgerError::InvalidTransition(_)) => return Ok(None),
            Err(error) => error,
        };
        if !matches!(error, LedgerError::Backend(_)) || !pauses.wait().await {
            return Err(error);
        }
        tracing::warn!(%error, payer = %key.payer, nonce = %key.nonce, "the ledger did not take an outcome");
    }
}
