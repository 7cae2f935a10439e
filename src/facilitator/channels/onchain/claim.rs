//! Claims: rows that the contract would refuse are left out, the others share transactions.

use alloy_primitives::{Address, Bytes, keccak256};
use alloy_sol_types::SolCall;

use super::{Attempts, Inner, Turn};
use crate::{
    chain::escrow,
    facilitator::{
        FacilitatorError,
        channels::{ChannelError, Claimed, RefusedClaim, gas},
    },
    settlement::line::Urgency,
    vouchers::{AuthorizerKey, ChannelId, ChannelObservation, ChannelPayload, Claim, abi::BatchSettlement, reason},
};

/// A row, and its index among those that were asked for.
#[derive(Clone, Copy)]
struct Row<'a> {
    index: usize,
    channel: ChannelId,
    claim: &'a Claim,
}

impl Row<'_> {
    fn refused(&self, detail: String) -> RefusedClaim {
        RefusedClaim { index: self.index, channel: self.channel, detail }
    }
}

/// A row that the contract would refuse, and why.
type RefusedRow<'a> = (Row<'a>, String);

/// A simulated batch: its call, the gas limit, and the message that asks a facilitator for it.
struct Batch {
    input: Bytes,
    gas: u64,
    payload: ChannelPayload,
}

