//! On-chain verification and settlement, on the devnet's EVM.

mod batch;
mod faults;
mod keys;
mod lane;
mod reconcile;
mod settle;
mod together;
mod two_processes;
mod upkeep;
mod verify;
