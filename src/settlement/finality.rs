//! Settled payments, until their blocks are final.

use std::{collections::HashMap, sync::Arc, time::Duration};

use alloy_primitives::B256;

use super::engine::Engine;
use crate::{
    chain::{
        authorization_use::{self, Use},
        receipt_check::ExpectedTransfer,
        rpc::{Block, Receipt},
    },
    ledger::{Listing, Record, SettlementState, SettlementStep},
    payment::PaymentKey,
    settlement::FacilitatorError,
    telemetry,
};

/// How far a node may be behind another one, at least.
const LAG: Duration = Duration::from_millis(500);

/// Within so many blocks, what a block held that was replaced has been used otherwise, if it is at all.
const SOON: u64 = 2_000;

/// How far the chain was followed.
#[derive(Default)]
pub(super) struct Horizon {
    /// The newest block seen.
    head: Option<Block>,
    /// The newest final block seen.
    finalized: u64,
}

/// Receipts are asked for once per page and transaction.
#[derive(Default)]
struct Receipts {
    known: HashMap<B256, Option<Receipt>>,
    /// A node that was behind had its time.
    waited: bool,
}

impl Engine {
    /// Records what has become final, and notices what a reorganization undid.
    pub(super) async fn follow_the_chain(self: &Arc<Self>, horizon: &mut Horizon) -> Result<(), FacilitatorError> {
        let settled = self.settled(None, None, 1).await?;
        if settled.is_empty() {
            *horizon = Horizon::default();
            return Ok(());
        }
        let Some(head) = self.rpc.block("latest").await? else { return Ok(()) };
        let is_gone = match &horizon.head {
            Some(seen) => self.is_gone(seen).await?,
            None => false,
        };
        if is_gone || self.is_undone().await? {
            tracing::warn!(head = %head.number, "the chain was reorganized");
            let failed = self.send_all_again().await;
            if failed < self.lanes.len() {
                self.check_settled(None).await?;
            }
            if failed > 0 {
                // The next pass sees the same reorganization, and does the rest.
                return Ok(());
            }
        }
        // Not before all of that is done, or a failure on the way would make it forgotten.
        horizon.head = Some(head);
        let finalized = self.rpc.finalized().await?.map_or(0, |block| block.number.saturating_to());
        if finalized > horizon.finalized {
            self.check_settled(Some(finalized)).await?;
            horizon.finalized = finalized;
            for lane in &self.lanes {
                let in_blocks = self.rpc.nonce(lane.account(), "finalized").await?;
                self.ledger.forget_nonces(&self.sender(lane), in_blocks).await?;
            }
        }
        Ok(())
    }

    /// Whether a block seen before is not on the chain any more.
    async fn is_gone(&self, seen: &Block) -> Result<bool, FacilitatorError> {
        let now = self.rpc.block_at(seen.number.saturating_to()).await?;
        // A node behind the one asked before does not know the block yet.
        Ok(now.is_some_and(|now| now.hash != seen.hash))
    }

    /// Whether a transaction that was in a block is in none now: blocks that came and went between two looks leave no other trace,
    /// and everything behind its nonce waits for it.
    async fn is_undone(&self) -> Result<bool, FacilitatorError> {
        for lane in &self.lanes {
            let seen = lane.consumed();
            if seen > 0 && self.rpc.nonce(lane.account(), "latest").await? < seen {
                // Or the node is behind the one asked before; then it will catch up.
                tokio::time::sleep(self.pace.block_time().clamp(LAG, 4 * LAG)).await;
                if self.rpc.nonce(lane.account(), "latest").await? < seen {
                    return Ok(true);
                }
            }
        }
        Ok(false)
    }

    /// Looks at the receipts of settled payments again: of all, or of those in blocks that are final.
    async fn check_settled(self: &Arc<Self>, finalized: Option<u64>) -> Result<(), FacilitatorError> {
        let mut receipts = Receipts::default();
        let mut after = None;
        loop {
            let page = self.settled(finalized, after, 256).await?;
            let Some(last) = page.last() else { return Ok(()) };
            after = Some(last.key);
            for record in page {
                self.check(record, finalized, &mut receipts).await?;
            }
            receipts.known.clear();
        }
    }

