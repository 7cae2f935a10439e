//! Charging for work, whatever the transport: a payment and the request that it is presented for go in; work to be done, the answer that
//! the request got before, or a [`Refusal`] comes out. Of work that was done its payment is charged, or released.
//!
//! Nothing here reads or writes HTTP: a transport turns its requests into [`Presented`] and refusals into its answers. A stored response is
//! passed on as it is.
//!
//! | file | question it answers |
//! |---|---|
//! | `exact/` | what does a payment by one signed transfer buy, and when is it settled? |
//! | `batch/` | what does a voucher of a payment channel buy, and what is charged for it? |
//! | `refusal` | what happened, and what can the payer do? |
//! | `rules` | which limits does a seller set, and whom does it give credit? |
//! | `lease`, `in_progress` | who may work on a payment, in the ledger and in this process? |
//! | `queue` | how many callers work at once, and how many wait for that? |
//! | `rooms` | who makes room where requests wait for somebody who may never come? |
//! | `recording` | where is a response kept that streams? |
//! | `extensions` | is what a payer echoes what was offered, and how does it name its payment? |

pub(crate) mod batch;
pub(crate) mod exact;
pub(crate) mod extensions;
pub(crate) mod in_progress;
pub(crate) mod lease;
pub(crate) mod queue;
pub(crate) mod recording;
pub(crate) mod refusal;
pub(crate) mod rooms;
mod rules;

use std::{future::Future, sync::Arc, time::Duration};

use alloy_primitives::{Address, B256, U256};
use tokio::sync::Semaphore;
use tracing::Instrument as _;

use in_progress::PaymentsInProgress;
use queue::AdmissionQueue;
use recording::Recording;
pub(crate) use refusal::{Refusal, Unfinished, Unread, Why};
use rooms::{KnownRoom, PayerRoom};
pub use rules::DeferredPolicy;
pub(crate) use rules::{Limits, Rules};

use crate::{
    ledger::{BodyDigest, StoredResponse},
    network::Network,
    protocol::{PaymentFlow, SettlementResponse},
    telemetry::RequestOutcome,
    vouchers::ChannelId,
};

/// About how many payments the chain is asked at once whether they are genuine.
const UNPROVEN: usize = 64;
/// How long others wait for that; about as long as the chain may take.
const UNPROVEN_WAIT: Duration = Duration::from_secs(4);

/// What all requests to one seller share: its rules, the payments that it works on, and the places for them.
#[derive(Debug)]
pub(crate) struct Seller {
    pub(crate) rules: Rules,
    pub(crate) in_progress: PaymentsInProgress,
    /// Permits to work, for payers that are known to have the money.
    pub(crate) permits: Arc<Semaphore>,
    /// Permits for authorizations whose payer was not verified yet.
    pub(crate) unverified: AdmissionQueue,
    /// Permits for copies of a payment, which wait for what becomes of the first. They hold no other permit meanwhile (invariant I12).
    pub(crate) copies: Semaphore,
    /// Permits for requests that wait for another one of their channel, which nobody but its payer can send.
    pub(crate) in_line: Semaphore,
    /// Permits for payments that anybody can make up: their signature is not proven, or nothing is known to be in their channel.
    pub(crate) unproven: AdmissionQueue,
    /// Permits for vouchers of channels that had the money when they were last looked at: their payers do not wait behind strangers.
    pub(crate) stale: AdmissionQueue,
    /// Permits for payments whose work is done. Once they are on the chain, anybody can present them.
    pub(crate) replays: AdmissionQueue,
    /// Places of requests whose payers are known to have the money, and have to be waited for.
    pub(crate) arriving: PayerRoom,
    /// Places of requests whose payments are known.
    pub(crate) known: KnownRoom,
}

