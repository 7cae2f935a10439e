//! What has to be done without being asked.
//!
//! A process may have died between any two steps, a node may have forgotten a transaction, a request may be gone whose payment
//! is still open. From time to time everything open that nobody looks after is looked at: what is on the chain is recorded, what
//! was lost is sent again, what is due is settled. Where nothing is open, the node is not asked anything.

use std::{
    sync::{Arc, Weak},
    time::Duration,
};

use alloy_consensus::{Transaction as _, TxEnvelope};
use alloy_eips::Decodable2718 as _;
use alloy_primitives::{Bytes, U256};
use tokio::{
    sync::watch,
    task::JoinSet,
    time::{Instant, timeout},
};

use super::{engine::Engine, finality::Horizon, nonce_manager::NonceManager};
use crate::{
    chain::{broadcast::Sent, fees::Fees, rpc::RpcFailure},
    ledger::{
        Fulfilment, LedgerError, Listing, NONCE_HELD_SECONDS, Record, Settlement, SettlementState, SettlementStep,
        Settling, Submission,
    },
    payment::{Outcome, Verified},
    settlement::FacilitatorError,
    telemetry,
};

/// What is open.
const OPEN: [SettlementState; 3] = [SettlementState::Due, SettlementState::Submitted, SettlementState::Unknown];
/// How long after it was submitted a transaction that nobody watches is sent again, in seconds.
const QUIET: u64 = 10;
/// How many payments are looked at at a time.
const AT_A_TIME: usize = 16;
/// Between two looks at the same payment lies a quarter of its age, within these bounds, in seconds.
const PAUSES: std::ops::RangeInclusive<u64> = 2..=30;
/// How often the key's balance is looked at while it is used.
const TANK_INTERVAL: Duration = Duration::from_secs(60);
/// The tank is low when it does not pay for this many more transactions.
const TANK_LOW: u64 = 200;
/// A payment of which nobody heard for so long after it was reserved, in seconds, is not awaited any more with the next block.
const LONG_AGO: u64 = 60;
/// A transfer of nothing that offers so many times as much as is wanted now waits for something else than a better price.
const PLENTY: u128 = 4;
/// Gas for a transfer of nothing to oneself.
const FILLER_GAS: u64 = 21_000;

/// When the tank was looked at last, and how many transactions there had been.
type TankLook = Option<(Instant, u64)>;

impl Engine {
    /// Looks after everything for as long as the engine is used.
    pub(crate) fn keep_up(self: &Arc<Self>, interval: Duration) {
        let (engine, hint) = (Arc::downgrade(self), self.hint.clone());
        let (passed, passes) = watch::channel(());
        tokio::spawn(keep_following(engine.clone(), passes));
        tokio::spawn(async move {
            let mut tank = None;
            while let Some(engine) = engine.upgrade() {
                engine.look_after(&mut tank).await;
                drop(engine);
                passed.send_replace(());
                let _ = timeout(interval, hint.notified()).await;
            }
        });
    }

    /// One pass over everything open. What goes wrong with one part does not keep it from the others.
    async fn look_after(self: &Arc<Self>, tank: &mut TankLook) {
        let caught_up = *self.caught_up.borrow();
        let failed = self.send_again(!caught_up).await;
        // If no lane could be looked after, nothing would be learned of the payments either.
        if failed < self.lanes.len()
            && let Err(error) = self.look_at_open(caught_up).await
        {
            tracing::warn!(%error, "open payments could not be looked after");
        }
        self.watch_the_tank(tank).await;
        self.wake_who_was_refilled().await;
        if self.fees.known_refusal().is_err() {
            // Until somebody looks, nothing is verified.
            let _ = self.fees.get(&self.rpc).await;
        }
    }

    /// All open payments, those of an earlier process first. One that cannot be looked at now keeps nobody waiting: what is sent
    /// for it anew can pay no more than once.
    async fn look_at_open(self: &Arc<Self>, caught_up: bool) -> Result<(), FacilitatorError> {
        if !caught_up {
            self.each_open(Listing::of([SettlementState::Submitted, SettlementState::Unknown])).await?;
            self.caught_up.send_replace(true);
        }
        self.each_open(Listing::of(OPEN)).await
    }

