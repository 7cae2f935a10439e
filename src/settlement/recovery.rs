//! Transactions that no task follows: journalled by a process that died, lost by the node, or stuck.
//!
//! They are sent again, gaps before them are filled, and those that block all later ones are replaced.

use std::sync::Arc;

use alloy_consensus::{Transaction as _, TxEnvelope};
use alloy_eips::Decodable2718 as _;
use tokio::{sync::Mutex, time::sleep};

use super::{accounts::Account, load::Call, submitter::Submitter};
use crate::{
    chain::{broadcast::SendResult, fees::Fees, rpc::RpcFailure},
    ledger::{JournaledTransaction, NONCE_HELD_SECONDS, Record},
    settlement::FacilitatorError,
    telemetry,
    vouchers::Escrow,
};

/// How long after it was journalled a transaction that no task follows is sent again, in seconds.
const QUIET: u64 = 10;
/// A call that offers so many times the market's fees waits for something other than higher fees.
const HIGH_OFFER: u128 = 4;
/// How far a node may lag behind another one, at least.
const MIN_LAG: std::time::Duration = std::time::Duration::from_millis(500);

/// Sends journalled transactions again.
pub(crate) struct Recovery {
    submitter: Arc<Submitter>,
    /// Held while journalled transactions are sent again.
    resending: Mutex<()>,
}

impl Recovery {
    pub(super) fn new(submitter: Arc<Submitter>) -> Self {
        Self { submitter, resending: Mutex::default() }
    }

    /// Sends the journalled transactions that no task follows. Recent ones are left to the process that just sent them, unless
    /// `include_recent`, or if that has not been done for all accounts since the start. Returns the number of accounts for which it is not
    /// known what is in flight.
    pub(super) async fn resend(&self, include_recent: bool) -> usize {
        let _exclusive = self.resending.lock().await;
        let has_recovered = *self.submitter.has_recovered.borrow();
        let failed = self.resend_all(include_recent || !has_recovered).await;
        if failed == 0 && !has_recovered {
            self.submitter.has_recovered.send_replace(true);
        }
        failed
    }

    /// Sends everything that is journalled, since the chain was reorganized. Returns the number of accounts for which that failed.
    pub(super) async fn resend_after_reorg(&self) -> usize {
        let _exclusive = self.resending.lock().await;
        self.submitter.accounts().iter().for_each(Account::rewind);
        self.resend_all(true).await
    }

