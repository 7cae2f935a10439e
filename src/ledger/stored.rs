//! Records as text: the JSON that databases keep.

use std::sync::Arc;

use alloy_primitives::{B256, U256};
use serde::{Deserialize, Serialize};

use super::{BodyDigest, Fingerprint, Fulfilment, Record, Settlement, Settling};
use crate::{
    eip3009::{Authorization, PaymentSignature, without_checksums},
    payment::{PaymentKey, Terms},
    protocol::{ExactOffer, PaymentRequirements, Reason, Verbatim},
};

/// The text is not the JSON of a [`Record`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the text is not the JSON of a payment's record")]
#[non_exhaustive]
pub struct InvalidRecord;

impl Record {
    /// Returns the record as JSON, for a backend's storage. A later version of this crate may add fields, and reads what earlier ones
    /// wrote.
    ///
    /// The text holds bearer data: the payer's signature.
    ///
    /// # Errors
    /// If a field refuses to serialize; none of them does.
    pub fn to_json(&self) -> Result<String, serde_json::Error> {
        let (mut json, changing) = (fixed(self)?, changing(self)?);
        // One object of two, neither of which is empty.
        json.pop();
        json.push(',');
        json.push_str(&changing[1..]);
        Ok(json)
    }

    /// Restores a record from the text that [`to_json`](Self::to_json) made.
    ///
    /// If the process that worked on the payment or settled it is known to be gone, set [`lease_until`](Self::lease_until) to 0 and
    /// [`settling`](Self::settling) to `None`.
    ///
    /// # Errors
    /// [`InvalidRecord`] if the text is something else.
    pub fn from_json(json: &str) -> Result<Self, InvalidRecord> {
        read(json, json).ok_or(InvalidRecord)
    }
}

/// The fields of a [`Record`] that never change. Later versions may add fields with defaults to this and to [`Changing`], and never
/// change the meaning of one. No field is in both.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Fixed {
    offer: Verbatim<PaymentRequirements>,
    #[serde(serialize_with = "without_checksums")]
    authorization: Authorization,
    signature: PaymentSignature,
    request: B256,
    names_caller: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    written: Option<B256>,
    id: Option<B256>,
    reserved_at: u64,
}

/// The fields that steps change.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Changing {
    body: Option<BodyRow>,
    #[serde(with = "FulfilmentRow")]
    fulfilment: Fulfilment,
    #[serde(with = "SettlementRow")]
    settlement: Settlement,
    last_failure: Option<Reason>,
    failures: u32,
    attempts: u32,
    replays: u32,
    block_seen: Option<u64>,
    transactions: Vec<B256>,
    admitted: bool,
    deferred: bool,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    streamed: bool,
    epoch: u64,
    #[serde(default, skip_serializing_if = "is_zero")]
    lease_until: u64,
    produced_at: Option<u64>,
    settling: Option<(u64, u64)>,
    settled_at: Option<u64>,
    fee: Option<U256>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    charged: Option<U256>,
}

/// Of a lease: the file of the ledger in SQLite has none.
#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
const fn is_zero(time: &u64) -> bool {
    *time == 0
}

#[derive(Serialize, Deserialize)]
struct BodyRow {
    length: u64,
    digest: B256,
    complete: bool,
}

#[derive(Serialize, Deserialize)]
#[serde(remote = "Fulfilment", rename_all = "lowercase")]
enum FulfilmentRow {
    Reserved,
    Working,
    Produced,
    Delivered,
    Released,
}

#[derive(Serialize, Deserialize)]
#[serde(remote = "Settlement", rename_all = "lowercase")]
enum SettlementRow {
    None,
    Due,
    Submitted,
    Unknown,
    Settled { transaction: B256, block: Option<u64> },
    Final { transaction: B256, block: Option<u64> },
    Dead,
}

/// Returns the JSON of the fields that never change.
pub(super) fn fixed(record: &Record) -> Result<String, serde_json::Error> {
    serde_json::to_string(&Fixed {
        offer: record.terms.text().clone(),
        authorization: record.authorization.clone(),
        signature: record.signature.clone(),
        request: record.request.digest,
        names_caller: record.request.names_caller,
        written: record.written.map(|written| written.digest),
        id: record.id,
        reserved_at: record.reserved_at,
    })
}

/// Returns the JSON of the fields that steps change.
pub(super) fn changing(record: &Record) -> Result<String, serde_json::Error> {
    serde_json::to_string(&Changing::of(record))
}

