//! Settlements that a node of the seller's confirmed, until their blocks are final.

use std::{collections::HashMap, sync::Arc, time::Duration};

use tokio::time::sleep;

use super::{
    Remote,
    witness::{Chain, Head, Witness},
};
use crate::{
    facilitator::FacilitatorError,
    ledger::{LedgerError, Listing, Record, SettlementState, SettlementStep},
    network::Network,
    payment::PaymentKey,
    telemetry,
};

/// That a settlement is gone is believed the second time: the node may be behind the one that was asked before.
const SECOND_LOOK: Duration = Duration::from_millis(500);

/// How far each chain was followed: the newest block seen, and the newest final one.
pub(super) type Horizons = HashMap<Network, (Head, u64)>;

impl Remote {
    /// Records what has become final, and notices what a reorganization undid: at once if the newest block that was seen is gone,
    /// and at the latest when what was settled should be final. A node that is down keeps nobody from the chains of others.
    pub(super) async fn follow_the_chains(self: &Arc<Self>, horizons: &mut Horizons) {
        for (network, witness) in &self.witnesses {
            if let Err(error) = self.follow_the_chain(*network, witness.as_ref(), horizons).await {
                tracing::warn!(%error, %network, "settled payments could not be looked after");
            }
        }
    }

    async fn follow_the_chain(
        self: &Arc<Self>,
        network: Network,
        witness: &dyn Witness,
        horizons: &mut Horizons,
    ) -> Result<(), FacilitatorError> {
        if self.settled(network, None, None, 1).await?.is_empty() {
            horizons.remove(&network);
            return Ok(());
        }
        let seen = horizons.get(&network).copied();
        let Some(Chain { head, finalized, is_gone }) = witness.chain(seen.map(|(head, _)| head)).await? else {
            return Ok(());
        };
        if is_gone {
            tracing::warn!(%network, head = head.number, "the chain was reorganized");
            self.check_settled(network, witness, None).await?;
        }
        if seen.is_none_or(|(_, known)| finalized > known) {
            self.check_settled(network, witness, Some(finalized)).await?;
        }
        // Not before all of that is done, or a failure on the way would make it forgotten.
        horizons.insert(network, (head, finalized));
        Ok(())
    }

    /// Looks again at all that is settled, or at what should be final.
    async fn check_settled(
        self: &Arc<Self>,
        network: Network,
        witness: &dyn Witness,
        finalized: Option<u64>,
    ) -> Result<(), FacilitatorError> {
        let mut after = None;
        loop {
            let page = self.settled(network, finalized, after, 256).await?;
            let Some(last) = page.last() else { return Ok(()) };
            after = Some(last.key);
            for record in page {
                self.check(record, witness, finalized).await?;
            }
        }
    }

    async fn check(
        self: &Arc<Self>,
        record: Record,
        witness: &dyn Witness,
        finalized: Option<u64>,
    ) -> Result<(), FacilitatorError> {
        let Some(transaction) = record.settlement.paid_by() else { return Ok(()) };
        let payment = record.payment();
        let mut block = witness.paid_now(&payment, transaction).await?;
        if block.is_none() {
            sleep(SECOND_LOOK).await;
            block = witness.paid_now(&payment, transaction).await?;
        }
        let Some(block) = block else { return self.undo(record).await };
        if record.settlement.block() != Some(block) {
            self.step(&record.key, SettlementStep::Settle { transaction, block: Some(block), fee: None }).await?;
        }
        if finalized.is_some_and(|finalized| block <= finalized) {
            self.step(&record.key, SettlementStep::Finalize).await?;
        }
        Ok(())
    }

    /// It was paid and is not any more: due again, and settled again if the payer has the answer.
    async fn undo(self: &Arc<Self>, record: Record) -> Result<(), FacilitatorError> {
        let Some(now) = self.ledger.get(&record.key).await? else { return Ok(()) };
        // Another process noticed it, too.
        if now.settlement.paid_by() != record.settlement.paid_by() {
            return Ok(());
        }
        tracing::warn!(payer = %record.key.payer, nonce = %record.key.nonce, "a settlement was undone");
        telemetry::undone(record.key.network);
        self.step(&record.key, SettlementStep::Reorg).await?;
        match self.ledger.get(&record.key).await? {
            Some(record) if record.settlement.state() == SettlementState::Due => self.take_up(record).await,
            _ => Ok(()),
        }
    }

    async fn settled(
        &self,
        network: Network,
        up_to_block: Option<u64>,
        after: Option<PaymentKey>,
        limit: usize,
    ) -> Result<Vec<Record>, FacilitatorError> {
        let settled = Listing::of([SettlementState::Settled]);
        let listing = Listing { network: Some(network), up_to_block, after, limit, ..settled };
        Ok(self.ledger.list(&listing).await?)
    }

    async fn step(&self, key: &PaymentKey, step: SettlementStep) -> Result<(), FacilitatorError> {
        match self.ledger.settle(key, &step).await {
            // Somebody else knows as much.
            Ok(()) | Err(LedgerError::InvalidTransition(_) | LedgerError::NotFound) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}
