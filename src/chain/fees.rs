//! The fees that a transaction offers, learned from the node.

use std::{sync::PoisonError, time::Duration};

use alloy_primitives::{U64, U128};
use serde::Deserialize;
use tokio::{sync::Mutex, time::Instant};

use super::rpc::{Rpc, RpcFailure};

/// How long fees are cached. The offer covers a doubling of the base fee meanwhile.
const TTL: Duration = Duration::from_secs(10);

/// How long cached fees are used if the node stops answering.
const STALE: Duration = Duration::from_secs(60);

/// How long after a failed request the node is not asked again.
const PAUSE: Duration = Duration::from_secs(1);

/// The lowest tip, in wei per gas. Sequencers of the OP stack accept it.
const MIN_TIP: u128 = 1_000_000;

/// How many blocks the market's tip is taken from.
const BLOCKS: u64 = 20;

/// The highest tip without a ceiling, as a multiple of the base fee. Where blocks are full the base fee soon rises; where they are not,
/// any tip is enough.
const MAX_TIP_FACTOR: u128 = 20;

/// How long the market's tip is offered unbounded after the node refused less.
const MARKET_TIP_PERIOD: Duration = Duration::from_secs(600);

/// The lowest base fee for that bound, in wei per gas: the one of Base.
const MIN_BASE_FEE: u128 = 5_000_000;

/// An EIP-1559 offer, in wei per gas.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Fees {
    pub(crate) max_fee: u128,
    pub(crate) tip: u128,
}

/// Why no fees can be offered.
#[derive(Clone, Debug)]
pub(crate) enum FeeError {
    /// The node did not answer.
    Rpc(RpcFailure),
    /// Gas costs more than the configured ceiling.
    TooHigh { retry_after: Duration },
}

impl From<RpcFailure> for FeeError {
    fn from(failure: RpcFailure) -> Self {
        Self::Rpc(failure)
    }
}

/// The fees of a chain, cached for a few seconds.
#[derive(Debug)]
pub(crate) struct FeeOracle {
    ceiling: Option<u128>,
    cached: Mutex<Cached>,
    /// When the node last refused a tip as too low.
    tip_refused: std::sync::Mutex<Option<Instant>>,
}

#[derive(Debug, Default)]
struct Cached {
    seen: Option<(Instant, Market)>,
    /// What was seen is used only if the node does not answer.
    is_old: bool,
    failed: Option<Instant>,
}

