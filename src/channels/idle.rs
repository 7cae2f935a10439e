//! Refunds that no payer asked for: channels that were not used for long are emptied ([`ClaimPolicy::refund_idle`]).
//!
//! [`ClaimPolicy::refund_idle`]: super::ClaimPolicy::refund_idle

use std::sync::Weak;

use alloy_primitives::B256;
use tokio::time::sleep;

use super::{
    Channels, Inner,
    claims::{CLAIM_LEASE, INTERVAL, TOGETHER, pass},
    in_the_books,
};
use crate::{
    facilitator::{FacilitatorError, channels::ChannelError},
    ledger::channels::{ChannelRecord, ChannelStep},
};

/// Refunds idle channels for as long as the channels are used. Not in the task that claims: claims do not wait for refunds.
pub(super) async fn run(channels: Weak<Inner>) {
    loop {
        let Some(inner) = channels.upgrade() else { return };
        if let Some(Err(error)) = pass(async move { Channels(inner).refund_idle().await }).await {
            tracing::warn!(%error, "idle channels could not be refunded; it is tried again");
        }
        sleep(INTERVAL).await;
    }
}

impl Channels {
    /// Goes through the books once.
    async fn refund_idle(&self) -> Result<(), ChannelError> {
        let mut after = None;
        loop {
            let page = self.0.ledger.channels(after, TOGETHER).await.map_err(|error| in_the_books(error.into()))?;
            let Some(last) = page.last() else { return Ok(()) };
            after = Some(last.id);
            for record in page.iter().filter(|record| self.0.is_ours(record) && self.is_idle(record)) {
                match self.refund_one(record).await {
                    // A refund that reverted again and again has to wait, and holds up no other.
                    Ok(()) | Err(ChannelError::Unavailable(FacilitatorError::Busy { .. })) => {}
                    // The others would fail as well.
                    Err(error @ ChannelError::Unavailable(_)) => return Err(error),
                    Err(error) => tracing::warn!(%error, channel = %record.id, "an idle channel was not refunded"),
                }
            }
        }
    }

    fn is_idle(&self, record: &ChannelRecord) -> bool {
        self.0.policy.is_idle(record, self.0.clock.now())
    }

    async fn refund_one(&self, record: &ChannelRecord) -> Result<(), ChannelError> {
        let now = self.0.clock.now();
        let until = now + CLAIM_LEASE;
        // If it fails, another process has it, or the ledger failed: it is idle the next time, too.
        let Ok(_) = self.0.ledger.advance(&record.id, &ChannelStep::BeginClaim { now, until }).await else {
            return Ok(());
        };
        let refunded = self.refund_held(record).await;
        // If it fails, the lease ends by itself.
        let _ = self.0.ledger.advance(&record.id, &ChannelStep::EndClaim { until }).await;
        refunded
    }

    async fn refund_held(&self, record: &ChannelRecord) -> Result<(), ChannelError> {
        // A refund needs the contract's nonce as it is now, and a request may have come meanwhile.
        let Some(record) = self.refresh(record.id, &record.config).await? else { return Ok(()) };
        let Some(voucher) = record.voucher.as_ref().filter(|_| self.is_idle(&record)) else { return Ok(()) };
        // If a request comes now, either it has the channel and this step is refused, or it finds the channel empty.
        let (executed, record) = self.refund(&record, B256::ZERO, voucher, None).await?;
        let (channel, amount, transaction) = (record.id, executed.amount, executed.transaction);
        tracing::info!(%channel, amount, %transaction, "an idle channel was refunded");
        Ok(())
    }
}
