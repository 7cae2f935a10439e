//! Asking a ledger for payments by their state.

use super::{Fulfilment, Record, SettlementState};
use crate::{network::Network, payment::PaymentKey};

/// Which payments to list, a page at a time; [`Ledger::list`](super::Ledger::list).
///
/// ```
/// # async fn example(ledger: &dyn tower_x402::ledger::Ledger) -> Result<(), tower_x402::ledger::LedgerError> {
/// use tower_x402::ledger::{Listing, SettlementState};
///
/// let mut open = Listing::of([SettlementState::Due, SettlementState::Submitted, SettlementState::Unknown]);
/// loop {
///     let page = ledger.list(&open).await?;
///     let Some(last) = page.last() else { break };
///     open.after = Some(last.key);
///     for record in page {
///         println!("{} owes {}", record.key.payer, record.authorization.value);
///     }
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Listing {
    /// On this chain only.
    pub network: Option<Network>,
    /// In one of these states of settlement; empty for all.
    pub settlement: Vec<SettlementState>,
    /// In one of these states of work; empty for all.
    pub fulfilment: Vec<Fulfilment>,
    /// Only what nobody looks after at this time, in Unix seconds: neither a lease nor a settlement runs then.
    pub idle_at: Option<u64>,
    /// Only what was settled in this block or an earlier one.
    pub up_to_block: Option<u64>,
    /// Only what comes after this payment in the order of [`PaymentKey`].
    pub after: Option<PaymentKey>,
    /// How many at most; 256 unless set.
    pub limit: usize,
}

impl Listing {
    /// All payments in one of these states of settlement.
    pub fn of(settlement: impl IntoIterator<Item = SettlementState>) -> Self {
        Self { settlement: settlement.into_iter().collect(), ..Self::default() }
    }

    /// Whether a record belongs on the list, its place in the order aside.
    pub fn holds(&self, record: &Record) -> bool {
        let is_idle = |at| {
            !record.is_leased(at)
                && (record.settlement.paid_by().is_some() || record.lease_until < at)
                && record.settling.is_none_or(|settling| settling.until < at)
        };
        self.network.is_none_or(|network| record.key.network == network)
            && (self.settlement.is_empty() || self.settlement.contains(&record.settlement.state()))
            && (self.fulfilment.is_empty() || self.fulfilment.contains(&record.fulfilment))
            && self.idle_at.is_none_or(is_idle)
            && self.up_to_block.is_none_or(|up_to| record.settlement.block().is_some_and(|block| block <= up_to))
    }
}

impl Default for Listing {
    fn default() -> Self {
        Self {
            network: None,
            settlement: Vec::new(),
            fulfilment: Vec::new(),
            idle_at: None,
            up_to_block: None,
            after: None,
            limit: 256,
        }
    }
}
