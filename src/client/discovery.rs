//! Finding out what can be paid for.

use std::{fmt, time::Duration};

use ::reqwest::{Client, ClientBuilder, StatusCode, redirect};
use serde::Deserialize;
use serde_json::value::RawValue;
use tokio::time::timeout;
use url::Url;

use super::ListedResource;

/// The largest page that is read, in bytes.
const MAX_PAGE: usize = 4 << 20;
/// How many items of a page are looked at.
const MAX_ITEMS: usize = 1_000;
/// How many resources are collected, over all pages.
const MAX_RESOURCES: usize = 20_000;

/// Which resources to list. All that are set must be met; a facilitator may know nothing of some of these and ignore them, so look
/// at what it answers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DiscoveryFilter {
    /// What they are spoken with: `http`, `mcp`.
    pub kind: Option<String>,
    /// Who is paid.
    pub pay_to: Option<String>,
    /// How: `exact`.
    pub scheme: Option<String>,
    /// Where, as CAIP-2.
    pub network: Option<String>,
    /// An extension that they declare.
    pub extension: Option<String>,
}

/// Some of a facilitator's resources.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct DiscoveryPage {
    /// Those that could be read, in the facilitator's order.
    pub resources: Vec<ListedResource>,
    /// How many items could not be read, or were beyond the first thousand.
    pub skipped: usize,
    /// How many items the page had.
    pub items: usize,
    /// How many there are in all, as the facilitator says.
    pub total: Option<u64>,
}

/// What several pages had.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Discovered {
    /// The resources that could be read, in the facilitator's order. One that moved while the pages were read may be twice in it, or
    /// missing.
    pub resources: Vec<ListedResource>,
    /// How many items could not be read.
    pub skipped: usize,
    /// Why it ended.
    pub end: DiscoveryEnd,
}

/// Why no further page was read.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum DiscoveryEnd {
    /// There is none.
    Complete,
    /// As many pages or resources were read as may be.
    Limit,
    /// The facilitator answered the same again.
    Repeated,
    /// The next page could not be read.
    Failed(DiscoveryError),
}

/// Why a facilitator's list could not be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DiscoveryError {
    /// Not a URL that can be asked. It is not shown, since it may hold a key.
    #[error("the facilitator's URL is not an http or https URL (not shown: it may hold a key)")]
    Url,
    /// No TLS configuration could be made.
    #[error("the machine's TLS configuration, or the HTTP client's settings, cannot be used")]
    Tls,
    /// It could not be reached, or broke off.
    #[error("the facilitator could not be reached, or its answer broke off")]
    Unreachable,
    /// It took too long.
    #[error("the facilitator did not answer in time")]
    Timeout,
    /// It answered with another status than 200. With 404 it has no list.
    #[error("the facilitator answered {0}")]
    Status(StatusCode),
    /// Its answer is too large.
    #[error("the facilitator's answer is larger than {MAX_PAGE} bytes: ask for smaller pages")]
    TooLarge,
    /// Its answer is not a list of resources.
    #[error("the facilitator's answer is not a list of resources: {0}")]
    Unreadable(String),
}

/// Lists what can be paid for, as a facilitator knows it (`GET /discovery/resources`).
///
/// Bounded in every way: pages of 4 MiB, a time for each, a number of pages. Redirects are not followed. What cannot be read of a
/// page is skipped and counted. Nothing is paid and none of the resources is asked; see [`ListedResource`] for what the list is worth.
///
/// ```no_run
/// # async fn example() -> Result<(), tower_x402::client::DiscoveryError> {
/// use tower_x402::client::{DiscoveryClient, DiscoveryFilter};
///
/// let facilitator = DiscoveryClient::builder("https://x402.org/facilitator").build()?;
/// let found = facilitator.list(&DiscoveryFilter { kind: Some("http".into()), ..Default::default() }).await?;
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
    page_size: u32,
    max_pages: u32,
}

impl DiscoveryClient {
    /// Settings to start from, for the facilitator at `url`, below which `discovery/resources` is.
    pub fn builder(url: impl AsRef<str>) -> DiscoveryClientBuilder {
        DiscoveryClientBuilder {
            url: url.as_ref().to_owned(),
            client: Client::builder(),
            request_timeout: Duration::from_secs(10),
            page_size: 100,
            max_pages: 20,
        }
    }

    /// One page, from the item at `offset` on.
    ///
    /// # Errors
    /// [`DiscoveryError`].
    pub async fn page(&self, filter: &DiscoveryFilter, offset: u64) -> Result<DiscoveryPage, DiscoveryError> {
        self.read_page(filter, offset).await.map(|(page, _)| page)
    }

