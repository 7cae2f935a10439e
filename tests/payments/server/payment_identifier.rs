//! The extension `payment-identifier` of x402 v2, with which payers name their payments.

use std::{
    path::Path,
    sync::{Arc, Mutex},
    time::Duration,
};

use alloy_primitives::U256;
use alloy_signer_local::PrivateKeySigner;
use axum::body::Body;
use futures_util::future::join_all;
use http::{HeaderValue, Request, Response, StatusCode};
use serde_json::{Value, json};
use support::{
    chain::{Chain, on_every_chain},
    devnet::DevnetChain,
    rpc_proxy::RpcProxy,
    shop::{Answer, App, Customer, PRICE, Purchase, Shop, demand, evaluate, paid, send},
};
use tower::{BoxError, Layer, ServiceExt, service_fn};
use tower_x402::{
    Network,
    client::{AddPaymentLayer, Payer, PaymentOutcome, ReceiptExt, RetryPolicy},
    facilitator::OnchainFacilitator,
    ledger::{Counts, SqliteLedger},
    protocol::{MAX_PAYMENT_HEADER, PaymentFlow, PaymentId, PaymentPayload, decode_header},
    server::RequirePaymentLayerBuilder,
};

on_every_chain! {
    a_payment_with_its_id_finds_its_answer,
    an_id_stands_for_one_request,
    an_id_stands_for_one_payment,
    of_fifty_payments_with_one_id_one_is_settled,
    payment_without_its_id_is_refused,
}

const ID: &str = "pay_7d5d747be160e280504c099d984bcfe0";
const OTHER_ID: &str = "an-entirely-different-id";

fn layer(shop: &Shop) -> RequirePaymentLayerBuilder {
    shop.layer()
}

async fn open(chain: &dyn Chain) -> (Shop, App, Customer) {
    let shop = Shop::open(chain).await;
    let app = shop.app(layer(&shop));
    (shop, app, Customer::with_funds(chain, 100 * PRICE).await)
}

/// Returns the payment with an id, in the extension's form.
fn named(purchase: &Purchase, id: impl Into<Value>) -> Value {
    let mut payload = purchase.payload();
    payload["extensions"] =
        json!({ "payment-identifier": { "info": { "required": false, "id": id.into() }, "schema": {} } });
    payload
}

async fn present(app: &App, purchase: &Purchase, id: impl Into<Value>, request: Request<Body>) -> Answer {
    send(app, paid(request, &named(purchase, id))).await
}

fn list() -> Request<Body> {
    Request::get("/list").body(Body::empty()).unwrap()
}

/// Checks that the payment is refused for its id, and that the answer reveals nothing of the other payment.
fn assert_conflict(answer: &Answer) {
    assert_eq!((answer.status, answer.reason().as_str()), (StatusCode::CONFLICT, "payment_identifier_conflict"));
    assert!(answer.settlement().is_none(), "{answer:?}");
    assert!(!answer.text().contains("0x"), "{answer:?}");
    assert!(!answer.headers.contains_key("retry-after"), "coming back does not help");
}

async fn a_payment_with_its_id_finds_its_answer(chain: &dyn Chain) {
    for flow in [PaymentFlow::Authorization, PaymentFlow::Upfront] {
        let shop = Shop::open(chain).await;
        let app = shop.app(layer(&shop).flow(flow));
        let customer = Customer::with_funds(chain, 2 * PRICE).await;
        let purchase = customer.pay(&app, evaluate("a")).await;
        let first = present(&app, &purchase, ID, evaluate("a")).await;
        assert_eq!((first.status, first.text()), (StatusCode::OK, "a"), "{first:?}");
        for _ in 0..5 {
            let again = present(&app, &purchase, ID, evaluate("a")).await;
            assert_eq!((again.status, again.text()), (StatusCode::OK, "a"));
            assert_eq!(again.settlement(), first.settlement());
        }
        assert_eq!((shop.handled(), chain.balance(shop.pay_to).await), (1, PRICE));
    }
}

async fn an_id_stands_for_one_request(chain: &dyn Chain) {
    let (shop, app, customer) = open(chain).await;
    let purchase = customer.pay(&app, evaluate("a")).await;
    assert_eq!(present(&app, &purchase, ID, evaluate("a")).await.status, StatusCode::OK);
    for other in [evaluate("b"), Request::post("/evaluate?k=2").body(Body::from("a")).unwrap(), list()] {
        let answer = present(&app, &purchase, ID, other).await;
        assert_eq!((answer.status, answer.reason().as_str()), (StatusCode::CONFLICT, "payment_already_used"));
        assert!(answer.settlement().is_none());
    }
    assert_eq!((shop.handled(), chain.balance(shop.pay_to).await), (1, PRICE));
}

