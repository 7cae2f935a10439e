//! Trains the students of one arm, all at the same time, and counts what they spend.

use std::{collections::BTreeMap, iter};

use alloy_primitives::{Address, B256, keccak256};
use alloy_signer_local::PrivateKeySigner;
use anyhow::Context as _;
use tokio::runtime::Runtime;
use tower_x402::Usdc;
use x402_judges::LearningJudge;
use x402_market::{
    Lesson, Submission,
    evidence::{CallOutcome, Pairs},
    judge::Judge as _,
    selection::{Candidate, Job, Observation, Selector, Skill, ThompsonConfig},
};

use super::{
    baselines::Random,
    market::run::thompson,
    own::OwnModel,
    rng::Rng,
    table::{Table, standardized},
    world::{Method, Task, World, text},
};

/// How many outputs a group has.
pub(crate) const GROUP: usize = 8;
/// What the truth about an output costs, in µUSDC.
pub(crate) const TRUTH: u64 = 20_000;
/// The budget for each output of the course, in µUSDC. Arms that audit set half of it aside for truths.
const BUDGET: u64 = 2_000;
/// How often quality is noted, in groups.
pub(crate) const NOTED: usize = 10;
/// The quality that is waited for, and that at which diversity is compared.
const GOAL: f64 = 0.9;
const FAIR: f64 = 0.8;

/// The source of the rewards.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Teacher {
    /// The truth about every output, whatever it costs.
    Truth,
    /// The truth, group after group, until the budget is spent.
    TruthInBudget,
    /// The truth about audited groups.
    Audits,
    /// Any evaluator.
    Random,
    /// Any evaluator that claims the skill.
    Claims,
    /// Always these evaluators, averaged.
    Mixture(Vec<usize>),
    /// For each skill one evaluator that claims it, drawn once.
    ByType,
    /// The market.
    Market,
    /// A reward model of the student's own, on its audits; `truth`: audited groups are learned by the truth.
    Own { truth: bool },
    /// A reward model on outputs of the untrained policy in the first two contexts.
    TrainedOnce,
    /// The share of the group with the same result.
    Itself,
}

/// An arm.
#[derive(Clone, Debug)]
pub(crate) struct Arm {
    pub(crate) name: String,
    pub(crate) teacher: Teacher,
    /// How many students learn at the same time and share audits.
    pub(crate) students: usize,
    /// The share of groups that are audited.
    pub(crate) audits: f64,
    pub(crate) config: ThompsonConfig,
    pub(crate) has_anchors: bool,
    /// Groups of one distinct output are audited as others are, with their anchors.
    pub(crate) audits_equals: bool,
    /// In audits, an output counts as often as it was made. Students do not do that.
    pub(crate) counts_copies: bool,
    /// Evaluators are measured by accuracy.
    pub(crate) by_accuracy: bool,
    /// Evaluators that learn are told the truth.
    pub(crate) lessons: bool,
}

impl Arm {
    pub(crate) fn new(name: impl Into<String>, teacher: Teacher) -> Self {
        Self {
            name: name.into(),
            teacher,
            students: 1,
            audits: 0.05,
            config: ThompsonConfig::default(),
            has_anchors: true,
            audits_equals: true,
            counts_copies: false,
            by_accuracy: false,
            lessons: true,
        }
    }

    pub(crate) fn market(name: impl Into<String>, students: usize) -> Self {
        Self { students, ..Self::new(name, Teacher::Market) }
    }

    fn audits(&self) -> bool {
        matches!(self.teacher, Teacher::Market | Teacher::Audits | Teacher::Own { .. })
    }
}

/// What became of a student, or the mean of several.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Outcome {
    /// The quality after every [`NOTED`] groups.
    pub(crate) curve: Vec<f64>,
    /// The share of students that reached the goal; what these had spent by then on verdicts, in dollars, and how many truths they had bought.
    pub(crate) reached: f64,
    pub(crate) until: [f64; 2],
    /// What was spent on verdicts in all, in dollars, and how many truths were bought.
    pub(crate) verdicts: f64,
    pub(crate) truths: f64,
    /// How many outputs were made for groups that were judged or would have been, and how many of them were sent.
    pub(crate) made: f64,
    pub(crate) sent: f64,
    /// Pairs ordered rightly less wrongly, by who was hired and by the best.
    pub(crate) ordered: [f64; 2],
    /// In how many ways right outputs are right: in the end, and when quality was first fair.
    pub(crate) ways: f64,
    pub(crate) ways_when_fair: Option<f64>,
}

