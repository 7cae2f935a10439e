//! Measures whether a student learns more from a market of evaluators than otherwise. `docs/learning.md` describes the experiments, what was
//! expected of them, and the result.
//!
//! ```text
//! cargo run --release -p examples --example learning -- --experiment M --seeds 20 --out target/learning
//! ```
//!
//! Evaluators are hired by the code that real students run (`x402_market::selection`), and the judge that learns is the one of
//! `x402_judges`. There is no HTTP, and money is only counted. Prints tables in Markdown, and draws pictures of M, S, P and L in `--out`.
//! The same arguments give the same result.
//!
//! ```text
//! experiments.rs  the worlds, the arms, and what would refute a claim
//! course.rs       trains the students of an arm
//! world.rs        tasks, outputs, and who sells verdicts
//! table.rs        the policy
//! own.rs          a reward model of the student's own
//! market.rs      the simulation of docs/market.md
//! pressure.rs     sellers: income, entry, exit, investment
//! judge.rs        a judge that learns beside a static one
//! ablation.rs     the selection without one of its parts
//! report.rs       means, intervals, tables; plot.rs draws
//! ```

#![allow(missing_docs, clippy::print_stdout, clippy::print_stderr, clippy::expect_used)]

mod ablation;
#[path = "../baselines.rs"]
mod baselines;
#[path = "../plot/mod.rs"]
mod canvas;
mod course;
mod experiments;
mod judge;
mod market;
mod own;
mod plot;
mod pressure;
mod report;
#[allow(dead_code)]
#[path = "../policy/rng.rs"]
mod rng;
mod table;
mod world;

use std::{
    fs,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
};

use anyhow::Context as _;
use clap::{Parser, ValueEnum};

use self::{
    course::{NOTED, Outcome},
    experiments::Cell,
    plot::Lines,
    report::{Estimate, Refute, Row, Sheet},
};

#[derive(Parser)]
#[command(about = "Measures whether a student learns more from a market of evaluators than otherwise")]
struct Flags {
    /// The experiment
    #[arg(long, value_enum, ignore_case = true)]
    experiment: Experiment,
    /// How many runs with different random numbers
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u64).range(1..=10_000))]
    seeds: u64,
    /// The first of these random numbers. The experiments of the page begin at 0
    #[arg(long, default_value_t = 0, value_parser = clap::value_parser!(u64).range(..=1 << 32))]
    first_seed: u64,
    /// How many groups or tasks a student has, instead of what the experiment says
    #[arg(long, value_parser = clap::value_parser!(u64).range(40..=100_000))]
    groups: Option<u64>,
    /// Only arms whose name contains this
    #[arg(long, default_value = "")]
    arm: String,
    /// Only this setting; of the ablation, only columns whose names begin so
    #[arg(long)]
    setting: Option<String>,
    /// The directory for pictures; none are drawn without it
    #[arg(long)]
    out: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Experiment {
    /// A majority of sellers that is wrong
    M,
    /// Specialists that never score above one half
    H,
    /// Tasks that move on
    S,
    /// Tasks of several kinds
    T,
    /// What sellers earn
    P,
    /// Several right ways
    D,
    /// Sellers that deceive
    X,
    /// A judge that learns
    L,
    /// The selection without one of its parts
    Ablation,
}

