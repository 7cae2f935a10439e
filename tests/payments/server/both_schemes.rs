//! Rules that hold for payments by transfer (`exact`) and by voucher alike.

use std::{
    convert::Infallible,
    sync::{Arc, Mutex, atomic::Ordering},
    time::Duration,
};

use axum::body::Body;
use bytes::Bytes;
use futures_util::stream;
use http::{
    HeaderMap, Request, Response, StatusCode,
    header::{ACCEPT_ENCODING, ACCEPT_LANGUAGE},
};
use http_body_util::BodyExt as _;
use serde_json::{Value, json};
use support::{
    scripted::{self, Scripted, layer, serve},
    shop::{Answer, App, Customer, PRICE, app, demand, evaluate, paid, send},
    world::{COST, World, by_voucher, told},
};
use tower::{BoxError, Layer as _};
use tower_x402::server::RequestBody;

const ID: &str = "pay_7d5d747be160e280504c099d984bcfe0";
const OTHER_ID: &str = "an-entirely-different-id";

fn list() -> Request<Body> {
    Request::get("/list").body(Body::empty()).expect("a request")
}

fn named(mut payment: Value, id: impl Into<Value>) -> Value {
    payment["extensions"] =
        json!({ "payment-identifier": { "info": { "required": false, "id": id.into() }, "schema": {} } });
    payment
}

/// What the answer is, and what it costs in all.
fn sold(answer: &Answer) -> (StatusCode, &str, String) {
    (answer.status, answer.text(), told(answer).1)
}

#[tokio::test]
async fn a_paid_answer_is_given_again_after_the_offer_changed() {
    let world = World::open().await;
    let app = world.app.clone();
    let channel = world.filled(&app).await;
    let customer = Customer::with_funds(&world.chain, PRICE).await;
    let payments = [by_voucher(&app, &channel, 2 * COST).await, customer.pay(&app, evaluate("a")).await.payload()];
    for payment in &payments {
        let answer = send(&app, paid(evaluate("a"), payment)).await;
        assert_eq!((answer.status, answer.text()), (StatusCode::OK, "a"), "{answer:?}");
    }
    let vouchers = |layer: tower_x402::server::RequirePaymentLayerBuilder| layer.vouchers(world.channels.clone());
    let contract = world.contract(|builder| builder).await;
    let larger = world.channels_of(contract).min_deposit("$0.02").build().unwrap();
    for changed in [
        world.seller(larger),
        world.shop.app(vouchers(world.shop.layer().price("$0.002"))),
        world.shop.app(vouchers(world.shop.layer().max_timeout(Duration::from_secs(240)))),
        world.shop.app(vouchers(world.shop.layer().payment_identifier(true))),
    ] {
        for payment in &payments {
            let answer = send(&changed, paid(evaluate("a"), payment)).await;
            assert_eq!((answer.status, answer.text()), (StatusCode::OK, "a"), "{answer:?}");
        }
    }
    let dear = world.shop.app(vouchers(world.shop.layer().price("$0.002")));
    // A new voucher is for the present price, and the old one for no other request.
    let outdated = by_voucher(&app, &channel, 3 * COST).await;
    for refused in [paid(evaluate("a"), &outdated), paid(evaluate("b"), &payments[0])] {
        let answer = send(&dear, refused).await;
        assert_eq!(answer.status, StatusCode::PAYMENT_REQUIRED, "{answer:?}");
        assert_eq!(answer.reason(), "invalid_payment_requirements");
    }
    assert_eq!((world.shop.handled(), world.charged(&channel).await), (3, 2 * COST));
}

#[tokio::test]
async fn a_response_to_a_request_without_a_secret_is_given_again_three_times() {
    let world = World::open().await;
    let app = world.shop.app_with(world.layer(), |_, _| async { Ok(Response::new(Body::from("public price list"))) });
    let channel = world.filled(&app).await;
    let customer = Customer::with_funds(&world.chain, PRICE).await;
    let payments = [by_voucher(&app, &channel, 2 * COST).await, customer.pay(&app, list()).await.payload()];
    for payment in payments {
        for _ in 0..4 {
            let answer = send(&app, paid(list(), &payment)).await;
            assert_eq!((answer.status, answer.text()), (StatusCode::OK, "public price list"), "{answer:?}");
        }
        for _ in 0..2 {
            let answer = send(&app, paid(list(), &payment)).await;
            assert_eq!((answer.status, answer.reason().as_str()), (StatusCode::CONFLICT, "payment_already_used"));
            assert_eq!(answer.settlement().expect("it was paid")["success"], true);
        }
    }
    assert_eq!(world.shop.handled(), 3);
}

