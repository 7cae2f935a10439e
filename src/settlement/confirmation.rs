//! The outcome of a payment, as far as the chain proves it.
//!
//! An outcome is `Settled` only with a receipt whose logs show the transfer, and enough blocks on top of it. It is `Failed` only if the
//! authorization is unused, or was used otherwise. Everything else is `Unknown`.

use std::{collections::HashMap, sync::Arc, time::Duration};

use alloy_primitives::{B256, U64, U256};
use serde::Deserialize;
use tokio::time::{Instant, sleep};

use super::{
    accounts::Accounts,
    costs::{Costs, PayerBackoff},
    journal::Journal,
    queue::QueuedPayment,
};
use crate::{
    chain::{
        authorization_use::AuthorizationUse,
        node::{AuthorizationState, Node},
        probe::ProbeResult,
        receipt_check::ExpectedTransfer,
        rpc::{Receipt, RpcFailure},
    },
    ledger::{Record, Settlement},
    payment::{Prechecked, Rejection, SettlementOutcome},
    protocol::Reason,
    settlement::FacilitatorError,
};

/// How often a node that lags behind a receipt is asked again.
const LAGGING_RETRIES: usize = 5;
/// How many transactions of a payment are looked up, the newest first.
const MAX_TRANSACTIONS: usize = 16;

/// How many blocks must be on top of a payment's block, by amount.
#[derive(Clone, Debug, Default)]
pub(crate) struct Depths(Vec<(U256, u64)>);

impl Depths {
    /// Requires so many blocks for payments of at least `from` atomic units.
    pub(crate) fn add(&mut self, from: U256, blocks: u64) {
        self.0.push((from, blocks));
    }

    /// Returns how many blocks a payment of this amount requires.
    pub(crate) fn required(&self, amount: U256) -> u64 {
        self.0.iter().filter(|(from, _)| *from <= amount).max_by_key(|(from, _)| *from).map_or(0, |(_, blocks)| *blocks)
    }
}

/// Finds out what became of payments.
pub(crate) struct Confirmation {
    node: Arc<Node>,
    journal: Journal,
    costs: Arc<Costs>,
    backoff: Arc<PayerBackoff>,
    /// Payers whose permits somebody had executed before our transactions, where nobody sees it.
    executed_unseen: PayerBackoff,
    accounts: Accounts,
    depths: Depths,
    timeout: Duration,
}

impl Confirmation {
    /// `timeout` bounds how long a payment waits for the blocks that it requires.
    pub(super) fn new(
        node: Arc<Node>,
        journal: Journal,
        costs: Arc<Costs>,
        backoff: Arc<PayerBackoff>,
        accounts: Accounts,
        (depths, timeout): (Depths, Duration),
    ) -> Self {
        let executed_unseen = PayerBackoff::default();
        Self { node, journal, costs, backoff, executed_unseen, accounts, depths, timeout }
    }

    /// Ends the settlement of a payment that this transaction paid, once enough blocks are on top of it. `fee` is in wei.
    ///
    /// Returns at once if the payment requires blocks: a task of its own waits for them.
    pub(super) async fn finish_paid(self: &Arc<Self>, queued: QueuedPayment, receipt: &Receipt, fee: Option<U256>) {
        match self.depths.required(queued.expected().value) {
            0 => {
                let (transaction, block) = (receipt.transaction_hash, Some(receipt.block()));
                queued.finish(&self.journal, Ok(SettlementOutcome::Settled { transaction, block, fee })).await;
            }
            depth => {
                let (confirmation, receipt) = (self.clone(), receipt.clone());
                tokio::spawn(async move { confirmation.await_depth(queued, &receipt, depth, fee).await });
            }
        }
    }