    /// One page after the other, until there is none, or as many were read as [may be](DiscoveryClientBuilder::max_pages).
    ///
    /// # Errors
    /// [`DiscoveryError`] if the first page cannot be read; what was read before another one failed is kept.
    pub async fn list(&self, filter: &DiscoveryFilter) -> Result<Discovered, DiscoveryError> {
        let mut found = Discovered { resources: Vec::new(), skipped: 0, end: DiscoveryEnd::Limit };
        let (mut offset, mut previous) = (0_u64, Vec::new());
        for number in 0..self.max_pages.max(1) {
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
            // A page may be shorter than asked for; only an empty one, or the total, says that it was the last.
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
            query.append_pair("limit", &self.page_size.to_string()).append_pair("offset", &offset.to_string());
        }
        let body = timeout(self.request_timeout, self.read(url)).await.map_err(|_| DiscoveryError::Timeout)??;
        Ok((read_items(&body)?, body))
    }

    async fn read(&self, url: Url) -> Result<Vec<u8>, DiscoveryError> {
        let unreachable = |_| DiscoveryError::Unreachable;
        let request = self.client.get(url).header(http::header::ACCEPT, "application/json");
        let mut answer = request.send().await.map_err(unreachable)?;
        if answer.status() != StatusCode::OK {
            return Err(DiscoveryError::Status(answer.status()));
        }
        let mut body = Vec::new();
        while let Some(chunk) = answer.chunk().await.map_err(unreachable)? {
            if body.len() + chunk.len() > MAX_PAGE {
                return Err(DiscoveryError::TooLarge);
            }
            body.extend_from_slice(&chunk);
        }
        Ok(body)
    }
}

/// Settings of a [`DiscoveryClient`]; all but the URL have defaults.
#[must_use]
pub struct DiscoveryClientBuilder {
    url: String,
    client: ClientBuilder,
    request_timeout: Duration,
    page_size: u32,
    max_pages: u32,
}

impl DiscoveryClientBuilder {
    /// The HTTP client to build on, for proxies, roots of trust and headers that prove who asks. Redirects are not followed, whatever it
    /// says.
    pub fn client(mut self, client: ClientBuilder) -> Self {
        self.client = client;
        self
    }

    /// How long one page may take, body included; 10 seconds if not set.
    pub fn request_timeout(mut self, timeout: Duration) -> Self {
        self.request_timeout = timeout;
        self
    }

    /// How many resources a page should have; 100 if not set. A facilitator may give fewer.
    pub fn page_size(mut self, resources: u32) -> Self {
        self.page_size = resources.clamp(1, 1_000);
        self
    }

    /// How many pages [`list`](DiscoveryClient::list) reads at most; 20 if not set.
    pub fn max_pages(mut self, pages: u32) -> Self {
        self.max_pages = pages;
        self
    }

    /// The client.
    ///
    /// # Errors
    /// [`DiscoveryError::Url`], [`DiscoveryError::Tls`].
    pub fn build(self) -> Result<DiscoveryClient, DiscoveryError> {
        let url = Url::parse(&self.url).map_err(|_| DiscoveryError::Url)?;
        let mut url = Some(url)
            .filter(|url| matches!(url.scheme(), "http" | "https") && url.has_host())
            .ok_or(DiscoveryError::Url)?;
        url.set_path(&format!("{}/discovery/resources", url.path().trim_end_matches('/')));
        let client = self.client.redirect(redirect::Policy::none()).build().map_err(|_| DiscoveryError::Tls)?;
        let Self { request_timeout, page_size, max_pages, .. } = self;
        Ok(DiscoveryClient { client, url, request_timeout, page_size, max_pages })
    }
}

impl fmt::Debug for DiscoveryClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The host alone: the rest, and the client's headers, may hold a key.
        f.debug_struct("DiscoveryClient").field("host", &self.url.host_str()).finish_non_exhaustive()
    }
}

impl fmt::Debug for DiscoveryClientBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DiscoveryClientBuilder").field("max_pages", &self.max_pages).finish_non_exhaustive()
    }
}

/// Reads what is there of a page; the rest may be anything.
fn read_items(body: &[u8]) -> Result<DiscoveryPage, DiscoveryError> {
    #[derive(Deserialize)]
    struct Page<'a> {
        // Some call them so.
        #[serde(borrow, alias = "resources")]
        items: Vec<&'a RawValue>,
        #[serde(default)]
        pagination: serde_json::Value,
    }
    if !body.trim_ascii_start().starts_with(b"{") {
        return Err(DiscoveryError::Unreadable("it is not an object".to_owned()));
    }
    let page: Page<'_> = serde_json::from_slice(body).map_err(|error| DiscoveryError::Unreadable(error.to_string()))?;
    let items = page.items.len();
    let resources: Vec<_> = page.items.into_iter().take(MAX_ITEMS).filter_map(ListedResource::read).collect();
    let total = page.pagination.get("total").and_then(serde_json::Value::as_u64);
    Ok(DiscoveryPage { skipped: items - resources.len(), resources, items, total })
}
