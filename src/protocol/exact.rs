//! The `exact` scheme on EVM chains: an EIP-3009 authorization of exactly the asked amount.

use std::fmt;

use alloy_primitives::{Address, U256};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::PaymentRequirements;
use crate::{
    eip3009::{Authorization, PaymentSignature},
    network::{Asset, Network},
};

/// The payload of an `exact` payment on an EVM chain.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExactPayload {
    /// The payer's signature over the authorization.
    pub signature: PaymentSignature,
    /// The message that the payer signed.
    pub authorization: Authorization,
}

/// The order of work and settlement (`extra.paymentFlow`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum PaymentFlow {
    /// Work, settle, respond. The protocol's default, which is never written.
    #[default]
    Authorization,
    /// Settle, then work.
    Upfront,
}

impl PaymentFlow {
    /// Returns its name in `extra.paymentFlow`.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Authorization => "authorization",
            Self::Upfront => "upfront",
        }
    }
}

impl fmt::Display for PaymentFlow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// An `exact` offer on an EVM chain, parsed and checked.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ExactOffer {
    /// The token, and its chain.
    pub asset: Asset,
    /// The price, in atomic units of the token.
    pub amount: U256,
    /// The payee.
    pub pay_to: Address,
    /// The longest validity of an authorization, in seconds.
    pub max_timeout_seconds: u64,
    /// The order of work and settlement.
    pub flow: PaymentFlow,
}

impl ExactOffer {
    /// Creates an offer of the flow `authorization`. `amount` is in atomic units of the token.
    pub const fn new(asset: Asset, amount: U256, pay_to: Address, max_timeout_seconds: u64) -> Self {
        Self { asset, amount, pay_to, max_timeout_seconds, flow: PaymentFlow::Authorization }
    }

    /// Returns the chain of the payment.
    pub fn network(&self) -> Network {
        self.asset.network
    }

    /// Returns the offer as it is on the wire, with checksummed addresses.
    pub fn to_requirements(&self) -> PaymentRequirements {
        let mut extra = Map::new();
        extra.insert("name".into(), Value::from(self.asset.name.as_str()));
        extra.insert("version".into(), Value::from(self.asset.version.as_str()));
        if self.flow != PaymentFlow::Authorization {
            extra.insert("paymentFlow".into(), Value::from(self.flow.as_str()));
        }
        PaymentRequirements {
            scheme: "exact".into(),
            network: self.asset.network.to_string(),
            amount: self.amount.to_string(),
            asset: self.asset.address.to_string(),
            pay_to: self.pay_to.to_string(),
            max_timeout_seconds: self.max_timeout_seconds,
            extra,
        }
    }
}

impl TryFrom<&PaymentRequirements> for ExactOffer {
    type Error = OfferError;

    fn try_from(offer: &PaymentRequirements) -> Result<Self, OfferError> {
        if offer.scheme != "exact" {
            return Err(OfferError::Scheme(offer.scheme.clone()));
        }
        let network = offer.network.parse().map_err(|_| OfferError::Network(offer.network.clone()))?;
        let address = |text: &str, field| text.parse::<Address>().map_err(|_| OfferError::Address(field));
        let text = |field| match offer.extra.get(field) {
            Some(Value::String(text)) => Ok(text.clone()),
            _ => Err(OfferError::MissingDomain),
        };
        let flow = match offer.extra.get("paymentFlow") {
            None => PaymentFlow::Authorization,
            Some(Value::String(flow)) if flow == "authorization" => PaymentFlow::Authorization,
            Some(Value::String(flow)) if flow == "upfront" => PaymentFlow::Upfront,
            Some(other) => return Err(OfferError::Flow(other.to_string())),
        };
        // The EVM scheme also has transfers by Permit2, which this field names.
        if let Some(method) = offer.extra.get("assetTransferMethod").filter(|method| *method != "eip3009") {
            return Err(OfferError::TransferMethod(method.to_string()));
        }
        Ok(Self {
            asset: Asset {
                network,
                address: address(&offer.asset, "asset")?,
                name: text("name")?,
                version: text("version")?,
            },
            amount: crate::decimal::parse_decimal(&offer.amount).ok_or(OfferError::Amount)?,
            pay_to: address(&offer.pay_to, "payTo")?,
            max_timeout_seconds: offer.max_timeout_seconds,
            flow,
        })
    }
}

/// Why this crate can neither pay nor serve an offer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum OfferError {
    /// The scheme is not `exact`.
    #[error("scheme {0:?} is not implemented, only \"exact\"")]
    Scheme(String),
    /// The network is not an EVM chain.
    #[error("network {0:?} is not an EVM chain")]
    Network(String),
    /// The field is not an address of 20 bytes in hex.
    #[error("{0} is not an EVM address")]
    Address(&'static str),
    /// The amount is not a decimal integer of at most 256 bits.
    #[error("amount is not a decimal string of atomic units")]
    Amount,
    /// `extra` lacks the token's EIP-712 domain.
    #[error("extra lacks the token's EIP-712 name or version")]
    MissingDomain,
    /// The payment flow is unknown.
    #[error("paymentFlow {0} is not implemented")]
    Flow(String),
    /// The token is to be moved by another method than EIP-3009.
    #[error("assetTransferMethod {0} is not implemented, only \"eip3009\"")]
    TransferMethod(String),
}

#[cfg(test)]
mod tests {
    use super::*;

    fn offer() -> ExactOffer {
        ExactOffer {
            asset: Network::BASE.usdc().unwrap(),
            amount: U256::from(1_000),
            pay_to: Address::repeat_byte(7),
            max_timeout_seconds: 60,
            flow: PaymentFlow::Authorization,
        }
    }

    #[test]
    fn an_offer_reads_back_as_itself_in_both_flows() {
        for flow in [PaymentFlow::Authorization, PaymentFlow::Upfront] {
            let offer = ExactOffer { flow, ..offer() };
            let written = offer.to_requirements();
            assert_eq!(written.extra.contains_key("paymentFlow"), flow == PaymentFlow::Upfront);
            assert_eq!(ExactOffer::try_from(&written), Ok(offer));
        }
    }

    #[test]
    fn an_offer_that_cannot_be_paid_names_the_field() {
        let change = |change: fn(&mut PaymentRequirements)| {
            let mut written = offer().to_requirements();
            change(&mut written);
            ExactOffer::try_from(&written).unwrap_err()
        };
        assert!(matches!(change(|o| o.scheme = "upto".into()), OfferError::Scheme(_)));
        assert!(matches!(change(|o| o.network = "solana:x".into()), OfferError::Network(_)));
        assert!(matches!(change(|o| o.asset = "0x12".into()), OfferError::Address("asset")));
        assert!(matches!(change(|o| o.pay_to = "bob".into()), OfferError::Address("payTo")));
        for amount in ["", "-1", "+1", "1.0", "0x10", " 1", "1e3", &"9".repeat(78), &"0".repeat(79)] {
            let mut written = offer().to_requirements();
            written.amount = amount.into();
            assert_eq!(ExactOffer::try_from(&written), Err(OfferError::Amount), "{amount:?}");
        }
        assert!(matches!(change(|o| drop(o.extra.remove("name"))), OfferError::MissingDomain));
        assert!(matches!(change(|o| drop(o.extra.insert("paymentFlow".into(), "escrow".into()))), OfferError::Flow(_)));
        assert!(matches!(
            change(|o| drop(o.extra.insert("assetTransferMethod".into(), "permit2".into()))),
            OfferError::TransferMethod(_)
        ));
    }
}
