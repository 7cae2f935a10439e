//! Processes that run programs: what they may do, and how they end.

use std::{
    fs,
    io::{Read as _, Write as _},
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::Duration,
};

use x402_judges::{CodeJudge, CodeWorkers};
use x402_market::judge::{Judge as _, JudgeError};

use super::{SECRET, judge, submission};

const PROGRAM: &str = "def double(n):\n    return 2 * n\n";
/// What a pretender does that finds nothing.
const DONE: &str = r#"printf '>'; /bin/cat > /dev/null
printf '{"is_done": true, "faults": [], "examples": [{"call": "double(1)", "expected": "2"}], "costs": []}'"#;

/// Starts a worker, and waits until its limits hold.
fn worker() -> Child {
    let mut command = Command::new(env!("CARGO_BIN_EXE_x402-code-worker"));
    command.arg("x402-code-worker").stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = command.spawn().unwrap();
    let mut ready = [0];
    child.stdout.as_mut().unwrap().read_exact(&mut ready).unwrap();
    assert_eq!(&ready, b">");
    child
}

/// Sends a request to a worker, and returns its report and exit status.
fn asked(request: &[u8]) -> (String, Option<i32>) {
    let mut child = worker();
    // It fails if the worker ends before it has read everything.
    let _ = child.stdin.take().unwrap().write_all(request);
    let output = child.wait_with_output().unwrap();
    (String::from_utf8(output.stdout).unwrap(), output.status.code())
}

/// Writes a program that is run in place of a worker.
fn pretender(folder: &Path, script: &str) -> PathBuf {
    let path = folder.join("worker");
    fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o700)).unwrap();
    path
}

async fn judged_by(script: &str) -> Result<String, JudgeError> {
    let folder = tempfile::tempdir().unwrap();
    let safety = CodeJudge::safety(CodeWorkers::new(pretender(folder.path(), script), 1));
    let verdicts = safety.judge(&submission(&[PROGRAM])).await?;
    Ok(verdicts[0].critique.issues[0].description.to_string())
}

#[cfg(target_os = "linux")]
#[test]
fn process_opens_nothing_and_starts_nothing() {
    let mut child = worker();
    let limits = fs::read_to_string(format!("/proc/{}/limits", child.id())).unwrap();
    let limit = |name: &str| {
        let line = limits.lines().find_map(|line| line.strip_prefix(name)).unwrap();
        line.split_whitespace().take(2).map(|limit| limit.parse::<u64>().unwrap()).collect::<Vec<_>>()
    };
    for name in ["Max open files", "Max file size", "Max processes", "Max core file size"] {
        assert_eq!(limit(name), [0, 0], "{name}");
    }
    assert_eq!(limit("Max cpu time"), [4, 5]);
    assert!(limit("Max address space")[1] < 1 << 30, "{limits}");
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn request_that_is_no_request_is_refused() {
    for request in [
        &b"\xff\xfe{}"[..],
        b"",
        b"{}",
        b"{\"program\": \"\xff\", \"job\": \"Lint\"}",
        br#"{"program": "\ud800", "job": "Lint"}"#,
    ] {
        assert_eq!(asked(request), (String::new(), Some(2)), "{request:?}");
    }
    // More than 4 MiB are not read.
    let long = format!("{{\"program\": \"{}\", \"job\": \"Lint\"}}", "x".repeat(5 << 20));
    assert_eq!(asked(long.as_bytes()).1, Some(2));
}

#[test]
fn source_of_a_megabyte_is_read_or_ends_its_process() {
    let flat = "x = 1\\n".repeat(150_000);
    let (report, status) = asked(format!("{{\"program\": \"{flat}\", \"job\": \"Lint\"}}").as_bytes());
    assert!(status == Some(0) && report.contains("\"is_done\":true") || status.is_none(), "{status:?} {report:.200}");
    let deep = "[".repeat(1 << 20);
    let (report, status) = asked(format!("{{\"program\": \"{deep}\", \"job\": \"Lint\"}}").as_bytes());
    assert!(status == Some(0) && report.contains("\"is_done\":false") || status.is_none(), "{status:?} {report:.200}");
}

#[tokio::test]
async fn process_that_cannot_be_started_is_an_error_of_the_judge() {
    for path in ["/nonexistent/worker", "/bin/true", "/bin/cat"] {
        let safety = CodeJudge::safety(CodeWorkers::new(path, 1));
        let error = safety.judge(&submission(&[PROGRAM])).await.unwrap_err();
        assert!(matches!(error, JudgeError::Failed(_)), "{path}: {error:?}");
    }
}

#[tokio::test]
async fn ended_process_is_a_verdict_if_the_program_ended_it() {
    assert_eq!(judged_by("printf '>'; kill -SEGV $$").await.unwrap(), "it ran out of memory, or is nested too deeply");
    assert_eq!(judged_by("printf '>'; kill -XCPU $$").await.unwrap(), "it used more than 4 s of processor time");
    assert_eq!(judged_by("printf '>'; exit 101").await.unwrap(), "it ran out of memory, or is nested too deeply");
    assert_eq!(judged_by("printf '>'; exec /bin/cat /dev/zero").await.unwrap(), "it gave too long an answer");
    for by_others in [
        "printf '>'; kill -KILL $$",
        "printf '>'; kill -TERM $$",
        "kill -SEGV $$",
        "printf '>'; exit 2",
        "printf '>nonsense'",
    ] {
        assert!(matches!(judged_by(by_others).await, Err(JudgeError::Failed(_))), "{by_others}");
    }
}

#[tokio::test]
async fn no_more_processes_than_allowed_run_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let here = folder.path().display();
    let script = format!(
        "/bin/mkdir '{here}/running' || : > '{here}/second'\n/bin/sleep 0.05\n{DONE}\n/bin/rmdir '{here}/running'"
    );
    let workers = CodeWorkers::new(pretender(folder.path(), &script), 1);
    let mut judging = tokio::task::JoinSet::new();
    for _ in 0..6 {
        let safety = CodeJudge::safety(workers.clone());
        judging.spawn(async move { safety.judge(&submission(&[PROGRAM])).await.unwrap() });
    }
    for verdicts in judging.join_all().await {
        assert_eq!(verdicts[0].score.get(), 1.0);
    }
    assert!(!folder.path().join("second").exists());
}

