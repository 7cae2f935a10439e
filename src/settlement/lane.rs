//! The nonces of one key.
//!
//! Nodes keep about 16 waiting transactions per sender, and none of them runs before all lower nonces have. So a lane lets a
//! window of transactions be in flight, always hands out the lowest nonce that is free, and knows when one in the middle
//! was given back: nothing above such a gap can be included until somebody fills it.

use std::{
    collections::BTreeSet,
    fmt,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use alloy_primitives::Address;
use tokio::{
    sync::{Mutex as AsyncMutex, OwnedSemaphorePermit, Semaphore},
    time::timeout,
};

use super::rpc::{Rpc, RpcFailure};
use crate::facilitator::FacilitatorError;

/// Settlements that may wait for the window; beyond it callers are told to come back.
const MAX_WAITING: usize = 4096;

/// One key's window of nonces. A clone is the same lane.
#[derive(Clone)]
pub(crate) struct Lane(Arc<Inner>);

struct Inner {
    account: Address,
    rpc: Rpc,
    window: Arc<Semaphore>,
    waiting: AtomicUsize,
    nonces: Mutex<Nonces>,
    syncing: AsyncMutex<()>,
}

#[derive(Debug, Default)]
struct Nonces {
    /// The lowest nonce never handed out, or `None` if the chain must be asked.
    next: Option<u64>,
    /// Given back, below `next`.
    free: BTreeSet<u64>,
    /// Handed out.
    taken: BTreeSet<u64>,
    /// All nonces below are in blocks.
    consumed: u64,
}

/// A nonce in use. What becomes of it must be said: [`consumed`](Self::consumed), [`release`](Self::release) or
/// [`displaced`](Self::displaced). A slot that is dropped is given back if nothing was sent with it.
#[derive(Debug)]
pub(crate) struct Slot {
    lane: Lane,
    nonce: u64,
    sent: bool,
    settled: bool,
    _permit: OwnedSemaphorePermit,
}

impl Lane {
    pub(crate) fn new(account: Address, rpc: Rpc, window: usize) -> Self {
        Self(Arc::new(Inner {
            account,
            rpc,
            window: Arc::new(Semaphore::new(window.max(1))),
            waiting: AtomicUsize::new(0),
            nonces: Mutex::default(),
            syncing: AsyncMutex::default(),
        }))
    }

    /// The lowest free nonce, as soon as the window has room.
    pub(crate) async fn take(&self, patience: Duration) -> Result<Slot, FacilitatorError> {
        let permit = self.permit(patience).await?;
        loop {
            if let Some(nonce) = self.nonces().take() {
                return Ok(self.slot(nonce, permit));
            }
            self.sync().await?;
        }
    }

    /// A free nonce that keeps others from being included, if there is one.
    pub(crate) async fn take_gap(&self, patience: Duration) -> Option<Slot> {
        let permit = self.permit(patience).await.ok()?;
        let nonce = {
            let mut nonces = self.nonces();
            if !nonces.has_gap() {
                return None;
            }
            let nonce = nonces.free.pop_first()?;
            nonces.taken.insert(nonce);
            nonce
        };
        Some(self.slot(nonce, permit))
    }

    /// Whether a free nonce keeps others from being included.
    pub(crate) fn has_gap(&self) -> bool {
        self.nonces().has_gap()
    }

    /// How many nonces are in use.
    pub(crate) fn in_flight(&self) -> usize {
        self.nonces().taken.len()
    }

    fn slot(&self, nonce: u64, permit: OwnedSemaphorePermit) -> Slot {
        Slot { lane: self.clone(), nonce, sent: false, settled: false, _permit: permit }
    }

    async fn permit(&self, patience: Duration) -> Result<OwnedSemaphorePermit, FacilitatorError> {
        let busy =
            FacilitatorError::Busy { what: "transactions of the settlement key", retry_after: Duration::from_secs(2) };
        let _waiting = Waiting::enter(&self.0.waiting).ok_or_else(|| busy.clone())?;
        match timeout(patience, self.0.window.clone().acquire_owned()).await {
            Ok(Ok(permit)) => Ok(permit),
            _ => Err(busy),
        }
    }

    /// Asks the chain where to go on; of many callers one asks.
    async fn sync(&self) -> Result<(), RpcFailure> {
        let _syncing = self.0.syncing.lock().await;
        if self.nonces().next.is_some() {
            return Ok(());
        }
        let pending = self.0.rpc.nonce(self.0.account, "pending").await?;
        self.nonces().resume(pending);
        Ok(())
    }

    fn nonces(&self) -> MutexGuard<'_, Nonces> {
        self.0.nonces.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Lane {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lane").field("account", &self.0.account).field("nonces", &*self.nonces()).finish()
    }
}

/// One more who waits, for as long as it lives.
struct Waiting<'a>(&'a AtomicUsize);

