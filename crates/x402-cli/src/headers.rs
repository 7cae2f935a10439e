//! The headers that a proxy passes on, removes and adds.

use http::{
    HeaderMap, HeaderName, HeaderValue, Method, Request,
    header::{
        CONNECTION, CONTENT_ENCODING, CONTENT_SECURITY_POLICY, EXPECT, HOST, LOCATION, PROXY_AUTHENTICATE,
        PROXY_AUTHORIZATION, REFERRER_POLICY, TE, TRAILER, TRANSFER_ENCODING, UPGRADE, X_CONTENT_TYPE_OPTIONS,
    },
};
use tower_x402::{protocol::header_name, server::VerifiedPayment};

/// The prefix of names that only the proxy may set.
const OURS: &str = "x402-";
/// Payments, in each version of x402.
const PAYMENTS: [&str; 2] = [header_name::PAYMENT_SIGNATURE, header_name::X_PAYMENT];
/// What a server says of payments, in each version of x402.
const ABOUT_PAYMENTS: [&str; 3] =
    [header_name::PAYMENT_REQUIRED, header_name::PAYMENT_RESPONSE, header_name::X_PAYMENT_RESPONSE];
/// Headers that frameworks read in place of the method or the path.
const OVERRIDES: [&str; 5] =
    ["x-http-method-override", "x-http-method", "x-method-override", "x-original-url", "x-rewrite-url"];
/// Cookies. Who keeps them knows 127.0.0.1, and neither its ports nor whose answers came from there.
const COOKIES: [&str; 2] = ["cookie", "set-cookie"];
/// What a service says to browsers about all of its origin, or has them report to it with the address that was asked for.
const ABOUT_ORIGIN: [&str; 7] = [
    "alt-svc",
    "clear-site-data",
    "content-security-policy-report-only",
    "nel",
    "report-to",
    "reporting-endpoints",
    "service-worker-allowed",
];
/// Headers of one connection, besides those that `Connection` names (RFC 9110, section 7.6.1).
const HOP_BY_HOP: [HeaderName; 9] = [
    CONNECTION,
    HeaderName::from_static("keep-alive"),
    HeaderName::from_static("proxy-connection"),
    PROXY_AUTHENTICATE,
    PROXY_AUTHORIZATION,
    TE,
    TRAILER,
    TRANSFER_ENCODING,
    UPGRADE,
];

