//! Paying by voucher, from a payment channel (scheme `batch-settlement`).
//!
//! The first payment to a payee carries a deposit into the escrow contract; each further one is a signed voucher, which costs no transaction.
//!
//! | file | what it has |
//! |---|---|
//! | `policy.rs` | when channels are opened, and how much may be in them |
//! | `entry.rs` | the books of one channel, a state machine without I/O |
//! | `books.rs` | all channels, and which of them a request gets |
//! | `lease.rs` | a channel in use by one request |
//! | `state.rs` | what is known of one payment, and what comes after a refusal: two tables, without I/O |
//! | `payment.rs` | one payment, from its voucher to its receipt |
//! | `report.rs` | what a seller reports of a charge |
//! | `refund.rs`, `close.rs` | money back, from one channel and from all that are idle |
//! | `chain.rs` | the books compared with the chain, and withdrawals without the seller |
//! | `finding.rs` | what a seller did that the books exclude |

mod books;
#[cfg(feature = "onchain")]
mod chain;
#[cfg(feature = "reqwest")]
mod close;
mod entry;
mod finding;
mod lease;
mod payment;
mod policy;
mod refund;
mod report;
mod state;
#[cfg(test)]
mod tests;

pub(super) use books::Books;
#[cfg(feature = "onchain")]
pub use chain::{ChannelReconciliation, finalize_withdrawal, initiate_withdrawal, reconcile_channels};
#[cfg(feature = "reqwest")]
pub use close::refund_channels;
pub(super) use entry::Change;
pub use entry::{ChannelEntry, PendingDeposit};
pub use finding::ChannelFinding;
pub(super) use payment::VoucherPayment;
pub use policy::ChannelPolicy;
pub use refund::{Refund, SignedRefundRequest};
