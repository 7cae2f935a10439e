//! Responses are stored before they are settled. A complete response is stored in the same step as the fact that the work is done, so a
//! process that dies afterwards owes only a replay.

use std::{
    convert::Infallible,
    pin::Pin,
    sync::{Arc, atomic::Ordering},
    task::{Context, Poll},
    time::Duration,
};

use alloy_primitives::B256;
use axum::body::Body;
use bytes::Bytes;
use futures_util::{StreamExt as _, stream};
use http::{HeaderMap, Response, StatusCode};
use http_body::{Frame, SizeHint};
use http_body_util::{BodyExt as _, Full};
use support::{
    authorization::unix_now,
    scripted::{Scripted, customer, echo, layer, not_yet, paid, record, serve},
    shop::{evaluate, send, try_send},
};
use tokio::sync::Notify;
use tower_x402::{
    ManualClock,
    ledger::{Fulfilment, Ledger, MemoryLedger, ResponseLimits, SettlementStep, StoredResponse},
    protocol::PaymentFlow,
};

/// A body with a declared length that it may break.
struct Promised {
    length: u64,
    frames: Vec<Result<&'static str, std::io::Error>>,
    /// Never ends by itself.
    hangs: bool,
}

impl http_body::Body for Promised {
    type Data = Bytes;
    type Error = std::io::Error;

    fn poll_frame(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, std::io::Error>>> {
        if self.frames.is_empty() {
            return if self.hangs { Poll::Pending } else { Poll::Ready(None) };
        }
        Poll::Ready(Some(self.frames.remove(0).map(|text| Frame::data(Bytes::from_static(text.as_bytes())))))
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.length)
    }
}

fn promised(length: u64, frames: impl IntoIterator<Item = Result<&'static str, std::io::Error>>, hangs: bool) -> Body {
    Body::new(Promised { length, frames: frames.into_iter().collect(), hangs })
}

/// Runs `work` like a process that is killed when it returns: its remaining tasks are dropped.
fn killed<T>(work: impl Future<Output = T>) -> T {
    tokio::runtime::Runtime::new().unwrap().block_on(work)
}

/// Returns a facilitator with this ledger.
fn scripted_on(ledger: &Arc<dyn Ledger>) -> Scripted {
    let mut scripted = Scripted::new();
    scripted.ledger = ledger.clone();
    scripted
}

#[tokio::test]
async fn the_whole_answer_is_in_the_ledger_before_the_money_moves() {
    let ledger: Arc<dyn Ledger> = Arc::new(MemoryLedger::new());
    let found = Arc::new(std::sync::Mutex::new(None));
    let (journal, seen) = (ledger.clone(), found.clone());
    let facilitator = Arc::new(scripted_on(&ledger).settle(move |_, payment| {
        let (journal, seen) = (journal.clone(), seen.clone());
        async move {
            let record = journal.get(&payment.key()).await.unwrap().unwrap();
            let response = journal.response(&payment.key()).await.unwrap();
            *seen.lock().unwrap() = response.map(|response| (record.fulfilment, response));
            Ok(paid())
        }
    }));
    let trailers = || HeaderMap::from_iter([("x-sum".parse().unwrap(), "7".parse().unwrap())]);
    let (app, _) = serve(layer(&facilitator), move |_, _| async move {
        let body = Full::new(Bytes::from("answer")).with_trailers(async move { Some(Ok::<_, Infallible>(trailers())) });
        Response::builder().status(StatusCode::CREATED).header("x-own", "1").body(Body::new(body)).unwrap()
    });
    let purchase = customer().pay(&app, evaluate("x")).await;
    let first = try_send(&app, purchase.on(evaluate("x"))).await.unwrap();
    let (fulfilment, response): (_, StoredResponse) = found.lock().unwrap().take().expect("kept before it was settled");
    assert_eq!((fulfilment, &response.body[..]), (Fulfilment::Produced, &b"answer"[..]));
    let replay = try_send(&app, purchase.on(evaluate("x"))).await.unwrap();
    for response in [first, replay] {
        assert_eq!(response.status(), StatusCode::CREATED);
        assert_eq!(response.headers()["x-own"], "1");
        assert!(response.headers().contains_key("payment-response"));
        let body = response.into_body().collect().await.unwrap();
        assert_eq!(body.trailers(), Some(&trailers()));
        assert_eq!(body.to_bytes(), "answer");
    }
}

