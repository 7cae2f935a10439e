//! Channels in memory, which the ledger in SQLite writes to its file.

use std::{
    collections::BTreeMap,
    ops::Bound,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use async_trait::async_trait;

use super::{ChannelLedger, ChannelLedgerError, ChannelRecord, ChannelStep};
use crate::{
    ledger::{Ledger as _, LedgerError, MemoryLedger, StoredResponse},
    payment::PaymentKey,
    vouchers::ChannelId,
};

/// The number of channels that are removed at once when there is no room.
const REMOVED_TOGETHER: usize = 64;

/// The channels of a ledger, in the order of their ids. Each step holds the lock for as long as it takes to decide it.
#[derive(Debug)]
pub(in crate::ledger) struct MemoryChannels {
    records: Mutex<BTreeMap<ChannelId, Box<ChannelRecord>>>,
    max: usize,
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
    pub(in crate::ledger) const fn new(max: usize) -> Self {
        Self { records: Mutex::new(BTreeMap::new()), max }
    }

    /// Returns a copy of a channel.
    pub(in crate::ledger) fn get(&self, id: &ChannelId) -> Option<ChannelRecord> {
        self.lock().get(id).map(|record| (**record).clone())
    }

    fn advance(
        &self,
        id: &ChannelId,
        step: &ChannelStep,
        removed: &mut Vec<ChannelId>,
    ) -> Result<ChannelRecord, ChannelLedgerError> {
        let mut records = self.lock();
        if let Some(record) = records.get_mut(id) {
            // A step that is refused changes nothing.
            record.apply(step)?;
            return Ok((**record).clone());
        }
        let ChannelStep::Open { network, config, observation, now } = step else {
            return Err(ChannelLedgerError::NotFound);
        };
        if records.len() >= self.max {
            removed.extend(make_room(&mut records, *now));
        }
        if records.len() >= self.max {
            return Err(LedgerError::Full.into());
        }
        let record = ChannelRecord::open(*network, *config, *observation, *now);
        records.insert(*id, Box::new(record.clone()));
        Ok(record)
    }

    fn list(&self, after: Option<ChannelId>, limit: usize) -> Vec<ChannelRecord> {
        let after = after.map_or(Bound::Unbounded, Bound::Excluded);
        self.lock().range((after, Bound::Unbounded)).take(limit).map(|(_, record)| (**record).clone()).collect()
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<ChannelId, Box<ChannelRecord>>> {
        self.records.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Removes the channels that were not used for longest, of those that may be forgotten.
fn make_room(records: &mut BTreeMap<ChannelId, Box<ChannelRecord>>, now: u64) -> Vec<ChannelId> {
    let forgettable = records.values().filter(|record| record.is_forgettable(now));
    let mut idle: Vec<_> = forgettable.map(|record| (record.used_at, record.id)).collect();
    idle.sort_unstable();
    idle.truncate(REMOVED_TOGETHER);
    idle.into_iter()
        .map(|(_, id)| {
            records.remove(&id);
            id
        })
        .collect()
}

impl MemoryLedger {
    /// Takes a step, and says what else it changed.
    pub(in crate::ledger) fn advance_channel(
        &self,
        id: &ChannelId,
        step: &ChannelStep,
    ) -> (Result<ChannelRecord, ChannelLedgerError>, AlsoChanged) {
        let mut changed = AlsoChanged::default();
        let advanced = self.channels.advance(id, step, &mut changed.channels);
        if let (Ok(record), ChannelStep::Charge { response: Some(response), .. }) = (&advanced, step)
            && let Some(answer) = record.answers.back()
        {
            let key = record.response_key(answer.request);
            changed.responses = self.keep_response(&key, response.clone());
            changed.responses.push(key);
        }
        (advanced, changed)
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

    async fn channel_response(&self, key: &PaymentKey) -> Result<Option<Arc<StoredResponse>>, LedgerError> {
        self.response(key).await
    }

    async fn channels(&self, after: Option<ChannelId>, limit: usize) -> Result<Vec<ChannelRecord>, LedgerError> {
        Ok(self.channels.list(after, limit))
    }

    fn channel_response_limit(&self) -> usize {
        self.response_limit()
    }
}
