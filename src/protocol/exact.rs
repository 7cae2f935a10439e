//! Payments by one signed transfer on EVM chains: `exact`, by an EIP-3009 authorization of exactly the asked amount, and `upto`, by a
//! permit for a maximum.

use std::fmt;

use alloy_primitives::{Address, U256};
use serde_json::{Map, Value};

use super::PaymentRequirements;
use crate::{
    network::{Asset, Network},
    upto::{self, Permit},
};

/// How tokens are moved, and who decides how many.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum TransferMethod {
    /// Exactly the amount, by an EIP-3009 authorization that anybody may execute (scheme `exact`).
    #[default]
    Authorization,
    /// At most the amount, by a permit that one account may have executed (scheme `upto`).
    Permit {
        /// The account (`extra.facilitatorAddress`).
        facilitator: Address,
    },
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

/// An offer to be paid by one signed transfer on an EVM chain, parsed and checked.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ExactOffer {
    /// The token, and its chain.
    pub asset: Asset,
    /// The price, in atomic units of the token: of a [permit](TransferMethod::Permit) the highest.
    pub amount: U256,
    /// The payee.
    pub pay_to: Address,
    /// The longest validity of an authorization, in seconds.
    pub max_timeout_seconds: u64,
    /// The order of work and settlement.
    pub flow: PaymentFlow,
    /// How the tokens are moved.
    pub method: TransferMethod,
}

impl ExactOffer {
    /// Creates an offer of the scheme `exact` and the flow `authorization`. `amount` is in atomic units of the token.
    pub const fn new(asset: Asset, amount: U256, pay_to: Address, max_timeout_seconds: u64) -> Self {
        let (flow, method) = (PaymentFlow::Authorization, TransferMethod::Authorization);
        Self { asset, amount, pay_to, max_timeout_seconds, flow, method }
    }

    /// Makes it an offer of the scheme `upto`: the amount is the highest, and this facilitator settles.
    #[must_use]
    pub fn up_to(self, facilitator: Address) -> Self {
        Self { flow: PaymentFlow::Authorization, method: TransferMethod::Permit { facilitator }, ..self }
    }

    /// Returns the chain of the payment.
    pub fn network(&self) -> Network {
        self.asset.network
    }

    /// Returns the name of its scheme.
    pub const fn scheme(&self) -> &'static str {
        match self.method {
            TransferMethod::Authorization => "exact",
            TransferMethod::Permit { .. } => upto::SCHEME,
        }
    }

    /// Returns the fields of a permit that follow from the offer, if it is paid by one.
    pub const fn permit(&self) -> Option<Permit> {
        match self.method {
            TransferMethod::Authorization => None,
            TransferMethod::Permit { facilitator } => Some(Permit::new(self.asset.address, facilitator)),
        }
    }

    /// Returns the contract that keeps the nonces that have been used: the token, or Permit2, whose nonces are one set for all tokens.
    pub const fn nonce_keeper(&self) -> Address {
        match self.method {
            TransferMethod::Authorization => self.asset.address,
            TransferMethod::Permit { .. } => upto::PERMIT2,
        }
    }

    /// Returns the offer as it is on the wire, with checksummed addresses.
    pub fn to_requirements(&self) -> PaymentRequirements {
        let mut extra = Map::new();
        // Where it is paid by a permit, others may leave out the token's domain.
        for (field, value) in [("name", &self.asset.name), ("version", &self.asset.version)] {
            if !value.is_empty() || self.method == TransferMethod::Authorization {
                extra.insert(field.into(), Value::from(value.as_str()));
            }
        }
        if let TransferMethod::Permit { facilitator } = self.method {
            extra.insert("assetTransferMethod".into(), Value::from("permit2"));
            extra.insert("facilitatorAddress".into(), Value::from(facilitator.to_string()));
        }
        if self.flow != PaymentFlow::Authorization {
            extra.insert("paymentFlow".into(), Value::from(self.flow.as_str()));
        }
        PaymentRequirements {
            scheme: self.scheme().into(),
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
        let is_permit = match offer.scheme.as_str() {
            "exact" => false,
            upto::SCHEME => true,
            _ => return Err(OfferError::Scheme(offer.scheme.clone())),
        };
        Self::read(offer, is_permit)
    }
}