impl Outcome {
    pub(crate) fn quality(&self) -> f64 {
        self.curve.last().copied().unwrap_or_default()
    }

    pub(crate) fn mean(&self) -> f64 {
        self.curve.iter().sum::<f64>() / self.curve.len().max(1) as f64
    }

    /// Returns the value of what was hired as a share of the best.
    pub(crate) fn value(&self) -> f64 {
        self.ordered[0] / self.ordered[1].max(1.0)
    }

    /// Returns the mean of the students of a run.
    fn of(all: &[Self]) -> Self {
        let mean = |of: &dyn Fn(&Self) -> f64| all.iter().map(of).sum::<f64>() / all.len().max(1) as f64;
        let reached: f64 = all.iter().map(|one| one.reached).sum();
        let until = |at: usize| all.iter().map(|one| one.reached * one.until[at]).sum::<f64>() / reached.max(1.0);
        let fair: Vec<f64> = all.iter().filter_map(|one| one.ways_when_fair).collect();
        Self {
            curve: (0..all[0].curve.len()).map(|at| mean(&|one| one.curve[at])).collect(),
            reached: mean(&|one| one.reached),
            until: [until(0), until(1)],
            verdicts: mean(&|one| one.verdicts),
            truths: mean(&|one| one.truths),
            made: mean(&|one| one.made),
            sent: mean(&|one| one.sent),
            ordered: [0, 1].map(|at| mean(&|one| one.ordered[at])),
            ways: mean(&|one| one.ways),
            ways_when_fair: (!fair.is_empty()).then(|| fair.iter().sum::<f64>() / fair.len() as f64),
        }
    }
}

/// Trains the students of an arm. The result depends only on the arguments.
pub(crate) fn run(world: &World, arm: &Arm, seed: u64) -> anyhow::Result<Outcome> {
    let mut course = Course::new(world, arm, seed)?;
    for group in 0..world.groups {
        for student in 0..arm.students {
            course.step(student, group)?;
        }
    }
    Ok(Outcome::of(&course.students.into_iter().map(|student| student.out).collect::<Vec<_>>()))
}

/// A student.
struct Student {
    key: PrivateKeySigner,
    policy: Table,
    /// For the tasks and audits, and for the policy's draws.
    tasks: Rng,
    draws: Rng,
    selector: Box<dyn Selector>,
    model: OwnModel,
    /// Money left for verdicts, and for truths, in µUSDC.
    purse: u64,
    truth_purse: u64,
    /// By seller: how many evaluations it sold to this student, and the version that it judged by.
    sold: Vec<u64>,
    versions: BTreeMap<usize, String>,
    out: Outcome,
}

struct Course<'a> {
    world: &'a World,
    arm: &'a Arm,
    seed: u64,
    /// The sellers in any order, so that their position says nothing.
    order: Vec<usize>,
    learners: BTreeMap<usize, LearningJudge>,
    runtime: Runtime,
    students: Vec<Student>,
}

/// What is sent to evaluators.
struct Sent {
    task: Task,
    /// The actions, each once.
    actions: Vec<usize>,
    /// How often each was made; anchors not at all.
    made: Vec<usize>,
    good: Vec<bool>,
}

impl Sent {
    /// Returns the share of the group that comes to the same result as each output. All right outputs have one result.
    fn agreement(&self) -> Vec<f64> {
        let all = 0..self.actions.len();
        let share = |one: usize| {
            let same = all.clone().filter(|other| *other == one || self.good[*other] && self.good[one]);
            same.map(|other| self.made[other] as f64).sum::<f64>() / GROUP as f64
        };
        all.clone().map(share).collect()
    }
}

