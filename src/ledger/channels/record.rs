//! The state machine of one channel.

use std::collections::VecDeque;

use alloy_primitives::{B256, keccak256};
use serde::{Deserialize, Serialize};

use super::{
    ChannelLedgerError,
    step::{ChannelStep, ExecutedRefund, RequestName, is_running},
};
use crate::{
    ledger::StoredResponse,
    network::Network,
    payment::PaymentKey,
    vouchers::{ChannelConfig, ChannelId, ChannelObservation, ChannelState, Claim, ClaimedVoucher, Escrow, Voucher},
};

/// The number of answers that are remembered of a channel. One request at a time is worked on, and a payer signs the next voucher
/// when it knows what became of the last, so that one would do.
const ANSWERS: usize = 4;

/// How long a channel is kept after all of it was claimed and it was used last, in seconds, so that a late reorganization of the claim finds
/// the voucher.
const RETENTION: u64 = 3_600;

/// How far ahead of the clock a block's timestamp may be, in seconds. The next observation replaces one that is further ahead.
const AHEAD: u64 = 120;

/// What a seller knows of a channel. Amounts are in atomic units of its token, times in Unix seconds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[non_exhaustive]
pub struct ChannelRecord {
    /// The channel.
    pub id: ChannelId,
    /// The chain.
    pub network: Network,
    /// What makes the channel.
    #[serde(serialize_with = "crate::vouchers::without_checksums")]
    pub config: ChannelConfig,
    /// The watermark after the last charge of this ledger; 0 before the first. It never falls.
    #[serde(with = "crate::vouchers::amount")]
    pub(crate) charged: u128,
    /// The newest voucher that something was charged by; `None` if nothing was charged by this ledger.
    pub voucher: Option<Voucher>,
    /// The highest ceiling of the vouchers that were put into a claim, whether it was executed or not, or shown to somebody who may be a stranger:
    /// these may be public. 0 before the first.
    #[serde(default, with = "crate::vouchers::amount")]
    pub published: u128,
    /// Whether more was claimed than this ledger had charged, so that any voucher may be public.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub claimed_elsewhere: bool,
    /// The channel as the chain had it when it was last looked at.
    pub observed: ChannelObservation,
    /// When that was.
    pub observed_at: u64,
    /// The request that holds the channel.
    pub pending: Option<PendingRequest>,
    /// Counts the requests that held the channel.
    pub epoch: u64,
    /// The last requests that were charged for.
    pub answers: VecDeque<Answer>,
    /// The last request that was begun, and how often. A refund does not count.
    pub attempts: Option<Attempts>,
    /// When it was used last.
    pub used_at: u64,
    /// Since when something is unclaimed, or was charged after the last claim.
    pub unclaimed_since: Option<u64>,
    /// Since when all that was charged is claimed. `None` while something is unclaimed.
    pub claimed_since: Option<u64>,
    /// The last refund that may have been signed, and its result.
    pub refund: Option<LastRefund>,
    /// Until when one process claims or refunds.
    pub claiming_until: Option<u64>,
}

/// A refund that may have been signed. Anybody can execute it as long as the contract's refund nonce of the channel is this one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[non_exhaustive]
pub struct LastRefund {
    /// Identifies the request for it. Zero if no payer asked.
    pub request: B256,
    /// The contract's refund nonce.
    #[serde(with = "crate::vouchers::amount")]
    pub nonce: u128,
    /// The most that it takes from the escrow.
    #[serde(with = "crate::vouchers::amount")]
    pub amount: u128,
    /// Whether that was all that was not charged.
    pub is_all: bool,
    /// What was charged in all by then.
    #[serde(with = "crate::vouchers::amount")]
    pub charged: u128,
    /// When it was asked for.
    pub asked_at: u64,
    /// Until when its transaction counts as under way, after which it is sent again; 0 if none is known to have been sent.
    pub until: u64,
    /// Whether it is the first with its nonce, so that nothing was signed if it was not sent.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_first: bool,
    /// What was refunded, once that is known.
    pub executed: Option<ExecutedRefund>,
}

/// A request that holds its channel.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[non_exhaustive]
pub struct PendingRequest {
    /// Identifies the request ([`ChannelRecord::request_key`]).
    pub request: B256,
    /// How its payer names it.
    pub name: Option<RequestName>,
    /// The voucher that pays for it.
    pub voucher: Voucher,
    /// The most that it may cost.
    #[serde(with = "crate::vouchers::amount")]
    pub price: u128,
    /// When another request may take the channel over.
    pub until: u64,
}

