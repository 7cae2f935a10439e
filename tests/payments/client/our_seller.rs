//! Our buyer and our seller pay each other by voucher, on a devnet: lost answers, restarts with and without books, lanes, refunds.

use std::{
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use alloy_primitives::{Bytes, U256};
use alloy_signer_local::PrivateKeySigner;
use axum::body::Body;
use futures_util::future::{Either, join, join_all, select};
use http::{Request, Response};
use http_body_util::{BodyExt as _, Full};
use support::{
    authorization::unix_now,
    chain::{Chain, call},
    devnet::DevnetChain,
    escrow::MULTICALL3,
    eventually::{eventually, in_time},
    script::TempPath,
    shop::{App, PRICE, Shop},
};
use tokio::sync::Notify;
use tower::{BoxError, Layer as _, ServiceExt as _, util::BoxCloneSyncService};
use tower_x402::{
    Clock, ManualClock, Network, SystemClock, Usdc,
    channels::{Channels, ClaimPolicy},
    client::{
        AddPaymentError, AddPaymentLayer, Budget, ChannelEntry, ChannelFinding, ChannelPolicy, Journal, Payer,
        PaymentError, PaymentOutcome, Purchase, Receipt, ReceiptExt as _, Refusal, RetryPolicy, finalize_withdrawal,
        initiate_withdrawal, reconcile_channels,
    },
    facilitator::channels::OnchainChannels,
    ledger::{MemoryLedger, channels::ChannelLedger as _},
    server::{ActualPrice, RequirePaymentLayerBuilder},
    vouchers::{AuthorizerKey, Claim, ClaimedVoucher, Escrow, abi::BatchSettlement},
};
use x402_devnet::Devnet;

use super::purchase::Times;

fn usdc(units: u64) -> Usdc {
    Usdc::from_atomic(units)
}

struct Stage {
    chain: DevnetChain,
    shop: Shop,
    authorizer: PrivateKeySigner,
    buyer: PrivateKeySigner,
    /// Told when a handler has begun that waits, and what it waits for.
    begun: Arc<Notify>,
    go_on: Arc<Notify>,
}

impl Stage {
    async fn open() -> Self {
        let chain = DevnetChain::start(None).await;
        let (authorizer, buyer) = (PrivateKeySigner::random(), PrivateKeySigner::random());
        chain.mint(buyer.address(), 1_000 * PRICE).await;
        let shop = Shop::open(&chain).await;
        Self { chain, shop, authorizer, buyer, begun: Arc::default(), go_on: Arc::default() }
    }

    /// A seller with empty books.
    async fn seller(&self) -> (App, Channels) {
        self.seller_with(|layer| layer).await
    }

    async fn seller_with(
        &self,
        settings: impl FnOnce(RequirePaymentLayerBuilder) -> RequirePaymentLayerBuilder,
    ) -> (App, Channels) {
        self.seller_on(Arc::new(MemoryLedger::new()), never(), Arc::new(SystemClock), settings).await
    }

    async fn seller_on(
        &self,
        ledger: Arc<MemoryLedger>,
        policy: ClaimPolicy,
        clock: Arc<dyn Clock>,
        settings: impl FnOnce(RequirePaymentLayerBuilder) -> RequirePaymentLayerBuilder,
    ) -> (App, Channels) {
        let sender = PrivateKeySigner::random();
        self.chain.fund(sender.address(), U256::from(10).pow(U256::from(18))).await;
        let contract = OnchainChannels::builder().network(Network::BASE_SEPOLIA).rpc_url(self.chain.rpc_url());
        let contract = contract.signer(sender).build().await.expect("the contracts are on the devnet");
        let channels = Channels::builder(contract, AuthorizerKey::new(self.authorizer.clone()))
            .ledger(ledger)
            .min_deposit("$0.01")
            .claims(policy)
            .clock(clock.clone())
            .build()
            .expect("complete settings");
        // What a request costs and how it goes is in its body.
        let layer = settings(self.shop.layer().clock(clock).vouchers(channels.clone()));
        let signals = (self.begun.clone(), self.go_on.clone());
        let app = self.shop.app_with(layer, move |_, body| {
            let (begun, go_on) = signals.clone();
            async move {
                let text = std::str::from_utf8(&body).expect("text").to_owned();
                if text == "held" {
                    begun.notify_one();
                    go_on.notified().await;
                }
                if let Some(milliseconds) = text.strip_prefix("slow ") {
                    tokio::time::sleep(Duration::from_millis(milliseconds.parse()?)).await;
                }
                let mut response = Response::new(Body::from(body));
                if let Some(units) = text.strip_prefix("costs ") {
                    response.extensions_mut().insert(ActualPrice(usdc(units.parse()?)));
                }
                if text == "fails" {
                    *response.status_mut() = http::StatusCode::INTERNAL_SERVER_ERROR;
                }
                Ok(response)
            }
        });
        (app, channels)
    }

    fn payer(&self, journal: Journal) -> Payer {
        self.payer_with(journal, ChannelPolicy::new())
    }

    fn payer_with(&self, journal: Journal, policy: ChannelPolicy) -> Payer {
        let budget = Budget::builder().journal(journal).build();
        Payer::builder(self.buyer.clone()).budget(budget).vouchers(policy).build()
    }

    async fn on_chain(&self, channel: &ChannelEntry) -> (u128, u128) {
        let asked = BatchSettlement::channelsCall { channelId: channel.id().digest() };
        let state = call(self.chain.provider(), Escrow::ADDRESS, asked).await.expect("channels answers");
        (state.balance, state.totalClaimed)
    }
}

/// Claims nothing unless it is told to.
fn never() -> ClaimPolicy {
    ClaimPolicy::default().amount(Usdc::MAX).age(Duration::from_secs(u64::MAX >> 1))
}

type Bought = Result<(u16, Receipt, String), PaymentError>;

async fn try_buy(app: &App, payer: &Payer, body: &str) -> Bought {
    let retry = RetryPolicy::default().first_pause(Duration::from_millis(5)).max_attempts(3);
    let http = app.clone().map_request(|request: Request<String>| request.map(Body::from));
    let client = AddPaymentLayer::new(payer.clone()).retry(retry).layer(http);
    let request = Request::post("http://shop.example/evaluate").body(body.to_owned()).unwrap();
    match client.oneshot(request).await {
        Ok(response) => {
            let (status, receipt) = (response.status().as_u16(), response.receipt().expect("a receipt").clone());
            let body = axum::body::to_bytes(Body::new(response.into_body()), 1 << 20).await.unwrap();
            Ok((status, receipt, String::from_utf8(body.to_vec()).unwrap()))
        }
        Err(AddPaymentError::Payment(error)) => Err(error),
        Err(error) => panic!("{error}"),
    }
}

/// Buys an answer with a client that gives up after three attempts, as a part of a purchase.
async fn try_purchase(app: &App, payer: &Payer, purchase: Option<&Purchase>) -> Option<(u16, Receipt)> {
    try_purchase_of("mine", app, payer, purchase).await
}

async fn try_purchase_of(body: &str, app: &App, payer: &Payer, purchase: Option<&Purchase>) -> Option<(u16, Receipt)> {
    let retry = RetryPolicy::default().first_pause(Duration::from_millis(5)).max_attempts(3);
    let http = app.clone().map_request(|request: Request<String>| request.map(Body::from));
    let mut request = Request::post("http://shop.example/evaluate").body(body.to_owned()).unwrap();
    if let Some(purchase) = purchase {
        request.extensions_mut().insert(purchase.clone());
    }
    let response = AddPaymentLayer::new(payer.clone()).retry(retry).layer(http).oneshot(request).await.ok()?;
    Some((response.status().as_u16(), response.receipt().expect("a receipt").clone()))
}

#[tokio::test]
async fn purchase_by_voucher_is_charged_once_whoever_repeats_it() {
    let kinds: [fn() -> Option<Purchase>; 3] =
        [|| None, || Some(Purchase::new()), || Some(Purchase::named("order 17"))];
    for kind in kinds {
        for (lost, is_repeated_below) in
            [(0, false), (2, false), (3, false), (4, false), (7, false), (3, true), (7, true)]
        {
            let purchase = kind();
            let stage = Stage::open().await;
            let (app, _) = stage.seller().await;
            let payer = stage.payer(Journal::in_memory());
            buy(&app, &payer, "first").await;
            let app = if is_repeated_below { repeating(losing(app, lost)) } else { losing(app, lost) };
            let mut answers = Vec::new();
            for _ in 0..3 {
                answers.extend(try_purchase(&app, &payer, purchase.as_ref()).await);
                // Without a purchase, what comes after an answer is another one.
                if purchase.is_none() && !answers.is_empty() {
                    break;
                }
            }
            assert!(!answers.is_empty());
            for (status, receipt) in answers {
                assert_eq!((status, receipt.outcome), (200, PaymentOutcome::Accepted), "{purchase:?} {lost}");
                assert_eq!(receipt.amount, usdc(PRICE));
            }
            assert_eq!(stage.shop.handled(), 2, "{purchase:?} {lost}");
            assert_eq!((channel(&payer).charged, channel(&payer).doubt), (usdc(2 * PRICE), Usdc::ZERO));
        }
    }
}

#[tokio::test]
async fn named_purchase_by_voucher_is_charged_once_over_restarts() {
    for (lost, others) in [(0, 0), (0, 1), (0, 2), (3, 0), (3, 1), (3, 2)] {
        let case = format!("{lost} answers lost, then {others} other purchases");
        let (stage, path, order) = (Stage::open().await, TempPath::new("named"), Purchase::named("order 17"));
        let (app, _) = stage.seller().await;
        let payer = stage.payer(Journal::open(&path.0).unwrap());
        buy(&app, &payer, "first").await;
        assert_eq!(try_purchase(&losing(app.clone(), lost), &payer, Some(&order)).await.is_some(), lost == 0);
        drop(payer);
        for life in 1..=2 {
            let payer = stage.payer(Journal::open(&path.0).unwrap());
            if life == 1 {
                for n in 0..others {
                    buy(&app, &payer, &format!("other {n}")).await;
                }
            }
            for _ in 0..2 {
                let (status, receipt) = try_purchase(&app, &payer, Some(&order)).await.expect("an answer");
                assert_eq!((status, receipt.outcome), (200, PaymentOutcome::Accepted), "{case}: {receipt:?}");
                assert_eq!(receipt.amount, usdc(PRICE), "{case}");
                assert_eq!(receipt.channel.expect("it is by voucher").finding, None, "{case}");
            }
            assert_eq!(stage.shop.handled(), 2 + others, "{case}");
            assert_eq!(channel(&payer).charged, usdc((2 + others) * PRICE), "{case}");
        }
    }
}

#[tokio::test]
async fn named_purchase_is_asked_for_in_the_channel_that_paid_for_it() {
    let (stage, path, order) = (Stage::open().await, TempPath::new("lanes"), Purchase::named("order 17"));
    let (app, _) = stage.seller().await;
    let open = || stage.payer_with(Journal::open(&path.0).unwrap(), ChannelPolicy::new().lanes(2));
    {
        let payer = open();
        let order = async {
            in_time("the first channel is in use", stage.begun.notified()).await;
            assert!(try_purchase(&losing(app.clone(), 3), &payer, Some(&order)).await.is_none());
            stage.go_on.notify_one();
        };
        let (held, ()) = join(try_buy(&app, &payer, "held"), order).await;
        assert_eq!(held.unwrap().0, 200);
    }
    let payer = open();
    for _ in 0..2 {
        let (status, receipt) = try_purchase(&app, &payer, Some(&order)).await.expect("an answer");
        assert_eq!((status, receipt.outcome, receipt.amount), (200, PaymentOutcome::Accepted, usdc(PRICE)));
        let charged: Vec<_> = payer.budget().journal().channels().iter().map(|channel| channel.charged).collect();
        assert_eq!((charged, stage.shop.handled()), (vec![usdc(PRICE); 2], 2));
    }
}

/// It says nothing about another request that may have been charged since, nor about a deposit that came with that.
#[tokio::test]
async fn free_answer_that_is_given_again_leaves_another_request_in_doubt() {
    let cases = [("one of many", 50), ("its deposit is unclear, too", 2)];
    for (case, deposit) in cases {
        let (stage, path, order) = (Stage::open().await, TempPath::new("free"), Purchase::named("order 17"));
        let (app, _) = stage.seller_with(|layer| layer.price("$0.005")).await;
        let open = || {
            stage.payer_with(Journal::open(&path.0).unwrap(), ChannelPolicy::new().deposit(usdc(deposit * 5 * PRICE)))
        };
        let payer = open();
        assert_eq!(buy(&app, &payer, "costs 5000").await, 5 * PRICE, "{case}");
        let free = try_purchase_of("costs 0", &app, &payer, Some(&order)).await.expect("an answer");
        assert_eq!((free.0, free.1.amount), (200, Usdc::ZERO), "{case}");
        if deposit == 2 {
            assert_eq!(buy(&app, &payer, "costs 5000").await, 5 * PRICE, "{case}");
        }
        assert!(try_purchase(&losing(app.clone(), 3), &payer, None).await.is_none());
        drop(payer);
        let payer = open();
        let before = channel(&payer);
        assert_eq!(before.doubt, usdc(5 * PRICE), "{case}");
        assert_eq!(before.pending.is_some(), deposit == 2, "{case}");
        let free = try_purchase_of("costs 0", &app, &payer, Some(&order)).await.expect("an answer");
        assert_eq!((free.0, free.1.outcome, free.1.amount), (200, PaymentOutcome::Accepted, Usdc::ZERO), "{case}");
        assert_eq!((channel(&payer).doubt, channel(&payer).pending), (before.doubt, before.pending), "{case}");
        let (status, receipt, _) = try_buy(&app, &payer, "costs 1000").await.unwrap();
        assert_eq!((status, receipt.outcome, receipt.amount), (200, PaymentOutcome::Accepted, usdc(PRICE)), "{case}");
        assert_eq!(receipt.channel.expect("it is by voucher").finding, None, "{case}");
    }
}

/// The seller takes both schemes. What may have been charged in a channel is bought by no transfer.
#[tokio::test]
async fn named_purchase_whose_deposit_is_unclear_is_not_paid_by_another_scheme() {
    let (stage, path, order) = (Stage::open().await, TempPath::new("schemes"), Purchase::named("order 17"));
    let (app, _) = stage.seller().await;
    let first = stage.payer(Journal::open(&path.0).unwrap());
    assert!(try_purchase(&losing(app.clone(), 3), &first, Some(&order)).await.is_none());
    let valid_before = channel(&first).pending.expect("it is unclear").valid_before;
    drop(first);
    // No other deposit can be signed at first; the answer needs none.
    for now in [valid_before - 5, valid_before + 61] {
        let budget = Budget::builder().journal(Journal::open(&path.0).unwrap()).build();
        let payer = Payer::builder(stage.buyer.clone()).budget(budget).vouchers(ChannelPolicy::new());
        let payer = payer.clock(Arc::new(ManualClock::at(now))).build();
        let (status, receipt) = try_purchase(&app, &payer, Some(&order)).await.expect("an answer");
        assert_eq!((status, receipt.amount, receipt.is_by_voucher()), (200, usdc(PRICE), true));
        assert_eq!((payer.budget().spent(), stage.shop.handled()), (usdc(PRICE), 1));
    }
}

#[tokio::test]
async fn named_purchase_is_answered_again_whatever_it_would_cost_now() {
    let (stage, path, order) = (Stage::open().await, TempPath::new("price"), Purchase::named("order 17"));
    let ledger = Arc::new(MemoryLedger::new());
    let seller = async |price: &str| {
        let clock = Arc::new(SystemClock);
        stage.seller_on(ledger.clone(), never(), clock, |layer| layer.price(price)).await.0
    };
    let (dear, cheap) = (seller("$0.001").await, seller("$0.0006").await);
    let first = stage.payer(Journal::open(&path.0).unwrap());
    assert!(try_purchase(&losing(dear, 3), &first, Some(&order)).await.is_none());
    drop(first);
    let payer = stage.payer(Journal::open(&path.0).unwrap());
    for _ in 0..2 {
        let (status, receipt) = try_purchase(&cheap, &payer, Some(&order)).await.expect("an answer");
        assert_eq!((status, receipt.outcome, receipt.amount), (200, PaymentOutcome::Accepted, usdc(PRICE)));
        assert_eq!(receipt.channel.expect("it is by voucher").finding, None);
        assert_eq!((channel(&payer).charged, stage.shop.handled()), (usdc(PRICE), 1));
    }
}

/// Asking for the answer costs nothing, so no limit forbids it. Nothing is bought at the new price.
#[tokio::test]
async fn named_purchase_is_answered_again_at_a_price_above_the_limit_per_payment() {
    let (stage, path, order) = (Stage::open().await, TempPath::new("limit"), Purchase::named("order 17"));
    let seller = async |ledger: &Arc<MemoryLedger>, price: &str| {
        let clock = Arc::new(SystemClock);
        stage.seller_on(ledger.clone(), never(), clock, |layer| layer.price(price)).await.0
    };
    let open = || {
        let budget = Budget::builder().per_payment(usdc(PRICE)).journal(Journal::open(&path.0).unwrap()).build();
        Payer::builder(stage.buyer.clone()).budget(budget).vouchers(ChannelPolicy::new()).build()
    };
    let ledger = Arc::new(MemoryLedger::new());
    let (cheap, dear) = (seller(&ledger, "$0.001").await, seller(&ledger, "$0.002").await);
    assert!(try_purchase(&losing(cheap, 3), &open(), Some(&order)).await.is_none());
    // The deposit is unclear at first; then there is money for another voucher.
    for _ in 0..2 {
        let payer = open();
        let (status, receipt) = try_purchase(&dear, &payer, Some(&order)).await.expect("an answer");
        assert_eq!((status, receipt.outcome, receipt.amount), (200, PaymentOutcome::Accepted, usdc(PRICE)));
        assert_eq!(receipt.channel.expect("it is by voucher").finding, None);
        assert_eq!((channel(&payer).charged, stage.shop.handled()), (usdc(PRICE), 1));
        let other = try_buy(&dear, &payer, "other").await.unwrap_err();
        assert!(matches!(other, PaymentError::Refused(Refusal::AbovePaymentLimit { .. })), "{other:?}");
    }
    // A seller that does not know it asks for the new price.
    let forgetful = seller(&Arc::new(MemoryLedger::new()), "$0.002").await;
    let payer = open();
    let (status, receipt) = try_purchase(&forgetful, &payer, Some(&order)).await.expect("an answer");
    assert_eq!((status, receipt.outcome, stage.shop.handled()), (402, PaymentOutcome::Failed, 1));
    assert_eq!(channel(&payer).signed.expect("a voucher").signed_max_claimable, PRICE.into());
}

/// The seller remembers the answers to the last four requests of a channel, and the journal the channel of its last eight named purchases.
#[tokio::test]
async fn named_purchase_that_the_seller_has_forgotten_is_bought_again_by_a_process_that_asks_for_it() {
    for (others, runs) in [(3, 1), (4, 2), (8, 2)] {
        let (stage, path, order) = (Stage::open().await, TempPath::new("forgotten"), Purchase::named("order 17"));
        let (app, _) = stage.seller().await;
        {
            let payer = stage.payer(Journal::open(&path.0).unwrap());
            assert_eq!(try_purchase(&app, &payer, Some(&order)).await.expect("an answer").0, 200);
            for n in 0..others {
                let other = Purchase::named(format!("other {n}"));
                assert_eq!(try_purchase(&app, &payer, Some(&other)).await.expect("an answer").0, 200);
            }
            // This process has the voucher, and presents no other one.
            let (status, receipt) = try_purchase(&app, &payer, Some(&order)).await.expect("an answer");
            let expected = if runs == 1 { 200 } else { 402 };
            assert_eq!((status, receipt.outcome), (expected, PaymentOutcome::Accepted), "{others} others");
            assert_eq!(channel(&payer).charged, usdc((1 + others) * PRICE));
        }
        let payer = stage.payer(Journal::open(&path.0).unwrap());
        for _ in 0..2 {
            let (status, receipt) = try_purchase(&app, &payer, Some(&order)).await.expect("an answer");
            assert_eq!((status, receipt.amount), (200, usdc(PRICE)), "{others} others");
            assert_eq!(channel(&payer).charged, usdc((runs + others) * PRICE), "{others} others");
            assert_eq!(stage.shop.handled(), runs + others);
        }
    }
}

/// The answer to the last request that the channel paid for is lost, and there is no money for another one.
#[tokio::test]
async fn named_purchase_is_answered_again_although_no_money_is_left() {
    let (stage, order) = (Stage::open().await, Purchase::named("order 17"));
    let (app, _) = stage.seller().await;
    let poor = PrivateKeySigner::random();
    stage.chain.mint(poor.address(), 10 * PRICE).await;
    let budget = Budget::builder().journal(Journal::in_memory()).build();
    let policy = ChannelPolicy::new().deposit(usdc(10 * PRICE));
    let payer = Payer::builder(poor).budget(budget).vouchers(policy).build();
    for n in 0..9 {
        buy(&app, &payer, &format!("request {n}")).await;
    }
    assert!(try_purchase(&losing(app.clone(), 3), &payer, Some(&order)).await.is_none());
    // The next request learns that the lost one was charged, and cannot be paid for.
    assert_ne!(try_buy(&app, &payer, "other").await.map_or(402, |(status, ..)| status), 200);
    assert_eq!(channel(&payer).charged, usdc(10 * PRICE));
    let (status, receipt) = try_purchase(&app, &payer, Some(&order)).await.expect("an answer");
    assert_eq!((status, receipt.amount), (200, usdc(PRICE)), "{receipt:?}");
    assert_eq!(stage.shop.handled(), 10);
}

/// Buys an answer, and returns what it cost.
async fn buy(app: &App, payer: &Payer, body: &str) -> u64 {
    let (status, receipt, text) = try_buy(app, payer, body).await.unwrap();
    assert_eq!((status, receipt.outcome, text.as_str()), (200, PaymentOutcome::Accepted, body), "{receipt:?}");
    receipt.amount.atomic()
}

#[track_caller]
fn channel(payer: &Payer) -> ChannelEntry {
    let mut channels = payer.budget().journal().channels();
    assert_eq!(channels.len(), 1, "{channels:?}");
    channels.remove(0)
}

/// A connection that loses the first answers to paid requests, after the seller has given them.
fn losing(app: App, answers: u64) -> App {
    let left = Arc::new(AtomicU64::new(answers));
    BoxCloneSyncService::new(tower::service_fn(move |request: Request<Body>| {
        let (app, left) = (app.clone(), left.clone());
        async move {
            let is_paid = request.headers().contains_key("payment-signature");
            let response = app.oneshot(request).await?;
            let lose = |left: u64| (is_paid && left > 0).then(|| left - 1);
            match left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, lose) {
                Ok(_) => Err::<_, BoxError>("the connection broke".into()),
                Err(_) => Ok(response),
            }
        }
    }))
}

