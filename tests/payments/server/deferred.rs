//! Payments that are settled after the response was released: for payers that have paid before, within a limit.

use std::{
    convert::Infallible,
    sync::{Arc, atomic::Ordering},
};

use alloy_primitives::{B256, U256};
use axum::body::Body;
use bytes::Bytes;
use futures_util::{StreamExt as _, future::join_all, stream};
use http::{Response, StatusCode};
use serde_json::{Value, json};
use support::{
    scripted::{Scripted, away, customer, echo, key, layer, not_yet, record, serve},
    shop::{Answer, App, Customer, PRICE, Purchase, evaluate, send},
};
use tower_x402::{
    Network, Usdc,
    ledger::{Ledger, Listing, MemoryLedger, Record, Settlement, SettlementState, SettlementStep},
    protocol::{PaymentFlow, Reason},
    server::{BuildError, DeferredPolicy},
};

/// Returns a policy with credit for this number of payments at most for each payer.
fn policy(per_payer: u64) -> DeferredPolicy {
    DeferredPolicy::default().per_payer(Usdc::from_atomic(per_payer * PRICE))
}

/// Buys an answer with a new payment.
async fn buy(app: &App, customer: &Customer) -> (Purchase, Answer) {
    let purchase = customer.pay(app, evaluate("x")).await;
    let answer = send(app, purchase.on(evaluate("x"))).await;
    (purchase, answer)
}

/// Creates a customer that has paid for `times` answers, where nothing is deferred.
async fn known(facilitator: &Arc<Scripted>, times: u32) -> Customer {
    let (app, _) = serve(layer(facilitator), echo);
    let customer = customer();
    for _ in 0..times {
        buy(&app, &customer).await.1.transaction();
    }
    customer
}

/// Returns `true` if the payment for this answer is settled later.
fn is_accepted(answer: &Answer) -> bool {
    assert_eq!((answer.status, answer.text()), (StatusCode::OK, "x"), "{answer:?}");
    let settlement = answer.settlement().expect("a paid answer says how");
    assert_eq!(settlement["success"], true, "{settlement}");
    settlement["transaction"] == ""
}

/// Returns the sum of the deferred payments on record.
async fn owed(ledger: &dyn Ledger) -> u64 {
    let records = ledger.list(&Listing { limit: 10_000, ..Listing::default() }).await.unwrap();
    records.iter().map(Record::owed).sum::<U256>().try_into().unwrap()
}

async fn settle(ledger: &dyn Ledger, purchase: &Purchase, transaction: u8) {
    let transaction = B256::repeat_byte(transaction);
    let step = SettlementStep::Settle { transaction, block: Some(2), fee: None };
    ledger.advance(&key(purchase), &step.into()).await.unwrap();
}

#[tokio::test]
async fn a_known_payer_is_answered_before_any_transaction() {
    let facilitator = Arc::new(Scripted::new());
    let layer = layer(&facilitator).deferred(policy(10)).status_url("/payments/status");
    let (app, handled) = serve(layer, echo);
    let customer = known(&facilitator, 2).await;
    let (purchase, answer) = buy(&app, &customer).await;
    assert!(is_accepted(&answer));
    assert_eq!((handled.load(Ordering::SeqCst), facilitator.settlements()), (1, 2), "worked for, and not settled");
    let told = answer.settlement().unwrap();
    let payment = &told["extensions"]["payment-status"]["info"];
    assert_eq!((&payment["state"], &payment["url"]), (&json!("pending"), &json!("/payments/status")));
    for (name, value) in [
        ("network", json!(Network::BASE_SEPOLIA)),
        ("asset", json!(purchase.asset.address)),
        ("payer", json!(customer.from)),
        ("nonce", json!(purchase.authorization.nonce)),
    ] {
        assert_eq!(payment[name], value, "{told}");
    }
    assert_eq!((&told["payer"], &told["amount"]), (&json!(customer.from), &json!("1000")));
    // Background settlement is notified, and finds the payment.
    assert_eq!(facilitator.left(), [key(&purchase)]);
    let idle = Listing { idle_at: Some(support::authorization::unix_now()), ..Listing::of([SettlementState::Due]) };
    let due = facilitator.ledger.list(&idle).await.unwrap();
    assert_eq!(due.iter().map(|record| record.key).collect::<Vec<_>>(), [key(&purchase)]);
}

#[tokio::test]
async fn new_payer_is_settled_before_the_response() {
    let facilitator = Arc::new(Scripted::new());
    let (app, _) = serve(layer(&facilitator).deferred(policy(10)), echo);
    let other = known(&facilitator, 2).await;
    assert!(is_accepted(&buy(&app, &other).await.1));
    let stranger = customer();
    let answers = [buy(&app, &stranger).await.1, buy(&app, &stranger).await.1, buy(&app, &stranger).await.1];
    assert_eq!(answers.map(|answer| is_accepted(&answer)), [false, true, false], "it owes as much as it has paid");
    // Failed payments give no credit.
    let failing = Arc::new(Scripted::new().settle(|_, _| async { Ok(not_yet()) }));
    let (app, _) = serve(layer(&failing).deferred(policy(10)), echo);
    let poor = customer();
    for _ in 0..3 {
        assert_eq!(buy(&app, &poor).await.1.status, StatusCode::PAYMENT_REQUIRED);
    }
}

