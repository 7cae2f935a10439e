//! Finds what a payment pays for.

use std::sync::Arc;

use super::{claim::Claim, config::Config, offer::OnOffer, refusal::Refusal};
use crate::{
    facilitator::{Authenticity, Facilitator, Prechecked, Rejection, precheck},
    ledger::{PaymentKey, Record},
    protocol::ExactPayload,
};

/// A payment that may be worked on.
pub(super) struct Presented {
    pub(super) payment: Prechecked,
    /// Why it would be refused if it were new: its terms are no longer on offer, or its window is running out. It was
    /// known a moment ago.
    pub(super) refusal: Option<Rejection>,
    pub(super) facilitator: Arc<dyn Facilitator>,
}

/// Finds the offer that the payment is for and checks it, or finds it in the ledger.
pub(super) async fn read(config: &Config, offers: &[OnOffer], claim: &Claim) -> Result<Presented, Refusal> {
    let mut candidates = offers.iter().filter(|offer| claim.may_pay(offer));
    let Some(first) = candidates.next() else {
        let rejection = claim.not_on_offer(offers)?;
        // An amount that changed since is no reason to forget what was bought at the old one.
        return match claim.payload() {
            Ok(exact) => Box::pin(known_or(config, offers, claim, exact, rejection)).await,
            Err(_) => Err(Refusal::invalid(rejection)),
        };
    };
    let exact = claim.payload()?;
    if let Err(rejection) = claim.check_extensions(config.catalogue.extensions()) {
        return Box::pin(known_or(config, offers, claim, exact, rejection)).await;
    }
    match best(config, first, candidates, exact) {
        Ok(presented) => Ok(presented),
        Err(rejection) => Box::pin(known_or(config, offers, claim, exact, rejection)).await,
    }
}

/// Of the offers that a payment may be for, the one that it is good for. v2 names it; in v1 the authorization and its
/// signature tell. Where only the chain can judge the signature, the first offer of the right amount is taken.
fn best<'a>(
    config: &Config,
    first: &OnOffer,
    others: impl Iterator<Item = &'a OnOffer>,
    exact: &ExactPayload,
) -> Result<Presented, Rejection> {
    let now = config.clock.now();
    let check = |offer: &OnOffer| {
        let payment = precheck(offer.terms.clone(), exact.clone(), config.limits.window(), now)?;
        Ok(Presented { payment, refusal: None, facilitator: config.facilitators[offer.facilitator].clone() })
    };
    let mut best = check(first);
    for other in others {
        match &best {
            Ok(presented) if presented.payment.authenticity() == Authenticity::Proven => break,
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

/// The record of exactly this payment, or the rejection. Whoever does not hold the signature learns nothing of it.
async fn known_or(
    config: &Config,
    offers: &[OnOffer],
    claim: &Claim,
    exact: &ExactPayload,
    rejection: Rejection,
) -> Result<Presented, Refusal> {
    for (network, asset) in claim.tokens(offers) {
        let key = PaymentKey { network, asset, payer: exact.authorization.from, nonce: exact.authorization.nonce };
        for facilitator in &config.facilitators {
            if let Some(record) = facilitator.ledger().get(&key).await.map_err(Refusal::Ledger)?
                && claim.agrees_with(&record.terms)
                && record.authorization == exact.authorization
                && is_signed_alike(&record, exact)
            {
                let payment = Prechecked::of_record(&record);
                return Ok(Presented { payment, refusal: Some(rejection), facilitator: facilitator.clone() });
            }
        }
    }
    Err(Refusal::invalid(rejection))
}

fn is_signed_alike(record: &Record, exact: &ExactPayload) -> bool {
    record.signature == exact.signature || exact.signature.recover(record.signing_hash) == Ok(record.key.payer)
}

/// Whether a payment is the one in the record, told without asking the chain.
pub(super) fn is_same(record: &Record, prechecked: &Prechecked) -> bool {
    record.signing_hash == prechecked.signing_hash()
        && (prechecked.authenticity() == Authenticity::Proven || record.signature == *prechecked.signature())
}
