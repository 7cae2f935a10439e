//! Who may have a deposit checked and sent: so many checks at once, no more than a payer's balance, and a bound on the gas that is lost to
//! deposits which revert.

use std::{
    collections::{HashMap, VecDeque},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use alloy_primitives::{Address, U256};
use tokio::{
    sync::{Semaphore, SemaphorePermit},
    time::Instant,
};

use crate::facilitator::{FacilitatorError, channels::ChannelError};

/// How many deposits are checked at once: each takes the node a few calls, whoever asks.
const MAX_CHECKS: usize = 32;
/// How many deposits may wait for their check.
const MAX_WAITING: usize = 1_000;
/// How long reverts of deposits count.
const REVERT_WINDOW: Duration = Duration::from_secs(3_600);
/// After how many reverts in that time no deposit is sent for a wallet with code of which none was ever executed. Such a wallet can be good
/// in simulations and revert in blocks, for free and with ever new addresses (EIP-7702).
const REVERTS_OF_NEW_CODE: usize = 8;
/// After how many none is sent for any payer of whom none was ever executed. Without code a revert costs the payer a transaction of its own.
const REVERTS_OF_NEW: usize = 16;
/// After how many none is sent for anybody. A deposit uses at most 400,000 gas, so that 13 million are lost in an hour, and what was in
/// flight when the bound was reached.
const MAX_REVERTS: usize = 32;
/// How many payers are remembered of whom a deposit was executed.
const MAX_PROVEN: usize = 10_000;

/// The deposits that are checked, and those that wait for it.
#[derive(Debug)]
pub(super) struct Checks {
    running: Semaphore,
    waiting: Semaphore,
}

impl Default for Checks {
    fn default() -> Self {
        Self { running: Semaphore::new(MAX_CHECKS), waiting: Semaphore::new(MAX_WAITING) }
    }
}

impl Checks {
    /// Waits until a deposit may be checked.
    pub(super) async fn enter(&self) -> Result<SemaphorePermit<'_>, ChannelError> {
        let _waits = self.waiting.try_acquire().map_err(|_| busy("checks of deposits", Duration::from_secs(2)))?;
        self.running.acquire().await.map_err(|_| busy("checks of deposits", Duration::from_secs(2)))
    }
}

/// What payers have promised by deposits that wait or are in flight. A balance backs each unit once: with the same money many deposits would
/// look good, and all but the first revert.
#[derive(Debug, Default)]
pub(super) struct Promises(Mutex<HashMap<Address, u128>>);

/// A promise, until this is dropped.
#[derive(Debug)]
pub(super) struct Promise {
    all: Arc<Promises>,
    payer: Address,
    amount: u128,
}

impl Promises {
    /// Counts a deposit, if the payer's balance covers it beside its other ones.
    pub(super) fn add(self: &Arc<Self>, payer: Address, amount: u128, balance: U256) -> Result<Promise, ChannelError> {
        let mut all = self.lock();
        let sum = all.get(&payer).copied().unwrap_or(0).saturating_add(amount);
        if balance < U256::from(sum) {
            return Err(busy("other deposits of the payer, which need its balance", Duration::from_secs(2)));
        }
        all.insert(payer, sum);
        Ok(Promise { all: self.clone(), payer, amount })
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Address, u128>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Promise {
    fn drop(&mut self) {
        let mut all = self.all.lock();
        let left = all.get(&self.payer).copied().unwrap_or(0).saturating_sub(self.amount);
        match left {
            0 => drop(all.remove(&self.payer)),
            _ => drop(all.insert(self.payer, left)),
        }
    }
}

/// The deposits that reverted, of all payers, and the payers of whom one was executed.
#[derive(Debug, Default)]
pub(super) struct Reverts(Mutex<Seen>);

#[derive(Debug, Default)]
struct Seen {
    /// When deposits reverted, at most [`MAX_REVERTS`].
    reverted: VecDeque<Instant>,
    /// When a deposit was executed last.
    proven: HashMap<Address, Instant>,
}

/// What a payer is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Payer {
    /// A deposit of it was executed, and none reverted since.
    Proven,
    /// None was seen, and it has no code.
    New,
    /// None was seen, and it has code.
    NewWithCode,
}

impl Reverts {
    pub(super) fn note_revert(&self, payer: Address) {
        let mut seen = self.lock();
        seen.proven.remove(&payer);
        if seen.reverted.len() >= MAX_REVERTS {
            seen.reverted.pop_front();
        }
        seen.reverted.push_back(Instant::now());
    }

