//! `payload` of a payment, and `extra` of an offer.

use alloy_primitives::{Address, Bytes};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::{
    ChannelConfig, ChannelState, ClaimEntry, Deposit, Escrow, Voucher, VoucherSignature, VoucherState, abi, amount,
};
use crate::eip3009::checksummed;

/// The scheme's payload: what a payer sends to a seller, and a seller to a facilitator.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "camelCase", rename_all_fields = "camelCase")]
#[non_exhaustive]
pub enum ChannelPayload {
    /// Fills the channel, and pays for the request with the voucher.
    Deposit {
        /// The channel.
        channel_config: ChannelConfig,
        /// Pays for the request.
        voucher: Voucher,
        /// Fills the channel.
        deposit: Deposit,
    },
    /// Pays for the request.
    Voucher {
        /// The channel.
        channel_config: ChannelConfig,
        /// Pays for the request.
        voucher: Voucher,
    },
    /// Asks for money back. No resource is served.
    Refund(Box<RefundRequest>),
    /// Seller to facilitator only: claims what was charged.
    #[serde(rename_all = "camelCase")]
    Claim {
        /// The channels, in the order that was signed.
        claims: Vec<Claim>,
        /// The receiver authorizer's signature, if the facilitator is not the authorizer.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        claim_authorizer_signature: Option<Bytes>,
    },
    /// Seller to facilitator only: transfers what was claimed.
    Settle {
        /// Receives it.
        #[serde(serialize_with = "checksummed")]
        receiver: Address,
        /// The token.
        #[serde(serialize_with = "checksummed")]
        token: Address,
    },
}

/// A payer's request for a refund, and what a seller adds to it for the facilitator.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RefundRequest {
    /// The channel.
    pub channel_config: ChannelConfig,
    /// A voucher for exactly what was charged so far.
    pub voucher: Voucher,
    /// Atomic units to refund; from a payer, all that is left if absent. `null` is an error: a program that computes an amount and fails
    /// does not want all.
    #[serde(default, with = "amount::present", skip_serializing_if = "Option::is_none")]
    pub amount: Option<u128>,
    /// Seller to facilitator: the contract's `refundNonce`.
    #[serde(default, with = "amount::option", skip_serializing_if = "Option::is_none")]
    pub refund_nonce: Option<u128>,
    /// Seller to facilitator: what to claim in the same transaction.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub claims: Option<Vec<Claim>>,
    /// Seller to facilitator: the receiver authorizer's signature over the refund.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refund_authorizer_signature: Option<Bytes>,
    /// Seller to facilitator: the receiver authorizer's signature over the claims.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub claim_authorizer_signature: Option<Bytes>,
}

/// One channel's row of a batch of claims.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Claim {
    /// The voucher, with the channel's configuration in place of its id.
    pub voucher: ClaimedVoucher,
    /// The payer's signature.
    pub signature: VoucherSignature,
    /// What will have been claimed in all, in atomic units.
    #[serde(with = "amount")]
    pub total_claimed: u128,
}

impl Claim {
    /// Returns the row as the authorizer signs it.
    pub fn entry(&self, escrow: &Escrow) -> ClaimEntry {
        ClaimEntry {
            channel: escrow.channel_id(&self.voucher.channel),
            max_claimable_amount: self.voucher.max_claimable_amount,
            total_claimed: self.total_claimed,
        }
    }
}

/// A voucher as the contract takes it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ClaimedVoucher {
    /// The channel.
    pub channel: ChannelConfig,
    /// The ceiling, in atomic units.
    #[serde(with = "amount")]
    pub max_claimable_amount: u128,
}

/// `extra` of an offer in the scheme.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ChannelOffer {
    /// The token's EIP-712 name.
    pub name: String,
    /// The token's EIP-712 version.
    pub version: String,
    /// Who may claim and refund in the receiver's name.
    #[serde(serialize_with = "checksummed")]
    pub receiver_authorizer: Address,
    /// Seconds between the announcement of a withdrawal and the withdrawal. Default: 900.
    #[serde(default = "default_delay")]
    pub withdraw_delay: u32,
    /// The deposit that the seller suggests, in atomic units.
    #[serde(default, with = "amount::option", skip_serializing_if = "Option::is_none")]
    pub min_deposit: Option<u128>,
    /// In a corrective 402: the channel's state.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub channel_state: Option<ChannelState>,
    /// In a corrective 402: the newest voucher that the seller has.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub voucher_state: Option<VoucherState>,
}

const fn default_delay() -> u32 {
    super::MIN_WITHDRAW_DELAY
}

impl TryFrom<&Map<String, Value>> for ChannelOffer {
    type Error = ChannelOfferError;

    fn try_from(extra: &Map<String, Value>) -> Result<Self, ChannelOfferError> {
        // The token has other ways to be moved (Permit2), and channels other keepers of vouchers.
        for (field, known) in [("assetTransferMethod", "eip3009"), ("voucherManager", "server")] {
            if let Some(value) = extra.get(field).filter(|value| *value != known) {
                return Err(ChannelOfferError::NotSupported { field, value: value.to_string() });
            }
        }
        serde_json::from_value(Value::Object(extra.clone()))
            .map_err(|error| ChannelOfferError::Unreadable(error.to_string()))
    }
}

/// An offer of the scheme that this crate cannot pay.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ChannelOfferError {
    /// The offer asks for something that this crate does not do.
    #[error("{field} {value} is not implemented")]
    NotSupported {
        /// The field of `extra`.
        field: &'static str,
        /// Its value, as JSON.
        value: String,
    },
    /// A field is missing or not what the scheme says.
    #[error("the offer's extra cannot be read: {0}")]
    Unreadable(String),
}

impl From<&Claim> for abi::VoucherClaim {
    fn from(claim: &Claim) -> Self {
        Self {
            voucher: abi::SignedVoucher {
                channel: (&claim.voucher.channel).into(),
                maxClaimableAmount: claim.voucher.max_claimable_amount,
            },
            signature: claim.signature.as_bytes().to_vec().into(),
            totalClaimed: claim.total_claimed,
        }
    }
}
