//! Paying for requests, within a budget.
//!
//! A server that charges answers `402 Payment Required` with its offers: which token, on which chain, how much, to whom. The client picks
//! the cheapest offer it can pay (or the one that it [prefers](PayerBuilder::prefer)), signs an authorization for exactly this amount, and
//! sends the same request again with the authorization in a header. The server settles the payment and answers. The client never
//! talks to a chain and pays no gas.
//!
//! | to pay | use |
//! |---|---|
//! | with `reqwest` | `PaymentMiddleware` (feature `reqwest`) |
//! | with any tower HTTP client | [`AddPaymentLayer`] |
//! | with another HTTP client | [`Payer`], which does no HTTP |
//!
//! x402 v2 and v1 are supported. A server that offers both is paid in v2.
//!
//! # What the client guarantees
//!
//! **It spends no more than the budget.** A [`Budget`] limits each payment and their sum, and optionally what each payee and host gets.
//! The client pays only in tokens that it was told to trust. If it refuses, the [`Refusal`] names the limit, and nothing was
//! signed.
//!
//! **It pays once per request.** If the connection breaks after a payment was sent, the client sends the *same* authorization again, which
//! can move money only once. It never signs a second one for the same request, whoever repeats it: a retry layer above the client, or,
//! with a [`Purchase`] that is named, another process.
//!
//! **It reports what it knows, no more.** A signature is money while it is valid, whatever the server answers. A payment without a proven
//! outcome is [`Unknown`](PaymentOutcome::Unknown), and its amount stays reserved until it is paid or can no longer be paid. A
//! [`Journal`] in a file keeps this over a restart.
//!
//! # After an unclear outcome
//!
//! `reconcile` (feature `onchain`) asks the chain about open payments. `reconcile_with_servers` (feature `reqwest`) asks the servers that
//! report payment statuses. Only the chain can release a reserved amount.
//!
//! # Paying by voucher
//!
//! With [`PayerBuilder::vouchers`] a payer deposits into an escrow contract once and then signs a voucher for each request, which costs no
//! transaction. It opens and fills the channels by itself, within a [`ChannelPolicy`] and its budget.
//!
//! It signs no more than what it was charged and the next price. What a seller says of its charges is believed as far as the payer's own
//! signature and its own journal agree. `refund_channels` asks for money back; `reconcile_channels` compares the journal with the chain,
//! and finds a seller that claimed more than it charged; `initiate_withdrawal` gets the money back without the seller.
//!
//! # Paying at most a price
//!
//! With [`PayerBuilder::upto`] a payer signs for the most that a request may cost, and is charged what it did cost. Its budget counts the
//! most until the chain shows that less was charged, since the seller could still charge the rest. A node of the payer's shows it at once; without one, and for a request that cost nothing, `reconcile` (feature `onchain`) finds the
//! charge, or that the permit has expired unused.
//!
//! # Finding something to pay for
//!
//! `DiscoveryClient`, of the crate `x402-bazaar`, reads the list of paid resources that a facilitator publishes.

mod answer;
mod budget;
mod challenge;
mod channels;
mod error;
mod exact;
mod exchange;
mod held;
mod journal;
mod journal_file;
mod journal_queue;
#[cfg(feature = "local-signer")]
pub mod key;
mod layer;
#[cfg(feature = "reqwest")]
mod middleware;
mod offer;
mod payer;
mod payment;
mod permits;
mod purchase;
mod receipt;
#[cfg(any(feature = "onchain", feature = "reqwest"))]
mod reconcile;
mod response_body;
mod sums;
mod totals;
mod v1;
mod wallet;

pub use answer::NextStep;
pub use budget::{Budget, BudgetBuilder};
#[cfg(feature = "reqwest")]
pub use channels::refund_channels;
pub use channels::{ChannelEntry, ChannelFinding, ChannelPolicy, PendingDeposit, Refund, SignedRefundRequest};
#[cfg(feature = "onchain")]
pub use channels::{ChannelReconciliation, finalize_withdrawal, initiate_withdrawal, reconcile_channels};
pub use error::{AddPaymentError, OfferRefusal, PaymentError, Refusal};
pub use exchange::RetryPolicy;
pub use journal::{Journal, JournalEntry, JournalError};
pub use journal_file::JournalFile;
pub use layer::{AddPayment, AddPaymentLayer};
#[cfg(feature = "reqwest")]
pub use middleware::PaymentMiddleware;
pub use payer::{Payer, PayerBuilder};
pub use payment::SignedPayment;
pub use permits::PermitPolicy;
pub use purchase::Purchase;
pub use receipt::{ChannelReceipt, PaymentOutcome, Receipt, ReceiptExt};
#[cfg(any(feature = "onchain", feature = "reqwest"))]
pub use reconcile::Reconciliation;
#[cfg(feature = "reqwest")]
pub use reconcile::reconcile_with_servers;
#[cfg(feature = "onchain")]
pub use reconcile::{ReconcileError, reconcile};
pub use response_body::PaidResponseBody;
