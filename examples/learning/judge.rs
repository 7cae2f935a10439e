//! Experiment L: a judge that learns, beside a static one of equal start, when tasks move on.

use std::{fmt::Write as _, ops::Range, path::Path};

use alloy_primitives::{Address, keccak256};
use alloy_signer_local::PrivateKeySigner;
use anyhow::Context as _;
use tower_x402::Usdc;
use x402_judges::LearningJudge;
use x402_market::{
    Confidence, Lesson, LongText, Score, Submission, Task, Verdict,
    evidence::{CallOutcome, Pairs},
    judge::{Judge, judge_fn},
    selection::{Candidate, Job, Observation, Selector as _, Skill, SkillSet, Thompson},
};

use super::{
    course::GROUP,
    experiments::shift,
    parallel,
    plot::Lines,
    report::{Claim, Estimate},
    rng::Rng,
    world::{COMMON, LOOKS, OF_CLASS, text},
};

/// Half of the groups are of the levels 1 and 2, the others of 3 and 4. Students have a block of groups in turn, and audit its last one.
const GROUPS: usize = 4_000;
const STUDENTS: usize = 5;
const BLOCK: usize = 20;
/// The student that teaches falsely.
const LIAR: usize = 0;
const ACTIONS: usize = 6;
const KNOWN_LEVELS: usize = 2;
/// What an output costs, and what a student has for each, in µUSDC.
const PRICE: u64 = 600;
const ALLOWANCE: u64 = 1_000;
/// The sellers by number; the others score at random.
const STATIC: usize = 0;
const LEARNER: usize = 1;
const SELLERS: usize = 4;
const WINDOWS: [&str; 3] = ["before", "right after", "in the end"];
const END: usize = 2;
const BINS: usize = 10;

/// What is taught about audited groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Lessons {
    None,
    True,
    /// One of the students says the opposite of the truth.
    FifthFalse,
    /// The same, but it tells the truth before the shift.
    FifthFalseFromShift,
}

const ARMS: [(&str, Lessons); 4] = [
    ("without lessons", Lessons::None),
    ("taught", Lessons::True),
    ("a fifth of lessons false", Lessons::FifthFalse),
    ("a fifth false from the shift on", Lessons::FifthFalseFromShift),
];

/// Outputs whose scores are in one tenth of the scale.
#[derive(Clone, Copy, Debug, Default)]
struct Bin {
    outputs: f64,
    good: f64,
    /// The sum of the scores.
    scores: f64,
}

/// What a judge was worth in a window of groups.
#[derive(Clone, Debug, Default)]
struct Seen {
    groups: f64,
    worth: f64,
    bins: [Bin; BINS],
}

impl Seen {
    fn note(&mut self, scores: &[f64], good: &[bool]) {
        self.groups += 1.0;
        self.worth += Pairs::of(scores, good).map_or(0.0, Pairs::worth);
        for (score, good) in scores.iter().zip(good) {
            let bin = &mut self.bins[((score * BINS as f64) as usize).min(BINS - 1)];
            bin.outputs += 1.0;
            bin.good += f64::from(u8::from(*good));
            bin.scores += score;
        }
    }

    fn worth(&self) -> f64 {
        self.worth / self.groups
    }

    /// Returns how far scores are from the share that is right: the expected calibration error.
    fn calibration_error(&self) -> f64 {
        let outputs: f64 = self.bins.iter().map(|bin| bin.outputs).sum();
        self.bins.iter().map(|bin| (bin.scores - bin.good).abs()).sum::<f64>() / outputs
    }
}

/// What became of the judges, by window.
#[derive(Default)]
struct Outcome {
    seen: [[Seen; WINDOWS.len()]; 2],
    /// Of each seller, in µUSDC a group.
    income: [[f64; WINDOWS.len()]; SELLERS],
    lessons: u64,
}

