//! One payment, from its signature to its receipt.

use std::{
    fmt,
    sync::Arc,
    time::{Duration, UNIX_EPOCH},
};

use alloy_primitives::{Address, B256, U256};
use http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, header};
use serde::{Deserialize, Serialize};

use super::{
    Budget, ChannelReceipt, JournalEntry, PaymentError, PermitPolicy,
    budget::Unsent,
    channels::VoucherPayment,
    journal::Record,
    offer::Challenge,
    payment_response::{MAX_REASON, SettlementReport, shortened},
};
use crate::{
    clock::Clock,
    decimal::parse_decimal,
    network::Network,
    payment::PaymentKey,
    protocol::{DecodeError, MAX_PAYMENT_HEADER, PaymentId, PaymentPayload, Reason, Version, decode_header},
    upto::{PERMIT2, Permit},
    usdc::Usdc,
};

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
    kind: Kind,
    clock: Arc<dyn Clock>,
    /// The request may be repeated by its method.
    is_idempotent: bool,
    /// It may have been sent.
    was_sent: bool,
}

#[derive(Debug)]
enum Kind {
    Exact(Box<ExactPayment>),
    Voucher(Box<VoucherPayment>),
}

/// A payment by an authorization of its own.
#[derive(Debug)]
struct ExactPayment {
    header: HeaderValue,
    entry: JournalEntry,
    budget: Budget,
    /// `None` if it was sent by an earlier request.
    unsent: Option<Unsent>,
    /// An earlier attempt may have settled it without a clear answer.
    in_doubt: bool,
    receipt: Receipt,
    /// What the seller says it charged of a permit, if it may be believed.
    charged: Option<Usdc>,
    /// Shows what was charged of a permit.
    permits: PermitPolicy,
}

/// The next step after an answer, or without one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum NextStep {
    /// Conclude the payment: the answer is final.
    Conclude,
    /// Send the same payment again, after the pause that the server asked for.
    Retry {
        /// The server's `Retry-After`, if it sent one.
        after: Option<Duration>,
    },
    /// Call [`SignedPayment::sign_again`], and send the request with the new header; or conclude. The seller refused the voucher, and says
    /// that it charged nothing for it. This is asked for at most four times for each payment, and only while all vouchers together allow the
    /// seller no more than the limit per payment.
    SignAgain,
}

impl SignedPayment {
    pub(super) fn new(
        header: HeaderValue,
        entry: JournalEntry,
        (budget, unsent): (&Budget, Unsent),
        permits: &PermitPolicy,
        clock: Arc<dyn Clock>,
    ) -> Self {
        let is_idempotent = is_idempotent(&entry.method);
        let payment = ExactPayment::new(header, entry, (budget, Some(unsent)), permits);
        Self { kind: Kind::Exact(Box::new(payment)), clock, is_idempotent, was_sent: false }
    }

    /// Makes a payment of one that was sent before.
    pub(super) fn again(
        header: HeaderValue,
        entry: JournalEntry,
        budget: &Budget,
        permits: &PermitPolicy,
        (is_paid, clock): (bool, Arc<dyn Clock>),
    ) -> Self {
        let is_idempotent = is_idempotent(&entry.method);
        let mut payment = ExactPayment::new(header, entry, (budget, None), permits);
        payment.in_doubt = true;
        if is_paid {
            payment.receipt.outcome = PaymentOutcome::Accepted;
            payment.set_charged(payment.entry.charged);
        }
        Self { kind: Kind::Exact(Box::new(payment)), clock, is_idempotent, was_sent: true }
    }

    pub(super) fn by_voucher(payment: VoucherPayment, clock: Arc<dyn Clock>, method: &Method) -> Self {
        let is_idempotent = is_idempotent(method.as_str());
        Self { kind: Kind::Voucher(Box::new(payment)), clock, is_idempotent, was_sent: false }
    }

    /// Returns the version of x402 that it is made in, which is that of the 402.
    pub const fn version(&self) -> Version {
        match &self.kind {
            Kind::Exact(payment) => payment.entry.version,
            Kind::Voucher(_) => Version::V2,
        }
    }

    /// Returns the name of the payment header: `PAYMENT-SIGNATURE`, or `X-PAYMENT` in v1.
    pub const fn header_name(&self) -> HeaderName {
        HeaderName::from_static(self.version().payment_header())
    }

    /// Returns the value of the payment header, marked as sensitive.
    pub const fn header(&self) -> &HeaderValue {
        match &self.kind {
            Kind::Exact(payment) => &payment.header,
            Kind::Voucher(payment) => payment.header(),
        }
    }

