//! The messages of x402 v1.
//!
//! v1 differs from v2 in the place and form of the same data. The offers are in the body of the 402, the payment is in `X-PAYMENT`,
//! and the settlement in `X-PAYMENT-RESPONSE`. A network has a name, an offer includes its resource, and a payment names scheme and
//! network instead of echoing the offer. The signed message is the same.
//!
//! v1 has no `paymentFlow`: its clients pay in the same way whether the server settles before or after the work.

use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Value};

use super::{ExactPayload, OfferError, Reason, ResourceInfo, V1, Verbatim};
use crate::network::Network;

/// The body of a 402: the offers for a resource.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PaymentRequiredV1 {
    /// The protocol version.
    pub x402_version: V1,
    /// Why the response is a 402.
    #[serde(default)]
    pub error: Option<String>,
    /// The offers.
    pub accepts: Vec<Verbatim<PaymentRequirementsV1>>,
}

/// An offer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PaymentRequirementsV1 {
    /// The scheme. This crate knows `exact`.
    pub scheme: String,
    /// The chain's name in v1, such as `base`.
    pub network: String,
    /// The amount in atomic units of the token, as a decimal string.
    pub max_amount_required: String,
    /// The resource's URL. Clients require it to be absolute.
    pub resource: String,
    /// A description for people. Clients require the field.
    #[serde(default, deserialize_with = "null_is_absent")]
    pub description: String,
    /// The media type of the paid response. Clients require the field, and some servers write null.
    #[serde(default, deserialize_with = "null_is_absent")]
    pub mime_type: String,
    /// A description of input and output.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub output_schema: Option<Value>,
    /// The payee.
    pub pay_to: String,
    /// The longest validity of an authorization, in seconds.
    pub max_timeout_seconds: u64,
    /// The token.
    pub asset: String,
    /// Fields of the scheme: for `exact` on EVM the token's EIP-712 name and version.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub extra: Option<Map<String, Value>>,
}

impl PaymentRequirementsV1 {
    /// Returns an offer for `resource` in the form of v1, on the chain that v1 calls `network`.
    pub fn of(offer: &super::PaymentRequirements, network: &str, resource: &ResourceInfo) -> Self {
        let mut extra = offer.extra.clone();
        extra.remove("paymentFlow");
        Self {
            scheme: offer.scheme.clone(),
            network: network.to_owned(),
            max_amount_required: offer.amount.clone(),
            resource: resource.url.clone(),
            description: resource.description.clone().unwrap_or_default(),
            mime_type: resource.mime_type.clone().unwrap_or_default(),
            output_schema: None,
            pay_to: offer.pay_to.clone(),
            max_timeout_seconds: offer.max_timeout_seconds,
            asset: offer.asset.clone(),
            extra: Some(extra),
        }
    }
}

/// Parses an offer. `extra.paymentFlow`, which v1 does not know, is respected if a server sends it.
impl TryFrom<&PaymentRequirementsV1> for super::ExactOffer {
    type Error = OfferError;

    fn try_from(offer: &PaymentRequirementsV1) -> Result<Self, OfferError> {
        // v1 has no other scheme.
        if offer.scheme != "exact" {
            return Err(OfferError::Scheme(offer.scheme.clone()));
        }
        let network = Network::from_v1_name(&offer.network);
        let network = network.ok_or_else(|| OfferError::Network(offer.network.clone()))?;
        Self::try_from(&super::PaymentRequirements {
            scheme: offer.scheme.clone(),
            network: network.to_string(),
            amount: offer.max_amount_required.clone(),
            asset: offer.asset.clone(),
            pay_to: offer.pay_to.clone(),
            max_timeout_seconds: offer.max_timeout_seconds,
            extra: offer.extra.clone().unwrap_or_default(),
        })
    }
}

/// `X-PAYMENT`: a signed payment.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PaymentPayloadV1 {
    /// The protocol version.
    pub x402_version: V1,
    /// The scheme of the chosen offer.
    pub scheme: String,
    /// The network of the chosen offer, by its name in v1.
    pub network: String,
    /// The scheme's payload.
    pub payload: Verbatim<ExactPayload>,
}