impl<'a> Course<'a> {
    fn new(world: &'a World, arm: &'a Arm, seed: u64) -> anyhow::Result<Self> {
        let budget = BUDGET * (world.groups * GROUP) as u64;
        let (purse, truth_purse) = match arm.teacher {
            Teacher::TruthInBudget => (0, budget),
            Teacher::Truth => (0, u64::MAX / 2),
            Teacher::TrainedOnce => (0, budget / 2),
            _ if arm.audits() => (budget / 2, budget / 2),
            _ => (budget, 0),
        };
        let student = |number: usize| -> anyhow::Result<Student> {
            let number = number as u64;
            let selector: Box<dyn Selector> = match arm.teacher {
                Teacher::Claims => Box::new(Random::claimed(seed << 20 | number)),
                Teacher::Market => Box::new(thompson(&arm.config, seed << 20 | number)),
                _ => Box::new(Random::any(seed << 20 | number)),
            };
            Ok(Student {
                key: PrivateKeySigner::from_bytes(&keccak256(format!("student {number} of {seed}")))?,
                policy: Table::new(world.contexts, world.actions, world.policy.0, world.policy.1),
                tasks: Rng::of(&[seed, number, 1]),
                draws: Rng::of(&[seed, number, 2]),
                selector,
                model: OwnModel::new(world.vocabulary()),
                purse,
                truth_purse,
                sold: vec![0; world.sellers.len()],
                versions: BTreeMap::new(),
                out: Outcome::default(),
            })
        };
        let learns = |number: &usize| matches!(world.sellers[*number].method, Method::Learns);
        let mut course = Self {
            world,
            arm,
            seed,
            order: Rng::of(&[seed, 3]).shuffled(world.sellers.len()),
            learners: (0..world.sellers.len())
                .filter(learns)
                .map(|number| (number, LearningJudge::builder().in_memory()))
                .collect(),
            runtime: tokio::runtime::Builder::new_current_thread().build()?,
            students: (0..arm.students).map(student).collect::<anyhow::Result<_>>()?,
        };
        if arm.teacher == Teacher::TrainedOnce {
            (0..arm.students).for_each(|student| course.train_once(student));
        }
        Ok(course)
    }

    fn step(&mut self, number: usize, group: usize) -> anyhow::Result<()> {
        let (world, arm) = (self.world, self.arm);
        let student = &mut self.students[number];
        let task = world.task(group, &mut student.tasks);
        let (is_audited, bad) = (student.tasks.unit() < arm.audits, student.tasks.next());
        let is_audited = is_audited && arm.audits();
        let outputs = student.policy.sample(task.context, GROUP, &mut student.draws);
        let anchors = if is_audited && arm.has_anchors && arm.teacher != Teacher::Audits {
            self.anchors(&task, bad)
        } else {
            Vec::new()
        };
        let sent = self.sent(task, &outputs, &anchors);
        self.students[number].out.made += GROUP as f64;
        // A group of equals has no gradient. It is sent only if an audit's anchors are something to compare it with.
        let is_uniform = sent.made.iter().filter(|made| **made > 0).count() == 1;
        if !is_uniform || arm.audits_equals && sent.actions.len() > 1 {
            self.students[number].out.sent += sent.actions.len() as f64;
            let scores = self.teach(number, &sent, is_audited)?;
            if let Some(scores) = scores.filter(|_| !is_uniform) {
                let at = |action| sent.actions.iter().position(|other| *other == action).unwrap_or_default();
                let rewards: Vec<f64> = outputs.iter().map(|action| scores[at(*action)]).collect();
                self.students[number].policy.learn(task.context, &outputs, &rewards);
            }
        }
        self.note(number, group);
        Ok(())
    }

    /// Returns a right output and a wrong one.
    fn anchors(&self, task: &Task, bad: u64) -> Vec<usize> {
        let of = |wanted: bool| {
            let is = |action: &usize| (self.world.is_good)(task.context, *action) == wanted;
            let all: Vec<_> = (0..self.world.actions).filter(is).collect();
            all[bad as usize % all.len()]
        };
        vec![of(true), of(false)]
    }

    fn sent(&self, task: Task, outputs: &[usize], anchors: &[usize]) -> Sent {
        let mut actions = Vec::new();
        for action in outputs.iter().chain(anchors) {
            if !actions.contains(action) {
                actions.push(*action);
            }
        }
        let made = actions.iter().map(|action| outputs.iter().filter(|other| *other == action).count()).collect();
        let good = actions.iter().map(|action| (self.world.is_good)(task.context, *action)).collect();
        Sent { task, actions, made, good }
    }

