//! Clients of x402 v1: they read the body of the 402, pay in `X-PAYMENT`, and are served like all others.

use std::{
    collections::BTreeSet,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use alloy_primitives::{Address, U256};
use axum::body::Body;
use base64::{Engine, prelude::BASE64_STANDARD};
use http::{Request, StatusCode};
use serde_json::{Value, json};
use support::{
    authorization,
    chain::{Chain, on_every_chain},
    devnet::DevnetChain,
    rpc_proxy::{Fate, RpcProxy},
    scripted::{self, Scripted},
    shop::{App, Customer, PRICE, Purchase, Shop, demand, evaluate, paid_v1, send},
    world::World,
};
use tower_x402::{Asset, Network, Usdc, ledger::Counts, protocol::PaymentFlow, server::RequirePaymentLayerBuilder};

on_every_chain! {
    a_client_of_v1_buys_in_both_flows,
    one_authorization_in_both_versions_is_one_purchase,
    errors_of_v1_clients_are_answered_and_not_charged,
    a_failed_settlement_is_told_in_v1,
}

const ORIGIN: &str = "https://api.example";

fn layer(shop: &Shop) -> RequirePaymentLayerBuilder {
    shop.layer().public_origin(ORIGIN).description("Marks arithmetic").mime_type("text/plain")
}

async fn open() -> (DevnetChain, Shop, Customer) {
    let chain = DevnetChain::start(None).await;
    let shop = Shop::open(&chain).await;
    let customer = Customer::with_funds(&chain, 100 * PRICE).await;
    (chain, shop, customer)
}

async fn a_client_of_v1_buys_in_both_flows(chain: &dyn Chain) {
    for flow in [PaymentFlow::Authorization, PaymentFlow::Upfront] {
        let shop = Shop::open(chain).await;
        let app = shop.app(layer(&shop).flow(flow));
        let customer = Customer::with_funds(chain, 3 * PRICE).await;
        let purchase = customer.pay_v1(&app, evaluate("17 * 23")).await;
        let answer = send(&app, purchase.on_v1(evaluate("17 * 23"))).await;
        assert_eq!((answer.status, answer.text()), (StatusCode::OK, "17 * 23"), "{answer:?}");
        assert_eq!(answer.headers["cache-control"], "private");
        assert!(answer.settlement().is_none(), "told in its own version only");
        let settlement = answer.settlement_v1().unwrap();
        let transfers = chain.token_transfers(shop.pay_to).await;
        assert_eq!((transfers.len(), transfers[0].units), (1, PRICE));
        let expected = json!({
            "success": true,
            "transaction": transfers[0].transaction,
            "network": "base-sepolia",
            "payer": customer.from,
        });
        assert_eq!(settlement, expected);

        let again = send(&app, purchase.on_v1(evaluate("17 * 23"))).await;
        assert_eq!((again.text(), again.settlement_v1()), ("17 * 23", Some(settlement)), "replayed");
        assert_eq!(send(&app, purchase.on_v1(evaluate("17 * 24"))).await.status, StatusCode::CONFLICT);
        assert_eq!((shop.handled(), chain.balance(shop.pay_to).await), (1, PRICE));
    }
}

async fn one_authorization_in_both_versions_is_one_purchase(chain: &dyn Chain) {
    let shop = Shop::open(chain).await;
    let app = shop.app(layer(&shop));
    let customer = Customer::with_funds(chain, 9 * PRICE).await;
    for first_in_v1 in [true, false] {
        let (handled, income) = (shop.handled(), chain.balance(shop.pay_to).await);
        let purchase = customer.pay(&app, evaluate("a")).await;
        let (mut v1, mut v2) = (purchase.on_v1(evaluate("a")), purchase.on(evaluate("a")));
        if !first_in_v1 {
            std::mem::swap(&mut v1, &mut v2);
        }
        let answers = [send(&app, v1).await, send(&app, v2).await];
        let told = answers.each_ref().map(|answer| answer.settlement().or(answer.settlement_v1()).unwrap());
        assert_eq!(told[0]["transaction"], told[1]["transaction"]);
        assert!(answers.iter().all(|answer| answer.text() == "a"));
        assert_eq!(answers.each_ref().map(|answer| answer.settlement_v1().is_some()), [first_in_v1, !first_in_v1]);
        assert_eq!((shop.handled(), chain.balance(shop.pay_to).await), (handled + 1, income + PRICE));
    }

    let purchase = customer.pay(&app, evaluate("b")).await;
    let copies = (0..32).map(|n| {
        let request = if n % 2 == 0 { purchase.on(evaluate("b")) } else { purchase.on_v1(evaluate("b")) };
        let app = app.clone();
        async move { send(&app, request).await.text().to_owned() }
    });
    let answers: BTreeSet<_> = futures_util::future::join_all(copies).await.into_iter().collect();
    assert_eq!((answers.len(), shop.handled()), (1, 3), "all at once, too");
    assert_eq!(chain.balance(shop.pay_to).await, 3 * PRICE);
}

async fn errors_of_v1_clients_are_answered_and_not_charged(chain: &dyn Chain) {
    let shop = Shop::open(chain).await;
    let app = shop.app(layer(&shop));
    let customer = Customer::with_funds(chain, 9 * PRICE).await;
    let good = customer.pay_v1(&app, evaluate("a")).await;
    let encoded = BASE64_STANDARD.encode(good.payload_v1().to_string());
    let refused = async |what: &str, request: Request<Body>, status: u16, reason: &str| {
        let answer = send(&app, request).await;
        assert_eq!((answer.status.as_u16(), answer.reason().as_str()), (status, reason), "{what}: {}", answer.text());
        let body = answer.json();
        assert_eq!(body["x402Version"], 1, "{what}: the offer is made again, in v1 too");
        assert!(body["error"].as_str().unwrap().starts_with(reason), "{what}: {body}");
        assert_eq!(body["accepts"][0]["payTo"], shop.pay_to.to_string(), "{what}");
    };

    let with_header = |value: &str| {
        let mut request = evaluate("a");
        request.headers_mut().append("x-payment", value.parse().unwrap());
        request
    };
    for (what, value) in [
        ("empty", String::new()),
        ("not base64", "{}".into()),
        ("URL-safe base64", "-_-_".into()),
        ("cut off", encoded[..encoded.len() / 2].into()),
        ("not JSON", BASE64_STANDARD.encode("payment")),
        ("an empty object", BASE64_STANDARD.encode("{}")),
        ("nested beyond reason", BASE64_STANDARD.encode("[".repeat(10_000))),
        ("16 KiB and one byte", "A".repeat(16 * 1024 + 1)),
    ] {
        refused(what, with_header(&value), 400, "invalid_payload").await;
    }
    let mut twice = with_header(&encoded);
    twice.headers_mut().append("x-payment", encoded.parse().unwrap());
    refused("two payments", twice, 400, "invalid_payload").await;
    let mut both = good.on_v1(evaluate("a"));
    both.headers_mut().extend(good.on(evaluate("a")).headers().clone());
    refused("a payment in each version", both, 400, "invalid_payload").await;

    let other = json!(Address::repeat_byte(9));
    for (what, pointer, value, status, reason) in [
        ("version 2", "/x402Version", json!(2), 400, "invalid_x402_version"),
        ("version 0", "/x402Version", json!(0), 400, "invalid_x402_version"),
        ("no version", "/x402Version", json!("1"), 400, "invalid_payload"),
        ("no scheme", "/scheme", json!(null), 400, "invalid_payload"),
        ("no network", "/network", json!(1), 400, "invalid_payload"),
        ("another scheme", "/scheme", json!("upto"), 402, "unsupported_scheme"),
        ("another network", "/network", json!("base"), 402, "invalid_network"),
        ("an unknown network", "/network", json!("solana"), 402, "invalid_network"),
        ("a network named as in v2", "/network", json!("eip155:84532"), 402, "invalid_network"),
        ("no payload", "/payload", json!(null), 400, "invalid_payload"),
        ("no signature", "/payload/signature", json!(null), 400, "invalid_payload"),
        ("no authorization", "/payload/authorization", json!([]), 400, "invalid_payload"),
        ("another payee", "/payload/authorization/to", other, 402, RECIPIENT),
        ("another value", "/payload/authorization/value", json!("999"), 402, VALUE_MISMATCH),
        ("not signed", "/payload/authorization/validAfter", json!("1"), 402, SIGNATURE),
        ("expired", "/payload/authorization/validBefore", json!("1"), 402, VALID_BEFORE),
    ] {
        let mut payload = good.payload_v1();
        *payload.pointer_mut(pointer).unwrap() = value;
        refused(what, paid_v1(evaluate("a"), &payload), status, reason).await;
    }
    let signed = |change: fn(&mut Purchase)| {
        let mut purchase = good.clone();
        change(&mut purchase);
        purchase.resign();
        purchase.on_v1(evaluate("a"))
    };
    refused("pays less", signed(|p| p.authorization.value = U256::from(1)), 402, VALUE_MISMATCH).await;
    refused("pays another token", signed(|p| p.asset.name = "USD Coin".into()), 402, SIGNATURE).await;
    let head = Request::head("/evaluate").body(Body::empty()).unwrap();
    assert_eq!(send(&app, good.on_v1(head)).await.status, StatusCode::BAD_REQUEST);

    assert_eq!(shop.counts().await, Counts::default(), "nothing in the ledger");
    assert_eq!((shop.handled(), chain.balance(shop.pay_to).await), (0, 0));
    assert_eq!(send(&app, good.on_v1(evaluate("a"))).await.status, StatusCode::OK, "after all that, it still buys");
}

async fn a_failed_settlement_is_told_in_v1(chain: &dyn Chain) {
    let proxy = RpcProxy::start(chain.rpc_url()).await;
    let shop =
        Shop::open_with(chain, |b| b.rpc_url(proxy.url()).confirm_timeout(std::time::Duration::from_secs(1))).await;
    let app = shop.app(layer(&shop));
    let customer = Customer::with_funds(chain, PRICE).await;
    let purchase = customer.pay_v1(&app, evaluate("a")).await;
    let sent = std::sync::atomic::AtomicBool::new(false);
    proxy.judge(move |methods| {
        let sends = methods.iter().any(|method| method.starts_with("eth_sendRaw"));
        match (sent.fetch_or(sends, std::sync::atomic::Ordering::SeqCst), sends) {
            (false, false) => Fate::Pass,
            (false, true) => Fate::DropAfter,
            (true, _) => Fate::DropBefore,
        }
    });
    let answer = send(&app, purchase.on_v1(evaluate("a"))).await;
    assert_eq!(answer.status, StatusCode::SERVICE_UNAVAILABLE, "{answer:?}");
    assert!(answer.settlement().is_none());
    let told = answer.settlement_v1().unwrap();
    assert_eq!((&told["success"], &told["errorReason"]), (&json!(false), &json!("settlement_pending")));
    assert_eq!(told["network"], "base-sepolia");
    proxy.judge(|_| Fate::Pass);
    let answer = send(&app, purchase.on_v1(evaluate("a"))).await;
    assert_eq!(answer.settlement_v1().unwrap()["transaction"], told["transaction"]);
}

#[tokio::test]
async fn the_402_serves_both_versions() {
    let (_chain, shop, _) = open().await;
    let ask = async |layer: RequirePaymentLayerBuilder| send(&shop.app(layer), evaluate("a")).await;
    let answer = ask(layer(&shop)).await;
    let expected = json!({
        "x402Version": 1,
        "error": "payment required",
        "accepts": [{
            "scheme": "exact",
            "network": "base-sepolia",
            "maxAmountRequired": PRICE.to_string(),
            "resource": "https://api.example/evaluate",
            "description": "Marks arithmetic",
            "mimeType": "text/plain",
            "payTo": shop.pay_to.to_string(),
            "maxTimeoutSeconds": 120,
            "asset": shop.asset.address.to_string(),
            "extra": { "name": "USDC", "version": "2" },
        }],
    });
    assert_eq!(answer.json(), expected);
    assert_eq!(demand(&answer)["x402Version"], 2);
    assert_eq!(demand(&answer)["accepts"][0]["network"], "eip155:84532");

    let fixed = ask(layer(&shop).resource_url("https://api.example/x?y=1")).await;
    assert_eq!(fixed.json()["accepts"][0]["resource"], "https://api.example/x?y=1");
    let upfront = ask(layer(&shop).flow(PaymentFlow::Upfront)).await;
    assert_eq!(upfront.json(), expected, "the other flow, where it is the only one, looks the same");
    let both = ask(layer(&shop).flow(PaymentFlow::Upfront).flow(PaymentFlow::Authorization)).await;
    assert_eq!(both.json(), expected, "and is not offered twice");
    assert_eq!(demand(&both)["accepts"].as_array().unwrap().len(), 2);
}

#[tokio::test]
async fn v1_header_is_ignored_where_v1_is_turned_off() {
    let (chain, shop, customer) = open().await;
    let app = shop.app(layer(&shop).v1(false));
    let unpaid = send(&app, evaluate("a")).await;
    assert_eq!(unpaid.json()["x402Version"], 2, "{}", unpaid.text());
    let purchase = customer.pay(&app, evaluate("a")).await;
    let answer = send(&app, purchase.on_v1(evaluate("a"))).await;
    assert_eq!((answer.status, answer.reason().as_str()), (StatusCode::PAYMENT_REQUIRED, "payment required"));
    assert_eq!((shop.handled(), chain.balance(shop.pay_to).await), (0, 0));
    let mut both = purchase.on_v1(evaluate("a"));
    both.headers_mut().extend(purchase.on(evaluate("a")).headers().clone());
    let answer = send(&app, both).await;
    assert_eq!(answer.status, StatusCode::OK);
    assert!(answer.settlement().is_some() && answer.settlement_v1().is_none());
}

/// A payment in v1 does not name the offer that it pays; the signed message tells.
#[tokio::test]
async fn of_several_offers_the_one_that_was_signed_is_paid() {
    let (chain, shop, customer) = open().await;
    let unknown_token = support::changed(shop.asset.clone(), |asset| asset.address = authorization::random_address());
    let other_payee = authorization::random_address();
    let builder = tower_x402::server::RequirePaymentLayer::builder()
        .price("$0.001")
        .facilitator(shop.facilitator.clone())
        .pay_to_in(unknown_token, shop.pay_to)
        .pay_to(Network::BASE_SEPOLIA, shop.pay_to)
        .pay_to(Network::BASE_SEPOLIA, other_payee);
    let app: App = shop.app(builder);
    let offers = send(&app, evaluate("a")).await.json();
    assert_eq!(offers["accepts"].as_array().map(Vec::len), Some(3));
    for (index, payee) in [(1, shop.pay_to), (2, other_payee)] {
        let purchase = customer.sign(&offers, index);
        let answer = send(&app, purchase.on_v1(evaluate("a"))).await;
        assert_eq!((answer.status, answer.text()), (StatusCode::OK, "a"), "{answer:?}");
        assert_eq!(chain.balance(payee).await, PRICE);
    }
    let answer = send(&app, customer.sign(&offers, 0).on_v1(evaluate("a"))).await;
    assert_eq!(answer.reason(), "asset_not_deployed_contract");
}

#[tokio::test]
async fn payment_in_v1_is_not_lost_when_the_price_changes() {
    let (chain, shop, customer) = open().await;
    let purchase = customer.pay_v1(&shop.app(layer(&shop)), evaluate("a")).await;
    let cheap = shop.app(layer(&shop));
    assert_eq!(send(&cheap, purchase.on_v1(evaluate("a"))).await.status, StatusCode::OK);
    let dear = shop.app(layer(&shop).price("$0.002"));
    assert_eq!(send(&dear, purchase.on_v1(evaluate("a"))).await.text(), "a");
    assert_eq!(send(&dear, purchase.on_v1(evaluate("b"))).await.status, StatusCode::CONFLICT);
    let unused = customer.pay_v1(&cheap, evaluate("b")).await;
    let answer = send(&dear, unused.on_v1(evaluate("b"))).await;
    assert_eq!((answer.status.as_u16(), answer.reason().as_str()), (402, VALUE_MISMATCH));
    assert_eq!((shop.handled(), chain.balance(shop.pay_to).await), (1, PRICE));
}

/// The route had a fixed price, and its requests cost what the work turns out to cost now: nothing is offered in v1 any more.
#[tokio::test]
async fn payment_in_v1_is_not_lost_when_only_vouchers_or_permits_are_taken() {
    let world = World::open().await;
    let (shop, customer) = (&world.shop, world.customer());
    let fixed = shop.app(shop.layer());
    let bought = customer.pay_v1(&fixed, evaluate("a")).await;
    let first = send(&fixed, bought.on_v1(evaluate("a"))).await;
    assert_eq!((first.status, first.text()), (StatusCode::OK, "a"), "{first:?}");
    let metered =
        [shop.layer().vouchers_only(world.channels.clone()), shop.layer().upto_only(), world.layer().upto_only()];
    for (done, layer) in (1..).zip(metered) {
        // Its work failed after it was settled, so the work is still owed.
        let upfront = world.obeying(shop.layer().flow(PaymentFlow::Upfront));
        let owed = customer.pay_v1(&upfront, evaluate("fails")).await;
        assert_eq!(send(&upfront, owed.on_v1(evaluate("fails"))).await.status, StatusCode::INTERNAL_SERVER_ERROR);
        let late = customer.pay_v1(&fixed, evaluate("a")).await;

        let app = shop.app(layer);
        assert_eq!(send(&app, evaluate("a")).await.json()["x402Version"], 2);
        let again = send(&app, bought.on_v1(evaluate("a"))).await;
        assert_eq!((again.status, again.text()), (StatusCode::OK, "a"), "{again:?}");
        assert_eq!(again.settlement_v1(), first.settlement_v1());
        assert_eq!(send(&app, bought.on_v1(evaluate("b"))).await.status, StatusCode::CONFLICT);
        let work = send(&app, owed.on_v1(evaluate("fails"))).await;
        assert_eq!((work.status, work.text()), (StatusCode::OK, "fails"), "{work:?}");
        let new = send(&app, late.on_v1(evaluate("a"))).await;
        assert_eq!(new.status, StatusCode::PAYMENT_REQUIRED, "{new:?}");
        assert_eq!((shop.handled(), world.received().await), (1 + 2 * done, (1 + done) * PRICE));
    }
}

#[tokio::test]
async fn cors_exposes_the_settlement_header() {
    let (_chain, shop, _) = open().await;
    let mut request = evaluate("a");
    request.headers_mut().insert("origin", "https://app.example".parse().unwrap());
    let exposed = send(&shop.app(layer(&shop)), request).await.headers["access-control-expose-headers"].clone();
    let exposed: Value = exposed.to_str().unwrap().split(", ").collect();
    assert_eq!(exposed, json!(["PAYMENT-REQUIRED", "PAYMENT-RESPONSE", "X-PAYMENT-RESPONSE", "Retry-After"]));
}

const SIGNATURE: &str = "invalid_exact_evm_payload_signature";
const RECIPIENT: &str = "invalid_exact_evm_payload_recipient_mismatch";
const VALUE_MISMATCH: &str = "invalid_exact_evm_payload_authorization_value_mismatch";
const VALID_BEFORE: &str = "invalid_exact_evm_payload_authorization_valid_before";

/// v1 names no token, and the signature of a contract wallet tells none.
#[tokio::test]
async fn answer_bought_in_any_token_is_given_again_at_another_price() {
    let (facilitator, price) = (Arc::new(Scripted::new()), Arc::new(AtomicU64::new(PRICE)));
    let now = price.clone();
    let other = Asset::new(Network::BASE_SEPOLIA, Address::repeat_byte(0x70), "EURC", "2");
    let layer = scripted::layer(&facilitator).pay_to_in(other, Address::repeat_byte(0xee)).price_with(move |_| {
        let amount = Usdc::from_atomic(now.load(Ordering::SeqCst));
        async move { Ok(amount.into()) }
    });
    let (app, handled) = scripted::serve(layer, scripted::echo);
    for token in [0, 1] {
        price.store(PRICE, Ordering::SeqCst);
        let mut purchase = scripted::customer().sign(&send(&app, evaluate("x")).await.json(), token);
        purchase.signature = vec![7; 65].into();
        for later in [PRICE, 2 * PRICE] {
            price.store(later, Ordering::SeqCst);
            let answer = send(&app, purchase.on_v1(evaluate("x"))).await;
            assert_eq!((answer.status, answer.text()), (StatusCode::OK, "x"), "{token} at {later}: {answer:?}");
        }
    }
    assert_eq!((handled.load(Ordering::SeqCst), facilitator.settlements()), (2, 2));
}
