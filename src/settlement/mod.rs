//! The machinery that moves EIP-3009 authorizations onto a chain.
//!
//! | file | question it answers |
//! |---|---|
//! | `engine` | how one payment becomes a transaction that is watched to its end |
//! | `outcome` | what became of a payment, as far as the chain proves it |
//! | `probe` | whether a payment would be executed now, in one `eth_call` |
//! | `judge` | what the logs of a receipt prove |
//! | `credit` | who used an authorization, if it was not us |
//! | `lane`, `gaps` | which nonce is next, and what if one is missing |
//! | `transaction`, `transfer` | what is signed, and what it calls |
//! | `broadcast`, `confirm` | what a node's answer means, and when to look again |
//! | `batch`, `deploy` | how many payments share a transaction, and where the contract is that takes them |
//! | `fees`, `pace` | what to offer for gas, and how fast blocks come |
//! | `reverts` | who made a payment look good that then failed, and must wait |
//! | `rpc`, `http` | how a node is asked |

#[cfg_attr(not(test), expect(dead_code, reason = "the engine settles one by one"))]
pub(crate) mod batch;
pub(crate) mod broadcast;
mod confirm;
pub(crate) mod credit;
pub(crate) mod deploy;
pub(crate) mod engine;
pub(crate) mod fees;
mod gaps;
pub(crate) mod http;
pub(crate) mod judge;
pub(crate) mod lane;
mod outcome;
pub(crate) mod pace;
pub(crate) mod probe;
pub(crate) mod reverts;
pub(crate) mod rpc;
mod transaction;
mod transfer;