/// Sends each request up to four times, as a retry layer below the paying one does.
fn repeating(app: App) -> App {
    let repeating = app.map_request(|request: Request<Full<bytes::Bytes>>| request.map(Body::new));
    let repeating = tower::retry::RetryLayer::new(Times(3)).layer(repeating);
    BoxCloneSyncService::new(tower::service_fn(move |request: Request<Body>| {
        let repeating = repeating.clone();
        async move {
            let (parts, body) = request.into_parts();
            let body = Full::from(body.collect().await?.to_bytes());
            repeating.oneshot(Request::from_parts(parts, body)).await
        }
    }))
}

#[tokio::test]
async fn buyer_and_seller_agree_on_every_price() {
    let stage = Stage::open().await;
    let (app, channels) = stage.seller().await;
    let payer = stage.payer(Journal::in_memory());
    for (body, cost) in [("first", PRICE), ("costs 300", 300), ("costs 0", 0), ("last", PRICE)] {
        assert_eq!(buy(&app, &payer, body).await, cost);
    }
    let report = channels.claim_all().await.expect("the devnet claims");
    assert_eq!(report.claimed, 2_300);
    let entry = channel(&payer);
    assert_eq!((entry.charged, stage.on_chain(&entry).await), (usdc(2_300), (10_000, 2_300)));
    let found = reconcile_channels(payer.budget(), stage.chain.provider()).await.unwrap();
    assert_eq!((found.seen, found.escrow, found.findings), (1, usdc(7_700), vec![]));
}

