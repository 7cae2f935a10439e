//! A seller that takes vouchers beside `exact`: what they buy, what they do not buy, and what is claimed.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use alloy_primitives::{B256, U256};
use alloy_signer_local::PrivateKeySigner;
use axum::body::Body;
use http::{Request, Response, StatusCode};
use serde_json::{Value, json};
use support::{
    authorization::unix_now,
    chain::{Chain, Relayer},
    devnet::DevnetChain,
    escrow::{Channel, send as execute},
    eventually::in_time,
    faulty_ledger::{Fault, How, faulty_channels},
    rpc_proxy::RpcProxy,
    shop::{Answer, App, Customer, PRICE, Shop, demand, evaluate, paid, send},
};
use tokio::sync::Notify;
use tower_x402::{
    Clock as _, ManualClock, Network, Usdc,
    channels::{Channels, ClaimPolicy, ClaimReport},
    facilitator::{
        NotReady,
        channels::{ChannelError, OnchainChannels},
    },
    ledger::{
        MemoryLedger,
        channels::{ChannelLedger, ChannelStep},
        conformance::channels::observation,
    },
    protocol::Extension,
    server::{
        ActualPrice, BuildError, DeferredPolicy, PriceError, Quote, RequirePaymentLayer, RequirePaymentLayerBuilder,
    },
    vouchers::{AuthorizerKey, ChannelConfig, ChannelState, Deposit, Escrow, Voucher, abi::BatchSettlement},
};

pub(super) const DEPOSIT: u128 = 10_000;
pub(super) const COST: u128 = PRICE as u128;

/// A seller of evaluations on a devnet.
pub(super) struct Stage {
    pub(super) chain: DevnetChain,
    pub(super) shop: Shop,
    pub(super) channels: Channels,
    pub(super) ledger: Arc<MemoryLedger>,
    pub(super) authorizer: PrivateKeySigner,
    /// By which channels become stale.
    pub(super) clock: Arc<ManualClock>,
}

impl Stage {
    pub(super) async fn open() -> Self {
        let chain = DevnetChain::start(None).await;
        let url = chain.rpc_url();
        Self::open_at(chain, &url).await
    }

    async fn open_at_block_time(block_time: Duration) -> Self {
        let chain = DevnetChain::start(Some(block_time)).await;
        let url = chain.rpc_url();
        Self::open_at(chain, &url).await
    }

    pub(super) async fn open_at(chain: DevnetChain, url: &str) -> Self {
        let (authorizer, sender) = (PrivateKeySigner::random(), PrivateKeySigner::random());
        chain.fund(sender.address(), U256::from(10).pow(U256::from(18))).await;
        let ledger = Arc::new(MemoryLedger::new());
        let clock = Arc::new(ManualClock::at(unix_now()));
        let channels = Self::channels(url, &authorizer, sender, ledger.clone(), clock.clone()).await;
        let shop = Shop::open(&chain).await;
        Self { chain, shop, channels, ledger, authorizer, clock }
    }

    pub(super) async fn channels(
        url: &str,
        authorizer: &PrivateKeySigner,
        sender: PrivateKeySigner,
        ledger: Arc<dyn ChannelLedger>,
        clock: Arc<ManualClock>,
    ) -> Channels {
        let contract = OnchainChannels::builder().network(Network::BASE_SEPOLIA).rpc_url(url).signer(sender);
        let contract =
            contract.block_time(Duration::from_millis(100)).build().await.expect("the contracts are on the devnet");
        // Nothing is claimed unless a test says so, or a withdrawal is announced.
        let policy = ClaimPolicy::default().amount(Usdc::from_atomic(u64::MAX)).age(Duration::from_secs(u64::MAX >> 1));
        // Shared, as by several sellers.
        Channels::builder(Arc::new(contract), AuthorizerKey::new(authorizer.clone()))
            .ledger(ledger)
            .min_deposit("$0.01")
            .claims(policy)
            .clock(clock)
            .build()
            .expect("complete settings")
    }

    pub(super) fn app(&self) -> App {
        self.shop.app(self.shop.layer().vouchers(self.channels.clone()))
    }

    pub(super) async fn payer(&self) -> Channel {
        Channel::funded(&self.chain, self.shop.pay_to, &self.authorizer, 100 * PRICE).await
    }

    /// A payer whose channel is filled by its first request, which costs the price.
    pub(super) async fn filled(&self, app: &App) -> Channel {
        let channel = self.payer().await;
        let deposit = channel.sign_deposit(&self.chain, DEPOSIT, unix_now() + 60).await;
        let answer = send(app, pay(app, &channel, COST, Some(&deposit), "first").await).await;
        assert_eq!(answer.status, StatusCode::OK, "{answer:?}");
        channel
    }

    pub(super) async fn charged(&self, channel: &Channel) -> u128 {
        self.ledger.channel(&channel.id()).await.expect("memory").expect("a known channel").charged()
    }
}

/// The offer to pay with vouchers for this request.
pub(super) async fn offer(app: &App, body: &'static str) -> Value {
    let demand = demand(&send(app, evaluate(body)).await);
    let offers = demand["accepts"].as_array().expect("offers");
    offers.iter().find(|offer| offer["scheme"] == "batch-settlement").expect("an offer for vouchers").clone()
}

pub(super) async fn voucher(channel: &Channel, max: u128) -> Voucher {
    Voucher::sign(&Channel::escrow(), channel.id(), max, &channel.voucher_key).await.expect("a local key signs")
}

/// A request that is paid with a voucher for `max`.
pub(super) async fn pay(
    app: &App,
    channel: &Channel,
    max: u128,
    deposit: Option<&Deposit>,
    body: &'static str,
) -> Request<Body> {
    let mut payload = json!({
        "type": "voucher", "channelConfig": channel.config, "voucher": voucher(channel, max).await,
    });
    if let Some(deposit) = deposit {
        payload["type"] = "deposit".into();
        payload["deposit"] = json!(deposit);
    }
    paid(evaluate(body), &json!({ "x402Version": 2, "accepted": offer(app, body).await, "payload": payload }))
}

