//! What a client is told of a settlement, as the header that tells it.

use std::io::{self, Write as _};

use alloy_primitives::{Address, B256, U256, hex};
use base64_simd::STANDARD;
use http::{HeaderMap, HeaderName, HeaderValue};

use super::letters::Spelling;
use crate::{
    ledger::Record,
    network::Network,
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

    /// Of a payment that was made by `transaction`, as nearly all are: what [`of`](Self::of) writes of it in v2, without the
    /// strings in between.
    pub(super) fn paid(record: &Record, payer: Spelling, transaction: B256) -> Option<Self> {
        let offer = record.terms.offer();
        let mut json = [0; LONGEST];
        let mut rest = &mut json[..];
        write_paid(&mut rest, payer, record.key.payer, transaction, offer.network(), offer.amount).ok()?;
        let written = LONGEST - rest.len();
        let json = json.get(..written)?;
        Some(Self { name: PAYMENT_RESPONSE, value: STANDARD.encode_to_string(json).try_into().ok()? })
    }

    pub(super) fn attach(self, headers: &mut HeaderMap) {
        headers.insert(self.name, self.value);
    }
}

/// A settlement as the client is told of it.
pub(super) fn settlement_of(
    record: &Record,
    payer: Spelling,
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
        payer: Some(payer.write(record.key.payer)),
        transaction: transaction.map_or(String::new(), hex::encode_prefixed),
        network: offer.network().to_string(),
        amount: success.then(|| offer.amount.to_string()),
        extensions: None,
    }
}

/// Room for the largest numbers there can be.
const LONGEST: usize = 384;

/// None of it needs an escape in JSON.
fn write_paid(
    json: &mut &mut [u8],
    spelling: Spelling,
    payer: Address,
    transaction: B256,
    network: Network,
    amount: U256,
) -> io::Result<()> {
    json.write_all(br#"{"success":true,"payer":"0x"#)?;
    json.write_all(&spelling.digits(payer))?;
    json.write_all(br#"","transaction":""#)?;
    json.write_all(hex::Buffer::<32, true>::new().format(&transaction.0).as_bytes())?;
    write!(json, r#"","network":"{network}","amount":"{amount}"}}"#)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_at_once_is_what_would_have_been_written_of_strings() {
        let payer = Address::repeat_byte(0xab);
        for (network, amount) in [(Network::BASE, U256::from(1_000)), (Network::eip155(u64::MAX), U256::MAX)] {
            let transaction = B256::repeat_byte(0xcd);
            let mut written = [0; LONGEST];
            let mut rest = &mut written[..];
            write_paid(&mut rest, Spelling::default(), payer, transaction, network, amount).unwrap();
            let length = LONGEST - rest.len();
            let settlement = SettlementResponse {
                success: true,
                error_reason: None,
                payer: Some(Spelling::default().write(payer)),
                transaction: transaction.to_string(),
                network: network.to_string(),
                amount: Some(amount.to_string()),
                extensions: None,
            };
            assert_eq!(&written[..length], serde_json::to_vec(&settlement).unwrap());
        }
    }
}