    /// Returns a score for each output sent, if there are any.
    fn teach(&mut self, number: usize, sent: &Sent, is_audited: bool) -> anyhow::Result<Option<Vec<f64>>> {
        let truth = || sent.good.iter().map(|good| f64::from(u8::from(*good))).collect::<Vec<_>>();
        Ok(match &self.arm.teacher {
            Teacher::Truth | Teacher::TruthInBudget => self.buy_truth(number, sent).then(truth),
            Teacher::Audits => (is_audited && self.buy_truth(number, sent)).then(truth),
            Teacher::Itself => Some(sent.agreement()),
            Teacher::Random | Teacher::Claims | Teacher::Market => self.hire(number, sent, is_audited)?,
            Teacher::Mixture(sellers) => self.buy_of(number, sent, &sellers.clone())?,
            Teacher::ByType => self.buy_of(number, sent, &[self.of_type(sent.task.skill)?])?,
            Teacher::TrainedOnce => Some(self.modelled(number, sent)),
            Teacher::Own { truth: by_truth } => {
                let scores = self.modelled(number, sent);
                let is_bought = is_audited && self.buy_truth(number, sent);
                if is_bought {
                    let words = |action: &usize| self.words(number, &sent.task, *action);
                    let labels: Vec<_> = sent.actions.iter().map(words).zip(sent.good.iter().copied()).collect();
                    self.students[number].model.learn(labels);
                }
                Some(if is_bought && *by_truth { truth() } else { scores })
            }
        })
    }

    /// Returns the evaluator that is always asked in a skill, by the cards.
    fn of_type(&self, skill: usize) -> anyhow::Result<usize> {
        let claims = |number: &&usize| self.world.sellers[**number].claims.contains(&skill);
        let all: Vec<_> = self.order.iter().filter(claims).collect();
        all.first().map(|number| **number).context("nobody claims the skill")
    }

    fn modelled(&self, number: usize, sent: &Sent) -> Vec<f64> {
        let model = &self.students[number].model;
        sent.actions.iter().map(|action| model.score(&self.words(number, &sent.task, *action))).collect()
    }

    fn words(&self, number: usize, task: &Task, action: usize) -> Vec<u32> {
        self.world.words(&[self.seed, number as u64, task.group as u64], task.context, action)
    }

    /// Pays for the truth about all outputs sent. Returns `false` if there is not enough money.
    fn buy_truth(&mut self, number: usize, sent: &Sent) -> bool {
        let student = &mut self.students[number];
        let Some(rest) = student.truth_purse.checked_sub(TRUTH * sent.actions.len() as u64) else { return false };
        student.truth_purse = rest;
        student.out.truths += sent.actions.len() as f64;
        true
    }

    /// Trains a model on outputs of the untrained policy, for all the money there is for truths.
    fn train_once(&mut self, number: usize) {
        let mut labels = Vec::new();
        let student = &mut self.students[number];
        let count = student.truth_purse / TRUTH;
        let mut rng = Rng::of(&[self.seed, number as u64, 4]);
        for label in 0..count {
            let (context, action) = (label as usize % 2, rng.below(self.world.actions));
            let words = self.world.words(&[self.seed, number as u64, u64::MAX - label], context, action);
            labels.push((words, (self.world.is_good)(context, action)));
        }
        student.model.learn(labels);
        student.truth_purse = 0;
        student.out.truths = count as f64;
    }

    /// Buys verdicts of all these sellers, and averages them.
    fn buy_of(&mut self, number: usize, sent: &Sent, sellers: &[usize]) -> anyhow::Result<Option<Vec<f64>>> {
        let cost = |seller: &usize| self.world.sellers[*seller].price * sent.actions.len() as u64;
        if sellers.iter().map(cost).sum::<u64>() > self.students[number].purse {
            return Ok(None);
        }
        let mut sums = vec![0.0; sent.actions.len()];
        for seller in sellers {
            let scores = self.buy(number, sent, *seller)?;
            sums.iter_mut().zip(standardized(&scores)).for_each(|(sum, score)| *sum += score);
        }
        Ok(Some(sums))
    }

