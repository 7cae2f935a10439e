//! The messages of x402 v1: another spelling of the same offers and payments.
//!
//! v1 differs from v2 in where things are said: the 402 is the JSON body, the payment travels in `X-PAYMENT` and the
//! settlement in `X-PAYMENT-RESPONSE`; a network has a name, an offer carries its resource, and a payment names scheme and
//! network instead of echoing the offer. What is signed is the same.
//!
//! It has no `paymentFlow`: its clients pay the same way whether the money moves before or after the work.

use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Value};

use super::{ExactPayload, OfferError, Reason, ResourceInfo, V1, Verbatim};
use crate::network::Network;

/// The body of a 402: what a resource costs and how it can be paid.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PaymentRequired {
    /// Protocol version.
    pub x402_version: V1,
    /// Why this answer is a 402.
    #[serde(default)]
    pub error: Option<String>,
    /// The ways to pay.
    pub accepts: Vec<Verbatim<PaymentRequirements>>,
}

/// One way to pay.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PaymentRequirements {
    /// How to pay; this crate knows `exact`.
    pub scheme: String,
    /// The chain's name in v1, such as `base`.
    pub network: String,
    /// Atomic units of the asset, as a decimal string.
    pub max_amount_required: String,
    /// The resource's URL; clients check that it is an absolute one.
    pub resource: String,
    /// For people; clients insist on its presence.
    #[serde(default, deserialize_with = "null_is_absent")]
    pub description: String,
    /// Media type of the paid response; clients insist on its presence, and some servers write null.
    #[serde(default, deserialize_with = "null_is_absent")]
    pub mime_type: String,
    /// Shape of the paid response.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub output_schema: Option<Value>,
    /// Who is paid.
    pub pay_to: String,
    /// How long an authorization may be valid, in seconds.
    pub max_timeout_seconds: u64,
    /// The token.
    pub asset: String,
    /// For `exact` on EVM the token's EIP-712 name and version.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub extra: Option<Map<String, Value>>,
}

impl PaymentRequirements {
    /// Spells an offer for `resource` in v1, on the chain that v1 calls `network`.
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

/// Reads an offer; `extra.paymentFlow`, which v1 does not know, is heeded where a server sends it.
impl TryFrom<&PaymentRequirements> for super::ExactOffer {
    type Error = OfferError;

    fn try_from(offer: &PaymentRequirements) -> Result<Self, OfferError> {
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
pub struct PaymentPayload {
    /// Protocol version.
    pub x402_version: V1,
    /// The scheme of the chosen offer.
    pub scheme: String,
    /// The network of the chosen offer, by its name in v1.
    pub network: String,
    /// What the scheme asks for.
    pub payload: Verbatim<ExactPayload>,
}

/// `X-PAYMENT-RESPONSE`: what became of a payment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SettlementResponse {
    /// Whether the payment was settled.
    pub success: bool,
    /// Why not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error_reason: Option<Reason>,
    /// Transaction hash; empty if there is none.
    #[serde(default, deserialize_with = "null_is_absent")]
    pub transaction: String,
    /// The chain's name in v1.
    pub network: String,
    /// Who paid.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub payer: Option<String>,
}

impl From<&super::SettlementResponse> for SettlementResponse {
    /// Leaves out what v1 does not say. A network without a name in v1 keeps its own.
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

impl From<SettlementResponse> for super::SettlementResponse {
    /// The network gets its name in v2; one that v1 does not know keeps its own.
    fn from(settlement: SettlementResponse) -> Self {
        let network = Network::from_v1_name(&settlement.network);
        Self {
            success: settlement.success,
            error_reason: settlement.error_reason,
            payer: settlement.payer,
            transaction: settlement.transaction,
            network: network.map_or(settlement.network, |network| network.to_string()),
            amount: None,
            extensions: None,
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
    fn an_offer_in_v1_is_what_its_clients_insist_on() {
        let offer = ExactOffer {
            asset: Network::BASE.usdc().unwrap(),
            amount: U256::from(1_000),
            pay_to: Address::repeat_byte(7),
            max_timeout_seconds: 60,
            flow: PaymentFlow::Upfront,
        };
        let resource = ResourceInfo { url: "https://api.example/a".into(), ..ResourceInfo::default() };
        let spelled = PaymentRequirements::of(&offer.to_requirements(), "base", &resource);
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
    fn a_network_has_to_be_named_as_v1_names_it() {
        let mut spelled = PaymentRequirements::of(
            &ExactOffer {
                asset: Network::BASE.usdc().unwrap(),
                amount: U256::from(1_000),
                pay_to: Address::repeat_byte(7),
                max_timeout_seconds: 60,
                flow: PaymentFlow::Authorization,
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
    fn what_a_server_leaves_null_is_absent() {
        let offer = r#"{"scheme":"exact","network":"base","maxAmountRequired":"1","resource":"https://a.example/",
            "description":null,"mimeType":null,"outputSchema":null,"payTo":"0x","maxTimeoutSeconds":1,"asset":"0x"}"#;
        let offer: PaymentRequirements = serde_json::from_str(offer).unwrap();
        assert_eq!((offer.description.as_str(), offer.mime_type.as_str(), offer.output_schema), ("", "", None));
        let settlement = r#"{"success":false,"errorReason":null,"transaction":null,"network":"base"}"#;
        let settlement: SettlementResponse = serde_json::from_str(settlement).unwrap();
        assert_eq!(settlement.transaction, "");
    }
}
