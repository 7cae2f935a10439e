//! Payments for HTTP requests: charge another program for a request, or pay for one, in USDC over [x402](https://www.x402.org).
//!
//! A server answers `402 Payment Required` with its offers. The client signs an authorization to transfer exactly that amount (EIP-3009)
//! and sends the request again with it. The server runs its handler, settles the payment on Base and answers, with a receipt.
//! Neither side needs an account with anybody, and the client pays no gas.
//!
//! - **To charge**, wrap any tower service, such as an axum router, in a [`server::RequirePaymentLayer`].
//! - **To pay**, use `reqwest` or any other tower HTTP client with a [`client::Payer`] and its [`client::Budget`].
//! - **To try it**, run `cargo run --example quickstart`: chain, seller and buyer in one process.
//!
//! A handler runs once per payment, and a payment is settled once, whatever crashes or times out in between. What cannot be
//! known yet is reported as unknown, never as failed.
//!
//! # Charge
//!
//! ```no_run
//! # #[cfg(all(feature = "onchain", feature = "local-signer", feature = "server"))]
//! # async fn example(settlement_key: tower_x402::signers::PrivateKeySigner) -> Result<(), Box<dyn std::error::Error>> {
//! use axum::{Router, routing::post};
//! use tower_x402::{
//!     Network, facilitator::OnchainFacilitator, primitives::address, server::RequirePaymentLayer,
//! };
//!
//! // Verifies and settles payments through a node. Its key pays the gas.
//! let facilitator = OnchainFacilitator::builder()
//!     .rpc_url("https://your-node.example")
//!     .network(Network::BASE_SEPOLIA)
//!     .signer(settlement_key)
//!     .build()
//!     .await?;
//! let paywall = RequirePaymentLayer::builder()
//!     .price("$0.001")
//!     .pay_to(Network::BASE_SEPOLIA, address!("70997970C51812dc3A010C7d01b50e0d17dc79C8"))
//!     .facilitator(facilitator)
//!     .build()?;
//! let app: Router = Router::new().route("/evaluate", post(async || "well done")).layer(paywall);
//! # Ok(())
//! # }
//! ```
//!
//! `facilitator::RemoteFacilitator` (feature `remote`) settles through somebody else's facilitator instead, so that the server needs
//! neither node nor key.
//!
//! # Pay
//!
//! ```no_run
//! # #[cfg(all(feature = "reqwest", feature = "local-signer"))]
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! use tower_x402::client::{Budget, Payer, PaymentMiddleware, ReceiptExt, key};
//!
//! let budget = Budget::builder().per_payment("$0.01".parse()?).total("$1.00".parse()?).build();
//! let payer = Payer::builder(key::from_env("PRIVATE_KEY")?).budget(budget).build();
//! let client = PaymentMiddleware::new(payer).client(reqwest::Client::builder())?;
//!
//! let response = client.post("https://evaluator.example/evaluate").body("17 * 23 = 391").send().await?;
//! println!("{:?}", response.receipt());
//! # Ok(())
//! # }
//! ```
//!
//! # Try
//!
//! `Devnet`, of the crate `x402-devnet`, is a chain in the same process, with USDC at its address on Base. Everything above runs there
//! unchanged, without a node and without money.
//!
//! # Features
//!
//! | feature | adds | default |
//! |---|---|---|
//! | `server` | [`server`], the tower layer that charges; [`channels`], for payments by voucher; [`charge`], the core of both, for other transports | yes |
//! | `onchain` | `facilitator::OnchainFacilitator`, which verifies and settles over JSON-RPC; `chain::PaymentLookup`, which tells whether a payment was made | yes |
//! | `remote` | `facilitator::RemoteFacilitator`, which verifies and settles through another facilitator | |
//! | `client` | [`client`]: the payer, for any HTTP client | with `reqwest` |
//! | `reqwest` | `client::PaymentMiddleware`, reconciliation with servers | yes |
//! | `local-signer` | private keys in memory: `client::key`, `signers::PrivateKeySigner` | yes |
//! | `keystore` | private keys from encrypted Ethereum keystore files | |
//! | `sqlite` | `ledger::SqliteLedger`, a durable ledger in one file, for one process | |
//! | `postgres` | `ledger::PostgresLedger`, a durable ledger for several processes | |
//! | `conformance` | `ledger::conformance`: the tests that every ledger passes, for your own backend | |
//! | `metrics` | metrics for a recorder of the crate `metrics`; see [`ops`] | |
//! | `secp256k1` | signature recovery with libsecp256k1 (C) instead of k256 | |
//! | `full` | all but `secp256k1` | |
//!
//! # Stability
//!
//! Before 1.0, a minor version may change the API; [CHANGELOG.md](https://github.com/tower-x402/tower-x402/blob/main/CHANGELOG.md) names
//! what to write instead. Ledgers and journals of earlier versions are opened by later ones. The Rust version is 1.95 or later.
//!
//! These crates are part of the public API, so that a new major version of one of them is a breaking change here:
//!
//! | crate | version | types |
//! |---|---|---|
//! | `alloy-primitives` | 1 | addresses, hashes, numbers; re-exported as [`primitives`] |
//! | `alloy-signer`, `alloy-network`, `alloy-signer-local` | 2 | signers; re-exported as [`signers`] |
//! | `alloy-provider`, `alloy-rpc-client`, `alloy-rpc-types-eth` | 2 | nodes (feature `onchain`) |
//! | `http`, `http-body`, `bytes` | 1 | requests and responses |
//! | `tower-layer`, `tower-service` | 0.3 | layers and services |
//! | `reqwest`, `reqwest-middleware` | 0.13, 0.5 | the paying client (features `reqwest`, `remote`) |
//! | `serde`, `serde_json`, `url` | 1, 1, 2 | messages, URLs |
//!
//! # Where to go next
//!
//! - The [guides](https://docs.rs/tower-x402/latest/tower_x402/guide/) start with a task and code that runs: charge, pay, production,
//!   settlement through others, and what happens when something fails.
//! - [`server`], [`client`] and [`facilitator`] explain how each side works, [`ledger`] what is recorded, [`ops`] what to monitor.
//! - [Examples](https://github.com/tower-x402/tower-x402/tree/main/examples): a seller, a buyer, a facilitator, each as a program.
//! - [DESIGN.md](https://github.com/tower-x402/tower-x402/blob/main/DESIGN.md) gives the reasons,
//!   [SECURITY.md](https://github.com/tower-x402/tower-x402/blob/main/SECURITY.md) the threats and what holds against them.
//! - Crates that build on this one: `x402-facilitator` settles for others over HTTP, `x402-bazaar` describes routes for catalogues and reads
//!   them, `x402-devnet` is a chain for tests and first runs, and `x402-market` has evaluators that sell verdicts and students that hire them; `x402-judges` and `x402-directory` build on that.

