//! A ledger that passes every call to another one, and lets a test do something around it: watch it, hold it back, make it fail.

use std::{future::Future, sync::Arc};

use async_trait::async_trait;
use tower_x402::{
    ledger::{
        Counts, FulfilmentStep, JournaledTransaction, Lease, Ledger, LedgerError, Listing, PaymentStep, Record,
        Reservation, ResponseLedger, Sender, SettlementStep, StoredResponse, TransactionLedger,
        channels::{ChannelLedger, ChannelLedgerError, ChannelRecord, ChannelStep},
    },
    payment::PaymentKey,
    vouchers::ChannelId,
};

/// A call of a ledger, with the argument that tells it from others of its method.
#[derive(Clone, Copy, Debug)]
pub enum Call<'a> {
    Fulfil(&'a FulfilmentStep),
    Settle(&'a SettlementStep),
    Submit(&'a JournaledTransaction),
    Advance(&'a ChannelStep),
    /// Any other operation, by its name.
    Other(&'static str),
}

impl Call<'_> {
    /// Returns the name of the operation, and the step.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Fulfil(step) => fulfilling(step),
            Self::Settle(step) => settling(step),
            Self::Submit(_) => "submit",
            Self::Advance(step) => advancing(step),
            Self::Other(method) => method,
        }
    }
}

/// Does something before a call of a ledger, after it, or in its place.
pub trait Around: Send + Sync + 'static {
    /// Awaits `work`, which makes the call, or returns an answer without it.
    fn around<T: Send>(
        &self,
        call: Call<'_>,
        work: impl Future<Output = Result<T, LedgerError>> + Send,
    ) -> impl Future<Output = Result<T, LedgerError>> + Send;
}

/// Refuses the calls for which a function returns an error.
pub struct Refusing<F>(pub F);

impl<F> Around for Refusing<F>
where
    F: Fn(Call<'_>) -> Option<LedgerError> + Send + Sync + 'static,
{
    async fn around<T: Send>(
        &self,
        call: Call<'_>,
        work: impl Future<Output = Result<T, LedgerError>> + Send,
    ) -> Result<T, LedgerError> {
        match (self.0)(call) {
            Some(error) => Err(error),
            None => work.await,
        }
    }
}

/// The operations of [`Ledger`] that can fail, as the metric `x402_ledger_errors_total` names them.
pub const OPERATIONS: [&str; 15] = [
    "reserve",
    "get",
    "take_over",
    "fulfil",
    "settle",
    "discard",
    "store_response",
    "response",
    "count_replay",
    "submit",
    "free_nonce",
    "forget_nonces",
    "submissions",
    "list",
    "counts",
];

/// The operations of [`ChannelLedger`] that can fail. What the metric has for each kind of step is `advance` here.
pub const CHANNEL_OPERATIONS: [&str; 5] =
    ["channel", "advance", "channel_response", "store_channel_response", "channels"];

/// Returns the operation of a call with this name.
pub fn operation_of(call: &str) -> &str {
    call.split(' ').next().unwrap_or(call)
}

/// A ledger that passes every call to another one, through an [`Around`].
pub struct AroundLedger<A> {
    pub ledger: Arc<dyn Ledger>,
    pub around: A,
}

impl<A: Around> AroundLedger<A> {
    pub fn new(ledger: Arc<dyn Ledger>, around: A) -> Arc<Self> {
        Arc::new(Self { ledger, around })
    }
}

/// The books of channels, with every call passed to others through an [`Around`].
pub struct AroundChannels<A> {
    pub ledger: Arc<dyn ChannelLedger>,
    pub around: A,
}

impl<A: Around> AroundChannels<A> {
    pub fn new(ledger: Arc<dyn ChannelLedger>, around: A) -> Arc<Self> {
        Arc::new(Self { ledger, around })
    }
}

/// Without a wildcard, so that a new step does not compile until it has a name here.
fn fulfilling(step: &FulfilmentStep) -> &'static str {
    match step {
        FulfilmentStep::Admit { .. } => "fulfil Admit",
        FulfilmentStep::Start { .. } => "fulfil Start",
        FulfilmentStep::Release { .. } => "fulfil Release",
        FulfilmentStep::Produce { .. } => "fulfil Produce",
        FulfilmentStep::Defer { .. } => "fulfil Defer",
        FulfilmentStep::Deliver => "fulfil Deliver",
    }
}

fn settling(step: &SettlementStep) -> &'static str {
    match step {
        SettlementStep::Submit { .. } => "settle Submit",
        SettlementStep::Settle { .. } => "settle Settle",
        SettlementStep::Finalize => "settle Finalize",
        SettlementStep::Reorg => "settle Reorg",
        SettlementStep::Claim(_) => "settle Claim",
        SettlementStep::Delegate { .. } => "settle Delegate",
        SettlementStep::Fail { .. } => "settle Fail",
        SettlementStep::Invalidate { .. } => "settle Invalidate",
        SettlementStep::MarkUnknown => "settle MarkUnknown",
    }
}

