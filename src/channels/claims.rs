//! Claims in the background: what was charged is claimed before it is at risk, and when that pays.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, PoisonError, Weak},
    time::Duration,
};

use alloy_primitives::{Address, B256};
use tokio::time::timeout;

use super::{Inner, LONGEST_TRUST, in_the_books};
use crate::{
    facilitator::channels::{ChannelError, RefusedClaim},
    ledger::channels::{ChannelRecord, ChannelStep},
    telemetry::{self, ChannelSums},
    usdc::Usdc,
    vouchers::{ChannelId, ChannelObservation},
};

/// How often the books are gone through.
pub(super) const INTERVAL: Duration = Duration::from_secs(30);
/// What a claim may take: the interval, a node that is two minutes behind, and a transaction that is replaced.
pub(super) const TIME_TO_CLAIM: Duration = Duration::from_secs(240);
/// The number of channels that are read from the books, looked at on the chain, or claimed in one transaction.
pub(super) const TOGETHER: usize = 100;
/// For how long one process has a channel to claim, in seconds. A transaction that hangs is replaced within that time.
pub(super) const CLAIM_LEASE: u64 = 180;

/// When to claim what was charged, and when to refund the rest.
///
/// A claim costs about 24,000 gas per channel and 50,000 per transaction, however much is claimed. If the payer announces a withdrawal,
/// all of its channel is claimed at once, whatever the policy.
///
/// ```
/// use std::time::Duration;
/// use tower_x402::{Usdc, channels::ClaimPolicy};
///
/// let policy = ClaimPolicy::default().amount(Usdc::from_atomic(1_000_000)).age(Duration::from_secs(86_400));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub struct ClaimPolicy {
    amount: Usdc,
    age: Duration,
    /// After how long without use a channel is refunded, and what must be left in it.
    idle: Option<(Duration, Usdc)>,
}

impl ClaimPolicy {
    /// Sets how much of one channel may be charged before it is claimed. Default: $0.10.
    pub const fn amount(mut self, amount: Usdc) -> Self {
        self.amount = amount;
        self
    }

    /// Sets how long a charge may stay unclaimed. Default: one hour.
    pub const fn age(mut self, age: Duration) -> Self {
        self.age = age;
        self
    }

    /// Also refunds channels that were not used for `after`, in whole seconds, if at least `least` is left in them. Default: off.
    ///
    /// What was charged is claimed in the same transaction. Each refund costs the seller some 148,000 gas, and the deposit of a payer that
    /// comes back 136,000 more, which is why `least` should be worth it. It is off because payers get their money without it: by asking for
    /// a refund, or by a withdrawal. The next request of a payer that was refunded gets 402, and is paid with another deposit.
    ///
    /// Not refunded are channels from which nothing was charged yet, or in which a withdrawal is announced, and those that a full ledger
    /// has forgotten. A refund whose transaction reverts is tried again, after pauses that grow up to an hour.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_x402::{Usdc, channels::ClaimPolicy};
    ///
    /// let month = Duration::from_secs(30 * 86_400);
    /// let policy = ClaimPolicy::default().refund_idle(month, Usdc::from_atomic(50_000));
    /// ```
    pub const fn refund_idle(mut self, after: Duration, least: Usdc) -> Self {
        self.idle = Some((after, least));
        self
    }

    pub(super) const fn refunds_idle(&self) -> bool {
        self.idle.is_some()
    }

    /// Returns `true` if the channel is to be refunded although nobody asked.
    pub(super) fn is_idle(&self, record: &ChannelRecord, now: u64) -> bool {
        let Some((after, least)) = self.idle else { return false };
        let left = record.observed.state.balance.saturating_sub(record.charged);
        let is_free = record.pending.as_ref().is_none_or(|pending| pending.until <= now);
        is_free
            && now.saturating_sub(record.used_at) >= after.as_secs()
            && left >= u128::from(least.atomic()).max(1)
            && record.voucher.is_some()
            && record.observed.withdrawal == 0
    }

    fn is_due(&self, record: &ChannelRecord, now: u64) -> bool {
        let unclaimed = record.unclaimed();
        let is_old = record.unclaimed_since.is_some_and(|since| now.saturating_sub(since) >= self.age.as_secs());
        unclaimed > 0 && (record.observed.withdrawal > 0 || unclaimed >= self.amount.atomic().into() || is_old)
    }
}

impl Default for ClaimPolicy {
    /// Returns $0.10 per channel, or one hour, and no refunds of idle channels.
    fn default() -> Self {
        Self { amount: Usdc::from_atomic(100_000), age: Duration::from_secs(3_600), idle: None }
    }
}

