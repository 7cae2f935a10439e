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
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use alloy_primitives::{Address, U256};
use tokio::{
    sync::{Mutex as AsyncMutex, Notify, OwnedSemaphorePermit, Semaphore},
    time::{Instant, timeout},
};

use super::engine::SharedSigner;
use crate::{
    chain::rpc::{Rpc, RpcFailure},
    settlement::FacilitatorError,
    telemetry,
};

/// Gaps that are looked for at once; more are found when these are filled.
const MAX_GAPS: usize = 64;
/// After a failed look at the chain, how long nobody asks again.
const SYNC_PAUSE: Duration = Duration::from_secs(1);

/// One key's window of nonces. A clone is the same lane.
#[derive(Clone)]
pub(crate) struct NonceManager(Arc<Inner>);

struct Inner {
    signer: SharedSigner,
    rpc: Rpc,
    window: Arc<Semaphore>,
    /// Told whenever a place becomes free, here or in another lane.
    freed: Arc<Notify>,
    /// Until when it is used only if there is no other, and what its key held when it could not pay for gas, in wei.
    resting: Mutex<Option<(Instant, U256)>>,
    /// Whether a task fills its gaps.
    filling: AtomicBool,
    nonces: Mutex<Nonces>,
    /// Held while the chain is asked; when that failed last.
    syncing: AsyncMutex<Option<Instant>>,
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

/// A place in the window of transactions in flight.
#[derive(Debug)]
pub(crate) struct Place {
    permit: Option<OwnedSemaphorePermit>,
    freed: Arc<Notify>,
}

impl Drop for Place {
    fn drop(&mut self) {
        // Before anybody is told.
        self.permit = None;
        self.freed.notify_one();
    }
}

/// A nonce in use. What becomes of it must be said: [`consumed`](Self::consumed), [`release`](Self::release) or
/// [`displaced`](Self::displaced). A slot that is dropped is given back if nothing was sent with it.
#[derive(Debug)]
pub(crate) struct Slot {
    lane: NonceManager,
    nonce: u64,
    sent: bool,
    settled: bool,
    _place: Place,
}

impl NonceManager {
    pub(crate) fn new(signer: SharedSigner, rpc: Rpc, window: usize, freed: Arc<Notify>) -> Self {
        Self(Arc::new(Inner {
            signer,
            rpc,
            freed,
            resting: Mutex::default(),
            filling: AtomicBool::new(false),
            window: Arc::new(Semaphore::new(window.clamp(1, Semaphore::MAX_PERMITS))),
            nonces: Mutex::default(),
            syncing: AsyncMutex::default(),
        }))
    }

    /// The address of its key.
    pub(crate) fn account(&self) -> Address {
        self.0.signer.address()
    }

    pub(super) fn signer(&self) -> &SharedSigner {
        &self.0.signer
    }

    /// A place in the window, as soon as there is one. It keeps no nonce from others yet.
    pub(crate) async fn enter(&self) -> Place {
        // Never closed; without a permit the window would only be wider.
        Place { permit: self.0.window.clone().acquire_owned().await.ok(), freed: self.0.freed.clone() }
    }

    /// A place in the window of the lane that has the most room, if there is one.
    pub(super) fn enter_any(lanes: &[Self]) -> Option<(Self, Place)> {
        let all_rest = lanes.iter().all(Self::is_resting);
        let room = |lane: &&Self| lane.0.window.available_permits();
        let lane = lanes.iter().filter(|lane| all_rest || !lane.is_resting()).max_by_key(room)?;
        let permit = lane.0.window.clone().try_acquire_owned().ok()?;
        Some((lane.clone(), Place { permit: Some(permit), freed: lane.0.freed.clone() }))
    }

    /// Its key holds so little that it cannot pay for gas: uses other lanes for a while, where there are others.
    pub(super) fn rest(&self, pause: Duration, balance: U256) {
        *self.0.resting.lock().unwrap_or_else(PoisonError::into_inner) = Some((Instant::now() + pause, balance));
    }

    /// Its key holds so much now: it rests no longer if that is more than before.
    pub(super) fn wake(&self, balance: U256) {
        let mut resting = self.0.resting.lock().unwrap_or_else(PoisonError::into_inner);
        *resting = resting.filter(|(_, before)| balance <= *before);
    }

    /// What its key held, in wei, if it could not pay for gas a moment ago.
    pub(super) fn resting(&self) -> Option<U256> {
        let resting = *self.0.resting.lock().unwrap_or_else(PoisonError::into_inner);
        resting.filter(|(until, _)| *until > Instant::now()).map(|(_, balance)| balance)
    }

    fn is_resting(&self) -> bool {
        self.resting().is_some()
    }

    /// Whether the caller is to fill the gaps: there are some, and nobody does.
    pub(super) fn begin_filling(&self) -> bool {
        self.has_gap() && !self.0.filling.swap(true, Ordering::AcqRel)
    }

