//! Where the batch settler is, and how it comes there.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use alloy_primitives::{Address, B256, Bytes, address, b256, bytes, keccak256};
use tokio::time::{Instant, sleep, timeout};

use super::{
    broadcast::Sent,
    confirm::{Flight, Seen},
    engine::{Engine, QUEUE_PATIENCE},
    transfer,
};
use crate::facilitator::FacilitatorError;

/// The contract that executes many signed authorizations in one transaction.
///
/// It has no owner, no storage and no funds, and is at the same address on every chain: whoever calls it can only have done
/// what the payers signed. `contracts/BatchSettler.sol` says what it does. Where it is missing, anybody may deploy it once:
/// [`OnchainFacilitator::deploy_batch_settler`](crate::facilitator::OnchainFacilitator::deploy_batch_settler) does, and so does
/// any wallet that sends [`deployment`](Self::deployment) to the [`DEPLOYER`](Self::DEPLOYER), for about 190,000 gas.
///
/// ```
/// use tower_x402::facilitator::BatchSettler;
///
/// let address = BatchSettler::DEPLOYER.create2_from_code(BatchSettler::SALT, BatchSettler::INIT_CODE);
/// assert_eq!(address, BatchSettler::ADDRESS);
/// ```
#[derive(Clone, Copy, Debug)]
pub enum BatchSettler {}

impl BatchSettler {
    /// Where it is, on every chain on which it was deployed.
    pub const ADDRESS: Address = address!("cDBFFCEf7919287581100694b761e73EBAC7c4E5");

    /// The deterministic deployment proxy, which deploys by CREATE2 (EIP-1014). Base, Ethereum, anvil and the devnet have it; on
    /// other chains see <https://github.com/Arachnid/deterministic-deployment-proxy>.
    pub const DEPLOYER: Address = address!("4e59b44847b379578588920cA78FbF26c0B4956C");

    /// The salt of its address.
    pub const SALT: B256 = B256::ZERO;

    /// The keccak256 hash of its code once it is deployed.
    pub const CODE_HASH: B256 = b256!("236274b1588ab798da1a0afdff3cb171fb2233feee64c90285bcdf7d6d14be18");

    /// Its creation code, the artifact of this crate's `contracts/`.
    pub const INIT_CODE: Bytes = bytes!(
        "6080604052348015600e575f5ffd5b506102728061001c5f395ff3fe608060405234801561000f575f5ffd5b505f3560601c60143560e01c80158061002d575061002b610110565b155b15610064576040517f07b6ad3f00000000000000000000000000000000000000000000000000000000815260040160405180910390fd5b8173ffffffffffffffffffffffffffffffffffffffff163b5f036100b4576040517f79d93f4900000000000000000000000000000000000000000000000000000000815260040160405180910390fd5b5f5f6100c08484610142565b91509150805f03610104576040517f94b7f4500000000000000000000000000000000000000000000000000000000081526004810183905260240160405180910390fd5b815f528060205260405ff35b5f60185b803560501c61ffff165f81900361012d575f9250505090565b608a0201601601368110610114573614919050565b5f5f612ee0603f84048401016040517fe3ee160e0000000000000000000000000000000000000000000000000000000081526018805b36811015610267578181036101a8578035606081901c602485015260501c61ffff16608a02810160169081019250015b835a106102675760018601955080358060601c803b156101c957505061025f565b60048501526bffffffffffffffffffffffff166044840152602081013560d881901c606485015260b01c64ffffffffff166084840152602a81013560a4840152601b606a82013560ff81901c9190910160c4850152604a82013560e48501527f7fffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff166101048401525f8061012485828c8cf1850194505b608a01610178565b50505050925092905056"
    );

    /// What to send to the [`DEPLOYER`](Self::DEPLOYER), with nothing else, to deploy it.
    pub fn deployment() -> Bytes {
        [Self::SALT.as_slice(), Self::INIT_CODE.as_ref()].concat().into()
    }
}

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

#[cfg(test)]
mod tests {
    use serde::Deserialize;

    use super::*;

    #[test]
    fn the_address_follows_from_the_committed_artifact() {
        #[derive(Deserialize)]
        #[serde(rename_all = "camelCase")]
        struct Artifact {
            bytecode: Bytes,
            deployed_bytecode: Bytes,
        }
        let artifact: Artifact =
            serde_json::from_str(include_str!("../../contracts/artifacts/BatchSettler.json")).unwrap();
        assert_eq!(artifact.bytecode, BatchSettler::INIT_CODE);
        assert_eq!(keccak256(&artifact.deployed_bytecode), BatchSettler::CODE_HASH);
        // EIP-1014, by hand.
        let code_hash = keccak256(BatchSettler::INIT_CODE);
        let parts = [&[0xff], BatchSettler::DEPLOYER.as_slice(), BatchSettler::SALT.as_slice(), code_hash.as_slice()];
        assert_eq!(Address::from_slice(&keccak256(parts.concat())[12..]), BatchSettler::ADDRESS);
    }
}
