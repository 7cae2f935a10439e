//! From a payment header to a purchase.

use alloy_primitives::{B256, U256};
use http::request::Parts;
use tracing::{Span, field::display};

use super::{
    answer::Answer,
    claim::{Claim, Header},
    presented::{self, Missed, Presented, is_same},
    purchase::Purchase,
    sale::{self, Sale},
};
use crate::{
    ledger::Fingerprint,
    payment::{Authenticity, PaymentKey, Rejection, Verified},
};

/// Why there is no purchase yet.
enum Missing {
    Refused(Answer),
    Unknown(Box<Unknown>),
}

/// A payment for nothing that is on offer now.
struct Unknown {
    sale: Sale,
    claim: Claim,
    id: Option<B256>,
    rejection: Rejection,
}

impl Purchase {
    /// Reads the payment and finds what it is for. The error is what the client is told.
    pub(super) async fn begin(sale: Sale, parts: &Parts, span: &Span) -> Result<Box<Self>, Answer> {
        let mut purchase = match Self::read(sale, parts) {
            Ok(purchase) => purchase,
            Err(Missing::Refused(answer)) => return Err(answer),
            Err(Missing::Unknown(unknown)) => Box::pin(unknown.known(parts)).await?,
        };
        if !span.is_disabled() {
            describe(span, &purchase.key, purchase.payment.authorization().value);
        }
        if purchase.refusal.is_none() && purchase.payment.authenticity() != Authenticity::Proven {
            purchase.verified = Box::pin(authenticate(&purchase)).await?;
        }
        let permit = purchase.sale.config.permits.clone().try_acquire_owned().map_err(|_| sale::overloaded())?;
        purchase.permit = Some(permit);
        Ok(purchase)
    }

    /// What needs no waiting is done where nothing waits: it then takes no room in the future of every request.
    fn read(mut sale: Sale, parts: &Parts) -> Result<Box<Self>, Missing> {
        let header = match Header::of(&parts.headers, sale.config.catalogue.speaks_v1()) {
            Ok(Some(header)) => header,
            Ok(None) => return Err(Missing::Refused(sale.demand())),
            Err(refusal) => return Err(Missing::Refused(sale.refuse(&refusal))),
        };
        sale.version = header.version;
        let claim = match Claim::read(header, sale.config.limits.payment_header) {
            Ok(claim) => claim,
            Err(refusal) => return Err(Missing::Refused(sale.refuse(&refusal))),
        };
        sale.payer = claim.payer();
        let refused = |refusal| Missing::Refused(sale.refuse(&refusal));
        let id = claim.id(sale.config.asks_for_ids).map_err(refused)?;
        match presented::find(&sale.config, &sale.offers, &claim) {
            Ok(presented) => Ok(Self::of(sale, &claim, id, presented, parts)),
            Err(Missed::Refused(refusal)) => Err(refused(refusal)),
            Err(Missed::Unknown(rejection)) => Err(Missing::Unknown(Box::new(Unknown { sale, claim, id, rejection }))),
        }
    }

    fn of(sale: Sale, claim: &Claim, id: Option<B256>, presented: Presented, parts: &Parts) -> Box<Self> {
        let Presented { payment, refusal, facilitator } = presented;
        let catalogue = &sale.config.catalogue;
        let payment = match facilitator.uses_extensions() {
            true => {
                let url = catalogue.public_url(&sale.target);
                payment.with_echo(url.and_then(|url| claim.echo(&url, catalogue.extensions())))
            }
            false => payment,
        };
        Box::new(Self {
            key: payment.key(),
            request: Fingerprint::of(parts, catalogue.seller(), catalogue.priced_by()),
            id,
            payment,
            refusal,
            facilitator,
            verified: None,
            permit: None,
            busy: None,
            sale,
        })
    }
}

impl Unknown {
    /// The purchase, if the ledger knows the payment from before.
    async fn known(self: Box<Self>, parts: &Parts) -> Result<Box<Purchase>, Answer> {
        let Self { sale, claim, id, rejection } = *self;
        match presented::known_or(&sale.config, &sale.offers, &claim, rejection).await {
            Ok(presented) => Ok(Purchase::of(sale, &claim, id, presented, parts)),
            Err(refusal) => Err(sale.refuse(&refusal)),
        }
    }
}

/// Says in the span which payment it is.
fn describe(span: &Span, key: &PaymentKey, amount: U256) {
    span.record("network", display(key.network)).record("asset", display(key.asset));
    span.record("payer", display(key.payer)).record("nonce", display(key.nonce)).record("amount", display(amount));
}

/// Asks the chain whether a contract at the payer's address accepts the signature, before anything is reserved and before
/// the payment takes a place: anybody can make such payments up.
async fn authenticate(purchase: &Purchase) -> Result<Option<Verified>, Answer> {
    let Purchase { sale, facilitator, payment, key, .. } = purchase;
    let record = facilitator.ledger().get(key).await.map_err(|error| sale::ledger_failed(&error))?;
    if record.is_some_and(|record| is_same(&record, payment)) {
        return Ok(None);
    }
    let _place = sale.config.unproven.enter().await.ok_or_else(sale::overloaded)?;
    let verified = facilitator.as_ref().verify(payment).await;
    verified.map(Some).map_err(|error| sale.not_verified(&error))
}
