//! The server's handling of its ledger's answers: a refused step does not count as done, and a stored response is given and charged only
//! where that is right.

use std::{
    convert::Infallible,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use alloy_primitives::B256;
use axum::body::Body;
use bytes::Bytes;
use futures_util::{FutureExt as _, StreamExt as _, stream};
use http::{Request, Response, StatusCode};
use http_body_util::BodyExt as _;
use support::{
    around_ledger::{Around, AroundLedger, Call, Refusing},
    authorization::unix_now,
    eventually::{eventually, in_time},
    faulty_ledger::{Fault, How, faulty},
    scripted::{Scripted, customer, echo, key, layer, not_yet, paid, record, serve},
    shop::{PRICE, demand, evaluate, send, try_send},
};
use tokio::sync::Notify;
use tower_x402::{
    ManualClock, Usdc,
    ledger::{
        Fulfilment, FulfilmentStep, Ledger, LedgerError, MemoryLedger, ResponseLimits, SettlementStep, Settling,
        conformance::take_over,
    },
    ops::Operator,
    protocol::{PaymentFlow, Reason},
    server::DeferredPolicy,
};

/// A ledger whose first call that matches `is_it` fails before it takes effect.
fn failing_once(is_it: fn(&Call<'_>) -> bool) -> Arc<dyn Ledger> {
    let has_failed = AtomicBool::new(false);
    let refuse = move |call: Call<'_>| {
        let fails = is_it(&call) && !has_failed.swap(true, Ordering::SeqCst);
        fails.then(|| LedgerError::Backend("away".into()))
    };
    AroundLedger::new(Arc::new(MemoryLedger::new()), Refusing(refuse))
}

#[tokio::test(start_paused = true)]
async fn no_response_is_released_on_credit_refused_at_the_second_try() {
    let mut scripted = Scripted::new();
    scripted.ledger = failing_once(|call| matches!(call, Call::Fulfil(FulfilmentStep::Defer { .. })));
    let facilitator = Arc::new(scripted);
    let nothing = Usdc::from_atomic(PRICE - 1);
    let policy = DeferredPolicy::default().per_payer(nothing);
    let (app, _) = serve(layer(&facilitator).deferred(policy), echo);
    let purchase = customer().pay(&app, evaluate("x")).await;
    let answer = send(&app, purchase.on(evaluate("x"))).await;
    assert_eq!((answer.status, answer.transaction()), (StatusCode::OK, B256::repeat_byte(0x77)), "paid in line");
    assert_eq!((facilitator.settlements(), facilitator.left().len()), (1, 0));
    assert!(!record(&facilitator, &purchase).await.unwrap().deferred);
}

/// The lease ends while the ledger is away, and another process does the work and stores its response.
#[tokio::test(start_paused = true)]
async fn response_of_another_process_is_not_taken_for_ours() {
    let inner: Arc<dyn Ledger> = Arc::new(MemoryLedger::new());
    let others = inner.clone();
    let has_failed = AtomicBool::new(false);
    let refuse = move |call: Call<'_>| {
        let Call::Fulfil(FulfilmentStep::Produce { .. }) = call else { return None };
        if has_failed.swap(true, Ordering::SeqCst) {
            return None;
        }
        let took_over = async {
            let known = others.list(&Default::default()).await.unwrap().remove(0);
            let lease = take_over(&*others, &known.key, known.epoch, u64::MAX, u64::MAX).await.expect("it ended");
            others.advance(&lease.key, &lease.step(FulfilmentStep::Start { until: 0 })).await.unwrap();
            let produce =
                FulfilmentStep::Produce { charged: None, body: known.body, at: known.reserved_at, response: None };
            others.advance(&lease.key, &lease.step(produce.clone())).await.unwrap();
        };
        // The memory ledger never waits.
        took_over.now_or_never().expect("it is done at once");
        Some(LedgerError::Backend("away".into()))
    };
    let mut scripted = Scripted::new();
    scripted.ledger = AroundLedger::new(inner, Refusing(refuse));
    let facilitator = Arc::new(scripted);
    let (app, handled) = serve(layer(&facilitator), echo);
    let purchase = customer().pay(&app, evaluate("x")).await;
    let answer = send(&app, purchase.on(evaluate("x"))).await;
    assert_eq!((answer.status.as_u16(), answer.reason().as_str()), (409, "payment_in_progress"), "{answer:?}");
    assert_eq!((handled.load(Ordering::SeqCst), facilitator.settlements()), (1, 0), "it is the other's to settle");
    let known = record(&facilitator, &purchase).await.unwrap();
    assert_eq!((known.fulfilment, known.epoch), (Fulfilment::Produced, 1));
}

