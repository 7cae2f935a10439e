//! Compares a student that hires evaluators on the market with the same student taught in other ways.
//!
//! ```text
//! cargo run --release -p examples --example learning -- --errors independent --seeds 10 --out target/learning
//! cargo run --release -p examples --example learning -- --errors systematic --seeds 10 --out target/learning
//! ```
//!
//! Evaluators run on ports of this machine, with signed cards, and are paid on a chain in this process. The student is
//! [`Student`](x402_market::Student), its policy that of `examples/policy`. Prints one JSON document to standard output and progress
//! to standard error, and draws plots (SVG and PNG) in `--out`. The same arguments give the same result. `docs/learning.md` describes
//! the world and the result.

#![allow(missing_docs, clippy::print_stdout, clippy::print_stderr, clippy::unwrap_used)]

mod arms;
#[path = "../baselines.rs"]
mod baselines;
#[path = "../plot/mod.rs"]
mod canvas;
mod conduct;
mod judges;
mod plot;
#[path = "../policy/mod.rs"]
mod policy;
mod regression;
mod report;
mod run;
mod stage;
mod teacher;
mod world;

use std::{
    collections::BTreeMap,
    fs,
    path::PathBuf,
    sync::atomic::{AtomicU64, AtomicUsize, Ordering},
    thread,
    time::Instant,
};

use anyhow::{Context, anyhow};
use clap::{Parser, ValueEnum};
use tokio::runtime;
use tower_x402::Usdc;

use crate::{
    arms::Arm,
    conduct::{Outcome, conduct},
    report::{Estimate, Report},
    run::{Settings, assignments, mean},
    world::{ASPECTS, Errors, sellers},
};

#[derive(Clone, Debug, Parser)]
#[command(about = "Compares a student that hires evaluators on the market with students taught in other ways")]
struct Flags {
    /// How many runs with different random numbers
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=1_000))]
    seeds: u64,
    /// The directory for plots; none are drawn without it
    #[arg(long)]
    out: Option<PathBuf>,
    /// How many groups of outputs a student trains on
    #[arg(long, default_value_t = 600, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    groups: u32,
    /// How many outputs are in a group
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u8).range(2..=64))]
    group_size: u8,
    /// The budget for each output
    #[arg(long, default_value = "$0.001")]
    budget: Usdc,
    /// The share of groups whose truth the student knows, 0 to 1
    #[arg(long, default_value_t = 0.05)]
    audits: f64,
    /// How evaluators that are not experts err
    #[arg(long, value_enum, default_value = "independent")]
    errors: Errors,
    /// A way to be taught; repeatable [default: all]
    #[arg(long = "arm", value_enum)]
    arms: Vec<Arm>,
    /// How many seeds run at the same time
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u8).range(1..=64))]
    at_once: u8,
}

/// The document on standard output.
#[derive(Debug, serde::Serialize)]
struct Document {
    seeds: u64,
    groups: usize,
    group_size: usize,
    budget_per_output_microusdc: u64,
    audit_rate: f64,
    errors: Errors,
    predecessors: u64,
    evaluators: Vec<SellerReport>,
    arms: Vec<Report>,
    people: People,
}

#[derive(Debug, serde::Serialize)]
struct SellerReport {
    name: &'static str,
    price_microusdc: u64,
    claims: BTreeMap<&'static str, f64>,
    /// The mean accuracy over seeds on outputs of the untrained policy.
    accuracy: BTreeMap<&'static str, f64>,
    /// The final quality of students that ask only this evaluator, if the budget covers that.
    #[serde(skip_serializing_if = "Option::is_none")]
    quality_alone: Option<Estimate>,
}

/// What as many labels by people would cost, at $2 to $5 each.
#[derive(Debug, serde::Serialize)]
struct People {
    labels: usize,
    least_usd: u64,
    most_usd: u64,
    /// The least cost as a multiple of a market student's budget.
    least_ratio: f64,
    /// The mean number of audited outputs per student, whose truth people would have to provide.
    audits: f64,
    audits_least_usd: f64,
    audits_most_usd: f64,
}

fn main() -> anyhow::Result<()> {
    let flags = Flags::parse();
    let document = experiment(&flags)?;
    if let Some(out) = &flags.out {
        fs::create_dir_all(out).with_context(|| format!("{} cannot be made", out.display()))?;
        plot::draw(out, &errors(flags.errors), &document.arms)?;
    }
    println!("{}", serde_json::to_string_pretty(&document)?);
    Ok(())
}

