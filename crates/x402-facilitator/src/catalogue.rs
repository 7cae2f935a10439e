//! The catalogue of paid resources (`GET /discovery/resources`).
//!
//! Nothing is fetched. Descriptions come with the payments that are settled, so a payer may have invented them.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    net::IpAddr,
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use http::{StatusCode, Uri};
use jiff::Timestamp;
use percent_encoding::percent_decode_str;
use serde_json::{Map, Value, json};
use tower_x402::{
    payment::{EchoedMetadata, Prechecked},
    protocol::{PaymentRequirements, ResourceInfo, Verbatim},
};
use x402_bazaar as bazaar;

use crate::{FacilitatorServiceBuilder, messages::Answer};

/// The most memory for all resources, in bytes of JSON.
const MAX_BYTES: usize = 32 << 20;
/// How many offers are listed per resource, the newest first.
const MAX_OFFERS: usize = 5;
/// The default and the largest number of resources per page.
const PAGE: usize = 20;
const MAX_PAGE: usize = 100;
/// The longest URL that is listed, in bytes.
const MAX_URL: usize = 2_048;
/// Bounds of a seller's description, in characters.
const MAX_DESCRIPTION: usize = 500;
const MAX_MIME_TYPE: usize = 100;
const MAX_NAME: usize = 32;
const MAX_TAGS: usize = 5;

impl FacilitatorServiceBuilder {
    /// Lists paid resources at `GET /discovery/resources`, as the specification defines it. Default: off, as with zero resources.
    ///
    /// A resource is listed when a payment for it is settled that came with the extension [`bazaar`]. It is
    /// removed when nothing was paid for it for `max_age`. If there are more than `resources`, the one paid for longest ago is removed.
    /// The list is kept in memory.
    ///
    /// A payer can list what it likes by paying itself, since URL and description come with the payment. So nothing is fetched, and only
    /// `http` and `https` URLs of public host names are listed, without query, with a description within bounds. Readers should
    /// trust the 402 of a resource, not the list. The query takes `type`, `payTo`, `scheme`, `network`, `extensions`, `limit` (20, at most
    /// 100) and `offset`.
    pub fn catalogue(mut self, resources: usize, max_age: Duration) -> Self {
        self.catalogue = Limits { resources, max_age, ..self.catalogue };
        self
    }

    /// Sets whether resources on addresses and local names are listed, for private networks. Default: `false`.
    pub fn catalogue_local_hosts(mut self, list: bool) -> Self {
        self.catalogue.local_hosts = list;
        self
    }
}

/// Bounds of a [`Catalogue`].
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Limits {
    resources: usize,
    max_age: Duration,
    /// List resources on local hosts, too.
    local_hosts: bool,
}

#[derive(Debug)]
pub(crate) struct Catalogue {
    limits: Limits,
    resources: Mutex<Resources>,
}

#[derive(Debug, Default)]
struct Resources {
    /// In order of their first payment, so that pages do not shift.
    listed: BTreeMap<u64, Listed>,
    places: HashMap<Place, u64>,
    next: u64,
    bytes: usize,
}

/// Identifies a resource: the URL, and the method or the tool.
type Place = (String, String);

#[derive(Debug)]
struct Listed {
    place: Place,
    kind: String,
    /// The listed fields but for the offers and the time.
    item: Map<String, Value>,
    accepts: Vec<Verbatim<PaymentRequirements>>,
    size: usize,
    updated: u64,
}

/// A query of `GET /discovery/resources`.
#[derive(Debug, Default)]
struct Query {
    kind: Option<String>,
    pay_to: Option<String>,
    scheme: Option<String>,
    network: Option<String>,
    extension: Option<String>,
    limit: Option<usize>,
    offset: usize,
}

impl Query {
    /// Returns `None` if `limit` or `offset` is not a number. Ignores unknown parameters.
    fn read(query: &str) -> Option<Self> {
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
        let matches = |filter: &Option<String>, value: &str| filter.as_ref().is_none_or(|filter| filter == value);
        let is_payable = |offer: &Verbatim<PaymentRequirements>| {
            offer.read().is_ok_and(|offer| {
                matches(&self.scheme, &offer.scheme)
                    && matches(&self.network, &offer.network)
                    && self.pay_to.as_ref().is_none_or(|payee| payee.eq_ignore_ascii_case(&offer.pay_to))
            })
        };
        let is_any_offer = self.scheme.is_none() && self.network.is_none() && self.pay_to.is_none();
        matches(&self.kind, &listed.kind)
            && matches(&self.extension, bazaar::NAME)
            && (is_any_offer || listed.accepts.iter().any(is_payable))
    }
}

impl Catalogue {
    /// Creates a catalogue, if it may list anything.
    pub(crate) fn new(limits: Limits) -> Option<Self> {
        (limits.resources > 0).then(|| Self { limits, resources: Mutex::default() })
    }

