//! Searching a range of blocks for a log, in as many requests as the node needs.

use alloy_primitives::{Address, U64};
use serde_json::{Value, json};

use super::rpc::{Log, Rpc, RpcFailure};

/// Blocks per `eth_getLogs`, the largest first: providers allow different numbers.
const RANGES: [u64; 4] = [2_000, 500, 100, 10];
/// Requests per search. In the smallest ranges they cover about 900 blocks.
const MAX_REQUESTS: usize = 96;

/// Returns the first log of this contract with these topics that is `wanted`, in blocks from the first to the last of `blocks`.
///
/// The first `for_the_oldest` requests search the oldest blocks, the others the newest. The search may end before all blocks were
/// searched.
pub(super) async fn find(
    rpc: &Rpc,
    contract: Address,
    topics: &Value,
    [mut first, mut last]: [u64; 2],
    for_the_oldest: usize,
    wanted: impl Fn(&Log) -> bool,
) -> Result<Option<Log>, RpcFailure> {
    let mut ranges = RANGES.into_iter();
    let mut range = ranges.next().unwrap_or(1);
    for request in 0..MAX_REQUESTS {
        if first > last {
            break;
        }
        let newest_first = request >= for_the_oldest;
        let (from, to) = match newest_first {
            true => (first.max(last.saturating_sub(range - 1)), last),
            false => (first, last.min(first.saturating_add(range - 1))),
        };
        let filter = json!({
            "address": contract, "topics": topics, "fromBlock": U64::from(from), "toBlock": U64::from(to),
        });
        let logs: Vec<Log> = match rpc.call("eth_getLogs", [filter]).await {
            Ok(logs) => logs,
            Err(RpcFailure::Refused { code, message }) => {
                range = ranges.next().ok_or(RpcFailure::Refused { code, message })?;
                continue;
            }
            Err(failure) => return Err(failure),
        };
        let is_it = |log: &Log| !log.removed && log.address == contract && wanted(log);
        if let Some(log) = logs.into_iter().find(is_it) {
            return Ok(Some(log));
        }
        match (newest_first, from.checked_sub(1)) {
            (true, Some(before)) => last = before,
            (true, None) => break,
            (false, _) => first = to.saturating_add(1),
        }
    }
    Ok(None)
}