pub(super) async fn refund(app: &App, channel: &Channel, charged: u128, amount: Option<&str>) -> Answer {
    let mut payload =
        json!({ "type": "refund", "channelConfig": channel.config, "voucher": voucher(channel, charged).await });
    if let Some(amount) = amount {
        payload["amount"] = amount.into();
    }
    let payment = json!({ "x402Version": 2, "accepted": offer(app, "refund").await, "payload": payload });
    send(app, paid(evaluate("refund"), &payment)).await
}

/// What the answer says that the request cost, and what was charged in all.
pub(super) fn told(answer: &Answer) -> (String, String) {
    let settlement = answer.settlement().unwrap_or_else(|| panic!("no PAYMENT-RESPONSE: {answer:?}"));
    assert_eq!(settlement["success"], true, "{settlement}");
    let text = |value: &Value| value.as_str().expect("a decimal string").to_owned();
    let extra = &settlement["extra"];
    (text(&extra["chargedAmount"]), text(&extra["channelState"]["chargedCumulativeAmount"]))
}

pub(super) fn refused(answer: &Answer, code: &str) {
    assert_eq!(answer.status, StatusCode::PAYMENT_REQUIRED, "{answer:?}");
    assert_eq!(answer.reason(), format!("invalid_batch_settlement_evm_{code}"), "{answer:?}");
}

#[tokio::test]
async fn one_deposit_buys_many_answers_and_one_claim_pays_for_them() {
    let stage = Stage::open().await;
    let app = stage.app();
    let channel = stage.payer().await;
    let deposit = channel.sign_deposit(&stage.chain, DEPOSIT, unix_now() + 60).await;

    let first = send(&app, pay(&app, &channel, COST, Some(&deposit), "one").await).await;
    assert_eq!((first.status, first.text()), (StatusCode::OK, "one"), "{first:?}");
    let settlement = first.settlement().unwrap();
    assert_eq!((&settlement["amount"], settlement["transaction"].as_str().unwrap().len()), (&json!("10000"), 66));
    assert_eq!(told(&first), ("1000".into(), "1000".into()));
    for n in 2..=10 {
        let answer = send(&app, pay(&app, &channel, n * COST, None, "more").await).await;
        assert_eq!(answer.status, StatusCode::OK, "{answer:?}");
        assert_eq!(answer.headers["cache-control"], "private");
        assert_eq!(told(&answer), ("1000".into(), (n * COST).to_string()));
        assert_eq!(answer.settlement().unwrap()["transaction"], "");
    }
    assert_eq!(stage.shop.handled(), 10);
    assert_eq!(channel.state(&stage.chain).await, (DEPOSIT, 0), "nothing is claimed yet");
    refused(&send(&app, pay(&app, &channel, 11 * COST, None, "more").await).await, "cumulative_exceeds_balance");

    let report = stage.channels.claim_all().await.expect("the devnet claims");
    assert_eq!((report.claimed, report.settled, report.refused.len()), (DEPOSIT, DEPOSIT, 0));
    assert_eq!(channel.state(&stage.chain).await, (DEPOSIT, DEPOSIT));
    assert_eq!(stage.chain.balance(stage.shop.pay_to).await, 10 * PRICE);
    let again = stage.channels.claim_all().await.expect("there is nothing to do");
    assert_eq!((again.claimed, again.settled), (0, 0));
}

#[tokio::test]
async fn a_claim_that_its_caller_gives_up_goes_on() {
    let stage = Stage::open_at_block_time(Duration::from_millis(20)).await;
    let app = stage.app();
    let channel = stage.filled(&app).await;
    stage.chain.devnet.stall(true);
    let given_up = tokio::time::timeout(Duration::from_millis(200), stage.channels.claim_all()).await;
    assert!(given_up.is_err(), "{given_up:?}");
    let claiming = stage.ledger.channel(&channel.id()).await.unwrap().unwrap().claiming_until;
    assert_eq!(claiming, Some(stage.clock.now() + 180), "no other process claims it meanwhile");
    stage.chain.devnet.stall(false);
    in_time("the claim is in the books", async {
        while stage.ledger.channel(&channel.id()).await.unwrap().unwrap().claiming_until.is_some() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    })
    .await;
    assert_eq!(channel.state(&stage.chain).await, (DEPOSIT, COST));
    let answer = send(&app, pay(&app, &channel, 2 * COST, None, "next").await).await;
    assert_eq!(answer.status, StatusCode::OK, "{answer:?}");
    assert_eq!(stage.channels.claim_all().await.unwrap().claimed, COST);
    // That there was nothing to claim does not delay the next claim.
    assert_eq!(stage.channels.claim_all().await.unwrap().claimed, 0);
    let answer = send(&app, pay(&app, &channel, 3 * COST, None, "last").await).await;
    assert_eq!(answer.status, StatusCode::OK, "{answer:?}");
    assert_eq!(stage.channels.claim_all().await.unwrap().claimed, COST);
}

#[tokio::test]
async fn a_claim_without_its_transfer_is_reported_and_one_that_fails_is_an_error() {
    let stage = Stage::open().await;
    let channel = stage.filled(&stage.app()).await;
    let faults = stage.chain.devnet.faults();
    let dropping = |after: u64| {
        faults.reset();
        faults.set(move |call| match call.method {
            "eth_call" if call.index >= after => x402_devnet::Fault::DropBefore,
            _ => x402_devnet::Fault::None,
        });
    };
    dropping(0);
    let failed = stage.channels.claim_all().await;
    assert!(matches!(failed, Err(ChannelError::Unavailable(_))), "{failed:?}");
    // The channel is read before the claim and after it; then the node is gone.
    dropping(2);
    stage.clock.advance(181);
    let report = stage.channels.claim_all().await.expect("it was claimed");
    assert_eq!((report.claimed, report.settled, report.transactions.len()), (COST, 0, 1));
    faults.clear();
    let report = stage.channels.claim_all().await.unwrap();
    assert_eq!((report.claimed, report.settled, report.transactions.len()), (0, COST, 1));
    assert_eq!(channel.state(&stage.chain).await, (DEPOSIT, COST));
}

