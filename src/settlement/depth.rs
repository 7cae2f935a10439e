//! How deep the block of a payment must be before it counts.

use std::sync::Arc;

use alloy_primitives::U256;
use tokio::time::{Instant, sleep};

use super::{engine::Engine, member::Member};
use crate::{
    chain::rpc::{Receipt, RpcFailure},
    payment::Outcome,
};

/// Bounds on the amount, and the blocks that are wanted on top from there on.
#[derive(Clone, Debug, Default)]
pub(crate) struct Depths(Vec<(U256, u64)>);

impl Depths {
    pub(crate) fn add(&mut self, from: U256, blocks: u64) {
        self.0.push((from, blocks));
    }

    /// How many blocks are wanted on top of a payment of this amount.
    pub(super) fn of(&self, value: U256) -> u64 {
        self.0.iter().filter(|(from, _)| *from <= value).max_by_key(|(from, _)| *from).map_or(0, |(_, blocks)| *blocks)
    }
}

impl Engine {
    /// Answers a payment that is in a block once `depth` others are on top of it.
    pub(super) async fn bury(self: Arc<Self>, member: Member, receipt: Receipt, depth: u64, fee: Option<U256>) {
        let transaction = receipt.transaction_hash;
        let deadline = Instant::now() + self.confirm_timeout;
        let mut outcome = Outcome::Unknown { transaction: Some(transaction) };
        while Instant::now() < deadline {
            sleep(self.pace.poll_interval()).await;
            if !matches!(self.is_deep(&receipt, depth).await, Ok(true)) {
                continue;
            }
            // It may be in another block by now, or in none.
            match self.rpc.receipt(transaction).await {
                Ok(Some(now)) if member.expected().is_paid_by(&now) && now.block() <= receipt.block() => {
                    outcome = Outcome::Settled { transaction, block: Some(now.block()), fee };
                    break;
                }
                Ok(_) => break,
                Err(_) => {}
            }
        }
        self.finish(member, Ok(outcome)).await;
    }

    /// Whether `depth` blocks are on top of the receipt's.
    pub(super) async fn is_deep(&self, receipt: &Receipt, depth: u64) -> Result<bool, RpcFailure> {
        if depth == 0 {
            return Ok(true);
        }
        let head = self.rpc.block("latest").await?.map_or(0, |head| head.number.saturating_to::<u64>());
        Ok(head >= receipt.block().saturating_add(depth))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_highest_bound_that_is_reached_counts() {
        let mut depths = Depths::default();
        assert_eq!(depths.of(U256::MAX), 0);
        depths.add(U256::from(100), 10);
        depths.add(U256::from(10), 2);
        let of = |value: u64| depths.of(U256::from(value));
        assert_eq!([of(9), of(10), of(99), of(100), of(1_000)], [0, 2, 2, 10, 10]);
    }
}
