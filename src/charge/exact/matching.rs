//! A payment as its payer presents it, in whichever version of the protocol, and which of our offers it pays.

use std::sync::Arc;

use alloy_primitives::{Address, B256};
use serde::Deserialize;

use super::Matched;
use crate::{
    charge::{
        Offer, Refusal, Seller,
        extensions::{Extensions, check_extensions, payment_id},
    },
    ledger::Record,
    network::Network,
    payment::{Authenticity, EchoedMetadata, PaymentKey, Rejection, Terms, precheck},
    protocol::{
        ExactOffer, ExactPayload, PaymentPayload, Reason, ResourceInfo, Verbatim,
        extensions::{BAZAAR, is_same},
        v1,
    },
};

/// A payment that was read: the offer that it accepts, and what was signed.
pub(crate) struct PresentedPayment {
    message: Message,
    payload: Result<ExactPayload, serde_json::Error>,
}

/// What a payer says of its payment, before the payload is read.
pub(crate) enum Message {
    /// Echoes the offer.
    V2(PaymentPayload),
    /// Names scheme and network; the rest is in what was signed.
    V1(v1::PaymentPayloadV1),
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
    pub(crate) fn new(message: Message) -> Self {
        let payload = message.payload().read();
        Self { message, payload }
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
        serde_json::from_str(self.message.payload().text())
            .map_or_else(|_| String::new(), |payload: PayloadFrom| payload.authorization.from)
    }

    /// Returns the digest of the payment identifier; v1 has no place for one.
    pub(crate) fn id(&self, asks_for_ids: bool) -> Result<Option<B256>, Refusal> {
        payment_id(self.extensions(), asks_for_ids)
    }

    /// Returns what it echoes of the 402 besides the offer, for a facilitator that uses it. It is passed on only if it is about
    /// the resource at the URL that the seller configured: a facilitator may show it to others.
    pub(crate) fn echo(&self, resource_url: &str, offered: Extensions<'_>) -> Option<Arc<EchoedMetadata>> {
        let resource = self.resource()?;
        if resource.read().ok()?.url != resource_url {
            return None;
        }
        if let (Some(echoed), false) = (self.extensions(), self.repeats(offered)) {
            // A payer must not change the seller's own description.
            let echoed = echoed.read().ok()?;
            let offered = offered.and_then(|offered| offered.read().ok()).unwrap_or_default();
            let is_sellers = |bazaar| offered.get(BAZAAR).is_some_and(|offered| is_same(bazaar, offered));
            if !echoed.get(BAZAAR).is_none_or(is_sellers) {
                return None;
            }
        }
        EchoedMetadata::new(Some(resource.clone()), self.extensions().cloned()).map(Arc::new)
    }

    /// Returns `true` if the extensions came back byte for byte.
    fn repeats(&self, offered: Extensions<'_>) -> bool {
        self.extensions() == offered
    }

