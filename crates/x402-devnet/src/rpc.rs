//! JSON-RPC: the methods of a node, and their errors in the words and codes of the nodes on Base.

use std::time::Duration;

use alloy_consensus::{Transaction as _, TxEnvelope};
use alloy_eips::{BlockId, BlockNumberOrTag, Decodable2718 as _};
use alloy_primitives::{Address, B256, Bytes, U64, U256};
use alloy_rpc_types_eth::{
    Block as RpcBlock, BlockTransactions, FeeHistory, Filter, FilterBlockOption, Log, TransactionInfo,
    TransactionRequest,
    state::{AccountOverride, StateOverride},
};
use revm::context::result::{ExecutionResult, HaltReason};
use serde::{Serialize, de::DeserializeOwned};
use serde_json::{
    Value,
    value::{RawValue, to_raw_value},
};

use super::{
    Devnet,
    block::Block,
    chain::Chain,
    evm::{self, Rules},
    failure::Failure,
    faults::Fault,
};

/// The suggested priority fee, in wei.
const SUGGESTED_TIP: u64 = 1_000_000;
/// The longest wait of `eth_sendRawTransactionSync`, which is that of Base.
const SYNC_TIMEOUT: Duration = Duration::from_secs(6);

/// The connection is closed without an answer.
#[derive(Debug)]
pub(super) struct Dropped;

/// Answers a call, with the fault that the hook returns.
pub(super) async fn serve(
    devnet: &Devnet,
    method: &str,
    params: Option<&RawValue>,
) -> Result<Result<Box<RawValue>, Failure>, Dropped> {
    let params = match params.map_or(Ok(Vec::new()), |raw| serde_json::from_str::<Vec<Value>>(raw.get())) {
        Ok(params) => params,
        Err(_) => return Ok(Err(Failure::invalid_params("parameters are not an array"))),
    };
    let fault = devnet.faults().decide(method, &params);
    match &fault {
        Fault::Error { code, message } => return Ok(Err(Failure::new(*code, message.clone()))),
        Fault::DropBefore => return Err(Dropped),
        Fault::Delay(delay) => tokio::time::sleep(*delay).await,
        Fault::Duplicate => drop(dispatch(devnet, method, Params(params.clone().into_iter())).await),
        _ => {}
    }
    let answer = dispatch(devnet, method, Params(params.into_iter())).await;
    match fault {
        Fault::ErrorAfter { code, message } => return Ok(Err(Failure::new(code, message))),
        Fault::DropAfter => return Err(Dropped),
        Fault::DelayAfter(delay) => tokio::time::sleep(delay).await,
        _ => {}
    }
    Ok(answer)
}

/// Positional parameters.
struct Params(std::vec::IntoIter<Value>);

impl Params {
    fn optional<T: DeserializeOwned>(&mut self) -> Result<Option<T>, Failure> {
        match self.0.next() {
            None | Some(Value::Null) => Ok(None),
            Some(value) => {
                serde_json::from_value(value).map(Some).map_err(|error| Failure::invalid_params(error.to_string()))
            }
        }
    }

    fn next<T: DeserializeOwned>(&mut self) -> Result<T, Failure> {
        self.optional()?.ok_or_else(|| Failure::invalid_params("missing value for required argument"))
    }

    /// Reads the block parameter. Default: `latest`.
    fn block(&mut self) -> Result<BlockId, Failure> {
        Ok(self.optional()?.unwrap_or_default())
    }

    /// Returns `true` if a read is of the block `pending`. An estimate that names no block is.
    fn are_of_pending(&self, method: &str) -> bool {
        match self.0.as_slice().get(1) {
            None | Some(Value::Null) => method == "eth_estimateGas",
            Some(block) => block == "pending",
        }
    }
}

fn json(value: impl Serialize) -> Result<Box<RawValue>, Failure> {
    to_raw_value(&value).map_err(|error| Failure::internal(error.to_string()))
}

