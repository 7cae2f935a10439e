//! 256-bit integers as decimal strings, as x402 writes them.

use std::fmt;

use alloy_primitives::U256;
use serde::{Deserializer, Serializer, de};

use crate::protocol::parse_decimal;

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
