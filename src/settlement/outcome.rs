//! What became of a payment, as far as the chain proves it.

use alloy_primitives::{B256, U64, U256};
use serde::Deserialize;
use tokio::time::sleep;

use super::{engine::Engine, member::Member};
use crate::{
    chain::{
        authorization_use::{self, Use},
        probe::Facts,
        receipt_check::ExpectedTransfer,
        rpc::{Receipt, RpcFailure},
        transfer,
    },
    ledger::{Record, Settlement},
    payment::{Outcome, Prechecked, Rejection},
    protocol::Reason,
    settlement::FacilitatorError,
};

/// How often a node that lags behind a receipt is asked again.
const LAGGING: usize = 5;

impl Engine {
    /// One look at the payment, and what is wrong with it.
    pub(crate) async fn verify(&self, payment: &Prechecked) -> Result<(Facts, Option<Rejection>), RpcFailure> {
        let calldata = transfer::calldata(payment.authorization(), payment.signature());
        let facts = self.probe.look(&self.looks, payment, &calldata).await?;
        self.pace.observe(facts.block);
        let rejection = self.probe.diagnose(&facts, payment);
        Ok((facts, rejection))
    }

    /// Why an included transaction for this payment did not pay it.
    pub(super) async fn conclude(&self, member: &Member, receipt: &Receipt) -> Result<Outcome, FacilitatorError> {
        let transaction = receipt.transaction_hash;
        self.totals().reverted += 1;
        tracing::info!(%transaction, gas = %receipt.gas_used, "included, and did not pay");
        let unknown = Outcome::Unknown { transaction: Some(transaction) };
        // A node that lags behind the receipt cannot say why.
        for _ in 0..LAGGING {
            match self.verify(&member.payment).await {
                Ok((facts, _)) if facts.block < receipt.block() => {}
                Ok((facts, _)) if facts.used => {
                    let found = self.look_for_use(&member.payment, member.seen_unused, &facts, Some(transaction)).await;
                    if let Ok(Outcome::Failed { .. }) = found {
                        self.reverts.note(member.key().payer);
                    }
                    return Ok(found.unwrap_or(unknown));
                }
                Ok((_, rejection)) => {
                    self.reverts.note(member.key().payer);
                    let (reason, detail) = match rejection {
                        Some(Rejection { reason, detail }) => (reason, detail),
                        None => {
                            (Reason::InvalidTransactionState, "the transaction was included and did not pay".into())
                        }
                    };
                    return Ok(Outcome::Failed { reason, detail, transaction: Some(transaction), dead: false });
                }
                Err(_) => {}
            }
            sleep(self.pace.poll_interval()).await;
        }
        Ok(unknown)
    }

    /// The authorization is used: by whom, and for what?
    pub(super) async fn look_for_use(
        &self,
        payment: &Prechecked,
        seen_unused: Option<u64>,
        facts: &Facts,
        transaction: Option<B256>,
    ) -> Result<Outcome, FacilitatorError> {
        let record = self.ledger.get(&payment.key()).await?;
        let reserved = record.map(|record| record.block_seen.or(seen_unused));
        let Some(seen_unused) = reserved.flatten() else {
            let detail = "the authorization was used before it was reserved here".to_owned();
            return Ok(Outcome::Failed { reason: Reason::NonceAlreadyUsed, detail, transaction, dead: false });
        };
        let expected = ExpectedTransfer::of_payment(payment);
        let depth = self.depths.of(expected.value);
        match authorization_use::find(&self.rpc, &expected, seen_unused, facts.block).await? {
            // Whoever sent it, it counts when it is deep enough; it is looked at again until then.
            Use::Paid { transaction, block } if depth > 0 && facts.block < block.saturating_add(depth) => {
                Ok(Outcome::Unknown { transaction: Some(transaction) })
            }
            Use::Paid { transaction, block } => {
                self.totals().credited += 1;
                tracing::info!(%transaction, block, "settled by another sender's transaction");
                Ok(Outcome::Settled { transaction, block: Some(block), fee: None })
            }
            Use::Wasted { transaction, block } => {
                let finalized = self.rpc.finalized().await.ok().flatten();
                let dead = finalized.is_some_and(|finalized| finalized.number.saturating_to::<u64>() >= block);
                let detail = "the payer cancelled the authorization or used its nonce for something else".to_owned();
                Ok(Outcome::Failed { reason: Reason::NonceAlreadyUsed, detail, transaction: Some(transaction), dead })
            }
            Use::NotFound => Ok(Outcome::Unknown { transaction }),
        }
    }