/// A withdrawal may have been announced, or a reorganization may have removed a claim.
#[tokio::test]
async fn a_channel_is_looked_at_again_for_as_long_as_something_can_be_lost() {
    let stage = Stage::open().await;
    let app = stage.shop.app(stage.shop.layer().clock(stage.clock.clone()).vouchers(stage.channels.clone()));
    let channel = stage.filled(&app).await;
    stage.channels.claim_all().await.expect("the devnet claims");
    let opened = stage.clock.now();
    // Nothing was ever charged on this one.
    let unused = stage.payer().await;
    let mut observation = stage.ledger.channel(&channel.id()).await.expect("memory").expect("a known channel").observed;
    observation.state = ChannelState { channel_id: unused.id(), total_claimed: 0, ..observation.state };
    let (network, config) = (Network::BASE_SEPOLIA, unused.config);
    let step = ChannelStep::Open { network, config, observation, now: opened };
    stage.ledger.advance(&unused.id(), &step).await.expect("a new channel");

    let observed_at = async |channel: &Channel| {
        stage.ledger.channel(&channel.id()).await.expect("memory").expect("a known channel").observed_at - opened
    };
    let mut now = 0;
    for (time, looked_at) in [(149, 0), (150, 150), (299, 150), (3_449, 3_449), (3_600, 3_449)] {
        stage.clock.advance(time - std::mem::replace(&mut now, time));
        stage.channels.claim_all().await.expect("there is nothing to do");
        assert_eq!((observed_at(&channel).await, observed_at(&unused).await), (looked_at, 0), "{time}");
    }
}

#[tokio::test]
async fn a_fresh_channel_is_charged_without_asking_the_node() {
    let chain = DevnetChain::start(None).await;
    let proxy = RpcProxy::start(chain.rpc_url()).await;
    let url = proxy.url().to_owned();
    let stage = Stage::open_at(chain, &url).await;
    let app = stage.app();
    let channel = stage.payer().await;
    let deposit = channel.sign_deposit(&stage.chain, 3 * COST, unix_now() + 60).await;
    let first = send(&app, pay(&app, &channel, COST, Some(&deposit), "first").await).await;
    assert_eq!(first.status, StatusCode::OK, "{first:?}");
    proxy.reset();
    // Fresh is what was looked at five minutes ago, and the last voucher is for all that is in the channel.
    for (max, later) in [(2 * COST, 0), (3 * COST, 300)] {
        stage.clock.advance(later);
        let answer = send(&app, pay(&app, &channel, max, None, "quick").await).await;
        assert_eq!(answer.status, StatusCode::OK, "{answer:?}");
    }
    assert_eq!(proxy.counts().requests, 0);
}

#[tokio::test]
async fn a_deposit_that_was_executed_before_the_seller_forgot_it_still_pays() {
    let stage = Stage::open().await;
    let app = stage.app();
    let channel = stage.payer().await;
    let deposit = channel.sign_deposit(&stage.chain, DEPOSIT, unix_now() + 60).await;
    let relayer = stage.chain.relayer().await;
    let executed = execute(&stage.chain, &relayer, &channel.deposit_call(&deposit)).await;
    assert!(executed.status());
    let answer = send(&app, pay(&app, &channel, COST, Some(&deposit), "one").await).await;
    assert_eq!((answer.status, answer.text()), (StatusCode::OK, "one"), "{answer:?}");
    assert_eq!(answer.transaction(), executed.transaction_hash, "it is told as if the seller had made it");
    assert_eq!(channel.state(&stage.chain).await, (DEPOSIT, 0));
}

#[tokio::test]
async fn a_voucher_for_another_amount_gets_the_channels_state_and_nothing_else() {
    let stage = Stage::open().await;
    let app = stage.app();
    let channel = stage.filled(&app).await;
    for max in [1, COST, COST + 1, 2 * COST - 1, 2 * COST + 1, 9 * COST] {
        let answer = send(&app, pay(&app, &channel, max, None, "a").await).await;
        refused(&answer, "cumulative_amount_mismatch");
        assert!(answer.settlement().is_none());
        let demand = demand(&answer);
        let offer = demand["accepts"].as_array().unwrap().iter().find(|offer| offer["scheme"] == "batch-settlement");
        let extra = &offer.expect("the offer again")["extra"];
        assert_eq!(extra["channelState"]["chargedCumulativeAmount"], "1000");
        assert_eq!(extra["channelState"]["balance"], "10000");
        let newest = voucher(&channel, COST).await;
        let theirs = json!({ "signedMaxClaimable": "1000", "signature": newest.signature });
        assert_eq!(extra["voucherState"], theirs);
    }
    assert_eq!(stage.shop.handled(), 1);
    assert_eq!(stage.charged(&channel).await, COST);
}

#[tokio::test]
async fn failed_work_is_not_charged_and_its_voucher_pays_for_another_request() {
    let stage = Stage::open().await;
    let fails = Arc::new(AtomicU64::new(1));
    let app = {
        let fails = fails.clone();
        stage.shop.app_with(stage.shop.layer().vouchers(stage.channels.clone()), move |_, body| {
            let status = if fails.swap(0, Ordering::SeqCst) == 1 { 500 } else { 200 };
            async move { Ok(Response::builder().status(status).body(Body::from(body)).unwrap()) }
        })
    };
    let channel = stage.payer().await;
    let deposit = channel.sign_deposit(&stage.chain, DEPOSIT, unix_now() + 60).await;
    let failed = send(&app, pay(&app, &channel, COST, Some(&deposit), "one").await).await;
    assert_eq!(failed.status, StatusCode::INTERNAL_SERVER_ERROR, "{failed:?}");
    assert_eq!(told(&failed), ("0".into(), "0".into()), "the deposit was made, and nothing was charged");
    assert_eq!(channel.state(&stage.chain).await, (DEPOSIT, 0));

    let answer = send(&app, pay(&app, &channel, COST, None, "another").await).await;
    assert_eq!((answer.status, answer.text()), (StatusCode::OK, "another"), "{answer:?}");
    assert_eq!(told(&answer), ("1000".into(), "1000".into()));
}

