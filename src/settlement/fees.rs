//! What to offer for gas.

use std::time::Duration;

use alloy_primitives::U128;
use serde::Deserialize;
use tokio::{sync::Mutex, time::Instant};

use super::rpc::{Rpc, RpcFailure};
use crate::facilitator::FacilitatorError;

/// How long a look at the fees is good for. What is offered covers a doubling of the base fee meanwhile.
const TTL: Duration = Duration::from_secs(10);

/// How long it is used if the node does not answer any more.
const STALE: Duration = Duration::from_secs(60);

/// After a failed look, how long nobody asks again.
const PAUSE: Duration = Duration::from_secs(1);

/// Offered at least, in wei: a tip that sequencers of the OP stack take.
const LEAST_TIP: u128 = 1_000_000;

/// An EIP-1559 offer, in wei per gas.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Fees {
    pub(crate) max_fee: u128,
    pub(crate) tip: u128,
}

/// The fees of a chain, looked up rarely.
#[derive(Debug)]
pub(crate) struct FeeCache {
    ceiling: Option<u128>,
    cached: Mutex<Cached>,
}

#[derive(Debug, Default)]
struct Cached {
    fees: Option<(Instant, Fees)>,
    /// What a unit of gas cost then, tip included.
    price: u128,
    failed: Option<Instant>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct History {
    base_fee_per_gas: Vec<U128>,
    #[serde(default)]
    reward: Option<Vec<Vec<U128>>>,
}

impl FeeCache {
    pub(crate) fn new(ceiling: Option<u128>) -> Self {
        Self { ceiling, cached: Mutex::default() }
    }

    /// What to offer now; of many callers one asks the node.
    pub(crate) async fn get(&self, rpc: &Rpc) -> Result<Fees, FacilitatorError> {
        let mut cached = self.cached.lock().await;
        let known = |limit| cached.fees.filter(|(at, _)| at.elapsed() < limit).map(|(_, fees)| fees);
        if let Some(fees) = known(TTL) {
            return Ok(fees);
        }
        let stale = known(STALE);
        if cached.failed.is_some_and(|at| at.elapsed() < PAUSE) {
            return stale.ok_or_else(|| RpcFailure::Silent.into());
        }
        match look_up(rpc).await {
            Ok(seen) => {
                let fees = self.within_ceiling(seen)?;
                let price = seen.0.saturating_add(seen.1);
                *cached = Cached { fees: Some((Instant::now(), fees)), price, failed: None };
                Ok(fees)
            }
            Err(failure) => {
                cached.failed = Some(Instant::now());
                stale.ok_or_else(|| failure.into())
            }
        }
    }

    /// What a unit of gas is likely to cost now, in wei.
    pub(crate) async fn price(&self, rpc: &Rpc) -> Result<u128, FacilitatorError> {
        self.get(rpc).await?;
        Ok(self.cached.lock().await.price)
    }

    /// The fees have moved: look anew next time.
    pub(crate) async fn forget(&self) {
        self.cached.lock().await.fees = None;
    }

    /// A replacement for a transaction that offered `old`: nodes want at least a tenth more of both.
    pub(crate) async fn raise(&self, rpc: &Rpc, old: Fees) -> Result<Fees, FacilitatorError> {
        self.forget().await;
        let now = self.get(rpc).await?;
        let eighth_more = |fee: u128| fee.saturating_add(fee / 8).saturating_add(1);
        let raised =
            Fees { max_fee: now.max_fee.max(eighth_more(old.max_fee)), tip: now.tip.max(eighth_more(old.tip)) };
        match self.ceiling {
            Some(ceiling) if raised.max_fee > ceiling => Err(too_dear()),
            _ => Ok(raised),
        }
    }

    fn within_ceiling(&self, (base_fee, tip): (u128, u128)) -> Result<Fees, FacilitatorError> {
        let max_fee = base_fee.saturating_mul(2).saturating_add(tip);
        match self.ceiling {
            Some(ceiling) if base_fee.saturating_add(tip) > ceiling => Err(too_dear()),
            Some(ceiling) => Ok(Fees { max_fee: max_fee.min(ceiling), tip }),
            None => Ok(Fees { max_fee, tip }),
        }
    }
}

fn too_dear() -> FacilitatorError {
    FacilitatorError::Busy { what: "gas costs more than is allowed here", retry_after: TTL }
}

/// The base fee of the next block, and the tip that half of the recent transactions stayed below.
async fn look_up(rpc: &Rpc) -> Result<(u128, u128), RpcFailure> {
    let history = rpc.call::<History>("eth_feeHistory", ("0x4", "latest", [50.0])).await;
    let history = match history {
        Err(failure) if failure.is_method_missing() => {
            let price: u128 = rpc.call::<U128>("eth_gasPrice", [(); 0]).await?.to();
            return Ok((price, LEAST_TIP));
        }
        other => other?,
    };
    let base_fee = history.base_fee_per_gas.last().ok_or(RpcFailure::Silent)?.to();
    let tips = history.reward.into_iter().flatten().filter_map(|block| block.first().map(|tip| tip.to::<u128>()));
    Ok((base_fee, tips.max().unwrap_or_default().max(LEAST_TIP)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_offer_covers_a_doubled_base_fee_up_to_the_ceiling() {
        let unbounded = FeeCache::new(None).within_ceiling((100, 7)).unwrap();
        assert_eq!(unbounded, Fees { max_fee: 207, tip: 7 });
        let bounded = FeeCache::new(Some(150));
        assert_eq!(bounded.within_ceiling((100, 7)).unwrap(), Fees { max_fee: 150, tip: 7 });
        assert!(matches!(bounded.within_ceiling((144, 7)), Err(FacilitatorError::Busy { .. })));
    }
}
