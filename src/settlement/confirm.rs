//! Waiting for a receipt.

use std::time::Duration;

use alloy_primitives::{B256, Bytes};
use tokio::{
    task::JoinSet,
    time::{Instant, sleep},
};

use super::{
    broadcast::{Broadcaster, Sent},
    pace::Pace,
    rpc::{Receipt, Rpc, RpcFailure},
};

/// How often a node must say that the nonce is used, without a receipt of ours, before we believe that it is another's.
const CONVINCING: u32 = 4;
/// The longest pause between two looks.
const MAX_PAUSE: Duration = Duration::from_secs(5);
/// The longest pause between two broadcasts.
const MAX_REBROADCAST: Duration = Duration::from_secs(15);

/// A transaction that may be in the pool, with the others of its nonce.
#[derive(Debug)]
pub(crate) struct Flight {
    /// The newest transaction of the nonce.
    pub(crate) raw: Bytes,
    /// All of them, oldest first.
    pub(crate) hashes: Vec<B256>,
    /// When the newest is sent again.
    rebroadcast_at: Instant,
    rebroadcast_pause: Duration,
    nonce_used: u32,
}

/// What came of waiting.
#[derive(Debug)]
pub(crate) enum Seen {
    /// One of the transactions is in a block.
    Included(Receipt),
    /// Another transaction used the nonce; none of ours can be included any more.
    Displaced,
    /// Nothing yet.
    NotYet,
}

impl Flight {
    /// A transaction just handed over; `certainly` if a node confirmed that it has it.
    pub(crate) fn new(raw: Bytes, hash: B256, certainly: bool, pace: &Pace) -> Self {
        let pause =
            if certainly { (8 * pace.block_time()).max(Duration::from_secs(2)) } else { 2 * pace.poll_interval() };
        Self {
            raw,
            hashes: vec![hash],
            rebroadcast_at: Instant::now() + pause,
            rebroadcast_pause: pause,
            nonce_used: 0,
        }
    }

    /// A transaction with the same nonce and a better offer took the place of the newest.
    pub(crate) fn replaced_by(&mut self, raw: Bytes, hash: B256) {
        self.raw = raw;
        self.hashes.push(hash);
    }

    /// The newest hash.
    pub(crate) fn hash(&self) -> B256 {
        self.hashes.last().copied().unwrap_or_default()
    }

    /// Looks for a receipt until `deadline`, sending the identical transaction again now and then: a node that
    /// has it does not mind, and one that lost it gets it back.
    pub(crate) async fn watch(&mut self, rpc: &Rpc, node: &Broadcaster, pace: &Pace, deadline: Instant) -> Seen {
        let mut pause = pace.poll_interval();
        let patient_from = Instant::now() + (4 * pace.block_time()).max(Duration::from_secs(4));
        loop {
            // A failed look is as good as none: the next one tells.
            if let Ok(Some(receipt)) = self.receipt(rpc).await {
                return Seen::Included(receipt);
            }
            if self.nonce_used >= CONVINCING {
                return Seen::Displaced;
            }
            let now = Instant::now();
            if now >= deadline {
                return Seen::NotYet;
            }
            if self.nonce_used > 0 || now >= self.rebroadcast_at {
                match node.resend(rpc, &self.raw).await {
                    Sent::NonceUsed => self.nonce_used += 1,
                    _ => self.nonce_used = 0,
                }
                self.rebroadcast_pause = (2 * self.rebroadcast_pause).min(MAX_REBROADCAST);
                self.rebroadcast_at = Instant::now() + self.rebroadcast_pause;
            }
            sleep(pause.min(deadline.saturating_duration_since(Instant::now()))).await;
            // Quick while a block is due, patient with a chain or a node that has gone silent.
            if now >= patient_from {
                pause = (pause + pause / 8).min(MAX_PAUSE);
            }
        }
    }

    /// The receipt of whichever has one, all asked for at once; `None` only if the node says of all that they have none.
    async fn receipt(&self, rpc: &Rpc) -> Result<Option<Receipt>, RpcFailure> {
        if let [hash] = self.hashes[..] {
            return rpc.receipt(hash).await;
        }
        let mut looks = JoinSet::new();
        for hash in self.hashes.iter().copied() {
            let rpc = rpc.clone();
            looks.spawn(async move { rpc.receipt(hash).await });
        }
        let mut answer = Ok(None);
        while let Some(look) = looks.join_next().await {
            match look.unwrap_or(Err(RpcFailure::Silent)) {
                Ok(None) => {}
                Ok(found) => return Ok(found),
                Err(failure) => answer = Err(failure),
            }
        }
        answer
    }
}
