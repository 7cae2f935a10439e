//! 256-bit integers as decimal strings, as x402 writes them on the wire.

use std::fmt;

use alloy_primitives::U256;
use serde::{Deserializer, Serializer, de};

/// Reads an unsigned decimal integer and nothing else: no sign, no prefix, no spaces.
pub(crate) fn parse_decimal(text: &str) -> Option<U256> {
    // 2^256 has 78 digits; the bound keeps hostile lengths cheap.
    if text.is_empty() || text.len() > 78 || !text.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    // Nearly all are small; the others take as long as a multiplication of 256 bits for each digit.
    text.parse().map_or_else(|_| U256::from_str_radix(text, 10).ok(), |small: u64| Some(U256::from(small)))
}

pub(crate) fn serialize<S: Serializer>(value: &U256, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(value)
}

pub(crate) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<U256, D::Error> {
    deserializer.deserialize_str(Decimal)
}

/// Looks at the text where it is, so that nothing is allocated for it.
struct Decimal;

impl de::Visitor<'_> for Decimal {
    type Value = U256;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a decimal string")
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<U256, E> {
        parse_decimal(text).ok_or_else(|| E::custom("expected an unsigned decimal string within 256 bits"))
    }
}
