//! A seller on a devnet whose ledger fails on command, its customers, and the answers that they got.

use std::{
    collections::HashMap,
    convert::Infallible,
    future::ready,
    net::SocketAddr,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use alloy_primitives::{Address, B256, U256};
use alloy_signer_local::PrivateKeySigner;
use alloy_sol_types::{SolCall, SolValue};
use axum::{Router, body::Body};
use bytes::Bytes;
use futures_util::{StreamExt as _, stream};
use http::{HeaderValue, Request, Response, StatusCode, header::CONNECTION};
use http_body_util::BodyExt as _;
use tokio::{
    task::JoinHandle,
    time::{Instant, sleep, timeout},
};
use tower::{BoxError, Layer as _, ServiceExt as _};
use tower_x402::{
    Clock, Network, Usdc,
    facilitator::{BatchSettler, Facilitator, OnchainFacilitator, RemoteFacilitator},
    ledger::{Ledger, MemoryLedger, Record, ResponseLimits},
    payment::PaymentKey,
    protocol::PaymentFlow,
    server::{DeferredPolicy, PaymentStatus, RequestBody, RequirePaymentLayer, VerifiedPayment},
};
use x402_devnet::{Devnet, DevnetPort, Fault as NodeFault};
use x402_facilitator::FacilitatorService;

use support::{
    authorization::unix_now,
    chain::{creation_code, deployed_code},
    faulty_ledger::{Fault, FaultyLedger, faulty},
    shop::{Answer, App, Customer, PRICE, Purchase, app, demand, send, try_send},
};

/// The facilitator that settles.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mover {
    /// The seller itself.
    #[default]
    Onchain,
    /// A facilitator over HTTP, without confirmation on the chain.
    Remote,
    /// A facilitator over HTTP whose answers are confirmed on the chain.
    Confirmed,
}

/// The behaviour of the handler.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Work {
    /// Returns the request's body, in one piece.
    #[default]
    Echo,
    /// Streams the request's body many times, without a declared length.
    Stream,
    /// Fails the first time, then behaves as [`Echo`](Self::Echo).
    FailOnce,
    /// Behaves as [`Echo`](Self::Echo), and the first time empties the payer's account while it runs.
    DrainOnce,
}

/// The settings of a scene.
#[derive(Clone, Copy, Debug, Default)]
pub struct Setting {
    pub is_upfront: bool,
    pub is_deferred: bool,
    pub mover: Mover,
    pub work: Work,
    /// `true` if the facilitator's ledger fails instead of the seller's.
    pub is_theirs: bool,
    /// `true` if the batch settler is deployed, so that payments can share a transaction.
    pub can_batch: bool,
    /// The number of blocks by which the final block lags behind the newest.
    pub finality: u64,
}

/// When the client whose request met the fault retries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Client {
    /// As soon as `Retry-After` allows.
    Insists,
    /// After all background work is done.
    Leaves,
}

/// A Unix clock that follows the runtime's virtual time.
#[derive(Debug)]
pub struct RuntimeClock {
    base: u64,
    start: Instant,
}

impl Clock for RuntimeClock {
    fn now(&self) -> u64 {
        self.base + self.start.elapsed().as_secs()
    }
}

/// The statement of one answer about the payment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Said {
    /// The answer is included, and this transaction paid.
    Delivered(B256),
    /// The answer is included, and is charged later.
    Accepted,
    /// This transaction paid, and no answer is included.
    PaidInVain(B256),
    /// The outcome is unknown or pending.
    Open,
    /// The payment failed: it is not charged, unless it is presented again.
    Failed,
    /// This request charged nothing.
    NothingByThisRequest,
}

