//! Judges of programs.
//!
//! `workers.rs` starts a process for each program, and `job.rs` is what it is told and what it answers. In that process, `worker.rs` runs
//! the program and `safety.rs` reads it. This file prepares what is asked, and makes verdicts of the answers.

mod job;
#[cfg(feature = "code-worker")]
mod safety;
#[cfg(feature = "code-worker")]
mod worker;
mod workers;

use std::{ops::Range, time::Duration};

use alloy_primitives::keccak256;
use async_trait::async_trait;
use tokio::time::Instant;
use x402_market::{
    Critique, Issue, Place, Severity, Submission, Verdict,
    judge::{Judge, JudgeError},
};

use self::job::{Cost, Example, Fault, Job, Report, Request};
pub use self::workers::CodeWorkers;
use crate::undecided;

/// The longest program, in bytes.
const MAX_PROGRAM: usize = 32 * 1024;
/// The sizes of the inputs of hidden tests.
const TESTED: Range<usize> = 0..24;
/// The sizes of the inputs by which growth is measured: n, 2n and 4n.
const MEASURED: [usize; 3] = [200, 400, 800];
/// How many examples of a prompt are run at most.
const MAX_EXAMPLES: usize = 20;
/// How many issues of an output, and of all outputs together, are reported at most. An evaluation with the longest of all is below
/// [`MAX_EVALUATION`](x402_market::MAX_EVALUATION), or a program could make its verdict one that is not sold.
const MAX_ISSUES: usize = 12;
const MAX_ISSUES_TOGETHER: usize = 80;
/// How long the programs of a submission may run together, by the clock on the wall. Outputs after that are not judged. With the wait for
/// a worker and the last program it is less than the 55 s that judging may take: a submission that is late is not paid for.
const MAX_RUN: Duration = Duration::from_secs(30);

/// A judge of programs in [Starlark](https://starlark-lang.org), a small Python without files, network, `while` and recursion.
#[doc = include_str!("judges.md")]
#[derive(Clone)]
pub struct CodeJudge {
    workers: CodeWorkers,
    kind: Kind,
}

#[derive(Clone, Copy)]
enum Kind {
    Tests([u8; 32]),
    Growth([u8; 32]),
    Safety,
    Example,
}

/// What each output is asked, and what the reference program costs.
type Asked = (Job, Vec<Cost>);

impl CodeJudge {
    /// Creates a judge that runs hidden tests, and names an input for which the output is wrong.
    ///
    /// The tests are made from the reference program, of pseudo-random numbers that depend on the secret and on the submission. So no
    /// program can know them beforehand.
    pub const fn tests(workers: CodeWorkers, secret: [u8; 32]) -> Self {
        Self { workers, kind: Kind::Tests(secret) }
    }

    /// Creates a judge that compares how the cost of the output and of the reference program grow with the size of their inputs, and names
    /// the line that takes the most time. It does not look at results.
    ///
    /// Calls and turns of loops are counted. Work inside of built-in functions is seen by the memory and the processor time that it takes.
    /// The time is measured, so verdicts can differ between runs where only the time tells.
    pub const fn growth(workers: CodeWorkers, secret: [u8; 32]) -> Self {
        Self { workers, kind: Kind::Growth(secret) }
    }

    /// Creates a judge that reads the program, and names lines that are unsafe: undefined names and other findings of the linter, comparisons
    /// of secrets (by the names of parameters) that end early, and what grows without bound. It does not look at results.
    pub const fn safety(workers: CodeWorkers) -> Self {
        Self { workers, kind: Kind::Safety }
    }

    /// Creates a judge that runs the examples in the prompt, and nothing else. It is cheap, and believes a program that knows the examples.
    ///
    /// Examples are lines of the form `add(2, 3) == 5`.
    pub const fn example(workers: CodeWorkers) -> Self {
        Self { workers, kind: Kind::Example }
    }

