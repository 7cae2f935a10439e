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
//! - **about a skill that the evaluator offers or offered**, by a card that the directory has seen itself, **and no cheaper than that**: the
//!   lowest price per output it was ever seen to ask for the skill was paid, and by somebody else than itself.
//!
//! So to speak of somebody costs what an evaluation by it costs. That does not make it true, nor does it cost everybody the same: the
//! money reaches the evaluator, so a voice about a friend, or about oneself from another account, costs the fee of a
//! transaction. What a voice is worth is decided by each reader, by comparing with its own audits: [`reputation`](super::reputation).
//!
//! What is not heard: contract wallets, because what they accept as a signature (ERC-1271) can change later; who paid less than the
//! directory saw asked, which includes the customers of an evaluator that shows them a cheaper card than the directory. Silence
//! about an evaluator is not praise.
//!
//! # What is forgotten
//!
//! Everything that is kept has a bound. Cards that do not answer for a day are not listed any more, and forgotten after a month; voices are
//! forgotten after half a year, or when there are too many, those about the oldest payments first. A payment whose voice may have been
//! forgotten has none any more, so none speaks twice. A voice whose payment is undone by a reorganization, however deep, is removed
//! once all nodes agree that it is gone for good: that its authorization is unused in a final block, at which they must answer calls, or
//! was used by another transaction.
//!
//! # One of one's own
//!
//! ```no_run
//! # #[cfg(feature = "directory")]
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! use std::net::SocketAddr;
//! use axum::{Router, body::Body, extract::{ConnectInfo, Request}};
//! use tower::ServiceExt as _;
//! use tower_x402::{Network, facilitator::service::PeerAddress};
//! use x402_market::directory::{DirectoryService, DirectoryStore, Witness};
//!
//! let witness = Witness::new(Network::BASE).rpc_url("https://your-node.example")?;
//! let directory = DirectoryService::builder(DirectoryStore::open("directory.sqlite").await?).witness(witness).build()?;
//! tokio::spawn(directory.clone().upkeep());
//! // Who calls, so that each caller has an allowance of its own. Behind a proxy, what the proxy says of it.
//! let directory = directory.map_request(|mut request: Request<Body>| {
//!     if let Some(ConnectInfo(peer)) = request.extensions().get::<ConnectInfo<SocketAddr>>().copied() {
//!         request.extensions_mut().insert(PeerAddress(peer.ip()));
//!     }
//!     request
//! });
//! let app = Router::new().fallback_service(directory).into_make_service_with_connect_info::<SocketAddr>();
//! axum::serve(tokio::net::TcpListener::bind("0.0.0.0:4023").await?, app).await?;
//! # Ok(()) }
//! ```
//!
//! What is worked on at once is bounded, too, apart for cards, voices and readers; how many connections there may be is for the
//! server to say.
//!
//! [`DirectoryClient`] reads and writes; `examples/directory` is one to run.

#[cfg(feature = "directory")]
mod admission;
#[cfg(feature = "directory")]
mod builder;
mod client;
mod report;
#[cfg(feature = "directory")]
mod service;
#[cfg(feature = "directory")]
mod store;
#[cfg(feature = "onchain")]
mod witness;

#[cfg(feature = "directory")]
pub use builder::DirectoryBuilder;
pub use client::{
    CardQuery, DirectoryClient, DirectoryError, FoundCard, FoundCards, Publication, Published, VoiceQuery, Voices,
};
pub use report::{Admitted, PaymentOf, SignedEvidence, VoiceError};
#[cfg(feature = "directory")]
pub use service::{DirectoryFuture, DirectoryService};
#[cfg(feature = "directory")]
pub use store::{DirectoryStore, StoreError};
#[cfg(feature = "onchain")]
pub use witness::{Payment, Witness, WitnessError};
