//! Which requests hold a permit that payers need: none of those who have shown no money, and none that waits.

use std::{
    collections::HashSet,
    convert::Infallible,
    net::SocketAddr,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use alloy_primitives::{Address, B256, Bytes as Signature};
use async_trait::async_trait;
use axum::{Router, body::Body};
use futures_util::future::join_all;
use http::{Request, StatusCode};
use support::{
    chain::Chain as _,
    eventually::{eventually, in_time},
    gated_ledger::{GatedChannels, Held as HeldCalls},
    scripted::{self, Scripted},
    shop::{Answer, App, Customer, PRICE, Purchase, ask, demand, evaluate, paid, send, try_send},
    world::{COST, DEPOSIT, World, by_voucher, pay, voucher},
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
    task::JoinSet,
};
use tower::ServiceExt as _;
use tower_x402::{
    Clock as _, Network,
    channels::Channels,
    facilitator::channels::{
        ChannelError, ChannelFacilitator, Claimed, Executed, OnchainChannels, Settled, SignedRefund,
    },
    ledger::channels::{ChannelLedger as _, ChannelStep},
    payment::Verified,
    vouchers::{AuthorizerKey, ChannelConfig, ChannelId, ChannelObservation, Claim, Deposit, Voucher},
};
use x402_devnet::Fault;

use super::{
    Held, PLACES, ROOM_OF_ONE, STALLED, WAITING_OF_ONE, both_flows, failing_at_bad, finished, holding, holding_with,
    is_submitted, stalled, unfunded, worthless,
};

/// The number of requests without money.
const STRANGERS: usize = 512;

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
    let (stranger, asked) = (scripted::customer(), Arc::<AtomicU64>::default());
    let (counter, address) = (asked.clone(), stranger.from);
    // For as long as the strangers are verified: a node would end it after five seconds, and with it what is tested.
    let facilitator = Scripted::new().verify(move |_, payment| {
        let is_strangers = payment.authorization().from == address;
        counter.fetch_add(u64::from(is_strangers), Ordering::SeqCst);
        async move { if is_strangers { std::future::pending().await } else { Ok(Verified::default()) } }
    });
    let (app, _) = scripted::serve(scripted::layer(&Arc::new(facilitator)).max_concurrent(16), scripted::echo);
    let demanded = demand(&send(&app, evaluate("a")).await);
    let mut strangers = Vec::new();
    for _ in 0..8 {
        let payment = stranger.sign(&demanded, 0);
        strangers.extend((0..3).map(|_| ask(&app, payment.on(evaluate("a")))));
    }
    eventually("the first of each is verified", async || asked.load(Ordering::SeqCst) == 8).await;
    let purchase = scripted::customer().pay(&app, evaluate("paid")).await;
    let answer = send(&app, purchase.on(evaluate("paid"))).await;
    assert_eq!((answer.status, answer.text()), (StatusCode::OK, "paid"), "{answer:?}");
    assert!(strangers.iter().all(|request| !request.is_finished()), "they wait");
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
    // Of many places these are all that the chain is asked for at a time.
    let app = world.shop.app(world.shop.layer().vouchers(channels));
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
