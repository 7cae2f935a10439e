//! Metrics, with one function per event. Without the feature `metrics`, the functions do nothing.
//!
//! No label holds a value that a payer chooses, such as its address or a nonce.

#![cfg_attr(not(feature = "metrics"), allow(unused_variables, reason = "the functions do nothing then"))]
#![allow(dead_code, reason = "some events need other features")]

pub(crate) mod names;

use std::{sync::Arc, time::Duration};

use alloy_primitives::{Address, U256};

use crate::network::Network;

/// The outcome of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RequestOutcome {
    Free,
    Unpaid,
    Rejected,
    Malformed,
    Conflict,
    Pending,
    Unavailable,
    Failed,
    Unsuccessful,
    Paid,
    Deferred,
    Replayed,
}

// A macro with literals, so that an unpaid request allocates nothing here.
macro_rules! count_by_outcome {
    ($name:path, $outcome:ident) => {
        #[cfg(feature = "metrics")]
        count_by_outcome! {
            $name, $outcome,
            Free "free" Unpaid "unpaid" Rejected "rejected" Malformed "malformed" Conflict "conflict" Pending "pending"
            Unavailable "unavailable" Failed "failed" Unsuccessful "unsuccessful" Paid "paid" Deferred "deferred"
            Replayed "replayed"
        }
    };
    ($name:path, $outcome:ident, $($ended:ident $label:literal)*) => {
        match $outcome {
            $(RequestOutcome::$ended => ::metrics::counter!($name, "outcome" => $label).increment(1),)*
        }
    };
}

/// Counts an answered request to a charged route.
#[inline]
pub(crate) fn request(outcome: RequestOutcome) {
    count_by_outcome!(names::REQUESTS, outcome);
}

/// Counts an answered request that came with a payment by voucher.
#[inline]
pub(crate) fn voucher_request(outcome: RequestOutcome) {
    request(outcome);
    count_by_outcome!(names::VOUCHER_REQUESTS, outcome);
}

/// Counts what was charged for a response.
pub(crate) fn charged(network: Network, asset: Address, route: &Arc<str>, units: U256) {
    #[cfg(feature = "metrics")]
    {
        let labels = vec![
            ::metrics::Label::new("network", network.to_string()),
            ::metrics::Label::new("asset", asset.to_string()),
            ::metrics::Label::new("route", Arc::clone(route)),
        ];
        ::metrics::counter!(names::CHARGED, labels).increment(units.saturating_to());
    }
}

/// Records a verification.
pub(crate) fn verified(network: Network, result: &'static str, took: Duration) {
    #[cfg(feature = "metrics")]
    ::metrics::histogram!(names::VERIFICATION, "network" => network.to_string(), "result" => result).record(took);
}

/// Records a settlement that was answered.
pub(crate) fn settled(network: Network, result: &'static str, took: Duration) {
    #[cfg(feature = "metrics")]
    ::metrics::histogram!(names::SETTLEMENT, "network" => network.to_string(), "result" => result).record(took);
}

/// Records a transaction that was included in a block.
pub(crate) fn included(network: Network, succeeded: bool, gas: u64, cost: U256, took: Duration) {
    #[cfg(feature = "metrics")]
    {
        let result = if succeeded { "succeeded" } else { "reverted" };
        ::metrics::counter!(names::TRANSACTIONS, "network" => network.to_string(), "result" => result).increment(1);
        ::metrics::counter!(names::GAS, "network" => network.to_string()).increment(gas);
        ::metrics::counter!(names::FEES, "network" => network.to_string()).increment(cost.saturating_to());
        ::metrics::histogram!(names::TRANSACTION, "network" => network.to_string()).record(took);
    }
}

/// Records how many payments a transaction was sent to settle.
pub(crate) fn shared(network: Network, payments: usize) {
    #[cfg(feature = "metrics")]
    ::metrics::histogram!(names::PAYMENTS, "network" => network.to_string()).record(payments as f64);
}

/// Counts payments whose fee exceeded their amount.
pub(crate) fn lost(network: Network, payments: u64) {
    #[cfg(feature = "metrics")]
    ::metrics::counter!(names::LOSSES, "network" => network.to_string()).increment(payments);
}

/// Counts a transaction that was replaced at a higher fee.
pub(crate) fn replaced(network: Network, cause: &'static str) {
    #[cfg(feature = "metrics")]
    ::metrics::counter!(names::REPLACEMENTS, "network" => network.to_string(), "cause" => cause).increment(1);
}

/// Counts a filled gap in account nonces.
pub(crate) fn gap_filled(network: Network) {
    #[cfg(feature = "metrics")]
    ::metrics::counter!(names::GAPS, "network" => network.to_string()).increment(1);
}

