//! Evaluators that sell verdicts, and students that buy them.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, unreachable_pub)]

mod buying;
mod cards;
mod llm;
mod messages;
mod pairwise;
mod pricing;
mod selling;
mod stage;
#[path = "../support/mod.rs"]
mod support;
