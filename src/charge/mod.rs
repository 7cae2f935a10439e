//! Charging for work, whatever the transport: a payment and the request that it is presented for go in; work to be done, the answer that
//! the request got before, or a [`Refusal`] comes out. Of work that was done its payment is charged, or released.
//!
//! The layer in [`server`](crate::server) is this over HTTP, and serves payment channels, streams and x402 v1 besides. Use this module to
//! charge on another transport: a [`Seller`] charges for what it does itself, a [`Settler`] settles for others. The crate
//! `x402-facilitator` is the latter over HTTP. Nothing here reads or writes HTTP.
//!
//! # The life of a payment
//!
//! ```text
//!   request and payment
//!          │
//!   Seller::begin          the payment fits an offer, and is reserved in the ledger, verified by the facilitator, and covered by
//!          │               its payer's balance; in the flow `upfront` it is settled
//!          │
//!          ├──── Refusal             it is not taken, or what became of it is not known yet: code() and retry_after() say so
//!          ├──── Begun::Replay       the same request with the same payment was answered before: the same response, charged once
//!          ▼
//!     Begun::Work ─── release(), or dropped     nothing is charged; presented again, it is worked on again
//!          │
//!      the work
//!          │
//!    Work::charge          response and charge are in the ledger in one step, then the payment is settled
//!          │
//!          ├──── Refusal             it was not settled, or is too long to be kept, and nothing is charged; or, with retry_after(),
//!          │                         that is not known yet, and the payer gets the response when it presents the payment again
//!          ▼
//!       receipt            response and receipt are the payer's
//! ```
//!
//! What was begun goes on if its caller goes away, in a task of its own. A crash at any moment loses neither money nor a response that is
//! kept: whoever presents the payment next finds the record, and goes on from there.
//!
//! # Charge for a function call
//!
//! This sells a function to a caller in the same process. A transport writes the same messages in its own way: as lines, in a message
//! queue, or in the metadata of gRPC.
//!
//! ```
//! # #[cfg(all(feature = "onchain", feature = "reqwest", feature = "local-signer"))]
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use std::sync::Arc;
//!
//! use http::{HeaderMap, Method};
//! use tower_x402::{
//!     Usdc,
//!     charge::{Begun, Offer, Refusal, Request, Seller},
//!     client::Payer,
//!     facilitator::OnchainFacilitator,
//!     primitives::{U256, address},
//!     protocol::{
//!         ExactOffer, MAX_PAYMENT_HEADER, PaymentPayload, PaymentRequired, ResourceInfo, SettlementResponse, decode_header,
//!         encode_header,
//!     },
//!     signers::PrivateKeySigner,
//! };
//! # let devnet = x402_devnet::Devnet::start().await?;
//! # let (gas_key, buyer) = (PrivateKeySigner::random(), PrivateKeySigner::random());
//! # devnet.fund(gas_key.address(), U256::from(10).pow(U256::from(18)));
//! # devnet.mint(buyer.address(), "$1".parse()?)?;
//! # let facilitator = OnchainFacilitator::builder().network(devnet.network()).client(devnet.rpc_client()).signer(gas_key).build().await?;
//!
//! /// What is sold.
//! fn answer(question: &str) -> Option<String> {
//!     (question == "17 * 23").then(|| "391".to_owned())
//! }
//!
//! /// Answers a question that comes with a payment.
//! async fn sell(
//!     seller: &Arc<Seller>,
//!     offers: &[Offer],
//!     question: &str,
//!     payment: PaymentPayload,
//! ) -> Result<(String, Option<SettlementResponse>), Refusal> {
//!     match seller.begin(offers, payment, &Request::new(question.to_owned())).await? {
//!         Begun::Work(work) => match answer(question) {
//!             Some(answer) => {
//!                 let receipt = work.charge(answer.clone()).await?;
//!                 Ok((answer, Some(receipt)))
//!             }
//!             // Not charged.
//!             None => Ok(("I do not know".to_owned(), work.release().await)),
//!         },
//!         Begun::Replay { response, receipt } => Ok((String::from_utf8_lossy(&response).into_owned(), Some(receipt))),
//!     }
//! }
//!
//! let seller = Seller::builder("oracle", facilitator).build();
//! let payee = address!("70997970C51812dc3A010C7d01b50e0d17dc79C8");
//! let price: Usdc = "$0.01".parse()?;
//! let offer = ExactOffer::new(devnet.asset(), price.into(), payee, seller.max_timeout_seconds());
//! let offers = [seller.offer(offer)?];
//!
//! // Without a payment, a caller is told the offers.
//! let accepts = offers.iter().map(|offer| offer.requirements().clone()).collect();
//! let required = PaymentRequired::new(ResourceInfo::new("call:oracle"), accepts);
//!
//! // It pays. The client takes the message, and makes the payment, as header values.
//! let headers = HeaderMap::from_iter([("payment-required".parse()?, encode_header(&required)?.parse()?)]);
//! let payer = Payer::builder(buyer).asset(devnet.asset()).build();
//! let signed = payer.pay(&Method::POST, &"call:oracle".parse()?, &headers, None).await?.expect("it is payable");
//! let payment = || decode_header::<PaymentPayload>(signed.header().as_bytes(), MAX_PAYMENT_HEADER);
//!
//! let (answer, receipt) = sell(&seller, &offers, "17 * 23", payment()?).await?;
//! assert_eq!(answer, "391");
//! assert!(receipt.is_some_and(|receipt| receipt.success));
//!
//! // The same payment buys the same answer, and no other.
//! assert_eq!(sell(&seller, &offers, "17 * 23", payment()?).await?.0, "391");
//! let refusal = sell(&seller, &offers, "17 * 24", payment()?).await.unwrap_err();
//! assert_eq!(refusal.code(), "payment_already_used");
//! assert_eq!(devnet.balance_of(payee)?, price);
//! # Ok(())
//! # }
//! # #[cfg(not(all(feature = "onchain", feature = "reqwest", feature = "local-signer")))]
//! # fn main() {}
//! ```

