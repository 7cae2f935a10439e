//! What is done without being asked: payments whose settlement nobody waits for any more are followed to their end.

use std::{
    sync::{Arc, Weak},
    time::Duration,
};

use tokio::{sync::watch, task::JoinSet, time::timeout};

use super::{Remote, finality::Horizons, settle::Insistence};
use crate::{
    facilitator::FacilitatorError,
    ledger::{Fulfilment, LedgerError, Listing, Record, Settlement, SettlementState, SettlementStep, Settling},
    payment::Outcome,
};

/// What is open.
const OPEN: [SettlementState; 3] = [SettlementState::Due, SettlementState::Submitted, SettlementState::Unknown];
/// How many payments are looked at at a time.
const AT_A_TIME: usize = 8;
/// Between two looks at the same payment lies a quarter of its age, within these bounds, in seconds.
const PAUSES: std::ops::RangeInclusive<u64> = 2..=300;

impl Remote {
    /// Looks after what is open for as long as the facilitator is used.
    pub(super) fn keep_up(self: &Arc<Self>, interval: Duration) {
        let (remote, hint) = (Arc::downgrade(self), self.hint.clone());
        let (passed, passes) = watch::channel(());
        tokio::spawn(keep_following(remote.clone(), passes));
        tokio::spawn(async move {
            while let Some(remote) = remote.upgrade() {
                if let Err(error) = remote.each_open().await {
                    tracing::warn!(%error, "open payments could not be looked after");
                }
                drop(remote);
                passed.send_replace(());
                let _ = timeout(interval, hint.notified()).await;
            }
        });
    }

    async fn each_open(self: &Arc<Self>) -> Result<(), FacilitatorError> {
        let mut listing = Listing { idle_at: Some(self.clock.now()), ..Listing::of(OPEN) };
        loop {
            let page = self.ledger.list(&listing).await?;
            let Some(last) = page.last() else { return Ok(()) };
            listing.after = Some(last.key);
            let mut looks = JoinSet::new();
            for record in page.into_iter().filter(|record| self.serves(record.key.network)) {
                if looks.len() >= AT_A_TIME {
                    looks.join_next().await;
                }
                let remote = self.clone();
                looks.spawn(async move {
                    let (payer, nonce) = (record.key.payer, record.key.nonce);
                    if let Err(error) = remote.take_up(record).await {
                        tracing::warn!(%error, %payer, %nonce, "an open payment could not be looked after");
                    }
                });
            }
            while looks.join_next().await.is_some() {}
        }
    }

    /// One open payment: what became of it, or, if it was never given to the facilitator and the payer has the answer, settling
    /// it now.
    pub(super) async fn take_up(self: &Arc<Self>, record: Record) -> Result<(), FacilitatorError> {
        let is_due = record.settlement == Settlement::Due;
        if is_due && !self.is_owed(&record).await? {
            return Ok(());
        }
        let now = self.clock.now();
        let pause = (now.saturating_sub(record.reserved_at) / 4).clamp(*PAUSES.start(), *PAUSES.end());
        let take = SettlementStep::Claim(Settling { by: self.process, until: now.saturating_add(pause) });
        match self.ledger.settle(&record.key, &take).await {
            Ok(()) => {}
            // Another process was faster, or it is settled.
            Err(LedgerError::InvalidTransition(_) | LedgerError::NotFound) => return Ok(()),
            Err(error) => return Err(error.into()),
        }
        let outcome = if is_due {
            self.settle(record.payment(), Insistence::Once).await?
        } else {
            self.look_again(&record).await?
        };
        if let Outcome::Unknown { .. } = outcome {
            return Ok(());
        }
        match self.ledger.settle(&record.key, &SettlementStep::of(&outcome, self.process)).await {
            // Somebody else knows as much.
            Ok(()) | Err(LedgerError::InvalidTransition(_)) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Whether the money may be taken without being asked: the payer has the answer, or can have it. Who was told that settling
    /// failed may have paid again, and is not charged behind its back.
    async fn is_owed(&self, record: &Record) -> Result<bool, FacilitatorError> {
        Ok(match record.fulfilment {
            Fulfilment::Delivered => true,
            // Answered on credit, or paid for once and undone since: the answer was there to be had.
            Fulfilment::Produced if record.deferred || record.settled_at.is_some() => true,
            Fulfilment::Produced => record.last_failure.is_none() && self.ledger.response(&record.key).await?.is_some(),
            Fulfilment::Reserved | Fulfilment::Working | Fulfilment::Released => false,
        })
    }
}

/// Follows settled payments after each pass, in a task of its own, which ends with the other: there may be many of them, and what is due
/// expires while it waits.
async fn keep_following(remote: Weak<Remote>, mut passes: watch::Receiver<()>) {
    let mut horizons = Horizons::default();
    while passes.changed().await.is_ok() {
        let Some(remote) = remote.upgrade() else { return };
        remote.follow_the_chains(&mut horizons).await;
    }
}
