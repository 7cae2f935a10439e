//! What an evaluator judged.

use std::{collections::BTreeMap, sync::Mutex, time::Duration};

use serde::Serialize;

use crate::{AgentCard, lock::lock};

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

/// Counts by skill. The skills of the card bound their number.
#[derive(Debug)]
pub(super) struct Counters(Mutex<EvaluatorStats>);

impl Counters {
    pub(super) fn new(card: &AgentCard) -> Self {
        let skills = card.skills.iter().map(|skill| (skill.id.clone(), SkillStats::default())).collect();
        Self(Mutex::new(EvaluatorStats { asked: 0, skills }))
    }

    /// Counts a call of the judge.
    pub(super) fn begin(&self) {
        lock(&self.0).asked += 1;
    }

    /// Returns a guard that counts one submission when it is dropped.
    pub(super) const fn submission<'a>(&'a self, skill: &'a str) -> SubmissionCount<'a> {
        SubmissionCount { counters: self, skill, result: JudgingResult::Failed }
    }

    pub(super) fn stats(&self) -> EvaluatorStats {
        lock(&self.0).clone()
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
        let mut stats = lock(&self.counters.0);
        let Some(skill) = stats.skills.get_mut(self.skill) else { return };
        match self.result {
            JudgingResult::Judged { outputs, took } => {
                skill.judged += 1;
                skill.outputs += outputs;
                skill.mean_latency_ms += (took.as_secs_f64() * 1_000.0 - skill.mean_latency_ms) / skill.judged as f64;
            }
            JudgingResult::Rejected => skill.not_taken += 1,
            JudgingResult::Failed => skill.failed += 1,
            JudgingResult::Late => skill.late += 1,
            JudgingResult::Busy => skill.busy += 1,
        }
    }
}
