//! The facilitator that settles through another facilitator, over HTTP.

mod api;
mod build_error;
mod builder;
#[cfg(feature = "onchain")]
mod channels;
mod echo_cache;
mod message;
mod observer;
mod settle;
mod supported;

use std::{sync::Arc, time::Duration};

use async_trait::async_trait;
use bytes::Bytes;
use http::StatusCode;
use tokio::{sync::Notify, time::Instant};

pub use api::{Authenticate, Outgoing};
pub use build_error::RemoteBuildError;
pub use builder::RemoteFacilitatorBuilder;

use api::{Answer, Api, NoAnswer};
use builder::look_at_permits;
use echo_cache::EchoCache;
use message::{Verification, body_for, is_refusal, read_verification};
use observer::{ChainObserver, Observation};
use settle::Repeat;
use supported::Supported;

use super::{
    Facilitator, FacilitatorError, NotReady, Readiness, VerifyError,
    single_flight::{NoResult, SingleFlight},
    verification_label,
};
use crate::{
    ledger::{Ledger, Record},
    network::Network,
    payment::{PaymentKey, Prechecked, SettlementOutcome, Terms, Verified},
    protocol::{SupportedResponse, TransferMethod},
    settlement::{journal::Journal, readiness::ReadinessCache, reconciler::Reconcile as _},
    telemetry,
};

/// How often a verification is tried. It changes nothing, so it can be repeated.
const VERIFY_TRIES: u32 = 2;

/// Verifies and settles payments through an x402 facilitator over HTTP (`POST /verify`, `POST /settle`, `GET /supported`).
///
/// The remote facilitator pays for gas and sends the transactions. Its answers are not proof, so:
///
/// - **One settlement at a time** runs for a payment, among all processes that share the ledger. It is always for our own
///   offer, not the payer's copy. It is repeated after a timeout, a 5xx status or a lost connection, and while the facilitator answers
///   `settlement_pending`.
/// - **The `resource` that the payer returned, and of the `extensions` those that the seller declares**
///   ([`EchoedMetadata`](crate::payment::EchoedMetadata)) are forwarded as they came, for facilitators that use extensions. This process repeats a settlement with the identical
///   body. The ledger does not keep them: a process that takes over the payment sends it without them, unless the payer presents it
///   again. Offer and authorization are the same.
/// - **Indeterminate outcomes are [`SettlementOutcome::Unknown`]**: the ledger has the payment as unknown from before the request leaves until
///   there is an answer, even if the process dies in between. A refusal counts as [`SettlementOutcome::Failed`] only if it answers the first
///   request for this payment, and says unambiguously that the payment was not executed. A used nonce or a missing balance may be the
///   effect of a request whose answer was lost. Unknown outcomes are asked for again in the background.
/// - **Confirmation is optional.** Without a [node](RemoteFacilitatorBuilder::confirm) of yours, the facilitator is believed
///   if payer, amount and network are the payment's. With one (feature `onchain`) a payment is settled only if the chain shows it.
///   A false report is logged, and the outcome stays unknown until the chain shows it. Transactions of others count, and
///   a payer's payments in flight are checked against its balance. The node gets one request per verification, at the same time as the
///   facilitator, and one per settlement. Permits are offered then only if the chain has the scheme's contracts and the account that they
///   name is no contract: which permit a contract settles, no receipt shows.
/// - **Reorganizations** are noticed only with a node. A payment is settled as soon as its transaction is in a block; then it
///   is followed until that block is final. A reorged payment is due again, and the facilitator is asked to settle it again if the
///   payer has the response. Without a node a settlement is never final here, and reorganizations are left to the facilitator.
///
/// ```no_run
/// # #[cfg(feature = "onchain")]
/// # async fn example() -> Result<(), tower_x402::facilitator::RemoteBuildError> {
/// use tower_x402::{Network, facilitator::RemoteFacilitator};
///
/// let facilitator = RemoteFacilitator::builder("https://www.x402.org/facilitator")
///     .confirm(Network::BASE_SEPOLIA, "https://sepolia.base.org")
///     .build()
///     .await?;
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct RemoteFacilitator {
    remote: Arc<Remote>,
}

/// The facilitator that all clones share.
struct Remote {
    api: Api,
    journal: Journal,
    supported: Supported,
    /// The networks that it serves. Empty if the facilitator says.
    networks: Vec<Network>,
    observers: Vec<ChainObserver>,
    echoes: EchoCache,
    readiness: ReadinessCache,
    settling: Arc<SingleFlight<PaymentKey, Result<SettlementOutcome, FacilitatorError>>>,
    settle_timeout: Duration,
    /// Wakes the reconciler.
    wake: Arc<Notify>,
}

impl RemoteFacilitator {
    /// Returns a builder for the facilitator at `url`, with the default settings. `verify`, `settle` and `supported` are below that URL.
    pub fn builder(url: impl AsRef<str>) -> RemoteFacilitatorBuilder {
        RemoteFacilitatorBuilder::new(url.as_ref())
    }
}

debug_fields!(RemoteFacilitator |this| {
    api: this.remote.api,
    confirmed: this.remote.observers.iter().map(ChainObserver::network).collect::<Vec<_>>(),
});

#[async_trait]
impl Facilitator for RemoteFacilitator {
    fn ledger(&self) -> &Arc<dyn Ledger> {
        self.remote.journal.ledger()
    }

    fn serves(&self, terms: &Terms) -> bool {
        self.remote.serves(terms.offer().network())
    }

    fn permit_methods(&self, network: Network) -> Vec<TransferMethod> {
        let mut methods = self.remote.supported.permit_methods(network);
        if let Some(observer) = self.remote.observer(network) {
            methods.retain(|method| observer.can_confirm(*method));
        }
        methods
    }

