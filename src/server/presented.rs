//! Reads the payment that a request carries and finds what it pays for.

use std::sync::Arc;

use http::{HeaderMap, StatusCode};
use serde::Deserialize;

use super::{config::Config, offer::OnOffer};
use crate::{
    facilitator::{Authenticity, Facilitator, Prechecked, Rejection, precheck},
    ledger::{LedgerError, PaymentKey, Record},
    protocol::{
        DecodeError, ExactOffer, ExactPayload, PaymentPayload, PaymentRequirements, Reason, Verbatim, decode_header,
        header_name,
    },
};

/// A payment that may be worked on.
pub(super) struct Presented {
    pub(super) payment: Payment,
    pub(super) facilitator: Arc<dyn Facilitator>,
}

pub(super) enum Payment {
    /// Good for an offer of today, as far as can be told locally.
    Good(Prechecked),
    /// Accepted earlier, under terms that may no longer be on offer or with a window that is running out.
    Known(Box<Record>),
}

/// Why a payment is not worked on.
#[derive(Debug)]
pub(super) enum Refusal {
    /// With this status, and the offer again.
    Invalid(StatusCode, Rejection),
    /// The ledger could not be asked.
    Ledger(LedgerError),
}

/// The one payment header of a request.
pub(super) fn header(headers: &HeaderMap) -> Result<Option<&[u8]>, Refusal> {
    let mut values = headers.get_all(header_name::PAYMENT_SIGNATURE).iter();
    match (values.next(), values.next()) {
        (first, None) => Ok(first.map(|value| value.as_bytes())),
        (_, Some(_)) => Err(malformed(Reason::InvalidPayload, "more than one payment header")),
    }
}

/// Finds the offer that the payment is for and checks it, or finds it in the ledger.
pub(super) async fn read(config: &Config, offers: &[OnOffer], header: &[u8]) -> Result<Presented, Refusal> {
    let payload: PaymentPayload =
        decode_header(header, config.limits.payment_header).map_err(|error| unreadable(&error, header))?;
    let accepted = offers.iter().find(|offer| offer.terms.is_accepted_by(&payload.accepted));
    let Some(offer) = accepted else {
        let rejection = not_on_offer(&payload.accepted, offers)?;
        // An amount that changed since is no reason to forget what was bought at the old one.
        return match payload.payload.read() {
            Ok(exact) => known_or(config, &payload.accepted, &exact, rejection).await,
            Err(_) => Err(invalid(rejection)),
        };
    };
    let exact: ExactPayload = payload
        .payload
        .read()
        .map_err(|error| malformed(Reason::InvalidPayload, format!("the payload cannot be read: {error}")))?;
    let window = config.limits.window();
    match precheck(offer.terms.clone(), exact, window, config.clock.now()) {
        Ok(prechecked) => Ok(Presented {
            payment: Payment::Good(prechecked),
            facilitator: config.facilitators[offer.facilitator].clone(),
        }),
        Err(rejection) => match payload.payload.read() {
            Ok(exact) => known_or(config, &payload.accepted, &exact, rejection).await,
            Err(_) => Err(invalid(rejection)),
        },
    }
}

/// The record of exactly this payment, or the rejection. Whoever does not hold the signature learns nothing of it.
async fn known_or(
    config: &Config,
    accepted: &Verbatim<PaymentRequirements>,
    exact: &ExactPayload,
    rejection: Rejection,
) -> Result<Presented, Refusal> {
    let Some(offer) = accepted.read().ok().and_then(|accepted| ExactOffer::try_from(&accepted).ok()) else {
        return Err(invalid(rejection));
    };
    let key = PaymentKey {
        network: offer.network(),
        asset: offer.asset.address,
        payer: exact.authorization.from,
        nonce: exact.authorization.nonce,
    };
    for facilitator in &config.facilitators {
        if let Some(record) = facilitator.ledger().get(&key).await.map_err(Refusal::Ledger)?
            && record.terms.is_accepted_by(accepted)
            && record.authorization == exact.authorization
            && is_signed_alike(&record, exact)
        {
            return Ok(Presented { payment: Payment::Known(Box::new(record)), facilitator: facilitator.clone() });
        }
    }
    Err(invalid(rejection))
}

fn is_signed_alike(record: &Record, exact: &ExactPayload) -> bool {
    record.signature == exact.signature || exact.signature.recover(record.signing_hash) == Ok(record.key.payer)
}

/// Whether a payment is the one in the record, told without asking the chain.
pub(super) fn is_same(record: &Record, prechecked: &Prechecked) -> bool {
    record.signing_hash == prechecked.signing_hash()
        && (prechecked.authenticity() == Authenticity::Proven || record.signature == *prechecked.signature())
}

fn not_on_offer(accepted: &Verbatim<PaymentRequirements>, offers: &[OnOffer]) -> Result<Rejection, Refusal> {
    let accepted = accepted
        .read()
        .map_err(|error| malformed(Reason::InvalidPayload, format!("the accepted offer cannot be read: {error}")))?;
    let on_network = |offer: &OnOffer| offer.terms.offer().network().to_string() == accepted.network;
    let (reason, detail) = if accepted.scheme != "exact" {
        (Reason::UnsupportedScheme, format!("scheme {:?} is not on offer", accepted.scheme))
    } else if !offers.iter().any(on_network) {
        (Reason::InvalidNetwork, format!("network {:?} is not on offer", accepted.network))
    } else {
        let detail =
            "the accepted asset, amount, payTo, maxTimeoutSeconds or extra is not what is offered for this request";
        (Reason::InvalidPaymentRequirements, detail.to_owned())
    };
    Ok(Rejection::new(reason, detail))
}

fn unreadable(error: &DecodeError, header: &[u8]) -> Refusal {
    #[derive(Deserialize)]
    struct Versioned {
        #[serde(rename = "x402Version")]
        version: u64,
    }
    if let DecodeError::Json(_) = error
        && let Ok(Versioned { version }) = decode_header(header, header.len())
        && version != 2
    {
        return malformed(
            Reason::InvalidX402Version,
            format!("x402Version {version} is not served in this header, only 2"),
        );
    }
    malformed(Reason::InvalidPayload, error.to_string())
}

fn malformed(reason: Reason, detail: impl Into<String>) -> Refusal {
    Refusal::Invalid(StatusCode::BAD_REQUEST, Rejection::new(reason, detail))
}

fn invalid(rejection: Rejection) -> Refusal {
    Refusal::Invalid(StatusCode::PAYMENT_REQUIRED, rejection)
}
