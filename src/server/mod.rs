//! The tower layer that charges per request.
//!
//! ```
//! # #[cfg(feature = "devnet")]
//! # async fn example(facilitator: tower_x402::facilitator::OnchainFacilitator) -> Result<(), Box<dyn std::error::Error>> {
//! use alloy_primitives::address;
//! use axum::{Router, routing::post};
//! use tower_x402::{Network, server::RequirePaymentLayer};
//!
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
//! # What happens to a request
//!
//! Without a payment it is answered `402 Payment Required` with the offer in `PAYMENT-REQUIRED`. With one, the payment is
//! checked locally, reserved in the ledger, verified with the chain, and then, by the flow it was accepted under:
//!
//! - `authorization`: the handler works, its success is settled, the response leaves with `PAYMENT-RESPONSE`. What is not
//!   a success is not charged.
//! - `upfront`: the payment is settled, then the handler works. If it fails, presenting the same payment again runs it
//!   again and charges nothing.
//!
//! With [`deferred`](RequirePaymentLayerBuilder::deferred), what is accepted as `authorization` may be answered before it is
//! settled: if its payer has paid here before and owes little. Then `PAYMENT-RESPONSE` says success without a transaction, and
//! the facilitator settles on its own.
//!
//! The price is fixed, or a function of the request's head ([`price_with`](RequirePaymentLayerBuilder::price_with)), or of its body
//! too ([`price_with_body`](RequirePaymentLayerBuilder::price_with_body)), which is then read before anything is demanded. What a price
//! goes by, a payment is bound to: headers that it depends on are [named](RequirePaymentLayerBuilder::priced_by).
//!
//! Copies of a payment wait for the first one and get its answer. The same payment with another request is refused with
//! 409. Once the work has started it is not cancelled by a client that disconnects: presenting the payment again with
//! the same request finds the answer.
//!
//! A response that says its length, up to the ledger's [`response_limit`](crate::ledger::Ledger::response_limit), is read
//! whole within the handler's deadline and kept before it is settled: a crash at any moment loses neither money nor answer. If
//! its body breaks off, the attempt has failed. Other responses stream once they are settled, and are copied as they do; what
//! a crash takes of such a one is answered 409 with the transaction. So is one whose settlement was not known in time: its client
//! was told to come again, and there is nothing left to stream. Say the length of what must not be lost, or raise the limit.
//!
//! # Versions of the protocol
//!
//! The 402 serves both: `PAYMENT-REQUIRED` is x402 v2, the JSON body is x402 v1. A payment in `X-PAYMENT` is answered in
//! `X-PAYMENT-RESPONSE`; everything in between is the same, so that a payment presented once in each version is one
//! purchase. Clients of v1 know no flows: they are offered `authorization` where it is offered at all, and `upfront` otherwise.
//! Networks without a name in v1 are not offered to them. [`v1(false)`](RequirePaymentLayerBuilder::v1) turns it off.
//!
//! # The URL in the 402
//!
//! Clients of v1 check that it is absolute. [`public_origin`](RequirePaymentLayerBuilder::public_origin) and
//! [`resource_url`](RequirePaymentLayerBuilder::resource_url) set it. Without them it is built from the request's own `Host`, which is
//! read strictly and nothing else depends on; every 402 carries `Cache-Control: no-store`.
//!
//! # People
//!
//! A browser that opens what is sold is shown a [page](BrowserPage) in place of the JSON body: what it is, what it costs, how a
//! program pays, and a button that pays from a wallet in the browser. [`browser_page`](RequirePaymentLayerBuilder::browser_page)
//! names it or turns it off.
//!
//! # Payment identifiers
//!
//! An authorization and its signature are published on the chain when it is settled, so that whoever reads the chain can
//! present it again. With [`payment_identifier`](RequirePaymentLayerBuilder::payment_identifier) a payer of x402 v2 may add
//! an id to its payment (the extension `payment-identifier`), which is not published; it proves as much as it is hard to
//! guess. Its digest is bound to the payment when that is reserved:
//!
//! - Presented again, the payment must carry it; without it, or with another one, it is refused with 409
//!   (`payment_identifier_conflict`), and nothing is told of it. A payment that was first presented without an id must be
//!   presented so again. Since v1 has no place for an id, a payment that has one stays in v2.
//! - With it, its payer is known, and a response is replayed as long as it is kept, even to a request that holds no secret.
//! - Another payment of the same payer, in the same token, with the same id is refused with 409. This holds for a newly signed
//!   authorization for the same request too: to see what became of the first one, present the first one. The id is
//!   free again when the payment is forgotten: at once if it was refused, else some time after `validBefore`.
//!
//! What is not an id is refused with 400. Where ids are not asked for they are not bound either; only a payment that was bound
//! before still needs its own.
//!
//! # Statuses
//!
//! | status | when | what the client should do |
//! |---|---|---|
//! | 402 | no payment; not on offer; verification or settlement failed | pay the offer in `PAYMENT-REQUIRED` |
//! | 400 | the payment header, or an identifier in it, cannot be read; two payment headers; paid HEAD; upgrade, but to HTTP/2 | correct the request |
//! | 409 | the payment was used for another request, or its response is gone | read the reason: it was used, or (`response_not_kept`) never charged; if it was paid, `PAYMENT-RESPONSE` says so |
//! | 409 | the payment or its identifier was presented with another one | present what was presented first |
//! | 409 with `Retry-After` | another worker is still at it | repeat the request |
//! | 503 with `Retry-After` | outcome unknown (`PAYMENT-RESPONSE` says `settlement_pending`), or nothing could be done | repeat the request |
//! | 504 | the handler exceeded its deadline | repeat the request |
//!
//! # Several services, one payee
//!
//! Services that share `payTo` share a ledger. Where they may see equal paths (nested routers cut them short, hosts are not
//! looked at), give each its [`service_name`](RequirePaymentLayerBuilder::service_name) or
//! [`resource_url`](RequirePaymentLayerBuilder::resource_url): what one of them was paid for and still owes is then not
//! asked of another.
//!
//! # Payers that got no answer
//!
//! They present the same payment again and get what they paid for. Who cannot do that any more can look up what became of
//! the payment where [`PaymentStatus`] is served and [`status_url`](RequirePaymentLayerBuilder::status_url) says so.
//!
//! # Order of layers
//!
//! Put a `CorsLayer` above this one, so that its answers carry CORS headers too; or use
//! [`answer_preflights`](RequirePaymentLayerBuilder::answer_preflights). Put limits on the work (`ConcurrencyLimit`,
//! `LoadShed`) below it, and a `Timeout` above it, if at all: the handler has a deadline here.

mod answer;
mod begin;
mod blank;
mod body;
mod builder;
mod claim;
mod config;
mod crashed;
mod deferred;
mod fingerprint;
mod future;
mod job;
mod layer;
mod lease;
mod line;
mod offer;
mod offer_v1;
mod page;
mod payment;
mod presented;
mod price;
mod produced;
mod purchase;
mod receipt;
mod record;
mod refusal;
mod request_body;
mod response_body;
mod sale;
mod service;
mod settle;
mod status;
mod target;
mod unread;
mod wait;

pub use builder::{BuildError, RequirePaymentLayerBuilder};
pub use deferred::DeferredPolicy;
pub use future::ResponseFuture;
pub use layer::RequirePaymentLayer;
pub use line::{Place, WaitingLine};
pub use page::{BrowserPage, is_navigation};
pub use payment::Payment;
pub use price::{PriceError, Quote};
pub use request_body::RequestBody;
pub use response_body::ResponseBody;
pub use service::RequirePayment;
pub use status::{PaymentStatus, PaymentStatusFuture};