/// `X-PAYMENT-RESPONSE`: the result of settling a payment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SettlementResponseV1 {
    /// `true` if the payment was settled.
    pub success: bool,
    /// The reason code, if it was not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error_reason: Option<Reason>,
    /// The transaction's hash; empty if there is none.
    #[serde(default, deserialize_with = "null_is_absent")]
    pub transaction: String,
    /// The chain's name in v1.
    pub network: String,
    /// The payer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub payer: Option<String>,
}

impl From<&super::SettlementResponse> for SettlementResponseV1 {
    /// Drops the fields that v1 does not have. A network without a name in v1 keeps its CAIP-2 id.
    fn from(settlement: &super::SettlementResponse) -> Self {
        let network: Option<Network> = settlement.network.parse().ok();
        Self {
            success: settlement.success,
            error_reason: settlement.error_reason.clone(),
            transaction: settlement.transaction.clone(),
            network: network.and_then(Network::v1_name).unwrap_or(&settlement.network).to_owned(),
            payer: settlement.payer.clone(),
        }
    }
}

impl From<SettlementResponseV1> for super::SettlementResponse {
    /// Translates the network's name to its CAIP-2 id; an unknown name stays.
    fn from(settlement: SettlementResponseV1) -> Self {
        let network = Network::from_v1_name(&settlement.network);
        Self {
            success: settlement.success,
            error_reason: settlement.error_reason,
            payer: settlement.payer,
            transaction: settlement.transaction,
            network: network.map_or(settlement.network, |network| network.to_string()),
            amount: None,
            extensions: None,
            extra: None,
        }
    }
}

fn null_is_absent<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use alloy_primitives::{Address, U256};

    use super::*;
    use crate::protocol::{ExactOffer, PaymentFlow};

    #[test]
    fn an_offer_has_the_fields_that_clients_of_v1_require() {
        let offer = ExactOffer {
            asset: Network::BASE.usdc().unwrap(),
            amount: U256::from(1_000),
            pay_to: Address::repeat_byte(7),
            max_timeout_seconds: 60,
            flow: PaymentFlow::Upfront,
            method: Default::default(),
        };
        let resource = ResourceInfo { url: "https://api.example/a".into(), ..ResourceInfo::default() };
        let spelled = PaymentRequirementsV1::of(&offer.to_requirements(), "base", &resource);
        let expected = serde_json::json!({
            "scheme": "exact",
            "network": "base",
            "maxAmountRequired": "1000",
            "resource": "https://api.example/a",
            "description": "",
            "mimeType": "",
            "payTo": offer.pay_to.to_string(),
            "maxTimeoutSeconds": 60,
            "asset": offer.asset.address.to_string(),
            "extra": { "name": "USD Coin", "version": "2" },
        });
        assert_eq!(serde_json::to_value(&spelled).unwrap(), expected);
        assert_eq!(ExactOffer::try_from(&spelled), Ok(ExactOffer { flow: PaymentFlow::Authorization, ..offer }));
    }

    #[test]
    fn a_network_is_known_by_its_name_in_v1_only() {
        let mut spelled = PaymentRequirementsV1::of(
            &ExactOffer {
                asset: Network::BASE.usdc().unwrap(),
                amount: U256::from(1_000),
                pay_to: Address::repeat_byte(7),
                max_timeout_seconds: 60,
                flow: PaymentFlow::Authorization,
                method: Default::default(),
            }
            .to_requirements(),
            "base",
            &ResourceInfo::default(),
        );
        for network in ["eip155:8453", "avalanche", ""] {
            spelled.network = network.into();
            assert_eq!(ExactOffer::try_from(&spelled), Err(OfferError::Network(network.into())));
        }
    }

    #[test]
    fn null_is_read_as_absent() {
        let offer = r#"{"scheme":"exact","network":"base","maxAmountRequired":"1","resource":"https://a.example/",
            "description":null,"mimeType":null,"outputSchema":null,"payTo":"0x","maxTimeoutSeconds":1,"asset":"0x"}"#;
        let offer: PaymentRequirementsV1 = serde_json::from_str(offer).unwrap();
        assert_eq!((offer.description.as_str(), offer.mime_type.as_str(), offer.output_schema), ("", "", None));
        let settlement = r#"{"success":false,"errorReason":null,"transaction":null,"network":"base"}"#;
        let settlement: SettlementResponseV1 = serde_json::from_str(settlement).unwrap();
        assert_eq!(settlement.transaction, "");
    }
}
