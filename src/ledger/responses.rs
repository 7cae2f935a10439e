//! Responses kept for replays, within limits.

use std::{
    collections::{HashMap, VecDeque, hash_map::Entry},
    fmt,
    sync::Arc,
    time::Duration,
};

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};

use crate::{payment::PaymentKey, telemetry};

/// A handler's response, complete. It is bearer data, so `Debug` shows only its size.
#[derive(Clone)]
pub struct StoredResponse {
    /// The handler's status.
    pub status: StatusCode,
    /// The handler's headers.
    pub headers: HeaderMap,
    /// The whole body.
    pub body: Bytes,
    /// The trailers, if there were any.
    pub trailers: Option<HeaderMap>,
    /// The request's headers that the response depends on, such as `Accept-Encoding`, with the values they had, joined by commas.
    pub varied_by: Vec<(HeaderName, Option<HeaderValue>)>,
    /// When it was produced, in Unix seconds.
    pub stored_at: u64,
}

impl fmt::Debug for StoredResponse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "StoredResponse({}, {} bytes)", self.status, self.body.len())
    }
}

/// Limits on the responses that a ledger keeps for replays.
#[derive(Clone, Copy, Debug)]
#[must_use]
pub struct ResponseLimits {
    pub(super) body_bytes: usize,
    pub(super) total_bytes: usize,
    pub(super) count: usize,
    pub(super) age_seconds: u64,
}

impl ResponseLimits {
    /// Sets the largest body, in bytes. Default: 64 KiB.
    pub const fn body_bytes(mut self, bytes: usize) -> Self {
        self.body_bytes = bytes;
        self
    }

    /// Sets the size of all bodies and headers together, in bytes. Default: 64 MiB.
    pub const fn total_bytes(mut self, bytes: usize) -> Self {
        self.total_bytes = bytes;
        self
    }

    /// Sets the number of responses. Default: 10,000.
    pub const fn count(mut self, responses: usize) -> Self {
        self.count = responses;
        self
    }

    /// Sets the age at which a response is removed, in whole seconds. Default: 10 minutes.
    pub const fn max_age(mut self, age: Duration) -> Self {
        self.age_seconds = age.as_secs();
        self
    }

    /// Returns the weight of a response that is within the limits by itself.
    pub(super) fn admit(&self, response: &StoredResponse) -> Option<usize> {
        let weight = weight(response);
        (response.body.len() <= self.body_bytes && weight <= self.total_bytes).then_some(weight)
    }
}

impl Default for ResponseLimits {
    fn default() -> Self {
        Self { body_bytes: 64 << 10, total_bytes: 64 << 20, count: 10_000, age_seconds: 600 }
    }
}

/// The responses of a ledger in memory. The oldest are removed first.
///
/// This is no cache of a library: the ledger in SQLite has to know which responses were removed, and when.
#[derive(Debug)]
pub(super) struct ResponseStore {
    limits: ResponseLimits,
    kept: HashMap<PaymentKey, Arc<StoredResponse>>,
    /// The keys, oldest first, with the time at which each response was produced.
    order: VecDeque<(u64, PaymentKey)>,
    bytes: usize,
}

impl ResponseStore {
    pub(super) fn new(limits: ResponseLimits) -> Self {
        Self { limits, kept: HashMap::new(), order: VecDeque::new(), bytes: 0 }
    }

    /// Keeps a response if it is within the limits and the first of its payment. Returns the keys of those removed.
    pub(super) fn insert(&mut self, key: PaymentKey, response: Arc<StoredResponse>) -> Vec<PaymentKey> {
        let mut removed = self.expire(response.stored_at);
        let Some(weight) = self.limits.admit(&response) else { return removed };
        let Entry::Vacant(entry) = self.kept.entry(key) else { return removed };
        self.order.push_back((response.stored_at, key));
        entry.insert(response);
        self.bytes += weight;
        telemetry::responses(weight);
        while self.bytes > self.limits.total_bytes || self.kept.len() > self.limits.count {
            removed.extend(self.remove_oldest());
        }
        removed
    }

    pub(super) fn get(&self, key: &PaymentKey, now: u64) -> Option<Arc<StoredResponse>> {
        let response = self.kept.get(key)?;
        (response.stored_at.saturating_add(self.limits.age_seconds) >= now).then(|| response.clone())
    }

    fn expire(&mut self, now: u64) -> Vec<PaymentKey> {
        let age = self.limits.age_seconds;
        let mut removed = Vec::new();
        while self.order.front().is_some_and(|(stored_at, _)| stored_at.saturating_add(age) < now) {
            removed.extend(self.remove_oldest());
        }
        removed
    }

