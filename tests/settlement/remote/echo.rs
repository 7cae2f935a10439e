//! The `resource` that a payer returns, and of its `extensions` those that the seller declares, reach the facilitator unchanged, and do not
//! affect the payment.

use std::{sync::Arc, time::Duration};

use axum::body::Body;
use base64::{Engine, prelude::BASE64_STANDARD};
use http::Request;
use serde_json::{Value, json};
use tower_x402::{
    Clock as _, ManualClock,
    ledger::{Ledger, MemoryLedger, ResponseLimits, Settlement},
    protocol::{Extension, PaymentFlow},
    server::RequirePaymentLayerBuilder,
};
use x402_bazaar::Discovery;

use super::stage::{Reply, Seller, Stage, Turn, refusal, still_pending};
use support::{
    authorization::unix_now,
    shop::{self, PRICE, Purchase, evaluate, send},
};

const ORIGIN: &str = "https://shop.example";
/// As no serializer would write it.
const RESOURCE: &str = r#"{ "url":"https://shop.example/evaluate", "new" : 1e2 }"#;
const EXTENSIONS: &str =
    r#"{"payment-status":{ "info" :{"url":"/status","more":1.50}},  "of-mine":{"info":{ }}, "other":7 }"#;
/// What is forwarded of it.
const FORWARDED: &str = r#"{"of-mine":{"info":{ }},"payment-status":{ "info" :{"url":"/status","more":1.50}}}"#;

fn declared(layer: RequirePaymentLayerBuilder) -> RequirePaymentLayerBuilder {
    let of_mine = Extension::new("of-mine", json!({}), json!({}));
    layer.public_origin(ORIGIN).status_url("/status").extension(of_mine)
}

/// A request with this payment, and with this resource and these extensions to the byte.
fn echoing(purchase: &Purchase, resource: &str, extensions: &str) -> Request<Body> {
    let mut payload = purchase.payload();
    let (accepted, payload) = (payload["accepted"].take(), payload["payload"].take());
    let text = format!(
        r#"{{"x402Version":2,"resource":{resource},"accepted":{accepted},"payload":{payload},"extensions":{extensions}}}"#
    );
    let mut request = evaluate("2 + 2 = 4");
    request.headers_mut().insert("payment-signature", BASE64_STANDARD.encode(text).parse().unwrap());
    request
}

async fn buy(stage: &Stage, seller: &Seller) -> Purchase {
    stage.customer().await.pay(&seller.app, evaluate("2 + 2 = 4")).await
}

fn payloads(bodies: &[axum::body::Bytes]) -> Vec<Value> {
    bodies.iter().map(|body| serde_json::from_slice::<Value>(body).unwrap()["paymentPayload"].take()).collect()
}

#[tokio::test]
async fn echo_reaches_the_facilitator_unchanged() {
    let stage = Stage::open().await;
    for flow in [PaymentFlow::Authorization, PaymentFlow::Upfront] {
        stage.settles.lock().unwrap().clear();
        stage.verifies.lock().unwrap().clear();
        let seller = stage.seller_with(stage.remote(), |layer| declared(layer).flow(flow)).await;
        let purchase = buy(&stage, &seller).await;
        let answer = send(&seller.app, echoing(&purchase, RESOURCE, EXTENSIONS)).await;
        assert_eq!(answer.status, 200, "{flow}: {answer:?}");
        for body in [stage.settles(), stage.verifies.lock().unwrap().clone()].concat() {
            let text = String::from_utf8(body.to_vec()).unwrap();
            assert!(text.contains(RESOURCE) && text.contains(FORWARDED), "{flow}: {text}");
        }
        assert_eq!((stage.settles().len(), seller.income(&stage).await), (1, PRICE));
    }
}

