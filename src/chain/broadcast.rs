//! Handing a signed transaction to the node, and what its answer means.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use alloy_primitives::{B256, Bytes};

use super::rpc::{Receipt, Rpc, RpcFailure};

/// What is known of a transaction after it was handed over.
#[derive(Debug)]
pub(crate) enum Sent {
    /// It is in a block.
    Included(Receipt),
    /// It waits for a block.
    Pooled,
    /// It may wait for a block: the answer was lost, or says neither yes nor no.
    Perhaps,
    /// The nonce is in a block already, with this transaction or another one.
    NonceUsed,
    /// Another transaction with the nonce waits, and this one does not outbid it.
    NonceContested,
    /// The key does not own enough for gas.
    NoGas,
    /// It offers too little.
    Underpriced,
    /// The node's pool has no room for it.
    PoolFull,
    /// It can never be included; the node's words.
    Refused(String),
}

/// Broadcasts, and remembers what the node can do.
#[derive(Debug)]
pub(crate) struct Broadcaster {
    waits_for_receipt: AtomicBool,
}

impl Broadcaster {
    pub(crate) fn new() -> Self {
        Self { waits_for_receipt: AtomicBool::new(true) }
    }

    /// Hands the transaction over and, where the node can (EIP-7966), waits up to `limit` for its receipt.
    pub(crate) async fn send(&self, rpc: &Rpc, raw: &Bytes, hash: B256, limit: Duration) -> Sent {
        if self.waits_for_receipt.load(Ordering::Relaxed) {
            // Without the timeout argument, which some nodes reject.
            match rpc.call_within::<Receipt>(limit, "eth_sendRawTransactionSync", [raw]).await {
                Ok(receipt) if receipt.transaction_hash == hash => return Sent::Included(receipt),
                Ok(_) => return Sent::Perhaps,
                Err(failure) if failure.is_method_missing() => self.waits_for_receipt.store(false, Ordering::Relaxed),
                // The transaction was not in a block in time, or not ready; either way it may be in the pool.
                Err(RpcFailure::Refused { code: 4..=6, .. }) => return Sent::Perhaps,
                Err(failure) => return read(&failure),
            }
        }
        self.resend(rpc, raw).await
    }

    /// Hands the transaction over without waiting; repeating it changes nothing.
    pub(crate) async fn resend(&self, rpc: &Rpc, raw: &Bytes) -> Sent {
        match rpc.call::<B256>("eth_sendRawTransaction", [raw]).await {
            Ok(_) => Sent::Pooled,
            Err(failure) => read(&failure),
        }
    }
}

/// Reads a refusal. There are no common codes for these; the words are those of geth, reth, op-geth, Nethermind and Besu.
/// What is not recognized may have taken effect.
fn read(failure: &RpcFailure) -> Sent {
    let RpcFailure::Refused { message, .. } = failure else { return Sent::Perhaps };
    let said = message.to_ascii_lowercase();
    let says = |words: &[&str]| words.iter().any(|words| said.contains(words));
    if says(&["already known", "known transaction", "already imported", "already in mempool", "already exists"]) {
        Sent::Pooled
    } else if says(&["nonce too low", "nonce is too low", "old nonce", "oldnonce"]) {
        Sent::NonceUsed
    } else if says(&["replacement", "could not replace"]) {
        Sent::NonceContested
    } else if says(&["insufficient funds", "insufficientfunds", "upfront cost"]) {
        Sent::NoGas
    } else if says(&["underpriced", "less than block base fee", "fee cap less than", "gas price too low", "feetoolow"])
    {
        Sent::Underpriced
    } else if says(&["pool is full", "txpool full", "account limit", "exceeds the configured limit"]) {
        Sent::PoolFull
    } else if says(&[
        "intrinsic gas too low",
        "exceeds block gas limit",
        "gas limit too high",
        "invalid sender",
        "invalid chain id",
        "type not supported",
        "oversized data",
        "priority fee per gas higher",
        "rlp:",
    ]) {
        Sent::Refused(message.clone())
    } else {
        Sent::Perhaps
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_read_as_nodes_mean_them() {
        let read = |message: &str| read(&RpcFailure::Refused { code: -32000, message: message.into() });
        assert!(matches!(read("already known"), Sent::Pooled));
        assert!(matches!(read("nonce too low: next nonce 5, tx nonce 4"), Sent::NonceUsed));
        assert!(matches!(read("replacement transaction underpriced"), Sent::NonceContested));
        assert!(matches!(read("insufficient funds for gas * price + value"), Sent::NoGas));
        assert!(matches!(read("max fee per gas less than block base fee: address 0x"), Sent::Underpriced));
        assert!(matches!(read("txpool is full"), Sent::PoolFull));
        assert!(matches!(read("exceeds block gas limit"), Sent::Refused(_)));
    }

    #[test]
    fn an_answer_that_is_not_understood_is_no_refusal() {
        let upstream = RpcFailure::Refused { code: -32603, message: "upstream request timeout".into() };
        assert!(matches!(read(&upstream), Sent::Perhaps));
        assert!(matches!(read(&RpcFailure::Silent), Sent::Perhaps));
    }
}
