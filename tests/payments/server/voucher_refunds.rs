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
    chain::Chain as _,
    escrow::Channel,
    eventually::eventually,
    rpc_proxy::RpcProxy,
    shop::{Answer, PRICE, app as boxed, demand, paid, send},
    world::{COST, DEPOSIT, World, offer, pay, payment, refund, refused, voucher},
};
use tower_x402::{
    Usdc,
    channels::Channels,
    facilitator::channels::OnchainChannelsBuilder,
    ledger::channels::{ChannelLedger, ChannelStep},
    server::{PriceError, Quote},
    vouchers::{ChannelConfig, Deposit, Voucher},
};

const DAY: Duration = Duration::from_secs(86_400);

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

async fn process(world: &World, sender: PrivateKeySigner, confirm: Duration) -> Channels {
    let contract =
        |contract: OnchainChannelsBuilder| contract.block_time(Duration::from_millis(100)).confirm_timeout(confirm);
    world.channels_of(world.contract_by(sender, contract).await).build().unwrap()
}

#[tokio::test]
async fn twenty_copies_of_a_request_get_one_refund_and_one_answer() {
    let world = World::open().await;
    let app = world.app.clone();
    let channel = world.filled_with(&app, 9 * DEPOSIT).await;
    let copies = join_all((0..20).map(|_| refund(&app, &channel, COST, Some("6000")))).await;
    let first = refunded(&copies[0]);
    assert_eq!(first.0, "6000");
    assert!(copies.iter().all(|copy| refunded(copy) == first), "{copies:?}");
    assert_eq!(channel.state(&world.chain).await, (9 * DEPOSIT - 6_000, COST));

    let all = refunded(&refund(&app, &channel, COST, None).await);
    assert_eq!(all.0, "83000");
    // Another process has the same ledger.
    let sender = world.chain.gas_key().await;
    let other = world.seller(process(&world, sender, Duration::from_secs(15)).await);
    world.clock.advance(86_400);
    for app in [&app, &other] {
        assert_eq!(refunded(&refund(app, &channel, COST, None).await), all, "nothing was left since");
    }
    assert_eq!(channel.state(&world.chain).await, (COST, COST));
}

/// Nothing was ever charged, so that the whole balance goes.
#[tokio::test]
async fn a_refund_that_empties_a_channel_is_answered_again() {
    let world = World::open().await;
    let app = world.shop.app_with(world.layer(), |_, _| async {
        Ok(http::Response::builder().status(500).body(Body::empty()).unwrap())
    });
    let channel = world.channel().await;
    let deposit = world.sign_deposit(&channel, DEPOSIT).await;
    send(&app, pay(&app, &channel, COST, Some(&deposit), "fails").await).await;
    let first = refunded(&refund(&app, &channel, 0, None).await);
    assert_eq!((first.0.as_str(), channel.state(&world.chain).await), ("10000", (0, 0)));
    assert_eq!(refunded(&refund(&app, &channel, 0, None).await), first);
}

#[tokio::test]
async fn parts_are_refunded_once_an_hour_and_the_rest_once_until_something_is_bought() {
    let world = World::open().await;
    let app = world.app.clone();
    let channel = world.filled_with(&app, 9 * DEPOSIT).await;
    for too_small in ["0", "1", "4999"] {
        refused(&refund(&app, &channel, COST, Some(too_small)).await, "refund_amount_invalid");
    }
    let before = world.chain.devnet.block_number();
    let mut amounts = 5_000..;
    let mut ask = async || {
        let amount = amounts.next().expect("numbers do not end").to_string();
        refund(&app, &channel, COST, Some(&amount)).await
    };
    assert_eq!(refunded(&ask().await).0, "5000");
    for _ in 1..60 {
        refused(&ask().await, "channel_busy");
    }
    world.clock.advance(3_599);
    refused(&ask().await, "channel_busy");
    world.clock.advance(1);
    assert_eq!(refunded(&ask().await).0, "5061");
    assert_eq!(world.chain.devnet.block_number() - before, 2, "the gas of two transactions");

    // All that is left is refunded at once, and once.
    assert_eq!(refunded(&refund(&app, &channel, COST, None).await).0, (89_000 - 10_061).to_string());
    channel.deposit(&world.chain, &world.chain.relayer().await, 5_000).await;
    refused(&refund(&app, &channel, COST, None).await, "channel_busy");
    let answer = send(&app, pay(&app, &channel, 2 * COST, None, "bought").await).await;
    assert_eq!(answer.status, StatusCode::OK, "{answer:?}");
    assert_eq!(refunded(&refund(&app, &channel, 2 * COST, None).await).0, "4000");
    assert_eq!(world.chain.devnet.block_number() - before, 5, "one of them is the deposit");
}

