//! The operator's view of payment channels: lists, sums and exports them.

use std::{collections::BTreeMap, str::FromStr, sync::Arc, time::Duration};

use alloy_primitives::{Address, U256};
use serde::Serialize;

use super::{
    export::{ExportFormat, csv_line, json_line, six_places},
    operator::Operator,
    report::decimal,
};
use crate::{
    ledger::{
        LedgerError,
        channels::{ChannelLedger, ChannelRecord},
    },
    network::Network,
    protocol::timestamp,
    vouchers::ChannelId,
};

/// The number of channels that are read at once.
const PAGE: usize = 256;

/// The columns of an export of channels, in order. They are also the names in JSON.
///
/// | column | meaning |
/// |---|---|
/// | `channel` | the channel's id |
/// | `network` | the chain, CAIP-2 |
/// | `asset` | the token's address |
/// | `payer`, `payee` | addresses |
/// | `charged_units` | what was charged in all, in atomic units |
/// | `charged` | the same in whole tokens, with six decimal places |
/// | `claimed_units` | what was claimed of it |
/// | `unclaimed_units` | what can be claimed now |
/// | `at_risk_units` | the part of it that a withdrawal could take, or that the escrow does not hold |
/// | `balance_units` | deposits less refunds and withdrawals |
/// | `withdrawal_units` | what an announced withdrawal asks for |
/// | `unclaimed_since`, `used_at` | RFC 3339 in UTC |
/// | `observed_at`, `block` | when the chain was asked last, and its block then |
///
/// Every value begins with a digit or a letter, and none needs quotes. There are no signatures.
pub const CHANNEL_COLUMNS: [&str; 16] = [
    "channel",
    "network",
    "asset",
    "payer",
    "payee",
    "charged_units",
    "charged",
    "claimed_units",
    "unclaimed_units",
    "at_risk_units",
    "balance_units",
    "withdrawal_units",
    "unclaimed_since",
    "used_at",
    "observed_at",
    "block",
];

/// One exported channel. Its fields are the [`CHANNEL_COLUMNS`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[allow(missing_docs, reason = "documented at CHANNEL_COLUMNS")]
#[non_exhaustive]
pub struct ChannelSummary {
    pub channel: ChannelId,
    pub network: Network,
    pub asset: Address,
    pub payer: Address,
    pub payee: Address,
    pub charged_units: String,
    pub charged: String,
    pub claimed_units: String,
    pub unclaimed_units: String,
    pub at_risk_units: String,
    pub balance_units: String,
    pub withdrawal_units: String,
    pub unclaimed_since: Option<String>,
    pub used_at: String,
    pub observed_at: String,
    pub block: u64,
}

impl ChannelSummary {
    /// Creates the entry of a channel.
    pub fn of(record: &ChannelRecord) -> Self {
        let state = &record.observed.state;
        Self {
            channel: record.id,
            network: record.network,
            asset: record.config.token,
            payer: record.config.payer,
            payee: record.config.receiver,
            charged_units: record.charged().to_string(),
            charged: six_places(U256::from(record.charged())),
            claimed_units: state.total_claimed.to_string(),
            unclaimed_units: record.unclaimed().to_string(),
            at_risk_units: record.at_risk().to_string(),
            balance_units: state.balance.to_string(),
            withdrawal_units: record.observed.withdrawal.to_string(),
            unclaimed_since: record.unclaimed_since.map(timestamp::format),
            used_at: timestamp::format(record.used_at),
            observed_at: timestamp::format(record.observed_at),
            block: record.observed.block,
        }
    }

    /// Returns the entry as a line of CSV (RFC 4180), with its line break. Unknown values are empty.
    pub fn csv(&self) -> String {
        csv_line(self, CHANNEL_COLUMNS)
    }

    /// Returns the entry as a line of JSON, with its line break. Amounts are decimal strings, unknown values are `null`.
    pub fn json(&self) -> String {
        json_line(self)
    }
}

/// A filter for channels. As text: `all`, `unclaimed`, `at-risk`, or `idle:` and a number of seconds.
///
/// ```
/// use std::time::Duration;
/// use tower_x402::ops::ChannelFilter;
///
/// assert_eq!("at-risk".parse(), Ok(ChannelFilter::AtRisk));
/// assert_eq!("idle:86400".parse(), Ok(ChannelFilter::Idle(Duration::from_secs(86_400))));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ChannelFilter {
    /// `all`: every channel.
    All,
    /// `unclaimed`: channels of which something can be claimed.
    Unclaimed,
    /// `at-risk`: channels of which something is unclaimed that a withdrawal could take, or that the escrow does not hold.
    AtRisk,
    /// `idle:SECONDS`: channels that no request used for this long, in whole seconds, if there is still money in them.
    Idle(Duration),
}

impl ChannelFilter {
    /// Returns `true` if the channel is one to list. `now` is in seconds since 1970.
    pub fn holds(self, record: &ChannelRecord, now: u64) -> bool {
        match self {
            Self::All => true,
            Self::Unclaimed => record.unclaimed() > 0,
            Self::AtRisk => record.at_risk() > 0,
            Self::Idle(time) => {
                record.observed.state.available() > 0 && now.saturating_sub(record.used_at) >= time.as_secs()
            }
        }
    }
}

impl FromStr for ChannelFilter {
    type Err = ParseChannelFilterError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "all" => Ok(Self::All),
            "unclaimed" => Ok(Self::Unclaimed),
            "at-risk" => Ok(Self::AtRisk),
            _ => {
                let seconds = text.strip_prefix("idle:").and_then(|seconds| seconds.parse().ok());
                seconds.map(|seconds| Self::Idle(Duration::from_secs(seconds))).ok_or(ParseChannelFilterError)
            }
        }
    }
}

