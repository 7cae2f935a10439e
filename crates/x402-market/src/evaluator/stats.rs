//! What an evaluator judged and earned.

use std::{
    collections::BTreeMap,
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    time::{Duration, Instant},
};

use alloy_primitives::{Address, U256};
use serde::{Serialize, Serializer};
use tokio::sync::Mutex;
use tower_x402::{
    Network,
    ledger::{Ledger, LedgerError, Listing, SettlementState, channels::ChannelLedger},
};

use crate::{AgentCard, judge::JudgeError};

/// The statistics of an evaluator, as `GET /stats` returns them.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct EvaluatorStats {
    /// The number of calls of the judge since the start.
    pub asked: u64,
    /// The results by skill.
    pub skills: BTreeMap<String, SkillStats>,
    /// The payee's income by token, from what the ledgers still have on record: settled payments, and what was charged by voucher,
    /// claimed or not. A channel is forgotten about an hour after all of it was claimed, and counts again when it is used again. `None` if
    /// a ledger cannot be read.
    pub earned: Option<Vec<Earnings>>,
}

/// The results of the submissions for one skill since the start.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct SkillStats {
    /// Submissions that were judged.
    pub judged: u64,
    /// The outputs of these submissions.
    pub outputs: u64,
    /// The mean time to judge one of them, in milliseconds.
    pub mean_latency_ms: f64,
    /// Submissions that the judge rejected.
    pub not_taken: u64,
    /// Submissions on which the judge failed.
    pub failed: u64,
    /// Submissions that exceeded the time limit.
    pub late: u64,
    /// Submissions that were refused because too many were being judged.
    pub busy: u64,
}

/// The earnings in one token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Earnings {
    /// The chain.
    pub network: Network,
    /// The token.
    pub asset: Address,
    /// The number of settled payments, without those by voucher.
    pub payments: u64,
    /// The number of payment channels in which something was charged.
    pub channels: u64,
    /// The sum of the settled payments and of what was charged in these channels since they were opened, in atomic units.
    #[serde(serialize_with = "decimal")]
    pub units: U256,
}

fn decimal<S: Serializer>(amount: &U256, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(amount)
}

/// How the judging of a submission ended.
#[derive(Clone, Copy, Debug)]
pub(super) enum JudgingResult {
    Judged { outputs: u64, took: Duration },
    Rejected,
    Failed,
    Late,
    Busy,
}

impl JudgingResult {
    pub(super) const fn of(error: &JudgeError) -> Self {
        match error {
            JudgeError::Rejected(_) => Self::Rejected,
            JudgeError::Busy { .. } => Self::Busy,
            JudgeError::Failed(_) => Self::Failed,
        }
    }
}

#[derive(Debug, Default)]
struct Counter {
    judged: AtomicU64,
    outputs: AtomicU64,
    micros: AtomicU64,
    not_taken: AtomicU64,
    failed: AtomicU64,
    late: AtomicU64,
    busy: AtomicU64,
}

/// Counters by skill. The skills of the card bound their number.
#[derive(Debug)]
pub(super) struct Counters {
    asked: AtomicU64,
    skills: BTreeMap<String, Counter>,
}

impl Counters {
    pub(super) fn new(card: &AgentCard) -> Self {
        let skills = card.skills.iter().map(|skill| (skill.id.clone(), Counter::default())).collect();
        Self { asked: AtomicU64::new(0), skills }
    }

    /// Counts a call of the judge.
    pub(super) fn begin(&self) {
        self.asked.fetch_add(1, Relaxed);
    }

    /// Returns a guard that counts one submission when it is dropped.
    pub(super) const fn submission<'a>(&'a self, skill: &'a str) -> SubmissionCount<'a> {
        SubmissionCount { counters: self, skill, result: JudgingResult::Failed }
    }

    fn count(&self, skill: &str, result: JudgingResult) {
        let Some(counter) = self.skills.get(skill) else { return };
        let number = match result {
            JudgingResult::Judged { outputs, took } => {
                counter.outputs.fetch_add(outputs, Relaxed);
                counter.micros.fetch_add(took.as_micros().try_into().unwrap_or(u64::MAX), Relaxed);
                &counter.judged
            }
            JudgingResult::Rejected => &counter.not_taken,
            JudgingResult::Failed => &counter.failed,
            JudgingResult::Late => &counter.late,
            JudgingResult::Busy => &counter.busy,
        };
        number.fetch_add(1, Relaxed);
    }