// What each file answers:
//
// | file | question |
// |---|---|
// | `seller` | what does a seller offer, and what do its requests share? |
// | `work` | how does a request with a payment begin on another transport, and what is charged for it? |
// | `common` | what is the same of a payment, whatever its scheme and transport? |
// | `exact/` | what does a payment by one signed transfer buy, and when is it settled? |
// | `batch/` | what does a voucher of a payment channel buy, and what is charged for it? |
// | `refusal` | what happened, and what can the payer do? |
// | `rules` | which limits does a seller set, and whom does it give credit? |
// | `lease`, `in_progress` | who may work on a payment, in the ledger and in this process? |
// | `queue` | how many callers work at once, and how many wait for that? |
// | `rooms` | who makes room where requests wait for somebody who may never come? |
// | `recording` | where is a response kept that streams? |
// | `extensions` | is what a payer echoes what was offered, and how does it name its payment? |

pub(crate) mod batch;
mod common;
pub(crate) mod exact;
pub(crate) mod extensions;
pub(crate) mod in_progress;
pub(crate) mod lease;
pub(crate) mod queue;
pub(crate) mod recording;
pub(crate) mod refusal;
pub(crate) mod rooms;
mod rules;
mod seller;
mod work;

use std::future::{Future, ready};

use alloy_primitives::{Address, B256, U256};
use tracing::Instrument as _;

pub(crate) use common::{Common, Identity};
pub use exact::{SettleAnswer, Settler, Sponsor};
pub use extensions::Echoed;
use recording::Recording;
pub use refusal::{Refusal, RefusalKind};
pub(crate) use refusal::{Unfinished, Unread, Why};
pub use rules::DeferredPolicy;
pub(crate) use rules::{Limits, Rules};
pub use seller::{NotOffered, Offer, Seller, SellerBuilder};
pub use work::{Begun, Request, Work};

use crate::{
    ledger::{BodyDigest, StoredResponse},
    network::Network,
    protocol::{PaymentFlow, SettlementResponse},
    telemetry::{self, RequestOutcome},
    upload::Arrived,
    vouchers::ChannelId,
};

/// The request that a payment is presented for, as far as charging has to know it. A transport that reads bodies has them read only when
/// charging asks for it: for a payer that has shown no money it never does (invariant I12). The other methods are those of a request that is
/// known whole, by its fingerprint.
pub(crate) trait Presented: Send {
    /// Returns how much of the request waits with it, in bytes.
    fn held(&self) -> u64;
    /// Returns the digest of a body that was read whole.
    fn digest(&self) -> Option<BodyDigest>;
    /// Returns how much of the body arrives from now on.
    fn arrived(&mut self) -> Arrived {
        Arrived::default()
    }
    /// Returns `true` if its client may have to be waited for.
    fn is_arriving(&self) -> bool {
        false
    }
    /// Reads as much of the body as is kept.
    fn read(&mut self) -> impl Future<Output = Result<(), Unread>> + Send {
        ready(Ok(()))
    }
    /// Reads all of it, or refuses it as too long.
    fn read_whole(&mut self) -> impl Future<Output = Result<(), Unread>> + Send {
        ready(Ok(()))
    }
    /// Returns `true` if this is the body of which so much was read before.
    fn is_same(&mut self, read: &BodyDigest) -> impl Future<Output = Result<bool, Unread>> + Send {
        ready(Ok(self.digest().is_some_and(|digest| digest == *read)))
    }
    /// Returns `true` if it can be worked on: not if it was read in part and was too much to be kept.
    fn is_workable(&self) -> bool {
        true
    }
    /// Returns the names of the headers that the request must have as the one had that was answered, or `None` if the response is right for
    /// it, too.
    fn misfit(&self, kept: &StoredResponse) -> Option<String> {
        let _ = kept;
        None
    }
}

