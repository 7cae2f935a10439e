//! Runs all arms of one seed, in a market of its own.

use anyhow::ensure;
use x402_market::evidence::{EvidenceError, EvidenceLog};

use super::{
    arms::Arm,
    judges::Method,
    policy::{Policy, Rng},
    regression::Labels,
    run::{Course, Group, Settings, assignments, mean, train},
    stage::{NOW, Stage},
    teacher::{Buyer, Spent, Teacher},
    world::{ASPECTS, MIXTURE, sellers},
};

/// How many earlier students share their audits in [`Arm::MarketPooled`] and [`Arm::MarketPooledPanel`]; each has its own budget.
pub(crate) const PREDECESSORS: u64 = 4;
/// How many records a log of evidence keeps.
const RECORDS: usize = 1_000_000;
/// Offsets of seeds: for earlier students, and for outputs that are only labelled.
const ELSEWHERE: u64 = 1_000_003;

/// The result of one student, and what it spent.
#[derive(Clone, Debug)]
pub(crate) struct Outcome {
    pub(crate) course: Course,
    pub(crate) spent: Spent,
    /// How many outputs were judged.
    pub(crate) labels: usize,
    /// About how many outputs it got the truth.
    pub(crate) audited: usize,
}

/// Trains a student in each arm, reports each, and compares what students spent with what evaluators got.
pub(crate) async fn conduct(
    seed: u64,
    arms: &[Arm],
    settings: &Settings,
    best: usize,
    done: impl Fn(Arm, &Outcome),
) -> anyhow::Result<Vec<Outcome>> {
    let stage = Stage::open(seed, settings.errors).await?;
    let mut house = House { seed, settings, best, stage: &stage, spent: 0 };
    let mut outcomes = Vec::new();
    for arm in arms {
        let outcome = house.teach(*arm).await?;
        done(*arm, &outcome);
        outcomes.push(outcome);
    }
    let (spent, income) = (house.spent, stage.income()?);
    ensure!(spent == income, "students spent {spent} µUSDC, but evaluators got {income}");
    Ok(outcomes)
}

struct House<'a> {
    seed: u64,
    settings: &'a Settings,
    best: usize,
    stage: &'a Stage,
    /// What all students together spent on the chain, in µUSDC.
    spent: u64,
}

impl House<'_> {
    async fn teach(&mut self, arm: Arm) -> anyhow::Result<Outcome> {
        // The reports of earlier students.
        let pool = EvidenceLog::in_memory(RECORDS);
        match arm {
            Arm::Market | Arm::MarketPanel | Arm::FixedBest | Arm::Random | Arm::CardClaims | Arm::Mixture => {
                self.with_hired(arm, pool).await
            }
            Arm::MarketPooled | Arm::MarketPooledPanel => {
                for number in 1..=PREDECESSORS {
                    let seed = self.seed + number * ELSEWHERE;
                    let name = format!("predecessor {number} of {}", arm.name());
                    let seen = EvidenceLog::in_memory(RECORDS);
                    let buyer = self.buyer(arm, seed, &name, (seen.clone(), pool.clone())).await?;
                    self.trained(seed, Teacher::Market(Box::new(buyer))).await?;
                    publish(&seen, &pool)?;
                }
                self.with_hired(arm, pool).await
            }
            Arm::RewardModel | Arm::RewardModelOnTruth => self.with_model(arm).await,
            Arm::SelfJudge => self.for_nothing(arm, Teacher::Itself).await,
            Arm::AuditsOnly => self.for_nothing(arm, Teacher::Audits).await,
            Arm::Truth => self.for_nothing(arm, Teacher::Truth).await,
        }
    }

    async fn with_hired(&mut self, arm: Arm, pool: EvidenceLog) -> anyhow::Result<Outcome> {
        let buyer = self.buyer(arm, self.seed, &arm.name(), (EvidenceLog::in_memory(RECORDS), pool)).await?;
        let outcome = self.trained(self.seed, Teacher::Market(Box::new(buyer))).await?;
        Ok(Outcome { audited: self.audited(arm, self.seed), ..outcome })
    }

    async fn for_nothing(&mut self, arm: Arm, teacher: Teacher) -> anyhow::Result<Outcome> {
        let outcome = self.trained(self.seed, teacher).await?;
        Ok(Outcome { audited: self.audited(arm, self.seed), ..outcome })
    }

    /// Returns how many outputs are in audited groups.
    fn audited(&self, arm: Arm, seed: u64) -> usize {
        let groups = assignments(seed, self.settings).iter().filter(|assignment| assignment.audited).count();
        if arm.audits() { groups * self.settings.group_size } else { 0 }
    }

    /// Trains a reward model on verdicts about the untrained policy, as many as other arms buy.
    async fn with_model(&mut self, arm: Arm) -> anyhow::Result<Outcome> {
        let seed = self.seed + ELSEWHERE / 2;
        let teacher = match arm {
            Arm::RewardModel => {
                let logs = (EvidenceLog::in_memory(RECORDS), EvidenceLog::in_memory(RECORDS));
                Teacher::Market(Box::new(self.buyer(arm, seed, &arm.name(), logs).await?))
            }
            _ => Teacher::Truth,
        };
        let (policy, mut fate) = (Policy::new(), Rng::seeded(seed));
        let mut labels = [(); 3].map(|()| Labels::new());
        for assignment in &assignments(seed, self.settings) {
            let group = Group::roll_out(&policy, assignment, self.settings, &mut fate);
            let scores = teacher.teach(&group).await?.scores;
            let aspect = ASPECTS.iter().position(|aspect| *aspect == assignment.aspect).unwrap_or_default();
            let known = group.outputs.iter().zip(scores).filter_map(|(output, score)| Some((output, score?)));
            known.for_each(|(output, score)| labels[aspect].add(output, score));
        }
        let count = labels.iter().map(|labels| labels.count).sum();
        let spent = self.account(&teacher)?;
        let models = Box::new(labels.map(|labels| labels.fit()));
        let course = train(self.seed, self.settings, &Teacher::Model(models)).await?;
        Ok(Outcome { course, spent, labels: count, audited: self.audited(arm, seed) })
    }

    async fn buyer(&self, arm: Arm, seed: u64, name: &str, logs: (EvidenceLog, EvidenceLog)) -> anyhow::Result<Buyer> {
        let sellers = sellers(self.settings.errors, self.seed);
        let staff: Vec<_> = match arm {
            Arm::FixedBest => vec![self.best],
            _ => MIXTURE.iter().filter_map(|name| sellers.iter().position(|seller| seller.name == *name)).collect(),
        };
        Buyer::new(arm, (self.stage, seed, self.settings), name, logs, &staff).await
    }

    async fn trained(&mut self, seed: u64, teacher: Teacher) -> anyhow::Result<Outcome> {
        let course = train(seed, self.settings, &teacher).await?;
        let spent = self.account(&teacher)?;
        let judged = course.scored.iter().filter(|scored| scored.is_some()).count();
        Ok(Outcome { course, spent, labels: judged * self.settings.group_size, audited: 0 })
    }

    fn account(&mut self, teacher: &Teacher) -> anyhow::Result<Spent> {
        let Teacher::Market(buyer) = teacher else { return Ok(Spent::default()) };
        let spent = buyer.spent(self.stage)?;
        self.spent += spent.chain;
        Ok(spent)
    }
}

