//! The flags of the example's environment.

use std::collections::BTreeMap;

use alloy_signer_local::PrivateKeySigner;
use axum::Router;
use serde_json::Value;
use tokio::net::TcpListener;
use tower_x402::Network;
use x402_market::{AgentCard, EvaluatorService, Score};

use super::{
    program::{Both, GROUP, Running, Student, environment, impatient, payments, server, units},
    server::run,
    trainer::{Trainer, groups_of},
};
use support::student_stage::{Booth, Stage, serve};
use support::{chain::Chain, programs::example};

/// An evaluator of one skill only.
async fn specialist(stage: &Stage, skill: &str, price: &str) -> Booth {
    let (listener, key) = (TcpListener::bind("127.0.0.1:0").await.unwrap(), PrivateKeySigner::random());
    let url = format!("http://{}", listener.local_addr().unwrap());
    let card = AgentCard::builder(skill, url).skill(skill, "Knows it", Score::new(0.9).unwrap()).price(price);
    let card = card.pay_to(Network::BASE_SEPOLIA, key.address()).build().unwrap().sign(&key).await.unwrap();
    let evaluator = EvaluatorService::builder(card, Both).facilitator(stage.facilitator.clone()).build().unwrap();
    let (url, server) = serve(listener, Router::new().fallback_service(evaluator));
    Booth { url, payee: key.address(), server }
}

