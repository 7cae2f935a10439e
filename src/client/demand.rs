//! What a 402 asks for, in either version of the protocol.

use http::{HeaderMap, HeaderValue, StatusCode, header::CONTENT_TYPE};
use serde::Deserialize;
use serde_json::{Map, Value};
use url::Url;

use super::OfferRefusal;
use crate::{
    clock::{Nonces, RandomnessError},
    protocol::{
        DecodeError, ExactOffer, ExactPayload, MAX_REQUIRED_BODY, MAX_REQUIRED_HEADER, PaymentId, PaymentPayload,
        PaymentRequirements, Reason, ResourceInfo, V1, V2, Verbatim, Version, decode_header, encode_header,
        header_name, payment_status, v1,
    },
};

/// How many offers of one 402 are looked at.
pub(super) const MAX_OFFERS: usize = 64;
/// A declared URL is kept in the journal; no server decides how long its lines are.
const MAX_STATUS_URL: usize = 512;

/// Where a 402 may say what it asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// Nowhere: it is not a 402, or not one of this protocol.
    Nowhere,
    /// In its headers (v2).
    Header,
    /// In its body, if it turns out to be one of v1.
    Body,
}

/// A 402 as a payer needs it: what is to be echoed stays unread.
pub(super) enum Demand {
    V1(AskedInV1),
    V2(AskedInV2),
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct AskedInV2 {
    /// Read only to refuse other versions.
    #[serde(rename = "x402Version")]
    _version: V2,
    error: Option<String>,
    resource: Option<Verbatim<ResourceInfo>>,
    accepts: Vec<Verbatim<PaymentRequirements>>,
    extensions: Option<Verbatim<Map<String, Value>>>,
}

#[derive(Deserialize)]
pub(super) struct AskedInV1 {
    /// Some servers put an object here.
    #[serde(default)]
    error: Value,
    accepts: Vec<Verbatim<v1::PaymentRequirements>>,
}

impl Demand {
    /// Where to look. A server that speaks both versions is paid in v2.
    pub(super) fn place(status: StatusCode, headers: &HeaderMap) -> Place {
        match status == StatusCode::PAYMENT_REQUIRED {
            true if headers.contains_key(header_name::PAYMENT_REQUIRED) => Place::Header,
            true if headers.get(CONTENT_TYPE).is_none_or(is_json) => Place::Body,
            _ => Place::Nowhere,
        }
    }

    /// Reads it from the headers or, if they say nothing, from the body; `None` if it is not of this protocol.
    pub(super) fn read(headers: &HeaderMap, body: Option<&[u8]>) -> Result<Option<Self>, DecodeError> {
        #[derive(Deserialize)]
        struct Versioned {
            #[serde(rename = "x402Version")]
            _version: V1,
        }
        if let Some(value) = headers.get(header_name::PAYMENT_REQUIRED) {
            return decode_header(value.as_bytes(), MAX_REQUIRED_HEADER).map(|asked| Some(Self::V2(asked)));
        }
        let Some(body) = body.filter(|body| body.len() <= MAX_REQUIRED_BODY) else { return Ok(None) };
        // serde would take a list for an object, too.
        let is_object = body.trim_ascii_start().starts_with(b"{");
        if !is_object || serde_json::from_slice::<Versioned>(body).is_err() {
            return Ok(None);
        }
        serde_json::from_slice(body).map(|asked| Some(Self::V1(asked))).map_err(DecodeError::Json)
    }

    pub(super) fn version(&self) -> Version {
        match self {
            Self::V1(_) => Version::V1,
            Self::V2(_) => Version::V2,
        }
    }

    /// Why the server asks (again), in its words.
    pub(super) fn error(&self) -> Option<&str> {
        let text = match self {
            Self::V1(asked) => asked.error.as_str(),
            Self::V2(asked) => asked.error.as_deref(),
        };
        text.filter(|text| !text.trim().is_empty())
    }

    /// The code in these words. Some servers put a sentence after it or before it; most say with any 402 that a payment is
    /// required, which is no reason.
    pub(super) fn reason(&self) -> Option<Reason> {
        let is_letter = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_';
        // No known code is a single word of a language.
        let is_code = |text: &&str| text.contains('_') && *text != "payment_required" && text.bytes().all(is_letter);
        self.error()?.split(':').map(str::trim).find(is_code).map(Reason::from)
    }

    /// The first offers, in the server's order.
    pub(super) fn offers(&self) -> Vec<Result<ExactOffer, OfferRefusal>> {
        match self {
            Self::V1(asked) => asked.accepts.iter().take(MAX_OFFERS).map(read).collect(),
            Self::V2(asked) => asked.accepts.iter().take(MAX_OFFERS).map(read).collect(),
        }
    }

