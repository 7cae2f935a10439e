//! The letters in which a payer writes its address.

use std::str::FromStr;

use alloy_primitives::{Address, B256, U256, hex};
use serde::{Deserialize, Deserializer, de};

use crate::{
    decimal,
    eip3009::{Authorization, PaymentSignature},
    protocol::ExactPayload,
};

/// A payload, and how it spells its payer.
#[derive(Debug, Deserialize)]
#[serde(from = "Written")]
pub(super) struct Spelled {
    pub(super) exact: ExactPayload,
    pub(super) payer: Spelling,
}

/// Which digits of an address are capitals. The payer is told of itself in the letters that it chose, as facilitators do that pass
/// on what they got; those of the checksum (EIP-55) would take a hash.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Spelling(u64);

#[derive(Deserialize)]
struct Written {
    signature: PaymentSignature,
    authorization: WrittenAuthorization,
}

/// [`Authorization`], with the letters.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct WrittenAuthorization {
    from: Letters,
    to: Address,
    #[serde(with = "decimal")]
    value: U256,
    #[serde(with = "decimal")]
    valid_after: U256,
    #[serde(with = "decimal")]
    valid_before: U256,
    nonce: B256,
}

/// An address, and how it was spelled.
pub(super) struct Letters(pub(super) Address, pub(super) Spelling);

impl FromStr for Letters {
    type Err = hex::FromHexError;

    fn from_str(text: &str) -> Result<Self, hex::FromHexError> {
        let address = text.parse()?;
        // Of a text that is an address, these are its digits.
        let digits = text.strip_prefix("0x").unwrap_or(text);
        Ok(Self(address, Spelling::of(digits)))
    }
}

impl Spelling {
    /// Of the digits of an address.
    fn of(digits: &str) -> Self {
        let capitals = digits.bytes().enumerate().filter(|(_, digit)| digit.is_ascii_uppercase());
        Self(capitals.fold(0, |all, (place, _)| all | 1 << place))
    }

    /// The address in these letters.
    pub(super) fn write(self, address: Address) -> String {
        let digits = self.digits(address);
        format!("0x{}", std::str::from_utf8(&digits).unwrap_or_default())
    }

    /// Its digits alone.
    pub(super) fn digits(self, address: Address) -> [u8; 40] {
        let mut digits = [0; 40];
        // 20 bytes are 40 digits.
        let _ = hex::encode_to_slice(address, &mut digits);
        let mut left = self.0;
        while left != 0 {
            if let Some(digit) = digits.get_mut(left.trailing_zeros() as usize) {
                digit.make_ascii_uppercase();
            }
            left &= left - 1;
        }
        digits
    }
}

impl From<Written> for Spelled {
    fn from(written: Written) -> Self {
        let Written { signature, authorization } = written;
        let WrittenAuthorization { from: Letters(from, payer), to, value, valid_after, valid_before, nonce } =
            authorization;
        let authorization = Authorization { from, to, value, valid_after, valid_before, nonce };
        Self { exact: ExactPayload { signature, authorization }, payer }
    }
}

impl<'de> Deserialize<'de> for Letters {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Text;

        impl de::Visitor<'_> for Text {
            type Value = Letters;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("an address of 20 bytes in hex")
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Letters, E> {
                text.parse().map_err(E::custom)
            }
        }

        deserializer.deserialize_str(Text)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn payload(from: &str) -> String {
        let text = json!({
            "signature": "0x07",
            "authorization": {
                "from": from, "to": Address::repeat_byte(0xba), "value": "1000", "validAfter": "0",
                "validBefore": "1800000120", "nonce": B256::repeat_byte(3),
            },
        });
        text.to_string()
    }

    #[test]
    fn a_payer_is_named_as_it_names_itself() {
        let checksummed = "0x70997970C51812dc3A010C7d01b50e0d17dc79C8";
        for text in
            [checksummed.to_owned(), checksummed.to_lowercase(), format!("0x{}", checksummed[2..].to_uppercase())]
        {
            let read = serde_json::from_str::<Spelled>(&payload(&text)).unwrap();
            assert_eq!(read.payer.write(read.exact.authorization.from), text);
            assert_eq!(read.exact, serde_json::from_str(&payload(&text)).unwrap());
        }
    }

    #[test]
    fn letters_of_another_address_are_only_letters() {
        let all = Spelling(u64::MAX).write(Address::repeat_byte(0xab));
        assert_eq!(all, format!("0x{}", "AB".repeat(20)));
    }

    #[test]
    fn what_is_no_address_is_not_read() {
        for from in
            ["", "0x", "70997970C51812dc3A010C7d01b50e0d17dc79C", "0x70997970C51812dc3A010C7d01b50e0d17dc79C8ff", "me"]
        {
            assert!(serde_json::from_str::<Spelled>(&payload(from)).is_err(), "{from:?}");
        }
    }
}