#[tokio::test]
async fn settlement_is_repeated_with_the_identical_echo() {
    let stage = Stage::open().await;
    let remote = stage.remote().settle_timeout(Duration::from_millis(1)).reconcile_interval(Duration::from_millis(20));
    let seller = stage.seller_with(remote, declared).await;
    let purchase = buy(&stage, &seller).await;
    stage.script([Turn::Without(still_pending()), Turn::Without(Reply::Status(502, ""))], Turn::Honest);
    assert_eq!(send(&seller.app, echoing(&purchase, RESOURCE, EXTENSIONS)).await.status, 503);
    // Presented again, it comes with less and with more; reconciliation has only the ledger.
    for extensions in ["{}", r#"{"another":1}"#] {
        send(&seller.app, echoing(&purchase, RESOURCE, extensions)).await;
    }
    assert_eq!(seller.insist(&purchase).await.status, 200);
    assert!(stage.settles().len() >= 2, "it was asked for again");
    stage.assert_identical();
    assert_eq!((seller.handled(), seller.income(&stage).await), (1, PRICE));
}

#[tokio::test]
async fn payment_is_the_same_after_a_restart_loses_its_echo() {
    let stage = Stage::open().await;
    // The ledger's, by which the first process's time is over when the second one comes.
    let clock = Arc::new(ManualClock::at(unix_now()));
    let ledger: Arc<dyn Ledger> = Arc::new(MemoryLedger::with(ResponseLimits::default(), 10, clock.clone()));
    let first = stage.remote().settle_timeout(Duration::from_millis(1)).reconcile_interval(Duration::from_secs(3_600));
    let first = stage.seller_on(ledger.clone(), first, declared).await;
    let purchase = buy(&stage, &first).await;
    stage.script([], Turn::Without(Reply::Status(502, "")));
    assert_eq!(send(&first.app, echoing(&purchase, RESOURCE, EXTENSIONS)).await.status, 503);

    // Another process finds it in the ledger, long after the first one's time.
    let until = first.record(&purchase).await.unwrap().settling.unwrap().until;
    clock.advance(until + 1 - clock.now());
    let after_it = Arc::new(ManualClock::at(until + 3_600));
    let second =
        stage.remote().clock(after_it.clone()).reconcile_interval(Duration::from_millis(20)).ledger(ledger.clone());
    let _second = second.build().await.unwrap();
    let without_echo = async || payloads(&stage.settles()).last().unwrap().get("resource").is_none();
    support::eventually::eventually("the second process asks", without_echo).await;
    stage.script([], Turn::Honest);
    after_it.advance(600);
    let settlement = async || first.record(&purchase).await.unwrap().settlement;
    support::eventually::eventually("it is settled", async || matches!(settlement().await, Settlement::Settled { .. }))
        .await;
    let mut payloads = payloads(&stage.settles());
    let mut last = payloads.pop().unwrap();
    assert_eq!((&last["resource"], &last["extensions"]), (&Value::Null, &Value::Null));
    let mut echoed = payloads.swap_remove(0);
    assert_eq!(echoed["extensions"]["of-mine"]["info"], json!({}));
    for field in ["resource", "extensions"] {
        echoed.as_object_mut().unwrap().remove(field);
        last.as_object_mut().unwrap().remove(field);
    }
    assert_eq!(last, echoed, "offer and authorization are the same");
    assert_eq!((first.handled(), first.income(&stage).await), (1, PRICE));
}

