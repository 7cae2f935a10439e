//! A request with a payment on any transport, from its beginning to what is charged for its work.

use std::{fmt, sync::Arc};

use alloy_primitives::{B256, U256, b256};
use bytes::Bytes;
use sha2::{Digest as _, Sha256};

use super::{
    Beginning, Common, Held as _, Offer, Presented, Refusal, Seller, Unfinished, VerifiedPayment, Why, detached,
    exact::{ExactHeld, ExactRequest, Presentation, PresentedPayment},
    extensions::Echoed,
};
use crate::{
    ledger::{BodyDigest, Fingerprint, StoredResponse},
    payment::EchoedMetadata,
    protocol::{PaymentPayload, SettlementResponse},
    telemetry::{self, RequestOutcome},
};

/// What is read of a request that is known whole: its fingerprint is of all of it.
const NOTHING: BodyDigest = BodyDigest {
    length: 0,
    digest: b256!("e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"),
    complete: true,
};

impl Seller {
    /// Begins a request that comes with a payment: checks the payment against the offers, reserves it, verifies it, and settles it if its flow
    /// is so. Of any number of copies one is worked on; the others wait for it. What was begun goes on if the caller goes away.
    ///
    /// # Errors
    /// A [`Refusal`], which says what the payer can do. Nothing is charged, unless the refusal says otherwise.
    pub async fn begin(
        self: &Arc<Self>,
        offers: &[Offer],
        payment: PaymentPayload,
        request: &Request,
    ) -> Result<Begun, Refusal> {
        let begun = self.begin_uncounted(offers, payment, request).await;
        match &begun {
            Ok(Begun::Work(_)) => {}
            Ok(Begun::Replay { .. }) => telemetry::request(RequestOutcome::Replayed),
            Err(refusal) => telemetry::request(refusal.ended()),
        }
        begun
    }

    async fn begin_uncounted(
        self: &Arc<Self>,
        offers: &[Offer],
        payment: PaymentPayload,
        request: &Request,
    ) -> Result<Begun, Refusal> {
        let extensions = payment.extensions.as_ref();
        let (echoed, Common { refusal, identity }) =
            self.read(extensions, |added| request.fingerprint(&self.name, added))?;
        let told = self.declared.passed_on(extensions);
        let payment = PresentedPayment::new(payment);
        let presentation = Presentation { payer: payment.payer(), identity, sold_by: None, may_defer: true };
        let mut matched = payment.find_payment(self, offers, refusal).await?;
        if matched.facilitator.uses_extensions() {
            matched.payment = matched.payment.with_echoed(EchoedMetadata::new(None, told).map(Arc::new));
        }
        let paid = ExactRequest::new(self.clone(), matched, presentation).await?;
        match ExactHeld::begin(paid, &mut request.clone()).await? {
            Beginning::Work(held) => Ok(Begun::Work(Work::start(held, echoed).await?)),
            Beginning::Replay(kept, receipt) => Ok(Begun::Replay { response: kept.body.clone(), receipt }),
            Beginning::Refunded(..) => Err(Why::Used.into()),
        }
    }
}

/// How a request with a payment goes on.
#[derive(Debug)]
pub enum Begun {
    /// It is to be worked on.
    Work(Work),
    /// It was answered before, with this response. Nothing more is charged.
    Replay {
        /// What it was answered.
        response: Bytes,
        /// What was charged for it.
        receipt: SettlementResponse,
    },
}

/// Work to be done for a payment, which is held for it meanwhile.
///
/// [`charge`](Self::charge) for what came of it, or [`release`](Self::release) the payment if nothing did. Dropped, as when the work panics,
/// the payment is released.
#[must_use = "the payment is released when this is dropped"]
pub struct Work {
    held: ExactHeld,
    echoed: Echoed,
}

impl Work {
    /// Does what the payment's flow wants done before the work.
    pub(super) async fn start(mut held: ExactHeld, echoed: Echoed) -> Result<Self, Refusal> {
        let if_panicked = held.if_panicked();
        let starting = async move { held.start().await.map(|()| Self { held, echoed }) };
        match detached(Box::pin(starting)).await {
            Some(started) => started,
            None => Err(if_panicked.await),
        }
    }

    /// Returns the payment: who pays, how much, and the number of this attempt.
    pub fn payment(&self) -> VerifiedPayment {
        self.held.payment()
    }

    /// Returns what the payer returned of the [extensions](super::SellerBuilder::extension) that are declared.
    pub const fn echoed(&self) -> &Echoed {
        &self.echoed
    }

    /// Returns the length of the longest response that can be charged for, in bytes: the ledger's
    /// [`response_limit`](crate::ledger::ResponseLedger::response_limit).
    pub fn response_limit(&self) -> usize {
        self.held.response_limit()
    }

