//! Extensions: the payer's id of a payment (`payment-identifier`), and the rules for echoing the extensions of a 402.

use std::{collections::BTreeMap, fmt};

use alloy_primitives::{B256, keccak256};
use serde_json::{
    Map, Value, json,
    value::{RawValue, to_raw_value},
};

use super::Verbatim;

/// The name of [`PaymentId`]'s extension.
const NAME: &str = "payment-identifier";
/// The name of the extension that describes a route for catalogues. It is known without the feature `bazaar`, too: a server never
/// passes on a description that a payer invented.
#[cfg(any(feature = "bazaar", feature = "server"))]
pub(crate) const BAZAAR: &str = "bazaar";

/// A payer's id for a payment: 16 to 128 letters, digits, `-` and `_`.
///
/// It is not published on the chain, so it proves who presents a payment again. `Debug` does not show it.
#[derive(Clone, PartialEq, Eq)]
pub struct PaymentId(Box<str>);

impl PaymentId {
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

    /// Returns the extension that a server offers in a 402: a payer may give an id.
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
        let id = to_raw_value(self.as_str()).ok()?;
        let mut all = fields(extensions.text())?;
        let mut own = fields(all.get(NAME)?.get())?;
        let mut info = fields(own.get("info")?.get())?;
        info.insert("id".to_owned(), &id);
        let info = to_raw_value(&info).ok()?;
        own.insert("info".to_owned(), &info);
        let own = to_raw_value(&own).ok()?;
        all.insert(NAME.to_owned(), &own);
        to_raw_value(&all).ok().map(Verbatim::of_raw)
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

/// Returns the fields of a JSON object as text: what is only echoed is neither parsed nor written anew.
fn fields(text: &str) -> Option<BTreeMap<String, &RawValue>> {
    serde_json::from_str(text).ok()
}

/// Returns the extension of this name alone, if it is there. The others, and their schemas, are not parsed.
#[cfg(feature = "client")]
pub(crate) fn only(name: &str, extensions: &Verbatim<Map<String, Value>>) -> Option<Map<String, Value>> {
    let own = serde_json::from_str(fields(extensions.text())?.get(name)?.get()).ok()?;
    Some(Map::from_iter([(name.to_owned(), own)]))
}

/// Returns the first extension whose echo differs from the offer. A payer may omit an extension and may add fields to it, but may neither
/// change nor remove the fields of its `info` (x402 v2, section 5.2).
#[cfg(any(feature = "server", test))]
pub(crate) fn altered<'a>(offered: &'a Map<String, Value>, echoed: &Map<String, Value>) -> Option<&'a str> {
    let altered = offered
        .iter()
        .find(|(name, offered)| echoed.get(*name).is_some_and(|echoed| !contains(info_of(echoed), info_of(offered))));
    altered.map(|(name, _)| name.as_str())
}

/// Returns `true` if two values are equal as JSON: `1.0` equals 1.
#[cfg(any(feature = "bazaar", feature = "server", test))]
pub(crate) fn is_same(a: &Value, b: &Value) -> bool {
    match (a, b) {
        (Value::Object(a), Value::Object(b)) => {
            a.len() == b.len() && a.iter().all(|(name, a)| b.get(name).is_some_and(|b| is_same(a, b)))
        }
        (Value::Array(a), Value::Array(b)) => a.len() == b.len() && a.iter().zip(b).all(|(a, b)| is_same(a, b)),
        (Value::Number(x), Value::Number(y)) => x == y || x.as_f64() == y.as_f64(),
        _ => a == b,
    }
}

#[cfg(any(feature = "server", test))]
fn info_of(extension: &Value) -> &Value {
    extension.get("info").unwrap_or(extension)
}

#[cfg(any(feature = "server", test))]
fn contains(whole: &Value, part: &Value) -> bool {
    match (whole, part) {
        (Value::Object(whole), Value::Object(part)) => {
            part.iter().all(|(name, part)| whole.get(name).is_some_and(|whole| contains(whole, part)))
        }
        _ => is_same(whole, part),
    }
}

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
        let offered = PaymentId::declaration();
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

    fn altered_in(echoed: Value) -> Option<String> {
        let offered =
            json!({ "a": { "info": { "x": 1, "list": [1, 2], "deep": { "y": "z" } }, "schema": {} }, "b": 7 });
        altered(offered.as_object().unwrap(), echoed.as_object().unwrap()).map(str::to_owned)
    }

    #[test]
    fn an_echo_may_omit_extensions_and_add_fields() {
        for echoed in [
            json!({}),
            json!({ "b": 7.0 }),
            json!({ "c": "new" }),
            json!({ "a": { "info": { "x": 1.0, "list": [1, 2], "deep": { "y": "z", "more": [] }, "id": "mine" } } }),
        ] {
            assert_eq!(altered_in(echoed.clone()), None, "{echoed}");
        }
    }

    #[test]
    fn an_echo_may_not_change_or_remove_fields() {
        for info in [
            json!({}),
            json!({ "x": 2, "list": [1, 2], "deep": { "y": "z" } }),
            json!({ "x": 1, "list": [1, 2, 3], "deep": { "y": "z" } }),
            json!({ "x": 1, "list": [1, 2], "deep": {} }),
            json!({ "x": 1, "list": [1, 2], "deep": null }),
            json!([1]),
        ] {
            assert_eq!(altered_in(json!({ "a": { "info": info } })).as_deref(), Some("a"), "{info}");
        }
        assert_eq!(altered_in(json!({ "b": "7" })).as_deref(), Some("b"));
    }
}
