//! Interleavings and failures that no chain produces on demand, with a facilitator that follows a script.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use alloy_primitives::{B256, Bytes as Hex};
use axum::body::Body;
use bytes::Bytes;
use futures_util::{StreamExt as _, stream};
use http::{HeaderValue, Request, Response, StatusCode, header};
use http_body_util::BodyExt as _;
use support::{
    around_ledger::{Around, AroundLedger, Call},
    authorization::unix_now,
    scripted::{Scripted, away, customer, echo, key, layer, not_yet, paid, record, serve},
    shop::{app, evaluate, send, try_send},
};
use tokio::sync::Notify;
use tower::{Layer as _, ServiceExt as _};
use tower_x402::{
    ManualClock, Network, Usdc,
    ledger::{Ledger, LedgerError, MemoryLedger, Settlement, SettlementStep},
    payment::{Authenticity, Rejection, SettlementOutcome, Verified},
    protocol::{PaymentFlow, Reason},
    server::{Quote, RequestBody},
};

/// A body that reports when it is read, and ends on command.
fn held_body(text: &'static str, read: Arc<Notify>, go: Arc<Notify>) -> Body {
    Body::from_stream(stream::once(async move {
        read.notify_one();
        go.notified().await;
        Ok::<_, std::io::Error>(Bytes::from_static(text.as_bytes()))
    }))
}

#[tokio::test]
async fn refused_payment_buys_nothing_at_the_earlier_price() {
    let (asked, answer) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let (asking, told) = (asked.clone(), answer.clone());
    let facilitator = Arc::new(Scripted::new().verify(move |call, _| {
        let (asking, told) = (asking.clone(), told.clone());
        async move {
            if call > 0 {
                return Ok(Verified::default());
            }
            asking.notify_one();
            told.notified().await;
            Err(Rejection::new(Reason::InsufficientFunds, "nothing there").into())
        }
    }));
    let layer = layer(&facilitator).flow(PaymentFlow::Upfront).price_with(|request| {
        let units = if request.uri.path() == "/dear" { 1_000_000 } else { 1_000 };
        async move { Ok(Usdc::from_atomic(units).into()) }
    });
    let (app, handled) = serve(layer, echo);
    let cheap = || Request::post("/cheap").body(Body::from("x")).unwrap();
    let purchase = customer().pay(&app, cheap()).await;
    let (one, first) = (app.clone(), purchase.on(cheap()));
    let first = tokio::spawn(async move { send(&one, first).await });
    support::eventually::in_time("somebody asks", asked.notified()).await;
    // While the payment is on record, it is presented for an expensive request, whose body arrives after the record was removed.
    let (read, go) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let dear = Request::post("/dear").body(held_body("x", read.clone(), go.clone())).unwrap();
    let (two, second) = (app.clone(), purchase.on(dear));
    let second = tokio::spawn(async move { send(&two, second).await });
    let _ = tokio::time::timeout(Duration::from_millis(500), read.notified()).await;
    answer.notify_one();
    assert_eq!(first.await.unwrap().status, StatusCode::PAYMENT_REQUIRED);
    go.notify_one();
    let second = second.await.unwrap();
    assert_eq!(handled.load(Ordering::SeqCst), 0, "{second:?}");
    assert!(second.status.is_client_error(), "{second:?}");
    assert_eq!(facilitator.settlements(), 0);
}

