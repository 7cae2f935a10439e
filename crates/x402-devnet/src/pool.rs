//! The pool of transactions that wait for a block.

use std::collections::{BTreeMap, HashMap};

use alloy_consensus::{Transaction as _, transaction::Recovered};
use alloy_primitives::{Address, B256, U256};

use super::{Transaction, evm, failure::Failure};

/// How many transactions of one sender may wait. The next one that can be executed is always accepted, as by reth.
const MAX_PER_SENDER: usize = 16;
/// The percentage by which a replacement must raise both fees.
const PRICE_BUMP: u128 = 10;

/// Transactions by sender and nonce, with gaps.
#[derive(Clone, Debug, Default)]
pub(super) struct Pool {
    senders: HashMap<Address, BTreeMap<u64, Pooled>>,
    arrivals: u64,
}

#[derive(Clone, Debug)]
struct Pooled {
    tx: Recovered<Transaction>,
    arrival: u64,
}

/// The sender's account when its transaction arrives.
pub(super) struct Sender {
    pub(super) nonce: u64,
    pub(super) balance: U256,
}

impl Pool {
    /// Accepts a transaction, or rejects it with the error of a node.
    pub(super) fn add(&mut self, tx: Recovered<Transaction>, sender: &Sender, chain_id: u64) -> Result<(), Failure> {
        if tx.chain_id().is_some_and(|id| id != chain_id) {
            return Err(Failure::rejected("invalid sender: invalid chain id for signer"));
        }
        if tx.is_eip4844() {
            return Err(Failure::rejected("transaction type not supported"));
        }
        if tx.gas_limit() > evm::TX_GAS_LIMIT {
            let text = format!("transaction gas limit too high (cap: {}, tx: {})", evm::TX_GAS_LIMIT, tx.gas_limit());
            return Err(Failure::rejected(text));
        }
        if tx.max_priority_fee_per_gas().is_some_and(|tip| tip > tx.max_fee_per_gas()) {
            return Err(Failure::rejected("max priority fee per gas higher than max fee per gas"));
        }
        let intrinsic = evm::intrinsic_gas(&evm::tx_env(&tx));
        if tx.gas_limit() < intrinsic {
            let text = format!("intrinsic gas too low: gas {}, minimum needed {intrinsic}", tx.gas_limit());
            return Err(Failure::rejected(text));
        }
        if tx.nonce() < sender.nonce {
            let text = format!("nonce too low: next nonce {}, tx nonce {}", sender.nonce, tx.nonce());
            return Err(Failure::rejected(text));
        }
        let waiting = self.senders.get(&tx.signer());
        let replaced = waiting.and_then(|waiting| waiting.get(&tx.nonce()));
        if let Some(old) = replaced {
            if old.tx.tx_hash() == tx.tx_hash() {
                return Err(Failure::rejected("already known"));
            }
            if !outbids(&tx, &old.tx) {
                return Err(Failure::rejected("replacement transaction underpriced"));
            }
        } else if tx.nonce() > sender.nonce && waiting.is_some_and(|waiting| waiting.len() >= MAX_PER_SENDER) {
            return Err(Failure::rejected("txpool is full"));
        }
        let others = waiting.into_iter().flatten().filter(|(nonce, _)| **nonce != tx.nonce());
        let cost = others.fold(cost(&tx), |sum, (_, pooled)| sum.saturating_add(cost(&pooled.tx)));
        if cost > sender.balance {
            return Err(Failure::insufficient_funds(sender.balance, cost));
        }
        self.put(tx);
        Ok(())
    }

    /// Adds a transaction without checks.
    pub(super) fn put(&mut self, tx: Recovered<Transaction>) {
        self.arrivals += 1;
        let pooled = Pooled { arrival: self.arrivals, tx };
        self.senders.entry(pooled.tx.signer()).or_default().insert(pooled.tx.nonce(), pooled);
    }

    /// Removes and returns the next transaction to execute: among those with the nonce of their sender's account, the one that arrived
    /// first. Transactions that do not pay the base fee stay.
    pub(super) fn take_next(
        &mut self,
        base_fee: u64,
        nonce_of: impl Fn(Address) -> u64,
    ) -> Option<Recovered<Transaction>> {
        self.senders.retain(|sender, waiting| {
            *waiting = waiting.split_off(&nonce_of(*sender));
            !waiting.is_empty()
        });
        let (sender, nonce) = self
            .senders
            .iter()
            .filter_map(|(sender, waiting)| waiting.get(&nonce_of(*sender)))
            .filter(|pooled| pooled.tx.max_fee_per_gas() >= u128::from(base_fee))
            .min_by_key(|pooled| pooled.arrival)
            .map(|pooled| (pooled.tx.signer(), pooled.tx.nonce()))?;
        self.senders.get_mut(&sender)?.remove(&nonce).map(|pooled| pooled.tx)
    }

    /// Returns the account nonce after the waiting transactions without a gap.
    pub(super) fn next_nonce(&self, sender: Address, account_nonce: u64) -> u64 {
        let Some(waiting) = self.senders.get(&sender) else { return account_nonce };
        let mut next = account_nonce;
        while waiting.contains_key(&next) {
            next += 1;
        }
        next
    }

    pub(super) fn get(&self, hash: B256) -> Option<&Recovered<Transaction>> {
        self.senders.values().flat_map(BTreeMap::values).map(|pooled| &pooled.tx).find(|tx| *tx.tx_hash() == hash)
    }
}

/// Returns the most that a transaction can cost its sender, in wei.
fn cost(tx: &Recovered<Transaction>) -> U256 {
    U256::from(tx.gas_limit()).saturating_mul(U256::from(tx.max_fee_per_gas())).saturating_add(tx.value())
}

fn outbids(new: &Recovered<Transaction>, old: &Recovered<Transaction>) -> bool {
    let bumped = |old: u128| old.saturating_mul(100 + PRICE_BUMP).div_ceil(100);
    new.max_fee_per_gas() >= bumped(old.max_fee_per_gas())
        && new.priority_fee_or_price() >= bumped(old.priority_fee_or_price())
}
