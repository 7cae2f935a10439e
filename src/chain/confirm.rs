//! Waiting for a receipt.

use std::{ops::RangeInclusive, time::Duration};

use alloy_primitives::{B256, Bytes};
use tokio::{
    task::JoinSet,
    time::{Instant, sleep},
};

use super::{
    block_time::BlockTime,
    broadcast::{Broadcaster, Sent},
    rpc::{Receipt, Rpc, RpcFailure},
};

/// How often a node must say that the nonce is used, and that there is no receipt of ours, before we believe that it is another's.
const CONVINCING: u32 = 4;
/// How long it must have been saying so, in blocks, within these bounds: of several nodes behind one address, one that is asked for
/// receipts may be behind one that takes transactions.
const CONVINCING_BLOCKS: u32 = 2;
const CONVINCING_TIME: RangeInclusive<Duration> = Duration::from_secs(2)..=Duration::from_secs(10);
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
    /// Since when the node says that the nonce is used, and how often while there was no receipt.
    nonce_used: Option<(Instant, u32)>,
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
    pub(crate) fn new(raw: Bytes, hash: B256, certainly: bool, pace: &BlockTime) -> Self {
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
    pub(crate) async fn watch(&mut self, rpc: &Rpc, node: &Broadcaster, pace: &BlockTime, deadline: Instant) -> Seen {
        let mut pause = pace.poll_interval();
        let patient_from = Instant::now() + (4 * pace.block_time()).max(Duration::from_secs(4));
        loop {
            // A failed look is as good as none: the next one tells.
            let is_missing = match self.receipt(rpc).await {
                Ok(Some(receipt)) => return Seen::Included(receipt),
                Ok(None) => true,
                Err(_) => false,
            };
            if is_missing && self.is_displaced(pace) {
                return Seen::Displaced;
            }
            let now = Instant::now();
            if now >= deadline {
                return Seen::NotYet;
            }
            if self.nonce_used.is_some_and(|(_, times)| times < CONVINCING) || now >= self.rebroadcast_at {
                self.nonce_used = match node.resend(rpc, &self.raw).await {
                    Sent::NonceUsed => {
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

    fn is_displaced(&self, pace: &BlockTime) -> bool {
        let time = (CONVINCING_BLOCKS * pace.block_time()).clamp(*CONVINCING_TIME.start(), *CONVINCING_TIME.end());
        self.nonce_used.is_some_and(|(since, times)| times >= CONVINCING && since.elapsed() >= time)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn on_a_slow_chain_a_transaction_is_sent_again_as_often_as_elsewhere() {
        let pace = BlockTime::new(Some(Duration::from_secs(3_600)));
        let flight = Flight::new(Bytes::new(), B256::ZERO, true, &pace);
        assert_eq!(flight.rebroadcast_pause, MAX_REBROADCAST);
    }

    /// From looking twenty times a second to looking every five, from sending it after two seconds to sending it every fifteen.
    #[cfg(feature = "devnet")]
    #[tokio::test(start_paused = true)]
    async fn a_silent_chain_is_asked_ever_more_rarely_and_never_forgotten() {
        use std::sync::{Arc, Mutex};

        use crate::devnet::{Devnet, Fault};

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
        let mut flight = Flight::new(Bytes::new(), B256::ZERO, true, &pace);
        let seen = flight.watch(&rpc, &Broadcaster::new(), &pace, begun + Duration::from_secs(300)).await;
        assert!(matches!(seen, Seen::NotYet), "{seen:?}");
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
