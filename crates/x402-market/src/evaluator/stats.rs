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
    ledger::{Ledger, LedgerError, Listing, SettlementState},
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
    /// The payee's income by token, from the payments that the ledger still has on record, without what was charged by voucher. `None` if the
    /// ledger cannot be read.
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
    /// The number of payments.
    pub payments: u64,
    /// The sum of the payments, in atomic units.
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

/// Adds up what a payee was paid.
///
/// That reads the whole ledger, so the sum is reused for twenty times as long as it took. Frequent requests cost at most a twentieth of a
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

    pub(super) async fn earned(&self, ledger: &dyn Ledger) -> Result<Vec<Earnings>, LedgerError> {
        // Requests that waited for the lock find the sum.
        let mut last = self.last.lock().await;
        let started = Instant::now();
        if let Some(sum) = &*last
            && started < sum.valid_until
        {
            return Ok(sum.earned.clone());
        }
        let earned = self.add_up(ledger).await?;
        let valid_until = Instant::now() + started.elapsed() * 20;
        *last = Some(Sum { earned: earned.clone(), valid_until });
        Ok(earned)
    }

    async fn add_up(&self, ledger: &dyn Ledger) -> Result<Vec<Earnings>, LedgerError> {
        let mut sums: BTreeMap<(Network, Address), (u64, U256)> = BTreeMap::new();
        let mut paid = Listing::of([SettlementState::Settled, SettlementState::Final]);
        loop {
            let page = ledger.list(&paid).await?;
            let Some(last) = page.last() else { break };
            paid.after = Some(last.key);
            for record in page.iter().filter(|record| record.terms.offer().pay_to == self.pay_to) {
                let sum = sums.entry((record.key.network, record.key.asset)).or_default();
                sum.0 += 1;
                sum.1 = sum.1.saturating_add(record.authorization.value);
            }
        }
        let earned = |((network, asset), (payments, units))| Earnings { network, asset, payments, units };
        Ok(sums.into_iter().map(earned).collect())
    }
}
