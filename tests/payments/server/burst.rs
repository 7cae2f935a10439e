//! More concurrent payments of contract wallets than are verified at once. They wait in a bounded queue, for a bounded time.

use std::{sync::Arc, time::Duration};

use alloy_primitives::{B256, Bytes};
use futures_util::future::join_all;
use http::StatusCode;
use support::{
    scripted::{Scripted, customer, echo, layer, serve},
    shop::{Answer, App, Purchase, evaluate, send},
};
use tokio::{
    sync::watch,
    task::JoinHandle,
    time::{Instant, timeout},
};
use tower_x402::payment::Verified;

/// The number of payments that are verified at once.
const PLACES: usize = 64;
/// The number of payments that may wait for each permit.
const WAITING: usize = 16;
/// The longest wait.
const PATIENCE: Duration = Duration::from_secs(4);

/// A facilitator that verifies on command, and counts how often it was asked.
struct Gate {
    asked: watch::Receiver<usize>,
    /// The number of payments that it verifies.
    open: watch::Sender<usize>,
}

impl Gate {
    fn facilitator() -> (Scripted, Self) {
        let (asking, asked) = watch::channel(0);
        let (open, opened) = watch::channel(0);
        let facilitator = Scripted::new().verify(move |_, _| {
            let mut opened = opened.clone();
            let mut place = 0;
            asking.send_modify(|asked| {
                *asked += 1;
                place = *asked;
            });
            async move {
                opened.wait_for(|open| *open >= place).await.expect("the test goes on");
                Ok(Verified::default())
            }
        });
        (facilitator, Self { asked, open })
    }

    /// Waits until it was asked this often.
    async fn asked(&mut self, times: usize) {
        let asked = timeout(Duration::from_secs(1), self.asked.wait_for(|asked| *asked >= times)).await;
        assert_eq!(*asked.expect("it is asked at once").unwrap(), times);
    }

    fn open(&self) {
        self.open_for(usize::MAX);
    }

    fn open_for(&self, payments: usize) {
        self.open.send_replace(payments);
    }
}

/// Creates payments of a wallet whose signatures only its contract can verify.
async fn payments(app: &App, count: usize) -> Vec<Purchase> {
    let mut purchase = customer().pay(app, evaluate("x")).await;
    purchase.signature = Bytes::from(vec![7; 65]);
    (0..count as u64)
        .map(|n| {
            purchase.authorization.nonce = B256::left_padding_from(&n.to_be_bytes());
            purchase.clone()
        })
        .collect()
}

fn present(app: &App, purchase: &Purchase) -> JoinHandle<Answer> {
    let (app, request) = (app.clone(), purchase.on(evaluate("x")));
    tokio::spawn(async move { send(&app, request).await })
}

fn is_busy(answer: &Answer) -> bool {
    assert_eq!(
        (answer.status, &answer.headers["retry-after"]),
        (StatusCode::SERVICE_UNAVAILABLE, &"1".parse().unwrap())
    );
    answer.reason() == "busy"
}

#[tokio::test(start_paused = true)]
async fn hundred_concurrent_contract_wallet_payments_are_all_answered() {
    let (facilitator, mut gate) = Gate::facilitator();
    let (app, _) = serve(layer(&Arc::new(facilitator)), echo);
    let payments = payments(&app, 100).await;
    let answers: Vec<_> = payments.iter().map(|purchase| present(&app, purchase)).collect();
    gate.asked(PLACES).await;
    gate.open();
    for answer in join_all(answers).await {
        let answer = answer.unwrap();
        assert_eq!((answer.status, answer.text()), (StatusCode::OK, "x"), "{answer:?}");
    }
    gate.asked(100).await;
}

#[tokio::test(start_paused = true)]
async fn full_queue_refuses_at_once_and_the_wait_is_bounded() {
    let (facilitator, mut gate) = Gate::facilitator();
    // As many places as payments may be worked on.
    let (app, handled) = serve(layer(&Arc::new(facilitator)).max_concurrent(2), echo);
    let payments = payments(&app, 2 + 2 * WAITING + 1).await;
    let before = Instant::now();
    let mut answers: Vec<_> = payments[..2 + 2 * WAITING].iter().map(|purchase| present(&app, purchase)).collect();
    gate.asked(2).await;
    assert!(is_busy(&send(&app, payments.last().unwrap().on(evaluate("x"))).await));
    assert!(before.elapsed() < PATIENCE, "at once");

    for answer in answers.split_off(2) {
        assert!(is_busy(&answer.await.unwrap()));
    }
    assert_eq!(before.elapsed().as_secs(), PATIENCE.as_secs(), "and the others after a while");
    gate.open();
    for answer in answers {
        assert_eq!(answer.await.unwrap().status, StatusCode::OK);
    }
    gate.asked(2).await;
    assert_eq!(handled.load(std::sync::atomic::Ordering::SeqCst), 2, "nobody else was worked for");
    assert_eq!(present(&app, payments.last().unwrap()).await.unwrap().status, StatusCode::OK, "come again later");
}

#[tokio::test(start_paused = true)]
async fn client_that_disconnects_in_the_queue_leaves_its_place_to_another() {
    let (facilitator, mut gate) = Gate::facilitator();
    let (app, _) = serve(layer(&Arc::new(facilitator)).max_concurrent(1), echo);
    let payments = payments(&app, 2 + WAITING).await;
    let (first, rest) = payments.split_first().unwrap();
    let first = present(&app, first);
    gate.asked(1).await;
    let (last, others) = rest.split_last().unwrap();
    let others: Vec<_> = others.iter().map(|purchase| present(&app, purchase)).collect();
    tokio::task::yield_now().await;
    assert!(is_busy(&send(&app, last.on(evaluate("x"))).await), "the line is full");
    others.iter().for_each(JoinHandle::abort);
    join_all(others).await;
    let last = present(&app, last);
    tokio::task::yield_now().await;
    // Only one payment may be worked on at once.
    gate.open_for(1);
    assert_eq!(first.await.unwrap().status, StatusCode::OK);
    gate.open();
    assert_eq!(last.await.unwrap().status, StatusCode::OK);
    gate.asked(2).await;
}
