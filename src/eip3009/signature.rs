//! Signatures as payers send them.

use std::fmt;

use alloy_primitives::Bytes;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// A payer's signature: 65 bytes `r ‖ s ‖ v` from a key, or whatever a contract wallet accepts (ERC-1271).
///
/// With the authorization it is money until it is settled, so `Debug` shows only its length.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct PaymentSignature(Bytes);

impl PaymentSignature {
    /// The suffix of a signature for a wallet that is not deployed yet (ERC-6492).
    const ERC6492_SUFFIX: [u8; 32] =
        alloy_primitives::hex!("6492649264926492649264926492649264926492649264926492649264926492");

    /// The bytes.
    pub const fn as_bytes(&self) -> &Bytes {
        &self.0
    }

    /// Whether it is wrapped for a wallet that is still to be deployed (ERC-6492).
    pub fn is_erc6492(&self) -> bool {
        self.0.ends_with(&Self::ERC6492_SUFFIX)
    }
}

impl From<Vec<u8>> for PaymentSignature {
    fn from(bytes: Vec<u8>) -> Self {
        Self(bytes.into())
    }
}

impl fmt::Debug for PaymentSignature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PaymentSignature({} bytes)", self.0.len())
    }
}

impl Serialize for PaymentSignature {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.0.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for PaymentSignature {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_str(Hex)
    }
}

/// Looks at the text where it is, so that nothing but the signature is allocated.
struct Hex;

impl de::Visitor<'_> for Hex {
    type Value = PaymentSignature;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a string of hex digits")
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<PaymentSignature, E> {
        let digits = text.strip_prefix("0x").ok_or_else(|| E::custom("expected hex that starts with 0x"))?;
        alloy_primitives::hex::decode(digits)
            .map(PaymentSignature::from)
            .map_err(|_| E::custom("expected an even number of hex digits"))
    }
}
