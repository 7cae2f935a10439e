//! One payment, from its signature to its receipt.

use std::{
    sync::Arc,
    time::{Duration, UNIX_EPOCH},
};

use alloy_primitives::{Address, B256};
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};

use super::{Journal, JournalEntry, Outcome, Receipt, budget::Reservation, demand::Demand, journal_record::Record};
use crate::{
    clock::Clock,
    decimal::parse_decimal,
    network::Network,
    protocol::{MAX_PAYMENT_HEADER, Reason, SettlementResponse, Version, decode_header, v1},
};

/// A signed payment under way: what to send, and what the answers so far mean.
///
/// Send [`header`](Self::header) under [`header_name`](Self::header_name) with the very request that was answered 402. Report each answer with
/// [`answered`](Self::answered), or its absence with [`unanswered`](Self::unanswered), present the same payment again while
/// that says [`Next::Again`], and then [`conclude`](Self::conclude). A payment that is dropped without that, because the
/// task was cancelled, keeps its amount reserved.
#[derive(Debug)]
pub struct Payment {
    header: HeaderValue,
    entry: JournalEntry,
    reservation: Reservation,
    journal: Journal,
    clock: Arc<dyn Clock>,
    /// The server may have executed it without having said so.
    in_doubt: bool,
    receipt: Receipt,
}

/// What to do after an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// The answer stands.
    Stop,
    /// The same payment may be presented again, after the time the server asked for.
    Again {
        /// The server's `Retry-After`, if it sent one, in seconds or as a date.
        after: Option<Duration>,
    },
}

impl Payment {
    pub(super) fn new(
        header: HeaderValue,
        entry: JournalEntry,
        reservation: Reservation,
        journal: Journal,
        clock: Arc<dyn Clock>,
    ) -> Self {
        let receipt = Receipt {
            outcome: Outcome::Unknown,
            transaction: None,
            network: entry.network,
            asset: entry.asset,
            amount: entry.amount,
            payer: entry.payer,
            pay_to: entry.pay_to,
            nonce: entry.nonce,
            reason: None,
        };
        Self { header, entry, reservation, journal, clock, in_doubt: false, receipt }
    }

    /// The version of the protocol it is made in: that of the 402.
    pub const fn version(&self) -> Version {
        self.entry.version
    }

    /// The name of the header to send: `PAYMENT-SIGNATURE`, or `X-PAYMENT` in v1.
    pub const fn header_name(&self) -> HeaderName {
        HeaderName::from_static(self.entry.version.payment_header())
    }

    /// The value of that header, marked as sensitive.
    pub const fn header(&self) -> &HeaderValue {
        &self.header
    }

    /// Unix time in seconds from which no block can execute the payment.
    pub const fn valid_before(&self) -> u64 {
        self.entry.valid_before
    }

    /// Judges the head of an answer. In v1, where another 402 says why in its body, that body is looked at too, if it is
    /// given.
    pub fn answered(&mut self, status: StatusCode, headers: &HeaderMap, body: Option<&[u8]>) -> Next {
        let claim = Claim::read(headers, &self.entry);
        let retry_after = retry_after(headers, self.clock.now());
        let transient = status.is_server_error()
            || (retry_after.is_some() && matches!(status.as_u16(), 408 | 409 | 425 | 429))
            || matches!(&claim, Claim::Failed { reason: Reason::SettlementPending, .. });
        let refusal =
            if status == StatusCode::PAYMENT_REQUIRED { Refused::read(headers, body) } else { Refused::default() };
        self.note(claim, status, refusal);
        if transient { Next::Again { after: retry_after } } else { Next::Stop }
    }

    /// Notes that no answer came: it timed out, or the connection failed.
    pub fn unanswered(&mut self) -> Next {
        if !self.receipt.outcome.is_paid() {
            self.receipt.outcome = Outcome::Unknown;
        }
        self.in_doubt = true;
        Next::Again { after: None }
    }

    /// Enters the outcome in the budget and the journal.
    pub async fn conclude(self) -> Receipt {
        let Self { reservation, journal, receipt, .. } = self;
        let record = Record::from(&receipt);
        // Only a payment that was made is closed by its answer, unless the chain told so before.
        if journal.close(&record).is_some() {
            reservation.spend();
        }
        if let Err(error) = journal.closed(record).await {
            tracing::warn!(%error, nonce = %receipt.nonce, "the outcome of a payment could not be recorded");
        }
        receipt
    }

