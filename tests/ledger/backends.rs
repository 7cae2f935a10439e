//! The backends the contract is run against.

use std::sync::Arc;

use tower_x402::{
    ManualClock,
    ledger::{Ledger, MemoryLedger, ResponseLimits},
};

/// When the clock of every test ledger starts, in Unix seconds.
pub(crate) const CLOCK_START: u64 = 1_800_000_000;

/// An empty ledger and the clock it goes by.
pub(crate) struct TestLedger {
    pub(crate) ledger: Arc<dyn Ledger>,
    pub(crate) clock: Arc<ManualClock>,
}

pub(crate) fn memory() -> TestLedger {
    let clock = Arc::new(ManualClock::at(CLOCK_START));
    let ledger = MemoryLedger::with(ResponseLimits::default(), 10_000, clock.clone());
    TestLedger { ledger: Arc::new(ledger), clock }
}

/// Makes `memory::a` of `async fn a(ledger: TestLedger)`, and so on for every backend.
macro_rules! on_every_ledger {
    ($($test:ident),* $(,)?) => {
        mod memory {
            $(
                #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
                async fn $test() {
                    super::$test($crate::backends::memory()).await;
                }
            )*
        }
    };
}
pub(crate) use on_every_ledger;