/// A claim publishes a voucher, and whoever shows it is told the newest one, if that is used up. A stranger gets one refund an hour by these,
/// and its payer others at once, by a voucher that was shown to nobody.
#[tokio::test]
async fn stranger_with_a_claimed_voucher_refunds_a_channel_once_an_hour_whatever_is_bought() {
    let world = World::open().await;
    let app = world.app.clone();
    let channel = world.filled_with(&app, DEPOSIT).await;
    world.channels.claim_all().await.expect("the devnet claims");
    let buy = async |bought: u128, deposit: Option<&Deposit>| {
        let answer = send(&app, pay(&app, &channel, bought * COST, deposit, "bought").await).await;
        assert_eq!(answer.status, StatusCode::OK, "{answer:?}");
    };
    let mut deposit = None;
    for bought in 2..=4 {
        buy(bought, deposit.take().as_ref()).await;
        let answer = refund(&app, &channel, COST, None).await;
        refused(&answer, "cumulative_amount_mismatch");
        let shown = &demand(&answer)["accepts"][1]["extra"]["voucherState"]["signedMaxClaimable"];
        assert_eq!(*shown, json!((bought * COST).to_string()), "{bought}");
        let before = world.chain.devnet.block_number();
        let answer = refund(&app, &channel, bought * COST, None).await;
        if bought == 2 {
            assert_eq!(refunded(&answer).0, "8000");
            deposit = Some(world.sign_deposit(&channel, DEPOSIT).await);
        } else {
            refused(&answer, "channel_busy");
            assert_eq!(world.chain.devnet.block_number(), before, "no gas was spent");
        }
    }
    buy(5, None).await;
    assert_eq!(refunded(&refund(&app, &channel, 5 * COST, None).await).0, "7000", "nobody was shown its voucher");
}

/// A pass over the books refunds one channel after the other, and each refund takes as long as its transaction.
#[tokio::test]
async fn an_idle_channel_that_is_used_while_another_is_refunded_keeps_its_money() {
    let world = World::open().await;
    let app = world.shop.app(world.shop.layer().clock(world.clock.clone()).vouchers(world.channels.clone()));
    let mut idle = [world.filled(&app).await, world.filled(&app).await];
    // In the order of the books.
    idle.sort_by_key(|channel| channel.id());
    let [first, second] = &idle;
    world.clock.advance(DAY.as_secs());
    world.chain.devnet.stall(true);
    let channels = world.channels.clone();
    let pass = tokio::spawn(async move { channels.refund_idle(DAY, Usdc::from_atomic(1)).await });
    eventually("the first refund is signed", async || world.record(first).await.refund.is_some()).await;
    let answer = send(&app, pay(&app, second, 2 * COST, None, "used").await).await;
    assert_eq!(answer.status, StatusCode::OK, "{answer:?}");
    world.chain.devnet.stall(false);
    world.chain.devnet.mine();
    let report = pass.await.unwrap().unwrap();
    assert_eq!((report.refunded, report.transactions.len()), (DEPOSIT - COST, 1), "{report:?}");
    assert_eq!((first.state(&world.chain).await, second.state(&world.chain).await), ((COST, COST), (DEPOSIT, 0)));
}

#[tokio::test]
async fn an_idle_channel_with_an_announced_withdrawal_is_not_refunded() {
    let world = World::open().await;
    let app = world.shop.app(world.shop.layer().clock(world.clock.clone()).vouchers(world.channels.clone()));
    let channel = world.filled(&app).await;
    world.clock.advance(DAY.as_secs());
    world.announce_withdrawal(&channel, 3_000).await;
    let report = world.channels.refund_idle(DAY, Usdc::from_atomic(1)).await.unwrap();
    assert_eq!((report.refunded, report.transactions, report.failed), (0, vec![], vec![]));
    assert_eq!(channel.state(&world.chain).await.0, DEPOSIT);
}

