//! How often each caller may ask.

use std::{
    collections::HashMap,
    fmt,
    net::IpAddr,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use alloy_primitives::Address;
use http::Extensions;
use tokio::time::Instant;

use super::access::PeerAddress;

/// How many callers are counted apart; the rest share one allowance.
const MAX_CALLERS: usize = 10_000;

/// A limit on how often each caller may ask: a token bucket for each of up to 10,000 callers; the others share one.
///
/// ```
/// use std::net::IpAddr;
/// use tower_x402::facilitator::service::{PeerAddress, RateLimit};
///
/// let limit = RateLimit::new(0.5, 2.0);
/// let mut request = http::Request::new(());
/// request.extensions_mut().insert(PeerAddress(IpAddr::from([192, 0, 2, 1])));
/// assert!(limit.admit(request.extensions()).is_ok());
/// assert!(limit.admit(request.extensions()).is_ok());
/// let refused = limit.admit(request.extensions()).unwrap_err();
/// println!("come again in {:?}", refused.retry_after);
/// ```
pub struct RateLimit {
    per_second: f64,
    burst: f64,
    buckets: Mutex<HashMap<Caller, Bucket>>,
}

/// The caller has asked too often. Nothing was counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("too many requests; come again in {} s", retry_after.as_secs_f64().ceil())]
#[non_exhaustive]
pub struct TooManyRequests {
    /// How long the caller must wait until its next request is admitted.
    pub retry_after: Duration,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Caller {
    Key(usize),
    /// IPv6 networks are counted by their first 64 bits: one customer has them all.
    Peer(u128),
    Account(Address),
    Others,
}

#[derive(Clone, Copy)]
struct Bucket {
    tokens: f64,
    at: Instant,
}

impl RateLimit {
    /// Allows each caller `per_second` requests a second, and up to `burst` at once after a pause. Less than one at once, or a negative
    /// number a second, is taken for one, or none.
    pub fn new(per_second: f64, burst: f64) -> Self {
        Self { per_second: per_second.max(0.0), burst: burst.max(1.0), buckets: Mutex::default() }
    }

    /// Counts a request of the peer whose [`PeerAddress`] is in the request's extensions. Requests without one share one allowance, and
    /// so do the addresses of one IPv6 network (64 bits).
    ///
    /// # Errors
    /// [`TooManyRequests`] if the request must not be worked on now.
    pub fn admit(&self, extensions: &Extensions) -> Result<(), TooManyRequests> {
        self.count(Caller::of_peer(extensions), Instant::now())
    }

    /// Counts something that this account has signed.
    ///
    /// # Errors
    /// [`TooManyRequests`] if it must not be worked on now.
    pub fn admit_account(&self, account: Address) -> Result<(), TooManyRequests> {
        self.count(Caller::Account(account), Instant::now())
    }

    pub(super) fn count(&self, caller: Caller, now: Instant) -> Result<(), TooManyRequests> {
        let mut buckets = self.buckets.lock().unwrap_or_else(PoisonError::into_inner);
        let mut caller = caller;
        if buckets.len() >= MAX_CALLERS && !buckets.contains_key(&caller) {
            // A full bucket is as good as none.
            buckets.retain(|_, bucket| self.filled(bucket, now) < self.burst);
            if buckets.len() >= MAX_CALLERS {
                caller = Caller::Others;
            }
        }
        let bucket = buckets.entry(caller).or_insert(Bucket { tokens: self.burst, at: now });
        *bucket = Bucket { tokens: self.filled(bucket, now), at: now };
        if bucket.tokens >= 1.0 {
            bucket.tokens -= 1.0;
            return Ok(());
        }
        let wait = (1.0 - bucket.tokens) / self.per_second;
        Err(TooManyRequests { retry_after: Duration::try_from_secs_f64(wait).unwrap_or(Duration::from_secs(60)) })
    }

    fn filled(&self, bucket: &Bucket, now: Instant) -> f64 {
        let since = now.saturating_duration_since(bucket.at).as_secs_f64();
        (bucket.tokens + since * self.per_second).min(self.burst)
    }
}

impl fmt::Debug for RateLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { per_second, burst, .. } = self;
        f.debug_struct("RateLimit").field("per_second", per_second).field("burst", burst).finish_non_exhaustive()
    }
}

impl Caller {
    pub(super) fn of_peer(extensions: &Extensions) -> Self {
        extensions.get().map_or(Self::Others, |PeerAddress(address)| Self::Peer(prefix(*address)))
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

    fn limit() -> RateLimit {
        RateLimit::new(2.0, 3.0)
    }

    fn peer(address: &str) -> Caller {
        Caller::Peer(prefix(address.parse().unwrap()))
    }

    #[test]
    fn who_asks_too_often_waits_and_nobody_else() {
        let limit = limit();
        let start = Instant::now();
        for _ in 0..3 {
            assert_eq!(limit.count(peer("192.0.2.1"), start), Ok(()));
        }
        let refused = TooManyRequests { retry_after: Duration::from_millis(500) };
        assert_eq!(limit.count(peer("192.0.2.1"), start), Err(refused));
        assert_eq!(refused.to_string(), "too many requests; come again in 1 s");
        assert_eq!(limit.count(peer("192.0.2.2"), start), Ok(()));
        assert_eq!(limit.count(peer("192.0.2.1"), start + Duration::from_millis(500)), Ok(()));
    }

    #[test]
    fn addresses_of_one_network_are_one_caller_and_their_number_is_bounded() {
        assert_eq!(peer("2001:db8::1"), peer("2001:db8::2"));
        assert_ne!(peer("2001:db8::1"), peer("2001:db8:0:1::1"));
        assert_eq!(peer("192.0.2.1"), peer("::ffff:192.0.2.1"));
        let limit = limit();
        let start = Instant::now();
        for caller in 0..(MAX_CALLERS as u128 + 100) {
            let _ = limit.count(Caller::Peer(caller << 64), start);
        }
        assert!(limit.buckets.lock().unwrap().len() <= MAX_CALLERS + 1);
    }

    /// Numbers from a configuration file may be anything.
    #[test]
    fn limit_out_of_range_still_admits_one_request() {
        for (per_second, burst) in [(0.0, 0.0), (-1.0, -1.0), (f64::NAN, f64::NAN)] {
            let limit = RateLimit::new(per_second, burst);
            let start = Instant::now();
            assert_eq!(limit.count(Caller::Others, start), Ok(()));
            let refused = TooManyRequests { retry_after: Duration::from_secs(60) };
            assert_eq!(limit.count(Caller::Others, start + Duration::from_secs(3_600)), Err(refused));
        }
    }
}
