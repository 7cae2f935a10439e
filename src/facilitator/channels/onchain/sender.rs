//! Who gets calls of the contract into blocks.

use std::{fmt, sync::Arc, time::Duration};

use alloy_primitives::Address;
use async_trait::async_trait;

use crate::{
    chain::rpc::Receipt,
    facilitator::{NotReady, channels::ChannelError},
    settlement::{
        caller::{CallOutcome, Caller, Place},
        submitter::Call,
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

    /// Returns how many claims go into one transaction.
    fn claims(&self) -> usize;

    /// Returns why no call could be sent now, if that is so.
    async fn cannot_send(&self) -> Option<NotReady>;

    /// Waits until a call can be sent, in the order in which callers came.
    ///
    /// # Errors
    /// [`ChannelError::Unavailable`] if that takes longer than `patience`.
    async fn enter(&self, patience: Duration) -> Result<Turn, ChannelError>;

    /// Sends a call and waits for its block. `payload` asks a facilitator for the same. Without a turn it waits for one, for a short while.
    ///
    /// # Errors
    /// [`ChannelError::Rejected`] and [`ChannelError::Unavailable`] only if nothing was sent.
    async fn send(&self, turn: Option<Turn>, call: Call, payload: ChannelPayload) -> Result<Receipt, ChannelError>;
}

#[async_trait]
impl Sender for Arc<Caller> {
    fn addresses(&self) -> Vec<Address> {
        Caller::addresses(self).collect()
    }

    fn claims(&self) -> usize {
        CLAIMS
    }

    async fn cannot_send(&self) -> Option<NotReady> {
        Caller::cannot_send(self).await
    }

    async fn enter(&self, patience: Duration) -> Result<Turn, ChannelError> {
        Ok(Turn(Some(Caller::enter(self, patience).await?)))
    }

    async fn send(&self, turn: Option<Turn>, call: Call, _: ChannelPayload) -> Result<Receipt, ChannelError> {
        let place = turn.and_then(|Turn(place)| place);
        match self.call(place, call).await? {
            CallOutcome::Included(receipt) => Ok(receipt),
            CallOutcome::Pending(transaction) => Err(ChannelError::Pending { transaction }),
        }
    }
}
