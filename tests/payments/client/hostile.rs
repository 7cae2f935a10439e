//! Servers that settle and misbehave, ask for more, or send too much data.

use std::{
    collections::VecDeque,
    future::pending,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use alloy_signer_local::PrivateKeySigner;
use axum::{Router, extract::Request, http::StatusCode, response::IntoResponse};
use serde_json::json;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
};
use tower_x402::client::{
    Budget, Payer, PaymentError, PaymentMiddleware, PaymentOutcome, ReceiptExt, Refusal, RetryPolicy, reconcile,
};

use super::middleware::{buy, client, refusal};
use support::script::*;
use support::{
    chain::{Chain, on_every_chain},
    shop::{PRICE, Shop, try_send},
};

/// Replies without an answer.
fn failures() -> [fn() -> Reply; 4] {
    [silence, too_late, || status(502), cut]
}

/// A good answer after the client has timed out.
fn too_late() -> Reply {
    Box::new(|seen| match settled()(seen) {
        Answer::Response(response) => Answer::Late(Duration::from_millis(500), response),
        other => other,
    })
}

/// Pays 1,000 units to a server with these replies, and returns the outcome.
async fn ended(replies: Vec<Reply>) -> (PaymentOutcome, Budget, Server) {
    let server = Server::paid(required(&[offer(1_000)]), replies).await;
    let budget = budget(10_000);
    let outcome = match buy(&server, &budget).await {
        Ok((_, receipt)) => receipt.outcome,
        Err(error) => PaymentError::of(&error).unwrap().outcome(),
    };
    (outcome, budget, server)
}

fn books(budget: &Budget) -> (u64, u64) {
    (budget.spent().atomic(), budget.reserved().atomic())
}

#[tokio::test]
async fn lost_answer_is_settled_once_and_known_after_a_retry() {
    for failure in failures() {
        let bank = Bank::default();
        let replies = vec![bank.then(failure()), bank.then(failure()), bank.then(settled())];
        let (outcome, budget, server) = ended(replies).await;
        assert_eq!((outcome, books(&budget)), (PaymentOutcome::Settled, (1_000, 0)));
        assert_eq!((bank.taken(), server.payments().len()), (1_000, 3));
    }
}

#[tokio::test]
async fn settled_but_unanswered_payment_is_unknown_and_stays_reserved() {
    for failure in failures() {
        let bank = Bank::default();
        let (outcome, budget, server) = ended((0..9).map(|_| bank.then(failure())).collect()).await;
        assert_eq!((outcome, books(&budget)), (PaymentOutcome::Unknown, (0, 1_000)));
        assert_eq!((bank.taken(), server.payments().len()), (1_000, 5));
        let open: Vec<_> = budget.journal().unresolved().iter().map(|entry| entry.nonce).collect();
        assert_eq!(open, Vec::from_iter(bank.nonces()));
    }
}

#[tokio::test]
async fn settlement_that_is_denied_later_is_not_counted_as_failed() {
    let used = || {
        let reason = "invalid_exact_evm_nonce_already_used";
        let denial = json!({ "success": false, "errorReason": reason, "transaction": "", "network": "eip155:84532" });
        with_settlement(402, denial)
    };
    let denials: [fn() -> Reply; 2] = [|| required_again(1_000), || status(400)];
    for failure in failures() {
        for denial in denials.into_iter().map(|denial| denial()).chain([used()]) {
            let bank = Bank::default();
            let (outcome, budget, _) = ended(vec![bank.then(failure()), denial]).await;
            assert_eq!((outcome, books(&budget)), (PaymentOutcome::Unknown, (0, 1_000)));
            assert_eq!(bank.taken(), 1_000);
        }
    }
}

#[tokio::test]
async fn second_402_after_a_settlement_is_not_paid() {
    let bank = Bank::default();
    let (outcome, budget, server) = ended((0..5).map(|_| bank.then(required_again(1_000))).collect()).await;
    assert_eq!((outcome, books(&budget)), (PaymentOutcome::Unknown, (0, 1_000)));
    assert_eq!((bank.taken(), server.payments().len()), (1_000, 1));
}