/// Removes the headers that are for one connection only.
pub(crate) fn remove_hop_by_hop(headers: &mut HeaderMap) {
    let named: Vec<HeaderName> = headers
        .get_all(CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .filter_map(|name| name.trim().parse().ok())
        .collect();
    for name in named.iter().chain(&HOP_BY_HOP) {
        headers.remove(name);
    }
}

/// Returns `true` if the client wants to go on in another protocol, such as a WebSocket. An offer to go on in HTTP/2 is one that it can do
/// without.
pub(crate) fn wants_upgrade<B>(request: &Request<B>) -> bool {
    let asked = request.headers().get_all(UPGRADE);
    asked.iter().any(|name| !name.as_bytes().trim_ascii().eq_ignore_ascii_case(b"h2c"))
        || request.method() == Method::CONNECT
}

/// Returns `true` if there is a payment, in any version of x402.
pub(crate) fn has_payment(headers: &HeaderMap) -> bool {
    PAYMENTS.iter().any(|name| headers.contains_key(*name))
}

/// Returns `true` if the body is compressed, or encoded in another way: then its length says nothing of what is in it.
pub(crate) fn has_encoded_body(headers: &HeaderMap) -> bool {
    let is_encoding = |value: &HeaderValue| !value.as_bytes().trim_ascii().eq_ignore_ascii_case(b"identity");
    headers.iter().any(|(name, value)| as_read(name) == CONTENT_ENCODING.as_str() && is_encoding(value))
}

/// Removes payments, which are bearer data, and everything whose name only a proxy of this command may use.
pub(crate) fn remove_what_is_ours(headers: &mut HeaderMap) {
    remove(headers, |name| name.starts_with(OURS) || PAYMENTS.contains(&name));
}

/// Removes what a service says of payments, which are not its own: none of them reaches it.
pub(crate) fn remove_about_payments(headers: &mut HeaderMap) {
    ABOUT_PAYMENTS.iter().for_each(|name| drop(headers.remove(*name)));
}

/// Removes the headers that some frameworks take for the method or the path. The price is that of the request line.
pub(crate) fn remove_overrides(headers: &mut HeaderMap) {
    remove(headers, |name| OVERRIDES.contains(&name));
}

/// Removes the headers that have this text in their value.
pub(crate) fn remove_with_value(headers: &mut HeaderMap, text: &str) {
    let has_it = |value: &HeaderValue| value.as_bytes().windows(text.len()).any(|part| part == text.as_bytes());
    let names: Vec<HeaderName> =
        headers.iter().filter(|(_, value)| has_it(value)).map(|(name, _)| name.clone()).collect();
    for name in names {
        headers.remove(name);
    }
}

/// Removes cookies, which would be those of other services and programs.
pub(crate) fn remove_cookies(headers: &mut HeaderMap) {
    remove(headers, |name| COOKIES.contains(&name));
}

/// Has a browser show an answer without its scripts, and tell nobody the address that it came from.
pub(crate) fn confine(headers: &mut HeaderMap) {
    remove(headers, |name| ABOUT_ORIGIN.contains(&name));
    for (name, value) in [
        (CONTENT_SECURITY_POLICY, "default-src 'none'; sandbox"),
        (X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (REFERRER_POLICY, "no-referrer"),
        (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
    ] {
        headers.insert(name, HeaderValue::from_static(value));
    }
}

/// Renames a `Location` that is not a path on this host, so that no client goes there by itself and takes its headers along.
pub(crate) fn hold_redirect(headers: &mut HeaderMap) {
    // Two slashes begin a host, also if one of them is a backslash or a tab is between them.
    let is_path = |location: &HeaderValue| matches!(location.as_bytes(), [b'/'] | [b'/', b'!'..=b'.' | b'0'..=b'[' | b']'..=b'~', ..]);
    if headers.get_all(LOCATION).iter().all(is_path) {
        return;
    }
    if let Some(location) = headers.remove(LOCATION) {
        headers.insert("x402-location", location);
    }
}

/// Removes the headers in which a client names itself, or proxies before it.
pub(crate) fn remove_forwarded(headers: &mut HeaderMap) {
    remove(headers, |name| name.starts_with("x-forwarded-") || ["forwarded", "x-real-ip"].contains(&name));
}

/// Some upstreams read an underscore as a hyphen (WSGI), and some anything that is no letter or digit (CGI).
fn as_read(name: &HeaderName) -> String {
    name.as_str().replace(|character: char| !character.is_ascii_alphanumeric(), "-")
}

fn remove(headers: &mut HeaderMap, is_removed: impl Fn(&str) -> bool) {
    let is_removed = |name: &&HeaderName| is_removed(&as_read(name));
    let names: Vec<HeaderName> = headers.keys().filter(is_removed).cloned().collect();
    for name in names {
        headers.remove(name);
    }
}

/// Removes the headers that the next connection sets anew.
pub(crate) fn remove_of_connection(headers: &mut HeaderMap) {
    headers.remove(HOST);
    headers.remove(EXPECT);
}

/// Tells the upstream who paid what.
pub(crate) fn add_payment(headers: &mut HeaderMap, payment: &VerifiedPayment) {
    let transaction = payment.transaction.map(|transaction| transaction.to_string());
    for (name, value) in [
        ("x402-payer", Some(payment.payer.to_string())),
        ("x402-pay-to", Some(payment.pay_to.to_string())),
        ("x402-amount", Some(payment.amount.to_string())),
        ("x402-asset", Some(payment.asset.to_string())),
        ("x402-network", Some(payment.network.to_string())),
        ("x402-payment", Some(payment.nonce.to_string())),
        ("x402-flow", Some(payment.flow.to_string())),
        ("x402-attempt", Some(payment.attempt.to_string())),
        ("x402-transaction", transaction),
    ] {
        // Digits, letters and colons.
        if let Some(value) = value.and_then(|value| HeaderValue::from_str(&value).ok()) {
            headers.insert(HeaderName::from_static(name), value);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(headers: &HeaderMap) -> Vec<&str> {
        headers.keys().map(HeaderName::as_str).collect()
    }

    #[test]
    fn headers_of_a_connection_stay_behind() {
        let mut headers = HeaderMap::new();
        for (name, value) in [
            ("connection", "close, X-Private"),
            ("x-private", "1"),
            ("te", "trailers"),
            ("transfer-encoding", "chunked"),
            ("upgrade", "h2c"),
            ("keep-alive", "timeout=5"),
            ("accept", "*/*"),
        ] {
            headers.append(HeaderName::from_static(name), HeaderValue::from_static(value));
        }
        remove_hop_by_hop(&mut headers);
        assert_eq!(names(&headers), ["accept"]);
    }

    #[test]
    fn redirects_to_other_hosts_are_held() {
        for (location, is_held) in [
            ("/", false),
            ("/a?b=http://c/", false),
            ("http://evil.example/", true),
            ("//evil.example/", true),
            ("/\\evil.example/", true),
            ("/\t/evil.example/", true),
            ("http:/evil.example/", true),
            ("evil.example/", true),
        ] {
            let mut headers = HeaderMap::new();
            headers.insert(LOCATION, HeaderValue::from_static(location));
            hold_redirect(&mut headers);
            assert_eq!(names(&headers), [if is_held { "x402-location" } else { "location" }], "{location}");
        }
    }

    #[test]
    fn nobody_forges_a_payer() {
        let mut headers = HeaderMap::new();
        let forged = [
            "x402-payer",
            "x402_payer",
            "x402.payer",
            "x402-anything-new",
            "payment-signature",
            "x-payment",
            "x-original-url",
            "x_rewrite_url",
        ];
        for name in forged.into_iter().chain(["x-request-id"]) {
            headers.append(name, HeaderValue::from_static("forged"));
        }
        remove_what_is_ours(&mut headers);
        remove_overrides(&mut headers);
        assert_eq!(names(&headers), ["x-request-id"]);
    }
}
