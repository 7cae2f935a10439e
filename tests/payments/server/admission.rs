//! Who has shown no money holds nothing: no permit that payers need, and no memory for a body.

use std::{
    collections::HashSet,
    convert::Infallible,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};

use alloy_primitives::{Address, B256, Bytes as Signature, U256};
use alloy_signer_local::PrivateKeySigner;
use async_trait::async_trait;
use axum::body::Body;
use bytes::Bytes;
use futures_util::future::join_all;
use http::{Request, StatusCode};
use http_body::Frame;
use serde_json::json;
use support::{
    authorization::unix_now,
    chain::Chain as _,
    escrow::Channel,
    eventually::in_time,
    scripted,
    shop::{Answer, App, Customer, PRICE, demand, evaluate, paid, send},
};
use tower_x402::{
    Network,
    channels::Channels,
    devnet::Fault,
    facilitator::channels::{
        ChannelError, ChannelFacilitator, Claimed, Executed, OnchainChannels, Settled, SignedRefund,
    },
    protocol::PaymentFlow,
    server::RequirePaymentLayerBuilder,
    vouchers::{AuthorizerKey, ChannelConfig, ChannelId, ChannelObservation, Claim, Deposit, Voucher},
};

use super::vouchers::{COST, DEPOSIT, Stage, offer, pay, refused, voucher};

/// The number of requests without money, and of requests that may be worked on at once.
const STRANGERS: usize = 512;
const PLACES: usize = 64;

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
struct Stalled {
    held: Arc<Held>,
    begun: bool,
}

impl http_body::Body for Stalled {
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
    let body = Stalled { held: held.clone(), begun: false };
    Request::post("/evaluate?k=1").body(Body::new(body)).expect("a request")
}

/// A channel into which nothing was paid, of a payer that has nothing.
fn unfunded(stage: &Stage, salt: u8) -> Channel {
    let (payer, voucher_key) = (PrivateKeySigner::random(), PrivateKeySigner::random());
    let config = ChannelConfig {
        payer: payer.address(),
        payer_authorizer: voucher_key.address(),
        receiver: stage.shop.pay_to,
        receiver_authorizer: stage.authorizer.address(),
        token: stage.shop.asset.address,
        withdraw_delay: 900,
        salt: B256::repeat_byte(salt),
    };
    Channel { config, payer, voucher_key, authorizer: stage.authorizer.clone() }
}

