//! How payments get into a block, once.
//!
//! | file | question it answers |
//! |---|---|
//! | `error`, `readiness` | why could a payment not be settled, and could one be settled now? |
//! | `engine` | how do the parts settle a payment together? |
//! | `queue` | which payments wait, and which share a transaction? |
//! | `accounts` | which account sends, and with which nonce? |
//! | `gas` | what does an account's balance have to pay for, and does it pay for one transaction more? |
//! | `gaps` | what happens to a nonce that later transactions wait for and nobody uses? |
//! | `load` | what is a transaction sent for? |
//! | `submitter` | how is a transaction signed, journalled, sent, followed and replaced? |
//! | `transfers` | which call makes the payments of a transaction? |
//! | `calls` | how is a call of a contract made once, such as those of payment channels? |
//! | `confirmation` | what became of a payment? |
//! | `recovery` | what happens to transactions that no task follows? |
//! | `deployment` | is the batch settler on the chain, and how is it deployed? |
//! | `line` | which of those that wait is sent first? |
//! | `costs` | what does settling cost, and which payers must wait? |
//! | `journal` | how does a facilitator write its ledger? |
//! | `reconciler`, `finality` | what happens in the background, to open payments and to settled ones? Used by every facilitator. |

#[cfg(feature = "onchain")]
pub(crate) mod accounts;
#[cfg(feature = "onchain")]
pub(crate) mod calls;
#[cfg(feature = "onchain")]
pub(crate) mod confirmation;
#[cfg(feature = "onchain")]
pub(crate) mod costs;
#[cfg(feature = "onchain")]
mod deployment;
#[cfg(feature = "onchain")]
pub(crate) mod engine;
mod error;
#[cfg(feature = "onchain")]
pub(crate) mod finality;
#[cfg(feature = "onchain")]
mod gaps;
#[cfg(feature = "onchain")]
mod gas;
#[cfg(any(feature = "onchain", feature = "remote"))]
pub(crate) mod journal;
#[cfg(feature = "onchain")]
pub(crate) mod line;
#[cfg(feature = "onchain")]
pub(crate) mod load;
#[cfg(feature = "onchain")]
mod queue;
pub(crate) mod readiness;
#[cfg(any(feature = "onchain", feature = "remote"))]
pub(crate) mod reconciler;
#[cfg(feature = "onchain")]
mod recovery;
#[cfg(feature = "onchain")]
pub(crate) mod submitter;
#[cfg(feature = "onchain")]
pub(crate) mod transfers;

pub use error::FacilitatorError;
pub use readiness::{NotReady, Readiness};
