//! A ledger that holds one kind of call back until the test lets it go on, so that what other processes do meanwhile comes first.

use std::{future::Future, sync::Arc, time::Duration};

use tokio::{sync::Semaphore, time::timeout};
use tower_x402::ledger::{Ledger, LedgerError, SettlementStep, channels::ChannelLedger};

use super::around_ledger::{Around, AroundChannels, AroundLedger, Call};

/// The calls that wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Held {
    /// [`Ledger::submit`] of a transaction with payments: one without only fills a gap in the nonces.
    Submissions,
    /// [`SettlementStep::Claim`].
    Taking,
    /// [`SettlementStep::Fail`].
    Failures,
    /// The reading of stored responses to requests by voucher.
    ChannelResponses,
}

impl Held {
    fn includes(self, call: Call<'_>) -> bool {
        match (self, call) {
            (Self::Submissions, Call::Submit(submission)) => !submission.payments.is_empty(),
            (Self::Taking, Call::Settle(SettlementStep::Claim(_)))
            | (Self::Failures, Call::Settle(SettlementStep::Fail { .. }))
            | (Self::ChannelResponses, Call::Other("channel_response")) => true,
            _ => false,
        }
    }
}

/// The gate before some of the calls of a [`GatedLedger`], or of [`GatedChannels`].
pub struct Gate {
    held: Held,
    arrived: Semaphore,
    open: Semaphore,
}

pub type GatedLedger = AroundLedger<Gate>;

impl GatedLedger {
    /// Returns one process's view of a ledger, with a closed gate before these calls.
    pub fn over(ledger: Arc<dyn Ledger>, held: Held) -> Arc<Self> {
        Self::new(ledger, Gate::before(held))
    }

    /// Returns when a call waits at the gate.
    pub async fn until_one_waits(&self) {
        self.around.until_one_waits().await;
    }

    /// Opens the gate for good.
    pub fn open(&self) {
        self.around.open();
    }
}

pub type GatedChannels = AroundChannels<Gate>;

impl GatedChannels {
    /// Returns one process's view of the books of channels, with a closed gate before these calls.
    pub fn over(ledger: Arc<dyn ChannelLedger>, held: Held) -> Arc<Self> {
        Self::new(ledger, Gate::before(held))
    }
}

impl Gate {
    fn before(held: Held) -> Self {
        Self { held, arrived: Semaphore::new(0), open: Semaphore::new(0) }
    }

    /// Returns when a call waits at the gate.
    pub async fn until_one_waits(&self) {
        let arrived = timeout(Duration::from_secs(30), self.arrived.acquire()).await;
        arrived.expect("a call comes to the gate").expect("never closed").forget();
    }

    /// Opens the gate for good.
    pub fn open(&self) {
        self.open.close();
    }
}

impl Around for Gate {
    async fn around<T: Send>(
        &self,
        call: Call<'_>,
        work: impl Future<Output = Result<T, LedgerError>> + Send,
    ) -> Result<T, LedgerError> {
        if self.held.includes(call) {
            self.arrived.add_permits(1);
            // It is open once it is closed as a semaphore.
            let _ = self.open.acquire().await;
        }
        work.await
    }
}
