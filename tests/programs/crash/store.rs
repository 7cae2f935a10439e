//! The durable ledgers, and their contents when the process is dead.

use std::{path::PathBuf, sync::Arc};

use serde::{Deserialize, Serialize};
use tempfile::TempDir;
use tower_x402::{
    Clock,
    ledger::{
        Ledger, Listing, MemoryLedger, Record, ResponseLimits, SqliteLedger, StoredResponse,
        channels::{ChannelLedger, ChannelRecord},
    },
};

/// The location of a ledger.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum Store {
    Sqlite(PathBuf),
    /// In memory: lost with the process.
    Nowhere,
    #[cfg(feature = "test-postgres")]
    Postgres {
        url: String,
        schema: String,
    },
}

/// An open ledger.
pub(crate) struct Open {
    pub(crate) ledger: Arc<dyn Ledger>,
    pub(crate) channels: Arc<dyn ChannelLedger>,
    sqlite: Option<Arc<SqliteLedger>>,
}

impl Store {
    pub(crate) async fn open(&self, clock: Arc<dyn Clock>) -> Open {
        match self {
            Self::Sqlite(path) => {
                let ledger = SqliteLedger::open_with(path, ResponseLimits::default(), 10_000, clock).await;
                let ledger = Arc::new(ledger.expect("the file opens"));
                Open { ledger: ledger.clone(), channels: ledger.clone(), sqlite: Some(ledger) }
            }
            Self::Nowhere => {
                let ledger = Arc::new(MemoryLedger::with(ResponseLimits::default(), 10_000, clock));
                Open { ledger: ledger.clone(), channels: ledger, sqlite: None }
            }
            #[cfg(feature = "test-postgres")]
            Self::Postgres { url, schema } => {
                let builder = tower_x402::ledger::PostgresLedger::builder(url).schema(schema).max_connections(8);
                let ledger = builder.max_records(10_000).clock(clock).connect().await;
                let ledger = Arc::new(ledger.expect("the database answers"));
                Open { ledger: ledger.clone(), channels: ledger, sqlite: None }
            }
        }
    }

    /// Returns the records that a dead process left. Reads a copy if opening the store would change it.
    pub(crate) async fn remains(&self, clock: Arc<dyn Clock>) -> Vec<(Record, Option<StoredResponse>)> {
        let (open, _copy) = self.open_copy(clock).await;
        let mut remains = Vec::new();
        let mut listing = Listing::of([]);
        loop {
            let page = open.ledger.list(&listing).await.expect("the ledger lists");
            let Some(last) = page.last() else { break };
            listing.after = Some(last.key);
            for record in page {
                let response = open.ledger.response(&record.key).await.expect("the ledger answers");
                remains.push((record, response));
            }
        }
        open.close().await;
        remains
    }

    /// Returns the channels that a dead process left.
    pub(crate) async fn channels(&self, clock: Arc<dyn Clock>) -> Vec<ChannelRecord> {
        let (open, _copy) = self.open_copy(clock).await;
        let channels = open.channels.channels(None, 1_000).await.expect("the ledger lists");
        open.close().await;
        channels
    }

    async fn open_copy(&self, clock: Arc<dyn Clock>) -> (Open, TempDir) {
        let copy = tempfile::tempdir().expect("a directory");
        let store = match self {
            Self::Sqlite(path) => {
                let name = path.file_name().and_then(|name| name.to_str()).expect("a name");
                for part in [name.to_owned(), format!("{name}-wal")] {
                    let from = path.with_file_name(&part);
                    if from.exists() {
                        std::fs::copy(from, copy.path().join(part)).expect("a copy");
                    }
                }
                Self::Sqlite(copy.path().join(name))
            }
            other => other.clone(),
        };
        (store.open(clock).await, copy)
    }
}

impl Open {
    async fn close(self) {
        if let Some(sqlite) = self.sqlite {
            sqlite.close().await;
        }
    }

    /// Returns the number of transactions that this process committed, if it is counted.
    pub(crate) fn commits(&self) -> Option<u64> {
        self.sqlite.as_ref().map(|ledger| ledger.commits())
    }
}
