//! Channels whose calls are timed.

use std::{sync::Arc, time::Instant};

use async_trait::async_trait;

use super::{ChannelLedger, ChannelLedgerError, ChannelRecord, ChannelStep};
use crate::{
    ledger::{LedgerError, ResponseLedger, StoredResponse},
    payment::PaymentKey,
    telemetry::names,
    vouchers::ChannelId,
};

/// Reports how long each call of another ledger of channels takes, and whether its store failed.
pub(super) struct MeasuredChannels(pub(super) Arc<dyn ChannelLedger>);

// A macro, so that the operation is a literal and its metric key is made at compile time.
macro_rules! timed {
    ($operation:literal, $failed:pat, $call:expr) => {{
        let started = Instant::now();
        let result = $call.await;
        ::metrics::histogram!(names::LEDGER, "operation" => $operation).record(started.elapsed());
        if let Err($failed) = &result {
            ::metrics::counter!(names::LEDGER_ERRORS, "operation" => $operation).increment(1);
        }
        result
    }};
}

macro_rules! timed_step {
    ($operation:literal, $call:expr) => {
        timed!($operation, ChannelLedgerError::Ledger(LedgerError::Backend(_)), $call)
    };
}

#[async_trait]
impl ChannelLedger for MeasuredChannels {
    async fn channel(&self, id: &ChannelId) -> Result<Option<ChannelRecord>, LedgerError> {
        timed!("channel", LedgerError::Backend(_), self.0.channel(id))
    }

    async fn advance(&self, id: &ChannelId, step: &ChannelStep) -> Result<ChannelRecord, ChannelLedgerError> {
        match step {
            ChannelStep::Open { .. } => timed_step!("channel_open", self.0.advance(id, step)),
            ChannelStep::Observe { .. } => timed_step!("channel_observe", self.0.advance(id, step)),
            ChannelStep::Begin { .. } => timed_step!("channel_begin", self.0.advance(id, step)),
            ChannelStep::Charge { .. } => timed_step!("channel_charge", self.0.advance(id, step)),
            ChannelStep::Replay { .. } => timed_step!("channel_replay", self.0.advance(id, step)),
            ChannelStep::Release { .. } => timed_step!("channel_release", self.0.advance(id, step)),
            ChannelStep::BeginClaim { .. } => timed_step!("channel_begin_claim", self.0.advance(id, step)),
            ChannelStep::EndClaim { .. } => timed_step!("channel_end_claim", self.0.advance(id, step)),
            ChannelStep::Publish { .. } => timed_step!("channel_publish", self.0.advance(id, step)),
            ChannelStep::Refund { .. } => timed_step!("channel_refund", self.0.advance(id, step)),
            ChannelStep::EndRefund { .. } => timed_step!("channel_end_refund", self.0.advance(id, step)),
            ChannelStep::DropRefund { .. } => timed_step!("channel_drop_refund", self.0.advance(id, step)),
        }
    }

    async fn channels(&self, after: Option<ChannelId>, limit: usize) -> Result<Vec<ChannelRecord>, LedgerError> {
        timed!("channels", LedgerError::Backend(_), self.0.channels(after, limit))
    }
}

#[async_trait]
impl ResponseLedger for MeasuredChannels {
    async fn store_response(&self, key: &PaymentKey, response: StoredResponse) -> Result<(), LedgerError> {
        timed!("store_channel_response", LedgerError::Backend(_), self.0.store_response(key, response))
    }

    async fn response(&self, key: &PaymentKey) -> Result<Option<StoredResponse>, LedgerError> {
        timed!("channel_response", LedgerError::Backend(_), self.0.response(key))
    }

    fn response_limit(&self) -> usize {
        self.0.response_limit()
    }
}
