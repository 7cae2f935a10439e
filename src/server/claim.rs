//! What a payment header says, in whichever version of the protocol.

use std::sync::Arc;

use alloy_primitives::{Address, B256};
use http::{HeaderMap, HeaderName};
use serde::Deserialize;
use serde_json::{Map, Value};

use super::{offer::OnOffer, refusal::Refusal};
use crate::{
    network::Network,
    payment::{Echo, Rejection, Terms},
    protocol::{
        DecodeError, ExactOffer, ExactPayload, PaymentId, PaymentPayload, Reason, ResourceInfo, Verbatim, Version,
        bazaar, decode_header,
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
    message: Message,
    payload: Result<ExactPayload, serde_json::Error>,
}

/// The extensions of the 402.
pub(super) type Offered<'a> = Option<&'a Verbatim<Map<String, Value>>>;

enum Message {
    /// Echoes the offer.
    V2(PaymentPayload),
    /// Names scheme and network; the rest is in what was signed.
    V1(v1::PaymentPayload),
}

/// The part of a payload that says who pays.
#[derive(Deserialize)]
struct PayloadFrom {
    authorization: AuthorizationFrom,
}

#[derive(Deserialize)]
struct AuthorizationFrom {
    from: String,
}

impl Claim {
    pub(super) fn read(header: Header<'_>, limit: usize) -> Result<Self, Refusal> {
        let message = match header.version {
            Version::V1 => decode_header(header.value, limit).map(Message::V1),
            Version::V2 => decode_header(header.value, limit).map(Message::V2),
        };
        let message = message.map_err(|error| unreadable(&error, header))?;
        let payload = message.payload().read();
        Ok(Self { message, payload })
    }

    /// What was signed.
    pub(super) fn payload(&self) -> Result<&ExactPayload, Refusal> {
        let unreadable = |error| format!("the payload cannot be read: {error}");
        let refuse = |error| Refusal::malformed(Reason::InvalidPayload, unreadable(error));
        self.payload.as_ref().map_err(refuse)
    }

    /// The payer's address as the payer writes it: receipts name it in the same letters, as facilitators do that pass on what they
    /// got. Empty if there is no payload to read it from.
    pub(super) fn payer(&self) -> String {
        serde_json::from_str(self.message.payload().text())
            .map_or_else(|_| String::new(), |payload: PayloadFrom| payload.authorization.from)
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

    /// Whether this may be the offer that is paid.
    pub(super) fn may_pay(&self, offer: &OnOffer) -> bool {
        match &self.message {
            Message::V2(payment) => offer.terms.is_accepted_by(&payment.accepted),
            Message::V1(payment) => payment.scheme == "exact" && offer.v1_network == Some(&payment.network),
        }
    }

    /// Whether it does not contradict these terms, under which the same authorization was accepted before.
    pub(super) fn agrees_with(&self, terms: &Terms) -> bool {
        match &self.message {
            Message::V2(payment) => terms.is_accepted_by(&payment.accepted),
            Message::V1(payment) => {
                payment.scheme == "exact" && terms.offer().network().v1_name() == Some(&payment.network)
            }
        }
    }

    /// The tokens that it may be in, of those on offer and the one it names itself.
    pub(super) fn tokens(&self, offers: &[OnOffer]) -> Vec<(Network, Address)> {
        match &self.message {
            Message::V2(payment) => {
                let offer = payment.accepted.read().ok().and_then(|accepted| ExactOffer::try_from(&accepted).ok());
                offer.map(|offer| (offer.network(), offer.asset.address)).into_iter().collect()
            }
            Message::V1(payment) => offers
                .iter()
                .filter(|offer| offer.v1_network == Some(&payment.network))
                .map(|offer| (offer.terms.offer().network(), offer.terms.offer().asset.address))
                .collect(),
        }
    }

    /// Why it pays none of the offers.
    pub(super) fn not_on_offer(&self, offers: &[OnOffer]) -> Result<Rejection, Refusal> {
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
        let on_network = |offer: &OnOffer| match self.message {
            Message::V2(_) => offer.terms.offer().network().to_string() == network,
            Message::V1(_) => offer.v1_network == Some(&network),
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

impl Message {
    fn payload(&self) -> &Verbatim<ExactPayload> {
        match self {
            Self::V2(payment) => &payment.payload,
            Self::V1(payment) => &payment.payload,
        }
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

#[cfg(test)]
mod tests {
    use base64_simd::STANDARD;

    use super::*;

    const ACCEPTED: &str = r#""accepted":{"scheme":"exact"}"#;
    const SIGNATURE: &str = r#""signature":"0x0a0B""#;
    const FROM: &str = "0x70997970C51812dc3A010C7d01b50e0d17dc79C8";

    fn authorization(from: &str) -> String {
        format!(
            r#""authorization":{{"from":"{from}","to":"0x90f79bf6eb2c4f870365e785982e1f101e93b906","value":"1000","validAfter":"0","validBefore":"1800000120","nonce":"0x00000000000000000000000000000000000000000000000000000000000000ab"}}"#
        )
    }

    fn read(version: Version, json: &str, limit: usize) -> Result<Claim, Refusal> {
        let value = STANDARD.encode_to_string(json);
        Claim::read(Header { version, value: value.as_bytes() }, limit)
    }

    fn v2(fields: &[&str]) -> Result<Claim, Refusal> {
        read(Version::V2, &format!(r#"{{"x402Version":2,{}}}"#, fields.join(",")), 4096)
    }

    fn v1(fields: &[&str]) -> Result<Claim, Refusal> {
        read(Version::V1, &format!(r#"{{"x402Version":1,{}}}"#, fields.join(",")), 4096)
    }

    fn payload(fields: &[&str]) -> String {
        format!(r#""payload":{{{}}}"#, fields.join(","))
    }

    #[test]
    fn no_key_may_be_there_twice() {
        let payload_once = payload(&[SIGNATURE, &authorization(FROM)]);
        assert!(v2(&[ACCEPTED, &payload_once]).unwrap().payload().is_ok());
        assert!(v1(&[r#""scheme":"exact""#, r#""network":"base""#, &payload_once]).unwrap().payload().is_ok());
        for twice in [ACCEPTED, &payload_once, r#""x402Version":2"#, r#""resource":null"#, r#""extensions":null"#] {
            let fields = [ACCEPTED, &payload_once, r#""resource":null"#, r#""extensions":null"#, twice];
            assert!(v2(&fields).is_err(), "{twice}");
        }
        for twice in [&payload_once, r#""scheme":"exact""#, r#""network":"base""#, r#""x402Version":1"#] {
            let fields = [r#""scheme":"exact""#, r#""network":"base""#, &payload_once, twice];
            assert!(v1(&fields).is_err(), "{twice}");
        }
        let authorization_once = authorization(FROM);
        for twice in [SIGNATURE, &authorization_once] {
            let payload = payload(&[SIGNATURE, &authorization_once, twice]);
            assert!(v2(&[ACCEPTED, &payload]).unwrap().payload().is_err(), "{twice}");
        }
        for twice in
            [r#""value":"1000""#, r#""nonce":"0x00""#, r#""from":"0x70997970C51812dc3A010C7d01b50e0d17dc79C8""#]
        {
            let authorization = authorization_once.replacen('{', &format!("{{{twice},"), 1);
            let payload = payload(&[SIGNATURE, &authorization]);
            assert!(v2(&[ACCEPTED, &payload]).unwrap().payload().is_err(), "{twice}");
        }
    }

    #[test]
    fn nothing_may_follow_a_payment() {
        let payment = format!(r#"{{"x402Version":2,{ACCEPTED},{}}}"#, payload(&[SIGNATURE, &authorization(FROM)]));
        assert!(read(Version::V2, &payment, 4096).is_ok());
        for text in [format!("{payment}{{}}"), format!("{payment},"), payment[..payment.len() - 1].to_owned()] {
            assert!(read(Version::V2, &text, 4096).is_err(), "{text}");
        }
    }

    #[test]
    fn longer_header_than_the_limit_is_refused() {
        let payment = format!(r#"{{"x402Version":2,{ACCEPTED},{}}}"#, payload(&[SIGNATURE, &authorization(FROM)]));
        let length = STANDARD.encoded_length(payment.len());
        assert!(read(Version::V2, &payment, length).is_ok());
        assert!(read(Version::V2, &payment, length - 1).is_err());
    }

    #[test]
    fn payer_is_named_as_it_names_itself() {
        for from in [FROM.to_owned(), FROM.to_lowercase(), format!("0x{}", FROM[2..].to_uppercase())] {
            let payment = v2(&[ACCEPTED, &payload(&[SIGNATURE, &authorization(&from)])]).unwrap();
            assert_eq!(payment.payer(), from);
            assert_eq!(payment.payload().unwrap().authorization.from, FROM.parse::<Address>().unwrap());
        }
    }

    #[test]
    fn unreadable_address_is_refused() {
        for from in ["", "0x", &FROM[..40], &format!("{FROM}ff"), "me"] {
            let payment = v2(&[ACCEPTED, &payload(&[SIGNATURE, &authorization(from)])]).unwrap();
            assert!(payment.payload().is_err(), "{from:?}");
        }
    }
}