    async fn await_depth(&self, queued: QueuedPayment, receipt: &Receipt, depth: u64, fee: Option<U256>) {
        let transaction = receipt.transaction_hash;
        let deadline = Instant::now() + self.timeout;
        let mut outcome = SettlementOutcome::Unknown { transaction: Some(transaction) };
        while Instant::now() < deadline {
            sleep(self.node.poll_interval()).await;
            if !matches!(self.has_depth(receipt, depth).await, Ok(true)) {
                continue;
            }
            // It may be in another block by now, or in none.
            match self.node.rpc().receipt(transaction).await {
                Ok(Some(now)) if queued.expected().is_paid_by(&now) && now.block() <= receipt.block() => {
                    outcome = SettlementOutcome::Settled { transaction, block: Some(now.block()), fee };
                    break;
                }
                Ok(_) => break,
                Err(_) => {}
            }
        }
        queued.finish(&self.journal, Ok(outcome)).await;
    }

    /// Returns `true` if `depth` blocks are on top of the receipt's.
    async fn has_depth(&self, receipt: &Receipt, depth: u64) -> Result<bool, RpcFailure> {
        if depth == 0 {
            return Ok(true);
        }
        let head = self.node.rpc().block("latest").await?.map_or(0, |head| head.number.saturating_to::<u64>());
        Ok(head >= receipt.block().saturating_add(depth))
    }

    /// Ends the settlement of a payment whose transaction was included and did not pay it.
    pub(super) async fn finish_unpaid(&self, queued: QueuedPayment, receipt: &Receipt) {
        let outcome = self.explain_unpaid(&queued, receipt).await;
        queued.finish(&self.journal, Ok(outcome)).await;
    }

    async fn explain_unpaid(&self, queued: &QueuedPayment, receipt: &Receipt) -> SettlementOutcome {
        let transaction = receipt.transaction_hash;
        self.costs.count_reverted();
        tracing::info!(%transaction, gas = %receipt.gas_used, "included, and did not pay");
        let unknown = SettlementOutcome::Unknown { transaction: Some(transaction) };
        let verified = self.verify_unpaid(&queued.payment, transaction).await;
        let (found, rejection) = match verified {
            None => (Some(Ok(unknown.clone())), None),
            Some((result, _)) if result.used => {
                let found = self.explain_use(&queued.payment, queued.seen_unused, &result, Some(transaction)).await;
                (Some(found), None)
            }
            Some((_, rejection)) => (None, rejection),
        };
        let (payer, permit) = (queued.key().payer, queued.payment.terms().permit());
        match (&found, permit) {
            (None | Some(Ok(SettlementOutcome::Failed { .. })), _) => self.backoff.note_revert(payer),
            // What used an authorization may be looked up later.
            (Some(Ok(SettlementOutcome::Settled { .. })), _) | (_, None) => {}
            // What used a permit, nobody may ever tell. Its payer need not have to do with it.
            (_, Some(permit)) if permit.is_for_anybody() => self.executed_unseen.note_revert(payer),
            (_, Some(_)) => self.backoff.note_revert(payer),
        }
        if let Some(found) = found {
            return found.unwrap_or(unknown);
        }
        let (reason, detail) = match rejection {
            Some(Rejection { reason, detail }) => (reason, detail),
            None => (Reason::InvalidTransactionState, "the transaction was included and did not pay".into()),
        };
        SettlementOutcome::Failed { reason, detail, transaction: Some(transaction), dead: false }
    }

    /// Returns the reason if permits like this one of the same payer are refused now: others execute them first, at the cost of our gas. What the
    /// payer pays otherwise is not, nor a permit that was verified before: its work may be done.
    pub(super) fn rejection(&self, payment: &Prechecked) -> Option<Rejection> {
        payment.terms().permit().filter(|permit| permit.is_for_anybody())?;
        let Rejection { reason, .. } = self.executed_unseen.rejection(payment.authorization().from)?;
        let detail =
            "permits of this payer were executed by others where nobody can see it; pay by an authorization, or later";
        Some(Rejection::new(reason, detail))
    }

    /// Verifies a payment that this included transaction did not pay. Returns `None` if that does not explain why: the node lags
    /// behind the transaction's block, or that block was replaced, and in another one the transaction may pay.
    pub(super) async fn verify_unpaid(
        &self,
        payment: &Prechecked,
        transaction: B256,
    ) -> Option<(ProbeResult, Option<Rejection>)> {
        for _ in 0..LAGGING_RETRIES {
            if let Ok(Some(verified)) = self.try_verify_unpaid(payment, transaction).await {
                return Some(verified);
            }
            sleep(self.node.poll_interval()).await;
        }
        None
    }

