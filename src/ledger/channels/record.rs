//! The state machine of one channel.

use std::{collections::VecDeque, sync::Arc};

use alloy_primitives::{B256, keccak256};
use serde::{Deserialize, Serialize};

use super::{super::StoredResponse, ChannelLedgerError};
use crate::{
    network::Network,
    payment::PaymentKey,
    vouchers::{ChannelConfig, ChannelId, ChannelState, Claim, ClaimedVoucher, Observation, Voucher},
};

/// The number of answers that are remembered of a channel. One request at a time is worked on, and a payer signs the next voucher
/// when it knows what became of the last, so that one would do.
const ANSWERS: usize = 4;

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
    pub config: ChannelConfig,
    /// What was charged in all, the watermark. It never falls.
    #[serde(with = "crate::vouchers::amount")]
    pub charged: u128,
    /// The newest voucher that something was charged by; `None` if nothing was charged by this ledger.
    pub voucher: Option<Voucher>,
    /// The channel as the chain had it when it was last looked at.
    pub observed: Observation,
    /// When that was.
    pub observed_at: u64,
    /// The request that holds the channel.
    pub pending: Option<PendingRequest>,
    /// Counts the requests that held the channel.
    pub epoch: u64,
    /// The last requests that were charged for.
    pub answers: VecDeque<Answer>,
    /// When it was used last.
    pub used_at: u64,
    /// Since when something is unclaimed.
    pub unclaimed_since: Option<u64>,
    /// Until when one process claims or refunds.
    pub claiming_until: Option<u64>,
}

/// A request that holds its channel.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[non_exhaustive]
pub struct PendingRequest {
    /// Identifies the request ([`ChannelRecord::request_key`]).
    pub request: B256,
    /// The voucher that pays for it.
    pub voucher: Voucher,
    /// The most that it may cost.
    #[serde(with = "crate::vouchers::amount")]
    pub price: u128,
    /// When another request may take the channel over.
    pub until: u64,
}

/// A request that was answered and charged for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[non_exhaustive]
pub struct Answer {
    /// Identifies the request ([`ChannelRecord::request_key`]).
    pub request: B256,
    /// What it cost.
    #[serde(with = "crate::vouchers::amount")]
    pub charged: u128,
    /// The watermark after it.
    #[serde(with = "crate::vouchers::amount")]
    pub total: u128,
    /// When it was answered.
    pub at: u64,
}

/// A step on a channel.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum ChannelStep {
    /// Creates the channel as the chain has it: what was charged before is what was claimed. A channel that is known is observed.
    Open {
        /// The chain.
        network: Network,
        /// What makes the channel.
        config: ChannelConfig,
        /// The channel as the chain has it.
        observation: Observation,
        /// When it was observed.
        now: u64,
    },
    /// Notes how the chain has the channel. One from an earlier block than the last is ignored.
    Observe {
        /// The channel as the chain has it.
        observation: Observation,
        /// When it was observed.
        now: u64,
    },
    /// Gives the channel to a request. For a refund, the price is 0.
    Begin {
        /// Identifies the request ([`ChannelRecord::request_key`]).
        request: B256,
        /// The voucher that pays for it, which was authenticated.
        voucher: Voucher,
        /// The most that it may cost.
        price: u128,
        /// The time.
        now: u64,
        /// When another request may take the channel over.
        until: u64,
    },
    /// Charges for the request that holds the channel, and frees the channel.
    Charge {
        /// The epoch that `Begin` left.
        epoch: u64,
        /// What the request cost.
        amount: u128,
        /// The response to keep.
        response: Option<Arc<StoredResponse>>,
        /// The time.
        now: u64,
    },
    /// Frees the channel without a charge. Does nothing if it was taken over meanwhile.
    Release {
        /// The epoch that `Begin` left.
        epoch: u64,
    },
    /// Reserves the channel for one process to claim or refund.
    BeginClaim {
        /// The time.
        now: u64,
        /// When another process may claim.
        until: u64,
    },
    /// Ends that.
    EndClaim,
}

impl ChannelRecord {
    /// Returns a channel that is opened as the chain has it.
    pub fn open(network: Network, config: ChannelConfig, observation: Observation, now: u64) -> Self {
        Self {
            id: observation.state.channel_id,
            network,
            config,
            charged: observation.state.total_claimed,
            voucher: None,
            observed: observation,
            observed_at: now,
            pending: None,
            epoch: 0,
            answers: VecDeque::new(),
            used_at: now,
            unclaimed_since: None,
            claiming_until: None,
        }
    }

    /// Returns what identifies a request: the voucher and all that the response depends on, the digest of which is `request`. A payer
    /// that did not get its answer presents the same voucher with the same request.
    pub fn request_key(voucher: &Voucher, request: B256) -> B256 {
        let max = voucher.max_claimable_amount.to_be_bytes();
        let signature = voucher.signature.as_bytes();
        keccak256([voucher.channel_id.digest().as_slice(), &max, signature, request.as_slice()].concat())
    }

    /// Returns the key under which the response to a request is kept.
    pub fn response_key(&self, request: B256) -> PaymentKey {
        let ChannelConfig { token, payer, .. } = self.config;
        PaymentKey { network: self.network, asset: token, payer, nonce: request }
    }

