//! A payment as its payer presents it, and which of our offers it pays.

use std::sync::Arc;

use serde::Deserialize;

use super::Matched;
use crate::{
    charge::{Offer, Refusal, Seller, Why, extensions::Declared},
    ledger::Record,
    payment::{Authenticity, EchoedMetadata, PaymentKey, Rejection, precheck},
    protocol::{ExactOffer, ExactPayload, PaymentPayload, PaymentRequirements, Reason, Verbatim},
};

/// A payment that was read: the offer that it accepts, and what was signed.
pub(crate) struct PresentedPayment {
    message: PaymentPayload,
    payload: Result<ExactPayload, serde_json::Error>,
    /// Other offers that it may have accepted.
    others: Vec<Verbatim<PaymentRequirements>>,
}

/// The part of a payload that says who pays.
#[derive(Deserialize)]
struct PayloadFrom {
    #[serde(alias = "permit2Authorization")]
    authorization: AuthorizationFrom,
}

#[derive(Deserialize)]
struct AuthorizationFrom {
    from: String,
}

impl PresentedPayment {
    /// Reads the payload as one of `exact`.
    pub(crate) fn new(message: PaymentPayload) -> Self {
        let payload = message.payload.read();
        Self { message, payload, others: Vec::new() }
    }

    /// Names other offers that it may have accepted, where it does not say which.
    pub(crate) fn or_accepting(mut self, others: Vec<Verbatim<PaymentRequirements>>) -> Self {
        self.others = others;
        self
    }

    /// Returns what was signed.
    pub(crate) fn payload(&self) -> Result<&ExactPayload, Refusal> {
        let unreadable = |error| format!("the payload cannot be read: {error}");
        let refuse = |error| Refusal::malformed(Reason::InvalidPayload, unreadable(error));
        self.payload.as_ref().map_err(refuse)
    }

    /// The payer's address as the payer writes it: receipts name it in the same letters, as facilitators do that pass on what they
    /// got. Empty if there is no payload to read it from.
    pub(crate) fn payer(&self) -> String {
        serde_json::from_str(self.message.payload.text())
            .map_or_else(|_| String::new(), |payload: PayloadFrom| payload.authorization.from)
    }

    /// Returns what it echoes besides the offer, for a facilitator that uses it. It is passed on only if it is about the resource at the URL
    /// that the seller configured: a facilitator may show it to others.
    pub(crate) fn echo(&self, resource_url: &str, declared: &Declared) -> Option<Arc<EchoedMetadata>> {
        let resource = self.message.resource.as_ref()?;
        if resource.read().ok()?.url != resource_url {
            return None;
        }
        EchoedMetadata::new(Some(resource.clone()), declared.passed_on(self.message.extensions.as_ref())).map(Arc::new)
    }

    /// Returns the offers that the payment may accept, as far as they can be read.
    fn accepted(&self) -> impl Iterator<Item = ExactOffer> {
        let accepted = [&self.message.accepted].into_iter().chain(&self.others);
        accepted.filter_map(|accepted| ExactOffer::try_from(&accepted.read().ok()?).ok())
    }

    /// Returns why the payment is for none of the offers.
    fn not_on_offer(&self, offers: &[Offer]) -> Refusal {
        let (scheme, network) = match self.message.accepted.read() {
            Ok(accepted) => (accepted.scheme, accepted.network),
            Err(error) => {
                let detail = format!("the accepted offer cannot be read: {error}");
                return Refusal::malformed(Reason::InvalidPayload, detail);
            }
        };
        let on_network = |offer: &Offer| offer.terms.offer().network().to_string() == network;
        let of_scheme = |offer: &Offer| offer.terms.offer().scheme() == scheme;
        let (reason, detail) = if scheme != "exact" && !offers.iter().any(of_scheme) {
            (Reason::UnsupportedScheme, format!("scheme {scheme:?} is not on offer"))
        } else if !offers.iter().any(on_network) {
            (Reason::InvalidNetwork, format!("network {network:?} is not on offer"))
        } else {
            let detail =
                "the accepted asset, amount, payTo, maxTimeoutSeconds or extra is not what is offered for this request";
            (Reason::InvalidPaymentRequirements, detail.to_owned())
        };
        Refusal::rejected(reason, detail)
    }

