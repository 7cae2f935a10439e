//! How often each caller may ask.

use std::{
    collections::HashMap,
    net::IpAddr,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use alloy_primitives::Address;
use http::Extensions;
use tokio::time::Instant;

/// How many callers have an allowance of their own. The others share one.
const MAX_CALLERS: usize = 10_000;
/// All that have none.
const OTHERS: Caller = Caller(Who::Others);

/// The address of the peer, in a request's extensions.
///
/// The server that accepted the connection inserts it, or a proxy layer that can be trusted to know it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerAddress(pub IpAddr);

/// A limit on requests per caller: a token bucket for each of up to 10,000 callers, and one for all others.
///
/// ```
/// use std::net::IpAddr;
/// use tower_x402::server::{PeerAddress, RateLimit};
///
/// let limit = RateLimit::new(0.5, 2.0);
/// let mut request = http::Request::new(());
/// request.extensions_mut().insert(PeerAddress(IpAddr::from([192, 0, 2, 1])));
/// assert!(limit.admit(request.extensions()).is_ok());
/// assert!(limit.admit(request.extensions()).is_ok());
/// let refused = limit.admit(request.extensions()).unwrap_err();
/// println!("retry in {:?}", refused.retry_after);
/// ```
// Not `governor`: its keyed limiter has no bound on keys, rates below one per second only as a period, and a clock of its own in
// place of tokio's, which tests pause.
pub struct RateLimit {
    per_second: f64,
    burst: f64,
    buckets: Mutex<HashMap<Caller, Bucket>>,
}

/// The caller has made too many requests. This one was not counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("too many requests; retry in {} s", retry_after.as_secs_f64().ceil())]
#[non_exhaustive]
pub struct TooManyRequests {
    /// The time until the caller's next request is admitted.
    pub retry_after: Duration,
}

/// Who asked: a key of the service's own, the peer at an address, or an account that signed.
///
/// It is made of what says so: a number of your own for each key, the extensions of a request, of which the [`PeerAddress`] counts, or an
/// address. All requests without a [`PeerAddress`] are of one caller, and so are those of one IPv6 network (64 bits).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Caller(Who);

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Who {
    Key(usize),
    /// The first 64 bits of an IPv6 address: one customer has the whole network.
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
    /// Creates a limit of `per_second` requests per second and caller, and up to `burst` at once after a pause.
    ///
    /// A `burst` below one counts as one, a negative `per_second` as zero.
    pub fn new(per_second: f64, burst: f64) -> Self {
        Self { per_second: per_second.max(0.0), burst: burst.max(1.0), buckets: Mutex::default() }
    }

    /// Counts a request.
    ///
    /// # Errors
    /// [`TooManyRequests`] if the request must be refused.
    pub fn admit(&self, caller: impl Into<Caller>) -> Result<(), TooManyRequests> {
        self.count(caller.into(), Instant::now())
    }

    /// Fails if a request of this caller would be refused. Does not count it.
    ///
    /// # Errors
    /// [`TooManyRequests`] then.
    pub fn check(&self, caller: impl Into<Caller>) -> Result<(), TooManyRequests> {
        let (caller, now) = (caller.into(), Instant::now());
        let buckets = self.buckets.lock().unwrap_or_else(PoisonError::into_inner);
        let others = || buckets.get(&OTHERS).filter(|_| buckets.len() >= MAX_CALLERS);
        let tokens = buckets.get(&caller).or_else(others).map_or(self.burst, |bucket| self.filled(bucket, now));
        if tokens >= 1.0 { Ok(()) } else { Err(self.refusal(tokens)) }
    }

    fn count(&self, caller: Caller, now: Instant) -> Result<(), TooManyRequests> {
        let mut buckets = self.buckets.lock().unwrap_or_else(PoisonError::into_inner);
        let mut caller = caller;
        if buckets.len() >= MAX_CALLERS && !buckets.contains_key(&caller) {
            // A caller with a full bucket is like one without.
            buckets.retain(|_, bucket| self.filled(bucket, now) < self.burst);
            if buckets.len() >= MAX_CALLERS {
                caller = OTHERS;
            }
        }
        let bucket = buckets.entry(caller).or_insert(Bucket { tokens: self.burst, at: now });
        *bucket = Bucket { tokens: self.filled(bucket, now), at: now };
        if bucket.tokens >= 1.0 {
            bucket.tokens -= 1.0;
            return Ok(());
        }
        Err(self.refusal(bucket.tokens))
    }

    fn refusal(&self, tokens: f64) -> TooManyRequests {
        let wait = (1.0 - tokens) / self.per_second;
        TooManyRequests { retry_after: Duration::try_from_secs_f64(wait).unwrap_or(Duration::from_secs(60)) }
    }

    fn filled(&self, bucket: &Bucket, now: Instant) -> f64 {
        let since = now.saturating_duration_since(bucket.at).as_secs_f64();
        (bucket.tokens + since * self.per_second).min(self.burst)
    }
}

debug_fields!(RateLimit { per_second, burst });

impl From<usize> for Caller {
    /// The holder of the key with this number, which the service gives.
    fn from(key: usize) -> Self {
        Self(Who::Key(key))
    }
}

impl From<&Extensions> for Caller {
    /// The peer whose [`PeerAddress`] is in the extensions of a request.
    fn from(extensions: &Extensions) -> Self {
        extensions.get().map_or(OTHERS, |PeerAddress(address)| Self(Who::Peer(prefix(*address))))
    }
}

impl From<Address> for Caller {
    /// The account that signed a message.
    fn from(account: Address) -> Self {
        Self(Who::Account(account))
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
        Caller(Who::Peer(prefix(address.parse().unwrap())))
    }

    #[test]
    fn caller_above_its_limit_waits_and_others_do_not() {
        let limit = limit();
        let start = Instant::now();
        for _ in 0..3 {
            assert_eq!(limit.count(peer("192.0.2.1"), start), Ok(()));
        }
        let refused = TooManyRequests { retry_after: Duration::from_millis(500) };
        assert_eq!(limit.count(peer("192.0.2.1"), start), Err(refused));
        assert_eq!(refused.to_string(), "too many requests; retry in 1 s");
        assert_eq!(limit.count(peer("192.0.2.2"), start), Ok(()));
        assert_eq!(limit.count(peer("192.0.2.1"), start + Duration::from_millis(500)), Ok(()));
    }

    #[test]
    fn callers_that_used_up_their_limit_are_remembered_among_many() {
        let limit = limit();
        let (start, later) = (Instant::now(), Instant::now() + Duration::from_secs(1));
        let eager = peer("192.0.2.1");
        for _ in 0..3 {
            assert_eq!(limit.count(eager, start), Ok(()));
        }
        for key in 1..MAX_CALLERS {
            assert_eq!(limit.count(key.into(), start), Ok(()));
        }
        // The others could make three requests again by now, and are forgotten.
        assert_eq!(limit.count(peer("192.0.2.2"), later), Ok(()));
        assert_eq!(limit.buckets.lock().unwrap().len(), 2);
        let admitted = (0..3).filter(|_| limit.count(eager, later).is_ok()).count();
        assert_eq!(admitted, 2);
    }

    #[test]
    fn addresses_of_one_network_are_one_caller_and_callers_are_bounded() {
        assert_eq!(peer("2001:db8::1"), peer("2001:db8::2"));
        assert_ne!(peer("2001:db8::1"), peer("2001:db8:0:1::1"));
        assert_eq!(peer("192.0.2.1"), peer("::ffff:192.0.2.1"));
        let limit = limit();
        let start = Instant::now();
        for caller in 0..(MAX_CALLERS as u128 + 100) {
            let _ = limit.count(Caller(Who::Peer(caller << 64)), start);
        }
        assert!(limit.buckets.lock().unwrap().len() <= MAX_CALLERS + 1);
    }

    /// Numbers from a configuration file may be anything.
    #[test]
    fn limit_out_of_range_still_admits_one_request() {
        for (per_second, burst) in [(0.0, 0.0), (-1.0, -1.0), (f64::NAN, f64::NAN)] {
            let limit = RateLimit::new(per_second, burst);
            let start = Instant::now();
            assert_eq!(limit.count(OTHERS, start), Ok(()));
            let refused = TooManyRequests { retry_after: Duration::from_secs(60) };
            assert_eq!(limit.count(OTHERS, start + Duration::from_secs(3_600)), Err(refused));
        }
    }
}
