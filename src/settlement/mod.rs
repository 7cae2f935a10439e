//! The machinery that moves EIP-3009 authorizations onto a chain.
//!
//! | file | question it answers |
//! |---|---|
//! | `error`, `readiness` | why could nothing be settled, and could a payment be settled now? |
//! | `engine` | what does settling with a set of keys take? |
//! | `member`, `queue`, `batcher` | which payments wait, and which share a transaction? |
//! | `attempt`, `transaction` | how is a transaction signed, journalled, sent and followed to its end? |
//! | `nonce_manager`, `gaps` | which account nonce is next, and what if one is missing? |
//! | `outcome`, `depth` | what became of a payment, and how many blocks must be on top of it? |
//! | `upkeep`, `finality` | what is done without being asked: after a crash, an outage, a reorganization? |
//! | `costs`, `reverts` | what does a payment cost, and which payers must wait? |
//! | `deploy` | is the batch settler there, and how does it come there? |
//! | `readiness_look` | what does the node say about readiness? |

#[cfg(feature = "onchain")]
mod attempt;
#[cfg(feature = "onchain")]
mod batcher;
#[cfg(feature = "onchain")]
pub(crate) mod costs;
#[cfg(feature = "onchain")]
pub(crate) mod deploy;
#[cfg(feature = "onchain")]
pub(crate) mod depth;
#[cfg(feature = "onchain")]
pub(crate) mod engine;
mod error;
#[cfg(feature = "onchain")]
mod finality;
#[cfg(feature = "onchain")]
mod gaps;
#[cfg(feature = "onchain")]
pub(crate) mod member;
#[cfg(feature = "onchain")]
pub(crate) mod nonce_manager;
#[cfg(feature = "onchain")]
mod outcome;
#[cfg(feature = "onchain")]
pub(crate) mod queue;
mod readiness;
#[cfg(feature = "onchain")]
pub(crate) mod readiness_look;
#[cfg(feature = "onchain")]
pub(crate) mod reverts;
#[cfg(feature = "onchain")]
mod transaction;
#[cfg(feature = "onchain")]
pub(crate) mod upkeep;

pub use error::FacilitatorError;
pub use readiness::{NotReady, Readiness};
