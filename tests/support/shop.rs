//! A service that charges, on any chain, and customers who pay it by hand: what they send is built without this crate's
//! client, so that the server is never judged by its own kin.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use alloy_primitives::{Address, B256, U256};
use alloy_signer_local::PrivateKeySigner;
use axum::body::Body;
use base64::{Engine, prelude::BASE64_STANDARD};
use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body_util::BodyExt;
use serde_json::{Value, json};
use tokio::{net::TcpListener, task::JoinHandle};
use tower::{BoxError, Layer, Service, ServiceExt, util::BoxCloneSyncService};
use tower_x402::{
    Asset, Network,
    facilitator::{Facilitator, OnchainFacilitator, OnchainFacilitatorBuilder},
    ledger::{Counts, Record},
    payment::PaymentKey,
    server::{RequestBody, RequirePaymentLayer, RequirePaymentLayerBuilder, VerifiedPayment},
};
use x402_facilitator::FacilitatorService;

use crate::{
    authorization::{self, Signature, TransferWithAuthorization, unix_now},
    chain::Chain,
    devnet::DevnetChain,
};

/// What an evaluation costs, in units.
pub const PRICE: u64 = 1_000;

pub type App = BoxCloneSyncService<Request<Body>, Response<Body>, BoxError>;

/// A payee, its facilitator, and how often its handler ran.
#[derive(Clone)]
pub struct Shop {
    pub facilitator: Arc<OnchainFacilitator>,
    pub pay_to: Address,
    pub asset: Asset,
    pub handled: Arc<AtomicU64>,
}

impl Shop {
    pub async fn open(chain: &dyn Chain) -> Self {
        Self::open_at(chain, &chain.rpc_url()).await
    }

    /// A shop that reaches its chain at another address, such as a proxy's.
    pub async fn open_at(chain: &dyn Chain, rpc_url: &str) -> Self {
        Self::open_with(chain, |builder| builder.rpc_url(rpc_url)).await
    }

    /// A shop that reaches its devnet without a network, so that the runtime's time may be paused; with other settings of its
    /// facilitator.
    pub async fn in_process(
        chain: &DevnetChain,
        settings: impl FnOnce(OnchainFacilitatorBuilder) -> OnchainFacilitatorBuilder,
    ) -> Self {
        Self::open_with(chain, |builder| settings(builder.client(chain.devnet.rpc_client()))).await
    }

    /// A shop whose facilitator has other settings, of which one must be how it reaches its chain.
    pub async fn open_with(
        chain: &dyn Chain,
        settings: impl FnOnce(OnchainFacilitatorBuilder) -> OnchainFacilitatorBuilder,
    ) -> Self {
        let builder = OnchainFacilitator::builder().network(Network::BASE_SEPOLIA).signer(chain.gas_key().await);
        let facilitator = settings(builder).build().await.expect("the facilitator reaches its chain");
        Self {
            facilitator: Arc::new(facilitator),
            pay_to: authorization::random_address(),
            asset: chain.asset(),
            handled: Arc::default(),
        }
    }

    /// The shop's layer, to be finished.
    pub fn layer(&self) -> RequirePaymentLayerBuilder {
        RequirePaymentLayer::builder()
            .price("$0.001")
            .pay_to(Network::BASE_SEPOLIA, self.pay_to)
            .facilitator(self.facilitator.clone())
    }

    /// A handler that counts its runs and returns the request's body, below `layer`.
    pub fn app(&self, layer: RequirePaymentLayerBuilder) -> App {
        self.app_with(layer, |_, body| async move { Ok(Response::new(Body::from(body))) })
    }

    /// The same, with another answer: of the payment and the body.
    pub fn app_with<H, F>(&self, layer: RequirePaymentLayerBuilder, handler: H) -> App
    where
        H: Fn(VerifiedPayment, Bytes) -> F + Clone + Send + Sync + 'static,
        F: Future<Output = Result<Response<Body>, BoxError>> + Send + 'static,
    {
        let handled = self.handled.clone();
        let service = tower::service_fn(move |request: Request<RequestBody<Body>>| {
            handled.fetch_add(1, Ordering::SeqCst);
            let handler = handler.clone();
            async move {
                let payment = request.extensions().get::<VerifiedPayment>().cloned().expect("a paid request");
                assert!(!request.headers().contains_key("payment-signature"), "a handler never sees the signature");
                let body = request.into_body().collect().await?.to_bytes();
                handler(payment, body).await
            }
        });
        app(layer.build().expect("a complete layer").layer(service))
    }

    /// How often the handler was started.
    pub fn handled(&self) -> u64 {
        self.handled.load(Ordering::SeqCst)
    }