async fn an_id_stands_for_one_payment(chain: &dyn Chain) {
    let proxy = RpcProxy::start(chain.rpc_url()).await;
    let shop = Shop::open_at(chain, proxy.url()).await;
    let app = shop.app(layer(&shop));
    let customer = Customer::with_funds(chain, 100 * PRICE).await;
    let [first, second] = [customer.pay(&app, evaluate("a")).await, customer.pay(&app, evaluate("a")).await];
    let answer = present(&app, &first, ID, evaluate("a")).await;
    assert_eq!(answer.status, StatusCode::OK);
    proxy.reset();
    assert_conflict(&present(&app, &second, ID, Request::get("/list").body(Body::empty()).unwrap()).await);
    let other = present(&app, &second, ID, evaluate("b")).await;
    assert_eq!((other.status, other.reason().as_str()), (StatusCode::CONFLICT, "payment_already_used"));
    // Signed anew for the same request: what was paid for, and the new authorization is not used.
    for _ in 0..5 {
        let again = present(&app, &second, ID, evaluate("a")).await;
        assert_eq!((again.status, again.text(), again.settlement()), (StatusCode::OK, "a", answer.settlement()));
    }
    assert_eq!(proxy.reset().requests, 0, "nothing is verified or settled");
    assert!(shop.record(&second.authorization).await.is_none());
    assert_eq!(shop.counts().await, Counts { settled: 1, ..Counts::default() });

    let mut forged = second.clone();
    forged.signer = PrivateKeySigner::random();
    forged.resign();
    assert_eq!(present(&app, &forged, ID, evaluate("a")).await.status, StatusCode::PAYMENT_REQUIRED);
    assert_eq!(present(&app, &second, OTHER_ID, evaluate("a")).await.status, StatusCode::OK, "the payment is unused");
    let stranger = Customer::with_funds(chain, PRICE).await;
    let theirs = stranger.pay(&app, evaluate("a")).await;
    assert_eq!(present(&app, &theirs, ID, evaluate("a")).await.status, StatusCode::OK, "ids are a payer's own");
    assert_eq!((shop.handled(), chain.balance(shop.pay_to).await), (3, 3 * PRICE));
}

async fn of_fifty_payments_with_one_id_one_is_settled(chain: &dyn Chain) {
    let (shop, app, customer) = open(chain).await;
    let offer = demand(&send(&app, evaluate("a")).await);
    let purchases: Vec<Purchase> = (0..50).map(|_| customer.sign(&offer, 0)).collect();
    let answers = join_all(purchases.iter().map(|purchase| present(&app, purchase, ID, evaluate("a")))).await;
    for answer in &answers {
        assert_eq!((answer.status, answer.text()), (StatusCode::OK, "a"), "{answer:?}");
        assert_eq!(answer.settlement(), answers[0].settlement());
    }
    assert_eq!((shop.handled(), chain.balance(shop.pay_to).await), (1, PRICE));
    assert_eq!(shop.counts().await, Counts { settled: 1, ..Counts::default() });
}

/// The published authorization and the right request are not enough without the id.
async fn payment_without_its_id_is_refused(chain: &dyn Chain) {
    let shop = Shop::open(chain).await;
    let app = shop.app_with(layer(&shop), |_, _| async { Ok(Response::new(Body::from("public price list"))) });
    let customer = Customer::with_funds(chain, 9 * PRICE).await;
    let purchase = customer.pay(&app, list()).await;
    let first = present(&app, &purchase, ID, list()).await;
    assert_eq!((first.status, first.text()), (StatusCode::OK, "public price list"));
    assert_conflict(&send(&app, purchase.on(list())).await);
    assert_conflict(&send(&app, purchase.on_v1(list())).await);
    assert_conflict(&present(&app, &purchase, OTHER_ID, list()).await);
    assert_conflict(&present(&app, &purchase, OTHER_ID, evaluate("a")).await);
    let again = present(&app, &purchase, ID, list()).await;
    assert_eq!((again.text(), again.settlement()), ("public price list", first.settlement()));

    let unnamed = customer.pay(&app, list()).await;
    assert_eq!(send(&app, unnamed.on(list())).await.status, StatusCode::OK, "an id is not demanded");
    assert_conflict(&present(&app, &unnamed, OTHER_ID, list()).await);
    assert_eq!(send(&app, unnamed.on(list())).await.status, StatusCode::OK);
    assert_eq!((shop.handled(), chain.balance(shop.pay_to).await), (2, 2 * PRICE));
}