impl Inner {
    pub(super) async fn claim(&self, claims: &[Claim], authorizer: &AuthorizerKey) -> Result<Claimed, ChannelError> {
        let rows = self.rows(claims);
        let (mut claimed, mut unpaid) = (Claimed::default(), None);
        let mut parts: Vec<&[Row<'_>]> = rows.chunks(self.sender.claims()).rev().collect();
        while let Some(part) = parts.pop() {
            let error = match self.claim_part(part, authorizer, &mut claimed).await {
                Err(ChannelError::Unavailable(error @ FacilitatorError::InsufficientGas { .. })) => error,
                done => {
                    done?;
                    continue;
                }
            };
            // What is left may pay for fewer rows. Where it does not pay for one, each other part is tried once: its rows may cost less.
            if part.len() > 1 && unpaid.is_none() {
                let (first, second) = part.split_at(part.len() / 2);
                parts.extend([second, first]);
                continue;
            }
            claimed.refused.extend(part.iter().map(|row| row.refused(error.to_string())));
            unpaid = Some(error);
        }
        if let Some(error) = unpaid.filter(|_| claimed.observed.is_empty()) {
            return Err(error.into());
        }
        claimed.refused.sort_by_key(|refused| refused.index);
        Ok(claimed)
    }

    pub(super) async fn claim_signed(&self, claims: &[Claim], signature: &Bytes) -> Result<Claimed, ChannelError> {
        let rows = self.rows(claims);
        if rows.is_empty() {
            return Err(ChannelError::rejected(reason::CLAIM_PAYLOAD, "a batch of no claims"));
        }
        for claim in claims {
            self.asset(claim.voucher.channel.token)?;
        }
        let mut claimed = Claimed::default();
        let (mut attempts, mut turn) = (Attempts::default(), None);
        loop {
            let before = attempts.read(self.observe(&ids(&rows)).await)?;
            if open(&rows, &before).is_empty() {
                claimed.observed = before;
                return Ok(claimed);
            }
            if turn.is_none() {
                attempts.next()?;
            }
            let most = attempts.gas_left(gas::claim(rows.len()));
            let simulated = self.simulate_signed(&rows, signature.clone(), most).await?;
            let batch = simulated.map_err(|why| ChannelError::rejected(reason::CLAIM_SIMULATION_FAILED, why))?;
            if !self.enter(&mut turn, Urgency::payment()).await? {
                continue;
            }
            if self.send_claim(&rows, batch, &before, (&mut attempts, &mut turn), &mut claimed).await? {
                return Ok(claimed);
            }
        }
    }

    async fn claim_part(
        &self,
        part: &[Row<'_>],
        authorizer: &AuthorizerKey,
        claimed: &mut Claimed,
    ) -> Result<(), ChannelError> {
        let (mut attempts, mut turn) = (Attempts::default(), None);
        loop {
            let before = attempts.read(self.observe(&ids(part)).await)?;
            let rows = open(part, &before);
            if !rows.is_empty() && turn.is_none() {
                attempts.next()?;
            }
            let (refused, batch) = self.prepare(rows, authorizer, attempts.wasted).await?;
            let is_kept =
                |(row, _): &(&Row<'_>, ChannelObservation)| refused.iter().all(|(bad, _)| bad.index != row.index);
            let (kept, before): (Vec<Row<'_>>, Vec<ChannelObservation>) =
                part.iter().zip(before).filter(is_kept).map(|(row, before)| (*row, before)).unzip();
            match batch {
                Some(batch) => {
                    // It is the seller's own gas.
                    let urgency = Urgency::claim(at_risk(&kept, &before), batch.gas);
                    if !self.enter(&mut turn, urgency).await? {
                        continue;
                    }
                    if !self.send_claim(&kept, batch, &before, (&mut attempts, &mut turn), claimed).await? {
                        continue;
                    }
                }
                None => claimed.observed.extend(before),
            }
            claimed.refused.extend(refused.into_iter().map(|(row, detail)| row.refused(detail)));
            return Ok(());
        }
    }

    /// Returns the rows that the contract would refuse, or that would use too much gas, and the batch that claims the others, if there are any.
    async fn prepare<'a>(
        &self,
        rows: Vec<Row<'a>>,
        authorizer: &AuthorizerKey,
        wasted: u64,
    ) -> Result<(Vec<RefusedRow<'a>>, Option<Batch>), ChannelError> {
        if rows.is_empty() {
            return Ok((Vec::new(), None));
        }
        if let Ok(batch) = self.simulate_claim(&rows, authorizer, wasted).await? {
            return Ok((Vec::new(), Some(batch)));
        }
        let (good, refused) = self.split(rows, authorizer.address()).await?;
        if good.is_empty() {
            return Ok((refused, None));
        }
        let simulated = self.simulate_claim(&good, authorizer, wasted).await?;
        let batch = simulated.map_err(|why| ChannelError::rejected(reason::CLAIM_SIMULATION_FAILED, why))?;
        Ok((refused, Some(batch)))
    }

    /// Sends a batch. Returns `false` if nothing is known to be claimed by it.
    async fn send_claim(
        &self,
        rows: &[Row<'_>],
        Batch { input, gas, payload }: Batch,
        before: &[ChannelObservation],
        (attempts, turn): (&mut Attempts, &mut Option<Turn>),
        claimed: &mut Claimed,
    ) -> Result<bool, ChannelError> {
        let seen = before.first().map_or(0, |before| before.block);
        let sent = self.send(turn, keccak256(&input), (input, gas), payload, seen).await;
        let (reverted, most) = (reason::CLAIM_TRANSACTION_FAILED, gas::claim(rows.len()));
        let Some(receipt) = attempts.succeeded(sent, reverted, most) else { return Ok(false) };
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
            match self.simulate(authorizer, &without_signature(&part), gas::claim(part.len())).await? {
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

    /// Simulates a claim of these rows: signed, unless the sender is the authorizer. Returns the batch, or why it reverts.
    async fn simulate_claim(
        &self,
        rows: &[Row<'_>],
        authorizer: &AuthorizerKey,
        wasted: u64,
    ) -> Result<Result<Batch, String>, ChannelError> {
        let most = gas::claim(rows.len()).saturating_sub(wasted);
        if self.sender.addresses() == [authorizer.address()] {
            let (input, payload) = (without_signature(rows), message(rows, None));
            let gas = self.simulate(self.sender(), &input, most).await?;
            return Ok(gas.map(|gas| Batch { input, gas, payload }));
        }
        let claims: Vec<Claim> = rows.iter().map(|row| row.claim.clone()).collect();
        self.simulate_signed(rows, authorizer.sign_claims(&self.escrow, &claims).await?, most).await
    }

    async fn simulate_signed(
        &self,
        rows: &[Row<'_>],
        signature: Bytes,
        most: u64,
    ) -> Result<Result<Batch, String>, ChannelError> {
        let (input, payload) = (with_signature(rows, signature.clone()), message(rows, Some(signature)));
        let gas = self.simulate(self.sender(), &input, most).await?;
        Ok(gas.map(|gas| Batch { input, gas, payload }))
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

/// Returns what announced withdrawals could take of what these rows claim.
fn at_risk(rows: &[Row<'_>], before: &[ChannelObservation]) -> u128 {
    let at_risk = |(row, before): (&Row<'_>, &ChannelObservation)| {
        let stays = before.state.balance.saturating_sub(before.withdrawal).max(before.state.total_claimed);
        row.claim.total_claimed.saturating_sub(stays)
    };
    rows.iter().zip(before).map(at_risk).fold(0, u128::saturating_add)
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

fn message(rows: &[Row<'_>], claim_authorizer_signature: Option<Bytes>) -> ChannelPayload {
    let claims = rows.iter().map(|row| row.claim.clone()).collect();
    ChannelPayload::Claim { claims, claim_authorizer_signature }
}
