//! Reconciliation with servers, which are believed only if they report that they were paid.

use std::time::Duration;

use alloy_primitives::B256;
use alloy_signer_local::PrivateKeySigner;
use axum::{
    body::Body,
    http::{StatusCode, header},
    response::{IntoResponse, Response},
};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tower_x402::{
    Usdc,
    client::{Budget, Journal, Payer, PaymentMiddleware, Reconciliation, RetryPolicy, reconcile_with_servers},
    protocol::PaymentFlow,
    server::PaymentStatus,
};

use super::middleware::middleware;
use support::script::*;
use support::{
    chain::{Chain, on_every_chain},
    shop::{App, PRICE, Shop, send},
};

async fn asked(budget: &Budget) -> Reconciliation {
    reconcile_with_servers(budget, reqwest::Client::builder().no_proxy()).await.unwrap()
}

fn books(budget: &Budget) -> (u64, u64) {
    (budget.spent().atomic(), budget.reserved().atomic())
}

/// A 402 that declares a status URL.
fn declaring(url: &str) -> String {
    let extensions = json!({ "payment-status": { "info": { "url": url } } });
    let accepts = [offer(1_000).to_requirements()];
    encode(json!({ "x402Version": 2, "resource": { "url": "u" }, "accepts": accepts, "extensions": extensions }))
}

/// A server that answers no payment, and reports `status` for each.
async fn server(url: &str, status: impl Fn() -> Response + Send + Sync + 'static) -> Server {
    let required = declaring(url);
    Server::start(move |seen| match (&seen.payment, seen.path.starts_with("/status")) {
        (_, true) => Answer::Response(status()),
        (None, _) => Answer::Response(required_402(&required)),
        (Some(_), _) => Answer::Cut,
    })
    .await
}

/// A budget with one open payment to this server.
async fn left_open(server: &Server) -> Budget {
    let budget = budget(10_000);
    let client = middleware(&budget)
        .retry(RetryPolicy::default().max_attempts(1))
        .client(reqwest::Client::builder().no_proxy())
        .unwrap();
    client.post(server.url()).send().await.unwrap_err();
    assert_eq!(books(&budget), (0, 1_000));
    budget
}

fn questions(server: &Server) -> Vec<String> {
    let asked = server.seen().into_iter().filter(|seen| seen.path.starts_with("/status"));
    asked.map(|seen| format!("{} {}", seen.method, seen.path)).collect()
}

fn says(status: Value) -> impl Fn() -> Response + Send + Sync + 'static {
    move || axum::Json(status.clone()).into_response()
}

#[tokio::test]
async fn payment_that_its_server_reports_as_paid_is_spent() {
    for state in ["settled", "final"] {
        let status = json!({ "state": state, "transaction": transaction(), "block": 7 });
        let server = server("/status?of=payments", says(status)).await;
        let budget = left_open(&server).await;
        let open = budget.journal().unresolved().remove(0);
        let found = asked(&budget).await;
        assert_eq!((found.paid, found.void, found.open, found.spent), (1, 0, 0, Usdc::from_atomic(1_000)));
        assert_eq!(books(&budget), (1_000, 0));
        assert!(budget.journal().unresolved().is_empty());
        let (asset, payer, nonce) = (open.asset, open.payer, open.nonce);
        let question = format!("/status?of=payments&network=eip155%3A84532&asset={asset}&payer={payer}&nonce={nonce}");
        assert_eq!(questions(&server), [format!("GET {question}")]);
        assert_eq!(asked(&budget).await, Reconciliation::default(), "nothing is left to ask");
        assert_eq!(questions(&server).len(), 1);
    }
}

#[tokio::test]
async fn no_answer_of_a_server_releases_an_amount() {
    let paid_by_nothing = json!({ "state": "settled" });
    let garbled = json!({ "state": "settled", "transaction": "0x12" });
    let mut answers = vec![paid_by_nothing, garbled, json!({ "state": "refunded", "transaction": transaction() })];
    answers.extend(["failed", "dead", "pending", "submitted", "unknown"].map(|state| json!({ "state": state })));
    answers.extend(["failed", "dead"].map(|state| json!({ "state": state, "transaction": transaction() })));
    answers.extend([json!([]), json!(null)]);
    for answer in answers {
        let server = server("/status", says(answer.clone())).await;
        let budget = left_open(&server).await;
        let found = asked(&budget).await;
        assert_eq!((found.paid, found.void, found.open), (0, 0, 1), "{answer}");
        assert_eq!((books(&budget), questions(&server).len()), ((0, 1_000), 1), "{answer}");
    }
    for code in [404, 402, 500] {
        let settled = json!({ "state": "settled", "transaction": transaction() }).to_string();
        let server = server("/status", move || (StatusCode::from_u16(code).unwrap(), settled.clone()).into_response());
        let budget = left_open(&server.await).await;
        assert_eq!((asked(&budget).await.open, books(&budget)), (1, (0, 1_000)), "{code}");
    }
}

