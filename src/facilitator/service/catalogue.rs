//! What was sold through this facilitator, for those who look for something to buy (`GET /discovery/resources`).
//!
//! Nothing here is fetched. What sellers say of themselves comes with the payments that are settled, through the payers' hands.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use serde_json::{Map, Value, json};

use super::public_url::{is_public_url, public_url};
use crate::{
    payment::{Echo, Prechecked},
    protocol::{PaymentRequirements, ResourceInfo, Verbatim, bazaar, timestamp},
};

/// The most that all resources may take, in bytes of JSON.
const MAX_BYTES: usize = 32 << 20;
/// How many offers are shown for one resource, the newest first.
const MAX_OFFERS: usize = 5;
/// How many resources a page has, if nothing else is asked for, and at most.
const PAGE: usize = 20;
const MAX_PAGE: usize = 100;
/// Bounds of what sellers say of themselves, in characters.
const MAX_DESCRIPTION: usize = 500;
const MAX_MIME_TYPE: usize = 100;
const MAX_NAME: usize = 32;
const MAX_TAGS: usize = 5;

/// Bounds of a [`Catalogue`].
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    pub(super) resources: usize,
    pub(super) max_age: Duration,
    /// Whether hosts are listed that are not public.
    pub(super) local_hosts: bool,
}

#[derive(Debug)]
pub(super) struct Catalogue {
    limits: Limits,
    known: Mutex<Known>,
}

#[derive(Debug, Default)]
struct Known {
    /// In the order in which they were learned of, so that pages do not shift.
    listed: BTreeMap<u64, Listed>,
    places: HashMap<Place, u64>,
    next: u64,
    bytes: usize,
}

/// What tells resources apart: the URL, and the method or the tool.
type Place = (String, String);

#[derive(Debug)]
struct Listed {
    place: Place,
    kind: String,
    /// All but the offers and the time.
    item: Map<String, Value>,
    accepts: Vec<Verbatim<PaymentRequirements>>,
    size: usize,
    updated: u64,
}

/// What is asked for.
#[derive(Debug, Default)]
pub(super) struct Query {
    kind: Option<String>,
    pay_to: Option<String>,
    scheme: Option<String>,
    network: Option<String>,
    extension: Option<String>,
    limit: Option<usize>,
    offset: usize,
}

impl Query {
    /// `None` if a number is none; what is not known is not looked at.
    pub(super) fn read(query: &str) -> Option<Self> {
        let mut read = Self::default();
        for (name, value) in form_urlencoded::parse(query.as_bytes()) {
            match &*name {
                "type" => read.kind = Some(value.into()),
                "payTo" => read.pay_to = Some(value.into()),
                "scheme" => read.scheme = Some(value.into()),
                "network" => read.network = Some(value.into()),
                "extensions" => read.extension = Some(value.into()),
                "limit" => read.limit = Some(value.parse().ok()?),
                "offset" => read.offset = value.parse().ok()?,
                _ => {}
            }
        }
        Some(read)
    }

    fn includes(&self, listed: &Listed) -> bool {
        let fits = |asked: &Option<String>, said: &str| asked.as_ref().is_none_or(|asked| asked == said);
        let is_payable = |offer: &Verbatim<PaymentRequirements>| {
            offer.read().is_ok_and(|offer| {
                fits(&self.scheme, &offer.scheme)
                    && fits(&self.network, &offer.network)
                    && self.pay_to.as_ref().is_none_or(|payee| payee.eq_ignore_ascii_case(&offer.pay_to))
            })
        };
        let is_any_offer = self.scheme.is_none() && self.network.is_none() && self.pay_to.is_none();
        fits(&self.kind, &listed.kind)
            && fits(&self.extension, bazaar::NAME)
            && (is_any_offer || listed.accepts.iter().any(is_payable))
    }
}

impl Catalogue {
    pub(super) fn new(limits: Limits) -> Self {
        Self { limits, known: Mutex::default() }
    }