#[tokio::test]
async fn refunds_by_an_outdated_voucher_ask_no_node() {
    let world = World::open().await;
    let proxy = RpcProxy::start(world.chain.rpc_url()).await;
    let contract = world.contract(|contract| contract.rpc_url(proxy.url())).await;
    let app = world.seller(world.channels_of(contract).build().unwrap());
    let channel = world.filled(&app).await;
    let answer = send(&app, pay(&app, &channel, 2 * COST, None, "second").await).await;
    assert_eq!(answer.status, StatusCode::OK, "{answer:?}");
    proxy.reset();
    for answer in join_all((0..100).map(|_| refund(&app, &channel, COST, None))).await {
        refused(&answer, "cumulative_amount_mismatch");
    }
    for answer in join_all((0..100).map(|_| refund(&app, &channel, 2 * COST, Some("1")))).await {
        refused(&answer, "refund_amount_invalid");
    }
    assert_eq!(proxy.counts().requests, 0);
}

/// The process is gone while its refund waits in the node's pool, whose state simulations may be made on.
#[tokio::test]
async fn a_refund_of_a_killed_process_is_waited_for_and_then_answered() {
    let world = Arc::new(World::open().await);
    let app = world.app.clone();
    let channel = world.filled_with(&app, 9 * DEPOSIT).await;
    let proxy = RpcProxy::start(world.chain.rpc_url()).await;
    let (killed, heir) = (world.chain.gas_key().await, world.chain.gas_key().await);
    let dying = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    world.chain.devnet.stall(true);
    {
        let (world, url, channel) = (world.clone(), proxy.url().to_owned(), channel.clone());
        dying.spawn(async move {
            let contract = world.contract_by(killed, |contract| contract.rpc_url(url)).await;
            let app = world.seller(world.channels_of(contract).build().unwrap());
            refund(&app, &channel, COST, None).await
        });
    }
    let sent = || {
        ["eth_sendRawTransaction", "eth_sendRawTransactionSync"].iter().map(|name| proxy.counts().of(name)).sum::<u64>()
    };
    eventually("the refund was sent", async || sent() > 0).await;
    dying.shutdown_background();
    // What the ledger of the next process does when it is opened.
    let held = world.record(&channel).await;
    world.ledger.advance(&channel.id(), &ChannelStep::Release { epoch: held.epoch }).await.unwrap();

    let next = world.seller(process(&world, heir.clone(), Duration::from_secs(2)).await);
    is_pending(&refund(&next, &channel, COST, None).await);
    // Nor is another refund begun beside it.
    is_pending(&refund(&next, &channel, COST, Some("7000")).await);
    let waiting = world.chain.provider().get_transaction_count(heir.address()).pending().await.unwrap();
    assert_eq!(waiting, 0, "nothing is sent while the refund counts as under way");
    world.clock.advance(181);
    world.chain.devnet.faults().set(|call| match call.method {
        "eth_estimateGas" => {
            x402_devnet::Fault::Error { code: 3, message: "execution reverted: InvalidRefundNonce".into() }
        }
        _ => x402_devnet::Fault::None,
    });
    is_pending(&refund(&next, &channel, COST, None).await);
    world.chain.devnet.faults().clear();
    world.chain.devnet.stall(false);
    world.chain.devnet.mine();
    // The background looks at the channel, and finds it for whoever asks a day later.
    world.clock.advance(200);
    world.channels.claim_all().await.expect("all was claimed with the refund");
    world.clock.advance(86_400);
    let answer = refund(&next, &channel, COST, None).await;
    assert_eq!(refunded(&answer).0, "89000");
    assert_eq!(refunded(&refund(&next, &channel, COST, None).await), refunded(&answer));
    assert_eq!(channel.state(&world.chain).await, (COST, COST));
}

#[tokio::test]
async fn an_amount_of_null_is_not_all() {
    let world = World::open().await;
    let app = world.app.clone();
    let channel = world.filled(&app).await;
    for amount in [json!(null), json!(5_000), json!(""), json!("05000")] {
        let mut payment = payment("refund", &offer(&app, "refund").await, &channel, COST).await;
        payment["payload"]["amount"] = amount.clone();
        let answer = send(&app, paid(support::shop::evaluate("refund"), &payment)).await;
        assert_eq!(answer.status, StatusCode::BAD_REQUEST, "{amount}: {answer:?}");
        assert_eq!(answer.reason(), "invalid_batch_settlement_evm_payload_type", "{amount}");
    }
    assert_eq!(channel.state(&world.chain).await, (DEPOSIT, 0));
}

