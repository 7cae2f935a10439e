//! Fingerprints: which requests a payment may be presented with again.

use alloy_primitives::B256;
use http::{
    header::{AUTHORIZATION, COOKIE, HOST, HeaderName},
    request::Parts,
};
use sha2::{Digest, Sha256};

use crate::ledger::{BodyDigest, Fingerprint};

/// The headers that every fingerprint holds.
pub(super) static HEADERS: [HeaderName; 2] = [AUTHORIZATION, COOKIE];

impl Fingerprint {
    /// Returns the fingerprint of a request's head, presented to this seller, whose prices depend on the headers `priced_by` too. Every
    /// part is preceded by its length and the values of a header by their number, so that none can pass for another. `echoed` is the digest of
    /// what the payer added to the seller's extensions.
    pub(super) fn of(parts: &Parts, seller: [&str; 2], priced_by: &[HeaderName], echoed: Option<B256>) -> Self {
        let mut hash = Sha256::new();
        let mut add = |bytes: &[u8]| {
            hash.update((bytes.len() as u64).to_be_bytes());
            hash.update(bytes);
        };
        for part in seller {
            add(part.as_bytes());
        }
        add(parts.method.as_str().as_bytes());
        add(parts.uri.path().as_bytes());
        match parts.uri.query() {
            Some(query) => add(query.as_bytes()),
            // "/a" and "/a?" are different requests.
            None => add(b"\0none"),
        }
        let mut names_caller = false;
        for name in &HEADERS {
            let values = parts.headers.get_all(name);
            let count = values.iter().count() as u64;
            add(name.as_str().as_bytes());
            // No name of a header has the bytes of a number, so that where there are no values none needs to be said.
            if count > 0 {
                add(&count.to_be_bytes());
            }
            values.iter().for_each(|value| add(value.as_bytes()));
            names_caller |= count > 0;
        }
        for name in priced_by {
            let values = parts.headers.get_all(name);
            add(name.as_str().as_bytes());
            add(&(values.iter().count() as u64).to_be_bytes());
            values.iter().for_each(|value| add(value.as_bytes()));
            // HTTP/2 names the host in its URI.
            if *name == HOST {
                add(parts.uri.authority().map_or("", |authority| authority.as_str()).as_bytes());
            }
        }
        if let Some(echoed) = echoed {
            // No header has such a name.
            add(b"\0extensions");
            add(echoed.as_slice());
        }
        Self { digest: B256::from_slice(&hash.finalize()), names_caller }
    }
}

impl BodyDigest {
    /// Returns `true` if the handler would have read the same from `body`.
    pub(super) fn matches(&self, body: &[u8]) -> bool {
        let Some(read) = usize::try_from(self.length).ok().and_then(|length| body.get(..length)) else { return false };
        (!self.complete || read.len() == body.len()) && Sha256::digest(read).as_slice() == self.digest.as_slice()
    }
}

#[cfg(test)]
mod tests {
    use http::Request;

    use super::*;

    fn fingerprint(method: &str, uri: &str, headers: &[(&str, &str)]) -> Fingerprint {
        priced_by(&[], method, uri, headers)
    }

    fn priced_by(names: &[HeaderName], method: &str, uri: &str, headers: &[(&str, &str)]) -> Fingerprint {
        let mut request = Request::builder().method(method).uri(uri);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        Fingerprint::of(&request.body(()).unwrap().into_parts().0, ["https://api.example", ""], names, None)
    }

    #[test]
    fn fingerprint_depends_on_every_part_and_nothing_else() {
        let requests = [
            fingerprint("POST", "/a", &[]),
            fingerprint("PUT", "/a", &[]),
            fingerprint("POST", "/b", &[]),
            fingerprint("POST", "/a?", &[]),
            fingerprint("POST", "/a?x=1", &[]),
            fingerprint("POST", "/%61", &[]),
            fingerprint("POST", "/a", &[("authorization", "x")]),
            fingerprint("POST", "/a", &[("cookie", "x")]),
            fingerprint("POST", "/a", &[("cookie", "x"), ("cookie", "")]),
            fingerprint("POST", "/a", &[("authorization", "x"), ("cookie", "x")]),
            fingerprint("POST", "/a", &[("authorization", "x"), ("authorization", "x")]),
        ];
        for (i, one) in requests.iter().enumerate() {
            for other in &requests[i + 1..] {
                assert_ne!(one, other);
            }
        }
        assert_eq!(requests[0], fingerprint("POST", "/a", &[("user-agent", "x"), ("payment-signature", "y")]));
        assert_eq!(requests.iter().filter(|request| request.names_caller).count(), 5);
    }