/// Anybody can be many payers.
#[tokio::test]
async fn new_payers_take_no_more_than_they_have_paid() {
    let facilitator = Arc::new(Scripted::new());
    let (app, _) = serve(layer(&facilitator).deferred(DeferredPolicy::default()), echo);
    let mut accepted = 0;
    for _ in 0..3 {
        let stranger = customer();
        for _ in 0..20 {
            accepted += u64::from(is_accepted(&buy(&app, &stranger).await.1));
        }
    }
    // None of what was deferred is settled: their money is elsewhere.
    let paid = facilitator.settlements();
    assert!(accepted > 0 && accepted <= paid, "{accepted} answers for nothing, {paid} paid ones");
}

#[tokio::test]
async fn payments_at_the_credit_limit_are_settled_before_the_response() {
    let facilitator = Arc::new(Scripted::new());
    let (app, _) = serve(layer(&facilitator).deferred(policy(3)), echo);
    let customer = known(&facilitator, 4).await;
    let mut deferred = Vec::new();
    for round in 0..6 {
        let (purchase, answer) = buy(&app, &customer).await;
        assert_eq!(is_accepted(&answer), round < 3);
        deferred.push(purchase);
    }
    assert_eq!(facilitator.settlements(), 4 + 3);
    settle(&*facilitator.ledger, &deferred[1], 7).await;
    assert!(is_accepted(&buy(&app, &customer).await.1), "what was paid is not owed");
    assert!(!is_accepted(&buy(&app, &customer).await.1));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn fifty_payments_at_once_owe_no_more_than_the_limit() {
    let ledger: Arc<dyn Ledger> = Arc::new(MemoryLedger::new());
    let books = ledger.clone();
    let mut scripted = Scripted::new().settle(move |_, _| {
        let books = books.clone();
        async move {
            assert!(owed(&*books).await <= 10 * PRICE, "looked at in between");
            Ok(support::scripted::paid())
        }
    });
    scripted.ledger = ledger.clone();
    let facilitator = Arc::new(scripted);
    let (app, handled) = serve(layer(&facilitator).deferred(policy(2)), echo);
    let mut customers = Vec::new();
    for _ in 0..5 {
        customers.push(known(&facilitator, 2).await);
    }
    let bought = customers.iter().cycle().take(50).cloned().map(|customer| {
        let app = app.clone();
        tokio::spawn(async move { is_accepted(&buy(&app, &customer).await.1) })
    });
    let accepted = join_all(bought).await.into_iter().filter(|accepted| *accepted.as_ref().unwrap()).count();
    assert_eq!((accepted, owed(&*ledger).await), (10, 10 * PRICE), "as much as allowed, and no more");
    assert_eq!((handled.load(Ordering::SeqCst), facilitator.settlements()), (50, 10 + 40), "the rest paid in line");
}

#[tokio::test]
async fn deferred_payment_presented_again_is_replayed_and_not_settled() {
    let facilitator = Arc::new(Scripted::new());
    let (app, handled) = serve(layer(&facilitator).deferred(policy(10)), echo);
    let customer = known(&facilitator, 1).await;
    let (purchase, first) = buy(&app, &customer).await;
    let again = async || send(&app, purchase.on(evaluate("x"))).await;
    let ledger = &facilitator.ledger;
    let submit = SettlementStep::Submit { transaction: B256::repeat_byte(7) };
    for step in [None, Some(submit), Some(SettlementStep::MarkUnknown)] {
        if let Some(step) = step {
            ledger.advance(&key(&purchase), &step.into()).await.unwrap();
        }
        let replay = again().await;
        assert!(is_accepted(&replay));
        assert_eq!(replay.settlement(), first.settlement());
    }
    assert_eq!(send(&app, purchase.on(evaluate("y"))).await.status, StatusCode::CONFLICT, "for its own request only");
    settle(&**ledger, &purchase, 7).await;
    assert_eq!(again().await.transaction(), B256::repeat_byte(7));
    assert_eq!((handled.load(Ordering::SeqCst), facilitator.settlements()), (1, 1));
}

#[tokio::test]
async fn payer_in_debt_gets_no_credit_until_it_has_paid() {
    let facilitator = Arc::new(Scripted::new());
    let (app, handled) = serve(layer(&facilitator).deferred(policy(10)), echo);
    let customer = known(&facilitator, 1).await;
    let (late, answer) = buy(&app, &customer).await;
    assert!(is_accepted(&answer));
    let fail = SettlementStep::Fail { reason: Reason::InsufficientFunds, by: 0, known_transactions: Vec::new() };
    facilitator.ledger.advance(&key(&late), &fail.into()).await.unwrap();
    assert!(!is_accepted(&buy(&app, &customer).await.1));
    // If it is presented again, the due payment is settled.
    let made_up_for = send(&app, late.on(evaluate("x"))).await;
    assert_eq!((made_up_for.text(), made_up_for.transaction()), ("x", B256::repeat_byte(0x77)));
    assert!(is_accepted(&buy(&app, &customer).await.1));
    assert_eq!(handled.load(Ordering::SeqCst), 3);
    let (lost, _) = buy(&app, &customer).await;
    let die = SettlementStep::Invalidate { reason: Reason::ValidBefore };
    facilitator.ledger.advance(&key(&lost), &die.into()).await.unwrap();
    assert!(!is_accepted(&buy(&app, &customer).await.1));
    let told = send(&app, lost.on(evaluate("x"))).await;
    assert_eq!((told.status, &told.settlement().unwrap()["success"]), (StatusCode::PAYMENT_REQUIRED, &json!(false)));
}

/// Payments that were deferred before an outage are settled after it, and keep their payers' credit.
#[tokio::test]
async fn outage_of_the_facilitator_does_not_use_up_credit() {
    let facilitator = Arc::new(
        Scripted::new()
            .settle(|call, _| async move { if call < 2 { Ok(support::scripted::paid()) } else { Err(away()) } }),
    );
    let (app, _) = serve(layer(&facilitator).deferred(policy(2)), echo);
    let customer = known(&facilitator, 2).await;
    assert!(is_accepted(&buy(&app, &customer).await.1) && is_accepted(&buy(&app, &customer).await.1));
    assert_eq!(buy(&app, &customer).await.1.status, StatusCode::SERVICE_UNAVAILABLE, "in line, as without credit");
}

#[tokio::test]
async fn v1_and_streamed_responses_are_not_deferred() {
    let facilitator = Arc::new(Scripted::new());
    let credit = || layer(&facilitator).deferred(policy(10));
    let (app, _) = serve(credit(), echo);
    let customer = known(&facilitator, 1).await;
    let in_v1 = customer.pay_v1(&app, evaluate("x")).await;
    let answer = send(&app, in_v1.on_v1(evaluate("x"))).await;
    let told = answer.settlement_v1().unwrap();
    assert_eq!(told["transaction"], json!(B256::repeat_byte(0x77)), "v1 cannot name a payment: {told}");
    let (upfront, _) = serve(credit().flow(PaymentFlow::Upfront), echo);
    assert!(!is_accepted(&buy(&upfront, &customer).await.1), "paid before the work");
    let (streaming, _) = serve(credit(), |_, _| async {
        Response::new(Body::from_stream(stream::iter([Ok::<_, Infallible>(Bytes::from("x"))])))
    });
    assert!(!is_accepted(&buy(&streaming, &customer).await.1), "a crash could lose it unpaid");
    assert!(is_accepted(&buy(&app, &customer).await.1), "the payer is good for it");
    let (cash, _) = serve(layer(&facilitator), echo);
    assert!(!is_accepted(&buy(&cash, &customer).await.1), "where it is not asked for");
}

#[tokio::test]
async fn work_that_fails_is_not_owed() {
    let facilitator = Arc::new(Scripted::new());
    let (app, _) = serve(layer(&facilitator).deferred(policy(10)), |run, request| async move {
        match run {
            0 => Response::builder().status(500).body(Body::empty()).unwrap(),
            _ => echo(run, request).await,
        }
    });
    let customer = known(&facilitator, 1).await;
    let (purchase, answer) = buy(&app, &customer).await;
    assert_eq!(answer.status, StatusCode::INTERNAL_SERVER_ERROR);
    assert_eq!(owed(&*facilitator.ledger).await, 0);
    assert_eq!(record(&facilitator, &purchase).await.unwrap().settlement, Settlement::None);
    assert!(is_accepted(&send(&app, purchase.on(evaluate("x"))).await));
}

#[tokio::test]
async fn deferring_does_not_change_the_offer() {
    let facilitator = Arc::new(Scripted::new());
    let (with, _) = serve(layer(&facilitator).deferred(policy(10)), echo);
    let (without, _) = serve(layer(&facilitator), echo);
    let unpaid: Vec<Value> = stream::iter([&with, &without])
        .then(async |app| support::shop::demand(&send(app, evaluate("x")).await))
        .collect()
        .await;
    assert_eq!(unpaid[0], unpaid[1]);
}

#[test]
fn deferring_needs_a_facilitator_that_settles_later() {
    let mut idle = Scripted::new();
    idle.settles_in_background = false;
    let idle = Arc::new(idle);
    let error = layer(&idle).deferred(DeferredPolicy::default()).build().unwrap_err();
    assert_eq!(error, BuildError::NotDeferrable(Network::BASE_SEPOLIA));
    layer(&idle).build().unwrap();
}