// docs.rs shows the feature that each item needs.
#![cfg_attr(docsrs, feature(doc_cfg))]

#[cfg(feature = "facilitator")]
#[macro_use]
mod debug;

#[cfg(any(feature = "onchain", feature = "remote", feature = "reqwest"))]
mod body;
#[cfg(feature = "onchain")]
pub mod chain;
#[cfg(feature = "server")]
pub mod channels;
#[cfg(feature = "server")]
pub mod charge;
#[cfg(feature = "client")]
pub mod client;
mod clock;
mod decimal;
pub mod eip3009;
#[cfg(feature = "facilitator")]
pub mod facilitator;
#[cfg(all(feature = "onchain", feature = "remote", feature = "reqwest", feature = "server", feature = "sqlite"))]
pub mod guide;
#[cfg(feature = "facilitator")]
pub mod ledger;
mod network;
#[cfg(feature = "facilitator")]
pub mod ops;
#[cfg(feature = "facilitator")]
pub mod payment;
pub mod permit2;
pub mod protocol;
#[cfg(feature = "server")]
pub mod server;
#[cfg(feature = "facilitator")]
mod settlement;
#[cfg(feature = "facilitator")]
mod telemetry;
#[cfg(feature = "server")]
mod upload;
pub mod upto;
mod usdc;
#[cfg(feature = "facilitator")]
pub mod vouchers;

pub use alloy_primitives as primitives;
pub use clock::{Clock, ManualClock, Nonces, OsNonces, RandomnessError, SystemClock};
pub use network::{Asset, Network, ParseNetworkError};
pub use usdc::{ParseUsdcError, Usdc};

/// Signers of payments and transactions, re-exported from alloy.
///
/// Any alloy signer works: a key in memory, a KMS, a hardware wallet. [`client::Payer`] takes a `Signer`,
/// `facilitator::OnchainFacilitator` a `TxSigner`.
#[cfg(any(feature = "facilitator", feature = "local-signer"))]
pub mod signers {
    #[cfg(feature = "onchain")]
    pub use alloy_network::TxSigner;
    pub use alloy_signer::Signer;
    #[cfg(feature = "local-signer")]
    pub use alloy_signer_local::PrivateKeySigner;
}

#[cfg(all(test, feature = "full"))]
mod tests {
    #[test]
    fn public_types_are_send_and_sync() {
        fn check<T: Send + Sync>() {}
        check::<crate::client::AddPaymentLayer>();
        check::<crate::client::Budget>();
        check::<crate::client::Journal>();
        check::<crate::client::Payer>();
        check::<crate::client::PaymentError>();
        check::<crate::client::PaymentMiddleware>();
        check::<crate::client::Purchase>();
        check::<crate::client::SignedPayment>();
        check::<crate::facilitator::FacilitatorError>();
        check::<crate::facilitator::OnchainFacilitator>();
        check::<crate::facilitator::RemoteFacilitator>();
        check::<crate::charge::Settler>();
        check::<crate::ledger::MemoryLedger>();
        check::<crate::ledger::PostgresLedger>();
        check::<crate::ledger::SqliteLedger>();
        check::<crate::ops::Operator>();
        check::<crate::server::PaymentStatus>();
        check::<crate::server::RateLimit>();
        check::<crate::server::RequirePaymentLayer>();
    }
}