    async fn supported(&self) -> Result<SupportedResponse, FacilitatorError> {
        let said = self.remote.supported.get(&self.remote.api).await?;
        // It, or a node, may not have answered before.
        look_at_permits(&self.remote.observers, &self.remote.supported).await?;
        Ok(said.as_ref().clone())
    }

    async fn verify(&self, payment: &Prechecked) -> Result<Verified, VerifyError> {
        let started = Instant::now();
        let verified = self.remote.verify(payment).await;
        telemetry::verified(payment.terms().offer().network(), verification_label(&verified), started.elapsed());
        verified
    }

    async fn settle(&self, payment: &Prechecked, _verified: &Verified) -> Result<SettlementOutcome, FacilitatorError> {
        let started = Instant::now();
        let outcome = self.remote.settle(payment.clone(), Repeat::UntilTimeout).await;
        let result = match &outcome {
            Ok(SettlementOutcome::Settled { .. }) => "settled",
            Ok(SettlementOutcome::Failed { .. }) => "failed",
            Ok(SettlementOutcome::Unknown { .. }) => "unknown",
            Err(_) => "unavailable",
        };
        telemetry::settled(payment.terms().offer().network(), result, started.elapsed());
        outcome
    }

    fn process_id(&self) -> u64 {
        self.remote.journal.process_id()
    }

    async fn reconcile(&self, record: &Record) -> Result<SettlementOutcome, FacilitatorError> {
        self.remote.reconcile(record).await
    }

    async fn readiness(&self) -> Readiness {
        self.remote.readiness().await
    }

    fn uses_extensions(&self) -> bool {
        true
    }

    fn settles_in_background(&self) -> bool {
        true
    }

    fn settle_soon(&self, _payment: &PaymentKey) {
        self.remote.wake.notify_one();
    }
}

impl Remote {
    /// Settles, or waits for the settlement of the same payment that is under way.
    async fn settle(
        self: &Arc<Self>,
        payment: Prechecked,
        repeat: Repeat,
    ) -> Result<SettlementOutcome, FacilitatorError> {
        let remote = self.clone();
        match self.settling.run(payment.key(), || remote.settle_exclusively(payment, repeat)).await {
            Ok(result) => result,
            Err(NoResult::Lost) => Ok(SettlementOutcome::Unknown { transaction: None }),
            Err(NoResult::Full) => {
                Err(FacilitatorError::Busy { what: "settlements", retry_after: Duration::from_secs(1) })
            }
        }
    }

    /// Asks the facilitator and, if there is one, the node at the same time.
    async fn verify(&self, payment: &Prechecked) -> Result<Verified, VerifyError> {
        let at = self.journal.now();
        let asked = self.ask_to_verify(payment);
        let Some(observer) = self.observer(payment.terms().offer().network()) else {
            asked.await?;
            return Ok(Verified { funds: None, gas: None, at, contract_wallet: false });
        };
        let (answer, observed) = tokio::join!(asked, observer.observe(payment));
        answer?;
        let Observation { funds, contract_wallet, rejection } = observed?;
        match rejection {
            Some(rejection) => Err(rejection.into()),
            None => Ok(Verified { funds: Some(funds), gas: None, at, contract_wallet }),
        }
    }

    async fn ask_to_verify(&self, payment: &Prechecked) -> Result<(), VerifyError> {
        let body = body_for(payment)?;
        let mut last: Result<Answer, NoAnswer> = Err(NoAnswer::NotSent);
        for _ in 0..VERIFY_TRIES {
            last = self.api.post("verify", body.clone()).await;
            if let Ok(answer) = &last {
                match read_verification(answer, payment) {
                    Verification::Valid => return Ok(()),
                    Verification::Invalid(rejection) => return Err(rejection.into()),
                    Verification::Unusable => {
                        tracing::warn!(status = %answer.status, "the facilitator's answer to a verification cannot be used");
                    }
                }
                if answer.status.is_client_error() {
                    break;
                }
            }
        }
        let retry_after = last.ok().and_then(|answer| answer.retry_after).unwrap_or(Duration::from_secs(2));
        Err(FacilitatorError::Unreachable { what: "the facilitator", retry_after }.into())
    }

    async fn readiness(&self) -> Readiness {
        let check = async {
            let readiness = self.check_readiness().await;
            let networks = if self.networks.is_empty() { self.supported.networks() } else { self.networks.clone() };
            networks.into_iter().for_each(|network| telemetry::ready(network, readiness.is_ready()));
            readiness
        };
        self.readiness.get_or_check(check).await
    }

    /// Returns `true` if the facilitator answers as one. Those that do not say what they support refuse an empty message, in JSON.
    async fn answers(&self) -> bool {
        let Ok(answer) = self.api.get("supported").await else { return false };
        match answer.status {
            StatusCode::TOO_MANY_REQUESTS => true,
            StatusCode::NOT_FOUND | StatusCode::METHOD_NOT_ALLOWED | StatusCode::NOT_IMPLEMENTED => {
                let refusal = self.api.post("verify", Bytes::from_static(b"{}")).await;
                refusal.is_ok_and(|refusal| is_refusal(&refusal))
            }
            _ => supported::read(&answer).is_some(),
        }
    }

    async fn check_readiness(&self) -> Readiness {
        let mut readiness = Readiness::of_ledger(&**self.journal.ledger()).await;
        if !self.answers().await {
            readiness.reasons.push(NotReady::Facilitator);
        }
        for observer in &self.observers {
            if !observer.answers().await {
                readiness.reasons.push(NotReady::Node);
                break;
            }
            if !observer.gives_receipts().await {
                readiness.reasons.push(NotReady::Receipts);
                break;
            }
        }
        readiness
    }
}