#[tokio::test]
async fn payment_for_failed_work_buys_nothing_at_a_more_expensive_service() {
    let facilitator = Arc::new(Scripted::new());
    // As with nested routers, both see the same path; they share payee and ledger.
    let failing = |_, _| async { Response::builder().status(500).body(Body::empty()).unwrap() };
    let (cheap, _) = serve(layer(&facilitator), failing);
    let (dear, handled) = serve(layer(&facilitator).price("$1"), echo);
    let purchase = customer().pay(&cheap, evaluate("x")).await;
    assert_eq!(send(&cheap, purchase.on(evaluate("x"))).await.status, StatusCode::INTERNAL_SERVER_ERROR);
    assert_eq!(send(&dear, purchase.on(evaluate("x"))).await.status, StatusCode::PAYMENT_REQUIRED);
    // In the flow `upfront` the work is owed, but only by the service that was paid.
    let (cheap, _) = serve(layer(&facilitator).flow(PaymentFlow::Upfront).service_name("cheap"), failing);
    let other = layer(&facilitator).flow(PaymentFlow::Upfront).service_name("dear").price("$1");
    let (dear, handled_too) = serve(other, echo);
    let purchase = customer().pay(&cheap, evaluate("x")).await;
    assert_eq!(send(&cheap, purchase.on(evaluate("x"))).await.status, StatusCode::INTERNAL_SERVER_ERROR);
    assert_eq!(send(&dear, purchase.on(evaluate("x"))).await.status, StatusCode::CONFLICT);
    assert_eq!((handled.load(Ordering::SeqCst), handled_too.load(Ordering::SeqCst)), (0, 0));
}

#[tokio::test]
async fn payment_is_reconciled_only_by_a_facilitator_of_its_chain() {
    let ledger: Arc<dyn Ledger> = Arc::new(MemoryLedger::new());
    let on = |network| {
        let mut scripted =
            Scripted::new().settle(|_, _| async { Ok(SettlementOutcome::Unknown { transaction: None }) });
        (scripted.ledger, scripted.serves) = (ledger.clone(), Some(network));
        scripted
    };
    let (other, its_own) = (Arc::new(on(Network::BASE)), Arc::new(on(Network::BASE_SEPOLIA)));
    let price = Arc::new(AtomicU64::new(1_000));
    let now = price.clone();
    let layer = layer(&other).facilitator(its_own.clone()).max_wait(Duration::from_millis(50)).price_with(move |_| {
        let units = now.load(Ordering::SeqCst);
        async move { Ok(Usdc::from_atomic(units).into()) }
    });
    let (app, handled) = serve(layer, echo);
    let purchase = customer().pay(&app, evaluate("x")).await;
    let pending = send(&app, purchase.on(evaluate("x"))).await;
    assert_eq!(pending.status, StatusCode::SERVICE_UNAVAILABLE, "{pending:?}");
    // The payment does not match the present offer, but is on record.
    price.store(2_000, Ordering::SeqCst);
    let again = send(&app, purchase.on(evaluate("x"))).await;
    assert_eq!(again.status, StatusCode::SERVICE_UNAVAILABLE, "{again:?}");
    assert!(its_own.reconciliations() > 0);
    assert_eq!((other.reconciliations(), other.settlements(), handled.load(Ordering::SeqCst)), (0, 0, 1));
}

#[tokio::test]
async fn client_told_of_no_charge_is_charged_only_if_it_retries() {
    let facilitator =
        Arc::new(Scripted::new().settle(|call, _| async move { if call == 0 { Err(away()) } else { Ok(paid()) } }));
    let (app, handled) = serve(layer(&facilitator), echo);
    let purchase = customer().pay(&app, evaluate("x")).await;
    let first = send(&app, purchase.on(evaluate("x"))).await;
    assert_eq!(first.status, StatusCode::SERVICE_UNAVAILABLE);
    // As after any failure, background settlement leaves the payment alone.
    let known = record(&facilitator, &purchase).await.unwrap();
    assert_eq!((known.settlement, known.last_failure), (Settlement::Due, Some(Reason::UnexpectedSettleError)));
    let again = send(&app, purchase.on(evaluate("x"))).await;
    assert_eq!((again.status, again.text()), (StatusCode::OK, "x"), "{again:?}");
    assert_eq!((handled.load(Ordering::SeqCst), facilitator.settlements()), (1, 2));
}

#[tokio::test]
async fn client_that_pays_while_the_ledger_fails_gets_the_response() {
    let ledger = slow_ledger(Duration::ZERO);
    let fails = ledger.clone();
    let mut scripted = Scripted::new().settle(move |call, _| {
        fails.around.go_away(call > 0);
        async move { Ok(if call == 0 { not_yet() } else { paid() }) }
    });
    scripted.ledger = ledger.clone();
    let facilitator = Arc::new(scripted);
    let (app, _) = serve(layer(&facilitator), echo);
    let purchase = customer().pay(&app, evaluate("x")).await;
    assert_eq!(send(&app, purchase.on(evaluate("x"))).await.status, StatusCode::PAYMENT_REQUIRED);
    let again = send(&app, purchase.on(evaluate("x"))).await;
    assert_eq!((again.status, again.text()), (StatusCode::OK, "x"), "{again:?}");
    assert_eq!(again.transaction(), B256::repeat_byte(0x77));
}

