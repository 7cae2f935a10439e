//! Faults of the chain and of the connection to its node.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use x402_devnet::{Devnet, Orphans};

use super::{dice::Dice, plan::Plan};
use support::rpc_proxy::{Fate, RpcProxy};

/// The depth of the deepest reorganization; less than the finality depth.
pub(crate) const DEEPEST: u64 = 6;
const BASE_FEE: u64 = 5_000_000;

/// Causes faults until it is aborted. [`clear`] then ends those that last.
pub(crate) async fn on_devnet(devnet: Devnet, seed: u64) {
    let mut dice = Dice::new(seed, u64::MAX);
    loop {
        tokio::time::sleep(dice.millis(100..900)).await;
        match dice.of(0..4) {
            0 => devnet.reorg(dice.of(1..DEEPEST + 1), Orphans::Requeued),
            1 => devnet.reorg(dice.of(1..DEEPEST + 1), Orphans::Lost),
            2 => {
                devnet.set_base_fee(BASE_FEE * dice.of(3..200));
                tokio::time::sleep(dice.millis(200..1_500)).await;
                devnet.set_base_fee(BASE_FEE);
            }
            _ => {
                devnet.stall(true);
                tokio::time::sleep(dice.millis(200..2_000)).await;
                devnet.stall(false);
            }
        }
    }
}

/// Ends all faults.
pub(crate) fn clear(devnet: &Devnet) {
    devnet.faults().clear();
    devnet.stall(false);
    devnet.set_base_fee(BASE_FEE);
}

/// Makes the planned share of requests to a node fail.
#[cfg_attr(not(any(feature = "test-anvil", feature = "test-postgres")), allow(dead_code))]
pub(crate) fn on_the_way(proxy: &RpcProxy, plan: &Plan) {
    let (seed, share, calls) = (plan.seed, (plan.faults * 1e6) as u64, AtomicU64::new(0));
    proxy.judge(move |_| {
        let mut dice = Dice::new(seed, calls.fetch_add(1, Ordering::Relaxed));
        if dice.of(0..1_000_000) >= share {
            return Fate::Pass;
        }
        match dice.of(0..6) {
            0 => Fate::DropBefore,
            1 => Fate::DropAfter,
            2 => Fate::Delay(Duration::from_millis(dice.of(0..250))),
            3 => Fate::Error(-32005),
            4 => Fate::Status(502),
            _ => Fate::Twice,
        }
    });
}