fn experiment(flags: &Flags) -> anyhow::Result<Document> {
    let settings = Settings {
        groups: flags.groups as usize,
        group_size: usize::from(flags.group_size),
        budget: flags.budget.atomic(),
        audits: flags.audits.clamp(0.0, 1.0),
        errors: flags.errors,
    };
    let arms = if flags.arms.is_empty() { Arm::value_variants() } else { &flags.arms };
    let told = |name: &'static str, quality: f64| eprintln!("{name} alone, without payments: quality {quality:.3}");
    let runtime = runtime::Builder::new_current_thread().build()?;
    let ends = match arms.contains(&Arm::FixedBest) {
        true => runtime.block_on(conduct::rehearse(flags.seeds, &settings, told))?,
        false => Vec::new(),
    };
    let best = conduct::best(&ends);
    let runs = all_seeds(flags, arms, &settings, best)?;

    let aspects: Vec<Vec<usize>> = (0..flags.seeds)
        .map(|seed| {
            let position = |aspect| ASPECTS.iter().position(|other| *other == aspect).unwrap_or_default();
            assignments(seed, &settings).into_iter().map(|assignment| position(assignment.aspect)).collect()
        })
        .collect();
    let of = |arm: usize| runs.iter().map(|run| run[arm].clone()).collect::<Vec<_>>();
    let market = arms.iter().position(|arm| *arm == Arm::Market).map(of);
    let market: Option<Vec<_>> =
        market.map(|runs| runs.iter().filter_map(|run| run.course.quality.last().copied()).collect());
    let reports = arms.iter().enumerate();
    let reports = reports.map(|(at, arm)| Report::new(*arm, &settings, &of(at), &aspects, market.as_deref())).collect();
    let labels = settings.labels();
    let audited = |seed| assignments(seed, &settings).iter().filter(|assignment| assignment.audited).count();
    let audits = mean((0..flags.seeds as usize).map(|seed| (audited(seed as u64) * settings.group_size) as f64));
    Ok(Document {
        seeds: flags.seeds,
        groups: settings.groups,
        group_size: settings.group_size,
        budget_per_output_microusdc: settings.budget,
        audit_rate: settings.audits,
        errors: settings.errors,
        predecessors: conduct::PREDECESSORS,
        evaluators: runtime.block_on(evaluators(flags.seeds, &settings, &ends))?,
        arms: reports,
        people: People {
            labels,
            least_usd: 2 * labels as u64,
            most_usd: 5 * labels as u64,
            least_ratio: 2e6 * labels as f64 / settings.total().max(1) as f64,
            audits,
            audits_least_usd: 2.0 * audits,
            audits_most_usd: 5.0 * audits,
        },
    })
}

/// Returns outcomes by seed, then arm. Each seed runs on one thread, so that everything happens in the same order every time.
fn all_seeds(flags: &Flags, arms: &[Arm], settings: &Settings, best: usize) -> anyhow::Result<Vec<Vec<Outcome>>> {
    let (next, count, started) = (AtomicU64::new(0), AtomicUsize::new(0), Instant::now());
    let all = flags.seeds as usize * arms.len();
    let told = |seed: u64, arm: Arm, outcome: &Outcome| {
        let done = count.fetch_add(1, Ordering::Relaxed) + 1;
        let quality = outcome.course.quality.last().copied().unwrap_or_default();
        let (name, spent, seconds) = (arm.name(), outcome.spent.chain, started.elapsed().as_secs());
        eprintln!("{done} of {all} ({seconds} s): seed {seed}, {name}: quality {quality:.3}, {spent} µUSDC");
    };
    let work = || -> anyhow::Result<Vec<(u64, Vec<Outcome>)>> {
        let mut runs = Vec::new();
        loop {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if seed >= flags.seeds {
                return Ok(runs);
            }
            let runtime = runtime::Builder::new_current_thread().enable_all().build()?;
            let told = |arm: Arm, outcome: &Outcome| told(seed, arm, outcome);
            runs.push((seed, runtime.block_on(conduct(seed, arms, settings, best, told))?));
        }
    };
    let mut runs = thread::scope(|scope| -> anyhow::Result<Vec<_>> {
        let workers: Vec<_> = (0..flags.at_once).map(|_| scope.spawn(work)).collect();
        let mut runs = Vec::new();
        for worker in workers {
            runs.extend(worker.join().map_err(|_| anyhow!("a run panicked"))??);
        }
        Ok(runs)
    })?;
    runs.sort_by_key(|(seed, _)| *seed);
    Ok(runs.into_iter().map(|(_, outcomes)| outcomes).collect())
}

/// Returns the world's name, by how evaluators err.
fn errors(errors: Errors) -> String {
    errors.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
}

