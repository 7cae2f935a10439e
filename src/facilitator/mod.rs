//! Verifying and settling payments.
//!
//! A [`Facilitator`] answers for one or more chains. What is the same for all of them, and needs nobody to be asked, is in
//! [`payment`](crate::payment).

#[cfg(feature = "onchain")]
mod onchain;
#[cfg(feature = "remote")]
mod remote;
#[cfg(feature = "server")]
pub mod service;
#[cfg(any(feature = "remote", feature = "server"))]
mod single_flight;

use std::{fmt, sync::Arc};

use async_trait::async_trait;

#[cfg(feature = "onchain")]
#[doc(hidden)]
pub use crate::chain::batch::batch_calldata;
pub use crate::settlement::{FacilitatorError, NotReady, Readiness};
#[cfg(feature = "onchain")]
pub use onchain::{BatchSettler, OnchainBuildError, OnchainFacilitator, OnchainFacilitatorBuilder, SettlementStats};
#[cfg(feature = "remote")]
pub use remote::{Authenticate, Outgoing, RemoteBuildError, RemoteFacilitator, RemoteFacilitatorBuilder};

use crate::{
    ledger::{Ledger, Record},
    payment::{Outcome, PaymentKey, Prechecked, Rejection, Terms, Verified},
    protocol::SupportedResponse,
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

    /// Whether it makes something of the [`Echo`](crate::payment::Echo) of a payment. A payment is given without it to one that does not, which saves
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
