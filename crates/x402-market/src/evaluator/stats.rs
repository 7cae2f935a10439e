//! What an evaluator judged.

use std::{
    collections::BTreeMap,
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    time::Duration,
};

use serde::Serialize;

use crate::{AgentCard, judge::JudgeError};

/// The statistics of an evaluator, as `GET /stats` returns them. What it earned is in the books of its ledger.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct EvaluatorStats {
    /// The number of calls of the judge since the start.
    pub asked: u64,
    /// The results by skill.
    pub skills: BTreeMap<String, SkillStats>,
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

    /// Returns the statistics.
    pub(super) fn stats(&self) -> EvaluatorStats {
        let skills = self.skills.iter().map(|(skill, counter)| (skill.clone(), counter.stats())).collect();
        EvaluatorStats { asked: self.asked.load(Relaxed), skills }
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
