//! The messages of x402 v2, as they are on the wire.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::{ExactPayload, Reason, V2, Verbatim};

/// What is being sold (`resource` of a 402).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ResourceInfo {
    /// The resource's public URL.
    pub url: String,
    /// For people and agents.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub description: Option<String>,
    /// Media type of the paid response.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mime_type: Option<String>,
    /// Name of the service.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub service_name: Option<String>,
    /// At most five labels.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tags: Vec<String>,
    /// An icon to show.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub icon_url: Option<String>,
}

/// One way to pay, as offered by a server and echoed by a payer.
///
/// Fields are text because an offer may be for a chain this crate does not serve; [`ExactOffer`](super::ExactOffer) reads those it does.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PaymentRequirements {
    /// How to pay; this crate knows `exact`.
    pub scheme: String,
    /// Chain, as CAIP-2.
    pub network: String,
    /// Atomic units of the asset, as a decimal string.
    pub amount: String,
    /// The token.
    pub asset: String,
    /// Who is paid.
    pub pay_to: String,
    /// How long an authorization may be valid, in seconds.
    pub max_timeout_seconds: u64,
    /// What the scheme needs: for `exact` on EVM the token's EIP-712 name and version.
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    pub extra: Map<String, Value>,
}

/// `PAYMENT-REQUIRED`: what a resource costs and how it can be paid.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PaymentRequired {
    /// Protocol version.
    pub x402_version: V2,
    /// Why this answer is a 402.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// What is being sold.
    pub resource: ResourceInfo,
    /// The ways to pay; each is to be echoed exactly.
    pub accepts: Vec<Verbatim<PaymentRequirements>>,
    /// Protocol extensions offered.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub extensions: Option<Verbatim<Map<String, Value>>>,
}

/// `PAYMENT-SIGNATURE`: a signed payment.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PaymentPayload {
    /// Protocol version.
    pub x402_version: V2,
    /// The resource, echoed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resource: Option<Verbatim<ResourceInfo>>,
    /// The chosen offer, echoed.
    pub accepted: Verbatim<PaymentRequirements>,
    /// What the scheme asks for.
    pub payload: Verbatim<ExactPayload>,
    /// Extensions, echoed and perhaps added to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub extensions: Option<Verbatim<Map<String, Value>>>,
}

/// `PAYMENT-RESPONSE`, and a facilitator's answer to `/settle`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SettlementResponse {
    /// Whether the payment was settled (or, with an extension that says so, accepted for later settlement).
    pub success: bool,
    /// Why not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error_reason: Option<Reason>,
    /// Who paid.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub payer: Option<String>,
    /// Transaction hash; empty if there is none.
    pub transaction: String,
    /// Chain, as CAIP-2.
    pub network: String,
    /// Atomic units that moved.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub amount: Option<String>,
    /// Extensions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub extensions: Option<Verbatim<Map<String, Value>>>,
}

/// What a server sends to a facilitator's `/verify` and `/settle`.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FacilitatorRequest {
    /// Protocol version.
    pub x402_version: V2,
    /// What the payer sent.
    pub payment_payload: PaymentPayload,
    /// What the server asks for.
    pub payment_requirements: Verbatim<PaymentRequirements>,
}

/// A facilitator's answer to `/verify`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct VerifyResponse {
    /// Whether the payment could be settled now.
    pub is_valid: bool,
    /// Why not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub invalid_reason: Option<Reason>,
    /// The same for people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub invalid_message: Option<String>,
    /// Who would pay.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub payer: Option<String>,
}

/// A facilitator's answer to `/supported`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SupportedResponse {
    /// What it verifies and settles.
    pub kinds: Vec<SupportedKind>,
    /// Extensions it knows.
    #[serde(default)]
    pub extensions: Vec<String>,
    /// Settlement addresses by CAIP-2 pattern.
    #[serde(default)]
    pub signers: std::collections::BTreeMap<String, Vec<String>>,
}

/// One combination that a facilitator supports.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SupportedKind {
    /// Protocol version.
    pub x402_version: u8,
    /// Scheme, such as `exact`.
    pub scheme: String,
    /// Chain, as CAIP-2 (v1: a name).
    pub network: String,
    /// More about it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub extra: Option<Map<String, Value>>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_payment_returns_offer_resource_and_extensions_unread_and_unchanged() {
        let text = r#"{"x402Version":2,"resource":{"url":"u", "new":1e2},"accepted":{"b":1,"a": [2 ]},"payload":{ "z":1},"extensions":{"x":{"y":1.0}}}"#;
        let payment: PaymentPayload = serde_json::from_str(text).unwrap();
        assert_eq!(serde_json::to_string(&payment).unwrap(), text);
    }

    #[test]
    fn an_unreadable_offer_does_not_hide_the_others() {
        let text = r#"{"x402Version":2,"resource":{"url":"u"},"accepts":[{"scheme":"other"},{"scheme":"exact","network":"n","amount":"1","asset":"a","payTo":"p","maxTimeoutSeconds":1}]}"#;
        let required: PaymentRequired = serde_json::from_str(text).unwrap();
        assert!(required.accepts[0].read().is_err());
        assert_eq!(required.accepts[1].read().unwrap().pay_to, "p");
    }
}
