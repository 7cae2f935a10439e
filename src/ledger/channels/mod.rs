//! The seller's books of payment channels: what was charged, and which voucher proves it.
//!
//! A [`ChannelRecord`] holds the state machine of one channel. A request that is paid with a voucher takes two steps of it:
//! [`Begin`](ChannelStep::Begin) before the work and [`Charge`](ChannelStep::Charge) after it, or [`Release`](ChannelStep::Release) if
//! there is nothing to charge for. [`MemoryLedger`](super::MemoryLedger), [`SqliteLedger`](super::SqliteLedger) and
//! [`PostgresLedger`](super::PostgresLedger) keep channels beside payments, in the same file or database.
//!
//! # Contract
//!
//! Whatever the number of callers, processes and crashes, a [`ChannelLedger`] promises:
//!
//! 1. **One at a time.** Of any number of concurrent steps on a channel, each is decided on the state that the one before it left.
//!    One request holds a channel at a time; the others are refused with [`ChannelLedgerError::Busy`].
//! 2. **One charge.** The same voucher for the same request is charged for once: `Begin` refuses it with
//!    [`ChannelLedgerError::Answered`] afterwards, and a repeated `Charge` does nothing. The same holds for another voucher of the channel
//!    with the same [id](RequestName) of the payer's, as long as the answer is remembered.
//! 3. **Durability.** A step is durable before the call returns. [`Observe`](ChannelStep::Observe) may become durable later, because the
//!    chain can be asked again. The response in a `Charge` is kept in the same step.
//! 4. **The watermark.** What the ledger charged never falls, and no charge exceeds the voucher that it was signed for. If the chain was
//!    observed to have more claimed, that is [what was charged](ChannelRecord::charged()) until an observation says otherwise. A step that
//!    is refused changes nothing.
//! 5. **The mirror.** An observation of an earlier block never replaces one of a later block, by the timestamps of both. What an announced
//!    withdrawal and a signed refund could take together covers no further voucher. One refund is under way at a time, and its result is kept.
//! 6. **Retention.** A channel is kept as long as something of it is unclaimed, and for an hour after it was claimed and used last.
//!    Later it may be removed when there is no room: what was claimed of it is on the chain.

#[cfg(all(feature = "server", feature = "metrics"))]
mod measured;
#[cfg(feature = "sqlite")]
mod progress;
mod record;
mod step;

#[cfg(feature = "server")]
use std::sync::Arc;

use async_trait::async_trait;

use super::{LedgerError, ResponseLedger};
use crate::vouchers::ChannelId;

pub use record::{Answer, Attempts, ChannelRecord, LastRefund, PendingRequest};
pub use step::{ChannelStep, ExecutedRefund, RequestName};

/// A store of payment channels, and of the responses to requests that were paid with vouchers: a response's key is that of
/// [`ChannelRecord::response_key`]. The [module](self) states the contract that every implementation keeps.
#[async_trait]
pub trait ChannelLedger: ResponseLedger {
    /// Returns a channel, or `None` if it is not in the ledger.
    ///
    /// # Errors
    /// [`LedgerError::Backend`] if the store failed.
    async fn channel(&self, id: &ChannelId) -> Result<Option<ChannelRecord>, LedgerError>;

    /// Takes a step on a channel ([`ChannelRecord::apply`]) and returns the channel as it is after it. [`ChannelStep::Open`] creates a
    /// channel that is not in the ledger.
    ///
    /// # Errors
    /// Those of [`ChannelRecord::apply`], [`ChannelLedgerError::NotFound`] if the channel is not in the ledger, and
    /// [`ChannelLedgerError::Ledger`] if it is full or the store failed.
    async fn advance(&self, id: &ChannelId, step: &ChannelStep) -> Result<ChannelRecord, ChannelLedgerError>;

    /// Lists channels in the order of their ids, from the one after `after` on and at most `limit`.
    ///
    /// # Errors
    /// [`LedgerError::Backend`] if the store failed.
    async fn channels(&self, after: Option<ChannelId>, limit: usize) -> Result<Vec<ChannelRecord>, LedgerError>;
}

/// Times the calls of a ledger of channels and counts its failures, if the feature `metrics` is on.
#[cfg(feature = "server")]
pub(crate) fn measured(ledger: Arc<dyn ChannelLedger>) -> Arc<dyn ChannelLedger> {
    #[cfg(feature = "metrics")]
    return Arc::new(measured::MeasuredChannels(ledger));
    #[cfg(not(feature = "metrics"))]
    ledger
}

/// Why a step on a channel was not taken. Nothing has changed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ChannelLedgerError {
    /// The channel is not in the ledger. Observe it on the chain, and open it.
    #[error("the channel is not in the ledger")]
    NotFound,
    /// The observation or the voucher is of another channel.
    #[error("the observation or the voucher is of another channel")]
    OtherChannel,
    /// The request was answered meanwhile. Replay the response ([`ChannelRecord::answer_to`]).
    #[error("the request was answered and charged for before")]
    Answered(Box<ChannelRecord>),
    /// Another request holds the channel. Try again when it has been answered.
    #[error("another request of the channel is being worked on")]
    Busy {
        /// Until when it holds the channel at the latest, in Unix seconds.
        until: u64,
    },
    /// The voucher is not for what was charged plus the price.
    #[error("the voucher is not for the sum of what was charged and the price of this request")]
    Mismatch(Box<ChannelRecord>),
    /// The escrow does not cover the voucher or the refund, beside what a withdrawal or another refund could take.
    #[error("the channel's escrow does not cover the voucher or the refund")]
    ExceedsBalance(Box<ChannelRecord>),
    /// The channel was given to another request.
    #[error("the channel was taken over by another request")]
    LeaseLost,
    /// The charge is more than the price that was offered, or than the voucher allows.
    #[error("the charge exceeds what the voucher allows")]
    ExceedsVoucher,
    /// The store is full or failed.
    #[error(transparent)]
    Ledger(#[from] LedgerError),
}