/// A student as a buyer.
struct Buyer {
    selector: Thompson,
    purse: u64,
    /// The version of the learning judge that it bought last.
    version: Option<String>,
}

/// Returns a judge that knows the words of the first levels. What looks advanced is right for it.
fn static_judge() -> impl Judge {
    judge_fn(async |submission: Submission| {
        let verdict = |output: &LongText| {
            let words = output.split(' ').filter_map(|word| word.strip_prefix('w')?.parse().ok());
            let good = 1.0 / (1.0 + (1.0 - words.map(says).sum::<f64>()).exp());
            Verdict::new(Score::clamped(good), Confidence::clamped(good.max(1.0 - good)), "by the words it knows")
        };
        Ok(submission.outputs().iter().map(verdict).collect())
    })
}

/// Returns what a word says for an output, as the static judge sees it.
fn says(word: usize) -> f64 {
    match word.checked_sub(COMMON) {
        None => 0.0,
        Some(word) if word < LOOKS => 1.0,
        Some(word) => match (word - LOOKS) / OF_CLASS {
            class if class >= KNOWN_LEVELS * ACTIONS => 0.0,
            class if class.is_multiple_of(ACTIONS) => 1.0,
            _ => -1.0,
        },
    }
}

/// Runs the judges over all groups. With a price of the learning judge, students choose who judges, and teach it what it was hired for; else
/// it judges all.
fn run(lessons: Lessons, price: Option<u64>, groups: usize, seed: u64) -> anyhow::Result<Outcome> {
    let (world, runtime) = (shift(Vec::new()), tokio::runtime::Builder::new_current_thread().build()?);
    let (fixed, learner) = (static_judge(), LearningJudge::builder().beside(static_judge()).in_memory());
    let key = |number: usize| PrivateKeySigner::from_bytes(&keccak256(format!("student {number} of {seed}")));
    let keys = (0..STUDENTS).map(key).collect::<Result<Vec<_>, _>>()?;
    let purse = ALLOWANCE * (GROUP * groups / STUDENTS) as u64;
    let buyer = |number: usize| Buyer { selector: Thompson::seeded(seed << 20 | number as u64), purse, version: None };
    let mut buyers: Vec<_> = (0..STUDENTS).map(buyer).collect();
    // In any order, so that their position says nothing.
    let order = Rng::of(&[seed, 3]).shuffled(SELLERS);
    let (mut rng, mut out, before) = (Rng::of(&[seed, 11]), Outcome::default(), groups / 2);
    let tenth = (before / 10).max(1);
    for group in 0..groups {
        let (student, is_audited) = (group / BLOCK % STUDENTS, group % BLOCK == BLOCK - 1);
        let windows = [before - tenth..before, before..before + tenth, groups - tenth..groups];
        let window = windows.iter().position(|window| window.contains(&group));
        let (level, actions) = draw(group >= before, &mut rng);
        let good: Vec<bool> = actions.iter().map(|action| (world.is_good)(level, *action)).collect();
        let words = |(place, action): (usize, &usize)| {
            text(&world.words(&[seed, group as u64, place as u64, 11], level, *action))
        };
        let task = Task::new("code", "Write the program.")?;
        let submission = Submission::group(task, actions.iter().enumerate().map(words))?;
        let mut scores = Vec::new();
        for judge in [&fixed as &dyn Judge, &learner] {
            let verdicts = runtime.block_on(judge.judge(&submission))?;
            scores.push(verdicts.iter().map(|verdict| verdict.score.get()).collect::<Vec<_>>());
        }
        if let Some(window) = window {
            scores.iter().zip(&mut out.seen).for_each(|(scores, seen)| seen[window].note(scores, &good));
        }
        scores.extend((2..SELLERS).map(|_| (0..GROUP).map(|_| rng.unit()).collect()));
        let asked = match price {
            None => vec![LEARNER],
            Some(price) => {
                let sold = |seller: usize| (if seller == LEARNER { price } else { PRICE }, &*scores[seller]);
                let tasks_left = (groups - group).div_ceil(STUDENTS) as u64;
                let audit = is_audited.then_some(&*good);
                hire(&mut buyers, student, &order, tasks_left, &sold, audit, learner.version())?
            }
        };
        for seller in &asked {
            let paid = (if *seller == LEARNER { price.unwrap_or(0) } else { PRICE }) * GROUP as u64;
            window.into_iter().for_each(|window| out.income[*seller][window] += paid as f64 / tenth as f64);
        }
        if is_audited && asked.contains(&LEARNER) && lessons != Lessons::None {
            let lies = student == LIAR
                && match lessons {
                    Lessons::FifthFalse => true,
                    Lessons::FifthFalseFromShift => group >= before,
                    _ => false,
                };
            let truth = good.iter().map(|good| Some(*good != lies));
            runtime.block_on(async {
                let lesson = Lesson::sign(submission, truth, address(LEARNER), &keys[student]).await?;
                learner.learn(&lesson).await.map_err(anyhow::Error::from)
            })?;
        }
    }
    out.lessons = learner.stats().lessons;
    Ok(out)
}

