//! Room for requests that wait for somebody who may never come.

use std::{future::Future, sync::Arc};

use alloy_primitives::{B256, keccak256};

use crate::{
    payment::PaymentKey,
    upload::{Arrived, EvictingSemaphore, permits_for, unless_evicted},
};

/// The fewest requests that there is room for.
const LEAST_ROOM: usize = 64;
/// How many permits there are for bodies of payments that are known: 4 MiB.
const KNOWN: u32 = 64;

/// Room for requests that wait: for their body, for another request, or for their payer's other payments to be settled. What they hold meanwhile
/// takes a permit for every 64 KiB, and one at least.
///
/// Whoever has the price of one request can send any number of them, and anybody can send copies of a payment that is on the chain. So each
/// owner, which is a payer, a payment or a channel, has a share of the room: its request that has waited longest makes room for its next.
#[derive(Debug)]
pub(crate) struct PayerRoom {
    permits: Arc<EvictingSemaphore>,
    of_one: u32,
}

impl PayerRoom {
    /// Returns room for this many requests, or a few more if they are few, an eighth of it for each owner: a payer that uploads slowly must not
    /// lose its place to its own next request.
    pub(crate) fn new(requests: usize) -> Self {
        let requests = u32::try_from(requests.max(LEAST_ROOM)).unwrap_or(u32::MAX);
        Self { permits: EvictingSemaphore::new(requests), of_one: requests / 8 }
    }

    /// Returns the same for requests that hold their bodies: of the longest, each owner has one at least.
    pub(crate) fn with_bodies(requests: usize, longest: usize) -> Self {
        Self::new(requests.max(8 * permits_for(longest as u64) as usize))
    }

    /// Returns room for bodies of payments that are known, as they arrive: for two of the longest, or more.
    pub(crate) fn of_known(longest: usize) -> Self {
        let longest = permits_for(longest as u64);
        Self { permits: EvictingSemaphore::new(longest.saturating_mul(2).max(KNOWN)), of_one: longest.max(KNOWN / 4) }
    }

    /// Waits with a body of this many bytes. Returns `None` if another request took the place.
    pub(crate) async fn wait<T>(&self, owner: B256, bytes: u64, wait: impl Future<Output = T>) -> Option<T> {
        unless_evicted(|| self.permits.acquire_for(owner, permits_for(bytes), self.of_one), None, wait).await
    }

    /// Reads a body, as much of which has `arrived`. Returns `None` if another request took the place.
    pub(crate) async fn read<T>(&self, owner: B256, arrived: Arrived, read: impl Future<Output = T>) -> Option<T> {
        unless_evicted(|| self.permits.acquire_for(owner, 1, self.of_one), Some(arrived), read).await
    }
}

/// Returns what names a payment as the owner of a place. Anybody can choose a nonce, and so the payer belongs to it.
pub(crate) fn owner_of(payment: &PaymentKey) -> B256 {
    keccak256([payment.payer.into_word(), payment.nonce].concat())
}
