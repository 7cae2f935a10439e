//! On-chain verification and settlement, on the devnet's EVM.

mod batch;
mod faults;
mod keys;
mod lane;
mod reconcile;
mod settle;
mod together;
mod upkeep;
mod verify;
