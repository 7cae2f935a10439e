//! Experiment P: what a seller earns by its accuracy, and whether sellers improve where buyers choose.

use std::{fmt::Write as _, path::Path};

use alloy_primitives::Address;
use anyhow::Context as _;
use tower_x402::Usdc;
use x402_market::{
    evidence::{CallOutcome, Pairs},
    selection::{Candidate, Job, Observation, Selector, Skill, SkillSet, Thompson, ThompsonConfig},
};

use super::{
    baselines::Random,
    market::{
        run::{self, Policy},
        world::World,
    },
    parallel,
    plot::Lines,
    report::{Claim, Estimate},
    rng::Rng,
};

/// The seller whose accuracy is varied.
const SELLER: &str = "cheap-b";
const ACCURACIES: [f64; 5] = [0.5, 0.6, 0.7, 0.8, 0.9];
const BUYERS: [(&str, Option<Policy>); 5] = [
    ("random", Some(Policy::Random)),
    ("card claims", Some(Policy::CardClaims)),
    ("alone", Some(Policy::Alone)),
    ("shared", Some(Policy::Thompson)),
    ("perfect", None),
];

/// Returns the tables of the experiment and its claims, and draws the incomes into `out`.
pub(crate) fn pressure(seeds: usize, tasks: Option<usize>, out: Option<&Path>) -> anyhow::Result<(String, Vec<Claim>)> {
    let mut text = "| income, 10⁻⁶ $ a task | 0.5 | 0.6 | 0.7 | 0.8 | 0.9 |\n|---|---|---|---|---|---|\n".to_owned();
    let mut lines = Vec::new();
    for (name, policy) in BUYERS {
        let mut points = Vec::new();
        for accuracy in ACCURACIES {
            let world = world(accuracy, tasks)?;
            points.push((accuracy, Estimate::of(&parallel(seeds, |seed| income(&world, policy, seed as u64))?)));
        }
        let cells: Vec<_> = points.iter().map(|(_, income)| income.show(0)).collect();
        let _ = writeln!(text, "| {name} | {} |", cells.join(" | "));
        lines.push((name.to_owned(), points));
    }
    if let Some(out) = out {
        let title = "Income of a seller at $0.0004, in millionths of a dollar a task";
        Lines { title, x: "accuracy", labels: &[], lines }.draw_into(out, "learning-P")?;
    }
    let epochs = tasks.map_or(EPOCHS, |tasks| (tasks / 25).clamp(12, EPOCHS));
    text.push_str("\n| buyers | worth D bought, last ten epochs | accuracy of sellers | investments | $1 invested brought |\n|---|---|---|---|---|\n");
    let mut all = Vec::new();
    for (name, buyer) in
        [("random", Buyer::Random), ("alone", Buyer::Alone), ("shared", Buyer::Shared), ("perfect", Buyer::Perfect)]
    {
        let runs = parallel(seeds, |seed| industry(buyer, seed as u64, epochs))?;
        let of = |of: fn(&Industry) -> f64| runs.iter().map(of).collect::<Vec<_>>();
        let returns: Vec<f64> = runs.iter().filter_map(|run| run.brought).collect();
        let _ = writeln!(
            text,
            "| {name} | {} | {} | {} | {} |",
            Estimate::of(&of(|run| run.worth)).show(2),
            Estimate::of(&of(|run| run.accuracy)).show(2),
            Estimate::of(&of(|run| run.investments)).show(0),
            Estimate::of(&returns).show(2),
        );
        all.push((of(|run| run.worth), returns));
    }
    let mut claims = vec![Claim::at_least("worth: shared − random".to_owned(), &all[2].0, &all[0].0, 0.1)];
    if Estimate::of(&all[3].1).mean > 1.0 {
        claims.push(Claim::of("$1 invested, under shared", &all[2].1, 1.0));
    }
    Ok((text, claims))
}

