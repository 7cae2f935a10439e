//! What one request is offered, and how it is told so.

use std::{sync::Arc, time::Duration};

use alloy_primitives::B256;
use http::{StatusCode, request::Parts};

use super::{
    answer::Answer,
    body::ReadError,
    config::Config,
    deferred::settled_later,
    offer::OnOffer,
    price::PriceError,
    receipt::{Receipt, settlement_of},
    refusal::Refusal,
    target::Target,
};
use crate::{
    facilitator::{FacilitatorError, VerifyError},
    ledger::{LedgerError, Record},
    payment::Rejection,
    protocol::{Reason, Version},
    telemetry::RequestOutcome,
};

/// When a client should come back to see what became of its payment.
const RETRY_SOON: Duration = Duration::from_secs(1);
/// When it should come back to a ledger that failed.
const RETRY_LEDGER: Duration = Duration::from_secs(5);

/// Why work that was begun came to nothing.
#[derive(Clone, Copy, Debug)]
pub(super) enum Unfinished {
    /// It took longer than it may.
    TooSlow,
    /// The handler's response ended before its end.
    BrokeOff,
}

#[derive(Clone)]
pub(super) struct Sale {
    pub(super) config: Arc<Config>,
    pub(super) offers: Arc<[OnOffer]>,
    /// Where the request was sent.
    pub(super) target: Target<'static>,
    /// What the payer speaks.
    pub(super) version: Version,
    /// How it writes its address.
    pub(super) payer: String,
}

impl Sale {
    pub(super) fn new(config: Arc<Config>, offers: Arc<[OnOffer]>, parts: &Parts) -> Self {
        let target = config.catalogue.target(&parts.uri, &parts.headers).into_owned();
        Self { config, offers, target, version: Version::default(), payer: String::new() }
    }

    /// The plain 402.
    pub(super) fn demand(&self) -> Answer {
        Answer::demand(StatusCode::PAYMENT_REQUIRED, self.config.catalogue.demand(&self.target, &self.offers, None))
    }

    /// The offer again, with what was wrong.
    pub(super) fn reject(&self, status: StatusCode, rejection: &Rejection) -> Answer {
        let error = (rejection.reason.as_str(), rejection.detail.as_str());
        let ended =
            if status == StatusCode::BAD_REQUEST { RequestOutcome::Malformed } else { RequestOutcome::Rejected };
        Answer::demand(status, self.config.catalogue.demand(&self.target, &self.offers, Some(error))).counted(ended)
    }

    pub(super) fn refuse(&self, refusal: &Refusal) -> Answer {
        match refusal {
            Refusal::Invalid(status, rejection) => self.reject(*status, rejection),
            Refusal::Ledger(error) => ledger_failed(error),
        }
    }

    pub(super) fn not_verified(&self, error: &VerifyError) -> Answer {
        match error {
            VerifyError::Invalid(rejection) => self.reject(StatusCode::PAYMENT_REQUIRED, rejection),
            VerifyError::Unavailable(error) => unavailable(error),
        }
    }

    pub(super) fn exposed(&self) -> Answer {
        let detail = "the payer's balance does not cover this payment and what else it has in flight";
        self.reject(StatusCode::PAYMENT_REQUIRED, &Rejection::new(Reason::InsufficientFunds, detail))
    }

    /// Settlement did not happen: the offer again, and how it failed.
    pub(super) fn not_settled(
        &self,
        record: &Record,
        reason: Reason,
        detail: &str,
        transaction: Option<B256>,
    ) -> Answer {
        self.reject(StatusCode::PAYMENT_REQUIRED, &Rejection::new(reason.clone(), detail))
            .with_settlement(&settlement_of(record, &self.payer, Err((reason, transaction))), self.version)
    }

    /// How the payment for a response was or will be settled; `None` if it is not.
    pub(super) fn receipt(&self, record: &Record) -> Option<Receipt> {
        match (record.settlement.paid_by(), self.version) {
            (Some(transaction), version) => Receipt::of(&settlement_of(record, &self.payer, Ok(transaction)), version),
            (None, version) => {
                let later = settled_later(record, &self.payer, self.config.status_url.as_deref())?;
                Receipt::of(&later, version)
            }
        }
    }

    /// Work that was begun came to nothing. Whoever paid for it before is told so: to pay anew would be to pay twice.
    pub(super) fn unfinished(&self, why: Unfinished, record: &Record) -> Answer {
        let (status, error, what) = match why {
            Unfinished::TooSlow => {
                (StatusCode::GATEWAY_TIMEOUT, "deadline_exceeded", "the work took longer than the deadline")
            }
            Unfinished::BrokeOff => {
                (StatusCode::INTERNAL_SERVER_ERROR, "internal_error", "the work's response broke off")
            }
        };
        match record.settlement.paid_by() {
            Some(transaction) => self.paid_in_vain(record, transaction, status, error, what),
            None => Answer::problem(status, error, &format!("{what}; nothing was charged for it"), None),
        }
    }

    /// The ledger did not take a step of work that was verified, and paid for if the flow is so. Unless the payment `is_given_back`, the
    /// ledger may have taken the step all the same, and have what was produced charged for.
    pub(super) fn unrecorded(&self, error: &LedgerError, record: &Record, is_given_back: bool) -> Answer {
        let answer = ledger_failed(error);
        if answer.status() != StatusCode::SERVICE_UNAVAILABLE {
            return answer;
        }
        match record.settlement.paid_by() {
            Some(transaction) => {
                let (status, what) = (StatusCode::SERVICE_UNAVAILABLE, "the work could not be recorded");
                self.paid_in_vain(record, transaction, status, "ledger_unavailable", what).retry_after(RETRY_LEDGER)
            }
            None if is_given_back => answer,
            None => self.pending(record, None),
        }
    }