/// How often a request was begun.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Attempts {
    /// Identifies the request ([`ChannelRecord::request_key`]).
    pub request: B256,
    /// The number of times.
    pub number: u32,
}

/// A request that was answered and charged for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[non_exhaustive]
pub struct Answer {
    /// Identifies the request ([`ChannelRecord::request_key`]).
    pub request: B256,
    /// The epoch in which the request held the channel.
    pub epoch: u64,
    /// What it cost.
    #[serde(with = "crate::vouchers::amount")]
    pub charged: u128,
    /// The watermark after it.
    #[serde(with = "crate::vouchers::amount")]
    pub total: u128,
    /// When it was answered.
    pub at: u64,
    /// How its payer named it.
    pub name: Option<RequestName>,
    /// How often [`Replay`](ChannelStep::Replay) counted a replay of its response.
    #[serde(default)]
    pub replays: u32,
    /// Whether its response was not there whole when it was charged for, and streamed.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub streamed: bool,
}

impl ChannelRecord {
    /// Returns a channel that is opened as the chain has it.
    ///
    /// # Errors
    /// [`ChannelLedgerError::OtherChannel`] if the observation is of another channel than this one.
    pub fn open(
        network: Network,
        config: ChannelConfig,
        observation: ChannelObservation,
        now: u64,
    ) -> Result<Self, ChannelLedgerError> {
        let id = Escrow::on(network).channel_id(&config);
        if observation.state.channel_id != id {
            return Err(ChannelLedgerError::OtherChannel);
        }
        Ok(Self {
            id,
            network,
            config,
            charged: 0,
            voucher: None,
            published: 0,
            claimed_elsewhere: observation.state.total_claimed > 0,
            observed: observation,
            observed_at: now,
            pending: None,
            epoch: 0,
            answers: VecDeque::new(),
            attempts: None,
            used_at: now,
            unclaimed_since: None,
            claimed_since: Some(now),
            refund: None,
            claiming_until: None,
        })
    }

    /// Returns the channel that is not in the ledger yet, and that this step opens.
    ///
    /// # Errors
    /// [`ChannelLedgerError::NotFound`] if it is another step, [`ChannelLedgerError::OtherChannel`] if it opens another channel.
    pub fn opened(id: &ChannelId, step: &ChannelStep) -> Result<Self, ChannelLedgerError> {
        let ChannelStep::Open { network, config, observation, now } = step else {
            return Err(ChannelLedgerError::NotFound);
        };
        let record = Self::open(*network, *config, *observation, *now)?;
        if record.id == *id { Ok(record) } else { Err(ChannelLedgerError::OtherChannel) }
    }