/// Payments of each kind by payers without money.
async fn worthless(stage: &Stage, app: &App, number: usize) -> serde_json::Value {
    let (channel, customer) = (unfunded(stage, 1), scripted::customer());
    let accepted = offer(app, "a").await;
    let by_voucher = |payload| json!({ "x402Version": 2, "accepted": accepted, "payload": payload });
    let config = channel.config;
    match number % 5 {
        0 => {
            by_voucher(json!({ "type": "voucher", "channelConfig": config, "voucher": voucher(&channel, COST).await }))
        }
        1 => by_voucher(json!({ "type": "refund", "channelConfig": config, "voucher": voucher(&channel, 0).await })),
        2 => {
            let deposit = channel.sign_deposit(&stage.chain, DEPOSIT, unix_now() + 60).await;
            by_voucher(json!({
                "type": "deposit", "channelConfig": config, "voucher": voucher(&channel, COST).await, "deposit": deposit,
            }))
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
    let stage = Stage::open().await;
    let app = stage.shop.app(both_flows(stage.shop.layer()).vouchers(stage.channels.clone()));
    let channel = stage.filled(&app).await;
    let customer = Customer::with_funds(&stage.chain, 100 * PRICE).await;
    let held = Arc::<Held>::default();
    let mut strangers = Vec::new();
    for number in 0..STRANGERS {
        let request = paid(stalled(&held), &worthless(&stage, &app, number).await);
        let app = app.clone();
        strangers.push(tokio::spawn(async move { send(&app, request).await }));
    }
    let handled = stage.shop.handled();
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
        assert_eq!(answer.status, StatusCode::PAYMENT_REQUIRED, "{answer:?}");
    }
    // What a refused client goes on to send is thrown away piece by piece.
    assert!(held.most.load(Ordering::SeqCst) <= 2, "nobody's body is kept who has shown no money");
    assert_eq!(stage.shop.handled() - handled, 12);
}

/// While the first is verified, its copies wait without a place.
#[tokio::test]
async fn copies_of_payments_without_money_take_no_place_of_payers() {
    let stage = Stage::open().await;
    let app = stage.shop.app(stage.shop.layer().max_concurrent(16));
    let (stranger, customer) = (scripted::customer(), Customer::with_funds(&stage.chain, 2 * PRICE).await);
    let purchase = customer.pay(&app, evaluate("paid")).await;
    let demanded = demand(&send(&app, evaluate("a")).await);
    let asked = Arc::<AtomicU64>::default();
    let (counter, address) = (asked.clone(), alloy_primitives::hex::encode(stranger.from));
    stage.chain.devnet.faults().set(move |call| {
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
            let (app, request) = (app.clone(), payment.on(evaluate("a")));
            strangers.push(tokio::spawn(async move { send(&app, request).await }));
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
    let stage = Stage::open().await;
    let channel = stage.filled(&stage.app()).await;
    let sender = PrivateKeySigner::random();
    stage.chain.fund(sender.address(), U256::from(10).pow(U256::from(18))).await;
    let contract = OnchainChannels::builder().network(Network::BASE_SEPOLIA).rpc_url(stage.chain.rpc_url());
    let inner = contract.signer(sender).build().await.expect("the contracts are on the devnet");
    let left = Arc::<AtomicU64>::default();
    let known = HashSet::from([channel.id()]);
    let contract = Selective { inner, known, left: left.clone() };
    let channels = Channels::builder(contract, AuthorizerKey::new(stage.authorizer.clone()))
        .ledger(stage.ledger.clone())
        .min_deposit("$0.01")
        .clock(stage.clock.clone())
        .build()
        .expect("complete settings");
    let app = stage.shop.app(stage.shop.layer().vouchers(channels).max_concurrent(PLACES));
    let mut strangers = Vec::new();
    // All places are taken, and some wait for one.
    for number in 0..PLACES + 8 {
        let request = pay(&app, &unfunded(&stage, number as u8), COST, None, "a").await;
        let app = app.clone();
        strangers.push(tokio::spawn(async move { send(&app, request).await }));
    }
    in_time("all places are taken", async {
        while left.load(Ordering::SeqCst) < PLACES as u64 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
    for (n, later) in [(2, 301), (3, 0)] {
        stage.clock.advance(later);
        let answer = send(&app, pay(&app, &channel, n * COST, None, "known").await).await;
        assert_eq!((answer.status, answer.text()), (StatusCode::OK, "known"), "{answer:?}");
    }
    assert_eq!(left.load(Ordering::SeqCst), PLACES as u64, "no more strangers at once");
    strangers.iter().for_each(tokio::task::JoinHandle::abort);
}

/// What was charged for may have been claimed, with a voucher that is on the chain since.
#[tokio::test]
async fn vouchers_that_were_charged_take_no_permit_of_payers() {
    let stage = Stage::open().await;
    let app = stage.shop.app(stage.shop.layer().vouchers(stage.channels.clone()).max_concurrent(2));
    let channel = stage.filled(&app).await;
    let held = Arc::<Held>::default();
    let public =
        json!({ "type": "voucher", "channelConfig": channel.config, "voucher": voucher(&channel, COST).await });
    let payment = json!({ "x402Version": 2, "accepted": offer(&app, "a").await, "payload": public });
    let copies: Vec<_> = (0..4)
        .map(|_| {
            let (app, request) = (app.clone(), paid(stalled(&held), &payment));
            tokio::spawn(async move { send(&app, request).await })
        })
        .collect();
    in_time("a body is read", async {
        while held.now.load(Ordering::SeqCst) == 0 {
            tokio::task::yield_now().await;
        }
    })
    .await;
    let answer = send(&app, pay(&app, &channel, 2 * COST, None, "mine").await).await;
    assert_eq!((answer.status, answer.text()), (StatusCode::OK, "mine"), "{answer:?}");
    assert!(held.most.load(Ordering::SeqCst) <= 2, "one body at a time");
    copies.iter().for_each(tokio::task::JoinHandle::abort);
}

#[tokio::test]
async fn voucher_above_what_is_in_the_channel_has_no_body_kept() {
    let stage = Stage::open().await;
    let app = stage.app();
    let channel = stage.filled(&app).await;
    let held = Arc::<Held>::default();
    for (max, code) in [(DEPOSIT + 1, "cumulative_amount_mismatch"), (DEPOSIT + COST, "cumulative_amount_mismatch")] {
        let payload =
            json!({ "type": "voucher", "channelConfig": channel.config, "voucher": voucher(&channel, max).await });
        let payment = json!({ "x402Version": 2, "accepted": offer(&app, "a").await, "payload": payload });
        refused(&send(&app, paid(stalled(&held), &payment)).await, code);
    }
    assert!(held.most.load(Ordering::SeqCst) <= 1, "and not kept");
}