#[tokio::test]
async fn lost_answers_are_given_again_and_charged_once() {
    let stage = Stage::open().await;
    let (app, _) = stage.seller().await;
    let payer = stage.payer(Journal::in_memory());
    // That of the deposit, and that of a voucher.
    for (number, body) in ["one", "two"].into_iter().enumerate() {
        let lossy = losing(app.clone(), 2);
        assert_eq!(buy(&lossy, &payer, body).await, PRICE);
        assert_eq!(
            (stage.shop.handled(), channel(&payer).charged),
            (number as u64 + 1, usdc((number as u64 + 1) * PRICE))
        );
    }
    assert_eq!(stage.on_chain(&channel(&payer)).await, (10_000, 0));
}

#[tokio::test]
async fn request_given_up_is_learned_from_the_seller_by_the_next() {
    let stage = Stage::open().await;
    let (app, channels) = stage.seller().await;
    let payer = stage.payer(Journal::in_memory());
    buy(&app, &payer, "first").await;
    let error = try_buy(&losing(app.clone(), 3), &payer, "given up").await.unwrap_err();
    assert_eq!(error.outcome(), PaymentOutcome::Unknown);
    assert_eq!((channel(&payer).charged, channel(&payer).doubt), (usdc(PRICE), usdc(PRICE)));
    assert_eq!(buy(&app, &payer, "next").await, PRICE);
    assert_eq!((channel(&payer).charged, channel(&payer).doubt), (usdc(3 * PRICE), Usdc::ZERO));
    assert_eq!(channels.claim_all().await.unwrap().claimed, 3_000);
    assert_eq!(payer.budget().spent(), usdc(3 * PRICE));
}

