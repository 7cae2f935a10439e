//! What the student knows and decides, without waiting for anything.

use std::{collections::HashMap, sync::Arc};

use alloy_primitives::Address;
use rand::{RngExt, rngs::Xoshiro256PlusPlus};
use tower_x402::{Usdc, client::Receipt};
use url::Url;

use super::{
    Failure, StudentError, Truth,
    books::Ledger,
    feedback::CallPayment,
    gold::Golds,
    norms::Norms,
    purse::Purse,
    roster::{Roster, Shape},
    truth,
};
use crate::{
    EvaluateError, Submission, VerifiedCard,
    client::PaidEvaluation,
    evidence::{CallOutcome, Evidence, EvidenceLog, PaymentId},
    selection::{Candidate, Choice, Job, Observation, Panel, Selector, Skill, Skills},
};

/// Everything that one lock guards. It is never held while something is waited for.
pub(super) struct Desk {
    pub(super) selector: Box<dyn Selector>,
    pub(super) skills: Skills,
    pub(super) roster: Roster,
    pub(super) purse: Purse,
    pub(super) ledger: Ledger,
    pub(super) norms: Norms,
    pub(super) golds: Golds,
    pub(super) rng: Xoshiro256PlusPlus,
    /// Over how many tasks the budget is paced, and how many audits come with each.
    pub(super) horizon: (u64, f64),
    open: HashMap<u64, Open>,
    next_ticket: u64,
    // Kept for their memory.
    panel: Panel,
    market: Vec<Candidate>,
    positions: Vec<usize>,
}

/// A call under way.
#[derive(Debug)]
struct Open {
    choice: Choice,
    skill: Skill,
    started: bool,
    /// Nobody waits for it any more, and the selector was told.
    overdue: bool,
}

/// Whom to hire.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wanted<'a> {
    pub(super) skill: Skill,
    pub(super) shape: Shape,
    pub(super) seats: usize,
    /// Whether the truth is known.
    pub(super) audit: bool,
    /// Whether as much must remain as it costs.
    pub(super) hidden: bool,
    pub(super) now: u64,
    pub(super) excluded: &'a [Address],
}

/// Someone who was hired.
#[derive(Clone, Debug)]
pub(super) struct Hired {
    pub(super) ticket: u64,
    pub(super) card: Arc<VerifiedCard>,
    pub(super) url: Url,
    pub(super) is_strange: bool,
    /// How many outputs to send at once.
    pub(super) most: usize,
    pub(super) skill: Skill,
    /// Only to see how good it is.
    pub(super) examined: bool,
    /// What the task is called on the wire.
    pub(super) alias: String,
}

/// What came of one request.
pub(super) struct Part {
    pub(super) range: std::ops::Range<usize>,
    pub(super) result: Result<PaidEvaluation, EvaluateError>,
    /// What is made of the error, if that is not what it looks like.
    pub(super) excuse: Option<Failure>,
}

impl Part {
    /// Whether another card might explain what became of it. Nothing was signed then.
    pub(super) fn may_be_the_cards(&self) -> bool {
        self.result.as_ref().is_err_and(|error| Failure::of(error).may_be_the_cards())
    }

    fn failure(&self, error: &EvaluateError) -> Failure {
        self.excuse.clone().unwrap_or_else(|| Failure::of(error))
    }

    fn receipt(&self) -> Option<&Receipt> {
        match &self.result {
            Ok(bought) => bought.receipt.as_ref(),
            Err(error) => error.receipt(),
        }
    }
}

/// What is left to do when a call has ended.
pub(super) struct Finished {
    pub(super) evidence: Vec<Evidence>,
    /// What was signed only to see how good somebody is.
    pub(super) examination: Usdc,
    pub(super) failure: Option<Failure>,
    pub(super) payments: Vec<CallPayment>,
    /// Whether somebody still waits for it.
    pub(super) in_time: bool,
}

