//! The policy of `examples/policy_lm`, trained on scores that are bought.

use std::{path::Path, process::Stdio};

use serde_json::json;
use tokio::{net::TcpListener, process::Command};
use x402_market::{Score, judge::output_judge};

use super::{
    program::{GROUP, Running, Student, environment, server, units},
    server::AtroposServer,
};
use support::student_stage::{Booth, Stage, verdict};

/// Returns the policy's command. Its ready line is among what it says.
fn policy(server_url: &str, port: u16, checkpoint: &Path) -> Command {
    let mut command = Command::new("sh");
    command.args(["-c", r#"exec "$0" "$@" 1>&2"#]);
    command.arg(support::repository().join("tests/peers/atropos/.venv/bin/python"));
    command.arg(support::repository().join("examples/policy_lm/policy.py"));
    command.args(["--atropos-url", server_url, "--listen", &port.to_string(), "--first-stage", "10"]);
    command.args(["--batch-size", &GROUP.to_string(), "--checkpoint"]).arg(checkpoint);
    command.stdin(Stdio::null()).stderr(Stdio::piped()).kill_on_drop(true);
    command
}

/// Returns the command of Atropos's example trainer, which makes one step on two groups.
fn example_trainer(server_url: &str, checkpoint: &Path) -> Command {
    // Debian's Python has torch.
    let mut command = Command::new("/usr/bin/python3");
    command.arg(support::repository().join("examples/policy_lm/atropos_loss.py"));
    command.arg("--atroposlib").arg(support::repository().join("tests/peers/atropos/.venv"));
    command.args(["--atropos-url", server_url, "--batch-size", &GROUP.to_string(), "--checkpoint"]).arg(checkpoint);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
    command
}

/// Opens an evaluator that gives programs of different lengths different scores.
async fn evaluator(stage: &Stage) -> Booth {
    let judge = output_judge(async |_, output: String| Ok(verdict(1.0 / (1.0 + output.len() as f64 / 50.0))));
    stage.open_with(judge, |card| card.skill("code", "Marks programs", Score::new(0.9).unwrap())).await
}

/// Returns a port that is free. A restarted policy takes it again.
async fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap().port()
}

/// Returns the environment's command for programs.
fn programs(server_url: &str, stage: &Stage, booth: &Booth, student: &Student, port: u16, groups: u64) -> Command {
    let mut command = environment(server_url, stage, &[&booth.url], student);
    // A short queue: most groups are asked for after the kills.
    command.args(["--tasks", "code", "--groups", &groups.to_string(), "--max-queue", "2"]);
    command.args(["--policy-url", &format!("http://127.0.0.1:{port}/v1")]);
    command
}

#[tokio::test(flavor = "multi_thread")]
async fn example_trainer_of_atropos_finds_the_log_probabilities_that_come_with_a_batch() {
    let (server, stage) = (server().await, Stage::set().await);
    let (booth, student) = (evaluator(&stage).await, Student::rich(&stage).await);
    let (files, port) = (tempfile::tempdir().unwrap(), free_port().await);
    let checkpoint = files.path().join("policy.npz");
    let mut serves = policy(&server.url, port, &checkpoint);
    serves.args(["--steps", "0"]);
    let mut serves = Running::start(serves);
    serves.says("listening").await;
    let trainer = Running::start(example_trainer(&server.url, &checkpoint));
    let document = Running::start(programs(&server.url, &stage, &booth, &student, port, 4)).document().await;
    assert!(document["groups"]["pushed"].as_u64().unwrap() >= 2, "{document:#}");
    let measured = trainer.document().await;
    assert_eq!((&measured["agrees"], &measured["sequences"]), (&json!(true), &json!(2 * GROUP)), "{measured:#}");
}

#[tokio::test(flavor = "multi_thread")]
async fn run_goes_on_and_its_books_balance_after_policy_environment_and_server_are_killed() {
    const GROUPS: u64 = 16;
    let (server, stage) = (server().await, Stage::set().await);
    let (booth, student) = (evaluator(&stage).await, Student::rich(&stage).await);
    let (files, port, url) = (tempfile::tempdir().unwrap(), free_port().await, server.url.clone());
    let policy = || Running::start(policy(&url, port, &files.path().join("policy.npz")));
    let environment = || {
        let mut command = programs(&url, &stage, &booth, &student, port, GROUPS);
        command.arg("--checkpoint").arg(files.path().join("run.json"));
        Running::start(command)
    };

    let mut first = policy();
    first.says("listening").await;
    let running = environment();
    first.says("step 2:").await;
    first.kill().await;
    let mut second = policy();
    let said = second.says("step ").await;
    let step: u64 = said.split_once("step ").unwrap().1.split_once(':').unwrap().0.parse().unwrap();
    assert!(step > 2, "it goes on: {said}");

    running.kill().await;
    let mut running = environment();
    let said = running.says(&format!(" of {GROUPS} groups")).await;
    let done: u64 = said.split_once(" of ").unwrap().0.parse().unwrap();
    assert!(done > step, "it goes on: {said}");

    let port = server.port();
    server.kill().await;
    let server = AtroposServer::start_on(port).await;
    running.says("joining again").await;

    let document = running.document().await;
    // The server may have had a group when it was killed, and not yet said so.
    let count = |name: &str| document["groups"][name].as_u64().unwrap();
    // Programs of the same length get the same score, and teach nothing.
    let equal = count("equal_scores");
    assert_eq!((count("rolled_out"), count("pushed") + count("unsure") + equal), (GROUPS, GROUPS), "{document:#}");
    assert!(count("unsure") <= 1, "{document:#}");
    // Lost are at most the batch that the killed policy had taken, the group on its way to the killed server, and what that had: two in
    // the queue, and two that it had made batches of.
    second.says(&format!("step {}:", GROUPS - 6 - equal)).await;
    second.kill().await;
    server.kill().await;
    let paid = student.has_paid(&stage).await;
    assert!(paid > 0);
    assert_eq!((units(&document["spent"]), &document["on_chain"]["agrees"]), (paid, &true.into()), "{document:#}");
}
