//! The ledger in memory, which is also the working copy of the ledger in SQLite.

mod channels;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    ops::Bound,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
};

use alloy_primitives::B256;
use async_trait::async_trait;

use super::{
    Counts, JournaledTransaction, Lease, Ledger, LedgerError, Listing, Nonces, PayerKey, PayerSums, PaymentStep,
    Record, Reservation, ResponseLedger, ResponseLimits, Responses, Sender, Settlement, SettlementState,
    StoredResponse, TransactionLedger, payer::Share,
};
use crate::{
    clock::{Clock, SystemClock},
    payment::PaymentKey,
};
use channels::MemoryChannels;

/// The number of locks. Each is held for a few map operations; this many keep cores apart.
const SHARDS: usize = 64;

/// After how long a record is looked at again that could not be removed, in seconds.
const LOOKED_AT_AGAIN: u64 = 900;

/// The number of expired records that are looked at when another one is reserved.
const AGED_AT_ONCE: usize = 8;

/// A ledger in memory, for tests and for sellers who accept that a restart forgets which payments were used. Until they expire, only
/// the chain then protects against a second use.
#[derive(Debug)]
pub struct MemoryLedger {
    shards: Vec<Mutex<Shard>>,
    responses: Mutex<Responses>,
    /// Locked after the shards.
    nonces: Mutex<Nonces>,
    limits: ResponseLimits,
    records: AtomicUsize,
    max_records: usize,
    channels: MemoryChannels,
    /// The shard whose records are aged next, beside the one that takes a new record.
    next_aged: AtomicUsize,
    clock: Arc<dyn Clock>,
}

impl MemoryLedger {
    /// Creates an empty ledger for at most a million payments that can still be presented.
    pub fn new() -> Self {
        Self::with(ResponseLimits::default(), 1_000_000, Arc::new(SystemClock))
    }

    /// Creates an empty ledger with these limits and this clock.
    pub fn with(responses: ResponseLimits, max_records: usize, clock: Arc<dyn Clock>) -> Self {
        Self {
            shards: (0..SHARDS).map(|_| Mutex::default()).collect(),
            responses: Mutex::new(Responses::new(responses)),
            nonces: Mutex::default(),
            limits: responses,
            records: AtomicUsize::new(0),
            max_records,
            channels: MemoryChannels::new(max_records),
            next_aged: AtomicUsize::new(0),
            clock,
        }
    }

    fn age(&self, index: usize) -> Vec<PaymentKey> {
        self.age_locked(&mut lock(&self.shards[index]))
    }

    fn age_locked(&self, shard: &mut Shard) -> Vec<PaymentKey> {
        let removed = shard.age(self.clock.now());
        self.records.fetch_sub(removed.len(), Ordering::Relaxed);
        removed
    }

    fn shard(&self, key: &PaymentKey) -> MutexGuard<'_, Shard> {
        lock(&self.shards[shard_index(key)])
    }

    /// Reserves in the record's shard, after expired records of that shard were removed.
    fn reserve_in_shard(&self, record: &Record) -> (Result<Reservation, LedgerError>, Vec<PaymentKey>) {
        let mut shard = self.shard(&record.key);
        if let Some(known) = shard.records.get(&record.key) {
            return (Ok(Reservation::Known(known.clone())), Vec::new());
        }
        let removed = self.age_locked(&mut shard);
        if let Some(key) = shard.holder_of_id(record) {
            return (Err(LedgerError::IdTaken { key }), removed);
        }
        if self.records.load(Ordering::Relaxed) >= self.max_records {
            return (Err(LedgerError::Full), removed);
        }
        self.records.fetch_add(1, Ordering::Relaxed);
        shard.insert(Box::new(record.clone()));
        (Ok(Reservation::New(record.lease())), removed)
    }
}

/// The steps, with what the file of the ledger in SQLite has to follow.
impl MemoryLedger {
    /// Reserves a payment. Returns also the keys of the records that were removed on the occasion.
    pub(super) fn reserve_and_age(&self, record: &Record) -> (Result<Reservation, LedgerError>, Vec<PaymentKey>) {
        let (mut reservation, mut removed) = self.reserve_in_shard(record);
        if matches!(reservation, Ok(Reservation::Known(_))) {
            return (reservation, removed);
        }
        // The records of payers that never return are in shards that get no new ones.
        removed.extend(self.age(self.next_aged.fetch_add(1, Ordering::Relaxed) % SHARDS));
        if matches!(reservation, Err(LedgerError::Full)) {
            removed.extend((0..SHARDS).flat_map(|index| self.age(index)));
            let (again, more) = self.reserve_in_shard(record);
            reservation = again;
            removed.extend(more);
        }
        (reservation, removed)
    }

