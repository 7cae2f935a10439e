//! A server that answers by script, over real connections, and the purse that is spent there.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    future::pending,
    net::SocketAddr,
    path::PathBuf,
    sync::{Arc, Mutex},
    time::Duration,
};

use alloy_primitives::{Address, B256, U256};
use alloy_signer_local::PrivateKeySigner;
use axum::{
    Router,
    body::Body,
    extract::Request,
    http::{StatusCode, header},
    response::{IntoResponse, Response},
};
use base64::{Engine, engine::general_purpose::STANDARD};
use serde_json::{Value, json};
use tower_x402::{
    ManualClock, Network, Usdc,
    client::{Budget, Payer},
    eip3009::TokenDomain,
    protocol::{ExactOffer, ExactPayload, PaymentPayload, ResourceInfo, decode_header, v1},
};

pub const KEY: &str = "0xac0974bec39a17e36ba4a6b4d238ff944bacb478cbed5efcae784d7bf4f2ff80";
pub const PAYER: &str = "0xf39Fd6e51aad88F6F4ce6aB8827279cffFb92266";
pub const NOW: u64 = 1_800_000_000;

/// What one answer is, seen the request.
pub type Reply = Box<dyn FnOnce(&Seen) -> Answer + Send>;

pub enum Answer {
    Response(Response),
    /// The same after a pause.
    Late(Duration, Response),
    /// Accepts the request and never answers.
    Silence,
    /// Closes the connection in place of an answer.
    Cut,
}

#[derive(Clone, Debug)]
pub struct Seen {
    pub method: String,
    pub path: String,
    /// The value of the payment header, in whichever version.
    pub payment: Option<String>,
    /// The name of that header.
    pub paid_in: Option<&'static str>,
    pub body: Vec<u8>,
}

#[derive(Clone)]
pub struct Server {
    pub address: SocketAddr,
    pub seen: Arc<Mutex<Vec<Seen>>>,
}

impl Server {
    /// Unpaid requests get a 402 with `required`; paid ones the replies in turn, the last kind again and again being a 500.
    pub async fn paid(required: String, replies: Vec<Reply>) -> Self {
        Self::selling(move || required_402(&required), replies).await
    }

    /// The same in v1, whose offers are in the body of the 402.
    pub async fn paid_in_v1(required: Value, replies: Vec<Reply>) -> Self {
        Self::selling(move || required_402_v1(&required), replies).await
    }

    pub async fn selling(demand: impl Fn() -> Response + Send + Sync + 'static, replies: Vec<Reply>) -> Self {
        let replies = Mutex::new(VecDeque::from(replies));
        Self::start(move |seen| {
            if seen.payment.is_none() {
                return Answer::Response(demand());
            }
            match replies.lock().unwrap().pop_front() {
                Some(reply) => reply(seen),
                None => Answer::Response((StatusCode::IM_A_TEAPOT, "out of script").into_response()),
            }
        })
        .await
    }

    pub async fn start(answer: impl Fn(&Seen) -> Answer + Send + Sync + 'static) -> Self {
        Self::start_at("127.0.0.1", answer).await
    }

    /// A server on another address of this machine.
    pub async fn start_at(ip: &str, answer: impl Fn(&Seen) -> Answer + Send + Sync + 'static) -> Self {
        let seen = Arc::new(Mutex::new(Vec::new()));
        let (log, answer) = (seen.clone(), Arc::new(answer));
        let handler = move |request: Request| {
            let (log, answer) = (log.clone(), answer.clone());
            async move {
                let (parts, body) = request.into_parts();
                let paid_in =
                    ["payment-signature", "x-payment"].into_iter().find(|name| parts.headers.contains_key(*name));
                let seen = Seen {
                    method: parts.method.to_string(),
                    path: parts.uri.to_string(),
                    payment: paid_in.map(|name| parts.headers[name].to_str().unwrap().to_owned()),
                    paid_in,
                    body: axum::body::to_bytes(body, 1 << 20).await.unwrap().to_vec(),
                };
                log.lock().unwrap().push(seen.clone());
                match answer(&seen) {
                    Answer::Response(response) => response,
                    Answer::Late(pause, response) => {
                        tokio::time::sleep(pause).await;
                        response
                    }
                    Answer::Silence => pending().await,
                    // A handler that panics makes hyper drop the connection.
                    Answer::Cut => std::panic::resume_unwind(Box::new("cut")),
                }
            }
        };
        let listener = tokio::net::TcpListener::bind((ip, 0)).await.unwrap();
        let address = listener.local_addr().unwrap();
        let app = Router::new().fallback(handler);
        tokio::spawn(async move { axum::serve(listener, app).await });
        Self { address, seen }
    }

