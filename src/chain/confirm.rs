//! Following a transaction until it is in a block.

use std::{ops::RangeInclusive, time::Duration};

use alloy_primitives::{B256, Bytes};
use tokio::{
    task::JoinSet,
    time::{Instant, sleep},
};

use super::{
    block_time::BlockTime,
    broadcast::{Broadcaster, SendResult},
    rpc::{Receipt, Rpc, RpcFailure},
};

/// How often a node must report the nonce as used, without a receipt of ours, before the nonce counts as another transaction's.
const CONVINCING: u32 = 4;
/// How long it must have reported that, in blocks, within the bounds below. Behind one address there may be several nodes, and the one
/// that is asked for receipts may lag behind the one that takes transactions.
const CONVINCING_BLOCKS: u32 = 2;
const CONVINCING_TIME: RangeInclusive<Duration> = Duration::from_secs(2)..=Duration::from_secs(10);
/// The longest pause between two requests for a receipt.
const MAX_PAUSE: Duration = Duration::from_secs(5);
/// The longest pause between two broadcasts.
const MAX_REBROADCAST: Duration = Duration::from_secs(15);

/// A transaction that was sent, with those that it replaced at the same nonce.
#[derive(Debug)]
pub(crate) struct PendingTransaction {
    /// The newest transaction with the nonce.
    raw: Bytes,
    /// All transactions with the nonce, the oldest first.
    hashes: Vec<B256>,
    /// When the newest is sent again.
    rebroadcast_at: Instant,
    rebroadcast_pause: Duration,
    /// Since when the node has reported the nonce as used, and how often while there was no receipt.
    nonce_used: Option<(Instant, u32)>,
    /// How often the node has refused receipts, and until when it is not asked again.
    refusals: u32,
    pause_until: Option<Instant>,
}

/// Whether a transaction is in a block.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "one at a time, on its way to whoever waits")]
pub(crate) enum Inclusion {
    /// One of the transactions is in a block.
    Included(Receipt),
    /// Another transaction used the nonce. None of ours can be included any more.
    NonceTaken,
    /// It is in no block yet.
    Pending,
}

impl PendingTransaction {
    /// Begins to follow a transaction that was just sent; `certainly` if a node confirmed that it has it.
    pub(super) fn new(raw: Bytes, hash: B256, certainly: bool, pace: &BlockTime) -> Self {
        let pause = match certainly {
            true => (8 * pace.block_time()).clamp(Duration::from_secs(2), MAX_REBROADCAST),
            false => 2 * pace.poll_interval(),
        };
        Self {
            raw,
            hashes: vec![hash],
            rebroadcast_at: Instant::now() + pause,
            rebroadcast_pause: pause,
            nonce_used: None,
            refusals: 0,
            pause_until: None,
        }
    }

    /// Adds a transaction with the same nonce and higher fees.
    pub(crate) fn replaced_by(&mut self, raw: Bytes, hash: B256) {
        self.raw = raw;
        self.hashes.push(hash);
    }

    /// Returns the hash of the newest transaction.
    pub(crate) fn hash(&self) -> B256 {
        self.hashes.last().copied().unwrap_or_default()
    }

