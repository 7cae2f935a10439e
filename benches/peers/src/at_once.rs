//! Facilitators for the others that answer at once, and check what they are told to.

use std::{
    collections::HashSet,
    sync::{Arc, LazyLock, Mutex},
};

use alloy_primitives::{B256, Signature};
use r402_protocol::{
    FacilitatorError,
    payment::{SettleRequest, SettleResponse, SupportedResponse, VerifyRequest, VerifyResponse},
};
use serde_json::{Value, json};
use tower_x402::{
    eip3009::{Authorization, TokenDomain},
    protocol::ExactPayload,
};
use x402_types::proto;

use crate::hot_path;

/// What a facilitator does before it says yes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Checks {
    Nothing,
    /// Recovers the payer from the signature, once, when it is asked to verify.
    Signature,
    /// Settles each authorization once, as a chain does.
    Reuse,
}

/// Answers the other two; ours is `hot_path::AtOnce`.
#[derive(Clone, Debug)]
pub struct AtOnce {
    checks: Checks,
    used: Arc<Mutex<HashSet<B256>>>,
}

impl AtOnce {
    pub fn new(checks: Checks) -> Self {
        Self { checks, used: Arc::default() }
    }

    fn is_good(&self, request: &Value) -> bool {
        self.checks != Checks::Signature || is_signed(&payload(request))
    }

    fn settles(&self, request: &Value) -> bool {
        let mut used = self.used.lock().expect("nobody panics");
        self.checks != Checks::Reuse || used.insert(payload(request).authorization.nonce)
    }
}

fn payload(request: &Value) -> ExactPayload {
    serde_json::from_value(request["paymentPayload"]["payload"].clone()).expect("an exact payload")
}

/// With what alloy offers, which is what the facilitators of both are built on; but hashed as fast as ours.
fn is_signed(payload: &ExactPayload) -> bool {
    static DOMAIN: LazyLock<TokenDomain> = LazyLock::new(hot_path::domain);
    let ExactPayload { signature, authorization, .. } = payload;
    let Ok(signature) = Signature::try_from(signature.as_bytes()) else { return false };
    let hash = Authorization::signing_hash(authorization, &DOMAIN);
    signature.recover_address_from_prehash(&hash).is_ok_and(|signer| signer == authorization.from)
}

fn yes() -> Value {
    json!({ "isValid": true, "payer": "0x70997970C51812dc3A010C7d01b50e0d17dc79C8" })
}

fn settled() -> Value {
    json!({
        "success": true,
        "payer": "0x70997970C51812dc3A010C7d01b50e0d17dc79C8",
        "transaction": B256::repeat_byte(0x77),
        "network": "eip155:84532",
    })
}

fn used() -> Value {
    json!({ "success": false, "errorReason": "invalid_transaction_state", "payer": null, "transaction": "", "network": "eip155:84532" })
}

fn supported() -> Value {
    json!({
        "kinds": [{ "x402Version": 2, "scheme": "exact", "network": "eip155:84532" }],
        "extensions": [],
        "signers": {},
    })
}

/// A JSON document read once and cloned after that.
macro_rules! once {
    ($type:ty, $json:expr) => {{
        static ANSWER: LazyLock<$type> =
            LazyLock::new(|| serde_json::from_value($json).expect("as the protocol has it"));
        Ok(ANSWER.clone())
    }};
}

impl r402_facilitator::Facilitator for AtOnce {
    async fn verify(&self, request: VerifyRequest) -> Result<VerifyResponse, FacilitatorError> {
        assert!(self.is_good(&request.into_json()), "a genuine signature");
        once!(VerifyResponse, yes())
    }

    async fn settle(&self, request: SettleRequest) -> Result<SettleResponse, FacilitatorError> {
        match self.settles(&request.into_json()) {
            true => once!(SettleResponse, settled()),
            false => once!(SettleResponse, used()),
        }
    }

    async fn supported(&self) -> Result<SupportedResponse, FacilitatorError> {
        once!(SupportedResponse, supported())
    }
}

impl x402_types::facilitator::Facilitator for AtOnce {
    type Error = std::convert::Infallible;

    async fn verify(&self, request: &proto::VerifyRequest) -> Result<proto::VerifyResponse, Self::Error> {
        if self.checks == Checks::Signature {
            let request = serde_json::from_str(request.as_str()).expect("JSON");
            assert!(self.is_good(&request), "a genuine signature");
        }
        once!(proto::VerifyResponse, yes())
    }

    async fn settle(&self, request: &proto::SettleRequest) -> Result<proto::SettleResponse, Self::Error> {
        if self.checks == Checks::Reuse && !self.settles(&serde_json::from_str(request.as_str()).expect("JSON")) {
            return once!(proto::SettleResponse, used());
        }
        once!(proto::SettleResponse, settled())
    }

    async fn supported(&self) -> Result<proto::SupportedResponse, Self::Error> {
        once!(proto::SupportedResponse, supported())
    }
}
