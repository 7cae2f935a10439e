//! The size of a run.

use std::{env, str::FromStr};

/// The size of a run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Plan {
    pub(crate) payments: u64,
    pub(crate) payers: usize,
    /// The number of payments in flight at a time.
    pub(crate) at_once: usize,
    /// The share of RPC calls that fail.
    pub(crate) faults: f64,
    pub(crate) seed: u64,
}

impl Plan {
    /// Creates a plan with these numbers, unless the environment sets others.
    pub(crate) fn of(payments: u64, payers: usize) -> Self {
        Self {
            payments: from_env("SOAK_PAYMENTS", payments),
            payers: from_env("SOAK_PAYERS", payers),
            at_once: from_env("SOAK_AT_ONCE", 96),
            faults: from_env("SOAK_FAULTS", 10.0) / 100.0,
            seed: from_env("SOAK_SEED", 402),
        }
    }
}

pub(crate) fn from_env<T: FromStr>(name: &str, default: T) -> T {
    match env::var(name) {
        Ok(text) => text.parse().unwrap_or_else(|_| panic!("{name} is not a number: {text}")),
        Err(_) => default,
    }
}