    async fn prepare(&self, submission: &Submission) -> Result<Asked, JudgeError> {
        let (secret, sizes) = match &self.kind {
            Kind::Safety => return Ok((Job::Lint, Vec::new())),
            Kind::Example => return Ok((Job::Check(examples(submission.task.question())), Vec::new())),
            Kind::Tests(secret) => (secret, TESTED.collect()),
            Kind::Growth(secret) => (secret, MEASURED.to_vec()),
        };
        let mut seed = [secret, submission.task.question().as_bytes()].concat();
        submission.outputs().iter().for_each(|output| seed.extend_from_slice(&*keccak256(output.as_bytes())));
        let job = Job::Examples { sizes, seed: u64::from_be_bytes(*keccak256(seed).first_chunk().unwrap_or(&[0; 8])) };
        let examples = self.ask_reference(submission, job).await?.examples;
        if let Kind::Tests(_) = self.kind {
            return Ok((Job::Check(examples), Vec::new()));
        }
        let job = Job::Measure(examples);
        let costs = self.ask_reference(submission, job.clone()).await?.costs;
        Ok((job, costs))
    }

    async fn ask_reference(&self, submission: &Submission, job: Job) -> Result<Report, JudgeError> {
        let rejected = |what: &str| JudgeError::Rejected(format!("task.reference: {what}"));
        let program = submission.task.reference.as_deref().unwrap_or_default().to_owned();
        let report = self.workers.run(&Request { program, job }).await?.map_err(rejected)?;
        match report.faults.first() {
            Some(fault) => Err(rejected(&fault.what)),
            None => Ok(report),
        }
    }

    async fn judge_output(&self, output: &str, asked: &Asked, max_issues: usize) -> Result<Verdict, JudgeError> {
        let (job, reference) = asked;
        if matches!(job, Job::Check(examples) if examples.is_empty()) {
            return Ok(undecided("the prompt has no example"));
        }
        let code = code(output);
        let report = if code.len() > MAX_PROGRAM {
            Err("it is longer than 32 KiB")
        } else {
            self.workers.run(&Request { program: output[code.clone()].to_owned(), job: job.clone() }).await?
        };
        let Report { is_done, mut faults, costs, .. } = report.unwrap_or_else(|reason| {
            let fault = Fault { severity: Severity::Critical, line: None, what: reason.to_owned() };
            Report { faults: vec![fault], ..Report::default() }
        });
        let (score, confidence, summary) = match (&self.kind, job) {
            _ if !is_done => (0.0, 0.95, "It does not run.".into()),
            (kind, Job::Check(examples)) => {
                let (failed, all) = (faults.len(), examples.len());
                let (name, confidence) =
                    if matches!(kind, Kind::Example) { ("examples", 0.6) } else { ("hidden tests", 0.97) };
                // A program that is wrong for some inputs is wrong. Fewer are better to learn from.
                let score = if failed == 0 { 1.0 } else { 0.4 * (1.0 - failed as f64 / all as f64) };
                (score, confidence, format!("It passes {} of {all} {name}.", all - failed))
            }
            (_, Job::Lint) => match faults.iter().map(|fault| fault.severity).max() {
                Some(Severity::Critical) => (0.0, 0.8, "It is unsafe.".into()),
                Some(Severity::Major) => (0.2, 0.8, "It is probably unsafe.".into()),
                Some(_) => (0.8, 0.7, "Nothing unsafe was seen, but it is careless.".into()),
                None => (1.0, 0.7, "Nothing unsafe was seen.".into()),
            },
            _ => {
                faults.extend(slower(&costs, reference));
                let summary =
                    "Compared with the reference program, at sizes of 200, 400 and 800. Results were not judged.";
                (if faults.is_empty() { 1.0 } else { 0.1 }, 0.9, summary.into())
            }
        };
        faults.sort_by_key(|fault| std::cmp::Reverse(fault.severity));
        let issues = faults.into_iter().take(max_issues).map(|fault| {
            let line = fault.line.and_then(|line| line_of(output, code.clone(), line));
            Issue::new(fault.severity, fault.what).at(line.and_then(|line| Place::of(output, line)))
        });
        Ok(Verdict::new(score, confidence, issues.fold(Critique::new(summary), Critique::issue)))
    }
}

#[async_trait]
impl Judge for CodeJudge {
    fn accepts(&self, submission: &Submission) -> Result<(), JudgeError> {
        let reference = submission.task.reference.as_deref().unwrap_or_default();
        let problem = match self.kind {
            _ if reference.len() > MAX_PROGRAM => "task.reference is longer than 32 KiB",
            Kind::Tests(_) | Kind::Growth(_) if !reference.contains("inputs") => {
                "task.reference: send a program with `inputs`"
            }
            _ => return Ok(()),
        };
        Err(JudgeError::Rejected(problem.to_owned()))
    }

