//! Everything that settling on one chain takes.

use std::{
    collections::HashSet,
    fmt,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use alloy_network::TxSigner;
use alloy_primitives::{B256, Signature, U256};
use tokio::{
    sync::{Mutex as AsyncMutex, Notify, watch},
    time::Instant,
};

use super::{
    costs::Costs, deploy::Deployment, depth::Depths, member::Active, nonce_manager::NonceManager, queue::Queue,
    readiness_look::LastLook, reverts::Reverts,
};
use crate::{
    chain::{
        block_time::BlockTime,
        broadcast::{Broadcaster, Sent},
        fees::FeeOracle,
        probe::Probe,
        rpc::{Receipt, Rpc},
        rpc_batcher::RpcBatcher,
    },
    clock::Clock,
    ledger::{Ledger, Sender},
    network::Network,
    settlement::FacilitatorError,
    telemetry,
};

/// How long a payment waits for its transaction to begin.
pub(super) const QUEUE_PATIENCE: Duration = Duration::from_secs(60);
/// How long a key that could not pay for gas is used only if there is no other.
const EMPTY_TANK: Duration = Duration::from_secs(30);
/// What a payment alone may use, and more.
const LONE_GAS: u128 = 200_000;
/// How long a transaction out of sight keeps its nonce.
pub(super) const WATCH_LIMIT: Duration = Duration::from_secs(1_800);

/// Any signer of transactions.
pub(crate) type SharedSigner = Arc<dyn TxSigner<Signature> + Send + Sync>;

/// Totals since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SettlementStats {
    /// Payments settled by transactions of this process.
    pub settled: u64,
    /// Payments that somebody else's transaction settled.
    pub credited: u64,
    /// Transactions of this process that were included.
    pub transactions: u64,
    /// Those of them that paid nobody.
    pub reverted: u64,
    /// Settlements that a reorganization undid.
    pub undone: u64,
    /// Payments whose fee exceeded their amount, where the
    /// [native price](crate::facilitator::OnchainFacilitatorBuilder::native_price) is known.
    pub losses: u64,
    /// Gas used by transactions of this process.
    pub gas_used: u64,
    /// What they cost, in wei, data availability included.
    pub spent: U256,
    /// Transactions in flight now.
    pub in_flight: u64,
    /// Payments that wait for their settlement now, those in flight included.
    pub pending: u64,
}

/// Everything that settling on one chain takes.
pub(crate) struct Engine {
    pub(crate) network: Network,
    pub(crate) rpc: Rpc,
    pub(crate) probe: Probe,
    /// Through which the probe looks.
    pub(crate) looks: RpcBatcher,
    pub(crate) pace: BlockTime,
    pub(crate) fees: FeeOracle,
    /// One per key.
    pub(crate) lanes: Vec<NonceManager>,
    /// A place in one of them has become free.
    pub(crate) freed: Arc<Notify>,
    pub(crate) node: Broadcaster,
    pub(crate) ledger: Arc<dyn Ledger>,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) gas_cap: u64,
    pub(crate) confirm_timeout: Duration,
    /// Payments per transaction.
    pub(crate) batch_size: usize,
    /// Gas that the call for one payment in a batch may use.
    pub(crate) batch_gas_cap: u32,
    /// Whether the chain has the contract that takes batches.
    pub(crate) deployment: Deployment,
    pub(crate) depths: Depths,
    /// How many payments may wait for settlement.
    pub(crate) backlog: usize,
    /// This process among those that share the ledger.
    pub(crate) process: u64,
    pub(crate) totals: Mutex<SettlementStats>,
    /// Transactions that a task of this process looks after.
    pub(crate) watched: Mutex<HashSet<B256>>,
    pub(crate) reverts: Reverts,
    pub(crate) queue: Queue,
    pub(crate) active: Active,
    /// Whether what an earlier process left behind has been looked at: before that, nothing new is signed.
    pub(crate) caught_up: watch::Sender<bool>,
    pub(crate) closing: AtomicBool,
    /// Held by whoever sends journalled transactions again.
    pub(crate) resending: AsyncMutex<()>,
    /// Something is open that nobody looks after.
    pub(crate) hint: Arc<Notify>,
    pub(crate) costs: Costs,
    pub(crate) last_look: LastLook,
}

