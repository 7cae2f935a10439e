//! The page that a person's browser is shown in place of the 402's JSON.
//!
//! Programs never see it. It is the body of the 402 and nothing else: status, `PAYMENT-REQUIRED` and what happens to a
//! payment are the same, so that the script in it is one more client of this layer.

mod negotiate;
mod render;
mod settings;

use std::sync::LazyLock;

use base64_simd::STANDARD;
use http::{
    HeaderMap, HeaderValue, Method, StatusCode, Uri,
    header::{CONTENT_SECURITY_POLICY, CONTENT_TYPE, REFERRER_POLICY, VARY, X_CONTENT_TYPE_OPTIONS, X_FRAME_OPTIONS},
};
use sha2::{Digest as _, Sha256};

use self::render::{Shown, render};
pub use self::{negotiate::is_navigation, settings::BrowserPage};
use super::{answer::Answer, config::Config};
use crate::charge::Offer;

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
            seconds_to_sign: config.settings.rules.limits.time_to_sign(),
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
