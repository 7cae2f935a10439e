//! 128-bit amounts as canonical decimal strings.

use std::fmt;

use serde::{Deserializer, Serializer, de};

/// Reads `0`, or digits that do not start with `0`, up to 2^128 − 1. There is one text for each amount, so two readers cannot disagree.
pub(crate) fn parse(text: &str) -> Option<u128> {
    let is_canonical = text == "0" || !text.starts_with('0');
    (is_canonical && text.bytes().all(|byte| byte.is_ascii_digit())).then(|| text.parse().ok())?
}

pub(crate) fn serialize<S: Serializer>(amount: &u128, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(amount)
}

pub(crate) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u128, D::Error> {
    struct Canonical;

    impl de::Visitor<'_> for Canonical {
        type Value = u128;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("an amount of atomic units as a decimal string")
        }

        fn visit_str<E: de::Error>(self, text: &str) -> Result<u128, E> {
            parse(text).ok_or_else(|| E::invalid_value(de::Unexpected::Str(text), &self))
        }
    }

    deserializer.deserialize_str(Canonical)
}

/// The same for a field that may be absent, and is an amount if it is there: `null` is none.
pub(crate) mod present {
    use serde::Deserializer;

    pub(crate) use super::option::serialize;

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u128>, D::Error> {
        super::deserialize(deserializer).map(Some)
    }
}

/// The same for a field that may be absent or `null`.
pub(crate) mod option {
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    #[derive(Serialize, Deserialize)]
    struct Amount(#[serde(with = "super")] u128);

    #[expect(clippy::ref_option, reason = "serde passes fields by reference")]
    pub(crate) fn serialize<S: Serializer>(amount: &Option<u128>, serializer: S) -> Result<S::Ok, S::Error> {
        amount.map(Amount).serialize(serializer)
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u128>, D::Error> {
        Ok(Option::<Amount>::deserialize(deserializer)?.map(|amount| amount.0))
    }
}

#[cfg(test)]
mod tests {
    use super::parse;

    #[test]
    fn each_amount_has_one_text() {
        assert_eq!(parse("0"), Some(0));
        assert_eq!(parse("1000"), Some(1_000));
        assert_eq!(parse(&u128::MAX.to_string()), Some(u128::MAX));
        for text in [
            "",
            "00",
            "01",
            "-1",
            "+1",
            " 1",
            "1 ",
            "1e3",
            "0x1",
            "1.0",
            "١",
            "340282366920938463463374607431768211456",
        ] {
            assert_eq!(parse(text), None, "{text:?}");
        }
    }
}
