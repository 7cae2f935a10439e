//! Claims: rows that the contract would refuse are left out, the others share transactions.

use alloy_primitives::{Address, Bytes};
use alloy_sol_types::SolCall;

use super::{ATTEMPTS, Inner};
use crate::{
    chain::escrow,
    facilitator::channels::{ChannelError, Claimed, RefusedClaim},
    vouchers::{AuthorizerKey, ChannelId, ChannelObservation, Claim, abi::BatchSettlement, reason},
};

/// Rows per transaction. Each takes about 25,000 gas, of 16 million.
const ROWS: usize = 200;

/// A row, and its index among those that were asked for.
#[derive(Clone, Copy)]
struct Row<'a> {
    index: usize,
    channel: ChannelId,
    claim: &'a Claim,
}

/// A row that the contract would refuse, and why.
type RefusedRow<'a> = (Row<'a>, String);

impl Inner {
    pub(super) async fn claim(&self, claims: &[Claim], authorizer: &AuthorizerKey) -> Result<Claimed, ChannelError> {
        let rows = self.rows(claims);
        let mut claimed = Claimed::default();
        for part in rows.chunks(ROWS) {
            self.claim_part(part, authorizer, &mut claimed).await?;
        }
        claimed.refused.sort_by_key(|refused| refused.index);
        Ok(claimed)
    }

    pub(super) async fn claim_signed(&self, claims: &[Claim], signature: &Bytes) -> Result<Claimed, ChannelError> {
        let rows = self.rows(claims);
        if rows.is_empty() {
            return Err(ChannelError::rejected(reason::CLAIM_PAYLOAD, "a batch of no claims"));
        }
        let input = with_signature(&rows, signature.clone());
        let mut claimed = Claimed::default();
        for _ in 0..ATTEMPTS {
            let before = self.observe(&ids(&rows)).await?;
            if open(&rows, &before).is_empty() {
                claimed.observed = before;
                return Ok(claimed);
            }
            let simulated = self.simulate(self.sender(), &input).await?;
            let gas = simulated.map_err(|why| ChannelError::rejected(reason::CLAIM_SIMULATION_FAILED, why))?;
            if self.send_claim(&rows, input.clone(), gas, &before, &mut claimed).await? {
                return Ok(claimed);
            }
        }
        Err(reverted())
    }

