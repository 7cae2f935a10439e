//! One reading of a server's answer to a payment, for all schemes: its status, `PAYMENT-RESPONSE`, and the 402 that refuses the payment.

use std::time::{Duration, UNIX_EPOCH};

use alloy_primitives::{Address, B256};
use http::{HeaderMap, StatusCode, header};

use super::{challenge::Challenge, v1};
use crate::{
    network::Network,
    protocol::{Reason, SettlementResponse, header_name},
};

/// How much of a server's reason is kept, in characters.
const MAX_REASON: usize = 200;

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
    /// Call [`SignedPayment::sign_again`](super::SignedPayment::sign_again), and send the request with the new header; or conclude. The
    /// seller refused the voucher, and says that it charged nothing for it. This is asked for at most four times for each payment, and only while
    /// all vouchers together allow the seller no more than the limit per payment.
    SignAgain,
}

/// The head of an answer, and whether it makes it worth sending the payment again.
pub(super) struct AnswerHead<'a> {
    pub(super) status: StatusCode,
    pub(super) headers: &'a HeaderMap,
    /// Of another 402 of v1, if it was read.
    body: Option<&'a [u8]>,
    pub(super) is_transient: bool,
    retry_after: Option<Duration>,
}

/// What an answer says of the payment, checked against what was signed as far as all schemes have it in common.
#[derive(Debug)]
pub(super) enum Said {
    /// The payment was made.
    Paid { response: Box<SettlementResponse>, transaction: Option<B256> },
    /// `PAYMENT-RESPONSE` reports that the payment failed.
    Failed { reason: Reason, transaction: Option<B256> },
    /// `PAYMENT-RESPONSE` contradicts itself or what was signed.
    Contradiction(&'static str),
    /// The server asks for a payment again, for this reason.
    Refused(Reason),
    /// The server asks again and gives no reason code, only this text. It may have settled the payment.
    AskedAgain(Option<String>),
    /// The status says that nothing was charged.
    Rejected,
    /// Nothing.
    Nothing,
}

impl<'a> AnswerHead<'a> {
    /// `may_be_repeated` says whether the server works once for this payment, or for any number of such requests.
    pub(super) fn new(
        status: StatusCode,
        headers: &'a HeaderMap,
        body: Option<&'a [u8]>,
        now: u64,
        may_be_repeated: impl FnOnce() -> bool,
    ) -> Self {
        let retry_after = retry_after(headers, now);
        let is_transient = match status.as_u16() {
            // Of a gateway, or of a server that could not begin.
            502..=504 => true,
            // The work began and failed. Elsewhere than at a server that knows the payment again, it would begin anew.
            500.. => retry_after.is_some() || may_be_repeated(),
            408 | 409 | 425 | 429 => retry_after.is_some(),
            _ => false,
        };
        Self { status, headers, body, is_transient, retry_after }
    }

    /// Returns the step that sends the same payment again.
    pub(super) const fn retry(&self) -> NextStep {
        NextStep::Retry { after: self.retry_after }
    }

    /// Reads what it says of a payment of this payer on this network.
    pub(super) fn said(&self, network: Network, payer: Address) -> Said {
        if let Some(said) = self.payment_response(network, payer) {
            return said;
        }
        let is_asked_again = self.status == StatusCode::PAYMENT_REQUIRED;
        if is_asked_again || self.status == StatusCode::PRECONDITION_FAILED {
            let challenge = Challenge::read(self.headers, self.body).ok().flatten();
            if let Some(reason) = challenge.as_ref().and_then(Challenge::reason) {
                return Said::Refused(shortened(reason));
            }
            if is_asked_again {
                let text = challenge.as_ref().and_then(Challenge::error);
                return Said::AskedAgain(text.map(|text| text.chars().take(MAX_REASON).collect()));
            }
        }
        // In the flow `authorization` only a 2xx is charged. In the flow `upfront` the header is always there. 408 and 409 say nothing: the work
        // may have been done.
        let is_rejection = self.status.is_redirection()
            || self.status.is_client_error()
                && !matches!(self.status, StatusCode::REQUEST_TIMEOUT | StatusCode::CONFLICT);
        if is_rejection { Said::Rejected } else { Said::Nothing }
    }

    /// Reads `PAYMENT-RESPONSE`, or what v1 calls so, if there is one.
    fn payment_response(&self, network: Network, payer: Address) -> Option<Said> {
        let names = [header_name::PAYMENT_RESPONSE, header_name::X_PAYMENT_RESPONSE];
        let name = names.into_iter().find(|name| self.headers.contains_key(*name))?;
        let mut values = self.headers.get_all(name).iter();
        let value = values.next()?.as_bytes();
        if values.next().is_some() {
            return Some(Said::Contradiction("comes twice"));
        }
        let Ok(response) = v1::receipt(value) else { return Some(Said::Contradiction("cannot be read")) };
        let transaction = response.transaction.parse::<B256>().ok();
        if !response.success {
            let reason = response.error_reason.unwrap_or(Reason::UnexpectedSettleError);
            return Some(Said::Failed { reason: shortened(reason), transaction });
        }
        if !response.network.parse().is_ok_and(|named: Network| named == network) {
            return Some(Said::Contradiction("names another network"));
        }
        if response.payer.as_ref().is_some_and(|named| named.parse() != Ok::<Address, _>(payer)) {
            return Some(Said::Contradiction("names another payer"));
        }
        if transaction.is_none() && !response.transaction.is_empty() {
            return Some(Said::Contradiction("names something that is not a transaction hash"));
        }
        Some(Said::Paid { response: Box::new(response), transaction })
    }
}

impl Said {
    /// Returns why the payment is not known to be made.
    pub(super) fn why(&self, status: StatusCode) -> Option<String> {
        Some(match self {
            Self::Paid { .. } => return None,
            Self::Failed { reason, .. } | Self::Refused(reason) => reason.to_string(),
            Self::Contradiction(what) => format!("the server's payment response {what}"),
            Self::AskedAgain(Some(text)) => format!("the server asked again: {text}"),
            Self::AskedAgain(None) => "the server asked again".into(),
            Self::Rejected => format!("the server answered {status}"),
            Self::Nothing => format!("the server answered {status} without a receipt"),
        })
    }
}

/// Returns the reason with no more of an unknown code than a log should have.
fn shortened(reason: Reason) -> Reason {
    match reason {
        Reason::Other(text) => Reason::Other(text.chars().take(MAX_REASON).collect()),
        known => known,
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
