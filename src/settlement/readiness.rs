//! Whether payments could be settled now, and why not.

use std::fmt;
#[cfg(any(feature = "onchain", feature = "remote", feature = "server"))]
use std::{future::Future, time::Duration};

use alloy_primitives::U256;
#[cfg(any(feature = "onchain", feature = "remote", feature = "server"))]
use tokio::{sync::Mutex, time::Instant};

use crate::ledger::{Ledger, Listing};

/// The answer of [`Facilitator::readiness`](crate::facilitator::Facilitator::readiness): ready, or the reasons why not.
///
/// ```
/// use tower_x402::facilitator::{NotReady, Readiness};
///
/// let readiness = Readiness::from(NotReady::Node);
/// assert!(!readiness.is_ready());
/// assert_eq!(readiness.to_string(), "not ready: the node does not answer");
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Readiness {
    /// The reasons why payments could not be settled. Empty if they could.
    pub reasons: Vec<NotReady>,
}

/// A reason why payments could not be settled now.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NotReady {
    /// The ledger fails.
    #[error("the ledger fails")]
    Ledger,
    /// The node does not answer.
    #[error("the node does not answer")]
    Node,
    /// The node's newest block is further from the clock than the channels' `max_block_age`: the node would not show withdrawals from them.
    #[error("the node's newest block and this clock are {age} seconds apart")]
    NodeBehind {
        /// The time between its newest block and now, in seconds.
        age: u64,
    },
    /// The node refuses receipts, without which no payment can be confirmed.
    #[error("the node refuses receipts of transactions (eth_getTransactionReceipt): use one that gives them")]
    Receipts,
    /// The remote facilitator does not answer.
    #[error("the facilitator does not answer")]
    Facilitator,
    /// Payments of an earlier process are still being reconciled. No transaction is signed before that.
    #[error("payments of an earlier process are still being reconciled")]
    CatchingUp,
    /// The queue of payments to settle is full.
    #[error("{waiting} payments wait for settlement")]
    Backlog {
        /// How many payments wait.
        waiting: usize,
    },
    /// No key that sends transactions can pay for one.
    #[error("the key that sends transactions cannot pay for gas: it holds {balance} wei")]
    InsufficientGas {
        /// The highest balance of such a key, in wei.
        balance: U256,
    },
    /// Gas costs more than the configured maximum.
    #[error("gas costs more than is allowed here")]
    GasPrice,
    /// Withdrawals from payment channels could take what was charged, and the last attempt to claim it failed.
    #[error("claims fail while withdrawals could take {units} atomic units that were charged on payment channels")]
    ClaimsFail {
        /// The amount that could be lost, in atomic units.
        units: u128,
    },
    /// The facilitator is shutting down.
    #[error("it is shutting down")]
    ShuttingDown,
}

impl NotReady {
    /// Returns a code for programs: `ledger`, `node`, `node_behind`, `receipts`, `facilitator`, `catching_up`, `backlog`, `gas_tank`,
    /// `gas_price`, `claims_fail` or `shutting_down`.
    pub const fn code(&self) -> &'static str {
        match self {
            Self::Ledger => "ledger",
            Self::Node => "node",
            Self::NodeBehind { .. } => "node_behind",
            Self::Receipts => "receipts",
            Self::Facilitator => "facilitator",
            Self::CatchingUp => "catching_up",
            Self::Backlog { .. } => "backlog",
            Self::InsufficientGas { .. } => "gas_tank",
            Self::GasPrice => "gas_price",
            Self::ClaimsFail { .. } => "claims_fail",
            Self::ShuttingDown => "shutting_down",
        }
    }
}

impl Readiness {
    /// Returns `true` if payments could be settled.
    pub const fn is_ready(&self) -> bool {
        self.reasons.is_empty()
    }

    /// Checks the ledger, which all facilitators have.
    pub(crate) async fn of_ledger(ledger: &dyn Ledger) -> Self {
        let answer = ledger.list(&Listing { limit: 1, ..Listing::default() }).await;
        Self { reasons: answer.is_err().then_some(NotReady::Ledger).into_iter().collect() }
    }
}

impl From<NotReady> for Readiness {
    fn from(reason: NotReady) -> Self {
        Self { reasons: vec![reason] }
    }
}

impl FromIterator<NotReady> for Readiness {
    fn from_iter<I: IntoIterator<Item = NotReady>>(reasons: I) -> Self {
        Self { reasons: reasons.into_iter().collect() }
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

/// The last readiness, for a short time: a load balancer that asks often does not load the node.
#[cfg(any(feature = "onchain", feature = "remote", feature = "server"))]
#[derive(Debug)]
pub(crate) struct ReadinessCache {
    ttl: Duration,
    last: Mutex<Option<(Instant, Readiness)>>,
}

#[cfg(any(feature = "onchain", feature = "remote", feature = "server"))]
impl ReadinessCache {
    pub(crate) fn new(ttl: Duration) -> Self {
        Self { ttl, last: Mutex::default() }
    }

    /// Returns the cached readiness, or else runs the check. Concurrent callers share one check.
    pub(crate) async fn get_or_check(&self, check: impl Future<Output = Readiness>) -> Readiness {
        let mut last = self.last.lock().await;
        if let Some((at, readiness)) = &*last
            && at.elapsed() < self.ttl
        {
            return readiness.clone();
        }
        let readiness = check.await;
        *last = Some((Instant::now(), readiness.clone()));
        readiness
    }
}
