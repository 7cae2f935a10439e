//! Releasing a response before it is paid for, to payers that have paid before.

use alloy_primitives::B256;

use super::receipt::settlement_of;
use crate::{
    ledger::{CreditLimit, Record},
    payment::PaymentKey,
    protocol::{SettlementResponse, Verbatim, payment_status},
    usdc::Usdc,
};

/// Whose payments are settled after the response was released, and how much may be owed at a time;
/// [`deferred`](super::RequirePaymentLayerBuilder::deferred).
///
/// The amounts are bounds on what can be lost: a payer that spends its balance elsewhere before it is settled costs at most
/// `per_payer`, and all of them together `total`. What is never paid takes from both until its record ages out, some time after
/// the payment could last be made.
///
/// ```
/// use tower_x402::{Usdc, server::DeferredPolicy};
///
/// let policy = DeferredPolicy { per_payer: Usdc::from_atomic(20_000), ..DeferredPolicy::default() };
/// assert_eq!((policy.total, policy.history), (Usdc::from_atomic(1_000_000), 3));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeferredPolicy {
    /// What all payers together may owe in the ledger, on all networks; default $1.
    pub total: Usdc,
    /// What one payer may owe; default $0.05.
    pub per_payer: Usdc,
    /// How many payments of the payer must be settled here already, of those that the ledger still has on record; default 3,
    /// at least 1.
    pub history: u32,
}

impl Default for DeferredPolicy {
    fn default() -> Self {
        Self { total: Usdc::from_atomic(1_000_000), per_payer: Usdc::from_atomic(50_000), history: 3 }
    }
}

impl DeferredPolicy {
    pub(super) fn limit(&self) -> CreditLimit {
        CreditLimit {
            total: self.total.into(),
            per_payer: self.per_payer.into(),
            // Whoever never paid is not known.
            history: self.history.max(1),
        }
    }
}

/// What the client is told of a payment that is settled after it has its response: success without a transaction, and the
/// payment's name. `None` where it owes nothing yet.
pub(super) fn settled_later(record: &Record, payer: &str, status_url: Option<&str>) -> Option<SettlementResponse> {
    let PaymentKey { network, asset, payer: from, nonce } = record.key;
    let pending = || payment_status::pending(network, asset, from, nonce, status_url);
    let extensions = record.deferred.then(|| Verbatim::of(&pending()).ok())?;
    Some(SettlementResponse { transaction: String::new(), extensions, ..settlement_of(record, payer, Ok(B256::ZERO)) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_policy_gives_credit_to_payers_that_never_paid() {
        for (history, needed) in [(0, 1), (1, 1), (2, 2), (u32::MAX, u32::MAX)] {
            assert_eq!(DeferredPolicy { history, ..DeferredPolicy::default() }.limit().history, needed);
        }
    }
}
