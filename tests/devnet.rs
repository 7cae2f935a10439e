//! The devnet behaves as Base and its USDC do, and fails as asked.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

#[path = "devnet/support.rs"]
mod support;

#[path = "devnet/chain.rs"]
mod chain;
#[path = "devnet/faults.rs"]
mod faults;
#[path = "devnet/probe.rs"]
mod probe;
#[path = "devnet/token.rs"]
mod token;