/// An earlier request was charged, and the first attempt of this one has no answer. What the seller has more than the books is the other's.
#[tokio::test]
async fn charge_of_an_earlier_request_does_not_pay_for_one_without_an_answer() {
    let (stage, path) = (Stage::open().await, TempPath::new("earlier"));
    let (app, _) = stage.seller().await;
    let payer = stage.payer(Journal::open(&path.0).unwrap());
    buy(&app, &payer, "first").await;
    assert!(try_buy(&losing(app.clone(), 3), &payer, "lost").await.is_err());
    drop(payer);
    let payer = stage.payer(Journal::open(&path.0).unwrap());
    assert_eq!(buy(&losing(app.clone(), 1), &payer, "next").await, PRICE);
    assert_eq!((channel(&payer).charged, stage.shop.handled()), (usdc(3 * PRICE), 3));
}

#[tokio::test]
async fn failed_work_is_not_charged() {
    let stage = Stage::open().await;
    let (app, channels) = stage.seller().await;
    let payer = stage.payer(Journal::in_memory());
    let (status, receipt, _) = try_buy(&app, &payer, "fails").await.unwrap();
    assert_eq!((status, receipt.amount), (500, Usdc::ZERO), "the deposit was made");
    assert_eq!(stage.on_chain(&channel(&payer)).await, (10_000, 0));
    let (status, receipt, _) = try_buy(&app, &payer, "fails").await.unwrap();
    assert_eq!(status, 500, "{receipt:?}");
    assert_eq!(buy(&app, &payer, "works").await, PRICE);
    assert_eq!(channels.claim_all().await.unwrap().claimed, 1_000);
    assert_eq!((payer.budget().spent(), payer.budget().reserved()), (usdc(1_000), usdc(9_000)));
}

