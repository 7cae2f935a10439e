//! Searching a range of blocks for a log, in as many requests as the node needs.

use alloy_primitives::{Address, U64};
use serde_json::{Value, json};

use super::rpc::{Log, Rpc, RpcFailure};

/// Blocks per `eth_getLogs`, the largest first: providers allow different numbers.
const RANGES: [u64; 4] = [2_000, 500, 100, 10];
/// Requests per search. In the smallest ranges they cover about 900 blocks.
const MAX_REQUESTS: usize = 96;

/// A search for the logs of a contract with some topics, in blocks from the first to the last of two.
///
/// The first `for_the_oldest` requests search the oldest blocks, the others the newest. The search may end before all blocks were
/// searched.
pub(super) struct LogSearch<'a> {
    contract: Address,
    topics: &'a Value,
    blocks: [u64; 2],
    for_the_oldest: usize,
    requests: usize,
    /// The index of the range.
    range: usize,
}

impl<'a> LogSearch<'a> {
    pub(super) const fn new(contract: Address, topics: &'a Value, blocks: [u64; 2], for_the_oldest: usize) -> Self {
        Self { contract, topics, blocks, for_the_oldest, requests: 0, range: 0 }
    }

    /// Returns `true` if all blocks were searched. A search of no blocks proves nothing: they may have been replaced.
    pub(super) const fn is_complete(&self) -> bool {
        self.requests > 0 && self.blocks[0] > self.blocks[1]
    }

    /// Returns the logs of the next blocks, or `None` at the end of the search.
    pub(super) async fn next(&mut self, rpc: &Rpc) -> Result<Option<Vec<Log>>, RpcFailure> {
        loop {
            let [first, last] = self.blocks;
            if self.requests >= MAX_REQUESTS || first > last {
                return Ok(None);
            }
            let newest_first = self.requests >= self.for_the_oldest;
            self.requests += 1;
            let range = RANGES.get(self.range).copied().unwrap_or(1);
            let (from, to) = match newest_first {
                true => (first.max(last.saturating_sub(range - 1)), last),
                false => (first, last.min(first.saturating_add(range - 1))),
            };
            let logs = match between(rpc, self.contract, self.topics, [from, to]).await {
                Ok(logs) => logs,
                Err(refused @ RpcFailure::Refused { .. }) => {
                    self.range += 1;
                    if self.range >= RANGES.len() {
                        return Err(refused);
                    }
                    continue;
                }
                Err(failure) => return Err(failure),
            };
            self.blocks = match (newest_first, from.checked_sub(1)) {
                (true, Some(before)) => [first, before],
                // The search ends with the first block of the chain.
                (true, None) => [1, 0],
                (false, _) => [to.saturating_add(1), last],
            };
            return Ok(Some(logs));
        }
    }
}

/// Returns the logs of a contract with some topics in these blocks, the first and the last, by one request.
pub(super) async fn between(
    rpc: &Rpc,
    contract: Address,
    topics: &Value,
    [from, to]: [u64; 2],
) -> Result<Vec<Log>, RpcFailure> {
    let filter =
        json!({ "address": contract, "topics": topics, "fromBlock": U64::from(from), "toBlock": U64::from(to) });
    let mut logs: Vec<Log> = rpc.call("eth_getLogs", [filter]).await?;
    logs.retain(|log| !log.removed && log.address == contract);
    Ok(logs)
}

/// Returns the first log of such a search that is `wanted`.
pub(super) async fn find(
    rpc: &Rpc,
    contract: Address,
    topics: &Value,
    blocks: [u64; 2],
    for_the_oldest: usize,
    wanted: impl Fn(&Log) -> bool,
) -> Result<Option<Log>, RpcFailure> {
    let mut search = LogSearch::new(contract, topics, blocks, for_the_oldest);
    while let Some(logs) = search.next(rpc).await? {
        if let Some(log) = logs.into_iter().find(&wanted) {
            return Ok(Some(log));
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn search_of_no_blocks_is_not_complete() {
        let topics = Value::Null;
        assert!(!LogSearch::new(Address::ZERO, &topics, [8, 7], 1).is_complete());
    }
}
