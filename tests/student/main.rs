//! A student that hires evaluators, good and bad, over a real chain.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, unreachable_pub)]

mod auditing;
mod crowd;
mod failing;
mod finding;
mod hiring;
mod restarting;
mod stage;
#[path = "../support/mod.rs"]
mod support;
