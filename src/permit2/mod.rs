//! Permits: transfers that [Permit2](https://github.com/Uniswap/permit2) makes, in any ERC-20 token, because their payer signed for them.
//!
//! A payer that has let Permit2 move its tokens, once, by the token's `approve` ([`approval`]), pays by a signature in Permit2's domain. It
//! names the payee, and the contract that may use it. That contract, a proxy of x402, has Permit2 move the tokens, and nothing else. There
//! is one for each scheme:
//!
//! | scheme | proxy | moves | who may call it |
//! |---|---|---|---|
//! | `exact`, where an offer says `"assetTransferMethod": "permit2"` | [`PROXY`] | what was signed for | anybody |
//! | [`upto`](crate::upto) | [`upto::PROXY`](crate::upto::PROXY) | at most what was signed for | the account that was signed for |
//!
//! A permit is a transfer like that of an EIP-3009 [`Authorization`](crate::eip3009::Authorization), and is kept as one:
//!
//! | field of the authorization | of the permit |
//! |---|---|
//! | `from` | the owner |
//! | `to`, `valid_after` | `to` and `validAfter` of the witness: it is valid from that time on |
//! | `value` | `permitted.amount` |
//! | `valid_before` | `deadline`: it is valid up to and including that time |
//! | `nonce` | `nonce`, a number of 256 bits. Each can be used once, whatever the token and the proxy |
//!
//! The other fields, in [`Permit`], follow from the offer. So a permit is verified, recorded and settled by the code that does so with an
//! authorization. This folder has what is signed and sent; what asks a chain is in `chain/permit.rs`.
//!
//! | file | question it answers |
//! |---|---|
//! | `message` | what is signed? |
//! | `payload` | what is on the wire? |
//! | `contracts` | what do the contracts take, and what do they say? |
//! | `codes` | which reason code of permits stands for which of authorizations? |
//!
//! ```
//! use alloy_primitives::{B256, U256, address};
//! use tower_x402::{Network, eip3009::Authorization, permit2::Permit};
//!
//! let usdc = Network::BASE.usdc().expect("known");
//! let permit = Permit::new(usdc.address);
//! let transfer = Authorization {
//!     from: address!("7E5F4552091A69125d5DfCb7b8C2659029395Bdf"),
//!     to: address!("6813Eb9362372EEF6200f3b1dbC3f819671cBA69"),
//!     value: U256::from(10_000),
//!     valid_after: U256::ZERO,
//!     valid_before: U256::from(1_900_000_000_u64),
//!     nonce: B256::repeat_byte(1),
//! };
//! let hash = permit.signing_hash(&transfer, &Permit::domain(Network::BASE));
//! # let _ = hash;
//! ```

mod codes;
#[cfg(feature = "onchain")]
mod contracts;
mod message;
mod payload;

use alloy_primitives::{Address, Bytes, U256, address};
use serde::{Deserialize, Serialize};

#[cfg_attr(
    not(feature = "full"),
    allow(unused_imports, reason = "sellers, buyers and facilitators use different codes")
)]
pub(crate) use codes::{
    ACCOUNT_MISMATCH, ALLOWANCE_REQUIRED, CODES, Codes, MISMATCHES, NOT_EXECUTED, PROXY_NOT_DEPLOYED, SPENDER_MISMATCH,
    TOKEN_MISMATCH,
};
#[cfg(feature = "onchain")]
pub(crate) use contracts::{Permit2, Proxy, SettleCall, calldata, nonce_place, read_call, revert_name, transfer_from};
pub(crate) use payload::Permit2Authorization;

/// Permit2, at the address that it has on every chain that these schemes work on.
pub const PERMIT2: Address = address!("000000000022D473030F116dDEE9F6B43aC78BA3");

/// The contract that has Permit2 move exactly what was signed for, at the same address on every chain (`x402ExactPermit2Proxy`).
pub const PROXY: Address = address!("402085c248EeA27D92E8b30b2C58ed07f9E20001");

/// The fields of a permit that an [`Authorization`](crate::eip3009::Authorization) has no place for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Permit {
    /// The token.
    pub token: Address,
    /// The contract that may use the permit.
    pub spender: Address,
    /// The only account that may have it executed; `None` if anybody may.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub facilitator: Option<Address>,
}

/// Returns the calldata of the token's `approve` that lets Permit2 move this much of the caller's tokens, in atomic units.
pub fn approval(amount: U256) -> Bytes {
    const APPROVE: [u8; 4] = [0x09, 0x5e, 0xa7, 0xb3];
    [&APPROVE[..], PERMIT2.into_word().as_slice(), &amount.to_be_bytes::<32>()].concat().into()
}

impl Permit {
    /// Returns the permit for the [`PROXY`] to move exactly what is signed for of this token. Anybody may have it executed.
    pub const fn new(token: Address) -> Self {
        Self { token, spender: PROXY, facilitator: None }
    }

    /// Returns the permit for another proxy, which lets nobody but this account have it executed.
    pub const fn for_account(token: Address, proxy: Address, account: Address) -> Self {
        Self { token, spender: proxy, facilitator: Some(account) }
    }

    /// Returns `true` if less than what is signed for may be moved: the account that the permit names says how much.
    pub const fn is_maximum(&self) -> bool {
        self.facilitator.is_some()
    }

    /// Returns `true` if anybody who has it may have it executed, for what was signed for.
    pub const fn is_for_anybody(&self) -> bool {
        self.facilitator.is_none()
    }
}