    pub fn url(&self) -> String {
        format!("http://{}/evaluate?q=1", self.address)
    }

    pub fn seen(&self) -> Vec<Seen> {
        self.seen.lock().unwrap().clone()
    }

    /// The payments that arrived, in order.
    pub fn payments(&self) -> Vec<String> {
        self.seen().into_iter().filter_map(|seen| seen.payment).collect()
    }
}

pub fn required_402(header: &str) -> Response {
    Response::builder().status(402).header("payment-required", header).body(Body::empty()).unwrap()
}

pub fn required_402_v1(body: &Value) -> Response {
    let response = Response::builder().status(402).header("content-type", "application/json; charset=utf-8");
    response.body(Body::from(body.to_string())).unwrap()
}

// What the server says.

pub fn offer(amount: u64) -> ExactOffer {
    ExactOffer::new(Network::BASE_SEPOLIA.usdc().unwrap(), U256::from(amount), Address::repeat_byte(7), 60)
}

pub fn required(offers: &[ExactOffer]) -> String {
    let accepts: Vec<_> = offers.iter().map(ExactOffer::to_requirements).collect();
    encode(json!({ "x402Version": 2, "resource": { "url": "http://evaluator.example" }, "accepts": accepts }))
}

/// The body of a 402 of v1. It says nothing of flows, unless one is other than usual.
pub fn required_v1(offers: &[ExactOffer]) -> Value {
    let resource = ResourceInfo::new("http://evaluator.example");
    let spell = |offer: &ExactOffer| {
        let written = offer.to_requirements();
        let mut spelled = v1::PaymentRequirementsV1::of(&written, offer.network().v1_name().unwrap(), &resource);
        spelled.extra = Some(written.extra);
        spelled
    };
    let accepts: Vec<_> = offers.iter().map(spell).collect();
    json!({ "x402Version": 1, "error": "X-PAYMENT header is required", "accepts": accepts })
}

pub fn encode(message: impl ToString) -> String {
    STANDARD.encode(message.to_string())
}

pub fn decode(payment: &str) -> PaymentPayload {
    decode_header(payment.as_bytes(), usize::MAX).unwrap()
}

/// What was signed, in either version.
pub fn payload(payment: &str) -> ExactPayload {
    match decode_header::<v1::PaymentPayloadV1>(payment.as_bytes(), usize::MAX) {
        Ok(payment) => payment.payload.read().unwrap(),
        Err(_) => decode(payment).payload.read().unwrap(),
    }
}

pub fn transaction() -> B256 {
    B256::repeat_byte(0xaa)
}

pub fn settlement() -> Value {
    json!({
        "success": true, "payer": PAYER, "transaction": transaction(), "network": "eip155:84532", "amount": "1000",
    })
}

pub fn with_settlement(status: u16, settlement: impl ToString) -> Reply {
    let header = encode(settlement);
    Box::new(move |_| {
        let response = Response::builder().status(status).header("payment-response", header);
        Answer::Response(response.body(Body::from("the evaluation")).unwrap())
    })
}

pub fn settled() -> Reply {
    with_settlement(200, settlement())
}

