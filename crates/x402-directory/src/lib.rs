//! Where students find evaluators, and what their payers report about them.
//!
//! A directory is an HTTP service that anybody can run. It lists the signed cards of evaluators, and collects reports: signed evidence
//! about evaluations that somebody paid for. Readers can check everything that it says. [`DirectoryClient`] lists, publishes and reads;
//! `examples/directory` is a directory to run.
//!
//! ```no_run
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! use x402_directory::{CardQuery, DirectoryClient, ReportQuery};
//!
//! let directory = DirectoryClient::new("https://directory.example")?;
//! directory.list(&"https://reasons.example".parse()?).await?;
//! let query = CardQuery::default().skill("reasoning");
//! for found in directory.cards(&query).await?.found {
//!     let query = ReportQuery::default().evaluator(found.card.pay_to());
//!     println!("{}: {} reports", found.url, directory.reports(&query).await?.reports.len());
//! }
//! # Ok(()) }
//! ```
//!
//! # Which reports are accepted
//!
//! A report is accepted only if it is
//!
//! - **signed by the payer**, all of it ([`SignedEvidence`]),
//! - **about a payment that reached the evaluator**: `PaymentChecker` finds the payment on the chain, in a block that is deep enough and
//!   of about the report's time,
//! - **the only one about its payment**: network, asset, payer and nonce identify it, and charges on a payment channel do not overlap,
//! - **about a skill that the evaluator has offered** on a card that the directory has seen, **for at least the lowest price** per output
//!   that the directory has seen for it, and not by the evaluator itself.
//!
//! So a report costs what an evaluation costs. That does not make it true. And an evaluator that reports about itself from another
//! account only pays the transaction's fee, because it receives the money. Each reader decides what a report is worth, by comparing it
//! with audits of its own: [`reputation`].
//!
//! Contract wallets cannot report, because what they accept as a signature (ERC-1271) can change later. Neither can payers who paid less
//! than the directory has seen asked. These include customers to whom the evaluator shows a cheaper card than to the directory. Few
//! reports about an evaluator are therefore no praise.
//!
//! # Payments by voucher
//!
//! Sellers on [payment channels](tower_x402::vouchers) charge off the chain, and claim many charges at once. So a report names the
//! [charge](x402_market::evidence::ChannelCharge): the channel's seven fields, and what was charged in it in all, the evaluation included. With
//! the amount paid it is a part of what is claimed of the channel, from `charged - paid` to `charged`, in atomic units of the token:
//!
//! ```json
//! "evidence": {
//!   "payment": { "payer": "0x3C44…", "nonce": "0x9d1e…" },
//!   "charge": {
//!     "channel": {
//!       "payer": "0x3C44…", "payerAuthorizer": "0x90F7…", "receiver": "0x9965…", "receiverAuthorizer": "0x7099…",
//!       "token": "0x036C…", "withdrawDelay": 900, "salt": "0x0000…"
//!     },
//!     "charged": "3000"
//!   },
//!   "evaluator": "0x9965…", "skill": "prose", "at": 1760000000, "paid": "1000", "outcome": { "kind": "garbage" }
//! }
//! ```
//!
//! The nonce is the EIP-712 digest of a voucher over `charged` in this channel. So the signature of the report covers the channel, too.
//! The directory accepts the report if
//!
//! - the channel's payer is the reporter, its receiver the evaluator, its token the report's `asset`,
//! - one event `Claimed` of the escrow contract took the whole part. Until then the answer is `not_yet`, as for a payment that is not deep
//!   enough; sellers claim within an hour, unless they set another time. What is claimed cannot be taken back: refunds and withdrawals
//!   only take what is not,
//! - no other report is about a part of this part. So reports about a channel are never about more than was claimed of it.
//!
//! Such reports are cheaper for an evaluator that reports about itself: it pays the gas of one deposit and one claim for any number of
//! them, where each transfer costs gas of its own. The money comes back to it in both cases. So a report is about $0.0001 at least, and
//! what one payer has most of is dropped first.
//!
//! # What is deleted
//!
//! All storage is bounded. A card that cannot be fetched is unlisted after a day and deleted after 30 days. Reports are deleted after 180
//! days. When there are too many, each further one replaces the oldest report of the payer that has most. A payment whose report may have
//! been deleted cannot be reported again.
//!
//! If a reorg removes a payment, its report is deleted once all nodes agree that the payment is gone for good: in a final block its
//! authorization is unused, or its charge unclaimed, or another transaction did it. The nodes must answer calls at a final block for that.
//!
//! # Run a directory
//!
//! ```no_run
//! # #[cfg(feature = "service")]
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! use std::net::SocketAddr;
//! use axum::{Router, body::Body, extract::{ConnectInfo, Request}};
//! use tower::ServiceExt as _;
//! use tower_x402::{Network, server::PeerAddress};
//! use x402_directory::{DirectoryService, DirectoryStore, PaymentChecker};
//!
//! let checker = PaymentChecker::new(Network::BASE).rpc_url("https://your-node.example")?;
//! let store = DirectoryStore::open("directory.sqlite").await?;
//! let directory = DirectoryService::builder(store).payment_checker(checker).build()?;
//! tokio::spawn(directory.clone().upkeep());
//! // Gives each caller an allowance of its own. Behind a proxy, use the address that the proxy reports.
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
//! People read it at `/`: who sells what, for how much, what payers report of their audits, and how that changed. The page is drawn by the
//! server, has no scripts, and loads nothing. It shows reports unweighted by trust, because it has no audits of its own to compare them with.
//!
//! Concurrent requests are limited, separately for cards, reports and readers. Limit connections in the server.

// docs.rs shows the feature that each item needs.
#![cfg_attr(docsrs, feature(doc_cfg))]

#[cfg(feature = "service")]
mod admission;
#[cfg(feature = "service")]
mod builder;
mod client;
#[cfg(feature = "service")]
mod interval;
#[cfg(feature = "service")]
mod page;
#[cfg(feature = "onchain")]
mod payment_check;
mod report;
pub mod reputation;
#[cfg(feature = "service")]
mod service;
#[cfg(feature = "service")]
mod store;

#[cfg(feature = "service")]
pub use builder::DirectoryBuilder;
pub use client::{
    CardQuery, DirectoryClient, DirectoryError, FoundCard, FoundCards, Publication, Published, ReportPage, ReportQuery,
};
#[cfg(feature = "onchain")]
pub use payment_check::{PaymentCheckError, PaymentChecker, ReportedPayment};
pub use report::{AcceptedReport, ReportError, SignedEvidence};
#[cfg(feature = "service")]
pub use service::DirectoryService;
#[cfg(feature = "service")]
pub use store::{DirectoryStore, StoreError};
