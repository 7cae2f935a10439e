//! A block of the chain, in the form that JSON-RPC shows.

use alloy_consensus::{
    ReceiptEnvelope, Transaction as _,
    transaction::{Recovered, TransactionInfo},
};
use alloy_rpc_types_eth::{Log, TransactionReceipt};
use revm::context::result::ExecutionResult;

use super::{Transaction, state::Undo};

/// A block, and how to remove its changes.
#[derive(Debug)]
pub(super) struct Block {
    pub(super) header: alloy_rpc_types_eth::Header,
    pub(super) transactions: Vec<Mined>,
    pub(super) undo: Undo,
}

/// A transaction in a block.
#[derive(Debug)]
pub(super) struct Mined {
    pub(super) tx: Recovered<Transaction>,
    pub(super) receipt: TransactionReceipt,
    /// `false` if the devnet executed it for an account without a signature.
    pub(super) signed: bool,
}

impl Block {
    pub(super) fn logs(&self) -> impl Iterator<Item = &Log> {
        self.transactions.iter().flat_map(|mined| mined.receipt.inner.logs())
    }

    /// Returns the transactions in the form of JSON-RPC.
    pub(super) fn rpc_transactions(&self) -> Vec<alloy_rpc_types_eth::Transaction> {
        self.transactions.iter().map(|mined| mined.rpc(&self.header)).collect()
    }
}

impl Mined {
    pub(super) fn rpc(&self, header: &alloy_rpc_types_eth::Header) -> alloy_rpc_types_eth::Transaction {
        let info = TransactionInfo {
            hash: Some(self.receipt.transaction_hash),
            index: self.receipt.transaction_index,
            block_hash: Some(header.hash),
            block_number: Some(header.number),
            base_fee: header.base_fee_per_gas,
            block_timestamp: Some(header.timestamp),
        };
        alloy_rpc_types_eth::Transaction::from_transaction(self.tx.clone(), info)
    }
}

/// Returns a transaction's receipt in the form of JSON-RPC. `next_log` counts the logs of the block.
pub(super) fn rpc_receipt(
    header: &alloy_rpc_types_eth::Header,
    index: u64,
    tx: &Recovered<Transaction>,
    result: &ExecutionResult,
    receipt: ReceiptEnvelope,
    next_log: &mut u64,
) -> TransactionReceipt {
    let hash = *tx.tx_hash();
    let inner = receipt.map_logs(|log| {
        let log_index = *next_log;
        *next_log += 1;
        Log {
            inner: log,
            block_hash: Some(header.hash),
            block_number: Some(header.number),
            block_timestamp: Some(header.timestamp),
            transaction_hash: Some(hash),
            transaction_index: Some(index),
            log_index: Some(log_index),
            removed: false,
        }
    });
    TransactionReceipt {
        inner,
        transaction_hash: hash,
        transaction_index: Some(index),
        block_hash: Some(header.hash),
        block_number: Some(header.number),
        gas_used: result.tx_gas_used(),
        effective_gas_price: tx.effective_gas_price(header.base_fee_per_gas),
        blob_gas_used: None,
        blob_gas_price: None,
        from: tx.signer(),
        to: tx.to(),
        contract_address: result.created_address(),
    }
}
