//! The status service: a client that knows a payment's key learns its status, and nothing else.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use alloy_primitives::{Address, B256};
use axum::body::Body;
use http::{Request, Response, StatusCode};
use serde_json::{Value, json};
use support::{
    chain::{Chain, on_every_chain},
    devnet::DevnetChain,
    rpc_proxy::{Fate, RpcProxy},
    shop::{Answer, App, Customer, PRICE, Purchase, Shop, app, demand, evaluate, send},
};
use tower_x402::{
    facilitator::Facilitator,
    protocol::PaymentFlow,
    server::{BuildError, PaymentStatus},
};

on_every_chain! {
    the_state_of_a_payment_is_told_from_its_first_work_to_its_settlement,
    payment_that_no_node_sees_is_reported_as_unknown,
}

fn status(shop: &Shop) -> App {
    app(PaymentStatus::new(shop.facilitator.ledger().clone()))
}

fn ask(query: &str) -> Request<Body> {
    Request::get(format!("/payments/status?{query}")).body(Body::empty()).unwrap()
}

fn query(purchase: &Purchase) -> String {
    let (asset, payer) = (purchase.asset.address, purchase.authorization.from);
    format!("network=eip155:84532&asset={asset}&payer={payer}&nonce={}", purchase.authorization.nonce)
}

async fn state(shop: &Shop, purchase: &Purchase) -> Value {
    let answer = send(&status(shop), ask(&query(purchase))).await;
    assert_eq!(answer.status, StatusCode::OK, "{answer:?}");
    assert_eq!(answer.headers["cache-control"], "no-store");
    assert_eq!(answer.headers["content-type"], "application/json");
    let signature = purchase.signature.to_string();
    assert!(!answer.text().contains("my answer") && !answer.text().contains(&signature[2..20]), "{answer:?}");
    answer.json()
}

async fn the_state_of_a_payment_is_told_from_its_first_work_to_its_settlement(chain: &dyn Chain) {
    let shop = Shop::open(chain).await;
    let customer = Customer::with_funds(chain, 9 * PRICE).await;
    let works = Arc::new(AtomicBool::new(false));
    let (seen, works_now) = (Arc::new(std::sync::Mutex::new(Vec::new())), works.clone());
    let (watching, note) = (shop.clone(), seen.clone());
    let handler = move |payment: tower_x402::server::VerifiedPayment, _| {
        let (shop, note, works) = (watching.clone(), note.clone(), works_now.clone());
        async move {
            let (asset, payer, nonce) = (shop.asset.address, payment.payer, payment.nonce);
            let query = format!("network=base-sepolia&asset={asset:#x}&payer={payer:#x}&nonce={nonce}");
            let answer = send(&status(&shop), ask(&query)).await.json();
            note.lock().unwrap().push(answer);
            let code = if works.load(Ordering::SeqCst) { 200 } else { 500 };
            Ok(Response::builder().status(code).body(Body::from("my answer")).unwrap())
        }
    };
    let app = shop.app_with(shop.layer(), handler);
    let purchase = customer.pay(&app, evaluate("a")).await;
    assert_eq!(send(&status(&shop), ask(&query(&purchase))).await.status, StatusCode::NOT_FOUND);
    assert_eq!(send(&app, purchase.on(evaluate("a"))).await.status, StatusCode::INTERNAL_SERVER_ERROR);
    assert_eq!(state(&shop, &purchase).await, json!({ "state": "failed" }), "and may still be presented");

    works.store(true, Ordering::SeqCst);
    let answer = send(&app, purchase.on(evaluate("a"))).await;
    assert_eq!(*seen.lock().unwrap(), vec![json!({ "state": "pending" }); 2], "while it was worked on");
    let told = state(&shop, &purchase).await;
    assert!(["settled", "final"].contains(&told["state"].as_str().unwrap()), "{told}");
    assert_eq!(told["transaction"], answer.settlement().unwrap()["transaction"]);
    assert!(told["block"].is_u64(), "{told}");
}

async fn payment_that_no_node_sees_is_reported_as_unknown(chain: &dyn Chain) {
    let proxy = RpcProxy::start(chain.rpc_url()).await;
    let shop =
        Shop::open_with(chain, |b| b.rpc_url(proxy.url()).confirm_timeout(std::time::Duration::from_secs(1))).await;
    let app = shop.app(shop.layer().flow(PaymentFlow::Upfront));
    let customer = Customer::with_funds(chain, PRICE).await;
    let purchase = customer.pay(&app, evaluate("a")).await;
    let sent = AtomicBool::new(false);
    proxy.judge(move |methods| {
        let sends = methods.iter().any(|method| method.starts_with("eth_sendRaw"));
        match (sent.fetch_or(sends, Ordering::SeqCst), sends) {
            (false, false) => Fate::Pass,
            (false, true) => Fate::DropAfter,
            (true, _) => Fate::DropBefore,
        }
    });
    let answer = send(&app, purchase.on(evaluate("a"))).await;
    let pending = answer.settlement().unwrap();
    assert_eq!(pending["errorReason"], "settlement_pending");
    let told = state(&shop, &purchase).await;
    assert!(["submitted", "unknown"].contains(&told["state"].as_str().unwrap()), "{told}");
    assert_eq!(told["transaction"], pending["transaction"]);
    proxy.judge(|_| Fate::Pass);
    assert_eq!(send(&app, purchase.on(evaluate("a"))).await.status, StatusCode::OK);
    assert_eq!(state(&shop, &purchase).await["transaction"], pending["transaction"]);
}

