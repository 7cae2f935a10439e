//! The machinery that moves EIP-3009 authorizations onto a chain.
//!
//! | file | question it answers |
//! |---|---|
//! | `engine` | what settling with one key takes |
//! | `member`, `queue`, `batcher` | who waits, and who shares a transaction |
//! | `attempt` | how a transaction is signed, journalled, sent and followed to its end |
//! | `upkeep`, `finality` | what is done without being asked: after a crash, an outage, a reorganization |
//! | `depth` | how many blocks must be on top of a payment |
//! | `outcome` | what became of a payment, as far as the chain proves it |
//! | `probe` | whether a payment would be executed now, in one `eth_call` |
//! | `judge` | what the logs of a receipt prove |
//! | `credit` | who used an authorization, if it was not us |
//! | `lane`, `gaps` | which nonce is next, and what if one is missing |
//! | `transaction`, `transfer` | what is signed, and what it calls |
//! | `broadcast`, `confirm` | what a node's answer means, and when to look again |
//! | `batch`, `deploy` | how many payments share a transaction, and where the contract is that takes them |
//! | `fees`, `pace` | what to offer for gas, and how fast blocks come |
//! | `costs` | what settling a payment costs, against what it brings in |
//! | `readiness` | whether a payment could be settled now |
//! | `reverts` | who made a payment look good that then failed, and must wait |
//! | `rpc`, `together`, `http` | how a node is asked, by one or by many at once |

mod attempt;
pub(crate) mod batch;
mod batcher;
pub(crate) mod broadcast;
mod confirm;
pub(crate) mod costs;
pub(crate) mod credit;
pub(crate) mod deploy;
pub(crate) mod depth;
pub(crate) mod engine;
pub(crate) mod fees;
mod finality;
mod gaps;
pub(crate) mod http;
pub(crate) mod judge;
pub(crate) mod lane;
pub(crate) mod member;
mod outcome;
pub(crate) mod pace;
pub(crate) mod probe;
pub(crate) mod queue;
pub(crate) mod readiness;
pub(crate) mod reverts;
pub(crate) mod rpc;
pub(crate) mod together;
mod transaction;
pub(crate) mod transfer;
pub(crate) mod upkeep;