async fn dispatch(devnet: &Devnet, method: &str, mut params: Params) -> Result<Box<RawValue>, Failure> {
    match method {
        "eth_sendRawTransaction" => json(send(devnet, params.next()?)?),
        "eth_sendRawTransactionSync" => {
            let hash = send(devnet, params.next()?)?;
            let asked: Option<u64> = params.optional()?;
            let timeout = asked.map_or(SYNC_TIMEOUT, |millis| Duration::from_millis(millis).min(SYNC_TIMEOUT));
            json(devnet.receipt_within(hash, timeout).await.ok_or_else(|| Failure::not_in_time(hash))?)
        }
        "evm_mine" => {
            devnet.mine();
            json("0x0")
        }
        "devnet_mint" => {
            let (to, amount): (Address, U256) = (params.next()?, params.next()?);
            json(devnet.mint_units(to, amount)?.transaction_hash)
        }
        "devnet_fund" => {
            devnet.fund(params.next()?, params.next()?);
            json(true)
        }
        "anvil_setBalance" => {
            let (address, balance): (Address, U256) = (params.next()?, params.next()?);
            devnet.chain().state.edit(address, |info| info.balance = balance);
            json(())
        }
        "anvil_setCode" => {
            devnet.set_code(params.next()?, params.next::<Bytes>()?);
            json(())
        }
        _ => {
            let mut chain = devnet.chain();
            match chain.pending_state && params.are_of_pending(method) {
                true => chain.after_the_pool(|chain| read(chain, method, params)),
                false => read(&chain, method, params),
            }
        }
    }
}

fn send(devnet: &Devnet, raw: Bytes) -> Result<B256, Failure> {
    let tx = TxEnvelope::decode_2718_exact(&raw).map_err(|error| Failure::rejected(format!("rlp: {error}")))?;
    devnet.submit(tx)
}

/// Answers the methods that change nothing.
fn read(chain: &Chain, method: &str, mut params: Params) -> Result<Box<RawValue>, Failure> {
    match method {
        "eth_chainId" => json(U64::from(chain.chain_id)),
        "net_version" => json(chain.chain_id.to_string()),
        "web3_clientVersion" => json(concat!("tower-x402-devnet/", env!("CARGO_PKG_VERSION"))),
        "eth_syncing" => json(false),
        "eth_blockNumber" => json(U64::from(chain.head())),
        "eth_gasPrice" => json(U64::from(chain.base_fee.saturating_add(SUGGESTED_TIP))),
        "eth_maxPriorityFeePerGas" => json(U64::from(SUGGESTED_TIP)),
        "eth_feeHistory" => {
            json(fee_history(chain, params.next()?, params.next()?, params.optional()?.unwrap_or_default())?)
        }
        "eth_getBlockByNumber" => {
            let block = chain.number(params.next()?).and_then(|number| chain.block(number));
            let full = params.optional()?.unwrap_or(false);
            json(block.map(|block| rpc_block(block, full)))
        }
        "eth_getBlockByHash" => {
            let block = chain.block_by_hash(params.next()?);
            let full = params.optional()?.unwrap_or(false);
            json(block.map(|block| rpc_block(block, full)))
        }
        "eth_getBalance" => json(account(chain, &mut params)?.balance),
        "eth_getCode" => json(account(chain, &mut params)?.code.unwrap_or_default().original_bytes()),
        "eth_getStorageAt" => {
            let (address, slot): (Address, U256) = (params.next()?, params.next()?);
            let number = chain.resolve(params.block()?)?;
            json(B256::from(chain.view(number).slot(address, slot)))
        }
        "eth_getTransactionCount" => {
            let address: Address = params.next()?;
            let block = params.block()?;
            let nonce = chain.view(chain.resolve(block)?).account(address).unwrap_or_default().nonce;
            let pending = block == BlockId::Number(BlockNumberOrTag::Pending);
            json(U64::from(if pending { chain.pool.next_nonce(address, nonce) } else { nonce }))
        }
        "eth_call" => {
            let request: TransactionRequest = params.next()?;
            let (mut view, env) = chain.call_context(params.block()?)?;
            for (address, account) in params.optional::<StateOverride>()?.unwrap_or_default() {
                let AccountOverride {
                    code: Some(code), balance: None, nonce: None, state: None, state_diff: None, ..
                } = account
                else {
                    return Err(Failure::invalid_params("only the code of an account can be overridden"));
                };
                view.override_code(address, code);
            }
            let gas = request.gas.unwrap_or(evm::CALL_GAS_LIMIT).min(evm::CALL_GAS_LIMIT);
            let tx = evm::call_env(request, chain.chain_id, gas);
            json(evm::output(evm::run(chain.chain_id, view, env, tx, Rules::Lenient)?.result)?)
        }
        "eth_estimateGas" => json(U64::from(estimate_gas(chain, params.next()?, params.block()?)?)),
        "eth_getTransactionReceipt" => json(chain.mined(params.next()?).map(|mined| &mined.receipt)),
        "eth_getTransactionByHash" => json(transaction(chain, params.next()?)),
        "eth_getLogs" => json(matching_logs(chain, &params.next::<Filter>()?)?),
        _ => Err(Failure::method_not_found(method)),
    }
}

