//! What a seller answers to a payment by voucher.

use alloy_primitives::{Address, B256, U256};
use http::HeaderMap;
use serde::Deserialize;
use serde_json::Value;

use super::{ChannelEntry, ChannelFinding, entry::plus};
use crate::{
    client::payment::shortened,
    decimal::parse_decimal,
    network::Network,
    protocol::{MAX_PAYMENT_HEADER, Reason, Version, decode_header},
    usdc::Usdc,
};

/// How much of a seller's text is kept, in characters.
const MAX_TEXT: usize = 40;

/// The report in `PAYMENT-RESPONSE`, checked against what was signed.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Report {
    None,
    Charged { amount: Usdc, transaction: Option<B256> },
    Failed { reason: Reason, transaction: Option<B256> },
    Contradiction(ChannelFinding),
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Response {
    success: bool,
    error_reason: Option<Reason>,
    payer: Option<String>,
    #[serde(default)]
    transaction: String,
    network: String,
    #[serde(default)]
    extra: Extra,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Extra {
    charged_amount: Option<Value>,
    channel_state: Option<State>,
}

/// The two fields of a channel's state that are compared. All others are the seller's word only, and nothing is copied from there.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct State {
    channel_id: Option<String>,
    charged_cumulative_amount: Option<Value>,
}

/// The report on a refund.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum RefundReport {
    None,
    Refunded { amount: Option<Usdc>, transaction: Option<B256> },
    Failed { reason: Reason },
}

impl Report {
    /// Reads the report on a request of this price, paid from this channel.
    pub(super) fn read(headers: &HeaderMap, entry: &ChannelEntry, price: Usdc) -> Self {
        let response = match read(headers) {
            Ok(Some(response)) => response,
            Ok(None) => return Self::None,
            Err(what) => return contradiction(what),
        };
        let transaction = response.transaction.parse().ok();
        if !response.success {
            let reason = response.error_reason.unwrap_or(Reason::UnexpectedSettleError);
            return Self::Failed { reason: shortened(reason), transaction };
        }
        if let Some(what) = response.mismatch(entry) {
            return contradiction(what);
        }
        let amount = match &response.extra.charged_amount {
            None => Usdc::ZERO,
            Some(value) => {
                let amount = units(value).and_then(|units| Usdc::try_from(units).ok());
                let Some(amount) = amount.filter(|amount| *amount <= price) else {
                    let reported = value.to_string().chars().take(MAX_TEXT).collect();
                    return Self::Contradiction(ChannelFinding::ChargedAbovePrice { reported, price });
                };
                amount
            }
        };
        let sum = response.extra.channel_state.and_then(|state| state.charged_cumulative_amount);
        if sum.is_some_and(|sum| units(&sum) != Some(plus(entry.charged, amount).into())) {
            return contradiction("names a sum of charges that does not follow from the last one");
        }
        Self::Charged { amount, transaction }
    }
}

impl RefundReport {
    /// Reads the report on a refund. Its amount is the seller's word.
    pub(super) fn read(headers: &HeaderMap, entry: &ChannelEntry) -> Self {
        #[derive(Deserialize)]
        struct Amount {
            amount: Option<String>,
        }
        let Ok(Some(response)) = read(headers) else { return Self::None };
        if !response.success {
            let reason = response.error_reason.unwrap_or(Reason::UnexpectedSettleError);
            return Self::Failed { reason: shortened(reason) };
        }
        if response.mismatch(entry).is_some() {
            return Self::None;
        }
        let value = headers.get(Version::V2.response_header()).map_or(&b""[..], |value| value.as_bytes());
        let amount = decode_header::<Amount>(value, MAX_PAYMENT_HEADER).ok().and_then(|response| response.amount);
        let amount = amount.and_then(|text| parse_decimal(&text)).and_then(|units| Usdc::try_from(units).ok());
        Self::Refunded { amount, transaction: response.transaction.parse().ok() }
    }
}

impl Response {
    /// Returns what does not fit the payment, if anything.
    fn mismatch(&self, entry: &ChannelEntry) -> Option<&'static str> {
        if !self.network.parse().is_ok_and(|network: Network| network == entry.network) {
            return Some("names another network");
        }
        if self.payer.as_ref().is_some_and(|payer| payer.parse() != Ok::<Address, _>(entry.config.payer)) {
            return Some("names another payer");
        }
        let channel = self.extra.channel_state.as_ref().and_then(|state| state.channel_id.as_ref());
        if channel.is_some_and(|channel| channel.parse() != Ok(entry.id())) {
            return Some("names another channel");
        }
        if !self.transaction.is_empty() && self.transaction.parse::<B256>().is_err() {
            return Some("names something that is not a transaction hash");
        }
        None
    }
}

fn read(headers: &HeaderMap) -> Result<Option<Response>, &'static str> {
    let mut values = headers.get_all(Version::V2.response_header()).iter();
    let Some(value) = values.next() else { return Ok(None) };
    if values.next().is_some() {
        return Err("comes twice");
    }
    decode_header(value.as_bytes(), MAX_PAYMENT_HEADER).map(Some).map_err(|_| "cannot be read")
}

fn contradiction(what: &str) -> Report {
    Report::Contradiction(ChannelFinding::Contradiction { what: what.into() })
}

fn units(value: &Value) -> Option<U256> {
    parse_decimal(value.as_str()?)
}
