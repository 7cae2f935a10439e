//! What a payment header says, in whichever version of the protocol.

use std::{ops::Range, sync::Arc};

use alloy_primitives::{Address, B256};
use http::{HeaderMap, HeaderName};
use serde::Deserialize;
use serde_json::{Map, Value};

use super::{
    frames::{Frame, Frames, Taken},
    letters::{Spelled, Spelling},
    offer::OnOffer,
    refusal::Refusal,
    usual_payload,
};
use crate::{
    network::Network,
    payment::{Echo, Rejection, Terms},
    protocol::{
        DecodeError, ExactOffer, ExactPayload, PaymentId, Reason, ResourceInfo, Verbatim, Version, bazaar,
        decode_header, decode_text,
        extensions::{altered, is_same},
        header_name, v1,
    },
};

pub(super) static PAYMENT_SIGNATURE: HeaderName = HeaderName::from_static(header_name::PAYMENT_SIGNATURE);
pub(super) static X_PAYMENT: HeaderName = HeaderName::from_static(header_name::X_PAYMENT);

/// The one payment header of a request.
#[derive(Clone, Copy, Debug)]
pub(super) struct Header<'a> {
    pub(super) version: Version,
    value: &'a [u8],
}

impl<'a> Header<'a> {
    /// Where v1 is not spoken, its header is one that nobody asked for.
    pub(super) fn of(headers: &'a HeaderMap, speaks_v1: bool) -> Result<Option<Self>, Refusal> {
        let v2 = headers.get_all(&PAYMENT_SIGNATURE).iter().map(|value| (Version::V2, value));
        let v1 = headers.get_all(&X_PAYMENT).iter().map(|value| (Version::V1, value));
        let mut found = v2.chain(v1.filter(|_| speaks_v1));
        match (found.next(), found.next()) {
            (first, None) => Ok(first.map(|(version, value)| Self { version, value: value.as_bytes() })),
            (_, Some(_)) => Err(Refusal::malformed(Reason::InvalidPayload, "more than one payment header")),
        }
    }
}

/// What a payment says it pays for, and with what.
pub(super) struct Claim {
    what: What,
    payload: Result<Spelled, serde_json::Error>,
    /// The text that it was read from and where in it the payload is, if it was not [known](Frames) but for that.
    read: Option<(String, Range<usize>)>,
}

/// The extensions of the 402.
pub(super) type Offered<'a> = Option<&'a Verbatim<Map<String, Value>>>;

enum What {
    /// v2 echoes the offer.
    Offer(Arc<Frame>),
    /// v1 names scheme and network; the rest is in what was signed.
    Named { scheme: String, network: String },
}

impl Claim {
    pub(super) fn read(header: Header<'_>, limit: usize, frames: &Frames) -> Result<Self, Refusal> {
        let refuse = |error| unreadable(&error, header);
        let text = decode_text(header.value, limit).map_err(refuse)?;
        match header.version {
            Version::V1 => {
                let read = serde_json::from_str(&text).map_err(DecodeError::Json).map_err(refuse)?;
                let v1::PaymentPayload { scheme, network, payload, .. } = read;
                Ok(Self {
                    what: What::Named { scheme, network },
                    payload: serde_json::from_str(payload.text()),
                    read: None,
                })
            }
            Version::V2 => {
                let taken = frames.take(&text, usual_payload::read).map_err(DecodeError::Json).map_err(refuse)?;
                let Taken { frame, payload, place } = taken;
                Ok(Self { what: What::Offer(frame), payload, read: place.map(|place| (text, place)) })
            }
        }
    }

    /// Has the next payment like this one read faster.
    pub(super) fn teach(&self, frames: &Frames) {
        if let (What::Offer(frame), Some((text, place))) = (&self.what, &self.read) {
            frames.keep(text, place.clone(), frame);
        }
    }

    /// What was signed.
    pub(super) fn payload(&self) -> Result<&ExactPayload, Refusal> {
        let unreadable = |error| format!("the payload cannot be read: {error}");
        let refuse = |error| Refusal::malformed(Reason::InvalidPayload, unreadable(error));
        self.payload.as_ref().map(|payload| &payload.exact).map_err(refuse)
    }

    /// How the payer writes its address.
    pub(super) fn payer(&self) -> Spelling {
        self.payload.as_ref().map_or(Spelling::default(), |payload| payload.payer)
    }

    /// The digest of what the payer calls the payment; v1 has no place for it. Only a layer that asks for ids refuses what is
    /// none: to others it means nothing.
    pub(super) fn id(&self, asks_for_ids: bool) -> Result<Option<B256>, Refusal> {
        let Some(extensions) = self.extensions() else { return Ok(None) };
        let extensions = extensions.read().map_err(|error| format!("the extensions cannot be read: {error}"));
        match extensions.and_then(|extensions| PaymentId::of(&extensions).map_err(|error| error.to_string())) {
            Ok(id) => Ok(id.map(|id| id.digest())),
            Err(detail) if asks_for_ids => Err(Refusal::malformed(Reason::InvalidPayload, detail)),
            Err(_) => Ok(None),
        }
    }

