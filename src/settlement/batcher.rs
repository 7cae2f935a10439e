//! When a transaction is begun, and with whom.
//!
//! A lone payment does not wait. While a transaction is on its way to a block, payments that come meanwhile gather, for up to
//! half the time that a block takes, and share the next one: a burst costs few transactions, and a payment comes hardly later
//! than it would have alone.

use std::{sync::Arc, time::Duration};

use alloy_primitives::U256;
use tokio::{
    sync::oneshot,
    task::JoinSet,
    time::{Instant, timeout, timeout_at},
};
use tracing::Instrument;

use super::{
    engine::{Engine, QUEUE_PATIENCE},
    member::{Answer, Member},
    nonce_manager::{NonceManager, Place},
};
use crate::{
    payment::{Outcome, Prechecked, Rejection, Verified},
    settlement::FacilitatorError,
};

/// What was verified longer ago than this many seconds is looked at again before it is signed for.
const FRESH: u64 = 5;
/// How long the first of a burst waits for the others.
const BURST: Duration = Duration::from_millis(4);
/// The longest that payments gather while a transaction is on its way.
const LONGEST_GATHERING: Duration = Duration::from_millis(500);
/// How often a payment is signed for anew after its nonce went to somebody else or its offer was too low.
const ATTEMPTS: usize = 4;

impl Engine {
    /// Settles a payment in tasks of their own, which end neither with the caller nor before the nonce is resolved.
    pub(crate) async fn settle(
        self: &Arc<Self>,
        payment: Prechecked,
        verified: Verified,
    ) -> Result<Outcome, FacilitatorError> {
        let (sender, outcome) = oneshot::channel();
        // The upkeep was faster, and nobody can be told that nothing is charged: the ledger learns what becomes of it.
        if !self.begin(payment, verified, Some(sender))? {
            return Ok(Outcome::Unknown { transaction: None });
        }
        // It is answered unless the runtime shuts down; then nobody can tell how far it came.
        outcome.await.unwrap_or(Ok(Outcome::Unknown { transaction: None }))
    }

    /// Puts a payment in line, unless it is being settled already: whether that was done. Without somebody to answer, the ledger
    /// learns what became of it.
    pub(super) fn begin(
        self: &Arc<Self>,
        payment: Prechecked,
        verified: Verified,
        answer: Option<Answer>,
    ) -> Result<bool, FacilitatorError> {
        // First of all: what is being settled is not refused, whatever is in the way of others.
        let Some(active) = self.active.enter(payment.key()) else { return Ok(false) };
        // What nobody awaits is owed already, and would be settled by nobody else for a while.
        if answer.is_some() {
            self.check_closing()?;
        }
        if self.active.count() > self.backlog {
            return Err(full());
        }
        let member = Member::new(payment, verified, answer, Instant::now() + QUEUE_PATIENCE, active);
        if self.queue.push(member) {
            tokio::spawn(self.clone().serve());
        }
        Ok(true)
    }

    /// Refuses what could not be settled, before any work is done for it. The node is not asked: what is not known yet is found out by
    /// the settlement.
    pub(crate) fn check_open(&self) -> Result<(), FacilitatorError> {
        self.check_closing()?;
        self.check_backlog()?;
        self.fees.known_refusal()?;
        let balances: Option<Vec<U256>> = self.lanes.iter().map(NonceManager::resting).collect();
        match balances.and_then(|balances| balances.into_iter().max()) {
            Some(balance) => Err(FacilitatorError::GasTank { balance }),
            None => Ok(()),
        }
    }

    fn check_closing(&self) -> Result<(), FacilitatorError> {
        if self.is_closing() {
            return Err(FacilitatorError::Busy {
                what: "the settlement engine is shutting down",
                retry_after: Duration::from_secs(5),
            });
        }
        Ok(())
    }

    /// Refuses when as many payments wait for settlement as may.
    pub(crate) fn check_backlog(&self) -> Result<(), FacilitatorError> {
        if self.active.count() >= self.backlog { Err(full()) } else { Ok(()) }
    }

    pub(super) fn put_back(self: &Arc<Self>, members: Vec<Member>) {
        if self.queue.put_back(members) {
            tokio::spawn(self.clone().serve());
        }
    }

    /// Begins transactions for as long as anybody waits.
    async fn serve(self: Arc<Self>) {
        while !self.queue.is_served_out() {
            let place = timeout(Duration::from_secs(1), self.place()).await.ok();
            for member in self.queue.expired() {
                let error = FacilitatorError::Busy { what: "the settlement key", retry_after: Duration::from_secs(2) };
                self.give_up(member, error).await;
            }
            let Some((lane, place)) = place else { continue };
            let most = if self.can_batch().await { self.batch_size } else { 1 };
            if most > 1 {
                self.gather(most).await;
            }
            let members = self.queue.take(most, self.batch_gas_cap);
            if !members.is_empty() {
                tokio::spawn(self.clone().settle_together(members, lane, place));
            }
        }
    }

