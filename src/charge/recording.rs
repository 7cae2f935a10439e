//! Where a response is kept that streams to its payer, and what its end means.

use std::{sync::Arc, time::Duration};

use alloy_primitives::B256;

use super::in_progress::InProgress;
use crate::{
    channels::Channels,
    ledger::{
        Fulfilment, FulfilmentStep, Lease, Ledger, LedgerError, Pauses, PaymentStep, Record, ResponseLedger,
        StoredResponse,
    },
    payment::PaymentKey,
    vouchers::ChannelId,
};

/// For how long a ledger that fails is asked to keep a response.
const KEEP_FOR: Duration = Duration::from_secs(60);

/// Where the copy of a response goes that streams.
pub(crate) struct Recording {
    /// The ledger that keeps it, and its key there.
    pub(crate) responses: Arc<dyn ResponseLedger>,
    pub(crate) key: PaymentKey,
    /// The work that it is the response of.
    pub(crate) work: Work,
    /// Copies of the payment wait until this is dropped.
    pub(crate) in_progress: Option<InProgress>,
    /// When the work was done, in Unix seconds.
    pub(crate) now: u64,
}

/// The work for which a response is charged.
pub(crate) enum Work {
    /// For a payment, whose delivery is noted when the stream ends.
    Payment(Arc<dyn Ledger>, Lease),
    /// For a request that held a channel in this epoch.
    Request { channels: Channels, channel: ChannelId, request: B256, epoch: u64 },
}

impl Work {
    /// Returns `true` if the ledger has this work as done. If its charge was not confirmed, the request may have been worked on again, and
    /// then it is the response to that which the payer got.
    async fn is_charged(&self) -> Result<bool, LedgerError> {
        match self {
            Self::Payment(ledger, lease) => {
                let is_done =
                    |record: &Record| matches!(record.fulfilment, Fulfilment::Produced | Fulfilment::Delivered);
                let record = ledger.get(&lease.key).await?;
                Ok(record.is_some_and(|record| record.epoch == lease.epoch && is_done(&record)))
            }
            Self::Request { channels, channel, request, epoch } => {
                let record = channels.record(channel).await?;
                let answer = record.and_then(|record| record.answer_to(*request).copied());
                Ok(answer.is_some_and(|answer| answer.epoch == *epoch))
            }
        }
    }
}

impl Recording {
    /// Returns the size of the largest response body that is kept, in bytes.
    pub(crate) fn limit(&self) -> usize {
        self.responses.response_limit()
    }

    /// Ends the stream: keeps the response if it is whole, and notes whether the payer got it.
    pub(crate) async fn end(self, response: Option<StoredResponse>, is_delivered: bool) {
        let is_kept = match response {
            Some(response) => self.keep(response).await,
            None => false,
        };
        match &self.work {
            Work::Payment(ledger, lease) if is_delivered => record_delivery(ledger.as_ref(), lease).await,
            // Neither delivered nor kept: nobody is to be charged for it, nor to wait for it, so the lease ends.
            Work::Payment(ledger, lease) if !is_kept => {
                let step = PaymentStep::TakeOver { seen: lease.epoch, now: self.now, until: 0 };
                let _ = ledger.advance(&lease.key, &step).await;
            }
            _ => {}
        }
        if let Some(in_progress) = self.in_progress {
            in_progress.ended();
        }
    }

    /// Keeps a response, with retries: it may be paid for already, and this is the only copy. Returns `true` if the ledger took it.
    async fn keep(&self, response: StoredResponse) -> bool {
        let mut pauses = Pauses::new(Duration::from_millis(100), KEEP_FOR);
        loop {
            match self.keep_if_charged(&response).await {
                Ok(is_kept) => return is_kept,
                Err(error) => tracing::warn!(%error, "a response was not kept for replays"),
            }
            if !pauses.wait().await {
                return false;
            }
        }
    }

    async fn keep_if_charged(&self, response: &StoredResponse) -> Result<bool, LedgerError> {
        let is_charged = self.work.is_charged().await?;
        if is_charged {
            self.responses.store_response(&self.key, response.clone()).await?;
        }
        Ok(is_charged)
    }
}

/// Losing this step costs nothing: a produced response is replayed like a delivered one.
pub(crate) async fn record_delivery(ledger: &dyn Ledger, lease: &Lease) {
    if let Err(error) = ledger.advance(&lease.key, &lease.step(FulfilmentStep::Deliver)).await {
        tracing::debug!(%error, payer = %lease.key.payer, nonce = %lease.key.nonce, "a delivery was not recorded");
    }
}
