//! What happens to a channel in the ledger.

use alloy_primitives::B256;
use serde::{Deserialize, Serialize};

use crate::{
    ledger::StoredResponse,
    network::Network,
    vouchers::{ChannelConfig, ChannelObservation, Voucher},
};

/// A step on a channel.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum ChannelStep {
    /// Creates the channel as the chain has it: what was claimed counts as charged. A channel that is in the ledger is
    /// observed.
    Open {
        /// The chain.
        network: Network,
        /// What makes the channel.
        config: ChannelConfig,
        /// The channel as the chain has it.
        observation: ChannelObservation,
        /// When it was observed.
        now: u64,
    },
    /// Records how the chain has the channel. An observation of an earlier block than the last one is ignored, and the last one does
    /// not become fresher by it.
    Observe {
        /// The channel as the chain has it.
        observation: ChannelObservation,
        /// When it was observed.
        now: u64,
    },
    /// Gives the channel to a request. A request with the price 0, such as a refund, needs no cover.
    Begin {
        /// Identifies the request ([`ChannelRecord::request_key`](super::ChannelRecord::request_key)).
        request: B256,
        /// How its payer names it.
        name: Option<RequestName>,
        /// The voucher that pays for it, which was authenticated.
        voucher: Voucher,
        /// The most that it may cost.
        price: u128,
        /// The time.
        now: u64,
        /// When another request may take the channel over.
        until: u64,
    },
    /// Charges for the request that holds the channel, and frees the channel. Does nothing if this request was charged for before.
    Charge {
        /// The epoch that `Begin` left.
        epoch: u64,
        /// What the request cost.
        amount: u128,
        /// The response to keep; `None` if it streams from now on.
        response: Option<StoredResponse>,
        /// The time.
        now: u64,
    },
    /// Counts a replay of the response to a request that was charged for. Does nothing if the request is not remembered.
    Replay {
        /// Identifies the request ([`ChannelRecord::request_key`](super::ChannelRecord::request_key)).
        request: B256,
    },
    /// Frees the channel without a charge. Does nothing if it was taken over meanwhile.
    Release {
        /// The epoch that `Begin` left.
        epoch: u64,
    },
    /// Counts a voucher as published: it is about to be shown to somebody who may be a stranger.
    Publish {
        /// The voucher's ceiling, in atomic units.
        max: u128,
    },
    /// Reserves the channel for one process to claim or refund. The newest voucher counts as published from then on, if there is something to
    /// claim.
    BeginClaim {
        /// The time.
        now: u64,
        /// When another process may claim.
        until: u64,
    },
    /// Ends that. Does nothing if another process claims meanwhile.
    EndClaim {
        /// The end that `BeginClaim` set.
        until: u64,
    },
    /// Counts an amount as gone from the escrow, before a refund of it is signed. Then the field `refund` of the [`ChannelRecord`](super::ChannelRecord) has the
    /// nonce to sign. What was charged, or is being worked for, must stay covered beside it and an announced withdrawal, or be claimed. A
    /// request whose time is over loses the channel. One refund is under way at a time; a repeated request takes its own up again. The newest
    /// voucher counts as published from then on, if something is claimed with the refund.
    Refund {
        /// Identifies the request for it. Zero if no payer asked.
        request: B256,
        /// The most to refund.
        amount: u128,
        /// The time.
        now: u64,
        /// Until when the refund counts as under way.
        until: u64,
    },
    /// Ends that. Does nothing if another refund was signed meanwhile.
    EndRefund {
        /// The contract's refund nonce.
        nonce: u128,
        /// What was refunded. `None` if it failed: as long as the nonce is not used, whoever has seen the signature can execute it.
        executed: Option<ExecutedRefund>,
    },
    /// Ends it if nothing was sent, so that nobody has the signature: the amount covers vouchers again, unless a refund with this nonce was
    /// signed before. Does nothing if it was taken up again meanwhile.
    DropRefund {
        /// The end that `Refund` set.
        until: u64,
    },
}

/// How a payer names a request (the extension `payment-identifier`), whatever voucher it pays with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RequestName {
    /// The payer's id, as [`PaymentId::digest`](crate::protocol::PaymentId::digest).
    pub id: B256,
    /// The digest of all that the response depends on.
    pub request: B256,
}

/// A refund that is in a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ExecutedRefund {
    /// Its transaction.
    pub transaction: B256,
    /// The amount that it took from the escrow, in atomic units.
    #[serde(with = "crate::vouchers::amount")]
    pub amount: u128,
}

/// Returns `true` if a lease that was given until `running` has not ended, where one that is given now ends at `until`. One that has longer
/// to go than two of them was given by a clock that ran ahead.
pub(super) const fn is_running(running: u64, now: u64, until: u64) -> bool {
    running > now && running - now <= 2 * until.saturating_sub(now)
}