pub fn settlement_v1() -> Value {
    json!({ "success": true, "payer": PAYER, "transaction": transaction(), "network": "base-sepolia" })
}

pub fn settled_in_v1() -> Reply {
    with_settlement_v1(200, settlement_v1())
}

pub fn with_settlement_v1(status: u16, settlement: impl ToString) -> Reply {
    let header = encode(settlement);
    Box::new(move |_| {
        let response = Response::builder().status(status).header("x-payment-response", header);
        Answer::Response(response.body(Body::from("the evaluation")).unwrap())
    })
}

pub fn required_again_v1(amount: u64, error: Value) -> Reply {
    let mut required = required_v1(&[offer(amount)]);
    required["error"] = error;
    Box::new(move |_| Answer::Response(required_402_v1(&required)))
}

pub fn status(status: u16) -> Reply {
    Box::new(move |_| Answer::Response(StatusCode::from_u16(status).unwrap().into_response()))
}

pub fn later(code: u16, settlement: Option<Value>) -> Reply {
    Box::new(move |_| {
        let mut response = Response::builder().status(code).header(header::RETRY_AFTER, "0");
        if let Some(settlement) = settlement {
            response = response.header("payment-response", encode(settlement));
        }
        Answer::Response(response.body(Body::empty()).unwrap())
    })
}

pub fn redirect(code: u16, location: String) -> Reply {
    Box::new(move |_| {
        let response = Response::builder().status(code).header(header::LOCATION, location);
        Answer::Response(response.body(Body::empty()).unwrap())
    })
}

pub fn required_again(amount: u64) -> Reply {
    let required = required(&[offer(amount)]);
    Box::new(move |_| Answer::Response(required_402(&required)))
}

pub fn silence() -> Reply {
    Box::new(|_| Answer::Silence)
}

pub fn cut() -> Reply {
    Box::new(|_| Answer::Cut)
}

// The client.

pub fn budget(total: u64) -> Budget {
    Budget::builder().total(Usdc::from_atomic(total)).build()
}

pub fn payer(budget: &Budget) -> Payer {
    let key: PrivateKeySigner = KEY.parse().unwrap();
    Payer::builder(key).budget(budget.clone()).clock(Arc::new(ManualClock::at(NOW))).build()
}

/// Where authorizations are executed: each once, whoever presents it how often.
#[derive(Clone, Default)]
pub struct Bank(Arc<Mutex<BTreeMap<B256, ExactPayload>>>);

impl Bank {
    /// Executes a payment if its signature is good.
    pub fn settle(&self, payment: &str) {
        let payload = payload(payment);
        let authorization = &payload.authorization;
        let domain = TokenDomain::of(&Network::BASE_SEPOLIA.usdc().unwrap());
        assert_eq!(payload.signature.recover(authorization.signing_hash(&domain)).unwrap(), authorization.from);
        self.0.lock().unwrap().insert(authorization.nonce, payload);
    }

    /// `reply`, once the payment is executed.
    pub fn then(&self, reply: Reply) -> Reply {
        let bank = self.clone();
        Box::new(move |seen| {
            bank.settle(seen.payment.as_ref().unwrap());
            reply(seen)
        })
    }

    pub fn nonces(&self) -> BTreeSet<B256> {
        self.0.lock().unwrap().keys().copied().collect()
    }

    pub fn executed(&self) -> Vec<ExactPayload> {
        self.0.lock().unwrap().values().cloned().collect()
    }

    /// All that was ever taken from the payer.
    pub fn taken(&self) -> u64 {
        self.executed().iter().map(|payload| payload.authorization.value.to::<u64>()).sum()
    }
}

/// A file that is removed at the end.
pub struct TempPath(pub PathBuf);

impl TempPath {
    pub fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("x402-client-{name}-{}.jsonl", std::process::id()));
        let _ = std::fs::remove_file(&path);
        Self(path)
    }
}

impl Drop for TempPath {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}