    /// Charges all that was signed for, and settles it. The response is kept in the same step, so that the payment gets it again and the
    /// work is not done twice.
    ///
    /// The response is the payer's if this succeeds. It goes on if the caller goes away.
    ///
    /// # Errors
    /// A [`Refusal`] if the payment is not charged, or if that is not known yet. In the second case the response is kept, and given when the
    /// payer presents the payment again. A response that is longer than [`response_limit`](Self::response_limit) could be lost then, so it
    /// is not charged: sell what fits, or set the ledger's [`ResponseLimits`](crate::ledger::ResponseLimits).
    pub async fn charge(self, response: impl Into<Bytes>) -> Result<SettlementResponse, Refusal> {
        let amount = self.held.most();
        self.charge_amount(amount, response.into()).await
    }

    /// Charges this much, in atomic units, of a maximum, and settles it, as [`charge`](Self::charge) does for all of it.
    ///
    /// # Errors
    /// The same. Nothing is charged if it is more than was signed for, or if the payment is of no maximum and it is another amount.
    pub async fn charge_only(
        self,
        amount: impl Into<U256>,
        response: impl Into<Bytes>,
    ) -> Result<SettlementResponse, Refusal> {
        let amount = u128::try_from(amount.into()).ok();
        let amount = match (self.held.most(), amount) {
            (Some(most), Some(amount)) if amount <= most => Some(amount),
            (None, Some(amount)) if self.payment().amount == U256::from(amount) => None,
            _ => return Err(self.not_charged(Unfinished::Mispriced).await),
        };
        self.charge_amount(amount, response.into()).await
    }

    async fn charge_amount(self, amount: Option<u128>, response: Bytes) -> Result<SettlementResponse, Refusal> {
        if response.len() > self.response_limit() {
            return Err(self.not_charged(Unfinished::TooLong).await);
        }
        let mut held = self.held;
        let if_panicked = held.if_panicked();
        let kept = StoredResponse { head: Bytes::new(), body: response, stored_at: held.now() };
        let charging = async move {
            held.charge(amount, Some(kept), NOTHING).await.map_err(|uncharged| uncharged.refusal)?;
            held.settle(true).await?;
            let receipt = held.count(amount);
            tokio::spawn(held.deliver());
            receipt.ok_or_else(|| Why::Pending.into())
        };
        let charged = match detached(Box::pin(charging)).await {
            Some(charged) => charged,
            None => Err(if_panicked.await),
        };
        charged.inspect_err(|refusal: &Refusal| telemetry::request(refusal.ended()))
    }

    /// Releases the payment of work that can not be charged for.
    async fn not_charged(mut self, why: Unfinished) -> Refusal {
        let if_panicked = self.held.if_panicked();
        let releasing = async move {
            let receipt = self.held.release(NOTHING).await;
            self.held.unfinished(why).with_receipt(receipt)
        };
        let refusal = match detached(Box::pin(releasing)).await {
            Some(refusal) => refusal,
            None => if_panicked.await,
        };
        telemetry::request(refusal.ended());
        refusal
    }

    /// Releases the payment of work that came to nothing: nothing is charged, and the payment may be presented again. Returns what the payer
    /// is told if it had paid before the work (flow `upfront`).
    pub async fn release(mut self) -> Option<SettlementResponse> {
        telemetry::request(RequestOutcome::Unsuccessful);
        let releasing = async move { self.held.release(NOTHING).await };
        detached(Box::pin(releasing)).await.flatten()
    }
}

impl fmt::Debug for Work {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Work").field("payment", &self.payment()).finish_non_exhaustive()
    }
}

/// A request that is known whole. A payment pays for the request that it was first presented with, and for no other.
#[derive(Clone)]
pub struct Request {
    whole: Bytes,
    has_secret: bool,
}

impl Request {
    /// Creates a request of all that says what is asked for, as bytes. Two requests are the same if their bytes are.
    ///
    /// A payment is public once it is on the chain, so whoever guesses the request can present them together. The response is given again
    /// three times, and for a minute only, unless the request has a [secret](Self::with_secret).
    pub fn new(whole: impl Into<Bytes>) -> Self {
        Self { whole: whole.into(), has_secret: false }
    }

    /// Says that nobody but the payer can make up the bytes of this request, for example because there is a token or a random number in
    /// them. Then the response is given again for as long as the ledger keeps it.
    #[must_use]
    pub const fn with_secret(mut self) -> Self {
        self.has_secret = true;
        self
    }

    /// Identifies the request of a payer that added this to the seller's extensions.
    fn fingerprint(&self, seller: &str, added: Option<B256>) -> Fingerprint {
        let mut hash = Sha256::new();
        hash.update(b"tower-x402 request\0");
        hash.update((seller.len() as u64).to_be_bytes());
        hash.update(seller);
        hash.update(&self.whole);
        // Of one length, so that no bytes of a request are an addition.
        let whole: [u8; 32] = hash.finalize().into();
        let mut hash = Sha256::new();
        hash.update(whole);
        hash.update(added.unwrap_or_default());
        Fingerprint { digest: B256::from_slice(&hash.finalize()), names_caller: self.has_secret }
    }
}

impl fmt::Debug for Request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Request({} bytes)", self.whole.len())
    }
}

impl Presented for Request {
    fn held(&self) -> u64 {
        self.whole.len() as u64
    }

    fn digest(&self) -> Option<BodyDigest> {
        Some(NOTHING)
    }
}
