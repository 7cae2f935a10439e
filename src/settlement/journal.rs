//! The ledger as a facilitator writes it: under the number of its process, and with retries.

use std::sync::Arc;

#[cfg(feature = "onchain")]
use alloy_primitives::B256;

use crate::{
    clock::Clock,
    ledger::{
        Fulfilment, Ledger, LedgerError, MemoryLedger, Record, SettlementStep, Settling, measured, settle_with_retries,
    },
    payment::PaymentKey,
};
#[cfg(feature = "onchain")]
use crate::{
    ledger::{Listing, SettlementState},
    network::Network,
    payment::SettlementOutcome,
};

/// The shortest pause between two reconciliations of one payment, in seconds.
pub(crate) const SHORTEST_PAUSE: u64 = 2;
/// How long after its time what was signed for a payment is of no use in any block that can become final, in seconds.
const LONG_OVER: u64 = 3_600;

/// A facilitator's ledger, with the clock and the number of this process among those that share the ledger.
#[derive(Clone)]
pub(crate) struct Journal {
    ledger: Arc<dyn Ledger>,
    clock: Arc<dyn Clock>,
    process_id: u64,
}

impl Journal {
    /// Uses this ledger, or else one in memory, under a random process number. Returns `None` if the operating system has no
    /// randomness.
    pub(crate) fn new(ledger: Option<Arc<dyn Ledger>>, clock: Arc<dyn Clock>) -> Option<Self> {
        let ledger = measured(ledger.unwrap_or_else(|| Arc::new(MemoryLedger::new())));
        Some(Self { ledger, clock, process_id: getrandom::u64().ok()?.max(1) })
    }

    pub(crate) const fn ledger(&self) -> &Arc<dyn Ledger> {
        &self.ledger
    }

    #[cfg(feature = "onchain")]
    pub(crate) const fn clock(&self) -> &Arc<dyn Clock> {
        &self.clock
    }

    /// Returns the time, in seconds since the Unix epoch.
    pub(crate) fn now(&self) -> u64 {
        self.clock.now()
    }

    pub(crate) const fn process_id(&self) -> u64 {
        self.process_id
    }

    /// Claims an open payment for this process, for a quarter of the payment's age, within two seconds and `longest`. Returns `false`
    /// if another process has it, or if it is not open any more.
    ///
    /// What was signed for it can have expired long ago, and its payer can have made its outcome unknowable. It is looked at ever less often.
    pub(crate) async fn claim(&self, record: &Record, longest: u64) -> Result<bool, LedgerError> {
        let now = self.now();
        let age = now.saturating_sub(record.reserved_at);
        let is_long_over = record.terms.is_over(&record.authorization, now.saturating_sub(LONG_OVER));
        let longest = if is_long_over { u64::MAX } else { longest };
        let until = now.saturating_add((age / 4).clamp(SHORTEST_PAUSE, longest));
        let claim = SettlementStep::Claim(Settling { by: self.process_id, until });
        match self.ledger.advance(&record.key, &claim.into()).await {
            Ok(_) => Ok(true),
            Err(LedgerError::InvalidTransition(_) | LedgerError::NotFound) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Takes a step of settlement, unless the ledger knows as much already.
    pub(crate) async fn try_record(&self, key: &PaymentKey, step: SettlementStep) -> Result<(), LedgerError> {
        match settle_with_retries(&*self.ledger, key, &step.into()).await {
            Ok(_) | Err(LedgerError::NotFound) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Returns `true` if the payment may be settled without being asked: the payer has the response, or can have it. A payer that was
    /// told that settling failed may have paid again, and is not charged.
    pub(crate) async fn is_owed(&self, record: &Record) -> Result<bool, LedgerError> {
        Ok(match record.fulfilment {
            Fulfilment::Delivered => true,
            // Deferred, or settled once and reorged since: the response was there to be had.
            Fulfilment::Produced if record.deferred || record.settled_at.is_some() => true,
            Fulfilment::Produced => record.last_failure.is_none() && self.ledger.response(&record.key).await?.is_some(),
            Fulfilment::Reserved | Fulfilment::Working | Fulfilment::Released => false,
        })
    }
}

#[cfg(feature = "onchain")]
impl Journal {
    pub(crate) async fn get(&self, key: &PaymentKey) -> Result<Option<Record>, LedgerError> {
        self.ledger.get(key).await
    }

    /// Shortens a claim, so that the payment is reconciled again with the next block.
    pub(crate) async fn claim_briefly(&self, key: &PaymentKey) {
        let until = self.now().saturating_add(SHORTEST_PAUSE);
        self.record(key, SettlementStep::Claim(Settling { by: self.process_id, until })).await;
    }

    /// Records an outcome, unless the ledger knows as much already. `known_transactions` were on record when it was found out.
    pub(crate) async fn record_outcome(
        &self,
        key: &PaymentKey,
        outcome: &SettlementOutcome,
        known_transactions: &[B256],
    ) {
        self.record(key, SettlementStep::of(outcome, self.process_id, known_transactions)).await;
    }

    /// Takes a step of settlement, unless the ledger knows as much already. If the ledger fails for long, the step is left to
    /// reconciliation.
    pub(crate) async fn record(&self, key: &PaymentKey, step: SettlementStep) {
        if let Err(error) = self.try_record(key, step).await {
            tracing::error!(%error, payer = %key.payer, nonce = %key.nonce, "an outcome was not recorded");
        }
    }

    /// Lists a page of settled payments that are not final, after this one.
    pub(crate) async fn settled(
        &self,
        network: Network,
        up_to_block: Option<u64>,
        after: Option<PaymentKey>,
        limit: usize,
    ) -> Result<Vec<Record>, LedgerError> {
        let settled = Listing::of([SettlementState::Settled]);
        self.ledger.list(&Listing { network: Some(network), up_to_block, after, limit, ..settled }).await
    }
}
