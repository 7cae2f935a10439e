//! Verifying and settling payments.
//!
//! A [`Facilitator`] answers for one or more chains. [`precheck`] is local and the same for all of them: it authenticates a
//! payment before anything is reserved or asked of a node.

mod echo;
#[cfg(any(feature = "remote", feature = "server"))]
mod flights;
#[cfg(feature = "onchain")]
mod onchain;
mod precheck;
mod readiness;
#[cfg(feature = "remote")]
mod remote;
#[cfg(feature = "server")]
pub mod service;
mod terms;

use std::{fmt, sync::Arc, time::Duration};

use alloy_primitives::{B256, U256};
use async_trait::async_trait;

#[cfg(feature = "onchain")]
#[doc(hidden)]
pub use crate::settlement::batch::batch_calldata;
pub use echo::{Echo, MAX_ECHO};
#[cfg(feature = "onchain")]
pub use onchain::{BatchSettler, OnchainBuildError, OnchainFacilitator, OnchainFacilitatorBuilder, SettlementStats};
pub use precheck::{Authenticity, Prechecked, Rejection, Window, precheck};
pub use readiness::{NotReady, Readiness};
#[cfg(feature = "remote")]
pub use remote::{Authenticate, Outgoing, RemoteBuildError, RemoteFacilitator, RemoteFacilitatorBuilder};
pub use terms::Terms;

use crate::{
    ledger::{Funds, Ledger, LedgerError, PaymentKey, Record, SettlementStep},
    protocol::{Reason, SupportedResponse},
};

/// Verifies payments and moves the money.
///
/// # Contract
///
/// - [`verify`](Self::verify) changes nothing, here or on the chain.
/// - [`settle`](Self::settle) records the hash of every transaction in the [`ledger`](Self::ledger) before it leaves the
///   process, and runs to an [`Outcome`] in bounded time. One that records nothing, because what it asks moves the money, is
///   asked again after a crash that comes between its outcome and the ledger's next write: it must then tell the same outcome.
/// - An outcome is `Settled` only if exactly the authorized amount reached the payee by this authorization. What cannot be
///   told is `Unknown`, never `Failed`.
#[async_trait]
pub trait Facilitator: fmt::Debug + Send + Sync + 'static {
    /// The ledger in which this facilitator journals. Whoever charges through it reserves payments in the same one.
    fn ledger(&self) -> &Arc<dyn Ledger>;

    /// Whether it can settle what is paid under these terms. Local; used when a layer is built.
    fn serves(&self, terms: &Terms) -> bool;

    /// What it supports, as a facilitator's `/supported` tells it.
    ///
    /// # Errors
    /// [`FacilitatorError`] if that cannot be told now.
    async fn supported(&self) -> Result<SupportedResponse, FacilitatorError>;

    /// Whether the payment could be settled now.
    ///
    /// # Errors
    /// [`VerifyError::Invalid`] says what is wrong with the payment; [`VerifyError::Unavailable`] that nobody could tell.
    async fn verify(&self, payment: &Prechecked) -> Result<Verified, VerifyError>;

    /// Moves the money of a payment that was verified and admitted. Of one that this process settles already it tells the outcome of
    /// that, or [`Outcome::Unknown`]. Of one that failed since it was presented ([`Prechecked::known_failures`]) it tells that.
    ///
    /// # Errors
    /// [`FacilitatorError`] if nothing was submitted: the payment stays due and may be settled later.
    async fn settle(&self, payment: &Prechecked, verified: &Verified) -> Result<Outcome, FacilitatorError>;

    /// Returns the number under which it takes payments in the ledger ([`Settling::by`](crate::ledger::Settling::by)); 0 if not
    /// overridden, for a facilitator that takes none. Failures that it tells of are recorded under this number.
    fn process(&self) -> u64 {
        0
    }

    /// Finds out what became of a payment whose settlement was not seen to end.
    ///
    /// # Errors
    /// [`FacilitatorError`] if that cannot be told now.
    async fn reconcile(&self, record: &Record) -> Result<Outcome, FacilitatorError>;

    /// Whether a payment could be settled now, and if not, why: for a load balancer's check. Cheap enough to be asked often. If not
    /// overridden, whether the ledger answers.
    async fn readiness(&self) -> Readiness {
        Readiness::of_ledger(&**self.ledger()).await
    }

    /// Whether it makes something of the [`Echo`] of a payment. A payment is given without it to one that does not, which saves
    /// copying it. `false` if not overridden.
    fn reads_echo(&self) -> bool {
        false
    }

    /// Whether it settles by itself every payment in its ledger that is due and that nobody looks after. Only then may a
    /// layer [defer](crate::ledger::FulfilmentStep::Defer) payments: nobody else would settle them. `false` if not
    /// overridden.
    fn settles_due(&self) -> bool {
        false
    }

    /// Hints that a payment has been left to it to settle. Returns at once and keeps nothing of the payment but what is in
    /// the ledger. Does nothing if not overridden: what [settles by itself](Self::settles_due) finds the payment sooner or
    /// later.
    fn settle_soon(&self, _payment: &PaymentKey) {}
}

