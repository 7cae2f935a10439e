//! Discovery with facilitators that are honest, old, sloppy or hostile.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use axum::{
    Router,
    body::Body,
    extract::{RawQuery, Request},
    response::Response,
};
use http::StatusCode;
use serde_json::{Value, json};
use tower_x402::{Network, protocol::OfferError};
use x402_bazaar::{DiscoveryClient, DiscoveryClientBuilder, DiscoveryEnd, DiscoveryError, DiscoveryFilter};

fn all() -> DiscoveryFilter {
    DiscoveryFilter::default()
}

/// A facilitator with this handler, and the number of requests to it.
async fn facilitator<F, R>(answer: F) -> (DiscoveryClientBuilder, Arc<AtomicU64>)
where
    F: Fn(Request) -> R + Clone + Send + Sync + 'static,
    R: Future<Output = Response> + Send + 'static,
{
    let asked = Arc::new(AtomicU64::new(0));
    let count = asked.clone();
    let answer = move |request: Request| {
        count.fetch_add(1, Ordering::SeqCst);
        answer(request)
    };
    let listener = tokio::net::TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
    let url = format!("http://{}/facilitator/", listener.local_addr().unwrap());
    tokio::spawn(async move { axum::serve(listener, Router::new().fallback(answer)).await });
    (DiscoveryClient::builder(url), asked)
}

/// A facilitator that answers every request with this.
async fn saying(status: u16, body: impl Into<String>) -> DiscoveryClientBuilder {
    let body = body.into();
    facilitator(move |_| {
        let body = body.clone();
        async move { Response::builder().status(status).body(Body::from(body)).unwrap() }
    })
    .await
    .0
}

fn page(items: Vec<Value>, total: Option<u64>) -> Value {
    json!({ "x402Version": 2, "items": items, "pagination": { "limit": 100, "offset": 0, "total": total } })
}

fn offer() -> Value {
    json!({ "scheme": "exact", "network": "eip155:84532", "amount": "1000", "maxTimeoutSeconds": 60,
        "asset": "0x036CbD53842c5426634e7929541eC2318f3dCF7e", "payTo": "0x70997970C51812dc3A010C7d01b50e0d17dc79C8",
        "extra": { "name": "USDC", "version": "2" } })
}

fn resource(url: &str) -> Value {
    json!({ "resource": url, "type": "http", "x402Version": 2, "accepts": [offer()], "lastUpdated": "2026-11-21T10:15:30.000Z",
        "description": "Evaluates", "mimeType": "application/json", "serviceName": "Judge", "tags": ["a", "b"],
        "extensions": { "bazaar": { "info": { "input": { "type": "http", "method": "POST" } }, "schema": {} } },
        "quality": { "calls": 7 } })
}

#[tokio::test]
async fn resource_is_read_with_its_offers_and_unknown_fields() {
    let client = saying(200, page(vec![resource("https://judge.example/evaluate")], Some(1)).to_string()).await;
    let found = client.build().unwrap().list(&all()).await.unwrap();
    assert_eq!((found.end, found.skipped, found.resources.len()), (DiscoveryEnd::Complete, 0, 1));
    let resource = &found.resources[0];
    assert_eq!(resource.url.as_str(), "https://judge.example/evaluate");
    assert_eq!((resource.kind.as_str(), resource.x402_version), ("http", 2));
    let offers = resource.offers();
    let offer = offers[0].as_ref().unwrap();
    assert_eq!((offer.network(), offer.amount.to::<u64>()), (Network::BASE_SEPOLIA, 1_000));
    assert_eq!(resource.description.as_deref(), Some("Evaluates"));
    assert_eq!(resource.service_name.as_deref(), Some("Judge"));
    assert_eq!(resource.tags, ["a", "b"]);
    assert_eq!(resource.last_updated, Some(1_795_256_130));
    assert_eq!(resource.info().unwrap()["input"]["method"], "POST");
    assert_eq!(resource.raw.read().unwrap()["quality"], json!({ "calls": 7 }));
}