/// Draws a level and eight actions, of which four are right. After the shift three of the wrong ones look advanced, as those of students do
/// that were taught by the static judge.
fn draw(has_shifted: bool, rng: &mut Rng) -> (usize, [usize; GROUP]) {
    let level = rng.below(KNOWN_LEVELS);
    let mut wrong = || 1 + rng.below(ACTIONS - 1);
    match has_shifted {
        false => (level, [0, 0, 0, 0, wrong(), wrong(), wrong(), wrong()]),
        true => (KNOWN_LEVELS + level, [0, 0, 0, 0, 1, 1, 1, 2 + rng.below(ACTIONS - 2)]),
    }
}

/// Has a student choose who judges a group. In an audit it asks others, too, and tells the other students. Returns the sellers asked.
fn hire<'a>(
    buyers: &mut [Buyer],
    student: usize,
    order: &[usize],
    tasks_left: u64,
    sold: &dyn Fn(usize) -> (u64, &'a [f64]),
    audit: Option<&[bool]>,
    version: Option<String>,
) -> anyhow::Result<Vec<usize>> {
    let skill = Skill::new(0).context("no skill")?;
    let candidate = |seller: &usize| {
        Candidate::new(address(*seller), SkillSet::from_iter([skill]), Usdc::from_atomic(sold(*seller).0))
    };
    let market: Vec<_> = order.iter().map(candidate).collect();
    let Buyer { selector, purse, .. } = &mut buyers[student];
    let mut job = Job::new(skill, Usdc::from_atomic(*purse), tasks_left);
    job.outputs = GROUP as u32;
    let Some(hired) = selector.select(&job, &market).first().copied() else { return Ok(Vec::new()) };
    let mut asked = vec![hired];
    if audit.is_some() {
        let paid = job.cost(&market[hired]).context("too dear")?;
        job.remaining = job.remaining.checked_sub(paid).context("too dear")?;
        let others: Vec<_> = (0..market.len()).filter(|other| *other != hired).collect();
        let without: Vec<_> = others.iter().map(|other| market[*other]).collect();
        asked.extend(selector.explore(&job, &without).into_iter().map(|chosen| others[chosen]));
    }
    for position in &asked {
        let (candidate, seller) = (&market[*position], order[*position]);
        let paid = job.cost(candidate).context("too dear")?;
        let pairs = audit.and_then(|good| Pairs::of(sold(seller).1, good));
        let seen = Observation::new(candidate.evaluator, skill, paid, CallOutcome::answered(pairs));
        let buyer = &mut buyers[student];
        buyer.purse = buyer.purse.checked_sub(paid.atomic()).context("more was bought than there was money for")?;
        if seller == LEARNER && buyer.version != version {
            let before = std::mem::replace(&mut buyer.version, version.clone());
            before.into_iter().for_each(|_| buyer.selector.learn_new_version(candidate.evaluator));
        }
        buyer.selector.learn(&seen);
        if pairs.is_some() {
            let payer = Address::left_padding_from(&[1, student as u8]);
            let others = buyers.iter_mut().enumerate().filter(|(other, _)| *other != student);
            others.for_each(|(_, other)| other.selector.learn_report(payer, &seen));
        }
    }
    Ok(asked.into_iter().map(|position| order[position]).collect())
}

