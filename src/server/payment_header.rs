//! The payment header: which payment it holds, in whichever version of the protocol, and which of our offers that pays.

use std::sync::Arc;

use alloy_primitives::{Address, B256};
use http::HeaderMap;
use serde::Deserialize;

use super::{
    config::Config,
    header_names::{PAYMENT_SIGNATURE, X_PAYMENT},
    offer::Offer,
};
use crate::{
    charge::{
        Refusal,
        exact::Matched,
        extensions::{Extensions, check_extensions, payment_id},
    },
    ledger::Record,
    network::Network,
    payment::{Authenticity, EchoedMetadata, PaymentKey, Rejection, Terms, precheck},
    protocol::{
        DecodeError, ExactOffer, ExactPayload, MAX_PAYMENT_HEADER, PaymentPayload, Reason, ResourceInfo, Verbatim,
        Version, decode_header,
        extensions::{BAZAAR, is_same},
        v1,
    },
};

/// The one payment header of a request.
#[derive(Clone, Copy, Debug)]
pub(super) struct RawHeader<'a> {
    pub(super) version: Version,
    value: &'a [u8],
}

impl<'a> RawHeader<'a> {
    /// Returns the payment header, if there is one. That of v1 is ignored where v1 is turned off.
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

/// A payment header that was read: the offer that it accepts, and what was signed.
pub(super) struct PaymentHeader {
    message: Message,
    payload: Result<ExactPayload, serde_json::Error>,
}

/// What a payment header says, before its payload is read.
pub(super) enum Message {
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

impl Message {
    pub(super) fn read(header: RawHeader<'_>) -> Result<Self, Refusal> {
        let message = match header.version {
            Version::V1 => decode_header(header.value, MAX_PAYMENT_HEADER).map(Self::V1),
            Version::V2 => decode_header(header.value, MAX_PAYMENT_HEADER).map(Self::V2),
        };
        message.map_err(|error| unreadable(&error, header))
    }
}

impl PaymentHeader {
    /// Reads the payload as one of `exact`.
    pub(super) fn exact(message: Message) -> Self {
        let payload = message.payload().read();
        Self { message, payload }
    }