/// An error while a [`ChannelFilter`] was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("expected all, unclaimed, at-risk or idle:SECONDS")]
#[non_exhaustive]
pub struct ParseChannelFilterError;

/// Pages of channels, in the order of their ids.
#[derive(Debug)]
pub struct ChannelPages {
    operator: Operator,
    which: ChannelFilter,
    after: Option<ChannelId>,
}

impl ChannelPages {
    /// Returns the next page, which has at least one channel, or `None` at the end.
    ///
    /// # Errors
    /// [`LedgerError::Backend`] if the store failed. Call again to retry.
    pub async fn next(&mut self) -> Result<Option<Vec<ChannelRecord>>, LedgerError> {
        let Some(ledger) = &self.operator.channels else { return Ok(None) };
        let now = self.operator.clock.now();
        loop {
            if self.after.is_some() {
                self.operator.rest().await;
            }
            let page = ledger.channels(self.after, PAGE).await?;
            let Some(last) = page.last() else { return Ok(None) };
            self.after = Some(last.id);
            let found: Vec<_> = page.into_iter().filter(|record| self.which.holds(record, now)).collect();
            if !found.is_empty() {
                return Ok(Some(found));
            }
        }
    }
}

/// An export of channels, one page at a time. Created by [`Operator::export_channels`].
#[derive(Debug)]
pub struct ChannelExport {
    channels: ChannelPages,
    format: ExportFormat,
    has_header: bool,
}

impl ChannelExport {
    /// Returns the next lines, or `None` at the end.
    ///
    /// # Errors
    /// [`LedgerError::Backend`] if the store failed. Call again to continue.
    pub async fn next(&mut self) -> Result<Option<String>, LedgerError> {
        if self.format == ExportFormat::Csv && !std::mem::replace(&mut self.has_header, true) {
            return Ok(Some(CHANNEL_COLUMNS.join(",") + "\r\n"));
        }
        let Some(page) = self.channels.next().await? else { return Ok(None) };
        let line = |record: &ChannelRecord| match self.format {
            ExportFormat::Csv => ChannelSummary::of(record).csv(),
            ExportFormat::JsonLines => ChannelSummary::of(record).json(),
        };
        Ok(Some(page.iter().map(line).collect()))
    }
}

/// The sums of channels in one token on one chain, in atomic units.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct ChannelReport {
    /// The chain.
    pub network: Network,
    /// The token's address.
    pub asset: Address,
    /// The number of channels.
    pub channels: u64,
    /// What was charged in all.
    #[serde(serialize_with = "decimal")]
    pub charged: U256,
    /// What was claimed in all.
    #[serde(serialize_with = "decimal")]
    pub claimed: U256,
    /// What can be claimed now.
    #[serde(serialize_with = "decimal")]
    pub unclaimed: U256,
    /// The part of it that withdrawals could take, or that the escrow does not hold.
    #[serde(serialize_with = "decimal")]
    pub at_risk: U256,
    /// What is in escrow and was neither claimed nor charged.
    #[serde(serialize_with = "decimal")]
    pub unspent: U256,
}

impl ChannelReport {
    const fn new(network: Network, asset: Address) -> Self {
        let (charged, claimed, unclaimed, at_risk, unspent) =
            (U256::ZERO, U256::ZERO, U256::ZERO, U256::ZERO, U256::ZERO);
        Self { network, asset, channels: 0, charged, claimed, unclaimed, at_risk, unspent }
    }

    fn add(&mut self, record: &ChannelRecord) {
        let state = &record.observed.state;
        self.channels += 1;
        for (sum, amount) in [
            (&mut self.charged, record.charged()),
            (&mut self.claimed, state.total_claimed),
            (&mut self.unclaimed, record.unclaimed()),
            (&mut self.at_risk, record.at_risk()),
            (&mut self.unspent, state.balance.saturating_sub(record.charged())),
        ] {
            *sum = sum.saturating_add(U256::from(amount));
        }
    }
}

impl Operator {
    /// Sets the ledger that keeps payment channels, often the same one. Without it there are none to list.
    #[must_use]
    pub fn channel_ledger(mut self, ledger: Arc<dyn ChannelLedger>) -> Self {
        self.channels = Some(ledger);
        self
    }

    /// Returns the payment channels that match a filter, one page at a time.
    pub fn channels(&self, which: ChannelFilter) -> ChannelPages {
        ChannelPages { operator: self.clone(), which, after: None }
    }

    /// Exports the payment channels that match a filter.
    pub fn export_channels(&self, which: ChannelFilter, format: ExportFormat) -> ChannelExport {
        ChannelExport { channels: self.channels(which), format, has_header: false }
    }

    /// Sums up all payment channels, by chain and token.
    ///
    /// # Errors
    /// [`LedgerError::Backend`] if the store failed.
    pub async fn channel_report(&self) -> Result<Vec<ChannelReport>, LedgerError> {
        let mut reports = BTreeMap::new();
        let mut channels = self.channels(ChannelFilter::All);
        while let Some(page) = channels.next().await? {
            for record in page {
                let (network, asset) = (record.network, record.config.token);
                reports.entry((network, asset)).or_insert_with(|| ChannelReport::new(network, asset)).add(&record);
            }
        }
        Ok(reports.into_values().collect())
    }
}
