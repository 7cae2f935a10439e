//! Following settled payments until their blocks are final, on one chain.
//!
//! Both facilitators use it: the one on the chain for its own transactions, the remote one for settlements that a node of the seller
//! confirms.

use std::{collections::HashMap, sync::Arc, time::Duration};

use alloy_primitives::{B256, U64};
use tokio::{sync::Mutex, time::sleep};

use super::{journal::Journal, reconciler::Reconcile};
use crate::{
    chain::{
        authorization_use::AuthorizationUse,
        node::Node,
        receipt_check::ExpectedTransfer,
        rpc::{Block, Receipt, RpcFailure},
    },
    ledger::{Record, SettlementState, SettlementStep},
    settlement::FacilitatorError,
    telemetry,
};

/// Records per page.
const PAGE: usize = 256;
/// If the transaction of a replaced block is included again, or its authorization is used otherwise, that happens within so many
/// blocks.
const REUSE_BLOCKS: u64 = 2_000;

/// Follows the settled payments of one chain.
pub(crate) struct FinalityTracker {
    node: Arc<Node>,
    journal: Journal,
    /// The absence of a receipt is believed after this pause: the node may lag behind another one.
    second_look: Duration,
    progress: Mutex<Progress>,
}

/// How far the chain was followed.
#[derive(Default)]
struct Progress {
    /// The newest block that was seen.
    head: Option<Block>,
    /// The number of the newest final block that was seen.
    finalized: u64,
}

/// The newest block, when there are settled payments to follow.
pub(crate) struct Head {
    block: Block,
    /// The newest block that was seen before is not on the chain any more.
    pub(crate) is_reorged: bool,
}

impl Head {
    pub(crate) fn number(&self) -> u64 {
        self.block.number.saturating_to()
    }
}

impl FinalityTracker {
    pub(crate) fn new(node: Arc<Node>, journal: Journal, second_look: Duration) -> Self {
        Self { node, journal, second_look, progress: Mutex::default() }
    }

    /// Returns the newest block, or `None` if no settled payment waits for finality, and nothing else `waits`, or if the node has no blocks.
    pub(crate) async fn head(&self, waits: bool) -> Result<Option<Head>, FacilitatorError> {
        let mut progress = self.progress.lock().await;
        if !waits && self.journal.settled(self.node.network(), None, None, 1).await?.is_empty() {
            *progress = Progress::default();
            return Ok(None);
        }
        let Some(block) = self.node.rpc().block("latest").await? else { return Ok(None) };
        let is_reorged = match &progress.head {
            Some(seen) => {
                // A node behind the one asked before does not know the block yet.
                let now = self.node.rpc().block_at(seen.number.saturating_to()).await?;
                now.is_some_and(|now| now.hash != seen.hash)
            }
            None => false,
        };
        Ok(Some(Head { block, is_reorged }))
    }

    /// Records which payments have become final by now. Returns the newest final block if it is new.
    ///
    /// Call it only after a reorganization was dealt with: from then on `head` is the newest block that was seen.
    pub(crate) async fn advance<R: Reconcile>(
        &self,
        facilitator: &Arc<R>,
        head: Head,
    ) -> Result<Option<u64>, FacilitatorError> {
        let mut progress = self.progress.lock().await;
        progress.head = Some(head.block);
        let finalized = self.node.rpc().finalized().await?.map_or(0, |block| block.number.saturating_to());
        if finalized <= progress.finalized {
            return Ok(None);
        }
        self.check_settled(facilitator, Some(finalized)).await?;
        progress.finalized = finalized;
        Ok(Some(finalized))
    }

    /// Checks the receipts of settled payments again: of all, or of those in blocks up to `finalized`.
    pub(crate) async fn check_settled<R: Reconcile>(
        &self,
        facilitator: &Arc<R>,
        finalized: Option<u64>,
    ) -> Result<(), FacilitatorError> {
        // One pause is enough for all: many receipts may be missing.
        let mut has_waited = false;
        let mut is_behind = false;
        let mut after = None;
        loop {
            let page = self.journal.settled(self.node.network(), finalized, after, PAGE).await?;
            let Some(last) = page.last() else {
                // The next pass checks again.
                return if is_behind { Err(RpcFailure::Silent.into()) } else { Ok(()) };
            };
            after = Some(last.key);
            // Payments of one batch share a receipt.
            let mut receipts = HashMap::new();
            for record in page {
                let Some(transaction) = record.settlement.paid_by() else { continue };
                if let std::collections::hash_map::Entry::Vacant(entry) = receipts.entry(transaction) {
                    entry.insert(self.receipt(transaction, &mut has_waited).await?);
                }
                let receipt = receipts.get(&transaction).and_then(Option::as_ref);
                is_behind |= !self.check(facilitator, record, transaction, receipt, finalized).await?;
            }
        }
    }