    /// Takes a step. Returns also the keys of the responses that were kept or removed.
    pub(super) fn advance_and_keep(
        &self,
        key: &PaymentKey,
        step: &PaymentStep,
    ) -> Result<(Record, Vec<PaymentKey>), LedgerError> {
        let mut shard = self.shard(key);
        let now = self.clock.now();
        let apply = |record: &mut Record| record.apply(step, now);
        let record = shard.change(key, now, apply, |sums, record| sums.allow(record, step))?;
        let mut responses = Vec::new();
        if let Some(response) = step.response() {
            responses = self.keep_response(key, response.clone());
            responses.push(*key);
        }
        Ok((record, responses))
    }

    pub(super) fn discard_now(&self, lease: &Lease) -> Result<(), LedgerError> {
        let mut shard = self.shard(&lease.key);
        shard.records.get(&lease.key).ok_or(LedgerError::NotFound)?.check_discard(lease)?;
        shard.remove(&lease.key, self.clock.now());
        self.records.fetch_sub(1, Ordering::Relaxed);
        Ok(())
    }

    /// Records a transaction. Returns the nonce of the sender that was removed for it.
    pub(super) fn submit_and_forget(&self, transaction: JournaledTransaction) -> Result<Option<u64>, LedgerError> {
        let now = self.clock.now();
        // Everybody locks shards in this order, so that there is no deadlock.
        let indices: BTreeSet<usize> = transaction.payments.iter().map(shard_index).collect();
        let mut shards: BTreeMap<usize, MutexGuard<'_, Shard>> =
            indices.into_iter().map(|index| (index, lock(&self.shards[index]))).collect();
        let mut not_due = Vec::new();
        for key in &transaction.payments {
            let shard = shards.get(&shard_index(key));
            let record = shard.and_then(|shard| shard.records.get(key)).ok_or(LedgerError::NotFound)?;
            if !record.may_be_submitted(&transaction, now) {
                not_due.push(*key);
            }
        }
        if !not_due.is_empty() {
            return Err(LedgerError::NotDue(not_due));
        }
        let mut nonces = lock(&self.nonces);
        nonces.check(&transaction)?;
        for key in &transaction.payments {
            if let Some(shard) = shards.get_mut(&shard_index(key)) {
                shard.change(key, now, |record| Ok(record.submit(&transaction, now)?), |_, _| Ok(()))?;
            }
        }
        Ok(nonces.insert(transaction))
    }

    /// Keeps a response. Returns the keys of the responses that were removed for it.
    pub(super) fn keep_response(&self, key: &PaymentKey, response: StoredResponse) -> Vec<PaymentKey> {
        lock(&self.responses).insert(*key, response)
    }
}

/// What the ledger in SQLite reads and restores.
#[cfg(feature = "sqlite")]
impl MemoryLedger {
    /// Returns what is written of a payment: not what ends with this process.
    pub(super) fn snapshot(&self, key: &PaymentKey) -> Option<Record> {
        let record = self.shard(key).records.get(key).map(|record| (**record).clone());
        record.map(|record| Record { lease_until: 0, settling: None, ..record })
    }

    /// Returns the response, whatever its age.
    pub(super) fn kept_response(&self, key: &PaymentKey) -> Option<StoredResponse> {
        lock(&self.responses).get(key, 0)
    }

    pub(super) fn restore(&self, record: Record) {
        self.shard(&record.key).restore(record);
        self.records.fetch_add(1, Ordering::Relaxed);
    }

    /// Restores what is counted of removed records.
    pub(super) fn restore_removed(&self, removed: Counts) {
        if let Some(shard) = self.shards.first() {
            lock(shard).removed = removed;
        }
    }

    pub(super) fn nonces(&self) -> MutexGuard<'_, Nonces> {
        lock(&self.nonces)
    }
}

