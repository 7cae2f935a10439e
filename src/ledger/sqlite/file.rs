//! The file: what it holds is read once, and from then on written only.

use std::{
    hash::{BuildHasher as _, RandomState},
    path::Path,
    sync::Arc,
};

use rusqlite::Connection;

use super::{
    super::{LedgerError, MemoryLedger, Record, row},
    batch::Batch,
    migrations::SCHEMA,
    nonces,
    numbers::Numbers,
    responses,
};
use crate::{payment::PaymentKey, sqlite};

/// What SQLite may keep of the file in memory, in its own notation: 16 MiB. What is worked on at one time lies together and is far less.
const CACHE: &str = "-16384";

/// So many responses are taken out of the file at a time. They lie together, at the other end of what is being written.
const DROPPED_TOGETHER: usize = 128;

/// How many statements are kept prepared: all there are.
const STATEMENTS: usize = 32;

/// The ledger's file, held by this process.
pub(super) struct LedgerFile {
    connection: Connection,
    payments: Numbers,
    responses: Numbers,
    /// Numbers of responses that are not kept any more, and still in the file.
    dropped: Vec<i64>,
    hasher: RandomState,
}

impl LedgerFile {
    /// Opens the file, or makes it, and brings what it holds into memory. With it come the keys of what memory had no room for, which is
    /// to be written, too.
    pub(super) fn open(path: &Path, memory: &MemoryLedger) -> Result<(Self, Vec<PaymentKey>), LedgerError> {
        let mut connection = sqlite::open(path).map_err(LedgerError::Backend)?;
        connection.set_prepared_statement_cache_capacity(STATEMENTS);
        connection.pragma_update(None, "cache_size", CACHE).map_err(backend)?;
        SCHEMA.bring_up_to_date(&mut connection).map_err(LedgerError::Backend)?;
        let mut file = Self {
            connection,
            payments: Numbers::default(),
            responses: Numbers::default(),
            dropped: Vec::new(),
            hasher: RandomState::new(),
        };
        let gone = file.load(memory)?;
        Ok((file, gone))
    }

    /// Puts all of it on disk, or nothing: after an error the file is to be given up with what was begun.
    pub(super) fn write(&mut self, batch: Batch) -> Result<(), rusqlite::Error> {
        self.run(BEGIN)?;
        for (sender, number, nonce) in batch.nonces {
            nonces::write(&self.connection, sender, number, nonce)?;
        }
        for (key, record) in batch.payments {
            self.write_payment(key, record)?;
        }
        for (key, response) in batch.responses {
            match response {
                Some(response) => responses::write(&self.connection, self.responses.get(key), &key, &response)?,
                None => self.dropped.extend(self.responses.remove(&key)),
            }
        }
        if self.dropped.len() >= DROPPED_TOGETHER {
            self.drop_responses()?;
        }
        self.run(COMMIT)
    }

    /// Lets go of the file, with nothing left in SQLite's log.
    pub(super) fn close(mut self) {
        // What is left now goes when it is opened again.
        let _ = self.run(BEGIN).and_then(|()| self.drop_responses()).and_then(|()| self.run(COMMIT));
        let _ = self.connection.close();
    }

    fn load(&mut self, memory: &MemoryLedger) -> Result<Vec<PaymentKey>, LedgerError> {
        self.load_payments(memory)?;
        let gone = responses::load(&self.connection, |number, key, response| {
            self.responses.restore(key, number);
            memory.keep_response(&key, Arc::new(response))
        })?;
        nonces::load(&self.connection, memory)?;
        let settled: i64 =
            self.connection.query_row("SELECT settled FROM totals", [], |row| row.get(0)).map_err(backend)?;
        memory.restore_total(settled.cast_unsigned());
        Ok(gone)
    }

