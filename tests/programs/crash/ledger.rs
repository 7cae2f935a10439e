//! A ledger with a point before, within and after every call.

use std::sync::Arc;

use async_trait::async_trait;
use tower_x402::{
    ledger::{
        Counts, FulfilmentStep, Lease, Ledger, LedgerError, Listing, Record, Reservation, Sender, SettlementStep,
        StoredResponse, Submission,
    },
    payment::PaymentKey,
};

use super::points::Points;

pub(crate) struct Watched {
    pub(crate) ledger: Arc<dyn Ledger>,
    pub(crate) points: Arc<Points>,
}

/// The name of a step is that of its variant, so that a new one is a point by itself.
fn variant(step: &impl std::fmt::Debug) -> String {
    format!("{step:?}").chars().take_while(|c| c.is_alphanumeric()).collect()
}

#[async_trait]
impl Ledger for Watched {
    async fn reserve(&self, record: &Record) -> Result<Reservation, LedgerError> {
        self.points.around("ledger reserve", self.ledger.reserve(record)).await
    }

    async fn get(&self, key: &PaymentKey) -> Result<Option<Record>, LedgerError> {
        self.points.around("ledger get", self.ledger.get(key)).await
    }

    async fn take_over(&self, key: &PaymentKey, seen: u64, now: u64, until: u64) -> Result<Option<Lease>, LedgerError> {
        self.points.around("ledger take_over", self.ledger.take_over(key, seen, now, until)).await
    }

    async fn fulfil(&self, lease: &Lease, step: &FulfilmentStep) -> Result<(), LedgerError> {
        let name = format!("ledger fulfil {}", variant(&step));
        self.points.around(&name, self.ledger.fulfil(lease, step)).await
    }

    async fn settle(&self, key: &PaymentKey, step: &SettlementStep) -> Result<(), LedgerError> {
        let name = format!("ledger settle {}", variant(&step));
        self.points.around(&name, self.ledger.settle(key, step)).await
    }

    async fn discard(&self, lease: &Lease) -> Result<(), LedgerError> {
        self.points.around("ledger discard", self.ledger.discard(lease)).await
    }

    async fn store_response(&self, key: &PaymentKey, response: StoredResponse) -> Result<(), LedgerError> {
        self.points.around("ledger store_response", self.ledger.store_response(key, response)).await
    }

    async fn response(&self, key: &PaymentKey) -> Result<Option<Arc<StoredResponse>>, LedgerError> {
        self.points.around("ledger response", self.ledger.response(key)).await
    }

    async fn count_replay(&self, key: &PaymentKey) -> Result<u32, LedgerError> {
        self.points.around("ledger count_replay", self.ledger.count_replay(key)).await
    }

    async fn submit(&self, submission: Submission) -> Result<(), LedgerError> {
        self.points.around("ledger submit", self.ledger.submit(submission)).await
    }

    async fn free_nonce(&self, sender: &Sender, nonce: u64, by: u64) -> Result<(), LedgerError> {
        self.points.around("ledger free_nonce", self.ledger.free_nonce(sender, nonce, by)).await
    }

    async fn forget_nonces(&self, sender: &Sender, below: u64) -> Result<(), LedgerError> {
        self.points.around("ledger forget_nonces", self.ledger.forget_nonces(sender, below)).await
    }

    async fn submissions(&self, sender: &Sender, from: u64) -> Result<Vec<Submission>, LedgerError> {
        self.points.around("ledger submissions", self.ledger.submissions(sender, from)).await
    }

    async fn list(&self, listing: &Listing) -> Result<Vec<Record>, LedgerError> {
        self.points.around("ledger list", self.ledger.list(listing)).await
    }

    async fn counts(&self) -> Result<Counts, LedgerError> {
        self.points.around("ledger counts", self.ledger.counts()).await
    }

    fn response_limit(&self) -> usize {
        self.ledger.response_limit()
    }
}