impl ExactOffer {
    /// Reads what an offer of a payment channel has in common with one of `exact`: token, price, payee and time.
    #[cfg(feature = "client")]
    pub(crate) fn of_channel(offer: &PaymentRequirements) -> Result<Self, OfferError> {
        Self::read(offer, false)
    }

    fn read(offer: &PaymentRequirements, is_permit: bool) -> Result<Self, OfferError> {
        let network = offer.network.parse().map_err(|_| OfferError::Network(offer.network.clone()))?;
        let address = |text: &str, field| text.parse::<Address>().map_err(|_| OfferError::Address(field));
        let text = |field| match offer.extra.get(field) {
            Some(Value::String(text)) => Ok(text.clone()),
            None if is_permit => Ok(String::new()),
            _ => Err(OfferError::MissingDomain),
        };
        let flow = match offer.extra.get("paymentFlow") {
            None => PaymentFlow::Authorization,
            Some(Value::String(flow)) if flow == "authorization" => PaymentFlow::Authorization,
            Some(Value::String(flow)) if flow == "upfront" && !is_permit => PaymentFlow::Upfront,
            Some(other) => return Err(OfferError::Flow(other.to_string())),
        };
        // The scheme `exact` also has transfers by Permit2, which this field names.
        let expected = if is_permit { "permit2" } else { "eip3009" };
        if let Some(method) = offer.extra.get("assetTransferMethod").filter(|method| *method != expected) {
            return Err(OfferError::TransferMethod(method.to_string()));
        }
        let method = match offer.extra.get("facilitatorAddress") {
            _ if !is_permit => TransferMethod::Authorization,
            Some(Value::String(text)) => TransferMethod::Permit { facilitator: address(text, "facilitatorAddress")? },
            _ => return Err(OfferError::Address("facilitatorAddress")),
        };
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
            method,
        })
    }
}

/// Why this crate can neither pay nor serve an offer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum OfferError {
    /// The scheme is none of those for one signed transfer.
    #[error("scheme {0:?} is not implemented, only \"exact\" and \"upto\"")]
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
    /// The token is to be moved by another method than EIP-3009, or for `upto` than Permit2.
    #[error("assetTransferMethod {0} is not implemented for this scheme")]
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
            method: TransferMethod::Authorization,
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
    fn an_offer_of_a_maximum_reads_back_as_itself_and_needs_a_facilitator() {
        let offer = offer().up_to(Address::repeat_byte(9));
        let written = offer.to_requirements();
        assert_eq!(written.scheme, "upto");
        assert_eq!(written.extra["facilitatorAddress"], Address::repeat_byte(9).to_string());
        assert_eq!(ExactOffer::try_from(&written), Ok(offer.clone()));
        let change = |change: fn(&mut PaymentRequirements)| {
            let mut written = offer.to_requirements();
            change(&mut written);
            ExactOffer::try_from(&written)
        };
        // The token's domain is of use only for permits of the token itself (EIP-2612).
        assert!(change(|o| drop((o.extra.remove("name"), o.extra.remove("assetTransferMethod")))).is_ok());
        let lacking = change(|o| drop(o.extra.remove("facilitatorAddress")));
        assert_eq!(lacking, Err(OfferError::Address("facilitatorAddress")));
        let upfront = change(|o| drop(o.extra.insert("paymentFlow".into(), "upfront".into())));
        assert!(matches!(upfront, Err(OfferError::Flow(_))));
    }

    #[test]
    fn an_offer_that_cannot_be_paid_names_the_field() {
        let change = |change: fn(&mut PaymentRequirements)| {
            let mut written = offer().to_requirements();
            change(&mut written);
            ExactOffer::try_from(&written).unwrap_err()
        };
        assert!(matches!(change(|o| o.scheme = "escrow".into()), OfferError::Scheme(_)));
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
