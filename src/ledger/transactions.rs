//! Transactions as a ledger keeps them, and the account nonces that they use.

use std::collections::{BTreeMap, HashMap};

use alloy_primitives::{Address, B256, Bytes};

use super::LedgerError;
use crate::{network::Network, payment::PaymentKey};

/// The time for which an account nonce belongs to the process that used it last, in seconds. After that another process may replace
/// the transaction, because the first one may be gone.
pub const NONCE_HELD_SECONDS: u64 = 60;

/// The largest number of nonces that are kept per sender; the lowest are removed first.
pub(super) const MAX_NONCES: usize = 4096;
/// The largest number of transactions that are listed at once.
pub(super) const MAX_LISTED: usize = 256;

/// An account that sends transactions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Sender {
    /// The chain.
    pub network: Network,
    /// The account's address.
    pub address: Address,
}

impl Sender {
    /// Returns the account as bytes, for a database's column.
    pub fn to_bytes(&self) -> [u8; 28] {
        let mut bytes = [0; 28];
        bytes[..8].copy_from_slice(&self.network.chain_id().to_be_bytes());
        bytes[8..].copy_from_slice(self.address.as_slice());
        bytes
    }
}

/// A signed transaction that is recorded before it is sent, and the payments that it settles.
#[derive(Clone, PartialEq, Eq)]
pub struct JournaledTransaction {
    /// The account that sends it.
    pub sender: Sender,
    /// The account's nonce.
    pub nonce: u64,
    /// The transaction's hash.
    pub hash: B256,
    /// The signed transaction. Sending it again is harmless: at most one transaction of a nonce is executed.
    pub raw: Bytes,
    /// The payments in it; empty for a call on payment channels, and for a transaction that only fills a gap in the nonces.
    pub payments: Vec<PaymentKey>,
    /// The process that submits it: a number chosen at random that is not 0. 0 if that process is gone.
    pub by: u64,
    /// When it is submitted, in Unix seconds.
    pub at: u64,
    /// The end of the claim on its payments, in Unix seconds. Other processes leave them alone until then.
    pub until: u64,
    /// The number of [failures](super::Record::failures) of each payment that were known when its settlement was requested; 0 where
    /// absent. Not stored.
    pub known_failures: BTreeMap<PaymentKey, u32>,
}

impl JournaledTransaction {
    pub(super) fn known_failures_of(&self, payment: &PaymentKey) -> u32 {
        self.known_failures.get(payment).copied().unwrap_or(0)
    }
}

// The raw transaction holds signatures.
debug_fields!(JournaledTransaction |this| {
    sender: this.sender,
    nonce: this.nonce,
    hash: this.hash,
    payments: this.payments.len(),
});

/// The account nonces of all senders and their transactions, in memory: the rules of point 6 of the contract.
///
/// Of the transactions of one nonce, which replace one another, the newest is kept. Only that is ever sent again, and each payment's record
/// names all of its own.
#[derive(Debug, Default)]
pub struct Nonces(HashMap<Sender, BTreeMap<u64, Nonce>>);

/// One nonce.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Nonce {
    /// The newest transaction that uses it.
    pub transaction: JournaledTransaction,
    /// No node accepted that transaction: any process may use the nonce.
    pub is_free: bool,
}

impl Nonce {
    /// Returns `true` if process `by` may use the nonce at `at` (Unix seconds).
    pub fn is_open_to(&self, by: u64, at: u64) -> bool {
        self.is_free || !is_held(self.transaction.by, self.transaction.at, by, at)
    }
}

/// Returns `true` if a nonce that a process used last at a time is not another one's at `at` (Unix seconds).
pub(super) const fn is_held(by_whom: u64, since: u64, by: u64, at: u64) -> bool {
    by_whom != 0 && by_whom != by && since.saturating_add(NONCE_HELD_SECONDS) >= at
}

impl Nonces {
    /// Checks that the transaction may use its nonce.
    ///
    /// # Errors
    /// [`LedgerError::NonceTaken`] if another process uses it.
    pub fn check(&self, transaction: &JournaledTransaction) -> Result<(), LedgerError> {
        let Some(nonces) = self.0.get(&transaction.sender) else { return Ok(()) };
        match nonces.get(&transaction.nonce) {
            Some(nonce) if !nonce.is_open_to(transaction.by, transaction.at) => {
                let next = nonces.last_key_value().map_or(0, |(last, _)| last.saturating_add(1));
                Err(LedgerError::NonceTaken { next })
            }
            _ => Ok(()),
        }
    }

