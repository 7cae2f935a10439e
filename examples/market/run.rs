//! Runs one policy in one world with one seed.

use alloy_primitives::Address;
use rand::{RngExt, SeedableRng, rngs::Xoshiro256PlusPlus, seq::SliceRandom};
use tower_x402::Usdc;
use x402_market::{
    evidence::{CallOutcome, Pairs},
    selection::{Candidate, Job, Observation, Selector, Skill, Thompson, ThompsonConfig},
};

use super::{baselines::Random, oracle, world::World};

/// A policy for hiring.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Policy {
    /// Any evaluator, at random
    Random,
    /// The cheapest evaluator
    Cheapest,
    /// Any evaluator whose card claims the skill
    CardClaims,
    /// Thompson sampling with a price of money, on a student's own audits only
    Alone,
    /// The same, with the audits of other students where the world shares them
    Thompson,
}

impl Policy {
    /// Returns the name on the command line.
    pub(crate) fn name(self) -> String {
        clap::ValueEnum::to_possible_value(&self).map(|value| value.get_name().to_owned()).unwrap_or_default()
    }
}

/// The outcomes of a run, by task, summed over all students.
#[derive(Clone, Debug, Default)]
pub(crate) struct Outcomes {
    /// Σ 2·accuracy − 1 of the evaluators hired, by their true accuracy. That is their worth D.
    pub(crate) value: Vec<f64>,
    /// The spending by evaluator, in atomic units.
    pub(crate) paid: Vec<Vec<f64>>,
    /// Counts over the last fifth of the tasks.
    pub(crate) late: Late,
    /// The students' final trust in each other, and in the colluders' payers: 0 to 1.
    pub(crate) trust: Option<f64>,
    pub(crate) trust_in_shams: Option<f64>,
}

/// Counts of evaluations bought, and of tasks.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Late {
    pub(crate) bought: usize,
    /// From the most accurate evaluator in the skill, whatever its price.
    pub(crate) best: usize,
    /// From an evaluator with an accuracy below 0.6 in the skill.
    pub(crate) poor: usize,
    pub(crate) tasks: usize,
    /// Tasks for which nobody was hired.
    pub(crate) unserved: usize,
}

impl Outcomes {
    /// Returns the total spending, in atomic units.
    pub(crate) fn spent(&self) -> f64 {
        self.paid.iter().flatten().sum()
    }

    /// Returns the value as a share of the oracle's.
    pub(crate) fn share(&self, world: &World) -> f64 {
        let best: f64 = oracle::by_task(world).iter().sum();
        self.value.iter().sum::<f64>() / (best * world.students as f64)
    }
}

/// Hires the cheapest evaluators.
#[derive(Debug, Default)]
pub(crate) struct Cheapest;

impl Selector for Cheapest {
    fn select(&mut self, job: &Job, market: &[Candidate]) -> Vec<usize> {
        let mut order: Vec<_> = (0..market.len()).collect();
        order.sort_unstable_by_key(|position| (market[*position].price, *position));
        job.hire(market, order)
    }

    fn learn(&mut self, _: &Observation) {}
}

/// A student, which may use the reports of others.
enum Student {
    Simple(Box<dyn Selector>),
    Thompson(Box<Thompson>),
}

impl Student {
    fn new(policy: Policy, config: &ThompsonConfig, seed: u64) -> Self {
        Self::Simple(match policy {
            Policy::Random => Box::new(Random::any(seed)),
            Policy::Cheapest => Box::new(Cheapest),
            Policy::CardClaims => Box::new(Random::claimed(seed)),
            Policy::Alone | Policy::Thompson => return Self::Thompson(Box::new(thompson(config, seed))),
        })
    }

    fn selector(&mut self) -> &mut dyn Selector {
        match self {
            Self::Simple(selector) => selector.as_mut(),
            Self::Thompson(selector) => selector.as_mut(),
        }
    }

    fn learn_report(&mut self, payer: Address, observation: &Observation) {
        if let Self::Thompson(selector) = self {
            selector.learn_report(payer, observation);
        }
    }
}

/// Creates the selector of a student. If the price of money is to stay as it is, it is next to nothing.
pub(crate) fn thompson(config: &ThompsonConfig, seed: u64) -> Thompson {
    let mut selector = Thompson::new(config.clone(), seed);
    if let (Some(any), true) = (Skill::new(0), config.pace == 0.0) {
        // The first job sets the price of money.
        selector.select(&Job::new(any, Usdc::MAX, 1), &[]);
    }
    selector
}

/// A part of the selection that can be left out, to see what it is worth.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Mechanism {
    /// Every payer is believed alike
    Trust,
    /// Cards are not believed
    Claims,
    /// Nobody is asked only to learn about it
    Exploration,
    /// Old evidence counts as much as new
    Forgetting,
    /// Money has no price: the best is hired while there is money
    Price,
}