    /// Returns `true` if a transaction of the payment would be sent again although no node has it now.
    pub(super) async fn will_resend(&self, record: &Record) -> Result<bool, FacilitatorError> {
        for account in self.submitter.accounts().iter() {
            let submissions = self.submitter.submissions(account).await?;
            if submissions.iter().any(|submission| record.transactions.contains(&submission.hash)) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Returns `true` if a transaction that was in a block is in none now. Blocks that came and went between two passes leave no other
    /// trace, and all later transactions wait for its nonce.
    pub(super) async fn has_lost_transactions(&self) -> Result<bool, FacilitatorError> {
        for account in self.submitter.accounts().iter() {
            let seen = account.consumed();
            if seen > 0 && account.chain_nonce("latest").await? < seen {
                // The node may lag behind the one asked before. Then it catches up, or does not have the newest block that was seen.
                sleep(self.submitter.node().block_time().clamp(MIN_LAG, 4 * MIN_LAG)).await;
                let newest = self.submitter.node().ask_newest_block().await;
                if account.nonce_in(newest).await.is_ok_and(|nonce| nonce < seen) {
                    return Ok(true);
                }
            }
        }
        Ok(false)
    }

    /// Returns `true` if transactions are in blocks that may not be final.
    pub(super) fn has_unfinal(&self) -> bool {
        self.submitter.accounts().iter().any(Account::has_unfinal)
    }

    /// Forgets the journalled transactions of nonces that are in final blocks.
    pub(super) async fn forget_final(&self) -> Result<(), FacilitatorError> {
        for account in self.submitter.accounts().iter() {
            let below = account.chain_nonce("finalized").await?;
            self.submitter.journal().ledger().forget_nonces(&self.submitter.sender(account), below).await?;
            account.finalized_below(below);
        }
        Ok(())
    }

    async fn resend_all(&self, include_recent: bool) -> usize {
        let mut failed = 0;
        for account in self.submitter.accounts().iter() {
            if let Err(error) = self.resend_of(account, include_recent).await {
                tracing::warn!(%error, account = %account.address(), "a settlement key's transactions could not be sent again");
                failed += 1;
            }
        }
        failed
    }

    async fn resend_of(&self, account: &Account, include_recent: bool) -> Result<(), FacilitatorError> {
        let now = self.submitter.journal().now();
        let is_old = |submission: &JournaledTransaction| include_recent || submission.at.saturating_add(QUIET) < now;
        if !self.submitter.submissions(account).await?.iter().any(is_old) {
            return Ok(());
        }
        account.consumed_below(account.chain_nonce("latest").await?);
        // Not those that are in blocks: they may be as many as are listed at once.
        let (next, mut waiting) = (account.consumed(), self.submitter.submissions(account).await?);
        if waiting.first().is_some_and(|first| first.nonce > next && is_old(first)) {
            // The nonce's process gave it back and died, or has nothing more to send.
            telemetry::gap_filled(self.submitter.node().network());
            tracing::warn!(account_nonce = next, "filling a gap in the nonces that later transactions wait for");
            if let Err(error) = self.fill_gap(account, next).await {
                tracing::warn!(%error, account_nonce = next, "a gap in the nonces cannot be filled");
            }
        }
        waiting.retain(is_old);
        for submission in waiting.into_iter().filter(|submission| !self.submitter.is_watched(submission.hash)) {
            tracing::info!(transaction = %submission.hash, account_nonce = submission.nonce, "sending a journalled transaction again");
            let sent = self.submitter.node().resend(&submission.raw).await;
            let is_held = submission.at.saturating_add(NONCE_HELD_SECONDS) >= now;
            if matches!(sent, SendResult::Unknown) && is_held {
                // It must be known whether the transaction is in flight before its payments are reconciled.
                return Err(RpcFailure::Silent.into());
            }
            if submission.nonce == next
                && submission.at.saturating_add(NONCE_HELD_SECONDS) < now
                && let Err(error) = self.replace_stuck(account, &submission).await
            {
                tracing::warn!(%error, account_nonce = next, "a transaction that is stuck cannot be replaced");
            }
        }
        Ok(())
    }

    async fn fill_gap(&self, account: &Account, nonce: u64) -> Result<(), FacilitatorError> {
        let call = Call::filler(account);
        let fees = self.submitter.node().fees_up_to(self.submitter.hurried(account, nonce, call.gas_limit)).await?;
        self.send(account, nonce, call, fees).await
    }

    /// Replaces a transaction that blocks all later ones and that no process follows by one with higher fees, unless its fees cannot be the
    /// reason. A call is made by it; payments are open again then, and its nonce is only used up.
    async fn replace_stuck(&self, account: &Account, stuck: &JournaledTransaction) -> Result<(), FacilitatorError> {
        let Ok(envelope) = TxEnvelope::decode_2718(&mut stuck.raw.as_ref()) else { return Ok(()) };
        let offered =
            Fees { max_fee: envelope.max_fee_per_gas(), tip: envelope.max_priority_fee_per_gas().unwrap_or_default() };
        // A batch whose payments have all ended was replaced without them.
        let is_call = stuck.payments.is_empty() && envelope.to() == Some(Escrow::ADDRESS);
        let call = Call::of(&envelope).filter(|_| is_call).unwrap_or_else(|| Call::filler(account));
        let most = self.submitter.hurried(account, stuck.nonce, 0);
        let market = self.submitter.node().fees_up_to(most).await?;
        let is_high = |offered: u128, market: u128| offered >= market.saturating_mul(HIGH_OFFER);
        if stuck.payments.is_empty() && is_high(offered.max_fee, market.max_fee) && is_high(offered.tip, market.tip) {
            // No blocks come, or the node does not pass the transaction on. Higher fees would only cost more when that ends.
            return Ok(());
        }
        let fees = self.submitter.node().raised_fees_up_to(offered, most).await?;
        telemetry::replaced(self.submitter.node().network(), "stuck");
        tracing::warn!(account_nonce = stuck.nonce, max_fee = fees.max_fee, "replacing a transaction that is stuck");
        self.send(account, stuck.nonce, call, fees).await
    }

    /// Makes a call with this nonce, unless another process uses it now.
    async fn send(&self, account: &Account, nonce: u64, call: Call, fees: Fees) -> Result<(), FacilitatorError> {
        if let Some(signed) = self.submitter.prepare(account, nonce, (call, fees)).await? {
            self.submitter.node().resend(&signed.raw).await;
        }
        Ok(())
    }
}
