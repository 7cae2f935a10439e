//! What a client is told of a settlement, as the header that tells it.

use alloy_primitives::{B256, hex};
use http::{HeaderMap, HeaderName, HeaderValue};

use crate::{
    ledger::Record,
    protocol::{Reason, SettlementResponse, Version, encode_header, header_name, v1},
};

const PAYMENT_RESPONSE: HeaderName = HeaderName::from_static(header_name::PAYMENT_RESPONSE);
const X_PAYMENT_RESPONSE: HeaderName = HeaderName::from_static(header_name::X_PAYMENT_RESPONSE);

/// `PAYMENT-RESPONSE`, or what v1 calls so.
#[derive(Debug)]
pub(super) struct Receipt {
    name: HeaderName,
    value: HeaderValue,
}

impl Receipt {
    /// `None` only for what cannot be written in a header.
    pub(super) fn of(settlement: &SettlementResponse, version: Version) -> Option<Self> {
        let (name, value) = match version {
            Version::V1 => (X_PAYMENT_RESPONSE, encode_header(&v1::SettlementResponse::from(settlement))),
            Version::V2 => (PAYMENT_RESPONSE, encode_header(settlement)),
        };
        Some(Self { name, value: value.ok()?.try_into().ok()? })
    }

    pub(super) fn attach(self, headers: &mut HeaderMap) {
        headers.insert(self.name, self.value);
    }
}

/// A settlement as the client is told of it.
pub(super) fn settlement_of(
    record: &Record,
    payer: &str,
    result: Result<B256, (Reason, Option<B256>)>,
) -> SettlementResponse {
    let offer = record.terms.offer();
    let (success, error_reason, transaction) = match result {
        Ok(transaction) => (true, None, Some(transaction)),
        Err((reason, transaction)) => (false, Some(reason), transaction),
    };
    SettlementResponse {
        success,
        error_reason,
        payer: Some(payer.to_owned()),
        transaction: transaction.map_or(String::new(), hex::encode_prefixed),
        network: offer.network().to_string(),
        amount: success.then(|| offer.amount.to_string()),
        extensions: None,
    }
}