    /// Finds what the payment pays for: an offer that is on now, or one on record that it was accepted under before. `refusal` is why it is
    /// refused if it is new, whatever it pays for.
    pub(crate) async fn find_payment(
        &self,
        seller: &Seller,
        offers: &[Offer],
        refusal: Option<Refusal>,
    ) -> Result<Matched, Refusal> {
        match self.match_offer(seller, offers, refusal) {
            // An amount that changed since is no reason to forget what was bought at the old one.
            Err(refusal) if self.payload.is_ok() => Box::pin(self.find_recorded(seller, refusal)).await,
            matched => matched,
        }
    }

    /// Finds the offer that the payment is for and checks it. It may be on record from before if it is not good for what is on offer now.
    fn match_offer(&self, seller: &Seller, offers: &[Offer], refusal: Option<Refusal>) -> Result<Matched, Refusal> {
        let mut candidates = offers.iter().filter(|offer| offer.terms.is_accepted_by(&self.message.accepted));
        let Some(first) = candidates.next() else { return Err(self.not_on_offer(offers)) };
        let exact = self.payload()?;
        refusal.map_or(Ok(()), Err)?;
        Ok(best_match(seller, first, candidates, exact)?)
    }

    /// Returns the payment as it is on record, or the refusal. A client that does not hold the signature learns nothing of it. Anybody can ask,
    /// so it has a place among the payments that are not verified.
    async fn find_recorded(&self, seller: &Seller, refusal: Refusal) -> Result<Matched, Refusal> {
        let exact = self.payload()?;
        let _place = seller.unverified.enter().await.ok_or(Why::Busy)?;
        for accepted in self.accepted() {
            let means = |offer: &ExactOffer| (offer.scheme(), offer.network(), offer.asset.address);
            let (network, asset) = (accepted.network(), accepted.nonce_keeper());
            let key = PaymentKey { network, asset, payer: exact.authorization.from, nonce: exact.authorization.nonce };
            for facilitator in &seller.facilitators {
                // Several may share a ledger; only one can tell what became of it. The amount and the payee are in what was signed, whatever is
                // offered since.
                if let Some(record) = facilitator.ledger().get(&key).await?
                    && facilitator.knows(&record.terms)
                    && means(&accepted) == means(record.terms.offer())
                    && record.authorization == exact.authorization
                    && is_signed_alike(&record, exact)
                {
                    let payment = record.payment();
                    return Ok(Matched { payment, refusal: Some(refusal), facilitator: facilitator.clone() });
                }
            }
        }
        Err(refusal)
    }
}

/// Of the offers that a payment may be for, the one that it is good for. Where only the chain can judge the signature, the first is taken.
fn best_match<'a>(
    seller: &Seller,
    first: &Offer,
    others: impl Iterator<Item = &'a Offer>,
    exact: &ExactPayload,
) -> Result<Matched, Rejection> {
    let now = seller.now();
    let check = |offer: &Offer| {
        let payment = precheck(offer.terms.clone(), exact.clone(), seller.rules.limits.window(), now)?;
        let facilitator = seller.facilitators.get(offer.facilitator).cloned();
        let unserved = || Rejection::new(Reason::InvalidNetwork, "nobody settles this offer here");
        Ok(Matched { payment, refusal: None, facilitator: facilitator.ok_or_else(unserved)? })
    };
    let mut best = check(first);
    for other in others {
        match &best {
            Ok(matched) if matched.payment.authenticity() == Authenticity::Proven => break,
            Ok(_) => {
                if let Ok(other) = check(other)
                    && other.payment.authenticity() == Authenticity::Proven
                {
                    best = Ok(other);
                }
            }
            Err(_) => best = check(other).or(best),
        }
    }
    best
}

fn is_signed_alike(record: &Record, exact: &ExactPayload) -> bool {
    record.signature == exact.signature
        || exact.signature.recover_from(|| record.signing_hash()) == Ok(record.key.payer)
}
