//! The refusal of a payment: what happened, and what its payer can do.

use std::{borrow::Cow, time::Duration};

use alloy_primitives::B256;

use crate::{
    facilitator::{FacilitatorError, VerifyError},
    ledger::{LedgerError, channels::ChannelRecord},
    payment::Rejection,
    protocol::{Reason, SettlementResponse, TransferMethod},
    telemetry::RequestOutcome,
};

/// When a payer should come back to see what became of its payment.
const SOON: Duration = Duration::from_secs(1);
/// When it should come back to a ledger that failed.
const LEDGER: Duration = Duration::from_secs(5);
/// When it should come back to a channel of which something has to be claimed first.
const CLAIM: Duration = Duration::from_secs(30);

/// The refusal of a payment. It says what happened, and so what the payer can do; a transport turns it into its own answer.
///
/// If it has [`retry_after`](Self::retry_after), the same request with the same payment may be repeated, and the payer should make no other
/// payment before. Otherwise another payment may be made, unless the [`receipt`](Self::receipt) says that this one was settled.
// Boxed, because it is the error of most functions here and rarely made.
#[derive(Debug, thiserror::Error)]
#[error("{}: {}", self.code(), self.detail())]
pub struct Refusal(Box<Refused>);

#[derive(Debug)]
struct Refused {
    why: Why,
    transaction: Option<B256>,
    receipt: Option<SettlementResponse>,
}

/// What kind of [`Refusal`] it is. Over HTTP each kind has a status, which some of its codes change; the table is in
/// [`server`](crate::server).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum RefusalKind {
    /// The request or the payment's message cannot be read, and must be corrected (400).
    Malformed,
    /// The payment was not taken. The payer is shown the offers again (402).
    Rejected,
    /// The payment, its identifier or its response belongs to another request, or another worker has it (409).
    Conflict,
    /// It is not known whether the payment was settled (503).
    Pending,
    /// Nothing can be done now (503).
    Unavailable,
    /// The work was begun and came to nothing (500).
    Failed,
}

/// What happened.
#[derive(Debug)]
pub(crate) enum Why {
    /// The message is not one of the protocol. It must be mended.
    Malformed(Rejection),
    /// The payment was not taken, and is not charged. Another one may be.
    Rejected(Rejection),
    /// The voucher is for another amount than it must be. Another one may be signed for what the channel's record says. The number is that
    /// of the accepted channel offer.
    Misstated(Rejection, usize, Box<ChannelRecord>),
    /// It is not known whether the payment was settled. The same request with the same payment finds out.
    Pending,
    /// A deposit or refund is under way. The same request with the same payment finds out.
    Moving,
    /// Another request with this payment is being worked on. The same request may be repeated.
    InProgress,
    /// The payment was presented with another request, and pays for that one only.
    OtherRequest,
    /// The payment or its identifier was presented with another one.
    OtherId,
    /// The payment was used, and its response is gone or not to be given again.
    Used,
    /// The work is done, and its response is gone before it was paid for. Nothing is charged, and another payment may be made.
    NotKept,
    /// The response depends on the request's headers with these names, and was made for other values.
    OtherHeaders(String),
    /// The work failed as often as it may be tried.
    Exhausted,
    /// Too much is being worked on. The same request may be repeated.
    Busy,
    /// Too much of the channel is unclaimed. The same request may be repeated.
    Unclaimed,
    /// The facilitator could not be asked. The same request may be repeated.
    Unavailable(Duration),
    /// The ledger failed. The same request may be repeated.
    Unrecorded,
    /// The request could not be read.
    Unread(Unread),
    /// The work was begun and came to nothing.
    Unfinished(Unfinished),
}

/// Why a request could not be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unread {
    TooLarge,
    TooSlow,
    Broken,
}

/// Why work came to nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unfinished {
    /// It took longer than the deadline.
    TooSlow,
    /// Its response broke off.
    BrokeOff,
    /// The request broke off while it was read.
    RequestBrokeOff,
    /// It panicked.
    Panicked,
    /// It asked for another price than it may.
    Mispriced,
    /// Its response is longer than what is kept.
    TooLong,
}

impl Refusal {
    pub(crate) fn new(why: Why) -> Self {
        Self(Box::new(Refused { why, transaction: None, receipt: None }))
    }

    /// Payments cannot be taken or settled now. The same request may be repeated after this time.
    pub fn unavailable(retry_after: Duration) -> Self {
        Why::Unavailable(retry_after).into()
    }

    /// The message is not one of the protocol.
    pub(crate) fn malformed(reason: impl Into<Reason>, detail: impl Into<String>) -> Self {
        Why::Malformed(Rejection::new(reason.into(), detail)).into()
    }

    /// The payment was not taken.
    pub(crate) fn rejected(reason: impl Into<Reason>, detail: impl Into<String>) -> Self {
        Rejection::new(reason.into(), detail).into()
    }

    /// The payer's balance does not cover the payment.
    pub(crate) fn not_covered() -> Self {
        let detail = "the payer's balance does not cover this payment and what else it has in flight";
        Self::rejected(Reason::InsufficientFunds, detail)
    }