/// The price of gas, in wei per gas.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Market {
    /// The base fee of the next block.
    base_fee: u128,
    /// The median tip.
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
        Self { ceiling, cached: Mutex::default(), tip_refused: std::sync::Mutex::default() }
    }

    /// Returns the fees to offer now.
    pub(crate) async fn get(&self, rpc: &Rpc) -> Result<Fees, FeeError> {
        self.get_up_to(rpc, 0).await
    }

    /// Does the same for a transaction that may offer `most`, where that is more than the ceiling.
    pub(crate) async fn get_up_to(&self, rpc: &Rpc, most: u128) -> Result<Fees, FeeError> {
        self.offer_within(self.market(rpc).await?, self.ceiling_or(most))
    }

    /// Returns what a unit of gas is likely to cost now, in wei.
    pub(crate) async fn price(&self, rpc: &Rpc) -> Result<u128, FeeError> {
        let market = self.market(rpc).await?;
        let fees = self.offer(market)?;
        Ok(market.base_fee.saturating_add(fees.tip))
    }

    /// Looks up the fees again when they are needed next, since the market has moved. If the node does not answer then, the known ones are
    /// used: of many transactions that look whether they hang, each does this.
    pub(crate) async fn forget(&self) {
        self.cached.lock().await.is_old = true;
    }

    /// Offers the market's tip unbounded for a while, since the node refused less.
    pub(crate) async fn require_market_tip(&self) {
        *self.tip_refused.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
        self.forget().await;
    }

    /// Fails if gas is known to cost too much. Does not ask the node.
    pub(crate) fn check_known(&self) -> Result<(), FeeError> {
        // If the lock is held, the node is being asked just now.
        let seen = self.cached.try_lock().ok().and_then(|cached| cached.seen);
        // Reconciliation refreshes them before that.
        match seen.filter(|(at, _)| at.elapsed() < STALE) {
            Some((_, market)) => self.offer(market).map(drop),
            None => Ok(()),
        }
    }

    /// Returns the price of gas. Of concurrent callers one asks the node.
    async fn market(&self, rpc: &Rpc) -> Result<Market, FeeError> {
        let mut cached = self.cached.lock().await;
        let known = |limit| cached.seen.filter(|(at, _)| at.elapsed() < limit).map(|(_, market)| market);
        if let Some(market) = known(TTL).filter(|_| !cached.is_old) {
            return Ok(market);
        }
        let stale = known(STALE);
        if cached.failed.is_some_and(|at| at.elapsed() < PAUSE) {
            return stale.ok_or_else(|| RpcFailure::Silent.into());
        }
        match fetch(rpc).await {
            Ok(market) => {
                *cached = Cached { seen: Some((Instant::now(), market)), ..Cached::default() };
                Ok(market)
            }
            Err(failure) => {
                cached.failed = Some(Instant::now());
                stale.ok_or_else(|| failure.into())
            }
        }
    }

    /// Returns the fees of a replacement for a transaction that offered `old` and may offer `most`, where that is more than the ceiling. Nodes
    /// require at least a tenth more of both.
    pub(crate) async fn raise_up_to(&self, rpc: &Rpc, old: Fees, most: u128) -> Result<Fees, FeeError> {
        self.forget().await;
        let now = self.get_up_to(rpc, most).await?;
        let eighth_more = |fee: u128| fee.saturating_add(fee / 8).saturating_add(1);
        let raised =
            Fees { max_fee: now.max_fee.max(eighth_more(old.max_fee)), tip: now.tip.max(eighth_more(old.tip)) };
        match self.ceiling_or(most) {
            Some(ceiling) if raised.max_fee > ceiling => Err(FeeError::TooHigh { retry_after: TTL }),
            _ => Ok(raised),
        }
    }

    /// Returns how far a price of gas exceeds the ceiling.
    pub(crate) fn above_ceiling(&self, price: u128) -> u128 {
        self.ceiling.map_or(0, |ceiling| price.saturating_sub(ceiling))
    }

    fn ceiling_or(&self, most: u128) -> Option<u128> {
        self.ceiling.map(|ceiling| ceiling.max(most))
    }

    fn offer(&self, market: Market) -> Result<Fees, FeeError> {
        self.offer_within(market, self.ceiling)
    }

    /// Returns the offer for this market. The ceiling bounds the tip too; the offer fails only if even the lowest tip exceeds it.
    fn offer_within(&self, Market { base_fee, tip }: Market, ceiling: Option<u128>) -> Result<Fees, FeeError> {
        let tip_refused = *self.tip_refused.lock().unwrap_or_else(PoisonError::into_inner);
        let most = match ceiling {
            Some(ceiling) => ceiling.saturating_sub(base_fee),
            None if tip_refused.is_some_and(|at| at.elapsed() < MARKET_TIP_PERIOD) => u128::MAX,
            None => base_fee.max(MIN_BASE_FEE).saturating_mul(MAX_TIP_FACTOR),
        };
        if base_fee.saturating_add(MIN_TIP) > ceiling.unwrap_or(u128::MAX) {
            return Err(FeeError::TooHigh { retry_after: TTL });
        }
        let tip = tip.min(most);
        let max_fee = base_fee.saturating_mul(2).saturating_add(tip);
        Ok(Fees { max_fee: max_fee.min(ceiling.unwrap_or(u128::MAX)), tip })
    }
}

/// Asks the node for the base fee of the next block and the median tip of recent ones.
async fn fetch(rpc: &Rpc) -> Result<Market, RpcFailure> {
    let history = rpc.call::<History>("eth_feeHistory", (U64::from(BLOCKS), "latest", [50.0])).await;
    let history = match history {
        // Nodes without it, and those that give no history to everybody, know the price.
        Err(RpcFailure::Refused { .. }) => {
            let price: u128 = rpc.call::<U128>("eth_gasPrice", [(); 0]).await?.to();
            return Ok(Market { base_fee: price, tip: MIN_TIP });
        }
        other => other?,
    };
    let base_fee = history.base_fee_per_gas.last().ok_or(RpcFailure::Silent)?.to();
    let tips = history.reward.into_iter().flatten().filter_map(|block| block.first().map(|tip| tip.to::<u128>()));
    Ok(Market { base_fee, tip: median_tip(tips.collect()).max(MIN_TIP) })
}