    /// Returns the statistics without the earnings.
    pub(super) fn stats(&self) -> EvaluatorStats {
        let skills = self.skills.iter().map(|(skill, counter)| (skill.clone(), counter.stats())).collect();
        EvaluatorStats { asked: self.asked.load(Relaxed), skills, earned: None }
    }
}

/// Counts one submission on drop: as failed, unless another result was set. A judge that panics sets none.
#[derive(Debug)]
pub(super) struct SubmissionCount<'a> {
    counters: &'a Counters,
    skill: &'a str,
    pub(super) result: JudgingResult,
}

impl Drop for SubmissionCount<'_> {
    fn drop(&mut self) {
        self.counters.count(self.skill, self.result);
    }
}

impl Counter {
    fn stats(&self) -> SkillStats {
        let judged = self.judged.load(Relaxed);
        #[allow(clippy::cast_precision_loss)]
        let mean = self.micros.load(Relaxed) as f64 / 1_000.0 / judged.max(1) as f64;
        SkillStats {
            judged,
            outputs: self.outputs.load(Relaxed),
            mean_latency_ms: (mean * 1_000.0).round() / 1_000.0,
            not_taken: self.not_taken.load(Relaxed),
            failed: self.failed.load(Relaxed),
            late: self.late.load(Relaxed),
            busy: self.busy.load(Relaxed),
        }
    }
}

/// How many channels are read at a time.
const CHANNELS_PER_PAGE: usize = 1_000;

/// Adds up what a payee was paid.
///
/// That reads all of both ledgers, so the sum is reused for twenty times as long as it took. Frequent requests cost at most a twentieth of a
/// core.
#[derive(Debug)]
pub(super) struct Income {
    pay_to: Address,
    last: Mutex<Option<Sum>>,
}

#[derive(Debug)]
struct Sum {
    earned: Vec<Earnings>,
    valid_until: Instant,
}

impl Income {
    pub(super) fn of(pay_to: Address) -> Self {
        Self { pay_to, last: Mutex::default() }
    }

    pub(super) async fn earned(
        &self,
        ledger: &dyn Ledger,
        channels: Option<&dyn ChannelLedger>,
    ) -> Result<Vec<Earnings>, LedgerError> {
        // Requests that waited for the lock find the sum.
        let mut last = self.last.lock().await;
        let started = Instant::now();
        if let Some(sum) = &*last
            && started < sum.valid_until
        {
            return Ok(sum.earned.clone());
        }
        let earned = self.add_up(ledger, channels).await?;
        let valid_until = Instant::now() + started.elapsed() * 20;
        *last = Some(Sum { earned: earned.clone(), valid_until });
        Ok(earned)
    }

    async fn add_up(
        &self,
        ledger: &dyn Ledger,
        channels: Option<&dyn ChannelLedger>,
    ) -> Result<Vec<Earnings>, LedgerError> {
        let mut sums = Sums::default();
        let mut paid = Listing::of([SettlementState::Settled, SettlementState::Final]);
        loop {
            let page = ledger.list(&paid).await?;
            let Some(last) = page.last() else { break };
            paid.after = Some(last.key);
            for record in page.iter().filter(|record| record.terms.offer().pay_to == self.pay_to) {
                let sum = sums.of(record.key.network, record.key.asset);
                sum.payments += 1;
                sum.units = sum.units.saturating_add(record.authorization.value);
            }
        }
        let mut after = None;
        while let Some(channels) = channels {
            let page = channels.channels(after, CHANNELS_PER_PAGE).await?;
            let Some(last) = page.last() else { break };
            after = Some(last.id);
            for record in page.iter().filter(|record| record.config.receiver == self.pay_to && record.charged() > 0) {
                let sum = sums.of(record.network, record.config.token);
                sum.channels += 1;
                sum.units = sum.units.saturating_add(U256::from(record.charged()));
            }
        }
        Ok(sums.0.into_values().collect())
    }
}

#[derive(Default)]
struct Sums(BTreeMap<(Network, Address), Earnings>);

impl Sums {
    fn of(&mut self, network: Network, asset: Address) -> &mut Earnings {
        let none = Earnings { network, asset, payments: 0, channels: 0, units: U256::ZERO };
        self.0.entry((network, asset)).or_insert(none)
    }
}
