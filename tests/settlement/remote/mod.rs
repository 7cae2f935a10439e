//! Charging through a facilitator over HTTP: an honest one, which is this crate's own service on the devnet, and bad ones.

mod background;
mod bad;
mod channels;
mod cost;
mod discovery;
mod echo;
mod honest;
mod lies;
mod moved;
mod numbers;
mod reorg;
mod service;
mod settle;
#[allow(unreachable_pub)]
mod stage;
mod two_processes;
