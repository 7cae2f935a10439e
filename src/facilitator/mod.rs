//! Verifying and settling payments, on a chain or through another facilitator.
//!
//! A [`Facilitator`] serves one or more chains. The checks that need neither a chain nor a ledger are in [`payment`](crate::payment).

pub mod channels;
#[cfg(feature = "onchain")]
mod onchain;
#[cfg(feature = "remote")]
mod remote;
#[cfg(any(feature = "onchain", feature = "remote", feature = "server"))]
pub(crate) mod single_flight;

use std::{fmt, sync::Arc};

use async_trait::async_trait;
use auto_impl::auto_impl;

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
    network::Network,
    payment::{PaymentKey, Prechecked, Rejection, SettlementOutcome, Terms, Verified},
    protocol::{SupportedResponse, TransferMethod},
};

/// Verifies and settles payments.
///
/// # Contract
///
/// - [`verify`](Self::verify) changes nothing, here or on the chain.
/// - [`settle`](Self::settle) records the hash of every transaction in the [`ledger`](Self::ledger) before the transaction leaves the
///   process. It returns an [`SettlementOutcome`] in bounded time. A facilitator that sends no transactions itself is asked again if the
///   process crashes between its outcome and the ledger's next write. It must then return the same outcome.
/// - An outcome is `Settled` only if what was signed transferred exactly the payment's [amount](Prechecked::amount) to the payee. An indeterminate
///   outcome is `Unknown`, never `Failed`.
// One facilitator can serve several layers, behind an `Arc`.
#[async_trait]
#[auto_impl(Arc)]
pub trait Facilitator: fmt::Debug + Send + Sync + 'static {
    /// Returns the ledger in which this facilitator records transactions and outcomes. A server that charges through it reserves payments
    /// in the same ledger.
    fn ledger(&self) -> &Arc<dyn Ledger>;

    /// Returns `true` if it can settle payments under these terms. Called when a layer is built; asks nobody.
    fn serves(&self, terms: &Terms) -> bool;

    /// Returns `true` if it can say what became of a payment under these terms that is on record, also if it has lost the key to settle
    /// another one like it. Asks nobody. Default: as [`serves`](Self::serves).
    fn knows(&self, terms: &Terms) -> bool {
        self.serves(terms)
    }

    /// Returns the methods by permit that it settles on this network, as offers have them. Called when a layer is built; asks nobody. The
    /// account that a method names must be the same in every process of a seller, whose offers differ otherwise. Default: none.
    fn permit_methods(&self, _network: Network) -> Vec<TransferMethod> {
        Vec::new()
    }

    /// Returns the payment kinds that it supports, as in the response of `GET /supported`.
    ///
    /// # Errors
    /// [`FacilitatorError`] if they are not known now.
    async fn supported(&self) -> Result<SupportedResponse, FacilitatorError>;

    /// Checks that the payment would be executed if it were settled now.
    ///
    /// # Errors
    /// [`VerifyError::Invalid`] if it would fail, with the reason. [`VerifyError::Unavailable`] if that could not be checked.
    async fn verify(&self, payment: &Prechecked) -> Result<Verified, VerifyError>;

    /// Settles a payment that was verified and admitted.
    ///
    /// If this process settles the payment already, returns the outcome of that settlement, or [`SettlementOutcome::Unknown`]. If the payment has
    /// failed since it was presented ([`Prechecked::known_failures`]), returns that failure. A failure names the newest transaction that was
    /// journalled for the payment: the ledger refuses one that does not know of it.
    ///
    /// # Errors
    /// [`FacilitatorError`] if nothing was submitted: the payment stays due and may be settled later.
    async fn settle(&self, payment: &Prechecked, verified: &Verified) -> Result<SettlementOutcome, FacilitatorError>;

    /// Returns the number under which this process claims payments in the ledger ([`Settling::by`](crate::ledger::Settling::by)), and
    /// under which its failures are recorded. Default: 0, for a facilitator that claims none.
    fn process_id(&self) -> u64 {
        0
    }

    /// Returns the gas that transactions of this process have used since it was built. Default: 0, for one that somebody else sends
    /// transactions for. The service of the crate `x402-facilitator` bounds it by the hour.
    fn gas_used(&self) -> u64 {
        0
    }

    /// Returns the outcome of a payment whose settlement was not followed to its end.
    ///
    /// It is also called for payments that nobody wants settled now ([`Settlement::None`](crate::ledger::Settlement::None) and
    /// [`Due`](crate::ledger::Settlement::Due)), to find out whether somebody else executed them. Of these it looks at the chain, if it can,
    /// and sends nothing: a payment that nobody is known to have executed has [failed](SettlementOutcome::Failed), and is not dead.
    ///
    /// # Errors
    /// [`FacilitatorError`] if it could not be looked up.
    async fn reconcile(&self, record: &Record) -> Result<SettlementOutcome, FacilitatorError>;

    /// Returns whether payments could be settled now, and why not. For the health check of a load balancer: may be called often.
    /// Default: checks that the ledger answers.
    async fn readiness(&self) -> Readiness {
        Readiness::of_ledger(&**self.ledger()).await
    }

    /// Returns `true` if it uses the [`EchoedMetadata`](crate::payment::EchoedMetadata) of a payment: the `resource` and `extensions` that the client
    /// returned. Otherwise payments come without it, which saves copying. Default: `false`.
    fn uses_extensions(&self) -> bool {
        false
    }

    /// Returns `true` if it settles, in the background, every payment in its ledger that is owed. Only then may a layer
    /// [defer](crate::ledger::FulfilmentStep::Defer) payments: nobody else would settle them. Default: `false`.
    fn settles_in_background(&self) -> bool {
        false
    }

    /// Notifies the facilitator that a payment was deferred, so that it settles the payment soon. Returns at once. Default: does
    /// nothing; a facilitator that [settles in the background](Self::settles_in_background) finds the payment in the ledger later.
    fn settle_soon(&self, _payment: &PaymentKey) {}
}

/// Why a payment was not verified.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum VerifyError {
    /// The payment would fail. Nothing was charged.
    #[error(transparent)]
    Invalid(#[from] Rejection),
    /// The payment could not be checked. The same payment may be presented again.
    #[error(transparent)]
    Unavailable(#[from] FacilitatorError),
}

/// Returns the metric label of a verification's result.
#[cfg(any(feature = "onchain", feature = "remote"))]
fn verification_label(verified: &Result<Verified, VerifyError>) -> &'static str {
    match verified {
        Ok(_) => "valid",
        Err(VerifyError::Invalid(_)) => "invalid",
        Err(VerifyError::Unavailable(_)) => "unavailable",
    }
}