/// What a pass over the channels claimed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ClaimReport {
    /// The amount that was claimed, in atomic units.
    pub claimed: u128,
    /// The amount that was transferred to receivers, in atomic units.
    pub settled: u128,
    /// The transactions of both.
    pub transactions: Vec<B256>,
    /// Claims that the contract would have refused. They stay in the books.
    pub refused: Vec<RefusedClaim>,
}

/// Claims for as long as the channels are used.
pub(super) async fn run(channels: Weak<Inner>) {
    loop {
        let Some(inner) = channels.upgrade() else { return };
        if let Err(error) = inner.pass(false).await {
            tracing::warn!(%error, "channels could not be claimed; it is tried again");
        }
        // Not held while it sleeps, so that dropping the last handle ends this task, at the latest after the interval.
        let woken = {
            let weak = Arc::downgrade(&inner);
            drop(inner);
            async move {
                match weak.upgrade() {
                    Some(inner) => inner.wake.notified().await,
                    None => std::future::pending().await,
                }
            }
        };
        let _ = timeout(INTERVAL, woken).await;
    }
}

impl Inner {
    /// Goes through the books once: looks at channels that were not looked at for long, claims what is due, or all if `everything`, and has
    /// what was claimed transferred.
    pub(super) async fn pass(&self, everything: bool) -> Result<ClaimReport, ChannelError> {
        let mut report = ClaimReport::default();
        let mut receivers = BTreeSet::new();
        let (mut after, mut failure) = (None, None);
        let (mut sums, mut failing) = (BTreeMap::<Address, ChannelSums>::new(), 0_u128);
        loop {
            let page = self.ledger.channels(after, TOGETHER).await.map_err(|error| in_the_books(error.into()))?;
            let Some(last) = page.last() else { break };
            after = Some(last.id);
            // Others may have the ledger, too: a seller on another chain, or one with another key.
            let page = page.into_iter().filter(|record| self.is_ours(record)).collect();
            let page = self.look_at_stale(page).await;
            if everything {
                // What was claimed and not transferred, as after a crash, is transferred now.
                receivers.extend(page.iter().map(|record| (record.config.receiver, record.config.token)));
            }
            let now = self.clock.now();
            let is_due = |record: &ChannelRecord| match everything {
                true => record.unclaimed() > 0,
                false => self.policy.is_due(record, now),
            };
            for record in &page {
                add(sums.entry(record.config.token).or_default(), record, now);
            }
            let due: Vec<_> = page.into_iter().filter(is_due).collect();
            let at_risk = due.iter().map(ChannelRecord::at_risk).fold(0, u128::saturating_add);
            if let Err(error) = self.claim(due, &mut report, &mut receivers).await {
                failure = Some(error);
                failing = failing.saturating_add(at_risk);
            }
        }
        *self.failing.lock().unwrap_or_else(PoisonError::into_inner) = failing;
        for (asset, sums) in &sums {
            telemetry::channels(self.facilitator.network(), *asset, sums);
        }
        for (receiver, token) in receivers {
            match self.facilitator.settle(receiver, token).await {
                Ok(Some(settled)) => {
                    report.settled += settled.amount;
                    report.transactions.push(settled.transaction);
                }
                Ok(None) => {}
                Err(error) => failure = Some(error),
            }
        }
        match failure {
            Some(error) if report.transactions.is_empty() => Err(error),
            Some(error) => {
                tracing::warn!(%error, "some channels could not be claimed; it is tried again");
                Ok(report)
            }
            None => Ok(report),
        }
    }

    /// Returns `true` if the channel is on this chain, and this seller's key claims from it.
    pub(super) fn is_ours(&self, record: &ChannelRecord) -> bool {
        record.network == self.facilitator.network() && record.config.receiver_authorizer == self.authorizer.address()
    }

    /// Looks at the channels that may not be forgotten yet, if that was long ago: a withdrawal may have been announced, or a reorganization
    /// may have removed a claim.
    async fn look_at_stale(&self, page: Vec<ChannelRecord>) -> Vec<ChannelRecord> {
        let now = self.clock.now();
        let is_stale = |record: &ChannelRecord| {
            let is_needed = record.voucher.is_some() && record.forget_at().is_none_or(|at| at > now);
            is_needed && now.saturating_sub(record.observed_at) >= LONGEST_TRUST / 2
        };
        let stale: Vec<ChannelId> = page.iter().filter(|record| is_stale(record)).map(|record| record.id).collect();
        if stale.is_empty() {
            return page;
        }
        let observed = match self.facilitator.observe(&stale).await {
            Ok(observed) => observed,
            Err(error) => {
                tracing::warn!(%error, channels = stale.len(), "channels could not be looked at");
                return page;
            }
        };
        let mut looked_at = Vec::with_capacity(page.len());
        for record in page {
            let seen = observed.iter().find(|seen| seen.state.channel_id == record.id);
            looked_at.push(match seen {
                Some(seen) => self.observe(*seen).await.unwrap_or(record),
                None => record,
            });
        }
        looked_at
    }