    /// Adds or updates the resource of a payment, if its seller declares the extension `bazaar`.
    pub(crate) fn record(&self, payment: &Prechecked, now: u64) {
        let Some((place, kind, item)) = payment.echoed().and_then(|echo| self.describe(echo)) else { return };
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

    /// Answers `GET /discovery/resources`.
    pub(crate) fn answer(&self, query: &str, now: u64) -> Answer {
        match Query::read(query) {
            Some(query) => Answer::json(StatusCode::OK, &self.list(&query, now)),
            None => Answer::problem(StatusCode::BAD_REQUEST, "invalid_query", "limit and offset are numbers"),
        }
    }

    /// Returns the page that a query asks for.
    fn list(&self, query: &Query, now: u64) -> Value {
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

    /// Locks the resources and removes those that are too old.
    fn lock(&self, now: u64) -> MutexGuard<'_, Resources> {
        let mut known = self.resources.lock().unwrap_or_else(PoisonError::into_inner);
        let oldest = now.saturating_sub(self.limits.max_age.as_secs());
        let gone: Vec<_> =
            known.listed.values().filter(|listed| listed.updated < oldest).map(|listed| listed.place.clone()).collect();
        gone.iter().for_each(|place| drop(known.remove(place)));
        known
    }

    /// Returns `None` for an invalid description. The payer may have invented it.
    fn describe(&self, echo: &EchoedMetadata) -> Option<(Place, String, Map<String, Value>)> {
        let resource = echo.resource()?.read().ok()?;
        let extension = echo.extensions()?.read().ok()?.remove(bazaar::NAME)?;
        if let Err(error) = bazaar::check(&extension) {
            tracing::debug!(%error, "a resource is not listed: its description is invalid");
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
            // Not the other extensions: a payment id, for example, is a secret of the payer.
            ("extensions".to_owned(), json!({ bazaar::NAME: extension })),
        ]);
        item.extend(metadata(resource));
        Some((place, kind, item))
    }
}

impl Resources {
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
        item.insert("lastUpdated".to_owned(), timestamp(self.updated).into());
        Value::Object(item)
    }
}

/// Formats Unix seconds with milliseconds, as JavaScript does. Times after the year 9999 are written as its end.
fn timestamp(seconds: u64) -> String {
    let seconds = i64::try_from(seconds).unwrap_or(i64::MAX).min(Timestamp::MAX.as_second());
    format!("{:.3}", Timestamp::from_second(seconds).unwrap_or(Timestamp::UNIX_EPOCH))
}

/// Returns `true` if two offers differ at most in price or window.
fn is_same_way(one: &Verbatim<PaymentRequirements>, other: &Verbatim<PaymentRequirements>) -> bool {
    let (Ok(one), Ok(other)) = (one.read(), other.read()) else { return false };
    let way = |offer: &PaymentRequirements| {
        let flow = offer.extra.get("paymentFlow").cloned();
        (offer.scheme.clone(), offer.network.clone(), offer.asset.clone(), offer.pay_to.clone(), flow)
    };
    way(&one) == way(&other)
}

/// Returns the seller's description. Fields that break a rule of the specification are left out.
fn metadata(resource: ResourceInfo) -> Map<String, Value> {
    let is_name =
        |name: &str| (1..=MAX_NAME).contains(&name.len()) && name.bytes().all(|byte| (b' '..=b'~').contains(&byte));
    let is_prose = |text: &str, most: usize| {
        !text.is_empty() && text.chars().count() <= most && !text.chars().any(char::is_control)
    };
    let mut seen = HashSet::new();
    let is_new = |tag: &String| is_name(tag) && seen.insert(tag.to_ascii_lowercase());
    let tags: Vec<_> = resource.tags.into_iter().filter(is_new).take(MAX_TAGS).collect();
    let fields = [
        ("description", resource.description.filter(|text| is_prose(text, MAX_DESCRIPTION)).map(Value::from)),
        ("mimeType", resource.mime_type.filter(|text| is_prose(text, MAX_MIME_TYPE)).map(Value::from)),
        ("serviceName", resource.service_name.filter(|name| is_name(name)).map(Value::from)),
        ("tags", Some(tags).filter(|tags| !tags.is_empty()).map(Value::from)),
        ("iconUrl", resource.icon_url.filter(|url| is_public_url(url)).map(Value::from)),
    ];
    fields.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?))).collect()
}

/// Returns `true` for a path with `:name` parameters that cannot leave its host. The payer may have invented it.
fn is_template(text: &str) -> bool {
    let is_plain = text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_/:.-~%".contains(&byte));
    if !text.starts_with('/') || text.len() < 2 || text.len() > 512 || !is_plain {
        return false;
    }
    // It may be percent-encoded several times.
    let mut text = text.to_owned();
    for _ in 0..5 {
        let Ok(decoded) = percent_decode_str(&text).decode_utf8() else { return false };
        if decoded == text {
            return !["%", "..", "://"].iter().any(|part| text.contains(part));
        }
        text = decoded.into_owned();
    }
    false
}

