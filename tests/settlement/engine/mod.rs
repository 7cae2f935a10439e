//! On-chain verification and settlement, on the devnet's EVM.

mod batch;
mod faults;
mod keys;
mod lane;
mod limits;
mod prices;
mod reconcile;
mod settle;
mod tank;
mod together;
mod two_processes;
mod upkeep;
mod verify;
