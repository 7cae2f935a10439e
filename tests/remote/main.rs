//! Charging through a facilitator over HTTP: an honest one, which is this crate's own service on the devnet, and bad ones.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod bad;
mod discovery;
mod echo;
mod honest;
mod lies;
#[allow(dead_code)]
#[path = "../ops/numbers.rs"]
mod numbers;
mod reorg;
mod service;
#[allow(unreachable_pub)]
mod stage;
#[path = "../support/mod.rs"]
mod support;
