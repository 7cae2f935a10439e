//! Responses kept for replays, within limits.

use std::{
    collections::{HashMap, VecDeque, hash_map::Entry},
    fmt,
    time::Duration,
};

use bytes::Bytes;

use crate::{payment::PaymentKey, telemetry};

/// What the tables around a response are taken to cost, in bytes.
const TABLES: usize = 512;

/// A response that is kept for replays: bytes that the transport writes and reads, and that no ledger looks into.
///
/// It is bearer data, so `Debug` shows only its size.
#[derive(Clone, PartialEq, Eq)]
pub struct StoredResponse {
    /// What the transport has to know to give the body once more, such as status and headers, as it writes that.
    pub head: Bytes,
    /// The whole body.
    pub body: Bytes,
    /// When it was produced, in Unix seconds.
    pub stored_at: u64,
}

impl StoredResponse {
    /// Returns what the response costs to keep, in bytes. 512 of them stand for the tables around it.
    pub fn weight(&self) -> usize {
        TABLES + self.head.len() + self.body.len()
    }
}

impl fmt::Debug for StoredResponse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "StoredResponse({} + {} bytes)", self.head.len(), self.body.len())
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

    /// Sets the size of all responses together ([`StoredResponse::weight`]), in bytes. Default: 64 MiB.
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

    /// Returns the size of the largest body that is kept, in bytes, if its head is empty.
    pub const fn longest(&self) -> usize {
        let room = self.total_bytes.saturating_sub(TABLES);
        if self.body_bytes < room { self.body_bytes } else { room }
    }

    /// Returns `true` if the response is within the limits by itself.
    pub fn admit(&self, response: &StoredResponse) -> bool {
        response.body.len() <= self.body_bytes && response.weight() <= self.total_bytes
    }
}

impl Default for ResponseLimits {
    fn default() -> Self {
        Self { body_bytes: 64 << 10, total_bytes: 64 << 20, count: 10_000, age_seconds: 600 }
    }
}

/// The responses of a ledger in memory, within limits. The oldest are removed first.
///
/// This is no cache of a library: the ledger in SQLite has to know which responses were removed, and when.
#[derive(Debug)]
pub struct Responses {
    limits: ResponseLimits,
    kept: HashMap<PaymentKey, StoredResponse>,
    /// The keys, oldest first, with the time at which each response was produced.
    order: VecDeque<(u64, PaymentKey)>,
    bytes: usize,
}

impl Responses {
    /// Returns an empty store.
    pub fn new(limits: ResponseLimits) -> Self {
        Self { limits, kept: HashMap::new(), order: VecDeque::new(), bytes: 0 }
    }

    /// Returns the limits.
    pub const fn limits(&self) -> &ResponseLimits {
        &self.limits
    }

    /// Keeps a response if it is within the limits and the first of its payment. Returns the keys of those that were removed for it, or with
    /// age.
    pub fn insert(&mut self, key: PaymentKey, response: StoredResponse) -> Vec<PaymentKey> {
        let mut removed = self.expire(response.stored_at);
        let Entry::Vacant(entry) = self.kept.entry(key) else { return removed };
        if !self.limits.admit(&response) {
            return removed;
        }
        let weight = response.weight();
        self.order.push_back((response.stored_at, key));
        entry.insert(response);
        self.bytes += weight;
        telemetry::responses(weight);
        while self.bytes > self.limits.total_bytes || self.kept.len() > self.limits.count {
            removed.extend(self.remove_oldest());
        }
        removed
    }

    /// Returns the response of a payment at `now` (Unix seconds), if it is kept and not too old.
    pub fn get(&self, key: &PaymentKey, now: u64) -> Option<StoredResponse> {
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
            let weight = response.weight();
            self.bytes -= weight;
            telemetry::responses_gone(weight);
        }
        Some(key)
    }
}

#[cfg(test)]
mod tests {
    use alloy_primitives::{Address, B256};

    use super::*;
    use crate::network::Network;

    fn key(n: u8) -> PaymentKey {
        PaymentKey { network: Network::BASE, asset: Address::ZERO, payer: Address::ZERO, nonce: B256::repeat_byte(n) }
    }

    fn response(size: usize, stored_at: u64) -> StoredResponse {
        StoredResponse { head: Bytes::new(), body: vec![0; size].into(), stored_at }
    }

    #[test]
    fn every_limit_holds_and_the_oldest_response_is_removed_first() {
        let limits = ResponseLimits { body_bytes: 100, total_bytes: 3 * 612, count: 10, age_seconds: 60 };
        let mut store = Responses::new(limits);
        store.insert(key(0), response(101, 0));
        assert!(store.get(&key(0), 0).is_none(), "too large alone");
        for n in 1..=4 {
            store.insert(key(n), response(100, u64::from(n)));
        }
        assert!(store.get(&key(1), 4).is_none(), "pushed out by the total");
        assert!(store.get(&key(2), 62).is_some());
        assert!(store.get(&key(2), 63).is_none(), "aged out");
        assert!(store.get(&key(4), 63).is_some());
        let mut few = Responses::new(ResponseLimits { count: 2, ..limits });
        for n in 1..=3 {
            few.insert(key(n), response(1, 0));
        }
        assert_eq!(few.kept.len(), 2);
        assert_eq!(few.order.len(), 2);
    }

    #[test]
    fn a_response_over_the_limit_removes_no_other() {
        let limits = ResponseLimits { body_bytes: 10_000, total_bytes: 2_000, count: 10, age_seconds: 60 };
        let mut store = Responses::new(limits);
        store.insert(key(1), response(100, 0));
        assert!(store.insert(key(2), response(1_900, 0)).is_empty());
        assert!(store.get(&key(1), 0).is_some() && store.get(&key(2), 0).is_none());
        // The head weighs as well.
        let heavy = StoredResponse { head: vec![0; 1_600].into(), ..response(1, 0) };
        assert!(store.insert(key(3), heavy).is_empty());
        assert!(store.get(&key(1), 0).is_some() && store.get(&key(3), 0).is_none());
    }

    #[test]
    fn an_expired_response_is_removed_when_another_is_stored() {
        let mut store = Responses::new(ResponseLimits { age_seconds: 60, ..ResponseLimits::default() });
        store.insert(key(1), response(1, 0));
        assert!(store.insert(key(2), response(1, 60)).is_empty(), "it can still be replayed");
        assert_eq!(store.insert(key(3), response(1, 61)), [key(1)]);
        assert_eq!((store.kept.len(), store.order.len(), store.bytes), (2, 2, 2 * 513));
    }

    #[test]
    fn the_first_response_stays() {
        let mut store = Responses::new(ResponseLimits::default());
        store.insert(key(1), response(1, 0));
        store.insert(key(1), response(2, 0));
        assert_eq!(store.get(&key(1), 0).unwrap().body.len(), 1);
    }
}