#[test]
fn answer_survives_a_crash_before_settlement_without_repeated_work() {
    let ledger: Arc<dyn Ledger> = Arc::new(MemoryLedger::new());
    let purchase = killed(async {
        let settling = Arc::new(Notify::new());
        let begun = settling.clone();
        let facilitator = Arc::new(scripted_on(&ledger).settle(move |_, _| {
            begun.notify_one();
            std::future::pending()
        }));
        let (app, _) = serve(layer(&facilitator), echo);
        let purchase = customer().pay(&app, evaluate("x")).await;
        let request = purchase.on(evaluate("x"));
        tokio::spawn(async move { send(&app, request).await });
        support::eventually::in_time("it is being settled", settling.notified()).await;
        purchase
    });
    killed(async {
        let facilitator = Arc::new(scripted_on(&ledger));
        let (app, handled) = serve(layer(&facilitator), echo);
        let again = send(&app, purchase.on(evaluate("x"))).await;
        assert_eq!((again.status, again.text()), (StatusCode::OK, "x"), "{again:?}");
        again.transaction();
        assert_eq!((handled.load(Ordering::SeqCst), facilitator.settlements()), (0, 1));
    });
}

#[test]
fn answer_survives_a_crash_after_settlement() {
    let ledger: Arc<dyn Ledger> = Arc::new(MemoryLedger::new());
    let transaction = B256::repeat_byte(0x77);
    let purchase = killed(async {
        let settled = Arc::new(Notify::new());
        let (done, journal) = (settled.clone(), ledger.clone());
        let facilitator = Arc::new(scripted_on(&ledger).settle(move |_, payment| {
            let (done, journal) = (done.clone(), journal.clone());
            async move {
                let key = payment.key();
                journal.advance(&key, &SettlementStep::Submit { transaction }.into()).await.unwrap();
                journal
                    .advance(&key, &SettlementStep::Settle { transaction, block: Some(1), fee: None }.into())
                    .await
                    .unwrap();
                done.notify_one();
                std::future::pending().await
            }
        }));
        let (app, _) = serve(layer(&facilitator), echo);
        let purchase = customer().pay(&app, evaluate("x")).await;
        let request = purchase.on(evaluate("x"));
        tokio::spawn(async move { send(&app, request).await });
        support::eventually::in_time("it is settled", settled.notified()).await;
        purchase
    });
    killed(async {
        let facilitator = Arc::new(scripted_on(&ledger));
        let (app, handled) = serve(layer(&facilitator), echo);
        let again = send(&app, purchase.on(evaluate("x"))).await;
        assert_eq!((again.status, again.text()), (StatusCode::OK, "x"), "{again:?}");
        assert_eq!(again.transaction(), transaction);
        assert_eq!((handled.load(Ordering::SeqCst), facilitator.settlements()), (0, 0));
    });
}

/// A stream is not stored before it was read. If a crash interrupts it, the payment is reported as owed and the work is not repeated.
#[test]
fn paid_stream_that_was_lost_in_a_crash_is_refused_with_its_transaction() {
    let clock = Arc::new(ManualClock::at(unix_now()));
    let ledger: Arc<dyn Ledger> = Arc::new(MemoryLedger::with(ResponseLimits::default(), 100, clock.clone()));
    let purchase = killed(async {
        let facilitator = Arc::new(scripted_on(&ledger));
        let (app, _) = serve(layer(&facilitator).clock(clock.clone()), |_, _| async {
            let first = stream::iter([Ok::<_, Infallible>(Bytes::from("part"))]);
            Response::new(Body::from_stream(first.chain(stream::pending())))
        });
        let purchase = customer().pay(&app, evaluate("x")).await;
        let response = try_send(&app, purchase.on(evaluate("x"))).await.unwrap();
        assert_eq!(response.status(), StatusCode::OK);
        let mut body = response.into_body();
        assert_eq!(body.frame().await.unwrap().unwrap().into_data().unwrap(), "part");
        purchase
    });
    killed(async {
        clock.advance(600);
        let facilitator = Arc::new(scripted_on(&ledger));
        let (app, handled) = serve(layer(&facilitator).clock(clock.clone()), echo);
        let again = send(&app, purchase.on(evaluate("x"))).await;
        assert_eq!((again.status, again.reason().as_str()), (StatusCode::CONFLICT, "payment_already_used"));
        assert_eq!(again.json()["transaction"], B256::repeat_byte(0x77).to_string());
        assert_eq!((handled.load(Ordering::SeqCst), facilitator.settlements()), (0, 0));
    });
}