#[tokio::test]
async fn list_of_v1_and_with_other_field_names_is_read() {
    let in_v1 = json!({ "scheme": "exact", "network": "base-sepolia", "maxAmountRequired": "2000", "maxTimeoutSeconds": 60,
        "asset": "0x036CbD53842c5426634e7929541eC2318f3dCF7e", "payTo": "0x70997970C51812dc3A010C7d01b50e0d17dc79C8",
        "resource": "https://old.example/", "description": "Old", "mimeType": "text/plain",
        "extra": { "name": "USDC", "version": "2" } });
    let elsewhere = json!({ "scheme": "exact", "network": "solana:x", "amount": "1", "asset": "a", "payTo": "p", "maxTimeoutSeconds": 1 });
    let items = vec![
        json!({ "resource": "https://old.example/", "x402Version": 1, "accepts": [in_v1, elsewhere, "nonsense"],
            "lastUpdated": 1_766_458_335, "metadata": {} }),
        json!({ "url": "https://other.example/", "accepts": [], "tags": "none", "lastUpdated": "yesterday" }),
    ];
    let client = saying(200, page(items, None).to_string()).await.build().unwrap();
    let found = client.list(&all()).await.unwrap();
    let [old, other] = found.resources.as_slice() else { panic!("{found:?}") };
    assert_eq!((old.description.as_deref(), old.mime_type.as_deref()), (Some("Old"), Some("text/plain")));
    assert_eq!((old.kind.as_str(), old.x402_version, old.last_updated), ("http", 1, Some(1_766_458_335)));
    let offers = old.offers();
    assert_eq!(offers[0].as_ref().unwrap().amount.to::<u64>(), 2_000);
    assert!(matches!(offers[1], Err(OfferError::Network(_))) && offers.len() == 2, "{offers:?}");
    assert_eq!((other.accepts.len(), other.tags.len(), other.last_updated), (0, 0, None));
}

#[tokio::test]
async fn unreadable_items_are_skipped_and_counted() {
    let bad = [
        json!(null),
        json!("https://judge.example/"),
        json!([]),
        json!({}),
        json!({ "resource": "https://judge.example/" }),
        json!({ "resource": "https://judge.example/", "accepts": {} }),
        json!({ "resource": "/relative", "accepts": [] }),
        json!({ "resource": "ftp://judge.example/", "accepts": [] }),
        json!({ "resource": "javascript:alert(1)", "accepts": [] }),
        json!({ "resource": "https://me:secret@judge.example/", "accepts": [] }),
        json!({ "resource": 7, "accepts": [] }),
    ];
    let mut items = bad.to_vec();
    items.push(resource("https://judge.example/evaluate"));
    let client = saying(200, page(items, Some(12)).to_string()).await.build().unwrap();
    let found = client.list(&all()).await.unwrap();
    assert_eq!((found.resources.len(), found.skipped, found.end), (1, bad.len(), DiscoveryEnd::Complete));
}

/// A facilitator with `total` resources that returns at most `most` per page.
async fn shelf(total: u64, most: u64) -> (DiscoveryClientBuilder, Arc<AtomicU64>) {
    facilitator(move |request: Request| async move {
        assert_eq!(request.uri().path(), "/facilitator/discovery/resources");
        let query = request.uri().query().unwrap();
        let number = |name: &str| -> u64 {
            let found = query.split('&').find_map(|pair| pair.strip_prefix(name)?.strip_prefix('='));
            found.unwrap().parse().unwrap()
        };
        let (from, limit) = (number("offset"), number("limit").min(most));
        let items = (from..total.min(from + limit)).map(|n| resource(&format!("https://judge.example/{n}"))).collect();
        Response::new(Body::from(page(items, Some(total)).to_string()))
    })
    .await
}

#[tokio::test]
async fn pages_are_read_until_there_are_no_more() {
    for (total, most, pages) in [(0, 10, 1), (1, 10, 1), (10, 10, 1), (25, 10, 3), (25, 7, 4)] {
        let (client, asked) = shelf(total, most).await;
        let found = client.build().unwrap().list(&all()).await.unwrap();
        assert_eq!(found.end, DiscoveryEnd::Complete);
        let paths: Vec<_> = found.resources.iter().map(|resource| resource.url.path().to_owned()).collect();
        assert_eq!(paths, (0..total).map(|n| format!("/{n}")).collect::<Vec<_>>());
        assert_eq!(asked.load(Ordering::SeqCst), pages, "{total} in pages of {most}");
    }
    let (client, asked) = shelf(1_000, 10).await;
    let found = client.build().unwrap().list(&all()).await.unwrap();
    assert_eq!((found.resources.len(), found.end, asked.load(Ordering::SeqCst)), (200, DiscoveryEnd::Limit, 20));
}

