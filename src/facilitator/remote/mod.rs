//! Verifying and settling through a facilitator over HTTP.

mod api;
mod builder;
mod echoes;
mod finality;
mod message;
mod readiness;
mod settle;
mod supported;
mod upkeep;
mod witness;

use std::{fmt, sync::Arc, time::Duration};

use async_trait::async_trait;
use tokio::{sync::Notify, time::Instant};

pub use api::{Authenticate, Outgoing};
pub use builder::{RemoteBuildError, RemoteFacilitatorBuilder};

use api::{Answer, Api, Silence};
use echoes::Echoes;
use message::{Verdict, body_for, read_verdict};
use readiness::LastLook;
use settle::Insistence;
use supported::Supported;
use witness::Witness;

use super::{
    Facilitator, FacilitatorError, Readiness, VerifyError,
    single_flight::{NoResult, SingleFlight},
};
use crate::{
    clock::Clock,
    ledger::{Ledger, Record},
    network::Network,
    payment::{Outcome, PaymentKey, Prechecked, Terms, Verified},
    protocol::SupportedResponse,
    telemetry,
};

/// How often a verification is tried: it changes nothing, so that repeating it is safe.
const VERIFY_TRIES: u32 = 2;

/// Verifies and settles payments through an x402 facilitator over HTTP (`POST /verify`, `POST /settle`, `GET /supported`).
///
/// The facilitator pays for gas and has the transactions; what it says is not proof. So, by what it is:
///
/// - **One settlement at a time** for a payment, by this process and by all that share the ledger, and always the same offer:
///   ours, not the payer's echo of it. It is repeated after a timeout, a 5xx or a cut connection, and while the facilitator says
///   `settlement_pending`.
/// - **What else the payer returned of the 402** ([`Echo`](crate::payment::Echo): `resource` and `extensions`) goes with the payment as it
///   came, so that a facilitator that catalogues what it settles (the extension `bazaar`) learns what was sold. This process
///   repeats a settlement with the identical body. The echo is not in the ledger: who takes a payment over from a process that
///   is gone sends it without, unless the payer presents it again; offer and authorization are the same.
/// - **What is not known is [`Outcome::Unknown`]**: the payment is so in the ledger from before the request leaves until there is
///   an answer, whoever dies in between. A refusal counts as [`Outcome::Failed`] only if it is the answer to the first request
///   for this payment, and says in so many words that it was not executed: a used nonce or a missing balance may be the work
///   of the request whose answer was lost. What is unknown is asked for again in the background.
/// - **Trust, or [confirm](RemoteFacilitatorBuilder::confirm).** Without a node of yours the facilitator is believed when it says
///   that a payment was settled, if payer, amount and network are the payment's. With one (feature `onchain`) a payment is
///   settled only if the chain shows it, a lie is reported and stays unknown until the chain tells, what somebody else's
///   transaction paid is credited, and what a payer has in flight is checked against its balance. It costs one request
///   to the node when verifying, beside the facilitator's, and one when settling.
/// - **Reorganizations** are noticed only with a node, too. A settlement is believed as soon as its transaction is in a block, however
///   young; then the chain is followed until that block is final. What was undone is due again, and the facilitator is asked to
///   settle it again if the payer has the answer. Without a node a settlement is never final here, and what a reorganization
///   undoes is the facilitator's to repair.
///
/// ```no_run
/// # #[cfg(feature = "onchain")]
/// # async fn example() -> Result<(), tower_x402::facilitator::RemoteBuildError> {
/// use tower_x402::{Network, facilitator::RemoteFacilitator};
///
/// let facilitator = RemoteFacilitator::builder("https://x402.org/facilitator")
///     .confirm(Network::BASE_SEPOLIA, "https://sepolia.base.org")
///     .build()
///     .await?;
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct RemoteFacilitator {
    remote: Arc<Remote>,
}

/// What all handles share.
struct Remote {
    api: Api,
    ledger: Arc<dyn Ledger>,
    clock: Arc<dyn Clock>,
    supported: Supported,
    /// Served without asking; empty if the facilitator is to say.
    networks: Vec<Network>,
    witnesses: Vec<(Network, Box<dyn Witness>)>,
    echoes: Echoes,
    last_look: LastLook,
    flights: Arc<SingleFlight<PaymentKey, Result<Outcome, FacilitatorError>>>,
    settle_timeout: Duration,
    /// This process among those that share the ledger.
    process: u64,
    hint: Arc<Notify>,
}

impl RemoteFacilitator {
    /// Settings to start from, for the facilitator at `url`, below which `verify`, `settle` and `supported` are.
    pub fn builder(url: impl AsRef<str>) -> RemoteFacilitatorBuilder {
        RemoteFacilitatorBuilder::new(url.as_ref())
    }
}

