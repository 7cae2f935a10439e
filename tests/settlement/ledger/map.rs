//! A ledger as somebody else would write one, for a store of bytes: what is decided, the library decides. The lock stands for a transaction, and
//! a search for an index.

use std::{
    collections::BTreeMap,
    ops::Bound,
    sync::{Arc, Mutex, MutexGuard},
};

use async_trait::async_trait;
use tower_x402::{
    Clock, ManualClock,
    ledger::{
        Counts, JournaledTransaction, Lease, Ledger, LedgerError, Listing, Nonces, PayerKey, PayerSums, PaymentStep,
        Record, Reservation, ResponseLedger, ResponseLimits, Responses, Sender, StoredResponse, TransactionLedger,
        channels::{ChannelLedger, ChannelLedgerError, ChannelRecord, ChannelStep},
    },
    payment::PaymentKey,
    vouchers::ChannelId,
};

/// The largest number of payments, and of payment channels.
const MAX: usize = 100_000;

pub(crate) struct MapLedger {
    store: Mutex<Store>,
    clock: Arc<ManualClock>,
}

struct Store {
    payments: BTreeMap<[u8; 80], Vec<u8>>,
    channels: BTreeMap<ChannelId, Vec<u8>>,
    responses: Responses,
    nonces: Nonces,
    /// What is counted of removed records.
    removed: Counts,
}

pub(crate) async fn open(clock: Arc<ManualClock>) -> (MapLedger, ()) {
    let (payments, channels, nonces) = (BTreeMap::new(), BTreeMap::new(), Nonces::default());
    let store = Store {
        payments,
        channels,
        responses: Responses::new(ResponseLimits::default()),
        nonces,
        removed: Counts::default(),
    };
    (MapLedger { store: Mutex::new(store), clock }, ())
}

fn failed(error: impl std::error::Error + Send + Sync + 'static) -> LedgerError {
    LedgerError::Backend(Box::new(error))
}

fn read(bytes: &[u8]) -> Result<Record, LedgerError> {
    Record::from_json(std::str::from_utf8(bytes).map_err(failed)?).map_err(failed)
}

fn read_channel(bytes: &[u8]) -> Result<ChannelRecord, LedgerError> {
    serde_json::from_slice(bytes).map_err(failed)
}

impl MapLedger {
    fn store(&self) -> MutexGuard<'_, Store> {
        self.store.lock().unwrap()
    }
}

impl Store {
    fn payment(&self, key: &PaymentKey) -> Result<Record, LedgerError> {
        read(self.payments.get(&key.to_bytes()).ok_or(LedgerError::NotFound)?)
    }

    /// Returns all payments in the order of their keys.
    fn payments(&self) -> Result<Vec<Record>, LedgerError> {
        self.payments.values().map(|bytes| read(bytes)).collect()
    }

    fn write(&mut self, record: &Record) -> Result<(), LedgerError> {
        self.payments.insert(record.key.to_bytes(), record.to_json().map_err(failed)?.into_bytes());
        Ok(())
    }

    fn forget(&mut self, now: u64) -> Result<(), LedgerError> {
        for record in self.payments()? {
            if record.forget_at() < now && record.may_be_forgotten(now) {
                self.removed.add_removed(&record);
                self.payments.remove(&record.key.to_bytes());
            }
        }
        Ok(())
    }
}

#[async_trait]
impl Ledger for MapLedger {
    async fn reserve(&self, record: &Record) -> Result<Reservation, LedgerError> {
        let mut store = self.store();
        match store.payment(&record.key) {
            Err(LedgerError::NotFound) => {}
            known => return Ok(Reservation::Known(Box::new(known?))),
        }
        store.forget(self.clock.now())?;
        let has_id = |other: &&Record| record.id.is_some() && other.id == record.id;
        let is_payers = |other: &&Record| PayerKey::of(other) == PayerKey::of(record);
        if let Some(holder) = store.payments()?.iter().filter(has_id).find(is_payers) {
            return Err(LedgerError::IdTaken { key: holder.key });
        }
        if store.payments.len() >= MAX {
            return Err(LedgerError::Full);
        }
        store.write(record)?;
        Ok(Reservation::New(record.lease()))
    }

    async fn get(&self, key: &PaymentKey) -> Result<Option<Record>, LedgerError> {
        self.store().payments.get(&key.to_bytes()).map(|bytes| read(bytes)).transpose()
    }

