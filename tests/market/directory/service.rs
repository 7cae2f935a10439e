//! Callers that are slow, many, or lie about who they are.

use std::{convert::Infallible, future::pending, sync::Arc, task::Poll, time::Duration};

use alloy_signer_local::PrivateKeySigner;
use axum::body::{Body, Bytes};
use http::{Request, StatusCode};
use http_body_util::BodyExt as _;
use serde_json::{Value, json};
use tokio::{net::TcpListener, sync::Notify};
use tower::ServiceExt as _;
use tower_x402::{ManualClock, server::PeerAddress};
use x402_devnet::Orphans;
use x402_directory::{DirectoryBuilder, DirectoryService, DirectoryStore};

use super::stage::{PRICE, Stage, checker};
use support::{authorization::unix_now, devnet::DevnetChain};

async fn service(adjust: impl FnOnce(DirectoryBuilder) -> DirectoryBuilder) -> DirectoryService {
    let store = DirectoryStore::in_memory().await.unwrap();
    adjust(DirectoryService::builder(store).private_hosts(true).rate(1e6, 1e6)).build().unwrap()
}

/// The status, and the error if it is one.
async fn ask(service: &DirectoryService, request: Request<Body>) -> (u16, String) {
    let response = service.clone().oneshot(request).await.unwrap();
    let status = response.status();
    let must_say_when = matches!(status, StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE);
    assert!(!must_say_when || response.headers().contains_key("retry-after"));
    let body = response.into_body().collect().await.unwrap().to_bytes();
    let body: Value = serde_json::from_slice(&body).unwrap_or_default();
    (status.as_u16(), body["error"].as_str().unwrap_or_default().to_owned())
}

fn post(path: &str, body: impl Into<Body>) -> Request<Body> {
    Request::post(path).body(body.into()).unwrap()
}

fn get(path: &str) -> Request<Body> {
    Request::get(path).body(Body::empty()).unwrap()
}

/// A body that does not come, and word when it is waited for.
fn slow() -> (Body, Arc<Notify>) {
    let waited = Arc::new(Notify::new());
    let tell = waited.clone();
    let stream = futures_util::stream::poll_fn(move |_| {
        tell.notify_one();
        Poll::<Option<Result<Bytes, Infallible>>>::Pending
    });
    (Body::from_stream(stream), waited)
}

#[tokio::test]
async fn slow_bodies_block_nobody() {
    let service = service(|directory| directory.max_writes(1)).await;
    let (body, waited) = slow();
    let slow_one = tokio::spawn(service.clone().oneshot(post("/evidence", body)));
    support::eventually::in_time("the slow one is read", waited.notified()).await;
    for path in ["/evidence", "/cards"] {
        assert_eq!(ask(&service, post(path, "{}")).await, (400, "bad_request".into()));
    }
    slow_one.abort();
}

#[tokio::test(start_paused = true)]
async fn body_has_a_deadline() {
    let service = service(|directory| directory).await;
    for path in ["/evidence", "/cards"] {
        assert_eq!(ask(&service, post(path, slow().0)).await, (408, "body_too_slow".into()));
    }
}

#[tokio::test]
async fn silent_evaluators_block_no_report() {
    let service = service(|directory| directory.max_writes(1)).await;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let connected = Arc::new(Notify::new());
    let tell = connected.clone();
    tokio::spawn(async move {
        let _connection = listener.accept().await;
        tell.notify_one();
        pending::<()>().await;
    });
    let listing = post("/cards", json!({ "url": url }).to_string());
    let listing = tokio::spawn(service.clone().oneshot(listing));
    connected.notified().await;
    assert_eq!(ask(&service, post("/cards", "{}")).await, (503, "unavailable".into()));
    assert_eq!(ask(&service, post("/evidence", "{}")).await, (400, "bad_request".into()));
    listing.abort();
}

#[tokio::test]
async fn readers_beyond_the_limit_are_answered_503() {
    let service = service(|directory| directory.max_reads(0)).await;
    for path in ["/cards", "/evidence"] {
        assert_eq!(ask(&service, get(path)).await, (503, "unavailable".into()), "{path}");
    }
    assert_eq!(ask(&service, get("/healthz")).await.0, 200);
    assert_eq!(ask(&service, post("/evidence", "{}")).await, (400, "bad_request".into()), "reports are not delayed");
}

/// Anybody can write these.
#[tokio::test]
async fn caller_is_not_read_from_headers() {
    let service = service(|directory| directory.rate(0.001, 3.0)).await;
    let mut answers = Vec::new();
    for number in 0..5 {
        let mut request = get("/cards");
        for name in ["x-forwarded-for", "x-real-ip", "forwarded", "cf-connecting-ip"] {
            request.headers_mut().insert(name, format!("192.0.2.{number}").parse().unwrap());
        }
        request.extensions_mut().insert(PeerAddress([198, 51, 100, 1].into()));
        answers.push(ask(&service, request).await.0);
    }
    assert_eq!(answers, [200, 200, 200, 429, 429]);
}

#[tokio::test]
async fn addresses_of_one_network_are_one_caller() {
    let service = service(|directory| directory.rate(0.001, 3.0)).await;
    let from = async |address: &str| {
        let mut request = get("/cards");
        request.extensions_mut().insert(PeerAddress(address.parse().unwrap()));
        ask(&service, request).await.0
    };
    for host in 1..4 {
        assert_eq!(from(&format!("2001:db8::{host}")).await, 200);
    }
    assert_eq!(from("2001:db8::ffff:4").await, 429);
    assert_eq!(from("2001:db8:0:1::1").await, 200);
}

/// Cards that do not answer take a round of upkeep a long time.
#[tokio::test]
async fn slow_cards_do_not_delay_the_deletion_of_reports() {
    for undone in [true, false] {
        let chain = DevnetChain::start_with(None, 4).await;
        let clock = Arc::new(ManualClock::at(unix_now() + 1_000));
        let stage = Stage::set_with(&chain, |directory| {
            let day = Duration::from_secs(86_400);
            let directory = directory.payment_checker(checker(&chain)).card_ages(Duration::ZERO, day, 30 * day);
            let directory = directory.clock(clock.clone());
            if undone { directory } else { directory.report_retention(Duration::ZERO) }
        })
        .await;
        let (booth, payer): (_, PrivateKeySigner) = (stage.booth(&["prose"]).await, stage.payer().await);
        let evaluator = booth.payee.address();
        let report = stage.pay(&payer, evaluator, PRICE).await.report(evaluator, &payer).await;
        assert_eq!(stage.post(&report).await.0, 201);
        if undone {
            chain.devnet.reorg(1, Orphans::Lost);
            (0..10).for_each(|_| chain.devnet.mine());
        }
        let asked = booth.hang();
        let service = stage.service.clone();
        let round = tokio::spawn(async move { service.upkeep_once().await });
        support::eventually::in_time("the evaluator is asked", asked.notified()).await;
        assert_eq!(stage.count().await, 0, "undone: {undone}");
        round.abort();
    }
}
