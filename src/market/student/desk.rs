//! What the student knows and decides, without waiting for anything.

use std::{collections::HashMap, sync::Arc};

use alloy_primitives::Address;
use rand::{RngExt, rngs::Xoshiro256PlusPlus};
use url::Url;

use super::{
    Failure, StudentError, Truth,
    books::Ledger,
    feedback::Paid,
    gold::Golds,
    norms::Norms,
    purse::Purse,
    roster::{Roster, Shape},
    truth,
};
use crate::{
    client::Receipt,
    market::{
        EvaluateError, Submission, VerifiedCard,
        client::Bought,
        evidence::{Evidence, EvidenceLog, Outcome, Voice},
        selection::{Candidate, Job, Observation, Panel, Selector, Skill, Skills},
    },
    usdc::Usdc,
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
    evaluator: Address,
    skill: Skill,
    cost: Usdc,
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
    pub(super) result: Result<Bought, EvaluateError>,
}

/// What is left to do when a call has ended.
pub(super) struct Finished {
    pub(super) evidence: Vec<Evidence>,
    /// What was signed only to see how good somebody is.
    pub(super) examination: Usdc,
    pub(super) failure: Option<Failure>,
    pub(super) payments: Vec<Paid>,
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
                self.selector.hear(payment.payer, &evidence.observation(skill));
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
        let remaining = self.purse.remaining();
        let cost = |candidate: &Candidate| candidate.price.checked_mul(outputs.into()).unwrap_or(Usdc::MAX);
        if let Some(least) = self.market.iter().map(cost).min()
            && least > remaining
        {
            return Err(StudentError::NoMoney { remaining, least });
        }
        let (tasks, audits) = self.horizon;
        let tasks_left = tasks.saturating_sub(self.ledger.tasks).max(1);
        let tasks_left = (tasks_left as f64 * (1.0 + audits)).ceil() as u64;
        let Wanted { skill, seats, audit, now, .. } = *wanted;
        let job = Job { skill, outputs, seats, audit, remaining, tasks_left, now };
        self.selector.select(&job, &self.market, &mut self.panel);
        let mut hired = Vec::new();
        for (number, position) in self.panel.all().enumerate() {
            let (Some(candidate), Some(at)) = (self.market.get(position), self.positions.get(position)) else {
                continue;
            };
            let (entry, cost) = (self.roster.get(*at), cost(candidate));
            self.purse.promise(cost);
            let ticket = self.next_ticket;
            self.next_ticket += 1;
            let open = Open { evaluator: candidate.evaluator, skill, cost, started: false, overdue: false };
            self.open.insert(ticket, open);
            hired.push(Hired {
                ticket,
                card: entry.card.clone(),
                url: entry.url.clone(),
                is_strange: entry.is_strange,
                most: entry.most(per_payment),
                skill,
                examined: number >= self.panel.hired.len(),
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
        let Open { evaluator, skill, cost, started, .. } = *open;
        if started {
            // It may yet be paid.
            let outcome = Outcome::Timeout;
            self.selector.learn(&Observation { evaluator, skill, paid: cost, at: now, outcome });
        } else {
            self.selector.withdraw(evaluator);
        }
        if let Some(entry) = self.roster.find(evaluator) {
            entry.overdue += 1;
        }
    }

    /// Enters what came of a call. `failure` replaces what would be made of the errors.
    pub(super) fn finish(
        &mut self,
        hired: &Hired,
        name: &str,
        parts: &[Part],
        truth: Option<&Truth>,
        failure: Option<Failure>,
        now: u64,
    ) -> Finished {
        let evaluator = hired.card.pay_to();
        let open = self.open.remove(&hired.ticket);
        let (cost, overdue) = open.map_or((Usdc::ZERO, true), |open| (open.cost, open.overdue));
        let (mut evidence, mut outcomes, mut signed) = (Vec::new(), Vec::new(), Usdc::ZERO);
        let mut first = None;
        for part in parts {
            let receipt = receipt(&part.result);
            let outcome = match &part.result {
                _ if overdue => Some(Outcome::Timeout),
                Ok(bought) => {
                    let verdicts = &bought.evaluation.verdicts;
                    for verdict in verdicts.iter() {
                        self.norms.learn(evaluator, hired.skill, verdict.score.get(), verdict.confidence.get());
                    }
                    let truth = truth.map(|truth| truth.part(&part.range));
                    Some(truth::note(verdicts, truth.as_ref(), &mut self.rng))
                }
                Err(error) => {
                    let failure = failure.clone().unwrap_or_else(|| Failure::of(error));
                    let outcome = failure.outcome();
                    first.get_or_insert(failure);
                    outcome
                }
            };
            self.ledger.enter(evaluator, (hired.skill, name), outcome.as_ref(), receipt);
            if let Some(receipt) = receipt {
                super::books::add(&mut signed, receipt.amount);
            }
            if let Some(outcome) = outcome {
                let is_failure = part.result.is_err();
                outcomes.push((is_failure, outcome));
                let payment = receipt.map(|receipt| Voice { payer: receipt.payer, nonce: receipt.nonce });
                let paid = receipt.filter(|receipt| receipt.outcome.is_paid());
                let paid = paid.map_or(Usdc::ZERO, |receipt| receipt.amount);
                evidence.push(Evidence { payment, evaluator, skill: name.to_owned(), at: now, paid, outcome });
            }
        }
        self.purse.settle(cost, signed);
        if overdue {
            if let Some(entry) = self.roster.find(evaluator) {
                entry.overdue = entry.overdue.saturating_sub(1);
            }
        } else {
            // A failure of a part is one of the whole; of several that went well any one is noted.
            let failed = outcomes.iter().find(|(is_failure, _)| *is_failure);
            let noted = match (failed, outcomes.len()) {
                (Some(failed), _) => Some(failed.1),
                (None, 0) => None,
                (None, count) => Some(outcomes[self.rng.random_range(0..count)].1),
            };
            match noted {
                Some(outcome) => {
                    let skill = hired.skill;
                    self.selector.learn(&Observation { evaluator, skill, paid: signed, at: now, outcome });
                }
                None => self.selector.withdraw(evaluator),
            }
        }
        let payments = parts.iter().filter_map(|part| receipt(&part.result)).map(Paid::from).collect();
        let examination = if hired.examined { signed } else { Usdc::ZERO };
        Finished { evidence, examination, failure: first, payments, in_time: !overdue }
    }

    /// A hidden task to go along with a submission, if the dice say so.
    pub(super) fn draw_gold(&mut self, like: &Submission) -> Option<(Submission, Truth)> {
        let due = self.rng.random_bool(self.horizon.1);
        if due { self.golds.next(like, &mut self.rng) } else { None }
    }
}

fn receipt(result: &Result<Bought, EvaluateError>) -> Option<&Receipt> {
    match result {
        Ok(bought) => bought.receipt.as_ref(),
        Err(error) => error.receipt(),
    }
}
