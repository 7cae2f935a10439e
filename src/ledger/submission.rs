//! Transactions as a ledger keeps them.

use std::{
    collections::{BTreeMap, HashMap},
    fmt,
};

use alloy_primitives::{Address, B256, Bytes};

use super::LedgerError;
use crate::{network::Network, payment::PaymentKey};

/// How long a nonce belongs to the process that used it last, in seconds. After that whoever waits behind it may replace
/// its transaction: the process may be gone.
pub const NONCE_HELD_SECONDS: u64 = 60;

/// How many nonces of one sender are remembered; the oldest go first.
pub(super) const MAX_NONCES: usize = 4096;
/// How many transactions are listed at once.
pub(super) const MAX_LISTED: usize = 256;
/// How many transactions of one nonce are kept; the oldest go first. Only the newest is ever sent again, and each payment's record
/// names all of its own.
pub(super) const MAX_VERSIONS: usize = 16;

/// An account that submits transactions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Sender {
    /// The chain.
    pub network: Network,
    /// Its address.
    pub address: Address,
}

/// A signed transaction on its way to a node, and the payments it settles.
#[derive(Clone, PartialEq, Eq)]
pub struct Submission {
    /// Whose transaction it is.
    pub sender: Sender,
    /// The sender's nonce.
    pub nonce: u64,
    /// The transaction's hash.
    pub hash: B256,
    /// The signed transaction. Whoever finds it may send it again: that can do nothing that sending it once could not.
    pub raw: Bytes,
    /// What it settles; empty for one that only fills a gap in the nonces.
    pub payments: Vec<PaymentKey>,
    /// The process that submits it: a number chosen at random.
    pub by: u64,
    /// When, in Unix seconds.
    pub at: u64,
    /// Until when other processes leave its payments alone, in Unix seconds.
    pub until: u64,
    /// How many [failures](super::Record::failures) of its payments whoever asked for them to be settled knew of; 0 for those that
    /// are not in it. Not kept.
    pub known_failures: BTreeMap<PaymentKey, u32>,
}

impl Submission {
    pub(super) fn known_failures_of(&self, payment: &PaymentKey) -> u32 {
        self.known_failures.get(payment).copied().unwrap_or(0)
    }
}

impl fmt::Debug for Submission {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The raw transaction holds signatures.
        f.debug_struct("Submission")
            .field("sender", &self.sender)
            .field("nonce", &self.nonce)
            .field("hash", &self.hash)
            .field("payments", &self.payments.len())
            .finish_non_exhaustive()
    }
}

/// The nonces of all senders: who uses which, and with what transactions.
#[derive(Debug, Default)]
pub(super) struct Nonces(HashMap<Sender, BTreeMap<u64, Nonce>>);

/// One nonce. Its transactions replace one another; at most one of them can be included.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Nonce {
    pub(super) by: u64,
    pub(super) at: u64,
    /// No node took its transaction: anybody may use it.
    pub(super) is_free: bool,
    pub(super) transactions: Vec<Submission>,
}

impl Nonce {
    /// Whether `by` may use the nonce at `at`.
    pub(super) fn is_open_to(&self, by: u64, at: u64) -> bool {
        self.is_free || self.by == by || self.at.saturating_add(NONCE_HELD_SECONDS) < at
    }

    /// The newest transaction of the nonce.
    fn add(&mut self, submission: Submission) {
        self.transactions.retain(|known| known.hash != submission.hash);
        if self.transactions.len() >= MAX_VERSIONS {
            self.transactions.remove(0);
        }
        self.transactions.push(submission);
    }
}

impl Nonces {
    /// Whether the submission may use its nonce.
    pub(super) fn check(&self, submission: &Submission) -> Result<(), LedgerError> {
        let Some(nonces) = self.0.get(&submission.sender) else { return Ok(()) };
        match nonces.get(&submission.nonce) {
            Some(nonce) if !nonce.is_open_to(submission.by, submission.at) => {
                let next = nonces.last_key_value().map_or(0, |(last, _)| last.saturating_add(1));
                Err(LedgerError::NonceTaken { next })
            }
            _ => Ok(()),
        }
    }