    /// Polls for a receipt until `deadline`. Sends the identical transaction again now and then, in case the node lost it.
    pub(super) async fn watch(
        &mut self,
        rpc: &Rpc,
        node: &Broadcaster,
        pace: &BlockTime,
        deadline: Instant,
    ) -> Inclusion {
        let mut pause = pace.poll_interval();
        let patient_from = Instant::now() + (4 * pace.block_time()).max(Duration::from_secs(4));
        loop {
            if let Some(until) = self.pause_until.take_if(|until| *until > Instant::now()) {
                sleep(until.min(deadline).saturating_duration_since(Instant::now())).await;
                if until >= deadline {
                    self.pause_until = Some(until);
                    return Inclusion::Pending;
                }
            }
            // A failed request proves nothing; the next one may succeed.
            let is_missing = match self.receipt(rpc).await {
                Ok(Some(receipt)) => return Inclusion::Included(receipt),
                Ok(None) => {
                    self.refusals = 0;
                    true
                }
                Err(RpcFailure::Refused { .. }) => {
                    self.refusals = self.refusals.saturating_add(1);
                    let pause = pace.poll_interval().saturating_mul(1 << self.refusals.min(8)).min(MAX_PAUSE);
                    self.pause_until = Some(Instant::now() + pause);
                    false
                }
                Err(RpcFailure::Silent) => false,
            };
            if is_missing && self.is_nonce_taken(pace) {
                return Inclusion::NonceTaken;
            }
            let now = Instant::now();
            if now >= deadline {
                return Inclusion::Pending;
            }
            let is_in_doubt = is_missing && self.nonce_used.is_some_and(|(_, times)| times < CONVINCING);
            if is_in_doubt || now >= self.rebroadcast_at {
                self.nonce_used = match node.resend(rpc, &self.raw).await {
                    SendResult::NonceUsed => {
                        let (since, times) = self.nonce_used.unwrap_or((now, 0));
                        Some((since, times + u32::from(is_missing)))
                    }
                    _ => None,
                };
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

    /// Returns the receipt of whichever transaction has one, or `None` only if the node says so of all of them.
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

    fn is_nonce_taken(&self, pace: &BlockTime) -> bool {
        let time = (CONVINCING_BLOCKS * pace.block_time()).clamp(*CONVINCING_TIME.start(), *CONVINCING_TIME.end());
        self.nonce_used.is_some_and(|(since, times)| times >= CONVINCING && since.elapsed() >= time)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn slow_chain_does_not_slow_down_rebroadcasts() {
        let pace = BlockTime::new(Some(Duration::from_secs(3_600)));
        let pending = PendingTransaction::new(Bytes::new(), B256::ZERO, true, &pace);
        assert_eq!(pending.rebroadcast_pause, MAX_REBROADCAST);
    }

    /// Requests for the receipt slow down from twenty a second to one in five seconds, broadcasts from two seconds to fifteen.
    #[tokio::test(start_paused = true)]
    async fn silent_chain_is_polled_less_and_less_often() {
        use std::sync::{Arc, Mutex};

        use x402_devnet::{Devnet, Fault};

        let devnet = Devnet::start().await.unwrap();
        let begun = Instant::now();
        let (looks, sends) = (Arc::new(Mutex::new(vec![begun])), Arc::new(Mutex::new(vec![begun])));
        let (looked, sent) = (looks.clone(), sends.clone());
        devnet.faults().set(move |call| match call.method {
            "eth_sendRawTransaction" => {
                sent.lock().unwrap().push(Instant::now());
                Fault::Error { code: -32000, message: "already known".into() }
            }
            _ => {
                looked.lock().unwrap().push(Instant::now());
                Fault::None
            }
        });
        let (rpc, pace) = (Rpc::new(devnet.rpc_client(), MAX_PAUSE), BlockTime::new(Some(Duration::from_millis(200))));
        let mut pending = PendingTransaction::new(Bytes::new(), B256::ZERO, true, &pace);
        let seen = pending.watch(&rpc, &Broadcaster::new(), &pace, begun + Duration::from_secs(300)).await;
        assert!(matches!(seen, Inclusion::Pending), "{seen:?}");
        let pauses = |times: &Mutex<Vec<Instant>>| -> Vec<Duration> {
            times.lock().unwrap().windows(2).map(|pair| pair[1].duration_since(pair[0])).collect()
        };
        let looks = pauses(&looks);
        assert!(looks[1..70].iter().all(|pause| pause.as_millis() <= 60), "{looks:?}");
        // The last one is cut off by the deadline.
        assert_eq!(looks.iter().max().unwrap().as_millis() / 10, MAX_PAUSE.as_millis() / 10);
        assert!(looks[looks.len() - 5..looks.len() - 1].iter().all(|pause| *pause >= MAX_PAUSE), "{looks:?}");
        let sends = pauses(&sends);
        assert_eq!(sends[0].as_secs(), 2);
        let (last, most) = (*sends.last().unwrap(), *sends.iter().max().unwrap());
        assert!(last >= MAX_REBROADCAST && most <= MAX_REBROADCAST + MAX_PAUSE, "{sends:?}");
    }
}
