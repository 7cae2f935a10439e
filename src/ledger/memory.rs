//! The ledger in memory: fast, and gone with the process.

use std::{
    collections::{BTreeMap, BTreeSet, hash_map::Entry},
    hash::{Hash, Hasher},
    ops::Bound,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
};

use ahash::AHashMap;
use alloy_primitives::{Address, B256, U256};
use async_trait::async_trait;

#[cfg(feature = "sqlite")]
use super::submission::Nonce;
use super::{
    Counts, FulfilmentStep, Lease, Ledger, LedgerError, Listing, PaymentKey, Record, Reservation, ResponseLimits,
    Sender, Settlement, SettlementState, SettlementStep, StoredResponse, Submission,
    credit::Owed,
    exposure::{PayerBook, Share},
    lazy_set::LazySet,
    responses::ResponseStore,
    submission::Nonces,
};
use crate::{
    clock::{Clock, SystemClock},
    network::Network,
};

/// Locks are held for a few map operations; this many of them keep cores apart.
const SHARDS: usize = 64;

/// How long after `validBefore` a record is kept, in seconds, so that a late reorganization still finds it.
pub(super) const RETENTION: u64 = 900;

/// A ledger in memory.
///
/// For tests, and for those who accept that a restart forgets which payments were already used: until they expire, the
/// chain alone then protects against a second use.
#[derive(Debug)]
pub struct MemoryLedger {
    shards: Vec<Mutex<Shard>>,
    owed: Arc<Owed>,
    responses: Mutex<ResponseStore>,
    /// Locked after the shards.
    nonces: Mutex<Nonces>,
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
        let owed = Arc::new(Owed::default());
        let shard = || Mutex::new(Shard { owed: owed.clone(), ..Shard::default() });
        Self {
            shards: (0..SHARDS).map(|_| shard()).collect(),
            owed,
            responses: Mutex::new(ResponseStore::new(responses)),
            nonces: Mutex::default(),
            limits: responses,
            records: AtomicUsize::new(0),
            max_records,
            clock,
        }
    }

    /// Reserves, and says which records were forgotten on the occasion.
    pub(super) fn reserve_and_age(&self, record: &Record) -> (Result<Reservation, LedgerError>, Vec<PaymentKey>) {
        let mut shard = self.shard(&record.key);
        if let Some(known) = shard.records.get(&record.key) {
            return (Ok(Reservation::Known(known.clone())), Vec::new());
        }
        let forgotten = shard.age(self.clock.now());
        self.records.fetch_sub(forgotten.len(), Ordering::Relaxed);
        if let Some(key) = shard.holder_of_id(record) {
            return (Err(LedgerError::IdTaken { key }), forgotten);
        }
        if self.records.load(Ordering::Relaxed) >= self.max_records {
            return (Err(LedgerError::Full), forgotten);
        }
        self.records.fetch_add(1, Ordering::Relaxed);
        let lease = Lease { key: record.key, epoch: record.epoch };
        shard.insert(Box::new(record.clone()));
        (Ok(Reservation::New(lease)), forgotten)
    }

    /// Takes a step, and says which responses went for the one that came with it.
    pub(super) fn fulfil_and_keep(&self, lease: &Lease, step: &FulfilmentStep) -> Result<Vec<PaymentKey>, LedgerError> {
        let mut shard = self.shard(&lease.key);
        let now = self.clock.now();
        let check = |record: &Record| if record.epoch == lease.epoch { Ok(()) } else { Err(LedgerError::LeaseLost) };
        match step {
            FulfilmentStep::Admit { funds: Some(funds), .. } => shard.look(&lease.key, now, |record, payer| {
                check(record)?;
                if record.admitted { Ok(()) } else { payer.covers(record.authorization.value, funds) }
            })?,
            FulfilmentStep::Defer { limit } => shard.look(&lease.key, now, |record, payer| {
                check(record)?;
                payer.credit.trusts(record.authorization.value, limit)
            })?,
            _ => {}
        }
        shard.update(&lease.key, now, |record| {
            check(record)?;
            match step {
                FulfilmentStep::Defer { limit } => {
                    let amount = record.authorization.value;
                    self.owed.lend(amount, limit.total, || Ok(record.fulfil(step)?))
                }
                _ => Ok(record.fulfil(step)?),
            }
        })?;
        match step {
            FulfilmentStep::Produce { response: Some(response), .. } => {
                Ok(self.keep_response(&lease.key, response.clone()))
            }
            _ => Ok(Vec::new()),
        }
    }

    /// Submits, and says which other nonce of the sender was forgotten for it.
    pub(super) fn submit_and_forget(&self, submission: Submission) -> Result<Option<u64>, LedgerError> {
        let now = self.clock.now();
        // One order for everybody, so that nobody waits in a circle.
        let of_payment = |key: &PaymentKey| index(key);
        let indices: BTreeSet<usize> = submission.payments.iter().map(of_payment).collect();
        let mut shards: BTreeMap<usize, MutexGuard<'_, Shard>> =
            indices.into_iter().map(|index| (index, lock(&self.shards[index]))).collect();
        let mut not_due = Vec::new();
        for key in &submission.payments {
            let record =
                shards.get(&of_payment(key)).and_then(|shard| shard.records.get(key)).ok_or(LedgerError::Unknown)?;
            if !record.may_be_submitted_by(submission.by, now) {
                not_due.push(*key);
            }
        }
        if !not_due.is_empty() {
            return Err(LedgerError::NotDue(not_due));
        }
        let mut nonces = lock(&self.nonces);
        nonces.check(&submission)?;
        for key in &submission.payments {
            if let Some(shard) = shards.get_mut(&of_payment(key)) {
                shard.update(key, now, |record| Ok(record.submit(&submission, now)?))?;
            }
        }
        Ok(nonces.insert(submission))
    }

    /// Keeps a response, and says which others had to go for it.
    pub(super) fn keep_response(&self, key: &PaymentKey, response: Arc<StoredResponse>) -> Vec<PaymentKey> {
        lock(&self.responses).insert(*key, response)
    }

    /// The record as it is now.
    #[cfg(feature = "sqlite")]
    pub(super) fn snapshot(&self, key: &PaymentKey) -> Option<Record> {
        self.shard(key).records.get(key).map(|record| Record::clone(record))
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
        let book = shard.payers.entry(payer_of(&record.key)).or_default();
        book.add(&Share::of(&record));
        if book.is_idle() {
            shard.payers.remove(&payer_of(&record.key));
        }
        self.owed.moved(U256::ZERO, record.owed());
        shard.insert(Box::new(record));
        self.records.fetch_add(1, Ordering::Relaxed);
    }

    /// Brings back a nonce of an earlier process.
    #[cfg(feature = "sqlite")]
    pub(super) fn restore_nonce(&self, sender: Sender, number: u64, nonce: Nonce) {
        lock(&self.nonces).restore(sender, number, nonce);
    }

    /// A nonce as it is now.
    #[cfg(feature = "sqlite")]
    pub(super) fn nonce(&self, sender: &Sender, number: u64) -> Option<Nonce> {
        lock(&self.nonces).get(sender, number)
    }

    /// Whether the nonce was given back just now.
    #[cfg(feature = "sqlite")]
    pub(super) fn free_nonce_now(&self, sender: &Sender, nonce: u64, by: u64) -> bool {
        lock(&self.nonces).free(sender, nonce, by)
    }

    /// Which nonces were forgotten.
    #[cfg(feature = "sqlite")]
    pub(super) fn forget_nonces_now(&self, sender: &Sender, below: u64) -> Vec<u64> {
        lock(&self.nonces).forget(sender, below)
    }

    /// Brings back what was settled in records that have aged out.
    #[cfg(feature = "sqlite")]
    pub(super) fn restore_total(&self, settled: u64) {
        if let Some(shard) = self.shards.first() {
            lock(shard).settled_and_forgotten = settled;
        }
    }

    fn shard(&self, key: &PaymentKey) -> MutexGuard<'_, Shard> {
        lock(&self.shards[index(key)])
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
        Ok(self.shard(key).records.get(key).map(|record| Record::clone(record)))
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

    async fn fulfil(&self, lease: &Lease, step: &FulfilmentStep) -> Result<(), LedgerError> {
        self.fulfil_and_keep(lease, step).map(drop)
    }

    async fn settle(&self, key: &PaymentKey, step: &SettlementStep) -> Result<(), LedgerError> {
        let now = self.clock.now();
        self.shard(key).update(key, now, |record| Ok(record.settle(step, now)?))
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
        self.keep_response(key, Arc::new(response));
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

    async fn submit(&self, submission: Submission) -> Result<(), LedgerError> {
        self.submit_and_forget(submission).map(drop)
    }

    async fn free_nonce(&self, sender: &Sender, nonce: u64, by: u64) -> Result<(), LedgerError> {
        lock(&self.nonces).free(sender, nonce, by);
        Ok(())
    }

    async fn forget_nonces(&self, sender: &Sender, below: u64) -> Result<(), LedgerError> {
        lock(&self.nonces).forget(sender, below);
        Ok(())
    }

    async fn submissions(&self, sender: &Sender, from: u64) -> Result<Vec<Submission>, LedgerError> {
        Ok(lock(&self.nonces).list(sender, from))
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
        let mut sum = Counts::default();
        for shard in &self.shards {
            let shard = lock(shard);
            sum.settled += shard.settled_and_forgotten;
            for record in shard.records.values() {
                let is_released = record.fulfilment == super::Fulfilment::Released;
                let has_failed = record.last_failure.is_some();
                if let Some(counter) = sum.counter(record.settlement.state(), is_released, has_failed) {
                    *counter += 1;
                }
            }
        }
        Ok(sum)
    }

    fn response_limit(&self) -> usize {
        self.limits.body_bytes
    }
}

