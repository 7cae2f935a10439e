//! The policy of `examples/policy_lm`, trained on scores that are bought.

use std::{path::Path, process::Stdio};

use tokio::{net::TcpListener, process::Command};
use x402_market::{Score, judge::output_judge};

use super::program::{GROUP, Running, Student, environment, server, units};
use support::student_stage::{Stage, verdict};

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

#[tokio::test(flavor = "multi_thread")]
async fn killed_policy_goes_on_from_its_checkpoint_and_the_books_balance() {
    const GROUPS: u64 = 8;
    let (server, stage) = (server().await, Stage::set().await);
    // Programs of different lengths get different scores.
    let judge = output_judge(async |_, output: String| Ok(verdict(1.0 / (1.0 + output.len() as f64 / 50.0))));
    let booth = stage.open_with(judge, |card| card.skill("code", "Marks programs", Score::new(0.9).unwrap())).await;
    let student = Student::rich(&stage).await;
    let files = tempfile::tempdir().unwrap();
    // Free, and the same for both processes.
    let port = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap().port();
    let policy = || Running::start(policy(&server.url, port, &files.path().join("policy.npz")));

    let mut first = policy();
    first.says("listening").await;
    let mut command = environment(&server.url, &stage, &[&booth.url], &student);
    // A short queue: most groups are asked for after the kill.
    command.args(["--tasks", "code", "--groups", &GROUPS.to_string(), "--max-queue", "2"]);
    command.args(["--policy-url", &format!("http://127.0.0.1:{port}/v1")]);
    let running = Running::start(command);
    first.says("step 2:").await;
    first.kill().await;
    let mut second = policy();
    let said = second.says("step ").await;
    let step: u64 = said.split_once("step ").unwrap().1.split_once(':').unwrap().0.parse().unwrap();
    assert!(step > 2, "it goes on: {said}");

    let document = running.document().await;
    let groups = &document["groups"];
    assert_eq!((&groups["rolled_out"], &groups["pushed"]), (&GROUPS.into(), &GROUPS.into()), "{document:#}");
    // At most the batch that the killed process had taken is lost.
    second.says(&format!("step {}:", GROUPS - 1)).await;
    second.kill().await;
    let paid = student.has_paid(&stage).await;
    assert!(paid > 0);
    assert_eq!((units(&document["spent"]), &document["on_chain"]["agrees"]), (paid, &true.into()), "{document:#}");
}