fn address(seller: usize) -> Address {
    Address::left_padding_from(&[seller as u8 + 1])
}

/// Returns the tables of the experiment and its claims, and draws the reliability of the judges into `out`.
pub(crate) fn judges(
    seeds: Range<u64>,
    groups: Option<usize>,
    out: Option<&Path>,
) -> anyhow::Result<(String, Vec<Claim>)> {
    let (groups, count) = (groups.unwrap_or(GROUPS), (seeds.end - seeds.start) as usize);
    let all = |lessons, price| parallel(count, |number| run(lessons, price, groups, seeds.start + number as u64));
    let direct = ARMS.iter().map(|(_, lessons)| all(*lessons, None)).collect::<anyhow::Result<Vec<_>>>()?;
    let mut judges = vec![("static", direct[0].as_slice(), STATIC)];
    judges.extend(ARMS.iter().zip(&direct).map(|((name, _), runs)| (*name, runs.as_slice(), LEARNER)));

    let mut text = "| judge | D before | right after | in the end | calibration error before | right after | in the end |\n|---|---|---|---|---|---|---|\n".to_owned();
    for (name, runs, judge) in &judges {
        let cells =
            |of: fn(&Seen) -> f64, digits| cells(|window| values(runs, |run| of(&run.seen[*judge][window])), digits);
        let _ = writeln!(text, "| {name} | {} | {} |", cells(Seen::worth, 2), cells(Seen::calibration_error, 3));
    }

    let shown: Vec<_> = judges.iter().filter(|(name, ..)| *name != ARMS[0].0).collect();
    let names: Vec<_> = shown.iter().map(|(name, ..)| format!("{name}: outputs, % | right, %")).collect();
    let _ = writeln!(text, "\n| score, in the end | {} |\n|---|{}", names.join(" | "), "---|---|".repeat(names.len()));
    for bin in 0..BINS {
        let _ = write!(text, "| {:.1} to {:.1} |", bin as f64 / BINS as f64, (bin + 1) as f64 / BINS as f64);
        for (_, runs, judge) in &shown {
            let sum = |of: fn(&Bin) -> f64| runs.iter().map(|run| of(&run.seen[*judge][END].bins[bin])).sum::<f64>();
            let (outputs, good) = (sum(|bin| bin.outputs), sum(|bin| bin.good));
            let of: f64 = runs.iter().map(|run| run.seen[*judge][END].groups * GROUP as f64).sum();
            let right = if outputs > 0.0 { format!("{:.0}", 100.0 * good / outputs) } else { "–".to_owned() };
            let _ = write!(text, " {:.0} | {right} |", 100.0 * outputs / of);
        }
        text.push('\n');
    }
    if let Some(out) = out {
        let point = |runs: &[Outcome], judge: usize, bin: usize| {
            let bins = runs.iter().map(|run| run.seen[judge][END].bins[bin]).filter(|bin| bin.outputs > 0.0);
            (
                (bin as f64 + 0.5) / BINS as f64,
                Estimate::of(&bins.map(|bin| bin.good / bin.outputs).collect::<Vec<_>>()),
            )
        };
        let line = |(name, runs, judge): &&(&str, &[Outcome], usize)| {
            let points = (0..BINS).map(|bin| point(runs, *judge, bin)).filter(|(_, right)| !right.mean.is_nan());
            ((*name).to_owned(), points.collect::<Vec<_>>())
        };
        let exact = |at: f64| (at, Estimate { mean: at, low: at, high: at });
        let mut lines = vec![("perfectly calibrated".to_owned(), vec![exact(0.0), exact(1.0)])];
        lines.extend(shown.iter().map(line));
        let title = "Share of outputs that are right, by score, in the end";
        Lines { title, x: "score", labels: &[], lines }.draw_into(out, "learning-L")?;
    }

    text.push_str("\n| income, 10⁻⁶ $ a task | static before | right after | in the end | learning before | right after | in the end | lessons | D in the end |\n|---|---|---|---|---|---|---|---|---|\n");
    let mut incomes = Vec::new();
    for (name, price) in [("equal price", PRICE), ("twice the price", 2 * PRICE)] {
        for (arm, lessons) in ARMS {
            let runs = all(lessons, Some(price))?;
            let income = |seller: usize| cells(|window| values(&runs, |run| run.income[seller][window]), 0);
            let lessons = Estimate::of(&values(&runs, |run| run.lessons as f64)).show(0);
            let worth = Estimate::of(&values(&runs, |run| run.seen[LEARNER][END].worth())).show(2);
            let _ =
                writeln!(text, "| {name}, {arm} | {} | {} | {lessons} | {worth} |", income(STATIC), income(LEARNER));
            incomes.push([STATIC, LEARNER].map(|seller| values(&runs, |run| run.income[seller][END])));
        }
    }

    let in_the_end = |of: fn(&Seen) -> f64| -> Vec<Vec<f64>> {
        judges.iter().map(|(_, runs, judge)| values(runs, |run| of(&run.seen[*judge][END]))).collect()
    };
    let (worth, errors) = (in_the_end(Seen::worth), in_the_end(Seen::calibration_error));
    let mut claims = vec![Claim::above("D: taught − static", &worth[2], &worth[0])];
    for attacked in [3, 4] {
        let what = format!("D: {} − taught", judges[attacked].0);
        claims.push(Claim::at_least(what, &worth[attacked], &worth[2], -0.05));
    }
    claims.push(Claim::above("calibration error: static − taught", &errors[0], &errors[2]));
    claims.push(Claim::above("income at equal price: taught − static", &incomes[1][LEARNER], &incomes[1][STATIC]));
    Ok((text, claims))
}

