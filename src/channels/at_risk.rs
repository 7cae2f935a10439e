//! Claims of what an announced withdrawal could take: at once, whatever else is claimed, and again until they are made.

use std::{
    cmp::Reverse,
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
    time::Duration,
};

use tokio::{
    sync::Notify,
    task::JoinSet,
    time::{Instant, timeout},
};

use super::{
    Inner,
    claims::{SIDE_BY_SIDE, TOGETHER},
};
use crate::vouchers::ChannelId;

/// How long after a failure a claim is tried again.
const RETRY: Duration = Duration::from_secs(10);
/// After how many tries a channel is claimed although another task or process has it to claim: it may wait behind less urgent calls.
const PATIENT_TRIES: u32 = 2;
/// How many channels are known to be at risk at once. Others are found by the next look at the books.
const MAX_CHANNELS: usize = 100_000;

/// The channels that are claimed at once.
#[derive(Debug, Default)]
pub(super) struct AtRisk {
    channels: Mutex<HashMap<ChannelId, Claim>>,
    added: Notify,
}

/// The claim of a channel.
#[derive(Clone, Copy, Debug)]
struct Claim {
    /// What the withdrawal could take, in atomic units.
    amount: u128,
    is_running: bool,
    tries: u32,
    has_failed: bool,
    not_before: Instant,
}

impl AtRisk {
    pub(super) fn add(&self, id: ChannelId, amount: u128) {
        let mut channels = self.lock();
        if let Some(claim) = channels.get_mut(&id) {
            claim.amount = amount;
            return;
        }
        if channels.len() < MAX_CHANNELS {
            let not_before = Instant::now();
            channels.insert(id, Claim { amount, is_running: false, tries: 0, has_failed: false, not_before });
            self.added.notify_one();
        }
    }

    pub(super) fn has(&self, id: &ChannelId) -> bool {
        self.lock().contains_key(id)
    }

    pub(super) fn claimed(&self, id: &ChannelId) {
        self.lock().remove(id);
    }

    /// Notes that a claim failed. It is tried again.
    pub(super) fn failed(&self, id: ChannelId, amount: u128) {
        self.add(id, amount);
        if let Some(claim) = self.lock().get_mut(&id) {
            *claim = Claim { amount, has_failed: true, not_before: Instant::now() + RETRY, ..*claim };
        }
    }

    /// Returns the amount, in atomic units, that is at risk since claims of it failed.
    pub(super) fn failing(&self) -> u128 {
        let channels = self.lock();
        channels.values().filter(|claim| claim.has_failed).map(|claim| claim.amount).fold(0, u128::saturating_add)
    }

    /// Takes the channels with the largest amounts, as many as fit into a transaction.
    fn take(self: &Arc<Self>) -> Option<Taken> {
        let mut channels = self.lock();
        let now = Instant::now();
        let is_next = |claim: &Claim| !claim.is_running && claim.not_before <= now;
        let mut next: Vec<_> = channels.iter().filter(|(_, claim)| is_next(claim)).collect();
        next.sort_unstable_by_key(|(_, claim)| Reverse(claim.amount));
        let ids: Vec<ChannelId> = next.into_iter().take(TOGETHER).map(|(id, _)| *id).collect();
        let mut anyhow = false;
        for id in &ids {
            if let Some(claim) = channels.get_mut(id) {
                claim.is_running = true;
                claim.tries = claim.tries.saturating_add(1);
                anyhow |= claim.tries > PATIENT_TRIES;
            }
        }
        (!ids.is_empty()).then(|| Taken { at_risk: Arc::clone(self), ids, anyhow })
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<ChannelId, Claim>> {
        self.channels.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Channels that are being claimed. Dropped, also by a claim that panics, it has those tried again of which nothing was heard.
struct Taken {
    at_risk: Arc<AtRisk>,
    ids: Vec<ChannelId>,
    /// Whether to claim them although somebody else has them to claim.
    anyhow: bool,
}

impl Drop for Taken {
    fn drop(&mut self) {
        let mut channels = self.at_risk.lock();
        for id in &self.ids {
            // What was noted since then does not wait.
            if let Some(claim) = channels.get_mut(id).filter(|claim| claim.is_running) {
                claim.is_running = false;
                claim.not_before = claim.not_before.max(Instant::now() + RETRY);
            }
        }
    }
}

/// Claims what is at risk for as long as the channels are used. A batch that hangs holds up no other.
pub(super) async fn run(channels: Weak<Inner>) {
    let Some(at_risk) = channels.upgrade().map(|inner| Arc::clone(&inner.at_risk)) else { return };
    let mut running = JoinSet::new();
    loop {
        let Some(inner) = channels.upgrade() else { return };
        while running.len() < SIDE_BY_SIDE
            && let Some(taken) = at_risk.take()
        {
            running.spawn(claim(Arc::clone(&inner), taken));
        }
        // Not held while it waits, so that dropping the last handle ends this task.
        drop(inner);
        let woken = async {
            match running.len() {
                SIDE_BY_SIDE.. => drop(running.join_next().await),
                _ => at_risk.added.notified().await,
            }
        };
        let _ = timeout(RETRY, woken).await;
        while running.try_join_next().is_some() {}
    }
}

async fn claim(channels: Arc<Inner>, taken: Taken) {
    let claimed = channels.claim(taken.ids.clone(), taken.anyhow).await;
    match claimed {
        // The transfer is in no hurry, and holds up no claim.
        Ok(batch) => drop(tokio::spawn(async move { channels.settle(batch).await })),
        Err(error) => {
            tracing::error!(%error, channels = taken.ids.len(), "what is at risk could not be claimed; it is tried again")
        }
    }
}
