//! Steps of a ledger that may fail for a moment.

use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::{Ledger, LedgerError, SettlementStep};
use crate::payment::PaymentKey;

/// The longest pause between two tries.
const LONGEST: Duration = Duration::from_secs(5);

/// The pauses between tries, each twice as long as the one before.
pub(crate) struct Pauses {
    next: Duration,
    until: Instant,
}

impl Pauses {
    /// Makes pauses from `first` on. No try begins later than `within` from now.
    pub(crate) fn new(first: Duration, within: Duration) -> Self {
        Self { next: first, until: Instant::now() + within }
    }

    /// Waits before the next try. Returns `false`, at once, if there is to be none.
    pub(crate) async fn wait(&mut self) -> bool {
        if Instant::now() + self.next > self.until {
            return false;
        }
        sleep(self.next).await;
        self.next = (self.next * 2).min(LONGEST);
        true
    }
}

/// Takes a step of settlement. If the backend fails, tries again, five times within two seconds: a fact about the chain stays true.
///
/// Returns `true` if the step was taken, or `false` if the record's state does not allow it: somebody else knows as much or more.
///
/// # Errors
/// The ledger's last error, if the step was not taken. Reconciliation finds the same fact later.
pub(crate) async fn settle_with_retries(
    ledger: &dyn Ledger,
    key: &PaymentKey,
    step: &SettlementStep,
) -> Result<bool, LedgerError> {
    let mut pauses = Pauses::new(Duration::from_millis(100), Duration::from_secs(2));
    loop {
        let error = match ledger.settle(key, step).await {
            Ok(()) => return Ok(true),
            Err(LedgerError::InvalidTransition(_)) => return Ok(false),
            Err(error) => error,
        };
        if !matches!(error, LedgerError::Backend(_)) || !pauses.wait().await {
            return Err(error);
        }
        tracing::warn!(%error, payer = %key.payer, nonce = %key.nonce, "the ledger did not take an outcome");
    }
}
