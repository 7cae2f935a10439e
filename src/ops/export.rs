//! Payments for accounting: CSV and JSON Lines.

use std::fmt::Write as _;

use alloy_primitives::{Address, B256, U256};
use serde::Serialize;

use super::operator::Payments;
use crate::{
    ledger::{Fulfilment, LedgerError, Record},
    network::Network,
    protocol::timestamp,
};

/// The columns of an export, in their order; also the names in JSON.
///
/// | column | what it is |
/// |---|---|
/// | `time` | when the payment was first presented, RFC 3339 in UTC |
/// | `network` | the chain, CAIP-2 |
/// | `asset` | the token's address |
/// | `payer`, `payee` | addresses |
/// | `nonce` | the authorization's nonce: with network, asset and payer it names the payment |
/// | `amount_units` | atomic units |
/// | `amount` | the same in whole tokens, with six decimal places |
/// | `state` | of the money: `none`, `due`, `submitted`, `unknown`, `settled`, `final`, `dead` |
/// | `work` | of the work: `reserved`, `working`, `produced`, `delivered`, `released` |
/// | `transaction`, `block` | what paid, once it has |
/// | `fee_wei` | this payment's share of what the transaction cost, where this ledger's facilitator paid for it |
/// | `settled_at` | when it was first known to be paid, RFC 3339 in UTC |
/// | `deferred` | whether the answer was released before it was paid for |
///
/// Nothing in it is a text that a payer chose: a value begins with a digit or a letter, so that no spreadsheet takes it for a
/// formula, and needs no quotes.
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

/// One payment as accounting sees it; the fields are the [`COLUMNS`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[allow(missing_docs, reason = "the table at COLUMNS says it")]
pub struct Entry {
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

impl Entry {
    /// What a record says.
    pub fn of(record: &Record) -> Self {
        let value = record.authorization.value;
        Self {
            time: timestamp::format(record.reserved_at),
            network: record.key.network,
            asset: record.key.asset,
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
            transaction: record.settlement.paid_by(),
            block: record.settlement.block(),
            fee_wei: record.fee.map(|fee| fee.to_string()),
            settled_at: record.settled_at.map(timestamp::format),
            deferred: record.deferred,
        }
    }

    /// A line of CSV (RFC 4180), with its end; what is not known is empty.
    pub fn csv(&self) -> String {
        let or_empty = |value: Option<String>| value.unwrap_or_default();
        let values: [String; COLUMNS.len()] = [
            self.time.clone(),
            self.network.to_string(),
            // Without the capitals of a checksum, as in JSON: what is compared is text.
            format!("{:#x}", self.asset),
            format!("{:#x}", self.payer),
            format!("{:#x}", self.payee),
            self.nonce.to_string(),
            self.amount_units.clone(),
            self.amount.clone(),
            self.state.to_owned(),
            self.work.to_owned(),
            or_empty(self.transaction.map(|hash| hash.to_string())),
            or_empty(self.block.map(|block| block.to_string())),
            or_empty(self.fee_wei.clone()),
            or_empty(self.settled_at.clone()),
            self.deferred.to_string(),
        ];
        values.join(",") + "\r\n"
    }

    /// A line of JSON, with its end; amounts are decimal strings, what is not known is `null`.
    pub fn json(&self) -> String {
        serde_json::to_string(self).unwrap_or_default() + "\n"
    }
}

/// How payments are written down.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExportFormat {
    /// RFC 4180, with a line of [`COLUMNS`] first.
    Csv,
    /// An object per line.
    JsonLines,
}

impl ExportFormat {
    /// Its media type.
    pub const fn media_type(self) -> &'static str {
        match self {
            Self::Csv => "text/csv; charset=utf-8; header=present",
            Self::JsonLines => "application/x-ndjson",
        }
    }
}

/// An export in the making: as much of it is in memory as a page of payments. Made by
/// [`Operator::export`](super::Operator::export).
#[derive(Debug)]
pub struct Export {
    payments: Payments,
    format: ExportFormat,
    is_begun: bool,
}

impl Export {
    pub(super) const fn new(payments: Payments, format: ExportFormat) -> Self {
        Self { payments, format, is_begun: false }
    }

    /// Some more lines; `None` at the end.
    ///
    /// # Errors
    /// [`LedgerError::Backend`] if the backend failed; asking again goes on where it stopped.
    pub async fn next(&mut self) -> Result<Option<String>, LedgerError> {
        if self.format == ExportFormat::Csv && !std::mem::replace(&mut self.is_begun, true) {
            return Ok(Some(COLUMNS.join(",") + "\r\n"));
        }
        let Some(page) = self.payments.next().await? else { return Ok(None) };
        let mut lines = String::new();
        for record in &page {
            let entry = Entry::of(record);
            // Writing to a string does not fail.
            let _ = match self.format {
                ExportFormat::Csv => lines.write_str(&entry.csv()),
                ExportFormat::JsonLines => lines.write_str(&entry.json()),
            };
        }
        Ok(Some(lines))
    }
}

/// USDC has six decimal places wherever this crate knows it.
fn six_places(units: U256) -> String {
    let (whole, fraction) = units.div_rem(U256::from(1_000_000));
    format!("{whole}.{fraction:0>6}", fraction = fraction.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn amounts_are_exact() {
        for (units, expected) in [(0, "0.000000"), (1, "0.000001"), (1_000, "0.001000"), (12_345_678, "12.345678")] {
            assert_eq!(six_places(U256::from(units)), expected);
        }
        assert!(six_places(U256::MAX).ends_with(".639935"));
    }
}