#[tokio::test]
async fn work_that_fails_is_tried_as_often_as_is_allowed() {
    let world = World::open().await;
    let attempts = Arc::new(Mutex::new(Vec::new()));
    let seen = attempts.clone();
    let layer = world.layer().max_attempts(2).payment_identifier(true);
    let app = world.shop.app_with(layer, move |payment, body| {
        seen.lock().unwrap().push(payment.attempt);
        let status = if body == "bad" { 500 } else { 200 };
        async move { Ok(Response::builder().status(status).body(Body::from(body)).unwrap()) }
    });
    let channel = world.filled(&app).await;
    let customer = Customer::with_funds(&world.chain, PRICE).await;
    let payments = [by_voucher(&app, &channel, 2 * COST).await, customer.pay(&app, evaluate("bad")).await.payload()]
        .map(|payment| named(payment, ID));
    for payment in &payments {
        attempts.lock().unwrap().clear();
        let mut answers = Vec::new();
        for _ in 0..4 {
            answers.push(send(&app, paid(evaluate("bad"), payment)).await.status.as_u16());
        }
        assert_eq!((answers, attempts.lock().unwrap().clone()), (vec![500, 500, 409, 409], vec![1, 2]));
        assert_eq!(send(&app, paid(evaluate("bad"), payment)).await.reason(), "attempts_exhausted");
    }
    // Nothing was charged on the voucher, which pays for another request.
    let answer = send(&app, paid(evaluate("good"), &payments[0])).await;
    assert_eq!(sold(&answer), (StatusCode::OK, "good", "2000".into()));
}

#[tokio::test]
async fn an_altered_extension_is_refused() {
    let world = World::open().await;
    let layer = world.layer().payment_identifier(true);
    let app = world.shop.app(layer);
    let channel = world.filled(&app).await;
    let customer = Customer::with_funds(&world.chain, PRICE).await;
    for mut payment in [by_voucher(&app, &channel, 2 * COST).await, customer.pay(&app, evaluate("a")).await.payload()] {
        payment["extensions"] = json!({ "payment-identifier": { "info": { "required": true } } });
        let answer = send(&app, paid(evaluate("a"), &payment)).await;
        assert_eq!(
            (answer.status, answer.reason().as_str()),
            (StatusCode::PAYMENT_REQUIRED, "extension_echo_mismatch")
        );
    }
    assert_eq!(world.charged(&channel).await, COST);
}

#[tokio::test]
async fn a_malformed_payment_identifier_is_a_bad_request() {
    let world = World::open().await;
    let layer = |asks| world.layer().payment_identifier(asks);
    let [app, silent] = [true, false].map(|asks| world.shop.app(layer(asks)));
    let channel = world.filled(&app).await;
    let payment = by_voucher(&app, &channel, 2 * COST).await;
    for id in [json!("fifteen-letters"), json!(1), json!("with a space in it")] {
        let answer = send(&app, paid(evaluate("a"), &named(payment.clone(), id))).await;
        assert_eq!((answer.status, answer.reason().as_str()), (StatusCode::BAD_REQUEST, "invalid_payload"));
    }
    assert_eq!(world.charged(&channel).await, COST);
    // Where ids are not offered they mean nothing.
    let answer = send(&silent, paid(evaluate("a"), &named(payment.clone(), "short"))).await;
    assert_eq!(sold(&answer), (StatusCode::OK, "a", "2000".into()));
    let answer = send(&silent, paid(evaluate("a"), &named(payment, ID))).await;
    assert_eq!(sold(&answer), (StatusCode::OK, "a", "2000".into()));
}

