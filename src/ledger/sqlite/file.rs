//! The tables in the file. They are read once, when the ledger is opened, and only written from then on.

use std::{
    collections::{BTreeMap, HashMap},
    hash::Hash,
    path::Path,
};

use alloy_primitives::{Address, B256};
use rusqlite::{Connection, Row};

use super::{
    super::{Counts, JournaledTransaction, LedgerError, MemoryLedger, Nonce, Record, Sender, StoredResponse, stored},
    schema::{self, backend},
};
use crate::{ledger::channels::ChannelRecord, network::Network, payment::PaymentKey, vouchers::ChannelId};

/// SQLite's page cache, in its own notation: 16 MiB. The rows that are changed at one time lie together and take far less.
const CACHE: &str = "-16384";
/// The number of prepared statements that are kept: all there are.
const STATEMENTS: usize = 32;
/// The number of removed responses that are deleted from the file at once. They lie together, far from the rows being written.
const DELETED_TOGETHER: usize = 128;

const BEGIN: &str = "BEGIN IMMEDIATE";
const COMMIT: &str = "COMMIT";
// A row of `payments` has the fields that never change, the row of `progress` with the same id those that steps change.
const READ_PAYMENTS: &str =
    "SELECT id, payments.record, progress.record FROM payments LEFT JOIN progress USING (id) ORDER BY id";
const WRITE_FIXED: &str = "INSERT INTO payments (id, record) VALUES (?, ?) \
    ON CONFLICT (id) DO UPDATE SET record = excluded.record";
const WRITE_CHANGING: &str = "INSERT INTO progress (id, record) VALUES (?, ?) \
    ON CONFLICT (id) DO UPDATE SET record = excluded.record";
const COUNT_SETTLED: &str = "UPDATE totals SET settled = settled + 1 WHERE EXISTS (SELECT 1 FROM progress WHERE id = ? \
    AND (json_type(record, '$.settlement.settled') IS NOT NULL OR json_type(record, '$.settlement.final') IS NOT NULL))";
const COUNT_UNRESOLVED: &str = "UPDATE totals SET unresolved = unresolved + 1 WHERE EXISTS (SELECT 1 FROM progress WHERE id = ? \
    AND json_extract(record, '$.settlement') IN ('submitted', 'unknown'))";
const DELETE_FIXED: &str = "DELETE FROM payments WHERE id = ?";
const DELETE_CHANGING: &str = "DELETE FROM progress WHERE id = ?";
const READ_RESPONSES: &str = "SELECT id, key, stored_at, head, body FROM responses ORDER BY stored_at";
const WRITE_RESPONSE: &str = "INSERT INTO responses (id, key, stored_at, head, body) VALUES (?, ?, ?, ?, ?) \
    ON CONFLICT (id) DO UPDATE SET stored_at = excluded.stored_at, head = excluded.head, body = excluded.body";
const DELETE_RESPONSE: &str = "DELETE FROM responses WHERE id = ?";
const READ_NONCES: &str = "SELECT chain_id, sender, nonce, hash, raw, payments, is_free, submitted_at FROM nonces";
const WRITE_NONCE: &str = "INSERT INTO nonces (chain_id, sender, nonce, hash, raw, payments, is_free, submitted_at) \
    VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (chain_id, sender, nonce) DO UPDATE SET hash = excluded.hash, \
    raw = excluded.raw, payments = excluded.payments, is_free = excluded.is_free, submitted_at = excluded.submitted_at";
const DELETE_NONCE: &str = "DELETE FROM nonces WHERE chain_id = ? AND sender = ? AND nonce = ?";
const READ_CHANNELS: &str = "SELECT id, channels.record, channel_progress.record \
    FROM channels LEFT JOIN channel_progress USING (id) ORDER BY id";
const WRITE_CHANNEL: &str =
    "INSERT INTO channels (id, record) VALUES (?, ?) ON CONFLICT (id) DO UPDATE SET record = excluded.record";
// A row of `channels` has the progress as well, as it was when that row was written.
const WRITE_PROGRESS: &str = "INSERT INTO channel_progress (id, record) VALUES (?, ?) \
    ON CONFLICT (id) DO UPDATE SET record = excluded.record";
const DELETE_CHANNEL: &str = "DELETE FROM channels WHERE id = ?";
const DELETE_PROGRESS: &str = "DELETE FROM channel_progress WHERE id = ?";

