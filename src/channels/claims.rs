//! Claims in the background: what was charged is claimed before it is at risk, and when that pays.
//!
//! Three tasks, so that none waits for another: one looks at channels, one claims what is due, and one claims at once what a withdrawal could
//! take, in `at_risk`.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Weak},
    time::Duration,
};

use alloy_primitives::{Address, B256};
use tokio::{sync::watch, task::JoinSet, time::sleep};
use tracing::Instrument as _;

use super::{Inner, LONGEST_TRUST, in_the_books};
use crate::{
    clock::age,
    facilitator::channels::{ChannelError, Claimed, RefusedClaim},
    ledger::channels::{ChannelLedgerError, ChannelRecord, ChannelStep},
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
/// How many of these are looked at or claimed side by side: as many as a key has transactions in flight.
pub(super) const SIDE_BY_SIDE: usize = 8;
/// How long after a claim became due selling on credit stops: time for many claims that are due at once, and for a few that fail.
const CLAIM_GRACE: Duration = Duration::from_secs(600);
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
    /// What may be unclaimed, if that is set.
    credit: Option<Usdc>,
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

    /// Sets how much of one channel may be charged and not claimed, whatever fails. A request that would go beyond it is answered 503, and
    /// nothing is charged for it, until something was claimed; a single request may cost more if nothing is unclaimed. Selling on a channel
    /// also stops ten minutes after a charge on it reached the [`age`](Self::age) and was not claimed. Default: a hundred times the
    /// [`amount`](Self::amount).
    ///
    /// From half of it on, the seller claims at once. A channel that is charged so much while a claim takes its few seconds has to wait.
    pub const fn credit(mut self, most: Usdc) -> Self {
        self.credit = Some(most);
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

    /// Returns what may be unclaimed of one channel, in atomic units.
    pub(super) fn most_unclaimed(&self) -> u128 {
        self.credit.map_or_else(|| u128::from(self.amount.atomic()).saturating_mul(100), |most| most.atomic().into())
    }

    /// Returns `true` if a request of this price may be sold on the channel: what is unclaimed is neither too much nor too old.
    pub(super) fn gives_credit(&self, record: &ChannelRecord, price: u128, now: u64) -> bool {
        let unclaimed = record.unclaimed();
        let longest = self.age.saturating_add(CLAIM_GRACE).as_secs();
        unclaimed == 0
            || (unclaimed.saturating_add(price) <= self.most_unclaimed()
                && record.unclaimed_since.is_none_or(|since| age(now, since) <= longest))
    }

    pub(super) const fn refunds_idle(&self) -> bool {
        self.idle.is_some()
    }

    /// Returns `true` if the channel is to be refunded although nobody asked.
    pub(super) fn is_idle(&self, record: &ChannelRecord, now: u64) -> bool {
        let Some((after, least)) = self.idle else { return false };
        let left = record.observed.state.balance.saturating_sub(record.charged());
        let is_free = record.pending.as_ref().is_none_or(|pending| pending.until <= now);
        is_free
            && now.saturating_sub(record.used_at) >= after.as_secs()
            && left >= u128::from(least.atomic()).max(1)
            && record.voucher.is_some()
            && record.observed.withdrawal == 0
    }

    fn is_due(&self, record: &ChannelRecord, now: u64) -> bool {
        let unclaimed = record.unclaimed();
        let is_old = record.unclaimed_since.is_some_and(|since| age(now, since) >= self.age.as_secs());
        unclaimed > 0 && (record.observed.withdrawal > 0 || unclaimed >= self.amount.atomic().into() || is_old)
    }
}

impl Default for ClaimPolicy {
    /// Returns $0.10 per channel, or one hour, with a credit of $10, and no refunds of idle channels.
    fn default() -> Self {
        Self { amount: Usdc::from_atomic(100_000), age: Duration::from_secs(3_600), credit: None, idle: None }
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
    /// Claims that were left out: the contract would have refused them, or the gas key cannot pay for them. They stay in the books.
    pub refused: Vec<RefusedClaim>,
}

/// A channel of which something is to be claimed.
#[derive(Clone, Copy, Debug)]
struct Due {
    id: ChannelId,
    at_risk: u128,
    since: u64,
}

impl Due {
    fn of(record: &ChannelRecord) -> Self {
        Self { id: record.id, at_risk: record.at_risk(), since: record.unclaimed_since.unwrap_or(0) }
    }
}

/// What was found in the books and on the chain.
#[derive(Clone, Debug, Default)]
struct Found {
    /// The channels to claim, in the order in which they are claimed.
    due: Vec<Due>,
    receivers: BTreeSet<(Address, Address)>,
}

/// What one transaction of claims did.
#[derive(Debug, Default)]
pub(super) struct Batch {
    report: ClaimReport,
    receivers: BTreeSet<(Address, Address)>,
}

/// Looks at channels and claims for as long as they are used.
pub(super) async fn run(channels: Weak<Inner>) {
    let (found, next) = watch::channel(Found::default());
    tokio::spawn(claim_what_is_due(channels.clone(), next));
    // Not held while it sleeps, so that dropping the last handle ends this task, at the latest after the interval.
    while let Some(inner) = channels.upgrade() {
        match pass(async move { inner.look(false).await }).await {
            Some(Ok(seen)) => drop(found.send_replace(seen)),
            Some(Err(error)) => tracing::warn!(%error, "channels could not be looked at; it is tried again"),
            None => {}
        }
        sleep(INTERVAL).await;
    }
}

/// Does a pass in a task of its own, so that one that panics does not end the loop. Returns `None` if it did.
pub(super) async fn pass<T: Send + 'static>(work: impl Future<Output = T> + Send + 'static) -> Option<T> {
    let done = tokio::spawn(work.in_current_span()).await.ok();
    if done.is_none() {
        tracing::error!("a pass over the channels panicked; it is tried again");
    }
    done
}

/// Claims what was found to be due, again and again.
async fn claim_what_is_due(channels: Weak<Inner>, mut found: watch::Receiver<Found>) {
    while found.changed().await.is_ok() {
        let found = found.borrow_and_update().clone();
        let Some(inner) = channels.upgrade() else { return };
        if let Some(Err(error)) = pass(async move { inner.claim_found(found).await }).await {
            tracing::warn!(%error, "channels could not be claimed; it is tried again");
        }
    }
}

impl Inner {
    /// Looks at channels that were not looked at for long, claims all that was charged, and has it transferred.
    pub(super) async fn claim_everything(self: &Arc<Self>) -> Result<ClaimReport, ChannelError> {
        self.claim_found(self.look(true).await?).await
    }

    /// Goes through the books once, and looks at the channels that were not looked at for long. Returns what is to be claimed: what is due,
    /// or all if `everything`.
    async fn look(self: &Arc<Self>, everything: bool) -> Result<Found, ChannelError> {
        let (mut sums, mut found, mut stale) = (BTreeMap::new(), Found::default(), Vec::new());
        let mut after = None;
        loop {
            let page = self.ledger.channels(after, TOGETHER).await.map_err(|error| in_the_books(error.into()))?;
            let Some(last) = page.last() else { break };
            after = Some(last.id);
            // Others may have the ledger, too: a seller on another chain, or one with another key.
            for record in page.into_iter().filter(|record| self.is_ours(record)) {
                match self.is_stale(&record) {
                    true => stale.push(record.id),
                    false => self.sort(&record, everything, &mut found, &mut sums),
                }
                if !everything {
                    self.notice(&record);
                }
            }
        }
        let mut looking = JoinSet::new();
        let mut parts = stale.chunks(TOGETHER);
        loop {
            while looking.len() < SIDE_BY_SIDE
                && let Some(part) = parts.next()
            {
                let (this, part) = (Arc::clone(self), part.to_vec());
                looking.spawn(async move { this.look_at(part, everything).await });
            }
            let Some(records) = looking.join_next().await else { break };
            for record in records.unwrap_or_default() {
                self.sort(&record, everything, &mut found, &mut sums);
            }
        }
        for (asset, sums) in &sums {
            telemetry::channels(self.facilitator.network(), *asset, sums);
        }
        // Not by their ids, which payers choose: what is at risk comes first, and then what is unclaimed for the longest time.
        found.due.sort_by_key(|due| (Reverse(due.at_risk), due.since));
        Ok(found)
    }

    /// Counts a channel, and notes it if it is to be claimed.
    fn sort(
        &self,
        record: &ChannelRecord,
        everything: bool,
        found: &mut Found,
        sums: &mut BTreeMap<Address, ChannelSums>,
    ) {
        let now = self.clock.now();
        add(sums.entry(record.config.token).or_default(), record, now);
        if everything {
            // What was claimed and not transferred, as after a crash, is transferred now.
            found.receivers.insert((record.config.receiver, record.config.token));
        }
        let is_due = match everything {
            true => record.unclaimed() > 0,
            // What is at risk is claimed by a task of its own.
            false => self.policy.is_due(record, now) && !self.at_risk.has(&record.id),
        };
        if is_due {
            found.due.push(Due::of(record));
        }
    }

    /// Claims these channels in several transactions side by side, and has what was claimed transferred. One that fails stops no other.
    async fn claim_found(self: &Arc<Self>, found: Found) -> Result<ClaimReport, ChannelError> {
        let Found { due, mut receivers } = found;
        let (mut report, mut failure) = (ClaimReport::default(), None);
        let (mut claiming, mut parts) = (JoinSet::new(), due.chunks(TOGETHER));
        loop {
            while claiming.len() < SIDE_BY_SIDE
                && let Some(part) = parts.next()
            {
                let (this, part) = (Arc::clone(self), part.iter().map(|due| due.id).collect());
                claiming.spawn(async move { this.claim(part, false).await });
            }
            let Some(claimed) = claiming.join_next().await else { break };
            match claimed.unwrap_or(Err(ChannelError::Pending { transaction: None })) {
                Ok(batch) => {
                    receivers.extend(batch.receivers);
                    report.claimed += batch.report.claimed;
                    report.transactions.extend(batch.report.transactions);
                    report.refused.extend(batch.report.refused);
                }
                Err(error) => failure = Some(error),
            }
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

    /// Has a channel claimed at once if a withdrawal is announced.
    pub(super) fn notice(&self, record: &ChannelRecord) {
        if record.observed.withdrawal > 0 && record.unclaimed() > 0 && self.is_ours(record) {
            self.at_risk.add(record.id, record.at_risk());
        }
    }

    /// Returns `true` if a channel that may not be forgotten yet was looked at long ago: a withdrawal may have been announced, or a
    /// reorganization may have removed a claim.
    fn is_stale(&self, record: &ChannelRecord) -> bool {
        let now = self.clock.now();
        let is_needed = record.voucher.is_some() && record.forget_at().is_none_or(|at| at > now);
        is_needed && age(now, record.observed_at) >= LONGEST_TRUST / 2
    }

    /// Looks at channels on the chain. Returns them as they are in the books then.
    async fn look_at(&self, ids: Vec<ChannelId>, everything: bool) -> Vec<ChannelRecord> {
        let observed = match self.facilitator.observe(&ids).await {
            Ok(observed) => observed,
            Err(error) => {
                tracing::warn!(%error, channels = ids.len(), "channels could not be looked at");
                Vec::new()
            }
        };
        let mut looked_at = Vec::with_capacity(ids.len());
        for id in ids {
            let seen = observed.iter().find(|seen| seen.state.channel_id == id);
            let record = match seen {
                Some(seen) => self.observe(*seen).await,
                None => None,
            };
            let record = match record {
                None => self.ledger.channel(&id).await.ok().flatten(),
                seen => seen,
            };
            looked_at.extend(record.inspect(|record| {
                if !everything {
                    self.notice(record);
                }
            }));
        }
        looked_at
    }

    async fn observe(&self, observation: ChannelObservation) -> Option<ChannelRecord> {
        let step = ChannelStep::Observe { observation, now: self.clock.now() };
        let observed = self.ledger.advance(&observation.state.channel_id, &step).await;
        let record = observed.inspect_err(|error| tracing::warn!(%error, "a channel's state was not recorded")).ok()?;
        self.find_refund(&record).await;
        Some(record)
    }

    /// Claims these channels in one transaction. If `anyhow`, also those that another process or task is claiming: it may hang.
    pub(super) async fn claim(&self, due: Vec<ChannelId>, anyhow: bool) -> Result<Batch, ChannelError> {
        let now = self.clock.now();
        let until = now + CLAIM_LEASE;
        let (mut held, mut rows) = (Vec::new(), Vec::new());
        for id in due {
            let step = ChannelStep::BeginClaim { now, until };
            let mut begun = self.ledger.advance(&id, &step).await;
            if let Err(ChannelLedgerError::Busy { until: running }) = &begun
                && anyhow
            {
                // Taken over, so that the books have what this claim publishes.
                let _ = self.ledger.advance(&id, &ChannelStep::EndClaim { until: *running }).await;
                begun = self.ledger.advance(&id, &step).await;
            }
            let record = match begun {
                Ok(record) => record,
                Err(ChannelLedgerError::NotFound) => {
                    self.at_risk.claimed(&id);
                    continue;
                }
                // Another process has it, or the ledger failed: it is due the next time, too.
                Err(_) => continue,
            };
            match record.claim() {
                Some(row) => {
                    rows.push(row);
                    held.push(record);
                }
                None => {
                    let _ = self.ledger.advance(&id, &ChannelStep::EndClaim { until }).await;
                    self.at_risk.claimed(&id);
                }
            }
        }
        if rows.is_empty() {
            return Ok(Batch::default());
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
            let ended = self.ledger.advance(&record.id, &ChannelStep::EndClaim { until }).await;
            let is_refused = |claimed: &Claimed| claimed.refused.iter().any(|refused| refused.channel == record.id);
            match &claimed {
                Ok(claimed) if !is_refused(claimed) => {
                    self.at_risk.claimed(&record.id);
                    // The claim has nothing of what was charged after it was signed.
                    if let Ok(record) = ended {
                        self.notice(&record);
                    }
                }
                _ if record.at_risk() > 0 => self.at_risk.failed(record.id, record.at_risk()),
                _ => {}
            }
        }
        let claimed = claimed?;
        let receivers = held.iter().map(|record| (record.config.receiver, record.config.token)).collect();
        let Claimed { amount, transactions, refused, .. } = claimed;
        Ok(Batch { report: ClaimReport { claimed: amount, settled: 0, transactions, refused }, receivers })
    }

    /// Has what a batch claimed transferred.
    pub(super) async fn settle(&self, batch: Batch) {
        for (receiver, token) in batch.receivers {
            if let Err(error) = self.facilitator.settle(receiver, token).await {
                tracing::warn!(%error, "what was claimed could not be transferred; it is tried again after the next claim");
            }
        }
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
        let observation = ChannelObservation { state, withdrawal, block: 1, time: NOW };
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
        assert!(policy.is_due(&channel(1, 0), NOW - 61), "the clock was set back");
    }

    #[test]
    fn credit_ends_at_its_amount_and_with_the_age_of_what_is_unclaimed() {
        let policy = ClaimPolicy::default().amount(Usdc::from_atomic(10)).age(Duration::from_secs(60));
        for (credit, unclaimed, price, age, is_given) in [
            (None, 999, 1, 0, true),
            (None, 999, 2, 0, false),
            (Some(20), 10, 10, 0, true),
            (Some(20), 10, 11, 0, false),
            (Some(20), 0, 500, 0, true),
            (Some(0), 0, 1, 0, true),
            (Some(0), 1, 1, 0, false),
            (None, 1, 1, 660, true),
            (None, 1, 1, 661, false),
            (None, 0, 1, 661, true),
        ] {
            let policy = credit.map_or(policy, |most| policy.credit(Usdc::from_atomic(most)));
            let is = policy.gives_credit(&channel(unclaimed, 0), price, NOW + age);
            assert_eq!(is, is_given, "{credit:?} {unclaimed} {price} {age}");
        }
        assert!(!policy.gives_credit(&channel(1, 0), 1, NOW - 61), "the clock was set back");
    }
}
