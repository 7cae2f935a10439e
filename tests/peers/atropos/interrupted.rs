//! The environment is killed, or its connection to the server breaks.

use std::collections::BTreeSet;

use super::{
    program::{Both, GROUP, Running, Student, environment, impatient, incomes, payments, server, units},
    proxy::{Loss, Proxy, STATUS},
    server::AtroposServer,
    trainer::{Trainer, groups_of},
};
use support::chain::Chain;
use support::student_stage::Stage;

const BATCH: usize = 2 * GROUP;

#[tokio::test(flavor = "multi_thread")]
async fn killed_run_resumes_and_its_books_agree_with_the_chain() {
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
    assert_eq!(document["on_chain"]["agrees"], true, "{document:#}");
    // Whenever it was killed, all balances agree to the atomic unit.
    let payees = booths.each_ref().map(|booth| booth.payee);
    assert_eq!(incomes(&document, &stage, &payees).await, total);
    // What was under way when it was killed is reserved if it was signed and not sent, and elsewhere if it was paid and not entered:
    // in each skill at most a group, the hidden task with it, and one that was left from the group before. For each of their
    // answers nobody asks for more than 1,200 units.
    let under_way = 2 * 3 * 1_200 * GROUP as u64;
    let (reserved, elsewhere) = (units(&document["reserved"]), units(&document["elsewhere"]));
    assert!(reserved + elsewhere <= 2 * under_way, "two kills: {document:#}");
}

#[tokio::test(flavor = "multi_thread")]
async fn group_is_never_sent_twice_after_a_lost_request_or_answer() {
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
    assert_eq!((units(&document["elsewhere"]), units(&document["reserved"])), (0, 0), "{document:#}");
}

#[tokio::test(flavor = "multi_thread")]
async fn unanswered_status_request_loses_no_group() {
    let (server, stage) = (server().await, Stage::set().await);
    let booth = stage.open(Both).await;
    let student = Student::rich(&stage).await;
    let trainer = Trainer::start(&server, GROUP as u64).await;
    // Of each group the first question is whether there is room, and the second whether the environment is still known.
    let losses = vec![
        (STATUS, 1..=1, Loss::Request),
        (STATUS, 3..=3, Loss::Answer),
        (STATUS, 5..=5, Loss::Garbage),
        (STATUS, 7..=9, Loss::Request),
        (STATUS, 12..=12, Loss::Garbage),
    ];
    let proxy = Proxy::losing(&server, losses).await;
    let mut command = environment(&proxy.url, &stage, &[&booth.url], &student);
    command.args(["--groups", "8"]);
    let document = Running::start(command).document().await;
    let (batches, left) = trainer.finish().await;
    let arrived = groups_of(batches, GROUP).len() as u64 + left;
    let groups = &document["groups"];
    assert_eq!((&groups["rolled_out"], &groups["unsure"]), (&8.into(), &0.into()), "{document:#}");
    assert_eq!((&groups["pushed"], proxy.pushes()), (&arrived.into(), arrived), "{document:#}");
}

#[tokio::test(flavor = "multi_thread")]
async fn unsent_group_is_kept_for_the_next_run_and_not_bought_again() {
    let (server, stage) = (server().await, Stage::set().await);
    let booth = stage.open(Both).await;
    let student = Student::rich(&stage).await;
    let trainer = Trainer::start(&server, GROUP as u64).await;
    let files = tempfile::tempdir().unwrap();
    let command = |url: &str, patience: &str| {
        let mut command = impatient(url, &stage, &[&booth.url], &student);
        command.args(["--groups", "4", "--audit-rate", "0", "--patience", patience]);
        command.arg("--checkpoint").arg(files.path().join("run.json"));
        command
    };
    // There is room for the first group, and then the server is gone.
    let proxy = Proxy::losing(&server, vec![(STATUS, 2..=u64::MAX, Loss::Request)]).await;
    let (document, log) = Running::start(command(&proxy.url, "2")).failure().await;
    let document = document.expect("there is a summary");
    assert_eq!((&document["groups"]["rolled_out"], proxy.pushes()), (&1.into(), 0), "{document:#}");
    assert!(log.contains("the request was not sent to the Atropos server"), "{log}");
    let bought = stage.chain.token_transfers(booth.payee).await.len();
    assert!(bought > 0 && document["on_chain"]["agrees"] == true, "{document:#}");

    let document = Running::start(command(&server.url, "60")).document().await;
    let (batches, left) = trainer.finish().await;
    let arrived = groups_of(batches, GROUP).len() as u64 + left;
    let groups = &document["groups"];
    assert_eq!((&groups["rolled_out"], &groups["unsure"]), (&4.into(), &0.into()), "{document:#}");
    assert_eq!(groups["pushed"], arrived, "{document:#}");
    // Arithmetic and prose of four groups.
    assert_eq!(stage.chain.token_transfers(booth.payee).await.len(), 2 * 4, "{bought} at first");
}

#[tokio::test(flavor = "multi_thread")]
async fn possibly_sent_group_is_not_sent_again_to_a_restarted_server() {
    let (server, stage) = (server().await, Stage::set().await);
    let booth = stage.open(Both).await;
    let student = Student::rich(&stage).await;
    let mut trainer = Trainer::start(&server, GROUP as u64).await;
    let files = tempfile::tempdir().unwrap();
    let command = |url: &str| {
        let mut command = environment(url, &stage, &[&booth.url], &student);
        command.args(["--groups", "4", "--checkpoint"]).arg(files.path().join("run.json"));
        command
    };
    // The trainer has the group, the server has forgotten it, and the environment does not know either.
    let proxy = Proxy::before(&server, [(2, Loss::Silence)]).await;
    let running = Running::start(command(&proxy.url));
    proxy.is_silent().await;
    trainer.has_taken(2).await;
    running.kill().await;
    let (first, _) = trainer.finish().await;
    let port = server.port();
    server.kill().await;
    let server = AtroposServer::start_on(port).await;
    let trainer = Trainer::start(&server, GROUP as u64).await;
    let document = Running::start(command(&server.url)).document().await;
    let (second, left) = trainer.finish().await;
    let groups = groups_of(first.into_iter().chain(second).collect(), GROUP).len() as u64;
    assert_eq!(document["groups"]["unsure"], 1, "{document:#}");
    let pushed = document["groups"]["pushed"].as_u64().unwrap();
    assert_eq!(pushed + 1, groups + left, "one has arrived of which nobody knows: {document:#}");
}

#[tokio::test(flavor = "multi_thread")]
async fn group_that_is_pushed_while_the_process_is_killed_arrives_once() {
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
    assert_eq!((units(&document["elsewhere"]), units(&document["reserved"])), (0, 0), "{document:#}");
    // What had been judged when the process was killed was not judged again: arithmetic and prose of twelve groups.
    assert_eq!(stage.chain.token_transfers(booth.payee).await.len(), 2 * 12);
}