#[tokio::test]
async fn failed_ledger_is_never_answered_as_no_charge() {
    let ledger = slow_ledger(Duration::ZERO);
    let fails = ledger.clone();
    let mut scripted = Scripted::new().settle(move |call, _| {
        fails.around.go_away(call == 0);
        async move { if call == 0 { Err(away()) } else { Ok(paid()) } }
    });
    scripted.ledger = ledger.clone();
    let facilitator = Arc::new(scripted);
    let (app, handled) = serve(layer(&facilitator), echo);
    let purchase = customer().pay(&app, evaluate("x")).await;
    let first = send(&app, purchase.on(evaluate("x"))).await;
    ledger.around.go_away(false);
    // Background settlement settles such a payment.
    let known = record(&facilitator, &purchase).await.unwrap();
    assert_eq!((known.settlement, known.last_failure), (Settlement::Due, None));
    assert_eq!((first.status, first.reason().as_str()), (StatusCode::SERVICE_UNAVAILABLE, "settlement_pending"));
    let again = send(&app, purchase.on(evaluate("x"))).await;
    assert_eq!((again.status, again.text()), (StatusCode::OK, "x"), "{again:?}");
    assert_eq!((handled.load(Ordering::SeqCst), facilitator.settlements()), (1, 2));
}

/// Another process may have started to settle meanwhile.
#[tokio::test]
async fn submitted_payment_is_never_answered_as_no_charge() {
    let ledger: Arc<dyn Ledger> = Arc::new(MemoryLedger::new());
    let others = ledger.clone();
    let mut scripted = Scripted::new().settle(move |_, payment| {
        let others = others.clone();
        async move {
            let submitted = SettlementStep::Submit { transaction: B256::repeat_byte(1) };
            others.advance(&payment.key(), &submitted.into()).await.unwrap();
            Err(away())
        }
    });
    scripted.ledger = ledger;
    let facilitator = Arc::new(scripted);
    let (app, _) = serve(layer(&facilitator), echo);
    let purchase = customer().pay(&app, evaluate("x")).await;
    let first = send(&app, purchase.on(evaluate("x"))).await;
    assert_eq!((first.status, first.reason().as_str()), (StatusCode::SERVICE_UNAVAILABLE, "settlement_pending"));
    let known = record(&facilitator, &purchase).await.unwrap();
    assert_eq!((known.settlement, known.last_failure), (Settlement::Submitted, None));
}

#[tokio::test(start_paused = true)]
async fn outcome_is_recorded_if_the_client_disconnects_during_reconciliation() {
    let (asked, answer) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let (asking, told) = (asked.clone(), answer.clone());
    let scripted = Scripted::new().settle(|_, _| async { Ok(not_yet()) });
    let facilitator = Arc::new(scripted.reconcile(move |call, _| {
        let (asking, told) = (asking.clone(), told.clone());
        async move {
            if call > 0 {
                // As a facilitator does that finds that it used the nonce itself.
                return Ok(SettlementOutcome::Unknown { transaction: None });
            }
            asking.notify_one();
            told.notified().await;
            Ok(paid())
        }
    }));
    let (app, handled) = serve(layer(&facilitator), echo);
    let purchase = customer().pay(&app, evaluate("x")).await;
    assert_eq!(send(&app, purchase.on(evaluate("x"))).await.status, StatusCode::PAYMENT_REQUIRED);
    facilitator.ledger.advance(&key(&purchase), &SettlementStep::MarkUnknown.into()).await.unwrap();
    let (other_app, request) = (app.clone(), purchase.on(evaluate("x")));
    let client = tokio::spawn(async move { send(&other_app, request).await });
    support::eventually::in_time("somebody asks", asked.notified()).await;
    client.abort();
    assert!(client.await.unwrap_err().is_cancelled());
    let (other_app, request) = (app.clone(), purchase.on(evaluate("x")));
    let copy = tokio::spawn(async move { send(&other_app, request).await });
    // Virtual time advances only when nothing is left to do: the copy waits.
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert!(!copy.is_finished());
    answer.notify_one();
    let copy = copy.await.unwrap();
    assert_eq!((copy.status, copy.text()), (StatusCode::OK, "x"), "{copy:?}");
    assert_eq!(copy.transaction(), B256::repeat_byte(0x77));
    let counts = (handled.load(Ordering::SeqCst), facilitator.settlements(), facilitator.reconciliations());
    assert_eq!(counts, (1, 1, 1), "the copy waits for what is asked already");
}