/// Returns the median tip of the blocks that are not empty, so that one hurried transaction does not set the price.
fn median_tip(mut tips: Vec<u128>) -> u128 {
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
    fn offer_covers_a_doubled_base_fee_up_to_the_ceiling() {
        assert_eq!(offer(None, GWEI, GWEI / 2), Some((5 * GWEI / 2, GWEI / 2)));
        let ceiling = Some(2 * GWEI);
        assert_eq!(offer(ceiling, GWEI, GWEI / 2), Some((2 * GWEI, GWEI / 2)));
        assert_eq!(offer(ceiling, GWEI, 3 * GWEI), Some((2 * GWEI, GWEI)), "no more tip than fits below it");
        assert_eq!(offer(ceiling, 2 * GWEI - MIN_TIP, GWEI), Some((2 * GWEI, MIN_TIP)));
        assert_eq!(offer(ceiling, 2 * GWEI, MIN_TIP), None);
    }

    #[test]
    fn tip_without_a_ceiling_is_bounded_by_the_base_fee() {
        assert_eq!(offer(None, MIN_BASE_FEE, 100 * GWEI), Some((11 * GWEI / 100, GWEI / 10)));
        assert_eq!(offer(None, 10, 100 * GWEI), Some((20 + GWEI / 10, GWEI / 10)), "where hardly any is charged");
        assert_eq!(offer(None, GWEI, 100 * GWEI), Some((22 * GWEI, 20 * GWEI)));
        assert_eq!(offer(None, MIN_BASE_FEE, 10 * MIN_BASE_FEE), Some((12 * MIN_BASE_FEE, 10 * MIN_BASE_FEE)));
        assert_eq!(offer(Some(200 * GWEI), MIN_BASE_FEE, 100 * GWEI).map(|(_, tip)| tip), Some(100 * GWEI));
    }

    #[tokio::test]
    async fn node_that_refuses_a_tip_gets_the_market_tip() {
        let fees = FeeOracle::new(None);
        let market = Market { base_fee: 10, tip: 25 * GWEI };
        assert_eq!(fees.offer(market).unwrap().tip, GWEI / 10);
        fees.require_market_tip().await;
        assert_eq!(fees.offer(market).unwrap().tip, 25 * GWEI);
    }

    #[tokio::test(start_paused = true)]
    async fn refused_tip_is_forgotten_after_ten_minutes() {
        let fees = FeeOracle::new(None);
        let market = Market { base_fee: 10, tip: 25 * GWEI };
        fees.require_market_tip().await;
        tokio::time::advance(MARKET_TIP_PERIOD - Duration::from_millis(1)).await;
        assert_eq!(fees.offer(market).unwrap().tip, 25 * GWEI);
        tokio::time::advance(Duration::from_millis(1)).await;
        assert_eq!(fees.offer(market).unwrap().tip, GWEI / 10);
    }

    #[tokio::test(start_paused = true)]
    async fn fees_are_looked_up_again_after_a_change_and_known_ones_used_if_the_node_is_silent() {
        use x402_devnet::{Devnet, Fault};

        let devnet = Devnet::start().await.unwrap();
        let (rpc, fees) = (Rpc::new(devnet.rpc_client(), PAUSE), FeeOracle::new(None));
        let before = fees.get(&rpc).await.unwrap();
        devnet.set_base_fee(1_000_000_000);
        fees.forget().await;
        let after = fees.get(&rpc).await.unwrap();
        assert!(after.max_fee > before.max_fee);
        fees.forget().await;
        devnet.faults().set(|_| Fault::DropBefore);
        assert_eq!(fees.get(&rpc).await.unwrap(), after);
        tokio::time::advance(STALE).await;
        assert!(fees.get(&rpc).await.is_err());
    }

    #[test]
    fn median_tip_ignores_empty_blocks() {
        assert_eq!(median_tip(vec![0, 5, 100, 0, 6, 4, 0, 0, 7]), 6);
        assert_eq!(median_tip(vec![0, 0]), 0);
    }
}
