//! The ledger in memory: fast, and gone with the process.

use std::{
    collections::{BTreeSet, HashMap, VecDeque},
    hash::{BuildHasher, RandomState},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
};

use alloy_primitives::{Address, B256, U256};
use async_trait::async_trait;

use super::{
    Counts, FulfilmentStep, Funds, Lease, Ledger, LedgerError, PaymentKey, Record, Reservation, ResponseLimits,
    Settlement, SettlementStep, StoredResponse, responses::ResponseStore,
};
use crate::{
    clock::{Clock, SystemClock},
    network::Network,
};

/// Locks are held for a few map operations; this many of them keep cores apart.
const SHARDS: usize = 64;

/// How long after `validBefore` a record is kept, in seconds, so that a late reorganization still finds it.
const RETENTION: u64 = 900;

/// How long a settled amount is remembered for balances that were read before it moved, in seconds.
const RECENT: u64 = 120;

/// A ledger in memory.
///
/// For tests, and for those who accept that a restart forgets which payments were already used: until they expire, the
/// chain alone then protects against a second use.
#[derive(Debug)]
pub struct MemoryLedger {
    shards: Vec<Mutex<Shard>>,
    hasher: RandomState,
    responses: Mutex<ResponseStore>,
    limits: ResponseLimits,
    records: AtomicUsize,
    max_records: usize,
    clock: Arc<dyn Clock>,
}

impl MemoryLedger {
    /// An empty ledger for at most a million payments that can still be presented.
    pub fn new() -> Self {
        Self::with(ResponseLimits::default(), 1_000_000, Arc::new(SystemClock))
    }

    /// An empty ledger with bounds and a clock of the caller's.
    pub fn with(responses: ResponseLimits, max_records: usize, clock: Arc<dyn Clock>) -> Self {
        Self {
            shards: (0..SHARDS).map(|_| Mutex::default()).collect(),
            hasher: RandomState::new(),
            responses: Mutex::new(ResponseStore::new(responses)),
            limits: responses,
            records: AtomicUsize::new(0),
            max_records,
            clock,
        }
    }

    /// Reserves, and says which records were forgotten on the occasion.
    pub(super) fn reserve_and_age(&self, record: Record) -> (Result<Reservation, LedgerError>, Vec<PaymentKey>) {
        let mut shard = self.shard(&record.key);
        if let Some(known) = shard.records.get(&record.key) {
            return (Ok(Reservation::Known(Box::new(known.clone()))), Vec::new());
        }
        let forgotten = shard.age(self.clock.now());
        self.records.fetch_sub(forgotten.len(), Ordering::Relaxed);
        if let Some(key) = shard.holder_of_id(&record) {
            return (Err(LedgerError::IdTaken { key }), forgotten);
        }
        if self.records.load(Ordering::Relaxed) >= self.max_records {
            return (Err(LedgerError::Full), forgotten);
        }
        self.records.fetch_add(1, Ordering::Relaxed);
        let lease = Lease { key: record.key, epoch: record.epoch };
        shard.insert(record);
        (Ok(Reservation::New(lease)), forgotten)
    }

    /// Keeps a response, and says which others had to go for it.
    pub(super) fn keep_response(&self, key: &PaymentKey, response: StoredResponse) -> Vec<PaymentKey> {
        lock(&self.responses).insert(*key, response)
    }

    /// The record as it is now.
    #[cfg(feature = "sqlite")]
    pub(super) fn snapshot(&self, key: &PaymentKey) -> Option<Record> {
        self.shard(key).records.get(key).cloned()
    }

    /// The response as it is kept, whatever its age.
    #[cfg(feature = "sqlite")]
    pub(super) fn kept_response(&self, key: &PaymentKey) -> Option<Arc<StoredResponse>> {
        lock(&self.responses).get(key, 0)
    }

    /// Brings back a record of an earlier process.
    #[cfg(feature = "sqlite")]
    pub(super) fn restore(&self, record: Record) {
        let mut shard = self.shard(&record.key);
        if !record.in_flight().is_zero() {
            shard.payers.entry(payer_of(&record.key)).or_default().add(&record);
        }
        shard.insert(record);
        self.records.fetch_add(1, Ordering::Relaxed);
    }

    /// Brings back what was settled in records that have aged out.
    #[cfg(feature = "sqlite")]
    pub(super) fn restore_total(&self, settled: u64) {
        if let Some(shard) = self.shards.first() {
            lock(shard).settled_and_forgotten = settled;
        }
    }

    /// All payments of one payer share a shard, so that what it has in flight is summed under one lock.
    fn shard(&self, key: &PaymentKey) -> MutexGuard<'_, Shard> {
        let index = self.hasher.hash_one(key.payer) as usize % SHARDS;
        lock(&self.shards[index])
    }
}

