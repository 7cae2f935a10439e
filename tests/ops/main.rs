//! What an operator sees of a service that charges.

#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod losses;
mod metrics;
mod numbers;
mod operator;
mod readiness;
mod spans;
#[allow(dead_code, reason = "the settlement tests use the rest")]
#[path = "../settlement/stage.rs"]
mod stage;
#[path = "../support/mod.rs"]
mod support;