fn values(runs: &[Outcome], of: impl Fn(&Outcome) -> f64) -> Vec<f64> {
    runs.iter().map(of).collect()
}

/// Returns the cells of a table with the estimate of each window.
fn cells(of: impl Fn(usize) -> Vec<f64>, digits: usize) -> String {
    (0..WINDOWS.len()).map(|window| Estimate::of(&of(window)).show(digits)).collect::<Vec<_>>().join(" | ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn static_judge_is_fooled_after_the_shift_and_a_taught_one_learns() {
        let outcome = run(Lessons::True, None, 1_600, 1).unwrap();
        let worth = |judge: usize, window: usize| outcome.seen[judge][window].worth();
        assert!(worth(STATIC, 0) > 0.8 && worth(STATIC, END) < 0.0, "{:?}", outcome.seen[STATIC]);
        assert!(worth(LEARNER, 0) > 0.8 && worth(LEARNER, END) > 0.2, "{:?}", outcome.seen[LEARNER]);
        assert_eq!(outcome.lessons, 1_600 / BLOCK as u64);
    }

    #[test]
    fn calibration_error_is_the_distance_of_scores_from_the_share_that_is_right() {
        let mut seen = Seen::default();
        seen.note(&[0.75; 4], &[true, true, true, false]);
        assert!(seen.calibration_error().abs() < 1e-9);
        seen.note(&[1.0, 1.0, 0.0, 0.0], &[false, true, false, false]);
        assert!((seen.calibration_error() - 0.125).abs() < 1e-9);
    }
}