    /// Values are tried that hold bytes which the hash is made of: names of headers, and no NUL, of which lengths and numbers have
    /// seven.
    #[test]
    fn values_of_one_header_never_pass_for_those_of_another() {
        let values = ["", "cookie", "authorization"];
        let lists: Vec<Vec<&str>> = (0..=3)
            .flat_map(|length| {
                (0..values.len().pow(length))
                    .map(move |n| (0..length).map(|place| values[n / values.len().pow(place) % values.len()]).collect())
            })
            .collect();
        let mut seen = std::collections::HashMap::new();
        for authorization in &lists {
            for cookie in &lists {
                let headers: Vec<_> = authorization
                    .iter()
                    .map(|value| ("authorization", *value))
                    .chain(cookie.iter().map(|value| ("cookie", *value)))
                    .collect();
                let digest = fingerprint("POST", "/a", &headers).digest;
                let other = seen.insert(digest, (authorization, cookie));
                assert_eq!(other, None, "{authorization:?} {cookie:?}");
            }
        }
        assert_eq!(seen.len(), lists.len().pow(2));
    }

    /// Ledgers hold these digests: with any other, payments on record would be refused.
    #[test]
    fn stored_fingerprints_do_not_change() {
        let digest = |headers: &[(&str, &str)]| fingerprint("POST", "/a?x=1", headers).digest.to_string();
        assert_eq!(digest(&[]), "0x2f298778e353e16b3f79580684a8c95ad5b63603c4262a0313cbf7321d204fed");
        assert_eq!(
            digest(&[("authorization", "x")]),
            "0x3d1e8dd524119c7c36d1bbb5d1b57e81ffbf780b89505115e45477496efc8055"
        );
        assert_eq!(
            digest(&[("cookie", "x"), ("cookie", "y")]),
            "0x495417f3ac16323a4803487aff7aee5851f2d5ffbc231c87594568ff393f2e5a"
        );
    }

    #[test]
    fn fingerprint_depends_on_headers_that_the_price_depends_on() {
        let names = [HOST, HeaderName::from_static("x-plan"), HeaderName::from_static("x-tier")];
        let requests = [
            priced_by(&names, "POST", "/a", &[]),
            priced_by(&names, "POST", "/a", &[("x-tier", "dear")]),
            priced_by(&names, "POST", "/a", &[("x-tier", "dear"), ("x-tier", "dear")]),
            priced_by(&names, "POST", "/a", &[("x-tier", "cheap")]),
            priced_by(&names, "POST", "/a", &[("x-tier", "x-tier")]),
            priced_by(&names, "POST", "/a", &[("x-plan", "x-tier")]),
            priced_by(&names, "POST", "/a", &[("host", "a.example")]),
            priced_by(&names, "POST", "https://a.example/a", &[]),
            priced_by(&names, "POST", "https://b.example/a", &[]),
        ];
        for (i, one) in requests.iter().enumerate() {
            for other in &requests[i + 1..] {
                assert_ne!(one, other);
            }
        }
        assert_eq!(requests[0], priced_by(&names, "POST", "/a", &[("user-agent", "x")]));
        assert_eq!(fingerprint("POST", "/a", &[]), fingerprint("POST", "https://b.example/a", &[("x-tier", "dear")]));
    }

    #[test]
    fn body_matches_as_far_as_it_was_read() {
        let read = |length: usize, complete| BodyDigest {
            length: length as u64,
            digest: B256::from_slice(&Sha256::digest(&b"abcdef"[..length])),
            complete,
        };
        assert!(read(6, true).matches(b"abcdef"));
        assert!(!read(6, true).matches(b"abcdefg"));
        assert!(!read(6, true).matches(b"abcdeX"));
        assert!(read(3, false).matches(b"abcX"));
        assert!(!read(3, false).matches(b"ab"));
        assert!(read(0, false).matches(b"anything"));
    }
}
