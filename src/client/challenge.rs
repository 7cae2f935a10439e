//! A 402 with its offers, and the payment header that answers it.

use alloy_primitives::B256;
use http::{HeaderMap, HeaderValue, StatusCode, header::CONTENT_TYPE};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use url::Url;

use super::{ChannelEntry, OfferRefusal, PaymentError, v1};
use crate::{
    protocol::{
        DecodeError, ExactOffer, ExactPayload, MAX_PAYMENT_HEADER, MAX_REQUIRED_HEADER, PaymentId, PaymentPayload,
        PaymentRequirements, Reason, ResourceInfo, V2, Verbatim, Version, decode_header, encode_header,
        extension::{only, with_info},
        header_name, payment_status,
    },
    vouchers::{ChannelOffer, ChannelPayload, SCHEME},
};

/// How many offers of one 402 are read.
pub(super) const MAX_OFFERS: usize = 64;
/// The longest status URL that is kept in the journal, in bytes.
const MAX_STATUS_URL: usize = 512;

/// The part of a response that may have offers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum OfferLocation {
    /// The response is not a 402, or not one of x402.
    None,
    /// The header `PAYMENT-REQUIRED` has them, as in v2.
    Header,
    /// The body may have them, if it is one of v1.
    Body,
}

impl OfferLocation {
    /// A server that speaks both versions is paid in v2.
    pub(super) fn of(status: StatusCode, headers: &HeaderMap) -> Self {
        match status == StatusCode::PAYMENT_REQUIRED {
            true if headers.contains_key(header_name::PAYMENT_REQUIRED) => Self::Header,
            true if headers.get(CONTENT_TYPE).is_none_or(is_json) => Self::Body,
            _ => Self::None,
        }
    }
}

/// A 402 with offers. Its parts stay as the text that was received, because the payment returns them unchanged.
#[derive(Clone)]
pub(super) struct Challenge {
    /// The version in which it is answered.
    version: Version,
    error: Option<String>,
    resource: Option<Verbatim<ResourceInfo>>,
    accepts: Vec<Result<Verbatim<PaymentRequirements>, OfferRefusal>>,
    extensions: Option<Verbatim<Map<String, Value>>>,
}

impl Challenge {
    /// Reads the headers or, if they have no offers, the body. Returns `None` if neither is of x402.
    pub(super) fn read(headers: &HeaderMap, body: Option<&[u8]>) -> Result<Option<Self>, DecodeError> {
        #[derive(Deserialize)]
        #[serde(rename_all = "camelCase")]
        struct Required {
            /// Read only to refuse other versions.
            #[serde(rename = "x402Version")]
            _version: V2,
            error: Option<String>,
            resource: Option<Verbatim<ResourceInfo>>,
            accepts: Vec<Verbatim<PaymentRequirements>>,
            extensions: Option<Verbatim<Map<String, Value>>>,
        }
        if let Some(value) = headers.get(header_name::PAYMENT_REQUIRED) {
            let required = decode_header(value.as_bytes(), MAX_REQUIRED_HEADER)?;
            let Required { error, resource, accepts, extensions, .. } = required;
            let accepts = accepts.into_iter().map(Ok).collect();
            return Ok(Some(Self { version: Version::V2, error, resource, accepts, extensions }));
        }
        let Some(body) = body else { return Ok(None) };
        Ok(v1::read(body, MAX_OFFERS)?.map(|v1::OffersV1 { error, accepts }| Self {
            version: Version::V1,
            error,
            resource: None,
            accepts,
            extensions: None,
        }))
    }

    /// Returns the version in which it is answered: that of its offers.
    pub(super) const fn version(&self) -> Version {
        self.version
    }

    /// Returns the server's error message, if it has one.
    pub(super) fn error(&self) -> Option<&str> {
        self.error.as_deref().filter(|text| !text.trim().is_empty())
    }

    /// Returns the reason code in the error message.
    ///
    /// Some servers put a sentence before or after the code. "Payment required", which most servers send with any 402, is no reason.
    pub(super) fn reason(&self) -> Option<Reason> {
        let is_letter = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_';
        // Every known code has several words, so a single word is prose.
        let is_code = |text: &&str| text.contains('_') && *text != "payment_required" && text.bytes().all(is_letter);
        self.error()?.split(':').map(str::trim).find(is_code).map(Reason::from)
    }

    /// Returns the first offers, in the server's order. Those of payment channels are read only if `channels`.
    pub(super) fn offers(&self, channels: bool) -> Vec<Result<Offer, OfferRefusal>> {
        let read = |offer: &Result<Verbatim<PaymentRequirements>, OfferRefusal>| {
            let offer = offer.as_ref().map_err(Clone::clone)?;
            Offer::read(&offer.read().map_err(|_| OfferRefusal::Unreadable)?, channels)
        };
        self.accepts.iter().take(MAX_OFFERS).map(read).collect()
    }

