//! Room for requests that wait for somebody who may never come.

use std::{future::Future, sync::Arc};

use alloy_primitives::B256;

use super::{Refusal, Why};
use crate::upload::{EvictingSemaphore, permits_for, unless_evicted};

/// How many permits there are for bodies of payments that are known: 4 MiB.
const KNOWN: u32 = 64;

/// The fewest requests that there is room for.
const LEAST_ROOM: usize = 64;

/// Places of requests that wait for their payer: for the body, or until other payments of it are settled.
///
/// A payer that has the price of one request can send any number of them, so it has a few places: its request that has waited longest makes
/// room for the next.
#[derive(Debug)]
pub(crate) struct PayerRoom {
    places: Arc<EvictingSemaphore>,
    of_one: usize,
}

impl PayerRoom {
    /// Returns room for this many requests, or a few more if they are few, an eighth of it for each payer: a payer that uploads slowly must not
    /// lose its place to its own next request.
    pub(crate) fn new(requests: usize) -> Self {
        let requests = requests.max(LEAST_ROOM);
        Self { places: EvictingSemaphore::new(u32::try_from(requests).unwrap_or(u32::MAX)), of_one: requests / 8 }
    }

    /// Waits for something that is up to the payer, or to whoever else is named by `owner`.
    pub(crate) async fn wait<T>(&self, owner: B256, wait: impl Future<Output = T>) -> Result<T, Refusal> {
        let place = || self.places.acquire_for(owner, self.of_one);
        unless_evicted(place, wait).await.ok_or_else(|| Why::Busy.into())
    }
}

/// Room for the bodies of requests whose payments are known. Anybody can present a payment that is on the chain.
#[derive(Debug)]
pub(crate) struct KnownRoom(Arc<EvictingSemaphore>);

impl KnownRoom {
    /// Returns room for two bodies of this many bytes, or more.
    pub(crate) fn new(longest: usize) -> Self {
        Self(EvictingSemaphore::new(permits_for(Some(longest as u64)).saturating_mul(2).max(KNOWN)))
    }

    /// Reads a body of at most this many bytes.
    pub(crate) async fn read<T>(&self, longest: u64, read: impl Future<Output = T>) -> Result<T, Refusal> {
        unless_evicted(|| self.0.acquire(permits_for(Some(longest))), read).await.ok_or_else(|| Why::Busy.into())
    }
}
