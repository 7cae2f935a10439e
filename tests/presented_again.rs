//! A payment that comes again: what it gets, what it does not get, and what it is told.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use std::{
    future::ready,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use alloy_primitives::B256;
use axum::body::Body;
use http::{HeaderName, Request, Response, StatusCode, header::HOST};
use support::{
    authorization::unix_now,
    scripted::{Scripted, customer, key, layer, serve},
    shop::{demand, send},
};
use tower_x402::{
    ManualClock, Usdc,
    facilitator::Outcome,
    ledger::{MemoryLedger, ResponseLimits, SettlementStep},
    protocol::PaymentFlow,
    server::RequirePaymentLayerBuilder,
};

const TIER: HeaderName = HeaderName::from_static("x-tier");

/// A dollar for what is dear by its tier or its host; a tenth of a cent for anything else.
fn by_tier(layer: RequirePaymentLayerBuilder) -> RequirePaymentLayerBuilder {
    layer.price_with(|request| {
        let is_dear = request.headers.get(TIER).is_some_and(|tier| tier == "dear")
            || request.headers.get(HOST).is_some_and(|host| host == "dear.example")
            || request.uri.host() == Some("dear.example");
        ready(Ok(Usdc::from_atomic(if is_dear { 1_000_000 } else { 1_000 }).into()))
    })
}

/// Cheap, dear by its tier, dear by its host in HTTP/1.1 and in HTTP/2.
fn tiers() -> [Request<Body>; 4] {
    let request = |uri: &str| Request::post(uri);
    [
        request("/evaluate").header(TIER, "none").header(HOST, "any.example"),
        request("/evaluate").header(TIER, "dear").header(HOST, "any.example"),
        request("/evaluate").header(TIER, "none").header(HOST, "dear.example"),
        request("https://dear.example/evaluate").header(TIER, "none"),
    ]
    .map(|request| request.body(Body::empty()).unwrap())
}

async fn failing(_: u64, _: Request<tower_x402::server::RequestBody<Body>>) -> Response<Body> {
    Response::builder().status(StatusCode::NOT_FOUND).body(Body::empty()).unwrap()
}

#[tokio::test]
async fn what_is_owed_at_one_price_is_not_worked_off_at_another_that_a_header_sets() {
    let facilitator = Arc::new(Scripted::new());
    let upfront = layer(&facilitator).flow(PaymentFlow::Upfront).priced_by([TIER, HOST]);
    let (app, handled) = serve(by_tier(upfront), failing);
    for (request, amount) in tiers().into_iter().zip(["1000", "1000000", "1000000", "1000000"]) {
        assert_eq!(demand(&send(&app, request).await)["accepts"][0]["amount"], amount);
    }
    let [cheap, dear @ ..] = tiers();
    let purchase = customer().pay(&app, cheap).await;
    let [cheap, ..] = tiers();
    assert_eq!(send(&app, purchase.on(cheap)).await.status, StatusCode::NOT_FOUND);
    for dear in dear {
        assert_eq!(send(&app, purchase.on(dear)).await.status, StatusCode::CONFLICT);
    }
    assert_eq!(handled.load(Ordering::SeqCst), 1);
    let [cheap, ..] = tiers();
    assert_eq!(send(&app, purchase.on(cheap)).await.status, StatusCode::NOT_FOUND, "what is owed is tried again");
    assert_eq!((handled.load(Ordering::SeqCst), facilitator.settlements()), (2, 1));
}

#[tokio::test]
async fn a_price_does_not_see_what_a_payment_is_not_bound_to() {
    let facilitator = Arc::new(Scripted::new());
    let (app, _) = serve(by_tier(layer(&facilitator)), |_, request| async move {
        assert!(request.headers().contains_key(TIER), "the handler sees all of it");
        Response::new(Body::from(request.uri().to_string()))
    });
    for request in tiers() {
        let uri = request.uri().to_string();
        let answer = send(&app, request).await;
        let purchase = customer().sign(&demand(&answer), 0);
        assert_eq!(purchase.offer["amount"], "1000");
        let again = Request::post(&uri).header(TIER, "dear").body(Body::empty()).unwrap();
        assert_eq!(send(&app, purchase.on(again)).await.text(), uri);
    }
}

#[tokio::test]
async fn an_answer_that_was_long_paid_for_in_vain_is_given_to_the_first_who_asks() {
    let clock = Arc::new(ManualClock::at(unix_now()));
    let mut scripted = Scripted::new().settle(|_, _| async { Ok(Outcome::Unknown { transaction: None }) });
    scripted.ledger = Arc::new(MemoryLedger::with(ResponseLimits::default(), 100, clock.clone()));
    let facilitator = Arc::new(scripted);
    let (app, handled) = serve(layer(&facilitator).clock(clock.clone()), |_, _| ready(Response::new(Body::from("x"))));
    let get = || Request::get("/evaluate").body(Body::empty()).unwrap();
    let purchase = customer().pay(&app, get()).await;
    assert_eq!(send(&app, purchase.on(get())).await.status, StatusCode::SERVICE_UNAVAILABLE);
    clock.advance(70);
    let transaction = B256::repeat_byte(0x77);
    let settled = SettlementStep::Settle { transaction, block: Some(1), fee: None };
    facilitator.ledger.settle(&key(&purchase), &settled).await.unwrap();
    let found = send(&app, purchase.on(get())).await;
    assert_eq!((found.status, found.text(), found.transaction()), (StatusCode::OK, "x", transaction));
    // From then on anybody may have read it on the chain.
    clock.advance(61);
    let late = send(&app, purchase.on(get())).await;
    assert_eq!((late.status, late.reason().as_str()), (StatusCode::CONFLICT, "payment_already_used"));
    assert_eq!(handled.load(Ordering::SeqCst), 1);
}
