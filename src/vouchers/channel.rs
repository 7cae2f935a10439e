//! What makes a channel, and its id.

use std::{fmt, str::FromStr};

use alloy_primitives::{Address, B256, hex};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use crate::eip3009::checksummed;

/// The shortest delay, in seconds, between a payer's announcement of a withdrawal and the withdrawal.
pub const MIN_WITHDRAW_DELAY: u32 = 900;
/// The longest such delay, in seconds (30 days).
pub const MAX_WITHDRAW_DELAY: u32 = 2_592_000;

/// The seven fields that make a channel. Another value in any of them is another channel.
///
/// The chain stores only their digest, so whoever wants to withdraw must keep them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ChannelConfig {
    /// Owns the deposit.
    #[serde(serialize_with = "checksummed")]
    pub payer: Address,
    /// The key that signs vouchers; zero if the payer's own key or contract does.
    #[serde(serialize_with = "checksummed")]
    pub payer_authorizer: Address,
    /// Receives what is claimed (`payTo` of the offer).
    #[serde(serialize_with = "checksummed")]
    pub receiver: Address,
    /// May claim and refund in the receiver's name.
    #[serde(serialize_with = "checksummed")]
    pub receiver_authorizer: Address,
    /// The token in escrow.
    #[serde(serialize_with = "checksummed")]
    pub token: Address,
    /// Seconds between the announcement of a withdrawal and the withdrawal.
    pub withdraw_delay: u32,
    /// Tells channels apart that are alike in everything else.
    pub salt: B256,
}

impl ChannelConfig {
    /// Checks what the contract checks when a deposit is made.
    ///
    /// # Errors
    /// [`ChannelConfigError`] names the field that is wrong.
    pub fn validate(&self) -> Result<(), ChannelConfigError> {
        let required = [
            ("payer", self.payer),
            ("receiver", self.receiver),
            ("receiverAuthorizer", self.receiver_authorizer),
            ("token", self.token),
        ];
        if let Some((field, _)) = required.into_iter().find(|(_, address)| address.is_zero()) {
            return Err(ChannelConfigError::ZeroAddress(field));
        }
        if !(MIN_WITHDRAW_DELAY..=MAX_WITHDRAW_DELAY).contains(&self.withdraw_delay) {
            return Err(ChannelConfigError::WithdrawDelay(self.withdraw_delay));
        }
        Ok(())
    }

    /// Returns the address whose key must sign the channel's vouchers.
    pub fn voucher_signer(&self) -> Address {
        if self.payer_authorizer.is_zero() { self.payer } else { self.payer_authorizer }
    }
}

/// Writes the JSON without checksums, which take a hash each: for databases.
pub(crate) fn without_checksums<S: Serializer>(it: &ChannelConfig, serializer: S) -> Result<S::Ok, S::Error> {
    #[derive(Serialize)]
    #[serde(rename_all = "camelCase")]
    struct Plain {
        payer: Address,
        payer_authorizer: Address,
        receiver: Address,
        receiver_authorizer: Address,
        token: Address,
        withdraw_delay: u32,
        salt: B256,
    }
    let ChannelConfig { payer, payer_authorizer, receiver, receiver_authorizer, token, withdraw_delay, salt } = *it;
    Plain { payer, payer_authorizer, receiver, receiver_authorizer, token, withdraw_delay, salt }.serialize(serializer)
}

/// A channel that the contract would not open.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ChannelConfigError {
    /// An address that must not be zero is.
    #[error("{0} is the zero address")]
    ZeroAddress(&'static str),
    /// The delay is outside [`MIN_WITHDRAW_DELAY`]..=[`MAX_WITHDRAW_DELAY`].
    #[error("a withdraw delay of {0} seconds is outside {MIN_WITHDRAW_DELAY}..={MAX_WITHDRAW_DELAY}")]
    WithdrawDelay(u32),
}

/// A channel's id: the EIP-712 digest of its [`ChannelConfig`] on one chain. Written as `0x` and 64 hex digits, in lower case.
///
/// Never take one from a message as it is: compute it ([`Escrow::channel_id`](super::Escrow::channel_id)) and compare.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ChannelId(B256);

impl ChannelId {
    /// Returns the digest.
    pub const fn digest(&self) -> B256 {
        self.0
    }
}

impl From<B256> for ChannelId {
    fn from(digest: B256) -> Self {
        Self(digest)
    }
}

impl fmt::Display for ChannelId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

impl fmt::Debug for ChannelId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ChannelId({:#x})", self.0)
    }
}

impl FromStr for ChannelId {
    type Err = ParseChannelIdError;

    /// Reads `0x` and 64 hex digits in either case.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let mut digest = B256::ZERO;
        // The decoder would take off a second prefix.
        let digits = text.strip_prefix("0x").filter(|digits| digits.len() == 64).ok_or(ParseChannelIdError)?;
        hex::decode_to_slice(digits, digest.as_mut_slice()).map_err(|_| ParseChannelIdError)?;
        Ok(Self(digest))
    }
}

impl Serialize for ChannelId {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for ChannelId {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
    }
}

/// The text is no channel id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a channel id is \"0x\" and 64 hex digits")]
pub struct ParseChannelIdError;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_channel_id_is_read_in_either_case_and_written_in_lower_case() {
        let lower = format!("0x{}", "ab".repeat(32));
        let upper = format!("0x{}", "AB".repeat(32));
        assert_eq!(upper.parse::<ChannelId>().unwrap().to_string(), lower);
        for text in [
            "",
            "0x",
            &lower[2..],
            &lower[..64],
            &format!("{lower}0"),
            &format!("0x0x{}", "ab".repeat(31)),
            "../../etc/passwd",
        ] {
            assert_eq!(text.parse::<ChannelId>(), Err(ParseChannelIdError), "{text}");
        }
    }

    #[test]
    fn a_channel_that_the_contract_would_not_open_is_named() {
        let address = Address::repeat_byte(1);
        let config = ChannelConfig {
            payer: address,
            payer_authorizer: Address::ZERO,
            receiver: address,
            receiver_authorizer: address,
            token: address,
            withdraw_delay: MIN_WITHDRAW_DELAY,
            salt: B256::ZERO,
        };
        assert_eq!(config.validate(), Ok(()));
        assert_eq!(config.voucher_signer(), address);
        let zero = Address::ZERO;
        for (config, field) in [
            (ChannelConfig { payer: zero, ..config }, "payer"),
            (ChannelConfig { receiver: zero, ..config }, "receiver"),
            (ChannelConfig { receiver_authorizer: zero, ..config }, "receiverAuthorizer"),
            (ChannelConfig { token: zero, ..config }, "token"),
        ] {
            assert_eq!(config.validate(), Err(ChannelConfigError::ZeroAddress(field)));
        }
        for withdraw_delay in [MIN_WITHDRAW_DELAY - 1, MAX_WITHDRAW_DELAY + 1] {
            let config = ChannelConfig { withdraw_delay, ..config };
            assert_eq!(config.validate(), Err(ChannelConfigError::WithdrawDelay(withdraw_delay)));
        }
    }
}
