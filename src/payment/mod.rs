//! Payments: the offer that a payer accepted, the authorization that it signed, and the checks that need no I/O.
//!
//! [`Terms`] hold an offer with its text and its EIP-712 domain. [`precheck`] checks a payment against them and returns a
//! [`Prechecked`] payment; a facilitator verifies and settles nothing else. A ledger restores one from its record. A
//! [`PaymentKey`] identifies a payment, and an [`Outcome`] is the result of settling it.

mod echo;
mod key;
mod outcome;
mod precheck;
mod terms;

pub use echo::{Echo, MAX_ECHO};
pub use key::PaymentKey;
pub use outcome::{Funds, Outcome, Verified};
pub use precheck::{Authenticity, Prechecked, Rejection, Window, precheck};
pub use terms::Terms;
