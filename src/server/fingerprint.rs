//! What makes two requests the same purchase.

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
    /// The fingerprint of a request's head, presented to this seller, whose prices depend on the headers `priced_by` too. Every
    /// part is preceded by its length, so that none can pass for another.
    pub(super) fn of(parts: &Parts, seller: [&str; 2], priced_by: &[HeaderName]) -> Self {
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
            add(name.as_str().as_bytes());
            for value in parts.headers.get_all(name) {
                add(value.as_bytes());
                names_caller = true;
            }
        }
        for name in priced_by {
            let values = parts.headers.get_all(name);
            add(name.as_str().as_bytes());
            add(&values.iter().count().to_be_bytes());
            values.iter().for_each(|value| add(value.as_bytes()));
            // HTTP/2 names the host in its URI.
            if *name == HOST {
                add(parts.uri.authority().map_or("", |authority| authority.as_str()).as_bytes());
            }
        }
        Self { digest: B256::from_slice(&hash.finalize()), names_caller }
    }
}

impl BodyDigest {
    /// Whether the handler would have read the same from `body`.
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
        Fingerprint::of(&request.body(()).unwrap().into_parts().0, ["https://api.example", ""], names)
    }

    #[test]
    fn every_part_counts_and_nothing_else_does() {
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
        ];
        for (i, one) in requests.iter().enumerate() {
            for other in &requests[i + 1..] {
                assert_ne!(one, other);
            }
        }
        assert_eq!(requests[0], fingerprint("POST", "/a", &[("user-agent", "x"), ("payment-signature", "y")]));
        assert_eq!(requests.iter().filter(|request| request.names_caller).count(), 3);
    }

    #[test]
    fn headers_that_the_price_depends_on_count_too() {
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
    fn only_what_was_read_of_a_body_counts() {
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