    /// Gives the payment an id of its own, where the server lets it be named: made of other randomness than the nonce, which
    /// the chain publishes.
    pub(super) fn name(&mut self, nonces: &dyn Nonces) -> Result<(), RandomnessError> {
        if let Self::V2(AskedInV2 { extensions: Some(extensions), .. }) = self
            && let Some(named) = PaymentId::of_random(nonces.next()?).add_to(extensions)
        {
            *extensions = named;
        }
        Ok(())
    }

    /// Where the server says that the fate of a payment can be looked up, if that is where the payment is made: another
    /// origin is none of its business.
    pub(super) fn status_url(&self, paid: &Url) -> Option<Url> {
        let Self::V2(AskedInV2 { extensions: Some(extensions), .. }) = self else { return None };
        let extensions = extensions.read().ok()?;
        status_url(payment_status::declared(&extensions)?, paid)
    }

    /// The value of the header that pays the offer at `index`. In v2 the offer, the resource and the extensions return as
    /// they came, but for the payment's id; v1 names scheme and network.
    pub(super) fn answer(self, index: usize, payload: &ExactPayload) -> Result<String, serde_json::Error> {
        const CHOSEN: &str = "the chosen offer is one of those made";
        let payload = Verbatim::of(payload)?;
        let unchosen = || serde::de::Error::custom(CHOSEN);
        match self {
            Self::V1(asked) => {
                let offer = asked.accepts.get(index).ok_or_else(unchosen)?.read()?;
                let v1::PaymentRequirements { scheme, network, .. } = offer;
                encode_header(&v1::PaymentPayload { x402_version: V1, scheme, network, payload })
            }
            Self::V2(asked) => encode_header(&PaymentPayload {
                x402_version: V2,
                resource: asked.resource,
                accepted: asked.accepts.into_iter().nth(index).ok_or_else(unchosen)?,
                payload,
                extensions: asked.extensions,
            }),
        }
    }
}

/// The URL that `declared` means to whoever paid at `paid`; `None` unless it is of the same origin.
pub(super) fn status_url(declared: &str, paid: &Url) -> Option<Url> {
    if declared.len() > MAX_STATUS_URL {
        return None;
    }
    let url = paid.join(declared).ok()?;
    let is_same = url.origin() == paid.origin() && url.origin().is_tuple();
    (is_same && url.username().is_empty() && url.password().is_none()).then_some(url)
}

fn read<'a, T>(offer: &'a Verbatim<T>) -> Result<ExactOffer, OfferRefusal>
where
    T: Deserialize<'a>,
    ExactOffer: for<'b> TryFrom<&'b T, Error = crate::protocol::OfferError>,
{
    Ok(ExactOffer::try_from(&offer.read().map_err(|_| OfferRefusal::Unreadable)?)?)
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

    fn place(status: u16, headers: &[(&'static str, &'static str)]) -> Place {
        let headers = headers.iter().map(|(name, value)| (name.parse().unwrap(), HeaderValue::from_static(value)));
        Demand::place(StatusCode::from_u16(status).unwrap(), &headers.collect())
    }

    #[test]
    fn only_the_body_of_a_402_that_may_be_json_is_looked_at() {
        assert_eq!(place(402, &[]), Place::Body);
        for json in ["application/json", "Application/JSON; charset=utf-8", "application/problem+json"] {
            assert_eq!(place(402, &[("content-type", json)]), Place::Body, "{json}");
        }
        for other in ["text/html", "application/jsonlines", "application/octet-stream", ""] {
            assert_eq!(place(402, &[("content-type", other)]), Place::Nowhere, "{other}");
        }
        assert_eq!(place(402, &[("content-type", "application/json"), ("payment-required", "x")]), Place::Header);
        assert_eq!(place(200, &[("payment-required", "x")]), Place::Nowhere);
        assert_eq!(place(403, &[]), Place::Nowhere);
    }

    #[test]
    fn a_body_is_of_v1_if_it_says_so() {
        let read = |body: &str| Demand::read(&HeaderMap::new(), Some(body.as_bytes()));
        for foreign in ["", "call us", "{}", "[1]", r#"{"x402Version":2,"accepts":[]}"#, r#"{"x402Version":"1"}"#] {
            assert!(matches!(read(foreign), Ok(None)), "{foreign}");
        }
        assert!(read(r#"{"x402Version":1}"#).is_err(), "it says so and is not");
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
    fn a_status_url_is_of_the_origin_that_is_paid() {
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
        assert_eq!(status_url("data:,x", &data), None, "an opaque origin is nobody's");
    }
}
