//! The messages between an evaluator and the process that runs one program.

use serde::{Deserialize, Serialize};
use x402_market::Severity;

/// The argument by which a process knows that it is a worker.
pub(super) const ARGUMENT: &str = "x402-code-worker";
/// The byte that a worker writes once its limits hold. How it ends before that says nothing about the program.
pub(super) const READY: u8 = b'>';
/// The exit status of a worker that could not read its request.
pub(super) const NO_REQUEST: i32 = 2;
/// The longest report, in bytes. Its examples fit into a request, beside a program.
pub(super) const MAX_REPORT: usize = 3 << 20;

/// A program, and what is asked about it.
#[derive(Serialize, Deserialize)]
pub(super) struct Request {
    pub(super) program: String,
    pub(super) job: Job,
}

#[derive(Clone, Serialize, Deserialize)]
pub(super) enum Job {
    /// Make an example for each size of input: of the first function that the program defines, by its function `inputs`.
    Examples { sizes: Vec<usize>, seed: u64 },
    /// Find the examples that do not hold.
    Check(Vec<Example>),
    /// Measure the call of each example.
    Measure(Vec<Example>),
    /// Find what is unsafe in the text of the program.
    Lint,
}

/// A call of a function, and an expression of what it returns.
#[derive(Clone, Serialize, Deserialize)]
pub(super) struct Example {
    pub(super) call: String,
    pub(super) expected: String,
}

#[derive(Default, Serialize, Deserialize)]
pub(super) struct Report {
    /// `true` if the program could be read, its definitions executed, and all of it measured.
    pub(super) is_done: bool,
    pub(super) faults: Vec<Fault>,
    pub(super) examples: Vec<Example>,
    pub(super) costs: Vec<Cost>,
}

#[derive(Serialize, Deserialize)]
pub(super) struct Fault {
    pub(super) severity: Severity,
    /// The line of the program, counted from 0.
    pub(super) line: Option<usize>,
    pub(super) what: String,
}

/// What a call cost.
#[derive(Clone, Copy, Default, Serialize, Deserialize)]
pub(super) struct Cost {
    /// Calls and turns of loops.
    pub(super) ticks: u64,
    /// Bytes that were allocated on Starlark's heap.
    pub(super) heap: u64,
    /// Processor time.
    pub(super) nanos: u64,
    /// The line that took the most time.
    pub(super) line: Option<usize>,
}
