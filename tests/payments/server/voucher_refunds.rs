//! Refunds: one for each request, whoever repeats it and whoever was killed, and none that costs the seller more gas than it has to.

use std::{sync::Arc, time::Duration};

use alloy_primitives::{Address, U256};
use alloy_provider::Provider as _;
use alloy_signer_local::PrivateKeySigner;
use axum::{
    Router,
    body::Body,
    routing::{get, post},
};
use futures_util::future::join_all;
use http::{Method, Request, StatusCode};
use serde_json::{Value, json};
use support::{
    authorization::unix_now,
    chain::Chain as _,
    escrow::Channel,
    eventually::eventually,
    rpc_proxy::RpcProxy,
    shop::{Answer, App, PRICE, app as boxed, demand, paid, send},
};
use tower_x402::{
    Network, Usdc,
    channels::{Channels, ClaimPolicy},
    facilitator::channels::OnchainChannels,
    ledger::channels::{ChannelLedger, ChannelStep},
    server::{PriceError, Quote},
    vouchers::{AuthorizerKey, ChannelConfig, Voucher},
};

use super::vouchers::{COST, DEPOSIT, Stage, offer, pay, refund, refused, voucher};

/// A payer whose channel has `9 * DEPOSIT`, of which a request was paid.
async fn rich(stage: &Stage, app: &App) -> Channel {
    let channel = stage.payer().await;
    let deposit = channel.sign_deposit(&stage.chain, 9 * DEPOSIT, unix_now() + 60).await;
    let answer = send(app, pay(app, &channel, COST, Some(&deposit), "first").await).await;
    assert_eq!(answer.status, StatusCode::OK, "{answer:?}");
    channel
}

/// What was refunded, and by which transaction.
fn refunded(answer: &Answer) -> (String, String) {
    assert_eq!(answer.status, StatusCode::OK, "{answer:?}");
    let settlement = answer.settlement().unwrap_or_else(|| panic!("no PAYMENT-RESPONSE: {answer:?}"));
    let text = |value: &Value| value.as_str().expect("text").to_owned();
    (text(&settlement["amount"]), text(&settlement["transaction"]))
}

fn is_pending(answer: &Answer) {
    assert_eq!(answer.status, StatusCode::SERVICE_UNAVAILABLE, "{answer:?}");
    assert_eq!(answer.json()["error"], "settlement_pending", "{answer:?}");
    assert!(answer.headers.contains_key("retry-after"), "{answer:?}");
}

async fn seller(stage: &Stage, url: &str, sender: PrivateKeySigner, confirm: Duration) -> Channels {
    let contract = OnchainChannels::builder().network(Network::BASE_SEPOLIA).rpc_url(url).signer(sender);
    let contract = contract.block_time(Duration::from_millis(100)).confirm_timeout(confirm).build().await.unwrap();
    let never = ClaimPolicy::default().amount(Usdc::from_atomic(u64::MAX)).age(Duration::from_secs(u64::MAX >> 1));
    let channels = Channels::builder(contract, AuthorizerKey::new(stage.authorizer.clone()));
    channels.ledger(stage.ledger.clone()).claims(never).clock(stage.clock.clone()).build().unwrap()
}

#[tokio::test]
async fn twenty_copies_of_a_request_get_one_refund_and_one_answer() {
    let stage = Stage::open().await;
    let app = stage.app();
    let channel = rich(&stage, &app).await;
    let copies = join_all((0..20).map(|_| refund(&app, &channel, COST, Some("6000")))).await;
    let first = refunded(&copies[0]);
    assert_eq!(first.0, "6000");
    assert!(copies.iter().all(|copy| refunded(copy) == first), "{copies:?}");
    assert_eq!(channel.state(&stage.chain).await, (9 * DEPOSIT - 6_000, COST));

    let all = refunded(&refund(&app, &channel, COST, None).await);
    assert_eq!(all.0, "83000");
    // Another process has the same ledger.
    let sender = PrivateKeySigner::random();
    stage.chain.fund(sender.address(), U256::from(10).pow(U256::from(18))).await;
    let other = seller(&stage, &stage.chain.rpc_url(), sender, Duration::from_secs(15)).await;
    let other = stage.shop.app(stage.shop.layer().vouchers(other));
    stage.clock.advance(86_400);
    for app in [&app, &other] {
        assert_eq!(refunded(&refund(app, &channel, COST, None).await), all, "nothing was left since");
    }
    assert_eq!(channel.state(&stage.chain).await, (COST, COST));
}