    async fn try_verify_unpaid(
        &self,
        payment: &Prechecked,
        transaction: B256,
    ) -> Result<Option<(ProbeResult, Option<Rejection>)>, RpcFailure> {
        let Some(before) = self.node.rpc().receipt(transaction).await? else { return Ok(None) };
        let (result, rejection) = self.node.verify(payment).await?;
        if result.block < before.block() {
            return Ok(None);
        }
        let has_stayed = async || {
            let now = self.node.rpc().receipt(transaction).await?;
            Ok(now.is_some_and(|now| now.block_hash == before.block_hash))
        };
        Ok((result.used || has_stayed().await?).then_some((result, rejection)))
    }

    /// Returns the outcome of a payment whose authorization is used: by which transaction, and for what? `transaction` is named in the
    /// outcome if that is not found.
    pub(super) async fn explain_use(
        &self,
        payment: &Prechecked,
        seen_unused: Option<u64>,
        result: &ProbeResult,
        transaction: Option<B256>,
    ) -> Result<SettlementOutcome, FacilitatorError> {
        let record = self.journal.get(&payment.key()).await?;
        let record = record.map(|record| (record.block_seen.or(seen_unused), record.transactions));
        let Some((Some(seen_unused), transactions)) = record else {
            let detail = "the authorization was used before it was reserved here".to_owned();
            return Ok(SettlementOutcome::Failed {
                reason: Reason::NonceAlreadyUsed,
                detail,
                transaction,
                dead: false,
            });
        };
        let expected = ExpectedTransfer::of_payment(payment);
        let depth = self.depths.required(expected.value);
        match self.node.find_use(payment, seen_unused, result.block).await? {
            // Whoever sent it, it counts once enough blocks are on top of it. Until then it is looked up again.
            AuthorizationUse::Paid { transaction, block }
                if depth > 0 && result.block < block.saturating_add(depth) =>
            {
                Ok(SettlementOutcome::Unknown { transaction: Some(transaction) })
            }
            AuthorizationUse::Paid { transaction, block } => {
                self.costs.count_settled_by_other();
                tracing::info!(%transaction, block, "settled by another sender's transaction");
                Ok(SettlementOutcome::Settled { transaction, block: Some(block), fee: None })
            }
            AuthorizationUse::Otherwise { transaction, block } => {
                Ok(SettlementOutcome::used_otherwise(Some(transaction), self.node.is_final(block).await))
            }
            AuthorizationUse::NotFound { is_complete } if expected.is_by_permit() => {
                self.explain_unseen_use(payment, &transactions, is_complete, transaction).await
            }
            AuthorizationUse::NotFound { .. } => Ok(SettlementOutcome::Unknown { transaction }),
        }
    }

    /// Returns the outcome of a permit whose nonce is used, while no transfer was found. Permit2 tells nobody of a use, so there may be none to
    /// find.
    ///
    /// If a permit names an account, no other can have it executed, and our accounts journal their `transactions` first (invariant I4). If all of
    /// these are in blocks and did not pay, or it is final that they can not, something else used the nonce. Of a permit that names another
    /// account, or none, only all the blocks tell.
    async fn explain_unseen_use(
        &self,
        payment: &Prechecked,
        transactions: &[B256],
        is_complete: bool,
        transaction: Option<B256>,
    ) -> Result<SettlementOutcome, FacilitatorError> {
        let unknown = Ok(SettlementOutcome::Unknown { transaction });
        let is_final = self.node.is_use_final(payment).await?;
        let sender = payment.terms().permit().and_then(|permit| permit.facilitator);
        let is_ours = self.accounts.iter().any(|account| Some(account.address()) == sender);
        let is_proven = is_ours || (is_complete && is_final);
        if !is_proven {
            return unknown;
        }
        let expected = ExpectedTransfer::of_payment(payment);
        for hash in transactions {
            let may_pay = match self.node.rpc().receipt(*hash).await? {
                Some(receipt) => self.node.is_paid_by(&expected, &receipt).await?,
                None => !is_final || self.may_pay(*hash, None, u64::MAX).await?,
            };
            if may_pay {
                return unknown;
            }
        }
        Ok(SettlementOutcome::used_otherwise(transaction, is_final))
    }

