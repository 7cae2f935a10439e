//! Paying for requests, within a budget.
//!
//! A server that wants money answers 402 and says in a header what it takes: which token, on which chain, how much, to
//! whom. The client picks the cheapest offer it can pay (or what it [prefers](PayerBuilder::prefer)), signs an authorization for
//! exactly that amount, and sends the same request again with the authorization in another header. The server moves the
//! money and answers; the client never talks to a chain and pays no gas. Servers of x402 v1 make their offers in the
//! body of the 402; they are paid in that version where they offer no other.
//!
//! Three things can go wrong with that, and each has its place here.
//!
//! **The price.** Anybody can ask for anything. A [`Budget`] limits each payment and their sum, and the client pays only in
//! tokens it was told to trust. What it will not pay is a [`Refusal`] that names the limit, and nothing was signed then.
//!
//! **The network.** A payment was sent and the connection broke: is it paid? The client presents the *same*
//! authorization again, which can move money only once, and never signs another one for the same request.
//!
//! **The truth.** A signature is money for as long as it is valid, whatever an answer says. So an [`Outcome`] has more than two
//! values, and an amount stays reserved in the budget until it is paid or cannot be paid any more. A [`Journal`] in a
//! file carries all of that over a restart. `reconcile` (feature `onchain`) asks the chain about what is open, and
//! `reconcile_with_servers` (feature `reqwest`) the servers that tell; only the chain can free money.
//!
//! What there is to pay for, facilitators list: see `DiscoveryClient` (feature `reqwest`).
//!
//! [`AddPaymentLayer`] does this unasked around any tower HTTP client, and `PaymentMiddleware` (feature `reqwest`) around
//! reqwest. Both lean on [`Payer`], which knows no HTTP client.

#[cfg(feature = "reqwest")]
mod ask;
mod books;
mod budget;
mod choose;
mod demand;
#[cfg(feature = "reqwest")]
mod discovery;
mod error;
mod journal;
mod journal_file;
mod journal_record;
#[cfg(feature = "local-signer")]
pub mod key;
mod layer;
#[cfg(feature = "reqwest")]
mod listed;
mod payer;
mod payment;
mod present;
mod promise;
mod receipt;
#[cfg(feature = "onchain")]
mod reconcile;
#[cfg(any(feature = "onchain", feature = "reqwest"))]
mod reconciliation;
#[cfg(feature = "reqwest")]
mod reqwest;
mod response_body;
mod retry;
mod service;

#[cfg(feature = "reqwest")]
pub use ask::reconcile_with_servers;
pub use budget::{Budget, BudgetBuilder};
#[cfg(feature = "reqwest")]
pub use discovery::{
    Discovered, DiscoveryClient, DiscoveryClientBuilder, DiscoveryEnd, DiscoveryError, DiscoveryFilter, DiscoveryPage,
};
pub use error::{OfferRefusal, PaymentError, Refusal};
pub use journal::{Journal, JournalError};
pub use journal_file::JournalFile;
pub use journal_record::JournalEntry;
pub use layer::AddPaymentLayer;
#[cfg(feature = "reqwest")]
pub use listed::ListedResource;
pub use payer::{Payer, PayerBuilder};
pub use payment::{Next, Payment};
pub use receipt::{Outcome, Receipt, ReceiptExt};
#[cfg(feature = "onchain")]
pub use reconcile::{ReconcileError, reconcile};
#[cfg(any(feature = "onchain", feature = "reqwest"))]
pub use reconciliation::Reconciliation;
pub use response_body::ResponseBody;
pub use service::{AddPayment, AddPaymentError, AddPaymentFuture};

#[cfg(feature = "reqwest")]
pub use self::reqwest::PaymentMiddleware;