#[tokio::test(flavor = "multi_thread")]
async fn prose_is_not_bought_without_money_for_arithmetic() {
    let (server, stage) = (server().await, Stage::set().await);
    let (sums, style) =
        (specialist(&stage, "arithmetic", "$0.0011").await, specialist(&stage, "prose", "$0.001").await);
    let student = Student::rich(&stage).await;
    let trainer = Trainer::start(&server, GROUP as u64).await;
    let mut command = environment(&server.url, &stage, &[&sums.url, &style.url], &student);
    // Two groups cost twice 4,400 and 4,000 units; then style could still be paid for.
    command.args(["--groups", "3", "--budget", "$0.021", "--audit-rate", "0"]);
    let document = Running::start(command).document().await;
    drop(trainer);
    for payee in [sums.payee, style.payee] {
        assert_eq!(stage.chain.token_transfers(payee).await.len(), 2, "{document:#}");
    }
    let groups = &document["groups"];
    assert_eq!((&groups["rolled_out"], &groups["unjudged"]), (&2.into(), &0.into()), "{document:#}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_run_without_a_finished_group_has_a_summary_and_plots() {
    let (server, stage) = (server().await, Stage::set().await);
    let booth = stage.open(Both).await;
    let student = Student::rich(&stage).await;
    let trainer = Trainer::start(&server, GROUP as u64).await;
    let out = tempfile::tempdir().unwrap();
    let mut command = environment(&server.url, &stage, &[&booth.url], &student);
    command.args(["--budget", "$0.001"]).arg("--out").arg(out.path());
    let document = Running::start(command).document().await;
    drop(trainer);
    assert_eq!((&document["groups"]["rolled_out"], units(&document["spent"])), (&0.into(), 0), "{document:#}");
    assert!(std::fs::read_to_string(out.path().join("learning.svg")).unwrap().starts_with("<svg"));
    assert!(std::fs::read(out.path().join("learning.png")).unwrap().starts_with(b"\x89PNG"));
}

#[tokio::test(flavor = "multi_thread")]
async fn queue_never_exceeds_max_queue() {
    let (server, stage) = (server().await, Stage::set().await);
    let booth = stage.open(Both).await;
    let student = Student::rich(&stage).await;
    // A trainer that takes no batches.
    let trainer = server.client();
    trainer.register(&run(GROUP as u64)).await.unwrap();
    assert_eq!(trainer.batch().await.unwrap(), None);
    let mut command = impatient(&server.url, &stage, &[&booth.url], &student);
    command.args(["--groups", "9", "--max-queue", "3", "--patience", "2"]);
    let (document, log) = Running::start(command).failure().await;
    let document = document.expect("there is a summary");
    assert!(log.contains("the trainer's queue has held 3 groups"), "{log}");
    assert_eq!((&document["groups"]["pushed"], trainer.status().await.unwrap().queue_size), (&3.into(), 3));
    assert_eq!(units(&document["spent"]), student.has_paid(&stage).await);
}

#[tokio::test(flavor = "multi_thread")]
async fn no_payment_exceeds_max_payment_and_a_group_is_paid_in_parts() {
    let (server, stage) = (server().await, Stage::set().await);
    let booth = stage.open(Both).await;
    let student = Student::rich(&stage).await;
    let trainer = Trainer::start(&server, GROUP as u64).await;
    let mut command = environment(&server.url, &stage, &[&booth.url], &student);
    // A group has four answers of 1,000 units each.
    command.args(["--groups", "3", "--max-payment", "$0.002", "--audit-rate", "0"]);
    let document = Running::start(command).document().await;
    let (batches, _) = trainer.finish().await;
    let transfers = stage.chain.token_transfers(booth.payee).await;
    assert!(transfers.iter().all(|transfer| transfer.units <= 2_000), "{transfers:?}");
    assert_eq!(transfers.len(), 3 * 2 * 2, "{document:#}");
    let groups = groups_of(batches, GROUP);
    assert!(!groups.is_empty());
    for group in groups {
        assert_eq!(payments(&group, &stage, &student).await.len(), 2 * 2);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn seed_determines_tasks_and_answers() {
    let (server, stage) = (server().await, Stage::set().await);
    let booth = stage.open(Both).await;
    let student = Student::rich(&stage).await;
    let trainer = Trainer::start(&server, GROUP as u64).await;
    for seed in ["5", "5", "6"] {
        let mut command = environment(&server.url, &stage, &[&booth.url], &student);
        command.args(["--groups", "3", "--audit-rate", "0", "--seed", seed]);
        let document = Running::start(command).document().await;
        assert_eq!(document["groups"]["pushed"], 3, "the seeds of this test are such that all groups are pushed");
    }
    let (batches, _) = trainer.finish().await;
    let groups = groups_of(batches, GROUP);
    assert_eq!(groups.len(), 9);
    // Batches come in any order, and each run has a name.
    let mut runs: BTreeMap<&str, BTreeMap<&str, _>> = BTreeMap::new();
    for group in &groups {
        let (run, number) = group.id().unwrap().split_once('-').unwrap();
        runs.entry(run).or_default().insert(number, &group.messages);
    }
    let runs: Vec<_> = runs.into_values().collect();
    assert_eq!(runs.len(), 3);
    let pairs = [(0, 1), (0, 2), (1, 2)];
    assert_eq!(pairs.into_iter().filter(|(one, other)| runs[*one] == runs[*other]).count(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn help_names_everything_in_the_document() {
    fn names(value: &Value, into: &mut Vec<String>) {
        match value {
            Value::Object(map) => {
                for (name, value) in map {
                    into.push(name.clone());
                    // For the policy's two states the summary only says that they exist.
                    if name != "learning" {
                        names(value, into);
                    } else {
                        into.extend(value.as_object().unwrap().keys().cloned());
                    }
                }
            }
            Value::Array(all) => all.iter().for_each(|value| names(value, into)),
            _ => {}
        }
    }
    let server = server().await;
    let mut command = example("atropos_environment");
    command.args(["--atropos-url", &server.url, "--trainer", "--groups", "2"]).stderr(std::process::Stdio::piped());
    let document = Running::start(command).document().await;
    let help = example("atropos_environment").arg("--help").output().await.unwrap();
    let help = String::from_utf8(help.stdout).unwrap();
    let mut all = Vec::new();
    names(&document, &mut all);
    assert!(all.len() > 20, "{all:?}");
    for name in all {
        assert!(help.contains(&format!("\"{name}\"")), "--help does not name {name}");
    }
}