#[tokio::test]
async fn work_that_panics_or_fails_frees_the_channel() {
    let stage = Stage::open().await;
    let app = stage.shop.app_with(stage.shop.layer().vouchers(stage.channels.clone()), |_, body| async move {
        match &body[..] {
            b"panic" => panic!("on purpose"),
            b"error" => Err("on purpose".into()),
            _ => Ok(Response::new(Body::from(body))),
        }
    });
    let channel = stage.filled(&app).await;
    let answer = send(&app, pay(&app, &channel, 2 * COST, None, "panic").await).await;
    assert_eq!(answer.status, StatusCode::INTERNAL_SERVER_ERROR);
    let failed = support::shop::try_send(&app, pay(&app, &channel, 2 * COST, None, "error").await).await;
    assert!(failed.is_err(), "a handler's own error passes");
    let answer = send(&app, pay(&app, &channel, 2 * COST, None, "fine").await).await;
    assert_eq!((answer.status, answer.text()), (StatusCode::OK, "fine"), "{answer:?}");
    assert_eq!(stage.charged(&channel).await, 2 * COST);
}

#[tokio::test]
async fn work_may_cost_less_than_its_price_and_never_more() {
    let stage = Stage::open().await;
    let app = stage.shop.app_with(stage.shop.layer().vouchers(stage.channels.clone()), |_, body| async move {
        let mut response = Response::new(Body::from(body.clone()));
        let text = std::str::from_utf8(&body).unwrap();
        match text.strip_prefix("usdc ") {
            Some(amount) => {
                response.extensions_mut().insert(ActualPrice(Usdc::from_atomic(amount.parse().unwrap())));
            }
            None if text.starts_with('{') => {
                response.headers_mut().insert("settlement-overrides", text.parse().unwrap());
            }
            None => {}
        }
        Ok(response)
    });
    let channel = stage.filled(&app).await;
    let mut charged = COST;
    for (body, cost) in [
        ("usdc 300", 300),
        ("usdc 0", 0),
        (r#"{"amount":"250"}"#, 250),
        (r#"{"amount":"33.33%"}"#, 333),
        (r#"{"amount":"7.5%"}"#, 75),
        (r#"{"amount":"100%"}"#, 1_000),
        (r#"{"amount":"$0.0005"}"#, 500),
        (r#"{"amount":"0"}"#, 0),
        (r#"{}"#, 1_000),
        ("whole", 1_000),
    ] {
        let answer = send(&app, pay(&app, &channel, charged + COST, None, body).await).await;
        assert_eq!(answer.status, StatusCode::OK, "{body}: {answer:?}");
        assert!(!answer.headers.contains_key("settlement-overrides"));
        charged += cost;
        assert_eq!(told(&answer), (cost.to_string(), charged.to_string()), "{body}");
    }
    for body in [
        "usdc 1001",
        r#"{"amount":"1001"}"#,
        r#"{"amount":"100.01%"}"#,
        r#"{"amount":"-1"}"#,
        r#"{"amount":"x"}"#,
        r#"{"amount":"%"}"#,
        r#"{"amount":".5%"}"#,
        r#"{"amount":"1.005%"}"#,
        r#"{"amount":"+1%"}"#,
        r#"{"amount":"1.+5%"}"#,
    ] {
        let answer = send(&app, pay(&app, &channel, charged + COST, None, body).await).await;
        assert_eq!(answer.status, StatusCode::INTERNAL_SERVER_ERROR, "{body}: {answer:?}");
    }
    assert_eq!(stage.charged(&channel).await, charged);
    let report = stage.channels.claim_all().await.unwrap();
    assert_eq!(report.claimed, charged, "what was charged, not what was signed");
}

#[tokio::test]
async fn requests_of_one_channel_wait_in_line() {
    let stage = Stage::open().await;
    let (started, go_on) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let app = {
        let (started, go_on) = (started.clone(), go_on.clone());
        stage.shop.app_with(stage.shop.layer().vouchers(stage.channels.clone()), move |_, body| {
            let (started, go_on) = (started.clone(), go_on.clone());
            async move {
                if &body[..] == b"slow" {
                    started.notify_one();
                    go_on.notified().await;
                }
                Ok(Response::new(Body::from(body)))
            }
        })
    };
    let channel = stage.filled(&app).await;
    let slow = tokio::spawn({
        let (app, request) = (app.clone(), pay(&app, &channel, 2 * COST, None, "slow").await);
        async move { send(&app, request).await }
    });
    started.notified().await;
    // Signed for what will be charged then, and for what was charged before.
    let (next, outdated) =
        (pay(&app, &channel, 3 * COST, None, "next").await, pay(&app, &channel, 2 * COST, None, "outdated").await);
    let waiting = [next, outdated].map(|request| {
        let app = app.clone();
        tokio::spawn(async move { send(&app, request).await })
    });
    tokio::task::yield_now().await;
    assert!(waiting.iter().all(|waiting| !waiting.is_finished()));
    go_on.notify_one();
    assert_eq!(slow.await.unwrap().status, StatusCode::OK);
    let [next, outdated] = waiting;
    let next = next.await.unwrap();
    assert_eq!((next.status, next.text()), (StatusCode::OK, "next"), "{next:?}");
    refused(&outdated.await.unwrap(), "cumulative_amount_mismatch");
    assert_eq!(stage.charged(&channel).await, 3 * COST);
}

#[tokio::test]
async fn nothing_is_served_for_one_unit_after_the_books_are_lost() {
    let stage = Stage::open().await;
    let app = stage.app();
    let channel = stage.filled(&app).await;
    stage.channels.claim_all().await.expect("the devnet claims");
    // The same seller with empty books: what was charged is what was claimed.
    let sender = PrivateKeySigner::random();
    stage.chain.fund(sender.address(), U256::from(10).pow(U256::from(18))).await;
    let empty = Arc::new(MemoryLedger::new());
    let channels =
        Stage::channels(&stage.chain.rpc_url(), &stage.authorizer, sender, empty.clone(), stage.clock.clone()).await;
    let forgetful = stage.shop.app(stage.shop.layer().vouchers(channels));
    for max in [1, COST, COST + 1] {
        refused(&send(&forgetful, pay(&app, &channel, max, None, "a").await).await, "cumulative_amount_mismatch");
    }
    let answer = send(&forgetful, pay(&app, &channel, 2 * COST, None, "a").await).await;
    assert_eq!(answer.status, StatusCode::OK, "{answer:?}");
    assert_eq!(stage.shop.handled(), 2);
    assert_eq!(empty.channel(&channel.id()).await.unwrap().unwrap().charged(), 2 * COST);
}

#[tokio::test]
async fn a_withdrawal_stops_credit_and_everything_is_claimed_at_once() {
    let stage = Stage::open().await;
    let app = stage.app();
    let channel = stage.filled(&app).await;
    let withdraw = BatchSettlement::initiateWithdrawCall { config: (&channel.config).into(), amount: DEPOSIT };
    stage.chain.fund(channel.payer.address(), U256::from(10).pow(U256::from(19))).await;
    let payer = Relayer::of(&stage.chain.rpc_url(), channel.payer.clone());
    assert!(execute(&stage.chain, &payer, &withdraw).await.status());
    // The seller believes what it saw for five minutes, a third of the time that a withdrawal takes.
    stage.clock.advance(301);
    refused(&send(&app, pay(&app, &channel, 2 * COST, None, "a").await).await, "cumulative_exceeds_balance");
    let claimed = async {
        while channel.state(&stage.chain).await.1 < COST {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), claimed).await.expect("what was charged is claimed");
}

/// Otherwise any payer could take the seller out of its load balancer.
#[tokio::test]
async fn a_withdrawal_makes_a_seller_unready_only_while_its_claim_fails() {
    let stage = Stage::open().await;
    let app = stage.app();
    let [first, second] = [stage.filled(&app).await, stage.filled(&app).await];
    let withdraw = async |channel: &Channel| {
        let (balance, claimed) = channel.state(&stage.chain).await;
        let (config, amount) = ((&channel.config).into(), balance - claimed);
        let withdraw = BatchSettlement::initiateWithdrawCall { config, amount };
        stage.chain.fund(channel.payer.address(), U256::from(10).pow(U256::from(19))).await;
        let payer = Relayer::of(&stage.chain.rpc_url(), channel.payer.clone());
        assert!(execute(&stage.chain, &payer, &withdraw).await.status());
        // The seller looks at its channels again.
        stage.clock.advance(301);
    };
    let until_it_says = async |reasons: &[NotReady]| {
        in_time("the readiness that is expected", async {
            while stage.channels.readiness().await.reasons != reasons {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        })
        .await;
    };
    withdraw(&first).await;
    assert_eq!(stage.channels.claim_all().await.expect("the devnet claims").claimed, 2 * COST);
    assert_eq!(stage.channels.readiness().await.reasons, []);

    let answer = send(&app, pay(&app, &second, 2 * COST, None, "a").await).await;
    assert_eq!(answer.status, StatusCode::OK, "{answer:?}");
    withdraw(&second).await;
    stage.chain.devnet.faults().set(|call| match call.method {
        "eth_estimateGas" => x402_devnet::Fault::Error { code: -32000, message: "away".into() },
        _ => x402_devnet::Fault::None,
    });
    stage.channels.claim_all().await.expect_err("the claim cannot be simulated");
    until_it_says(&[NotReady::ClaimsFail { units: COST }]).await;
    stage.chain.devnet.faults().clear();
    assert_eq!(stage.channels.claim_all().await.expect("the devnet claims").claimed, COST);
    until_it_says(&[]).await;
}

#[tokio::test]
async fn vouchers_of_other_keys_channels_sellers_and_chains_buy_nothing() {
    let stage = Stage::open().await;
    let app = stage.app();
    let channel = stage.filled(&app).await;
    let stranger = PrivateKeySigner::random();
    let forged = Channel { voucher_key: stranger.clone(), ..channel.clone() };
    refused(&send(&app, pay(&app, &forged, 2 * COST, None, "a").await).await, "voucher_signature");
    for (code, config) in [
        ("receiver_mismatch", ChannelConfig { receiver: stranger.address(), ..channel.config }),
        ("receiver_authorizer_mismatch", ChannelConfig { receiver_authorizer: stranger.address(), ..channel.config }),
        ("token_mismatch", ChannelConfig { token: stranger.address(), ..channel.config }),
        ("withdraw_delay_mismatch", ChannelConfig { withdraw_delay: 901, ..channel.config }),
        ("channel_not_found", ChannelConfig { salt: B256::repeat_byte(9), ..channel.config }),
    ] {
        let other = Channel { config, ..channel.clone() };
        refused(&send(&app, pay(&app, &other, 2 * COST, None, "a").await).await, code);
    }
    // A voucher of one channel with the configuration of another, and one for another chain.
    let other = stage.payer().await;
    let mixed = json!({
        "type": "voucher", "channelConfig": channel.config, "voucher": voucher(&other, 2 * COST).await,
    });
    let elsewhere = Escrow::on(Network::BASE);
    let elsewhere =
        Voucher::sign(&elsewhere, channel.id(), 2 * COST, &channel.voucher_key).await.expect("a local key signs");
    let elsewhere = json!({ "type": "voucher", "channelConfig": channel.config, "voucher": elsewhere });
    for (payload, code) in [(mixed, "channel_id_mismatch"), (elsewhere, "voucher_signature")] {
        let payment = json!({ "x402Version": 2, "accepted": offer(&app, "a").await, "payload": payload });
        refused(&send(&app, paid(evaluate("a"), &payment)).await, code);
    }
    assert_eq!(stage.shop.handled(), 1);
}

#[tokio::test]
async fn a_payload_that_no_seller_takes_is_refused() {
    let stage = Stage::open().await;
    let app = stage.app();
    let channel = stage.filled(&app).await;
    let good = json!({
        "type": "voucher", "channelConfig": channel.config, "voucher": voucher(&channel, 2 * COST).await,
    });
    let mut upper = good.clone();
    upper["voucher"]["maxClaimableAmount"] = "02000".into();
    let mut high_s = good.clone();
    high_s["voucher"]["signature"] = format!("0x{}1b", "f".repeat(128)).into();
    let claim = json!({ "type": "claim", "claims": [] });
    let settle = json!({ "type": "settle", "receiver": channel.config.receiver, "token": channel.config.token });
    for payload in [upper, high_s, claim, settle, json!({ "type": "voucher" }), json!({})] {
        let payment = json!({ "x402Version": 2, "accepted": offer(&app, "a").await, "payload": payload });
        let answer = send(&app, paid(evaluate("a"), &payment)).await;
        assert_eq!(answer.status, StatusCode::BAD_REQUEST, "{payload}: {answer:?}");
    }
    let mut cheap = offer(&app, "a").await;
    cheap["amount"] = "1".into();
    let payment = json!({ "x402Version": 2, "accepted": cheap, "payload": good });
    let answer = send(&app, paid(evaluate("a"), &payment)).await;
    assert_eq!(answer.reason(), "invalid_payment_requirements");
    assert_eq!(stage.shop.handled(), 1);
}

#[tokio::test]
async fn a_seller_can_take_vouchers_only() {
    let stage = Stage::open().await;
    let (both, only) = (stage.app(), stage.shop.app(stage.shop.layer().vouchers_only(stage.channels.clone())));
    let schemes = |demand: &Value| -> Vec<String> {
        let offers = demand["accepts"].as_array().expect("offers");
        offers.iter().map(|offer| offer["scheme"].as_str().expect("a scheme").to_owned()).collect()
    };
    assert_eq!(schemes(&demand(&send(&both, evaluate("a")).await)), ["exact", "batch-settlement"]);
    assert_eq!(schemes(&demand(&send(&only, evaluate("a")).await)), ["batch-settlement"]);
    let customer = Customer::with_funds(&stage.chain, PRICE).await;
    let purchase = customer.pay(&both, evaluate("a")).await;
    assert_eq!(send(&only, purchase.on(evaluate("a"))).await.reason(), "unsupported_scheme");
    assert_eq!(send(&both, purchase.on(evaluate("a"))).await.status, StatusCode::OK, "it still pays where it is taken");
    let channel = stage.filled(&only).await;
    assert_eq!(stage.charged(&channel).await, COST);
}

#[tokio::test]
async fn a_seller_of_vouchers_only_needs_no_facilitator() {
    let stage = Stage::open().await;
    let builder = || RequirePaymentLayer::builder().price("$0.001").pay_to(Network::BASE_SEPOLIA, stage.shop.pay_to);
    let app = stage.shop.app(builder().vouchers_only(stage.channels.clone()));
    let channel = stage.filled(&app).await;
    assert_eq!(stage.charged(&channel).await, COST);
    let customer = Customer::with_funds(&stage.chain, PRICE).await;
    let purchase = customer.pay(&stage.app(), evaluate("a")).await;
    assert_eq!(send(&app, purchase.on(evaluate("a"))).await.reason(), "unsupported_scheme");
    let both = builder().vouchers(stage.channels.clone()).build();
    assert!(matches!(both, Err(BuildError::NoFacilitator)));
}

#[tokio::test]
async fn a_seller_of_vouchers_only_is_told_of_settings_without_effect() {
    let stage = Stage::open().await;
    let (pay_to, channels) = (stage.shop.pay_to, || stage.channels.clone());
    let builder = || RequirePaymentLayer::builder().price("$0.001").pay_to(Network::BASE_SEPOLIA, pay_to);
    let refused = |layer: RequirePaymentLayerBuilder| layer.build().expect_err("a setting without effect");
    let elsewhere = builder().pay_to(Network::BASE, pay_to).vouchers_only(channels());
    assert_eq!(refused(elsewhere), BuildError::NoChannelsOn(Network::BASE));
    let nowhere = RequirePaymentLayer::builder().price("$0.001").pay_to(Network::BASE, pay_to);
    assert_eq!(refused(nowhere.vouchers_only(channels())), BuildError::NoChannelPayee(Network::BASE_SEPOLIA));
    let deferred = builder().deferred(DeferredPolicy::default()).vouchers_only(channels());
    assert_eq!(refused(deferred), BuildError::DeferredVouchers);
    builder().vouchers_only(channels()).build().expect("without both");
    // Beside `exact` both have an effect.
    let both = stage.shop.layer().deferred(DeferredPolicy::default()).vouchers(channels());
    both.build().expect("exact is deferred");
}

/// A ledger may be shared with sellers on other chains, or with other keys.
#[tokio::test]
async fn channels_of_other_sellers_in_the_ledger_are_left_alone() {
    let stage = Stage::open().await;
    let channel = stage.filled(&stage.app()).await;
    // The same channel on another chain, where as much was charged.
    let id = Escrow::on(Network::BASE).channel_id(&channel.config);
    let mut observation = observation(1, DEPOSIT, 0, 1);
    observation.state.channel_id = id;
    let (network, config, now) = (Network::BASE, channel.config, unix_now());
    let voucher = Voucher { channel_id: id, ..voucher(&channel, COST).await };
    let request = B256::ZERO;
    for step in [
        ChannelStep::Open { network, config, observation, now },
        ChannelStep::Begin { request, name: None, voucher, price: COST, now, until: now + 60 },
        ChannelStep::Charge { epoch: 1, amount: COST, response: None, now },
    ] {
        stage.ledger.advance(&id, &step).await.expect("memory");
    }
    let [key, sender] = std::array::from_fn(|_| PrivateKeySigner::random());
    stage.chain.fund(sender.address(), U256::from(10).pow(U256::from(18))).await;
    let url = stage.chain.rpc_url();
    let other = Stage::channels(&url, &key, sender, stage.ledger.clone(), stage.clock.clone()).await;
    // By now both would look at channels before they claim.
    stage.clock.advance(301);
    let before = stage.ledger.channels(None, 10).await.expect("memory");
    assert_eq!(other.claim_all().await.expect("nothing to do"), ClaimReport::default());
    assert_eq!(stage.ledger.channels(None, 10).await.expect("memory"), before);
    let report = stage.channels.claim_all().await.expect("the devnet claims");
    assert_eq!((report.claimed, report.refused), (COST, vec![]));
    let elsewhere = stage.ledger.channel(&id).await.expect("memory");
    assert_eq!(elsewhere, before.into_iter().find(|record| record.id == id));
}

#[tokio::test]
async fn a_deposit_below_the_price_of_a_request_is_not_executed() {
    let stage = Stage::open().await;
    let app = stage.app();
    let channel = stage.filled(&app).await;
    let deposit = channel.sign_deposit(&stage.chain, COST - 1, unix_now() + 60).await;
    refused(&send(&app, pay(&app, &channel, 2 * COST, Some(&deposit), "a").await).await, "deposit_below_min_deposit");
    // Nor one that comes with a voucher for the wrong amount.
    let new = stage.payer().await;
    let deposit = new.sign_deposit(&stage.chain, DEPOSIT, unix_now() + 60).await;
    for max in [COST - 1, COST + 1] {
        let answer = send(&app, pay(&app, &new, max, Some(&deposit), "a").await).await;
        refused(&answer, "cumulative_amount_mismatch");
    }
    assert_eq!(new.state(&stage.chain).await, (0, 0));
    let deposit = channel.sign_deposit(&stage.chain, DEPOSIT, unix_now() + 60).await;
    let answer = send(&app, pay(&app, &channel, 3 * COST, Some(&deposit), "a").await).await;
    refused(&answer, "cumulative_amount_mismatch");
    assert_eq!(channel.state(&stage.chain).await, (DEPOSIT, 0));
    let answer = send(&app, pay(&app, &channel, 2 * COST, Some(&deposit), "a").await).await;
    assert_eq!(answer.status, StatusCode::OK, "{answer:?}");
    assert_eq!(channel.state(&stage.chain).await, (2 * DEPOSIT, 0));
}

#[tokio::test]
async fn a_deposit_of_exactly_the_price_is_enough_for_one_request() {
    let stage = Stage::open().await;
    let app = stage.app();
    let channel = stage.payer().await;
    let deposit = channel.sign_deposit(&stage.chain, COST, unix_now() + 60).await;
    let answer = send(&app, pay(&app, &channel, COST, Some(&deposit), "one").await).await;
    assert_eq!((answer.status, answer.text()), (StatusCode::OK, "one"), "{answer:?}");
    assert_eq!(channel.state(&stage.chain).await, (COST, 0));
    // What somebody else deposits is found when it is needed.
    channel.deposit(&stage.chain, &stage.chain.relayer().await, COST).await;
    let answer = send(&app, pay(&app, &channel, 2 * COST, None, "two").await).await;
    assert_eq!((answer.status, answer.text()), (StatusCode::OK, "two"), "{answer:?}");
}

/// Nor is a response lost. The first call fails without effect, or has its effect and its answer is lost.
#[tokio::test]
async fn a_ledger_that_fails_once_loses_no_charge_and_makes_none_twice() {
    let stage = Stage::open().await;
    let books = faulty_channels(stage.ledger.clone());
    let sender = PrivateKeySigner::random();
    stage.chain.fund(sender.address(), U256::from(10).pow(U256::from(18))).await;
    let (url, clock) = (stage.chain.rpc_url(), stage.clock.clone());
    let channels = Stage::channels(&url, &stage.authorizer, sender, books.clone(), clock).await;
    let app = stage.shop.app(stage.shop.layer().vouchers(channels));
    let channel = stage.filled(&app).await;
    let mut charged = COST;
    for how in [How::Before, How::After] {
        let request = pay(&app, &channel, charged + COST, None, "work").await;
        books.around.arm(Some(Fault { call: "advance Charge", nth: 0, how }));
        let answer = send(&app, request).await;
        charged += COST;
        assert_eq!(
            (answer.status, told(&answer)),
            (StatusCode::OK, ("1000".into(), charged.to_string())),
            "{answer:?}"
        );
        assert!(books.around.has_failed());
        assert_eq!(stage.charged(&channel).await, charged);
    }
    // Before the work it is not waited for.
    let request = pay(&app, &channel, charged + COST, None, "work").await;
    books.around.arm(Some(Fault { call: "advance Begin", nth: 0, how: How::Before }));
    let answer = send(&app, request).await;
    assert_eq!(answer.status, StatusCode::SERVICE_UNAVAILABLE, "{answer:?}");
    assert_eq!((stage.shop.handled(), stage.charged(&channel).await), (3, charged));
}

/// The charge of the first attempt did not reach the books, which are back before its stream ends. The second attempt streams, too.
#[tokio::test]
async fn a_stream_that_was_not_charged_is_not_kept_in_place_of_the_one_that_was() {
    let stage = Stage::open().await;
    let books = faulty_channels(stage.ledger.clone());
    let sender = PrivateKeySigner::random();
    stage.chain.fund(sender.address(), U256::from(10).pow(U256::from(18))).await;
    let (url, clock) = (stage.chain.rpc_url(), stage.clock.clone());
    let channels = Stage::channels(&url, &stage.authorizer, sender, books.clone(), clock.clone()).await;
    let attempts = Arc::<AtomicU64>::default();
    let layer = stage.shop.layer().clock(clock.clone()).vouchers(channels);
    let app = stage.shop.app_with(layer, move |_, _| {
        let answer = format!("answer {}", attempts.fetch_add(1, Ordering::SeqCst));
        let answer = futures_util::stream::iter([Ok::<_, std::convert::Infallible>(answer)]);
        async move { Ok(http::Response::new(Body::from_stream(answer))) }
    });
    let channel = stage.filled(&app).await;
    let ask = async || pay(&app, &channel, 2 * COST, None, "streams").await;
    let request = ask().await;
    // Longer than a step is repeated for.
    let how = How::GoneBefore(Duration::from_millis(2_500));
    books.around.arm(Some(Fault { call: "advance Charge", nth: 0, how }));
    let answer = send(&app, request).await;
    assert_eq!(answer.reason(), "settlement_pending", "{answer:?}");
    // Until the books are back, and were asked to keep it.
    tokio::time::sleep(Duration::from_secs(5)).await;
    clock.advance(200);
    for what in ["worked for again", "replayed"] {
        let answer = super::voucher_streams::eventually_ok(&app, ask).await;
        assert_eq!(answer.text(), "answer 2", "{what}: {answer:?}");
    }
    assert_eq!((stage.shop.handled(), stage.charged(&channel).await), (3, 2 * COST));
}

#[tokio::test]
async fn an_answer_by_voucher_is_given_again_after_its_request_has_lost_its_price() {
    let stage = Stage::open().await;
    let is_sold = Arc::new(std::sync::atomic::AtomicBool::new(false));
    let sold = is_sold.clone();
    let layer = stage.shop.layer().vouchers(stage.channels.clone()).price_with(move |_| {
        std::future::ready(match sold.load(Ordering::SeqCst) {
            true => Err(PriceError::new(StatusCode::NOT_FOUND, "it is sold")),
            false => Ok(Quote::Amount(Usdc::from_atomic(PRICE))),
        })
    });
    let app = stage.shop.app(layer);
    let channel = stage.filled(&app).await;
    let [again, other, new] = [
        pay(&app, &channel, COST, None, "first").await,
        pay(&app, &channel, COST, None, "other").await,
        pay(&app, &channel, 2 * COST, None, "first").await,
    ];
    is_sold.store(true, Ordering::SeqCst);
    let answer = send(&app, again).await;
    assert_eq!((answer.status, answer.text()), (StatusCode::OK, "first"), "{answer:?}");
    for unknown in [other, new] {
        let answer = send(&app, unknown).await;
        assert_eq!(answer.status, StatusCode::NOT_FOUND, "{answer:?}");
        assert_eq!(answer.json()["error"], "not_priced", "{answer:?}");
    }
    assert_eq!((stage.shop.handled(), stage.charged(&channel).await), (1, COST));
}

/// With what its payer added to an extension that the seller declares in another way since.
#[tokio::test]
async fn an_answer_by_voucher_is_given_again_whatever_is_declared_since() {
    let stage = Stage::open().await;
    let layer = || stage.shop.layer().vouchers(stage.channels.clone());
    let declares = |info: Value| stage.shop.app(layer().extension(Extension::new("greeting", info, json!({}))));
    let app = declares(json!({ "language": "en" }));
    let channel = stage.filled(&app).await;
    let demanded = demand(&send(&app, evaluate("a")).await);
    let (accepted, voucher) = (offer(&app, "a").await, voucher(&channel, 2 * COST).await);
    let payload = json!({ "type": "voucher", "channelConfig": channel.config, "voucher": voucher });
    let mut payment = json!({ "x402Version": 2, "accepted": accepted, "payload": payload });
    payment["extensions"] = demanded["extensions"].clone();
    payment["extensions"]["greeting"]["info"]["name"] = "Ada".into();
    let later = [declares(json!({ "language": "de" })), declares(json!({})), stage.shop.app(layer())];
    for app in [&app].into_iter().chain(&later) {
        let answer = send(app, paid(evaluate("a"), &payment)).await;
        assert_eq!((answer.status, answer.text()), (StatusCode::OK, "a"), "{answer:?}");
    }
    assert_eq!((stage.shop.handled(), stage.charged(&channel).await), (2, 2 * COST));
}

#[tokio::test]
async fn a_withdrawal_during_the_work_does_not_take_what_the_work_costs() {
    let stage = Stage::open().await;
    let (started, go_on) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let app = {
        let (started, go_on) = (started.clone(), go_on.clone());
        stage.shop.app_with(stage.shop.layer().vouchers(stage.channels.clone()), move |_, body| {
            let (started, go_on) = (started.clone(), go_on.clone());
            async move {
                if &body[..] == b"slow" {
                    started.notify_one();
                    go_on.notified().await;
                }
                Ok(Response::new(Body::from(body)))
            }
        })
    };
    let channel = stage.filled(&app).await;
    let slow = tokio::spawn({
        let (app, request) = (app.clone(), pay(&app, &channel, 2 * COST, None, "slow").await);
        async move { send(&app, request).await }
    });
    started.notified().await;
    let withdraw = BatchSettlement::initiateWithdrawCall { config: (&channel.config).into(), amount: DEPOSIT };
    stage.chain.fund(channel.payer.address(), U256::from(10).pow(U256::from(19))).await;
    let payer = Relayer::of(&stage.chain.rpc_url(), channel.payer.clone());
    assert!(execute(&stage.chain, &payer, &withdraw).await.status());
    go_on.notify_one();
    assert_eq!(slow.await.unwrap().status, StatusCode::OK);
    stage.channels.claim_all().await.expect("the devnet claims");
    assert_eq!(channel.state(&stage.chain).await, (DEPOSIT, 2 * COST), "before the withdrawal can end");
    refused(&send(&app, pay(&app, &channel, 3 * COST, None, "a").await).await, "cumulative_exceeds_balance");
}
