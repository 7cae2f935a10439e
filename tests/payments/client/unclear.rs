//! Unclear and untrue answers to a payment: when it is sent again, and which outcome is reported.

use std::{sync::Arc, time::Duration};

use alloy_signer_local::PrivateKeySigner;
use axum::{
    body::Body,
    http::header,
    response::{IntoResponse as _, Response},
};
use serde_json::json;
use tower_x402::{
    ManualClock, Usdc,
    client::{Budget, Payer, PaymentError, PaymentMiddleware, PaymentOutcome, ReceiptExt, Refusal, RetryPolicy},
};

use support::script::*;

use super::middleware::{buy, client, middleware, outcome, refusal};

#[tokio::test]
async fn same_authorization_is_sent_again_after_a_timeout_a_502_or_a_cut_connection() {
    for failure in [silence(), status(502), cut(), later(503, None), later(409, None), later(429, None)] {
        let (status, receipt, budget, server) = outcome(vec![failure, settled()]).await;
        assert_eq!((status, receipt.outcome), (200, PaymentOutcome::Settled));
        let payments = server.payments();
        assert_eq!(payments.len(), 2);
        assert_eq!(payments[0], payments[1]);
        assert_eq!((budget.spent().atomic(), budget.reserved().atomic()), (1_000, 0));
        let bodies: Vec<_> = server.seen().into_iter().map(|seen| seen.body).collect();
        assert_eq!(bodies, vec![b"my answer".to_vec(); 3]);
    }
}

#[tokio::test]
async fn pending_settlement_is_retried() {
    let pending = json!({
        "success": false, "errorReason": "settlement_pending", "transaction": transaction(), "network": "eip155:84532",
    });
    let (_, receipt, ..) = outcome(vec![later(503, Some(pending.clone())), settled()]).await;
    assert_eq!(receipt.outcome, PaymentOutcome::Settled);

    let replies = (0..5).map(|_| later(503, Some(pending.clone()))).collect();
    let (status, receipt, budget, server) = outcome(replies).await;
    assert_eq!((status, receipt.outcome), (503, PaymentOutcome::Unknown));
    assert_eq!(receipt.transaction, Some(transaction()));
    assert_eq!(receipt.reason.as_deref(), Some("settlement_pending"));
    assert_eq!(server.payments().len(), 5, "bounded");
    assert_eq!(budget.reserved().atomic(), 1_000);
}

#[tokio::test]
async fn retry_after_may_be_a_date() {
    // By the client's clock that is now, and a year from now.
    for (date, presented) in [("Fri, 15 Jan 2027 08:00:00 GMT", 2), ("Sat, 15 Jan 2028 08:00:00 GMT", 1)] {
        let reply: Reply = Box::new(move |_| {
            let response = Response::builder().status(409).header(header::RETRY_AFTER, date);
            Answer::Response(response.body(Body::empty()).unwrap())
        });
        let short = support::changed(offer(1_000), |offer| offer.max_timeout_seconds = 20);
        let server = Server::paid(required(&[short]), vec![reply, settled()]).await;
        buy(&server, &budget(10_000)).await.unwrap();
        assert_eq!(server.payments().len(), presented);
    }
}

#[tokio::test]
async fn unanswered_payment_is_unknown_and_stays_reserved() {
    let server = Server::paid(required(&[offer(1_000)]), (0..9).map(|_| silence()).collect()).await;
    let budget = budget(10_000);
    let client = middleware(&budget)
        .retry(RetryPolicy::default().max_attempts(2).attempt_timeout(Duration::from_millis(300)))
        .client(reqwest::Client::builder().no_proxy())
        .unwrap();
    let error = client.post(server.url()).body("x").send().await.unwrap_err();
    match PaymentError::of(&error) {
        Some(error @ PaymentError::Unanswered { receipt, attempts: 2, .. }) => {
            assert_eq!(receipt.outcome, PaymentOutcome::Unknown);
            assert_eq!(error.outcome(), PaymentOutcome::Unknown);
        }
        _ => panic!("{error:?}"),
    }
    assert_eq!(server.payments().len(), 2);
    assert_eq!((budget.spent().atomic(), budget.reserved().atomic()), (0, 1_000));
    assert_eq!(budget.journal().unresolved().len(), 1);
}

#[tokio::test]
async fn a_second_402_never_leads_to_a_second_signature() {
    let failed = json!({
        "success": false, "errorReason": "insufficient_funds", "transaction": "", "network": "eip155:84532",
    });
    let (status, receipt, budget, server) = outcome(vec![with_settlement(402, failed)]).await;
    assert_eq!((status, receipt.outcome), (402, PaymentOutcome::Failed));
    assert_eq!(receipt.reason.as_deref(), Some("insufficient_funds"));
    assert_eq!(server.payments().len(), 1);
    assert_eq!((budget.spent().atomic(), budget.reserved().atomic()), (0, 1_000));

    let asked_again = |error: &str| -> Reply {
        let error = encode(json!({ "x402Version": 2, "error": error, "accepts": [] }));
        Box::new(move |_| Answer::Response(required_402(&error)))
    };
    for reply in [required_again(1_000), asked_again("Payment required"), asked_again("payment required")] {
        let (_, receipt, _, server) = outcome(vec![reply]).await;
        assert_eq!(receipt.outcome, PaymentOutcome::Unknown, "it does not say that anything failed: {receipt:?}");
        assert_eq!(server.payments().len(), 1);
    }
    for error in ["insufficient_funds", "Verification failed: insufficient_funds"] {
        let (_, receipt, ..) = outcome(vec![asked_again(error)]).await;
        assert_eq!((receipt.outcome, receipt.reason.as_deref()), (PaymentOutcome::Failed, Some("insufficient_funds")));
    }
}

