//! EIP-3009 transfer authorizations: typed data, signing, recovery. No I/O.
//!
//! With an authorization anybody can move an exact amount from the payer to the payee, once, within a window of time.
//!
//! ```
//! # #[cfg(feature = "facilitator")] {
//! use tower_x402::{Network, eip3009::{Authorization, PaymentSignature, TokenDomain}};
//! use alloy_primitives::{B256, U256, address};
//!
//! let authorization = Authorization {
//!     from: address!("f39Fd6e51aad88F6F4ce6aB8827279cffFb92266"),
//!     to: address!("70997970C51812dc3A010C7d01b50e0d17dc79C8"),
//!     value: U256::from(1_000),
//!     valid_after: U256::ZERO,
//!     valid_before: U256::from(1_800_000_000_u64),
//!     nonce: B256::repeat_byte(1),
//! };
//! let domain = TokenDomain::of(&Network::BASE.usdc().expect("known"));
//! let hash = authorization.signing_hash(&domain);
//! let garbage = PaymentSignature::from(vec![0; 65]);
//! assert!(garbage.recover(hash).is_err());
//! # }
//! ```

mod authorization;
#[cfg(feature = "facilitator")]
mod recover;
#[cfg(feature = "client")]
mod sign;
mod signature;

pub(crate) use authorization::checksummed;
#[cfg(feature = "facilitator")]
pub(crate) use authorization::without_checksums;
pub use authorization::{Authorization, TokenDomain};
#[cfg(feature = "facilitator")]
pub(crate) use recover::HALF_ORDER;
#[cfg(feature = "facilitator")]
pub use recover::RecoverError;
#[cfg(feature = "client")]
pub use sign::{AuthorizationSigner, SignError};
pub use signature::PaymentSignature;

alloy_sol_types::sol! {
    /// The typed data of EIP-3009.
    struct TransferWithAuthorization {
        address from;
        address to;
        uint256 value;
        uint256 validAfter;
        uint256 validBefore;
        bytes32 nonce;
    }
}

#[cfg(feature = "facilitator")]
alloy_sol_types::sol! {
    /// The typed data of EIP-3009's second function, which only the payee may call.
    struct ReceiveWithAuthorization {
        address from;
        address to;
        uint256 value;
        uint256 validAfter;
        uint256 validBefore;
        bytes32 nonce;
    }
}
