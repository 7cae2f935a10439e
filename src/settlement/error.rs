//! Why verifying or settling was not possible.

use std::{sync::Arc, time::Duration};

use alloy_primitives::U256;

#[cfg(feature = "onchain")]
use crate::chain::{fees::FeeError, rpc::RpcFailure};
use crate::ledger::LedgerError;

/// A facilitator could not do its work; nothing was submitted by the call that failed.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FacilitatorError {
    /// The node or the remote facilitator did not answer, or answered nonsense.
    #[error("{what} is not available")]
    Unreachable {
        /// Who, for logs: never a URL, which may hold a key.
        what: &'static str,
        /// When to try again.
        retry_after: Duration,
    },
    /// As much as allowed is in progress.
    #[error("too much is in progress: {what}")]
    Busy {
        /// What is at its bound.
        what: &'static str,
        /// When to try again.
        retry_after: Duration,
    },
    /// The settlement key cannot pay for gas.
    #[error("the settlement key cannot pay for gas: it holds {balance} wei")]
    GasTank {
        /// What it holds.
        balance: U256,
    },
    /// The ledger failed.
    #[error("the ledger failed")]
    Ledger(#[source] Arc<LedgerError>),
    /// A defect, or a configuration that cannot work.
    #[error("{0}")]
    Misconfigured(String),
}

impl FacilitatorError {
    /// When to try again.
    pub fn retry_after(&self) -> Duration {
        match self {
            Self::Unreachable { retry_after, .. } | Self::Busy { retry_after, .. } => *retry_after,
            Self::GasTank { .. } | Self::Misconfigured(_) => Duration::from_secs(60),
            Self::Ledger(_) => Duration::from_secs(5),
        }
    }
}

impl From<LedgerError> for FacilitatorError {
    fn from(error: LedgerError) -> Self {
        Self::Ledger(Arc::new(error))
    }
}

#[cfg(feature = "onchain")]
impl From<RpcFailure> for FacilitatorError {
    fn from(_: RpcFailure) -> Self {
        Self::Unreachable { what: "the chain's node", retry_after: Duration::from_secs(2) }
    }
}

#[cfg(feature = "onchain")]
impl From<FeeError> for FacilitatorError {
    fn from(error: FeeError) -> Self {
        match error {
            FeeError::Rpc(failure) => failure.into(),
            FeeError::TooHigh { retry_after } => {
                Self::Busy { what: "gas costs more than is allowed here", retry_after }
            }
        }
    }
}