    /// A place in the lane, once what an earlier process left behind is known.
    async fn place(&self) -> (NonceManager, Place) {
        let mut caught_up = self.caught_up.subscribe();
        // The sender is in the engine.
        let _ = caught_up.wait_for(|caught_up| *caught_up).await;
        loop {
            if let Some(entered) = NonceManager::enter_any(&self.lanes) {
                return entered;
            }
            self.freed.notified().await;
        }
    }

    async fn gather(&self, most: usize) {
        let started = Instant::now();
        let in_flight = self.in_flight();
        let until = match in_flight {
            0 => started + BURST,
            _ => started + (self.pace.block_time() / 2).min(LONGEST_GATHERING),
        };
        loop {
            let changed = self.queue.changed.notified();
            // When a transaction is done with, the next one need not wait.
            if self.queue.len() >= most || (in_flight > 0 && self.in_flight() < in_flight) {
                return;
            }
            if timeout_at(until, changed).await.is_err() {
                return;
            }
        }
    }

    /// Looks again at those who were verified long ago, and begins a transaction for those who are fit.
    async fn settle_together(self: Arc<Self>, members: Vec<Member>, lane: NonceManager, place: Place) {
        let together = members.len() > 1;
        let (mut fit, stale): (Vec<_>, Vec<_>) = members.into_iter().partition(|member| self.is_fresh(member));
        let mut looks = JoinSet::new();
        for member in stale {
            let (engine, span) = (self.clone(), member.span.clone());
            looks.spawn(async move { engine.look_again(member).await }.instrument(span));
        }
        while let Some(looked) = looks.join_next().await {
            fit.extend(looked.ok().flatten());
        }
        if together {
            // Some turned out to need a transaction of their own.
            let (shared, mut alone): (Vec<_>, Vec<_>) =
                fit.into_iter().partition(|member| member.packed(self.batch_gas_cap).is_some());
            fit = shared;
            if fit.is_empty() && !alone.is_empty() {
                fit.push(alone.remove(0));
            }
            self.put_back(alone);
        }
        if !fit.is_empty() {
            self.attempt(fit, &lane, place).await;
        }
    }

    fn is_fresh(&self, member: &Member) -> bool {
        !member.left_behind
            && member.verified.gas.is_some()
            && self.clock.now().saturating_sub(member.verified.at) <= FRESH
            && self.reverts.bars(member.key().payer).is_none()
    }

    /// The member, if it may be signed for; otherwise it has been answered.
    async fn look_again(self: &Arc<Self>, mut member: Member) -> Option<Member> {
        let at = self.clock.now();
        let (facts, rejection) = match self.verify(&member.payment).await {
            Ok(looked) => looked,
            Err(failure) => {
                self.give_up(member, failure.into()).await;
                return None;
            }
        };
        if facts.used {
            let outcome = match self.look_for_use(&member.payment, member.seen_unused, &facts, None).await {
                Ok(outcome) => outcome,
                // It may have paid: nobody can be told that nothing was charged.
                Err(error) => {
                    let key = member.key();
                    tracing::warn!(%error, payer = %key.payer, nonce = %key.nonce, "what used a payment was not found out");
                    member.unknown()
                }
            };
            self.finish(member, Ok(outcome)).await;
            return None;
        }
        if member.left_behind && rejection.is_some() {
            self.reverts.note(member.key().payer);
        }
        match rejection.or_else(|| self.reverts.bars(member.key().payer)) {
            // What an earlier attempt sent may still be executed.
            Some(_) if !member.is_clean() => {
                let unknown = member.unknown();
                self.finish(member, Ok(unknown)).await;
                None
            }
            Some(Rejection { reason, detail }) => {
                let transaction = member.spent.last().copied();
                self.finish(member, Ok(Outcome::Failed { reason, detail, transaction, dead: false })).await;
                None
            }
            None => {
                member.verified =
                    Verified { gas: Some(facts.gas), at, contract_wallet: facts.payer_has_code(), ..member.verified };
                Some(member)
            }
        }
    }

    /// Signs for a payment anew, unless that was done often enough.
    pub(super) async fn again(self: &Arc<Self>, members: Vec<Member>) {
        let (worn_out, again): (Vec<_>, Vec<_>) = members.into_iter().partition(|member| member.attempts >= ATTEMPTS);
        self.put_back(again);
        for member in worn_out {
            let error =
                FacilitatorError::Busy { what: "the settlement key or its fees", retry_after: Duration::from_secs(2) };
            self.give_up(member, error).await;
        }
    }
}

fn full() -> FacilitatorError {
    FacilitatorError::Busy { what: "payments that wait for settlement", retry_after: Duration::from_secs(2) }
}