    async fn observe(&self, observation: ChannelObservation) -> Option<ChannelRecord> {
        let step = ChannelStep::Observe { observation, now: self.clock.now() };
        let observed = self.ledger.advance(&observation.state.channel_id, &step).await;
        observed.inspect_err(|error| tracing::warn!(%error, "a channel's state was not recorded")).ok()
    }

    /// Claims these channels in one transaction.
    async fn claim(
        &self,
        due: Vec<ChannelRecord>,
        report: &mut ClaimReport,
        receivers: &mut BTreeSet<(Address, Address)>,
    ) -> Result<(), ChannelError> {
        let now = self.clock.now();
        let until = now + CLAIM_LEASE;
        let (mut held, mut rows) = (Vec::new(), Vec::new());
        for record in due {
            let step = ChannelStep::BeginClaim { now, until };
            // Another process has it, or the ledger failed: it is due the next time, too.
            let Ok(record) = self.ledger.advance(&record.id, &step).await else { continue };
            rows.extend(record.claim());
            held.push(record);
        }
        if rows.is_empty() {
            return Ok(());
        }
        let claimed = self.facilitator.claim(&rows, &self.authorizer).await;
        if let Ok(claimed) = &claimed {
            for observation in &claimed.observed {
                self.observe(*observation).await;
            }
            for refused in &claimed.refused {
                tracing::error!(channel = %refused.channel, detail = %refused.detail, "a claim was left out of its batch");
            }
        }
        for record in &held {
            // If it fails, the lease ends by itself.
            let _ = self.ledger.advance(&record.id, &ChannelStep::EndClaim { until }).await;
        }
        let claimed = claimed?;
        receivers.extend(held.iter().map(|record| (record.config.receiver, record.config.token)));
        report.claimed += claimed.amount;
        report.transactions.extend(claimed.transactions);
        report.refused.extend(claimed.refused);
        Ok(())
    }
}

fn add(sums: &mut ChannelSums, record: &ChannelRecord, now: u64) {
    sums.open += u64::from(record.observed.state.available() > 0);
    sums.unclaimed = sums.unclaimed.saturating_add(record.unclaimed());
    sums.at_risk = sums.at_risk.saturating_add(record.at_risk());
    sums.oldest = sums.oldest.max(record.unclaimed_since.map_or(0, |since| now.saturating_sub(since)));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        network::Network,
        vouchers::{ChannelConfig, ChannelState, Escrow, Voucher, VoucherSignature},
    };

    const NOW: u64 = 1_800_000_000;

    /// A channel of which this much is unclaimed since `NOW`, and this much is about to be withdrawn.
    fn channel(unclaimed: u128, withdrawal: u128) -> ChannelRecord {
        let config = ChannelConfig {
            payer: Address::repeat_byte(1),
            payer_authorizer: Address::repeat_byte(2),
            receiver: Address::repeat_byte(3),
            receiver_authorizer: Address::repeat_byte(4),
            token: Address::repeat_byte(5),
            withdraw_delay: 900,
            salt: B256::ZERO,
        };
        let channel_id = Escrow::on(Network::BASE).channel_id(&config);
        let state = ChannelState {
            channel_id,
            balance: 1_000,
            total_claimed: 0,
            withdraw_requested_at: 0,
            refund_nonce: 0,
            charged_cumulative_amount: None,
        };
        let observation = ChannelObservation { state, withdrawal, block: 1 };
        let mut record = ChannelRecord::open(Network::BASE, config, observation, NOW).unwrap();
        if unclaimed > 0 {
            let mut signature = [1; 65];
            signature[64] = 27;
            let signature = VoucherSignature::try_from(signature).unwrap();
            record.charged = unclaimed;
            record.voucher = Some(Voucher { channel_id, max_claimable_amount: unclaimed, signature });
            record.unclaimed_since = Some(NOW);
        }
        record
    }

    #[test]
    fn a_claim_is_due_for_its_amount_its_age_or_a_withdrawal_and_never_for_nothing() {
        let policy = ClaimPolicy::default().amount(Usdc::from_atomic(100)).age(Duration::from_secs(60));
        for (unclaimed, withdrawal, age, is_due) in [
            (99, 0, 59, false),
            (100, 0, 0, true),
            (101, 0, 0, true),
            (1, 0, 60, true),
            (1, 0, 61, true),
            (1, 5, 0, true),
            (0, 0, 61, false),
            (0, 5, 61, false),
        ] {
            let record = channel(unclaimed, withdrawal);
            assert_eq!(policy.is_due(&record, NOW + age), is_due, "{unclaimed} {withdrawal} {age}");
        }
    }
}