impl Mechanism {
    pub(crate) fn remove(self, config: &mut ThompsonConfig) {
        match self {
            Self::Trust => config.initial_trust = 1.0,
            Self::Claims => config.claimed_worth = config.unclaimed_worth,
            Self::Exploration => config.exploration_share = 0.0,
            Self::Forgetting => config.memory = f32::INFINITY,
            Self::Price => config.pace = 0.0,
        }
    }
}

/// A participant, for its address.
#[derive(Clone, Copy)]
enum Role {
    Evaluator { life: usize },
    Student,
    Sham,
}

fn address(role: Role, number: usize) -> Address {
    let (kind, life) = match role {
        Role::Evaluator { life } => (1, life),
        Role::Student => (2, 0),
        Role::Sham => (3, 0),
    };
    let mut bytes = [0; 20];
    bytes[0] = kind;
    bytes[4..12].copy_from_slice(&(life as u64).to_be_bytes());
    bytes[12..].copy_from_slice(&(number as u64).to_be_bytes());
    Address::from(bytes)
}

/// Returns the evaluators at a task, in the order of the world.
fn candidates(world: &World, task: usize) -> Vec<Candidate> {
    let candidate = |(number, evaluator): (usize, &super::world::Evaluator)| {
        Candidate::new(
            address(Role::Evaluator { life: evaluator.life(task) }, number),
            evaluator.claims.iter().filter_map(|skill| Skill::new(*skill)).collect(),
            Usdc::from_atomic(evaluator.at(task).1),
        )
    };
    world.evaluators.iter().enumerate().map(candidate).collect()
}

/// Returns an audit of one pair of outputs.
fn pair(is_right: bool) -> Option<Pairs> {
    Pairs::new(is_right.into(), (!is_right).into(), 1)
}

struct Run<'a> {
    world: &'a World,
    students: Vec<Student>,
    left: Vec<u64>,
    /// Whether students share their audits.
    pooled: bool,
    /// The evaluators in a shuffled order, so that their position carries no information.
    order: Vec<usize>,
    /// Random numbers for what does not depend on the policy, so that policies can be compared seed by seed.
    luck: Xoshiro256PlusPlus,
    /// Random numbers for what depends on the policy.
    fate: Xoshiro256PlusPlus,
    out: Outcomes,
}

/// Runs `policy` in `world`. The result depends only on the arguments.
pub(crate) fn run(world: &World, policy: Policy, config: &ThompsonConfig, seed: u64) -> Outcomes {
    let mut luck = Xoshiro256PlusPlus::seed_from_u64(seed);
    let mut order: Vec<_> = (0..world.evaluators.len()).collect();
    order.shuffle(&mut luck);
    let mut run = Run {
        world,
        students: (0..world.students).map(|number| Student::new(policy, config, seed << 20 | number as u64)).collect(),
        left: vec![world.budget_per_task_microusdc * world.tasks_per_student as u64; world.students],
        pooled: world.pooled && policy == Policy::Thompson,
        order,
        luck,
        fate: Xoshiro256PlusPlus::seed_from_u64(!seed),
        out: Outcomes::default(),
    };
    for task in 0..world.tasks_per_student {
        let offered = candidates(world, task);
        let market: Vec<_> = run.order.iter().map(|number| offered[*number]).collect();
        run.out.value.push(0.0);
        run.out.paid.push(vec![0.0; market.len()]);
        for student in 0..world.students {
            run.task(task, student, &market);
        }
        if run.pooled {
            run.shams(task, &offered);
        }
    }
    run.judge_trust();
    run.out
}