    pub async fn counts(&self) -> Counts {
        self.facilitator.ledger().counts().await.expect("the ledger counts")
    }

    pub async fn record(&self, authorization: &TransferWithAuthorization) -> Option<Record> {
        let (payer, nonce) = (authorization.from, authorization.nonce);
        self.record_of(&PaymentKey { network: self.asset.network, asset: self.asset.address, payer, nonce }).await
    }

    pub async fn record_of(&self, key: &PaymentKey) -> Option<Record> {
        self.facilitator.ledger().get(key).await.expect("the ledger answers")
    }
}

/// Makes any service over any body an [`App`].
pub fn app<S, R>(service: S) -> App
where
    S: Service<Request<Body>, Response = Response<R>, Error: Into<BoxError>, Future: Send>
        + Clone
        + Send
        + Sync
        + 'static,
    R: http_body::Body<Data = Bytes, Error: Into<BoxError>> + Send + 'static,
{
    BoxCloneSyncService::new(service.map_response(|response: Response<R>| response.map(Body::new)).map_err(Into::into))
}

/// A customer with a key of its own.
#[derive(Clone)]
pub struct Customer {
    pub signer: PrivateKeySigner,
    /// Who pays: the key's own address, or a wallet it owns.
    pub from: Address,
}

impl Customer {
    pub async fn with_funds(chain: &dyn Chain, units: u64) -> Self {
        let signer = PrivateKeySigner::random();
        chain.mint(signer.address(), units).await;
        Self { from: signer.address(), signer }
    }

    /// Asks, and signs what is asked for first.
    pub async fn pay(&self, app: &App, request: Request<Body>) -> Purchase {
        self.pay_offer(app, request, 0).await
    }

    /// The same as a client of x402 v1, which reads the body of the 402 alone.
    pub async fn pay_v1(&self, app: &App, request: Request<Body>) -> Purchase {
        self.sign(&send(app, request).await.json(), 0)
    }

    pub async fn pay_offer(&self, app: &App, request: Request<Body>, index: usize) -> Purchase {
        let demand = demand(&send(app, request).await);
        self.sign(&demand, index)
    }

    /// Signs one of the offers of a 402.
    pub fn sign(&self, demand: &Value, index: usize) -> Purchase {
        let offer = demand["accepts"][index].clone();
        let text = |name: &str| offer[name].as_str().unwrap_or_else(|| panic!("{name} in {offer}")).to_owned();
        let amount = if demand["x402Version"] == 1 { "maxAmountRequired" } else { "amount" };
        let units = text(amount).parse().expect("a price in tests fits u64");
        let mut authorization =
            authorization::authorization(self.from, text("payTo").parse().expect("an address"), units);
        authorization.validBefore = U256::from(unix_now() + offer["maxTimeoutSeconds"].as_u64().expect("seconds"));
        let asset = Asset::new(
            text("network").parse().expect("an EVM network"),
            text("asset").parse().expect("an address"),
            offer["extra"]["name"].as_str().expect("a name").to_owned(),
            offer["extra"]["version"].as_str().expect("a version").to_owned(),
        );
        let mut purchase = Purchase {
            asset,
            signer: self.signer.clone(),
            authorization,
            signature: alloy_primitives::Bytes::new(),
            offer,
            resource: demand["resource"].clone(),
        };
        purchase.resign();
        purchase
    }
}

/// A signed payment, open to every kind of abuse.
#[derive(Clone)]
pub struct Purchase {
    pub asset: Asset,
    pub signer: PrivateKeySigner,
    pub authorization: TransferWithAuthorization,
    pub signature: alloy_primitives::Bytes,
    /// Echoed as `accepted`.
    pub offer: Value,
    pub resource: Value,
}

impl Purchase {
    /// Signs whatever the authorization says now.
    pub fn resign(&mut self) {
        self.signature = self.by_key().bytes();
    }

    pub fn by_key(&self) -> Signature {
        authorization::sign(&self.signer, &self.asset, &self.authorization)
    }

    pub fn payload(&self) -> Value {
        json!({
            "x402Version": 2,
            "resource": self.resource,
            "accepted": self.offer,
            "payload": self.signed(),
        })
    }

    /// The payload in x402 v1.
    pub fn payload_v1(&self) -> Value {
        json!({ "x402Version": 1, "scheme": "exact", "network": "base-sepolia", "payload": self.signed() })
    }