/// So that one facilitator can serve several layers.
#[async_trait]
impl<F: Facilitator + ?Sized> Facilitator for Arc<F> {
    fn ledger(&self) -> &Arc<dyn Ledger> {
        (**self).ledger()
    }

    fn serves(&self, terms: &Terms) -> bool {
        (**self).serves(terms)
    }

    async fn supported(&self) -> Result<SupportedResponse, FacilitatorError> {
        (**self).supported().await
    }

    async fn verify(&self, payment: &Prechecked) -> Result<Verified, VerifyError> {
        (**self).verify(payment).await
    }

    async fn settle(&self, payment: &Prechecked, verified: &Verified) -> Result<Outcome, FacilitatorError> {
        (**self).settle(payment, verified).await
    }

    fn process(&self) -> u64 {
        (**self).process()
    }

    async fn reconcile(&self, record: &Record) -> Result<Outcome, FacilitatorError> {
        (**self).reconcile(record).await
    }

    async fn readiness(&self) -> Readiness {
        (**self).readiness().await
    }

    fn reads_echo(&self) -> bool {
        (**self).reads_echo()
    }

    fn settles_due(&self) -> bool {
        (**self).settles_due()
    }

    fn settle_soon(&self, payment: &PaymentKey) {
        (**self).settle_soon(payment);
    }
}

/// What a verifier found, good for a few seconds.
#[derive(Clone, Copy, Debug, Default)]
pub struct Verified {
    /// The payer's balance, where the verifier leaves it to the ledger to compare it with what is in flight.
    pub funds: Option<Funds>,
    /// Gas that the transfer took in simulation.
    pub gas: Option<u64>,
    /// When, in Unix seconds.
    pub at: u64,
    /// Whether the payer has code, which judges the signature and is run when the payment is settled: such a payment gets a
    /// transaction of its own.
    pub contract_wallet: bool,
}

/// Why a payment was not verified.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum VerifyError {
    /// The payment is not good; nothing was charged.
    #[error(transparent)]
    Invalid(#[from] Rejection),
    /// Nobody could tell; the same payment may be presented again.
    #[error(transparent)]
    Unavailable(#[from] FacilitatorError),
}

/// What became of a settlement.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The payee was paid.
    Settled {
        /// The transaction that paid.
        transaction: B256,
        /// Its block, if known.
        block: Option<u64>,
        /// This payment's share of what the transaction cost, in wei, if the facilitator paid for it and says so.
        fee: Option<U256>,
    },
    /// Not executed.
    Failed {
        /// Why.
        reason: Reason,
        /// The same for people.
        detail: String,
        /// The transaction that was included and did not pay, if there is one.
        transaction: Option<B256>,
        /// Whether it is proven that the authorization can never be executed any more. Without the proof it is only not
        /// executed *yet*.
        dead: bool,
    },
    /// It cannot be told yet.
    Unknown {
        /// The transaction that may pay, if there is one.
        transaction: Option<B256>,
    },
}

impl Outcome {
    /// Returns the step that records it in the ledger, `by` the [process](Facilitator::process) of the facilitator that told it.
    pub fn step(&self, by: u64) -> SettlementStep {
        match self.clone() {
            Self::Settled { transaction, block, fee } => SettlementStep::Settle { transaction, block, fee },
            Self::Failed { reason, dead: true, .. } => SettlementStep::Die { reason },
            Self::Failed { reason, .. } => SettlementStep::Fail { reason, by },
            Self::Unknown { .. } => SettlementStep::LoseSight,
        }
    }
}

/// What the ledger knows of a payment that it refused to have settled: it is paid, it failed after this settlement was asked for, or
/// another process is at it.
#[cfg(any(feature = "onchain", feature = "remote"))]
pub(crate) fn as_recorded(record: &Record, asked: &Prechecked) -> Outcome {
    use crate::ledger::Settlement;

    let transaction = record.transactions.last().copied();
    match (record.settlement, &record.last_failure) {
        (Settlement::Settled { transaction, block } | Settlement::Final { transaction, block }, _) => {
            Outcome::Settled { transaction, block, fee: record.fee }
        }
        (Settlement::Due, Some(reason)) if record.failures != asked.known_failures() => {
            let detail =
                "an attempt to settle this payment failed elsewhere; presenting it again tries anew".to_owned();
            Outcome::Failed { reason: reason.clone(), detail, transaction, dead: false }
        }
        _ => Outcome::Unknown { transaction },
    }
}

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

impl PaymentKey {
    /// The key of a payment under `terms`.
    pub fn of(terms: &Terms, authorization: &crate::eip3009::Authorization) -> Self {
        let asset = &terms.offer().asset;
        Self { network: asset.network, asset: asset.address, payer: authorization.from, nonce: authorization.nonce }
    }
}
