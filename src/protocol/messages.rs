//! The messages of x402 v2, as they are on the wire, and JSON that is echoed byte for byte.

use std::{fmt, marker::PhantomData};

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::{Map, Value, value::RawValue};

use super::{ExactPayload, Reason, V2};

/// The resource that is paid for (`resource` of a 402).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[non_exhaustive]
pub struct ResourceInfo {
    /// The resource's public URL.
    pub url: String,
    /// A description for people and agents.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub description: Option<String>,
    /// The media type of the paid response.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mime_type: Option<String>,
    /// The name of the service.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub service_name: Option<String>,
    /// Labels; at most five.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tags: Vec<String>,
    /// The URL of an icon.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub icon_url: Option<String>,
}

impl ResourceInfo {
    /// Creates a resource that has nothing but its URL.
    pub fn new(url: impl Into<String>) -> Self {
        Self { url: url.into(), ..Self::default() }
    }
}

/// An offer: one way to pay, offered by a server and echoed by a payer.
///
/// The fields are text, because an offer may be for a chain that this crate does not support. [`ExactOffer`](super::ExactOffer) parses
/// the others, and [writes](super::ExactOffer::to_requirements) them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[non_exhaustive]
pub struct PaymentRequirements {
    /// The scheme. This crate knows those of [`TransferMethod`](super::TransferMethod), and `batch-settlement`.
    pub scheme: String,
    /// The chain, as CAIP-2.
    pub network: String,
    /// The amount in atomic units of the token, as a decimal string.
    pub amount: String,
    /// The address of the token's contract.
    pub asset: String,
    /// The payee's address.
    pub pay_to: String,
    /// The longest validity of an authorization, in seconds.
    pub max_timeout_seconds: u64,
    /// Fields of the scheme: for `exact` on EVM the token's EIP-712 name and version.
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    pub extra: Map<String, Value>,
}

impl PaymentRequirements {
    /// Returns `true` if the offer that a payer says it accepted is this one: the same fields with at least the offered `extra`. Addresses
    /// compare without case.
    pub fn is_accepted_as(&self, accepted: &Self) -> bool {
        accepted.scheme == self.scheme
            && accepted.network == self.network
            && accepted.amount == self.amount
            && accepted.asset.eq_ignore_ascii_case(&self.asset)
            && accepted.pay_to.eq_ignore_ascii_case(&self.pay_to)
            && accepted.max_timeout_seconds == self.max_timeout_seconds
            && self.extra.iter().all(|(name, value)| accepted.extra.get(name) == Some(value))
            // A payer may add to `extra`, but not a flow or a transfer method that was not offered.
            && accepted.extra.get("paymentFlow") == self.extra.get("paymentFlow")
            && accepted.transfer_method() == self.transfer_method()
    }

    /// Returns how the token is to be moved, if it is not by EIP-3009, which may be named or not.
    fn transfer_method(&self) -> Option<&Value> {
        self.extra.get("assetTransferMethod").filter(|method| *method != "eip3009")
    }
}

/// `PAYMENT-REQUIRED`: the offers for a resource.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[non_exhaustive]
pub struct PaymentRequired {
    /// The protocol version.
    pub x402_version: V2,
    /// Why the response is a 402.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// The resource.
    pub resource: ResourceInfo,
    /// The offers. A payer echoes one of them byte for byte.
    pub accepts: Vec<Verbatim<PaymentRequirements>>,
    /// The protocol extensions that the server offers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub extensions: Option<Verbatim<Map<String, Value>>>,
}

impl PaymentRequired {
    /// Creates the message without an error and without extensions.
    pub const fn new(resource: ResourceInfo, accepts: Vec<Verbatim<PaymentRequirements>>) -> Self {
        Self { x402_version: V2, error: None, resource, accepts, extensions: None }
    }
}