#[tokio::test]
async fn price_raised_on_retry_is_not_paid() {
    let raises: [fn() -> Reply; 2] = [
        || required_again(9_000),
        || {
            let mut more = settlement();
            more["amount"] = "9000".into();
            with_settlement(200, more)
        },
    ];
    for raise in raises {
        let bank = Bank::default();
        let (outcome, budget, server) = ended(vec![bank.then(cut()), bank.then(raise()), settled()]).await;
        assert_eq!((outcome, books(&budget)), (PaymentOutcome::Unknown, (0, 1_000)));
        let payments = server.payments();
        assert_eq!(payments.len(), 2);
        assert_eq!(payments[0], payments[1]);
        assert_eq!(bank.taken(), 1_000);
    }
}

#[tokio::test]
async fn price_above_the_limit_is_refused_each_time() {
    let server = Server::paid(required(&[offer(10_001)]), vec![]).await;
    let budget = budget(100_000);
    for _ in 0..3 {
        assert!(matches!(refusal(&buy(&server, &budget).await.unwrap_err()), Refusal::AbovePaymentLimit { .. }));
    }
    assert_eq!((server.payments().len(), books(&budget)), (0, (0, 0)));
}

/// 50 MB.
pub const FLOOD: u64 = 50 << 20;

#[tokio::test]
async fn body_of_a_402_with_the_header_is_not_read() {
    for chunked in [false, true] {
        let header = format!("payment-required: {}", required(&[offer(1_000)]));
        let (address, sent) = flood(header, "", chunked).await;
        let budget = budget(10_000);
        let response = client(&budget).post(format!("http://{address}/")).body("x").send().await.unwrap();
        assert_eq!((response.status().as_u16(), response.receipt().unwrap().outcome), (200, PaymentOutcome::Settled));
        assert_eq!(books(&budget), (1_000, 0));
        // The rest is what the sockets hold; none of it reached the client's memory.
        let sent = stands_still(&sent).await;
        assert!(sent < FLOOD / 2, "{sent} bytes were taken");
    }
}

/// A server that answers 402 with this header and a huge body, and counts the bytes that it could send. It serves requests paid in v2.
pub async fn flood(header: String, start: &'static str, chunked: bool) -> (std::net::SocketAddr, Arc<AtomicU64>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let sent = Arc::new(AtomicU64::new(0));
    let count = sent.clone();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            tokio::spawn(serve(stream, header.clone(), start, chunked, count.clone()));
        }
    });
    (address, sent)
}

async fn serve(
    mut stream: TcpStream,
    header: String,
    start: &'static str,
    chunked: bool,
    sent: Arc<AtomicU64>,
) -> std::io::Result<()> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\nx") {
        head.push(stream.read_u8().await?);
    }
    if String::from_utf8_lossy(&head).to_lowercase().contains("\npayment-signature:") {
        let receipt = encode(settlement());
        let answer = format!("HTTP/1.1 200 OK\r\npayment-response: {receipt}\r\ncontent-length: 0\r\n\r\n");
        return stream.write_all(answer.as_bytes()).await;
    }
    let length = if chunked { "transfer-encoding: chunked".into() } else { format!("content-length: {FLOOD}") };
    let answer = format!("HTTP/1.1 402 Payment Required\r\n{header}\r\n{length}\r\n\r\n");
    stream.write_all(answer.as_bytes()).await?;
    if chunked {
        stream.write_all(format!("{FLOOD:x}\r\n").as_bytes()).await?;
    }
    let mut chunk = [b' '; 16 << 10];
    chunk[..start.len()].copy_from_slice(start.as_bytes());
    for _ in 0..FLOOD / chunk.len() as u64 {
        stream.write_all(&chunk).await?;
        sent.fetch_add(chunk.len() as u64, Ordering::SeqCst);
        chunk.fill(b' ');
    }
    if chunked {
        stream.write_all(b"\r\n0\r\n\r\n").await?;
    }
    Ok(())
}

