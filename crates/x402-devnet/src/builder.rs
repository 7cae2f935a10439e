//! Starts a devnet: its settings, and blocks at an interval.

use std::{
    sync::{
        Arc, Mutex, Weak,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use tokio::{
    sync::watch,
    time::{MissedTickBehavior, interval},
};
use tower_x402::{Clock, Network, SystemClock};

use super::{Devnet, DevnetError, Faults, Inner, chain::Chain, genesis};

/// Base's minimum base fee, in wei.
const BASE_FEE: u64 = 5_000_000;

/// The time between blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum BlockTime {
    /// A block for each transaction, as soon as it can be executed. There are no empty blocks.
    #[default]
    Instant,
    /// A block per interval, which may be empty.
    Every(Duration),
}

/// Builder of a [`Devnet`].
#[derive(Clone, Debug)]
#[must_use]
pub struct DevnetBuilder {
    network: Network,
    block_time: BlockTime,
    finality_depth: u64,
    pending_state: bool,
    clock: Arc<dyn Clock>,
}

impl Default for DevnetBuilder {
    fn default() -> Self {
        Self {
            network: Network::BASE_SEPOLIA,
            block_time: BlockTime::Instant,
            finality_depth: 0,
            pending_state: false,
            clock: Arc::new(SystemClock),
        }
    }
}

impl DevnetBuilder {
    /// Sets the chain id. Default: 84532, Base Sepolia.
    pub fn chain_id(mut self, chain_id: u64) -> Self {
        self.network = Network::eip155(chain_id);
        self
    }

    /// Sets when blocks are made. Default: [`BlockTime::Instant`].
    pub fn block_time(mut self, block_time: BlockTime) -> Self {
        self.block_time = block_time;
        self
    }

    /// Sets how many blocks the `safe` and `finalized` block are behind the newest. Default: 0.
    pub fn finality_depth(mut self, blocks: u64) -> Self {
        self.finality_depth = blocks;
        self
    }

    /// Sets whether the pool counts where a call asks for `pending`, and in `eth_estimateGas`, which nodes of this kind answer as of the block
    /// that they would build now. Default: `false`, so that both are as of the newest block. Nodes of both kinds exist.
    pub fn pending_state(mut self, pending_state: bool) -> Self {
        self.pending_state = pending_state;
        self
    }

    /// Sets the clock of block timestamps. Default: [`SystemClock`]. A clock that goes back makes blocks with the previous timestamp.
    pub fn clock(mut self, clock: Arc<dyn Clock>) -> Self {
        self.clock = clock;
        self
    }

    /// Starts the chain.
    ///
    /// # Errors
    /// [`DevnetError::NoRuntime`] if blocks are made at an interval and there is no tokio runtime; [`DevnetError::Genesis`] in a broken build.
    pub async fn start(self) -> Result<Devnet, DevnetError> {
        let asset = genesis::usdc_on(self.network).ok_or_else(|| DevnetError::Genesis("no USDC is known".into()))?;
        let mut chain = Chain::new(self.network.chain_id(), BASE_FEE, self.finality_depth, self.clock);
        genesis::deploy(&mut chain, &asset)?;
        chain.pending_state = self.pending_state;
        let devnet = Devnet(Arc::new(Inner {
            asset,
            block_time: self.block_time,
            chain: Mutex::new(chain),
            faults: Faults::default(),
            stalled: AtomicBool::new(false),
            blocks: watch::Sender::new(()),
        }));
        if let BlockTime::Every(period) = self.block_time {
            let runtime = tokio::runtime::Handle::try_current().map_err(|_| DevnetError::NoRuntime)?;
            runtime.spawn(make_blocks(Arc::downgrade(&devnet.0), period));
        }
        Ok(devnet)
    }
}

/// Makes a block per period while there is a handle to the chain.
async fn make_blocks(chain: Weak<Inner>, period: Duration) {
    let mut ticks = interval(period);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
    ticks.tick().await;
    loop {
        ticks.tick().await;
        let Some(inner) = chain.upgrade() else { return };
        if !inner.stalled.load(Ordering::Relaxed) {
            Devnet(inner).mine();
        }
    }
}
