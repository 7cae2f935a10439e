//! Charge another program for one HTTP request, in USDC over [x402](https://www.x402.org), and pay for one within a budget.
//!
//! A server answers `402 Payment Required` with an offer. The client signs an authorization to move exactly that amount
//! (EIP-3009) and repeats the request with it. The server works, moves the money on Base and answers, with a receipt.
//!
//! # Charge
//!
//! [`server::RequirePaymentLayer`] makes any `tower::Service<http::Request<B>>` charge:
//!
//! ```no_run
//! # #[cfg(all(feature = "devnet", feature = "server"))]
//! # async fn example(settlement_key: alloy_signer_local::PrivateKeySigner) -> Result<(), Box<dyn std::error::Error>> {
//! use alloy_primitives::address;
//! use axum::{Router, routing::post};
//! use tower_x402::{Network, facilitator::OnchainFacilitator, server::RequirePaymentLayer};
//!
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
//! # Pay
//!
//! [`client::PaymentMiddleware`] makes `reqwest` pay, within a [`client::Budget`]:
//!
//! ```no_run
//! # #[cfg(all(feature = "reqwest", feature = "local-signer"))]
//! # async fn example(my_key: alloy_signer_local::PrivateKeySigner) -> Result<(), Box<dyn std::error::Error>> {
//! use tower_x402::client::{Budget, Payer, PaymentMiddleware, ReceiptExt};
//!
//! let budget = Budget::builder().per_payment("$0.01".parse()?).total("$1.00".parse()?).build();
//! let payer = Payer::builder(my_key).budget(budget).build();
//! let client = PaymentMiddleware::new(payer).client(reqwest::Client::builder())?;
//! let response = client.post("https://evaluator.example/evaluate").body("17 * 23 = 391").send().await?;
//! println!("{:?}", response.receipt());
//! # Ok(())
//! # }
//! ```
//!
//! # Try
//!
//! `devnet::Devnet` is a chain in the same process, with USDC on it; everything above runs there unchanged.
//!
//! # Features
//!
//! | feature | what it adds | default |
//! |---|---|---|
//! | `server` | [`server`]: the tower layer that charges; [`facilitator::service`]: a facilitator for others | yes |
//! | `onchain` | `facilitator::OnchainFacilitator`: verification and settlement over JSON-RPC; `chain::PaymentLookup`: whether a payment was made | yes |
//! | `remote` | `facilitator::RemoteFacilitator`: verification and settlement through a facilitator over HTTP | |
//! | `client` | [`client`]: paying, whatever the HTTP client | yes |
//! | `reqwest` | the paying reqwest middleware | yes |
//! | `local-signer` | keys in memory | yes |
//! | `keystore` | keys from encrypted eth keystore files | |
//! | `sqlite` | `ledger::SqliteLedger`: a durable ledger in one file | |
//! | `postgres` | `ledger::PostgresLedger`: a durable ledger that several processes share | |
//! | `devnet` | `devnet`: a chain in the same process | |
//! | `vouchers` | `vouchers`: messages and digests of payment channels; nothing charges or pays with them yet | |
//! | `metrics` | numbers for a recorder of the facade `metrics`; see [`ops`] | |
//! | `secp256k1` | signature recovery with libsecp256k1 instead of k256 | |
//! | `full` | all but `secp256k1` | |
//!
//! # On top of it
//!
//! The package `x402-market` has evaluators that sell verdicts over x402, students that hire them, and a directory of evaluators.

// docs.rs shows the feature that each item needs.
#![cfg_attr(docsrs, feature(doc_cfg))]

#[cfg(feature = "reqwest")]
mod body;
#[cfg(feature = "onchain")]
pub mod chain;
#[cfg(feature = "client")]
pub mod client;
mod clock;
mod decimal;
#[cfg(feature = "devnet")]
pub mod devnet;
pub mod eip3009;
#[cfg(feature = "facilitator")]
pub mod facilitator;
#[cfg(all(feature = "devnet", feature = "remote", feature = "reqwest", feature = "server", feature = "sqlite"))]
pub mod guide;
#[cfg(feature = "facilitator")]
pub mod ledger;
mod network;
#[cfg(feature = "facilitator")]
pub mod ops;
#[cfg(feature = "facilitator")]
pub mod payment;
pub mod protocol;
#[cfg(feature = "server")]
pub mod server;
#[cfg(feature = "facilitator")]
mod settlement;
#[cfg(feature = "sqlite")]
mod sqlite;
#[cfg(feature = "facilitator")]
mod telemetry;
mod usdc;
#[cfg(feature = "vouchers")]
pub mod vouchers;

pub use clock::{Clock, ManualClock, Nonces, OsNonces, RandomnessError, SystemClock};
pub use network::{Asset, Network, ParseNetworkError};
pub use usdc::{ParseUsdcError, Usdc};