/// Nothing was ever charged, so that the whole balance goes.
#[tokio::test]
async fn a_refund_that_empties_a_channel_is_answered_again() {
    let stage = Stage::open().await;
    let app = stage.shop.app_with(stage.shop.layer().vouchers(stage.channels.clone()), |_, _| async {
        Ok(http::Response::builder().status(500).body(Body::empty()).unwrap())
    });
    let channel = stage.payer().await;
    let deposit = channel.sign_deposit(&stage.chain, DEPOSIT, unix_now() + 60).await;
    send(&app, pay(&app, &channel, COST, Some(&deposit), "fails").await).await;
    let first = refunded(&refund(&app, &channel, 0, None).await);
    assert_eq!((first.0.as_str(), channel.state(&stage.chain).await), ("10000", (0, 0)));
    assert_eq!(refunded(&refund(&app, &channel, 0, None).await), first);
}

#[tokio::test]
async fn parts_are_refunded_once_an_hour_and_the_rest_once_until_something_is_bought() {
    let stage = Stage::open().await;
    let app = stage.app();
    let channel = rich(&stage, &app).await;
    for too_small in ["0", "1", "4999"] {
        refused(&refund(&app, &channel, COST, Some(too_small)).await, "refund_amount_invalid");
    }
    let before = stage.chain.devnet.block_number();
    let mut amounts = 5_000..;
    let mut ask = async || {
        let amount = amounts.next().expect("numbers do not end").to_string();
        refund(&app, &channel, COST, Some(&amount)).await
    };
    assert_eq!(refunded(&ask().await).0, "5000");
    for _ in 1..60 {
        refused(&ask().await, "channel_busy");
    }
    stage.clock.advance(3_599);
    refused(&ask().await, "channel_busy");
    stage.clock.advance(1);
    assert_eq!(refunded(&ask().await).0, "5061");
    assert_eq!(stage.chain.devnet.block_number() - before, 2, "the gas of two transactions");

    // All that is left is refunded at once, and once.
    assert_eq!(refunded(&refund(&app, &channel, COST, None).await).0, (89_000 - 10_061).to_string());
    channel.deposit(&stage.chain, &stage.chain.relayer().await, 5_000).await;
    refused(&refund(&app, &channel, COST, None).await, "channel_busy");
    let answer = send(&app, pay(&app, &channel, 2 * COST, None, "bought").await).await;
    assert_eq!(answer.status, StatusCode::OK, "{answer:?}");
    assert_eq!(refunded(&refund(&app, &channel, 2 * COST, None).await).0, "4000");
    assert_eq!(stage.chain.devnet.block_number() - before, 5, "one of them is the deposit");
}

