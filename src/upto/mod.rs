//! The scheme `upto`: a payment of at most what the payer signed for. What it costs is decided after the work.
//!
//! The payer signs a [Permit2](https://github.com/Uniswap/permit2) permit for a maximum. It names the payee, and the only account that may
//! have it executed: the facilitator. One transaction moves the actual amount, and the permit cannot be used again. The payer has to let
//! Permit2 move its tokens before, once, by the token's `approve`.
//!
//! A permit is a transfer like that of an EIP-3009 [`Authorization`](crate::eip3009::Authorization), and is kept as one:
//!
//! | field of the authorization | of the permit |
//! |---|---|
//! | `from` | the owner |
//! | `to`, `valid_after` | `to` and `validAfter` of the witness: it is valid from that time on |
//! | `value` | `permitted.amount`, the maximum |
//! | `valid_before` | `deadline`: it is valid up to and including that time |
//! | `nonce` | `nonce`, a number of 256 bits. Each can be used once, whatever the token |
//!
//! The other fields, in [`Permit`], follow from the offer. So what is done with a payment by `exact` is done with one by `upto`, and this
//! folder has only what differs. What asks a chain is in `chain/permit.rs`.
//!
//! | file | question it answers |
//! |---|---|
//! | `message` | what is signed? |
//! | `payload` | what is on the wire? |
//! | `contracts` | what do the contracts take, and what do they say? |
//! | `codes` | which reason code of `upto` stands for which of `exact`? |
//!
//! ```
//! use alloy_primitives::{B256, U256, address};
//! use tower_x402::{Network, eip3009::Authorization, upto::Permit};
//!
//! let usdc = Network::BASE.usdc().expect("known");
//! let permit = Permit::new(usdc.address, address!("2B5AD5c4795c026514f8317c7a215E218DcCD6cF"));
//! let maximum = Authorization {
//!     from: address!("7E5F4552091A69125d5DfCb7b8C2659029395Bdf"),
//!     to: address!("6813Eb9362372EEF6200f3b1dbC3f819671cBA69"),
//!     value: U256::from(10_000),
//!     valid_after: U256::ZERO,
//!     valid_before: U256::from(1_900_000_000_u64),
//!     nonce: B256::repeat_byte(1),
//! };
//! let hash = permit.signing_hash(&maximum, &Permit::domain(Network::BASE));
//! # let _ = hash;
//! ```

mod codes;
#[cfg(feature = "onchain")]
mod contracts;
mod message;
mod payload;

use alloy_primitives::{Address, Bytes, U256, address};

#[cfg_attr(
    not(feature = "full"),
    allow(unused_imports, reason = "sellers, buyers and facilitators use different codes")
)]
pub(crate) use codes::{
    ALLOWANCE_REQUIRED, PROXY_NOT_DEPLOYED, SPENDER_MISMATCH, TOKEN_MISMATCH, is_not_executed, of_exact, of_permit,
};
pub use codes::{AMOUNT_ABOVE_MAXIMUM, FACILITATOR_MISMATCH};
#[cfg(feature = "onchain")]
pub(crate) use contracts::{Permit2, SettleCall, UptoProxy, calldata, nonce_place, revert_name};
#[cfg(feature = "onchain")]
pub(crate) use message::witness_type_hash;
pub(crate) use payload::Permit2Authorization;

/// The name of the scheme.
pub const SCHEME: &str = "upto";

/// Permit2, at the address that it has on every chain that this scheme works on.
pub const PERMIT2: Address = address!("000000000022D473030F116dDEE9F6B43aC78BA3");

/// The contract that has Permit2 move what was signed for, at the same address on every chain (`x402UptoPermit2Proxy`).
pub const PROXY: Address = address!("4020A4f3b7b90ccA423B9fabCc0CE57C6C240002");

/// The fields of a permit that an [`Authorization`](crate::eip3009::Authorization) has no place for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Permit {
    /// The token.
    pub token: Address,
    /// The contract that may use the permit: [`PROXY`].
    pub spender: Address,
    /// The only account that may have it executed.
    pub facilitator: Address,
}

/// Returns the calldata of the token's `approve` that lets Permit2 move this much of the caller's tokens, in atomic units.
pub fn approval(amount: U256) -> Bytes {
    const APPROVE: [u8; 4] = [0x09, 0x5e, 0xa7, 0xb3];
    [&APPROVE[..], PERMIT2.into_word().as_slice(), &amount.to_be_bytes::<32>()].concat().into()
}

impl Permit {
    /// Returns the permit of a token for the [`PROXY`] that this facilitator settles.
    pub const fn new(token: Address, facilitator: Address) -> Self {
        Self { token, spender: PROXY, facilitator }
    }
}
