//! What became of payments that were open.

use alloy_primitives::B256;

use super::{Budget, JournalEntry, Outcome, journal_record::Record};
use crate::usdc::Usdc;

/// What a look at open payments resolved.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Reconciliation {
    /// Payments that were made; they are now spent.
    pub paid: usize,
    /// Their sum.
    pub spent: Usdc,
    /// Payments that can never be made any more; they are no longer reserved.
    pub void: usize,
    /// Their sum.
    pub released: Usdc,
    /// Payments that stay open: nobody who was asked can tell yet, or is to be believed.
    pub open: usize,
    /// Those of them that could not be looked at; ask again, or somebody else.
    pub unseen: usize,
}

/// What closes a payment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Proof {
    Paid {
        transaction: B256,
    },
    /// Only the chain can prove that.
    #[cfg_attr(not(feature = "onchain"), expect(dead_code))]
    Void,
}

impl Reconciliation {
    /// Enters a payment that could not be looked at.
    #[cfg(feature = "onchain")]
    pub(super) const fn enter_unseen(&mut self) {
        self.open += 1;
        self.unseen += 1;
    }

    /// Enters what was found out about a payment in the budget's books and here.
    pub(super) async fn enter(&mut self, budget: &Budget, entry: &JournalEntry, proof: Option<Proof>) {
        let Some(proof) = proof else {
            self.open += 1;
            return;
        };
        // Closed in the meantime by an answer to the request itself: it is counted there.
        if !budget.resolve(proof.record(entry)).await {
            return;
        }
        let (count, sum) = match proof {
            Proof::Paid { .. } => (&mut self.paid, &mut self.spent),
            Proof::Void => (&mut self.void, &mut self.released),
        };
        *count += 1;
        *sum = sum.checked_add(entry.amount).unwrap_or(Usdc::MAX);
    }
}

impl Proof {
    fn record(self, entry: &JournalEntry) -> Record {
        match self {
            Self::Paid { transaction } => {
                let (outcome, transaction) = (Outcome::Settled, Some(transaction));
                Record::Outcome { nonce: entry.nonce, outcome, transaction }
            }
            Self::Void => Record::Void { nonce: entry.nonce },
        }
    }
}
