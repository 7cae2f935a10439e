//! How a payment ended.

use std::fmt;

use alloy_primitives::{Address, B256};
use serde::{Deserialize, Serialize};

use crate::{network::Network, usdc::Usdc};

/// How a purchase ended, as far as the client can tell.
///
/// The client believes what the server says about the server's own claim (that it was not paid, or that it was), but never
/// lets an answer that contradicts what was signed pass for a settlement.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Outcome {
    /// The server names the transaction that moved the money.
    Settled,
    /// The server took the payment and will settle it later; the money counts as spent.
    Accepted,
    /// The server says that the payment failed. That is no proof, and whoever holds the signature can use it until it
    /// expires, so its amount stays reserved until the chain shows more.
    Failed,
    /// Nobody can tell: the money may have moved or may yet move. Its amount stays reserved.
    Unknown,
    /// The client refused to pay; nothing was signed.
    Refused,
}

impl Outcome {
    /// The outcome in lower case, as programs print it.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Settled => "settled",
            Self::Accepted => "accepted",
            Self::Failed => "failed",
            Self::Unknown => "unknown",
            Self::Refused => "refused",
        }
    }

    /// Whether the server considers itself paid.
    pub const fn is_paid(self) -> bool {
        matches!(self, Self::Settled | Self::Accepted)
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// What the client signed, and what became of it.
///
/// A response that was paid for carries its receipt in its extensions ([`ReceiptExt`] reads it there).
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Receipt {
    /// How it ended.
    pub outcome: Outcome,
    /// The transaction that the server names.
    pub transaction: Option<B256>,
    /// The chain.
    pub network: Network,
    /// The token.
    pub asset: Address,
    /// What was promised.
    pub amount: Usdc,
    /// Who paid.
    pub payer: Address,
    /// Who is paid.
    pub pay_to: Address,
    /// The authorization's nonce; with network, asset and payer it identifies the payment.
    pub nonce: B256,
    /// Why the outcome is no better: the server's reason code, or what is wrong with its answer.
    pub reason: Option<String>,
}

/// The receipt of a response that was paid for.
pub trait ReceiptExt {
    /// How the payment for this response ended; `None` if it was free.
    fn receipt(&self) -> Option<&Receipt>;
}

impl<B> ReceiptExt for http::Response<B> {
    fn receipt(&self) -> Option<&Receipt> {
        self.extensions().get()
    }
}

#[cfg(feature = "reqwest")]
impl ReceiptExt for ::reqwest::Response {
    fn receipt(&self) -> Option<&Receipt> {
        self.extensions().get()
    }
}
