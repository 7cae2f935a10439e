//! The extension `payment-identifier`: the payer's id of a payment.

use std::fmt;

use alloy_primitives::{B256, keccak256};
use serde_json::{Map, Value, json};

use super::{Extension, Verbatim, extension::with_info};

/// The name of [`PaymentId`]'s extension.
const NAME: &str = "payment-identifier";

/// A payer's id for a payment: 16 to 128 letters, digits, `-` and `_`.
///
/// It is not published on the chain, so it proves who presents a payment again. `Debug` does not show it.
#[derive(Clone, PartialEq, Eq)]
pub struct PaymentId(Box<str>);

impl PaymentId {
    /// The name of its extension.
    #[cfg(feature = "server")]
    pub(crate) const NAME: &str = NAME;

    /// Creates an id from the first half of `random`, which must be secret.
    pub fn of_random(random: B256) -> Self {
        Self(format!("pay_{}", alloy_primitives::hex::encode(&random[..16])).into())
    }

    /// Returns the id as it is on the wire.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Returns the Keccak-256 of the id, to store instead of it.
    pub fn digest(&self) -> B256 {
        keccak256(self.0.as_bytes())
    }

    /// Returns the extension that a server declares: a payer may give an id.
    pub fn extension() -> Extension {
        let schema = json!({
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "type": "object",
            "properties": {
                "required": { "type": "boolean" },
                "id": { "type": "string", "minLength": 16, "maxLength": 128, "pattern": "^[a-zA-Z0-9_-]+$" },
            },
            "required": ["required"],
        });
        Extension::new(NAME, json!({ "required": false }), schema)
    }

    /// Returns the id in a payment's extensions, if there is one.
    ///
    /// # Errors
    /// [`PaymentIdError`] if it is not an id.
    pub fn of(extensions: &Map<String, Value>) -> Result<Option<Self>, PaymentIdError> {
        match extensions.get(NAME).and_then(|extension| extension.get("info")?.get("id")) {
            None => Ok(None),
            Some(Value::String(id)) => id.parse().map(Some),
            Some(_) => Err(PaymentIdError),
        }
    }

    /// Adds the id to the extensions that a server offered. Returns `None` if this extension is not among them. Everything else stays as it
    /// is, byte for byte.
    pub fn add_to(&self, extensions: &Verbatim<Map<String, Value>>) -> Option<Verbatim<Map<String, Value>>> {
        let id = Map::from_iter([("id".to_owned(), self.as_str().into())]);
        with_info(extensions, NAME, &id)
    }
}

impl std::str::FromStr for PaymentId {
    type Err = PaymentIdError;

    fn from_str(text: &str) -> Result<Self, PaymentIdError> {
        let allowed = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_');
        let is_id = (16..=128).contains(&text.len()) && text.bytes().all(allowed);
        if is_id { Ok(Self(text.into())) } else { Err(PaymentIdError) }
    }
}

impl fmt::Debug for PaymentId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PaymentId({} bytes)", self.0.len())
    }
}

/// Not a payment identifier.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a payment identifier has 16 to 128 letters, digits, hyphens and underscores")]
#[non_exhaustive]
pub struct PaymentIdError;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_ids_are_read() {
        for text in ["a".repeat(16), "Z9-_".repeat(32), PaymentId::of_random(B256::repeat_byte(7)).as_str().to_owned()]
        {
            assert!(text.parse::<PaymentId>().is_ok(), "{text}");
        }
        for text in ["".to_owned(), "a".repeat(15), "a".repeat(129), "a b".repeat(8), "\u{e9}".repeat(16)] {
            assert_eq!(text.parse::<PaymentId>(), Err(PaymentIdError), "{text}");
        }
    }

    #[test]
    fn an_id_that_was_added_is_found() {
        let id = PaymentId::of_random(B256::repeat_byte(7));
        let offered = PaymentId::extension().declared();
        assert_eq!(PaymentId::of(&offered), Ok(None));
        let given = id.add_to(&Verbatim::of(&offered).unwrap()).unwrap().read().unwrap();
        assert_eq!(PaymentId::of(&given), Ok(Some(id.clone())));
        assert_eq!(given[NAME]["schema"], offered[NAME]["schema"], "the rest returns as it came");
        assert!(!format!("{id:?}").contains("pay_"));
    }

    #[test]
    fn everything_but_the_id_returns_byte_for_byte() {
        let id = PaymentId::of_random(B256::repeat_byte(7));
        let offered = r#"{"bazaar":{ "b":1e2, "a" : 1.50},"payment-identifier":{"info":{},"schema":{ "b":1e2}}}"#;
        let given = id.add_to(&serde_json::from_str(offered).unwrap()).unwrap();
        let expected = offered.replace(r#"{}"#, &format!(r#"{{"id":"{}"}}"#, id.as_str()));
        assert_eq!(given.text(), expected);
    }

    #[test]
    fn nothing_is_added_where_nothing_was_offered() {
        let id = PaymentId::of_random(B256::repeat_byte(7));
        for offered in [
            "{}",
            "[]",
            r#"{"bazaar":{"info":{}}}"#,
            r#"{"payment-identifier":{}}"#,
            r#"{"payment-identifier":{"info":[]}}"#,
            r#"{"payment-identifier":7}"#,
        ] {
            assert!(id.add_to(&serde_json::from_str(offered).unwrap()).is_none(), "{offered}");
        }
    }
}
