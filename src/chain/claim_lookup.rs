//! Looking up on a chain whether a charge on a payment channel was claimed.
//!
//! A seller charges off the chain, and claims later: each event `Claimed` of the escrow contract raises what is claimed of a channel. What
//! is claimed cannot be taken back by the payer; refunds and withdrawals take the rest only. So a charge is paid by the transaction whose
//! event raised the total from before the charge to after it, or from less to more.

use alloy_primitives::B256;
use alloy_sol_types::SolEvent as _;
use serde_json::json;

use super::{
    Finality, LookupError, PaymentLookup, PaymentState, escrow, log_search,
    lookup::{NEAR, search_error},
    rpc::{Log, Receipt, RpcFailure},
};
use crate::vouchers::{ChannelId, Escrow, abi::BatchSettlement::Claimed};

/// The charge to look up: one evaluation, or another request, that was paid from a payment channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SoughtCharge {
    /// The channel. Compute its id ([`Escrow::channel_id`]): its configuration says who paid whom.
    pub channel: ChannelId,
    /// What was charged in the channel in all, this charge included, in atomic units.
    pub charged: u128,
    /// The charge, in atomic units.
    pub amount: u128,
}

impl PaymentLookup {
    /// Looks up whether `transaction` claimed the charge, all of it.
    ///
    /// # Errors
    /// [`LookupError`].
    pub async fn claim(&self, charge: &SoughtCharge, transaction: B256) -> Result<PaymentState, LookupError> {
        let latest = self.latest().await?;
        self.look(|receipt| charge.is_claimed_by(receipt), transaction, latest).await
    }

    /// Searches the newest `blocks` blocks for the claim of the charge, the newest first. [`PaymentState::NotFound`] is a charge that is
    /// not claimed, or was claimed before.
    ///
    /// Takes as many requests as [`search`](Self::search), or one if the channel shows that the charge is not claimed.
    ///
    /// # Errors
    /// [`LookupError`].
    pub async fn search_claim(&self, charge: &SoughtCharge, blocks: u64) -> Result<PaymentState, LookupError> {
        let latest = self.latest().await?;
        // One read spares the search for a charge that is not claimed yet.
        let seen = escrow::observe(&self.rpc, self.network, &[charge.channel], None).await;
        if seen.is_ok_and(|seen| seen.iter().all(|channel| channel.state.total_claimed < charge.charged)) {
            return Ok(PaymentState::NotFound);
        }
        let searched = [latest.saturating_sub(blocks).saturating_add(1), latest];
        match self.find_claim(charge, searched).await.map_err(search_error)? {
            Some(transaction) => self.look(|receipt| charge.is_claimed_by(receipt), transaction, latest).await,
            None => Ok(PaymentState::NotFound),
        }
    }

    /// Returns whether the claim that was in this transaction and block is final. It may be in another block by now.
    ///
    /// It is [`Finality::Reorged`] only if a final block shows the charge unclaimed, or claimed by another transaction.
    ///
    /// # Errors
    /// [`LookupError`].
    pub async fn claim_finality(
        &self,
        charge: &SoughtCharge,
        transaction: B256,
        block: u64,
    ) -> Result<Finality, LookupError> {
        let is_gone = async |is_final| self.is_claim_gone(charge, transaction, [block, is_final]).await;
        self.finality_of(transaction, block, |receipt| charge.is_claimed_by(receipt), is_gone).await
    }

    /// Returns the transaction that raised what is claimed of the channel to the charge's end, if it is in these blocks.
    async fn find_claim(&self, charge: &SoughtCharge, blocks: [u64; 2]) -> Result<Option<B256>, RpcFailure> {
        let topics = json!([Claimed::SIGNATURE_HASH, charge.channel.digest()]);
        let is_it = |log: &Log| charge.ends_in(log);
        let found = log_search::find(&self.rpc, Escrow::ADDRESS, &topics, blocks, 0, is_it).await?;
        Ok(found.and_then(|log| log.transaction_hash))
    }

    /// Returns `true` if a claim that was in this block and has no receipt now is gone, as of that final block. A missing receipt proves
    /// nothing.
    async fn is_claim_gone(&self, charge: &SoughtCharge, transaction: B256, [block, is_final]: [u64; 2]) -> bool {
        let observed = escrow::observe(&self.rpc, self.network, &[charge.channel], Some(is_final)).await;
        let Some(channel) = observed.ok().and_then(|channels| channels.first().copied()) else { return false };
        if channel.state.total_claimed < charge.charged {
            return true;
        }
        let near = [block.saturating_sub(NEAR), block.saturating_add(NEAR).min(is_final)];
        matches!(self.find_claim(charge, near).await, Ok(Some(by)) if by != transaction)
    }
}

impl SoughtCharge {
    /// Returns `true` if one event of the transaction claimed the whole charge.
    fn is_claimed_by(&self, receipt: &Receipt) -> bool {
        let start = self.charged.checked_sub(self.amount);
        receipt.succeeded()
            && escrow::events::<Claimed>(receipt).any(|event| {
                let before = event.newTotalClaimed.checked_sub(event.claimAmount);
                event.channelId == self.channel.digest()
                    && before.is_some_and(|before| start.is_some_and(|start| before <= start))
                    && self.charged <= event.newTotalClaimed
            })
    }

    /// Returns `true` if this log is of the claim that took the last unit of the charge.
    fn ends_in(&self, log: &Log) -> bool {
        let event = Claimed::decode_raw_log_validate(log.topics.iter().copied(), &log.data);
        event.is_ok_and(|event| {
            event.channelId == self.channel.digest()
                && event.newTotalClaimed.saturating_sub(event.claimAmount) < self.charged
                && self.charged <= event.newTotalClaimed
        })
    }
}