#[tokio::test]
async fn extensions_that_were_changed_are_refused_before_the_work() {
    let stage = Stage::open().await;
    let seller = stage.seller_with(stage.remote(), declared).await;
    let purchase = buy(&stage, &seller).await;
    for changed in [
        r#"{"payment-status":{"info":{"url":"/elsewhere"}}}"#,
        r#"{"payment-status":{"info":{}}}"#,
        r#"{"payment-status":{}}"#,
        r#"{"payment-status":null}"#,
    ] {
        let answer = send(&seller.app, echoing(&purchase, RESOURCE, changed)).await;
        assert_eq!((answer.status.as_u16(), answer.reason().as_str()), (402, "extension_echo_mismatch"), "{changed}");
        assert!(shop::demand(&answer)["extensions"]["payment-status"].is_object(), "the offer is made again");
    }
    // Identifiers are offered, and cannot be looked for in it.
    let answer = send(&seller.app, echoing(&purchase, RESOURCE, "[]")).await;
    assert_eq!((answer.status.as_u16(), answer.reason().as_str()), (400, "invalid_payload"));
    assert_eq!((seller.handled(), stage.settles().len()), (0, 0));
    assert!(seller.record(&purchase).await.is_none(), "nothing in the ledger");
    // The purchase is not lost when the seller offers something else.
    assert_eq!(send(&seller.app, echoing(&purchase, RESOURCE, EXTENSIONS)).await.status, 200);
    let answer = send(&seller.app, echoing(&purchase, RESOURCE, r#"{"payment-status":{}}"#)).await;
    assert_eq!((answer.status.as_u16(), answer.text()), (200, "2 + 2 = 4"), "replayed");
    assert_eq!((seller.handled(), seller.income(&stage).await), (1, PRICE));
}

#[tokio::test]
async fn echo_of_another_resource_is_not_forwarded() {
    let stage = Stage::open().await;
    let seller = stage.seller_with(stage.remote(), declared).await;
    for (what, resource, extensions) in [
        ("another origin", r#"{"url":"https://victim.example/evaluate"}"#, EXTENSIONS),
        ("another path", r#"{"url":"https://shop.example/other"}"#, EXTENSIONS),
        ("no resource", "null", EXTENSIONS),
        ("not a resource", "[]", EXTENSIONS),
    ] {
        stage.settles.lock().unwrap().clear();
        let purchase = buy(&stage, &seller).await;
        assert_eq!(send(&seller.app, echoing(&purchase, resource, extensions)).await.status, 200, "{what}");
        let payload = payloads(&stage.settles()).pop().unwrap();
        assert_eq!((&payload["resource"], &payload["extensions"]), (&Value::Null, &Value::Null), "{what}");
    }
}

/// A facilitator may show a description of the resource to others.
#[tokio::test]
async fn description_that_is_not_the_sellers_is_not_forwarded() {
    let stage = Stage::open().await;
    let seller = stage.seller_with(stage.remote(), declared).await;
    let discovery = Discovery::get().extension().unwrap();
    let own = Value::Object(discovery.declared()).to_string();
    let describing = stage.seller_with(stage.remote(), |layer| declared(layer).extension(discovery)).await;
    let invented = r#"{"bazaar":{"info":{"input":{"type":"http"}},"schema":{}}}"#;
    let added = own.replacen('{', r#"{"other":1,"#, 1).replacen(r#""info":{"#, r#""routeTemplate":"/x","info":{"#, 1);
    for (what, seller, extensions, forwarded) in [
        ("not declared", &seller, invented, None),
        ("not declared, and ours", &seller, own.as_str(), None),
        ("added to", &describing, added.as_str(), None),
        ("returned", &describing, own.as_str(), Some(serde_json::from_str::<Value>(&own).unwrap())),
    ] {
        stage.settles.lock().unwrap().clear();
        let purchase = buy(&stage, seller).await;
        assert_eq!(send(&seller.app, echoing(&purchase, RESOURCE, extensions)).await.status, 200, "{what}");
        let payload = payloads(&stage.settles()).pop().unwrap();
        assert_eq!(payload.get("extensions").cloned(), forwarded, "{what}");
        assert_eq!(payload["resource"]["url"], format!("{ORIGIN}/evaluate"), "{what}");
    }
}

/// A facilitator may refuse a resource that is no URL.
#[tokio::test]
async fn resource_with_only_a_path_is_not_forwarded() {
    let stage = Stage::open().await;
    let seller = stage.seller_with(stage.remote(), |layer| layer.status_url("/status")).await;
    let purchase = buy(&stage, &seller).await;
    assert_eq!(purchase.resource["url"], "/evaluate");
    let resource = purchase.resource.to_string();
    assert_eq!(send(&seller.app, echoing(&purchase, &resource, EXTENSIONS)).await.status, 200);
    assert_eq!(payloads(&stage.settles()).pop().unwrap().get("resource"), None);
}

#[tokio::test]
async fn refused_settlement_may_be_repeated_with_another_echo() {
    let stage = Stage::open().await;
    let seller = stage.seller_with(stage.remote(), declared).await;
    let purchase = buy(&stage, &seller).await;
    stage.script([Turn::Without(refusal("insufficient_funds"))], Turn::Honest);
    assert_eq!(send(&seller.app, echoing(&purchase, RESOURCE, EXTENSIONS)).await.status, 402);
    assert_eq!(send(&seller.app, echoing(&purchase, RESOURCE, "{}")).await.status, 200, "the work is kept");
    assert_eq!((seller.handled(), seller.income(&stage).await), (1, PRICE));
}
