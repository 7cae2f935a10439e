//! Lists the resources that a facilitator knows.

use std::{fmt, time::Duration};

use jiff::Timestamp;
use reqwest::{Client, ClientBuilder, StatusCode, redirect};
use serde::{Deserialize, Deserializer, de::DeserializeOwned};
use serde_json::{Map, Value, value::RawValue};
use tokio::time::timeout;
use tower_x402::protocol::{ExactOffer, OfferError, PaymentRequirements, Verbatim, v1};
use url::Url;

/// The largest page that is read, in bytes.
const MAX_PAGE: usize = 4 << 20;
/// How many items of a page are read.
const MAX_ITEMS: usize = 1_000;
/// How many resources are asked for per page. A facilitator may return fewer.
const PAGE_SIZE: u32 = 100;
/// How many pages are read.
const MAX_PAGES: u32 = 20;
/// How many resources are collected, over all pages.
const MAX_RESOURCES: usize = 20_000;
/// How many offers of one resource are read.
const MAX_OFFERS: usize = 64;

/// Lists the resources that a facilitator knows (`GET /discovery/resources`).
///
/// The size of a page, the time for it and the number of pages are bounded, and redirects are not followed. Items that cannot be
/// read are skipped and counted. Nothing is paid and no resource is requested; see [`ListedResource`] for what a list proves.
///
/// ```no_run
/// # async fn example() -> Result<(), x402_bazaar::DiscoveryError> {
/// use x402_bazaar::{DiscoveryClient, DiscoveryFilter};
///
/// let facilitator = DiscoveryClient::builder("https://www.x402.org/facilitator").build()?;
/// let found = facilitator.list(&DiscoveryFilter::default().kind("http")).await?;
/// for resource in &found.resources {
///     println!("{} {:?}", resource.url, resource.description);
/// }
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct DiscoveryClient {
    client: Client,
    url: Url,
    request_timeout: Duration,
}

impl DiscoveryClient {
    /// Returns a builder for the facilitator at `url`. Its list is at `discovery/resources` below this URL.
    pub fn builder(url: impl AsRef<str>) -> DiscoveryClientBuilder {
        DiscoveryClientBuilder {
            url: url.as_ref().to_owned(),
            client: Client::builder(),
            request_timeout: Duration::from_secs(10),
        }
    }

    /// Reads one page, from the item at `offset` on.
    ///
    /// # Errors
    /// See [`DiscoveryError`].
    pub async fn page(&self, filter: &DiscoveryFilter, offset: u64) -> Result<DiscoveryPage, DiscoveryError> {
        self.read_page(filter, offset).await.map(|(page, _)| page)
    }

    /// Reads page after page, until there are no more, or up to 20 pages of 100 resources.
    ///
    /// # Errors
    /// [`DiscoveryError`] if the first page cannot be read. If a later one cannot, the resources so far are returned.
    pub async fn list(&self, filter: &DiscoveryFilter) -> Result<Discovered, DiscoveryError> {
        let mut found = Discovered { resources: Vec::new(), skipped: 0, end: DiscoveryEnd::Limit };
        let (mut offset, mut previous) = (0_u64, Vec::new());
        for number in 0..MAX_PAGES {
            let (page, body) = match self.read_page(filter, offset).await {
                Ok(read) => read,
                Err(error) if number == 0 => return Err(error),
                Err(error) => {
                    found.end = DiscoveryEnd::Failed(error);
                    break;
                }
            };
            if page.items > 0 && body == previous {
                found.end = DiscoveryEnd::Repeated;
                break;
            }
            offset += page.items as u64;
            found.skipped += page.skipped;
            found.resources.extend(page.resources);
            // A page may be shorter than asked for, so that only an empty one, or the total, marks the end.
            if page.items == 0 || page.total.is_some_and(|total| offset >= total) {
                found.end = DiscoveryEnd::Complete;
                break;
            }
            if found.resources.len() >= MAX_RESOURCES {
                break;
            }
            previous = body;
        }
        Ok(found)
    }

    async fn read_page(
        &self,
        filter: &DiscoveryFilter,
        offset: u64,
    ) -> Result<(DiscoveryPage, Vec<u8>), DiscoveryError> {
        let mut url = self.url.clone();
        let fields = [
            ("type", &filter.kind),
            ("payTo", &filter.pay_to),
            ("scheme", &filter.scheme),
            ("network", &filter.network),
            ("extensions", &filter.extension),
        ];
        {
            let mut query = url.query_pairs_mut();
            for (name, value) in fields {
                if let Some(value) = value {
                    query.append_pair(name, value);
                }
            }
            query.append_pair("limit", &PAGE_SIZE.to_string()).append_pair("offset", &offset.to_string());
        }
        let body = timeout(self.request_timeout, self.get(url)).await.map_err(|_| DiscoveryError::Timeout)??;
        Ok((read_items(&body)?, body))
    }

