//! Settings of a devnet, and the making of blocks at an interval.

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

use super::{Devnet, DevnetError, Faults, Inner, chain::Chain, token};
use crate::{Clock, Network, SystemClock};

/// Base's minimum base fee, in wei.
const BASE_FEE: u64 = 5_000_000;

/// When blocks are made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum BlockTime {
    /// As soon as a transaction can run. No transaction, no block.
    #[default]
    Instant,
    /// One per interval, empty or not. Base makes one every 200 ms.
    Every(Duration),
}

/// Settings of a [`Devnet`].
#[derive(Clone, Debug)]
#[must_use]
pub struct DevnetBuilder {
    network: Network,
    block_time: BlockTime,
    finality_depth: u64,
    base_fee: u64,
    clock: Arc<dyn Clock>,
}

impl Default for DevnetBuilder {
    fn default() -> Self {
        Self {
            network: Network::BASE_SEPOLIA,
            block_time: BlockTime::Instant,
            finality_depth: 0,
            base_fee: BASE_FEE,
            clock: Arc::new(SystemClock),
        }
    }
}

impl DevnetBuilder {
    /// The chain to stand in for; Base Sepolia (84532) if not set.
    pub fn chain_id(mut self, chain_id: u64) -> Self {
        self.network = Network::eip155(chain_id);
        self
    }

    /// When blocks are made; at once if not set.
    pub fn block_time(mut self, block_time: BlockTime) -> Self {
        self.block_time = block_time;
        self
    }

    /// How many blocks the `safe` and `finalized` ones are behind the newest; 0 if not set.
    pub fn finality_depth(mut self, blocks: u64) -> Self {
        self.finality_depth = blocks;
        self
    }

    /// The base fee in wei; Base's minimum, 5,000,000, if not set.
    pub fn base_fee(mut self, wei: u64) -> Self {
        self.base_fee = wei;
        self
    }

    /// Where block timestamps come from; the machine's clock if not set. A clock that goes back makes blocks of the same second.
    pub fn clock(mut self, clock: Arc<dyn Clock>) -> Self {
        self.clock = clock;
        self
    }

    /// Starts the chain.
    pub async fn start(self) -> Result<Devnet, DevnetError> {
        let asset = token::asset(self.network).ok_or_else(|| DevnetError::Genesis("no USDC to imitate".into()))?;
        let mut chain = Chain::new(self.network.chain_id(), self.base_fee, self.finality_depth, self.clock);
        token::plant(&mut chain, &asset)?;
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

/// Makes a block per period, for as long as somebody has a handle to the chain.
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
