//! Who may call the service: bearer keys, and how often each caller asks.

use http::{Extensions, HeaderMap, header::AUTHORIZATION};
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq as _;
use tower_x402::server::{self, RateLimit, TooManyRequests};

/// Bearer keys and rate limit.
pub(crate) struct Access {
    /// SHA-256 digests, so that all keys have one length. Empty if no key is needed.
    keys: Vec<[u8; 32]>,
    rate: Option<RateLimit>,
}

/// Who made a request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Caller {
    pub(crate) counted: server::Caller,
    /// It has a key.
    pub(crate) is_known: bool,
}

/// The reason why a request is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AccessDenied {
    UnknownKey,
    TooManyRequests(TooManyRequests),
}

impl Access {
    pub(crate) fn new(keys: &[String], rate: Option<RateLimit>) -> Self {
        let keys = keys.iter().map(|key| Sha256::digest(key.as_bytes()).into()).collect();
        Self { keys, rate }
    }

    /// Counts the request and checks its key. Returns who called.
    pub(crate) fn admit(
        &self,
        headers: &HeaderMap,
        extensions: &Extensions,
        needs_key: bool,
    ) -> Result<Caller, AccessDenied> {
        let key = self.find_key(headers);
        let counted = key.map_or_else(|| extensions.into(), Into::into);
        // Requests with a wrong key are counted too, so that guessing is limited.
        if let Some(rate) = &self.rate {
            rate.admit(counted).map_err(AccessDenied::TooManyRequests)?;
        }
        if needs_key && !self.keys.is_empty() && key.is_none() {
            return Err(AccessDenied::UnknownKey);
        }
        Ok(Caller { counted, is_known: key.is_some() })
    }

    /// Returns the index of the request's key. Compares it with all keys, so that the time does not depend on which one it is.
    fn find_key(&self, headers: &HeaderMap) -> Option<usize> {
        let value = headers.get(AUTHORIZATION)?.as_bytes();
        let (scheme, token) = value.split_at_checked(7)?;
        if !scheme.eq_ignore_ascii_case(b"bearer ") {
            return None;
        }
        let digest: [u8; 32] = Sha256::digest(token).into();
        let mut found = None;
        for (index, key) in self.keys.iter().enumerate() {
            if bool::from(key.ct_eq(&digest)) {
                found = Some(index);
            }
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bearer_key_must_match_exactly() {
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
