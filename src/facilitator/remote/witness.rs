//! What the chain says of a payment that a facilitator says something about.

use alloy_primitives::B256;
use async_trait::async_trait;

use crate::{
    facilitator::FacilitatorError,
    payment::{Funds, Prechecked, Rejection},
    protocol::Reason,
};

/// Somebody who looks at the chain without the facilitator.
#[async_trait]
pub(super) trait Witness: Send + Sync {
    /// One look at a payment that is to be verified.
    async fn look(&self, payment: &Prechecked) -> Result<Look, FacilitatorError>;

    /// The block in which this transaction paid the payment, waiting a while for it; `None` if it did not, or is not there.
    async fn paid_in(&self, payment: &Prechecked, transaction: B256) -> Result<Option<u64>, FacilitatorError>;

    /// The block in which this transaction paid the payment, as far as the node knows just now.
    async fn paid_now(&self, payment: &Prechecked, transaction: B256) -> Result<Option<u64>, FacilitatorError>;

    /// How far the chain is, and whether the block `seen` is still on it; `None` if the node has no blocks.
    async fn chain(&self, seen: Option<Head>) -> Result<Option<Chain>, FacilitatorError>;

    /// What became of a payment whose authorization was unused in the block `seen_unused`.
    async fn fate(
        &self,
        payment: &Prechecked,
        seen_unused: Option<u64>,
        claimed: &[B256],
    ) -> Result<Fate, FacilitatorError>;
}

/// What a look shows.
#[cfg_attr(not(feature = "onchain"), allow(dead_code))]
pub(super) struct Look {
    pub(super) funds: Funds,
    pub(super) contract_wallet: bool,
    pub(super) rejection: Option<Rejection>,
}

/// A block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Head {
    pub(super) number: u64,
    pub(super) hash: B256,
}

/// How far a chain is.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(not(feature = "onchain"), allow(dead_code))]
pub(super) struct Chain {
    pub(super) head: Head,
    /// The newest block that will not be undone; 0 if the node does not tell.
    pub(super) finalized: u64,
    /// Whether the block seen before was replaced.
    pub(super) is_gone: bool,
}

/// What became of a payment.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(not(feature = "onchain"), allow(dead_code))]
pub(super) enum Fate {
    /// This transaction paid.
    Paid { transaction: B256, block: u64 },
    /// Cancelled, used for something else, or expired; `for_good` if the block that shows it is final.
    Spent { reason: Reason, detail: String, transaction: Option<B256>, for_good: bool },
    /// Not executed, and it still can be.
    Open,
    /// Used, and by which transaction is not known.
    Unclear,
}

#[cfg(feature = "onchain")]
pub(super) use onchain::Node;

#[cfg(feature = "onchain")]
mod onchain {
    use std::time::Duration;

    use alloy_primitives::{B256, U256};
    use async_trait::async_trait;
    use tokio::time::{Instant, sleep};

    use super::{Chain, Fate, Head, Look, Witness};
    use crate::{
        chain::{
            authorization_use::{self, Use},
            probe::{Facts, Probe},
            receipt_check::ExpectedTransfer,
            rpc::{Rpc, RpcFailure},
            rpc_batcher::RpcBatcher,
            transfer,
        },
        facilitator::FacilitatorError,
        payment::{Funds, Prechecked, Rejection},
        protocol::Reason,
    };

    /// Between two looks for a receipt.
    const POLL: Duration = Duration::from_millis(100);

    /// A node of the seller's choice.
    pub(in super::super) struct Node {
        pub(in super::super) rpc: Rpc,
        pub(in super::super) looks: RpcBatcher,
        pub(in super::super) probe: Probe,
        /// How long a transaction that the facilitator names is waited for: the node may lag behind the facilitator's.
        pub(in super::super) patience: Duration,
    }

    impl Node {
        async fn facts(&self, payment: &Prechecked) -> Result<(Facts, Option<Rejection>), RpcFailure> {
            let calldata = transfer::calldata(payment.authorization(), payment.signature());
            let facts = self.probe.look(&self.looks, payment, &calldata).await?;
            let rejection = self.probe.diagnose(&facts, payment);
            Ok((facts, rejection))
        }