impl Run<'_> {
    fn task(&mut self, task: usize, student: usize, market: &[Candidate]) {
        let number = self.luck.random_range(0..self.world.skills);
        let audit = self.luck.random_bool(self.world.audit_rate);
        let luck: f64 = self.luck.random();
        let Some(skill) = Skill::new(number) else { return };
        let remaining = Usdc::from_atomic(self.left[student]);
        let job = Job::new(skill, remaining, (self.world.tasks_per_student - task) as u64);
        let accuracies: Vec<_> =
            self.order.iter().map(|evaluator| self.world.evaluators[*evaluator].at(task).0[number]).collect();
        let mut asked = self.students[student].selector().select(&job, market);
        self.count(task, &asked, &accuracies);
        let hired = asked.first().copied();
        if let Some(hired) = hired {
            self.out.value[task] += 2.0 * accuracies[hired] - 1.0;
            self.pay(task, student, hired, market);
        }
        if audit {
            // The others are asked about the same outputs, once the truth is known.
            let others: Vec<_> = (0..market.len()).filter(|position| Some(*position) != hired).collect();
            let market: Vec<_> = others.iter().map(|position| market[*position]).collect();
            let mut job = job;
            job.remaining = Usdc::from_atomic(self.left[student]);
            let explored = self.students[student].selector().explore(&job, &market);
            asked.extend(explored.into_iter().map(|chosen| others[chosen]));
        }
        for chosen in asked {
            let candidate = &market[chosen];
            let draw = if Some(chosen) == hired { luck } else { self.fate.random() };
            let pairs = if audit { self.audit(draw, accuracies[chosen]) } else { None };
            let outcome = CallOutcome::answered(pairs);
            let observation = Observation::new(candidate.evaluator, skill, candidate.price, outcome);
            if Some(chosen) != hired {
                self.pay(task, student, chosen, market);
                self.count_bought(task, chosen, &accuracies);
            }
            self.students[student].selector().learn(&observation);
            if self.pooled && audit {
                let payer = address(Role::Student, student);
                let others = self.students.iter_mut().enumerate().filter(|(other, _)| *other != student);
                others.for_each(|(_, other)| other.learn_report(payer, &observation));
            }
        }
    }

    /// Returns what an audit of an evaluator with this accuracy shows. `draw` decides on a single comparison.
    fn audit(&mut self, draw: f64, accuracy: f64) -> Option<Pairs> {
        let half = self.world.audited_outputs / 2;
        if half == 0 {
            return pair(draw < accuracy);
        }
        let mut right = || (0..half).filter(|_| self.fate.random_bool(accuracy)).count() as u32;
        let (good, bad) = (right(), right());
        Pairs::new(good * bad, (half - good) * (half - bad), half * half)
    }

    fn pay(&mut self, task: usize, student: usize, chosen: usize, market: &[Candidate]) {
        let price = market[chosen].price.atomic();
        self.left[student] = self.left[student].checked_sub(price).expect("a selector spends what there is");
        self.out.paid[task][self.order[chosen]] += price as f64;
    }

    fn count(&mut self, task: usize, hired: &[usize], accuracies: &[f64]) {
        if task >= self.world.tasks_per_student * 4 / 5 {
            self.out.late.tasks += 1;
            self.out.late.unserved += usize::from(hired.is_empty());
            hired.iter().for_each(|chosen| self.count_bought(task, *chosen, accuracies));
        }
    }

    fn count_bought(&mut self, task: usize, chosen: usize, accuracies: &[f64]) {
        if task >= self.world.tasks_per_student * 4 / 5 {
            let most = accuracies.iter().copied().fold(0.0, f64::max);
            let late = &mut self.out.late;
            late.bought += 1;
            late.best += usize::from(accuracies[chosen] == most);
            late.poor += usize::from(accuracies[chosen] < 0.6);
        }
    }

    /// Publishes one audit of every colluder's payer, about an evaluator in a skill that it claims: "right" for the colluder and its
    /// friend; for others "wrong", or the truth if the colluder is subtle.
    fn shams(&mut self, task: usize, offered: &[Candidate]) {
        for (number, colluder) in self.world.evaluators.iter().enumerate() {
            let Some(friend) = &colluder.colludes_with else { continue };
            let about = self.fate.random_range(0..offered.len());
            let subject = &self.world.evaluators[about];
            let Some(claimed) = subject.claims.len().checked_sub(1) else { continue };
            let claim = subject.claims[self.fate.random_range(0..=claimed)];
            let Some(skill) = Skill::new(claim) else { continue };
            let honest = colluder.subtle && self.fate.random_bool(subject.at(task).0[claim]);
            let praise = about == number || subject.name == *friend || honest;
            let Candidate { evaluator, price, .. } = offered[about];
            let observation = Observation::new(evaluator, skill, price, CallOutcome::answered(pair(praise)));
            for student in &mut self.students {
                student.learn_report(address(Role::Sham, number), &observation);
            }
        }
    }

    fn judge_trust(&mut self) {
        let (mut students, mut shams) = (Vec::new(), Vec::new());
        let colluders: Vec<_> =
            (0..self.world.evaluators.len()).filter(|n| self.world.evaluators[*n].colludes_with.is_some()).collect();
        for (number, student) in self.students.iter().enumerate() {
            let Student::Thompson(student) = student else { continue };
            let others = (0..self.world.students).filter(|other| *other != number);
            students.extend(others.map(|other| student.trust(address(Role::Student, other))));
            shams.extend(colluders.iter().map(|colluder| student.trust(address(Role::Sham, *colluder))));
        }
        let mean = |all: &[f64]| (self.pooled && !all.is_empty()).then(|| all.iter().sum::<f64>() / all.len() as f64);
        (self.out.trust, self.out.trust_in_shams) = (mean(&students), mean(&shams));
    }
}
