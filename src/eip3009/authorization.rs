//! The authorization itself.

use alloy_primitives::{Address, B256, U256, keccak256};
use alloy_sol_types::SolStruct;
use serde::{Deserialize, Serialize};

use super::{TokenDomain, TransferWithAuthorization};

/// A transfer that the payer allows anybody to execute once (EIP-3009, `transferWithAuthorization`).
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Authorization {
    /// The payer.
    pub from: Address,
    /// The payee.
    pub to: Address,
    /// Atomic units of the token.
    #[serde(with = "decimal")]
    pub value: U256,
    /// Unix time in seconds; block time must be greater.
    #[serde(with = "decimal")]
    pub valid_after: U256,
    /// Unix time in seconds; block time must be smaller.
    #[serde(with = "decimal")]
    pub valid_before: U256,
    /// Chosen by the payer, used once.
    pub nonce: B256,
}

impl Authorization {
    /// The EIP-712 hash that the payer signs.
    pub fn signing_hash(&self, domain: &TokenDomain) -> B256 {
        let mut message = [0_u8; 66];
        message[..2].copy_from_slice(&[0x19, 0x01]);
        message[2..34].copy_from_slice(domain.separator().as_slice());
        message[34..].copy_from_slice(self.typed().eip712_hash_struct().as_slice());
        keccak256(message)
    }

    pub(crate) fn typed(&self) -> TransferWithAuthorization {
        TransferWithAuthorization {
            from: self.from,
            to: self.to,
            value: self.value,
            validAfter: self.valid_after,
            validBefore: self.valid_before,
            nonce: self.nonce,
        }
    }
}

/// 256-bit integers as decimal strings, as x402 writes them.
mod decimal {
    use std::borrow::Cow;

    use alloy_primitives::U256;
    use serde::{Deserialize, Deserializer, Serializer, de};

    use crate::protocol::parse_decimal;

    pub(super) fn serialize<S: Serializer>(value: &U256, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(value)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<U256, D::Error> {
        let text = Cow::<'de, str>::deserialize(deserializer)?;
        parse_decimal(&text).ok_or_else(|| de::Error::custom("expected an unsigned decimal string within 256 bits"))
    }
}
