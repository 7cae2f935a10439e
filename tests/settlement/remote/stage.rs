//! A seller with a remote facilitator, and a front between the two that misbehaves.

use std::{
    collections::VecDeque,
    future::pending,
    net::SocketAddr,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use alloy_primitives::{Address, U256};
use alloy_signer_local::PrivateKeySigner;
use axum::{
    Router,
    body::{Body, Bytes},
    extract::Request,
    response::Response,
};
use serde_json::{Value, json};
use tower::ServiceExt as _;
use tower_x402::{
    Network,
    facilitator::{OnchainFacilitator, RemoteFacilitator, RemoteFacilitatorBuilder},
    ledger::{Ledger, MemoryLedger, Record},
    protocol::PaymentFlow,
    server::{RequirePaymentLayer, RequirePaymentLayerBuilder},
};
use x402_facilitator::{FacilitatorService, FacilitatorServiceBuilder};

use support::{
    authorization,
    chain::Chain,
    devnet::DevnetChain,
    scripted,
    shop::{Answer, App, Customer, PRICE, Purchase, evaluate, send},
};

/// The fate of one request for a settlement.
#[derive(Clone)]
pub enum Turn {
    /// It reaches the facilitator, and the answer the seller.
    Honest,
    /// It reaches the facilitator, and this is answered in place of its answer.
    Instead(Reply),
    /// It does not reach the facilitator, and this is answered.
    Without(Reply),
    /// It does not reach the facilitator, which does this in its place and answers so.
    Other(Arc<dyn Fn() -> Reply + Send + Sync>),
}

/// The answer of a bad facilitator.
#[derive(Clone)]
pub enum Reply {
    Status(u16, &'static str),
    Json(u16, Value),
    /// Nothing, for as long as anybody waits.
    Silence,
    /// The connection is closed.
    Cut,
    /// A body that says it is longer than it is.
    Half,
    /// A body of so many bytes.
    Huge(usize),
    /// A byte now and then, for ever.
    Trickle,
}

/// An honest facilitator, and the front it is reached through.
pub struct Stage {
    pub chain: DevnetChain,
    pub bank: OnchainFacilitator,
    pub address: SocketAddr,
    turns: Arc<Mutex<Turns>>,
    verify_turns: Arc<Mutex<Turns>>,
    /// The bodies of the requests for verification.
    pub verifies: Arc<Mutex<Vec<Bytes>>>,
    /// The bodies of the requests for settlement.
    pub settles: Arc<Mutex<Vec<Bytes>>>,
    /// The most that were under way at once, and how many are now.
    overlap: Arc<[AtomicU64; 2]>,
}

struct Turns {
    queue: VecDeque<Turn>,
    then: Turn,
}

impl Turns {
    fn honest() -> Arc<Mutex<Self>> {
        Arc::new(Mutex::new(Self { queue: VecDeque::new(), then: Turn::Honest }))
    }

    fn next(&mut self) -> Turn {
        self.queue.pop_front().unwrap_or_else(|| self.then.clone())
    }
}

impl Stage {
    pub async fn open() -> Self {
        Self::open_with(|service| service).await
    }

    pub async fn open_with(configure: impl FnOnce(FacilitatorServiceBuilder) -> FacilitatorServiceBuilder) -> Self {
        Self::open_on(DevnetChain::start(None).await, Duration::from_secs(5), configure).await
    }

    /// On this chain, which the facilitator looks at every so often.
    pub async fn open_on(
        chain: DevnetChain,
        reconcile_interval: Duration,
        configure: impl FnOnce(FacilitatorServiceBuilder) -> FacilitatorServiceBuilder,
    ) -> Self {
        let settler = PrivateKeySigner::random();
        chain.fund(settler.address(), U256::from(10).pow(U256::from(18))).await;
        let bank = OnchainFacilitator::builder()
            .rpc_url(chain.rpc_url())
            .network(Network::BASE_SEPOLIA)
            .signer(settler)
            .reconcile_interval(reconcile_interval)
            .build()
            .await
            .unwrap();
        let service = configure(FacilitatorService::builder(bank.clone())).build();
        let (turns, verify_turns) = (Turns::honest(), Turns::honest());
        let (settles, verifies) = <[Arc<Mutex<Vec<Bytes>>>; 2]>::default().into();
        let overlap = Arc::<[AtomicU64; 2]>::default();
        let scripts = [(verify_turns.clone(), verifies.clone()), (turns.clone(), settles.clone())];
        let flying = overlap.clone();
        let front = move |request: Request| {
            let (service, [verify, settle], flying) = (service.clone(), scripts.clone(), flying.clone());
            async move {
                let ((script, log), flying) = match request.uri().path() {
                    "/verify" => (verify, None),
                    "/settle" => (settle, Some(flying)),
                    _ => return service.oneshot(request).await.unwrap().map(Body::new),
                };
                let (parts, body) = request.into_parts();
                let body = axum::body::to_bytes(body, 1 << 20).await.unwrap();
                log.lock().unwrap().push(body.clone());
                let _flight = flying.map(Flight::take_off);
                let turn = script.lock().unwrap().next();
                let forward = service.oneshot(Request::from_parts(parts, Body::from(body)));
                match turn {
                    Turn::Honest => forward.await.unwrap().map(Body::new),
                    Turn::Instead(reply) => {
                        let _ = forward.await.unwrap();
                        answer(reply).await
                    }
                    Turn::Without(reply) => answer(reply).await,
                    Turn::Other(act) => answer(act()).await,
                }
            }
        };
        let listener = tokio::net::TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(async move { axum::serve(listener, Router::new().fallback(front)).await });
        Self { chain, bank, address, turns, verify_turns, verifies, settles, overlap }
    }

    /// What happens to the next settlements, and to all after them.
    pub fn script(&self, queue: impl IntoIterator<Item = Turn>, then: Turn) {
        *self.turns.lock().unwrap() = Turns { queue: queue.into_iter().collect(), then };
    }

    /// What happens to all verifications from now on.
    pub fn script_verify(&self, then: Turn) {
        *self.verify_turns.lock().unwrap() = Turns { queue: VecDeque::new(), then };
    }

    pub fn remote(&self) -> RemoteFacilitatorBuilder {
        RemoteFacilitator::builder(format!("http://{}/", self.address))
            .network(Network::BASE_SEPOLIA)
            .settle_timeout(Duration::from_secs(4))
    }

    /// A seller behind that facilitator.
    pub async fn seller(&self, remote: RemoteFacilitatorBuilder, flow: PaymentFlow) -> Seller {
        self.seller_with(remote, |layer| layer.flow(flow)).await
    }

    pub async fn seller_with(
        &self,
        remote: RemoteFacilitatorBuilder,
        configure: impl FnOnce(RequirePaymentLayerBuilder) -> RequirePaymentLayerBuilder,
    ) -> Seller {
        self.seller_on(Arc::new(MemoryLedger::new()), remote, configure).await
    }

    pub async fn seller_on(
        &self,
        ledger: Arc<dyn Ledger>,
        remote: RemoteFacilitatorBuilder,
        configure: impl FnOnce(RequirePaymentLayerBuilder) -> RequirePaymentLayerBuilder,
    ) -> Seller {
        let facilitator = remote.ledger(ledger.clone()).build().await.unwrap();
        let pay_to = authorization::random_address();
        let layer = RequirePaymentLayer::builder()
            .price("$0.001")
            .pay_to(Network::BASE_SEPOLIA, pay_to)
            .facilitator(facilitator);
        let (app, handled) = scripted::serve(configure(layer), scripted::echo);
        Seller { app, handled, pay_to, ledger }
    }

    pub async fn customer(&self) -> Customer {
        Customer::with_funds(&self.chain, 100 * PRICE).await
    }

    /// The most settlements that were at the facilitator at once.
    pub fn most_at_once(&self) -> u64 {
        self.overlap[0].load(Ordering::SeqCst)
    }

    pub fn settles(&self) -> Vec<Bytes> {
        self.settles.lock().unwrap().clone()
    }

    /// All settlements that were asked for had the same body.
    pub fn assert_identical(&self) {
        let settles = self.settles();
        assert!(settles.iter().all(|body| *body == settles[0]), "a settlement is repeated with the identical body");
    }
}

struct Flight(Arc<[AtomicU64; 2]>);

impl Flight {
    fn take_off(flying: Arc<[AtomicU64; 2]>) -> Self {
        let now = flying[1].fetch_add(1, Ordering::SeqCst) + 1;
        flying[0].fetch_max(now, Ordering::SeqCst);
        Self(flying)
    }
}

impl Drop for Flight {
    fn drop(&mut self) {
        self.0[1].fetch_sub(1, Ordering::SeqCst);
    }
}

async fn answer(reply: Reply) -> Response {
    match reply {
        Reply::Status(status, body) => Response::builder().status(status).body(Body::from(body)).unwrap(),
        Reply::Json(status, value) => {
            let response = Response::builder().status(status).header("content-type", "application/json");
            response.body(Body::from(value.to_string())).unwrap()
        }
        Reply::Silence => pending().await,
        // A handler that panics makes hyper drop the connection.
        Reply::Cut => std::panic::resume_unwind(Box::new("cut")),
        Reply::Half => {
            let chunks: [Result<&'static str, std::io::Error>; 2] =
                [Ok(r#"{"success":true,"transac"#), Err(std::io::Error::other("cut"))];
            Response::new(Body::from_stream(futures_util::stream::iter(chunks)))
        }
        Reply::Trickle => {
            let chunks = futures_util::stream::unfold((), |()| async {
                tokio::time::sleep(Duration::from_millis(50)).await;
                Some((Ok::<_, std::io::Error>(" "), ()))
            });
            Response::new(Body::from_stream(chunks))
        }
        Reply::Huge(bytes) => {
            let mut text = json!({ "success": false, "errorReason": "insufficient_funds" }).to_string();
            text.push_str(&" ".repeat(bytes));
            Response::new(Body::from(text))
        }
    }
}

/// What a facilitator says that does not know yet.
pub fn still_pending() -> Reply {
    Reply::Json(
        200,
        json!({ "success": false, "errorReason": "settlement_pending", "transaction": "", "network": "eip155:84532" }),
    )
}

pub fn refusal(reason: &str) -> Reply {
    Reply::Json(200, json!({ "success": false, "errorReason": reason, "transaction": "", "network": "eip155:84532" }))
}

/// Who charges, and what it did and got.
pub struct Seller {
    pub app: App,
    handled: Arc<AtomicU64>,
    pub pay_to: Address,
    pub ledger: Arc<dyn Ledger>,
}

impl Seller {
    pub fn handled(&self) -> u64 {
        self.handled.load(Ordering::SeqCst)
    }

    pub async fn income(&self, stage: &Stage) -> u64 {
        stage.chain.balance(self.pay_to).await
    }

    pub async fn record(&self, purchase: &Purchase) -> Option<Record> {
        self.ledger.get(&scripted::key(purchase)).await.unwrap()
    }

    /// Presents the payment.
    pub async fn ask(&self, purchase: &Purchase) -> Answer {
        send(&self.app, purchase.on(evaluate("2 + 2 = 4"))).await
    }

    /// Presents the payment until it is answered with something else than "not known yet".
    pub async fn insist(&self, purchase: &Purchase) -> Answer {
        for _ in 0..100 {
            let answer = self.ask(purchase).await;
            if answer.status != 503 {
                return answer;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        panic!("the outcome stays unknown");
    }
}