    /// Has the selector choose, and audits.
    fn hire(&mut self, number: usize, sent: &Sent, is_audited: bool) -> anyhow::Result<Option<Vec<f64>>> {
        let skill = Skill::new(sent.task.skill).context("too many skills")?;
        let market = self.candidates(sent.task.group);
        let job = self.job(number, sent, skill);
        let hired = self.students[number].selector.select(&job, &market).first().copied();
        let scores = match hired {
            Some(position) => {
                let scores = self.buy(number, sent, self.order[position])?;
                let paid = job.cost(&market[position]).context("too dear")?;
                let seen = Observation::new(market[position].evaluator, skill, paid, CallOutcome::answered(None));
                self.students[number].selector.learn(&seen);
                Some(scores)
            }
            None => None,
        };
        self.compare(number, sent, scores.as_deref());
        if let (Some(position), Some(scores), true) = (hired, &scores, is_audited)
            && self.buy_truth(number, sent)
            && let Some(pairs) = self.pairs(sent, scores)
        {
            let candidate = market[position];
            self.students[number].selector.learn_audit(candidate.evaluator, skill, pairs);
            self.report(number, &candidate, skill, pairs);
            // The others, about the same outputs.
            let mut asked = vec![position];
            let others: Vec<_> = (0..market.len()).filter(|other| *other != position).collect();
            let without: Vec<_> = others.iter().map(|other| market[*other]).collect();
            let job = self.job(number, sent, skill);
            for chosen in self.students[number].selector.explore(&job, &without) {
                let candidate = without[chosen];
                let scores = self.buy(number, sent, self.order[others[chosen]])?;
                let pairs = self.pairs(sent, &scores);
                let paid = job.cost(&candidate).context("too dear")?;
                let seen = Observation::new(candidate.evaluator, skill, paid, CallOutcome::answered(pairs));
                self.students[number].selector.learn(&seen);
                pairs.into_iter().for_each(|pairs| self.report(number, &candidate, skill, pairs));
                asked.push(others[chosen]);
            }
            for position in asked {
                self.lesson(number, sent, self.order[position], market[position].evaluator)?;
            }
        }
        Ok(scores)
    }

    fn job(&self, number: usize, sent: &Sent, skill: Skill) -> Job {
        let (left, tasks) = (self.students[number].purse, (self.world.groups - sent.task.group) as u64);
        let mut job = Job::new(skill, Usdc::from_atomic(left), tasks);
        job.outputs = sent.actions.len() as u32;
        job
    }

    fn candidates(&self, group: usize) -> Vec<Candidate> {
        let candidate = |number: &usize| {
            let seller = &self.world.sellers[*number];
            let claims = seller.claims.iter().filter_map(|skill| Skill::new(*skill)).collect();
            Candidate::new(address(*number, seller.life(group)), claims, Usdc::from_atomic(seller.price))
        };
        self.order.iter().map(candidate).collect()
    }

    /// Pays a seller for verdicts on all outputs sent, and returns its scores.
    fn buy(&mut self, number: usize, sent: &Sent, seller: usize) -> anyhow::Result<Vec<f64>> {
        let price = self.world.sellers[seller].price * sent.actions.len() as u64;
        let student = &mut self.students[number];
        student.purse = student.purse.checked_sub(price).context("more was bought than there was money for")?;
        student.out.verdicts += price as f64 / 1e6;
        let scores = self.scores(number, sent, seller)?;
        self.students[number].sold[seller] += 1;
        if let Some(judge) = self.learners.get(&seller) {
            let (version, student) = (judge.version().unwrap_or_default(), &mut self.students[number]);
            if student.versions.insert(seller, version.clone()).is_some_and(|before| before != version) {
                student.selector.learn_new_version(address(seller, 0));
            }
        }
        Ok(scores)
    }

    fn scores(&self, number: usize, sent: &Sent, seller: usize) -> anyhow::Result<Vec<f64>> {
        let Sent { task, actions, .. } = sent;
        let Method::Rule(rule) = &self.world.sellers[seller].method else {
            let judge = &self.learners[&seller];
            let verdicts = self.runtime.block_on(judge.judge(&self.submission(number, sent)?))?;
            return Ok(verdicts.iter().map(|verdict| verdict.score.get()).collect());
        };
        let sold = self.students[number].sold[seller];
        let score = |action: &usize| {
            let (mean, deviation) = rule(task, *action, sold);
            let noise =
                Rng::of(&[self.seed, number as u64, task.group as u64, seller as u64, *action as u64, 5]).normal();
            (mean + deviation * noise).clamp(0.0, 1.0)
        };
        Ok(actions.iter().map(score).collect())
    }