    /// Returns when the authorization expires, in seconds since the Unix epoch. A voucher never does; a deposit that is sent along does.
    pub fn valid_before(&self) -> u64 {
        match &self.kind {
            Kind::Exact(payment) => payment.entry.valid_before,
            Kind::Voucher(payment) => payment.valid_before(),
        }
    }

    /// Interprets the status and headers of an answer.
    ///
    /// `body` is that of another 402, if it was read. Servers of v1 give their reason there.
    pub fn answered(&mut self, status: StatusCode, headers: &HeaderMap, body: Option<&[u8]>) -> NextStep {
        let retry_after = retry_after(headers, self.clock.now());
        let is_transient = match status.as_u16() {
            // Of a gateway, or of a server that could not begin.
            502..=504 => true,
            // The work began and failed. Elsewhere than at a server that knows the payment again, it would begin anew.
            500.. => retry_after.is_some() || self.is_idempotent || self.has_payment_id(),
            408 | 409 | 425 | 429 => retry_after.is_some(),
            _ => false,
        };
        match &mut self.kind {
            Kind::Exact(payment) => payment.answered(status, headers, body, (is_transient, retry_after)),
            Kind::Voucher(payment) => payment.answered(status, headers, is_transient, retry_after),
        }
    }

    /// Notes that no answer came: the request timed out, or the connection failed.
    pub fn unanswered(&mut self) -> NextStep {
        match &mut self.kind {
            Kind::Exact(payment) => payment.unanswered(),
            Kind::Voucher(payment) => payment.unanswered(),
        }
    }

    /// Signs a voucher that agrees with the seller's books, after [`NextStep::SignAgain`]. [`header`](Self::header) is another one then.
    ///
    /// # Errors
    /// See [`PaymentError`]. The seller charged nothing.
    pub async fn sign_again(&mut self) -> Result<(), PaymentError> {
        match &mut self.kind {
            Kind::Exact(_) => Ok(()),
            Kind::Voucher(payment) => Box::pin(payment.sign_again()).await,
        }
    }

    /// Records the outcome in budget and journal, and returns the receipt.
    pub async fn conclude(mut self) -> Receipt {
        self.finish().await
    }

    /// Does the same, for a payment that may be presented again.
    pub(super) async fn finish(&mut self) -> Receipt {
        match &mut self.kind {
            Kind::Exact(payment) => payment.finish().await,
            Kind::Voucher(payment) => Box::pin(payment.finish()).await,
        }
    }

    /// Gives back what others may use until it is presented again.
    pub(super) fn pause(&mut self) {
        if let Kind::Voucher(payment) = &mut self.kind {
            payment.pause();
        }
    }

    /// Makes it ready to be presented again. Returns `false` if it cannot be.
    pub(super) fn resume(&mut self) -> bool {
        match &mut self.kind {
            Kind::Exact(payment) => {
                // Its caller may have gone away before there was an answer.
                payment.in_doubt |= self.was_sent;
                true
            }
            Kind::Voucher(payment) => payment.resume(self.was_sent),
        }
    }

    pub(super) const fn nonce(&self) -> B256 {
        match &self.kind {
            Kind::Exact(payment) => payment.entry.nonce,
            Kind::Voucher(payment) => payment.nonce(),
        }
    }

    pub(super) const fn is_by_voucher(&self) -> bool {
        matches!(self.kind, Kind::Voucher(_))
    }

    pub(super) const fn was_sent(&self) -> bool {
        self.was_sent
    }

    /// Notes that it may have been sent, or that it certainly was not.
    pub(super) fn set_sent(&mut self, sent: bool) {
        self.was_sent = sent;
        if let Kind::Exact(payment) = &mut self.kind
            && let Some(unsent) = &mut payment.unsent
        {
            unsent.set_sent(sent);
        }
    }

    /// Returns `true` if its server knows it by an id, and so does not work for it twice.
    fn has_payment_id(&self) -> bool {
        let payment = decode_header::<PaymentPayload>(self.header().as_bytes(), MAX_PAYMENT_HEADER).ok();
        let extensions = payment.and_then(|payment| payment.extensions?.read().ok());
        extensions.is_some_and(|extensions| matches!(PaymentId::of(&extensions), Ok(Some(_))))
    }
}

/// Returns `true` for methods that HTTP lets a client repeat.
fn is_idempotent(method: &str) -> bool {
    matches!(method, "GET" | "HEAD" | "OPTIONS" | "TRACE" | "PUT" | "DELETE")
}