/// The process is gone while its refund waits in the node's pool, whose state simulations may be made on.
#[tokio::test]
async fn a_refund_of_a_killed_process_is_waited_for_and_then_answered() {
    let stage = Stage::open().await;
    let app = stage.app();
    let channel = rich(&stage, &app).await;
    let proxy = RpcProxy::start(stage.chain.rpc_url()).await;
    let [killed, heir] = std::array::from_fn(|_| PrivateKeySigner::random());
    for sender in [&killed, &heir] {
        stage.chain.fund(sender.address(), U256::from(10).pow(U256::from(18))).await;
    }
    let dying = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    stage.chain.devnet.stall(true);
    {
        let (stage, url) = (stage_parts(&stage), proxy.url().to_owned());
        let channel = channel.clone();
        dying.spawn(async move {
            let app = stage.seller(&url, killed).await;
            refund(&app, &channel, COST, None).await
        });
    }
    let sent = || {
        ["eth_sendRawTransaction", "eth_sendRawTransactionSync"].iter().map(|name| proxy.counts().of(name)).sum::<u64>()
    };
    eventually("the refund was sent", async || sent() > 0).await;
    dying.shutdown_background();
    // What the ledger of the next process does when it is opened.
    let held = stage.ledger.channel(&channel.id()).await.unwrap().unwrap();
    stage.ledger.advance(&channel.id(), &ChannelStep::Release { epoch: held.epoch }).await.unwrap();

    let next = seller(&stage, &stage.chain.rpc_url(), heir.clone(), Duration::from_secs(2)).await;
    let next = stage.shop.app(stage.shop.layer().vouchers(next));
    is_pending(&refund(&next, &channel, COST, None).await);
    // Nor is another refund begun beside it.
    is_pending(&refund(&next, &channel, COST, Some("7000")).await);
    let waiting = stage.chain.provider().get_transaction_count(heir.address()).pending().await.unwrap();
    assert_eq!(waiting, 0, "nothing is sent while the refund counts as under way");
    stage.clock.advance(181);
    stage.chain.devnet.faults().set(|call| match call.method {
        "eth_estimateGas" => {
            x402_devnet::Fault::Error { code: 3, message: "execution reverted: InvalidRefundNonce".into() }
        }
        _ => x402_devnet::Fault::None,
    });
    is_pending(&refund(&next, &channel, COST, None).await);
    stage.chain.devnet.faults().clear();
    stage.chain.devnet.stall(false);
    stage.chain.devnet.mine();
    // The background looks at the channel, and finds it for whoever asks a day later.
    stage.clock.advance(200);
    stage.channels.claim_all().await.expect("all was claimed with the refund");
    stage.clock.advance(86_400);
    let answer = refund(&next, &channel, COST, None).await;
    assert_eq!(refunded(&answer).0, "89000");
    assert_eq!(refunded(&refund(&next, &channel, COST, None).await), refunded(&answer));
    assert_eq!(channel.state(&stage.chain).await, (COST, COST));
}

/// What a seller in another runtime needs.
struct Parts {
    shop: support::shop::Shop,
    ledger: Arc<dyn ChannelLedger>,
    authorizer: PrivateKeySigner,
    clock: Arc<tower_x402::ManualClock>,
}

fn stage_parts(stage: &Stage) -> Parts {
    Parts {
        shop: stage.shop.clone(),
        ledger: stage.ledger.clone(),
        authorizer: stage.authorizer.clone(),
        clock: stage.clock.clone(),
    }
}

impl Parts {
    async fn seller(self, url: &str, sender: PrivateKeySigner) -> App {
        let contract = OnchainChannels::builder().network(Network::BASE_SEPOLIA).rpc_url(url).signer(sender);
        let contract = contract.build().await.unwrap();
        let never = ClaimPolicy::default().amount(Usdc::from_atomic(u64::MAX)).age(Duration::from_secs(u64::MAX >> 1));
        let channels = Channels::builder(contract, AuthorizerKey::new(self.authorizer)).ledger(self.ledger);
        let channels = channels.claims(never).clock(self.clock).build().unwrap();
        self.shop.app(self.shop.layer().vouchers(channels))
    }
}

#[tokio::test]
async fn an_amount_of_null_is_not_all() {
    let stage = Stage::open().await;
    let app = stage.app();
    let channel = stage.filled(&app).await;
    for amount in [json!(null), json!(5_000), json!(""), json!("05000")] {
        let payload = json!({
            "type": "refund", "channelConfig": channel.config, "voucher": voucher(&channel, COST).await, "amount": amount,
        });
        let accepted = super::vouchers::offer(&app, "refund").await;
        let payment = json!({ "x402Version": 2, "accepted": accepted, "payload": payload });
        let answer = send(&app, paid(support::shop::evaluate("refund"), &payment)).await;
        assert_eq!(answer.status, StatusCode::BAD_REQUEST, "{amount}: {answer:?}");
        assert_eq!(answer.reason(), "invalid_batch_settlement_evm_payload_type", "{amount}");
    }
    assert_eq!(channel.state(&stage.chain).await, (DEPOSIT, 0));
}