        async fn used(
            &self,
            payment: &Prechecked,
            seen_unused: Option<u64>,
            latest: u64,
        ) -> Result<Fate, FacilitatorError> {
            // Used before it was seen unused, for all that is known: it may have paid for something else.
            let Some(seen_unused) = seen_unused else { return Ok(Fate::Unclear) };
            Ok(
                match authorization_use::find(&self.rpc, &ExpectedTransfer::of_payment(payment), seen_unused, latest)
                    .await?
                {
                    Use::Paid { transaction, block } => Fate::Paid { transaction, block },
                    Use::Wasted { transaction, block } => {
                        let finalized = self.rpc.finalized().await.ok().flatten();
                        let for_good =
                            finalized.is_some_and(|finalized| finalized.number.saturating_to::<u64>() >= block);
                        Fate::Spent {
                            reason: Reason::NonceAlreadyUsed,
                            detail: "the payer cancelled the authorization or used its nonce for something else".into(),
                            transaction: Some(transaction),
                            for_good,
                        }
                    }
                    Use::NotFound => Fate::Unclear,
                },
            )
        }
    }

    #[async_trait]
    impl Witness for Node {
        async fn look(&self, payment: &Prechecked) -> Result<Look, FacilitatorError> {
            let (facts, rejection) = self.facts(payment).await?;
            let funds = Funds { balance: facts.balance, block: facts.block };
            Ok(Look { funds, contract_wallet: facts.payer_has_code(), rejection })
        }

        async fn paid_in(&self, payment: &Prechecked, transaction: B256) -> Result<Option<u64>, FacilitatorError> {
            let expected = ExpectedTransfer::of_payment(payment);
            let deadline = Instant::now() + self.patience;
            loop {
                match self.rpc.receipt(transaction).await {
                    Ok(Some(receipt)) => return Ok(expected.is_paid_by(&receipt).then(|| receipt.block())),
                    Err(failure) if Instant::now() >= deadline => return Err(failure.into()),
                    Ok(None) if Instant::now() >= deadline => return Ok(None),
                    Ok(None) | Err(_) => sleep(POLL).await,
                }
            }
        }

        async fn paid_now(&self, payment: &Prechecked, transaction: B256) -> Result<Option<u64>, FacilitatorError> {
            let receipt = self.rpc.receipt(transaction).await?;
            let expected = ExpectedTransfer::of_payment(payment);
            Ok(receipt.filter(|receipt| expected.is_paid_by(receipt)).map(|receipt| receipt.block()))
        }

        async fn chain(&self, seen: Option<Head>) -> Result<Option<Chain>, FacilitatorError> {
            let Some(head) = self.rpc.block("latest").await? else { return Ok(None) };
            let is_gone = match seen {
                // A node behind the one asked before does not know the block yet.
                Some(seen) => self.rpc.block_at(seen.number).await?.is_some_and(|now| now.hash != seen.hash),
                None => false,
            };
            let finalized = self.rpc.finalized().await?.map_or(0, |block| block.number.saturating_to());
            let head = Head { number: head.number.saturating_to(), hash: head.hash };
            Ok(Some(Chain { head, finalized, is_gone }))
        }

        async fn fate(
            &self,
            payment: &Prechecked,
            seen_unused: Option<u64>,
            claimed: &[B256],
        ) -> Result<Fate, FacilitatorError> {
            let expected = ExpectedTransfer::of_payment(payment);
            for transaction in claimed {
                if let Some(receipt) = self.rpc.receipt(*transaction).await?
                    && expected.is_paid_by(&receipt)
                    // Before it was seen unused, it paid for something else (invariant I8).
                    && seen_unused.is_none_or(|seen| seen < receipt.block())
                {
                    return Ok(Fate::Paid { transaction: *transaction, block: receipt.block() });
                }
            }
            // Final before newest: what is unused now was unused then.
            let finalized = self.rpc.finalized().await?;
            let (facts, _) = self.facts(payment).await?;
            if facts.used {
                return self.used(payment, seen_unused, facts.block).await;
            }
            let valid_before = payment.authorization().valid_before;
            let is_expired = finalized.is_some_and(|block| {
                U256::from(block.timestamp) >= valid_before && facts.block >= block.number.saturating_to::<u64>()
            });
            Ok(match is_expired {
                true => Fate::Spent {
                    reason: Reason::ValidBefore,
                    detail: format!("unused when validBefore, {valid_before}, passed"),
                    transaction: None,
                    for_good: true,
                },
                false => Fate::Open,
            })
        }
    }
}