/// What one transaction writes: copies of what memory held at one moment, `None` for what it no longer held.
#[derive(Default)]
pub(super) struct Batch {
    pub(super) payments: Vec<PaymentWrite>,
    pub(super) responses: Vec<(PaymentKey, Option<StoredResponse>)>,
    pub(super) nonces: Vec<(Sender, u64, Option<Nonce>)>,
    pub(super) channels: Vec<ChannelWrite>,
}

pub(super) struct ChannelWrite {
    pub(super) id: ChannelId,
    /// Whether more than the channel's progress has to be written.
    pub(super) is_whole: bool,
    pub(super) record: Option<ChannelRecord>,
}

pub(super) struct PaymentWrite {
    pub(super) key: PaymentKey,
    /// Whether the payment was reserved since the last batch, so that its fixed fields have to be written.
    pub(super) is_new: bool,
    pub(super) record: Option<Record>,
}

/// The ledger's file, open and locked.
pub(super) struct LedgerFile {
    connection: Connection,
    payments: RowIds<PaymentKey>,
    responses: RowIds<PaymentKey>,
    channels: RowIds<ChannelId>,
    /// The rows of responses that were removed from memory and are still in the file.
    to_delete: Vec<i64>,
}

impl LedgerFile {
    /// Opens or creates the file, and restores its contents in memory. Returns also the keys of the responses that exceed the limits
    /// of `memory`, which are to be written with the next batch.
    pub(super) fn open(path: &Path, memory: &MemoryLedger) -> Result<(Self, Vec<PaymentKey>), LedgerError> {
        let mut connection = schema::open(path).map_err(LedgerError::Backend)?;
        connection.set_prepared_statement_cache_capacity(STATEMENTS);
        connection.pragma_update(None, "cache_size", CACHE).map_err(backend)?;
        schema::prepare(&mut connection)?;
        let mut file = Self {
            connection,
            payments: RowIds::default(),
            responses: RowIds::default(),
            channels: RowIds::default(),
            to_delete: Vec::new(),
        };
        file.load_payments(memory)?;
        let removed = file.load_responses(memory)?;
        file.load_nonces(memory)?;
        file.load_channels(memory)?;
        let counted = file.connection.query_row("SELECT settled, unresolved FROM totals", [], |row| {
            let [settled, unresolved] = [row.get::<_, i64>(0)?, row.get(1)?].map(i64::cast_unsigned);
            Ok(Counts { settled, unresolved, ..Counts::default() })
        });
        memory.restore_removed(counted.map_err(backend)?);
        Ok((file, removed))
    }

    /// Writes the batch, all or nothing. After an error the file must not be used any more.
    pub(super) fn write(&mut self, batch: Batch) -> Result<(), rusqlite::Error> {
        self.run(BEGIN)?;
        for (sender, number, nonce) in batch.nonces {
            self.write_nonce(sender, number, nonce)?;
        }
        for payment in batch.payments {
            self.write_payment(&payment)?;
        }
        for (key, response) in batch.responses {
            match response {
                Some(response) => self.write_response(&key, &response)?,
                None => self.to_delete.extend(self.responses.remove(&key)),
            }
        }
        for channel in batch.channels {
            self.write_channel(&channel)?;
        }
        if self.to_delete.len() >= DELETED_TOGETHER {
            self.delete_responses()?;
        }
        self.run(COMMIT)
    }

    /// Closes the file, with nothing left in SQLite's log.
    pub(super) fn close(mut self) {
        // Responses that cannot be deleted now are removed when the file is opened again.
        let _ = self.run(BEGIN).and_then(|()| self.delete_responses()).and_then(|()| self.run(COMMIT));
        let _ = self.connection.close();
    }

    fn load_payments(&mut self, memory: &MemoryLedger) -> Result<(), LedgerError> {
        let mut select = self.connection.prepare(READ_PAYMENTS).map_err(backend)?;
        let mut rows = select.query([]).map_err(backend)?;
        while let Some(row) = rows.next().map_err(backend)? {
            let fixed = row.get_ref(1).map_err(backend)?.as_str().map_err(backend)?;
            // Absent only if another program changed the file.
            let changing = row.get_ref(2).map_err(backend)?.as_str_or_null().map_err(backend)?;
            let record = changing.and_then(|changing| stored::read(fixed, changing)).ok_or_else(unreadable)?;
            self.payments.restore(record.key, row.get(0).map_err(backend)?);
            memory.restore(record);
        }
        Ok(())
    }