/// The calculation in `judges.md`: what a submission costs at most, and what it pays.
#[tokio::test]
async fn submission_costs_less_than_its_price() {
    const PRICE: f64 = 0.001;
    const CORE_SECOND: f64 = 0.05 / 3600.0;
    /// `process_opens_nothing_and_starts_nothing` looks at this limit of a process, in seconds.
    const PROCESS: f64 = 5.0;
    /// `submission_that_has_run_for_half_a_minute_starts_nothing` looks at this one of a submission, to which its last process comes.
    const SUBMISSION: f64 = 30.0;
    let folder = tempfile::tempdir().unwrap();
    let started = folder.path().join("started");
    let workers = CodeWorkers::new(pretender(folder.path(), &format!("echo >> '{}'\n{DONE}", started.display())), 1);
    for (judge, references) in [
        (CodeJudge::growth(workers.clone(), SECRET), 2),
        (CodeJudge::tests(workers.clone(), SECRET), 1),
        (CodeJudge::safety(workers.clone()), 0),
        (CodeJudge::example(workers), 0),
    ] {
        for outputs in [1, 2, 64] {
            judge.judge(&submission(&vec![PROGRAM; outputs])).await.unwrap();
            let processes = fs::read(&started).unwrap().len();
            assert_eq!(processes, references + outputs, "{judge:?}");
            let seconds = (PROCESS * processes as f64).min(SUBMISSION + PROCESS);
            assert!(seconds * CORE_SECOND < PRICE, "{seconds}");
            fs::remove_file(&started).unwrap();
        }
    }
}

/// A program that never ends is stood in for by one that waits for a file, and time by a clock that is put forward.
#[tokio::test]
async fn submission_that_has_run_for_half_a_minute_starts_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let here = folder.path().display();
    let script = format!("echo >> '{here}/started'\nuntil [ -e '{here}/go' ]; do /bin/sleep 0.01; done\n{DONE}");
    let workers = CodeWorkers::new(pretender(folder.path(), &script), 1);
    let safety = CodeJudge::safety(workers.clone());
    let judging = tokio::spawn(async move { safety.judge(&submission(&[PROGRAM; 3])).await.unwrap() });
    let started = folder.path().join("started");
    while !started.exists() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let waiting = tokio::spawn(async move { CodeJudge::safety(workers).judge(&submission(&[PROGRAM])).await });
    tokio::task::yield_now().await;
    tokio::time::pause();
    tokio::time::advance(Duration::from_secs(16)).await;
    tokio::time::resume();
    let busy = waiting.await.unwrap().unwrap_err();
    assert!(matches!(busy, JudgeError::Busy { .. }), "{busy:?}");
    tokio::time::pause();
    tokio::time::advance(Duration::from_secs(15)).await;
    tokio::time::resume();
    fs::write(folder.path().join("go"), "").unwrap();
    let verdicts = judging.await.unwrap();
    assert_eq!(fs::read(&started).unwrap().len(), 1, "{verdicts:?}");
    assert_eq!(verdicts[0].score.get(), 1.0);
    for verdict in &verdicts[1..] {
        assert_eq!((verdict.score.get(), verdict.confidence.get()), (0.5, 0.1), "{verdict:?}");
    }
}

#[test]
fn secret_of_the_tests_is_in_no_log() {
    let judge = CodeJudge::tests(CodeWorkers::new("/worker", 1), [0xab; 32]);
    assert!(!format!("{judge:?}").contains("171"), "{judge:?}");
}

#[tokio::test]
async fn worker_of_this_package_judges() {
    let judged = judge(&CodeJudge::tests(super::workers(), SECRET), PROGRAM).await;
    assert_eq!(judged.score.get(), 1.0);
}
