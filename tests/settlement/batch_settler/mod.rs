//! The batch settler: honest payments, and attacks on it. On the devnet, and on anvil with
//! Circle's token.
#![allow(clippy::too_many_arguments)]
pub(crate) mod batch;
mod deployment;
#[cfg(feature = "test-anvil")]
mod gas;
mod gas_left;
mod hostile_token;
mod layout;
mod payments;