#[tokio::test]
async fn response_without_another_secret_is_replayed_with_the_id() {
    let chain = DevnetChain::start(None).await;
    let shop = Shop::open(&chain).await;
    let layer = layer(&shop).anonymous_replays(1, Duration::ZERO);
    let app = shop.app_with(layer, |_, _| async { Ok(Response::new(Body::from("public price list"))) });
    let customer = Customer::with_funds(&chain, 2 * PRICE).await;
    let purchase = customer.pay(&app, list()).await;
    for _ in 0..20 {
        assert_eq!(present(&app, &purchase, ID, list()).await.text(), "public price list");
    }
    let unnamed = customer.pay(&app, list()).await;
    let statuses = [
        send(&app, unnamed.on(list())).await,
        send(&app, unnamed.on(list())).await,
        send(&app, unnamed.on(list())).await,
    ];
    assert_eq!(statuses.map(|answer| answer.status.as_u16()), [200, 200, 409], "others a few times, as ever");
    assert_eq!(shop.handled(), 2);
}

#[tokio::test]
async fn malformed_id_is_a_bad_request() {
    let chain = DevnetChain::start(None).await;
    let (shop, app, customer) = open(&chain).await;
    let purchase = customer.pay(&app, evaluate("a")).await;
    let long = "a".repeat(129);
    for id in [
        json!(""),
        json!("fifteen-letters"),
        json!(long),
        json!("with a space in it"),
        json!(1),
        json!(null),
        json!([ID]),
    ] {
        let answer = present(&app, &purchase, id.clone(), evaluate("a")).await;
        assert_eq!((answer.status.as_u16(), answer.reason().as_str()), (400, "invalid_payload"), "{id}");
        assert!(answer.headers.contains_key("payment-required"), "{id}: the offer is made again");
    }
    let mut payload = purchase.payload();
    payload["extensions"] = json!([ID]);
    assert_eq!(send(&app, paid(evaluate("a"), &payload)).await.status, StatusCode::BAD_REQUEST);
    assert_eq!((shop.handled(), shop.counts().await), (0, Counts::default()));
    for id in ["sixteen__letters".to_owned(), "Z-9_".repeat(32)] {
        let purchase = customer.pay(&app, evaluate("a")).await;
        assert_eq!(present(&app, &purchase, id, evaluate("a")).await.status, StatusCode::OK);
    }
}

#[tokio::test]
async fn the_402_offers_it_unless_it_is_turned_off() {
    let chain = DevnetChain::start(None).await;
    let (shop, app, customer) = open(&chain).await;
    let offered = demand(&send(&app, evaluate("a")).await)["extensions"]["payment-identifier"].clone();
    assert_eq!(offered["info"], json!({ "required": false }));
    assert_eq!(offered["schema"]["properties"]["id"]["minLength"], 16);
    let elsewhere = shop.app(shop.layer().payment_identifier(false));
    assert_eq!(demand(&send(&elsewhere, evaluate("a")).await).get("extensions"), None);

    // A client that does not know the extension echoes it unchanged.
    let purchase = customer.pay(&app, evaluate("a")).await;
    let mut echo = purchase.payload();
    echo["extensions"] = json!({ "payment-identifier": offered });
    assert_eq!(send(&app, paid(evaluate("a"), &echo)).await.text(), "a");
    assert_eq!(send(&app, purchase.on(evaluate("a"))).await.text(), "a", "which is no id");
    assert_eq!(shop.handled(), 1);
}

#[tokio::test]
async fn ids_bind_nothing_where_they_are_not_offered() {
    let chain = DevnetChain::start(None).await;
    let (shop, asks, customer) = open(&chain).await;
    let silent = shop.app(shop.layer().payment_identifier(false));
    for body in ["a", "b"] {
        let purchase = customer.pay(&silent, evaluate(body)).await;
        for id in [json!(ID), json!(OTHER_ID), json!("short")] {
            assert_eq!(present(&silent, &purchase, id, evaluate(body)).await.text(), body);
        }
        assert_eq!(send(&silent, purchase.on(evaluate(body))).await.text(), body);
        assert_eq!(shop.record(&purchase.authorization).await.unwrap().id, None);
    }
    // A payment that was bound to an id stays bound.
    let purchase = customer.pay(&asks, evaluate("c")).await;
    assert_eq!(present(&asks, &purchase, ID, evaluate("c")).await.text(), "c");
    assert_conflict(&send(&silent, purchase.on(evaluate("c"))).await);
    assert_conflict(&present(&silent, &purchase, OTHER_ID, evaluate("c")).await);
    assert_eq!(present(&silent, &purchase, ID, evaluate("c")).await.text(), "c");
    assert_eq!(shop.handled(), 3);
}

