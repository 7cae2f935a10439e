//! A student that hires evaluators, good and bad, over a real chain.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, unreachable_pub)]

mod hiring;
mod stage;
#[path = "../support/mod.rs"]
mod support;