    /// The outputs are judged one after the other.
    ///
    /// Once a program was run there is a verdict, whatever the program is: what is rejected is not paid for.
    async fn judge(&self, submission: &Submission) -> Result<Vec<Verdict>, JudgeError> {
        self.accepts(submission)?;
        let _permit = self.workers.permit().await?;
        let began = Instant::now();
        let prepared = match self.prepare(submission).await {
            Err(JudgeError::Rejected(problem)) => Err(problem),
            prepared => Ok(prepared?),
        };
        let outputs = submission.outputs();
        let max_issues = (MAX_ISSUES_TOGETHER / outputs.len()).min(MAX_ISSUES);
        let mut verdicts = Vec::with_capacity(outputs.len());
        for output in outputs {
            verdicts.push(match &prepared {
                Err(problem) => undecided(problem),
                Ok(_) if began.elapsed() > MAX_RUN => undecided("the programs before it took half a minute"),
                Ok(asked) => self.judge_output(output, asked, max_issues).await?,
            });
        }
        Ok(verdicts)
    }
}

/// Returns the place of the program: the first block between fences, or else all of the output.
fn code(output: &str) -> Range<usize> {
    let fenced = || {
        let fence = output.find("```")?;
        let start = fence + output.get(fence..)?.find('\n')? + 1;
        let length = output.get(start..)?.find("```")?;
        Some(start..start + length)
    };
    fenced().unwrap_or(0..output.len())
}

/// Returns the place of a line of the program, without the space around it.
fn line_of(output: &str, code: Range<usize>, line: usize) -> Option<Range<usize>> {
    let text = output.get(code.clone())?.split_inclusive('\n').nth(line)?;
    let before: usize = output.get(code.clone())?.split_inclusive('\n').take(line).map(str::len).sum();
    let start = code.start + before + text.len() - text.trim_start().len();
    Some(start..start + text.trim().len())
}

/// Returns the examples in a prompt: lines such as `add(2, 3) == 5`.
fn examples(prompt: &str) -> Vec<Example> {
    let example = |line: &str| {
        let line = line.trim_matches(|mark: char| mark.is_whitespace() || matches!(mark, '`' | '*' | '-' | '>'));
        let (call, expected) = line.rsplit_once(" == ")?;
        let name = call.strip_suffix(')')?.split_once('(')?.0;
        let is_name = !name.is_empty() && name.chars().all(|letter| letter.is_ascii_alphanumeric() || letter == '_');
        is_name.then(|| Example { call: call.to_owned(), expected: expected.to_owned() })
    };
    prompt.lines().filter_map(example).take(MAX_EXAMPLES).collect()
}

/// Returns in what a program grows faster than the reference program.
fn slower(own: &[Cost], reference: &[Cost]) -> Vec<Fault> {
    /// A measure: its name, how much faster growth may be, and up to where it says nothing.
    type Measure = (&'static str, f64, u64, fn(&Cost) -> u64);
    const MEASURES: [Measure; 3] = [
        ("calls and turns of loops", 0.4, 1_000, |cost| cost.ticks),
        ("memory", 0.4, 64 * 1024, |cost| cost.heap),
        ("processor time", 0.6, 200_000, |cost| cost.nanos),
    ];
    let slower = MEASURES.iter().filter_map(|(name, tolerance, least, of)| {
        let growth = |costs: &[Cost]| {
            let (first, last) = (of(costs.first()?).max(1), of(costs.last()?).max(1));
            Some((last as f64 / first as f64).ln() / (MEASURED[2] as f64 / MEASURED[0] as f64).ln())
        };
        let (own_growth, growth) = (growth(own)?, growth(reference)?);
        let (last, base) = (own.last()?, reference.last()?);
        let is_slower = own_growth > growth + tolerance && of(last) > (2 * of(base)).max(*least);
        is_slower.then(|| Fault {
            severity: Severity::Major,
            line: last.line,
            what: format!("{name} grow with the power {own_growth:.1} of the size, those of the reference program with {growth:.1}"),
        })
    });
    slower.collect()
}

tower_x402::debug_fields!(CodeJudge { workers });
