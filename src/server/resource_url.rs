//! The URL of what a request asks for, read from the request itself.
//!
//! Where no public origin is configured, the URL in a 402 is built from this. The client chooses it, so it is read strictly, and is
//! used only in the 402 for that very request: no price, no fingerprint and no ledger record depends on it, nothing built from it
//! is cached here, and the 402 forbids others to store it.

use std::{
    borrow::Cow,
    net::{Ipv4Addr, Ipv6Addr},
};

use http::{
    HeaderMap, HeaderName, HeaderValue, Uri,
    header::{FORWARDED, HOST},
    uri::Scheme,
};

const X_FORWARDED_PROTO: HeaderName = HeaderName::from_static("x-forwarded-proto");

/// The longest name in the DNS, in bytes.
const LONGEST_NAME: usize = 253;
/// The longest label of such a name.
const LONGEST_LABEL: usize = 63;

/// The URI of a request and the host that it names.
#[derive(Clone, Debug)]
pub(super) struct Target<'a> {
    uri: Cow<'a, Uri>,
    /// The only `Host` header.
    host: Option<Cow<'a, HeaderValue>>,
    /// By which scheme it came to a trusted proxy.
    forwarded: Option<Proto>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Proto {
    Http,
    Https,
}

impl<'a> Target<'a> {
    /// Returns a target of which only the path counts.
    pub(super) const fn of_path(uri: &'a Uri) -> Self {
        Self { uri: Cow::Borrowed(uri), host: None, forwarded: None }
    }

    /// Returns the target of a request with these headers. Those that name a scheme are read only if `trusts_proxy`.
    pub(super) fn of(uri: &'a Uri, headers: &'a HeaderMap, trusts_proxy: bool) -> Self {
        let mut hosts = headers.get_all(HOST).iter();
        let host = match (hosts.next(), hosts.next()) {
            (Some(host), None) => Some(Cow::Borrowed(host)),
            _ => None,
        };
        let forwarded = if trusts_proxy { Proto::forwarded(headers) } else { None };
        Self { uri: Cow::Borrowed(uri), host, forwarded }
    }

    /// Returns the same, for longer than the request lives.
    pub(super) fn into_owned(self) -> Target<'static> {
        let Self { uri, host, forwarded } = self;
        Target { uri: Cow::Owned(uri.into_owned()), host: host.map(|host| Cow::Owned(host.into_owned())), forwarded }
    }

    /// Returns its path.
    pub(super) fn path(&self) -> &str {
        self.uri.path()
    }

    /// Returns its URL without the query, or its path alone if it names no host, more than one, or none that can be read.
    pub(super) fn url(&self) -> Cow<'_, str> {
        let path = self.path();
        let Some((proto, authority)) = self.origin().filter(|_| path.starts_with('/')) else { return path.into() };
        let parts = [proto.prefix(), authority, path];
        let mut url = String::with_capacity(parts.iter().map(|part| part.len()).sum());
        parts.iter().for_each(|part| url.push_str(part));
        url.into()
    }

    fn origin(&self) -> Option<(Proto, &str)> {
        // Where the URI names a host, `Host` is to be ignored (RFC 9112, section 3.2.2); HTTP/2 has it there.
        let authority = match self.uri.authority() {
            Some(authority) => authority.as_str(),
            None => self.host.as_ref()?.to_str().ok()?,
        };
        let host = HostKind::of(authority)?;
        let in_uri = || self.uri.scheme().and_then(Proto::of_scheme);
        let proto = self.forwarded.or_else(in_uri).unwrap_or(match host {
            HostKind::Loopback => Proto::Http,
            HostKind::Elsewhere => Proto::Https,
        });
        Some((proto, authority))
    }
}

