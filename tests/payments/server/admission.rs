//! Who has shown no money holds nothing: no permit that payers need, and no memory for a body. Who has the price of one request holds little.

use std::{
    collections::HashSet,
    convert::Infallible,
    net::SocketAddr,
    pin::Pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};

use alloy_primitives::{Address, B256, Bytes as Signature};
use alloy_signer_local::PrivateKeySigner;
use async_trait::async_trait;
use axum::{Router, body::Body};
use bytes::Bytes;
use futures_util::{StreamExt as _, future::join_all, stream};
use http::{Request, StatusCode};
use http_body::Frame;
use serde_json::json;
use support::{
    chain::Chain as _,
    escrow::Channel,
    eventually::{eventually, in_time},
    gated_ledger::{GatedChannels, Held as HeldCalls},
    scripted,
    shop::{Answer, App, Customer, PRICE, Purchase, ask, demand, evaluate, paid, send, try_send},
    world::{COST, DEPOSIT, World, by_voucher, offer, pay, payment, refused, voucher},
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
    sync::{Notify, Semaphore},
    task::JoinSet,
};
use tower::{BoxError, ServiceExt as _};
use tower_x402::{
    Clock as _, Network,
    channels::Channels,
    facilitator::channels::{
        ChannelError, ChannelFacilitator, Claimed, Executed, OnchainChannels, Settled, SignedRefund,
    },
    ledger::{
        Settlement,
        channels::{ChannelLedger as _, ChannelStep},
    },
    protocol::PaymentFlow,
    server::{RequirePaymentLayerBuilder, VerifiedPayment},
    vouchers::{AuthorizerKey, ChannelConfig, ChannelId, ChannelObservation, Claim, Deposit, Voucher},
};
use x402_devnet::Fault;

/// The number of requests without money, and of requests that may be worked on at once.
const STRANGERS: usize = 512;
const PLACES: usize = 64;
/// An eighth of the places.
const ROOM_OF_ONE: usize = 8;

/// A mebibyte of a body, for as long as somebody holds it.
struct Piece(Vec<u8>, Arc<Held>);

impl AsRef<[u8]> for Piece {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

impl Drop for Piece {
    fn drop(&mut self) {
        self.1.now.fetch_sub(1, Ordering::SeqCst);
    }
}

/// How many pieces are held now, and how many were at most.
#[derive(Default)]
struct Held {
    now: AtomicU64,
    most: AtomicU64,
}

/// A body that sends a mebibyte, and then nothing more.
struct Standing {
    held: Arc<Held>,
    begun: bool,
}

impl http_body::Body for Standing {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        if std::mem::replace(&mut self.begun, true) {
            return Poll::Pending;
        }
        let now = self.held.now.fetch_add(1, Ordering::SeqCst) + 1;
        self.held.most.fetch_max(now, Ordering::SeqCst);
        let piece = Piece(vec![7; (1 << 20) - 1], self.held.clone());
        Poll::Ready(Some(Ok(Frame::data(Bytes::from_owner(piece)))))
    }
}

fn stalled(held: &Arc<Held>) -> Request<Body> {
    let body = Standing { held: held.clone(), begun: false };
    Request::post("/evaluate?k=1").body(Body::new(body)).expect("a request")
}

/// A channel into which nothing was paid, of a payer that has nothing.
fn unfunded(world: &World, salt: u8) -> Channel {
    let (payer, voucher_key) = (PrivateKeySigner::random(), PrivateKeySigner::random());
    let config = ChannelConfig {
        payer: payer.address(),
        payer_authorizer: voucher_key.address(),
        receiver: world.shop.pay_to,
        receiver_authorizer: world.authorizer.address(),
        token: world.shop.asset.address,
        withdraw_delay: 900,
        salt: B256::repeat_byte(salt),
    };
    Channel { config, payer, voucher_key, authorizer: world.authorizer.clone() }
}

/// Payments of each kind by payers without money.
pub(super) async fn worthless(world: &World, app: &App, number: usize) -> serde_json::Value {
    let (channel, customer) = (unfunded(world, 1), scripted::customer());
    match number % 5 {
        0 => by_voucher(app, &channel, COST).await,
        1 => payment("refund", &offer(app, "a").await, &channel, 0).await,
        2 => {
            let mut payment = payment("deposit", &offer(app, "a").await, &channel, COST).await;
            payment["payload"]["deposit"] = json!(world.sign_deposit(&channel, DEPOSIT).await);
            payment
        }
        // The two flows of `exact`.
        flow => customer.sign(&demand(&send(app, evaluate("a")).await), flow - 3).payload(),
    }
}

/// Repeats a request that was told to come again, as clients do: strangers are many, and a test's machine may be slow.
async fn served(app: &App, request: impl AsyncFn() -> Request<Body>) -> Answer {
    let mut answer = send(app, request().await).await;
    for _ in 0..5 {
        if answer.status == StatusCode::SERVICE_UNAVAILABLE {
            answer = send(app, request().await).await;
        }
    }
    answer
}

fn both_flows(layer: RequirePaymentLayerBuilder) -> RequirePaymentLayerBuilder {
    layer.flow(PaymentFlow::Authorization).flow(PaymentFlow::Upfront).max_concurrent(PLACES)
}