fn account(chain: &Chain, params: &mut Params) -> Result<revm::state::AccountInfo, Failure> {
    let address = params.next()?;
    let number = chain.resolve(params.block()?)?;
    Ok(chain.view(number).account(address).unwrap_or_default())
}

fn transaction(chain: &Chain, hash: B256) -> Option<alloy_rpc_types_eth::Transaction> {
    let Some(mined) = chain.mined(hash) else {
        let waiting = chain.pool.get(hash)?.clone();
        return Some(alloy_rpc_types_eth::Transaction::from_transaction(waiting, TransactionInfo::default()));
    };
    let block = chain.block(mined.receipt.block_number?)?;
    Some(mined.rpc(&block.header))
}

fn rpc_block(block: &Block, full: bool) -> RpcBlock {
    let transactions = if full {
        BlockTransactions::Full(block.rpc_transactions())
    } else {
        BlockTransactions::Hashes(block.transactions.iter().map(|mined| *mined.tx.tx_hash()).collect())
    };
    RpcBlock::new(block.header.clone(), transactions)
}

fn fee_history(
    chain: &Chain,
    count: U64,
    newest: BlockNumberOrTag,
    percentiles: Vec<f64>,
) -> Result<FeeHistory, Failure> {
    let newest = chain.number(newest).ok_or_else(Failure::unknown_block)?;
    let oldest = (newest + 1).saturating_sub(count.saturating_to::<u64>().clamp(1, 1024));
    let blocks: Vec<&Block> = (oldest..=newest).filter_map(|number| chain.block(number)).collect();
    let mut base_fees: Vec<u128> =
        blocks.iter().filter_map(|block| block.header.base_fee_per_gas.map(u128::from)).collect();
    base_fees.push(chain.base_fee.into());
    let rewards = |block: &&Block| {
        let base_fee = block.header.base_fee_per_gas.unwrap_or_default();
        let mut tips: Vec<u128> =
            block.transactions.iter().filter_map(|mined| mined.tx.effective_tip_per_gas(base_fee)).collect();
        tips.sort_unstable();
        let last = tips.len().saturating_sub(1) as f64;
        let at = |percentile: &f64| (last * percentile.clamp(0.0, 100.0) / 100.0).round() as usize;
        percentiles.iter().map(|percentile| tips.get(at(percentile)).copied().unwrap_or_default()).collect()
    };
    Ok(FeeHistory {
        base_fee_per_gas: base_fees,
        gas_used_ratio: blocks
            .iter()
            .map(|block| block.header.gas_used as f64 / block.header.gas_limit as f64)
            .collect(),
        oldest_block: oldest,
        reward: (!percentiles.is_empty()).then(|| blocks.iter().map(rewards).collect()),
        ..FeeHistory::default()
    })
}

/// Returns the smallest gas limit with which a call succeeds. The balance of the sender is not checked.
fn estimate_gas(chain: &Chain, request: TransactionRequest, block: BlockId) -> Result<u64, Failure> {
    let cap = request.gas.unwrap_or(evm::TX_GAS_LIMIT).min(evm::TX_GAS_LIMIT);
    let request =
        TransactionRequest { gas_price: None, max_fee_per_gas: None, max_priority_fee_per_gas: None, ..request };
    let run = |gas_limit: u64| -> Result<ExecutionResult, Failure> {
        let (view, env) = chain.call_context(block)?;
        let tx = evm::call_env(request.clone(), chain.chain_id, gas_limit);
        Ok(evm::run(chain.chain_id, view, env, tx, Rules::Lenient)?.result)
    };
    let with_all = run(cap)?;
    let used = with_all.tx_gas_used();
    if matches!(&with_all, ExecutionResult::Halt { reason: HaltReason::OutOfGas(_), .. }) {
        return Err(Failure::rejected(format!("gas required exceeds allowance ({cap})")));
    }
    evm::output(with_all)?;
    // It needs at least what it used, and more because of refunds and the 63/64 rule.
    let (mut fails, mut succeeds) = (used.saturating_sub(1), cap);
    while fails + 1 < succeeds {
        // Most calls need little more than they use, so search there first.
        let middle = (fails + (succeeds - fails) / 2).min(fails.saturating_mul(2));
        // An intrinsic cost above the limit is an error of the EVM, and means too little gas, too.
        match run(middle) {
            Ok(result) if result.is_success() => succeeds = middle,
            _ => fails = middle,
        }
    }
    Ok(succeeds)
}

/// Returns the logs that match a filter, oldest first.
fn matching_logs<'a>(chain: &'a Chain, filter: &Filter) -> Result<Vec<&'a Log>, Failure> {
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