    /// Uses the nonce, and says which other one was forgotten for it.
    pub(super) fn insert(&mut self, mut submission: Submission) -> Option<u64> {
        submission.known_failures.clear();
        let nonces = self.0.entry(submission.sender).or_default();
        let nonce = nonces.entry(submission.nonce).or_default();
        if nonce.is_free {
            // The last one is why it is free: no node took it. Those before may have reached one.
            nonce.transactions.pop();
        }
        (nonce.by, nonce.at, nonce.is_free) = (submission.by, submission.at, false);
        nonce.add(submission);
        if nonces.len() > MAX_NONCES { nonces.pop_first().map(|(nonce, _)| nonce) } else { None }
    }

    /// Brings back a transaction of an earlier process, which no other is newer than. The process is gone: whoever comes first may go on
    /// with its nonce.
    #[cfg(feature = "sqlite")]
    pub(super) fn restore(&mut self, submission: Submission, is_free: bool) {
        let nonce = self.0.entry(submission.sender).or_default().entry(submission.nonce).or_default();
        (nonce.by, nonce.at, nonce.is_free) = (0, 0, is_free);
        nonce.add(submission);
    }

    #[cfg(feature = "sqlite")]
    pub(super) fn get(&self, sender: &Sender, nonce: u64) -> Option<Nonce> {
        self.0.get(sender)?.get(&nonce).cloned()
    }

    /// Whether anything changed.
    pub(super) fn free(&mut self, sender: &Sender, nonce: u64, by: u64) -> bool {
        match self.0.get_mut(sender).and_then(|nonces| nonces.get_mut(&nonce)) {
            Some(nonce) if nonce.by == by && !nonce.is_free => {
                nonce.is_free = true;
                true
            }
            _ => false,
        }
    }

    /// Forgets the nonces below `below`, and says which those were.
    pub(super) fn forget(&mut self, sender: &Sender, below: u64) -> Vec<u64> {
        let Some(nonces) = self.0.get_mut(sender) else { return Vec::new() };
        let kept = nonces.split_off(&below);
        std::mem::replace(nonces, kept).into_keys().collect()
    }

    /// The newest transaction of every nonce in use, from `from` on.
    pub(super) fn list(&self, sender: &Sender, from: u64) -> Vec<Submission> {
        let nonces = self.0.get(sender).into_iter().flat_map(|nonces| nonces.range(from..));
        let in_use = nonces.filter(|(_, nonce)| !nonce.is_free);
        in_use.filter_map(|(_, nonce)| nonce.transactions.last().cloned()).take(MAX_LISTED).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SENDER: Sender = Sender { network: Network::BASE, address: Address::repeat_byte(0x5e) };

    fn submission(n: u64) -> Submission {
        let (hash, raw) = (B256::from(alloy_primitives::U256::from(n)), Bytes::new());
        Submission {
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
        let last_byte = |submission: &Submission| u64::from(submission.hash[31]);
        of_nonce.map_or_else(Vec::new, |nonce| nonce.transactions.iter().map(last_byte).collect())
    }

    #[test]
    fn a_transaction_that_no_node_took_goes_with_the_next_and_the_others_stay() {
        let mut nonces = Nonces::default();
        nonces.insert(submission(1));
        for n in 2..100 {
            nonces.insert(submission(n));
            assert_eq!(kept(&nonces), [1, n], "the first may have reached a node");
            nonces.free(&SENDER, 4, 1);
            assert!(nonces.list(&SENDER, 0).is_empty());
        }
    }

    #[test]
    fn of_the_nonces_of_a_sender_the_newest_are_kept_and_the_oldest_listed() {
        let mut nonces = Nonces::default();
        let most = MAX_NONCES as u64;
        for nonce in 0..most + 10 {
            let forgotten = nonces.insert(Submission { nonce, ..submission(nonce) });
            assert_eq!(forgotten, nonce.checked_sub(most), "one for one, once there are too many");
        }
        let listed: Vec<u64> = nonces.list(&SENDER, 0).iter().map(|submission| submission.nonce).collect();
        assert_eq!(listed, (10..10 + MAX_LISTED as u64).collect::<Vec<_>>());
    }

    #[test]
    fn of_the_transactions_of_a_nonce_the_newest_are_kept() {
        let mut nonces = Nonces::default();
        for n in 0..100 {
            nonces.insert(submission(n));
            nonces.insert(submission(n));
        }
        assert_eq!(kept(&nonces), (100 - MAX_VERSIONS as u64..100).collect::<Vec<_>>());
        assert_eq!(nonces.list(&SENDER, 0), [submission(99)]);
    }
}