    fn signed(&self) -> Value {
        json!({
            "signature": format!("0x{}", alloy_primitives::hex::encode(&self.signature)),
            "authorization": {
                "from": self.authorization.from,
                "to": self.authorization.to,
                "value": self.authorization.value.to_string(),
                "validAfter": self.authorization.validAfter.to_string(),
                "validBefore": self.authorization.validBefore.to_string(),
                "nonce": self.authorization.nonce,
            },
        })
    }

    /// The request with this payment.
    pub fn on(&self, request: Request<Body>) -> Request<Body> {
        paid(request, &self.payload())
    }

    /// The request with this payment in x402 v1.
    pub fn on_v1(&self, request: Request<Body>) -> Request<Body> {
        paid_v1(request, &self.payload_v1())
    }
}

/// A request with a payment header.
pub fn paid(request: Request<Body>, payload: &Value) -> Request<Body> {
    with_base64(request, "payment-signature", payload)
}

/// The same in x402 v1.
pub fn paid_v1(request: Request<Body>, payload: &Value) -> Request<Body> {
    with_base64(request, "x-payment", payload)
}

fn with_base64(mut request: Request<Body>, header: &'static str, payload: &Value) -> Request<Body> {
    let value = BASE64_STANDARD.encode(payload.to_string());
    request.headers_mut().insert(header, value.parse().expect("base64 is a header value"));
    request
}

/// The request that most tests pay for.
pub fn evaluate(body: &'static str) -> Request<Body> {
    Request::post("/evaluate?k=1").body(Body::from(body)).expect("a request")
}

/// A response, read whole.
#[derive(Clone, Debug)]
pub struct Answer {
    pub status: StatusCode,
    pub headers: http::HeaderMap,
    pub body: Bytes,
}

/// Said in a 402 if a failure was recorded while the payment was being settled for this request: the settlement that it asked for is
/// refused, and presenting it again asks for another one.
pub const FAILED_ELSEWHERE: &str = "presenting it again tries anew";

impl Answer {
    pub fn text(&self) -> &str {
        std::str::from_utf8(&self.body).expect("text")
    }

    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|_| panic!("not JSON: {:?}", self.body))
    }

    /// What `PAYMENT-RESPONSE` says.
    pub fn settlement(&self) -> Option<Value> {
        self.base64("payment-response")
    }

    /// What `X-PAYMENT-RESPONSE` says.
    pub fn settlement_v1(&self) -> Option<Value> {
        self.base64("x-payment-response")
    }

    fn base64(&self, header: &str) -> Option<Value> {
        let value = self.headers.get(header)?;
        Some(serde_json::from_slice(&BASE64_STANDARD.decode(value).expect("base64")).expect("JSON"))
    }

    /// The transaction that paid for this.
    pub fn transaction(&self) -> B256 {
        let settlement = self.settlement().unwrap_or_else(|| panic!("no settlement: {self:?}"));
        assert_eq!(settlement["success"], true, "{settlement}");
        settlement["transaction"].as_str().and_then(|hash| hash.parse().ok()).expect("a transaction")
    }

    /// The reason code of a refusal, from the 402's header or the body.
    pub fn reason(&self) -> String {
        let said = match self.headers.get("payment-required") {
            Some(_) => demand(self)["error"].clone(),
            None => self.json()["error"].clone(),
        };
        said.as_str().expect("a reason").to_owned()
    }
}

/// Serves the shop's facilitator to others, on a port. Returns its URL.
pub async fn serve_facilitator(shop: &Shop) -> String {
    let service = FacilitatorService::builder(shop.facilitator.clone()).build();
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let url = format!("http://{}", listener.local_addr().expect("a bound socket has an address"));
    tokio::spawn(async move { axum::serve(listener, axum::Router::new().fallback_service(service)).await });
    url
}

pub async fn send(app: &App, request: Request<Body>) -> Answer {
    let response = try_send(app, request).await.expect("the service answers");
    let (parts, body) = response.into_parts();
    let body = tokio::time::timeout(Duration::from_secs(30), body.collect()).await.expect("the body ends");
    Answer { status: parts.status, headers: parts.headers, body: body.expect("a whole body").to_bytes() }
}

/// Sends a request, and goes on.
pub fn ask(app: &App, request: Request<Body>) -> JoinHandle<Answer> {
    let app = app.clone();
    tokio::spawn(async move { send(&app, request).await })
}

pub async fn try_send(app: &App, request: Request<Body>) -> Result<Response<Body>, BoxError> {
    app.clone().oneshot(request).await
}

/// The offer in a 402.
pub fn demand(answer: &Answer) -> Value {
    let value = answer.headers.get("payment-required").unwrap_or_else(|| panic!("no demand: {answer:?}"));
    serde_json::from_slice(&BASE64_STANDARD.decode(value).expect("base64")).expect("JSON")
}