impl Desk {
    pub(super) fn new(
        selector: Box<dyn Selector>,
        roster: Roster,
        purse: Purse,
        golds: Golds,
        rng: Xoshiro256PlusPlus,
        horizon: (u64, f64),
    ) -> Self {
        Self {
            selector,
            skills: Skills::default(),
            roster,
            purse,
            ledger: Ledger::default(),
            norms: Norms::default(),
            golds,
            rng,
            horizon,
            open: HashMap::new(),
            next_ticket: 0,
            panel: Panel::default(),
            market: Vec::new(),
            positions: Vec::new(),
        }
    }

    /// The number of a skill, which it gets now if it has none; what others said about it is heard then.
    pub(super) fn skill(&mut self, name: &str, heard: &EvidenceLog) -> Result<Skill, StudentError> {
        if let Some(skill) = self.skills.get(name) {
            return Ok(skill);
        }
        let skill = self.skills.insert(name).ok_or(StudentError::TooManySkills { limit: Skill::LIMIT })?;
        self.roster.number_skills(&self.skills);
        heard.for_each(|evidence| {
            if let Some(payment) = evidence.payment.filter(|_| evidence.skill == name) {
                self.selector.learn_report(payment.payer, &evidence.observation(skill));
            }
        });
        Ok(skill)
    }

    /// Has the selector choose, and promises what they cost.
    pub(super) fn hire(&mut self, wanted: &Wanted<'_>) -> Result<Vec<Hired>, StudentError> {
        let per_payment = self.purse.budget().per_payment();
        let into = (&mut self.market, &mut self.positions);
        self.roster.candidates(wanted.skill, wanted.shape, per_payment, wanted.excluded, into);
        let outputs = u32::try_from(wanted.shape.outputs).unwrap_or(u32::MAX);
        // Otherwise that happens when something is reserved, which is never if nothing is left.
        self.purse.budget().release_expired(wanted.now);
        let remaining = match wanted.hidden {
            true => Usdc::from_atomic(self.purse.remaining().atomic() / 2),
            false => self.purse.remaining(),
        };
        let cost = |candidate: &Candidate| candidate.price.checked_mul(outputs.into()).unwrap_or(Usdc::MAX);
        if let Some(least) = self.market.iter().map(cost).min()
            && least > remaining
        {
            return Err(StudentError::BudgetExhausted { remaining, least });
        }
        let (tasks, audits) = self.horizon;
        let tasks_left = tasks.saturating_sub(self.ledger.tasks).max(1);
        let tasks_left = (tasks_left as f64 * (1.0 + audits)).ceil() as u64;
        let Wanted { skill, seats, audit, now, .. } = *wanted;
        let job = Job { skill, outputs, seats, audit, remaining, tasks_left, now };
        self.selector.select(&job, &self.market, &mut self.panel);
        let mut hired = Vec::new();
        for (position, choice) in self.panel.all().zip(self.panel.choices(&job, &self.market)) {
            let Some(at) = self.positions.get(position) else { continue };
            let entry = self.roster.get(*at);
            self.purse.promise(choice.promised);
            let ticket = self.next_ticket;
            self.next_ticket += 1;
            self.open.insert(ticket, Open { choice, skill, started: false, overdue: false });
            hired.push(Hired {
                ticket,
                card: entry.card.clone(),
                url: entry.url.clone(),
                is_strange: entry.is_strange,
                most: entry.most(per_payment),
                skill,
                examined: choice.examined,
                alias: format!("{:016x}", self.rng.random::<u64>()),
            });
        }
        Ok(hired)
    }

    /// Whether a call may begin: somebody still waits for it.
    pub(super) fn start(&mut self, ticket: u64) -> bool {
        self.open.get_mut(&ticket).is_some_and(|open| {
            open.started = true;
            !open.overdue
        })
    }

    /// Nobody waits for a call any more. As long as it has not ended, its money stays promised and its evaluator is not hired.
    pub(super) fn give_up(&mut self, ticket: u64, now: u64) {
        let Some(open) = self.open.get_mut(&ticket).filter(|open| !open.overdue) else { return };
        open.overdue = true;
        let Open { choice: Choice { evaluator, promised, .. }, skill, started, .. } = *open;
        if started {
            // It may yet be paid.
            let outcome = CallOutcome::Timeout;
            self.selector.learn(&Observation { evaluator, skill, paid: promised, at: now, outcome });
        }
        if let Some(entry) = self.roster.find(evaluator) {
            entry.overdue += 1;
        }
    }

