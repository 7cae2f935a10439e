//! The scheme `upto`: a payment of at most what the payer signed for. What it costs is decided after the work.
//!
//! The payer signs a [permit](crate::permit2) for a maximum. It names the payee, and the only account that may have it executed: the
//! facilitator. One transaction moves the actual amount, and the permit cannot be used again.
//!
//! What is done with a payment by `exact` is done with one by `upto`, so this folder has only what differs from a permit that moves exactly
//! what was signed for. Where something depends on that, the offer says it: its
//! [`TransferMethod`](crate::protocol::TransferMethod) is `Maximum`.
//!
//! | file | question it answers |
//! |---|---|
//! | `mod` | what is in an offer, and what follows from it? |
//! | `contracts` | what does the scheme's contract take, and what does it say? |
//! | `codes` | which reason codes has only this scheme? |
//!
//! ```
//! use alloy_primitives::address;
//! use tower_x402::{Network, Usdc, protocol::ExactOffer};
//!
//! let (usdc, payee) = (Network::BASE.usdc().expect("known"), address!("6813Eb9362372EEF6200f3b1dbC3f819671cBA69"));
//! let offer = ExactOffer::new(usdc, Usdc::from_atomic(10_000).into(), payee, 60);
//! let offer = offer.up_to(address!("2B5AD5c4795c026514f8317c7a215E218DcCD6cF"));
//! assert_eq!(offer.to_requirements().scheme, "upto");
//! ```

mod codes;
#[cfg(feature = "onchain")]
mod contracts;

use alloy_primitives::{Address, address};
use serde_json::{Map, Value};

use crate::permit2::Permit;

#[cfg_attr(
    not(feature = "full"),
    allow(unused_imports, reason = "sellers, buyers and facilitators use different codes")
)]
pub(crate) use codes::CODES;
pub use codes::{AMOUNT_ABOVE_MAXIMUM, FACILITATOR_MISMATCH};
#[cfg(feature = "onchain")]
pub(crate) use contracts::{calldata, read_call, revert_name};

/// The name of the scheme.
pub const SCHEME: &str = "upto";

/// The contract that has Permit2 move at most what was signed for, at the same address on every chain (`x402UptoPermit2Proxy`).
pub const PROXY: Address = address!("4020A4f3b7b90ccA423B9fabCc0CE57C6C240002");

/// The field of an offer's `extra`, and of that of a kind in `/supported`, that names the account.
const FACILITATOR_ADDRESS: &str = "facilitatorAddress";

/// Returns the permit of a token that this account settles, by the [`PROXY`].
///
/// ```
/// use alloy_primitives::Address;
/// use tower_x402::upto;
///
/// let permit = upto::permit(Address::repeat_byte(1), Address::repeat_byte(2));
/// assert_eq!((permit.spender, permit.facilitator), (upto::PROXY, Some(Address::repeat_byte(2))));
/// ```
pub const fn permit(token: Address, account: Address) -> Permit {
    Permit::for_account(token, PROXY, account)
}

/// Returns the account that an `extra` names, or else the name of the field that lacks it.
pub(crate) fn account_in(extra: &Map<String, Value>) -> Result<Address, &'static str> {
    let account = extra.get(FACILITATOR_ADDRESS).and_then(Value::as_str).and_then(|text| text.parse().ok());
    account.ok_or(FACILITATOR_ADDRESS)
}

/// Returns the field of an `extra` that names this account.
pub(crate) fn naming(account: Address) -> (String, Value) {
    (FACILITATOR_ADDRESS.to_owned(), account.to_string().into())
}