#[tokio::test]
async fn a_response_that_was_not_kept_is_not_charged_for_later() {
    let facilitator =
        Arc::new(Scripted::new().settle(|call, _| async move { if call == 0 { Err(away()) } else { Ok(paid()) } }));
    let (app, handled) = serve(layer(&facilitator), |_, _| async { Response::new(Body::from(vec![b'x'; 1 << 20])) });
    let purchase = customer().pay(&app, evaluate("x")).await;
    let first = send(&app, purchase.on(evaluate("x"))).await;
    assert_eq!(first.status, StatusCode::SERVICE_UNAVAILABLE);
    let again = send(&app, purchase.on(evaluate("x"))).await;
    assert_eq!(again.status, StatusCode::CONFLICT, "{again:?}");
    assert_eq!(facilitator.settlements(), 1, "there is nothing left to charge for");
    assert_eq!(record(&facilitator, &purchase).await.unwrap().settlement.paid_by(), None);
    assert_eq!(handled.load(Ordering::SeqCst), 1);
}

#[tokio::test(start_paused = true)]
async fn contract_signatures_take_no_permits_from_proven_payments() {
    let facilitator = Arc::new(Scripted::new().verify(|_, payment| async move {
        if payment.authenticity() != Authenticity::Proven {
            std::future::pending::<()>().await;
        }
        Ok(Verified::default())
    }));
    let (app, _) = serve(layer(&facilitator).max_concurrent(4), echo);
    let mut garbage = Vec::new();
    for _ in 0..8 {
        let mut purchase = customer().pay(&app, evaluate("x")).await;
        purchase.signature = Hex::from(vec![7; 65]);
        let (app, request) = (app.clone(), purchase.on(evaluate("x")));
        garbage.push(tokio::spawn(async move { try_send(&app, request).await.is_ok() }));
    }
    // Virtual time advances only when all of them wait.
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert!(garbage.iter().any(|task| !task.is_finished()), "some are looked at by the facilitator");
    let purchase = customer().pay(&app, evaluate("x")).await;
    assert_eq!(send(&app, purchase.on(evaluate("x"))).await.status, StatusCode::OK);
    garbage.into_iter().for_each(|task| task.abort());
}

#[tokio::test]
async fn a_payment_stays_in_the_flow_it_was_accepted_in() {
    let facilitator = Arc::new(Scripted::new().settle(|_, _| async { Ok(not_yet()) }));
    let both = layer(&facilitator).flow(PaymentFlow::Upfront).flow(PaymentFlow::Authorization);
    let (app, handled) = serve(both, echo);
    let unpaid = send(&app, evaluate("x")).await;
    let mut purchase = customer().sign(&support::shop::demand(&unpaid), 0);
    assert_eq!(send(&app, purchase.on(evaluate("x"))).await.status, StatusCode::PAYMENT_REQUIRED);
    purchase.offer = support::shop::demand(&unpaid)["accepts"][1].clone();
    assert_eq!(send(&app, purchase.on(evaluate("x"))).await.status, StatusCode::PAYMENT_REQUIRED);
    assert_eq!(facilitator.settlements(), 2);
    assert_eq!(handled.load(Ordering::SeqCst), 0, "paid first, as it was accepted");
}