#[tokio::test]
async fn strangers_without_money_keep_out_no_payer_and_have_no_body_kept() {
    let world = World::open().await;
    let app = world.shop.app(both_flows(world.layer()));
    let channel = world.filled(&app).await;
    let customer = Customer::with_funds(&world.chain, 100 * PRICE).await;
    let held = Arc::<Held>::default();
    let mut strangers = Vec::new();
    for number in 0..STRANGERS {
        let request = paid(stalled(&held), &worthless(&world, &app, number).await);
        strangers.push(ask(&app, request));
    }
    let handled = world.shop.handled();
    for n in 2..6 {
        let answer = served(&app, async || pay(&app, &channel, n * COST, None, "paid").await).await;
        assert_eq!((answer.status, answer.text()), (StatusCode::OK, "paid"), "{answer:?}");
        for flow in [0, 1] {
            let purchase = customer.pay_offer(&app, evaluate("paid"), flow).await;
            let answer = served(&app, async || purchase.on(evaluate("paid"))).await;
            assert_eq!((answer.status, answer.text()), (StatusCode::OK, "paid"), "{answer:?}");
        }
    }
    for answer in in_time("strangers are refused", join_all(strangers)).await {
        let answer = answer.expect("an answer");
        // On a busy machine some wait too long for a place.
        assert!(matches!(answer.status.as_u16(), 402 | 503), "{answer:?}");
    }
    // What a refused client goes on to send is thrown away piece by piece.
    assert!(held.most.load(Ordering::SeqCst) <= 2, "nobody's body is kept who has shown no money");
    assert_eq!(world.shop.handled() - handled, 12);
}

