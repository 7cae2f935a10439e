//! The example's environment, in a market with dishonest evaluators.

use std::collections::BTreeSet;

use serde_json::Value;

use super::{
    program::{Both, GROUP, Running, Student, environment, evaluator, incomes, payments, server, units},
    trainer::{Trainer, groups_of},
};
use support::crowd::{Endpoint, garbage, honestly, praise};
use support::programs::example;
use support::student_stage::Stage;

const BATCH: usize = 2 * GROUP;

#[tokio::test(flavor = "multi_thread")]
async fn every_pushed_group_is_paid_while_evaluators_crash_misquote_and_answer_garbage() {
    let (server, stage) = (server().await, Stage::set().await);
    // The best offer for arithmetic, from a program that will be killed.
    let (mut mortal, mortal_url, mortal_payee) = evaluator(&stage, "$0.0005").await;
    let first = stage.open(Both).await;
    let second = stage.open_with(Both, |card| card.price("$0.0015")).await;
    let quiet = Endpoint::default();
    let dear = |paywall, payee| honestly(paywall, payee).price("$0.009");
    let liar = stage.crooked(&quiet, dear, praise).await;
    let fair = |paywall, payee| honestly(paywall, payee).price("$0.004");
    let babbler = stage.crooked(&quiet, fair, garbage).await;
    let student = Student::rich(&stage).await;

    let mut trainer = Trainer::start(&server, BATCH as u64).await;
    let urls = [&mortal_url, &first.url, &second.url, &liar.url, &babbler.url];
    let mut command = environment(&server.url, &stage, &urls, &student);
    command.args(["--groups", "40", "--budget", "$2.00", "--audit-rate", "0.4", "--panel", "2"]);
    let running = Running::start(command);
    trainer.has_taken(3).await;
    mortal.kill().await.unwrap();
    let document = running.document().await;
    let (batches, left) = trainer.finish().await;
    assert!(batches.len() > 3, "it goes on without the dead: {document:#}");

    let groups = groups_of(batches, BATCH);
    assert_eq!(document["groups"]["pushed"], groups.len() as u64 + left, "{document:#}");
    assert_eq!((&document["groups"]["rolled_out"], &document["groups"]["unsure"]), (&40.into(), &0.into()));
    let mut nonces = BTreeSet::new();
    for group in &groups {
        for nonce in payments(group, &stage, &student).await {
            assert!(nonces.insert(nonce), "a payment is for one group");
        }
        let scores = &group.scores;
        assert!(scores.iter().any(|score| *score != scores[0]), "there is something to learn");
        let advantages = group.advantages.as_ref().unwrap();
        assert!(advantages.iter().map(|all| all.last().unwrap()).sum::<f64>().abs() < 1e-6);
        let logprobs = group.inference_logprobs.as_ref().unwrap();
        assert!(logprobs.iter().flatten().all(|logprob| *logprob <= 0.0 || *logprob == 1.0));
        assert_eq!(group.messages.as_ref().unwrap()[0].len(), 2);
    }
    let issues = groups.iter().flat_map(|group| group.overrides.as_ref().unwrap());
    let mut issues =
        issues.flat_map(|about| about["critique"].as_array().unwrap()).map(|one| &one["critique"]["issues"]);
    assert!(issues.any(|issues| !issues.as_array().unwrap().is_empty()), "some answers are wrong, and it is said how");

    // The chain, the books and the evaluators agree.
    let paid = student.has_paid(&stage).await;
    assert_eq!(units(&document["spent"]), paid);
    // Payments that were signed for the killed evaluator stay reserved until they expire.
    assert!(units(&document["reserved"]).is_multiple_of(500) && units(&document["reserved"]) <= 8_000, "{document:#}");
    assert_eq!((units(&document["on_chain"]["paid"]), &document["on_chain"]["agrees"]), (paid, &Value::Bool(true)));
    assert_eq!(units(&document["elsewhere"]), 0);
    let payees = [mortal_payee, first.payee, second.payee, liar.payee, babbler.payee];
    assert_eq!(incomes(&document, &stage, &payees).await, paid);
    let of = |payee| {
        let all = document["evaluators"].as_array().unwrap();
        all.iter().find(|one| one["evaluator"].as_str().unwrap().parse() == Ok(payee)).unwrap()
    };
    assert!(of(mortal_payee)["failed"].as_u64() > Some(0), "it was missed when it was dead: {document:#}");
    assert!(of(liar.payee)["lies"].as_u64() > Some(0) && units(&of(liar.payee)["earned"]) == 0, "{document:#}");
    assert!(of(babbler.payee)["failed"].as_u64() > Some(0), "{document:#}");
}

#[tokio::test(flavor = "multi_thread")]
async fn policy_learns_and_books_agree_with_the_server_alone() {
    let server = server().await;
    let out = tempfile::tempdir().unwrap();
    let mut command = example("atropos_environment");
    command.args(["--atropos-url", &server.url, "--trainer", "--groups", "120"]).arg("--out").arg(out.path());
    command.stderr(std::process::Stdio::piped());
    let document = Running::start(command).document().await;
    assert_eq!(document["on_chain"]["agrees"], true, "{document:#}");
    assert!(units(&document["spent"]) > 0 && units(&document["spent"]) <= units(&document["budget"]));
    assert!(document["atropos"]["batches"].as_u64() > Some(20), "{document:#}");
    let right = |at: &str| document["learning"][at]["policy"]["right"].as_f64().unwrap();
    assert!(right("end") > right("start") + 0.3, "{document:#}");
    let svg = std::fs::read_to_string(out.path().join("learning.svg")).unwrap();
    assert!(svg.starts_with("<svg") && svg.contains("spent, of $1.00"));
    let png = std::fs::read(out.path().join("learning.png")).unwrap();
    assert!(png.starts_with(b"\x89PNG") && png.len() > 5_000);
}

#[tokio::test(flavor = "multi_thread")]
async fn used_up_budget_ends_the_run_and_is_not_exceeded() {
    let (server, stage) = (server().await, Stage::set().await);
    let booth = stage.open(Both).await;
    let student = Student::rich(&stage).await;
    let trainer = Trainer::start(&server, BATCH as u64).await;
    let mut command = environment(&server.url, &stage, &[&booth.url], &student);
    command.args(["--groups", "50", "--budget", "$0.05", "--audit-rate", "0"]);
    let document = Running::start(command).document().await;
    let (batches, _) = trainer.finish().await;
    let paid = student.has_paid(&stage).await;
    assert!(paid <= 50_000 && paid > 40_000, "{document:#}");
    assert_eq!(units(&document["spent"]), paid);
    for group in groups_of(batches, BATCH) {
        payments(&group, &stage, &student).await;
    }
}