    fn write_payment(&mut self, payment: &PaymentWrite) -> Result<(), rusqlite::Error> {
        let Some(record) = &payment.record else {
            let Some(id) = self.payments.remove(&payment.key) else { return Ok(()) };
            for statement in [COUNT_SETTLED, COUNT_UNRESOLVED, DELETE_FIXED, DELETE_CHANGING] {
                self.execute(statement, [id])?;
            }
            return Ok(());
        };
        let id = self.payments.get(payment.key);
        if payment.is_new {
            self.execute(WRITE_FIXED, (id, stored::fixed(record).map_err(unwritable)?))?;
        }
        self.execute(WRITE_CHANGING, (id, stored::changing(record).map_err(unwritable)?))
    }

    /// Gives all responses to memory, the oldest first. Returns the keys of those that memory removed again.
    fn load_responses(&mut self, memory: &MemoryLedger) -> Result<Vec<PaymentKey>, LedgerError> {
        let mut select = self.connection.prepare(READ_RESPONSES).map_err(backend)?;
        let mut rows = select.query([]).map_err(backend)?;
        let mut removed = Vec::new();
        while let Some(row) = rows.next().map_err(backend)? {
            let (key, response) = read_response(row).map_err(backend)?.ok_or_else(unreadable)?;
            self.responses.restore(key, row.get(0).map_err(backend)?);
            removed.extend(memory.keep_response(&key, response));
        }
        Ok(removed)
    }

    fn write_response(&mut self, key: &PaymentKey, response: &StoredResponse) -> Result<(), rusqlite::Error> {
        let (id, at) = (self.responses.get(*key), response.stored_at.cast_signed());
        self.execute(WRITE_RESPONSE, (id, &key.to_bytes()[..], at, &response.head[..], &response.body[..]))
    }

    fn delete_responses(&mut self) -> Result<(), rusqlite::Error> {
        for id in std::mem::take(&mut self.to_delete) {
            self.execute(DELETE_RESPONSE, [id])?;
        }
        Ok(())
    }

    fn load_nonces(&self, memory: &MemoryLedger) -> Result<(), LedgerError> {
        let mut select = self.connection.prepare(READ_NONCES).map_err(backend)?;
        let mut rows = select.query([]).map_err(backend)?;
        while let Some(row) = rows.next().map_err(backend)? {
            memory.nonces().restore(read_nonce(row).map_err(backend)?.ok_or_else(unreadable)?);
        }
        Ok(())
    }

    fn write_nonce(&self, sender: Sender, number: u64, nonce: Option<Nonce>) -> Result<(), rusqlite::Error> {
        let (chain_id, address) = (sender.network.chain_id().cast_signed(), sender.address.as_slice());
        let Some(Nonce { transaction, is_free }) = nonce else {
            return self.execute(DELETE_NONCE, (chain_id, address, number.cast_signed()));
        };
        let values = (
            chain_id,
            address,
            number.cast_signed(),
            transaction.hash.as_slice(),
            &transaction.raw[..],
            transaction.payments.iter().flat_map(PaymentKey::to_bytes).collect::<Vec<u8>>(),
            is_free,
            transaction.at.cast_signed(),
        );
        self.execute(WRITE_NONCE, values)
    }

    fn load_channels(&mut self, memory: &MemoryLedger) -> Result<(), LedgerError> {
        let mut select = self.connection.prepare(READ_CHANNELS).map_err(backend)?;
        let mut rows = select.query([]).map_err(backend)?;
        while let Some(row) = rows.next().map_err(backend)? {
            let text = row.get_ref(1).map_err(backend)?.as_str().map_err(backend)?;
            let mut record: ChannelRecord = serde_json::from_str(text).map_err(|_| unreadable())?;
            if let Some(progress) = row.get_ref(2).map_err(backend)?.as_str_or_null().map_err(backend)? {
                record.set_progress(progress).map_err(|_| unreadable())?;
            }
            self.channels.restore(record.id, row.get(0).map_err(backend)?);
            record.restart();
            memory.restore_channel(record);
        }
        Ok(())
    }

    fn write_channel(&mut self, channel: &ChannelWrite) -> Result<(), rusqlite::Error> {
        let Some(record) = &channel.record else {
            let Some(id) = self.channels.remove(&channel.id) else { return Ok(()) };
            self.execute(DELETE_CHANNEL, [id])?;
            return self.execute(DELETE_PROGRESS, [id]);
        };
        let id = self.channels.get(channel.id);
        if channel.is_whole {
            self.execute(WRITE_CHANNEL, (id, serde_json::to_string(record).map_err(unwritable)?))?;
        }
        self.execute(WRITE_PROGRESS, (id, record.progress().map_err(unwritable)?))
    }

