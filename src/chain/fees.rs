//! What to offer for gas.

use std::{sync::PoisonError, time::Duration};

use alloy_primitives::{U64, U128};
use serde::Deserialize;
use tokio::{sync::Mutex, time::Instant};

use super::rpc::{Rpc, RpcFailure};

/// How long a look at the fees is good for. What is offered covers a doubling of the base fee meanwhile.
const TTL: Duration = Duration::from_secs(10);

/// How long it is used if the node does not answer any more.
const STALE: Duration = Duration::from_secs(60);

/// After a failed look, how long nobody asks again.
const PAUSE: Duration = Duration::from_secs(1);

/// Offered at least, in wei: a tip that sequencers of the OP stack take.
const LEAST_TIP: u128 = 1_000_000;

/// From how many blocks it is learned what others tip.
const BLOCKS: u64 = 20;

/// The most that is tipped without being told to, in base fees. Where blocks are full the base fee soon rises, and where they are not,
/// any tip will do.
const MOST_TIP: u128 = 20;

/// How long what others tip is no longer bounded after a node wanted more.
const INSISTED: Duration = Duration::from_secs(600);

/// The lowest base fee that counts for that, in wei: Base's.
const LEAST_BASE_FEE: u128 = 5_000_000;

/// An EIP-1559 offer, in wei per gas.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Fees {
    pub(crate) max_fee: u128,
    pub(crate) tip: u128,
}

/// Why there is no offer.
#[derive(Clone, Debug)]
pub(crate) enum FeeError {
    /// The node did not say what gas costs.
    Rpc(RpcFailure),
    /// Gas costs more than the ceiling.
    TooHigh { retry_after: Duration },
}

impl From<RpcFailure> for FeeError {
    fn from(failure: RpcFailure) -> Self {
        Self::Rpc(failure)
    }
}

/// The fees of a chain, looked up rarely.
#[derive(Debug)]
pub(crate) struct FeeOracle {
    ceiling: Option<u128>,
    cached: Mutex<Cached>,
    /// When a node wanted more than was offered.
    insisted: std::sync::Mutex<Option<Instant>>,
}

#[derive(Debug, Default)]
struct Cached {
    seen: Option<(Instant, Market)>,
    failed: Option<Instant>,
}

/// What gas costs, in wei per gas.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Market {
    /// The base fee of the next block.
    base_fee: u128,
    /// What others tip.
    tip: u128,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct History {
    base_fee_per_gas: Vec<U128>,
    #[serde(default)]
    reward: Option<Vec<Vec<U128>>>,
}

impl FeeOracle {
    pub(crate) fn new(ceiling: Option<u128>) -> Self {
        Self { ceiling, cached: Mutex::default(), insisted: std::sync::Mutex::default() }
    }

    /// What to offer now.
    pub(crate) async fn get(&self, rpc: &Rpc) -> Result<Fees, FeeError> {
        self.offer(self.look(rpc).await?)
    }

    /// What a unit of gas is likely to cost now, in wei.
    pub(crate) async fn price(&self, rpc: &Rpc) -> Result<u128, FeeError> {
        let market = self.look(rpc).await?;
        let fees = self.offer(market)?;
        Ok(market.base_fee.saturating_add(fees.tip))
    }

    /// The fees have moved: look anew next time.
    pub(crate) async fn forget(&self) {
        self.cached.lock().await.seen = None;
    }

    /// A node took less for too little: what others tip is what it wants.
    pub(crate) async fn insisted_on(&self) {
        *self.insisted.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
        self.forget().await;
    }

    /// Why nothing can be offered now, as far as that is known without asking the node.
    pub(crate) fn known_refusal(&self) -> Result<(), FeeError> {
        // Whoever holds the lock asks the node just now.
        let seen = self.cached.try_lock().ok().and_then(|cached| cached.seen);
        // The upkeep looks again before that.
        match seen.filter(|(at, _)| at.elapsed() < STALE) {
            Some((_, market)) => self.offer(market).map(drop),
            None => Ok(()),
        }
    }

    /// What gas costs; of many callers one asks the node.
    async fn look(&self, rpc: &Rpc) -> Result<Market, FeeError> {
        let mut cached = self.cached.lock().await;
        let known = |limit| cached.seen.filter(|(at, _)| at.elapsed() < limit).map(|(_, market)| market);
        if let Some(market) = known(TTL) {
            return Ok(market);
        }
        let stale = known(STALE);
        if cached.failed.is_some_and(|at| at.elapsed() < PAUSE) {
            return stale.ok_or_else(|| RpcFailure::Silent.into());
        }
        match look_up(rpc).await {
            Ok(market) => {
                *cached = Cached { seen: Some((Instant::now(), market)), failed: None };
                Ok(market)
            }
            Err(failure) => {
                cached.failed = Some(Instant::now());
                stale.ok_or_else(|| failure.into())
            }
        }
    }

    /// A replacement for a transaction that offered `old`: nodes want at least a tenth more of both.
    pub(crate) async fn raise(&self, rpc: &Rpc, old: Fees) -> Result<Fees, FeeError> {
        self.forget().await;
        let now = self.get(rpc).await?;
        let eighth_more = |fee: u128| fee.saturating_add(fee / 8).saturating_add(1);
        let raised =
            Fees { max_fee: now.max_fee.max(eighth_more(old.max_fee)), tip: now.tip.max(eighth_more(old.tip)) };
        match self.ceiling {
            Some(ceiling) if raised.max_fee > ceiling => Err(FeeError::TooHigh { retry_after: TTL }),
            _ => Ok(raised),
        }
    }