    /// Returns the answer that a request got, if it is remembered.
    pub fn answer_to(&self, request: B256) -> Option<&Answer> {
        self.answers.iter().find(|answer| answer.request == request)
    }

    /// Returns the most that vouchers may be for: what is in escrow, without what a withdrawal that was announced could take.
    pub fn covered(&self) -> u128 {
        self.observed.state.balance.saturating_sub(self.observed.withdrawal)
    }

    /// Returns what was charged and is not claimed.
    pub fn unclaimed(&self) -> u128 {
        self.charged.saturating_sub(self.observed.state.total_claimed)
    }

    /// Returns the row that claims all that was charged, if there is anything to claim.
    pub fn claim(&self) -> Option<Claim> {
        let voucher = self.voucher.as_ref().filter(|_| self.unclaimed() > 0)?;
        Some(Claim {
            voucher: ClaimedVoucher { channel: self.config, max_claimable_amount: voucher.max_claimable_amount },
            signature: voucher.signature,
            total_claimed: self.charged.min(voucher.max_claimable_amount),
        })
    }

    /// Returns the channel's state as payers are told it.
    pub fn state(&self) -> ChannelState {
        ChannelState { charged_cumulative_amount: Some(self.charged), ..self.observed.state }
    }

    /// Returns `true` if the ledger may forget the channel: the chain knows all that was charged, and nobody works on it.
    pub fn is_forgettable(&self, now: u64) -> bool {
        self.unclaimed() == 0
            && self.pending.as_ref().is_none_or(|pending| pending.until <= now)
            && self.claiming_until.is_none_or(|until| until <= now)
    }

    /// Takes a step, or changes nothing.
    ///
    /// # Errors
    /// - `Begin`: [`ChannelLedgerError::Busy`], [`ChannelLedgerError::Mismatch`] or [`ChannelLedgerError::ExceedsBalance`].
    /// - `Charge`: [`ChannelLedgerError::LeaseLost`] or [`ChannelLedgerError::ExceedsVoucher`].
    /// - `BeginClaim`: [`ChannelLedgerError::Busy`].
    pub fn apply(&mut self, step: &ChannelStep) -> Result<(), ChannelLedgerError> {
        match step {
            ChannelStep::Open { observation, now, .. } | ChannelStep::Observe { observation, now } => {
                self.observe(*observation, *now);
                Ok(())
            }
            ChannelStep::Begin { request, voucher, price, now, until } => {
                self.begin(*request, voucher, *price, *now, *until)
            }
            ChannelStep::Charge { epoch, amount, now, .. } => self.charge(*epoch, *amount, *now),
            ChannelStep::Release { epoch } => {
                if self.epoch == *epoch {
                    self.pending = None;
                }
                Ok(())
            }
            ChannelStep::BeginClaim { now, until } => {
                if let Some(running) = self.claiming_until.filter(|running| running > now) {
                    return Err(ChannelLedgerError::Busy { until: running });
                }
                self.claiming_until = Some(*until);
                Ok(())
            }
            ChannelStep::EndClaim => {
                self.claiming_until = None;
                Ok(())
            }
        }
    }

    fn observe(&mut self, observation: Observation, now: u64) {
        if observation.block < self.observed.block {
            return;
        }
        self.observed = observation;
        self.observed_at = now;
        // Somebody with the authorizer's key claimed more than this ledger knows of, as after a restored backup.
        self.charged = self.charged.max(observation.state.total_claimed);
        self.unclaimed_since = (self.unclaimed() > 0).then_some(self.unclaimed_since.unwrap_or(now));
    }

    fn begin(
        &mut self,
        request: B256,
        voucher: &Voucher,
        price: u128,
        now: u64,
        until: u64,
    ) -> Result<(), ChannelLedgerError> {
        if let Some(pending) = self.pending.as_ref().filter(|pending| pending.until > now) {
            return Err(ChannelLedgerError::Busy { until: pending.until });
        }
        let max = voucher.max_claimable_amount;
        if self.charged.checked_add(price) != Some(max) {
            return Err(ChannelLedgerError::Mismatch(Box::new(self.clone())));
        }
        if max > self.covered() {
            return Err(ChannelLedgerError::ExceedsBalance(Box::new(self.clone())));
        }
        self.pending = Some(PendingRequest { request, voucher: voucher.clone(), price, until });
        self.epoch += 1;
        self.used_at = now;
        Ok(())
    }

    fn charge(&mut self, epoch: u64, amount: u128, now: u64) -> Result<(), ChannelLedgerError> {
        let Some(pending) = self.pending.as_ref().filter(|_| self.epoch == epoch) else {
            return Err(ChannelLedgerError::LeaseLost);
        };
        let total = self.charged.saturating_add(amount);
        if amount > pending.price || total > pending.voucher.max_claimable_amount {
            return Err(ChannelLedgerError::ExceedsVoucher);
        }
        if amount > 0 {
            self.voucher = Some(pending.voucher.clone());
            self.charged = total;
            self.unclaimed_since = self.unclaimed_since.or(Some(now));
        }
        if self.answers.len() >= ANSWERS {
            self.answers.pop_front();
        }
        self.answers.push_back(Answer { request: pending.request, charged: amount, total, at: now });
        self.pending = None;
        self.used_at = now;
        Ok(())
    }
}
