//! Everything that the student's lock guards: what it knows, whom it hires, and the calls under way. No method waits for anything.

use std::{collections::HashMap, ops::Range, sync::Arc};

use alloy_primitives::Address;
use rand::{RngExt, rngs::Xoshiro256PlusPlus};
use tower_x402::{Usdc, client::Receipt};
use url::Url;

use super::{
    CallPayment, Failure, StudentError, Truth,
    aggregate::ScoreHistory,
    audit::{self, GoldTasks},
    discovery::{KnownEvaluators, Shape},
    spending::{AvailableBudget, SpendingRecords, sum},
};
use crate::{
    EvaluateError, Submission, VerifiedCard,
    client::PaidEvaluation,
    evidence::{CallOutcome, Evidence, EvidenceLog},
    selection::{Candidate, Choice, Job, Observation, Selector, Skill, Skills},
};

pub(super) struct State {
    pub(super) selector: Box<dyn Selector>,
    pub(super) skills: Skills,
    pub(super) evaluators: KnownEvaluators,
    pub(super) available: AvailableBudget,
    pub(super) spending: SpendingRecords,
    pub(super) scores: ScoreHistory,
    pub(super) golds: GoldTasks,
    pub(super) rng: Xoshiro256PlusPlus,
    /// The number of submissions over which the budget is paced.
    pub(super) tasks: u64,
    /// The share of submissions before which a gold task is judged.
    pub(super) audit_rate: f64,
    pub(super) calls: HashMap<u64, OpenCall>,
    pub(super) next_call: u64,
}

/// A call under way.
#[derive(Debug)]
pub(super) struct OpenCall {
    choice: Choice,
    skill: Skill,
    has_started: bool,
    /// It was given up, and the selector was told.
    is_overdue: bool,
}

