//! Sending a signed transaction to the node, and what the node's answer means.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use alloy_primitives::{B256, Bytes};

use super::rpc::{Receipt, Rpc, RpcFailure};

/// What is known of a transaction after it was sent.
#[derive(Debug)]
pub(crate) enum SendResult {
    /// It is in a block.
    Included(Receipt),
    /// The transaction is in the node's pool.
    Pooled,
    /// It may be in the node's pool: the answer was lost, or is ambiguous.
    Unknown,
    /// The account's nonce is in a block already, with this transaction or another one.
    NonceUsed,
    /// Another transaction with the nonce is in the pool, and this one does not outbid it.
    NonceContested,
    /// The account cannot pay for gas.
    InsufficientGas,
    /// The fees are too low.
    Underpriced,
    /// The node's pool is full.
    PoolFull,
    /// The node's pool has no room for another transaction of this account.
    AccountFull {
        /// The account has delegated its code (EIP-7702). Nodes keep one transaction of such an account, or a few.
        is_delegated: bool,
    },
    /// It can never be included, for this reason of the node's.
    Refused(String),
}

/// Sends transactions, and remembers which methods the node has.
#[derive(Debug)]
pub(crate) struct Broadcaster {
    waits_for_receipt: AtomicBool,
}

impl Broadcaster {
    pub(crate) fn new() -> Self {
        Self { waits_for_receipt: AtomicBool::new(true) }
    }

    /// Sends a transaction and, if the node can (EIP-7966), waits up to `limit` for its receipt.
    pub(crate) async fn send(&self, rpc: &Rpc, raw: &Bytes, hash: B256, limit: Duration) -> SendResult {
        if self.waits_for_receipt.load(Ordering::Relaxed) {
            // Some nodes reject the timeout argument.
            match rpc.call_within::<Receipt>(limit, "eth_sendRawTransactionSync", [raw]).await {
                Ok(receipt) if receipt.transaction_hash == hash => return SendResult::Included(receipt),
                Ok(_) => return SendResult::Unknown,
                Err(failure) if failure.is_method_missing() => self.waits_for_receipt.store(false, Ordering::Relaxed),
                // The transaction was not in a block in time, or not ready. Either way it may be in the pool.
                Err(RpcFailure::Refused { code: 4..=6, .. }) => return SendResult::Unknown,
                Err(failure) => return classify(&failure),
            }
        }
        self.resend(rpc, raw).await
    }

    /// Sends a transaction without waiting for its receipt. Repeating it changes nothing.
    pub(crate) async fn resend(&self, rpc: &Rpc, raw: &Bytes) -> SendResult {
        match rpc.call::<B256>("eth_sendRawTransaction", [raw]).await {
            Ok(_) => SendResult::Pooled,
            Err(failure) => classify(&failure),
        }
    }
}

/// Tells what an error means. There are no common codes, so it reads the messages of geth, reth, op-geth, Nethermind and Besu.
/// After an unrecognized error the transaction may be in the pool.
fn classify(failure: &RpcFailure) -> SendResult {
    let RpcFailure::Refused { message, .. } = failure else { return SendResult::Unknown };
    let said = message.to_ascii_lowercase();
    let says = |words: &[&str]| words.iter().any(|words| said.contains(words));
    if says(&["already known", "known transaction", "already imported", "already in mempool", "already exists"]) {
        SendResult::Pooled
    } else if says(&["nonce too low", "nonce is too low", "old nonce", "oldnonce"]) {
        SendResult::NonceUsed
    } else if says(&["replacement", "could not replace"]) {
        SendResult::NonceContested
    } else if says(&["insufficient funds", "insufficientfunds", "upfront cost"]) {
        SendResult::InsufficientGas
    } else if says(&["underpriced", "less than block base fee", "fee cap less than", "gas price too low", "feetoolow"])
    {
        SendResult::Underpriced
    } else if says(&["delegated account"]) {
        SendResult::AccountFull { is_delegated: true }
    } else if says(&["account limit", "exceeds the configured limit"]) {
        SendResult::AccountFull { is_delegated: false }
    } else if says(&["pool is full", "txpool full"]) {
        SendResult::PoolFull
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
        SendResult::Refused(message.clone())
    } else {
        SendResult::Unknown
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_refusals_are_recognized() {
        let classified = |message: &str| classify(&RpcFailure::Refused { code: -32000, message: message.into() });
        assert!(matches!(classified("already known"), SendResult::Pooled));
        assert!(matches!(classified("nonce too low: next nonce 5, tx nonce 4"), SendResult::NonceUsed));
        assert!(matches!(classified("replacement transaction underpriced"), SendResult::NonceContested));
        assert!(matches!(classified("insufficient funds for gas * price + value"), SendResult::InsufficientGas));
        assert!(matches!(classified("max fee per gas less than block base fee: address 0x"), SendResult::Underpriced));
        assert!(matches!(classified("txpool is full"), SendResult::PoolFull));
        let is_full = |message: &str, delegated| matches!(classified(message), SendResult::AccountFull { is_delegated } if is_delegated == delegated);
        assert!(is_full("in-flight transaction limit reached for delegated accounts", true));
        assert!(is_full("gapped-nonce tx from delegated accounts", true));
        assert!(is_full("account limit exceeded", false));
        assert!(matches!(classified("exceeds block gas limit"), SendResult::Refused(_)));
    }

    #[test]
    fn unrecognized_error_leaves_the_result_unknown() {
        let upstream = RpcFailure::Refused { code: -32603, message: "upstream request timeout".into() };
        assert!(matches!(classify(&upstream), SendResult::Unknown));
        assert!(matches!(classify(&RpcFailure::Silent), SendResult::Unknown));
    }
}