#[tokio::test]
async fn buyer_that_lost_its_journal_and_seller_that_lost_its_books_go_on() {
    let stage = Stage::open().await;
    let (app, channels) = stage.seller().await;
    let payer = stage.payer(Journal::in_memory());
    for body in ["one", "two", "three"] {
        buy(&app, &payer, body).await;
    }
    let restarted = stage.payer(Journal::in_memory());
    assert_eq!(buy(&app, &restarted, "four").await, PRICE);
    assert_eq!((channel(&restarted).opening, channel(&restarted).charged), (usdc(3_000), usdc(4_000)));

    // What it had not claimed is lost to the seller.
    channels.claim_all().await.unwrap();
    assert_eq!(buy(&app, &restarted, "five").await, PRICE);
    let (forgetful, _) = stage.seller().await;
    let next = try_buy(&forgetful, &restarted, "six").await.unwrap();
    if next.0 == 402 {
        // It proves nothing, so the chain is asked.
        assert_eq!(next.1.channel.unwrap().finding, Some(ChannelFinding::Unproven));
        reconcile_channels(restarted.budget(), stage.chain.provider()).await.unwrap();
        assert_eq!(buy(&forgetful, &restarted, "six").await, PRICE);
    }
    assert_eq!(channel(&restarted).charged, usdc(5_000), "five was never claimed");
}

/// Whoever showed an old voucher may have read it in the claim. The payer has a deposit that nobody else can sign.
#[tokio::test]
async fn buyer_that_lost_its_journal_goes_on_after_a_claim() {
    for cost in [PRICE, 300] {
        let stage = Stage::open().await;
        let (app, channels) = stage.seller().await;
        let payer = stage.payer(Journal::in_memory());
        let asked = format!("costs {cost}");
        for _ in 0..3 {
            buy(&app, &payer, &asked).await;
        }
        channels.claim_all().await.unwrap();
        buy(&app, &payer, &asked).await;
        let restarted = stage.payer(Journal::in_memory());
        assert_eq!(buy(&app, &restarted, &asked).await, cost);
        assert_eq!((channel(&restarted).opening, channel(&restarted).charged), (usdc(4 * cost), usdc(5 * cost)));
        channels.claim_all().await.unwrap();
        reconcile_channels(restarted.budget(), stage.chain.provider()).await.unwrap();
        assert_eq!(buy(&app, &restarted, &asked).await, cost);
    }
}