impl Default for MemoryLedger {
    fn default() -> Self {
        Self::new()
    }
}

#[async_trait]
impl Ledger for MemoryLedger {
    async fn reserve(&self, record: Record) -> Result<Reservation, LedgerError> {
        self.reserve_and_age(record).0
    }

    async fn get(&self, key: &PaymentKey) -> Result<Option<Record>, LedgerError> {
        Ok(self.shard(key).records.get(key).cloned())
    }

    async fn take_over(&self, key: &PaymentKey, seen: u64, now: u64, until: u64) -> Result<Option<Lease>, LedgerError> {
        let mut shard = self.shard(key);
        let Some(record) = shard.records.get_mut(key) else { return Ok(None) };
        if record.epoch != seen || record.is_leased(now) {
            return Ok(None);
        }
        record.lease_anew(until);
        Ok(Some(Lease { key: *key, epoch: record.epoch }))
    }

    async fn fulfil(&self, lease: &Lease, step: FulfilmentStep) -> Result<(), LedgerError> {
        let mut shard = self.shard(&lease.key);
        let now = self.clock.now();
        shard.update(&lease.key, now, |record, payer| {
            if record.epoch != lease.epoch {
                return Err(LedgerError::LeaseLost);
            }
            if let FulfilmentStep::Admit { funds: Some(funds), .. } = &step
                && !record.admitted
            {
                payer.covers(record.authorization.value, funds)?;
            }
            Ok(record.fulfil(&step)?)
        })
    }

    async fn settle(&self, key: &PaymentKey, step: SettlementStep) -> Result<(), LedgerError> {
        let now = self.clock.now();
        self.shard(key).update(key, now, |record, _| Ok(record.settle(&step)?))
    }

    async fn discard(&self, lease: &Lease) -> Result<(), LedgerError> {
        let mut shard = self.shard(&lease.key);
        let record = shard.records.get(&lease.key).ok_or(LedgerError::Unknown)?;
        if record.epoch != lease.epoch {
            return Err(LedgerError::LeaseLost);
        }
        if !record.is_discardable() {
            return Err(super::Forbidden { fulfilment: record.fulfilment, settlement: record.settlement }.into());
        }
        shard.remove(&lease.key, self.clock.now());
        self.records.fetch_sub(1, Ordering::Relaxed);
        Ok(())
    }

    async fn store_response(&self, key: &PaymentKey, response: StoredResponse) -> Result<(), LedgerError> {
        self.keep_response(key, response);
        Ok(())
    }

    async fn response(&self, key: &PaymentKey) -> Result<Option<Arc<StoredResponse>>, LedgerError> {
        Ok(lock(&self.responses).get(key, self.clock.now()))
    }

    async fn count_replay(&self, key: &PaymentKey) -> Result<u32, LedgerError> {
        let mut shard = self.shard(key);
        let record = shard.records.get_mut(key).ok_or(LedgerError::Unknown)?;
        record.replays = record.replays.saturating_add(1);
        Ok(record.replays)
    }

    async fn counts(&self) -> Result<Counts, LedgerError> {
        let mut sum = Counts::default();
        for shard in &self.shards {
            let shard = lock(shard);
            sum.settled += shard.settled_and_forgotten;
            for record in shard.records.values() {
                let counter = match record.settlement {
                    Settlement::Settled { .. } | Settlement::Final { .. } => &mut sum.settled,
                    Settlement::Unknown => &mut sum.unknown,
                    Settlement::Dead => &mut sum.failed,
                    Settlement::Due if record.last_failure.is_some() => &mut sum.failed,
                    Settlement::None if record.fulfilment == super::Fulfilment::Released => continue,
                    Settlement::None | Settlement::Due | Settlement::Submitted => &mut sum.pending,
                };
                *counter += 1;
            }
        }
        Ok(sum)
    }

    fn response_limit(&self) -> usize {
        self.limits.body_bytes
    }
}

type PayerKey = (Network, Address, Address);

#[derive(Debug, Default)]
struct Shard {
    records: HashMap<PaymentKey, Record>,
    expiry: BTreeSet<(u64, PaymentKey)>,
    payers: HashMap<PayerKey, PayerBook>,
    /// By the payer and the id it gave.
    ids: HashMap<(PayerKey, B256), PaymentKey>,
    settled_and_forgotten: u64,
}

