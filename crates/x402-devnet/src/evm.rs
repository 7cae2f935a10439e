//! Executes transactions and calls on revm.

use alloy_consensus::{Transaction as _, Typed2718 as _, transaction::Recovered};
use alloy_primitives::{Address, Bytes, U256, address};
use alloy_rpc_types_eth::TransactionRequest;
use revm::{
    Context, ExecuteEvm as _, MainBuilder as _, MainContext as _,
    context::{
        BlockEnv, TxEnv,
        result::{EVMError, ExecutionResult, InvalidTransaction, ResultAndState},
    },
    context_interface::{cfg::gas::calculate_initial_tx_gas_for_tx, either::Either},
    primitives::{TxKind, eip7825::TX_GAS_LIMIT_CAP, hardfork::SpecId},
};

use super::{Transaction, failure::Failure, view::View};

/// The gas limit of a block.
pub(super) const BLOCK_GAS_LIMIT: u64 = 400_000_000;
/// The largest and the default gas limit of an `eth_call`.
pub(super) const CALL_GAS_LIMIT: u64 = 50_000_000;
/// The largest gas limit of a transaction (EIP-7825).
pub(super) const TX_GAS_LIMIT: u64 = TX_GAS_LIMIT_CAP;

/// The sequencer fee vault of Base.
const BENEFICIARY: Address = address!("4200000000000000000000000000000000000011");

/// The checks before an execution.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Rules {
    /// A transaction of a block.
    Transaction,
    /// A simulation, or a transaction without a signature: nonce, gas cap and the sender's code are not checked.
    Lenient,
}

/// Returns the block environment of an execution.
pub(super) fn block_env(number: u64, timestamp: u64, base_fee: u64) -> BlockEnv {
    BlockEnv {
        number: U256::from(number),
        timestamp: U256::from(timestamp),
        basefee: base_fee,
        beneficiary: BENEFICIARY,
        gas_limit: BLOCK_GAS_LIMIT,
        ..BlockEnv::default()
    }
}

/// Executes a transaction and returns its changes, without applying them.
pub(super) fn run(
    chain_id: u64,
    view: View<'_>,
    mut block: BlockEnv,
    tx: TxEnv,
    rules: Rules,
) -> Result<ResultAndState, Failure> {
    let lenient = rules == Rules::Lenient;
    if lenient && tx.gas_price == 0 {
        block.basefee = 0;
    }
    let mut evm = Context::mainnet()
        .with_db(view)
        .with_block(block)
        .modify_cfg_chained(|cfg| {
            cfg.chain_id = chain_id;
            if lenient {
                cfg.disable_nonce_check = true;
                cfg.disable_eip3607 = true;
                cfg.tx_gas_limit_cap = Some(u64::MAX);
            }
        })
        .build_mainnet();
    evm.transact(tx).map_err(|error| match error {
        EVMError::Transaction(InvalidTransaction::LackOfFundForMaxFee { fee, balance }) => {
            Failure::insufficient_funds(*balance, *fee)
        }
        EVMError::Transaction(error) => Failure::rejected(error.to_string()),
        error => Failure::internal(error.to_string()),
    })
}

/// Returns the output of an execution, or its failure as nodes report it.
pub(super) fn output(result: ExecutionResult) -> Result<Bytes, Failure> {
    match result {
        ExecutionResult::Success { output, .. } => Ok(output.into_data()),
        ExecutionResult::Revert { output, .. } => Err(Failure::reverted(output)),
        ExecutionResult::Halt { reason, .. } => Err(Failure::rejected(format!("execution halted: {reason:?}"))),
    }
}

/// Converts a signed transaction for the EVM.
pub(super) fn tx_env(tx: &Recovered<Transaction>) -> TxEnv {
    TxEnv {
        tx_type: tx.ty(),
        caller: tx.signer(),
        gas_limit: tx.gas_limit(),
        gas_price: tx.max_fee_per_gas(),
        kind: tx.kind(),
        value: tx.value(),
        data: tx.input().clone(),
        nonce: tx.nonce(),
        chain_id: tx.chain_id(),
        access_list: tx.access_list().cloned().unwrap_or_default(),
        gas_priority_fee: tx.max_priority_fee_per_gas(),
        authorization_list: tx.authorization_list().unwrap_or_default().iter().cloned().map(Either::Left).collect(),
        ..TxEnv::default()
    }
}

/// Converts the request of an `eth_call` or `eth_estimateGas` for the EVM.
pub(super) fn call_env(request: TransactionRequest, chain_id: u64, gas_limit: u64) -> TxEnv {
    let authorizations = request.authorization_list.unwrap_or_default();
    let tx_type = match (&request.access_list, request.max_fee_per_gas) {
        _ if !authorizations.is_empty() => 4,
        (_, Some(_)) => 2,
        (Some(_), None) => 1,
        (None, None) => 0,
    };
    TxEnv {
        tx_type,
        caller: request.from.unwrap_or_default(),
        gas_limit,
        gas_price: request.max_fee_per_gas.or(request.gas_price).unwrap_or_default(),
        kind: request.to.unwrap_or(TxKind::Create),
        value: request.value.unwrap_or_default(),
        data: request.input.into_input().unwrap_or_default(),
        chain_id: Some(chain_id),
        access_list: request.access_list.unwrap_or_default(),
        gas_priority_fee: (tx_type >= 2).then(|| request.max_priority_fee_per_gas.unwrap_or_default()),
        authorization_list: authorizations.into_iter().map(Either::Left).collect(),
        ..TxEnv::default()
    }
}

/// Returns the gas that a transaction costs before its execution.
pub(super) fn intrinsic_gas(tx: &TxEnv) -> u64 {
    let gas = calculate_initial_tx_gas_for_tx(tx, SpecId::default(), None);
    gas.initial_regular_gas.max(gas.floor_gas)
}