    /// Returns the response that is kept with a step, which this channel has taken, and its key.
    pub fn response_in<'a>(&self, step: &'a ChannelStep) -> Option<(PaymentKey, &'a StoredResponse)> {
        let ChannelStep::Charge { epoch, response: Some(response), .. } = step else { return None };
        let answer = self.answers.iter().find(|answer| answer.epoch == *epoch)?;
        Some((self.response_key(answer.request), response))
    }

    /// Returns what identifies a request: the voucher and all that the response depends on, the digest of which is `request`. A payer
    /// that did not get its answer presents the same voucher with the same request.
    pub fn request_key(voucher: &Voucher, request: B256) -> B256 {
        let max = voucher.max_claimable_amount.to_be_bytes();
        let signature = voucher.signature.as_bytes();
        keccak256([voucher.channel_id.digest().as_slice(), &max, signature, request.as_slice()].concat())
    }

    /// Returns the key under which the response to a request is kept. Its asset is the escrow contract, so no payment with a token has
    /// the same key, whatever nonce its payer signs.
    pub fn response_key(&self, request: B256) -> PaymentKey {
        PaymentKey { network: self.network, asset: Escrow::ADDRESS, payer: self.config.payer, nonce: request }
    }

    /// Returns the answer that a request got, if it is remembered.
    pub fn answer_to(&self, request: B256) -> Option<&Answer> {
        self.answers.iter().find(|answer| answer.request == request)
    }

    /// Returns the answer that a request with this id of the payer's got, if it is remembered.
    pub fn answer_named(&self, id: B256) -> Option<&Answer> {
        self.answers.iter().find(|answer| answer.name.is_some_and(|name| name.id == id))
    }

    /// Returns how often a request was begun, if it is the last one that was.
    pub fn attempts_of(&self, request: B256) -> u32 {
        self.attempts.filter(|attempts| attempts.request == request).map_or(0, |attempts| attempts.number)
    }

    /// Returns the refund that was signed and may still be executed.
    pub fn open_refund(&self) -> Option<LastRefund> {
        self.refund.filter(|refund| refund.nonce >= self.observed.state.refund_nonce)
    }

    /// Returns what was charged in all, the watermark: by this ledger, or by whoever claimed more with the same authorizer's key, as before a
    /// backup was restored. That is as the chain was observed last, so that the next observation corrects a wrong one.
    pub fn charged(&self) -> u128 {
        self.charged.max(self.observed.state.total_claimed)
    }

    /// Returns the most that vouchers may be for: what is in escrow, without what an announced withdrawal and an open refund could take.
    pub fn covered(&self) -> u128 {
        self.covered_beside(self.open_refund().map_or(0, |refund| refund.amount))
    }

    /// Returns what is covered beside a signed refund of this amount.
    ///
    /// The contract pays each of the two at most `balance - totalClaimed`, so that neither takes what was claimed. A refund lowers the
    /// withdrawal, but a withdrawal does not lower the refund: with the withdrawal first, both are paid in full.
    fn covered_beside(&self, refund: u128) -> u128 {
        let ChannelState { balance, total_claimed, .. } = self.observed.state;
        let leaving = self.observed.withdrawal.saturating_add(refund);
        balance.saturating_sub(leaving).max(total_claimed.min(balance))
    }

    /// Returns what was charged, is covered by the voucher, and is not claimed.
    pub fn unclaimed(&self) -> u128 {
        self.claimable_total().saturating_sub(self.observed.state.total_claimed)
    }

    /// Returns the part of [`unclaimed`](Self::unclaimed) that is lost if it is not claimed in time, or that the escrow does not hold: an
    /// announced withdrawal can take it, or a reorganization removed the deposit.
    pub fn at_risk(&self) -> u128 {
        self.claimable_total().saturating_sub(self.covered())
    }

    /// Returns the row that claims what was charged, as far as the escrow has it: the contract refuses a row for more than the balance. Returns
    /// `None` if there is nothing to claim.
    pub fn claim(&self) -> Option<Claim> {
        let ChannelState { balance, total_claimed, .. } = self.observed.state;
        let total = self.claimable_total().min(balance);
        let voucher = self.voucher.as_ref().filter(|_| total > total_claimed)?;
        Some(Claim {
            voucher: ClaimedVoucher { channel: self.config, max_claimable_amount: voucher.max_claimable_amount },
            signature: voucher.signature,
            total_claimed: total,
        })
    }

    /// Returns `true` if a stranger may have a voucher for this much: it may have been in a claim.
    pub fn may_be_public(&self, max: u128) -> bool {
        max <= self.published || self.claimed_elsewhere
    }

    /// Returns `true` if the newest voucher pays for no more than it was charged for: whoever is shown it can buy nothing with it.
    #[cfg(feature = "server")]
    pub(crate) fn is_used_up(&self) -> bool {
        self.voucher.as_ref().is_none_or(|newest| newest.max_claimable_amount <= self.charged())
    }

    /// Returns `true` if the newest voucher is on the chain.
    #[cfg(feature = "server")]
    pub(crate) fn is_newest_claimed(&self) -> bool {
        self.charged == self.observed.state.total_claimed
    }

    /// Returns the channel's state as payers are told it.
    pub fn state(&self) -> ChannelState {
        ChannelState { charged_cumulative_amount: Some(self.charged()), ..self.observed.state }
    }

    /// Returns the time from which on the ledger may forget the channel: the chain has known for an hour all that was charged, and nobody
    /// works on it. Returns `None` if there is no such time.
    pub fn forget_at(&self) -> Option<u64> {
        let claimed_since = self.claimed_since.filter(|_| self.open_refund().is_none())?;
        let pending = self.pending.as_ref().map_or(0, |pending| pending.until);
        let busy = pending.max(self.claiming_until.unwrap_or(0));
        Some(claimed_since.max(self.used_at).saturating_add(RETENTION).max(busy))
    }

    /// Frees a channel whose process is gone, and has it observed again: the storage may be a restored backup, of a time before the last
    /// claims.
    #[cfg(feature = "sqlite")]
    pub(in crate::ledger) fn restart(&mut self) {
        self.pending = None;
        self.claiming_until = None;
        self.observed_at = 0;
    }

    /// Takes a step, or changes nothing.
    ///
    /// # Errors
    /// - `Open`, `Observe`: [`ChannelLedgerError::OtherChannel`].
    /// - `Begin`: [`ChannelLedgerError::OtherChannel`], [`ChannelLedgerError::Answered`], [`ChannelLedgerError::Busy`],
    ///   [`ChannelLedgerError::Mismatch`] or [`ChannelLedgerError::ExceedsBalance`].
    /// - `Charge`: [`ChannelLedgerError::LeaseLost`] or [`ChannelLedgerError::ExceedsVoucher`].
    /// - `BeginClaim`: [`ChannelLedgerError::Busy`].
    /// - `Refund`: [`ChannelLedgerError::Busy`] or [`ChannelLedgerError::ExceedsBalance`].
    pub fn apply(&mut self, step: &ChannelStep) -> Result<(), ChannelLedgerError> {
        match step {
            ChannelStep::Open { observation, now, .. } | ChannelStep::Observe { observation, now } => {
                self.observe(*observation, *now)
            }
            ChannelStep::Begin { request, name, voucher, price, now, until } => {
                self.begin((*request, *name), voucher, *price, *now, *until)
            }
            ChannelStep::Charge { epoch, amount, now, response } => {
                self.charge(*epoch, *amount, response.is_none(), *now)
            }
            ChannelStep::Replay { request } => {
                if let Some(answer) = self.answers.iter_mut().find(|answer| answer.request == *request) {
                    answer.replays = answer.replays.saturating_add(1);
                }
                Ok(())
            }
            ChannelStep::Release { epoch } => {
                if self.epoch == *epoch {
                    self.pending = None;
                }
                Ok(())
            }
            ChannelStep::BeginClaim { now, until } => {
                if let Some(running) = self.claiming_until.filter(|running| is_running(*running, *now, *until)) {
                    return Err(ChannelLedgerError::Busy { until: running });
                }
                self.claiming_until = Some(*until);
                self.publish_claim();
                Ok(())
            }
            ChannelStep::Publish { max } => {
                self.published = self.published.max(*max);
                Ok(())
            }
            ChannelStep::EndClaim { until } => {
                self.claiming_until = self.claiming_until.filter(|running| running != until);
                Ok(())
            }
            ChannelStep::Refund { request, amount, now, until } => self.refund(*request, *amount, *now, *until),
            ChannelStep::EndRefund { nonce, executed } => {
                if let Some(last) = self.refund.as_mut().filter(|last| last.nonce == *nonce && last.executed.is_none())
                {
                    last.until = 0;
                    last.executed = *executed;
                }
                Ok(())
            }
            ChannelStep::DropRefund { until } => {
                if let Some(last) = self.refund.as_mut().filter(|last| last.until == *until && last.executed.is_none())
                {
                    last.until = 0;
                    self.refund = self.refund.filter(|last| !last.is_first);
                }
                Ok(())
            }
        }
    }

    /// Returns the most that may be claimed, in all. It is below [`charged`](Self::charged()) if more was claimed than this ledger knows of.
    fn claimable_total(&self) -> u128 {
        self.voucher.as_ref().map_or(0, |voucher| self.charged.min(voucher.max_claimable_amount))
    }

    /// Notes that the newest voucher is put into a claim, if there is something to claim.
    fn publish_claim(&mut self) {
        if let Some(claim) = self.claim() {
            self.published = self.published.max(claim.voucher.max_claimable_amount);
        }
    }

    fn observe(&mut self, observation: ChannelObservation, now: u64) -> Result<(), ChannelLedgerError> {
        if observation.state.channel_id != self.id {
            return Err(ChannelLedgerError::OtherChannel);
        }
        let is_possible = self.observed.time <= now.saturating_add(AHEAD);
        if is_possible && observation.is_before(&self.observed) {
            return Ok(());
        }
        let was_claimed = observation.state.total_claimed > self.observed.state.total_claimed;
        self.claimed_elsewhere |= observation.state.total_claimed > self.charged;
        self.observed = observation;
        self.observed_at = now;
        if self.unclaimed() == 0 {
            self.unclaimed_since = None;
            self.claimed_since = self.claimed_since.or(Some(now));
        } else {
            // What is left after a claim was charged while the claim was on its way.
            self.unclaimed_since = self.unclaimed_since.filter(|_| !was_claimed).or(Some(now));
            self.claimed_since = None;
        }
        Ok(())
    }

    fn begin(
        &mut self,
        (request, name): (B256, Option<RequestName>),
        voucher: &Voucher,
        price: u128,
        now: u64,
        until: u64,
    ) -> Result<(), ChannelLedgerError> {
        if voucher.channel_id != self.id {
            return Err(ChannelLedgerError::OtherChannel);
        }
        // A copy of the request may have been answered since the caller looked. If that cost nothing, the voucher would fit again.
        let is_named_alike = name.is_some_and(|name| self.answer_named(name.id).is_some());
        if self.answer_to(request).is_some() || is_named_alike {
            return Err(ChannelLedgerError::Answered(Box::new(self.clone())));
        }
        if let Some(pending) = self.pending.as_ref().filter(|pending| pending.until > now) {
            return Err(ChannelLedgerError::Busy { until: pending.until });
        }
        let max = voucher.max_claimable_amount;
        if self.charged().checked_add(price) != Some(max) {
            return Err(ChannelLedgerError::Mismatch(Box::new(self.clone())));
        }
        if price > 0 && max > self.covered() {
            return Err(ChannelLedgerError::ExceedsBalance(Box::new(self.clone())));
        }
        self.pending = Some(PendingRequest { request, name, voucher: voucher.clone(), price, until });
        if price > 0 {
            self.attempts = Some(Attempts { request, number: self.attempts_of(request).saturating_add(1) });
        }
        self.epoch += 1;
        self.used_at = now;
        Ok(())
    }

    fn charge(&mut self, epoch: u64, amount: u128, streamed: bool, now: u64) -> Result<(), ChannelLedgerError> {
        if self.answers.iter().any(|answer| answer.epoch == epoch) {
            return Ok(());
        }
        let Some(pending) = self.pending.as_ref().filter(|_| self.epoch == epoch) else {
            return Err(ChannelLedgerError::LeaseLost);
        };
        let total = self.charged().saturating_add(amount);
        if amount > pending.price || total > pending.voucher.max_claimable_amount {
            return Err(ChannelLedgerError::ExceedsVoucher);
        }
        if self.answers.len() >= ANSWERS {
            self.answers.pop_front();
        }
        let PendingRequest { request, name, .. } = *pending;
        let answer = Answer { request, epoch, charged: amount, total, at: now, name, replays: 0, streamed };
        self.answers.push_back(answer);
        if amount > 0 {
            self.voucher = Some(pending.voucher.clone());
            self.charged = total;
            self.unclaimed_since = self.unclaimed_since.or(Some(now));
            self.claimed_since = None;
        }
        self.pending = None;
        self.used_at = now;
        Ok(())
    }

    fn refund(&mut self, request: B256, amount: u128, now: u64, until: u64) -> Result<(), ChannelLedgerError> {
        let working = self.pending.as_ref().filter(|pending| pending.until > now);
        let bound = working.map_or(0, |pending| pending.voucher.max_claimable_amount).max(self.charged());
        let nonce = self.observed.state.refund_nonce;
        let open = self.open_refund().filter(|refund| refund.nonce == nonce);
        if let Some(other) = open.filter(|open| open.request != request && is_running(open.until, now, until)) {
            return Err(ChannelLedgerError::Busy { until: other.until });
        }
        // A refund that was signed before with this nonce may be executed in its place.
        let amount = amount.max(open.map_or(0, |refund| refund.amount));
        if self.covered_beside(amount) < bound {
            return Err(ChannelLedgerError::ExceedsBalance(Box::new(self.clone())));
        }
        if working.is_none() {
            // Its handler may still run, and must not charge for what is refunded.
            self.pending = None;
        }
        let charged = self.charged();
        let is_all = amount >= self.observed.state.balance.saturating_sub(charged);
        let asked_at = open.filter(|open| open.request == request).map_or(now, |open| open.asked_at);
        let is_first = open.is_none();
        self.refund =
            Some(LastRefund { request, nonce, amount, is_all, charged, asked_at, until, is_first, executed: None });
        self.publish_claim();
        Ok(())
    }
}

#[cfg(test)]
mod tests;
