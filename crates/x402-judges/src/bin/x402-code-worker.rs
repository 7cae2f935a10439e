//! Runs one program for an evaluator with a judge of code. It is started by that evaluator.

use std::process::ExitCode;

fn main() -> ExitCode {
    // As a worker, this does not return.
    let _ = x402_judges::CodeWorkers::of_this_program(1);
    eprintln!("x402-code-worker is started by evaluators that judge code: give its path to CodeWorkers::new");
    ExitCode::FAILURE
}
