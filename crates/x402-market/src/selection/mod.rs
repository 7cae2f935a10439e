//! Which evaluators to hire for a task, by accuracy and price, or whether to keep the money.
//!
//! A [`Selector`] is asked before every task and told afterwards what became of it. [`Thompson`] is the one to use. [`Random`],
//! [`Cheapest`], [`CardClaims`] and [`Greedy`] are baselines.
//!
//! ```
//! use alloy_primitives::Address;
//! use tower_x402::Usdc;
//! use x402_market::selection::{Candidate, Job, Selector, Skills, Thompson};
//!
//! let skills: Skills = ["arithmetic"].into_iter().collect();
//! let now = 1_800_000_000;
//! let claims = skills.set(["arithmetic"]);
//! let market = [Candidate::new(Address::repeat_byte(7), claims, Usdc::from_atomic(300), now)];
//! let mut selector = Thompson::seeded(1);
//! let mut job = Job::new(skills.get("arithmetic").unwrap(), "$0.09".parse()?, 100);
//! job.now = now;
//! let panel = selector.select(&job, &market);
//! assert_eq!(panel.hired, [0]);
//! # Ok::<(), tower_x402::ParseUsdcError>(())
//! ```
//!
//! # How [`Thompson`] chooses
//!
//! A verdict that is right with probability *a* is worth 2*a* − 1: a coin toss is worth nothing. The student wants to buy the most value
//! with its budget. If every *a* were known, this would be a linear program, and its solution a *price of money* λ: hire the evaluator with
//! the largest 2*a* − 1 − λ·price, and nobody if that is negative. Since no *a* is known:
//!
//! - **Posteriors** (`posterior.rs`): the posterior of *a* for each evaluator and skill is a beta distribution. Evidence in other skills
//!   moves its mean. Claims on cards are a weak prior, worth what claims have proved worth. Old evidence fades.
//! - **Audits**: only tasks whose truth the student knows show who is right. In an audit a few more evaluators are *explored*: those whose
//!   accuracy, drawn from its posterior, is worth the price (Thompson sampling), within a share of the budget. For all other tasks the
//!   expected accuracy decides, except for a few decoys, so that a new evaluator cannot infer that it is being audited.
//! - **Reports of other payers** (`reports.rs`) count as far as their payer agrees with the student's own audits. Payers that report the
//!   same are together trusted no more than the most trusted of them, and cannot make the student forget what it has seen itself.
//! - **Pacing** (`pacing.rs`) moves λ so that the budget is used up by the last task, and not before.
//! - **Newcomers**, which came after the student began and which it has not audited often enough, together cost at most a share of the
//!   budget. So a bad evaluator gains little from a new identity, even if others praise it.
//!
//! Agreement between panel members is not evidence: evaluators that collude always agree.

mod baselines;
mod index;
mod pacing;
mod posterior;
mod reports;
mod thompson;

use std::collections::BTreeMap;

use alloy_primitives::Address;
use auto_impl::auto_impl;
pub use baselines::{CardClaims, Cheapest, Greedy, Random};
pub use thompson::{Estimate, Thompson, ThompsonConfig};
use tower_x402::Usdc;

use super::evidence::{CallOutcome, EvidenceLog};

/// A way to choose evaluators.
///
/// Implementations neither wait nor do I/O: the student calls them under its lock.
#[auto_impl(Box)]
pub trait Selector: Send {
    /// Chooses evaluators for a job; none if keeping the money is worth more. Together they cost at most `job.remaining`.
    fn select(&mut self, job: &Job, market: &[Candidate]) -> Panel;

    /// Learns what became of a request. A choice leads to several requests if its outputs are sent in parts, and to none if the evaluator
    /// is not to blame.
    fn learn(&mut self, observation: &Observation);

    /// Learns what a choice has cost in the end, which may be nothing. It is called once for every choice.
    fn record_cost(&mut self, choice: &Choice, paid: Usdc) {
        let _ = (choice, paid);
    }

    /// Learns what another payer reports. The caller has checked that the payment took place. By default reports are ignored.
    fn learn_report(&mut self, payer: Address, observation: &Observation) {
        let _ = (payer, observation);
    }

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
    }

    /// Returns the probability that a verdict of this evaluator is right; 0.5 is a coin toss. By default there is no estimate.
    fn expected_accuracy(&self, evaluator: Address, skill: Skill) -> Option<f64> {
        let _ = (evaluator, skill);
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
    /// When it was first seen, in seconds since the Unix epoch.
    pub first_seen: u64,
}

impl Candidate {
    /// Creates a candidate. `evaluator` is the address that is paid, `first_seen` a time in seconds since the Unix epoch.
    pub const fn new(evaluator: Address, claims: SkillSet, price: Usdc, first_seen: u64) -> Self {
        Self { evaluator, claims, price, first_seen }
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
    /// `true` if the student knows the truth, and so will learn whether a verdict is right. Evaluators must not know this.
    pub audit: bool,
    /// The amount that may be spent, without what is promised already.
    pub remaining: Usdc,
    /// The number of tasks that `remaining` must last for, this one included. Zero counts as one.
    pub tasks_left: u64,
    /// The time, in seconds since the Unix epoch.
    pub now: u64,
}

impl Job {
    /// Creates a job for one evaluator and one output, without audit, at the epoch. Change the fields that differ.
    pub const fn new(skill: Skill, remaining: Usdc, tasks_left: u64) -> Self {
        Self { skill, outputs: 1, seats: 1, audit: false, remaining, tasks_left, now: 0 }
    }

