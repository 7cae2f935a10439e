//! A seller on any transport: its settings, what it offers, and what its requests share.

use std::{sync::Arc, time::Duration};

use serde_json::{Map, Value};
use tokio::sync::Semaphore;

use super::{
    DeferredPolicy, Limits, Rules, extensions::Declared, in_progress::PaymentsInProgress, queue::AdmissionQueue,
    rooms::PayerRoom,
};
use crate::{
    clock::Clock,
    facilitator::Facilitator,
    network::Network,
    payment::Terms,
    protocol::{ExactOffer, Extension, PaymentRequirements, Verbatim},
};

/// About how many payments the chain is asked at once whether they are genuine.
const UNPROVEN: usize = 64;
/// How long others wait for that; about as long as the chain may take.
const UNPROVEN_WAIT: Duration = Duration::from_secs(4);
/// The longest work of a seller.
const MAX_WORK: Duration = Duration::from_secs(86_400);

/// A seller, whatever the transport: what all requests to it share, which are its rules, the payments that it works on, and the places for
/// them. The [module](crate::charge) shows it at work.
#[derive(Debug)]
pub struct Seller {
    /// What it sells is counted under this name. Where there is nothing else, it tells the seller from others that share its ledger.
    pub(super) name: Arc<str>,
    pub(crate) facilitators: Vec<Arc<dyn Facilitator>>,
    pub(crate) rules: Rules,
    pub(crate) declared: Arc<Declared>,
    pub(crate) in_progress: PaymentsInProgress,
    /// Permits to work, for payers that are known to have the money.
    pub(crate) permits: Arc<Semaphore>,
    /// Permits for authorizations whose payer was not verified yet.
    pub(crate) unverified: AdmissionQueue,
    /// Places of copies of a payment, which wait for what becomes of the first, and of whoever else waits for a request that is worked on. They
    /// hold no permit meanwhile (invariant I12).
    pub(crate) copies: PayerRoom,
    /// The same for requests that nobody but the payer of their channel can send, which wait for another one of the channel.
    pub(crate) in_line: PayerRoom,
    /// Permits for payments that anybody can make up: their signature is not proven, or nothing is known to be in their channel.
    pub(crate) unproven: AdmissionQueue,
    /// Permits for vouchers of channels that had the money when they were last looked at: their payers do not wait behind strangers.
    pub(crate) stale: AdmissionQueue,
    /// Permits for payments whose work is done. Once they are on the chain, anybody can present them.
    pub(crate) replays: AdmissionQueue,
    /// Places of requests whose payers are known to have the money, and have to be waited for.
    pub(crate) arriving: PayerRoom,
    /// Places of requests whose payments are known.
    pub(crate) known: PayerRoom,
}

impl Seller {
    pub(crate) fn new(
        name: Arc<str>,
        facilitators: Vec<Arc<dyn Facilitator>>,
        rules: Rules,
        declared: Arc<Declared>,
    ) -> Self {
        let concurrent = rules.limits.concurrent.min(Semaphore::MAX_PERMITS);
        let longest = rules.limits.request_body;
        Self {
            in_progress: PaymentsInProgress::default(),
            permits: Arc::new(Semaphore::new(concurrent)),
            unverified: AdmissionQueue::new(concurrent, UNPROVEN_WAIT),
            copies: PayerRoom::with_bodies(concurrent, longest),
            in_line: PayerRoom::with_bodies(concurrent, longest),
            unproven: AdmissionQueue::new(concurrent.min(UNPROVEN), UNPROVEN_WAIT),
            stale: AdmissionQueue::new(concurrent.min(UNPROVEN), UNPROVEN_WAIT),
            replays: AdmissionQueue::new((concurrent / 8).max(1), UNPROVEN_WAIT),
            arriving: PayerRoom::with_bodies(concurrent, longest),
            known: PayerRoom::of_known(longest),
            name,
            facilitators,
            rules,
            declared,
        }
    }

    pub(crate) fn now(&self) -> u64 {
        self.rules.clock.now()
    }

    /// Returns a builder. The name tells this seller from others that share its ledger: a payment that one of them was paid with is refused
    /// by all others. It is the label `route` of the metric `x402_charged_units_total`, too.
    pub fn builder(name: impl Into<Arc<str>>, facilitator: impl Facilitator) -> SellerBuilder {
        SellerBuilder {
            name: name.into(),
            facilitators: vec![Arc::new(facilitator)],
            rules: Rules { payment_identifier: false, ..Rules::default() },
            extensions: Vec::new(),
        }
    }

    /// Returns what is declared besides the offers, as a [`PaymentRequired`](crate::protocol::PaymentRequired) names it in `extensions`.
    pub fn extensions(&self) -> Option<&Verbatim<Map<String, Value>>> {
        self.declared.text()
    }