impl Default for MemoryLedger {
    fn default() -> Self {
        Self::new()
    }
}

#[async_trait]
impl Ledger for MemoryLedger {
    async fn reserve(&self, record: &Record) -> Result<Reservation, LedgerError> {
        self.reserve_and_age(record).0
    }

    async fn get(&self, key: &PaymentKey) -> Result<Option<Record>, LedgerError> {
        Ok(self.shard(key).records.get(key).map(|record| (**record).clone()))
    }

    async fn advance(&self, key: &PaymentKey, step: &PaymentStep) -> Result<Record, LedgerError> {
        Ok(self.advance_and_keep(key, step)?.0)
    }

    async fn discard(&self, lease: &Lease) -> Result<(), LedgerError> {
        self.discard_now(lease)
    }

    async fn list(&self, listing: &Listing) -> Result<Vec<Record>, LedgerError> {
        let mut found: BTreeMap<PaymentKey, Record> = BTreeMap::new();
        for shard in &self.shards {
            for record in lock(shard).list(listing) {
                found.insert(record.key, record);
            }
            while found.len() > listing.limit {
                found.pop_last();
            }
        }
        Ok(found.into_values().collect())
    }

    async fn counts(&self) -> Result<Counts, LedgerError> {
        let mut counts = Counts::default();
        for shard in &self.shards {
            let shard = lock(shard);
            counts.settled += shard.removed.settled;
            counts.unresolved += shard.removed.unresolved;
            shard.records.values().for_each(|record| counts.add(record));
        }
        Ok(counts)
    }
}

#[async_trait]
impl ResponseLedger for MemoryLedger {
    async fn store_response(&self, key: &PaymentKey, response: StoredResponse) -> Result<(), LedgerError> {
        self.keep_response(key, response);
        Ok(())
    }

    async fn response(&self, key: &PaymentKey) -> Result<Option<StoredResponse>, LedgerError> {
        Ok(lock(&self.responses).get(key, self.clock.now()))
    }

    fn response_limit(&self) -> usize {
        self.limits.longest()
    }
}

#[async_trait]
impl TransactionLedger for MemoryLedger {
    async fn submit(&self, transaction: JournaledTransaction) -> Result<(), LedgerError> {
        self.submit_and_forget(transaction).map(drop)
    }

    async fn free_nonce(&self, sender: &Sender, nonce: u64, by: u64) -> Result<(), LedgerError> {
        lock(&self.nonces).free(sender, nonce, by);
        Ok(())
    }

    async fn forget_nonces(&self, sender: &Sender, below: u64) -> Result<(), LedgerError> {
        lock(&self.nonces).forget(sender, below);
        Ok(())
    }

    async fn submissions(&self, sender: &Sender, from: u64) -> Result<Vec<JournaledTransaction>, LedgerError> {
        Ok(lock(&self.nonces).list(sender, from))
    }
}

/// Returns the shard of a payment. All payments of one payer share a shard, so that what it has in flight is summed under one lock.
/// Addresses are hashes: payers that share a shard on purpose only slow each other down, as one payer with many payments does.
fn shard_index(key: &PaymentKey) -> usize {
    usize::from(key.payer[19]) % SHARDS
}

/// Locks a mutex. A panic while it was held leaves sound data, because every change is a single map operation.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The records of some payers, with their sums and indexes.
#[derive(Debug, Default)]
struct Shard {
    records: HashMap<PaymentKey, Box<Record>>,
    /// When each record is looked at to be removed, in Unix seconds.
    expiry: BTreeSet<(u64, PaymentKey)>,
    /// The records by state of settlement, so that the few open ones are found among many final ones.
    by_state: [BTreeSet<PaymentKey>; SettlementState::ALL.len()],
    payers: HashMap<PayerKey, PayerSums>,
    ids: HashMap<(PayerKey, B256), PaymentKey>,
    /// What is counted of removed records.
    removed: Counts,
}

