//! Refunds that no payer asked for: channels that were not used for long are emptied ([`ClaimPolicy::refund_idle`]).
//!
//! [`ClaimPolicy::refund_idle`]: super::ClaimPolicy::refund_idle

use std::{sync::Weak, time::Duration};

use alloy_primitives::B256;
use tokio::time::sleep;
use tracing::Instrument as _;

use super::{
    Channels, ClaimPolicy, Inner,
    claims::{CLAIM_LEASE, INTERVAL, TOGETHER, pass},
    in_the_books,
};
use crate::{
    facilitator::{
        FacilitatorError,
        channels::{ChannelError, Executed},
    },
    ledger::channels::{ChannelRecord, ChannelStep},
    usdc::Usdc,
    vouchers::ChannelId,
};

/// Refunds idle channels for as long as the channels are used. Not in the task that claims: claims do not wait for refunds.
pub(super) async fn run(channels: Weak<Inner>) {
    loop {
        let Some(inner) = channels.upgrade() else { return };
        if let Some(Err(error)) = pass(async move {
            let policy = inner.policy;
            Channels(inner).refund_all(policy).await
        })
        .await
        {
            tracing::warn!(%error, "idle channels could not be refunded; it is tried again");
        }
        sleep(INTERVAL).await;
    }
}

/// What a pass over the channels refunded.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct RefundReport {
    /// The amount that was refunded, in atomic units.
    pub refunded: u128,
    /// The transactions, one for each channel.
    pub transactions: Vec<B256>,
    /// The channels whose refunds failed. They may be tried again.
    pub failed: Vec<ChannelId>,
}

impl Channels {
    /// Refunds all channels now that were not used for `after`, in whole seconds, if at least `least` is left in them, whatever the policy
    /// says: see [`ClaimPolicy::refund_idle`], which does the same in the background. A caller that goes away does not cancel it.
    ///
    /// # Errors
    /// [`ChannelError::Unavailable`] if the node, the ledger or the gas key failed. Channels that were refunded before stay refunded; call
    /// again for the rest.
    pub async fn refund_idle(&self, after: Duration, least: Usdc) -> Result<RefundReport, ChannelError> {
        let (channels, policy) = (self.clone(), ClaimPolicy::default().refund_idle(after, least));
        let refunding = tokio::spawn(async move { channels.refund_all(policy).await }.in_current_span());
        refunding.await.unwrap_or(Err(ChannelError::Pending { transaction: None }))
    }

    /// Goes through the books once.
    async fn refund_all(&self, policy: ClaimPolicy) -> Result<RefundReport, ChannelError> {
        let mut report = RefundReport::default();
        let is_idle = |record: &ChannelRecord| policy.is_idle(record, self.0.clock.now());
        let mut after = None;
        loop {
            let page = self.0.ledger.channels(after, TOGETHER).await.map_err(|error| in_the_books(error.into()))?;
            let Some(last) = page.last() else { return Ok(report) };
            after = Some(last.id);
            for record in page.iter().filter(|record| self.0.is_ours(record) && is_idle(record)) {
                match self.refund_one(record, &policy).await {
                    Ok(None) => {}
                    Ok(Some(Executed { amount, transaction, .. })) => {
                        report.refunded = report.refunded.saturating_add(amount);
                        report.transactions.push(transaction);
                    }
                    // A refund that reverted again and again has to wait, and holds up no other.
                    Err(ChannelError::Unavailable(FacilitatorError::Busy { .. })) => report.failed.push(record.id),
                    // The others would fail as well.
                    Err(error @ ChannelError::Unavailable(_)) => return Err(error),
                    Err(error) => {
                        tracing::warn!(%error, channel = %record.id, "an idle channel was not refunded");
                        report.failed.push(record.id);
                    }
                }
            }
        }
    }

    /// Refunds a channel, unless another process has it.
    async fn refund_one(&self, record: &ChannelRecord, policy: &ClaimPolicy) -> Result<Option<Executed>, ChannelError> {
        let now = self.0.clock.now();
        let until = now + CLAIM_LEASE;
        // If it fails, another process has it, or the ledger failed: it is idle the next time, too.
        let Ok(_) = self.0.ledger.advance(&record.id, &ChannelStep::BeginClaim { now, until }).await else {
            return Ok(None);
        };
        let refunded = self.refund_held(record, policy).await;
        // If it fails, the lease ends by itself.
        let _ = self.0.ledger.advance(&record.id, &ChannelStep::EndClaim { until }).await;
        refunded
    }

    async fn refund_held(
        &self,
        record: &ChannelRecord,
        policy: &ClaimPolicy,
    ) -> Result<Option<Executed>, ChannelError> {
        // A refund needs the contract's nonce as it is now, and a request may have come meanwhile.
        let Some(record) = self.refresh(record.id, &record.config).await? else { return Ok(None) };
        let is_idle = policy.is_idle(&record, self.0.clock.now());
        let Some(voucher) = record.voucher.as_ref().filter(|_| is_idle) else { return Ok(None) };
        // If a request comes now, either it has the channel and this step is refused, or it finds the channel empty.
        let (executed, record) = self.refund(&record, B256::ZERO, voucher, None).await?;
        let (channel, amount, transaction) = (record.id, executed.amount, executed.transaction);
        tracing::info!(%channel, amount, %transaction, "an idle channel was refunded");
        Ok(Some(executed))
    }
}