/// Channels' steps may be added without a breaking change.
fn advancing(step: &ChannelStep) -> &'static str {
    match step {
        ChannelStep::Open { .. } => "advance Open",
        ChannelStep::Observe { .. } => "advance Observe",
        ChannelStep::Begin { .. } => "advance Begin",
        ChannelStep::Charge { .. } => "advance Charge",
        ChannelStep::Replay { .. } => "advance Replay",
        ChannelStep::Release { .. } => "advance Release",
        ChannelStep::BeginClaim { .. } => "advance BeginClaim",
        ChannelStep::EndClaim { .. } => "advance EndClaim",
        ChannelStep::Refund { .. } => "advance Refund",
        ChannelStep::EndRefund { .. } => "advance EndRefund",
        ChannelStep::DropRefund { .. } => "advance DropRefund",
        ChannelStep::Publish { .. } => "advance Publish",
        step => panic!("{step:?} has no name here"),
    }
}

#[async_trait]
impl<A: Around> ChannelLedger for AroundChannels<A> {
    async fn channel(&self, id: &ChannelId) -> Result<Option<ChannelRecord>, LedgerError> {
        self.around.around(Call::Other("channel"), self.ledger.channel(id)).await
    }

    async fn advance(&self, id: &ChannelId, step: &ChannelStep) -> Result<ChannelRecord, ChannelLedgerError> {
        // A step that is refused is an answer, and no failure of the store.
        let work = async {
            match self.ledger.advance(id, step).await {
                Err(ChannelLedgerError::Ledger(error)) => Err(error),
                answer => Ok(answer),
            }
        };
        self.around.around(Call::Advance(step), work).await?
    }

    async fn channels(&self, after: Option<ChannelId>, limit: usize) -> Result<Vec<ChannelRecord>, LedgerError> {
        self.around.around(Call::Other("channels"), self.ledger.channels(after, limit)).await
    }
}

#[async_trait]
impl<A: Around> ResponseLedger for AroundChannels<A> {
    async fn store_response(&self, key: &PaymentKey, response: StoredResponse) -> Result<(), LedgerError> {
        let work = self.ledger.store_response(key, response);
        self.around.around(Call::Other("store_channel_response"), work).await
    }

    async fn response(&self, key: &PaymentKey) -> Result<Option<StoredResponse>, LedgerError> {
        self.around.around(Call::Other("channel_response"), self.ledger.response(key)).await
    }

    fn response_limit(&self) -> usize {
        self.ledger.response_limit()
    }
}

#[async_trait]
impl<A: Around> Ledger for AroundLedger<A> {
    async fn reserve(&self, record: &Record) -> Result<Reservation, LedgerError> {
        self.around.around(Call::Other("reserve"), self.ledger.reserve(record)).await
    }

    async fn get(&self, key: &PaymentKey) -> Result<Option<Record>, LedgerError> {
        self.around.around(Call::Other("get"), self.ledger.get(key)).await
    }

    async fn advance(&self, key: &PaymentKey, step: &PaymentStep) -> Result<Record, LedgerError> {
        let call = match step {
            PaymentStep::TakeOver { .. } => Call::Other("take_over"),
            PaymentStep::Fulfil { step, .. } => Call::Fulfil(step),
            PaymentStep::Settle(step) => Call::Settle(step),
            PaymentStep::Replay => Call::Other("count_replay"),
        };
        self.around.around(call, self.ledger.advance(key, step)).await
    }

    async fn discard(&self, lease: &Lease) -> Result<(), LedgerError> {
        self.around.around(Call::Other("discard"), self.ledger.discard(lease)).await
    }

    async fn list(&self, listing: &Listing) -> Result<Vec<Record>, LedgerError> {
        self.around.around(Call::Other("list"), self.ledger.list(listing)).await
    }

    async fn counts(&self) -> Result<Counts, LedgerError> {
        self.around.around(Call::Other("counts"), self.ledger.counts()).await
    }
}

#[async_trait]
impl<A: Around> ResponseLedger for AroundLedger<A> {
    async fn store_response(&self, key: &PaymentKey, response: StoredResponse) -> Result<(), LedgerError> {
        self.around.around(Call::Other("store_response"), self.ledger.store_response(key, response)).await
    }

    async fn response(&self, key: &PaymentKey) -> Result<Option<StoredResponse>, LedgerError> {
        self.around.around(Call::Other("response"), self.ledger.response(key)).await
    }

    fn response_limit(&self) -> usize {
        self.ledger.response_limit()
    }
}

#[async_trait]
impl<A: Around> TransactionLedger for AroundLedger<A> {
    async fn submit(&self, submission: JournaledTransaction) -> Result<(), LedgerError> {
        let call = Call::Submit(&submission);
        self.around.around(call, self.ledger.submit(submission.clone())).await
    }

    async fn free_nonce(&self, sender: &Sender, nonce: u64, by: u64) -> Result<(), LedgerError> {
        self.around.around(Call::Other("free_nonce"), self.ledger.free_nonce(sender, nonce, by)).await
    }

    async fn forget_nonces(&self, sender: &Sender, below: u64) -> Result<(), LedgerError> {
        self.around.around(Call::Other("forget_nonces"), self.ledger.forget_nonces(sender, below)).await
    }

    async fn submissions(&self, sender: &Sender, from: u64) -> Result<Vec<JournaledTransaction>, LedgerError> {
        self.around.around(Call::Other("submissions"), self.ledger.submissions(sender, from)).await
    }
}