impl<'a> Waiting<'a> {
    fn enter(waiting: &'a AtomicUsize) -> Option<Self> {
        let entered = Self(waiting);
        (waiting.fetch_add(1, Ordering::Relaxed) < MAX_WAITING).then_some(entered)
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Nonces {
    fn take(&mut self) -> Option<u64> {
        let next = self.next?;
        let nonce = self.free.pop_first().unwrap_or(next);
        if nonce == next {
            self.next = next.checked_add(1);
        }
        self.taken.insert(nonce);
        Some(nonce)
    }

    fn has_gap(&self) -> bool {
        match (self.free.first(), self.taken.last()) {
            (Some(free), Some(taken)) => free < taken,
            _ => false,
        }
    }

    /// Goes on from what the chain says, without forgetting what is in flight.
    fn resume(&mut self, pending: u64) {
        // A node that lags behind the others may say less than we know.
        let pending = pending.max(self.consumed);
        let next = self.taken.last().map_or(pending, |last| pending.max(last.saturating_add(1)));
        self.free = (pending..next).filter(|nonce| !self.taken.contains(nonce)).collect();
        self.next = Some(next);
    }

    fn consume(&mut self, nonce: u64) {
        self.taken.remove(&nonce);
        self.consumed = self.consumed.max(nonce.saturating_add(1));
        self.free = self.free.split_off(&self.consumed);
        self.next = self.next.map(|next| next.max(self.consumed));
    }

    fn release(&mut self, nonce: u64) {
        self.taken.remove(&nonce);
        if nonce < self.consumed {
            return;
        }
        match self.next {
            Some(next) if next == nonce + 1 => self.next = Some(nonce),
            _ => drop(self.free.insert(nonce)),
        }
    }
}

impl Slot {
    pub(crate) const fn nonce(&self) -> u64 {
        self.nonce
    }

    /// From now on a transaction with this nonce may be anywhere.
    pub(crate) fn sent(&mut self) {
        self.sent = true;
    }

    /// Our transaction is in a block.
    pub(crate) fn consumed(mut self) {
        self.settled = true;
        self.lane.nonces().consume(self.nonce);
    }

    /// No node took the transaction.
    pub(crate) fn release(mut self) {
        self.settled = true;
        self.lane.nonces().release(self.nonce);
    }

    /// Another transaction has the nonce: somebody else uses the key. The chain is asked before the next one is handed out.
    pub(crate) fn displaced(mut self) {
        self.settled = true;
        self.displace();
    }

    fn displace(&self) {
        let mut nonces = self.lane.nonces();
        nonces.taken.remove(&self.nonce);
        nonces.next = None;
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        match (self.settled, self.sent) {
            (true, _) => {}
            (false, false) => self.lane.nonces().release(self.nonce),
            (false, true) => self.displace(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nonces(next: u64) -> Nonces {
        Nonces { next: Some(next), ..Nonces::default() }
    }

    #[test]
    fn the_lowest_free_nonce_goes_first() {
        let mut nonces = nonces(5);
        assert_eq!([nonces.take(), nonces.take(), nonces.take()], [Some(5), Some(6), Some(7)]);
        nonces.release(6);
        assert!(nonces.has_gap());
        assert_eq!(nonces.take(), Some(6));
        assert!(!nonces.has_gap());
        assert_eq!(nonces.take(), Some(8));
    }

    #[test]
    fn the_last_nonce_given_back_leaves_no_gap() {
        let mut nonces = nonces(5);
        nonces.take();
        nonces.take();
        nonces.release(6);
        assert!(!nonces.has_gap());
        nonces.release(5);
        assert!(!nonces.has_gap());
        assert_eq!(nonces.take(), Some(5));
    }

    #[test]
    fn nonces_that_somebody_else_used_are_skipped_and_gaps_found() {
        let mut nonces = nonces(5);
        for _ in 0..4 {
            nonces.take();
        }
        // 5 was displaced, 8 is still in flight; the chain says that 7 is next.
        nonces.taken.remove(&5);
        nonces.taken.remove(&7);
        nonces.next = None;
        nonces.resume(7);
        assert_eq!(nonces.take(), Some(7));
        assert_eq!(nonces.take(), Some(9));
    }

    #[test]
    fn a_lagging_node_does_not_bring_consumed_nonces_back() {
        let mut nonces = nonces(5);
        nonces.take();
        nonces.take();
        nonces.consume(6);
        nonces.next = None;
        nonces.resume(4);
        assert_eq!(nonces.take(), Some(7));
    }
}