    async fn check(
        self: &Arc<Self>,
        mut record: Record,
        finalized: Option<u64>,
        receipts: &mut Receipts,
    ) -> Result<(), FacilitatorError> {
        let Some(transaction) = record.settlement.paid_by() else { return Ok(()) };
        let receipt = match receipts.known.get(&transaction) {
            Some(receipt) => receipt.clone(),
            None => {
                let receipt = self.receipt_at_last(transaction, &mut receipts.waited).await?;
                receipts.known.insert(transaction, receipt.clone());
                receipt
            }
        };
        let expected = ExpectedTransfer::of_payment(&record.payment());
        let is_absent = receipt.is_none();
        let Some(receipt) = receipt.filter(|receipt| expected.is_paid_by(receipt)) else {
            if is_absent && self.is_forgotten(&record, finalized).await? {
                let key = &record.key;
                tracing::warn!(payer = %key.payer, nonce = %key.nonce, %transaction, "the node keeps no receipt of a settlement");
                return Ok(());
            }
            tracing::warn!(payer = %record.key.payer, nonce = %record.key.nonce, %transaction, "a settlement was undone");
            self.totals().undone += 1;
            telemetry::undone(self.network);
            self.record(&record.key, SettlementStep::Reorg).await;
            if let Some(now) = self.ledger.get(&record.key).await? {
                record = now;
            }
            return self.take_up(record).await;
        };
        let block = receipt.block();
        if record.settlement.block() != Some(block) {
            let step = SettlementStep::Settle { transaction, block: Some(block), fee: record.fee };
            self.record(&record.key, step).await;
        }
        if finalized.is_some_and(|finalized| block <= finalized) {
            self.record(&record.key, SettlementStep::Finalize).await;
        }
        Ok(())
    }

    /// The receipt; that there is none is believed the second time, of the first transaction after a pause: many may be gone.
    async fn receipt_at_last(&self, transaction: B256, waited: &mut bool) -> Result<Option<Receipt>, FacilitatorError> {
        if let Some(receipt) = self.rpc.receipt(transaction).await? {
            return Ok(Some(receipt));
        }
        if !std::mem::replace(waited, true) {
            tokio::time::sleep(self.pace.poll_interval()).await;
        }
        Ok(self.rpc.receipt(transaction).await?)
    }

    /// Whether what paid it, of which there is no receipt, is on the chain all the same: nodes keep receipts for a time only. Its block
    /// should be final, the authorization is used, and nothing else is known to have used it.
    async fn is_forgotten(&self, record: &Record, finalized: Option<u64>) -> Result<bool, FacilitatorError> {
        let Some(block) = record.settlement.block().filter(|block| finalized.is_some_and(|last| *block <= last)) else {
            return Ok(false);
        };
        let payment = record.payment();
        let (facts, _) = self.verify(&payment).await?;
        if !facts.used {
            return Ok(false);
        }
        let seen_unused = record.block_seen.unwrap_or(block.saturating_sub(1));
        let last = facts.block.min(block.saturating_add(SOON));
        let found =
            authorization_use::find(&self.rpc, &ExpectedTransfer::of_payment(&payment), seen_unused, last).await;
        // Whoever keeps no receipts may refuse to search, too.
        Ok(!matches!(found, Ok(Use::Paid { .. } | Use::Wasted { .. })))
    }

    async fn settled(
        &self,
        up_to_block: Option<u64>,
        after: Option<PaymentKey>,
        limit: usize,
    ) -> Result<Vec<Record>, FacilitatorError> {
        let listing = Listing {
            network: Some(self.network),
            up_to_block,
            after,
            limit,
            ..Listing::of([SettlementState::Settled])
        };
        Ok(self.ledger.list(&listing).await?)
    }
}
