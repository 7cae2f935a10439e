//! What the HTTP clients here share: URLs below a base, bodies within a limit, and connections to public hosts only.
//!
//! Evaluators and directories name URLs that this process then fetches. Only public addresses may be reached that way, or anybody could
//! make it look around in its own network.

use std::{
    error::Error,
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
};

use reqwest::{
    ClientBuilder, Response,
    dns::{Addrs, Name, Resolve, Resolving},
};
use url::{Host, Url};

/// Returns the URL of `path` below `base`, or `None` if `base` is not an http or https URL.
pub fn below(base: &Url, path: &str) -> Option<Url> {
    let mut base = base.clone();
    if !matches!(base.scheme(), "http" | "https") || !base.has_host() {
        return None;
    }
    base.set_query(None);
    base.set_fragment(None);
    if !base.path().ends_with('/') {
        base.set_path(&format!("{}/", base.path()));
    }
    base.join(path.trim_start_matches('/')).ok()
}

/// Why the body of a response was not read.
#[derive(Debug)]
pub enum BodyError {
    /// The connection failed. The error does not show the URL.
    Broken(reqwest::Error),
    /// The body is longer than the limit.
    TooLarge,
}

/// Reads the body of a response, at most `limit` bytes.
pub async fn read_body(mut response: Response, limit: usize) -> Result<Vec<u8>, BodyError> {
    let mut body = Vec::new();
    while let Some(chunk) = response.chunk().await.map_err(|error| BodyError::Broken(error.without_url()))? {
        if body.len() + chunk.len() > limit {
            return Err(BodyError::TooLarge);
        }
        body.extend_from_slice(&chunk);
    }
    Ok(body)
}

/// Returns a client that connects to public hosts only. Check URLs with [`may_be_public`] first: addresses are not resolved. The client
/// uses no proxy, because a proxy would resolve the names.
pub(crate) fn public_client() -> ClientBuilder {
    reqwest::Client::builder().no_proxy().dns_resolver(PublicHosts)
}

/// Returns `true` if the URL's host is a public address, or a name, which the [`public_client`] resolves.
pub(crate) fn may_be_public(url: &Url) -> bool {
    match url.host() {
        Some(Host::Domain(_)) => true,
        Some(Host::Ipv4(address)) => is_public(address.into()),
        Some(Host::Ipv6(address)) => is_public(address.into()),
        None => false,
    }
}

/// Returns `true` if a request failed because its host is not public.
pub(crate) fn is_refusal(error: &(dyn Error + 'static)) -> bool {
    std::iter::successors(Some(error), |&error| error.source()).any(|error| {
        // An I/O error returns the source of the error it holds, not that error itself.
        let held = error.downcast_ref::<io::Error>().and_then(io::Error::get_ref);
        error.is::<NotPublic>() || held.is_some_and(|held| held.is::<NotPublic>())
    })
}

/// Resolves names to public addresses only. The client connects to exactly the addresses that were checked, so a name that resolves
/// differently the second time gains nothing.
#[derive(Clone, Copy, Debug)]
struct PublicHosts;

/// A name without a public address.
#[derive(Debug, thiserror::Error)]
#[error("the name has no public address")]
struct NotPublic;

impl Resolve for PublicHosts {
    fn resolve(&self, name: Name) -> Resolving {
        Box::pin(async move {
            let all = tokio::net::lookup_host((name.as_str(), 0)).await?;
            let public: Vec<SocketAddr> = all.filter(|address| is_public(address.ip())).collect();
            if public.is_empty() {
                return Err(NotPublic.into());
            }
            Ok(Box::new(public.into_iter()) as Addrs)
        })
    }
}

/// Returns `true` if the address is globally reachable (IANA's registries of special-purpose addresses, RFC 6890).
fn is_public(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => is_public_v4(address),
        IpAddr::V6(address) => match address.to_ipv4_mapped() {
            Some(address) => is_public_v4(address),
            None => is_public_v6(address),
        },
    }
}

fn is_public_v4(address: Ipv4Addr) -> bool {
    let [a, b, c, _] = address.octets();
    let is_special = address.is_private()
        || address.is_loopback()
        || address.is_link_local()
        || address.is_documentation()
        || a == 0
        // Shared address space of carriers, protocol assignments, 6to4 relays, benchmarks.
        || (a == 100 && b & 0xc0 == 64)
        || (a == 192 && b == 0 && c == 0)
        || (a == 192 && b == 88 && c == 99)
        || (a == 198 && b & 0xfe == 18)
        // Multicast, reserved and broadcast.
        || a >= 224;
    !is_special
}

/// Global unicast, except the ranges that embed an IPv4 address or are for documentation.
fn is_public_v6(address: Ipv6Addr) -> bool {
    let [a, b, ..] = address.segments();
    let is_special = a & 0xe000 != 0x2000
        || (a == 0x2001 && (b < 0x200 || b == 0xdb8))
        || a == 0x2002
        || (a == 0x3fff && b < 0x1000);
    !is_special
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_globally_reachable_addresses_are_public() {
        for private in [
            "0.0.0.0",
            "10.0.0.1",
            "100.64.0.1",
            "127.0.0.1",
            "169.254.169.254",
            "172.31.0.1",
            "192.0.0.8",
            "192.0.2.1",
            "192.168.1.1",
            "198.18.0.1",
            "198.51.100.1",
            "203.0.113.1",
            "224.0.0.1",
            "255.255.255.255",
            "::",
            "::1",
            "::ffff:127.0.0.1",
            "::ffff:10.0.0.1",
            "::127.0.0.1",
            "64:ff9b::7f00:1",
            "2001::1",
            "2001:db8::1",
            "2002:7f00:1::",
            "fc00::1",
            "fd00:ec2::254",
            "fe80::1",
            "ff02::1",
        ] {
            assert!(!is_public(private.parse().unwrap()), "{private}");
        }
        for public in ["1.1.1.1", "100.128.0.1", "172.32.0.1", "198.20.0.1", "2606:4700::1111", "::ffff:1.1.1.1"] {
            assert!(is_public(public.parse().unwrap()), "{public}");
        }
        for url in ["http://2130706433/", "http://0x7f.1/", "http://127.1/", "http://[::1]/", "http://[::ffff:7f00:1]/"]
        {
            assert!(!may_be_public(&url.parse().unwrap()), "{url}");
        }
    }

    #[tokio::test]
    async fn local_name_is_refused_as_not_public() {
        let http = public_client().build().unwrap();
        let error = http.get("http://localhost:9/").send().await.unwrap_err();
        assert!(is_refusal(&error), "{error:?}");
    }
}