    /// Begins to settle what was not sent yet and is owed.
    pub(super) async fn begin_what_is_owed(self: &Arc<Self>) -> Result<(), FacilitatorError> {
        let fulfilment = vec![Fulfilment::Produced, Fulfilment::Delivered];
        self.each_open(Listing { fulfilment, ..Listing::of([SettlementState::Due]) }).await
    }

    /// Takes up all payments on this list, of those on the chain, that nobody looks after.
    async fn each_open(self: &Arc<Self>, listing: Listing) -> Result<(), FacilitatorError> {
        let mut listing = Listing { network: Some(self.network), idle_at: Some(self.clock.now()), ..listing };
        loop {
            let page = self.ledger.list(&listing).await?;
            let Some(last) = page.last() else { return Ok(()) };
            listing.after = Some(last.key);
            let mut looks = JoinSet::new();
            for record in page {
                if self.check_backlog().is_err() {
                    // The rest is as good in the ledger.
                    while looks.join_next().await.is_some() {}
                    return Ok(());
                }
                if looks.len() >= AT_A_TIME {
                    looks.join_next().await;
                }
                let engine = self.clone();
                looks.spawn(async move {
                    let (payer, nonce) = (record.key.payer, record.key.nonce);
                    if let Err(error) = engine.take_up(record).await {
                        tracing::warn!(%error, %payer, %nonce, "an open payment could not be looked after");
                    }
                });
            }
            // A panic is reported where it happens; the payment is looked at again.
            while looks.join_next().await.is_some() {}
        }
    }

    /// One open payment: what does the chain say, and is it to be settled?
    pub(super) async fn take_up(self: &Arc<Self>, record: Record) -> Result<(), FacilitatorError> {
        if self.active.contains(&record.key) {
            return Ok(());
        }
        let now = self.clock.now();
        let is_expired = record.authorization.valid_before <= U256::from(now);
        let is_untouched =
            record.settlement == Settlement::Due && record.transactions.is_empty() && record.last_failure.is_none();
        if is_untouched && !is_expired {
            // Should another process be as fast, the ledger takes one submission.
            return self.settle_if_owed(&record).await;
        }
        let age = now.saturating_sub(record.reserved_at);
        let until = now.saturating_add((age / 4).clamp(*PAUSES.start(), *PAUSES.end()));
        match self.ledger.settle(&record.key, &SettlementStep::Claim(Settling { by: self.process, until })).await {
            Ok(()) => {}
            // Another process was faster, or it is settled.
            Err(LedgerError::InvalidTransition(_) | LedgerError::NotFound) => return Ok(()),
            Err(error) => return Err(error.into()),
        }
        if record.settlement != Settlement::Due || !record.transactions.is_empty() || is_expired {
            let outcome = self.reconcile(&record).await?;
            let is_due = matches!(outcome, Outcome::Failed { dead: false, .. }) && !is_expired;
            if is_due && self.is_owed(&record).await? {
                // Without a failure on record, of which the payer could hear before it is charged.
                return self.line_up(&record);
            }
            self.record(&record.key, SettlementStep::of(&outcome, self.process)).await;
            if matches!(outcome, Outcome::Unknown { .. }) && age < LONG_AGO {
                // A transaction may be in the next block: that is soon.
                let soon = Settling { by: self.process, until: self.clock.now().saturating_add(*PAUSES.start()) };
                self.record(&record.key, SettlementStep::Claim(soon)).await;
            }
            return Ok(());
        }
        self.settle_if_owed(&record).await
    }

    async fn settle_if_owed(self: &Arc<Self>, record: &Record) -> Result<(), FacilitatorError> {
        if self.is_owed(record).await? { self.line_up(record) } else { Ok(()) }
    }

