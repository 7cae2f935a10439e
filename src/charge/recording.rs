//! Where a response is kept that streams to its payer, and what its end means.

use std::{sync::Arc, time::Duration};

use super::in_progress::InProgress;
use crate::{
    ledger::{FulfilmentStep, Lease, Ledger, LedgerError, Pauses, StoredResponse, channels::ChannelLedger},
    payment::PaymentKey,
};

/// For how long a ledger that fails is asked to keep a response.
const KEEP_FOR: Duration = Duration::from_secs(60);

/// Where the copy of a response goes that streams.
pub(crate) struct Recording {
    pub(crate) ledger: RecordingLedger,
    /// Copies of the payment wait until this is dropped.
    pub(crate) in_progress: Option<InProgress>,
    /// When the work was done, in Unix seconds.
    pub(crate) now: u64,
}

/// The ledger that keeps it, and what it pays for.
pub(crate) enum RecordingLedger {
    Payment(Arc<dyn Ledger>, Lease),
    /// A request that was charged by voucher.
    Channel(Arc<dyn ChannelLedger>, PaymentKey),
}

impl Recording {
    /// Returns the size of the largest response that is kept, in bytes.
    pub(crate) fn limit(&self) -> usize {
        match &self.ledger {
            RecordingLedger::Payment(ledger, _) => ledger.response_limit(),
            RecordingLedger::Channel(ledger, _) => ledger.channel_response_limit(),
        }
    }

    /// Ends the stream: keeps the response if it is whole, and notes whether the payer got it.
    pub(crate) async fn end(self, response: Option<StoredResponse>, is_delivered: bool) {
        let is_kept = match response {
            Some(response) => self.ledger.keep(response).await,
            None => false,
        };
        match self.ledger {
            RecordingLedger::Payment(ledger, lease) if is_delivered => record_delivery(ledger.as_ref(), &lease).await,
            // Neither delivered nor kept: nobody is to be charged for it, nor to wait for it, so the lease ends.
            RecordingLedger::Payment(ledger, lease) if !is_kept => {
                let _ = ledger.take_over(&lease.key, lease.epoch, self.now, 0).await;
            }
            _ => {}
        }
        if let Some(in_progress) = self.in_progress {
            in_progress.ended();
        }
    }
}

impl RecordingLedger {
    /// Keeps a response, with retries: it may be paid for already, and this is the only copy. Returns `true` if the ledger took it.
    async fn keep(&self, response: StoredResponse) -> bool {
        let mut pauses = Pauses::new(Duration::from_millis(100), KEEP_FOR);
        while let Err(error) = self.store(response.clone()).await {
            tracing::warn!(%error, "a response was not kept for replays");
            if !pauses.wait().await {
                return false;
            }
        }
        true
    }

    async fn store(&self, response: StoredResponse) -> Result<(), LedgerError> {
        match self {
            Self::Payment(ledger, lease) => ledger.store_response(&lease.key, response).await,
            Self::Channel(ledger, key) => ledger.store_channel_response(key, response).await,
        }
    }
}

/// Losing this step costs nothing: a produced response is replayed like a delivered one.
pub(crate) async fn record_delivery(ledger: &dyn Ledger, lease: &Lease) {
    if let Err(error) = ledger.fulfil(lease, &FulfilmentStep::Deliver).await {
        tracing::debug!(%error, payer = %lease.key.payer, nonce = %lease.key.nonce, "a delivery was not recorded");
    }
}