    /// Names the transaction that paid, or may have.
    pub(crate) fn with_transaction(mut self, transaction: Option<B256>) -> Self {
        self.0.transaction = transaction;
        self
    }

    /// Adds what the payer is told of its payment, if there is something.
    pub(crate) fn with_receipt(mut self, receipt: Option<SettlementResponse>) -> Self {
        if receipt.is_some() {
            self.0.receipt = receipt;
        }
        self
    }

    /// Names the reasons as they are named where tokens are moved like this.
    pub(crate) fn under(mut self, method: TransferMethod) -> Self {
        if let Why::Malformed(rejection) | Why::Rejected(rejection) = &mut self.0.why {
            rejection.reason = method.reason(&rejection.reason);
        }
        if let Some(receipt) = &mut self.0.receipt {
            receipt.error_reason = receipt.error_reason.as_ref().map(|reason| method.reason(reason));
        }
        self
    }

    /// Returns `true` if the payment's nonce was found to be used.
    pub(crate) fn says_used(&self) -> bool {
        matches!(&self.0.why, Why::Rejected(rejection) if rejection.reason == Reason::NonceAlreadyUsed)
    }

    /// Returns the channel that a payer is told of, whose voucher was misstated.
    pub(crate) fn channel_mut(&mut self) -> Option<&mut ChannelRecord> {
        match &mut self.0.why {
            Why::Misstated(_, _, record) => Some(record),
            _ => None,
        }
    }

    pub(crate) fn why(&self) -> &Why {
        &self.0.why
    }

    /// Returns the transaction that paid, or may have.
    pub fn transaction(&self) -> Option<B256> {
        self.0.transaction
    }

    /// Returns what the payer is told of its payment, if there is something to tell.
    pub fn receipt(&self) -> Option<&SettlementResponse> {
        self.0.receipt.as_ref()
    }

    pub(crate) fn take_receipt(&mut self) -> Option<SettlementResponse> {
        self.0.receipt.take()
    }

    /// Returns what kind of refusal it is, by which a transport chooses how it answers.
    pub fn kind(&self) -> RefusalKind {
        match &self.0.why {
            Why::Malformed(_) | Why::Unread(_) | Why::Unfinished(Unfinished::RequestBrokeOff) => RefusalKind::Malformed,
            Why::Rejected(_) | Why::Misstated(..) => RefusalKind::Rejected,
            Why::Pending => RefusalKind::Pending,
            Why::InProgress
            | Why::OtherRequest
            | Why::OtherId
            | Why::Used
            | Why::NotKept
            | Why::OtherHeaders(_)
            | Why::Exhausted => RefusalKind::Conflict,
            Why::Moving | Why::Busy | Why::Unclaimed | Why::Unavailable(_) | Why::Unrecorded => {
                RefusalKind::Unavailable
            }
            Why::Unfinished(_) => RefusalKind::Failed,
        }
    }

    /// Returns how a request that is refused so is counted.
    pub(crate) fn ended(&self) -> RequestOutcome {
        match self.kind() {
            RefusalKind::Malformed => RequestOutcome::Malformed,
            RefusalKind::Rejected => RequestOutcome::Rejected,
            RefusalKind::Conflict => RequestOutcome::Conflict,
            RefusalKind::Pending => RequestOutcome::Pending,
            RefusalKind::Unavailable => RequestOutcome::Unavailable,
            RefusalKind::Failed => RequestOutcome::Failed,
        }
    }

    /// Returns when to repeat the request with the same payment, if that may help.
    pub fn retry_after(&self) -> Option<Duration> {
        match self.0.why {
            Why::Pending | Why::Moving | Why::InProgress | Why::Busy => Some(SOON),
            Why::Unclaimed => Some(CLAIM),
            Why::Unavailable(delay) => Some(delay),
            Why::Unrecorded => Some(LEDGER),
            _ => None,
        }
    }

    /// Returns the code for programs: a reason of the protocol, such as `insufficient_funds`, or one of the table of statuses in
    /// [`server`](crate::server).
    pub fn code(&self) -> &str {
        match &self.0.why {
            Why::Malformed(rejection) | Why::Rejected(rejection) | Why::Misstated(rejection, ..) => {
                rejection.reason.as_str()
            }
            Why::Pending | Why::Moving => Reason::SettlementPending.as_str(),
            Why::InProgress => "payment_in_progress",
            Why::OtherRequest | Why::Used => "payment_already_used",
            Why::OtherId => "payment_identifier_conflict",
            Why::NotKept => "response_not_kept",
            Why::OtherHeaders(_) => "response_varies",
            Why::Exhausted => "attempts_exhausted",
            Why::Busy => "busy",
            Why::Unclaimed => "claim_pending",
            Why::Unavailable(_) => "facilitator_unavailable",
            Why::Unrecorded => "ledger_unavailable",
            Why::Unread(Unread::TooLarge) => "body_too_large",
            Why::Unread(Unread::TooSlow) => "body_too_slow",
            Why::Unread(Unread::Broken) | Why::Unfinished(Unfinished::RequestBrokeOff) => "body_broken",
            Why::Unfinished(Unfinished::TooSlow) => "deadline_exceeded",
            Why::Unfinished(_) => "internal_error",
        }
    }

