//! Asking a chain and sending to it, over JSON-RPC, without a ledger or a facilitator.
//!
//! [`PaymentLookup`] looks up whether a payment was made. The rest is internal; settlement is built on it:
//!
//! | file | question it answers |
//! |---|---|
//! | `node` | what is one node, with all that is remembered about it? |
//! | `rpc`, `rpc_batcher`, `endpoint` | how is a node asked, by one caller or by many at once, without showing its URL? |
//! | `broadcast`, `confirm` | what does a node's answer to a transaction mean, and when is it in a block? |
//! | `fees`, `block_time` | which fees does a transaction offer, and how long does a block take? |
//! | `probe` | would a payment be executed now? |
//! | `permit`, `settle_calls` | the same of a permit, and which transaction used it? |
//! | `transfer`, `batch`, `batch_settler` | which call executes one payment, or many? |
//! | `receipt_check` | do the logs of a receipt prove a payment? |
//! | `authorization_use` | which transaction used an authorization? |
//! | `escrow` | what is in payment channels? |
//! | `lookup` | was a payment made, and is it final? |
//! | `claim_lookup` | the same of a charge on a payment channel |
//! | `log_search`, `block_search` | in which of many blocks is a log, and which is the block of a time? |

pub(crate) mod authorization_use;
pub(crate) mod batch;
pub(crate) mod batch_settler;
pub(crate) mod block_search;
pub(crate) mod block_time;
pub(crate) mod broadcast;
mod claim_lookup;
pub(crate) mod confirm;
pub(crate) mod endpoint;
pub(crate) mod escrow;
pub(crate) mod fees;
mod log_search;
mod lookup;
pub(crate) mod node;
pub(crate) mod permit;
pub(crate) mod probe;
pub(crate) mod receipt_check;
pub(crate) mod rpc;
pub(crate) mod rpc_batcher;
mod settle_calls;
pub(crate) mod transfer;

pub use claim_lookup::SoughtCharge;
pub use lookup::{Finality, LookupError, MinedPayment, PaymentLookup, PaymentState, SoughtPayment};