    /// Returns how long what is offered should take to be paid (`maxTimeoutSeconds`), in seconds: two minutes, or as long as the work may
    /// take and a minute.
    pub fn max_timeout_seconds(&self) -> u64 {
        self.rules.limits.max_timeout.as_secs()
    }

    /// Makes an offer, which is valid for this seller only.
    ///
    /// # Errors
    /// [`NotOffered`] if nobody could settle it as the seller wants it, or if it leaves too little time.
    pub fn offer(&self, offer: ExactOffer) -> Result<Offer, NotOffered> {
        let Limits { handler_deadline, settlement_margin, .. } = self.rules.limits;
        let least = (handler_deadline + settlement_margin).as_secs() + 1;
        if offer.max_timeout_seconds < least {
            return Err(NotOffered::TooShort { least });
        }
        let network = offer.network();
        let terms = Arc::new(Terms::new(offer));
        let mut facilitators = self.facilitators.iter().enumerate();
        let served = facilitators.find(|(_, facilitator)| facilitator.serves(&terms));
        let (number, facilitator) = served.ok_or(NotOffered::NotServed(network))?;
        if self.rules.deferred.is_some() && !facilitator.settles_in_background() {
            return Err(NotOffered::NotDeferrable(network));
        }
        Ok(Offer { terms, facilitator: number })
    }
}

/// Builder of a [`Seller`].
#[derive(Debug)]
#[must_use]
pub struct SellerBuilder {
    name: Arc<str>,
    facilitators: Vec<Arc<dyn Facilitator>>,
    rules: Rules,
    extensions: Vec<Extension>,
}

impl SellerBuilder {
    /// Adds a facilitator, for other networks. Each offer goes to the first that serves it.
    pub fn facilitator(mut self, facilitator: impl Facilitator) -> Self {
        self.facilitators.push(Arc::new(facilitator));
        self
    }

    /// Sets how long work may take, in whole seconds. Default: one minute; at most a day. The payment is held for that long, and a minute
    /// more; work that is charged for later may be refused, if its payer has presented the payment again meanwhile.
    pub fn work_deadline(mut self, deadline: Duration) -> Self {
        let (limits, deadline) = (&mut self.rules.limits, deadline.min(MAX_WORK));
        limits.handler_deadline = deadline;
        limits.max_timeout = limits.max_timeout.max(deadline + Duration::from_secs(60));
        self
    }

    /// Sets how many requests are worked on at once. More are refused as busy. Default: 4,096.
    pub fn max_concurrent(mut self, requests: usize) -> Self {
        self.rules.limits.concurrent = requests;
        self
    }

    /// Settles payments after their responses, for payers that the policy trusts so far. Facilitators must settle
    /// [in the background](Facilitator::settles_in_background) then. Default: none.
    pub fn deferred(mut self, policy: DeferredPolicy) -> Self {
        self.rules.deferred = Some(policy);
        self
    }

    /// Declares an extension, in place of one of the same name. What a payer returns of it is in [`Work::echoed`](super::Work::echoed): as it was
    /// declared, with what the payer added, to which the payment is bound as to the request. Facilitators that
    /// [use extensions](Facilitator::uses_extensions) get it with the payment.
    pub fn extension(mut self, extension: Extension) -> Self {
        self.extensions.retain(|other| other.name() != extension.name());
        self.extensions.push(extension);
        self
    }

    /// Sets the clock. Default: [`SystemClock`](crate::SystemClock).
    pub fn clock(mut self, clock: Arc<dyn Clock>) -> Self {
        self.rules.clock = clock;
        self
    }

    /// Builds the seller.
    pub fn build(self) -> Arc<Seller> {
        let declared = Arc::new(Declared::new(self.extensions, Vec::new()));
        Arc::new(Seller::new(self.name, self.facilitators, self.rules, declared))
    }
}

/// An offer of a [`Seller`]: its terms, and the facilitator that settles them.
#[derive(Clone, Debug)]
pub struct Offer {
    pub(crate) terms: Arc<Terms>,
    /// Its number among those of the seller.
    pub(crate) facilitator: usize,
}

impl Offer {
    /// Returns the offer as a [`PaymentRequired`](crate::protocol::PaymentRequired) names it in `accepts`.
    pub fn requirements(&self) -> &Verbatim<PaymentRequirements> {
        self.terms.text()
    }
}

/// The reason why a seller cannot make an offer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NotOffered {
    /// None of the seller's facilitators settles it: add one that does.
    #[error("no facilitator serves this offer on {0}: add one with .facilitator(…)")]
    NotServed(Network),
    /// The facilitator does not settle later by itself, so nothing can be deferred.
    #[error("the facilitator for {0} settles nothing by itself: leave .deferred(…) out, or use another one")]
    NotDeferrable(Network),
    /// It leaves less time than the work and its settlement may take.
    #[error("maxTimeoutSeconds must be {least} at least: take Seller::max_timeout_seconds()")]
    TooShort {
        /// The least that it must leave, in seconds.
        least: u64,
    },
}
