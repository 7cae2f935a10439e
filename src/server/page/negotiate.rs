//! Detects a person's browser that opens an address.

use http::{
    HeaderMap, HeaderName, Method,
    header::{ACCEPT, USER_AGENT},
};

/// Fetch Metadata: only browsers send it, and not to every origin.
const SEC_FETCH_MODE: HeaderName = HeaderName::from_static("sec-fetch-mode");

/// Returns `true` if a person's browser opens this address, so that a page answers it better than JSON.
///
/// The request must be a GET or HEAD, with the `User-Agent` of a browser and `text/html` as what it likes best in `Accept`, and not from
/// a script in a page (`Sec-Fetch-Mode`). The layer shows a [`BrowserPage`](crate::server::BrowserPage) in place of the 402's JSON to
/// such a request; a service can do the same with its other answers.
pub fn is_navigation(method: &Method, headers: &HeaderMap) -> bool {
    // Every condition keeps some program out that never asked for a page: `Accept` those that take anything, `User-Agent` libraries that
    // name `text/html` by habit, the mode scripts in a browser.
    let is_safe = *method == Method::GET || *method == Method::HEAD;
    let is_browser = || headers.get(USER_AGENT).is_some_and(|agent| agent.as_bytes().starts_with(b"Mozilla/"));
    let navigates = || headers.get(SEC_FETCH_MODE).is_none_or(|mode| mode == "navigate");
    is_safe && is_browser() && navigates() && prefers_html(headers)
}

/// Returns `true` if `text/html` is named and nothing that JSON satisfies has a higher quality (RFC 9110, 12.5.1).
fn prefers_html(headers: &HeaderMap) -> bool {
    let (mut html, mut json, mut anything) = (0, 0, 0);
    let lists = headers.get_all(ACCEPT).iter().filter_map(|value| value.to_str().ok());
    for range in lists.flat_map(|list| list.split(',')) {
        let (name, parameters) = range.split_once(';').unwrap_or((range, ""));
        let name = name.trim();
        let liked = match () {
            () if name.eq_ignore_ascii_case("text/html") => &mut html,
            () if name.eq_ignore_ascii_case("application/json") => &mut json,
            () if name == "*/*" || name.eq_ignore_ascii_case("application/*") => &mut anything,
            () => continue,
        };
        *liked = quality(parameters).max(*liked);
    }
    html > json && html >= anything
}

/// Thousandths; 0 for what is not a quality.
fn quality(parameters: &str) -> u16 {
    let weight = parameters.split(';').filter_map(|parameter| parameter.split_once('='));
    let Some((_, value)) = weight.map(|(name, value)| (name.trim(), value.trim())).find(|(name, _)| *name == "q")
    else {
        return 1000;
    };
    let quality: f32 = value.parse().unwrap_or(0.0);
    if (0.0..=1.0).contains(&quality) { (quality * 1000.0) as u16 } else { 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asks(accept: &str) -> bool {
        prefers_html(&HeaderMap::from_iter([(ACCEPT, accept.parse().unwrap())]))
    }

    #[test]
    fn client_that_prefers_html_gets_the_page() {
        for accept in [
            "text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,image/webp,*/*;q=0.8",
            "text/html, application/xhtml+xml, image/jxr, */*",
            "Text/HTML;level=1;q=0.9, application/json;q=0.8",
            "application/json;q=0.5, text/html;q=1.0",
        ] {
            assert!(asks(accept), "{accept}");
        }
    }

    #[test]
    fn client_that_prefers_json_or_takes_anything_gets_json() {
        for accept in [
            "",
            "*/*",
            "text/*",
            "application/json",
            "application/json, text/plain, */*",
            "application/json, text/html",
            "text/html;q=0.5, */*",
            "text/html;q=0.5, application/*;q=0.6",
            "text/html;q=0",
            "text/html;q=0, */*;q=0",
            "text/html;q=NaN",
            "text/html;q=-1",
            "text/html;q=7",
            "text/htmlx, xtext/html",
        ] {
            assert!(!asks(accept), "{accept}");
        }
    }
}