#[tokio::test]
async fn malformed_query_is_refused() {
    let chain = DevnetChain::start(None).await;
    let shop = Shop::open(&chain).await;
    let app = shop.app(shop.layer());
    let customer = Customer::with_funds(&chain, PRICE).await;
    let purchase = customer.pay(&app, evaluate("a")).await;
    assert_eq!(send(&app, purchase.on(evaluate("a"))).await.status, StatusCode::OK);

    let good = query(&purchase);
    let escaped = good.replace(':', "%3A");
    for query in
        [good.clone(), escaped, format!("{good}&more=than&needed"), good.replace("eip155:84532", "base-sepolia")]
    {
        assert_eq!(send(&status(&shop), ask(&query)).await.status, StatusCode::OK, "{query}");
    }
    let refused = async |query: &str, why: &str| {
        let answer = send(&status(&shop), ask(query)).await;
        assert_eq!((answer.status, &answer.json()["error"]), (StatusCode::BAD_REQUEST, &json!("malformed")), "{query}");
        assert!(answer.json()["detail"].as_str().unwrap().contains(why), "{query}: {}", answer.text());
        assert_eq!(answer.headers["cache-control"], "no-store");
    };
    for name in ["network", "asset", "payer", "nonce"] {
        let parameters: Vec<_> = good.split('&').filter(|parameter| !parameter.starts_with(name)).collect();
        let without = parameters.join("&");
        refused(&without, &format!("{name} is missing")).await;
        for value in ["", "0x12", "x", "%00", "eip155:", "0X7099"] {
            refused(&format!("{without}&{name}={value}"), &format!("{name} cannot be read")).await;
        }
        let again = good.split('&').find(|parameter| parameter.starts_with(name)).unwrap();
        refused(&format!("{good}&{again}"), &format!("{name} is given more than once")).await;
    }
    refused(&format!("{good}&padding={}", "x".repeat(1_024)), "more than 1024 bytes").await;
    refused("", "network is missing").await;

    let other = |from: &str, to: String| good.replace(from, &to);
    for query in [
        other("84532", "8453".into()),
        other(&purchase.authorization.nonce.to_string(), B256::repeat_byte(9).to_string()),
        other(&purchase.authorization.from.to_string(), Address::repeat_byte(9).to_string()),
        other(&purchase.asset.address.to_string(), Address::repeat_byte(9).to_string()),
    ] {
        let answer = send(&status(&shop), ask(&query)).await;
        assert_eq!((answer.status, &answer.json()["error"]), (StatusCode::NOT_FOUND, &json!("unknown_payment")));
    }

    let with_method =
        |method: &str| Request::builder().method(method).uri(format!("/s?{good}")).body(Body::empty()).unwrap();
    assert_eq!(send(&status(&shop), with_method("HEAD")).await.status, StatusCode::OK);
    let answer = send(&status(&shop), with_method("POST")).await;
    assert_eq!(
        (answer.status, &answer.headers["allow"]),
        (StatusCode::METHOD_NOT_ALLOWED, &"GET, HEAD".parse().unwrap())
    );
}

#[tokio::test]
async fn the_402_declares_the_status_url() {
    let chain = DevnetChain::start(None).await;
    let shop = Shop::open(&chain).await;
    let plain: Answer = send(&shop.app(shop.layer()), evaluate("a")).await;
    assert_eq!(demand(&plain)["extensions"]["payment-status"], Value::Null);
    for url in ["/payments/status", "https://api.example/payments/status?of=evaluator"] {
        for layer in [shop.layer(), shop.layer().resource_url("https://api.example/evaluate")] {
            let answer = send(&shop.app(layer.status_url(url)), evaluate("a")).await;
            assert_eq!(demand(&answer)["extensions"]["payment-status"]["info"], json!({ "url": url }));
            assert_eq!(answer.json()["x402Version"], 1, "v1 has no extensions: {}", answer.text());
        }
    }
    for url in ["", "payments/status", "//api.example/status", "ftp://api.example/status", "/a b"] {
        let error = shop.layer().status_url(url).build().unwrap_err();
        assert_eq!(error, BuildError::Url(url.into()));
    }
}