    /// Enters what came of a call.
    pub(super) fn finish(
        &mut self,
        hired: &Hired,
        name: &str,
        parts: &[Part],
        truth: Option<&Truth>,
        now: u64,
    ) -> Finished {
        let (evaluator, skill) = (hired.card.pay_to(), hired.skill);
        let open = self.open.remove(&hired.ticket);
        let overdue = open.as_ref().is_none_or(|open| open.overdue);
        let (mut evidence, mut signed, mut first) = (Vec::new(), Usdc::ZERO, None);
        let audited = truth.filter(|_| !overdue).and_then(|truth| Some((self.draw_answered(parts)?, truth)));
        for (at, part) in parts.iter().enumerate() {
            let outcome = match &part.result {
                _ if overdue => Some(CallOutcome::Timeout),
                Ok(bought) => {
                    let truth = audited.filter(|(audited, _)| *audited == at).map(|(_, truth)| truth.part(&part.range));
                    Some(self.note(evaluator, skill, bought, truth))
                }
                Err(error) => {
                    let failure = part.failure(error);
                    let outcome = failure.outcome();
                    first.get_or_insert(failure);
                    outcome
                }
            };
            let receipt = part.receipt();
            self.ledger.enter(evaluator, (skill, name), outcome.as_ref(), receipt);
            if let Some(receipt) = receipt {
                super::books::add(&mut signed, receipt.amount);
            }
            let Some(outcome) = outcome else { continue };
            let payment = receipt.map(|receipt| PaymentId { payer: receipt.payer, nonce: receipt.nonce });
            let paid = receipt.filter(|receipt| receipt.outcome.is_paid());
            let paid = paid.map_or(Usdc::ZERO, |receipt| receipt.amount);
            let seen = Evidence { payment, evaluator, skill: name.to_owned(), at: now, paid, outcome };
            // That it was late the selector was told when it was.
            if !(overdue && evidence.is_empty()) {
                self.selector.learn(&seen.observation(skill));
            }
            evidence.push(seen);
        }
        self.purse.settle(open.as_ref().map_or(Usdc::ZERO, |open| open.choice.promised), signed);
        if let Some(open) = open {
            self.selector.record_cost(&open.choice, signed);
        }
        if overdue && let Some(entry) = self.roster.find(evaluator) {
            entry.overdue = entry.overdue.saturating_sub(1);
        }
        let payments = parts.iter().filter_map(Part::receipt).map(CallPayment::from).collect();
        let examination = if hired.examined { signed } else { Usdc::ZERO };
        Finished { evidence, examination, failure: first, payments, in_time: !overdue }
    }

    /// One of the parts that were answered. In how many parts it judges an evaluator says itself, so an audit that counted for each of
    /// them would be as loud as it likes.
    fn draw_answered(&mut self, parts: &[Part]) -> Option<usize> {
        let answered: Vec<_> = (0..parts.len()).filter(|at| parts[*at].result.is_ok()).collect();
        match answered.len() {
            0 | 1 => answered.first().copied(),
            count => Some(answered[self.rng.random_range(0..count)]),
        }
    }

    /// What an evaluation says about who gave it.
    fn note(&mut self, evaluator: Address, skill: Skill, bought: &PaidEvaluation, truth: Option<Truth>) -> CallOutcome {
        let verdicts = &bought.evaluation.verdicts;
        for verdict in verdicts.iter() {
            self.norms.learn(evaluator, skill, verdict.score.get(), verdict.confidence.get());
        }
        truth::note(verdicts, truth.as_ref(), &mut self.rng)
    }

    /// A hidden task to go before a submission, if the dice say so.
    pub(super) fn draw_gold(&mut self, like: &Submission) -> Option<(Submission, Truth)> {
        let due = self.rng.random_bool(self.horizon.1);
        if due { self.golds.next(like, &mut self.rng) } else { None }
    }
}