    /// Returns what was signed.
    fn payload(&self) -> Result<&ExactPayload, Refusal> {
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

    /// Returns the digest of the payment identifier; v1 has no place for one.
    pub(super) fn id(&self, asks_for_ids: bool) -> Result<Option<B256>, Refusal> {
        payment_id(self.extensions(), asks_for_ids)
    }

    /// Returns what the header echoes of the 402 besides the offer, for a facilitator that uses it. It is passed on only if it is about
    /// the resource at the URL that the seller configured: a facilitator may show it to others.
    pub(super) fn echo(&self, resource_url: &str, offered: Extensions<'_>) -> Option<Arc<EchoedMetadata>> {
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

    /// Returns `true` if the header fits these terms, under which the same authorization was accepted before.
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
    pub(super) async fn find_payment(&self, config: &Config, offers: &[Offer]) -> Result<Matched, Refusal> {
        match self.match_offer(config, offers)? {
            Ok(matched) => Ok(matched),
            Err(rejection) => Box::pin(self.find_recorded(config, offers, rejection)).await,
        }
    }

    /// Finds the offer that the payment is for and checks it. The inner error is why it is not good for what is on offer now; it may be
    /// on record from before.
    fn match_offer(&self, config: &Config, offers: &[Offer]) -> Result<Result<Matched, Rejection>, Refusal> {
        let mut candidates = offers.iter().filter(|offer| self.may_pay(offer));
        let Some(first) = candidates.next() else {
            // An amount that changed since is no reason to forget what was bought at the old one.
            let rejection = self.not_on_offer(offers)?;
            return if self.payload.is_ok() { Ok(Err(rejection)) } else { Err(rejection.into()) };
        };
        let exact = self.payload()?;
        Ok(check_extensions(self.extensions(), config.catalogue.extensions())
            .and_then(|()| best_match(config, first, candidates, exact)))
    }

    /// Returns the payment as it is on record, or the rejection. A client that does not hold the signature learns nothing of it.
    async fn find_recorded(&self, config: &Config, offers: &[Offer], rejection: Rejection) -> Result<Matched, Refusal> {
        let exact = self.payload()?;
        for (network, asset) in self.nonce_keepers(offers) {
            let key = PaymentKey { network, asset, payer: exact.authorization.from, nonce: exact.authorization.nonce };
            for facilitator in &config.facilitators {
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

fn unreadable(error: &DecodeError, header: RawHeader<'_>) -> Refusal {
    #[derive(Deserialize)]
    struct Versioned {
        #[serde(rename = "x402Version")]
        version: u64,
    }
    // A byte order mark, in base64.
    if header.value.starts_with(b"77u/") {
        let detail = "the header's JSON begins with a byte order mark (U+FEFF): leave it out";
        return Refusal::malformed(Reason::InvalidPayload, detail);
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

/// Of the offers that a payment may be for, the one that it is good for. v2 names it; in v1 the authorization and its
/// signature tell. Where only the chain can judge the signature, the first offer of the right amount is taken.
fn best_match<'a>(
    config: &Config,
    first: &Offer,
    others: impl Iterator<Item = &'a Offer>,
    exact: &ExactPayload,
) -> Result<Matched, Rejection> {
    let now = config.seller.now();
    let check = |offer: &Offer| {
        let payment = precheck(offer.terms.clone(), exact.clone(), config.seller.rules.limits.window(), now)?;
        Ok(Matched { payment, refusal: None, facilitator: config.facilitators[offer.facilitator].clone() })
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

#[cfg(test)]
mod tests {
    use base64_simd::STANDARD;

    use super::*;
    use crate::charge::Why;

    const ACCEPTED: &str = r#""accepted":{"scheme":"exact"}"#;
    const SIGNATURE: &str = r#""signature":"0x0a0B""#;
    const FROM: &str = "0x70997970C51812dc3A010C7d01b50e0d17dc79C8";

    fn authorization(from: &str) -> String {
        format!(
            r#""authorization":{{"from":"{from}","to":"0x90f79bf6eb2c4f870365e785982e1f101e93b906","value":"1000","validAfter":"0","validBefore":"1800000120","nonce":"0x00000000000000000000000000000000000000000000000000000000000000ab"}}"#
        )
    }

    fn read(version: Version, json: &str) -> Result<PaymentHeader, Refusal> {
        let value = STANDARD.encode_to_string(json);
        Message::read(RawHeader { version, value: value.as_bytes() }).map(PaymentHeader::exact)
    }

    fn v2(fields: &[&str]) -> Result<PaymentHeader, Refusal> {
        read(Version::V2, &format!(r#"{{"x402Version":2,{}}}"#, fields.join(",")))
    }

    fn v1(fields: &[&str]) -> Result<PaymentHeader, Refusal> {
        read(Version::V1, &format!(r#"{{"x402Version":1,{}}}"#, fields.join(",")))
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
    fn byte_order_mark_is_named() {
        let payment = format!(r#"{{"x402Version":2,{ACCEPTED},{}}}"#, payload(&[SIGNATURE, &authorization(FROM)]));
        let Err(refusal) = read(Version::V2, &format!("\u{feff}{payment}")) else { panic!("it is read") };
        let Why::Malformed(rejection) = refusal.why() else { panic!("{refusal}") };
        assert_eq!(rejection.reason, Reason::InvalidPayload);
        assert!(rejection.detail.contains("byte order mark"), "{}", rejection.detail);
    }

    #[test]
    fn nothing_may_follow_a_payment() {
        let payment = format!(r#"{{"x402Version":2,{ACCEPTED},{}}}"#, payload(&[SIGNATURE, &authorization(FROM)]));
        assert!(read(Version::V2, &payment).is_ok());
        for text in [format!("{payment}{{}}"), format!("{payment},"), payment[..payment.len() - 1].to_owned()] {
            assert!(read(Version::V2, &text).is_err(), "{text}");
        }
    }

    #[test]
    fn longer_header_than_the_limit_is_refused() {
        let payment = format!(r#"{{"x402Version":2,{ACCEPTED},{}}}"#, payload(&[SIGNATURE, &authorization(FROM)]));
        let longest = STANDARD.estimated_decoded_length(MAX_PAYMENT_HEADER);
        assert!(read(Version::V2, &format!("{payment:longest$}")).is_ok());
        assert!(read(Version::V2, &format!("{payment:0$}", longest + 1)).is_err());
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
