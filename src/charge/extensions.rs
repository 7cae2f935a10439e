//! The extensions of a payment: what its seller declares, what its payer makes of it, and how the payer names its payment.

use std::{collections::BTreeMap, fmt, sync::Arc};

use alloy_primitives::B256;
use serde::de::DeserializeOwned;
use serde_json::{
    Map, Value,
    value::{RawValue, to_raw_value},
};
use sha2::{Digest, Sha256};

use super::Refusal;
use crate::{
    payment::Rejection,
    protocol::{Extension, PaymentId, Reason, Verbatim, extension::fields},
};

/// The longest that a payer may return of one extension, in bytes of JSON.
pub(crate) const MAX_ECHO: usize = 8 * 1024;

/// Extensions as they were written.
pub(crate) type Extensions<'a> = Option<&'a Verbatim<Map<String, Value>>>;

/// The extensions that a seller declares.
#[derive(Debug, Default)]
pub(crate) struct Declared {
    /// Those of the seller, in the order of their names.
    sellers: Vec<Extension>,
    /// Those that charging itself knows.
    known: Vec<Extension>,
    /// All of them, as a 402 has them.
    text: Option<Verbatim<Map<String, Value>>>,
}

impl Declared {
    pub(crate) fn new(mut sellers: Vec<Extension>, known: Vec<Extension>) -> Self {
        sellers.sort_by(|one, other| one.name().cmp(other.name()));
        let all: Map<_, _> = sellers.iter().chain(&known).flat_map(Extension::declared).collect();
        let text = Verbatim::of(&all).ok().filter(|_| !all.is_empty());
        Self { sellers, known, text }
    }

    /// Returns the extensions as a 402 has them.
    pub(crate) fn text(&self) -> Extensions<'_> {
        self.text.as_ref()
    }

    /// Reads what a payer returned of the extensions. A new payment is refused whose payer returned one otherwise than it is declared, or with
    /// what its check refuses. Of the seller's extensions such a one is not told to the handler, and counts as added: a payment that is on
    /// record is answered in spite of it only if that is [how it was written](written) then.
    pub(super) fn read(&self, echoed: Extensions<'_>) -> (Echoed, Option<Refusal>) {
        let Some(echoed) = echoed.filter(|_| self.text.is_some()) else { return Default::default() };
        let Some(all) = fields(echoed.text()) else {
            return (Echoed::default(), Some(malformed("the extensions are not an object".to_owned())));
        };
        let (mut infos, mut additions, mut refusal) = (Map::new(), Vec::new(), None);
        for extension in &self.sellers {
            let name = extension.name();
            let Some(text) = all.get(name) else { continue };
            match read(extension, text) {
                Ok(echoed) => {
                    let info = echoed.get("info").cloned().unwrap_or_default();
                    additions.extend(extension.added_to(&info).map(|added| (name, added.to_string())));
                    infos.insert(name.to_owned(), info);
                }
                Err(refused) => {
                    additions.push((name, text.get().to_owned()));
                    refusal = refusal.or(Some(refused));
                }
            }
        }
        let refusal = refusal.or_else(|| self.known.iter().find_map(|known| read(known, all.get(known.name())?).err()));
        let added = digest(additions.iter().map(|(name, added)| (*name, added.as_str())));
        (Echoed { infos: (!infos.is_empty()).then(|| Arc::new(infos)), added }, refusal)
    }

    /// Returns what a facilitator is told of the extensions that a payer returned: those that were declared. The seller's description of
    /// the resource is told in the seller's own words, and only if the payer added none to them.
    pub(crate) fn passed_on(&self, echoed: Extensions<'_>) -> Option<Verbatim<Map<String, Value>>> {
        let echoed = echoed?;
        if Some(echoed) == self.text() {
            return Some(echoed.clone());
        }
        let all = fields(echoed.text())?;
        let told = |extension: &Extension| -> Option<Box<RawValue>> {
            let text: &RawValue = all.get(extension.name())?;
            let echoed: Value = serde_json::from_str(text.get()).ok()?;
            match extension.described() {
                Some(described) => extension.is_unaltered(&echoed).then(|| to_raw_value(described).ok()).flatten(),
                None => extension.is_echoed_by(&echoed).then(|| text.to_owned()),
            }
        };
        let told: BTreeMap<_, _> = self.all().filter_map(|one| Some((one.name(), told(one)?))).collect();
        if told.is_empty() { None } else { to_raw_value(&told).ok().map(Verbatim::of_raw) }
    }

    fn all(&self) -> impl Iterator<Item = &Extension> {
        self.sellers.iter().chain(&self.known)
    }
}