/// Its first request did not come through, and the chain does not show what was charged since the last claim.
#[tokio::test]
async fn buyer_that_lost_its_journal_may_ask_the_chain_before_it_buys() {
    for cost in [PRICE, 300] {
        let stage = Stage::open().await;
        let (app, channels) = stage.seller().await;
        let payer = stage.payer(Journal::in_memory());
        let asked = format!("costs {cost}");
        for _ in 0..3 {
            buy(&app, &payer, &asked).await;
        }
        channels.claim_all().await.unwrap();
        // More than the request that breaks may explain.
        for _ in 0..4 {
            buy(&app, &payer, &asked).await;
        }
        let restarted = stage.payer(Journal::in_memory());
        let offering = app.clone();
        let broken = BoxCloneSyncService::new(tower::service_fn(move |request: Request<Body>| {
            let offering = offering.clone();
            async move {
                match request.headers().contains_key("payment-signature") {
                    true => Err::<_, BoxError>("the connection broke".into()),
                    false => offering.oneshot(request).await,
                }
            }
        }));
        assert!(try_buy(&broken, &restarted, &asked).await.is_err());
        reconcile_channels(restarted.budget(), stage.chain.provider()).await.unwrap();
        assert_eq!(buy(&app, &restarted, &asked).await, cost);
        let entry = channel(&restarted);
        // A claim up to the voucher of the request that broke may be of that.
        let own = if 3 * cost <= PRICE { 3 * cost } else { 0 };
        assert_eq!((entry.opening, entry.charged, entry.dispute()), (usdc(7 * cost - own), usdc(8 * cost), None));
        channels.claim_all().await.unwrap();
        let found = reconcile_channels(restarted.budget(), stage.chain.provider()).await.unwrap();
        assert_eq!(found.findings, []);
        assert_eq!(buy(&app, &restarted, &asked).await, cost);
    }
}

/// The seller shows no voucher to whoever presents one that was in a claim. The buyer's books say what the lost answer may have cost.
#[tokio::test]
async fn buyer_that_lost_an_answer_after_a_claim_is_refunded() {
    let stage = Stage::open().await;
    let (app, channels) = stage.seller().await;
    let payer = stage.payer(Journal::in_memory());
    buy(&app, &payer, "first").await;
    channels.claim_all().await.unwrap();
    assert!(try_buy(&losing(app.clone(), 3), &payer, "costs 300").await.is_err());
    let id = channel(&payer).id();
    let mut refund = payer.refund(id, None).await.unwrap().expect("something is left");
    loop {
        let request = Request::post("http://shop.example/evaluate").header(refund.header_name(), refund.header());
        let answer = app.clone().oneshot(request.body(Body::empty()).unwrap()).await.unwrap();
        if !refund.answered(answer.status(), answer.headers()).await.unwrap() {
            break;
        }
    }
    let refund = refund.conclude().await;
    assert_eq!((refund.amount, &refund.reason), (usdc(10_000 - PRICE - 300), &None), "{refund:?}");
    assert_eq!(stage.on_chain(&channel(&payer)).await, (1_300, 1_300));
}

#[tokio::test]
async fn requests_at_once_are_as_fast_as_the_work() {
    let stage = Stage::open().await;
    let (app, channels) = stage.seller().await;
    let policy = ChannelPolicy::new().lanes(16).escrow_per_payee(usdc(1_000_000)).escrow_total(usdc(1_000_000));
    let payer = stage.payer_with(Journal::in_memory(), policy);
    let buy_16 = async |body: &str| join_all((0..16).map(|_| buy(&app, &payer, body))).await;
    assert_eq!(buy_16("slow 1").await, [PRICE; 16]);
    assert_eq!(payer.budget().journal().channels().len(), 16);
    let started = Instant::now();
    assert_eq!(buy_16("slow 1000").await, [PRICE; 16]);
    let took = started.elapsed();
    assert!(took < Duration::from_millis(2_000), "one after the other they take 16 s, together they took {took:?}");
    assert_eq!(payer.budget().spent(), usdc(32 * PRICE));
    assert_eq!(channels.claim_all().await.unwrap().claimed, 32_000);
}

#[tokio::test]
async fn channel_that_a_lost_request_holds_is_left_for_another_lane() {
    let stage = Stage::open().await;
    let (app, channels) = stage.seller_with(|layer| layer.max_wait(Duration::from_millis(20))).await;
    let clock = Arc::new(ManualClock::at(unix_now()));
    let budget = Budget::builder().build();
    let policy = ChannelPolicy::new().lanes(2);
    let payer = Payer::builder(stage.buyer.clone()).budget(budget).vouchers(policy).clock(clock.clone()).build();
    buy(&app, &payer, "first").await;
    let first = channel(&payer).id();
    // The buyer gives up while the handler works.
    {
        let held = pin!(try_buy(&app, &payer, "held"));
        let begun = pin!(in_time("the handler has begun", stage.begun.notified()));
        assert!(matches!(select(held, begun).await, Either::Right(_)));
    }
    let lanes = || {
        let channels = payer.budget().journal().channels().into_iter();
        let (busy, others): (Vec<_>, Vec<_>) = channels.partition(|entry| entry.id() == first);
        [busy, others].map(|lane| lane.iter().map(|entry| (entry.charged, entry.doubt)).collect::<Vec<_>>())
    };
    assert_eq!(lanes(), [vec![(usdc(PRICE), usdc(PRICE))], vec![]]);
    // The same request stays where the seller knows it.
    let (status, receipt, _) = try_buy(&app, &payer, "held").await.unwrap();
    assert_eq!((status, receipt.outcome), (402, PaymentOutcome::Unknown), "{receipt:?}");
    assert_eq!(lanes(), [vec![(usdc(PRICE), usdc(PRICE))], vec![]]);
    for (body, total) in [("second", PRICE), ("third", 2 * PRICE)] {
        assert_eq!(buy(&app, &payer, body).await, PRICE);
        assert_eq!(lanes(), [vec![(usdc(PRICE), usdc(PRICE))], vec![(usdc(total), Usdc::ZERO)]]);
    }

    // The lost request is charged after all, and the next one of its channel learns it.
    stage.go_on.notify_one();
    in_time("the lost request is charged", async {
        while channels.ledger().channel(&first).await.unwrap().unwrap().charged() < u128::from(2 * PRICE) {
            tokio::task::yield_now().await;
        }
    })
    .await;
    clock.advance(30);
    assert_eq!(buy(&app, &payer, "fourth").await, PRICE);
    assert_eq!(lanes(), [vec![(usdc(3 * PRICE), Usdc::ZERO)], vec![(usdc(2 * PRICE), Usdc::ZERO)]]);
    assert_eq!(channels.claim_all().await.unwrap().claimed, u128::from(5 * PRICE));
    assert_eq!((payer.budget().spent(), stage.shop.handled()), (usdc(5 * PRICE), 5));
}

