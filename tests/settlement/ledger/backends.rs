//! The backends the contract is run against.

use std::sync::Arc;

use tempfile::TempDir;
use tower_x402::{
    ManualClock,
    ledger::{Ledger, MemoryLedger, ResponseLimits, SqliteLedger, channels::ChannelLedger, conformance::START},
};

/// An empty ledger and the clock it goes by.
pub(crate) struct TestLedger {
    pub(crate) ledger: Arc<dyn Ledger>,
    /// The same ledger.
    pub(crate) channels: Arc<dyn ChannelLedger>,
    pub(crate) clock: Arc<ManualClock>,
    /// Where it lives on disk.
    pub(crate) directory: Option<TempDir>,
}

pub(crate) async fn memory() -> TestLedger {
    let clock = Arc::new(ManualClock::at(START));
    let ledger = Arc::new(MemoryLedger::with(ResponseLimits::default(), 10_000, clock.clone()));
    TestLedger { ledger: ledger.clone(), channels: ledger, clock, directory: None }
}

pub(crate) async fn sqlite() -> TestLedger {
    let clock = Arc::new(ManualClock::at(START));
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("ledger.sqlite");
    let ledger = SqliteLedger::open_with(path, ResponseLimits::default(), 10_000, clock.clone()).await.unwrap();
    let ledger = Arc::new(ledger);
    TestLedger { ledger: ledger.clone(), channels: ledger, clock, directory: Some(directory) }
}

/// A ledger in a schema of its own, on a server that the tests share. Tests on it need the feature `test-postgres`.
#[cfg(feature = "test-postgres")]
pub(crate) async fn postgres() -> TestLedger {
    let clock = Arc::new(ManualClock::at(START));
    let server = support::postgres::Server::shared();
    let builder = tower_x402::ledger::PostgresLedger::builder(server.url()).schema(&server.new_schema());
    let ledger = builder.max_records(10_000).max_connections(8).clock(clock.clone()).connect().await.unwrap();
    let ledger = Arc::new(ledger);
    TestLedger { ledger: ledger.clone(), channels: ledger, clock, directory: None }
}

/// Makes `memory::a` of the conformance test `a`, and so on for every backend and test. The first two arguments are the module of the
/// tests and the field of [`TestLedger`] that they are run on.
macro_rules! on_every_ledger {
    (@ $(#[$gate:meta])? $backend:ident: $tests:path, $field:ident; $($test:ident),*) => {
        $(#[$gate])?
        mod $backend {
            use $tests as contract;

            $(
                #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
                async fn $test() {
                    let test = contract::tests().find(|test| test.name() == stringify!($test)).expect("a test of the contract");
                    let on = $crate::ledger::backends::$backend().await;
                    test.run(on.$field, on.clock).await;
                    drop(on.directory);
                }
            )*
        }
    };
    ($tests:path, $field:ident; $($test:ident),* $(,)?) => {
        on_every_ledger! { @ memory: $tests, $field; $($test),* }
        on_every_ledger! { @ sqlite: $tests, $field; $($test),* }
        on_every_ledger! { @ #[cfg(feature = "test-postgres")] postgres: $tests, $field; $($test),* }

        #[test]
        fn every_test_of_the_contract_is_run() {
            use $tests as contract;
            let all = contract::tests().map(|test| test.name());
            assert_eq!(all.collect::<Vec<_>>(), [$(stringify!($test)),*]);
        }
    };
}
pub(crate) use on_every_ledger;
