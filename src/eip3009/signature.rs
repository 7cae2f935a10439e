//! Signatures as payers send them.

use std::{fmt, sync::Arc};

use alloy_primitives::hex;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// A payer's signature: 65 bytes `r ‖ s ‖ v` from a key, or whatever a contract wallet accepts (ERC-1271).
///
/// Together with the authorization it is money until it is settled, so `Debug` shows only its length.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct PaymentSignature(Repr);

/// The variant follows from the length, so that equal bytes are equal.
#[derive(Clone, PartialEq, Eq, Hash)]
enum Repr {
    /// Of a key, as nearly all are: needs no allocation.
    Short([u8; 65]),
    Other(Arc<[u8]>),
}

impl PaymentSignature {
    /// The suffix of a signature for a wallet that is not deployed yet (ERC-6492).
    const ERC6492_SUFFIX: [u8; 32] = hex!("6492649264926492649264926492649264926492649264926492649264926492");

    /// Parses hex that starts with `0x`.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        // The decoder would strip another prefix.
        let digits = text.strip_prefix("0x").filter(|digits| !matches!(digits.as_bytes(), [_, b'x' | b'X', ..]))?;
        let mut short = [0; 65];
        match hex::decode_to_slice(digits, &mut short) {
            Ok(()) => Some(Self(Repr::Short(short))),
            Err(_) => hex::decode(digits).ok().map(Self::from),
        }
    }

    /// Returns the bytes.
    pub fn as_bytes(&self) -> &[u8] {
        match &self.0 {
            Repr::Short(bytes) => bytes,
            Repr::Other(bytes) => bytes,
        }
    }

    /// Returns `true` if it is for a wallet that is not deployed yet (ERC-6492).
    pub fn is_erc6492(&self) -> bool {
        self.as_bytes().ends_with(&Self::ERC6492_SUFFIX)
    }
}

impl From<[u8; 65]> for PaymentSignature {
    fn from(bytes: [u8; 65]) -> Self {
        Self(Repr::Short(bytes))
    }
}

impl From<Vec<u8>> for PaymentSignature {
    fn from(bytes: Vec<u8>) -> Self {
        Self(match bytes.as_slice().try_into() {
            Ok(short) => Repr::Short(short),
            Err(_) => Repr::Other(bytes.into()),
        })
    }
}

impl fmt::Debug for PaymentSignature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PaymentSignature({} bytes)", self.as_bytes().len())
    }
}

impl Serialize for PaymentSignature {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&format_args!("{:#}", hex::display(self.as_bytes())))
    }
}

impl<'de> Deserialize<'de> for PaymentSignature {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_str(Hex)
    }
}

/// Parses the text in place, without a copy.
struct Hex;

impl de::Visitor<'_> for Hex {
    type Value = PaymentSignature;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a string of hex digits")
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<PaymentSignature, E> {
        let expected = "expected hex that starts with 0x, an even number of digits";
        PaymentSignature::parse(text).ok_or_else(|| E::custom(expected))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signature_is_hex_with_one_prefix() {
        let digits = "ab".repeat(65);
        let parse = |text: String| PaymentSignature::parse(&text).map(|signature| signature.as_bytes().to_vec());
        assert_eq!(parse(format!("0x{digits}")), Some(vec![0xab; 65]));
        assert_eq!(parse("0xABab".into()), Some(vec![0xab; 2]), "the signature of a wallet may have any length");
        for wrong in [digits.clone(), format!("0x0x{digits}"), "0x0Xabab".into(), "0xabc".into(), "0xzz".into()] {
            assert_eq!(parse(wrong.clone()), None, "{wrong}");
        }
    }
}
