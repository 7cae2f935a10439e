//! Searching a block by its time.

use alloy_primitives::U64;

use super::rpc::{Block, Rpc, RpcFailure};

/// How exactly a block is searched, in blocks: one request for logs covers this many.
pub(crate) const PRECISION: u64 = 500;

/// Returns two blocks at most [`PRECISION`] apart: the first from before `time`, the second not, if there is one yet.
pub(crate) async fn around(rpc: &Rpc, time: u64, last: Block) -> Result<(u64, u64), RpcFailure> {
    let (mut high, mut step) = (last.number.saturating_to::<u64>(), PRECISION);
    if last.timestamp.saturating_to::<u64>() < time {
        return Ok((high, high));
    }
    let mut low = high.saturating_sub(step);
    while low > 0 && timestamp(rpc, low).await? >= time {
        high = low;
        step = step.saturating_mul(4);
        low = low.saturating_sub(step);
    }
    while high - low > PRECISION {
        let middle = low + (high - low) / 2;
        match timestamp(rpc, middle).await? < time {
            true => low = middle,
            false => high = middle,
        }
    }
    Ok((low, high))
}

async fn timestamp(rpc: &Rpc, number: u64) -> Result<u64, RpcFailure> {
    let block: Option<Block> = rpc.call("eth_getBlockByNumber", (U64::from(number), false)).await?;
    Ok(block.ok_or(RpcFailure::Silent)?.timestamp.saturating_to())
}