#[tokio::test]
async fn the_id_of_a_payment_that_was_refused_is_free() {
    let chain = DevnetChain::start(None).await;
    let (shop, app, _) = open(&chain).await;
    let customer = Customer::with_funds(&chain, 0).await;
    let purchase = customer.pay(&app, evaluate("a")).await;
    assert_eq!(present(&app, &purchase, ID, evaluate("a")).await.reason(), "insufficient_funds");
    chain.mint(customer.from, PRICE).await;
    let another = customer.pay(&app, evaluate("a")).await;
    assert_eq!(present(&app, &another, ID, evaluate("a")).await.text(), "a");
    assert_eq!(shop.handled(), 1);
}

/// Opens a seller with this file as its ledger.
async fn shop_with(chain: &DevnetChain, pay_to: &Shop, ledger: &Path) -> (Shop, Arc<SqliteLedger>) {
    let settler = PrivateKeySigner::random();
    chain.fund(settler.address(), U256::from(10).pow(U256::from(18))).await;
    let ledger = Arc::new(SqliteLedger::open(ledger).await.unwrap());
    let facilitator = OnchainFacilitator::builder()
        .rpc_url(chain.rpc_url())
        .network(Network::BASE_SEPOLIA)
        .signer(settler)
        .ledger(ledger.clone());
    let facilitator = Arc::new(facilitator.build().await.unwrap());
    (Shop { facilitator, ..pay_to.clone() }, ledger)
}

#[tokio::test]
async fn ids_are_known_after_a_restart() {
    let chain = DevnetChain::start(None).await;
    let (shop, _, customer) = open(&chain).await;
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("ledger.sqlite");
    let (before, ledger) = shop_with(&chain, &shop, &path).await;
    let app = before.app(layer(&before));
    let purchase = customer.pay(&app, list()).await;
    let first = present(&app, &purchase, ID, list()).await;
    assert_eq!(first.status, StatusCode::OK);
    drop((app, before));
    ledger.close().await;

    let (after, _ledger) = shop_with(&chain, &shop, &path).await;
    let app = after.app(layer(&after).anonymous_replays(0, Duration::ZERO));
    assert_conflict(&send(&app, purchase.on(list())).await);
    let other = customer.pay(&app, list()).await;
    assert_eq!(present(&app, &other, ID, list()).await.settlement(), first.settlement());
    let again = present(&app, &purchase, ID, list()).await;
    assert_eq!((again.status, again.settlement()), (StatusCode::OK, first.settlement()));
    assert_eq!((shop.handled(), chain.balance(shop.pay_to).await), (1, PRICE));
}

/// Our client names its payments. It gets its answer after the first one was lost, although nothing else in its request is secret.
#[tokio::test]
async fn our_client_names_its_payments() {
    let chain = DevnetChain::start(None).await;
    let (shop, _, customer) = open(&chain).await;
    let layer = layer(&shop).anonymous_replays(0, Duration::ZERO);
    let app = shop.app_with(layer, |_, _| async { Ok(Response::new(Body::from("public price list"))) });
    let sent: Arc<Mutex<Vec<HeaderValue>>> = Arc::default();
    let lossy = {
        let (app, sent) = (app.clone(), sent.clone());
        service_fn(move |request: Request<String>| {
            let payment = request.headers().get("payment-signature").cloned();
            let is_first = payment.as_ref().is_some_and(|payment| !sent.lock().unwrap().contains(payment));
            sent.lock().unwrap().extend(payment);
            let app = app.clone();
            async move {
                let response = app.oneshot(request.map(Body::from)).await?;
                if is_first { Err(BoxError::from("the connection was lost")) } else { Ok(response) }
            }
        })
    };
    let payer = Payer::builder(customer.signer.clone()).build();
    let client =
        AddPaymentLayer::new(payer).retry(RetryPolicy::default().first_pause(Duration::from_millis(1))).layer(lossy);
    let request = || Request::get("http://shop.example/list").body(String::new()).unwrap();
    let mut ids = Vec::new();
    for _ in 0..2 {
        let response = client.clone().oneshot(request()).await.unwrap();
        assert_eq!((response.status(), response.receipt().unwrap().outcome), (StatusCode::OK, PaymentOutcome::Settled));
        let payments = std::mem::take(&mut *sent.lock().unwrap());
        assert_eq!(payments.len(), 2, "presented again");
        assert_eq!(payments[0], payments[1]);
        let payload: PaymentPayload = decode_header(payments[0].as_bytes(), MAX_PAYMENT_HEADER).unwrap();
        ids.push(PaymentId::of(&payload.extensions.unwrap().read().unwrap()).unwrap().expect("an id"));
    }
    assert_ne!(ids[0], ids[1]);
    assert_eq!((shop.handled(), chain.balance(shop.pay_to).await), (2, 2 * PRICE));
}
