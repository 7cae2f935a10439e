//! Payers whose payments were sent and did not pay.
//!
//! Gas is ours, so a payer that makes a payment look good and then fail costs money: a contract wallet can do so as often as
//! it likes and for free. The first time may be bad luck; after that the payer has to wait, ever longer.

use std::{
    collections::HashMap,
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use alloy_primitives::Address;
use tokio::time::Instant;

use crate::{payment::Rejection, protocol::Reason};

/// How often in [`MEMORY`] is not held against a payer.
const FORGIVEN: u32 = 1;
/// The first pause, doubled each time.
const FIRST_PAUSE: Duration = Duration::from_secs(30);
/// How long it is remembered.
const MEMORY: Duration = Duration::from_secs(3_600);
/// How many payers are remembered.
const MAX_PAYERS: usize = 4_096;

#[derive(Debug, Default)]
pub(crate) struct Reverts(Mutex<HashMap<Address, Seen>>);

#[derive(Clone, Copy, Debug)]
struct Seen {
    times: u32,
    last: Instant,
}

impl Reverts {
    /// A transaction for this payer was included and did not pay.
    pub(crate) fn note(&self, payer: Address) {
        let mut payers = self.lock();
        if payers.len() >= MAX_PAYERS && !payers.contains_key(&payer) {
            payers.retain(|_, seen| seen.last.elapsed() < MEMORY);
            let oldest = payers.iter().min_by_key(|(_, seen)| seen.last).map(|(payer, _)| *payer);
            if let Some(oldest) = oldest.filter(|_| payers.len() >= MAX_PAYERS) {
                payers.remove(&oldest);
            }
        }
        let now = Instant::now();
        let seen = payers.entry(payer).or_insert(Seen { times: 0, last: now });
        let times = if seen.last.elapsed() < MEMORY { seen.times.saturating_add(1) } else { 1 };
        *seen = Seen { times, last: now };
    }

    /// Why nothing is sent for this payer now.
    pub(crate) fn bars(&self, payer: Address) -> Option<Rejection> {
        let seen = self.lock().get(&payer).copied()?;
        let doublings = seen.times.checked_sub(FORGIVEN + 1)?;
        let pause = FIRST_PAUSE.saturating_mul(1 << doublings.min(16)).min(MEMORY);
        let left = pause.checked_sub(seen.last.elapsed()).filter(|left| !left.is_zero())?;
        let detail = format!(
            "{} payments of this payer were sent and did not pay; try again in {} seconds",
            seen.times,
            left.as_secs() + 1
        );
        Some(Rejection::new(Reason::InvalidTransactionState, detail))
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Address, Seen>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn the_second_time_costs_a_pause_and_each_further_one_a_longer_one() {
        let (reverts, payer) = (Reverts::default(), Address::repeat_byte(1));
        reverts.note(payer);
        assert_eq!(reverts.bars(payer), None);
        for seconds in [30, 60, 120] {
            reverts.note(payer);
            tokio::time::advance(Duration::from_secs(seconds - 1)).await;
            assert!(reverts.bars(payer).is_some());
            tokio::time::advance(Duration::from_secs(1)).await;
            assert_eq!(reverts.bars(payer), None);
        }
        assert_eq!(reverts.bars(Address::repeat_byte(2)), None);
        tokio::time::advance(MEMORY).await;
        reverts.note(payer);
        assert_eq!(reverts.bars(payer), None, "long ago");
    }

    #[tokio::test(start_paused = true)]
    async fn no_more_payers_are_remembered_than_fit() {
        let reverts = Reverts::default();
        for n in 0..=MAX_PAYERS as u64 {
            reverts.note(Address::left_padding_from(&n.to_be_bytes()));
        }
        assert_eq!(reverts.lock().len(), MAX_PAYERS);
    }
}
