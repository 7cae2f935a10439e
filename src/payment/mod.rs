//! Payments: the offer a payer accepted, the authorization it signed, and what can be checked of both without asking anybody.
//!
//! [`Terms`] are an offer with what follows from it. [`precheck`] checks a payment against them and is the only way to a
//! [`Prechecked`] payment, which everything behind it takes for authenticated. A [`PaymentKey`] identifies a payment, and an
//! [`Outcome`] says what came of settling it.

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
