//! The crate's own devnet as a chain, reached over HTTP like any other.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use alloy_primitives::{Address, Bytes, U256};
use alloy_provider::{DynProvider, Provider, ProviderBuilder};
use alloy_sol_types::{SolCall, sol};
use async_trait::async_trait;
use tower_x402::{Clock, Usdc};
use x402_devnet::{BlockTime, Devnet, DevnetPort};

use crate::{authorization::unix_now, chain::Chain};

sol! {
    function blacklist(address account) external;
    function pause() external;
}

/// A devnet on a port.
pub struct DevnetChain {
    /// The chain itself, for what only it can do: faults, stalls, reorgs.
    pub devnet: Devnet,
    port: DevnetPort,
    provider: DynProvider,
    clock: Arc<TestClock>,
}

impl DevnetChain {
    /// Starts a devnet: a block per transaction (`None`), or one every `block_time`.
    pub async fn start(block_time: Option<Duration>) -> Self {
        Self::start_with(block_time, 0).await
    }

    /// The same, with blocks that are final only so many blocks later.
    pub async fn start_with(block_time: Option<Duration>, finality_depth: u64) -> Self {
        Self::start_by(TestClock::default(), block_time, finality_depth).await
    }

    /// A devnet on which it is this time from the first block on, until told otherwise; a block per transaction.
    pub async fn start_at(seconds: u64) -> Self {
        Self::start_by(TestClock(AtomicU64::new(seconds)), None, 0).await
    }

    async fn start_by(clock: TestClock, block_time: Option<Duration>, finality_depth: u64) -> Self {
        let clock = Arc::new(clock);
        let devnet = Devnet::builder()
            .block_time(block_time.map_or(BlockTime::Instant, BlockTime::Every))
            .finality_depth(finality_depth)
            .clock(Arc::clone(&clock) as Arc<dyn Clock>)
            .start()
            .await
            .expect("the devnet starts");
        Self { clock, ..Self::of(devnet).await }
    }

    /// A devnet that runs, and whose clock is somebody else's.
    pub async fn of(devnet: Devnet) -> Self {
        let port = devnet.serve("127.0.0.1:0").await.expect("a free port");
        let provider = ProviderBuilder::default().connect_http(port.url().clone()).erased();
        Self { devnet, port, provider, clock: Arc::default() }
    }
}

#[async_trait]
impl Chain for DevnetChain {
    fn rpc_url(&self) -> String {
        self.port.url().to_string()
    }

    fn provider(&self) -> &DynProvider {
        &self.provider
    }

    async fn mint(&self, to: Address, units: u64) {
        self.devnet.mint(to, Usdc::from_atomic(units)).expect("the devnet mints");
    }

    async fn fund(&self, account: Address, wei: U256) {
        self.devnet.fund(account, wei);
    }

    async fn set_code(&self, account: Address, code: Bytes) {
        self.devnet.set_code(account, code);
    }

    async fn deploy(&self, init_code: Bytes) -> Address {
        self.devnet.deploy(init_code).expect("the creation code runs")
    }

    async fn mine(&self) {
        self.devnet.mine();
    }

    async fn set_next_timestamp(&self, seconds: u64) {
        self.clock.stop_at(seconds);
    }

    async fn blacklist(&self, account: Address) {
        self.devnet.administer(blacklistCall { account }.abi_encode()).expect("the owner may blacklist");
    }

    async fn pause(&self) {
        self.devnet.administer(pauseCall {}.abi_encode()).expect("the owner may pause");
    }
}

/// The machine's clock until it is stopped.
#[derive(Debug, Default)]
struct TestClock(AtomicU64);

impl TestClock {
    fn stop_at(&self, seconds: u64) {
        self.0.store(seconds, Ordering::Relaxed);
    }
}

impl Clock for TestClock {
    fn now(&self) -> u64 {
        match self.0.load(Ordering::Relaxed) {
            0 => unix_now(),
            stopped => stopped,
        }
    }
}