#[tokio::test]
async fn a_payment_whose_transaction_no_node_took_can_be_presented_at_once() {
    let ledger: Arc<dyn Ledger> = Arc::new(MemoryLedger::new());
    let journal = ledger.clone();
    let mut scripted = Scripted::new().settle(move |call, payment| {
        let journal = journal.clone();
        async move {
            if call > 0 {
                return Ok(paid());
            }
            let (key, transaction) = (payment.key(), B256::repeat_byte(1));
            journal.advance(&key, &SettlementStep::Submit { transaction }.into()).await.unwrap();
            journal
                .advance(
                    &key,
                    &SettlementStep::Fail {
                        reason: Reason::UnexpectedSettleError,
                        by: 0,
                        known_transactions: vec![transaction],
                    }
                    .into(),
                )
                .await
                .unwrap();
            Err(away())
        }
    });
    scripted.ledger = ledger;
    let facilitator = Arc::new(scripted);
    let upfront = layer(&facilitator).flow(PaymentFlow::Upfront).max_wait(Duration::from_secs(1));
    let (app, _) = serve(upfront, echo);
    let purchase = customer().pay(&app, evaluate("x")).await;
    assert_eq!(send(&app, purchase.on(evaluate("x"))).await.status, StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(send(&app, purchase.on(evaluate("x"))).await.status, StatusCode::OK);
}

#[tokio::test]
async fn attempt_that_read_no_body_does_not_release_the_answer_to_other_bodies() {
    let facilitator = Arc::new(Scripted::new());
    let (app, _) = serve(layer(&facilitator), |run, request| async move {
        if run == 0 {
            return Response::builder().status(500).body(Body::empty()).unwrap();
        }
        echo(run, request).await
    });
    let purchase = customer().pay(&app, evaluate("mine")).await;
    assert_eq!(send(&app, purchase.on(evaluate("mine"))).await.status, StatusCode::INTERNAL_SERVER_ERROR);
    assert_eq!(send(&app, purchase.on(evaluate("mine"))).await.text(), "mine");
    assert_eq!(send(&app, purchase.on(evaluate("yours"))).await.status, StatusCode::CONFLICT);
    assert_eq!(send(&app, purchase.on(evaluate("mine"))).await.text(), "mine");
}

#[tokio::test]
async fn upfront_payment_binds_the_body_before_settlement() {
    let facilitator = Arc::new(Scripted::new());
    let (app, handled) = serve(layer(&facilitator).flow(PaymentFlow::Upfront), |run, request| async move {
        assert!(run > 0, "as told");
        echo(run, request).await
    });
    let purchase = customer().pay(&app, evaluate("mine")).await;
    assert_eq!(send(&app, purchase.on(evaluate("mine"))).await.status, StatusCode::INTERNAL_SERVER_ERROR);
    // The authorization is public on the chain now.
    assert_eq!(send(&app, purchase.on(evaluate("yours"))).await.status, StatusCode::CONFLICT);
    assert_eq!(handled.load(Ordering::SeqCst), 1);
    assert_eq!(send(&app, purchase.on(evaluate("mine"))).await.text(), "mine");
}

#[tokio::test(start_paused = true)]
async fn client_that_disconnects_during_reservation_leaves_no_lease() {
    let mut scripted = Scripted::new();
    scripted.ledger = slow_ledger(Duration::from_millis(50));
    let facilitator = Arc::new(scripted);
    let (app, _) = serve(layer(&facilitator).max_wait(Duration::from_secs(2)), echo);
    let purchase = customer().pay(&app, evaluate("x")).await;
    let gone = tokio::time::timeout(Duration::from_millis(20), send(&app, purchase.on(evaluate("x")))).await;
    assert!(gone.is_err(), "the ledger takes longer");
    assert_eq!(send(&app, purchase.on(evaluate("x"))).await.status, StatusCode::OK);
}

#[tokio::test(start_paused = true)]
async fn client_that_disconnects_during_a_new_lease_leaves_no_lease() {
    let mut scripted = Scripted::new();
    scripted.ledger = slow_ledger(Duration::from_millis(50));
    let facilitator = Arc::new(scripted);
    let (app, _) = serve(layer(&facilitator).max_wait(Duration::from_secs(2)), |run, request| async move {
        if run == 0 {
            return Response::builder().status(500).body(Body::empty()).unwrap();
        }
        echo(run, request).await
    });
    let purchase = customer().pay(&app, evaluate("x")).await;
    assert_eq!(send(&app, purchase.on(evaluate("x"))).await.status, StatusCode::INTERNAL_SERVER_ERROR);
    let gone = tokio::time::timeout(Duration::from_millis(75), send(&app, purchase.on(evaluate("x")))).await;
    assert!(gone.is_err(), "the ledger takes longer");
    assert_eq!(send(&app, purchase.on(evaluate("x"))).await.status, StatusCode::OK);
}

#[tokio::test]
async fn work_is_not_repeated_with_too_little_time_left_to_settle() {
    let facilitator = Arc::new(Scripted::new());
    let clock = Arc::new(ManualClock::at(unix_now()));
    let (app, handled) = serve(layer(&facilitator).clock(clock.clone()), |_, _| async {
        Response::builder().status(500).body(Body::empty()).unwrap()
    });
    let purchase = customer().pay(&app, evaluate("x")).await;
    assert_eq!(send(&app, purchase.on(evaluate("x"))).await.status, StatusCode::INTERNAL_SERVER_ERROR);
    clock.advance(100);
    let late = send(&app, purchase.on(evaluate("x"))).await;
    assert_eq!(late.status, StatusCode::PAYMENT_REQUIRED, "{late:?}");
    assert_eq!(handled.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn copy_that_waited_too_long_to_settle_is_refused() {
    let (asked, answer) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let (asking, told) = (asked.clone(), answer.clone());
    let facilitator = Arc::new(Scripted::new().verify(move |call, _| {
        let (asking, told) = (asking.clone(), told.clone());
        async move {
            if call > 0 {
                return Ok(Verified::default());
            }
            asking.notify_one();
            told.notified().await;
            Err(Rejection::new(Reason::InsufficientFunds, "nothing there").into())
        }
    }));
    let clock = Arc::new(ManualClock::at(unix_now()));
    let (app, handled) = serve(layer(&facilitator).clock(clock.clone()), echo);
    let purchase = customer().pay(&app, evaluate("x")).await;
    let (one, first) = (app.clone(), purchase.on(evaluate("x")));
    let first = tokio::spawn(async move { send(&one, first).await });
    asked.notified().await;
    // It arrived in time, and waits for the first request. Its body is not read, since nobody knows of any money yet.
    let (read, go) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let copy = Request::post("/evaluate?k=1").body(held_body("x", read.clone(), go.clone())).unwrap();
    let (two, second) = (app.clone(), purchase.on(copy));
    let second = tokio::spawn(async move { send(&two, second).await });
    for _ in 0..100 {
        tokio::task::yield_now().await;
    }
    assert!(tokio::time::timeout(Duration::ZERO, read.notified()).await.is_err());
    clock.advance(100);
    answer.notify_one();
    assert_eq!(first.await.unwrap().status, StatusCode::PAYMENT_REQUIRED);
    let second = second.await.unwrap();
    assert_eq!((second.status, handled.load(Ordering::SeqCst)), (StatusCode::PAYMENT_REQUIRED, 0), "{second:?}");
    assert_eq!(facilitator.settlements(), 0);
}

#[tokio::test]
async fn h2c_upgrade_is_ignored() {
    let facilitator = Arc::new(Scripted::new());
    let (app, handled) = serve(layer(&facilitator), |_, request| async move {
        assert!(!["upgrade", "http2-settings"].iter().any(|name| request.headers().contains_key(*name)));
        Response::new(Body::from("x"))
    });
    let offering = |protocols: &[&str]| {
        let mut request = Request::get("/evaluate?k=1").header("connection", "upgrade, http2-settings");
        for protocol in protocols {
            request = request.header("upgrade", *protocol);
        }
        request.header("http2-settings", "AAMAAABkAAQAoAAAAAIAAAAA").body(Body::empty()).unwrap()
    };
    for offered in [&["h2c"][..], &["H2C , h2c"], &["h2c", "h2c"]] {
        let purchase = customer().pay(&app, offering(offered)).await;
        assert_eq!(send(&app, purchase.on(offering(offered))).await.status, StatusCode::OK, "{offered:?}");
    }
    for other in [&["websocket"][..], &["h2c, websocket"], &["h2c", "websocket"], &[""]] {
        let refused = send(&app, offering(other)).await;
        assert_eq!((refused.status, refused.reason().as_str()), (StatusCode::BAD_REQUEST, "upgrade_not_payable"));
    }
    assert_eq!(handled.load(Ordering::SeqCst), 3);
}

#[tokio::test]
async fn free_request_takes_no_payment_and_does_not_log_it() {
    let facilitator = Arc::new(Scripted::new());
    let price = Arc::new(AtomicU64::new(1_000));
    let now = price.clone();
    let layer = layer(&facilitator).price_with(move |_| {
        let units = now.load(Ordering::SeqCst);
        async move { Ok(Usdc::from_atomic(units).into()) }
    });
    let (app, handled) = serve(layer, |_, request| async move {
        let mut payments =
            ["payment-signature", "x-payment"].into_iter().filter_map(|name| request.headers().get(name));
        assert!(payments.next().is_some_and(HeaderValue::is_sensitive));
        Response::new(Body::from("x"))
    });
    let purchase = customer().pay(&app, evaluate("x")).await;
    price.store(0, Ordering::SeqCst);
    for request in [purchase.on(evaluate("x")), purchase.on_v1(evaluate("x"))] {
        assert_eq!(send(&app, request).await.text(), "x");
    }
    assert_eq!((handled.load(Ordering::SeqCst), facilitator.settlements()), (2, 0));
}

#[tokio::test]
async fn payment_passes_a_free_layer_to_a_paid_one_below() {
    let facilitator = Arc::new(Scripted::new());
    let (below, handled) = serve(layer(&facilitator), echo);
    let free = layer(&facilitator).price_with(|_| async { Ok(Quote::Free) }).build().unwrap();
    let app = app(free.layer(tower::service_fn(move |request: Request<RequestBody<Body>>| {
        below.clone().oneshot(request.map(Body::new))
    })));
    let purchase = customer().pay(&app, evaluate("x")).await;
    assert_eq!(send(&app, purchase.on(evaluate("x"))).await.text(), "x");
    assert_eq!((handled.load(Ordering::SeqCst), facilitator.settlements()), (1, 1));
}

#[tokio::test(start_paused = true)]
async fn waiting_copies_of_one_payment_do_not_block_other_payments() {
    let facilitator = Arc::new(Scripted::new());
    let (app, _) = serve(layer(&facilitator).max_concurrent(16), |_, request| async move {
        let body = request.into_body().collect().await.unwrap().to_bytes();
        if body == "slow" {
            std::future::pending::<()>().await;
        }
        Response::new(Body::from(body))
    });
    let purchase = customer().pay(&app, evaluate("slow")).await;
    let copies = stream::iter(0..32).map(|_| send(&app, purchase.on(evaluate("slow")))).buffer_unordered(32);
    let copies = async { copies.collect::<Vec<_>>().await };
    let other = async {
        // Virtual time advances only when all copies wait.
        tokio::time::sleep(Duration::from_millis(100)).await;
        let purchase = customer().pay(&app, evaluate("quick")).await;
        send(&app, purchase.on(evaluate("quick"))).await
    };
    tokio::select! {
        _ = copies => panic!("one of them waits"),
        other = other => assert_eq!(other.status, StatusCode::OK),
    }
}

#[tokio::test]
async fn preflight_never_gets_the_body_of_a_paid_response() {
    let facilitator = Arc::new(Scripted::new());
    let (app, _) = serve(layer(&facilitator), |_, _| async {
        Response::builder()
            .header(header::CONTENT_LENGTH, "6")
            .header("x-inner", "1")
            .body(Body::from("secret"))
            .unwrap()
    });
    let preflight = Request::options("/evaluate?k=1")
        .header(header::ORIGIN, "https://app.example")
        .header(header::ACCESS_CONTROL_REQUEST_METHOD, "GET");
    let answer = send(&app, preflight.body(Body::empty()).unwrap()).await;
    assert_eq!((answer.status, answer.text()), (StatusCode::OK, ""));
    assert_eq!(answer.headers["x-inner"], "1");
    assert!(!answer.headers.contains_key(header::CONTENT_LENGTH));
}

#[tokio::test]
async fn a_replay_repeats_no_header_of_the_first_connection() {
    let facilitator = Arc::new(Scripted::new());
    let (app, _) = serve(layer(&facilitator), |_, _| async {
        let response = Response::builder().header(header::CONNECTION, "close, x-hop").header("x-hop", "1");
        let response = response.header(header::TRANSFER_ENCODING, "chunked").header(header::DATE, "then");
        response.header("x-end", "1").body(Body::from("answer")).unwrap()
    });
    let purchase = customer().pay(&app, evaluate("x")).await;
    assert_eq!(send(&app, purchase.on(evaluate("x"))).await.status, StatusCode::OK);
    let replay = send(&app, purchase.on(evaluate("x"))).await;
    assert_eq!((replay.text(), &replay.headers["x-end"]), ("answer", &http::HeaderValue::from_static("1")));
    for name in ["connection", "x-hop", "transfer-encoding", "date"] {
        assert!(!replay.headers.contains_key(name), "{name}");
    }
}

/// A ledger that grants leases as late as a database does, and whose `reserve`, `get` and `settle` fail on command.
#[derive(Debug)]
struct Slow {
    delay: Duration,
    is_away: AtomicBool,
}

fn slow_ledger(delay: Duration) -> Arc<AroundLedger<Slow>> {
    AroundLedger::new(Arc::new(MemoryLedger::new()), Slow { delay, is_away: AtomicBool::new(false) })
}

impl Slow {
    fn go_away(&self, is_away: bool) {
        self.is_away.store(is_away, Ordering::SeqCst);
    }
}

impl Around for Slow {
    async fn around<T: Send>(
        &self,
        call: Call<'_>,
        work: impl Future<Output = Result<T, LedgerError>> + Send,
    ) -> Result<T, LedgerError> {
        let fails = matches!(call, Call::Other("reserve" | "get") | Call::Settle(_));
        if fails && self.is_away.load(Ordering::SeqCst) {
            return Err(LedgerError::Backend("away".into()));
        }
        let answer = work.await;
        if matches!(call, Call::Other("reserve" | "take_over")) {
            tokio::time::sleep(self.delay).await;
        }
        answer
    }
}

#[tokio::test]
async fn longest_durations_do_not_panic() {
    let facilitator = Arc::new(Scripted::new());
    let patient = layer(&facilitator).max_timeout(Duration::from_secs(200_000)).handler_deadline(Duration::MAX);
    let (app, _) = serve(patient.settlement_margin(Duration::MAX).max_wait(Duration::MAX), echo);
    let purchase = customer().pay(&app, evaluate("x")).await;
    assert_eq!(send(&app, purchase.on(evaluate("x"))).await.text(), "x");
}

/// Anybody can sign payments. For each place, sixteen wait until one before them is verified.
#[tokio::test(start_paused = true)]
async fn payments_that_have_no_room_to_wait_for_their_verification_are_refused_at_once() {
    let facilitator = Arc::new(Scripted::new().verify(|_, _| std::future::pending()));
    let (app, _) = serve(layer(&facilitator).max_concurrent(1), echo);
    for _ in 0..17 {
        let (app, purchase) = (app.clone(), customer().pay(&app, evaluate("x")).await);
        tokio::spawn(async move { send(&app, purchase.on(evaluate("x"))).await });
    }
    let one_more = customer().pay(&app, evaluate("x")).await;
    tokio::time::sleep(Duration::from_millis(1)).await;
    let before = tokio::time::Instant::now();
    let answer = send(&app, one_more.on(evaluate("x"))).await;
    assert_eq!((answer.status, answer.reason().as_str()), (StatusCode::SERVICE_UNAVAILABLE, "busy"), "{answer:?}");
    assert_eq!(before.elapsed(), Duration::ZERO);
}