/// What evaluators are wanted for.
#[derive(Clone, Copy, Debug)]
pub(super) struct HireRequest<'a> {
    pub(super) skill: Skill,
    pub(super) shape: Shape,
    pub(super) seats: usize,
    /// The truth is known.
    pub(super) audit: bool,
    /// It is a gold task, which may cost at most half of what remains.
    pub(super) is_gold: bool,
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
    pub(super) task_alias: String,
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
            if is_own(evidence) {
                self.skills.insert(&evidence.skill);
            }
        });
        self.selector.restore(evidence, &[own], &self.skills);
        evidence.for_each(|evidence| {
            let Some(skill) = self.skills.get(&evidence.skill).filter(|_| is_own(evidence)) else { return };
            self.spending.restore(evidence, skill);
            if let CallOutcome::Answered { score, confidence: Some(confidence), .. } = evidence.outcome {
                self.scores.learn(evidence.evaluator, skill, score, confidence);
            }
        });
        reports.for_each(|evidence| {
            let payer = evidence.payment.map(|payment| payment.payer).filter(|payer| *payer != own);
            if let (Some(payer), Some(skill)) = (payer, self.skills.get(&evidence.skill)) {
                self.selector.learn_report(payer, &evidence.observation(skill));
            }
        });
    }

    /// Has the selector choose evaluators, and promises what they cost.
    pub(super) fn hire(&mut self, request: &HireRequest<'_>) -> Result<Vec<Hired>, StudentError> {
        let HireRequest { skill, shape, seats, audit, is_gold, now, excluded } = *request;
        let per_payment = self.available.budget().per_payment();
        let candidates = self.evaluators.candidates(skill, shape, per_payment, excluded);
        let (known, market): (Vec<_>, Vec<_>) = candidates.unzip();
        let outputs = u32::try_from(shape.outputs).unwrap_or(u32::MAX);
        // The budget does this only when it reserves, which it never does if nothing is left.
        self.available.budget().release_expired(now);
        let remaining = match is_gold {
            true => Usdc::from_atomic(self.available.remaining().atomic() / 2),
            false => self.available.remaining(),
        };
        let cost = |candidate: &Candidate| candidate.price.checked_mul(outputs.into()).unwrap_or(Usdc::MAX);
        if let Some(least) = market.iter().map(cost).min()
            && least > remaining
        {
            return Err(StudentError::BudgetExhausted { remaining, least });
        }
        let tasks_left = self.tasks.saturating_sub(self.spending.tasks).max(1);
        let tasks_left = (tasks_left as f64 * (1.0 + self.audit_rate)).ceil() as u64;
        let job = Job { skill, outputs, seats, audit, remaining, tasks_left, now };
        let panel = self.selector.select(&job, &market);
        let mut hired = Vec::new();
        for (position, choice) in panel.choices(&job, &market) {
            let Some(known) = known.get(position) else { continue };
            self.available.promise(choice.promised);
            let call = self.next_call;
            self.next_call += 1;
            self.calls.insert(call, OpenCall { choice, skill, has_started: false, is_overdue: false });
            hired.push(Hired {
                call,
                card: known.card.clone(),
                url: known.url.clone(),
                is_untrusted: known.is_untrusted,
                max_outputs: known.card.pricing().outputs_for(per_payment),
                skill,
                is_exploration: choice.is_exploration,
                task_alias: format!("{:016x}", self.rng.random::<u64>()),
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
    pub(super) fn give_up(&mut self, call: u64, now: u64) {
        let Some(open) = self.calls.get_mut(&call).filter(|open| !open.is_overdue) else { return };
        open.is_overdue = true;
        let OpenCall { choice: Choice { evaluator, promised, .. }, skill, has_started, .. } = *open;
        if has_started {
            // It may still be paid.
            let outcome = CallOutcome::Timeout;
            self.selector.learn(&Observation { evaluator, skill, paid: promised, at: now, outcome });
        }
        if let Some(known) = self.evaluators.find(evaluator) {
            known.overdue += 1;
        }
    }

    /// Records what became of a call, by its parts.
    pub(super) fn end(
        &mut self,
        hired: &Hired,
        skill_name: &str,
        parts: &[Part],
        truth: Option<&Truth>,
        now: u64,
    ) -> Ended {
        let (evaluator, skill) = (hired.card.pay_to(), hired.skill);
        let open = self.calls.remove(&hired.call);
        let is_overdue = open.as_ref().is_none_or(|open| open.is_overdue);
        let (mut evidence, mut signed, mut first_failure) = (Vec::new(), Usdc::ZERO, None);
        let audited = truth.filter(|_| !is_overdue).and_then(|truth| Some((self.draw_answered(parts)?, truth)));
        for (at, part) in parts.iter().enumerate() {
            let outcome = match &part.result {
                _ if is_overdue => Some(CallOutcome::Timeout),
                Ok(paid) => {
                    let truth = audited.filter(|(audited, _)| *audited == at).map(|(_, truth)| truth.part(&part.range));
                    Some(self.outcome(evaluator, skill, paid, truth))
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
            // The selector learned of the timeout when the call was given up.
            if !(is_overdue && evidence.is_empty()) {
                self.selector.learn(&record.observation(skill));
            }
            evidence.push(record);
        }
        self.available.release(open.as_ref().map_or(Usdc::ZERO, |open| open.choice.promised), signed);
        if let Some(open) = open {
            self.selector.record_cost(&open.choice, signed);
        }
        if is_overdue && let Some(known) = self.evaluators.find(evaluator) {
            known.overdue = known.overdue.saturating_sub(1);
        }
        let payments = parts.iter().filter_map(Part::receipt).map(CallPayment::from).collect();
        let exploration_cost = if hired.is_exploration { signed } else { Usdc::ZERO };
        Ended { evidence, exploration_cost, failure: first_failure, payments, in_time: !is_overdue }
    }

    /// Draws one of the answered parts. An evaluator decides itself into how many parts a group is split, so an audit of each of them would
    /// let it decide how much it counts.
    fn draw_answered(&mut self, parts: &[Part]) -> Option<usize> {
        let answered: Vec<_> = (0..parts.len()).filter(|at| parts[*at].result.is_ok()).collect();
        match answered.len() {
            0 | 1 => answered.first().copied(),
            count => Some(answered[self.rng.random_range(0..count)]),
        }
    }

    /// Learns the scores of an evaluation, and returns its outcome.
    fn outcome(
        &mut self,
        evaluator: Address,
        skill: Skill,
        paid: &PaidEvaluation,
        truth: Option<Truth>,
    ) -> CallOutcome {
        let verdicts = &paid.evaluation.verdicts;
        for verdict in verdicts.iter() {
            self.scores.learn(evaluator, skill, verdict.score.get(), verdict.confidence.get());
        }
        audit::outcome(verdicts, truth.as_ref(), &mut self.rng)
    }

    /// Returns a gold task that looks like a submission, if one is due.
    pub(super) fn draw_gold(&mut self, like: &Submission) -> Option<(Submission, Truth)> {
        let is_due = self.rng.random_bool(self.audit_rate);
        if is_due { self.golds.next(like, &mut self.rng) } else { None }
    }
}