#[tokio::test]
async fn refunds_leave_the_gas_that_claims_need() {
    let world = World::open().await;
    let channel = world.filled(&world.app).await;
    // A gas price of some two gwei; a claim needs 215,000 gas at most, and two million are kept for claims.
    world.chain.devnet.set_base_fee(1_000_000_000);
    let sender = PrivateKeySigner::random();
    world.chain.fund(sender.address(), U256::from(10).pow(U256::from(15))).await;
    let poor = process(&world, sender.clone(), Duration::from_secs(15)).await;
    let app = world.seller(poor.clone());
    let answer = refund(&app, &channel, COST, None).await;
    assert_eq!(answer.status, StatusCode::SERVICE_UNAVAILABLE, "{answer:?}");
    assert_eq!(world.record(&channel).await.refund, None, "nothing was signed");
    assert_eq!(poor.claim_all().await.expect("there is enough for a claim").claimed, COST);
    world.chain.fund(sender.address(), U256::from(10).pow(U256::from(16))).await;
    assert_eq!(refunded(&refund(&app, &channel, COST, None).await).0, "9000");
}

/// The node does not answer, so that nothing is sent. The payer buys on with what it did not get back.
#[tokio::test]
async fn a_refund_that_was_not_sent_is_still_in_the_channel() {
    let world = World::open().await;
    let app = world.app.clone();
    let channel = world.filled(&app).await;
    world.chain.devnet.faults().set(|call| match call.method {
        "eth_estimateGas" => x402_devnet::Fault::Error { code: -32005, message: "too many requests".into() },
        _ => x402_devnet::Fault::None,
    });
    let answer = refund(&app, &channel, COST, None).await;
    assert_eq!(answer.status, StatusCode::SERVICE_UNAVAILABLE, "{answer:?}");
    world.chain.devnet.faults().clear();
    let record = world.record(&channel).await;
    assert_eq!((record.refund, record.covered()), (None, DEPOSIT));
    let answer = send(&app, pay(&app, &channel, 2 * COST, None, "second").await).await;
    assert_eq!(answer.status, StatusCode::OK, "{answer:?}");
    assert_eq!(refunded(&refund(&app, &channel, 2 * COST, None).await).0, "8000");
}

#[tokio::test]
async fn deposits_leave_the_gas_that_claims_need() {
    let world = World::open().await;
    world.chain.devnet.set_base_fee(1_000_000_000);
    let sender = PrivateKeySigner::random();
    world.chain.fund(sender.address(), U256::from(10).pow(U256::from(15))).await;
    let poor = process(&world, sender.clone(), Duration::from_secs(15)).await;
    let app = world.seller(poor);
    let channel = world.channel().await;
    let deposit = world.sign_deposit(&channel, DEPOSIT).await;
    let answer = send(&app, pay(&app, &channel, COST, Some(&deposit), "a").await).await;
    assert_eq!(answer.status, StatusCode::SERVICE_UNAVAILABLE, "{answer:?}");
    world.chain.fund(sender.address(), U256::from(10).pow(U256::from(16))).await;
    let answer = send(&app, pay(&app, &channel, COST, Some(&deposit), "a").await).await;
    assert_eq!(answer.status, StatusCode::OK, "{answer:?}");
}

/// Clients of the official packages look for the offer and ask for the refund with GET.
#[tokio::test]
async fn a_refund_is_taken_with_any_method_where_the_layer_sees_it() {
    let world = World::open().await;
    let layer = || world.layer().build().expect("complete settings");
    let router = Router::new().route("/sold", post(async || "sold")).layer(layer());
    let app = boxed(router);
    let request = |method: Method| Request::builder().method(method).uri("/sold").body(Body::empty()).unwrap();
    for method in [Method::GET, Method::POST, Method::PUT, Method::DELETE] {
        let channel = world.filled(&world.app).await;
        let probe = send(&app, request(method.clone())).await;
        assert_eq!(probe.status, StatusCode::PAYMENT_REQUIRED, "{method}: {probe:?}");
        let accepted = demand(&probe)["accepts"][1].clone();
        let pays =
            async |kind: &str, max| paid(request(method.clone()), &payment(kind, &accepted, &channel, max).await);
        if method != Method::POST {
            let bought = send(&app, pays("voucher", 2 * COST).await).await;
            assert_eq!(bought.status, StatusCode::METHOD_NOT_ALLOWED, "{method}: {bought:?}");
            assert_eq!(world.charged(&channel).await, COST, "it was not charged");
        }
        assert_eq!(refunded(&send(&app, pays("refund", COST).await).await).0, "9000", "{method}");
    }
    // Below the route of one method, the router answers the others by itself.
    let channel = world.filled(&world.app).await;
    let below = boxed(Router::new().route("/sold", post(async || "sold").route_layer(layer())));
    assert_eq!(send(&below, request(Method::GET)).await.status, StatusCode::METHOD_NOT_ALLOWED);
    let both = boxed(Router::new().route("/sold", get(async || "sold").post(async || "sold").route_layer(layer())));
    let accepted = demand(&send(&both, request(Method::GET)).await)["accepts"][1].clone();
    let payment = payment("refund", &accepted, &channel, COST).await;
    assert_eq!(refunded(&send(&both, paid(request(Method::GET), &payment)).await).0, "9000");
}

