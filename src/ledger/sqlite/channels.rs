//! Payment channels in the ledger's file.

use async_trait::async_trait;

use super::{Changes, SqliteLedger};
use crate::{
    ledger::{
        LedgerError,
        channels::{ChannelLedger, ChannelLedgerError, ChannelRecord, ChannelStep},
    },
    vouchers::ChannelId,
};

#[async_trait]
impl ChannelLedger for SqliteLedger {
    async fn channel(&self, id: &ChannelId) -> Result<Option<ChannelRecord>, LedgerError> {
        let record = self.memory.channel_snapshot(id);
        self.commits.channel_on_disk(id).await?;
        Ok(record)
    }

    async fn advance(&self, id: &ChannelId, step: &ChannelStep) -> Result<ChannelRecord, ChannelLedgerError> {
        let change = self.commits.begin()?;
        let (advanced, also) = self.memory.advance_channel(id, step);
        let mut changes = Changes { channels: also.channels, responses: also.responses, ..Changes::default() };
        if advanced.is_err() {
            change.note(changes);
            // The error may show the channel.
            self.commits.channel_on_disk(id).await?;
            return advanced;
        }
        match step.is_progress() {
            true => changes.progress = Some(*id),
            false => changes.channels.push(*id),
        }
        match step {
            // If it is lost, the chain is asked again.
            ChannelStep::Observe { .. } => change.note(changes),
            _ => change.write(changes)?.wait().await?,
        }
        advanced
    }

    async fn channels(&self, after: Option<ChannelId>, limit: usize) -> Result<Vec<ChannelRecord>, LedgerError> {
        let records = self.memory.channels(after, limit).await?;
        self.commits.all_on_disk().await?;
        Ok(records)
    }
}
