//! Whom to hire, for which price, or whether to keep the money.
//!
//! A [`Selector`] is asked before every task and told afterwards what came of it. [`Thompson`] is the one to use; [`Random`],
//! [`Cheapest`], [`CardClaims`] and [`Greedy`] are there to be compared with.
//!
//! ```
//! use alloy_primitives::Address;
//! use tower_x402::Usdc;
//! use x402_market::selection::{Candidate, Job, Panel, Selector, Skills, Thompson};
//!
//! let skills: Skills = ["arithmetic"].into_iter().collect();
//! let market = [Candidate {
//!     evaluator: Address::repeat_byte(7),
//!     claims: skills.set(["arithmetic"]),
//!     price: Usdc::from_atomic(300),
//!     first_seen: 1_800_000_000,
//! }];
//! let mut selector = Thompson::seeded(1);
//! let job = Job { now: 1_800_000_000, ..Job::new(skills.get("arithmetic").unwrap(), "$0.09".parse()?, 100) };
//! let mut panel = Panel::default();
//! selector.select(&job, &market, &mut panel);
//! assert_eq!(panel.hired, [0]);
//! # Ok::<(), tower_x402::ParseUsdcError>(())
//! ```
//!
//! # What is maximized
//!
//! A verdict that is right with probability *a* is worth 2*a* − 1: one that tosses a coin is worth nothing. The student wants
//! the most of that for its budget. If it knew every *a* this would be a linear program, and its solution would be a *price of
//! money* λ: hire whoever has the largest 2*a* − 1 − λ·price, nobody if that is negative. It does not know them:
//!
//! - **Beliefs** (`beliefs.rs`) are a posterior of *a* per evaluator and skill. What is known of an evaluator's other skills moves
//!   it, and what a card claims is a weak prior, worth what claims have proved worth. Old evidence fades.
//! - **Audits.** Something is learned only from tasks whose truth the student knows. There, a few more evaluators than are needed
//!   are examined, those whose accuracy, *drawn* from its posterior, is worth the price (Thompson sampling), as long as an
//!   allowance lasts. Everywhere else nothing can be learned, and the expected accuracy decides; but for a few decoys, so
//!   that a stranger that is hired cannot take it for an audit.
//! - **Others' evidence** (`pool.rs`) counts as far as its payer agrees with one's own audits. However many say the same, they are
//!   believed together no more than the most trusted of them. Nor do they, however many, make one forget what one has seen oneself.
//! - **Pacing** (`pacing.rs`) moves λ so that the budget lasts until the last task and is used by then.
//! - **Strangers**, who came after the student had begun and of whom it has audited too little itself, together cost at most a share
//!   of the budget, so that a bad evaluator gains little from coming back under another name, however many praise it.
//!
//! Whether panel members agree with each other is not evidence here: two liars that are friends always do.

mod allowance;
mod baselines;
mod beliefs;
mod beta;
mod book;
mod conduct;
mod config;
mod pacing;
mod pool;
mod skills;
mod thompson;

use alloy_primitives::Address;
pub use baselines::{CardClaims, Cheapest, Greedy, Random};
pub use config::ThompsonConfig;
pub use skills::{Skill, SkillSet, Skills};
pub use thompson::{Estimate, Thompson};
use tower_x402::Usdc;

use super::evidence::{CallOutcome, EvidenceLog};

/// An evaluator that could be hired now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// Who it is: the address that is paid. A card is only believed if this address signed it.
    pub evaluator: Address,
    /// What its card claims to be good at.
    pub claims: SkillSet,
    /// Per output.
    pub price: Usdc,
    /// When it was first seen, in seconds since the Unix epoch.
    pub first_seen: u64,
}

/// A task for which evaluators are wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Job {
    /// What it takes.
    pub skill: Skill,
    /// How many outputs are to be judged; each costs the price.
    pub outputs: u32,
    /// How many evaluators to hire at most.
    pub seats: usize,
    /// Whether the student knows the truth, and so will learn whether a verdict is right. No evaluator may know this.
    pub audit: bool,
    /// What may still be spent, without what is promised already.
    pub remaining: Usdc,
    /// For how many tasks that must do, this one included. Zero counts as one.
    pub tasks_left: u64,
    /// Seconds since the Unix epoch.
    pub now: u64,
}

impl Job {
    /// One output for one evaluator, its truth unknown, at the epoch; change the fields that differ.
    pub const fn new(skill: Skill, remaining: Usdc, tasks_left: u64) -> Self {
        Self { skill, outputs: 1, seats: 1, audit: false, remaining, tasks_left, now: 0 }
    }

    /// What hiring this candidate costs, if it can be expressed and is not more than there is.
    fn cost(&self, candidate: &Candidate) -> Option<u64> {
        let cost = candidate.price.checked_mul(u64::from(self.outputs))?;
        (cost <= self.remaining).then_some(cost.atomic())
    }

