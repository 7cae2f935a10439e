//! Everything that the student's lock guards: what it knows, whom it hires, and the calls under way. No method waits for anything.

use std::{collections::HashMap, ops::Range, sync::Arc};

use alloy_primitives::Address;
use rand::{RngExt, rngs::Xoshiro256PlusPlus};
use tower_x402::{Usdc, client::Receipt};
use url::Url;

use super::{
    CallPayment, Failure, StudentError,
    feedback::Judged,
    known::KnownEvaluators,
    spending::{AvailableBudget, SpendingRecords, sum},
    truth,
};
use crate::{
    EvaluateError, Submission, TaskId, VerifiedCard,
    client::PaidEvaluation,
    evidence::{CallOutcome, Evidence, EvidenceLog},
    selection::{Job, Observation, Selector, Skill, Skills},
};

pub(super) struct State {
    pub(super) selector: Box<dyn Selector>,
    pub(super) skills: Skills,
    pub(super) evaluators: KnownEvaluators,
    pub(super) available: AvailableBudget,
    pub(super) spending: SpendingRecords,
    pub(super) rng: Xoshiro256PlusPlus,
    /// The number of submissions over which the budget is paced.
    pub(super) tasks: u64,
    pub(super) calls: HashMap<u64, OpenCall>,
    pub(super) next_call: u64,
}

/// A call under way.
#[derive(Debug)]
pub(super) struct OpenCall {
    evaluator: Address,
    /// The most that it may cost: the price of all outputs.
    promised: Usdc,
    skill: Skill,
    has_started: bool,
    /// It was given up, and the selector was told.
    is_overdue: bool,
}

/// What evaluators are wanted for.
#[derive(Clone, Copy, Debug)]
pub(super) struct HireRequest<'a> {
    pub(super) skill: Skill,
    pub(super) submission: &'a Submission,
    pub(super) seats: usize,
    /// Only to learn about evaluators, about outputs whose truth is known.
    pub(super) is_exploration: bool,
    pub(super) now: u64,
    pub(super) excluded: &'a [Address],
}

/// An evaluator that was hired.
#[derive(Clone, Debug)]
pub(super) struct Hired {
    /// The number of the call.
    pub(super) call: u64,
    pub(super) card: Arc<VerifiedCard>,
    pub(super) url: Url,
    pub(super) is_untrusted: bool,
    /// How many outputs one request may hold.
    pub(super) max_outputs: usize,
    pub(super) skill: Skill,
    pub(super) is_exploration: bool,
    /// The random id that replaces the task's own on the wire, so that evaluators cannot compare notes.
    pub(super) task_alias: TaskId,
}

/// What became of one request.
pub(super) struct Part {
    pub(super) range: Range<usize>,
    pub(super) result: Result<PaidEvaluation, EvaluateError>,
    /// The failure to report instead of what the error looks like.
    pub(super) explained: Option<Failure>,
}

impl Part {
    /// Returns `true` if a newer card may explain the failure. Nothing was signed then.
    pub(super) fn may_be_outdated_card(&self) -> bool {
        self.result.as_ref().is_err_and(|error| Failure::of(error).may_be_outdated_card())
    }

    fn failure(&self, error: &EvaluateError) -> Failure {
        self.explained.clone().unwrap_or_else(|| Failure::of(error))
    }

    fn receipt(&self) -> Option<&Receipt> {
        match &self.result {
            Ok(paid) => paid.receipt.as_ref(),
            Err(error) => error.receipt(),
        }
    }
}

/// What is left to do when a call has ended.
pub(super) struct Ended {
    pub(super) evidence: Vec<Evidence>,
    /// What was signed, if the evaluator was hired for exploration.
    pub(super) exploration_cost: Usdc,
    pub(super) failure: Option<Failure>,
    pub(super) payments: Vec<CallPayment>,
    pub(super) judged: Vec<Judged>,
    /// The call was not given up.
    pub(super) in_time: bool,
}

