//! Vouchers and their signatures.

use std::{fmt, str::FromStr};

use alloy_primitives::{Address, U256, hex};
#[cfg(feature = "client")]
use alloy_signer::Signer;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use super::{ChannelConfig, ChannelId, Escrow, amount};
#[cfg(feature = "client")]
use crate::eip3009::SignError;
use crate::eip3009::{HALF_ORDER, PaymentSignature};

/// A payer's promise: of this channel at most `max_claimable_amount` may be claimed in all.
///
/// Vouchers are cumulative and never expire. The receiver keeps the newest one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Voucher {
    /// The channel, as the payer names it. Compare it with the id of the configuration that comes with it.
    pub channel_id: ChannelId,
    /// The ceiling, in atomic units.
    #[serde(with = "amount")]
    pub max_claimable_amount: u128,
    /// The payer's signature.
    pub signature: VoucherSignature,
}

impl Voucher {
    /// Signs a voucher with the channel's voucher key.
    ///
    /// # Errors
    /// [`SignError`] if the device or service refused or failed.
    #[cfg(feature = "client")]
    pub async fn sign(
        escrow: &Escrow,
        channel_id: ChannelId,
        max_claimable_amount: u128,
        signer: &(impl Signer + Send + Sync),
    ) -> Result<Self, SignError> {
        let typed = super::escrow::typed_voucher(channel_id, max_claimable_amount);
        let signature = signer.sign_typed_data(&typed, &escrow.domain()).await?.normalized_s();
        Ok(Self { channel_id, max_claimable_amount, signature: VoucherSignature(signature.as_bytes()) })
    }

    /// Returns `true` if the voucher is for the channel with this configuration on this chain, and signed by the channel's voucher key.
    ///
    /// A voucher that only a contract wallet could accept (ERC-1271) is not: that takes a call to a node for each voucher.
    pub fn is_of(&self, config: &ChannelConfig, escrow: &Escrow) -> bool {
        self.channel_id == escrow.channel_id(config) && self.signer(escrow) == Some(config.voucher_signer())
    }

    /// Returns the address whose key signed the voucher, if one did.
    pub fn signer(&self, escrow: &Escrow) -> Option<Address> {
        let digest = escrow.voucher_digest(self.channel_id, self.max_claimable_amount);
        PaymentSignature::from(self.signature.0).recover(digest).ok()
    }
}

/// A signature that the contract can check on the chain: 65 bytes `r ‖ s ‖ v`, `v` 27 or 28, low `s`.
///
/// Signers off the chain also make others, and libraries accept them. A voucher with one of those could never be claimed, so it cannot be
/// read. `Debug` does not show the bytes: with the voucher they are money.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct VoucherSignature([u8; 65]);

impl VoucherSignature {
    /// Returns the 65 bytes.
    pub const fn as_bytes(&self) -> &[u8; 65] {
        &self.0
    }
}

impl TryFrom<[u8; 65]> for VoucherSignature {
    type Error = InvalidVoucherSignature;

    fn try_from(bytes: [u8; 65]) -> Result<Self, Self::Error> {
        if !matches!(bytes[64], 27 | 28) {
            return Err(InvalidVoucherSignature::RecoveryId(bytes[64]));
        }
        if U256::from_be_slice(&bytes[32..64]) > HALF_ORDER {
            return Err(InvalidVoucherSignature::HighS);
        }
        Ok(Self(bytes))
    }
}

impl FromStr for VoucherSignature {
    type Err = InvalidVoucherSignature;

    /// Reads `0x` and 130 hex digits.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let mut bytes = [0; 65];
        let digits =
            text.strip_prefix("0x").filter(|digits| digits.len() == 130).ok_or(InvalidVoucherSignature::Hex)?;
        hex::decode_to_slice(digits, &mut bytes).map_err(|_| InvalidVoucherSignature::Hex)?;
        bytes.try_into()
    }
}

impl fmt::Debug for VoucherSignature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("VoucherSignature(65 bytes)")
    }
}

impl Serialize for VoucherSignature {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&format_args!("{:#}", hex::display(self.0)))
    }
}

impl<'de> Deserialize<'de> for VoucherSignature {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
    }
}

/// A signature that the contract would refuse.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum InvalidVoucherSignature {
    /// Not `0x` and 130 hex digits.
    #[error("a voucher's signature is \"0x\" and 130 hex digits")]
    Hex,
    /// The contract takes 27 and 28 only.
    #[error("the signature's v is {0}, not 27 or 28")]
    RecoveryId(u8),
    /// The malleable twin of a valid signature.
    #[error("the signature's s is in the upper half of the order")]
    HighS,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signatures_that_the_contract_would_not_take_are_refused() {
        for (s, v, expected) in [
            (HALF_ORDER, 27, Ok(())),
            (HALF_ORDER, 28, Ok(())),
            (HALF_ORDER + U256::ONE, 27, Err(InvalidVoucherSignature::HighS)),
            (U256::ONE, 0, Err(InvalidVoucherSignature::RecoveryId(0))),
        ] {
            let mut bytes = [1; 65];
            bytes[32..64].copy_from_slice(&s.to_be_bytes::<32>());
            bytes[64] = v;
            assert_eq!(VoucherSignature::try_from(bytes).map(drop), expected, "{s} {v}");
        }
    }
}