    async fn get(&self, url: Url) -> Result<Vec<u8>, DiscoveryError> {
        let request = self.client.get(url).header(http::header::ACCEPT, "application/json");
        let mut response = request.send().await.map_err(|_| DiscoveryError::Unreachable)?;
        if response.status() != StatusCode::OK {
            return Err(DiscoveryError::Status(response.status()));
        }
        let mut body = Vec::new();
        while let Some(chunk) = response.chunk().await.map_err(|_| DiscoveryError::Unreachable)? {
            if body.len() + chunk.len() > MAX_PAGE {
                return Err(DiscoveryError::TooLarge);
            }
            body.extend_from_slice(&chunk);
        }
        Ok(body)
    }
}

impl fmt::Debug for DiscoveryClient {
    /// Path, query and the client's headers may hold a key.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DiscoveryClient").field("host", &self.url.host_str()).finish_non_exhaustive()
    }
}

/// Builder of a [`DiscoveryClient`].
#[must_use]
pub struct DiscoveryClientBuilder {
    url: String,
    client: ClientBuilder,
    request_timeout: Duration,
}

impl DiscoveryClientBuilder {
    /// Sets the HTTP client to build on, for proxies, root certificates and headers. Redirects are not followed, whatever it is set to.
    pub fn client(mut self, client: ClientBuilder) -> Self {
        self.client = client;
        self
    }

    /// Sets the timeout of one page, body included. Default: 10 seconds.
    pub fn request_timeout(mut self, timeout: Duration) -> Self {
        self.request_timeout = timeout;
        self
    }

    /// Builds the client.
    ///
    /// # Errors
    /// [`DiscoveryError::Url`] or [`DiscoveryError::Tls`].
    pub fn build(self) -> Result<DiscoveryClient, DiscoveryError> {
        let url = Url::parse(&self.url).map_err(|_| DiscoveryError::Url)?;
        let mut url = Some(url)
            .filter(|url| matches!(url.scheme(), "http" | "https") && url.has_host())
            .ok_or(DiscoveryError::Url)?;
        url.set_path(&format!("{}/discovery/resources", url.path().trim_end_matches('/')));
        let client = self.client.redirect(redirect::Policy::none()).build().map_err(|_| DiscoveryError::Tls)?;
        Ok(DiscoveryClient { client, url, request_timeout: self.request_timeout })
    }
}

impl fmt::Debug for DiscoveryClientBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DiscoveryClientBuilder").field("request_timeout", &self.request_timeout).finish_non_exhaustive()
    }
}

/// A filter for resources: those that match everything that is set. The default matches all.
///
/// A facilitator may ignore fields that it does not know, so check what it returns.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[must_use]
pub struct DiscoveryFilter {
    kind: Option<String>,
    pay_to: Option<String>,
    scheme: Option<String>,
    network: Option<String>,
    extension: Option<String>,
}

impl DiscoveryFilter {
    /// Selects resources of this kind: `http` or `mcp`.
    pub fn kind(mut self, kind: impl Into<String>) -> Self {
        self.kind = Some(kind.into());
        self
    }

    /// Selects resources with this payee.
    pub fn pay_to(mut self, pay_to: impl Into<String>) -> Self {
        self.pay_to = Some(pay_to.into());
        self
    }

    /// Selects resources with this payment scheme, such as `exact`.
    pub fn scheme(mut self, scheme: impl Into<String>) -> Self {
        self.scheme = Some(scheme.into());
        self
    }

    /// Selects resources on this network, as CAIP-2.
    pub fn network(mut self, network: impl Into<String>) -> Self {
        self.network = Some(network.into());
        self
    }

    /// Selects resources that declare this extension.
    pub fn extension(mut self, extension: impl Into<String>) -> Self {
        self.extension = Some(extension.into());
        self
    }
}

/// One page of a facilitator's list.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct DiscoveryPage {
    /// The resources that could be read, in the facilitator's order.
    pub resources: Vec<ListedResource>,
    /// The number of items that could not be read, or were beyond the first thousand.
    pub skipped: usize,
    /// The number of items of the page.
    pub items: usize,
    /// The number of items of all pages, if the facilitator reports it.
    pub total: Option<u64>,
}