    /// v1 has no place for them.
    fn extensions(&self) -> Extensions<'_> {
        match &self.message {
            Message::V2(payment) => payment.extensions.as_ref(),
            Message::V1(_) => None,
        }
    }

    fn resource(&self) -> Option<&Verbatim<ResourceInfo>> {
        match &self.message {
            Message::V2(payment) => payment.resource.as_ref(),
            Message::V1(_) => None,
        }
    }

    /// Returns `true` if the payment may be for this offer.
    fn may_pay(&self, offer: &Offer) -> bool {
        match &self.message {
            Message::V2(payment) => offer.terms.is_accepted_by(&payment.accepted),
            Message::V1(payment) => payment.scheme == "exact" && offer.v1_network == Some(&payment.network),
        }
    }

    /// Returns `true` if it fits these terms, under which the same authorization was accepted before.
    fn agrees_with(&self, terms: &Terms) -> bool {
        match &self.message {
            Message::V2(payment) => terms.is_accepted_by(&payment.accepted),
            Message::V1(payment) => {
                payment.scheme == "exact" && terms.offer().network().v1_name() == Some(&payment.network)
            }
        }
    }

    /// Returns the contracts that may keep the payment's nonce: those of the tokens on offer, or of the one that it names itself.
    fn nonce_keepers(&self, offers: &[Offer]) -> Vec<(Network, Address)> {
        match &self.message {
            Message::V2(payment) => {
                let offer = payment.accepted.read().ok().and_then(|accepted| ExactOffer::try_from(&accepted).ok());
                offer.map(|offer| (offer.network(), offer.nonce_keeper())).into_iter().collect()
            }
            Message::V1(payment) => offers
                .iter()
                .filter(|offer| offer.v1_network == Some(&payment.network))
                .map(|offer| (offer.terms.offer().network(), offer.terms.offer().asset.address))
                .collect(),
        }
    }

    /// Returns why the payment is for none of the offers.
    fn not_on_offer(&self, offers: &[Offer]) -> Result<Rejection, Refusal> {
        let (scheme, network) = match &self.message {
            Message::V2(payment) => {
                let unreadable = |error| format!("the accepted offer cannot be read: {error}");
                let accepted = payment
                    .accepted
                    .read()
                    .map_err(|error| Refusal::malformed(Reason::InvalidPayload, unreadable(error)))?;
                (accepted.scheme, accepted.network)
            }
            Message::V1(payment) => (payment.scheme.clone(), payment.network.clone()),
        };
        let on_network = |offer: &Offer| match self.message {
            Message::V2(_) => offer.terms.offer().network().to_string() == network,
            Message::V1(_) => offer.v1_network == Some(&network),
        };
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
        Ok(Rejection::new(reason, detail))
    }

    /// Finds what the payment pays for: an offer that is on now, or one on record that it was accepted under before.
    pub(crate) async fn find_payment(
        &self,
        seller: &Seller,
        offers: &[Offer],
        extensions: Extensions<'_>,
    ) -> Result<Matched, Refusal> {
        match self.match_offer(seller, offers, extensions)? {
            Ok(matched) => Ok(matched),
            Err(rejection) => Box::pin(self.find_recorded(seller, offers, rejection)).await,
        }
    }

    /// Finds the offer that the payment is for and checks it. The inner error is why it is not good for what is on offer now; it may be
    /// on record from before.
    fn match_offer(
        &self,
        seller: &Seller,
        offers: &[Offer],
        extensions: Extensions<'_>,
    ) -> Result<Result<Matched, Rejection>, Refusal> {
        let mut candidates = offers.iter().filter(|offer| self.may_pay(offer));
        let Some(first) = candidates.next() else {
            // An amount that changed since is no reason to forget what was bought at the old one.
            let rejection = self.not_on_offer(offers)?;
            return if self.payload.is_ok() { Ok(Err(rejection)) } else { Err(rejection.into()) };
        };
        let exact = self.payload()?;
        Ok(check_extensions(self.extensions(), extensions).and_then(|()| best_match(seller, first, candidates, exact)))
    }

    /// Returns the payment as it is on record, or the rejection. A client that does not hold the signature learns nothing of it.
    async fn find_recorded(&self, seller: &Seller, offers: &[Offer], rejection: Rejection) -> Result<Matched, Refusal> {
        let exact = self.payload()?;
        for (network, asset) in self.nonce_keepers(offers) {
            let key = PaymentKey { network, asset, payer: exact.authorization.from, nonce: exact.authorization.nonce };
            for facilitator in &seller.facilitators {
                // Several may share a ledger; only one can tell what became of it.
                if let Some(record) = facilitator.ledger().get(&key).await?
                    && facilitator.knows(&record.terms)
                    && self.agrees_with(&record.terms)
                    && record.authorization == exact.authorization
                    && is_signed_alike(&record, exact)
                {
                    let payment = record.payment();
                    return Ok(Matched { payment, refusal: Some(rejection), facilitator: facilitator.clone() });
                }
            }
        }
        Err(rejection.into())
    }
}

impl Message {
    fn payload(&self) -> &Verbatim<ExactPayload> {
        match self {
            Self::V2(payment) => &payment.payload,
            Self::V1(payment) => &payment.payload,
        }
    }
}

/// Of the offers that a payment may be for, the one that it is good for. v2 names it; in v1 the authorization and its
/// signature tell. Where only the chain can judge the signature, the first offer of the right amount is taken.
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
