//! Those who are not what they should be: servers with signed cards that do what they like.

use std::sync::{
    Arc, Mutex,
    atomic::{AtomicBool, Ordering},
};

use alloy_primitives::Address;
use alloy_signer_local::PrivateKeySigner;
use axum::{
    Json, Router,
    body::Bytes,
    extract::Request,
    http::StatusCode,
    middleware::{Next, from_fn},
    response::{IntoResponse, Response},
    routing::{get, post},
};
use serde_json::{Value, json};
use tokio::{net::TcpListener, sync::Notify};
use tower_x402::{
    Network,
    server::{RequirePaymentLayer, RequirePaymentLayerBuilder},
};
use x402_market::{AgentCardBuilder, CARD_PATH};

use crate::student_stage::{Booth, PRICE, Stage, card, serve};

/// What happens at an endpoint.
#[derive(Clone, Default)]
pub struct Endpoint {
    /// Every body that was paid for.
    pub seen: Arc<Mutex<Vec<Value>>>,
    /// Whether answers wait until they are let go.
    pub holds: Arc<AtomicBool>,
    pub let_go: Arc<Notify>,
    pub arrived: Arc<Notify>,
    /// Whether whoever has not paid waits to be told the price.
    pub bars: Arc<AtomicBool>,
    pub knocked: Arc<Notify>,
    pub opened: Arc<Notify>,
}

impl Endpoint {
    pub fn holding() -> Self {
        let endpoint = Self::default();
        endpoint.holds.store(true, Ordering::Relaxed);
        endpoint
    }

    async fn bar(self, request: Request, next: Next) -> Response {
        if self.bars.load(Ordering::Relaxed) && !request.headers().contains_key("payment-signature") {
            self.knocked.notify_one();
            self.opened.notified().await;
        }
        next.run(request).await
    }

    async fn answer(self, body: Bytes, answer: fn(&Value) -> Response) -> Response {
        let submission: Value = serde_json::from_slice(&body).unwrap();
        self.seen.lock().unwrap().push(submission.clone());
        self.arrived.notify_one();
        if self.holds.load(Ordering::Relaxed) {
            self.let_go.notified().await;
        }
        answer(&submission)
    }
}

impl Stage {
    /// A server with a signed card, an endpoint that is paid `PRICE` for each output unless `demand` changes that, and answers.
    pub async fn crooked(
        &self,
        endpoint: &Endpoint,
        demand: impl FnOnce(RequirePaymentLayerBuilder, Address) -> RequirePaymentLayerBuilder,
        answer: fn(&Value) -> Response,
    ) -> Booth {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let key = PrivateKeySigner::random();
        let card = signed(card(listener.local_addr().unwrap(), key.address()), &key).await;
        let paywall = RequirePaymentLayer::builder().facilitator(self.facilitator.clone());
        let paywall = demand(paywall, key.address()).build().unwrap();
        let (endpoint, bar) = (endpoint.clone(), endpoint.clone());
        let evaluate = post(move |body: Bytes| endpoint.clone().answer(body, answer)).layer(paywall);
        let evaluate = evaluate.layer(from_fn(move |request: Request, next: Next| bar.clone().bar(request, next)));
        let router = Router::new().route("/evaluate", evaluate).route(CARD_PATH, get(async move || card.clone()));
        let (url, server) = serve(listener, router);
        Booth { url, payee: key.address(), server }
    }

    /// One whose terms are those of its card, for single outputs.
    pub async fn answering(&self, endpoint: &Endpoint, answer: fn(&Value) -> Response) -> Booth {
        self.crooked(endpoint, honestly, answer).await
    }
}

pub async fn signed(card: AgentCardBuilder, key: &PrivateKeySigner) -> Vec<u8> {
    serde_json::to_vec(&card.build().unwrap().sign(key).await.unwrap()).unwrap()
}

/// The price on the card, to the payee on the card.
pub fn honestly(paywall: RequirePaymentLayerBuilder, payee: Address) -> RequirePaymentLayerBuilder {
    paywall.price("$0.001").pay_to(Network::BASE_SEPOLIA, payee)
}

/// A verdict of 0.9 on a single output.
pub fn praise(submission: &Value) -> Response {
    let verdict = json!({ "score": 0.9, "reward": 0.8, "confidence": 0.9, "critique": { "summary": "fine" } });
    let count = submission["outputs"].as_array().map_or(1, Vec::len);
    let answer = json!({
        "evaluator": { "id": "raw", "version": "1" },
        "task": submission["task"]["id"],
        "verdicts": vec![verdict; count],
    });
    Json(answer).into_response()
}

/// Nothing that anybody could use.
pub fn garbage(_: &Value) -> Response {
    "what a nice submission".into_response()
}

/// Failure of the server.
pub fn failing(_: &Value) -> Response {
    StatusCode::INTERNAL_SERVER_ERROR.into_response()
}

/// What all of `booths` got, as the chain has it.
pub async fn income(stage: &Stage, booths: &[&Booth]) -> u64 {
    let mut sum = 0;
    for booth in booths {
        sum += stage.income(booth).await;
    }
    assert_eq!(sum % PRICE, 0);
    sum
}
