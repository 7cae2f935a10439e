//! Gaps in the nonces, and filling them.

use std::{sync::Arc, time::Duration};

use alloy_primitives::Bytes;
use tokio::time::{Instant, sleep};

use super::{
    engine::{Engine, QUEUE_PATIENCE, WATCH_LIMIT},
    nonce_manager::{NonceManager, Slot},
};
use crate::{
    chain::{
        broadcast::Sent,
        confirm::{Flight, Seen},
    },
    ledger::LedgerError,
    settlement::FacilitatorError,
    telemetry,
};

/// How long a gap may wait for a payment to fill it.
const GAP_PATIENCE: Duration = Duration::from_millis(300);
/// How often filling gaps is tried before it is left to the next payment.
const MAX_FILLERS: usize = 64;
/// Gas for a transfer of nothing to oneself.
const FILLER_GAS: u64 = 21_000;

impl Engine {
    /// Gives a nonce back and sees to it that nobody waits for it. Returns whether the ledger took it back: if not, the upkeep may send
    /// its transaction again.
    pub(super) async fn give_back(self: &Arc<Self>, slot: Slot) -> bool {
        let nonce = slot.nonce();
        // While nobody here can take it yet: what is freed must not be in use again already.
        let freed = self.ledger.free_nonce(&self.sender(slot.lane()), nonce, self.process).await;
        if let Err(error) = &freed {
            tracing::warn!(%error, lane_nonce = nonce, "a nonce was not given back; other processes wait for it a while");
        }
        let lane = slot.lane().clone();
        slot.release();
        self.queue.changed.notify_one();
        if lane.begin_filling() {
            tokio::spawn(self.clone().fill_gaps(lane));
        }
        freed.is_ok()
    }

    /// Fills gaps that no payment fills soon with transfers of nothing to ourselves, so that what is in flight above them can
    /// be included.
    async fn fill_gaps(self: Arc<Self>, lane: NonceManager) {
        let mut pause = GAP_PATIENCE.max(2 * self.pace.poll_interval());
        for _ in 0..MAX_FILLERS {
            sleep(pause).await;
            if !lane.has_gap() {
                lane.end_filling();
                // One that came between these two lines is nobody else's.
                match lane.begin_filling() {
                    true => continue,
                    false => return,
                }
            }
            let Some(slot) = lane.take_gap(QUEUE_PATIENCE).await else { continue };
            let nonce = slot.nonce();
            match self.fill(slot).await {
                Ok(()) => {
                    telemetry::gap_filled(self.network);
                    tracing::info!(lane_nonce = nonce, "filling a gap in the nonces");
                }
                Err(error) => {
                    tracing::warn!(lane_nonce = nonce, %error, "a gap in the nonces cannot be filled");
                    pause = (2 * pause).min(Duration::from_secs(10));
                }
            }
        }
        lane.end_filling();
    }

    async fn fill(self: &Arc<Self>, mut slot: Slot) -> Result<(), FacilitatorError> {
        let fees = self.fees.get(&self.rpc).await?;
        let transaction = self.transaction(slot.nonce(), fees, FILLER_GAS, slot.lane().account(), Bytes::new());
        let signed = self.sign(slot.lane(), transaction).await?;
        match self.ledger.submit(self.submission(&slot, &signed, Vec::new())).await {
            Ok(()) => {}
            // It is no gap, but another process's.
            Err(LedgerError::NonceTaken { .. }) => {
                slot.displaced();
                return Ok(());
            }
            Err(error) => return Err(error.into()),
        }
        slot.sent();
        let sent = self.node.resend(&self.rpc, &signed.raw).await;
        match sent {
            Sent::Included(_) | Sent::Pooled | Sent::Perhaps => {}
            Sent::NonceUsed => {
                slot.consumed_by_another();
                return Ok(());
            }
            Sent::NonceContested => {
                slot.displaced();
                return Ok(());
            }
            refusal => {
                // Whether others hear of it soon or late is all that depends on this.
                let _ = self.ledger.free_nonce(&self.sender(slot.lane()), slot.nonce(), self.process).await;
                let lane = slot.lane().clone();
                slot.release();
                return self.refused(&lane, refusal).await;
            }
        }
        let engine = self.clone();
        let mut flight = Flight::new(signed.raw, signed.hash, matches!(sent, Sent::Pooled), &self.pace);
        tokio::spawn(async move {
            let started = Instant::now();
            match flight.watch(&engine.rpc, &engine.node, &engine.pace, started + WATCH_LIMIT).await {
                Seen::Included(receipt) => {
                    engine.account(&receipt, started);
                    slot.consumed();
                }
                Seen::Displaced => slot.consumed_by_another(),
                Seen::NotYet => slot.displaced(),
            }
        });
        Ok(())
    }
}