impl ExactPayment {
    fn new(
        header: HeaderValue,
        entry: JournalEntry,
        (budget, unsent): (&Budget, Option<Unsent>),
        permits: &PermitPolicy,
    ) -> Self {
        let receipt = Receipt {
            outcome: PaymentOutcome::Unknown,
            transaction: None,
            network: entry.network,
            asset: entry.asset,
            amount: entry.amount,
            payer: entry.payer,
            pay_to: entry.pay_to,
            nonce: entry.nonce,
            reason: None,
            channel: None,
        };
        let (budget, permits) = (budget.clone(), permits.clone());
        Self { header, entry, budget, unsent, in_doubt: false, receipt, charged: None, permits }
    }

    fn answered(
        &mut self,
        status: StatusCode,
        headers: &HeaderMap,
        body: Option<&[u8]>,
        (is_transient, retry_after): (bool, Option<Duration>),
    ) -> NextStep {
        let report = report_on(&self.entry, headers);
        let is_transient =
            is_transient || matches!(&report, SettlementReport::Failed { reason: Reason::SettlementPending, .. });
        let rejection = match status {
            StatusCode::PAYMENT_REQUIRED | StatusCode::PRECONDITION_FAILED => Rejection::read(headers, body),
            _ => Rejection::default(),
        };
        self.update(report, status, rejection);
        if is_transient { NextStep::Retry { after: retry_after } } else { NextStep::Conclude }
    }

    fn unanswered(&mut self) -> NextStep {
        if !self.receipt.outcome.is_paid() {
            self.receipt.outcome = PaymentOutcome::Unknown;
        }
        self.in_doubt = true;
        NextStep::Retry { after: None }
    }

    async fn finish(&mut self) -> Receipt {
        let is_proven = self.look_at_charge().await;
        let record = self.record(is_proven);
        let Self { budget, receipt, .. } = self;
        // Its answer closes a payment only if it was made, and only if reconciliation did not close it before.
        if let Some(closed) = budget.journal().close(&record) {
            budget.spend(&closed);
        }
        if let Err(error) = budget.journal().write_outcome(record).await {
            tracing::warn!(%error, nonce = %receipt.nonce, "the outcome of a payment could not be written to the journal");
        }
        receipt.clone()
    }

    /// Returns `true` if a node shows that the transaction which the seller names used this permit. Then what it moved was charged.
    async fn look_at_charge(&mut self) -> bool {
        let (true, Some(transaction)) = (self.is_charged_less(), self.receipt.transaction) else { return false };
        let JournalEntry { network, asset, payer, pay_to, nonce, facilitator, .. } = self.entry;
        let Some(permit) = facilitator.map(|facilitator| Permit::new(asset, facilitator)) else { return false };
        let key = PaymentKey { network, asset: PERMIT2, payer, nonce };
        let shown = Box::pin(self.permits.charged_by(transaction, (&key, &permit, pay_to))).await;
        if shown.is_some() {
            self.set_charged(shown);
        }
        shown.is_some()
    }

    /// Returns the outcome for the journal. `is_proven` says that what was charged is known from the chain.
    fn record(&self, is_proven: bool) -> Record {
        let Receipt { nonce, outcome, transaction, .. } = self.receipt;
        let charged = self.charged;
        // Unless the permit is used up, all of it may be charged yet: like after a failure, only the chain releases the rest.
        let is_open = self.is_charged_less() && !is_proven;
        Record::Outcome { nonce, outcome: if is_open { PaymentOutcome::Failed } else { outcome }, transaction, charged }
    }

    /// Returns `true` if the seller says that it charged less than was signed for.
    fn is_charged_less(&self) -> bool {
        self.charged.is_some_and(|charged| charged < self.entry.amount)
    }

    fn set_charged(&mut self, charged: Option<Usdc>) {
        self.charged = charged;
        self.receipt.amount = charged.unwrap_or(self.entry.amount);
    }

    /// Returns what a seller says it charged of a permit. Unless it names the transaction, all may be charged yet.
    fn charged(&self, report: &SettlementReport) -> Option<Usdc> {
        let SettlementReport::Paid { response, transaction } = report else { return None };
        self.entry.facilitator?;
        let charged = Usdc::try_from(parse_decimal(response.amount.as_ref()?)?).ok()?;
        (transaction.is_some() || charged == Usdc::ZERO).then_some(charged)
    }