async fn evaluators(seeds: u64, settings: &Settings, ends: &[(usize, Vec<f64>)]) -> anyhow::Result<Vec<SellerReport>> {
    let mut reports = Vec::new();
    for (position, seller) in sellers(settings.errors, 0).into_iter().enumerate() {
        let mut accuracy = [0.0; 3];
        for seed in 0..seeds {
            let right = conduct::accuracy(sellers(settings.errors, seed)[position].method).await?;
            accuracy.iter_mut().zip(right).for_each(|(sum, right)| *sum += right / seeds as f64);
        }
        let by_skill = |values: [f64; 3]| ASPECTS.into_iter().map(|aspect| aspect.skill()).zip(values).collect();
        let alone = ends.iter().find(|(other, _)| *other == position);
        reports.push(SellerReport {
            name: seller.name,
            price_microusdc: seller.price,
            claims: by_skill(seller.claims),
            accuracy: by_skill(accuracy),
            quality_alone: alone.map(|(_, qualities)| Estimate::of(qualities)),
        });
    }
    Ok(reports)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_small_experiment_runs_through_and_its_books_are_those_of_the_chain() {
        let flags =
            Flags::parse_from(["learning", "--seeds", "2", "--groups", "5", "--group-size", "3", "--audits", "0.4"]);
        let document = experiment(&flags).unwrap();
        assert_eq!(document.arms.len(), Arm::value_variants().len());
        for report in &document.arms {
            assert_eq!(report.spent_by_books_microusdc, report.spent_on_chain_microusdc, "{}", report.arm);
            // Two students with $0.001 for each of 15 outputs.
            assert!(report.spent_on_chain_microusdc <= 30_000, "{}", report.arm);
            assert!(report.quality.mean > 0.0 && report.curve.quality.len() == 5 && report.by_seed.len() == 2);
        }
        let spends: Vec<_> = document.arms.iter().filter(|report| report.spent_on_chain_microusdc > 0).collect();
        let names: Vec<_> = spends.iter().map(|report| &*report.arm).collect();
        assert_eq!(
            names,
            [
                "market",
                "market-panel",
                "market-pooled",
                "market-pooled-panel",
                "fixed-best",
                "random",
                "card-claims",
                "mixture",
                "reward-model"
            ]
        );
        // Every arm has as many outputs to be judged; students that know nothing yet may run out of money for the last ones.
        let labels = |report: &Report| (report.labels.low, report.labels.high);
        for report in document.arms.iter().filter(|report| report.arm != "audits-only") {
            match report.arm.starts_with("market") || ["random", "card-claims", "reward-model"].contains(&&*report.arm)
            {
                true => assert!((1.0..=15.0).contains(&report.labels.mean), "{}", report.arm),
                false => assert_eq!(labels(report), (15.0, 15.0), "{}", report.arm),
            }
        }
        // Paid verdicts equal those given without a payment.
        let fixed = document.arms.iter().find(|report| report.arm == "fixed-best").unwrap();
        let alone = document.evaluators.iter().filter_map(|seller| seller.quality_alone.map(|quality| quality.mean));
        assert_eq!(fixed.quality.mean, alone.fold(0.0, f64::max));
        let mixture = spends.iter().find(|report| report.arm == "mixture").unwrap();
        // Three judges for $0.001 an output; of a group's identical outputs one is bought.
        let spent = mixture.spent_on_chain_microusdc;
        assert!(spent % 1_000 == 0 && (20_000..=30_000).contains(&spent), "{spent}");

        let json: serde_json::Value = serde_json::from_str(&serde_json::to_string(&document).unwrap()).unwrap();
        assert_eq!(json["people"]["least_usd"], 2 * 15);
        assert!(
            json["arms"]
                .as_array()
                .unwrap()
                .iter()
                .all(|arm| arm["curve"]["groups"] == serde_json::json!([1, 2, 3, 4, 5]))
        );
        assert_eq!(json["evaluators"].as_array().unwrap().len(), 10);

        let again =
            experiment(&Flags { arms: vec![Arm::Market, Arm::MarketPanel, Arm::Mixture], ..flags.clone() }).unwrap();
        let of = |document: &Document, name| {
            let arm = document.arms.iter().find(|arm| arm.arm == name).unwrap();
            serde_json::to_value(arm).unwrap()
        };
        for name in ["market", "market-panel", "mixture"] {
            assert!(of(&again, name) == of(&document, name), "the same arguments give the same result");
        }

        let other = Flags { arms: vec![Arm::Mixture], errors: Errors::Systematic, seeds: 1, ..flags };
        let other = experiment(&other).unwrap();
        let mixture = |document: &Document| document.arms.iter().find(|arm| arm.arm == "mixture").unwrap().by_seed[0];
        assert_eq!(serde_json::to_value(&other).unwrap()["errors"], "systematic");
        assert_ne!(mixture(&other), mixture(&document), "it matters how judges err");

        let out = tempfile::tempdir().unwrap();
        plot::draw(out.path(), "independent", &document.arms).unwrap();
        for name in ["quality", "diversity", "believed"] {
            assert!(
                fs::metadata(out.path().join(format!("learning-independent-{name}.svg"))).unwrap().len() > 1_000,
                "{name}"
            );
        }
    }
}
