//! Sums over the payments of a ledger.

use std::collections::BTreeMap;

use alloy_primitives::{Address, U256};
use serde::{Serialize, Serializer};

use crate::{
    ledger::{Record, SettlementState},
    network::Network,
};

/// The sums of a ledger, by token.
///
/// They cover the period for which the ledger keeps records: a payment is removed some time after its authorization has expired.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct PeriodReport {
    /// The sums per token.
    pub assets: Vec<AssetReport>,
}

/// The sums of payments in one token.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct AssetReport {
    /// The chain.
    pub network: Network,
    /// The token's address.
    pub asset: Address,
    /// All payments, by state of settlement.
    #[serde(serialize_with = "by_name")]
    pub states: BTreeMap<SettlementState, PaymentSum>,
    /// Payments that are settled.
    pub paid: PaymentSum,
    /// Settled payments that were not delivered whole: see [`Operator::is_owed`](super::Operator::is_owed).
    pub owed: PaymentSum,
    /// Payments that were delivered and are not settled yet.
    pub deferred: PaymentSum,
    /// The cost of settling them, in wei, for transactions that this ledger's facilitator sent.
    #[serde(serialize_with = "decimal")]
    pub fees_wei: U256,
}

/// A number of payments and their sum.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct PaymentSum {
    /// The number of payments.
    pub payments: u64,
    /// Their sum, in atomic units.
    #[serde(serialize_with = "decimal")]
    pub units: U256,
}

impl AssetReport {
    pub(super) fn new(network: Network, asset: Address) -> Self {
        let (paid, owed, deferred) = Default::default();
        Self { network, asset, states: BTreeMap::new(), paid, owed, deferred, fees_wei: U256::ZERO }
    }

    pub(super) fn add(&mut self, record: &Record, is_owed: bool) {
        let value = record.amount();
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

impl PaymentSum {
    fn add(&mut self, value: U256) {
        self.payments += 1;
        self.units = self.units.saturating_add(value);
    }
}

/// Writes a decimal string, because JSON numbers lose precision.
pub(super) fn decimal<S: Serializer>(number: &U256, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(number)
}

fn by_name<S: Serializer>(states: &BTreeMap<SettlementState, PaymentSum>, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_map(states.iter().map(|(state, sum)| (state.as_str(), sum)))
}
