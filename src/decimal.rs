//! 256-bit integers as decimal strings, the form in which x402 writes amounts and times.

use std::fmt;

use alloy_primitives::U256;
use serde::{Deserializer, Serializer, de};

/// Reads an unsigned decimal integer without sign, prefix or spaces.
pub(crate) fn parse_decimal(text: &str) -> Option<U256> {
    // 2^256 has 78 digits. The bound keeps long hostile texts cheap.
    if text.is_empty() || text.len() > 78 || !text.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    // Nearly all numbers fit 64 bits, which spares a 256-bit multiplication per digit.
    text.parse().map_or_else(|_| U256::from_str_radix(text, 10).ok(), |small: u64| Some(U256::from(small)))
}

pub(crate) fn serialize<S: Serializer>(value: &U256, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(value)
}

pub(crate) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<U256, D::Error> {
    deserializer.deserialize_str(Decimal)
}

/// Visits the text in place, so that nothing is allocated for it.
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