/// What a payer returned of the extensions that the seller declares. The layer puts it into the request's extensions.
///
/// It holds the extensions that a layer declares with
/// [`extension`](crate::server::RequirePaymentLayerBuilder::extension), each at most 8 KiB of JSON. Their `info` has what was declared,
/// unaltered, and what the payer added, which is of the type that it should be only as far as the extension's
/// [`check`](Extension::check) says so. A payment is bound to what its payer added, as to the request's path: presented again with something
/// else, it is refused with 409. Presented again as it was, it is answered whatever is declared since; of an extension that does not fit its
/// declaration any more, nothing is here.
///
/// ```
/// use serde::Deserialize;
/// use tower_x402::server::Echoed;
///
/// #[derive(Deserialize)]
/// struct Greeting {
///     name: Option<String>,
/// }
///
/// fn name_of<B>(request: &http::Request<B>) -> Option<String> {
///     let echoed = request.extensions().get::<Echoed>()?;
///     echoed.info::<Greeting>("greeting").ok()??.name
/// }
/// ```
#[derive(Clone, Default, PartialEq)]
pub struct Echoed {
    infos: Option<Arc<Map<String, Value>>>,
    added: Option<B256>,
}

impl Echoed {
    /// Returns the `info` of the extension of this name, or `None` if the payer did not return it.
    ///
    /// # Errors
    /// What was returned is no `T`.
    pub fn info<T: DeserializeOwned>(&self, name: &str) -> Result<Option<T>, serde_json::Error> {
        self.infos.as_ref().and_then(|infos| infos.get(name)).map(T::deserialize).transpose()
    }

    /// Returns the digest of what the payer added, if it added anything.
    pub(crate) const fn added(&self) -> Option<B256> {
        self.added
    }
}

impl fmt::Debug for Echoed {
    /// Names the extensions. Their values are the payer's.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Echoed").field(&self.infos.iter().flat_map(|infos| infos.keys()).collect::<Vec<_>>()).finish()
    }
}

fn malformed(detail: String) -> Refusal {
    Refusal::malformed(Reason::InvalidPayload, detail)
}

/// Reads what a payer returned of an extension.
fn read(extension: &Extension, text: &RawValue) -> Result<Value, Refusal> {
    let name = extension.name();
    if text.get().len() > MAX_ECHO {
        return Err(malformed(format!("the extension {name:?} is longer than {MAX_ECHO} bytes")));
    }
    let unreadable = |error| malformed(format!("the extension {name:?} cannot be read: {error}"));
    let echoed: Value = serde_json::from_str(text.get()).map_err(unreadable)?;
    if !extension.is_echoed_by(&echoed) {
        let detail = format!("the extension {name:?} is not echoed as it was offered");
        return Err(Rejection::new(Reason::ExtensionEchoMismatch, detail).into());
    }
    let refused = |why| malformed(format!("the extension {name:?} is refused: {why}"));
    extension.admits(&echoed).map_err(refused)?;
    Ok(echoed)
}