    fn note(&mut self, claim: Claim, status: StatusCode, refusal: Refused) {
        let (outcome, transaction, reason) = match claim {
            Claim::Paid { transaction } => {
                let outcome = if transaction.is_some() { Outcome::Settled } else { Outcome::Accepted };
                (outcome, transaction, None)
            }
            Claim::Failed { reason, transaction } => (outcome_of(&reason), transaction, Some(reason.to_string())),
            Claim::Contradiction(what) => {
                tracing::warn!(nonce = %self.entry.nonce, what, "a payment response contradicts what was signed");
                (Outcome::Unknown, None, Some(format!("the server's payment response {what}")))
            }
            Claim::None if status == StatusCode::PAYMENT_REQUIRED => {
                match refusal {
                    Refused { reason: Some(reason), .. } => (outcome_of(&reason), None, Some(reason.to_string())),
                    // Whoever asks again without a word about what it was given may have used it.
                    Refused { error: Some(error), .. } => {
                        (Outcome::Unknown, None, Some(format!("the server asked again: {error}")))
                    }
                    Refused { error: None, .. } => (Outcome::Unknown, None, Some("the server asked again".into())),
                }
            }
            // In a flow where work comes first only a 2xx is charged; where payment comes first the header is always there.
            Claim::None if status.is_redirection() || is_rejection(status) => {
                (Outcome::Failed, None, Some(format!("the server answered {status}")))
            }
            Claim::None => (Outcome::Unknown, None, Some(format!("the server answered {status} without a receipt"))),
        };
        // A server that lost its memory does not undo a transfer that it reported.
        match (self.receipt.outcome, outcome) {
            (Outcome::Settled, Outcome::Settled) | (Outcome::Accepted, Outcome::Settled | Outcome::Accepted) => {}
            (Outcome::Settled | Outcome::Accepted, _) => return,
            _ => {}
        }
        // After an unclear attempt a failure may be the echo of its own success: a spent nonce, a balance that is now too small.
        self.receipt.outcome = if outcome == Outcome::Failed && self.in_doubt { Outcome::Unknown } else { outcome };
        self.receipt.transaction = transaction;
        self.receipt.reason = reason;
        self.in_doubt |= self.receipt.outcome == Outcome::Unknown;
    }
}

/// Whether a status says by itself that nothing was charged. 408 and 409 do not: the work may have been done.
fn is_rejection(status: StatusCode) -> bool {
    status.is_client_error() && !matches!(status, StatusCode::REQUEST_TIMEOUT | StatusCode::CONFLICT)
}

/// Some refusals are what a payment that did go through looks like the second time.
fn outcome_of(reason: &Reason) -> Outcome {
    match reason {
        Reason::SettlementPending | Reason::NonceAlreadyUsed | Reason::DuplicateSettlement => Outcome::Unknown,
        _ => Outcome::Failed,
    }
}

/// What a `PAYMENT-RESPONSE` claims, compared with what was signed.
enum Claim {
    None,
    Paid { transaction: Option<B256> },
    Failed { reason: Reason, transaction: Option<B256> },
    Contradiction(&'static str),
}

impl Claim {
    fn read(headers: &HeaderMap, signed: &JournalEntry) -> Self {
        // Of what is paid in v1 some servers say in v2's header how it was settled.
        let named = |version: Version| headers.get_all(version.response_header()).iter();
        let mut values = named(signed.version).peekable();
        if values.peek().is_none() && signed.version == Version::V1 {
            values = named(Version::V2).peekable();
        }
        let Some(value) = values.next() else { return Self::None };
        if values.next().is_some() {
            return Self::Contradiction("comes twice");
        }
        let value = value.as_bytes();
        let response: Result<SettlementResponse, _> = match signed.version {
            Version::V1 => decode_header::<v1::SettlementResponse>(value, MAX_PAYMENT_HEADER).map(Into::into),
            Version::V2 => decode_header(value, MAX_PAYMENT_HEADER),
        };
        let Ok(response) = response else { return Self::Contradiction("cannot be read") };
        let transaction = response.transaction.parse::<B256>().ok();
        if !response.success {
            let reason = response.error_reason.unwrap_or(Reason::UnexpectedSettleError);
            return Self::Failed { reason: shortened(reason), transaction };
        }
        if !response.network.parse().is_ok_and(|network: Network| network == signed.network) {
            return Self::Contradiction("names another network");
        }
        if response.payer.is_some_and(|payer| payer.parse() != Ok::<Address, _>(signed.payer)) {
            return Self::Contradiction("names another payer");
        }
        if response.amount.is_some_and(|amount| parse_decimal(&amount) != Some(signed.amount.into())) {
            return Self::Contradiction("names another amount");
        }
        if transaction.is_none() && !response.transaction.is_empty() {
            return Self::Contradiction("names something that is not a transaction hash");
        }
        Self::Paid { transaction }
    }
}

/// What another 402 says of the payment.
#[derive(Default)]
struct Refused {
    /// Its code, if it gives one.
    reason: Option<Reason>,
    /// In its own words.
    error: Option<String>,
}

impl Refused {
    fn read(headers: &HeaderMap, body: Option<&[u8]>) -> Self {
        let Ok(Some(demand)) = Demand::read(headers, body) else { return Self::default() };
        Self {
            reason: demand.reason().map(shortened),
            error: demand.error().map(|error| error.chars().take(LONGEST).collect()),
        }
    }
}

/// Receipts are kept and logged; a server does not decide how long they are.
const LONGEST: usize = 200;

fn shortened(reason: Reason) -> Reason {
    match reason {
        Reason::Other(text) => Reason::Other(text.chars().take(LONGEST).collect()),
        known => known,
    }
}

fn retry_after(headers: &HeaderMap, now: u64) -> Option<Duration> {
    let text = headers.get(header::RETRY_AFTER)?.to_str().ok()?.trim();
    if let Ok(seconds) = text.parse() {
        return Some(Duration::from_secs(seconds));
    }
    let date = httpdate::parse_http_date(text).ok()?.duration_since(UNIX_EPOCH).ok()?;
    // A date that has passed means now; how long is too long is for the caller to say.
    Some(Duration::from_secs(date.as_secs().saturating_sub(now)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_says_in_seconds_or_by_date_when_to_come_back() {
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