/// The result of [`DiscoveryClient::list`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Discovered {
    /// The resources that could be read, in the facilitator's order. A resource that moved between two pages may be missing or be
    /// there twice.
    pub resources: Vec<ListedResource>,
    /// The number of items that could not be read.
    pub skipped: usize,
    /// The reason why no further page was read.
    pub end: DiscoveryEnd,
}

/// The reason why no further page was read.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum DiscoveryEnd {
    /// There are no more pages.
    Complete,
    /// The limit on pages or resources was reached.
    Limit,
    /// The facilitator returned the same page again.
    Repeated,
    /// The next page could not be read.
    Failed(DiscoveryError),
}

/// An error of a [`DiscoveryClient`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DiscoveryError {
    /// The URL is not one of http or https. It is not shown, since it may hold a key.
    #[error("the facilitator's URL is not an http or https URL (not shown: it may hold a key)")]
    Url,
    /// The HTTP client could not be built. Check the machine's root certificates and the client's settings.
    #[error("the machine's TLS configuration, or the HTTP client's settings, cannot be used")]
    Tls,
    /// The facilitator could not be reached, or the connection failed. Try again.
    #[error("the facilitator could not be reached, or its answer broke off")]
    Unreachable,
    /// The facilitator did not answer in time. Try again, or raise the timeout.
    #[error("the facilitator did not answer in time")]
    Timeout,
    /// The facilitator answered with another status than 200. A facilitator that answers 404 has no list.
    #[error("the facilitator answered {0}")]
    Status(StatusCode),
    /// The answer is too large. Ask for smaller pages.
    #[error("the facilitator's answer is larger than {MAX_PAGE} bytes: ask for smaller pages")]
    TooLarge,
    /// The answer is not a list of resources.
    #[error("the facilitator's answer is not a list of resources: {0}")]
    Unreadable(String),
}

/// A paid resource, as a facilitator lists it.
///
/// Nothing in it is proven, and all of it may be years old. Only the 402 of the resource itself tells its price and its payee.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ListedResource {
    /// The absolute `http` or `https` URL, without credentials. Its path is a template (`/users/:id`) if the [`raw`](Self::raw) item has
    /// a `routeTemplate`.
    pub url: Url,
    /// The kind of resource: `http`, `mcp`, ….
    pub kind: String,
    /// The version of x402 it was paid in.
    pub x402_version: u64,
    /// The offers under which it was paid, as they were received. Those of v1 have other fields; [`offers`](Self::offers) reads both.
    pub accepts: Vec<Verbatim<PaymentRequirements>>,
    /// A description for people.
    pub description: Option<String>,
    /// The media type of the response.
    pub mime_type: Option<String>,
    /// The name of the service.
    pub service_name: Option<String>,
    /// Labels.
    pub tags: Vec<String>,
    /// When the facilitator last updated it, in seconds since the Unix epoch.
    pub last_updated: Option<u64>,
    /// The item as it was received, with all of its fields.
    pub raw: Verbatim<Map<String, Value>>,
}

impl ListedResource {
    /// Returns the offers that can be read, of v2 and of v1. An offer that this crate cannot pay is an error.
    pub fn offers(&self) -> Vec<Result<ExactOffer, OfferError>> {
        let read = |offer: &Verbatim<PaymentRequirements>| match offer.read() {
            Ok(offer) => Some(ExactOffer::try_from(&offer)),
            Err(_) => {
                let in_v1: v1::PaymentRequirementsV1 = serde_json::from_str(offer.text()).ok()?;
                Some(ExactOffer::try_from(&in_v1))
            }
        };
        self.accepts.iter().take(MAX_OFFERS).filter_map(read).collect()
    }

    /// Returns the `info` of the [description](crate::Discovery), which has input and output, if there is one.
    pub fn info(&self) -> Option<Value> {
        self.raw.read().ok()?.get("extensions")?.get(crate::NAME)?.get("info").cloned()
    }