/// Returns the digest of all that a payer returned of extensions, as it wrote it, without its payment identifier: presented again, the same
/// payment has the same, whatever its seller declares meanwhile. Returns `None` if there is nothing.
pub(super) fn written(extensions: Extensions<'_>) -> Option<B256> {
    let all = fields(extensions?.text())?;
    digest(all.iter().map(|(name, text)| (name.as_str(), text.get())).filter(|(name, _)| *name != PaymentId::NAME))
}

/// Returns the digest of these values and their names, or `None` if there are none. Each is preceded by its length.
fn digest<'a>(values: impl Iterator<Item = (&'a str, &'a str)>) -> Option<B256> {
    let (mut hash, mut is_empty) = (Sha256::new(), true);
    for part in values.flat_map(|(name, value)| [name, value]) {
        is_empty = false;
        hash.update((part.len() as u64).to_be_bytes());
        hash.update(part);
    }
    (!is_empty).then(|| B256::from_slice(&hash.finalize()))
}

/// Returns the digest of the payment identifier in these extensions. Only a layer that offers identifiers refuses malformed ones: to others
/// they mean nothing.
pub(super) fn payment_id(extensions: Extensions<'_>, asks_for_ids: bool) -> Result<Option<B256>, Refusal> {
    let Some(extensions) = extensions else { return Ok(None) };
    let extensions = extensions.read().map_err(|error| format!("the extensions cannot be read: {error}"));
    match extensions.and_then(|extensions| PaymentId::of(&extensions).map_err(|error| error.to_string())) {
        Ok(id) => Ok(id.map(|id| id.digest())),
        Err(detail) if asks_for_ids => Err(Refusal::malformed(Reason::InvalidPayload, detail)),
        Err(_) => Ok(None),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn declared() -> Declared {
        let tip = Extension::new("tip", json!({ "currency": "USD" }), json!({})).check(|info| {
            let is_text = info.get("for").is_none_or(Value::is_string);
            if is_text { Ok(()) } else { Err("for is a text".to_owned()) }
        });
        let route = Extension::new("route", json!({ "method": "GET" }), json!({})).describes_resource();
        Declared::new(vec![tip, route], vec![PaymentId::extension()])
    }

    fn echo(text: &str) -> Verbatim<Map<String, Value>> {
        serde_json::from_str(text).unwrap()
    }

    fn read(text: &str) -> Echoed {
        declared().read(Some(&echo(text))).0
    }

    #[test]
    fn payer_returns_what_was_declared_and_may_add() {
        let declared = declared();
        let (as_declared, refusal) = declared.read(declared.text());
        assert_eq!(as_declared.info("tip").unwrap(), Some(json!({ "currency": "USD" })));
        assert_eq!((as_declared.added(), refusal.is_none()), (None, true));
        let added = read(r#"{"tip":{"info":{"currency":"USD","for":"Ada"}}}"#);
        assert_eq!(added.info("tip").unwrap(), Some(json!({ "currency": "USD", "for": "Ada" })));
        assert!(added.added().is_some());
        let reordered = read(r#"{"tip":{"info":{ "for":"Ada", "currency":"USD"},"schema":{}}}"#);
        assert_eq!(added.added(), reordered.added(), "however it is written");
        assert_ne!(added.added(), read(r#"{"tip":{"info":{"currency":"USD","for":"Eve"}}}"#).added());
    }

    #[test]
    fn handler_is_told_nothing_that_was_not_declared_or_was_altered() {
        for text in [
            "{}",
            r#"{"other":{"info":{"for":"Ada"}}}"#,
            r#"{"tip":{"info":{"currency":"EUR","for":"Ada"}}}"#,
            r#"{"tip":{"info":{"for":"Ada"}}}"#,
            r#"{"tip":{"info":7}}"#,
            r#"{"tip":null}"#,
            r#"{"payment-identifier":{"info":{"required":false,"id":"a-secret-of-the-payers"}}}"#,
        ] {
            assert!(read(text).infos.is_none(), "{text}");
        }
        let altered = read(r#"{"tip":{"info":{"currency":"EUR"}}}"#);
        assert!(altered.added().is_some(), "and it is no other payment's");
        assert_eq!(read(r#"{"other":{"info":{"for":"Ada"}}}"#).added(), None);
    }

    #[test]
    fn echo_that_is_too_long_or_of_the_wrong_type_is_refused() {
        let long = format!(r#"{{"tip":{{"info":{{"currency":"USD","for":"{}"}}}}}}"#, "x".repeat(MAX_ECHO));
        for text in ["[]", "7", &long, r#"{"tip":{"info":{"currency":"USD","for":7}}}"#] {
            assert!(declared().read(Some(&echo(text))).1.is_some(), "{}", &text[..text.len().min(80)]);
            assert!(read(text).infos.is_none(), "and a handler is not told of it");
        }
    }

    #[test]
    fn additions_are_the_same_whatever_is_declared_beside_them() {
        let added = |declared: Value, echoed: Value| {
            let declared = Declared::new(vec![Extension::new("tip", declared, json!({}))], Vec::new());
            declared.read(Some(&echo(&json!({ "tip": { "info": echoed } }).to_string()))).0.added()
        };
        let euros =
            added(json!({ "currency": "EUR", "to": {} }), json!({ "currency": "EUR", "to": { "name": "Ada" } }));
        let dollars = added(json!({ "to": { "x": 1 } }), json!({ "to": { "name": "Ada", "x": 1 } }));
        assert_eq!(euros, dollars);
        assert_ne!(euros, added(json!({}), json!({ "to": { "name": "Eve" } })));
        assert_eq!(added(json!({ "x": { "y": 1 } }), json!({ "x": { "y": 1 } })), None);
        assert!(added(json!({}), json!({ "x": {} })).is_some());
    }

    #[test]
    fn what_was_written_is_the_same_under_any_identifier() {
        let id = r#""payment-identifier":{"info":{"id":"a-secret-of-the-payers"}}"#;
        let (tip, other) = (r#""tip":{"info":{"for":"Ada"}}"#, r#""tip":{"info":{"for":"Eve"}}"#);
        let digest = |fields: &[&str]| super::written(Some(&echo(&format!("{{{}}}", fields.join(",")))));
        assert_eq!((digest(&[]), digest(&[id]), super::written(None)), (None, None, None));
        assert_eq!(digest(&[tip]), digest(&[id, tip]));
        assert!(digest(&[tip]).is_some() && digest(&[tip]) != digest(&[other]));
    }

    #[test]
    fn facilitator_is_told_what_was_declared_and_no_description_that_is_not_the_sellers() {
        let declared = declared();
        let told = |text: &str| declared.passed_on(Some(&echo(text))).map(|told| told.text().to_owned());
        assert_eq!(declared.passed_on(declared.text()).as_ref(), declared.text());
        let tip = r#""tip":{ "info":{"currency":"USD","more":1.50}}"#;
        assert_eq!(told(&format!(r#"{{ {tip},  "other":[1]}}"#)), Some(format!("{{{tip}}}")), "byte for byte");
        let route = r#""route":{"info":{"method":"GET"},"schema":{}}"#;
        assert_eq!(told(&format!("{{{route}}}")), Some(format!("{{{route}}}")));
        for route in [
            r#""route":{"info":{"method":"GET","more":1},"schema":{}}"#,
            r#""route":{"info":{"method":"GET"},"schema":{},"routeTemplate":"/:anything"}"#,
            r#""route":{"info":{"method":"POST"},"schema":{}}"#,
        ] {
            assert_eq!(told(&format!("{{{tip},{route}}}")), Some(format!("{{{tip}}}")), "{route}");
            assert_eq!(told(&format!("{{{route}}}")), None);
        }
        // Whoever reads the first of two gets the seller's, too.
        let twice = r#"{"route":{"info":{"method":"POST"},"info":{"method":"GET"},"schema":{}}}"#;
        assert_eq!(told(twice), Some(format!("{{{route}}}")));
    }
}
