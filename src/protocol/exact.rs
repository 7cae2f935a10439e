//! Payments by one signed transfer on EVM chains: of exactly the asked amount, by an EIP-3009 authorization or a permit, or of at most that,
//! by a permit.

use std::fmt;

use alloy_primitives::{Address, U256};
use serde_json::{Map, Value};

#[cfg(feature = "remote")]
use super::SupportedKind;
use super::{PaymentRequirements, Reason};
use crate::{
    network::{Asset, Network},
    permit2::{self, Codes, PERMIT2, Permit},
    upto,
};

/// How tokens are moved, and who decides how many.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum TransferMethod {
    /// Exactly the amount, by an EIP-3009 authorization that anybody may execute (scheme `exact`).
    #[default]
    Authorization,
    /// Exactly the amount, by a permit of Permit2 that anybody may have executed (scheme `exact`).
    Permit,
    /// At most the amount, by a permit of Permit2 that one account may have executed (scheme [`upto`]).
    Maximum {
        /// The account (`extra.facilitatorAddress`).
        facilitator: Address,
    },
}

impl TransferMethod {
    /// Returns each method that moves tokens by a permit, as far as it depends on who settles: on this account.
    pub const fn by_permit(account: Address) -> [Self; 2] {
        [Self::Permit, Self::Maximum { facilitator: account }]
    }

    /// Returns the method by permit of a kind of payments that a facilitator says it settles. Which tokens it moves by permit, it does not say.
    #[cfg(feature = "remote")]
    pub(crate) fn of_kind(kind: &SupportedKind) -> Option<Self> {
        match kind.scheme.as_str() {
            "exact" => Some(Self::Permit),
            upto::SCHEME => Some(Self::Maximum { facilitator: upto::account_in(kind.extra.as_ref()?).ok()? }),
            _ => None,
        }
    }

    /// Returns what offers, and facilitators in `/supported`, say of the scheme of this method beside its name.
    pub(crate) fn extra(self) -> Option<Map<String, Value>> {
        match self {
            Self::Authorization | Self::Permit => None,
            Self::Maximum { facilitator } => Some(Map::from_iter([upto::naming(facilitator)])),
        }
    }

    /// Returns the name of the scheme that moves tokens like this.
    pub const fn scheme(self) -> &'static str {
        match self {
            Self::Authorization | Self::Permit => "exact",
            Self::Maximum { .. } => upto::SCHEME,
        }
    }

    /// Returns `true` if it can be settled before the work. What is charged of a maximum is known after that only.
    pub(crate) const fn may_settle_upfront(self) -> bool {
        !matches!(self, Self::Maximum { .. })
    }

    /// Returns the fields of a permit for this token, if it moves tokens by one.
    pub const fn permit(self, token: Address) -> Option<Permit> {
        match self {
            Self::Authorization => None,
            Self::Permit => Some(Permit::new(token)),
            Self::Maximum { facilitator } => Some(upto::permit(token, facilitator)),
        }
    }

    /// Returns the reason as it is named where tokens are moved like this: permits have codes of their own.
    #[cfg_attr(not(feature = "facilitator"), allow(dead_code, reason = "only sellers and facilitators refuse"))]
    pub(crate) fn reason(self, reason: &Reason) -> Reason {
        let codes: &[&Codes] = match self {
            Self::Authorization => &[],
            Self::Permit => &[permit2::CODES],
            Self::Maximum { .. } => &[permit2::CODES, upto::CODES],
        };
        let own = codes.iter().copied().flatten().find(|(code, _)| *code == reason.as_str());
        own.map_or_else(|| reason.clone(), |(_, own)| Reason::from(*own))
    }

    /// Returns `true` if both move tokens alike, whichever accounts they name.
    #[cfg(any(feature = "server", feature = "client"))]
    pub(crate) fn is_like(self, other: Self) -> bool {
        std::mem::discriminant(&self) == std::mem::discriminant(&other)
    }
}

#[cfg(any(feature = "remote", feature = "client"))]
impl Reason {
    /// Returns the reason of an authorization that means the same, if this is one of a permit.
    pub(crate) fn of_authorization(&self) -> Self {
        const CODES: [&Codes; 3] = [permit2::CODES, permit2::MISMATCHES, upto::CODES];
        let same = CODES.into_iter().flatten().find(|(_, own)| *own == self.as_str());
        same.map_or_else(|| self.clone(), |(code, _)| Self::from(*code))
    }
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
    /// The price, in atomic units of the token; the highest, if it is a [maximum](TransferMethod::Maximum).
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

    /// Makes it an offer to be paid by a permit of Permit2.
    #[must_use]
    pub fn by_permit(self) -> Self {
        Self { method: TransferMethod::Permit, ..self }
    }

    /// Makes the amount the [highest](TransferMethod::Maximum): this facilitator settles what is charged of it.
    #[must_use]
    pub fn up_to(self, facilitator: Address) -> Self {
        Self { flow: PaymentFlow::Authorization, method: TransferMethod::Maximum { facilitator }, ..self }
    }

    /// Returns the chain of the payment.
    pub fn network(&self) -> Network {
        self.asset.network
    }

