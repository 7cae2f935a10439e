//! The environment gets SIGINT or SIGTERM.

use super::{
    program::{Both, GROUP, Running, Student, environment, incomes, server, units},
    trainer::{Trainer, groups_of},
};
use support::student_stage::Stage;

#[tokio::test(flavor = "multi_thread")]
async fn interrupted_environment_writes_a_summary_and_resumes_later() {
    let (server, stage) = (server().await, Stage::set().await);
    let booth = stage.open(Both).await;
    let student = Student::rich(&stage).await;
    let trainer = Trainer::start(&server, GROUP as u64).await;
    let files = tempfile::tempdir().unwrap();
    let out = files.path().join("plots");
    let command = || {
        let mut command = environment(&server.url, &stage, &[&booth.url], &student);
        command.args(["--groups", "40"]).arg("--out").arg(&out);
        command.arg("--checkpoint").arg(files.path().join("run.json"));
        command
    };
    let mut before = 0;
    for (signal, groups) in [("TERM", 4), ("INT", 16)] {
        let mut running = Running::start(command());
        running.has_done(groups).await;
        running.signal(signal).await;
        running.says("stopping after this group").await;
        let (document, log) = running.failure().await;
        let document = document.expect("there is a summary");
        let done = document["groups"]["rolled_out"].as_u64().unwrap();
        assert!(done >= groups && done < 40 && done > before, "{document:#}");
        assert!(log.ends_with("stopped"), "{log}");
        // Nothing was in flight.
        let paid = student.has_paid(&stage).await;
        assert_eq!((units(&document["spent"]), units(&document["reserved"])), (paid, 0), "{document:#}");
        assert_eq!((&document["on_chain"]["agrees"], units(&document["elsewhere"])), (&true.into(), 0));
        before = done;
    }
    let drawn = std::fs::metadata(out.join("learning.png")).unwrap().modified().unwrap();
    let document = Running::start(command()).document().await;
    let (batches, left) = trainer.finish().await;
    let arrived = groups_of(batches, GROUP).len() as u64 + left;
    let groups = &document["groups"];
    assert_eq!((&groups["rolled_out"], &groups["unsure"]), (&40.into(), &0.into()), "{document:#}");
    assert_eq!(groups["pushed"], arrived, "{document:#}");
    assert_eq!(incomes(&document, &stage, &[booth.payee]).await, student.has_paid(&stage).await);
    assert_eq!((&document["on_chain"]["agrees"], units(&document["elsewhere"])), (&true.into(), 0));
    assert!(std::fs::metadata(out.join("learning.png")).unwrap().modified().unwrap() > drawn, "it is drawn anew");
}

#[tokio::test(flavor = "multi_thread")]
async fn environment_that_waits_for_a_trainer_can_be_stopped() {
    let (server, stage) = (server().await, Stage::set().await);
    let booth = stage.open(Both).await;
    let student = Student::rich(&stage).await;
    let mut running = Running::start(environment(&server.url, &stage, &[&booth.url], &student));
    running.says("waiting for the trainer").await;
    running.signal("TERM").await;
    let (_, log) = running.failure().await;
    assert!(log.contains("stopped before the trainer began"), "{log}");
    assert_eq!(student.has_paid(&stage).await, 0);
}
