//! `eth_getLogs`.

use alloy_eips::BlockNumberOrTag;
use alloy_rpc_types_eth::{Filter, FilterBlockOption, Log};

use super::{chain::Chain, failure::Failure};

/// The logs that match, oldest first.
pub(super) fn matching<'a>(chain: &'a Chain, filter: &Filter) -> Result<Vec<&'a Log>, Failure> {
    let blocks = match filter.block_option {
        FilterBlockOption::AtBlockHash(hash) => {
            let block = chain.block_by_hash(hash).ok_or_else(|| Failure::rejected("unknown block"))?;
            std::slice::from_ref(block)
        }
        FilterBlockOption::Range { from_block, to_block } => {
            let bound = |tag: Option<BlockNumberOrTag>| match tag.unwrap_or_default() {
                // A range may reach past the newest block.
                BlockNumberOrTag::Number(number) => number,
                tag => chain.number(tag).unwrap_or_default(),
            };
            let (from, to) = (bound(from_block), bound(to_block));
            if from > to {
                return Err(Failure::invalid_params("invalid block range params"));
            }
            let end = chain.blocks.len().min(usize::try_from(to).unwrap_or(usize::MAX).saturating_add(1));
            let start = usize::try_from(from).unwrap_or(usize::MAX).min(end);
            &chain.blocks[start..end]
        }
    };
    Ok(blocks.iter().flat_map(|block| block.logs()).filter(|log| filter.matches(&log.inner)).collect())
}
