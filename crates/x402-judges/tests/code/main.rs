//! Judges of programs, with the process that runs them.

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout)]

mod attacks;
mod labelled;
mod processes;
mod verdicts;

use x402_judges::{CodeJudge, CodeWorkers};
use x402_market::{Submission, Task, Verdict, judge::Judge as _};

const SECRET: [u8; 32] = [7; 32];

/// Returns the program that this package builds.
fn workers() -> CodeWorkers {
    CodeWorkers::new(env!("CARGO_BIN_EXE_x402-code-worker"), 2)
}

/// Returns the verdict of a judge on one program, with a task that asks for the double of a number.
async fn judge(judge: &CodeJudge, program: &str) -> Verdict {
    judge.judge(&submission(&[program])).await.unwrap().remove(0)
}

fn submission(programs: &[&str]) -> Submission {
    let double =
        "def double(n):\n    return 2 * n\n\ndef inputs(size, random):\n    return [random[0] % 1000 + size]\n";
    submission_with(double, programs)
}

fn submission_with(reference: &str, programs: &[&str]) -> Submission {
    let task = Task::new("code", "Write double(n): twice the number.\ndouble(4) == 8\ndouble(0) == 0").unwrap();
    Submission::group(task.with_reference(reference).unwrap(), programs.iter().copied()).unwrap()
}

/// Returns the issues of a verdict, each with the line that it names.
fn issues(verdict: &Verdict) -> Vec<(String, String)> {
    let line = |issue: &x402_market::Issue| {
        issue.place.as_ref().and_then(|place| place.quote()).unwrap_or_default().to_owned()
    };
    verdict.critique.issues.iter().map(|issue| (issue.description.to_string(), line(issue))).collect()
}
