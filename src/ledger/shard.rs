//! A part of the ledger in memory, under one lock.

use std::{
    collections::hash_map::Entry,
    hash::{Hash, Hasher},
    ops::Bound,
    sync::Arc,
};

use ahash::AHashMap;
use alloy_primitives::{Address, B256, U256};

use super::{
    LedgerError, Listing, Record, Settlement, SettlementState,
    credit::Owed,
    exposure::{PayerBook, Share},
    lazy_set::LazySet,
    records::{Expiry, Records},
};
use crate::{network::Network, payment::PaymentKey};

/// How long after `validBefore` a record is kept, in seconds, so that a late reorganization still finds it.
pub(super) const RETENTION: u64 = 900;

/// So many are looked at when another comes, whether they can be forgotten.
const AT_ONCE: usize = 8;

#[derive(Debug)]
pub(super) struct Shard {
    pub(super) records: Records,
    /// By when they can be forgotten, in Unix seconds.
    expiry: Expiry,
    /// All records by state of settlement, so that the few open ones are found among the many closed.
    by_state: [LazySet<PaymentKey>; SettlementState::COUNT],
    payers: AHashMap<PayerKey, PayerBook>,
    /// By the payer and the id it gave.
    ids: AHashMap<(PayerKey, B256), PaymentKey>,
    pub(super) settled_and_forgotten: u64,
    owed: Arc<Owed>,
}

impl Shard {
    pub(super) fn new(owed: Arc<Owed>) -> Self {
        Self {
            records: Records::default(),
            expiry: Expiry::default(),
            by_state: Default::default(),
            payers: AHashMap::new(),
            ids: AHashMap::new(),
            settled_and_forgotten: 0,
            owed,
        }
    }

    /// Looks at a payment and at the book of its payer, in which it does not count itself.
    pub(super) fn look(
        &mut self,
        key: &PaymentKey,
        now: u64,
        judge: impl FnOnce(&Record, &PayerBook) -> Result<(), LedgerError>,
    ) -> Result<(), LedgerError> {
        let record = self.records.get(key).ok_or(LedgerError::NotFound)?;
        let Some(book) = self.payers.get_mut(&payer_of(key)) else { return judge(record, &PayerBook::default()) };
        let share = Share::of(record);
        book.age(now);
        book.subtract(&share);
        let verdict = judge(record, book);
        book.add(&share);
        verdict
    }

    /// Changes a record and keeps the payer's book in step with it, which few steps need, and a clock for it.
    pub(super) fn update(
        &mut self,
        key: &PaymentKey,
        now: impl FnOnce() -> u64,
        change: impl FnOnce(&mut Record) -> Result<(), LedgerError>,
    ) -> Result<(), LedgerError> {
        let record = self.records.get_mut(key).ok_or(LedgerError::NotFound)?;
        let before = (Share::of(record), record.settlement);
        let owed = record.deferred.then(|| record.owed());
        let result = change(record);
        // What was deferred just now is in the sum already.
        if let Some(before) = owed {
            self.owed.moved(before, record.owed());
        }
        let after = (Share::of(record), record.settlement);
        if after.0 != before.0 {
            let mut entry = match self.payers.entry(payer_of(key)) {
                Entry::Occupied(known) => known,
                Entry::Vacant(new) => new.insert_entry(PayerBook::default()),
            };
            let (book, now) = (entry.get_mut(), now());
            book.age(now);
            book.subtract(&before.0);
            book.add(&after.0);
            if let (None, Settlement::Settled { block: Some(block), .. }) = (before.1.paid_by(), after.1) {
                book.moved(record.authorization.value, block, now);
            }
            if book.is_idle() {
                entry.remove();
            }
        }
        let (from, to) = (before.1.state(), after.1.state());
        if from != to {
            self.by_state[from as usize].remove(key);
            self.by_state[to as usize].insert(*key);
        }
        result
    }

    /// In order, as many as asked for.
    pub(super) fn list(&mut self, listing: &Listing) -> Vec<Record> {
        let Self { by_state, records, .. } = self;
        let from = listing.after.map_or(Bound::Unbounded, Bound::Excluded);
        let is_listed =
            |place| listing.settlement.is_empty() || listing.settlement.iter().any(|state| *state as usize == place);
        let mut list = Vec::new();
        for (_, keys) in by_state.iter_mut().enumerate().filter(|(place, _)| is_listed(*place)) {
            let found = keys.sorted().range((from, Bound::Unbounded)).filter_map(|key| records.get(key));
            let found = found.filter(|record| listing.holds(record)).take(listing.limit);
            list.extend(found.cloned());
        }
        list
    }

    /// The payment that has this record's id, if there is one.
    pub(super) fn holder_of_id(&self, record: &Record) -> Option<PaymentKey> {
        self.ids.get(&(payer_of(&record.key), record.id?)).copied()
    }

    pub(super) fn insert(&mut self, record: Box<Record>) {
        if let Some(id) = record.id {
            self.ids.insert((payer_of(&record.key), id), record.key);
        }
        self.by_state[record.settlement.state() as usize].insert(record.key);
        let at = expiry(&record);
        self.expiry.insert(at, self.records.insert(record));
    }

    /// Takes a record of an earlier process.
    #[cfg(feature = "sqlite")]
    pub(super) fn restore(&mut self, record: Record) {
        self.owed.moved(U256::ZERO, record.owed());
        let payer = payer_of(&record.key);
        let book = self.payers.entry(payer).or_default();
        book.add(&Share::of(&record));
        if book.is_idle() {
            self.payers.remove(&payer);
        }
        self.insert(Box::new(record));
    }

    pub(super) fn remove(&mut self, key: &PaymentKey, now: u64) {
        let Some(record) = self.records.remove(key) else { return };
        self.expiry.remove(expiry(&record), self.records.hash(key));
        self.by_state[record.settlement.state() as usize].remove(key);
        if let Some(id) = record.id {
            self.ids.remove(&(payer_of(key), id));
        }
        if record.settlement.paid_by().is_some() {
            self.settled_and_forgotten += 1;
        }
        self.owed.moved(record.owed(), U256::ZERO);
        if let Some(book) = self.payers.get_mut(&payer_of(key)) {
            book.subtract(&Share::of(&record));
            book.age(now);
            if book.is_idle() {
                self.payers.remove(&payer_of(key));
            }
        }
    }

    /// Forgets a few records that can no longer be presented; those with an open fate stay.
    pub(super) fn age(&mut self, now: u64) -> Vec<PaymentKey> {
        let mut forgotten = Vec::new();
        for _ in 0..AT_ONCE {
            let Some((at, hash)) = self.expiry.pop_before(now) else { break };
            // None if it went before it expired. Of two with one hash it may be the other, which has expired, too.
            let Some(record) = self.records.find(hash, |record| expiry(record) <= at) else { continue };
            if record.may_be_forgotten(now) {
                let key = record.key;
                self.remove(&key, now);
                forgotten.push(key);
            } else {
                self.expiry.insert(now.saturating_add(RETENTION), hash);
            }
        }
        forgotten
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct PayerKey {
    network: Network,
    asset: Address,
    payer: Address,
}

/// Few pay in several tokens.
impl Hash for PayerKey {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write(self.payer.as_slice());
    }
}

fn payer_of(key: &PaymentKey) -> PayerKey {
    PayerKey { network: key.network, asset: key.asset, payer: key.payer }
}

pub(super) fn expiry(record: &Record) -> u64 {
    u64::try_from(record.authorization.valid_before).unwrap_or(u64::MAX).saturating_add(RETENTION)
}