    fn submission(&self, number: usize, sent: &Sent) -> anyhow::Result<Submission> {
        let texts = sent.actions.iter().map(|action| text(&self.words(number, &sent.task, *action)));
        Ok(Submission::group(x402_market::Task::new("code", "Write the program.")?, texts)?)
    }

    /// Returns what an audit shows.
    fn pairs(&self, sent: &Sent, scores: &[f64]) -> Option<Pairs> {
        // Anchors were not made, and count once.
        let count = |made: &usize| if self.arm.counts_copies { (*made).max(1) } else { 1 };
        let all = scores.iter().zip(&sent.good).zip(&sent.made);
        let (counted, good): (Vec<f64>, Vec<bool>) =
            all.flat_map(|((score, good), made)| iter::repeat_n((*score, *good), count(made))).unzip();
        let pairs = Pairs::of(&counted, &good)?;
        if !self.arm.by_accuracy {
            return Some(pairs);
        }
        let right = scores.iter().zip(&sent.good).filter(|(score, good)| (**score > 0.5) == **good).count() as u32;
        let all = scores.len() as u32;
        Pairs::new(right, all - right, all)
    }

    /// Adds up how who was hired orders the outputs, and how the best would have.
    fn compare(&mut self, number: usize, sent: &Sent, scores: Option<&[f64]>) {
        let Some(best) = self.world.best.get(sent.task.skill) else { return };
        let net = |scores: &[f64]| {
            Pairs::of(scores, &sent.good).map_or(0.0, |pairs| f64::from(pairs.right()) - f64::from(pairs.wrong()))
        };
        let Ok(of_best) = self.scores(number, sent, *best) else { return };
        let ordered = &mut self.students[number].out.ordered;
        ordered[0] += scores.map_or(0.0, net);
        ordered[1] += net(&of_best);
    }

    /// Tells all other students of an audit.
    fn report(&mut self, number: usize, candidate: &Candidate, skill: Skill, pairs: Pairs) {
        let payer = self.students[number].key.address();
        let outcome = CallOutcome::answered(Some(pairs));
        let observation = Observation::new(candidate.evaluator, skill, candidate.price, outcome);
        let others = self.students.iter_mut().enumerate().filter(|(other, _)| *other != number);
        others.for_each(|(_, other)| other.selector.learn_report(payer, &observation));
    }

    /// Tells a seller that learns the truth about what it judged, but for the anchors.
    fn lesson(&mut self, number: usize, sent: &Sent, seller: usize, evaluator: Address) -> anyhow::Result<()> {
        let Some(judge) = self.learners.get(&seller).filter(|_| self.arm.lessons) else { return Ok(()) };
        let good = sent.good.iter().zip(&sent.made).map(|(good, made)| (*made > 0).then_some(*good));
        let submission = self.submission(number, sent)?;
        let key = &self.students[number].key;
        self.runtime.block_on(async {
            let lesson = Lesson::sign(submission, good, evaluator, key).await?;
            judge.learn(&lesson).await.map_err(anyhow::Error::from)
        })
    }

    fn note(&mut self, number: usize, group: usize) {
        let student = &mut self.students[number];
        let quality = self.world.quality(&student.policy);
        let out = &mut student.out;
        if out.reached == 0.0 && quality >= GOAL {
            (out.reached, out.until) = (1.0, [out.verdicts, out.truths]);
        }
        if out.ways_when_fair.is_none() && quality >= FAIR {
            out.ways_when_fair = Some(self.world.ways(&student.policy));
        }
        if (group + 1).is_multiple_of(NOTED) || group + 1 == self.world.groups {
            out.curve.push(quality);
            out.ways = self.world.ways(&student.policy);
        }
    }
}

/// Returns the address of a seller under one of its names.
fn address(seller: usize, life: usize) -> Address {
    Address::from_word(B256::from(keccak256(format!("seller {seller}, name {life}"))))
}