    /// Enters what was paid for, if the seller wants it to be found.
    pub(super) fn learn(&self, payment: &Prechecked, now: u64) {
        let Some((place, kind, item)) = payment.echo().and_then(|echo| self.describe(echo)) else { return };
        let offer = payment.terms().text().clone();
        let mut known = self.lock(now);
        let (number, mut accepts) = match known.remove(&place) {
            Some((number, before)) => (number, before.accepts),
            None => (known.next, Vec::new()),
        };
        accepts.retain(|other| !is_same_way(other, &offer));
        accepts.insert(0, offer);
        accepts.truncate(MAX_OFFERS);
        let size = place.0.len()
            + Value::Object(item.clone()).to_string().len()
            + accepts.iter().map(|offer| offer.text().len()).sum::<usize>();
        known.insert(number, Listed { place, kind, item, accepts, size, updated: now });
        while known.listed.len() > self.limits.resources || known.bytes > MAX_BYTES {
            let oldest = known.listed.values().min_by_key(|listed| listed.updated).map(|listed| listed.place.clone());
            let Some(oldest) = oldest else { break };
            known.remove(&oldest);
        }
    }

    /// The answer to a query.
    pub(super) fn list(&self, query: &Query, now: u64) -> Value {
        let known = self.lock(now);
        let limit = query.limit.unwrap_or(PAGE).min(MAX_PAGE);
        let matching: Vec<_> = known.listed.values().filter(|listed| query.includes(listed)).collect();
        let items: Vec<_> = matching.iter().skip(query.offset).take(limit).map(|listed| listed.show()).collect();
        json!({
            "x402Version": 2,
            "items": items,
            "pagination": { "limit": limit, "offset": query.offset, "total": matching.len() },
        })
    }

    /// What is known, without what is too old.
    fn lock(&self, now: u64) -> MutexGuard<'_, Known> {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let oldest = now.saturating_sub(self.limits.max_age.as_secs());
        let gone: Vec<_> =
            known.listed.values().filter(|listed| listed.updated < oldest).map(|listed| listed.place.clone()).collect();
        gone.iter().for_each(|place| drop(known.remove(place)));
        known
    }

    /// `None` if it is not to be shown: the payer may have made it up.
    fn describe(&self, echo: &Echo) -> Option<(Place, String, Map<String, Value>)> {
        let resource = echo.resource()?.read().ok()?;
        let extension = echo.extensions()?.read().ok()?.remove(bazaar::NAME)?;
        if let Err(error) = bazaar::check(&extension) {
            tracing::debug!(%error, "a resource is not catalogued");
            return None;
        }
        let template = extension.get("routeTemplate").and_then(Value::as_str).filter(|text| is_template(text));
        let url = public_url(&resource.url, template, self.limits.local_hosts)?;
        let input = &extension["info"]["input"];
        let kind = input["type"].as_str()?.to_owned();
        let name = ["method", "toolName", "tool"].iter().find_map(|field| input.get(*field)?.as_str());
        let place = (url.clone(), name.unwrap_or_default().chars().take(128).collect());
        let mut item = Map::from_iter([
            ("resource".to_owned(), url.into()),
            ("type".to_owned(), kind.clone().into()),
            ("x402Version".to_owned(), 2.into()),
            // The others are not for everybody: an id that a payer gave to its payment is a secret.
            ("extensions".to_owned(), json!({ bazaar::NAME: extension })),
        ]);
        item.extend(metadata(resource));
        Some((place, kind, item))
    }
}

impl Known {
    fn insert(&mut self, number: u64, listed: Listed) {
        self.next = self.next.max(number + 1);
        self.bytes += listed.size;
        self.places.insert(listed.place.clone(), number);
        self.listed.insert(number, listed);
    }

    fn remove(&mut self, place: &Place) -> Option<(u64, Listed)> {
        let number = self.places.remove(place)?;
        let listed = self.listed.remove(&number)?;
        self.bytes -= listed.size;
        Some((number, listed))
    }
}

impl Listed {
    fn show(&self) -> Value {
        let mut item = self.item.clone();
        let accepts = self.accepts.iter().filter_map(|offer| serde_json::from_str(offer.text()).ok());
        item.insert("accepts".to_owned(), Value::Array(accepts.collect()));
        item.insert("lastUpdated".to_owned(), timestamp::format_millis(self.updated).into());
        Value::Object(item)
    }
}