/// A transaction of an earlier attempt is on record and may have paid, so a buyer that is refused would pay twice.
#[tokio::test]
async fn payment_with_a_transaction_is_served_although_the_price_has_changed() {
    let facilitator = Arc::new(Scripted::new());
    let price = Arc::new(AtomicU64::new(PRICE));
    let now = price.clone();
    let layer = layer(&facilitator).flow(PaymentFlow::Upfront).price_with(move |_| {
        let units = now.load(Ordering::SeqCst);
        async move { Ok(Usdc::from_atomic(units).into()) }
    });
    let (app, handled) = serve(layer, |_, _| async { Response::builder().status(500).body(Body::empty()).unwrap() });
    let (touched, untouched) = (customer().pay(&app, evaluate("x")).await, customer().pay(&app, evaluate("x")).await);
    for purchase in [&touched, &untouched] {
        assert_eq!(send(&app, purchase.on(evaluate("x"))).await.status, 500);
        // A reorganization removes the settlement.
        facilitator.ledger.advance(&key(purchase), &SettlementStep::Reorg.into()).await.unwrap();
    }
    let transaction = B256::repeat_byte(0x77);
    let failed =
        SettlementStep::Fail { reason: Reason::UnexpectedSettleError, by: 0, known_transactions: vec![transaction] };
    for step in [SettlementStep::Submit { transaction }, failed] {
        facilitator.ledger.advance(&key(&touched), &step.into()).await.unwrap();
    }
    price.store(2 * PRICE, Ordering::SeqCst);
    assert_eq!(send(&app, touched.on(evaluate("x"))).await.status, 500, "worked for once more");
    let refused = send(&app, untouched.on(evaluate("x"))).await;
    assert_eq!(refused.status, 402, "not to serve it costs its payer nothing: {refused:?}");
    assert_eq!((handled.load(Ordering::SeqCst), facilitator.settlements()), (3, 3));
}

#[tokio::test(start_paused = true)]
async fn failure_recorded_at_the_second_try_is_reported() {
    let mut scripted = Scripted::new().settle(|_, _| async { Ok(not_yet()) });
    scripted.ledger = failing_once(|call| matches!(call, Call::Settle(SettlementStep::Fail { .. })));
    let facilitator = Arc::new(scripted);
    let (app, _) = serve(layer(&facilitator), echo);
    let purchase = customer().pay(&app, evaluate("x")).await;
    let answer = send(&app, purchase.on(evaluate("x"))).await;
    assert_eq!((answer.status.as_u16(), answer.reason().as_str()), (402, "insufficient_funds"), "{answer:?}");
    assert_eq!(record(&facilitator, &purchase).await.unwrap().failures, 1);
}

fn credit_for_known_payers() -> DeferredPolicy {
    let payments = Usdc::from_atomic(10 * PRICE);
    DeferredPolicy::default().per_payer(payments)
}

