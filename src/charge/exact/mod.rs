//! A payment by one signed transfer, from its reservation to its settlement: of all of it, or of what the work cost.
//!
//! Of any number of copies of a payment one is leased and [worked for](ExactHeld). The others wait for what becomes of it, and are
//! answered from the ledger or take over where it left off.
//!
//! | file | question it answers |
//! |---|---|
//! | `matching` | which offer does it pay? |
//! | `request` | is a payment new, to be worked on, or answered before? |
//! | `held` | what is done before and after the work for it? |
//! | `settle` | is it settled, and what becomes of it if that is not known? |
//! | `receipt` | what is its payer told? |
//! | `settler` | how is it settled for others? |

mod held;
mod matching;
mod receipt;
mod request;
mod settle;
mod settler;

pub(crate) use held::ExactHeld;
pub(crate) use matching::PresentedPayment;
pub(crate) use request::{ExactRequest, Matched, Presentation};
pub use settler::{SettleAnswer, Settler, Sponsor};

use held::admit;
use request::is_same_payment;
use settle::{Outcome, reconcile, settle};
