//! Why a remote facilitator was not built.

use crate::network::Network;

/// Why a [`RemoteFacilitator`](super::RemoteFacilitator) was not built.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RemoteBuildError {
    /// A URL is invalid. It is not shown, since it may hold a key.
    #[error("{0} is not an http or https URL (not shown: it may hold a key)")]
    Url(&'static str),
    /// The bearer token cannot be a header.
    #[error("the bearer token has characters that a header cannot have")]
    Token,
    /// The machine's TLS configuration, or the HTTP client's settings, cannot be used.
    #[error("the machine's TLS configuration, or the HTTP client's settings, cannot be used")]
    Tls,
    /// The facilitator did not answer.
    #[error("the facilitator does not answer: check its URL, or set its network to build without it")]
    Unreachable,
    /// The facilitator redirects, and the redirect was not followed: it gives up TLS, is not a 307 or 308, leads to another host or
    /// port while credentials or a client are set, or to another redirect. Set the new address.
    #[error("the facilitator redirects to {to}: use that URL if you trust it")]
    Moved {
        /// The new address, without user information and query.
        to: String,
    },
    /// The facilitator answered the question what it supports with an error.
    #[error("the facilitator answers /supported with status {status}: {}", hint(*status))]
    Status {
        /// The HTTP status.
        status: u16,
    },
    /// The answer is none of a facilitator.
    #[error("the answer to /supported is none of a facilitator: check its URL")]
    NotAFacilitator,
    /// The node did not answer, or its answer cannot be used.
    #[error("the confirming node of {0} does not answer")]
    Node(Network),
    /// The node refuses receipts, without which no payment can be confirmed. Use another node.
    #[error("the confirming node of {0} refuses receipts of transactions (eth_getTransactionReceipt): use another one")]
    Receipts(Network),
    /// The node is on another chain.
    #[error("the confirming node is on {found}, not on {expected}")]
    WrongChain {
        /// The configured network.
        expected: Network,
        /// The node's network.
        found: Network,
    },
    /// No node confirms what the facilitator does to payment channels. Set one with [`RemoteFacilitatorBuilder::confirm`](super::RemoteFacilitatorBuilder::confirm).
    #[cfg(feature = "onchain")]
    #[error("payment channels need a node of {0} that shows what is in them")]
    NoNode(Network),
    /// The chain lacks a contract that payment channels need.
    #[cfg(feature = "onchain")]
    #[error("{network} lacks {name} at {address}, which payment channels need")]
    NoContract {
        /// The contract.
        name: &'static str,
        /// Where it should be.
        address: alloy_primitives::Address,
        /// The chain.
        network: Network,
    },
    /// The facilitator does not serve payment channels of this network.
    #[cfg(feature = "onchain")]
    #[error("the facilitator does not serve payment channels on {0} (no batch-settlement in its /supported)")]
    NoChannels(Network),
    /// The operating system's source of randomness failed.
    #[error("the operating system's source of randomness failed")]
    Randomness,
    /// The crate was built from damaged sources.
    #[error("the probe's bytecode cannot be read: the crate's sources are damaged")]
    Probe,
}

fn hint(status: u16) -> &'static str {
    match status {
        401 | 403 => "check the credentials",
        404 | 405 | 501 => "check its URL, or set its network if it does not say what it supports",
        429 => "it wants fewer requests; try again later",
        500.. => "it is out of order; try again later, or set its network",
        _ => "check its URL",
    }
}