#[tokio::test]
async fn few_lanes_carry_many_requests_and_none_is_refused() {
    let stage = Stage::open().await;
    let (app, channels) = stage.seller().await;
    let payer = stage.payer_with(Journal::in_memory(), ChannelPolicy::new().lanes(3));
    let bought = join_all((0..40).map(|number| {
        let (app, payer) = (app.clone(), payer.clone());
        async move { buy(&app, &payer, &format!("costs {}", number * 25)).await }
    }))
    .await;
    let total: u64 = bought.iter().sum();
    assert_eq!(total, (0..40).map(|number| number * 25).sum::<u64>());
    assert_eq!(payer.budget().journal().channels().len(), 3);
    assert_eq!(channels.claim_all().await.unwrap().claimed, total.into());
    assert_eq!(payer.budget().spent(), usdc(total));
}

#[tokio::test]
async fn deposit_whose_answer_is_lost_is_found_on_the_chain_and_counted_once() {
    let stage = Stage::open().await;
    let (app, _) = stage.seller().await;
    let payer = stage.payer(Journal::in_memory());
    try_buy(&losing(app, 3), &payer, "lost").await.unwrap_err();
    assert!(channel(&payer).pending.is_some());
    reconcile_channels(payer.budget(), stage.chain.provider()).await.unwrap();
    let entry = channel(&payer);
    assert_eq!((entry.pending.is_some(), entry.escrow, payer.budget().reserved()), (false, usdc(10_000), usdc(10_000)));
}

#[tokio::test]
async fn channels_in_use_are_counted_and_left_alone() {
    let stage = Stage::open().await;
    let (app, _) = stage.seller().await;
    let payer = stage.payer(Journal::in_memory());
    join_all(["slow 50", "slow 51"].map(|body| buy(&app, &payer, body))).await;
    let id = payer.budget().journal().channels()[0].id();
    let refund = payer.refund(id, None).await.unwrap().expect("something is left");
    let found = reconcile_channels(payer.budget(), stage.chain.provider()).await.unwrap();
    assert_eq!((found.seen, found.in_use), (1, 1));
    drop(refund);
    let found = reconcile_channels(payer.budget(), stage.chain.provider()).await.unwrap();
    assert_eq!((found.seen, found.in_use), (2, 0));
}

/// The node does answer. What is missing comes with newer blocks.
#[tokio::test]
async fn chain_whose_final_block_lacks_the_contracts_is_named_as_young() {
    let stage = Stage::open().await;
    let (app, _) = stage.seller().await;
    let payer = stage.payer(Journal::in_memory());
    buy(&app, &payer, "first").await;
    let young = Devnet::start().await.unwrap();
    young.set_code(MULTICALL3, Bytes::new());
    let error = reconcile_channels(payer.budget(), &young.provider()).await.unwrap_err();
    assert!(error.to_string().contains("young chain"), "{error}");
    assert_eq!(channel(&payer).dispute(), None);
}

#[tokio::test]
async fn over_claim_is_found_and_ends_the_channel() {
    let stage = Stage::open().await;
    let (app, _) = stage.seller().await;
    let payer = stage.payer(Journal::in_memory());
    buy(&app, &payer, "first").await;
    buy(&app, &payer, "costs 300").await;
    // It claims the ceiling of the last voucher: a stranger may have paid with the rest.
    claim_ceiling(&stage, &channel(&payer)).await;
    let found = reconcile_channels(payer.budget(), stage.chain.provider()).await.unwrap();
    let finding = ChannelFinding::ChargedTheRest { charged: usdc(700) };
    assert_eq!(found.findings, [(channel(&payer).id(), finding)]);
    assert_eq!((payer.budget().spent(), channel(&payer).dispute()), (usdc(2_000), None));
    // It claims the ceiling of a voucher that it refused.
    let (status, ..) = try_buy(&app, &payer, "fails").await.unwrap();
    assert_eq!(status, 500);
    claim_ceiling(&stage, &channel(&payer)).await;
    let found = reconcile_channels(payer.budget(), stage.chain.provider()).await.unwrap();
    // The seller's books start from 1300, and the answer leaves 1000 more in doubt.
    let finding = ChannelFinding::ClaimedTooMuch { claimed: usdc(3_000), charged: usdc(2_300) };
    assert_eq!(found.findings, [(channel(&payer).id(), finding)]);
    // The channel is not used any more; the seller takes `exact`, too.
    let (status, receipt, _) = try_buy(&app, &payer, "more").await.unwrap();
    assert_eq!((status, receipt.channel), (200, None));
}

/// Claims all that the payer signed for.
async fn claim_ceiling(stage: &Stage, entry: &ChannelEntry) {
    let signed = entry.signed.unwrap();
    let row = Claim {
        voucher: ClaimedVoucher { channel: entry.config, max_claimable_amount: signed.signed_max_claimable },
        signature: signed.signature,
        total_claimed: signed.signed_max_claimable,
    };
    let claim = support::escrow::claim_call(&[row], &stage.authorizer);
    let relayer = stage.chain.relayer().await;
    assert!(support::escrow::send(&stage.chain, &relayer, &claim).await.status());
}

#[tokio::test]
async fn payer_withdraws_without_the_seller() {
    let stage = Stage::open().await;
    let (app, channels) = stage.seller().await;
    let payer = stage.payer(Journal::in_memory());
    buy(&app, &payer, "first").await;
    channels.claim_all().await.unwrap();
    let entry = channel(&payer);
    stage.chain.fund(stage.buyer.address(), U256::from(10).pow(U256::from(18))).await;
    let execute = async |transaction: alloy_rpc_types_eth::TransactionRequest| {
        let relayer = support::chain::Relayer::of(&stage.chain.rpc_url(), stage.buyer.clone());
        let (to, data) = (Escrow::ADDRESS, transaction.input.into_input().unwrap());
        relayer.send_with_gas(&stage.chain, to, data, 500_000).await
    };
    let announce = initiate_withdrawal(stage.chain.provider(), &entry).await.unwrap().expect("something is left");
    assert_eq!(announce.from, Some(stage.buyer.address()));
    assert!(execute(announce).await.status());
    stage.chain.set_next_timestamp(unix_now() + 4_000).await;
    assert!(execute(finalize_withdrawal(&entry)).await.status());
    assert_eq!(stage.chain.balance(stage.buyer.address()).await, 999 * PRICE);
    reconcile_channels(payer.budget(), stage.chain.provider()).await.unwrap();
    assert_eq!((payer.budget().spent(), payer.budget().reserved()), (usdc(PRICE), Usdc::ZERO));
    assert_eq!(initiate_withdrawal(stage.chain.provider(), &entry).await.unwrap(), None);
}