    pub(super) fn note_executed(&self, payer: Address) {
        let mut seen = self.lock();
        if seen.proven.len() >= MAX_PROVEN && !seen.proven.contains_key(&payer) {
            let oldest = seen.proven.iter().min_by_key(|(_, at)| **at).map(|(payer, _)| *payer);
            oldest.map(|oldest| seen.proven.remove(&oldest));
        }
        seen.proven.insert(payer, Instant::now());
    }

    /// Returns `true` if a deposit of this payer was executed, and none reverted since.
    pub(super) fn is_proven(&self, payer: Address) -> bool {
        self.lock().proven.contains_key(&payer)
    }

    /// Returns `true` if so many deposits reverted that it matters who the payer is.
    pub(super) fn are_many(&self) -> bool {
        self.wait(REVERTS_OF_NEW_CODE).is_some()
    }

    /// Fails if no deposit is sent for such a payer now.
    pub(super) fn check(&self, payer: Payer) -> Result<(), ChannelError> {
        let bound = match payer {
            Payer::Proven => MAX_REVERTS,
            Payer::New => REVERTS_OF_NEW,
            Payer::NewWithCode => REVERTS_OF_NEW_CODE,
        };
        let what = "deposits of new payers, of which too many reverted";
        self.wait(bound).map_or(Ok(()), |retry_after| Err(busy(what, retry_after)))
    }

    /// Returns how long it takes until fewer than `bound` reverts count, if it is not so now.
    fn wait(&self, bound: usize) -> Option<Duration> {
        let mut seen = self.lock();
        while seen.reverted.front().is_some_and(|at| at.elapsed() >= REVERT_WINDOW) {
            seen.reverted.pop_front();
        }
        let first_to_go = seen.reverted.len().checked_sub(bound)?;
        seen.reverted.get(first_to_go).map(|at| REVERT_WINDOW.saturating_sub(at.elapsed()))
    }

    fn lock(&self) -> MutexGuard<'_, Seen> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn busy(what: &'static str, retry_after: Duration) -> ChannelError {
    FacilitatorError::Busy { what, retry_after }.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn retry_after(result: Result<(), ChannelError>) -> Option<u64> {
        match result {
            Ok(()) => None,
            Err(ChannelError::Unavailable(error)) => Some(error.retry_after().as_secs()),
            Err(other) => panic!("{other:?}"),
        }
    }

    #[tokio::test(start_paused = true)]
    async fn reverts_of_an_hour_are_bounded_first_for_new_wallets_with_code_and_at_last_for_all() {
        let reverts = Reverts::default();
        let payers = [Payer::NewWithCode, Payer::New, Payer::Proven];
        let refused = || payers.map(|payer| retry_after(reverts.check(payer)).is_some());
        for count in 1..=40 {
            reverts.note_revert(Address::repeat_byte(count));
            tokio::time::advance(Duration::from_secs(1)).await;
            assert_eq!(refused(), [count >= 8, count >= 16, count >= 32], "{count}");
            assert_eq!(reverts.are_many(), count >= 8);
        }
        assert_eq!(retry_after(reverts.check(Payer::Proven)), Some(3_600 - 32));
        tokio::time::advance(Duration::from_secs(3_600 - 32)).await;
        assert_eq!(refused(), [true, true, false]);
        tokio::time::advance(Duration::from_secs(32)).await;
        assert_eq!(refused(), [false; 3]);
    }

    #[test]
    fn a_payer_is_proven_by_an_executed_deposit_until_one_reverts() {
        let (reverts, payer) = (Reverts::default(), Address::repeat_byte(1));
        assert!(!reverts.is_proven(payer));
        reverts.note_executed(payer);
        assert!(reverts.is_proven(payer) && !reverts.is_proven(Address::repeat_byte(2)));
        reverts.note_revert(payer);
        assert!(!reverts.is_proven(payer));
        for n in 0..=MAX_PROVEN as u64 {
            reverts.note_executed(Address::left_padding_from(&n.to_be_bytes()));
        }
        assert_eq!(reverts.lock().proven.len(), MAX_PROVEN);
    }

    #[test]
    fn a_balance_backs_each_unit_of_deposits_that_wait_once() {
        let (promises, payer) = (Arc::new(Promises::default()), Address::repeat_byte(1));
        let add = |amount| promises.add(payer, amount, U256::from(10));
        let first = add(6).unwrap();
        assert!(add(5).is_err());
        let second = add(4).unwrap();
        assert!(add(1).is_err());
        drop(first);
        add(6).unwrap();
        drop(second);
        assert!(promises.lock().is_empty(), "nothing is kept of payers whose deposits are over");
        assert!(add(u128::MAX).is_err());
    }
}