    fn update(&mut self, report: SettlementReport, status: StatusCode, rejection: Rejection) {
        use PaymentOutcome::{Accepted, Failed, Settled, Unknown};
        let charged = self.charged(&report);
        let (outcome, transaction, reason) = match report {
            SettlementReport::Paid { transaction, .. } => {
                (if transaction.is_some() { Settled } else { Accepted }, transaction, None)
            }
            SettlementReport::Failed { reason, transaction } => {
                (outcome_of(&reason), transaction, Some(reason.to_string()))
            }
            SettlementReport::Contradiction(what) => {
                tracing::warn!(nonce = %self.entry.nonce, what, "a payment response contradicts what was signed");
                (Unknown, None, Some(format!("the server's payment response {what}")))
            }
            SettlementReport::None if status == StatusCode::PAYMENT_REQUIRED || rejection.reason.is_some() => {
                match rejection {
                    Rejection { reason: Some(reason), .. } => (outcome_of(&reason), None, Some(reason.to_string())),
                    // Without a reason code, the server may have settled the payment.
                    Rejection { error: Some(error), .. } => {
                        (Unknown, None, Some(format!("the server asked again: {error}")))
                    }
                    Rejection { error: None, .. } => (Unknown, None, Some("the server asked again".into())),
                }
            }
            // In the flow `authorization` only a 2xx is charged. In the flow `upfront` the header is always there.
            SettlementReport::None if status.is_redirection() || is_rejection(status) => {
                (Failed, None, Some(format!("the server answered {status}")))
            }
            SettlementReport::None => (Unknown, None, Some(format!("the server answered {status} without a receipt"))),
        };
        // A later answer does not undo a settlement that an earlier one reported.
        match (self.receipt.outcome, outcome) {
            (Settled, Settled) | (Accepted, Settled | Accepted) => {}
            (Settled | Accepted, _) => return,
            _ => {}
        }
        // After an unclear attempt, a failure can be caused by that attempt's own success: a used nonce, a balance too low.
        self.receipt.outcome = if outcome == Failed && self.in_doubt { Unknown } else { outcome };
        self.receipt.transaction = transaction;
        self.receipt.reason = reason;
        self.set_charged(charged);
        self.in_doubt |= self.receipt.outcome == Unknown;
    }
}

/// Returns the header of a payment. The payment returns parts of the 402, so that a long 402 can make a payment that no server reads.
pub(super) fn header_of(payment: &str) -> Result<HeaderValue, PaymentError> {
    let (size, limit) = (payment.len(), MAX_PAYMENT_HEADER);
    if size > limit {
        return Err(PaymentError::encode(DecodeError::TooLarge { size, limit }));
    }
    let mut header = HeaderValue::from_str(payment).map_err(PaymentError::encode)?;
    header.set_sensitive(true);
    Ok(header)
}

/// Returns `true` if a status alone means that nothing was charged. 408 and 409 do not: the work may have been done.
pub(super) fn is_rejection(status: StatusCode) -> bool {
    status.is_client_error() && !matches!(status, StatusCode::REQUEST_TIMEOUT | StatusCode::CONFLICT)
}

/// A settled payment that is presented again can be refused with some of the reasons.
fn outcome_of(reason: &Reason) -> PaymentOutcome {
    match reason.of_exact() {
        Reason::SettlementPending | Reason::NonceAlreadyUsed | Reason::DuplicateSettlement => PaymentOutcome::Unknown,
        _ => PaymentOutcome::Failed,
    }
}

/// Returns the report on this payment.
fn report_on(signed: &JournalEntry, headers: &HeaderMap) -> SettlementReport {
    let report = SettlementReport::read(headers, signed.version, signed.network, signed.payer);
    let SettlementReport::Paid { response, .. } = &report else { return report };
    let most: U256 = signed.amount.into();
    let is_right = |amount: &String| match (parse_decimal(amount), signed.facilitator) {
        (Some(amount), None) => amount == most,
        (Some(amount), Some(_)) => amount <= most,
        (None, _) => false,
    };
    if response.amount.as_ref().is_none_or(is_right) {
        return report;
    }
    SettlementReport::Contradiction(match signed.facilitator {
        None => "names another amount",
        Some(_) => "names more than was signed for",
    })
}

/// Why a 402 answers a payment.
#[derive(Default)]
struct Rejection {
    /// The reason code, if the server gives one.
    reason: Option<Reason>,
    /// The error message.
    error: Option<String>,
}

impl Rejection {
    fn read(headers: &HeaderMap, body: Option<&[u8]>) -> Self {
        let Ok(Some(challenge)) = Challenge::read(headers, body) else { return Self::default() };
        Self {
            reason: challenge.reason().map(shortened),
            error: challenge.error().map(|error| error.chars().take(MAX_REASON).collect()),
        }
    }
}

