//! Buyers that present the same payment with the same request until they have the answer.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use base64::{Engine as _, prelude::BASE64_STANDARD};
use bytes::Bytes;
use reqwest::{Client, StatusCode};
use serde_json::Value;
use tower_x402::payment::PaymentKey;

use support::{
    permit::{PERMIT2, Permit},
    shop::{Customer, FAILED_ELSEWHERE, Purchase},
};

/// What a buyer signed.
enum Signed {
    Exact(Box<Purchase>),
    Permit(Box<Permit>),
}

/// A signed payment and the answers to it so far.
pub(crate) struct Buyer {
    signed: Signed,
    body: String,
    answers: Mutex<Vec<Bytes>>,
    refusal: Mutex<Option<(StatusCode, String)>>,
    receipts: Mutex<Vec<Value>>,
}

/// The result of presenting a payment once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Said {
    /// A 2xx with its whole body.
    Served,
    /// An answer that asks for a retry, or no answer.
    Later,
    /// A refusal.
    Refused,
}

/// An HTTP client that waits as long as a server may take.
pub(crate) fn client() -> Client {
    let builder = Client::builder().no_proxy().pool_max_idle_per_host(0).timeout(Duration::from_secs(20));
    builder.build().expect("an HTTP client")
}

impl Buyer {
    /// Asks for the price and signs it.
    pub(crate) async fn new(client: &Client, url: &str, customer: &Customer, number: usize) -> Arc<Self> {
        let body = format!("question {number}");
        let unpaid = client.post(format!("{url}/evaluate")).body(body.clone()).send().await.expect("an answer");
        assert_eq!(unpaid.status(), StatusCode::PAYMENT_REQUIRED);
        let demand = BASE64_STANDARD.decode(&unpaid.headers()["payment-required"]).expect("base64");
        let demand: Value = serde_json::from_slice(&demand).expect("JSON");
        let offers = demand["accepts"].as_array().expect("offers");
        let signed = match offers.iter().any(|offer| offer["scheme"] == "upto") {
            true => Signed::Permit(Box::new(Permit::sign(&customer.signer, &demand))),
            false => Signed::Exact(Box::new(customer.sign(&demand, 0))),
        };
        Arc::new(Self {
            signed,
            body,
            answers: Mutex::default(),
            refusal: Mutex::default(),
            receipts: Mutex::default(),
        })
    }

    pub(crate) fn key(&self) -> PaymentKey {
        match &self.signed {
            Signed::Exact(purchase) => {
                let (asset, authorization) = (&purchase.asset, &purchase.authorization);
                let (payer, nonce) = (authorization.from, authorization.nonce);
                PaymentKey { network: asset.network, asset: asset.address, payer, nonce }
            }
            Signed::Permit(permit) => PaymentKey {
                network: permit.network,
                asset: PERMIT2,
                payer: permit.from,
                nonce: permit.message.nonce.into(),
            },
        }
    }

    /// Presents the payment once.
    pub(crate) async fn present(&self, client: &Client, url: &str) -> Said {
        let payload = match &self.signed {
            Signed::Exact(purchase) => purchase.payload(),
            Signed::Permit(permit) => permit.payload(),
        };
        let header = BASE64_STANDARD.encode(payload.to_string());
        let request = client.post(format!("{url}/evaluate")).header("payment-signature", header);
        let Ok(response) = request.body(self.body.clone()).send().await else { return Said::Later };
        let status = response.status();
        let receipt = response.headers().get("payment-response").map(|receipt| {
            let receipt = BASE64_STANDARD.decode(receipt).expect("base64");
            serde_json::from_slice::<Value>(&receipt).expect("JSON")
        });
        let body = response.bytes().await;
        let said: Value = body.as_ref().ok().and_then(|body| serde_json::from_slice(body).ok()).unwrap_or_default();
        let error = said["error"].as_str().unwrap_or_default();
        if error.contains(FAILED_ELSEWHERE) {
            // The buyer retries as it is told, and so may be charged again: the receipt in this answer no longer holds.
            return Said::Later;
        }
        self.receipts.lock().unwrap().extend(receipt);
        let Ok(body) = body else { return Said::Later };
        if status.is_success() {
            self.answers.lock().unwrap().push(body);
            return Said::Served;
        }
        if status.is_server_error() || error == "payment_in_progress" {
            return Said::Later;
        }
        *self.refusal.lock().unwrap() = Some((status, said.to_string()));
        Said::Refused
    }

    /// Presents the payment until it is answered.
    pub(crate) async fn persist(&self, client: &Client, url: &str) -> Said {
        loop {
            match self.present(client, url).await {
                Said::Later => tokio::time::sleep(Duration::from_millis(50)).await,
                said => return said,
            }
        }
    }

    /// Returns all answers that arrived whole.
    pub(crate) fn answers(&self) -> Vec<Bytes> {
        self.answers.lock().unwrap().clone()
    }

    /// Returns every `PAYMENT-RESPONSE`.
    pub(crate) fn receipts(&self) -> Vec<Value> {
        self.receipts.lock().unwrap().clone()
    }

    pub(crate) fn refusal(&self) -> Option<(StatusCode, String)> {
        self.refusal.lock().unwrap().clone()
    }
}
