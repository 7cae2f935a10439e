//! What a seller did that the buyer's books exclude.

use serde::{Deserialize, Serialize};

use crate::usdc::Usdc;

/// Something that a seller said or did which contradicts the buyer's books of a channel.
///
/// After [`ChargeNotInBooks`](Self::ChargeNotInBooks) and [`ClaimedTooMuch`](Self::ClaimedTooMuch) nothing more is signed for the seller's
/// channels.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
#[serde(tag = "finding", rename_all = "camelCase")]
#[non_exhaustive]
pub enum ChannelFinding {
    /// The seller says that it charged more than these books allow. Either it lies, or another program uses the same key and salt: give
    /// each its own [`ChannelPolicy::salt`](super::ChannelPolicy::salt).
    #[error("the seller says that it charged {asserted} units in this channel, and at most {limit} was agreed to")]
    ChargeNotInBooks {
        /// The seller's sum, in atomic units.
        #[serde(with = "crate::vouchers::amount")]
        asserted: u128,
        /// The most that it can have charged.
        limit: Usdc,
    },
    /// The seller claimed more from the escrow than the vouchers are for by which it charged something. It had a voucher for it, so this cannot
    /// be undone.
    #[error("the seller claimed {claimed} from the escrow, and charged at most {charged}")]
    ClaimedTooMuch {
        /// The contract's `totalClaimed`.
        claimed: Usdc,
        /// The most that it can have charged.
        charged: Usdc,
    },
    /// The seller charged a request that it had refused: it called the channel busy, and the request was sent on another one; or it refused
    /// the first voucher of a channel, and shows it as proof of a charge. The charge counts as spent. Of a channel whose earlier journal was
    /// lost, it may be a charge from before.
    #[error("the seller charged {charged} for a request that it had refused")]
    ChargedRefused {
        /// The part of the charge that only such requests explain.
        charged: Usdc,
    },
    /// The seller charged the rest of a voucher that it had charged in part. Vouchers do not name requests, and a claim publishes them: a
    /// stranger who read it can have paid with the rest. The charge counts as spent, and the channel is used on.
    #[error("the seller charged {charged} more by a voucher that it had charged in part")]
    ChargedTheRest {
        /// The part of the charge that only this explains.
        charged: Usdc,
    },
    /// The seller reports a charge above the price that it offered. The books did not change.
    #[error("the seller reports a charge of {reported} for a price of at most {price}")]
    ChargedAbovePrice {
        /// The charge as the seller wrote it, shortened.
        reported: String,
        /// The price.
        price: Usdc,
    },
    /// The seller's answer contradicts itself, or what was signed. The books did not change.
    #[error("the seller's answer {what}")]
    Contradiction {
        /// What is wrong with it.
        what: String,
    },
    /// The seller wants another voucher and proves nothing. Look the channel up on the chain
    /// (`reconcile_channels`, feature `onchain`), and pay again.
    #[error(
        "the seller refuses the voucher and does not prove what it charged; call reconcile_channels, which asks the chain"
    )]
    Unproven,
}
