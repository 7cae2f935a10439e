//! Recording facts about the chain in a ledger that may fail for a moment.

use std::time::Duration;

use super::{Ledger, LedgerError, SettlementStep};
use crate::payment::PaymentKey;

/// The number of tries.
const TRIES: u32 = 5;

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
    let mut tries = 0_u32;
    loop {
        let error = match ledger.settle(key, step).await {
            Ok(()) => return Ok(true),
            Err(LedgerError::InvalidTransition(_)) => return Ok(false),
            Err(error) => error,
        };
        tries += 1;
        if tries == TRIES || !matches!(error, LedgerError::Backend(_)) {
            return Err(error);
        }
        tracing::warn!(%error, tries, payer = %key.payer, nonce = %key.nonce, "the ledger did not take an outcome");
        tokio::time::sleep(Duration::from_millis(50 << tries)).await;
    }
}
