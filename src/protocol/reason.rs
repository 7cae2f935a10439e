//! Reason codes.

use std::{convert::Infallible, fmt, str::FromStr};

use serde::{Deserialize, Deserializer, Serialize, Serializer};

macro_rules! reasons {
    ($($(#[$doc:meta])* $variant:ident = $code:literal,)*) => {
        /// Why a payment was refused or not settled, as x402 servers and facilitators say it.
        ///
        /// Codes that this crate does not know are kept as they came.
        ///
        /// ```
        /// use tower_x402::protocol::Reason;
        ///
        /// assert_eq!(Reason::from("insufficient_funds"), Reason::InsufficientFunds);
        /// assert_eq!(Reason::from("a_code_of_tomorrow").to_string(), "a_code_of_tomorrow");
        /// ```
        #[derive(Clone, Debug, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum Reason {
            $($(#[$doc])* $variant,)*
            /// A code this crate does not know.
            Other(Box<str>),
        }

        impl Reason {
            /// Every code this crate knows.
            pub const KNOWN: &[Self] = &[$(Self::$variant),*];

            /// The code on the wire.
            pub fn as_str(&self) -> &str {
                match self {
                    $(Self::$variant => $code,)*
                    Self::Other(code) => code,
                }
            }
        }

        impl From<&str> for Reason {
            fn from(code: &str) -> Self {
                match code {
                    $($code => Self::$variant,)*
                    other => Self::Other(other.into()),
                }
            }
        }
    };
}

reasons! {
    /// The payer's balance does not cover the payment and what else it has in flight.
    InsufficientFunds = "insufficient_funds",
    /// `validAfter` has not passed.
    ValidAfter = "invalid_exact_evm_payload_authorization_valid_after",
    /// `validBefore` has passed, leaves too little time, or lies too far ahead.
    ValidBefore = "invalid_exact_evm_payload_authorization_valid_before",
    /// The value is unusable in itself.
    Value = "invalid_exact_evm_payload_authorization_value",
    /// The value is not the amount asked for.
    ValueMismatch = "invalid_exact_evm_payload_authorization_value_mismatch",
    /// The signature is not the payer's.
    Signature = "invalid_exact_evm_payload_signature",
    /// The same, in newer implementations.
    SignatureNewer = "invalid_exact_evm_signature",
    /// The authorization pays somebody else.
    RecipientMismatch = "invalid_exact_evm_payload_recipient_mismatch",
    /// The offer lacks the token's EIP-712 name or version.
    MissingEip712Domain = "invalid_exact_evm_missing_eip712_domain",
    /// The payment is for another chain.
    NetworkMismatch = "invalid_exact_evm_network_mismatch",
    /// The authorization was used or cancelled before.
    NonceAlreadyUsed = "invalid_exact_evm_nonce_already_used",
    /// The payer's balance is too small.
    InsufficientBalance = "invalid_exact_evm_insufficient_balance",
    /// The token's EIP-712 name is another one.
    TokenNameMismatch = "invalid_exact_evm_token_name_mismatch",
    /// The token's EIP-712 version is another one.
    TokenVersionMismatch = "invalid_exact_evm_token_version_mismatch",
    /// The token has no `transferWithAuthorization`.
    Eip3009NotSupported = "invalid_exact_evm_eip3009_not_supported",
    /// The transfer would revert.
    SimulationFailed = "invalid_exact_evm_transaction_simulation_failed",
    /// A signature for a wallet that is not deployed yet (ERC-6492).
    Eip6492FactoryNotAllowed = "eip6492_factory_not_allowed",
    /// The asset's address holds no contract.
    AssetNotDeployed = "asset_not_deployed_contract",
    /// The network is not served here.
    InvalidNetwork = "invalid_network",
    /// The payload cannot be read.
    InvalidPayload = "invalid_payload",
    /// The requirements are not on offer, or cannot be read.
    InvalidPaymentRequirements = "invalid_payment_requirements",
    /// An extension was echoed otherwise than it was offered.
    ExtensionEchoMismatch = "extension_echo_mismatch",
    /// The scheme is not the offered one.
    InvalidScheme = "invalid_scheme",
    /// The scheme is not implemented.
    UnsupportedScheme = "unsupported_scheme",
    /// The protocol version is not served here.
    InvalidX402Version = "invalid_x402_version",
    /// The transaction was included and reverted.
    InvalidTransactionState = "invalid_transaction_state",
    /// Not known yet: the same request may be repeated with the same payment.
    SettlementPending = "settlement_pending",
    /// The same payment is being settled already.
    DuplicateSettlement = "duplicate_settlement",
    /// The verifier failed.
    UnexpectedVerifyError = "unexpected_verify_error",
    /// The settler failed.
    UnexpectedSettleError = "unexpected_settle_error",
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for Reason {
    type Err = Infallible;

    fn from_str(code: &str) -> Result<Self, Self::Err> {
        Ok(code.into())
    }
}

impl Serialize for Reason {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.as_str())
    }
}

impl<'de> Deserialize<'de> for Reason {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer).map(|code| Self::from(code.as_str()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_known_code_reads_back_as_itself() {
        for reason in Reason::KNOWN {
            assert_eq!(&Reason::from(reason.as_str()), reason);
        }
    }
}