impl Said {
    pub fn of(answer: &Answer) -> Result<Self, String> {
        let settlement = answer.settlement();
        let says = |name: &str| settlement.as_ref().map_or("", |said| said[name].as_str().unwrap_or("")).to_owned();
        let transaction = says("transaction").parse::<B256>().ok();
        let is_success = settlement.as_ref().map(|said| said["success"] == true);
        let code = || {
            let json = serde_json::from_slice::<serde_json::Value>(&answer.body).unwrap_or_default();
            json["error"].as_str().unwrap_or("").to_owned()
        };
        let says_nothing_charged = String::from_utf8_lossy(&answer.body).contains("nothing was charged");
        Ok(match (answer.status, is_success, transaction) {
            (StatusCode::OK, Some(true), Some(transaction)) => Self::Delivered(transaction),
            (StatusCode::OK, Some(true), None) => Self::Accepted,
            (StatusCode::OK, ..) => return Err("200 without a receipt".into()),
            (_, Some(true), Some(transaction)) => Self::PaidInVain(transaction),
            (_, Some(true), None) => Self::Open,
            _ if says("errorReason") == "settlement_pending" => Self::Open,
            (StatusCode::PAYMENT_REQUIRED, ..) => Self::Failed,
            // The handler's own failure.
            (StatusCode::UNPROCESSABLE_ENTITY, ..) => Self::Failed,
            (status, ..) => match (status, code().as_str()) {
                (StatusCode::CONFLICT, "payment_in_progress") => Self::Open,
                (StatusCode::CONFLICT, "response_not_kept" | "attempts_exhausted") => Self::Failed,
                (StatusCode::SERVICE_UNAVAILABLE, "facilitator_unavailable" | "ledger_unavailable" | "busy")
                    if says_nothing_charged =>
                {
                    Self::NothingByThisRequest
                }
                (status, code) => return Err(format!("{status} {code} is not among what may be said")),
            },
        })
    }

    fn leaves_open(self) -> bool {
        matches!(self, Self::Open | Self::Accepted | Self::Delivered(_) | Self::PaidInVain(_))
    }
}

/// One answer, and whether the chain had executed the payment before and after it.
#[derive(Clone, Debug)]
struct Told {
    said: Said,
    is_charged: bool,
}

/// A payment and its answers.
struct Buyer {
    purchase: Purchase,
    text: &'static str,
    told: Vec<Told>,
    is_delivered: bool,
}

/// The violations found in the end.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Wrongs {
    pub lost: Vec<String>,
    pub doubled: Vec<String>,
    pub untrue: Vec<String>,
}

impl Wrongs {
    pub fn is_empty(&self) -> bool {
        self.lost.is_empty() && self.doubled.is_empty() && self.untrue.is_empty()
    }
}

/// The number of times that each payment's handler started and succeeded.
#[derive(Clone, Default)]
struct Works(Arc<Mutex<HashMap<B256, [usize; 2]>>>);

impl Works {
    fn begin(&self, nonce: B256) -> usize {
        let mut works = self.0.lock().unwrap();
        let [begun, _] = works.entry(nonce).or_default();
        *begun += 1;
        *begun
    }

    fn done(&self, nonce: B256) {
        self.0.lock().unwrap().entry(nonce).or_default()[1] += 1;
    }
}

const PAYEE: Address = Address::repeat_byte(0xba);

pub struct Scene {
    setting: Setting,
    pub devnet: Devnet,
    pub clock: Arc<RuntimeClock>,
    pub faulty: Arc<FaultyLedger>,
    /// The seller's ledger, without injected faults.
    pub ledger: Arc<dyn Ledger>,
    /// The ledgers as the seller and its facilitator use them.
    ledgers: [Arc<dyn Ledger>; 2],
    shop: Shop,
    status: App,
    works: Works,
    price: Arc<AtomicU64>,
    client: Client,
    /// The customers that bought before calls were counted.
    pub customers: Vec<Customer>,
    buyers: Vec<Buyer>,
    untrue: Vec<String>,
}

/// A seller's process.
struct Shop {
    app: App,
    facilitator: Arc<dyn Facilitator>,
    /// The engine that sends transactions: the seller's, or its facilitator's.
    engine: OnchainFacilitator,
    front: Arc<Front>,
    _port: Option<DevnetPort>,
}

/// The facilitator's HTTP server.
#[derive(Default)]
struct Front {
    state: Mutex<FrontState>,
}

#[derive(Default)]
struct FrontState {
    service: Option<FacilitatorService>,
    address: Option<SocketAddr>,
    serving: Option<JoinHandle<()>>,
    closes_after_verifying: bool,
}

impl Front {
    async fn open(self: &Arc<Self>, service: FacilitatorService) -> SocketAddr {
        self.state.lock().unwrap().service = Some(service);
        self.reopen().await
    }

