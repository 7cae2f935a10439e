//! Refunds, with the claim that goes before in the same transaction.

use std::{slice, time::Duration};

use alloy_primitives::{Bytes, U256, keccak256};
use alloy_sol_types::{SolCall, SolValue as _};

use super::{Attempts, Inner, unavailable};
use crate::{
    chain::escrow,
    facilitator::{
        FacilitatorError,
        channels::{ChannelError, Executed, SignedRefund, gas},
    },
    settlement::line::Urgency,
    vouchers::{ChannelId, ChannelObservation, ChannelPayload, Claim, RefundRequest, abi::BatchSettlement, reason},
};

impl Inner {
    pub(super) async fn refund(&self, refund: &SignedRefund) -> Result<Executed, ChannelError> {
        let mut attempts = Attempts::default();
        match self.try_to_refund(refund, &mut attempts).await {
            // The signatures are on the chain.
            Err(ChannelError::Unavailable(_)) if attempts.wasted > 0 => {
                Err(ChannelError::Pending { transaction: None })
            }
            refunded => refunded,
        }
    }

    async fn try_to_refund(&self, refund: &SignedRefund, attempts: &mut Attempts) -> Result<Executed, ChannelError> {
        let order = &refund.order;
        self.asset(order.config.token)?;
        let channel = self.escrow.channel_id(&order.config);
        if order.amount == 0 {
            return Err(ChannelError::rejected(reason::REFUND_AMOUNT_INVALID, "a refund of nothing"));
        }
        if order.claim.as_ref().is_some_and(|claim| claim.voucher.channel != order.config) {
            return Err(ChannelError::rejected(reason::REFUND_PAYLOAD, "the claim is of another channel"));
        }
        let to_claim = order.claim.as_ref().map_or(0, |claim| claim.total_claimed);
        let mut turn = None;
        let what = keccak256((channel.digest(), U256::from(order.nonce)).abi_encode());
        self.sender.outlive_predecessors().await?;
        loop {
            let before = attempts.read(self.observe_one(channel).await)?;
            if before.state.refund_nonce > order.nonce {
                return self.find_refund(refund, channel, before).await;
            }
            if turn.is_none() {
                // The seller asks again, for as long as the channel is idle, and so may the payer.
                let refused = "refunds to a payer whose last ones reverted";
                attempts.next_for(order.config.payer, &self.refund_backoff, refused)?;
            }
            let sent = match self.sender.join(what).await {
                // An earlier request of the same left it under way.
                Some(sent) => self.later_than(before.block, sent?),
                None => {
                    if before.state.balance <= before.state.total_claimed.max(to_claim) {
                        return Err(ChannelError::rejected(reason::REFUND_NO_BALANCE, "nothing is left to refund"));
                    }
                    self.check_spare_gas().await?;
                    let claim = order.claim.as_ref().filter(|claim| claim.total_claimed > before.state.total_claimed);
                    let input = call(refund, claim)?;
                    let limit = match self.simulate(self.sender(), &input, attempts.gas_left(gas::REFUND)).await? {
                        Ok(limit) => limit,
                        Err(why) => {
                            // The refund may have been made a moment ago, by another process.
                            let now = self.observe_one(channel).await?;
                            if now.state.refund_nonce > order.nonce {
                                return self.find_refund(refund, channel, now).await;
                            }
                            // Or its transaction is in the pool, and the node simulates after that.
                            if escrow::is_refund_pending(self.node.rpc(), channel, order.nonce).await {
                                return Err(ChannelError::Pending { transaction: None });
                            }
                            return Err(ChannelError::rejected(reason::REFUND_SIMULATION_FAILED, why));
                        }
                    };
                    if !self.enter(&mut turn, Urgency::refund(order.amount)).await? {
                        continue;
                    }
                    self.send(&mut turn, what, (input, limit), payload(refund, claim), before.block).await
                }
            };
            let reverted = reason::REFUND_TRANSACTION_FAILED;
            let Some(receipt) = attempts.succeeded(sent, reverted, gas::REFUND) else { continue };
            let transaction = receipt.transaction_hash;
            let after = self.observe_at(&[channel], receipt.block()).await.and_then(|mut all| all.pop());
            let is_claimed = to_claim <= before.state.total_claimed
                || escrow::events::<BatchSettlement::Claimed>(&receipt)
                    .any(|event| (event.channelId, event.newTotalClaimed) == (channel.digest(), to_claim))
                || after.is_some_and(|after| after.state.total_claimed >= to_claim);
            return match (refunded(&receipt, channel, order.amount), after) {
                (Some(amount), after) if is_claimed => {
                    let observed = after.unwrap_or_else(|| expected(before, amount, to_claim, receipt.block()));
                    Ok(Executed { transaction, amount, observed })
                }
                // A claim came first and took all: the contract then refunds nothing, without an event.
                (None, Some(after)) if after.state.refund_nonce > order.nonce && after.state.available() == 0 => {
                    Err(ChannelError::rejected(reason::REFUND_NO_BALANCE, "nothing was left to refund"))
                }
                _ => Err(ChannelError::Pending { transaction: Some(transaction) }),
            };
        }
    }

