//! A record as a database keeps it.

use std::sync::Arc;

use alloy_primitives::{B256, U256};
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use serde::{Deserialize, Serialize};

use super::{BodyDigest, Fingerprint, Fulfilment, Record, Settlement, Settling, StoredResponse};
use crate::{
    eip3009::{Authorization, PaymentSignature, without_checksums},
    payment::{PaymentKey, Terms},
    protocol::{ExactOffer, PaymentRequirements, Reason, Verbatim},
};

/// What of a [`Record`] is known from the start, as JSON. Of this and of [`ProgressRow`] a later version may add fields with
/// defaults, and never changes what one means; no field is in both.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct BoughtRow {
    offer: Verbatim<PaymentRequirements>,
    #[serde(serialize_with = "without_checksums")]
    authorization: Authorization,
    signature: PaymentSignature,
    request: B256,
    names_caller: bool,
    #[serde(default)]
    id: Option<B256>,
    reserved_at: u64,
}

/// What changes with every step.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct ProgressRow {
    body: Option<BodyRow>,
    fulfilment: FulfilmentRow,
    settlement: SettlementRow,
    last_failure: Option<Reason>,
    #[serde(default)]
    failures: u32,
    attempts: u32,
    replays: u32,
    block_seen: Option<u64>,
    transactions: Vec<B256>,
    admitted: bool,
    #[serde(default)]
    deferred: bool,
    epoch: u64,
    produced_at: Option<u64>,
    #[serde(default)]
    settling: Option<(u64, u64)>,
    #[serde(default)]
    settled_at: Option<u64>,
    #[serde(default)]
    fee: Option<U256>,
}

