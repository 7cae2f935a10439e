//! Who may ask, and how often.

use std::{fmt, net::IpAddr, time::Duration};

use http::{Extensions, HeaderMap, header::AUTHORIZATION};
use sha2::{Digest, Sha256};
use tokio::time::Instant;

use super::rate::{Caller, RateLimit};

/// The address of the peer, put into a request's extensions by the server that accepted its connection, or by whoever stands in
/// front of it and can be trusted with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerAddress(pub IpAddr);

/// Keys and allowances.
pub(super) struct Access {
    /// Digests, so that comparing takes the same time for all of them. Empty if everybody may ask.
    keys: Vec<[u8; 32]>,
    rate: Option<RateLimit>,
}

/// Why a request is not worked on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    Unknown,
    TooMany(Duration),
}

impl Access {
    pub(super) fn new(keys: &[String], rate: Option<RateLimit>) -> Self {
        let keys = keys.iter().map(|key| Sha256::digest(key.as_bytes()).into()).collect();
        Self { keys, rate }
    }

    /// Counts the request, and finds its caller among the keys.
    pub(super) fn admit(&self, headers: &HeaderMap, extensions: &Extensions, needs_key: bool) -> Result<(), Refusal> {
        let key = self.key_of(headers);
        // Who guesses keys is counted too.
        if let Some(rate) = &self.rate {
            let caller = key.map_or_else(|| Caller::of_peer(extensions), Caller::Key);
            rate.count(caller, Instant::now()).map_err(|refused| Refusal::TooMany(refused.retry_after))?;
        }
        if needs_key && !self.keys.is_empty() && key.is_none() { Err(Refusal::Unknown) } else { Ok(()) }
    }

    /// All keys are compared, each in whole: the time tells nothing.
    fn key_of(&self, headers: &HeaderMap) -> Option<usize> {
        let presented = headers.get(AUTHORIZATION)?.as_bytes();
        let (scheme, token) = presented.split_at_checked(7)?;
        if !scheme.eq_ignore_ascii_case(b"bearer ") {
            return None;
        }
        let digest: [u8; 32] = Sha256::digest(token).into();
        let mut found = None;
        for (index, key) in self.keys.iter().enumerate() {
            let difference = key.iter().zip(digest).fold(0, |sum, (a, b)| sum | (a ^ b));
            if difference == 0 {
                found = Some(index);
            }
        }
        found
    }
}

impl fmt::Debug for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Access").field("keys", &self.keys.len()).field("rate", &self.rate).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_known_whole_or_not_at_all() {
        let access = Access::new(&["one".to_owned(), "two".to_owned()], None);
        let admit = |value: &str| {
            let headers = HeaderMap::from_iter([(AUTHORIZATION, value.parse().unwrap())]);
            access.admit(&headers, &Extensions::new(), true).is_ok()
        };
        assert!(admit("Bearer one") && admit("bearer two"));
        for wrong in ["Bearer on", "Bearer onee", "Bearer ", "one", "Basic one", "Bearer  one"] {
            assert!(!admit(wrong), "{wrong}");
        }
        assert!(access.admit(&HeaderMap::new(), &Extensions::new(), false).is_ok());
    }
}