    /// Returns the name of its scheme.
    pub const fn scheme(&self) -> &'static str {
        self.method.scheme()
    }

    /// Returns the fields of a permit that follow from the offer, if it is paid by one.
    pub const fn permit(&self) -> Option<Permit> {
        self.method.permit(self.asset.address)
    }

    /// Returns `true` if less than the amount may be charged, which is decided after the work.
    pub const fn is_maximum(&self) -> bool {
        matches!(self.method, TransferMethod::Maximum { .. })
    }

    /// Returns the contract that keeps the nonces that have been used: the token, or Permit2, whose nonces are one set for all tokens.
    pub const fn nonce_keeper(&self) -> Address {
        if self.permit().is_some() { PERMIT2 } else { self.asset.address }
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
        if self.permit().is_some() {
            extra.insert("assetTransferMethod".into(), Value::from("permit2"));
        }
        extra.extend(self.method.extra().into_iter().flatten());
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
        let asked = offer.extra.get("assetTransferMethod");
        let (method, named) = match offer.scheme.as_str() {
            "exact" if asked.is_some_and(|method| method == "permit2") => (TransferMethod::Permit, "permit2"),
            "exact" => (TransferMethod::Authorization, "eip3009"),
            upto::SCHEME => {
                let facilitator = upto::account_in(&offer.extra).map_err(OfferError::Address)?;
                (TransferMethod::Maximum { facilitator }, "permit2")
            }
            _ => return Err(OfferError::Scheme(offer.scheme.clone())),
        };
        match asked.filter(|asked| *asked != named) {
            Some(other) => Err(OfferError::TransferMethod(other.to_string())),
            None => Self::read(offer, method),
        }
    }
}

impl ExactOffer {
    /// Reads what an offer of a payment channel has in common with one of `exact`: token, price, payee and time.
    #[cfg(feature = "client")]
    pub(crate) fn of_channel(offer: &PaymentRequirements) -> Result<Self, OfferError> {
        Self::read(offer, TransferMethod::Authorization)
    }

    fn read(offer: &PaymentRequirements, method: TransferMethod) -> Result<Self, OfferError> {
        let network = offer.network.parse().map_err(|_| OfferError::Network(offer.network.clone()))?;
        let address = |text: &str, field| text.parse::<Address>().map_err(|_| OfferError::Address(field));
        let text = |field| match offer.extra.get(field) {
            Some(Value::String(text)) => Ok(text.clone()),
            None if method != TransferMethod::Authorization => Ok(String::new()),
            _ => Err(OfferError::MissingDomain),
        };
        let flow = match offer.extra.get("paymentFlow") {
            None => PaymentFlow::Authorization,
            Some(Value::String(flow)) if flow == "authorization" => PaymentFlow::Authorization,
            Some(Value::String(flow)) if flow == "upfront" && method.may_settle_upfront() => PaymentFlow::Upfront,
            Some(other) => return Err(OfferError::Flow(other.to_string())),
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
    #[error("scheme {0:?} is none of those that are paid by one transfer")]
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
    /// The token is to be moved by another method than EIP-3009 or Permit2, or one that the scheme does not have.
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
    fn an_offer_of_a_permit_reads_back_as_itself_in_both_flows() {
        for flow in [PaymentFlow::Authorization, PaymentFlow::Upfront] {
            let offer = ExactOffer { flow, ..offer().by_permit() };
            let mut written = offer.to_requirements();
            assert_eq!((written.scheme.as_str(), &written.extra["assetTransferMethod"]), ("exact", &"permit2".into()));
            assert_eq!(ExactOffer::try_from(&written).as_ref(), Ok(&offer));
            // Others leave out the token's domain, which no permit needs.
            written.extra.retain(|field, _| !["name", "version"].contains(&field.as_str()));
            assert_eq!(ExactOffer::try_from(&written).map(|offer| offer.method), Ok(TransferMethod::Permit));
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
        let by_another = change(|o| drop(o.extra.insert("assetTransferMethod".into(), "eip3009".into())));
        assert!(matches!(by_another, Err(OfferError::TransferMethod(_))));
    }

    #[cfg(any(feature = "remote", feature = "client"))]
    #[test]
    fn a_reason_that_is_written_about_a_permit_reads_back_as_itself() {
        let methods = [
            TransferMethod::Authorization,
            TransferMethod::Permit,
            TransferMethod::Maximum { facilitator: Address::ZERO },
        ];
        for (method, reason) in methods.iter().flat_map(|method| Reason::KNOWN.iter().map(move |it| (method, it))) {
            assert_eq!(method.reason(reason).of_authorization(), *reason, "{method:?}");
        }
        let written = methods.map(|method| method.reason(&Reason::NetworkMismatch).to_string());
        let exact = "invalid_exact_evm_network_mismatch";
        assert_eq!(written, [exact, exact, "invalid_upto_evm_network_mismatch"]);
        let read = |code: &str| Reason::from(code).of_authorization();
        assert_eq!(read("permit2_payment_too_early"), Reason::ValidAfter);
        assert_eq!(read("permit2_token_mismatch"), Reason::InvalidPaymentRequirements);
        assert_eq!(read("another"), Reason::from("another"));
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
        for other in [Value::from("erc7710"), Value::from(""), Value::Null] {
            let mut written = offer().to_requirements();
            written.extra.insert("assetTransferMethod".into(), other);
            assert!(matches!(ExactOffer::try_from(&written), Err(OfferError::TransferMethod(_))));
        }
    }
}
