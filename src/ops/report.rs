//! A ledger summed up.

use std::collections::BTreeMap;

use alloy_primitives::{Address, U256};
use serde::{Serialize, Serializer};

use crate::{
    ledger::{Record, SettlementState},
    network::Network,
};

/// What is in a ledger, by token. Records age out some time after their authorizations have: what was forgotten is not in it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Report {
    /// A part per token that anything was paid or to be paid in.
    pub assets: Vec<AssetReport>,
}

/// Payments in one token.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct AssetReport {
    /// The chain.
    pub network: Network,
    /// The token.
    pub asset: Address,
    /// Payments by state of settlement.
    #[serde(serialize_with = "by_name")]
    pub states: BTreeMap<SettlementState, Sum>,
    /// Those that are paid.
    pub paid: Sum,
    /// Of these, the ones whose payer has nothing for it: see [`Operator::is_owed`](super::Operator::is_owed).
    pub owed: Sum,
    /// Those that were answered on credit and are not paid.
    pub deferred: Sum,
    /// What settling the paid ones cost, in wei, where this ledger's facilitator paid for it.
    #[serde(serialize_with = "decimal")]
    pub fees_wei: U256,
}

/// Some payments.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Sum {
    /// How many.
    pub payments: u64,
    /// What they are together, in atomic units.
    #[serde(serialize_with = "decimal")]
    pub units: U256,
}

impl Report {
    pub(super) fn add(&mut self, record: &Record, is_owed: bool) {
        let key = &record.key;
        let place = |report: &AssetReport| (report.network, report.asset).cmp(&(key.network, key.asset));
        let index = match self.assets.binary_search_by(place) {
            Ok(index) => index,
            Err(index) => {
                self.assets.insert(index, AssetReport::new(key.network, key.asset));
                index
            }
        };
        if let Some(report) = self.assets.get_mut(index) {
            report.add(record, is_owed);
        }
    }
}

impl AssetReport {
    fn new(network: Network, asset: Address) -> Self {
        let (paid, owed, deferred) = Default::default();
        Self { network, asset, states: BTreeMap::new(), paid, owed, deferred, fees_wei: U256::ZERO }
    }

    fn add(&mut self, record: &Record, is_owed: bool) {
        let value = record.authorization.value;
        self.states.entry(record.settlement.state()).or_default().add(value);
        if record.settlement.paid_by().is_some() {
            self.paid.add(value);
            self.fees_wei = self.fees_wei.saturating_add(record.fee.unwrap_or_default());
        }
        if is_owed {
            self.owed.add(value);
        }
        if !record.owed().is_zero() {
            self.deferred.add(value);
        }
    }
}

impl Sum {
    fn add(&mut self, value: U256) {
        self.payments += 1;
        self.units = self.units.saturating_add(value);
    }
}

/// JSON numbers are too small for it.
fn decimal<S: Serializer>(number: &U256, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(number)
}

fn by_name<S: Serializer>(states: &BTreeMap<SettlementState, Sum>, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_map(states.iter().map(|(state, sum)| (state.as_str(), sum)))
}
