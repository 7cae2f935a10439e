//! Why a facilitator could not verify or settle a payment.

use std::{sync::Arc, time::Duration};

use alloy_primitives::U256;

#[cfg(feature = "onchain")]
use crate::chain::{fees::FeeError, rpc::RpcFailure};
use crate::ledger::LedgerError;

/// A facilitator could not verify or settle. The call that failed has submitted nothing.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FacilitatorError {
    /// The node or the remote facilitator did not answer, or its answer cannot be used. Try again.
    #[error("{what} is not available")]
    Unreachable {
        /// The service, for logs. Never a URL, which may hold a key.
        what: &'static str,
        /// How long to wait before trying again.
        retry_after: Duration,
    },
    /// A limit is reached. Try again.
    #[error("too much is in progress: {what}")]
    Busy {
        /// The limited resource.
        what: &'static str,
        /// How long to wait before trying again.
        retry_after: Duration,
    },
    /// The settlement key cannot pay for gas. Fund it.
    #[error("the settlement key cannot pay for gas: it holds {balance} wei")]
    InsufficientGas {
        /// Its balance, in wei.
        balance: U256,
    },
    /// The ledger failed.
    #[error("the ledger failed")]
    Ledger(#[source] Arc<LedgerError>),
    /// The configuration cannot work, or there is a defect.
    #[error("{0}")]
    Misconfigured(String),
}

impl FacilitatorError {
    /// Returns how long to wait before trying again.
    pub fn retry_after(&self) -> Duration {
        match self {
            Self::Unreachable { retry_after, .. } | Self::Busy { retry_after, .. } => *retry_after,
            Self::InsufficientGas { .. } | Self::Misconfigured(_) => Duration::from_secs(60),
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