#[tokio::test]
async fn refund_comes_back_and_the_seller_keeps_what_it_charged() {
    let stage = Stage::open().await;
    let (app, _) = stage.seller().await;
    let payer = stage.payer(Journal::in_memory());
    buy(&app, &payer, "first").await;
    let id = channel(&payer).id();
    let unpaid = || Request::post("http://shop.example/evaluate");
    let mut refund = payer.refund(id, None).await.unwrap().expect("something is left");
    let request = unpaid().header(refund.header_name(), refund.header()).body(Body::empty()).unwrap();
    let answer = app.clone().oneshot(request).await.unwrap();
    assert!(!refund.answered(answer.status(), answer.headers()).await.unwrap());
    let refund = refund.conclude().await;
    assert_eq!((refund.amount, &refund.reason), (usdc(9_000), &None), "{refund:?}");
    assert_eq!(stage.on_chain(&channel(&payer)).await, (1_000, 1_000));
    assert_eq!(stage.chain.balance(stage.buyer.address()).await, 999 * PRICE);
    assert!(payer.refund(id, None).await.unwrap().is_none(), "nothing is left");
    // Another deposit continues the channel.
    assert_eq!(buy(&app, &payer, "again").await, PRICE);
    assert_eq!(channel(&payer).charged, usdc(2 * PRICE));
}

/// Whoever asks for another part within an hour is told of the last one.
#[tokio::test]
async fn refund_that_is_told_again_is_counted_once() {
    let stage = Stage::open().await;
    let (app, _) = stage.seller().await;
    let payer = stage.payer(Journal::in_memory());
    buy(&app, &payer, "first").await;
    let id = channel(&payer).id();
    let mut told = Vec::new();
    for _ in 0..2 {
        let mut refund = payer.refund(id, Some(usdc(5_000))).await.unwrap().expect("something is left");
        let request = Request::post("http://shop.example/evaluate").header(refund.header_name(), refund.header());
        let answer = app.clone().oneshot(request.body(Body::empty()).unwrap()).await.unwrap();
        assert!(!refund.answered(answer.status(), answer.headers()).await.unwrap());
        told.push(refund.conclude().await);
        assert_eq!(channel(&payer).available(), usdc(4_000), "{told:?}");
    }
    assert_eq!(told[0].transaction, told[1].transaction);
    assert_eq!(stage.on_chain(&channel(&payer)).await.0, 5_000);
}

#[tokio::test]
async fn idle_channels_are_refunded_and_their_buyers_suspect_nobody() {
    const DAY: u64 = 86_400;
    let mut stage = Stage::open().await;
    let (ledger, clock) = (Arc::new(MemoryLedger::new()), Arc::new(ManualClock::at(unix_now())));
    let (app, _) = stage.seller_on(ledger.clone(), never(), clock.clone(), |layer| layer).await;
    let mut buyers = Vec::new();
    for _ in 0..3 {
        stage.buyer = PrivateKeySigner::random();
        stage.chain.mint(stage.buyer.address(), 1_000 * PRICE).await;
        let payer = stage.payer(Journal::in_memory());
        buy(&app, &payer, "costs 100").await;
        buyers.push((channel(&payer).id(), stage.buyer.address(), payer));
    }
    // In the order in which the seller goes through its books: when it has refunded the last one, it has decided on the others.
    buyers.sort_by_key(|(id, ..)| *id);
    let [(_, _, recent), (_, _, poor), (id, address, payer)] = &buyers[..] else { unreachable!("three buyers") };
    buy(&app, payer, "costs 200").await;
    buy(&app, poor, "costs 201").await;
    clock.advance(1);
    buy(&app, recent, "costs 200").await;
    clock.advance(DAY - 1);
    let policy = never().refund_idle(Duration::from_secs(DAY), usdc(9_700));
    let (app, channels) = stage.seller_on(ledger.clone(), policy, clock.clone(), |layer| layer).await;
    eventually("the refund is in the books", async || {
        ledger.channel(id).await.unwrap().unwrap().observed.state.balance == 300
    })
    .await;
    assert_eq!(stage.on_chain(&channel(payer)).await, (300, 300), "claimed and refunded");
    assert_eq!(stage.chain.balance(*address).await, 1_000 * PRICE - 300);
    for kept in [recent, poor] {
        assert_eq!(stage.on_chain(&channel(kept)).await, (10_000, 0));
    }
    let found = reconcile_channels(payer.budget(), stage.chain.provider()).await.unwrap();
    assert_eq!(found.findings, [], "a refund is no over-claim");
    // The buyer's next voucher is refused, and it fills the channel again.
    assert_eq!(buy(&app, payer, "again").await, PRICE);
    assert_eq!((channel(payer).charged, channel(payer).dispute().cloned()), (usdc(300 + PRICE), None));
    assert_eq!(channels.claim_all().await.unwrap().claimed, u128::from(300 + 301 + PRICE));
    let found = reconcile_channels(payer.budget(), stage.chain.provider()).await.unwrap();
    assert_eq!(found.findings, []);
}

#[tokio::test]
async fn payer_in_no_flow_of_exact_pays_by_vouchers() {
    let stage = Stage::open().await;
    let (app, _) = stage.seller().await;
    let budget = Budget::builder().build();
    let payer = Payer::builder(stage.buyer.clone()).budget(budget).flows([]);
    let refused = try_buy(&app, &payer.build(), "first").await.unwrap_err();
    assert!(refused.to_string().contains("flow"), "{refused}");
    let budget = Budget::builder().build();
    let payer = Payer::builder(stage.buyer.clone()).budget(budget).flows([]).vouchers(ChannelPolicy::new()).build();
    let (status, receipt, _) = try_buy(&app, &payer, "first").await.unwrap();
    assert_eq!((status, receipt.channel.is_some()), (200, true));
}
