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
/// [owner](owner_of), which is a payer, a payment or a channel, has a share of the room: its request that has waited longest makes room for
/// its next.
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

    /// Reads a body that takes as much room as has `arrived`. Returns `None` if another request took the place.
    pub(crate) async fn read<T>(&self, owner: B256, arrived: Arrived, read: impl Future<Output = T>) -> Option<T> {
        unless_evicted(|| self.permits.acquire_for(owner, 1, self.of_one), Some(arrived), read).await
    }
}

/// Returns who owns the places of those who present a payment: the payment itself once it may be on the chain (`is_public`), since anybody can
/// present it then, and must not use up its payer's share. Before, only its payer has it, who can sign any number of them.
pub(crate) fn owner_of(payment: &PaymentKey, is_public: bool) -> B256 {
    match is_public {
        // Anybody can choose a nonce, and so the payer belongs to it.
        true => keccak256([payment.payer.into_word(), payment.nonce].concat()),
        false => payment.payer.into_word(),
    }
}

#[cfg(test)]
mod tests {
    use std::{future::pending, pin::pin};

    use alloy_primitives::Address;
    use futures_util::poll;

    use super::*;
    use crate::network::Network;

    fn payment(payer: u8, nonce: u8) -> PaymentKey {
        let (asset, nonce) = (Address::repeat_byte(0xa5), B256::repeat_byte(nonce));
        PaymentKey { network: Network::BASE, asset, payer: Address::repeat_byte(payer), nonce }
    }

    #[tokio::test]
    async fn copies_of_what_is_on_the_chain_use_up_no_share_of_its_payer() {
        let room = PayerRoom::new(LEAST_ROOM);
        let mut own = pin!(room.wait(owner_of(&payment(1, 1), false), 0, pending::<()>()));
        assert!(poll!(own.as_mut()).is_pending());
        let mut copies: Vec<_> = (0..LEAST_ROOM / 2)
            .map(|_| Box::pin(room.wait(owner_of(&payment(1, 2), true), 0, pending::<()>())))
            .collect();
        for copy in &mut copies {
            assert!(poll!(copy.as_mut()).is_pending());
        }
        let mut waiting = 0;
        for copy in &mut copies {
            waiting += usize::from(poll!(copy.as_mut()).is_pending());
        }
        assert_eq!(waiting, LEAST_ROOM / 8, "they have one share");
        assert!(poll!(own.as_mut()).is_pending(), "and the payer has its own");
    }
}