    /// Returns what hiring this candidate costs, in atomic units; `None` if that is more than remains.
    fn cost(&self, candidate: &Candidate) -> Option<u64> {
        let cost = candidate.price.checked_mul(u64::from(self.outputs))?;
        (cost <= self.remaining).then_some(cost.atomic())
    }

    /// Returns what remains for each task, in atomic units.
    fn allowance(&self) -> f64 {
        self.remaining.atomic() as f64 / self.tasks_left.max(1) as f64
    }
}

/// The evaluators to send a task to, by position in the market.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Panel {
    /// The evaluators whose verdict the student wants, best first.
    pub hired: Vec<usize>,
    /// The evaluators that are sent an audit only to learn how accurate they are.
    pub explored: Vec<usize>,
}

impl Panel {
    /// Creates a panel from positions in the market.
    pub const fn new(hired: Vec<usize>, explored: Vec<usize>) -> Self {
        Self { hired, explored }
    }

    /// Returns all evaluators that are sent the task, and paid: those hired, then those explored.
    pub fn all(&self) -> impl Iterator<Item = usize> {
        self.hired.iter().chain(&self.explored).copied()
    }

    /// Returns the same in the same order, each with the choice whose [cost is recorded](Selector::record_cost) later.
    pub fn choices(&self, job: &Job, market: &[Candidate]) -> impl Iterator<Item = (usize, Choice)> {
        self.all().enumerate().filter_map(|(number, position)| {
            let candidate = market.get(position)?;
            let promised = candidate.price.checked_mul(u64::from(job.outputs))?;
            let is_exploration = number >= self.hired.len();
            Some((position, Choice { evaluator: candidate.evaluator, promised, is_exploration }))
        })
    }
}

/// An evaluator that is sent a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Choice {
    /// The address that is paid.
    pub evaluator: Address,
    /// The most that the choice may cost: the price of all outputs.
    pub promised: Usdc,
    /// `true` if it is only to learn how accurate the evaluator is ([`Panel::explored`]).
    pub is_exploration: bool,
}

/// The result of one request to one evaluator.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct Observation {
    /// The address that is paid.
    pub evaluator: Address,
    /// The skill of the task.
    pub skill: Skill,
    /// The amount paid, zero for some failures.
    pub paid: Usdc,
    /// The time, in seconds since the Unix epoch.
    pub at: u64,
    /// The result.
    pub outcome: CallOutcome,
}

impl Observation {
    /// Creates an observation. `evaluator` is the address that is paid, `at` the time in seconds since the Unix epoch.
    pub const fn new(evaluator: Address, skill: Skill, paid: Usdc, at: u64, outcome: CallOutcome) -> Self {
        Self { evaluator, skill, paid, at, outcome }
    }
}

/// The number of a skill, from 0 to 63.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Skill(u8);

impl Skill {
    /// The number of skills that can be told apart.
    pub const LIMIT: usize = 64;

    /// Returns the skill with this number, if it is below [`Skill::LIMIT`].
    pub const fn new(number: usize) -> Option<Self> {
        if number < Self::LIMIT { Some(Self(number as u8)) } else { None }
    }

    /// Returns the number.
    pub const fn number(self) -> usize {
        self.0 as usize
    }
}

/// A set of skills.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct SkillSet(u64);

impl SkillSet {
    /// Returns `true` if the set has this skill.
    pub const fn contains(self, skill: Skill) -> bool {
        self.0 >> skill.0 & 1 == 1
    }

    /// Adds a skill.
    pub const fn insert(&mut self, skill: Skill) {
        self.0 |= 1 << skill.0;
    }
}

impl FromIterator<Skill> for SkillSet {
    fn from_iter<I: IntoIterator<Item = Skill>>(skills: I) -> Self {
        let mut set = Self::default();
        skills.into_iter().for_each(|skill| set.insert(skill));
        set
    }
}

/// The names of the skills that a student has work for.
///
/// Other skills on cards are ignored, so that evaluators cannot fill the table.
///
/// ```
/// use x402_market::selection::Skills;
///
/// let skills: Skills = ["arithmetic", "prose"].into_iter().collect();
/// let claimed = skills.set(["prose", "clairvoyance"]);
/// assert!(claimed.contains(skills.get("prose").unwrap()));
/// assert!(!claimed.contains(skills.get("arithmetic").unwrap()));
/// ```
#[derive(Clone, Debug, Default)]
pub struct Skills(BTreeMap<String, Skill>);

impl Skills {
    /// Returns the skill of this name, which gets a number if it has none. Returns `None` if there are [`Skill::LIMIT`] others.
    pub fn insert(&mut self, name: &str) -> Option<Skill> {
        if let Some(skill) = self.get(name) {
            return Some(skill);
        }
        let skill = Skill::new(self.0.len())?;
        self.0.insert(name.to_owned(), skill);
        Some(skill)
    }

    /// Returns the skill of this name.
    pub fn get(&self, name: &str) -> Option<Skill> {
        self.0.get(name).copied()
    }

    /// Returns the number of skills.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns `true` if there are no skills.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns those of the names that have a number.
    pub fn set<'a>(&self, names: impl IntoIterator<Item = &'a str>) -> SkillSet {
        names.into_iter().filter_map(|name| self.get(name)).collect()
    }
}

impl<'a> FromIterator<&'a str> for Skills {
    /// Names beyond the limit are left out.
    fn from_iter<I: IntoIterator<Item = &'a str>>(names: I) -> Self {
        let mut skills = Self::default();
        for name in names {
            skills.insert(name);
        }
        skills
    }
}