fn retry_after(headers: &HeaderMap, now: u64) -> Option<Duration> {
    let text = headers.get(header::RETRY_AFTER)?.to_str().ok()?.trim();
    if let Ok(seconds) = text.parse() {
        return Some(Duration::from_secs(seconds));
    }
    let date = httpdate::parse_http_date(text).ok()?.duration_since(UNIX_EPOCH).ok()?;
    // A date in the past means now.
    Some(Duration::from_secs(date.as_secs().saturating_sub(now)))
}

/// The outcome of a payment, as far as the client can tell.
///
/// The client believes what a server reports about its own payment, but never counts an answer as a settlement that contradicts
/// what was signed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum PaymentOutcome {
    /// The server names the transaction that settled the payment. The amount is spent; of a permit, see [`Receipt::amount`].
    Settled,
    /// The server accepted the payment and will settle it later. The amount is spent.
    Accepted,
    /// The server reports that the payment failed. This is no proof: the server can use the signature until it expires, so the amount
    /// stays reserved until the chain proves more.
    Failed,
    /// The outcome is not known: the payment may have been settled, or may yet be. The amount stays reserved.
    Unknown,
    /// The client refused to pay. Nothing was signed.
    Refused,
}

impl PaymentOutcome {
    /// Returns the outcome as text, in lower case.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Settled => "settled",
            Self::Accepted => "accepted",
            Self::Failed => "failed",
            Self::Unknown => "unknown",
            Self::Refused => "refused",
        }
    }

    /// Returns `true` if the server counts the payment as made.
    pub const fn is_paid(self) -> bool {
        matches!(self, Self::Settled | Self::Accepted)
    }
}

impl fmt::Display for PaymentOutcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// The record of a payment: what was signed, and its outcome.
///
/// A paid response carries its receipt in its extensions, where [`ReceiptExt`] reads it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Receipt {
    /// The outcome.
    pub outcome: PaymentOutcome,
    /// The transaction that the server names.
    pub transaction: Option<B256>,
    /// The chain.
    pub network: Network,
    /// The token's address.
    pub asset: Address,
    /// The amount that was signed. Of a permit (scheme `upto`) it is what was charged: as the payer's node shows it
    /// ([`PermitPolicy::node`](super::PermitPolicy::node)), or else as the seller says. The budget believes only the chain that it was less
    /// than what was signed for.
    pub amount: Usdc,
    /// The payer's address.
    pub payer: Address,
    /// The payee's address.
    pub pay_to: Address,
    /// The authorization's nonce. With network, asset and payer it identifies the payment.
    pub nonce: B256,
    /// Why the payment is not settled: the server's reason code, or what is wrong with its answer.
    pub reason: Option<String>,
    /// The payment channel, if the payment was made by voucher. Then [`amount`](Self::amount) is what the seller charged, and
    /// [`nonce`](Self::nonce) the voucher's digest.
    pub channel: Option<ChannelReceipt>,
}

impl Receipt {
    /// Returns `true` if the payment was made by voucher, from a payment channel.
    pub const fn is_by_voucher(&self) -> bool {
        self.channel.is_some()
    }
}

/// Reads the receipt of a response.
pub trait ReceiptExt {
    /// Returns the receipt of the payment for this response. Returns `None` if nothing was paid.
    fn receipt(&self) -> Option<&Receipt>;
}

impl<B> ReceiptExt for http::Response<B> {
    fn receipt(&self) -> Option<&Receipt> {
        self.extensions().get()
    }
}

#[cfg(feature = "reqwest")]
impl ReceiptExt for ::reqwest::Response {
    fn receipt(&self) -> Option<&Receipt> {
        self.extensions().get()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn retry_after_is_read_in_seconds_and_as_a_date() {
        // Sun, 06 Nov 1994 08:49:37 GMT
        const NOW: u64 = 784_111_777;
        for (text, seconds) in [
            ("0", Some(0)),
            (" 120 ", Some(120)),
            ("Sun, 06 Nov 1994 08:49:47 GMT", Some(10)),
            ("Sunday, 06-Nov-94 08:50:37 GMT", Some(60)),
            ("Sun Nov  6 08:49:37 1994", Some(0)),
            ("Sun, 06 Nov 1994 08:00:00 GMT", Some(0)),
            ("-1", None),
            ("1.5", None),
            ("", None),
            ("tomorrow", None),
            ("Sun, 06 Nov 1994 25:49:47 GMT", None),
            ("99999999999999999999", None),
        ] {
            let mut headers = HeaderMap::new();
            headers.insert(header::RETRY_AFTER, text.parse().unwrap());
            assert_eq!(retry_after(&headers, NOW), seconds.map(Duration::from_secs), "{text:?}");
        }
        assert_eq!(retry_after(&HeaderMap::new(), NOW), None);
    }
}