impl State {
    /// Returns the number of a skill that a known evaluator has. A skill without a number gets one, and the selector learns the reports
    /// about it.
    pub(super) fn skill(&mut self, name: &str, reports: &EvidenceLog) -> Result<Skill, StudentError> {
        if !self.evaluators.have_skill(name) {
            return Err(StudentError::NoEvaluators { skill: name.to_owned() });
        }
        if let Some(skill) = self.skills.get(name) {
            return Ok(skill);
        }
        let skill = self.skills.insert(name).ok_or(StudentError::TooManySkills { limit: Skill::LIMIT })?;
        self.evaluators.number_skills(&self.skills);
        reports.for_each(|evidence| {
            if let Some(payment) = evidence.payment.filter(|_| evidence.skill == name) {
                self.selector.learn_report(payment.payer, &evidence.observation(skill));
            }
        });
        Ok(skill)
    }

    /// Learns the records of earlier runs. Reports about skills that this student has had no work for wait until it has.
    pub(super) fn restore(&mut self, evidence: &EvidenceLog, reports: &EvidenceLog, own: Address) {
        let is_own = |evidence: &Evidence| evidence.payment.is_none_or(|payment| payment.payer == own);
        // Only own records number skills: others could fill the table.
        evidence.for_each(|evidence| {
            if is_own(evidence)
                && let Some(skill) = self.skills.insert(&evidence.skill)
            {
                self.spending.restore(evidence, skill);
            }
        });
        self.selector.restore(evidence, &[own], &self.skills);
        reports.for_each(|evidence| {
            let payer = evidence.payment.map(|payment| payment.payer).filter(|payer| *payer != own);
            if let (Some(payer), Some(skill)) = (payer, self.skills.get(&evidence.skill)) {
                self.selector.learn_report(payer, &evidence.observation(skill));
            }
        });
    }

    /// Has the selector choose evaluators, and promises what they cost.
    pub(super) fn hire(&mut self, request: &HireRequest<'_>) -> Result<Vec<Hired>, StudentError> {
        let HireRequest { skill, submission, seats, is_exploration, now, excluded } = *request;
        let per_payment = self.available.budget().per_payment();
        let candidates = self.evaluators.candidates(skill, submission, per_payment, excluded);
        let (known, market): (Vec<_>, Vec<_>) = candidates.unzip();
        let outputs = u32::try_from(submission.outputs().len()).unwrap_or(u32::MAX);
        // The budget does this only when it reserves, which it never does if nothing is left.
        self.available.budget().release_expired(now);
        let remaining = self.available.remaining();
        let tasks_left = self.tasks.saturating_sub(self.spending.counts.tasks).max(1);
        let job = Job { skill, outputs, seats, remaining, tasks_left };
        if let Some(least) = market.iter().map(|candidate| job.cost(candidate).unwrap_or(Usdc::MAX)).min()
            && least > remaining
        {
            return Err(StudentError::BudgetExhausted { remaining, least });
        }
        let chosen = match is_exploration {
            true => self.selector.explore(&job, &market),
            false => self.selector.select(&job, &market),
        };
        let mut hired = Vec::new();
        for position in chosen {
            let (Some(known), Some(candidate)) = (known.get(position), market.get(position)) else { continue };
            let (evaluator, promised) = (candidate.evaluator, job.cost(candidate).unwrap_or(Usdc::MAX));
            self.available.promise(promised);
            let call = self.next_call;
            self.next_call += 1;
            self.calls.insert(call, OpenCall { evaluator, promised, skill, has_started: false, is_overdue: false });
            hired.push(Hired {
                call,
                card: known.card.clone(),
                url: known.url.clone(),
                is_untrusted: known.is_untrusted,
                max_outputs: known.card.pricing().outputs_for(per_payment),
                skill,
                is_exploration,
                task_alias: TaskId::new(format!("{:016x}", self.rng.random::<u64>())).unwrap_or_default(),
            });
        }
        Ok(hired)
    }

