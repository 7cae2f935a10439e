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

    /// Refuses extensions that are not returned as they were declared.
    pub(crate) fn check(&self, echoed: Extensions<'_>) -> Result<(), Rejection> {
        let (Some(echoed), Some(_)) = (echoed.filter(|_| echoed != self.text()), &self.text) else { return Ok(()) };
        let mismatch = |detail| Err(Rejection::new(Reason::ExtensionEchoMismatch, detail));
        let Ok(echoed) = echoed.read() else { return mismatch("the extensions cannot be read".to_owned()) };
        let is_altered = |one: &&Extension| echoed.get(one.name()).is_some_and(|echoed| !one.is_echoed_by(echoed));
        match self.all().find(is_altered) {
            Some(altered) => mismatch(format!("the extension {:?} is not echoed as it was offered", altered.name())),
            None => Ok(()),
        }
    }

    /// Reads what a payer returned of the seller's extensions. What is not as it was declared is left out: a payment that is on record is
    /// answered in spite of it.
    pub(crate) fn read(&self, echoed: Extensions<'_>) -> Result<Echoed, Refusal> {
        let Some(echoed) = echoed.filter(|_| !self.sellers.is_empty()) else { return Ok(Echoed::default()) };
        let malformed = |detail: String| Refusal::malformed(Reason::InvalidPayload, detail);
        let all = fields(echoed.text()).ok_or_else(|| malformed("the extensions are not an object".to_owned()))?;
        let (mut infos, mut added) = (Map::new(), Sha256::new());
        let mut adds = false;
        for extension in &self.sellers {
            let name = extension.name();
            let Some(text) = all.get(name) else { continue };
            if text.get().len() > MAX_ECHO {
                return Err(malformed(format!("the extension {name:?} is longer than {MAX_ECHO} bytes")));
            }
            let unreadable = |error| malformed(format!("the extension {name:?} cannot be read: {error}"));
            let echoed: Value = serde_json::from_str(text.get()).map_err(unreadable)?;
            if !extension.is_echoed_by(&echoed) {
                continue;
            }
            let refused = |why| malformed(format!("the extension {name:?} is refused: {why}"));
            extension.admits(&echoed).map_err(refused)?;
            let info = echoed.get("info").cloned().unwrap_or_default();
            if !extension.is_repeated_by(&info) {
                adds = true;
                for part in [name, &info.to_string()] {
                    added.update((part.len() as u64).to_be_bytes());
                    added.update(part);
                }
            }
            infos.insert(name.to_owned(), info);
        }
        let added = adds.then(|| B256::from_slice(&added.finalize()));
        Ok(Echoed { infos: (!infos.is_empty()).then(|| Arc::new(infos)), added })
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
/// else, it is refused with 409.
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

/// Returns the digest of the payment identifier in these extensions. Only a layer that offers identifiers refuses malformed ones: to others
/// they mean nothing.
pub(crate) fn payment_id(extensions: Extensions<'_>, asks_for_ids: bool) -> Result<Option<B256>, Refusal> {
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

    fn written(text: &str) -> Verbatim<Map<String, Value>> {
        serde_json::from_str(text).unwrap()
    }

    fn read(text: &str) -> Result<Echoed, Refusal> {
        declared().read(Some(&written(text)))
    }

    #[test]
    fn payer_returns_what_was_declared_and_may_add() {
        let declared = declared();
        let as_declared = declared.read(declared.text()).unwrap();
        assert_eq!(as_declared.info("tip").unwrap(), Some(json!({ "currency": "USD" })));
        assert_eq!((as_declared.added(), declared.check(declared.text()).is_ok()), (None, true));
        let added = read(r#"{"tip":{"info":{"currency":"USD","for":"Ada"}}}"#).unwrap();
        assert_eq!(added.info("tip").unwrap(), Some(json!({ "currency": "USD", "for": "Ada" })));
        assert!(added.added().is_some());
        let reordered = read(r#"{"tip":{"info":{ "for":"Ada", "currency":"USD"},"schema":{}}}"#).unwrap();
        assert_eq!(added.added(), reordered.added(), "however it is written");
        assert_ne!(added.added(), read(r#"{"tip":{"info":{"currency":"USD","for":"Eve"}}}"#).unwrap().added());
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
            assert_eq!(read(text).unwrap(), Echoed::default(), "{text}");
        }
    }

    #[test]
    fn echo_that_is_too_long_or_of_the_wrong_type_is_refused() {
        let long = format!(r#"{{"tip":{{"info":{{"currency":"USD","for":"{}"}}}}}}"#, "x".repeat(MAX_ECHO));
        for text in ["[]", "7", &long, r#"{"tip":{"info":{"currency":"USD","for":7}}}"#] {
            assert!(read(text).is_err(), "{}", &text[..text.len().min(80)]);
        }
    }

    #[test]
    fn facilitator_is_told_what_was_declared_and_no_description_that_is_not_the_sellers() {
        let declared = declared();
        let told = |text: &str| declared.passed_on(Some(&written(text))).map(|told| told.text().to_owned());
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
