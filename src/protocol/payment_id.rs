//! The extension `payment-identifier`: an id of the payer's, by which a repeated payment is recognized.

use std::fmt;

use alloy_primitives::{B256, keccak256};
use serde_json::{Map, Value, json};

/// Its name among the extensions.
const NAME: &str = "payment-identifier";

/// What a payer calls a payment: 16 to 128 letters, digits, `-` and `_`.
///
/// It is not published on the chain, so that it proves who presents a payment again. `Debug` does not show it.
#[derive(Clone, PartialEq, Eq)]
pub struct PaymentId(Box<str>);

impl PaymentId {
    /// An id made of randomness.
    pub fn of_random(random: &[u8; 16]) -> Self {
        Self(format!("pay_{}", alloy_primitives::hex::encode(random)).into())
    }

    /// The id as it is written.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Keccak-256 of the id, to be kept in its place.
    pub fn digest(&self) -> B256 {
        keccak256(self.0.as_bytes())
    }

    /// What a server offers in a 402: an id may be given.
    pub fn declaration() -> Map<String, Value> {
        let schema = json!({
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "type": "object",
            "properties": {
                "required": { "type": "boolean" },
                "id": { "type": "string", "minLength": 16, "maxLength": 128, "pattern": "^[a-zA-Z0-9_-]+$" },
            },
            "required": ["required"],
        });
        Map::from_iter([(NAME.to_owned(), json!({ "info": { "required": false }, "schema": schema }))])
    }

    /// The id in a payment's extensions, if there is one.
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

    /// Adds the id to the extensions that a server offered; `false` if this one is not among them.
    pub fn add_to(&self, extensions: &mut Map<String, Value>) -> bool {
        let info = extensions.get_mut(NAME).and_then(|extension| extension.get_mut("info")?.as_object_mut());
        info.map(|info| info.insert("id".to_owned(), self.as_str().into())).is_some()
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
pub struct PaymentIdError;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_ids_are_read() {
        for text in ["a".repeat(16), "Z9-_".repeat(32), PaymentId::of_random(&[7; 16]).as_str().to_owned()] {
            assert!(text.parse::<PaymentId>().is_ok(), "{text}");
        }
        for text in ["".to_owned(), "a".repeat(15), "a".repeat(129), "a b".repeat(8), "\u{e9}".repeat(16)] {
            assert_eq!(text.parse::<PaymentId>(), Err(PaymentIdError), "{text}");
        }
    }

    #[test]
    fn an_id_that_was_added_is_found() {
        let id = PaymentId::of_random(&[7; 16]);
        let mut extensions = PaymentId::declaration();
        assert_eq!(PaymentId::of(&extensions), Ok(None));
        assert!(id.add_to(&mut extensions));
        assert_eq!(PaymentId::of(&extensions), Ok(Some(id.clone())));
        assert!(!id.add_to(&mut Map::new()));
        assert!(!format!("{id:?}").contains("pay_"));
    }
}
