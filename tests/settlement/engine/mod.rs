//! On-chain verification and settlement, on the devnet's EVM.

mod background;
mod batch;
mod faults;
mod gas_balance;
mod keys;
mod limits;
mod nodes;
mod nonces;
mod permits;
mod prices;
mod reconcile;
mod rpc_batching;
mod settle;
mod two_processes;
mod upto;
mod verify;