    /// Reads an item. Returns `None` if it names no URL that could be requested.
    fn read(item: &RawValue) -> Option<Self> {
        let is_object = item.get().starts_with('{');
        let read: Item = is_object.then(|| serde_json::from_str(item.get()).ok()).flatten()?;
        let url = read.resource.or(read.url)?;
        let url = Url::parse(&url).ok().filter(|url| matches!(url.scheme(), "http" | "https") && url.has_host())?;
        if !url.username().is_empty() || url.password().is_some() {
            return None;
        }
        // In v1 the description is part of the offer.
        let first: Option<Described> = read.accepts.first().and_then(|offer| serde_json::from_str(offer.text()).ok());
        let first = first.unwrap_or_default();
        let text = |own: Option<String>, of_offer: Option<String>| own.or(of_offer).filter(|text| !text.is_empty());
        Some(Self {
            url,
            kind: read.kind.unwrap_or_else(|| "http".to_owned()),
            x402_version: read.x402_version.unwrap_or(1),
            accepts: read.accepts,
            description: text(read.description, first.description),
            mime_type: text(read.mime_type, first.mime_type),
            service_name: read.service_name,
            tags: read.tags.unwrap_or_default(),
            last_updated: match read.last_updated {
                Some(Value::String(text)) => seconds_of(&text),
                Some(Value::Number(seconds)) => seconds.as_u64(),
                _ => None,
            },
            raw: serde_json::from_str(item.get()).ok()?,
        })
    }
}

/// Reads the items of a page, as many as can be read.
fn read_items(body: &[u8]) -> Result<DiscoveryPage, DiscoveryError> {
    #[derive(Deserialize)]
    struct Page<'a> {
        // Some facilitators use the other name.
        #[serde(borrow, alias = "resources")]
        items: Vec<&'a RawValue>,
        #[serde(default)]
        pagination: Value,
    }
    if !body.trim_ascii_start().starts_with(b"{") {
        return Err(DiscoveryError::Unreadable("it is not an object".to_owned()));
    }
    let page: Page<'_> = serde_json::from_slice(body).map_err(|error| DiscoveryError::Unreadable(error.to_string()))?;
    let items = page.items.len();
    let resources: Vec<_> = page.items.into_iter().take(MAX_ITEMS).filter_map(ListedResource::read).collect();
    let total = page.pagination.get("total").and_then(Value::as_u64);
    Ok(DiscoveryPage { skipped: items - resources.len(), resources, items, total })
}

/// Any field may be missing or of another type.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Item {
    #[serde(default, deserialize_with = "lenient")]
    resource: Option<String>,
    #[serde(default, deserialize_with = "lenient")]
    url: Option<String>,
    #[serde(default, rename = "type", deserialize_with = "lenient")]
    kind: Option<String>,
    #[serde(default, deserialize_with = "lenient")]
    x402_version: Option<u64>,
    accepts: Vec<Verbatim<PaymentRequirements>>,
    #[serde(default, deserialize_with = "lenient")]
    description: Option<String>,
    #[serde(default, deserialize_with = "lenient")]
    mime_type: Option<String>,
    #[serde(default, deserialize_with = "lenient")]
    service_name: Option<String>,
    #[serde(default, deserialize_with = "lenient")]
    tags: Option<Vec<String>>,
    #[serde(default)]
    last_updated: Option<Value>,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Described {
    #[serde(default, deserialize_with = "lenient")]
    description: Option<String>,
    #[serde(default, deserialize_with = "lenient")]
    mime_type: Option<String>,
}

/// Reads a field of another type as missing.
fn lenient<'de, D: Deserializer<'de>, T: DeserializeOwned>(deserializer: D) -> Result<Option<T>, D::Error> {
    let value = Value::deserialize(deserializer)?;
    Ok(serde_json::from_value(value).ok())
}

/// Parses a text such as `2026-11-21T10:15:30.250+01:00` as Unix seconds, without the fraction. Returns `None` if it is no time, or one
/// before 1970.
fn seconds_of(text: &str) -> Option<u64> {
    u64::try_from(text.parse::<Timestamp>().ok()?.as_second()).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_is_read_in_any_form_of_rfc_3339() {
        for (text, seconds) in [
            // By `date -u -d @N +%FT%TZ`.
            ("1970-01-01T00:00:00Z", Some(0)),
            ("2000-02-29T23:59:59Z", Some(951_868_799)),
            ("2026-11-21T10:15:30Z", Some(1_795_256_130)),
            ("1970-01-01t01:00:00.123456789+01:00", Some(0)),
            ("1969-12-31 23:30:00-00:30", Some(0)),
            ("1970-01-01T00:00:00+00:01", None),
            ("1970-02-30T00:00:00Z", None),
            ("1970-01-01T24:00:00Z", None),
            ("1970-01-01T00:00:00", None),
            ("1970-01-01", None),
            ("yesterday", None),
            ("", None),
            ("\u{e9}970-01-01T00:00:00Z", None),
        ] {
            assert_eq!(seconds_of(text), seconds, "{text}");
        }
    }
}