#[tokio::test]
async fn a_named_request_that_is_signed_anew_gets_its_answer_and_costs_nothing() {
    let world = World::open().await;
    let layer = world.layer().payment_identifier(true);
    let app = world.shop.app(layer);
    let channel = world.filled(&app).await;
    let first = named(by_voucher(&app, &channel, 2 * COST).await, ID);
    let answer = send(&app, paid(evaluate("a"), &first)).await;
    assert_eq!(sold(&answer), (StatusCode::OK, "a", "2000".into()));
    let anew = by_voucher(&app, &channel, 3 * COST).await;
    for _ in 0..2 {
        let answer = send(&app, paid(evaluate("a"), &named(anew.clone(), ID))).await;
        assert_eq!(sold(&answer), (StatusCode::OK, "a", "2000".into()));
    }
    let answer = send(&app, paid(evaluate("b"), &named(anew.clone(), ID))).await;
    assert_eq!((answer.status, answer.reason().as_str()), (StatusCode::CONFLICT, "payment_identifier_conflict"));
    assert_eq!((world.charged(&channel).await, world.shop.handled()), (2 * COST, 2));
    // The voucher was not used.
    let answer = send(&app, paid(evaluate("b"), &named(anew, OTHER_ID))).await;
    assert_eq!(sold(&answer), (StatusCode::OK, "b", "3000".into()));
}

#[tokio::test]
async fn status_url_is_not_declared_where_only_vouchers_are_taken() {
    let world = World::open().await;
    let declared = async |layer: tower_x402::server::RequirePaymentLayerBuilder| {
        let app = world.shop.app(layer.status_url("/payments/status"));
        demand(&send(&app, evaluate("a")).await)["extensions"]["payment-status"]["info"]["url"].clone()
    };
    assert_eq!(declared(world.layer()).await, "/payments/status");
    assert_eq!(declared(world.shop.layer().vouchers_only(world.channels.clone())).await, Value::Null);
}

/// A seller whose handler sees the request as it came.
fn selling<F>(world: &World, handler: impl Fn(Request<RequestBody<Body>>) -> F + Clone + Send + Sync + 'static) -> App
where
    F: Future<Output = Response<Body>> + Send + 'static,
{
    let layer = world.layer().build().expect("a complete layer");
    let handled = world.shop.handled.clone();
    app(layer.layer(tower::service_fn(move |request: Request<RequestBody<Body>>| {
        handled.fetch_add(1, Ordering::SeqCst);
        let handling = handler(request);
        async move { Ok::<_, BoxError>(handling.await) }
    })))
}

/// Returns a payment by voucher, on a channel that is filled by buying once, and one by transfer.
async fn payments(world: &World, app: &App, request: Request<Body>) -> [Value; 2] {
    let channel = world.filled(app).await;
    let customer = Customer::with_funds(&world.chain, PRICE).await;
    [by_voucher(app, &channel, 2 * COST).await, customer.pay(app, request).await.payload()]
}

#[tokio::test]
async fn an_encoded_answer_is_given_again_only_to_clients_that_can_decode_it() {
    let world = World::open().await;
    // It compresses for clients that accept that.
    let app = selling(&world, |request| async move {
        let accepted = request.headers().get(ACCEPT_ENCODING).cloned();
        let _ = request.into_body().collect().await;
        let mut response = Response::new(Body::from("plain"));
        if accepted.is_some_and(|accepted| accepted == "gzip") {
            response.headers_mut().insert("content-encoding", "gzip".parse().unwrap());
            *response.body_mut() = Body::from("zipped");
        }
        response
    });
    let accepting = |encoding: Option<&'static str>, payment: &Value| {
        let mut request = paid(evaluate("a"), payment);
        if let Some(encoding) = encoding {
            request.headers_mut().insert(ACCEPT_ENCODING, encoding.parse().unwrap());
        }
        request
    };
    for payment in payments(&world, &app, evaluate("a")).await {
        let first = send(&app, accepting(Some("gzip"), &payment)).await;
        assert_eq!((first.status, first.text()), (StatusCode::OK, "zipped"), "{first:?}");
        for encoding in [None, Some("identity"), Some("br"), Some("gzip;q=0")] {
            let answer = send(&app, accepting(encoding, &payment)).await;
            assert_eq!((answer.status, answer.reason().as_str()), (StatusCode::CONFLICT, "response_varies"));
            assert_eq!(answer.headers["vary"], "accept-encoding");
            assert_eq!(answer.settlement().expect("it was paid")["success"], true);
        }
        for encoding in ["gzip", "br, gzip", "*"] {
            let answer = send(&app, accepting(Some(encoding), &payment)).await;
            assert_eq!((answer.status, answer.text()), (StatusCode::OK, "zipped"), "{answer:?}");
            assert_eq!(answer.headers["content-encoding"], "gzip");
        }
    }
    assert_eq!(world.shop.handled(), 3);
}