/// Reads a record from the JSON of both kinds of fields, which may be one text.
pub(super) fn read(fixed: &str, changing: &str) -> Option<Record> {
    let fixed: Fixed = serde_json::from_str(fixed).ok()?;
    serde_json::from_str::<Changing>(changing).ok()?.into_record(fixed)
}

impl Changing {
    fn of(record: &Record) -> Self {
        Self {
            body: record.body.map(|BodyDigest { length, digest, complete }| BodyRow { length, digest, complete }),
            fulfilment: record.fulfilment,
            settlement: record.settlement,
            last_failure: record.last_failure.clone(),
            failures: record.failures,
            attempts: record.attempts,
            replays: record.replays,
            block_seen: record.block_seen,
            transactions: record.transactions.clone(),
            admitted: record.admitted,
            deferred: record.deferred,
            streamed: record.streamed,
            epoch: record.epoch,
            lease_until: record.lease_until,
            produced_at: record.produced_at,
            settling: record.settling.map(|Settling { by, until }| (by, until)),
            settled_at: record.settled_at,
            fee: record.fee,
            charged: record.charged,
        }
    }

    fn into_record(self, fixed: Fixed) -> Option<Record> {
        let terms = Arc::new(Terms::new(ExactOffer::try_from(&fixed.offer.read().ok()?).ok()?));
        Some(Record {
            key: PaymentKey::of(&terms, &fixed.authorization),
            terms,
            authorization: fixed.authorization,
            signature: fixed.signature,
            request: Fingerprint { digest: fixed.request, names_caller: fixed.names_caller },
            written: fixed.written.map(|digest| Fingerprint { digest, names_caller: fixed.names_caller }),
            body: self.body.map(|BodyRow { length, digest, complete }| BodyDigest { length, digest, complete }),
            id: fixed.id,
            fulfilment: self.fulfilment,
            settlement: self.settlement,
            last_failure: self.last_failure,
            failures: self.failures,
            attempts: self.attempts,
            replays: self.replays,
            block_seen: self.block_seen,
            transactions: self.transactions,
            admitted: self.admitted,
            deferred: self.deferred,
            streamed: self.streamed,
            epoch: self.epoch,
            lease_until: self.lease_until,
            reserved_at: fixed.reserved_at,
            produced_at: self.produced_at,
            settling: self.settling.map(|(by, until)| Settling { by, until }),
            settled_at: self.settled_at,
            fee: self.fee,
            charged: self.charged,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// With checksummed addresses, and the offer's fields in another order.
    const WRITTEN: &str = r#"{
        "offer": {"payTo":"0x90F79bf6EB2c4f870365E785982E1f101E93b906","scheme":"exact","network":"eip155:8453","amount":"1000",
            "asset":"0x833589fCD6eDb6E08f4c7C32D4f71b54bdA02913","maxTimeoutSeconds":60,
            "extra":{"name":"USD Coin","version":"2","paymentFlow":"authorization"}},
        "authorization": {"from":"0x70997970C51812dc3A010C7d01b50e0d17dc79C8","to":"0x90F79bf6EB2c4f870365E785982E1f101E93b906",
            "value":"1000","validAfter":"0","validBefore":"1800000060",
            "nonce":"0x00000000000000000000000000000000000000000000000000000000000000ab"},
        "signature":"0x0102","request":"0x1111111111111111111111111111111111111111111111111111111111111111","namesCaller":true,
        "body":null,"fulfilment":"delivered","settlement":{"settled":{"transaction":
            "0x2222222222222222222222222222222222222222222222222222222222222222","block":7}},
        "lastFailure":null,"attempts":1,"replays":0,"blockSeen":6,"transactions":[],"admitted":false,"deferred":false,
        "epoch":0,"reservedAt":1800000000,"producedAt":1800000001,"id":null,"failures":0,"settling":null,"settledAt":null,"fee":null
    }"#;

    #[test]
    fn a_record_is_read_and_written_as_the_same() {
        let before = Record::from_json(WRITTEN).unwrap();
        assert_eq!(before.key.payer, before.authorization.from);
        assert_eq!(before.terms.offer().pay_to, before.authorization.to);
        assert_eq!(before.settlement.block(), Some(7));
        let json = before.to_json().unwrap();
        assert!(json.contains("0x70997970c51812dc3a010c7d01b50e0d17dc79c8"), "without checksums: {json}");
        assert_eq!(format!("{:?}", Record::from_json(&json).unwrap()), format!("{before:?}"));
        let apart = read(&fixed(&before).unwrap(), &changing(&before).unwrap()).unwrap();
        assert_eq!(format!("{apart:?}"), format!("{before:?}"));
    }
}
