//! Whether the chain has the batch settler, and how it is deployed.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use alloy_primitives::{B256, keccak256};
use tokio::time::{Instant, sleep, timeout};

use super::{calls::CallOutcome, line::Urgency, load::Call, queue::QUEUE_TIMEOUT, submitter::Submitter};
use crate::{
    chain::{batch_settler::BatchSettler, transfer},
    settlement::FacilitatorError,
};

/// Gas for running the contract's creation code and storing its code, which takes about 160,000.
const DEPLOYMENT_GAS: u64 = 400_000;
/// How often a node that lags behind a receipt is asked again.
const LAGGING_RETRIES: usize = 5;
/// How long the absence of the batch settler is remembered.
const RECHECK: Duration = Duration::from_secs(600);

/// The batch settler on one chain.
pub(crate) struct Deployment {
    submitter: Arc<Submitter>,
    /// Whether it is deployed, and when that was looked up.
    known: Mutex<Option<(Instant, bool)>>,
}

impl Deployment {
    pub(super) fn new(submitter: Arc<Submitter>) -> Self {
        Self { submitter, known: Mutex::default() }
    }

    /// Returns `true` if the chain has the batch settler. Asks the node only if that is not known; a node that does not answer is asked
    /// again after ten minutes.
    pub(super) async fn is_there(&self) -> bool {
        let known = *self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, is_there)) = known.filter(|(at, is_there)| *is_there || at.elapsed() < RECHECK) {
            return is_there;
        }
        let found = self.look_up().await;
        if let Err(error) = &found {
            tracing::warn!(%error, "looking up the batch settler failed; payments are settled one by one");
        }
        let is_there = found.unwrap_or(false);
        self.remember(is_there);
        is_there
    }

    /// Looks the batch settler up before the first payment. One request.
    pub(super) async fn look_up_early(&self) {
        if let Ok(is_there) = self.look_up().await {
            self.remember(is_there);
        }
    }

    /// Deploys the batch settler if it is not there. Returns the transaction that did.
    pub(super) async fn deploy(&self) -> Result<Option<B256>, FacilitatorError> {
        if self.look_up().await? {
            return Ok(None);
        }
        if self.submitter.node().rpc().code(BatchSettler::DEPLOYER).await?.is_empty() {
            return Err(FacilitatorError::Misconfigured(format!(
                "the deterministic deployment proxy, {}, is not on {}",
                BatchSettler::DEPLOYER,
                self.submitter.node().network()
            )));
        }
        let transaction = self.send().await?;
        for _ in 0..LAGGING_RETRIES {
            if self.look_up().await? {
                self.remember(true);
                tracing::info!(address = %BatchSettler::ADDRESS, %transaction, "the batch settler is deployed");
                return Ok(Some(transaction));
            }
            sleep(self.submitter.node().poll_interval()).await;
        }
        Err(FacilitatorError::Misconfigured(format!("{transaction} did not deploy the batch settler")))
    }

    fn remember(&self, is_there: bool) {
        *self.known.lock().unwrap_or_else(PoisonError::into_inner) = Some((Instant::now(), is_there));
    }

    async fn look_up(&self) -> Result<bool, FacilitatorError> {
        let code = self.submitter.node().rpc().code(BatchSettler::ADDRESS).await?;
        match code.is_empty() {
            true => Ok(false),
            false if keccak256(&code) == BatchSettler::CODE_HASH => Ok(true),
            // CREATE2 lets nothing else be there, unless the chain's EVM differs.
            false => Err(FacilitatorError::Misconfigured(format!(
                "the code at {} is not the batch settler's",
                BatchSettler::ADDRESS
            ))),
        }
    }

    /// Sends the deployment, and waits until it is in a block.
    async fn send(&self) -> Result<B256, FacilitatorError> {
        let late =
            FacilitatorError::Busy { what: "the batch settler's deployment", retry_after: Duration::from_secs(5) };
        let place =
            timeout(QUEUE_TIMEOUT, self.submitter.enter(Urgency::payment())).await.map_err(|_| late.clone())??;
        let input = BatchSettler::deployment();
        let gas_limit = transfer::intrinsic_gas(&input).saturating_add(DEPLOYMENT_GAS);
        let call = Call { to: BatchSettler::DEPLOYER, input, gas_limit };
        match self.submitter.call(place, BatchSettler::CODE_HASH, call, &Arc::default()).await? {
            CallOutcome::Included(receipt) => Ok(receipt.transaction_hash),
            CallOutcome::Pending(_) => Err(late),
        }
    }
}