/// `PAYMENT-SIGNATURE`: a signed payment, with the payload of its scheme.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", bound = "")]
#[non_exhaustive]
pub struct PaymentPayload<P = ExactPayload> {
    /// The protocol version.
    pub x402_version: V2,
    /// The echoed resource.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resource: Option<Verbatim<ResourceInfo>>,
    /// The echoed offer.
    pub accepted: Verbatim<PaymentRequirements>,
    /// The scheme's payload.
    pub payload: Verbatim<P>,
    /// The echoed extensions, with additions of the payer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub extensions: Option<Verbatim<Map<String, Value>>>,
}

impl<P> PaymentPayload<P> {
    /// Creates a payment for an offer, without the echoed resource and extensions.
    pub const fn new(accepted: Verbatim<PaymentRequirements>, payload: Verbatim<P>) -> Self {
        Self { x402_version: V2, resource: None, accepted, payload, extensions: None }
    }
}

/// `PAYMENT-RESPONSE`, and a facilitator's response to `/settle`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[non_exhaustive]
pub struct SettlementResponse {
    /// `true` if the payment was settled, or accepted for later settlement if an extension says so.
    pub success: bool,
    /// The reason code, if it was not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error_reason: Option<Reason>,
    /// The payer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub payer: Option<String>,
    /// The transaction's hash; empty if there is none.
    pub transaction: String,
    /// The chain, as CAIP-2.
    pub network: String,
    /// The amount that moved, in atomic units.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub amount: Option<String>,
    /// The extensions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub extensions: Option<Verbatim<Map<String, Value>>>,
    /// Fields of the scheme: for `batch-settlement` what was charged, and the state of the channel.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub extra: Option<Map<String, Value>>,
}

impl SettlementResponse {
    /// Creates the response to a payment that this transaction settled on this chain (CAIP-2).
    pub fn settled(transaction: impl Into<String>, network: impl Into<String>) -> Self {
        Self::new(true, None, transaction.into(), network.into())
    }

    /// Creates the response to a payment on this chain (CAIP-2) that was not settled, for this reason.
    pub fn failed(reason: Reason, network: impl Into<String>) -> Self {
        Self::new(false, Some(reason), String::new(), network.into())
    }

    const fn new(success: bool, error_reason: Option<Reason>, transaction: String, network: String) -> Self {
        Self { success, error_reason, payer: None, transaction, network, amount: None, extensions: None, extra: None }
    }
}

/// The request to a facilitator's `/verify` and `/settle`.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[non_exhaustive]
pub struct FacilitatorRequest<P = ExactPayload> {
    /// The protocol version.
    pub x402_version: V2,
    /// The payment that the payer sent.
    pub payment_payload: PaymentPayload<P>,
    /// The server's offer.
    pub payment_requirements: Verbatim<PaymentRequirements>,
}

impl<P> FacilitatorRequest<P> {
    /// Creates a request to verify or settle this payment for this offer.
    pub const fn new(payment_payload: PaymentPayload<P>, payment_requirements: Verbatim<PaymentRequirements>) -> Self {
        Self { x402_version: V2, payment_payload, payment_requirements }
    }
}

/// A facilitator's response to `/verify`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[non_exhaustive]
pub struct VerifyResponse {
    /// `true` if the payment could be settled now.
    pub is_valid: bool,
    /// The reason code, if it was not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub invalid_reason: Option<Reason>,
    /// Why it could not, for people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub invalid_message: Option<String>,
    /// The payer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub payer: Option<String>,
    /// Fields of the scheme: for `batch-settlement` the state of the channel.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub extra: Option<Map<String, Value>>,
}

impl VerifyResponse {
    /// Creates the response to a payment of this payer that could be settled now.
    pub fn valid(payer: impl Into<String>) -> Self {
        Self { is_valid: true, invalid_reason: None, invalid_message: None, payer: Some(payer.into()), extra: None }
    }

    /// Creates the response to a payment that could not be settled, for this reason. `message` is for people.
    pub fn invalid(reason: Reason, message: impl Into<String>) -> Self {
        let (invalid_reason, invalid_message) = (Some(reason), Some(message.into()));
        Self { is_valid: false, invalid_reason, invalid_message, payer: None, extra: None }
    }
}