    async fn advance(&self, key: &PaymentKey, step: &PaymentStep) -> Result<Record, LedgerError> {
        let (mut store, now) = (self.store(), self.clock.now());
        let before = store.payment(key)?;
        let mut record = before.clone();
        record.apply(step, now)?;
        let all = store.payments()?;
        let others = all.iter().filter(|other| other.key != *key && PayerKey::of(other) == PayerKey::of(&before));
        PayerSums::of(others, now).allow(&before, step)?;
        store.write(&record)?;
        if let Some(response) = step.response() {
            store.responses.insert(*key, response.clone());
        }
        Ok(record)
    }

    async fn discard(&self, lease: &Lease) -> Result<(), LedgerError> {
        let mut store = self.store();
        store.payment(&lease.key)?.check_discard(lease)?;
        store.payments.remove(&lease.key.to_bytes());
        Ok(())
    }

    async fn list(&self, listing: &Listing) -> Result<Vec<Record>, LedgerError> {
        let all = self.store().payments()?.into_iter();
        let rest = all.filter(|record| listing.after.is_none_or(|after| record.key > after));
        Ok(rest.filter(|record| listing.holds(record)).take(listing.limit).collect())
    }

    async fn counts(&self) -> Result<Counts, LedgerError> {
        let store = self.store();
        let mut counts = store.removed;
        store.payments()?.iter().for_each(|record| counts.add(record));
        Ok(counts)
    }
}

#[async_trait]
impl ResponseLedger for MapLedger {
    async fn store_response(&self, key: &PaymentKey, response: StoredResponse) -> Result<(), LedgerError> {
        self.store().responses.insert(*key, response);
        Ok(())
    }

    async fn response(&self, key: &PaymentKey) -> Result<Option<StoredResponse>, LedgerError> {
        Ok(self.store().responses.get(key, self.clock.now()))
    }

    fn response_limit(&self) -> usize {
        self.store().responses.limits().longest()
    }
}

#[async_trait]
impl TransactionLedger for MapLedger {
    async fn submit(&self, transaction: JournaledTransaction) -> Result<(), LedgerError> {
        let (mut store, now) = (self.store(), self.clock.now());
        let mut records = Vec::new();
        for key in &transaction.payments {
            records.push(store.payment(key)?);
        }
        let not_due = records.iter().filter(|record| !record.may_be_submitted(&transaction, now));
        let not_due: Vec<PaymentKey> = not_due.map(|record| record.key).collect();
        if !not_due.is_empty() {
            return Err(LedgerError::NotDue(not_due));
        }
        store.nonces.check(&transaction)?;
        for record in &mut records {
            record.submit(&transaction, now)?;
            store.write(record)?;
        }
        store.nonces.insert(transaction);
        Ok(())
    }

    async fn free_nonce(&self, sender: &Sender, nonce: u64, by: u64) -> Result<(), LedgerError> {
        self.store().nonces.free(sender, nonce, by);
        Ok(())
    }

    async fn forget_nonces(&self, sender: &Sender, below: u64) -> Result<(), LedgerError> {
        self.store().nonces.forget(sender, below);
        Ok(())
    }

    async fn submissions(&self, sender: &Sender, from: u64) -> Result<Vec<JournaledTransaction>, LedgerError> {
        Ok(self.store().nonces.list(sender, from))
    }
}

#[async_trait]
impl ChannelLedger for MapLedger {
    async fn channel(&self, id: &ChannelId) -> Result<Option<ChannelRecord>, LedgerError> {
        self.store().channels.get(id).map(|bytes| read_channel(bytes)).transpose()
    }

    async fn advance(&self, id: &ChannelId, step: &ChannelStep) -> Result<ChannelRecord, ChannelLedgerError> {
        let mut store = self.store();
        let record = match store.channels.get(id) {
            Some(bytes) => {
                let mut record = read_channel(bytes)?;
                record.apply(step)?;
                record
            }
            None if store.channels.len() >= MAX => return Err(LedgerError::Full.into()),
            None => ChannelRecord::opened(id, step)?,
        };
        store.channels.insert(*id, serde_json::to_vec(&record).map_err(failed)?);
        if let Some((key, response)) = record.response_in(step) {
            store.responses.insert(key, response.clone());
        }
        Ok(record)
    }

    async fn channels(&self, after: Option<ChannelId>, limit: usize) -> Result<Vec<ChannelRecord>, LedgerError> {
        let after = after.map_or(Bound::Unbounded, Bound::Excluded);
        self.store()
            .channels
            .range((after, Bound::Unbounded))
            .take(limit)
            .map(|(_, bytes)| read_channel(bytes))
            .collect()
    }
}
