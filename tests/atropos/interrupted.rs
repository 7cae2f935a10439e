//! What is left when the environment, or its connection to the server, breaks.

use std::collections::BTreeSet;

use crate::{
    program::{Both, GROUP, Running, Student, environment, payments, server, units},
    proxy::{Loss, Proxy},
    stage::Stage,
    support::chain::Chain,
    trainer::{Trainer, groups_of},
};

const BATCH: usize = 2 * GROUP;

#[tokio::test(flavor = "multi_thread")]
async fn a_run_that_is_killed_goes_on_and_its_books_are_those_of_the_chain() {
    let (server, stage) = (server().await, Stage::set().await);
    let booths = [stage.open(Both).await, stage.open_with(Both, |card| card.price("$0.0012")).await];
    let student = Student::rich(&stage).await;
    let trainer = Trainer::start(&server, BATCH as u64).await;
    let files = tempfile::tempdir().unwrap();
    let command = || {
        let urls = [&booths[0].url, &booths[1].url];
        let mut command = environment(&server.url, &stage, &urls, &student);
        command.args(["--groups", "40", "--budget", "$1.00", "--checkpoint"]).arg(files.path().join("run.json"));
        command
    };
    let mut paid = 0;
    for groups in [8, 24] {
        let mut running = Running::start(command());
        running.has_done(groups).await;
        running.kill().await;
        let before = std::mem::replace(&mut paid, student.has_paid(&stage).await);
        assert!(paid > before, "money was spent");
    }
    let document = Running::start(command()).document().await;
    let (batches, left) = trainer.finish().await;

    let groups = groups_of(batches, BATCH);
    assert_eq!(document["groups"]["rolled_out"], 40, "{document:#}");
    assert_eq!(document["groups"]["unsure"], 0, "{document:#}");
    assert_eq!(
        document["groups"]["pushed"],
        groups.len() as u64 + left,
        "what was counted is what arrived: {document:#}"
    );
    let mut nonces = BTreeSet::new();
    for group in &groups {
        for nonce in payments(group, &stage, &student).await {
            assert!(nonces.insert(nonce), "a payment is for one group");
        }
    }
    let total = student.has_paid(&stage).await;
    assert!(total > paid);
    assert_eq!(units(&document["spent"]), total, "all three runs together: {document:#}");
    assert_eq!(units(&document["on_chain"]["paid"]), total);
    let earned = document["evaluators"].as_array().unwrap().iter().map(|one| units(&one["earned"])).sum::<u64>();
    assert_eq!(earned + units(&document["elsewhere"]), total, "{document:#}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_group_whose_answer_is_lost_arrives_once_and_one_that_is_lost_itself_is_not_sent_again() {
    let (server, stage) = (server().await, Stage::set().await);
    let booth = stage.open(Both).await;
    let student = Student::rich(&stage).await;
    let trainer = Trainer::start(&server, BATCH as u64).await;
    let proxy = Proxy::before(&server, [(2, Loss::Answer), (4, Loss::Request)]).await;
    let mut command = environment(&proxy.url, &stage, &[&booth.url], &student);
    command.args(["--groups", "14"]);
    let document = Running::start(command).document().await;
    let (batches, left) = trainer.finish().await;
    let arrived = groups_of(batches, BATCH).len() as u64 + left;
    assert_eq!(document["groups"]["unsure"], 1, "{document:#}");
    assert_eq!(document["groups"]["pushed"], arrived, "{document:#}");
    assert_eq!(proxy.pushes(), arrived + 1, "nothing was sent twice");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_group_that_is_handed_over_when_the_process_is_killed_arrives_exactly_once() {
    let (server, stage) = (server().await, Stage::set().await);
    let booth = stage.open(Both).await;
    let student = Student::rich(&stage).await;
    let trainer = Trainer::start(&server, GROUP as u64).await;
    let files = tempfile::tempdir().unwrap();
    let command = |url: &str| {
        let mut command = environment(url, &stage, &[&booth.url], &student);
        command.args(["--groups", "12", "--audit-rate", "0", "--checkpoint"]).arg(files.path().join("run.json"));
        command
    };
    // Once the server has got it, once it has not; the second process has to find out which.
    for (push, loss) in [(2, Loss::Silence), (3, Loss::Void)] {
        let proxy = Proxy::before(&server, [(push, loss)]).await;
        let running = Running::start(command(&proxy.url));
        proxy.is_silent().await;
        running.kill().await;
    }
    let document = Running::start(command(&server.url)).document().await;
    let (batches, left) = trainer.finish().await;
    let groups = groups_of(batches, GROUP);
    assert_eq!((&document["groups"]["rolled_out"], &document["groups"]["unsure"]), (&12.into(), &0.into()));
    assert_eq!(document["groups"]["pushed"], groups.len() as u64 + left, "{document:#}");
    for group in &groups {
        payments(group, &stage, &student).await;
    }
    assert_eq!(units(&document["spent"]), student.has_paid(&stage).await);
    // What had been judged when the process was killed was not judged again: arithmetic and prose of twelve groups.
    assert_eq!(stage.chain.token_transfers(booth.payee).await.len(), 2 * 12);
}
