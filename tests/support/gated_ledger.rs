//! A ledger that holds one kind of call back until the test lets it go on, so that what other processes do meanwhile comes first.

use std::sync::Arc;

use async_trait::async_trait;
use tokio::sync::Semaphore;
use tower_x402::{
    ledger::{
        Counts, FulfilmentStep, Lease, Ledger, LedgerError, Listing, Record, Reservation, Sender, SettlementStep,
        StoredResponse, Submission,
    },
    payment::PaymentKey,
};

/// Which calls wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Held {
    /// [`Ledger::submit`].
    Submissions,
    /// [`SettlementStep::Claim`].
    Taking,
    /// [`SettlementStep::Fail`].
    Failures,
}

/// One process's view of a ledger, with a gate before some of its calls.
pub struct GatedLedger {
    inner: Arc<dyn Ledger>,
    held: Held,
    arrived: Semaphore,
    open: Semaphore,
}

impl GatedLedger {
    /// Closes the gate before these calls.
    pub fn over(inner: Arc<dyn Ledger>, held: Held) -> Arc<Self> {
        Arc::new(Self { inner, held, arrived: Semaphore::new(0), open: Semaphore::new(0) })
    }

    /// Returns when a call waits at the gate.
    pub async fn until_one_waits(&self) {
        let arrived = tokio::time::timeout(std::time::Duration::from_secs(30), self.arrived.acquire()).await;
        arrived.expect("a call comes to the gate").expect("never closed").forget();
    }

    /// Opens the gate for good.
    pub fn open(&self) {
        self.open.close();
    }

    async fn pass(&self, call: Option<Held>) {
        if call == Some(self.held) {
            self.arrived.add_permits(1);
            // It is open once it is closed as a semaphore.
            let _ = self.open.acquire().await;
        }
    }
}

#[async_trait]
impl Ledger for GatedLedger {
    async fn reserve(&self, record: &Record) -> Result<Reservation, LedgerError> {
        self.inner.reserve(record).await
    }

    async fn get(&self, key: &PaymentKey) -> Result<Option<Record>, LedgerError> {
        self.inner.get(key).await
    }

    async fn take_over(&self, key: &PaymentKey, seen: u64, now: u64, until: u64) -> Result<Option<Lease>, LedgerError> {
        self.inner.take_over(key, seen, now, until).await
    }

    async fn fulfil(&self, lease: &Lease, step: &FulfilmentStep) -> Result<(), LedgerError> {
        self.inner.fulfil(lease, step).await
    }

    async fn settle(&self, key: &PaymentKey, step: &SettlementStep) -> Result<(), LedgerError> {
        self.pass(match step {
            SettlementStep::Claim(_) => Some(Held::Taking),
            SettlementStep::Fail { .. } => Some(Held::Failures),
            _ => None,
        })
        .await;
        self.inner.settle(key, step).await
    }

    async fn discard(&self, lease: &Lease) -> Result<(), LedgerError> {
        self.inner.discard(lease).await
    }

    async fn store_response(&self, key: &PaymentKey, response: StoredResponse) -> Result<(), LedgerError> {
        self.inner.store_response(key, response).await
    }

    async fn response(&self, key: &PaymentKey) -> Result<Option<Arc<StoredResponse>>, LedgerError> {
        self.inner.response(key).await
    }

    async fn count_replay(&self, key: &PaymentKey) -> Result<u32, LedgerError> {
        self.inner.count_replay(key).await
    }

    async fn submit(&self, submission: Submission) -> Result<(), LedgerError> {
        // What only fills a gap in the nonces is nobody's payment.
        self.pass((!submission.payments.is_empty()).then_some(Held::Submissions)).await;
        self.inner.submit(submission).await
    }

    async fn free_nonce(&self, sender: &Sender, nonce: u64, by: u64) -> Result<(), LedgerError> {
        self.inner.free_nonce(sender, nonce, by).await
    }

    async fn forget_nonces(&self, sender: &Sender, below: u64) -> Result<(), LedgerError> {
        self.inner.forget_nonces(sender, below).await
    }

    async fn submissions(&self, sender: &Sender, from: u64) -> Result<Vec<Submission>, LedgerError> {
        self.inner.submissions(sender, from).await
    }

    async fn list(&self, listing: &Listing) -> Result<Vec<Record>, LedgerError> {
        self.inner.list(listing).await
    }

    async fn counts(&self) -> Result<Counts, LedgerError> {
        self.inner.counts().await
    }

    fn response_limit(&self) -> usize {
        self.inner.response_limit()
    }
}
