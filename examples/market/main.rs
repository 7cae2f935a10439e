//! Simulates a market of evaluators, and measures how much of an oracle's value students get with different policies.
//!
//! ```text
//! cargo run --release -p examples --example market -- --world examples/market/worlds/reference.json --seeds 40 --out target/market
//! ```
//!
//! The students choose with the code that real students run (`x402_market::selection`). Prints one JSON document to standard output and
//! progress to standard error, and draws plots (SVG and PNG) in `--out`. The same arguments give the same result. `docs/market.md`
//! describes the worlds and the result.

#![allow(missing_docs, clippy::print_stdout, clippy::print_stderr, clippy::expect_used)]

#[path = "../baselines.rs"]
mod baselines;
#[path = "../plot/mod.rs"]
mod canvas;
mod oracle;
mod plot;
mod report;
mod run;
mod world;

use std::{
    fs,
    io::{IsTerminal as _, Write as _, stderr},
    path::PathBuf,
    sync::atomic::{AtomicU64, Ordering},
    thread,
};

use anyhow::Context;
use clap::{Parser, ValueEnum};
use x402_market::selection::ThompsonConfig;

use crate::{
    report::Report,
    run::{Mechanism, Outcomes, Policy},
    world::World,
};

#[derive(Parser)]
#[command(about = "Simulates students that hire evaluators with different policies, in a world described by a file")]
struct Flags {
    /// The description of the world, a JSON file
    #[arg(long)]
    world: PathBuf,
    /// A policy to simulate; repeatable [default: all]
    #[arg(long = "policy", value_enum)]
    policies: Vec<Policy>,
    /// A mechanism to leave out of the selection; repeatable
    #[arg(long, value_enum)]
    without: Vec<Mechanism>,
    /// How many outputs an audited group has, half of them good, instead of what the world says; 0: an audit is of one comparison
    #[arg(long, value_parser = clap::value_parser!(u32).range(0..=64))]
    audited_outputs: Option<u32>,
    /// How many runs with different random numbers
    #[arg(long, default_value_t = 40, value_parser = clap::value_parser!(u64).range(1..=100_000))]
    seeds: u64,
    /// The directory for plots; none are drawn without it
    #[arg(long)]
    out: Option<PathBuf>,
}

#[derive(serde::Serialize)]
struct Document {
    world: String,
    about: String,
    students: usize,
    tasks_per_student: usize,
    seeds: u64,
    oracle_value_per_task: f64,
    policies: Vec<Report>,
}

fn main() -> anyhow::Result<()> {
    let flags = Flags::parse();
    let mut world = World::read(&flags.world)?;
    world.audited_outputs = flags.audited_outputs.unwrap_or(world.audited_outputs);
    let policies = if flags.policies.is_empty() { Policy::value_variants() } else { &flags.policies };
    let mut config = ThompsonConfig::default();
    flags.without.iter().for_each(|mechanism| mechanism.remove(&mut config));
    let simulate = |policy: &Policy| Report::new(&world, *policy, &simulate(&world, *policy, &config, flags.seeds));
    let reports: Vec<_> = policies.iter().map(simulate).collect();
    if let Some(out) = &flags.out {
        fs::create_dir_all(out).with_context(|| format!("{} cannot be made", out.display()))?;
        plot::draw(out, &world, &reports)?;
    }
    let best = oracle::by_task(&world);
    let document = Document {
        world: flags.world.file_stem().unwrap_or_default().to_string_lossy().into_owned(),
        about: world.about.clone(),
        students: world.students,
        tasks_per_student: world.tasks_per_student,
        seeds: flags.seeds,
        oracle_value_per_task: best.iter().sum::<f64>() / best.len() as f64,
        policies: reports,
    };
    println!("{}", serde_json::to_string_pretty(&document)?);
    Ok(())
}

/// Runs all seeds of a policy, one thread per core, and returns the outcomes in the order of the seeds.
fn simulate(world: &World, policy: Policy, config: &ThompsonConfig, seeds: u64) -> Vec<Outcomes> {
    let (next, done) = (AtomicU64::new(0), AtomicU64::new(0));
    let work = || {
        let mut runs = Vec::new();
        loop {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if seed >= seeds {
                return runs;
            }
            runs.push((seed, run::run(world, policy, config, seed)));
            progress(policy, done.fetch_add(1, Ordering::Relaxed) + 1, seeds);
        }
    };
    let threads = thread::available_parallelism().map_or(1, usize::from);
    let mut runs: Vec<_> = thread::scope(|scope| {
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        workers.into_iter().flat_map(|worker| worker.join().expect("a run does not panic")).collect()
    });
    runs.sort_by_key(|(seed, _)| *seed);
    runs.into_iter().map(|(_, outcomes)| outcomes).collect()
}

/// Prints progress: overwrites a line on a terminal, otherwise prints one at each quarter.
fn progress(policy: Policy, done: u64, seeds: u64) {
    let name = policy.name();
    if stderr().is_terminal() {
        let end = if done == seeds { "\n" } else { "" };
        eprint!("\r{name}: {done} of {seeds} seeds{end}");
        let _ = stderr().flush();
    } else if done == seeds || done.is_multiple_of(seeds.div_ceil(4)) {
        eprintln!("{name}: {done} of {seeds} seeds");
    }
}