    fn paid_in_vain(&self, record: &Record, transaction: B256, status: StatusCode, error: &str, what: &str) -> Answer {
        let detail = format!("{what}; it is paid for, and presenting the same payment again charges nothing more");
        Answer::problem(status, error, &detail, Some(transaction))
            .with_settlement(&settlement_of(record, &self.payer, Ok(transaction)), self.version)
    }

    /// Answered before, and the answer is no longer kept, or not for whoever asks.
    pub(super) fn answered_before(&self, record: &Record) -> Answer {
        let detail = "this payment was used and its response is no longer available";
        Answer::problem(StatusCode::CONFLICT, "payment_already_used", detail, record.settlement.paid_by())
            .with_receipt(self.receipt(record))
    }

    /// The work failed as often as it may.
    pub(super) fn exhausted(&self, record: &Record) -> Answer {
        let transaction = record.settlement.paid_by();
        let detail = match transaction {
            Some(_) => "paid, but the work failed every time it was tried; contact the seller",
            None => "the work failed every time it was tried; nothing was charged",
        };
        Answer::problem(StatusCode::CONFLICT, "attempts_exhausted", detail, transaction)
            .with_receipt(self.receipt(record))
    }

    /// Not known whether the payment moved.
    pub(super) fn pending(&self, record: &Record, transaction: Option<B256>) -> Answer {
        let transaction = transaction.or_else(|| record.transactions.last().copied());
        let detail = "the payment's outcome is not known yet; repeat the same request with the same payment";
        let settlement = settlement_of(record, &self.payer, Err((Reason::SettlementPending, transaction)));
        Answer::problem(StatusCode::SERVICE_UNAVAILABLE, Reason::SettlementPending.as_str(), detail, transaction)
            .with_settlement(&settlement, self.version)
            .retry_after(RETRY_SOON)
            .counted(RequestOutcome::Pending)
    }
}

/// The same payment for something else.
pub(super) fn other_request() -> Answer {
    let detail = "this payment was presented with another request; it pays for that one only";
    Answer::problem(StatusCode::CONFLICT, "payment_already_used", detail, None)
}

/// A payment and an id of which one is bound to something else.
pub(super) fn other_id() -> Answer {
    let detail = "a payment identifier stands for one payment; this one, or this payment, was presented before with another. \
                  Nothing was charged by this request";
    Answer::problem(StatusCode::CONFLICT, "payment_identifier_conflict", detail, None)
}

/// The work is done, but its response is gone before it was paid for: charging for it now would charge for nothing.
pub(super) fn not_kept() -> Answer {
    let detail = "the response to this payment is no longer available, so the payment is not settled; make another one";
    Answer::problem(StatusCode::CONFLICT, "response_not_kept", detail, None)
}

/// The request has no price.
pub(super) fn unpriced(error: &PriceError) -> Answer {
    let is_error = error.status.is_client_error() || error.status.is_server_error();
    let status = if is_error { error.status } else { StatusCode::INTERNAL_SERVER_ERROR };
    Answer::problem(status, "not_priced", &error.message, None)
}

/// Another worker has it.
pub(super) fn in_progress() -> Answer {
    let detail = "a request with this payment is still being worked on; repeat it";
    Answer::problem(StatusCode::CONFLICT, "payment_in_progress", detail, None).retry_after(RETRY_SOON)
}

pub(super) fn unavailable(error: &FacilitatorError) -> Answer {
    tracing::warn!(%error, "payments cannot be verified or settled");
    let detail = "payments cannot be verified or settled now; nothing was charged by this request";
    Answer::problem(StatusCode::SERVICE_UNAVAILABLE, "facilitator_unavailable", detail, None)
        .retry_after(error.retry_after())
}

pub(super) fn overloaded() -> Answer {
    let detail = "too many payments are being worked on; nothing was charged";
    Answer::problem(StatusCode::SERVICE_UNAVAILABLE, "busy", detail, None).retry_after(RETRY_SOON)
}

pub(super) fn ledger_failed(error: &LedgerError) -> Answer {
    match error {
        LedgerError::LeaseLost | LedgerError::InvalidTransition(_) => in_progress(),
        LedgerError::IdTaken { .. } => other_id(),
        LedgerError::Full => overloaded(),
        error => {
            tracing::error!(error = error as &dyn std::error::Error, "the ledger failed");
            let detail = "the payment could not be recorded; nothing was charged by this request";
            Answer::problem(StatusCode::SERVICE_UNAVAILABLE, "ledger_unavailable", detail, None)
                .retry_after(RETRY_LEDGER)
        }
    }
}

pub(super) fn unread(error: &ReadError) -> Answer {
    let (status, code, detail) = match error {
        ReadError::TooLarge => {
            (StatusCode::PAYLOAD_TOO_LARGE, "body_too_large", "the request body is larger than a paid request may be")
        }
        ReadError::TooSlow => (StatusCode::REQUEST_TIMEOUT, "body_too_slow", "the request body did not arrive in time"),
        ReadError::Broken => (StatusCode::BAD_REQUEST, "body_broken", "the request body broke off"),
    };
    Answer::problem(status, code, detail, None)
}
