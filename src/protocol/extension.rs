//! Extensions: what a server declares in its 402 besides the offers, and the rules for a payer's echo of it.

use std::{collections::BTreeMap, fmt, sync::Arc};

use serde_json::{
    Map, Value, json,
    value::{RawValue, to_raw_value},
};

use super::Verbatim;
#[cfg(any(feature = "server", test))]
use super::is_same_json;

type Check = dyn Fn(&Value) -> Result<(), String> + Send + Sync;

/// An extension that a server declares in the `extensions` of its 402 (x402 v2, section 5.1).
///
/// Its `info` holds the values of the extension, its `schema` describes them in JSON Schema. A payer returns what was declared, and may add
/// fields to `info`; it may neither change nor remove any (section 5.2). A layer declares it with `.extension(…)`, its handler reads what the
/// payer added from `server::Echoed`, and a facilitator gets it with the payment.
///
/// Whoever writes an extension says what its values are: here, a payer may give a name of at most 40 characters.
///
/// ```
/// use serde_json::json;
/// use tower_x402::protocol::Extension;
///
/// let greeting = Extension::new(
///     "greeting",
///     json!({ "language": "en" }),
///     json!({ "properties": { "name": { "type": "string", "maxLength": 40 } } }),
/// )
/// .check(|info| match info.get("name") {
///     None => Ok(()),
///     Some(name) if name.as_str().is_some_and(|name| name.chars().count() <= 40) => Ok(()),
///     Some(_) => Err("name is a text of at most 40 characters".to_owned()),
/// });
/// assert_eq!(greeting.declared()["greeting"]["info"]["language"], "en");
/// ```
#[derive(Clone)]
#[must_use]
pub struct Extension {
    name: Box<str>,
    declaration: Value,
    check: Option<Arc<Check>>,
    describes_resource: bool,
}

impl Extension {
    /// Creates an extension of this name. `schema` describes `info` with all that a payer may add: clients ignore all extensions of a 402 if
    /// one has no schema. Keep both short: they are in the header of every 402, which has room for about 4 KB of JSON in all.
    pub fn new(name: impl Into<Box<str>>, info: Value, schema: Value) -> Self {
        Self {
            name: name.into(),
            declaration: json!({ "info": info, "schema": schema }),
            check: None,
            describes_resource: false,
        }
    }

    /// Sets a check of the `info` that a payer returns. It is called before anything is reserved, verified or paid. If it fails, the request
    /// is answered 400 with this sentence. Default: no check, and a handler reads values of any type.
    pub fn check(mut self, check: impl Fn(&Value) -> Result<(), String> + Send + Sync + 'static) -> Self {
        self.check = Some(Arc::new(check));
        self
    }

    /// Makes it the seller's description of the resource, which others may be shown: a layer that declares it needs a public URL, and an echo
    /// to which a payer added anything is not passed on to the facilitator.
    pub const fn describes_resource(mut self) -> Self {
        self.describes_resource = true;
        self
    }

    /// Returns the extension's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the extension under its name, as a 402 has it.
    pub fn declared(&self) -> Map<String, Value> {
        Map::from_iter([(self.name.to_string(), self.declaration.clone())])
    }

    /// Returns the seller's description of the resource, if it is one.
    #[cfg(feature = "server")]
    pub(crate) fn described(&self) -> Option<&Value> {
        self.describes_resource.then_some(&self.declaration)
    }

    /// Returns `true` if a payer returned what was declared, perhaps with more in `info`.
    #[cfg(any(feature = "server", test))]
    pub(crate) fn is_echoed_by(&self, echoed: &Value) -> bool {
        contains(info_of(echoed), info_of(&self.declaration))
    }

    /// Returns `true` if a payer returned all of what was declared, and nothing else.
    #[cfg(feature = "server")]
    pub(crate) fn is_unaltered(&self, echoed: &Value) -> bool {
        is_same_json(echoed, &self.declaration)
    }

    /// Returns what a payer added to `info`, which [has all that was declared](Self::is_echoed_by), or `None` if that is nothing.
    #[cfg(feature = "server")]
    pub(crate) fn added_to(&self, info: &Value) -> Option<Value> {
        added(info, info_of(&self.declaration))
    }

    /// Returns `Err` with a sentence if the extension's own check refuses what a payer returned.
    #[cfg(feature = "server")]
    pub(crate) fn admits(&self, echoed: &Value) -> Result<(), String> {
        self.check.as_ref().map_or(Ok(()), |check| check(info_of(echoed)))
    }
}

impl fmt::Debug for Extension {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Extension").field("name", &self.name).field("declaration", &self.declaration).finish()
    }
}

/// Returns the fields of a JSON object as text: what is only echoed is neither parsed nor written anew.
pub(crate) fn fields(text: &str) -> Option<BTreeMap<String, &RawValue>> {
    serde_json::from_str(text).ok()
}

/// Returns the extension of this name alone, if it is there. The others, and their schemas, are not parsed.
#[cfg(feature = "client")]
pub(crate) fn only(name: &str, extensions: &Verbatim<Map<String, Value>>) -> Option<Map<String, Value>> {
    let own = serde_json::from_str(fields(extensions.text())?.get(name)?.get()).ok()?;
    Some(Map::from_iter([(name.to_owned(), own)]))
}

