//! The reason codes of x402.

use std::{convert::Infallible, fmt, str::FromStr};

use serde::{Deserialize, Deserializer, Serialize, Serializer};

macro_rules! reasons {
    ($($(#[$doc:meta])* $variant:ident = $code:literal,)*) => {
        /// A reason code of x402: why a payment was refused or not settled.
        ///
        /// Unknown codes are kept as they are.
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
            /// An unknown code.
            Other(Box<str>),
        }

        impl Reason {
            /// The known codes.
            pub const KNOWN: &[Self] = &[$(Self::$variant),*];

            /// Returns the code on the wire.
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
    /// The payer's balance does not cover this payment and its others in flight.
    InsufficientFunds = "insufficient_funds",
    /// `validAfter` has not passed.
    ValidAfter = "invalid_exact_evm_payload_authorization_valid_after",
    /// `validBefore` has passed, leaves too little time, or lies too far ahead.
    ValidBefore = "invalid_exact_evm_payload_authorization_valid_before",
    /// The value is invalid.
    Value = "invalid_exact_evm_payload_authorization_value",
    /// The value is not the offer's amount.
    ValueMismatch = "invalid_exact_evm_payload_authorization_value_mismatch",
    /// The signature is not the payer's.
    Signature = "invalid_exact_evm_payload_signature",
    /// The signature is not the payer's (the code of newer implementations).
    SignatureNewer = "invalid_exact_evm_signature",
    /// The authorization pays another address.
    RecipientMismatch = "invalid_exact_evm_payload_recipient_mismatch",
    /// The offer lacks the token's EIP-712 name or version.
    MissingEip712Domain = "invalid_exact_evm_missing_eip712_domain",
    /// The payment is for another chain.
    NetworkMismatch = "invalid_exact_evm_network_mismatch",
    /// The authorization was used or cancelled before.
    NonceAlreadyUsed = "invalid_exact_evm_nonce_already_used",
    /// The payer's balance is too small.
    InsufficientBalance = "invalid_exact_evm_insufficient_balance",
    /// The token has another EIP-712 name.
    TokenNameMismatch = "invalid_exact_evm_token_name_mismatch",
    /// The token has another EIP-712 version.
    TokenVersionMismatch = "invalid_exact_evm_token_version_mismatch",
    /// The token has no `transferWithAuthorization`.
    Eip3009NotSupported = "invalid_exact_evm_eip3009_not_supported",
    /// The transfer would revert.
    SimulationFailed = "invalid_exact_evm_transaction_simulation_failed",
    /// A signature for a wallet that is not deployed yet (ERC-6492).
    Eip6492FactoryNotAllowed = "eip6492_factory_not_allowed",
    /// The asset's address holds no contract.
    AssetNotDeployed = "asset_not_deployed_contract",
    /// The network is not supported.
    InvalidNetwork = "invalid_network",
    /// The payload cannot be parsed.
    InvalidPayload = "invalid_payload",
    /// The offer is not one of the server's, or cannot be parsed.
    InvalidPaymentRequirements = "invalid_payment_requirements",
    /// An echoed extension differs from the offered one.
    ExtensionEchoMismatch = "extension_echo_mismatch",
    /// The scheme is not that of the offer.
    InvalidScheme = "invalid_scheme",
    /// The scheme is not implemented.
    UnsupportedScheme = "unsupported_scheme",
    /// The protocol version is not supported.
    InvalidX402Version = "invalid_x402_version",
    /// The transaction was included and reverted.
    InvalidTransactionState = "invalid_transaction_state",
    /// The outcome is not known yet. The request may be repeated with the same payment.
    SettlementPending = "settlement_pending",
    /// The payment is already being settled.
    DuplicateSettlement = "duplicate_settlement",
    /// Verification failed unexpectedly.
    UnexpectedVerifyError = "unexpected_verify_error",
    /// Settlement failed unexpectedly.
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