/// How a request goes on.
pub(crate) enum Beginning<H> {
    /// It is to be worked on.
    Work(H),
    /// It was answered before, with this response and receipt.
    Replay(StoredResponse, SettlementResponse),
    /// It asked for what is left in this channel, and got it.
    Refunded(ChannelId, SettlementResponse),
}

/// A payment that is held for work. Dropped before it is charged, as when the work panics, it is released.
pub(crate) trait Held: Send + 'static {
    /// Counts how a request of this scheme ended.
    const COUNT: fn(RequestOutcome);

    /// Does what the scheme wants done before the work.
    fn start(&mut self) -> impl Future<Output = Result<(), Refusal>> + Send;
    /// Returns what the work is told.
    fn payment(&self) -> VerifiedPayment;
    /// Returns the most that the work may cost, in atomic units, or `None` if it costs what was signed for.
    fn most(&self) -> Option<u128>;
    /// Returns the size of the largest response that is kept, in bytes.
    fn response_limit(&self) -> usize;
    /// Returns where a response that streams is kept.
    fn recording(&mut self) -> Recording;
    /// Charges for work that is done. `response` is kept in the same step; of a response that streams there is none yet. `read` is how much
    /// the work has read of its request.
    fn charge(
        &mut self,
        amount: Option<u128>,
        response: Option<StoredResponse>,
        read: BodyDigest,
    ) -> impl Future<Output = Result<(), Uncharged>> + Send;
    /// Has what was charged settled, where the scheme wants that before the response leaves. Fails if it is not settled; then the response
    /// is kept, in case it is settled yet.
    fn settle(&mut self, is_whole: bool) -> impl Future<Output = Result<(), Refusal>> + Send;
    /// Releases the payment of work that came to nothing. Returns what the payer is told if money moved all the same.
    fn release(&mut self, read: BodyDigest) -> impl Future<Output = Option<SettlementResponse>> + Send;
    /// Returns how work that came to nothing is refused, after the payment was released.
    fn unfinished(&self, why: Unfinished) -> Refusal;
    /// Returns who charges.
    fn seller(&self) -> &Seller;
    /// Returns what the payer of work that was charged for is told, and how its request ended.
    fn receipt(&self) -> (Option<SettlementResponse>, RequestOutcome);
    /// Counts a request whose work was charged for, and how much that was; `None` is all that was signed for. Returns what its payer is told.
    fn count(&self, amount: Option<u128>) -> Option<SettlementResponse> {
        let ((receipt, ended), payment) = (self.receipt(), self.payment());
        (Self::COUNT)(ended);
        let units = amount.map_or(payment.amount, U256::from);
        telemetry::charged(payment.network, payment.asset, &self.seller().name, units);
        receipt
    }
    /// Lets copies of the payment be answered. The future records that the response was delivered whole.
    fn deliver(self) -> impl Future<Output = ()> + Send + 'static;
    /// Returns what says how the payer stands if the work has panicked.
    fn if_panicked(&self) -> impl Future<Output = Refusal> + Send + 'static;
}

/// Work that is done was not charged for, as far as its payer is told.
pub(crate) struct Uncharged {
    pub(crate) refusal: Refusal,
    /// Whether the books may have taken the charge all the same. Then a response that streams is kept, for when the payment is presented again.
    pub(crate) is_open: bool,
}

/// Runs work in a task of its own, so that neither a client that goes away nor a timeout above cancels it (invariant I5). Returns `None`
/// if it panicked.
pub(crate) async fn detached<T: Send + 'static>(work: impl Future<Output = T> + Send + 'static) -> Option<T> {
    tokio::spawn(work.in_current_span()).await.ok()
}

/// The verified payment for a request. The layer puts it into the request's extensions.
///
/// ```
/// use tower_x402::server::VerifiedPayment;
///
/// fn payer_of<B>(request: &http::Request<B>) -> Option<alloy_primitives::Address> {
///     request.extensions().get::<VerifiedPayment>().map(|payment| payment.payer)
/// }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct VerifiedPayment {
    /// The payer's address.
    pub payer: Address,
    /// The payee's address.
    pub pay_to: Address,
    /// The amount, in atomic units of the asset: by voucher, and of a maximum, the most that may be charged.
    pub amount: U256,
    /// The token's address.
    pub asset: Address,
    /// The chain.
    pub network: Network,
    /// The authorization's nonce: with network, asset and payer it identifies the payment. Of a payment with a voucher it is the digest of
    /// voucher and request.
    pub nonce: B256,
    /// The flow: whether the payment is settled before or after the work.
    pub flow: PaymentFlow,
    /// The transaction that paid, if the payment was settled before the work, or that filled the payment channel for this request.
    pub transaction: Option<B256>,
    /// The number of this attempt at the work, from 1.
    pub attempt: u32,
}
