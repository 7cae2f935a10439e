//! A payment that is under way, by any scheme.

use std::{fmt, sync::Arc};

use alloy_primitives::B256;
use async_trait::async_trait;
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};

use super::{
    PaymentError, Receipt,
    answer::{AnswerHead, NextStep},
};
use crate::{
    clock::Clock,
    protocol::{MAX_PAYMENT_HEADER, PaymentId, PaymentPayload, Version, decode_header},
};

/// The rule by which a scheme pays. A scheme signs in its own way; from there on, a payment is this.
#[async_trait]
pub(super) trait SchemePayment: fmt::Debug + Send + Sync {
    /// Returns the version of x402 that it is made in: v2 for all schemes but `exact`.
    fn version(&self) -> Version {
        Version::V2
    }

    /// Returns the value of the payment header.
    fn header(&self) -> &HeaderValue;

    /// Returns when what was signed expires, in seconds since the Unix epoch.
    fn valid_before(&self) -> u64;

    /// Returns the nonce of the authorization, or the voucher's digest.
    fn nonce(&self) -> B256;

    /// Notes that it may have been sent.
    fn set_sent(&mut self);

    /// Interprets an answer.
    fn answered(&mut self, answer: &AnswerHead<'_>) -> NextStep;

    /// Notes that no answer came.
    fn unanswered(&mut self) -> NextStep;

    /// Signs again, after [`NextStep::SignAgain`].
    async fn sign_again(&mut self) -> Result<(), PaymentError> {
        Ok(())
    }

    /// Records the outcome in budget and journal, and returns the receipt.
    async fn finish(&mut self) -> Receipt;

    /// Gives back what others may use until it is presented again.
    fn pause(&mut self) {}

    /// Makes it ready to be presented again. Returns `false` if it cannot be.
    fn resume(&mut self, was_sent: bool) -> bool;

    /// Returns `true` if the journal has the payment itself: it can be presented by another process, and closed if it was never sent.
    fn is_in_journal(&self) -> bool;

    /// Returns `true` if the work failed and nothing was charged, so that the request is bought anew.
    fn is_unused(&self) -> bool {
        false
    }
}

/// A signed payment that is under way.
///
/// 1. Send [`header`](Self::header) under [`header_name`](Self::header_name) with the request that was answered 402.
/// 2. Report the response with [`answered`](Self::answered), or its absence with [`unanswered`](Self::unanswered).
/// 3. If that returns [`NextStep::Retry`], send the same payment again. It can move money only once.
/// 4. Call [`conclude`](Self::conclude), which records the outcome and returns the receipt.
///
/// If it is dropped before that, for example because the task was cancelled, its amount stays reserved.
#[derive(Debug)]
#[must_use = "the amount stays reserved until the payment is concluded"]
pub struct SignedPayment {
    payment: Box<dyn SchemePayment>,
    clock: Arc<dyn Clock>,
    /// The request may be repeated by its method.
    is_idempotent: bool,
    /// It may have been sent.
    was_sent: bool,
}

impl SignedPayment {
    /// `was_sent` says that an earlier request may have been sent with it.
    pub(super) fn new(payment: Box<dyn SchemePayment>, clock: Arc<dyn Clock>, method: &str, was_sent: bool) -> Self {
        // HTTP lets a client repeat these.
        let is_idempotent = matches!(method, "GET" | "HEAD" | "OPTIONS" | "TRACE" | "PUT" | "DELETE");
        Self { payment, clock, is_idempotent, was_sent }
    }

    /// Returns the version of x402 that it is made in, which is that of the 402.
    pub fn version(&self) -> Version {
        self.payment.version()
    }

    /// Returns the name of the payment header: `PAYMENT-SIGNATURE`, or `X-PAYMENT` in v1.
    pub fn header_name(&self) -> HeaderName {
        HeaderName::from_static(self.version().payment_header())
    }

    /// Returns the value of the payment header, marked as sensitive.
    pub fn header(&self) -> &HeaderValue {
        self.payment.header()
    }

    /// Returns when the authorization expires, in seconds since the Unix epoch. A voucher never does; a deposit that is sent along does.
    pub fn valid_before(&self) -> u64 {
        self.payment.valid_before()
    }

    /// Interprets the status and headers of an answer.
    ///
    /// `body` is that of another 402, if it was read. Servers of v1 give their reason there.
    pub fn answered(&mut self, status: StatusCode, headers: &HeaderMap, body: Option<&[u8]>) -> NextStep {
        let may_be_repeated = || self.is_idempotent || self.has_payment_id();
        let answer = AnswerHead::new(status, headers, body, self.clock.now(), may_be_repeated);
        self.payment.answered(&answer)
    }

    /// Notes that no answer came: the request timed out, or the connection failed.
    pub fn unanswered(&mut self) -> NextStep {
        self.payment.unanswered()
    }

    /// Signs a voucher that agrees with the seller's books, after [`NextStep::SignAgain`]. [`header`](Self::header) is another one then.
    ///
    /// # Errors
    /// See [`PaymentError`]. The seller charged nothing.
    pub async fn sign_again(&mut self) -> Result<(), PaymentError> {
        self.payment.sign_again().await
    }

    /// Records the outcome in budget and journal, and returns the receipt.
    pub async fn conclude(mut self) -> Receipt {
        self.finish().await
    }

    /// Does the same, for a payment that may be presented again.
    pub(super) async fn finish(&mut self) -> Receipt {
        self.payment.finish().await
    }

    pub(super) fn pause(&mut self) {
        self.payment.pause();
    }

    pub(super) fn resume(&mut self) -> bool {
        self.payment.resume(self.was_sent)
    }

    pub(super) fn nonce(&self) -> B256 {
        self.payment.nonce()
    }

    pub(super) fn is_in_journal(&self) -> bool {
        self.payment.is_in_journal()
    }

    pub(super) fn is_unused(&self) -> bool {
        self.payment.is_unused()
    }

    pub(super) const fn was_sent(&self) -> bool {
        self.was_sent
    }

    /// Notes that it may have been sent.
    pub(super) fn set_sent(&mut self) {
        self.was_sent = true;
        self.payment.set_sent();
    }

    /// Returns `true` if its server knows it by an id, and so does not work for it twice.
    fn has_payment_id(&self) -> bool {
        let payment = decode_header::<PaymentPayload>(self.header().as_bytes(), MAX_PAYMENT_HEADER).ok();
        let extensions = payment.and_then(|payment| payment.extensions?.read().ok());
        extensions.is_some_and(|extensions| matches!(PaymentId::of(&extensions), Ok(Some(_))))
    }
}