impl Engine {
    /// No node took the transaction. `Ok` if another one may fare better.
    pub(super) async fn refused(&self, lane: &NonceManager, refusal: Sent) -> Result<(), FacilitatorError> {
        match refusal {
            Sent::NoGas => {
                let account = lane.account();
                let balance = self.rpc.balance(account).await.unwrap_or_default();
                // Nodes set aside for what is in flight as much as it may cost at most: with the next block there is more.
                if lane.in_flight() > 0 && self.pays_for_one(balance).await {
                    tokio::time::sleep(self.pace.block_time().min(Duration::from_secs(1))).await;
                    return Ok(());
                }
                tracing::error!(%account, %balance, "the settlement key cannot pay for gas");
                lane.rest(EMPTY_TANK, balance);
                if self.lanes.len() > 1 {
                    return Ok(());
                }
                Err(FacilitatorError::GasTank { balance })
            }
            Sent::PoolFull => {
                // Other processes may share the key; with the next block there is room again.
                tokio::time::sleep(self.pace.block_time().min(Duration::from_secs(1))).await;
                Ok(())
            }
            Sent::Refused(words) => {
                tracing::error!(words, "the node refuses the transaction");
                Err(FacilitatorError::Misconfigured(format!("the node refuses the transaction: {words}")))
            }
            Sent::Underpriced => {
                self.fees.insisted_on().await;
                Ok(())
            }
            _ => {
                self.fees.forget().await;
                Ok(())
            }
        }
    }

    /// Whether that is enough for a payment alone, as far as is known.
    async fn pays_for_one(&self, balance: U256) -> bool {
        let fees = self.fees.get(&self.rpc).await;
        fees.is_ok_and(|fees| balance >= U256::from(fees.max_fee.saturating_mul(LONE_GAS)))
    }

    pub(super) fn account(&self, receipt: &Receipt, started: Instant) {
        let gas = receipt.gas_used.saturating_to::<u64>();
        let block = receipt.block();
        self.pace.observe(block);
        tracing::info!(transaction = %receipt.transaction_hash, block, gas, latency = ?started.elapsed(), "included");
        telemetry::included(self.network, receipt.succeeded(), gas, receipt.cost(), started.elapsed());
        let mut totals = self.totals();
        totals.transactions += 1;
        totals.gas_used = totals.gas_used.saturating_add(gas);
        totals.spent = totals.spent.saturating_add(receipt.cost());
    }

    /// Whose transactions these are, in the ledger.
    pub(super) fn sender(&self, lane: &NonceManager) -> Sender {
        Sender { network: self.network, address: lane.account() }
    }

    /// How many transactions are on their way.
    pub(super) fn in_flight(&self) -> usize {
        self.lanes.iter().map(NonceManager::in_flight).sum()
    }

    /// What came of it so far.
    pub(crate) fn stats(&self) -> SettlementStats {
        let (in_flight, pending) = (self.in_flight() as u64, self.active.count() as u64);
        SettlementStats { in_flight, pending, ..*self.totals() }
    }

    /// Takes nothing new, and returns when everything begun, or owed already, has come to an end; `false` if it cannot be known what
    /// is owed.
    pub(crate) async fn drain(self: &Arc<Self>) -> bool {
        self.closing.store(true, Ordering::Release);
        // What was answered on credit a moment ago, the upkeep may not have come to.
        let taken_up = self.begin_what_is_owed().await;
        if let Err(error) = &taken_up {
            tracing::warn!(%error, "what is owed could not be settled before the end");
        }
        self.active.none().await;
        taken_up.is_ok()
    }

    pub(super) fn is_closing(&self) -> bool {
        self.closing.load(Ordering::Acquire)
    }

    pub(super) fn watches(&self, transaction: B256) -> bool {
        self.watched.lock().unwrap_or_else(PoisonError::into_inner).contains(&transaction)
    }

    pub(crate) fn totals(&self) -> MutexGuard<'_, SettlementStats> {
        self.totals.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Engine").field("network", &self.network).field("lanes", &self.lanes).finish_non_exhaustive()
    }
}

/// A transaction that a task looks after, for as long as it lives.
pub(super) struct Watched {
    engine: Arc<Engine>,
    transaction: B256,
}

impl Watched {
    pub(super) fn enter(engine: &Arc<Engine>, transaction: B256) -> Self {
        engine.watched.lock().unwrap_or_else(PoisonError::into_inner).insert(transaction);
        Self { engine: engine.clone(), transaction }
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        self.engine.watched.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.transaction);
    }
}