    /// Returns the sentence for people.
    pub fn detail(&self) -> Cow<'_, str> {
        let is_paid = self.0.transaction.is_some();
        Cow::Borrowed(match &self.0.why {
            Why::Malformed(rejection) | Why::Rejected(rejection) | Why::Misstated(rejection, ..) => &rejection.detail,
            Why::Pending => "the payment's outcome is not known yet; repeat the same request with the same payment",
            Why::Moving => {
                "the transaction is under way and in no block yet; repeat the same request with the same payment"
            }
            Why::InProgress => "a request with this payment is still being worked on; repeat it",
            Why::OtherRequest => "this payment was presented with another request; it pays for that one only",
            Why::OtherId => {
                "a payment identifier stands for one request; this one, or this payment, was presented before with another. \
                 Nothing was charged by this request"
            }
            Why::Used => "this payment was used and its response is no longer available",
            Why::NotKept => {
                "the response to this payment is no longer available, so the payment is not settled; make another one"
            }
            Why::OtherHeaders(names) => {
                return Cow::Owned(format!(
                    "the response to this payment depends on headers of the request ({names}): repeat it with the values of the request \
                     that was answered. Nothing was charged by this request"
                ));
            }
            Why::Exhausted if is_paid => "paid, but the work failed every time it was tried; contact the seller",
            Why::Exhausted => "the work failed every time it was tried; nothing was charged",
            Why::Busy => "too many payments are being worked on; nothing was charged by this request",
            Why::Unclaimed => {
                "what was charged on this channel has to be claimed before more is sold on it; nothing was charged for this request; \
                 repeat it later"
            }
            Why::Unavailable(_) => "payments cannot be verified or settled now; nothing was charged by this request",
            Why::Unrecorded if is_paid => return paid_all_the_same("the work could not be recorded"),
            Why::Unrecorded => "the payment could not be recorded; nothing was charged by this request",
            Why::Unread(Unread::TooLarge) => "the request body is larger than a paid request may be",
            Why::Unread(Unread::TooSlow) => "the request body did not arrive in time",
            Why::Unread(Unread::Broken) => "the request body broke off",
            Why::Unfinished(Unfinished::Panicked) if !is_paid => {
                "the work failed; however often the same payment is presented, it is charged once at most"
            }
            Why::Unfinished(why) if is_paid => return paid_all_the_same(why.what()),
            Why::Unfinished(why) => return Cow::Owned(format!("{}; nothing was charged for it", why.what())),
        })
    }
}

/// To pay anew would be to pay twice.
fn paid_all_the_same(what: &str) -> Cow<'static, str> {
    Cow::Owned(format!("{what}; it is paid for, and presenting the same payment again charges nothing more"))
}

impl Unfinished {
    fn what(self) -> &'static str {
        match self {
            Self::TooSlow => "the work took longer than the deadline",
            Self::BrokeOff => "the work's response broke off",
            Self::RequestBrokeOff => "the request body broke off",
            Self::Panicked => "the work failed",
            Self::Mispriced => "the work was not priced as it may be",
            Self::TooLong => "the work's response is too long to be kept",
        }
    }
}

impl From<Why> for Refusal {
    fn from(why: Why) -> Self {
        Self::new(why)
    }
}

impl From<Rejection> for Refusal {
    fn from(rejection: Rejection) -> Self {
        Why::Rejected(rejection).into()
    }
}

impl From<Unread> for Refusal {
    fn from(why: Unread) -> Self {
        Why::Unread(why).into()
    }
}

impl From<Unfinished> for Refusal {
    fn from(why: Unfinished) -> Self {
        Why::Unfinished(why).into()
    }
}

impl From<VerifyError> for Refusal {
    fn from(error: VerifyError) -> Self {
        match error {
            VerifyError::Invalid(rejection) => rejection.into(),
            VerifyError::Unavailable(error) => error.into(),
        }
    }
}

impl From<&FacilitatorError> for Refusal {
    fn from(error: &FacilitatorError) -> Self {
        tracing::warn!(%error, "payments cannot be verified or settled");
        Why::Unavailable(error.retry_after()).into()
    }
}

impl From<FacilitatorError> for Refusal {
    fn from(error: FacilitatorError) -> Self {
        (&error).into()
    }
}

impl From<LedgerError> for Refusal {
    fn from(error: LedgerError) -> Self {
        match &error {
            LedgerError::LeaseLost | LedgerError::InvalidTransition(_) => Why::InProgress.into(),
            LedgerError::IdTaken { .. } => Why::OtherId.into(),
            LedgerError::Full => Why::Busy.into(),
            error => {
                tracing::error!(error = error as &dyn std::error::Error, "the ledger failed");
                Why::Unrecorded.into()
            }
        }
    }
}
