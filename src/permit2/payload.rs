//! `permit2Authorization` of a payload.
//!
//! Numbers are decimal strings. A nonce in hex is read, too, as in the specification's example; it is written as a decimal.

use alloy_primitives::{Address, B256, U256};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error as _};

use super::Permit;
use crate::{
    decimal::parse_decimal,
    eip3009::{Authorization, checksummed},
};

/// A permit as it is on the wire, without its signature.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Permit2Authorization {
    #[serde(serialize_with = "checksummed")]
    from: Address,
    permitted: Permitted,
    #[serde(serialize_with = "checksummed")]
    spender: Address,
    #[serde(serialize_with = "crate::decimal::serialize", deserialize_with = "number")]
    nonce: U256,
    #[serde(with = "crate::decimal")]
    deadline: U256,
    witness: Witness,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct Permitted {
    #[serde(serialize_with = "checksummed")]
    token: Address,
    #[serde(with = "crate::decimal")]
    amount: U256,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Witness {
    #[serde(serialize_with = "checksummed")]
    to: Address,
    /// Of permits that one account may have executed.
    #[serde(default, skip_serializing_if = "Option::is_none", serialize_with = "checksummed_if_any")]
    facilitator: Option<Address>,
    #[serde(with = "crate::decimal")]
    valid_after: U256,
}

impl Permit2Authorization {
    pub(crate) fn of(signed: &Authorization, permit: &Permit) -> Self {
        Self {
            from: signed.from,
            permitted: Permitted { token: permit.token, amount: signed.value },
            spender: permit.spender,
            nonce: signed.nonce.into(),
            deadline: signed.valid_before,
            witness: Witness { to: signed.to, facilitator: permit.facilitator, valid_after: signed.valid_after },
        }
    }

    pub(crate) fn into_parts(self) -> (Authorization, Permit) {
        let Self { from, permitted, spender, nonce, deadline, witness } = self;
        let signed = Authorization {
            from,
            to: witness.to,
            value: permitted.amount,
            valid_after: witness.valid_after,
            valid_before: deadline,
            nonce: B256::from(nonce),
        };
        (signed, Permit { token: permitted.token, spender, facilitator: witness.facilitator })
    }
}

fn checksummed_if_any<S: Serializer>(address: &Option<Address>, serializer: S) -> Result<S::Ok, S::Error> {
    address.map(|address| address.to_string()).serialize(serializer)
}

fn number<'de, D: Deserializer<'de>>(deserializer: D) -> Result<U256, D::Error> {
    let text = std::borrow::Cow::<str>::deserialize(deserializer)?;
    let number = match text.strip_prefix("0x") {
        Some(hex) if !hex.is_empty() && hex.len() <= 64 && hex.bytes().all(|digit| digit.is_ascii_hexdigit()) => {
            U256::from_str_radix(hex, 16).ok()
        }
        Some(_) => None,
        None => parse_decimal(&text),
    };
    number.ok_or_else(|| D::Error::custom("expected an unsigned decimal string within 256 bits"))
}