/// Adds these fields to the `info` of an extension that a server declared. Returns `None` if it is not among them, or has one of the fields.
/// Everything else stays as it is, byte for byte.
pub(crate) fn with_info(
    extensions: &Verbatim<Map<String, Value>>,
    name: &str,
    more: &Map<String, Value>,
) -> Option<Verbatim<Map<String, Value>>> {
    let more: Vec<_> = more.iter().map(|(key, value)| Some((key, to_raw_value(value).ok()?))).collect::<Option<_>>()?;
    let mut all = fields(extensions.text())?;
    let mut own = fields(all.get(name)?.get())?;
    let mut info = fields(own.get("info")?.get())?;
    for (key, value) in &more {
        if info.insert((*key).clone(), value).is_some() {
            return None;
        }
    }
    let info = to_raw_value(&info).ok()?;
    own.insert("info".to_owned(), &info);
    let own = to_raw_value(&own).ok()?;
    all.insert(name.to_owned(), &own);
    to_raw_value(&all).ok().map(Verbatim::of_raw)
}

#[cfg(any(feature = "server", test))]
fn info_of(extension: &Value) -> &Value {
    extension.get("info").unwrap_or(&Value::Null)
}

#[cfg(any(feature = "server", test))]
fn contains(whole: &Value, part: &Value) -> bool {
    match (whole, part) {
        (Value::Object(whole), Value::Object(part)) => {
            part.iter().all(|(name, part)| whole.get(name).is_some_and(|whole| contains(whole, part)))
        }
        _ => is_same_json(whole, part),
    }
}

/// Returns what `whole` has that is not in `part`, of which it has all.
#[cfg(feature = "server")]
fn added(whole: &Value, part: &Value) -> Option<Value> {
    let (Value::Object(whole), Value::Object(part)) = (whole, part) else { return None };
    let more = whole.iter().filter_map(|(name, value)| {
        let more = match part.get(name) {
            Some(part) => added(value, part)?,
            None => value.clone(),
        };
        Some((name.clone(), more))
    });
    let more: Map<_, _> = more.collect();
    (!more.is_empty()).then_some(Value::Object(more))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_echoed(echoed: Value) -> bool {
        let info = json!({ "x": 1, "list": [1, 2], "deep": { "y": "z" } });
        Extension::new("a", info, json!({})).is_echoed_by(&echoed)
    }

    #[test]
    fn an_echo_may_add_fields() {
        for info in [
            json!({ "x": 1, "list": [1, 2], "deep": { "y": "z" } }),
            json!({ "x": 1.0, "list": [1, 2], "deep": { "y": "z", "more": [] }, "id": "mine" }),
        ] {
            assert!(is_echoed(json!({ "info": info })), "{info}");
        }
    }

    #[test]
    fn an_echo_may_not_change_or_remove_fields() {
        for echoed in [
            json!({}),
            json!(null),
            json!("a"),
            json!({ "info": {} }),
            json!({ "info": { "x": 2, "list": [1, 2], "deep": { "y": "z" } } }),
            json!({ "info": { "x": 1, "list": [1, 2, 3], "deep": { "y": "z" } } }),
            json!({ "info": { "x": 1, "list": [1, 2], "deep": {} } }),
            json!({ "info": { "x": 1, "list": [1, 2], "deep": null } }),
            json!({ "info": [1] }),
            json!({ "x": 1, "list": [1, 2], "deep": { "y": "z" } }),
        ] {
            assert!(!is_echoed(echoed.clone()), "{echoed}");
        }
    }

    #[test]
    fn an_echo_repeats_integers_exactly() {
        const LARGE: u64 = (1 << 53) + 1;
        let extension = Extension::new("a", json!({ "x": LARGE, "y": -2, "z": 4.0 }), json!({}));
        let is_echoed =
            |x: Value, y: Value, z: Value| extension.is_echoed_by(&json!({ "info": { "x": x, "y": y, "z": z } }));
        assert!(is_echoed(json!(LARGE), json!(-2.0), json!(4)));
        for x in [json!(LARGE - 1), json!(LARGE + 1), json!((LARGE - 1) as f64), json!((LARGE + 1) as f64)] {
            assert!(!is_echoed(x.clone(), json!(-2), json!(4)), "{x}");
        }
        assert!(!is_echoed(json!(LARGE), json!(2), json!(4)) && !is_echoed(json!(LARGE), json!(-2), json!(4.5)));
    }

    #[test]
    fn fields_are_added_to_what_was_offered_and_change_nothing() {
        let offered = r#"{"other":{ "b":1e2, "a" : 1.50},"own":{"info":{"x":1.0},"schema":{ "b":1e2}}}"#;
        let offered: Verbatim<Map<String, Value>> = serde_json::from_str(offered).unwrap();
        let more = |value: Value| value.as_object().unwrap().clone();
        let given = with_info(&offered, "own", &more(json!({ "y": "z" }))).unwrap();
        assert_eq!(given.text(), offered.text().replace(r#"{"x":1.0}"#, r#"{"x":1.0,"y":"z"}"#));
        assert!(with_info(&offered, "own", &more(json!({ "x": 2 }))).is_none(), "what was declared stays");
        assert!(with_info(&offered, "none", &more(json!({ "y": 2 }))).is_none());
    }
}
