//! The state of a channel, as facilitators and sellers tell it.

use std::fmt;

use serde::{Deserialize, Deserializer, Serialize, de};
use serde_json::{Map, Value};

use super::{ChannelId, VoucherSignature, amount};

/// A channel as the chain has it, and what the seller charged.
///
/// Flat in a facilitator's answer to `/verify` (`extra`), nested as `extra.channelState` everywhere else. Numbers are read as decimal strings
/// or as JSON integers up to 2^53 − 1, since implementations write both, and written as the official packages do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ChannelState {
    /// The channel.
    pub channel_id: ChannelId,
    /// Deposits less refunds and withdrawals, in atomic units. Claims do not lower it.
    #[serde(serialize_with = "amount::serialize", deserialize_with = "integer")]
    pub balance: u128,
    /// What was claimed in all, in atomic units.
    #[serde(serialize_with = "amount::serialize", deserialize_with = "integer")]
    pub total_claimed: u128,
    /// When a withdrawal was announced, in Unix seconds; 0 if none is pending.
    #[serde(deserialize_with = "seconds")]
    pub withdraw_requested_at: u64,
    /// The nonce of the channel's next signed refund.
    #[serde(serialize_with = "amount::serialize", deserialize_with = "integer")]
    pub refund_nonce: u128,
    /// What the seller charged in all, in atomic units. Only a seller knows it.
    #[serde(default, with = "amount::option", skip_serializing_if = "Option::is_none")]
    pub charged_cumulative_amount: Option<u128>,
}

impl ChannelState {
    /// Returns what can still be claimed, refunded or withdrawn, in atomic units.
    pub const fn available(&self) -> u128 {
        self.balance.saturating_sub(self.total_claimed)
    }
}

/// A channel as the chain had it in one block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ChannelObservation {
    /// The channel. [`charged_cumulative_amount`](ChannelState::charged_cumulative_amount) is `None`: the chain does not know it.
    pub state: ChannelState,
    /// The amount of the withdrawal that was announced, in atomic units; 0 if none is pending.
    #[serde(with = "amount")]
    pub withdrawal: u128,
    /// The number of the block.
    pub block: u64,
    /// The block's timestamp, in Unix seconds.
    pub time: u64,
}

impl ChannelObservation {
    /// Returns `true` if this is of an earlier block than `other`. Timestamps decide, and numbers only between blocks of one second: a number
    /// that no chain has yet would otherwise be the newest for ever.
    pub const fn is_before(&self, other: &Self) -> bool {
        self.time < other.time || (self.time == other.time && self.block < other.block)
    }
}

/// `extra` of a seller's `PAYMENT-RESPONSE`, and of a facilitator's answer to `/settle`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SettlementExtra {
    /// What the request cost, in atomic units. Absent for a refund, and from a facilitator.
    #[serde(default, with = "amount::option", skip_serializing_if = "Option::is_none")]
    pub charged_amount: Option<u128>,
    /// The channel afterwards.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub channel_state: Option<ChannelState>,
}

impl SettlementExtra {
    /// Returns the fields of a message.
    ///
    /// # Errors
    /// If one of the fields is there and cannot be read.
    pub fn of(extra: &Map<String, Value>) -> Result<Self, serde_json::Error> {
        Self::deserialize(extra)
    }

    /// Returns the fields for a message.
    pub fn to_map(&self) -> Map<String, Value> {
        match serde_json::to_value(self) {
            Ok(Value::Object(fields)) => fields,
            // It is always one.
            _ => Map::new(),
        }
    }
}

/// The newest voucher that a seller has of a channel (`extra.voucherState` of a corrective 402). It proves what the payer signed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct VoucherState {
    /// The ceiling, in atomic units.
    #[serde(with = "amount")]
    pub signed_max_claimable: u128,
    /// The payer's signature over it.
    pub signature: VoucherSignature,
}

/// Reads a canonical decimal string, or a JSON integer that every implementation of JSON reads exactly.
fn integer<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u128, D::Error> {
    const MAX_SAFE: u64 = (1 << 53) - 1;

    struct Integer;

    impl de::Visitor<'_> for Integer {
        type Value = u128;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a decimal string, or an integer up to 2^53 - 1")
        }

        fn visit_str<E: de::Error>(self, text: &str) -> Result<u128, E> {
            amount::parse(text).ok_or_else(|| E::invalid_value(de::Unexpected::Str(text), &self))
        }

        fn visit_u64<E: de::Error>(self, number: u64) -> Result<u128, E> {
            if number > MAX_SAFE {
                return Err(E::invalid_value(de::Unexpected::Unsigned(number), &self));
            }
            Ok(number.into())
        }
    }

    deserializer.deserialize_any(Integer)
}

fn seconds<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u64, D::Error> {
    integer(deserializer)?.try_into().map_err(|_| de::Error::custom("a time beyond 64 bits of seconds"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_read_in_both_forms_and_written_in_one() {
        let id = format!("0x{}", "ab".repeat(32));
        let read = |balance: &str, requested: &str| {
            let text = format!(
                r#"{{"channelId":"{id}","balance":{balance},"totalClaimed":"0","withdrawRequestedAt":{requested},"refundNonce":0}}"#
            );
            serde_json::from_str::<ChannelState>(&text)
        };
        let state = read("10000", "\"12\"").unwrap();
        assert_eq!(state, read("\"10000\"", "12").unwrap());
        assert_eq!(state.available(), 10_000);
        let written = serde_json::to_value(state).unwrap();
        assert_eq!(written["balance"], "10000");
        assert_eq!(written["withdrawRequestedAt"], 12);
        assert_eq!(written.get("chargedCumulativeAmount"), None);
        assert_eq!(read("9007199254740991", "0").unwrap().balance, (1 << 53) - 1);
        for balance in ["\"010\"", "-1", "1.0", "1e3", "9007199254740992", "\"\"", "null"] {
            assert!(read(balance, "0").is_err(), "{balance}");
        }

        let extra = SettlementExtra { charged_amount: Some(300), channel_state: Some(state) };
        let mut fields = extra.to_map();
        assert_eq!(SettlementExtra::of(&fields).unwrap(), extra);
        fields.insert("chargedAmount".to_owned(), "-1".into());
        assert!(SettlementExtra::of(&fields).is_err());
    }
}