/// The response was given on credit, and settling it failed, as its payer was told. The authorization is public on the chain.
#[tokio::test]
async fn response_given_on_credit_is_not_given_for_settling_it() {
    let mut scripted = Scripted::new();
    let never = |call: Call<'_>| {
        matches!(call, Call::Fulfil(FulfilmentStep::Deliver)).then(|| LedgerError::Backend("away".into()))
    };
    scripted.ledger = AroundLedger::new(Arc::new(MemoryLedger::new()), Refusing(never));
    let facilitator = Arc::new(scripted);
    let layer = layer(&facilitator).deferred(credit_for_known_payers()).anonymous_replays(0, Duration::from_secs(60));
    let (app, _) = serve(layer, |_, _| async { Response::new(Body::from("x")) });
    let get = || Request::get("/evaluate").body(Body::empty()).unwrap();
    let customer = customer();
    let known = customer.pay(&app, get()).await;
    send(&app, known.on(get())).await.transaction();
    let purchase = customer.pay(&app, get()).await;
    assert_eq!(send(&app, purchase.on(get())).await.text(), "x");
    let failed = SettlementStep::Fail { reason: Reason::InsufficientFunds, by: 0, known_transactions: Vec::new() };
    facilitator.ledger.advance(&key(&purchase), &failed.into()).await.unwrap();
    let known = record(&facilitator, &purchase).await.unwrap();
    assert_eq!((known.fulfilment, known.deferred), (Fulfilment::Produced, true));
    let answer = send(&app, purchase.on(get())).await;
    assert_eq!((answer.status.as_u16(), answer.reason().as_str()), (409, "payment_already_used"), "{answer:?}");
    assert_eq!(facilitator.settlements(), 2, "and it is settled");
}

/// A buyer paid for the stored answer and got it. Then a reorganization removes the payment, and somebody presents it again.
#[tokio::test]
async fn response_paid_for_before_is_not_given_for_settling_it_again() {
    let facilitator =
        Arc::new(Scripted::new().settle(|call, _| async move { Ok(if call == 0 { not_yet() } else { paid() }) }));
    let layer = layer(&facilitator).anonymous_replays(0, Duration::from_secs(60));
    let (app, _) = serve(layer, |_, _| async { Response::new(Body::from("x")) });
    let get = || Request::get("/evaluate").body(Body::empty()).unwrap();
    let purchase = customer().pay(&app, get()).await;
    assert_eq!(send(&app, purchase.on(get())).await.status, 402);
    assert_eq!(send(&app, purchase.on(get())).await.text(), "x");
    facilitator.ledger.advance(&key(&purchase), &SettlementStep::Reorg.into()).await.unwrap();
    assert_eq!(record(&facilitator, &purchase).await.unwrap().fulfilment, Fulfilment::Produced);
    let answer = send(&app, purchase.on(get())).await;
    assert_eq!((answer.status.as_u16(), answer.reason().as_str()), (409, "payment_already_used"), "{answer:?}");
}

/// If the response is lost, a buyer that got it on credit is told that it was answered, and any other buyer that nothing is charged.
#[tokio::test]
async fn lost_response_is_owed_only_if_it_was_given_on_credit() {
    for (is_on_credit, reason) in [(true, "payment_already_used"), (false, "response_not_kept")] {
        let clock = Arc::new(ManualClock::at(unix_now()));
        let mut scripted =
            Scripted::new().settle(|call, _| async move { Ok(if call == 0 { paid() } else { not_yet() }) });
        let limits = ResponseLimits::default().count(1);
        scripted.ledger = Arc::new(MemoryLedger::with(limits, 10, clock.clone()));
        let facilitator = Arc::new(scripted);
        let layer = layer(&facilitator).clock(clock.clone());
        let layer = if is_on_credit { layer.deferred(credit_for_known_payers()) } else { layer };
        let (app, _) = serve(layer, echo);
        let customer = customer();
        let buy = async || {
            let purchase = customer.pay(&app, evaluate("x")).await;
            (send(&app, purchase.on(evaluate("x"))).await, purchase)
        };
        buy().await.0.transaction();
        let purchase = buy().await.1;
        let failed = SettlementStep::Fail { reason: Reason::InsufficientFunds, by: 0, known_transactions: Vec::new() };
        facilitator.ledger.advance(&key(&purchase), &failed.into()).await.unwrap();
        assert_eq!(record(&facilitator, &purchase).await.unwrap().deferred, is_on_credit);
        // Only one response is kept, and no process works on this payment any more.
        buy().await;
        clock.advance(3_000);
        let answer = send(&app, purchase.on(evaluate("x"))).await;
        assert_eq!((answer.status.as_u16(), answer.reason().as_str()), (409, reason), "{answer:?}");
    }
}