/// All payments of one payer share a shard, so that what it has in flight is summed under one lock. Addresses are hashes; who
/// looks for some that share a shard has no more of them wait for each other than one payer has.
fn index(key: &PaymentKey) -> usize {
    usize::from(key.payer[19]) % SHARDS
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

#[derive(Debug, Default)]
struct Shard {
    /// Boxed: what is empty in the map takes no room. Payers choose what is hashed here; ahash is keyed at random.
    records: AHashMap<PaymentKey, Box<Record>>,
    expiry: LazySet<(u64, PaymentKey)>,
    /// All records by state of settlement, so that the few open ones are found among the many closed.
    by_state: BTreeMap<SettlementState, LazySet<PaymentKey>>,
    payers: AHashMap<PayerKey, PayerBook>,
    /// By the payer and the id it gave.
    ids: AHashMap<(PayerKey, B256), PaymentKey>,
    settled_and_forgotten: u64,
    owed: Arc<Owed>,
}

impl Shard {
    /// Looks at a payment and at the book of its payer, in which it does not count itself.
    fn look(
        &mut self,
        key: &PaymentKey,
        now: u64,
        judge: impl FnOnce(&Record, &PayerBook) -> Result<(), LedgerError>,
    ) -> Result<(), LedgerError> {
        let record = self.records.get(key).ok_or(LedgerError::Unknown)?;
        let Some(book) = self.payers.get_mut(&payer_of(key)) else { return judge(record, &PayerBook::default()) };
        let share = Share::of(record);
        book.age(now);
        book.subtract(&share);
        let verdict = judge(record, book);
        book.add(&share);
        verdict
    }

    /// Changes a record and keeps the payer's book in step with it.
    fn update(
        &mut self,
        key: &PaymentKey,
        now: u64,
        change: impl FnOnce(&mut Record) -> Result<(), LedgerError>,
    ) -> Result<(), LedgerError> {
        let record = self.records.get_mut(key).ok_or(LedgerError::Unknown)?;
        let before = (Share::of(record), record.settlement);
        let owed = record.deferred.then(|| record.owed());
        let result = change(record);
        // What was deferred just now is in the sum already.
        if let Some(before) = owed {
            self.owed.moved(before, record.owed());
        }
        let after = (Share::of(record), record.settlement);
        // Many steps are none in the book.
        if after.0 != before.0 {
            let mut entry = match self.payers.entry(payer_of(key)) {
                Entry::Occupied(known) => known,
                Entry::Vacant(new) => new.insert_entry(PayerBook::default()),
            };
            let book = entry.get_mut();
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
            if let Some(keys) = self.by_state.get_mut(&from) {
                keys.remove(key);
            }
            self.by_state.entry(to).or_default().insert(*key);
        }
        result
    }

    /// In order, as many as asked for.
    fn list(&mut self, listing: &Listing) -> Vec<Record> {
        let Self { by_state, records, .. } = self;
        let from = listing.after.map_or(Bound::Unbounded, Bound::Excluded);
        let is_listed = |state| listing.settlement.is_empty() || listing.settlement.contains(state);
        let mut list = Vec::new();
        for (_, keys) in by_state.iter_mut().filter(|(state, _)| is_listed(state)) {
            let found = keys.sorted().range((from, Bound::Unbounded)).filter_map(|key| records.get(key));
            let found = found.filter(|record| listing.holds(record)).take(listing.limit);
            list.extend(found.map(|record| Record::clone(record)));
        }
        list
    }

    /// The payment that has this record's id, if there is one.
    fn holder_of_id(&self, record: &Record) -> Option<PaymentKey> {
        self.ids.get(&(payer_of(&record.key), record.id?)).copied()
    }

    fn insert(&mut self, record: Box<Record>) {
        if let Some(id) = record.id {
            self.ids.insert((payer_of(&record.key), id), record.key);
        }
        self.expiry.insert((expiry(&record), record.key));
        self.by_state.entry(record.settlement.state()).or_default().insert(record.key);
        self.records.insert(record.key, record);
    }

    fn remove(&mut self, key: &PaymentKey, now: u64) {
        let Some(record) = self.records.remove(key) else { return };
        self.expiry.remove(&(expiry(&record), *key));
        if let Some(keys) = self.by_state.get_mut(&record.settlement.state()) {
            keys.remove(key);
        }
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
    fn age(&mut self, now: u64) -> Vec<PaymentKey> {
        let mut forgotten = Vec::new();
        let is_expired = |(at, _): &(u64, PaymentKey)| *at < now;
        if !self.expiry.may_begin_with(is_expired) {
            return forgotten;
        }
        let expired: Vec<_> =
            self.expiry.sorted().iter().take_while(|entry| is_expired(entry)).take(8).copied().collect();
        for (at, key) in expired {
            self.expiry.remove(&(at, key));
            if self.records.get(&key).is_none_or(|record| record.may_be_forgotten(now)) {
                self.remove(&key, now);
                forgotten.push(key);
            } else {
                self.expiry.insert((now.saturating_add(RETENTION), key));
            }
        }
        forgotten
    }
}

fn payer_of(key: &PaymentKey) -> PayerKey {
    PayerKey { network: key.network, asset: key.asset, payer: key.payer }
}

pub(super) fn expiry(record: &Record) -> u64 {
    u64::try_from(record.authorization.valid_before).unwrap_or(u64::MAX).saturating_add(RETENTION)
}

/// A panic while a lock was held leaves maps that are still sound: every change is a single step.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