    /// Serves again, at the same address.
    async fn reopen(self: &Arc<Self>) -> SocketAddr {
        let known = self.state.lock().unwrap().address;
        let at = known.unwrap_or_else(|| SocketAddr::from(([127, 0, 0, 1], 0)));
        let listener = tokio::net::TcpListener::bind(at).await.unwrap();
        let address = listener.local_addr().unwrap();
        let this = self.clone();
        let front = Router::new().fallback(move |request: Request<Body>| {
            let this = this.clone();
            async move { this.answer(request).await }
        });
        let serving = tokio::spawn(async move { axum::serve(listener, front).await.unwrap() });
        let mut state = self.state.lock().unwrap();
        (state.address, state.serving, state.closes_after_verifying) = (Some(address), Some(serving), false);
        address
    }

    async fn answer(&self, request: Request<Body>) -> Response<Body> {
        let service = self.state.lock().unwrap().service.clone().expect("it is open");
        let is_verify = request.uri().path() == "/verify";
        let mut response = service.oneshot(request).await.unwrap().map(Body::new);
        let mut state = self.state.lock().unwrap();
        if is_verify && state.closes_after_verifying {
            // Later connections are refused.
            state.serving.take().inspect(JoinHandle::abort);
            response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
        }
        response
    }
}

const PIECES: usize = 40;

impl Scene {
    /// Starts the seller. Nothing fails before [`arm`](Self::arm).
    pub async fn open(setting: Setting, client: Client) -> Self {
        let clock = Arc::new(RuntimeClock { base: unix_now(), start: Instant::now() });
        let devnet = Devnet::builder().clock(clock.clone()).finality_depth(setting.finality).start().await.unwrap();
        if setting.can_batch {
            devnet.set_code(BatchSettler::ADDRESS, deployed_code("BatchSettler"));
        }
        let ledger =
            || -> Arc<dyn Ledger> { Arc::new(MemoryLedger::with(ResponseLimits::default(), 10_000, clock.clone())) };
        let (ours, theirs) = (ledger(), ledger());
        let faulty = faulty(if setting.is_theirs { theirs.clone() } else { ours.clone() });
        let (works, price) = (Works::default(), Arc::new(AtomicU64::new(PRICE)));
        let mut ledgers: [Arc<dyn Ledger>; 2] = [ours.clone(), theirs];
        ledgers[usize::from(setting.is_theirs)] = faulty.clone();
        devnet.fund(settlement_key().address(), U256::from(10).pow(U256::from(18)));
        let shop = Shop::open(setting, &devnet, &clock, &ledgers, &works, &price).await;
        let status = app(PaymentStatus::new(ours.clone()));
        Self {
            setting,
            devnet,
            clock,
            faulty,
            ledger: ours,
            ledgers,
            shop,
            status,
            works,
            price,
            client,
            customers: Vec::new(),
            buyers: Vec::new(),
            untrue: Vec::new(),
        }
    }

    /// Replaces the process by a new one on the same ledger.
    pub async fn restart(&mut self) {
        let Self { setting, devnet, clock, ledgers, works, price, .. } = &*self;
        self.shop = Shop::open(*setting, devnet, clock, ledgers, works, price).await;
    }
}