    async fn claim_part(
        &self,
        part: &[Row<'_>],
        authorizer: &AuthorizerKey,
        claimed: &mut Claimed,
    ) -> Result<(), ChannelError> {
        for _ in 0..ATTEMPTS {
            let before = self.observe(&ids(part)).await?;
            let (refused, call) = self.prepare(open(part, &before), authorizer).await?;
            let is_kept =
                |(row, _): &(&Row<'_>, ChannelObservation)| refused.iter().all(|(bad, _)| bad.index != row.index);
            let (kept, before): (Vec<Row<'_>>, Vec<ChannelObservation>) =
                part.iter().zip(before).filter(is_kept).map(|(row, before)| (*row, before)).unzip();
            match call {
                Some((input, gas)) => {
                    if !self.send_claim(&kept, input, gas, &before, claimed).await? {
                        continue;
                    }
                }
                None => claimed.observed.extend(before),
            }
            let named = refused.into_iter().map(|(row, detail)| RefusedClaim {
                index: row.index,
                channel: row.channel,
                detail,
            });
            claimed.refused.extend(named);
            return Ok(());
        }
        Err(reverted())
    }

    /// Returns the rows that the contract would refuse, and the call that claims the others with its gas limit, if there are any.
    async fn prepare<'a>(
        &self,
        rows: Vec<Row<'a>>,
        authorizer: &AuthorizerKey,
    ) -> Result<(Vec<RefusedRow<'a>>, Option<(Bytes, u64)>), ChannelError> {
        if rows.is_empty() {
            return Ok((Vec::new(), None));
        }
        let input = self.claim_input(&rows, authorizer).await?;
        if let Ok(gas) = self.simulate(self.sender(), &input).await? {
            return Ok((Vec::new(), Some((input, gas))));
        }
        let (good, refused) = self.split(rows, authorizer.address()).await?;
        if good.is_empty() {
            return Ok((refused, None));
        }
        let input = self.claim_input(&good, authorizer).await?;
        let simulated = self.simulate(self.sender(), &input).await?;
        let gas = simulated.map_err(|why| ChannelError::rejected(reason::CLAIM_SIMULATION_FAILED, why))?;
        Ok((refused, Some((input, gas))))
    }

    /// Sends a batch. Returns `false` if its transaction reverted.
    async fn send_claim(
        &self,
        rows: &[Row<'_>],
        input: Bytes,
        gas: u64,
        before: &[ChannelObservation],
        claimed: &mut Claimed,
    ) -> Result<bool, ChannelError> {
        let receipt = self.send(input, gas).await?;
        if !receipt.succeeded() {
            return Ok(false);
        }
        let transaction = receipt.transaction_hash;
        let events: Vec<BatchSettlement::Claimed> = escrow::events(&receipt).collect();
        let is_claimed = |row: &Row<'_>, before: &ChannelObservation| {
            let expected = (row.channel.digest(), row.claim.total_claimed);
            row.claim.total_claimed <= before.state.total_claimed
                || events.iter().any(|event| (event.channelId, event.newTotalClaimed) == expected)
        };
        let after = self.observe_at(&ids(rows), receipt.block()).await;
        // A row without an event was claimed by somebody else a moment before, or the node does not tell the truth.
        let has_all = rows.iter().zip(before).enumerate().all(|(index, (row, before))| {
            let after = after.as_ref().and_then(|after| after.get(index));
            is_claimed(row, before) || after.is_some_and(|after| after.state.total_claimed >= row.claim.total_claimed)
        });
        if !has_all {
            return Err(ChannelError::Pending { transaction: Some(transaction) });
        }
        claimed.transactions.push(transaction);
        let is_ours =
            |event: &&BatchSettlement::Claimed| rows.iter().any(|row| row.channel.digest() == event.channelId);
        let amounts = events.iter().filter(is_ours).map(|event| event.claimAmount);
        claimed.amount = amounts.fold(claimed.amount, u128::saturating_add);
        claimed.observed.extend(after.unwrap_or_else(|| {
            let row_after = |(row, before): (&Row<'_>, &ChannelObservation)| {
                let mut after = ChannelObservation { block: receipt.block(), ..*before };
                after.state.total_claimed = after.state.total_claimed.max(row.claim.total_claimed);
                after
            };
            rows.iter().zip(before).map(row_after).collect()
        }));
        Ok(true)
    }

    /// Splits rows into those that the contract would claim together, and those that it would refuse, with the reason.
    async fn split<'a>(
        &self,
        rows: Vec<Row<'a>>,
        authorizer: Address,
    ) -> Result<(Vec<Row<'a>>, Vec<RefusedRow<'a>>), ChannelError> {
        let (mut good, mut refused) = (Vec::new(), Vec::new());
        let mut parts = vec![rows];
        while let Some(mut part) = parts.pop() {
            if part.is_empty() {
                continue;
            }
            // As the authorizer, which needs no signature: each part would need another one.
            match self.simulate(authorizer, &without_signature(&part)).await? {
                Ok(_) => good.append(&mut part),
                Err(why) if part.len() == 1 => refused.extend(part.into_iter().map(|row| (row, why.clone()))),
                Err(_) => {
                    let second = part.split_off(part.len() / 2);
                    parts.extend([second, part]);
                }
            }
        }
        Ok((good, refused))
    }

    /// Returns the call that claims these rows: signed, unless the sender is the authorizer.
    async fn claim_input(&self, rows: &[Row<'_>], authorizer: &AuthorizerKey) -> Result<Bytes, ChannelError> {
        let mut senders = self.caller.addresses();
        if (senders.next(), senders.next()) == (Some(authorizer.address()), None) {
            return Ok(without_signature(rows));
        }
        let claims: Vec<Claim> = rows.iter().map(|row| row.claim.clone()).collect();
        Ok(with_signature(rows, authorizer.sign_claims(&self.escrow, &claims).await?))
    }

    fn rows<'a>(&self, claims: &'a [Claim]) -> Vec<Row<'a>> {
        let row = |(index, claim): (usize, &'a Claim)| Row {
            index,
            channel: self.escrow.channel_id(&claim.voucher.channel),
            claim,
        };
        claims.iter().enumerate().map(row).collect()
    }
}

/// Returns the rows that claim more than was claimed before.
fn open<'a>(rows: &[Row<'a>], before: &[ChannelObservation]) -> Vec<Row<'a>> {
    let is_open =
        |(row, before): &(&Row<'a>, &ChannelObservation)| row.claim.total_claimed > before.state.total_claimed;
    rows.iter().zip(before).filter(is_open).map(|(row, _)| *row).collect()
}

fn ids(rows: &[Row<'_>]) -> Vec<ChannelId> {
    rows.iter().map(|row| row.channel).collect()
}

fn without_signature(rows: &[Row<'_>]) -> Bytes {
    let claims = rows.iter().map(|row| row.claim.into()).collect();
    BatchSettlement::claimCall { voucherClaims: claims }.abi_encode().into()
}

fn with_signature(rows: &[Row<'_>], signature: Bytes) -> Bytes {
    let claims = rows.iter().map(|row| row.claim.into()).collect();
    let call = BatchSettlement::claimWithSignatureCall { voucherClaims: claims, authorizerSignature: signature };
    call.abi_encode().into()
}

fn reverted() -> ChannelError {
    ChannelError::rejected(reason::CLAIM_TRANSACTION_FAILED, "the transaction reverted")
}
