//! The backends the contract is run against.

use std::sync::Arc;

use tempfile::TempDir;
use tower_x402::{
    ManualClock,
    ledger::{Ledger, MemoryLedger, ResponseLimits, SqliteLedger, conformance::START},
};

/// An empty ledger and the clock it goes by.
pub(crate) struct TestLedger {
    pub(crate) ledger: Arc<dyn Ledger>,
    pub(crate) clock: Arc<ManualClock>,
    /// Where it lives on disk.
    pub(crate) directory: Option<TempDir>,
}

pub(crate) async fn memory() -> TestLedger {
    let clock = Arc::new(ManualClock::at(START));
    let ledger = MemoryLedger::with(ResponseLimits::default(), 10_000, clock.clone());
    TestLedger { ledger: Arc::new(ledger), clock, directory: None }
}

pub(crate) async fn sqlite() -> TestLedger {
    let clock = Arc::new(ManualClock::at(START));
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("ledger.sqlite");
    let ledger = SqliteLedger::open_with(path, ResponseLimits::default(), 10_000, clock.clone()).await.unwrap();
    TestLedger { ledger: Arc::new(ledger), clock, directory: Some(directory) }
}

/// A ledger in a schema of its own, on a server that the tests share. Tests on it need the feature `test-postgres`.
#[cfg(feature = "test-postgres")]
pub(crate) async fn postgres() -> TestLedger {
    let clock = Arc::new(ManualClock::at(START));
    let server = support::postgres::Server::shared();
    let builder = tower_x402::ledger::PostgresLedger::builder(server.url()).schema(&server.new_schema());
    let ledger = builder.max_records(10_000).max_connections(8).clock(clock.clone()).connect().await.unwrap();
    TestLedger { ledger: Arc::new(ledger), clock, directory: None }
}

/// Makes `memory::a` of the conformance test `a`, and so on for every backend and test.
macro_rules! on_every_ledger {
    (@ $(#[$gate:meta])? $backend:ident: $($test:ident),*) => {
        $(#[$gate])?
        mod $backend {
            $(
                #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
                async fn $test() {
                    let test = super::Test::named(stringify!($test)).expect("a test of the contract");
                    let $crate::ledger::backends::TestLedger { ledger, clock, directory: _directory } =
                        $crate::ledger::backends::$backend().await;
                    test.run(ledger, clock).await;
                }
            )*
        }
    };
    ($($test:ident),* $(,)?) => {
        on_every_ledger! { @ memory: $($test),* }
        on_every_ledger! { @ sqlite: $($test),* }
        on_every_ledger! { @ #[cfg(feature = "test-postgres")] postgres: $($test),* }

        #[test]
        fn every_test_of_the_contract_is_run() {
            let all = tower_x402::ledger::conformance::tests().map(|test| test.name());
            assert_eq!(all.collect::<Vec<_>>(), [$(stringify!($test)),*]);
        }
    };
}
pub(crate) use on_every_ledger;
