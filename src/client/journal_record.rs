//! What the record of payments is made of.

use std::fmt;

use alloy_primitives::{Address, B256};
use serde::{Deserialize, Serialize};
use url::Url;

use super::{
    Outcome, Receipt,
    promise::{Promise, Tally, host_of},
};
use crate::{network::Network, protocol::Version, usdc::Usdc};

/// How long after `validBefore` an authorization is taken to be void, in seconds: the difference that the clocks of client
/// and chain may have.
const EXPIRY_MARGIN: u64 = 60;

/// A payment that was signed.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[non_exhaustive]
pub struct JournalEntry {
    /// Unix time in seconds.
    pub signed_at: u64,
    /// The method of the request it pays for.
    pub method: String,
    /// The URL of the request it pays for.
    pub url: String,
    /// The chain.
    pub network: Network,
    /// The token.
    pub asset: Address,
    /// Who pays.
    pub payer: Address,
    /// Who is paid.
    pub pay_to: Address,
    /// How much.
    pub amount: Usdc,
    /// Unix time in seconds from which the authorization is void.
    pub valid_before: u64,
    /// The authorization's nonce.
    pub nonce: B256,
    /// The version of the protocol it is paid in; with [`Version::payment_header`] it names the header to present it in.
    #[serde(default, skip_serializing_if = "is_usual")]
    pub version: Version,
    /// Where the server says that the fate of the payment can be looked up: on the origin that is paid, nowhere else.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub status_url: Option<String>,
    /// The value of the payment header: money until it is used or void.
    pub payment: String,
}

/// Journals of earlier versions of this crate do not name the version.
fn is_usual(version: &Version) -> bool {
    *version == Version::default()
}

impl JournalEntry {
    /// What it takes out of a budget.
    pub(super) fn promise(&self) -> Promise {
        let host = Url::parse(&self.url).as_ref().map(host_of).unwrap_or_default();
        Promise { amount: self.amount, payee: self.pay_to, host, at: self.signed_at }
    }

    /// When the authorization is void by any reasonable clock.
    pub(super) const fn void_at(&self) -> u64 {
        self.valid_before.saturating_add(EXPIRY_MARGIN)
    }
}

impl fmt::Debug for JournalEntry {
    /// Without the payment itself, and without the URL, which may hold a token.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("JournalEntry")
            .field("signed_at", &self.signed_at)
            .field("network", &self.network)
            .field("payer", &self.payer)
            .field("pay_to", &self.pay_to)
            .field("amount", &self.amount)
            .field("valid_before", &self.valid_before)
            .field("nonce", &self.nonce)
            .finish_non_exhaustive()
    }
}

/// One line.
#[derive(Clone, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "camelCase")]
pub(super) enum Record {
    /// What was paid in all lines before; the first line, if at all.
    Paid(Tally),
    Signed(JournalEntry),
    Outcome {
        nonce: B256,
        outcome: Outcome,
        transaction: Option<B256>,
    },
    /// Proven never to be executed.
    Void {
        nonce: B256,
    },
}

impl From<&Receipt> for Record {
    fn from(receipt: &Receipt) -> Self {
        let Receipt { nonce, outcome, transaction, .. } = *receipt;
        Self::Outcome { nonce, outcome, transaction }
    }
}
