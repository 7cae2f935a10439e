//! What a seller reports of a payment by voucher.

use alloy_primitives::U256;
use serde::Deserialize;
use serde_json::Value;

use super::{ChannelEntry, ChannelFinding, entry::plus};
use crate::{decimal::parse_decimal, protocol::SettlementResponse, usdc::Usdc};

/// How much of a seller's text is kept, in characters.
const MAX_TEXT: usize = 40;

/// A charge that a seller reports, checked against what was signed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Report {
    /// Of the voucher.
    Charged(Usdc),
    /// Of an earlier voucher for the same purchase, whose answer this is.
    Repeated(Usdc),
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

impl Report {
    /// Reads the report on a request that may cost `most`, paid from this channel. An earlier voucher for the same purchase may have been charged
    /// with `earlier`, if there was one.
    pub(super) fn of(
        response: SettlementResponse,
        entry: &ChannelEntry,
        most: Usdc,
        earlier: Option<Usdc>,
    ) -> Result<Self, ChannelFinding> {
        let extra = Extra::of(response, entry).map_err(contradiction)?;
        let above_price = |value: &Value| {
            let reported = value.to_string().chars().take(MAX_TEXT).collect();
            ChannelFinding::ChargedAbovePrice { reported, price: most }
        };
        let zero = Value::from("0");
        let charged = extra.charged_amount.as_ref().unwrap_or(&zero);
        let amount = units(charged).and_then(|units| Usdc::try_from(units).ok()).ok_or_else(|| above_price(charged))?;
        let sum = extra.channel_state.and_then(|state| state.charged_cumulative_amount);
        let (before, after) = (U256::from(entry.charged.atomic()), U256::from(plus(entry.charged, amount).atomic()));
        match sum.map(|sum| units(&sum)) {
            Some(Some(sum)) if sum <= before && sum != after && earlier.is_some_and(|earlier| amount <= earlier) => {
                Ok(Self::Repeated(amount))
            }
            _ if amount > most => Err(above_price(charged)),
            None => Ok(Self::Charged(amount)),
            Some(Some(sum)) if sum == after => Ok(Self::Charged(amount)),
            Some(_) => Err(contradiction("names a sum of charges that does not follow from the last one")),
        }
    }
}

/// Reads the report on a refund, whose amount is the seller's word. Returns `None` if it is on another channel.
pub(super) fn refunded(response: SettlementResponse, entry: &ChannelEntry) -> Option<Option<Usdc>> {
    let amount = response.amount.as_deref().and_then(parse_decimal).and_then(|units| Usdc::try_from(units).ok());
    Extra::of(response, entry).ok().map(|_| amount)
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

pub(super) fn contradiction(what: &str) -> ChannelFinding {
    ChannelFinding::Contradiction { what: what.into() }
}

fn units(value: &Value) -> Option<U256> {
    parse_decimal(value.as_str()?)
}
