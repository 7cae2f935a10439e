//! 402s that proxies pass on: nginx answers 502 to heads above 4 KB, unless it is told otherwise. `tests/peers/proxies.rs` has a real one.

use std::{
    io,
    sync::{Arc, Mutex},
};

use axum::body::Body;
use http::{Request, StatusCode};
use serde_json::json;
use support::{
    scripted::{Scripted, customer, echo, layer, not_yet, serve},
    shop::{Answer, App, demand, evaluate, paid, send},
};
use tower_x402::{Asset, Network, protocol::PaymentFlow, server::RequirePaymentLayerBuilder};
use x402_bazaar::{BodyType, Discovery};

/// Offers of a size that the description makes up for.
fn offers(chains: u64, description: usize) -> RequirePaymentLayerBuilder {
    let payee = alloy_primitives::Address::repeat_byte(0xba);
    let facilitator = Arc::new(Scripted::new().settle(|_, _| async { Ok(not_yet()) }));
    let first = layer(&facilitator).flow(PaymentFlow::Authorization).flow(PaymentFlow::Upfront).browser_page(None);
    let asset = |chain| Asset::new(Network::eip155(chain), payee, "USD Coin".to_owned(), "2".to_owned());
    let all = (1..=chains).fold(first, |layer, chain| layer.pay_to_in(asset(chain), payee));
    all.description("x".repeat(description)).payment_identifier(true).status_url("/payments/status")
}

fn app_of(layer: RequirePaymentLayerBuilder) -> App {
    serve(layer, echo).0
}

/// The size of what the layer adds to the head of a response.
fn size(answer: &Answer) -> usize {
    ["payment-required", "payment-response"]
        .iter()
        .filter_map(|name| answer.headers.get(*name))
        .map(|value| value.len())
        .sum()
}

#[tokio::test]
async fn refusals_are_no_longer_than_offers_that_are_long() {
    for (chains, description) in [(0, 1_600), (1, 1_200), (3, 0), (3, 600)] {
        let app = app_of(offers(chains, description));
        let offered = send(&app, evaluate("a")).await;
        assert!(size(&offered) > 3_072, "{}", size(&offered));
        let purchase = customer().sign(&demand(&offered), 0);
        let unsettled = send(&app, purchase.on(evaluate("a"))).await;
        assert_eq!(
            (unsettled.status, unsettled.reason().as_str()),
            (StatusCode::PAYMENT_REQUIRED, "insufficient_funds")
        );
        assert!(unsettled.settlement().is_some());
        let unreadable = send(&app, paid(evaluate("a"), &json!({ "x402Version": 2 }))).await;
        assert_eq!(unreadable.status, StatusCode::BAD_REQUEST);
        for refusal in [unsettled, unreadable] {
            assert!(size(&refusal) <= size(&offered), "{} {}", size(&refusal), size(&offered));
            let said = demand(&refusal);
            assert_eq!(said["accepts"][0], demand(&offered)["accepts"][0], "it can be paid all the same");
            assert_eq!(said["resource"]["url"], demand(&offered)["resource"]["url"]);
        }
    }
}

#[tokio::test]
async fn short_refusals_say_all_that_offers_say() {
    let app = app_of(offers(0, 100));
    let offered = demand(&send(&app, evaluate("a")).await);
    let purchase = customer().sign(&offered, 0);
    let mut refused = demand(&send(&app, purchase.on(evaluate("a"))).await);
    assert_eq!(refused["error"], "insufficient_funds");
    refused["error"] = offered["error"].clone();
    assert_eq!(refused, offered);
}

/// The log of this thread.
#[derive(Clone, Default)]
struct Logged(Arc<Mutex<Vec<u8>>>);

impl io::Write for Logged {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Builds a layer, and returns what it logs.
fn said(layer: RequirePaymentLayerBuilder) -> String {
    let logged = Logged::default();
    let writer = logged.clone();
    let subscriber = tracing_subscriber::fmt().with_ansi(false).with_writer(move || writer.clone()).finish();
    tracing::subscriber::with_default(subscriber, || layer.build().unwrap());
    String::from_utf8(logged.0.lock().unwrap().clone()).unwrap()
}

#[tokio::test]
async fn offers_that_proxies_do_not_pass_on_are_warned_of_when_they_are_made() {
    assert_eq!(said(offers(1, 500)), "");
    let long = offers(1, 2_300);
    let size = size(&send(&app_of(offers(1, 2_300)), Request::get("/").body(Body::empty()).unwrap()).await);
    assert!(size > 3_584, "{size}");
    let warned = said(long);
    assert!(warned.contains("WARN") && warned.contains("proxy_buffer_size 8k;"), "{warned}");
    assert_eq!(warned.lines().count(), 1, "{warned}");
}

/// Some clients drop all extensions of a 402 if one has no schema.
#[tokio::test]
async fn each_extension_of_a_402_has_a_schema_that_its_info_matches() {
    let discovery =
        Discovery::post(BodyType::Json).body(json!({ "output": "2 + 2 = 4" })).output(json!({ "score": 1 }));
    let layer = offers(0, 10).public_origin("https://api.example").extension(discovery.extension().unwrap());
    let extensions = demand(&send(&app_of(layer), evaluate("a")).await)["extensions"].clone();
    let names: Vec<_> = extensions.as_object().unwrap().keys().cloned().collect();
    assert_eq!(names, ["bazaar", "payment-identifier", "payment-status"]);
    for (name, extension) in extensions.as_object().unwrap() {
        assert!(extension["schema"].is_object(), "{name}");
        assert!(jsonschema::is_valid(&extension["schema"], &extension["info"]), "{name}: {extension}");
    }
}