fn main() -> anyhow::Result<()> {
    let flags = Flags::parse();
    if let Some(out) = &flags.out {
        fs::create_dir_all(out).with_context(|| format!("{} cannot be made", out.display()))?;
    }
    let seeds = flags.seeds as usize;
    let groups = flags.groups.map(|groups| groups as usize);
    let resize = |cell: &mut Cell| {
        let Some(groups) = groups else { return };
        let world = Arc::make_mut(&mut cell.world);
        world.opens_every = world.opens_every.map(|every| (every * groups / world.groups).max(1));
        world.groups = groups;
    };
    let (cells, refute): (Vec<Cell>, Refute) = match flags.experiment {
        Experiment::M => (experiments::m(), experiments::refute_m),
        Experiment::H => (experiments::h(), experiments::refute_h),
        Experiment::S => (experiments::s(), experiments::refute_s),
        Experiment::T => (experiments::t(), experiments::refute_t),
        Experiment::X => (experiments::x(), experiments::refute_x),
        Experiment::D => (experiments::d(), |_| Vec::new()),
        Experiment::P => {
            let (tables, claims) = pressure::pressure(seeds, groups, flags.out.as_deref())?;
            println!("{tables}\n{}", report::show(&claims));
            return Ok(());
        }
        Experiment::L => {
            let seeds = flags.first_seed..flags.first_seed + flags.seeds;
            let (tables, claims) = judge::judges(seeds, groups, flags.out.as_deref())?;
            println!("{tables}\n{}", report::show(&claims));
            return Ok(());
        }
        Experiment::Ablation => {
            println!("{}", ablation::ablation(seeds, &resize, groups, flags.setting.as_deref().unwrap_or_default())?);
            return Ok(());
        }
    };
    let mut cells: Vec<_> = cells.into_iter().filter(|cell| cell.arm.name.contains(&flags.arm)).collect();
    cells.retain(|cell| flags.setting.as_ref().is_none_or(|setting| *setting == cell.setting));
    cells.iter_mut().for_each(resize);
    let runs = parallel(cells.len() * seeds, |number| {
        let cell = &cells[number / seeds];
        course::run(&cell.world, &cell.arm, flags.first_seed + (number % seeds) as u64)
    })?;
    let rows = cells.iter().zip(runs.chunks(seeds)).map(|(cell, outcomes)| Row {
        setting: cell.setting.clone(),
        arm: cell.arm.name.clone(),
        outcomes: outcomes.to_vec(),
    });
    let sheet = Sheet(rows.collect());
    println!("{}\n{}", sheet.qualities(), sheet.details());
    if flags.arm.is_empty() && flags.setting.is_none() {
        println!("{}", report::show(&refute(&sheet)));
    }
    match (flags.experiment, &flags.out) {
        (Experiment::M, Some(out)) => majorities(&sheet).draw_into(out, "learning-M"),
        (Experiment::S, Some(out)) => courses(&sheet, "2 %").draw_into(out, "learning-S"),
        _ => Ok(()),
    }
}

/// Returns the picture of M: the final quality of all arms by the share of biased sellers.
fn majorities(sheet: &Sheet) -> Lines<'_> {
    const SHARES: [&str; 5] = ["0", "¼", "½", "¾", "1"];
    let arms = sheet.arms().into_iter().filter(|arm| !arm.ends_with("1 %"));
    let line = |arm: &str| {
        let point =
            |(at, setting): (usize, &&str)| (at as f64, Estimate::of(&sheet.values(setting, arm, Outcome::quality)));
        (arm.to_owned(), SHARES.iter().enumerate().map(point).filter(|(_, quality)| !quality.mean.is_nan()).collect())
    };
    let lines = arms.map(line).collect();
    Lines { title: "Final quality, by the share of cheap sellers that are biased", x: "share", labels: &SHARES, lines }
}

/// Returns the picture of S: the quality over the course.
fn courses<'a>(sheet: &Sheet, setting: &str) -> Lines<'a> {
    let line = |row: &Row| {
        let points = row.outcomes[0].curve.len();
        let at = |point: usize| Estimate::of(&row.outcomes.iter().map(|one| one.curve[point]).collect::<Vec<_>>());
        (row.arm.clone(), (0..points).map(|point| (((point + 1) * NOTED) as f64, at(point))).collect())
    };
    let lines = sheet.0.iter().filter(|row| row.setting == setting).map(line).collect();
    Lines { title: "Quality at the levels 3 to 6, with 2 % audits", x: "group", labels: &[], lines }
}

/// Does pieces of work on all cores, and returns the results in order.
fn parallel<T: Send>(count: usize, work: impl Fn(usize) -> anyhow::Result<T> + Sync) -> anyhow::Result<Vec<T>> {
    let next = AtomicUsize::new(0);
    let some = || {
        let mut done = Vec::new();
        loop {
            let number = next.fetch_add(1, Ordering::Relaxed);
            if number >= count {
                return done;
            }
            done.push((number, work(number)));
        }
    };
    let threads = thread::available_parallelism().map_or(1, usize::from);
    let mut results: Vec<_> = thread::scope(|scope| {
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(some)).collect();
        workers.into_iter().flat_map(|worker| worker.join().expect("no work panics")).collect()
    });
    results.sort_by_key(|(number, _)| *number);
    results.into_iter().map(|(_, result)| result).collect()
}
