//! On-chain verification and settlement, on the devnet's EVM.

#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod batch;
mod faults;
mod keys;
mod lane;
mod reconcile;
mod settle;
mod stage;
mod upkeep;
mod verify;
