//! A seller behind nginx: long offers, and the configuration that the guide shows.

use std::sync::Arc;

use alloy_primitives::Address;
use reqwest::{RequestBuilder, StatusCode};
use serde_json::Value;
use support::{
    scripted::{Scripted, customer, layer, not_yet},
    shop::evaluate,
    uploads::serve,
};
use tower_x402::{
    Asset, Network,
    protocol::{MAX_REQUIRED_HEADER, PaymentFlow, decode_header},
    server::{BrowserPage, RequirePaymentLayerBuilder},
};

use super::nginx::Nginx;

/// Two chains with two flows each, two extensions, and a description of this length.
fn offers(description: usize, page: Option<BrowserPage>) -> RequirePaymentLayerBuilder {
    let facilitator = Arc::new(Scripted::new().settle(|_, _| async { Ok(not_yet()) }));
    let other = Asset::new(Network::eip155(1), Address::repeat_byte(0xcc), "USD Coin".to_owned(), "2".to_owned());
    let layer = layer(&facilitator).pay_to_in(other, Address::repeat_byte(0xba));
    let layer = layer.flow(PaymentFlow::Authorization).flow(PaymentFlow::Upfront).browser_page(page);
    layer.description("x".repeat(description)).payment_identifier(true).status_url("/payments/status")
}

/// Sells with so long a description that `PAYMENT-REQUIRED` has about this size.
async fn seller(size: usize, page: Option<BrowserPage>) -> String {
    let (shortest, _) = offered(&serve(offers(0, page.clone())).await).await;
    // In base64, three bytes take four.
    serve(offers((size - shortest) / 4 * 3, page)).await
}

fn client() -> reqwest::Client {
    reqwest::Client::builder().no_proxy().build().unwrap()
}

async fn status(request: RequestBuilder) -> StatusCode {
    request.send().await.unwrap().status()
}

async fn offered(url: &str) -> (usize, Value) {
    let response = client().post(format!("{url}/length")).send().await.unwrap();
    assert_eq!(response.status(), 402);
    let header = &response.headers()["payment-required"];
    (header.len(), decode_header(header.as_bytes(), MAX_REQUIRED_HEADER).unwrap())
}

#[tokio::test]
async fn offers_and_refusals_below_the_warning_pass_nginx_as_it_is() {
    let seller = seller(3_550, None).await;
    let nginx = Nginx::start(&format!("location / {{ proxy_pass {seller}; }}")).await;
    let (size, demand) = offered(&nginx.url).await;
    assert!((3_500..=3_584).contains(&size), "{size}");
    let unsettled = customer().sign(&demand, 0).on(evaluate("")).headers()["payment-signature"].clone();
    let pay = |payment: &str| client().post(format!("{}/length", nginx.url)).header("payment-signature", payment);
    assert_eq!(status(pay("nonsense")).await, 400);
    let response = pay(unsettled.to_str().unwrap()).send().await.unwrap();
    assert_eq!(response.status(), 402, "{response:?}");
    assert!(response.headers().contains_key("payment-response"), "{response:?}");
}

#[tokio::test]
async fn page_below_the_warning_passes_nginx_as_it_is() {
    let seller = seller(2_850, Some(BrowserPage::new())).await;
    let nginx = Nginx::start(&format!("location / {{ proxy_pass {seller}; }}")).await;
    let size = offered(&nginx.url).await.0;
    assert!(size > 2_700, "{size}");
    let browser = client().get(format!("{}/length", nginx.url)).header("accept", "text/html");
    let response = browser.header("user-agent", "Mozilla/5.0").send().await.unwrap();
    assert_eq!(
        (response.status(), &response.headers()["content-type"]),
        (StatusCode::PAYMENT_REQUIRED, &"text/html; charset=utf-8".parse().unwrap())
    );
}

/// The `server` that the guide shows, without TLS, before a seller at this URL.
fn guide(seller: &str) -> String {
    let guide = std::fs::read_to_string(support::repository().join("docs/guide/production.md")).unwrap();
    let block = guide.split("```nginx\nserver {\n").nth(1).expect("the guide has a server").split("\n}\n```").next();
    let lines = block.unwrap().lines().filter(|line| !line.contains("listen ") && !line.contains("ssl_"));
    let text = lines.collect::<Vec<_>>().join("\n");
    assert!(text.contains("http://127.0.0.1:4021;"), "{text}");
    text.replace("http://127.0.0.1:4021;", &format!("{seller};"))
}

#[tokio::test]
async fn long_offers_need_the_line_of_the_guide() {
    let seller = seller(5_000, None).await;
    let bare = Nginx::start(&format!("location / {{ proxy_pass {seller}; }}")).await;
    assert_eq!(status(client().post(format!("{}/length", bare.url))).await, 502);
    let nginx = Nginx::start(&guide(&seller)).await;
    let size = offered(&nginx.url).await.0;
    assert!(size > 4_096, "{size}");
}

#[tokio::test]
async fn offer_behind_the_server_of_the_guide_names_the_public_url() {
    let facilitator = Arc::new(Scripted::new());
    for (layer, origin) in [
        (layer(&facilitator).public_origin("https://api.example"), "https://api.example"),
        (layer(&facilitator).trust_forwarded_proto(true), "http://api.example:8443"),
    ] {
        let nginx = Nginx::start(&guide(&serve(layer).await)).await;
        let request = client().post(format!("{}/length?k=1", nginx.url)).header("host", "api.example:8443");
        // As the next proxy outwards would say, which is not believed.
        let response = request.header("x-forwarded-proto", "ftp").send().await.unwrap();
        let demand: Value =
            decode_header(response.headers()["payment-required"].as_bytes(), MAX_REQUIRED_HEADER).unwrap();
        assert_eq!(demand["resource"]["url"], format!("{origin}/length"), "{demand}");
    }
}

/// What the guide warns of.
#[tokio::test]
async fn stripped_path_or_port_is_missing_in_the_offer_without_a_public_url() {
    let seller = serve(layer(&Arc::new(Scripted::new()))).await;
    let nginx = Nginx::start(&format!("location /api/ {{ proxy_pass {seller}/; }}")).await;
    let response = client().post(format!("{}/api/length", nginx.url)).send().await.unwrap();
    let demand: Value = decode_header(response.headers()["payment-required"].as_bytes(), MAX_REQUIRED_HEADER).unwrap();
    assert_eq!(demand["resource"]["url"], format!("{seller}/length"), "the upstream, which nobody reaches");
}