    /// What there is for a task, in atomic units.
    fn allowance(&self) -> f64 {
        self.remaining.atomic() as f64 / self.tasks_left.max(1) as f64
    }
}

/// Whom to send a task to, by position in the market; kept by the caller, so that choosing allocates nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Panel {
    /// Whose verdict the student wants, best first.
    pub hired: Vec<usize>,
    /// Of audits only: who is sent the same task to see how good it is.
    pub examined: Vec<usize>,
}

impl Panel {
    /// Everyone who is sent the task, and is paid.
    pub fn all(&self) -> impl Iterator<Item = usize> {
        self.hired.iter().chain(&self.examined).copied()
    }

    /// The same, in the same order, as choices to be [settled](Selector::record_cost).
    pub fn choices(&self, job: &Job, market: &[Candidate]) -> impl Iterator<Item = Choice> {
        self.all().enumerate().filter_map(|(number, position)| {
            let candidate = market.get(position)?;
            let promised = candidate.price.checked_mul(u64::from(job.outputs))?;
            Some(Choice { evaluator: candidate.evaluator, promised, examined: number >= self.hired.len() })
        })
    }

    fn clear(&mut self) {
        self.hired.clear();
        self.examined.clear();
    }
}

/// Someone who is sent a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Choice {
    /// Whom.
    pub evaluator: Address,
    /// What that may cost: the price of all outputs.
    pub promised: Usdc,
    /// Only to see how good it is ([`Panel::examined`]).
    pub examined: bool,
}

/// What became of one request to one evaluator.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Observation {
    /// Whom.
    pub evaluator: Address,
    /// For what.
    pub skill: Skill,
    /// What was paid; nothing for some failures.
    pub paid: Usdc,
    /// Seconds since the Unix epoch.
    pub at: u64,
    /// What came back.
    pub outcome: CallOutcome,
}

/// A way to choose evaluators.
///
/// Nothing in it waits or does I/O: a choice among a thousand takes less time than a packet.
pub trait Selector: Send {
    /// Writes into `panel` whom to hire, nobody if keeping the money is worth more. What is in `panel` before is removed.
    /// Together they cost at most `job.remaining`.
    fn select(&mut self, job: &Job, market: &[Candidate], panel: &mut Panel);

    /// Takes note of what became of a request. A choice may take several, if its outputs are sent in parts, or none of which there is
    /// anything to be said.
    fn learn(&mut self, observation: &Observation);

    /// Takes note of what a choice has cost in the end, which may be nothing. Every choice is settled once, whatever happened.
    fn record_cost(&mut self, choice: &Choice, paid: Usdc) {
        let _ = (choice, paid);
    }

    /// Takes in what another payer says it observed; that it paid for it must have been checked before. Unless this is overridden, it
    /// is not heard.
    fn learn_report(&mut self, payer: Address, observation: &Observation) {
        let _ = (payer, observation);
    }

    /// Takes in what was observed before, where `own` are the addresses that the student pays from.
    fn restore(&mut self, log: &EvidenceLog, own: &[Address], skills: &Skills) {
        log.for_each(|evidence| {
            let Some(skill) = skills.get(&evidence.skill) else { return };
            let observation = evidence.observation(skill);
            match evidence.payment {
                Some(payment) if !own.contains(&payment.payer) => self.learn_report(payment.payer, &observation),
                _ => self.learn(&observation),
            }
        });
    }

    /// The probability, as far as it believes, that a verdict of this evaluator is right; 0.5 is a coin. `None` if it has no opinion,
    /// which is all that it has unless this is overridden.
    fn expected_accuracy(&self, evaluator: Address, skill: Skill) -> Option<f64> {
        let _ = (evaluator, skill);
        None
    }
}

impl<S: Selector + ?Sized> Selector for Box<S> {
    fn select(&mut self, job: &Job, market: &[Candidate], panel: &mut Panel) {
        self.as_mut().select(job, market, panel);
    }

    fn learn(&mut self, observation: &Observation) {
        self.as_mut().learn(observation);
    }

    fn record_cost(&mut self, choice: &Choice, paid: Usdc) {
        self.as_mut().record_cost(choice, paid);
    }

    fn learn_report(&mut self, payer: Address, observation: &Observation) {
        self.as_mut().learn_report(payer, observation);
    }

    fn restore(&mut self, log: &EvidenceLog, own: &[Address], skills: &Skills) {
        self.as_mut().restore(log, own, skills);
    }

    fn expected_accuracy(&self, evaluator: Address, skill: Skill) -> Option<f64> {
        self.as_ref().expected_accuracy(evaluator, skill)
    }
}
