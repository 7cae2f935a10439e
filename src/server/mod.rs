//! The tower layer that charges per request.
//!
//! ```
//! # #[cfg(feature = "onchain")]
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
//! A request without a payment is answered `402 Payment Required`, with the offer in `PAYMENT-REQUIRED`. A payment is checked
//! locally, reserved in the ledger and verified with the chain. Then it depends on the flow that the payer accepted:
//!
//! - `authorization`: the handler works, the payment is settled if the response is a success, and the response leaves with
//!   `PAYMENT-RESPONSE`. A response that is not a success is not charged.
//! - `upfront`: the payment is settled, then the handler works. If the handler fails, presenting the same payment again runs it
//!   again and charges nothing.
//!
//! With [`deferred`](RequirePaymentLayerBuilder::deferred), a payment in `authorization` may be settled after the response has left,
//! if its payer has paid here before and owes little. Then `PAYMENT-RESPONSE` says success without a transaction.
//!
//! The price is fixed, or a function of the request's head ([`price_with`](RequirePaymentLayerBuilder::price_with)) or of its body
//! too ([`price_with_body`](RequirePaymentLayerBuilder::price_with_body)). A payment is bound to everything that its price depends on;
//! headers among that are [named](RequirePaymentLayerBuilder::priced_by).
//!
//! Copies of a payment wait for the first one and get its response. The same payment with another request is refused with
//! 409. The work runs in a task of its own: a client that disconnects does not cancel it, and finds the response by presenting the
//! payment again with the same request. Task-local values of layers above are therefore not visible to the handler; pass them in the
//! request's extensions.
//!
//! A response that says its length, up to the ledger's [`response_limit`](crate::ledger::ResponseLedger::response_limit), is read
//! whole within the handler's deadline and kept before the payment is settled: a crash at any moment loses neither money nor
//! response. If its body breaks off, the attempt has failed. Other responses stream once their first piece is there
//! and the payment is settled, and are copied as they do; a stream that fails before is a failed attempt, too. One that breaks off
//! later stays charged, since its payer may have nearly all of it. A streamed response can be lost so, in a crash, or while its settlement is
//! unknown; the payment is then answered 409 with the transaction, and what settled is listed as owed. Set `Content-Length` on what must not be
//! lost, or raise the limit.
//!
//! # Versions of the protocol
//!
//! The 402 serves both: `PAYMENT-REQUIRED` is x402 v2, the JSON body is x402 v1. A payment in `X-PAYMENT` is answered in
//! `X-PAYMENT-RESPONSE`; everything in between is the same, so a payment that is presented once in each version is one payment.
//! Clients of v1 know no flows: they are offered `authorization` where it is offered at all, and `upfront` otherwise.
//! Networks without a name in v1 are not offered to them. [`v1(false)`](RequirePaymentLayerBuilder::v1) turns v1 off.
//!
//! # The URL in the 402
//!
//! Clients of v1 check that it is absolute. [`public_origin`](RequirePaymentLayerBuilder::public_origin) and
//! [`resource_url`](RequirePaymentLayerBuilder::resource_url) set it. Without them it is built from the request's own `Host`, which is
//! read strictly and nothing else depends on; every 402 carries `Cache-Control: no-store`.
//!
//! # Browsers
//!
//! A person's browser is shown a [page](BrowserPage) in place of the JSON body. It says what is offered, what it costs and how a
//! program pays, and has a button that pays from a wallet in the browser. [`browser_page`](RequirePaymentLayerBuilder::browser_page)
//! names it or turns it off.
//!
//! # Payment identifiers
//!
//! An authorization and its signature are public once they are settled, so anybody who reads the chain can present the payment
//! again. Unless [`payment_identifier`](RequirePaymentLayerBuilder::payment_identifier) is off, a payer of x402 v2 may add an id to its payment
//! (the extension `payment-identifier`), which is not published; it proves as much as it is hard to guess. Its digest is bound to the
//! payment when that is reserved:
//!
//! - Presented again, the payment must carry the id. Without it, or with another one, it is refused with 409
//!   (`payment_identifier_conflict`), and the answer says nothing of the payment. A payment that was first presented without an id
//!   must be presented without one again. Since v1 has no place for an id, a payment that has one stays in v2.
//! - With the id, the payer is known, and a response is replayed as long as it is kept, even to a request that holds no secret.
//! - Another payment of the same payer, in the same token, with the same id and for the same request gets the response that was paid for
//!   before, with the receipt of the first payment. The new authorization is not used. For another request it is refused with 409. The id is
//!   free again when the payment is forgotten: at once if it was refused, else some time after `validBefore`.
//! - Of a payment channel the ids of the last four answers are remembered. A new voucher with one of them is treated in the same way.
//!
//! A malformed id is refused with 400. Where ids are not offered they are not bound either; only a payment that was bound before still
//! needs its own.
//!
//! # Extensions
//!
//! A seller may declare any [`Extension`](crate::protocol::Extension) of x402 in its 402, by
//! [`extension`](RequirePaymentLayerBuilder::extension). Its handler reads what the payer returned from [`Echoed`]. What the payer added is a
//! part of the request that its payment is bound to. The crate `x402-bazaar`, which describes routes for catalogues, is one that is made so.
//!
//! # Before and after a payment
//!
//! There are no hooks: a layer above this one sees what comes and what leaves, one below it sees what was verified, and what the work made of
//! it before that is charged. To let somebody in without a payment, quote nothing.
//!
//! ```
//! # #[cfg(all(feature = "onchain", feature = "reqwest", feature = "local-signer"))]
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use axum::{
//!     Router,
//!     extract::Request,
//!     http::{StatusCode, header::AUTHORIZATION},
//!     middleware::{Next, from_fn},
//!     response::{IntoResponse, Response},
//!     routing::post,
//! };
//! use tower_x402::{
//!     Usdc,
//!     client::{Payer, PaymentMiddleware},
//!     facilitator::OnchainFacilitator,
//!     primitives::{U256, address},
//!     protocol::{MAX_PAYMENT_HEADER, PaymentPayload, SettlementResponse, decode_header},
//!     server::{Quote, RequirePaymentLayer, VerifiedPayment},
//!     signers::PrivateKeySigner,
//! };
//! # static SEEN: std::sync::Mutex<Vec<&str>> = std::sync::Mutex::new(Vec::new());
//! # fn note(what: &'static str) { SEEN.lock().unwrap().push(what); }
//! # fn seen() -> Vec<&'static str> { std::mem::take(&mut *SEEN.lock().unwrap()) }
//!
//! /// Above: before anything was verified, and after the settlement or a failure.
//! async fn around(request: Request, next: Next) -> Response {
//!     let header = request.headers().get("payment-signature").map(|header| header.as_bytes());
//!     let payment = header.map(|header| decode_header::<PaymentPayload>(header, MAX_PAYMENT_HEADER));
//!     if let Some(Ok(payment)) = &payment {
//!         note("before verification");
//!         if payment.payload.text().contains("0x000000000000000000000000000000000000dEaD") {
//!             return StatusCode::FORBIDDEN.into_response();
//!         }
//!     }
//!     let response = next.run(request).await;
//!     let header = response.headers().get("payment-response").map(|header| header.as_bytes());
//!     match header.map(|header| decode_header::<SettlementResponse>(header, MAX_PAYMENT_HEADER)) {
//!         Some(Ok(receipt)) if receipt.success => note("after settlement"),
//!         // The code is in `error` of `PAYMENT-REQUIRED`, or in the receipt.
//!         _ if payment.is_some() => note("on failure"),
//!         _ => {}
//!     }
//!     response
//! }
//!
//! /// Below: after the payment was verified, and before it is settled.
//! async fn within(request: Request, next: Next) -> Response {
//!     let payment = request.extensions().get::<VerifiedPayment>();
//!     note(if payment.is_some() { "after verification" } else { "let in" });
//!     let response = next.run(request).await;
//!     // Were this not a success, nothing would be charged.
//!     note("before settlement");
//!     response
//! }
//! # let devnet = x402_devnet::Devnet::start().await?;
//! # let (gas_key, buyer) = (PrivateKeySigner::random(), PrivateKeySigner::random());
//! # devnet.fund(gas_key.address(), U256::from(10).pow(U256::from(18)));
//! # devnet.mint(buyer.address(), "$1".parse()?)?;
//! # let facilitator = OnchainFacilitator::builder().network(devnet.network()).client(devnet.rpc_client()).signer(gas_key).build().await?;
//!
//! let paywall = RequirePaymentLayer::builder()
//!     .price_with(|request| {
//!         // The price sees `Authorization`, since a payment is bound to it.
//!         let is_staff = request.headers.get(AUTHORIZATION).is_some_and(|key| key == "Bearer of-the-staff");
//!         async move { Ok(if is_staff { Quote::Free } else { Usdc::from_atomic(1_000).into() }) }
//!     })
//!     .pay_to(devnet.network(), address!("70997970C51812dc3A010C7d01b50e0d17dc79C8"))
//!     .facilitator(facilitator)
//!     .build()?;
//! let app = Router::new()
//!     .route("/evaluate", post(async || "well done"))
//!     .layer(from_fn(within))
//!     .layer(paywall)
//!     .layer(from_fn(around));
//! # let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
//! # let url = format!("http://{}/evaluate", listener.local_addr()?);
//! # tokio::spawn(async move { axum::serve(listener, app).await });
//!
//! let plain = reqwest::Client::new();
//! let paying = |key: PrivateKeySigner| {
//!     let payer = Payer::builder(key).asset(devnet.asset()).build();
//!     reqwest_middleware::ClientBuilder::new(plain.clone()).with(PaymentMiddleware::new(payer)).build()
//! };
//! assert_eq!(paying(buyer).post(&url).send().await?.status(), 200);
//! assert_eq!(seen(), ["before verification", "after verification", "before settlement", "after settlement"]);
//!
//! let poor = PrivateKeySigner::random();
//! assert_eq!(paying(poor).post(&url).send().await?.status(), 402);
//! assert_eq!(seen(), ["before verification", "on failure"]);
//!
//! assert_eq!(plain.post(&url).bearer_auth("of-the-staff").send().await?.status(), 200);
//! assert_eq!(seen(), ["let in", "before settlement"]);
//! # Ok(())
//! # }
//! # #[cfg(not(all(feature = "onchain", feature = "reqwest", feature = "local-signer")))]
//! # fn main() {}
//! ```
//!
//! # Statuses
//!
//! | status | when | what the client should do |
//! |---|---|---|
//! | 402 | no payment; not on offer; verification or settlement failed | pay the offer in `PAYMENT-REQUIRED` |
//! | 400 | the payment header, or an identifier in it, cannot be read; two payment headers; paid HEAD; upgrade, but to HTTP/2; the body broke off | correct the request |
//! | 409 | the payment was used for another request, or its response is gone | read the reason: it was used, or (`response_not_kept`) never charged; if it was paid, `PAYMENT-RESPONSE` says so |
//! | 409 | the payment or its identifier was presented with another one | present what was presented first |
//! | 409 | the stored response depends on headers that differ in this request (`response_varies`, named in `Vary`) | repeat the request with the first one's |
//! | 409 with `Retry-After` | another worker is still at it | repeat the request |
//! | 503 with `Retry-After` | outcome unknown (`PAYMENT-RESPONSE` says `settlement_pending`), or nothing could be done | repeat the request |
//! | 504 | the handler exceeded its deadline | repeat the request |
//! | 500 | the handler panicked, or its response broke off or is longer than what is kept; nothing is charged | repeat the request, if the seller can be expected to mend it |
//! | 412 | Permit2 may not take enough from the payer (`permit2_allowance_required`) | approve it, and repeat the request |
//! | 408, 413 | the body came too slowly (`body_too_slow`), or is longer than what is read (`body_too_large`) | send it faster, or less |
//!
//! A status goes with the kind of a refusal ([`RefusalKind`](crate::charge::RefusalKind)), but for 408, 412, 413 and 504. The code in the
//! body ([`Refusal::code`](crate::charge::Refusal::code)) is a reason of the protocol, or `payment_in_progress`, `payment_already_used`,
//! `payment_identifier_conflict`, `response_not_kept`, `response_varies`, `attempts_exhausted` (409), `busy`, `claim_pending`,
//! `facilitator_unavailable`, `ledger_unavailable` (503), `body_too_large`, `body_too_slow`, `body_broken`, `deadline_exceeded` and
//! `internal_error`.
//!
//! # Several services, one payee
//!
//! Services that share `payTo` share a ledger. Where they may see equal paths (nested routers shorten them, hosts are not
//! compared), give each its [`service_name`](RequirePaymentLayerBuilder::service_name) or
//! [`resource_url`](RequirePaymentLayerBuilder::resource_url). A payment that one of them still owes work for is then refused by the
//! others.
//!
//! # Payers that got no answer
//!
//! They present the same payment again and get what they paid for. A payer that cannot do that any more can look up what became of
//! the payment where [`PaymentStatus`] is served and [`status_url`](RequirePaymentLayerBuilder::status_url) says so.
//!
//! # WebSockets
//!
//! A request for a protocol upgrade (`Upgrade`, `CONNECT`) is answered 400, `upgrade_not_payable`, paid or not: one payment is for one
//! answer. An offer to go on in HTTP/2 (`h2c`), which a client can do without, is removed and the request answered as it is.
//!
//! # Order of layers
//!
//! Put a `CorsLayer` above this one, so that its answers carry CORS headers too, with [`cors_allow_headers`] and
//! [`cors_expose_headers`]; or use [`answer_preflights`](RequirePaymentLayerBuilder::answer_preflights). Put compression above it, too: what
//! is below it is kept as it was sent, and given again to a client that may take another encoding. Put limits on the work (`ConcurrencyLimit`,
//! `LoadShed`) below it, and a `Timeout` above it, if at all: the handler has a deadline here.

mod actual_price;
mod answer;
mod builder;
mod config;
mod fingerprint;
mod header_names;
mod kept_response;
mod layer;
mod offer;
mod page;
mod paid_request;
mod payment_header;
mod rate_limit;
mod request_body;
mod resource_url;
mod response;
mod status;
mod v1;
mod work;

pub use actual_price::ActualPrice;
pub use answer::{cors_allow_headers, cors_expose_headers};
pub use builder::{BuildError, RequirePaymentLayerBuilder};
pub use layer::{RequirePayment, RequirePaymentLayer, ResponseFuture, drain};
pub use offer::{PriceError, Quote};
pub use page::{BrowserPage, is_navigation};
pub use rate_limit::{Caller, PeerAddress, RateLimit, TooManyRequests};
pub use request_body::RequestBody;
pub use response::ResponseBody;
pub use status::PaymentStatus;

pub use crate::charge::{
    DeferredPolicy, Echoed, VerifiedPayment,
    queue::{AdmissionQueue, QueuePermit},
};