#[tokio::test]
async fn an_answer_in_another_language_is_not_given_instead() {
    let world = World::open().await;
    let app = selling(&world, |request| async move {
        let language = request.headers().get(ACCEPT_LANGUAGE).cloned();
        let _ = request.into_body().collect().await;
        let body = if language.is_some_and(|language| language == "de") { "gut" } else { "good" };
        Response::builder().header("vary", "Accept-Language").body(Body::from(body)).unwrap()
    });
    for payment in payments(&world, &app, evaluate("a")).await {
        let asking = |language: Option<&'static str>| {
            let mut request = paid(evaluate("a"), &payment);
            let language = language.map(|language| (ACCEPT_LANGUAGE, language.parse().unwrap()));
            request.headers_mut().extend(HeaderMap::from_iter(language));
            request
        };
        assert_eq!(send(&app, asking(Some("de"))).await.text(), "gut");
        let other = send(&app, asking(None)).await;
        assert_eq!((other.status, other.reason().as_str()), (StatusCode::CONFLICT, "response_varies"));
        assert_eq!(send(&app, asking(Some("de"))).await.text(), "gut");
    }
    assert_eq!((world.shop.handled(), world.received().await), (3, PRICE));
}

/// The head of its response comes first, and so does the question of what to charge it for.
#[tokio::test]
async fn handler_that_reads_its_request_while_it_streams_is_charged_for_what_it_read() {
    let facilitator = Arc::new(Scripted::new());
    let (app, handled) = serve(layer(&facilitator), |_, request| async move {
        let mut body = request.into_body();
        Response::new(Body::from_stream(stream::once(async move {
            let mut read = Vec::new();
            while let Some(Ok(frame)) = body.frame().await {
                read.extend(frame.into_data().unwrap_or_default());
            }
            Ok::<_, Infallible>(read)
        })))
    });
    let purchase = scripted::customer().pay(&app, evaluate("a")).await;
    let half = stream::iter([Ok(Bytes::from_static(b"half")), Err(std::io::Error::other("reset"))]);
    let broken = Request::post("/evaluate?k=1").body(Body::from_stream(half)).unwrap();
    let answer = send(&app, purchase.on(broken)).await;
    assert_eq!((answer.status, answer.reason().as_str()), (StatusCode::BAD_REQUEST, "body_broken"), "{answer:?}");
    assert_eq!((facilitator.settlements(), answer.settlement()), (0, None));
    let answer = send(&app, purchase.on(evaluate("half of it"))).await;
    assert_eq!((answer.status, answer.text()), (StatusCode::OK, "half of it"), "{answer:?}");
    let answer = send(&app, purchase.on(evaluate("half of another"))).await;
    assert_eq!((answer.status, answer.reason().as_str()), (StatusCode::CONFLICT, "payment_already_used"), "{answer:?}");
    let answer = send(&app, purchase.on(evaluate("half of it"))).await;
    assert_eq!((answer.status, answer.text()), (StatusCode::OK, "half of it"), "{answer:?}");
    assert_eq!((handled.load(Ordering::SeqCst), facilitator.settlements()), (2, 1));
}

/// A handler that does not care whether it got all of the body.
#[tokio::test]
async fn work_on_a_body_that_broke_off_is_not_charged() {
    let world = World::open().await;
    let app = selling(&world, |request| async move {
        let mut body = request.into_body();
        let mut read = Vec::new();
        while let Some(Ok(frame)) = body.frame().await {
            read.extend(frame.into_data().unwrap_or_default());
        }
        Response::new(Body::from(read))
    });
    let before = world.shop.handled();
    for payment in payments(&world, &app, evaluate("a")).await {
        let half = stream::iter([Ok(Bytes::from_static(b"half")), Err(std::io::Error::other("reset"))]);
        let broken = Request::post("/evaluate?k=1").body(Body::from_stream(half)).unwrap();
        let answer = send(&app, paid(broken, &payment)).await;
        assert_eq!((answer.status, answer.reason().as_str()), (StatusCode::BAD_REQUEST, "body_broken"), "{answer:?}");
        assert_eq!(answer.settlement(), None);
        let whole = ["half", " of it"].map(|piece| Ok::<_, Infallible>(Bytes::from_static(piece.as_bytes())));
        let whole = Request::post("/evaluate?k=1").body(Body::from_stream(stream::iter(whole))).unwrap();
        let answer = send(&app, paid(whole, &payment)).await;
        assert_eq!((answer.status, answer.text()), (StatusCode::OK, "half of it"), "{answer:?}");
    }
    // The body of a voucher is read before the work.
    assert_eq!((world.shop.handled() - before, world.received().await), (4, PRICE));
}