impl Shop {
    async fn open(
        setting: Setting,
        devnet: &Devnet,
        clock: &Arc<RuntimeClock>,
        [ours, theirs]: &[Arc<dyn Ledger>; 2],
        works: &Works,
        price: &Arc<AtomicU64>,
    ) -> Self {
        let is_remote = setting.mover != Mover::Onchain;
        let engine = OnchainFacilitator::builder()
            .network(devnet.network())
            .client(devnet.rpc_client())
            .signer(settlement_key())
            .ledger(if is_remote { theirs.clone() } else { ours.clone() })
            .clock(clock.clone())
            .block_time(Duration::from_millis(200))
            .confirm_timeout(Duration::from_secs(4))
            // Background passes run on command only.
            .reconcile_interval(Duration::from_secs(86_400))
            .build()
            .await
            .unwrap();
        let front = Arc::<Front>::default();
        let port = match setting.mover {
            Mover::Confirmed => Some(devnet.serve("127.0.0.1:0").await.unwrap()),
            _ => None,
        };
        let facilitator: Arc<dyn Facilitator> = match setting.mover {
            Mover::Onchain => Arc::new(engine.clone()),
            Mover::Remote | Mover::Confirmed => {
                let service = FacilitatorService::builder(engine.clone()).clock(clock.clone()).build();
                let address = front.open(service).await;
                let mut remote = RemoteFacilitator::builder(format!("http://{address}/"))
                    .network(Network::BASE_SEPOLIA)
                    .client(reqwest::Client::builder().no_proxy().tls_certs_only([]))
                    .ledger(ours.clone())
                    .clock(clock.clone())
                    .settle_timeout(Duration::from_secs(4))
                    .reconcile_interval(Duration::from_secs(86_400));
                if let Some(port) = &port {
                    remote = remote.confirm(Network::BASE_SEPOLIA, port.url().as_str());
                }
                Arc::new(remote.build().await.unwrap())
            }
        };
        let price = price.clone();
        let mut layer = RequirePaymentLayer::builder()
            .price_with(move |_| ready(Ok(Usdc::from_atomic(price.load(Ordering::Relaxed)).into())))
            .pay_to(Network::BASE_SEPOLIA, PAYEE)
            .facilitator(facilitator.clone())
            .clock(clock.clone())
            .handler_deadline(Duration::from_secs(2))
            .settlement_margin(Duration::from_secs(2))
            .max_timeout(Duration::from_secs(600))
            .max_wait(Duration::from_secs(10))
            .flow(if setting.is_upfront { PaymentFlow::Upfront } else { PaymentFlow::Authorization });
        if setting.is_deferred {
            let much = Usdc::from_atomic(100 * PRICE);
            layer = layer.deferred(DeferredPolicy::default().per_payer(much));
        }
        let (counted, chain) = (works.clone(), devnet.clone());
        let handler = tower::service_fn(move |request: Request<RequestBody<Body>>| {
            handle(setting.work, counted.clone(), chain.clone(), request)
        });
        let app = app(layer.build().unwrap().layer(handler));
        // The facilitators' first passes.
        sleep(Duration::from_secs(1)).await;
        Self { app, facilitator, engine, front, _port: port }
    }
}

impl Scene {
    /// Starts counting calls, and makes this one fail.
    pub fn arm(&self, fault: Option<Fault>) {
        self.faulty.around.arm(fault);
    }

    /// Creates a customer with the money for this many payments.
    pub fn customer(&self, payments: u64) -> Customer {
        let signer = PrivateKeySigner::random();
        self.mint(signer.address(), payments);
        Customer { from: signer.address(), signer }
    }

    pub fn mint(&self, to: Address, payments: u64) {
        self.devnet.mint(to, Usdc::from_atomic(payments * PRICE)).unwrap();
    }

    /// Signs a payment for a request with this body.
    pub async fn sign(&mut self, customer: &Customer, text: &'static str) -> usize {
        let demand = demand(&send(&self.shop.app, ask(text)).await);
        let mut purchase = customer.sign(&demand, 0);
        purchase.authorization.validBefore = U256::from(self.clock.now() + 600);
        purchase.resign();
        self.buyers.push(Buyer { purchase, text, told: Vec::new(), is_delivered: false });
        self.buyers.len() - 1
    }

    pub fn payer(&self, buyer: usize) -> Address {
        self.buyers[buyer].purchase.authorization.from
    }

    fn is_gone(&self) -> bool {
        self.client == Client::Leaves && self.faulty.around.has_failed()
    }

    /// Presents a payment once, unless its client has left after the fault.
    pub async fn present(&mut self, buyer: usize) -> Option<Said> {
        if self.is_gone() { None } else { Some(self.present_again(buyer).await.0) }
    }

    /// Presents payments at the same time.
    pub async fn present_together(&mut self, buyers: &[usize]) {
        if self.is_gone() {
            return;
        }
        let was_charged: Vec<bool> = buyers.iter().map(|buyer| self.is_charged(*buyer)).collect();
        let answers = buyers.iter().map(|buyer| {
            let Buyer { purchase, text, .. } = &self.buyers[*buyer];
            let (app, request) = (self.shop.app.clone(), purchase.on(ask(text)));
            async move { send(&app, request).await }
        });
        let answers = futures_util::future::join_all(answers).await;
        for ((buyer, answer), was_charged) in buyers.iter().zip(answers).zip(was_charged) {
            // Another of the copies may be the one that was charged.
            let has_copies = buyers.iter().filter(|copy| *copy == buyer).count() > 1;
            self.note(*buyer, &answer, was_charged, has_copies);
        }
    }