fn world(accuracy: f64, tasks: Option<usize>) -> anyhow::Result<World> {
    let mut world = World::read(Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/market/worlds/reference.json")))?;
    world.audited_outputs = 8;
    world.tasks_per_student = tasks.unwrap_or(world.tasks_per_student);
    let seller = world.evaluators.iter_mut().find(|seller| seller.name == SELLER).context("no such seller")?;
    seller.accuracy = vec![accuracy; world.skills];
    Ok(world)
}

/// Returns what the seller earns a task, in µUSDC. Without a policy, buyers are perfect.
fn income(world: &World, policy: Option<Policy>, seed: u64) -> anyhow::Result<f64> {
    let seller = world.evaluators.iter().position(|seller| seller.name == SELLER).context("no such seller")?;
    let tasks = (world.students * world.tasks_per_student) as f64;
    let Some(policy) = policy else { return Ok(perfect_income(world, seller, seed)) };
    let run = run::run(world, policy, &ThompsonConfig::default(), seed);
    Ok(run.paid.iter().map(|paid| paid[seller]).sum::<f64>() / tasks)
}

/// As [`income`], from one student that knows all accuracies, and paces itself as `Thompson` does.
fn perfect_income(world: &World, seller: usize, seed: u64) -> f64 {
    let (mut rng, tasks) = (Rng::of(&[seed, 9]), world.tasks_per_student);
    let mut left = (world.budget_per_task_microusdc * tasks as u64) as f64;
    let (mut lambda, mut income) = (0.5 / world.budget_per_task_microusdc as f64, 0.0);
    for task in 0..tasks {
        let (skill, allowance) = (rng.below(world.skills), left / (tasks - task) as f64);
        let gain = |at: usize| {
            let (accuracy, price) = world.evaluators[at].at(task);
            2.0 * accuracy[skill] - 1.0 - lambda * price as f64
        };
        let affordable = (0..world.evaluators.len()).filter(|at| world.evaluators[*at].at(task).1 as f64 <= left);
        let best = affordable.filter(|at| gain(*at) > 0.0).max_by(|a, b| gain(*a).total_cmp(&gain(*b)));
        let price = best.map_or(0.0, |best| world.evaluators[best].at(task).1 as f64);
        left -= price;
        income += if best == Some(seller) { price } else { 0.0 };
        lambda *= (0.03 * (price / allowance.max(1e-6) - 1.0)).clamp(-0.5, 0.5).exp();
    }
    income / tasks as f64
}

const EPOCHS: usize = 40;
const TASKS: usize = 125;
const STUDENTS: usize = 20;
const SELLERS: usize = 10;
/// In µUSDC.
const PRICE: u64 = 400;
const ALLOWANCE: u64 = 420;
/// In dollars: what a seller begins with, what an epoch costs it, and an investment.
const CAPITAL: f64 = 0.2;
const UPKEEP: f64 = 0.03;
const INVESTMENT: f64 = 0.1;
const STEP: f64 = 0.05;
const BEST: f64 = 0.95;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Buyer {
    Random,
    Alone,
    Shared,
    Perfect,
}

struct Firm {
    name: u64,
    accuracy: f64,
    cash: f64,
    /// The probability that it invests in an epoch.
    boldness: f64,
    /// By epoch since it came.
    income: Vec<f64>,
    invested_at: Option<usize>,
}

impl Firm {
    fn new(name: u64, boldness: f64, rng: &mut Rng) -> Self {
        let accuracy = 0.5 + 0.2 * rng.unit();
        Self { name, accuracy, cash: CAPITAL, boldness, income: Vec::new(), invested_at: None }
    }

    fn address(&self) -> Address {
        Address::left_padding_from(&(self.name + 1).to_be_bytes())
    }

    /// Returns what an investment brought in ten epochs as a multiple of its cost, once two have passed.
    fn brought(&self) -> Option<f64> {
        let at = self.invested_at.filter(|at| self.income.len() == at + 2)?;
        let of = |from: usize| (self.income[from] + self.income[from + 1]) / 2.0;
        Some(10.0 * (of(at) - of(at - 2)) / INVESTMENT)
    }
}

/// What became of the sellers.
struct Industry {
    worth: f64,
    accuracy: f64,
    investments: f64,
    brought: Option<f64>,
}

fn industry(buyer: Buyer, seed: u64, epochs: usize) -> anyhow::Result<Industry> {
    let skill = Skill::new(0).context("no skill")?;
    let mut rng = Rng::of(&[seed, 10]);
    let mut firms: Vec<_> = (0..SELLERS as u64).map(|name| Firm::new(name, 0.3, &mut rng)).collect();
    let mut names = SELLERS as u64;
    let selector = |number: usize| -> Box<dyn Selector> {
        let seed = seed << 20 | number as u64;
        if buyer == Buyer::Random { Box::new(Random::any(seed)) } else { Box::new(Thompson::seeded(seed)) }
    };
    let mut students: Vec<_> =
        (0..STUDENTS).map(|number| (selector(number), ALLOWANCE * (TASKS * epochs) as u64)).collect();
    let (mut late, mut returns, mut investments) = (Vec::new(), Vec::new(), 0.0);
    for epoch in 0..epochs {
        let market: Vec<_> = firms
            .iter()
            .map(|firm| Candidate::new(firm.address(), SkillSet::from_iter([skill]), Usdc::from_atomic(PRICE)))
            .collect();
        let mut income = vec![0.0; firms.len()];
        for task in 0..TASKS {
            for number in 0..STUDENTS {
                let (selector, left) = &mut students[number];
                let mut job = Job::new(skill, Usdc::from_atomic(*left), (TASKS * (epochs - epoch) - task) as u64);
                let hired = match buyer {
                    Buyer::Perfect => {
                        let best = (0..firms.len()).max_by(|a, b| firms[*a].accuracy.total_cmp(&firms[*b].accuracy));
                        best.filter(|_| *left >= PRICE)
                    }
                    _ => selector.select(&job, &market).first().copied(),
                };
                let Some(hired) = hired else { continue };
                *left -= PRICE;
                income[hired] += PRICE as f64 / 1e6;
                if epoch + 10 >= epochs {
                    late.push(2.0 * firms[hired].accuracy - 1.0);
                }
                let is_audited = matches!(buyer, Buyer::Alone | Buyer::Shared) && rng.unit() < 0.05;
                let mut asked = vec![hired];
                if is_audited {
                    job.remaining = Usdc::from_atomic(*left);
                    let others: Vec<_> = (0..firms.len()).filter(|other| *other != hired).collect();
                    let without: Vec<_> = others.iter().map(|other| market[*other]).collect();
                    asked.extend(selector.explore(&job, &without).into_iter().map(|chosen| others[chosen]));
                }
                for (place, firm) in asked.into_iter().enumerate() {
                    if place > 0 {
                        *left_of(&mut students, number) -= PRICE;
                        income[firm] += PRICE as f64 / 1e6;
                    }
                    let pairs = if is_audited { audit(firms[firm].accuracy, &mut rng) } else { None };
                    let seen = Observation::new(
                        market[firm].evaluator,
                        skill,
                        market[firm].price,
                        CallOutcome::answered(pairs),
                    );
                    students[number].0.learn(&seen);
                    if is_audited && buyer == Buyer::Shared {
                        let payer = Address::left_padding_from(&(number as u64 + 1 + (1 << 40)).to_be_bytes());
                        let others = students.iter_mut().enumerate().filter(|(other, _)| *other != number);
                        others.for_each(|(_, (other, _))| other.learn_report(payer, &seen));
                    }
                }
            }
        }
        for (firm, income) in firms.iter_mut().zip(income) {
            firm.income.push(income);
            firm.cash += income - UPKEEP;
            if let Some(brought) = firm.brought() {
                returns.push(brought);
                // A gain of a tenth of the cost an epoch.
                firm.boldness = if brought > 1.0 { (firm.boldness * 1.5).min(0.6) } else { firm.boldness / 2.0 };
                firm.invested_at = None;
            }
            let can = firm.invested_at.is_none()
                && firm.income.len() >= 2
                && firm.cash >= INVESTMENT
                && firm.accuracy < BEST - 1e-9;
            if can && rng.unit() < firm.boldness {
                firm.cash -= INVESTMENT;
                firm.accuracy = (firm.accuracy + STEP).min(BEST);
                firm.invested_at = Some(firm.income.len());
                investments += 1.0;
            }
        }
        let boldness = firms.iter().map(|firm| firm.boldness).sum::<f64>() / firms.len() as f64;
        for firm in firms.iter_mut().filter(|firm| firm.cash <= 0.0) {
            *firm = Firm::new(names, boldness, &mut rng);
            names += 1;
        }
    }
    let mean = |values: &[f64]| values.iter().sum::<f64>() / values.len().max(1) as f64;
    Ok(Industry {
        worth: mean(&late),
        accuracy: firms.iter().map(|firm| firm.accuracy).sum::<f64>() / firms.len() as f64,
        investments,
        brought: (!returns.is_empty()).then(|| mean(&returns)),
    })
}

fn left_of(students: &mut [(Box<dyn Selector>, u64)], number: usize) -> &mut u64 {
    &mut students[number].1
}

/// Returns what an audit of a group of eight shows, of which half are good.
fn audit(accuracy: f64, rng: &mut Rng) -> Option<Pairs> {
    let mut right = || (0..4).filter(|_| rng.unit() < accuracy).count() as u32;
    let (good, bad) = (right(), right());
    Pairs::new(good * bad, (4 - good) * (4 - bad), 16)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn income_follows_accuracy_only_where_buyers_choose() {
        let of = |policy, accuracy| income(&world(accuracy, Some(60)).unwrap(), policy, 1).unwrap();
        assert_eq!(of(Some(Policy::Random), 0.5), of(Some(Policy::Random), 0.9));
        // A ninth of 400, or less where the dear one cannot be paid.
        assert!((30.0..50.0).contains(&of(Some(Policy::Random), 0.5)));
        assert!(of(None, 0.9) > 3.0 * of(None, 0.5));
    }
}