#[tokio::test(start_paused = true)]
async fn body_of_another_length_than_declared_is_failed_work() {
    for flow in [PaymentFlow::Authorization, PaymentFlow::Upfront] {
        let facilitator = Arc::new(Scripted::new());
        let (app, handled) = serve(layer(&facilitator).flow(flow).max_attempts(5), |run, _| async move {
            let broken = || std::io::Error::other("broken");
            Response::new(match run {
                0 => promised(6, [Ok("ans"), Err(broken())], false),
                1 => promised(6, [Ok("ans"), Ok("we")], false),
                2 => promised(6, [Ok("ans"), Ok("were")], false),
                3 => promised(6, [Ok("ans")], true),
                _ => promised(6, [Ok("an"), Ok("sw"), Ok("er")], false),
            })
        });
        let purchase = customer().pay(&app, evaluate("x")).await;
        let charged = u64::from(flow == PaymentFlow::Upfront);
        for status in [500, 500, 500, 504] {
            let failed = send(&app, purchase.on(evaluate("x"))).await;
            assert_eq!(failed.status, status, "{failed:?}");
            assert_eq!(facilitator.settlements(), charged, "what failed is not charged");
            // A payer of the flow `upfront` is not told that nothing was charged.
            let said = failed.json();
            let paid = (charged == 1).then(|| B256::repeat_byte(0x77).to_string());
            assert_eq!(said["transaction"].as_str(), paid.as_deref(), "{said}");
            let is_free = said["detail"].as_str().unwrap().contains("nothing was charged");
            assert_eq!((is_free, failed.headers.contains_key("payment-response")), (charged == 0, charged == 1));
            assert_eq!(record(&facilitator, &purchase).await.unwrap().fulfilment, Fulfilment::Released);
        }
        let whole = send(&app, purchase.on(evaluate("x"))).await;
        assert_eq!((whole.status, whole.text()), (StatusCode::OK, "answer"));
        assert_eq!((handled.load(Ordering::SeqCst), facilitator.settlements()), (5, 1));
    }
}

#[tokio::test]
async fn copies_are_answered_although_the_first_client_does_not_read_its_answer() {
    let facilitator = Arc::new(Scripted::new());
    let (app, handled) = serve(layer(&facilitator), echo);
    let purchase = customer().pay(&app, evaluate("x")).await;
    let unread = try_send(&app, purchase.on(evaluate("x"))).await.unwrap();
    let copy = send(&app, purchase.on(evaluate("x"))).await;
    assert_eq!((copy.status, copy.text()), (StatusCode::OK, "x"));
    assert_eq!(unread.into_body().collect().await.unwrap().to_bytes(), "x");
    assert_eq!((handled.load(Ordering::SeqCst), facilitator.settlements()), (1, 1));
}

/// Otherwise background settlement would charge for a response that the client never got.
#[tokio::test]
async fn stream_that_was_not_sent_is_not_delivered() {
    let failing = || Scripted::new().settle(|_, _| async { Ok(not_yet()) });
    let streamed = |text: String| Body::from_stream(stream::iter([Ok::<_, Infallible>(Bytes::from(text))]));
    for (size, kept) in [(6, true), (1 << 20, false)] {
        let facilitator = Arc::new(failing());
        let (app, _) = serve(layer(&facilitator), move |_, _| async move { Response::new(streamed("a".repeat(size))) });
        let purchase = customer().pay(&app, evaluate("x")).await;
        assert_eq!(send(&app, purchase.on(evaluate("x"))).await.status, StatusCode::PAYMENT_REQUIRED);
        // The stored part may still be charged; the server does not wait for the rest.
        let status = if kept { StatusCode::PAYMENT_REQUIRED } else { StatusCode::CONFLICT };
        assert_eq!(send(&app, purchase.on(evaluate("x"))).await.status, status);
        assert_eq!(facilitator.settlements(), if kept { 2 } else { 1 });
        assert_eq!(record(&facilitator, &purchase).await.unwrap().fulfilment, Fulfilment::Produced);
    }
}

/// The server does not wait for a body that is too large to be stored.
#[tokio::test]
async fn response_larger_than_the_ledger_keeps_is_streamed() {
    let facilitator = Arc::new(Scripted::new());
    let (app, _) = serve(layer(&facilitator), |_, _| async { Response::new(promised(1 << 20, [Ok("part")], true)) });
    let purchase = customer().pay(&app, evaluate("x")).await;
    let response = tokio::time::timeout(Duration::from_secs(5), try_send(&app, purchase.on(evaluate("x")))).await;
    let mut body = response.expect("its head does not wait for its end").unwrap().into_body();
    assert_eq!(body.frame().await.unwrap().unwrap().into_data().unwrap(), "part");
    assert_eq!(facilitator.settlements(), 1);
}