/// Nothing streams that was whole, so its payer need not wait for it, and may pay for another one.
#[tokio::test]
async fn whole_response_that_is_not_kept_any_more_is_not_said_to_be_in_progress() {
    let mut scripted = Scripted::new().settle(|call, _| async move { Ok(if call == 0 { not_yet() } else { paid() }) });
    let (limits, clock) = (ResponseLimits::default().count(1), Arc::new(ManualClock::at(unix_now())));
    scripted.ledger = Arc::new(MemoryLedger::with(limits, 10, clock));
    let facilitator = Arc::new(scripted);
    let (app, _) = serve(layer(&facilitator).max_wait(Duration::from_millis(500)), echo);
    let purchase = customer().pay(&app, evaluate("x")).await;
    assert_eq!(send(&app, purchase.on(evaluate("x"))).await.status, 402);
    let other = customer().pay(&app, evaluate("y")).await;
    assert_eq!(send(&app, other.on(evaluate("y"))).await.text(), "y");
    let answer = send(&app, purchase.on(evaluate("x"))).await;
    assert_eq!((answer.status.as_u16(), answer.reason().as_str()), (409, "response_not_kept"), "{answer:?}");
    assert_eq!(facilitator.settlements(), 2, "and it is not charged");
}

/// A stranger executed it: its payer is told of the transaction, and not to make another payment.
#[tokio::test]
async fn payment_that_a_stranger_executed_counts_although_its_response_is_not_kept() {
    let settle = |call, _| async move { Ok(if call == 0 { not_yet() } else { paid() }) };
    let mut scripted = Scripted::new().settle(settle).reconcile(|_, _| async { Ok(paid()) });
    let (limits, clock) = (ResponseLimits::default().count(1), Arc::new(ManualClock::at(unix_now())));
    scripted.ledger = Arc::new(MemoryLedger::with(limits, 10, clock));
    let facilitator = Arc::new(scripted);
    let (app, _) = serve(layer(&facilitator), echo);
    let purchase = customer().pay(&app, evaluate("x")).await;
    assert_eq!(send(&app, purchase.on(evaluate("x"))).await.status, 402);
    let other = customer().pay(&app, evaluate("y")).await;
    assert_eq!(send(&app, other.on(evaluate("y"))).await.text(), "y");
    let answer = send(&app, purchase.on(evaluate("x"))).await;
    assert_eq!((answer.status.as_u16(), answer.reason().as_str()), (409, "payment_already_used"), "{answer:?}");
    assert_eq!((answer.transaction(), facilitator.settlements()), (B256::repeat_byte(0x77), 2));
}

/// Two processes share a ledger. One is about to settle what the payer is told, by the other, to pay anew.
#[tokio::test]
async fn payment_is_settled_by_nobody_once_its_payer_was_told_to_make_another() {
    let (begun, go_on) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let limits = ResponseLimits::default().count(1);
    let ledger: Arc<dyn Ledger> = Arc::new(MemoryLedger::with(limits, 10, Arc::new(ManualClock::at(unix_now()))));
    let (begin, told, books) = (begun.clone(), go_on.clone(), ledger.clone());
    let mut scripted = Scripted::new().settle(move |call, payment| {
        let (begin, told, books) = (begin.clone(), told.clone(), books.clone());
        async move {
            if call == 0 {
                begin.notify_one();
                told.notified().await;
            }
            // As every facilitator does before a payment leaves the process.
            let known_failures = payment.known_failures();
            let step = SettlementStep::Delegate { settling: Settling { by: 7, until: u64::MAX }, known_failures };
            Ok(if books.advance(&payment.key(), &step.into()).await.is_ok() { paid() } else { not_yet() })
        }
    });
    scripted.ledger = ledger;
    let facilitator = Arc::new(scripted);
    let ((first, _), (second, _)) = (serve(layer(&facilitator), echo), serve(layer(&facilitator), echo));
    let purchase = customer().pay(&first, evaluate("x")).await;
    let (app, request) = (first.clone(), purchase.on(evaluate("x")));
    let asked = tokio::spawn(async move { send(&app, request).await });
    in_time("it is being settled", begun.notified()).await;
    // Only one response is kept.
    let other = customer().pay(&first, evaluate("y")).await;
    assert_eq!(send(&first, other.on(evaluate("y"))).await.text(), "y");
    let told = send(&second, purchase.on(evaluate("x"))).await;
    assert_eq!((told.status.as_u16(), told.reason().as_str()), (409, "response_not_kept"), "{told:?}");
    go_on.notify_one();
    let answer = asked.await.unwrap();
    assert_eq!(answer.status, StatusCode::PAYMENT_REQUIRED, "{answer:?}");
    assert_eq!(record(&facilitator, &purchase).await.unwrap().settlement.paid_by(), None, "it is not charged");
}