    fn remove_oldest(&mut self) -> Option<PaymentKey> {
        let (_, key) = self.order.pop_front()?;
        if let Some(response) = self.kept.remove(&key) {
            let weight = weight(&response);
            self.bytes -= weight;
            telemetry::responses_gone(weight);
        }
        Some(key)
    }
}

/// Returns what a response costs to keep, in bytes. The constant stands for the tables around it.
fn weight(response: &StoredResponse) -> usize {
    let fields =
        |headers: &HeaderMap| headers.iter().map(|(name, value)| name.as_str().len() + value.len() + 64).sum::<usize>();
    let varied_by = response.varied_by.iter();
    let varied_by =
        varied_by.map(|(name, value)| name.as_str().len() + value.as_ref().map_or(0, HeaderValue::len) + 64);
    512 + response.body.len()
        + fields(&response.headers)
        + response.trailers.as_ref().map_or(0, fields)
        + varied_by.sum::<usize>()
}

#[cfg(test)]
mod tests {
    use alloy_primitives::{Address, B256};

    use super::*;
    use crate::network::Network;

    fn key(n: u8) -> PaymentKey {
        PaymentKey { network: Network::BASE, asset: Address::ZERO, payer: Address::ZERO, nonce: B256::repeat_byte(n) }
    }

    fn response(size: usize, stored_at: u64) -> Arc<StoredResponse> {
        Arc::new(StoredResponse {
            status: StatusCode::OK,
            headers: HeaderMap::new(),
            body: vec![0; size].into(),
            trailers: None,
            varied_by: Vec::new(),
            stored_at,
        })
    }

    #[test]
    fn every_limit_holds_and_the_oldest_response_is_removed_first() {
        let limits = ResponseLimits { body_bytes: 100, total_bytes: 3 * 612, count: 10, age_seconds: 60 };
        let mut store = ResponseStore::new(limits);
        store.insert(key(0), response(101, 0));
        assert!(store.get(&key(0), 0).is_none(), "too large alone");
        for n in 1..=4 {
            store.insert(key(n), response(100, u64::from(n)));
        }
        assert!(store.get(&key(1), 4).is_none(), "pushed out by the total");
        assert!(store.get(&key(2), 62).is_some());
        assert!(store.get(&key(2), 63).is_none(), "aged out");
        assert!(store.get(&key(4), 63).is_some());
        let mut few = ResponseStore::new(ResponseLimits { count: 2, ..limits });
        for n in 1..=3 {
            few.insert(key(n), response(1, 0));
        }
        assert_eq!(few.kept.len(), 2);
        assert_eq!(few.order.len(), 2);
    }

    #[test]
    fn a_response_over_the_limit_removes_no_other() {
        let limits = ResponseLimits { body_bytes: 10_000, total_bytes: 2_000, count: 10, age_seconds: 60 };
        let mut store = ResponseStore::new(limits);
        store.insert(key(1), response(100, 0));
        assert!(store.insert(key(2), response(1_900, 0)).is_empty());
        assert!(store.get(&key(1), 0).is_some() && store.get(&key(2), 0).is_none());
        // Headers and trailers weigh as well.
        let name = http::HeaderName::from_static("x-note");
        let fields = HeaderMap::from_iter([(name, "n".repeat(800).parse().unwrap())]);
        let heavy = StoredResponse { headers: fields.clone(), trailers: Some(fields), ..(*response(1, 0)).clone() };
        assert!(store.insert(key(3), Arc::new(heavy)).is_empty());
        assert!(store.get(&key(1), 0).is_some() && store.get(&key(3), 0).is_none());
    }

    #[test]
    fn an_expired_response_is_removed_when_another_is_stored() {
        let mut store = ResponseStore::new(ResponseLimits { age_seconds: 60, ..ResponseLimits::default() });
        store.insert(key(1), response(1, 0));
        assert!(store.insert(key(2), response(1, 60)).is_empty(), "it can still be replayed");
        assert_eq!(store.insert(key(3), response(1, 61)), [key(1)]);
        assert_eq!((store.kept.len(), store.order.len(), store.bytes), (2, 2, 2 * 513));
    }

    #[test]
    fn the_first_response_stays() {
        let mut store = ResponseStore::new(ResponseLimits::default());
        store.insert(key(1), response(1, 0));
        store.insert(key(1), response(2, 0));
        assert_eq!(store.get(&key(1), 0).unwrap().body.len(), 1);
    }
}