    pub(super) fn end_filling(&self) {
        self.0.filling.store(false, Ordering::Release);
    }

    /// The lowest free nonce.
    pub(crate) async fn take(&self, place: Place) -> Result<Slot, FacilitatorError> {
        loop {
            if let Some(nonce) = self.nonces().take() {
                return Ok(self.slot(nonce, place));
            }
            self.sync().await?;
        }
    }

    /// A free nonce that keeps others from being included, if there is one.
    pub(crate) async fn take_gap(&self, patience: Duration) -> Option<Slot> {
        let place = timeout(patience, self.enter()).await.ok()?;
        let nonce = {
            let mut nonces = self.nonces();
            if !nonces.has_gap() {
                return None;
            }
            let nonce = nonces.free.pop_first()?;
            nonces.taken.insert(nonce);
            nonce
        };
        Some(self.slot(nonce, place))
    }

    /// Whether a free nonce keeps others from being included.
    pub(crate) fn has_gap(&self) -> bool {
        self.nonces().has_gap()
    }

    /// All nonces below are in blocks, as far as is known here.
    pub(crate) fn consumed(&self) -> u64 {
        self.nonces().consumed
    }

    /// The chain says that all nonces below are in blocks.
    pub(crate) fn consumed_below(&self, next: u64) {
        let mut nonces = self.nonces();
        if next > nonces.consumed {
            nonces.consumed = next;
            nonces.free = nonces.free.split_off(&next);
            nonces.next = nonces.next.map(|known| known.max(next));
        }
    }

    /// The chain has undone blocks: asks it where to go on.
    pub(crate) fn rewind(&self) {
        let mut nonces = self.nonces();
        nonces.consumed = 0;
        nonces.next = None;
    }

    /// How many nonces are in use.
    pub(crate) fn in_flight(&self) -> usize {
        self.nonces().taken.len()
    }

    fn slot(&self, nonce: u64, place: Place) -> Slot {
        telemetry::in_flight(1);
        Slot { lane: self.clone(), nonce, sent: false, settled: false, _place: place }
    }

    /// Asks the chain where to go on; of many callers one asks.
    async fn sync(&self) -> Result<(), RpcFailure> {
        let mut failed = self.0.syncing.lock().await;
        if self.nonces().next.is_some() {
            return Ok(());
        }
        if failed.is_some_and(|at| at.elapsed() < SYNC_PAUSE) {
            return Err(RpcFailure::Silent);
        }
        match self.0.rpc.nonce(self.account(), "pending").await {
            Ok(pending) => self.nonces().resume(pending),
            Err(failure) => {
                *failed = Some(Instant::now());
                return Err(failure);
            }
        }
        Ok(())
    }

    fn nonces(&self) -> MutexGuard<'_, Nonces> {
        self.0.nonces.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for NonceManager {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NonceManager").field("account", &self.account()).field("nonces", &*self.nonces()).finish()
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
        self.free = (pending..next).filter(|nonce| !self.taken.contains(nonce)).take(MAX_GAPS).collect();
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
            Some(next) if nonce.checked_add(1) == Some(next) => self.next = Some(nonce),
            _ => drop(self.free.insert(nonce)),
        }
    }
}

impl Slot {
    pub(crate) const fn nonce(&self) -> u64 {
        self.nonce
    }

    /// Another process uses the nonce: goes on to one that is not known to be used, from `next` on.
    pub(crate) fn skip_to(&mut self, next: u64) {
        let mut nonces = self.lane.nonces();
        nonces.taken.remove(&self.nonce);
        nonces.next = Some(nonces.next.map_or(next, |known| known.max(next)));
        // With `next` known there is one.
        self.nonce = nonces.take().unwrap_or(next);
    }

    /// Whose nonce it is.
    pub(super) fn lane(&self) -> &NonceManager {
        &self.lane
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

    /// Another transaction is in a block with the nonce: somebody else uses the key. The chain is asked where to go on.
    pub(crate) fn consumed_by_another(mut self) {
        self.settled = true;
        self.displace();
        self.lane.nonces().consume(self.nonce);
    }

    /// Another transaction has the nonce, and may or may not be included with it. The chain is asked where to go on.
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
        telemetry::in_flight(-1);
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

    #[test]
    fn of_many_gaps_the_lowest_come_first_and_the_others_later() {
        let mut nonces = Nonces::default();
        nonces.taken.insert(200);
        nonces.resume(0);
        assert!(nonces.free.iter().copied().eq(0..MAX_GAPS as u64));
        for _ in 0..MAX_GAPS {
            nonces.take();
        }
        assert_eq!((nonces.has_gap(), nonces.next), (false, Some(201)));
        // When those are in blocks, the chain is asked again.
        nonces.taken.retain(|nonce| *nonce == 200);
        nonces.next = None;
        nonces.resume(64);
        assert_eq!((nonces.free.first(), nonces.free.len()), (Some(&64), MAX_GAPS));
    }
}