/// Copies a student's paid evidence to the log that others read.
fn publish(seen: &EvidenceLog, pool: &EvidenceLog) -> Result<(), EvidenceError> {
    let mut all = Vec::new();
    seen.for_each(|evidence| all.extend(evidence.payment.is_some().then(|| evidence.clone())));
    all.into_iter().try_for_each(|evidence| pool.record(evidence, NOW))
}

/// Returns the final quality, by seed, of students that always ask the same evaluator, by position in the market. Evaluators that the
/// budget does not cover are left out. Nothing is paid: verdicts depend only on what is judged.
pub(crate) async fn rehearse(
    seeds: u64,
    settings: &Settings,
    done: impl Fn(&'static str, f64),
) -> anyhow::Result<Vec<(usize, Vec<f64>)>> {
    let mut ends = Vec::new();
    let all = sellers(settings.errors, 0).into_iter().enumerate();
    for (position, seller) in all.filter(|(_, seller)| seller.price <= settings.budget) {
        let mut qualities = Vec::new();
        for seed in 0..seeds {
            let method = sellers(settings.errors, seed)[position].method;
            let course = train(seed, settings, &Teacher::Rehearsal(method)).await?;
            qualities.extend(course.quality.last());
        }
        done(seller.name, mean(qualities.iter().copied()));
        ends.push((position, qualities));
    }
    Ok(ends)
}

/// Returns the position of the evaluator with which students end best.
pub(crate) fn best(ends: &[(usize, Vec<f64>)]) -> usize {
    let best = ends.iter().max_by(|one, other| mean(one.1.iter().copied()).total_cmp(&mean(other.1.iter().copied())));
    best.map_or(0, |(position, _)| *position)
}

/// Returns how often a judge is right about outputs of an untrained policy, by aspect. A score above one half is right for a good
/// output, one below for a bad one.
pub(crate) async fn accuracy(method: Method) -> anyhow::Result<[f64; 3]> {
    const PROBLEMS: usize = 5;
    let mut rng = Rng::seeded(77);
    let (mut right, mut all) = ([0.0; 3], 0.0);
    for kind in super::policy::KINDS.into_iter().flat_map(|kind| [kind; PROBLEMS]) {
        let problem = super::policy::Problem::of(kind, &mut rng);
        for action in super::policy::actions() {
            let output = super::policy::answer(&problem, action);
            all += 1.0;
            for (number, aspect) in ASPECTS.into_iter().enumerate() {
                let score = method.score(&super::run::task(&problem, aspect, 0)?, number, &output).await?;
                let agrees = if aspect.is_good(&problem, action) { score > 0.5 } else { score < 0.5 };
                right[number] += f64::from(agrees);
            }
        }
    }
    Ok(right.map(|right| right / all))
}
