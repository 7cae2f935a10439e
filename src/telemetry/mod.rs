//! What is counted, a function per event. Without the feature `metrics` all of this is nothing.
//!
//! No label holds what a payer chose: neither addresses of payers nor nonces.

#![cfg_attr(not(feature = "metrics"), allow(unused_variables, reason = "nothing is counted"))]
#![allow(dead_code, reason = "who counts what depends on the features")]

pub(crate) mod names;

use std::time::Duration;

use alloy_primitives::{Address, U256};

use crate::network::Network;

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ended {
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

/// A request to what is charged for was answered.
#[inline]
pub(crate) fn request(ended: Ended) {
    #[cfg(feature = "metrics")]
    {
        // Literals, so that nothing is allocated for those who do not pay.
        macro_rules! count {
            ($($ended:ident $label:literal)*) => {
                match ended {
                    $(Ended::$ended => ::metrics::counter!(names::REQUESTS, "outcome" => $label).increment(1),)*
                }
            };
        }
        count! {
            Free "free" Unpaid "unpaid" Rejected "rejected" Malformed "malformed" Conflict "conflict" Pending "pending"
            Unavailable "unavailable" Failed "failed" Unsuccessful "unsuccessful" Paid "paid" Deferred "deferred"
            Replayed "replayed"
        }
    }
}

/// A facilitator service answered.
pub(crate) fn served(endpoint: &'static str, status: u16) {
    #[cfg(feature = "metrics")]
    ::metrics::counter!(names::SERVED, "endpoint" => endpoint, "status" => status.to_string()).increment(1);
}

/// A payment was verified, or not.
pub(crate) fn verified(network: Network, result: &'static str, took: Duration) {
    #[cfg(feature = "metrics")]
    ::metrics::histogram!(names::VERIFICATION, "network" => network.to_string(), "result" => result).record(took);
}

/// Somebody was told what became of a payment.
pub(crate) fn settled(network: Network, result: &'static str, took: Duration) {
    #[cfg(feature = "metrics")]
    ::metrics::histogram!(names::SETTLEMENT, "network" => network.to_string(), "result" => result).record(took);
}

/// A transaction of ours is in a block.
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

/// It was to settle so many payments.
pub(crate) fn shared(network: Network, payments: usize) {
    #[cfg(feature = "metrics")]
    ::metrics::histogram!(names::PAYMENTS, "network" => network.to_string()).record(payments as f64);
}

/// So many payments brought in less than they cost.
pub(crate) fn lost(network: Network, payments: u64) {
    #[cfg(feature = "metrics")]
    ::metrics::counter!(names::LOSSES, "network" => network.to_string()).increment(payments);
}

/// A transaction was sent anew for a better price.
pub(crate) fn replaced(network: Network, cause: &'static str) {
    #[cfg(feature = "metrics")]
    ::metrics::counter!(names::REPLACEMENTS, "network" => network.to_string(), "cause" => cause).increment(1);
}

/// A gap in the nonces was filled.
pub(crate) fn gap_filled(network: Network) {
    #[cfg(feature = "metrics")]
    ::metrics::counter!(names::GAPS, "network" => network.to_string()).increment(1);
}

/// A reorganization undid a settlement.
pub(crate) fn undone(network: Network) {
    #[cfg(feature = "metrics")]
    ::metrics::counter!(names::UNDONE, "network" => network.to_string()).increment(1);
}

/// So many more nonces are in use.
pub(crate) fn in_flight(more: i8) {
    #[cfg(feature = "metrics")]
    ::metrics::gauge!(names::IN_FLIGHT).increment(f64::from(more));
}

/// So many more payments are being settled.
pub(crate) fn backlog(more: i8) {
    #[cfg(feature = "metrics")]
    ::metrics::gauge!(names::BACKLOG).increment(f64::from(more));
}

/// What a settlement key has for gas.
pub(crate) fn gas_tank(network: Network, account: Address, wei: U256) {
    #[cfg(feature = "metrics")]
    ::metrics::gauge!(names::TANK, "network" => network.to_string(), "account" => account.to_string()).set(float(wei));
}

/// Whether a facilitator is ready.
pub(crate) fn ready(network: Network, is_ready: bool) {
    #[cfg(feature = "metrics")]
    ::metrics::gauge!(names::READY, "network" => network.to_string()).set(if is_ready { 1.0 } else { 0.0 });
}

/// The SQLite ledger wrote.
pub(crate) fn committed(took: Duration) {
    #[cfg(feature = "metrics")]
    ::metrics::histogram!(names::COMMITS).record(took);
}

/// So many more bytes of responses are kept.
pub(crate) fn responses(more: usize) {
    #[cfg(feature = "metrics")]
    ::metrics::gauge!(names::RESPONSES).increment(more as f64);
}

/// So many fewer.
pub(crate) fn responses_gone(fewer: usize) {
    #[cfg(feature = "metrics")]
    ::metrics::gauge!(names::RESPONSES).decrement(fewer as f64);
}

/// What is open between seller and buyers in one token.
pub(crate) fn outstanding(network: Network, asset: Address, owed_payments: u64, deferred_units: U256) {
    #[cfg(feature = "metrics")]
    {
        let labels = [("network", network.to_string()), ("asset", asset.to_string())];
        ::metrics::gauge!(names::OWED, &labels).set(owed_payments as f64);
        ::metrics::gauge!(names::DEFERRED, &labels).set(float(deferred_units));
    }
}

/// To the nearest number that a gauge can hold.
#[cfg(feature = "metrics")]
fn float(number: U256) -> f64 {
    f64::from(number)
}