#[tokio::test]
async fn huge_endless_and_redirected_answers_resolve_nothing() {
    // 6 MB of space, and then good news.
    let good = json!({ "state": "settled", "transaction": transaction() }).to_string();
    let huge = format!("{}{good}", " ".repeat(6 << 20));
    let server_of_much = server("/status", move || huge.clone().into_response()).await;
    let budget = left_open(&server_of_much).await;
    assert_eq!((asked(&budget).await.open, books(&budget)), (1, (0, 1_000)));

    let endless = server("/status", || {
        let spaces = futures_util::stream::repeat_with(|| Ok::<_, std::io::Error>(" ".repeat(1 << 10)));
        Response::new(Body::from_stream(spaces))
    });
    let budget = left_open(&endless.await).await;
    assert_eq!((asked(&budget).await.open, books(&budget)), (1, (0, 1_000)));

    let friend = Server::start(move |_| Answer::Response(good.clone().into_response())).await;
    let url = friend.url();
    let mover = server("/status", move || (StatusCode::FOUND, [(header::LOCATION, url.clone())]).into_response());
    let budget = left_open(&mover.await).await;
    assert_eq!((asked(&budget).await.open, books(&budget)), (1, (0, 1_000)));
    assert!(friend.seen().is_empty(), "no other origin learns of the payment");
}

#[tokio::test]
async fn only_the_paid_origin_is_asked() {
    let settled = json!({ "state": "settled", "transaction": transaction() });
    let friend = Server::start(move |_| Answer::Response(axum::Json(settled.clone()).into_response())).await;
    for url in [friend.url(), format!("//{}/status", friend.address), "https://127.0.0.1/status".into()] {
        let server = server(&url, || StatusCode::OK.into_response()).await;
        let budget = left_open(&server).await;
        assert_eq!(budget.journal().unresolved()[0].status_url, None, "{url}");
        assert_eq!((asked(&budget).await.open, books(&budget)), (1, (0, 1_000)));
    }
    assert!(friend.seen().is_empty());
}

#[tokio::test]
async fn edited_status_url_on_another_origin_is_not_asked() {
    let settled = json!({ "state": "settled", "transaction": transaction() });
    let friend = Server::start(move |_| Answer::Response(axum::Json(settled.clone()).into_response())).await;
    let server = server("/status", || StatusCode::OK.into_response()).await;
    let path = TempPath::new("status-edited");
    let budget = Budget::builder().journal(Journal::open(&path.0).unwrap()).build();
    let client = middleware(&budget)
        .retry(RetryPolicy::default().max_attempts(1))
        .client(reqwest::Client::builder().no_proxy())
        .unwrap();
    client.post(server.url()).send().await.unwrap_err();
    drop((client, budget));
    let ours = format!("http://{}/status", server.address);
    let text = std::fs::read_to_string(&path.0).unwrap();
    assert!(text.contains(&ours), "{text}");
    std::fs::write(&path.0, text.replace(&ours, &friend.url())).unwrap();
    let budget = Budget::builder().journal(Journal::open(&path.0).unwrap()).build();
    assert_eq!((asked(&budget).await.open, books(&budget)), (1, (0, 1_000)));
    assert!(friend.seen().is_empty() && questions(&server).is_empty());
}

