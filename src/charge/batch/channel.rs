//! A channel that a request holds, and what its payer is told of it.

use alloy_primitives::hex;
use tokio::sync::OwnedSemaphorePermit;

use crate::{
    channels::Channels,
    charge::in_progress::InProgress,
    facilitator::channels::Executed,
    ledger::channels::{ChannelLedgerError, ChannelRecord, ChannelStep},
    protocol::SettlementResponse,
    vouchers::{ChannelId, ChannelState, SettlementExtra},
};

/// A channel that this request holds.
pub(super) struct HeldChannel {
    pub(super) lease: ChannelLease,
    /// The deposit that was made for this request.
    pub(super) deposit: Option<Executed>,
    /// Lets the next request of the channel go on when it is dropped.
    pub(super) _line: Option<InProgress>,
    /// Lets the next refund of the channel go on when it is dropped, after the line.
    pub(super) _turn: Option<InProgress>,
    pub(super) _permit: OwnedSemaphorePermit,
}

/// The right to charge a channel. Dropped before it is [charged](Self::charged), as when the handler panics, it frees the channel.
pub(super) struct ChannelLease {
    /// `None` once there is nothing to free.
    channels: Option<Channels>,
    pub(super) record: ChannelRecord,
}

impl ChannelLease {
    pub(super) async fn begin(
        channels: Channels,
        id: ChannelId,
        step: ChannelStep,
    ) -> Result<Self, ChannelLedgerError> {
        let record = channels.advance(&id, &step).await?;
        Ok(Self { channels: Some(channels), record })
    }

    /// Frees the channel without a charge. Returns the channel as it is then.
    pub(super) async fn release(&mut self) -> &ChannelRecord {
        if let Some(channels) = self.channels.take()
            && let Some(freed) = release(&channels, &self.record).await
        {
            self.record = freed;
        }
        &self.record
    }

    /// Notes that the request was charged for, which freed the channel.
    pub(super) fn charged(&mut self, record: ChannelRecord) {
        self.channels = None;
        self.record = record;
    }
}

impl Drop for ChannelLease {
    fn drop(&mut self) {
        if let (Some(channels), Ok(runtime)) = (self.channels.take(), tokio::runtime::Handle::try_current()) {
            let record = self.record.clone();
            runtime.spawn(async move { release(&channels, &record).await });
        }
    }
}

async fn release(channels: &Channels, record: &ChannelRecord) -> Option<ChannelRecord> {
    let freed = channels.advance(&record.id, &ChannelStep::Release { epoch: record.epoch }).await;
    freed.inspect_err(|error| tracing::warn!(%error, channel = %record.id, "a channel was not freed")).ok()
}

/// Returns what a request cost that was paid with a voucher, and how its channel stands. `charged` is `None` for a refund, `total` what was
/// charged in all after it, and `moved` a deposit or a refund.
pub(super) fn receipt(
    charged: Option<u128>,
    record: &ChannelRecord,
    total: u128,
    moved: Option<&Executed>,
) -> SettlementResponse {
    let state = ChannelState { charged_cumulative_amount: Some(total), ..record.observed.state };
    let extra = SettlementExtra { charged_amount: charged, channel_state: Some(state) };
    let transaction = moved.map_or(String::new(), |moved| hex::encode_prefixed(moved.transaction));
    SettlementResponse {
        payer: Some(record.config.payer.to_string()),
        amount: Some(moved.map_or(String::new(), |moved| moved.amount.to_string())),
        extra: Some(extra.to_map()),
        ..SettlementResponse::settled(transaction, record.network.to_string())
    }
}