impl fmt::Debug for RemoteFacilitator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let confirmed: Vec<_> = self.remote.witnesses.iter().map(|(network, _)| network).collect();
        f.debug_struct("RemoteFacilitator")
            .field("api", &self.remote.api)
            .field("confirmed", &confirmed)
            .finish_non_exhaustive()
    }
}

#[async_trait]
impl Facilitator for RemoteFacilitator {
    fn ledger(&self) -> &Arc<dyn Ledger> {
        &self.remote.ledger
    }

    fn serves(&self, terms: &Terms) -> bool {
        self.remote.serves(terms.offer().network())
    }

    async fn supported(&self) -> Result<SupportedResponse, FacilitatorError> {
        self.remote.supported.get(&self.remote.api).await.map(|said| said.as_ref().clone())
    }

    async fn verify(&self, payment: &Prechecked) -> Result<Verified, VerifyError> {
        let started = Instant::now();
        let verified = self.remote.look_at(payment).await;
        let result = match &verified {
            Ok(_) => "valid",
            Err(VerifyError::Invalid(_)) => "invalid",
            Err(VerifyError::Unavailable(_)) => "unavailable",
        };
        telemetry::verified(payment.terms().offer().network(), result, started.elapsed());
        verified
    }

    async fn settle(&self, payment: &Prechecked, _verified: &Verified) -> Result<Outcome, FacilitatorError> {
        let started = Instant::now();
        let outcome = self.remote.settle(payment.clone(), Insistence::Settle).await;
        let result = match &outcome {
            Ok(Outcome::Settled { .. }) => "settled",
            Ok(Outcome::Failed { .. }) => "failed",
            Ok(Outcome::Unknown { .. }) => "unknown",
            Err(_) => "unavailable",
        };
        telemetry::settled(payment.terms().offer().network(), result, started.elapsed());
        outcome
    }

    fn process(&self) -> u64 {
        self.remote.process
    }

    async fn reconcile(&self, record: &Record) -> Result<Outcome, FacilitatorError> {
        self.remote.look_again(record).await
    }

    async fn readiness(&self) -> Readiness {
        self.remote.readiness().await
    }

    fn reads_echo(&self) -> bool {
        true
    }

    fn settles_due(&self) -> bool {
        true
    }

    fn settle_soon(&self, _payment: &PaymentKey) {
        self.remote.hint.notify_one();
    }
}

impl Remote {
    fn serves(&self, network: Network) -> bool {
        if self.networks.is_empty() { self.supported.serves(network) } else { self.networks.contains(&network) }
    }

    /// Settles, or waits for the settlement that is under way.
    async fn settle(
        self: &Arc<Self>,
        payment: Prechecked,
        insistence: Insistence,
    ) -> Result<Outcome, FacilitatorError> {
        let remote = self.clone();
        match self.flights.join(payment.key(), || remote.settle_alone(payment, insistence)).await {
            Ok(result) => result,
            Err(NoResult::Lost) => Ok(Outcome::Unknown { transaction: None }),
            Err(NoResult::Full) => {
                Err(FacilitatorError::Busy { what: "settlements", retry_after: Duration::from_secs(1) })
            }
        }
    }

    /// Asks the facilitator and, where there is one, the node at the same time.
    async fn look_at(&self, payment: &Prechecked) -> Result<Verified, VerifyError> {
        let at = self.clock.now();
        let asked = self.verify(payment);
        let Some(witness) = self.witness(payment.terms().offer().network()) else {
            asked.await?;
            return Ok(Verified { funds: None, gas: None, at, contract_wallet: false });
        };
        let (said, look) = tokio::join!(asked, witness.look(payment));
        said?;
        let look = look?;
        match look.rejection {
            Some(rejection) => Err(rejection.into()),
            None => Ok(Verified { funds: Some(look.funds), gas: None, at, contract_wallet: look.contract_wallet }),
        }
    }

    async fn verify(&self, payment: &Prechecked) -> Result<(), VerifyError> {
        let body = body_for(payment)
            .map_err(|_| FacilitatorError::Misconfigured("a payment that cannot be written as JSON".into()))?;
        let mut last: Result<Answer, Silence> = Err(Silence::NotSent);
        for _ in 0..VERIFY_TRIES {
            last = self.api.post("verify", body.clone()).await;
            if let Ok(answer) = &last {
                match read_verdict(answer, payment) {
                    Verdict::Valid => return Ok(()),
                    Verdict::Invalid(rejection) => return Err(rejection.into()),
                    Verdict::None => {
                        tracing::warn!(status = %answer.status, "the facilitator's answer to a verification is of no use");
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
}
