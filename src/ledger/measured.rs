//! A ledger that times the calls of another one.

use std::{sync::Arc, time::Instant};

use async_trait::async_trait;

use super::{
    Counts, JournaledTransaction, Lease, Ledger, LedgerError, Listing, PaymentStep, Record, Reservation,
    ResponseLedger, Sender, StoredResponse, TransactionLedger,
};
use crate::{payment::PaymentKey, telemetry::names};

/// Reports how long each call of another ledger takes, and whether its store failed.
pub(super) struct MeasuredLedger(pub(super) Arc<dyn Ledger>);

// A macro, so that the operation is a literal and its metric key is made at compile time.
macro_rules! timed {
    ($operation:literal, $call:expr) => {{
        let started = Instant::now();
        let result = $call.await;
        ::metrics::histogram!(names::LEDGER, "operation" => $operation).record(started.elapsed());
        if let Err(LedgerError::Backend(_)) = &result {
            ::metrics::counter!(names::LEDGER_ERRORS, "operation" => $operation).increment(1);
        }
        result
    }};
}

#[async_trait]
impl Ledger for MeasuredLedger {
    async fn reserve(&self, record: &Record) -> Result<Reservation, LedgerError> {
        timed!("reserve", self.0.reserve(record))
    }

    async fn get(&self, key: &PaymentKey) -> Result<Option<Record>, LedgerError> {
        timed!("get", self.0.get(key))
    }

    async fn advance(&self, key: &PaymentKey, step: &PaymentStep) -> Result<Record, LedgerError> {
        match step {
            PaymentStep::TakeOver { .. } => timed!("take_over", self.0.advance(key, step)),
            PaymentStep::Fulfil { .. } => timed!("fulfil", self.0.advance(key, step)),
            PaymentStep::Settle(_) => timed!("settle", self.0.advance(key, step)),
            PaymentStep::Replay => timed!("count_replay", self.0.advance(key, step)),
        }
    }

    async fn discard(&self, lease: &Lease) -> Result<(), LedgerError> {
        timed!("discard", self.0.discard(lease))
    }

    async fn list(&self, listing: &Listing) -> Result<Vec<Record>, LedgerError> {
        timed!("list", self.0.list(listing))
    }

    async fn counts(&self) -> Result<Counts, LedgerError> {
        timed!("counts", self.0.counts())
    }
}

#[async_trait]
impl ResponseLedger for MeasuredLedger {
    async fn store_response(&self, key: &PaymentKey, response: StoredResponse) -> Result<(), LedgerError> {
        timed!("store_response", self.0.store_response(key, response))
    }

    async fn response(&self, key: &PaymentKey) -> Result<Option<StoredResponse>, LedgerError> {
        timed!("response", self.0.response(key))
    }

    fn response_limit(&self) -> usize {
        self.0.response_limit()
    }
}

#[async_trait]
impl TransactionLedger for MeasuredLedger {
    async fn submit(&self, transaction: JournaledTransaction) -> Result<(), LedgerError> {
        timed!("submit", self.0.submit(transaction))
    }

    async fn free_nonce(&self, sender: &Sender, nonce: u64, by: u64) -> Result<(), LedgerError> {
        timed!("free_nonce", self.0.free_nonce(sender, nonce, by))
    }

    async fn forget_nonces(&self, sender: &Sender, below: u64) -> Result<(), LedgerError> {
        timed!("forget_nonces", self.0.forget_nonces(sender, below))
    }

    async fn submissions(&self, sender: &Sender, from: u64) -> Result<Vec<JournaledTransaction>, LedgerError> {
        timed!("submissions", self.0.submissions(sender, from))
    }
}