    /// Presents a payment and disconnects in the middle of the response body.
    pub async fn present_and_leave(&mut self, buyer: usize) {
        if self.is_gone() {
            return;
        }
        let Buyer { purchase, text, .. } = &self.buyers[buyer];
        let response = try_send(&self.shop.app, purchase.on(ask(text))).await.unwrap();
        let mut body = response.into_body();
        let _ = timeout(Duration::from_secs(5), body.frame()).await;
    }

    async fn present_again(&mut self, buyer: usize) -> (Said, Answer) {
        let was_charged = self.is_charged(buyer);
        let Buyer { purchase, text, .. } = &self.buyers[buyer];
        let request = purchase.on(ask(text));
        let answer = timeout(Duration::from_secs(120), send(&self.shop.app, request)).await.expect("an answer in time");
        (self.note(buyer, &answer, was_charged, false), answer)
    }

    /// Records an answer, and each violation that is visible at once.
    fn note(&mut self, index: usize, answer: &Answer, was_charged: bool, has_copies: bool) -> Said {
        let is_charged = self.is_charged(index);
        let said = Said::of(answer).unwrap_or_else(|what| {
            self.untrue.push(what);
            Said::Open
        });
        let buyer = &mut self.buyers[index];
        // An unknown payment may be charged at any time.
        let was_open = buyer.told.iter().any(|told| told.said.leaves_open());
        let words = || format!("{} {}", answer.status, String::from_utf8_lossy(&answer.body));
        if matches!(said, Said::Delivered(_) | Said::Accepted) {
            let whole = expected(buyer.text);
            let is_whole = answer.text() == buyer.text || answer.text() == whole;
            if is_whole {
                buyer.is_delivered = true;
            } else {
                self.untrue.push(format!("another answer than was paid for: {}", words()));
            }
        }
        match said {
            Said::Delivered(_) | Said::PaidInVain(_) if !is_charged => {
                self.untrue.push(format!("not charged, and said to be: {}", words()));
            }
            Said::Failed if is_charged => self.untrue.push(format!("charged, and said to have failed: {}", words())),
            Said::NothingByThisRequest if is_charged && !was_charged && !was_open && !has_copies => {
                self.untrue.push(format!("charged by this request, which says that it did not: {}", words()));
            }
            _ => {}
        }
        self.check_promise(index, was_charged);
        self.buyers[index].told.push(Told { said, is_charged });
        said
    }

    /// Returns `true` if the payment was charged although the last answer to its client said that it was not and would not be.
    fn check_promise(&mut self, index: usize, is_charged: bool) {
        let told = &self.buyers[index].told;
        let Some(last) = told.last() else { return };
        if last.is_charged || !is_charged {
            return;
        }
        let was_open = told.iter().any(|told| told.said.leaves_open());
        match last.said {
            Said::Failed => self.untrue.push("charged behind the back of who was told that it failed".into()),
            Said::NothingByThisRequest if !was_open => {
                self.untrue.push("charged behind the back of who was told that nothing was charged".into());
            }
            _ => {}
        }
    }

    /// Presents a payment until the answer is final, as an honest client does.
    pub async fn insist(&mut self, buyer: usize) {
        for tries in 0..200 {
            if self.is_gone() {
                return;
            }
            let (said, answer) = self.present_again(buyer).await;
            let retry_after = answer.headers.get("retry-after").and_then(|value| value.to_str().ok()?.parse().ok());
            // The handler failed and the payment settled: the work is owed.
            let is_owed = matches!(said, Said::PaidInVain(_)) && answer.status == StatusCode::UNPROCESSABLE_ENTITY;
            if !answer.status.is_server_error() && retry_after.is_none() && !is_owed {
                return;
            }
            sleep(Duration::from_secs(retry_after.unwrap_or(1))).await;
            // Background passes run meanwhile.
            if tries > 2 {
                self.reconcile_now();
            }
        }
        let told = self.buyers[buyer].told.iter().rev().take(3).collect::<Vec<_>>();
        self.untrue.push(format!("there is no final answer: {told:?}"));
    }