    /// Returns the offer that a channel was opened for, as far as the payer's books have it. A request for a refund has no price.
    pub(super) fn of_channel(entry: &ChannelEntry) -> Result<Self, serde_json::Error> {
        let config = &entry.config;
        let offer = serde_json::json!({
            "scheme": SCHEME,
            "network": entry.network.to_string(),
            "amount": "0",
            "asset": config.token.to_string(),
            "payTo": config.receiver.to_string(),
            "maxTimeoutSeconds": 60,
            "extra": {
                "receiverAuthorizer": config.receiver_authorizer.to_string(),
                "withdrawDelay": config.withdraw_delay,
            },
        });
        let accepts = vec![Ok(Verbatim::of(&serde_json::from_value(offer)?)?)];
        Ok(Self { version: Version::V2, error: None, resource: None, accepts, extensions: None })
    }

    /// Returns the offer of this channel and its index, with the seller's books of it in a corrective 402.
    pub(super) fn channel_offer(&self, entry: &ChannelEntry) -> Option<(usize, ChannelOffer)> {
        self.offers(true).into_iter().enumerate().find_map(|(index, offer)| {
            let Offer { common, channel } = offer.ok()?;
            let (channel, config) = (channel?, &entry.config);
            let same = (common.network(), common.asset.address, common.pay_to)
                == (entry.network, config.token, config.receiver)
                && (channel.receiver_authorizer, channel.withdraw_delay)
                    == (config.receiver_authorizer, config.withdraw_delay);
            same.then_some((index, channel))
        })
    }

    /// Gives the payment an id, if the server supports the extension `payment-identifier`.
    ///
    /// The id is a secret, so it is independent of the authorization's nonce, which the chain publishes.
    pub(super) fn add_payment_id(&mut self, secret: B256) -> bool {
        let with_id = self.extensions.as_ref().and_then(|declared| PaymentId::of_random(secret).add_to(declared));
        let is_added = with_id.is_some();
        self.extensions = with_id.or(self.extensions.take());
        is_added
    }

    /// Adds these fields to the `info` of an extension, if the server declares it.
    pub(super) fn add_info(&mut self, name: &str, info: &Map<String, Value>) {
        if let Some(declared) = &self.extensions
            && let Some(with_info) = with_info(declared, name, info)
        {
            self.extensions = Some(with_info);
        }
    }

    /// Returns the URL where the server reports the status of a payment. Returns `None` if it is not on the origin of `paid`.
    pub(super) fn status_url(&self, paid: &Url) -> Option<Url> {
        status_url(payment_status::declared(&only(payment_status::NAME, self.extensions.as_ref()?)?)?, paid)
    }

    /// Returns the value of the payment header for the offer at `index`.
    ///
    /// The offer, the resource and the extensions are returned as they came.
    pub(super) fn into_header(self, index: usize, payload: &ExactPayload) -> Result<String, serde_json::Error> {
        match self.version {
            Version::V1 => {
                let accepted = self.accepts.get(index).and_then(|offer| offer.as_ref().ok()).ok_or_else(no_offer)?;
                let offer = ExactOffer::try_from(&accepted.read()?).map_err(serde::de::Error::custom)?;
                v1::header(&offer, Verbatim::of(payload)?)
            }
            Version::V2 => self.answer(index, payload),
        }
    }

    /// The same for the offer of a payment channel, which only v2 has.
    pub(super) fn channel_header(&self, index: usize, payload: &ChannelPayload) -> Result<String, serde_json::Error> {
        self.clone().answer(index, payload)
    }

    fn answer<P: Serialize>(self, index: usize, payload: &P) -> Result<String, serde_json::Error> {
        encode_header(&PaymentPayload {
            x402_version: V2,
            resource: self.resource,
            accepted: self.accepts.into_iter().nth(index).and_then(Result::ok).ok_or_else(no_offer)?,
            payload: Verbatim::of(payload)?,
            extensions: self.extensions,
        })
    }
}

/// Returns the header of a payment. The payment returns parts of the 402, so that a long 402 can make a payment that no server reads.
pub(super) fn header_of(payment: &str) -> Result<HeaderValue, PaymentError> {
    let (size, limit) = (payment.len(), MAX_PAYMENT_HEADER);
    if size > limit {
        return Err(PaymentError::encode(DecodeError::TooLarge { size, limit }));
    }
    let mut header = HeaderValue::from_str(payment).map_err(PaymentError::encode)?;
    header.set_sensitive(true);
    Ok(header)
}

fn no_offer() -> serde_json::Error {
    serde::de::Error::custom("the chosen offer is not one of the server's")
}

/// Resolves a declared status URL against the URL that is paid. Returns `None` unless both have one origin.
pub(super) fn status_url(declared: &str, paid: &Url) -> Option<Url> {
    if declared.len() > MAX_STATUS_URL {
        return None;
    }
    let url = paid.join(declared).ok()?;
    let is_same = url.origin() == paid.origin() && url.origin().is_tuple();
    (is_same && url.username().is_empty() && url.password().is_none()).then_some(url)
}

/// An offer that can be read.
pub(super) struct Offer {
    /// What all schemes have in common.
    pub(super) common: ExactOffer,
    /// What an offer of the scheme `batch-settlement` has besides. It has no flow.
    pub(super) channel: Option<ChannelOffer>,
}

