//! Which evaluators to hire for a task, by worth and price, or whether to keep the money.
//!
//! A [`Selector`] is asked before every task and told afterwards what became of it. [`Thompson`] is the one to use.
//!
//! ```
//! use alloy_primitives::Address;
//! use tower_x402::Usdc;
//! use x402_market::selection::{Candidate, Job, Selector, Skills, Thompson};
//!
//! let skills: Skills = ["arithmetic"].into_iter().collect();
//! let claims = skills.set(["arithmetic"]);
//! let market = [Candidate::new(Address::repeat_byte(7), claims, Usdc::from_atomic(300))];
//! let mut selector = Thompson::seeded(1);
//! let job = Job::new(skills.get("arithmetic").unwrap(), "$0.09".parse()?, 100);
//! assert_eq!(selector.select(&job, &market), [0]);
//! # Ok::<(), tower_x402::ParseUsdcError>(())
//! ```
//!
//! # How [`Thompson`] chooses
//!
//! An evaluator is worth how well it orders outputs: the [ordering advantage](Pairs::worth) D, from -1 to 1, is 0 for a coin and for
//! one that always says the same. The student wants to buy the most worth with its budget. If every D were known, this would be a linear
//! program, and its solution a *price of money* λ: hire the evaluator with the largest D − λ·price, and nobody if that is negative. Since
//! no D is known:
//!
//! - **Posteriors**: (1 + D) / 2 has a beta distribution for each evaluator and skill. The claim on the card is a weak prior.
//! - **Audits** alone show who orders rightly. After an audit, a few more evaluators are asked about the same outputs: those whose D,
//!   drawn from its posterior, is worth the price (Thompson sampling), within a share of the budget.
//! - **Reports of other payers** count as far as their payer agrees with the student's own audits. Payers that report the same are together
//!   trusted no more than the most trusted of them, so nobody gains trust by repetition or by number.
//! - **Forgetting**: all evidence fades at one rate, as new evidence comes in.
//! - **Pacing** moves λ so that the budget is used up by the last task, and not before.
//!
//! Agreement between panel members is not evidence: evaluators that collude always agree.

mod beliefs;
mod config;
mod thompson;

use alloy_primitives::Address;
use auto_impl::auto_impl;
pub use config::ThompsonConfig;
pub use thompson::{Estimate, Thompson};
use tower_x402::Usdc;

use super::evidence::{CallOutcome, EvidenceLog, Pairs};
pub use super::{
    evidence::Observation,
    skills::{Skill, SkillSet, Skills},
};

/// A way to choose evaluators.
///
/// Implementations neither wait nor do I/O: the student calls them under its lock.
#[auto_impl(Box)]
#[allow(unused_variables, reason = "the defaults learn nothing")]
pub trait Selector: Send {
    /// Returns the evaluators to hire for a job, by position in the market, the best first; none if keeping the money is worth more.
    /// Together they cost at most `job.remaining`.
    fn select(&mut self, job: &Job, market: &[Candidate]) -> Vec<usize>;

    /// Returns further evaluators to ask about outputs whose truth is known, only to learn about them. By default there are none.
    fn explore(&mut self, job: &Job, market: &[Candidate]) -> Vec<usize> {
        Vec::new()
    }

    /// Learns what became of a request. A choice leads to several requests if its outputs are sent in parts, and to none if the evaluator
    /// is not to blame.
    fn learn(&mut self, observation: &Observation);

    /// Learns the result of an audit of an evaluation that it has [learned](Self::learn) of before. By default it is ignored.
    fn learn_audit(&mut self, evaluator: Address, skill: Skill, pairs: Pairs) {}

    /// Learns that an evaluator judges by another version of itself from now on. By default it is ignored.
    fn learn_new_version(&mut self, evaluator: Address) {}

    /// Learns what another payer reports. The caller has checked that the payment took place. By default reports are ignored.
    fn learn_report(&mut self, payer: Address, observation: &Observation) {}

    /// Learns what explorations have cost in an earlier run. By default it is ignored.
    fn learn_exploration_cost(&mut self, paid: Usdc) {}

    /// Learns a log of earlier evidence. `own` are the addresses that the student pays from; records of other payers are reports.
    fn restore(&mut self, log: &EvidenceLog, own: &[Address], skills: &Skills) {
        log.for_each(|evidence| {
            let Some(skill) = skills.get(&evidence.skill) else { return };
            let observation = evidence.observation(skill);
            match evidence.payment {
                Some(payment) if !own.contains(&payment.payer) => self.learn_report(payment.payer, &observation),
                _ => self.learn(&observation),
            }
        });
        self.learn_exploration_cost(log.exploration_cost());
    }

    /// Returns the worth that is expected of this evaluator: its [ordering advantage](Pairs::worth) D, from -1 to 1. By default there is no
    /// estimate.
    fn expected_worth(&self, evaluator: Address, skill: Skill) -> Option<f64> {
        None
    }
}

/// An evaluator that could be hired now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Candidate {
    /// The address that is paid.
    pub evaluator: Address,
    /// The skills that its signed card claims to be good at.
    pub claims: SkillSet,
    /// The price per output.
    pub price: Usdc,
}

impl Candidate {
    /// Creates a candidate. `evaluator` is the address that is paid.
    pub const fn new(evaluator: Address, claims: SkillSet, price: Usdc) -> Self {
        Self { evaluator, claims, price }
    }
}

/// A task for which evaluators are wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Job {
    /// The skill that judging it takes.
    pub skill: Skill,
    /// The number of outputs to judge. Each costs the price.
    pub outputs: u32,
    /// The number of evaluators to hire at most.
    pub seats: usize,
    /// The amount that may be spent, without what is promised already.
    pub remaining: Usdc,
    /// The number of tasks that `remaining` must last for, this one included. Zero counts as one.
    pub tasks_left: u64,
}

impl Job {
    /// Creates a job for one evaluator and one output. Change the fields that differ.
    pub const fn new(skill: Skill, remaining: Usdc, tasks_left: u64) -> Self {
        Self { skill, outputs: 1, seats: 1, remaining, tasks_left }
    }

    /// Returns what hiring this candidate costs: the price of all outputs. `None` if that cannot be expressed.
    pub fn cost(&self, candidate: &Candidate) -> Option<Usdc> {
        candidate.price.checked_mul(u64::from(self.outputs))
    }

    /// Takes candidates in this order, by position in the market, as many as there are seats and money for.
    pub fn hire(&self, market: &[Candidate], order: impl IntoIterator<Item = usize>) -> Vec<usize> {
        let mut left = self.remaining;
        let is_affordable = |position: &usize| {
            let rest = market.get(*position).and_then(|candidate| left.checked_sub(self.cost(candidate)?));
            rest.inspect(|rest| left = *rest).is_some()
        };
        order.into_iter().filter(is_affordable).take(self.seats).collect()
    }

    /// Returns what remains for each task, in atomic units.
    fn allowance(&self) -> f64 {
        (self.remaining.atomic() as f64 / self.tasks_left.max(1) as f64).max(1e-6)
    }
}
