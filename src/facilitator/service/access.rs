//! Who may ask, and how often.

use std::{
    collections::HashMap,
    fmt,
    net::IpAddr,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use http::{Extensions, HeaderMap, header::AUTHORIZATION};
use sha2::{Digest, Sha256};
use tokio::time::Instant;

/// How many callers are counted apart; the rest share one allowance.
const MAX_CALLERS: usize = 10_000;

/// The address of the peer, put into a request's extensions by the server that accepted its connection, or by whoever stands in
/// front of it and can be trusted with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerAddress(pub IpAddr);

/// Keys and allowances.
pub(crate) struct Access {
    /// Digests, so that comparing takes the same time for all of them. Empty if everybody may ask.
    keys: Vec<[u8; 32]>,
    rate: Option<Rate>,
    buckets: Mutex<HashMap<Caller, Bucket>>,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Rate {
    pub(crate) per_second: f64,
    pub(crate) burst: f64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Caller {
    Key(usize),
    /// IPv6 networks are counted by their first 64 bits: one customer has them all.
    Peer(u128),
    #[cfg(feature = "directory")]
    Account(alloy_primitives::Address),
    Others,
}

#[derive(Clone, Copy)]
struct Bucket {
    tokens: f64,
    at: Instant,
}

/// Why a request is not worked on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    Unknown,
    TooMany(Duration),
}

impl Access {
    pub(crate) fn new(keys: &[String], rate: Option<Rate>) -> Self {
        let keys = keys.iter().map(|key| Sha256::digest(key.as_bytes()).into()).collect();
        Self { keys, rate, buckets: Mutex::default() }
    }

    /// Counts the request, and finds its caller among the keys.
    pub(crate) fn admit(&self, headers: &HeaderMap, extensions: &Extensions, needs_key: bool) -> Result<(), Refusal> {
        let key = self.key_of(headers);
        let caller = match (key, extensions.get::<PeerAddress>()) {
            (Some(key), _) => Caller::Key(key),
            (None, Some(PeerAddress(address))) => Caller::Peer(prefix(*address)),
            (None, None) => Caller::Others,
        };
        // Who guesses keys is counted too.
        self.count(caller, Instant::now())?;
        if needs_key && !self.keys.is_empty() && key.is_none() { Err(Refusal::Unknown) } else { Ok(()) }
    }

    /// Counts something that this account has signed.
    #[cfg(feature = "directory")]
    pub(crate) fn admit_account(&self, account: alloy_primitives::Address) -> Result<(), Refusal> {
        self.count(Caller::Account(account), Instant::now())
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

    fn count(&self, caller: Caller, now: Instant) -> Result<(), Refusal> {
        let Some(rate) = self.rate else { return Ok(()) };
        let mut buckets = self.buckets.lock().unwrap_or_else(PoisonError::into_inner);
        let mut caller = caller;
        if buckets.len() >= MAX_CALLERS && !buckets.contains_key(&caller) {
            // A full bucket is as good as none.
            buckets.retain(|_, bucket| bucket.filled(rate, now) < rate.burst);
            if buckets.len() >= MAX_CALLERS {
                caller = Caller::Others;
            }
        }
        let bucket = buckets.entry(caller).or_insert(Bucket { tokens: rate.burst, at: now });
        *bucket = Bucket { tokens: bucket.filled(rate, now), at: now };
        if bucket.tokens >= 1.0 {
            bucket.tokens -= 1.0;
            return Ok(());
        }
        let wait = (1.0 - bucket.tokens) / rate.per_second;
        Err(Refusal::TooMany(Duration::try_from_secs_f64(wait).unwrap_or(Duration::from_secs(60))))
    }
}

impl Bucket {
    fn filled(&self, rate: Rate, now: Instant) -> f64 {
        let since = now.saturating_duration_since(self.at).as_secs_f64();
        (self.tokens + since * rate.per_second).min(rate.burst)
    }
}

impl fmt::Debug for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Access").field("keys", &self.keys.len()).field("rate", &self.rate).finish_non_exhaustive()
    }
}

fn prefix(address: IpAddr) -> u128 {
    match address.to_canonical() {
        IpAddr::V4(address) => address.to_ipv6_mapped().to_bits(),
        IpAddr::V6(address) => address.to_bits() & !u128::from(u64::MAX),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RATE: Rate = Rate { per_second: 2.0, burst: 3.0 };

    fn peer(address: &str) -> Caller {
        Caller::Peer(prefix(address.parse().unwrap()))
    }

    #[test]
    fn who_asks_too_often_waits_and_nobody_else() {
        let access = Access::new(&[], Some(RATE));
        let start = Instant::now();
        for _ in 0..3 {
            assert_eq!(access.count(peer("192.0.2.1"), start), Ok(()));
        }
        assert_eq!(access.count(peer("192.0.2.1"), start), Err(Refusal::TooMany(Duration::from_millis(500))));
        assert_eq!(access.count(peer("192.0.2.2"), start), Ok(()));
        assert_eq!(access.count(peer("192.0.2.1"), start + Duration::from_millis(500)), Ok(()));
    }

    #[test]
    fn addresses_of_one_network_are_one_caller_and_their_number_is_bounded() {
        assert_eq!(peer("2001:db8::1"), peer("2001:db8::2"));
        assert_ne!(peer("2001:db8::1"), peer("2001:db8:0:1::1"));
        assert_eq!(peer("192.0.2.1"), peer("::ffff:192.0.2.1"));
        let access = Access::new(&[], Some(RATE));
        let start = Instant::now();
        for caller in 0..(MAX_CALLERS as u128 + 100) {
            let _ = access.count(Caller::Peer(caller << 64), start);
        }
        assert!(access.buckets.lock().unwrap().len() <= MAX_CALLERS + 1);
    }

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