#[tokio::test]
async fn refunds_leave_the_gas_that_claims_need() {
    let stage = Stage::open().await;
    let channel = stage.filled(&stage.app()).await;
    // A gas price of some two gwei; a claim needs 215,000 gas at most, and two million are kept for claims.
    stage.chain.devnet.set_base_fee(1_000_000_000);
    let sender = PrivateKeySigner::random();
    stage.chain.fund(sender.address(), U256::from(10).pow(U256::from(15))).await;
    let poor = seller(&stage, &stage.chain.rpc_url(), sender.clone(), Duration::from_secs(15)).await;
    let app = stage.shop.app(stage.shop.layer().vouchers(poor.clone()));
    let answer = refund(&app, &channel, COST, None).await;
    assert_eq!(answer.status, StatusCode::SERVICE_UNAVAILABLE, "{answer:?}");
    assert_eq!(stage.ledger.channel(&channel.id()).await.unwrap().unwrap().refund, None, "nothing was signed");
    assert_eq!(poor.claim_all().await.expect("there is enough for a claim").claimed, COST);
    stage.chain.fund(sender.address(), U256::from(10).pow(U256::from(16))).await;
    assert_eq!(refunded(&refund(&app, &channel, COST, None).await).0, "9000");
}

/// The node does not answer, so that nothing is sent. The payer buys on with what it did not get back.
#[tokio::test]
async fn a_refund_that_was_not_sent_is_still_in_the_channel() {
    let stage = Stage::open().await;
    let app = stage.app();
    let channel = stage.filled(&app).await;
    stage.chain.devnet.faults().set(|call| match call.method {
        "eth_estimateGas" => x402_devnet::Fault::Error { code: -32005, message: "too many requests".into() },
        _ => x402_devnet::Fault::None,
    });
    let answer = refund(&app, &channel, COST, None).await;
    assert_eq!(answer.status, StatusCode::SERVICE_UNAVAILABLE, "{answer:?}");
    stage.chain.devnet.faults().clear();
    let record = stage.ledger.channel(&channel.id()).await.unwrap().unwrap();
    assert_eq!((record.refund, record.covered()), (None, DEPOSIT));
    let answer = send(&app, pay(&app, &channel, 2 * COST, None, "second").await).await;
    assert_eq!(answer.status, StatusCode::OK, "{answer:?}");
    assert_eq!(refunded(&refund(&app, &channel, 2 * COST, None).await).0, "8000");
}

#[tokio::test]
async fn deposits_leave_the_gas_that_claims_need() {
    let stage = Stage::open().await;
    stage.chain.devnet.set_base_fee(1_000_000_000);
    let sender = PrivateKeySigner::random();
    stage.chain.fund(sender.address(), U256::from(10).pow(U256::from(15))).await;
    let poor = seller(&stage, &stage.chain.rpc_url(), sender.clone(), Duration::from_secs(15)).await;
    let app = stage.shop.app(stage.shop.layer().vouchers(poor));
    let channel = stage.payer().await;
    let deposit = channel.sign_deposit(&stage.chain, DEPOSIT, unix_now() + 60).await;
    let answer = send(&app, pay(&app, &channel, COST, Some(&deposit), "a").await).await;
    assert_eq!(answer.status, StatusCode::SERVICE_UNAVAILABLE, "{answer:?}");
    stage.chain.fund(sender.address(), U256::from(10).pow(U256::from(16))).await;
    let answer = send(&app, pay(&app, &channel, COST, Some(&deposit), "a").await).await;
    assert_eq!(answer.status, StatusCode::OK, "{answer:?}");
}