    /// Finds the transaction that used the order's nonce.
    async fn find_refund(
        &self,
        refund: &SignedRefund,
        channel: ChannelId,
        now: ChannelObservation,
    ) -> Result<Executed, ChannelError> {
        let order = &refund.order;
        let asked = (&order.config, order.amount, order.nonce);
        let found = escrow::find_refund(self.node.rpc(), channel, asked, now.block).await.map_err(unavailable)?;
        let amount = found.as_ref().and_then(|receipt| refunded(receipt, channel, order.amount));
        match (found, amount) {
            (Some(receipt), Some(amount)) => {
                Ok(Executed { transaction: receipt.transaction_hash, amount, observed: now })
            }
            _ => Err(FacilitatorError::Unreachable {
                what: "the transaction that used the refund's nonce",
                retry_after: Duration::from_secs(2),
            }
            .into()),
        }
    }
}

/// Returns the amount that a transaction refunded to the channel's payer.
fn refunded(receipt: &crate::chain::rpc::Receipt, channel: ChannelId, most: u128) -> Option<u128> {
    let is_expected =
        |event: &BatchSettlement::Refunded| event.channelId == channel.digest() && (1..=most).contains(&event.amount);
    escrow::events(receipt).find(is_expected).filter(|_| receipt.succeeded()).map(|event| event.amount)
}

/// The channel after a refund, if the node does not show it.
fn expected(before: ChannelObservation, amount: u128, claimed: u128, block: u64) -> ChannelObservation {
    let mut after = ChannelObservation { block, ..before };
    after.state.total_claimed = after.state.total_claimed.max(claimed);
    after.state.balance = after.state.balance.saturating_sub(amount);
    after.state.refund_nonce = after.state.refund_nonce.saturating_add(1);
    after.withdrawal = after.withdrawal.saturating_sub(amount);
    if after.withdrawal == 0 {
        after.state.withdraw_requested_at = 0;
    }
    after
}

/// The message that asks a facilitator for the refund, after this claim.
fn payload(refund: &SignedRefund, claim: Option<&Claim>) -> ChannelPayload {
    let order = &refund.order;
    ChannelPayload::Refund(Box::new(RefundRequest {
        channel_config: order.config,
        voucher: order.voucher.clone(),
        amount: Some(order.amount),
        refund_nonce: Some(order.nonce),
        claims: Some(claim.into_iter().cloned().collect()),
        refund_authorizer_signature: Some(refund.refund_signature.clone()),
        claim_authorizer_signature: claim.and(refund.claim_signature.clone()),
    }))
}

/// The call that refunds, after this claim.
fn call(refund: &SignedRefund, claim: Option<&Claim>) -> Result<Bytes, ChannelError> {
    let order = &refund.order;
    let alone = BatchSettlement::refundWithSignatureCall {
        config: (&order.config).into(),
        amount: order.amount,
        nonce: U256::from(order.nonce),
        receiverAuthorizerSignature: refund.refund_signature.clone(),
    };
    let alone = Bytes::from(alone.abi_encode());
    let Some(claim) = claim else { return Ok(alone) };
    let signature = refund.claim_signature.clone().ok_or_else(|| {
        ChannelError::rejected(reason::AUTHORIZER_NOT_CONFIGURED, "the claim lacks the authorizer's signature")
    })?;
    let claim = BatchSettlement::claimWithSignatureCall {
        voucherClaims: slice::from_ref(claim).iter().map(Into::into).collect(),
        authorizerSignature: signature,
    };
    let data = vec![claim.abi_encode().into(), alone];
    Ok(BatchSettlement::multicallCall { data }.abi_encode().into())
}

#[cfg(test)]
mod tests {
    use alloy_primitives::B256;

    use super::*;
    use crate::vouchers::ChannelState;

    #[test]
    fn a_refund_lowers_the_withdrawal_and_ends_it_when_nothing_is_left() {
        let state = ChannelState {
            channel_id: B256::repeat_byte(1).into(),
            balance: 1_000,
            total_claimed: 100,
            withdraw_requested_at: 7,
            refund_nonce: 3,
            charged_cumulative_amount: None,
        };
        let before = ChannelObservation { state, withdrawal: 500, block: 8, time: 7 };
        for (amount, withdrawal, requested_at) in [(499, 1, 7), (500, 0, 0), (501, 0, 0)] {
            let after = expected(before, amount, 200, 9);
            let state = (after.state.balance, after.state.total_claimed, after.state.refund_nonce);
            assert_eq!((state, after.block), ((1_000 - amount, 200, 4), 9));
            assert_eq!((after.withdrawal, after.state.withdraw_requested_at), (withdrawal, requested_at));
        }
    }
}