/// Two prices, or windows, of one way to pay.
fn is_same_way(one: &Verbatim<PaymentRequirements>, other: &Verbatim<PaymentRequirements>) -> bool {
    let (Ok(one), Ok(other)) = (one.read(), other.read()) else { return false };
    let way = |offer: &PaymentRequirements| {
        let flow = offer.extra.get("paymentFlow").cloned();
        (offer.scheme.clone(), offer.network.clone(), offer.asset.clone(), offer.pay_to.clone(), flow)
    };
    way(&one) == way(&other)
}

/// What a seller says of itself, by the rules of the specification: what breaks one is left out.
fn metadata(resource: ResourceInfo) -> Map<String, Value> {
    let is_name =
        |name: &str| (1..=MAX_NAME).contains(&name.len()) && name.bytes().all(|byte| (b' '..=b'~').contains(&byte));
    let is_prose = |text: &str, most: usize| {
        !text.is_empty() && text.chars().count() <= most && !text.chars().any(char::is_control)
    };
    let mut seen = HashSet::new();
    let is_new = |tag: &String| is_name(tag) && seen.insert(tag.to_ascii_lowercase());
    let tags: Vec<_> = resource.tags.into_iter().filter(is_new).take(MAX_TAGS).collect();
    let said = [
        ("description", resource.description.filter(|text| is_prose(text, MAX_DESCRIPTION)).map(Value::from)),
        ("mimeType", resource.mime_type.filter(|text| is_prose(text, MAX_MIME_TYPE)).map(Value::from)),
        ("serviceName", resource.service_name.filter(|name| is_name(name)).map(Value::from)),
        ("tags", Some(tags).filter(|tags| !tags.is_empty()).map(Value::from)),
        ("iconUrl", resource.icon_url.filter(|url| is_public_url(url)).map(Value::from)),
    ];
    said.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?))).collect()
}

/// A path in which `:names` stand for what varies; the payer may have made it up.
fn is_template(text: &str) -> bool {
    let is_plain = text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_/:.-~%".contains(&byte));
    if !text.starts_with('/') || text.len() < 2 || text.len() > 512 || !is_plain {
        return false;
    }
    // However often it is encoded.
    let mut text = text.to_owned();
    for _ in 0..5 {
        let Some(decoded) = decoded(&text) else { return false };
        if decoded == text {
            return !text.contains("..") && !text.contains("://");
        }
        text = decoded;
    }
    false
}

/// Percent-decoded once.
fn decoded(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((first, after)) = rest.split_first() {
        rest = after;
        if *first != b'%' {
            bytes.push(*first);
            continue;
        }
        let (hex, after) = after.split_at_checked(2)?;
        let hex = std::str::from_utf8(hex).ok().filter(|hex| hex.bytes().all(|byte| byte.is_ascii_hexdigit()))?;
        bytes.push(u8::from_str_radix(hex, 16).ok()?);
        rest = after;
    }
    String::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_template_stays_on_its_host() {
        for good in ["/users/:id", "/a%20b/:c", "/v1.0/x~y-z_"] {
            assert!(is_template(good), "{good}");
        }
        for bad in [
            "",
            "/",
            "users",
            "//evil.example/%zz",
            "/a/../b",
            "/%2e%2e/b",
            "/%252e%252e/b",
            "/http://x",
            "/http:%2f%2fx",
            "/a?b",
            "/a#b",
            "/a b",
            "/%",
            "/%25252525252525",
        ] {
            assert!(!is_template(bad), "{bad}");
        }
    }

    #[test]
    fn what_a_seller_says_of_itself_is_kept_to_the_rules() {
        let resource = ResourceInfo {
            description: Some("Evaluates\u{7}".into()),
            mime_type: Some("application/json".into()),
            service_name: Some("N".repeat(33)),
            tags: ["a", "A", "", "\u{e9}", "b", "c", "d", "e", "f"].map(str::to_owned).into(),
            icon_url: Some("http://127.0.0.1/icon.png".into()),
            ..ResourceInfo::default()
        };
        let said = Value::Object(metadata(resource));
        assert_eq!(said, json!({ "mimeType": "application/json", "tags": ["a", "b", "c", "d", "e"] }));
    }
}
