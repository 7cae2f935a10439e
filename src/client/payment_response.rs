//! Reading `PAYMENT-RESPONSE`: what a server reports of a payment.

use alloy_primitives::{Address, B256};
use http::HeaderMap;

use crate::{
    network::Network,
    protocol::{MAX_PAYMENT_HEADER, Reason, SettlementResponse, Version, decode_header, v1},
};

/// How much of a server's reason is kept, in characters.
pub(super) const MAX_REASON: usize = 200;

/// A report, checked against what was signed as far as all schemes have it in common.
pub(super) enum SettlementReport {
    None,
    Paid { response: Box<SettlementResponse>, transaction: Option<B256> },
    Failed { reason: Reason, transaction: Option<B256> },
    Contradiction(&'static str),
}

impl SettlementReport {
    /// Reads the report on a payment of this payer on this network, in this version of x402.
    pub(super) fn read(headers: &HeaderMap, version: Version, network: Network, payer: Address) -> Self {
        let values_of = |version: Version| headers.get_all(version.response_header()).iter();
        let mut values = values_of(version).peekable();
        // Some servers report a payment of v1 in the header of v2.
        if values.peek().is_none() && version == Version::V1 {
            values = values_of(Version::V2).peekable();
        }
        let Some(value) = values.next() else { return Self::None };
        if values.next().is_some() {
            return Self::Contradiction("comes twice");
        }
        let value = value.as_bytes();
        let response: Result<SettlementResponse, _> = match version {
            Version::V1 => decode_header::<v1::SettlementResponseV1>(value, MAX_PAYMENT_HEADER).map(Into::into),
            Version::V2 => decode_header(value, MAX_PAYMENT_HEADER),
        };
        let Ok(response) = response else { return Self::Contradiction("cannot be read") };
        let transaction = response.transaction.parse::<B256>().ok();
        if !response.success {
            let reason = response.error_reason.unwrap_or(Reason::UnexpectedSettleError);
            return Self::Failed { reason: shortened(reason), transaction };
        }
        if !response.network.parse().is_ok_and(|named: Network| named == network) {
            return Self::Contradiction("names another network");
        }
        if response.payer.as_ref().is_some_and(|named| named.parse() != Ok::<Address, _>(payer)) {
            return Self::Contradiction("names another payer");
        }
        if transaction.is_none() && !response.transaction.is_empty() {
            return Self::Contradiction("names something that is not a transaction hash");
        }
        Self::Paid { response: Box::new(response), transaction }
    }
}

/// Returns the reason with no more of an unknown code than a log should have.
pub(super) fn shortened(reason: Reason) -> Reason {
    match reason {
        Reason::Other(text) => Reason::Other(text.chars().take(MAX_REASON).collect()),
        known => known,
    }
}