#[tokio::test]
async fn unreachable_server_leaves_its_payments_open_and_others_are_asked() {
    let status = json!({ "state": "settled", "transaction": transaction() });
    let alive = server("/status", says(status)).await;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let gone = listener.local_addr().unwrap();
    let proxy = tokio::spawn({
        let required = declaring("/status");
        async move {
            let app = axum::Router::new().fallback(move |request: axum::extract::Request| {
                let required = required.clone();
                async move {
                    assert!(!request.headers().contains_key("payment-signature"), "it is gone by then");
                    required_402(&required)
                }
            });
            axum::serve(listener, app).await
        }
    });
    let budget = budget(100_000);
    let http = reqwest::Client::builder().no_proxy().build().unwrap();
    let url: reqwest::Url = format!("http://{gone}/evaluate").parse().unwrap();
    for _ in 0..20 {
        let asked = http.post(url.clone()).send().await.unwrap();
        drop(payer(&budget).pay(&http::Method::POST, &url, asked.headers(), None).await.unwrap().unwrap());
    }
    proxy.abort();
    assert!(proxy.await.unwrap_err().is_cancelled());
    let client = middleware(&budget)
        .retry(RetryPolicy::default().max_attempts(1))
        .client(reqwest::Client::builder().no_proxy())
        .unwrap();
    client.post(alive.url()).send().await.unwrap_err();

    let found = asked(&budget).await;
    assert_eq!((found.paid, found.open, books(&budget)), (1, 20, (1_000, 20_000)));
}

#[tokio::test]
async fn silent_server_is_not_asked_about_all_its_payments() {
    let required = declaring("/status");
    let server = Server::start(move |seen| match seen.path.starts_with("/status") {
        true => Answer::Cut,
        false => Answer::Response(required_402(&required)),
    })
    .await;
    let budget = budget(100_000);
    let http = reqwest::Client::builder().no_proxy().build().unwrap();
    let asked_for = http.get(server.url()).send().await.unwrap();
    for _ in 0..40 {
        let (url, headers) = (asked_for.url(), asked_for.headers());
        drop(payer(&budget).pay(&http::Method::GET, url, headers, None).await.unwrap().unwrap());
    }
    assert_eq!((asked(&budget).await.open, books(&budget)), (40, (0, 40_000)));
    assert!((1..=8).contains(&questions(&server).len()), "{}", questions(&server).len());
}

on_every_chain! {
    shop_reports_what_it_was_paid,
}

async fn shop_reports_what_it_was_paid(chain: &dyn Chain) {
    let shop = Shop::open(chain).await;
    let app = shop.app(shop.layer().flow(PaymentFlow::Upfront).status_url("/payments/status"));
    let status = PaymentStatus::new(tower_x402::facilitator::Facilitator::ledger(&shop.facilitator).clone());
    let paid_for = move |request: axum::extract::Request| {
        let app: App = app.clone();
        async move {
            let is_paid = request.headers().contains_key("payment-signature");
            let answer = send(&app, request).await;
            if is_paid {
                // Paid, and never heard of.
                std::panic::resume_unwind(Box::new("cut"));
            }
            let mut response = Response::new(Body::from(answer.body));
            (*response.status_mut(), *response.headers_mut()) = (answer.status, answer.headers);
            response
        }
    };
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/evaluate", listener.local_addr().unwrap());
    let router = axum::Router::new().route_service("/payments/status", status).fallback(paid_for);
    tokio::spawn(async move { axum::serve(listener, router).await });

    let path = TempPath::new(&format!("status-{}", chain.rpc_url().replace(['/', ':'], "")));
    let key = PrivateKeySigner::random();
    chain.mint(key.address(), PRICE).await;
    {
        let budget = Budget::builder().journal(Journal::open(&path.0).unwrap()).build();
        let payer = Payer::builder(key).asset(chain.asset()).budget(budget.clone()).build();
        let client =
            PaymentMiddleware::new(payer).retry(RetryPolicy::default().max_attempts(2).first_pause(Duration::ZERO));
        let client = client.client(reqwest::Client::builder().no_proxy()).unwrap();
        client.post(&url).body("my answer").send().await.unwrap_err();
        assert_eq!(books(&budget), (0, PRICE));
    }
    let budget = Budget::builder().journal(Journal::open(&path.0).unwrap()).build();
    let open = budget.journal().unresolved().remove(0);
    assert_eq!(open.status_url, Some(url.replace("/evaluate", "/payments/status")));
    let found = asked(&budget).await;
    assert_eq!((found.paid, books(&budget)), (1, (PRICE, 0)));
    let transfers = chain.token_transfers(shop.pay_to).await;
    let recorded = std::fs::read_to_string(&path.0).unwrap();
    let named: Vec<B256> = transfers.iter().map(|transfer| transfer.transaction).collect();
    assert!(named.len() == 1 && recorded.contains(&named[0].to_string()), "{recorded}");
}
