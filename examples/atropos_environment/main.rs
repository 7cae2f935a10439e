//! An environment for Atropos that buys its scores on a market.
//!
//! ```text
//! flags.rs       the command line
//! main.rs        puts the parts together and prints the summary
//! run.rs         rolls out, judges and delivers one group after the other
//! tasks.rs       word problems, or programs in levels
//! rollout.rs     the source of answers: ../policy, or a model behind an endpoint
//! model.rs       a model that tells its tokens
//! scoring.rs     turns verdicts into a scored group for the trainer
//! delivery.rs    delivers groups to the server
//! money.rs       the payer, its budget, and its payment channels
//! chain.rs       compares the budget with the chain
//! hall.rs        a market in this process, if no evaluator is named
//! checkpoint.rs  the state that lets an interrupted run continue
//! trainer.rs     takes batches, to try it without a real trainer
//! report.rs      progress, summary and plots
//! ```

#![allow(clippy::print_stdout, clippy::print_stderr)]

#[path = "../plot/mod.rs"]
mod canvas;
mod chain;
mod checkpoint;
mod delivery;
mod flags;
mod hall;
mod model;
mod money;
#[path = "../policy/mod.rs"]
mod policy;
mod report;
mod rollout;
mod run;
mod scoring;
mod tasks;
mod trainer;

use std::{collections::BTreeMap, process::ExitCode};

use alloy_primitives::Address;
use anyhow::{Context as _, bail};
use clap::Parser;
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::watch,
};
use tower_x402::{
    Nonces as _, OsNonces, Usdc,
    client::{Payer, Reconciliation},
};
use x402_market::{Student, selection::Thompson};

use crate::{
    chain::Chain,
    checkpoint::Checkpoint,
    delivery::Delivery,
    flags::Flags,
    hall::Hall,
    policy::{Policy, Rng},
    report::{Earner, Learning, Place, Summary},
    rollout::Answerer,
    run::{End, Run},
    trainer::Trainer,
};

