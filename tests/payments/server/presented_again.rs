//! Payments that are presented again, and their answers.

use std::{
    convert::Infallible,
    future::ready,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use alloy_primitives::B256;
use axum::body::Body;
use bytes::Bytes;
use futures_util::stream;
use http::{HeaderName, Request, Response, StatusCode, header::HOST};
use http_body_util::BodyExt as _;
use support::{
    authorization::unix_now,
    scripted::{Scripted, customer, echo, key, layer, not_yet, paid, record, serve},
    shop::{demand, evaluate, send},
};
use tokio::sync::Notify;
use tower_x402::{
    ManualClock, SystemClock, Usdc,
    ledger::{MemoryLedger, ResponseLimits, SettlementStep},
    payment::SettlementOutcome,
    protocol::PaymentFlow,
    server::RequirePaymentLayerBuilder,
};

const TIER: HeaderName = HeaderName::from_static("x-tier");

/// The price: a dollar for the expensive tier or host, a tenth of a cent otherwise.
fn by_tier(layer: RequirePaymentLayerBuilder) -> RequirePaymentLayerBuilder {
    layer.price_with(|request| {
        let is_dear = request.headers.get(TIER).is_some_and(|tier| tier == "dear")
            || request.headers.get(HOST).is_some_and(|host| host == "dear.example")
            || request.uri.host() == Some("dear.example");
        ready(Ok(Usdc::from_atomic(if is_dear { 1_000_000 } else { 1_000 }).into()))
    })
}

/// Returns requests that are cheap, expensive by tier, and expensive by host in HTTP/1.1 and in HTTP/2.
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
async fn payment_is_not_used_at_another_price_that_a_header_sets() {
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
async fn price_function_sees_only_what_a_payment_is_bound_to() {
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
async fn response_settled_late_is_replayed_once_it_is_settled() {
    let clock = Arc::new(ManualClock::at(unix_now()));
    let mut scripted = Scripted::new().settle(|_, _| async { Ok(SettlementOutcome::Unknown { transaction: None }) });
    scripted.ledger = Arc::new(MemoryLedger::with(ResponseLimits::default(), 100, clock.clone()));
    let facilitator = Arc::new(scripted);
    let (app, handled) = serve(layer(&facilitator).clock(clock.clone()), |_, _| ready(Response::new(Body::from("x"))));
    let get = || Request::get("/evaluate").body(Body::empty()).unwrap();
    let purchase = customer().pay(&app, get()).await;
    assert_eq!(send(&app, purchase.on(get())).await.status, StatusCode::SERVICE_UNAVAILABLE);
    clock.advance(70);
    let transaction = B256::repeat_byte(0x77);
    let settled = SettlementStep::Settle { transaction, block: Some(1), fee: None };
    facilitator.ledger.advance(&key(&purchase), &settled.into()).await.unwrap();
    let found = send(&app, purchase.on(get())).await;
    assert_eq!((found.status, found.text(), found.transaction()), (StatusCode::OK, "x", transaction));
    // From then on the authorization is public.
    clock.advance(61);
    let late = send(&app, purchase.on(get())).await;
    assert_eq!((late.status, late.reason().as_str()), (StatusCode::CONFLICT, "payment_already_used"));
    assert_eq!(late.transaction(), transaction, "whoever paid is told so where clients look for it");
    assert_eq!(handled.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn client_charged_by_a_retry_gets_the_response_without_replays() {
    let first_in_vain = |call, _| ready(Ok(if call == 0 { not_yet() } else { paid() }));
    let facilitator = Arc::new(Scripted::new().settle(first_in_vain));
    let layer = layer(&facilitator).anonymous_replays(0, Duration::from_secs(60));
    let (app, handled) = serve(layer, |_, _| ready(Response::new(Body::from("x"))));
    let get = || Request::get("/evaluate").body(Body::empty()).unwrap();
    let purchase = customer().pay(&app, get()).await;
    assert_eq!(send(&app, purchase.on(get())).await.status, StatusCode::PAYMENT_REQUIRED);
    let found = send(&app, purchase.on(get())).await;
    assert_eq!((found.status, found.text()), (StatusCode::OK, "x"));
    assert_eq!(found.transaction(), B256::repeat_byte(0x77));
    assert_eq!(found.headers["cache-control"], "private");
    let again = send(&app, purchase.on(get())).await;
    assert_eq!((again.status, again.reason().as_str()), (StatusCode::CONFLICT, "payment_already_used"));
    assert_eq!((handled.load(Ordering::SeqCst), facilitator.settlements()), (1, 2));
}

#[tokio::test]
async fn client_charged_by_a_retry_gets_a_response_that_is_evicted_meanwhile() {
    let (settling, go_on) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let (begun, told) = (settling.clone(), go_on.clone());
    let mut scripted = Scripted::new().settle(move |call, _| {
        let (begun, told) = (begun.clone(), told.clone());
        async move {
            match call {
                0 => return Ok(not_yet()),
                1 => {
                    begun.notify_one();
                    told.notified().await;
                }
                _ => {}
            }
            Ok(paid())
        }
    });
    let limits = ResponseLimits::default().count(1);
    scripted.ledger = Arc::new(MemoryLedger::with(limits, 100, Arc::new(SystemClock)));
    let facilitator = Arc::new(scripted);
    let (app, handled) = serve(layer(&facilitator), echo);
    let purchase = customer().pay(&app, evaluate("x")).await;
    assert_eq!(send(&app, purchase.on(evaluate("x"))).await.status, StatusCode::PAYMENT_REQUIRED);
    let (other_app, request) = (app.clone(), purchase.on(evaluate("x")));
    let again = tokio::spawn(async move { send(&other_app, request).await });
    support::eventually::in_time("it is being settled", settling.notified()).await;
    let other = customer().pay(&app, evaluate("y")).await;
    assert_eq!(send(&app, other.on(evaluate("y"))).await.text(), "y");
    assert!(facilitator.ledger.response(&key(&purchase)).await.unwrap().is_none(), "only one is kept");
    go_on.notify_one();
    let again = again.await.unwrap();
    assert_eq!((again.status, again.text()), (StatusCode::OK, "x"));
    assert_eq!((handled.load(Ordering::SeqCst), facilitator.settlements()), (2, 3));
}

/// The client has the response already, so presenting the payment again is a replay, although the payment is settled anew.
#[tokio::test]
async fn delivered_response_is_not_replayed_for_settling_it_again() {
    let facilitator = Arc::new(Scripted::new());
    let layer = layer(&facilitator).anonymous_replays(0, Duration::from_secs(60));
    let (app, _) = serve(layer, |_, _| ready(Response::new(Body::from("x"))));
    let get = || Request::get("/evaluate").body(Body::empty()).unwrap();
    let purchase = customer().pay(&app, get()).await;
    assert_eq!(send(&app, purchase.on(get())).await.text(), "x");
    facilitator.ledger.advance(&key(&purchase), &SettlementStep::Reorg.into()).await.unwrap();
    let again = send(&app, purchase.on(get())).await;
    assert_eq!((again.status, again.reason().as_str()), (StatusCode::CONFLICT, "payment_already_used"));
    assert_eq!(facilitator.settlements(), 2);
}

/// Bodies with a declared length, and chunked ones.
fn bodies(text: &str) -> [Body; 2] {
    let pieces: Vec<_> = text.as_bytes().chunks(7).map(Bytes::copy_from_slice).map(Ok::<_, Infallible>).collect();
    [Body::from(text.to_owned()), Body::from_stream(stream::iter(pieces))]
}

fn requests(text: &str) -> [Request<Body>; 2] {
    bodies(text).map(|body| Request::post("/evaluate").body(body).unwrap())
}

#[tokio::test]
async fn large_request_body_finds_its_answer_on_retry() {
    let facilitator = Arc::new(Scripted::new());
    let (app, handled) = serve(layer(&facilitator).max_request_body(10), echo);
    let text = "a body that streams";
    for first in 0..2 {
        let purchase = customer().pay(&app, evaluate("x")).await;
        let mut all = Vec::from(requests(text));
        assert_eq!(send(&app, purchase.on(all.swap_remove(first))).await.text(), text);
        for again in requests(text) {
            let answer = send(&app, purchase.on(again)).await;
            assert_eq!((answer.status, answer.text()), (StatusCode::OK, text));
        }
        for other in ["a body that streamt", "a body that stream", "a body that streams on", "few", ""] {
            for other in requests(other) {
                assert_eq!(send(&app, purchase.on(other)).await.status, StatusCode::CONFLICT);
            }
        }
    }
    assert_eq!((handled.load(Ordering::SeqCst), facilitator.settlements()), (2, 2));
}

#[tokio::test]
async fn body_of_another_declared_length_is_refused_unread() {
    let facilitator = Arc::new(Scripted::new());
    let (app, _) = serve(layer(&facilitator).max_request_body(10), echo);
    let purchase = customer().pay(&app, evaluate("short")).await;
    assert_eq!(send(&app, purchase.on(evaluate("short"))).await.text(), "short");
    let silent = http_body_util::StreamBody::new(stream::pending::<Result<http_body::Frame<Bytes>, Infallible>>());
    let endless = Announced(Body::new(silent), 2_000_000);
    let refused = send(&app, purchase.on(evaluate("").map(|_| Body::new(endless))));
    let refused = tokio::time::timeout(Duration::from_secs(5), refused).await.unwrap();
    assert_eq!((refused.status, refused.settlement().is_some()), (StatusCode::CONFLICT, false));
}

/// A body and its declared length.
struct Announced(Body, u64);

impl http_body::Body for Announced {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: std::pin::Pin<&mut Self>,
        context: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<Result<http_body::Frame<Bytes>, axum::Error>>> {
        std::pin::Pin::new(&mut self.0).poll_frame(context)
    }

    fn size_hint(&self) -> http_body::SizeHint {
        http_body::SizeHint::with_exact(self.1)
    }
}

#[tokio::test(start_paused = true)]
async fn copies_with_a_large_body_wait_for_the_answer() {
    let facilitator = Arc::new(Scripted::new());
    let (working, go_on) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let (begun, told) = (working.clone(), go_on.clone());
    let (app, handled) = serve(layer(&facilitator).max_request_body(10), move |run, request| {
        let (begun, told) = (begun.clone(), told.clone());
        async move {
            begun.notify_one();
            told.notified().await;
            echo(run, request).await
        }
    });
    let text = "a body that streams";
    let purchase = customer().pay(&app, evaluate("x")).await;
    let sent = |request| {
        let (app, request) = (app.clone(), purchase.on(request));
        tokio::spawn(async move { send(&app, request).await })
    };
    let [first, _] = requests(text);
    let mut answers = vec![sent(first)];
    support::eventually::in_time("the work has begun", working.notified()).await;
    answers.extend(requests(text).map(sent));
    // Virtual time advances only when all of them wait.
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert!(answers.iter().all(|answer| !answer.is_finished()));
    go_on.notify_one();
    for answer in answers {
        let answer = answer.await.unwrap();
        assert_eq!((answer.status, answer.text()), (StatusCode::OK, text));
    }
    assert_eq!(handled.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn work_is_not_repeated_with_a_body_too_long_to_compare() {
    let facilitator = Arc::new(Scripted::new());
    let (app, handled) = serve(layer(&facilitator).max_request_body(10), |_, request| async move {
        request.into_body().collect().await.unwrap();
        Response::builder().status(500).body(Body::empty()).unwrap()
    });
    let purchase = customer().pay(&app, evaluate("x")).await;
    let text = "a body that streams";
    let [first, _] = requests(text);
    assert_eq!(send(&app, purchase.on(first)).await.status, StatusCode::INTERNAL_SERVER_ERROR);
    for again in requests(text) {
        assert_eq!(send(&app, purchase.on(again)).await.status, StatusCode::PAYLOAD_TOO_LARGE);
    }
    for other in requests("another one that streams") {
        assert_eq!(send(&app, purchase.on(other)).await.status, StatusCode::CONFLICT);
    }
    assert_eq!((handled.load(Ordering::SeqCst), facilitator.settlements()), (1, 0));
}

#[tokio::test]
async fn exhausted_attempts_of_a_settled_payment_are_answered_with_its_receipt() {
    let facilitator = Arc::new(Scripted::new());
    for (flow, is_paid) in [(PaymentFlow::Upfront, true), (PaymentFlow::Authorization, false)] {
        let (app, _) = serve(layer(&facilitator).flow(flow).max_attempts(1), failing);
        let purchase = customer().pay(&app, evaluate("x")).await;
        assert_eq!(send(&app, purchase.on(evaluate("x"))).await.status, StatusCode::NOT_FOUND);
        let refused = send(&app, purchase.on(evaluate("x"))).await;
        assert_eq!((refused.status, refused.reason().as_str()), (StatusCode::CONFLICT, "attempts_exhausted"));
        assert_eq!(refused.settlement().is_some(), is_paid);
        let other = send(&app, purchase.on(evaluate("y"))).await;
        assert_eq!((other.status, other.settlement().is_some()), (StatusCode::CONFLICT, false));
        if is_paid {
            assert_eq!(refused.transaction(), B256::repeat_byte(0x77));
        }
    }
}

#[tokio::test]
async fn panicking_handler_reports_whether_the_payment_settled() {
    let facilitator = Arc::new(Scripted::new().settle(|_, _| ready(Ok(paid()))));
    for (flow, is_paid) in [(PaymentFlow::Upfront, true), (PaymentFlow::Authorization, false)] {
        let (app, _) = serve(layer(&facilitator).flow(flow), |run, request| async move {
            assert!(run > 0, "as told");
            echo(run, request).await
        });
        let purchase = customer().pay(&app, evaluate("x")).await;
        let failed = send(&app, purchase.on(evaluate("x"))).await;
        assert_eq!((failed.status, failed.settlement().is_some()), (StatusCode::INTERNAL_SERVER_ERROR, is_paid));
        let detail = failed.json()["detail"].as_str().unwrap().to_owned();
        assert_eq!(detail.contains("charges nothing more"), is_paid, "{detail}");
        assert_eq!(send(&app, purchase.on(evaluate("x"))).await.text(), "x");
        assert!(record(&facilitator, &purchase).await.unwrap().settlement.paid_by().is_some());
    }
}
