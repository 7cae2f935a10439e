//! Who gets calls of the contract into blocks.

use std::{
    fmt,
    ops::Deref,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use alloy_primitives::{Address, B256};
use async_trait::async_trait;

use crate::{
    chain::rpc::Receipt,
    facilitator::{FacilitatorError, NotReady, channels::ChannelError},
    settlement::{
        calls::CallOutcome,
        engine::Engine,
        line::Urgency,
        load::Call,
        submitter::{Place, Submitter},
    },
    vouchers::ChannelPayload,
};

/// Claims per transaction. Each takes about 25,000 gas, of 16 million.
const CLAIMS: usize = 200;

/// The right to send one call: from this place in the window of a key, or from nowhere if whoever sends it has a window of its own.
#[derive(Default)]
pub(in crate::facilitator) struct Turn(Option<Place>);

/// Gets calls of the contract into blocks: with keys of its own, or through somebody else's facilitator.
#[async_trait]
pub(in crate::facilitator) trait Sender: fmt::Debug + Send + Sync {
    /// Returns the addresses that send, as far as they are known.
    fn addresses(&self) -> Vec<Address>;

    /// Returns `true` if a deposit that it was too busy to send may be sent a moment later, after another check. Default: whoever sends it says
    /// when to come again.
    fn may_send_soon(&self) -> bool {
        false
    }

    /// Returns how many claims go into one transaction.
    fn claims(&self) -> usize;

    /// Returns the gas that its transactions have used.
    fn gas_used(&self) -> u64;

    /// Returns why no call could be sent now, if that is so.
    async fn cannot_send(&self) -> Option<NotReady>;

    /// Returns why no refund should be sent now: what is left to pay for gas is for claims. Default: it is not known what is left.
    async fn cannot_spare(&self) -> Option<NotReady> {
        None
    }

    /// Waits until it is known what an earlier process with the same keys sent.
    ///
    /// # Errors
    /// [`ChannelError::Unavailable`] if that cannot be found out.
    async fn outlive_predecessors(&self) -> Result<(), ChannelError> {
        Ok(())
    }

    /// Waits until a call can be sent, the most urgent first.
    ///
    /// # Errors
    /// [`ChannelError::Unavailable`] if that takes too long for a call of this kind.
    async fn enter(&self, urgency: Urgency) -> Result<Turn, ChannelError>;

    /// Waits for the block of the call that does `what`, if this process has sent one and does not know its end yet.
    async fn join(&self, what: B256) -> Option<Result<Receipt, ChannelError>>;

    /// Sends a call that does `what`, and waits for its block. `payload` asks a facilitator for the same.
    ///
    /// # Errors
    /// [`ChannelError::Rejected`] and [`ChannelError::Unavailable`] only if nothing was sent.
    async fn send(&self, turn: Turn, what: B256, call: Call, payload: ChannelPayload) -> Result<Receipt, ChannelError>;
}

/// Sends with keys of this process: those that settle payments, or others.
pub(super) struct OwnKeys {
    /// Sends again what it journalled, for as long as it is used.
    engine: Arc<Engine>,
    /// The gas that its calls have used. Others may send with the same keys.
    gas_used: Arc<AtomicU64>,
}

impl OwnKeys {
    /// Uses the keys of this engine.
    pub(super) fn of(engine: Arc<Engine>) -> Self {
        engine.submitter().keep_for_claims();
        Self { engine, gas_used: Arc::default() }
    }
}

impl Deref for OwnKeys {
    type Target = Arc<Submitter>;

    fn deref(&self) -> &Arc<Submitter> {
        self.engine.submitter()
    }
}

debug_fields!(OwnKeys { engine });

#[async_trait]
impl Sender for OwnKeys {
    fn addresses(&self) -> Vec<Address> {
        self.engine.addresses().collect()
    }

    fn may_send_soon(&self) -> bool {
        true
    }

    fn claims(&self) -> usize {
        CLAIMS
    }

    fn gas_used(&self) -> u64 {
        self.gas_used.load(Ordering::Relaxed)
    }

    async fn cannot_send(&self) -> Option<NotReady> {
        Submitter::cannot_send(self).await
    }

    async fn cannot_spare(&self) -> Option<NotReady> {
        Submitter::cannot_spare(self).await
    }

    async fn outlive_predecessors(&self) -> Result<(), ChannelError> {
        Ok(Submitter::outlive_predecessors(self).await?)
    }

    async fn enter(&self, urgency: Urgency) -> Result<Turn, ChannelError> {
        Ok(Turn(Some(Submitter::enter(self, urgency).await?)))
    }

    async fn join(&self, what: B256) -> Option<Result<Receipt, ChannelError>> {
        Some(included(Submitter::join(self, &what).await?))
    }

    async fn send(&self, turn: Turn, what: B256, call: Call, _: ChannelPayload) -> Result<Receipt, ChannelError> {
        let Turn(place) = turn;
        let place = match place {
            Some(place) => place,
            None => Submitter::enter(self, Urgency::payment()).await?,
        };
        included(self.call(place, what, call, &self.gas_used).await)
    }
}

fn included(outcome: Result<CallOutcome, FacilitatorError>) -> Result<Receipt, ChannelError> {
    match outcome? {
        CallOutcome::Included(receipt) => Ok(receipt),
        CallOutcome::Pending(transaction) => Err(ChannelError::Pending { transaction }),
    }
}