    /// Marks a call as started. Returns `false` if it was given up.
    pub(super) fn start(&mut self, call: u64) -> bool {
        self.calls.get_mut(&call).is_some_and(|open| {
            open.has_started = true;
            !open.is_overdue
        })
    }

    /// Gives up a call that took too long. Until it ends its money stays promised, and its evaluator is not hired.
    pub(super) fn give_up(&mut self, call: u64) {
        let Some(open) = self.calls.get_mut(&call).filter(|open| !open.is_overdue) else { return };
        open.is_overdue = true;
        let OpenCall { evaluator, promised, skill, has_started, .. } = *open;
        if has_started {
            // It may still be paid.
            self.selector.learn(&Observation::new(evaluator, skill, promised, CallOutcome::Timeout));
        }
        if let Some(known) = self.evaluators.find(evaluator) {
            known.overdue += 1;
        }
    }

    /// Records what became of a call, by its parts. `good` says which outputs are good, if that is known.
    pub(super) fn end(
        &mut self,
        hired: &Hired,
        skill_name: &str,
        parts: &[Part],
        good: Option<&[Option<bool>]>,
        now: u64,
    ) -> Ended {
        let (evaluator, skill) = (hired.card.pay_to(), hired.skill);
        let open = self.calls.remove(&hired.call);
        let is_overdue = open.as_ref().is_none_or(|open| open.is_overdue);
        let (mut evidence, mut judged, mut signed, mut first_failure) = (Vec::new(), Vec::new(), Usdc::ZERO, None);
        for part in parts {
            let outcome = match &part.result {
                _ if is_overdue => Some(CallOutcome::Timeout),
                Ok(paid) => {
                    let scores: Vec<_> = paid.evaluation.verdicts.iter().map(|verdict| verdict.score).collect();
                    let pairs = good.and_then(|good| truth::compare(&scores, good, &part.range));
                    let alias = hired.task_alias.clone();
                    judged.push(Judged { range: part.range.clone(), scores, payment: None, alias });
                    if self.evaluators.is_new_version(evaluator, &paid.evaluation.evaluator.version) {
                        self.selector.learn_new_version(evaluator);
                    }
                    Some(CallOutcome::answered(pairs))
                }
                Err(error) => {
                    let failure = part.failure(error);
                    let outcome = failure.outcome();
                    first_failure.get_or_insert(failure);
                    outcome
                }
            };
            let receipt = part.receipt();
            self.spending.add(evaluator, (skill, skill_name), outcome.as_ref(), receipt);
            signed = sum([signed, receipt.map_or(Usdc::ZERO, |receipt| receipt.amount)]);
            let Some(outcome) = outcome else { continue };
            let paid = receipt.filter(|receipt| receipt.outcome.is_paid());
            let paid = paid.map_or(Usdc::ZERO, |receipt| receipt.amount);
            let mut record = Evidence::new(evaluator, skill_name, paid, now, outcome);
            if let Some(receipt) = receipt {
                record = record.with_receipt(receipt);
            }
            if let (CallOutcome::Answered { .. }, Some(judged)) = (&outcome, judged.last_mut()) {
                judged.payment = record.payment;
            }
            // The selector learned of the timeout when the call was given up.
            if !(is_overdue && evidence.is_empty()) {
                self.selector.learn(&record.observation(skill));
            }
            evidence.push(record);
        }
        self.available.release(open.as_ref().map_or(Usdc::ZERO, |open| open.promised), signed);
        if is_overdue && let Some(known) = self.evaluators.find(evaluator) {
            known.overdue = known.overdue.saturating_sub(1);
        }
        let payments = parts.iter().filter_map(Part::receipt).map(CallPayment::from).collect();
        let exploration_cost = if hired.is_exploration { signed } else { Usdc::ZERO };
        Ended { evidence, exploration_cost, failure: first_failure, payments, judged, in_time: !is_overdue }
    }
}