/// Clients of the official packages look for the offer and ask for the refund with GET.
#[tokio::test]
async fn a_refund_is_taken_with_any_method_where_the_layer_sees_it() {
    let stage = Stage::open().await;
    let layer = || stage.shop.layer().vouchers(stage.channels.clone()).build().expect("complete settings");
    let router = Router::new().route("/sold", post(async || "sold")).layer(layer());
    let app = boxed(router);
    let request = |method: Method| Request::builder().method(method).uri("/sold").body(Body::empty()).unwrap();
    for method in [Method::GET, Method::POST, Method::PUT, Method::DELETE] {
        let channel = stage.filled(&stage.app()).await;
        let probe = send(&app, request(method.clone())).await;
        assert_eq!(probe.status, StatusCode::PAYMENT_REQUIRED, "{method}: {probe:?}");
        let accepted = demand(&probe)["accepts"][1].clone();
        let payment = async |kind: &str, max| {
            let voucher = voucher(&channel, max).await;
            let payload = json!({ "type": kind, "channelConfig": channel.config, "voucher": voucher });
            paid(request(method.clone()), &json!({ "x402Version": 2, "accepted": accepted, "payload": payload }))
        };
        if method != Method::POST {
            let bought = send(&app, payment("voucher", 2 * COST).await).await;
            assert_eq!(bought.status, StatusCode::METHOD_NOT_ALLOWED, "{method}: {bought:?}");
            assert_eq!(stage.charged(&channel).await, COST, "it was not charged");
        }
        assert_eq!(refunded(&send(&app, payment("refund", COST).await).await).0, "9000", "{method}");
    }
    // Below the route of one method, the router answers the others by itself.
    let channel = stage.filled(&stage.app()).await;
    let below = boxed(Router::new().route("/sold", post(async || "sold").route_layer(layer())));
    assert_eq!(send(&below, request(Method::GET)).await.status, StatusCode::METHOD_NOT_ALLOWED);
    let both = boxed(Router::new().route("/sold", get(async || "sold").post(async || "sold").route_layer(layer())));
    let accepted = demand(&send(&both, request(Method::GET)).await)["accepts"][1].clone();
    let payload =
        json!({ "type": "refund", "channelConfig": channel.config, "voucher": voucher(&channel, COST).await });
    let payment = json!({ "x402Version": 2, "accepted": accepted, "payload": payload });
    assert_eq!(refunded(&send(&both, paid(request(Method::GET), &payment)).await).0, "9000");
}

#[tokio::test]
async fn a_refund_claims_what_was_charged_and_returns_the_rest() {
    let stage = Stage::open().await;
    let app = stage.app();
    let channel = stage.filled(&app).await;
    let before = stage.chain.balance(channel.payer.address()).await;
    let part = refund(&app, &channel, COST, Some("5000")).await;
    assert_eq!(part.status, StatusCode::OK, "{part:?}");
    assert_eq!(part.json()["channelId"], channel.id().to_string());
    let settlement = part.settlement().unwrap();
    assert_eq!(settlement["amount"], "5000");
    assert_eq!(settlement["extra"].get("chargedAmount"), None);
    assert_eq!(channel.state(&stage.chain).await, (5_000, COST), "claimed in the same transaction");

    let rest = refund(&app, &channel, COST, None).await;
    assert_eq!(rest.settlement().unwrap()["amount"], "4000", "{rest:?}");
    assert_eq!(channel.state(&stage.chain).await, (COST, COST));
    assert_eq!(stage.chain.balance(channel.payer.address()).await, before + 9_000);
    refused(&refund(&app, &channel, COST, Some("6000")).await, "refund_no_balance");
    refused(&refund(&app, &channel, 1, None).await, "cumulative_amount_mismatch");
    // What was charged is not forgotten with the money.
    for max in [COST + 1, COST + COST] {
        let answer = send(&app, pay(&app, &channel, max, None, "a").await).await;
        assert_eq!(answer.status, StatusCode::PAYMENT_REQUIRED, "{answer:?}");
    }
    assert_eq!(stage.shop.handled(), 1);
}