    /// Enters a transaction. Returns the nonce of its sender that was removed to make room, if there were more than 4096.
    pub fn insert(&mut self, mut transaction: JournaledTransaction) -> Option<u64> {
        transaction.known_failures.clear();
        self.restore(Nonce { transaction, is_free: false })
    }

    /// Restores a nonce that was stored, and otherwise does what [`insert`](Self::insert) does.
    pub fn restore(&mut self, nonce: Nonce) -> Option<u64> {
        let nonces = self.0.entry(nonce.transaction.sender).or_default();
        nonces.insert(nonce.transaction.nonce, nonce);
        if nonces.len() > MAX_NONCES { nonces.pop_first().map(|(nonce, _)| nonce) } else { None }
    }

    /// Returns a nonce.
    pub fn get(&self, sender: &Sender, nonce: u64) -> Option<&Nonce> {
        self.0.get(sender)?.get(&nonce)
    }

    /// Frees a nonce, if process `by` used it last. Returns `true` if that changed anything.
    pub fn free(&mut self, sender: &Sender, nonce: u64, by: u64) -> bool {
        match self.0.get_mut(sender).and_then(|nonces| nonces.get_mut(&nonce)) {
            Some(nonce) if nonce.transaction.by == by && !nonce.is_free => {
                nonce.is_free = true;
                true
            }
            _ => false,
        }
    }

    /// Removes the nonces below `below`, and returns them.
    pub fn forget(&mut self, sender: &Sender, below: u64) -> Vec<u64> {
        let Some(nonces) = self.0.get_mut(sender) else { return Vec::new() };
        let kept = nonces.split_off(&below);
        std::mem::replace(nonces, kept).into_keys().collect()
    }

    /// Returns the transactions of the nonces in use, from `from` on; at most 256.
    pub fn list(&self, sender: &Sender, from: u64) -> Vec<JournaledTransaction> {
        let nonces = self.0.get(sender).into_iter().flat_map(|nonces| nonces.range(from..));
        let in_use = nonces.filter(|(_, nonce)| !nonce.is_free);
        in_use.map(|(_, nonce)| nonce.transaction.clone()).take(MAX_LISTED).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SENDER: Sender = Sender { network: Network::BASE, address: Address::repeat_byte(0x5e) };

    fn transaction(n: u64) -> JournaledTransaction {
        let (hash, raw) = (B256::from(alloy_primitives::U256::from(n)), Bytes::new());
        JournaledTransaction {
            sender: SENDER,
            nonce: 4,
            hash,
            raw,
            payments: Vec::new(),
            by: 1,
            at: 0,
            until: 0,
            known_failures: BTreeMap::new(),
        }
    }

    #[test]
    fn a_sender_keeps_its_highest_nonces_and_lists_the_lowest_of_them() {
        let mut nonces = Nonces::default();
        let most = MAX_NONCES as u64;
        for nonce in 0..most + 10 {
            let forgotten = nonces.insert(JournaledTransaction { nonce, ..transaction(nonce) });
            assert_eq!(forgotten, nonce.checked_sub(most), "one for one, once there are too many");
        }
        let listed: Vec<u64> = nonces.list(&SENDER, 0).iter().map(|transaction| transaction.nonce).collect();
        assert_eq!(listed, (10..10 + MAX_LISTED as u64).collect::<Vec<_>>());
    }

    #[test]
    fn a_nonce_keeps_its_newest_transaction() {
        let mut nonces = Nonces::default();
        for n in 0..100 {
            nonces.insert(transaction(n));
            nonces.insert(transaction(n));
        }
        assert_eq!(nonces.list(&SENDER, 0), [transaction(99)]);
        nonces.free(&SENDER, 4, 1);
        assert!(nonces.list(&SENDER, 0).is_empty(), "no node accepted it");
        nonces.insert(transaction(100));
        assert_eq!(nonces.list(&SENDER, 0), [transaction(100)]);
    }
}
