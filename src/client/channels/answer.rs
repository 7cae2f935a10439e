//! What a seller answers to a payment by voucher.

use alloy_primitives::{B256, U256};
use http::HeaderMap;
use serde::Deserialize;
use serde_json::Value;

use super::{ChannelEntry, ChannelFinding, entry::plus};
use crate::{
    client::payment_response::SettlementReport,
    decimal::parse_decimal,
    protocol::{Reason, SettlementResponse, Version},
    usdc::Usdc,
};

/// How much of a seller's text is kept, in characters.
const MAX_TEXT: usize = 40;

/// The report in `PAYMENT-RESPONSE`, checked against what was signed.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Report {
    None,
    Charged {
        amount: Usdc,
        transaction: Option<B256>,
    },
    /// The purchase was charged before, by another voucher, and this is its answer.
    Repeated {
        amount: Usdc,
        transaction: Option<B256>,
    },
    Failed {
        reason: Reason,
        transaction: Option<B256>,
    },
    Contradiction(ChannelFinding),
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
    /// Reads the report on a request that may cost `most`, paid from this channel. If it has an id, it may have been charged before.
    pub(super) fn read(headers: &HeaderMap, entry: &ChannelEntry, (most, has_id): (Usdc, bool)) -> Self {
        let (response, transaction) = match read(headers, entry) {
            SettlementReport::None => return Self::None,
            SettlementReport::Paid { response, transaction } => (response, transaction),
            SettlementReport::Failed { reason, transaction } => return Self::Failed { reason, transaction },
            SettlementReport::Contradiction(what) => return contradiction(what),
        };
        let extra = match Extra::of(*response, entry) {
            Ok(extra) => extra,
            Err(what) => return contradiction(what),
        };
        let above_price = |value: &Value| {
            let reported = value.to_string().chars().take(MAX_TEXT).collect();
            Self::Contradiction(ChannelFinding::ChargedAbovePrice { reported, price: most })
        };
        let zero = Value::from("0");
        let charged = extra.charged_amount.as_ref().unwrap_or(&zero);
        let Some(amount) = units(charged).and_then(|units| Usdc::try_from(units).ok()) else {
            return above_price(charged);
        };
        let sum = extra.channel_state.and_then(|state| state.charged_cumulative_amount);
        let (before, after) = (U256::from(entry.charged.atomic()), U256::from(plus(entry.charged, amount).atomic()));
        match sum.map(|sum| units(&sum)) {
            Some(Some(sum)) if has_id && sum <= before && sum != after && amount <= entry.charged => {
                Self::Repeated { amount, transaction }
            }
            _ if amount > most => above_price(charged),
            None => Self::Charged { amount, transaction },
            Some(Some(sum)) if sum == after => Self::Charged { amount, transaction },
            Some(_) => contradiction("names a sum of charges that does not follow from the last one"),
        }
    }
}

impl RefundReport {
    /// Reads the report on a refund. Its amount is the seller's word.
    pub(super) fn read(headers: &HeaderMap, entry: &ChannelEntry) -> Self {
        let (response, transaction) = match read(headers, entry) {
            SettlementReport::Paid { response, transaction } => (response, transaction),
            SettlementReport::Failed { reason, .. } => return Self::Failed { reason },
            SettlementReport::None | SettlementReport::Contradiction(_) => return Self::None,
        };
        let amount = response.amount.as_deref().and_then(parse_decimal).and_then(|units| Usdc::try_from(units).ok());
        match Extra::of(*response, entry) {
            Ok(_) => Self::Refunded { amount, transaction },
            Err(_) => Self::None,
        }
    }
}

impl Extra {
    /// Reads the channel's part of a report on this channel.
    fn of(response: SettlementResponse, entry: &ChannelEntry) -> Result<Self, &'static str> {
        let Some(extra) = response.extra else { return Ok(Self::default()) };
        let extra = Self::deserialize(Value::Object(extra)).map_err(|_| "cannot be read")?;
        let channel = extra.channel_state.as_ref().and_then(|state| state.channel_id.as_ref());
        if channel.is_some_and(|channel| channel.parse() != Ok(entry.id())) {
            return Err("names another channel");
        }
        Ok(extra)
    }
}

fn read(headers: &HeaderMap, entry: &ChannelEntry) -> SettlementReport {
    SettlementReport::read(headers, Version::V2, entry.network, entry.config.payer)
}

fn contradiction(what: &str) -> Report {
    Report::Contradiction(ChannelFinding::Contradiction { what: what.into() })
}

fn units(value: &Value) -> Option<U256> {
    parse_decimal(value.as_str()?)
}
