//! On-chain verification and settlement, on the devnet's EVM.

#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod batch;
mod faults;
mod keys;
mod lane;
mod reconcile;
#[allow(dead_code, unreachable_pub)]
#[path = "../support/rpc_proxy.rs"]
mod rpc_proxy;
mod settle;
mod stage;
mod together;
mod upkeep;
mod verify;
