//! Payments for what a 402 asks, whoever wrote it.

use std::time::{SystemTime, UNIX_EPOCH};

use alloy_primitives::{Address, B256, U256};
use alloy_signer::SignerSync as _;
use alloy_signer_local::PrivateKeySigner;
use axum::Router;
use base64::{Engine as _, prelude::BASE64_STANDARD};
use http::{HeaderMap, HeaderValue};
use serde_json::{Value, json};
use tower_x402::{
    eip3009::{Authorization, PaymentSignature},
    protocol::ExactPayload,
};

use crate::hot_path;

pub use crate::hot_path::Signed;

/// Signs what one seller asks for; every payment is another one.
pub struct Mint {
    keys: Vec<PrivateKeySigner>,
    demand: Value,
    seconds: u64,
    next: u64,
}

impl Mint {
    pub async fn of(seller: &mut Router, payers: u8) -> Self {
        Self::with(seller, keys(payers)).await
    }

    pub async fn with(seller: &mut Router, keys: Vec<PrivateKeySigner>) -> Self {
        let response = hot_path::answer(seller, hot_path::unpaid()).await;
        Self::asked(response.headers(), keys)
    }

    /// For what is asked in the headers of a 402.
    pub fn asked(headers: &HeaderMap, keys: Vec<PrivateKeySigner>) -> Self {
        let header = headers.get("payment-required").expect("a 402 of x402 v2");
        let demand: Value = serde_json::from_slice(&BASE64_STANDARD.decode(header).expect("base64")).expect("JSON");
        let seconds = demand["accepts"][0]["maxTimeoutSeconds"].as_u64().expect("seconds");
        Self { keys, demand, seconds, next: 0 }
    }

    pub fn payload(&mut self, signed: Signed) -> ExactPayload {
        self.next += 1;
        let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970").as_secs();
        let key = &self.keys[self.next as usize % self.keys.len()];
        let pay_to: Address = self.demand["accepts"][0]["payTo"].as_str().expect("text").parse().expect("an address");
        let authorization = Authorization {
            from: key.address(),
            to: pay_to,
            value: U256::from(hot_path::PRICE),
            valid_after: U256::ZERO,
            valid_before: U256::from(now + self.seconds),
            nonce: random_nonce(),
        };
        let hash = authorization.signing_hash(&hot_path::domain());
        let signature = match signed {
            Signed::ByKey => key.sign_hash_sync(&hash).expect("a local key signs").as_bytes().to_vec(),
            Signed::ByWallet => vec![7; 96],
        };
        ExactPayload::new(PaymentSignature::from(signature), authorization)
    }

    /// What a facilitator is asked.
    pub fn request(&mut self) -> Value {
        let payment = self.payment(Signed::ByKey);
        json!({ "x402Version": 2, "paymentRequirements": payment["accepted"], "paymentPayload": payment })
    }

    pub fn header(&mut self, signed: Signed) -> HeaderValue {
        BASE64_STANDARD.encode(self.payment(signed).to_string()).try_into().expect("base64 is a header value")
    }

    fn payment(&mut self, signed: Signed) -> Value {
        let payload = self.payload(signed);
        json!({
            "x402Version": 2,
            "resource": self.demand["resource"],
            "accepted": self.demand["accepts"][0],
            "payload": payload,
        })
    }
}

/// The keys of so many payers.
pub fn keys(payers: u8) -> Vec<PrivateKeySigner> {
    (1..=payers).map(|n| PrivateKeySigner::from_bytes(&B256::repeat_byte(n)).expect("a key")).collect()
}

fn random_nonce() -> B256 {
    tower_x402::Nonces::next(&tower_x402::OsNonces).expect("randomness")
}
