//! Where students find evaluators, and what others saw of them.
//!
//! A directory is an HTTP service that anybody can run. It lists the signed cards of evaluators, and pools evidence: what payers say of
//! evaluations that they paid for. It vouches for nothing that its readers cannot check themselves.
//!
//! # What a voice is worth
//!
//! Anybody can say anything, so a voice is admitted only if it is
//!
//! - **signed by the payer**, every word of it ([`SignedEvidence`]),
//! - **about a payment that reached the evaluator**: [`Witness`] finds it on the chain, by the same logs by which sellers
//!   recognize their money, deep enough not to be undone, and about when the record says,
//! - **the only one of its payment**: it is known by (network, asset, payer, nonce). What was said once cannot be said otherwise,
//! - **about a skill that the evaluator offers or offered**, by a card that the directory has seen itself.
//!
//! That makes voices cost what evaluations cost. It does not make them true: an evaluator can pay itself. What it is worth to a
//! reader is decided by the reader, by comparing with its own audits: [`reputation`](super::reputation).
//!
//! # What is forgotten
//!
//! Everything has a bound. Cards that do not answer for a day are not listed any more, and forgotten after a month; voices are forgotten
//! after half a year, or when there are too many, those about the oldest payments first. A payment whose voice may have been forgotten
//! has none any more, so none speaks twice. A voice whose payment is undone by a reorganization, however deep, is removed.
//!
//! # One of one's own
//!
//! ```no_run
//! # #[cfg(feature = "directory")]
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! use axum::Router;
//! use tower_x402::{Network, market::directory::{DirectoryService, DirectoryStore, Witness}};
//!
//! let witness = Witness::new(Network::BASE).rpc_url("https://your-node.example")?;
//! let directory = DirectoryService::builder(DirectoryStore::open("directory.sqlite").await?).witness(witness).build()?;
//! tokio::spawn(directory.clone().upkeep());
//! let listener = tokio::net::TcpListener::bind("0.0.0.0:4023").await?;
//! axum::serve(listener, Router::new().fallback_service(directory)).await?;
//! # Ok(()) }
//! ```
//!
//! [`DirectoryClient`] reads and writes; `examples/directory` is one to run.

#[cfg(feature = "directory")]
mod admission;
#[cfg(feature = "directory")]
mod answer;
#[cfg(feature = "directory")]
mod builder;
mod client;
#[cfg(feature = "directory")]
mod query;
#[cfg(feature = "directory")]
mod service;
mod signed;
#[cfg(feature = "directory")]
mod store;
#[cfg(feature = "directory")]
mod upkeep;
mod wire;
#[cfg(feature = "onchain")]
mod witness;

#[cfg(feature = "directory")]
pub use builder::DirectoryBuilder;
pub use client::{
    CardQuery, DirectoryClient, DirectoryError, FoundCard, FoundCards, Publication, Published, VoiceQuery, Voices,
};
#[cfg(feature = "directory")]
pub use service::{DirectoryFuture, DirectoryService};
pub use signed::{PaymentOf, SignedEvidence, VoiceError};
#[cfg(feature = "directory")]
pub use store::{DirectoryStore, StoreError};
pub use wire::Admitted;
#[cfg(feature = "onchain")]
pub use witness::{Payment, Witness, WitnessError};