impl Shard {
    /// Changes a record, and its payer's sums and the indexes with it. `allow` is asked of the sums without this payment, if the change
    /// concerns them; it is given the payment as it was.
    fn change(
        &mut self,
        key: &PaymentKey,
        now: u64,
        decide: impl FnOnce(&mut Record) -> Result<(), LedgerError>,
        allow: impl FnOnce(&PayerSums, &Record) -> Result<(), LedgerError>,
    ) -> Result<Record, LedgerError> {
        let record = self.records.get_mut(key).ok_or(LedgerError::NotFound)?;
        let mut next = Record::clone(record);
        decide(&mut next)?;
        let (before, after) = (Share::of(record), Share::of(&next));
        if before != after {
            let payer = PayerKey::of(record);
            let sums = self.payers.entry(payer).or_default();
            sums.age(now);
            sums.subtract(&before);
            let allowed = allow(sums, record);
            sums.add(if allowed.is_ok() { &after } else { &before });
            if allowed.is_ok()
                && let (None, Settlement::Settled { block: Some(block), .. }) =
                    (record.settlement.paid_by(), next.settlement)
            {
                sums.moved(next.amount(), block, now);
            }
            if sums.is_empty() {
                self.payers.remove(&payer);
            }
            allowed?;
        }
        let (from, to) = (record.settlement.state(), next.settlement.state());
        if from != to {
            self.by_state[from as usize].remove(key);
            self.by_state[to as usize].insert(*key);
        }
        **record = next.clone();
        Ok(next)
    }

    /// Returns the records of each listed state in order, up to the limit.
    fn list(&self, listing: &Listing) -> Vec<Record> {
        let from = listing.after.map_or(Bound::Unbounded, Bound::Excluded);
        let states = SettlementState::ALL.into_iter();
        let listed = states.filter(|state| listing.settlement.is_empty() || listing.settlement.contains(state));
        let mut list = Vec::new();
        for state in listed {
            let keys = self.by_state[state as usize].range((from, Bound::Unbounded));
            let records = keys.filter_map(|key| self.records.get(key)).filter(|record| listing.holds(record));
            list.extend(records.take(listing.limit).map(|record| (**record).clone()));
        }
        list
    }

    /// Returns the payment that has this record's id.
    fn holder_of_id(&self, record: &Record) -> Option<PaymentKey> {
        self.ids.get(&(PayerKey::of(record), record.id?)).copied()
    }

    fn insert(&mut self, record: Box<Record>) {
        if let Some(id) = record.id {
            self.ids.insert((PayerKey::of(&record), id), record.key);
        }
        self.by_state[record.settlement.state() as usize].insert(record.key);
        self.expiry.insert((record.forget_at(), record.key));
        self.records.insert(record.key, record);
    }

    /// Takes a record that an earlier process stored.
    #[cfg(feature = "sqlite")]
    fn restore(&mut self, record: Record) {
        let payer = PayerKey::of(&record);
        let sums = self.payers.entry(payer).or_default();
        sums.add(&Share::of(&record));
        if sums.is_empty() {
            self.payers.remove(&payer);
        }
        self.insert(Box::new(record));
    }

    fn remove(&mut self, key: &PaymentKey, now: u64) {
        let Some(record) = self.records.remove(key) else { return };
        self.expiry.remove(&(record.forget_at(), *key));
        self.by_state[record.settlement.state() as usize].remove(key);
        if let Some(id) = record.id {
            self.ids.remove(&(PayerKey::of(&record), id));
        }
        self.removed.add_removed(&record);
        let payer = PayerKey::of(&record);
        if let Some(sums) = self.payers.get_mut(&payer) {
            sums.subtract(&Share::of(&record));
            sums.age(now);
            if sums.is_empty() {
                self.payers.remove(&payer);
            }
        }
    }

    /// Removes a few records that can no longer be presented. Those with an unknown outcome stay, and are looked at again later.
    fn age(&mut self, now: u64) -> Vec<PaymentKey> {
        let mut removed = Vec::new();
        for _ in 0..AGED_AT_ONCE {
            let Some((at, key)) = self.expiry.first().copied().filter(|(at, _)| *at < now) else { break };
            self.expiry.pop_first();
            // The entry may be of a record that was looked at before, then discarded, and perhaps reserved again.
            let Some(record) = self.records.get(&key).filter(|record| record.forget_at() <= at) else { continue };
            if record.may_be_forgotten(now) {
                self.remove(&key, now);
                removed.push(key);
            } else {
                self.expiry.insert((now.saturating_add(LOOKED_AT_AGAIN), key));
            }
        }
        removed
    }
}
