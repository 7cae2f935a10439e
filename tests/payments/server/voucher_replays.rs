//! A request by voucher that comes again gets the answer that it got before, costs nothing, and is told apart from a new one.

use std::{convert::Infallible, sync::Arc, time::Duration};

use alloy_primitives::U256;
use alloy_signer_local::PrivateKeySigner;
use axum::body::Body;
use futures_util::{future::join_all, stream};
use http::{Response, StatusCode};
use serde_json::json;
use support::{
    authorization::unix_now,
    chain::Chain as _,
    faulty_ledger::{Fault, How, faulty_channels},
    shop::{evaluate, paid, send},
};
use tower_x402::ledger::{MemoryLedger, ResponseLimits};

use super::vouchers::{COST, DEPOSIT, Stage, offer, pay, refused, told, voucher};

#[tokio::test]
async fn the_same_voucher_for_the_same_request_is_answered_once_and_charged_once() {
    let stage = Stage::open().await;
    let app = stage.app();
    let channel = stage.filled(&app).await;
    let copies =
        join_all((0..8).map(|_| async { send(&app, pay(&app, &channel, 2 * COST, None, "again").await).await }));
    for answer in copies.await {
        assert_eq!((answer.status, answer.text()), (StatusCode::OK, "again"), "{answer:?}");
        assert_eq!(told(&answer), ("1000".into(), "2000".into()));
    }
    assert_eq!(stage.shop.handled(), 2, "the first request and this one");
    assert_eq!(stage.charged(&channel).await, 2 * COST);

    let other = send(&app, pay(&app, &channel, 2 * COST, None, "another").await).await;
    refused(&other, "cumulative_amount_mismatch");
    assert_eq!(stage.shop.handled(), 2);
}

#[tokio::test]
async fn a_lost_deposit_request_is_repeated_without_a_second_deposit() {
    let stage = Stage::open().await;
    let app = stage.app();
    let channel = stage.payer().await;
    let deposit = channel.sign_deposit(&stage.chain, DEPOSIT, unix_now() + 60).await;
    for _ in 0..2 {
        let answer = send(&app, pay(&app, &channel, COST, Some(&deposit), "one").await).await;
        assert_eq!((answer.status, answer.text()), (StatusCode::OK, "one"), "{answer:?}");
        assert_eq!(told(&answer), ("1000".into(), "1000".into()));
    }
    assert_eq!(channel.state(&stage.chain).await, (DEPOSIT, 0));
    assert_eq!(stage.shop.handled(), 1);
}

#[tokio::test]
async fn a_refund_is_not_taken_for_a_repetition_of_the_last_request() {
    let stage = Stage::open().await;
    let app = stage.app();
    let channel = stage.filled(&app).await;
    // The voucher of the refund is the one that this request was paid with.
    let voucher = voucher(&channel, 2 * COST).await;
    let request = async |kind: &str| {
        let payload = json!({ "type": kind, "channelConfig": channel.config, "voucher": voucher });
        paid(evaluate(""), &json!({ "x402Version": 2, "accepted": offer(&app, "").await, "payload": payload }))
    };
    assert_eq!(told(&send(&app, request("voucher").await).await), ("1000".into(), "2000".into()));
    let refunded = send(&app, request("refund").await).await;
    assert_eq!(refunded.settlement().unwrap()["amount"], "8000", "{refunded:?}");
    assert_eq!(channel.state(&stage.chain).await, (2 * COST, 2 * COST));
}

/// What was charged is known when they answer again, and so is the response, also one that streams.
#[tokio::test]
async fn a_charge_that_the_books_do_not_confirm_is_pending_and_its_answer_given_later() {
    let stage = Stage::open().await;
    let books = faulty_channels(stage.ledger.clone());
    let sender = PrivateKeySigner::random();
    stage.chain.fund(sender.address(), U256::from(10).pow(U256::from(18))).await;
    let (url, clock) = (stage.chain.rpc_url(), stage.clock.clone());
    let channels = Stage::channels(&url, &stage.authorizer, sender, books.clone(), clock).await;
    let app = stage.shop.app_with(stage.shop.layer().vouchers(channels), |_, body| async move {
        let whole = Body::from(body.clone());
        let streamed = Body::from_stream(stream::iter([Ok::<_, Infallible>(body.clone())]));
        Ok(Response::new(if body == "streams" { streamed } else { whole }))
    });
    let channel = stage.filled(&app).await;
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
        assert_eq!(stage.charged(&channel).await, charged);
        tokio::time::sleep(Duration::from_secs(1)).await;
        let answer = send(&app, again).await;
        assert_eq!((answer.status, answer.text()), (StatusCode::OK, body), "{answer:?}");
        assert_eq!(told(&answer), ("1000".into(), charged.to_string()));
        assert_eq!(stage.charged(&channel).await, charged);
    }
    assert_eq!(stage.shop.handled(), 3);
}

/// A ledger keeps only so many, and whoever was answered at once does not wait for a stream.
#[tokio::test]
async fn a_whole_answer_that_is_not_kept_any_more_is_gone_and_not_in_progress() {
    let stage = Stage::open().await;
    let books = Arc::new(MemoryLedger::with(ResponseLimits::default().count(1), 100, stage.clock.clone()));
    let sender = PrivateKeySigner::random();
    stage.chain.fund(sender.address(), U256::from(10).pow(U256::from(18))).await;
    let (url, clock) = (stage.chain.rpc_url(), stage.clock.clone());
    let channels = Stage::channels(&url, &stage.authorizer, sender, books, clock).await;
    let app = stage.shop.app(stage.shop.layer().vouchers(channels));
    let channel = stage.filled(&app).await;
    let answer = send(&app, pay(&app, &channel, 2 * COST, None, "second").await).await;
    assert_eq!(answer.status, StatusCode::OK, "{answer:?}");
    let answer = send(&app, pay(&app, &channel, COST, None, "first").await).await;
    assert_eq!((answer.status, answer.reason().as_str()), (StatusCode::CONFLICT, "payment_already_used"), "{answer:?}");
    assert_eq!(told(&answer).0, COST.to_string(), "it is told what it paid");
}

/// A request without a body, a payment identifier or credentials can be repeated by anybody who has read its voucher on the chain.
#[tokio::test]
async fn a_response_without_a_secret_is_given_again_for_a_minute_only() {
    let stage = Stage::open().await;
    let layer = stage.shop.layer().clock(stage.clock.clone()).vouchers(stage.channels.clone());
    let app = stage.shop.app(layer.payment_identifier(true));
    let channel = stage.filled(&app).await;
    let request = async |max: u128, secret: &str| {
        let payload =
            json!({ "type": "voucher", "channelConfig": channel.config, "voucher": voucher(&channel, max).await });
        let mut payment = json!({ "x402Version": 2, "accepted": offer(&app, "").await, "payload": payload });
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
            stage.clock.advance(after);
            let answer = request(charged, secret).await;
            let expected = if secret.is_empty() && after == 1 { StatusCode::CONFLICT } else { StatusCode::OK };
            assert_eq!(answer.status, expected, "{secret}: {answer:?}");
            assert_eq!(told(&answer), ("1000".into(), charged.to_string()));
        }
    }
    assert_eq!((u128::from(stage.shop.handled()) * COST, stage.charged(&channel).await), (charged, charged));
}
