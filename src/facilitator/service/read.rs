//! Reads what is asked, in v2 and in v1.

use std::sync::Arc;

use serde::Deserialize;
use serde_json::value::RawValue;

use super::answer::{Answer, Said};
use crate::{
    network::Network,
    payment::{Echo, Terms},
    protocol::{
        ExactOffer, ExactPayload, OfferError, PaymentPayload, PaymentRequirements, Reason, Verbatim, Version, v1,
    },
};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Purpose {
    Verify,
    Settle,
}

/// A payment, and what it is to be checked against.
pub(super) struct Asked {
    pub(super) version: Version,
    pub(super) terms: Arc<Terms>,
    pub(super) payload: ExactPayload,
    /// Whether the payer says that it accepted these very terms.
    pub(super) is_accepted: bool,
    /// What else the payer returned of the 402.
    pub(super) echo: Option<Arc<Echo>>,
}

/// Why a request is not one.
#[derive(Debug)]
pub(super) struct Unreadable {
    reason: Reason,
    detail: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Envelope<'a> {
    #[serde(default)]
    x402_version: Option<u64>,
    #[serde(borrow)]
    payment_payload: &'a RawValue,
    #[serde(borrow)]
    payment_requirements: &'a RawValue,
}

#[derive(Deserialize)]
struct Versioned {
    #[serde(rename = "x402Version")]
    x402_version: u64,
}

impl Asked {
    pub(super) fn read(body: &[u8]) -> Result<Self, Unreadable> {
        let unreadable = |reason| move |error: serde_json::Error| Unreadable { reason, detail: error.to_string() };
        let envelope: Envelope<'_> = serde_json::from_slice(body).map_err(unreadable(Reason::InvalidPayload))?;
        let payment = envelope.payment_payload.get();
        let Versioned { x402_version } =
            serde_json::from_str(payment).map_err(unreadable(Reason::InvalidX402Version))?;
        if envelope.x402_version.is_some_and(|version| version != x402_version) {
            return Err(Unreadable {
                reason: Reason::InvalidX402Version,
                detail: "the request and its payment are of different versions".to_owned(),
            });
        }
        let requirements = envelope.payment_requirements.get();
        match x402_version {
            2 => {
                let payment: PaymentPayload =
                    serde_json::from_str(payment).map_err(unreadable(Reason::InvalidPayload))?;
                let offer: PaymentRequirements =
                    serde_json::from_str(requirements).map_err(unreadable(Reason::InvalidPaymentRequirements))?;
                let terms = Terms::new(ExactOffer::try_from(&offer)?);
                Ok(Self {
                    version: Version::V2,
                    is_accepted: terms.is_accepted_by(&payment.accepted),
                    payload: read_payload(&payment.payload)?,
                    terms: Arc::new(terms),
                    echo: Echo::new(payment.resource, payment.extensions).map(Arc::new),
                })
            }
            1 => {
                let payment: v1::PaymentPayload =
                    serde_json::from_str(payment).map_err(unreadable(Reason::InvalidPayload))?;
                let offer: v1::PaymentRequirements =
                    serde_json::from_str(requirements).map_err(unreadable(Reason::InvalidPaymentRequirements))?;
                let terms = Terms::new(ExactOffer::try_from(&offer)?);
                let network = Network::from_v1_name(&payment.network);
                Ok(Self {
                    version: Version::V1,
                    is_accepted: payment.scheme == "exact" && network == Some(terms.offer().network()),
                    payload: read_payload(&payment.payload)?,
                    terms: Arc::new(terms),
                    echo: None,
                })
            }
            other => Err(Unreadable {
                reason: Reason::InvalidX402Version,
                detail: format!("x402Version {other} is not known here, only 1 and 2"),
            }),
        }
    }

    pub(super) fn valid(&self) -> Answer {
        Answer::verdict(None, Some(self.payload.authorization.from))
    }

    pub(super) fn invalid(&self, reason: Reason, detail: &str) -> Answer {
        Answer::verdict(Some((reason, detail)), Some(self.payload.authorization.from))
    }

    pub(super) fn settled(&self, said: &Said) -> Answer {
        Answer::settlement(self, said)
    }
}

impl Unreadable {
    pub(super) fn into_answer(self, purpose: Purpose) -> Answer {
        match purpose {
            Purpose::Verify => Answer::unreadable_verification(self.reason, &self.detail),
            Purpose::Settle => Answer::unreadable_settlement(self.reason, &self.detail),
        }
    }
}

impl From<OfferError> for Unreadable {
    fn from(error: OfferError) -> Self {
        let reason = match error {
            OfferError::Scheme(_) => Reason::UnsupportedScheme,
            OfferError::Network(_) => Reason::InvalidNetwork,
            OfferError::MissingDomain => Reason::MissingEip712Domain,
            _ => Reason::InvalidPaymentRequirements,
        };
        Self { reason, detail: error.to_string() }
    }
}

fn read_payload(payload: &Verbatim<ExactPayload>) -> Result<ExactPayload, Unreadable> {
    payload.read().map_err(|error| Unreadable { reason: Reason::InvalidPayload, detail: error.to_string() })
}