    /// What to offer in such a market. A ceiling bounds the tip, too, and is a reason to refuse only if the least tip is too much.
    fn offer(&self, Market { base_fee, tip }: Market) -> Result<Fees, FeeError> {
        let insisted = *self.insisted.lock().unwrap_or_else(PoisonError::into_inner);
        let most = match self.ceiling {
            Some(ceiling) => ceiling.saturating_sub(base_fee),
            None if insisted.is_some_and(|at| at.elapsed() < INSISTED) => u128::MAX,
            None => base_fee.max(LEAST_BASE_FEE).saturating_mul(MOST_TIP),
        };
        if base_fee.saturating_add(LEAST_TIP) > self.ceiling.unwrap_or(u128::MAX) {
            return Err(FeeError::TooHigh { retry_after: TTL });
        }
        let tip = tip.min(most);
        let max_fee = base_fee.saturating_mul(2).saturating_add(tip);
        Ok(Fees { max_fee: max_fee.min(self.ceiling.unwrap_or(u128::MAX)), tip })
    }
}

/// The base fee of the next block, and what is tipped in half of the recent ones.
async fn look_up(rpc: &Rpc) -> Result<Market, RpcFailure> {
    let history = rpc.call::<History>("eth_feeHistory", (U64::from(BLOCKS), "latest", [50.0])).await;
    let history = match history {
        Err(failure) if failure.is_method_missing() => {
            let price: u128 = rpc.call::<U128>("eth_gasPrice", [(); 0]).await?.to();
            return Ok(Market { base_fee: price, tip: LEAST_TIP });
        }
        other => other?,
    };
    let base_fee = history.base_fee_per_gas.last().ok_or(RpcFailure::Silent)?.to();
    let tips = history.reward.into_iter().flatten().filter_map(|block| block.first().map(|tip| tip.to::<u128>()));
    Ok(Market { base_fee, tip: usual(tips.collect()).max(LEAST_TIP) })
}

/// The median of what blocks say, of which empty ones say nothing: what one transaction offers for its haste is not the price.
fn usual(mut tips: Vec<u128>) -> u128 {
    tips.retain(|tip| *tip > 0);
    tips.sort_unstable();
    tips.get(tips.len() / 2).copied().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    const GWEI: u128 = 1_000_000_000;

    fn offer(ceiling: Option<u128>, base_fee: u128, tip: u128) -> Option<(u128, u128)> {
        match FeeOracle::new(ceiling).offer(Market { base_fee, tip }) {
            Ok(fees) => Some((fees.max_fee, fees.tip)),
            Err(FeeError::TooHigh { .. }) => None,
            Err(error) => panic!("{error:?}"),
        }
    }

    #[test]
    fn the_offer_covers_a_doubled_base_fee_up_to_the_ceiling() {
        assert_eq!(offer(None, GWEI, GWEI / 2), Some((5 * GWEI / 2, GWEI / 2)));
        let ceiling = Some(2 * GWEI);
        assert_eq!(offer(ceiling, GWEI, GWEI / 2), Some((2 * GWEI, GWEI / 2)));
        assert_eq!(offer(ceiling, GWEI, 3 * GWEI), Some((2 * GWEI, GWEI)), "no more tip than fits below it");
        assert_eq!(offer(ceiling, 2 * GWEI - LEAST_TIP, GWEI), Some((2 * GWEI, LEAST_TIP)));
        assert_eq!(offer(ceiling, 2 * GWEI, LEAST_TIP), None);
    }

    #[test]
    fn without_a_ceiling_a_tip_is_bounded_by_the_base_fee() {
        assert_eq!(offer(None, LEAST_BASE_FEE, 100 * GWEI), Some((11 * GWEI / 100, GWEI / 10)));
        assert_eq!(offer(None, 10, 100 * GWEI), Some((20 + GWEI / 10, GWEI / 10)), "where hardly any is charged");
        assert_eq!(offer(None, GWEI, 100 * GWEI), Some((22 * GWEI, 20 * GWEI)));
        assert_eq!(offer(None, LEAST_BASE_FEE, 10 * LEAST_BASE_FEE), Some((12 * LEAST_BASE_FEE, 10 * LEAST_BASE_FEE)));
        assert_eq!(offer(Some(200 * GWEI), LEAST_BASE_FEE, 100 * GWEI).map(|(_, tip)| tip), Some(100 * GWEI));
    }

    #[tokio::test]
    async fn a_node_that_wants_what_others_tip_gets_it() {
        let fees = FeeOracle::new(None);
        let market = Market { base_fee: 10, tip: 25 * GWEI };
        assert_eq!(fees.offer(market).unwrap().tip, GWEI / 10);
        fees.insisted_on().await;
        assert_eq!(fees.offer(market).unwrap().tip, 25 * GWEI);
    }

    #[tokio::test(start_paused = true)]
    async fn what_a_node_wanted_ten_minutes_ago_is_forgotten() {
        let fees = FeeOracle::new(None);
        let market = Market { base_fee: 10, tip: 25 * GWEI };
        fees.insisted_on().await;
        tokio::time::advance(INSISTED - Duration::from_millis(1)).await;
        assert_eq!(fees.offer(market).unwrap().tip, 25 * GWEI);
        tokio::time::advance(Duration::from_millis(1)).await;
        assert_eq!(fees.offer(market).unwrap().tip, GWEI / 10);
    }

    #[test]
    fn the_usual_tip_is_what_half_of_the_blocks_with_transactions_say() {
        assert_eq!(usual(vec![0, 5, 100, 0, 6, 4, 0, 0, 7]), 6);
        assert_eq!(usual(vec![0, 0]), 0);
    }
}
