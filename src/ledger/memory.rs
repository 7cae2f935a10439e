//! The ledger in memory: fast, and gone with the process.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
};

use async_trait::async_trait;

use super::{
    Counts, FulfilmentStep, Lease, Ledger, LedgerError, Listing, Record, Reservation, ResponseLimits, Sender,
    SettlementStep, StoredResponse, Submission, credit::Owed, responses::ResponseStore, shard::Shard,
    submission::Nonces,
};
#[cfg(feature = "sqlite")]
use super::{Settlement, submission::Nonce};
use crate::{
    clock::{Clock, SystemClock},
    payment::PaymentKey,
};

/// Locks are held for a few map operations; this many of them keep cores apart.
const SHARDS: usize = 64;

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
    /// Whose turn it is to forget, beside that of who reserves.
    turns: AtomicUsize,
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
        let shard = || Mutex::new(Shard::new(owed.clone()));
        Self {
            shards: (0..SHARDS).map(|_| shard()).collect(),
            owed,
            responses: Mutex::new(ResponseStore::new(responses)),
            nonces: Mutex::default(),
            limits: responses,
            records: AtomicUsize::new(0),
            max_records,
            turns: AtomicUsize::new(0),
            clock,
        }
    }

    /// Reserves, and says which records were forgotten on the occasion.
    pub(super) fn reserve_and_age(&self, record: &Record) -> (Result<Reservation, LedgerError>, Vec<PaymentKey>) {
        let (mut reservation, mut forgotten) = self.reserve_among_its_own(record);
        if matches!(reservation, Ok(Reservation::Known(_))) {
            return (reservation, forgotten);
        }
        // Payers who come no more have nobody else to forget theirs.
        forgotten.extend(self.age(self.turns.fetch_add(1, Ordering::Relaxed) % SHARDS));
        if matches!(reservation, Err(LedgerError::Full)) {
            forgotten.extend((0..SHARDS).flat_map(|index| self.age(index)));
            let (again, more) = self.reserve_among_its_own(record);
            reservation = again;
            forgotten.extend(more);
        }
        (reservation, forgotten)
    }

    /// The same with nobody forgotten but payers of the same shard.
    fn reserve_among_its_own(&self, record: &Record) -> (Result<Reservation, LedgerError>, Vec<PaymentKey>) {
        let mut shard = self.shard(&record.key);
        if let Some(known) = shard.records.get(&record.key) {
            return (Ok(Reservation::Known(Box::new(known.clone()))), Vec::new());
        }
        let forgotten = self.age_locked(&mut shard);
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

    pub(super) fn take_over_now(&self, key: &PaymentKey, seen: u64, now: u64, until: u64) -> Option<Lease> {
        let mut shard = self.shard(key);
        let record = shard.records.get_mut(key)?;
        if record.epoch != seen || record.is_leased(now) {
            return None;
        }
        record.lease_anew(until);
        Some(Lease { key: *key, epoch: record.epoch })
    }

    /// Takes a step, and says which responses went for the one that came with it.
    pub(super) fn fulfil_and_keep(&self, lease: &Lease, step: &FulfilmentStep) -> Result<Vec<PaymentKey>, LedgerError> {
        let mut shard = self.shard(&lease.key);
        let now = || self.clock.now();
        let check = |record: &Record| if record.epoch == lease.epoch { Ok(()) } else { Err(LedgerError::LeaseLost) };
        match step {
            FulfilmentStep::Admit { funds: Some(funds), .. } => shard.look(&lease.key, now(), |record, payer| {
                check(record)?;
                if record.admitted { Ok(()) } else { payer.covers(record.authorization.value, funds) }
            })?,
            FulfilmentStep::Defer { limit } => shard.look(&lease.key, now(), |record, payer| {
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

    pub(super) fn settle_now(&self, key: &PaymentKey, step: &SettlementStep) -> Result<(), LedgerError> {
        let now = self.clock.now();
        self.shard(key).update(key, || now, |record| Ok(record.settle(step, now)?))
    }

    pub(super) fn discard_now(&self, lease: &Lease) -> Result<(), LedgerError> {
        let mut shard = self.shard(&lease.key);
        let record = shard.records.get(&lease.key).ok_or(LedgerError::NotFound)?;
        if record.epoch != lease.epoch {
            return Err(LedgerError::LeaseLost);
        }
        if !record.is_discardable() {
            return Err(
                super::InvalidTransition { fulfilment: record.fulfilment, settlement: record.settlement }.into()
            );
        }
        shard.remove(&lease.key, self.clock.now());
        self.records.fetch_sub(1, Ordering::Relaxed);
        Ok(())
    }

    pub(super) fn count_replay_now(&self, key: &PaymentKey) -> Result<u32, LedgerError> {
        let mut shard = self.shard(key);
        let record = shard.records.get_mut(key).ok_or(LedgerError::NotFound)?;
        record.replays = record.replays.saturating_add(1);
        Ok(record.replays)
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
                shards.get(&of_payment(key)).and_then(|shard| shard.records.get(key)).ok_or(LedgerError::NotFound)?;
            if !record.may_be_submitted(&submission, now) {
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
                shard.update(key, || now, |record| Ok(record.submit(&submission, now)?))?;
            }
        }
        Ok(nonces.insert(submission))
    }

    /// Keeps a response, and says which others had to go for it.
    pub(super) fn keep_response(&self, key: &PaymentKey, response: Arc<StoredResponse>) -> Vec<PaymentKey> {
        lock(&self.responses).insert(*key, response)
    }

    /// Whether nothing is lost if a payment that is worked on were not known: it is the first time, and nobody has paid.
    #[cfg(feature = "sqlite")]
    pub(super) fn is_new(&self, key: &PaymentKey) -> bool {
        let shard = self.shard(key);
        shard.records.get(key).is_some_and(|record| record.attempts <= 1 && record.settlement == Settlement::None)
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
        self.shard(&record.key).restore(record);
        self.records.fetch_add(1, Ordering::Relaxed);
    }

    /// Brings back a transaction of an earlier process, of each nonce the oldest first.
    #[cfg(feature = "sqlite")]
    pub(super) fn restore_submission(&self, submission: Submission, is_free: bool) {
        lock(&self.nonces).restore(submission, is_free);
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

    fn age(&self, index: usize) -> Vec<PaymentKey> {
        self.age_locked(&mut lock(&self.shards[index]))
    }

    fn age_locked(&self, shard: &mut Shard) -> Vec<PaymentKey> {
        let forgotten = shard.age(self.clock.now());
        self.records.fetch_sub(forgotten.len(), Ordering::Relaxed);
        forgotten
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
        Ok(self.shard(key).records.get(key).cloned())
    }

    async fn take_over(&self, key: &PaymentKey, seen: u64, now: u64, until: u64) -> Result<Option<Lease>, LedgerError> {
        Ok(self.take_over_now(key, seen, now, until))
    }

    async fn fulfil(&self, lease: &Lease, step: &FulfilmentStep) -> Result<(), LedgerError> {
        self.fulfil_and_keep(lease, step).map(drop)
    }

    async fn settle(&self, key: &PaymentKey, step: &SettlementStep) -> Result<(), LedgerError> {
        self.settle_now(key, step)
    }

    async fn discard(&self, lease: &Lease) -> Result<(), LedgerError> {
        self.discard_now(lease)
    }

    async fn store_response(&self, key: &PaymentKey, response: StoredResponse) -> Result<(), LedgerError> {
        self.keep_response(key, Arc::new(response));
        Ok(())
    }

    async fn response(&self, key: &PaymentKey) -> Result<Option<Arc<StoredResponse>>, LedgerError> {
        Ok(lock(&self.responses).get(key, self.clock.now()))
    }

    async fn count_replay(&self, key: &PaymentKey) -> Result<u32, LedgerError> {
        self.count_replay_now(key)
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

/// A panic while a lock was held leaves maps that are still sound: every change is a single step.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
