//! Payment channels: the scheme `batch-settlement` of x402 on EVM chains. No I/O.
//!
//! A payer deposits USDC into an escrow contract once. Each request then carries a signed [`Voucher`]: "of this channel at most X may be
//! claimed in total". The seller checks it without asking a node, and later claims what it charged for many channels in one transaction.
//!
//! This module has the messages, the typed data and the contract's interface.
//!
//! | item | what it is |
//! |---|---|
//! | [`ChannelConfig`], [`ChannelId`] | the seven fields that make a channel, and their digest |
//! | [`Escrow`] | the contract on one chain: addresses and EIP-712 digests |
//! | [`Voucher`], [`VoucherSignature`] | the payer's promise, with a signature that the contract accepts |
//! | [`Deposit`] | the payer's ERC-3009 authorization that fills the escrow |
//! | [`ChannelPayload`], [`ChannelOffer`] | `payload` of a payment, and `extra` of an offer |
//! | [`ChannelState`], [`VoucherState`] | the state of a channel in answers and corrective 402s |
//! | [`ChannelObservation`] | a channel as the chain had it in one block |
//! | [`AuthorizerKey`] | the key that claims and refunds in the receiver's name |
//! | [`reason`] | the scheme's error codes |
//! | [`SettlementExtra`] | what a payer is told that it was charged |
//!
//! ```
//! use alloy_primitives::{Address, B256, address};
//! use tower_x402::{Network, vouchers::{ChannelConfig, Escrow}};
//!
//! let config = ChannelConfig {
//!     payer: address!("3C44CdDdB6a900fa2b585dd299e03d12FA4293BC"),
//!     payer_authorizer: address!("90F79bf6EB2c4f870365E785982E1f101E93b906"),
//!     receiver: address!("9965507D1a55bcC2695C58ba16FB37d819B0A4dc"),
//!     receiver_authorizer: address!("70997970C51812dc3A010C7d01b50e0d17dc79C8"),
//!     token: Network::BASE_SEPOLIA.usdc().expect("known").address,
//!     withdraw_delay: 900,
//!     salt: B256::ZERO,
//! };
//! let escrow = Escrow::on(Network::BASE_SEPOLIA);
//! let id = escrow.channel_id(&config);
//! assert_eq!(id.to_string(), "0x78c8da75c41f351d88afa4218f450208345ec54d061b0f0ce0c4200b24f1876a");
//! // Another chain, another channel.
//! assert_ne!(id, Escrow::on(Network::BASE).channel_id(&config));
//! ```

// Its types are generated, and public for the tests in this repository only.
#[doc(hidden)]
pub mod abi;
pub(crate) mod amount;
mod authorizer;
mod channel;
mod deposit;
mod escrow;
mod message;
pub mod reason;
mod state;
mod voucher;

pub use authorizer::{AuthorizerError, AuthorizerKey};
pub(crate) use channel::without_checksums;
pub use channel::{
    ChannelConfig, ChannelConfigError, ChannelId, MAX_WITHDRAW_DELAY, MIN_WITHDRAW_DELAY, ParseChannelIdError,
};
pub use deposit::{Deposit, DepositAuthorization};
pub use escrow::{ClaimEntry, Escrow};
pub use message::{ChannelOffer, ChannelOfferError, ChannelPayload, Claim, ClaimedVoucher, RefundRequest};
pub use state::{ChannelObservation, ChannelState, SettlementExtra, VoucherState};
pub use voucher::{InvalidVoucherSignature, Voucher, VoucherSignature};

/// The scheme's name.
pub const SCHEME: &str = "batch-settlement";