/// It had the response, and background settlement charges it again.
#[tokio::test]
async fn payer_whose_settled_payment_was_reorged_is_not_told_to_make_another() {
    let mut scripted = Scripted::new();
    let limits = ResponseLimits::default().count(1);
    scripted.ledger = Arc::new(MemoryLedger::with(limits, 10, Arc::new(ManualClock::at(unix_now()))));
    let facilitator = Arc::new(scripted);
    let (app, _) = serve(layer(&facilitator), echo);
    let purchase = customer().pay(&app, evaluate("x")).await;
    assert_eq!(send(&app, purchase.on(evaluate("x"))).await.text(), "x");
    let other = customer().pay(&app, evaluate("y")).await;
    assert_eq!(send(&app, other.on(evaluate("y"))).await.text(), "y");
    facilitator.ledger.advance(&key(&purchase), &SettlementStep::Reorg.into()).await.unwrap();
    let answer = send(&app, purchase.on(evaluate("x"))).await;
    assert_eq!((answer.status.as_u16(), answer.reason().as_str()), (409, "payment_already_used"), "{answer:?}");
    assert_eq!(record(&facilitator, &purchase).await.unwrap().failures, 0, "it is settled without being asked");
}

/// The charge of the first attempt did not reach the ledger, which is back before its stream ends. The second attempt streams, too.
#[tokio::test(start_paused = true)]
async fn stream_that_was_not_charged_is_not_kept_in_place_of_the_one_that_was() {
    let books = faulty(Arc::new(MemoryLedger::new()));
    let clock = Arc::new(ManualClock::at(unix_now()));
    let mut scripted = Scripted::new();
    scripted.ledger = books.clone();
    let facilitator = Arc::new(scripted);
    let layer = layer(&facilitator).flow(PaymentFlow::Upfront).clock(clock.clone());
    let (app, handled) = serve(layer, |attempt, request| async move {
        drop(request.into_body().collect().await.unwrap());
        let answer = Bytes::from(format!("answer {attempt}"));
        Response::new(Body::from_stream(stream::iter([Ok::<_, Infallible>(answer)])))
    });
    let purchase = customer().pay(&app, evaluate("x")).await;
    // Longer than a step is repeated for.
    let how = How::GoneBefore(Duration::from_secs(10));
    books.around.arm(Some(Fault { call: "fulfil Produce", nth: 0, how }));
    let answer = send(&app, purchase.on(evaluate("x"))).await;
    assert_eq!((answer.status, answer.reason().as_str()), (StatusCode::SERVICE_UNAVAILABLE, "ledger_unavailable"));
    tokio::time::sleep(Duration::from_secs(3_000)).await;
    clock.advance(3_000);
    for what in ["worked for again", "replayed"] {
        let answer = send(&app, purchase.on(evaluate("x"))).await;
        assert_eq!((answer.status, answer.text()), (StatusCode::OK, "answer 1"), "{what}: {answer:?}");
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    assert_eq!((handled.load(Ordering::SeqCst), facilitator.settlements()), (2, 1));
}

/// The money moved before the work, and the books are away when it is done.
#[tokio::test(start_paused = true)]
async fn stream_that_was_paid_for_before_is_kept_if_the_books_do_not_confirm_its_charge() {
    let books = faulty(Arc::new(MemoryLedger::new()));
    let mut scripted = Scripted::new();
    scripted.ledger = books.clone();
    let facilitator = Arc::new(scripted);
    let (app, handled) = serve(layer(&facilitator).flow(PaymentFlow::Upfront), |_, request| async move {
        let body = request.into_body().collect().await.unwrap().to_bytes();
        Response::new(Body::from_stream(stream::iter([Ok::<_, Infallible>(body)])))
    });
    let purchase = customer().pay(&app, evaluate("x")).await;
    // Longer than a step is repeated for.
    let how = How::GoneAfter(Duration::from_secs(3));
    books.around.arm(Some(Fault { call: "fulfil Produce", nth: 0, how }));
    let answer = send(&app, purchase.on(evaluate("x"))).await;
    assert_eq!((answer.status.as_u16(), answer.reason().as_str()), (503, "ledger_unavailable"), "{answer:?}");
    assert_eq!(answer.settlement().unwrap()["success"], true, "it is told that it has paid");
    tokio::time::sleep(Duration::from_secs(10)).await;
    let again = send(&app, purchase.on(evaluate("x"))).await;
    assert_eq!((again.status, again.text()), (StatusCode::OK, "x"), "{again:?}");
    assert_eq!((handled.load(Ordering::SeqCst), facilitator.settlements()), (1, 1));
}

/// A response still streams at another layer or in another process. Its copy is not told that the response is gone, and to pay again.
#[tokio::test]
async fn copy_of_a_payment_whose_response_still_streams_is_told_to_wait() {
    let (begun, go_on) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let (begin, told) = (begun.clone(), go_on.clone());
    let facilitator = Arc::new(Scripted::new().settle(move |_, _| {
        let (begin, told) = (begin.clone(), told.clone());
        async move {
            begin.notify_one();
            told.notified().await;
            Ok(paid())
        }
    }));
    let streamed = |_, _| async {
        let piece = |text| Ok::<_, Infallible>(Bytes::from_static(text));
        Response::new(Body::from_stream(stream::iter([piece(b"a"), piece(b"b")])))
    };
    let (first, _) = serve(layer(&facilitator), streamed);
    let (second, handled) = serve(layer(&facilitator).max_wait(Duration::from_millis(500)), streamed);
    let purchase = customer().pay(&first, evaluate("x")).await;
    let request = purchase.on(evaluate("x"));
    let asked = tokio::spawn(async move { send(&first, request).await });
    in_time("it is being settled", begun.notified()).await;
    let copy = send(&second, purchase.on(evaluate("x"))).await;
    assert_eq!((copy.status.as_u16(), copy.reason().as_str()), (409, "payment_in_progress"), "{copy:?}");
    go_on.notify_one();
    assert_eq!(asked.await.unwrap().text(), "ab");
    assert_eq!((handled.load(Ordering::SeqCst), facilitator.settlements()), (0, 1));
}

#[tokio::test]
async fn stream_is_recorded_as_delivered_when_its_client_has_it() {
    let facilitator = Arc::new(Scripted::new());
    let piece = |text| Ok::<_, Infallible>(Bytes::from_static(text));
    let (app, _) = serve(layer(&facilitator), move |_, _| async move {
        Response::new(Body::from_stream(stream::iter([piece(b"a"), piece(b"b")])))
    });
    let purchase = customer().pay(&app, evaluate("x")).await;
    assert_eq!(send(&app, purchase.on(evaluate("x"))).await.text(), "ab");
    let fulfilment = async || record(&facilitator, &purchase).await.unwrap().fulfilment;
    eventually("it is delivered", async || fulfilment().await == Fulfilment::Delivered).await;
}

/// A ledger that has to be waited for before it takes the step `Deliver`.
struct DeliveredLater;

impl Around for DeliveredLater {
    async fn around<T: Send>(
        &self,
        call: Call<'_>,
        work: impl Future<Output = Result<T, LedgerError>> + Send,
    ) -> Result<T, LedgerError> {
        if matches!(call, Call::Fulfil(FulfilmentStep::Deliver)) {
            tokio::task::yield_now().await;
        }
        work.await
    }
}

/// Otherwise it would be owed, by the operator's books, once its response is no longer kept.
#[tokio::test]
async fn whole_response_is_recorded_as_delivered() {
    let at_once: Arc<dyn Ledger> = Arc::new(MemoryLedger::new());
    for ledger in [at_once.clone(), AroundLedger::new(at_once, DeliveredLater)] {
        let mut scripted = Scripted::new();
        scripted.ledger = ledger;
        let facilitator = Arc::new(scripted);
        let (app, _) = serve(layer(&facilitator), echo);
        let purchase = customer().pay(&app, evaluate("x")).await;
        assert_eq!(send(&app, purchase.on(evaluate("x"))).await.text(), "x");
        let fulfilment = async || record(&facilitator, &purchase).await.unwrap().fulfilment;
        eventually("it is delivered", async || fulfilment().await == Fulfilment::Delivered).await;
    }
}

#[tokio::test]
async fn broken_stream_of_a_client_that_went_away_is_not_kept() {
    let facilitator = Arc::new(Scripted::new());
    let gone = Arc::new(Notify::new());
    let is_gone = gone.clone();
    let (app, _) = serve(layer(&facilitator), move |_, _| {
        let gone = is_gone.clone();
        async move {
            let first = stream::iter([Ok(Bytes::from_static(b"half of it"))]);
            let broken = stream::once(async move {
                gone.notified().await;
                Err(std::io::Error::other("broken"))
            });
            Response::new(Body::from_stream(first.chain(broken)))
        }
    });
    let purchase = customer().pay(&app, evaluate("x")).await;
    let mut body = try_send(&app, purchase.on(evaluate("x"))).await.unwrap().into_body();
    assert_eq!(body.frame().await.unwrap().unwrap().into_data().unwrap(), "half of it");
    drop(body);
    gone.notify_one();
    let fulfilment = async || record(&facilitator, &purchase).await.unwrap().fulfilment;
    eventually("it is over", async || fulfilment().await == Fulfilment::Delivered).await;
    assert!(facilitator.ledger.response(&key(&purchase)).await.unwrap().is_none());
}

#[tokio::test]
async fn response_that_breaks_off_is_charged_and_owed() {
    let facilitator = Arc::new(Scripted::new());
    let (app, runs) = serve(layer(&facilitator), |_, _| async {
        let pieces = [Ok(Bytes::from_static(b"half of it")), Err(std::io::Error::other("broken"))];
        Response::new(Body::from_stream(stream::iter(pieces)))
    });
    let purchase = customer().pay(&app, evaluate("x")).await;
    let mut body = try_send(&app, purchase.on(evaluate("x"))).await.unwrap().into_body();
    assert_eq!(body.frame().await.unwrap().unwrap().into_data().unwrap(), "half of it");
    assert!(body.frame().await.unwrap().is_err());
    let operator = Operator::new(facilitator.ledger.clone());
    eventually("it is owed", async || {
        let record = record(&facilitator, &purchase).await.unwrap();
        operator.is_owed(&record).await.unwrap()
    })
    .await;
    let again = send(&app, purchase.on(evaluate("x"))).await;
    assert_eq!((again.status, again.reason().as_str()), (StatusCode::CONFLICT, "payment_already_used"), "{again:?}");
    assert_eq!(runs.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn price_of_a_body_sees_all_of_it_and_no_other_price_waits_for_it() {
    let facilitator = Arc::new(Scripted::new());
    let by_length = layer(&facilitator).max_request_body(8).price_with_body(|_, body| {
        let units = body.len() as u64;
        async move { Ok(Usdc::from_atomic(units).into()) }
    });
    let (app, _) = serve(by_length, echo);
    let pieces = || Body::from_stream(stream::iter(["123", "45678"].map(Ok::<_, Infallible>)));
    let post = |body| Request::post("/evaluate").body(body).unwrap();
    assert_eq!(demand(&send(&app, post(pieces())).await)["accepts"][0]["amount"], "8");
    assert_eq!(demand(&send(&app, post(Body::from("12345678"))).await)["accepts"][0]["amount"], "8");
    assert_eq!(send(&app, post(Body::from("123456789"))).await.status, StatusCode::PAYLOAD_TOO_LARGE);

    let by_path = layer(&facilitator).max_request_body(8).price_with(|_| async { Ok(Usdc::from_atomic(7).into()) });
    let (app, _) = serve(by_path, echo);
    let endless = || Body::from_stream(stream::pending::<Result<Bytes, Infallible>>());
    let asked = in_time("the price is told", send(&app, post(endless()))).await;
    assert_eq!(demand(&asked)["accepts"][0]["amount"], "7");
    let purchase = customer().sign(&demand(&asked), 0);
    let answer = send(&app, purchase.on(post(Body::from("a longer body")))).await;
    assert_eq!((answer.status, answer.text()), (StatusCode::OK, "a longer body"));
}