impl Proto {
    const fn prefix(self) -> &'static str {
        match self {
            Self::Http => "http://",
            Self::Https => "https://",
        }
    }

    fn of_scheme(scheme: &Scheme) -> Option<Self> {
        Self::named(scheme.as_str())
    }

    fn named(name: &str) -> Option<Self> {
        match name {
            name if name.eq_ignore_ascii_case("http") => Some(Self::Http),
            name if name.eq_ignore_ascii_case("https") => Some(Self::Https),
            _ => None,
        }
    }

    /// Returns the scheme in which a proxy was asked: `X-Forwarded-Proto`, or the last element of `Forwarded` (RFC 7239), which the nearest proxy
    /// added. Several values of the first are not believed.
    fn forwarded(headers: &HeaderMap) -> Option<Self> {
        let mut values = headers.get_all(X_FORWARDED_PROTO).iter();
        match (values.next(), values.next()) {
            (Some(value), None) => Self::named(value.to_str().ok()?.trim()),
            (Some(_), Some(_)) => None,
            (None, _) => {
                let last = headers.get_all(FORWARDED).iter().next_back()?.to_str().ok()?.rsplit(',').next()?;
                let mut pairs = last.split(';').filter_map(|pair| pair.split_once('='));
                let (_, value) = pairs.find(|(name, _)| name.trim().eq_ignore_ascii_case("proto"))?;
                Self::named(value.trim().trim_matches('"'))
            }
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum HostKind {
    /// This machine, which is hardly reached over TLS.
    Loopback,
    Elsewhere,
}

impl HostKind {
    /// Returns where `authority` is: a host, and a port if any. Returns `None` if it is anything else.
    fn of(authority: &str) -> Option<Self> {
        let (is_loopback, port) = if let Some(rest) = authority.strip_prefix('[') {
            let (address, port) = rest.split_once(']')?;
            (address.parse::<Ipv6Addr>().ok()?.to_canonical().is_loopback(), port)
        } else {
            let (name, port) = authority.split_at(authority.find(':').unwrap_or(authority.len()));
            (is_loopback_name(name)?, port)
        };
        let is_port = |port: &str| {
            port.bytes().all(|byte| byte.is_ascii_digit()) && port.parse::<u16>().is_ok_and(|port| port != 0)
        };
        let is_whole = port.is_empty() || port.strip_prefix(':').is_some_and(is_port);
        is_whole.then_some(if is_loopback { Self::Loopback } else { Self::Elsewhere })
    }
}

/// Returns `Some(true)` if a name in the DNS, or an IPv4 address, is this machine's, and `None` if it is neither.
fn is_loopback_name(name: &str) -> Option<bool> {
    let name = name.strip_suffix('.').unwrap_or(name);
    // Underscores are in no host's name, and in those of containers.
    let is_inner = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_';
    let is_label = |label: &str| {
        (1..=LONGEST_LABEL).contains(&label.len())
            && label.bytes().all(is_inner)
            && !label.starts_with('-')
            && !label.ends_with('-')
    };
    if name.len() > LONGEST_NAME || !name.split('.').all(is_label) {
        return None;
    }
    let last = name.rsplit('.').next().unwrap_or_default();
    // Readers of URLs take a name that ends in a number for an address, in any spelling; one is enough.
    let is_number = last.bytes().all(|byte| byte.is_ascii_digit()) || last.starts_with("0x") || last.starts_with("0X");
    if is_number {
        return Some(name.parse::<Ipv4Addr>().ok()?.is_loopback());
    }
    Some(last.eq_ignore_ascii_case("localhost"))
}

#[cfg(test)]
mod tests {
    use http::Request;

    use super::*;

    fn asked(uri: &str, headers: &[(&str, &str)], trusts_proxy: bool) -> String {
        let mut request = Request::builder().uri(uri);
        for (name, value) in headers {
            request = request.header(*name, HeaderValue::from_bytes(value.as_bytes()).unwrap());
        }
        let (parts, ()) = request.body(()).unwrap().into_parts();
        let target = Target::of(&parts.uri, &parts.headers, trusts_proxy);
        let url = target.url().into_owned();
        assert_eq!(target.into_owned().url(), url, "kept or not");
        url
    }

    fn by_host(host: &str) -> String {
        asked("/evaluate?x=1", &[("host", host)], false)
    }

    #[test]
    fn url_has_the_port_of_the_host() {
        for (host, url) in [
            ("api.example", "https://api.example/evaluate"),
            ("api.example:8443", "https://api.example:8443/evaluate"),
            ("API.Example.", "https://API.Example./evaluate"),
            ("my_service", "https://my_service/evaluate"),
            ("xn--bcher-kva.example", "https://xn--bcher-kva.example/evaluate"),
            ("192.168.1.5:4021", "https://192.168.1.5:4021/evaluate"),
            ("[2001:db8::1]:4021", "https://[2001:db8::1]:4021/evaluate"),
        ] {
            assert_eq!(by_host(host), url);
        }
    }

    #[test]
    fn loopback_hosts_are_asked_over_http() {
        for host in [
            "localhost",
            "LOCALHOST:4021",
            "localhost.",
            "a.localhost:1",
            "127.0.0.1:4021",
            "127.1.2.3",
            "[::1]",
            "[::1]:65535",
            "[::ffff:127.0.0.1]:80",
        ] {
            assert_eq!(by_host(host), format!("http://{host}/evaluate"));
        }
        for host in ["localhost.example", "notlocalhost", "128.0.0.1", "[::2]"] {
            assert_eq!(by_host(host), format!("https://{host}/evaluate"));
        }
    }

    #[test]
    fn malformed_host_is_not_repeated() {
        let (long_label, long_name) = ("a".repeat(64), ["a"; 128].join("."));
        for host in [
            "",
            " ",
            "api example",
            "api.example ",
            "user@api.example",
            "user:secret@api.example",
            "@",
            "api.example/evil",
            "api.example?x",
            "api.example#x",
            "api.example\\evil",
            "a.example, b.example",
            "a.example,b.example",
            "a.example;b",
            "\"><script>",
            "'$(id)'",
            "a..b",
            ".a",
            "-a.example",
            "a-.example",
            "%61.example",
            "b\u{fc}cher.example",
            "api\t.example",
            "api.example:",
            "api.example:0",
            "api.example:65536",
            "api.example:+80",
            "api.example:80:80",
            "api.example:8o",
            ":80",
            "::1",
            "1.2.3",
            "1.2.3.4.5",
            "1.2.3.256",
            "127.1",
            "2130706433",
            "0x7f000001",
            "0x7f.0.0.0x1",
            "[::1",
            "[::1]x",
            "[::1]:",
            "[]",
            "[fe80::1%eth0]",
            "[v1.a]",
            "[127.0.0.1]",
            "http://api.example",
            &long_label,
            &long_name,
        ] {
            assert_eq!(by_host(host), "/evaluate", "{host:?}");
        }
        assert_eq!(asked("/a", &[], false), "/a");
        assert_eq!(asked("/a", &[("host", "a.example"), ("host", "a.example")], false), "/a");
        assert_eq!(asked("*", &[("host", "a.example")], false), "*");
    }

    #[test]
    fn a_host_in_the_uri_comes_before_the_header() {
        let host = [("host", "b.example")];
        assert_eq!(asked("http://a.example:80/a", &host, false), "http://a.example:80/a");
        assert_eq!(asked("https://localhost/a", &[], false), "https://localhost/a", "HTTP/2");
        assert_eq!(asked("https://user@a.example/a", &host, false), "/a");
        assert_eq!(asked("ftp://a.example/a", &[], false), "https://a.example/a");
    }

    #[test]
    fn forwarded_schemes_are_read_from_trusted_proxies_only() {
        let at = |host: &str, headers: &[(&str, &str)], trusts_proxy| {
            let headers: Vec<_> = [("host", host)].iter().chain(headers).copied().collect();
            asked("/a", &headers, trusts_proxy)
        };
        let (local, remote) = ("localhost", "a.example");
        for (headers, scheme) in [
            (&[("x-forwarded-proto", "https")][..], "https"),
            (&[("x-forwarded-proto", "HTTPS")], "https"),
            (&[("forwarded", "for=192.0.2.1;Proto=https;by=203.0.113.43")], "https"),
            (&[("forwarded", "proto=http, for=\"[2001:db8::1]\"; proto=\"https\"")], "https"),
            (&[("forwarded", "proto=http"), ("forwarded", "proto=https")], "https"),
            (&[("x-forwarded-proto", "https"), ("forwarded", "proto=http")], "https"),
            (&[("x-forwarded-proto", "https, https")], "http"),
            (&[("x-forwarded-proto", "https"), ("x-forwarded-proto", "https")], "http"),
            (&[("x-forwarded-proto", "javascript")], "http"),
            (&[("x-forwarded-proto", "")], "http"),
            (&[("forwarded", "proto=https, for=192.0.2.1")], "http"),
            (&[("forwarded", "proto")], "http"),
        ] {
            assert_eq!(at(local, headers, true), format!("{scheme}://localhost/a"), "{headers:?}");
            assert_eq!(at(local, headers, false), "http://localhost/a", "{headers:?}");
        }
        assert_eq!(at(remote, &[("x-forwarded-proto", "http")], true), "http://a.example/a");
        assert_eq!(at(remote, &[("x-forwarded-proto", "http")], false), "https://a.example/a");
        assert_eq!(at(remote, &[("x-forwarded-host", "b.example")], true), "https://a.example/a");
    }
}