    /// Lets time pass, and runs the background passes.
    pub async fn upkeep(&self, times: u32) {
        for _ in 0..times {
            self.reconcile_now();
            if self.setting.finality > 0 {
                self.devnet.mine();
            }
            sleep(Duration::from_secs(12)).await;
        }
    }

    fn reconcile_now(&self) {
        for buyer in &self.buyers {
            self.shop.facilitator.settle_soon(&key(&buyer.purchase));
        }
        self.shop.engine.reconcile_now();
    }

    pub async fn record(&self, buyer: usize) -> Option<Record> {
        self.ledger.get(&key(&self.buyers[buyer].purchase)).await.unwrap()
    }

    /// Asks the payment status service for a payment.
    pub async fn ask_status(&self, buyer: usize) -> Answer {
        let PaymentKey { network, asset, payer, nonce } = key(&self.buyers[buyer].purchase);
        let uri = format!("/status?network={network}&asset={asset}&payer={payer}&nonce={nonce}");
        send(&self.status, Request::get(uri).body(Body::empty()).unwrap()).await
    }

    /// Changes the price.
    pub fn set_price(&self, units: u64) {
        self.price.store(units, Ordering::Relaxed);
    }

    /// Shuts the process down, and starts another one.
    pub async fn drain_and_restart(&mut self) {
        // Its result is not needed: the ledger is checked in the end.
        let _ = self.shop.engine.drain(Duration::from_secs(10)).await;
        self.restart().await;
    }

    /// The facilitator cannot be connected to once it has verified a payment, until it [opens](Self::facilitator_opens) again.
    pub fn facilitator_closes_after_verifying(&self) {
        self.shop.front.state.lock().unwrap().closes_after_verifying = true;
    }

    pub async fn facilitator_opens(&self) {
        let is_closed = {
            let mut state = self.shop.front.state.lock().unwrap();
            state.closes_after_verifying = false;
            state.serving.is_none()
        };
        if is_closed {
            self.shop.front.reopen().await;
        }
    }

    /// Makes the node handle calls of a method so, until [`node_is_well`](Self::node_is_well).
    pub fn node_does(&self, fault: impl Fn(&str) -> NodeFault + Send + Sync + 'static) {
        self.devnet.faults().set(move |call| fault(call.method));
    }

    pub fn node_is_well(&self) {
        self.devnet.faults().clear();
    }

    /// Creates a customer whose wallet is a contract.
    pub fn wallet(&self, payments: u64) -> Customer {
        let signer = PrivateKeySigner::random();
        let code = [creation_code("TestWallet").as_ref(), &signer.address().abi_encode()].concat();
        let from = self.devnet.deploy(code).unwrap();
        self.mint(from, payments);
        Customer { from, signer }
    }

    /// Returns `true` if the chain has executed the authorization.
    pub fn is_charged(&self, buyer: usize) -> bool {
        let authorization = &self.buyers[buyer].purchase.authorization;
        let call = authorizationStateCall { authorizer: authorization.from, nonce: authorization.nonce };
        let answer = self.devnet.call(self.devnet.asset().address, call.abi_encode()).unwrap();
        authorizationStateCall::abi_decode_returns(&answer).unwrap()
    }

    /// Lets the clients finish, and returns the violations.
    pub async fn end(mut self) -> Wrongs {
        self.devnet.faults().clear();
        self.devnet.stall(false);
        if self.setting.mover != Mover::Onchain {
            self.facilitator_opens().await;
        }
        if self.client == Client::Leaves {
            // Longer than any lease and any timeout.
            self.upkeep(6).await;
            for buyer in 0..self.buyers.len() {
                let is_charged = self.is_charged(buyer);
                self.check_promise(buyer, is_charged);
            }
            self.client = Client::Insists;
        }
        for buyer in 0..self.buyers.len() {
            if !self.buyers[buyer].is_delivered {
                self.insist(buyer).await;
            }
        }
        self.upkeep(6).await;
        self.judge().await
    }