/// A facilitator's response to `/supported`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[non_exhaustive]
pub struct SupportedResponse {
    /// The kinds of payments that it verifies and settles.
    pub kinds: Vec<SupportedKind>,
    /// The extensions that it knows.
    #[serde(default)]
    pub extensions: Vec<String>,
    /// Its accounts that send transactions, by CAIP-2 pattern.
    #[serde(default)]
    pub signers: std::collections::BTreeMap<String, Vec<String>>,
}

/// A kind of payment that a facilitator supports.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[non_exhaustive]
pub struct SupportedKind {
    /// The protocol version.
    pub x402_version: u8,
    /// The scheme, such as `exact`.
    pub scheme: String,
    /// The chain, as CAIP-2 (in v1: a name).
    pub network: String,
    /// Fields of the scheme.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub extra: Option<Map<String, Value>>,
}

impl SupportedKind {
    /// Creates a kind without further fields. `network` is CAIP-2, in v1 a name.
    pub fn new(x402_version: u8, scheme: impl Into<String>, network: impl Into<String>) -> Self {
        Self { x402_version, scheme: scheme.into(), network: network.into(), extra: None }
    }
}

/// A JSON text of type `T` that is kept byte for byte and read on demand.
///
/// ```
/// use tower_x402::protocol::{PaymentRequirements, Verbatim};
///
/// let text = r#"{"scheme":"exact","network":"eip155:8453","amount":"1000","asset":"0xA","payTo":"0xB",
///     "maxTimeoutSeconds":60,"extra":{"name":"USD Coin"},"aFieldOfTomorrow":[1, 2]}"#;
/// let offer: Verbatim<PaymentRequirements> = serde_json::from_str(text)?;
/// assert_eq!(offer.read()?.amount, "1000");
/// assert_eq!(serde_json::to_string(&offer)?, text);
/// # Ok::<(), serde_json::Error>(())
/// ```
pub struct Verbatim<T> {
    raw: Box<RawValue>,
    read_as: PhantomData<fn() -> T>,
}

impl<T> Verbatim<T> {
    /// Returns the text.
    pub fn text(&self) -> &str {
        self.raw.get()
    }

    /// Keeps a text that is known to be a `T`.
    pub(crate) const fn of_raw(raw: Box<RawValue>) -> Self {
        Self { raw, read_as: PhantomData }
    }
}

impl<T: Serialize> Verbatim<T> {
    /// Returns the text that `value` serializes to.
    ///
    /// # Errors
    /// If `value` refuses to serialize.
    pub fn of(value: &T) -> Result<Self, serde_json::Error> {
        serde_json::value::to_raw_value(value).map(Self::of_raw)
    }
}

#[cfg(feature = "facilitator")]
impl Verbatim<PaymentRequirements> {
    /// Returns the text of an offer. Its fields are text, numbers and maps with text keys, so this cannot fail.
    pub(crate) fn of_requirements(offer: &PaymentRequirements) -> Self {
        Self::of_raw(serde_json::value::to_raw_value(offer).unwrap_or_else(|_| RawValue::NULL.to_owned()))
    }
}

impl<'de, T: Deserialize<'de>> Verbatim<T> {
    /// Parses the text.
    ///
    /// # Errors
    /// If the text is not a `T`.
    pub fn read(&'de self) -> Result<T, serde_json::Error> {
        serde_json::from_str(self.raw.get())
    }
}

impl<T> Clone for Verbatim<T> {
    fn clone(&self) -> Self {
        Self { raw: self.raw.clone(), read_as: PhantomData }
    }
}

impl<T> PartialEq for Verbatim<T> {
    fn eq(&self, other: &Self) -> bool {
        self.text() == other.text()
    }
}

impl<T> fmt::Debug for Verbatim<T> {
    /// Shows the length only, because the text may hold a signature.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Verbatim({} bytes)", self.text().len())
    }
}

impl<T> Serialize for Verbatim<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.raw.serialize(serializer)
    }
}

impl<'de, T> Deserialize<'de> for Verbatim<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Box::<RawValue>::deserialize(deserializer).map(|raw| Self { raw, read_as: PhantomData })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_payment_echoes_offer_resource_and_extensions_byte_for_byte() {
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
