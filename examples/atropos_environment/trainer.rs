//! A trainer that takes batches and does nothing with them, to try the environment with.

use std::{
    sync::Arc,
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use anyhow::Context as _;
use atropos_client::{AtroposClient, AtroposError, TrainerRegistration};
use tokio::{task::JoinHandle, time::sleep};

use crate::flags::Flags;

const PAUSE: Duration = Duration::from_millis(200);
/// How many groups make a batch.
const GROUPS: u64 = 2;
/// The longest sequence, in tokens.
const MAX_TOKENS: u64 = 16_384;

pub(crate) struct Trainer {
    taken: Arc<AtomicU64>,
    work: JoinHandle<()>,
}

impl Trainer {
    /// Registers and takes all batches.
    pub(crate) async fn start(flags: &Flags) -> anyhow::Result<Self> {
        let server = AtroposClient::new(flags.atropos_url.as_str()).context("--atropos-url")?;
        let run = TrainerRegistration::new("x402", u64::from(flags.group_size) * GROUPS, MAX_TOKENS, flags.groups);
        server.register(&run).await.context("--atropos-url")?;
        let taken = Arc::new(AtomicU64::new(0));
        let count = taken.clone();
        let work = tokio::spawn(async move {
            loop {
                match server.batch().await {
                    Ok(Some(_)) => {
                        count.fetch_add(1, Ordering::Relaxed);
                    }
                    Ok(None) | Err(AtroposError::Unreachable(_)) => sleep(PAUSE).await,
                    Err(error) => {
                        eprintln!("the trainer stopped: {error}");
                        return;
                    }
                }
            }
        });
        Ok(Self { taken, work })
    }

    /// Returns the number of batches taken.
    pub(crate) fn batches(&self) -> u64 {
        self.taken.load(Ordering::Relaxed)
    }
}

impl Drop for Trainer {
    fn drop(&mut self) {
        self.work.abort();
    }
}