impl Seller {
    pub(crate) fn new(rules: Rules) -> Self {
        let concurrent = rules.limits.concurrent.min(Semaphore::MAX_PERMITS);
        Self {
            in_progress: PaymentsInProgress::default(),
            permits: Arc::new(Semaphore::new(concurrent)),
            unverified: AdmissionQueue::new(concurrent, UNPROVEN_WAIT),
            copies: Semaphore::new(concurrent),
            in_line: Semaphore::new(concurrent),
            unproven: AdmissionQueue::new(concurrent.min(UNPROVEN), UNPROVEN_WAIT),
            stale: AdmissionQueue::new(concurrent.min(UNPROVEN), UNPROVEN_WAIT),
            replays: AdmissionQueue::new(rules.limits.copies(), UNPROVEN_WAIT),
            arriving: PayerRoom::new(concurrent),
            known: KnownRoom::new(rules.limits.request_body),
            rules,
        }
    }

    pub(crate) fn now(&self) -> u64 {
        self.rules.clock.now()
    }
}

/// The request that a payment is presented for, as far as charging has to know it. Its body is read only when charging asks for it: for a
/// payer that has shown no money it never is (invariant I12).
pub(crate) trait Presented: Send {
    /// Returns how much of the body is still to be read, at most, in bytes.
    fn longest(&self) -> u64;
    /// Returns `true` if its client may have to be waited for.
    fn is_arriving(&self) -> bool;
    /// Reads as much of the body as is kept.
    fn read(&mut self) -> impl Future<Output = Result<(), Unread>> + Send;
    /// Reads all of it, or refuses it as too long.
    fn read_whole(&mut self) -> impl Future<Output = Result<(), Unread>> + Send;
    /// Returns `true` if this is the body of which so much was read before.
    fn is_same(&mut self, read: &BodyDigest) -> impl Future<Output = Result<bool, Unread>> + Send;
    /// Returns the digest of a body that was read whole.
    fn digest(&self) -> Option<BodyDigest>;
    /// Returns `true` if it can be worked on: not if it was read in part and was too much to be kept.
    fn is_workable(&self) -> bool;
    /// Returns the names of the headers that the request must have as the one had that was answered, or `None` if the response is right for
    /// it, too.
    fn misfit(&self, kept: &StoredResponse) -> Option<String>;
}

/// How a request goes on.
pub(crate) enum Begun<H> {
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
    ) -> impl Future<Output = Result<(), Refusal>> + Send;
    /// Has what was charged settled, where the scheme wants that before the response leaves. Fails if it is not settled; then the response
    /// is kept, in case it is settled yet.
    fn settle(&mut self, is_whole: bool) -> impl Future<Output = Result<(), Refusal>> + Send;
    /// Releases the payment of work that came to nothing. Returns what the payer is told if money moved all the same.
    fn release(&mut self, read: BodyDigest) -> impl Future<Output = Option<SettlementResponse>> + Send;
    /// Returns how work that came to nothing is refused, after the payment was released.
    fn unfinished(&self, why: Unfinished) -> Refusal;
    /// Returns what the payer of work that was charged for is told, and how its request ended.
    fn receipt(&self) -> (Option<SettlementResponse>, RequestOutcome);
    /// Lets copies of the payment be answered. The future records that the response was delivered whole.
    fn deliver(self) -> impl Future<Output = ()> + Send + 'static;
    /// Returns what says how the payer stands if the work has panicked.
    fn if_panicked(&self) -> impl Future<Output = Refusal> + Send + 'static;
}

/// Runs work in a task of its own, so that neither a client that goes away nor a timeout above cancels it (invariant I5). Returns `None`
/// if it panicked.
pub(crate) async fn detached<T: Send + 'static>(work: impl Future<Output = T> + Send + 'static) -> Option<T> {
    tokio::spawn(work.in_current_span()).await.ok()
}

/// The verified payment for a request, in the request's extensions.
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
    /// The amount, in atomic units of the asset: by voucher or permit (schemes `batch-settlement` and `upto`) the most that may be charged.
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