#[derive(Serialize, Deserialize)]
struct BodyRow {
    length: u64,
    digest: B256,
    complete: bool,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum FulfilmentRow {
    Reserved,
    Working,
    Produced,
    Delivered,
    Released,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum SettlementRow {
    None,
    Due,
    Submitted,
    Unknown,
    Settled { transaction: B256, block: Option<u64> },
    Final { transaction: B256, block: Option<u64> },
    Dead,
}

/// What is known of a payment from the start.
pub(super) fn bought(record: &Record) -> Result<String, serde_json::Error> {
    serde_json::to_string(&BoughtRow {
        offer: record.terms.text().clone(),
        authorization: record.authorization.clone(),
        signature: record.signature.clone(),
        request: record.request.digest,
        names_caller: record.request.names_caller,
        id: record.id,
        reserved_at: record.reserved_at,
    })
}

/// What has become of it.
pub(super) fn progress(record: &Record) -> Result<String, serde_json::Error> {
    serde_json::to_string(&ProgressRow::of(record))
}

/// Both in one object.
#[cfg(any(feature = "postgres", test))]
pub(super) fn whole(record: &Record) -> Result<String, serde_json::Error> {
    let (mut whole, progress) = (bought(record)?, progress(record)?);
    // Neither is empty.
    whole.pop();
    whole.push(',');
    whole.push_str(&progress[1..]);
    Ok(whole)
}

/// The record of both, which may be the same text; its lease has ended with the process that held it. `None` if they are not ours.
pub(super) fn read(bought: &str, progress: &str) -> Option<Record> {
    let bought: BoughtRow = serde_json::from_str(bought).ok()?;
    serde_json::from_str::<ProgressRow>(progress).ok()?.into_record(bought)
}

impl ProgressRow {
    fn of(record: &Record) -> Self {
        Self {
            body: record.body.map(|BodyDigest { length, digest, complete }| BodyRow { length, digest, complete }),
            fulfilment: match record.fulfilment {
                Fulfilment::Reserved => FulfilmentRow::Reserved,
                Fulfilment::Working => FulfilmentRow::Working,
                Fulfilment::Produced => FulfilmentRow::Produced,
                Fulfilment::Delivered => FulfilmentRow::Delivered,
                Fulfilment::Released => FulfilmentRow::Released,
            },
            settlement: match record.settlement {
                Settlement::None => SettlementRow::None,
                Settlement::Due => SettlementRow::Due,
                Settlement::Submitted => SettlementRow::Submitted,
                Settlement::Unknown => SettlementRow::Unknown,
                Settlement::Settled { transaction, block } => SettlementRow::Settled { transaction, block },
                Settlement::Final { transaction, block } => SettlementRow::Final { transaction, block },
                Settlement::Dead => SettlementRow::Dead,
            },
            last_failure: record.last_failure.clone(),
            failures: record.failures,
            attempts: record.attempts,
            replays: record.replays,
            block_seen: record.block_seen,
            transactions: record.transactions.clone(),
            admitted: record.admitted,
            deferred: record.deferred,
            epoch: record.epoch,
            produced_at: record.produced_at,
            settling: record.settling.map(|Settling { by, until }| (by, until)),
            settled_at: record.settled_at,
            fee: record.fee,
        }
    }

    fn into_record(self, bought: BoughtRow) -> Option<Record> {
        let terms = Arc::new(Terms::new(ExactOffer::try_from(&bought.offer.read().ok()?).ok()?));
        Some(Record {
            key: PaymentKey::of(&terms, &bought.authorization),
            terms,
            authorization: bought.authorization,
            signature: bought.signature,
            request: Fingerprint { digest: bought.request, names_caller: bought.names_caller },
            body: self.body.map(|BodyRow { length, digest, complete }| BodyDigest { length, digest, complete }),
            id: bought.id,
            fulfilment: match self.fulfilment {
                FulfilmentRow::Reserved => Fulfilment::Reserved,
                FulfilmentRow::Working => Fulfilment::Working,
                FulfilmentRow::Produced => Fulfilment::Produced,
                FulfilmentRow::Delivered => Fulfilment::Delivered,
                FulfilmentRow::Released => Fulfilment::Released,
            },
            settlement: match self.settlement {
                SettlementRow::None => Settlement::None,
                SettlementRow::Due => Settlement::Due,
                SettlementRow::Submitted => Settlement::Submitted,
                SettlementRow::Unknown => Settlement::Unknown,
                SettlementRow::Settled { transaction, block } => Settlement::Settled { transaction, block },
                SettlementRow::Final { transaction, block } => Settlement::Final { transaction, block },
                SettlementRow::Dead => Settlement::Dead,
            },
            last_failure: self.last_failure,
            failures: self.failures,
            attempts: self.attempts,
            replays: self.replays,
            block_seen: self.block_seen,
            transactions: self.transactions,
            admitted: self.admitted,
            deferred: self.deferred,
            epoch: self.epoch,
            lease_until: 0,
            reserved_at: bought.reserved_at,
            produced_at: self.produced_at,
            settling: self.settling.map(|(by, until)| Settling { by, until }),
            settled_at: self.settled_at,
            fee: self.fee,
        })
    }
}

/// The head of a stored response. Header values are bytes, not always text.
#[derive(Serialize, Deserialize)]
pub(super) struct Head {
    status: u16,
    headers: Vec<(String, Vec<u8>)>,
    trailers: Option<Vec<(String, Vec<u8>)>>,
}

impl Head {
    pub(super) fn of(response: &StoredResponse) -> Self {
        Self {
            status: response.status.as_u16(),
            headers: fields(&response.headers),
            trailers: response.trailers.as_ref().map(fields),
        }
    }

    pub(super) fn into_response(self, body: Vec<u8>, stored_at: u64) -> Option<StoredResponse> {
        Some(StoredResponse {
            status: StatusCode::from_u16(self.status).ok()?,
            headers: headers(self.headers)?,
            trailers: match self.trailers {
                Some(fields) => Some(headers(fields)?),
                None => None,
            },
            body: body.into(),
            stored_at,
        })
    }
}

fn fields(headers: &HeaderMap) -> Vec<(String, Vec<u8>)> {
    headers.iter().map(|(name, value)| (name.as_str().to_owned(), value.as_bytes().to_vec())).collect()
}

fn headers(fields: Vec<(String, Vec<u8>)>) -> Option<HeaderMap> {
    let mut headers = HeaderMap::new();
    for (name, value) in fields {
        headers.append(HeaderName::try_from(name).ok()?, HeaderValue::from_bytes(&value).ok()?);
    }
    Some(headers)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As version 0.1 wrote it first: with checksums, and an offer whose fields stand in any order.
    const WRITTEN_BEFORE: &str = r#"{
        "offer": {"payTo":"0x90F79bf6EB2c4f870365E785982E1f101E93b906","scheme":"exact","network":"eip155:8453","amount":"1000",
            "asset":"0x833589fCD6eDb6E08f4c7C32D4f71b54bdA02913","maxTimeoutSeconds":60,
            "extra":{"name":"USD Coin","version":"2","paymentFlow":"authorization"}},
        "authorization": {"from":"0x70997970C51812dc3A010C7d01b50e0d17dc79C8","to":"0x90F79bf6EB2c4f870365E785982E1f101E93b906",
            "value":"1000","validAfter":"0","validBefore":"1800000060",
            "nonce":"0x00000000000000000000000000000000000000000000000000000000000000ab"},
        "signature":"0x0102","request":"0x1111111111111111111111111111111111111111111111111111111111111111","namesCaller":true,
        "body":null,"fulfilment":"delivered","settlement":{"settled":{"transaction":
            "0x2222222222222222222222222222222222222222222222222222222222222222","block":7}},
        "lastFailure":null,"attempts":1,"replays":0,"blockSeen":6,"transactions":[],"admitted":false,"epoch":0,
        "reservedAt":1800000000,"producedAt":1800000001
    }"#;

    fn read_whole(json: &str) -> Record {
        read(json, json).unwrap()
    }

    #[test]
    fn what_was_written_before_is_read_and_written_again_as_the_same() {
        let before = read_whole(WRITTEN_BEFORE);
        assert_eq!(before.key.payer, before.authorization.from);
        assert_eq!(before.terms.offer().pay_to, before.authorization.to);
        assert_eq!(before.settlement.block(), Some(7));
        let json = whole(&before).unwrap();
        assert!(json.contains("0x70997970c51812dc3a010c7d01b50e0d17dc79c8"), "a checksum takes a hash: {json}");
        assert_eq!(format!("{:?}", read_whole(&json)), format!("{before:?}"));
        let apart = read(&bought(&before).unwrap(), &progress(&before).unwrap()).unwrap();
        assert_eq!(format!("{apart:?}"), format!("{before:?}"));
    }
}