    /// Returns the outcome of a payment that an earlier call or process did not follow to its end. The transaction of a settled one is
    /// looked up again, since its block may have been replaced. `is_watched` tells which transactions a task of this process follows.
    pub(super) async fn find_outcome(
        &self,
        record: &Record,
        is_watched: impl Fn(B256) -> bool,
    ) -> Result<SettlementOutcome, FacilitatorError> {
        if let Settlement::Final { transaction, block } = record.settlement {
            return Ok(SettlementOutcome::Settled { transaction, block, fee: record.fee });
        }
        let payment = record.payment();
        let expected = ExpectedTransfer::of_payment(&payment);
        let newest_first = || record.transactions.iter().rev().take(MAX_TRANSACTIONS).copied();
        // The blocks of transactions that did not pay.
        let mut unpaid_in = HashMap::new();
        for transaction in newest_first() {
            let Some(receipt) = self.node.rpc().receipt(transaction).await? else { continue };
            if !self.node.is_paid_by(&expected, &receipt).await? {
                unpaid_in.insert(transaction, receipt.block_hash);
                continue;
            }
            if !self.has_depth(&receipt, self.depths.required(expected.value)).await? {
                return Ok(SettlementOutcome::Unknown { transaction: Some(transaction) });
            }
            let fee = Some(receipt.cost() / U256::from(expected.count_uses(&receipt).max(1)));
            return Ok(SettlementOutcome::Settled { transaction, block: Some(receipt.block()), fee });
        }
        let newest = newest_first().next();
        let (result, rejection) = match self.node.authorization_state(&payment).await? {
            AuthorizationState::Used(result) => {
                return self.explain_use(&payment, record.block_seen, &result, newest).await;
            }
            AuthorizationState::Expired => {
                return Ok(SettlementOutcome::expired(record.authorization.valid_before, newest));
            }
            AuthorizationState::Unused(result, rejection) => (result, rejection),
            AuthorizationState::Behind => return Ok(SettlementOutcome::Unknown { transaction: newest }),
        };
        for transaction in newest_first() {
            let unpaid_in = unpaid_in.get(&transaction).copied();
            if is_watched(transaction) || self.may_pay(transaction, unpaid_in, result.block).await? {
                return Ok(SettlementOutcome::Unknown { transaction: Some(transaction) });
            }
        }
        let Rejection { reason, detail } = rejection
            .unwrap_or_else(|| Rejection::new(Reason::InvalidTransactionState, "no transaction executed it so far"));
        Ok(SettlementOutcome::Failed { reason, detail, transaction: newest, dead: false })
    }

    /// Returns `true` if the transaction is in the node's pool, in another block than `unpaid_in`, where it did not pay, or in one after
    /// `seen`: what was seen there says nothing about it.
    async fn may_pay(&self, transaction: B256, unpaid_in: Option<B256>, seen: u64) -> Result<bool, RpcFailure> {
        #[derive(Deserialize)]
        #[serde(rename_all = "camelCase")]
        struct Found {
            block_number: Option<U64>,
            block_hash: Option<B256>,
        }
        let found: Option<Found> = self.node.rpc().call("eth_getTransactionByHash", [transaction]).await?;
        Ok(found.is_some_and(|found| {
            let is_seen = found.block_number.is_some_and(|block| block <= U64::from(seen));
            !is_seen || found.block_hash.is_none() || found.block_hash != unpaid_in
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn highest_bound_that_is_reached_counts() {
        let mut depths = Depths::default();
        assert_eq!(depths.required(U256::MAX), 0);
        depths.add(U256::from(100), 10);
        depths.add(U256::from(10), 2);
        let required = |amount: u64| depths.required(U256::from(amount));
        assert_eq!([required(9), required(10), required(99), required(100), required(1_000)], [0, 2, 2, 10, 10]);
    }
}
