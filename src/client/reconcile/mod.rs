//! Reconciliation: finds out what became of payments without a proven outcome.

#[cfg(feature = "onchain")]
mod chain;
#[cfg(feature = "reqwest")]
mod servers;

use alloy_primitives::B256;

#[cfg(feature = "onchain")]
pub(super) use chain::REQUEST_TIMEOUT;
#[cfg(feature = "onchain")]
pub use chain::{ReconcileError, reconcile};
#[cfg(feature = "reqwest")]
pub use servers::reconcile_with_servers;

use super::{Budget, JournalEntry, PaymentOutcome, journal::Record, sums::add_to};
use crate::usdc::Usdc;

/// The result of a reconciliation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Reconciliation {
    /// The number of payments that were made. They are now spent.
    pub paid: usize,
    /// The sum of the payments that were made.
    pub spent: Usdc,
    /// The number of payments that can never be made any more. They are no longer reserved.
    pub void: usize,
    /// The sum of the payments that can never be made.
    pub released: Usdc,
    /// The number of payments that stay open.
    pub open: usize,
    /// The number of open payments that could not be looked up. Try again, or with another node.
    pub unseen: usize,
}

/// A fact that closes a payment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Proof {
    Paid {
        transaction: B256,
        /// What was charged of a permit, if that is known.
        charged: Option<Usdc>,
    },
    /// Only the chain can prove this.
    #[cfg_attr(not(feature = "onchain"), expect(dead_code))]
    Void,
}

impl Reconciliation {
    /// Counts a payment that could not be looked up.
    #[cfg(feature = "onchain")]
    const fn count_unseen(&mut self) {
        self.open += 1;
        self.unseen += 1;
    }

    /// Records what is proven about a payment in the budget, and counts it.
    async fn record(&mut self, budget: &Budget, entry: &JournalEntry, proof: Option<Proof>) {
        let Some(proof) = proof else {
            self.open += 1;
            return;
        };
        // If the answer to its request has closed it in the meantime, it was counted there.
        if !budget.resolve(proof.into_record(entry)).await {
            return;
        }
        let (count, sum, amount) = match proof {
            Proof::Paid { charged, .. } => (&mut self.paid, &mut self.spent, charged.unwrap_or(entry.amount)),
            Proof::Void => (&mut self.void, &mut self.released, entry.amount),
        };
        *count += 1;
        add_to(sum, amount);
    }
}

impl Proof {
    fn into_record(self, entry: &JournalEntry) -> Record {
        let nonce = entry.nonce;
        match self {
            Self::Paid { transaction, charged } => {
                Record::Outcome { nonce, outcome: PaymentOutcome::Settled, transaction: Some(transaction), charged }
            }
            Self::Void => Record::Void { nonce },
        }
    }
}
