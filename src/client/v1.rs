//! x402 v1 at the edge: its offers turned into offers of v2, a payment turned back, and its receipts read as those of v2.

use serde::Deserialize;
use serde_json::Value;

use super::OfferRefusal;
use crate::{
    network::Network,
    protocol::{
        DecodeError, ExactOffer, ExactPayload, MAX_PAYMENT_HEADER, MAX_REQUIRED_BODY, OfferError, PaymentRequirements,
        SettlementResponse, V1, Verbatim, decode_header, encode_header, v1,
    },
};

/// What the body of a 402 offers.
pub(super) struct OffersV1 {
    pub(super) error: Option<String>,
    /// As v2 has them, as far as they can be paid.
    pub(super) accepts: Vec<Result<Verbatim<PaymentRequirements>, OfferRefusal>>,
}

/// Reads the body of a 402. Returns `None` if it is not one of v1.
pub(super) fn read(body: &[u8], most: usize) -> Result<Option<OffersV1>, DecodeError> {
    #[derive(Deserialize)]
    struct Versioned {
        #[serde(rename = "x402Version")]
        _version: V1,
    }
    #[derive(Deserialize)]
    struct Required {
        /// Some servers put an object here.
        #[serde(default)]
        error: Value,
        accepts: Vec<Verbatim<v1::PaymentRequirementsV1>>,
    }
    // serde would read an array as a struct, too.
    let is_object = body.len() <= MAX_REQUIRED_BODY && body.trim_ascii_start().starts_with(b"{");
    if !is_object || serde_json::from_slice::<Versioned>(body).is_err() {
        return Ok(None);
    }
    let Required { error, accepts } = serde_json::from_slice(body).map_err(DecodeError::Json)?;
    let turned = |offer: &Verbatim<v1::PaymentRequirementsV1>| {
        let offer = offer.read().map_err(|_| OfferRefusal::Unreadable)?;
        Ok(Verbatim::of_requirements(&ExactOffer::try_from(&offer)?.to_requirements()))
    };
    let accepts = accepts.iter().take(most).map(turned).collect();
    Ok(Some(OffersV1 { error: error.as_str().map(str::to_owned), accepts }))
}

/// Returns the value of `X-PAYMENT` for an offer that was [read](read) from a 402 of v1.
pub(super) fn header(offer: &ExactOffer, payload: Verbatim<ExactPayload>) -> Result<String, serde_json::Error> {
    let unnamed = || serde::de::Error::custom(OfferError::Network(offer.network().to_string()));
    let network = offer.network().v1_name().ok_or_else(unnamed)?.to_owned();
    encode_header(&v1::PaymentPayloadV1 { x402_version: V1, scheme: offer.scheme().to_owned(), network, payload })
}

/// Reads a receipt, in whichever header it came: some servers report a payment of v1 in the header of v2. One of v1 has a network of its own
/// name, and perhaps no transaction.
pub(super) fn receipt(value: &[u8]) -> Result<SettlementResponse, DecodeError> {
    match decode_header::<v1::SettlementResponseV1>(value, MAX_PAYMENT_HEADER) {
        Ok(response) if Network::from_v1_name(&response.network).is_some() => Ok(response.into()),
        _ => decode_header(value, MAX_PAYMENT_HEADER),
    }
}
