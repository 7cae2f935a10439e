//! Checking the node, the clock and the settlement keys before the first payment.

use alloy_primitives::Address;
use tokio::time::sleep;

use crate::{
    chain::{endpoint::EndpointError, node::Node, rpc::RpcFailure},
    clock::Clock,
    network::Network,
    telemetry,
};

/// A clock this far from the chain's, in seconds, is reported: it misjudges validity windows.
const SKEW_WARNING: u64 = 30;
/// How often the receipt of a transaction in the newest block is asked for.
const RECEIPT_TRIES: u32 = 12;
/// A clock this far from the chain's, in seconds, is an error.
const SKEW_LIMIT: u64 = 86_400;

/// Checks chain, clock and balances, and so finds most mistakes before they cost a payment.
pub(super) async fn preflight(node: &Node, clock: &dyn Clock, accounts: &[Address]) -> Result<(), OnchainBuildError> {
    let (rpc, network) = (node.rpc(), node.network());
    let found = rpc.chain_id().await.map_err(|_| OnchainBuildError::Node)?;
    if found != network.chain_id() {
        return Err(OnchainBuildError::WrongChain { expected: network, found: Network::eip155(found) });
    }
    let block = rpc.block("latest").await;
    let block = block.ok().flatten().ok_or(OnchainBuildError::Node)?;
    node.observe_block(block.number.saturating_to());
    let timestamp = block.timestamp.saturating_to::<u64>();
    let skew = clock.now().abs_diff(timestamp);
    if skew > SKEW_LIMIT {
        return Err(OnchainBuildError::Clock { seconds: skew });
    }
    if skew > SKEW_WARNING {
        tracing::warn!(seconds = skew, "this machine's clock differs from the time of the newest block");
    }
    check_receipts(node).await?;
    for account in accounts {
        if rpc.code(*account).await.is_ok_and(|code| !code.is_empty()) {
            tracing::warn!(
                %account,
                "the settlement key has delegated its account (EIP-7702), and nodes keep only a few transactions of such an account: \
                 use another key, or end the delegation"
            );
        }
        let balance = rpc.balance(*account).await.map_err(|_| OnchainBuildError::Node)?;
        telemetry::gas_tank(network, *account, balance);
        if balance.is_zero() {
            tracing::warn!(%account, "the settlement key has no balance for gas");
        }
        let nonces = (rpc.nonce(*account, "latest").await, rpc.nonce(*account, "pending").await);
        if let (Ok(in_blocks), Ok(with_pool)) = nonces
            && with_pool > in_blocks
        {
            let waiting = with_pool - in_blocks;
            tracing::warn!(%account, waiting, "transactions of the settlement key are in flight already");
        }
        tracing::info!(%network, %account, %balance, "settling on chain");
    }
    Ok(())
}

/// Checks that the node gives receipts: no payment is confirmed without one.
async fn check_receipts(node: &Node) -> Result<(), OnchainBuildError> {
    let method = "eth_getTransactionReceipt";
    for _ in 0..RECEIPT_TRIES {
        match node.rpc().any_receipt().await {
            Ok(true) => return Ok(()),
            // The node may be behind the one that has the block.
            Ok(false) => sleep(node.poll_interval()).await,
            Err(RpcFailure::Refused { message, .. }) => return Err(OnchainBuildError::Refused { method, message }),
            Err(RpcFailure::Silent) => return Err(OnchainBuildError::Node),
        }
    }
    let message = "it has none of the newest block's transactions".to_owned();
    Err(OnchainBuildError::Refused { method, message })
}

/// Why a facilitator that uses a chain was not built.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum OnchainBuildError {
    /// A required setting is missing.
    #[error("set {0} on the builder")]
    Missing(&'static str),
    /// The node's URL is invalid. It is not shown, since it may hold a key.
    #[error("rpc_url is not an http or https URL (not shown: it may hold a key)")]
    Url,
    /// The machine's TLS configuration cannot be used.
    #[error("the machine's TLS configuration cannot be used")]
    Tls,
    /// The node did not answer, or its answer cannot be used.
    #[error("the node does not answer: check rpc_url, its key and the network, or raise rpc_timeout")]
    Node,
    /// The node refuses a request without which no payment can be confirmed. Use another node.
    #[error("the node refuses {method} ({message}), and no payment can be confirmed without it: use another node")]
    Refused {
        /// The JSON-RPC method.
        method: &'static str,
        /// The node's message, cut to 160 bytes.
        message: String,
    },
    /// The node is on another chain.
    #[error("the node is on {found}, not on {expected}: change rpc_url or network")]
    WrongChain {
        /// The configured network.
        expected: Network,
        /// The node's network.
        found: Network,
    },
    /// The machine's clock is wrong, or the node is not in sync.
    #[error("the clock and the newest block are {seconds} seconds apart: set the clock, or use a node that is in sync")]
    Clock {
        /// The difference.
        seconds: u64,
    },
    /// Payment channels have a facilitator, which sends for them, and a signer, too.
    #[error("payment channels send with the keys of the facilitator, or with others: set no signer, or no facilitator")]
    TwoSenders,
    /// The key sends for payment channels by itself, and in this process for a facilitator, whose ledger would not know its nonces.
    #[error("the key of {0} sends for a facilitator, too: give payment channels the facilitator, or another key")]
    TwoLedgers(Address),
    /// The chain lacks a contract that payment channels need.
    #[error("{network} has no contract {name} at {address}: payment channels cannot be used on this chain")]
    NoContract {
        /// The contract's name.
        name: &'static str,
        /// Where it should be.
        address: Address,
        /// The chain.
        network: Network,
    },
    /// The same key was set twice.
    #[error("the settlement key of {0} was set twice")]
    SameKey(Address),
    /// The operating system's source of randomness failed.
    #[error("the operating system's source of randomness failed")]
    Randomness,
    /// The crate was built from damaged sources.
    #[error("the probe's bytecode cannot be read: the crate's sources are damaged")]
    Probe,
}

impl From<EndpointError> for OnchainBuildError {
    fn from(error: EndpointError) -> Self {
        match error {
            EndpointError::Url => Self::Url,
            EndpointError::Tls => Self::Tls,
        }
    }
}