    /// Returns `false` if the node is behind the payment's block, so that it shows nothing.
    async fn check<R: Reconcile>(
        &self,
        facilitator: &Arc<R>,
        record: Record,
        transaction: B256,
        receipt: Option<&Receipt>,
        finalized: Option<u64>,
    ) -> Result<bool, FacilitatorError> {
        let expected = ExpectedTransfer::of_payment(&record.payment());
        let paid = match receipt {
            Some(receipt) => self.node.is_paid_by(&expected, receipt).await?.then_some(receipt),
            None => None,
        };
        let Some(paid) = paid else {
            if receipt.is_none() && self.is_pruned(&record, finalized).await? {
                let key = &record.key;
                tracing::warn!(payer = %key.payer, nonce = %key.nonce, %transaction, "the node keeps no receipt of a settlement");
                return Ok(true);
            }
            if receipt.is_none() && !self.is_replaced(&record, transaction).await? {
                return Ok(false);
            }
            self.reorged(facilitator, record).await?;
            return Ok(true);
        };
        let block = paid.block();
        if record.settlement.block() != Some(block) {
            let step = SettlementStep::Settle { transaction, block: Some(block), fee: record.fee };
            self.journal.try_record(&record.key, step).await?;
        }
        if finalized.is_some_and(|finalized| block <= finalized) {
            self.journal.try_record(&record.key, SettlementStep::Finalize).await?;
        }
        Ok(true)
    }

    /// Returns `true` if the payment's block is another one by now, without the transaction. A node that is behind does not have the
    /// block, and one that has it with the transaction has not read its receipts yet.
    async fn is_replaced(&self, record: &Record, transaction: B256) -> Result<bool, RpcFailure> {
        let Some(block) = record.settlement.block() else { return Ok(true) };
        let transactions = self.node.rpc().transactions(U64::from(block)).await?;
        Ok(transactions.is_some_and(|transactions| !transactions.contains(&transaction)))
    }

    /// Makes a reorged payment due again, and reconciles it: it is settled again if the payer has the response.
    async fn reorged<R: Reconcile>(&self, facilitator: &Arc<R>, record: Record) -> Result<(), FacilitatorError> {
        let Some(now) = self.journal.get(&record.key).await? else { return Ok(()) };
        if now.settlement.paid_by() != record.settlement.paid_by() {
            // Another process noticed it first.
            return Ok(());
        }
        tracing::warn!(payer = %record.key.payer, nonce = %record.key.nonce, "a settled payment was reorged");
        facilitator.count_reorged();
        telemetry::undone(record.key.network);
        self.journal.try_record(&record.key, SettlementStep::Reorg).await?;
        match self.journal.get(&record.key).await? {
            Some(record) if record.settlement.state() == SettlementState::Due => {
                facilitator.reconcile_payment(record).await
            }
            _ => Ok(()),
        }
    }

    /// Returns the receipt, or `None` only after the node said so twice.
    async fn receipt(&self, transaction: B256, has_waited: &mut bool) -> Result<Option<Receipt>, FacilitatorError> {
        if let Some(receipt) = self.node.rpc().receipt(transaction).await? {
            return Ok(Some(receipt));
        }
        if !std::mem::replace(has_waited, true) {
            sleep(self.second_look).await;
        }
        Ok(self.node.rpc().receipt(transaction).await?)
    }

    /// Returns `true` if the payment's transaction is probably on the chain although there is no receipt: nodes keep receipts for a
    /// limited time. That is so if its block is final, the authorization is used, and no other transaction is known to have used it.
    async fn is_pruned(&self, record: &Record, finalized: Option<u64>) -> Result<bool, FacilitatorError> {
        let Some(block) = record.settlement.block().filter(|block| finalized.is_some_and(|last| *block <= last)) else {
            return Ok(false);
        };
        let payment = record.payment();
        let (result, _) = self.node.verify(&payment).await?;
        if !result.used {
            return Ok(false);
        }
        let seen_unused = record.block_seen.unwrap_or(block.saturating_sub(1));
        let last = result.block.min(block.saturating_add(REUSE_BLOCKS));
        let found = self.node.find_use(&payment, seen_unused, last).await;
        // A node that keeps no receipts may refuse the search, too.
        Ok(!matches!(found, Ok(AuthorizationUse::Paid { .. } | AuthorizationUse::Otherwise { .. })))
    }
}
