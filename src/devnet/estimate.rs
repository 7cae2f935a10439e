//! `eth_estimateGas`.

use alloy_eips::BlockId;
use alloy_rpc_types_eth::TransactionRequest;
use revm::context::result::ExecutionResult;

use super::{
    chain::Chain,
    evm::{self, Rules},
    failure::Failure,
};

/// The smallest gas limit with which the request succeeds. Whether the sender can pay for it is not looked at.
pub(super) fn gas(chain: &Chain, request: TransactionRequest, block: BlockId) -> Result<u64, Failure> {
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
    evm::output(with_all)?;
    // Less than it used cannot do; refunds and the 63/64 rule are why more may be needed.
    let (mut fails, mut succeeds) = (used.saturating_sub(1), cap);
    while fails + 1 < succeeds {
        // Most need little more than they use, so look there first.
        let middle = (fails + (succeeds - fails) / 2).min(fails.saturating_mul(2));
        // An intrinsic cost above the limit is an error, not a result; it means "too little" all the same.
        match run(middle) {
            Ok(result) if result.is_success() => succeeds = middle,
            _ => fails = middle,
        }
    }
    Ok(succeeds)
}