    /// What became of a payment that an earlier call, or an earlier process, lost sight of. A settled one is looked at again:
    /// its block may have been replaced.
    pub(crate) async fn reconcile(&self, record: &Record) -> Result<Outcome, FacilitatorError> {
        // Asked first: afterwards it may be in a block that came after the look.
        let is_on_its_way = self.is_on_its_way(record).await?;
        match self.look_back(record).await? {
            // A transaction that no node has now, and that is sent again, may pay yet: nobody is to be told that it did not.
            Outcome::Failed { dead: false, transaction, .. }
                if is_on_its_way || self.is_being_settled(record).await? =>
            {
                Ok(Outcome::Unknown { transaction })
            }
            outcome => Ok(outcome),
        }
    }

    /// Whether somebody settles it now: here, or in another process, whose transactions may be in nobody's sight yet. Asked last: who
    /// began while the chain was looked at counts, too.
    async fn is_being_settled(&self, record: &Record) -> Result<bool, FacilitatorError> {
        if self.active.contains(&record.key) {
            return Ok(true);
        }
        let now = self.ledger.get(&record.key).await?;
        Ok(now.is_some_and(|record| !record.may_be_settled_by(self.process, self.clock.now())))
    }

    async fn look_back(&self, record: &Record) -> Result<Outcome, FacilitatorError> {
        if let Settlement::Final { transaction, block } = record.settlement {
            return Ok(Outcome::Settled { transaction, block, fee: record.fee });
        }
        let payment = record.payment();
        let expected = ExpectedTransfer::of_payment(&payment);
        let newest_first = || record.transactions.iter().rev().take(16).copied();
        for transaction in newest_first() {
            if let Some(receipt) = self.rpc.receipt(transaction).await?
                && expected.is_paid_by(&receipt)
            {
                if !self.is_deep(&receipt, self.depths.of(expected.value)).await? {
                    return Ok(Outcome::Unknown { transaction: Some(transaction) });
                }
                let fee = Some(receipt.cost() / U256::from(expected.count_uses(&receipt).max(1)));
                return Ok(Outcome::Settled { transaction, block: Some(receipt.block()), fee });
            }
        }
        // Final before newest: what is unused now was unused then.
        let finalized = self.rpc.finalized().await?;
        let (facts, rejection) = self.verify(&payment).await?;
        if facts.used {
            return self.look_for_use(&payment, record.block_seen, &facts, newest_first().next()).await;
        }
        let valid_before = record.authorization.valid_before;
        let expired = |timestamp: u64| U256::from(timestamp) >= valid_before;
        let expired_for_good = finalized.is_some_and(|block| {
            expired(block.timestamp.saturating_to()) && facts.block >= block.number.saturating_to::<u64>()
        });
        let failed = |reason, detail: String, dead| {
            Ok(Outcome::Failed { reason, detail, transaction: newest_first().next(), dead })
        };
        if expired_for_good {
            return failed(Reason::ValidBefore, format!("unused when validBefore, {valid_before}, passed"), true);
        }
        for transaction in newest_first() {
            if self.watches(transaction) || self.is_ahead(transaction, facts.block).await? {
                return Ok(Outcome::Unknown { transaction: Some(transaction) });
            }
        }
        match rejection {
            Some(Rejection { reason, detail }) => failed(reason, detail, false),
            None => failed(Reason::InvalidTransactionState, "no transaction executed it so far".to_owned(), false),
        }
    }

    /// Whether it waits for a block, or is in one after `seen`: then what was seen says nothing about it.
    async fn is_ahead(&self, transaction: B256, seen: u64) -> Result<bool, RpcFailure> {
        #[derive(Deserialize)]
        #[serde(rename_all = "camelCase")]
        struct Found {
            block_number: Option<U64>,
        }
        let found: Option<Found> = self.rpc.call("eth_getTransactionByHash", [transaction]).await?;
        Ok(found.is_some_and(|found| found.block_number.is_none_or(|block| block > U64::from(seen))))
    }
}
