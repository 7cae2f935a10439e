//! Whether payments could be settled now.

use std::fmt;

use alloy_primitives::U256;

use crate::ledger::{Ledger, Listing};

/// What [`Facilitator::readiness`](crate::facilitator::Facilitator::readiness) found.
///
/// ```
/// use tower_x402::facilitator::{NotReady, Readiness};
///
/// let readiness = Readiness { reasons: vec![NotReady::Node] };
/// assert!(!readiness.is_ready());
/// assert_eq!(readiness.to_string(), "not ready: the node does not answer");
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Readiness {
    /// What is in the way; empty if nothing is.
    pub reasons: Vec<NotReady>,
}

/// Why payments could not be settled now.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NotReady {
    /// The ledger cannot be asked.
    #[error("the ledger fails")]
    Ledger,
    /// The node does not answer.
    #[error("the node does not answer")]
    Node,
    /// The facilitator elsewhere does not answer.
    #[error("the facilitator does not answer")]
    Facilitator,
    /// What an earlier process left behind is still looked at; nothing new is signed before that.
    #[error("what an earlier process left behind is still being looked at")]
    CatchingUp,
    /// As many payments wait for settlement as may.
    #[error("{waiting} payments wait for settlement")]
    Backlog {
        /// How many wait.
        waiting: usize,
    },
    /// No settlement key can pay for a transaction.
    #[error("the settlement key cannot pay for gas: it holds {balance} wei")]
    GasTank {
        /// What the richest one holds, in wei.
        balance: U256,
    },
    /// Gas costs more than is allowed.
    #[error("gas costs more than is allowed here")]
    GasPrice,
    /// It was told to stop.
    #[error("it is shutting down")]
    ShuttingDown,
}

impl NotReady {
    /// A word for machines: `ledger`, `node`, `facilitator`, `catching_up`, `backlog`, `gas_tank`, `gas_price` or `shutting_down`.
    pub const fn code(&self) -> &'static str {
        match self {
            Self::Ledger => "ledger",
            Self::Node => "node",
            Self::Facilitator => "facilitator",
            Self::CatchingUp => "catching_up",
            Self::Backlog { .. } => "backlog",
            Self::GasTank { .. } => "gas_tank",
            Self::GasPrice => "gas_price",
            Self::ShuttingDown => "shutting_down",
        }
    }
}

impl Readiness {
    /// Whether nothing is in the way.
    pub const fn is_ready(&self) -> bool {
        self.reasons.is_empty()
    }

    /// Whether the ledger answers, which is all that is common to facilitators.
    pub(crate) async fn of_ledger(ledger: &dyn Ledger) -> Self {
        let answer = ledger.list(&Listing { limit: 1, ..Listing::default() }).await;
        Self { reasons: answer.is_err().then_some(NotReady::Ledger).into_iter().collect() }
    }
}

impl fmt::Display for Readiness {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, reason) in self.reasons.iter().enumerate() {
            write!(f, "{}{reason}", if index == 0 { "not ready: " } else { "; " })?;
        }
        if self.is_ready() { f.write_str("ready") } else { Ok(()) }
    }
}