pub async fn stands_still(count: &AtomicU64) -> u64 {
    let mut before = count.load(Ordering::SeqCst);
    support::eventually::eventually("nothing more comes", async || {
        tokio::time::sleep(Duration::from_millis(200)).await;
        std::mem::replace(&mut before, count.load(Ordering::SeqCst)) == before
    })
    .await;
    before
}

on_every_chain! {
    shop_behind_a_broken_proxy_is_paid_once,
    shop_that_never_answers_is_paid_once,
}

#[derive(Clone, Copy)]
enum Failure {
    Silence,
    BadGateway,
    Cut,
}

/// A shop behind a proxy that loses the answers to the first `times` paid requests.
async fn broken_proxy(shop: &Shop, failure: Failure, times: usize) -> String {
    let app = shop.app(shop.layer());
    let failures = Arc::new(Mutex::new(VecDeque::from(vec![failure; times])));
    let handler = move |request: Request| {
        let (app, failures) = (app.clone(), failures.clone());
        async move {
            let paid = request.headers().contains_key("payment-signature");
            let response = try_send(&app, request).await.unwrap();
            let failure = paid.then(|| failures.lock().unwrap().pop_front()).flatten();
            match failure {
                None => response,
                Some(Failure::Silence) => pending().await,
                Some(Failure::BadGateway) => StatusCode::BAD_GATEWAY.into_response(),
                Some(Failure::Cut) => std::panic::resume_unwind(Box::new("cut")),
            }
        }
    };
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/evaluate", listener.local_addr().unwrap());
    tokio::spawn(async move { axum::serve(listener, Router::new().fallback(handler)).await });
    url
}

/// Pays once through such a proxy, and returns the outcome and the balance of the payee.
async fn buy_through(chain: &dyn Chain, failure: Failure, times: usize) -> (PaymentOutcome, Budget, u64) {
    let shop = Shop::open(chain).await;
    let url = broken_proxy(&shop, failure, times).await;
    let key = PrivateKeySigner::random();
    chain.mint(key.address(), 10 * PRICE).await;
    let budget = budget(10 * PRICE);
    let client =
        PaymentMiddleware::new(Payer::builder(key.clone()).asset(chain.asset()).budget(budget.clone()).build())
            .retry(
                RetryPolicy::default()
                    .max_attempts(3)
                    .attempt_timeout(Duration::from_secs(2))
                    .first_pause(Duration::from_millis(5)),
            )
            .client(reqwest::Client::builder().no_proxy())
            .unwrap();
    let outcome = match client.post(url).body("my answer").send().await {
        Ok(response) => response.receipt().unwrap().outcome,
        Err(error) => PaymentError::of(&error).unwrap().outcome(),
    };
    assert_eq!(shop.handled(), 1, "the work was done once");
    assert_eq!(chain.balance(key.address()).await, 9 * PRICE);
    (outcome, budget, chain.balance(shop.pay_to).await)
}

async fn shop_behind_a_broken_proxy_is_paid_once(chain: &dyn Chain) {
    for failure in [Failure::Silence, Failure::BadGateway, Failure::Cut] {
        let (outcome, budget, income) = buy_through(chain, failure, 2).await;
        assert_eq!((outcome, books(&budget), income), (PaymentOutcome::Settled, (PRICE, 0), PRICE));
    }
}

async fn shop_that_never_answers_is_paid_once(chain: &dyn Chain) {
    for failure in [Failure::Silence, Failure::BadGateway, Failure::Cut] {
        let (outcome, budget, income) = buy_through(chain, failure, 9).await;
        assert_eq!((outcome, books(&budget), income), (PaymentOutcome::Unknown, (0, PRICE), PRICE));
        // anvil takes the block two epochs ago for final.
        for _ in 0..65 {
            chain.mine().await;
        }
        let found = reconcile(&budget, chain.provider()).await.unwrap();
        assert_eq!((found.paid, books(&budget)), (1, (PRICE, 0)));
    }
}
