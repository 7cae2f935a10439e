//! Uploads to our seller, which answers before it has read them, over real connections: no client sees a reset.
//!
//! A few of each size run with the other tests; fifty of each with
//! `cargo nextest run -p tower-x402-tests --test payments uploads --run-ignored all`.

use std::sync::Arc;

use support::{
    eventually::in_time,
    scripted::{Scripted, away, customer, layer},
    shop::{evaluate, paid},
    uploads::{SIZES, paid_by_layer, paid_by_middleware, seller, serve},
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
};
use tower_x402::{Usdc, server::RequirePaymentLayerBuilder};

#[tokio::test(flavor = "multi_thread")]
async fn middleware_pays_for_uploads_of_any_size() {
    paid_by_middleware(&seller().await, &SIZES, 2).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn tower_client_pays_for_uploads_of_any_size() {
    paid_by_layer(&seller().await, &SIZES, 2).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "fifty of each size"]
async fn middleware_pays_for_uploads_of_any_size_fifty_times() {
    paid_by_middleware(&seller().await, &SIZES, 50).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "fifty of each size"]
async fn tower_client_pays_for_uploads_of_any_size_fifty_times() {
    paid_by_layer(&seller().await, &SIZES, 50).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn refusals_arrive_while_the_body_is_sent() {
    let facilitator = Arc::new(Scripted::new().verify(|_, _| async { Err(away().into()) }));
    let by_length = |layer: RequirePaymentLayerBuilder| {
        layer.max_request_body(1_000).price_with_body(|_, _| std::future::ready(Ok(Usdc::from_atomic(1_000).into())))
    };
    let (fixed, read) = (serve(layer(&facilitator)).await, serve(by_length(layer(&facilitator))).await);
    let client = reqwest::Client::builder().no_proxy().build().unwrap();
    let offer = client.post(format!("{fixed}/length")).send().await.unwrap().headers()["payment-required"].clone();
    let offer = serde_json::from_slice(&base64::Engine::decode(&base64::prelude::BASE64_STANDARD, offer).unwrap());
    let payment = customer().sign(&offer.unwrap(), 0).on(evaluate("")).headers()["payment-signature"].clone();
    let nonsense = paid(evaluate(""), &serde_json::json!({ "x402Version": 7 })).headers()["payment-signature"].clone();
    for (url, payment, status) in [
        (&fixed, None, 402),
        (&read, None, 413),
        (&fixed, Some(nonsense.clone()), 400),
        (&read, Some(nonsense), 413),
        (&fixed, Some(payment.clone()), 503),
        (&read, Some(payment), 413),
    ] {
        for size in SIZES {
            for attempt in 0..3 {
                let mut request = client.post(format!("{url}/length")).body(vec![b'x'; size]);
                if let Some(payment) = &payment {
                    request = request.header("payment-signature", payment);
                }
                let response = request.send().await;
                let response =
                    response.unwrap_or_else(|error| panic!("{status} for {size} bytes, {attempt}: {error:?}"));
                assert_eq!(response.status(), status, "{size} bytes");
                response.bytes().await.unwrap();
            }
        }
    }
}

/// Sends this head and no body, and returns what comes back until the seller closes.
async fn answer_to(url: &str, head: &str) -> String {
    let mut stream = TcpStream::connect(url.trim_start_matches("http://")).await.unwrap();
    stream.write_all(head.as_bytes()).await.unwrap();
    let mut answer = String::new();
    in_time("the seller closes", stream.read_to_string(&mut answer)).await.unwrap();
    answer
}

#[tokio::test]
async fn client_that_waits_to_be_asked_for_its_body_is_not_asked() {
    let url = seller().await;
    let head = "POST /length HTTP/1.1\r\nhost: a\r\ncontent-length: 300000\r\nexpect: 100-continue\r\n\r\n";
    let answer = answer_to(&url, head).await;
    assert!(answer.starts_with("HTTP/1.1 402 "), "{answer}");
}

#[tokio::test]
async fn connection_serves_on_when_the_body_was_drained() {
    let url = seller().await;
    let mut stream = TcpStream::connect(url.trim_start_matches("http://")).await.unwrap();
    for _ in 0..3 {
        stream.write_all(b"POST /length HTTP/1.1\r\nhost: a\r\ncontent-length: 300000\r\n\r\n").await.unwrap();
        let mut answer = vec![0; 12];
        in_time("it is answered before the body was sent", stream.read_exact(&mut answer)).await.unwrap();
        assert_eq!(answer, b"HTTP/1.1 402");
        in_time("the body is taken", stream.write_all(&vec![b'x'; 300_000])).await.unwrap();
        let mut rest = Vec::new();
        while !rest.ends_with(b"}") {
            in_time("the answer ends", stream.read_buf(&mut rest)).await.unwrap();
        }
    }
}

#[tokio::test]
async fn body_that_says_that_it_is_endless_closes_the_connection() {
    let url = seller().await;
    let answer = answer_to(&url, "POST /length HTTP/1.1\r\nhost: a\r\ncontent-length: 40000000\r\n\r\n").await;
    assert!(answer.starts_with("HTTP/1.1 402 "), "{answer}");
}