#[tokio::test]
async fn a_refund_needs_no_price_but_a_channel_of_this_seller_and_its_payers_signature() {
    let stage = Stage::open().await;
    let channel = stage.filled(&stage.app()).await;
    // Prices nothing that is empty, and is free at this path.
    let price = |request: &http::request::Parts, body: &bytes::Bytes| {
        let (is_free, is_empty) = (request.uri.path() == "/free", body.is_empty());
        std::future::ready(match is_free {
            true => Ok(Quote::Free),
            false if is_empty => Err(PriceError::new(StatusCode::BAD_REQUEST, "a task is missing")),
            false => Ok(Quote::Amount(Usdc::from_atomic(2 * PRICE))),
        })
    };
    let app = stage.shop.app(stage.shop.layer().price_with_body(price).vouchers(stage.channels.clone()));
    let ask_for = async |kind: &str, path: &str, config: ChannelConfig, voucher: Voucher, network: &str| {
        let payload = json!({ "type": kind, "channelConfig": config, "voucher": voucher, "amount": "5000" });
        let accepted = json!({
            "scheme": "batch-settlement", "network": network, "amount": "0", "asset": config.token,
            "payTo": config.receiver, "maxTimeoutSeconds": 60,
        });
        let payment = json!({ "x402Version": 2, "accepted": accepted, "payload": payload });
        send(&app, paid(Request::post(path).body(Body::empty()).unwrap(), &payment)).await
    };
    let ask =
        async |path: &str, config, voucher, network: &str| ask_for("refund", path, config, voucher, network).await;
    let network = stage.shop.asset.network.to_string();
    let good = voucher(&channel, COST).await;
    // Work does need one.
    let unpriced = ask_for("voucher", "/evaluate", channel.config, good.clone(), &network).await;
    assert_eq!(unpriced.status, StatusCode::BAD_REQUEST, "{unpriced:?}");
    for path in ["/evaluate", "/free"] {
        let answer = ask(path, channel.config, good.clone(), &network).await;
        assert_eq!(
            (answer.status, &answer.settlement().unwrap()["amount"]),
            (StatusCode::OK, &json!("5000")),
            "{path}"
        );
    }
    let left = (DEPOSIT - 5_000, COST);
    assert_eq!(channel.state(&stage.chain).await, left);

    let stranger = PrivateKeySigner::random().address();
    let changed = [
        (ChannelConfig { receiver: stranger, ..channel.config }, "invalid_payment_requirements"),
        (ChannelConfig { token: stranger, ..channel.config }, "invalid_payment_requirements"),
        (
            ChannelConfig { receiver_authorizer: stranger, ..channel.config },
            "invalid_batch_settlement_evm_receiver_authorizer_mismatch",
        ),
    ];
    for (config, code) in changed {
        let other = Channel { config, ..channel.clone() };
        let answer = ask("/evaluate", config, voucher(&other, COST).await, &network).await;
        assert_eq!((answer.status, answer.reason().as_str()), (StatusCode::PAYMENT_REQUIRED, code), "{config:?}");
    }
    let answer = ask("/evaluate", channel.config, good.clone(), "eip155:8453").await;
    assert_eq!(answer.reason(), "invalid_payment_requirements");
    let thief = Channel { voucher_key: PrivateKeySigner::random(), ..channel.clone() };
    refused(&ask("/evaluate", channel.config, voucher(&thief, COST).await, &network).await, "voucher_signature");
    let answer = ask("/evaluate", channel.config, voucher(&channel, COST + 1).await, &network).await;
    refused(&answer, "cumulative_amount_mismatch");
    assert_eq!(demand(&answer)["accepts"][1]["extra"]["channelState"]["chargedCumulativeAmount"], "1000");
    assert_eq!((channel.state(&stage.chain).await, stage.shop.handled()), (left, 1));
}

/// The channel is the layer's, whoever is paid for the request.
#[tokio::test]
async fn a_refund_is_taken_where_others_are_paid_or_nothing_is_sold() {
    let stage = Stage::open().await;
    let layer = stage.shop.layer().vouchers(stage.channels.clone()).price_with(|request| {
        let quote = match request.uri.path() {
            "/free" => Ok(Quote::Free),
            "/gone" => Err(PriceError::new(StatusCode::NOT_FOUND, "it is sold")),
            _ => Ok(Quote::To { pay_to: Address::repeat_byte(0x0e), amount: Usdc::from_atomic(1_000) }),
        };
        std::future::ready(quote)
    });
    let app = stage.shop.app(layer);
    for path in ["/others", "/free", "/gone"] {
        let channel = stage.filled(&stage.app()).await;
        let accepted = offer(&stage.app(), "refund").await;
        let payload =
            json!({ "type": "refund", "channelConfig": channel.config, "voucher": voucher(&channel, COST).await });
        let request = Request::post(path).body(Body::empty()).unwrap();
        let payment = json!({ "x402Version": 2, "accepted": accepted, "payload": payload });
        assert_eq!(refunded(&send(&app, paid(request, &payment)).await).0, "9000", "{path}");
    }
}