    /// Puts a payment in line that nobody asks for. If somebody is told meanwhile that it failed, in whatever process, the ledger does
    /// not take its transaction.
    fn line_up(self: &Arc<Self>, record: &Record) -> Result<(), FacilitatorError> {
        match self.begin(record.payment(), Verified::default(), None) {
            Ok(_) | Err(FacilitatorError::Busy { .. }) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Whether a transaction for it is sent again if no node has it now.
    pub(super) async fn is_on_its_way(&self, record: &Record) -> Result<bool, FacilitatorError> {
        for lane in &self.lanes {
            let submissions = self.ledger.submissions(&self.sender(lane), lane.consumed()).await?;
            if submissions.iter().any(|submission| record.transactions.contains(&submission.hash)) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Whether the seller may take the money without being asked: the payer has the answer, or can have it. Who was told that
    /// settling failed may have paid again, and is not charged behind its back.
    async fn is_owed(&self, record: &Record) -> Result<bool, FacilitatorError> {
        Ok(match record.fulfilment {
            Fulfilment::Delivered => true,
            // Answered on credit, or paid for once and undone since: the answer was there to be had.
            Fulfilment::Produced if record.deferred || record.settled_at.is_some() => true,
            Fulfilment::Produced => record.last_failure.is_none() && self.ledger.response(&record.key).await?.is_some(),
            Fulfilment::Reserved | Fulfilment::Working | Fulfilment::Released => false,
        })
    }

    /// Sends journalled transactions again that nobody watches: their process died, or the node lost them. The youngest are left to
    /// whoever just sent them, unless it is `certain` that nobody did. Returns for how many lanes it is not known what is on its way.
    async fn send_again(&self, certain: bool) -> usize {
        let _alone = self.resending.lock().await;
        self.send_again_in_all(certain).await
    }

    /// The same of all that is journalled, since the chain has undone blocks.
    pub(super) async fn send_all_again(&self) -> usize {
        let _alone = self.resending.lock().await;
        self.lanes.iter().for_each(NonceManager::rewind);
        self.send_again_in_all(true).await
    }

    async fn send_again_in_all(&self, certain: bool) -> usize {
        let mut failed = 0;
        for lane in &self.lanes {
            if let Err(error) = self.send_again_in(lane, certain).await {
                tracing::warn!(%error, account = %lane.account(), "a key's transactions could not be looked after");
                failed += 1;
            }
        }
        failed
    }

    async fn send_again_in(&self, lane: &NonceManager, certain: bool) -> Result<(), FacilitatorError> {
        let now = self.clock.now();
        let is_old = |submission: &Submission| certain || submission.at.saturating_add(QUIET) < now;
        let mut waiting = self.ledger.submissions(&self.sender(lane), lane.consumed()).await?;
        if !waiting.iter().any(is_old) {
            return Ok(());
        }
        let next = self.rpc.nonce(lane.account(), "latest").await?;
        lane.consumed_below(next);
        waiting.retain(|submission| submission.nonce >= next);
        if waiting.first().is_some_and(|first| first.nonce > next && is_old(first)) {
            // Its process gave the nonce back and went away, or has nothing more to send.
            telemetry::gap_filled(self.network);
            tracing::warn!(lane_nonce = next, "filling a gap in the nonces that others wait for");
            if let Err(error) = self.fill_gap(lane, next).await {
                tracing::warn!(%error, lane_nonce = next, "a gap in the nonces cannot be filled");
            }
        }
        waiting.retain(is_old);
        for submission in waiting.into_iter().filter(|submission| !self.watches(submission.hash)) {
            tracing::info!(transaction = %submission.hash, lane_nonce = submission.nonce, "sending a forgotten transaction again");
            let sent = self.node.resend(&self.rpc, &submission.raw).await;
            let is_fresh = submission.at.saturating_add(NONCE_HELD_SECONDS) >= now;
            if matches!(sent, Sent::Perhaps) && is_fresh {
                // Whether it is on its way must be known before its payments are judged.
                return Err(RpcFailure::Silent.into());
            }
            if submission.nonce == next
                && submission.at.saturating_add(NONCE_HELD_SECONDS) < now
                && let Err(error) = self.unblock(lane, &submission).await
            {
                tracing::warn!(%error, lane_nonce = next, "a transaction that is stuck cannot be replaced");
            }
        }
        Ok(())
    }

    async fn fill_gap(&self, lane: &NonceManager, nonce: u64) -> Result<(), FacilitatorError> {
        let fees = self.fees.get(&self.rpc).await?;
        self.fill_nonce(lane, nonce, fees).await
    }

    /// A transaction that everything behind it waits for, and that nobody follows, is not included: a transfer of nothing takes its
    /// nonce for a better price, as long as the price can be the reason. Its payments are open again then.
    async fn unblock(&self, lane: &NonceManager, stuck: &Submission) -> Result<(), FacilitatorError> {
        let Ok(envelope) = TxEnvelope::decode_2718(&mut stuck.raw.as_ref()) else { return Ok(()) };
        let paid =
            Fees { max_fee: envelope.max_fee_per_gas(), tip: envelope.max_priority_fee_per_gas().unwrap_or_default() };
        let now = self.fees.get(&self.rpc).await?;
        let is_plenty = |paid: u128, now: u128| paid >= now.saturating_mul(PLENTY);
        let is_filler = stuck.payments.is_empty();
        if is_filler && is_plenty(paid.max_fee, now.max_fee) && is_plenty(paid.tip, now.tip) {
            // No blocks come, or the node tells nobody of it: the best of all offers would be paid when that ends.
            return Ok(());
        }
        let fees = self.fees.raise(&self.rpc, paid).await?;
        telemetry::replaced(self.network, "stuck");
        tracing::warn!(lane_nonce = stuck.nonce, max_fee = fees.max_fee, "replacing a transaction that is stuck");
        self.fill_nonce(lane, stuck.nonce, fees).await
    }

    /// Uses a nonce for a transfer of nothing to ourselves, unless another process uses it now.
    async fn fill_nonce(&self, lane: &NonceManager, nonce: u64, fees: Fees) -> Result<(), FacilitatorError> {
        let filler = self.transaction(nonce, fees, FILLER_GAS, lane.account(), Bytes::new());
        let signed = self.sign(lane, filler).await?;
        match self.ledger.submit(self.submission_of(lane, nonce, &signed, Vec::new())).await {
            Ok(()) => {}
            Err(LedgerError::NonceTaken { .. }) => return Ok(()),
            Err(error) => return Err(error.into()),
        }
        self.node.resend(&self.rpc, &signed.raw).await;
        Ok(())
    }

    /// A key that could not pay for gas is used again as soon as it holds more.
    async fn wake_who_was_refilled(&self) {
        for lane in self.lanes.iter().filter(|lane| lane.resting().is_some()) {
            if let Ok(balance) = self.rpc.balance(lane.account()).await {
                lane.wake(balance);
            }
        }
    }

    /// Warns before the key cannot pay for gas any more; looks only while it is used.
    async fn watch_the_tank(&self, tank: &mut TankLook) {
        let stats = self.stats();
        let is_due =
            tank.is_none_or(|(at, transactions)| at.elapsed() >= TANK_INTERVAL && stats.transactions > transactions);
        if stats.transactions == 0 || !is_due {
            return;
        }
        *tank = Some((Instant::now(), stats.transactions));
        let each = stats.spent / U256::from(stats.transactions);
        for lane in &self.lanes {
            let account = lane.account();
            let Ok(balance) = self.rpc.balance(account).await else {
                tracing::warn!(%account, "what the settlement key holds could not be read");
                continue;
            };
            telemetry::gas_tank(self.network, account, balance);
            if balance < each.saturating_mul(U256::from(TANK_LOW)) {
                tracing::error!(%account, %balance, "the settlement key will soon be unable to pay for gas");
            }
        }
    }
}

/// Follows settled payments after each pass, in a task of its own, which ends with the other: there may be many of them, and what is due
/// expires while it waits.
async fn keep_following(engine: Weak<Engine>, mut passes: watch::Receiver<()>) {
    let mut horizon = Horizon::default();
    while passes.changed().await.is_ok() {
        let Some(engine) = engine.upgrade() else { return };
        if let Err(error) = engine.follow_the_chain(&mut horizon).await {
            tracing::warn!(%error, "settled payments could not be looked after");
        }
    }
}
