//! Finds what a payment pays for.

use std::sync::Arc;

use super::{claim::Claim, config::Config, offer::OnOffer, refusal::Refusal};
use crate::{
    facilitator::Facilitator,
    ledger::Record,
    payment::{Authenticity, PaymentKey, Prechecked, Rejection, precheck},
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

/// Why a payment is for nothing that is on offer.
pub(super) enum Missed {
    /// It cannot be read.
    Refused(Refusal),
    /// It is not good for what is on offer now; it may be [known](known_or) from before.
    Unknown(Rejection),
}

/// Finds the offer that the payment is for and checks it.
pub(super) fn find(config: &Config, offers: &[OnOffer], claim: &Claim) -> Result<Presented, Missed> {
    let mut candidates = offers.iter().filter(|offer| claim.may_pay(offer));
    let Some(first) = candidates.next() else {
        // An amount that changed since is no reason to forget what was bought at the old one.
        let rejection = claim.not_on_offer(offers).map_err(Missed::Refused)?;
        return Err(match claim.payload() {
            Ok(_) => Missed::Unknown(rejection),
            Err(_) => Missed::Refused(Refusal::invalid(rejection)),
        });
    };
    let exact = claim.payload().map_err(Missed::Refused)?;
    claim.check_extensions(config.catalogue.extensions()).map_err(Missed::Unknown)?;
    best(config, first, candidates, exact).map_err(Missed::Unknown)
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
pub(super) async fn known_or(
    config: &Config,
    offers: &[OnOffer],
    claim: &Claim,
    rejection: Rejection,
) -> Result<Presented, Refusal> {
    let exact = claim.payload()?;
    for (network, asset) in claim.tokens(offers) {
        let key = PaymentKey { network, asset, payer: exact.authorization.from, nonce: exact.authorization.nonce };
        for facilitator in &config.facilitators {
            // Several may share a ledger; only one can tell what became of it.
            if let Some(record) = facilitator.ledger().get(&key).await.map_err(Refusal::Ledger)?
                && facilitator.serves(&record.terms)
                && claim.agrees_with(&record.terms)
                && record.authorization == exact.authorization
                && is_signed_alike(&record, exact)
            {
                let payment = record.payment();
                return Ok(Presented { payment, refusal: Some(rejection), facilitator: facilitator.clone() });
            }
        }
    }
    Err(Refusal::invalid(rejection))
}

fn is_signed_alike(record: &Record, exact: &ExactPayload) -> bool {
    record.signature == exact.signature
        || exact.signature.recover_from(|| record.signing_hash()) == Ok(record.key.payer)
}

/// Whether a payment is the one in the record, told without asking the chain.
pub(super) fn is_same(record: &Record, prechecked: &Prechecked) -> bool {
    record.is_of(prechecked)
        && (prechecked.authenticity() == Authenticity::Proven || record.signature == *prechecked.signature())
}