/// Counts a settlement that a reorganization removed.
pub(crate) fn undone(network: Network) {
    #[cfg(feature = "metrics")]
    ::metrics::counter!(names::UNDONE, "network" => network.to_string()).increment(1);
}

/// Changes the number of account nonces in use.
pub(crate) fn in_flight(more: i8) {
    #[cfg(feature = "metrics")]
    ::metrics::gauge!(names::IN_FLIGHT).increment(f64::from(more));
}

/// Changes the number of payments that are being settled.
pub(crate) fn backlog(more: i8) {
    #[cfg(feature = "metrics")]
    ::metrics::gauge!(names::BACKLOG).increment(f64::from(more));
}

/// Sets the gas balance of a settlement key.
pub(crate) fn gas_tank(network: Network, account: Address, wei: U256) {
    #[cfg(feature = "metrics")]
    ::metrics::gauge!(names::TANK, "network" => network.to_string(), "account" => account.to_string()).set(float(wei));
}

/// Sets whether a facilitator is ready.
pub(crate) fn ready(network: Network, is_ready: bool) {
    #[cfg(feature = "metrics")]
    ::metrics::gauge!(names::READY, "network" => network.to_string()).set(if is_ready { 1.0 } else { 0.0 });
}

/// Records a commit of the SQLite ledger.
pub(crate) fn committed(took: Duration) {
    #[cfg(feature = "metrics")]
    ::metrics::histogram!(names::COMMITS).record(took);
}

/// Adds to the size of stored responses, in bytes.
pub(crate) fn responses(more: usize) {
    #[cfg(feature = "metrics")]
    ::metrics::gauge!(names::RESPONSES).increment(more as f64);
}

/// Subtracts from the size of stored responses, in bytes.
pub(crate) fn responses_gone(fewer: usize) {
    #[cfg(feature = "metrics")]
    ::metrics::gauge!(names::RESPONSES).decrement(fewer as f64);
}

/// Sets the owed and the deferred payments in one token.
pub(crate) fn outstanding(network: Network, asset: Address, owed_payments: u64, deferred_units: U256) {
    #[cfg(feature = "metrics")]
    {
        let labels = [("network", network.to_string()), ("asset", asset.to_string())];
        ::metrics::gauge!(names::OWED, &labels).set(owed_payments as f64);
        ::metrics::gauge!(names::DEFERRED, &labels).set(float(deferred_units));
    }
}

/// Counts an action on payment channels.
pub(crate) fn channel_action(network: Network, action: &'static str, result: &'static str, count: usize) {
    #[cfg(feature = "metrics")]
    {
        let labels = [("network", network.to_string()), ("action", action.to_owned()), ("result", result.to_owned())];
        ::metrics::counter!(names::CHANNEL_ACTIONS, &labels).increment(count as u64);
    }
}

/// Counts the channels of a claim.
pub(crate) fn claims(network: Network, claimed: usize, refused: usize) {
    #[cfg(feature = "metrics")]
    for (result, count) in [("claimed", claimed), ("refused", refused)] {
        ::metrics::counter!(names::CLAIMS, "network" => network.to_string(), "result" => result)
            .increment(count as u64);
    }
}

/// The sums of the payment channels in one token.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ChannelSums {
    pub(crate) open: u64,
    pub(crate) unclaimed: u128,
    pub(crate) at_risk: u128,
    /// The age of the oldest unclaimed charge, in seconds.
    pub(crate) oldest: u64,
}

/// Sets the sums of the payment channels in one token.
pub(crate) fn channels(network: Network, asset: Address, sums: &ChannelSums) {
    #[cfg(feature = "metrics")]
    {
        let labels = [("network", network.to_string()), ("asset", asset.to_string())];
        ::metrics::gauge!(names::CHANNELS_OPEN, &labels).set(sums.open as f64);
        ::metrics::gauge!(names::CHANNELS_UNCLAIMED, &labels).set(sums.unclaimed as f64);
        ::metrics::gauge!(names::CHANNELS_AT_RISK, &labels).set(sums.at_risk as f64);
        ::metrics::gauge!(names::CHANNELS_OLDEST, &labels).set(sums.oldest as f64);
    }
}

/// Sets whether payment channels are ready.
pub(crate) fn channels_ready(network: Network, is_ready: bool) {
    #[cfg(feature = "metrics")]
    ::metrics::gauge!(names::CHANNELS_READY, "network" => network.to_string()).set(if is_ready { 1.0 } else { 0.0 });
}

/// Converts to the nearest number that a gauge can hold.
#[cfg(feature = "metrics")]
fn float(number: U256) -> f64 {
    f64::from(number)
}
