//! A request with a payment on any transport, from its beginning to what is charged for its work.

use std::{fmt, sync::Arc};

use alloy_primitives::{B256, U256};
use bytes::Bytes;
use sha2::{Digest as _, Sha256};

use super::{
    Beginning, Held as _, Offer, Presented, Refusal, Seller, Unfinished, Unread, VerifiedPayment, Why, detached,
    exact::{ExactHeld, ExactRequest, Presentation, PresentedPayment},
    extensions::Declared,
};
use crate::{
    ledger::{BodyDigest, Fingerprint, StoredResponse},
    protocol::{PaymentPayload, SettlementResponse},
    telemetry::{self, RequestOutcome},
    upload::Arrived,
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
        let payment = PresentedPayment::new(payment);
        let presentation = Presentation {
            payer: payment.payer(),
            fingerprint: request.fingerprint(&self.name),
            id: payment.id(self.rules.payment_identifier)?,
            may_defer: true,
        };
        let matched = payment.find_payment(self, offers, &Declared::default()).await?;
        let paid = ExactRequest::new(self.clone(), matched, presentation).await?;
        match ExactHeld::begin(paid, &mut request.clone()).await? {
            Beginning::Work(held) => Ok(Begun::Work(Work::start(held, request.whole()).await?)),
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
    request: BodyDigest,
}

impl Work {
    /// Does what the payment's flow wants done before the work.
    pub(super) async fn start(mut held: ExactHeld, request: BodyDigest) -> Result<Self, Refusal> {
        let if_panicked = held.if_panicked();
        let starting = async move { held.start().await.map(|()| Self { held, request }) };
        match detached(Box::pin(starting)).await {
            Some(started) => started,
            None => Err(if_panicked.await),
        }
    }

    /// Returns the payment: who pays, how much, and the number of this attempt.
    pub fn payment(&self) -> VerifiedPayment {
        self.held.payment()
    }

    /// Charges all that was signed for, and settles it. The response is kept in the same step, so that the payment gets it again and the
    /// work is not done twice; one that is longer than the ledger's [`response_limit`](crate::ledger::ResponseLedger::response_limit) is not kept.
    ///
    /// The response is the payer's if this succeeds. It goes on if the caller goes away.
    ///
    /// # Errors
    /// A [`Refusal`] if the payment is not charged, or if that is not known yet. In the second case a response that is not too long is kept, and
    /// given when the payer presents the payment again; a longer one is lost.
    pub async fn charge(self, response: impl Into<Bytes>) -> Result<SettlementResponse, Refusal> {
        let amount = self.held.most();
        self.charge_amount(amount, response.into()).await
    }

    /// Charges this much, in atomic units, of a permit (scheme `upto`), and settles it, as [`charge`](Self::charge) does for all of it.
    ///
    /// # Errors
    /// The same. Nothing is charged if it is more than was signed for, or if the payment is no permit and it is another amount.
    pub async fn charge_only(
        mut self,
        amount: impl Into<U256>,
        response: impl Into<Bytes>,
    ) -> Result<SettlementResponse, Refusal> {
        let amount = u128::try_from(amount.into()).ok();
        let amount = match (self.held.most(), amount) {
            (Some(most), Some(amount)) if amount <= most => Some(amount),
            (None, Some(amount)) if self.payment().amount == U256::from(amount) => None,
            _ => {
                let receipt = self.held.release(self.request).await;
                return Err(self.held.unfinished(Unfinished::Mispriced).with_receipt(receipt));
            }
        };
        self.charge_amount(amount, response.into()).await
    }

    async fn charge_amount(self, amount: Option<u128>, response: Bytes) -> Result<SettlementResponse, Refusal> {
        let Self { mut held, request } = self;
        let if_panicked = held.if_panicked();
        let is_whole = response.len() <= held.response_limit();
        let kept = is_whole.then(|| StoredResponse { head: Bytes::new(), body: response, stored_at: held.now() });
        let charging = async move {
            held.charge(amount, kept, request).await?;
            held.settle(is_whole).await?;
            let (receipt, ended) = held.receipt();
            telemetry::request(ended);
            tokio::spawn(held.deliver());
            receipt.ok_or_else(|| Why::Pending.into())
        };
        match detached(Box::pin(charging)).await {
            Some(charged) => charged,
            None => Err(if_panicked.await),
        }
    }

    /// Releases the payment of work that came to nothing: nothing is charged, and the payment may be presented again. Returns what the payer
    /// is told if it had paid before the work (flow `upfront`).
    pub async fn release(mut self) -> Option<SettlementResponse> {
        telemetry::request(RequestOutcome::Unsuccessful);
        let releasing = async move { self.held.release(self.request).await };
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
pub struct Request(Bytes);

impl Request {
    /// Creates a request of all that says what is asked for, as bytes. Two requests are the same if their bytes are.
    pub fn new(whole: impl Into<Bytes>) -> Self {
        Self(whole.into())
    }

    fn whole(&self) -> BodyDigest {
        self.digest_of(self.0.len())
    }

    fn digest_of(&self, length: usize) -> BodyDigest {
        let digest = B256::from_slice(&Sha256::digest(&self.0[..length]));
        BodyDigest { length: length as u64, digest, complete: length == self.0.len() }
    }

    fn fingerprint(&self, seller: &str) -> Fingerprint {
        let mut hash = Sha256::new();
        hash.update(b"tower-x402 request\0");
        hash.update((seller.len() as u64).to_be_bytes());
        hash.update(seller);
        hash.update(&self.0);
        Fingerprint { digest: B256::from_slice(&hash.finalize()), names_caller: false }
    }
}

impl fmt::Debug for Request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Request({} bytes)", self.0.len())
    }
}

/// It is all there.
impl Presented for Request {
    fn held(&self) -> u64 {
        self.0.len() as u64
    }

    fn arrived(&mut self) -> Arrived {
        Arrived::default()
    }

    fn is_arriving(&self) -> bool {
        false
    }

    async fn read(&mut self) -> Result<(), Unread> {
        Ok(())
    }

    async fn read_whole(&mut self) -> Result<(), Unread> {
        Ok(())
    }

    async fn is_same(&mut self, read: &BodyDigest) -> Result<bool, Unread> {
        let length = usize::try_from(read.length).ok().filter(|length| *length <= self.0.len());
        Ok(length.is_some_and(|length| {
            let ours = self.digest_of(length);
            ours.digest == read.digest && (ours.complete || !read.complete)
        }))
    }

    fn digest(&self) -> Option<BodyDigest> {
        Some(self.whole())
    }

    fn is_workable(&self) -> bool {
        true
    }

    fn misfit(&self, _: &StoredResponse) -> Option<String> {
        None
    }
}
