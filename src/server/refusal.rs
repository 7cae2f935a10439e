//! Why a payment is not worked on.

use http::StatusCode;

use crate::{ledger::LedgerError, payment::Rejection, protocol::Reason};

#[derive(Debug)]
pub(super) enum Refusal {
    /// With this status, and the offer again.
    Invalid(StatusCode, Rejection),
    /// The ledger could not be asked.
    Ledger(LedgerError),
}

impl Refusal {
    /// The payment cannot be read.
    pub(super) fn malformed(reason: Reason, detail: impl Into<String>) -> Self {
        Self::Invalid(StatusCode::BAD_REQUEST, Rejection::new(reason, detail))
    }

    /// The payment can be read and is not good.
    pub(super) const fn invalid(rejection: Rejection) -> Self {
        Self::Invalid(StatusCode::PAYMENT_REQUIRED, rejection)
    }
}
