//! The page that a person's browser is shown in place of the 402's JSON.
//!
//! Programs never see it. It is the body of the 402 and nothing else: status, `PAYMENT-REQUIRED` and what happens to a
//! payment are the same, so that the script in it is one more client of this layer.

mod negotiate;
mod render;

use std::sync::LazyLock;

use base64_simd::STANDARD;
use http::{
    HeaderMap, HeaderValue, Method, StatusCode, Uri,
    header::{CONTENT_SECURITY_POLICY, CONTENT_TYPE, REFERRER_POLICY, VARY, X_CONTENT_TYPE_OPTIONS, X_FRAME_OPTIONS},
};
use sha2::{Digest as _, Sha256};

pub use self::negotiate::is_navigation;
use self::render::{Shown, render};
use super::{answer::Answer, builder::Config, offer::Offer};

/// The page that a browser is shown in place of the 402's JSON when a person opens a paid address.
///
/// It says what is sold, for how much, to whom, and how a program pays; a button pays from a wallet in the browser (EIP-1193)
/// and shows the answer. It needs nothing from elsewhere: no framework, no font, no other host.
///
/// ```
/// use http::Method;
/// use tower_x402::server::{BrowserPage, RequirePaymentLayer};
///
/// let builder = RequirePaymentLayer::builder()
///     .price("$0.05")
///     .description("The full text of today's essay")
///     .browser_page(Some(BrowserPage::new().name("Essays").methods([Method::GET])));
/// ```
///
/// It is shown for a `GET` (or `HEAD`) without a payment whose `Accept` names `text/html`, not below `application/json` or `*/*`, whose
/// `User-Agent` begins with `Mozilla/`, as that of every browser does, and whose `Sec-Fetch-Mode`, where there is one, is
/// `navigate`. Every other request is answered as without it.
#[derive(Clone, Debug, Default)]
pub struct BrowserPage {
    name: Option<String>,
    methods: Option<Vec<Method>>,
}

impl BrowserPage {
    /// Returns a page that uses the layer's description and service name.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the page's heading. Default: the layer's [`service_name`](super::RequirePaymentLayerBuilder::service_name), if any.
    #[must_use]
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.name = Some(name.into());
        self
    }

    /// Sets the HTTP methods that the paid service answers, which the layer cannot see. Browsers send `GET`. If `GET` is not among the
    /// methods, the page has no button and names the method to use. If it is, offers of the flow `upfront` can be paid from the page, too.
    ///
    /// Default: not known. The button then pays in the `authorization` flow only, in which an answer `405` costs nothing.
    #[must_use]
    pub fn methods(mut self, methods: impl IntoIterator<Item = Method>) -> Self {
        self.methods = Some(methods.into_iter().collect());
        self
    }

    /// Returns whether a `GET` is answered, or `None` if that is not known.
    fn answers_get(&self) -> Option<bool> {
        self.methods.as_ref().map(|methods| methods.contains(&Method::GET))
    }

    /// Returns the method that a program should use.
    fn method(&self) -> &Method {
        match &self.methods {
            Some(methods) if !methods.contains(&Method::GET) => methods.first().unwrap_or(&Method::GET),
            _ => &Method::GET,
        }
    }
}

/// Returns the 402 for a request without a payment: as a page for a person's browser, as JSON otherwise.
pub(super) fn payment_required(
    config: &Config,
    method: &Method,
    uri: &Uri,
    headers: &HeaderMap,
    offers: &[Offer],
) -> Answer {
    let target = config.catalogue.target(uri, headers);
    let rendered = config.catalogue.render(&target, offers, None);
    let html = match (&config.settings.page, &rendered) {
        (Some(page), Some(rendered)) if is_navigation(method, headers) => render(&Shown {
            page,
            resource: config.catalogue.resource(),
            url: &config.catalogue.url(&target),
            query: uri.query(),
            offers,
            rendered,
            seconds_to_sign: config.settings.limits.time_to_sign(),
        }),
        _ => None,
    };
    let answer = Answer::payment_required(StatusCode::PAYMENT_REQUIRED, rendered);
    match html {
        Some(html) => answer.shown_as(page_headers(), html),
        None => answer,
    }
}

const SCRIPT: &str = concat!("\n", include_str!("answer.js"), include_str!("page.js"));
const STYLE: &str = concat!("\n", include_str!("page.css"));

/// Nothing runs, loads or sends but what is in the page itself, nothing goes elsewhere, and no page may frame the button.
static POLICY: LazyLock<HeaderValue> = LazyLock::new(|| {
    let hash = |text: &str| STANDARD.encode_to_string(Sha256::digest(text.as_bytes()));
    let policy = format!(
        "default-src 'none'; script-src 'sha256-{}'; style-src 'sha256-{}'; connect-src 'self'; img-src blob: data:; \
         frame-src blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; \
         trusted-types 'none'",
        hash(SCRIPT),
        hash(STYLE)
    );
    HeaderValue::try_from(policy).unwrap_or(HeaderValue::from_static("default-src 'none'"))
});

/// Returns how many bytes these headers add to the head of a response.
pub(super) fn size_of_headers() -> usize {
    page_headers().iter().map(|(name, value)| name.as_str().len() + value.len() + ": \r\n".len()).sum()
}

/// Returns the headers of the page that other 402s do not have.
fn page_headers() -> HeaderMap {
    HeaderMap::from_iter([
        (CONTENT_TYPE, HeaderValue::from_static("text/html; charset=utf-8")),
        (VARY, HeaderValue::from_static("Accept, User-Agent, Sec-Fetch-Mode")),
        (CONTENT_SECURITY_POLICY, POLICY.clone()),
        // For browsers that do not know frame-ancestors.
        (X_FRAME_OPTIONS, HeaderValue::from_static("DENY")),
        (X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff")),
        (REFERRER_POLICY, HeaderValue::from_static("no-referrer")),
    ])
}