    async fn judge(mut self) -> Wrongs {
        let mut wrongs = Wrongs::default();
        let mut charged = 0;
        for index in 0..self.buyers.len() {
            let is_charged = self.is_charged(index);
            charged += u64::from(is_charged);
            self.check_promise(index, is_charged);
            let record = self.record(index).await;
            let is_known_paid = record.as_ref().is_some_and(|record| record.settlement.paid_by().is_some());
            let state = record.as_ref().map(|record| (record.fulfilment, record.settlement, &record.last_failure));
            let buyer = &self.buyers[index];
            let last = buyer.told.last().map(|told| told.said);
            match (is_charged, buyer.is_delivered) {
                (true, false) => wrongs.lost.push(format!("charged and never answered; last told: {last:?}")),
                (false, true) => wrongs.lost.push(format!("answered and never charged; {state:?}")),
                _ => {}
            }
            if is_charged != is_known_paid {
                wrongs.lost.push(format!("the ledger is wrong in the end: {state:?}, charged: {is_charged}"));
            }
            let nonce = buyer.purchase.authorization.nonce;
            let [_, done] = self.works.0.lock().unwrap().get(&nonce).copied().unwrap_or_default();
            // Work that could not be stored during a long outage must be done again.
            let at_most = if self.faulty.around.was_away_at("fulfil Produce") { 2 } else { 1 };
            if done > at_most {
                wrongs.doubled.push(format!("the work was done {done} times"));
            }
            // After a reorganization another transaction may pay.
            for told in buyer.told.iter().filter(|_| self.setting.finality == 0) {
                if let Said::Delivered(transaction) | Said::PaidInVain(transaction) = told.said
                    && record.as_ref().and_then(|record| record.settlement.paid_by()) != Some(transaction)
                {
                    let what = format!("another transaction paid than was said: {transaction}, {state:?}");
                    self.untrue.push(what);
                }
            }
            let status = self.ask_status(index).await;
            let state = status.json()["state"].as_str().unwrap_or("unknown payment").to_owned();
            if is_charged != ["settled", "final"].contains(&state.as_str()) {
                self.untrue.push(format!("who asks for the state of the payment is told: {state}"));
            }
        }
        let received = self.devnet.balance_of(PAYEE).unwrap().atomic();
        if received != charged * PRICE {
            wrongs.doubled.push(format!("{received} units were paid for {charged} payments"));
        }
        wrongs.untrue = self.untrue;
        wrongs
    }
}

alloy_sol_types::sol! {
    function authorizationState(address authorizer, bytes32 nonce) returns (bool);
    function transfer(address to, uint256 value);
}

async fn handle(
    work: Work,
    works: Works,
    devnet: Devnet,
    request: Request<RequestBody<Body>>,
) -> Result<Response<Body>, BoxError> {
    let payment = request.extensions().get::<VerifiedPayment>().cloned().expect("a paid request");
    let body = request.into_body().collect().await?.to_bytes();
    let begun = works.begin(payment.nonce);
    if work == Work::FailOnce && begun == 1 {
        return Ok(Response::builder().status(StatusCode::UNPROCESSABLE_ENTITY).body(Body::from("not today")).unwrap());
    }
    if work == Work::DrainOnce && begun == 1 {
        let value = U256::from(devnet.balance_of(payment.payer).unwrap().atomic());
        let all = transferCall { to: Address::repeat_byte(0xdd), value }.abi_encode();
        devnet.execute(payment.payer, payment.asset, all).unwrap();
    }
    works.done(payment.nonce);
    Ok(match work {
        Work::Stream => {
            let pieces = stream::iter(vec![body; PIECES]).then(|piece| async move {
                sleep(Duration::from_millis(20)).await;
                Ok::<Bytes, Infallible>(piece)
            });
            Response::new(Body::from_stream(pieces))
        }
        _ => Response::new(Body::from(body)),
    })
}

fn expected(text: &str) -> String {
    text.repeat(PIECES)
}

fn ask(text: &'static str) -> Request<Body> {
    Request::post("/evaluate?k=1").body(Body::from(text)).unwrap()
}

pub fn key(purchase: &Purchase) -> PaymentKey {
    PaymentKey {
        network: purchase.asset.network,
        asset: purchase.asset.address,
        payer: purchase.authorization.from,
        nonce: purchase.authorization.nonce,
    }
}

fn settlement_key() -> PrivateKeySigner {
    PrivateKeySigner::from_bytes(&B256::repeat_byte(0x5e)).unwrap()
}
