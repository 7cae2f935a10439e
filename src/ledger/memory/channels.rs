//! Channels in memory, which the ledger in SQLite writes to its file.

use std::{
    collections::BTreeMap,
    ops::Bound,
    sync::{Mutex, MutexGuard, PoisonError},
};

use async_trait::async_trait;

use super::MemoryLedger;
use crate::{
    ledger::{
        LedgerError,
        channels::{ChannelLedger, ChannelLedgerError, ChannelRecord, ChannelStep},
    },
    payment::PaymentKey,
    vouchers::ChannelId,
};

/// The number of channels that are removed at once when there is no room.
const REMOVED_TOGETHER: usize = 64;

/// The channels of a ledger. Each step holds the lock for as long as it takes to decide it.
#[derive(Debug)]
pub(super) struct MemoryChannels {
    channels: Mutex<Channels>,
    max: usize,
}

#[derive(Debug, Default)]
struct Channels {
    /// In the order of their ids.
    records: BTreeMap<ChannelId, Box<ChannelRecord>>,
    /// When room was looked for last, so that a full ledger does not look for it with every request.
    searched_at: u64,
}

/// What a step changed besides the channel itself.
#[derive(Debug, Default)]
pub(in crate::ledger) struct AlsoChanged {
    /// Channels that were removed to make room.
    pub(in crate::ledger) channels: Vec<ChannelId>,
    /// Responses that were kept or removed.
    pub(in crate::ledger) responses: Vec<PaymentKey>,
}

impl MemoryChannels {
    pub(super) fn new(max: usize) -> Self {
        Self { channels: Mutex::default(), max }
    }

    fn get(&self, id: &ChannelId) -> Option<ChannelRecord> {
        self.lock().records.get(id).map(|record| (**record).clone())
    }

    /// Takes a step. `keep` is called with the channel after it, before another step can follow.
    fn advance(
        &self,
        id: &ChannelId,
        step: &ChannelStep,
        removed: &mut Vec<ChannelId>,
        keep: impl FnOnce(&ChannelRecord),
    ) -> Result<ChannelRecord, ChannelLedgerError> {
        let mut channels = self.lock();
        if let Some(record) = channels.records.get_mut(id) {
            // A step that is refused changes nothing.
            record.apply(step)?;
            keep(record);
            return Ok((**record).clone());
        }
        let record = ChannelRecord::opened(id, step)?;
        if channels.records.len() >= self.max {
            removed.extend(channels.make_room(record.used_at));
        }
        if channels.records.len() >= self.max {
            return Err(LedgerError::Full.into());
        }
        channels.records.insert(*id, Box::new(record.clone()));
        Ok(record)
    }

    fn list(&self, after: Option<ChannelId>, limit: usize) -> Vec<ChannelRecord> {
        let after = after.map_or(Bound::Unbounded, Bound::Excluded);
        let channels = self.lock();
        channels.records.range((after, Bound::Unbounded)).take(limit).map(|(_, record)| (**record).clone()).collect()
    }

    fn lock(&self) -> MutexGuard<'_, Channels> {
        self.channels.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Channels {
    /// Removes the channels that were not used for longest, of those that may be forgotten.
    fn make_room(&mut self, now: u64) -> Vec<ChannelId> {
        if self.searched_at == now {
            return Vec::new();
        }
        let may_go = |record: &ChannelRecord| record.forget_at().is_some_and(|at| at <= now);
        let records = self.records.values().filter(|record| may_go(record));
        let mut idle: Vec<_> = records.map(|record| (record.used_at, record.id)).collect();
        if idle.is_empty() {
            self.searched_at = now;
        }
        idle.sort_unstable();
        idle.truncate(REMOVED_TOGETHER);
        idle.into_iter()
            .map(|(_, id)| {
                self.records.remove(&id);
                id
            })
            .collect()
    }
}

impl MemoryLedger {
    /// Takes a step, and says what else it changed.
    pub(in crate::ledger) fn advance_channel(
        &self,
        id: &ChannelId,
        step: &ChannelStep,
    ) -> (Result<ChannelRecord, ChannelLedgerError>, AlsoChanged) {
        let mut changed = AlsoChanged::default();
        let responses = &mut changed.responses;
        let advanced = self.channels.advance(id, step, &mut changed.channels, |record| {
            if let Some((key, response)) = record.response_in(step) {
                *responses = self.keep_response(&key, response.clone());
                responses.push(key);
            }
        });
        (advanced, changed)
    }
}

/// What the ledger in SQLite reads and restores.
#[cfg(feature = "sqlite")]
impl MemoryLedger {
    pub(in crate::ledger) fn channel_snapshot(&self, id: &ChannelId) -> Option<ChannelRecord> {
        self.channels.get(id)
    }

    pub(in crate::ledger) fn restore_channel(&self, record: ChannelRecord) {
        self.channels.lock().records.insert(record.id, Box::new(record));
    }
}

#[async_trait]
impl ChannelLedger for MemoryLedger {
    async fn channel(&self, id: &ChannelId) -> Result<Option<ChannelRecord>, LedgerError> {
        Ok(self.channels.get(id))
    }

    async fn advance(&self, id: &ChannelId, step: &ChannelStep) -> Result<ChannelRecord, ChannelLedgerError> {
        self.advance_channel(id, step).0
    }

    async fn channels(&self, after: Option<ChannelId>, limit: usize) -> Result<Vec<ChannelRecord>, LedgerError> {
        Ok(self.channels.list(after, limit))
    }
}
