//! What an evaluator did and earned.

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

/// What `GET /stats` tells.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Stats {
    /// How often the judge was asked since the start.
    pub asked: u64,
    /// How that ended, by skill.
    pub skills: BTreeMap<String, SkillStats>,
    /// What the payee was paid, by token, as far as the ledger still shows; `None` if it cannot be asked.
    pub earned: Option<Vec<Earned>>,
}

/// How submissions for one skill ended, since the start.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct SkillStats {
    /// Submissions that were judged.
    pub judged: u64,
    /// The outputs in these.
    pub outputs: u64,
    /// How long judging one of them took on average, in milliseconds.
    pub mean_latency_ms: f64,
    /// Submissions that the judge did not take, after all.
    pub not_taken: u64,
    /// Submissions that the judge failed on.
    pub failed: u64,
    /// Submissions that were not judged in time.
    pub late: u64,
    /// Submissions that there was no place for.
    pub busy: u64,
}

/// What was earned in one token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Earned {
    /// The chain.
    pub network: Network,
    /// The token.
    pub asset: Address,
    /// In how many payments.
    pub payments: u64,
    /// How much, in atomic units.
    #[serde(serialize_with = "decimal")]
    pub units: U256,
}

fn decimal<S: Serializer>(amount: &U256, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(amount)
}

/// How the judging of a submission ended.
#[derive(Clone, Copy, Debug)]
pub(super) enum Ended {
    Judged { outputs: u64, took: Duration },
    NotTaken,
    Failed,
    Late,
    Busy,
}

impl Ended {
    pub(super) const fn of(error: &JudgeError) -> Self {
        match error {
            JudgeError::NotTaken(_) => Self::NotTaken,
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

/// Counts by the skills of the card, which bound how many there are.
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

    /// The judge is asked.
    pub(super) fn begin(&self) {
        self.asked.fetch_add(1, Relaxed);
    }

    /// Counts one submission, when it is dropped.
    pub(super) const fn tally<'a>(&'a self, skill: &'a str) -> Tally<'a> {
        Tally { counters: self, skill, ended: Ended::Failed }
    }

    fn count(&self, skill: &str, ended: Ended) {
        let Some(counter) = self.skills.get(skill) else { return };
        let number = match ended {
            Ended::Judged { outputs, took } => {
                counter.outputs.fetch_add(outputs, Relaxed);
                counter.micros.fetch_add(took.as_micros().try_into().unwrap_or(u64::MAX), Relaxed);
                &counter.judged
            }
            Ended::NotTaken => &counter.not_taken,
            Ended::Failed => &counter.failed,
            Ended::Late => &counter.late,
            Ended::Busy => &counter.busy,
        };
        number.fetch_add(1, Relaxed);
    }

    /// Everything but what was earned.
    pub(super) fn stats(&self) -> Stats {
        let skills = self.skills.iter().map(|(skill, counter)| (skill.clone(), counter.stats())).collect();
        Stats { asked: self.asked.load(Relaxed), skills, earned: None }
    }
}

/// One submission. It has failed unless it is said to have ended otherwise: a judge that panics says nothing.
#[derive(Debug)]
pub(super) struct Tally<'a> {
    counters: &'a Counters,
    skill: &'a str,
    pub(super) ended: Ended,
}

impl Drop for Tally<'_> {
    fn drop(&mut self) {
        self.counters.count(self.skill, self.ended);
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

/// Adds up what a payee was paid. It costs a walk through the ledger, so it is done again only after twenty times as long as it
/// took: whoever asks all the time has no more than a twentieth of a core for it.
#[derive(Debug)]
pub(super) struct Income {
    pay_to: Address,
    last: Mutex<Option<Sum>>,
}

#[derive(Debug)]
struct Sum {
    earned: Vec<Earned>,
    good_until: Instant,
}

impl Income {
    pub(super) fn of(pay_to: Address) -> Self {
        Self { pay_to, last: Mutex::default() }
    }

    pub(super) async fn earned(&self, ledger: &dyn Ledger) -> Result<Vec<Earned>, LedgerError> {
        // Whoever waits for the lock finds the answer.
        let mut last = self.last.lock().await;
        let started = Instant::now();
        if let Some(sum) = &*last
            && started < sum.good_until
        {
            return Ok(sum.earned.clone());
        }
        let earned = self.add_up(ledger).await?;
        let good_until = Instant::now() + started.elapsed() * 20;
        *last = Some(Sum { earned: earned.clone(), good_until });
        Ok(earned)
    }

    async fn add_up(&self, ledger: &dyn Ledger) -> Result<Vec<Earned>, LedgerError> {
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
        let earned = |((network, asset), (payments, units))| Earned { network, asset, payments, units };
        Ok(sums.into_iter().map(earned).collect())
    }
}
