//! The backends of the library that the contract is run against.

use std::sync::Arc;

use tempfile::TempDir;
use tower_x402::{
    ManualClock,
    ledger::{MemoryLedger, ResponseLimits, SqliteLedger},
};

pub(crate) async fn memory(clock: Arc<ManualClock>) -> (MemoryLedger, ()) {
    (MemoryLedger::with(ResponseLimits::default(), 10_000, clock), ())
}

/// A ledger with the directory of its file.
pub(crate) async fn sqlite(clock: Arc<ManualClock>) -> (SqliteLedger, TempDir) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("ledger.sqlite");
    let ledger = SqliteLedger::open_with(path, ResponseLimits::default(), 10_000, clock).await.unwrap();
    (ledger, directory)
}

/// A ledger in a schema of its own, on a server that the tests share. Tests on it need the feature `test-postgres`.
#[cfg(feature = "test-postgres")]
pub(crate) async fn postgres(clock: Arc<ManualClock>) -> (tower_x402::ledger::PostgresLedger, ()) {
    let server = support::postgres::Server::shared();
    let builder = tower_x402::ledger::PostgresLedger::builder(server.url()).schema(&server.new_schema());
    (builder.max_records(10_000).max_connections(8).clock(clock).connect().await.unwrap(), ())
}