    /// What it returns of the 402 besides the offer, for a facilitator that makes something of it. Only what is about the resource
    /// that is sold here, at the URL that the seller says: a facilitator may show to others what it reads.
    pub(super) fn echo(&self, resource_url: &str, offered: Offered<'_>) -> Option<Arc<Echo>> {
        let resource = self.resource()?;
        if resource.read().ok()?.url != resource_url {
            return None;
        }
        if let (Some(echoed), false) = (self.extensions(), self.repeats(offered)) {
            // What the seller says of the resource is the seller's alone to say.
            let echoed = echoed.read().ok()?;
            let offered = offered.and_then(|offered| offered.read().ok()).unwrap_or_default();
            let is_sellers = |bazaar| offered.get(bazaar::NAME).is_some_and(|offered| is_same(bazaar, offered));
            if !echoed.get(bazaar::NAME).is_none_or(is_sellers) {
                return None;
            }
        }
        Echo::new(Some(resource.clone()), self.extensions().cloned()).map(Arc::new)
    }

    /// Refuses extensions that are not echoed as they were offered.
    pub(super) fn check_extensions(&self, offered: Offered<'_>) -> Result<(), Rejection> {
        let (Some(echoed), Some(offers), false) = (self.extensions(), offered, self.repeats(offered)) else {
            return Ok(());
        };
        let mismatch = |detail| Err(Rejection::new(Reason::ExtensionEchoMismatch, detail));
        let (Ok(echoed), Ok(offers)) = (echoed.read(), offers.read()) else {
            return mismatch("the extensions cannot be read".to_owned());
        };
        match altered(&offers, &echoed) {
            Some(name) => mismatch(format!("the extension {name:?} is not echoed as it was offered")),
            None => Ok(()),
        }
    }

    /// Whether the extensions came back in the same words.
    fn repeats(&self, offered: Offered<'_>) -> bool {
        self.extensions() == offered
    }

    /// v1 has no place for them.
    fn extensions(&self) -> Offered<'_> {
        match &self.what {
            What::Offer(frame) => frame.extensions.as_ref(),
            What::Named { .. } => None,
        }
    }

    fn resource(&self) -> Option<&Verbatim<ResourceInfo>> {
        match &self.what {
            What::Offer(frame) => frame.resource.as_ref(),
            What::Named { .. } => None,
        }
    }

    /// Whether this may be the offer that is paid.
    pub(super) fn may_pay(&self, offer: &OnOffer) -> bool {
        match &self.what {
            What::Offer(frame) => offer.is_accepted_by(&frame.accepted),
            What::Named { scheme, network } => scheme == "exact" && offer.v1_network == Some(network),
        }
    }

    /// Whether it does not contradict these terms, under which the same authorization was accepted before.
    pub(super) fn agrees_with(&self, terms: &Terms) -> bool {
        match &self.what {
            What::Offer(frame) => terms.is_accepted_by(&frame.accepted),
            What::Named { scheme, network } => scheme == "exact" && terms.offer().network().v1_name() == Some(network),
        }
    }

    /// The tokens that it may be in, of those on offer and the one it names itself.
    pub(super) fn tokens(&self, offers: &[OnOffer]) -> Vec<(Network, Address)> {
        match &self.what {
            What::Offer(frame) => {
                let offer = frame.accepted.read().ok().and_then(|accepted| ExactOffer::try_from(&accepted).ok());
                offer.map(|offer| (offer.network(), offer.asset.address)).into_iter().collect()
            }
            What::Named { network, .. } => offers
                .iter()
                .filter(|offer| offer.v1_network == Some(network))
                .map(|offer| (offer.terms.offer().network(), offer.terms.offer().asset.address))
                .collect(),
        }
    }

    /// Why it pays none of the offers.
    pub(super) fn not_on_offer(&self, offers: &[OnOffer]) -> Result<Rejection, Refusal> {
        let (scheme, network) = match &self.what {
            What::Offer(frame) => {
                let unreadable = |error| format!("the accepted offer cannot be read: {error}");
                let accepted = frame
                    .accepted
                    .read()
                    .map_err(|error| Refusal::malformed(Reason::InvalidPayload, unreadable(error)))?;
                (accepted.scheme, accepted.network)
            }
            What::Named { scheme, network } => (scheme.clone(), network.clone()),
        };
        let on_network = |offer: &OnOffer| match self.what {
            What::Offer(_) => offer.terms.offer().network().to_string() == network,
            What::Named { .. } => offer.v1_network == Some(&network),
        };
        let (reason, detail) = if scheme != "exact" {
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
}

fn unreadable(error: &DecodeError, header: Header<'_>) -> Refusal {
    #[derive(Deserialize)]
    struct Versioned {
        #[serde(rename = "x402Version")]
        version: u64,
    }
    let expected = u64::from(u8::from(header.version));
    if let DecodeError::Json(_) = error
        && let Ok(Versioned { version }) = decode_header(header.value, header.value.len())
        && version != expected
    {
        let detail = format!("x402Version {version} is not read in this header, only {expected}");
        return Refusal::malformed(Reason::InvalidX402Version, detail);
    }
    Refusal::malformed(Reason::InvalidPayload, error.to_string())
}