#[tokio::test]
async fn endless_list_is_read_up_to_the_limit() {
    // The offset is ignored, and no total is said.
    let (client, asked) = facilitator(|_| async {
        Response::new(Body::from(page(vec![resource("https://judge.example/")], None).to_string()))
    })
    .await;
    let found = client.build().unwrap().list(&all()).await.unwrap();
    assert_eq!((found.resources.len(), found.end, asked.load(Ordering::SeqCst)), (1, DiscoveryEnd::Repeated, 2));
    // Something new, for ever.
    let number = Arc::new(AtomicU64::new(0));
    let (client, asked) = facilitator(move |_| {
        let url = format!("https://judge.example/{}", number.fetch_add(1, Ordering::SeqCst));
        async move { Response::new(Body::from(page(vec![resource(&url)], None).to_string())) }
    })
    .await;
    let found = client.build().unwrap().list(&all()).await.unwrap();
    assert_eq!((found.resources.len(), found.end, asked.load(Ordering::SeqCst)), (20, DiscoveryEnd::Limit, 20));
}

#[tokio::test]
async fn failed_page_keeps_the_earlier_ones() {
    let (client, _) = facilitator(|request: Request| async move {
        match request.uri().query().unwrap().contains("offset=0") {
            true => Response::new(Body::from(page(vec![resource("https://judge.example/")], Some(9)).to_string())),
            false => Response::builder().status(502).body(Body::empty()).unwrap(),
        }
    })
    .await;
    let found = client.build().unwrap().list(&all()).await.unwrap();
    let failed = DiscoveryEnd::Failed(DiscoveryError::Status(StatusCode::BAD_GATEWAY));
    assert_eq!((found.resources.len(), found.end), (1, failed));
}

#[tokio::test]
async fn answer_that_is_not_a_list_is_an_error() {
    for status in [204, 302, 402, 404, 500] {
        let error = saying(status, "{}").await.build().unwrap().list(&all()).await.unwrap_err();
        assert_eq!(error, DiscoveryError::Status(StatusCode::from_u16(status).unwrap()));
    }
    for body in
        ["", "null", "[]", "[[],{}]", "{}", r#"{"items":7}"#, "<html></html>", &page(vec![], None).to_string()[..9]]
    {
        let error = saying(200, body).await.build().unwrap().list(&all()).await.unwrap_err();
        assert!(matches!(error, DiscoveryError::Unreadable(_)), "{body}: {error}");
    }
    let huge = format!(r#"{{"items":[{}]}}"#, " ".repeat(6 << 20));
    assert_eq!(saying(200, huge).await.build().unwrap().list(&all()).await.unwrap_err(), DiscoveryError::TooLarge);
    let (silent, _) = facilitator(|_| std::future::pending()).await;
    let silent = silent.request_timeout(Duration::from_millis(50)).build().unwrap();
    assert_eq!(silent.page(&all(), 0).await.unwrap_err(), DiscoveryError::Timeout);
    let nobody = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
    let nobody = DiscoveryClient::builder(format!("http://{nobody}")).build().unwrap();
    assert_eq!(nobody.page(&all(), 0).await.unwrap_err(), DiscoveryError::Unreachable);
    for url in ["", "judge.example", "ftp://judge.example", "https://"] {
        assert_eq!(DiscoveryClient::builder(url).build().unwrap_err(), DiscoveryError::Url, "{url}");
    }
    let keyed = DiscoveryClient::builder("https://judge.example/secret?key=secret").build().unwrap();
    assert!(!format!("{keyed:?}").contains("secret"));
}

#[tokio::test]
async fn filter_is_sent_as_query() {
    let (client, _) = facilitator(|request: Request| async move {
        let RawQuery(query) = RawQuery(request.uri().query().map(str::to_owned));
        let echoed = resource(&format!("https://judge.example/?{}", query.unwrap()));
        Response::new(Body::from(page(vec![echoed], Some(1)).to_string()))
    })
    .await;
    let filter = all().kind("http").pay_to("0xa&b").scheme("exact").network("eip155:84532").extension("bazaar");
    let page = client.build().unwrap().page(&filter, 14).await.unwrap();
    let asked = page.resources[0].url.query().unwrap();
    let expected = "type=http&payTo=0xa%26b&scheme=exact&network=eip155%3A84532&extensions=bazaar&limit=100&offset=14";
    assert_eq!(asked, expected);
}