impl Offer {
    const fn of_transfer(common: ExactOffer) -> Self {
        Self { common, channel: None }
    }

    fn read(offer: &PaymentRequirements, channels: bool) -> Result<Self, OfferRefusal> {
        if offer.scheme != SCHEME || !channels {
            return Ok(Self::of_transfer(ExactOffer::try_from(offer)?));
        }
        let channel = ChannelOffer::try_from(&offer.extra)?;
        Ok(Self { common: ExactOffer::of_channel(offer)?, channel: Some(channel) })
    }
}

fn is_json(content_type: &HeaderValue) -> bool {
    let essence = content_type.to_str().ok().and_then(|text| text.split(';').next()).map(str::trim);
    essence.is_some_and(|essence| {
        let essence = essence.to_ascii_lowercase();
        essence == "application/json" || essence.ends_with("+json")
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::protocol::MAX_REQUIRED_BODY;

    fn location(status: u16, headers: &[(&'static str, &'static str)]) -> OfferLocation {
        let headers = headers.iter().map(|(name, value)| (name.parse().unwrap(), HeaderValue::from_static(value)));
        OfferLocation::of(StatusCode::from_u16(status).unwrap(), &headers.collect())
    }

    #[test]
    fn only_the_body_of_a_402_that_may_be_json_is_read() {
        assert_eq!(location(402, &[]), OfferLocation::Body);
        for json in ["application/json", "Application/JSON; charset=utf-8", "application/problem+json"] {
            assert_eq!(location(402, &[("content-type", json)]), OfferLocation::Body, "{json}");
        }
        for other in ["text/html", "application/jsonlines", "application/octet-stream", ""] {
            assert_eq!(location(402, &[("content-type", other)]), OfferLocation::None, "{other}");
        }
        assert_eq!(
            location(402, &[("content-type", "application/json"), ("payment-required", "x")]),
            OfferLocation::Header
        );
        assert_eq!(location(200, &[("payment-required", "x")]), OfferLocation::None);
        assert_eq!(location(403, &[]), OfferLocation::None);
    }

    #[test]
    fn body_is_of_v1_if_it_names_the_version() {
        let read = |body: &str| Challenge::read(&HeaderMap::new(), Some(body.as_bytes()));
        for foreign in ["", "call us", "{}", "[1]", r#"{"x402Version":2,"accepts":[]}"#, r#"{"x402Version":"1"}"#] {
            assert!(matches!(read(foreign), Ok(None)), "{foreign}");
        }
        assert!(read(r#"{"x402Version":1}"#).is_err(), "it names v1 and has no offers");
        assert!(read(r#"{"x402Version":1,"accepts":{}}"#).is_err());
        let long = format!(r#"{{"x402Version":1,"accepts":[],"padding":"{}"}}"#, "x".repeat(MAX_REQUIRED_BODY));
        assert!(matches!(read(&long), Ok(None)));
        for (error, reason) in [
            (json!("insufficient_funds"), Some(Reason::InsufficientFunds)),
            (json!("insufficient_funds: 7 of 8"), Some(Reason::InsufficientFunds)),
            (json!("Verification failed: insufficient_funds"), Some(Reason::InsufficientFunds)),
            (json!("a_code_of_2027"), Some(Reason::from("a_code_of_2027"))),
            (json!("Payment required"), None),
            (json!("X-PAYMENT header is required"), None),
            (json!("PAYMENT_REQUIRED"), None),
            (json!("payment_required"), None),
            (json!("Verification failed: the payer has 0 of 1000"), None),
            (json!("required"), None),
            (json!(""), None),
            (json!({}), None),
            (json!(null), None),
        ] {
            let body = json!({ "x402Version": 1, "error": error, "accepts": [] }).to_string();
            assert_eq!(read(&body).unwrap().unwrap().reason(), reason, "{error}");
        }
    }

    #[test]
    fn status_url_is_on_the_origin_that_is_paid() {
        let paid = "https://api.example/a/evaluate?q=1".parse().unwrap();
        for (declared, expected) in [
            ("https://api.example/payments/status", Some("https://api.example/payments/status")),
            ("https://API.example:443/s?a=b", Some("https://api.example/s?a=b")),
            ("/payments/status", Some("https://api.example/payments/status")),
            ("http://api.example/payments/status", None),
            ("https://api.example:8443/status", None),
            ("https://other.example/status", None),
            ("//other.example/status", None),
            ("https://me:secret@api.example/status", None),
            ("javascript:alert(1)", None),
            ("https://", None),
        ] {
            assert_eq!(status_url(declared, &paid).as_ref().map(Url::as_str), expected, "{declared}");
        }
        assert_eq!(status_url(&format!("/{}", "a".repeat(MAX_STATUS_URL)), &paid), None);
        let data: Url = "data:,x".parse().unwrap();
        assert_eq!(status_url("data:,x", &data), None, "an opaque origin equals no other");
    }
}