/// While the first is verified, its copies wait without a place.
#[tokio::test]
async fn copies_of_payments_without_money_take_no_place_of_payers() {
    let world = World::open().await;
    let app = world.shop.app(world.shop.layer().max_concurrent(16));
    let (stranger, customer) = (scripted::customer(), Customer::with_funds(&world.chain, 2 * PRICE).await);
    let purchase = customer.pay(&app, evaluate("paid")).await;
    let demanded = demand(&send(&app, evaluate("a")).await);
    let asked = Arc::<AtomicU64>::default();
    let (counter, address) = (asked.clone(), alloy_primitives::hex::encode(stranger.from));
    world.chain.devnet.faults().set(move |call| {
        let is_strangers = call.method == "eth_call" && json!(call.params).to_string().contains(&address);
        if !is_strangers {
            return Fault::None;
        }
        counter.fetch_add(1, Ordering::SeqCst);
        Fault::Delay(Duration::from_secs(3_600))
    });
    let mut strangers = Vec::new();
    for _ in 0..8 {
        let payment = stranger.sign(&demanded, 0);
        for _ in 0..3 {
            strangers.push(ask(&app, payment.on(evaluate("a"))));
        }
    }
    in_time("the first of each is verified", async {
        while asked.load(Ordering::SeqCst) < 8 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
    let answer = send(&app, purchase.on(evaluate("paid"))).await;
    assert_eq!((answer.status, answer.text()), (StatusCode::OK, "paid"), "{answer:?}");
    strangers.iter().for_each(tokio::task::JoinHandle::abort);
}

/// Looks at known channels only; others it leaves without an answer.
#[derive(Debug)]
struct Selective {
    inner: OnchainChannels,
    known: HashSet<ChannelId>,
    /// How many looks it left without an answer.
    left: Arc<AtomicU64>,
}

#[async_trait]
impl ChannelFacilitator for Selective {
    fn network(&self) -> Network {
        self.inner.network()
    }

    async fn observe(&self, channels: &[ChannelId]) -> Result<Vec<ChannelObservation>, ChannelError> {
        if !channels.iter().all(|channel| self.known.contains(channel)) {
            self.left.fetch_add(1, Ordering::SeqCst);
            std::future::pending::<()>().await;
        }
        self.inner.observe(channels).await
    }

    async fn verify_deposit(
        &self,
        config: &ChannelConfig,
        deposit: &Deposit,
    ) -> Result<ChannelObservation, ChannelError> {
        self.inner.verify_deposit(config, deposit).await
    }

    async fn deposit(
        &self,
        config: &ChannelConfig,
        voucher: &Voucher,
        deposit: &Deposit,
    ) -> Result<Executed, ChannelError> {
        self.inner.deposit(config, voucher, deposit).await
    }

    async fn claim(&self, claims: &[Claim], authorizer: &AuthorizerKey) -> Result<Claimed, ChannelError> {
        self.inner.claim(claims, authorizer).await
    }

    async fn claim_signed(&self, claims: &[Claim], signature: &Signature) -> Result<Claimed, ChannelError> {
        self.inner.claim_signed(claims, signature).await
    }

    async fn settle(&self, receiver: Address, token: Address) -> Result<Option<Settled>, ChannelError> {
        self.inner.settle(receiver, token).await
    }

    async fn refund_signed(&self, refund: &SignedRefund) -> Result<Executed, ChannelError> {
        self.inner.refund_signed(refund).await
    }
}

#[tokio::test]
async fn payer_whose_channel_is_looked_at_again_does_not_wait_behind_strangers() {
    let world = World::open().await;
    let channel = world.filled(&world.app).await;
    let sender = world.chain.gas_key().await;
    let contract = OnchainChannels::builder().network(Network::BASE_SEPOLIA).rpc_url(world.chain.rpc_url());
    let inner = contract.signer(sender).build().await.expect("the contracts are on the devnet");
    let left = Arc::<AtomicU64>::default();
    let known = HashSet::from([channel.id()]);
    let contract = Selective { inner, known, left: left.clone() };
    let channels = Channels::builder(contract, AuthorizerKey::new(world.authorizer.clone()))
        .ledger(world.ledger.clone())
        .min_deposit("$0.01")
        .clock(world.clock.clone())
        .build()
        .expect("complete settings");
    let app = world.shop.app(world.shop.layer().vouchers(channels).max_concurrent(PLACES));
    let mut strangers = Vec::new();
    // All places are taken, and some wait for one.
    for number in 0..PLACES + 8 {
        let request = pay(&app, &unfunded(&world, number as u8), COST, None, "a").await;
        strangers.push(ask(&app, request));
    }
    in_time("all places are taken", async {
        while left.load(Ordering::SeqCst) < PLACES as u64 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
    for (n, later) in [(2, 301), (3, 0)] {
        world.clock.advance(later);
        let answer = send(&app, pay(&app, &channel, n * COST, None, "known").await).await;
        assert_eq!((answer.status, answer.text()), (StatusCode::OK, "known"), "{answer:?}");
    }
    assert_eq!(left.load(Ordering::SeqCst), PLACES as u64, "no more strangers at once");
    strangers.iter().for_each(tokio::task::JoinHandle::abort);
}

/// What was charged for may have been claimed, with a voucher that is on the chain since.
#[tokio::test]
async fn vouchers_that_were_charged_take_no_permit_of_payers() {
    let world = World::open().await;
    let app = world.shop.app(world.layer().max_concurrent(2));
    let channel = world.filled(&app).await;
    let held = Arc::<Held>::default();
    let payment = by_voucher(&app, &channel, COST).await;
    let copies: Vec<_> = (0..64).map(|_| ask(&app, paid(stalled(&held), &payment))).collect();
    eventually("those that are there longest make room", async || finished(&copies) == 64 - 1).await;
    let answer = send(&app, pay(&app, &channel, 2 * COST, None, "mine").await).await;
    assert_eq!((answer.status, answer.text()), (StatusCode::OK, "mine"), "{answer:?}");
    assert!(held.now.load(Ordering::SeqCst) <= 1, "1 MiB for all that present one payment");
    copies.iter().for_each(tokio::task::JoinHandle::abort);
}

/// Anybody can ask for it who has read its voucher on the chain, and the ledger that keeps it may be slow.
#[tokio::test]
async fn stored_answers_that_are_read_slowly_take_no_permit_of_payers() {
    let world = World::open().await;
    let (channel, other) = (world.filled(&world.app).await, world.filled(&world.app).await);
    let books = GatedChannels::over(world.ledger.clone(), HeldCalls::ChannelResponses);
    let channels = world.process(books.clone()).await;
    let app = world.shop.app(world.shop.layer().vouchers(channels).max_concurrent(1));
    let again = ask(&app, pay(&app, &channel, COST, None, "first").await);
    books.around.until_one_waits().await;
    let answer = send(&app, pay(&app, &other, 2 * COST, None, "mine").await).await;
    assert_eq!((answer.status, answer.text()), (StatusCode::OK, "mine"), "{answer:?}");
    books.around.open();
    let again = in_time("it is read", again).await.unwrap();
    assert_eq!((again.status, again.text()), (StatusCode::OK, "first"), "{again:?}");
}

/// Serves on a port of this machine.
async fn listen(app: &App) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let service = app.clone().map_err(|error| -> Infallible { panic!("{error}") });
    tokio::spawn(async move { axum::serve(listener, Router::new().fallback_service(service)).await });
    address
}

/// Connections on which the bodies of paid requests begin and do not go on. They are closed when this is dropped.
struct Stalled {
    _connections: JoinSet<()>,
    /// The first lines of the answers.
    answers: Arc<Mutex<Vec<String>>>,
}

impl Stalled {
    async fn open(address: SocketAddr, payments: &[serde_json::Value]) -> Self {
        let (mut connections, answers) = (JoinSet::new(), Arc::<Mutex<Vec<String>>>::default());
        for payment in payments {
            let request = paid(Request::new(Body::empty()), payment);
            let payment = request.headers()["payment-signature"].to_str().unwrap();
            let head = format!(
                "POST /evaluate?k=1 HTTP/1.1\r\nhost: a.example\r\ntransfer-encoding: chunked\r\npayment-signature: {payment}\r\n\r\n"
            );
            let mut stream = TcpStream::connect(address).await.unwrap();
            stream.write_all(format!("{head}8000\r\n{}", " ".repeat(1_000)).as_bytes()).await.unwrap();
            let answers = answers.clone();
            connections.spawn(async move {
                let mut answer = [0; "HTTP/1.1 200".len()];
                stream.read_exact(&mut answer).await.unwrap();
                answers.lock().unwrap().push(String::from_utf8_lossy(&answer).into_owned());
            });
        }
        Self { _connections: connections, answers }
    }

    /// Waits until at least so many of them are answered.
    async fn answered(&self, number: usize) -> Vec<String> {
        eventually("they are answered", async || self.answers.lock().unwrap().len() >= number).await;
        self.answers.lock().unwrap().clone()
    }
}

/// How many requests one payer sends whose bodies stand still, to a seller that serves sixteen at once.
const STALLED: usize = 40;

#[tokio::test]
async fn payer_with_the_price_of_one_request_keeps_no_other_payer_out() {
    let world = World::open().await;
    let app = world.shop.app(both_flows(world.layer()).max_concurrent(16));
    let address = listen(&app).await;
    let (channel, attackers) = (world.filled(&app).await, world.filled(&app).await);
    let customer = Customer::with_funds(&world.chain, 100 * PRICE).await;
    let attacker = Customer::with_funds(&world.chain, PRICE).await;
    let demanded = demand(&send(&app, evaluate("a")).await);
    let mut charged = COST;
    for kind in ["voucher", "upfront", "refund"] {
        let mut payments = Vec::new();
        for _ in 0..STALLED {
            payments.push(match kind {
                "upfront" => attacker.sign(&demanded, 1).payload(),
                "voucher" => by_voucher(&app, &attackers, 2 * COST).await,
                _ => {
                    let mut payment = by_voucher(&app, &attackers, COST).await;
                    payment["payload"]["type"] = "refund".into();
                    payment["payload"]["amount"] = "1".into();
                    payment
                }
            });
        }
        let stalled = Stalled::open(address, &payments).await;
        stalled.answered(STALLED - 16).await;
        charged += COST;
        let answer = send(&app, pay(&app, &channel, charged, None, "paid").await).await;
        assert_eq!((answer.status, answer.text()), (StatusCode::OK, "paid"), "{kind}: {answer:?}");
        for flow in [0, 1] {
            let purchase = customer.pay_offer(&app, evaluate("paid"), flow).await;
            let answer = send(&app, purchase.on(evaluate("paid"))).await;
            assert_eq!((answer.status, answer.text()), (StatusCode::OK, "paid"), "{kind} {flow}: {answer:?}");
        }
        // A refund does not depend on its body.
        if kind == "refund" {
            stalled.answered(STALLED).await;
        } else {
            let refused = STALLED - WAITING_OF_ONE;
            assert_eq!(stalled.answered(refused).await, vec!["HTTP/1.1 503"; refused], "{kind}");
        }
    }
}

/// Of a payer with money, too, to a seller that serves four at once.
#[tokio::test]
async fn bodies_that_payers_send_slowly_hold_no_permit() {
    let world = World::open().await;
    let app = world.shop.app(world.shop.layer().max_concurrent(4).vouchers(world.channels.clone()));
    let address = listen(&app).await;
    let (channel, slow) = (world.filled(&app).await, world.filled(&app).await);
    let mut payments = Vec::new();
    for _ in 0..ROOM_OF_ONE {
        payments.push(by_voucher(&app, &slow, 2 * COST).await);
    }
    let _stalled = Stalled::open(address, &payments).await;
    for n in 2..10 {
        let answer = send(&app, pay(&app, &channel, n * COST, None, "paid").await).await;
        assert_eq!((answer.status, answer.text()), (StatusCode::OK, "paid"), "{n}: {answer:?}");
    }
}

/// The channel is held by a process that shares the ledger, and the seller serves one request at once.
#[tokio::test]
async fn request_that_waits_for_another_process_holds_no_permit() {
    let world = World::open().await;
    let layer = || world.layer();
    let app = world.shop.app(layer().max_concurrent(1));
    let (channel, other) = (world.filled(&app).await, world.filled(&app).await);
    let now = world.clock.now();
    let step = ChannelStep::Begin {
        request: B256::repeat_byte(1),
        name: None,
        voucher: voucher(&other, 2 * COST).await,
        price: COST,
        now,
        until: now + 60,
    };
    let held = world.ledger.advance(&other.id(), &step).await.unwrap().epoch;
    let waiting = ask(&app, pay(&app, &other, 2 * COST, None, "waits").await);
    tokio::time::sleep(Duration::from_millis(300)).await;
    let answer = send(&app, pay(&app, &channel, 2 * COST, None, "paid").await).await;
    assert_eq!((answer.status, answer.text()), (StatusCode::OK, "paid"), "{answer:?}");
    assert!(!waiting.is_finished());
    world.ledger.advance(&other.id(), &ChannelStep::Release { epoch: held }).await.unwrap();
    let answer = in_time("it is freed", waiting).await.unwrap();
    assert_eq!((answer.status, answer.text()), (StatusCode::OK, "waits"), "{answer:?}");
}

/// Whether its balance covers them depends on the one that is being settled.
#[tokio::test]
async fn payments_that_wait_for_their_payers_balance_keep_no_other_payer_out() {
    let world = World::with_blocks_every(Duration::from_millis(20)).await;
    let app = world.shop.app(world.layer().max_concurrent(16));
    let channel = world.filled(&app).await;
    let attacker = Customer::with_funds(&world.chain, PRICE).await;
    let demanded = demand(&send(&app, evaluate("a")).await);
    world.chain.devnet.stall(true);
    let ask = |purchase: &Purchase| ask(&app, purchase.on(evaluate("a")));
    let before = world.shop.handled();
    let purchase = attacker.sign(&demanded, 0);
    let first = ask(&purchase);
    is_submitted(&world, &purchase).await;
    let waiting: Vec<_> = (0..STALLED).map(|_| ask(&attacker.sign(&demanded, 0))).collect();
    eventually("most are refused", async || finished(&waiting) >= STALLED - WAITING_OF_ONE).await;
    let answer = send(&app, pay(&app, &channel, 2 * COST, None, "paid").await).await;
    assert_eq!((answer.status, answer.text()), (StatusCode::OK, "paid"), "{answer:?}");
    eventually("some of them wait", async || finished(&waiting) == STALLED - WAITING_OF_ONE).await;
    world.chain.devnet.stall(false);
    assert_eq!(in_time("it is settled", first).await.unwrap().status, StatusCode::OK);
    for request in waiting {
        let status = in_time("its balance is spent", request).await.unwrap().status;
        assert!(matches!(status.as_u16(), 402 | 503), "{status}");
    }
    assert_eq!(world.shop.handled() - before, 2);
}

async fn is_submitted(world: &World, purchase: &Purchase) {
    eventually("the first is submitted", async || {
        let record = world.shop.record(&purchase.authorization).await;
        record.is_some_and(|record| record.settlement == Settlement::Submitted)
    })
    .await;
}

/// The same of payments that were worked on before, in vain.
#[tokio::test]
async fn payments_presented_again_wait_for_their_payers_balance_and_keep_no_other_payer_out() {
    let world = World::with_blocks_every(Duration::from_millis(20)).await;
    let layer = world.layer().max_concurrent(16);
    let app = world.shop.app_with(layer, failing_at_bad);
    let channel = world.filled(&app).await;
    let attacker = Customer::with_funds(&world.chain, PRICE).await;
    let demanded = demand(&send(&app, evaluate("a")).await);
    let mut released = Vec::new();
    for _ in 0..STALLED {
        let purchase = attacker.sign(&demanded, 0);
        assert_eq!(send(&app, purchase.on(evaluate("bad"))).await.status, StatusCode::UNPROCESSABLE_ENTITY);
        released.push(purchase);
    }
    world.chain.devnet.stall(true);
    let purchase = attacker.sign(&demanded, 0);
    let first = ask(&app, purchase.on(evaluate("a")));
    is_submitted(&world, &purchase).await;
    let waiting: Vec<_> = released.iter().map(|purchase| ask(&app, purchase.on(evaluate("bad")))).collect();
    eventually("most are refused", async || finished(&waiting) >= STALLED - WAITING_OF_ONE).await;
    let answer = send(&app, pay(&app, &channel, 2 * COST, None, "paid").await).await;
    assert_eq!((answer.status, answer.text()), (StatusCode::OK, "paid"), "{answer:?}");
    assert_eq!(finished(&waiting), STALLED - WAITING_OF_ONE, "some of them wait");
    world.chain.devnet.stall(false);
    assert_eq!(in_time("it is settled", first).await.unwrap().status, StatusCode::OK);
    for request in waiting {
        let status = in_time("its balance is spent", request).await.unwrap().status;
        assert!(matches!(status.as_u16(), 402 | 503), "{status}");
    }
}

/// Of such payments each counts with its body.
#[tokio::test]
async fn payments_presented_again_that_wait_with_their_bodies_take_little_memory() {
    let world = World::with_blocks_every(Duration::from_millis(20)).await;
    let app = world.shop.app_with(world.shop.layer().max_concurrent(PLACES), failing_at_bad);
    let attacker = Customer::with_funds(&world.chain, PRICE).await;
    let demanded = demand(&send(&app, evaluate("a")).await);
    let held = Arc::<Held>::default();
    let mut released = Vec::new();
    for _ in 0..4 {
        let purchase = attacker.sign(&demanded, 0);
        let answer = send(&app, purchase.on(arrived(&held))).await;
        assert_eq!(answer.status, StatusCode::UNPROCESSABLE_ENTITY, "{answer:?}");
        released.push(purchase);
    }
    world.chain.devnet.stall(true);
    let purchase = attacker.sign(&demanded, 0);
    let first = ask(&app, purchase.on(evaluate("a")));
    is_submitted(&world, &purchase).await;
    let mut waiting = Vec::new();
    for purchase in &released {
        waiting.push(ask(&app, purchase.on(arrived(&held))));
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    eventually("all but one make room", async || finished(&waiting) == 3).await;
    assert!(held.now.load(Ordering::SeqCst) <= 1, "they hold nothing");
    let last = waiting.pop().unwrap();
    for request in waiting {
        let answer = request.await.unwrap();
        assert_eq!((answer.status.as_u16(), answer.reason().as_str()), (503, "busy"), "{answer:?}");
    }
    world.chain.devnet.stall(false);
    assert_eq!(in_time("it is settled", first).await.unwrap().status, StatusCode::OK);
    assert_eq!(in_time("its balance is spent", last).await.unwrap().status, StatusCode::PAYMENT_REQUIRED);
}

/// Whoever has the least deposit can sign it for any number of channels. The seller serves one request at once.
#[tokio::test]
async fn deposit_on_its_way_keeps_no_other_payer_out() {
    let world = World::with_blocks_every(Duration::from_millis(20)).await;
    let app = world.shop.app(world.layer().max_concurrent(1));
    let (channel, attacker) = (world.filled(&app).await, world.channel().await);
    let deposit = world.sign_deposit(&attacker, DEPOSIT).await;
    let request = pay(&app, &attacker, COST, Some(&deposit), "a").await;
    let sent = Arc::<AtomicU64>::default();
    let counter = sent.clone();
    world.chain.devnet.faults().set(move |call| {
        counter.fetch_add(u64::from(call.method == "eth_sendRawTransaction"), Ordering::SeqCst);
        Fault::None
    });
    world.chain.devnet.stall(true);
    let waiting = ask(&app, request);
    eventually("the deposit is sent", async || sent.load(Ordering::SeqCst) > 0).await;
    let answer = send(&app, pay(&app, &channel, 2 * COST, None, "paid").await).await;
    assert_eq!((answer.status, answer.text()), (StatusCode::OK, "paid"), "{answer:?}");
    assert!(!waiting.is_finished(), "it waits for the chain");
    world.chain.devnet.stall(false);
    let answer = in_time("it is filled", waiting).await.unwrap();
    assert_eq!((answer.status, answer.text()), (StatusCode::OK, "a"), "{answer:?}");
}

/// Cannot do what is asked of it with "bad", or with a body of this file's pieces.
async fn failing_at_bad(_: VerifiedPayment, body: Bytes) -> Result<http::Response<Body>, BoxError> {
    let is_bad = body == "bad" || body.first() == Some(&7);
    let status = if is_bad { StatusCode::UNPROCESSABLE_ENTITY } else { StatusCode::OK };
    Ok(http::Response::builder().status(status).body(Body::from(if is_bad { Bytes::new() } else { body })).unwrap())
}

/// A payment that is on the chain can be presented by anybody.
#[tokio::test]
async fn payer_gets_its_answer_again_while_strangers_present_its_payment() {
    let world = World::open().await;
    let app = world.shop.app(both_flows(world.layer()).max_concurrent(16));
    let address = listen(&app).await;
    let channel = world.channel().await;
    let deposit = world.sign_deposit(&channel, DEPOSIT).await;
    assert_eq!(send(&app, pay(&app, &channel, COST, Some(&deposit), "mine").await).await.status, StatusCode::OK);
    let customer = Customer::with_funds(&world.chain, 100 * PRICE).await;
    let mut payments = vec![by_voucher(&app, &channel, COST).await];
    for flow in [0, 1] {
        let purchase = customer.pay_offer(&app, evaluate("mine"), flow).await;
        assert_eq!(send(&app, purchase.on(evaluate("mine"))).await.status, StatusCode::OK);
        payments.push(purchase.payload());
    }
    for payment in &payments {
        let stalled = Stalled::open(address, &vec![payment.clone(); STALLED]).await;
        // Of 4 MiB, all that present one payment have a quarter, in pieces of 64 KiB.
        stalled.answered(STALLED - 16).await;
        let asked = send(&app, paid(evaluate("mine"), payment));
        let answer = tokio::time::timeout(Duration::from_secs(4), asked).await.expect("it waits for no stranger");
        assert_eq!((answer.status, answer.text()), (StatusCode::OK, "mine"), "{answer:?}");
    }
}

/// Of eight payers, as many requests each as may wait for one. A stranger can send those of a payment that is on the chain.
#[tokio::test]
async fn requests_that_wait_for_another_one_hold_no_permit() {
    let world = World::open().await;
    let (app, go_on) = holding_with(&world, both_flows);
    let (channel, customer) = (world.filled(&app).await, Customer::with_funds(&world.chain, 100 * PRICE).await);
    let mut waiting = Vec::new();
    let ask = |request| ask(&app, request);
    for flow in [0, 1] {
        for _ in 0..4 {
            let purchase = customer.pay_offer(&app, evaluate("held"), flow).await;
            waiting.extend((0..=ROOM_OF_ONE).map(|_| ask(purchase.on(evaluate("held")))));
        }
    }
    for _ in 0..8 {
        let other = world.filled(&app).await;
        waiting.push(ask(pay(&app, &other, 2 * COST, None, "held").await));
        for body in ["a", "b", "c", "d", "e", "f", "g", "h"] {
            waiting.push(ask(pay(&app, &other, 2 * COST, None, body).await));
        }
    }
    // And the first request of nine channels, with its deposit.
    eventually("the first of each is worked on", async || world.shop.handled() == 9 + 16).await;
    let answer = send(&app, pay(&app, &channel, 2 * COST, None, "paid").await).await;
    assert_eq!((answer.status, answer.text()), (StatusCode::OK, "paid"), "{answer:?}");
    for flow in [0, 1] {
        let purchase = customer.pay_offer(&app, evaluate("paid"), flow).await;
        let answer = send(&app, purchase.on(evaluate("paid"))).await;
        assert_eq!((answer.status, answer.text()), (StatusCode::OK, "paid"), "{flow}: {answer:?}");
    }
    assert!(waiting.iter().filter(|request| !request.is_finished()).count() > PLACES, "they wait");
    go_on.close();
    for request in waiting {
        in_time("it ends", request).await.unwrap();
    }
}

#[tokio::test]
async fn requests_for_an_answer_that_streams_keep_nobody_from_a_stored_one() {
    let world = World::open().await;
    let (app, _) = holding(&world);
    let (channel, customer) = (world.filled(&app).await, Customer::with_funds(&world.chain, 100 * PRICE).await);
    let stored = [by_voucher(&app, &channel, COST).await, {
        let purchase = customer.pay(&app, evaluate("first")).await;
        assert_eq!(send(&app, purchase.on(evaluate("first"))).await.status, StatusCode::OK);
        purchase.payload()
    }];
    let streams = [by_voucher(&app, &channel, 2 * COST).await, customer.pay(&app, evaluate("stream")).await.payload()];
    let (mut streaming, mut copies) = (Vec::new(), Vec::new());
    for payment in &streams {
        let first = try_send(&app, paid(evaluate("stream"), payment)).await.unwrap();
        assert_eq!(first.status(), StatusCode::OK);
        streaming.push(first);
        for _ in 0..ROOM_OF_ONE {
            copies.push(ask(&app, paid(evaluate("stream"), payment)));
        }
    }
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert_eq!(finished(&copies), 0, "they wait for the streams");
    for payment in &stored {
        let asked = send(&app, paid(evaluate("first"), payment));
        let answer = tokio::time::timeout(Duration::from_secs(3), asked).await.expect("it waits for no stream");
        assert_eq!((answer.status, answer.text()), (StatusCode::OK, "first"), "{answer:?}");
    }
}

/// A seller whose handler holds requests for "held" until it is told to go on, and whose other answers stream without an end if asked so.
fn holding(world: &World) -> (App, Arc<Semaphore>) {
    holding_with(world, |layer| layer)
}

fn holding_with(
    world: &World,
    change: impl FnOnce(RequirePaymentLayerBuilder) -> RequirePaymentLayerBuilder,
) -> (App, Arc<Semaphore>) {
    let go_on = Arc::new(Semaphore::new(0));
    let waits = go_on.clone();
    let layer = change(world.shop.layer()).max_concurrent(PLACES).vouchers(world.channels.clone());
    let app = world.shop.app_with(layer, move |_, body| {
        let waits = waits.clone();
        async move {
            let pieces = stream::iter([Ok::<_, Infallible>(body.clone())]);
            Ok(http::Response::new(match &body[..] {
                b"stream" => Body::from_stream(pieces.chain(stream::pending())),
                b"held" => {
                    drop(waits.acquire().await);
                    Body::from(body)
                }
                _ => Body::from(body),
            }))
        }
    });
    (app, go_on)
}

/// How many of these requests are answered.
fn finished(requests: &[tokio::task::JoinHandle<Answer>]) -> usize {
    requests.iter().filter(|request| request.is_finished()).count()
}

/// How many small requests one payer or channel has places for where they are waited for, or wait for others: an eighth of 128.
const WAITING_OF_ONE: usize = 16;

#[tokio::test]
async fn copies_of_one_payers_payments_keep_no_other_payers_copy_out() {
    let world = World::open().await;
    let (app, go_on) = holding(&world);
    let [payer, attacker] =
        [Customer::with_funds(&world.chain, PRICE).await, Customer::with_funds(&world.chain, 100 * PRICE).await];
    let held = payer.pay(&app, evaluate("held")).await;
    let mut held = [0; 2].map(|_| held.on(evaluate("held"))).map(|request| ask(&app, request));
    let mut copies = Vec::new();
    for _ in 0..2 * ROOM_OF_ONE {
        let purchase = attacker.pay(&app, evaluate("held")).await;
        copies.extend((0..=ROOM_OF_ONE).map(|_| ask(&app, purchase.on(evaluate("held")))));
    }
    // One of each is worked on.
    let waiting = copies.len() - 2 * ROOM_OF_ONE;
    eventually("the oldest make room", async || finished(&copies) == waiting - WAITING_OF_ONE).await;
    assert_eq!(finished(&held), 0);
    go_on.close();
    for answer in &mut held {
        let answer = in_time("it is served", answer).await.unwrap();
        assert_eq!((answer.status, answer.text()), (StatusCode::OK, "held"), "{answer:?}");
    }
}

/// A payment that is settled before its work is on the chain, where anybody can read it.
#[tokio::test]
async fn copies_of_a_payment_on_the_chain_keep_no_copy_of_its_payers_others_out() {
    let world = World::open().await;
    let (app, go_on) = holding_with(&world, |layer| layer.flow(PaymentFlow::Upfront));
    let payer = Customer::with_funds(&world.chain, 2 * PRICE).await;
    let (public, own) = (payer.pay(&app, evaluate("held")).await, payer.pay(&app, evaluate("held")).await);
    let works = [&public, &own].map(|purchase| ask(&app, purchase.on(evaluate("held"))));
    eventually("both are worked on", async || world.shop.handled() == 2).await;
    let copy = ask(&app, own.on(evaluate("held")));
    // Whatever takes its place comes later.
    tokio::time::sleep(Duration::from_millis(100)).await;
    let strangers: Vec<_> = (0..3 * WAITING_OF_ONE).map(|_| ask(&app, public.on(evaluate("held")))).collect();
    eventually("the oldest make room", async || finished(&strangers) == 2 * WAITING_OF_ONE).await;
    assert!(!copy.is_finished(), "its place is its payer's");
    go_on.close();
    for answer in works.into_iter().chain([copy]) {
        let answer = in_time("it is served", answer).await.unwrap();
        assert_eq!((answer.status, answer.text()), (StatusCode::OK, "held"), "{answer:?}");
    }
}

/// Whoever has the price of one request can send any number of them.
#[tokio::test]
async fn bodies_of_payers_take_as_much_room_as_has_arrived() {
    let world = World::open().await;
    let layer = world.shop.layer().flow(PaymentFlow::Upfront).max_concurrent(PLACES);
    let app = world.shop.app(layer.vouchers(world.channels.clone()));
    let channel = world.filled(&app).await;
    let customer = Customer::with_funds(&world.chain, PRICE).await;
    let voucher = by_voucher(&app, &channel, 2 * COST).await;
    let demanded = demand(&send(&app, evaluate("a")).await);
    for scheme in ["exact", "batch-settlement"] {
        let held = Arc::<Held>::default();
        let requests: Vec<_> = (0..2 * ROOM_OF_ONE)
            .map(|_| match scheme {
                "exact" => paid(stalled(&held), &customer.sign(&demanded, 0).payload()),
                _ => paid(stalled(&held), &voucher),
            })
            .map(|request| ask(&app, request))
            .collect();
        // One of the longest takes the share of its payer.
        eventually("all but one make room", async || finished(&requests) == 2 * ROOM_OF_ONE - 1).await;
        assert_eq!(held.now.load(Ordering::SeqCst), 1, "{scheme}");
        requests.iter().for_each(tokio::task::JoinHandle::abort);
    }
}

/// Copies of streams of any number of payers, and refunds of its channel, which anybody can ask for.
#[tokio::test]
async fn payers_wait_in_the_line_of_their_channel_whatever_strangers_wait_for() {
    let world = World::open().await;
    let (app, go_on) = holding(&world);
    let channel = world.filled(&app).await;
    let first = ask(&app, pay(&app, &channel, 2 * COST, None, "held").await);
    eventually("it is worked on", async || world.shop.handled() == 2).await;
    let second = ask(&app, pay(&app, &channel, 3 * COST, None, "second").await);
    tokio::time::sleep(Duration::from_millis(100)).await;
    let mut streaming = Vec::new();
    let mut strangers = Vec::new();
    let mut refund = by_voucher(&app, &channel, COST).await;
    refund["payload"]["type"] = "refund".into();
    refund["payload"]["amount"] = "1".into();
    strangers.extend((0..2 * WAITING_OF_ONE).map(|_| ask(&app, paid(evaluate("a"), &refund))));
    eventually("the oldest make room", async || finished(&strangers) == WAITING_OF_ONE).await;
    for _ in 0..9 {
        let customer = Customer::with_funds(&world.chain, PRICE).await;
        let purchase = customer.pay(&app, evaluate("stream")).await;
        streaming.push(try_send(&app, purchase.on(evaluate("stream"))).await.unwrap());
        strangers.extend((0..WAITING_OF_ONE).map(|_| ask(&app, purchase.on(evaluate("stream")))));
    }
    eventually("no more wait than have places", async || finished(&strangers) == strangers.len() - 8 * WAITING_OF_ONE)
        .await;
    assert!(!first.is_finished() && !second.is_finished());
    go_on.close();
    let first = in_time("it is served", first).await.unwrap();
    assert_eq!(first.status, StatusCode::OK, "{first:?}");
    // Two vouchers were signed beforehand: the second is the right one now.
    let second = in_time("it is served", second).await.unwrap();
    assert_eq!((second.status, second.text()), (StatusCode::OK, "second"), "{second:?}");
    strangers.iter().for_each(tokio::task::JoinHandle::abort);
}

/// The newest voucher was charged in part, and is on the chain with its signature since that was claimed.
#[tokio::test]
async fn copies_of_a_claimed_voucher_take_no_room_of_its_payers_next_request() {
    let world = World::open().await;
    let layer = world.layer().max_concurrent(PLACES);
    let app = world.obeying(layer);
    let channel = world.filled(&app).await;
    let cheap = send(&app, pay(&app, &channel, 2 * COST, None, "costs 300").await).await;
    assert_eq!(cheap.status, StatusCode::OK, "{cheap:?}");
    assert_eq!(world.channels.claim_all().await.expect("the devnet claims").claimed, COST + 300);
    let (begun, come) = (Arc::new(Notify::new()), Arc::new(Semaphore::new(0)));
    let body = Body::from_stream(stream::once({
        let (begun, come) = (begun.clone(), come.clone());
        async move {
            begun.notify_one();
            drop(come.acquire().await);
            Ok::<_, Infallible>("mine")
        }
    }));
    let next = by_voucher(&app, &channel, COST + 300 + COST).await;
    let mine = ask(&app, paid(Request::post("/evaluate?k=1").body(body).unwrap(), &next));
    in_time("its body is waited for", begun.notified()).await;
    let (public, held) = (by_voucher(&app, &channel, 2 * COST).await, Arc::<Held>::default());
    let strangers: Vec<_> = (0..STALLED).map(|_| ask(&app, paid(stalled(&held), &public))).collect();
    eventually("all but the last make room", async || finished(&strangers) == STALLED - 1).await;
    come.close();
    let answer = in_time("it is served", mine).await.unwrap();
    assert_eq!((answer.status, answer.text()), (StatusCode::OK, "mine"), "{answer:?}");
    strangers.iter().for_each(tokio::task::JoinHandle::abort);
}

/// A mebibyte that has arrived, and is counted for as long as somebody holds it.
fn arrived(held: &Arc<Held>) -> Request<Body> {
    let now = held.now.fetch_add(1, Ordering::SeqCst) + 1;
    held.most.fetch_max(now, Ordering::SeqCst);
    let piece = Bytes::from_owner(Piece(vec![7; 1 << 20], held.clone()));
    Request::post("/evaluate?k=1").body(Body::from(piece)).expect("a request")
}

#[tokio::test]
async fn requests_that_wait_with_their_bodies_take_little_memory() {
    let world = World::open().await;
    let (app, go_on) = holding(&world);
    let channel = world.filled(&app).await;
    let customer = Customer::with_funds(&world.chain, 2 * PRICE).await;
    let first = ask(&app, pay(&app, &channel, 2 * COST, None, "held").await);
    let purchase = customer.pay(&app, evaluate("held")).await;
    let work = ask(&app, purchase.on(evaluate("held")));
    eventually("they are worked on", async || world.shop.handled() == 3).await;
    let payment = by_voucher(&app, &channel, 2 * COST).await;
    let held = Arc::<Held>::default();
    let waiting: Vec<_> = (0..32).map(|_| ask(&app, paid(arrived(&held), &payment))).collect();
    eventually("all but one make room", async || finished(&waiting) == 31).await;
    assert!(held.now.load(Ordering::SeqCst) <= 1, "they hold nothing");
    assert!(!first.is_finished() && !work.is_finished());
    go_on.close();
    for answer in [first, work] {
        assert_eq!(in_time("it is served", answer).await.unwrap().status, StatusCode::OK);
    }
}

/// A body that is announced, and of which nothing comes.
struct Announced;

impl http_body::Body for Announced {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        Poll::Pending
    }

    fn size_hint(&self) -> http_body::SizeHint {
        http_body::SizeHint::with_exact(1 << 20)
    }
}

#[tokio::test]
async fn payer_is_given_its_answer_while_others_announce_bodies_for_their_payments() {
    let world = World::open().await;
    let app = world.shop.app(world.layer());
    let channel = world.filled(&app).await;
    let attackers = [world.filled(&app).await, world.filled(&app).await];
    let purchase = Customer::with_funds(&world.chain, PRICE).await.pay(&app, evaluate("first")).await;
    assert_eq!(send(&app, purchase.on(evaluate("first"))).await.status, StatusCode::OK);
    let payments = [by_voucher(&app, &channel, COST).await, purchase.payload()];
    let (come, arrive) = (Arc::new(Semaphore::new(0)), |payment: &serde_json::Value, come: &Arc<Semaphore>| {
        let come = come.clone();
        let body = Body::from_stream(stream::once(async move {
            drop(come.acquire().await);
            Ok::<_, Infallible>("first")
        }));
        ask(&app, paid(Request::post("/evaluate?k=1").body(body).unwrap(), payment))
    });
    let waiting = payments.each_ref().map(|payment| arrive(payment, &come));
    tokio::time::sleep(Duration::from_millis(100)).await;
    let mut strangers = Vec::new();
    for attacker in &attackers {
        let payment = by_voucher(&app, attacker, COST).await;
        for _ in 0..STALLED {
            let request = Request::post("/evaluate?k=1").body(Body::new(Announced)).unwrap();
            strangers.push(ask(&app, paid(request, &payment)));
        }
    }
    eventually("the oldest of each make room", async || finished(&strangers) == 2 * (STALLED - 16)).await;
    come.close();
    for answer in waiting {
        let answer = in_time("it is answered", answer).await.unwrap();
        assert_eq!((answer.status, answer.text()), (StatusCode::OK, "first"), "{answer:?}");
    }
    strangers.iter().for_each(tokio::task::JoinHandle::abort);
}

#[tokio::test]
async fn voucher_above_what_is_in_the_channel_has_no_body_kept() {
    let world = World::open().await;
    let app = world.app.clone();
    let channel = world.filled(&app).await;
    let held = Arc::<Held>::default();
    for (max, code) in [(DEPOSIT + 1, "cumulative_amount_mismatch"), (DEPOSIT + COST, "cumulative_amount_mismatch")] {
        refused(&send(&app, paid(stalled(&held), &by_voucher(&app, &channel, max).await)).await, code);
    }
    assert!(held.most.load(Ordering::SeqCst) <= 1, "and not kept");
}