#[tokio::test]
async fn failure_after_an_unclear_attempt_is_unknown() {
    let failed = || json!({ "success": false, "errorReason": "insufficient_funds", "transaction": "", "network": "eip155:84532" });
    let (_, receipt, budget, _) = outcome(vec![cut(), with_settlement(402, failed())]).await;
    assert_eq!(receipt.outcome, PaymentOutcome::Unknown);
    assert_eq!(budget.reserved().atomic(), 1_000);

    let used = json!({
        "success": false, "errorReason": "invalid_exact_evm_nonce_already_used", "transaction": "", "network": "eip155:84532",
    });
    let (_, receipt, ..) = outcome(vec![with_settlement(402, used)]).await;
    assert_eq!(receipt.outcome, PaymentOutcome::Unknown);
}

#[tokio::test]
async fn failed_payment_is_released_on_expiry_only_with_release_failed() {
    for believed in [false, true] {
        a_failed_payment_expires(believed).await;
    }
}

async fn a_failed_payment_expires(believed: bool) {
    let clock = Arc::new(ManualClock::at(NOW));
    let budget = Budget::builder().total(Usdc::from_atomic(1_000));
    let budget = if believed { budget.release_failed() } else { budget }.build();
    let key: PrivateKeySigner = KEY.parse().unwrap();
    let payer = Payer::builder(key).budget(budget.clone()).clock(clock.clone()).build();
    let client = PaymentMiddleware::new(payer).client(reqwest::Client::builder().no_proxy()).unwrap();
    let server = Server::paid(required(&[offer(1_000)]), vec![status(422), settled()]).await;
    let first = client.post(server.url()).send().await.unwrap();
    assert_eq!((first.status().as_u16(), first.receipt().unwrap().outcome), (422, PaymentOutcome::Failed));

    clock.advance(119);
    let error = client.post(server.url()).send().await.unwrap_err();
    assert!(matches!(refusal(&error), Refusal::AboveTotalLimit { .. }));
    clock.advance(1);
    if !believed {
        assert!(client.post(server.url()).send().await.is_err());
        assert_eq!((budget.reserved().atomic(), budget.journal().unresolved().len()), (1_000, 1));
        return;
    }
    assert_eq!(client.post(server.url()).send().await.unwrap().receipt().unwrap().outcome, PaymentOutcome::Settled);
    assert_eq!((budget.spent().atomic(), budget.reserved().atomic()), (1_000, 0));
}

#[tokio::test]
async fn success_without_a_receipt_is_unknown_and_its_body_is_returned() {
    let server =
        Server::paid(required(&[offer(1_000)]), vec![Box::new(|_| Answer::Response("text".into_response()))]).await;
    let budget = budget(10_000);
    let response = client(&budget).post(server.url()).send().await.unwrap();
    assert_eq!(response.receipt().unwrap().outcome, PaymentOutcome::Unknown);
    assert_eq!(response.text().await.unwrap(), "text");
    assert_eq!((budget.spent().atomic(), budget.reserved().atomic()), (0, 1_000));
}

#[tokio::test]
async fn success_without_a_transaction_is_accepted() {
    let mut accepted = settlement();
    accepted["transaction"] = "".into();
    let (_, receipt, budget, _) = outcome(vec![with_settlement(200, accepted)]).await;
    assert_eq!((receipt.outcome, receipt.transaction), (PaymentOutcome::Accepted, None));
    assert_eq!(budget.spent().atomic(), 1_000);
}

#[tokio::test]
async fn receipt_that_contradicts_what_was_signed_is_unknown() {
    for (field, value) in [
        ("payer", "0x0000000000000000000000000000000000000001"),
        ("payer", "me"),
        ("network", "eip155:8453"),
        ("amount", "999"),
        ("amount", "$1"),
        ("transaction", "0x12"),
    ] {
        let mut wrong = settlement();
        wrong[field] = value.into();
        let (status, receipt, budget, _) = outcome(vec![with_settlement(200, wrong)]).await;
        assert_eq!((status, receipt.outcome), (200, PaymentOutcome::Unknown), "{field} {value}");
        assert_eq!((budget.spent().atomic(), budget.reserved().atomic()), (0, 1_000));
    }
    let (_, receipt, ..) = outcome(vec![with_settlement(200, "not json")]).await;
    assert_eq!(receipt.outcome, PaymentOutcome::Unknown);
}

#[tokio::test]
async fn settled_payment_whose_work_failed_is_retried_and_stays_settled() {
    let (status, receipt, budget, server) = outcome(vec![with_settlement(503, settlement()), settled()]).await;
    assert_eq!((status, receipt.outcome, server.payments().len()), (200, PaymentOutcome::Settled, 2));
    assert_eq!(budget.spent().atomic(), 1_000);

    let mut replies: Vec<Reply> = vec![with_settlement(503, settlement())];
    replies.extend((0..4).map(|_| status_502()));
    let (status, receipt, budget, server) = outcome(replies).await;
    assert_eq!((status, receipt.outcome, server.payments().len()), (502, PaymentOutcome::Settled, 5));
    assert_eq!(receipt.transaction, Some(transaction()));
    assert_eq!(budget.spent().atomic(), 1_000);
}

fn status_502() -> Reply {
    status(502)
}