/// The channel is the layer's, whoever is paid for the request.
#[tokio::test]
async fn a_refund_is_taken_where_others_are_paid_or_nothing_is_sold() {
    let world = World::open().await;
    let layer = world.layer().price_with(|request| {
        let quote = match request.uri.path() {
            "/free" => Ok(Quote::Free),
            "/gone" => Err(PriceError::new(StatusCode::NOT_FOUND, "it is sold")),
            _ => Ok(Quote::To { pay_to: Address::repeat_byte(0x0e), amount: Usdc::from_atomic(1_000) }),
        };
        std::future::ready(quote)
    });
    let app = world.shop.app(layer);
    for path in ["/others", "/free", "/gone"] {
        let channel = world.filled(&world.app).await;
        let request = Request::post(path).body(Body::empty()).unwrap();
        let payment = payment("refund", &offer(&world.app, "refund").await, &channel, COST).await;
        assert_eq!(refunded(&send(&app, paid(request, &payment)).await).0, "9000", "{path}");
    }
}

#[tokio::test]
async fn a_refund_claims_what_was_charged_and_returns_the_rest() {
    let world = World::open().await;
    let app = world.app.clone();
    let channel = world.filled(&app).await;
    let before = world.chain.balance(channel.payer.address()).await;
    let part = refund(&app, &channel, COST, Some("5000")).await;
    assert_eq!(part.status, StatusCode::OK, "{part:?}");
    assert_eq!(part.json()["channelId"], channel.id().to_string());
    let settlement = part.settlement().unwrap();
    assert_eq!(settlement["amount"], "5000");
    assert_eq!(settlement["extra"].get("chargedAmount"), None);
    assert_eq!(channel.state(&world.chain).await, (5_000, COST), "claimed in the same transaction");

    let rest = refund(&app, &channel, COST, None).await;
    assert_eq!(rest.settlement().unwrap()["amount"], "4000", "{rest:?}");
    assert_eq!(channel.state(&world.chain).await, (COST, COST));
    assert_eq!(world.chain.balance(channel.payer.address()).await, before + 9_000);
    refused(&refund(&app, &channel, COST, Some("6000")).await, "refund_no_balance");
    refused(&refund(&app, &channel, 1, None).await, "cumulative_amount_mismatch");
    // What was charged is not forgotten with the money.
    for max in [COST + 1, COST + COST] {
        let answer = send(&app, pay(&app, &channel, max, None, "a").await).await;
        assert_eq!(answer.status, StatusCode::PAYMENT_REQUIRED, "{answer:?}");
    }
    assert_eq!(world.shop.handled(), 1);
}

#[tokio::test]
async fn a_refund_needs_no_price_but_a_channel_of_this_seller_and_its_payers_signature() {
    let world = World::open().await;
    let channel = world.filled(&world.app).await;
    // Prices nothing that is empty, and is free at this path.
    let price = |request: &http::request::Parts, body: &bytes::Bytes| {
        let (is_free, is_empty) = (request.uri.path() == "/free", body.is_empty());
        std::future::ready(match is_free {
            true => Ok(Quote::Free),
            false if is_empty => Err(PriceError::new(StatusCode::BAD_REQUEST, "a task is missing")),
            false => Ok(Quote::Amount(Usdc::from_atomic(2 * PRICE))),
        })
    };
    let app = world.shop.app(world.shop.layer().price_with_body(price).vouchers(world.channels.clone()));
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
    let network = world.shop.asset.network.to_string();
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
    assert_eq!(channel.state(&world.chain).await, left);

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
    assert_eq!((channel.state(&world.chain).await, world.shop.handled()), (left, 1));
}