    fn load_payments(&mut self, memory: &MemoryLedger) -> Result<(), LedgerError> {
        // Both or neither are written. One without the other is a row that was changed by somebody else.
        let select = "SELECT id, bought.record, progress.record FROM payments AS bought \
            LEFT JOIN progress USING (id) ORDER BY id";
        let mut select = self.connection.prepare(select).map_err(backend)?;
        let mut rows = select.query([]).map_err(backend)?;
        while let Some(row) = rows.next().map_err(backend)? {
            let bought = row.get_ref(1).map_err(backend)?.as_str().map_err(backend)?;
            let progress = row.get_ref(2).map_err(backend)?.as_str_or_null().map_err(backend)?;
            let record = progress.and_then(|progress| row::read(bought, progress)).ok_or_else(unreadable)?;
            self.payments.restore(record.key, row.get(0).map_err(backend)?);
            // Whoever looked after its settlement was the process that is gone.
            memory.restore(Record { settling: None, ..record });
        }
        Ok(())
    }

    fn write_payment(&mut self, key: PaymentKey, record: Option<Record>) -> Result<(), rusqlite::Error> {
        let Some(record) = record else {
            return self.payments.remove(&key).map_or(Ok(()), |number| self.forget(number));
        };
        // Known from the start, but for a key that was let go of and reserved again.
        let identity = self.identity(&record);
        let (number, is_new) = self.payments.get_to_hold(key, identity);
        if is_new {
            let bought = row::bought(&record).map_err(unwritable)?;
            self.connection.prepare_cached(BOUGHT)?.execute((number, bought))?;
        }
        let progress = row::progress(&record).map_err(unwritable)?;
        self.connection.prepare_cached(PROGRESS)?.execute((number, progress)).map(drop)
    }

    fn forget(&self, number: i64) -> Result<(), rusqlite::Error> {
        for statement in [COUNT_FORGOTTEN, "DELETE FROM payments WHERE id = ?", "DELETE FROM progress WHERE id = ?"] {
            self.connection.prepare_cached(statement)?.execute([number])?;
        }
        Ok(())
    }

    fn drop_responses(&mut self) -> Result<(), rusqlite::Error> {
        let mut delete = self.connection.prepare_cached("DELETE FROM responses WHERE id = ?")?;
        for number in self.dropped.drain(..) {
            delete.execute([number])?;
        }
        Ok(())
    }

    /// Tells what is known of a payment from the start from that of another reservation under the same key.
    fn identity(&self, record: &Record) -> u64 {
        let Record { terms, authorization, signature, request, id, reserved_at, .. } = record;
        let signed = (authorization.to, authorization.value, authorization.valid_after, authorization.valid_before);
        self.hasher.hash_one((terms.text().text(), signed, signature.as_bytes(), request, id, reserved_at))
    }

    fn run(&self, statement: &str) -> Result<(), rusqlite::Error> {
        self.connection.prepare_cached(statement)?.execute([]).map(drop)
    }
}

const BEGIN: &str = "BEGIN IMMEDIATE";
const COMMIT: &str = "COMMIT";
const BOUGHT: &str = "INSERT INTO payments (id, record) VALUES (?, ?) \
    ON CONFLICT (id) DO UPDATE SET record = excluded.record";
const PROGRESS: &str = "INSERT INTO progress (id, record) VALUES (?, ?) \
    ON CONFLICT (id) DO UPDATE SET record = excluded.record";
const COUNT_FORGOTTEN: &str = "UPDATE totals SET settled = settled + 1 WHERE EXISTS (SELECT 1 FROM progress WHERE id = ? \
    AND (json_type(record, '$.settlement.settled') IS NOT NULL OR json_type(record, '$.settlement.final') IS NOT NULL))";

pub(super) fn backend(error: impl std::error::Error + Send + Sync + 'static) -> LedgerError {
    LedgerError::Backend(Box::new(error))
}

pub(super) fn unreadable() -> LedgerError {
    LedgerError::Backend("the file holds a row that is not a payment of ours; restore it from a backup".into())
}

pub(super) fn unwritable(error: serde_json::Error) -> rusqlite::Error {
    rusqlite::Error::ToSqlConversionFailure(error.into())
}
