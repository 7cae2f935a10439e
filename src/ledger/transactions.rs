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
/// The largest number of transactions that are kept per nonce; the oldest are removed first. Only the newest is ever sent again, and
/// each payment's record names all of its own.
pub(super) const MAX_VERSIONS: usize = 16;

/// An account that sends transactions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Sender {
    /// The chain.
    pub network: Network,
    /// The account's address.
    pub address: Address,
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
    /// The payments in it; empty for a transaction that only fills a gap in the nonces.
    pub payments: Vec<PaymentKey>,
    /// The process that submits it: a number chosen at random.
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

/// The nonces of all senders, with their owners and transactions.
#[derive(Debug, Default)]
pub(super) struct Nonces(HashMap<Sender, BTreeMap<u64, Nonce>>);

/// One nonce. Its transactions replace one another; at most one of them can be included.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Nonce {
    /// The process that used it last, and when.
    pub(super) by: u64,
    pub(super) at: u64,
    /// No node accepted its last transaction: any process may use it.
    pub(super) is_free: bool,
    pub(super) transactions: Vec<JournaledTransaction>,
}

impl Nonce {
    /// Returns `true` if process `by` may use the nonce at `at` (Unix seconds).
    pub(super) fn is_open_to(&self, by: u64, at: u64) -> bool {
        self.is_free || self.by == by || self.at.saturating_add(NONCE_HELD_SECONDS) < at
    }

    fn add(&mut self, transaction: JournaledTransaction) {
        self.transactions.retain(|known| known.hash != transaction.hash);
        if self.transactions.len() >= MAX_VERSIONS {
            self.transactions.remove(0);
        }
        self.transactions.push(transaction);
    }
}

impl Nonces {
    /// Checks that the transaction may use its nonce.
    pub(super) fn check(&self, transaction: &JournaledTransaction) -> Result<(), LedgerError> {
        let Some(nonces) = self.0.get(&transaction.sender) else { return Ok(()) };
        match nonces.get(&transaction.nonce) {
            Some(nonce) if !nonce.is_open_to(transaction.by, transaction.at) => {
                let next = nonces.last_key_value().map_or(0, |(last, _)| last.saturating_add(1));
                Err(LedgerError::NonceTaken { next })
            }
            _ => Ok(()),
        }
    }

    /// Enters a transaction. Returns the nonce that was removed to make room.
    pub(super) fn insert(&mut self, mut transaction: JournaledTransaction) -> Option<u64> {
        transaction.known_failures.clear();
        let nonces = self.0.entry(transaction.sender).or_default();
        let nonce = nonces.entry(transaction.nonce).or_default();
        if nonce.is_free {
            // No node accepted the last transaction. Those before may have reached one.
            nonce.transactions.pop();
        }
        (nonce.by, nonce.at, nonce.is_free) = (transaction.by, transaction.at, false);
        nonce.add(transaction);
        if nonces.len() > MAX_NONCES { nonces.pop_first().map(|(nonce, _)| nonce) } else { None }
    }

    /// Restores a transaction that an earlier process stored; those of one nonce in the order in which they were submitted. The
    /// earlier process is gone, so any process may use the nonce.
    #[cfg(feature = "sqlite")]
    pub(super) fn restore(&mut self, transaction: JournaledTransaction, is_free: bool) {
        let nonce = self.0.entry(transaction.sender).or_default().entry(transaction.nonce).or_default();
        (nonce.by, nonce.at, nonce.is_free) = (0, 0, is_free);
        nonce.add(transaction);
    }

    #[cfg(feature = "sqlite")]
    pub(super) fn get(&self, sender: &Sender, nonce: u64) -> Option<Nonce> {
        self.0.get(sender)?.get(&nonce).cloned()
    }

    /// Frees a nonce. Returns `true` if that changed anything.
    pub(super) fn free(&mut self, sender: &Sender, nonce: u64, by: u64) -> bool {
        match self.0.get_mut(sender).and_then(|nonces| nonces.get_mut(&nonce)) {
            Some(nonce) if nonce.by == by && !nonce.is_free => {
                nonce.is_free = true;
                true
            }
            _ => false,
        }
    }

    /// Removes the nonces below `below`, and returns them.
    pub(super) fn forget(&mut self, sender: &Sender, below: u64) -> Vec<u64> {
        let Some(nonces) = self.0.get_mut(sender) else { return Vec::new() };
        let kept = nonces.split_off(&below);
        std::mem::replace(nonces, kept).into_keys().collect()
    }

    /// Returns the newest transaction of every nonce in use, from `from` on.
    pub(super) fn list(&self, sender: &Sender, from: u64) -> Vec<JournaledTransaction> {
        let nonces = self.0.get(sender).into_iter().flat_map(|nonces| nonces.range(from..));
        let in_use = nonces.filter(|(_, nonce)| !nonce.is_free);
        in_use.filter_map(|(_, nonce)| nonce.transactions.last().cloned()).take(MAX_LISTED).collect()
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

    fn kept(nonces: &Nonces) -> Vec<u64> {
        let of_nonce = nonces.0.get(&SENDER).and_then(|nonces| nonces.get(&4));
        let last_byte = |transaction: &JournaledTransaction| u64::from(transaction.hash[31]);
        of_nonce.map_or_else(Vec::new, |nonce| nonce.transactions.iter().map(last_byte).collect())
    }

    #[test]
    fn the_next_transaction_replaces_one_that_no_node_accepted_and_no_other() {
        let mut nonces = Nonces::default();
        nonces.insert(transaction(1));
        for n in 2..100 {
            nonces.insert(transaction(n));
            assert_eq!(kept(&nonces), [1, n], "the first may have reached a node");
            nonces.free(&SENDER, 4, 1);
            assert!(nonces.list(&SENDER, 0).is_empty());
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
    fn a_nonce_keeps_its_newest_transactions() {
        let mut nonces = Nonces::default();
        for n in 0..100 {
            nonces.insert(transaction(n));
            nonces.insert(transaction(n));
        }
        assert_eq!(kept(&nonces), (100 - MAX_VERSIONS as u64..100).collect::<Vec<_>>());
        assert_eq!(nonces.list(&SENDER, 0), [transaction(99)]);
    }
}
