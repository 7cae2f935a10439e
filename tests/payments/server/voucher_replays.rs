//! A request by voucher that comes again gets the answer that it got before, costs nothing, and is told apart from a new one.

use std::{
    convert::Infallible,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use axum::body::Body;
use futures_util::{StreamExt as _, future::join_all, stream};
use http::{Request, Response, StatusCode};
use serde_json::{Value, json};
use support::{
    eventually::eventually,
    faulty_ledger::{Fault, How, faulty_channels},
    shop::{Answer, App, PRICE, demand, evaluate, paid, send},
    world::{COST, DEPOSIT, World, by_voucher, offer, pay, payment, refused, told},
};
use tokio::sync::Notify;
use tower_x402::{
    Usdc,
    ledger::{MemoryLedger, ResponseLimits},
    protocol::Extension,
    server::{PriceError, Quote},
};

#[tokio::test]
async fn the_same_voucher_for_the_same_request_is_answered_once_and_charged_once() {
    let world = World::open().await;
    let app = world.app.clone();
    let channel = world.filled(&app).await;
    let copies =
        join_all((0..8).map(|_| async { send(&app, pay(&app, &channel, 2 * COST, None, "again").await).await }));
    for answer in copies.await {
        assert_eq!((answer.status, answer.text()), (StatusCode::OK, "again"), "{answer:?}");
        assert_eq!(told(&answer), ("1000".into(), "2000".into()));
    }
    assert_eq!(world.shop.handled(), 2, "the first request and this one");
    assert_eq!(world.charged(&channel).await, 2 * COST);
    // Its receipt stays the same, whatever is bought later.
    let later = send(&app, pay(&app, &channel, 3 * COST, None, "later").await).await;
    assert_eq!((later.status, told(&later)), (StatusCode::OK, ("1000".into(), "3000".into())), "{later:?}");
    let answer = send(&app, pay(&app, &channel, 2 * COST, None, "again").await).await;
    assert_eq!((answer.text(), told(&answer)), ("again", ("1000".into(), "2000".into())), "{answer:?}");

    let other = send(&app, pay(&app, &channel, 2 * COST, None, "another").await).await;
    refused(&other, "cumulative_amount_mismatch");
    assert_eq!(world.shop.handled(), 3);
}

#[tokio::test]
async fn a_lost_deposit_request_is_repeated_without_a_second_deposit() {
    let world = World::open().await;
    let app = world.app.clone();
    let channel = world.channel().await;
    let deposit = world.sign_deposit(&channel, DEPOSIT).await;
    for _ in 0..2 {
        let answer = send(&app, pay(&app, &channel, COST, Some(&deposit), "one").await).await;
        assert_eq!((answer.status, answer.text()), (StatusCode::OK, "one"), "{answer:?}");
        assert_eq!(told(&answer), ("1000".into(), "1000".into()));
    }
    assert_eq!(channel.state(&world.chain).await, (DEPOSIT, 0));
    assert_eq!(world.shop.handled(), 1);
}

#[tokio::test]
async fn a_refund_is_not_taken_for_a_repetition_of_the_last_request() {
    let world = World::open().await;
    let app = world.app.clone();
    let channel = world.filled(&app).await;
    // The voucher of the refund is the one that this request was paid with.
    let by = by_voucher(&app, &channel, 2 * COST).await;
    let request = async |kind: &str| {
        let mut payment = by.clone();
        payment["accepted"] = offer(&app, "").await;
        payment["payload"]["type"] = kind.into();
        paid(evaluate(""), &payment)
    };
    assert_eq!(told(&send(&app, request("voucher").await).await), ("1000".into(), "2000".into()));
    let refunded = send(&app, request("refund").await).await;
    assert_eq!(refunded.settlement().unwrap()["amount"], "8000", "{refunded:?}");
    assert_eq!(channel.state(&world.chain).await, (2 * COST, 2 * COST));
}

/// What was charged is known when they answer again, and so is the response, also one that streams.
#[tokio::test]
async fn a_charge_that_the_books_do_not_confirm_is_pending_and_its_answer_given_later() {
    let world = World::open().await;
    let books = faulty_channels(world.ledger.clone());
    let channels = world.process(books.clone()).await;
    let app = world.shop.app_with(world.shop.layer().vouchers(channels), |_, body| async move {
        let whole = Body::from(body.clone());
        let streamed = Body::from_stream(stream::iter([Ok::<_, Infallible>(body.clone())]));
        Ok(Response::new(if body == "streams" { streamed } else { whole }))
    });
    let channel = world.filled(&app).await;
    for (body, charged) in [("whole", 2 * COST), ("streams", 3 * COST)] {
        let [first, again] =
            [pay(&app, &channel, charged, None, body).await, pay(&app, &channel, charged, None, body).await];
        // Longer than a step is repeated for.
        let how = How::GoneAfter(Duration::from_millis(2_500));
        books.around.arm(Some(Fault { call: "advance Charge", nth: 0, how }));
        let answer = send(&app, first).await;
        assert_eq!(
            (answer.status, answer.reason().as_str()),
            (StatusCode::SERVICE_UNAVAILABLE, "settlement_pending"),
            "{answer:?}"
        );
        assert!(!answer.text().contains("nothing was charged"), "{answer:?}");
        assert_eq!(answer.settlement().unwrap()["errorReason"], "settlement_pending", "{answer:?}");
        assert_eq!(world.charged(&channel).await, charged);
        tokio::time::sleep(Duration::from_secs(1)).await;
        let answer = send(&app, again).await;
        assert_eq!((answer.status, answer.text()), (StatusCode::OK, body), "{answer:?}");
        assert_eq!(told(&answer), ("1000".into(), charged.to_string()));
        assert_eq!(world.charged(&channel).await, charged);
    }
    assert_eq!(world.shop.handled(), 3);
}

/// A ledger keeps only so many, and whoever was answered at once does not wait for a stream.
#[tokio::test]
async fn a_whole_answer_that_is_not_kept_any_more_is_gone_and_not_in_progress() {
    let world = World::open().await;
    let books = Arc::new(MemoryLedger::with(ResponseLimits::default().count(1), 100, world.clock.clone()));
    let channels = world.process(books).await;
    let app = world.seller(channels);
    let channel = world.filled(&app).await;
    let answer = send(&app, pay(&app, &channel, 2 * COST, None, "second").await).await;
    assert_eq!(answer.status, StatusCode::OK, "{answer:?}");
    let answer = send(&app, pay(&app, &channel, COST, None, "first").await).await;
    assert_eq!((answer.status, answer.reason().as_str()), (StatusCode::CONFLICT, "payment_already_used"), "{answer:?}");
    assert_eq!(told(&answer).0, COST.to_string(), "it is told what it paid");
}

/// A request without a body, a payment identifier or credentials can be repeated by anybody who has read its voucher on the chain.
#[tokio::test]
async fn a_response_without_a_secret_is_given_again_for_a_minute_only() {
    let world = World::open().await;
    let layer = world.shop.layer().clock(world.clock.clone()).vouchers(world.channels.clone());
    let app = world.shop.app(layer.payment_identifier(true));
    let channel = world.filled(&app).await;
    let request = async |max: u128, secret: &str| {
        let mut payment = payment("voucher", &offer(&app, "").await, &channel, max).await;
        if secret == "identifier" {
            let id = json!({ "info": { "required": false, "id": "a-very-secret-identifier" }, "schema": {} });
            payment["extensions"] = json!({ "payment-identifier": id });
        }
        let mut request = paid(evaluate(if secret == "body" { "secret" } else { "" }), &payment);
        if secret == "credentials" {
            request.headers_mut().insert("authorization", "Bearer secret".parse().unwrap());
        }
        send(&app, request).await
    };
    let mut charged = COST;
    for secret in ["", "body", "identifier", "credentials"] {
        charged += COST;
        for after in [0, 60, 1] {
            world.clock.advance(after);
            let answer = request(charged, secret).await;
            let expected = if secret.is_empty() && after == 1 { StatusCode::CONFLICT } else { StatusCode::OK };
            assert_eq!(answer.status, expected, "{secret}: {answer:?}");
            assert_eq!(told(&answer), ("1000".into(), charged.to_string()));
        }
    }
    assert_eq!((u128::from(world.shop.handled()) * COST, world.charged(&channel).await), (charged, charged));
}

/// The charge of the first attempt did not reach the books, which are back before its stream ends. The second attempt streams, too.
#[tokio::test]
async fn a_stream_that_was_not_charged_is_not_kept_in_place_of_the_one_that_was() {
    let world = World::open().await;
    let books = faulty_channels(world.ledger.clone());
    let channels = world.process(books.clone()).await;
    let attempts = Arc::<AtomicU64>::default();
    let layer = world.shop.layer().clock(world.clock.clone()).vouchers(channels);
    let app = world.shop.app_with(layer, move |_, _| {
        let answer = format!("answer {}", attempts.fetch_add(1, Ordering::SeqCst));
        let answer = stream::iter([Ok::<_, Infallible>(answer)]);
        async move { Ok(Response::new(Body::from_stream(answer))) }
    });
    let channel = world.filled(&app).await;
    let ask = async || pay(&app, &channel, 2 * COST, None, "streams").await;
    let request = ask().await;
    // Longer than a step is repeated for.
    let how = How::GoneBefore(Duration::from_millis(2_500));
    books.around.arm(Some(Fault { call: "advance Charge", nth: 0, how }));
    let answer = send(&app, request).await;
    assert_eq!(answer.reason(), "settlement_pending", "{answer:?}");
    // Until the books are back, and were asked to keep it.
    tokio::time::sleep(Duration::from_secs(5)).await;
    world.clock.advance(200);
    for what in ["worked for again", "replayed"] {
        let answer = send(&app, ask().await).await;
        assert_eq!(answer.text(), "answer 2", "{what}: {answer:?}");
    }
    assert_eq!((world.shop.handled(), world.charged(&channel).await), (3, 2 * COST));
}

/// The same, but the first stream ends when the second is charged for and not kept yet.
#[tokio::test]
async fn a_stream_that_was_not_charged_is_not_kept_while_the_one_that_was_goes_on() {
    let world = World::open().await;
    let books = faulty_channels(world.ledger.clone());
    let channels = world.process(books.clone()).await;
    let (attempts, ends): (Arc<AtomicU64>, Arc<[Notify; 3]>) = Default::default();
    let ended = ends.clone();
    ends[0].notify_one();
    let layer = world.shop.layer().clock(world.clock.clone()).vouchers(channels);
    let app = world.shop.app_with(layer, move |_, _| {
        let (attempt, ends) = (attempts.fetch_add(1, Ordering::SeqCst), ends.clone());
        let end = stream::once(async move {
            ends[usize::try_from(attempt).unwrap()].notified().await;
            Ok::<_, Infallible>(String::from("."))
        });
        let answer = stream::iter([Ok(format!("answer {attempt}"))]).chain(end);
        async move { Ok(Response::new(Body::from_stream(answer))) }
    });
    let channel = world.filled(&app).await;
    let ask = async || pay(&app, &channel, 2 * COST, None, "streams").await;
    let request = ask().await;
    // Longer than a step is repeated for.
    let how = How::GoneBefore(Duration::from_millis(2_500));
    books.around.arm(Some(Fault { call: "advance Charge", nth: 0, how }));
    let answer = send(&app, request).await;
    assert_eq!(answer.reason(), "settlement_pending", "{answer:?}");
    tokio::time::sleep(Duration::from_secs(3)).await;
    world.clock.advance(200);
    let second = tokio::spawn(send_later(app.clone(), ask().await));
    eventually("the second attempt is charged for", async || world.charged(&channel).await == 2 * COST).await;
    ended[1].notify_one();
    // Until the first stream was to be kept.
    tokio::time::sleep(Duration::from_secs(1)).await;
    ended[2].notify_one();
    assert_eq!(second.await.unwrap().text(), "answer 2.");
    let answer = send(&app, ask().await).await;
    assert_eq!((answer.text(), world.shop.handled()), ("answer 2.", 3), "{answer:?}");
}

async fn send_later(app: App, request: Request<Body>) -> Answer {
    send(&app, request).await
}

#[tokio::test]
async fn an_answer_by_voucher_is_given_again_after_its_request_has_lost_its_price() {
    let world = World::open().await;
    let is_sold = Arc::new(AtomicBool::new(false));
    let sold = is_sold.clone();
    let layer = world.layer().price_with(move |_| {
        std::future::ready(match sold.load(Ordering::SeqCst) {
            true => Err(PriceError::new(StatusCode::NOT_FOUND, "it is sold")),
            false => Ok(Quote::Amount(Usdc::from_atomic(PRICE))),
        })
    });
    let app = world.shop.app(layer);
    let channel = world.filled(&app).await;
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
    assert_eq!((world.shop.handled(), world.charged(&channel).await), (1, COST));
}

/// With what its payer added to an extension that the seller declares in another way since.
#[tokio::test]
async fn an_answer_by_voucher_is_given_again_whatever_is_declared_since() {
    let world = World::open().await;
    let layer = || world.layer();
    let declares = |info: Value| world.shop.app(layer().extension(Extension::new("greeting", info, json!({}))));
    let app = declares(json!({ "language": "en" }));
    let channel = world.filled(&app).await;
    let demanded = demand(&send(&app, evaluate("a")).await);
    let mut payment = by_voucher(&app, &channel, 2 * COST).await;
    payment["extensions"] = demanded["extensions"].clone();
    payment["extensions"]["greeting"]["info"]["name"] = "Ada".into();
    let later = [declares(json!({ "language": "de" })), declares(json!({})), world.shop.app(layer())];
    for app in [&app].into_iter().chain(&later) {
        let answer = send(app, paid(evaluate("a"), &payment)).await;
        assert_eq!((answer.status, answer.text()), (StatusCode::OK, "a"), "{answer:?}");
    }
    assert_eq!((world.shop.handled(), world.charged(&channel).await), (2, 2 * COST));
}
