//! Export of payments for accounting, as CSV and JSON Lines.

use alloy_primitives::{Address, B256, U256};
use serde::Serialize;
use serde_json::Value;

use super::operator::{Operator, PaymentFilter, PaymentPages};
use crate::{
    ledger::{Fulfilment, LedgerError, Record},
    network::Network,
    protocol::timestamp,
};

/// The columns of an export, in order. They are also the names in JSON.
///
/// | column | meaning |
/// |---|---|
/// | `time` | when the payment was first received, RFC 3339 in UTC |
/// | `network` | the chain, CAIP-2 |
/// | `asset` | the token's address |
/// | `payer`, `payee` | addresses |
/// | `nonce` | the authorization's nonce; with network, asset and payer it identifies the payment |
/// | `amount_units` | the amount in atomic units |
/// | `amount` | the amount in whole tokens, with six decimal places |
/// | `state` | the state of the settlement: `none`, `due`, `submitted`, `unknown`, `settled`, `final`, `dead` |
/// | `work` | the state of the work: `reserved`, `working`, `produced`, `delivered`, `released` |
/// | `transaction`, `block` | what settled the payment, once it is settled |
/// | `fee_wei` | this payment's share of the transaction's cost, if this ledger's facilitator sent it |
/// | `settled_at` | when it was first known to be settled, RFC 3339 in UTC |
/// | `deferred` | `true` if the response was sent before the payment was settled |
///
/// No value is text that a payer chose. Every value begins with a digit or a letter, so that no spreadsheet reads it as a formula, and
/// none needs quotes.
pub const COLUMNS: [&str; 15] = [
    "time",
    "network",
    "asset",
    "payer",
    "payee",
    "nonce",
    "amount_units",
    "amount",
    "state",
    "work",
    "transaction",
    "block",
    "fee_wei",
    "settled_at",
    "deferred",
];

/// One exported payment. Its fields are the [`COLUMNS`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[allow(missing_docs, reason = "documented at COLUMNS")]
#[non_exhaustive]
pub struct ExportEntry {
    pub time: String,
    pub network: Network,
    pub asset: Address,
    pub payer: Address,
    pub payee: Address,
    pub nonce: B256,
    pub amount_units: String,
    pub amount: String,
    pub state: &'static str,
    pub work: &'static str,
    pub transaction: Option<B256>,
    pub block: Option<u64>,
    pub fee_wei: Option<String>,
    pub settled_at: Option<String>,
    pub deferred: bool,
}

impl ExportEntry {
    /// Creates the entry of a record.
    pub fn of(record: &Record) -> Self {
        let value = record.amount();
        Self {
            time: timestamp::format(record.reserved_at),
            network: record.key.network,
            asset: record.terms.offer().asset.address,
            payer: record.key.payer,
            payee: record.authorization.to,
            nonce: record.key.nonce,
            amount_units: value.to_string(),
            amount: six_places(value),
            state: record.settlement.state().as_str(),
            work: match record.fulfilment {
                Fulfilment::Reserved => "reserved",
                Fulfilment::Working => "working",
                Fulfilment::Produced => "produced",
                Fulfilment::Delivered => "delivered",
                Fulfilment::Released => "released",
            },
            transaction: record.transaction(),
            block: record.settlement.block(),
            fee_wei: record.fee.map(|fee| fee.to_string()),
            settled_at: record.settled_at.map(timestamp::format),
            deferred: record.deferred,
        }
    }

    /// Returns the entry as a line of CSV (RFC 4180), with its line break. Unknown values are empty.
    pub fn csv(&self) -> String {
        csv_line(self, COLUMNS)
    }

    /// Returns the entry as a line of JSON, with its line break. Amounts are decimal strings, unknown values are `null`.
    pub fn json(&self) -> String {
        json_line(self)
    }
}

/// The format of an export.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ExportFormat {
    /// CSV (RFC 4180), with the [`COLUMNS`] in the first line.
    Csv,
    /// JSON Lines: an object per line.
    JsonLines,
}

impl ExportFormat {
    /// Returns the media type.
    pub const fn media_type(self) -> &'static str {
        match self {
            Self::Csv => "text/csv; charset=utf-8; header=present",
            Self::JsonLines => "application/x-ndjson",
        }
    }
}

impl Operator {
    /// Exports the payments that match a filter.
    pub fn export(&self, which: PaymentFilter, format: ExportFormat) -> Export {
        Export { payments: self.payments(which), format, has_header: false }
    }
}

/// An export, one page of payments at a time. Created by [`Operator::export`](super::Operator::export).
#[derive(Debug)]
pub struct Export {
    pub(super) payments: PaymentPages,
    pub(super) format: ExportFormat,
    pub(super) has_header: bool,
}

impl Export {
    /// Returns the next lines, or `None` at the end.
    ///
    /// # Errors
    /// [`LedgerError::Backend`] if the store failed. Call again to continue.
    pub async fn next(&mut self) -> Result<Option<String>, LedgerError> {
        if self.format == ExportFormat::Csv && !std::mem::replace(&mut self.has_header, true) {
            return Ok(Some(COLUMNS.join(",") + "\r\n"));
        }
        let Some(page) = self.payments.next().await? else { return Ok(None) };
        let line = |record: &Record| match self.format {
            ExportFormat::Csv => ExportEntry::of(record).csv(),
            ExportFormat::JsonLines => ExportEntry::of(record).json(),
        };
        Ok(Some(page.iter().map(line).collect()))
    }
}

pub(super) fn csv_line<const N: usize>(entry: &impl Serialize, columns: [&str; N]) -> String {
    let entry = serde_json::to_value(entry).unwrap_or_default();
    let text = |column: &str| match &entry[column] {
        Value::Null => String::new(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    };
    columns.map(text).join(",") + "\r\n"
}

pub(super) fn json_line(entry: &impl Serialize) -> String {
    serde_json::to_string(entry).unwrap_or_default() + "\n"
}

/// Writes units with six decimal places, as USDC has on every known network.
pub(super) fn six_places(units: U256) -> String {
    let (whole, fraction) = units.div_rem(U256::from(1_000_000));
    format!("{whole}.{fraction:0>6}", fraction = fraction.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn amounts_have_six_exact_decimals() {
        for (units, expected) in [(0, "0.000000"), (1, "0.000001"), (1_000, "0.001000"), (12_345_678, "12.345678")] {
            assert_eq!(six_places(U256::from(units)), expected);
        }
        assert!(six_places(U256::MAX).ends_with(".639935"));
    }
}