/// Returns scheme, host and path of an `http` or `https` URL, with the template in place of the path if there is one.
///
/// Returns `None` if it is not such a URL, holds credentials, or names a local host and `local_hosts` is not set.
fn public_url(text: &str, template: Option<&str>, local_hosts: bool) -> Option<String> {
    let (scheme, host, uri) = parts(text)?;
    if !local_hosts && !is_public_host(&host) {
        return None;
    }
    let port = uri.port().map(|port| format!(":{port}")).unwrap_or_default();
    Some(format!("{scheme}://{host}{port}{}", template.unwrap_or(uri.path())))
}

/// Returns `true` if a URL that is listed as it is names a public host.
fn is_public_url(text: &str) -> bool {
    parts(text).is_some_and(|(_, host, _)| is_public_host(&host))
}

fn parts(text: &str) -> Option<(&'static str, String, Uri)> {
    if text.len() > MAX_URL || !text.bytes().all(|byte| byte.is_ascii_graphic()) {
        return None;
    }
    let uri: Uri = text.parse().ok()?;
    let scheme = match uri.scheme_str()? {
        "https" => "https",
        "http" => "http",
        _ => return None,
    };
    let host = uri.host()?.to_ascii_lowercase();
    let is_plain = host.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-._:[]".contains(&byte));
    if host.is_empty() || !is_plain || uri.authority()?.as_str().contains('@') {
        return None;
    }
    Some((scheme, host, uri))
}

/// Returns `true` for names of the public DNS, as far as can be told without a lookup: not for an address in any spelling, nor a name
/// of this machine or network.
fn is_public_host(host: &str) -> bool {
    let host = host.trim_end_matches('.');
    let bare = host.trim_start_matches('[').trim_end_matches(']');
    let last = host.rsplit('.').next().unwrap_or_default();
    // A last label of digits means an address, in hexadecimal and octal too.
    let is_number = last.starts_with("0x") || last.bytes().all(|byte| byte.is_ascii_digit());
    let is_local = ["localhost", "localdomain", "local", "internal", "ip6-localhost", "ip6-loopback"].contains(&last);
    bare.parse::<IpAddr>().is_err() && !host.contains(['[', ':']) && !is_number && !is_local && host.contains('.')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_is_written_with_milliseconds() {
        // By `date -u -d @N +%FT%TZ`.
        assert_eq!(timestamp(1_795_256_130), "2026-11-21T10:15:30.000Z");
        assert_eq!(timestamp(u64::MAX), "9999-12-30T22:00:00.000Z");
    }

    #[test]
    fn template_stays_on_its_host() {
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
    fn invalid_metadata_is_left_out() {
        let mut resource = ResourceInfo::new("");
        resource.description = Some("Evaluates\u{7}".into());
        resource.mime_type = Some("application/json".into());
        resource.service_name = Some("N".repeat(33));
        resource.tags = ["a", "A", "", "\u{e9}", "b", "c", "d", "e", "f"].map(str::to_owned).into();
        resource.icon_url = Some("http://127.0.0.1/icon.png".into());
        let listed = Value::Object(metadata(resource));
        assert_eq!(listed, json!({ "mimeType": "application/json", "tags": ["a", "b", "c", "d", "e"] }));
    }

    #[test]
    fn url_is_listed_without_query_and_fragment() {
        let shown = |text| public_url(text, None, false);
        assert_eq!(shown("https://API.example/a/b?secret=1#c").as_deref(), Some("https://api.example/a/b"));
        assert_eq!(shown("http://api.example:8080").as_deref(), Some("http://api.example:8080/"));
        let template = public_url("https://api.example/users/7?a", Some("/users/:id"), false);
        assert_eq!(template.as_deref(), Some("https://api.example/users/:id"));
    }

    #[test]
    fn local_and_malformed_urls_are_not_listed() {
        for bad in [
            "",
            "/path",
            "api.example",
            "ftp://api.example/",
            "javascript:alert(1)",
            "https://me:secret@api.example/",
            "https://me@api.example/",
            "https://api .example/",
            "https://api\u{2024}example/",
            "https://%6cocalhost.example/",
            "https:///a",
        ] {
            assert_eq!(public_url(bad, None, true), None, "{bad}");
        }
        for local in [
            "http://localhost/",
            "http://LOCALHOST./",
            "http://a.localhost/",
            "http://printer.local/",
            "http://metadata.google.internal/",
            "http://intranet/",
            "http://127.0.0.1/",
            "http://10.0.0.1:8080/",
            "http://[::1]/",
            "http://[fe80::1]:80/",
            "http://2130706433/",
            "http://0x7f000001/",
            "http://0x7f.0.0.0x1/",
            "http://127.1/",
        ] {
            assert_eq!(public_url(local, None, false), None, "{local}");
            assert!(public_url(local, None, true).is_some(), "{local}");
            assert!(!is_public_url(local), "{local}");
        }
        let long = format!("https://api.example/{}", "a".repeat(MAX_URL));
        assert_eq!(public_url(&long, None, true), None);
    }
}
