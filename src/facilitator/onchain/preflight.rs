//! What is looked at before anything is charged for.

use alloy_primitives::Address;

use crate::{
    chain::{block_time::BlockTime, rpc::Rpc},
    clock::Clock,
    network::Network,
    telemetry,
};

/// A clock this far from the chain's accepts or refuses windows wrongly; reported.
const SKEW_WARNING: u64 = 30;
/// A clock this far off cannot be worked with.
const SKEW_LIMIT: u64 = 86_400;

/// Three requests that find most mistakes before they cost a payment.
pub(super) async fn preflight(
    rpc: &Rpc,
    network: Network,
    clock: &dyn Clock,
    accounts: &[Address],
    pace: &BlockTime,
) -> Result<(), OnchainBuildError> {
    let found = rpc.chain_id().await.map_err(|_| OnchainBuildError::Node)?;
    if found != network.chain_id() {
        return Err(OnchainBuildError::WrongChain { expected: network, found: Network::eip155(found) });
    }
    let block = rpc.block("latest").await;
    let block = block.ok().flatten().ok_or(OnchainBuildError::Node)?;
    pace.observe(block.number.saturating_to());
    let timestamp = block.timestamp.saturating_to::<u64>();
    let skew = clock.now().abs_diff(timestamp);
    if skew > SKEW_LIMIT {
        return Err(OnchainBuildError::Clock { seconds: skew });
    }
    if skew > SKEW_WARNING {
        tracing::warn!(seconds = skew, "this machine's clock and the newest block are apart");
    }
    for account in accounts {
        let balance = rpc.balance(*account).await.map_err(|_| OnchainBuildError::Node)?;
        telemetry::gas_tank(network, *account, balance);
        if balance.is_zero() {
            tracing::warn!(%account, "the settlement key has nothing to pay for gas with");
        }
        let nonces = (rpc.nonce(*account, "latest").await, rpc.nonce(*account, "pending").await);
        if let (Ok(in_blocks), Ok(with_pool)) = nonces
            && with_pool > in_blocks
        {
            let waiting = with_pool - in_blocks;
            tracing::warn!(%account, waiting, "transactions of the settlement key are on their way already");
        }
        tracing::info!(%network, %account, %balance, "settling on chain");
    }
    Ok(())
}

/// Why an [`OnchainFacilitator`](super::OnchainFacilitator) was not built.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum OnchainBuildError {
    /// Something has no default.
    #[error("set {0} on the builder")]
    Missing(&'static str),
    /// The node's URL cannot be read. It is not shown, since it may hold a key.
    #[error("rpc_url is not an http or https URL (not shown: it may hold a key)")]
    Url,
    /// No TLS configuration could be made.
    #[error("the machine's TLS configuration cannot be used")]
    Tls,
    /// The node did not answer, or answered nonsense.
    #[error("the node does not answer: check rpc_url, its key and the network, or raise rpc_timeout")]
    Node,
    /// The node is on another chain.
    #[error("the node is on {found}, not on {expected}: change rpc_url or network")]
    WrongChain {
        /// What was configured.
        expected: Network,
        /// What the node says.
        found: Network,
    },
    /// The machine's clock is absurd, or the node has stopped following its chain.
    #[error("the clock and the newest block are {seconds} seconds apart: set the clock, or use a node that is in sync")]
    Clock {
        /// How far apart they are.
        seconds: u64,
    },
    /// One key was given twice.
    #[error("the settlement key of {0} was given twice")]
    SameKey(Address),
    /// The operating system has no randomness.
    #[error("the operating system's source of randomness failed")]
    Randomness,
    /// The crate was built from damaged sources.
    #[error("the probe's bytecode cannot be read: the crate's sources are damaged")]
    Probe,
}