    fn execute(&self, statement: &str, values: impl rusqlite::Params) -> Result<(), rusqlite::Error> {
        self.connection.prepare_cached(statement)?.execute(values).map(drop)
    }

    fn run(&self, statement: &str) -> Result<(), rusqlite::Error> {
        self.execute(statement, [])
    }
}

/// The row ids of a table by payment or channel. No id is used twice, so that new rows are at the table's end.
#[derive(Debug)]
struct RowIds<K> {
    ids: HashMap<K, i64>,
    next: i64,
}

impl<K> Default for RowIds<K> {
    fn default() -> Self {
        Self { ids: HashMap::new(), next: 1 }
    }
}

impl<K: Eq + Hash> RowIds<K> {
    fn restore(&mut self, key: K, id: i64) {
        self.ids.insert(key, id);
        self.next = self.next.max(id.saturating_add(1));
    }

    /// Returns the row of `key`, a new one if it has none.
    fn get(&mut self, key: K) -> i64 {
        *self.ids.entry(key).or_insert_with(|| {
            let id = self.next;
            self.next = id.saturating_add(1);
            id
        })
    }

    fn remove(&mut self, key: &K) -> Option<i64> {
        self.ids.remove(key)
    }
}

fn read_response(row: &Row<'_>) -> Result<Option<(PaymentKey, StoredResponse)>, rusqlite::Error> {
    let bytes = |index| row.get::<_, Vec<u8>>(index);
    let stored_at = row.get::<_, i64>(2)?.cast_unsigned();
    let response = StoredResponse { head: bytes(3)?.into(), body: bytes(4)?.into(), stored_at };
    Ok(PaymentKey::from_bytes(&bytes(1)?).map(|key| (key, response)))
}

/// Reads a nonce, whose process is gone.
fn read_nonce(row: &Row<'_>) -> Result<Option<Nonce>, rusqlite::Error> {
    let bytes = |index| row.get::<_, Vec<u8>>(index);
    let (Ok(address), Ok(hash)) = (Address::try_from(&bytes(1)?[..]), B256::try_from(&bytes(3)?[..])) else {
        return Ok(None);
    };
    let Some(payments) = bytes(5)?.chunks(80).map(PaymentKey::from_bytes).collect() else { return Ok(None) };
    let transaction = JournaledTransaction {
        sender: Sender { network: Network::eip155(row.get::<_, i64>(0)?.cast_unsigned()), address },
        nonce: row.get::<_, i64>(2)?.cast_unsigned(),
        hash,
        raw: bytes(4)?.into(),
        payments,
        by: 0,
        at: row.get::<_, i64>(7)?.cast_unsigned(),
        until: 0,
        known_failures: BTreeMap::new(),
    };
    Ok(Some(Nonce { transaction, is_free: row.get(6)? }))
}

fn unreadable() -> LedgerError {
    LedgerError::Backend("the file holds a row that this ledger did not write; restore it from a backup".into())
}

fn unwritable(error: serde_json::Error) -> rusqlite::Error {
    rusqlite::Error::ToSqlConversionFailure(error.into())
}

#[cfg(test)]
mod tests {
    use alloy_primitives::U256;

    use super::*;

    /// Removed responses lie far from the rows that steps change. Each deletion by itself would write another page.
    #[test]
    fn removed_responses_are_deleted_many_at_once() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("ledger.sqlite");
        let (mut file, _) = LedgerFile::open(&path, &MemoryLedger::default()).unwrap();
        let response = StoredResponse { head: "head".into(), body: "good".into(), stored_at: 1 };
        let mut rows_after = |numbers: std::ops::Range<usize>, response: Option<&StoredResponse>| -> usize {
            let key = |n| PaymentKey {
                network: Network::BASE,
                asset: Address::ZERO,
                payer: Address::ZERO,
                nonce: B256::from(U256::from(n)),
            };
            let responses = numbers.map(|n| (key(n), response.cloned())).collect();
            file.write(Batch { responses, ..Batch::default() }).unwrap();
            file.connection.query_row("SELECT COUNT(*) FROM responses", [], |row| row.get::<_, i64>(0)).unwrap()
                as usize
        };
        let all = 2 * DELETED_TOGETHER;
        assert_eq!(rows_after(0..all, Some(&response)), all);
        assert_eq!(rows_after(0..1, None), all);
        assert_eq!(rows_after(1..DELETED_TOGETHER - 1, None), all);
        assert_eq!(rows_after(DELETED_TOGETHER - 1..DELETED_TOGETHER, None), all - DELETED_TOGETHER);
        assert_eq!(rows_after(DELETED_TOGETHER..all, None), 0);
    }
}
