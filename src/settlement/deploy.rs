//! Where the batch settler is, and how it comes there.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use alloy_primitives::{B256, keccak256};
use tokio::time::{Instant, sleep, timeout};

use super::engine::{Engine, QUEUE_PATIENCE};
use crate::{
    chain::{
        batch_settler::BatchSettler,
        broadcast::Sent,
        confirm::{Flight, Seen},
        transfer,
    },
    settlement::FacilitatorError,
};

/// Gas for running and storing the contract's code; it takes about 160,000.
const DEPLOYMENT_GAS: u64 = 400_000;
/// How often a node that lags behind a receipt is asked again.
const LAGGING: usize = 5;

/// How long a chain without the batch settler is believed to have none.
const RECHECK: Duration = Duration::from_secs(600);

/// Whether the chain has the batch settler, as far as is known.
#[derive(Debug, Default)]
pub(crate) struct Deployment(Mutex<Option<(Instant, bool)>>);

impl Deployment {
    pub(crate) fn note(&self, is_there: bool) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some((Instant::now(), is_there));
    }

    /// `None` if it should be looked up.
    fn known(&self) -> Option<bool> {
        let known = *self.0.lock().unwrap_or_else(PoisonError::into_inner);
        known.filter(|(at, is_there)| *is_there || at.elapsed() < RECHECK).map(|(_, is_there)| is_there)
    }
}

impl Engine {
    /// Whether payments can share a transaction. A node that does not say is asked again later.
    pub(super) async fn can_batch(&self) -> bool {
        if self.batch_size <= 1 {
            return false;
        }
        if let Some(known) = self.deployment.known() {
            return known;
        }
        let found = self.has_batch_settler().await;
        if let Err(error) = &found {
            tracing::warn!(%error, "whether payments can share transactions is not known; they are settled one by one");
        }
        let is_there = found.unwrap_or(false);
        self.deployment.note(is_there);
        is_there
    }

    /// Whether the batch settler is on the chain. One request.
    pub(crate) async fn has_batch_settler(&self) -> Result<bool, FacilitatorError> {
        let code = self.rpc.code(BatchSettler::ADDRESS).await?;
        match code.is_empty() {
            true => Ok(false),
            false if keccak256(&code) == BatchSettler::CODE_HASH => Ok(true),
            // CREATE2 lets nothing else be there, unless the chain's EVM is another one.
            false => Err(FacilitatorError::Misconfigured(format!(
                "the code at {} is not the batch settler's",
                BatchSettler::ADDRESS
            ))),
        }
    }

    /// Deploys the batch settler if it is not there, and returns the transaction that did.
    pub(crate) async fn deploy_batch_settler(self: &Arc<Self>) -> Result<Option<B256>, FacilitatorError> {
        if self.has_batch_settler().await? {
            return Ok(None);
        }
        if self.rpc.code(BatchSettler::DEPLOYER).await?.is_empty() {
            return Err(FacilitatorError::Misconfigured(format!(
                "the deterministic deployment proxy, {}, is not on {}",
                BatchSettler::DEPLOYER,
                self.network
            )));
        }
        let transaction = self.send_deployment().await?;
        for _ in 0..LAGGING {
            if self.has_batch_settler().await? {
                self.deployment.note(true);
                tracing::info!(address = %BatchSettler::ADDRESS, %transaction, "the batch settler is deployed");
                return Ok(Some(transaction));
            }
            sleep(self.pace.poll_interval()).await;
        }
        Err(FacilitatorError::Misconfigured(format!("{transaction} did not deploy the batch settler")))
    }

    /// One transaction of the settlement key, in a block.
    async fn send_deployment(self: &Arc<Self>) -> Result<B256, FacilitatorError> {
        let late =
            FacilitatorError::Busy { what: "the batch settler's deployment", retry_after: Duration::from_secs(5) };
        let lane = self.lanes.first().ok_or_else(|| late.clone())?;
        let place = timeout(QUEUE_PATIENCE, lane.enter()).await.map_err(|_| late.clone())?;
        let fees = self.fees.get(&self.rpc).await?;
        let mut slot = lane.take(place).await?;
        let input = BatchSettler::deployment();
        let gas_limit = transfer::intrinsic_gas(&input).saturating_add(DEPLOYMENT_GAS);
        let transaction = self.transaction(slot.nonce(), fees, gas_limit, BatchSettler::DEPLOYER, input);
        let signed = match self.sign(lane, transaction).await {
            Ok(signed) => signed,
            Err(error) => {
                self.give_back(slot).await;
                return Err(error);
            }
        };
        if let Err(error) = self.ledger.submit(self.submission(&slot, &signed, Vec::new())).await {
            self.give_back(slot).await;
            return Err(error.into());
        }
        // From here on a slot that is dropped is looked up on the chain.
        slot.sent();
        let started = Instant::now();
        let sent = self.node.resend(&self.rpc, &signed.raw).await;
        match sent {
            Sent::Included(_) | Sent::Pooled | Sent::Perhaps => {}
            Sent::NonceUsed => {
                slot.consumed_by_another();
                return Err(late);
            }
            Sent::NonceContested => {
                slot.displaced();
                return Err(late);
            }
            refusal => {
                self.give_back(slot).await;
                self.refused(lane, refusal).await?;
                return Err(late);
            }
        }
        let mut flight = Flight::new(signed.raw, signed.hash, matches!(sent, Sent::Pooled), &self.pace);
        match flight.watch(&self.rpc, &self.node, &self.pace, started + self.confirm_timeout).await {
            Seen::Included(receipt) => {
                self.account(&receipt, started);
                slot.consumed();
                Ok(receipt.transaction_hash)
            }
            Seen::Displaced => {
                slot.consumed_by_another();
                Err(late)
            }
            Seen::NotYet => {
                slot.displaced();
                Err(late)
            }
        }
    }
}