impl Shard {
    /// Changes a record and keeps the payer's book in step with it.
    fn update(
        &mut self,
        key: &PaymentKey,
        now: u64,
        change: impl FnOnce(&mut Record, &PayerBook) -> Result<(), LedgerError>,
    ) -> Result<(), LedgerError> {
        let record = self.records.get_mut(key).ok_or(LedgerError::Unknown)?;
        let book = self.payers.entry(payer_of(key)).or_default();
        book.age(now);
        let was_paid = record.settlement.paid_by().is_some();
        book.subtract(record);
        let result = change(record, book);
        book.add(record);
        if let (false, Settlement::Settled { block: Some(block), .. }) = (was_paid, record.settlement) {
            let place = book.moved.partition_point(|moved| moved.block <= block);
            book.moved.insert(place, Moved { at: now, block, amount: record.authorization.value });
        }
        if book.is_idle() {
            self.payers.remove(&payer_of(key));
        }
        result
    }

    /// The payment that has this record's id, if there is one.
    fn holder_of_id(&self, record: &Record) -> Option<PaymentKey> {
        self.ids.get(&(payer_of(&record.key), record.id?)).copied()
    }

    fn insert(&mut self, record: Record) {
        if let Some(id) = record.id {
            self.ids.insert((payer_of(&record.key), id), record.key);
        }
        self.expiry.insert((expiry(&record), record.key));
        self.records.insert(record.key, record);
    }

    fn remove(&mut self, key: &PaymentKey, now: u64) {
        let Some(record) = self.records.remove(key) else { return };
        self.expiry.remove(&(expiry(&record), *key));
        if let Some(id) = record.id {
            self.ids.remove(&(payer_of(key), id));
        }
        if record.settlement.paid_by().is_some() {
            self.settled_and_forgotten += 1;
        }
        if let Some(book) = self.payers.get_mut(&payer_of(key)) {
            book.subtract(&record);
            book.age(now);
            if book.is_idle() {
                self.payers.remove(&payer_of(key));
            }
        }
    }

    /// Forgets a few records that can no longer be presented; those with an open fate stay.
    fn age(&mut self, now: u64) -> Vec<PaymentKey> {
        let mut forgotten = Vec::new();
        let expired: Vec<_> = self.expiry.iter().take_while(|(at, _)| *at < now).take(8).copied().collect();
        for (at, key) in expired {
            self.expiry.remove(&(at, key));
            if self.records.get(&key).is_none_or(Record::is_resolved) {
                self.remove(&key, now);
                forgotten.push(key);
            } else {
                self.expiry.insert((now.saturating_add(RETENTION), key));
            }
        }
        forgotten
    }
}

/// What one payer has in flight.
#[derive(Debug, Default)]
struct PayerBook {
    /// Not submitted: every balance still shows it.
    held: U256,
    /// Submitted, and not known to be settled: a balance may show it or not.
    submitted: U256,
    /// By block.
    moved: VecDeque<Moved>,
}

/// An amount that left the balance in a block; a balance read before that block still shows it.
#[derive(Debug)]
struct Moved {
    at: u64,
    block: u64,
    amount: U256,
}

impl PayerBook {
    fn covers(&self, amount: U256, funds: &Funds) -> Result<(), LedgerError> {
        let held = self.held.saturating_add(amount);
        let unseen = self.moved.partition_point(|moved| moved.block <= funds.block);
        let with_moved = self.moved.range(unseen..).fold(held, |sum, moved| sum.saturating_add(moved.amount));
        if held > funds.balance {
            Err(LedgerError::Exposed)
        } else if with_moved > funds.balance {
            Err(LedgerError::Stale)
        } else if with_moved.saturating_add(self.submitted) > funds.balance {
            Err(LedgerError::Undecided)
        } else {
            Ok(())
        }
    }

    fn add(&mut self, record: &Record) {
        let part = self.part_of(record);
        *part = part.saturating_add(record.in_flight());
    }

    fn subtract(&mut self, record: &Record) {
        let part = self.part_of(record);
        *part = part.saturating_sub(record.in_flight());
    }

    fn part_of(&mut self, record: &Record) -> &mut U256 {
        if record.is_resolved() { &mut self.held } else { &mut self.submitted }
    }

    fn age(&mut self, now: u64) {
        while self.moved.front().is_some_and(|moved| moved.at.saturating_add(RECENT) < now) {
            self.moved.pop_front();
        }
    }

    fn is_idle(&self) -> bool {
        self.held.is_zero() && self.submitted.is_zero() && self.moved.is_empty()
    }
}

fn payer_of(key: &PaymentKey) -> PayerKey {
    (key.network, key.asset, key.payer)
}

fn expiry(record: &Record) -> u64 {
    u64::try_from(record.authorization.valid_before).unwrap_or(u64::MAX).saturating_add(RETENTION)
}

/// A panic while a lock was held leaves maps that are still sound: every change is a single step.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