#[tokio::main]
async fn main() -> ExitCode {
    let flags = Flags::parse();
    tracing_subscriber::fmt()
        .with_env_filter(tracing_subscriber::EnvFilter::try_from_default_env().unwrap_or_else(|_| "error".into()))
        .with_writer(std::io::stderr)
        .init();
    match environment(&flags).await {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("atropos_environment: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Returns `true` if the run completed and the chain does not contradict the budget.
async fn environment(flags: &Flags) -> anyhow::Result<bool> {
    let stop = signals()?;
    let answerer = Answerer::of(flags)?;
    let mut checkpoint = match flags.checkpoint.as_deref().map(Checkpoint::read).transpose()?.flatten() {
        Some(checkpoint) => checkpoint,
        None => Checkpoint::new(Policy::new(), Rng::seeded(flags.seed), name()?),
    };
    let key = money::key(flags)?;
    let (hall, asset) = if flags.evaluators.is_empty() {
        let hall = Hall::open(key.address(), flags).await?;
        let asset = hall.devnet.asset();
        (Some(hall), asset)
    } else {
        (None, flags.asset()?)
    };
    let rpc_url = hall.as_ref().map(|hall| hall.rpc_url.clone()).or_else(|| flags.rpc_url.clone());
    let chain = rpc_url.map(|url| Chain::connect(url, asset.address, key.address()));
    let payer = money::payer(flags, key, asset)?;
    if let Some(chain) = &chain {
        let found = chain.resolve(payer.budget()).await?;
        if found != Reconciliation::default() {
            eprintln!("of the payments that were open, {} were made and {} are void", found.paid, found.void);
        }
        if checkpoint.opening.is_none() {
            checkpoint.opening = Some(chain.opening(payer.budget()).await?);
        }
    }
    if let Some(path) = &flags.checkpoint {
        checkpoint.write(path)?;
    }
    let (student, names) = student(flags, hall.as_ref(), payer.clone(), &checkpoint).await?;

    let trainer = if flags.trainer { Some(Trainer::start(flags).await?) } else { None };
    eprintln!("waiting for the trainer at {}", flags.atropos_url.origin().ascii_serialization());
    let mut waiting = stop.clone();
    let mut delivery = tokio::select! {
        joined = Delivery::join(flags) => joined?,
        _ = waiting.wait_for(|stop| *stop) => bail!("stopped before the trainer began"),
    };
    let info = delivery.info();
    eprintln!("joined as {}: batches of {}", delivery.environment().name(), info.batch_size);
    let run = Run {
        flags,
        student: &student,
        answerer: &answerer,
        delivery: &mut delivery,
        checkpoint: &mut checkpoint,
        stop,
    };
    let ended = run.go().await;
    student.wait_until_idle().await;
    // The next run with this checkpoint goes on spending what is in escrow.
    let goes_on = flags.checkpoint.is_some() && !matches!(ended, Ok(End::Done | End::NoMoney));
    if !goes_on && let Err(error) = money::close_channels(&payer).await {
        eprintln!("atropos_environment: {error:#}");
    }
    let step = delivery.step().await;
    let left = delivery.leave().await;
    if let Err(error) = left {
        eprintln!("atropos_environment: {error:#}");
    }
    let name = delivery.environment().name().to_owned();
    let batches = trainer.as_ref().map(Trainer::batches);
    let place = Place { environment: name, step, batches };
    let agrees = summarize(flags, &student, &checkpoint, chain.as_ref(), &names, place, &answerer).await?;
    let end = ended?;
    match end {
        End::Done => {}
        End::Stopped => eprintln!("stopped"),
        End::NoMoney => eprintln!("the budget covers no further verdict"),
    }
    Ok(end != End::Stopped && agrees)
}

/// Returns the student, and the names of the evaluators that it found.
async fn student(
    flags: &Flags,
    hall: Option<&Hall>,
    payer: Payer,
    checkpoint: &Checkpoint,
) -> anyhow::Result<(Student, BTreeMap<Address, String>)> {
    let evaluators = hall.map_or_else(|| flags.evaluators.clone(), |hall| hall.evaluators.clone());
    let submissions = |groups: u64| 2 * groups;
    let student = Student::builder(payer)
        .source(evaluators)
        .selector(Thompson::seeded(flags.seed))
        .seed(flags.seed)
        .evidence(money::evidence(flags)?)
        .panel_size(usize::from(flags.panel))
        .tasks(submissions(flags.groups))
        .tasks_done(submissions(checkpoint.tally.rolled_out))
        .build()?;
    let report = student.discover().await;
    for refused in &report.refused {
        eprintln!("{} is not hired: {}", refused.url, refused.reason);
    }
    if report.found.is_empty() {
        bail!("no evaluator was found: name some with --evaluator");
    }
    let names = report.found.into_iter().map(|found| (found.evaluator, found.name)).collect();
    Ok((student, names))
}

/// Prints the summary and draws the plots. Returns `false` if the chain contradicts the budget.
async fn summarize(
    flags: &Flags,
    student: &Student,
    checkpoint: &Checkpoint,
    chain: Option<&Chain>,
    names: &BTreeMap<Address, String>,
    atropos: Place,
    answerer: &Answerer,
) -> anyhow::Result<bool> {
    let budget = student.budget();
    let on_chain = match chain.zip(checkpoint.opening) {
        Some((chain, opening)) => Some(chain.compare(&opening, budget).await),
        None => None,
    };
    if let Some(remark) = on_chain.and_then(|on_chain| on_chain.remark(budget.spent())) {
        eprintln!("{remark}");
    }
    let books = student.spending();
    let earned = budget.spent_by_payee();
    let known = earned.keys().copied().chain(books.accounts.iter().map(|account| account.evaluator));
    let earner = |evaluator| {
        let earned = earned.get(&evaluator).copied().unwrap_or(Usdc::ZERO);
        (evaluator, Earner::new(evaluator, names.get(&evaluator).cloned(), earned))
    };
    let mut earners: BTreeMap<Address, Earner> = known.map(earner).collect();
    for account in &books.accounts {
        if let Some(earner) = earners.get_mut(&account.evaluator) {
            earner.enter(account);
        }
    }
    let tally = &checkpoint.tally;
    let plots = match &flags.out {
        Some(out) => report::draw(out, tally, flags.budget, answerer.is_here())?,
        None => Vec::new(),
    };
    let summary = Summary {
        groups: tally.into(),
        budget: flags.budget,
        spent: budget.spent(),
        reserved: budget.reserved(),
        escrow: budget.in_escrow(),
        on_chain,
        elsewhere: books.elsewhere,
        evaluators: earners.into_values().collect(),
        learning: Learning::of(tally, answerer.is_here()),
        atropos,
        plots,
    };
    println!("{}", serde_json::to_string_pretty(&summary)?);
    Ok(on_chain.is_none_or(|on_chain| on_chain.agrees != Some(false)))
}

/// Returns a random prefix for the names of this run's groups.
fn name() -> anyhow::Result<String> {
    let nonce = OsNonces.next().context("the operating system gave no randomness")?;
    Ok(format!("{}-", alloy_primitives::hex::encode(&nonce[..8])))
}

/// Returns a flag that becomes true on SIGINT or SIGTERM. A second signal ends the process at once.
fn signals() -> anyhow::Result<watch::Receiver<bool>> {
    let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
    let (asked, stop) = watch::channel(false);
    tokio::spawn(async move {
        loop {
            tokio::select! {
                _ = interrupt.recv() => {}
                _ = terminate.recv() => {}
            }
            if asked.send_replace(true) {
                std::process::exit(1);
            }
            eprintln!("stopping after this group");
        }
    });
    Ok(stop)
}
